"""The local engine's decode loop: a wave of requests decoded together, each prompt prefilled once.

It is a loop over the model's cache rather than `generate`, because a row's tokens must depend on its seed and its prompt
alone, never on which rows happen to share its wave.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Generic, TypeVar

import torch

from workbench.base import runtime
from workbench.engines.protocol import Request, Sample, SamplingSettings

_SHRINK = 0.75  # finished rows leave the cache when fewer than this share are still going


class _Row:
    """One request while it is being answered."""

    def __init__(self, request: Request) -> None:
        self.request = request
        generator = torch.Generator().manual_seed(request.seed)
        # the n-th token uses the n-th number, whoever shares the wave
        self.uniforms = torch.rand(request.settings.max_tokens, generator=generator, dtype=torch.float64)
        self.ids: list[int] = []
        self.log_probs: list[float] = []
        self.reason = ""

    def add(self, token: int, log_prob: float, eos_ids: frozenset[int], tokenizer: Any) -> None:
        """Append the next token, and set `reason` where the response ends with it; does nothing once it has ended."""
        if self.reason:
            return
        self.ids.append(token)
        self.log_probs.append(log_prob)
        settings = self.request.settings
        if (token in eos_ids and not settings.ignore_eos) or (settings.stop and self._stops(settings.stop, tokenizer)):
            self.reason = "stop"
        elif len(self.ids) >= settings.max_tokens:
            self.reason = "length"

    def _stops(self, stop: tuple[str, ...], tokenizer: Any) -> bool:
        """Whether the newest token completed a stop text; only the tail is decoded."""
        tail = self.ids[-(max(map(len, stop)) + 8) :]
        now, before = (tokenizer.decode(ids, skip_special_tokens=False) for ids in (tail, tail[:-1]))
        return any(text in now and text not in before for text in stop)

    def sample(self, version: int) -> Sample:
        """The response so far."""
        return Sample(tuple(self.ids), tuple(self.log_probs), self.reason, version)


@torch.inference_mode()
def decode_wave(
    model: Any, tokenizer: Any, requests: list[Request], eos_ids: frozenset[int], version: int, finished: Early[Sample]
) -> list[Sample]:
    """Sample one response to each request, in order; `finished(index, sample)` is called as each response ends.

    An interrupt stops the wave between two decode steps.
    """
    rows = [_Row(request) for request in requests]
    cache, logits, mask, positions = _prefill(model, [row.request.ids for row in rows])
    going = list(range(len(rows)))
    while going:
        runtime.check()
        tokens, log_probs = _choose([rows[index] for index in going], logits)
        for index, token, log_prob in zip(going, tokens, log_probs, strict=True):
            ended = rows[index].reason
            rows[index].add(token, log_prob, eos_ids, tokenizer)
            if rows[index].reason and not ended:
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
        logits = _step(model, torch.tensor(tokens, device=mask.device)[:, None], mask, positions[:, None], cache)
    return [row.sample(version) for row in rows]


def _step(model: Any, ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, cache: Any) -> torch.Tensor:
    """[b, V] logits after the last of the given tokens, which join the cache."""
    given = {"attention_mask": mask, "position_ids": positions, "past_key_values": cache}
    return model(input_ids=ids, **given, use_cache=True, logits_to_keep=1).logits[:, -1]


def _prefill(model: Any, prompts: Sequence[tuple[int, ...]]) -> tuple[Any, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Each different prompt once; cache, logits, mask and last positions are then repeated to the rows."""
    from transformers import DynamicCache

    places = {prompt: place for place, prompt in enumerate(dict.fromkeys(prompts))}
    width = max(map(len, places))
    ids = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in places], device=model.device)
    mask = torch.tensor([[0] * (width - len(one)) + [1] * len(one) for one in places], device=model.device)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    cache = DynamicCache(config=model.config)
    logits = _step(model, ids, mask, positions, cache)
    where = torch.tensor([places[prompt] for prompt in prompts], device=model.device)
    if len(prompts) > 1:
        cache.batch_select_indices(where)
    return cache, logits[where], mask[where], positions[where, -1]


def _choose(rows: Sequence[_Row], logits: torch.Tensor) -> tuple[list[int], list[float]]:
    """One token a row, and its log-prob under logits / temperature (before top-k and top-p)."""
    settings = rows[0].request.settings
    if any(row.request.settings != settings for row in rows):
        each = [_choose([row], logits[place : place + 1]) for place, row in enumerate(rows)]
        return [tokens[0] for tokens, _ in each], [log_probs[0] for _, log_probs in each]
    greedy, logits = settings.temperature == 0, logits.float().cpu()
    log_probs = torch.log_softmax(logits if greedy else logits / settings.temperature, dim=-1)
    if greedy:
        tokens = log_probs.argmax(-1)
    else:
        uniforms = torch.stack([row.uniforms[min(len(row.ids), len(row.uniforms) - 1)] for row in rows])
        tokens = inverse_cdf(allowed(log_probs, settings), uniforms)
    return tokens.tolist(), log_probs.gather(-1, tokens[:, None]).squeeze(-1).tolist()


def allowed(log_probs: torch.Tensor, settings: SamplingSettings) -> torch.Tensor:
    """Token probabilities [b, V] after top-k and top-p: float64, not renormalised, 0 for tokens that are ruled out."""
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
    """Sample one token per row, [b]: the first whose cumulative probability exceeds uniform × total."""
    cumulative = probabilities.cumsum(-1)
    targets = uniforms[:, None] * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, targets, right=True).squeeze(-1)
    # rounding may point past the last possible token
    last = probabilities.shape[-1] - 1 - (probabilities.flip(-1) > 0).int().argmax(-1)
    return torch.minimum(tokens, last)


Q = TypeVar("Q")
A = TypeVar("A")

Early = Callable[[int, A], None]
"""Takes (place in the wave, answer) of a question that is answered before its wave ends."""


class Waves(Generic[Q, A]):
    """Batches questions that are asked at the same time into waves of at most `size`, answered one wave at a time.

    `answer(questions, early)` runs in a thread and returns one answer per question, in order. An exception returned in
    place of an answer is raised for that question alone; one that `answer` raises, for the whole wave.
    """

    def __init__(self, answer: Callable[[list[Q], Early[A]], Sequence[A | Exception]], size: int, name: str) -> None:
        self._answer = answer
        self._size = size
        self._waiting: list[tuple[Q, asyncio.Future[A]]] = []
        self._pump: asyncio.Task[None] | None = None
        self._worker = ThreadPoolExecutor(1, thread_name_prefix=name)

    async def ask(self, question: Q) -> A:
        """Ask one question as part of the next wave, and return its answer."""
        if asyncio.get_running_loop() is not runtime.loop():  # a caller's own loop: the queue lives in ours
            there = asyncio.run_coroutine_threadsafe(self.ask(question), runtime.loop())
            return await asyncio.wrap_future(there)
        future: asyncio.Future[A] = asyncio.get_running_loop().create_future()
        self._waiting.append((question, future))
        if self._pump is None or self._pump.done():
            self._pump = asyncio.create_task(self._run())
        return await future

    async def _run(self) -> None:
        await asyncio.sleep(0)  # let everybody who is ready ask first
        loop = asyncio.get_running_loop()
        while self._waiting:
            # what was given up takes no place in a wave: a cell run again gets the very waves of the first time
            asked = [one for one in self._waiting if not one[1].done()]
            wave, self._waiting = asked[: self._size], asked[self._size :]
            if not wave:
                continue
            questions, futures = [question for question, _ in wave], [future for _, future in wave]

            def early(place: int, answer: A, futures: Sequence[asyncio.Future[A]] = tuple(futures)) -> None:
                loop.call_soon_threadsafe(_give, futures[place], answer)

            try:
                answers = await loop.run_in_executor(self._worker, self._wave, questions, futures, early)
            except BaseException as error:
                for future in futures:
                    _give(future, error)
                if not isinstance(error, Exception):
                    raise
                continue
            for future, answer in zip(futures, answers, strict=True):
                _give(future, answer)

    def _wave(
        self, questions: list[Q], futures: Sequence[asyncio.Future[A]], early: Early[A]
    ) -> Sequence[A | Exception]:
        """In the thread: one wave, stopped at its next safe place when nobody waits for it any more."""
        with runtime.unless(lambda: all(future.done() for future in futures)):
            return self._answer(questions, early)


def _give(future: asyncio.Future[A], answer: A | BaseException) -> None:
    if future.done():  # answered early, or given up
        return
    if isinstance(answer, BaseException):
        future.set_exception(answer)
    else:
        future.set_result(answer)
