"""Sampled tokens until a student reaches its teacher's held-out reward, by GRPO and by distillation.

    python tests/benchmarks/distillation.py [--seeds 0 1 2] [--steps 40]

The teacher is tiny-arith with twice its layers, after supervised steps on the training rows' solutions, as in notebook 109. All
ways have the same prompts and as many samples and optimizer steps a step. `tests/benchmarks/README.md` has the last table.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

import workbench as wb

MODEL = "data/tiny-arith"
WITHIN = 0.02
"""How far below the teacher's held-out reward a student may be."""
LR = {"grpo": 4e-5, "reverse": 1e-4, "forward": 1e-4}
"""GRPO's is that of notebook 201, the best of those tried there."""
SAMPLED: dict[str, Any] = {"group_size": 8, "max_tokens": 64, "ppo_mini_batch_size": 1}


def deeper(target: Path) -> Path:
    """Save a copy of the model with twice as many blocks, of which the new ones add nothing yet."""
    disable_progress_bar()
    small, config = AutoModelForCausalLM.from_pretrained(MODEL), AutoConfig.from_pretrained(MODEL)
    layers = config.num_hidden_layers
    config.num_hidden_layers, config.layer_types = 2 * layers, 2 * config.layer_types
    torch.manual_seed(0)
    large = AutoModelForCausalLM.from_config(config)
    large.load_state_dict(small.state_dict(), strict=False)
    for block in large.model.layers[layers:]:
        torch.nn.init.zeros_(block.self_attn.o_proj.weight)
        torch.nn.init.zeros_(block.mlp.down_proj.weight)
    large.save_pretrained(target)
    AutoTokenizer.from_pretrained(MODEL).save_pretrained(target)
    return target


def taught(folder: Path, rows: wb.datasets.Rows, seed: int, steps: int) -> Any:
    """The teacher."""
    large = wb.engines.local(deeper(folder), lr=3e-4)
    pipe = wb.recipes.sft(large, target="extra_info.answer", max_tokens=64)
    for step in range(1, steps + 1):
        wb.Stepper(pipe, rows.batch(32, step=step, seed=seed)).run()
    return large


def measure(way: str, teacher: Any, wanted: float, seed: int, options: argparse.Namespace) -> str:
    """Train a student until it reaches the wanted reward, as a row of the table."""
    rows, held_out = (wb.rows(f"data/arith/{part}.parquet", max_prompt_length=256) for part in ("train", "test"))
    student = wb.engines.local(MODEL, lr=LR[way])
    if way == "grpo":
        pipe = wb.recipes.grpo(student, kl_coef=0.0, **SAMPLED)
    else:
        pipe = wb.recipes.distill(student, teacher, kl=way, **SAMPLED)
    tokens, curve = 0, []
    for step in range(1, options.steps + 1):
        batch = wb.Stepper(pipe, rows.batch(16, step=step, seed=seed)).run().batch
        tokens += int(batch["response_mask"].sum())
        if step % options.every == 0:
            curve.append(wb.evaluate(student, held_out, max_tokens=64, seed=seed).mean)
            if curve[-1] >= wanted - WITHIN:
                break
    count = f"{tokens:,}" if curve[-1] >= wanted - WITHIN else f"more than {tokens:,}"
    numbers = " → ".join(f"{value:.3f}" for value in curve)
    return f"| {seed} | {wanted:.3f} | {way} | {step} | {count} | {numbers} |"


def main() -> None:
    """All students, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--ways", nargs="+", default=["reverse", "grpo"], choices=[*LR])
    parser.add_argument("--steps", type=int, default=40, help="most steps of a student")
    parser.add_argument("--every", type=int, default=4, help="steps between held-out rewards")
    parser.add_argument("--teacher-steps", type=int, default=60)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows, held_out = (wb.rows(f"data/arith/{part}.parquet", max_prompt_length=256) for part in ("train", "test"))
    print(f"| seed | teacher | student by | steps | sampled tokens | held-out reward every {options.every} steps |")
    print("|---|---|---|---|---|---|")
    for seed in options.seeds:
        with tempfile.TemporaryDirectory() as folder:
            teacher = taught(Path(folder), rows, seed, options.teacher_steps)
            wanted = wb.evaluate(teacher, held_out, max_tokens=64, seed=seed).mean
            for way in options.ways:
                print(measure(way, teacher, wanted, seed, options), flush=True)


if __name__ == "__main__":
    main()
