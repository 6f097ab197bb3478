"""Forward passes over given tokens: micro-batches by token budget, and only the response positions' logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager as ContextManager
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from workbench.columns import declared
from workbench.dataproto import DataProto
from workbench.errors import EngineError, message
from workbench.functional import entropy_from_logits, full_kl, log_probs_from_logits

CHUNK_ELEMENTS = 1 << 26
"""Logits that exist at one time, in elements: 256 MiB in float32."""


def micro_batches(batch: DataProto, budget: int, packed: bool) -> list[torch.Tensor]:
    """Row numbers of each micro-batch: sorted by length, cut by tokens, each at least one row.

    Padded micro-batches cost rows × longest, packed ones the sum. Sorting is stable, so the same batch
    is always cut the same way.
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
    """The rows without columns that are padding in all of them; also T after trimming.

    [B, S+T] columns lose both ends, [B, S] their left one, [B, T] their right one.
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
    """Raises `EngineError` naming row and id where a token id is not in the model's vocabulary."""
    ids, size = batch["input_ids"], model.get_input_embeddings().num_embeddings
    wrong = ((ids < 0) | (ids >= size)) & batch["attention_mask"].bool()
    if wrong.any():
        row, place = wrong.nonzero()[0].tolist()
        raise EngineError(
            message(
                f"token id {int(ids[row, place])} in row {row}",
                expected=f"0 to {size - 1}, the model's vocabulary",
                do="the batch was tokenised for another model",
            )
        )


def response_hidden(model: Any, rows: DataProto, packed: bool) -> torch.Tensor:
    """[N, H]: the hidden state that predicts each of the N response tokens (mask 1), row by row."""
    mask = rows["response_mask"].bool()
    t = mask.shape[1]
    attention = rows["attention_mask"].bool()
    if packed:
        inside = torch.zeros_like(attention)
        # the state before a response token is the one of the token to its left
        inside[:, -t - 1 : -1] = mask
        hidden = model.base_model(
            input_ids=rows["input_ids"][attention][None],
            position_ids=rows["position_ids"][attention][None],
            use_cache=False,
        ).last_hidden_state[0]
        return hidden[inside[attention]]
    hidden = model.base_model(
        input_ids=rows["input_ids"],
        attention_mask=rows["attention_mask"],
        position_ids=rows["position_ids"],
        use_cache=False,
    ).last_hidden_state
    return hidden[:, -t - 1 : -1][mask]


def outputs(
    model: Any, head: torch.nn.Module | None, rows: DataProto, want: Sequence[str], temperature: float, packed: bool
) -> dict[str, torch.Tensor]:
    """`log_probs`, `entropy`, `sum_pi_squared`, `values` as wanted, each [b, T] float32 with gradient, 0 outside the mask."""
    mask = rows["response_mask"].bool()
    hidden = response_hidden(model, rows, packed)
    flat: dict[str, torch.Tensor] = {}
    if "values" in want:
        if head is None:
            raise ValueError("this model has no value head; make a critic: engine.critic()")
        flat["values"] = head(hidden.float()).squeeze(-1)
    if {"log_probs", "entropy", "sum_pi_squared"} & set(want):
        flat |= _from_logits(model, hidden, _labels(rows)[mask], want, temperature)
    return {name: spread(values, mask) for name, values in flat.items()}


def _labels(rows: DataProto) -> torch.Tensor:
    return rows["input_ids"][:, -rows["response_mask"].shape[1] :]


def spread(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """[N] back to its places in [b, T]."""
    return torch.zeros(mask.shape, dtype=torch.float32, device=values.device).masked_scatter(mask, values.float())


def _from_logits(
    model: Any, hidden: torch.Tensor, labels: torch.Tensor, want: Sequence[str], temperature: float
) -> dict[str, torch.Tensor]:
    """Log-probs and entropies in chunks; with gradients, a chunk's logits are made again on the way back."""
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

    size = max(CHUNK_ELEMENTS // model.config.vocab_size, 1)
    pieces = list(zip(hidden.split(size), labels.split(size), strict=True))
    again = torch.is_grad_enabled() and len(pieces) > 1
    results = [checkpoint(chunk, *piece, use_reentrant=False) if again else chunk(*piece) for piece in pieces]
    if not results:
        return {name: hidden.new_zeros(0) for name in wanted}
    return {name: torch.cat([result[place] for result in results]) for place, name in enumerate(wanted)}


@torch.no_grad()
def score(
    model: Any,
    head: torch.nn.Module | None,
    batch: DataProto,
    want: Sequence[str],
    temperature: float,
    *,
    budget: int,
    packed: bool,
) -> dict[str, torch.Tensor]:
    """`outputs` over a whole batch, [B, T] on the CPU, without gradients."""
    shape = batch["response_mask"].shape
    result = {name: torch.zeros(shape) for name in want}
    for indices in micro_batches(batch, budget, packed):
        rows, t = trimmed(batch.select_idxs(indices))
        rows = rows.to(model.device)
        for name, values in outputs(model, head, rows, want, temperature, packed).items():
            result[name][indices, :t] = values.cpu()
    return result


@torch.no_grad()
def full_divergence(
    model: Any,
    other: Callable[[], ContextManager[Any]],
    batch: DataProto,
    temperature: float,
    *,
    budget: int,
    packed: bool,
) -> torch.Tensor:
    """[B, T] float32 on the CPU: KL(model‖other) of the whole next-token distribution at each response token, 0 outside the
    mask. `other()` is a context that gives the other model (with LoRA the same one, switched off).
    """
    result = torch.zeros(batch["response_mask"].shape)
    for indices in micro_batches(batch, budget, packed):
        rows, t = trimmed(batch.select_idxs(indices))
        rows = rows.to(model.device)
        mask = rows["response_mask"].bool()
        mine = response_hidden(model, rows, packed)
        head = model.get_output_embeddings()
        size = max(CHUNK_ELEMENTS // model.config.vocab_size, 1)
        with other() as reference:
            theirs = response_hidden(reference, rows.to(reference.device), packed).to(mine.device)
            their_head = reference.get_output_embeddings()
            pieces = [
                full_kl(head(a) / temperature, their_head(b.to(reference.device)).to(a.device) / temperature)
                for a, b in zip(mine.split(size), theirs.split(size), strict=True)
            ]
        values = torch.cat(pieces) if pieces else mine.new_zeros(0)
        result[indices, :t] = spread(values, mask).cpu()
    return result
