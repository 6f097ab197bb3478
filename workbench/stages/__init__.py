"""The phases of a training step, each an object a cell can call."""

from workbench.stages.advantage import Advantage
from workbench.stages.baseline import Baseline
from workbench.stages.correction import RolloutCorrection
from workbench.stages.episodes import EpisodeRollout, validation_rollout
from workbench.stages.exact_kl import ExactKL
from workbench.stages.filtering import FilterGroups, Overlong
from workbench.stages.influence import Influence
from workbench.stages.log_prob import LogProb
from workbench.stages.losses import PolicyLoss, ValueLoss
from workbench.stages.off_policy import OffPolicy
from workbench.stages.pipeline import Pipeline
from workbench.stages.resample import Resample
from workbench.stages.reward import Reward
from workbench.stages.rollout import Rollout
from workbench.stages.stage import BaseStage, Outcome, Stage
from workbench.stages.turn_scores import TurnScores, place_turn_scores
from workbench.stages.update import Update
from workbench.stages.values import Values

__all__ = [
    "Advantage",
    "BaseStage",
    "Baseline",
    "EpisodeRollout",
    "ExactKL",
    "FilterGroups",
    "Influence",
    "LogProb",
    "OffPolicy",
    "Outcome",
    "Overlong",
    "Pipeline",
    "PolicyLoss",
    "Resample",
    "Reward",
    "Rollout",
    "RolloutCorrection",
    "Stage",
    "TurnScores",
    "Update",
    "ValueLoss",
    "Values",
    "place_turn_scores",
    "validation_rollout",
]
