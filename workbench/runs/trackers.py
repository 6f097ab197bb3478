"""Writes metrics to TensorBoard, Weights & Biases and MLflow, beside the run folder's own file; and the progress line."""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench.base.errors import SettingError, unknown
from workbench.runs.folder import STEP


@dataclass(frozen=True)
class Tracker:
    """A metrics logger, such as TensorBoard, as a pair of functions."""

    log: Callable[[Mapping[str, float], int], None]
    """Writes the metrics of a step."""
    close: Callable[[], None]
    """Writes what is buffered, and ends the logger."""


def _tensorboard(run: Path) -> Tracker:
    """An event file; a resumed run gets a new folder, into which its earlier rows are written again. NaN is left out."""
    from torch.utils.tensorboard import SummaryWriter

    writer: Any = SummaryWriter(str(run / "tensorboard"))

    def log(metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            if math.isfinite(value):
                writer.add_scalar(name, value, step)
        writer.flush()

    return Tracker(log, writer.close)


def _wandb(run: Path) -> Tracker:
    """Weights & Biases, in the mode that its own environment variables say."""
    import wandb

    opened: Any = wandb.init(project="workbench", name=run.name, dir=str(run), reinit="finish_previous")
    return Tracker(lambda metrics, step: opened.log(dict(metrics), step=step), opened.finish)


def _mlflow(run: Path) -> Tracker:
    """MLflow, at the tracking address that its own environment variables say; it allows no `@` in names."""
    import mlflow

    mlflow.start_run(run_name=run.name)

    def log(metrics: Mapping[str, float], step: int) -> None:
        mlflow.log_metrics({key.replace("@", "_at_"): value for key, value in metrics.items()}, step=step)

    return Tracker(log, mlflow.end_run)


TRACKERS: Mapping[str, Callable[[Path], Tracker]] = {"tensorboard": _tensorboard, "wandb": _wandb, "mlflow": _mlflow}
"""Name → what opens it for a run folder."""


def check_trackers(names: Sequence[str]) -> None:
    """Check names of trackers without opening them. Raises `SettingError` for an unknown name or a missing package."""
    for name in names:
        if name not in TRACKERS:
            raise SettingError(unknown("tracker", name, TRACKERS))
        if importlib.util.find_spec(name) is None:
            raise SettingError(f"tracker {name!r} is not installed", do=f"pip install {name}")


KL = ("actor/kl_loss", "actor/reward_kl_penalty", "actor/ppo_kl")
"""A progress line shows the first of these that a run measures as KL."""


def progress_line(row: Mapping[str, Any], steps: int, eta: float) -> str:
    """Format a metrics row as `step 12/60  reward 0.531  kl 0.00210  1.3 s  eta 01:02`; `eta` is in seconds."""
    parts = [f"step {row[STEP]}/{steps}"]
    if row.get("critic/score/mean") is not None:
        parts.append(f"reward {row['critic/score/mean']:.3f}")
    kl = next((row[key] for key in KL if row.get(key) is not None), None)
    if kl is not None:
        parts.append(f"kl {kl:.5f}")
    if "timing_s/step" in row:
        parts += [f"{row['timing_s/step']:.1f} s", f"eta {int(eta) // 60:02d}:{int(eta) % 60:02d}"]
    if row.get("val/reward") is not None and row.get("val/greedy") is not None:
        parts.append(f"held-out {row['val/reward']:.3f} (greedy {row['val/greedy']:.3f})")
    return "  ".join(parts)


def append_line(line: str) -> None:
    """Append a line to the progress file that `run_notebook` reads; does nothing without `WORKBENCH_PROGRESS`."""
    if path := os.environ.get("WORKBENCH_PROGRESS"):
        with open(path, "a") as file:
            file.write(line + "\n")
