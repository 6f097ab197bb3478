"""Recipes: an algorithm is a list of stages and what they hold; each is ten visible lines.

A recipe returns a `Pipeline`: print it, index it, replace a stage of it. Settings have verl's names
and defaults (`algorithm`, `actor`, `critic`, `rollout` of its configuration) unless a line says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from workbench import functional as F
from workbench.engines.protocol import SamplingSettings
from workbench.errors import SettingError, message, unknown
from workbench.functional import AdaptiveKL, FixedKL
from workbench.stages import (
    Advantage,
    Baseline,
    EpisodeRollout,
    FilterGroups,
    LogProb,
    Overlong,
    Pipeline,
    PolicyLoss,
    Reward,
    Rollout,
    RolloutCorrection,
    Update,
    ValueLoss,
    Values,
)
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
    loss_mode: str = "vanilla",
    loss_agg_mode: str = "token-mean",
    entropy_coeff: float = 0.0,
    ppo_epochs: int = 1,
    ppo_mini_batch_size: int | None = None,
    reference: Any = None,
    agent: Any = None,
) -> Pipeline:
    """GRPO: groups of samples are each other's baseline; KL to the frozen reference in the loss.

    `kl_coef=0` leaves the reference out. `reference` is any LogProbModel; by default the engine's
    weights as they are now, frozen. `agent` is a loop, or the name of one: every sample is an episode of it. Shao et al. 2024, https://arxiv.org/abs/2402.03300.
    """
    return _policy_gradient(
        engine,
        reward,
        Advantage(F.grpo, norm_by_std=norm_adv_by_std),
        group_size=group_size,
        kl_coef=kl_coef,
        kl_type=kl_type,
        sampling=sampling,
        temperature=temperature,
        max_tokens=max_tokens,
        clip_low=clip_low,
        clip_high=clip_high,
        loss_mode=loss_mode,
        loss_agg_mode=loss_agg_mode,
        entropy_coeff=entropy_coeff,
        ppo_epochs=ppo_epochs,
        ppo_mini_batch_size=ppo_mini_batch_size,
        reference=reference,
        agent=agent,
    )


def by_name(name: str) -> Callable[..., Pipeline]:
    """A recipe by its name, for notebooks that take it as a parameter. Raises `SettingError` with the nearest one."""
    known = {
        one.__name__: one for one in (grpo, dr_grpo, dapo, ppo, rloo, remax, reinforce_plus_plus, gspo, cispo, gpg, opo)
    }
    if name not in known:
        raise SettingError(unknown("recipe", name, known))
    return known[name]


def corrected(
    pipeline: Pipeline, *, rollout_is: str = "token", rollout_is_threshold: float | tuple[float, float] = 2.0
) -> Pipeline:
    """A recipe's pipeline whose loss weighs what the sampler wrote by trainer's over sampler's probability, truncated.

    For rows of other weights than the trainer's (`train(…, ahead=1)`) or another sampler's numerics: PPO's own ratio
    starts at the trainer's old log-probs and does not see either. Per token at most `rollout_is_threshold`; decoupled
    PPO, Hilton et al. 2021, https://arxiv.org/abs/2110.00641; truncated as in Ionides 2008. Verl's `rollout_correction`.
    """
    stages = [one for one in pipeline if one.name != RolloutCorrection.name]
    place = [one.name for one in stages].index("advantage")
    stages.insert(place, RolloutCorrection(rollout_is=rollout_is, rollout_is_threshold=rollout_is_threshold))
    weighed = [one.with_settings(rollout_is=True) if one.name == "update_actor" else one for one in stages]
    return Pipeline(weighed, overlap=pipeline.overlap)


def _policy_gradient(
    engine: Any,
    reward: Any,
    advantage: Stage,
    *,
    group_size: int = 8,
    kl_coef: float = 0.001,
    kl_type: str = "low_var_kl",
    kl_in_loss: bool = True,
    sampling: SamplingSettings | None = None,
    temperature: float | None = None,
    max_tokens: int | None = None,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    loss_mode: str = "vanilla",
    loss_agg_mode: str = "token-mean",
    loss_scale_factor: float | None = None,
    entropy_coeff: float = 0.0,
    ppo_epochs: int = 1,
    ppo_mini_batch_size: int | None = None,
    reference: Any = None,
    agent: Any = None,
    greedy_baseline: bool = False,
    judged: Callable[[list[Stage]], Sequence[Stage]] = lambda stages: (),
) -> Pipeline:
    """What all recipes without a critic share; `judged` adds stages after the reward, given those before."""
    sampling = _sampling(sampling, temperature, max_tokens)
    heat = sampling.temperature or 1.0
    loss = PolicyLoss(
        loss_mode=loss_mode,
        loss_agg_mode=loss_agg_mode,
        loss_scale_factor=loss_scale_factor,
        clip_ratio_low=clip_low,
        clip_ratio_high=clip_high,
        entropy_coeff=entropy_coeff,
        kl_loss_coef=kl_coef if kl_in_loss else 0.0,
        kl_loss_type=kl_type,
    )
    drawn: list[Stage] = [
        _rollout(engine, agent, group_size=group_size, sampling=sampling, greedy_baseline=greedy_baseline),
        Reward(reward),
    ]
    return Pipeline(
        [
            *drawn,
            *judged(drawn),
            LogProb(engine, entropy=True, temperature=heat),
            *_reference(engine, reference, needed=bool(kl_coef), temperature=heat),
            advantage,
            Update(engine, loss, ppo_epochs=ppo_epochs, ppo_mini_batch_size=ppo_mini_batch_size, temperature=heat),
        ]
    )


def dr_grpo(
    engine: Any, reward: Any = None, *, max_tokens: int = 128, kl_coef: float = 0.0, **settings: Any
) -> Pipeline:
    """Dr.GRPO: no division by the group's deviation, and none by a row's own length, so that neither hard prompts nor long
    wrong answers weigh more or less: s − μ, and Σ over tokens / (rows · `max_tokens`).

    Other settings: `grpo`'s. Liu et al. 2025, https://arxiv.org/abs/2503.20783.
    """
    advantage = Advantage(F.grpo, norm_by_std=False)
    scaled: dict[str, Any] = {"loss_agg_mode": "seq-mean-token-sum-norm", "loss_scale_factor": float(max_tokens)}
    return _policy_gradient(engine, reward, advantage, max_tokens=max_tokens, kl_coef=kl_coef, **{**scaled, **settings})


def dapo(
    engine: Any,
    reward: Any = None,
    *,
    rows: Any = None,
    max_num_gen_batches: int = 4,
    max_tokens: int = 128,
    overlong_buffer: int = 0,
    overlong_penalty: float = 1.0,
    clip_high: float = 0.28,
    kl_coef: float = 0.0,
    **settings: Any,
) -> Pipeline:
    """DAPO: clip-higher, token-mean loss, no KL; groups without signal are replaced, overlong answers are penalised softly.

    `rows` is where further prompts come from (the training rows; None: groups without signal are dropped only);
    over the last `overlong_buffer` tokens before `max_tokens` a penalty grows to `overlong_penalty`. Other settings:
    `grpo`'s. Yu et al. 2025, https://arxiv.org/abs/2503.14476.
    """

    def judged(drawn: list[Stage]) -> list[Stage]:
        shaped: list[Stage] = [Overlong(max_tokens, overlong_buffer, overlong_penalty)] if overlong_buffer else []
        return [*shaped, FilterGroups([*drawn, *shaped], rows, max_num_gen_batches)]

    chosen: dict[str, Any] = {"max_tokens": max_tokens, "clip_high": clip_high, "kl_coef": kl_coef}
    return _policy_gradient(engine, reward, Advantage(F.grpo), judged=judged, **chosen, **settings)


def rloo(engine: Any, reward: Any = None, *, group_size: int = 4, **settings: Any) -> Pipeline:
    """RLOO: each sample against the mean of the others; `grpo`'s settings. Ahmadian et al. 2024,
    https://arxiv.org/abs/2402.14740.
    """
    return _policy_gradient(engine, reward, Advantage(F.rloo), group_size=group_size, **settings)


def opo(engine: Any, reward: Any = None, *, kl_coef: float = 0.0, **settings: Any) -> Pipeline:
    """OPO: on-policy with the length-weighted optimal baseline, no KL; `grpo`'s settings. Hao et al. 2025,
    https://arxiv.org/abs/2505.23585.
    """
    return _policy_gradient(engine, reward, Advantage(F.opo), kl_coef=kl_coef, **settings)


def gpg(engine: Any, reward: Any = None, *, kl_coef: float = 0.0, **settings: Any) -> Pipeline:
    """GPG: the plain policy gradient over groups, without ratio, clip or reference; `grpo`'s settings. Chu et al. 2025,
    https://arxiv.org/abs/2504.02546.
    """
    return _policy_gradient(engine, reward, Advantage(F.gpg), kl_coef=kl_coef, loss_mode="gpg", **settings)


def gspo(
    engine: Any,
    reward: Any = None,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    kl_coef: float = 0.0,
    **settings: Any,
) -> Pipeline:
    """GSPO: the ratio of the whole sequence, clipped in a narrow band; `grpo`'s settings. Zheng et al. 2025,
    https://arxiv.org/abs/2507.18071.
    """
    chosen: dict[str, Any] = {
        "loss_mode": "gspo",
        "loss_agg_mode": "seq-mean-token-mean",
        "clip_low": clip_low,
        "clip_high": clip_high,
    }
    return _policy_gradient(engine, reward, Advantage(F.grpo), kl_coef=kl_coef, **{**chosen, **settings})


def cispo(
    engine: Any,
    reward: Any = None,
    *,
    clip_low: float = 1.0,
    clip_high: float = 0.28,
    kl_coef: float = 0.0,
    **settings: Any,
) -> Pipeline:
    """CISPO: the weight is clipped and not the gradient, so that no token falls silent; `grpo`'s settings.

    `clip_low=1` leaves the lower edge out, as the paper does. MiniMax 2025, https://arxiv.org/abs/2506.13585.
    """
    chosen: dict[str, Any] = {"loss_mode": "cispo", "clip_low": clip_low, "clip_high": clip_high}
    return _policy_gradient(engine, reward, Advantage(F.grpo), kl_coef=kl_coef, **chosen, **settings)


def remax(engine: Any, reward: Any = None, *, group_size: int = 1, **settings: Any) -> Pipeline:
    """ReMax: each sample against the prompt's greedy response, which shares rollout and reward; `grpo`'s settings.
    Li et al. 2024, https://arxiv.org/abs/2310.10505.
    """
    chosen: dict[str, Any] = {"group_size": group_size, "greedy_baseline": True, "judged": lambda drawn: [Baseline()]}
    return _policy_gradient(engine, reward, Advantage(F.remax), **chosen, **settings)


def reinforce_plus_plus(
    engine: Any, reward: Any = None, *, group_size: int = 1, kl_coef: float = 0.001, gamma: float = 1.0, **settings: Any
) -> Pipeline:
    """REINFORCE++: reward-to-go with the KL in the reward, whitened over the batch; no critic, no groups; `grpo`'s settings.
    Hu et al. 2025, https://arxiv.org/abs/2501.03262.
    """
    controller = FixedKL(kl_coef) if kl_coef else None
    advantage = Advantage(F.reinforce_plus_plus, gamma=gamma, kl_controller=controller)
    chosen: dict[str, Any] = {"group_size": group_size, "kl_coef": kl_coef, "kl_in_loss": False}
    return _policy_gradient(engine, reward, advantage, **chosen, **settings)


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
    agent: Any = None,
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
        _rollout(engine, agent, group_size=group_size, sampling=sampling),
        Reward(reward),
        LogProb(engine, entropy=True, temperature=heat),
        *_reference(engine, reference, needed=bool(kl_coef), temperature=heat),
        Values(critic),
        Advantage(F.gae, gamma=gamma, lam=lam, kl_controller=controller, kl_kind=kl_kind),
        Update(critic, ValueLoss(cliprange_value=clip_value), name="update_critic", **minis),
        Update(engine, loss, from_step=critic_warmup, temperature=heat, **minis),
    ]
    return Pipeline(stages)


def _rollout(engine: Any, agent: Any, **settings: Any) -> Rollout:
    return Rollout(engine, **settings) if agent is None else EpisodeRollout(engine, agent=agent, **settings)


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
