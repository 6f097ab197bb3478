"""Rewards: functions of text that return a record, run where they cannot hang a step."""

from workbench.rewards import gsm8k as _gsm8k_module
from workbench.rewards.reward import Reward, load_function
from workbench.rewards.routing import SCORERS, as_reward, by_data_source, check_sources
from workbench.rewards.score import Score, Status

gsm8k = _gsm8k_module

__all__ = [
    "SCORERS",
    "Reward",
    "Score",
    "Status",
    "as_reward",
    "by_data_source",
    "check_sources",
    "gsm8k",
    "load_function",
]
