"""Somebody else's run folder: nothing of it runs, at whatever field it is planted, until `load_run(path, trust=True)`."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import workbench as wb
from workbench.base.errors import RunError, WorkbenchError
from workbench.runs import checkpoint
from workbench.runs.folder import write_json
from workbench.runs.settings import files_crc32

ROOT = Path(__file__).parents[2]
REWARD = "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return float(len(solution_str))\n"
EVIL = "open({marker!r}, 'a').write('x')\n"


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A project with a reward file of its own, a model, and a run of two steps in `runs/mine`; it is the current folder."""
    folder = tmp_path_factory.mktemp("project")
    before = Path.cwd()
    os.chdir(folder)
    shutil.copytree(ROOT / "data" / "tiny-arith", "model")
    Path("rew.py").write_text(REWARD)
    engine = wb.engines.local("model", lr=1e-3, device="cpu")
    rows = wb.rows(str(ROOT / "data" / "arith" / "train.parquet"), max_prompt_length=256)[:8]
    pipe = wb.recipes.grpo(engine, reward="rew.py", group_size=2, max_tokens=8)
    plan: dict[str, Any] = {"steps": 2, "batch_size": 2, "save_freq": 1, "trace_freq": 1}
    wb.train_blocking(pipe, rows, run="runs/mine", trackers=(), **plan)
    yield folder
    os.chdir(before)


@pytest.fixture(autouse=True)
def here(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project)


@pytest.fixture
def foreign(project: Path, tmp_path: Path) -> Callable[[Callable[[Any, Path], None]], tuple[Path, Path]]:
    """A copy of the run as somebody else sends it: their settings, and beside them a file that writes the marker when it runs."""

    def made(change: Callable[[Any, Path], None]) -> tuple[Path, Path]:
        folder, marker = Path("runs") / f"from_{tmp_path.name}", tmp_path / "marker"
        if not folder.exists():
            shutil.copytree("runs/mine", folder)
        (folder / "evil.py").write_text(EVIL.format(marker=str(marker)) + REWARD)
        settings = json.loads((project / "runs/mine/settings.json").read_text())
        settings.pop("crc32", None)
        change(settings, folder)
        write_json(folder / "settings.json", settings)
        return folder, marker

    return made


def reward_of(settings: Any) -> Any:
    return next(one for one in settings["pipeline"] if one["name"] == "reward")["arguments"]


def scored_again(folder: Path, **trust: bool) -> Any:
    """The reward of a recorded step, run again where that can be: rows in another order need it."""
    s = wb.load_run(folder, **trust).stepper(2, at="reward")
    try:
        return s.run(until="advantage")
    finally:
        for stage in s.pipeline:
            if hasattr(stage, "function") and hasattr(stage.function, "close"):
                stage.function.close()


# --- rewards ---------------------------------------------------------------------------------------


def test_a_reward_file_of_ones_own_project_runs_again_as_before(project: Path) -> None:
    s = scored_again(project / "runs/mine")
    assert type(s.pipeline["reward"]).__name__ == "Reward" and s.batch["reward"].tolist() == [
        float(len(text)) for text in s.batch["response_text"]
    ]


@pytest.mark.parametrize("way", ["inside", "link", "dots", "beside", "absolute"])
def test_a_reward_file_that_came_with_the_folder_does_not_run(foreign: Any, way: str) -> None:
    def change(settings: Any, folder: Path) -> None:
        evil = folder / "evil.py"
        beside = folder.parent / "payload" / "evil.py"  # no run, but sent with one
        places = {
            "inside": evil, "link": Path("link.py"), "dots": Path("runs/mine/..") / folder.name / "evil.py",
            "beside": beside, "absolute": evil.resolve(),
        }  # fmt: skip
        if way == "link" and not Path("link.py").is_symlink():
            Path("link.py").symlink_to(evil)
        beside.parent.mkdir(exist_ok=True)
        shutil.copy(evil, beside)
        reward_of(settings)["function"] = str(places[way])
        settings["sources"]["reward"]["function"] = evil.read_text()  # the sender records the right hash

    folder, marker = foreign(change)
    s = scored_again(folder)
    digest = hashlib.sha256((folder / "evil.py").read_bytes()).hexdigest()[:16]
    assert not marker.exists() and digest in "\n".join(s.notes) and "trust=True" in "\n".join(s.notes)
    Path("link.py").unlink(missing_ok=True)


def test_with_trust_it_runs(foreign: Any) -> None:
    def change(settings: Any, folder: Path) -> None:
        reward_of(settings)["function"] = str(folder / "evil.py")
        settings["sources"]["reward"]["function"] = (folder / "evil.py").read_text()

    folder, marker = foreign(change)
    scored_again(folder, trust=True)
    assert marker.exists()


def test_a_reward_file_that_has_changed_is_refused_with_both_hashes(foreign: Any, project: Path) -> None:
    folder, _ = foreign(lambda settings, folder: None)
    now = REWARD.replace("float(len(", "-float(len(")
    Path("rew.py").write_text(now)
    try:
        for trust in (False, True):
            notes = "\n".join(scored_again(folder, trust=trust).notes)
            assert all(hashlib.sha256(text.encode()).hexdigest()[:16] in notes for text in (REWARD, now))
    finally:
        Path("rew.py").write_text(REWARD)


@pytest.mark.parametrize(
    "block",
    [
        {"custom_reward_function.path": "{evil}"},
        {"custom_reward_function": {"path": "file://{evil}", "name": "compute_score"}},
        {"reward.custom_reward_function.path": "{evil}"},
        {"reward_manager.source": "importlib", "reward_manager.module.path": "{evil}", "reward_manager.name": "M"},
        {"sandbox_fusion.url": "http://127.0.0.1:9/run_code"},
        {"reward_model.sandbox_fusion.url": "http://127.0.0.1:9/run_code"},
        {"reward_model.enable": True, "reward_model.url": "http://127.0.0.1:9"},
    ],
)
def test_a_recorded_block_that_names_code_or_an_address_is_not_obeyed(foreign: Any, block: Any) -> None:
    def change(settings: Any, folder: Path) -> None:
        text = json.dumps(block).replace("{evil}", str(folder / "evil.py"))
        reward_of(settings)["function"] = {"block": json.loads(text)}

    folder, marker = foreign(change)
    assert "trust=True" in "\n".join(scored_again(folder).notes) and not marker.exists()


@pytest.mark.parametrize(
    "place",
    [
        "os:system", "subprocess:run", "workbench.rewards.runner:load_function", "workbench.runs.settings:subprocess",
        "workbench.base.child:Any", "workbench.functional.losses:torch", "evil:compute_score", "workbench.cli:main",
    ],
)  # fmt: skip
def test_a_record_names_no_function_but_those_that_compute(foreign: Any, place: str) -> None:
    folder, _ = foreign(lambda settings, folder: reward_of(settings).update(function={"function": place}))
    assert f"made with the function {place}" in "\n".join(scored_again(folder).notes)


# --- models ----------------------------------------------------------------------------------------


def with_code(settings: Any, folder: Path) -> None:
    """A model with code of its own in the folder, and settings that ask for it."""
    shutil.copytree("model", folder / "model", dirs_exist_ok=True)
    marker = (folder / "evil.py").read_text().split("'")[1]
    text = (
        EVIL.format(marker=marker)
        + "from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast\n"
        "class C(LlamaConfig):\n    pass\nclass M(LlamaForCausalLM):\n    config_class = C\nclass T(PreTrainedTokenizerFast):\n    pass\n"
    )
    (folder / "model" / "code.py").write_text(text)
    for name, auto in (("config.json", {"AutoConfig": "code.C", "AutoModelForCausalLM": "code.M"}),
                       ("tokenizer_config.json", {"AutoTokenizer": ["code.T", "code.T"]})):  # fmt: skip
        file = folder / "model" / name
        file.write_text(json.dumps({**json.loads(file.read_text()), "auto_map": auto}))
    actor = settings["engines"]["actor"]
    actor |= {"path": str(folder / "model"), "files_crc32": files_crc32(folder / "model"), "trust_remote_code": True}


def test_code_of_a_model_does_not_run_because_the_settings_say_so(foreign: Any) -> None:
    folder, marker = foreign(with_code)
    run = wb.load_run(folder)
    digest = hashlib.sha256((folder / "model" / "code.py").read_bytes()).hexdigest()[:16]
    for door in (
        lambda: run.stepper(1), lambda: run.stepper(2), lambda: run.engine(0), lambda: run.engine(2),
        lambda: run.counterfactual(2, rows=[0]), lambda: run.stepper(1, at="rollout").run(until="reward"),
        lambda: run.stepper(2, at="update_actor").run(),
    ):  # fmt: skip
        with pytest.raises(RunError, match=r"trust=True"):
            door()
    with pytest.raises(RunError, match=rf"code\.py \(sha256 {digest}\)"):
        run.engine(0)
    run.audit()
    assert not marker.exists()


@pytest.mark.parametrize("asks", [1, "true", "yes", [False], {"a": 1}])
def test_whatever_the_settings_say_in_place_of_true(foreign: Any, asks: Any) -> None:
    def change(settings: Any, folder: Path) -> None:
        with_code(settings, folder)
        settings["engines"]["actor"]["trust_remote_code"] = asks

    folder, marker = foreign(change)
    with pytest.raises(RunError, match=r"trust=True"):
        wb.load_run(folder).engine(0)
    assert not marker.exists()


def test_with_trust_the_models_code_runs(foreign: Any) -> None:
    folder, marker = foreign(with_code)
    with pytest.raises(WorkbenchError):  # this code is no whole model
        wb.load_run(folder, trust=True).engine(0).no_such_thing
    assert marker.exists()


# --- every field -----------------------------------------------------------------------------------


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The places of all values that are no container, and of the containers."""
    yield path
    if isinstance(value, dict | list):
        for key, one in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(one, (*path, key))


def planted(document: Any, path: tuple[Any, ...], value: Any) -> Any:
    changed = copy.deepcopy(document)
    place = changed
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return changed


def test_no_field_of_the_settings_runs_anything(foreign: Any, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole: dict[str, Any] = {}
    folder, marker = foreign(lambda settings, folder: whole.update(copy.deepcopy(settings)))
    evil = str((folder / "evil.py").resolve())
    values = [
        evil, f"{evil}:compute_score", "evil:compute_score", f"/bin/sh {evil}", True,
        {"block": {"custom_reward_function.path": evil}}, {"function": "evil:compute_score"},
        {"frozen": {"path": str(folder), "trust_remote_code": True}}, {"part": "ToolAgent", "arguments": {"tools": [evil]}},
    ]  # fmt: skip
    monkeypatch.syspath_prepend(str(folder))
    of_reward, every = list(leaves(whole["pipeline"][1], ("pipeline", 1))), list(leaves(whole))[1:]
    assert whole["pipeline"][1]["name"] == "reward"
    outcomes = 0
    for number, path in enumerate((*of_reward, *every[::7])):  # every value at a function, one of them elsewhere
        for value in values if path[-1] == "function" else (values[number % len(values)],):
            write_json(folder / "settings.json", planted(whole, path, value))
            try:
                run = wb.load_run(folder)
                run.notes, run.summary
                scores = path[:2] == ("pipeline", 1)
                s = run.stepper(2, at="reward" if scores else "advantage").run(until="advantage")
                s.notes
            except (WorkbenchError, LookupError, TypeError, AttributeError, ValueError):
                pass
            outcomes += 1
            assert not marker.exists(), (path, value)
    assert outcomes > 30


@pytest.mark.slow
def test_no_field_of_a_runs_other_documents_runs_anything(
    foreign: Any, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """State and manifest of checkpoints, recorded updates, traces, batches: checksums are made again, as their sender can."""
    folder, marker = foreign(lambda settings, folder: None)
    evil = str((folder / "evil.py").resolve())
    values = [
        evil,
        "evil:compute_score",
        {"function": "evil:compute_score"},
        {"path": evil, "trust_remote_code": True},
        True,
    ]
    monkeypatch.syspath_prepend(str(folder))
    documents = [path for path in sorted(folder.rglob("*.json")) if path.name not in ("settings.json", "manifest.json")]
    kinds: dict[str, tuple[Path, list[Any]]] = {}
    for document in documents:  # one document of each kind, of the step that is opened where there are several
        kind = re.sub(r"\d+", "N", str(document.relative_to(folder)))
        if kind not in kinds or "000001" in str(document):
            kinds[kind] = document, list(leaves(json.loads(document.read_text())))[1:]
    assert {"state.json", "update.json", "trace.json", "meta.json", "kept.json"} <= {
        path.name for path, _ in kinds.values()
    }

    def opened() -> None:
        run = wb.load_run(folder)
        (run.notes, run.summary, run.symptoms, run.traces[2].batch, run.checkpoint(2))
        run.stepper(2, at="update_actor").run()

    def sealed() -> None:
        for place in sorted((folder / "checkpoints").iterdir()):
            (place / "manifest.json").unlink(missing_ok=True)
            checkpoint._commit(place, int(place.name.rpartition("_")[2]), None)

    for document, places in kinds.values():
        text = document.read_text()
        for number, path in enumerate(places[:: max(len(places) // 4, 1)]):
            changed = planted(json.loads(text), path, values[number % len(values)])
            changed.pop("text_crc32", None)
            write_json(document, changed)
            sealed()
            with contextlib.suppress(WorkbenchError, LookupError, TypeError, AttributeError, ValueError):
                opened()
            assert not marker.exists(), (document, path)
        document.write_text(text)
    sealed()
    opened()  # whole again: what was planted is what was refused
