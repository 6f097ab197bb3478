"""Forward passes over given tokens, in micro-batches by token budget; logits of response positions alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from workbench.base import runtime
from workbench.base.errors import EngineError
from workbench.dataproto.columns import declared
from workbench.dataproto.core import DataProto
from workbench.functional.kl import full_kl
from workbench.functional.logprobs import entropy_from_logits, log_probs_from_logits

CHUNK_ELEMENTS = 1 << 26
"""Logits that exist at one time, in elements: 256 MiB in float32."""


def chunk_rows(model: Any) -> int:
    """Number of positions whose logits are computed at one time, to limit memory."""
    return max(CHUNK_ELEMENTS // model.config.vocab_size, 1)


def packs(model: Any, settings: Any) -> bool:
    """Whether rows are packed without padding: by the setting `pack`; with `auto` where the model uses flash attention."""
    flash = "flash" in str(getattr(model.config, "_attn_implementation", ""))
    return settings.pack == "yes" or (settings.pack == "auto" and flash)


def halves(settings: Any, device: str) -> bool:
    """Whether forward passes run in bfloat16: as the setting `dtype` says; with `auto` on a GPU only."""
    return settings.dtype == "bfloat16" or (settings.dtype == "auto" and device == "cuda")


def micro_batches(batch: DataProto, budget: int, packed: bool) -> list[torch.Tensor]:
    """Cut a batch into micro-batches of at most `budget` tokens, at least one row each; returns each one's row numbers.

    Rows are sorted by length. A padded micro-batch counts rows × longest row, a packed one the sum of its rows. Sorting is
    stable, so the same batch is always cut the same way.
    """
    lengths = batch["attention_mask"].sum(-1)
    order = torch.argsort(lengths, descending=True, stable=True).tolist()
    groups: list[list[int]] = []
    cost = 0
    for row in order:
        length = max(int(lengths[row]), 1)
        extra = length if packed else max(int(lengths[groups[-1][0]]), 1) if groups else length
        if groups and cost + extra <= budget:
            groups[-1].append(row)
            cost += extra
        else:
            groups.append([row])
            cost = length
    return [torch.tensor(sorted(group)) for group in groups]


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
    return DataProto(cut, None, rows.meta_info), new_t


def check_ids(model: Any, batch: DataProto) -> None:
    """Raises `EngineError`, naming id and row, where a token id of a batch is not in the model's vocabulary."""
    ids, size = batch["input_ids"], model.get_input_embeddings().num_embeddings
    wrong = ((ids < 0) | (ids >= size)) & batch["attention_mask"].bool()
    if wrong.any():
        row, place = wrong.nonzero()[0].tolist()
        what, expected = f"token id {int(ids[row, place])} in row {row}", f"ids 0 to {size - 1}, the model's vocabulary"
        raise EngineError(what, expected=expected, do="tokenise the batch with this model's tokenizer")


def response_hidden(model: Any, rows: DataProto, packed: bool) -> torch.Tensor:
    """Hidden states [N, H] that predict the N response tokens (`response_mask` 1), row by row."""
    mask, attention = rows["response_mask"].bool(), rows["attention_mask"].bool()
    before = slice(-mask.shape[1] - 1, -1)  # the state before a response token is the one of the token to its left
    if packed:
        given = {name: rows[name][attention][None] for name in ("input_ids", "position_ids")}
    else:
        given = {name: rows[name] for name in ("input_ids", "attention_mask", "position_ids")}
    hidden: torch.Tensor = model.base_model(**given, use_cache=False).last_hidden_state
    if not packed:
        return hidden[:, before][mask]
    inside = torch.zeros_like(attention)
    inside[:, before] = mask
    return hidden[0][inside[attention]]


def outputs(
    model: Any, head: torch.nn.Module | None, rows: DataProto, want: Sequence[str], temperature: float, packed: bool
) -> dict[str, torch.Tensor]:
    """Compute the outputs named in `want`, as in `compute_log_probs`: [b, T] float32 with gradient, 0 outside the mask."""
    mask = rows["response_mask"].bool()
    hidden = response_hidden(model, rows, packed)
    flat: dict[str, torch.Tensor] = {}
    if "values" in want:
        if head is None:
            raise EngineError("'values' of a policy", expected="a critic's value head", do="use engine.critic()")
        flat["values"] = head(hidden.float()).squeeze(-1)
    if {"log_probs", "entropy", "sum_pi_squared"} & set(want):
        labels = rows["input_ids"][:, -mask.shape[1] :][mask]
        flat |= _from_logits(model, hidden, labels, want, temperature)
    return {name: spread(values, mask) for name, values in flat.items()}


def spread(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Put values [N] back at the N positions where `mask` is 1: [b, T], 0 elsewhere."""
    return torch.zeros(mask.shape, dtype=torch.float32, device=values.device).masked_scatter(mask, values.float())


def _from_logits(
    model: Any, hidden: torch.Tensor, labels: torch.Tensor, want: Sequence[str], temperature: float
) -> dict[str, torch.Tensor]:
    """Log-probs and entropies in chunks; with gradients, a chunk's logits are recomputed in the backward pass."""
    lm_head = model.get_output_embeddings()
    softcap = getattr(model.config, "final_logit_softcapping", None)
    wanted = [name for name in ("log_probs", "entropy", "sum_pi_squared") if name in want]

    def chunk(states: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logits = lm_head(states).float()
        if softcap:
            logits = softcap * torch.tanh(logits / softcap)
        logits = logits / temperature
        made = {
            "log_probs": lambda: log_probs_from_logits(logits, targets),
            "entropy": lambda: entropy_from_logits(logits),
            "sum_pi_squared": lambda: torch.softmax(logits, dim=-1).square().sum(-1),
        }
        return tuple(made[name]() for name in wanted)

    size = chunk_rows(model)
    pieces = list(zip(hidden.split(size), labels.split(size), strict=True))
    again = torch.is_grad_enabled() and len(pieces) > 1
    results = [checkpoint(chunk, *piece, use_reentrant=False) if again else chunk(*piece) for piece in pieces]
    return {name: torch.cat([result[place] for result in results]) for place, name in enumerate(wanted)}


Pass = tuple[torch.Tensor | None, DataProto, int]
"""Row numbers (None: an empty pass, made for other ranks' sake), the rows on the model's device, and their T."""


def passes(model: Any, batch: DataProto, budget: int, packed: bool) -> Iterator[tuple[torch.Tensor, DataProto, int]]:
    """Yield micro-batches: (row numbers, trimmed rows on the model's device, their T). Interrupts raise `Interrupted`."""
    for indices in micro_batches(batch, budget, packed):
        runtime.check()
        rows, t = trimmed(batch.select_idxs(indices))
        yield indices, rows.to(model.device), t


@torch.no_grad()
def collect(
    cut: Iterable[Pass], found: Callable[[DataProto], Mapping[str, torch.Tensor]], batch: DataProto, want: Sequence[str]
) -> dict[str, torch.Tensor]:
    """Collect the outputs named in `want` over all passes: `found(rows)` gives [b, T], the result is [B, T] on the CPU."""
    result = {name: torch.zeros(batch["response_mask"].shape) for name in want}
    for indices, rows, t in cut:
        parts = found(rows)
        if indices is not None:
            for name in want:
                result[name][indices, :t] = parts[name].cpu()
    return result


def divergence(
    hidden: Sequence[torch.Tensor], heads: Sequence[Any], model: Any, rows: DataProto, temperature: float
) -> dict[str, torch.Tensor]:
    """`kl` [b, T] float32: KL(first‖second) of two models' next-token distributions at each response token, 0 elsewhere.

    `hidden` are the two models' states from `response_hidden`; `heads` map them to logits.
    """
    values, size = [hidden[0].new_zeros(0)], chunk_rows(model)
    for states in zip(*(one.split(size) for one in hidden), strict=True):
        mine, theirs = (head(state).float() / temperature for head, state in zip(heads, states, strict=True))
        values.append(full_kl(mine, theirs.to(mine.device)))
    return {"kl": spread(torch.cat(values), rows["response_mask"].bool())}
