"""The stage that updates weights, of the actor or the critic (epochs × mini-batches, a step each), and its losses."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol, TypeAlias, cast

import torch
from torch import Tensor

from workbench.base.config import Settings, require
from workbench.base.errors import NonFinite, RewardError, VersionMismatch, check_name, first_line
from workbench.base.metrics import Count, Max, Mean, Metric, Min, Sum, join
from workbench.base.progress import present
from workbench.base.seeds import derive
from workbench.dataproto.columns import EXPERTS, PIXELS
from workbench.dataproto.core import SESSION, DataProto, episodes
from workbench.dataproto.value import Origin
from workbench.datasets.rows import shuffled
from workbench.engines.protocol import Learner, LogProbModel, Loss, LossCounts, LossOutput, StepResult
from workbench.functional import trl
from workbench.functional.losses import AGGREGATIONS, POLICY_LOSSES, Surrogate, aggregate, kl_penalty, value_loss
from workbench.functional.masking import masked_mean
from workbench.stages.correction import CorrectionSettings
from workbench.stages.log_prob import SCORED_COLUMNS, LogProb
from workbench.stages.stage import BaseStage, Outcome, Stage, used
from workbench.stages.terms import Term, check_terms, counts_of, loss_mask, streams

POLICY_ENTROPY = "actor/policy_entropy"
"""The mean entropy of a mini-batch's tokens in the pass that learns from them."""
PASS = "new_log_probs/"
"""Of several passes (`ppo_epochs`) each before the last has a column of its log-probs: `new_log_probs/1` is the first's."""


def _mean(values: Tensor, mask: Tensor) -> Mean:
    mean: Any = masked_mean(values.detach().float(), mask).double()
    weight: Any = mask.sum().double()
    return Mean(mean * weight, weight)


def _sum(value: Tensor) -> Sum:
    number: Any = value.detach()  # the learner reads those of all micro-batches at once
    return Sum(number)


@dataclass(frozen=True, kw_only=True)
class PolicyLoss(Settings):
    """A policy loss by name, minus an entropy bonus, plus a KL to the reference.

    loss = pg − entropy_coeff·H + kl_coef·KL, each aggregated by `loss_agg_mode` over the whole mini-batch (global counts), so
    that micro-batches and ranks cannot change it. Raises `SettingError` for an unknown `loss_mode` or `loss_agg_mode`.

    With `bypass`, verl's bypass mode, the sampler's log-probs are the old ones: ρ = π / π_rollout. From the log-probs of
    each pass and the sampler's, over `response_mask`, the loss computes importance weights (`rollout_is_weights`),
    rejection (`loss_mask`) and `rollout_corr/*` (see `functional.correction`): columns and metrics of the update.
    Rejected tokens leave pg and its metrics; entropy, KL and all denominators keep them, as in verl, so that they can be
    counted before any pass. What depends on the cut, as in verl: `rollout_is_batch_normalize` divides by the mean of each
    micro-batch, and deviations and effective sample size are means of the micro-batches' own. verl's `loss_type`
    `ppo_clip` is `loss_mode="vanilla"`, whose ratio corrects already; `reinforce` is `loss_mode="gpg"`, with
    `rollout_is=True` −w·A·log π.
    """

    loss_mode: str = "vanilla"
    """Name of the policy loss in `functional.POLICY_LOSSES` (verl's names)."""
    clip_ratio_low: float = 0.2
    """Lower edge of the clip range: 1 − this."""
    clip_ratio_high: float = 0.2
    """Upper edge of the clip range: 1 + this; raise it alone for DAPO's clip-higher."""
    clip_ratio_c: float = 3.0
    """Dual clip: bound of the ratio where the advantage is negative."""
    entropy_coeff: float = 0.0
    """Weight of the entropy bonus."""
    kl_coef: float = 0.0
    """Weight of KL(policy‖reference) in the loss; 0 needs no reference."""
    kl_type: str = "low_var_kl"
    """Estimator of that KL: see `functional.kl_penalty`."""
    loss_agg_mode: str = "token-mean"
    """How token losses become one number: see `functional.aggregate`."""
    loss_scale_factor: float | None = None
    """What `seq-mean-token-sum-norm` divides by; None: the mini-batch's width."""
    rollout_is: bool = False
    """Multiply every token's loss by the column `rollout_is_weights` (see `stages.RolloutCorrection`), or by `bypass`'s."""
    bypass: CorrectionSettings | None = None
    """Weights and rejection that the loss computes itself, against the sampler's log-probs; None: the batch's columns."""
    tau_pos: float = 1.0
    """sapo: steepness of the gate for positive advantages."""
    tau_neg: float = 1.05
    """sapo: steepness of the gate for negative advantages."""
    dro_beta: float = 0.1
    """dro: weight of the quadratic."""
    clip_cov_ratio: float = 0.0002
    """clip_cov: share of tokens that are left out."""
    clip_cov_lb: float = 1.0
    """clip_cov: tokens of a lower covariance are not left out."""
    clip_cov_ub: float = 5.0
    """clip_cov: tokens of a higher covariance are not left out."""
    kl_cov_ratio: float = 0.0002
    """kl_cov: share of tokens that get the KL penalty."""
    ppo_kl_coef: float = 0.1
    """kl_cov: weight of the KL penalty."""
    use_bias_correction_kl: bool = False
    """Multiply the KL of each token by its ratio ρ: the gradient is then that of KL(policy‖reference), also after several
    steps. DeepSeek-V3.2, https://arxiv.org/abs/2512.02556, eq. 7."""
    off_policy_mask_threshold: float | None = None
    """Nats per token; rows of a negative advantage that are further off policy leave the policy term
    (`functional.trl.on_policy_rows`). None: none do."""
    off_policy_sampler: bool = True
    """Measure that distance from the sampler's log-probs (`rollout_log_probs`), and not from the old ones."""
    top_entropy_quantile: float = 1.0
    """Share of tokens, those of the highest entropy in a micro-batch, that the policy term learns from
    (`functional.trl.top_entropy`)."""
    entropy_target: float | None = None
    """Nats per token: `entropy_coeff` grows by `entropy_delta` after an optimizer step at or below it, else falls
    (`functional.trl.AdaptiveEntropy`). None: it is constant."""
    entropy_delta: float = 0.005
    """How much `entropy_coeff` changes after each optimizer step."""
    entropy_coeff_min: float = 0.0
    """The least that it falls to."""
    entropy_coeff_max: float = 1.0
    """The most that it grows to."""

    def __post_init__(self) -> None:
        for name, known in (("loss_mode", POLICY_LOSSES), ("loss_agg_mode", AGGREGATIONS)):
            check_name(name, getattr(self, name), known)
        for name in ("clip_ratio_low", "clip_ratio_high"):
            require(getattr(self, name) >= 0, name, expected="≥ 0", found=getattr(self, name))
        require(self.clip_ratio_c > 1, "clip_ratio_c", expected="> 1", found=self.clip_ratio_c)
        share, several = self.top_entropy_quantile, self.loss_mode != "geo_mean"
        require(0 <= share <= 1, "top_entropy_quantile", expected="0 to 1", found=share)
        whole = "1 with geo_mean, whose loss is one number for a row"
        require(several or share == 1, "top_entropy_quantile", expected=whole, found=share)
        least, most = self.entropy_coeff_min, self.entropy_coeff_max
        require(0 <= least <= most, "entropy_coeff_min", expected="0 to entropy_coeff_max", found=least)
        fits = isinstance(self.bypass, CorrectionSettings | None)
        require(fits, "bypass", expected="a CorrectionSettings or None", found=self.bypass)
        if self.bypass is not None and self.rollout_is:
            level, ratio = self.bypass.rollout_is, self.loss_mode != "gpg"
            needed = "a level: rollout_is=True asks for weights"
            require(level is not None, "rollout_is of bypass", expected=needed, found=level)
            do = "set rollout_is=False: its ratio is against the sampler already, and weights would count it twice"
            require(not ratio, "loss_mode with bypass and rollout_is=True", expected="gpg", found=self.loss_mode, do=do)

    @property
    def writes(self) -> tuple[str, ...]:
        """Names of the columns [B, T] that an update with this loss writes."""
        return ("new_log_probs", "clipped") + (() if self.bypass is None else self.bypass.writes)

    @property
    def reads(self) -> tuple[str, ...]:
        """Names of the columns that the loss needs, besides the inputs of a forward pass (`input_ids`, …)."""
        reads = ("old_log_probs", "advantages") + ("ref_log_prob",) * bool(self.kl_coef)
        far = self.off_policy_sampler and self.off_policy_mask_threshold is not None
        reads += ("rollout_log_probs",) * (far and self.bypass is None)
        return reads + (("rollout_log_probs",) if self.bypass else ("rollout_is_weights",) * self.rollout_is)

    @property
    def want(self) -> tuple[str, ...]:
        """Names of the model outputs that the loss needs; `entropy`, which costs a pass over the vocabulary, only for a
        bonus or a choice of tokens."""
        adaptive = self.entropy_target is not None
        return ("log_probs",) + ("entropy",) * bool(self.entropy_coeff or adaptive or self.top_entropy_quantile < 1)

    def __call__(self, outputs: Mapping[str, Tensor], rows: DataProto, loss_counts: LossCounts) -> LossOutput:
        """Compute the loss of one micro-batch, its metrics, and the columns named in `writes`."""
        mask, new = loss_mask(rows), outputs["log_probs"]
        old, kept, columns, metrics = self._corrected(new.detach(), rows, mask)
        function = POLICY_LOSSES[self.loss_mode]
        taken = inspect.signature(function).parameters
        settings = {name: value for name, value in self.to_dict().items() if name in taken}
        surrogate: Surrogate = function(old, new, rows["advantages"], kept, **settings)
        held: Mapping[str, Tensor] | DataProto = rows if self.bypass is None else columns
        weighted = surrogate.weighted(held["rollout_is_weights"], kept) if self.rollout_is else surrogate.loss
        near, chosen = self._acting(outputs, rows, old, kept, metrics)
        loss = pg_loss = self._aggregate(weighted * near * chosen, kept, loss_counts, surrogate.aggregation)
        metrics |= {"actor/pg_loss": _sum(pg_loss)}
        metrics |= {f"actor/{name}": _mean(values, kept) for name, values in surrogate.metrics.items()}
        if self.entropy_coeff:
            entropy = self._aggregate(outputs["entropy"], mask, loss_counts)
            loss = loss - self.entropy_coeff * entropy
            metrics["actor/entropy_loss"] = _sum(entropy)
        metrics |= self._measured(outputs, mask)
        if self.kl_coef:
            each = kl_penalty(new, rows["ref_log_prob"], self.kl_type)
            if self.use_bias_correction_kl:
                metrics["actor/kl_unweighted"] = _mean(each, mask)
                each = each * trl.log_ratios(old, new, mask).exp()
            kl = self._aggregate(each, mask, loss_counts)
            loss = loss + self.kl_coef * kl
            metrics |= {"actor/kl_loss": _sum(kl), "actor/kl_coef": Mean(self.kl_coef)}
        clipped = surrogate.clipped | surrogate.clipped_lower
        columns |= {"new_log_probs": (new * rows["response_mask"]).detach(), "clipped": clipped & kept.bool()}
        return LossOutput(loss, metrics, columns)

    def _acting(
        self, outputs: Mapping[str, Tensor], rows: DataProto, old: Tensor, mask: Tensor, metrics: dict[str, Metric]
    ) -> tuple[Tensor, Tensor]:
        """Return what the policy term of each token is multiplied by: 1 in rows near enough to the policy, and 1 for
        tokens of high entropy. The metrics of both are added to `metrics`."""
        near = chosen = (mask > 0).to(mask.dtype)
        if (limit := self.off_policy_mask_threshold) is not None:
            sampled = rows["rollout_log_probs"] if self.off_policy_sampler else old
            near = trl.on_policy_rows(sampled, outputs["log_probs"], rows["advantages"], mask, limit)
            metrics["actor/off_policy_masked"] = _mean(1 - near, mask)
        if self.top_entropy_quantile < 1:
            chosen = trl.top_entropy(outputs["entropy"], mask, self.top_entropy_quantile)
            metrics["actor/top_entropy_share"] = _mean(chosen, mask)
        return near, chosen

    def _measured(self, outputs: Mapping[str, Tensor], mask: Tensor) -> dict[str, Metric]:
        """Return the metrics of an adaptive entropy bonus: the entropy by which Update changes the weight, and the weight."""
        if self.entropy_target is None:
            return {}
        return {POLICY_ENTROPY: _mean(outputs["entropy"], mask), "actor/entropy_coeff": Mean(self.entropy_coeff)}

    def _corrected(
        self, new: Tensor, rows: DataProto, mask: Tensor
    ) -> tuple[Tensor, Tensor, dict[str, Tensor], dict[str, Metric]]:
        """Return the old log-probs, the mask for the policy loss, and, with `bypass`, the columns and metrics of its
        correction."""
        if self.bypass is None:
            return rows["old_log_probs"], mask, {}, {}
        columns, metrics = self.bypass.apply(new, rows)
        kept = mask * columns["loss_mask"] if "loss_mask" in columns else mask
        return rows["rollout_log_probs"], kept, columns, metrics

    def _aggregate(self, values: Tensor, mask: Tensor, counts: LossCounts, mode: str | None = None) -> Tensor:
        width = self.loss_scale_factor or counts.width
        mode = mode or self.loss_agg_mode
        return aggregate(values, mask, mode, tokens=counts.tokens, sequences=counts.sequences, scale=width)


_LATER = PolicyLoss.field_names()[PolicyLoss.field_names().index("use_bias_correction_kl") :]
"""Settings that losses of version 0.16 and before did not have."""


@dataclass(frozen=True)
class OnPolicyLoss:
    """A policy loss that uses the log-probs of its own forward pass, detached, as the old ones: every ratio is 1, and
    `ppo_kl` is 0.

    It serves a batch that gets a single optimizer step at the weights that `old_log_probs` would be computed with, so
    that no separate pass is needed for them.
    """

    loss: PolicyLoss
    want: ClassVar[tuple[str, ...]] = ("log_probs", "entropy")
    """Model outputs that the loss needs; without `entropy_coeff` entropies are only a column, and cost no gradient."""

    @property
    def reads(self) -> tuple[str, ...]:
        """Names of the columns that the loss needs, besides the inputs of a forward pass."""
        return tuple(name for name in self.loss.reads if name != "old_log_probs")

    def __call__(self, outputs: Mapping[str, Tensor], rows: DataProto, loss_counts: LossCounts) -> LossOutput:
        """Compute the loss of one micro-batch, its metrics and columns, and `old_log_probs` and `entropys` from the
        same pass."""
        old = outputs["log_probs"].detach()
        out = self.loss(outputs, rows.with_columns({"old_log_probs": old}), loss_counts)
        return replace(out, columns={**out.columns, "old_log_probs": old, "entropys": outputs["entropy"].detach()})


@dataclass(frozen=True, kw_only=True)
class ValueLoss(Settings):
    """The clipped value loss ½·max((v − R)², (clip(v, old ± cliprange) − R)²), aggregated as the policy loss is."""

    cliprange_value: float = 0.5
    """How far a value may move from the one before the update before its loss is clipped."""
    loss_agg_mode: str = "token-mean"
    """How token losses become one number."""

    reads: ClassVar[tuple[str, ...]] = ("values", "returns")
    """Columns that the loss needs, beside the inputs of a forward pass."""
    writes: ClassVar[tuple[str, ...]] = ()
    """An update with this loss writes no column."""
    want: ClassVar[tuple[str, ...]] = ("values",)
    """Model outputs that the loss needs."""

    def __call__(self, outputs: Mapping[str, Tensor], rows: DataProto, loss_counts: LossCounts) -> LossOutput:
        """Compute the loss of one micro-batch and its metrics."""
        mask = loss_mask(rows)
        result = value_loss(outputs["values"], rows["returns"], rows["values"], mask, clip=self.cliprange_value)
        tokens, sequences, width = loss_counts.tokens, loss_counts.sequences, loss_counts.width
        loss = aggregate(result.loss, mask, self.loss_agg_mode, tokens=tokens, sequences=sequences, scale=width)
        metrics: dict[str, Metric] = {
            "critic/vf_loss": _sum(loss),
            "critic/vf_clipfrac": _mean(result.clipped, mask),
            "critic/vpred_mean": _mean(outputs["values"], mask),
        }
        return LossOutput(loss, metrics)


class SupervisedLoss(Loss, Protocol):
    """Protocol of losses on given data, without rewards: `stages.CrossEntropy`, `stages.BradleyTerry`."""

    supervised: ClassVar[bool]
    writes: ClassVar[tuple[str, ...]]

    @property
    def reads(self) -> tuple[str, ...]:
        """Columns that the loss needs, beside the inputs of a forward pass."""

    def to_dict(self) -> dict[str, Any]:
        """Return the settings of the loss by name."""


_Loss: TypeAlias = PolicyLoss | OnPolicyLoss | ValueLoss | SupervisedLoss


class Update(BaseStage):
    """Update a learner's weights with a loss.

    How a mini-batch is cut into micro-batches is up to the learner and changes no number beyond rounding.

    Args:
        learner: the engine whose weights are updated.
        loss: a `PolicyLoss`, a `ValueLoss`, or without rewards a `CrossEntropy` or `BradleyTerry`.
        name: `update_actor` or `update_critic`; what follows `update_` is the prefix of the metrics.
        ppo_epochs: passes over the batch.
        ppo_mini_batch_size: *prompts* of one optimizer step, as in verl; None: the whole batch. The last may be smaller.
        shuffle: take the rows in a random order, seeded by run and step.
        from_step: before this step nothing is updated (critic warm-up); the columns are written all the same.
        temperature: what the logits are divided by, as in sampling.
        allow_stale: allow a batch whose `old_log_probs` (or `values`) are of another version than the learner's weights.
        skip_nonfinite: how many mini-batches in a row may be skipped, and counted, for a NaN or infinite loss or gradient;
            they change no weight. One more raises `NonFinite`.
        recompute_old_log_probs: always take the batch's `old_log_probs`, which a `LogProb` stage computes in a pass of its own.
            By default a single optimizer step on the whole batch takes the log-probs of its own pass, detached, as the old
            ones (as verl and TRL do): they are of the same weights. It then writes `old_log_probs`, `entropys`,
            `sampler_logprob_diff` and the metrics of that stage, which training leaves out where nothing else reads them.
        terms: name → a further `Term` of the loss, or a loss (weight 1): the update learns from loss + Σ weight·term in one
            pass, with the metric `actor/<name>` for each. None: the loss alone.

    Own log-probs stand for a column that is missing, or that a `LogProb` stage computed with the learner's present weights at
    this temperature; any other `old_log_probs` (of another engine, version or stage, or changed by hand) are taken as they are.

    A mini-batch without a token to learn from is left out and counted. Raises `VersionMismatch` for a stale batch (a batch is
    used once), and `RewardError` where no row was scored.
    """

    updates = True

    def __init__(
        self,
        learner: Learner,
        loss: PolicyLoss | ValueLoss | SupervisedLoss,
        *,
        name: str = "update_actor",
        ppo_epochs: int = 1,
        ppo_mini_batch_size: int | None = None,
        shuffle: bool = False,
        from_step: int = 0,
        temperature: float = 1.0,
        allow_stale: bool = False,
        skip_nonfinite: int = 0,
        recompute_old_log_probs: bool = False,
        terms: Mapping[str, Term | Loss] | None = None,
    ) -> None:
        prompts = 1 if ppo_mini_batch_size is None else ppo_mini_batch_size
        require(skip_nonfinite >= 0, "skip_nonfinite", expected="≥ 0", found=skip_nonfinite)
        require(ppo_epochs >= 1, "ppo_epochs", expected="≥ 1", found=ppo_epochs)
        require(prompts >= 1, "ppo_mini_batch_size", expected="≥ 1 prompts, or None for all", found=prompts)
        self.name = name
        self._learner = learner
        self._learners = (learner,)
        self._loss = loss
        self._terms = check_terms(terms, loss)
        self.ppo_epochs = ppo_epochs
        self.ppo_mini_batch_size = ppo_mini_batch_size
        self.shuffle = shuffle
        self.from_step = from_step
        self.temperature = temperature
        self.allow_stale = allow_stale
        self.skip_nonfinite = skip_nonfinite
        self._in_a_row = 0
        self._entropy: trl.AdaptiveEntropy | None = None
        if isinstance(loss, PolicyLoss) and loss.entropy_target is not None:
            ends = (loss.entropy_coeff_min, loss.entropy_coeff_max)
            self._entropy = trl.AdaptiveEntropy(loss.entropy_coeff, loss.entropy_target, loss.entropy_delta, ends)
        self.recompute_old_log_probs = recompute_old_log_probs
        self._on_policy: OnPolicyLoss | None = None
        # a subclass, and weights against the sampler, may do anything with the old log-probs
        further = dict.fromkeys(name for term in self._terms.values() for name in term.reads)
        own = type(self) is Update and "old_log_probs" not in further
        if isinstance(loss, PolicyLoss) and loss.bypass is None and own:
            self._on_policy = OnPolicyLoss(loss) if ppo_epochs == 1 and not recompute_old_log_probs else None
        self._scoring = LogProb(cast(LogProbModel, learner), name=name, entropy=True, temperature=temperature)
        scored = () if getattr(loss, "supervised", False) else ("scored",)
        self.reads = tuple(dict.fromkeys((*SCORED_COLUMNS, *scored, *(self._on_policy or loss).reads, *further)))
        kept = "new_log_probs" in loss.writes and getattr(loss, "bypass", None) is None
        passes = range(1, ppo_epochs if kept else 1)
        added = dict.fromkeys(name for term in self._terms.values() for name in getattr(term.loss, "writes", ()))
        later = (name for name in added if name not in loss.writes)
        self.writes = (*loss.writes, *(f"{PASS}{number}" for number in passes), *later)
        masked = ("loss_mask",) * ("loss_mask" not in self.writes)
        self.optional = (PIXELS, EXPERTS, SESSION, *masked, *("old_log_probs",) * bool(self._on_policy))

    def settings(self) -> dict[str, Any]:
        """Return the settings of the stage and of its loss by name, in one flat dict; those of a loss's `bypass` are
        called `bypass.<name>`. Settings that older records do not have are left out at their defaults: their runs may be
        resumed."""
        settings = {**super().settings(), "loss": type(self._loss).__name__, **self._loss.to_dict()}
        later = dict.fromkeys(("recompute_old_log_probs",), False)
        alone = type(self._loss) is PolicyLoss  # a `TrlLoss` has had those of TRL
        later |= {name: getattr(PolicyLoss, name) for name in _LATER if alone or name.startswith("entropy_")}
        settings = {name: one for name, one in settings.items() if name not in later or one != later[name]}
        nested = {key: one.to_dict() for key, one in settings.items() if isinstance(one, Settings)}
        inner = {f"{key}.{name}": value for key, one in nested.items() for name, value in one.items()}
        inner |= {f"{name}.{key}": one for name, term in self._terms.items() for key, one in term.settings().items()}
        return {key: value for key, value in settings.items() if key not in nested} | inner

    def with_settings(self, **changes: Any) -> Update:
        """Return a copy with some settings changed; those of a term are called `<term>.<setting>`, such as
        `**{"distill.weight": 0.5}`."""
        terms = dict(self._terms)
        for name in [name for name in changes if name.partition(".")[0] in terms and "." in name]:
            term, _, setting = name.partition(".")
            terms[term] = terms[term].changed(setting, changes.pop(name))
        changed = super().with_settings(**changes, **({"terms": terms} if terms != self._terms else {}))
        updated = cast(Update, changed)
        if getattr(updated._loss, "entropy_coeff", None) == getattr(self._loss, "entropy_coeff", None):
            updated.load_state(self.state())
        return updated

    @property
    def role(self) -> str:
        """`actor` or `critic`: the prefix of the stage's metrics, from its name."""
        return self.name.removeprefix("update_")

    def __call__(self, batch: DataProto) -> Outcome:
        """Update the weights on B rows; returns the same rows with the columns of the last pass over each."""
        self._refuse_stale(batch)
        early = batch.meta_info.get("step", 0) < self.from_step
        if not early:
            self._refuse_unscored(batch)
        on_policy = self._on_policy if self.is_on_policy(batch) else None
        batch, scoring = self._scored(batch, {}) if on_policy is None else (batch, {})
        if early:
            return Outcome(self.written(batch, self._unchanged(batch)), {**scoring, f"{self.role}/skipped": Mean(1.0)})
        signature = self._scoring.signature(batch)  # of the weights that have not moved yet
        columns = self._unchanged(batch) if on_policy is None else {}
        steps, counted = self._passes(batch, on_policy or self._loss, columns)
        if on_policy is not None:
            batch, scoring = self._scored(batch, columns, signature)
            columns = columns or self._unchanged(batch)
        if steps:
            self._learner.commit()
        metrics = {key if "/" in key else f"{self.role}/{key}": one for key, one in _over_steps(steps).items()}
        return Outcome(self.written(batch, columns), scoring | metrics | counted)

    def _passes(
        self, batch: DataProto, loss: _Loss, columns: dict[str, Tensor]
    ) -> tuple[list[dict[str, Metric]], dict[str, Metric]]:
        """Take the optimizer steps of all epochs and fill `columns`; returns each step's metrics, and counts of the
        mini-batches that were skipped."""
        rows = batch.select(list(used(self, batch)), ["uid"] if "uid" in batch else [])
        step, steps = batch.meta_info.get("step", 0), []
        skipped = empty = 0
        present().expect(self.ppo_epochs * len(batch))
        devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
        for epoch in range(self.ppo_epochs):
            for number, indices in enumerate(self._mini_batches(batch, epoch)):
                mini_batch = rows.select_idxs(indices)
                read = (mini_batch, *(term.own_rows(mini_batch) for term in self._terms.values()))
                if not any(loss_mask(one).any() for one in read):
                    empty += 1  # a step without a gradient would still move weights, by decay and momentum
                    continue
                with torch.random.fork_rng(devices):  # dropout is a function of the step: an update repeats bit for bit
                    torch.manual_seed(derive(batch.meta_info.get("seed", 0), self.name, step, epoch, number))
                    learned = self._learn_or_skip(mini_batch, self._weighed(loss))
                if learned is None:
                    skipped += 1
                    continue
                steps.append(join([learned.metrics]))
                if self._entropy is not None:
                    self._entropy.update(steps[-1][POLICY_ENTROPY].result())
                if (earlier := f"{PASS}{epoch + 1}") in self.writes:
                    columns.setdefault(earlier, torch.zeros_like(batch["response_mask"], dtype=torch.float32))
                    columns[earlier][indices] = learned.columns["new_log_probs"].to(columns[earlier])
                for name, values in learned.columns.items():  # [b, …] into [B, …]; later epochs overwrite earlier ones
                    columns.setdefault(name, values.new_zeros((len(batch), *values.shape[1:])))[indices] = values
        counted: dict[str, Metric] = {}
        if self.skip_nonfinite:
            counted[f"{self.role}/nonfinite"] = Mean(float(skipped))
        if empty:
            counted[f"{self.role}/empty_mini_batches"] = Count(empty)
        return steps, counted

    def _weighed(self, loss: _Loss) -> _Loss:
        """Return the loss with the entropy bonus's weight of this optimizer step, where that adapts."""
        if self._entropy is None:
            return loss
        if isinstance(loss, OnPolicyLoss):
            return OnPolicyLoss(replace(loss.loss, entropy_coeff=self._entropy.weight))
        return replace(cast(PolicyLoss, loss), entropy_coeff=self._entropy.weight)

    @torch.no_grad()
    def measure(self, batch: DataProto) -> dict[str, Metric]:
        """Compute the loss's metrics on a batch with the present weights, in a pass without gradients; nothing is
        learned."""
        if "compared" in self._loss.want:
            with torch.enable_grad():
                probed = self._learner.probe(batch, self._loss, counts_of(batch), self.temperature).metrics
            return {name: one for name, one in probed.items() if isinstance(one, Mean) and "/" in name}
        model = cast(LogProbModel, self._learner)
        outputs = model.compute_log_probs(batch, self._loss.want, self.temperature)
        found = join([self._loss(outputs, batch, counts_of(batch)).metrics])
        return {name: one for name, one in found.items() if isinstance(one, Mean)}

    def is_on_policy(self, batch: DataProto) -> bool:
        """Whether the update of this batch uses the log-probs of its own pass as the old ones (see
        `recompute_old_log_probs`)."""
        whole = self._on_policy is not None and len(self._mini_batches(batch, 0)) == 1
        later = batch.meta_info.get("step", 0) >= self.from_step
        return whole and later and ("old_log_probs" not in batch or self._scoring.is_current(batch))

    def replaces(self, stage: Stage) -> bool:
        """Whether this update's own pass can compute everything that an earlier `LogProb` stage writes, so that
        training may skip that stage."""
        return self._on_policy is not None and type(stage) is LogProb and self._scoring.covers(stage)

    def _scored(
        self, batch: DataProto, passed: dict[str, Tensor], signature: Origin | None = None
    ) -> tuple[DataProto, dict[str, Metric | float]]:
        """Return the batch with a `LogProb` stage's columns, and that stage's metrics.

        They come from the update's own pass, out of the columns `passed`; or, where neither that nor the batch has old
        log-probs, from a separate pass.
        """
        if "old_log_probs" in passed:
            scores = {"log_probs": passed.pop("old_log_probs"), "entropy": passed.pop("entropys")}
            columns, metrics = self._scoring.columns_of(batch, scores)
            return batch.with_columns(columns, origin=signature), {**metrics}
        if self._on_policy is None or "old_log_probs" in batch:
            return batch, {}
        done = self._scoring(batch)
        return done.batch, dict(done.metrics)

    def _refuse_unscored(self, batch: DataProto) -> None:
        if "scored" not in self.reads or batch["scored"].any() or not len(batch):
            return
        whys = Counter(f"{one.status.value}: {one.why}" for one in batch.non_tensor_batch.get("score", ()))
        what = f"stage {self.name!r}: none of {len(batch)} rows was scored, so that there is nothing to learn from"
        found = "; ".join(f"{number} × {why}" for why, number in whys.most_common(3)) or None
        raise RewardError(what, found=found, do="give the rows truths that the reward reads, or another reward")

    def _refuse_stale(self, batch: DataProto) -> None:
        for name in ("old_log_probs", "values"):
            origin = batch.origins.get(name) if name in used(self, batch) else None
            if origin is None or origin.policy_version is None or self.allow_stale:
                continue
            if origin.policy_version != self._learner.version:
                what = f"stage {self.name!r}: {name!r} of this batch is of another policy version"
                found = f"version {origin.policy_version}: the batch has been used already, or is stale"
                do = "take the next batch, go back to before the update, or set allow_stale=True"
                expected = f"version {self._learner.version}, the learner's"
                raise VersionMismatch(what, expected=expected, found=found, do=do)

    def _learn_or_skip(self, rows: DataProto, loss: _Loss) -> StepResult | None:
        """Take one optimizer step; returns None where it was skipped because the loss or gradient is not finite, with
        no weight changed."""
        loss_counts, summed = counts_of(rows), cast(Loss, loss)
        try:
            _refuse_nonfinite(rows, dict.fromkeys((*self.reads, *loss.reads)))
            if self._terms:
                summed, rows = streams(loss, self._terms, rows)
            learned = self._learner.learn(rows, summed, loss_counts, self.temperature)
        except NonFinite as error:
            self._in_a_row += 1
            if self._in_a_row > self.skip_nonfinite:
                self._name_rows(error, rows, summed, loss_counts)
                raise
            return None
        self._in_a_row = 0
        return learned

    def _name_rows(self, error: NonFinite, rows: DataProto, loss: Loss, loss_counts: LossCounts) -> None:
        """Add a note to the error that names the rows whose own gradient is not finite."""
        try:
            probed = self._learner.probe(rows, loss, loss_counts, self.temperature, per_row=True)
            norms = probed.columns["row_grad_norm"]
        except Exception as again:  # noqa: BLE001 - the error itself is raised, whatever its rows would say
            error.add_note(f"its rows were not looked for one by one: {first_line(again)}")
            return
        bad = (~norms.isfinite()).nonzero().flatten().tolist()
        uids = f", uids {[str(rows['uid'][row]) for row in bad[:8]]}" if "uid" in rows else ""
        error.add_note(f"mini-batch rows whose own gradient is not finite: {bad[:8] or 'none'}{uids if bad else ''}")

    def state(self) -> dict[str, float]:
        """Return the state for a checkpoint: how many mini-batches in a row were skipped, where `skip_nonfinite` allows
        it, and that of an adaptive entropy bonus."""
        skipped = {"nonfinite_in_a_row": float(self._in_a_row)} if self.skip_nonfinite else {}
        return skipped | ({} if self._entropy is None else self._entropy.state())

    def load_state(self, state: Mapping[str, float]) -> None:
        """Restore the state from a dict that `state` returned."""
        self._in_a_row = int(state.get("nonfinite_in_a_row", 0))
        if self._entropy is not None:
            self._entropy.load_state(state)

    def _mini_batches(self, batch: DataProto, epoch: int) -> list[Tensor]:
        """Return the row numbers of each optimizer step of one epoch. All rows of an episode are in one step, and count
        as one row."""
        rows = episodes(batch)
        order = torch.arange(len(rows))
        if self.shuffle:
            meta = batch.meta_info
            name = (meta.get("seed", 0), f"shuffle/{self.name}", meta.get("step", 0), epoch)
            order = torch.tensor(shuffled(len(rows), *name))
        most = len(rows) if self.ppo_mini_batch_size is None else self.ppo_mini_batch_size
        steps = order.split(max(most * batch.meta_info.get("group_size", 1), 1))
        return [torch.tensor([row for one in step.tolist() for row in rows[one]], dtype=torch.long) for step in steps]

    def _unchanged(self, batch: DataProto) -> dict[str, Tensor]:
        """Return the columns that the update writes, as they are for rows whose weights did not move."""
        if "clipped" not in self.writes:
            return {}
        mask = batch["response_mask"]
        old = batch["rollout_log_probs" if getattr(self._loss, "bypass", None) else "old_log_probs"]
        found = {"new_log_probs": old.clone(), "clipped": torch.zeros_like(mask, dtype=torch.bool)}
        found |= {"rollout_is_weights": mask.to(old.dtype), "loss_mask": mask.clone()}
        return {name: found.get(name.partition("/")[0], torch.zeros_like(old)).clone() for name in self.writes}


def _over_steps(steps: Sequence[Mapping[str, Metric]]) -> dict[str, Metric]:
    """Combine the metrics of several optimizer steps: maxima, minima and counts over all steps, and means in which every
    step has the same weight.

    A step in which a mean covers no token is left out of that mean.
    """
    metrics: dict[str, Metric] = {}
    for key in dict.fromkeys(key for step in steps for key in step):
        every = [step[key] for step in steps if key in step]
        measured = [metric for metric in every if not isinstance(metric, Mean) or metric.weight] or every
        extreme = isinstance(every[0], Max | Min | Count)
        means = Mean(sum(metric.result() for metric in measured), len(measured))
        metrics[key] = join({key: metric} for metric in every)[key] if extreme else means
    return metrics


def _refuse_nonfinite(rows: DataProto, names: Iterable[str]) -> None:
    """Raise `NonFinite` for the first NaN or infinity inside the loss mask, naming its column, row, uid and token."""
    mask = loss_mask(rows).bool()
    for name in names:
        values = rows[name]
        if not values.is_floating_point():
            continue
        inside = mask if values.dim() > 1 else mask.any(-1)
        bad = ~values.isfinite() & inside.view(*inside.shape, *[1] * (values.dim() - inside.dim()))
        if bad.any():
            row, *token = bad.nonzero()[0].tolist()
            uid = f" (uid {rows['uid'][row]})" if "uid" in rows else ""
            number = bad.reshape(len(bad), -1).any(-1).sum()
            what = f"column {name!r} of row {row}{uid} is NaN or infinite; no step was taken"
            found = f"{float(values[row, *token])}" + (f" at token {token[0]}" if token else "")
            do = f"look at the stage that wrote {name!r}; {int(bad.sum())} values are bad in {int(number)} rows"
            raise NonFinite(what, found=found, do=do)
