"""Rewards: functions, judges, reward models and sandboxes that score responses, each result a `Score`."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from workbench.rewards.base import BaseReward
from workbench.rewards.code import Code, code
from workbench.rewards.managers import MANAGERS, FileManagerReward, ManagerReward, manager_class, register
from workbench.rewards.reward import SCORERS, Ensemble, Reward, Rubric, as_reward, by_data_source, check_sources
from workbench.rewards.runner import FileFunction, RateLimit, load_function
from workbench.rewards.score import MISSING, Score, Status
from workbench.rewards.scorers import episodes, gsm8k, shaping
from workbench.rewards.scorers.math_dapo import math_dapo
from workbench.rewards.scorers.math_string import math_string
from workbench.rewards.scorers.math_verify import math_verify
from workbench.rewards.scorers.numeric import geometry3k, numeric
from workbench.rewards.scorers.search import search_em, search_f1
from workbench.rewards.trials import DryRun, PinCheck, Pins, dry_run, pins

if TYPE_CHECKING:
    from workbench.rewards.judge import Judge, Pairwise, PairwiseJudge, Pointwise, RewardModel, Verdict
    from workbench.rewards.judge_reports import JudgeReport, judge_report, win_rate
    from workbench.rewards.principle_search import Principles, principles
    from workbench.rewards.verdicts import BasePromptTemplate, ReasoningJudge, VerdictReward, reasoning

_HOMES = {
    **dict.fromkeys(("BasePromptTemplate", "ReasoningJudge", "VerdictReward", "reasoning"), "verdicts"),
    **dict.fromkeys(("JudgeReport", "judge_report", "win_rate"), "judge_reports"),
    **dict.fromkeys(("Principles", "principles"), "principle_search"),
}


def __getattr__(name: str) -> Any:
    """Import a name of this package on first use, because judges import pydantic, which a run without judges does not
    need."""
    if name not in __all__:
        raise AttributeError(f"module 'workbench.rewards' has no attribute {name!r}")
    return getattr(import_module(f"workbench.rewards.{_HOMES.get(name, 'judge')}"), name)


__all__ = [
    "MANAGERS",
    "MISSING",
    "SCORERS",
    "BasePromptTemplate",
    "BaseReward",
    "Code",
    "DryRun",
    "Ensemble",
    "FileFunction",
    "FileManagerReward",
    "Judge",
    "JudgeReport",
    "ManagerReward",
    "Pairwise",
    "PairwiseJudge",
    "PinCheck",
    "Pins",
    "Pointwise",
    "Principles",
    "RateLimit",
    "ReasoningJudge",
    "Reward",
    "RewardModel",
    "Rubric",
    "Score",
    "Status",
    "Verdict",
    "VerdictReward",
    "as_reward",
    "by_data_source",
    "check_sources",
    "code",
    "dry_run",
    "episodes",
    "geometry3k",
    "gsm8k",
    "judge_report",
    "load_function",
    "manager_class",
    "math_dapo",
    "math_string",
    "math_verify",
    "numeric",
    "pins",
    "principles",
    "reasoning",
    "register",
    "search_em",
    "search_f1",
    "shaping",
    "win_rate",
]
