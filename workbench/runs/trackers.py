"""Where metrics go beside the run folder's own file: TensorBoard always, others when installed."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from workbench.errors import SettingError, message, unknown

TRACKERS = ("tensorboard", "wandb", "mlflow")
"""Names that `make_trackers` knows."""


class Tracker(Protocol):
    """Takes metrics, step by step."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """One step's numbers."""

    def close(self) -> None:
        """Write what is waiting."""


class TensorBoard:
    """An event file in a folder; a resumed run gets a new folder, into which its earlier rows are written again."""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(folder))

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Scalars; NaN is left out."""
        for name, value in metrics.items():
            if math.isfinite(value):
                self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()


class Wandb:
    """Weights & Biases, in the mode that its own environment variables say."""

    def __init__(self, folder: Path, name: str) -> None:
        import wandb

        self._run: Any = wandb.init(project="workbench", name=name, dir=str(folder), reinit="finish_previous")

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """One step's numbers."""
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


class Mlflow:
    """MLflow, at the tracking address that its own environment variables say."""

    def __init__(self, name: str) -> None:
        import mlflow

        self._mlflow: Any = mlflow
        mlflow.start_run(run_name=name)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """One step's numbers; MLflow allows no `@` in names."""
        self._mlflow.log_metrics({key.replace("@", "_at_"): value for key, value in metrics.items()}, step=step)

    def close(self) -> None:
        """End the run."""
        self._mlflow.end_run()


def check_trackers(names: Sequence[str]) -> None:
    """Raises `SettingError` for an unknown name or one whose package is not installed; opens nothing."""
    for name in names:
        if name not in TRACKERS:
            raise SettingError(unknown("tracker", name, TRACKERS))
        if importlib.util.find_spec(name) is None:
            raise SettingError(message(f"tracker {name!r} is not installed", do=f"pip install {name}"))


def make_trackers(names: Sequence[str], run: Path) -> list[Tracker]:
    """Trackers by name, opened; see `check_trackers` for what is refused."""
    check_trackers(names)
    made: list[Tracker] = []
    for name in names:
        if name == "tensorboard":
            made.append(TensorBoard(run / "tensorboard"))
        else:
            made.append(Wandb(run, run.name) if name == "wandb" else Mlflow(run.name))
    return made
