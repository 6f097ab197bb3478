"""What ranks must agree on, so that none waits for another in a collective: how many passes, whether to go on, what failed."""

from __future__ import annotations

import math
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import distributed

from workbench.dataproto import DataProto
from workbench.engines.protocol import Learned, Loss, Normalisers
from workbench.errors import EngineError, NonFinite, first_line, message
from workbench.metrics import Mean, Metric, Sum, join


def largest(mine: float) -> float:
    """The largest of all ranks' numbers."""
    number = torch.tensor(float(mine))
    distributed.all_reduce(number, distributed.ReduceOp.MAX)
    return float(number)


def agreed(mine: bool) -> bool:
    """Whether it is so on any rank."""
    return largest(mine) > 0


def together(told: str | None, kind: type[Exception] = EngineError) -> None:
    """Rank 0 says what went wrong, if anything: then all ranks raise a `kind`, and nobody waits for the others."""
    box = [told]
    distributed.broadcast_object_list(box, 0)
    if box[0] is not None:
        raise kind(box[0])


class Account:
    """What the micro-batches of one rank gave: metrics, columns, and the first trouble."""

    def __init__(self, rows: int, width: int) -> None:
        self.parts: list[Mapping[str, Metric | float]] = []
        self.columns: dict[str, torch.Tensor] = {}
        self.trouble: dict[str, Any] | None = None
        self._shape = (rows, width)

    def loss(
        self,
        loss: Loss,
        found: Mapping[str, torch.Tensor],
        rows: DataProto,
        normalisers: Normalisers,
        indices: torch.Tensor | None,
        t: int,
    ) -> torch.Tensor:
        """One micro-batch's loss; a 0 with a gradient of 0 for an empty pass, and where it, or an earlier one, failed."""
        nothing = torch.stack([one.sum() for one in found.values()]).sum() * 0.0
        if indices is None or self.trouble is not None:
            return nothing
        try:
            result = loss(found, rows, normalisers)
            value = result.loss.item()
        except Exception as error:  # noqa: BLE001 - the driver raises it, when all ranks have come to the end
            text = "".join(traceback.format_exception(error))
            self.trouble = {"rows": indices.tolist(), "what": first_line(error), "traceback": text}
            return nothing
        if not math.isfinite(value):
            self.trouble = {"rows": indices.tolist(), "what": value, "traceback": None}
            return nothing
        self.parts.append({"loss": Sum(value), **result.metrics})
        for name, part in result.columns.items():
            if name not in self.columns:
                self.columns[name] = torch.zeros(self._shape, dtype=part.dtype)
            self.columns[name][indices, :t] = part.cpu()
        return result.loss


def learned(reports: Sequence[Mapping[str, Any]], places: Sequence[torch.Tensor], rows: int) -> Learned:
    """What the ranks told of one mini-batch as one, columns in the order of its rows; or what `refuse` raises."""
    refuse(reports, places)
    columns: dict[str, torch.Tensor] = {}
    for report, place in zip(reports, places, strict=True):
        for name, part in report["columns"].items():
            if name not in columns:
                columns[name] = torch.zeros(rows, part.shape[1], dtype=part.dtype)
            columns[name][place] = part
    metrics = join(report["metrics"] for report in reports)
    return Learned({**metrics, "grad_norm": Mean(reports[0]["grad_norm"]), "lr": Mean(reports[0]["lr"])}, columns)


def refuse(reports: Sequence[Mapping[str, Any]], places: Sequence[torch.Tensor]) -> None:
    """Raise what the ranks told: a loss that raised or is not finite, by the batch's rows; a norm that is not finite."""
    if not any(report["failed"] for report in reports):
        return
    for rank, (report, place) in enumerate(zip(reports, places, strict=True)):
        trouble = report["trouble"]
        if trouble is None:
            continue
        rows = place[torch.tensor(trouble["rows"])].tolist()[:8]
        if trouble["traceback"] is not None:
            raise EngineError(f"the loss raised on rank {rank}, rows {rows}: {trouble['what']}\n{trouble['traceback']}")
        told = "the loss is not finite; no step was taken"
        raise NonFinite(message(told, found=trouble["what"], do=f"look at rows {rows}"))
    raise NonFinite(message("the gradient norm is not finite; no step was taken", found=reports[0]["grad_norm"]))
