"""Algorithms as lists of stages: `grpo`, `ppo`, `dapo` and others.

A recipe returns a `Pipeline`: print it, index it, replace a stage of it. Settings have verl's names
and defaults (`algorithm`, `actor`, `critic`, `rollout` of its configuration) unless a line says otherwise; None is the default.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ParamSpec, TypedDict, Unpack, cast, get_args, get_type_hints

from workbench import functional as F
from workbench.base.config import require
from workbench.base.errors import SettingError, check_name, refuse_unknown
from workbench.base.progress import working
from workbench.compat.trl import TrlSettings, trl_settings
from workbench.compat.verl_correction import read_correction
from workbench.engines.local_engine.engine import local
from workbench.engines.paired import check_tokens
from workbench.engines.pausing import Pausing
from workbench.engines.protocol import Critic, Described, Engine, Learner, LogProbModel, SamplingSettings, WholeTeacher
from workbench.rewards.reward import Rubric
from workbench.stages.advantage import Advantage
from workbench.stages.correction import CorrectionSettings, RolloutCorrection
from workbench.stages.distillation import Divergence, TeacherAdvantage, TeacherLogProb
from workbench.stages.episodes import EpisodeRollout, LearntOnce, TreeRollout
from workbench.stages.filtering import FilterGroups, Overlong
from workbench.stages.log_prob import LogProb, SyncReference, Values
from workbench.stages.pipeline import Pipeline
from workbench.stages.policies import OfPolicy
from workbench.stages.preferences import AnswerPairs, BestAndWorst, KeepBest, MismatchedKL, Preference
from workbench.stages.reward import Reward
from workbench.stages.rollout import Baseline, Rollout
from workbench.stages.stage import Stage
from workbench.stages.targets import TRUTH, BradleyTerry, CrossEntropy, Pairs, Targets
from workbench.stages.terms import Term
from workbench.stages.trl import MaskTruncated, TrlLoss
from workbench.stages.update import PolicyLoss, Update, ValueLoss

__all__ = [
    "by_name", "cispo", "dapo", "distill", "dpo", "dr_grpo", "gpg", "grpo", "gspo", "like_trl", "maxrl", "multi_policy", "online_dpo",
    "opo", "ppo", "reinforce_plus_plus", "remax", "reward_model", "rft", "rloo", "sft", "tree_grpo", "with_rollout_correction",
]  # fmt: skip

P = ParamSpec("P")


class SampledSettings(TypedDict, total=False):
    """Keyword settings of every recipe that samples; `recipes.grpo` explains them."""

    group_size: int
    sampling: SamplingSettings | None
    temperature: float | None
    top_p: float | None
    max_tokens: int | None
    ppo_epochs: int
    ppo_mini_batch_size: int | None
    agent: Any


class PolicyGradientSettings(SampledSettings, total=False):
    """Keyword settings of every policy-gradient recipe; `recipes.grpo` explains them."""

    kl_coef: float
    kl_type: str
    kl_in_reward: bool
    clip_ratio_low: float
    clip_ratio_high: float
    loss_mode: str
    loss_agg_mode: str
    loss_scale_factor: float | None
    clip_ratio_c: float
    entropy_coeff: float
    entropy_target: float | None
    use_bias_correction_kl: bool
    off_policy_mask_threshold: float | None
    top_entropy_quantile: float
    mask_truncated: bool
    recompute_old_log_probs: bool
    reference: LogProbModel | None
    ref_sync_steps: int | None
    ref_mixup_alpha: float
    teacher: Any
    distill_coef: float


DEFAULTS: Mapping[str, Any] = {
    **{"group_size": 8, **PolicyLoss().to_dict(), "kl_coef": 0.001, "ppo_epochs": 1, "ppo_mini_batch_size": None},
    "kl_in_reward": False,
    "mask_truncated": False,
    "recompute_old_log_probs": False,
    "distill_coef": 1.0,
    "ref_mixup_alpha": 0.6,
    **dict.fromkeys(
        ("sampling", "temperature", "top_p", "max_tokens", "reference", "ref_sync_steps", "agent", "teacher")
    ),
}
"""The defaults of `PolicyGradientSettings`; a recipe may have others."""


def _policy_gradient(
    engine: Engine,
    reward: Any,
    advantage: Stage,
    *,
    greedy_baseline: bool = False,
    branching: Mapping[str, Any] | None = None,
    after_reward: Callable[[list[Stage]], Sequence[Stage]] = lambda stages: (),
    critic: Critic | None = None,
    value_loss: ValueLoss | None = None,
    critic_warmup: int = 0,
    **settings: Unpack[PolicyGradientSettings],
) -> Pipeline:
    """Build the pipeline that all policy-gradient recipes share: rollout, reward, log-probs, advantage, updates.

    `after_reward` receives the stages so far and returns stages to add behind the reward. An advantage that already has
    a KL controller keeps it. `branching` are settings of a `TreeRollout`, which then replaces the rollout.
    """
    given = {**DEFAULTS, **settings}
    rollout, temperature, minis = _sampled(engine, settings, branching, greedy_baseline)
    of_loss = set(PolicyLoss.field_names()) - ({"kl_coef", "kl_type"} if given["kl_in_reward"] else set())
    if given["kl_in_reward"] and given["kl_coef"] and "kl_controller" not in getattr(advantage, "made_with", {}):
        how = {"kl_controller": F.FixedKL(given["kl_coef"]), "kl_type": settings.get("kl_type", "k1")}
        advantage = advantage.with_settings(**how)
    loss = PolicyLoss(**{name: value for name, value in given.items() if name in of_loss})
    stages: list[Stage] = [rollout, Reward(reward)]
    stages += [*after_reward([*stages]), LogProb(engine, entropy=True, temperature=temperature)]
    follows: list[Stage] = []
    if (every := given["ref_sync_steps"]) is not None:
        fits = bool(given["kl_coef"]) and given["reference"] is None and hasattr(engine, "twin")
        expected = "kl_coef above 0, no reference of your own, and an engine of engines.local or engines.fsdp"
        require(fits, "what ref_sync_steps needs", expected=expected, found=given["reference"] or engine)
        given["reference"] = cast(Any, engine).twin()
        follows = [SyncReference(engine, given["reference"], steps=every, alpha=given["ref_mixup_alpha"])]
    if given["kl_coef"]:
        model = given["reference"] if given["reference"] is not None else engine.reference()
        stages += [LogProb(model, name="ref_log_prob", column="ref_log_prob", temperature=temperature)]
    stages += [MaskTruncated()] if given["mask_truncated"] else []
    if critic is None:
        stages += [advantage]
    else:
        stages += [Values(critic), advantage, Update(critic, value_loss or ValueLoss(), name="update_critic", **minis)]
    minis["recompute_old_log_probs"] = given["recompute_old_log_probs"]
    if given["teacher"] is not None:
        teacher = _frozen(engine, given["teacher"])
        stages += [TeacherLogProb(teacher, temperature=temperature)]
        whole: Any = {"teacher": teacher} if isinstance(teacher, WholeTeacher) else {"estimator": "sampled"}
        minis["terms"] = {"distill": Term(loss=Divergence(**whole), weight=given["distill_coef"])}
    update = Update(engine, loss, from_step=critic_warmup, temperature=temperature, **minis)
    return Pipeline([*stages, update, *follows])


def _frozen(engine: Any, teacher: Any) -> Any:
    """Return the frozen model of a teacher (of each in a dict). Raises `EngineError` for a teacher with other tokens."""
    if isinstance(teacher, Mapping):
        return {source: _frozen(engine, one) for source, one in teacher.items()}
    teacher = teacher.teacher() if isinstance(teacher, Pausing) else teacher
    scores = isinstance(teacher, LogProbModel)
    require(scores, "argument teacher", expected="an engine, or a frozen model of one", found=teacher)
    if getattr(teacher, "tokenizer", None) is not None:
        check_tokens(engine, teacher, "student and teacher")
    return teacher.reference() if isinstance(teacher, Learner) else teacher


def _sampled(
    engine: Engine,
    settings: Mapping[str, Any],
    branching: Mapping[str, Any] | None = None,
    greedy_baseline: bool = False,
) -> tuple[Stage, float, dict[str, Any]]:
    """Make the stage that samples single responses, an agent's episodes, or trees of episodes, by `SampledSettings`;
    returns (the stage, its temperature, the settings of an update's passes over the batch).
    """
    given = {**DEFAULTS, **settings}
    changes = {name: given[name] for name in ("temperature", "top_p", "max_tokens") if given[name] is not None}
    if given["sampling"] is not None and changes:
        found = f"sampling= and {', '.join(changes)}="
        raise SettingError("sampling is given twice", found=found, do="put all into sampling=, or leave it out")
    sampling, agent = given["sampling"] or SamplingSettings(**changes), given["agent"]
    how: dict[str, Any] = {"group_size": given["group_size"], "sampling": sampling}
    if branching is not None:
        stage: Stage = TreeRollout(engine, agent=agent, **branching, **how)
    elif agent is None:
        stage = Rollout(engine, greedy_baseline=greedy_baseline, **how)
    else:
        stage = EpisodeRollout(engine, agent=agent, greedy_baseline=greedy_baseline, **how)
    minis = {name: given[name] for name in ("ppo_epochs", "ppo_mini_batch_size")}
    return stage, sampling.temperature or 1.0, minis


def _recipe(**defaults: Any) -> Callable[[Callable[P, Pipeline]], Callable[P, Pipeline]]:
    """Decorator that makes a recipe: its signature shows all names of the annotation of `**settings`, with `defaults`, in
    its place.

    A setting that is None takes the recipe's default. A name that the recipe does not take is refused: the message has
    the nearest one, or for another library's name the one used here.
    """

    def decorated(build: Callable[P, Pipeline]) -> Callable[P, Pipeline]:
        own = dict(inspect.signature(build, eval_str=True).parameters)
        if (shared := own.pop("settings", None)) is not None:
            for name, kind in get_type_hints(get_args(shared.annotation)[0]).items():
                default = defaults.get(name, DEFAULTS[name])
                own[name] = shared.replace(name=name, kind=shared.KEYWORD_ONLY, default=default, annotation=kind)

        @functools.wraps(build)
        def made(*args: P.args, **settings: P.kwargs) -> Pipeline:
            refuse_unknown(build.__name__, settings, own)
            given = {name: one for name, one in settings.items() if one is not None or own[name].default is None}
            with working(f"recipe {build.__name__}"):  # a reference is a copy of the model
                return build(*args, **{**defaults, **given})

        made.__signature__ = inspect.Signature(list(own.values()), return_annotation=Pipeline)  # type: ignore[attr-defined]
        return made

    return decorated


@_recipe()
def grpo(
    engine: Engine, reward: Any = None, *, norm_adv_by_std: bool = True, **settings: Unpack[PolicyGradientSettings]
) -> Pipeline:
    """GRPO: a response's advantage is relative to the other samples of its prompt; KL to the frozen reference in the loss.

    Shao et al. 2024, https://arxiv.org/abs/2402.03300. The settings from `group_size` on are those of every recipe.

    Args:
        engine: samples, computes log-probs and is trained: `engines.local(path)`, `engines.fsdp(…)` or a cluster's.
        reward: a function, a file, a name, a reward model, a rubric; None: the scorer that the rows' `data_source` names.
        norm_adv_by_std: divide by the group's standard deviation; False is Dr.GRPO's advantage.
        group_size: samples per prompt (G).
        kl_coef: weight of the KL term; 0 leaves the reference out.
        kl_type: estimator of the KL: `k1`/`kl`, `k2`/`mse`, `k3`/`low_var_kl` or `abs`; with `+` after it, k2's gradient. In
            the reward it is `k1` unless given.
        kl_in_reward: subtract the KL from each token's reward, as `ppo` does, and not in the loss.
        sampling: a full `SamplingSettings`; or only `temperature`, `top_p` and `max_tokens` (response tokens).
        clip_ratio_low: the ratio is clipped below 1 − this.
        clip_ratio_high: the ratio is clipped above 1 + this.
        loss_mode: the policy loss: `vanilla`, `gspo`, `cispo`, `gpg`, … (`workbench.functional.POLICY_LOSSES`).
        loss_agg_mode: reduction: `token-mean`, `seq-mean-token-sum`, `seq-mean-token-mean`, `seq-mean-token-sum-norm`.
        loss_scale_factor: what `seq-mean-token-sum-norm` divides by, in tokens.
        clip_ratio_c: the ratio is at most this where the advantage is negative: dual clip, which is TRL's two-sided `delta`.
        entropy_coeff: weight of the entropy bonus.
        entropy_target: nats per token; the weight grows by 0.005 after each optimizer step whose entropy is at most this, else
            falls, and acts while it is (`functional.AdaptiveEntropy`); None: it is constant.
        use_bias_correction_kl: multiply the KL in the loss by the ratio, so that its gradient is that of the KL.
        off_policy_mask_threshold: nats per token from the sampler; rows further off with a negative advantage are left out.
        top_entropy_quantile: share of tokens to learn from, those of the highest entropy (0.2: the 80/20 rule).
        mask_truncated: leave responses that were cut at `max_tokens` out of the loss; their rewards stay in their groups.
        ppo_epochs: passes over the batch.
        ppo_mini_batch_size: prompts of one optimizer step; None: all of them.
        recompute_old_log_probs: compute the old log-probs in a pass of their own also for a single optimizer step on the whole
            batch, which has them from its own pass (see `stages.Update`).
        reference: any `LogProbModel`; None: the engine's weights as they are now, frozen.
        ref_sync_steps: training steps after which the reference moves towards the policy (TR-DPO, `stages.SyncReference`); None:
            never.
        ref_mixup_alpha: the policy's share of the weights that it then has.
        agent: an agent loop or the name of one: each sample is then an episode of that loop.
        teacher: an engine: the loss gets a further term `distill`, the reverse KL to it over the vocabulary (see `distill`),
            or of the sampled tokens where it gives no whole distributions (a vLLM server, a dict data source → teacher).
        distill_coef: weight of that term.

    Example:
        >>> pipe = wb.recipes.grpo(engine, my_reward, group_size=8, kl_coef=0.001, max_tokens=64)  # doctest: +SKIP
        >>> wb.Stepper(pipe, rows.batch(8)).run()  # doctest: +SKIP
    """
    return _policy_gradient(engine, reward, Advantage(F.grpo, norm_by_std=norm_adv_by_std), **settings)


@_recipe(kl_coef=0.0, max_tokens=128, loss_agg_mode="seq-mean-token-sum-norm")
def dr_grpo(engine: Engine, reward: Any = None, **settings: Unpack[PolicyGradientSettings]) -> Pipeline:
    """Dr.GRPO: GRPO without dividing by the group's deviation or by a response's own length.

    The advantage is s − μ (score minus group mean), the loss Σ over tokens / (rows · `loss_scale_factor`), by default
    `max_tokens`. Other settings as in `grpo`. Liu et al. 2025, https://arxiv.org/abs/2503.20783.
    """
    if settings.get("loss_scale_factor") is None:
        settings["loss_scale_factor"] = float(settings.get("max_tokens") or 128)
    return _policy_gradient(engine, reward, Advantage(F.grpo, norm_by_std=False), **settings)


@_recipe(kl_coef=0.0, max_tokens=128, clip_ratio_high=0.28)
def dapo(
    engine: Engine,
    reward: Any = None,
    *,
    rows: Any = None,
    max_num_gen_batches: int = 4,
    overlong_buffer: int = 0,
    overlong_penalty: float = 1.0,
    **settings: Unpack[PolicyGradientSettings],
) -> Pipeline:
    """DAPO: clip-higher, token-mean loss, no KL; dynamic sampling replaces groups of equal rewards; soft length penalty.

    Yu et al. 2025, https://arxiv.org/abs/2503.14476. The settings that are not listed here are explained at `grpo`.

    Args:
        rows: the training rows, from which further prompts are drawn; None: groups of equal rewards are only dropped.
        max_num_gen_batches: how often prompts are sampled for one step, at most.
        overlong_buffer: number of tokens before `max_tokens` in which the length penalty grows; 0: no penalty.
        overlong_penalty: the penalty at `max_tokens`.
    """
    length = settings.get("max_tokens") or 128

    def filtered(sampled: list[Stage]) -> list[Stage]:
        shaped: list[Stage] = [Overlong(length, overlong_buffer, overlong_penalty)] if overlong_buffer else []
        return [*shaped, FilterGroups([*sampled, *shaped], rows, max_num_gen_batches)]

    return _policy_gradient(engine, reward, Advantage(F.grpo), after_reward=filtered, **settings)


@_recipe(group_size=4)
def rloo(engine: Engine, reward: Any = None, **settings: Unpack[PolicyGradientSettings]) -> Pipeline:
    """RLOO (settings: see `grpo`): a reward minus the mean reward of the prompt's other samples.
    https://arxiv.org/abs/2402.14740.
    """
    return _policy_gradient(engine, reward, Advantage(F.rloo), **settings)


@_recipe(kl_coef=0.0)
def opo(engine: Engine, reward: Any = None, **settings: Unpack[PolicyGradientSettings]) -> Pipeline:
    """OPO (settings: see `grpo`): the baseline is the group's length-weighted mean reward; no KL in the loss.
    Hao et al. 2025, https://arxiv.org/abs/2505.23585."""
    return _policy_gradient(engine, reward, Advantage(F.opo), **settings)


@_recipe(kl_coef=0.0, loss_mode="gpg")
def gpg(engine: Engine, reward: Any = None, **settings: Unpack[PolicyGradientSettings]) -> Pipeline:
    """GPG (settings: see `grpo`): the plain policy gradient over groups, without ratio, clip or reference. Chu et al. 2025,
    https://arxiv.org/abs/2504.02546."""
    return _policy_gradient(engine, reward, Advantage(F.gpg), **settings)


@_recipe(kl_coef=0.0)
def maxrl(engine: Engine, reward: Any = None, **settings: Unpack[PolicyGradientSettings]) -> Pipeline:
    """MaxRL (settings: see `grpo`): the advantage is divided by the group's mean reward, for rewards of 0 and 1.
    Tajwar et al. 2026, https://arxiv.org/abs/2602.02710."""
    return _policy_gradient(engine, reward, Advantage(F.maxrl), **settings)


@_recipe(kl_coef=0.0, loss_mode="gspo", loss_agg_mode="seq-mean-token-mean", clip_ratio_low=3e-4, clip_ratio_high=4e-4)
def gspo(engine: Engine, reward: Any = None, **settings: Unpack[PolicyGradientSettings]) -> Pipeline:
    """GSPO (settings: see `grpo`): PPO's clip on the ratio of the whole sequence. https://arxiv.org/abs/2507.18071."""
    return _policy_gradient(engine, reward, Advantage(F.grpo), **settings)


@_recipe(kl_coef=0.0, loss_mode="cispo", clip_ratio_low=1.0, clip_ratio_high=0.28)
def cispo(engine: Engine, reward: Any = None, **settings: Unpack[PolicyGradientSettings]) -> Pipeline:
    """CISPO: the importance weight is clipped, not the gradient, so that every token keeps a gradient.

    `clip_ratio_low=1`: no lower limit, as in the paper. Settings: see `grpo`. MiniMax, https://arxiv.org/abs/2506.13585.
    """
    return _policy_gradient(engine, reward, Advantage(F.grpo), **settings)


@_recipe(group_size=1)
def remax(engine: Engine, reward: Any = None, **settings: Unpack[PolicyGradientSettings]) -> Pipeline:
    """ReMax (settings: see `grpo`): the baseline is the reward of the prompt's greedy response, in the same rollout.
    Li et al. 2024, https://arxiv.org/abs/2310.10505."""
    return _policy_gradient(
        engine, reward, Advantage(F.remax), greedy_baseline=True, after_reward=lambda _: [Baseline()], **settings
    )


@_recipe(group_size=1, kl_in_reward=True)
def reinforce_plus_plus(
    engine: Engine, reward: Any = None, *, gamma: float = 1.0, **settings: Unpack[PolicyGradientSettings]
) -> Pipeline:
    """REINFORCE++: reward-to-go with the KL in the reward, whitened over the batch; no critic, no groups.

    `gamma` is the discount per token; other settings as in `grpo`. Hu et al. 2025, https://arxiv.org/abs/2501.03262.
    """
    return _policy_gradient(engine, reward, Advantage(F.reinforce_plus_plus, gamma=gamma), **settings)


@_recipe(group_size=1, kl_type="k1", kl_in_reward=True)
def ppo(
    engine: Engine,
    reward: Any = None,
    *,
    critic: Critic | None = None,
    critic_lr: float = 1e-5,
    critic_warmup: int = 0,
    gamma: float = 1.0,
    lam: float = 1.0,
    lam_alpha: float | None = None,
    critic_lam: float | None = None,
    kl_target: float | None = None,
    kl_horizon: int = 10_000,
    cliprange_value: float = 0.5,
    **settings: Unpack[PolicyGradientSettings],
) -> Pipeline:
    """PPO with a critic and GAE; KL to the frozen reference in the reward, fixed or adaptive.

    Schulman et al. 2017, https://arxiv.org/abs/1707.06347; Ziegler et al. 2019 for the KL. The settings that are not listed
    here are explained at `grpo`.

    Args:
        critic: an engine with a value head; None: a copy of the policy with a value head, at learning rate `critic_lr`.
        critic_warmup: steps in which only the critic is trained.
        gamma: discount per token.
        lam: GAE's λ.
        lam_alpha: VAPO's α, 0.05 in its paper: a response of l tokens has λ = 1 − 1/(α·l), at least 0, in place of `lam`
            (`functional.length_adaptive_gae`, metric `advantage/lam`); None: `lam`.
        critic_lam: λ of the returns that the critic learns; None: the same, or with `lam_alpha` 1, as in VAPO.
        kl_type: estimator of the KL that is subtracted from the reward, or with `kl_in_reward=False` is in the loss.
        kl_target: adapt the coefficient towards this KL (nats per token) over `kl_horizon` samples; None: it is fixed.
        cliprange_value: how far a new value may leave the old one before its loss is clipped.
    """
    critic = critic if critic is not None else engine.critic(lr=critic_lr)
    how: dict[str, Any] = {"gamma": gamma} | ({"lam": lam} if lam_alpha is None else {"alpha": lam_alpha})
    how |= {} if critic_lam is None else {"critic_lam": critic_lam}
    estimator: Callable[..., Any] = F.gae if critic_lam is None else F.decoupled_gae
    estimator = estimator if lam_alpha is None else F.length_adaptive_gae
    if kl_target is not None and (kl_coef := settings.get("kl_coef", DEFAULTS["kl_coef"])):
        require(settings["kl_in_reward"], "kl_target", expected="kl_in_reward=True", found="kl_in_reward=False")
        how |= {"kl_controller": F.AdaptiveKL(kl_coef, kl_target, kl_horizon), "kl_type": settings["kl_type"]}
    advantage, value_loss = Advantage(estimator, **how), ValueLoss(cliprange_value=cliprange_value)
    return _policy_gradient(
        engine, reward, advantage, critic=critic, value_loss=value_loss, critic_warmup=critic_warmup, **settings
    )


TREE_CREDIT: Mapping[str, Callable[..., Any]] = {
    "turn": F.tree_turn,
    "arpo": F.arpo,
    "tree_rl": F.tree_rl,
    "tree_grpo": F.tree_grpo,
}
"""How `tree_grpo` shares a leaf's reward among the turns that led to it: name → estimator."""


@_recipe(kl_coef=0.0)
def tree_grpo(
    engine: Engine,
    reward: Any = None,
    *,
    credit: str = "turn",
    branches: int = 1,
    branch_turns: str = "entropy",
    learn_once: bool = True,
    **settings: Unpack[PolicyGradientSettings],
) -> Pipeline:
    """GRPO over trees: episodes are branched at turns, the rows of a prompt are the leaves, and each turn has its
    advantage.

    Shared turns are sampled once, and learnt from once. The settings that are not listed here are explained at `grpo`;
    `agent` is required, a `ToolAgent`.

    Args:
        credit: `turn`: a turn's advantage is the value after it minus that before, by the group's deviation; `arpo`
            (https://arxiv.org/abs/2507.19849): GRPO's of the leaves, averaged on shared tokens; `tree_rl`
            (https://arxiv.org/abs/2506.11902): global plus local advantage by √leaves; `tree_grpo`
            (https://arxiv.org/abs/2509.21240): GRPO's within the tree plus that within the prompt. Those are the papers'
            formulas. What differs from all of them: there is one round of branching, at whole turns; ARPO branches while it
            samples, by the rise of the entropy behind a tool's answer, TreeRL at tokens, and Tree-GRPO at random turns.
        branches: continuations of each episode that is sampled whole; `group_size` counts all.
        branch_turns: where to branch: `entropy`, `random` or `every` (`stages.TreeRollout`).
        learn_once: a shared turn is in the loss of one row only; False: of every row that has it, as in the papers.

    Example:
        >>> pipe = wb.recipes.tree_grpo(engine, agent=agent, credit="arpo", group_size=8)  # doctest: +SKIP
    """
    require(credit in TREE_CREDIT, "argument credit", expected=", ".join(TREE_CREDIT), found=credit)
    require(settings.get("agent") is not None, "argument agent", expected="a ToolAgent: turns are branched", found=None)
    trees = {"branches": branches, "branch_turns": branch_turns}
    once: list[Stage] = [LearntOnce()] if learn_once else []
    advantage = Advantage(TREE_CREDIT[credit])
    return _policy_gradient(engine, reward, advantage, branching=trees, after_reward=lambda _: once, **settings)


@_recipe(group_size=1)
def distill(
    engine: Engine,
    teacher: Any,
    *,
    kl: str | float = "reverse",
    estimator: str = "full",
    top_k: int | None = None,
    tail: bool = True,
    hint: str | None = None,
    policy_gradient: bool = False,
    log_prob_min_clamp: float | None = None,
    loss_max_clamp: float | None = None,
    reward: Any = None,
    loss_agg_mode: str = "token-mean",
    teacher_sync_steps: int | None = None,
    teacher_update_rate: float = 0.05,
    **settings: Unpack[SampledSettings],
) -> Pipeline:
    """On-policy distillation: the student samples, and learns to give each token the probability that the teacher gives it.

    Agarwal et al. 2023, https://arxiv.org/abs/2306.13649; as a policy gradient:
    https://thinkingmachines.ai/blog/on-policy-distillation/. RL and distillation together: `grpo(…, teacher=…)`.

    Args:
        engine: the student: samples and is trained.
        teacher: an engine with the same tokenizer, or its `reference()`, or a vLLM, `engines.vllm(…)` or `engines.remote(…)`; a dict
            data source → teacher gives each row its own. The last two with `top_k` or a sampled estimator; `"self"`: the student as it is before the update, which needs a `hint`.
        hint: the column with what only the teacher is told, a text or a chat (`stages.TeacherLogProb`): self-distillation
            (SDFT, SDPO) or a privileged teacher. `full` then compares the teacher's 100 likeliest tokens unless `top_k` says.
        kl: `reverse`, KL(student‖teacher), TRL's default; `forward`, KL(teacher‖student); or the β of the generalised JSD.
        estimator: `full`: the exact sum over the vocabulary, or over `top_k` and the rest; `sampled`, `k1` to `k3`: of the
            sampled token alone, for any teacher that scores, always the reverse KL (`stages.Divergence`).
        top_k: compare only the teacher's K likeliest tokens; they are kept in the batch, so that the teacher is not needed in
            the update.
        tail: with `top_k`, all other tokens count as one; False: as verl's `forward_kl_topk`.
        policy_gradient: take −KL of each token as its advantage in a policy gradient (verl's `use_policy_gradient`), by a
            sampled estimator (`full` and `sampled` become k1).
        log_prob_min_clamp: with `top_k`, log-probs of both models below this count as this; None: no limit.
        loss_max_clamp: the most that a token's KL counts, in nats; None: no limit.
        reward: only measured, in training and on held-out rows.
        teacher_sync_steps: of `"self"`: training steps after which the teacher, then a copy of the student, moves towards it
            (`stages.SyncReference`; TRL's EMA teacher: 1); None: it is the student itself.
        teacher_update_rate: the student's share in such a move (TRL's default): 1 − the decay of an EMA.
        loss_agg_mode: `token-mean` and others, as in `grpo`; so are the settings that are not listed here.

    Example:
        >>> teacher = wb.engines.local("my-7b")  # doctest: +SKIP
        >>> pipe = wb.recipes.distill(wb.engines.local("my-1b", lr=1e-5), teacher, kl="reverse", top_k=64)  # doctest: +SKIP
    """
    betas: dict[Any, float] = {"reverse": 1.0, "forward": 0.0}
    fits = kl in betas or (type(kl) in (int, float) and 0 <= cast(float, kl) <= 1)
    require(fits, "argument kl", expected="'reverse', 'forward' or a β in [0, 1]", found=kl)
    alone = isinstance(teacher, str) and teacher == "self"
    fits, expected = not alone or bool(hint), "a column with hints: without one the teacher equals the student"
    do = "name a column of the rows: hint='extra_info.answer'"
    require(fits, "hint with teacher='self'", expected=expected, found=hint, do=do)
    frozen = engine if alone else _frozen(engine, teacher)
    follows: list[Stage] = []
    if (every := teacher_sync_steps) is not None:
        fits, expected = alone and hasattr(engine, "twin"), "teacher='self', an engine of engines.local or engines.fsdp"
        require(fits, "what teacher_sync_steps needs", expected=expected, found=engine if alone else teacher)
        frozen = cast(Any, engine).twin()
        follows = [SyncReference(engine, frozen, steps=every, alpha=teacher_update_rate)]
    top_k = 100 if hint and estimator == "full" and top_k is None and not policy_gradient else top_k
    rollout, heat, minis = _sampled(engine, settings)
    how: dict[str, Any] = {"temperature": heat, **minis}
    stages: list[Stage] = [rollout] if reward is None else [rollout, Reward(reward)]
    if policy_gradient:
        kind = "k1" if estimator in ("full", "sampled") else estimator
        whole = kl == "reverse" and top_k is None
        require(whole, "kl and top_k with policy_gradient", expected="'reverse' and None", found=(kl, top_k))
        stages += [LogProb(engine, entropy=True, temperature=heat), TeacherLogProb(frozen, hint=hint, temperature=heat)]
        stages += [TeacherAdvantage(kl_type=kind, loss_max_clamp=loss_max_clamp, scored=reward is None)]
        return Pipeline([*stages, Update(engine, PolicyLoss(loss_agg_mode=loss_agg_mode), **how), *follows])
    live = frozen if estimator == "full" and top_k is None else None
    loss = Divergence(
        beta=betas.get(kl, cast(float, kl)), estimator=estimator, top_k=top_k, tail=tail, teacher=live,
        log_prob_min_clamp=log_prob_min_clamp, loss_max_clamp=loss_max_clamp, loss_agg_mode=loss_agg_mode,
    )  # fmt: skip
    scored = TeacherLogProb(frozen, top_k=top_k, hint=hint, temperature=heat)
    return Pipeline([*stages, scored, Update(engine, loss, **how), *follows])


@_recipe()
def sft(
    engine: Learner,
    *,
    target: str = TRUTH,
    max_tokens: int = 1024,
    every_turn: bool = False,
    loss_agg_mode: str = "token-mean",
) -> Pipeline:
    """Supervised fine-tuning: cross-entropy on each row's own target text, and on nothing of its prompt.

    A step learns from a batch of rows once, in one optimizer step; `train(…, eval_rows=…)` measures the loss on held-out rows
    (`val/nll`), `wb.evaluate` the trained model's rewards. The trained checkpoint is a model like any other.

    Args:
        engine: is trained: `engines.local(path)`, `engines.fsdp(…)` or a cluster's.
        target: the column of the targets, `a.b` for a key of dicts; by default the row's answer, as `wb.rows` reads TRL's
            `completion` and the last answer of `messages`. A response is the target and EOS.
        max_tokens: longest target, in tokens; a longer one is refused before training.
        every_turn: the answers within a chat's prompt are learned, too (OpenAI's `messages` of several turns).
        loss_agg_mode: `token-mean` weighs all target tokens alike; others as in `grpo`.

    Example:
        >>> engine = wb.engines.local("data/tiny-arith", lr=1e-4)  # doctest: +SKIP
        >>> pipe = wb.recipes.sft(engine, target="extra_info.answer", max_tokens=64)  # doctest: +SKIP
        >>> run = wb.train_blocking(pipe, wb.rows("data/arith/train.parquet"), epochs=1)  # doctest: +SKIP
    """
    stages = [Targets(engine, target=target, max_tokens=max_tokens, every_turn=every_turn)]
    return Pipeline([*stages, Update(engine, CrossEntropy(loss_agg_mode=loss_agg_mode))])


@_recipe()
def dpo(
    engine: Learner,
    *,
    beta: float = 0.1,
    loss: str = "sigmoid",
    chosen: str = "chosen",
    rejected: str = "rejected",
    max_tokens: int = 1024,
    label_smoothing: float = 0.0,
    gamma: float = 0.5,
    reference: LogProbModel | None = None,
    ppo_epochs: int = 1,
    ppo_mini_batch_size: int | None = None,
) -> Pipeline:
    """DPO and its relatives: a policy from preference pairs, without rewards or sampling.

    A row has a prompt and two answers, as for `reward_model`; a step learns from a batch of pairs once. The reference's
    log-probs are computed once a batch, in the column `ref_log_prob`. Metrics have TRL's names: `rewards/margins`,
    `rewards/accuracies`, …; `train(…, eval_rows=…)` measures them on held-out pairs (`val/margins`). Rafailov et al. 2023,
    https://arxiv.org/abs/2305.18290.

    Args:
        engine: is trained: `engines.local(path)`.
        beta: how much a deviation from the reference costs (TRL's default).
        loss: `sigmoid` (DPO), `ipo`, `hinge`, `robust`, `kto`, `simpo` (no reference), `apo_zero`, … (`functional.PREFERENCE_LOSSES`).
        chosen: the column of the preferred answers: texts, or messages whose last one is the answer.
        rejected: the column of the others.
        max_tokens: longest answer, in tokens; a longer one is refused before training, and so are two equal answers.
        label_smoothing: share of pairs whose labels are wrong: for `robust` and `exo_pair`.
        gamma: simpo's target margin.
        reference: any `LogProbModel`; None: the engine's weights as they are now, frozen.
        ppo_epochs: passes over the batch.
        ppo_mini_batch_size: pairs of one optimizer step; None: all of them.

    Example:
        >>> pairs = wb.rows("pairs.jsonl")  # prompt, chosen, rejected  # doctest: +SKIP
        >>> run = wb.train_blocking(wb.recipes.dpo(engine, beta=0.1, loss="ipo"), pairs, epochs=1)  # doctest: +SKIP
    """
    kind = Preference(loss_type=loss, beta=beta, label_smoothing=label_smoothing, gamma=gamma)
    first: Stage = AnswerPairs(engine, chosen=chosen, rejected=rejected, max_tokens=max_tokens)
    return _preferences(
        engine, [first], kind, reference, ppo_epochs=ppo_epochs, ppo_mini_batch_size=ppo_mini_batch_size
    )


@_recipe(group_size=2)
def online_dpo(
    engine: Engine,
    reward: Any = None,
    *,
    beta: float = 0.1,
    loss: str = "sigmoid",
    label_smoothing: float = 0.0,
    gamma: float = 0.5,
    reference: LogProbModel | None = None,
    **settings: Unpack[SampledSettings],
) -> Pipeline:
    """Online DPO: the policy's own samples of a prompt, the best against the worst by a reward or judge, are its pairs.

    Settings are those of `dpo` and `grpo`. A prompt whose samples have one reward is counted (`pairs/tied`) and teaches
    nothing. Guo et al. 2024, https://arxiv.org/abs/2402.04792.
    """
    require(settings["group_size"] > 1, "group_size", expected="≥ 2", found=settings["group_size"])
    kind = Preference(loss_type=loss, beta=beta, label_smoothing=label_smoothing, gamma=gamma)
    rollout, _, minis = _sampled(engine, settings)
    return _preferences(engine, [rollout, Reward(reward), BestAndWorst()], kind, reference, **minis)


@_recipe()
def rft(
    engine: Engine,
    reward: Any = None,
    *,
    k: int = 1,
    above: float | None = None,
    loss_agg_mode: str = "token-mean",
    **settings: Unpack[SampledSettings],
) -> Pipeline:
    """Rejection sampling: of `group_size` samples of a prompt the k best with a reward of at least `above` become targets of
    supervised fine-tuning.

    Other settings are those of `grpo`; from a recorded run the same is `recipes.sft` on `run.best(k, above)`. Yuan et al. 2023,
    https://arxiv.org/abs/2308.01825; repeated, expert iteration: https://arxiv.org/abs/2312.06585.
    """
    rollout, temperature, minis = _sampled(engine, settings)
    update = Update(engine, CrossEntropy(loss_agg_mode=loss_agg_mode), temperature=temperature, **minis)
    return Pipeline([rollout, Reward(reward), KeepBest(k, above), update])


def _preferences(engine: Any, stages: list[Stage], loss: Preference, reference: Any, **minis: Any) -> Pipeline:
    """Append to stages that make pairs the reference's log-probs, where the loss reads them, and the update."""
    sharded = isinstance(engine, Described) and "ranks" in (engine.describe() or {})
    do = "open the model by engines.local(…)"
    require(not sharded, "engine for preference pairs", expected="one that keeps pairs together", found=engine, do=do)
    if loss.uses_reference:
        model = reference if reference is not None else engine.reference()
        stages = [*stages, LogProb(model, name="ref_log_prob", column="ref_log_prob")]
        stages += [MismatchedKL(engine, model)] if loss.loss_type == "kto" else []
    return Pipeline([*stages, Update(engine, loss, **minis)])


@_recipe()
def reward_model(
    engine: Learner,
    *,
    chosen: str = "chosen",
    rejected: str = "rejected",
    margin: str | None = None,
    center_rewards_coefficient: float = 0.0,
    max_tokens: int = 1024,
    template: str = "chat",
) -> Pipeline:
    """A reward model from preference pairs: −log σ(r⁺ − r⁻ − margin), Bradley and Terry's likelihood that the better one wins.

    A row of the data has a prompt and two answers; a step learns from a batch of pairs once. `reward_model/accuracy` and
    `margin` (mean r⁺ − r⁻) are metrics of training, `val/accuracy` and `val/margin` those of `train(…, eval_rows=…)`. The
    trained checkpoint is a sequence classifier: `rewards.RewardModel(engines.classifier(run.checkpoint()))`.

    Args:
        engine: is trained: `engines.reward_model(path)`.
        chosen: the column of the preferred answers: texts, or messages whose last one is the answer.
        rejected: the column of the others.
        margin: a column with a number for each pair, by which r⁺ is to be above r⁻; None: 0.
        center_rewards_coefficient: c of the term c·(r⁺ + r⁻)², which keeps rewards around 0 (TRL suggests 0.01).
        max_tokens: longest answer, in tokens; a longer one is refused before training.
        template: how prompt and answer become one text, as in `rewards.RewardModel`: `chat` or `question_answer`.

    Example:
        >>> engine = wb.engines.reward_model("data/tiny-arith", lr=1e-4)  # doctest: +SKIP
        >>> pairs = wb.rows("pairs.jsonl")  # prompt, chosen, rejected  # doctest: +SKIP
        >>> run = wb.train_blocking(wb.recipes.reward_model(engine), pairs, epochs=1)  # doctest: +SKIP
        >>> reward = wb.rewards.RewardModel(wb.engines.classifier(run.checkpoint()))  # doctest: +SKIP
    """
    given: dict[str, Any] = {"margin": margin, "max_tokens": max_tokens, "template": template}
    loss = BradleyTerry(center_rewards_coefficient=center_rewards_coefficient)
    pairs = Pairs(engine, chosen=chosen, rejected=rejected, **given)
    return Pipeline([pairs, Update(engine, loss, name="update_reward_model")])


def like_trl(
    config: Any,
    engine: Any,
    reward: Any = None,
    *,
    prompts: int | None = None,
    agent: Any = None,
    reference: LogProbModel | None = None,
) -> Pipeline:
    """TRL 1.16's `GRPOTrainer` from its own configuration, with TRL's own defaults, formulas and divisors.

    No argument is ignored: each is done, refused by name, or has no meaning here (`docs/guide/from-trl.md`). The loss is a
    `stages.TrlLoss`. What belongs to the engine and to `train` is in `wb.compat.trl_settings(config)`.

    Args:
        config: a `GRPOConfig`, or a mapping with its names.
        engine: a model's folder or name, from which an engine with the configuration's settings is made; or an engine with
            those settings.
        reward: as in `grpo`; or a list of rewards, weighted by `reward_weights`.
        prompts: number of rows of the data set, which a learning rate that falls to 0 needs where there is no `max_steps`.
        agent: an agent loop, in place of TRL's tools.
        reference: any `LogProbModel`; None: the engine's weights as they are now, where `beta` is not 0.

    Raises `SettingError` for an argument that is refused, and where an engine's settings are not the configuration's.

    Example:
        >>> how = wb.compat.trl_settings(config, prompts=len(rows))  # doctest: +SKIP
        >>> pipe = wb.recipes.like_trl(config, wb.engines.local(path, **how.engine), my_reward)  # doctest: +SKIP
        >>> run = wb.train_blocking(pipe, rows, **how.train, run="runs/like-trl")  # doctest: +SKIP
    """
    how = trl_settings(config, prompts)
    model = _trl_engine(engine, how)
    if isinstance(reward, list | tuple) or how.reward_weights is not None:
        several = list(reward) if isinstance(reward, list | tuple) else [reward]
        weights = how.reward_weights or (1.0,) * len(several)
        require(len(weights) == len(several), "reward_weights", expected=f"{len(several)} numbers", found=weights)
        names = [getattr(one, "__name__", type(one).__name__) for one in several]
        names = [one if names.count(one) == 1 else f"{one}_{number}" for number, one in enumerate(names)]
        reward = Rubric(dict(zip(names, several, strict=True)), weights=dict(zip(names, weights, strict=True)))
    scaled: dict[str, Any] = {"eps": 1e-4} if how.scale_rewards != "none" else {"norm_by_std": False}
    require(how.scale_rewards in ("group", "batch", "none"), "scale_rewards", expected="group, batch or none", found=how.scale_rewards)  # fmt: skip
    estimator = F.grpo_batch if how.scale_rewards == "batch" else F.grpo
    loss, sampling = TrlLoss(**how.loss), SamplingSettings(**how.sampling)
    shared: dict[str, Any] = {"group_size": how.group_size, "sampling": sampling, "kl_coef": loss.kl_coef}
    shared |= {"agent": agent, "reference": reference, **how.ref_sync}
    update = Update(model, loss, temperature=sampling.temperature or 1.0, **how.update)
    stages: list[Stage] = []
    for stage in _policy_gradient(model, reward, Advantage(estimator, **scaled), **shared):
        if stage.name == "advantage":
            stages += [RolloutCorrection(**how.correction)] if how.correction else []
            stages += [MaskTruncated()] if how.mask_truncated else []
        stages.append(update if stage.name == update.name else stage)
    return Pipeline(stages)


def _trl_engine(engine: Any, how: TrlSettings) -> Engine:
    """Return the engine, made of a model's name with the configuration's settings. Raises `SettingError` for an engine
    whose settings differ."""
    if isinstance(engine, str | Path):
        return cast(Engine, local(engine, **how.engine))
    about = engine.describe() if isinstance(engine, Described) else {}
    unlike = [f"{name}={about[name]!r}" for name, value in how.engine.items() if name in about and about[name] != value]
    wanted = ", ".join(f"{name}={how.engine[name]!r}" for name in (one.partition("=")[0] for one in unlike))
    do = "engines.local(path, **wb.compat.trl_settings(config).engine), or the engine's numbers in the configuration"
    require(
        not unlike, "settings of the engine", expected=f"the configuration's: {wanted}", found=", ".join(unlike), do=do
    )
    return cast(Engine, engine)


def by_name(name: str) -> Callable[..., Pipeline]:
    """Return the reinforcement-learning recipe with this name, such as "grpo". Raises `SettingError` for an unknown
    name, with the nearest.
    """
    # tree_grpo needs an agent's object
    others = {
        "by_name", "distill", "dpo", "like_trl", "online_dpo", "reward_model", "rft", "sft", "tree_grpo", "with_rollout_correction",
    }  # fmt: skip
    known = {one: globals()[one] for one in __all__ if one not in others}
    check_name("recipe", name, known)
    return cast(Callable[..., Pipeline], known[name])


def with_rollout_correction(
    pipeline: Pipeline, block: str | Mapping[str, Any] | None = None, **settings: Any
) -> Pipeline:
    """Return a copy of a recipe's pipeline that corrects for a sampler whose probabilities are not the trainer's.

    It is for rows that were sampled with other weights than the trainer's (`train(…, ahead=1)`) or by an engine with
    other numerics: PPO's own ratio starts at the trainer's old log-probs and corrects neither. Decoupled PPO, Hilton et
    al. 2021, https://arxiv.org/abs/2110.00641; truncated as in Ionides 2008; verl's `algorithm.rollout_correction`.
    With only the pipeline the gap is measured and not corrected. An earlier correction is replaced.

    Args:
        pipeline: a pipeline that a recipe returned.
        block: verl's block as written (mapping, YAML text, overrides), or a preset, such as "decoupled_token_is".
        settings: verl's names, in place of the block's: `rollout_is`, `rollout_is_threshold`,
            `rollout_is_batch_normalize`, `rollout_rs`, `rollout_rs_threshold`, `bypass_mode`, `loss_type`.

    Decoupled, a stage before `advantage` writes `rollout_is_weights` and `loss_mask`. With `bypass_mode` there is no
    `old_log_prob` stage, and the loss computes both. Raises `SettingError` for an unknown name or a bad threshold, and
    where bypass mode would replace the loss by another one.
    """
    how = read_correction(block, **settings)
    correction = CorrectionSettings(**how.correction())
    stages = [one for one in pipeline if one.name != RolloutCorrection.name]
    names = [one.name for one in stages]
    loss: dict[str, Any] = {"rollout_is": how.rollout_is is not None, "bypass": None}
    if how.bypass_mode:
        wanted = {"ppo_clip": "vanilla", "reinforce": "gpg"}[how.loss_type]
        own = stages[names.index("update_actor")].settings()["loss_mode"]
        what, do = f"loss_mode in bypass mode with loss_type={how.loss_type}", "leave it out: bypass mode sets it"
        require(own in ("vanilla", wanted), what, expected="vanilla, a recipe's default", found=own, do=do)
        weighs = how.loss_type == "reinforce" and how.rollout_is is not None
        loss = {"rollout_is": weighs, "bypass": correction, "loss_mode": wanted}
        place = names.index("old_log_prob") if "old_log_prob" in names else names.index("advantage")
        stages[place : place + ("old_log_prob" in names)] = [RolloutCorrection(bypass_mode=True)]
    else:
        stages.insert(names.index("advantage"), RolloutCorrection(**how.correction()))
    corrected = [one.with_settings(**loss) if one.name == "update_actor" else one for one in stages]
    return Pipeline(corrected, overlap=pipeline.overlap, given=pipeline.given)


def multi_policy(policies: Mapping[str, Pipeline]) -> Pipeline:
    """Train several policies in one episode (solver and verifier, debate), each by the stages of a separate recipe.

    The rollout is the first pipeline's, and so is the agent loop in which the policies speak: `generate(…,
    policy="verifier")`, with `AgentLoopOutput(policy="verifier")` for the sequences that hold its tokens, or
    `SubAgent(…, policy="verifier")`. The stages behind the rollout then work for each policy on that policy's rows
    (`stages.OfPolicy`): its reward scores its last sequence of each episode, its advantages compare within (uid,
    policy), its update's gradient is of its tokens alone. What a policy's reward has to know of the others the loop
    puts into `extra` (column `agent_extra`).

    Args:
        policies: name → a pipeline of a recipe, made with the policy's own engine, its reward and the same `agent`, `group_size`
            and sampling. The first policy's stages keep their names, others have the policy's name appended: `update_verifier`.

    Raises `SettingError` for fewer than two policies, one engine for two, a rollout that differs, and stages that move
    rows.

    Example:
        >>> first = wb.recipes.grpo(solver, solved, agent=loop)  # doctest: +SKIP
        >>> wb.recipes.multi_policy({"solver": first, "verifier": wb.recipes.grpo(verifier, judged, agent=loop)})  # doctest: +SKIP
    """
    require(len(policies) > 1, "argument policies", expected="two or more pipelines by name", found=[*policies])
    main, *others = policies
    rollouts = _alike({name: one["rollout"] for name, one in policies.items()}, main)
    samplers = {name: rollouts[name].sampler for name in others}
    stages: list[Stage] = [rollouts[main].with_settings(policy=main, policies=samplers)]
    for name, pipeline in policies.items():
        for stage in list(pipeline)[1:]:
            if stage.updates and name != main:
                end = stage.name.removeprefix("update_").replace("actor", "")
                stage = stage.with_settings(name="_".join(filter(None, ("update", name, end))))
            stages.append(OfPolicy(stage, name, first=name == main))
    return Pipeline(stages, given=policies[main].given)


def _alike(rollouts: Mapping[str, Any], main: str) -> Mapping[str, Any]:
    """Return the rollouts of several policies. Raises `SettingError` where they differ in more than their samplers."""
    wanted = rollouts[main].settings()
    for name, one in rollouts.items():
        kind, own = f"the rollout of policy {name!r}", one.settings()
        require(isinstance(one, EpisodeRollout), kind, expected="one with an agent: agent=…", found=one)
        unlike = [key for key in {**wanted, **own} if own.get(key) != wanted.get(key)]
        do = "give each pipeline the same agent, group_size and sampling"
        require(not unlike, kind, expected=f"that of {main!r}", found=unlike, do=do)
    if len({id(one.sampler) for one in rollouts.values()}) < len(rollouts):
        do = "open an engine for each policy"
        raise SettingError("engines of the policies", expected="another engine for each policy", do=do)
    return rollouts
