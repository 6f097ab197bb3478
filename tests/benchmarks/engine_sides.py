"""One side of `engine.py`: a process that takes GRPO steps when told to, of this library or of TRL, or trains the whole job.

It reads a job as a line of JSON, does the warm-up, then takes one step per line `step` and answers each with a line: wall and
CPU seconds, and seconds by part. At `end` it answers with its peak memory.
"""

from __future__ import annotations

import json
import os
import re
import resource
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

ANSWERS = os.fdopen(os.dup(1), "w", buffering=1)
Job = dict[str, Any]
NEVER = 1 << 30
"""A token id that no model has: as the end of a response it never ends one."""


def seconds() -> tuple[float, float]:
    """(wall, CPU) seconds so far; the CPU's are those of all threads."""
    return time.perf_counter(), time.process_time()


def memory(name: str) -> float:
    """MB of this process: `VmRSS` now, `VmHWM` at its peak."""
    found = re.search(rf"{name}:\s+(\d+)", Path("/proc/self/status").read_text())
    return int(found[1]) / 1e3 if found else float("nan")


def answer(**values: Any) -> None:
    """Send one line to the parent."""
    ANSWERS.write(json.dumps(values) + "\n")


def told() -> str:
    """Wait for the parent's next line."""
    return sys.stdin.readline().strip()


def share(text: str) -> float:
    """The reward of the steps: the share of digits in a text."""
    return sum(character.isdigit() for character in text) / max(len(text), 1)


def solved(text: str, truth: str) -> float:
    """The reward of the job: whether the number behind the last #### is the right one."""
    found = re.findall(r"#### (-?[0-9.,]+)", text)
    return float(bool(found) and found[-1].replace(",", "") == truth)


def follow(one: Callable[[], dict[str, float]]) -> None:
    """Take a step whenever the parent says so."""
    while told() == "step":
        wall, cpu = seconds()
        parts = one()
        now = seconds()
        answer(wall=now[0] - wall, cpu=now[1] - cpu, parts=parts)
    answer(peak=memory("VmHWM"))


# --- this library ---------------------------------------------------------------------------------


def our_steps(job: Job) -> None:
    """Steps as `train` does them: rollout, reward, log-probs, advantage, update."""
    import workbench as wb
    from workbench.runs.loop import run_step

    def digits(completion: str) -> float:
        return share(completion)

    rows = wb.rows(job["rows"], max_prompt_length=4096)
    engine = wb.engines.local(job["model"], lr=job["lr"], **job.get("settings", {}))
    sampling = wb.SamplingSettings(max_tokens=job["tokens"], ignore_eos=True)
    sizes = {"group_size": job["group"], "kl_coef": job["beta"]}
    pipe = wb.recipes.grpo(engine, digits, sampling=sampling, **sizes)
    answer(what=str(Path(wb.__file__).parents[1]), held=memory("VmRSS"))
    step = 0

    def one() -> dict[str, float]:
        nonlocal step
        step += 1
        trace = run_step(pipe, rows.batch(job["prompts"], step=step, seed=0))
        found = {name: value for name, value in trace.metrics.items() if name.startswith("timing_s/")}
        return {name.removeprefix("timing_s/"): value for name, value in found.items()}

    follow(one)


def our_job(job: Job) -> None:
    """The training cell of notebook 201, all recording on."""
    import workbench as wb

    rows = wb.rows("data/arith/train.parquet", max_prompt_length=256)
    held_out = wb.rows("data/arith/test.parquet", max_prompt_length=256, limit=512)
    engine = wb.engines.local("data/tiny-arith", lr=4e-5)
    pipe = wb.recipes.grpo(engine, max_tokens=64, ppo_mini_batch_size=1)
    wall, cpu = seconds()
    often = {"test_freq": 10, "save_freq": 10, "display": None}
    sizes = {"steps": job["steps"], "batch_size": 16, "seed": job["seed"], "run": job["folder"]}
    run = wb.train_blocking(pipe, rows, eval_rows=held_out, **sizes, **often)
    now = seconds()
    spent = sum(row["timing_s/step"] for row in run.rows[1:])
    score = {"held_out": run.summary.get("reward_after"), "peak": memory("VmHWM")}
    answer(wall=now[0] - wall, cpu=now[1] - cpu, in_steps=spent, **score)


# --- TRL ------------------------------------------------------------------------------------------


def switches(job: Job, rows_at_once: int) -> dict[str, Any]:
    """TRL's settings for speed, beside those of the job."""
    rows = job["prompts"] * job["group"]
    return {
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "optim": "adamw_torch_fused",
        "beta": job["beta"],
        "num_iterations": 1,
        "per_device_train_batch_size": rows_at_once,
        "gradient_accumulation_steps": rows // rows_at_once,
        "num_generations": job["group"],
        "max_completion_length": job["tokens"],
        "temperature": 1.0,
        "loss_type": "bnpo",
        "learning_rate": job["lr"],
        "weight_decay": 0.01,
        "max_grad_norm": 1.0,
        "lr_scheduler_type": "constant",
        "dataloader_num_workers": 0,
        "logging_strategy": "no",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "shuffle_dataset": job.get("shuffle", False),
        "seed": job.get("seed", 0),
        **job.get("trl", {}),
    }


def at_once(job: Job) -> int:
    """Rows of one forward pass: about the budget of tokens that this library has by default, in equal parts of the batch."""
    rows, most = job["prompts"] * job["group"], 16_384 / (job["length"] + job["tokens"])
    return min((size for size in range(1, rows + 1) if rows % size == 0), key=lambda size: abs(size - most))


def trainer_of(job: Job, rows: list[dict[str, Any]], reward: Callable[..., list[float]], **more: Any) -> Any:
    """A `GRPOTrainer` with its best switches."""
    import datasets
    import transformers
    import trl

    model = transformers.AutoModelForCausalLM.from_pretrained(job["model"], dtype="float32")
    tokenizer = transformers.AutoTokenizer.from_pretrained(job["model"], padding_side="left")
    config = trl.GRPOConfig(output_dir=job["folder"], **switches(job, at_once(job)), **more)
    found = datasets.Dataset.from_list(rows)
    return trl.GRPOTrainer(model, reward, args=config, train_dataset=found, processing_class=tokenizer)


def trl_steps(job: Job) -> None:
    """Steps of a trainer that waits before each for the parent's word."""
    import transformers

    rows = [json.loads(line) for line in Path(job["rows"]).read_text().splitlines()]

    def digits(completions: list[Any], **_: Any) -> list[float]:
        return [share(one[0]["content"]) for one in completions]

    class Gate(transformers.TrainerCallback):
        """Holds the trainer before each step."""

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if told() != "step":
                answer(peak=memory("VmHWM"))
                os._exit(0)
            self.began = seconds()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            now = seconds()
            answer(wall=now[0] - self.began[0], cpu=now[1] - self.began[1], parts={})

    trainer = trainer_of(job, [{"prompt": row["prompt"]} for row in rows], digits, max_steps=1_000_000)
    # equal lengths on both sides: no token ends a response
    trainer.eos_token_ids = [NEVER]
    trainer.generation_config.eos_token_id = trainer.generation_kwargs["eos_token_id"] = NEVER
    trainer.add_callback(Gate())
    import trl

    answer(what=f"TRL {trl.__version__}", held=memory("VmRSS"), switches=switches(job, at_once(job)))
    trainer.train()


def trl_job(job: Job) -> None:
    """A bare loop on the task of notebook 201: no validation, no recording, no checkpoint; scored at its end, off the clock."""
    import pandas
    import torch

    def rows_in(name: str) -> list[dict[str, Any]]:
        found = pandas.read_parquet(f"data/arith/{name}.parquet").to_dict("records")
        return [{"prompt": list(row["prompt"]), "truth": row["reward_model"]["ground_truth"]} for row in found]

    def right(completions: list[Any], truth: list[str], **_: Any) -> list[float]:
        return [solved(one[0]["content"], each) for one, each in zip(completions, truth, strict=True)]

    task = {
        "model": "data/tiny-arith",
        "prompts": 16,
        "group": 8,
        "tokens": 64,
        "length": 64,
        "lr": 2e-4,
        "beta": 0.001,
    }
    job = {**job, **task, "shuffle": True}
    trainer = trainer_of(job, rows_in("train"), right, max_steps=job["steps"])
    wall, cpu = seconds()
    trainer.train()
    now = seconds()
    peak = memory("VmHWM")
    held_out, model, tokenizer = rows_in("test")[:256], trainer.model.eval(), trainer.processing_class
    chats = [row["prompt"] for row in held_out]
    given = {"add_generation_prompt": True, "return_dict": True, "return_tensors": "pt", "padding": True}
    ids = tokenizer.apply_chat_template(chats, **given)
    torch.manual_seed(job["seed"])
    found = model.generate(**ids, max_new_tokens=64, do_sample=True, temperature=1.0, top_k=0, top_p=1.0)
    texts = tokenizer.batch_decode(found[:, ids["input_ids"].shape[1] :], skip_special_tokens=True)
    score = sum(solved(text, row["truth"]) for text, row in zip(texts, held_out, strict=True)) / len(held_out)
    answer(wall=now[0] - wall, cpu=now[1] - cpu, in_steps=now[0] - wall, held_out=score, peak=peak)


def main() -> None:
    """`engine_sides.py ours|trl`: the job comes as the first line."""
    os.dup2(2, 1)  # what libraries print is no answer
    warnings.filterwarnings("ignore")
    job = json.loads(told())
    sides = {"ours": {"steps": our_steps, "job": our_job}, "trl": {"steps": trl_steps, "job": trl_job}}
    if sys.argv[1] == "trl":
        sys.path.append(job["site"])
        sys.modules["vllm"] = None  # type: ignore[assignment] # it would be imported, unused: 350 MB
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sides[sys.argv[1]][job["kind"]](job)


if __name__ == "__main__":
    main()
