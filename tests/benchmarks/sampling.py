"""What a rollout's tokens cost: ways to decode, rows of mixed lengths, and draws. CPU seconds, one thread, alternating.

    PYTHONPATH=. python tests/benchmarks/sampling.py
    PYTHONPATH=. python tests/benchmarks/sampling.py --limit MODEL      # one token of all rows beside what the processor could do
    PYTHONPATH=. python tests/benchmarks/sampling.py --ways MODEL       # every way to decode: rows, precisions, LoRA, memory

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

from workbench.base import memory
from workbench.engines import Request, SamplingSettings, local
from workbench.engines.local_engine.caches import PATHS, UNCACHED, PaddedRows, SharedPrefix, Uncached
from workbench.engines.local_engine.products import product
from workbench.engines.local_engine.sampling import HeldRows, draw

WAYS = ("lean", "shared prompts", "own cache")
SIDES: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"dtype": "bfloat16"},
    "LoRA, float32": {"lora_rank": 16},
    "LoRA, bfloat16": {"lora_rank": 16, "dtype": "bfloat16"},
}


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


def cpu_seconds(function: Callable[[], Any], times: int = 5) -> float:
    """Median CPU seconds of a call, after one that warms up."""
    function()
    spent = []
    for _ in range(times):
        began = time.process_time()
        function()
        spent.append(time.process_time() - began)
    return median(spent)


def limits(model: str, rows: Sequence[int]) -> None:
    """Milliseconds of a decode step and of its draws, beside what its products take at the rate of a large product, what its
    weights take to be read at the rate of a sum over 256 MB, and what its products take one by one, all in turn."""
    step, advance = SharedPrefix.step, HeldRows.advance
    for name, settings in SIDES.items():
        engine = local(model, device="cpu", threads=1, decode="lean", self_check=False, **settings)
        kind = torch.bfloat16 if "bfloat16" in name else torch.float32
        weights = [
            p.detach().to(kind) for key, p in engine._model.named_parameters() if p.dim() == 2 and "lora" not in key
        ]
        big, left, right = torch.zeros(1 << 26), torch.randn(1024, 1536).to(kind), torch.randn(1536, 1536).to(kind)
        for count in rows:
            asked, found = requests(max(1, count // 8), 60, [48] * count), []
            states = [torch.randn(count, one.shape[1]).to(kind) for one in weights]
            for _ in range(3):
                spent: dict[str, list[float]] = {"step": [], "draw": []}
                SharedPrefix.step = timed(step, spent["step"])  # type: ignore[method-assign]
                HeldRows.advance = timed(advance, spent["draw"])  # type: ignore[method-assign]
                engine.sample_many(asked)
                took = {part: median(each[1:]) for part, each in spent.items()}
                rate = 2 * 1024 * 1536**2 / cpu_seconds(partial(product, left, right))
                took["compute"] = 2 * sum(one.numel() for one in weights) * count / rate
                read = sum(one.nbytes for one in weights)
                took["read"] = read * cpu_seconds(big.sum, 3) / big.nbytes
                took["products"] = cpu_seconds(partial(multiplied, states, weights), 3)
                share = max(took["compute"], took["read"]) / (took["step"] + took["draw"])
                found.append((share, took))
            share, took = sorted(found, key=lambda one: one[0])[1]
            shown = ", ".join(f"{part} {value * 1e3:.1f}" for part, value in took.items())
            print(f"{name}, {count} rows: {share:.2f} of the limit; ms: {shown}", flush=True)
        SharedPrefix.step, HeldRows.advance = step, advance  # type: ignore[method-assign]


def multiplied(states: Sequence[Tensor], weights: Sequence[Tensor]) -> list[Tensor]:
    """The product of each pair."""
    return [product(one, other) for one, other in zip(states, weights, strict=True)]


def timed(function: Callable[..., Any], spent: list[float]) -> Callable[..., Any]:
    """The function, which adds the CPU seconds of each call to `spent`."""

    def run(*args: Any, **kwargs: Any) -> Any:
        began = time.process_time()
        result = function(*args, **kwargs)
        spent.append(time.process_time() - began)
        return result

    return run


def compared(model: str, sides: Sequence[str], rows: Sequence[int], length: int, tokens: int, rounds: int) -> None:
    """CPU milliseconds until each row's first token (prompts included) and of a further token of all rows, medians of
    the rounds, and the most megabytes that a rollout needs beside what the engine holds before it: each way in turn,
    with the same weights. The whole row again for each token (`no cache`) is tried with at most eight rows."""
    spent: dict[str, list[float]] = {"seat": [], "step": []}
    for kind in (SharedPrefix, PaddedRows, Uncached):
        for part, each in spent.items():
            setattr(kind, part, timed(getattr(kind, part), each))
    for side in sides:
        engine = local(model, device="cpu", threads=1, self_check=False, **SIDES[side])
        for count in rows:
            asked = requests(max(1, count // 8), length, [tokens] * count)
            warms = int(count == rows[0])  # a first round that is not counted
            tried = [way for way in PATHS if way != UNCACHED or count <= 8]
            found: dict[str, list[tuple[float, float, float]]] = {way: [] for way in tried}
            for number in range(rounds + warms):
                for way in tried:
                    engine._settings = engine._settings.replace(decode=way)
                    memory.trim()  # else what other ways have freed counts as held
                    held = memory.resident()
                    memory.peak(begin=True)
                    for each in spent.values():
                        each.clear()
                    engine.sample_many(asked)
                    seats, steps = spent["seat"], spent["step"]
                    more = (memory.peak() - held) / 1e6
                    if number >= warms:
                        found[way].append((sum(seats) + steps[0], median(steps[1:]), more))
            for way, taken in found.items():
                first, further, more = (median(one) for one in zip(*taken, strict=True))
                whole = first + (tokens - 1) * further
                line = f"{side}, {count} rows of {length} + {tokens}, {way}: first {first * 1e3:.1f}, further {further * 1e3:.2f} ms"
                print(f"{line}, whole {whole:.3f} s, {more:.0f} MB", flush=True)


def main() -> None:
    """All tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument(
        "--limit", metavar="MODEL", help="the folder of a model: its decode steps beside the processor's limit"
    )
    parser.add_argument("--ways", metavar="MODEL", help="the folder of a model: every way to decode it")
    parser.add_argument("--sides", nargs="+", default=list(SIDES), choices=list(SIDES), help="of --ways")
    parser.add_argument("--counts", nargs="+", type=int, default=[8, 16, 64, 256], help="rows of --ways")
    parser.add_argument("--length", type=int, default=60, help="of the prompts of --ways")
    parser.add_argument("--tokens", type=int, default=8, help="of a response of --ways")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.ways:
        compared(options.ways, options.sides, options.counts, options.length, options.tokens, options.rounds)
        return
    if options.limit:
        limits(options.limit, (8, 64))
        return
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
