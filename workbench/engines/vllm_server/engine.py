"""vLLM as a sampler: prompt ids in, token ids and log-probs out, weights pushed in place; and as a reward model.

vLLM runs in a process of its own (`vllm_server.process`), since in the notebook's it would reset seeds and threads. The log-probs
are those that the trainer computes: after temperature, before top-k and top-p. Nothing of vLLM is imported here, so that another
interpreter can run it (`python=`, or WORKBENCH_VLLM_PYTHON).
"""

from __future__ import annotations

import asyncio
import base64
import os
import subprocess
import sys
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from workbench.base.activity import recorded
from workbench.base.config import Settings, require
from workbench.base.distribution import install
from workbench.base.errors import EngineError, SettingError, boundary
from workbench.engines.local_engine import lora
from workbench.engines.local_engine.classifier import refusal
from workbench.engines.local_engine.loading import auto_tokenizer, eos_ids_of, resolve
from workbench.engines.protocol import Classified, Closing, Request, Sample, SamplingSettings
from workbench.engines.tensor_files import in_memory
from workbench.engines.vllm_server.link import Answer, Link
from workbench.engines.vllm_server.process import Piece
from workbench.engines.weights import Receiving, as_message, machine, pieces_in

PYTHON_VARIABLE = "WORKBENCH_VLLM_PYTHON"
"""Environment variable that names the interpreter that has vLLM, where it is not this one."""
_MEBI = 1 << 20
_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""What vLLM takes as `max_lora_rank`."""
_OURS = {
    "model": "the first argument", "dtype": "the setting dtype", "max_model_len": "the setting max_model_len",
    "tensor_parallel_size": "the setting tensor_parallel_size", "gpu_memory_utilization": "the setting gpu_memory_utilization",
    "kv_cache_memory_bytes": "the setting kv_cache_memory_mb", "enforce_eager": "the setting enforce_eager",
    "max_num_seqs": "the setting max_num_seqs", "enable_sleep_mode": "the setting sleep_mode", "enable_lora": "the setting lora_rank",
    "max_lora_rank": "the setting lora_rank", "trust_remote_code": "the setting trust_remote_code", "logprobs_mode": "", "generation_config": "",
    "seed": "",
}  # fmt: skip
"""Arguments of vLLM's engine that workbench sets, and by which setting; the others go through `engine_args`."""


@dataclass(frozen=True, kw_only=True)
class VllmSettings(Settings):
    """Settings of `engines.vllm` and `engines.vllm_classifier`."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """`float32`, `bfloat16`, or `auto` (float32 on a CPU, the model's own on a GPU)."""
    max_model_len: int | None = None
    """Longest prompt and response together, in tokens; None: the model's own limit."""
    tensor_parallel_size: int = 1
    """GPUs (on a CPU: processes) that share one model."""
    gpu_memory_utilization: float = 0.5
    """Share of the GPU's memory for weights and cache, beside a learner; `Cluster.place` and `serve` take 0.9 where vLLM is alone."""
    kv_cache_memory_mb: int | None = None
    """MiB of key-value cache; None: by `gpu_memory_utilization`, on a CPU 256."""
    enforce_eager: bool | None = None
    """True: no compiled graphs, which is slower on a GPU and starts sooner. None: True on a CPU only."""
    max_num_seqs: int = 256
    """Rows that are sampled together at most."""
    multiprocess: bool | None = None
    """True: scheduler and model run in a process beside the one that answers. None: True on a GPU only."""
    sleep_mode: bool = False
    """Whether `sleep()` can give the GPU's memory back."""
    lora_rank: int = 0
    """Largest rank of LoRA adapters that are pushed alone, over the base in the model's folder; 0: merged weights are pushed."""
    seeds: Literal["rows", "engine"] = "rows"
    """`rows`: each request has a random generator of its own, so that a row can be sampled again alone; on a GPU that is one kernel a
    row and token. `engine`: one for all, one kernel a token; a row then depends on those that were sampled beside and before it."""
    engine_args: dict[str, Any] = field(default_factory=dict)
    """vLLM's own engine arguments by its names (`max_num_batched_tokens`, `quantization` …), passed through."""
    trust_remote_code: bool = False
    """Run code that comes with the model."""
    python: str | None = None
    """Interpreter that has vLLM; None: WORKBENCH_VLLM_PYTHON, or this one."""
    env: dict[str, str] = field(default_factory=dict)
    """Environment variables for its processes, over ours and the defaults."""
    start_seconds: float = 900.0
    """Longest time to start: compiling a large model takes minutes."""
    stall_seconds: float = 300.0
    """A process that should work and reports nothing for so long counts as dead."""

    def __post_init__(self) -> None:
        require(self.max_model_len is None or self.max_model_len > 1, "max_model_len", expected="≥ 2", found=self.max_model_len)  # fmt: skip
        require(self.tensor_parallel_size > 0, "tensor_parallel_size", expected="≥ 1", found=self.tensor_parallel_size)
        share = self.gpu_memory_utilization
        require(0 < share <= 1, "gpu_memory_utilization", expected="a share in (0, 1]", found=share)
        require(self.max_num_seqs > 0, "max_num_seqs", expected="≥ 1", found=self.max_num_seqs)
        require(
            0 <= self.lora_rank <= _LORA_RANKS[-1],
            "lora_rank",
            expected="0 to 512, vLLM's largest",
            found=self.lora_rank,
        )
        ours = sorted(set(self.engine_args) & (set(_OURS) | {"worker_extension_cls", "disable_log_stats", "runner"}))
        if ours:
            instead = [f"{name}: {_OURS.get(name) or 'set by workbench'}" for name in ours]
            raise SettingError(
                "engine_args", expected="arguments that workbench does not set", found="; ".join(instead)
            )


class Served(Closing):
    """Base class of the vLLM engines: one vLLM process, its tokenizer, and what the process reports about itself."""

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
        """Start a process; the tokenizer is loaded meanwhile."""
        python, s = interpreter(self._settings), self._settings
        if python == sys.executable and not importable(python):
            expected = f"vLLM beside workbench, or in {PYTHON_VARIABLE} the path of a Python that has it"
            raise EngineError("vLLM is not installed", expected=expected, do=install("vllm"))
        first = {"arguments": {**arguments_of(self._folder, s), **self._arguments}, "on_cpu": on_cpu_of(s)}
        env = {**os.environ, **environment_of(self._folder, s)}
        link = Link(python, env, first, stall_seconds=s.stall_seconds)
        try:
            if not hasattr(self, "tokenizer"):
                self.tokenizer, self._eos, self._rows = tokenizer_of(self._folder, s.trust_remote_code)
            self._about = wait(link.ready, s.start_seconds, "vLLM has not started")
        except BaseException:
            link.close()
            raise
        self._link = link
        self.starts += 1
        self.version = 0  # of the weights in the folder
        self._as_loaded = True
        self._end = weakref.finalize(self, link.close)

    def restart(self) -> None:
        """Start a new process with the weights of the model's folder, whatever happened to the old one."""
        self.close()
        self._start()

    def close(self) -> None:
        """End the process and everything that it started; may be called twice."""
        self._end()

    @property
    def pid(self) -> int | None:
        """Id of vLLM's process; None when closed."""
        return self._link.pid if self._end.alive else None

    def log(self, lines: int = 40) -> str:
        """The last lines that vLLM's processes wrote."""
        return self._link.tail(lines)

    @property
    def max_length(self) -> int | None:
        """Longest prompt and response together, in tokens."""
        return self._about.get("max_model_len")

    def about(self) -> str:
        """One line with vLLM's version, dtype, device and process id."""
        place = f"process {self.pid}" if self.pid else "closed"
        return f"vLLM {self._about.get('vllm')}, {self._about.get('dtype')} on {self._about.get('platform')}, {place}"


def wait(answer: Answer, seconds: float, late: str) -> dict[str, Any]:
    """Wait for an answer; raises what it raises. After `seconds` raises `EngineError` with `late` as its text."""
    try:
        return answer.result(timeout=seconds)
    except TimeoutError as cause:
        raise EngineError(late, found=f"no answer in {seconds:g} s") from cause


def interpreter(settings: VllmSettings) -> str:
    """The Python interpreter that runs vLLM: the setting `python`, else WORKBENCH_VLLM_PYTHON, else this one."""
    return settings.python or os.environ.get(PYTHON_VARIABLE) or sys.executable


def importable(python: str) -> bool:
    """Whether a Python interpreter has vLLM installed."""
    look = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
    return subprocess.run([python, "-P", "-c", look], capture_output=True, check=False).returncode == 0


def arguments_of(folder: str | Path, s: VllmSettings) -> dict[str, Any]:
    """Arguments of vLLM's engine on a GPU."""
    return {
        "model": str(folder),
        "dtype": s.dtype,
        "max_model_len": s.max_model_len,
        "tensor_parallel_size": s.tensor_parallel_size,
        "gpu_memory_utilization": s.gpu_memory_utilization,
        "kv_cache_memory_bytes": None if s.kv_cache_memory_mb is None else s.kv_cache_memory_mb * _MEBI,
        "enforce_eager": bool(s.enforce_eager),
        "max_num_seqs": s.max_num_seqs,
        "enable_sleep_mode": s.sleep_mode,
        "trust_remote_code": s.trust_remote_code,
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",  # each request says which ids end a response
        "seed": 0,
        **(
            {"enable_lora": True, "max_lora_rank": min(one for one in _LORA_RANKS if one >= s.lora_rank)}
            if s.lora_rank
            else {}
        ),
        **s.engine_args,
    }


def on_cpu_of(s: VllmSettings) -> dict[str, Any]:
    """Arguments of vLLM's engine that replace those of `arguments_of` on a CPU."""
    return {
        "dtype": "float32" if s.dtype == "auto" else s.dtype,
        "enforce_eager": True if s.enforce_eager is None else s.enforce_eager,
        "kv_cache_memory_bytes": (s.kv_cache_memory_mb or 256) * _MEBI,
        "enable_sleep_mode": False,
        # a seeded request whose prompt is read in two pieces kills 0.32's CPU engine ("CPU Generator does not use offset")
        "enable_chunked_prefill": False,
        **s.engine_args,
    }


def environment_of(folder: str | Path, s: VllmSettings) -> dict[str, str]:
    """Environment variables of vLLM's processes that override those of this process."""
    gpu = torch.cuda.is_available()
    many = gpu if s.multiprocess is None else s.multiprocess
    eager = not gpu if s.enforce_eager is None else s.enforce_eager
    return {
        "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(many)),
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        # 2 alone returns experts; the sampler of 1 gives log-probs before top-k and top-p
        "VLLM_USE_V2_MODEL_RUNNER": str(int(bool(s.engine_args.get("enable_return_routed_experts")))),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # its workers must not fight for the same cores
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        **({"TORCHDYNAMO_DISABLE": "1"} if eager else {}),  # eager does not cover the sampler
        **({"HF_HUB_OFFLINE": "1"} if Path(folder).is_dir() else {}),
        **s.env,
    }


def tokenizer_of(folder: str | Path, trust: bool) -> tuple[Any, frozenset[int], int]:
    """The model's tokenizer, the ids that end a response, and the number of ids that the model knows."""
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


def check_prompt(ids: Sequence[int], rows: int, longest: int | None, where: str, limit: str) -> None:
    """Raises `EngineError` for a prompt that could crash vLLM: ids outside its vocabulary, no tokens, or too many."""
    wrong = [token for token in ids if not 0 <= token < rows]
    if wrong:
        raise EngineError(f"token id {wrong[0]} in a prompt", expected=f"ids 0 to {rows - 1}, the model's vocabulary")
    if not ids or (longest is not None and len(ids) >= longest):
        expected = f"1 to {(longest or 0) - 1} tokens, one less than {limit}"
        raise EngineError(f"length of a prompt for {where}", expected=expected, found=len(ids))


def sampling_fields(s: SamplingSettings, ends: Sequence[int]) -> dict[str, Any]:
    """Sampling fields that have the same names in vLLM and SGLang requests; `ends` are the ids that end a response."""
    ending = {"stop": list(s.stop), "stop_token_ids": [] if s.ignore_eos else list(ends), "ignore_eos": s.ignore_eos}
    return {"temperature": s.temperature, "top_p": s.top_p, **ending}


def _experts(reply: Mapping[str, Any], length: int) -> torch.Tensor:
    """[length, L, k] int16: the routers' choices of a reply; -1 for the last tokens, which no other came after."""
    _, *shape = reply["experts_shape"]
    found = torch.frombuffer(bytearray(base64.b64decode(reply["experts"])), dtype=torch.int16).view(-1, *shape)
    return torch.cat([found, found.new_full((length - len(found), *shape), -1)])[:length]


class VllmEngine(Served, Receiving):
    """A vLLM sampler whose weights are pushed to it. Made by `engines.vllm`; pair it with a learner by `engines.paired`."""

    def __init__(self, folder: str | Path, settings: VllmSettings, *, path: str, **switches: Any) -> None:
        self.template_switches = switches
        self._adapters = 0
        super().__init__(folder, settings, path=path)

    # --- Sampler ----------------------------------------------------------------------------

    @recorded
    async def sample(self, request: Request) -> Sample:
        """Sample one response; vLLM batches concurrent requests.

        Raises `EngineError` for a request that vLLM refuses, `WorkerLost` where its process dies, `Interrupted` where
        the work is asked to stop; unanswered requests are then aborted.
        """
        self._check(request)
        asked = self._link.ask("sample", stoppable=True, ids=list(request.ids), params=self._parameters(request))
        reply = await asyncio.wrap_future(asked)
        reason = reply["finish_reason"]
        if reason not in ("stop", "length", "abort"):
            raise EngineError("vLLM did not finish a response", expected="finish_reason stop or length", found=reason)
        experts = _experts(reply, len(request.ids) + len(reply["ids"])) if "experts" in reply else None
        return Sample(tuple(reply["ids"]), tuple(reply["log_probs"]), reason, reply["version"], experts=experts)

    def _check(self, request: Request) -> None:
        s = request.settings
        check_prompt(request.ids, self._rows, self.max_length, "vLLM", "max_model_len")
        if 0 < s.temperature < 0.01:
            raise EngineError("temperature", expected="0 or ≥ 0.01, vLLM's smallest", found=s.temperature)
        if (s.top_p < 1 or s.top_k > 0) and not self._about["exact"]:
            what = "top_p and top_k: this vLLM does not return the log-probs before them, which a trainer needs"
            raise EngineError(what, do="pass top_p=1 and top_k=-1, or set env={'VLLM_USE_V2_MODEL_RUNNER': '0'}")

    def _parameters(self, request: Request) -> dict[str, Any]:
        s = request.settings
        seed = request.seed if self._settings.seeds == "rows" else None
        own = {"top_k": max(s.top_k, 0), "max_tokens": s.max_tokens, "seed": seed, "detokenize": bool(s.stop)}
        return {**sampling_fields(s, sorted(self._eos)), **own}

    # --- weights ----------------------------------------------------------------------------

    def receives(self) -> dict[str, Any]:
        """Where its process is, and what it takes, as `WeightReceiver.receives`."""
        devices = self._about["devices"]
        where = {"machines": [machine()], "pids": [self.pid], "devices": [one for one in devices if one]}
        rank = self._settings.lora_rank if self._as_loaded else 0
        takes = {"dtype": self._about["dtype"], "split": False, "adapter_rank": rank}
        return {**where, "processes": len(devices), **takes, "folder": str(self._folder)}

    def begin_weights(self, shapes: Mapping[str, Sequence[int]]) -> None:
        """Begin a push of tensors of these shapes: requests made before are answered first, later ones wait for the end."""
        self.check_whole(shapes)
        self._as_loaded = False
        self._push("begin", list(shapes))

    def take_weights(self, pieces: Sequence[Piece], place: Mapping[str, Any]) -> None:
        """Load one bucket of whole tensors."""
        if "data" in place or "here" in place:
            memory = place.get("data")
            if memory is None:  # tensors of this process
                memory = torch.empty(place["nbytes"], dtype=torch.uint8)
                for piece, rows in pieces_in(pieces, place, "cpu", None):
                    piece.within(memory).copy_(rows)
            with in_memory(memory) as path:
                return self._push("take", as_message(pieces), {"file": path, "nbytes": place["nbytes"]})
        return self._push("take", as_message(pieces), dict(place))

    def end_weights(self, version: int) -> int:
        """Serve the new weights as a policy version. Raises `EngineError` where vLLM has not loaded all of its own weights."""
        self._push("end", version=version)
        return self.version

    def cancel_weights(self) -> None:
        """End a push that broke off: requests are refused until another one has succeeded."""
        self._push("cancel")

    def _push(self, step: str, *given: Any, version: int = 0) -> None:
        asked = self._link.ask("load", step=step, given=given, version=version)
        late = "the push of weights has not ended"
        found = wait(asked, self._settings.start_seconds, late)["version"]
        if step == "end":
            self.version = found

    def load_adapter(self, folder: str, version: int) -> int:
        """Serve the base with the LoRA adapter of a peft folder (`lora_rank` ≥ the adapter's)."""
        if not self._as_loaded:
            what, expected = "an adapter alone", "the base weights of the model's folder in vLLM"
            found, do = "other weights, which were pushed since it started", "restart(), or push merged weights"
            raise EngineError(what, expected=expected, found=found, do=do)
        self._adapters += 1
        asked = self._link.ask("adapter", path=folder, number=self._adapters, version=version)
        self.version = wait(asked, self._settings.start_seconds, "vLLM has not loaded the adapter")["version"]
        return self.version

    def join_group(self, host: str, port: int, first: int, size: int, backend: str) -> None:
        """Join a broadcast, each of its processes with a rank from `first` on."""
        asked = self._link.ask("join", given=[host, port, first, size, backend])
        wait(asked, self._settings.start_seconds, "vLLM has not joined the broadcast of weights")

    def sleep(self, level: int = 1) -> None:
        """Free the GPU's memory: level 1 keeps the weights in host memory, level 2 drops them (push after waking).

        Raises `EngineError` on a CPU, which has no sleep mode, and for an engine made without `sleep_mode=True`.
        """
        if self._about["platform"] == "cpu":
            raise EngineError("sleep()", expected="a GPU", found="vLLM on a CPU, which has no sleep mode")
        if not self._settings.sleep_mode:
            raise EngineError("sleep()", expected="sleep_mode=True when the engine is made", found="sleep_mode=False")
        self._as_loaded = self._as_loaded and level == 1
        wait(self._link.ask("sleep", level=level), self._settings.stall_seconds, "vLLM's sleep() has not ended")

    def wake(self, tags: Sequence[str] | None = None) -> None:
        """Allocate the GPU's memory again, after `sleep()`; does nothing on a CPU or without `sleep_mode=True`.

        `tags` out of `weights`, `kv_cache`: weights that are pushed need no room beside the cache. It serves when both are there.
        """
        if self._about["platform"] != "cpu" and self._settings.sleep_mode:
            asked = self._link.ask("wake", tags=None if tags is None else list(tags))
            wait(asked, self._settings.stall_seconds, "vLLM's wake() has not ended")

    def describe(self) -> dict[str, Any]:
        """Path, settings and version for a run's record; without the environment and tokens, which are secrets."""
        chosen = {name: value for name, value in self._settings.to_dict().items() if name not in ("env", "python")}
        about = {name: self._about.get(name) for name in ("vllm", "platform", "dtype")}
        chosen["engine_args"] = {name: value for name, value in chosen["engine_args"].items() if name != "hf_token"}
        return {"path": self.path, **chosen, **about}

    def __repr__(self) -> str:
        return f"VllmEngine({self.path!r}: {self.about()}, version {self.version})"


def vllm(path: str | Path, *, template_switches: Any = None, **settings: Any) -> VllmEngine:
    """Start vLLM in a process of its own, as a sampler: `vllm("data/tiny-arith", max_model_len=256)`.

    `path` as for `engines.local`. `template_switches` go to the chat template. Other settings: `VllmSettings`; unknown names
    are refused. Pair it with a learner: `engines.paired(learner, sampler)`. Raises `EngineError` where there is no such
    model, vLLM is not installed, or does not start, with vLLM's own error.
    """
    chosen = VllmSettings.from_parameters(settings)
    folder = resolve(path)
    if lora.base_of(Path(folder)) is not None:
        do = "pass its base model, and pair it with a learner on the adapter: merged weights are pushed"
        raise EngineError(f"{str(path)!r} is an adapter", expected="a whole model", do=do)
    return VllmEngine(folder, chosen, path=str(path), **(template_switches or {}))


class VllmClassifier(Served):
    """A reward model in vLLM: the raw logit of a sequence classifier. Made by `engines.vllm_classifier`."""

    def describe(self) -> str:
        """The model's path, for a record."""
        return f"vLLM {self.path}"

    async def classify(self, text: str) -> Classified:
        """Score one text; vLLM batches concurrent texts. Raises `EngineError` for a text longer than `max_length`."""
        ids = self.tokenizer.encode(text)
        if (error := refusal(len(ids), self.max_length or 0)) is not None:
            raise error
        reply = await asyncio.wrap_future(self._link.ask("classify", stoppable=True, ids=ids))
        if reply["count"] != 1:
            raise EngineError(f"the reward model {self.path!r}", expected="one label", found=f"{reply['count']} labels")
        return Classified(reply["value"], len(ids))

    def __repr__(self) -> str:
        return f"VllmClassifier({self.path!r}: {self.about()})"


def vllm_classifier(path: str | Path, **settings: Any) -> VllmClassifier:
    """Start a reward model in vLLM, from a folder or a hub name: `rewards.RewardModel(engines.vllm_classifier(path))`.

    Settings: `VllmSettings`. Raises `EngineError` where vLLM is not installed or does not start, with vLLM's own error.
    """
    chosen = VllmSettings.from_parameters(settings)
    return VllmClassifier(resolve(path), chosen, path=str(path), runner="pooling")
