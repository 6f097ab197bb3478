"""Every file that a run writes or reads is whole, or its damage is said: flipped bits, cut and deleted files of every kind.

`KINDS` lists the kinds; a file that no kind knows fails the test. docs/files.md is this list, written by
`PYTHONPATH=. python tests/faults/test_faults_files.py`.
"""

from __future__ import annotations

import json
import logging
import random
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from support.recorded import MODEL

import workbench as wb
from workbench.base.errors import RunError, WorkbenchError
from workbench.base.files import crc32_of
from workbench.engines.local_engine.loading import resolve
from workbench.jobs.runner import job_of
from workbench.replay.run import controllers
from workbench.runs import checkpoint, evaluate, updates
from workbench.runs.folder import write_json
from workbench.runs.resume import check_data, check_resumable
from workbench.runs.settings import files_crc32

PLAN: dict[str, Any] = {"batch_size": 4, "save_freq": 1, "trace_freq": 1, "test_freq": 1, "display": None}
NOTEBOOK = "notebooks/201_train_grpo.ipynb"


def letters(response: str) -> dict[str, Any]:
    """Right by its letters; of most responses a new question comes."""
    number = sum(map(ord, response)) % 7
    new = {"prompt": f"{number} + {len(response)} =", "reward_model": {"ground_truth": str(number + len(response))}}
    return {"score": number / 6, "new_row": new if number % 3 else None}


def rows_of(path: Path) -> Any:
    return wb.datasets.adaptive(wb.datasets.growing(wb.rows(str(path), max_prompt_length=256)))


def make(place: Path) -> None:
    """A folder with one of every kind: a run with everything on, models, data files, a saved batch."""
    shutil.copytree(MODEL, place / "model")
    (place / "data").mkdir()
    plain = [
        {"prompt": one["prompt"][-1]["content"], "ground_truth": one["reward_model"]["ground_truth"]}
        for one in wb.rows("data/arith/train.parquet", limit=8)
    ]
    (place / "data" / "rows.jsonl").write_text("".join(json.dumps(one) + "\n" for one in plain))
    lines = ["prompt,ground_truth", *('"{prompt}",{ground_truth}'.format(**one) for one in plain)]
    (place / "data" / "rows.csv").write_text("\n".join(lines) + "\n")
    import pandas as pd

    pd.DataFrame(plain).to_parquet(place / "data" / "rows.parquet")
    evaluate.save_samples(place / "data" / "written.parquet", {name: [one[name] for one in plain] for name in plain[0]})
    pictures = [{"pixels": torch.arange(6.0)}, {}, {"pixels": torch.ones(3)}]
    wb.DataProto({"x": torch.arange(12.0).view(3, 4)}, {"inputs": pictures, "word": ["a", "b", "c"]}).save(
        place / "batch"
    )
    engine = wb.engines.local(place / "model", lr=1e-3, device="cpu")
    engine.save(place / "saved")
    pipe = wb.recipes.grpo(
        engine, wb.rewards.Reward(letters, in_process=True), group_size=2, max_tokens=8, kl_coef=0.01
    )
    rows = rows_of(place / "data" / "rows.jsonl")
    write_json(
        place / "record.json", {"notebook": NOTEBOOK, "crc32": crc32_of(Path(NOTEBOOK)), "parameters": {"lr": 1e-3}}
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WORKBENCH_JOB_RECORD", str(place / "record.json"))
        wb.train_blocking(
            pipe, rows, eval_rows=wb.rows(str(place / "data" / "rows.csv"))[:4], steps=2, run=place / "run", **PLAN
        )
    (place / "record.json").unlink()


# --- how each is read -----------------------------------------------------------------------------


def of_batch(batch: wb.DataProto) -> str:
    columns = {name: batch[name] for name in batch.columns}
    plain = {name: one.tolist() if isinstance(one, torch.Tensor) else list(one) for name, one in columns.items()}
    return repr((plain, dict(batch.meta_info), dict(batch.origins)))


def of_trace(place: Path, step: int) -> str:
    trace = wb.load_run(place / "run").traces[step]
    phases = [
        (one.stage, one.wrote, one.metrics, one.settings, one.source, one.seconds, of_batch(one.batch)) for one in trace
    ]
    return repr((of_batch(trace.start), phases))


def of_update(place: Path, step: int) -> str:
    found = updates.read(place / "run" / "updates", step)
    return repr((of_batch(found.start), of_batch(found.inputs), found.controllers))


def settings_of(place: Path) -> dict[str, Any]:
    """As a resumed run has them, from a whole file."""
    return wb.load_run(place / "run").settings


def resumed_with(place: Path, **changed: Any) -> None:
    """What a resumed run would say of other files; its own settings are whole."""
    settings = settings_of(place)
    engines = {**settings["engines"], "actor": {**settings["engines"]["actor"], **changed.pop("actor", {})}}
    check_resumable(place / "run", {**settings, "engines": engines, **changed}, "auto", ())


def of_model(place: Path) -> str:
    """As it is opened, for a run that began with it."""
    wb.engines.local(place / "model", device="cpu")
    resumed_with(place, actor={"files_crc32": files_crc32(place / "model")})
    return "whole"


def of_rows(place: Path, name: str) -> str:
    rows = wb.rows(str(place / "data" / name))
    if rows.data_hash != HASHES[place, name]:
        resumed_with(place, data_hash=rows.data_hash)
    return repr(list(rows))


HASHES: dict[tuple[Path, str], str] = {}
"""What a run that began with a file has in its settings."""


def of_learned(place: Path) -> str:
    rows = rows_of(place / "data" / "rows.jsonl")
    rows.restore(place / "run", 2)
    check_data(checkpoint.read_state(place / "run" / "checkpoints" / "step_000002"), rows, settings_of(place)["train"])
    return repr(list(rows))


def from_the_one_before(place: Path) -> bool:
    return checkpoint.latest(place / "run" / "checkpoints").step == 1


def of_the_checkpoint(place: Path) -> bool:
    """Whether a resumed run takes the checkpoint's copy."""
    _, changes, notes = check_resumable(place / "run", SETTINGS[place], "auto", ())
    return not changes and "written again" in notes[0]


SETTINGS: dict[Path, dict[str, Any]] = {}


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of file."""

    files: str
    """As the table names them."""
    pattern: str
    """Their paths in the folder of `make`."""
    covered: str
    changed: str
    """What a reader says of one that has changed."""
    missing: str = ""
    """What is said of one that is gone, where it is not the same."""
    read: Callable[[Path], Any] | None = None
    """Reads all that the file says; None where nothing is computed from it."""
    named: str = ""
    """What an error must name, where it is not the file."""
    repaired: Callable[[Path], bool] | None = None
    """Whether what goes on from it goes on right."""
    says: str = ""
    """What a reading that raises nothing must say of damage."""


STEP = r"step_0+(?P<step>\d)"
BATCH = "the crc32 in `meta.json`"
AGAIN = "refused by name; the run is made again from a copy, or the step recorded again"
KINDS = [
    Kind(
        files="`settings.json`", pattern=r"run/settings\.json", read=lambda place: wb.load_run(place / "run").settings,
        covered="`text_crc32` at its end; a copy in each checkpoint",
        changed="refused by name; a resume compares with the newest checkpoint's copy and writes it again",
        repaired=of_the_checkpoint, named="settings.json",
    ),
    Kind(
        files="`metrics.jsonl`", pattern=r"run/metrics\.jsonl", says="lacks the rows of steps",
        read=lambda place: (wb.load_run(place / "run").rows, wb.load_run(place / "run").notes),
        covered="`text_crc32` at the end of each line; steps have no gaps, and reach the newest checkpoint and the summary",
        changed="the line and its step are refused by name",
        missing="`run.notes`, and those of a resume, name the steps without a row",
    ),
    Kind(
        files="`summary.json`", pattern=r"run/summary\.json", says="died",
        read=lambda place: (dict(wb.load_run(place / "run").summary), wb.load_run(place / "run").state),
        covered="`text_crc32` at its end", changed="refused by name", missing="the run is `died`; a resume writes it again",
    ),
    Kind(
        files="`job.json`", pattern=r"run/job\.json", read=lambda place: job_of(place / "run"),
        covered="`text_crc32` at its end", changed="refused by name, where the job is resumed",
    ),
    Kind(
        files="`traces/*/trace.json`", pattern=rf"run/traces/{STEP}/trace\.json", read=of_trace,
        covered="`text_crc32` at its end", changed="refused by name", missing="there is no trace of that step",
    ),
    Kind(
        files="`meta.json` of a trace's phase", pattern=rf"run/traces/{STEP}/[^/]+/meta\.json", read=of_trace,
        covered="`text_crc32` at its end", changed="refused by name",
    ),
    Kind(
        files="`tensors.safetensors` of a trace's phase", pattern=rf"run/traces/{STEP}/[^/]+/tensors\.safetensors", read=of_trace,
        covered=f"{BATCH} of each column's blocks of 512 rows, compared when they are first read",
        changed="the file and the column are refused by name",
    ),
    Kind(
        files="`objects.parquet` of a trace's phase", pattern=rf"run/traces/{STEP}/[^/]+/objects\.parquet", read=of_trace,
        covered=f"{BATCH}, compared when a column is first read", changed="refused by name",
    ),
    Kind(
        files="`traces/*/kept.json`", pattern=rf"run/traces/{STEP}/kept\.json", named="kept.json",
        read=lambda place, step: (wb.load_run(place / "run").traces.why(step), controllers(place / "run", step)),
        covered="`text_crc32` at its end", changed="a warning names it; the trace counts as due, controllers come from updates",
        missing="the trace counts as due, controllers come from updates", says="recorded",
    ),
    Kind(
        files="`updates/*/update.json`", pattern=rf"run/updates/{STEP}/update\.json", read=of_update,
        covered="`text_crc32` at its end", changed="refused by name",
    ),
    Kind(
        files="batches of `updates/*/`", pattern=rf"run/updates/{STEP}/(start|inputs)/[a-z]+\.[a-z]+", read=of_update,
        covered="the crc32 in `update.json`, and as batches", changed="refused by name",
    ),
    Kind(
        files="`checkpoints/*/`: weights, optimizers, state, settings, `pending/`", pattern=rf"run/checkpoints/{STEP}/.*",
        read=lambda place, step: wb.load_run(place / "run").checkpoint(step), repaired=from_the_one_before,
        covered="size and crc32 in `manifest.json`, which ends in a `text_crc32`",
        changed="refused by name; a resume goes on from the checkpoint before",
    ),
    Kind(
        files="`val/*.parquet`", pattern=rf"run/val/{STEP}\.parquet", read=lambda place, step: of_batch(wb.load_run(place / "run").val(step)),
        covered="a crc32 over all cells in the parquet metadata", changed="refused by name",
        missing="refused, naming the steps there are", named="step",
    ),
    Kind(
        files="`grown.jsonl`, `difficulty.jsonl` (rows that learn)", pattern=r"run/(grown|difficulty)\.jsonl", read=of_learned,
        covered="a hash over their lines in each checkpoint's cursor", changed="a resume refuses it by name",
    ),
    Kind(
        files="`tensorboard/`, `curves.png`", pattern=r"run/(tensorboard/.*|curves\.png)",
        covered="nothing: made from `metrics.jsonl`, and again by a resume", changed="nothing is computed from them",
    ),
    Kind(
        files="`notebook.ipynb`, `recoveries.jsonl`, `lock.json`", pattern=r"run/(notebook(\.\d+)?\.ipynb|recoveries\.jsonl|lock\.json)",
        covered="nothing: people open and save the notebook, and read of recoveries; the lock is the system's", changed="nothing is computed from them",
    ),
    Kind(
        files="a model folder that an engine saved (`save`, `save_merged`, `export`)", pattern=r"saved/.*",
        read=lambda place: str(resolve(place / "saved")),
        covered="size and crc32 in `manifest.json`, which ends in a `text_crc32`", changed="refused by name when it is opened",
        missing="without `manifest.json` it is any model folder", says="saved",
    ),
    Kind(
        files="any other model folder (of a hub; `data/` here, which git covers)", pattern=r"model/.*", read=of_model, named="files_crc32|model",
        covered="nothing, until a run begins with it: its settings have a crc32 over weights, configuration and tokenizer",
        changed="resume and replay of that run refuse it by the engine's role",
    ),
    Kind(
        files="data files: parquet, jsonl, csv …", pattern=r"data/rows\.(?P<suffix>[a-z]+)", named="data_hash|rows",
        read=lambda place, suffix: of_rows(place, f"rows.{suffix}"),
        covered="nothing, until a run begins with them: its settings have a hash over all rows",
        changed="a resume of that run refuses them (`data_hash`)",
    ),
    Kind(
        files="generations that an evaluation saved as parquet", pattern=r"data/written\.parquet",
        read=lambda place: repr(list(wb.rows(str(place / "data" / "written.parquet")))),
        covered="a crc32 over all cells in the parquet metadata", changed="refused by name",
    ),
    Kind(
        files="a batch that `DataProto.save` wrote", pattern=r"batch/[a-z]+\.[a-z]+",
        read=lambda place: of_batch(wb.DataProto.load(place / "batch")),
        covered=f"`meta.json` by a `text_crc32` at its end, the others by {BATCH}", changed="refused by name",
    ),
]  # fmt: skip


def kind_of(name: str) -> tuple[Kind, dict[str, Any]]:
    """The kind of a file, and what its path says."""
    matches = [(kind, found) for kind in KINDS if (found := re.fullmatch(kind.pattern, name))]
    assert len(matches) == 1, f"{name}: of {len(matches)} kinds; tests/faults/test_faults_files.py lists them"
    kind, found = matches[0]
    return kind, {key: int(text) if text.isdigit() else text for key, text in found.groupdict().items()}


# --- damage ---------------------------------------------------------------------------------------


class Warned(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def outcome(place: Path, name: str, before: Any, *, gone: bool = False) -> str:
    """What a reader makes of a damaged file: `refused`, `repaired`, `harmless`, or `said`."""
    kind, where = kind_of(name)
    if kind.read is None:
        return "harmless"
    named = kind.named or re.escape(Path(name).name)
    warned = Warned()
    logging.getLogger("workbench").addHandler(warned)
    try:
        found = kind.read(place, **where)
    except (WorkbenchError, FileNotFoundError) as error:
        assert re.search(named, str(error)) or (gone and re.search("no |not in", str(error))), f"{name}: {error}"
        return "repaired" if kind.repaired is not None and kind.repaired(place) else "refused"
    finally:
        logging.getLogger("workbench").removeHandler(warned)
    if any(re.search(named, line) for line in warned.lines):
        return "refused"
    if repr(found) == before:
        return "harmless"
    assert kind.says and kind.says in repr(found) and kind.says not in before, f"{name} was read silently: {found}"
    return "said"


def damages(
    place: Path, names: list[str], draw: random.Random, flips: int
) -> Iterator[tuple[str, str, Callable[[bytes], bytes | None]]]:
    """(file, what is done to it, its content then), of each kind: so many flips, a cut, a deletion."""

    def flipped(content: bytes) -> bytes:
        bit = draw.randrange(min(len(content), 64) if draw.random() < 0.25 else len(content)) * 8 + draw.randrange(8)
        changed = bytearray(content)
        changed[bit // 8] ^= 1 << bit % 8
        return bytes(changed)

    of: dict[str, list[str]] = {}
    for name in names:
        if (place / name).stat().st_size:
            of.setdefault(kind_of(name)[0].files, []).append(name)
    for there in of.values():
        for _ in range(flips):
            yield draw.choice(there), "flip", flipped
        yield draw.choice(there), "cut", lambda content: content[: draw.randrange(len(content))]
        yield draw.choice(there), "gone", lambda content: None


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    make(folder)
    HASHES.update({(folder, name.name): wb.rows(str(name)).data_hash for name in (folder / "data").glob("rows.*")})
    SETTINGS[folder] = settings_of(folder)
    return folder


def files_in(place: Path) -> list[str]:
    return sorted(str(path.relative_to(place)) for path in place.rglob("*") if path.is_file())


def harmed(place: Path, seed: int, flips: int) -> Counter[tuple[str, str, str]]:
    """(kind, damage, outcome) → how often."""
    names, found = files_in(place), Counter[tuple[str, str, str]]()
    before: dict[str, Any] = {}
    for name, what, change in damages(place, names, random.Random(seed), flips):
        kind, where = kind_of(name)
        if kind.read is not None and name not in before:
            before[name] = repr(kind.read(place, **where))
        path = place / name
        content = path.read_bytes()
        changed = change(content)
        if changed is None:
            path.unlink()
        else:
            path.write_bytes(changed)
        try:
            found[kind.files, what, outcome(place, name, before.get(name), gone=what != "flip")] += 1
        finally:
            path.write_bytes(content)
    return found


def table(found: Counter[tuple[str, str, str]]) -> str:
    rows = [f"{files[:60]:60} {what:5} {count:4} {how}" for (files, what, how), count in sorted(found.items())]
    return "\n".join(rows)


@pytest.mark.slow
def test_every_kind_of_file_is_listed(place: Path) -> None:
    kinds = {kind_of(name)[0].files for name in files_in(place)}
    assert kinds == {kind.files for kind in KINDS} - {"`notebook.ipynb`, `recoveries.jsonl`, `lock.json`"} | kinds


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "flips"), [(1, 2), pytest.param(2, 20, marks=pytest.mark.long)])
def test_a_flip_a_cut_a_deletion_of_any_file_is_refused_repaired_or_harmless(
    place: Path, seed: int, flips: int
) -> None:
    found = harmed(place, seed, flips)
    print(table(found))
    flipped = Counter({key: count for key, count in found.items() if key[1] == "flip"})
    assert flipped.total() >= flips * (len(KINDS) - 1) and {how for *_, how in flipped} <= {
        "refused",
        "repaired",
        "harmless",
    }
    covered = {kind.files for kind in KINDS if kind.read is not None and not kind.covered.startswith("nothing")}
    loud = {files for files, _, how in flipped if how in ("refused", "repaired")}
    assert covered <= loud, covered - loud


def test_F5_without_settings_a_resume_compares_with_its_checkpoint(place: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(place / "run", tmp_path / "r"))
    (run / "settings.json").unlink()
    settings = settings_of(place)
    other = {**settings, "engines": {"actor": {**settings["engines"]["actor"], "lr": 1e-2}}}
    with pytest.raises(RunError, match=r"other settings; found engines\.actor\.lr: 0\.001 → 0\.01"):
        check_resumable(run, other, "auto", ())
    _, _, notes = check_resumable(run, settings, "auto", ())
    assert "settings.json is written again from the checkpoint" in notes[0]
    for copy in run.glob("checkpoints/*/settings.json"):
        copy.unlink()
    with pytest.raises(RunError, match="settings.json is missing, and the run's checkpoints have no copy"):
        check_resumable(run, settings, "auto", ())


def test_a_replay_and_an_audit_say_that_the_model_folder_has_changed(place: Path) -> None:
    run, path = wb.load_run(place / "run"), place / "model" / "tokenizer.json"
    assert "tokenizer" not in run.audit(2).left
    content = path.read_bytes()
    path.write_bytes(content + b" ")
    try:
        assert "other files than the run's at" in run.audit(2).left["tokenizer"]
        with pytest.raises(RunError, match="'actor' began with has changed.*other files than the run's"):
            run.stepper(1)
    finally:
        path.write_bytes(content)


def test_a_run_that_lacks_nothing_has_no_notes(place: Path) -> None:
    assert wb.load_run(place / "run").notes == ()


def test_the_table_of_the_docs_is_this_list() -> None:
    assert TABLE.read_text(encoding="utf-8") == text()


# --- docs/files.md --------------------------------------------------------------------------------

TABLE = Path(__file__).parents[2] / "docs" / "files.md"
HEADER = """# Checksums of a run's files

Every file of a run folder, a model folder and a data set has a checksum or is listed here as having none.
`tests/faults/test_faults_files.py` flips bits in each kind of file, cuts and deletes files, and fails for a file that no row of the table
names. The same file writes this table: `PYTHONPATH=.:tests python tests/faults/test_faults_files.py`.

A checksum is a crc32. A JSON document, and each line of `metrics.jsonl`, ends with the key `text_crc32`, the checksum of all text before
this key. If you change such a file by hand, remove the key.

| file | checksum | if the file was changed | if the file is missing |
|---|---|---|---|
"""


FOOTER = """
An engine's state that `save_state` or `save_sharded` wrote by itself has its files' sizes in `engine.json` alone; in a run it is
part of a checkpoint, whose manifest covers it. What a kill left of a write (`.*.part`, `.staging-*`) is never read.
"""


def text() -> str:
    lines = [f"| {one.files} | {one.covered} | {one.changed} | {one.missing or 'the same'} |" for one in KINDS]
    return HEADER + "\n".join(lines) + "\n" + FOOTER


if __name__ == "__main__":
    TABLE.write_text(text(), encoding="utf-8")
