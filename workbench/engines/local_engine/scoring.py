"""Forward passes over given tokens, in micro-batches by token budget; logits of response positions alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from workbench.base import runtime
from workbench.base.errors import EngineError
from workbench.dataproto.columns import EXPERTS, PIXELS, declared
from workbench.dataproto.core import DataProto, sent
from workbench.engines.local_engine import lora, tree
from workbench.engines.local_engine.forward import Head, head_of, linear_head, pictured_inputs, replay
from workbench.engines.local_engine.loading import check_length
from workbench.engines.local_engine.tree import Spread, places
from workbench.functional.kl import full_kl
from workbench.functional.logprobs import (
    CHUNK_BYTES,
    entropy_from_logits,
    linear_log_probs,
    log_probs_from_logits,
)


def flash(model: Any) -> bool:
    """Whether a model was loaded with flash attention, which packs rows side by side."""
    return "flash" in str(getattr(model.config, "_attn_implementation", ""))


def packs(model: Any, settings: Any, batch: DataProto | None = None) -> bool:
    """Whether rows go through the model without padding, by the setting `pack`: what they have in common goes through it once.
    Those of a batch with pictures never do.

    With `auto` where that is proven (`model.workbench_paths`, from the self-check; without one, where every attention asks
    transformers' interface) and nothing is dropped out. Raises `EngineError` where `yes` asks for it and it is not.
    """
    if settings.pack == "no" or (batch is not None and PIXELS in batch):
        return False
    why = why_padded(model, settings)
    if settings.pack == "yes" and why:
        what, do = f"pack='yes' for {type(model).__name__}", "leave pack at 'auto', or take 'no'"
        raise EngineError(what, expected="a model that gives the same numbers without padding", found=why, do=do)
    return not why


def why_padded(model: Any, settings: Any) -> str:
    """Why rows cannot be packed; empty where they can."""
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
    if proven or (proven is None and getattr(model, "_supports_attention_backend", False) and not other):
        return ""
    return "no proof of it" if not other else f"layers of {', '.join(sorted(other))}"


def micro_batches(model: Any, batch: DataProto, budget: int, packed: bool) -> list[Tensor]:
    """Cut a batch into micro-batches of at most `budget` tokens, at least one row each; returns each one's row numbers.

    Of packed rows those stay together that begin alike, and tokens that they share count once (`tree.cut`). Others are sorted
    by length; a padded micro-batch counts rows × longest row, one for flash attention the sum of its rows. Sorting is stable,
    so the same batch is always cut the same way. Rows with pictures and rows of text are apart: each is scored as it was sampled.
    """
    paths = getattr(model, "workbench_paths", None)
    if paths is not None and paths.own_head:  # logits of all tokens exist at one time
        budget = min(budget, max(CHUNK_BYTES // (4 * model.config.get_text_config().vocab_size), 1))
    if packed and not flash(model):
        return tree.cut(batch, budget)
    lengths = batch["attention_mask"].sum(-1)
    order = torch.argsort(lengths, descending=True, stable=True)
    pictured = torch.tensor([bool(cell) for cell in batch[PIXELS]] if PIXELS in batch else [False] * len(batch))
    groups = []
    for rows in (order[pictured[order]], order[~pictured[order]]):
        # a padded row is as long as the first of its group, the longest
        sizes = [
            (row, each, each if packed else None)
            for row, each in zip(rows.tolist(), lengths[rows].clamp(min=1).tolist(), strict=True)
        ]
        groups += tree.grouped(sizes, budget)
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
    """Raise `EngineError` where routing is to be replayed, and the rows do not say how they were routed."""
    if settings.routing_replay and EXPERTS not in rows:
        what, do = "learning with routing_replay", "sample with routing_replay, too, or open the learner without it"
        raise EngineError(what, expected=f"rows with the column {EXPERTS!r}", found="rows without it", do=do)


def check_ids(model: Any, batch: DataProto) -> None:
    """Raises `EngineError` for a token id that is not in the model's vocabulary, and for a row beyond its `rope_limit`."""
    check_length(model, int(batch["attention_mask"].sum(-1).max()) if len(batch) else 0)
    ids, size = batch["input_ids"], model.get_input_embeddings().num_embeddings
    wrong = ((ids < 0) | (ids >= size)) & batch["attention_mask"].bool()
    if wrong.any():
        row, place = wrong.nonzero()[0].tolist()
        what, expected = f"token id {int(ids[row, place])} in row {row}", f"ids 0 to {size - 1}, the model's vocabulary"
        raise EngineError(what, expected=expected, do="tokenise the batch with this model's tokenizer")


class Layout(Protocol):
    """How the rows of a micro-batch go through a model, and which of its states predict their N response tokens.

    It is planned on the CPU, where the rows are: nobody waits for a device. What the passes need is sent to the model's.
    """

    labels: Tensor
    """[M] ids to predict, on the device; M < N where rows have tokens in common."""

    @property
    def spread(self) -> Callable[[Tensor], Tensor]:
        """Puts values [M] at the rows' response tokens: [b, T]."""

    def states(self, model: Any, head: Head) -> Tensor:
        """Hidden states [M, H] (of `OWN`: logits) that predict `labels`."""


class Rows:
    """One row after the other: padded, or packed without padding for flash attention (which reads `position_ids`).

    Rows with pictures are padded, and go by the model's own forward.
    """

    def __init__(self, rows: DataProto, packed: bool, model: Any) -> None:
        mask, attention = rows["response_mask"].bool(), rows["attention_mask"].bool()
        t = mask.shape[1]
        inside = torch.zeros_like(attention)
        inside[:, -t - 1 : -1] = mask  # the state before a response token is the one of the token to its left
        # tokens first, padding behind them, where it comes into no state of a recurrent layer
        order = torch.argsort(~attention, dim=1, stable=True)
        names = ("input_ids", "attention_mask", "position_ids")
        given = {name: rows[name].gather(1, order) for name in names}
        inside = inside.gather(1, order)
        if packed:
            given = {name: rows[name][attention][None] for name in ("input_ids", "position_ids")}
            inside = inside[attention][None]
        if PIXELS in rows and any(rows[PIXELS]):
            own = torch.zeros_like(attention)
            own[:, -t:] = mask  # a tool's answer has pictures, too
            own = own.gather(1, order)
            given = pictured_inputs(model, given["input_ids"], given["attention_mask"], rows[PIXELS], own)
        self._experts: Tensor | None = None
        if EXPERTS in rows:
            chosen = torch.where(attention[..., None, None], rows[EXPERTS], -1)
            chosen = chosen[attention] if packed else chosen[torch.arange(len(order))[:, None], order].flatten(0, 1)
            self._experts = sent(chosen, model.device)
        self._given = {name: sent(one, model.device) for name, one in given.items()}
        self._before = sent(places(inside), model.device)
        self.labels = sent(rows["input_ids"][:, -t:][mask], model.device)
        self.spread = Spread(mask, model.device)

    def states(self, model: Any, head: Head) -> Tensor:
        """Hidden states [N, H] (of `OWN`: logits) that predict `labels`."""
        replay(model, self._experts)
        return head.states(model, **self._given).flatten(0, 1)[self._before]


def layout(model: Any, rows: DataProto, packed: bool) -> Layout:
    """How rows on the CPU go through a model: padded, or packed as a tree; with flash attention packed side by side.

    A tree of a model with a `workbench_share` (context parallelism) is this rank's share of it.
    """
    if not packed or flash(model):
        return Rows(rows, packed, model)
    whole = tree.Tree(rows, model.device)
    share: Callable[[tree.Tree], Layout] | None = getattr(model, "workbench_share", None)
    return whole if share is None else share(whole)


def outputs(
    model: Any,
    value_head: torch.nn.Module | None,
    rows: DataProto,
    want: Sequence[str],
    temperature: float,
    packed: bool,
    head: Head | None = None,
) -> dict[str, Tensor]:
    """Compute the outputs named in `want`, as in `compute_log_probs`: [b, T] float32 with gradient, 0 outside the mask; for the
    self-check also `logits` [b, T, V].

    `rows` are on the CPU, the outputs on the model's device. `head` makes the logits; without it the one that `head_of` finds.
    """
    way, head = layout(model, rows, packed), head or head_of(model)
    flat: dict[str, Tensor] = {}
    states = way.states(model, linear_head(model) if "values" in want else head)
    if "values" in want:
        if value_head is None:
            raise EngineError("'values' of a policy", expected="a critic's value head", do="use engine.critic()")
        with torch.autocast(states.device.type, enabled=False):  # values are as exact as the weights
            flat["values"] = value_head(states.float()).squeeze(-1)
    if set(_DISTRIBUTION) & set(want):
        if "values" in want and head.linear is None:
            states = way.states(model, head)
        flat |= _from_logits(head, states, way.labels, want, temperature)
    if "logits" in want:
        flat["logits"] = head.logits(states)
    return {name: way.spread(values) for name, values in flat.items()}


_DISTRIBUTION = ("log_probs", "entropy", "sum_pi_squared")


def _from_logits(
    head: Head, states: Tensor, labels: Tensor, want: Sequence[str], temperature: float
) -> dict[str, Tensor]:
    """Log-probs, entropies and Σ π² [M] of states [M, H]: one function of a plain linear layer, any other head in chunks."""
    wanted = [name for name in _DISTRIBUTION if name in want]
    linear = head.linear
    if type(linear) is not torch.nn.Linear or hasattr(linear.weight, "device_mesh"):  # an adapter, a shard
        return logits_in_chunks(head, states, labels, wanted, temperature)
    shape: dict[str, Any] = {"factor": head.factor, "softcap": head.softcap, "temperature": temperature}
    more = wanted != ["log_probs"]
    found = linear_log_probs(states, linear.weight, linear.bias, labels, **shape, distribution=more)
    return {name: one for name, one in zip(_DISTRIBUTION, found, strict=True) if name in wanted}


def logits_in_chunks(
    head: Head, states: Tensor, labels: Tensor, wanted: Sequence[str], temperature: float
) -> dict[str, Tensor]:
    """Log-probs, entropies and Σ π² [M] of states [M, H] by any head; a chunk's logits are made again in a backward pass."""

    def chunk(part: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
        logits = head.logits(part) / temperature
        made = {
            "log_probs": lambda: log_probs_from_logits(logits, targets),
            "entropy": lambda: entropy_from_logits(logits),
            "sum_pi_squared": lambda: torch.softmax(logits, dim=-1).square().sum(-1),
        }
        return tuple(made[name]() for name in wanted)

    size = _chunk_rows(head, states)
    pieces = list(zip(states.split(size), labels.split(size), strict=True))
    again = torch.is_grad_enabled() and len(pieces) > 1
    results = [checkpoint(chunk, *piece, use_reentrant=False) if again else chunk(*piece) for piece in pieces]
    return {name: torch.cat([result[place] for result in results]) for place, name in enumerate(wanted)}


def _chunk_rows(head: Head, states: Tensor) -> int:
    """Number of positions whose logits exist at one time."""
    width = states.shape[-1] if head.linear is None else head.linear.weight.shape[0]
    return max(CHUNK_BYTES // (4 * width), 1)


Pass = tuple[torch.Tensor | None, DataProto, int]
"""Row numbers (None: an empty pass, made for other ranks' sake), the rows on the CPU, and their T."""


def passes(model: Any, batch: DataProto, budget: int, packed: bool) -> Iterator[tuple[torch.Tensor, DataProto, int]]:
    """Yield micro-batches: (row numbers, trimmed rows, their T). Interrupts raise `Interrupted`."""
    for indices in micro_batches(model, batch, budget, packed):
        runtime.check()
        yield indices, *trimmed(batch.select_idxs(indices))


class Assembled:
    """Columns [rows, width] of a batch, put together of its micro-batches on their device, and read once."""

    def __init__(self, rows: int, width: int) -> None:
        self._shape = (rows, width)
        self._held: dict[str, Tensor] = {}

    def put(self, parts: Mapping[str, Tensor], indices: Tensor, t: int) -> None:
        """Put in parts [b, t, …] of the rows `indices`; what nobody puts in is 0."""
        for name, part in parts.items():
            if name not in self._held:
                self._held[name] = part.new_zeros((*self._shape, *part.shape[2:]))
            self._held[name][sent(indices, part.device), :t] = part

    def read(self) -> dict[str, Tensor]:
        """The columns, on the CPU."""
        return {name: one.cpu() for name, one in self._held.items()}


@torch.no_grad()
def collect(
    cut: Iterable[Pass], found: Callable[[DataProto], Mapping[str, torch.Tensor]], batch: DataProto, want: Sequence[str]
) -> dict[str, torch.Tensor]:
    """Collect the outputs named in `want` over all passes: `found(rows)` gives [b, T], the result is [B, T] on the CPU."""
    columns = Assembled(*batch["response_mask"].shape)
    for indices, rows, t in cut:
        parts = found(rows)
        if indices is not None:
            columns.put({name: parts[name] for name in want}, indices, t)
    return {name: torch.zeros(batch["response_mask"].shape) for name in want} | columns.read()


def divergence(
    way: Layout, head: Head, states: Sequence[Tensor], theirs: Callable[[Tensor], Tensor], temperature: float
) -> dict[str, Tensor]:
    """`kl` [b, T] float32: KL(first‖second) of two models' next-token distributions at each response token, 0 elsewhere.

    `states` are both models' in the same layout; `head` makes the first one's logits, `theirs` the second one's.
    """
    values, size = [states[0].new_zeros(0)], _chunk_rows(head, states[0])
    for mine, other in zip(*(one.split(size) for one in states), strict=True):
        logits = head.logits(mine) / temperature
        values.append(full_kl(logits, theirs(other).to(logits.device) / temperature))
    return {"kl": way.spread(torch.cat(values))}
