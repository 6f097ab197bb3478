"""Make data/tiny-arith-tools out of data/tiny-arith: a policy that may ask a calculator, and mostly does not.

    python data/make_tool_model.py [--steps 400] [--seed 0]

Where tools are shown to it, one episode in five or so begins with a call; the others hurry through the sums in their head, and
many of those are wrong. So calling pays, and there is much of it to learn. The words of a call are tokens of their own, as
Qwen has them, in places of the vocabulary that tiny-arith leaves free. The data is exact from the seed; the weights are the
same up to the hardware's rounding.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import torch
from arith_world import Problem, careless, make_problem
from make_arith import problems
from make_arith_tools import CALCULATOR, CHECKER, demonstration
from make_model import START, STOP, TEMPLATE, fit
from tokenizers import AddedToken
from transformers import AutoModelForCausalLM, AutoTokenizer

HERE = Path(__file__).parent
WORDS = (
    "<tool_call>",
    "</tool_call>",
    '{"name":',
    f' "{CALCULATOR}",',
    ' "arguments":',
    ' {"expression": "',
    '"}}',
    CALCULATOR,
    CHECKER,
    "tool",
)
CALLS, WITHOUT, STOPS, FORGETS = 0.25, 0.15, 0.3, 0.2
"""Scatter: of chats that call where tools are shown; that show none; of callers that go on in their head after the first
answer; of solutions that forget the marker at the end."""
HURRIES, SLIPS = 0.75, 0.55
"""Scatter: of those who reckon in their head and come to an answer; of their sums that go wrong, always in the same way, so
that taking the likeliest digit is no way out."""


def make_tokenizer() -> Any:
    """tiny-arith's tokenizer, with the words of a call and the template above."""
    tokenizer = AutoTokenizer.from_pretrained(HERE / "tiny-arith")
    tokenizer.add_tokens([AddedToken(word, normalized=False, special=False) for word in WORDS])
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def make_model(known: int, total: int, seed: int) -> Any:
    """tiny-arith, the embeddings of words number `known` to `total` − 1 made new: about the mean of the others."""
    model = AutoModelForCausalLM.from_pretrained(HERE / "tiny-arith", dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        table = model.get_input_embeddings().weight
        table[known:total] = table[:known].mean(0) + 0.02 * torch.randn(
            total - known, table.shape[1], generator=generator
        )
    return model


def in_the_head(problem: Problem, random: Random) -> str:
    """A hurried solution, or words about the question and no answer."""
    if random.random() >= HURRIES:
        while not (text := careless(problem, random)).startswith("Hmm, "):
            pass
        return text
    lines: list[str] = []
    number = problem.sums[0][0]
    for _, sign, right, _ in problem.sums:
        result = counted(number, sign, right, slips=random.random() < SLIPS)
        lines.append(f"{number} {sign} {right} = {result}")
        number = result
    ending = f"#### {number}" if random.random() >= FORGETS else f"It is {number}."
    return "Quick: " + "\n".join([*lines, ending])


def counted(left: int, sign: str, right: int, *, slips: bool) -> int:
    """A result, at least 0. A slip loses one on the way: one too few, with `*` one row; two do not make up for each other."""
    if sign == "*":
        return (left - slips) * right
    return max((left + right if sign == "+" else left - right) - slips, 0)


def asking(problem: Problem, random: Random) -> list[dict[str, str]]:
    """A chat that begins with a call: asked throughout, or for the first sum only; at times without the marker at the end."""
    chat = demonstration(problem)
    if len(problem.sums) > 1 and random.random() < STOPS:
        rest = Problem(problem.question, problem.sums[1:])
        return [*chat[:3], {"role": "assistant", "content": in_the_head(rest, random)}]
    if random.random() < FORGETS:
        chat[-1] = {"role": "assistant", "content": f"It is {problem.answer}."}
    return chat


def make_chat(problem: Problem, random: Random) -> tuple[tuple[str, ...], list[dict[str, str]]]:
    """(names of the tools that are shown, the chat)."""
    shown = random.random()
    tools = () if shown < WITHOUT else (CALCULATOR,) if shown < 0.5 else (CALCULATOR, CHECKER)
    if tools and random.random() < CALLS:
        return tools, asking(problem, random)
    asked = {"role": "user", "content": problem.question}
    return tools, [asked, {"role": "assistant", "content": in_the_head(problem, random)}]


def tokens_of(tokenizer: Any, tools: Sequence[str], chat: Sequence[dict[str, str]]) -> tuple[list[int], list[int]]:
    """(ids of a chat, 1 for those that the assistant wrote): what an episode of `tool_agent` has, token for token."""
    ids: list[int] = []
    own: list[int] = []

    def put(text: str, mine: int) -> None:
        added = tokenizer(text, add_special_tokens=False)["input_ids"]
        ids.extend(added)
        own.extend([mine] * len(added))

    if tools:
        put(f"{START}system\ntools: {', '.join(tools)}{STOP}\n", 0)
    for turn in chat:
        mine = int(turn["role"] == "assistant")
        put(f"{START}{turn['role']}\n", 0)
        put(turn["content"] + STOP, mine)
        put("\n", 0)
    return ids[:-1], own[:-1]  # nothing follows the last end token


def example(tokenizer: Any, random: Random, held_out: frozenset[str]) -> tuple[list[int], list[int]]:
    """`tokens_of` a fresh chat."""
    problem = make_problem(random)
    while problem.question in held_out:
        problem = make_problem(random)
    return tokens_of(tokenizer, *make_chat(problem, random))


def batch(examples: Sequence[tuple[list[int], list[int]]], pad: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Right-padded ids, attention mask and labels: what others wrote carries no loss (label −100)."""
    width = max(len(ids) for ids, _ in examples)
    ids = torch.full((len(examples), width), pad)
    labels = torch.full((len(examples), width), -100)
    there = torch.zeros((len(examples), width), dtype=torch.long)
    for row, (tokens, own) in enumerate(examples):
        ids[row, : len(tokens)] = torch.tensor(tokens)
        there[row, : len(tokens)] = 1
        labels[row, : len(tokens)] = torch.tensor(
            [one if mine else -100 for one, mine in zip(tokens, own, strict=True)]
        )
    return ids, there, labels


def warm_up(model: Any, tokenizer: Any, steps: int, size: int, seed: int) -> None:
    """Supervised steps on fresh chats; no held-out question is among them."""
    random = Random(seed + 21)
    held_out = frozenset(problem.question for problem in problems(0, 4096 + 512)[4096:])

    def draw() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return batch([example(tokenizer, random, held_out) for _ in range(size)], tokenizer.pad_token_id)

    fit(model, draw, steps, peak=2e-3, rising=30, say=50)


def main() -> None:
    """Make tokenizer and model, warm up, write the folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=HERE / "tiny-arith-tools")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    tokenizer = make_tokenizer()
    model = make_model(len(tokenizer) - len(WORDS), len(tokenizer), options.seed)
    warm_up(model, tokenizer, options.steps, options.batch, options.seed)
    model.save_pretrained(options.folder)
    tokenizer.save_pretrained(options.folder)


if __name__ == "__main__":
    main()
