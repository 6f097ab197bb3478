"""The decode loop: a wave of requests, a prompt prefilled once, every row drawn from its own seed.

It is our own loop over the model's cache rather than `generate`, because a row's tokens must depend on
its seed and its prompt alone, never on which rows happen to share its wave.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from workbench.engines.protocol import Request, Sample, SamplingSettings

_SHRINK = 0.75  # finished rows leave the cache when fewer than this share are still going


@dataclass
class _Row:
    """One request while it is being answered."""

    request: Request
    uniforms: torch.Tensor
    ids: list[int]
    log_probs: list[float]
    reason: str = ""

    def sample(self, version: int) -> Sample:
        """What it has become."""
        return Sample(tuple(self.ids), tuple(self.log_probs), self.reason, version)


@torch.inference_mode()
def decode_wave(
    model: Any,
    tokenizer: Any,
    requests: Sequence[Request],
    eos_ids: frozenset[int],
    version: int,
    check: Callable[[], None],
    finished: Callable[[int, Sample], None] = lambda row, sample: None,
) -> list[Sample]:
    """Answer all requests, in order. `check` is called between decode steps and may raise to stop; `finished` is told of
    each row as it ends, so that its reward need not wait for the others."""
    rows = [_Row(request, _uniforms(request), [], []) for request in requests]
    cache, logits, mask, positions = _prefill(model, rows)
    going = list(range(len(rows)))
    while going:
        check()
        tokens = _draw([rows[index] for index in going], logits)
        for index, token in zip(going, tokens, strict=True):
            _finish(rows[index], token, eos_ids, tokenizer)
            if rows[index].reason:
                finished(index, rows[index].sample(version))
        keep = [place for place, index in enumerate(going) if not rows[index].reason]
        if not keep:
            break
        # a finished row may ride along for a while: moving the cache costs more than its tokens
        if len(keep) <= _SHRINK * len(going):
            where = torch.tensor(keep, device=mask.device)
            cache.batch_select_indices(where)
            mask, positions = mask[where], positions[where]
            tokens = [tokens[place] for place in keep]
            going = [going[place] for place in keep]
        mask = torch.cat([mask, mask.new_ones(len(going), 1)], dim=1)
        positions = positions + 1
        logits = model(
            input_ids=torch.tensor(tokens, device=mask.device)[:, None],
            attention_mask=mask,
            position_ids=positions[:, None],
            past_key_values=cache,
            use_cache=True,
        ).logits[:, -1]
    return [row.sample(version) for row in rows]


def _uniforms(request: Request) -> torch.Tensor:
    generator = torch.Generator().manual_seed(request.seed)
    return torch.rand(request.settings.max_tokens, generator=generator, dtype=torch.float64)


def _prefill(model: Any, rows: Sequence[_Row]) -> tuple[Any, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Each different prompt once; cache, logits, mask and last positions are then repeated to the rows."""
    from transformers import DynamicCache

    unique = list(dict.fromkeys(row.request.ids for row in rows))
    width = max(len(ids) for ids in unique)
    device = model.device
    ids = torch.zeros(len(unique), width, dtype=torch.long)
    mask = torch.zeros(len(unique), width, dtype=torch.long)
    for place, prompt in enumerate(unique):
        ids[place, width - len(prompt) :] = torch.tensor(prompt)
        mask[place, width - len(prompt) :] = 1
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    cache = DynamicCache(config=model.config)
    logits = model(
        input_ids=ids.to(device),
        attention_mask=mask.to(device),
        position_ids=positions.to(device),
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
    ).logits[:, -1]
    places = {prompt: place for place, prompt in enumerate(unique)}
    where = torch.tensor([places[row.request.ids] for row in rows], device=device)
    if len(rows) > len(unique) or len(rows) > 1:
        cache.batch_select_indices(where)
    return cache, logits[where], mask.to(device)[where], positions[:, -1].to(device)[where]


def _draw(rows: Sequence[_Row], logits: torch.Tensor) -> list[int]:
    """One token a row, and its log-prob under logits / temperature (before top-k and top-p)."""
    settings = rows[0].request.settings
    if all(row.request.settings == settings for row in rows):
        tokens, log_probs = _choose(rows, logits.float().cpu(), settings)
    else:
        pairs = [
            _choose([row], logits[place : place + 1].float().cpu(), row.request.settings)
            for place, row in enumerate(rows)
        ]
        tokens, log_probs = [pair[0][0] for pair in pairs], [pair[1][0] for pair in pairs]
    for row, token, log_prob in zip(rows, tokens, log_probs, strict=True):
        if not row.reason:
            row.ids.append(token)
            row.log_probs.append(log_prob)
    return tokens


def _choose(rows: Sequence[_Row], logits: torch.Tensor, settings: SamplingSettings) -> tuple[list[int], list[float]]:
    greedy = settings.temperature == 0
    log_probs = torch.log_softmax(logits if greedy else logits / settings.temperature, dim=-1)
    if greedy:
        tokens = log_probs.argmax(-1)
    else:
        # the draw of a row's n-th token is the n-th number of its own generator
        drawn = torch.stack([row.uniforms[min(len(row.ids), len(row.uniforms) - 1)] for row in rows])
        tokens = inverse_cdf(allowed(log_probs, settings), drawn)
    picked = log_probs.gather(-1, tokens[:, None]).squeeze(-1)
    return tokens.tolist(), picked.tolist()


def allowed(log_probs: torch.Tensor, settings: SamplingSettings) -> torch.Tensor:
    """[b, V] probabilities, float64, not renormalised, 0 where top-k or top-p rules a token out."""
    probabilities = log_probs.double().exp()
    if settings.top_k > 0 and settings.top_k < probabilities.shape[-1]:
        smallest = probabilities.topk(settings.top_k, dim=-1).values[:, -1:]
        probabilities = probabilities.masked_fill(probabilities < smallest, 0)
    if settings.top_p < 1:
        ordered, order = (probabilities / probabilities.sum(-1, keepdim=True)).sort(dim=-1, descending=True)
        beyond = ordered.cumsum(-1) - ordered >= settings.top_p
        probabilities = probabilities.masked_fill(torch.zeros_like(beyond).scatter(-1, order, beyond), 0)
    return probabilities


def inverse_cdf(probabilities: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """[b] tokens: the first whose cumulative probability exceeds uniform × total."""
    cumulative = probabilities.cumsum(-1)
    targets = uniforms[:, None] * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, targets, right=True).squeeze(-1)
    # rounding may point past the last possible token
    last = probabilities.shape[-1] - 1 - (probabilities.flip(-1) > 0).int().argmax(-1)
    return torch.minimum(tokens, last)


def _finish(row: _Row, token: int, eos_ids: frozenset[int], tokenizer: Any) -> None:
    """Say why the row ends, if it does."""
    if row.reason:
        return
    settings = row.request.settings
    if (token in eos_ids and not settings.ignore_eos) or (settings.stop and _stops(row.ids, settings.stop, tokenizer)):
        row.reason = "stop"
    elif len(row.ids) >= settings.max_tokens:
        row.reason = "length"


def _stops(ids: list[int], stop: tuple[str, ...], tokenizer: Any) -> bool:
    """Whether the newest token completed a stop text; only the tail is decoded."""
    tail = tokenizer.decode(ids[-(max(len(text) for text in stop) + 8) :], skip_special_tokens=False)
    shorter = tokenizer.decode(ids[-(max(len(text) for text in stop) + 8) : -1], skip_special_tokens=False)
    return any(text in tail and text not in shorter for text in stop)
