"""Cases of whole stages: the same batch in our `DataProto` and in verl's, through our stage and verl's function."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from verl_cases import Answer, Verl, case
from verl_functional import CONFIG, LOSSES, Settings, inside, verls_config
from verl_kinds import KINDS, Batch

from workbench import functional as F
from workbench.base.metrics import Metric, reduce
from workbench.compat.verl_correction import PRESETS, read_correction
from workbench.dataproto import DataProto
from workbench.engines import LossCounts
from workbench.stages import (
    Advantage,
    CorrectionSettings,
    PolicyLoss,
    RolloutCorrection,
    ValueLoss,
)

STAGE_KINDS = tuple(kind for kind in KINDS if kind not in ("bool mask", "float mask"))
"""`response_mask` is a declared column of whole numbers."""
FEW = ("tool holes", "empty rows")
"""Kinds of which the answers of cases with many outputs are recorded."""
SOME = ("reference", "ragged", "tool holes", "empty rows", "NaN outside", "far ratios", "on policy")
"""A kind of every trait."""
TOKENS = {
    "token_level_scores": "rewards",
    "old_log_probs": "old",
    "rollout_log_probs": "rollout",
    "ref_log_prob": "ref",
    "values": "values",
    "sum_pi_squared": "squared",
    "advantages": "advantages",
    "returns": "returns",
}
"""Columns of a batch, and where they come from."""


def ours(b: Batch, **more: Any) -> DataProto:
    """The batch as our stages read it."""
    columns = {name: getattr(b, column) for name, column in TOKENS.items()}
    rows = {"reward": b.scores, "reward_baselines": b.baselines, "scored": torch.ones(len(b.mask), dtype=torch.bool)}
    parts = {"reward/one": b.scores, "reward/two": b.more}
    objects = {"uid": list(b.uid)}
    return DataProto.from_single_dict({"response_mask": b.mask.long(), **columns, **rows, **parts, **objects, **more})


def verls(verl: Verl, b: Batch, **more: Any) -> Any:
    """The batch as verl's functions read it."""
    columns = {name: getattr(b, column).clone() for name, column in TOKENS.items()}
    rows = {"token_level_rewards": b.rewards.clone(), "response_mask": b.mask.clone()}
    prompts = torch.ones(len(b.mask), 2).long()
    shape = {"prompts": prompts, "responses": b.mask, "attention_mask": torch.cat([prompts, attended(b)], 1)}
    objects = {"uid": b.uid, "one": b.scores.float().numpy(), "two": b.more.float().numpy()}
    return verl.protocol.DataProto.from_single_dict({**columns, **rows, **shape, **objects, **more})


def attended(b: Batch) -> Tensor:
    """[B, T] 1 up to each row's last token, tool text between included; behind it, too, where there is any."""
    up_to = (b.mask.flip(-1).cumsum(-1).flip(-1) > 0).long()
    lengths = up_to.sum(-1, keepdim=True)
    behind = (lengths > b.mask.sum(-1, keepdim=True)) & (torch.arange(b.mask.shape[1]) == lengths)
    return up_to | behind.long()


def metrics_of(*groups: Mapping[str, Metric | float]) -> dict[str, float]:
    """Metrics of stages as the plain numbers that a run shows."""
    return reduce(groups)


# --- advantages -----------------------------------------------------------------------------------

ESTIMATORS: Mapping[str, tuple[Callable[..., Any], Mapping[str, Any]]] = {
    "gae": (F.gae, {"gamma": 0.9, "lam": 0.7}),
    "grpo": (F.grpo, {"singleton": "verl"}),
    "grpo_vectorized": (F.grpo, {"singleton": "verl"}),
    "grpo_passk": (F.grpo_passk, {}),
    "reinforce_plus_plus": (F.reinforce_plus_plus, {"gamma": 0.9}),
    "reinforce_plus_plus_baseline": (F.reinforce_plus_plus_baseline, {"singleton": "verl"}),
    "remax": (F.remax, {}),
    "rloo": (F.rloo, {"singleton": "verl"}),
    "rloo_vectorized": (F.rloo, {}),
    "opo": (F.opo, {"singleton": "verl"}),
    "gpg": (F.gpg, {"singleton": "verl"}),
    "gdpo": (F.gdpo, {"singleton": "verl", "parts": ("one",)}),
    "optimal_token_baseline": (F.optimal_token_baseline, {}),
    "tir_optimal_token_baseline": (F.tir_optimal_token_baseline, {}),
}
"""verl's `adv_estimator` → ours and its settings."""


def _advantage(b: Batch, name: str, extra: Mapping[str, Any], **more: Any) -> Answer:
    estimator, settings = ESTIMATORS[name]
    batch = Advantage(estimator, **settings, **more)(ours(b, **extra)).batch
    return {
        "advantages": batch["advantages"],
        "returns": inside(b, batch["returns"]),
        "rewards": inside(b, batch["token_level_rewards"]),
    }


def _verls_advantage(verl: Verl, b: Batch, name: str, data: Any) -> Answer:
    settings = Settings(CONFIG, gdpo_reward_keys=["one"])
    kind = verl.core_algos.AdvantageEstimator(name)
    data = verl.ray_trainer.compute_advantage(data, kind, gamma=0.9, lam=0.7, config=settings)
    found = {name: inside(b, data.batch[name]) for name in ("advantages", "returns")}
    return {**found, "rewards": inside(b, data.batch["token_level_rewards"])}


for _name in ESTIMATORS:
    case(
        f"stage Advantage({_name})",
        lambda b, name=_name: _advantage(b, name, {}),
        lambda verl, b, name=_name: _verls_advantage(
            verl, b, name, verls(verl, b, **({"reward_baselines": b.baselines} if name == "remax" else {}))
        ),
        kinds=STAGE_KINDS,
        seeds=(0,),
        recorded=SOME,
    )
for _name in ("optimal_token_baseline", "tir_optimal_token_baseline"):
    case(
        f"stage Advantage({_name}), weighted",
        lambda b, name=_name: _advantage(b, name, {"rollout_is_weights": b.weights}),
        lambda verl, b, name=_name: _verls_advantage(verl, b, name, verls(verl, b, rollout_is_weights=b.weights)),
        kinds=STAGE_KINDS,
    )


def _sessions(b: Batch) -> list[str]:
    """Every second session has a second output in the next row."""
    return [str(row - row % 4 % 2 * (row % 4 == 1)) for row in range(len(b.mask))]


def _trajectories(b: Batch) -> Answer:
    batch = Advantage(F.grpo, singleton="verl", sessions="session")(ours(b, session=_sessions(b))).batch
    return {"advantages": batch["advantages"], "returns": batch["returns"]}


def _verls_trajectories(verl: Verl, b: Batch) -> Answer:
    keys = [f"{uid}_{session}_{row}" for row, (uid, session) in enumerate(zip(b.uid, _sessions(b), strict=True))]
    kind, compute = verl.core_algos.AdvantageEstimator.GRPO, verl.ray_trainer.compute_advantage_for_multi_trajectories
    data = compute(verls(verl, b), keys, kind, config=CONFIG)
    return {"advantages": data.batch["advantages"], "returns": data.batch["returns"]}


case("stage Advantage(grpo, sessions)", _trajectories, _verls_trajectories, kinds=STAGE_KINDS)


def _penalised(b: Batch, kind: str) -> Answer:
    controller = F.AdaptiveKL(0.2, target=0.1, horizon=100)
    stage = Advantage(F.grpo, singleton="verl", kl_controller=controller, kl_type=kind)
    outcome = stage(ours(b))
    names = ("actor/reward_kl_penalty", "actor/reward_kl_penalty_coeff")
    metrics = {name: value for name, value in metrics_of(outcome.metrics).items() if name in names}
    rewards, advantages = outcome.batch["token_level_rewards"], outcome.batch["advantages"]
    return {"rewards": rewards, "advantages": advantages, "next": controller.value, **metrics}


def _verls_penalised(verl: Verl, b: Batch, kind: str) -> Answer:
    controller = verl.core_algos.AdaptiveKLController(0.2, 0.1, 100)
    data, metrics = verl.ray_trainer.apply_kl_penalty(verls(verl, b), controller, kind)
    rewards = data.batch["token_level_rewards"].clone()
    data = verl.ray_trainer.compute_advantage(data, verl.core_algos.AdvantageEstimator.GRPO, config=CONFIG)
    return {"rewards": rewards, "advantages": data.batch["advantages"], "next": controller.value, **metrics}


for _kind in ("kl", "abs", "mse", "low_var_kl"):
    case(
        f"stage KL in reward, {_kind}",
        lambda b, kind=_kind: _penalised(b, kind),
        lambda verl, b, kind=_kind: _verls_penalised(verl, b, kind),
        kinds=STAGE_KINDS,
        seeds=(0,),
        recorded=SOME,
        atol=2e-4,
        rtol=2e-3,
    )


# --- losses ---------------------------------------------------------------------------------------


def counts(batch: DataProto) -> LossCounts:
    """A mini-batch that is one micro-batch."""
    mask = batch["loss_mask" if "loss_mask" in batch else "response_mask"]
    return LossCounts(float(mask.sum()), float((mask.sum(-1) > 0).sum()), float(mask.shape[1]))


def policy_loss(b: Batch, batch: DataProto, **settings: Any) -> Answer:
    """Value, gradient and metrics of a `PolicyLoss` on a batch."""
    new = b.leaf()
    made = PolicyLoss(**settings)({"log_probs": new, "entropy": b.entropy}, batch, counts(batch))
    made.loss.backward()
    metrics = metrics_of(made.metrics)
    return {"loss": made.loss.detach(), "gradient": inside(b, new.grad), **metrics}  # type: ignore[arg-type]


def verls_policy_loss(verl: Verl, b: Batch, data: Any, mode: str = "vanilla", **settings: Any) -> Answer:
    """verl's loss of an actor (workers/utils/losses.ppo_loss, on padded columns)."""
    core, new = verl.core_algos, b.leaf()
    names = ("loss_agg_mode", "entropy_coeff", "kl_coef", "kl_type", "loss_scale_factor")
    more = {name: settings.pop(name) for name in names if name in settings}
    aggregation, mask = more.get("loss_agg_mode", "token-mean"), data.batch["response_mask"]
    config = verls_config(verl, settings, mode)
    if "loss_scale_factor" in more:
        config.global_batch_info["loss_scale_factor"] = more["loss_scale_factor"]
    weights = data.batch.get("rollout_is_weights", None)
    loss, metrics = core.get_policy_loss_fn(mode)(
        old_log_prob=data.batch["old_log_probs"], log_prob=new, advantages=data.batch["advantages"], response_mask=mask,
        loss_agg_mode=aggregation, config=config, rollout_is_weights=weights,
    )  # fmt: skip
    metrics["actor/pg_loss"] = loss.item()
    if "entropy_coeff" in more:
        entropy = core.agg_loss(b.entropy, mask, aggregation, **config.global_batch_info)
        loss, metrics["actor/entropy_loss"] = loss - more["entropy_coeff"] * entropy, entropy.item()
    if "kl_coef" in more:
        kl = core.agg_loss(core.kl_penalty(new, b.ref, more["kl_type"]), mask, aggregation, **config.global_batch_info)
        loss, metrics["actor/kl_loss"] = loss + more["kl_coef"] * kl, kl.item()
    loss.backward()
    return {"loss": loss.detach(), "gradient": inside(b, new.grad), **metrics}  # type: ignore[arg-type]


def loss_case(name: str, mode: str, kinds: tuple[str, ...], **settings: Any) -> None:
    """A `PolicyLoss` of these settings beside verl's."""
    case(
        f"stage {name}",
        lambda b: policy_loss(b, ours(b), loss_mode=mode, **settings),
        lambda verl, b: verls_policy_loss(verl, b, verls(verl, b), mode, **settings),
        kinds=kinds,
        seeds=(0,),
        recorded=tuple(kind for kind in kinds if kind in ("empty rows", "far ratios")),
    )


for _name, _settings in LOSSES.items():
    loss_case(f"PolicyLoss({_name})", _name, STAGE_KINDS, **_settings)
    for _mode in F.AGGREGATIONS:
        loss_case(f"PolicyLoss({_name}, {_mode})", _name, FEW, loss_agg_mode=_mode, **_settings)
for _mode, _kind in zip(F.AGGREGATIONS, ("low_var_kl", "k1+", "abs", "k2", "low_var_kl+"), strict=True):
    _more = {"entropy_coeff": 0.1, "kl_coef": 0.3, "loss_agg_mode": _mode, "kl_type": _kind}
    loss_case(f"PolicyLoss({_mode}, entropy, {_kind})", "vanilla", SOME, **_more)
loss_case("PolicyLoss(scaled)", "vanilla", SOME, loss_agg_mode="seq-mean-token-sum-norm", loss_scale_factor=32)


def _value_loss(b: Batch, mode: str) -> Answer:
    leaf, batch = b.leaf("new_values"), ours(b)
    made = ValueLoss(cliprange_value=0.3, loss_agg_mode=mode)({"values": leaf}, batch, counts(batch))
    made.loss.backward()
    metrics = metrics_of(made.metrics)
    return {"loss": made.loss.detach(), "gradient": inside(b, leaf.grad), **metrics}  # type: ignore[arg-type]


def _verls_value_loss(verl: Verl, b: Batch, mode: str) -> Answer:
    leaf = b.leaf("new_values")
    loss, clipped = verl.core_algos.compute_value_loss(leaf, b.returns, b.values, b.mask, 0.3, mode)
    loss.backward()
    metrics = {"vf_loss": loss.item(), "vf_clipfrac": clipped.item()}
    metrics["vpred_mean"] = verl.torch_functional.masked_mean(leaf, b.mask).item()
    found = {f"critic/{name}": value for name, value in metrics.items()}
    return {"loss": loss.detach(), "gradient": inside(b, leaf.grad), **found}  # type: ignore[arg-type]


for _mode in F.AGGREGATIONS:
    case(
        f"stage ValueLoss({_mode})",
        lambda b, mode=_mode: _value_loss(b, mode),
        lambda verl, b, mode=_mode: _verls_value_loss(verl, b, mode),
        kinds=STAGE_KINDS,
        seeds=(0,),
        recorded=FEW,
    )


# --- rollout correction ---------------------------------------------------------------------------

CORRECTIONS: Mapping[str, Mapping[str, Any]] = {
    "measured": {},
    "token": {"rollout_is": "token"},
    "token, normalized": {"rollout_is": "token", "rollout_is_batch_normalize": True},
    "token, band": {"rollout_is": "token", "rollout_is_threshold": (0.7, 1.3)},
    "sequence": {"rollout_is": "sequence"},
    "sequence, normalized": {
        "rollout_is": "sequence",
        "rollout_is_batch_normalize": True,
        "rollout_is_threshold": 1.5,
    },
    "sequence, band": {"rollout_is": "sequence", "rollout_is_threshold": (0.4, 2.5)},
    "token_k1": {"rollout_rs": {"token_k1": 1.2}},
    "token_k1, asymmetric": {"rollout_rs": {"token_k1": (0.6, 1.4)}},
    "token_k2": {"rollout_rs": {"token_k2": 0.05}},
    "token_k3": {"rollout_rs": {"token_k3": 0.05}},
    "seq_sum_k1": {"rollout_rs": {"seq_sum_k1": (0.5, 1.8)}},
    "seq_sum_k2": {"rollout_rs": {"seq_sum_k2": 0.3}},
    "seq_sum_k3": {"rollout_rs": {"seq_sum_k3": 0.3}},
    "seq_mean_k1": {"rollout_rs": {"seq_mean_k1": (0.95, 1.2)}},
    "seq_mean_k2": {"rollout_rs": {"seq_mean_k2": 0.06}},
    "seq_mean_k3": {"rollout_rs": {"seq_mean_k3": 0.06}},
    "seq_max_k2": {"rollout_rs": {"seq_max_k2": 0.1}},
    "seq_max_k3": {"rollout_rs": {"seq_max_k3": 0.1}},
    "two kinds": {"rollout_rs": {"token_k1": 1.2, "seq_max_k3": 0.1}},
    "token and token_k1": {"rollout_is": "token", "rollout_rs": {"token_k1": 1.2}},
    "sequence and token_k1": {"rollout_is": "sequence", "rollout_rs": {"token_k1": 1.2}},
    "sequence and seq_mean_k1": {"rollout_is": "sequence", "rollout_rs": {"seq_mean_k1": (0.95, 1.2)}},
    "all at once": {
        "rollout_is": "sequence",
        "rollout_is_threshold": (0.3, 4.0),
        "rollout_is_batch_normalize": True,
        "rollout_rs": {"token_k2": 0.1, "seq_sum_k1": (0.5, 1.8)},
    },
}
"""Settings of `RolloutCorrection`, as ours."""


def verls_correction(settings: Mapping[str, Any]) -> Any:
    """The same settings as verl writes them: kinds and bounds as texts."""
    found = dict(settings)
    if isinstance(band := found.get("rollout_is_threshold"), tuple):
        found["rollout_is_threshold"] = f"{band[0]}_{band[1]}"
    if kinds := found.get("rollout_rs"):
        bounds = [f"{one[0]}_{one[1]}" if isinstance(one, tuple) else str(one) for one in kinds.values()]
        found |= {"rollout_rs": ",".join(kinds), "rollout_rs_threshold": ",".join(bounds)}
    return Settings(found)


def corrected(b: Batch, settings: Mapping[str, Any]) -> tuple[DataProto, dict[str, float]]:
    """The batch after `RolloutCorrection`, and its metrics."""
    outcome = RolloutCorrection(**settings)(ours(b))
    return outcome.batch, metrics_of(outcome.metrics)


def verls_corrected(verl: Verl, b: Batch, settings: Mapping[str, Any]) -> tuple[Any, dict[str, float]]:
    """The batch after verl's correction, and its metrics."""
    helper = verl.rollout_corr_helper
    return helper.compute_rollout_correction_and_add_to_batch(verls(verl, b), verls_correction(settings))


def _corrected(b: Batch, settings: Mapping[str, Any]) -> Answer:
    batch, metrics = corrected(b, settings)
    weights = {"weights": batch["rollout_is_weights"]} if "rollout_is_weights" in batch else {}
    return {"kept": kept(batch), **weights, **metrics}


def kept(batch: DataProto) -> Tensor:
    """[B, T] the tokens that are not rejected."""
    return batch["loss_mask" if "loss_mask" in batch else "response_mask"].long()


def _verls_corrected(verl: Verl, b: Batch, settings: Mapping[str, Any]) -> Answer:
    data, metrics = verls_corrected(verl, b, settings)
    weights = {"weights": data.batch["rollout_is_weights"]} if "rollout_is_weights" in data.batch else {}
    return {"kept": data.batch["response_mask"], **weights, **metrics}


for _name, _settings in CORRECTIONS.items():
    case(
        f"stage RolloutCorrection({_name})",
        lambda b, settings=_settings: _corrected(b, settings),
        lambda verl, b, settings=_settings: _verls_corrected(verl, b, settings),
        kinds=STAGE_KINDS,
        atol=3e-4,
        rtol=1e-3,
        recorded=FEW if "and" in _name or "normalized" in _name else FEW[1:],
    )


def _corrected_loss(b: Batch, settings: Mapping[str, Any], mode: str, **more: Any) -> Answer:
    batch, _ = corrected(b, settings)
    weighted = "rollout_is_weights" in batch
    return policy_loss(b, batch, loss_mode=mode, rollout_is=weighted, **more)


def _verls_corrected_loss(verl: Verl, b: Batch, settings: Mapping[str, Any], mode: str, **more: Any) -> Answer:
    data, _ = verls_corrected(verl, b, settings)
    return verls_policy_loss(verl, b, data, mode, **more)


for _name in ("token", "sequence, normalized", "token and token_k1", "sequence and seq_mean_k1", "all at once"):
    for _mode, _more in LOSSES.items():
        case(
            f"stage PolicyLoss({_mode}) after RolloutCorrection({_name})",
            lambda b, settings=CORRECTIONS[_name], mode=_mode, more=_more: _corrected_loss(b, settings, mode, **more),
            lambda verl, b, settings=CORRECTIONS[_name], mode=_mode, more=_more: _verls_corrected_loss(
                verl, b, settings, mode, **more
            ),
            kinds=("ragged", "tool holes", "empty rows", "NaN outside"),
            seeds=(0,),
            recorded=FEW[1:],
        )


BYPASSES: Mapping[str, Mapping[str, Any]] = {
    "ppo_clip": {"loss_type": "ppo_clip"},
    "ppo_clip, token, token_k1": {"loss_type": "ppo_clip", **CORRECTIONS["token and token_k1"]},
    "ppo_clip, seq_mean_k1": {"loss_type": "ppo_clip", **CORRECTIONS["seq_mean_k1"]},
    "reinforce": {"loss_type": "reinforce"},
    "reinforce, sequence": {"loss_type": "reinforce", **CORRECTIONS["sequence"]},
    "reinforce, all at once": {"loss_type": "reinforce", **CORRECTIONS["all at once"]},
    "reinforce, token, band, token_k1": {
        "loss_type": "reinforce", **CORRECTIONS["token, band"], **CORRECTIONS["token_k1, asymmetric"],
    },
}  # fmt: skip
"""Bypass mode: the loss itself corrects, from the log-probs of the pass."""


def _bypassed(b: Batch, mode: str, loss_type: str, **settings: Any) -> Answer:
    how = CorrectionSettings(**settings)
    weighted = loss_type == "reinforce" and how.rollout_is is not None
    loss = {"ppo_clip": "vanilla", "reinforce": "gpg"}[loss_type]
    return policy_loss(b, ours(b), loss_mode=loss, bypass=how, rollout_is=weighted, loss_agg_mode=mode)


def _verls_bypassed(verl: Verl, b: Batch, mode: str, **settings: Any) -> Answer:
    new = b.leaf()
    config = verl.actor(policy_loss={"loss_mode": "bypass_mode", "rollout_correction": verls_correction(settings)})
    sequences = int((b.mask.sum(-1) > 0).sum())
    config.global_batch_info.update(batch_num_tokens=b.mask.sum(), global_batch_size=sequences)
    loss, metrics = verl.core_algos.compute_policy_loss_bypass_mode(b.rollout, new, b.advantages, b.mask, mode, config)
    loss.backward()
    return {"loss": loss.detach(), "gradient": inside(b, new.grad), **metrics}  # type: ignore[arg-type]


for _name, _settings in BYPASSES.items():
    for _mode in ("token-mean", "seq-mean-token-mean"):
        case(
            f"stage PolicyLoss(bypass, {_name}, {_mode})",
            lambda b, mode=_mode, settings=_settings: _bypassed(b, mode, **settings),
            lambda verl, b, mode=_mode, settings=_settings: _verls_bypassed(verl, b, mode, **settings),
            kinds=SOME,
            atol=3e-4,
            rtol=1e-3,
            seeds=(0,),
            recorded=FEW[:1],
        )


_BLOCK = (
    "bypass_mode", "loss_type", "rollout_is", "rollout_is_threshold", "rollout_is_batch_normalize", "rollout_rs",
    "rollout_rs_threshold",
)  # fmt: skip


def _block(made: Any) -> str:
    """The settings of a block as one text."""
    return " ".join(f"{name}={getattr(made, name)}" for name in _BLOCK)


def _verls_presets(verl: Verl) -> Answer:
    config = verl.algorithm.RolloutCorrectionConfig
    return {name: _block(getattr(config, name)()) for name, one in vars(config).items() if isinstance(one, classmethod)}


case(
    "presets of rollout correction",
    lambda b: {name: _block(read_correction(name)) for name in PRESETS},
    lambda verl, b: _verls_presets(verl),
    kinds=("ragged",),
)
