"""Log-probs and entropy from logits, in float32 and nats."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


def log_probs_from_logits(logits: Tensor, labels: Tensor) -> Tensor:
    """Log-probs of given tokens, log softmax(logits)[label]: logits [..., V] and labels [...] → [...] float32, in nats.

    Written as logit − logsumexp so that no second [..., V] tensor is kept.
    """
    logits = logits.float()
    picked = logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    return picked - torch.logsumexp(logits, dim=-1)


def entropy_from_logits(logits: Tensor) -> Tensor:
    """Entropy H = −Σ p·log p of p = softmax(logits): [..., V] → [...] float32, in nats, ≥ 0 up to rounding.

    A logit of −inf (a token of probability 0) adds 0 and gets no gradient. Only the logits are kept for the backward pass,
    ∂H/∂zᵢ = −pᵢ·(log pᵢ + H); second derivatives are not supported.
    """
    return _Entropy.apply(logits)


class _Entropy(torch.autograd.Function):
    """Entropy as an autograd function that keeps only the logits. Plain autograd keeps three [..., V] tensors, and
    gives NaN for a logit of −inf.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        log_p = _log_p(logits)
        entropy = -(log_p.exp() * log_p).sum(-1)
        ctx.save_for_backward(logits, entropy)
        return entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        logits, entropy = ctx.saved_tensors
        log_p = _log_p(logits)
        slope = log_p.exp().mul_(log_p.add_(entropy.unsqueeze(-1))).mul_(-gradient.unsqueeze(-1))
        return slope.to(logits.dtype)


def _log_p(logits: Tensor) -> Tensor:
    """Compute log softmax in float32, with the smallest float in place of −inf, so that 0·log 0 is 0."""
    log_p = torch.log_softmax(logits, dim=-1, dtype=torch.float32)
    return log_p.clamp_(min=torch.finfo(torch.float32).min)


def linear_log_probs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    *,
    factor: float = 1.0,
    softcap: float | None = None,
    temperature: float = 1.0,
    distribution: bool = False,
    product: Product | None = None,
    chunk_bytes: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs of labels [N] under softmax(z/temperature), z = cap(factor·(W·h + b)), from hidden [N, H] and weight [V, H].

    Returns three [N], float32 (float64 of float64), in nats: log-probs, and with `distribution` the entropy and Σ π², else
    empty ones. cap(z) = softcap·tanh(z/softcap). Logits exist for a chunk of `chunk_bytes` at a time only (None: `CHUNK_BYTES`), and
    again in the backward pass; what autocast says about matrix products holds. `product` multiplies left [n, K] and right [m, K] to
    left·rightᵀ, in place of torch. Second derivatives are not supported.
    """
    size = chunk_bytes or CHUNK_BYTES
    shape = _Shape(factor, softcap, temperature, _dtype(hidden, weight), distribution, product, size)
    return _LinearLogProbs.apply(hidden, weight, bias, labels, shape)


def linear_function(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    function: Callable[[Tensor, slice], Tensor],
    *,
    factor: float = 1.0,
    softcap: float | None = None,
    temperature: float = 1.0,
    product: Product | None = None,
    chunk_bytes: int | None = None,
) -> Tensor:
    """Compute a function of the logits of `linear_log_probs` for N positions: [N, …], chunk by chunk in both directions.

    `function` is called with the logits [n, V] of a slice of the positions, which the next call overwrites, and returns [n, …];
    it is called again in the backward pass, with gradients on, under the autocast of the first call.
    """
    shape = _Shape(factor, softcap, temperature, _dtype(hidden, weight), False, product, chunk_bytes or CHUNK_BYTES)
    values: Tensor = _LinearFunction.apply(hidden, weight, bias, function, shape)
    return values


def _dtype(hidden: Tensor, weight: Tensor) -> torch.dtype:
    """Return the type of a layer's products."""
    device = hidden.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype


Product = Callable[[Tensor, Tensor], Tensor]
CHUNK_BYTES = 1 << 26
"""Bytes of the logits that exist at one time."""
_ROWS = 4_096
"""Words whose gradient is added at one time: a product of that size stays in the cache until it is added."""


@dataclass(frozen=True)
class _Shape:
    """How logits follow from a linear layer's output (factor, cap, temperature), and which results are wanted of them."""

    factor: float
    softcap: float | None
    temperature: float
    dtype: torch.dtype
    """Of the matrix products."""
    distribution: bool
    product: Product | None
    chunk_bytes: int

    def prepared(self, weight: Tensor, bias: Tensor | None) -> tuple[int, tuple[Tensor, Tensor | None]]:
        """Return the number of rows of a chunk, and the layer's parameters in `dtype`. A bias of −inf becomes finite,
        so that it gives no NaN.
        """
        size = max(self.chunk_bytes // (weight.shape[0] * 4), 1)
        return size, (weight.to(self.dtype), None if bias is None else bias.to(self.dtype).clamp(min=-1e30))

    def logits(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
        """Write a chunk's logits, divided by the temperature, into `out` [n, V], and return `out`."""
        if self.product is not None and bias is None:
            out.copy_(self.product(hidden.to(self.dtype), weight))
        elif out.dtype != self.dtype:
            out.copy_(nn.functional.linear(hidden.to(self.dtype), weight, bias))
        elif bias is None:
            torch.mm(hidden.to(self.dtype), weight.T, out=out)
        else:
            torch.addmm(bias, hidden.to(self.dtype), weight.T, out=out)
        if self.softcap is not None:
            return out.mul_(self.factor / self.softcap).tanh_().mul_(self.softcap / self.temperature)
        scale = self.factor / self.temperature
        return out if scale == 1 else out.mul_(scale)

    def slope(
        self, logits: Tensor, sums: Sequence[Tensor], wanted: Sequence[Tensor | None], out: Sequence[Tensor]
    ) -> None:
        """Write the gradient at the logits, without the part at the labels, into `out[0]` [n, V], which may be `logits`;
        `out[1]` is needed and overwritten where entropy or Σ π² have a gradient.

        `sums` are logsumexp, entropy and Σ π²; `wanted` the gradients of log-probs, entropy and Σ π², each [n] or None.
        """
        norm, entropy, squares = (one[:, None] for one in sums)
        picked, spread, peaked = (None if one is None else -one[:, None] for one in wanted)
        if spread is None and peaked is None:
            torch.sub(logits, norm, out=out[0]).exp_().mul_(0.0 if picked is None else picked)
            return
        # ∂H/∂zᵢ = −pᵢ·(log pᵢ + H), ∂Σπ²/∂zᵢ = 2·pᵢ·(pᵢ − Σπ²)
        inner = out[1].zero_() if spread is None else torch.sub(logits, norm - entropy, out=out[1]).mul_(spread)
        probs = torch.sub(logits, norm, out=out[0]).exp_()
        if picked is not None:
            inner.add_(picked)
        if peaked is not None:
            inner.addcmul_(probs - squares, peaked, value=-2)
        probs.mul_(inner)

    def back(self, slope: Tensor, logits: Tensor) -> None:
        """Turn the gradient at the logits into that at the linear layer's output, in place."""
        if self.softcap is not None:
            slope.addcmul_(slope * logits, logits, value=-((self.temperature / self.softcap) ** 2))
        if self.factor != self.temperature:
            slope.mul_(self.factor / self.temperature)


class _LinearLogProbs(torch.autograd.Function):
    """Autograd function of `linear_log_probs`, which works in chunks in both directions.

    Between them only [N] numbers are kept, and the last chunk's logits. The first backward pass begins with these and
    works in their memory; a second one computes them again.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, shape: _Shape
    ) -> tuple[Tensor, Tensor, Tensor]:
        pieces: list[tuple[Tensor, ...]] = []
        with torch.autocast(hidden.device.type, enabled=False):
            size, cast = shape.prepared(weight, bias)
            space = _space(hidden, weight, size, 2)
            # a smaller chunk is the first, so that the one that is kept is whole
            places = [slice(max(end - size, 0), end) for end in range(len(hidden), 0, -size)] or [slice(0, 0)]
            for place in reversed(places):
                logits, p = (buffer[: place.stop - place.start] for buffer in space)
                shape.logits(hidden[place], *cast, out=logits)
                most = logits.amax(-1, keepdim=True)
                total = torch.sub(logits, most, out=p).exp_().sum(-1)
                norm = most[:, 0] + total.log()
                entropy = squares = norm[:0]
                if shape.distribution:
                    entropy = norm - torch.einsum("nv,nv->n", p, logits) / total
                    squares = torch.einsum("nv,nv->n", p, p) / total.square()
                pieces.append((norm, logits.gather(-1, labels[place, None])[:, 0] - norm, entropy, squares))
        norm, *results = (torch.cat(column) for column in zip(*pieces, strict=True))
        ctx.shape, ctx.size, ctx.places, ctx.kept = shape, size, places, space[:1]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden, weight, bias, *cast, labels, norm, *results[1:])
        return results[0], results[1], results[2]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, *cast, labels, norm, entropy, squares = ctx.saved_tensors
        shape, sums = ctx.shape, (norm, entropy, squares)
        kept, ctx.kept = ctx.kept, []
        total = _Gradients((hidden, weight, bias), ctx.needs_input_grad, norm.dtype)
        more = (shape.softcap is not None) + any(one is not None for one in gradients[1:])
        with torch.autocast(hidden.device.type, enabled=False):
            space = kept + _space(hidden, weight, ctx.size, 1 - len(kept) + more)
            for place in ctx.places:
                states = hidden[place].to(shape.dtype)
                logits, *out = (buffer[: len(states)] for buffer in space)
                if not kept or place is not ctx.places[0]:
                    shape.logits(states, *cast, out=logits)
                # what a cap does to the gradient depends on the logits; else the gradient takes their place
                slope, *out = out if shape.softcap is not None else (logits, *out)
                wanted = [None if gradient is None else gradient[place] for gradient in gradients]
                shape.slope(logits, [saved[place] for saved in sums], wanted, (slope, *out))
                if wanted[0] is not None:
                    slope.scatter_add_(1, labels[place, None], wanted[0][:, None])
                shape.back(slope, logits)
                total.add(place, slope, states, cast[0], shape.product)
        return (*total.found(), None, None)


class _LinearFunction(torch.autograd.Function):
    """Autograd function of `linear_function`; between its passes it keeps nothing of a chunk."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, function: Any, shape: _Shape) -> Tensor:
        kind = hidden.device.type
        ctx.half = kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
        cast = shape.prepared(weight, bias)[1]
        # a function has several tensors of the logits' size, so these are half as many, and a row: blocks of up to 32 MiB come from
        # the C library's heap, where freed ones leave holes that the next chunk's do not fit into: the heap would grow by each chunk
        size = shape.chunk_bytes // (weight.shape[0] * 8) + 1
        (space,) = _space(hidden, weight, size, 1)
        ctx.places = [slice(at, at + size) for at in range(0, len(hidden), size)] or [slice(0, 0)]
        ctx.function, ctx.shape = function, shape
        ctx.save_for_backward(hidden, weight, bias, *cast)
        pieces = []
        for at in ctx.places:
            with torch.autocast(kind, enabled=False):
                logits = shape.logits(hidden[at], *cast, out=space[: len(hidden[at])])
            pieces.append(function(logits, at))
        return torch.cat(pieces)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, *cast = ctx.saved_tensors
        (space,) = _space(hidden, weight, ctx.places[0].stop, 1)
        total = _Gradients((hidden, weight, bias), ctx.needs_input_grad, space.dtype)
        for at in ctx.places:
            states = hidden[at].to(ctx.shape.dtype)
            with torch.autocast(ctx.half[0], enabled=False):
                logits = ctx.shape.logits(states, *cast, out=space[: len(states)])
            with torch.enable_grad(), torch.autocast(*ctx.half):
                read = logits.detach().requires_grad_()
                out = ctx.function(read, at)
            slope = torch.autograd.grad(out, read, gradient[at])[0].contiguous()
            with torch.autocast(ctx.half[0], enabled=False):
                ctx.shape.back(slope, logits)
                total.add(at, slope, states, cast[0], ctx.shape.product)
        return (*total.found(), None, None)


class _Gradients:
    """Sums the gradients of hidden states, weight and bias over all chunks, where they are needed; the sums are in
    `kind`.
    """

    def __init__(self, inputs: Sequence[Tensor | None], needed: Sequence[bool], kind: torch.dtype) -> None:
        self._inputs = inputs
        self._hidden, self._weight, self._bias = (
            torch.zeros_like(one, dtype=kind) if one is not None and wanted else None
            for one, wanted in zip(inputs, needed, strict=False)
        )

    def add(self, chunk: slice, slope: Tensor, states: Tensor, weight: Tensor, product: Product | None) -> None:
        """Add a chunk's part of the gradients, with products in the type of `states` and `weight`."""
        if self._bias is not None:
            self._bias += slope.sum(0)
        slope = slope.to(states.dtype)
        if self._hidden is not None:
            self._hidden[chunk] = (product or nn.functional.linear)(slope, weight.T)
        if self._weight is not None and self._weight.dtype == slope.dtype and product is None:
            self._weight.addmm_(slope.T, states)
        elif self._weight is not None:
            for rows, some in zip(self._weight.split(_ROWS), slope.T.split(_ROWS), strict=True):
                rows += (product or nn.functional.linear)(some, states.T)

    def found(self) -> list[Tensor | None]:
        """Return the three gradients, each in the type of its input."""
        sums = (self._hidden, self._weight, self._bias)
        return [
            None if one is None or given is None else one.to(given.dtype)
            for one, given in zip(sums, self._inputs, strict=True)
        ]


def _space(hidden: Tensor, weight: Tensor, size: int, count: int) -> list[Tensor]:
    """Allocate the memory [rows of a chunk, V] that all chunks use in turn, because fresh pages cost more than what is
    written to them.
    """
    kind = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    shape = (min(size, len(hidden)), weight.shape[0])
    return [torch.empty(shape, dtype=kind, device=hidden.device) for _ in range(count)]
