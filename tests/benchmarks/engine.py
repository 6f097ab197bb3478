"""The local engine beside TRL, and beside an earlier revision of this library: time and memory of GRPO steps. `make bench-engine`.

    .venv/bin/python tests/benchmarks/engine.py --quick                  # two shapes, in two minutes
    .venv/bin/python tests/benchmarks/engine.py --base 39fb083           # every shape: earlier / now / TRL
    .venv/bin/python tests/benchmarks/engine.py rows-1024 rows-4096      # these shapes alone
    .venv/bin/python tests/benchmarks/engine.py --job --seeds 0 1 2      # the task of notebook 201, TRL's bare loop beside it

Each side is a process that waits for its turn, so that a shape's sides take their steps in turn on the same machine, whatever
else it does. All sides have the same weights, prompts, rewards, learning rate and temperature; no token ends a response, so
lengths are equal, too. The figures are medians; a ratio is the median of the ratios of steps taken one after the other. On a
busy machine the CPU's seconds with `--threads 1` say more than the wall's.

TRL is installed on demand (`trl_env.py`); where it cannot be, its columns are left out with the reason.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import trl_env

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build" / "bench-engine"


@dataclass(frozen=True)
class Size:
    """A Qwen2 with random weights."""

    hidden: int = 128
    layers: int = 4
    vocab: int = 512


@dataclass(frozen=True)
class Shape:
    """What a step does: `prompts` × `group` rows of `tokens` tokens after prompts of about `length` tokens."""

    prompts: int = 8
    group: int = 8
    tokens: int = 32
    length: int = 45
    beta: float = 0.0
    size: Size | None = None
    """None is `data/tiny-arith`."""
    steps: int | None = None
    """Most steps, for shapes that take long."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings of our engine."""
    trl: dict[str, Any] = field(default_factory=dict)
    """Settings of TRL's trainer."""
    pretrained: bool = False
    """Of the model in `--model`, whose chat template is its own."""


SHAPES = {
    "tiny": Shape(),
    "tiny-kl": Shape(beta=0.001),
    "prompt-512": Shape(length=512, size=Size()),
    "vocab-152k": Shape(size=Size(layers=2, vocab=151_936), steps=4),
    "rows-256": Shape(prompts=32, steps=4),
    "rows-1024": Shape(prompts=128, steps=3),
    "tokens-128": Shape(tokens=128, steps=4),
    "tokens-512": Shape(tokens=512, size=Size(), steps=3),
    "size-20M": Shape(size=Size(512, 6, 8_192), steps=4),
    "size-60M": Shape(size=Size(768, 8, 8_192), steps=3),
}


def _in_parts(count: int) -> dict[str, Any]:
    """TRL's settings for micro-batches of 16 rows: it keeps 16 GB of activations of 64 rows at once, and takes as long."""
    return {"per_device_train_batch_size": 16, "gradient_accumulation_steps": count}


_IN_FOUR = _in_parts(4)
LARGE = {
    "real": Shape(tokens=48, pretrained=True, steps=2, trl=_IN_FOUR),
    "real-16": Shape(prompts=2, tokens=48, pretrained=True, steps=2, trl=_in_parts(1)),
    "real-128": Shape(prompts=16, tokens=48, pretrained=True, steps=1, trl=_in_parts(8)),
    "real-bfloat16": Shape(tokens=48, pretrained=True, steps=2, trl=_IN_FOUR, settings={"dtype": "bfloat16"}),
    "real-both-bfloat16": Shape(
        tokens=48, pretrained=True, steps=2, trl={**_IN_FOUR, "bf16": True}, settings={"dtype": "bfloat16"}
    ),
    "rows-4096": Shape(prompts=512, steps=2),
    "tokens-1024": Shape(prompts=2, group=4, tokens=1_024, size=Size(384, 4, 8_192), steps=2),
    "tokens-4096": Shape(prompts=1, group=4, tokens=4_096, size=Size(384, 4, 8_192), steps=1),
    "size-226M": Shape(size=Size(768, 16, 151_936), steps=2),
}
"""Shapes that run only where they are named."""
QUICK = ("tiny", "prompt-512")


# --- what a shape needs ---------------------------------------------------------------------------


def model_of(size: Size | None) -> Path:
    """The folder of a model; one with random weights is made once."""
    tiny = ROOT / "data" / "tiny-arith"
    if size is None:
        return tiny
    folder = BUILD / "models" / f"{size.hidden}-{size.layers}-{size.vocab}"
    if not (folder / "config.json").is_file():
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        torch.manual_seed(0)
        config = AutoConfig.from_pretrained(tiny)
        config.update({"hidden_size": size.hidden, "num_hidden_layers": size.layers, "vocab_size": size.vocab})
        config.update({"intermediate_size": 3 * size.hidden, "max_position_embeddings": 8_192})
        heads = max(size.hidden // 64, 4)
        config.update({"num_attention_heads": heads, "num_key_value_heads": heads // 2})
        config.update({"layer_types": ["full_attention"] * size.layers})
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
            shutil.copyfile(tiny / name, folder / name)
    return folder


def rows_of(shape: Shape) -> Path:
    """A file with prompts for a few steps, each about `length` tokens long."""
    import pandas
    from transformers import AutoTokenizer

    path = BUILD / f"rows-{shape.prompts}-{shape.length}.jsonl"
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "data" / "tiny-arith")
    chats = pandas.read_parquet(ROOT / "data" / "arith" / "train.parquet")["prompt"]
    questions = [chat[0]["content"] for chat in chats]
    lines = []
    for number in range(shape.prompts * 4):
        text, at = questions[number % len(questions)], number
        while len(tokenizer(text)["input_ids"]) < shape.length - 45:
            at += 1
            text += " " + questions[at % len(questions)]
        chat = [{"role": "user", "content": text}]
        truth = {"style": "rule", "ground_truth": "0"}
        lines.append(json.dumps({"prompt": chat, "data_source": "bench", "reward_model": truth}))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")
    return path


def checkout(revision: str) -> Path:
    """A git worktree of an earlier revision, made once."""
    name = subprocess.run(
        ["git", "rev-parse", "--short", f"{revision}^{{commit}}"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()
    folder = BUILD / f"base-{name}"
    if not folder.is_dir():
        subprocess.run(["git", "worktree", "prune"], cwd=ROOT, check=True)
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", str(folder), name], cwd=ROOT, check=True)
    return folder


# --- sides ----------------------------------------------------------------------------------------


class Side:
    """A process of `engine_sides.py`; `name` is its column in the tables."""

    def __init__(self, name: str, root: Path, job: dict[str, Any], threads: int) -> None:
        self.name = name
        kind = "trl" if name == "TRL" else "ours"
        number = str(threads)
        around = {"PYTHONPATH": str(root), "OMP_NUM_THREADS": number, "MKL_NUM_THREADS": number}
        around |= {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
        self._log = (BUILD / f"{name.replace(' ', '-')}.log").open("w")
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("engine_sides.py")), kind],
            **{"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self._log},
            **{"text": True, "bufsize": 1, "cwd": root, "env": {**os.environ, **around}},
        )
        self.tell(json.dumps(job))

    def tell(self, line: str) -> None:
        """Send a line to the process."""
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def heard(self) -> dict[str, Any]:
        """Its next answer. Raises `RuntimeError` with the end of its log where it has died."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._log.flush()
            raise RuntimeError(f"{self.name} ended:\n" + Path(self._log.name).read_text()[-2_000:])
        return dict(json.loads(line))

    def step(self) -> dict[str, Any]:
        """Let it take one step."""
        self.tell("step")
        return self.heard()

    def end(self) -> None:
        """End it: without a parent's word it stops by itself, and where a step hangs it is killed."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._log.close()


@dataclass
class Measured:
    """What a side's steps took."""

    held: float
    """MB before the first step."""
    peak: float = float("nan")
    steps: list[dict[str, Any]] = field(default_factory=list)

    def of(self, what: str) -> list[float]:
        """`wall` or `cpu` of every step."""
        return [step[what] for step in self.steps]


def measure(name: str, shape: Shape, sides: dict[str, Path], options: argparse.Namespace) -> dict[str, Measured]:
    """All sides of a shape, a step each in turn; the first `warm` steps do not count."""
    BUILD.mkdir(parents=True, exist_ok=True)
    model = options.model if shape.pretrained else model_of(shape.size)
    job = {"kind": "steps", **asdict(shape), "model": str(model), "rows": str(rows_of(shape))}
    job |= {"lr": 1e-5, "site": str(trl_env.FOLDER), "folder": str(BUILD / "trl-output")}
    found: dict[str, Measured] = {}
    running: list[Side] = []
    try:
        for side, root in sides.items():  # one after the other: the start of one is no load on another's steps
            running.append(Side(side, root, job, options.threads))
            first = running[-1].heard()
            found[side] = Measured(first["held"])
            if name == options.shapes[0]:
                print(f"{side}: {first['what']}", flush=True)
                if "switches" in first:
                    print("  " + ", ".join(f"{key}={value}" for key, value in first["switches"].items()))
        steps = min(options.steps, shape.steps or options.steps)
        for turn in range(options.warm + steps):
            for side in running if turn % 2 else reversed(running):
                took = side.step()
                if turn >= options.warm:
                    found[side.name].steps.append(took)
        for side in running:
            side.tell("end")
            found[side.name].peak = side.heard()["peak"]
    finally:
        for side in running:
            side.end()
    return found


# --- tables ---------------------------------------------------------------------------------------


def ratio(found: dict[str, Measured], side: str, other: str, what: str) -> str:
    """The median ratio of two sides, step by step."""
    return f"{median(a / b for a, b in zip(found[side].of(what), found[other].of(what), strict=True)):.2f}"


def row(name: str, found: dict[str, Measured]) -> str:
    """A shape's line of the table."""
    cells = [name]
    others = [side for side in found if side != "now"]
    for what in ("wall", "cpu"):
        cells += [f"{median(one.of(what)):.3f}" for one in found.values()]
        cells += [ratio(found, "now", other, what) for other in others]
    cells += [f"{one.peak:.0f}" for one in found.values()]
    return "| " + " | ".join(cells) + " |"


def header(sides: Sequence[str]) -> str:
    """The table's head."""
    others = [side for side in sides if side != "now"]
    cells = ["shape"]
    for what in ("s", "CPU s"):
        cells += [f"{side}, {what}" for side in sides] + [f"now / {other}" for other in others]
    cells += [f"{side}, peak MB" for side in sides]
    return "| " + " | ".join(cells) + " |\n|" + "---|" * len(cells)


def parts(name: str, found: dict[str, Measured]) -> list[str]:
    """Our steps by part: a line a side, medians in seconds."""
    lines = []
    for side, one in found.items():
        names = [part for part in one.steps[0]["parts"] if part != "step"]
        middle = {part: median(step["parts"].get(part, 0.0) for step in one.steps) for part in names}
        if middle:
            told = ", ".join(f"{part} {value:.3f}" for part, value in middle.items() if value >= 0.0005)
            lines.append(f"  {name}, {side}: {told}")
    return lines


# --- the job of notebook 201 ----------------------------------------------------------------------


def whole(folder: Path, root: Path, options: argparse.Namespace, seed: int) -> dict[str, Any]:
    """`workbench train notebooks/201_train_grpo.ipynb`, every cell: kernel, looks and all."""
    number = str(options.threads)
    around = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": number, "MKL_NUM_THREADS": number}
    began, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    given = ["-p", f"run={folder}", "-p", f"seed={seed}", "-p", f"steps={options.job_steps}"]
    command = [sys.executable, "-m", "workbench.cli", "train", "notebooks/201_train_grpo.ipynb", *given]
    subprocess.run(command, cwd=root, env=around, check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    held_out = json.loads((folder / "summary.json").read_text())["reward_after"]
    return {"wall": time.perf_counter() - began, "cpu": cpu, "held_out": held_out}


def jobs(sides: dict[str, Path], options: argparse.Namespace) -> None:
    """The task of notebook 201 with every seed: the training cell, TRL's bare loop, and the whole notebook."""
    BUILD.mkdir(parents=True, exist_ok=True)
    print("\n| seed | side | s | CPU s | in steps, s | held-out | peak MB |\n|---|---|---|---|---|---|---|")
    for seed in options.seeds:
        loops = list(sides.items())
        for side, root in loops if seed % 2 == 0 else reversed(loops):
            with tempfile.TemporaryDirectory() as folder:
                job = {"kind": "job", "seed": seed, "steps": options.job_steps, "folder": f"{folder}/run"}
                process = Side(side, root, {**job, "site": str(trl_env.FOLDER)}, options.threads)
                took = process.heard()
                process.end()
            what = "bare loop" if side == "TRL" else "training cell"
            cells = [seed, f"{side}, {what}", f"{took['wall']:.1f}", f"{took['cpu']:.1f}", f"{took['in_steps']:.1f}"]
            print(
                "| " + " | ".join(map(str, [*cells, f"{took['held_out']:.3f}", f"{took['peak']:.0f}"])) + " |",
                flush=True,
            )
        for side, root in loops:
            if side != "TRL":
                with tempfile.TemporaryDirectory() as folder:
                    took = whole(Path(folder, "run"), root, options, seed)
                cells = [f"{took['wall']:.1f}", f"{took['cpu']:.1f}", "", f"{took['held_out']:.3f}", ""]
                print(f"| {seed} | {side}, whole notebook | " + " | ".join(cells) + " |", flush=True)


def main() -> None:
    """The tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="*", help=f"out of {', '.join([*SHAPES, *LARGE])}")
    parser.add_argument("--quick", action="store_true", help="two shapes, few steps")
    parser.add_argument("--base", help="a revision of this repository to compare with")
    parser.add_argument("--no-trl", action="store_true")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--warm", type=int, default=2, help="steps before those that count")
    parser.add_argument("--model", type=Path, help="the folder of a pretrained model, for the shapes `real`")
    parser.add_argument("--profile", action="store_true", help="our steps by part, too")
    parser.add_argument("--job", action="store_true", help="the task of notebook 201 in place of the shapes")
    parser.add_argument("--job-steps", type=int, default=40)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    options = parser.parse_args()
    known = {**SHAPES, **LARGE}
    options.shapes = options.shapes or list(QUICK if options.quick else SHAPES)
    if unknown := set(options.shapes) - set(known):
        parser.error(f"no shape {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    options.steps = min(options.steps, 4) if options.quick else options.steps
    sides = {options.base: checkout(options.base)} if options.base else {}
    sides["now"] = ROOT
    if not options.no_trl:
        try:
            trl_env.folder()
            sides["TRL"] = ROOT
        except trl_env.Unavailable as why:
            print(f"TRL is left out: it cannot be installed here ({why})")
    if options.job:
        jobs(sides, options)
        return
    notes, lines = [], []
    for name in options.shapes:
        found = measure(name, known[name], sides, options)
        notes += parts(name, found) if options.profile else []
        lines.append(row(name, found))
        if len(lines) == 1:
            print("\n" + header(list(sides)))
        print(lines[-1], flush=True)
    if notes:
        print("\nBy part, s a step:\n" + "\n".join(notes))


if __name__ == "__main__":
    main()
