"""Going on exactly where a run stood, or saying why that cannot be."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from workbench.datasets import Rows
from workbench.errors import CheckpointError, RunError, describe, message
from workbench.runs import checkpoint
from workbench.runs.folder import RunFolder, read_json
from workbench.stages import Pipeline

MAY_CHANGE = (
    "train.steps",
    "train.test_freq",
    "train.save_freq",
    "train.trace_freq",
    "train.keep_traces",
    "train.keep_checkpoints",
    "train.keep_updates",
    "train.trackers",
    "heldout.source",
)
"""Settings that a resumed run may always change: they cannot change a number of a step."""
_COMPARED = ("stages", "sources", "engines", "data_hash", "heldout", "train")
_STATE = ("cursor", "controllers", "rng", "versions")
_first_seen: WeakKeyDictionary[Pipeline, dict[str, Any]] = WeakKeyDictionary()


@dataclass(frozen=True)
class Start:
    """Where a run begins."""

    step: int
    """The first step to do, from 1."""
    rng: dict[str, Any] | None = None
    """Generators to restore when everything else is built: the last thing before the loop."""
    notes: tuple[str, ...] = ()
    """What was found, refused or moved aside."""
    changes: tuple[str, ...] = ()
    """Settings that differ from those that the run was started with."""
    old: Mapping[str, Any] | None = None
    """settings.json as it was; None: a new run."""
    pending: Path | None = None
    """The first step's rows where they have been drawn ahead: a trace."""


def differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> list[str]:
    """`lr: 0.001 → 0.002` for every setting that differs, nested names joined by dots; of texts the first line."""
    found = []
    for key in dict.fromkeys([*old, *new]):
        a, b = old.get(key), new.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            found += differences(a, b, f"{prefix}{key}.")
        elif json.dumps(a, default=str) != json.dumps(b, default=str):
            if isinstance(a, str) and isinstance(b, str):
                a, b = _first_difference(a, b)
            found.append(f"{prefix}{key}: {_short(a)} → {_short(b)}")
    return found


def _first_difference(a: str, b: str) -> tuple[str, str]:
    lines, others = a.splitlines(), b.splitlines()
    if max(len(lines), len(others)) < 2:
        return a, b
    width = max(len(lines), len(others))
    pairs = zip(lines + [""] * (width - len(lines)), others + [""] * (width - len(others)), strict=True)
    return next(((one.strip(), other.strip()) for one, other in pairs if one != other), (a, b))


def _short(value: Any) -> str:
    return value if isinstance(value, str) and len(value) <= 80 else describe(value)


def begin(
    folder: RunFolder,
    pipeline: Pipeline,
    rows: Rows,
    settings: Mapping[str, Any],
    *,
    resume: str,
    may_change: Sequence[str] = (),
) -> Start:
    """Where to start, with weights, optimizer, controllers and data position put in place.

    `never` refuses a folder that has a run; `auto` takes the newest checkpoint that verifies; where there has
    been none yet it starts over (what the run wrote is moved to superseded/). Raises `RunError` where settings,
    model files or data differ from the run's, or weights cannot be put back; `CheckpointError` where all
    checkpoints are damaged.
    """
    old, changes = check_resumable(folder.path, settings, resume, may_change)
    if resume == "never":
        return Start(1, notes=_notes(folder.lock.note))
    found = checkpoint.latest(folder.checkpoints, clean=True)
    if found.path is None:
        if found.refused:
            raise CheckpointError(
                message(
                    f"no checkpoint of {folder.path} can be used, and starting over would lose the run",
                    found="; ".join(found.notes),
                    do="move the folder checkpoints/ away to start over, or choose another run folder",
                )
            )
        _refuse_moved_weights(folder, pipeline, old, may_change, over=True)
        moved = folder.supersede(-1)
        return Start(1, None, _notes(folder.lock.note, *found.notes, *map(_moved, moved)), changes, old)
    _refuse_moved_weights(folder, pipeline, old, may_change, over=False)
    state = _restore(found.path, pipeline, rows, settings, may_change)
    notes = _notes(folder.lock.note, *found.notes)
    if found.step >= settings["train"]["steps"]:
        return Start(found.step + 1, None, notes, changes, old)
    moved = folder.supersede(found.step)
    notes = (*notes, f"resumed after step {found.step}", *map(_moved, moved))
    pending = found.path / checkpoint.PENDING
    return Start(found.step + 1, state["rng"], notes, changes, old, pending if pending.is_dir() else None)


def check_resumable(
    path: Path, settings: Mapping[str, Any], resume: str, may_change: Sequence[str]
) -> tuple[Mapping[str, Any] | None, tuple[str, ...]]:
    """(settings.json as it is, settings that differ and may). Reads alone; raises `RunError` as `begin` does."""
    if resume == "never":
        if (path / "metrics.jsonl").exists() or checkpoint.steps(path / "checkpoints"):
            raise RunError(
                message(
                    f"there is a run in {path} already",
                    expected="an empty or new folder",
                    do="choose another run=, or go on with resume='auto'",
                )
            )
        return None, ()
    if not (path / "settings.json").is_file():
        return None, ()
    old = read_json(path / "settings.json")
    return old, _changes(path, old, settings, may_change)


def _notes(*texts: str) -> tuple[str, ...]:
    return tuple(text for text in texts if text)


def _moved(what: str) -> str:
    return f"moved to superseded: {what}"


def _restore(
    path: Path, pipeline: Pipeline, rows: Rows, settings: Mapping[str, Any], may_change: Sequence[str]
) -> dict[str, Any]:
    """Weights, optimizers, schedules and controllers put back; the checkpoint's state.json."""
    state = read_json(path / "state.json")
    lacking = [key for key in _STATE if key not in state]
    lacking += [role for role in pipeline.learners() if not (path / role).is_dir()]
    lacking += [f"the controller of {name}" for name in pipeline.state() if name not in state.get("controllers", {})]
    if lacking:
        raise CheckpointError(message(f"checkpoint {path.name} lacks {', '.join(lacking)}"))
    plan = settings["train"]
    cursor = rows.cursor(state["step"], plan["batch_size"], plan["seed"]).to_json()
    wrong = differences(state["cursor"], cursor)
    if wrong and not any(_among(name, may_change) for name in ("data_hash", "train.seed", "train.batch_size")):
        raise RunError(message("the data is not what the checkpoint was trained on", found="; ".join(wrong)))
    for role, learner in pipeline.learners().items():
        learner.load_state(path / role, path / f"{role}_state")
        if learner.version != state["versions"][role]:
            wrong = [f"{role}: {state['versions'][role]} → {learner.version}"]
            raise CheckpointError(message(f"checkpoint {path.name} has other versions", found="; ".join(wrong)))
    pipeline.load_state(state["controllers"])
    return state


# --- settings that differ -------------------------------------------------------------------------


def _changes(
    path: Path, old: Mapping[str, Any], settings: Mapping[str, Any], may_change: Sequence[str]
) -> tuple[str, ...]:
    """All differences; raises `RunError` naming those that are not allowed."""
    new = json.loads(json.dumps({part: settings[part] for part in _COMPARED}, default=str))
    old = {**old, "train": {"ahead": 0, **old.get("train", {})}}  # runs from before there was such a setting
    changed = differences({part: old.get(part) for part in _COMPARED}, new)
    changed = [text for text in changed if not _only_moved(text.split(": ")[0], new["engines"])]
    allowed = (*MAY_CHANGE, *may_change)
    refused = [text for text in changed if not _among(text.split(": ")[0], allowed)]
    if refused:
        raise RunError(
            message(
                f"run {path} was started with other settings",
                found="; ".join(refused),
                do=f"use the same settings, another run folder, or allow it: may_change={[text.split(': ')[0] for text in refused]}",
            )
        )
    return tuple(changed)


def _only_moved(name: str, engines: Mapping[str, Any]) -> bool:
    """Whether a difference is the place of a model alone: what its files hold is compared beside it."""
    part, _, rest = name.partition(".")
    role, _, key = rest.partition(".")
    return part == "engines" and key == "path" and "files_crc32" in engines.get(role, {})


def _among(name: str, allowed: Sequence[str]) -> bool:
    return any(name == one or name.startswith(f"{one}.") for one in allowed)


def described_engines(pipeline: Pipeline) -> dict[str, Any]:
    """Role → the engine's settings, with a crc32 over the files of the model that it was loaded from.

    The files stand for the frozen reference too, which a resumed run makes from them again.
    """
    found = {}
    for role, learner in pipeline.learners().items():
        record = dict(getattr(learner, "describe", dict)())
        path = Path(str(record.get("path", "")))
        if record.get("path") and path.is_dir():
            record["files_crc32"] = files_crc32(path)
        found[role] = record
    return found


def files_crc32(model: Path) -> int:
    """One number over the names and contents of a model folder's files."""
    value = 0
    for path in sorted(model.iterdir()):
        if path.is_file() and path.suffix in (".safetensors", ".json", ".jinja", ".txt", ".model"):
            value = zlib.crc32(path.name.encode(), value)
            with path.open("rb") as file:
                while block := file.read(1 << 20):
                    value = zlib.crc32(block, value)
    return value


# --- weights that have moved on -------------------------------------------------------------------


def first_seen(pipeline: Pipeline) -> dict[str, Any]:
    """Role → version and role → `state_id`, when a pipeline first met a run in this process.

    Its frozen reference was made from those weights, or from earlier ones; later ones cannot be in it.
    """
    learners = pipeline.learners().items()
    versions = {role: learner.version for role, learner in learners}
    states = {role: learner.state_id for role, learner in learners}
    return _first_seen.setdefault(pipeline, {"versions": versions, "states": states})


def _refuse_moved_weights(
    folder: RunFolder, pipeline: Pipeline, old: Mapping[str, Any] | None, may_change: Sequence[str], *, over: bool
) -> None:
    """A pipeline needs the weights that the run began with: for its reference, and where it starts over for all.

    Interrupting a cell and running it again meets both: the engine in memory has moved on.
    """
    if old is None or "began" not in old or _among("began", may_change):
        return
    then, seen = old["began"]["versions"], first_seen(pipeline)
    wrong = differences(then, seen["versions"])
    if over:
        moved = [role for role, learner in pipeline.learners().items() if learner.state_id != seen["states"][role]]
        wrong += [f"{role}: updated since" for role in moved]
    if wrong:
        raise RunError(
            message(
                f"run {folder.path} began with weights of another version than this pipeline was built on",
                found="; ".join(wrong),
                do="load the model again, build the pipeline on it, and resume with that",
            )
        )
