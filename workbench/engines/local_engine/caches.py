"""What a model remembers of rows that decode together. The fastest way that the self-check proves is used.

`SharedPrefix` keeps each distinct prompt's keys and values once, a row only its own. The queries of all rows of a
prompt, and of all heads that share its keys, are one matrix multiplication (cascade attention,
https://flashinfer.ai/2024/02/02/cascade-inference.html). A row's own keys and values stand in buffers that grow by
doubling. All rows write the same column; a row that enters later begins there.

`lean_step` is one decode step of Llama-shaped models (Llama, Mistral, Qwen 2 and 3) over their own weights, without
their modules' overhead. It reads the weights where they are, so updates need no care. Which models it may decode is a
list of transformers' modules whose code was read: parts of the same names may do something else with them, beyond a
length that no check comes to. `selfcheck` proves it once more.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from workbench.base import runtime
from workbench.base.errors import EngineError
from workbench.dataproto.core import sent
from workbench.engines.local_engine.forward import (
    STAND_IN,
    AttentionPlan,
    Head,
    LayerCall,
    Routing,
    linear_head,
    pictured_inputs,
    planned,
    recorded,
)
from workbench.engines.local_engine.memory import chunk_rows
from workbench.engines.local_engine.products import Linear
from workbench.engines.local_engine.sampling import Cache
from workbench.engines.protocol import Request

# --- lean ---------------------------------------------------------------------------------------

_MODEL = {"embed_tokens", "layers", "norm", "rotary_emb"}
_LINEAR = {f"self_attn.{name}_proj" for name in "qkvo"} | {f"mlp.{name}_proj" for name in ("gate", "up", "down")}
_NORMS, _PERHAPS = {"input_layernorm", "post_attention_layernorm"}, {"self_attn.q_norm", "self_attn.k_norm"}

_READ = {
    f"transformers.models.{one}.modeling_{one}"
    for one in ("llama", "mistral", "ministral", "qwen2", "qwen3", "seed_oss", "cwm")
}
"""Modules whose attention, and all else of a model, does what `_step` does."""
_PLAIN = ("torch.nn.modules.", "transformers.activations", "peft.tuners.lora.", Linear.__module__)

Step = Callable[[Tensor, Tensor, AttentionPlan], Tensor]
"""Takes tokens [n], positions [n] and a plan → [n, V] logits."""


def lean_step(model: Any) -> Step | None:
    """Return a function that computes one decode step of the model without its modules' overhead; None where the model
    is not one of the architectures that were read for this."""
    inner = getattr(model, "model", None)
    if inner is None or {name for name, _ in inner.named_children()} != _MODEL or not all(map(_fits, inner.layers)):
        return None
    classes = {type(part).__module__ for part in model.modules() if not type(part).__module__.startswith(_PLAIN)}
    if len(classes) != 1 or not classes <= _READ or any("forward" in vars(part) for part in model.modules()):
        return None
    return partial(_step, inner, linear_head(model))


def _fits(block: Any) -> bool:
    """Whether a decoder layer has exactly the expected parts, with all of its linear layers plain or with LoRA adapters (no
    quantization)."""
    linear = {name: one for name, one in block.named_modules() if name in _LINEAR}
    adapted = tuple(f"{name}." for name in linear)
    parts = {name: one for name, one in block.named_modules() if not any(True for _ in one.children())}
    norms = {name for name in parts.keys() - _LINEAR - {"mlp.act_fn"} if not name.startswith(adapted)}
    plain = all(type(getattr(one, "base_layer", one)) in (nn.Linear, Linear) for one in linear.values())
    fits = plain and linear.keys() == _LINEAR and norms - _PERHAPS == _NORMS
    return fits and all(_is_norm(parts[name]) for name in norms)


def _is_norm(module: Any) -> bool:
    return hasattr(module, "variance_epsilon") and [name for name, _ in module.named_parameters()] == ["weight"]


def _norm(module: Any, states: Tensor) -> Tensor:
    return functional.rms_norm(states.float(), module.weight.shape, module.weight, module.variance_epsilon)


def _cast(states: Tensor) -> Tensor:
    """States in the type to which autocast would cast them for each linear layer that reads them."""
    kind = states.device.type
    return states.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else states


def _rotated(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary position embeddings to queries or keys [n, heads, D]; `sin` has the sign of its first half changed."""
    return torch.addcmul(states * cos, states.roll(states.shape[-1] // 2, -1), sin)


def _step(inner: Any, head: Head, tokens: Tensor, positions: Tensor, plan: AttentionPlan) -> Tensor:
    states = inner.embed_tokens(tokens)
    cos, sin = (one.transpose(0, 1) for one in inner.rotary_emb(states[None], positions[None]))
    half = sin.shape[-1] // 2
    sin = torch.cat([-sin[..., :half], sin[..., half:]], -1)
    for block in inner.layers:
        attention, mlp = block.self_attn, block.mlp
        normed = _cast(_norm(block.input_layernorm, states))
        query, key, value = (
            projection(normed).view(len(tokens), -1, attention.head_dim)
            for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        if hasattr(attention, "q_norm"):
            query, key = _norm(attention.q_norm, query), _norm(attention.k_norm, key)
        query, key = _rotated(query, cos, sin), _rotated(key, cos, sin)
        window = getattr(
            attention if hasattr(attention, "sliding_window") else attention.config, "sliding_window", None
        )
        query, key, value = query[:, :, None], key[:, :, None], value[:, :, None]
        layer = LayerCall(attention.layer_idx, query, key, value, attention.scaling, window)
        states = states + attention.o_proj(plan.attend(layer).reshape(len(tokens), -1))
        normed = _cast(_norm(block.post_attention_layernorm, states))
        states = states + mlp.down_proj(mlp.act_fn(mlp.gate_proj(normed)) * mlp.up_proj(normed))
    return head.logits(_norm(inner.norm, states))


# --- shared prompts -----------------------------------------------------------------------------

_FIRST = 32  # columns of a new buffer
_DENSE = 0.75  # the prompts' keys are moved together when fewer than this share of them is in use


@dataclass
class _Held:
    """One layer's key and value buffers: of the prompts, and of the rows' own tokens."""

    prompts: list[Tensor]
    """[K, P, L, ·] of K heads and P prompts of at most L tokens."""
    own: list[Tensor]
    """[K, n, C, ·] of n rows."""


class SharedPrefix:
    """A `Cache` that holds each distinct prompt's keys and values once, shared by its rows; made by `cache_of`. It is
    also the attention plan of the model."""

    refills = True

    def __init__(self, model: Any, lean: Step | None, budget: int) -> None:
        self._model = model
        self._lean = lean
        self._budget = budget
        self.tag: Tensor | None = None
        """The attention mask by which the model finds this plan."""
        self._held: dict[int, _Held] = {}
        self._prompts: list[tuple[int, ...]] = []
        """The prompts that are kept, without their last token."""
        self._width = 0
        """Tokens that the buffers have room for in a prompt."""
        self._prefix: list[tuple[int, ...]] = []
        """The prompt of each seat."""
        self._start: list[int] = []
        """Column of each seat's first own token."""
        self._column = 0
        """Column of the next token."""
        self._columns = _FIRST
        self.routing: Routing | None = None
        """Where the routers of a mixture of experts are recorded."""
        self.experts: Tensor | None = None
        """[n, L, k] experts of the last step's tokens, where they are recorded."""
        self.prompt_experts: dict[tuple[int, ...], Tensor] = {}
        """[S - 1, L, k] experts of a prompt without its last token."""
        self._filling: Tensor | None = None
        """The prompts, by number, that the present forward pass fills in; None: it decodes."""

    # --- seats ----------------------------------------------------------------------------------

    def seat(self, order: Sequence[int], prompts: Mapping[int, tuple[int, ...]]) -> None:
        """Move rows to other seats (slots of the cache), and prefill the prompts of new rows that the cache lacks."""
        stay = [of for seat, of in enumerate(order) if seat not in prompts]
        if list(order) != list(range(len(self._start))):
            self._move(order, min((self._start[of] for of in stay), default=self._column))
        before, starts = self._prefix, self._start
        self._start = [self._column if seat in prompts else starts[of] for seat, of in enumerate(order)]
        self._prefix = [prompts[seat][:-1] if seat in prompts else before[of] for seat, of in enumerate(order)]
        new = self._admit(list(dict.fromkeys(self._prefix)))
        for some in _chunks(new, self._budget):
            self._prefill(some)
        self._lay_out()

    def _move(self, order: Sequence[int], first: int) -> None:
        """Copy the rows' own keys and values to their new seats, into buffers that begin with the old column `first`."""
        length = self._column - first
        self._columns = max(_FIRST, 2 * length)
        where = torch.tensor(order, device=self._model.device)
        same = list(order) == list(range(len(self._start)))
        for held in self._held.values():
            for part, old in enumerate(held.own):  # every column is written before it is read
                held.own[part] = old.new_empty(len(old), len(order), self._columns, old.shape[-1])
                if length:
                    old = old[:, :, first : self._column]
                    held.own[part][:, :, :length] = old if same else old[:, where]
        self._column = length
        self._start = [max(0, start - first) for start in self._start]

    def _admit(self, wanted: list[tuple[int, ...]]) -> dict[int, tuple[int, ...]]:
        """Make room for prompts, replacing unused ones; returns those that must be prefilled, by their numbers."""
        there = set(self._prompts)
        new = [prompt for prompt in wanted if prompt not in there]
        if not new and len(wanted) >= _DENSE * len(self._prompts):
            return {}
        wants = set(wanted)
        free = [number for number, prompt in enumerate(self._prompts) if prompt not in wants]
        if len(new) > len(free) or len(wanted) < _DENSE * len(self._prompts) or len(max(new, key=len)) > self._width:
            free = self._compact([number for number in range(len(self._prompts)) if number not in free], new)
        places = dict(zip(free, new, strict=False))
        for number, prompt in places.items():
            self._prompts[number] = prompt
        return places

    def _compact(self, keep: list[int], new: list[tuple[int, ...]]) -> list[int]:
        """Drop all prompts but the numbers in `keep` from the buffers, make room for `new` ones behind them, and return
        these ones' numbers."""
        width = self._width
        self._width = max(len(prompt) for prompt in [*(self._prompts[number] for number in keep), *new])
        where, fit = torch.tensor(keep, dtype=torch.long, device=self._model.device), min(width, self._width)
        for held in self._held.values():
            for part, old in enumerate(held.prompts):
                held.prompts[part] = old.new_zeros(len(old), len(keep) + len(new), self._width, old.shape[-1])
                held.prompts[part][:, : len(keep), :fit] = old[:, where, :fit]
        self._prompts = [self._prompts[number] for number in keep] + new
        return list(range(len(keep), len(self._prompts)))

    def _lay_out(self) -> None:
        """Compute what each decode step needs of the seating: the layout of queries by prompt, prompt lengths and first
        columns."""
        device, number = self._model.device, {prompt: place for place, prompt in enumerate(self._prompts)}
        self._layout = _layout([number[prefix] for prefix in self._prefix], len(number), device)
        self._lengths = torch.tensor([len(prefix) for prefix in self._prefix], device=device)
        self._starts = torch.tensor(self._start, device=device)
        self._longest = max(map(len, self._prefix))
        self._first = min(self._start)
        self._even = min(map(len, self._prefix)) == self._longest and max(self._start) == self._first

    # --- forward passes -------------------------------------------------------------------------

    def _prefill(self, prompts: Mapping[int, tuple[int, ...]]) -> None:
        """Run one forward pass over prompts, padded on the right, to fill their keys and values; no token attends to
        the padding."""
        device, width = self._model.device, max(map(len, prompts.values()))
        ids = torch.tensor([[*prompt, *[0] * (width - len(prompt))] for prompt in prompts.values()], device=device)
        self._filling = torch.tensor(list(prompts), device=device)
        try:
            self._forward(ids, torch.arange(width, device=device).expand(len(prompts), width))
        finally:
            self._filling = None
        if self.routing is not None:
            for prompt, one in zip(prompts.values(), self.routing.seen().unflatten(0, (-1, width)), strict=True):
                self.prompt_experts[prompt] = one[: len(prompt)]

    def step(self, tokens: Tensor) -> Tensor:
        """Decode one more token [n] for each seat; returns logits [n, V]."""
        if self._column == self._columns:
            self._move(range(len(self._start)), self._first)
            self._lay_out()
        self._masks: dict[int | None, Tensor | None] = {}
        positions = self._lengths + (self._column - self._starts)
        tokens = sent(tokens, positions.device)
        if self._lean is not None:
            logits = self._lean(tokens, positions, self)
        else:
            logits = self._forward(tokens[:, None], positions[:, None])[:, -1]
        self._column += 1
        self.experts = None if self.routing is None else self.routing.seen()
        return logits

    def _forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        given = {"attention_mask": self.tag, "position_ids": positions, "use_cache": False, "logits_to_keep": 1}
        logits: Tensor = self._model(input_ids=ids, **given).logits
        return logits

    # --- attention ------------------------------------------------------------------------------

    def attend(self, layer: LayerCall) -> Tensor:
        """Compute the layer's attention [b, H, q, D']: of whole prompts while they are prefilled, else of one new token
        in each seat. An interrupt stops it: the prompts of a wave may take seconds."""
        runtime.check()
        kind = layer.value.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else layer.value.dtype
        key, value = layer.key.to(dtype), layer.value.to(dtype)
        held = self._held.get(layer.index)
        if held is None:
            both, prompts, rows = (key, value), len(self._prompts), len(self._start)
            held = self._held[layer.index] = _Held(
                [part.new_zeros(part.shape[1], prompts, self._width, part.shape[-1]) for part in both],
                [part.new_empty(part.shape[1], rows, self._columns, part.shape[-1]) for part in both],
            )
        if self._filling is not None:
            for buffer, new in zip(held.prompts, (key, value), strict=True):
                buffer[:, self._filling, : new.shape[2]] = new.transpose(0, 1)
            return _causal(layer)
        for buffer, new in zip(held.own, (key, value), strict=True):
            buffer[:, :, self._column] = new.squeeze(2).transpose(0, 1)
        return self._cascade(layer, held, dtype)

    def _cascade(self, layer: LayerCall, held: _Held, dtype: torch.dtype) -> Tensor:
        """Compute one new token's attention for each row, as one softmax over its shared prompt and its own tokens."""
        count, heads, _, width = layer.query.shape
        groups, long = len(held.own[0]), self._longest
        per = heads // groups
        query = (layer.query.view(count, groups, per, width).transpose(0, 1) * layer.scaling).to(dtype).contiguous()
        own_key, own_value = (one.flatten(0, 1)[:, self._first : self._column + 1] for one in held.own)
        scores = _scores(query.view(-1, per, width), own_key).view(groups, count, per, -1)
        if long:
            prompt_key, prompt_value = (self._copied(part).flatten(0, 1)[:, :long] for part in held.prompts)
            found = _scores(self._by_prompt(query), prompt_key)
            scores = torch.cat([self._by_seat(found, groups, per), scores], -1)
        shares = self._softmax(layer, scores).to(dtype)
        mixed = torch.bmm(shares.view(-1, per, shares.shape[-1])[..., long:], own_value).view(groups, count, per, -1)
        if long:
            mixed += self._by_seat(torch.bmm(self._by_prompt(shares[..., :long]), prompt_value), groups, per)
        return mixed.transpose(0, 1).reshape(count, heads, 1, -1)

    def _copied(self, one: Tensor) -> Tensor:
        return one if self._layout.copies is None else one[:, self._layout.copies]

    def _by_prompt(self, rows: Tensor) -> Tensor:
        """Regroup rows by prompt for one matrix product a prompt: [K, n, G, ·] → [K·P, rows of a prompt · G, ·]."""
        if self._layout.moves is not None:
            rows = rows[:, self._layout.moves[0]]
        return rows.reshape(len(rows) * self._layout.groups, -1, rows.shape[-1])

    def _by_seat(self, rows: Tensor, groups: int, per: int) -> Tensor:
        """Undo `_by_prompt`: [K·P, rows of a prompt · G, ·] → [K, n, G, ·]."""
        rows = rows.view(groups, -1, per, rows.shape[-1])
        return rows if self._layout.moves is None else rows[:, self._layout.moves[1]]

    def _softmax(self, layer: LayerCall, scores: Tensor) -> Tensor:
        """Softmax of scores [K, n, G, prompt + own tokens] in float32, with the layer's soft-cap, window and sinks
        applied."""
        if layer.softcap is not None:
            scores = layer.softcap * torch.tanh(scores / layer.softcap)
        hidden = self._hidden(layer.window)
        if hidden is not None:
            scores = scores.masked_fill(hidden, float("-inf"))
        if layer.sinks is None:
            return torch.softmax(scores, -1, dtype=torch.float32)
        sink = layer.sinks.to(scores.dtype).view(len(scores), 1, -1, 1).expand(*scores.shape[:3], 1)
        return torch.softmax(torch.cat([scores, sink], -1), -1, dtype=torch.float32)[..., :-1].contiguous()

    def _hidden(self, window: int | None) -> Tensor | None:
        """The mask [n, 1, prompt + own tokens] that is true where a row does not see a token; None where each sees all.
        It is computed once a step for each `window`."""
        if window not in self._masks:
            self._masks[window] = self._made_mask(window)
        return self._masks[window]

    def _made_mask(self, window: int | None) -> Tensor | None:
        column, first, long = self._column, self._first, self._longest
        near = window is None or long + column - first < window
        if near and self._even:
            return None
        device = self._starts.device
        prompt, columns = torch.arange(long, device=device), torch.arange(first, column + 1, device=device)
        lengths, starts = self._lengths[:, None], self._starts[:, None]
        hidden = torch.cat([prompt >= lengths, columns < starts], -1)
        if window is not None and not near:
            ages = [lengths + column - starts - prompt, (column - columns).expand(len(starts), -1)]
            hidden |= torch.cat(ages, -1) >= window
        return hidden[:, None]


def _scores(query: Tensor, key: Tensor) -> Tensor:
    """Products [b, q, k] of queries [b, q, D] and keys [b, k, D]. A CPU copies transposed keys in bfloat16 before it multiplies:
    transposed queries give the same numbers in half of the time or less (measured)."""
    if query.is_cpu and query.dtype == torch.bfloat16:
        return torch.bmm(key, query.transpose(1, 2)).transpose(1, 2).contiguous()
    return torch.bmm(query, key.transpose(1, 2))


@dataclass(frozen=True)
class _Layout:
    """How the seats' queries are arranged by prompt: each prompt gets a block of equal size, padded where it has fewer
    rows."""

    groups: int
    """Number of blocks of queries: one a prompt, or several."""
    moves: tuple[Tensor, Tensor] | None
    """(the seat of each query, the query of each seat); None where they are the same."""
    copies: Tensor | None
    """The prompt of each block, whose keys are copied for a step; None: block n reads prompt n."""


def _layout(prompt_of: Sequence[int], prompts: int, device: torch.device) -> _Layout:
    """Arrange seats by the prompt number of each. Where a few prompts have very many rows they get several blocks,
    which keeps padding small."""
    rows: list[list[int]] = [[] for _ in range(prompts)]
    for seat, number in enumerate(prompt_of):
        rows[number].append(seat)
    most, copies = max(map(len, rows)), None
    if prompts * most > 4 * len(prompt_of):
        most = -(-len(prompt_of) // prompts)
        parts = [(number, some[n : n + most]) for number, some in enumerate(rows) for n in range(0, len(some), most)]
        copies, rows = torch.tensor([number for number, _ in parts], device=device), [some for _, some in parts]
    padded = [seat for some in rows for seat in [*some, *[0] * (most - len(some))]]
    if padded == list(range(len(prompt_of))):
        return _Layout(len(rows), None, copies)
    back = {seat: n * most + rank for n, some in enumerate(rows) for rank, seat in enumerate(some)}
    order = [back[seat] for seat in range(len(prompt_of))]
    return _Layout(len(rows), (torch.tensor(padded, device=device), torch.tensor(order, device=device)), copies)


def _causal(layer: LayerCall) -> Tensor:
    """Compute causal attention of whole prompts: each token sees itself and those before it, within the layer's window."""
    length = layer.query.shape[2]
    far = layer.window is not None and length > layer.window
    if layer.plain and not far:
        return layer.attend(layer.query, layer.key, layer.value, None, causal=True)
    seen = torch.ones(length, length, dtype=torch.bool, device=layer.query.device).tril()
    if far:
        seen = seen.triu(1 - (layer.window or 0))
    return layer.attend(layer.query, layer.key, layer.value, seen[None, None])


def _chunks(prompts: Mapping[int, tuple[int, ...]], budget: int) -> Iterator[dict[int, tuple[int, ...]]]:
    """Group prompts of similar lengths into prefill batches of at most `budget` tokens, padding included; empty prompts
    are left out."""
    some: dict[int, tuple[int, ...]] = {}
    for number, prompt in sorted(prompts.items(), key=lambda one: -len(one[1])):
        widest = len(next(iter(some.values()), prompt))
        if some and (widest * (len(some) + 1) > budget or 2 * len(prompt) < widest):
            yield some
            some = {}
        if prompt:
            some[number] = prompt
    if some:
        yield some


# --- ways to decode ------------------------------------------------------------------------------

LEAN, SHARED, OWN_CACHE, UNCACHED = PATHS = ("lean", "shared prompts", "own cache", "no cache")
"""The fastest first: prompts shared in attention, without the model's modules or with them, the model's own cache, the whole
row again for each token."""


def paths_of(model: Any, wanted: str) -> tuple[str, ...]:
    """Return the names of the decoding paths to try for a model: the one that the setting `decode` names, or with
    `auto` all that its structure allows, the fastest first."""
    return tuple(path for path in PATHS if path != LEAN or lean_step(model)) if wanted == "auto" else (wanted,)


@contextmanager
def cache_of(model: Any, path: str, budget: int) -> Iterator[Cache]:
    """Context manager: yields the cache for decoding a wave by `path`, a name in `PATHS`; prompts are prefilled at most
    `budget` tokens at a time."""
    if path not in (LEAN, SHARED):
        yield Uncached(model) if path == UNCACHED else PaddedRows(model)
        return
    step = lean_step(model) if path == LEAN else None
    if path == LEAN and step is None:
        found, do = type(model).__name__, "set decode='auto'"
        raise EngineError("decode='lean'", expected="a model shaped like Llama", found=found, do=do)
    cache = SharedPrefix(model, step, budget)
    with planned(model, cache) as cache.tag, recorded(model) as cache.routing:
        yield cache


class Uncached:
    """A `Cache` that keeps token ids alone and reads each whole row again for every token: right for any causal model,
    and slow."""

    refills = True

    def __init__(self, model: Any) -> None:
        self._model = model
        self._rows: list[list[int]] = []

    def seat(self, order: Sequence[int], prompts: Mapping[int, tuple[int, ...]]) -> None:
        """Move the token ids of rows to their new seats, and add the prompts of new rows."""
        held = self._rows
        self._rows = [list(prompts[seat][:-1]) if seat in prompts else list(held[of]) for seat, of in enumerate(order)]

    def step(self, tokens: Tensor) -> Tensor:
        """Append one token [n] to each row and return logits [n, V], by a forward pass over all whole rows, padded on
        the right."""
        for row, token in zip(self._rows, tokens.tolist(), strict=True):
            row.append(token)
        vocabulary = self._model.config.get_text_config().vocab_size
        size = chunk_rows(self._model.device.type, vocabulary * max(map(len, self._rows)))
        parts = [self._rows[start : start + size] for start in range(0, len(self._rows), size)]
        return torch.cat([self._logits(part) for part in parts])

    def _logits(self, rows: Sequence[Sequence[int]]) -> Tensor:
        device, width = self._model.device, max(map(len, rows))
        ids = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], device=device)
        lengths = torch.tensor([len(row) for row in rows], device=device)
        mask = (torch.arange(width, device=device) < lengths[:, None]).long()
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        logits = self._model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
        last: Tensor = logits[torch.arange(len(rows), device=device), lengths - 1]
        return last


class PaddedRows:
    """A `Cache` that is the model's own over left-padded rows, for models whose attention cannot be computed by a plan.
    All rows must enter together."""

    refills = False

    def __init__(self, model: Any) -> None:
        self._model = model
        self._cache: Any = None
        named = inspect.signature(type(model).forward).parameters
        self._name = "cache_params" if "cache_params" in named else "past_key_values"

    def seat(self, order: Sequence[int], prompts: Mapping[int, tuple[int, ...]]) -> None:
        """Prefill each distinct prompt once and copy it to its rows; without new prompts, keep only the rows in
        `order`."""
        from transformers import DynamicCache

        device = self._model.device
        if prompts:
            places = {prompt: place for place, prompt in enumerate(dict.fromkeys(prompts.values()))}
            width = max(map(len, places))
            ids = torch.tensor([[0] * (width - len(one)) + list(one) for one in places], device=device)
            mask = torch.tensor([[0] * (width - len(one)) + [1] * len(one) for one in places], device=device)
            self._cache, self._mask = DynamicCache(config=self._model.config), mask
            self._logits: Tensor | None = self._forward(ids, (mask.cumsum(-1) - 1).clamp(min=0))
            order = [places[prompts[seat]] for seat in range(len(prompts))]
        if list(order) == list(range(len(self._mask))):
            return
        where = torch.tensor(order, device=device)
        self._cache.reorder_cache(where)  # which every kind of layer has
        self._mask = self._mask[where]
        self._logits = None if self._logits is None else self._logits[where]

    def step(self, tokens: Tensor) -> Tensor:
        """Return logits [n, V] after one more token [n] in each seat; the first call after a prefill returns the
        prompts' logits and ignores `tokens`."""
        if self._logits is not None:
            logits, self._logits = self._logits, None
            return logits
        self._mask = functional.pad(self._mask, (0, 1), value=1)
        positions = self._mask.sum(-1, keepdim=True) - 1
        return self._forward(sent(tokens[:, None], self._mask.device), positions)

    def _forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        given = {"attention_mask": self._mask, "position_ids": positions, self._name: self._cache}
        logits: Tensor = self._model(input_ids=ids, **given, use_cache=True, logits_to_keep=1).logits[:, -1]
        return logits


class PicturedRows(PaddedRows):
    """The model's own cache over left-padded rows with pictures, all of which must enter together."""

    def __init__(self, model: Any, requests: Sequence[Request]) -> None:
        super().__init__(model)
        self._requests = requests
        self._ahead: Tensor
        """How far each row's positions are from the number of tokens before."""

    def seat(self, order: Sequence[int], prompts: Mapping[int, tuple[int, ...]]) -> None:
        """Prefill each distinct prompt with its pictures once and copy it to its rows; without new prompts, keep only
        the rows in `order`."""
        if prompts:
            order = self._prefill()
        super().seat(order, {})
        self._ahead = self._ahead[torch.tensor(order, device=self._ahead.device)]

    def _prefill(self) -> list[int]:
        """Run one forward pass over the distinct prompts with their pictures; returns for each request the number of
        its prompt."""
        from transformers import DynamicCache

        device, keys = self._model.device, [(request.ids, id(request.pixels)) for request in self._requests]
        different = {key: request for key, request in zip(keys, self._requests, strict=True)}
        prompts = [request.ids for request in different.values()]
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts], device=device)
        rows = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        self._mask, self._cache = torch.tensor(rows, device=device), DynamicCache(config=self._model.config)
        inputs = pictured_inputs(self._model, ids, self._mask, [request.pixels or {} for request in different.values()])
        last = inputs["position_ids"][..., -1]
        last = last.amax(0) if last.dim() > 1 else last
        self._ahead = last - (self._mask.sum(-1) - 1)
        output = self._model(**inputs, **{self._name: self._cache}, use_cache=True, logits_to_keep=1)
        self._logits = output.logits[:, -1]
        places = {key: place for place, key in enumerate(different)}
        return [places[key] for key in keys]

    def _forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        read = ids.masked_fill(ids == self._model.config.image_token_id, STAND_IN)
        return super()._forward(read, positions + self._ahead[:, None])
