"""How long a test waits, and how many examples it draws: seconds scale with the machine, and no test asserts how long a thing took.

`FACTOR` says how many times slower this machine is than a quiet one, measured when the tests begin; at least two, since the tests
themselves keep it busy. A test that waits for what
must come says `within(condition)`: it costs nothing where the thing comes. A limit that the tested code is given, so that it
passes, is `patience(seconds)`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

_QUIET_SECONDS = 0.4
"""Wall seconds of `_WORK` on a machine of two cores that has nothing else to do."""
_WORK = "import asyncio, json, logging\ntotal = 0\nfor n in range(1_500_000): total += n * n"


def _factor() -> float:
    """Measured once by the process that starts the tests; its workers find it in their environment."""
    if "WORKBENCH_TESTS_FACTOR" not in os.environ:
        began = time.perf_counter()
        subprocess.run([sys.executable, "-c", _WORK], check=True)
        found = (time.perf_counter() - began) / _QUIET_SECONDS
        os.environ["WORKBENCH_TESTS_FACTOR"] = f"{min(20.0, max(2.0, found)):.1f}"
    return float(os.environ["WORKBENCH_TESTS_FACTOR"])


FACTOR = _factor()


def patience(seconds: float) -> float:
    """So many seconds of a quiet machine."""
    return seconds * FACTOR


LONG = 120 * FACTOR
"""Seconds that nothing of the tests takes: whoever waits so long waits for what does not come."""


def within(condition: Callable[[], T], seconds: float = LONG, every: float = 0.05) -> T:
    """What the condition gives as soon as it is true, or what it gives at the end."""
    end = time.monotonic() + seconds
    while not (found := condition()) and time.monotonic() < end:
        time.sleep(every)
    return found


def cost(work: Callable[[], object]) -> float:
    """CPU seconds of this process, the least of three: for comparing the costs of much and of little."""
    found = []
    for _ in range(3):
        began = time.process_time()
        work()
        found.append(time.process_time() - began)
    return max(min(found), 0.002)  # less is the clock's grain


def examples(number: int) -> int:
    """Examples of a property: at most 25 beside the other tests, many with HYPOTHESIS_PROFILE=all (make test-all)."""
    return max(300, number) if os.environ.get("HYPOTHESIS_PROFILE") == "all" else min(25, number)
