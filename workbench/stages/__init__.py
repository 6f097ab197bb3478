"""The phases of a training step, each an object a cell can call."""

from workbench.stages.advantage import Advantage
from workbench.stages.correction import CorrectionSettings, RolloutCorrection
from workbench.stages.distillation import Divergence, TeacherAdvantage, TeacherLogProb
from workbench.stages.episodes import EpisodeRollout, LearntOnce, TreeRollout, validation_rollout
from workbench.stages.filtering import FilterGroups, Overlong, Resample
from workbench.stages.log_prob import LogProb, OffPolicy, SyncReference, Values
from workbench.stages.measures import ExactKL, Influence
from workbench.stages.pipeline import Pipeline
from workbench.stages.policies import OfPolicy
from workbench.stages.preferences import AnswerPairs, BestAndWorst, KeepBest, MismatchedKL, Preference
from workbench.stages.reward import Reward, TurnScores, place_turn_scores
from workbench.stages.rollout import Baseline, Rollout
from workbench.stages.stage import BaseStage, Outcome, Stage
from workbench.stages.targets import BradleyTerry, CrossEntropy, Pairs, Targets
from workbench.stages.terms import Term
from workbench.stages.trl import MaskTruncated, TrlLoss
from workbench.stages.update import PolicyLoss, Update, ValueLoss

__all__ = [
    "Advantage", "AnswerPairs", "BaseStage", "Baseline", "BestAndWorst", "BradleyTerry", "CorrectionSettings",
    "CrossEntropy", "Divergence", "EpisodeRollout", "ExactKL", "FilterGroups", "Influence", "KeepBest",
    "LearntOnce", "LogProb", "MaskTruncated", "MismatchedKL", "OfPolicy", "OffPolicy", "Outcome", "Overlong", "Pairs",
    "Pipeline", "PolicyLoss", "Preference", "Resample", "Reward", "Rollout", "RolloutCorrection", "Stage", "SyncReference",
    "Targets", "TeacherAdvantage", "TeacherLogProb", "Term", "TreeRollout", "TrlLoss", "TurnScores", "Update",
    "ValueLoss", "Values", "place_turn_scores", "validation_rollout",
]  # fmt: skip
