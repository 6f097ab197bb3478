"""What a way back costs: bytes held, seconds, and peak memory of taking and restoring each kind of snapshot.

A random Qwen2 of about 200 MB in float32, one short update between two states; `LoRA` is the same with adapters. With
`--shape 0.5b` a stepper's `back` over an update instead, by the settings that it has by default: local and two FSDP ranks.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

sys.path += [str(Path(__file__).parents[1])]
from support.models import make_shaped_model

import workbench as wb
from workbench.base.memory import free_memory
from workbench.stages.rollout import columns_of
from workbench.stages.update import PolicyLoss, Update
from workbench.testing.engines import LikelihoodLoss


def peak() -> int:
    """Most bytes of this process in memory since `measured` began."""
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) * 1024


def measured(what: Callable[[], Any]) -> tuple[Any, float, float]:
    """(its value, seconds, MB above what was in memory before at the peak)."""
    gc.collect()
    free_memory()
    Path("/proc/self/clear_refs").write_text("5")
    before, began = peak(), time.perf_counter()
    value = what()
    return value, time.perf_counter() - began, (peak() - before) / 1e6


def model(folder: Path, hidden: int, layers: int) -> Path:
    """A random model with the tiny one's tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained("data/tiny-arith")
    config = Qwen2Config(
        hidden_size=hidden, intermediate_size=4 * hidden, num_hidden_layers=layers, num_attention_heads=8,
        num_key_value_heads=4, vocab_size=32_000, tie_word_embeddings=True, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def compare(folder: Path, **settings: Any) -> None:
    """Take the state before and after an update by each kind, and go back."""
    samples = [wb.engines.Sample(tuple(range(5, 37)), (-1.0,) * 32, "length", 0) for _ in range(4)]
    batch = wb.DataProto.from_single_dict(columns_of([(1, 5, 9, 7)] * 4, samples, 0))
    counts = wb.engines.LossCounts(128.0, 4.0)
    for kind in ("memory", "disk", "replay"):
        engine = wb.engines.local(folder, lr=1e-4, device="cpu", **settings)
        for name in ("as loaded", "after a step"):
            kept, took, more = measured(partial(engine.snapshot, kind, folder))
            held = f"{kept.kind:<10} {kept.nbytes / 1e6:8.1f} MB held, taken in {took:6.3f} s, peak +{more:6.0f} MB"
            engine.learn(batch, LikelihoodLoss(), counts)
            if name == "after a step":
                _, took, more = measured(partial(engine.restore, kept))
                held += f"; restored in {took:6.3f} s, peak +{more:6.0f} MB"
            print(f"{kind:<7} {name:<13} {held}", flush=True)
            base = kept  # a replay begins there
        del base, kept, engine


def made_batch(rows: int, tokens: int) -> wb.DataProto:
    """Rows as an update reads them, made by hand: nothing is sampled."""
    samples = [wb.engines.Sample(tuple(range(5, 5 + tokens)), (-1.0,) * tokens, "length", 0) for _ in range(rows)]
    columns = columns_of([(1, 5, 9, 7)] * rows, samples, 0)
    ones = torch.ones(rows, tokens)
    named = {**columns, "old_log_probs": -ones, "advantages": ones, "uid": [str(row) for row in range(rows)]}
    named["scored"] = torch.ones(rows, dtype=torch.bool)
    return wb.DataProto.from_single_dict(named)


def memory_of_all() -> float:
    """GB of this process and its children, pages that they share counted once."""
    every = [psutil.Process(), *psutil.Process().children(recursive=True)]
    return sum(one.memory_full_info().pss for one in every) / 1e9


def size_of(folder: Path) -> float:
    """GB of the files in a folder."""
    return sum(one.stat().st_size for one in folder.rglob("*") if one.is_file()) / 1e9


def stepping(name: str, make: Callable[[], Any], scratch: Path) -> None:
    """Go back over an update from weights as they were loaded, then from weights that nobody else has."""
    tempfile.tempdir = str(scratch)
    engine = make()
    batch = made_batch(8, 32)
    for base in ("as loaded", "trained"):
        s = wb.Stepper([Update(engine, PolicyLoss())], batch)
        before, written = memory_of_all(), size_of(scratch)
        began = time.perf_counter()
        s.run()
        update, held = time.perf_counter() - began, memory_of_all() - before
        disk = size_of(scratch) - written
        began = time.perf_counter()
        s.back()
        back = time.perf_counter() - began
        kinds = ", ".join(one.kind for one in s.snapshots._all())
        print(
            f"{name:<11} {base:<9} update with its snapshot {update:6.1f} s, memory +{held:5.2f} GB, disk +{disk:5.2f} GB, "
            f"back {back:6.1f} s ({kinds})", flush=True,
        )  # fmt: skip
        s.run()
        del s
        gc.collect()
    if hasattr(engine, "close"):
        engine.close()


def at_size(shape: str) -> None:
    """Local and FSDP, full and LoRA, in turn."""
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as place:
        folder, scratch = Path(place) / "model", Path(place) / "scratch"
        scratch.mkdir()
        make_shaped_model(folder, shape)
        for kind, settings in (("full", {}), ("LoRA", {"lora_rank": 16})):
            given: dict[str, Any] = {"device": "cpu", "lr": 1e-6, **settings}
            stepping(f"local {kind}", partial(wb.engines.local, folder, **given), scratch)
            ranks = partial(wb.engines.fsdp, folder, ranks=2, scratch=scratch, threads=1, **given)
            stepping(f"FSDP {kind}", ranks, scratch)


def main() -> None:
    """Both ways of training."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, default=640)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--shape", help="a shape of tests/support/models.py: `back` of a stepper at that size")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.shape:
        return at_size(options.shape)
    with tempfile.TemporaryDirectory() as place:
        folder = model(Path(place), options.hidden, options.layers)
        size = (folder / "model.safetensors").stat().st_size
        print(f"weights {size / 1e6:.0f} MB, with moments {3 * size / 1e6:.0f} MB")
        for settings in ({}, {"lora_rank": 16}):
            print("LoRA" if settings else "full")
            compare(folder, **settings)


if __name__ == "__main__":
    main()
