"""Further terms of an update's loss, summed with its own: each with its weight, its mask and its aggregation.

An update's loss is main + Σ weight·term over the same rows and one forward pass: a policy loss with cross-entropy on tools'
answers, a policy loss with a divergence from a teacher, cross-entropy with a KL to the reference.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from workbench.base.config import Settings, require
from workbench.base.errors import PipelineError, check_name
from workbench.base.metrics import Sum
from workbench.dataproto.core import DataProto
from workbench.engines.protocol import Loss, LossCounts, LossOutput

OBSERVATIONS = "observations"
"""As the mask of a term: the tokens of the response that the model did not write, such as tools' answers."""
_OWN = "own_mask"
"""In the rows that a learner gets: `response_mask` as it was, where a term's mask has further tokens."""
_TAKEN = (
    "bypass", "clipped", "empty_mini_batches", "entropy", "grad_norm", "loss", "loss_scale", "lr", "nonfinite", "overflows", "skipped",
)  # fmt: skip


def loss_mask(rows: DataProto) -> Tensor:
    """Return the mask of tokens to learn from, [B, T] float: 1 on tokens that the model wrote and that were not
    rejected, in scored rows.

    It is the product of `response_mask`, and of `loss_mask` [B, T] and `scored` [B] where the rows have them.
    """
    mask = rows["response_mask"].float()
    if "loss_mask" in rows:
        mask = mask * rows["loss_mask"].float()
    return mask * rows["scored"].float()[:, None] if "scored" in rows else mask


def counts_of(rows: DataProto) -> LossCounts:
    """Count the tokens and sequences of a mini-batch that its losses are divided by."""
    mask = loss_mask(rows)
    sequences = float((mask.sum(-1) > 0).sum())
    scored = float(rows["scored"].sum()) if "scored" in rows else float(len(rows))
    return LossCounts(tokens=mask.sum().item(), sequences=sequences, width=float(mask.shape[1]), rows=scored)


@dataclass(frozen=True, kw_only=True)
class Term(Settings):
    """A further term of an update's loss: `weight` times a loss, which has its aggregation and its own settings."""

    loss: Any
    """A loss of `workbench.stages`, such as `CrossEntropy()` or `Divergence(…)`."""
    weight: float = 1.0
    """What the loss is multiplied by."""
    mask: str | None = None
    """The tokens that the term learns from: a column [B, T]; `observations`, the tokens in the response that the model did not
    write; None: the tokens of the update's own loss."""

    def __post_init__(self) -> None:
        require(callable(self.loss), "loss of a Term", expected="a loss of workbench.stages", found=self.loss)
        known = type(self.weight) in (int, float) and abs(self.weight) < float("inf")
        require(known, "weight of a Term", expected="a finite number", found=self.weight)

    @property
    def reads(self) -> tuple[str, ...]:
        """Names of the columns that the term needs, besides the inputs of a forward pass."""
        own = self.mask not in (None, OBSERVATIONS)
        return (*self.loss.reads, *((str(self.mask),) if own else ()))

    def settings(self) -> dict[str, Any]:
        """Return weight, mask, and class and settings of the loss, by name."""
        return {"weight": self.weight, "mask": self.mask, "loss": type(self.loss).__name__, **self.loss.to_dict()}

    def changed(self, name: str, value: Any) -> Term:
        """Return the term with another weight, mask or setting of its loss. Raises `PipelineError` for any other name."""
        if name in ("weight", "mask"):
            return self.replace(**{name: value})
        known = ("weight", "mask", *self.loss.field_names())
        check_name(f"setting of a term with {type(self.loss).__name__}", name, known, PipelineError)
        return self.replace(loss=self.loss.replace(**{name: value}))

    def own_rows(self, rows: DataProto) -> DataProto:
        """Return the rows as the term's loss reads them: where it has a mask, with that as their `response_mask`."""
        if self.mask is None:
            return rows.with_columns({"response_mask": rows[_OWN]}) if _OWN in rows else rows
        own = rows[_OWN] if _OWN in rows else rows["response_mask"]
        there = rows["attention_mask"][:, -own.shape[1] :].to(own.dtype)
        mask = there * (1 - own) if self.mask == OBSERVATIONS else there * rows[self.mask].to(own.dtype)
        return rows.without(*(name for name in ("loss_mask", "scored") if name in rows)).with_columns(
            {"response_mask": mask}
        )


def check_terms(terms: Mapping[str, Any] | None, main: Loss) -> dict[str, Term]:
    """Return the terms by name; a loss alone is a term of weight 1. Raises `SettingError` for a name that cannot be that
    of a metric, for two losses that compare whole distributions, and for a term of another model output's kind."""
    named = {name: one if isinstance(one, Term) else Term(loss=one) for name, one in (terms or {}).items()}
    for name in named:
        free = name.isidentifier() and name not in _TAKEN
        require(free, "name of a term", expected=f"an identifier other than {', '.join(_TAKEN)}", found=name)
    losses = {"the update's loss": main, **{name: one.loss for name, one in named.items()}}
    wide = [name for name, one in losses.items() if "compared" in one.want]
    require(len(wide) < 2, "losses over whole distributions", expected="one in an update", found=wide)
    odd = [name for name, one in losses.items() if ("values" in one.want) != ("values" in main.want)]
    require(not odd, "terms of an update", expected="all of a policy, or all of a critic", found=odd)
    return named


@dataclass(frozen=True)
class LossStreams:
    """The loss main + Σ weight·term of one mini-batch, whose counts of each term it holds; made by `streams`.

    Each term is the metric `<term>` without its weight; its own metrics are called `<term>_<name>`.
    """

    main: Loss
    terms: Mapping[str, Term]
    counts: Mapping[str, LossCounts]

    @property
    def want(self) -> tuple[str, ...]:
        """Names of the model outputs that the losses need."""
        return tuple(dict.fromkeys((*self.main.want, *(one for term in self.terms.values() for one in term.loss.want))))

    @property
    def compare(self) -> Callable[..., Any] | None:
        """The `compare` of the loss that compares whole distributions; None where no loss does."""
        every = (self.main, *(term.loss for term in self.terms.values()))
        wide: Any = next((one for one in every if "compared" in one.want), None)
        return None if wide is None else wide.compare

    def __call__(self, outputs: Mapping[str, Tensor], rows: DataProto, loss_counts: LossCounts) -> LossOutput:
        """Compute all losses of one micro-batch, their sum, their metrics and columns."""
        mine, own = rows, outputs
        if _OWN in rows:
            mine = rows.with_columns({"response_mask": rows[_OWN]})
            own = {name: values * rows[_OWN].to(values.dtype) for name, values in outputs.items()}
        out = self.main(own, mine, loss_counts)
        loss, metrics, columns = out.loss, dict(out.metrics), dict(out.columns)
        for name, term in self.terms.items():
            part = term.loss(outputs, term.own_rows(rows), self.counts[name])
            loss = loss + term.weight * part.loss
            number: Any = part.loss.detach()
            inner = {key.removeprefix("actor/").replace("/", "_"): one for key, one in part.metrics.items()}
            further = {f"{name}_{key}": one for key, one in inner.items()}
            metrics |= {name: Sum(number), **further}
            columns = {**part.columns, **columns}
        return LossOutput(loss, metrics, columns)


def streams(main: Loss, terms: Mapping[str, Term], rows: DataProto) -> tuple[LossStreams, DataProto]:
    """Return the summed loss of a mini-batch, and the rows for it: their `response_mask` has the tokens of every term."""
    named: dict[str, LossCounts] = {}
    union = own = rows["response_mask"]
    for name, term in terms.items():
        read = term.own_rows(rows)
        named[name] = counts_of(read)
        union = torch.maximum(union, read["response_mask"])
    wide = not torch.equal(union, own)
    rows = rows.with_columns({"response_mask": union, _OWN: own}) if wide else rows
    return LossStreams(main, terms, named), rows
