"""Tests that every door for data must pass: inherit `DoorContract`, or `RowsContract` where it gives `Rows`::

    class TestMyFormat(RowsContract):
        def write(self, records, folder):
            return my_writer(records, folder / "rows.mine")

        def read(self, source):
            return wb.datasets.Rows(my_reader(source))

A failing assertion says what is wrong.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from workbench.base.errors import WorkbenchError
from workbench.dataproto.columns import COLUMNS
from workbench.datasets.pictures import IMAGES
from workbench.datasets.records import MEDIA, ROLES, chat
from workbench.testing import VALUES, answer

GOOD: dict[str, Any] = {"prompt": "2+2?", "response": "#### 4", "reward_model": {"ground_truth": "4"}}
"""A record that every door takes."""
_TEXTS = {"one string": ["a", "b"], "typed": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
_PICTURES: dict[str, Any] = {
    "part": [{"type": "image", "image": "x.png"}, {"type": "text", "text": "a"}],
    "url": [{"type": "image_url", "image_url": {"url": "x.png"}}],
    "number": 7,
    "dict": {"text": "a"},
}


class DoorContract:
    """Pytest tests of a reader of prompts from files or objects: inherit this class and override `write` and `read`."""

    def write(self, records: list[dict[str, Any]], folder: Path) -> Any:
        """Write records in the reader's format and return the file or object; may raise where the format cannot hold
        them."""
        raise NotImplementedError("override write: return the records as a file in the folder, or an object")

    def read(self, source: Any) -> Any:
        """Read the file or object that `write` returned."""
        raise NotImplementedError("override read: return what your reader reads from the source")

    def chats(self, found: Any) -> list[Any]:
        """Return the prompts that were read, as chats."""
        return list(found["raw_prompt"])

    def kept(self, text: Any) -> Any:
        """Return what a text becomes in a format that cannot hold every text; by default the text itself."""
        return text

    def _written(self, records: list[dict[str, Any]], folder: Path) -> Any:
        try:
            return self.write(records, folder)
        except (ValueError, TypeError, OverflowError, NotImplementedError):
            return None

    def outcomes(self, cases: dict[str, dict[str, Any]], folder: Path) -> Iterator[tuple[str, Any]]:
        """Read each record that the format can hold: yields (name, the result, or the refusal, which must name the
        row)."""
        for number, (name, record) in enumerate(cases.items()):
            place = folder / str(number)
            place.mkdir()
            source = self._written([{**GOOD, **record}], place)
            if source is None:
                continue  # this format has no such value
            outcome = answer(partial(self.read, source))
            if isinstance(outcome, WorkbenchError):
                if str(outcome).startswith(str(source)):
                    continue  # the file is not of its format: NaN in JSON
                assert any(place in str(outcome) for place in ("row 0", "completion 0", ":1")), (
                    f"{name}: a refusal names the row; found {outcome}"
                )
            yield name, outcome

    def test_a_prompt_is_the_text_that_was_given_or_is_refused(self, tmp_path: Path) -> None:
        """Only a text becomes a prompt: a number, a dict or a missing cell is refused."""
        for name, outcome in self.outcomes({name: {"prompt": value} for name, value in VALUES.items()}, tmp_path):
            if not isinstance(outcome, WorkbenchError):
                expected = [None] if VALUES[name] is None else [[{"role": "user", "content": self.kept(VALUES[name])}]]
                chats = self.chats(outcome)
                missing = name in ("NaN", "None") and chats in ([None], [])
                assert missing or chats == expected, f"{name} became the prompt {chats!r:.200}"

    def test_a_message_has_a_known_role_and_text(self, tmp_path: Path) -> None:
        """Messages whose content, role or tool calls have any kind of value are read unchanged, or refused."""
        chats = {f"content {name}": {"role": "user", "content": value} for name, value in VALUES.items()}
        chats |= {f"role {name}": {"role": value, "content": "x"} for name, value in VALUES.items()}
        chats |= {f"calls {name}": {"role": "user", "content": "x", "tool_calls": one} for name, one in VALUES.items()}
        for name, found in self.outcomes({name: {"prompt": [turn]} for name, turn in chats.items()}, tmp_path):
            if not isinstance(found, WorkbenchError):
                ((turn,),) = self.chats(found)
                assert turn["role"] in ROLES and turn["content"] == self.kept(chats[name]["content"]), (
                    f"{name} became {turn!r:.200}"
                )
                assert not turn.get("tool_calls"), f"{name}: a user calls no tool"

    def test_parts_of_text_are_joined_and_others_refused(self, tmp_path: Path) -> None:
        """A content's parts of text are joined by newlines; a part with a picture is refused."""
        turns = {
            name: {"prompt": [{"role": "user", "content": parts}]} for name, parts in {**_TEXTS, **_PICTURES}.items()
        }
        for name, outcome in self.outcomes(turns, tmp_path):
            refused = isinstance(outcome, WorkbenchError)
            assert refused == (name in _PICTURES), f"{name}: {outcome!r:.200}"
            assert refused or self.chats(outcome)[0][0]["content"] == "a\nb"

    def test_a_chat_as_json_text_is_that_chat(self, tmp_path: Path) -> None:
        """A prompt that is the JSON text of a chat is read as that chat; text that only looks like a chat is refused."""
        texts = {
            "chat": '[{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]',
            "message": '{"content": "u", "role": "user"}',
            "parts": '[{"type": "text", "text": "u"}]',
            "repr": "[{'role': 'user', 'content': 'u'}]",
            "cut": '[{"role": "user", "content": "u',
            "picture": '[{"type": "image", "image": "x.png"}]',
            "a task": '[{"name": "x"}] has how many names?',
        }
        cases = {name: {"prompt": text} for name, text in texts.items()}
        outcomes = dict(self.outcomes(cases, tmp_path))
        chats = {name: self.chats(one)[0] for name, one in outcomes.items() if not isinstance(one, WorkbenchError)}
        assert outcomes.keys() - chats.keys() == {"repr", "cut", "picture"}, f"refused {outcomes}"
        assert [turn["role"] for turn in chats["chat"]] == ["system", "user"] and chats["chat"][1]["content"] == "u"
        assert chats["message"] == chats["parts"] == [{"role": "user", "content": "u"}]
        assert chats["a task"] == [{"role": "user", "content": texts["a task"]}]

    def test_a_missing_cell_is_not_a_text(self, tmp_path: Path) -> None:
        """None or NaN in one row, beside a text in another, never becomes the text "None" or "nan"."""
        for place, value in enumerate((None, float("nan"))):
            (tmp_path / str(place)).mkdir()
            source = self._written([GOOD, {**GOOD, "prompt": value}], tmp_path / str(place))
            if source is None:
                continue  # this format has no such value
            found = answer(partial(self.read, source))
            assert isinstance(found, WorkbenchError) or self.chats(found)[1] is None, f"{value} became {found!r:.200}"


class RowsContract(DoorContract):
    """Pytest tests of a reader that returns `Rows`: of prompts and of the other columns."""

    def chats(self, found: Any) -> list[Any]:
        """Return the prompts of the rows."""
        return found.values("prompt")

    def test_pictures_are_refused_by_column_and_row(self, tmp_path: Path) -> None:
        """A column of pictures, films or sounds is refused, with its name and row, unless its cell is empty."""
        full = {name: {name: [{"bytes": "x", "path": None}]} for name in MEDIA}
        for name, outcome in self.outcomes(full, tmp_path):
            assert isinstance(outcome, WorkbenchError) and repr(name) in str(outcome), f"{name}: {outcome!r:.200}"
        (tmp_path / "empty").mkdir()
        nothing: list[Any] = [None, [], {}, "", [None], {"path": None}]
        free = [name for name in MEDIA if name not in COLUMNS or name == IMAGES]  # no stage writes it
        cases = {f"{name} {value}": {name: value} for name in free for value in nothing}
        for name, outcome in self.outcomes(cases, tmp_path / "empty"):
            assert not isinstance(outcome, WorkbenchError), f"{name} holds no picture: {outcome}"

    def test_a_placeholder_of_an_empty_column_is_refused(self, tmp_path: Path) -> None:
        """A prompt with `<image>` whose row has no picture is refused."""
        cases: dict[str, dict[str, Any]] = {"asked": {"prompt": "<image> What is it?", "images": [], "image": None}}
        ((_, found),) = self.outcomes(cases, tmp_path)
        assert isinstance(found, WorkbenchError) and "<image>" in str(found)

    def test_the_columns_of_verls_schema_are_what_they_must_be(self, tmp_path: Path) -> None:
        """`reward_model` and `extra_info` become dicts, also where the file has them as JSON text; `data_source` is a
        text."""
        names = ("reward_model", "extra_info", "data_source")
        for name, outcome in self.outcomes({f"{n}: {k}": {n: v} for n in names for k, v in VALUES.items()}, tmp_path):
            column = name.split(":")[0]
            if isinstance(outcome, WorkbenchError):
                assert column in str(outcome) or "ground truth" in str(outcome), (
                    f"{name}: a refusal names the column: {outcome}"
                )
                continue
            (cell,) = outcome.values(column)
            assert isinstance(cell, str | None if column == "data_source" else dict | None), (
                f"{name} became {cell!r:.99}"
            )
        (tmp_path / "text").mkdir()
        texts = {"reward_model": '{"ground_truth": "4"}', "extra_info": '{"index": 3}'}
        ((_, outcome),) = self.outcomes({"as JSON text": texts}, tmp_path / "text")
        assert outcome[0]["reward_model"] == {"ground_truth": "4"} and outcome[0]["extra_info"] == {"index": 3}

    def test_truths_of_any_kind_are_counted(self, tmp_path: Path) -> None:
        """The report counts the ground truths by kind; a missing one is counted, or the row is refused."""
        cases = {name: {"reward_model": {"ground_truth": value, "style": "model"}} for name, value in VALUES.items()}
        for name, found in self.outcomes(cases, tmp_path):
            assert not isinstance(found, WorkbenchError) and sum(found.report().truths.values()) == 1, (
                f"{name}: {found}"
            )

    def test_the_same_row_thrice_is_three_rows(self, tmp_path: Path) -> None:
        """Repeated rows are all kept, the report counts them, and a chat stays as it is when it is read again."""
        found = self.read(self.write([GOOD] * 3, tmp_path))
        assert len(found) == 3 and len(found.report().duplicates) == 2
        assert [chat(one, "again") for one in self.chats(found)] == self.chats(found)
