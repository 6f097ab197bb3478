"""Recipes: an algorithm is a list of stages and what they hold; each is ten visible lines.

A recipe returns a `Pipeline`: print it, index it, replace a stage of it. Settings have verl's names
and defaults (`algorithm`, `actor`, `critic`, `rollout` of its configuration) unless a line says otherwise.
"""

from __future__ import annotations

from typing import Any

from workbench.engines.protocol import SamplingSettings
from workbench.errors import SettingError, message
from workbench.functional import AdaptiveKL, FixedKL, gae
from workbench.functional import grpo as grpo_advantages
from workbench.stages import Advantage, LogProb, Pipeline, PolicyLoss, Reward, Rollout, Update, ValueLoss, Values
from workbench.stages.stage import Stage


def grpo(
    engine: Any,
    reward: Any = None,
    *,
    group_size: int = 8,
    kl_coef: float = 0.001,
    kl_type: str = "low_var_kl",
    norm_adv_by_std: bool = True,
    sampling: SamplingSettings | None = None,
    temperature: float | None = None,
    max_tokens: int | None = None,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    entropy_coeff: float = 0.0,
    ppo_epochs: int = 1,
    ppo_mini_batch_size: int | None = None,
    reference: Any = None,
) -> Pipeline:
    """GRPO: groups of samples are each other's baseline; KL to the frozen reference in the loss.

    `kl_coef=0` leaves the reference out. `reference` is any LogProbModel; by default the engine's
    weights as they are now, frozen. Shao et al. 2024, https://arxiv.org/abs/2402.03300.
    """
    sampling = _sampling(sampling, temperature, max_tokens)
    loss = PolicyLoss(
        clip_ratio_low=clip_low,
        clip_ratio_high=clip_high,
        entropy_coeff=entropy_coeff,
        kl_loss_coef=kl_coef,
        kl_loss_type=kl_type,
    )
    heat = sampling.temperature or 1.0
    stages: list[Stage] = [
        Rollout(engine, group_size=group_size, sampling=sampling),
        Reward(reward),
        LogProb(engine, entropy=True, temperature=heat),
        *_reference(engine, reference, needed=bool(kl_coef), temperature=heat),
        Advantage(grpo_advantages, norm_by_std=norm_adv_by_std),
        Update(engine, loss, ppo_epochs=ppo_epochs, ppo_mini_batch_size=ppo_mini_batch_size, temperature=heat),
    ]
    return Pipeline(stages)


def ppo(
    engine: Any,
    reward: Any = None,
    *,
    critic: Any = None,
    critic_lr: float = 1e-5,
    critic_warmup: int = 0,
    group_size: int = 1,
    gamma: float = 1.0,
    lam: float = 1.0,
    kl_coef: float = 0.001,
    kl_kind: str = "k1",
    kl_target: float | None = None,
    kl_horizon: int = 10_000,
    sampling: SamplingSettings | None = None,
    temperature: float | None = None,
    max_tokens: int | None = None,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    clip_value: float = 0.5,
    entropy_coeff: float = 0.0,
    ppo_epochs: int = 1,
    ppo_mini_batch_size: int | None = None,
    reference: Any = None,
) -> Pipeline:
    """PPO with a critic and GAE; KL to the frozen reference in the reward, fixed or adaptive.

    The critic is a copy of the policy with a value head unless one is given; it learns alone while
    the step is below `critic_warmup`. `kl_target` makes the KL coefficient adaptive.
    Schulman et al. 2017, https://arxiv.org/abs/1707.06347; Ziegler et al. 2019 for the KL.
    """
    sampling = _sampling(sampling, temperature, max_tokens)
    heat = sampling.temperature or 1.0
    critic = critic if critic is not None else engine.critic(lr=critic_lr)
    minis: dict[str, Any] = {"ppo_epochs": ppo_epochs, "ppo_mini_batch_size": ppo_mini_batch_size}
    loss = PolicyLoss(clip_ratio_low=clip_low, clip_ratio_high=clip_high, entropy_coeff=entropy_coeff)
    controller = None
    if kl_coef:
        controller = AdaptiveKL(kl_coef, kl_target, kl_horizon) if kl_target is not None else FixedKL(kl_coef)
    stages: list[Stage] = [
        Rollout(engine, group_size=group_size, sampling=sampling),
        Reward(reward),
        LogProb(engine, entropy=True, temperature=heat),
        *_reference(engine, reference, needed=bool(kl_coef), temperature=heat),
        Values(critic),
        Advantage(gae, gamma=gamma, lam=lam, kl_controller=controller, kl_kind=kl_kind),
        Update(critic, ValueLoss(cliprange_value=clip_value), name="update_critic", **minis),
        Update(engine, loss, from_step=critic_warmup, temperature=heat, **minis),
    ]
    return Pipeline(stages)


def _sampling(sampling: SamplingSettings | None, temperature: float | None, max_tokens: int | None) -> SamplingSettings:
    """The two settings that everybody changes, by name, on top of a full set or the defaults."""
    given = {"temperature": temperature, "max_tokens": max_tokens}
    changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if sampling is not None and changes:
        raise SettingError(
            message("sampling is given twice", found=f"sampling= and {', '.join(changes)}=", do="use one of them")
        )
    return sampling or SamplingSettings(**changes)


def _reference(engine: Any, reference: Any, *, needed: bool, temperature: float) -> list[Stage]:
    if not needed:
        return []
    model = reference if reference is not None else engine.reference()
    return [LogProb(model, name="ref_log_prob", column="ref_log_prob", temperature=temperature)]
