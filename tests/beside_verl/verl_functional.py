"""Cases of `workbench.functional`: estimators, policy losses, aggregation, KL, values, rollout correction, balancing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from verl_cases import Answer, AtMost, Verl, case
from verl_kinds import KINDS, Batch

from workbench import functional as F
from workbench.functional import balancing, correction


class Settings(dict):  # type: ignore[type-arg]
    """verl reads its settings by attribute and by get."""

    __getattr__ = dict.__getitem__


def inside(b: Batch, values: Tensor) -> Tensor:
    """What verl leaves outside the mask is read by nobody; ours is 0 there."""
    return torch.where(b.mask.bool(), values, torch.zeros((), dtype=values.dtype))


# --- estimators -----------------------------------------------------------------------------------


def estimator(
    name: str, ours: Callable[[Batch], Any], theirs: Callable[[Verl, Batch], Any], returns: bool = False, **more: Any
) -> None:
    """The returns of most are their advantages."""

    def mine(b: Batch) -> Answer:
        found = ours(b)
        return {"advantages": found[0], "returns": inside(b, found[1])}

    def verls(verl: Verl, b: Batch) -> Answer:
        found = theirs(verl, b)
        answer = {"advantages": inside(b, found[0])}
        return {**answer, "returns": inside(b, found[1])} if returns else answer

    case(f"estimator {name}", mine, verls, **more)


def _core(function: str, **settings: Any) -> Callable[[Verl, Batch], Any]:
    """verl's function of token rewards, mask and group names."""
    return lambda verl, b: getattr(verl.core_algos, function)(b.rewards, b.mask, b.uid, **settings)


CONFIG = Settings(gamma=0.9, norm_adv_by_std_in_grpo=True)
GROUPED: Mapping[str, tuple[Callable[..., Any], str]] = {
    "rloo": (F.rloo, "compute_rloo_outcome_advantage"),
    "opo": (F.opo, "compute_opo_outcome_advantage"),
    "gpg": (F.gpg, "compute_gpg_outcome_advantage"),
    "grpo": (F.grpo, "compute_grpo_outcome_advantage"),
    "reinforce_plus_plus_baseline": (
        F.reinforce_plus_plus_baseline,
        "compute_reinforce_plus_plus_baseline_outcome_advantage",
    ),
}
for _name, (_ours, _theirs) in GROUPED.items():
    for _singleton in ("zero", "verl"):
        estimator(
            f"{_name}, singleton={_singleton}",
            lambda b, ours=_ours, singleton=_singleton: ours(b.scores, b.groups, b.mask, singleton=singleton),
            _core(_theirs),
        )
estimator(
    "dr_grpo",
    lambda b: F.grpo(b.scores, b.groups, b.mask, norm_by_std=False, singleton="verl"),
    _core("compute_grpo_outcome_advantage", norm_adv_by_std_in_grpo=False),
)
estimator(
    "grpo_vectorized",
    lambda b: F.grpo(b.scores, b.groups, b.mask, singleton="verl"),
    _core("compute_grpo_vectorized_outcome_advantage"),
)
estimator("rloo_vectorized", lambda b: F.rloo(b.scores, b.groups, b.mask), _core("compute_rloo_vectorized_outcome_advantage"))  # fmt: skip
estimator(
    "grpo_passk",
    lambda b: F.grpo_passk(b.scores, b.groups, b.mask),
    _core("compute_grpo_passk_outcome_advantage", config=CONFIG),
)
estimator(
    "gdpo of one part",
    lambda b: F.gdpo(b.scores[:, None], b.groups, b.mask, singleton="verl"),
    _core("compute_gdpo_outcome_advantage"),
)
_ROUNDING = ("reference", "one row", "one token", "one token each")
"""Kinds on which whitening makes ones of verl's rounding: its advantages are all equal, or of two rows that cancel out."""
for _weights in (None, (0.3, 2.0)):
    estimator(
        f"gdpo of two parts, weights={_weights}",
        lambda b, weights=_weights: F.gdpo(
            torch.stack([b.scores, b.more], 1), b.groups, b.mask, weights=weights, singleton="verl"
        ),
        lambda verl, b, weights=_weights: verl.core_algos.compute_gdpo_outcome_advantage(
            b.rewards,
            b.mask,
            b.uid,
            config=Settings(gdpo_reward_keys=["one", "two"], gdpo_reward_weights=weights),
            non_tensor_batch={"one": b.scores.float().numpy(), "two": b.more.float().numpy()},
            batch={"prompts": torch.zeros(len(b.mask), 2), "attention_mask": torch.cat([torch.ones(len(b.mask), 2).long(), b.mask], 1)},
        ),
        kinds=tuple(kind for kind in KINDS if kind not in _ROUNDING),
    )  # fmt: skip
estimator(
    "reinforce_plus_plus",
    lambda b: F.reinforce_plus_plus(b.rewards, b.mask, gamma=0.9),
    lambda verl, b: verl.core_algos.compute_reinforce_plus_plus_outcome_advantage(b.rewards, b.mask, config=CONFIG),
    returns=True,
)
estimator(
    "remax",
    lambda b: F.remax(b.rewards, b.baselines, b.mask),
    lambda verl, b: verl.core_algos.compute_remax_outcome_advantage(b.rewards, b.baselines, b.mask),
    returns=True,
)
for _gamma, _lam in ((1.0, 0.95), (0.9, 0.7), (1.0, 1.0)):
    estimator(
        f"gae, gamma={_gamma}, lam={_lam}",
        lambda b, gamma=_gamma, lam=_lam: F.gae(b.rewards, b.values, b.mask, gamma, lam),
        lambda verl, b, gamma=_gamma, lam=_lam: verl.core_algos.compute_gae_advantage_return(
            b.rewards, b.values, b.mask, gamma, lam
        ),
        returns=True,
    )
case(
    "estimator gae, zero_masked=False",
    lambda b: {"advantages": F.gae(b.rewards, b.values, b.mask, 0.9, 0.7, zero_masked=False)[0]},
    lambda verl, b: {"advantages": verl.core_algos.compute_gae_advantage_return(b.rewards, b.values, b.mask, 0.9, 0.7)[0]},
)  # fmt: skip
for _ours, _theirs in (
    (F.optimal_token_baseline, "compute_optimal_token_baseline_advantage"),
    (F.tir_optimal_token_baseline, "compute_multi_turn_optimal_token_baseline_advantage"),
):
    estimator(
        _ours.__name__,
        lambda b, ours=_ours: ours(b.rewards, b.groups, b.mask, b.old, b.squared),
        lambda verl, b, theirs=_theirs: getattr(verl.core_algos, theirs)(b.rewards, b.mask, b.uid, b.old, b.squared),
        returns=True,
    )
    estimator(
        f"{_ours.__name__}, weighted",
        lambda b, ours=_ours: ours(b.rewards, b.groups, b.mask, b.old, b.squared, rollout_is_weights=b.weights),
        lambda verl, b, theirs=_theirs: getattr(verl.core_algos, theirs)(
            b.rewards, b.mask, b.uid, b.old, b.squared, rollout_is_weights=b.weights
        ),
        returns=True,
    )


# --- aggregation, KL, values ----------------------------------------------------------------------

for _mode in F.AGGREGATIONS:
    case(
        f"aggregate {_mode}",
        lambda b, mode=_mode: {"loss": F.aggregate(b.advantages, b.mask, mode)},
        lambda verl, b, mode=_mode: {"loss": verl.core_algos.agg_loss(b.advantages, b.mask, mode)},
    )
    case(
        f"aggregate {_mode}, global counts",
        lambda b, mode=_mode: {"loss": F.aggregate(b.advantages, b.mask, mode, tokens=90.0, sequences=20.0, scale=16.0)},
        lambda verl, b, mode=_mode: {
            "loss": verl.core_algos.agg_loss(
                b.advantages, b.mask, mode, batch_num_tokens=90, global_batch_size=20, loss_scale_factor=16
            )
        },
    )  # fmt: skip


def _with_gradient(b: Batch, name: str, of: Callable[[Tensor], Tensor], **more: Any) -> Answer:
    """A token loss's mean and its gradient."""
    leaf = b.leaf(name)
    loss = inside(b, of(leaf))
    loss.double().mean().backward()
    return {"loss": loss.detach(), "gradient": inside(b, leaf.grad), **more}  # type: ignore[arg-type]


for _kind in ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3"):
    for _plus in ("", "+"):
        case(
            f"kl {_kind}{_plus}",
            lambda b, kind=_kind + _plus: _with_gradient(b, "new", lambda new: F.kl_penalty(new, b.ref, kind)),
            lambda verl, b, kind=_kind + _plus: _with_gradient(
                b, "new", lambda new: verl.core_algos.kl_penalty(new, b.ref, kind)
            ),
        )


def _value_loss(b: Batch, mode: str) -> Answer:
    leaf = b.leaf("new_values")
    made = F.value_loss(leaf, b.returns, b.values, b.mask, clip=0.3)
    loss = F.aggregate(made.loss, b.mask, mode)
    loss.backward()
    clipped = F.masked_mean(made.clipped.float(), b.mask)
    return {"loss": loss.detach(), "gradient": inside(b, leaf.grad), "clipped": clipped}  # type: ignore[arg-type]


def _verls_value_loss(verl: Verl, b: Batch, mode: str) -> Answer:
    leaf = b.leaf("new_values")
    loss, clipped = verl.core_algos.compute_value_loss(leaf, b.returns, b.values, b.mask, 0.3, mode)
    loss.backward()
    return {"loss": loss.detach(), "gradient": inside(b, leaf.grad), "clipped": clipped}  # type: ignore[arg-type]


for _mode in F.AGGREGATIONS:
    case(
        f"value loss, {_mode}",
        lambda b, mode=_mode: _value_loss(b, mode),
        lambda verl, b, mode=_mode: _verls_value_loss(verl, b, mode),
    )


def _controller(controller: Any) -> Answer:
    values = []
    for kl, steps in ((0.5, 1024), (0.0, 1024), (0.1, 7), (-3.0, 100), (0.11, 20_000)):
        controller.update(kl, steps)
        values.append(controller.value)
    return {"coefficient": torch.tensor(values)}


case(
    "adaptive KL",
    lambda b: _controller(F.AdaptiveKL(0.001, target=0.1, horizon=10_000)),
    lambda verl, b: _controller(verl.core_algos.AdaptiveKLController(0.001, 0.1, 10_000)),
    kinds=("ragged",),
    atol=1e-9,
)
case(
    "entropy and log-probs of logits",
    lambda b: {
        "entropy": F.entropy_from_logits(_logits(b)),
        "log_probs": F.log_probs_from_logits(_logits(b), _labels(b)),
    },
    lambda verl, b: {
        "entropy": verl.torch_functional.entropy_from_logits(_logits(b)),
        "log_probs": verl.torch_functional.logprobs_from_logits_v2(_logits(b), _labels(b)),
    },
    kinds=("ragged", "far ratios", "one token", "float64"),
)


def _logits(b: Batch) -> Tensor:
    return torch.stack([b.old * 5, b.new * 3, b.ref, b.values, b.rewards], -1)


def _labels(b: Batch) -> Tensor:
    return b.groups[:, None].expand(b.mask.shape) % 5


# --- policy losses --------------------------------------------------------------------------------

LOSSES: Mapping[str, Mapping[str, Any]] = {
    "vanilla": {"clip_ratio_low": 0.1, "clip_ratio_high": 0.28, "clip_ratio_c": 1.3},
    "dppo_tv": {"clip_ratio_low": 0.1, "clip_ratio_high": 0.15, "clip_ratio_c": 1.2},
    "dppo_kl": {"clip_ratio_low": 0.01, "clip_ratio_high": 0.02, "clip_ratio_c": 1.2},
    "gspo": {"clip_ratio_low": 0.05, "clip_ratio_high": 0.08},
    "sapo": {"tau_pos": 1.2, "tau_neg": 2.0},
    "gpg": {},
    "cispo": {"clip_ratio_low": 0.3, "clip_ratio_high": 0.1},
    "geo_mean": {"clip_ratio_low": 0.1, "clip_ratio_high": 0.28},
    "dro": {"dro_beta": 0.4},
    "clip_cov": {"clip_cov_ratio": 0.3, "clip_cov_lb": 0.1, "clip_cov_ub": 0.9},
    "kl_cov": {"kl_cov_ratio": 0.2, "ppo_kl_coef": 0.7},
}
"""Settings under which every branch of a loss is taken."""
_OF_POLICY_LOSS = ("clip_cov_ratio", "clip_cov_lb", "clip_cov_ub", "kl_cov_ratio", "ppo_kl_coef", "dro_beta")


def verls_config(verl: Verl, settings: Mapping[str, Any], mode: str = "vanilla", **more: Any) -> Any:
    """verl's configuration of the same loss."""
    loss = {name: value for name, value in settings.items() if name in _OF_POLICY_LOSS}
    own = {name: value for name, value in settings.items() if name not in loss}
    return verl.actor(policy_loss={"loss_mode": mode, "dro_beta": 0.1, **loss}, **own, **more)


def verls_loss(
    verl: Verl,
    b: Batch,
    name: str,
    settings: Mapping[str, Any],
    mode: str = "token-mean",
    weights: Tensor | None = None,
) -> Answer:
    """Value, gradient and metrics of a registered loss."""
    new = b.leaf()
    loss, metrics = verl.core_algos.get_policy_loss_fn(name)(
        old_log_prob=b.old, log_prob=new, advantages=b.advantages, response_mask=b.mask, loss_agg_mode=mode,
        config=verls_config(verl, settings, name), rollout_is_weights=weights,
    )  # fmt: skip
    loss.backward()
    return {"loss": loss.detach(), "gradient": inside(b, new.grad), **metrics}  # type: ignore[arg-type]


def _loss(b: Batch, name: str, settings: Mapping[str, Any]) -> Answer:
    new = b.leaf()
    made = F.POLICY_LOSSES[name](b.old, new, b.advantages, b.mask, **settings)
    loss = F.aggregate(made.loss, b.mask, made.aggregation or "token-mean")
    loss.backward()
    return {"loss": loss.detach(), "gradient": inside(b, new.grad)}  # type: ignore[arg-type]


for _name, _settings in LOSSES.items():
    for _title, _given in ((f"loss {_name}", {}), (f"loss {_name}, set", _settings)):
        if _given or _title.endswith(_name):
            case(
                _title,
                lambda b, name=_name, given=_given: _loss(b, name, given),
                lambda verl, b, name=_name, given=_given: {
                    part: value for part, value in verls_loss(verl, b, name, given).items() if "/" not in part
                },
            )


# --- rollout correction ---------------------------------------------------------------------------

for _level in ("token", "sequence"):
    for _band in ((None, 2.0), (None, 1.1), (0.5, 2.0), (0.9, 1.2)):
        for _normalize in (False, True):
            case(
                f"importance weights, {_level}, {_band}, normalize={_normalize}",
                lambda b, level=_level, band=_band, normalize=_normalize: {
                    "weights": correction.importance_weights(
                        b.old, b.rollout, b.mask, level=level, lower=band[0], upper=band[1], batch_normalize=normalize
                    )
                },
                lambda verl, b, level=_level, band=_band, normalize=_normalize: {
                    "weights": verl.rollout_corr_helper.compute_rollout_correction_weights(
                        b.old - b.rollout,
                        b.mask,
                        level,
                        "_".join(str(one) for one in band if one is not None),
                        normalize,
                    )[0]
                },
            )
BOUNDS: Mapping[str, tuple[tuple[float | None, float], ...]] = {
    "token_k1": ((None, 1.2), (0.6, 1.4)),
    "token_k2": ((None, 0.05),),
    "token_k3": ((None, 0.05),),
    "seq_sum_k1": ((None, 1.5), (0.5, 1.8)),
    "seq_sum_k2": ((None, 0.3),),
    "seq_sum_k3": ((None, 0.3),),
    "seq_mean_k1": ((None, 1.1), (0.95, 1.2)),
    "seq_mean_k2": ((None, 0.06),),
    "seq_mean_k3": ((None, 0.06),),
    "seq_max_k2": ((None, 0.1),),
    "seq_max_k3": ((None, 0.1),),
}
for _kind, _bounds in BOUNDS.items():
    for _lower, _upper in _bounds:
        case(
            f"rejection {_kind}, {(_lower, _upper)}",
            lambda b, kind=_kind, lower=_lower, upper=_upper: {
                "kept": b.mask * ~correction.rejected(b.old, b.rollout, b.mask, kind, lower=lower, upper=upper)
            },
            lambda verl, b, kind=_kind, lower=_lower, upper=_upper: {
                "kept": verl.rollout_corr_helper.compute_rollout_rejection_mask(
                    b.old - b.rollout, b.mask, kind, f"{lower}_{upper}" if lower else str(upper)
                )[0]
            },
        )


# --- balancing ------------------------------------------------------------------------------------


def _heaviest(loads: list[float], parts: list[list[int]]) -> float:
    assert sorted(row for part in parts for row in part) == list(range(len(loads)))
    return max(sum(loads[row] for row in part) for part in parts)


def _loads(b: Batch) -> list[int]:
    return [int(one * 100) + 1 for row in b.advantages.abs().tolist() for one in row][:72]


for _parts, _equal in ((2, False), (3, False), (8, False), (2, True), (4, True)):
    case(
        f"balanced in {_parts}, equal_size={_equal}",
        lambda b, parts=_parts, equal=_equal: {
            "heaviest": AtMost(_heaviest(_loads(b), balancing.balanced(_loads(b), parts, equal_size=equal)))
        },
        lambda verl, b, parts=_parts, equal=_equal: {
            "heaviest": _heaviest(_loads(b), verl.seqlen_balancing.karmarkar_karp(_loads(b), parts, equal))
        },
        kinds=("ragged", "full", "far ratios", "dense rewards"),
    )
case(
    "balanced by groups",
    lambda b: {
        "heaviest": AtMost(
            _heaviest(
                _loads(b), balancing.balanced_groups(_loads(b), [row // 4 for row in range(72)], 3, equal_size=True)
            )
        )
    },
    lambda verl, b: {
        "heaviest": _heaviest(
            _loads(b),
            verl.seqlen_balancing.get_group_balanced_partitions(_loads(b), [row // 4 for row in range(72)], 3),
        )
    },
    kinds=("ragged", "full"),
)
case(
    "workload",
    lambda b: {"loads": torch.tensor([balancing.workload(float(one)) for one in b.mask.sum(-1)])},
    lambda verl, b: {"loads": verl.seqlen_balancing.calculate_workload(b.mask.sum(-1).float())},
    kinds=("ragged", "empty rows"),
)
