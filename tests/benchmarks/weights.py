"""What a push of weights costs between two processes of this machine: seconds, bytes, and memory beyond the two models.

The learner is in this process, the sampler in a worker (`--sampler here`: in this process, too). Memory is the sum of the
processes' proportional set sizes (shared pages count once), sampled while the weights go. `tests/benchmarks/README.md` has the
last figures.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import psutil
import torch

sys.path += [str(Path(__file__).parents[1])]
from support.models import make_shaped_model

from workbench.engines import local
from workbench.engines.vllm_server.engine import vllm
from workbench.engines.workers.hosted import Hosted, host
from workbench.engines.workers.processes import processes


class Peak:
    """The most memory of this process and its children, above that at the start, and their CPU seconds, while a block runs."""

    def __enter__(self) -> Peak:
        self._everybody = [psutil.Process(), *psutil.Process().children(recursive=True)]
        self._before, self.bytes, self._ended = self._now(), 0, threading.Event()
        self.cpu = -self._clock()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self.cpu += self._clock()
        self._ended.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._ended.wait(0.01):
            self.bytes = max(self.bytes, self._now() - self._before)

    def _clock(self) -> float:
        return sum(sum(one.cpu_times()[:2]) for one in self._everybody if one.is_running())

    def _now(self) -> int:
        return sum(_pss(one.pid) for one in self._everybody if one.is_running())


def _pss(pid: int) -> int:
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) << 10
    return 0


def push(learner: Any, sampler: Any, version: int, way: str, mebibytes: int) -> Any:
    """Push once; before 0.12 there was one way, and no figures."""
    try:
        from workbench.engines.weights import sync_of
    except ImportError:
        from workbench.engines.weights import weights_of

        return sampler.load_weights(weights_of(learner), version)
    return sync_of(learner, sampler, way, mebibytes << 20).push(version)


def main() -> None:
    """One line a push. The first also fills the sampler's own memory: until then its weights are pages of the model's file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="0.5b")
    parser.add_argument("--model", default="", help="a folder of that shape")
    parser.add_argument("--sampler", default="local", choices=("local", "here", "vllm"))
    parser.add_argument("--dtype", default="float32", help="vLLM's")
    parser.add_argument("--way", default="auto")
    parser.add_argument("--lora", type=int, default=0, help="rank of the adapters of both; 0: none")
    parser.add_argument("--mebibytes", type=int, default=128, help="of a bucket")
    parser.add_argument("--pushes", type=int, default=3)
    o = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        path = o.model or str(make_shaped_model(Path(scratch) / "model", o.shape))
        learner = local(path, self_check=False, lora_rank=o.lora)
        with torch.no_grad():
            for one in learner._model.parameters():
                one.mul_(1)  # its own memory, no longer pages of the file
        copy = 2 * sum(
            one.numel() for one in learner._model.parameters()
        )  # of the model in bfloat16, tied weights once
        if o.sampler == "vllm":
            sampler: Any = vllm(path, dtype=o.dtype, max_model_len=256, kv_cache_memory_mb=64, lora_rank=o.lora)
        elif o.sampler == "here":
            sampler = local(path, self_check=False)
        else:
            settings = {"self_check": False}
            sampler = Hosted(lambda: processes(host, 1, kind="local", path=path, settings=settings), name="sampler")
        with nullcontext() if o.sampler == "here" else sampler:
            for version in range(1, o.pushes + 1):
                with Peak() as peak:
                    began = time.perf_counter()
                    made = push(learner, sampler, version, o.way, o.mebibytes)
                    seconds = time.perf_counter() - began
                share = peak.bytes / copy
                print(
                    f"push {version}: {seconds:7.2f} s, {peak.cpu:6.2f} CPU s, {peak.bytes / 2**20:8.0f} MiB beyond the models, {share:.2f} copies in bfloat16; {made}"
                )


if __name__ == "__main__":
    main()
