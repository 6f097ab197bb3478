"""A judge's model folder is the reward of a run wherever its model is: the same verdicts in process, from vLLM and from a cluster."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest

import workbench as wb
from workbench.engines.vllm_server.engine import VllmSettings, importable, interpreter

sys.path.insert(0, "data")
from arith_world import careless, make_problem
from make_judges import Check, is_right

pytestmark = [pytest.mark.slow, pytest.mark.long]
needs_vllm = pytest.mark.skipif(
    not importable(interpreter(VllmSettings())), reason="vLLM is not installed: make .venv/.vllm"
)
JUDGE = "data/tiny-judge"
NUMBER = 24
LIMITS: dict[str, Any] = {"max_model_len": 320, "kv_cache_memory_mb": 64}


@pytest.fixture(scope="module")
def world() -> tuple[list[dict[str, Any]], list[bool]]:
    """Answers to arithmetic as rows of a reward, and which of them are right."""
    random = Random(77)
    problems = [make_problem(random) for _ in range(NUMBER)]
    texts = [careless(problem, random) for problem in problems]
    rows = [
        {"prompt": [{"role": "user", "content": one.question}], "prompt_text": one.question, "response": text}
        for one, text in zip(problems, texts, strict=True)
    ]
    return rows, [is_right(*pair) for pair in zip(problems, texts, strict=True)]


def verdicts(model: Any, rows: list[dict[str, Any]]) -> list[tuple[Any, Any, Any]]:
    """(status, value, output) of each row, of a judge made by the kit that asks greedily."""
    kit = wb.rewards.reasoning(Check, label="right", template="{prompt}\n{answer}\n{instructions}")
    judge = kit.judge(model, temperature=0.0, max_tokens=64)
    return [(one.status, one.value, one.extra.get("judge_output")) for one in judge.judge(rows)]


@pytest.fixture(scope="module")
def here(world: Any) -> Iterator[list[tuple[Any, Any, Any]]]:
    yield verdicts(wb.engines.chat(wb.engines.local(JUDGE)), world[0])


def test_in_process_it_judges_as_the_rule(world: Any, here: Any) -> None:
    said = [value == 1 for status, value, _ in here if status is wb.rewards.Status.SCORED]
    rule = [right for (status, _, _), right in zip(here, world[1], strict=True) if status is wb.rewards.Status.SCORED]
    assert len(said) >= 0.9 * NUMBER
    assert sum(one == two for one, two in zip(said, rule, strict=True)) > 0.8 * len(said)


@needs_vllm
def test_real_vllm_gives_the_same_verdicts(world: Any, here: Any) -> None:
    with wb.engines.vllm(JUDGE, **LIMITS) as engine:
        assert verdicts(wb.engines.chat(engine), world[0]) == here


@pytest.mark.parametrize("engine", ["local", pytest.param("vllm", marks=needs_vllm)])
def test_a_ray_cluster_gives_the_same_verdicts(world: Any, here: Any, engine: str) -> None:
    settings = LIMITS if engine == "vllm" else {}
    with wb.cluster.connect(cpus=2, gpus=0) as session, session.serve(JUDGE, engine, **settings) as served:
        assert verdicts(wb.engines.chat(served), world[0]) == here
