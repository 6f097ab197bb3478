"""workbench: a Jupyter-first bench for reinforcement-learning post-training of language models.

Step one batch through rollout, reward, log-prob, values, advantage and update; look at every sample and token;
go back, change one thing, run on, compare; then train with the same stages.
"""

import sys
from functools import partial
from inspect import isfunction
from pathlib import Path
from typing import Any, cast

if sys.platform == "win32":
    raise ImportError("workbench runs on Linux and macOS; found Windows; install it in WSL: wsl --install")
# two distributions have written into this folder, the other one is not ours
if Path(__file__).with_name("repl").is_dir():
    raise ImportError(
        "the folder of the package workbench has files of another product, which the package index calls `workbench`; expected "
        "those of `rl-workbench` alone; pip uninstall -y workbench rl-workbench, then pip install rl-workbench"
    )

from workbench import agents, compat, datasets, engines, functional, recipes, rewards, sandbox, stages, views
from workbench.agents import BaseInteraction
from workbench.base.errors import WorkbenchError, hinted, message, nearest
from workbench.base.memory import free_memory
from workbench.cluster import CallablePackage
from workbench.compat.verl_reward import reward_from
from workbench.dataproto import DataProto, Origin
from workbench.dataproto.columns import COLUMNS
from workbench.datasets.rows import rows
from workbench.engines import SamplingSettings
from workbench.jobs.doctor import doctor
from workbench.jobs.runner import run_notebook
from workbench.jobs.starter import prepare_notebook
from workbench.jobs.train import RunStopped, train, train_blocking
from workbench.jobs.verl_job import verl
from workbench.replay.chat import chat
from workbench.replay.run import Run, list_runs, load_run
from workbench.rewards import Score, Status
from workbench.runs.evaluate import Evaluation, evaluate, evaluate_file
from workbench.stages import Outcome, Pipeline
from workbench.stages.stage import stage
from workbench.steps.compare import compare, diverge
from workbench.steps.stepper import Stepper
from workbench.steps.trace import Trace
from workbench.steps.tune import tune
from workbench.steps.what_if import what_if

cluster: CallablePackage = cast(CallablePackage, sys.modules["workbench.cluster"])
"""`wb.cluster(…)` is `wb.cluster.connect(…)`: a cluster that is started here, or one to attach to."""

compat.verl = verl  # it opens pipelines, and `compat` stands below them
__version__ = "0.16.0"

__all__ = [
    "COLUMNS", "BaseInteraction", "DataProto", "Evaluation", "Origin", "Outcome", "Pipeline", "Run", "RunStopped", "SamplingSettings",
    "Score", "Status", "Stepper", "Trace", "WorkbenchError", "agents", "chat", "cluster", "compare", "compat", "datasets",
    "diverge", "doctor", "engines", "evaluate", "free_memory", "functional", "list_runs", "load_run", "prepare_notebook", "recipes",
    "reward_from", "rewards", "rows", "run_notebook", "sandbox", "stage", "stages", "train", "train_blocking", "tune", "views", "what_if",
]  # fmt: skip


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    names = (name, name.removesuffix("Trainer").lower())  # TRL's GRPOTrainer is the recipe grpo
    there = [
        f"wb.{one}.{two}" for one in reversed(__all__) for two in names if two in getattr(globals()[one], "__all__", ())
    ]
    do = f"call {there[0]}" if there else f"did you mean wb.{close}?" if (close := nearest(name, __all__)) else None
    raise AttributeError(message(f"workbench has no {name!r}", do=do))


vars(rewards)["evaluate_file"] = evaluate_file  # it reads runs' files, and rewards know no runs
rewards.__all__.append("evaluate_file")

# a keyword argument that a function does not have is answered with what to type in its place
for _package in (sys.modules[__name__], datasets, engines, views):
    vars(_package).update(
        {name: hinted(one) for name, one in vars(_package).items() if name in _package.__all__ and isfunction(one)}
    )

# Tab shows what is for users, not what a package imports
for _package in (agents, compat, datasets, engines, functional, recipes, rewards, sandbox, stages, views, cluster):
    vars(_package)["__dir__"] = partial(list, _package.__all__)
