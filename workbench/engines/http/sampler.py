"""A vLLM or SGLang server that was started elsewhere, as a sampler: token ids in, token ids and log-probs out.

Nothing about the server is assumed. Before the first sample it is asked which kind it is and which model it has, and probed
whether its tokens are ours, its log-probs those of a trainer, and its seeds repeatable. What it cannot do exactly is refused.
With `weights="vllm"` or `"sglang"` weights are pushed to it; each row carries the version of the last push that succeeded, and
after one that failed nothing is sampled until the next.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch

from workbench.base import runtime
from workbench.base.config import shows_settings
from workbench.base.errors import EngineError
from workbench.base.http import Client, Refused, Unreachable
from workbench.engines.http import server
from workbench.engines.http.server import SGLANG, VLLM, About, ProbeFindings, RemoteSettings, ServerReply, checked
from workbench.engines.local_engine import lora
from workbench.engines.local_engine.loading import resolve, write_to
from workbench.engines.pausing import NO_PROMPT_LOG_PROBS, PUSH_AGAIN, PUSH_FAILED, Pausing, ServedTeacher
from workbench.engines.protocol import Request, Sample, SamplingSettings, new_id
from workbench.engines.vllm_server.engine import check_prompt, tokenizer_of
from workbench.engines.weights import machine

log = logging.getLogger("workbench")
_HEAD, _EMBEDDINGS = "lm_head.weight", "model.embed_tokens.weight"
UNTOUCHED = "default"
"""The servers' name for weights that nobody pushed."""


class RemoteSampler(Pausing):
    """A sampler that is a vLLM or SGLang server behind HTTP. Made by `engines.remote`; pair it by `engines.paired`.

    To take weights, a vLLM server needs its development endpoints and workbench's worker extension (start it by
    `engines.server_command`). An SGLang server needs nothing, because each has `/update_weights_from_disk`.
    """

    def __init__(self, url: str, folder: str | Path, settings: RemoteSettings, *, path: str, **switches: Any) -> None:
        super().__init__()
        self._folder, self.path, self._settings, s = folder, path, settings, settings
        self.url = server.base_of(url)
        if s.weights and s.weights_folder is None and urlsplit(self.url).hostname not in server.HERE:
            expected = "weights_folder, a folder that both machines see under one path"
            raise EngineError(f"cannot push weights to {self.url}, another machine", expected=expected, do="pass one")
        self.template_switches = switches
        self.version = s.version
        self.starts = 1
        """One more than the times that the server is known to have lost the weights that were pushed; see `engines.paired`."""
        self._headers = key = server.authorization(s.api_key_env)
        self.tokenizer, ends, self._rows = tokenizer_of(folder, s.trust_remote_code)
        self._ends = tuple(sorted(ends))
        self._client = Client(attempts=s.attempts, deadline=s.deadline, max_concurrent=s.max_concurrent, headers=key)
        # no second attempt: what fails half-way must be pushed again as a whole, by the caller
        self._pusher = Client(attempts=1, deadline=s.push_seconds, max_concurrent=4, headers=key)
        self._tag: str | None = None
        self._look = asyncio.Lock()
        self._looked = 0.0
        with self._as_engine_errors("cannot sample from the server"):
            runtime.run(self._begin())

    # --- the start --------------------------------------------------------------------------

    async def _begin(self) -> None:
        s, self._refusal, self._exact = self._settings, "", False
        self._about: About = await server.about(self._client, self.url, self._folder, s)
        kind = self._about.dialect.kind
        if s.weights not in (None, kind):
            raise EngineError(f"weights={s.weights!r}", expected=f"{kind!r}, the kind of the server, or None")
        if s.weights == "vllm":
            await self._prepare()
        prompts = await server.same_tokens(
            self._client, self.url, self.tokenizer, self._about, self._probe, s.ask_seconds
        )
        self._findings: ProbeFindings = await server.examine(self._probe, prompts)
        if not self._findings.seeded:
            do = ": start SGLang with --enable-deterministic-inference" if self._about.dialect is SGLANG else ""
            log.warning("%s: its samples do not follow their seeds, so that no step can be repeated%s", self, do)
        if s.weights is not None:
            one = Request(prompts[0], SamplingSettings(max_tokens=1), 0)
            self._tag = await self._weights_tag() if kind == "vllm" else (await self._probe(one, 0)).tag
            if self._tag not in (None, UNTOUCHED):
                self._refusal = f"the server no longer has its model's own weights: somebody pushed {self._tag!r}"

    async def _prepare(self) -> None:
        """Prepare a vLLM server for pushes of weights, and for log-probs before anything limits or penalises the choice of
        tokens. Raises `EngineError` where it cannot be prepared."""
        try:
            if (await self._get("/is_paused"))["is_paused"]:
                found = "a push that failed half-way, or one that is still under way"
                do = "push again from the process that pushed, or restart the server"
                raise EngineError("the server is paused", found=found, do=do)
            prepared = {"method": "workbench_prepare"}
            self._exact = all(await self._post("/collective_rpc", prepared, lambda reply: reply["results"]))
        except (Refused, Unreachable) as error:
            do = "start it by the command of engines.server_command(model, extension_folder), or pass weights=None"
            raise EngineError("weights cannot be pushed to the server", found=self._without_key(error), do=do) from None

    async def _probe(self, request: Request, tops: int) -> ServerReply:
        return await self._reply_to(request, tops, min(self._settings.ask_seconds * 2, self._settings.timeout))

    # --- Sampler ----------------------------------------------------------------------------

    async def _answered(self, request: Request) -> Sample:
        version, tag = self.version, self._tag
        longest = self.max_length - len(request.ids)
        settings = request.settings.within(longest)
        with self._as_engine_errors("no response from the server"):
            reply = await self._reply_to(replace(request, settings=settings), request.tops, self._settings.timeout)
            if tag is not None:
                await self._check_weights(reply, tag)
        return Sample(reply.ids, reply.log_probs, reply.finish_reason, version, tops=reply.tops)

    async def _reply_to(self, request: Request, tops: int, timeout: float) -> ServerReply:
        dialect = self._about.dialect

        def read(reply: Any) -> ServerReply:
            return checked(dialect.read(reply, request, tops), request, tops, self._rows)

        body = dialect.body(request, self._about.name, self._ends, tops)
        return await self._client.post(f"{self.url}{dialect.path}", body, timeout=timeout, read=read)

    async def _check_weights(self, reply: ServerReply, tag: str) -> None:
        """Raise `EngineError` where the server no longer has the weights that this process pushed: it was restarted, or
        another client pushed."""
        served = reply.tag
        if served is None and self._about.dialect is VLLM:
            arrived = time.monotonic()
            async with self._look:  # one question is enough for all rows that arrived before it
                if self._looked < arrived:
                    began = time.monotonic()
                    served = await self._weights_tag()
                    if served == tag:
                        self._looked = began
        if served is not None and served != tag:
            if not self._refusal:
                why = "it was restarted, or another client pushed"
                self._refusal = f"the server no longer has the weights that were pushed: {why}"
                self.starts += 1
            raise EngineError(self._refusal, do=PUSH_AGAIN)

    def _check(self, request: Request) -> None:
        s, findings, dialect = request.settings, self._findings, self._about.dialect
        check_prompt(request.ids, self._rows, self.max_length, "the server", "its longest sequence", s.stop_token_ids)
        if s.temperature and not dialect.coldest <= s.temperature <= dialect.hottest:
            expected = f"0, or {dialect.coldest:g} to {dialect.hottest:g}, which the server can do"
            raise EngineError("the sampling temperature", expected=expected, found=s.temperature)
        warm = s.temperature not in (0, 1)
        if warm and not findings.follows_temperature:
            what = f"temperature {s.temperature:g}: the server's log-probs are those of temperature 1"
            raise EngineError(what, do=f"sample at temperature 1, or start the server with {dialect.remedy}")
        if warm and s.top_k == 1 and dialect is SGLANG:  # which is then greedy, with log-probs of temperature 1
            what = "SGLang cannot sample with top_k=1 at a temperature other than 1"
            raise EngineError(what, do="for greedy decoding pass temperature=0")
        if s.alters and not (dialect is VLLM and (self._exact or not findings.follows_temperature)):
            what = "repetition_penalty and min_tokens: the server returns only log-probs after them, and training needs those before"
            do = "leave them out, or start vLLM by engines.server_command and pass weights='vllm'"
            raise EngineError(what, do=do)
        if s.filters and not findings.before_filters:
            why = "the server returns only log-probs after them, and training needs those before"
            if findings.before_filters is None:
                why = "whether the server returns the log-probs before them could not be told: the model was too sure of the probes"
            what = f"top_p, top_k and min_p: {why}"
            do = "pass top_p=1, top_k=-1 and min_p=0, or start vLLM by engines.server_command and pass weights='vllm'"
            raise EngineError(what, do=do)

    # --- weights ----------------------------------------------------------------------------

    @property
    def stale(self) -> bool:
        """Whether rows may be sampled with older weights than the learner's (`max_staleness`): True where weights are
        never pushed."""
        return self._settings.weights is None

    def check_paired(self) -> None:
        """Raise `EngineError` where weights are never pushed and no `max_staleness` allows that."""
        if self.stale and self._settings.max_staleness is None:
            expected = "weights='vllm' or 'sglang', or max_staleness=N, the updates by which its rows may lag behind"
            raise EngineError(f"cannot pair a learner with {self!r}", expected=expected, found="neither")

    def receives(self) -> dict[str, Any] | None:
        """Describe where the server is and what it takes (see `WeightReceiver.receives`); None for SGLang, and where
        weights are never pushed."""
        if self.stale or self._about.dialect is not VLLM:
            return None
        here = urlsplit(self.url).hostname in server.HERE and self._settings.weights_folder is None
        where = {"machines": [machine() if here else self.url], "pids": [self.url], "devices": [], "processes": 0}
        takes = {"dtype": self._settings.weights_dtype, "split": False, "adapter_rank": 0}
        return {**where, **takes, "folder": str(self._folder)}

    def load_weights(self, weights: Mapping[str, torch.Tensor], version: int) -> float:
        """Replace all weights of the server's model, given by their Hugging Face names; returns the seconds taken.

        Requests made before are waited for and answered with the old weights; later ones are answered with the new,
        which are policy `version`. With `weights=None` nothing is pushed: rows keep the server's version, which may be
        up to `max_staleness` updates behind. Raises `EngineError` where the push fails, or where the learner is further
        ahead than that.
        """
        if self.receives() is not None:
            return super().load_weights(weights, version)
        began = time.perf_counter()
        if self.stale:
            self.check_paired()
            behind, allowed = version - self.version, self._settings.max_staleness or 0
            if abs(behind) > allowed:
                what = "the learner is too far from a server whose weights never change"
                found = f"{behind} updates from the server's version {self.version}"
                raise EngineError(what, expected=f"at most {allowed} updates (max_staleness)", found=found)
            return 0.0
        self.check_whole({name: one.shape for name, one in weights.items()})
        with self._as_engine_errors(PUSH_FAILED), self._folder_of(weights) as path:
            runtime.run(self._sglang(path, version))
        return time.perf_counter() - began

    async def _sglang(self, path: str, version: int) -> None:
        async with self._paused():
            # it waits for the requests that are out, and drops its cache
            body = {"model_path": path, "weight_version": (tag := _tag(version)), "flush_cache": True}
            await self._post("/update_weights_from_disk", body, _successful)
            self._tag = tag
            self._serves(version)

    # a vLLM server takes buckets; one that was paused stays so until a push succeeds, since a request to half of a model would
    # end it for good

    async def _step(self, step: str, *arguments: Any) -> Any:
        body = {"method": f"workbench_{step}", "args": arguments, "timeout": self._settings.push_seconds}
        with self._as_engine_errors(PUSH_FAILED):
            if step == "begin":
                await self._post("/pause?mode=wait")
            return await self._post("/collective_rpc", body, lambda reply: reply["results"])

    async def _serve(self, version: int) -> None:
        tag = _tag(version)
        with self._as_engine_errors(PUSH_FAILED):
            await self._post("/reset_prefix_cache", None, _successful)
            await self._post("/update_weight_version", {"new_version": tag})
            await self._post("/resume")
        self._tag = tag

    @contextmanager
    def _readable(self, place: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        if self._settings.weights_folder is None or "data" not in place:
            with super()._readable(place) as there:
                yield there
            return
        with self._shared_folder() as folder:
            (folder / "bucket").write_bytes(place["data"].numpy().tobytes())
            yield {"file": str(folder / "bucket"), "nbytes": place["nbytes"]}

    @contextmanager
    def _shared_folder(self) -> Iterator[Path]:
        s = self._settings
        if s.weights_folder is not None:
            Path(s.weights_folder).mkdir(parents=True, exist_ok=True)
        kept: dict[str, Any] = {"dir": s.weights_folder, "ignore_cleanup_errors": True}
        with tempfile.TemporaryDirectory(prefix="workbench-weights-", **kept) as name:
            Path(name).chmod(0o755)  # so that a server of another user can read it
            yield Path(name)

    @contextmanager
    def _folder_of(self, weights: Mapping[str, torch.Tensor]) -> Iterator[str]:
        """Context manager: writes the weights to a model folder, which SGLang loads them from, and yields its path."""
        s = self._settings
        dtype = getattr(torch, s.weights_dtype) if s.weights_dtype else None
        with self._shared_folder() as folder:
            weights = self._as_folder(folder, weights)
            with (folder / "model.safetensors").open("wb") as file:
                write_to(file, weights, dtype)
                file.flush()
                os.fsync(file.fileno())  # in a network folder other machines see it only then
            yield str(folder)

    def _as_folder(self, folder: Path, weights: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Copy the model's JSON files into the folder and return the weights to store; a tied output layer is left out,
        as in every Hugging Face folder."""
        for one in Path(self._folder).glob("*.json"):
            if not one.name.endswith(".index.json"):
                shutil.copy(one, folder)
        head, embeddings = weights.get(_HEAD), weights.get(_EMBEDDINGS)
        if head is not None and embeddings is not None and torch.equal(head, embeddings):
            return {name: tensor for name, tensor in weights.items() if name != _HEAD}
        return weights

    async def _weights_tag(self) -> str:
        """Ask a vLLM server for the name of its present weights (SGLang tells it in every reply)."""
        return str((await self._get("/weight_info"))["weight_version"])

    async def _get(self, path: str) -> Any:
        return await self._pusher.get(f"{self.url}{path}", timeout=self._settings.ask_seconds)

    async def _post(self, path: str, body: Any = None, read: Any = lambda reply: None) -> Any:
        return await self._pusher.post(f"{self.url}{path}", body, timeout=self._settings.push_seconds, read=read)

    async def _of_prompt(self, ids: Sequence[int], k: int) -> list[dict[int, float]]:
        def read(reply: Any) -> list[dict[int, float]]:
            held = reply["choices"][0]["prompt_logprobs"]
            return [{int(token): float(one["logprob"]) for token, one in (place or {}).items()} for place in held]

        body = {"model": self._about.name, "prompt": list(ids), "max_tokens": 1, "prompt_logprobs": k}
        with self._as_engine_errors(NO_PROMPT_LOG_PROBS):
            url = f"{self.url}{self._about.dialect.path}"
            return await self._client.post(url, body, timeout=self._settings.timeout, read=read)

    def teacher(self) -> ServedTeacher:
        """Return the server's model as a teacher for `recipes.distill`. Raises `EngineError` for a server other than vLLM."""
        if (kind := self._about.dialect.kind) != VLLM.kind:
            raise EngineError("a teacher behind HTTP", expected="a vLLM server", found=f"{kind} at {self.url}")
        return super().teacher()

    def restart(self) -> None:
        """Check and probe the server anew, after it was restarted by somebody else; a pair then pushes its weights
        again."""
        with self._as_engine_errors("cannot sample from the server"):
            runtime.run(self._begin())
        self.version = self._settings.version
        self.starts += 1

    # --- what it is -------------------------------------------------------------------------

    @property
    def max_length(self) -> int:
        """Longest prompt and response together, in tokens."""
        return self._about.max_length

    def describe(self) -> dict[str, Any]:
        """Return path, server, settings and the results of the probes by name, for a run's record; without the API key."""
        known = self._about
        where = {"url": self.url, "kind": known.dialect.kind, "server": known.version, "served": known.name}
        longest = {"max_model_len": known.max_length}
        return {"path": self.path, **self._settings.to_dict(), **where, **longest, **asdict(self._findings)}

    def _without_key(self, error: Exception) -> str:
        """Return an error's text without the API key, which a server may have echoed."""
        words = str(error)
        for value in self._headers.values():
            words = words.replace(value, "…").replace(value.removeprefix("Bearer "), "…")
        return words

    @contextmanager
    def _as_engine_errors(self, what: str) -> Iterator[None]:
        try:
            yield
        except (Refused, Unreachable) as error:
            raise EngineError(what, found=f"{self._without_key(error)} ({self.url})") from None

    def __repr__(self) -> str:
        kind = f"{self._about.dialect.kind} {self._about.version}, "
        how = "never change" if self.stale else "are pushed"
        return f"RemoteSampler({self.path!r}: {kind}{self.url}, version {self.version}, its weights {how})"


def _tag(version: int) -> str:
    """Make a unique name for weights of a policy version, by which a server reports which push it has."""
    return f"{new_id()}:{version}"


@shows_settings(RemoteSettings)
def remote(url: str, model: str | Path, *, template_switches: Any = None, **settings: Any) -> RemoteSampler:
    """Use a running vLLM or SGLang server as a sampler: `remote("http://host:8000", "data/tiny-arith", weights="vllm")`.

    `model` is the server's model as a folder or hub name: its tokenizer is used, and compared with the server's. Settings:
    `RemoteSettings`; unknown names are refused. As a judge: `engines.chat(remote(...))`. Raises `EngineError` where the
    server does not answer, is neither vLLM nor SGLang, has another model or tokenizer, or its log-probs are of no known kind.
    """
    chosen = RemoteSettings.from_parameters(settings)
    folder = resolve(model)
    if lora.base_of(Path(folder)) is not None:
        raise EngineError(f"{str(model)!r} is an adapter", expected="a whole model", do="pass its base model")
    return RemoteSampler(url, folder, chosen, path=str(model), **(template_switches or {}))


def _successful(reply: Any) -> None:
    if not reply["success"]:
        raise ValueError(f"the server reports a failure: {str(reply)[:200]}")
