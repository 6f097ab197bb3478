"""The maths, pure: tensors in, tensors out, no columns."""

from workbench.functional.advantages import (
    gdpo,
    gpg,
    grpo,
    grpo_passk,
    maxrl,
    opo,
    optimal_token_baseline,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    remax,
    rloo,
    tir_optimal_token_baseline,
)
from workbench.functional.kl import AdaptiveKL, FixedKL, full_kl, kl_penalty
from workbench.functional.logprobs import entropy_from_logits, log_probs_from_logits
from workbench.functional.losses import (
    AGGREGATIONS,
    POLICY_LOSSES,
    Surrogate,
    ValueLoss,
    aggregate,
    bradley_terry,
    ppo_clip,
    value_loss,
)
from workbench.functional.masking import masked_mean, masked_sum, masked_var, masked_whiten, response_lengths
from workbench.functional.returns import discounted_returns, explained_variance, gae
from workbench.functional.trees import arpo, learnt_once, node_numbers, tree_grpo, tree_rl, tree_turn

__all__ = [
    "AGGREGATIONS",
    "POLICY_LOSSES",
    "AdaptiveKL",
    "FixedKL",
    "Surrogate",
    "ValueLoss",
    "aggregate",
    "arpo",
    "bradley_terry",
    "discounted_returns",
    "entropy_from_logits",
    "explained_variance",
    "full_kl",
    "gae",
    "gdpo",
    "gpg",
    "grpo",
    "grpo_passk",
    "kl_penalty",
    "learnt_once",
    "log_probs_from_logits",
    "masked_mean",
    "masked_sum",
    "masked_var",
    "masked_whiten",
    "maxrl",
    "node_numbers",
    "opo",
    "optimal_token_baseline",
    "ppo_clip",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "remax",
    "response_lengths",
    "rloo",
    "tir_optimal_token_baseline",
    "tree_grpo",
    "tree_rl",
    "tree_turn",
    "value_loss",
]
