"""What a phase wrote, column by column: kind, mean ± deviation, range and a small histogram, before and after."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from workbench.columns import declared
from workbench.views.batches import cut, kind_of
from workbench.views.html import escape, plain, table, terminal

if TYPE_CHECKING:
    from workbench.dataproto import DataProto
    from workbench.trace import Phase

ENOUGH = 1 << 20
"""Elements of one column that are looked at; of a larger one evenly spaced rows stand for all, and the view says so."""
_PIECES = 16
_BINS = 12
_BLOCKS = " ▁▂▃▄▅▆▇█"
_IDS = ("prompts", "responses", "input_ids", "position_ids")


@dataclass(frozen=True, kw_only=True)
class Field:
    """One column, summed up."""

    name: str
    kind: str
    """`f32[64,40]`, `obj[64]`."""
    rows: int
    """Rows that were looked at."""
    of: int
    """Rows there are."""
    mean: float | None = None
    """Over response tokens alone, where the column has one number a response token; None for ids and objects."""
    std: float | None = None
    low: float | None = None
    high: float | None = None
    odd: int = 0
    """NaN and infinite numbers."""
    histogram: str = ""
    """Twelve bars between `low` and `high`."""
    common: str = ""
    """Of objects: the commonest values, or how long texts are."""

    @property
    def numbers(self) -> str:
        """`0.41 ± 0.49  [0, 1]`, with a count of what is not finite."""
        said = []
        if self.mean is not None and self.std is not None:
            said.append(f"{short(self.mean)} ± {short(self.std)}")
        if self.low is not None and self.high is not None:
            said.append(f"[{short(self.low)}, {short(self.high)}]")
        if self.odd:
            said.append(f"{self.odd} not finite")
        return "  ".join(said) or self.common


def short(value: float) -> str:
    """Three digits."""
    return "–" if math.isnan(value) else f"{value:.3g}"


def field_of(batch: DataProto, name: str) -> Field:
    """Sum up one column; of one that lies on disk only what is needed is read, and nothing is kept."""
    if name in batch.batch:
        return _numbers(batch, name)
    shown = min(len(batch), 4096)
    values = list(batch.non_tensor_batch.part(name, 0, shown))
    return Field(name=name, kind=kind_of(batch, name), rows=shown, of=len(batch), common=_common(values))


def _pieces(rows: int, width: int) -> list[tuple[int, int]]:
    """Evenly spaced ranges of rows with at most `ENOUGH` elements."""
    if rows * width <= ENOUGH:
        return [(0, rows)] if rows else []
    pieces = min(_PIECES, rows)
    each = max(ENOUGH // width // pieces, 1)
    return [(start, start + each) for start in (place * rows // pieces for place in range(pieces))]


def _numbers(batch: DataProto, name: str) -> Field:
    raw: Any = batch.batch.raw()[name]
    shape = tuple(raw.shape)
    pieces = _pieces(shape[0], max(math.prod(shape[1:]), 1))
    tensors = [_values(batch, name, start, stop) for start, stop in pieces]
    values = torch.cat(tensors) if tensors else torch.empty(0)
    finite = values[values.isfinite()]
    odd = len(values) - len(finite)
    made: dict[str, Any] = {}
    if len(finite):
        low, high = finite.min().item(), finite.max().item()
        made = {"low": low, "high": high, "histogram": spark(finite, low, high)}
        if name not in _IDS:
            made |= {"mean": finite.mean().item(), "std": finite.std(correction=0).item()}
    looked = sum(stop - start for start, stop in pieces)
    return Field(name=name, kind=kind_of(batch, name), rows=looked, of=shape[0], odd=odd, **made)


def _values(batch: DataProto, name: str, start: int, stop: int) -> torch.Tensor:
    """Flat float64; padding of response-shaped columns is left out."""
    tensor = batch.batch.part(name, start, stop)
    column = declared(name)
    per_token = column is not None and column.dims == ("B", "T") and not name.endswith("mask")
    if per_token and "response_mask" in batch:
        tensor = tensor[batch.batch.part("response_mask", start, stop).bool()]
    return tensor.reshape(-1).double()


def spark(values: torch.Tensor, low: float, high: float) -> str:
    """A histogram in twelve characters; of one value a single full bar."""
    if low == high:
        return _BLOCKS[-1]
    if not math.isfinite(high - low):
        return ""
    counts = torch.histc(values, _BINS, low, high)
    levels = (counts / counts.max() * (len(_BLOCKS) - 1)).ceil().int().tolist()
    return "".join(_BLOCKS[level] for level in levels)


def _common(values: list[Any]) -> str:
    if not values:
        return ""
    if all(isinstance(value, str) for value in values):
        counts = Counter(values)
        if len(counts) > 8 or max(map(len, counts)) > 40:
            lengths = torch.tensor([float(len(value)) for value in values])
            return f"{len(counts)} texts of {lengths.min():.0f} to {lengths.max():.0f} characters"
        return ", ".join(f"{cut(plain(value), 24)} ×{number}" for value, number in counts.most_common(4))
    statuses = Counter(str(value.status.value) for value in values if hasattr(value, "status"))
    if statuses:
        return ", ".join(f"{number} {status}" for status, number in statuses.most_common(4))
    kinds = Counter(type(value).__name__ for value in values)
    return ", ".join(f"{number} {kind}" for kind, number in kinds.most_common(3))


# --- a phase ------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Written:
    """A column that a phase wrote, and what it was before."""

    after: Field
    before: Field | None

    @property
    def mark(self) -> str:
        """`new` or `changed`."""
        return "new" if self.before is None else "changed"


def written(phase: Phase, before: DataProto | None = None) -> list[Written]:
    """The columns that a phase wrote, in its order; with the batch before it also what they were."""
    return [
        Written(
            after=field_of(phase.batch, name),
            before=field_of(before, name) if before is not None and name in before else None,
        )
        for name in phase.wrote
    ]


def fields_text(phase: Phase, before: DataProto | None = None) -> str:
    """One line a column."""
    lines = []
    for one in written(phase, before):
        field = one.after
        lines.append(f"  {field.name:<20} {field.kind:<12} {field.histogram:<12} {field.numbers}")
        if one.before is not None:
            lines.append(f"  {'':<20} {'was ' + one.before.kind:<12} {one.before.histogram:<12} {one.before.numbers}")
    return terminal(lines)


def fields_html(phase: Phase, before: DataProto | None = None) -> str:
    """The same as a table; a note says where a part stands for a large column."""
    rows, partial = [], 0
    for one in written(phase, before):
        field = one.after
        partial = max(partial, field.of if field.rows < field.of else 0)
        column = declared(field.name)
        name = (
            f'<b title="{escape(column.doc if column else "not one of the declared columns")}">{escape(field.name)}</b>'
        )
        rows.append(
            [
                name if one.before is None else f"{name}<br><small>was</small>",
                f"<code>{escape(field.kind)}</code>" + ("" if one.before is None else f"<br>{_faint(one.before.kind)}"),
                _bars(field.histogram) + ("" if one.before is None else f"<br>{_bars(one.before.histogram)}"),
                escape(field.numbers) + ("" if one.before is None else f"<br>{_faint(one.before.numbers)}"),
            ]
        )
    note = f"<small>summed up from a part of {partial:,} rows</small>" if partial else ""
    return table(["wrote", "kind", "spread", "mean ± deviation, [range]"], rows) + note


def _faint(text: str) -> str:
    return f'<span style="opacity:0.6">{escape(text)}</span>'


def _bars(histogram: str) -> str:
    return f'<span style="font-family:monospace;white-space:pre;color:rgb(56,139,253)">{histogram}</span>'
