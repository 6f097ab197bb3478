"""Write data/tiny-terminal/tasks.jsonl: small tasks for a terminal, the same bytes from the same seed.

    python data/make_terminal.py [--seed 0] [--number 16] [--folder data/tiny-terminal]

Half of them ask for a file to be made out of others (terminal tasks), half for a mistake in a small program to be mended
(repository tasks: tests that have to pass, and tests that must not stop to). Each has a `solution`, a shell command that
solves it, for tests of the tasks themselves: `terminal_rows` gives it to nobody.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from random import Random
from typing import Any

WORDS = ("apple", "pear", "plum", "fig", "kiwi", "lime", "nut", "oat")
CHECK = "python3 -I .tests/check.py"
CHECK_ANSWER = """import sys

expected = {expected!r}
try:
    found = open("answer.txt").read()
except OSError as error:
    sys.exit(f"answer.txt cannot be read: {{error}}")
sys.exit(None if found.split() == expected.split() else f"answer.txt has {{found.split()[:20]}}")
"""
CHECK_CALL = """import subprocess
import sys

CASES = {cases!r}
call, expected = CASES[sys.argv[1]]
program = f"import sys; sys.path.insert(0, '.'); import {module}; print({module}.{{call}})"
ran = subprocess.run([sys.executable, "-I", "-c", program], capture_output=True, text=True)
sys.exit(None if ran.stdout.strip() == expected else f"{{call}} gives {{(ran.stdout or ran.stderr).strip()[-80:]}}")
"""

PROGRAMS: tuple[tuple[str, str, str, str, tuple[str, ...], dict[str, tuple[str, str]]], ...] = (
    ("shop", "total(prices, discount): the sum of the prices without the discount",
     "def total(prices, discount):\n    return sum(prices) + discount\n", "s/+ discount/- discount/",
     ("test_discount",),
     {"test_discount": ("total([5, 7], 2)", "10"), "test_no_discount": ("total([5, 7], 0)", "12")}),
    ("text", "shout(text): the text in upper case with an exclamation mark",
     "def shout(text):\n    return text.lower() + '!'\n", "s/lower/upper/",
     ("test_letters",),
     {"test_letters": ("shout('go')", "GO!"), "test_digits": ("shout('7')", "7!")}),
    ("stack", "last(items): the last of the items, None where there is none",
     "def last(items):\n    return items[0] if items else None\n", "s/items.0./items[-1]/",
     ("test_two",),
     {"test_two": ("last([1, 2])", "2"), "test_none": ("last([])", "None"), "test_one": ("last([3])", "3")}),
    ("steps", "count(first, last): how many whole numbers there are from first to last, both included",
     "def count(first, last):\n    return max(0, last - first)\n", "s/last - first/last - first + 1/",
     ("test_some", "test_one"),
     {"test_some": ("count(3, 5)", "3"), "test_one": ("count(4, 4)", "1"), "test_none": ("count(5, 3)", "0")}),
    ("marks", "mean(marks): the mean of the marks, 0 where there are none",
     "def mean(marks):\n    return sum(marks) // len(marks) if marks else 0\n", "s,//,/,",
     ("test_half",),
     {"test_half": ("mean([1, 2])", "1.5"), "test_none": ("mean([])", "0")}),
    ("names", "initials(name): the first letters of the words, each with a dot",
     "def initials(name):\n    return ''.join(word[0] + '.' for word in name.split('-'))\n", "s/split('-')/split()/",
     ("test_two",),
     {"test_two": ("initials('Ada Byron')", "A.B."), "test_one": ("initials('Ada')", "A.")}),
    ("clock", "minutes(text): the minutes of a time that is written as 2:05",
     "def minutes(text):\n    hours, rest = text.split(':')\n    return int(hours) * 100 + int(rest)\n", "s/100/60/",
     ("test_hours",),
     {"test_hours": ("minutes('2:05')", "125"), "test_minutes": ("minutes('0:40')", "40")}),
    ("sets", "common(left, right): what is in both lists, in order",
     "def common(left, right):\n    return sorted({*left, *right})\n", "s/{.left, .right}/{*left} \\& {*right}/",
     ("test_some", "test_none"),
     {"test_some": ("common([3, 1], [1, 2])", "[1]"), "test_all": ("common([1], [1])", "[1]"), "test_none": ("common([1], [2])", "[]")}),
)  # fmt: skip
"""(module, what it is for, its text with a mistake, the sed command that mends it, tests that fail before, test → (call, what it gives))."""


def file_task(random: Random, number: int) -> dict[str, Any]:
    """A task to make answer.txt out of the files that are there."""
    numbers = [random.randint(1, 99) for _ in range(random.randint(5, 12))]
    words = [random.choice(WORDS) for _ in range(random.randint(8, 16))]
    wanted = random.choice(words)
    files = {"numbers.txt": "\n".join(map(str, numbers)) + "\n", "words.txt": "\n".join(words) + "\n"}
    asked, expected, solution = (
        ("Write the sum of numbers.txt to answer.txt.", str(sum(numbers)), "awk '{s += $1} END {print s}' numbers.txt"),
        ("Write the largest number of numbers.txt to answer.txt.", str(max(numbers)), "sort -n numbers.txt | tail -1"),
        (f"Write how often {wanted} is in words.txt to answer.txt.", str(words.count(wanted)), f"grep -c {wanted} words.txt"),
        ("Write the words of words.txt to answer.txt, sorted, each one once.", " ".join(sorted(set(words))), "sort -u words.txt"),
    )[number % 4]  # fmt: skip
    check = CHECK_ANSWER.format(expected=expected)
    tests = {"test_command": CHECK, "test_files": {".tests/check.py": check}}
    return {"instruction": asked, "files": files, **tests, "solution": f"{solution} > answer.txt"}


def program_task(number: int) -> dict[str, Any]:
    """A task to mend a program, with the tests that fail before, and those that pass before and have to still."""
    module, purpose, text, mend, failing, cases = PROGRAMS[number % len(PROGRAMS)]
    asked = f"{module}.py has a mistake. It should have {purpose}. Mend it."
    tests = {
        "test_command": f"{CHECK} {{test}}",
        "test_files": {".tests/check.py": CHECK_CALL.format(cases=cases, module=module)},
        "FAIL_TO_PASS": list(failing),
        "PASS_TO_PASS": [name for name in cases if name not in failing],
    }
    return {
        "problem_statement": asked,
        "files": {f"{module}.py": text},
        **tests,
        "solution": f'sed -i "{mend}" {module}.py',
    }


def tasks(seed: int, number: int) -> list[dict[str, Any]]:
    """`number` tasks, of both kinds in turn."""
    random = Random(seed)
    made = [program_task(n // 2) if n % 2 else file_task(random, n // 2) for n in range(number)]
    return [{"instance_id": f"tiny-{index}", **task} for index, task in enumerate(made)]


def main() -> None:
    """Write the tasks, one a line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--number", type=int, default=16)
    parser.add_argument("--folder", type=Path, default=Path(__file__).parent / "tiny-terminal")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(task, ensure_ascii=False) + "\n" for task in tasks(options.seed, options.number)]
    (options.folder / "tasks.jsonl").write_text("".join(lines))


if __name__ == "__main__":
    main()
