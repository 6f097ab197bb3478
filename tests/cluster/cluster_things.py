"""What ranks hold in tests of clusters: importable where the workers are."""

from __future__ import annotations

import ctypes
import os
import time
from pathlib import Path
from typing import Any

import torch

import workbench as wb
from workbench import DataProto
from workbench.base import runtime
from workbench.base.errors import NonFinite
from workbench.cluster import session
from workbench.engines.protocol import LossCounts

CANARY = "canary-9876543210"
SETTINGS: dict[str, Any] = {
    "cpus": 4,
    "gpus": 0,
    "runtime_env": {"env_vars": {"TEST_API_KEY": CANARY, "OMP_NUM_THREADS": "1"}},
    "object_store_memory": 300 << 20,
}


def close() -> None:
    """Whatever cluster is open in this process."""
    if session._open is not None:
        session._open.close()


class Thing:
    """Answers, sleeps, dies."""

    def __init__(self, rank: int, size: int, word: str) -> None:
        self.rank, self.size, self.word = rank, size, word
        self.kept: Any = None

    def who(self, *given: Any) -> tuple[Any, ...]:
        return (self.rank, self.size, self.word, *given)

    def pid(self) -> int:
        return os.getpid()

    def env(self, name: str) -> str | None:
        return os.environ.get(name)

    def say(self, text: str) -> None:
        print(text)

    def sleep(self, seconds: float) -> float:
        time.sleep(seconds)
        return seconds

    def meet(self, folder: str, number: int) -> int:
        """Waits until so many are here at once."""
        Path(folder, str(os.getpid())).touch()
        while len(os.listdir(folder)) < number:
            time.sleep(0.01)
        return number

    def work(self, seconds: float) -> str:
        """As an engine does it: looks between pieces whether it should stop."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            runtime.check()
            time.sleep(0.01)
        return "worked"

    def hold_the_interpreter(self, seconds: int) -> None:
        ctypes.PyDLL(None).sleep(seconds)

    def fail_on(self, rank: int, others: float) -> str:
        if self.rank == rank:
            raise ValueError(f"the secret is {os.environ.get('TEST_API_KEY')}")
        return self.work(others)

    def not_finite(self) -> None:
        raise NonFinite("loss is nan")

    def unsendable(self) -> Any:
        return (one for one in range(3))

    def die_on(self, rank: int) -> float:
        if self.rank == rank:
            print("my last words")
            os.kill(os.getpid(), 9)
        return self.sleep(3600)

    def eat(self, mebibytes: int) -> int:
        """So much memory, in pieces that somebody can notice."""
        self.kept = []
        for _ in range(mebibytes // 50):
            self.kept.append(bytearray(os.urandom(1 << 20) * 50))
            time.sleep(0.05)
        return len(self.kept)

    def doubled(self, batch: DataProto) -> dict[str, Any]:
        return {"twice": 2 * batch["input_ids"], "rows": torch.full((len(batch),), len(batch))}

    def same(self, batch: DataProto) -> DataProto:
        return batch

    def scribble(self, batch: DataProto) -> tuple[float, float]:
        """Write into the batch and keep it; the first number before and after."""
        column = batch.batch["x"]
        before = float(column[0, 0])
        column.fill_(-1.0)
        batch.non_tensor_batch["uid"][0] = "mine"
        self.kept = batch
        return before, float(column[0, 0])

    def first(self, batch: DataProto) -> tuple[float, str]:
        return float(batch.batch["x"][0, 0]), str(batch.non_tensor_batch["uid"][0])


class Writer:
    """Rolls prompts out with a model of its own."""

    def __init__(self, path: str) -> None:
        torch.set_num_threads(1)
        self.stage = wb.stages.Rollout(
            wb.engines.local(path, device="cpu"), group_size=1, sampling=wb.SamplingSettings(max_tokens=8)
        )

    def rolled(self, batch: DataProto) -> DataProto:
        return self.stage(batch).batch


def writer(rank: int, size: int, path: str) -> Writer:
    return Writer(path)


def last_digit(response: str, ground_truth: str) -> float:
    """Noisy enough to teach something."""
    return float(len(response) % 3) + float(response[-1:] == ground_truth[-1:])


def counts(batch: DataProto) -> LossCounts:
    return LossCounts(float(batch["response_mask"].sum()), float(len(batch)), float(batch["response_mask"].shape[1]))


def thing(rank: int, size: int, word: str = "word") -> Thing:
    return Thing(rank, size, word)


def broken(rank: int, size: int) -> Thing:
    raise RuntimeError(f"rank {rank} cannot")


def dies(rank: int, size: int) -> Thing:
    os._exit(3)
