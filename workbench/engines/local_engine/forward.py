"""What a model's forward pass is given, and gives: attention by a plan, replayed experts, pictures, logits.

Models call their attention through transformers' `AttentionInterface`, so that one function here serves every
architecture that does. A plan says which tokens attend to which, in place of a mask: it travels as the pass's
attention mask, a tensor of four dimensions, which models hand on untouched. That a model really does so is not
assumed: see `selfcheck`.

Routing replay: sampler and trainer round differently, so that for some tokens a mixture's routers choose other
experts, and the log-probs are far apart. The column `routed_experts` holds what the sampler chose, which is used
again when a row is scored and learned; weights are of the scorer's own router. Ma et al. 2025, R3,
https://arxiv.org/abs/2510.11370.

Rows with pictures go through the model padded. A picture's token in a response, which no picture belongs to, is read
as `STAND_IN`, in sampling as in scoring: the model would look for its picture.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from workbench.base.distribution import version_of
from workbench.base.errors import EngineError
from workbench.engines.torch_internals import flash_backward, flash_forward, has_flash
from workbench.engines.transformers_internals import attention_of, has_attention, set_attention

NAME, UNCAPPED = "workbench", "workbench_uncapped"


# --- attention ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class LayerCall:
    """One call of a model layer's attention: queries, keys and values of the new tokens, and the layer's settings."""

    index: int
    """Number of the layer (`layer_idx`)."""
    query: Tensor
    """[b, H, q, D], rotated."""
    key: Tensor
    """[b, K, q, D] of the same tokens; K heads, each shared by H / K of the query's."""
    value: Tensor
    """[b, K, q, D'] of the same tokens."""
    scaling: float
    """What the products of queries and keys are multiplied by."""
    window: int | None = None
    """A token sees this many tokens up to itself; None: all."""
    softcap: float | None = None
    """Scores become cap·tanh(score / cap)."""
    sinks: Tensor | None = None
    """[H]: a score that takes its share of each softmax and adds nothing (gpt-oss)."""

    @property
    def plain(self) -> bool:
        """Whether the attention is a plain softmax, without soft-cap or sinks, so that torch's own kernels can compute
        it."""
        return self.softcap is None and self.sinks is None

    def attend(self, query: Tensor, key: Tensor, value: Tensor, seen: Tensor | None, *, causal: bool = False) -> Tensor:
        """Compute attention [b, H, q, D'] of queries [b, H, q, D] over keys and values [b, K, k, ·], with this layer's
        settings.

        `seen` [b, 1, q, k] is true where a query sees a key; for a `plain` layer it may also be the numbers to add to
        the scores. With None each query sees all keys, or with `causal` (plain layers only) those up to its own index.
        """
        groups = query.shape[1] // key.shape[1]
        grouped = self.plain and query.device.type == "cpu"  # torch's kernel there reads shared heads where they are
        if groups > 1 and not grouped:
            key, value = (one.repeat_interleave(groups, 1) for one in (key, value))
        if self.plain:
            return functional.scaled_dot_product_attention(
                query, key, value, seen, is_causal=causal, scale=self.scaling, enable_gqa=groups > 1 and grouped
            )
        scores = query @ key.transpose(-1, -2) * self.scaling
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        if seen is not None:
            scores = scores.masked_fill(~seen, torch.finfo(scores.dtype).min)
        if self.sinks is not None:
            sink = self.sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
            return (
                torch.softmax(torch.cat([scores, sink], -1), -1, dtype=torch.float32)[..., :-1].to(value.dtype) @ value
            )
        return torch.softmax(scores, -1, dtype=torch.float32).to(value.dtype) @ value


class AttentionPlan(Protocol):
    """Protocol of an object that computes a forward pass's attention in place of the model's own code; it is called
    once for each layer."""

    def attend(self, layer: LayerCall) -> Tensor:
        """Compute the layer's attention [b, H, q, D']; `layer` holds queries, keys and values of the new tokens [b, ·,
        q, ·]."""


@contextmanager
def planned(model: Any, plan: AttentionPlan) -> Iterator[Tensor]:
    """Context manager: yields an `attention_mask` to call the model with, so that `plan` computes its attention.

    Raises `EngineError` where the model asks for a kind of attention that a plan does not support.
    """
    with switched(model):
        mask: Any = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=model.device)  # mixed precision casts floating ones
        mask.plan = plan
        yield mask


@contextmanager
def switched(model: Any) -> Iterator[None]:
    """Context manager: inside it, the model's attention calls go to the plan that comes with the attention mask.

    Gradient checkpointing computes attention again in the backward pass, which therefore belongs inside, too.
    """
    interface = sys.modules["transformers.modeling_utils"].AttentionInterface
    interface.register(NAME, _attention)
    interface.register(UNCAPPED, _uncapped)
    configs = {id(one): one for one in (getattr(part, "config", None) for part in model.modules()) if one is not None}
    before = {key: attention_of(config) for key, config in configs.items() if has_attention(config)}
    try:
        for key, name in before.items():
            set_attention(configs[key], UNCAPPED if name in ("sdpa", UNCAPPED) else NAME)
        yield
    finally:
        for key, name in before.items():
            set_attention(configs[key], name)


_IGNORED = {"is_causal", "position_ids", "use_cache", "output_attentions", "cu_seq_lens_q", "cu_seq_lens_k"}


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **further: Any,
) -> tuple[Tensor, None]:
    """The attention function that transformers calls: it hands `query`, `key` and `value` [b, heads, q, D] to the plan
    in the mask, and returns [b, q, heads, D']."""
    plan: AttentionPlan | None = getattr(attention_mask, "plan", None)
    unknown = {name for name, one in further.items() if one is not None} - _IGNORED
    if plan is None or dropout or "position_bias" in unknown:
        what = f"attention of {type(module).__name__}"
        found = "another mask" if plan is None else f"dropout {dropout}" if dropout else ", ".join(sorted(unknown))
        raise EngineError(what, expected="the mask that workbench passed, no dropout and no bias", found=found)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer = LayerCall(module.layer_idx, query, key, value, scale, sliding_window, softcap, s_aux)
    return plan.attend(layer).transpose(1, 2).contiguous(), None


def _uncapped(*given: Any, softcap: float | None = None, **named: Any) -> tuple[Tensor, None]:
    """The attention function in place of transformers' `sdpa`: it drops `softcap`, as `sdpa` does, so that the numbers
    equal the model's own."""
    return _attention(*given, **named)


# --- attention in parts -------------------------------------------------------------------------


@dataclass(frozen=True)
class SegmentBlock:
    """One attention call of n segments of packed tokens, each over its own tokens or over its rows' tokens so far."""

    queries: Tensor
    """[n, q]: numbers of the segments' tokens."""
    padding: Tensor
    """[n, q]: which of them are padding behind the others."""
    behind: Tensor
    """[·, q]: positions of the queries in their rows, or in their segments where `keys` is None."""
    keys: Tensor | None = None
    """[n, k]: numbers of the tokens that a segment's last token sees; None: `queries`."""
    before: Tensor | None = None
    """[n, k]: positions of `keys`, far behind for padding."""
    mask: Tensor | None = None
    """[n, 1, q, k]: what is added to the scores: -inf where `before` is larger than `behind`, otherwise 0."""


@dataclass(frozen=True)
class Parts:
    """N packed tokens that attend in parts, whose softmaxes are joined by their log-sum-exps.

    No mask is needed, and no copy of keys is kept: memory grows linearly with N. Dao et al. 2022, FlashAttention,
    https://arxiv.org/abs/2205.14135; joined as by Liu et al. 2023, Ring Attention, https://arxiv.org/abs/2310.01889.
    """

    blocks: Sequence[SegmentBlock]
    """Each token is among the queries of one block."""
    back: Tensor
    """[N]: the place of each token among those of all `blocks`, flattened."""
    above: Sequence[tuple[slice, slice]]
    """(keys, queries): consecutive tokens, and consecutive tokens behind them that all see all of the first."""
    depths: Tensor
    """[N]: position of each token in its row, for windows."""
    longest: int
    """Tokens of the longest row."""

    def attend(self, layer: LayerCall) -> Tensor:
        """The layer's attention [1, H, N, D'] of the packed tokens."""
        states = [layer.query[0], layer.key[0], layer.value[0]]
        kind = layer.query.device.type
        if torch.is_autocast_enabled(kind):
            states = [state.to(torch.get_autocast_dtype(kind)) for state in states]
        if layer.window is not None and layer.window >= self.longest:
            layer = replace(layer, window=None)
        return cast(Tensor, _Joined.apply(*states, layer.sinks, self, layer))[None]


class _Joined(torch.autograd.Function):
    """Compute attention [H, N, D'] of queries [H, N, D] over keys and values [K, N, ·] by `Parts`; only these and the result are kept.

    A part's gradient needs the scores' softmax over all parts, and so its own tokens and the joined log-sum-exp alone.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Any, parts: Parts, layer: LayerCall
    ) -> Tensor:
        layer = replace(layer, query=query, key=key, value=value)
        pieces = []
        for block in parts.blocks:
            attended = _part(layer, *_states(layer, block), block.behind, block.before, block.mask)
            pieces.append([piece.transpose(1, 2).flatten(0, 1) for piece in attended])
        out, total = (torch.cat(each)[parts.back].transpose(0, 1) for each in zip(*pieces, strict=True))
        out = out.to(total.dtype)
        for keys, queries in parts.above:
            q, k, v = (state[None, :, there] for state, there in ((query, queries), (key, keys), (value, keys)))
            more, (further,) = _part(layer, q, k, v, parts.depths[None, queries], parts.depths[None, keys])
            share = torch.sigmoid(further - total[:, queries])[..., None]
            out[:, queries].lerp_(more[0].to(out.dtype), share)
            total[:, queries] = torch.logaddexp(total[:, queries], further)
        if sinks is not None:
            both = torch.logaddexp(total, sinks.to(total.dtype)[:, None])
            out, total = out * (total - both).exp()[..., None], both
        out = out.to(value.dtype)
        ctx.save_for_backward(query, key, value, sinks, out, total)
        ctx.settings = (parts, layer.scaling, layer.window, layer.softcap)
        return out

    @staticmethod
    def backward(ctx: Any, *slopes: Any) -> Any:
        query, key, value, sinks, out, total = ctx.saved_tensors
        parts, *settings = ctx.settings
        slope = slopes[0].to(out.dtype)
        layer = LayerCall(0, query, key, value, *settings)
        slopes = tuple(torch.zeros_like(state.transpose(0, 1)) for state in (query, key, value))
        for block in parts.blocks:
            whole = [_taken(state, block.queries) for state in (out, slope, total)]
            whole[-1] = whole[-1].masked_fill(block.padding[:, None], torch.inf)  # no share of any key
            seen = block.queries if block.keys is None else block.keys
            gradients = _part_backward(layer, *_states(layer, block), whole, block.behind, block.before, block.mask)
            for summed, places, gradient in zip(slopes, (block.queries, seen, seen), gradients, strict=True):
                summed.index_add_(0, places.flatten(), gradient.transpose(1, 2).flatten(0, 1))
        for keys, queries in parts.above:
            places = (queries, keys, keys)
            q, k, v = (state[None, :, there] for state, there in zip((query, key, value), places, strict=True))
            whole = [state[None, :, queries] for state in (out, slope, total)]
            depths = (parts.depths[None, queries], parts.depths[None, keys])
            gradients = _part_backward(layer, q, k, v, whole, *depths)
            for summed, there, gradient in zip(slopes, places, gradients, strict=True):
                summed[there] += gradient[0].transpose(0, 1)
        sunk = None
        if sinks is not None:
            shares = (sinks.to(total.dtype)[:, None] - total).exp()
            sunk = -(shares * (out * slope).sum(-1)).sum(-1).to(sinks.dtype)
        return (*(summed.transpose(0, 1) for summed in slopes), sunk, None, None)


def _states(layer: LayerCall, block: SegmentBlock) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [n, H, q, D], keys and values [n, K, k, ·] of a block, of a layer's states [heads, N, ·]."""
    keys = block.queries if block.keys is None else block.keys
    return _taken(layer.query, block.queries), _taken(layer.key, keys), _taken(layer.value, keys)


def _taken(states: Tensor, tokens: Tensor) -> Tensor:
    """[n, heads, L, …] of states [heads, N, …] at numbers [n, L]."""
    return states.transpose(0, 1)[tokens].transpose(1, 2)


_CHUNK = 512
"""Queries whose scores exist at one time where no flash kernel computes them."""


def _kernel(layer: LayerCall, query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether a flash kernel of torch computes a part of a layer with states [b, heads, ·, D]."""
    plain = layer.softcap is None and layer.window is None and query.shape[-1] == value.shape[-1]
    return plain and has_flash(query, key, value)


def _part(
    layer: LayerCall,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    behind: Tensor,
    before: Tensor | None,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute (attention [b, H, q, D'], log-sum-exp of its scores [b, H, q]) of queries at depths `behind` [·, q] over keys
    at `before` [·, k]: a query sees the keys up to its depth, which `mask` says too where these are not all. With None
    the keys are the queries' tokens."""
    if _kernel(layer, query, key, value):
        return flash_forward(query, key, value, mask, before is None, layer.scaling)
    pieces = []
    for _, seen, scores, _ in _by_hand(layer, query, key, behind, before, mask):
        total = torch.logsumexp(scores, -1, keepdim=True).clamp(min=torch.finfo(scores.dtype).min)
        shares = (scores - total).exp().to(value.dtype)
        pieces.append([(shares.flatten(2, 3) @ value[:, :, seen]).unflatten(2, shares.shape[2:4]), total])
    out, total = (torch.cat(each, 3).flatten(1, 2) for each in zip(*pieces, strict=True))
    return out, total[..., 0]


def _part_backward(
    layer: LayerCall,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    whole: Sequence[Tensor],
    behind: Tensor,
    before: Tensor | None,
    mask: Tensor | None = None,
) -> Sequence[Tensor]:
    """Compute the gradients of a part's queries, keys and values; `whole` has the attention over all parts, its gradient,
    and the log-sum-exp over all parts."""
    out, slope, total = whole
    if _kernel(layer, query, key, value):
        return flash_backward(slope, query, key, value, out, total, mask, before is None, layer.scaling)
    slopes = [torch.zeros_like(state) for state in (query, key, value)]
    heads = (key.shape[1], -1)
    even = (out * slope).sum(-1, keepdim=True).to(total.dtype)
    for rows, seen, scores, bent in _by_hand(layer, query, key, behind, before, mask):
        ours, theirs, more = (state[:, :, rows].unflatten(1, heads) for state in (query, slope, even))
        shares = (scores - total[:, :, rows].unflatten(1, heads)[..., None]).exp()
        steep = (theirs.flatten(2, 3) @ value[:, :, seen].transpose(-1, -2)).unflatten(2, shares.shape[2:4])
        steep = (shares * (steep - more) * bent * layer.scaling).to(query.dtype).flatten(2, 3)
        slopes[0][:, :, rows] = (steep @ key[:, :, seen]).unflatten(2, shares.shape[2:4]).flatten(1, 2)
        slopes[1][:, :, seen] += steep.transpose(-1, -2) @ ours.flatten(2, 3)
        slopes[2][:, :, seen] += shares.to(value.dtype).flatten(2, 3).transpose(-1, -2) @ theirs.flatten(2, 3)
    return slopes


def _by_hand(
    layer: LayerCall, query: Tensor, key: Tensor, behind: Tensor, before: Tensor | None, mask: Tensor | None
) -> Iterator[tuple[slice, slice, Tensor, Tensor | float]]:
    """Yield chunks of queries: (queries, keys, float32 scores [b, K, H / K, q, k], how steeply the soft-cap rises there)."""
    window, depths = layer.window, behind if before is None else before
    for start in range(0, behind.shape[1], _CHUNK):
        rows, seen = slice(start, start + _CHUNK), slice(0, depths.shape[1])
        if before is None:
            seen = slice(max(start - window + 1, 0) if window else 0, min(start + _CHUNK, depths.shape[1]))
        ours = query[:, :, rows].unflatten(1, (key.shape[1], -1))
        scores = ours.flatten(2, 3) @ key[:, :, seen].transpose(-1, -2) * layer.scaling
        scores = scores.unflatten(2, ours.shape[2:4]).to(torch.promote_types(scores.dtype, torch.float32))
        bent: Tensor | float = 1.0
        if layer.softcap is not None:
            scores = torch.tanh(scores / layer.softcap)
            scores, bent = layer.softcap * scores, 1 - scores.square()
        if before is None or mask is not None or window is not None:  # else all keys are seen
            far = behind[:, rows, None] - depths[:, None, seen]
            hidden = far < 0 if window is None else (far < 0) | (far >= window)
            scores = scores.masked_fill(hidden[:, None, None], -torch.inf)
        yield rows, seen, scores, bent


# --- logits -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Head:
    """A model's output head: logits = cap(factor · (W·h + b)), where cap(z) = softcap·tanh(z / softcap)."""

    linear: Any
    """The model's output embeddings: a linear layer [V, H], with a bias or without. None: states are the model's own logits
    (`states`), right for any model, and slower."""
    factor: float = 1.0
    """What the layer's output is multiplied by (Granite, Cohere, Falcon-H1)."""
    softcap: float | None = None
    """Largest absolute logit (Gemma 2); None: no limit."""

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, V] float32 logits of hidden states [N, H], as the model's own forward gives them."""
        if self.linear is None:
            return hidden.float()
        return self.shaped(self.linear(hidden))

    def shaped(self, outputs: Tensor) -> Tensor:
        """Turn the linear layer's outputs [N, V] into float32 logits."""
        logits: Tensor = outputs.float() if self.factor == 1 else outputs.float() * self.factor
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)

    def states(self, model: Any, **inputs: Tensor) -> Tensor:
        """Run a forward pass without a cache and return the last hidden states [b, s, H]; for `OWN`, which has no
        layer, the logits [b, s, V]."""
        if self.linear is None:
            return model(**inputs, use_cache=False).logits
        return model.base_model(**inputs, use_cache=False).last_hidden_state


OWN = Head(None)
"""The model's own way from tokens to logits."""

_FACTORS: dict[str, Callable[[float], float]] = {
    "logits_scaling": lambda value: 1 / value,
    "logit_scale": float,
    "lm_head_multiplier": float,
    "output_multiplier": float,
}
"""Names in model configurations → the factor that they mean."""
_CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
"""Names in model configurations for the largest absolute logit."""
_FACTORS_OF = {"hyperclovax": {"logits_scaling": float}}
"""Model types in which a name means something else."""


def hidden_size(model: Any) -> int:
    """Size H of the states that the model's output layer reads (OPT may project them to other than its `hidden_size`)."""
    linear = model.get_output_embeddings()
    return int(model.config.get_text_config().hidden_size if linear is None else linear.in_features)


def head_of(model: Any) -> Head:
    """Choose the head of a transformers causal model: `linear_head`, or `OWN` where the self-check found that only the
    model's own forward is right."""
    paths = getattr(model, "workbench_paths", None)
    return OWN if paths is not None and paths.own_head else linear_head(model)


def linear_head(model: Any) -> Head:
    """Read the output head of a transformers causal model from its text configuration; for a sequence classifier its
    layer `score`."""
    config = model.config.get_text_config()
    factor = 1.0
    for name, meaning in (_FACTORS | _FACTORS_OF.get(config.model_type, {})).items():
        if getattr(config, name, None) is not None:
            factor *= meaning(getattr(config, name))
    caps = [getattr(config, name) for name in _CAPS if getattr(config, name, None) is not None]
    linear = model.get_output_embeddings()
    return Head(getattr(model, "score", None) if linear is None else linear, factor, caps[0] if caps else None)


# --- routing ------------------------------------------------------------------------------------


def experts_of(model: Any) -> dict[str, Any]:
    """Return a mixture model's expert layers by name: the modules that carry transformers' common experts interface."""
    return {name: one for name, one in model.named_modules() if {"has_gate", "is_transposed"} <= vars(one).keys()}


class Routing:
    """Records and replays the experts that a mixture model's routers choose; with the setting `routing_replay` it is
    `model.workbench_routing`."""

    def __init__(self, model: Any) -> None:
        layers = experts_of(model)
        if not layers:
            expected = "layers of experts in transformers' common form (Mixtral, Qwen3-MoE, DeepSeek, gpt-oss …)"
            what = f"routing_replay with {type(model).__name__}"
            do = "pip install -U transformers: newer ones have more such models"
            raise EngineError(
                what, expected=expected, found=f"none in transformers {version_of('transformers')}", do=do
            )
        self.chosen: Tensor | None = None
        """[N, L, k] experts of the tokens of the next passes, -1: the router's own choice; None: of all."""
        self.recording = False
        self._layers = model.config.get_text_config().num_hidden_layers
        self._seen: dict[int, Tensor] = {}
        for name, experts in layers.items():
            layer = next(int(part) for part in name.split(".") if part.isdecimal())
            block = model.get_submodule(name.rpartition(".")[0])
            block.forward = partial(self._route, layer, experts.num_experts, type(block).forward, block)

    def seen(self) -> Tensor:
        """The experts [N, L, k] that were chosen in the last recorded pass, int16 on the CPU; -1 in layers without
        experts."""
        none = torch.full_like(next(iter(self._seen.values())), -1)
        return torch.stack([self._seen.get(layer, none) for layer in range(self._layers)], 1).to("cpu", torch.int16)

    def _route(self, layer: int, count: int, forward: Any, block: Any, *arguments: Any, **named: Any) -> Any:
        """Run the forward of one layer's block of router and experts, and record the router's choice or replace it by
        the one to replay."""
        if self.chosen is None and not self.recording:
            return forward(block, *arguments, **named)
        with _Choice(count, None if self.chosen is None else self.chosen[:, layer].long()) as choice:
            result = forward(block, *arguments, **named)
        if choice.made is None:
            what = f"routing_replay with {type(block).__name__}"
            raise EngineError(what, expected=f"a router that chooses by topk of {count} scores", found="another router")
        self._seen[layer] = choice.made
        return result


class _Choice(TorchFunctionMode):
    """Intercepts the `topk` call in which a router chooses experts, and where a choice [n, k] is given replaces the
    result by it, except where it is -1."""

    def __init__(self, experts: int, chosen: Tensor | None) -> None:
        super().__init__()
        self._experts, self._chosen = experts, chosen
        self.made: Tensor | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in (torch.topk, torch.Tensor.topk) or args[0].dim() != 2 or args[0].shape[-1] != self._experts:
            return result
        if self._chosen is not None and result.indices.shape == self._chosen.shape:
            index = torch.where(self._chosen < 0, result.indices, self._chosen)
            result = type(result)((args[0].gather(-1, index), index))
        elif self._chosen is not None:
            return result
        self.made = result.indices
        return result


def replay(model: Any, chosen: Tensor | None) -> None:
    """Set the experts `chosen` [N, L, k] that a model's next forward and backward pass use; without effect on a model
    whose routing is not replayed."""
    routing: Routing | None = getattr(model, "workbench_routing", None)
    if routing is not None:
        routing.chosen = chosen


@contextmanager
def recorded(model: Any) -> Iterator[Routing | None]:
    """Context manager: records which experts the routers choose inside; yields the model's `Routing`, or None where it
    has none."""
    routing: Routing | None = getattr(model, "workbench_routing", None)
    if routing is None:
        yield None
        return
    routing.chosen, routing.recording = None, True
    try:
        yield routing
    finally:
        routing.recording = False


# --- pictures -----------------------------------------------------------------------------------

STAND_IN = 0
_TYPES = ("mm_token_type_ids", "token_type_ids")
"""Names of the input that marks a picture's tokens by 1."""


def pictured_inputs(
    model: Any, ids: Tensor, mask: Tensor, cells: Sequence[Mapping[str, Tensor]], responses: Tensor | None = None
) -> dict[str, Tensor]:
    """Build the arguments of a forward pass of rows [b, s] with pictures.

    `cells` are the picture inputs of each row; `responses` [b, s] is true at response tokens, whose picture ids are
    replaced by `STAND_IN`.
    """
    names = dict.fromkeys(name for cell in cells for name in cell)
    pixels = {name: torch.cat([cell[name] for cell in cells if name in cell]).to(ids.device) for name in names}
    seen = ids == model.config.image_token_id
    if responses is not None:
        ids, seen = ids.masked_fill(seen & responses, STAND_IN), seen & ~responses
    taken = [inspect.signature(type(one).forward).parameters for one in (model, model.base_model)]
    types = {name: seen.long() for name in _TYPES if all(name in one for one in taken)}
    positions = _positions(model, ids, mask, seen, pixels)
    return {"input_ids": ids, "attention_mask": mask, "position_ids": positions, **types, **pixels}


def _positions(model: Any, ids: Tensor, mask: Tensor, seen: Tensor, pixels: Mapping[str, Tensor]) -> Tensor:
    """Compute positions [b, s], or [3, b, s] for models that place a picture's patches in time, height and width
    (Qwen)."""
    index = getattr(model.base_model, "get_rope_index", None)
    if index is None or not pixels:
        return (mask.cumsum(-1) - 1).clamp(min=0)
    told = {"input_ids": ids, "attention_mask": mask, "mm_token_type_ids": seen.int(), **pixels}
    taken = inspect.signature(index).parameters
    positions: Tensor = index(**{name: one for name, one in told.items() if name in taken})[0]
    return positions
