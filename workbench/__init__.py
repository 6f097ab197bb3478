"""workbench: a Jupyter-first bench for reinforcement-learning post-training of language models.

Step one batch through rollout, reward, log-prob, values, advantage and update; look at every sample and token;
go back, change one thing, run on, compare; then train with the same stages.
"""

from workbench import agents as agents  # reachable as wb.agents; the names below are those that a star import gives
from workbench import compat, datasets, engines, functional, recipes, rewards, sandbox, stages, views
from workbench.cluster import cluster
from workbench.columns import COLUMNS
from workbench.compare import compare
from workbench.dataproto import DataProto, Origin
from workbench.divergence import diverge
from workbench.engines import SamplingSettings
from workbench.errors import WorkbenchError
from workbench.memory import free
from workbench.reward_settings import reward_from
from workbench.rewards import Score, Status
from workbench.runs import (
    Evaluation,
    Run,
    RunStopped,
    evaluate,
    list_runs,
    load_run,
    run_notebook,
    train,
    train_blocking,
)
from workbench.stages import Outcome, Pipeline
from workbench.stepper import Stepper
from workbench.trace import Trace
from workbench.what_if import what_if

__version__ = "0.6.0"

__all__ = [
    "COLUMNS",
    "DataProto",
    "Evaluation",
    "Origin",
    "Outcome",
    "Pipeline",
    "Run",
    "RunStopped",
    "SamplingSettings",
    "Score",
    "Status",
    "Stepper",
    "Trace",
    "WorkbenchError",
    "cluster",
    "compare",
    "compat",
    "datasets",
    "diverge",
    "engines",
    "evaluate",
    "free",
    "functional",
    "list_runs",
    "load_run",
    "recipes",
    "reward_from",
    "rewards",
    "run_notebook",
    "sandbox",
    "stages",
    "train",
    "train_blocking",
    "views",
    "what_if",
]
