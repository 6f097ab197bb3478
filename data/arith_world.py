"""The little world behind `data/`: arithmetic word problems, and how careful and careless people solve them.

Everything is a function of a `random.Random`, so that the data is the same to the byte from one seed.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

NAMES = ("Ada", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gus", "Hana", "Ivo", "Jin", "Kim", "Lea")
THINGS = ("apples", "books", "cards", "coins", "eggs", "pens", "shells", "stamps", "stones", "tickets")
BOXES = ("bags", "boxes", "jars", "rows")


@dataclass(frozen=True)
class Problem:
    """A question and the sums that lead to its answer."""

    question: str
    sums: tuple[tuple[int, str, int, int], ...]
    """(left, operator, right, result) in order; the last result is the answer."""

    @property
    def answer(self) -> int:
        """The number after `####`."""
        return self.sums[-1][3]

    @property
    def solution(self) -> str:
        """A careful worked solution in GSM8K's form."""
        return "\n".join([*(_line(one) for one in self.sums), f"#### {self.answer}"])


def _line(one: tuple[int, str, int, int]) -> str:
    left, sign, right, result = one
    return f"{left} {sign} {right} = {result}"


def make_problem(random: Random) -> Problem:
    """One problem of one or two steps; every intermediate number is between 0 and 99."""
    name, thing = random.choice(NAMES), random.choice(THINGS)
    kind = random.randrange(4)
    if kind == 0:
        a, b = random.randint(2, 15), random.randint(2, 15)
        question = f"{name} has {a} {thing} and finds {b} more. How many {thing} does {name} have?"
        return Problem(question, ((a, "+", b, a + b),))
    if kind == 1:
        a = random.randint(5, 20)
        b = random.randint(1, a)
        question = f"{name} has {a} {thing} and loses {b}. How many {thing} are left?"
        return Problem(question, ((a, "-", b, a - b),))
    if kind == 2:
        a, b = random.randint(2, 10), random.randint(2, 10)
        c = random.randint(1, a + b - 1)
        question = f"{name} has {a} {thing}, buys {b} and gives away {c}. How many {thing} are left?"
        return Problem(question, ((a, "+", b, a + b), (a + b, "-", c, a + b - c)))
    a, b, c, box = random.randint(2, 5), random.randint(2, 6), random.randint(2, 10), random.choice(BOXES)
    question = f"{name} fills {a} {box} with {b} {thing} each and keeps {c} more. How many {thing} are there?"
    return Problem(question, ((a, "*", b, a * b), (a * b, "+", c, a * b + c)))


def careless(problem: Problem, random: Random) -> str:
    """A solution as most people write it: hasty, without the marker, rambling, and at times careful.

    The manner is announced by its first words, so that a policy can come to prefer one; within it each
    slip is drawn apart.
    """
    manner = random.random()
    if manner < 0.28:
        return problem.solution
    if manner < 0.60:
        return "Quick: " + _worked(problem, random, slip=0.35, marker=0.5)
    if manner < 0.80:
        return "So, " + _worked(problem, random, slip=0.04, marker=0.15)
    return _ramble(problem, random)


def _worked(problem: Problem, random: Random, slip: float, marker: float) -> str:
    """Sums of which each goes wrong with chance `slip`; the answer is marked with chance `marker`."""
    lines = []
    carried: int | None = None
    for left, sign, right, result in problem.sums:
        left = left if carried is None else carried
        right_result = result if carried is None else {"+": left + right, "-": left - right, "*": left * right}[sign]
        if random.random() < slip:
            right_result += random.choice((-2, -1, 1, 2, 10))
        carried = max(right_result, 0)
        lines.append(_line((left, sign, right, carried)))
    ending = f"#### {carried}" if random.random() < marker else random.choice((f"It is {carried}.", f"####{carried}"))
    return "\n".join([*lines, ending])


def _ramble(problem: Problem, random: Random) -> str:
    """Words about the question, and no answer."""
    numbers = [one[0] for one in problem.sums] + [problem.sums[-1][2]]
    thoughts = [
        f"there is a {random.choice(numbers)}",
        f"maybe {random.choice(numbers)} and {random.choice(numbers)}",
        "it could be more",
        "or less",
        "hard to say",
    ]
    random.shuffle(thoughts)
    return "Hmm, " + ", ".join(thoughts[: random.randint(2, 5)]) + "."
