"""vLLM as a sampler: prompt ids in, token ids and log-probs out, weights pushed in place; and as a reward model.

vLLM runs in a process of its own (`vllm_server.process`), since in the notebook's it would reset seeds and threads;
`VllmLink` starts it, sends requests, watches it, and leaves nothing of it behind. The log-probs are those that the
trainer computes: after temperature, before top-k and top-p. Nothing of vLLM is imported here, so that another
interpreter can run it (`python=`, or WORKBENCH_VLLM_PYTHON).
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import copy
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch

from workbench.base import runtime
from workbench.base.child import Child, Questions
from workbench.base.config import shows_settings
from workbench.base.distribution import install
from workbench.base.errors import EngineError, SettingError, WorkerLost, boundary, first_line
from workbench.base.progress import working
from workbench.engines.local_engine import lora
from workbench.engines.local_engine.classifier import refusal
from workbench.engines.local_engine.loading import auto_tokenizer, eos_ids_of, resolve
from workbench.engines.pausing import Pausing, vllm_fields
from workbench.engines.protocol import Classified, Closing, Request, Sample
from workbench.engines.settings import VllmSettings, arguments_of, environment_of, on_cpu_of
from workbench.engines.vllm_server import process
from workbench.engines.weights import machine

Answer = Future[dict[str, Any]]
_LOOK_SECONDS = 0.5
_GRACE_SECONDS = 5.0
_LOG_BYTES = 1 << 20
_CAUSE = re.compile(r"(?:^|\s|\])((?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|OutOfMemory)\b: .+)$")
_SHARED = re.compile(r"/dev/shm/(?:psm_|vllm_|sem\.mp-)[^\s/]+")
_REFERS = re.compile(
    r"Engine core initialization failed|EngineCore encountered an issue|Failed core proc|EngineDeadError"
)


class VllmLink:
    """The driver's connection to a process that runs vLLM, with the requests that are not answered yet; ended by
    `close()`. If the process fails, every waiting request raises the error."""

    def __init__(
        self, python: str, environment: Mapping[str, str], first: Mapping[str, Any], *, stall_seconds: float
    ) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="workbench-vllm-"))
        self._stall = stall_seconds
        self._lock = threading.Lock()
        self._asked = Questions()
        self._stoppable: set[int] = set()
        self._listeners: dict[int, Callable[[int], None]] = {}
        self._error: EngineError | None = None
        self._shared: set[Path] = set()
        self._closed = False
        self._heard = time.monotonic()
        self._first, self.ready = self._asked.open()
        # its own name in a folder of its own: see `process`
        file = shutil.copy(process.__file__, self.folder / f"{process.MODULE}.py")
        paths = [str(self.folder), *filter(None, [environment.get("PYTHONPATH", "")])]
        env = {**environment, "PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1"}
        try:
            self._child = Child(file, env=env, python=python, folder=self.folder)
        except OSError as cause:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise EngineError(f"cannot start the interpreter {python!r} for vLLM", found=cause) from cause
        self.pid = self._child.pid
        self._send(first)
        threading.Thread(target=self._listen, name="workbench-vllm", daemon=True).start()

    # --- asking -----------------------------------------------------------------------------

    def check(self) -> None:
        """Raise `EngineError` where the connection is closed, and `WorkerLost` where the process has ended."""
        if self._closed:
            raise EngineError("this vLLM engine is closed", do="call its restart(), or make a new one")
        if self._error is not None:
            raise copy.copy(self._error)  # each raise adds its traceback to the error

    def ask(
        self, op: str, *, stoppable: bool = False, listen: Callable[[int], None] | None = None, **fields: Any
    ) -> Answer:
        """Send a request and return a future of its answer. Cancelling the future of a `stoppable` request aborts it in
        vLLM. `listen` is called with each token on the way, in a thread."""
        with self._lock:
            self.check()
            number, answer = self._asked.open()
            if stoppable:
                if not self._under_way():
                    self._heard = time.monotonic()
                self._stoppable.add(number)
                answer.add_done_callback(lambda done: self._abort(self._asked.given_up()) if done.cancelled() else None)
            if listen is not None:
                self._listeners[number] = listen
                answer.add_done_callback(lambda done: self._listeners.pop(number))
        self._send({"op": op, "id": number, "streams": listen is not None, **fields})
        return answer

    def _under_way(self) -> set[int]:
        """Return the numbers of the requests that are being sampled."""
        self._stoppable &= self._asked.numbers()
        return set(self._stoppable)

    def _abort(self, numbers: Collection[int]) -> None:
        self._send({"op": "abort", "id": 0, "ids": list(numbers)})

    def _send(self, body: Mapping[str, Any]) -> None:
        with contextlib.suppress(OSError):  # the listener reports a process that has gone, with its reason
            self._child.line.send(json.dumps(body).encode(), seconds=self._stall)

    # --- listening --------------------------------------------------------------------------

    def _listen(self) -> None:
        """Run in a thread until the process ends: deliver its answers, and end it where it is silent for too long."""
        while True:
            message: dict[str, Any] = {"op": "nothing"}
            try:
                if self._child.line.ready(_LOOK_SECONDS):
                    message = json.loads(self._child.line.receive() or b'{"op": "end"}')
                    self._heard = time.monotonic()
                elif self._child.how(0):
                    message = {"op": "end"}
            except (OSError, ValueError):  # closed by another thread
                message = {"op": "end"}
            if not self.ready.done():
                self._note_shared()
            if message["op"] == "end":
                return self._fail(self._why_it_ended())
            if message["op"] == "failed":
                return self._fail(self._why_it_failed(message))
            if message["op"] in ("ready", "answer"):
                self._asked.answer(message.get("id", self._first), message)
            elif message["op"] == "tokens":
                listen = self._listeners.get(message["id"])
                for token in message["ids"]:
                    if listen is not None:
                        listen(token)
            elif message["op"] == "refused":
                self._asked.answer(message["id"], EngineError("vLLM refused the request", found=message["error"]))
            with self._lock:
                waiting = bool(self._under_way())
            if waiting and time.monotonic() - self._heard > self._stall:
                how = f"has not answered for {self._stall:g} s"
                return self._fail(WorkerLost(f"vLLM's process {self.pid} {how}", do=_AGAIN, exit=how, log=self.tail()))

    def _fail(self, error: EngineError) -> None:
        """Raise the error for all waiting requests and for all later ones, and end the process."""
        with self._lock:
            self._error = error
            left = self._asked.numbers()
        self._kill()  # first: who gets the error may look for what is left
        self._asked.fail(error, left)

    # --- why --------------------------------------------------------------------------------

    def tail(self, lines: int = 20) -> str:
        """Return the last lines of the process's log."""
        return "\n".join(self._child.tail(_LOG_BYTES).splitlines()[-lines:])

    def _why_it_failed(self, heard: Mapping[str, Any]) -> EngineError:
        cause = heard["error"]
        if heard["kind"] in ("ImportError", "ModuleNotFoundError") and "vllm" in cause:
            return EngineError("vLLM is not installed", found=cause, do=install("vllm"))
        what = "vLLM failed" if self.ready.done() else "vLLM did not start"
        if _REFERS.search(cause):  # the engine's process gives the cause in the log only
            cause = cause_in(self._child.tail(_LOG_BYTES)) or cause
        return EngineError(what, found=cause, do=_AGAIN if self.ready.done() else None)

    def _why_it_ended(self) -> EngineError:
        how, tail = self._child.how(_GRACE_SECONDS), self.tail()
        by = "was ended by" if how.startswith(("SIG", "signal")) else "ended with"
        what = f"{by} {how}" if how else "closed its connection"
        when = "" if self.ready.done() else " while it started"
        log = f"its log ends:\n{tail}\n" if tail else "an empty log"
        return WorkerLost(f"vLLM's process {self.pid} {what}{when}", found=log, do=_AGAIN, exit=how or what, log=tail)

    # --- ending -----------------------------------------------------------------------------

    def _kill(self) -> None:
        """End the process and all processes that it started, and remove their shared memory."""
        self._note_shared()
        self._child.close()
        for path in self._shared:
            path.unlink(missing_ok=True)

    def _note_shared(self) -> None:
        """Remember the shared memory files that vLLM's processes use now, because a process that dies leaves them
        behind."""
        if self._child.process.returncode is None:
            self._shared |= _shared_memory(self.pid)

    def close(self) -> None:
        """Ask the process to end, kill it where it does not, and remove its temporary folder."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._note_shared()
        self._send({"op": "stop", "id": 0})
        self._child.how(_GRACE_SECONDS if self.ready.done() else 0)
        self._kill()
        shutil.rmtree(self.folder, ignore_errors=True)


_AGAIN = "call restart() on the engine, or make a new one, and run the stage again"


def _shared_memory(group: int) -> set[Path]:
    """List the shared memory files that vLLM's processes of a process group have open; with several ranks they remain
    even after a clean end."""
    files: set[Path] = set()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended meanwhile, or is not ours
            if int((folder / "stat").read_text().rpartition(")")[2].split()[2]) == group:
                files.update(map(Path, _SHARED.findall((folder / "maps").read_text())))
    return files


def cause_in(log: str) -> str:
    """Find the first error in a log that does not merely refer to another one; empty where there is none."""
    for line in log.splitlines():
        found = _CAUSE.search(line)
        if found and not _REFERS.search(line):
            return found[1].strip()
    return ""


PYTHON_VARIABLE = "WORKBENCH_VLLM_PYTHON"
"""Environment variable that names the interpreter that has vLLM, where it is not this one."""


class Served(Closing):
    """Base class of the vLLM engines: it starts one vLLM process and holds its tokenizer and what the process reports
    about itself."""

    def __init__(self, folder: str | Path, settings: VllmSettings, *, path: str, **arguments: Any) -> None:
        self._folder = folder
        self._settings = settings
        self._arguments = arguments
        self.path = path
        self.starts = 0
        """How often its process was started: one that was started again has lost the weights that were pushed."""
        self._about: Mapping[str, Any] = {}
        self._start()

    def _start(self) -> None:
        """Start vLLM's process, and load the tokenizer meanwhile. Raises `EngineError` where vLLM is not installed or
        does not start."""
        python, s = interpreter(self._settings), self._settings
        if python == sys.executable and not importable(python):
            expected = f"vLLM beside workbench, or in {PYTHON_VARIABLE} the path of a Python that has it"
            raise EngineError("vLLM is not installed", expected=expected, do=install("vllm"))
        first = {"arguments": {**arguments_of(self._folder, s), **self._arguments}, "on_cpu": on_cpu_of(s)}
        env = {**os.environ, **environment_of(self._folder, s)}
        link = VllmLink(python, env, first, stall_seconds=s.stall_seconds)
        try:
            if not hasattr(self, "tokenizer"):
                self.tokenizer, self._eos, self._rows = tokenizer_of(self._folder, s.trust_remote_code)
            self._about = link.ready.result(timeout=s.start_seconds)
        except TimeoutError as cause:
            link.close()
            raise EngineError("vLLM has not started", found=f"no answer in {s.start_seconds:g} s") from cause
        except BaseException:
            link.close()
            raise
        self._link = link
        self.starts += 1
        self.version = 0  # of the weights in the folder
        self._end = weakref.finalize(self, link.close)

    def restart(self) -> None:
        """Start a new process with the weights in the model's folder, whatever state the old one is in."""
        self.close()
        self._start()

    def close(self) -> None:
        """End the process and all processes that it started; may be called twice."""
        self._end()

    @property
    def pid(self) -> int | None:
        """Process id of vLLM's process; None when closed."""
        return self._link.pid if self._end.alive else None

    def log(self, lines: int = 40) -> str:
        """Return the last lines that vLLM's processes wrote to their log."""
        return self._link.tail(lines)

    @property
    def max_length(self) -> int | None:
        """Longest prompt and response together, in tokens."""
        return self._about.get("max_model_len")

    def about(self) -> str:
        """Return one line with vLLM's version, dtype, device and process id."""
        place = f"process {self.pid}" if self.pid else "closed"
        return f"vLLM {self._about.get('vllm')}, {self._about.get('dtype')} on {self._about.get('platform')}, {place}"


def interpreter(settings: VllmSettings) -> str:
    """Choose the Python interpreter that runs vLLM: the setting `python`, else the variable WORKBENCH_VLLM_PYTHON, else
    this one."""
    return settings.python or os.environ.get(PYTHON_VARIABLE) or sys.executable


def importable(python: str) -> bool:
    """Whether a Python interpreter has vLLM installed."""
    look = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
    return subprocess.run([python, "-P", "-c", look], capture_output=True, check=False).returncode == 0


def tokenizer_of(folder: str | Path, trust: bool) -> tuple[Any, frozenset[int], int]:
    """Open a model's tokenizer; returns (tokenizer, token ids that end a response, size of the model's vocabulary)."""
    from transformers import AutoConfig, GenerationConfig

    with boundary(f"loading the tokenizer {str(folder)!r}", EngineError):
        config = AutoConfig.from_pretrained(str(folder), trust_remote_code=trust)
        tokenizer = auto_tokenizer(folder, trust_remote_code=trust)
    try:
        generation = GenerationConfig.from_pretrained(str(folder))
    except OSError:  # many models have none
        generation = GenerationConfig()
    text = config.get_text_config()
    return tokenizer, eos_ids_of(generation, text, tokenizer), int(text.vocab_size)


def check_prompt(
    ids: Sequence[int], rows: int, longest: int | None, where: str, limit: str, stops: Sequence[int] = ()
) -> None:
    """Raise `EngineError` for a prompt that could crash vLLM: with ids outside the vocabulary (`rows` ids), in the stop tokens
    `stops` too, without tokens, or with too many."""
    wrong = [token for token in (*ids, *stops) if not 0 <= token < rows]
    if wrong:
        what = f"token id {wrong[0]} in a prompt or in stop_token_ids"
        raise EngineError(what, expected=f"ids 0 to {rows - 1}, the model's vocabulary")
    if not ids or (longest is not None and len(ids) >= longest):
        expected = f"1 to {(longest or 0) - 1} tokens, one less than {limit}"
        raise EngineError(f"length of a prompt for {where}", expected=expected, found=len(ids))


def _experts(reply: Mapping[str, Any], length: int) -> torch.Tensor:
    """Decode the experts in a reply, [length, L, k] int16: which ones the routers chose for each token; -1 for the last
    tokens, for which none were computed."""
    _, *shape = reply["experts_shape"]
    found = torch.frombuffer(bytearray(base64.b64decode(reply["experts"])), dtype=torch.int16).view(-1, *shape)
    return torch.cat([found, found.new_full((length - len(found), *shape), -1)])[:length]


class VllmEngine(Served, Pausing):
    """A vLLM sampler whose weights are pushed to it. Made by `engines.vllm`; pair it with a learner by `engines.paired`."""

    streams = True

    def __init__(self, folder: str | Path, settings: VllmSettings, *, path: str, **switches: Any) -> None:
        self.template_switches = switches
        self._adapters = 0
        Pausing.__init__(self)
        Served.__init__(self, folder, settings, path=path)

    def _start(self) -> None:
        super()._start()
        self._refusal, self._as_loaded = "", True
        self._adapter: tuple[int, str] | None = None

    # --- Sampler ----------------------------------------------------------------------------

    async def _answered(self, request: Request) -> Sample:
        wanted = {"params": self._parameters(request), "tops": request.tops, "schema": request.schema}
        content = {"ids": list(request.ids), **wanted, "adapter": self._adapter}
        try:
            asked = self._link.ask("sample", stoppable=True, listen=request.listen, **content)
            reply = await asyncio.wrap_future(asked)
        except EngineError as error:
            if request.schema is None or "VLLMValidationError" not in str(error):
                raise
            raise SettingError(
                "the JSON schema of a response, which vLLM cannot read", found=first_line(error)
            ) from error
        reason = reply["finish_reason"]
        if reason not in ("stop", "length", "abort"):
            raise EngineError("vLLM did not finish a response", expected="finish_reason stop or length", found=reason)
        experts = _experts(reply, len(request.ids) + len(reply["ids"])) if "experts" in reply else None
        tops = tuple(dict(zip(ids, values, strict=True)) for ids, values in reply.get("tops", ()))
        return Sample(tuple(reply["ids"]), tuple(reply["log_probs"]), reason, self.version, experts=experts, tops=tops)

    async def _of_prompt(self, ids: Sequence[int], k: int) -> list[dict[int, float]]:
        check_prompt(ids, self._rows, self.max_length, "vLLM", "max_model_len")
        params = {"max_tokens": 1, "prompt_logprobs": k, "detokenize": False}
        content: dict[str, Any] = {"ids": list(ids), "params": params, "tops": 0, "schema": None}
        reply = await asyncio.wrap_future(self._link.ask("sample", stoppable=True, adapter=self._adapter, **content))
        return [dict(zip(tokens, values, strict=True)) for tokens, values in reply["prompt"]]

    def check_schema(self, schema: str) -> None:
        """Raise `EngineError` where this vLLM would return other log-probs than the policy's; vLLM itself reads the schema."""
        if not self._about["exact"]:
            what = "a JSON schema: this vLLM returns only log-probs after it, and training needs those before"
            raise EngineError(what, do="leave it out, or set env={'VLLM_USE_V2_MODEL_RUNNER': '0'}")

    def _check(self, request: Request) -> None:
        s = request.settings
        if request.schema is not None:
            self.check_schema(request.schema)
        check_prompt(request.ids, self._rows, self.max_length, "vLLM", "max_model_len", s.stop_token_ids)
        if 0 < s.temperature < 0.01:
            raise EngineError("the sampling temperature", expected="0 or ≥ 0.01, vLLM's smallest", found=s.temperature)
        if (s.filters or s.alters) and not self._about["exact"]:
            names = "top_p, top_k, min_p, repetition_penalty and min_tokens"
            what = f"{names}: this vLLM does not return the log-probs before them, which a trainer needs"
            raise EngineError(what, do="leave them out, or set env={'VLLM_USE_V2_MODEL_RUNNER': '0'}")

    def _check_serving(self) -> None:
        self._link.check()  # what happened to its process comes before what happened to a push
        super()._check_serving()

    def _parameters(self, request: Request) -> dict[str, Any]:
        seed = request.seed if self._settings.seeds == "rows" else None
        fields = vllm_fields(request, sorted(self._eos))
        return {**fields, "seed": seed, "detokenize": bool(request.settings.stop)}

    # --- weights ----------------------------------------------------------------------------

    def receives(self) -> dict[str, Any]:
        """Describe where vLLM's process is and what it takes (see `WeightReceiver.receives`)."""
        devices = self._about["devices"]
        where = {"machines": [machine()], "pids": [self.pid], "devices": [one for one in devices if one]}
        rank = self._settings.lora_rank if self._as_loaded else 0
        takes = {"dtype": self._about["dtype"], "split": False, "adapter_rank": rank}
        takes["sleeps"] = self._about["platform"] != "cpu" and self._settings.sleeps
        return {**where, "processes": len(devices), **takes, "folder": str(self._folder)}

    async def _step(self, step: str, *arguments: Any) -> list[Any]:
        if step == "begin":
            if kind := self._settings.engine_args.get("quantization"):
                what = f"a push of merged weights to vLLM with quantization={kind!r}"
                do = "open vllm with the learner's lora_rank"
                raise EngineError(what, expected="adapters alone, over the base in vLLM's folder", do=do)
            self._as_loaded, self._adapter = False, None
        answers: list[Any] = await self._call("collective_rpc", f"workbench_{step}", None, arguments)
        return answers

    async def _serve(self, version: int) -> None:
        """Drop vLLM's prefix cache, which was computed with the old weights."""
        if not await self._call("reset_prefix_cache"):
            raise EngineError("vLLM did not reset its prefix cache after a push of weights", do="restart() the engine")

    async def _call(self, method: str, *arguments: Any) -> Any:
        """Call a method of vLLM's engine, between two of its steps, and return its result."""
        answer = self._link.ask("call", method=method, arguments=arguments)
        seconds = self._settings.start_seconds
        try:
            return (await asyncio.wait_for(asyncio.wrap_future(answer), seconds))["value"]
        except TimeoutError as cause:
            what = f"vLLM has not answered {' '.join(map(str, (method, *arguments[:1])))}"
            raise EngineError(what, found=f"no answer in {seconds:g} s") from cause

    def load_adapter(self, folder: str, version: int) -> int:
        """Sample with the base weights and the LoRA adapter of a peft folder, as policy `version`. The setting
        `lora_rank` must be at least the adapter's rank."""
        if not self._as_loaded:
            what, expected = "a push of a LoRA adapter alone", "the base weights of the model's folder in vLLM"
            found, do = "other weights, which were pushed since it started", "restart(), or push merged weights"
            raise EngineError(what, expected=expected, found=found, do=do)
        runtime.run(self._replace_adapter(folder, version))
        return self.version

    async def _replace_adapter(self, folder: str, version: int) -> None:
        async with self._paused():
            self._adapters += 1
            adapter = (self._adapters, folder)
            if not all(await self._call("collective_rpc", "workbench_adapter", None, adapter)):
                raise EngineError("vLLM does not list the LoRA adapter pushed to it", do="restart() the engine")
            self._adapter = adapter
            await self._serve(version)
            self._serves(version)

    def join_group(self, host: str, port: int, first: int, size: int, backend: str) -> None:
        """Join the process group of a broadcast: each of vLLM's processes takes a rank, from `first` on."""
        runtime.run(self._call("collective_rpc", "workbench_join", None, (host, port, first, size, backend)))

    def sleep(self, level: int = 1) -> None:
        """Free the GPU's memory: level 1 keeps the weights in host memory, level 2 drops them (push after waking).

        Raises `EngineError` on a CPU, which has no sleep mode, and for an engine made without `sleep_mode=True`.
        """
        if self._about["platform"] == "cpu":
            raise EngineError("sleep() of vLLM", expected="a GPU", found="a CPU, where vLLM has no sleep mode")
        if not self._settings.sleeps:
            raise EngineError("sleep() of vLLM", expected="sleep_mode=True when the engine is opened", found="False")
        runtime.run(self._fall_asleep(level))

    async def _fall_asleep(self, level: int) -> None:
        dropped = "vLLM's weights were dropped by sleep(level=2), and wake() brings none"
        async with self._paused(dropped if level == 2 else self._refusal):
            self._as_loaded = self._as_loaded and level == 1
            await self._call("reset_prefix_cache")
            await self._call("sleep", level)

    def wake(self, tags: Sequence[str] | None = None) -> None:
        """Allocate the GPU's memory again after `sleep()`; does nothing on a CPU or without `sleep_mode=True`.

        `tags` are `weights` or `kv_cache`, to wake one of the two: weights can be pushed while there is no room for the
        cache yet. vLLM samples once both are awake.
        """
        if self._about["platform"] != "cpu" and self._settings.sleeps:
            runtime.run(self._call("wake_up", None if tags is None else list(tags)))

    def describe(self) -> dict[str, Any]:
        """Return path, settings and vLLM's version for a run's record; without the environment and tokens, which may be
        secret."""
        chosen = {name: value for name, value in self._settings.to_dict().items() if name not in ("env", "python")}
        about = {name: self._about.get(name) for name in ("vllm", "platform", "dtype")}
        chosen["sleep_mode"] = self._settings.sleeps
        chosen["engine_args"] = {name: value for name, value in chosen["engine_args"].items() if name != "hf_token"}
        return {"path": self.path, **chosen, **about}

    def __repr__(self) -> str:
        return f"VllmEngine({self.path!r}: {self.about()}, version {self.version})"


@shows_settings(VllmSettings)
@working("starting vLLM")
def vllm(path: str | Path, *, template_switches: Any = None, **settings: Any) -> VllmEngine:
    """Start vLLM in a process of its own, as a sampler: `vllm("data/tiny-arith", max_model_len=256)`.

    `path` is as for `engines.local`. `template_switches` are passed to the chat template. Other settings:
    `VllmSettings`; unknown names are refused. Pair it with a learner: `engines.paired(learner, sampler)`. Raises
    `EngineError` where there is no such model, and where vLLM is not installed or does not start, with vLLM's own
    error.
    """
    chosen = VllmSettings.from_parameters(settings)
    folder = resolve(path)
    if lora.base_of(Path(folder)) is not None:
        do = "pass its base model, and pair it with a learner on the adapter: merged weights are pushed"
        raise EngineError(f"{str(path)!r} is an adapter", expected="a whole model", do=do)
    return VllmEngine(folder, chosen, path=str(path), **(template_switches or {}))


class VllmClassifier(Served):
    """A reward model in vLLM, which returns the raw logit of a sequence classifier. Made by `engines.vllm_classifier`."""

    def describe(self) -> str:
        """Return `vLLM` and the model's path as one text, for a record."""
        return f"vLLM {self.path}"

    async def classify(self, text: str) -> Classified:
        """Score one text; vLLM batches concurrent texts. Raises `EngineError` for a text longer than `max_length`."""
        ids = self.tokenizer.encode(text)
        if (error := refusal(len(ids), self.max_length or 0)) is not None:
            raise error
        answer = asyncio.wrap_future(self._link.ask("classify", stoppable=True, ids=ids))
        reply = await runtime.unless_interrupted(answer)
        if reply["count"] != 1:
            raise EngineError(f"the reward model {self.path!r}", expected="one label", found=f"{reply['count']} labels")
        return Classified(reply["value"], len(ids))

    def __repr__(self) -> str:
        return f"VllmClassifier({self.path!r}: {self.about()})"


@shows_settings(VllmSettings)
@working("starting vLLM")
def vllm_classifier(path: str | Path, **settings: Any) -> VllmClassifier:
    """Start a reward model in vLLM, from a folder or a hub name: `rewards.RewardModel(engines.vllm_classifier(path))`.

    Settings: `VllmSettings`. Raises `EngineError` where vLLM is not installed or does not start, with vLLM's own error.
    """
    chosen = VllmSettings.from_parameters(settings)
    return VllmClassifier(resolve(path), chosen, path=str(path), runner="pooling")
