"""The decode loop: rows are decoded together, and waiting requests take the seats of rows that have ended.

It is a loop of our own rather than `generate`, because a row's tokens must depend on its seed and its prompt alone, never on
which rows happen to share its wave.
"""

from __future__ import annotations

import inspect
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from workbench.base import runtime
from workbench.dataproto.core import sent
from workbench.engines.local_engine.draw import draw
from workbench.engines.local_engine.sampling import Wave
from workbench.engines.protocol import Request, Sample

_SHRINK = 0.75  # seats are given up when fewer than this share is taken: moving a cache costs more than a few idle rows
_FIRST = 64  # columns for tokens at first; they are doubled as rows grow
_REFILL = 8  # waiting requests enter when one in so many seats is free: each entry costs a prefill


class Cache(Protocol):
    """Protocol of what a model remembers of the rows that decode together; each row has a seat."""

    refills: bool
    """Whether new rows can enter while others decode."""

    def seat(self, order: Sequence[int], prompts: Mapping[int, tuple[int, ...]]) -> None:
        """Seat n is taken by the row that sat in `order[n]`, or where `prompts` has n by a new row with that prompt."""

    def step(self, tokens: Tensor) -> Tensor:
        """[n, V] logits after one more token in each seat, [n]: a new row's first one is the last of its prompt."""


@torch.no_grad()  # in inference mode autocast would cast all weights again for every token
def decode(
    cache: Cache,
    rows: Rows,
    wave: Wave[Request, Sample],
    version: int,
    size: int,
    joins: Callable[[], bool] = lambda: True,
    pauses: Callable[[], bool] = lambda: False,
) -> bool:
    """Sample one response to each request of a wave, at most `size` at a time; each is finished as soon as it ends.

    Requests that wait join while `joins()` is true. An interrupt stops the wave between two decode steps. Returns True where
    `pauses()` stopped it there: the rows that have not ended go on in the next call, by a new cache.
    """
    entering = rows.resumed(wave, version)
    alive = len(rows)
    if alive:
        cache.seat([0] * alive, {seat: rows.written(seat) for seat in range(alive)})
    while alive or entering:
        runtime.check()
        if entering or alive <= _SHRINK * len(rows):
            order, seats = _seating(rows.alive, len(rows), len(entering))
            rows.seat(order, dict(zip(seats, entering.items(), strict=True)))
            cache.seat(order, {seat: request.ids for seat, request in zip(seats, entering.values(), strict=True)})
        alive += len(entering)
        logits = cache.step(rows.last)
        for seat in rows.advance(logits, getattr(cache, "experts", None)):
            wave.finish(rows.places[seat], rows.sample(seat, getattr(cache, "prompt_experts", {})))
            alive -= 1
        if pauses():
            return True
        enters = cache.refills and (size - alive) * _REFILL >= size and joins()
        entering = wave.join(size - alive) if enters else {}
    return False


@contextmanager
def casts_kept(model: Any) -> Iterator[None]:
    """Context manager: autocast casts each weight once for a wave. It keeps casts of weights that require gradients alone."""
    on = torch.is_autocast_enabled(model.device.type)
    frozen = [one for one in model.parameters() if on and one.is_floating_point() and not one.requires_grad]
    try:
        for one in frozen:
            one.requires_grad_(True)
        yield
    finally:
        for one in frozen:
            one.requires_grad_(False)


def _seating(alive: Sequence[int], seats: int, entering: int) -> tuple[list[int], list[int]]:
    """(who sits where from now on, by present seats; the seats of those who enter, in order)."""
    free = sorted(set(range(seats)) - set(alive))
    if len(alive) + entering <= _SHRINK * seats:
        return [*alive, *[0] * entering], list(range(len(alive), len(alive) + entering))
    more = range(seats, seats + max(0, entering - len(free)))
    return [*range(seats), *[0] * len(more)], [*free, *more][:entering]


class Rows:
    """The requests in the seats and what was sampled for them, as tensors [n, ·] on the CPU."""

    def __init__(self, eos_ids: frozenset[int], tokenizer: Any) -> None:
        self._eos = torch.tensor(sorted(eos_ids), dtype=torch.long)
        self._tokenizer = tokenizer
        self._held: dict[str, Tensor] = {}
        self._width = _FIRST
        self._requests: list[Request] = []
        self._experts: defaultdict[int, list[Tensor]] = defaultdict(list)
        """By place the experts [L, k] of each token from the prompt's last on, where they are recorded."""
        self.places: list[int] = []
        """Place of each seat's question in its wave."""
        self._times: list[tuple[float, float]] = []
        self._new: list[int] = []
        self._versions: list[list[tuple[int, int]]] = []
        """Of each seat: (number of the first token, policy version) of each of the weights that wrote it."""
        self._version = 0

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def alive(self) -> list[int]:
        """Seats of the rows that have not ended."""
        return self._held["alive"].nonzero().flatten().tolist() if self._held else []

    @property
    def last(self) -> Tensor:
        """The newest token of each row, [n]."""
        return self._held["last"]

    def resumed(self, wave: Wave[Request, Sample], version: int) -> dict[int, Request]:
        """At the start of `decode`: the requests that enter, by their places, where no rows are held; else none, and the rows go
        on, those that have ended or were given up left out, by the weights of `version`."""
        self._version = version
        if not len(self):
            return dict(enumerate(wave.questions))
        going = [seat for seat in self.alive if not wave.given_up(self.places[seat])]
        self.seat(going, {})
        for seat, marks in enumerate(self._versions):
            if marks[-1][1] != version:
                marks.append((int(self._held["length"][seat]), version))
        return {}

    def written(self, seat: int) -> tuple[int, ...]:
        """The tokens of a row's prompt and of its response so far."""
        return (*self._requests[seat].ids, *self._held["ids"][seat, : int(self._held["length"][seat])].tolist())

    def seat(self, order: Sequence[int], entering: Mapping[int, tuple[int, Request]]) -> None:
        """As `Cache.seat`, with the place and the request of each row that enters."""
        self._versions = [
            [(0, self._version)] if s in entering else list(self._versions[of]) for s, of in enumerate(order)
        ]
        self._requests = [entering[s][1] if s in entering else self._requests[of] for s, of in enumerate(order)]
        self.places = [entering[s][0] if s in entering else self.places[of] for s, of in enumerate(order)]
        now = (time.time(), 0.0)
        self._times = [now if s in entering else self._times[of] for s, of in enumerate(order)]
        self._new = list(entering)
        new, seats = _begun([request for _, request in entering.values()], self._width), list(entering)
        for name, one in new.items():
            moved = self._held.get(name, one)[list(order)]
            self._held[name] = moved.index_copy(0, torch.tensor(seats, dtype=torch.long), one)
        by_kind: dict[tuple[float, float, int], list[int]] = {}
        for seat, request in enumerate(self._requests):
            kind = (request.settings.temperature, request.settings.top_p, request.settings.top_k)
            by_kind.setdefault(kind, []).append(seat)
        self._kinds = [(self._requests[seats[0]].settings, torch.tensor(seats)) for seats in by_kind.values()]
        self._stopping = [seat for seat, request in enumerate(self._requests) if request.settings.stop]

    def advance(self, logits: Tensor, experts: Tensor | None = None) -> list[int]:
        """Draw the next token of each row from [n, V] logits; returns the seats of the rows that end with it.

        `experts` [n, L, k] are those of the tokens before, where they are recorded.
        """
        held = self._held
        if int((held["length"] * held["alive"]).max()) == self._width:
            held["uniforms"] = _uniforms(self._requests, 2 * self._width)
            for name in ("ids", "log_probs"):
                held[name] = functional.pad(held[name], (0, self._width))
            self._width *= 2
        # what a row draws that has ended is not used
        column = held["length"].clamp(max=self._width - 1)[:, None]
        tokens, log_probs = self._drawn(logits, held["uniforms"].gather(1, column).squeeze(1))
        for seat in self._new:
            self._times[seat] = (self._times[seat][0], time.time())
        self._new = []
        held["ids"].scatter_(1, column, tokens[:, None])
        held["log_probs"].scatter_(1, column, log_probs[:, None])
        if experts is not None:
            for seat in held["alive"].nonzero().flatten().tolist():
                self._experts[self.places[seat]] += [experts[seat]]
        held["last"] = tokens
        held["length"] += held["alive"]
        held["stopped"] = (tokens[:, None] == self._eos).any(-1) & held["minds_eos"]
        for seat in self._stopping:
            held["stopped"][seat] |= bool(held["alive"][seat]) and self._stops(seat)
        ended = (held["stopped"] | (held["length"] >= held["limit"])) & held["alive"]
        held["alive"] &= ~ended
        return ended.nonzero().flatten().tolist()

    def _drawn(self, logits: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens and log-probs on the CPU. They come in one copy, the only wait of a step: float64 holds both as they are."""
        uniforms, parts = sent(uniforms, logits.device), []
        for kind, seats in self._kinds:
            alone = len(self._kinds) == 1
            tokens, log_probs = draw(*((logits, uniforms) if alone else (logits[seats], uniforms[seats])), kind)
            parts.append(torch.stack([tokens.double(), log_probs.double()]))
        read = torch.cat(parts, 1).cpu()
        found = torch.empty_like(read).index_copy(1, torch.cat([seats for _, seats in self._kinds]), read)
        return found[0].long(), found[1].float()

    def _stops(self, seat: int) -> bool:
        """Whether the newest token completed a stop text; only the tail is decoded."""
        stop = self._requests[seat].settings.stop
        end = int(self._held["length"][seat])
        tail = self._held["ids"][seat, max(0, end - max(map(len, stop)) - 8) : end].tolist()
        now, before = (self._tokenizer.decode(ids, skip_special_tokens=False) for ids in (tail, tail[:-1]))
        return any(text in now and text not in before for text in stop)

    def sample(self, seat: int, prompt_experts: Mapping[tuple[int, ...], Tensor]) -> Sample:
        """The response of a row that has just ended; `prompt_experts` as `SharedPrefix` has them."""
        end, marks = int(self._held["length"][seat]), self._versions[seat]
        ids, log_probs = (tuple(self._held[name][seat, :end].tolist()) for name in ("ids", "log_probs"))
        reason, version = "stop" if self._held["stopped"][seat] else "length", marks[0][1]
        ends = [*(first for first, _ in marks[1:]), end]
        each = [one for (first, one), last in zip(marks, ends, strict=True) for _ in range(first, last)]
        versions = tuple(each) if len(marks) > 1 else ()
        return Sample(ids, log_probs, reason, version, versions, self._chosen(seat, prompt_experts), self._times[seat])

    def _chosen(self, seat: int, prompt_experts: Mapping[tuple[int, ...], Tensor]) -> Tensor | None:
        """The experts [S + T, L, k] of a row that has just ended; -1 where nobody knows them: its last token, or a prompt
        that newer weights have read again."""
        own = self._experts.pop(self.places[seat], None)
        if own is None:
            return None
        prompt = self._requests[seat].ids[:-1]
        before = prompt_experts.get(prompt, own[0].new_full((len(prompt), *own[0].shape), -1))
        return torch.cat([before, torch.stack([*own, torch.full_like(own[0], -1)])])


def _uniforms(requests: Sequence[Request], width: int) -> Tensor:
    """[n, width] numbers from 0 to 1 of each row's seed: the n-th token uses the n-th, whoever shares the wave."""
    uniforms, generator = torch.empty(len(requests), width, dtype=torch.float64), torch.Generator()
    for row, request in zip(uniforms, requests, strict=True):
        torch.rand(width, generator=generator.manual_seed(request.seed), dtype=torch.float64, out=row)
    return uniforms


def _begun(requests: Sequence[Request], width: int) -> dict[str, Tensor]:
    """The tensors of rows that have nothing yet."""
    count, limits = len(requests), [request.settings.max_tokens for request in requests]
    return {
        "ids": torch.zeros(count, width, dtype=torch.long),
        "log_probs": torch.zeros(count, width),
        "uniforms": _uniforms(requests, width),
        "last": torch.tensor([request.ids[-1] for request in requests], dtype=torch.long),
        "length": torch.zeros(count, dtype=torch.long),
        "limit": torch.tensor(limits, dtype=torch.long),
        "minds_eos": torch.tensor([not request.settings.ignore_eos for request in requests], dtype=torch.bool),
        "stopped": torch.zeros(count, dtype=torch.bool),
        "alive": torch.ones(count, dtype=torch.bool),
    }


class PaddedRows:
    """The model's own cache over left-padded rows, for models whose attention is not ours to plan."""

    refills = False

    def __init__(self, model: Any) -> None:
        self._model = model
        self._cache: Any = None
        named = inspect.signature(type(model).forward).parameters
        self._name = "cache_params" if "cache_params" in named else "past_key_values"

    def seat(self, order: Sequence[int], prompts: Mapping[int, tuple[int, ...]]) -> None:
        """Prefill each different prompt once, or drop rows."""
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
        """The prompts' logits at first, then one forward pass for each token."""
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


class _Forced(Rows):
    """Rows that decode given tokens, and keep the logits of which each would have been drawn."""

    def __init__(self, rows: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]) -> None:
        super().__init__(frozenset(), None)
        self._responses = [response for _, response in rows]
        self.logits: list[list[Tensor]] = [[] for _ in rows]

    def _drawn(self, logits: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
        tokens, log_probs = super()._drawn(logits, uniforms)
        for seat in self.alive:
            kept = self.logits[self.places[seat]]
            tokens[seat] = self._responses[self.places[seat]][len(kept)]
            kept.append(logits[seat])
        return tokens, log_probs


def forced(
    rows: Sequence[tuple[tuple[int, ...], tuple[int, ...]]], decode: Callable[[Rows], object]
) -> dict[str, list[Tensor]]:
    """`logits` [T, V] of the response of each row (token ids of a prompt and of its response), as `decode(rows)` comes to them."""
    each = _Forced(rows)
    decode(each)
    return {"logits": [torch.stack(one) for one in each.logits]}
