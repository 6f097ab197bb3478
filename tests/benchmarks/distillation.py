"""Sampled tokens until a student reaches its teacher's held-out reward, by GRPO and by distillation.

    python tests/benchmarks/distillation.py [--seeds 0 1 2] [--steps 40]
    python tests/benchmarks/distillation.py --memory [--rows 64]     # peak memory of an update over 152,064 words

The teacher is tiny-arith with twice its layers, after supervised steps on the training rows' solutions, as in notebook 109. All
ways have the same prompts and as many samples and optimizer steps a step. `tests/benchmarks/README.md` has the last table.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

import workbench as wb
from workbench.engines.local_engine.engine import LocalEngine
from workbench.engines.protocol import LossCounts
from workbench.engines.settings import LocalSettings
from workbench.stages import Divergence, PolicyLoss
from workbench.stages.update import OnPolicyLoss

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


WAYS = {"grpo": None, "reverse": 1.0, "forward": 0.0, "JSD 0.5": 0.5}


def learn(way: str, rows: int) -> None:
    """Take an update by GRPO or by a divergence over the whole vocabulary, and print peak memory and time of this process."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.set_num_threads(1)
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = Qwen2Config(vocab_size=152_064, num_key_value_heads=2, tie_word_embeddings=True, **shape)
    tokenizer = argparse.Namespace(eos_token_id=0, pad_token_id=0)
    settings = LocalSettings(lr=1e-4, device="cpu", self_check=False, check_memory=False)
    engines = [LocalEngine(Qwen2ForCausalLM(config), tokenizer, settings, path="x") for _ in range(1 + (way != "grpo"))]
    loss: Any = (
        OnPolicyLoss(PolicyLoss()) if way == "grpo" else Divergence(teacher=engines[1].reference(), beta=WAYS[way])
    )
    teacher = sum(4 * one.numel() for engine in engines[1:] for one in engine._model.parameters())
    tokens = 512
    ids = torch.randint(1, config.vocab_size, (rows, tokens + 8))
    ones, mask = torch.ones_like(ids), torch.ones(rows, tokens, dtype=torch.long)
    columns = {"input_ids": ids, "attention_mask": ones, "position_ids": ones.cumsum(-1) - 1, "response_mask": mask}
    columns |= {"advantages": torch.randn(rows, tokens), "scored": torch.ones(rows, dtype=torch.bool)}
    start = time.process_time()
    engines[0].learn(wb.DataProto(columns), loss, LossCounts(float(rows * tokens), float(rows), float(tokens)))
    seconds, peak = time.process_time() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"| {way} | {peak:.0f} | {peak - teacher / 2**20:.0f} | {seconds:.1f} |", flush=True)


def main() -> None:
    """All students, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--ways", nargs="+", default=["reverse", "grpo"], choices=[*LR])
    parser.add_argument("--steps", type=int, default=40, help="most steps of a student")
    parser.add_argument("--every", type=int, default=4, help="steps between held-out rewards")
    parser.add_argument("--teacher-steps", type=int, default=60)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--memory", action="store_true", help="peak memory in place of tokens")
    parser.add_argument("--rows", type=int, default=64, help="of an update with --memory")
    parser.add_argument("--way", choices=WAYS, help="with --memory: this way alone, in this process")
    options = parser.parse_args()
    if options.way:
        return learn(options.way, options.rows)
    if options.memory:
        print("| update | peak, MiB | without the teacher's weights | CPU s |\n|---|---|---|---|", flush=True)
        for way in WAYS:
            subprocess.run([sys.executable, __file__, "--way", way, "--rows", str(options.rows)], check=True)
        return None
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
