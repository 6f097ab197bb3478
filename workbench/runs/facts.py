"""What a run says about itself: settings.json when it starts, curves.png and summary.json when it ends."""

from __future__ import annotations

import platform
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from workbench.config import settings_hash
from workbench.datasets import Rows
from workbench.runs.folder import STEP, write_json
from workbench.runs.rebuild import written_down
from workbench.runs.recorder import Plan
from workbench.runs.resume import Start, described_engines, files_crc32, first_seen
from workbench.runs.run import Run
from workbench.stages import Pipeline
from workbench.trace import describe_settings


def write_summary(path: Path, heldout: Rows | None, *, stopped: str | None) -> None:
    """Write curves.png and summary.json from what is in the folder."""
    from workbench.views.curves import panel, save_png

    run = Run(path)
    save_png(panel(run.rows, title=path.name), path / "curves.png")
    found = summary(run.rows, heldout, stopped)
    found["settings_hash"] = run.settings.get("settings_hash")
    found["checkpoints"] = run.checkpoints
    places = ("metrics.jsonl", "tensorboard", "traces", "updates", "checkpoints", "curves.png", "notebook.ipynb")
    found["paths"] = {name.split(".")[0]: str(path / name) for name in places if (path / name).exists()}
    write_json(path / "summary.json", found)


def summary(rows: Sequence[Mapping[str, Any]], heldout: Rows | None, stopped: str | None) -> dict[str, Any]:
    """The few numbers that people ask for first."""
    validated = [row for row in rows if row.get("val/reward") is not None]
    found: dict[str, Any] = {
        "steps": rows[-1][STEP] if rows else 0,
        "seconds": round(sum(row.get("timing_s/step", 0.0) + row.get("timing_s/testing", 0.0) for row in rows), 2),
        "stopped": stopped,
        "heldout_rows": len(heldout) if heldout is not None else 0,
    }
    if validated:
        for when, row in (("before", validated[0]), ("after", validated[-1])):
            found[f"reward_{when}"] = row["val/reward"]
            found[f"interval_{when}"] = [row["val/reward_low"], row["val/reward_high"]]
            found[f"greedy_{when}"] = row["val/greedy"]
    return found


def resolved(
    pipeline: Pipeline, rows: Rows, plan: Plan, heldout: Rows | None, trackers: Sequence[str]
) -> dict[str, Any]:
    """Everything that a run was started with, plain."""
    from importlib.metadata import version

    described = {stage.name: describe_settings(stage) for stage in pipeline}
    names = ("torch", "transformers", "numpy", "tokenizers", "safetensors")
    stages = {name: settings for name, (settings, _) in described.items()}
    engines = described_engines(pipeline)
    return {
        "stages": stages,
        "sources": {name: source for name, (_, source) in described.items() if source},
        "engines": engines,
        "train": {**vars(plan), "trackers": list(trackers)},
        "pipeline": _with_files(written_down(pipeline), engines),
        "settings_hash": settings_hash(stages),
        "began": {"versions": first_seen(pipeline)["versions"]},
        "data_hash": rows.data_hash,
        "data": rows.source,
        "heldout": None if heldout is None else {"source": heldout.source, "data_hash": heldout.data_hash},
        "code": code_revision(),
        "versions": {"python": platform.python_version(), **{name: version(name) for name in names}},
    }


def _with_files(records: list[dict[str, Any]], engines: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Frozen models know their files as learners do, so that a replay is not made with others."""
    known = {record["path"]: record["files_crc32"] for record in engines.values() if "files_crc32" in record}
    for record in records:
        for value in record["arguments"].values():
            frozen = value.get("frozen") if isinstance(value, dict) else None
            if frozen is not None and Path(str(frozen.get("path", ""))).is_dir():
                path = frozen["path"]
                frozen["files_crc32"] = known[path] if path in known else files_crc32(Path(str(path)))
    return records


def with_history(settings: Mapping[str, Any], start: Start) -> dict[str, Any]:
    """The settings to write: what was changed since the run began, and by which code it went on, is kept."""
    old = start.old or {}
    entry = {
        "at": time.strftime("%Y-%m-%d %H:%M:%S"),
        "from_step": start.step,
        "changes": list(start.changes),
        "code": settings["code"],
        "versions": settings["versions"],
    }
    return {**settings, "began": old.get("began", settings["began"]), "history": [*old.get("history", []), entry]}


def code_revision() -> str | None:
    """The commit that the package's folder stands on, with `+changes` where files differ; None outside git."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty=+changes", "--abbrev=12"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
