"""Data sets by name, from a hub on loopback: which split, which commit, offline, private, missing; no script runs."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from huggingface_hub import constants
from support.hub import FakeHub, fake_hub

import workbench as wb
from workbench.base.errors import DataError
from workbench.datasets import hub as names


def parquet(*questions: str) -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.table({"question": questions, "answer": [f"so #### {len(one)}" for one in questions]}), file)
    return file.getvalue()


EXPORTED = {
    "main/train/0000.parquet": parquet("1+1?", "2+2?"),
    "main/train/0001.parquet": parquet("3+3?"),
    "main/test/0000.parquet": parquet("4+4?"),
    "socratic/train/0000.parquet": parquet("who?"),
}
EVIL = b"raise SystemExit('the script of a repository ran')"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeHub]:
    with fake_hub(monkeypatch, tmp_path / "home") as found:
        found.add("dataset", "openai/gsm8k", {"gsm8k.py": EVIL, "README.md": b"-"})
        found.add("dataset", "openai/gsm8k", EXPORTED, names.EXPORT)
        yield found


def questions(rows: wb.datasets.Rows) -> list[str]:
    return [row["prompt"][0]["content"] for row in rows]


def test_a_split_is_read_by_name_and_its_commit_is_recorded(hub: FakeHub) -> None:
    rows = wb.rows("openai/gsm8k:main/train")
    commit = hub.repos["dataset", "openai/gsm8k"].refs[names.EXPORT]
    assert questions(rows) == ["1+1?", "2+2?", "3+3?"] and rows[0]["reward_model"]["ground_truth"] == "4"
    assert rows.source == f"openai/gsm8k:main/train@{commit}" and {row["data_source"] for row in rows} == {
        "openai/gsm8k"
    }
    hub.add("dataset", "openai/gsm8k", {"main/train/0000.parquet": parquet("new?")}, names.EXPORT)
    assert questions(wb.rows("openai/gsm8k:main/train")) == ["new?"]
    assert wb.rows(rows.source) == rows, "a recorded name opens the same rows"
    assert questions(wb.rows("hf://datasets/openai/gsm8k:socratic@" + commit)) == ["who?"]
    assert not hub.asked(r"gsm8k\.py")


def test_several_splits_are_listed_and_wrong_ones_refused_with_the_nearest(hub: FakeHub) -> None:
    with pytest.raises(
        DataError, match=r"several splits.*main/test, main/train, socratic/train.*wb.rows\('openai/gsm8k:main/"
    ):
        wb.rows("openai/gsm8k")
    with pytest.raises(DataError, match=r"several splits; expected one split; found main/test, main/train;"):
        wb.rows("openai/gsm8k:main")
    assert questions(wb.rows("openai/gsm8k:test")) == ["4+4?"]
    with pytest.raises(DataError, match="did you mean 'main/train'"):
        wb.rows("openai/gsm8k:main/trian")
    with pytest.raises(DataError, match=r"no data set 'openai/gsm8kk'.*did you mean openai/gsm8k\?"):
        wb.rows("openai/gsm8kk:main/train")
    with pytest.raises(DataError, match="no revision 'v9'"):
        wb.rows("openai/gsm8k:main/train@v9")


def test_files_are_downloaded_once_and_only_as_far_as_rows_are_taken(hub: FakeHub) -> None:
    wb.rows("openai/gsm8k:main/train", limit=2)
    assert hub.asked("GET datasets/.*0000.parquet") and not hub.asked("0001.parquet")
    wb.rows("openai/gsm8k:main/train")
    assert len(hub.asked("GET datasets/.*main/train/0000.parquet")) == 1


def test_offline_it_comes_from_the_cache(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    there = wb.rows("openai/gsm8k:main/train")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub.seen.clear()
    again = wb.rows("openai/gsm8k:main/train")
    assert again == there and again.source == there.source and wb.rows(there.source) == there
    with pytest.raises(DataError, match="no such data set in the local cache .*HF_HUB_OFFLINE.*"):
        wb.rows("openai/other:main/train")
    with pytest.raises(DataError, match=r"did you mean openai/gsm8k\?"):
        wb.rows("openai/gsm8kk")
    assert not hub.seen, "nothing is sent where the hub is said to be away"


def test_a_hub_that_breaks_leaves_what_the_cache_has(hub: FakeHub) -> None:
    there = wb.rows("openai/gsm8k:main/train")
    hub.broken["."] = [400] * 99
    assert wb.rows("openai/gsm8k:main/train") == there
    with pytest.raises(DataError, match="no data set 'some/other'.*the hub answered"):
        wb.rows("some/other")


def test_private_data_is_read_by_the_hub_s_own_login(hub: FakeHub, tmp_path: Path) -> None:
    hub.add("dataset", "me/mine", {"rows.jsonl": json.dumps({"prompt": "hi", "answer": "a"}).encode()}, private=True)
    assert questions(wb.rows("me/mine")) == ["hi"]
    (tmp_path / "home" / "token").unlink()
    with pytest.raises(DataError, match="or a private one.*hf auth login"):
        wb.rows("me/mine")


def test_without_an_export_the_repository_s_own_files_are_read_and_no_script(hub: FakeHub) -> None:
    hub.add("dataset", "a/scripted", {"scripted.py": EVIL, "README.md": b"-"})
    with pytest.raises(DataError, match="never run"):
        wb.rows("a/scripted")
    line = json.dumps({"prompt": "hi", "answer": "a"}).encode()
    files = {"data/train-00000-of-00002.parquet": parquet("1?"), "data/train-00001-of-00002.parquet": parquet("2?")}
    old = hub.add("dataset", "a/files", {**files, "easy_test.csv": b"question,answer\nq,1\n", "extra/odd.jsonl": line})
    hub.add("dataset", "a/files", {"data/train-00000-of-00001.parquet": parquet("later?")})
    assert questions(wb.rows(f"a/files:train@{old}")) == ["1?", "2?"] and questions(wb.rows("a/files")) == ["later?"]
    assert questions(wb.rows(f"a/files:extra/odd.jsonl@{old}")) == ["hi"]
    assert questions(wb.rows(f"a/files:default/test@{old}")) == ["q"]


def test_sizes_are_bounded(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names, "SIZE_LIMIT", 100)
    with pytest.raises(DataError, match="openai/gsm8k:main/test; expected at most"):
        wb.rows("openai/gsm8k:main/test")
    assert not hub.asked("GET datasets/")


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("openai/gsm8k", ("openai/gsm8k", "", None)),
        ("a/b:c/d@e", ("a/b", "c/d", "e")),
        ("hf://a/b@refs/pr/1", ("a/b", "", "refs/pr/1")),
        ("data/arith", None),
        ("nosuch/file.parquet", None),
        ("nosuch/*.parquet", None),
        ("a/b/c", None),
        ("rows", None),
        ("a/b c", None),
    ],
)
def test_names_are_told_from_paths(text: str, name: tuple[str, str, str | None] | None) -> None:
    found = names.named(text)
    assert (found and (found.name, found.part, found.revision)) == name
