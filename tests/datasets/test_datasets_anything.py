"""Eight plain inputs, as people have them: each loads in one line and trains; what was understood is said."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
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
from workbench.datasets import Rows
from workbench.datasets.rendering import bounds, encode_all

PLAIN = [{"question": f"Anna has {n} apples and 2 pears. How many?", "answer": str(n + 2)} for n in range(12)]
TRL = [{"prompt": row["question"], "answer": row["answer"]} for row in PLAIN]


class Dataset:
    """What `datasets.Dataset` is to a reader: column names, rows as dicts; it is no DataFrame."""

    def __init__(self, records: list[dict[str, Any]]) -> None:
        self._records = records

    @property
    def column_names(self) -> list[str]:
        return list(self._records[0])

    def to_dict(self) -> dict[str, list[Any]]:
        return {name: [row[name] for row in self._records] for name in self.column_names}

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self._records)


class DatasetDict(dict[str, Dataset]):
    @property
    def column_names(self) -> dict[str, list[str]]:
        return {split: one.column_names for split, one in self.items()}


def jsonl(records: list[dict[str, Any]], path: Path) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def parquet(records: list[dict[str, Any]], path: Path) -> Path:
    pq.write_table(pa.Table.from_pylist(records), path)
    return path


def csv(records: list[dict[str, Any]], path: Path) -> Path:
    pd.DataFrame(records).to_csv(path, index=False)
    return path


def arrow(records: list[dict[str, Any]], folder: Path) -> Path:
    """As `Dataset.save_to_disk` writes it."""
    folder.mkdir()
    table = pa.Table.from_pylist(records)
    with (
        pa.OSFile(str(folder / "data-00000-of-00001.arrow"), "wb") as file,
        pa.ipc.new_stream(file, table.schema) as out,
    ):
        out.write_table(table)
    (folder / "state.json").write_text("{}")
    return folder


def json_list(records: list[dict[str, Any]], path: Path) -> Path:
    path.write_text(json.dumps(records))
    return path


INPUTS: dict[str, Callable[[Path], Any]] = {
    "jsonl": lambda folder: jsonl(PLAIN, folder / "mine.jsonl"),
    "csv": lambda folder: csv(PLAIN, folder / "mine.csv"),
    "parquet": lambda folder: parquet(PLAIN, folder / "mine.parquet"),
    "json": lambda folder: json_list(PLAIN, folder / "mine.json"),
    "TRL jsonl": lambda folder: jsonl(TRL, folder / "mine.jsonl"),
    "list": lambda folder: PLAIN,
    "DataFrame": lambda folder: pd.DataFrame(PLAIN),
    "Dataset": lambda folder: Dataset(PLAIN),
    # and more
    "split": lambda folder: DatasetDict(train=Dataset(PLAIN)),
    "generator": lambda folder: iter(PLAIN),
    "Arrow table": lambda folder: pa.Table.from_pylist(PLAIN),
    "saved Dataset": lambda folder: arrow(PLAIN, folder / "mine"),
    "Rows": lambda folder: wb.rows(PLAIN),
}


def short(response: str) -> float:
    """A plain reward function, as one writes it first."""
    return 1.0 / (1 + len(response))


@pytest.mark.parametrize("name", INPUTS)
def test_one_line_reads_it_all_the_same(name: str, tmp_path: Path) -> None:
    rows = wb.rows(INPUTS[name](tmp_path))
    assert len(rows) == 12 and not rows.report().missing_answers
    assert rows[3]["prompt"] == [{"role": "user", "content": "Anna has 3 apples and 2 pears. How many?"}]
    assert rows[3]["reward_model"]["ground_truth"] == "5" and rows[3]["prompt_is_text"]
    of_a_file = ("jsonl", "csv", "parquet", "json", "TRL jsonl")
    assert rows[3]["data_source"] == ("mine" if name in of_a_file else "data" if name == "saved Dataset" else "rows")
    asked, truth = "prompt" if name == "TRL jsonl" else "question", "reward_model" if name == "Rows" else "answer"
    told = f"{'prompt' if name == 'Rows' else asked} → prompt, {truth} → truth".replace(", ", "; ")
    assert told in repr(rows) and told in rows._repr_html_() and "Anna has 0 apples" in repr(rows)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["csv", "Dataset", "TRL jsonl"])
def test_it_trains_with_a_plain_function(name: str, tiny: str, tmp_path: Path) -> None:
    rows = wb.rows(INPUTS[name](tmp_path))
    pipe = wb.recipes.grpo(wb.engines.local(tiny), reward=short, group_size=2, max_tokens=4)
    run = wb.train_blocking(
        pipe, rows[:8], eval_rows=rows[8:], steps=1, batch_size=4, run=tmp_path / "run", display=None
    )
    source = rows[0]["data_source"]
    assert any(key.startswith(f"val-core/{source}/reward/mean@") for key in run.metrics.columns), "no None in its name"


# --- what is understood -----------------------------------------------------------------------------

TOLD: dict[str, tuple[list[dict[str, Any]], str, Any]] = {
    "verl": ([{"prompt": "2+2?", "reward_model": {"ground_truth": "4"}}], "reward_model → truth (verl's schema)", "4"),
    "GSM8K": ([{"question": "2+2?", "answer": "so\n#### 1,004"}], "answer → truth, what follows #### (GSM8K)", "1004"),
    "TRL": ([{"prompt": "2+2?", "completion": "4"}], "completion → truth (TRL's prompt and completion)", "4"),
    "TRL's messages": (
        [{"prompt": [{"role": "user", "content": "2+2?"}], "completion": [{"role": "assistant", "content": "4"}]}],
        "completion → truth (TRL's prompt and completion)",
        "4",
    ),
    "TRL's prompts": ([{"prompt": "2+2?"}], "no truths (TRL's prompts)", None),
    "messages": ([{"messages": [{"role": "user", "content": "2+2?"}]}], "no truths (OpenAI's messages)", None),
    "a conversation": (
        [{"messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]}],
        "messages → prompt; the last answer → truth (OpenAI's messages)",
        "4",
    ),
    "JSON in a column": (
        [{"messages": '[{"role": "user", "content": "2+2?"}]', "answer": "4"}],
        "answer → truth (OpenAI's messages)",
        "4",
    ),
    "MATH": (
        [{"problem": "2+2?", "solution": "It is 4.", "level": 1}],
        "problem → prompt; solution → truth (plain columns)",
        "It is 4.",
    ),
    "numbers": ([{"question": "2+2?", "answer": 4}], "question → prompt; answer → truth (plain columns)", 4),
}


@pytest.mark.parametrize("name", TOLD)
def test_the_schema_is_recognised_and_said(name: str) -> None:
    records, told, truth = TOLD[name]
    rows = Rows(records)
    assert told in repr(rows) and dict(rows.lines())["read as"].endswith(told)
    assert rows[0]["prompt"] == [{"role": "user", "content": "2+2?"}]
    assert (rows[0].get("reward_model") or {}).get("ground_truth") == truth
    assert ("reward_model" in rows.columns) == (truth is not None)


def test_columns_are_named_and_the_others_stay() -> None:
    records = [{"id": "a1", "q": "How much is 2+2, all told?", "a": "007", "level": 3}]
    with pytest.raises(DataError) as caught:
        wb.rows(records)
    said = "found columns id, q, a, level; name them: wb.rows(x, prompt='q', answer='level')"
    assert said in str(caught.value)
    rows = wb.rows(records, prompt="q", answer="a", system="Be brief.")
    assert [turn["role"] for turn in rows[0]["prompt"]] == ["system", "user"]
    assert rows[0]["reward_model"] == {"style": "rule", "ground_truth": "007"} and rows[0]["level"] == 3
    with pytest.raises(DataError, match=r"'b' is not a column; found columns id, q, a, level; .*prompt='q'"):
        wb.rows(records, prompt="q", answer="b")
    with pytest.raises(DataError, match="has a system message; found 'x'; leave system= out"):
        wb.rows([{"prompt": [{"role": "system", "content": "x"}, {"role": "user", "content": "y"}]}], system="z")


def line_of(error: Exception) -> str:
    """The call that an error proposes."""
    return re.search(r"wb\.rows\(.*?\)(?=$|;|, )", str(error))[0]  # type: ignore[index]


@pytest.mark.parametrize(
    ("records", "arguments", "prompt", "truth"),
    [
        ([{"text": "2+2?", "data_source": "a name that is longer than the text", "truth": "4"}], {}, "2+2?", "4"),
        ([{"text": "2+2?", "reward_model": {"ground_truth": "4"}, "extra_info": {"index": 0}}], {}, "2+2?", "4"),
        ([{"text": "2+2?", "uid": "a", "level": 1, "answer": 4}], {}, "2+2?", 4),
        ([{"raw_prompt": "2+2?", "responses": "4", "answer": 4}], {}, "2+2?", 4),
        ([{"prompt": "2+2?", "uid": "a", "reward": 4}], {"answer": "reward", "system": "Be brief."}, "2+2?", 4),
        ([{"prompt": "old", "prompts": "2+2?", "answer": 4}], {"prompt": "prompts"}, "2+2?", 4),
        ([{"prompt": "2+2?", "prompts": "new", "answer": 4}], {}, "2+2?", 4),
        ([{"q": "2+2?", "a": "4"}], {"prompt": "question"}, "2+2?", "4"),
        ([{"q": "2+2?", "a": "4"}], {"prompt": "q", "answer": "truth", "raw": True}, "2+2?", "4"),
        ([{"prompt": "2+2?", "answer": 4, "video": "a.mp4"}], {}, "2+2?", 4),
        ([{"number": 4, "said": [{"role": "user", "content": "2+2?"}]}], {}, "2+2?", 4),
    ],
)
def test_the_line_that_an_error_proposes_reads_the_rows(
    records: list[dict[str, Any]], arguments: dict[str, Any], prompt: str, truth: Any, tmp_path: Path
) -> None:
    """One refusal, then its own line typed as it stands: advice led in a circle, from one error to the next and back."""
    frame, path = pd.DataFrame(records), tmp_path / "mine.parquet"
    frame.to_parquet(path)
    for x in (records, frame, str(path)):
        with pytest.raises(DataError) as caught:
            wb.rows(x, **arguments)
        rows = eval(line_of(caught.value), {"wb": wb, "x": x})  # noqa: S307 - what a user would paste
        text = rows[0]["prompt"] if arguments.get("raw") else rows[0]["prompt"][-1]["content"]
        assert (text, rows[0]["reward_model"]["ground_truth"]) == (prompt, truth)


def test_where_no_line_can_help_the_error_says_what_rows_need() -> None:
    with pytest.raises(DataError, match="write each row's prompt into a column 'prompt': a text, or a list of"):
        wb.rows([{"a": 1, "b": 2}])


def test_a_column_that_is_named_is_read_whatever_its_name(tmp_path: Path) -> None:
    """Rows of the user's own documents: their prompts are in `prompts`, which in a batch is a tensor."""
    truth = {"style": "rule", "ground_truth": "18"}
    row = {"prompts": "Janet's ducks", "data_source": "openai/gsm8k", "reward_model": truth, "extra_info": {"index": 0}}
    pd.DataFrame([row]).to_parquet(tmp_path / "case1.parquet")
    for arguments in ({}, {"prompt": "prompts"}, {"prompt": "prompts", "answer": "reward_model"}):
        rows = wb.rows(tmp_path / "case1.parquet", **arguments)
        assert rows[0]["prompt"] == [{"role": "user", "content": "Janet's ducks"}]
        assert rows[0]["reward_model"] == truth and "prompts" not in rows.columns
        assert rows.batch(1).non_tensor_batch["raw_prompt"][0] == rows[0]["prompt"]
    job = wb.compat.verl(f"data.train_files={tmp_path}/case1.parquet data.prompt_key=prompts data.train_batch_size=1")
    _, rows, _, _ = job.open(model="data/tiny-arith", reward=lambda response_text: 1.0)
    assert rows[0]["prompt"][0]["content"] == "Janet's ducks"
    assert wb.rows([{"prompt": "a", "extra_info": {"x": 1}}], answer="extra_info")[0]["reward_model"]["ground_truth"]


def test_numbers_of_a_csv_keep_their_text(tmp_path: Path) -> None:
    (tmp_path / "mine.csv").write_text('\ufeffquestion;answer;n\n"a; b\nc";007;1.50\nd;;2\n', encoding="utf-8")
    rows = wb.rows(tmp_path / "mine.csv")
    assert rows[0]["prompt"][0]["content"] == "a; b\nc" and rows[0]["n"] == "1.50"
    assert [row["reward_model"]["ground_truth"] for row in rows] == ["007", None]
    assert rows.report().missing_answers == (1,)


def test_several_splits_and_what_is_no_table_are_refused() -> None:
    both = DatasetDict(train=Dataset(PLAIN), test=Dataset(PLAIN))
    with pytest.raises(
        DataError, match=r"several splits; expected one split; found train, test; take one: wb.rows\(x\['train'\]\)"
    ):
        wb.rows(both)
    assert len(wb.rows(both["train"])) == 12
    for wrong in ({"question": "x"}, 3, None, ["data.jsonl", {"question": "x"}]):
        with pytest.raises(DataError, match=r"expected (a path, a list of paths or dicts|an object \(a dict\))"):
            wb.rows(wrong)


def test_home_folders_and_lists_of_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    jsonl(PLAIN, tmp_path / "a.jsonl"), csv(PLAIN, tmp_path / "b.csv")
    rows = wb.rows(["~/a.jsonl", "~/b.csv"], limit=20)
    assert [rows.values("data_source").count(name) for name in ("a", "b")] == [12, 8]


# --- one meaning of a text --------------------------------------------------------------------------


def test_a_text_is_a_users_message_from_everywhere_and_raw_text_nowhere(tiny: str, tmp_path: Path) -> None:
    engine = wb.engines.local(tiny)
    path = jsonl(TRL, tmp_path / "mine.jsonl")
    pipe = wb.recipes.grpo(engine, reward=short, group_size=1, max_tokens=2)

    def read(rows: Rows) -> str:
        batch = wb.Stepper(pipe, rows.batch(1)).run(until="rollout").batch
        return engine.tokenizer.decode(batch["prompts"][0][batch["prompt_mask"][0].bool()])

    text = TRL[0]["prompt"]
    as_chat = {read(wb.rows(one, limit=1)) for one in (path, TRL, pd.DataFrame(TRL), Dataset(TRL))}
    assert as_chat == {f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"}
    bare = wb.rows(path, raw=True, limit=1)
    assert read(bare) == text == read(wb.rows(bare)) and bare[0]["prompt"] == text
    assert bare.prompt_lengths(engine.tokenizer) == [len(engine.tokenizer(text)["input_ids"])]
    assert "as bare text" in repr(bare) and "not used" in repr(bare.report(engine.tokenizer))
    for wrong in ({"system": "x"}, {"prompt": "answer", "without": ["prompt"]}):
        records = [{**TRL[0], "answer": [{"role": "user", "content": "x"}]}]
        with pytest.raises(DataError, match="expected a text, and no system="):
            wb.rows(records, raw=True, **wrong)


def test_the_report_shows_the_first_prompt_as_the_model_reads_it(tiny: str) -> None:
    tokenizer = wb.engines.local(tiny).tokenizer
    found = wb.rows(PLAIN).report(tokenizer, reward=wb.rewards.gsm8k)
    assert (
        f"<|im_start|>user\n{PLAIN[0]['question']}<|im_end|>" in found.first
        and repr(found.first) in dict(found.lines()).values()
    )
    assert found.scorable == "12 of 12 truths can score 1 by gsm8k" and found.template == "the tokenizer's own"
    mixed = [{**row, "answer": "four" if n < 2 else "4"} for n, row in enumerate(PLAIN)]
    assert "10 of 12 truths" in repr(wb.rows(mixed).report(reward=wb.rewards.gsm8k)) and "none" not in found.scorable
    with pytest.raises(DataError, match="0 of 12 truths can score 1 by gsm8k; found row 0"):
        wb.rows(TRL, answer="prompt", reward=wb.rewards.gsm8k)
    assert wb.rows(PLAIN, reward=short)[0]["data_source"] == "short"


# --- lengths ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer(tiny: str) -> Any:
    return wb.engines.local(tiny).tokenizer


CHATS = st.lists(
    st.tuples(st.sampled_from(["system", "user", "assistant"]), st.text(st.characters(codec="utf-8"), max_size=40)),
    min_size=1,
    max_size=4,
)


@settings(max_examples=40, deadline=None)
@given(chats=st.lists(st.one_of(CHATS, st.text(st.characters(codec="utf-8"), min_size=1)), min_size=1, max_size=4))
def test_no_prompt_is_longer_than_its_bound(tokenizer: Any, chats: list[Any]) -> None:
    made = [one if isinstance(one, str) else [{"role": role, "content": text} for role, text in one] for one in chats]
    pairs = zip(bounds(tokenizer, made), encode_all(tokenizer, made), strict=True)
    assert all(len(ids) <= most for most, ids in pairs)
