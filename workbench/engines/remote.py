"""A vLLM or SGLang server started elsewhere, behind the Sampler protocol: token ids in, token ids and log-probs out.

Nothing about the server is taken for granted: which kind it is, which model it has, whether it cuts texts into the same
tokens, whether its log-probs are those that a trainer computes and its seeds hold is asked before the first sample. What it
cannot do exactly is refused. Weights are pushed where it lets them (`weights="vllm"`, `"sglang"`); each row carries the
version of the last push that succeeded, and after one that failed nothing is sampled until the next.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from workbench import background
from workbench.engines import lora
from workbench.engines.loading import resolve
from workbench.engines.protocol import Request, Sample, SamplingSettings
from workbench.engines.remote_dialects import SGLANG, Asked, Reply, checked
from workbench.engines.remote_probe import Findings, examine
from workbench.engines.remote_server import About, about, same_tokens
from workbench.engines.remote_settings import RemoteSettings, authorization, base_of
from workbench.engines.remote_weights import UNTOUCHED, Pusher
from workbench.engines.vllm_served import VllmSettings, tokenizer_of
from workbench.engines.weights import weights_of
from workbench.errors import EngineError, Interrupted, message
from workbench.http_client import Client, Refused, Unreachable

T = TypeVar("T")
log = logging.getLogger("workbench")
_LOOK_SECONDS = 0.2
_PUSH_AGAIN = "push weights again (a pair does so by itself)"


class RemoteSampler:
    """A Sampler behind HTTP; made by `engines.remote`. See `engines.protocol` and `engines.paired`."""

    def __init__(self, url: str, folder: str | Path, settings: RemoteSettings, *, path: str, **switches: Any) -> None:
        self._folder, self.path = folder, path
        self.url = base_of(url)
        self.template_switches = switches
        self.version = settings.version
        self.starts = 1
        """How often the server is known to have lost what was pushed, and one; see `engines.paired`."""
        self._settings = settings
        self._headers = authorization(settings.api_key_env)
        self.tokenizer, ends, self._rows = tokenizer_of(
            folder, VllmSettings(trust_remote_code=settings.trust_remote_code)
        )
        self._ends = tuple(sorted(ends))
        self._client = Client(
            attempts=settings.attempts,
            deadline=settings.deadline,
            max_concurrent=settings.max_concurrent,
            headers=self._headers,
        )
        self._pusher: Pusher | None = None
        self._tag: str | None = None
        self._refusal = ""
        self._under_way = 0
        self._idle, self._open = asyncio.Event(), asyncio.Event()
        self._idle.set()
        self._open.set()
        self._turn, self._look = asyncio.Lock(), asyncio.Lock()
        self._looked = 0.0
        with self._named("cannot sample from the server"):
            background.run(self._begin())

    # --- the start --------------------------------------------------------------------------

    async def _begin(self) -> None:
        s, folder, self._refusal = self._settings, self._folder, ""
        self._about: About = await about(self._client, self.url, folder, s)
        if s.weights is not None:
            if s.weights != self._about.dialect.kind:
                raise EngineError(message("weights", expected=f"{self._about.dialect.kind!r}, which serves there, or None", found=s.weights))  # fmt: skip
            self._pusher = Pusher(self.url, s.weights, Path(folder), s, self._headers)
            try:
                await self._pusher.prepare()
            except (Refused, Unreachable) as error:
                do = "start it as engines.server_command(model, extension_folder) says, or pass weights=None"
                raise EngineError(message("weights cannot be pushed to the server", found=self._plain(error), do=do)) from None  # fmt: skip
        prompts = await same_tokens(self._client, self.url, self.tokenizer, self._about, self._probe, s.ask_seconds)
        self._findings: Findings = await examine(self._probe, prompts)
        if not self._findings.seeded:
            do = ": start SGLang with --enable-deterministic-inference" if self._about.dialect is SGLANG else ""
            log.warning("%s: its samples do not follow their seeds, so that no step can be repeated%s", self, do)
        if self._pusher is not None:
            self._tag = await self._pusher.tag() or (await self._probe(prompts[0], SamplingSettings(max_tokens=1), 0, 0)).tag  # fmt: skip
            if self._tag not in (None, UNTOUCHED):
                self._refusal = f"the server's weights are not its model's, somebody pushed {self._tag!r}"

    async def _probe(self, ids: tuple[int, ...], settings: SamplingSettings, seed: int, tops: int) -> Reply:
        asked = Asked(self._about.name, ids, settings, seed, self._ends, tops)
        return await self._asked(asked, min(self._settings.ask_seconds * 2, self._settings.timeout))

    # --- Sampler ----------------------------------------------------------------------------

    async def sample(self, request: Request) -> Sample:
        """One response; the server batches requests of one time.

        Raises `EngineError` for what the server refuses, in its own words, for a server that gives no usable reply in
        its attempts and time, and after a push that failed; `Interrupted` where the work is asked to stop.
        """
        background.check()
        self._check(request)
        if asyncio.get_running_loop() is not background.loop():  # the gate before a push belongs to one loop
            there = asyncio.run_coroutine_threadsafe(self.sample(request), background.loop())
            return await asyncio.wrap_future(there)
        with self._named("no response"):
            return await _unless_interrupted(self._sample(request))

    def sample_many(self, requests: Sequence[Request]) -> list[Sample]:
        """All responses, in order: the synchronous door."""
        return background.run_all(self.sample, requests)

    async def _sample(self, request: Request) -> Sample:
        while not self._open.is_set():
            await self._open.wait()
        if self._refusal:
            raise EngineError(message(self._refusal, do=_PUSH_AGAIN))
        version, tag = self.version, self._tag
        self._under_way += 1
        self._idle.clear()
        try:
            longest = self.max_length - len(request.ids)
            settings = replace(request.settings, max_tokens=min(request.settings.max_tokens, longest))
            asked = Asked(self._about.name, request.ids, settings, request.seed, self._ends)
            reply = await self._asked(asked, self._settings.timeout)
            if tag is not None:
                await self._held_weights(reply, tag)
        finally:
            self._under_way -= 1
            if not self._under_way:
                self._idle.set()
        return Sample(reply.ids, reply.log_probs, reply.finish_reason, version)

    async def _asked(self, asked: Asked, timeout: float) -> Reply:
        dialect = self._about.dialect

        def read(reply: Any) -> Reply:
            return checked(dialect.read(reply, asked), asked, self._rows)

        return await self._client.post(f"{self.url}{dialect.path}", dialect.body(asked), timeout=timeout, read=read)

    async def _held_weights(self, reply: Reply, tag: str) -> None:
        """Raises `EngineError` where the server was started again since the push, or another pushed: the row is nobody's."""
        found = reply.tag
        if found is None and self._pusher is not None:
            arrived = time.monotonic()
            async with self._look:  # one look answers for all that arrived before it
                if self._looked < arrived:
                    began = time.monotonic()
                    if await self._pusher.tag() in (None, tag):
                        self._looked = began
                        return
                    found = "other"
        if found is not None and found != tag:
            if not self._refusal:
                self._refusal = (
                    "the server no longer has the weights that were pushed: it was started again, or another pushed"
                )
                self.starts += 1
            raise EngineError(message(self._refusal, do=_PUSH_AGAIN))

    def _check(self, request: Request) -> None:
        s, found = request.settings, self._findings
        wrong = [token for token in request.ids if not 0 <= token < self._rows]
        if wrong:
            raise EngineError(message(f"token id {wrong[0]} in a prompt", expected=f"0 to {self._rows - 1}"))
        if not 0 < len(request.ids) < self.max_length:
            expected = f"1 to {self.max_length - 1} tokens, the server's longest less one"
            raise EngineError(message("a prompt for the server", expected=expected, found=len(request.ids)))
        coldest, hottest = self._about.dialect.coldest, self._about.dialect.hottest
        if s.temperature and not coldest <= s.temperature <= hottest:
            expected = f"0, or {coldest:g} to {hottest:g}, as the server takes it"
            raise EngineError(message("temperature", expected=expected, found=s.temperature))
        if s.temperature not in (0, 1) and not found.follows_temperature:
            do = f"sample at temperature 1, or start the server with {self._about.dialect.remedy}"
            raise EngineError(message(f"temperature {s.temperature:g}: the server's log-probs are those of temperature 1", do=do))  # fmt: skip
        if (
            s.top_k == 1 and s.temperature not in (0, 1) and self._about.dialect is SGLANG
        ):  # greedy there, at temperature 1
            raise EngineError(message("top_k=1 at another temperature than 1, of SGLang", do="pass temperature=0"))
        if (s.top_p < 1 or s.top_k > 0) and not found.before_filters:
            do = "sample without, or start a vLLM as engines.server_command says, and pass weights='vllm'"
            raise EngineError(message("top_p and top_k: the server does not give the log-probs before them, which a trainer needs", do=do))  # fmt: skip

    # --- weights ----------------------------------------------------------------------------

    @property
    def stale(self) -> bool:
        """Whether rows older than the learner's weights were agreed to, and by how much (`max_staleness`)."""
        return self._pusher is None

    def check_paired(self) -> None:
        """Raises `EngineError` where a learner's rows could not be written by its weights, and nobody said how far they may be."""
        if self._pusher is None and self._settings.max_staleness is None:
            raise EngineError(
                message(
                    f"a learner beside {self!r}, whose weights never change",
                    expected="weights='vllm' or 'sglang', or max_staleness, how many updates behind its rows may be written",
                )
            )

    def load_weights(self, weights: Mapping[str, torch.Tensor], version: int) -> float:
        """Put all weights of a model, by their Hugging Face names, in the place of the server's; the seconds that it took.

        What was asked before is answered by the old weights, and waited for; what is asked after, by the new ones, which
        are `version`. With `weights=None` nothing moves: rows keep their version, up to `max_staleness` behind this one.
        """
        began = time.perf_counter()
        if self._pusher is None:
            self.check_paired()
            behind, allowed = version - self.version, self._settings.max_staleness or 0
            if abs(behind) > allowed:
                found = f"{behind} updates from the server's version {self.version}"
                raise EngineError(message("the learner is too far from a server whose weights never change", expected=f"at most {allowed}", found=found))  # fmt: skip
            return 0.0
        what = "the push of weights failed; the server is not sampled from until one succeeds"
        with self._named(what), self._pusher.written(weights) as path:
            background.run(self._push(self._pusher, path, version))
        return time.perf_counter() - began

    async def _push(self, pusher: Pusher, path: str, version: int) -> None:
        async with self._turn:
            self._open.clear()
            try:
                await self._idle.wait()
                self._refusal, self._tag = "the last push of weights failed", None
                tag = f"{uuid.uuid4().hex[:12]}:{version}"
                await pusher.push(path, tag)
                self._refusal, self._tag, self.version = "", tag, version
            finally:
                self._open.set()

    def sync(self, learner: Any) -> float:
        """The learner's weights and version, adapters merged; the seconds that it took."""
        return self.load_weights(weights_of(learner), learner.version)

    def restart(self) -> None:
        """The server was started again, elsewhere: ask it afresh. What was pushed to it is lost, which a pair makes good."""
        with self._named("cannot sample from the server"):
            background.run(self._begin())
        self.version = self._settings.version
        self.starts += 1

    # --- words ------------------------------------------------------------------------------

    @property
    def max_length(self) -> int:
        """Longest prompt and response together, in tokens."""
        return self._about.max_length

    def describe(self) -> dict[str, Any]:
        """Path, server, settings and what was found out, for a run's record; no key."""
        found = {name: getattr(self._findings, name) for name in ("follows_temperature", "before_filters", "seeded")}
        where = {"url": self.url, "kind": self._about.dialect.kind, "server": self._about.version, "served": self._about.name}  # fmt: skip
        return {"path": self.path, **self._settings.to_dict(), **where, "max_model_len": self.max_length, **found}

    def _plain(self, error: Exception) -> str:
        """An error's words without the key, which a server may have echoed."""
        words = str(error)
        for value in self._headers.values():
            words = words.replace(value, "…").replace(value.removeprefix("Bearer "), "…")
        return words

    @contextmanager
    def _named(self, what: str) -> Iterator[None]:
        try:
            yield
        except (Refused, Unreachable) as error:
            raise EngineError(message(what, found=f"{self._plain(error)} ({self.url})")) from None

    def __repr__(self) -> str:
        known = getattr(self, "_about", None)
        kind = f"{known.dialect.kind} {known.version}, " if known is not None else ""
        how = "never change" if self._pusher is None else "are pushed"
        return f"RemoteSampler({self.path!r}: {kind}{self.url}, version {self.version}, its weights {how})"


async def _unless_interrupted(work: Coroutine[Any, Any, T] | Awaitable[T]) -> T:
    """The work's result; when this process is asked to stop, or the caller is, the server is told by a closed connection."""
    task = asyncio.ensure_future(work)
    try:
        while not (await asyncio.wait([task], timeout=_LOOK_SECONDS))[0]:
            background.check()
        return task.result()
    except (asyncio.CancelledError, Interrupted):
        task.cancel()
        await asyncio.wait([task])
        raise


def remote(url: str, model: str | Path, *, template_switches: Any = None, **settings: Any) -> RemoteSampler:
    """A server's model as a sampler: `remote("http://host:8000", "data/tiny-arith", weights="vllm")`.

    `model` is the same model here, as for `engines.local`: its tokenizer is used, and compared with the server's. Settings:
    `RemoteSettings`; unknown names are refused. As a judge: `engines.chat(remote(...))`. Raises `EngineError` where the
    server is away, is neither vLLM nor SGLang, has another model or tokenizer, or answers with numbers that cannot be.
    """
    chosen = RemoteSettings.from_parameters(settings)
    folder = resolve(model)
    if lora.base_of(Path(folder)) is not None:
        raise EngineError(message(f"{str(model)!r} is an adapter", expected="a whole model", do="name its base"))
    return RemoteSampler(url, folder, chosen, path=str(model), **(template_switches or {}))
