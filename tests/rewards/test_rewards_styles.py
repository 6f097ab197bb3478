"""Reward functions in the calling styles of other libraries: each scores right, or is refused with the line that makes it work."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from workbench.base.errors import DataError, RewardError
from workbench.rewards import Reward, as_reward, dry_run, load_function
from workbench.testing.rewards import answered

LURES = {"method": "flexible", "format_score": 0.5, "step": 7, "timeout_score": 9, "format_weight": 0.5, "use_boxed": 0}
"""Columns that no default may take: names that functions give to their settings."""
BATCH = answered(
    ["so 4", "so 5"],
    ["4", "4"],
    answer=["4", "4"],
    solution=["4", "4"],
    question=["2 + 2?", "1 + 3?"],
    **{name: [value] * 2 for name, value in LURES.items()},
)


def right(text: Any, truth: Any) -> float:
    """1 where a text ends with the truth; anything but two strings is a mistake of the call."""
    assert isinstance(text, str) and isinstance(truth, str), (text, truth)
    return float(text.endswith(truth))


@dataclass(slots=True)
class RewardOutput:
    reward: float
    metadata: dict[str, Any] = field(default_factory=dict)
    is_correct: bool | None = None


# --- each in the shape of one that is in use: argument names, order, defaults, what it returns --------------


def verl_naive(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    assert data_source == "workbench/arith" and extra_info["index"] in (0, 1)
    return right(solution_str, ground_truth)


def verl_gsm8k(solution_str: str, ground_truth: str, method="strict", format_score=0.0, score=1.0):  # type: ignore[no-untyped-def]
    assert method == "strict"
    return score if right(solution_str, ground_truth) else format_score


def verl_dapo(solution_str: str, ground_truth: str, strict_box_verify=False, pause_tokens_index=None):  # type: ignore[no-untyped-def]
    correct = bool(right(solution_str, ground_truth))
    return {"score": float(correct), "acc": correct, "pred": solution_str}


def verl_math_verify(model_output: str, ground_truth: str, timeout_score: float = 0, timeout: float = 30.0) -> float:
    return right(model_output, ground_truth) if (timeout_score, timeout) == (0, 30.0) else 9.0


def verl_prime_math(model_output: str, ground_truth: str) -> tuple[bool, bool, str]:
    return bool(right(model_output, ground_truth)), True, model_output


def verl_geo3k(predict_str: str, ground_truth: str, use_boxed: bool = True, format_score: float = 0.1) -> float:
    return right(predict_str, ground_truth) if use_boxed and format_score == 0.1 else 9.0


def verl_rlla(data_source: str, solution_str: str, ground_truth: str, extra_info: Any, step: int = 0) -> float:
    return right(solution_str, ground_truth) + step


def verl_batch(data_sources: Any, solution_strs: Any, ground_truths: Any, extra_infos: Any, **kwargs: Any) -> Any:
    assert [one["index"] for one in extra_infos] == [0, 1]
    return [{"score": right(*pair)} for pair in zip(solution_strs, ground_truths, strict=True)]


def verl_default(data_source, solution_str, ground_truth, extra_info=None, sandbox_fusion_url=None, **kwargs) -> Any:  # type: ignore[no-untyped-def]
    assert not kwargs and sandbox_fusion_url is None
    return right(solution_str, ground_truth)


def verl_only_kwargs(**kwargs: Any) -> float:
    return right(kwargs["solution_str"], kwargs["ground_truth"])


async def verl_grm(  # type: ignore[no-untyped-def]
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: dict,
    reward_router_address: str,
    reward_model_tokenizer,
) -> Any:
    assert reward_router_address and reward_model_tokenizer
    return {"score": right(solution_str, ground_truth), "acc": True, "genrm_response": "7"}


def trl_text_or_chat(completions, ground_truth, **kwargs):  # type: ignore[no-untyped-def]
    assert kwargs["data_source"] == ["workbench/arith"] * 2 and kwargs["prompts"][0][0]["role"] == "user"
    return [right(turns[0]["content"], truth) for turns, truth in zip(completions, ground_truth, strict=True)]


def trl_overlong(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    assert [len(ids) for ids in completion_ids] == [4, 4] and len(kwargs["completions"]) == 2
    return [1.0, 0.0]


def trl_none(prompts: Any, completions: Any, log_extra=None, trainer_state=None, **kwargs: Any) -> Any:  # type: ignore[no-untyped-def]
    assert trainer_state is None and [len(one) for one in kwargs["completion_ids"]] == [4, 4]
    log_extra("read", ["so 4", "so 5"])
    kwargs["log_metric"]("share", 0.5)
    return [1.0, None]


async def trl_async(prompts: Any, completions: Any, answer: Any, **kwargs: Any) -> list[float]:
    return [right(turns[0]["content"], truth) for turns, truth in zip(completions, answer, strict=True)]


def open_r1(completions: list[list[dict[str, str]]], solution: list[str], **kwargs: Any) -> list[float | None]:
    return [right(turns[0]["content"], truth) for turns, truth in zip(completions, solution, strict=True)]


def unsloth_notebook(prompts, completions, answer, **kwargs) -> list[float]:  # type: ignore[no-untyped-def]
    assert prompts[0][-1]["content"] == "question 0"
    return [right(turns[0]["content"], truth) for turns, truth in zip(completions, answer, strict=True)]


class ORM:
    """The base class of ms-swift's rewards, by its name."""


class SwiftOrm(ORM):
    def __call__(self, completions: Any, solution: Any, **kwargs: Any) -> list[float]:
        return [right(text, truth) for text, truth in zip(completions, solution, strict=True)]


def openrlhf(queries: list[str], prompts: list[Any], labels: list[str], **kwargs: Any) -> dict[str, Any]:
    assert queries[0] == "question 0so 4"
    scores = [right(query, label) for query, label in zip(queries, labels, strict=True)]
    return {"rewards": scores, "scores": scores, "extra_logs": {"length": [len(query) for query in queries]}}


def simple_rl(queries, prompts, labels):  # type: ignore[no-untyped-def]
    return [right(query, label) for query, label in zip(queries, labels, strict=True)]


def areal(prompt, completions, prompt_ids, completion_ids, answer, **kwargs) -> float:  # type: ignore[no-untyped-def]
    assert (
        prompt.startswith("question")
        and prompt_ids == [5, 6]
        and len(completion_ids) == 4
        and kwargs["solution"] == "4"
    )
    return right(completions, answer)


def areal_plurals(prompts, completions, prompt_ids, completion_ids, solution, **kwargs) -> float:  # type: ignore[no-untyped-def]
    assert prompts.startswith("question") and prompt_ids == [5, 6] and len(completion_ids) == 4
    return right(completions, solution)


def easy_r1_batch(reward_inputs: list[dict[str, Any]], format_weight: float = 0.1) -> list[dict[str, float]]:
    assert format_weight == 0.1 and [one["response_length"] for one in reward_inputs] == [4, 4]
    scores = [right(one["response"], one["ground_truth"]) for one in reward_inputs]
    return [{"overall": score, "format": 1.0, "accuracy": score} for score in scores]


def easy_r1_row(reward_input: dict[str, Any], **kwargs: Any) -> dict[str, float]:
    return {"overall": right(reward_input["response"], reward_input["ground_truth"]), "format": 1.0}


def easy_r1_old(predicts: list[str], ground_truths: list[str], format_weight: float = 0.1) -> list[dict[str, float]]:
    assert format_weight == 0.1
    return [{"overall": right(*pair)} for pair in zip(predicts, ground_truths, strict=True)]


def rllm_protocol(task_info: dict[str, Any], action: str) -> RewardOutput:
    score = right(action, task_info["ground_truth"])
    return RewardOutput(score, {"source": task_info["data_source"]}, bool(score))


def rllm_function(data_source: str, llm_solution: str, ground_truth: Any, extra_info={}, **kwargs):  # type: ignore[no-untyped-def]  # noqa: B006
    return bool(right(llm_solution, ground_truth))


async def slime(args: Any, sample: Any, **kwargs: Any) -> float:
    assert args == 1 and sample.metadata["index"] in (0, 1) and sample.response_length == 4
    assert sample.custom_rm_path is None and sample.reward is None and sample.index == sample.metadata["index"]
    return right(sample.response, sample.label)


async def slime_group(args: Any, samples: list[Any]) -> list[float]:
    return [right(sample.response, sample.label) for sample in samples]


def slime_f1(prediction: str, ground_truth: str) -> tuple[float, float, float]:
    return right(prediction, ground_truth), 0.0, 0.0


def roll(response: str, ground_truth: str, reward_type: str) -> tuple[float, bool]:
    assert reward_type == 1
    return right(response, ground_truth), True


async def verifiers(
    prompt: Any, completion: Any, answer: str, state: Any, info: Any, task: str, **kwargs: Any
) -> float:
    assert prompt[-1]["role"] == "user" and info["index"] in (0, 1) and task == "workbench/arith"
    assert state["completion"] == completion and state["answer"] == answer and kwargs["solution"] == "4"
    return right(completion[-1]["content"], answer)


def verifiers_parser(parser: Any, completion: Any, answer: str) -> float:
    assert parser == 1
    return right(completion[-1]["content"], answer)


def torchforge(prompt: Any, response: str, target: str) -> float:
    return right(response, target)


def prime_code(completion: str, test_cases: str, continuous: bool = False) -> float:
    return right(completion, test_cases)


def nemo_rl(predictions: list[str], references: list[str]) -> list[float]:
    return [right(*pair) for pair in zip(predictions, references, strict=True)]


SCORES = (
    *(
        verl_naive,
        verl_gsm8k,
        verl_dapo,
        verl_math_verify,
        verl_prime_math,
        verl_geo3k,
        verl_rlla,
        verl_batch,
        verl_default,
    ),
    *(
        verl_only_kwargs,
        trl_text_or_chat,
        trl_overlong,
        trl_none,
        trl_async,
        open_r1,
        unsloth_notebook,
        openrlhf,
        simple_rl,
    ),
    *(areal, areal_plurals, easy_r1_batch, easy_r1_row, easy_r1_old, rllm_function, verifiers),
)
REFUSED: dict[Callable[..., Any], str] = {
    verl_grm: "Reward(functools.partial(verl_grm, reward_router_address=…, reward_model_tokenizer=…))",
    rllm_protocol: "Reward(rllm_protocol, rename={'action': 'response'})",
    slime: "Reward(functools.partial(slime, args=…))",
    slime_group: "Reward(functools.partial(slime_group, args=…))",
    slime_f1: "Reward(slime_f1, rename={'prediction': 'response'})",
    roll: "Reward(functools.partial(roll, reward_type=…))",
    verifiers_parser: "Reward(functools.partial(verifiers_parser, parser=…))",
    torchforge: "Reward(torchforge, rename={'target': 'ground_truth'})",
    prime_code: "Reward(prime_code, rename={'test_cases': 'ground_truth'})",
    nemo_rl: "Reward(nemo_rl, rename={'predictions': 'responses', 'references': 'ground_truths'})",
}


def values(reward: Any, batch: Any = BATCH) -> list[float | None]:
    return [score.value if score.scored else None for score in reward.score(batch)]


def rolled_out() -> Any:
    import torch

    prompts = torch.tensor([[0, 5, 6]] * 2)
    return BATCH.with_columns({"prompts": prompts, "prompt_mask": (prompts > 0).long()})


@pytest.mark.parametrize("function", SCORES, ids=lambda function: function.__name__)
def test_a_style_scores_right(function: Callable[..., Any]) -> None:
    second = None if function is trl_none else 0.0
    assert values(Reward(function, in_process=True), rolled_out()) == [1.0, second]


@pytest.mark.parametrize("function", REFUSED, ids=lambda function: function.__name__)
def test_a_style_is_refused_with_the_line_that_makes_it_work(function: Callable[..., Any]) -> None:
    with pytest.raises(RewardError) as refusal:
        Reward(function, in_process=True).score(BATCH)
    line = REFUSED[function]
    assert f"write {line}" in str(refusal.value)
    known = {"Reward": functools.partial(Reward, in_process=True), "functools": functools, function.__name__: function}
    assert values(eval(line.replace("…", "1"), known)) == [1.0, 0.0]  # noqa: S307 - the line above


def test_there_are_thirty_styles_and_a_class() -> None:
    assert len(SCORES) + len(REFUSED) >= 30
    texts = Reward(SwiftOrm(), in_process=True)
    assert texts.name == "SwiftOrm" and values(texts) == [1.0, 0.0]


# --- the rule ---------------------------------------------------------------------------------


def test_a_recorded_score_is_not_the_functions_score() -> None:
    """What overrode `score=1.0` made right answers 0."""
    rows = [{"prompt": "2 + 2?", "response": "so 4", "ground_truth": "4", "score": 0.0, "method": "flexible"}]
    run = dry_run(Reward(verl_gsm8k, in_process=True), rows)
    assert run.table["verl_gsm8k"].tolist() == [1.0]
    binding = run.bindings["verl_gsm8k"]
    assert binding["solution_str"] == "the response" and binding["score"] == "default 1.0"
    assert binding["ground_truth"] == "column 'ground_truth'" and binding["method"] == "default 'strict'"
    assert "score ← default 1.0" in repr(run) and "score ← default 1.0" in run._repr_html_()


def test_a_default_takes_a_column_on_request_alone() -> None:
    def reward(response: str, step: int = 0) -> float:
        return float(step)

    assert values(Reward(reward, in_process=True)) == [0.0, 0.0]
    asked = Reward(reward, in_process=True, rename={"step": "step"})
    assert asked.reads == ("step",) and asked.binding["step"] == "column 'step'" and values(asked) == [7.0, 7.0]
    assert asked.settings()["rename"] == {"step": "step"}
    with pytest.raises(RewardError, match="'stpe' is not a parameter of reward function reward.*did you mean 'step'"):
        Reward(reward, rename={"stpe": "step"})
    with pytest.raises(RewardError, match="'steps' is not a value that a row has.*did you mean 'step'"):
        Reward(reward, in_process=True, rename={"step": "steps"}).score(BATCH)


def test_a_default_is_not_a_second_truth() -> None:
    def reward(response: str, ground_truth: str, label: float = 1.0, answer: str = "none") -> float:
        return label * (answer == "none") * right(response, ground_truth)

    def alone(response: str, label: str = "none") -> float:
        return right(response, label)

    assert values(Reward(reward, in_process=True)) == [1.0, 0.0] == values(Reward(alone, in_process=True))


def test_trls_completions_are_texts_on_request() -> None:
    def reward(completions: list[str], **kwargs: Any) -> list[float]:
        return [right(text, truth) for text, truth in zip(completions, kwargs["solution"], strict=True)]

    for target in ("responses", "response"):
        assert values(Reward(reward, in_process=True, rename={"completions": target})) == [1.0, 0.0]


@pytest.mark.parametrize("in_process", [True, False])
def test_what_trls_functions_log_is_in_the_scores(in_process: bool) -> None:
    """A log of one value a row and a metric of the batch: numbers are parts, all else is extra."""
    reward = Reward(trl_none, in_process=in_process, workers=1)
    try:
        scores = reward.score(rolled_out())
    finally:
        reward.close()
    assert [score.extra["read"] for score in scores] == ["so 4", "so 5"]
    assert [score.parts["share"] for score in scores] == [0.5, 0.5] and [score.scored for score in scores] == [
        True,
        False,
    ]


def test_verifiers_completion_is_text_where_the_prompt_is() -> None:
    def reward(completion: Any, state: Any) -> float:
        return right(completion, state["answer"])

    texts = answered(["so 4", "so 5"], ["4", "4"], prompt_is_text=[True] * 2)
    assert values(Reward(reward, in_process=True), texts) == [1.0, 0.0]


def test_trls_columns_come_over_a_default_and_a_runs_do_not() -> None:
    """TRL calls with the data set's columns as keywords; what a stage wrote is no column of the data set."""

    def reward(completions: Any, step: Any = 0, score: float = 1.0, **kwargs: Any) -> list[float]:
        return [score + one for one in step]

    rows = [{"prompt": "?", "response": "a", "step": 2, "score": 0.0}]
    run = dry_run(Reward(reward, in_process=True), rows)
    assert run.table["reward"].tolist() == [3.0] and run.bindings["reward"]["step"] == "column 'step'"

    def named(completions: Any, step: int = 0) -> list[float]:  # no **kwargs: TRL could not call it
        return [float(step)] * len(completions)

    assert values(Reward(named, in_process=True)) == [0.0, 0.0]


@pytest.mark.parametrize("is_text", [True, False], ids=["text", "chat"])
def test_trls_functions_get_prompts_and_completions_as_the_data_set_has_them(is_text: bool) -> None:
    seen: dict[str, Any] = {}

    def reward(prompts: Any, completions: Any, **kwargs: Any) -> list[float]:
        seen.update(prompts=prompts, completions=completions, kwargs=kwargs)
        return [1.0] * len(completions)

    def single(prompt: Any, response: str) -> float:
        assert isinstance(prompt, str if is_text else list)
        return 1.0

    chat = [{"role": "user", "content": "question 0"}]
    text, turns = ["question 0", "so 4"], [chat, [{"role": "assistant", "content": "so 4"}]]
    batch = BATCH.with_columns({"prompt_is_text": [True, True]}) if is_text else BATCH
    assert (
        values(Reward(reward, in_process=True), batch) == [1.0, 1.0] == values(Reward(single, in_process=True), batch)
    )
    assert [seen["prompts"][0], seen["completions"][0]] == (text if is_text else turns)
    assert "prompt_is_text" not in seen["kwargs"]
    row = {"prompt": "question 0" if is_text else chat, "completion": "so 4" if is_text else turns[1]}
    dry_run(Reward(reward, in_process=True), [row])
    assert [seen["prompts"][0], seen["completions"][0]] == (text if is_text else turns)


def test_ids_are_a_rows_or_the_batchs_as_the_style_is() -> None:
    def row(response: str, completion_ids: list[int]) -> float:
        return float(len(completion_ids))

    def plain(response_ids: list[int]) -> float:
        return float(len(response_ids))

    def together(completion_ids: list[list[int]]) -> list[float]:
        return [float(len(ids)) for ids in completion_ids]

    for function in (row, plain, together):
        assert values(Reward(function, in_process=True)) == [4.0, 4.0]


def test_areals_prompt_is_text_and_its_ids_may_be_unknown() -> None:
    """Saved completions have a column `prompt`, a chat, and no prompt's tokens: the call failed for want of an argument."""

    def reward(
        prompt: str, completions: str, prompt_ids: Any, completion_ids: list[int], answer: str, **kwargs: Any
    ) -> float:
        return float(prompt == "2+2?" and prompt_ids is None and completions.endswith(answer))

    saved = {"prompt": [{"role": "user", "content": "2+2?"}], "response": "it is 4", "answer": "4"}
    (judged,) = dry_run(Reward(reward, in_process=True), [saved]).judged.values()
    assert judged[0].score.value == 1, judged[0].score


def test_a_data_sets_column_named_query_is_not_openrlhfs() -> None:
    def reward(queries: list[str]) -> list[float]:
        return [float(query.startswith("question")) for query in queries]

    def own(query: str) -> float:
        return float(query == "mine")

    batch = BATCH.with_columns({"query": ["mine", "mine"]})
    assert values(Reward(reward, in_process=True), batch) == [1.0, 1.0] == values(Reward(own, in_process=True), batch)


def test_a_constant_that_is_bound_stays() -> None:
    def reward(response: str, ground_truth: str, **kwargs: Any) -> float:
        assert kwargs == {"data_source": "mine", "solution_str": response, "extra_info": kwargs["extra_info"]}
        return right(response, ground_truth)

    bound = Reward(functools.partial(reward, ground_truth="5", data_source="mine"), in_process=True)
    assert values(bound) == [0.0, 1.0] and bound.name == "reward" and bound.binding["ground_truth"] == "always '5'"


def test_a_column_with_a_plural_name_makes_no_batch_of_a_rows_function() -> None:
    def reward(response: str, answers: list[str]) -> float:
        return float(response[-1] in answers)

    batch = BATCH.with_columns({"answers": [["4", "four"], ["4", "four"]]})
    assert values(Reward(reward, in_process=True), batch) == [1.0, 0.0]
    with pytest.raises(RewardError, match="did you mean 'answer'.*rename={'answers': 'answer'}"):
        Reward(reward, in_process=True).score(BATCH)


def test_tensors_are_no_arguments() -> None:
    with pytest.raises(RewardError, match="'prompt_mask' is not a value"):
        Reward(lambda response, prompt_mask: 1.0, in_process=True).score(rolled_out())


def test_a_rewards_face_shows_its_binding() -> None:
    reward = Reward(verl_gsm8k, in_process=True)
    assert "solution_str ← the response" in repr(reward) and "\n" not in repr(reward)
    assert "column 'ground_truth' if" not in repr(reward) and "default 1.0" in reward._repr_html_()


# --- files ------------------------------------------------------------------------------------


def package(root: Path, init: str = "") -> Path:
    """A package `mine` with a reward file in a folder of it, and names that hide modules of the standard library."""
    inner = root / "mine" / "rewards"
    inner.mkdir(parents=True)
    (root / "mine" / "__init__.py").write_text(init)
    (root / "mine" / "rules.py").write_text("LAST = -1\n")
    (inner / "__init__.py").write_text("")
    (inner / "code.py").write_text("HERE = 1\n")  # hides a module of Python's if its folder comes first
    (inner / "grade.py").write_text(
        "import code\nfrom . import code as ours\nfrom ..rules import LAST\n\n"
        "def compute_score(solution_str, ground_truth, last=LAST):\n"
        "    assert ours.HERE and hasattr(code, 'InteractiveConsole') and __name__ == 'mine.rewards.grade'\n"
        "    return float(solution_str[last] == ground_truth)\n"
    )
    return inner / "grade.py"


@pytest.mark.parametrize("init", ["VALUE = 1\n", "import no_such_module_is_installed\n"], ids=["whole", "missing"])
def test_a_file_with_relative_imports_is_a_module_of_its_package(tmp_path: Path, init: str) -> None:
    file = package(tmp_path, init)
    with pytest.raises(DataError, match="package of 'grade.py', which has relative imports"):
        load_function(file, roots=[file.parent])
    reward = Reward(load_function(file, roots=[tmp_path]), workers=1)
    try:
        assert reward.binding["last"] == "default LAST" and values(reward) == [1.0, 0.0]
    finally:
        reward.close()


def test_a_file_that_imports_its_own_package_by_name_is_a_module_of_it(tmp_path: Path) -> None:
    """Its package imports the file itself: what is half loaded then has no functions yet."""
    (tmp_path / "rules").mkdir()
    (tmp_path / "rules" / "__init__.py").write_text("from rules.grade import compute_score\n")
    (tmp_path / "rules" / "last.py").write_text("LAST = -1\n")
    file = tmp_path / "rules" / "grade.py"
    file.write_text(
        "from rules.last import LAST\n\ndef compute_score(solution_str, ground_truth):\n"
        "    return float(solution_str[LAST] == ground_truth)\n"
    )
    reward = Reward(load_function(file, roots=[tmp_path]), workers=1)
    try:
        assert values(reward) == [1.0, 0.0]
    finally:
        reward.close()


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="the system has no files in memory")
def test_a_files_function_may_start_processes_that_import_it(tmp_path: Path) -> None:
    """As verl's math_verify does; a file named like a module, in a package that cannot be imported here."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "__init__.py").write_text("import no_such_module_is_installed\n")
    file = tmp_path / "mine" / "math.py"
    file.write_text(
        "import multiprocessing\nfrom concurrent.futures import ProcessPoolExecutor\n\n"
        "def inside(text, truth):\n    return float(text.endswith(truth))\n\n"
        "def compute_score(solution_str, ground_truth):\n"
        "    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context('spawn')) as pool:\n"
        "        return pool.submit(inside, solution_str, ground_truth).result()\n"
    )
    reward = Reward(load_function(file, roots=[tmp_path]), workers=1)
    file.write_text("raise SystemExit('what ran is the text that was read')\n")
    try:
        assert values(reward) == [1.0, 0.0]
    finally:
        reward.close()


def test_constants_bound_to_a_files_function_reach_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "roll.py").write_text(
        "from dataclasses import dataclass\n\n@dataclass\nclass Output:\n    reward: float\n    kind: str\n\n"
        "def compute_score(prediction, ground_truth, reward_type):\n"
        "    return Output(float(prediction.endswith(ground_truth)), reward_type)\n"
    )
    with pytest.raises(RewardError) as refusal:
        as_reward("roll.py").score(BATCH)
    line = "Reward(load_function('roll.py', 'compute_score', reward_type=…), rename={'prediction': 'response'})"
    assert f"write {line}" in str(refusal.value)
    with pytest.raises(DataError, match="'reward_typ' is not an argument of compute_score.*did you mean 'reward_type'"):
        load_function("roll.py", reward_typ="mc")
    bound = functools.partial(load_function("roll.py"), reward_type="mc")
    reward = Reward(bound, workers=1, rename={"prediction": "response"})
    try:
        scores = reward.score(BATCH)
    finally:
        reward.close()
    assert [score.value for score in scores] == [1.0, 0.0] and scores[0].extra["kind"] == "mc"
    assert reward.name == "compute_score" and reward.settings()["file"]["path"] == "roll.py" and reward.source


def test_verls_own_functions_score_unchanged() -> None:
    found = importlib.util.find_spec("verl")
    if found is None or found.origin is None:
        pytest.skip("verl is not installed")
    folder = Path(found.origin).parent / "utils" / "reward_score"
    batch = answered(["so \\boxed{4}\n#### 4", "no"], ["4", "5"], score=[0.1, 0.1], method=["flexible"] * 2)
    for name in ("gsm8k", "math_reward", "math_dapo"):
        reward = Reward(load_function(folder / f"{name}.py", roots=[folder.parents[1]]), workers=1)
        assert values(reward, batch) == [1.0, -1.0 if name == "math_dapo" else 0.0]
        reward.close()


def test_the_names_in_a_refusal_are_those_that_there_are() -> None:
    with pytest.raises(RewardError) as refusal:
        Reward(lambda colour: 1.0, in_process=True).score(BATCH)
    assert re.search(r"expected one of response, ground_truth, .*solution.*found f\(colour\)", str(refusal.value))
