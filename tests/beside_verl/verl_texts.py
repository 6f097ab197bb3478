"""Cases of scorers: random texts of the pieces that rules trip over, and real rows, through our scorers and verl's."""

from __future__ import annotations

import asyncio
import inspect
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_cases import REFUSALS, Answer, Marks, case

from workbench.rewards import Score
from workbench.rewards.reward import scorer_for
from workbench.rewards.scorers import gsm8k, math_dapo, math_string, search

GSM8K = Path(__file__).parents[3] / "shared/data/gsm8k/test.jsonl"
PIECES = {
    "numbers": [
        "#### ", "####", "###", " ", "\n", "12", "3", "-", "- ", "0", ".", ",", "1,000", "1000", "$", "%", "18.0", "18", "١٢",
        "the answer is ", "x" * 290, "+", "e5",
    ],
    "maths": [
        "\\boxed{", "\\boxed ", "\\fbox{", "}", "{", "$", "Answer:", "answer : ", "\n", "12", "3", "0.5", ".", ",", "=", "x",
        "k=", "\\frac", "\\dfrac", "\\sqrt", "\\text{ cm}", "\\text{", "\\%", "\\$", "^\\circ", "\\left(", "\\right)", "/", " ",
        "-", "1/2", "1,000", "cents", "\\!", "\\\\", "a ", "\\boxed", "[INVALID]", "\\", "%", "y" * 110,
    ],
    "answers": [
        "<answer>", "</answer>", "<answer>" * 11, "<think>", "</think>", " ", "\n", "Paris", "paris", "the", "a ", "an", "New York", ".",
        ",", "'", "42", "é", "<Answer>", "!",
    ],
}  # fmt: skip
PIECES["units"] = [
    "Answer: ", "\\boxed{", "}", "12", "5", " ", "\\mbox{", "\\text{", "\\text{and}", "square", "inches", "an ", "\\$", ".$",
    "\\overline{", "\\textbf{", "{,}", "\\dots", "\\mathrm{th}", "=", "pounds", "\\sqrt2", "\\frac12", '"',
]  # fmt: skip
TRUTHS = {
    "numbers": ["12", "3", "-3", "1000", "1,000", "18", "18.0", "", "0", "."],
    "maths": ["12", "\\frac{1}{2}", "0.5", "1/2", "x=3", "3", "\\sqrt{3}", "12 cents", "1,000", "x", "\\frac12", "k=12", "\\text{ cm}", ""],
    "units": ["12", "5", "125", "12 inches", "12\\text{and}5", "\\overline{12}", "square", "\\text{12}", "12\\mbox{5}", "\\sqrt2"],
    "answers": ["Paris", "the Paris", "42", "New York", "", "an", "é"],
}  # fmt: skip
EXPRESSIONS = [
    "x+1", "1+x", "\\frac{1}{2}", "0.5", "1/2", ".5", "50\\%", "2\\sqrt{3}", "\\sqrt{12}", "x^2-1", "(x-1)(x+1)", "(1,2)", "(1, 2)",
    "[1,2)", "10", "10.0", "1,000", "1000", "\\$10", "10^\\circ", "\\text{no}", "\\pi", "3.14159", "x=4", "4", "-4", "\\dfrac{3}{4}", "\\frac34", "2^{10}", "1024", "",
]  # fmt: skip


@dataclass(frozen=True)
class Texts:
    """Responses and truths, row by row."""

    rows: tuple[tuple[str, Any], ...]


def fuzzed(kind: str, seed: int) -> Texts:
    """200 random texts of one kind of pieces, each with a truth."""
    draw = random.Random(f"{kind} {seed}")
    return Texts(
        tuple(
            ("".join(draw.choices(PIECES[kind], k=draw.randint(0, 12))), draw.choice(TRUTHS[kind])) for _ in range(200)
        )
    )


def boxed(kind: str, seed: int) -> Texts:
    """An expression in a box or a sentence, and another as truth."""
    draw = random.Random(f"{kind} {seed}")
    forms = ["\\boxed{%s}", "so \\boxed{%s}.", "Answer: %s", "the answer is $%s$", "<think>why</think> \\boxed{%s}"]
    pairs = [(draw.choice(forms), draw.choice(EXPRESSIONS)) for _ in range(20)]
    return Texts(
        tuple(
            (form.replace("%s", one), draw.choice([one, *EXPRESSIONS]) if draw.random() < 0.6 else one)
            for form, one in pairs
        )
    )


def gsm8k_rows(kind: str, seed: int) -> Texts:
    """Real worked answers: as they are, cut, of another row, and told in other words."""
    draw = random.Random(seed)
    lines = [json.loads(line) for line in GSM8K.read_text().splitlines()]
    rows = []
    for row in lines:
        worked, truth = row["answer"], gsm8k.reference_answer(row["answer"])
        others = [
            worked, worked.replace("####", "The answer is"), worked + "\n#### 7", worked[: draw.randint(1, len(worked))],
            draw.choice(lines)["answer"], f"\\boxed{{{truth}}}", f"#### ${truth}.00", worked + "x" * draw.randint(200, 310),
        ]  # fmt: skip
        rows.append((draw.choice(others), truth))
    return Texts(tuple(rows))


def marks(scorer: Callable[[str, Any], Any], texts: Texts) -> Answer:
    """All scores in one line: a letter for every text."""
    return {"scores": "".join(_mark(scorer, text, truth) for text, truth in texts.rows)}


def _mark(scorer: Callable[[str, Any], Any], text: str, truth: Any) -> str:
    """0–9 for tenths, a letter for what is below 0, x where the scorer raises, ? where it has no score."""
    try:
        found = scorer(text, truth)
        found = asyncio.run(found) if inspect.iscoroutine(found) else found
    except (*REFUSALS, KeyError, TypeError, AttributeError):
        return "x"
    if isinstance(found, Score):
        if not found.scored:
            return "?"
        found = found.value
    if isinstance(found, dict):
        found = found["score"]
    value = float(found[0] if isinstance(found, tuple) else found)
    return "n" if value < 0 else "T" if value == 1 else str(int(value * 10))


SCORERS: Sequence[tuple[str, str, Callable[..., Any], str, str, dict[str, Any]]] = (
    ("gsm8k", "numbers", gsm8k.compute_score, "gsm8k", "compute_score", {}),
    ("gsm8k, flexible", "numbers", gsm8k.compute_score, "gsm8k", "compute_score", {"method": "flexible"}),
    ("gsm8k, format", "numbers", gsm8k.compute_score, "gsm8k", "compute_score", {"format_score": 0.1, "score": 0.9}),
    (
        "gsm8k, flexible, format",
        "numbers",
        gsm8k.compute_score,
        "gsm8k",
        "compute_score",
        {"method": "flexible", "format_score": 0.1},
    ),
    ("math", "maths", math_string.compute_score, "math_reward", "compute_score", {}),
    ("math_dapo", "maths", math_dapo.compute_score, "math_dapo", "compute_score", {}),
    ("math_dapo, strict", "maths", math_dapo.compute_score, "math_dapo", "compute_score", {"strict_box_verify": True}),
    ("math of units", "units", math_string.compute_score, "math_reward", "compute_score", {}),
    ("math_dapo of units", "units", math_dapo.compute_score, "math_dapo", "compute_score", {}),
    ("math of numbers", "numbers", math_string.compute_score, "math_reward", "compute_score", {}),
    ("math_dapo of numbers", "numbers", math_dapo.compute_score, "math_dapo", "compute_score", {}),
)
for _name, _kind, _ours, _module, _function, _settings in SCORERS:
    case(
        f"scorer {_name}",
        lambda texts, ours=_ours, settings=_settings: marks(lambda one, truth: ours(one, truth, **settings), texts),
        lambda verl, texts, module=_module, function=_function, settings=_settings: marks(
            lambda one, truth: getattr(getattr(verl, module), function)(one, truth, **settings), texts
        ),
        kinds=(_kind,),
        make=fuzzed,
    )
for _name, _function, _settings in (
    ("", "compute_score", {}),
    (", format", "compute_score", {"format_score": 0.2}),
    (", substring", "compute_score_subem", {}),
):
    case(
        f"scorer search{_name}",
        lambda texts, part="sub" in _function, settings=_settings: marks(
            lambda one, truth: search.compute_score(one, {"target": [truth, "42"]}, substring=part, **settings), texts
        ),
        lambda verl, texts, function=_function, settings=_settings: marks(
            lambda one, truth: getattr(verl.search_r1_like_qa_em, function)(one, {"target": [truth, "42"]}, **settings),
            texts,
        ),
        kinds=("answers",),
        make=fuzzed,
    )

ROUTES = {
    "openai/gsm8k": "numbers", "lighteval/MATH": "maths", "HuggingFaceH4/MATH-500": "maths", "math_dapo": "maths", "math": "maths",
    "aime2024": "maths", "numina_cn_k12": "expressions", "hiyouga/geometry3k": "expressions", "searchR1_nq": "answers",
}  # fmt: skip


def _routed(kind: str, seed: int) -> Texts:
    return boxed(kind, seed) if kind == "expressions" else fuzzed(kind, seed)


def _truth(source: str, truth: Any) -> Any:
    return {"target": [truth]} if source.startswith("searchR1") else truth


for _source, _kind in ROUTES.items():
    case(
        f"route {_source}",
        lambda texts, source=_source: {
            "scores": Marks(marks(lambda one, truth: scorer_for(source)(one, _truth(source, truth)), texts)["scores"])
        },
        lambda verl, texts, source=_source: marks(
            lambda one, truth: verl.reward_score.default_compute_score(source, one, _truth(source, truth)), texts
        ),
        kinds=(_kind,),
        needs={"numina_cn_k12": "pylatexenc", "hiyouga/geometry3k": "mathruler"}.get(_source, ""),
        make=_routed,
        seeds=(0,),
    )
if GSM8K.exists():
    for _method in ("strict", "flexible"):
        case(
            f"scorer gsm8k on its rows, {_method}",
            lambda texts, method=_method: marks(lambda one, truth: gsm8k.compute_score(one, truth, method), texts),
            lambda verl, texts, method=_method: marks(
                lambda one, truth: verl.gsm8k.compute_score(one, truth, method), texts
            ),
            kinds=("rows",),
            make=gsm8k_rows,
            seeds=(0,),
            recorded=(),
        )
