"""What looking at a large recorded step costs: 10,000 rows × 1,024 tokens judged again, estimated again, compared.

Each section is a function that takes the options, prints its own table and cleans up after itself; `--only` picks some.
`tests/benchmarks/README.md` has the last figures.
"""

from __future__ import annotations

import argparse
import re
import resource
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch

import workbench as wb
from workbench.runs.folder import STEP
from workbench.runs.symptoms import Watch
from workbench.steps.trace import Phase, Trace, perform

GROUP = 8
PROMPT_TOKENS = 64
WORDS = (
    "so",
    "we",
    "add",
    "the",
    "two",
    "numbers",
    "which",
    "gives",
    "12",
    "then",
    "7",
    "and",
    "in",
    "the",
    "end",
    "it",
    "is",
)


# --- a large step on disk -------------------------------------------------------------------------


def synthetic(rows: int, tokens: int, seed: int = 0) -> Trace:
    """A trace of step 1 as GRPO leaves it, `rows` × `tokens`: made-up tokens and log-probs, real judging and estimating."""
    draw = torch.Generator().manual_seed(seed)
    prompts = [[{"role": "user", "content": f"What is {number} + 5?"}] for number in range(rows // GROUP)]
    truths = [{"style": "rule", "ground_truth": str(number % 100)} for number in range(rows // GROUP)]
    uids = [f"{number:08x}" for number in range(rows // GROUP)]
    start = wb.DataProto(
        None,
        {"raw_prompt": prompts, "uid": uids, "reward_model": truths, "data_source": ["workbench/arith"] * len(uids)},
        {"step": 1, "seed": 0, "epoch": 0},
    )
    source = torch.arange(rows // GROUP).repeat_interleave(GROUP)
    batch = start.repeat(GROUP, interleave=True).with_meta(group_size=GROUP)
    lengths = torch.randint(tokens // 4, tokens + 1, (len(batch),), generator=draw)
    rollout = _tokens(lengths, tokens, draw) | {
        "response_text": [_text(int(one), row) for row, one in enumerate(lengths)]
    }
    trace = Trace(start).add(_phase("rollout", batch.with_columns(rollout), tuple(rollout), source))
    trace = trace.add(perform(wb.stages.Reward(wb.rewards.Reward(last_number, in_process=True)), trace.batch))
    for name, column in (("old_log_prob", "old_log_probs"), ("ref_log_prob", "ref_log_prob")):
        values = {column: trace.batch.rollout_log_probs + 1e-6 * torch.randn(len(batch), tokens, generator=draw)}
        trace = trace.add(_phase(name, trace.batch.with_columns(values), (column,)))
    return trace.add(perform(wb.stages.Advantage(wb.functional.grpo), trace.batch))


def _tokens(lengths: torch.Tensor, tokens: int, draw: torch.Generator) -> dict[str, Any]:
    rows = len(lengths)
    mask = (torch.arange(tokens) < lengths[:, None]).long()
    prompts = torch.randint(5, 150, (rows, PROMPT_TOKENS), generator=draw)
    responses = torch.randint(5, 150, (rows, tokens), generator=draw) * mask
    attention = torch.cat([torch.ones_like(prompts), mask], 1)
    return {
        "prompts": prompts,
        "prompt_mask": torch.ones_like(prompts),
        "responses": responses,
        "response_mask": mask,
        "input_ids": torch.cat([prompts, responses], 1),
        "attention_mask": attention,
        "position_ids": attention.cumsum(-1) - 1,
        "rollout_log_probs": -torch.rand(rows, tokens, generator=draw) * mask,
        "finish_reason": ["length" if int(one) == tokens else "stop" for one in lengths],
        "policy_version": torch.zeros(rows, dtype=torch.long),
    }


def _text(tokens: int, row: int) -> str:
    return " ".join(WORDS[(row + place) % len(WORDS)] for place in range(tokens)) + f" {(row * 7) % 100}"


def _phase(name: str, batch: wb.DataProto, wrote: tuple[str, ...], rows: torch.Tensor | None = None) -> Phase:
    return Phase(stage=name, batch=batch, wrote=wrote, metrics={}, settings={}, rows=rows)


@contextmanager
def large_run(rows: int, tokens: int) -> Iterator[tuple[wb.Run, dict[str, float]]]:
    """A run folder of one real tiny step whose trace is the large one; (run, seconds to make and to save the trace)."""
    with tempfile.TemporaryDirectory() as folder:
        engine = wb.engines.local("data/tiny-arith", lr=2e-4)
        data = wb.rows("data/arith/train.parquet", max_prompt_length=256, limit=8)
        pipe = wb.recipes.grpo(engine, group_size=2, kl_coef=0.001, max_tokens=4)
        run = wb.train_blocking(pipe, data, steps=1, batch_size=2, run=Path(folder) / "run", trackers=())
        target = run.path / "traces" / "step_000001"
        reason = (target / "kept.json").read_text()
        shutil.rmtree(target)
        began = time.perf_counter()
        trace = synthetic(rows, tokens)
        made = time.perf_counter()
        trace.save(target)
        seconds = {"made": made - began, "saved": time.perf_counter() - made}
        (target / "kept.json").write_text(reason)
        yield run, seconds


# --- measuring ------------------------------------------------------------------------------------


def timed(work: Callable[[], Any], repeats: int) -> tuple[float, Any]:
    """(median seconds, the last result)."""
    spent, made = [], None
    for _ in range(repeats):
        began = time.perf_counter()
        made = work()
        spent.append(time.perf_counter() - began)
    return median(spent), made


def peak() -> float:
    """GiB that this process has held at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def shown(lines: list[tuple[str, float]], beside: float) -> None:
    """Seconds, and how many times the bare work that is."""
    for what, seconds in lines:
        print(f"  {what:<52} {seconds:8.3f} s {seconds / beside:7.2f} ×")


# --- judging again --------------------------------------------------------------------------------


def last_number(solution_str: str, ground_truth: str, **_: Any) -> float:
    """1 where the last number of the text is the right one: a plain Python reward."""
    found = re.findall(r"-?\d+", solution_str)
    return float(bool(found) and found[-1] == ground_truth)


def shorter(solution_str: str, ground_truth: str, **_: Any) -> float:
    """Another reward: right, and less the longer the text is."""
    return last_number(solution_str, ground_truth) - len(solution_str) / 100_000


def rescoring(options: argparse.Namespace) -> None:
    """A recorded step with a new reward, new advantages and a comparison, beside the loop over the bare function."""
    with large_run(options.rows, options.tokens) as (run, seconds):
        size = sum(path.stat().st_size for path in (run.path / "traces").rglob("*") if path.is_file()) / 2**20
        print(
            f"{options.rows} rows × {options.tokens} tokens: {size:.0f} MiB on disk, saved in {seconds['saved']:.2f} s"
        )
        repeats = options.repeats
        batch = run.traces[1].batch
        texts, truths = list(batch["response_text"]), [one["ground_truth"] for one in batch["reward_model"]]
        bare, _ = timed(lambda: [shorter(text, truth) for text, truth in zip(texts, truths, strict=True)], repeats)
        lines = [("the reward function alone, in a loop", bare)]
        spent, _ = timed(lambda: run.stepper(1, at="reward"), repeats)
        lines.append(("run.stepper(1, at='reward')", spent))
        for where, reward in (
            ("in this process", wb.rewards.Reward(shorter, in_process=True)),
            ("in the pool, 2 workers", wb.rewards.Reward(shorter, workers=2)),
        ):
            stepper = run.stepper(1, at="reward").replace("reward", reward)
            first, _ = timed(lambda s=stepper: s.fork().next(), 1)
            again, judged = timed(lambda s=stepper: s.fork().next(), repeats)
            lines += [(f"judged again {where}, first time", first), (f"judged again {where}", again)]
        spent, estimated = timed(lambda: judged.fork().run(until="advantage"), repeats)
        lines.append(("log-probs as recorded, advantages again", spent))
        spent, made = timed(lambda: estimated.compare(run.traces[1]), repeats)
        lines.append(("compared with the trace on disk", spent))
        spent, _ = timed(lambda: (repr(made), made._repr_html_()), repeats)
        lines.append(("the comparison shown, text and HTML", spent))
        reward = wb.rewards.Reward(shorter, in_process=True)

        def whole() -> Any:
            stepper = run.stepper(1, at="reward").replace("reward", reward).run(until="advantage")
            return stepper.compare(run.traces[1])

        spent, made = timed(whole, repeats)
        lines.append(("all of it in this process, from the folder", spent))
        shown(lines, bare)
        print(f"  {len(made.rows)} rows changed, {made.sign_flips} signs; {peak():.2f} GiB at most")


def recording(options: argparse.Namespace) -> None:
    """What the check for symptoms costs after each step of a long run."""
    rows = [
        {STEP: step, "critic/score/mean": 0.5, "actor/grad_norm": 0.3, "actor/entropy": 1.0}
        for step in range(1, 10_101)
    ]
    watch = Watch(rows[:10_000])
    spent = []
    for row in rows[10_000:]:
        began = time.perf_counter()
        watch.look(row)
        spent.append(time.perf_counter() - began)
    print(f"the check for symptoms after 10,000 steps: {1e6 * median(spent):.0f} µs a step")


SECTIONS: dict[str, Callable[[argparse.Namespace], None]] = {"recording": recording, "rescoring": rescoring}


def main() -> None:
    """Those that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", choices=list(SECTIONS), default=list(SECTIONS))
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--tokens", type=int, default=1_024)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    for name in options.only:
        SECTIONS[name](options)


if __name__ == "__main__":
    main()
