"""Sampling: requests that are made at the same time go together in waves, and are decoded in one loop, token by token.

It is a loop of our own rather than `generate`, because a row's tokens must depend on its seed and its prompt alone,
never on which rows happen to share its wave. Requests that wait take the seats of rows that have ended.

Tokens are chosen by inverse-CDF draws on the logits' own device, with temperature, min-p, top-k and top-p. The cumulative
distribution has two levels, blocks of about √V tokens and the tokens of one block, so that a draw reads the logits a
few times in float32 and only 2√V numbers a row in float64. Tokens are those of a whole CDF in float64 but where a
draw lies within 1e-5 of an edge between two tokens.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import math
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from workbench.base import runtime
from workbench.base.activity import HERE, REQUEST, QueuedRequest
from workbench.base.errors import Interrupted
from workbench.base.progress import present
from workbench.dataproto.core import sent
from workbench.engines.local_engine.grammar import Grammar
from workbench.engines.protocol import Request, Sample, SamplingSettings

# --- waves --------------------------------------------------------------------------------------

Q = TypeVar("Q")
A = TypeVar("A")
_Waiting = tuple[Q, asyncio.Future[A], QueuedRequest | None]
"""A question, the future of its answer, and what is noted of it."""


class Wave(Generic[Q, A]):
    """Questions (such as requests for samples) that are answered together. The thread that answers them calls `join` to
    admit more and `finish` for each answer."""

    def __init__(self, waiting: deque[_Waiting[Q, A]], size: int) -> None:
        self._waiting = waiting
        self._loop = asyncio.get_running_loop()
        self._futures: list[asyncio.Future[A]] = []
        self._last: list[tuple[asyncio.Future[A], A | Exception]] = []
        self._open = 0
        self.questions: list[Q] = []
        """All questions of the wave so far; a question's place is its number in this list."""
        self._enter(self._taken(size))

    def _taken(self, most: int) -> list[_Waiting[Q, A]]:
        """Take at most `most` questions from the queue, skipping those whose caller has given up, so that a notebook
        cell that is run again forms the same waves."""
        taken: list[_Waiting[Q, A]] = []
        while self._waiting and len(taken) < most:
            one = self._waiting.popleft()
            if not one[1].done():
                taken.append(one)
        return taken

    def _enter(self, taken: list[_Waiting[Q, A]]) -> None:
        self.questions += [question for question, _, _ in taken]
        self._futures += [future for _, future, _ in taken]
        for _, _, asked in taken:
            if asked is not None:
                HERE.begin(asked)
        self._open += len(taken)

    def join(self, most: int) -> dict[int, Q]:
        """Admit at most `most` of the questions that wait, in the order in which they were asked; returns them by their
        places in the wave.

        Raises `Interrupted`, and admits none, where the wave was interrupted or nobody waits for its answers any more.
        """
        count, taken = len(self.questions), self._taken(most)
        try:
            runtime.check()  # after taking: who gives up and asks again is never taken into the wave that was given up
        except Interrupted:
            self._waiting.extendleft(reversed(taken))
            raise
        self._enter(taken)
        return dict(enumerate(self.questions[count:], count))

    def finish(self, place: int, answer: A | Exception) -> None:
        """Answer the question at this place; an exception is raised for its caller alone.

        The wave's last answer is held back until the wave has ended, so that a caller who has all answers finds the
        model in its normal state.
        """
        self._last.append((self._futures[place], answer))
        self._open -= 1
        if self._open:
            self.flush()

    def flush(self) -> None:
        """Deliver the answers that `finish` has stored to the callers that wait for them."""
        for future, answer in self._last:
            self._loop.call_soon_threadsafe(_give, future, answer)
        self._last.clear()

    def given_up(self, place: int) -> bool:
        """Whether the caller of the question at this place no longer waits: it was answered or cancelled."""
        return self._futures[place].done()

    @property
    def over(self) -> bool:
        """Whether no caller waits any more: each question was answered or cancelled."""
        return all(future.done() for future in self._futures)

    def fail(self, error: BaseException) -> None:
        """Raise an error for all questions without an answer; it must be called in the event loop."""
        for future in self._futures:
            _give(future, error)


class Waves(Generic[Q, A]):
    """Batches questions that are asked at the same time into waves of at most `size`, answered one wave at a time.

    `answer(wave)` runs in a thread and calls `wave.finish` for each question; what it raises is raised for all questions
    of the wave that have no answer yet.
    """

    def __init__(self, answer: Callable[[Wave[Q, A]], None], size: int, name: str) -> None:
        self._answer = answer
        self._size = size
        self._waiting: deque[_Waiting[Q, A]] = deque()
        self._pump: asyncio.Task[None] | None = None
        self._worker = ThreadPoolExecutor(1, thread_name_prefix=name)

    async def ask(self, question: Q) -> A:
        """Put one question into the next wave (questions that are answered together), and return its answer."""
        if asyncio.get_running_loop() is not runtime.loop():  # a caller's own loop: the queue lives in ours
            there = asyncio.run_coroutine_threadsafe(self.ask(question), runtime.loop())
            return await asyncio.wrap_future(there)
        future: asyncio.Future[A] = asyncio.get_running_loop().create_future()
        self._waiting.append((question, future, REQUEST.get()))
        if self._pump is None or self._pump.done():
            self._pump = asyncio.create_task(self._run())
        return await future

    async def _run(self) -> None:
        await asyncio.sleep(0)  # let everybody who is ready ask first
        while self._waiting:
            wave = Wave(self._waiting, self._size)
            if not wave.questions:
                continue
            try:
                answer = functools.partial(contextvars.copy_context().run, self._answered, wave)
                await asyncio.get_running_loop().run_in_executor(self._worker, answer)
            except BaseException as error:
                wave.fail(error)
                if not isinstance(error, Exception):
                    raise

    def _answered(self, wave: Wave[Q, A]) -> None:
        """Answer one wave, in the worker thread. It is interrupted at the next safe point once no caller waits for it
        any more."""
        with runtime.unless(lambda: wave.over):
            self._answer(wave)
        wave.flush()


def _give(future: asyncio.Future[A], answer: A | BaseException) -> None:
    if future.done():  # answered early, or given up
        return
    if isinstance(answer, BaseException):
        future.set_exception(answer)
    else:
        future.set_result(answer)


# --- the decode loop ----------------------------------------------------------------------------

_SHRINK = 0.75  # seats are given up when fewer than this share is taken: moving a cache costs more than a few idle rows
_FIRST = 64  # columns for tokens at first; they are doubled as rows grow
_REFILL = 8  # waiting requests enter when one in so many seats is free: each entry costs a prefill


class Cache(Protocol):
    """Protocol of the keys and values (or other state) that a model keeps of the rows that are decoded together; each
    row has a seat, 0 to n - 1."""

    refills: bool
    """Whether new rows can enter while others decode."""

    def seat(self, order: Sequence[int], prompts: Mapping[int, tuple[int, ...]]) -> None:
        """Rearrange the rows: seat n gets the row that sat in `order[n]`, or, where `prompts` has the key n, a new row
        with that prompt."""

    def step(self, tokens: Tensor) -> Tensor:
        """Decode one more token [n] for each seat and return the logits [n, V] after it. A new row's first token here
        is the last of its prompt."""


@torch.no_grad()  # in inference mode autocast would cast all weights again for every token
def decode(
    cache: Cache,
    rows: HeldRows,
    wave: Wave[Request, Sample],
    version: int,
    size: int,
    joins: Callable[[], bool] = lambda: True,
    pauses: Callable[[], bool] = lambda: False,
) -> bool:
    """Sample one response to each request of a wave, at most `size` rows at a time; each is answered as soon as it
    ends.

    Waiting requests enter freed seats while `joins()` is true. An interrupt stops the wave between two decode steps.
    Returns True where `pauses()` stopped it between two steps: a later call with a new cache goes on with the
    unfinished rows.
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
        present().add_tokens(alive)
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
    """Context manager: lets autocast cast each weight once for a whole wave. Autocast caches casts only of weights that
    require gradients, so inside the block all weights require gradients."""
    on = torch.is_autocast_enabled(model.device.type)
    frozen = [
        parameter
        for parameter in model.parameters()
        if on and parameter.is_floating_point() and not parameter.requires_grad
    ]
    try:
        for parameter in frozen:
            parameter.requires_grad_(True)
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)


def _seating(alive: Sequence[int], seats: int, entering: int) -> tuple[list[int], list[int]]:
    """Return the new seating of the rows and the seats of those that enter: the old seat of the row in each seat, and
    the new rows' seats in order."""
    free = sorted(set(range(seats)) - set(alive))
    if len(alive) + entering <= _SHRINK * seats:
        return [*alive, *[0] * entering], list(range(len(alive), len(alive) + entering))
    more = range(seats, seats + max(0, entering - len(free)))
    return [*range(seats), *[0] * len(more)], [*free, *more][:entering]


class HeldRows:
    """The rows that are being decoded: their requests, and as CPU tensors [n, ·] the tokens and log-probs sampled so
    far."""

    def __init__(self, eos_ids: frozenset[int], tokenizer: Any, vocabulary: int = 0) -> None:
        self._eos = torch.tensor(sorted(eos_ids), dtype=torch.long)
        self._ends, self._rows = eos_ids, vocabulary
        self._tokenizer = tokenizer
        self._held: dict[str, Tensor] = {}
        self._width = _FIRST
        self._requests: list[Request] = []
        self._experts: defaultdict[int, list[Tensor]] = defaultdict(list)
        """By place the experts [L, k] of each token from the prompt's last on, where they are recorded."""
        self._tops: defaultdict[int, list[dict[int, float]]] = defaultdict(list)
        """By place the likeliest tokens beside each token, where they are wanted."""
        self._grammars: dict[int, Grammar] = {}
        """By place what holds a response to a JSON schema."""
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
        """Prepare the rows for a call of `decode` and return the requests that enter, by their places in the wave.

        At the first call these are all of the wave's. In a later call after a pause there are none: unfinished rows
        that are still waited for go on, with the weights of `version`.
        """
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
        """The token ids of a row so far: its prompt and what was sampled of its response."""
        return (*self._requests[seat].ids, *self._held["ids"][seat, : int(self._held["length"][seat])].tolist())

    def seat(self, order: Sequence[int], entering: Mapping[int, tuple[int, Request]]) -> None:
        """Rearrange the rows as `Cache.seat` does; `entering` has the place in the wave and the request of each new
        row, by its seat."""
        self._versions = [
            [(0, self._version)] if s in entering else list(self._versions[of]) for s, of in enumerate(order)
        ]
        self._requests = [entering[s][1] if s in entering else self._requests[of] for s, of in enumerate(order)]
        self.places = [entering[s][0] if s in entering else self.places[of] for s, of in enumerate(order)]
        for place, request in entering.values():
            if request.schema is not None:
                self._grammars[place] = Grammar(request.schema, self._tokenizer, self._rows, self._ends)
        now = (time.time(), 0.0)
        self._times = [now if s in entering else self._times[of] for s, of in enumerate(order)]
        self._new = list(entering)
        new, seats = _begun([request for _, request in entering.values()], self._width), list(entering)
        for name, one in new.items():
            moved = self._held.get(name, one)[list(order)]
            self._held[name] = moved.index_copy(0, torch.tensor(seats, dtype=torch.long), one)
        by_kind: dict[tuple[Any, ...], list[int]] = {}
        for seat, request in enumerate(self._requests):
            s = request.settings
            limits = (s.temperature, s.top_p, s.top_k, s.min_p, s.repetition_penalty, s.min_tokens)
            kind = (*limits, request.schema is None)
            by_kind.setdefault(kind, []).append(seat)
        self._kinds = [(self._requests[seats[0]].settings, torch.tensor(seats)) for seats in by_kind.values()]
        self._heard = any(request.listen for request in self._requests)
        each = [request.settings for request in self._requests]
        self._stopping = [seat for seat, s in enumerate(each) if s.stop or s.stop_token_ids]

    def advance(self, logits: Tensor, experts: Tensor | None = None) -> list[int]:
        """Draw the next token of each row from logits [n, V], and return the seats of the rows that end with it.

        `experts` [n, L, k] are the experts that the routers chose for the tokens before these, where they are recorded.
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
        for seat in [seat for seat in self.alive if self._requests[seat].tops]:
            self._tops[self.places[seat]] += [_likeliest(logits[seat], self._requests[seat])]
        if experts is not None:
            for seat in held["alive"].nonzero().flatten().tolist():
                self._experts[self.places[seat]] += [experts[seat]]
        for seat in self.alive if self._grammars else ():
            if (grammar := self._grammars.get(self.places[seat])) is not None:
                grammar.accept(int(tokens[seat]))
        for seat in self.alive if self._heard else ():
            if (listen := self._requests[seat].listen) is not None:
                listen(int(tokens[seat]))
        held["last"] = tokens
        held["length"] += held["alive"]
        held["stopped"] = (tokens[:, None] == self._eos).any(-1) & held["minds_eos"]
        for seat in self._stopping:
            held["stopped"][seat] |= bool(held["alive"][seat]) and self._stops(seat)
        ended = (held["stopped"] | (held["length"] >= held["limit"])) & held["alive"]
        held["alive"] &= ~ended
        return ended.nonzero().flatten().tolist()

    def _drawn(self, logits: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
        """Draw a token for each row and return tokens [n] and log-probs [n] on the CPU, read in one copy: float64 holds
        both exactly."""
        uniforms, parts = sent(uniforms, logits.device), []
        for kind, seats in self._kinds:
            theirs, numbers = (logits, uniforms) if len(self._kinds) == 1 else (logits[seats], uniforms[seats])
            alters = kind.alters or self._requests[int(seats[0])].schema is not None
            altered = self._altered(theirs, seats.tolist(), kind) if alters else None
            tokens, log_probs = draw(theirs, numbers, kind, altered)
            parts.append(torch.stack([tokens.double(), log_probs.double()]))
        read = torch.cat(parts, 1).cpu()
        found = torch.empty_like(read).index_copy(1, torch.cat([seats for _, seats in self._kinds]), read)
        return found[0].long(), found[1].float()

    def _altered(self, logits: Tensor, seats: Sequence[int], kind: SamplingSettings) -> Tensor:
        """The logits [n, V] that the tokens of these seats are chosen by, under `repetition_penalty`, `min_tokens` and grammars."""
        altered = logits.float().clone()
        for seat, row in zip(seats, altered, strict=True):
            seen = torch.tensor(self.written(seat), device=row.device)
            known = row[seen]
            row[seen] = torch.where(known > 0, known / kind.repetition_penalty, known * kind.repetition_penalty)
            if int(self._held["length"][seat]) < kind.min_tokens:
                ends = self._eos.tolist() if self._held["minds_eos"][seat] else []
                row[[*ends, *self._requests[seat].settings.stop_token_ids]] = -math.inf
            if (grammar := self._grammars.get(self.places[seat])) is not None:
                allowed = grammar.allowed(len(row)).to(row.device)
                some = bool(
                    (row[allowed] > -math.inf).any()
                )  # at a text's end EOS alone is allowed, whatever `min_tokens`
                row[:] = torch.where(allowed, row if some else 0.0, -math.inf)
        return altered

    def _stops(self, seat: int) -> bool:
        """Whether the newest token is a stop token or completed a stop text; only the tail is decoded."""
        s, end = self._requests[seat].settings, int(self._held["length"][seat])
        if end <= s.min_tokens:  # a stop token was not sampled
            return False
        if int(self._held["last"][seat]) in s.stop_token_ids:
            return True
        stop = s.stop
        if not stop:
            return False
        tail = self._held["ids"][seat, max(0, end - max(map(len, stop)) - 8) : end].tolist()
        now, before = (self._tokenizer.decode(ids, skip_special_tokens=False) for ids in (tail, tail[:-1]))
        return any(text in now and text not in before for text in stop)

    def sample(self, seat: int, prompt_experts: Mapping[tuple[int, ...], Tensor]) -> Sample:
        """Build the `Sample` of a row that has just ended. `prompt_experts` has the experts [S - 1, L, k] of a prompt,
        by its tokens without the last."""
        end, marks = int(self._held["length"][seat]), self._versions[seat]
        ids, log_probs = (tuple(self._held[name][seat, :end].tolist()) for name in ("ids", "log_probs"))
        reason, version = "stop" if self._held["stopped"][seat] else "length", marks[0][1]
        ends = [*(first for first, _ in marks[1:]), end]
        each = [one for (first, one), last in zip(marks, ends, strict=True) for _ in range(first, last)]
        versions = tuple(each) if len(marks) > 1 else ()
        experts, tops = self._chosen(seat, prompt_experts), tuple(self._tops.pop(self.places[seat], ()))
        return Sample(ids, log_probs, reason, version, versions, experts, self._times[seat], tops)

    def _chosen(self, seat: int, prompt_experts: Mapping[tuple[int, ...], Tensor]) -> Tensor | None:
        """The experts [S + T, L, k] of a row that has just ended; -1 for its last token, and for a prompt whose experts
        were not kept because newer weights read it again."""
        experts = self._experts.pop(self.places[seat], None)
        if experts is None:
            return None
        prompt = self._requests[seat].ids[:-1]
        before = prompt_experts.get(prompt, experts[0].new_full((len(prompt), *experts[0].shape), -1))
        return torch.cat([before, torch.stack([*experts, torch.full_like(experts[0], -1)])])


def _likeliest(logits: Tensor, request: Request) -> dict[int, float]:
    """The likeliest tokens of one row's logits [V] and their log-probs, as many as the request wants."""
    values, ids = (logits.float() / (request.settings.temperature or 1.0)).log_softmax(-1).topk(request.tops)
    return dict(zip(ids.tolist(), values.tolist(), strict=True))


def _uniforms(requests: Sequence[Request], width: int) -> Tensor:
    """Draw [n, width] uniform numbers in [0, 1) from each row's own seed: token t of a row always uses number t,
    whichever rows are decoded with it."""
    uniforms, generator = torch.empty(len(requests), width, dtype=torch.float64), torch.Generator()
    for row, request in zip(uniforms, requests, strict=True):
        torch.rand(width, generator=generator.manual_seed(request.seed), dtype=torch.float64, out=row)
    return uniforms


def _begun(requests: Sequence[Request], width: int) -> dict[str, Tensor]:
    """The tensors of rows for which nothing has been sampled yet, by name; `width` is how many tokens they have room
    for."""
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


class _Forced(HeldRows):
    """Rows that decode prescribed response tokens in place of sampled ones, and keep the logits at each."""

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
    rows: Sequence[tuple[tuple[int, ...], tuple[int, ...]]], decode: Callable[[HeldRows], object]
) -> dict[str, list[Tensor]]:
    """Decode prescribed responses and return the `logits` [T, V] of each one's tokens, as a decoding path computes
    them.

    `rows` are pairs of token ids, (prompt, response); `decode(rows)` runs the path.
    """
    each = _Forced(rows)
    decode(each)
    return {"logits": [torch.stack(one) for one in each.logits]}


# --- choosing tokens ----------------------------------------------------------------------------

_CHUNK, _DEVICE_CHUNK = 2**21, 2**26
"""Logits that are worked on at a time: what is made of them stays in a CPU's cache; a GPU takes many, as top-p waits for it once
for each time."""
_BINS = 2**11
"""What the leading 13 bits of floats from 0 to 1 can be."""


def draw(
    logits: Tensor, uniforms: Tensor, settings: SamplingSettings, altered: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """One token a row, [n], and its log-prob under logits / temperature before min-p, top-k and top-p, [n] float32.

    `logits` [n, V] of any float type, `uniforms` [n] float64 in [0, 1). At temperature 0 it is the likeliest token, and the
    log-prob at temperature 1. With `altered` [n, V] tokens are chosen by these logits; log-probs remain those of `logits`.
    """
    if altered is not None:
        tokens, _ = draw(altered, uniforms, settings)
        whole = (logits.float() / (settings.temperature or 1.0)).log_softmax(-1)
        return tokens, whole.gather(-1, tokens[:, None]).squeeze(-1)
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
        if settings.filters:
            keep_allowed(weights.flatten(1), settings)
            blocks = weights.sum(-1)
        tokens = inverse_cdf(weights, blocks, uniforms)
    chosen = (logits.gather(-1, tokens[:, None]) - largest).squeeze(-1).double() / temperature
    return tokens, (chosen - total.log()).float()


def _weights(logits: Tensor, largest: Tensor, temperature: float) -> Tensor:
    """Compute exp((logits - largest) / temperature), laid out in blocks [n, blocks, size] with zeros behind the last
    token."""
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
    """The index [n, 1] of the first of the rising `edges` [n, k] that exceeds `target` [n, 1]; where rounding left
    none, of the last that rises."""
    return torch.minimum(torch.searchsorted(edges, target, right=True), edges.argmax(-1, keepdim=True))


def keep_allowed(weights: Tensor, settings: SamplingSettings) -> None:
    """Set the weights [n, V], at most 1, of tokens that min-p, top-k or top-p rule out to 0, in place.

    Min-p keeps a share of the largest weight, top-k what is as likely as the k-th token. Top-p then keeps, from the likeliest down and among equals from the first
    on, tokens until their share of the rest reaches p.
    """
    if settings.min_p > 0:
        weights.masked_fill_(weights < settings.min_p * weights.amax(-1, keepdim=True), 0)
    if 0 < settings.top_k < weights.shape[-1]:
        least = weights.topk(settings.top_k, dim=-1).values[:, -1:]
        weights.masked_fill_(weights < least, 0)
    if settings.top_p < 1:
        _keep_nucleus(weights, settings.top_p)


def _keep_nucleus(weights: Tensor, top_p: float) -> None:
    """Apply top-p in place without sorting the whole vocabulary: a histogram over the leading float bits finds the bin
    of the cutoff, and only its tokens are sorted."""
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
