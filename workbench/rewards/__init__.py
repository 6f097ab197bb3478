"""Rewards: what judges a response, as a record; run where it cannot hang a step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from workbench.rewards.base import BaseReward
from workbench.rewards.code import Code, code
from workbench.rewards.dry_run import DryRun, dry_run
from workbench.rewards.files import FileFunction, load_function
from workbench.rewards.manager_files import FileManagerReward
from workbench.rewards.managers import MANAGERS, ManagerReward, manager_class, register
from workbench.rewards.pins import PinCheck, Pins, pins
from workbench.rewards.rate_limit import RateLimit
from workbench.rewards.reward import Reward
from workbench.rewards.reward_model import RewardModel
from workbench.rewards.routing import SCORERS, as_reward, by_data_source, check_sources
from workbench.rewards.rubric import Rubric
from workbench.rewards.score import MISSING, Score, Status
from workbench.rewards.scorers import episodes, shaping
from workbench.rewards.scorers import gsm8k as _gsm8k_module
from workbench.rewards.scorers.geometry3k import geometry3k
from workbench.rewards.scorers.math_dapo import math_dapo
from workbench.rewards.scorers.math_string import math_string
from workbench.rewards.scorers.math_verify import math_verify
from workbench.rewards.scorers.numeric import numeric
from workbench.rewards.scorers.search import search_em, search_f1

if TYPE_CHECKING:
    from workbench.rewards.judge import Judge, PairwiseJudge
    from workbench.rewards.templates import Pairwise, Pointwise, Verdict

gsm8k = _gsm8k_module


def __getattr__(name: str) -> Any:
    """Judges bring pydantic, which a step without them need not wait for."""
    place = {"Judge": "judge", "PairwiseJudge": "judge"}.get(name) or (
        "templates" if name in ("Pairwise", "Pointwise", "Verdict") else None
    )
    if place is None:
        raise AttributeError(f"module 'workbench.rewards' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"workbench.rewards.{place}"), name)


__all__ = [
    "MANAGERS",
    "MISSING",
    "SCORERS",
    "BaseReward",
    "Code",
    "DryRun",
    "FileFunction",
    "FileManagerReward",
    "Judge",
    "ManagerReward",
    "Pairwise",
    "PairwiseJudge",
    "PinCheck",
    "Pins",
    "Pointwise",
    "RateLimit",
    "Reward",
    "RewardModel",
    "Rubric",
    "Score",
    "Status",
    "Verdict",
    "as_reward",
    "by_data_source",
    "check_sources",
    "code",
    "dry_run",
    "episodes",
    "geometry3k",
    "gsm8k",
    "load_function",
    "manager_class",
    "math_dapo",
    "math_string",
    "math_verify",
    "numeric",
    "pins",
    "register",
    "search_em",
    "search_f1",
    "shaping",
]
