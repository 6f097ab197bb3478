"""Files into rows, rows into batches; refusals before any work."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.datasets import Cursor, Rows, encode, load
from workbench.datasets.gsm8k import convert, to_row
from workbench.datasets.order import permutation, place
from workbench.errors import DataError
from workbench.rewards.gsm8k import compute_score


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


def test_values() -> None:
    data = rows(6)
    assert len(data[2:4]) == 2 and len(data.filter(lambda row: row["extra_info"]["index"] > 3)) == 2
    assert data.select([5])[0]["extra_info"]["index"] == 5 and "Rows(6" in repr(data)


def test_formats(tmp_path: Path) -> None:
    records = [{"prompt": "one two", "reward_model": {"ground_truth": "3"}, "level": 2}]
    for path in (write(tmp_path / "a.jsonl", records), write(tmp_path / "a.json", [records])):
        data = load(path)
        assert data[0]["prompt"] == [{"role": "user", "content": "one two"}] and data[0]["level"] == 2
        assert data.batch(1)["level"][0] == 2
    questions = load(write(tmp_path / "q.jsonl", [{"question": "q", "answer": "so #### 1,000"}]))
    assert questions[0]["reward_model"]["ground_truth"] == "1000"
    assert len(load([tmp_path / "a.jsonl", tmp_path / "q.jsonl"])) == 2


@pytest.mark.parametrize(
    ("name", "lines", "match"),
    [
        ("a.csv", ["x"], "suffix"),
        ("a.parquet", ["not parquet"], "as parquet"),
        ("a.jsonl", [], "no rows"),
        ("a.jsonl", [{"promt": "x"}], "did you mean 'promt'"),
        ("a.jsonl", [{"prompt": "x"}], "no ground truth.*rows \\[0\\]"),
        ("a.jsonl", [{"prompt": 3}], "a chat or a text"),
        ("a.jsonl", ['{"prompt": "x", "n": NaN}'], "a.jsonl:1: JSON has no NaN"),
        ("a.jsonl", ["{}", '{"n": 1e999}'], "a.jsonl:2: a number too large"),
        ("a.jsonl", ["{"], "a.jsonl:1 is not JSON"),
        ("a.json", ['{"a": 1}'], "a list of rows"),
    ],
)
def test_bad_files_are_refused_with_the_place(tmp_path: Path, name: str, lines: list[Any], match: str) -> None:
    with pytest.raises(DataError, match=match):
        load(write(tmp_path / name, lines))


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no data file"):
        load(tmp_path / "none.parquet")


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
    assert found.missing_answers == (2,) and found.duplicates == 1 and found.over_limit == 1
    assert found.lengths["max"] == 4 and "rows [2]" in repr(found) and "<table" in found._repr_html_()


def test_encode_with_and_without_a_template(tiny: str) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny)
    chat = [{"role": "user", "content": "How many?"}]
    ids = encode(tokenizer, chat)
    assert tokenizer.decode(ids) == "<|im_start|>user\nHow many?<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(encode(tokenizer, chat, enable_thinking=True)).endswith("<think>\n")
    assert encode(Words(), chat) == [3, 5] and encode(Words(), "a bb") == [1, 2]


GSM8K = Path(__file__).parents[3] / "shared" / "data" / "gsm8k"


@pytest.mark.parametrize(("split", "number"), [("train", 7473), ("test", 1319)])
def test_the_real_gsm8k(split: str, number: int, tmp_path: Path) -> None:
    source = GSM8K / f"{split}.jsonl"
    if not source.is_file():
        pytest.skip("GSM8K's own jsonl is not here (shared/data/gsm8k)")
    assert convert(source, tmp_path / "out.parquet", split=split) == number
    data = load(tmp_path / "out.parquet")
    assert len(data) == number and data[0]["data_source"] == "openai/gsm8k"
    own = [compute_score(row["extra_info"]["answer"], row["reward_model"]["ground_truth"]) for row in data]
    assert sum(own) == number
