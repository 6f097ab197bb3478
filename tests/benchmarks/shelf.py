"""The shelf's speed and memory: estimators and losses on 16,384 rows × 1,024 tokens, log-probs of a large vocabulary.

Prints a table: median milliseconds of some runs, and how many times a pass over one [B, T] float32 tensor (x·2 + 1) that is.
`tests/benchmarks/README.md` has the last figures.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from workbench import functional as F


def milliseconds(work: Callable[[], Any], repeats: int) -> float:
    """Median of some runs after one that warms up."""
    work()
    spent = []
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        spent.append(1000 * (time.perf_counter() - began))
    return median(spent)


def vocabulary() -> str:
    """Memory of log-probs and entropy with gradient over a large vocabulary; measured first, the peak only grows."""
    logits = torch.randn(1024, 150_000, requires_grad=True)
    labels = torch.randint(0, 150_000, (1024,))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    (F.log_probs_from_logits(logits, labels).sum() + F.entropy_from_logits(logits).sum()).backward()
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**20
    size = logits.numel() * 4 / 2**30
    return f"log-probs and entropy of [1024, 150000]: {grown:.2f} GiB more with gradient, the logits are {size:.2f} GiB"


def main() -> None:
    """All of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=16_384)
    parser.add_argument("--tokens", type=int, default=1_024)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(vocabulary())
    b, t = options.rows, options.tokens
    lengths = torch.randint(1, t + 1, (b, 1))
    mask = (torch.arange(t) < lengths).long()
    groups = torch.arange(b) // 8
    rewards = torch.zeros(b, t).scatter_(1, lengths - 1, torch.rand(b, 1).round())
    scores, values, old = rewards.sum(-1), torch.rand(b, t), -torch.rand(b, t)
    one = milliseconds(lambda: values * 2 + 1, options.repeats)
    print(f"one pass over [{b}, {t}] float32: {one:.0f} ms, {options.threads} threads")
    print("| function | ms | passes |\n|---|---|---|")
    estimators: dict[str, Callable[[], Any]] = {
        **{f.__name__: (lambda f=f: f(scores, groups, mask)) for f in (F.grpo, F.rloo, F.opo, F.gpg, F.grpo_passk)},
        "reinforce_plus_plus_baseline": lambda: F.reinforce_plus_plus_baseline(scores, groups, mask),
        "reinforce_plus_plus": lambda: F.reinforce_plus_plus(rewards, mask),
        "remax": lambda: F.remax(rewards, scores, mask),
        "gae": lambda: F.gae(rewards, values, mask, 1.0, 0.95),
        "optimal_token_baseline": lambda: F.optimal_token_baseline(rewards, groups, mask, old, old.exp() ** 2),
    }
    for name, work in estimators.items():
        spent = milliseconds(work, options.repeats)
        print(f"| {name} | {spent:.0f} | {spent / one:.1f} |", flush=True)
    advantages = torch.randn(b, t)
    for name, loss in F.POLICY_LOSSES.items():
        new = (old + 0.1 * torch.randn(b, t)).requires_grad_()

        def both(loss: Any = loss, new: torch.Tensor = new) -> None:
            made = loss(old, new, advantages, mask)
            F.aggregate(made.loss, mask, made.aggregation or "token-mean").backward()

        spent = milliseconds(both, options.repeats)
        print(f"| loss {name}, with gradient | {spent:.0f} | {spent / one:.1f} |", flush=True)


if __name__ == "__main__":
    main()
