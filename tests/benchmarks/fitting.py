"""`fits` beside what a learner really takes: the peak of each rank's process over four steps, full and with an adapter, with
layers recomputed or not, on one and two ranks.

`fits` counts tensors; ranks take large blocks apart from the heap (`base.memory.separate_blocks`), but with `--heap`, where they keep
glibc's own ways. Beside each case is the median of a rank's seconds for an update.

    .venv/bin/python tests/benchmarks/fitting.py [shape] [length] [rows] [--heap]
    .venv/bin/python tests/benchmarks/fitting.py --cards [size …]    # estimates of one card's engines beside rehearsals
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoTokenizer

sys.path += [str(Path(__file__).parents[1])]
from support.models import make_shaped_model

from workbench.cluster import fits
from workbench.dataproto import DataProto
from workbench.engines.fsdp_engine.engine import fsdp
from workbench.engines.fsdp_engine.group import local_group
from workbench.engines.local_engine import loading
from workbench.engines.local_engine.engine import LocalEngine
from workbench.engines.local_engine.selfcheck import Paths
from workbench.engines.protocol import LossCounts
from workbench.engines.rehearsal import Footprint, Opened, Shape, unmeasured, whole
from workbench.engines.settings import LocalSettings
from workbench.jobs import cards
from workbench.testing.engines import LikelihoodLoss

CASES: dict[str, dict[str, Any]] = {
    "full, 1 rank": {"ranks": 1},
    "full, 2 ranks": {"ranks": 2},
    "recomputed, 2 ranks": {"ranks": 2, "gradient_checkpointing": True},
    "adapter, 2 ranks": {"ranks": 2, "lora_rank": 16},
    "adapter, recomputed, 1 rank": {"ranks": 1, "lora_rank": 16, "gradient_checkpointing": True},
}


def peak(pid: int) -> int:
    """The most bytes that a process has had in memory."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:"))


def rows_of(count: int, length: int) -> DataProto:
    """Rows of random tokens, a quarter of them response."""
    ids, start = torch.randint(5, 60, (count, length), generator=torch.Generator().manual_seed(0)), length * 3 // 4
    ones = torch.ones_like(ids)
    columns = {"input_ids": ids, "attention_mask": ones, "position_ids": torch.arange(length).repeat(count, 1)}
    return DataProto.from_dict({**columns, "responses": ids[:, start:], "response_mask": ones[:, start:]})


HEAP = {"GLIBC_TUNABLES": ""}
"""Environment of a rank that leaves glibc's malloc as it is."""


def measured(
    folder: Path, length: int, rows: int, env: Any = None, *, ranks: int, **settings: Any
) -> tuple[int, int, float]:
    """(bytes that `fits` says, bytes that the fullest rank took, seconds of an update) with micro-batches of `rows`, two a rank."""
    settings["micro_batch_tokens"] = rows * length
    said = fits(folder, tokens=length, memory=1 << 40, sampler=None, reference=False, ranks=ranks, **settings)
    group = local_group(ranks, threads=1, env=env)
    engine = fsdp(folder, on=group, self_check=False, check_memory=False, **settings)
    try:
        batch = rows_of(2 * rows * ranks, length)
        times = []
        for _ in range(4):
            began = time.perf_counter()
            engine.learn(batch, LikelihoodLoss(), LossCounts(1.0, 1.0))
            times.append(time.perf_counter() - began)
        return said.needed, max(peak(worker["pid"]) for worker in group.workers), statistics.median(times[1:])
    finally:
        engine.close()


def lines(env: Any, shape: str, length: int, rows: int) -> Iterator[str]:
    """One line for each case."""
    with tempfile.TemporaryDirectory() as folder:
        model = make_shaped_model(Path(folder) / shape, shape)
        for name, settings in CASES.items():
            said, took, seconds = measured(model, length, rows, env, **settings)
            sizes = f"said {said / 2**20:6.0f} MiB   took {took / 2**20:6.0f} MiB   {said / took - 1:+.1%}"
            yield f"{name:<28} {sizes}   {seconds:.2f} s"


WIDE: dict[str, Any] = {
    **{"model_type": "qwen2", "hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 8},
    **{"num_key_value_heads": 2, "vocab_size": 48_000, "num_hidden_layers": 4, "tie_word_embeddings": True},
}
"""A config of a small model whose layers outweigh its head."""
PRECISIONS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "half": {"dtype": "bfloat16"},
    "LoRA, base float32": {"dtype": "bfloat16", "lora_rank": 16},
    "LoRA, base half": {"dtype": "bfloat16", "lora_rank": 16, "base_dtype": "bfloat16"},
    "LoRA, base int8": {"dtype": "bfloat16", "lora_rank": 16, "base_dtype": "int8"},
    "LoRA, base nf4": {"dtype": "bfloat16", "lora_rank": 16, "base_dtype": "nf4"},
}
"""How a model is kept on a card; bfloat16 and float16 take the same."""


def beside_a_rehearsal(config: dict[str, Any], budget: int, **settings: Any) -> tuple[Footprint, Footprint]:
    """(what `unmeasured` says of a local engine on a GPU, what a rehearsal of the engine's own code measures)."""
    chosen = LocalSettings(micro_batch_tokens=budget, **settings)
    tokenizer = AutoTokenizer.from_pretrained("data/tiny-arith")

    def opened(folder: str, settings: LocalSettings) -> Opened:
        model = loading.load_model(folder, settings, empty=True).to_empty(device="cpu")
        model.tie_weights()
        model.workbench_paths = Paths(pack=True, decode="lean")
        twin = LocalEngine(model, tokenizer, settings)
        return Opened(model, twin._ready(), twin.learn, twin.compute_log_probs)

    took = whole(opened, AutoConfig.for_model(**config), chosen, Shape.of(budget, min(budget, 1024)), gpu=True)
    return unmeasured(config, chosen, budget, "cuda"), took


def table(budget: int, sizes: list[str]) -> Iterator[str]:
    """One line for each of the doctor's sizes and each way to keep it: said and measured, and their CPU seconds."""
    for size in sizes or cards.SIZES:
        config = cards.SIZES[size]
        for name, kept in PRECISIONS.items():
            for again in (False, True):
                began = time.process_time()
                said, took = beside_a_rehearsal(config, budget, **kept, gradient_checkpointing=again)
                learn, score = (getattr(said, one) / getattr(took, one) - 1 for one in ("learning", "scoring"))
                sizes = f"learning {said.learning / 2**30:6.1f} GiB {learn:+.1%}   scoring {said.scoring / 2**30:6.1f} GiB {score:+.1%}"
                yield f"{size:<5} {name:<19} {'recomputed' if again else '':<11} {sizes}   {time.process_time() - began:.0f} s"


if __name__ == "__main__" and "--cards" in sys.argv:
    for line in table(2048, sys.argv[2:]):
        print(line, flush=True)
elif __name__ == "__main__":
    asked = [one for one in sys.argv[1:] if one != "--heap"] or ["60m", "128", "4"]
    for line in lines(HEAP if "--heap" in sys.argv else None, asked[0], *map(int, asked[1:])):
        print(line, flush=True)
