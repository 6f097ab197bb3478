"""How fast rewards are: rules in this process, functions in the pool, equivalence, programs in the sandbox.

    python tests/benchmarks/rewards.py

Programs in the sandbox are compared, in turn, with what the machine needs to start as many bare interpreters, two at a
time: the difference is ours and the isolation's.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from typing import Any

from workbench.base.errors import SandboxError
from workbench.rewards import Code, Reward, as_reward, math_verify
from workbench.rewards.scorers.gsm8k import gsm8k
from workbench.sandbox import LocalSandbox, Program
from workbench.testing.rewards import answered

TEXT = "She sells 16 - 3 - 4 = 9 eggs a day and makes 9 * 2 = 18 dollars.\n#### 18"


def seconds(work: Callable[[], Any], times: int = 5) -> float:
    """Median wall time."""
    found = []
    for _ in range(times):
        began = time.perf_counter()
        work()
        found.append(time.perf_counter() - began)
    return median(found)


def rules() -> None:
    """1,024 GSM8K rows in this process, from the batch to records."""
    rows = answered([TEXT] * 1024, ["18"] * 1024)
    reward = as_reward(gsm8k)
    assert all(score.value == 1 for score in reward.score(rows))
    print(f"1,024 GSM8K rows in this process: {1000 * seconds(lambda: reward.score(rows)):.0f} ms")


def pool() -> None:
    """1,024 rows of a user's function in two workers, warm."""
    rows = answered([TEXT] * 1024, ["18"] * 1024)
    reward = Reward(lambda solution_str, ground_truth: float(ground_truth in solution_str), workers=2)
    reward.score(rows)
    print(f"1,024 rows of a function in two workers: {1000 * seconds(lambda: reward.score(rows)):.0f} ms")
    reward.close()


def equivalence() -> None:
    """256 answers by math-verify in two workers, warm."""
    rows = answered([r"so it is \boxed{\frac{1}{4}}"] * 256, ["0.25"] * 256)
    reward = math_verify(workers=2)
    reward.score(rows)
    print(f"256 answers by math-verify in two workers: {1000 * seconds(lambda: reward.score(rows), 3):.0f} ms")
    reward.close()


def programs() -> None:
    """256 one-case programs by tier, beside 256 bare interpreters."""
    number, at_once = 256, os.cpu_count() or 1

    def bare() -> None:
        with ThreadPoolExecutor(at_once) as threads:
            list(threads.map(lambda _: subprocess.run(["/usr/bin/python3", "-s", "-B", "-c", "print(1)"], capture_output=True, check=True), range(number)))  # fmt: skip

    rows = answered(
        ["```python\nprint(int(input()) + 1)\n```"] * number, [{"inputs": ["41"], "outputs": ["42"]}] * number
    )
    for tier in ("bubblewrap", "namespaces"):
        try:
            box = LocalSandbox(tier=tier)
        except SandboxError as error:
            print(f"{tier}: {error}")
            continue
        reward = as_reward(Code(box))
        assert all(score.value == 1 for score in reward.score(rows))
        pairs = [(seconds(lambda: reward.score(rows), 1), seconds(bare, 1)) for _ in range(3)]  # noqa: B023
        ours, theirs = (median(side) for side in zip(*pairs, strict=True))
        alone = median(box.run(Program(code="pass")).run.seconds for _ in range(20))  # type: ignore[union-attr]
        print(
            f"{number} programs, {tier}: {ours:.2f} s ({number / ours:.0f} a second); as many bare interpreters {theirs:.2f} s; "
            f"one program alone {1000 * alone:.0f} ms"
        )


if __name__ == "__main__":
    rules()
    pool()
    equivalence()
    programs()
