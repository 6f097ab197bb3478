"""Choosing tokens: inverse-CDF draws on the logits' own device, with temperature, top-k and top-p.

The cumulative distribution has two levels, blocks of about √V tokens and the tokens of one block, so that a draw reads the
logits a few times in float32 and only 2√V numbers a row in float64. Tokens are those of a whole CDF in float64 but where a draw
lies within 1e-5 of an edge between two tokens.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from workbench.engines.protocol import SamplingSettings

_CHUNK, _DEVICE_CHUNK = 2**21, 2**26
"""Logits that are worked on at a time: what is made of them stays in a CPU's cache; a GPU takes many, as top-p waits for it once
for each time."""
_BINS = 2**11
"""What the leading 13 bits of floats from 0 to 1 can be."""


def draw(logits: Tensor, uniforms: Tensor, settings: SamplingSettings) -> tuple[Tensor, Tensor]:
    """One token a row, [n], and its log-prob under logits / temperature before top-k and top-p, [n] float32.

    `logits` [n, V] of any float type, `uniforms` [n] float64 in [0, 1). At temperature 0 it is the likeliest token, and the
    log-prob at temperature 1.
    """
    rows = max(1, (_CHUNK if logits.is_cpu else _DEVICE_CHUNK) // logits.shape[-1])
    parts = [
        _draw(some.float(), uniform, settings)
        for some, uniform in zip(logits.split(rows), uniforms.split(rows), strict=True)
    ]
    tokens, log_probs = (torch.cat(each) if len(parts) > 1 else each[0] for each in zip(*parts, strict=True))
    return tokens, log_probs


def _draw(logits: Tensor, uniforms: Tensor, settings: SamplingSettings) -> tuple[Tensor, Tensor]:
    temperature = settings.temperature or 1.0
    largest = logits.amax(-1, keepdim=True)
    weights = _weights(logits, largest, temperature)
    blocks = weights.sum(-1)
    total = blocks.sum(-1, dtype=torch.float64)
    if settings.temperature == 0:
        tokens = logits.argmax(-1)
    else:
        if settings.top_k > 0 or settings.top_p < 1:
            keep_allowed(weights.flatten(1), settings)
            blocks = weights.sum(-1)
        tokens = inverse_cdf(weights, blocks, uniforms)
    chosen = (logits.gather(-1, tokens[:, None]) - largest).squeeze(-1).double() / temperature
    return tokens, (chosen - total.log()).float()


def _weights(logits: Tensor, largest: Tensor, temperature: float) -> Tensor:
    """exp((logits - largest) / temperature) in blocks: [n, blocks, size], zeros after the last token."""
    count, vocabulary = logits.shape
    size = 2 ** math.ceil(math.log2(vocabulary) / 2)
    weights = logits.new_empty(count, -(-vocabulary // size), size)
    flat = weights.view(count, -1)
    flat[:, vocabulary:] = 0
    tokens = flat[:, :vocabulary]
    torch.sub(logits, largest, out=tokens)
    if temperature != 1:
        tokens.div_(temperature)
    tokens.exp_()
    return weights


def inverse_cdf(weights: Tensor, blocks: Tensor, uniforms: Tensor) -> Tensor:
    """Sample one token per row, [n]: the first whose cumulative weight exceeds uniform × total.

    `weights` [n, blocks, size], their sums `blocks` [n, blocks].
    """
    edges = blocks.cumsum(-1, dtype=torch.float64)
    target = uniforms[:, None] * edges[:, -1:]
    block = _first_beyond(edges, target)
    target = target - (edges.gather(-1, block) - blocks.gather(-1, block))
    inside = weights.gather(1, block[:, :, None].expand(-1, -1, weights.shape[-1])).squeeze(1)
    token = _first_beyond(inside.cumsum(-1, dtype=torch.float64), target)
    return (block * weights.shape[-1] + token).squeeze(-1)


def _first_beyond(edges: Tensor, target: Tensor) -> Tensor:
    """[n, 1] place of the first of the rising `edges` [n, k] beyond `target`; where rounding left none, the last that rises."""
    return torch.minimum(torch.searchsorted(edges, target, right=True), edges.argmax(-1, keepdim=True))


def keep_allowed(weights: Tensor, settings: SamplingSettings) -> None:
    """Set the weights [n, V], at most 1, of tokens that top-k or top-p rule out to 0, in place.

    Top-k keeps what is as likely as the k-th token. Top-p then keeps, from the likeliest down and among equals from the first
    on, tokens until their share of the rest reaches p.
    """
    if 0 < settings.top_k < weights.shape[-1]:
        least = weights.topk(settings.top_k, dim=-1).values[:, -1:]
        weights.masked_fill_(weights < least, 0)
    if settings.top_p < 1:
        _keep_nucleus(weights, settings.top_p)


def _keep_nucleus(weights: Tensor, top_p: float) -> None:
    """Top-p without sorting all tokens: a histogram over the leading bits finds those that lie at the cut, and they are sorted."""
    bins = (weights.view(torch.int32) >> 19).long()  # floats that are not negative are in the order of their bits
    histogram = weights.new_zeros(len(weights), _BINS, dtype=torch.float64).scatter_add_(1, bins, weights.double())
    reached = histogram.flip(-1).cumsum(-1)
    target = reached[:, -1:] * top_p
    cut = _BINS - 1 - torch.minimum(torch.searchsorted(reached, target), reached.argmax(-1, keepdim=True))
    inside = histogram.gather(-1, cut)
    room = target - (reached.gather(-1, _BINS - 1 - cut) - inside)
    row, token = (bins == cut).nonzero(as_tuple=True)
    value = weights[row, token].double()
    order = value.argsort(descending=True, stable=True)
    order = order[row[order].argsort(stable=True)]
    row, token, value = row[order], token[order], value[order]
    before = value.cumsum(0) - value - (inside.cumsum(0) - inside)[row, 0]
    out = before >= room[row, 0]
    weights.mul_(bins >= cut)
    weights[row, token] = weights[row, token].masked_fill(out, 0)
