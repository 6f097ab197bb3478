"""What a real pretrained model learns from a rule, and how fast: the task of notebook 111, here and with TRL.

    .venv/bin/python tests/benchmarks/pretrained.py MODEL ours --seeds 0 1 2       # held-out reward against steps and CPU minutes
    .venv/bin/python tests/benchmarks/pretrained.py MODEL trl --seeds 0            # the same rows, reward, batch, rate and steps
    .venv/bin/python tests/benchmarks/pretrained.py MODEL ours --rules words ends --steps 8 --evals 64   # gain a minute of rules

MODEL is the folder of an instruct model. Rules, prompts and reward are the cells of the notebook tagged `task`. Each line of output
is one look at the held-out prompts, as JSON; the clock stands still while they are answered. TRL's weights answer the same prompts
from the same seeds, sampled by the same engine. Each process has one thread.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
NOTEBOOK = ROOT / "notebooks" / "111_real_model.ipynb"
Task = dict[str, Any]


def task_of(rule: str, prompts: int) -> Task:
    """The names that the notebook's cells of the task define: `rows`, `eval_rows`, `keeps_the_rule`."""
    import workbench as wb

    names: Task = {"wb": wb, "re": re, "rule": rule, "num_eval_rows": prompts}
    for cell in json.loads(NOTEBOOK.read_text())["cells"]:
        if "task" in cell["metadata"].get("tags", []):
            exec("".join(cell["source"]), names)  # noqa: S102 - the notebook in this repository
    return names


class Clock:
    """Seconds of training: stands still while `paused` runs."""

    def __init__(self) -> None:
        self._began = self._now()
        self._paused = (0.0, 0.0)

    def _now(self) -> tuple[float, float]:
        return time.process_time(), time.perf_counter()

    def minutes(self) -> dict[str, float]:
        """CPU and wall minutes so far."""
        spent = [
            now - began - paused for now, began, paused in zip(self._now(), self._began, self._paused, strict=True)
        ]
        return {"cpu_min": round(spent[0] / 60, 2), "wall_min": round(spent[1] / 60, 2)}

    def pause(self, look: Callable[[], None]) -> None:
        """Call `look` off the clock."""
        before = self._now()
        look()
        self._paused = tuple(p + a - b for p, a, b in zip(self._paused, self._now(), before, strict=True))  # type: ignore[assignment]


class Looks:
    """Looks at the held-out prompts: prints each, with its gain over the first."""

    def __init__(self, options: argparse.Namespace, task: Task, **about: Any) -> None:
        self._options, self._task, self._about = options, task, about
        self._first: list[float] = []

    def at(self, step: int, engine: Any, minutes: dict[str, float]) -> None:
        """Answer the held-out prompts and print a line."""
        import workbench as wb
        from workbench.views.seeds import interval

        reward = wb.rewards.Reward(self._task["keeps_the_rule"], in_process=True)
        found = wb.evaluate(engine, self._task["eval_rows"], reward=reward, max_tokens=self._options.tokens)
        rewards = found.batch["reward"].tolist()
        self._first = self._first or rewards
        gain = interval([after - before for after, before in zip(rewards, self._first, strict=True)])
        length = found.batch["response_mask"].sum(-1).double().mean()
        shown = {
            "held_out": round(fmean(rewards), 4),
            "gain": [round(value, 3) for value in gain[:3]],
            "length": round(float(length), 1),
        }
        print(json.dumps({**self._about, "step": step, **minutes, **shown}), flush=True)
        if self._options.show:
            print(
                *(f"    {text!r}" for text in found.batch["response_text"][: self._options.show]), sep="\n", flush=True
            )


def ours(options: argparse.Namespace, rule: str, seed: int) -> None:
    """`train` with all that it records, and a look every few steps."""
    import workbench as wb
    from workbench.runs.conditions import StepReport

    task = task_of(rule, options.evals)
    engine = wb.engines.local(options.model, lr=options.lr, dtype=options.dtype, threads=1)
    pipe = wb.recipes.grpo(
        engine, task["keeps_the_rule"], group_size=options.group, kl_coef=0.0, max_tokens=options.tokens
    )
    looks = Looks(options, task, side="ours", rule=rule, seed=seed)
    looks.at(0, engine, {"cpu_min": 0.0, "wall_min": 0.0})
    clock = Clock()

    class Watch:
        """Looks every few steps, and after the last."""

        def on_start(self, start: int, steps: int) -> None: ...

        def on_step(self, report: StepReport) -> None:
            if report.step % options.every == 0 or report.step == options.steps:
                clock.pause(lambda: looks.at(report.step, engine, clock.minutes()))

        def on_end(self, error: BaseException | None) -> None: ...

    sizes: Any = {"steps": options.steps, "batch_size": options.prompts, "seed": seed}
    with tempfile.TemporaryDirectory() as folder:
        wb.train_blocking(pipe, task["rows"], **sizes, run=Path(folder, "run"), observers=[Watch()], display=None)


def trl(options: argparse.Namespace, rule: str, seed: int) -> None:
    """A `GRPOTrainer` without logging or checkpoints of its own."""
    import trl_env

    sys.path.append(str(trl_env.folder()))
    sys.modules["vllm"] = None  # type: ignore[assignment]  # it would be imported, unused
    import datasets
    import transformers
    import trl as library

    import workbench as wb

    task = task_of(rule, options.evals)
    folder = Path(tempfile.mkdtemp())

    def reward(completions: list[Any], **_: Any) -> list[float]:
        return [task["keeps_the_rule"](completion[0]["content"]) for completion in completions]

    rows = options.prompts * options.group
    settings: dict[str, Any] = {
        "use_cpu": True,
        "bf16": options.dtype == "bfloat16",
        "optim": "adamw_torch_fused",
        "beta": 0.0,
    }
    settings |= {
        "gradient_checkpointing": False,
        "loss_type": "dapo",
        "temperature": 1.0,
        "num_generations": options.group,
    }
    settings |= {
        "per_device_train_batch_size": 16,
        "gradient_accumulation_steps": rows // 16,
        "max_completion_length": options.tokens,
    }
    settings |= {
        "learning_rate": options.lr,
        "weight_decay": 0.01,
        "max_grad_norm": 1.0,
        "lr_scheduler_type": "constant",
    }
    settings |= {
        "logging_strategy": "no",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "seed": seed,
    }
    model = transformers.AutoModelForCausalLM.from_pretrained(options.model, dtype="float32")
    tokenizer = transformers.AutoTokenizer.from_pretrained(options.model, padding_side="left")
    prompts = datasets.Dataset.from_list([{"prompt": row["prompt"]} for row in task["rows"]])
    config = library.GRPOConfig(output_dir=str(folder), max_steps=options.steps, **settings)
    trainer = library.GRPOTrainer(model, reward, args=config, train_dataset=prompts, processing_class=tokenizer)
    looks = Looks(options, task, side=f"TRL {library.__version__}", rule=rule, seed=seed)
    looks.at(0, wb.engines.local(options.model, dtype=options.dtype, threads=1), {"cpu_min": 0.0, "wall_min": 0.0})
    clock = Clock()

    class Watch(transformers.TrainerCallback):
        """Saves the weights every few steps and after the last, and looks at them."""

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step % options.every == 0 or state.global_step == options.steps:
                clock.pause(lambda: self._look(state.global_step, clock.minutes()))

        def _look(self, step: int, minutes: dict[str, float]) -> None:
            trainer.model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
            looks.at(step, wb.engines.local(folder, dtype=options.dtype, threads=1), minutes)
            wb.free_memory()

    trainer.add_callback(Watch())
    trainer.train()


def main() -> None:
    """The runs, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("side", choices=["ours", "trl"])
    parser.add_argument("--rules", nargs="+", default=["words"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    for name, default in {
        "steps": 20,
        "every": 5,
        "evals": 200,
        "prompts": 8,
        "group": 8,
        "tokens": 40,
        "show": 0,
    }.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--lr", type=float, default=2e-5)
    parser.add_argument("--dtype", default="bfloat16")
    options = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    for rule in options.rules:
        for seed in options.seeds:
            {"ours": ours, "trl": trl}[options.side](options, rule, seed)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
