"""Runs: a loop with a folder around it, checkpoints, resume, and the runner of notebooks."""

from workbench.runs.evaluate import Evaluation, evaluate
from workbench.runs.overview import list_runs
from workbench.runs.run import Run, load_run
from workbench.runs.runner import run_notebook
from workbench.runs.train import RunStopped, train, train_blocking

__all__ = [
    "Evaluation",
    "Run",
    "RunStopped",
    "evaluate",
    "list_runs",
    "load_run",
    "run_notebook",
    "train",
    "train_blocking",
]
