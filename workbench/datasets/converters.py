"""`convert`: published data sets (GSM8K, MATH, geometry, code) in their own files → parquet in verl's schema."""

from __future__ import annotations

import base64
import json
import pickletools
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from workbench.base.config import require
from workbench.base.errors import DataError, boundary, check_name, describe
from workbench.datasets import files
from workbench.datasets.records import cells_of, last_box, text_fields, to_row

TOOL_SYSTEM = (
    "Solve the problem step by step. Check your answer with the tool `{tool}` at least once before you give it, and think"
    " again where it is wrong."
)
"""The system message of rows with a tool; verl's message says the same in more words."""
BOXED = "Let's think step by step and output the final answer within \\boxed{}."
"""What verl's prepared MATH appends to every problem."""
HASHES = 'Let\'s think step by step and output the final answer after "####".'
"""What verl's prepared GSM8K appends to every question."""
THINKING = (
    "Think first: your reasoning must be within <think> </think> tags. Then give the final answer within \\boxed{}."
)
"""The form that geometry3k's scorer expects: reasoning in tags, then a box."""
CODE = "Write the solution in Python, in one ```python code block."
_LARGEST = 1 << 30
"""Most bytes to which a row's packed test cases may unpack."""


@dataclass(frozen=True, kw_only=True)
class _Task:
    """One problem of a published data set: its question, its ground truth and further columns."""

    question: str
    truth: Any
    """The ground truth: a text, or for a code problem its test cases."""
    extra: Mapping[str, Any]
    """Further keys of `extra_info`."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """Further columns of the row."""


class Kind(NamedTuple):
    """How the records of one published data set become rows: their reader, data source, ability and instruction."""

    read: Callable[[Mapping[str, Any], str], _Task | None]
    """(record, place) → task; None for a record without test cases, which can never be scored."""
    data_source: str
    """The rows' `data_source`, by which the scorer is chosen."""
    ability: str
    instruction: str
    """Text after the question; `convert(instruction=…)` replaces it."""


def convert(
    kind: str,
    source: str | Path | Sequence[str | Path],
    target: str | Path,
    *,
    split: str = "train",
    instruction: str | None = None,
    tool: str | None = None,
) -> int:
    """Write a published data set as parquet in verl's schema, for `wb.rows`; return the number of rows.

    `source` is the data set's own file or files (jsonl, json, parquet), of the `kind` (`KINDS`): `gsm8k`, `math` (also
    MATH-500), `geo3k`, `apps`, `taco`, `livecodebench`, `humaneval`, `mbpp`. `instruction` stands after every question
    in place of the kind's own ("" for none). With `tool` (its name, such as `gsm8k_answer`) the rows are for a tool
    agent: a system message asks for the tool, which is created with the row's ground truth; this is for kinds with a
    written answer. Pictures stay as they are, in `images`; test cases become `{inputs, outputs}`, or the assertions
    that there are. Problems without test cases are left out. Raises `DataError` for an unknown kind, and by row for a
    record of another shape; then no file is written.

    Example:
        >>> wb.datasets.convert("gsm8k", "train.jsonl", "gsm8k/train.parquet")  # doctest: +SKIP
    """
    how, goal = _kind_named(kind, tool), Path(target).expanduser()
    require(goal.suffix == ".parquet", "target", expected="a name ending in .parquet", found=str(target))
    places = (
        (f"row {row} of {path}", record) for path in files.find(source) for row, record in enumerate(files.read(path))
    )
    tasks = [how.read(cells_of(record, place), place) for place, record in places]
    request = how.instruction if instruction is None else instruction
    pairs = ((index, task) for index, task in enumerate(tasks) if task is not None)
    rows = [_row(task, how, {"split": split, "index": index}, request, tool) for index, task in pairs]
    if not rows:
        raise DataError(f"no rows in {source}", found=f"{len(tasks)} problems without test cases" if tasks else None)
    names = dict.fromkeys(name for row in rows for name in row)
    files.write(goal, {name: [row.get(name) for row in rows] for name in names})
    return len(rows)


def _kind_named(kind: str, tool: str | None) -> Kind:
    check_name("kind of data set", kind, KINDS, DataError)
    if tool is not None and KINDS[kind].ability == "code":
        kinds = [name for name, one in KINDS.items() if one.ability != "code"]
        raise DataError(f"tool={tool!r} for {kind}", expected=f"a kind with a written answer: {', '.join(kinds)}")
    return KINDS[kind]


def _row(task: _Task, how: Kind, place: Mapping[str, Any], instruction: str, tool: str | None) -> dict[str, Any]:
    content = f"{task.question} {instruction}" if instruction else task.question
    prompt = [{"role": "user", "content": content}]
    extra = {**place, **task.extra}
    row = {"data_source": how.data_source, "prompt": prompt, "ability": how.ability}
    if tool is not None:
        row |= {
            "agent_name": "tool_agent",
            "prompt": [{"role": "system", "content": TOOL_SYSTEM.format(tool=tool)}, *prompt],
        }
        kwargs = {tool: {"create_kwargs": {"ground_truth": task.truth}}}
        extra |= {"need_tools_kwargs": True, "tools_kwargs": kwargs}
    truth = task.truth if isinstance(task.truth, str) else _written(task.truth)
    return {**row, "reward_model": {"style": "rule", "ground_truth": truth}, "extra_info": extra, **task.columns}


def _parsed(value: Any, place: str) -> Any:
    """Parse JSON text; return any other value unchanged. An integer with more digits than Python reads becomes a text that
    `_written` writes as it was."""
    if not isinstance(value, str):
        return value
    with boundary(f"reading {place}", DataError):
        return json.loads(value, parse_int=lambda digits: int(digits) if len(digits) < 4300 else f"\0{digits}")


def _written(truth: Any) -> str:
    return re.sub(r'"\\u0000(-?\d+)"', r"\1", json.dumps(truth))


# --- written answers ------------------------------------------------------------------------------


def _gsm8k(record: Mapping[str, Any], place: str) -> _Task:
    row = to_row(record, split="", place=place)
    question, answer = record["question"], record["answer"]
    extra = {"question": question, "answer": answer}
    return _Task(question=question, truth=row["reward_model"]["ground_truth"], extra=extra)


def _math(record: Mapping[str, Any], place: str) -> _Task:
    """Read a record of MATH, whose answer is in the solution's box, or of MATH-500, which has it in `answer`, too."""
    question, solution = text_fields(record, place, "problem", "solution")
    truth = record.get("answer") or last_box(_BARE.sub(r"\\boxed{\1}", _OTHER_BOX.sub(r"\\boxed{", solution)))
    if not isinstance(truth, str) or not truth.strip():
        raise DataError(f"solution of {place}", expected="an answer in \\boxed{…}", found=repr(solution[-60:]))
    named = {name: record.get(name) for name in ("level", "type", "subject", "unique_id") if name in record}
    return _Task(question=question, truth=truth, extra={"question": question, "solution": solution, **named})


_OTHER_BOX = re.compile(r"\\fbox\s*\{|\\boxed\s+\{")
_BARE = re.compile(r"\\boxed\s+([^\s{$][^\s$]*)")
"""A box without braces: `\\boxed 7$`."""


def _geo3k(record: Mapping[str, Any], place: str) -> _Task:
    question, answer = text_fields(record, place, "problem", "answer")
    pictures = record.get("images")
    if not isinstance(pictures, list) or question.count("<image>") != len(pictures):
        found = f"{question.count('<image>')} × <image> in the problem, images {describe(pictures)}"
        raise DataError(f"images of {place}", expected="a picture for every <image> of the problem", found=found)
    return _Task(
        question=question, truth=answer, extra={"question": question, "answer": answer}, columns={"images": pictures}
    )


# --- code -----------------------------------------------------------------------------------------


def _apps(record: Mapping[str, Any], place: str) -> _Task | None:
    """Read a record of APPS or TACO: `input_output` is JSON of `inputs`, `outputs` and, where a function is called,
    `fn_name`."""
    (question,) = text_fields(record, place, "question")
    tests = _parsed(record.get("input_output") or "{}", f"input_output of {place}")
    if not isinstance(tests, Mapping) or not {"inputs", "outputs"} <= tests.keys():
        if not tests:
            return None
        raise DataError(f"input_output of {place}", expected="inputs and outputs", found=describe(tests))
    if not tests["inputs"]:
        return None
    kept = {name: tests[name] for name in ("fn_name", "inputs", "outputs") if tests.get(name) is not None}
    return _code(question, record.get("starter_code"), kept, record, "problem_id", "difficulty", "url", "source")


def _livecodebench(record: Mapping[str, Any], place: str) -> _Task:
    """Read a record of LiveCodeBench, with public and private cases `{input, output, testtype}`.

    Where a function is called, each line of a case's input is the JSON of an argument.
    """
    (question,) = text_fields(record, place, "question_content")
    cases = [
        case
        for name in ("public_test_cases", "private_test_cases")
        for case in _cases(record, name, f"{name} of {place}")
    ]
    metadata = _parsed(record.get("metadata") or "{}", f"metadata of {place}")
    name = metadata.get("func_name") if isinstance(metadata, Mapping) else None
    if not cases:
        raise DataError(f"test cases of {place}", expected="at least one", found="none")
    tests: dict[str, Any] = {"inputs": [case["input"] for case in cases], "outputs": [case["output"] for case in cases]}
    if name:
        with boundary(f"reading the test cases of {place}", DataError):
            inputs = [[_parsed(line, "an input") for line in text.split("\n")] for text in tests["inputs"]]
            outputs = [_parsed(text, "an output") for text in tests["outputs"]]
            tests = {"fn_name": name, "inputs": inputs, "outputs": outputs}
    fields = ("question_id", "difficulty", "platform", "contest_date")
    return _code(question, record.get("starter_code"), tests, record, *fields)


def _cases(record: Mapping[str, Any], name: str, place: str) -> list[Any]:
    """Read a list of cases from JSON text, or from LiveCodeBench's packed form; [] where the record has none."""
    cases = record.get(name) or []
    if isinstance(cases, str) and not cases.lstrip().startswith("["):
        cases = _unpacked(cases, place)
    cases = _parsed(cases, place)
    if not isinstance(cases, list) or not all(
        isinstance(one, Mapping) and {"input", "output"} <= one.keys() for one in cases
    ):
        raise DataError(place, expected="a list of {input, output, testtype}", found=describe(cases))
    return cases


def _unpacked(text: str, place: str) -> str:
    """Return the text in base64 of zlib of a pickle of one text. Only the pickle's opcodes are read; nothing is
    unpickled."""
    with boundary(f"unpacking {place}", DataError):
        unzip = zlib.decompressobj()
        data = unzip.decompress(base64.b64decode(text), _LARGEST)
        require(not unzip.unconsumed_tail, place, expected=f"at most {_LARGEST} bytes", found="more")
        texts = [argument for opcode, argument, _ in pickletools.genops(data) if "UNICODE" in opcode.name]
        require(len(texts) == 1, place, expected="a pickle of one text", found=f"{len(texts)} texts")
        return str(texts[0])


def _humaneval(record: Mapping[str, Any], place: str) -> _Task:
    prompt, test, name = text_fields(record, place, "prompt", "test", "entry_point")
    question = f"Complete this function:\n```python\n{prompt.rstrip()}\n```\n"
    return _code(question, None, {"test": test, "entry_point": name, "prompt": prompt}, record, "task_id")


def _mbpp(record: Mapping[str, Any], place: str) -> _Task:
    """Read a record of MBPP (`text`) or its sanitized form (`prompt`); the question shows the assertions, as these name
    the function."""
    (question,) = text_fields(record, place, "prompt" if record.get("prompt") else "text")
    tests = record.get("test_list")
    if not isinstance(tests, list) or not tests:
        raise DataError(f"test_list of {place}", expected="a list of assertions", found=describe(tests))
    question = f"{question}\nYour code should pass these tests:\n" + "\n".join(map(str, tests)) + "\n"
    kept = {name: record[name] for name in ("test_list", "test_setup_code", "test_imports") if record.get(name)}
    return _code(question, None, kept, record, "task_id")


def _code(question: str, starter: Any, tests: Mapping[str, Any], record: Mapping[str, Any], *fields: str) -> _Task:
    if isinstance(starter, str) and starter.strip():
        question = f"{question.rstrip()}\n\nStart from this code:\n```python\n{starter.rstrip()}\n```\n"
    elif "inputs" in tests and "fn_name" not in tests:
        question = f"{question.rstrip()}\n\nRead from standard input and write to standard output.\n"
    return _Task(question=question, truth=tests, extra={name: record[name] for name in fields if name in record})


KINDS: Mapping[str, Kind] = {
    "gsm8k": Kind(_gsm8k, "openai/gsm8k", "math", HASHES),
    "math": Kind(_math, "DigitalLearningGmbH/MATH-lighteval", "math", BOXED),
    "geo3k": Kind(_geo3k, "hiyouga/geometry3k", "math", THINKING),
    "apps": Kind(_apps, "apps", "code", CODE),
    "taco": Kind(_apps, "taco", "code", CODE),
    "livecodebench": Kind(_livecodebench, "livecodebench", "code", CODE),
    "humaneval": Kind(_humaneval, "humaneval", "code", CODE),
    "mbpp": Kind(_mbpp, "mbpp", "code", CODE),
}
"""Name → how its records become rows."""
