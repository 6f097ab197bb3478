"""Write data/arith-tools and data/arith-interaction: the arithmetic set for agents, the same bytes from the same seed.

python data/make_arith_tools.py [--seed 0] [--train 1024] [--test 256] [--folder data]

`arith-tools` rows are for `tool_agent` with the tools of `TOOLS` (a calculator, and a checker of answers that is given each
row's ground truth); `arith-interaction` rows are for a simulated user, `gsm8k`. The problems are the first of each split of
data/arith, so that what is held out there is held out here.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from random import Random

from arith_world import Problem
from make_arith import problems, row, write

DRAWN = (4096, 512)
"""How many problems data/arith has in each split."""
CALCULATOR, CHECKER, USER = "calculator", "gsm8k_answer", "gsm8k"
TOOLS = f"""tools:
  - name: {CALCULATOR}
  - name: {CHECKER}
"""
INTERACTION = f"""interaction:
  - class_name: {USER}
    config: {{}}
"""


def tool_row(problem: Problem, split: str, index: int) -> dict[str, object]:
    """One row in verl's schema whose tools get what `tools_kwargs` has for them."""
    made = _for_agents(problem, split, index)
    kwargs = {CHECKER: {"create_kwargs": {"ground_truth": str(problem.answer)}}}
    made["extra_info"] |= {"need_tools_kwargs": True, "tools_kwargs": kwargs}  # type: ignore[operator]
    return made


def interaction_row(problem: Problem, split: str, index: int) -> dict[str, object]:
    """One row in verl's schema that is answered by a simulated user."""
    made = _for_agents(problem, split, index)
    kwargs = {"name": USER, "query": problem.question, "ground_truth": str(problem.answer)}
    made["extra_info"] |= {"interaction_kwargs": kwargs}  # type: ignore[operator]
    return made


def _for_agents(problem: Problem, split: str, index: int) -> dict[str, object]:
    return {**row(problem, split, index), "agent_name": "tool_agent"}


def call(left: int, sign: str, right: int) -> str:
    """A call of the calculator as hermes and Qwen models write it."""
    asked = {"name": CALCULATOR, "arguments": {"expression": f"{left} {sign} {right}"}}
    return f"<tool_call>\n{json.dumps(asked)}\n</tool_call>"


def demonstration(problem: Problem) -> list[dict[str, str]]:
    """The chat of somebody who asks the calculator for every sum, for warming a model up: it is right throughout."""
    chat = [{"role": "user", "content": problem.question}]
    for left, sign, right, result in problem.sums:
        chat += [
            {"role": "assistant", "content": call(left, sign, right)},
            {"role": "tool", "content": str(result)},
        ]
    return [*chat, {"role": "assistant", "content": f"#### {problem.answer}"}]


def second_try(problem: Problem, random: Random, wrong: str) -> list[dict[str, str]]:
    """The chat of somebody who slips, is told `wrong`, and mends it."""
    slip = problem.answer + random.choice((-2, -1, 1, 2, 10))
    return [
        {"role": "user", "content": problem.question},
        {"role": "assistant", "content": f"#### {slip if slip >= 0 else problem.answer + 1}"},
        {"role": "user", "content": wrong},
        {"role": "assistant", "content": problem.solution},
    ]


def main() -> None:
    """Write both variants, both splits, and the yaml files that go with them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--train", type=int, default=1024)
    parser.add_argument("--test", type=int, default=256)
    parser.add_argument("--folder", type=Path, default=Path(__file__).parent)
    options = parser.parse_args()
    drawn = problems(options.seed, sum(DRAWN))
    splits = {"train": drawn[: DRAWN[0]][: options.train], "test": drawn[DRAWN[0] :][: options.test]}
    for name, make, file, text in (
        ("arith-tools", tool_row, "tools.yaml", TOOLS),
        ("arith-interaction", interaction_row, "interaction.yaml", INTERACTION),
    ):
        folder = options.folder / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text(text)
        for split, part in splits.items():
            write([make(problem, split, index) for index, problem in enumerate(part)], folder / f"{split}.parquet")


if __name__ == "__main__":
    main()
