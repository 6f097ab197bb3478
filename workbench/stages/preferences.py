"""Preference training of a policy: stages that make pairs of answers, and their loss (DPO, IPO, SimPO, KTO and others)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from workbench.base.config import Settings, require
from workbench.base.errors import DataError, PipelineError, check_name
from workbench.base.metrics import Mean, Metric
from workbench.dataproto.columns import MARGIN
from workbench.dataproto.core import DataProto
from workbench.engines.protocol import LogProbModel, LossCounts, LossOutput
from workbench.functional.preferences import PREFERENCE_LOSSES, WITHOUT_REFERENCE, PairScores
from workbench.stages.advantage import group_numbers
from workbench.stages.log_prob import SCORED_COLUMNS, scored_columns
from workbench.stages.stage import BaseStage, Outcome
from workbench.stages.targets import DataResponses, Targets, behind_prompts, placed_answers, places_of
from workbench.stages.terms import loss_mask


class AnswerPairs(DataResponses):
    """Write both answers of each preference pair as responses: P pairs in, 2P rows out, the chosen answer before the
    rejected one; `response_mask` is 1 on all of their tokens.

    Args:
        engine: whose tokenizer and template encode.
        chosen: the column of the preferred answers: texts, or messages whose last one is the answer; `a.b` is the key b of the
            dicts in column a.
        rejected: the column of the others.
        max_tokens: longest answer, in tokens (EOS counts).

    Raises `DataError` for a row without one of the answers, with two equal ones, or with one that is too long.
    """

    name = "answer_pairs"
    writes: tuple[str, ...] = (*Targets.writes, MARGIN)

    def __init__(
        self, engine: Any, *, chosen: str = "chosen", rejected: str = "rejected", max_tokens: int = 1024
    ) -> None:
        super().__init__(engine, [chosen, rejected], max_tokens, answers=2)
        self.chosen, self.rejected = chosen, rejected

    def settings(self) -> dict[str, Any]:
        """The settings of the stage by name."""
        return {"chosen": self.chosen, "rejected": self.rejected, "max_tokens": self.sampling.max_tokens}

    def check_rows(self, rows: Iterable[Mapping[str, Any]]) -> str:
        """Check both answers of every row of a data set. Raises `DataError` for the first wrong row."""
        held = list(rows)
        for number, row in enumerate(held):
            place = f"row {number}"
            self._refuse_equal([self._text(row, column, place) for column in (self.chosen, self.rejected)], place)
        return super().check_rows(held)

    def __call__(self, batch: DataProto) -> Outcome:
        """Turn P preference pairs into 2P rows."""
        self._refuse_media(batch)
        places = places_of(batch)
        answers = [self._texts(batch, column, places) for column in (self.chosen, self.rejected)]
        for chosen, rejected, place in zip(*answers, places, strict=True):
            self._refuse_equal([chosen, rejected], place)
        columns_of = zip(answers, (self.chosen, self.rejected), strict=True)
        encoded = [self._ids(texts, [f"{column} of {place}" for place in places]) for texts, column in columns_of]
        prompts, _ = self._encode(batch, None)
        rows = torch.arange(len(batch)).repeat_interleave(2)
        responses = [(ids, [1] * len(ids)) for pair in zip(*encoded, strict=True) for ids in pair]
        columns = placed_answers([prompts[row] for row in rows.tolist()], responses, self._pad_id)
        columns["response_text"] = [text for pair in zip(*answers, strict=True) for text in pair]
        columns[MARGIN] = torch.zeros(len(rows))
        return self._finished(batch, columns, rows)

    def _refuse_equal(self, answers: list[str], place: str) -> None:
        if answers[0] == answers[1]:
            do = "leave such rows out: equal answers show no preference"
            raise DataError(
                f"{self.chosen} and {self.rejected} of {place}", expected="two answers", found="equal", do=do
            )


class BestAndWorst(BaseStage):
    """Keep of each prompt's samples the best and the worst by reward, as a preference pair: P·G rows in, 2P rows out.

    A prompt whose scored samples have one reward is kept with `loss_mask` 0, and counted: it says nothing.
    """

    name = "best_and_worst"
    reads = ("uid", "reward", "scored", "response_mask")
    writes = (MARGIN, "loss_mask")

    def __call__(self, batch: DataProto) -> Outcome:
        """Return the two rows of each prompt, the better one first."""
        groups, reward, scored = group_numbers(batch["uid"]), batch["reward"], batch["scored"]
        best: list[int] = []
        for group in range(int(groups.max()) + 1 if len(groups) else 0):
            members = (groups == group).nonzero()[:, 0]
            if len(members) < 2:
                number = f"{len(members)} row"
                raise PipelineError("group of a preference pair", expected="group_size ≥ 2", found=number)
            ends = [reward[members].masked_fill(~scored[members], sign * -torch.inf) for sign in (1, -1)]
            high, low = int(members[ends[0].argmax()]), int(members[ends[1].argmin()])
            best += [high, low] if high != low else members[:2].tolist()
        rows = torch.tensor(best, dtype=torch.long)
        kept, pair = (
            batch.select_idxs(rows).with_meta(group_size=2),
            (reward[rows].view(-1, 2), scored[rows].view(-1, 2)),
        )
        gaps = pair[0][:, 0] - pair[0][:, 1]
        known = (gaps > 0) & pair[1].all(-1)
        mask = kept["response_mask"] * known.repeat_interleave(2).long()[:, None]
        metrics: dict[str, Metric | float] = {
            "pairs/tied": Mean.of(float((~known).double().mean()) if len(known) else 0.0, len(known)),
            "pairs/reward_margin": Mean.of(
                float(gaps[known].double().mean()) if known.any() else 0.0, int(known.sum())
            ),
        }
        return Outcome(self.written(kept, {MARGIN: torch.zeros(len(rows)), "loss_mask": mask}), metrics, rows)


class KeepBest(BaseStage):
    """Keep of each prompt's samples the k best by reward, as targets: P·G rows in, P·k rows out (rejection sampling).

    Samples with a reward below `above`, and those without a score, are kept with `loss_mask` 0, and counted.
    """

    name = "keep_best"
    reads = ("uid", "reward", "scored", "response_mask")
    writes = ("loss_mask",)

    def __init__(self, k: int = 1, above: float | None = None) -> None:
        require(k >= 1, "k", expected="≥ 1", found=k)
        self.k, self.above = k, above

    def __call__(self, batch: DataProto) -> Outcome:
        """Return the k best rows of each prompt, the best first; of equal rewards the earlier one."""
        groups = group_numbers(batch["uid"])
        rank = batch["reward"].masked_fill(~batch["scored"], -torch.inf)
        order = torch.argsort(rank, descending=True, stable=True)
        kept = [order[groups[order] == group][: self.k] for group in range(int(groups.max()) + 1 if len(groups) else 0)]
        rows = torch.cat(kept) if kept else order
        best = batch.select_idxs(rows).with_meta(group_size=min(self.k, batch.meta_info.get("group_size", self.k)))
        good = best["scored"] & (best["reward"] >= (-torch.inf if self.above is None else self.above))
        mask = best["response_mask"] * good.long()[:, None]
        metrics: dict[str, Metric | float] = (
            {"keep_best/kept": Mean.of(float(good.double().mean()), len(good))} if len(good) else {}
        )
        return Outcome(self.written(best, {"loss_mask": mask}), metrics, rows)


class MismatchedKL(BaseStage):
    """Write `kto_kl` [B], KTO's estimate of KL(policy‖reference) in nats a response, the same in each row.

    It is the mean of log π − log π_ref of each prompt with the next pair's answers, or 0 where that is negative. Takes a pass
    of each model. Raises `PipelineError` for a single pair.
    """

    name = "kto_kl"
    reads = (*SCORED_COLUMNS, "prompts", "prompt_mask", "responses")
    writes = ("kto_kl",)

    def __init__(self, engine: LogProbModel, reference: LogProbModel) -> None:
        self._engine, self._reference, self._learners = engine, reference, (engine,)

    def __call__(self, batch: DataProto) -> Outcome:
        """Return the same B rows with `kto_kl`."""
        if len(batch) < 4:
            raise PipelineError("pairs for KTO's KL", expected="two or more", found=len(batch) // 2)
        width = batch["responses"].shape[1]
        parts = (batch["responses"], batch["attention_mask"][:, -width:], batch["response_mask"])
        responses, there, mask = (part.roll(2, 0) for part in parts)
        inputs = behind_prompts(batch["prompts"], batch["prompt_mask"], responses, there)
        mixed = batch.select(scored_columns(batch)).with_columns({**inputs, "response_mask": mask})
        mine, theirs = (one.compute_log_probs(mixed)["log_probs"] for one in (self._engine, self._reference))
        kl = (mine - theirs).sum(-1).mean().clamp(min=0)
        return Outcome(self.written(batch, {"kto_kl": kl.expand(len(batch)).clone()}), {"kl": Mean.of(float(kl))})


@dataclass(frozen=True, kw_only=True)
class Preference(Settings):
    """A preference loss by TRL's name, averaged over pairs: row 2i is the chosen answer, row 2i + 1 the rejected one.

    With `functional.PREFERENCE_LOSSES` of β, the log-probs of all tokens of an answer, and the reference's, the column
    `ref_log_prob`. Pairs of which a row has no token to learn from are left out.
    """

    loss_type: str = "sigmoid"
    """Name of the loss in `functional.PREFERENCE_LOSSES`."""
    beta: float = 0.1
    """How much a deviation from the reference costs; of `ipo` the regularisation, τ in its paper."""
    label_smoothing: float = 0.0
    """Share of pairs whose labels are wrong, < 0.5: for `robust` and `exo_pair`."""
    gamma: float = 0.5
    """simpo: the target margin."""

    supervised: ClassVar[bool] = True
    writes: ClassVar[tuple[str, ...]] = ("new_log_probs",)
    """Columns [B, T] that an update with this loss writes."""
    want: ClassVar[tuple[str, ...]] = ("log_probs",)
    """Model outputs that the loss needs."""

    def __post_init__(self) -> None:
        check_name("loss of preferences", self.loss_type, PREFERENCE_LOSSES)
        require(self.beta > 0, "beta", expected="> 0", found=self.beta)
        require(0 <= self.label_smoothing < 0.5, "label_smoothing", expected="in [0, 0.5)", found=self.label_smoothing)

    @property
    def reads(self) -> tuple[str, ...]:
        """Names of the columns that the loss needs, besides the inputs of a forward pass."""
        return (
            MARGIN,
            *(("ref_log_prob",) if self.uses_reference else ()),
            *(("kto_kl",) if self.loss_type == "kto" else ()),
        )

    @property
    def uses_reference(self) -> bool:
        """Whether the loss compares with a reference."""
        return self.loss_type not in WITHOUT_REFERENCE

    def __call__(self, outputs: Mapping[str, Tensor], rows: DataProto, loss_counts: LossCounts) -> LossOutput:
        """Compute the loss of whole pairs, TRL's metrics (means over pairs), and `new_log_probs`."""
        if len(rows) % 2:
            do = (
                "take rows as stages.AnswerPairs writes them, and an engine that does not split pairs: engines.local(…)"
            )
            raise PipelineError("number of rows of preference pairs", expected="an even number", found=len(rows), do=do)
        mask, log_probs = loss_mask(rows), outputs["log_probs"]
        of_rows = torch.where(mask.bool(), log_probs, 0.0).sum(-1)
        deltas = of_rows - (rows["ref_log_prob"] * mask).sum(-1) if self.uses_reference else of_rows
        tokens = mask.sum(-1)
        known = (tokens.view(-1, 2) > 0).all(-1)
        sides = [one.view(-1, 2).unbind(-1) for one in (deltas, tokens, of_rows.detach())]
        kl = rows["kto_kl"][::2] if self.loss_type == "kto" else 0.0
        settings = {name: one for name, one in self.to_dict().items() if name != "loss_type"} | {"kl": kl}
        losses = PREFERENCE_LOSSES[self.loss_type](PairScores(*sides[0], *sides[1], **settings))
        won, lost = (self.beta * one.detach() for one in sides[0])
        each = {"rewards/chosen": won, "rewards/rejected": lost, "rewards/accuracies": (won > lost).double()}
        each |= {"rewards/margins": won - lost, "logps/chosen": sides[2][0], "logps/rejected": sides[2][1]}
        count: Any = known.double().sum()
        metrics = {name: Mean((one.double() * known).sum(), count) for name, one in each.items()}  # type: ignore[arg-type]
        loss = torch.where(known, losses, 0.0).sum() / max(loss_counts.sequences / 2, 1)
        return LossOutput(loss, metrics, {"new_log_probs": (log_probs * rows["response_mask"]).detach()})
