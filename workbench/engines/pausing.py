"""What samplers in other processes have in common: the fields of a request, and requests that pause while weights are pushed, so that
one version writes each row."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import asdict
from functools import lru_cache
from typing import Any, TypeVar

import torch

from workbench.base import runtime
from workbench.base.activity import recorded
from workbench.base.errors import EngineError
from workbench.dataproto.columns import PIXELS
from workbench.dataproto.core import DataProto
from workbench.engines.generating import Generates
from workbench.engines.local_engine.loading import in_memory, load_model
from workbench.engines.protocol import Request, Sample, SamplingSettings
from workbench.engines.settings import LocalSettings
from workbench.engines.vllm_server.process import Piece
from workbench.engines.weights import Receiving, check_shapes

T = TypeVar("T")
PUSH_FAILED = "the push of weights failed; nothing is sampled until a push succeeds"
_LAST_FAILED = "the last push of weights failed"
NO_PROMPT_LOG_PROBS = "no log-probs from the teacher's vLLM (of up to max_logprobs tokens, and max_model_len in all)"
PUSH_AGAIN = "push weights again: load_weights() does, and engines.paired() before its next sample"


def sampling_fields(s: SamplingSettings, ends: Sequence[int]) -> dict[str, Any]:
    """Build the sampling fields that have the same names in vLLM and SGLang; `ends` are the token ids that end a
    response.

    Fields that a server's own defaults could change are always sent.
    """
    stops = [*(() if s.ignore_eos else ends), *s.stop_token_ids]
    ending = {"stop": list(s.stop), "stop_token_ids": stops, "ignore_eos": s.ignore_eos, "skip_special_tokens": False}
    choice = {"top_p": s.top_p, "min_p": s.min_p, "repetition_penalty": s.repetition_penalty}
    return {"temperature": s.temperature, **choice, **ending}


def vllm_fields(request: Request, ends: Sequence[int]) -> dict[str, Any]:
    """Build the sampling fields of a request to vLLM, by the names of its `SamplingParams`, which its HTTP server uses,
    too."""
    s = request.settings
    limits = {"max_tokens": s.max_tokens, "min_tokens": s.min_tokens}
    numbers = {"top_k": max(s.top_k, 0), **limits, "seed": request.seed}
    return {**sampling_fields(s, ends), **numbers, "include_stop_str_in_output": True}


@lru_cache(maxsize=4)
def _parameters(folder: str, trust: bool) -> dict[str, torch.Tensor]:
    """Return a model's parameters by name as meta tensors (shapes without values); tied ones appear once."""
    return dict(load_model(folder, LocalSettings(device="cpu", trust_remote_code=trust), empty=True).named_parameters())


class Pausing(Receiving, Generates):
    """Base class of samplers whose model runs in another process: vLLM's own process, or a server behind HTTP.

    Requests made before a push of weights are answered with the old weights, and later ones wait for its end. After a
    push that failed they are refused until another one succeeds. A subclass implements how a request is answered, and
    how the steps of a push reach the process.
    """

    version: int
    """Policy version of the weights that are served."""

    def __init__(self) -> None:
        self._refusal = ""
        self._unanswered = 0
        self._idle, self._open = asyncio.Event(), asyncio.Event()
        self._idle.set()
        self._open.set()
        self._turn = asyncio.Lock()
        self._push = AsyncExitStack()

    # --- of a subclass ----------------------------------------------------------------------

    def _check(self, request: Request) -> None:
        """Raise `EngineError` for a request that this sampler cannot answer exactly."""
        raise NotImplementedError

    async def _answered(self, request: Request) -> Sample:
        """Answer a request that was admitted; a subclass implements it."""
        raise NotImplementedError

    async def _of_prompt(self, ids: Sequence[int], k: int) -> list[dict[int, float]]:
        """Answer `prompt_log_probs`; a subclass implements it."""
        raise NotImplementedError

    async def _step(self, step: str, *arguments: Any) -> Any:
        """Call a step of a push (`begin`, `take`, `end`) on each of the model's workers; returns what each returns. A
        subclass implements it."""
        raise NotImplementedError

    async def _serve(self, version: int) -> None:
        """Make the process sample with the weights that were pushed, as policy `version`. A subclass implements it."""
        raise NotImplementedError

    # --- requests ---------------------------------------------------------------------------

    @recorded
    async def sample(self, request: Request) -> Sample:
        """Sample one response; concurrent requests are batched.

        Raises `EngineError` for a request that is refused, that gets no usable answer, or that follows a push that
        failed; `WorkerLost` where vLLM's process dies; `Interrupted` where the work is asked to stop. Requests whose
        caller no longer waits are aborted.
        """
        runtime.check()
        self._check(request)
        return await runtime.unless_interrupted(self._let_in(lambda: self._answered(request)))

    async def prompt_log_probs(self, ids: Sequence[int], k: int) -> list[dict[int, float]]:
        """Return, for each position of a prompt, a dict token id → log-prob in nats, of the prompt's token and of the k
        most probable tokens, from vLLM's raw logits; {} at the first position. Raises `EngineError` where vLLM
        refuses."""
        return await self._let_in(lambda: self._of_prompt(ids, k))

    def teacher(self) -> ServedTeacher:
        """Return the model that is served as a teacher for `recipes.distill`."""
        return ServedTeacher(self)

    async def _let_in(self, answered: Callable[[], Awaitable[T]]) -> T:
        while not self._open.is_set():
            await self._open.wait()
        self._check_serving()
        self._unanswered += 1
        self._idle.clear()
        try:
            return await answered()
        finally:
            self._unanswered -= 1
            if not self._unanswered:
                self._idle.set()

    def _check_serving(self) -> None:
        """Raise `EngineError` where a push has failed, so that there are no weights to sample with."""
        if self._refusal:
            raise EngineError(self._refusal, do=PUSH_AGAIN)

    @asynccontextmanager
    async def _paused(self, refusal: str = _LAST_FAILED) -> AsyncIterator[None]:
        """Context manager: waits for the requests under way and holds back new ones. At its end new requests are
        refused with the text `refusal`, unless weights are served again by then."""
        async with self._turn:
            self._open.clear()
            try:
                await self._idle.wait()
                self._refusal = refusal
                yield
            finally:
                self._open.set()

    def _serves(self, version: int) -> None:
        self._refusal, self.version = "", version

    # --- weights ----------------------------------------------------------------------------

    def check_whole(self: Any, shapes: Mapping[str, Sequence[int]]) -> None:
        """Raise `EngineError` where `shapes` lacks a tensor of the model or has it in another shape.

        vLLM and SGLang would keep the old values of a tensor that a push lacks, without an error.
        """
        wanted = _parameters(str(self._folder), self._settings.trust_remote_code)
        check_shapes("the weights to push", shapes, wanted)

    def begin_weights(self, shapes: Mapping[str, Sequence[int]]) -> None:
        """Begin a push of tensors of these shapes: requests made before are answered first, later ones wait for its
        end."""
        self.check_whole(shapes)
        runtime.run(self._begin_push(list(shapes)))

    async def _begin_push(self, names: list[str]) -> None:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._paused())
            await self._step("begin", names)
            self._push = stack.pop_all()  # the pause ends with the push

    def take_weights(self, pieces: Sequence[Piece], place: Mapping[str, Any]) -> None:
        """Load one bucket of whole tensors: the `pieces` that were written to `place`."""
        self._check_begun()
        with self._readable(place) as there:
            runtime.run(self._step("take", [asdict(piece) for piece in pieces], there))

    def end_weights(self, version: int) -> int:
        """End a push: serve the new weights as policy `version`. Raises `EngineError` where some weights of the model
        were not loaded."""
        self._check_begun()
        runtime.run(self._end_push(version))
        return self.version

    async def _end_push(self, version: int) -> None:
        async with self._push:
            if missing := {name for names in await self._step("end") for name in names}:
                raise EngineError(PUSH_FAILED, found=f"old values in {', '.join(sorted(missing)[:5])}")
            await self._serve(version)
            self._serves(version)

    def cancel_weights(self) -> None:
        """End a push that failed: requests are refused until another push has succeeded."""
        runtime.run(self._push.aclose())

    def _check_begun(self) -> None:
        if not self._turn.locked():
            raise EngineError("a bucket of weights outside of a push", expected="begin_weights() before it")

    @contextmanager
    def _readable(self, place: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Context manager: yields `place` in a form that the model's workers can read; bytes in this process's memory
        are written to a file in memory."""
        if "data" not in place:
            yield dict(place)
            return
        with in_memory(place["data"]) as path:
            yield {"file": path, "nbytes": place["nbytes"]}


class ServedTeacher:
    """The weights that a vLLM has, in its own process or behind HTTP, as a model that scores; made by its `teacher`.

    A pass over B rows is B requests for the log-probs of a prompt. They are those of the unscaled logits, so that the
    temperature must be 1.
    """

    def __init__(self, server: Any) -> None:
        self._server = server
        self.tokenizer, self.template_switches = server.tokenizer, server.template_switches
        self.describe = server.describe

    def compute_log_probs(
        self, batch: DataProto, want: Sequence[str] = ("log_probs",), temperature: float = 1.0
    ) -> dict[str, torch.Tensor]:
        """Score the response tokens of a batch: `log_probs` [B, T] float32. Raises `EngineError` for another output."""
        if tuple(want) != ("log_probs",):
            raise EngineError("want of a teacher in vLLM", expected="log_probs", found=", ".join(want))
        return self.top_log_probs(batch, 0, temperature)

    def top_log_probs(self, batch: DataProto, k: int, temperature: float = 1.0) -> dict[str, torch.Tensor]:
        """Score a batch, with the k likeliest tokens at each place: see `GivesTops`. Raises `EngineError` where vLLM does not
        give as many (its `max_logprobs`, by default 20)."""
        if temperature != 1:
            raise EngineError("temperature of a teacher in vLLM", expected="1, of its raw logits", found=temperature)
        if PIXELS in batch and any(batch[PIXELS]):
            raise EngineError("rows with pictures for a teacher in vLLM", expected="text", found="pictures")
        mask = batch["response_mask"].bool()
        whole = torch.nn.functional.pad(mask, (batch["input_ids"].shape[1] - mask.shape[1], 0))
        questions = []  # of each row its tokens, and the places among them whose log-probs are wanted
        for ids, there, wanted in zip(batch["input_ids"], batch["attention_mask"].bool(), whole, strict=True):
            places = wanted[there].nonzero()[:, 0].tolist()
            questions.append((ids[there][: max(places, default=-1) + 1].tolist(), places))

        async def ask(question: tuple[list[int], list[int]]) -> list[tuple[float, list[tuple[float, int]]]]:
            ids, places = question
            held = await self._server.prompt_log_probs(ids, k) if places else []
            return [(held[place][ids[place]], _likeliest(held[place], k)) for place in places]

        found = [place for row in runtime.run_all(ask, questions) for place in row]
        columns = {"log_probs": torch.zeros(mask.shape)}
        columns["log_probs"][mask] = torch.tensor([value for value, _ in found])
        if k:
            tops = torch.tensor([likeliest for _, likeliest in found], dtype=torch.float64).view(-1, k, 2)
            columns |= {"top_log_probs": torch.zeros(*mask.shape, k), "top_ids": torch.zeros(*mask.shape, k).long()}
            columns["top_log_probs"][mask], columns["top_ids"][mask] = tops[..., 0].float(), tops[..., 1].long()
        return columns

    def __repr__(self) -> str:
        return f"ServedTeacher({self._server!r})"


def _likeliest(values: Mapping[int, float], k: int) -> list[tuple[float, int]]:
    """Return the k likeliest tokens as (log-prob, id), the best first. Raises `EngineError` for fewer."""
    if len(values) < k:
        raise EngineError(NO_PROMPT_LOG_PROBS, expected=f"{k} tokens at a place", found=len(values))
    return sorted(((value, token) for token, value in values.items()), key=lambda one: (-one[0], one[1]))[:k]
