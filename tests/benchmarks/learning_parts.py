"""Parts of learning beside the plain way, each in turn in one process: `python tests/benchmarks/learning_parts.py`.

CPU seconds (medians) with one thread: log-probs and a whole step with rows as a tree and padded, the head as one function and
by checkpointed chunks of logits, AdamW fused and by torch's loop.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from workbench.dataproto import DataProto
from workbench.engines import local
from workbench.engines.local_engine.forward import Head
from workbench.engines.local_engine.scoring import logits_in_chunks
from workbench.functional.logprobs import linear_log_probs
from workbench.testing.engines import EngineContract, LikelihoodLoss


def group_rows(prompt: int, response: int, groups: int = 8, size: int = 8) -> DataProto:
    """Groups of rows with one prompt each, random tokens."""
    torch.manual_seed(0)
    prompts = torch.randint(5, 500, (groups, prompt)).repeat_interleave(size, 0)
    ids = torch.cat([prompts, torch.randint(5, 500, (groups * size, response))], 1)
    places = torch.arange(prompt + response).expand_as(ids)
    ones = torch.ones_like(ids)
    columns = {"input_ids": ids, "attention_mask": ones, "position_ids": places, "response_mask": ones[:, :response]}
    return DataProto(columns)


def in_turn(times: int, **ways: Callable[[], Any]) -> str:
    """Median CPU seconds of each way, run in turn after one run that does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(times + 1):
        for name, way in ways.items():
            start = time.process_time()
            way()
            if number:
                seconds[name].append(time.process_time() - start)
    return ", ".join(f"{name} {statistics.median(found):.4f}" for name, found in seconds.items())


def steps() -> None:
    engines = {pack: local("data/tiny-arith", device="cpu", pack=pack) for pack in ("yes", "no")}
    for prompt, response in ((45, 32), (470, 32), (45, 200)):
        rows = group_rows(prompt, response)
        counts = EngineContract.counts(rows)
        learn = {one: partial(engine.learn, rows, LikelihoodLoss(), counts) for one, engine in engines.items()}
        score = {one: partial(engine.compute_log_probs, rows) for one, engine in engines.items()}
        print(f"8 × 8 rows, prompt {prompt}, response {response}: ", end="")
        print(f"learn {in_turn(5, tree=learn['yes'], padded=learn['no'])};", end=" ")
        print(f"score {in_turn(5, tree=score['yes'], padded=score['no'])}")


def head(rows: int, vocabulary: int, hidden: int) -> None:
    layer = torch.nn.Linear(hidden, vocabulary, bias=False)
    states, labels = torch.randn(rows, hidden, requires_grad=True), torch.randint(0, vocabulary, (rows,))

    def one() -> None:
        linear_log_probs(states, layer.weight, None, labels)[0].sum().backward()

    def chunks() -> None:
        logits_in_chunks(Head(layer), states, labels, ("log_probs",), 1.0)["log_probs"].sum().backward()

    print(f"head, {rows} tokens, V = {vocabulary}, H = {hidden}: {in_turn(1, function=one, chunks=chunks)}")


def adamw(parameters: int) -> None:
    def way(**kind: bool) -> Callable[[], None]:
        weights = [torch.nn.Parameter(torch.zeros(parameters // 8)) for _ in range(8)]
        for one in weights:
            one.grad = torch.ones_like(one)
        optimizer = torch.optim.AdamW(weights, **kind)
        return lambda: optimizer.step()

    print(f"AdamW, {parameters:,} parameters: {in_turn(5, fused=way(fused=True), foreach=way(foreach=True))}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    steps()
    head(1024, 151_936, 128)
    adamw(62_000_000)
