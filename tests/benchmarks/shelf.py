"""The shelf's speed and memory: estimators, losses with their gradient and corrections on 16,384 rows × 1,024 tokens.

Prints a table: how many times a pass over one [B, T] float32 tensor (x·2 + 1) each function takes, now and in 0.6.0, which is
read from git where its commit is there. Both sides and the pass take turns in one process; figures are medians.
`tests/benchmarks/README.md` has the last ones. `--rows 64 --tokens 32` is a micro-batch: what a call itself costs.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import io
import resource
import subprocess
import sys
import tarfile
import tempfile
import time
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import torch

from workbench import functional
from workbench.functional import correction as _correction  # noqa: F401

BEFORE = "5e8b75f"
"""The commit of 0.6.0."""
Work = Callable[[], Any]


def shelf_of(commit: str) -> Any | None:
    """`workbench.functional` as it was at a commit, beside today's; None where git or the commit is not there."""
    root = Path(__file__).parents[2]
    packed = subprocess.run(
        ["git", "archive", commit, "workbench/functional"], cwd=root, capture_output=True, check=False
    )
    if packed.returncode:
        return None
    today = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == "workbench"}
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as archive:
            archive.extractall(folder, filter="data")
        bare = types.ModuleType("workbench")  # its `__init__` would import all of it
        bare.__path__ = [f"{folder}/workbench"]
        sys.modules["workbench"] = bare
        found = importlib.import_module("workbench.functional")
        importlib.import_module("workbench.functional.correction")
    for name in [name for name in sys.modules if name.split(".")[0] == "workbench"]:
        del sys.modules[name]
    sys.modules.update(today)
    return found


def taking_turns(works: Mapping[str, Work], repeats: int, calls: int) -> dict[str, float]:
    """Median milliseconds of each work, called in turn; one round before warms up."""
    spent: dict[str, list[float]] = {name: [] for name in works}
    for number in range(repeats + 1):
        for name, work in works.items():
            began = time.perf_counter()
            for _ in range(calls):
                work()
            if number:
                spent[name].append(1000 * (time.perf_counter() - began) / calls)
    return {name: median(each) for name, each in spent.items()}


def vocabulary() -> str:
    """Memory of log-probs and entropy with gradient over a large vocabulary; measured first, the peak only grows."""
    logits = torch.randn(1024, 150_000, requires_grad=True)
    labels = torch.randint(0, 150_000, (1024,))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    picked, entropy = functional.log_probs_from_logits(logits, labels), functional.entropy_from_logits(logits)
    (picked.sum() + entropy.sum()).backward()
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**20
    size = logits.numel() * 4 / 2**30
    return f"log-probs and entropy of [1024, 150000]: {grown:.2f} GiB more with gradient, the logits are {size:.2f} GiB"


def batch(rows: int, tokens: int) -> dict[str, torch.Tensor]:
    """Rows of random length in groups of eight, rewarded at their end."""
    lengths = torch.randint(1, tokens + 1, (rows, 1))
    mask = (torch.arange(tokens) < lengths).long()
    rewards = torch.zeros(rows, tokens).scatter_(1, lengths - 1, torch.rand(rows, 1).round())
    old = -torch.rand(rows, tokens)
    new = old + 0.1 * torch.randn(rows, tokens)
    return {
        "mask": mask,
        "groups": torch.arange(rows) // 8,
        "rewards": rewards,
        "scores": rewards.sum(-1),
        "parts": torch.rand(rows, 3).round(),
        "values": torch.rand(rows, tokens),
        "old": old,
        "squared": old.exp() ** 2,
        "new": new,
        "advantages": torch.randn(rows, tokens),
    }


def works(shelf: Any, b: dict[str, torch.Tensor]) -> dict[str, Work]:
    """What is measured, by name, with the functions of a shelf: today's or 0.6.0's."""
    mask, groups, scores, rewards = b["mask"], b["groups"], b["scores"], b["rewards"]
    token = (rewards, groups, mask, b["old"], b["squared"])
    over_rows = ("grpo", "rloo", "opo", "gpg", "grpo_passk", "reinforce_plus_plus_baseline")
    made: dict[str, Work] = {
        **{name: functools.partial(getattr(shelf, name), scores, groups, mask) for name in over_rows},
        "gdpo": lambda: shelf.gdpo(b["parts"], groups, mask),
        "reinforce_plus_plus": lambda: shelf.reinforce_plus_plus(rewards, mask),
        "reinforce_plus_plus, gamma .99": lambda: shelf.reinforce_plus_plus(rewards, mask, gamma=0.99),
        "remax": lambda: shelf.remax(rewards, scores, mask),
        "gae": lambda: shelf.gae(rewards, b["values"], mask, 1.0, 0.95),
        "optimal_token_baseline": lambda: shelf.optimal_token_baseline(*token),
        "tir_optimal_token_baseline": lambda: shelf.tir_optimal_token_baseline(*token),
        "masked_whiten": lambda: shelf.masked_whiten(rewards, mask),
        "importance_weights": lambda: shelf.correction.importance_weights(b["new"], b["old"], mask),
        "rejected, seq_mean_k1": lambda: shelf.correction.rejected(b["new"], b["old"], mask, "seq_mean_k1", upper=1.5),
        "off_policy": lambda: shelf.correction.off_policy(b["new"], b["old"], mask),
    }
    leaf = b["new"].clone().requires_grad_()

    def learn(loss: Callable[[torch.Tensor], tuple[torch.Tensor, str | None]]) -> Work:
        def step() -> None:
            leaf.grad = None
            tokens, mode = loss(leaf)
            shelf.aggregate(tokens, mask, mode or "token-mean").backward()

        return step

    def policy(loss: Callable[..., Any]) -> Work:
        def tokens(new: torch.Tensor) -> tuple[torch.Tensor, str | None]:
            found = loss(b["old"], new, b["advantages"], mask)
            return found.loss, found.aggregation

        return learn(tokens)

    return (
        made
        | {f"loss {name}, with gradient": policy(loss) for name, loss in shelf.POLICY_LOSSES.items()}
        | {
            "value_loss, with gradient": learn(
                lambda new: (shelf.value_loss(new, b["values"], b["old"], mask).loss, None)
            ),
            "kl_penalty k3, with gradient": learn(lambda new: (shelf.kl_penalty(new, b["old"], "k3"), None)),
            "kl_penalty k3+, with gradient": learn(lambda new: (shelf.kl_penalty(new, b["old"], "k3+"), None)),
            "aggregate, with gradient": learn(lambda new: (new, "seq-mean-token-mean")),
        }
    )


def main() -> None:
    """All of them, or those of which the name contains `--only`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=16_384)
    parser.add_argument("--tokens", type=int, default=1_024)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--before", default=BEFORE, help="the commit to compare with")
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    if not options.only:
        print(vocabulary())
    given = batch(options.rows, options.tokens)
    calls = max(1, 200_000 // given["mask"].numel())
    now = works(functional, given)
    older = shelf_of(options.before)
    before = {} if older is None else works(older, given)
    print(
        f"[{options.rows}, {options.tokens}], {options.threads} threads, before: {options.before if before else 'none'}"
    )
    print("| function | ms | passes | ms before | passes before | ratio |\n|---|---|---|---|---|---|")
    for name in (name for name in now if options.only in name):
        sides = {"pass": lambda: given["values"] * 2 + 1, "now": now[name]}
        if name in before:
            sides["before"] = before[name]
        spent = taking_turns(sides, options.repeats, calls)
        cells = [f"{spent['now']:.4g}", f"{spent['now'] / spent['pass']:.1f}"]
        if name in before:
            then = spent["before"]
            cells += [f"{then:.4g}", f"{then / spent['pass']:.1f}", f"{spent['now'] / then:.2f}"]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
