"""On-policy distillation: a stage with a teacher's log-probs, its advantages, and a loss that is a divergence from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from workbench.base.config import Settings, require
from workbench.base.errors import DataError, EngineError, PipelineError, check_name, describe
from workbench.base.metrics import Max, Mean, Metric, Min
from workbench.dataproto.core import DataProto
from workbench.datasets.pictures import text_of
from workbench.datasets.rendering import encode_rows
from workbench.engines.protocol import GivesTops, LossCounts, LossOutput, WholeTeacher, switches_of
from workbench.functional.distillation import LogitsDivergence, divergence, with_tail
from workbench.functional.losses import AGGREGATIONS, aggregate, kl_penalty
from workbench.functional.masking import masked_mean
from workbench.stages.log_prob import LogProb, scored_columns
from workbench.stages.stage import BaseStage, Outcome
from workbench.stages.targets import behind_prompts, cell, placed_answers
from workbench.stages.terms import loss_mask

HINTED = ("teacher_prompts", "teacher_prompt_mask", "teacher_prompt_text")
TOPS = ("teacher_top_log_probs", "teacher_top_ids")
ESTIMATORS = ("full", "sampled", *(kind + plus for kind in ("k1", "k2", "k3", "abs") for plus in ("", "+")))
"""`full`: over the vocabulary, or the teacher's `top_k`; `sampled`: k1 with the gradient of k2, which is the KL's own on
tokens that the student sampled; others: see `functional.kl_penalty`."""


class TeacherLogProb(LogProb):
    """Write `teacher_log_probs` [B, T], the log-prob of each response token under a teacher, in nats.

    Args:
        teacher: a model that scores; or a dict data source → model, of which each row gets its own.
        top_k: also write the teacher's K likeliest next tokens at each place: `teacher_top_ids` and `teacher_top_log_probs`
            [B, T, K]. None: no such columns.
        hint: the column with what only the teacher is told of a row: a text, which is added to the prompt's last message, or a
            whole chat in the prompt's place; None or "" means no hint. Writes `teacher_prompts`, `teacher_prompt_mask`
            and `teacher_prompt_text`. With the student itself as the teacher that is self-distillation (SDFT,
            https://arxiv.org/abs/2601.19897; SDPO, https://arxiv.org/abs/2601.20802).
        temperature: what the teacher's logits are divided by.

    Raises `DataError` for a row whose data source has no teacher, and `EngineError` where the teacher cannot give its
    likeliest tokens.
    """

    def __init__(
        self, teacher: Any, *, top_k: int | None = None, hint: str | None = None, temperature: float = 1.0
    ) -> None:
        require(top_k is None or top_k > 0, "top_k of the teacher", expected="≥ 1, or None", found=top_k)
        super().__init__(teacher, name="teacher_log_prob", column="teacher_log_probs", temperature=temperature)
        self.top_k, self.hint = top_k, hint
        self._teachers: dict[str | None, Any] = dict(teacher) if isinstance(teacher, Mapping) else {None: teacher}
        several = isinstance(teacher, Mapping)
        hinted = (hint.partition(".")[0], "raw_prompt") if hint else ()
        self.reads = (*self.reads, *(("data_source",) if several else ()), *hinted)
        self.writes = ("teacher_log_probs", *(TOPS if top_k else ()), *(HINTED if hint else ()))
        odd = [one for one in self._teachers.values() if top_k and not isinstance(one, GivesTops)]
        if odd:
            do = "take the reference() of a local engine, or estimator='sampled' without top_k"
            raise EngineError("teacher with top_k", expected="log-probs of all tokens", found=odd[0], do=do)

    def __call__(self, batch: DataProto) -> Outcome:
        """Return the same B rows with the teacher's log-probs."""
        rows = batch.select(scored_columns(batch, policy=bool(self._learners)))
        columns: dict[str, Any] = {}
        if self.hint:
            columns = self._hinted(batch, self.hint)
            width = rows["response_mask"].shape[1]
            answers = (rows[name][:, -width:] for name in ("input_ids", "attention_mask"))
            seen = behind_prompts(columns["teacher_prompts"], columns["teacher_prompt_mask"], *answers)
            rows = rows.without(*seen).with_columns(seen)
        for source, places in self._shares(batch).items():
            part, teacher = rows.select_idxs(places), self._teachers[source]
            if self.top_k:
                outputs = teacher.top_log_probs(part, self.top_k, self.temperature)
            else:
                outputs = teacher.compute_log_probs(part, ("log_probs",), self.temperature)
            for name, values in outputs.items():
                empty = values.new_zeros((len(batch), *values.shape[1:]))
                columns.setdefault(f"teacher_{name}", empty)[places] = values
        return Outcome(self.written(batch, columns))

    def _hinted(self, batch: DataProto, hint: str) -> dict[str, Any]:
        """Return the prompts with their hints, as the columns `HINTED`."""
        reader, column = next(iter(self._teachers.values())), hint.partition(".")[0]
        chats = [
            _with_hint(chat, cell({column: batch[column][row]}, hint), f"row {row}")
            for row, chat in enumerate(batch["raw_prompt"])
        ]
        prompts, _ = encode_rows(reader.tokenizer, chats, {}, **switches_of(reader))
        laid = placed_answers(prompts, [((), ())] * len(prompts), reader.tokenizer.eos_token_id)
        texts = reader.tokenizer.batch_decode([list(ids) for ids in prompts])
        return dict(zip(HINTED, (laid["prompts"], laid["prompt_mask"], texts), strict=True))

    def _shares(self, batch: DataProto) -> dict[str | None, Tensor]:
        """Return for each teacher the numbers of its rows."""
        if None in self._teachers:
            return {None: torch.arange(len(batch))}
        rows: dict[str | None, list[int]] = {}
        for row, source in enumerate(batch["data_source"]):
            if source not in self._teachers:
                expected = f"one of {', '.join(map(repr, self._teachers))}"
                raise DataError(f"teacher of row {row}", expected=expected, found=f"data_source {source!r}")
            rows.setdefault(source, []).append(row)
        return {source: torch.tensor(numbers) for source, numbers in rows.items()}


def _with_hint(chat: Any, hint: Any, place: str) -> Any:
    """Return a prompt as the teacher reads it; see `TeacherLogProb`. Raises `DataError` for a hint of another kind."""
    if hint is None or hint == "":
        return chat
    if isinstance(hint, list):
        return hint
    if not isinstance(hint, str):
        raise DataError(f"hint of {place}", expected="a text, a chat, or None", found=describe(hint))
    if isinstance(chat, str):
        return f"{chat}\n\n{hint}"
    return [*chat[:-1], {**chat[-1], "content": f"{text_of(chat[-1]['content'])}\n\n{hint}"}]


class TeacherAdvantage(BaseStage):
    """Write as `advantages` [B, T] the teacher's log-prob of each token minus the student's, or another estimate of −KL.

    A policy gradient with these advantages is on-policy distillation (https://thinkingmachines.ai/blog/on-policy-distillation/,
    verl's `use_policy_gradient`). Without a reward stage the rows have no score: `scored` is then written, too.

    Args:
        kl_type: the estimate, see `functional.kl_penalty`.
        loss_max_clamp: the most that an estimate counts, in nats, on both sides; None: no limit.
        scored: write `scored`.
    """

    name = "advantage"
    reads = ("old_log_probs", "teacher_log_probs", "response_mask")

    def __init__(self, *, kl_type: str = "k1", loss_max_clamp: float | None = None, scored: bool = False) -> None:
        require(kl_type in ESTIMATORS[2:], "kl_type", expected=", ".join(ESTIMATORS[2:]), found=kl_type)
        self.kl_type, self.loss_max_clamp, self.scored = kl_type, loss_max_clamp, scored
        self.writes = ("advantages", "returns", *(("scored",) if scored else ()))

    def __call__(self, batch: DataProto) -> Outcome:
        """Return the same B rows with their advantages."""
        mask = batch["response_mask"]
        kl = kl_penalty(batch["old_log_probs"], batch["teacher_log_probs"], self.kl_type)
        advantages = -_clamped(torch.where(mask.bool(), kl, 0.0), self.loss_max_clamp)
        columns = {"advantages": advantages, "returns": advantages}
        if self.scored:
            columns["scored"] = torch.ones(len(batch), dtype=torch.bool)
        metrics: dict[str, Metric | float] = {}
        if mask.any():
            metrics["actor/teacher_kl"] = Mean.of(float(masked_mean(-advantages, mask)), float(mask.sum()))
        return Outcome(self.written(batch, columns), metrics)


@dataclass(frozen=True, kw_only=True)
class Divergence(Settings):
    """The divergence of the student from a teacher at each response token, aggregated over the mini-batch.

    `full` sums over the vocabulary, chunk by chunk: the teacher computes its distributions beside the student's and no [B,
    T, V] exists; or with `top_k` over the K tokens that the stage `TeacherLogProb(top_k=K)` wrote, and all others as one.
    """

    beta: float = 1.0
    """1: reverse KL(student‖teacher); 0: forward KL(teacher‖student); between them the generalised JSD."""
    estimator: str = "full"
    """Out of `ESTIMATORS`; all but `full` read the column and estimate the reverse KL from the sampled tokens."""
    top_k: int | None = None
    """Number of the teacher's likeliest tokens; None: the whole vocabulary."""
    tail: bool = True
    """With `top_k`: count all other tokens as one more; False: leave them out, and count a sum below 0 as 0, as verl's
    `forward_kl_topk`."""
    log_prob_min_clamp: float | None = None
    """With `top_k`: log-probs of both models below this count as this, in nats; None: no limit."""
    loss_max_clamp: float | None = None
    """The most that a token counts, in nats, on both sides; None: no limit."""
    against: str = "teacher_log_probs"
    """The column of sampled tokens' log-probs; `ref_log_prob` makes it a KL to the reference."""
    loss_agg_mode: str = "token-mean"
    """How token losses become one number: see `functional.aggregate`."""
    teacher: Any = None
    """The model whose distributions `full` without `top_k` compares with: a local engine's `reference()`."""

    supervised: ClassVar[bool] = True
    writes: ClassVar[tuple[str, ...]] = ("new_log_probs", "divergence")
    """Columns [B, T] that an update with this loss writes."""

    def __post_init__(self) -> None:
        for name, known in (("loss_agg_mode", AGGREGATIONS), ("estimator", ESTIMATORS)):
            check_name(name, getattr(self, name), known)
        require(0 <= self.beta <= 1, "beta", expected="a number in [0, 1]", found=self.beta)
        whole = self.estimator == "full"
        expected = "1, the reverse KL: sampled tokens are the student's own"
        require(whole or self.beta == 1, f"beta with estimator={self.estimator!r}", expected=expected, found=self.beta)
        require(whole or self.top_k is None, "top_k", expected="None: sampled tokens alone", found=self.top_k)
        if whole and self.top_k is None:
            do = "pass a local engine's reference(), or set top_k= or estimator='sampled'"
            fits = isinstance(self.teacher, WholeTeacher)
            require(
                fits, "teacher of Divergence", expected="a model with all tokens' log-probs", found=self.teacher, do=do
            )

    @property
    def reads(self) -> tuple[str, ...]:
        """Names of the columns that the loss needs, besides the inputs of a forward pass."""
        return (self.against,) if self.estimator != "full" else TOPS if self.top_k else ()

    @property
    def want(self) -> tuple[str, ...]:
        """Names of the model outputs that the loss needs."""
        return ("log_probs", "compared") if self.estimator == "full" else ("log_probs",)

    def to_dict(self) -> dict[str, Any]:
        """Return the settings by name, without the teacher."""
        return {name: getattr(self, name) for name in self.field_names() if name != "teacher"}

    def replace(self, **changes: Any) -> Divergence:
        """Return a copy with some settings changed."""
        return type(self).from_parameters({**vars(self), **changes})

    def compare(self, rows: DataProto, temperature: float) -> Callable[[Tensor, slice], Tensor]:
        """Return a function that a learner calls with the logits [n, V] (divided by the temperature) of a slice of the
        micro-batch's N response tokens, in the rows' order: it returns their divergences [n].

        Raises `EngineError` for a teacher with another vocabulary.
        """
        if self.top_k:
            mask = rows["response_mask"].bool()
            likeliest, ids = (rows[name][mask] for name in TOPS)

            def against_tops(logits: Tensor, at: slice) -> Tensor:
                theirs, places = likeliest[at].to(logits.device), ids[at].to(logits.device)
                logits = logits.float()
                mine = logits.gather(-1, places) - logits.logsumexp(-1, keepdim=True)
                if self.log_prob_min_clamp is not None:
                    mine, theirs = (one.clamp(min=self.log_prob_min_clamp) for one in (mine, theirs))
                mine, theirs = (with_tail(one) if self.tail else one for one in (mine, theirs))
                values = divergence(mine, theirs, self.beta)
                return values if self.tail else values.clamp(min=0)  # of some tokens alone the sum may be negative

            return against_tops
        of_teacher, measured = self.teacher.distributions(rows, temperature), LogitsDivergence(self.beta)

        def against_all(logits: Tensor, at: slice) -> Tensor:
            theirs = of_teacher(at).to(logits.device)
            if theirs.shape != logits.shape:
                found = f"{theirs.shape[-1]} tokens, and {logits.shape[-1]} of the student"
                do = "take a teacher of the student's family, or estimator='sampled'"
                raise EngineError("teacher with another vocabulary", found=found, do=do)
            return measured(logits.float(), theirs)

        return against_all

    def __call__(self, outputs: Mapping[str, Tensor], rows: DataProto, loss_counts: LossCounts) -> LossOutput:
        """Compute the loss of one micro-batch, its metrics, and the columns named in `writes`."""
        mask, log_probs = loss_mask(rows), outputs["log_probs"]
        if self.estimator == "full" and "compared" not in outputs:
            do = "learn with engines.local(…), or set estimator='sampled'"
            raise PipelineError("this learner cannot compare distributions over the whole vocabulary", do=do)
        kind = "k1+" if self.estimator == "sampled" else self.estimator
        full = self.estimator == "full"
        estimates = outputs["compared"] if full else kl_penalty(log_probs, rows[self.against], kind)
        values = _clamped(estimates, self.loss_max_clamp)
        tokens, sequences, width = loss_counts.tokens, loss_counts.sequences, loss_counts.width
        loss = aggregate(values, mask, self.loss_agg_mode, tokens=tokens, sequences=sequences, scale=width)
        kept = estimates.detach() * rows["response_mask"]
        count: Any = mask.sum().double()
        total: Any = (kept * mask).sum().double()
        inside, outside = kept.masked_fill(mask == 0, -torch.inf), kept.masked_fill(mask == 0, torch.inf)
        ends: tuple[Any, Any] = (inside.amax(), outside.amin())
        metrics: dict[str, Metric | float] = {"actor/divergence": Mean(total, count)}
        metrics |= {"actor/divergence_max": Max(ends[0]), "actor/divergence_min": Min(ends[1])}
        mine = (log_probs * rows["response_mask"]).detach()
        return LossOutput(loss, metrics, {"new_log_probs": mine, "divergence": kept})


def _clamped(values: Tensor, most: float | None) -> Tensor:
    return values if most is None else values.clamp(-most, most)
