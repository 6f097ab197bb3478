"""Forward passes over given tokens, in micro-batches by token budget; logits of response positions alone.

Where it is proven, rows go through the model as a tree of token segments: what they have in common from their
beginning (a group's prompt, an episode's earlier turns, all of equal rows) goes through it once. The tree's tokens
are one packed sequence in which a subtree follows its parent, and each attends to its ancestors alone. The same idea
for prompts: Liu et al. 2025, Prefix Grouper, https://arxiv.org/abs/2506.05433.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from workbench.base import runtime
from workbench.base.errors import EngineError
from workbench.base.progress import present
from workbench.dataproto.columns import EXPERTS, MARGIN, PIXELS, declared
from workbench.dataproto.core import DataProto, sent
from workbench.engines.local_engine import lora
from workbench.engines.local_engine.forward import (
    Head,
    Parts,
    SegmentBlock,
    head_of,
    linear_head,
    pictured_inputs,
    planned,
    replay,
)
from workbench.engines.local_engine.loading import check_length
from workbench.engines.local_engine.memory import AS_ON_GPU, chunk_bytes, chunk_rows
from workbench.engines.local_engine.products import FASTER, is_plain, product
from workbench.engines.transformers_internals import asks_attention_interface, attention_of
from workbench.functional.logprobs import (
    entropy_from_logits,
    linear_function,
    linear_log_probs,
    log_probs_from_logits,
)
from workbench.functional.losses import full_kl

LEAST = 16
"""Fewest tokens that must be saved for a segment of its own."""
SHORT = 128
"""Tokens of rows whose attention is one masked call on a CPU: joining parts costs more than a mask that small."""
_SLACK = 1 << 14
"""Products that padding may add to a block: less than another call costs."""

_Ints = np.ndarray[Any, np.dtype[np.int64]]


# --- rows in order ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sorted:
    """Rows sorted by their token ids, so that rows with a common prefix are neighbours."""

    order: _Ints
    """[b]: row numbers."""
    lengths: _Ints
    """[b]: tokens of each row, in this order."""
    shared: _Ints
    """[b]: tokens that each row has in common with the row before it; 0 for the first."""
    columns: _Ints
    """[b, L]: the column of each row's tokens, from the left; 0 behind its end."""


def in_order(ids: Tensor, positions: Tensor, kept: Tensor) -> Sorted:
    """Sort rows by their tokens, on the CPU; only tokens where `kept` [b, W] is true count, and two are equal where
    their ids and positions are."""
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


def cut_trees(batch: DataProto, budget: int) -> list[Tensor]:
    """Cut a batch into micro-batches whose prefix trees have at most `budget` tokens, or a single row; returns the row
    numbers of each.

    Rows are taken in the order of their tokens. A tree of at most `budget` tokens is in one micro-batch, so that no
    shared token is computed twice.
    """
    rows = in_order(batch["input_ids"], batch["position_ids"], batch["attention_mask"])
    shared = np.where(rows.shared >= LEAST, rows.shared, 0)
    added = rows.lengths - shared
    sizes: list[tuple[list[int], int, int | None]] = []
    for first, last in pairwise([*np.flatnonzero(shared == 0).tolist(), len(added)]):
        whole, numbers = int(added[first:last].sum()), rows.order[first:last].tolist()
        if whole <= budget:
            sizes.append((numbers, whole, whole))
        else:
            each = zip(numbers, rows.lengths[first:last].tolist(), added[first:last].tolist(), strict=True)
            sizes += [([number], alone, more) for number, alone, more in each]
    return grouped(sizes, budget)


def grouped(rows: Iterable[tuple[Sequence[int], int, int | None]], budget: int) -> list[Tensor]:
    """Cut entries of rows, in the given order, into groups of at most `budget` tokens or a single entry; returns each
    group's row numbers, sorted.

    Each entry is (the numbers of its rows, its tokens as the first of a group, the tokens that it adds to a group).
    Where the last is None it adds as many as the group's first entry has.
    """
    groups: list[list[int]] = []
    first = cost = 0
    for numbers, alone, added in rows:
        more = first if added is None else added
        if groups and cost + more <= budget:
            groups[-1] += numbers
            cost += more
        else:
            groups.append([*numbers])
            first = cost = alone
    return [torch.tensor(sorted(group)) for group in groups]


# --- the tree -----------------------------------------------------------------------------------


@dataclass
class _Segment:
    """A node of the prefix tree: tokens `depth` to `depth + length` of the sorted rows `first` to `last` (excluded),
    packed from `start` on."""

    start: int
    length: int
    depth: int
    first: int
    last: int

    @property
    def end(self) -> int:
        return self.start + self.length


def _segments(rows: Sorted) -> list[_Segment]:
    segments: list[_Segment] = []
    start = 0
    waiting = [(0, len(rows.order), 0)]
    while waiting:
        first, last, depth = waiting.pop()
        shared, longest = rows.shared[first + 1 : last], int(rows.lengths[last - 1])
        common = int(shared.min(initial=longest))
        children: list[tuple[int, int]] = []  # none where all the rows are equal
        if common < longest:
            cuts = [first, *(first + 1 + np.flatnonzero(shared == common)).tolist(), last]
            children = list(pairwise(cuts))
            if (common - depth) * (len(children) - 1) < LEAST:
                waiting += [(*child, depth) for child in reversed(children)]
                continue
        if common > depth:
            segments.append(_Segment(start, common - depth, depth, first, last))
            start = segments[-1].end
        waiting += [(*child, common) for child in reversed(children)]
    return segments


def places(mask: Tensor) -> Tensor:
    """Return the indices [N] of the true elements of a mask, counted in the flattened mask."""
    return mask.flatten().nonzero()[:, 0]


class Spread:
    """Scatters values to the N true places of a mask [b, T]: values [N, …] become [b, T, …] float32, with 0 elsewhere.

    `which` [N] has the index of each place's value, where several places share one.
    """

    def __init__(self, mask: Tensor, device: Any, which: Tensor | None = None) -> None:
        self._shape, self._places = mask.shape, sent(places(mask), device)
        self._which = None if which is None else sent(which, device)

    def each(self, values: Tensor) -> Tensor:
        """Return the value of each of the N places: values [N, …], or with `which` values [M, …], become [N, …]."""
        return values if self._which is None else values[self._which]

    def __call__(self, values: Tensor) -> Tensor:
        """Scatter values [N, …], or with `which` values [M, …], to [b, T, …]."""
        return self.scatter(self.each(values.float()))

    def scatter(self, values: Tensor) -> Tensor:
        """Scatter the values [N, …] of the N places to [b, T, …]."""
        values = values.float()
        empty = torch.zeros((self._shape.numel(), *values.shape[1:]), dtype=torch.float32, device=values.device)
        return empty.index_copy(0, self._places, values).view(*self._shape, *values.shape[1:])


class RowTree:
    """The rows of a micro-batch as one packed prefix tree: a prefix that rows share is in it once, and tokens behind a
    row's last response token are left out.

    `given` has the N packed ids and positions [1, N] on the device. `experts` [N, L, k] are the replayed experts, where
    the rows have them; tokens are shared only where these agree. `before` [M] holds, for each of `labels` [M], the
    packed index of the token whose state predicts it (`predicting`: the same on the device).
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
        self.spread, self.plan = Spread(mask, device, which), _parts(segments, device)

    def states(self, model: Any, head: Head) -> Tensor:
        """Run the model over the packed tree and return the hidden states [M, H] (for the head `OWN` logits [M, V])
        that predict `labels` [M]."""
        replay(model, self.experts)
        with planned(model, self.plan) as mask:
            return head.states(model, **self.given, attention_mask=mask)[0][self.predicting]


def _marks(rows: DataProto) -> Tensor:
    """Numbers [b, W] that tell whether tokens may be shared: equal where positions are, and, if the rows have
    `routed_experts`, the experts are too."""
    positions: Tensor = rows["position_ids"]
    if EXPERTS not in rows:
        return positions
    chosen = rows[EXPERTS].flatten(2).long()
    factors = torch.randint(1 << 40, (chosen.shape[-1],), generator=torch.Generator().manual_seed(0))
    return positions + ((chosen * factors).sum(-1) << 20)  # it may overflow: a number is all that is asked


def _packed(rows: Sorted, segments: Sequence[_Segment], width: int) -> tuple[_Ints, _Ints]:
    """Return for each packed token [N] its index in the flattened [b, W] ids, and for each row's token [b, W] its
    packed index."""
    source = np.zeros(segments[-1].end, dtype=np.int64)
    places = np.zeros((len(rows.order), rows.columns.shape[1]), dtype=np.int64)
    for segment in segments:
        inside = slice(segment.depth, segment.depth + segment.length)
        source[segment.start : segment.end] = rows.order[segment.first] * width + rows.columns[segment.first, inside]
        places[segment.first : segment.last, inside] = np.arange(segment.start, segment.end)
    whole = np.zeros((len(rows.order), width), dtype=np.int64)
    valid = np.arange(places.shape[1]) < rows.lengths[:, None]
    numbers = np.broadcast_to(rows.order[:, None], valid.shape)
    whole[numbers[valid], rows.columns[valid]] = places[valid]
    return source, whole


# --- what attends to what -----------------------------------------------------------------------


_Unit = tuple[_Ints, _Ints | None]
"""Packed numbers of a segment's tokens, and of those that its last token sees; None: the segment's own."""


def _parts(segments: Sequence[_Segment], device: Any) -> Parts:
    """Plan attention over a packed prefix tree: each segment attends to itself, and its descendants to all of it, or it
    attends to all that its rows have so far where the tree's rows are `SHORT`."""
    final = np.zeros(max(segment.last for segment in segments), dtype=np.int64)
    for segment in segments:
        final[segment.first : segment.last] = segment.end
    depths = np.concatenate([np.arange(segment.depth, segment.depth + segment.length) for segment in segments])
    roots = np.cumsum([segment.depth == 0 for segment in segments]) - 1
    longest = np.maximum.reduceat(depths, [segment.start for segment in segments if segment.depth == 0])[roots] + 1
    whole = longest <= (SHORT if torch.device(device).type == "cpu" else 0)
    # the last of its rows is the last of its subtree
    ends = final[[segment.last - 1 for segment in segments]]
    above = [
        (slice(segment.start, segment.end), slice(segment.end, int(end)))
        for segment, end, apart in zip(segments, ends, ~whole, strict=True)
        if apart and end > segment.end
    ]
    path, units = np.zeros(len(depths), dtype=np.int64), list[_Unit]()
    for segment, together in zip(segments, whole, strict=True):
        tokens = np.arange(segment.start, segment.end)
        path[segment.depth : segment.depth + segment.length] = tokens
        units.append((tokens, path[: segment.depth + segment.length].copy() if together else None))
    back = np.zeros(len(depths), dtype=np.int64)
    blocks, start = [], 0
    for some in _alike(units):
        queries, padding = _side_by_side([numbers for numbers, _ in some])
        back[queries[~padding]] = start + np.flatnonzero(~padding)
        start += queries.size
        arrays: list[np.ndarray[Any, Any]] = [queries, padding, np.arange(queries.shape[1])[None]]
        if some[0][1] is not None:
            keys, none = _side_by_side([keys for _, keys in some if keys is not None])
            behind, before = depths[queries], np.where(none, len(depths), depths[keys])
            hidden = before[:, None, None, :] > behind[:, None, :, None]
            arrays[2:] = [behind, keys, before, np.where(hidden, -np.inf, 0).astype(np.float32)]
        blocks.append(SegmentBlock(*[sent(torch.from_numpy(array), device) for array in arrays]))
    sides = [sent(torch.from_numpy(array), device) for array in (back, depths)]
    return Parts(blocks, sides[0], above, sides[1], int(depths.max()) + 1)


def _side_by_side(numbers: Sequence[_Ints]) -> tuple[_Ints, np.ndarray[Any, np.dtype[np.bool_]]]:
    """(numbers [n, L] with 0 as padding behind the shorter ones, [n, L] which are padding)."""
    lengths = np.array([len(row) for row in numbers])
    padding = np.arange(lengths.max()) >= lengths[:, None]
    padded = np.zeros(padding.shape, dtype=np.int64)
    padded[~padding] = np.concatenate(numbers)
    return padded, padding


def _alike(units: Sequence[_Unit]) -> list[list[_Unit]]:
    """Batch units of similar lengths for one attention call each; padding adds at most a tenth of the query-key products,
    plus `_SLACK`."""
    groups: list[list[_Unit]] = []
    widths, true = (0, 0), 0
    sized = [((len(queries), len(queries if keys is None else keys)), (queries, keys)) for queries, keys in units]
    for (queries, keys), unit in sorted(sized, key=lambda pair: (pair[1][1] is None, *pair[0]), reverse=True):
        products = queries * keys
        wide = (max(widths[0], queries), max(widths[1], keys))
        alike = bool(groups) and (groups[-1][0][1] is None) == (unit[1] is None)
        if alike and (len(groups[-1]) + 1) * wide[0] * wide[1] <= 1.1 * (true + products) + _SLACK:
            groups[-1].append(unit)
            widths, true = wide, true + products
        else:
            groups.append([unit])
            widths, true = (queries, keys), products
    return groups


# --- micro-batches --------------------------------------------------------------------------------


def flash(model: Any) -> bool:
    """Whether a model was loaded with flash attention, which packs rows side by side in one sequence."""
    return "flash" in (attention_of(model.config) or "")


def packs(model: Any, settings: Any, batch: DataProto | None = None) -> bool:
    """Whether the rows of a batch go through the model without padding and with shared prefixes computed once (the
    setting `pack`). Batches with pictures are always padded.

    With `auto` they do where the self-check proved it (`model.workbench_paths`; unchecked, where all attention goes
    through transformers' interface) and no dropout is active. Raises `EngineError` where `pack="yes"` demands it and it
    is not proven.
    """
    if settings.pack == "no" or (batch is not None and PIXELS in batch):
        return False
    why = why_padded(model, settings)
    if settings.pack == "yes" and why:
        what, do = f"pack='yes' for {type(model).__name__}", "leave pack at 'auto', or take 'no'"
        raise EngineError(what, expected="a model that gives the same numbers without padding", found=why, do=do)
    return not why


def why_padded(model: Any, settings: Any) -> str:
    """Return the reason why rows cannot be packed; empty where they can."""
    if lora.dropout(model) > 0:
        return f"lora_dropout={lora.dropout(model)}: tokens that rows share would be dropped out together"
    if flash(model):
        return ""
    if settings.pack == "auto" and settings.attn_implementation not in (None, "sdpa"):
        return f"attn_implementation={settings.attn_implementation!r}"
    paths = getattr(model, "workbench_paths", None)
    proven: bool | None = paths.pack if paths is not None else None
    known = {"full_attention", "sliding_attention"}
    other = set(getattr(model.config.get_text_config(), "layer_types", None) or ()) - known
    if proven or (proven is None and asks_attention_interface(model) and not other):
        return ""
    return "no proof of it" if not other else f"layers of {', '.join(sorted(other))}"


def micro_batches(model: Any, batch: DataProto, budget: int, packed: bool) -> list[Tensor]:
    """Cut a batch into micro-batches of at most `budget` tokens, or a single row; returns the row numbers of each.

    Packed rows with a common prefix stay together, and tokens that they share count once (`cut_trees`). Other rows are
    sorted by length: a padded micro-batch counts rows × longest row, one for flash attention the sum of its rows.
    Sorting is stable, so the same batch is always cut the same way. Rows with pictures are never mixed with rows of
    text: each is scored as it was sampled.
    """
    paths = getattr(model, "workbench_paths", None)
    if paths is not None and paths.own_head:  # logits of all tokens exist at one time
        budget = min(budget, chunk_rows(model.device.type, model.config.get_text_config().vocab_size))
    if packed and not flash(model):
        return cut_trees(batch, budget)
    lengths = batch["attention_mask"].sum(-1)
    order = torch.argsort(lengths, descending=True, stable=True)
    pictured = torch.tensor([bool(cell) for cell in batch[PIXELS]] if PIXELS in batch else [False] * len(batch))
    groups = []
    for rows in (order[pictured[order]], order[~pictured[order]]):
        # a padded row is as long as the first of its group, the longest
        sizes = [
            ([row], each, each if packed else None)
            for row, each in zip(rows.tolist(), lengths[rows].clamp(min=1).tolist(), strict=True)
        ]
        groups += grouped(sizes, budget)
    return groups


def trimmed(rows: DataProto) -> tuple[DataProto, int]:
    """Trim positions that are padding in every row; returns the trimmed rows and their T.

    Columns of [B, S+T] are cut at both ends, of [B, S] at the left, of [B, T] at the right.
    """
    width = rows["input_ids"].shape[1]
    old_t = rows["response_mask"].shape[1]
    seen = rows["attention_mask"].any(0).nonzero().squeeze(-1)
    in_response = rows["response_mask"].any(0).nonzero().squeeze(-1)
    start = min(int(seen[0]) if len(seen) else 0, width - old_t)
    new_t = max(int(in_response[-1]) + 1 if len(in_response) else 1, 1)
    prompt = width - old_t
    spans = {"S": slice(start, prompt), "T": slice(0, new_t), "S+T": slice(start, prompt + new_t)}
    cut: dict[str, torch.Tensor] = {}
    for name in rows.batch:
        tensor, column = rows.batch[name], declared(name)
        if column is not None and len(column.dims) > 1:
            letter = column.dims[1]
        else:  # a column of a custom stage: per response token where it is as wide as one
            letter = "T" if tensor.dim() > 1 and tensor.shape[1] == old_t else ""
        cut[name] = tensor[:, spans[letter]] if letter in spans else tensor
    pixels = {PIXELS: rows.non_tensor_batch[PIXELS]} if PIXELS in rows else None
    return DataProto(cut, pixels, rows.meta_info), new_t


def check_routed(settings: Any, rows: DataProto) -> None:
    """Raise `EngineError` where the setting `routing_replay` is on and the rows lack the column of routed experts."""
    if settings.routing_replay and EXPERTS not in rows:
        what, do = "learning with routing_replay", "sample with routing_replay, too, or set it False for the learner"
        raise EngineError(what, expected=f"rows with the column {EXPERTS!r}", found="rows without it", do=do)


def check_ids(model: Any, batch: DataProto) -> None:
    """Raise `EngineError` for a token id that is not in the model's vocabulary, and for a row longer than the model's
    `rope_limit`."""
    check_length(model, int(batch["attention_mask"].sum(-1).max()) if len(batch) else 0)
    ids, size = batch["input_ids"], model.get_input_embeddings().num_embeddings
    wrong = ((ids < 0) | (ids >= size)) & batch["attention_mask"].bool()
    if wrong.any():
        row, place = wrong.nonzero()[0].tolist()
        what, expected = f"token id {int(ids[row, place])} in row {row}", f"ids 0 to {size - 1}, the model's vocabulary"
        raise EngineError(what, expected=expected, do="tokenise the batch with this model's tokenizer")


# --- how rows go through a model ------------------------------------------------------------------


class RowLayout(Protocol):
    """Protocol of how the rows of a micro-batch go through a model (padded, packed or as a tree), and which hidden
    states predict their N response tokens.

    It is planned on the CPU, where the rows are, so that nothing waits for the device; what the passes need is then
    sent there.
    """

    labels: Tensor
    """[M] ids to predict, on the device; M < N where rows have tokens in common."""

    @property
    def spread(self) -> Callable[[Tensor], Tensor]:
        """A function that scatters values [M] to the rows' response tokens, [b, T]."""

    def states(self, model: Any, head: Head) -> Tensor:
        """Run the model and return the hidden states [M, H] (for the head `OWN` logits [M, V]) that predict `labels`."""


class ScoredRows:
    """The layout of rows one after the other: padded, or with `packed` in one sequence without padding for flash
    attention (which tells rows apart by `position_ids`).

    Rows with pictures are padded and go through the model's own forward.
    """

    def __init__(self, rows: DataProto, packed: bool, model: Any) -> None:
        mask, attention = rows["response_mask"].bool(), rows["attention_mask"].bool()
        t = mask.shape[1]
        inside = torch.zeros_like(attention)
        inside[:, -t - 1 : -1] = mask  # the state before a response token is the one of the token to its left
        # tokens first, padding behind them, where it comes into no state of a recurrent layer
        order = torch.argsort(~attention, dim=1, stable=True)
        names = ("input_ids", "attention_mask", "position_ids")
        inputs = {name: rows[name].gather(1, order) for name in names}
        inside = inside.gather(1, order)
        if packed:
            inputs = {name: rows[name][attention][None] for name in ("input_ids", "position_ids")}
            inside = inside[attention][None]
        if PIXELS in rows and any(rows[PIXELS]):
            responses = torch.zeros_like(attention)
            responses[:, -t:] = mask  # a tool's answer has pictures, too
            responses = responses.gather(1, order)
            inputs = pictured_inputs(model, inputs["input_ids"], inputs["attention_mask"], rows[PIXELS], responses)
        self._experts: Tensor | None = None
        if EXPERTS in rows:
            chosen = torch.where(attention[..., None, None], rows[EXPERTS], -1)
            chosen = chosen[attention] if packed else chosen[torch.arange(len(order))[:, None], order].flatten(0, 1)
            self._experts = sent(chosen, model.device)
        self._given = {name: sent(one, model.device) for name, one in inputs.items()}
        self._before = sent(places(inside), model.device)
        self.labels = sent(rows["input_ids"][:, -t:][mask], model.device)
        self.spread = Spread(mask, model.device)

    def states(self, model: Any, head: Head) -> Tensor:
        """Run the model and return the hidden states [N, H] (for the head `OWN` logits [N, V]) that predict `labels`."""
        replay(model, self._experts)
        return head.states(model, **self._given).flatten(0, 1)[self._before]


def layout(model: Any, rows: DataProto, packed: bool) -> RowLayout:
    """Choose how rows on the CPU go through a model: padded; packed as a prefix tree; or with flash attention packed
    side by side.

    Under context parallelism (a model with `workbench_share`) the tree that is returned is this rank's share.
    """
    if not packed or flash(model):
        return ScoredRows(rows, packed, model)
    whole = RowTree(rows, model.device)
    share: Callable[[RowTree], RowLayout] | None = getattr(model, "workbench_share", None)
    return whole if share is None else share(whole)


# --- outputs --------------------------------------------------------------------------------------


def outputs(
    model: Any,
    value_head: torch.nn.Module | None,
    rows: DataProto,
    want: Sequence[str],
    temperature: float,
    packed: bool,
    head: Head | None = None,
    compare: Compare | None = None,
) -> dict[str, Tensor]:
    """Compute the outputs named in `want` (see `compute_log_probs`), each [b, T] float32 with gradient and 0 outside
    the response mask; for the self-check also `logits` [b, T, V], and `compared` [b, T, …] by `compare`.

    `rows` are on the CPU, the outputs on the model's device. `head` computes the logits; without it `head_of` chooses
    one.
    """
    way, head = layout(model, rows, packed), head or head_of(model)
    flat: dict[str, Tensor] = {}
    states = way.states(model, linear_head(model) if "values" in want else head)
    if "values" in want:
        if value_head is None:
            raise EngineError("output 'values' of a policy", expected="a critic's value head", do="use engine.critic()")
        with torch.autocast(states.device.type, enabled=False):  # values are as exact as the weights
            flat["values"] = value_head(states.float()).squeeze(-1)
    if set(_DISTRIBUTION) & set(want):
        if "values" in want and head.linear is None:
            states = way.states(model, head)
        flat |= _from_logits(head, states, way.labels, want, temperature)
    if "logits" in want:
        flat["logits"] = head.logits(states)
    found = {name: way.spread(values) for name, values in flat.items()}
    if compare is not None and "compared" in want:
        spread: Any = way.spread
        found["compared"] = spread.scatter(
            _compared(head, spread.each(states), compare(rows, temperature), temperature)
        )
    return found


Compare = Callable[[DataProto, float], Callable[[Tensor, slice], Tensor]]
"""Of a micro-batch and the temperature, a function of the logits [n, V] of a slice of its N response tokens: [n, …]."""


def _compared(head: Head, states: Tensor, function: Callable[[Tensor, slice], Tensor], temperature: float) -> Tensor:
    """Compute a function of the logits at N positions, [N, …], chunk by chunk."""
    linear = head.linear
    if is_plain(linear):
        return linear_function(states, linear.weight, linear.bias, function, **_shape(head, states, temperature))

    def chunk(part: Tensor, at: slice) -> Tensor:
        return function(head.logits(part) / temperature, at)

    size = max(_chunk_rows(head, states) // 4, 1)  # of a divergence several tensors as large as the logits exist
    places = [slice(start, start + size) for start in range(0, len(states), size)] or [slice(0, 0)]
    layer = () if linear is None else (one for one in linear.parameters() if one.requires_grad)
    found: Tensor = _InChunks.apply(states, chunk, places, *layer)
    return found


class _InChunks(torch.autograd.Function):
    """Autograd function of `_compared` for any head: both passes compute one chunk after the other and keep nothing of it.

    `checkpoint` keeps what it computes again until the whole backward pass has ended.
    """

    @staticmethod
    def forward(ctx: Any, states: Tensor, chunk: Any, places: Sequence[slice], *layer: Any) -> Tensor:
        ctx.chunk, ctx.places, ctx.layer = chunk, places, layer
        ctx.half = torch.is_autocast_enabled(states.device.type), torch.get_autocast_dtype(states.device.type)
        ctx.save_for_backward(states)
        return torch.cat([chunk(states[at], at) for at in places])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (states,) = ctx.saved_tensors
        total, sums = torch.zeros_like(states), [torch.zeros_like(one) for one in ctx.layer]
        enabled, dtype = ctx.half
        for at in ctx.places:
            with torch.enable_grad(), torch.autocast(states.device.type, dtype, enabled):
                part = states[at].detach().requires_grad_()
                out = ctx.chunk(part, at)
            total[at], *further = torch.autograd.grad(out, (part, *ctx.layer), gradient[at])
            for one, more in zip(sums, further, strict=True):
                one.add_(more)
        return total, None, None, *sums


_DISTRIBUTION = ("log_probs", "entropy", "sum_pi_squared")


def _from_logits(
    head: Head, states: Tensor, labels: Tensor, want: Sequence[str], temperature: float
) -> dict[str, Tensor]:
    """Compute log-probs, entropies and Σπ², each [M], from hidden states [M, H]: fused for a plain linear output layer,
    in chunks for any other head."""
    wanted = [name for name in _DISTRIBUTION if name in want]
    linear = head.linear
    if not is_plain(linear):  # an adapter, a shard, none
        return logits_in_chunks(head, states, labels, wanted, temperature)
    more, shape = wanted != ["log_probs"], _shape(head, states, temperature)
    found = linear_log_probs(states, linear.weight, linear.bias, labels, **shape, distribution=more)
    return {name: one for name, one in zip(_DISTRIBUTION, found, strict=True) if name in wanted}


def _shape(head: Head, states: Tensor, temperature: float) -> dict[str, Any]:
    """Return how logits follow from a plain head's layer, as arguments of `linear_log_probs` and `linear_function`."""
    faster = product if FASTER and states.is_cpu and not AS_ON_GPU.get() else None
    how = {"product": faster, "chunk_bytes": chunk_bytes(states.device.type)}
    return {"factor": head.factor, "softcap": head.softcap, "temperature": temperature, **how}


def logits_in_chunks(
    head: Head, states: Tensor, labels: Tensor, wanted: Sequence[str], temperature: float
) -> dict[str, Tensor]:
    """Compute log-probs, entropies and Σπ², each [M], from hidden states [M, H] by any head, chunk by chunk. The
    backward pass recomputes a chunk's logits, so that only one chunk's exist at a time."""

    def chunk(part: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
        logits = head.logits(part) / temperature
        compute = {
            "log_probs": lambda: log_probs_from_logits(logits, targets),
            "entropy": lambda: entropy_from_logits(logits),
            "sum_pi_squared": lambda: torch.softmax(logits, dim=-1).square().sum(-1),
        }
        return tuple(compute[name]() for name in wanted)

    size = _chunk_rows(head, states)
    pieces = list(zip(states.split(size), labels.split(size), strict=True))
    again = torch.is_grad_enabled() and len(pieces) > 1
    results = [checkpoint(chunk, *piece, use_reentrant=False) if again else chunk(*piece) for piece in pieces]
    return {name: torch.cat([result[place] for result in results]) for place, name in enumerate(wanted)}


def _chunk_rows(head: Head, states: Tensor) -> int:
    """How many positions' logits are held at one time, so that they take at most `chunk_bytes`."""
    width = states.shape[-1] if head.linear is None else head.linear.weight.shape[0]
    return chunk_rows(states.device.type, width)


def _of_pairs(model: Any, batch: DataProto, budget: int, packed: bool) -> list[Tensor]:
    """Cut preference pairs into micro-batches, the longest first; returns the row numbers of each."""
    lengths = batch["attention_mask"].sum(-1).view(-1, 2)
    order = torch.argsort(lengths.amax(-1), descending=True, stable=True)
    sizes = [
        ([pair], 2 * max(two), sum(two) if packed else None)
        for pair, two in zip(order.tolist(), lengths[order].tolist(), strict=True)
    ]
    return [(2 * pairs[:, None] + torch.arange(2)).flatten() for pairs in grouped(sizes, budget)]


Pass = tuple[torch.Tensor | None, DataProto, int]
"""Row numbers (None: an empty pass, made for other ranks' sake), the rows on the CPU, and their T."""


def passes(model: Any, batch: DataProto, budget: int, packed: bool) -> Iterator[tuple[torch.Tensor, DataProto, int]]:
    """Yield the micro-batches of a batch as (row numbers, trimmed rows, their T); both rows of a preference pair are in
    one. Raises `Interrupted` between two where the work was asked to stop."""
    with (work := present()).rows(len(batch)) as passed:
        for indices in (_of_pairs if MARGIN in batch else micro_batches)(model, batch, budget, packed):
            runtime.check()
            yield indices, *trimmed(rows := batch.select_idxs(indices))
            passed(len(indices))
            work.add_tokens(int(rows["attention_mask"].sum()))


class Assembled:
    """Columns [rows, width] of a batch that are filled micro-batch by micro-batch on the device, and copied to the CPU
    once."""

    def __init__(self, rows: int, width: int) -> None:
        self._shape = (rows, width)
        self._held: dict[str, Tensor] = {}

    def put(self, parts: Mapping[str, Tensor], indices: Tensor, t: int) -> None:
        """Write parts [b, t, …] to the rows `indices`, by column name; places that are never written stay 0."""
        for name, part in parts.items():
            if name not in self._held:
                self._held[name] = part.new_zeros((*self._shape, *part.shape[2:]))
            self._held[name][sent(indices, part.device), :t] = part

    def read(self) -> dict[str, Tensor]:
        """Return the columns by name, copied to the CPU."""
        return {name: one.cpu() for name, one in self._held.items()}


@torch.no_grad()
def collect(
    cut: Iterable[Pass],
    outputs_of: Callable[[DataProto], Mapping[str, torch.Tensor]],
    batch: DataProto,
    want: Sequence[str],
) -> dict[str, torch.Tensor]:
    """Compute the outputs named in `want` over all passes without gradients: `outputs_of(rows)` returns [b, T] of a
    micro-batch, the result is [B, T] on the CPU."""
    columns = Assembled(*batch["response_mask"].shape)
    for indices, rows, t in cut:
        parts = outputs_of(rows)
        if indices is not None:
            columns.put({name: parts[name] for name in want}, indices, t)
    return {name: torch.zeros(batch["response_mask"].shape) for name in want} | columns.read()


def divergence(
    way: RowLayout, head: Head, states: Sequence[Tensor], theirs: Callable[[Tensor], Tensor], temperature: float
) -> dict[str, Tensor]:
    """Compute KL(first‖second) of two models' next-token distributions at each response token: `kl` [b, T] float32 in
    nats, 0 elsewhere.

    `states` are the hidden states of both models in the same layout; `head` turns the first one's into logits, `theirs`
    the second one's.
    """
    values, size = [states[0].new_zeros(0)], _chunk_rows(head, states[0])
    for mine, other in zip(*(one.split(size) for one in states), strict=True):
        logits = head.logits(mine) / temperature
        values.append(full_kl(logits, theirs(other).to(logits.device) / temperature))
    return {"kl": way.spread(torch.cat(values))}
