"""Published data sets become rows that the default scorers score: the reference solution 1, a wrong one 0."""

from __future__ import annotations

import base64
import json
import pickle
import zlib
from pathlib import Path
from typing import Any

import pytest

import workbench as wb
from workbench.base.errors import DataError, SettingError
from workbench.cli import main
from workbench.datasets import convert, files
from workbench.datasets.converters import KINDS
from workbench.rewards.case_harness import decode
from workbench.rewards.cases import read_cases
from workbench.rewards.reward import by_data_source
from workbench.rewards.scorers.gsm8k import compute_score

GSM8K = Path(__file__).parents[3] / "shared" / "data" / "gsm8k"
PIXEL = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
DOUBLE = "print(2 * int(input()))"
ADD = "class Solution:\n    def add(self, a, b):\n        return a + b"


def fenced(code: str) -> str:
    return f"So:\n```python\n{code}\n```\n"


def packed(cases: list[dict[str, str]]) -> str:
    """As LiveCodeBench publishes its private cases."""
    return base64.b64encode(zlib.compress(pickle.dumps(json.dumps(cases)))).decode()


def lcb(**more: Any) -> dict[str, Any]:
    public = [{"input": "3\n", "output": "6\n", "testtype": "stdin"}]
    private = packed([{"input": "-1", "output": "-2", "testtype": "stdin"}])
    tests = {"public_test_cases": json.dumps(public), "private_test_cases": private, "metadata": "{}"}
    return {"question_content": "Double it.", "question_id": "a1", "starter_code": "", **tests, **more}


FUNCTION = {
    "starter_code": "class Solution:\n    def add(self, a: int, b: int) -> int:\n        ",
    "public_test_cases": json.dumps([{"input": "1\n2", "output": "3", "testtype": "functional"}]),
    "private_test_cases": packed([{"input": "-1\n1", "output": "0", "testtype": "functional"}]),
    "metadata": json.dumps({"func_name": "add"}),
}
APPS = {"problem_id": 7, "question": "Double it.", "difficulty": "interview", "starter_code": ""}
SHAPES: list[tuple[str, dict[str, Any], str, str]] = [
    ("gsm8k", {"question": "2 + 3?", "answer": "2 + 3 = 5\n#### 1,005"}, "#### 1005", "#### 7"),
    (
        "math",
        {"problem": "Half?", "solution": "It is $\\boxed{\\frac{1}{2}}$.", "level": "Level 1", "type": "Algebra"},
        "It is $\\boxed{\\frac{1}{2}}$.",
        "\\boxed{2}",
    ),
    ("math", {"problem": "?", "solution": "Say $\\boxed 7$."}, "\\boxed{7}", "\\boxed{8}"),
    ("math", {"problem": "?", "solution": "no box", "answer": "7", "unique_id": "a/7"}, "\\boxed{7}", "7"),
    (
        "geo3k",
        {"problem": "<image>Find x.", "answer": "3", "images": [{"bytes": PIXEL, "path": "a.png"}]},
        "<think>It is 3.</think> \\boxed{3}",
        "It is 4.",
    ),
    ("apps", {**APPS, "input_output": json.dumps({"inputs": ["2\n"], "outputs": ["4\n"]})}, DOUBLE, "print(1)"),
    (
        "taco",
        {"question": "Add.", "input_output": json.dumps({"fn_name": "add", "inputs": [[1, 2]], "outputs": [3]})},
        ADD,
        "def add(a, b): return 4",
    ),
    ("livecodebench", lcb(), DOUBLE, "input()"),
    ("livecodebench", lcb(**FUNCTION), ADD, "def add(a, b): return 7"),
    (
        "humaneval",
        {
            "task_id": "HumanEval/0",
            "prompt": 'def double(x):\n    """Twice x."""\n',
            "canonical_solution": "    return 2 * x\n",
            "test": "def check(candidate):\n    assert candidate(2) == 4\n    assert candidate(0) == 0\n",
            "entry_point": "double",
        },
        "def double(x):\n    return 2 * x\n",
        "def double(x):\n    return 9\n",
    ),
    (
        "mbpp",
        {
            "task_id": 1,
            "text": "Double it.",
            "test_list": ["assert f(1) == 2", "assert f(3) == 6"],
            "test_setup_code": "",
        },
        "def f(x): return 2 * x",
        "def f(x): return 5",
    ),
]


def jsonl(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def converted(kind: str, records: list[dict[str, Any]], folder: Path, **how: Any) -> list[dict[str, Any]]:
    """The rows of the file; geo3k's own has pictures, which JSON cannot hold."""
    names = dict.fromkeys(name for record in records for name in record)
    source, target = folder / "source.parquet", folder / "out" / "rows.parquet"
    files.write(source, {name: [record.get(name) for record in records] for name in names})
    assert convert(kind, source, target, **how) == len(records)
    return files.read(target)


def test_every_kind_has_a_shape_here() -> None:
    assert {kind for kind, *_ in SHAPES} == set(KINDS)


@pytest.mark.parametrize(("kind", "record", "right", "wrong"), SHAPES)
def test_the_reference_scores_one_and_a_wrong_response_nothing(
    kind: str, record: dict[str, Any], right: str, wrong: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    (row,) = converted(kind, [record], tmp_path)
    code = KINDS[kind].ability == "code"
    scorer = by_data_source(sandbox=request.getfixturevalue("box")) if code else by_data_source()
    answers = [fenced(right), fenced(wrong)] if code else [right, wrong]
    found = wb.rewards.dry_run(scorer, [{**row, "response": text} for text in answers])
    (judged,) = found.judged.values()
    assert [one.score.value for one in judged] == [1.0, 0.0], [one.score for one in judged]
    assert row["prompt"][-1]["content"].endswith(KINDS[kind].instruction) and row["extra_info"]["index"] == 0
    if kind == "geo3k":
        assert row["images"] == record["images"] and row["prompt"][0]["content"].startswith("<image>Find x.")
    else:
        rows = wb.rows(tmp_path / "out" / "rows.parquet")
        assert rows[0]["data_source"] == KINDS[kind].data_source and rows[0]["prompt"] == row["prompt"]
        assert scorer.check_rows(rows.views()) == ""


def test_rows_are_plain_structs_that_verl_reads(tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    sources = [str(jsonl(tmp_path / f"{name}.jsonl", [SHAPES[0][1]])) for name in "ab"]
    assert main(["convert", "gsm8k", *sources, str(tmp_path / "b.parquet"), "--tool", "gsm8k_answer"]) == 0
    assert main(["convert", "gsm", *sources, str(tmp_path / "b.parquet")]) == 2
    assert [row["extra_info"]["index"] for row in files.read(tmp_path / "b.parquet")] == [0, 1]
    schema = pq.read_schema(tmp_path / "b.parquet")
    assert str(schema.field("reward_model").type) == "struct<style: string, ground_truth: string>"
    assert list(schema.metadata) == [b"workbench.json", b"workbench.crc32"]  # and none of pandas


def test_gsm8k_with_a_tool_gives_the_tool_its_truth(tmp_path: Path) -> None:
    (row,) = converted("gsm8k", [SHAPES[0][1]], tmp_path, tool="gsm8k_answer", instruction="")
    assert row["agent_name"] == "tool_agent" and "`gsm8k_answer`" in row["prompt"][0]["content"]
    assert row["prompt"][1] == {"role": "user", "content": "2 + 3?"}
    assert row["extra_info"]["tools_kwargs"] == {"gsm8k_answer": {"create_kwargs": {"ground_truth": "1005"}}}
    rows = wb.rows(tmp_path / "out" / "rows.parquet")
    agent = wb.agents.ToolAgent([wb.agents.Gsm8kAnswer()], parser="hermes")
    engine = wb.engines.local("data/tiny-arith-tools")
    pipe = wb.recipes.grpo(engine, agent=agent, group_size=2)
    batch = wb.Stepper(pipe, rows.batch(1)).run(until="reward").batch
    assert len(batch) == 2 and batch["scored"].all()


@pytest.mark.parametrize(
    ("kind", "record", "said"),
    [
        ("gsm8k", {"question": "q"}, r"row 1 of .*expected question and answer; found question"),
        ("math", {"problem": "p", "solution": "none"}, r"solution of row 1 of .*expected an answer in"),
        ("geo3k", {"problem": "<image>", "answer": "1", "images": []}, "1 × <image> in the problem"),
        ("apps", {"question": "q", "input_output": '{"inputs": ["1"]}'}, "expected inputs and outputs"),
        ("apps", {"question": "q", "input_output": "{"}, "input_output of row 1"),
        ("livecodebench", lcb(private_test_cases="gibberish"), "private_test_cases of row 1"),
        ("livecodebench", lcb(public_test_cases="[1]", private_test_cases=""), "public_test_cases of row 1"),
        ("humaneval", {"prompt": "p", "test": ""}, "test of row 1"),
        ("mbpp", {"text": "t", "test_list": []}, "test_list of row 1"),
    ],
)
def test_a_record_of_another_shape_is_named_and_nothing_is_written(
    kind: str, record: dict[str, Any], said: str, tmp_path: Path
) -> None:
    good = next(one for name, one, *_ in SHAPES if name == kind)
    good = {name: cell for name, cell in good.items() if name != "images"} | (
        {"images": ["a"]} if kind == "geo3k" else {}
    )
    with pytest.raises(DataError, match=said):
        convert(kind, jsonl(tmp_path / "a.jsonl", [good, record]), tmp_path / "out.parquet")
    assert not (tmp_path / "out.parquet").exists()


def test_what_a_pickle_would_run_is_not_run(tmp_path: Path) -> None:
    class Runs:
        def __reduce__(self) -> Any:
            return Path.touch, (tmp_path / "ran",)

    hostile = base64.b64encode(zlib.compress(pickle.dumps(Runs()))).decode()
    with pytest.raises((DataError, SettingError), match="private_test_cases"):
        convert("livecodebench", jsonl(tmp_path / "a.jsonl", [lcb(private_test_cases=hostile)]), tmp_path / "b.parquet")
    assert not (tmp_path / "ran").exists()


def test_wrong_arguments_name_what_there_is(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "a.jsonl", [{**APPS, "input_output": ""}])
    with pytest.raises(DataError, match="did you mean 'gsm8k'"):
        convert("gsm8", source, tmp_path / "b.parquet")
    with pytest.raises(DataError, match="expected a kind with a written answer: gsm8k, math, geo3k"):
        convert("apps", source, tmp_path / "b.parquet", tool="python")
    with pytest.raises(SettingError, match=r"ending in \.parquet"):
        convert("apps", source, tmp_path / "b.jsonl")
    with pytest.raises(DataError, match="1 problems without test cases"):
        convert("apps", source, tmp_path / "b.parquet")


@pytest.mark.slow
@pytest.mark.parametrize(("split", "number"), [("train", 7473), ("test", 1319)])
def test_the_real_gsm8k(split: str, number: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, target = GSM8K / f"{split}.jsonl", tmp_path / "out.parquet"
    if not source.is_file():
        pytest.skip("GSM8K's own jsonl is not here (shared/data/gsm8k)")
    assert main(["convert", "gsm8k", str(source), str(target), "--split", split]) == 0
    assert capsys.readouterr().out == f"{number} rows in {target}\n"
    data = wb.rows(target)
    assert len(data) == number and data[0]["data_source"] == "openai/gsm8k"
    own = [compute_score(row["extra_info"]["answer"], row["reward_model"]["ground_truth"]) for row in data.views()]
    assert sum(own) == number


def test_integers_of_any_length_stay_as_they_were(tmp_path: Path) -> None:
    """Some rows of APPS have more digits than Python reads (4,300)."""
    huge = "1" + "0" * 6000
    tests = f'{{"fn_name": "f", "inputs": [[-{huge}]], "outputs": [{huge}]}}'
    record = {"question": "Negate.", "problem_id": 1, "input_output": tests}
    (tmp_path / "apps.jsonl").write_text(json.dumps(record) + "\n")
    convert("apps", tmp_path / "apps.jsonl", tmp_path / "rows.parquet")
    (row,) = wb.rows(tmp_path / "rows.parquet").views()
    assert row["reward_model"]["ground_truth"] == tests
    (case,) = read_cases(tests)
    assert case.expected == [10**6000] and decode(case.given["encoded"]) == [-(10**6000)]
