"""Every door for data keeps the contract: prompts are the text that was given, or the row is refused by name."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import workbench as wb
from workbench.base.errors import DataError
from workbench.compat.dumps import read_dump
from workbench.datasets import Rows, encode, files
from workbench.testing.datasets import GOOD, DoorContract, RowsContract


def jsonl(records: list[dict[str, Any]], folder: Path) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def parquet(records: list[dict[str, Any]], folder: Path) -> Path:
    pq.write_table(pa.Table.from_pylist(records), folder / "rows.parquet")
    return folder / "rows.parquet"


class TestJsonl(RowsContract):
    def write(self, records: list[dict[str, Any]], folder: Path) -> Any:
        return jsonl(records, folder)

    def read(self, source: Any) -> Rows:
        return wb.rows(source)


class TestJson(TestJsonl):
    def write(self, records: list[dict[str, Any]], folder: Path) -> Any:
        (folder / "rows.json").write_text(json.dumps(records))
        return folder / "rows.json"


class TestParquet(TestJsonl):
    def write(self, records: list[dict[str, Any]], folder: Path) -> Any:
        return parquet(records, folder)


class TestListOfDicts(RowsContract):
    def write(self, records: list[dict[str, Any]], folder: Path) -> Any:
        return records

    def read(self, source: Any) -> Rows:
        return Rows(source)


class TestDataFrame(TestListOfDicts):
    """As pandas reads parquet: lists are arrays, missing cells NaN."""

    def write(self, records: list[dict[str, Any]], folder: Path) -> Any:
        return pd.read_parquet(parquet(records, folder))


class TestDumpOfDicts(DoorContract):
    def write(self, records: list[dict[str, Any]], folder: Path) -> Any:
        return records

    def read(self, source: Any) -> Any:
        return read_dump(source)

    def chats(self, found: Any) -> list[Any]:
        return list(found["raw_prompt"]) if "raw_prompt" in found else []


class TestDumpAsJsonl(TestDumpOfDicts):
    def kept(self, text: Any) -> Any:
        return text.replace("\ud800", "\ufffd") if isinstance(text, str) else text

    def write(self, records: list[dict[str, Any]], folder: Path) -> Any:
        return jsonl(records, folder)


class TestDumpAsDataFrame(TestDumpOfDicts):
    def write(self, records: list[dict[str, Any]], folder: Path) -> Any:
        return pd.DataFrame(records)


class TestDumpAsParquet(TestDumpOfDicts):
    def write(self, records: list[dict[str, Any]], folder: Path) -> Any:
        return parquet(records, folder)


class TestDryRun(DoorContract):
    """Completions that are scored: judges and reward models read their prompts."""

    def write(self, records: list[dict[str, Any]], folder: Path) -> Any:
        return records

    def read(self, source: Any) -> Any:
        return wb.rewards.dry_run(wb.rewards.shaping.length_penalty(), source)

    def chats(self, found: Any) -> list[Any]:
        return [row["prompt"] for row in found.rows]


class TestDryRunOfAFile(TestDryRun):
    def write(self, records: list[dict[str, Any]], folder: Path) -> Any:
        return parquet(records, folder)


# --- files as the seeds and the hub have them ---------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        '{"messages": [{"role": "user", "content": "hi"}]}', '[{"from": "human", "value": "hi"}]',
        "[{'name': 'x', 'role': 'user', 'content': 'hi'}]", '{"conversations": []}', '[{"role": "user", "content": "hi"}',
    ],
)  # fmt: skip
def test_text_that_was_meant_as_a_chat_is_no_question(text: str) -> None:
    with pytest.raises(wb.WorkbenchError, match="prompt of row 0 looks like a chat.*JSON of a list of"):
        Rows([{**GOOD, "prompt": text}])


def test_a_chat_is_read_from_json_in_json_and_other_json_is_a_text() -> None:
    said = [{"role": "user", "content": "hi"}]
    assert Rows([{**GOOD, "prompt": json.dumps(json.dumps(said))}])[0]["prompt"] == said
    for text in ("[1, 2]", '{"a": 1}', '"hi"', '"[no', "[{'from': 'A', 'to': 'B'}] Find a path."):
        assert Rows([{**GOOD, "prompt": text}])[0]["prompt"] == [{"role": "user", "content": text}]


@pytest.mark.parametrize("more", [{"image_path": "a.png"}, {"extra_info": {"images": ["a.png"]}}])
def test_a_placeholder_means_the_rows_picture_wherever_that_is(more: dict[str, Any]) -> None:
    with pytest.raises(wb.WorkbenchError, match="image"):
        Rows([{**GOOD, "prompt": "<image> What is it?", **more}])


def test_a_picture_that_is_none_is_refused_and_so_is_its_place_without_it(tmp_path: Path) -> None:
    """D1: the images vanished, and a text model was trained on `<image>`."""
    row = {
        **GOOD,
        "prompt": [{"role": "user", "content": "<image>Find x."}],
        "images": [{"bytes": b"PNG", "path": None}],
    }
    path = parquet([{**GOOD, "prompt": [{"role": "user", "content": "2+2?"}], "images": None}, row], tmp_path)
    with pytest.raises(DataError, match=r"picture 0 of column 'images' of row 1 of .*rows.parquet cannot be read"):
        wb.rows(path)
    with pytest.raises(DataError, match=r"row 1 of .* has <image>, and its column 'images'"):
        wb.rows(path, without=["images"])
    told = parquet([{**GOOD, "prompt": "<image> is a tag of HTML", "reward_model": {"ground_truth": "1"}}], tmp_path)
    assert wb.rows(told)[0]["prompt"][0]["content"].startswith("<image>")


def test_a_batch_made_by_hand_is_held_to_the_same(tiny: str) -> None:
    """Templates and tokenizers without one wrote the dict's text into the prompt."""
    tokenizer = wb.engines.local(tiny).tokenizer
    picture, call = [{"type": "image", "image": "x.jpg"}], {"function": {"name": "f", "arguments": "{}"}}
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, "b"]}]
    assert encode(tokenizer, parts) == encode(tokenizer, [{"role": "user", "content": "a\nb"}])
    for chat in (
        [{"role": "user", "content": picture}],
        [{"role": "user", "content": {"text": "a"}}],
        [{"role": "user", "content": None}],
        [{"role": "human", "content": "a"}],
        [{"role": "assistant", "content": None, "tool_calls": [call]}],  # this template would not write it
        None,
    ):
        with pytest.raises(DataError, match="chat 0"):
            encode(tokenizer, chat)  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_rollout_refuses_pictures_too(tiny: str) -> None:
    engine = wb.engines.local(tiny)
    batch = wb.rows("data/arith/train.parquet").batch(2)
    seen = batch.with_columns({"images": [[], ["x.png"]]}, origin=wb.Origin(stage="by hand"))
    for agent in (None, "single_turn_agent"):
        pipe = wb.recipes.grpo(engine, group_size=2, max_tokens=4, agent=agent)
        with pytest.raises(DataError, match="column 'images' of row 1 of the batch"):
            pipe["rollout"](seen)


def test_a_row_says_that_its_prompt_was_a_text(tmp_path: Path) -> None:
    """TRL's functions get strings for such rows."""
    rows = wb.rows(jsonl([GOOD, {**GOOD, "prompt": [{"role": "user", "content": "2+2?"}]}], tmp_path))
    assert rows.values("prompt_is_text") == [True, None] and rows.values("prompt")[0] == rows.values("prompt")[1]
    assert rows.batch(2).non_tensor_batch["prompt_is_text"].tolist().count(True) == 1
    assert "prompt_is_text" not in rows[1:].batch(1)


def test_empty_fields_that_parquet_adds_to_messages_are_left_out(tmp_path: Path) -> None:
    called = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
    asked = {"role": "user", "content": "2+2?"}
    rows = wb.rows(parquet([{**GOOD, "prompt": [asked, called]}, {**GOOD, "prompt": [asked]}], tmp_path))
    assert rows[1]["prompt"] == [asked] and rows[0]["prompt"] == [asked, called]


def test_two_prompts_are_not_one(tmp_path: Path) -> None:
    """The column called prompt won over the one that was asked for."""
    path = jsonl([{**GOOD, "messages": "which?"}], tmp_path)
    with pytest.raises(DataError, match="row 0 of .* has two prompts; found columns 'prompt' and 'messages'"):
        wb.rows(path, prompt="messages")
    assert wb.rows(path, prompt="messages", without=["prompt"])[0]["prompt"][0]["content"] == "which?"


@pytest.mark.parametrize("question", [None, 3, {"a": 1}, "", ["x"]])
def test_a_question_is_a_text(question: Any) -> None:
    with pytest.raises(DataError, match="question of row 0"):
        Rows([{"question": question, "answer": "#### 1"}])


def test_pictures_beside_a_question_are_refused_too() -> None:
    with pytest.raises(DataError, match="column 'images' of row 0"):
        Rows([{"question": "Find x.", "answer": "#### 1", "images": ["x.png"]}])


def test_the_report_says_of_which_kinds_the_truths_are() -> None:
    truths = ["1", 2, 2, 0.5, float("nan"), None, "", " ", ["1"], {"inputs": []}, True]
    found = Rows([{"prompt": "x", "reward_model": {"ground_truth": truth}} for truth in truths]).report()
    kinds = {
        "whole number": 2,
        "none": 2,
        "empty": 2,
        "text": 1,
        "number": 1,
        "list": 1,
        "object": 1,
        "true or false": 1,
    }
    assert found.truths == kinds and found.missing_answers == (4, 5, 6, 7)
    assert "ground truths: whole number: 2, none: 2" in repr(found)


def test_test_cases_are_an_answer(tmp_path: Path) -> None:
    row = {"prompt": "x", "extra_info": {"test_cases": [{"input": "2", "output": "4"}]}}
    assert wb.rows(jsonl([row], tmp_path)).report().truths == {"list": 1}


def test_a_dumps_responses_and_columns_are_no_dicts_as_text() -> None:
    """A list of two samples was joined into one; parts became their own description; a wrong truth was dropped."""
    for response in (["a", "b"], [{"role": "assistant", "content": [{"type": "image", "image": "x"}]}], [3]):
        with pytest.raises(DataError, match="response of row 0"):
            read_dump([{"prompt": "p", "response": response}])
    parts = [{"role": "assistant", "content": [{"type": "text", "text": "a"}]}, {"role": "tool", "content": "b"}]
    assert read_dump([{"prompt": "p", "response": parts}])["response_text"][0] == "a\nb"
    with pytest.raises(DataError, match="reward_model of row 0"):
        read_dump([{"prompt": "p", "response": "r", "reward_model": 5}])
    batch = read_dump([{"prompt": "p", "response": "r", "extra_info": '{"index": 3}'}])
    assert batch["extra_info"][0] == {"index": 3}


# --- files that we write --------------------------------------------------------------------------

CELLS = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(CELLS, CELLS), min_size=1, max_size=4))
def test_what_is_written_is_read_as_it_was(cells: list[tuple[Any, Any]]) -> None:
    columns = {"a": [one for one, _ in cells], "b": [two for _, two in cells]}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "deeper" / "rows.parquet"
        assert files.write(path, columns) == []
        found = files.read(path)
    assert json.dumps([[row["a"], row["b"]] for row in found]) == json.dumps(cells)


def test_what_no_file_can_hold_is_left_out_and_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    assert files.write(path, {"a": [1, 2], "b": [object(), 1], "c": [{"bytes": b"x"}, None]}) == ["b"]
    assert files.read(path) == [{"a": 1, "c": {"bytes": b"x"}}, {"a": 2, "c": None}]
    table = pq.read_table(path).replace_schema_metadata({"workbench.json": '["z"]'})
    pq.write_table(table, path)
    with pytest.raises(DataError, match="reading .*rows.parquet"):
        files.read(path)


def test_a_nested_column_beyond_one_batch_is_read_row_by_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrow refuses a batch whose nested column passes 2 GiB (56 rows of 44 MB); here for any batch of several rows."""
    records = [{"prompt": f"{number}?", "reward_model": {"ground_truth": str(number)}} for number in range(5)]
    path, whole = parquet(records, tmp_path), pq.ParquetFile.iter_batches

    def limited(file: Any, batch_size: int, **more: Any) -> Any:
        if batch_size > 1:
            raise pa.ArrowNotImplementedError("Nested data conversions not implemented for chunked array outputs")
        return whole(file, batch_size=batch_size, **more)

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", limited)
    assert [row["reward_model"]["ground_truth"] for row in wb.rows(str(path)).views()] == list("01234")


def test_a_list_of_texts_is_answered_with_how_prompts_are_passed() -> None:
    with pytest.raises(
        DataError, match=r"no data file matches the pattern 'What is the sea\?'.*pass prompts as \[\{'prompt': text\}"
    ):
        wb.rows(["What is the sea?", "Tell me about snow."])
    with pytest.raises(DataError, match=r"no data file at 'Tell me about snow\.'.*pass prompts as"):
        wb.rows(["Tell me about snow."])
