"""Files into rows, rows into batches; refusals before any work."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import workbench as wb
from workbench.base.errors import DataError
from workbench.datasets import Cursor, Rows, encode
from workbench.datasets.records import to_row
from workbench.datasets.rows import permutation, place, report


def rows(number: int = 10) -> Rows:
    return Rows([to_row({"question": f"q{n}", "answer": f"#### {n}"}, index=n, split="train") for n in range(number)])


class Words:
    chat_template = None

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [len(word) for word in text.split()]}


def write(path: Path, lines: list[Any]) -> Path:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return path


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 200))
def test_the_order_is_a_pure_function_and_every_epoch_a_permutation(number: int, size: int, step: int) -> None:
    if size > number:
        with pytest.raises(DataError, match="batch size"):
            place(number, size, step)
        return
    epoch, start = place(number, size, step)
    assert 0 <= start <= number - size and epoch == (step - 1) // (number // size)
    assert sorted(permutation(number, 3, epoch)) == list(range(number))
    assert permutation(number, 3, epoch) == permutation(number, 3, epoch)


def test_batches_of_an_epoch_share_no_row_and_uids_name_the_draw() -> None:
    data = rows(10)
    batches = [data.batch(3, step=step, seed=1) for step in (1, 2, 3, 4)]
    first_epoch = [info["index"] for batch in batches[:3] for info in batch["extra_info"]]
    assert len(set(first_epoch)) == 9 and [batch.meta_info["epoch"] for batch in batches] == [0, 0, 0, 1]
    again = data.batch(3, step=2, seed=1)
    assert list(again["uid"]) == list(batches[1]["uid"])
    uids = {uid for step in range(1, 7) for uid in data.batch(3, step=step)["uid"]}
    assert len(uids) == 18  # a row drawn again in the next epoch is another draw
    assert all(made.stage == "dataset" for made in again.origins.values())


def test_the_cursor_stores_its_epoch() -> None:
    assert rows(10).cursor(3, 3, 0) == Cursor(
        step=3, epoch=1, offset=0, data_hash=rows(10).data_hash, seed=0, batch_size=3
    )


def test_hashes_follow_content() -> None:
    assert rows(3).data_hash == rows(3).data_hash != rows(4).data_hash


def test_in_order_covers_everything_once() -> None:
    seen = [info["index"] for batch in rows(7).in_order(3) for info in batch["extra_info"]]
    assert seen == list(range(7))


def test_nobody_who_is_given_rows_can_change_them() -> None:
    data = rows(4)
    before = data.data_hash
    data[0]["extra_info"]["index"] = 9
    for row in data:
        row["prompt"][0]["content"] = "changed"
    data.filter(lambda row: bool(row.pop("prompt")))
    data.batch(4)["extra_info"][0]["index"] = 9
    assert Rows(list(data)).data_hash == before and data == rows(4) and data != rows(3)


def test_select_and_masks() -> None:
    data = rows(4)
    for key in ([3, 1], np.array([3, 1]), [False, True, False, True]):
        assert {row["extra_info"]["index"] for row in data[key]} == {1, 3}
    assert data[-1]["extra_info"]["index"] == 3 and len(data[[]]) == 0 and len({data, rows(4)}) == 1
    for wrong in ([4], [-5], [0.5], [True]):
        with pytest.raises(DataError, match="rows to select"):
            data[wrong]


@given(st.integers(2, 30), st.integers(1, 29), st.integers(0, 5))
def test_a_split_is_drawn_by_the_seed_and_shares_no_prompt(number: int, held_out: int, seed: int) -> None:
    once = list(rows(number))
    data = Rows([*once, *once[: number // 2]])
    if held_out >= number:
        held_out = 1
    try:
        rest, held = data.split(held_out, seed)
    except DataError:
        assert number == 2  # one of two prompts, and then the other may be needed too
        return
    assert held_out <= len(held) <= held_out + 1 and len(rest) + len(held) == len(data)
    assert not {str(row["prompt"]) for row in rest} & {str(row["prompt"]) for row in held}
    assert data.split(held_out, seed) == (rest, held)


def test_a_split_by_share() -> None:
    rest, held = rows(10).split(0.2)
    assert (len(rest), len(held)) == (8, 2)
    for wrong in (0, 10, 0.0):
        with pytest.raises(DataError, match="rows in both parts.*hold out fewer: a number from 1 to 9"):
            rows(10).split(wrong)


def test_values() -> None:
    data = rows(6)
    assert len(data[2:4]) == 2 and len(data.filter(lambda row: row["extra_info"]["index"] > 3)) == 2
    assert data.select([5])[0]["extra_info"]["index"] == 5 and "Rows(6" in repr(data)
    risky = Rows([{"prompt": [{"role": "user", "content": "<b>x"}]}])
    assert "&lt;b&gt;x" in risky._repr_html_() and "<b>" not in risky._repr_html_()
    assert "Rows(0" in repr(Rows([]))
    for size, step in ((2.0, 1), (2, 1.5), (2, 0)):
        with pytest.raises(DataError, match="expected"):
            data.batch(size, step=step)  # type: ignore[arg-type]


def test_formats(tmp_path: Path) -> None:
    records = [{"prompt": "one two", "reward_model": {"ground_truth": "3"}, "level": 2}]
    for path in (write(tmp_path / "a.jsonl", records), write(tmp_path / "a.json", [records])):
        data = wb.rows(path)
        assert data[0]["prompt"] == [{"role": "user", "content": "one two"}] and data[0]["level"] == 2
        assert data.batch(1)["level"][0] == 2
    questions = wb.rows(write(tmp_path / "q.jsonl", [{"question": "q", "answer": "so #### 1,000"}]))
    assert questions[0]["reward_model"]["ground_truth"] == "1000"
    assert len(wb.rows([tmp_path / "a.jsonl", tmp_path / "q.jsonl"])) == 2


@pytest.mark.parametrize(
    ("name", "lines", "match"),
    [
        ("a.xls", ["x"], "suffix"),
        ("a.csv", ["q,a", "x,1", "y"], "a.csv:3; expected 2 cells \\(q, a\\); found 1"),
        ("a.csv", ["q,q"], "the names of the columns, each once"),
        ("a.csv", ["q,a", "x,1"], "columns q, a; name them: wb.rows\\('.*a.csv', prompt='q', answer='a'\\)"),
        ("a.parquet", ["not parquet"], "as parquet"),
        ("a.jsonl", [], "no rows"),
        ("a.jsonl", [{"promt": "x"}], "no column of .* is known as a prompt.*found columns promt; .*prompt='promt'\\)"),
        ("a.jsonl", [{"prompt": "x"}, {"question": "x"}], "row 1 of .*'prompt' is not a column of this row"),
        ("a.jsonl", [{"prompt": 3}], "row 0 of .*expected a chat.* or a text; found 3"),
        ("a.jsonl", [{"prompt": [{"content": "no role"}]}], "expected a chat"),
        ("a.jsonl", [{"prompt": [{"role": "user", "content": None}]}], "expected a chat"),
        ("a.jsonl", [{"prompt": "x", "reward_model": "rule"}], "reward_model of row 0 .*found 'rule'"),
        (
            "a.jsonl",
            [{"question": "x", "answer": "#### 7"}, {"question": "x", "answer": "7"}],
            "row 1 of .*a.jsonl; expected an answer with '#### <number>'",
        ),
        ("a.jsonl", [[1]], "row 0 of .*expected an object \\(a dict\\); found list"),
        (
            "a.jsonl",
            [{"prompt": "x", "reward_model": {"ground_truth": "1"}, "uid": "a", "score": 2}],
            "found uid, score",
        ),
        ("a.jsonl", ['{"prompt": "x", "n": NaN}'], "a.jsonl:1 is not JSON; found NaN is not a finite number"),
        ("a.jsonl", ["{}", '{"n": 1e999}'], "a.jsonl:2 is not JSON; found 1e999"),
        ("a.jsonl", ["{"], "a.jsonl:1 is not JSON"),
        ("a.jsonl", ['{"n": ' + "9" * 5000 + "}"], "a.jsonl:1 is not JSON"),
        ("a.jsonl", ["[" * 100_000], "a.jsonl:1 is not JSON"),
        ("a.json", ['{"a": 1}'], "a list of rows"),
    ],
)
def test_bad_files_are_refused_with_the_place(tmp_path: Path, name: str, lines: list[Any], match: str) -> None:
    with pytest.raises(DataError, match=match):
        wb.rows(write(tmp_path / name, lines))


ROW = {"prompt": "x", "reward_model": {"ground_truth": "1"}}


def test_a_missing_file_a_folder_and_a_pattern(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no data file"):
        wb.rows(tmp_path / "none.parquet")
    for number in (2, 1):
        write(tmp_path / f"train-{number}.jsonl", [{**ROW, "n": number}])
    write(tmp_path / "train-3.txt", ["no data"])
    assert [row["n"] for row in wb.rows(tmp_path)] == [1, 2]
    write(tmp_path / "test-1.jsonl", [ROW])
    with pytest.raises(DataError, match=r"is a folder; expected .* one split in it; found test-1.jsonl, train-1.jsonl"):
        wb.rows(tmp_path)
    (tmp_path / "test-1.jsonl").unlink()
    assert [row["n"] for row in wb.rows(tmp_path / "train-*.jsonl")] == [1, 2]
    assert len(wb.rows(str(tmp_path / "tr*-?.*"))) == 2
    with pytest.raises(DataError, match="no data file matches"):
        wb.rows(tmp_path / "test-*.jsonl")
    with pytest.raises(DataError, match="no rows in an empty list"):
        wb.rows([])


def test_text_is_read_as_it_is_written_elsewhere(tmp_path: Path) -> None:
    strange = "a\u2028b\x85c\x0bd"  # line ends for str.splitlines, ordinary characters for JSON
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps({**ROW, "prompt": strange}, ensure_ascii=False).encode() + b"\r\n")
    assert wb.rows(path)[0]["prompt"][0]["content"] == strange
    path.write_bytes(b'{"prompt": "\xff"}')
    with pytest.raises(DataError, match="a.jsonl:1 is not UTF-8"):
        wb.rows(path)


def test_limit_and_columns_left_out(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{**ROW, "uid": n, "level": n} for n in range(3)])
    assert [row["level"] for row in wb.rows(path, limit=2, without=["uid"])] == [0, 1]
    for wrong in (0, -1):
        with pytest.raises(DataError, match="limit of wb.rows; expected ≥ 1"):
            wb.rows(path, limit=wrong)


def test_a_missing_number_is_no_answer(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    made = [{"prompt": "x", "reward_model": {"ground_truth": value}} for value in (1.0, float("nan"))]
    pq.write_table(pa.Table.from_pylist(made), tmp_path / "a.parquet")
    assert wb.rows(tmp_path / "a.parquet").report().missing_answers == (1,)


def test_overlong_prompts_are_refused_by_row_or_dropped() -> None:
    chats = [[{"role": "user", "content": "w " * n}] for n in (1, 5, 2)]
    data = Rows([{"prompt": chat, "reward_model": {"ground_truth": "1"}} for chat in chats], max_prompt_length=3)
    with pytest.raises(DataError, match=r"1 of 3 prompts.*rows \[1\] with \[5\]"):
        data.fitting(Words())
    assert len(data.fitting(Words(), overlong="drop")) == 2
    with pytest.raises(DataError, match="every prompt is too long"):
        data[1:2].fitting(Words(), overlong="drop")


def test_the_report_counts() -> None:
    made = [
        {"prompt": [{"role": "user", "content": text}], "reward_model": {"ground_truth": truth}}
        for text, truth in (("a b", "1"), ("a b", "2"), ("a b c d", None))
    ]
    found = Rows(made, max_prompt_length=3).report(Words())
    assert found.missing_answers == (2,) and len(found.duplicates) == 1 and found.over_limit == 1
    assert found.lengths["max"] == 4 and "rows [2]" in repr(found) and "<table" in found._repr_html_()
    assert found.characters == {"min": 3, "mean": 4.3, "median": 3, "p95": 7, "max": 7}
    assert found.examples == (
        ("first row", "a b  → 1"), ("second row", "a b  → 2"), ("longest prompt (row 2)", "a b c d  → None"),
    )  # fmt: skip
    seen = report([{**row, "images": [{"bytes": b"x"}] * n} for n, row in enumerate(made)], ("prompt", "images"))
    assert seen.pictures == 3 and "pictures: 3" in repr(seen)


def test_encode_with_and_without_a_template(tiny: str) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny)
    chat = [{"role": "user", "content": "How many?"}]
    ids = encode(tokenizer, chat)
    assert tokenizer.decode(ids) == "<|im_start|>user\nHow many?<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(encode(tokenizer, chat, enable_thinking=True)).endswith("<think>\n")
    assert encode(Words(), chat) == [3, 5] and encode(Words(), "a bb") == [1, 2]


@pytest.mark.parametrize("column", ["prompt", "answer", "extra_info", "more"])
def test_a_row_that_contains_itself_is_refused_by_row_and_column(column: str) -> None:
    held: dict[str, Any] = {}
    held["me"] = [held]
    row = {"prompt": "1 + 1", "answer": "2"}
    with pytest.raises(DataError, match=f"column '{column}' of row 1; expected .* found one that contains itself"):
        wb.rows([row, {**row, column: held}])


def test_rows_as_a_table() -> None:
    rows = wb.rows([{"prompt": f"{n} + 1?", "answer": str(n + 1), "level": n} for n in range(7)])
    table = rows.to_pandas()
    assert table["level"].tolist() == list(range(7)) and set(table) == set(rows.columns)
    assert rows.head()["level"].tolist() == [0, 1, 2, 3, 4] and len(rows.head(2)) == 2
