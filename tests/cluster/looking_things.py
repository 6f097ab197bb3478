"""What ranks hold in tests of looking at a cluster."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from pathlib import Path

import torch


class Busy:
    """Computes, sleeps, talks."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def sleep(self, seconds: float) -> float:
        time.sleep(seconds)
        return seconds

    def wait_for(self, path: str) -> None:
        while not os.path.exists(path):
            time.sleep(0.01)

    def hold_the_interpreter(self, seconds: int, folder: str) -> None:
        """No other thread of this process runs; a file in the folder says that it begins."""
        sleep = ctypes.PyDLL(None).sleep
        Path(folder, str(os.getpid())).touch()
        sleep(seconds)

    def multiply(self, size: int) -> float:
        """On this thread, and a convolution on another."""
        other = threading.Thread(target=lambda: torch.conv1d(torch.ones(1, 1, size), torch.ones(1, 1, 3)))
        other.start()
        other.join()
        weight = torch.ones(size, size, requires_grad=True)
        (weight @ weight).sum().backward()
        assert weight.grad is not None
        return float(weight.grad[0, 0])

    def say(self, text: str) -> None:
        print(f"{text} {self.rank}")

    def started_by(self) -> str:
        with open("/proc/self/cmdline", "rb") as file:
            return f"{sys.executable} {file.read()!r}"


def busy(rank: int, size: int) -> Busy:
    return Busy(rank)
