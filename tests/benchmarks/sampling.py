"""What a rollout's tokens cost: ways to decode, rows of mixed lengths, and draws. CPU seconds, one thread, alternating.

Prints tables; `tests/benchmarks/README.md` has the last ones, with date and machine.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

from workbench.engines import Request, SamplingSettings, local
from workbench.engines.local_engine.caches import SharedPrefix
from workbench.engines.local_engine.sampling import draw

WAYS = ("lean", "shared prompts", "own cache")


def alternating(what: Mapping[str, Callable[[], Any]], rounds: int) -> list[str]:
    """`name` median (least) CPU seconds of each, one after the other in every round."""
    seconds: dict[str, list[float]] = {name: [] for name in what}
    for count in range(rounds + 1):
        for name, function in what.items():
            began = time.process_time()
            function()
            if count:  # the first warms up
                seconds[name].append(time.process_time() - began)
    return [f"{name} {median(each):.4g} ({min(each):.4g})" for name, each in seconds.items()]


def requests(prompts: int, length: int, tokens: Sequence[int]) -> list[Request]:
    """One request for each of `tokens`, in groups of eight with one prompt."""
    generator = torch.Generator().manual_seed(0)
    ids = [tuple(torch.randint(5, 400, (length,), generator=generator).tolist()) for _ in range(prompts)]
    settings = [SamplingSettings(max_tokens=count, ignore_eos=True) for count in tokens]
    return [Request(ids[row // 8], one, row) for row, one in enumerate(settings)]


def sorted_draw(logits: Tensor, uniforms: Tensor, settings: SamplingSettings) -> Tensor:
    """The definition: a whole CDF in float64, and for top-p a sort."""
    weights = torch.softmax(logits.double() / settings.temperature, -1)
    if settings.top_p < 1:
        ordered, order = weights.sort(dim=-1, descending=True)
        beyond = ordered.cumsum(-1) - ordered >= settings.top_p
        weights = weights.masked_fill(torch.zeros_like(beyond).scatter(-1, order, beyond), 0)
    cumulative = weights.cumsum(-1)
    return torch.searchsorted(cumulative, uniforms[:, None] * cumulative[:, -1:], right=True)


def main() -> None:
    """All tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=int, default=1024)
    options = parser.parse_args()
    torch.set_num_threads(1)
    engines = {way: local("data/tiny-arith", device="cpu", decode=way) for way in WAYS}
    for length in (45, 64, 448):
        asked = requests(8, length, [32] * 64)
        ways = {way: partial(engine.sample_many, asked) for way, engine in engines.items()}
        print(f"8 × 8 rows, {length} + 32 tokens:", *alternating(ways, options.rounds), sep="  ", flush=True)

    steps, step = [0], SharedPrefix.step

    def counted(cache: SharedPrefix, tokens: Tensor) -> Tensor:
        steps[0] += 1
        return step(cache, tokens)

    SharedPrefix.step = counted  # type: ignore[method-assign]
    chosen = random.Random(0)
    tokens = [min(400, 1 + int(chosen.expovariate(1 / 40))) for _ in range(options.rows)]
    asked = requests(options.rows // 8, 45, tokens)
    waves = sum(max(tokens[start : start + 256]) for start in range(0, len(tokens), 256))
    began = time.process_time()
    engines["lean"].sample_many(asked)
    spent = time.process_time() - began
    print(f"{options.rows} rows of geometric lengths: {steps[0]} forwards, {waves} in waves of 256; {spent:.2f} s")

    for vocabulary, rows in ((32_000, 64), (151_936, 8), (151_936, 64)):
        generator = torch.Generator().manual_seed(0)
        logits = torch.randn(rows, vocabulary, generator=generator) * 4
        uniforms = torch.rand(rows, generator=generator, dtype=torch.float64)
        for kind in (SamplingSettings(), SamplingSettings(top_p=0.9)):
            ways = {
                "here": partial(draw, logits, uniforms, kind),
                "whole CDF": partial(sorted_draw, logits, uniforms, kind),
            }
            shape = f"{rows} draws of {vocabulary:,}, top_p {kind.top_p}:"
            print(shape, *alternating(ways, options.rounds), sep="  ", flush=True)


if __name__ == "__main__":
    main()
