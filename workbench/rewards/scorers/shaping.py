"""Rewards for the form of a response: format, length, repetition; meant as weighted parts of a `Rubric`."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence

from workbench.base.config import require
from workbench.base.errors import SettingError
from workbench.datasets.records import last_box
from workbench.rewards.score import Score, bounded

LONGEST = 20_000
"""Characters that a pattern is run on: a pattern's time can grow faster than its text."""

SECONDS = 1.0
"""Processor time that `matches` takes for a response at most."""


@bounded
def think_answer_format(response: str) -> Score:
    """Score 1 for `<think>…</think>` and then `<answer>…</answer>`, each once, with nothing around them; else 0."""
    text = response.strip()
    tags = ("<think>", "</think>", "<answer>", "</answer>")
    places = [text.find(tag) for tag in tags]
    good = all(text.count(tag) == 1 for tag in tags) and places == sorted(places)
    between = text[places[1] + len(tags[1]) : places[2]].strip() if good else ""
    good = good and text.startswith(tags[0]) and text.endswith(tags[3]) and not between
    return Score(value=float(good), why="in form" if good else "not <think>…</think><answer>…</answer>")


@bounded
def boxed_format(response: str) -> Score:
    r"""Score 1 where the response's last `\boxed{…}` is closed, else 0."""
    good = last_box(response) is not None
    return Score(value=float(good), why="has a box" if good else "no closed \\boxed{…}")


def matches(pattern: str, *, full: bool = False) -> Callable[[str], Score]:
    """Make a scorer: 1 where a regular expression is found in the first 20,000 characters, or with `full` matches all
    of a response that is no longer than that; else 0.

    The scorer runs in a worker process, because some expressions never end on some texts: a response that takes more than
    `SECONDS` of processor time is *timeout* with 0. Raises `SettingError` for a pattern that is not a regular expression.
    """
    try:
        compiled = re.compile(pattern, re.DOTALL)
    except re.error as cause:
        raise SettingError("pattern of the scorer matches", expected="a regular expression", found=cause) from cause

    def scorer(response: str) -> dict[str, object]:
        if full:
            good = len(response) <= LONGEST and compiled.fullmatch(response) is not None
        else:
            good = compiled.search(response[:LONGEST]) is not None
        return {"score": float(good), "why": "matches" if good else f"does not match {compiled.pattern!r}"}

    scorer.__name__ = "matches"
    vars(scorer)["processor_seconds"] = SECONDS
    return scorer  # type: ignore[return-value]


def length_penalty(*, minimum: int = 10, maximum: int = 1000, per_character: float = 0.01) -> Callable[[str], Score]:
    """Make a scorer: −`per_character` for every character of the response below `minimum` or above `maximum`, else 0."""
    require(0 <= minimum <= maximum, "minimum", expected=f"0 to maximum ({maximum})", found=minimum)
    require(0 <= per_character < math.inf, "per_character", expected="a number ≥ 0", found=per_character)

    @bounded
    def scorer(response: str) -> Score:
        outside = max(minimum - len(response), 0) + max(len(response) - maximum, 0)
        return Score(value=0.0 - per_character * outside, why=f"{len(response)} characters")

    return scorer


def overlong_penalty(length: int, max_resp_len: int, buffer: int, factor: float = 1.0) -> float:
    """DAPO's overlong penalty: min(−(length − (max_resp_len − buffer)) / buffer · factor, 0). As in verl, no floor."""
    return min(-(length - (max_resp_len - buffer)) / buffer * factor, 0.0) + 0.0


def overlong(
    *, max_response_length: int, buffer: int, factor: float = 1.0, floor: float | None = None
) -> Callable[[Sequence[int]], Score]:
    """Make a scorer: DAPO's penalty for lengths in the last `buffer` tokens and beyond; `floor=-1.0` is TRL's clamp."""
    require(0 < buffer <= max_response_length, "buffer", expected=f"1 to {max_response_length} tokens", found=buffer)
    require(0 <= factor < math.inf, "factor", expected="a number ≥ 0", found=factor)
    require(floor is None or -math.inf < floor <= 0, "floor", expected="a number ≤ 0, or None", found=floor)

    @bounded
    def scorer(response_ids: Sequence[int]) -> Score:
        penalty = overlong_penalty(len(response_ids), max_response_length, buffer, factor)
        value = penalty if floor is None else max(penalty, floor)
        parts = {"overlong_reward": value, "overlong": float(value < 0)}
        return Score(value=value, parts=parts, why=f"{len(response_ids)} tokens")

    return scorer


def cosine_length(length: int, max_length: int, at_zero: float, at_max: float) -> float:
    """A reward that moves with the length from `at_zero` to `at_max` along a cosine, as TRL's and open-r1's (Yeo et al.
    2025): at_max + ½(at_zero − at_max)(1 + cos(π·length/max_length)), with length clamped to [0, max_length]."""
    require(max_length > 0, "max_length", expected="≥ 1", found=max_length)
    share = min(max(length, 0), max_length) / max_length
    return at_max + 0.5 * (at_zero - at_max) * (1.0 + math.cos(math.pi * share))


def repetition(*, n: int = 3, max_penalty: float = -1.0) -> Callable[[str], Score]:
    """Make a scorer of repetition: (1 − distinct/all word n-grams) · `max_penalty`, in [max_penalty, 0]."""
    require(n >= 1, "n", expected="≥ 1", found=n)
    require(-math.inf < max_penalty <= 0, "max_penalty", expected="a number ≤ 0", found=max_penalty)

    @bounded
    def scorer(response: str) -> Score:
        words = response.lower().split()
        grams = list(zip(*(words[start:] for start in range(n)), strict=False))
        share = 1.0 - len(set(grams)) / len(grams) if grams else 0.0
        return Score(value=share * max_penalty + 0.0, why=f"{share:.0%} of {len(grams)} {n}-grams repeat")

    return scorer
