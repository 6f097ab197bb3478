"""Going on exactly where a run stood, or saying why that cannot be."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from workbench.datasets import Rows
from workbench.errors import RunError, message
from workbench.runs import checkpoint
from workbench.runs.folder import RunFolder
from workbench.stages import Pipeline

MAY_CHANGE = frozenset({"steps", "test_freq", "save_freq", "trace_freq", "keep_traces", "keep_checkpoints", "trackers"})
"""Train settings that a resumed run may change: they cannot change a number of a step."""


@dataclass(frozen=True)
class Start:
    """Where a run begins."""

    step: int
    """The first step to do, from 1."""
    rng: dict[str, Any] | None
    """Generators to restore when everything else is built: the last thing before the loop."""
    notes: tuple[str, ...]
    """What was found, refused or moved aside."""


def differences(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> list[str]:
    """`lr: 0.001 → 0.002` for every setting that differs, nested names joined by dots."""
    found = []
    for key in dict.fromkeys([*old, *new]):
        a, b = old.get(key), new.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            found += differences(a, b, f"{prefix}{key}.")
        elif json.dumps(a, default=str) != json.dumps(b, default=str):
            found.append(f"{prefix}{key}: {a} → {b}")
    return found


def begin(folder: RunFolder, pipeline: Pipeline, rows: Rows, settings: dict[str, Any], resume: str) -> Start:
    """Where to start, with weights, optimizer, controllers and data position put in place.

    `never` refuses a folder that has metrics; `auto` takes the newest checkpoint that verifies, else starts
    over (what a run without a checkpoint wrote is moved to superseded/). Raises `RunError` where settings or
    data differ from the run's.
    """
    if resume not in ("never", "auto"):
        raise RunError(message("resume", expected="'never' or 'auto'", found=repr(resume)))
    if resume == "never":
        if folder.metrics.exists() or checkpoint.steps(folder.checkpoints):
            raise RunError(
                message(
                    f"there is a run in {folder.path} already",
                    expected="an empty or new folder",
                    do="choose another run=, or go on with resume='auto'",
                )
            )
        return Start(1, None, ())
    _refuse_changes(folder, settings)
    found = checkpoint.latest(folder.checkpoints)
    if found.path is None:
        moved = folder.supersede(-1)
        return Start(1, None, (*found.notes, *(f"moved to superseded: {what}" for what in moved)))
    state = json.loads((found.path / "state.json").read_text())
    plan = settings["train"]
    cursor = rows.cursor(found.step, plan["batch_size"], plan["seed"]).to_json()
    wrong = differences(state["cursor"], cursor)
    if wrong:
        raise RunError(message("the data is not what the checkpoint was trained on", found="; ".join(wrong)))
    lacking = [key for key in ("controllers", "rng", "versions") if key not in state]
    if lacking:
        raise RunError(message(f"checkpoint {found.path.name} lacks {', '.join(lacking)}"))
    for role, learner in pipeline.learners().items():
        learner.load_state(found.path / role, found.path / f"{role}_state")
    pipeline.load_state(state["controllers"])
    moved = folder.supersede(found.step)
    note = f"resumed after step {found.step}"
    return Start(
        found.step + 1, state["rng"], (*found.notes, note, *(f"moved to superseded: {what}" for what in moved))
    )


def _refuse_changes(folder: RunFolder, settings: dict[str, Any]) -> None:
    path = folder.path / "settings.json"
    if not path.is_file():
        return
    old = json.loads(path.read_text())
    parts = ("stages", "sources", "engines", "data_hash", "train")
    new = json.loads(json.dumps({part: settings[part] for part in parts}, default=str))
    changed = differences({part: old.get(part) for part in parts}, new)
    changed = [text for text in changed if text.split(":")[0].removeprefix("train.") not in MAY_CHANGE]
    if changed:
        raise RunError(
            message(
                f"run {folder.path} was started with other settings",
                found="; ".join(changed),
                do="use the same settings, or another run folder",
            )
        )
