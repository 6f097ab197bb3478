"""Runs side by side: a table of a folder of runs, with their settings and what came of them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.errors import RunError, first_line, message
from workbench.runs.folder import STEP
from workbench.runs.run import Run

if TYPE_CHECKING:
    import pandas as pd

_ALWAYS = ("state", "steps", "reward before", "reward after", "training reward", "seconds", "changed")


def find_runs(folder: str | Path = "runs") -> list[Path]:
    """Run folders in a folder and in the folders in it, the newest last. Raises `RunError` where there is no such folder."""
    root = Path(folder)
    if not root.is_dir():
        raise RunError(message(f"no folder {str(root)!r}", do="name the folder that your runs are in"))
    found = {path.parent for depth in ("", "*/", "*/*/") for path in root.glob(f"{depth}settings.json")}
    return sorted(found, key=lambda path: (path / "settings.json").stat().st_mtime)


def list_runs(folder: str | Path = "runs", *, settings: bool = True) -> pd.DataFrame:
    """One line a run: state, steps, held-out reward before and after, seconds; then the settings in which they differ.

    A run that cannot be read has its error as state.
    """
    import pandas as pd

    lines, differing = {}, {}
    for path in find_runs(folder):
        name = str(path.relative_to(folder)) if path != Path(folder) else path.name
        try:
            run = Run(path)
            lines[name], differing[name] = _line(run), dict(_flat(run.settings))
        except RunError as error:
            lines[name], differing[name] = {"state": first_line(error)}, {}
    frame = pd.DataFrame.from_dict(lines, orient="index", columns=list(_ALWAYS))
    if settings and len(frame) > 1:
        for key in dict.fromkeys(key for one in differing.values() for key in one):
            values = [one.get(key) for one in differing.values()]
            if len({repr(value) for value in values}) > 1:
                frame[key] = values
    return frame


def _line(run: Run) -> dict[str, Any]:
    rows, summary, plan = run.rows, run.summary, run.settings.get("train", {})
    held = [row["val/reward"] for row in rows if row.get("val/reward") is not None]
    training = [row["critic/score/mean"] for row in rows if row.get("critic/score/mean") is not None]
    changed = time.strftime("%Y-%m-%d %H:%M", time.localtime((run.path / "settings.json").stat().st_mtime))
    state = run.state
    return {
        "state": f"stopped: {summary['stopped']}"[:60] if state == "stopped" else state,
        "steps": f"{rows[-1][STEP] if rows else 0}/{plan.get('steps', '?')}",
        "reward before": held[0] if held else None,
        "reward after": held[-1] if len(held) > 1 else None,
        "training reward": training[-1] if training else None,
        "seconds": round(sum(row.get("timing_s/step", 0.0) + row.get("timing_s/testing", 0.0) for row in rows), 1),
        "changed": changed,
    }


def _flat(settings: dict[str, Any]) -> list[tuple[str, Any]]:
    """`engines.actor.lr` and the like: what a person chose, without what follows from it."""
    chosen = {part: settings.get(part) or {} for part in ("stages", "engines", "train")}
    pairs = [("data", settings.get("data")), ("seed", chosen["train"].get("seed"))]
    left_out = {"files_crc32", "trackers", "steps", "seed"}
    for part, inner in chosen.items():
        groups = inner.items() if part != "train" else [("train", inner)]
        for group, values in groups:
            pairs += [(f"{group}.{key}", value) for key, value in values.items() if key not in left_out]
    return pairs
