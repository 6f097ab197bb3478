"""What samplers in other processes have in common: the fields of a request, and requests that pause while weights are pushed, so that
one version writes each row."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import asdict
from functools import lru_cache
from typing import Any

import torch

from workbench.base import runtime
from workbench.base.activity import recorded
from workbench.base.errors import EngineError
from workbench.engines.local_engine.loading import in_memory, load_model
from workbench.engines.protocol import Request, Sample, SamplingSettings
from workbench.engines.settings import LocalSettings
from workbench.engines.vllm_server.process import Piece
from workbench.engines.weights import Receiving, check_shapes

PUSH_FAILED = "the push of weights failed; nothing is sampled until a push succeeds"
_LAST_FAILED = "the last push of weights failed"
PUSH_AGAIN = "push weights again: load_weights() does, and engines.paired() before its next sample"


def sampling_fields(s: SamplingSettings, ends: Sequence[int]) -> dict[str, Any]:
    """Sampling fields that have the same names in vLLM and SGLang; `ends` are the ids that end a response. Those that a server's
    own defaults could change are always sent."""
    ending = {"stop": list(s.stop), "stop_token_ids": [] if s.ignore_eos else list(ends), "ignore_eos": s.ignore_eos}
    whole = {"min_p": 0.0, "repetition_penalty": 1.0, "skip_special_tokens": False}
    return {"temperature": s.temperature, "top_p": s.top_p, **ending, **whole}


def vllm_fields(request: Request, ends: Sequence[int]) -> dict[str, Any]:
    """Sampling fields of a request to vLLM, by the names of its `SamplingParams` and of its HTTP server."""
    s = request.settings
    numbers = {"top_k": max(s.top_k, 0), "max_tokens": s.max_tokens, "seed": request.seed}
    return {**sampling_fields(s, ends), **numbers, "include_stop_str_in_output": True}


@lru_cache(maxsize=4)
def _parameters(folder: str, trust: bool) -> dict[str, torch.Tensor]:
    """The model's tensors without their values, tied ones once."""
    return dict(load_model(folder, LocalSettings(device="cpu", trust_remote_code=trust), empty=True).named_parameters())


class Pausing(Receiving):
    """Base class of samplers whose model another process runs: vLLM in a process of ours, a server behind HTTP.

    Requests made before a push are answered by the old weights, later ones wait for its end; after a push that failed they are
    refused until another one succeeds. A subclass says how a request is answered, and how the steps of a push reach the process.
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
        """Raises `EngineError` for a request that cannot be answered exactly."""
        raise NotImplementedError

    async def _answered(self, request: Request) -> Sample:
        """The response to a request that is let in."""
        raise NotImplementedError

    async def _step(self, step: str, *arguments: Any) -> Any:
        """Call a step of a push (`begin`, `take`, `end`) on each of the model's workers; returns what each returns."""
        raise NotImplementedError

    async def _serve(self, version: int) -> None:
        """Make the process answer by the weights that have come, as a policy version."""
        raise NotImplementedError

    # --- requests ---------------------------------------------------------------------------

    @recorded
    async def sample(self, request: Request) -> Sample:
        """Sample one response; concurrent requests are batched.

        Raises `EngineError` for a request that is refused, that gets no usable answer, or that follows a push that failed;
        `WorkerLost` where a process of ours dies; `Interrupted` where the work is asked to stop. What nobody waits for any more
        is aborted.
        """
        runtime.check()
        self._check(request)
        return await runtime.unless_interrupted(self._let_in(request))

    async def _let_in(self, request: Request) -> Sample:
        while not self._open.is_set():
            await self._open.wait()
        self._check_serving()
        self._unanswered += 1
        self._idle.clear()
        try:
            return await self._answered(request)
        finally:
            self._unanswered -= 1
            if not self._unanswered:
                self._idle.set()

    def _check_serving(self) -> None:
        """Raises `EngineError` where no weights are served."""
        if self._refusal:
            raise EngineError(self._refusal, do=PUSH_AGAIN)

    @asynccontextmanager
    async def _paused(self, refusal: str = _LAST_FAILED) -> AsyncIterator[None]:
        """Context manager: waits for the requests that are out, and holds back new ones; those are refused at its end, unless
        weights are served again."""
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
        """Raise `EngineError` where a tensor of the model is not among those of `shapes`, or is there in another shape.

        vLLM and SGLang leave the old values of a tensor that a push lacks, and go on.
        """
        wanted = _parameters(str(self._folder), self._settings.trust_remote_code)
        check_shapes("the weights to push", shapes, wanted)

    def begin_weights(self, shapes: Mapping[str, Sequence[int]]) -> None:
        """Begin a push of tensors of these shapes: requests made before are answered first, later ones wait for the end."""
        self.check_whole(shapes)
        runtime.run(self._begin_push(list(shapes)))

    async def _begin_push(self, names: list[str]) -> None:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._paused())
            await self._step("begin", names)
            self._push = stack.pop_all()  # the pause ends with the push

    def take_weights(self, pieces: Sequence[Piece], place: Mapping[str, Any]) -> None:
        """Load one bucket of whole tensors."""
        self._check_begun()
        with self._readable(place) as there:
            runtime.run(self._step("take", [asdict(piece) for piece in pieces], there))

    def end_weights(self, version: int) -> int:
        """Serve the new weights as a policy version. Raises `EngineError` where weights of the model have not been loaded."""
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
        """End a push that broke off: requests are refused until another one has succeeded."""
        runtime.run(self._push.aclose())

    def _check_begun(self) -> None:
        if not self._turn.locked():
            raise EngineError("a bucket of weights", expected="begin_weights() before it", found="no push")

    @contextmanager
    def _readable(self, place: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Context manager: yields a place that the model's workers can read; bytes of this process are in a file in memory."""
        if "data" not in place:
            yield dict(place)
            return
        with in_memory(place["data"]) as path:
            yield {"file": path, "nbytes": place["nbytes"]}
