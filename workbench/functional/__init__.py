"""The maths, pure: tensors in, tensors out, no columns."""

from workbench.functional.advantages import grpo
from workbench.functional.kl import AdaptiveKL, FixedKL, kl_penalty
from workbench.functional.logprobs import entropy_from_logits, log_probs_from_logits
from workbench.functional.losses import AGGREGATIONS, Surrogate, ValueLoss, aggregate, ppo_clip, value_loss
from workbench.functional.masking import masked_mean, masked_sum, masked_var, masked_whiten, response_lengths
from workbench.functional.returns import discounted_returns, explained_variance, gae

__all__ = [
    "AGGREGATIONS",
    "AdaptiveKL",
    "FixedKL",
    "Surrogate",
    "ValueLoss",
    "aggregate",
    "discounted_returns",
    "entropy_from_logits",
    "explained_variance",
    "gae",
    "grpo",
    "kl_penalty",
    "log_probs_from_logits",
    "masked_mean",
    "masked_sum",
    "masked_var",
    "masked_whiten",
    "ppo_clip",
    "response_lengths",
    "value_loss",
]
