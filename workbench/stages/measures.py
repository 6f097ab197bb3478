"""verl's data metrics, for the columns that a batch has: lengths, scores, advantages, values.

A stage reports those of what it wrote; a run's row has all of them, of the batch as it is after the last stage. A name of verl
means what it means there (`docs/verl.md`, compared by a test). Rows that were not scored, which verl does not have, are in no
`critic/…` metric. A metric without a value is left out, where verl writes NaN.

Stages that only measure: the influence of rows and tokens on a held-out objective, and the exact KL.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from workbench.base.config import require
from workbench.base.errors import PipelineError
from workbench.base.metrics import Max, Mean, Metric
from workbench.dataproto.core import SESSION, DataProto, episodes, is_last, of_first_policy
from workbench.engines.protocol import (
    Differentiable,
    LogProbModel,
    LossCounts,
    LossOutput,
    WholeDistributions,
    WholeModel,
)
from workbench.functional.losses import kl_penalty
from workbench.functional.masking import masked_mean
from workbench.functional.returns import explained_variance
from workbench.rewards.base import response_lengths
from workbench.stages.log_prob import SCORED_COLUMNS, scored_columns
from workbench.stages.stage import BaseStage, Outcome, spread


def data_metrics(batch: DataProto) -> dict[str, Metric]:
    """Compute all metrics of verl's `compute_data_metrics` whose columns the batch has; {} for a batch without
    responses.

    In a batch of several policies, those of the first one's rows: the stages measure the others' themselves.
    """
    if "response_mask" not in batch or not len(batch):
        return {}
    batch = of_first_policy(batch)
    parts = (("prompt_mask", length_metrics), ("token_level_scores", score_metrics), ("advantages", advantage_metrics))
    return {name: value for column, part in parts if column in batch for name, value in part(batch).items()}


def mean(name: str, values: Tensor) -> dict[str, Metric]:
    """Return the mean of numbers, or the share of bools that are True, as the metric `name`; {} where there are none,
    or the mean is not finite."""
    found = values.double().mean().item() if len(values) else math.nan
    return {name: Mean.of(found, len(values))} if math.isfinite(found) else {}


def length_metrics(batch: DataProto) -> dict[str, Metric]:
    """Measure the lengths of prompts and responses in tokens.

    `response_length/…` counts all tokens of a response, with tool and user text; `model_tokens/…`, of episodes alone,
    those that the model wrote. `clip_ratio` is the share of rows that fill `max_tokens` or `max_prompt_length`;
    `response/cut_ratio` the share that ended because there was no room (finish reason `length`). Each row is one
    sequence; for episodes of several sequences `agent_loop/sequences/…` counts them.
    """
    lengths = response_lengths(batch)
    meta = batch.meta_info
    longest = {"response": meta.get("max_response_length"), "prompt": meta.get("max_prompt_length")}
    every = {
        "response_length": lengths,
        "response_length_non_aborted": lengths[lengths > 0],
        "prompt_length": batch["prompt_mask"].sum(-1),
    }
    metrics = mean("response/aborted_ratio", lengths == 0)
    for name, values in every.items():
        metrics |= spread(name, values)
        limit = longest[name.split("_")[0]]
        metrics |= mean(f"{name}/clip_ratio", values >= limit) if limit is not None else {}
    if "finish_reason" in batch:
        metrics |= mean("response/cut_ratio", torch.tensor([one == "length" for one in batch["finish_reason"]]))
    for name, column in (("num_turns", "num_turns"), ("tool_call_counts", "num_tool_calls")):
        if column in batch:
            metrics |= spread(name, torch.tensor([float(value) for value in batch[column]]))
    if "num_turns" in batch:
        metrics |= spread("model_tokens", batch["response_mask"].sum(-1))
    if SESSION in batch:
        metrics |= spread("agent_loop/sequences", torch.tensor([float(len(rows)) for rows in episodes(batch)]))
    return metrics


def row_scores(batch: DataProto, tokens: Tensor) -> Tensor:
    """Sum each row's token scores or rewards [B, T] to [B]. A row without a token that the model wrote gets its
    `reward` column."""
    mask = batch["response_mask"].bool()
    total = torch.where(tokens.isnan() & ~mask, 0.0, tokens).sum(-1)
    return torch.where(mask.any(-1), total, batch["reward"].to(total.dtype)) if "reward" in batch else total


def score_metrics(batch: DataProto) -> dict[str, Metric]:
    """Measure scores: `critic/score/…` and, after the advantages, `critic/rewards/…` (with KL penalty), over scored
    rows whose response is not empty; `critic/score/std` is the scores' standard deviation.

    `reward/mean` is over all scored rows, with empty responses. An episode of several rows counts once, by its last
    row.
    """
    scored = batch["scored"] if "scored" in batch else torch.ones(len(batch), dtype=torch.bool)
    scored = scored & is_last(batch)
    rows = scored & (response_lengths(batch) > 0)
    names = {"critic/score": "token_level_scores", "critic/rewards": "token_level_rewards"}
    sums = {name: row_scores(batch, batch[column])[rows] for name, column in names.items() if column in batch}
    metrics = {name: value for prefix, values in sums.items() for name, value in spread(prefix, values).items()}
    scores = sums["critic/score"].double()  # min and max say little of rewards that are 0 or 1
    if "critic/score/mean" in metrics:
        metrics["critic/score/std"] = Mean.of(scores.std(correction=0).item(), len(scores))
    return metrics | (mean("reward/mean", batch["reward"][scored]) if "reward" in batch else {})


def counted_tokens(batch: DataProto) -> Tensor:
    """Return a mask [B, T] of the tokens that advantages are measured on: those that the model wrote in scored rows,
    without those rejected before the advantages.

    In bypass mode the loss rejects tokens later, at the update; as in verl, no metric of the batch shows that.
    """
    origin = batch.origins.get("loss_mask")
    rejected = "loss_mask" in batch and not (origin is not None and origin.stage.startswith("update_"))
    mask = batch["loss_mask" if rejected else "response_mask"].bool()
    return mask & batch["scored"][:, None] if "scored" in batch else mask


def advantage_metrics(batch: DataProto) -> dict[str, Metric]:
    """Measure `critic/advantages/…`, `critic/returns/…` and, with a critic, `critic/values/…` and
    `critic/vf_explained_var`, over counted tokens."""
    mask = counted_tokens(batch)
    counted = mask.reshape(-1).nonzero().squeeze(-1)
    advantages = spread("critic/advantages", batch["advantages"].reshape(-1)[counted])
    metrics: dict[str, Metric] = {**advantages}
    if batch["returns"] is batch["advantages"]:
        metrics |= {name.replace("advantages", "returns"): value for name, value in advantages.items()}
    else:
        metrics |= spread("critic/returns", batch["returns"].reshape(-1)[counted])
    if "values" in batch:
        metrics |= spread("critic/values", batch["values"].reshape(-1)[counted])
        explained = float(explained_variance(batch["values"], batch["returns"], mask))
        if math.isfinite(explained):
            metrics["critic/vf_explained_var"] = Mean.of(explained)
    return metrics


class _Objective:
    """The loss −J of held-out rows, where J is the mean over their tokens of A·log π; without advantages A is 1."""

    want = ("log_probs",)

    def __call__(self, outputs: Mapping[str, torch.Tensor], rows: DataProto, loss_counts: LossCounts) -> LossOutput:
        mask = rows["response_mask"].float()
        weight = rows["advantages"] * mask if "advantages" in rows else mask
        return LossOutput(-(outputs["log_probs"] * weight).sum() / max(loss_counts.tokens, 1))


class Influence(BaseStage):
    """Write `influence` [B, T]: how much a small plain-SGD step on each token would raise a held-out objective.

    To first order a step on token t's policy loss moves the weights along A_t·∇log π_t, and the objective J by its
    product with ∇J: (log π_t(θ + ε·∇J) − log π_t(θ)) / ε · A_t with ε = `length`/‖∇J‖, one backward pass over the held-out
    rows and one forward pass with perturbed weights. J is the mean over the held-out tokens of A·log π (A = 1 without a
    column `advantages`: making those responses likelier). Units: nats per unit of learning rate and token; a row's
    influence is the sum over its tokens; below 0 it hurts. Adam, clipping and the ratio are left out. No weight is changed.
    Pruthi et al. 2020 (TracIn), https://arxiv.org/abs/2002.08484, with a finite difference in place of the dot product.
    """

    name = "influence"
    reads = (*SCORED_COLUMNS, "advantages")
    writes = ("influence",)

    def __init__(
        self, engine: Differentiable, eval_rows: DataProto, *, length: float = 1e-2, temperature: float = 1.0
    ) -> None:
        require(length > 0, "length (of the weight perturbation)", expected="> 0", found=length)
        if not (isinstance(engine, Differentiable) and isinstance(engine, LogProbModel)):
            expected, found = "one that gives gradients (local, FSDP)", type(engine).__name__
            raise PipelineError("engine of Influence", expected=expected, found=found)
        missing = [name for name in SCORED_COLUMNS if name not in eval_rows]
        if missing:
            raise PipelineError("eval_rows of Influence", expected="responses", found=f"no column {missing[0]!r}")
        self._engine = engine
        self._learners = (engine,)
        self._eval_rows = eval_rows.select(
            [*scored_columns(eval_rows, policy=True), *(("advantages",) * ("advantages" in eval_rows))]
        )
        self.length = length
        self.temperature = temperature

    def __call__(self, batch: DataProto) -> Outcome:
        """Return the same B rows with each token's influence [B, T]."""
        eval_rows, mask = self._eval_rows, batch["response_mask"]
        loss_counts = LossCounts(tokens=float(eval_rows["response_mask"].sum()), sequences=float(len(eval_rows)))
        downhill = self._engine.gradient(eval_rows, _Objective(), loss_counts, self.temperature)
        uphill = {name: -values for name, values in downhill.items()}
        norm = float(torch.stack([values.double().norm() for values in uphill.values()]).norm()) if uphill else 0.0
        if norm == 0:
            influence = torch.zeros(mask.shape)
        else:
            scale, rows = self.length / norm, batch.select(scored_columns(batch, policy=True))
            before = self._engine.compute_log_probs(rows, ("log_probs",), self.temperature)["log_probs"]
            with self._engine.perturbed(uphill, scale):
                after = self._engine.compute_log_probs(rows, ("log_probs",), self.temperature)["log_probs"]
            influence = (after - before) / scale * batch["advantages"] * mask
        metrics = {**spread("influence", influence.sum(-1)), "influence/gradient_norm": Mean.of(norm)}
        return Outcome(self.written(batch, {"influence": influence}), metrics)


class ExactKL(BaseStage):
    """Write `full_kl` [B, T], KL(policy‖reference) of every next-token distribution, in nats.

    Where the batch has both log-probs, the metrics also have the estimators k1 and k3: their mean is the same in
    expectation, their variance is not. Takes two forward passes and no gradient, by a local or FSDP engine.
    A reward or advantage function that reads `full_kl` gets a KL penalty without sampling noise.
    """

    name = "exact_kl"
    reads = SCORED_COLUMNS
    optional = ("old_log_probs", "ref_log_prob")
    writes = ("full_kl",)

    def __init__(self, engine: WholeDistributions, reference: WholeModel, *, temperature: float = 1.0) -> None:
        if not isinstance(engine, WholeDistributions) or not isinstance(reference, WholeModel):
            expected, do = "a local or FSDP engine, and its reference()", "use a one-token estimate of the KL (kl_type)"
            raise PipelineError("engine and reference of ExactKL", expected=expected, do=do)
        self._engine = engine
        self._learners = (engine,)
        self._reference = reference
        self.temperature = temperature

    def __call__(self, batch: DataProto) -> Outcome:
        """Return the same B rows with each token's exact KL [B, T]."""
        mask = batch["response_mask"]
        full_kl = self._engine.full_kl(batch.select(scored_columns(batch)), self._reference, self.temperature)
        metrics: dict[str, Metric] = {
            "actor/full_kl": Mean.of(float(masked_mean(full_kl, mask)), float(mask.sum())),
            "actor/full_kl_max": Max(float((full_kl * mask).max())),
        }
        if "old_log_probs" in batch and "ref_log_prob" in batch:
            for kind in ("k1", "k3"):
                estimate = kl_penalty(batch["old_log_probs"], batch["ref_log_prob"], kind)
                metrics[f"actor/full_kl_{kind}"] = Mean.of(float(masked_mean(estimate, mask)), float(mask.sum()))
        return Outcome(self.written(batch, {"full_kl": full_kl}), metrics)
