"""Rows as a tree of token segments: what rows have in common from their beginning goes through the model once.

The rows of a group share their prompt, episodes their earlier turns; equal rows are one. The tree's tokens are one packed
sequence in which a subtree follows its parent, and each attends to its ancestors alone. The same idea for prompts: Liu et al.
2025, Prefix Grouper, https://arxiv.org/abs/2506.05433.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from workbench.dataproto.columns import EXPERTS
from workbench.dataproto.core import DataProto, sent
from workbench.engines.local_engine.forward import Head, Layer, planned, replay

LEAST = 16
"""Fewest tokens that must be saved for a segment of its own."""
_KEY = 16
"""What bringing one key to its queries costs, in products of a query and a key (measured)."""
_PART = 512
"""Most queries of a unit that has ancestors."""
_SLACK = 1 << 14
"""Products that padding may add to a block: less than another call costs."""

_Ints = np.ndarray[Any, np.dtype[np.int64]]


# --- rows in order ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sorted:
    """Rows in the order of their tokens, so that rows with a common beginning are neighbours."""

    order: _Ints
    """[b]: row numbers."""
    lengths: _Ints
    """[b]: tokens of each row, in this order."""
    shared: _Ints
    """[b]: tokens that each row has in common with the row before it; 0 for the first."""
    columns: _Ints
    """[b, L]: the column of each row's tokens, from the left; 0 behind its end."""


def in_order(ids: Tensor, positions: Tensor, kept: Tensor) -> Sorted:
    """Sort rows on the CPU by the tokens where `kept` [b, W] is true; tokens are equal where ids and positions are."""
    inside = kept.numpy().astype(bool)
    lengths = inside.sum(1)
    width = max(int(lengths.max(initial=0)), 1)
    columns = np.argsort(~inside, axis=1, kind="stable")[:, :width]
    valid = np.arange(width) < lengths[:, None]
    columns = np.where(valid, columns, 0)
    tokens, places = (np.where(valid, np.take_along_axis(one.numpy(), columns, 1), -1) for one in (ids, positions))
    keys = (tokens + 1).astype(">u4")  # in bytes, so that rows compare as fast as memory
    order = np.array(sorted(range(len(keys)), key=lambda row: keys[row].tobytes()), dtype=np.int64)
    tokens, places = tokens[order], places[order]
    same = (tokens[1:] == tokens[:-1]) & (places[1:] == places[:-1]) & valid[order][1:]
    shared = np.zeros(len(order), dtype=np.int64)
    shared[1:] = np.logical_and.accumulate(same, axis=1).sum(1)
    return Sorted(order, lengths[order], shared, columns[order])


def cut(batch: DataProto, budget: int) -> list[Tensor]:
    """Cut a batch into micro-batches of at most `budget` tokens of their trees, at least one row each: their row numbers.

    Rows go in the order of their tokens, so that a group stays together where the budget allows it.
    """
    rows = in_order(batch["input_ids"], batch["position_ids"], batch["attention_mask"])
    shared = np.where(rows.shared >= LEAST, rows.shared, 0)
    sizes = zip(rows.order.tolist(), rows.lengths.tolist(), (rows.lengths - shared).tolist(), strict=True)
    return grouped(sizes, budget)


def grouped(rows: Iterable[tuple[int, int, int | None]], budget: int) -> list[Tensor]:
    """Cut rows, in the order given, into groups of at most `budget` tokens, at least one row each: their row numbers, sorted.

    A row is its number, the tokens that it costs as the first of a group, and those that it adds to one; None: as many as the
    group's first row cost.
    """
    groups: list[list[int]] = []
    first = cost = 0
    for row, alone, added in rows:
        more = first if added is None else added
        if groups and cost + more <= budget:
            groups[-1].append(row)
            cost += more
        else:
            groups.append([row])
            first = cost = alone
    return [torch.tensor(sorted(group)) for group in groups]


# --- the tree -----------------------------------------------------------------------------------


@dataclass
class _Segment:
    """Tokens `depth` to `depth + length` of the rows `first` to `last` (excluded, in order), packed at `start`."""

    start: int
    length: int
    depth: int
    first: int
    last: int
    above: _Ints
    """Packed numbers of all its ancestors' tokens."""
    parent: int

    @property
    def end(self) -> int:
        return self.start + self.length


def _segments(rows: Sorted) -> list[_Segment]:
    found: list[_Segment] = []
    start = 0
    nothing = np.zeros(0, dtype=np.int64)
    waiting = [(0, len(rows.order), 0, -1)]
    while waiting:
        first, last, depth, parent = waiting.pop()
        shared, longest = rows.shared[first + 1 : last], int(rows.lengths[last - 1])
        common = int(shared.min(initial=longest))
        children: list[tuple[int, int]] = []  # none where all the rows are equal
        if common < longest:
            cuts = [first, *(first + 1 + np.flatnonzero(shared == common)).tolist(), last]
            children = list(pairwise(cuts))
            if (common - depth) * (len(children) - 1) < LEAST:
                waiting += [(*child, depth, parent) for child in reversed(children)]
                continue
        if common > depth:
            above = nothing
            if parent >= 0:
                one = found[parent]
                above = np.concatenate([one.above, np.arange(one.start, one.end)])
            found.append(_Segment(start, common - depth, depth, first, last, above, parent))
            start, parent = found[-1].end, len(found) - 1
        waiting += [(*child, common, parent) for child in reversed(children)]
    return found


def places(mask: Tensor) -> Tensor:
    """[N] where a mask is true, in the flattened mask."""
    return mask.flatten().nonzero()[:, 0]


class Spread:
    """Puts a value [...] at each of the N places of a mask [b, T]: [b, T, ...] float32, 0 elsewhere; `which` [N] of several values."""

    def __init__(self, mask: Tensor, device: Any, which: Tensor | None = None) -> None:
        self._shape, self._places = mask.shape, sent(places(mask), device)
        self._which = None if which is None else sent(which, device)

    def __call__(self, values: Tensor) -> Tensor:
        """[N, …], or as many as `which` says, → [b, T, …]."""
        values = values.float() if self._which is None else values.float()[self._which]
        empty = torch.zeros((self._shape.numel(), *values.shape[1:]), dtype=torch.float32, device=values.device)
        return empty.index_copy(0, self._places, values).view(*self._shape, *values.shape[1:])


class Tree:
    """Rows of a micro-batch as one packed tree of tokens; without those behind which a row has no response token.

    Of its `count` tokens `given` has ids and positions [1, N] on the device, and `experts` [N, L, k] those of the column, where the
    rows have it: then rows share tokens that went to the same ones. `before` [M] (on the device `predicting`) has in
    order the number of the token whose state predicts each of `labels`.
    """

    def __init__(self, rows: DataProto, device: Any) -> None:
        mask, ids = rows["response_mask"].bool(), rows["input_ids"]
        width, t = ids.shape[1], mask.shape[1]
        # a row's last response token predicts nothing, nor does what follows it
        last = torch.where(mask.any(1), width - t + (mask * torch.arange(t)).amax(1), 0)
        kept = rows["attention_mask"].bool() & (torch.arange(width) < last[:, None])
        if not kept.any():
            kept = torch.zeros_like(kept)
            kept[0, 0] = True
        order = in_order(ids, _marks(rows), kept)
        segments = _segments(order)
        source, packed = _packed(order, segments, width)
        flat = torch.from_numpy(source)
        self.given = {name: sent(rows[name].flatten()[flat][None], device) for name in ("input_ids", "position_ids")}
        self.experts = sent(rows[EXPERTS].flatten(0, 1)[flat], device) if EXPERTS in rows else None
        labels = ids[:, -t:][mask]
        before = torch.from_numpy(packed)[:, width - t - 1 : width - 1][mask]
        # equal tokens behind equal ones are predicted once
        vocabulary = int(labels.max()) + 1 if len(labels) else 1
        pairs, which = torch.unique(before * vocabulary + labels, return_inverse=True)
        self.count, self.before = len(flat), pairs // vocabulary
        self.predicting, self.labels = (sent(one, device) for one in (self.before, pairs % vocabulary))
        self.spread, self.plan = Spread(mask, device, which), TreePlan(segments, device)

    def states(self, model: Any, head: Head) -> Tensor:
        """Hidden states [M, H] (of `OWN`: logits) that predict `labels` [M]."""
        replay(model, self.experts)
        with planned(model, self.plan) as mask:
            return head.states(model, **self.given, attention_mask=mask)[0][self.predicting]


def _marks(rows: DataProto) -> Tensor:
    """[b, W] numbers that are equal where positions are, and the experts of the column `routed_experts`, where the rows have it."""
    positions: Tensor = rows["position_ids"]
    if EXPERTS not in rows:
        return positions
    chosen = rows[EXPERTS].flatten(2).long()
    factors = torch.randint(1 << 40, (chosen.shape[-1],), generator=torch.Generator().manual_seed(0))
    return positions + ((chosen * factors).sum(-1) << 20)  # it may overflow: a number is all that is asked


def _packed(rows: Sorted, segments: Sequence[_Segment], width: int) -> tuple[_Ints, _Ints]:
    """[N] where in the flattened [b, W] each packed token is, and [b, W] the packed number of each row's token."""
    source = np.zeros(segments[-1].end, dtype=np.int64)
    places = np.zeros((len(rows.order), rows.columns.shape[1]), dtype=np.int64)
    for one in segments:
        inside = slice(one.depth, one.depth + one.length)
        source[one.start : one.end] = rows.order[one.first] * width + rows.columns[one.first, inside]
        places[one.first : one.last, inside] = np.arange(one.start, one.end)
    whole = np.zeros((len(rows.order), width), dtype=np.int64)
    valid = np.arange(places.shape[1]) < rows.lengths[:, None]
    numbers = np.broadcast_to(rows.order[:, None], valid.shape)
    whole[numbers[valid], rows.columns[valid]] = places[valid]
    return source, whole


# --- what attends to what -----------------------------------------------------------------------


@dataclass
class _Block:
    """Queries [n, q] and keys [n, k] by packed numbers, padded with 0, that attend in one call."""

    queries: Tensor
    keys: Tensor
    sizes: Tensor
    """[n, 2]: how many queries and keys are none of the padding."""
    causal: bool
    """Whether the keys are the queries, each of which sees those up to itself."""
    masks: dict[tuple[int | None, torch.dtype], Tensor] = field(default_factory=dict)


class TreePlan:
    """A plan (`attention.planned`) by which the packed tokens of a tree attend to their ancestors and themselves."""

    def __init__(self, segments: Sequence[_Segment], device: Any) -> None:
        count = segments[-1].end
        depths, ends = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64)
        final = np.zeros(max(one.last for one in segments), dtype=np.int64)
        for one in segments:
            depths[one.start : one.end] = np.arange(one.depth, one.depth + one.length)
            final[one.first : one.last] = one.end
        for one in segments:  # the last of its rows is the last of its subtree
            ends[one.start : one.end] = final[one.last - 1]
        self._longest = int(depths.max()) + 1
        self._depths, self._ends = (sent(torch.from_numpy(one), device) for one in (depths, ends))
        self._blocks: list[_Block] = []
        back = np.zeros(count, dtype=np.int64)
        start = 0
        for units in _batches(_units(segments)):
            sizes = np.array([(len(queries), len(keys)) for queries, keys in units])
            padded = [np.zeros((len(units), most), dtype=np.int64) for most in sizes.max(0).tolist()]
            for number, unit in enumerate(units):
                for there, numbers in zip(padded, unit, strict=True):
                    there[number, : len(numbers)] = numbers
                back[unit[0]] = start + number * padded[0].shape[1] + np.arange(len(unit[0]))
            start += padded[0].size
            causal = len(units[0][0]) == len(units[0][1])
            queries, keys, real = (sent(torch.from_numpy(each), device) for each in (*padded, sizes))
            self._blocks.append(_Block(queries, keys, real, causal))
        self._back = sent(torch.from_numpy(back), device)

    def attend(self, layer: Layer) -> Tensor:
        """The layer's attention [1, H, N, D'] of the packed tokens."""
        query, key, value = (one[0].transpose(0, 1) for one in (layer.query, layer.key, layer.value))
        window = layer.window if layer.window is not None and layer.window < self._longest else None
        found = []
        for block in self._blocks:
            q, k, v = (
                one[places].transpose(1, 2)
                for one, places in ((query, block.queries), (key, block.keys), (value, block.keys))
            )
            causal = block.causal and window is None and layer.plain
            seen = None if causal else self._seen(block, window, query.dtype if layer.plain else torch.bool)
            found.append(layer.attend(q, k, v, seen, causal=causal).transpose(1, 2).flatten(0, 1))
        return torch.cat(found)[self._back].transpose(0, 1)[None]

    def _seen(self, block: _Block, window: int | None, kind: torch.dtype) -> Tensor:
        """[n, 1, q, k]: whether a query sees a key; in a floating `kind` what is added to the scores: 0, or -inf."""
        if (window, kind) not in block.masks:
            query, key = block.queries[:, :, None], block.keys[:, None, :]
            seen = (key <= query) & (query < self._ends[key])
            if window is not None:
                seen &= self._depths[query] - self._depths[key] < window
            index = torch.arange(block.keys.shape[1], device=key.device)
            seen &= (index < block.sizes[:, 1:])[:, None]
            padding = torch.arange(block.queries.shape[1], device=key.device) >= block.sizes[:, :1]
            seen[:, :, 0] |= padding  # softmax over nothing is NaN
            if kind != torch.bool:
                seen = torch.zeros(seen.shape, dtype=kind, device=seen.device).masked_fill_(~seen, -torch.inf)
            block.masks[window, kind] = seen[:, None]
        return block.masks[window, kind]


_Unit = tuple[_Ints, _Ints]
"""Packed numbers of queries, and of the keys that any of them sees."""


def _units(segments: Sequence[_Segment]) -> list[_Unit]:
    """Neighbours with the same ancestors share their keys, as long as that costs less than attending apart."""

    def cost(queries: int, above: int) -> int:
        return (queries + _KEY) * (queries + above)

    spans: list[tuple[int, int, _Segment]] = []
    for one in segments:
        if spans and one.parent >= 0 and spans[-1][2].parent == one.parent and spans[-1][1] == one.start:
            start, end, first = spans[-1]
            above = len(one.above)
            if cost(one.end - start, above) <= cost(end - start, above) + cost(one.length, above):
                spans[-1] = (start, one.end, first)
                continue
        spans.append((one.start, one.end, one))
    units: list[_Unit] = []
    for start, end, one in spans:
        own = np.arange(start, end)
        if not len(one.above):
            units.append((own, own))
        else:  # in parts, because those at the beginning need not look at keys further on
            parts = range(_PART, end - start + _PART, _PART)
            units += [(own[to - _PART : to], np.concatenate([one.above, own[:to]])) for to in parts]
    return units


def _batches(units: Sequence[_Unit]) -> list[list[_Unit]]:
    """Units of similar size attend together: padding adds at most half of the products, or a little."""
    found: list[list[_Unit]] = []
    widest = true = 0
    for unit in sorted(units, key=lambda one: (len(one[0]) < len(one[1]), -len(one[0]), -len(one[1]))):
        queries, keys = len(unit[0]), len(unit[1])
        alike = found and (queries < keys) == (len(found[-1][0][0]) < len(found[-1][0][1]))
        if alike:
            most = max(widest, keys)
            padded = len(found[-1][0][0]) * most * (len(found[-1]) + 1)
            alike = padded <= 1.5 * (true + queries * keys) + _SLACK
        if alike:
            found[-1].append(unit)
            widest, true = max(widest, keys), true + queries * keys
        else:
            found.append([unit])
            widest, true = keys, queries * keys
    return found
