"""A real pretrained model on the CPU: seconds and peak memory of a step, growth with the response's length, a first hour.

    PYTHONPATH=. python tests/benchmarks/real.py MODEL step --set gradient_checkpointing=true --base FOLDER
    PYTHONPATH=. python tests/benchmarks/real.py MODEL hour
    PYTHONPATH=. python tests/benchmarks/real.py MODEL half --tokens 80
    PYTHONPATH=. python tests/benchmarks/real.py - length --tokens 512 2048 4096

MODEL is a folder; `-` is a random model of 10M parameters (SmolLM2's shape, smaller). Each side is a process of its own with one
thread, and sides take their turns in one run: this checkout, `--set` of its settings, and with `--base` another checkout. `peak`
is the process's VmHWM. Sides of `step` do what `train` does: 8 prompts × 8 samples × 48 tokens, one update, one warm-up step less.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parents[2]
Job = dict[str, Any]
QUESTIONS = (
    "Name three animals that live in the sea and say what each of them eats.",
    "What is the capital of France, and what is it famous for?",
    "Write one sentence about the weather in spring.",
    "How many days are there in a week, and what are they called?",
    "Explain in simple words why the sky looks blue during the day.",
    "List the primary colours.",
    "A train leaves at nine and arrives at noon. How long did it travel, and why do you think so?",
    "Say something kind to a friend who failed an exam.",
)


def memory(name: str) -> float:
    """GB of this process: `VmRSS` now, `VmHWM` at its peak."""
    found = re.search(rf"{name}:\s+(\d+)", Path("/proc/self/status").read_text())
    return int(found[1]) / 1e6 if found else float("nan")


def answer(**values: Any) -> None:
    """One line to the parent."""
    print("ANSWER " + json.dumps(values), flush=True)


def clocked(function: Any) -> tuple[float, float, Any]:
    """(wall, CPU) seconds of a call, and its result."""
    wall, cpu = time.perf_counter(), time.process_time()
    result = function()
    return time.perf_counter() - wall, time.process_time() - cpu, result


# --- sides ----------------------------------------------------------------------------------------


def side_step(job: Job) -> None:
    """Steps as `train` takes them, one per line `go`."""
    import workbench as wb
    from workbench.runs.loop import run_step

    def letters(completion: str) -> float:
        return sum(one in "aeiou" for one in completion) / max(len(completion), 1)

    chats = [{"prompt": [{"role": "user", "content": text}], "data_source": "bench"} for text in QUESTIONS]
    rows = wb.rows([{**one, "reward_model": {"ground_truth": ""}} for one in chats])
    engine = wb.engines.local(job["model"], lr=1e-6, threads=1, **job["settings"])
    sampling = wb.SamplingSettings(max_tokens=job["tokens"], ignore_eos=True)
    pipe = wb.recipes.grpo(engine, letters, sampling=sampling, group_size=8, kl_coef=0.0)
    answer(held=memory("VmRSS"))
    for step, _ in enumerate(iter(sys.stdin.readline, ""), 1):
        wall, cpu, trace = clocked(partial(run_step, pipe, rows.batch(8, step=step, seed=0)))
        parts = {name[9:]: value for name, value in trace.metrics.items() if name.startswith("timing_s/")}
        answer(wall=wall, cpu=cpu, peak=memory("VmHWM"), parts=parts)


def side_length(job: Job) -> None:
    """Updates of `rows` in groups of 4 (from 32 rows on in 8 groups) with a prompt of 64 tokens each, and ragged responses."""
    import torch

    from workbench.dataproto import DataProto
    from workbench.engines import local
    from workbench.engines.protocol import LossCounts
    from workbench.testing.engines import LikelihoodLoss

    torch.manual_seed(0)
    engine = local(job["model"], threads=1, **job["settings"])
    most, rows = job["tokens"], job["rows"]
    lengths = torch.linspace(most // 2, most, rows).long() if job["ragged"] else torch.full((rows,), most)
    ids = torch.randint(1_000, 8_000, (rows, 64 + most))
    group = max(rows // 8, 4)
    ids[:, :64] = ids[::group, :64].repeat_interleave(group, 0)[:rows]
    mask = (torch.arange(64 + most) < 64 + lengths[:, None]).long()
    columns = {"input_ids": ids, "attention_mask": mask, "position_ids": torch.arange(64 + most).repeat(rows, 1)}
    columns |= {"response_mask": mask[:, 64:], "weight": torch.ones(rows), "row": torch.arange(rows)}
    batch, counts = DataProto(columns), LossCounts(float(lengths.sum()), float(rows))
    engine.learn(batch.slice(0, 1), LikelihoodLoss(), counts)  # the optimizer's moments
    answer(held=memory("VmRSS"))
    for _ in iter(sys.stdin.readline, ""):
        Path("/proc/self/clear_refs").write_text("5")
        wall, cpu, _ = clocked(partial(engine.learn, batch, LikelihoodLoss(), counts))
        answer(wall=wall, cpu=cpu, peak=memory("VmHWM"), parts={})


def side_hour(job: Job) -> None:
    """What a first hour does: a step, ten looks, a what-if, a short training and two replays of it."""
    import workbench as wb

    def letters(completion: str) -> float:
        return sum(one in "aeiou" for one in completion) / max(len(completion), 1)

    chats = [{"prompt": [{"role": "user", "content": text}], "data_source": "bench"} for text in QUESTIONS]
    rows = wb.rows([{**one, "reward_model": {"ground_truth": ""}} for one in chats])
    engine = wb.engines.local(job["model"], lr=1e-6, threads=1, **job["settings"])
    pipe = wb.recipes.grpo(engine, letters, group_size=8, kl_coef=0.001, max_tokens=job["tokens"])
    marks: dict[str, float] = {}

    def mark(name: str) -> None:
        marks[name], marks[f"{name} peak"] = memory("VmRSS"), memory("VmHWM")
        answer(at=name, held=marks[name], peak=marks[f"{name} peak"])

    sys.stdin.readline()
    mark("opened")
    stepper = wb.Stepper(pipe, rows.batch(4, step=1, seed=0))
    stepper.run()
    mark("stepped")
    for row in range(5):
        for view in (wb.views.samples(stepper.trace), wb.views.tokens(stepper.trace, row)):
            view._repr_html_()
    mark("ten looks")
    held = [stepper.what_if(clip_ratio_high=0.5)]
    mark("what-if")
    run = wb.train_blocking(pipe, rows, steps=3, batch_size=4, run=Path(job["folder"], "run"), display=None)
    mark("trained")
    for step in (2, 3):
        held.append(run.stepper(step).replace("reward", letters).run())
        mark(f"replay of {step}")
    del held[1:]
    wb.free_memory()
    mark("given back")
    answer(wall=0.0, cpu=time.process_time(), peak=memory("VmHWM"), parts={})


def side_half(job: Job) -> None:
    """How far half precision and a base in codes move log-probs of 128 rows of `tokens` tokens that float32 sampled."""
    import torch

    import workbench as wb
    from workbench.dataproto import DataProto

    def opened(**settings: Any) -> Any:
        return wb.engines.local(job["model"], threads=1, self_check=False, pack="yes", **settings)

    truth, most = opened(), job["tokens"]
    chats = [[{"role": "user", "content": text}] for text in QUESTIONS]
    texts = [truth.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]
    prompts = [tuple(truth.tokenizer(text)["input_ids"]) for text in texts]
    settings = wb.SamplingSettings(max_tokens=most, ignore_eos=True)
    requests = [wb.engines.Request(prompts[row % 8], settings, row) for row in range(128)]
    samples, wide = truth.sample_many(requests), max(map(len, prompts))
    ids = torch.tensor(
        [[0] * (wide - len(a.ids)) + [*a.ids, *b.ids] for a, b in zip(requests, samples, strict=True)], dtype=torch.long
    )
    mask = torch.tensor([[0] * (wide - len(one.ids)) + [1] * (len(one.ids) + most) for one in requests])
    columns = {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
    batch = DataProto({**columns, "response_mask": torch.ones(128, most, dtype=torch.long)})
    plain = truth.compute_log_probs(batch)["log_probs"]
    sampled = torch.tensor([one.log_probs for one in samples])
    answer(held=memory("VmRSS"))
    sys.stdin.readline()
    cpu = time.process_time()
    sides = {"bfloat16": {"dtype": "bfloat16"}, "float16": {"dtype": "float16"}}
    sides |= {f"base_dtype {kind}": {"lora_rank": 8, "base_dtype": kind} for kind in ("bfloat16", "int8", "nf4")}
    apart = {"sampled beside scored": (sampled - plain).abs()}
    for name, each in sides.items():
        apart[name] = (opened(**each).compute_log_probs(batch)["log_probs"] - plain).abs()
    parts = {f"{name} {kind}": float(getattr(one, kind)()) for name, one in apart.items() for kind in ("mean", "max")}
    answer(nats=parts, tokens=plain.numel())
    answer(wall=0.0, cpu=time.process_time() - cpu, peak=memory("VmHWM"), parts={})


# --- in turn --------------------------------------------------------------------------------------


class Side:
    """A process that waits for its turn."""

    def __init__(self, name: str, what: str, root: Path, job: Job) -> None:
        self.name = name
        around = {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, __file__, "-", "side", "--job", json.dumps({**job, "what": what})]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}
        self._process = subprocess.Popen(command, cwd=root, env={**os.environ, **around}, **pipes)
        self.found: list[Job] = []

    def heard(self) -> Job:
        """Its next answer."""
        for line in self._process.stdout or ():
            if line.startswith("ANSWER "):
                return dict(json.loads(line[7:]))
        raise SystemExit(f"{self.name} ended with {self._process.wait()}")

    def turn(self) -> None:
        """One turn: what it says until it has a `wall`."""
        self._process.stdin.write("go\n")  # type: ignore[union-attr]
        while "wall" not in (said := self.heard()):
            print(f"| {self.name} | " + " | ".join(f"{key} {value}" for key, value in said.items()), flush=True)
        self.found.append(said)

    def end(self) -> None:
        """End the process."""
        self._process.stdin.close()  # type: ignore[union-attr]
        self._process.wait()


def model_10m(folder: Path) -> str:
    """A random model of about 10M parameters."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": 288, "num_hidden_layers": 8, "num_attention_heads": 9, "num_key_value_heads": 3}
    config = LlamaConfig(**shape, intermediate_size=768, vocab_size=8_192, max_position_embeddings=65_536)
    config.tie_word_embeddings = True
    LlamaForCausalLM(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(ROOT / "data" / "tiny-arith").save_pretrained(folder)
    return str(folder)


def main() -> None:
    """All sides in turn; a table of medians, and of the ratios of turns that followed each other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("what", choices=["step", "length", "hour", "half", "side"])
    parser.add_argument("--set", nargs="*", action="append", default=[], help="settings of one more side: name=json")
    parser.add_argument("--base", type=Path, help="another checkout")
    parser.add_argument("--tokens", type=int, nargs="+", default=[48])
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--ragged", action="store_true", help="responses from half of --tokens on")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--job")
    options = parser.parse_args()
    if options.job:
        job = json.loads(options.job)
        {"step": side_step, "length": side_length, "hour": side_hour, "half": side_half}[job["what"]](job)
        return
    with tempfile.TemporaryDirectory() as folder:
        model = model_10m(Path(folder, "model")) if options.model == "-" else str(Path(options.model).absolute())
        for tokens in options.tokens:
            job = {"model": model, "tokens": tokens, "rows": options.rows, "ragged": options.ragged}
            tried = [{}, *(dict(pair.split("=", 1) for pair in one) for one in options.set)]
            bases = [(options.base.absolute(), {}, "base")] if options.base else []
            bases += [(ROOT, one, " ".join(f"{a}={b}" for a, b in one.items()) or "now") for one in tried]
            sides = []
            for number, (root, given, name) in enumerate(bases):
                settings = {key: json.loads(value) for key, value in given.items()}
                own = Path(folder, f"{tokens}-{number}")
                own.mkdir()
                sides.append(Side(name, options.what, root, {**job, "settings": settings, "folder": str(own)}))
                if options.what != "hour":
                    sides[-1].heard()
            for _ in range(1 if options.what in ("hour", "half") else options.rounds):
                for side in sides:
                    side.turn()
            for side in sides:
                side.end()
            for side in sides:
                pairs = [a["cpu"] / b["cpu"] for a, b in zip(side.found, sides[0].found, strict=True)]
                times = {
                    name: median(one["parts"].get(name, 0.0) for one in side.found) for name in side.found[0]["parts"]
                }
                shown = ", ".join(f"{name} {value:.1f}" for name, value in times.items() if value >= 0.1)
                wall, cpu = (median(one[kind] for one in side.found) for kind in ("wall", "cpu"))
                peak = max(one["peak"] for one in side.found)
                print(
                    f"| {tokens} tokens | {side.name} | wall {wall:.1f} s | CPU {cpu:.1f} s | {median(pairs):.2f} × | {peak:.2f} GB | {shown} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
