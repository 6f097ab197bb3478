"""Make what judges the little world's answers: data/tiny-reward-model, data/tiny-judge, data/tiny-pair-judge and data/arith-pairs.

    python data/make_judges.py [--steps 700] [--seed 0]

The reward model is a sequence classifier with one label, trained on pairs (a right and a wrong answer to one
question) by −log σ(r⁺ − r⁻) (Bradley and Terry 1952). The judge is a causal model that learns to work the sums out
in `<reason>` and to say `<score>1</score>` or 0, on the very prompts that `rewards.Judge` makes with `PROMPT` and
`Check`. The pair judge is made of the judge: it learns to compare two answers, and then for a few steps from a careless annotator,
who prefers what stands first. Trained further, by GRPO, it can become a good one. All see fresh problems; no held-out question of
`data/arith` is among them. Stored in half precision.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from random import Random
from typing import Any, Literal

import pandas as pd
import torch
import torch.nn.functional as F
from arith_world import Problem, careless, make_problem
from make_arith import problems
from make_model import STOP, batch
from pydantic import Field
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from workbench.rewards import reasoning
from workbench.rewards.judge import Verdict, delimited, fill, instructions

HERE = Path(__file__).parent
PROMPT = "{prompt}\n{response}\n{instructions}"
"""The judge's prompt; a tiny model has no use for more words."""


class Check(Verdict):
    """What the tiny judge answers."""

    reason: str = Field(description="the sums")
    score: int = Field(ge=0, le=1, description="1 or 0")


Example = tuple[list[int], int]


class Preference(Verdict):
    """What the tiny pair judge answers."""

    reason: str = Field(description="the sums")
    better: Literal["A", "B"] = Field(description="A or B")


PAIR = "{prompt}\nA: {answer_a}\nB: {answer_b}\n{instructions}"
"""The pair judge's prompt."""
FIRST = (0.85, 0.35)
"""How often the careless annotator is right where the better answer is A, and where it is B."""


def judged(random: Random, held_out: frozenset[str]) -> tuple[Problem, str, bool]:
    """(a fresh problem, an answer to it, whether it is right): about half are."""
    problem = make_problem(random)
    while problem.question in held_out:
        problem = make_problem(random)
    wanted = random.random() < 0.5
    for _ in range(50):
        answer = careless(problem, random)
        if is_right(problem, answer) == wanted:
            break
    return problem, answer, is_right(problem, answer)


def is_right(problem: Problem, answer: str) -> bool:
    """Marked and equal: what the world's rule scores 1."""
    return answer.endswith(f"#### {problem.answer}")


def judge_example(tokenizer: Any, random: Random, held_out: frozenset[str]) -> tuple[list[int], int]:
    """(ids of the judge's prompt and verdict, length of the prompt)."""
    problem, answer, right = judged(random, held_out)
    asked = {"prompt": delimited(problem.question), "response": delimited(answer), "instructions": instructions(Check)}
    chat = [{"role": "user", "content": fill(PROMPT, asked)}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    ids = tokenizer.encode(text, add_special_tokens=False)
    verdict = f"<reason>{problem.solution}</reason><score>{int(right)}</score>{STOP}"
    return ids + tokenizer.encode(verdict, add_special_tokens=False), len(ids)


def schedule(optimizer: torch.optim.Optimizer, step: int, steps: int, peak: float) -> None:
    """Warm up over 30 steps, then a half cosine."""
    for group in optimizer.param_groups:
        group["lr"] = peak * min(1.0, (step + 1) / 30) * 0.5 * (1 + math.cos(math.pi * step / steps)) + 1e-6


def train_judge(tokenizer: Any, steps: int, size: int, seed: int, held_out: frozenset[str]) -> Any:
    """Supervised steps on verdicts."""
    model = AutoModelForCausalLM.from_pretrained(HERE / "tiny-arith", dtype=torch.float32)
    random = Random(seed + 11)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, betas=(0.9, 0.98), weight_decay=0.01)
    for step in range(steps):
        schedule(optimizer, step, steps, 2e-3)
        ids, labels = batch([judge_example(tokenizer, random, held_out) for _ in range(size)], tokenizer.pad_token_id)
        loss = model(input_ids=ids, attention_mask=(ids != tokenizer.pad_token_id).long(), labels=labels).loss
        take_step(model, optimizer, loss, step, "judge")
    return model


def train_reward_model(tokenizer: Any, steps: int, size: int, seed: int, held_out: frozenset[str]) -> Any:
    """Steps on pairs of answers to one question."""
    torch.manual_seed(seed)
    model = AutoModelForSequenceClassification.from_pretrained(HERE / "tiny-arith", num_labels=1, dtype=torch.float32)
    random = Random(seed + 12)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, betas=(0.9, 0.98), weight_decay=0.01)
    for step in range(steps):
        schedule(optimizer, step, steps, 1e-3)
        texts = [text for _ in range(size) for text in pair(tokenizer, random, held_out)]
        rows = tokenizer(texts, padding=True, padding_side="right", return_tensors="pt", add_special_tokens=False)
        scores = model(input_ids=rows.input_ids, attention_mask=rows.attention_mask).logits[:, 0]
        better, worse = scores[0::2], scores[1::2]
        # centred, so that the scalar has a zero that means something (TRL's center_rewards_coefficient)
        loss = -F.logsigmoid(better - worse).mean() + 0.01 * ((better + worse) ** 2).mean()
        take_step(model, optimizer, loss, step, "reward model")
    return model


def pair(tokenizer: Any, random: Random, held_out: frozenset[str]) -> tuple[str, str]:
    """(right, wrong) conversations over one question."""
    problem, *answers = answers_to(random, held_out)
    user = {"role": "user", "content": problem.question}
    texts = [
        tokenizer.apply_chat_template([user, {"role": "assistant", "content": answer}], tokenize=False)
        for answer in answers
    ]
    return texts[0], texts[1]


def answers_to(random: Random, held_out: frozenset[str]) -> tuple[Problem, str, str]:
    """(a fresh problem, a right answer, a wrong one)."""
    problem = make_problem(random)
    while problem.question in held_out:
        problem = make_problem(random)
    wrong = careless(problem, random)
    while is_right(problem, wrong):
        wrong = careless(problem, random)
    if random.random() < 0.5:  # a wrong number in careful form: form alone must not decide
        wrong = problem.solution.replace(
            f"#### {problem.answer}", f"#### {problem.answer + random.choice((-2, -1, 1, 2))}"
        )
    right = problem.solution
    for _ in range(20 if random.random() < 0.6 else 0):  # nor must manner: the hasty are right at times
        hasty = careless(problem, random)
        if is_right(problem, hasty) and hasty != problem.solution:
            right = hasty
            break
    return problem, right, wrong


def preference_example(tokenizer: Any, random: Random, held_out: frozenset[str], sure: tuple[float, float]) -> Example:
    """(ids of the pair judge's prompt and an annotator's verdict, length of the prompt); `sure` is how often they are right."""
    problem, *answers = answers_to(random, held_out)
    first = random.random() < 0.5
    if not first:
        answers.reverse()
    text = reasoning(Preference, template=PAIR).text(problem.question, answers)
    asked = tokenizer.apply_chat_template(
        [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
    )
    ids = tokenizer.encode(asked, add_special_tokens=False)
    right = random.random() < sure[0 if first else 1]
    marked = [answer.partition("#### ")[2] or "-" for answer in answers]
    reason = f"{problem.solution}\nA: {marked[0]}\nB: {marked[1]}"
    verdict = f"<reason>{reason}</reason><better>{'A' if first == right else 'B'}</better>{STOP}"
    return ids + tokenizer.encode(verdict, add_special_tokens=False), len(ids)


def train_pair_judge(tokenizer: Any, steps: int, size: int, seed: int, held_out: frozenset[str]) -> Any:
    """Supervised steps from the judge of single answers on: on right verdicts, and a tenth as many on a careless annotator's."""
    model = AutoModelForCausalLM.from_pretrained(HERE / "tiny-judge", dtype=torch.float32)
    random = Random(seed + 13)
    for name, length, sure, peak in (("pair judge", steps, (1.0, 1.0), 2e-3), ("careless", steps // 10, FIRST, 3e-4)):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, betas=(0.9, 0.98), weight_decay=0.01)
        for step in range(length):
            schedule(optimizer, step, length, peak)
            examples = [preference_example(tokenizer, random, held_out, sure) for _ in range(size)]
            ids, labels = batch(examples, tokenizer.pad_token_id)
            logits = model(input_ids=ids, attention_mask=(ids != tokenizer.pad_token_id).long()).logits[:, :-1]
            losses = F.cross_entropy(logits.transpose(1, 2), labels[:, 1:], reduction="none")
            chosen = labels[:, 1:].ne(-100) & torch.isin(labels[:, 1:], torch.tensor(tokenizer.encode("AB")))
            # of a verdict's twenty tokens one decides
            loss = losses.sum() / labels[:, 1:].ne(-100).sum() + losses[chosen].mean()
            take_step(model, optimizer, loss, step, name)
    return model


def write_pairs(folder: Path, seed: int, held_out: frozenset[str]) -> None:
    """Pairs of answers as TRL's preference data have them: 512 to train on, 128 held out; no question is in both."""
    random, rows = Random(seed + 14), {}
    while len(rows) < 640:
        problem, right, wrong = answers_to(random, held_out)
        rows[problem.question] = {"prompt": problem.question, "chosen": right, "rejected": wrong}
    found = list(rows.values())
    folder.mkdir(parents=True, exist_ok=True)
    pd.DataFrame(found[:512]).to_parquet(folder / "train.parquet", index=False)
    pd.DataFrame(found[512:]).to_parquet(folder / "test.parquet", index=False)


def take_step(model: Any, optimizer: torch.optim.Optimizer, loss: torch.Tensor, step: int, name: str) -> None:
    """One optimizer step, and a line now and then."""
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if step % 50 == 0:
        print(f"{name} step {step:4d}  loss {loss.item():.4f}", flush=True)


def main() -> None:
    """Make them and write their folders."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=700)
    parser.add_argument("--batch", type=int, default=48)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", choices=("tiny-reward-model", "tiny-judge", "tiny-pair-judge", "arith-pairs"))
    parser.add_argument("--folder", type=Path, default=HERE)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    tokenizer = AutoTokenizer.from_pretrained(HERE / "tiny-arith")
    held_out = frozenset(problem.question for problem in problems(0, 4096 + 512)[4096:])
    if options.only in (None, "arith-pairs"):
        write_pairs(options.folder / "arith-pairs", options.seed, held_out)
    kinds = {"tiny-reward-model": train_reward_model, "tiny-judge": train_judge, "tiny-pair-judge": train_pair_judge}
    for name, train in kinds.items():
        if options.only not in (None, name):
            continue
        model = train(tokenizer, options.steps, options.batch, options.seed, held_out)
        model.half().save_pretrained(options.folder / name)
        tokenizer.save_pretrained(options.folder / name)


if __name__ == "__main__":
    main()
