"""A model that vLLM serves from a process of its own: settings, start, life and end, whatever is asked of it."""

from __future__ import annotations

import os
import subprocess
import sys
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import torch

from workbench.config import Settings, require
from workbench.engines.loading import eos_ids_of
from workbench.engines.vllm_link import Answer, Link
from workbench.errors import EngineError, boundary, message

PYTHON_VARIABLE = "WORKBENCH_VLLM_PYTHON"
"""Names the interpreter that has vLLM, where it is not this one."""
_MEBI = 1 << 20


@dataclass(frozen=True, kw_only=True)
class VllmSettings(Settings):
    """Settings of a vLLM engine."""

    dtype: str = "auto"
    """`float32`, `bfloat16`, or `auto` (float32 on a CPU, the model's own on a GPU)."""
    max_model_len: int | None = None
    """Longest prompt and response together, in tokens; None: what the model has."""
    tensor_parallel_size: int = 1
    """GPUs (on a CPU: processes) that share one model."""
    gpu_memory_utilization: float = 0.5
    """Share of the GPU's memory for weights and cache; vLLM alone on its GPU takes 0.9."""
    kv_cache_memory_mb: int | None = None
    """MiB of key-value cache; None: by `gpu_memory_utilization`, on a CPU 256."""
    enforce_eager: bool | None = None
    """No compiled graphs: slower on a GPU, starts sooner. None: on a CPU only."""
    max_num_seqs: int = 256
    """Rows that are sampled together at most."""
    multiprocess: bool | None = None
    """Scheduler and model in a process beside the one that answers. None: on a GPU only."""
    sleep_mode: bool = False
    """Whether `sleep()` can give the GPU's memory back."""
    trust_remote_code: bool = False
    """Run code that comes with the model."""
    python: str | None = None
    """Interpreter that has vLLM; None: WORKBENCH_VLLM_PYTHON, or this one."""
    env: dict[str, str] = field(default_factory=dict)
    """Environment variables for its processes, over ours and the defaults."""
    start_seconds: float = 900.0
    """Longest start: compiling a large model takes minutes."""
    stall_seconds: float = 300.0
    """A process that should work and says nothing for so long is taken for dead."""

    def __post_init__(self) -> None:
        require(self.dtype in ("auto", "float32", "bfloat16"), "dtype", expected="auto, float32 or bfloat16", found=self.dtype)  # fmt: skip
        require(self.max_model_len is None or self.max_model_len > 1, "max_model_len", expected="≥ 2", found=self.max_model_len)  # fmt: skip
        require(self.tensor_parallel_size > 0, "tensor_parallel_size", expected="≥ 1", found=self.tensor_parallel_size)
        share = self.gpu_memory_utilization
        require(0 < share <= 1, "gpu_memory_utilization", expected="a share in (0, 1]", found=share)
        require(self.max_num_seqs > 0, "max_num_seqs", expected="≥ 1", found=self.max_num_seqs)


class Served:
    """Base of what vLLM serves: one process, its tokenizer, and what it says about itself."""

    def __init__(self, folder: str | Path, settings: VllmSettings, *, path: str, **arguments: Any) -> None:
        self._folder = folder
        self._settings = settings
        self._arguments = arguments
        self.path = path
        self.starts = 0
        """How often its process was started: one that was started again has lost what was pushed."""
        self._link: Link | None = None
        self._about: Mapping[str, Any] = {}
        self._finalizer: Any = None
        self._start()

    def _start(self) -> None:
        """A process, and what it says about itself; the tokenizer is loaded meanwhile."""
        link = self._open()
        try:
            if not hasattr(self, "tokenizer"):
                self.tokenizer, self._eos, self._rows = tokenizer_of(self._folder, self._settings)
            self._about = wait(link.ready, self._settings.start_seconds, "vLLM has not started")
        except BaseException:
            link.close()
            raise
        self._link = link
        self.starts += 1
        self._finalizer = weakref.finalize(self, link.close)

    def _open(self) -> Link:
        python, s = interpreter(self._settings), self._settings
        if python == sys.executable and not importable(python):
            raise EngineError(
                message(
                    "vLLM is not installed",
                    expected=f"it beside workbench, or an interpreter that has it named in {PYTHON_VARIABLE}",
                    do="pip install 'workbench[vllm]'",
                )
            )
        first = {"arguments": {**arguments_of(self._folder, s), **self._arguments}, "on_cpu": on_cpu_of(s)}
        return Link(python, {**os.environ, **environment_of(self._folder, s)}, first, stall_seconds=s.stall_seconds)

    def _ask(self, op: str, **fields: Any) -> Answer:
        if self._link is None:
            raise EngineError(message("this vLLM engine is closed", do="call restart(), or make a new one"))
        return self._link.ask(op, **fields)

    def restart(self) -> None:
        """A new process with the model's own weights, whatever became of the old one."""
        self.close()
        self._start()

    def close(self) -> None:
        """End the process and all that it started; closing twice is fine."""
        if self._link is not None:
            self._finalizer.detach()
            self._link.close()
            self._link = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    @property
    def pid(self) -> int | None:
        """Number of its process; None when closed."""
        return self._link.pid if self._link is not None else None

    def log(self, lines: int = 40) -> str:
        """The last lines that its processes wrote."""
        return self._link.tail(lines) if self._link is not None else ""

    @property
    def max_length(self) -> int | None:
        """Longest prompt and response together."""
        return self._about.get("max_model_len")

    def about(self) -> str:
        """Which vLLM, on what, in which process."""
        place = f"process {self.pid}" if self.pid else "closed"
        return f"vLLM {self._about.get('vllm')}, {self._about.get('dtype')} on {self._about.get('platform')}, {place}"


def wait(answer: Answer, seconds: float, late: str) -> dict[str, Any]:
    """An answer, or an `EngineError` that says what is late."""
    try:
        return answer.result(timeout=seconds)
    except TimeoutError as cause:
        raise EngineError(message(late, found=f"{seconds:g} s gone")) from cause


def interpreter(settings: VllmSettings) -> str:
    """The Python that runs vLLM."""
    return settings.python or os.environ.get(PYTHON_VARIABLE) or sys.executable


def importable(python: str) -> bool:
    """Whether an interpreter finds vLLM."""
    look = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
    return subprocess.run([python, "-P", "-c", look], capture_output=True, check=False).returncode == 0


def arguments_of(folder: str | Path, s: VllmSettings) -> dict[str, Any]:
    """Of vLLM's engine, as it is on a GPU."""
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
        "generation_config": "vllm",  # which ids end a response is said with each request
        "seed": 0,
    }


def on_cpu_of(s: VllmSettings) -> dict[str, Any]:
    """What differs there."""
    return {
        "dtype": "float32" if s.dtype == "auto" else s.dtype,
        "enforce_eager": True if s.enforce_eager is None else s.enforce_eager,
        "kv_cache_memory_bytes": (s.kv_cache_memory_mb or 256) * _MEBI,
        "enable_sleep_mode": False,
        # a seeded request whose prompt is read in two pieces kills 0.32's CPU engine ("CPU Generator does not use offset")
        "enable_chunked_prefill": False,
    }


def environment_of(folder: str | Path, s: VllmSettings) -> dict[str, str]:
    """Variables of vLLM's processes beside those that are there."""
    gpu = torch.cuda.is_available()
    many = gpu if s.multiprocess is None else s.multiprocess
    eager = not gpu if s.enforce_eager is None else s.enforce_eager
    return {
        "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(many)),
        "VLLM_WORKER_MULTIPROCESSING_METHOD": "spawn",
        "VLLM_USE_V2_MODEL_RUNNER": "0",  # whose sampler gives log-probs before top-k and top-p
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # its workers must not fight for the same cores
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        **({"TORCHDYNAMO_DISABLE": "1"} if eager else {}),  # eager does not cover the sampler
        **({"HF_HUB_OFFLINE": "1"} if Path(folder).is_dir() else {}),
        **s.env,
    }


def tokenizer_of(folder: str | Path, settings: VllmSettings) -> tuple[Any, frozenset[int], int]:
    """The model's tokenizer, the ids that end a response, and how many ids the model knows."""
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    trust = {"trust_remote_code": settings.trust_remote_code}
    with boundary(f"loading the tokenizer {str(folder)!r}", EngineError):
        config = AutoConfig.from_pretrained(str(folder), **trust)
        tokenizer = AutoTokenizer.from_pretrained(str(folder), **trust)
    try:
        generation = GenerationConfig.from_pretrained(str(folder))
    except OSError:  # many models have none
        generation = GenerationConfig()
    text = config.get_text_config()
    ends = eos_ids_of(SimpleNamespace(generation_config=generation, config=text), tokenizer)
    return tokenizer, ends, int(text.vocab_size)
