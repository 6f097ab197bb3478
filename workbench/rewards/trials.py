"""Rewards tried on saved rows, without a model or a GPU: `dry_run`, with the rows on which they disagree, and `pins`.

Pinned rows are samples with the score that they must get, kept in a file as test cases of a project's rewards.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import numbers
import os
import re
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from workbench.base.errors import DataError, RewardError, boundary, describe, first_line, nearest
from workbench.base.files import FORMAT, check_format, strict_json, write_text
from workbench.base.shown import Shown
from workbench.dataproto.core import DataProto
from workbench.dataproto.io import decode, encode
from workbench.datasets import files, records
from workbench.datasets.files import raw_lines
from workbench.rewards.base import BaseReward, padded, row_view, row_views
from workbench.rewards.reward import as_reward
from workbench.rewards.score import Score, Status, failed

if TYPE_CHECKING:
    import pandas as pd

RESPONSE = ("response_text", "response", "completion", "solution_str", "output", "text")
TRUTH = ("ground_truth", "gts", "answer", "label", "solution", "target")
PROMPT = ("raw_prompt", "prompt", "input", "question")
"""Column names that are understood, the likeliest first; `reward_model.ground_truth` comes before `TRUTH`."""


@dataclass(frozen=True)
class Judged:
    """One reward's score of one completion, and where the extracted answer stands in the response."""

    score: Score
    span: tuple[int, int] | None
    """(start, end) of the extracted answer in the response; None where it does not occur there."""


class DryRun(Shown):
    """The result of `dry_run`. Print it, or look at its tables `table`, `summary`, `disagreements` and `failures`."""

    def __init__(
        self,
        rows: Sequence[Mapping[str, Any]],
        judged: Mapping[str, Sequence[Judged]],
        bindings: Mapping[str, Mapping[str, str]] = MappingProxyType({}),
    ) -> None:
        self.rows = list(rows)
        self.judged = {name: list(found) for name, found in judged.items()}
        self.bindings = {name: dict(binding) for name, binding in bindings.items()}
        """Reward → its `binding`: argument → what it was filled from."""

    @property
    def table(self) -> pd.DataFrame:
        """One row per completion: `prompt`, `response`, `truth`, and the results of each reward.

        A column with a reward's name has its values (NaN: not scored); further columns are `<name>/answer`,
        `<name>/status`, `<name>/why` and `<name>/seconds`.
        """
        import pandas as pd

        shown = {"prompt": "prompt_text", "response": "response", "truth": "ground_truth"}
        columns: dict[str, Any] = {name: [row[key] for row in self.rows] for name, key in shown.items()}
        for name, judged in self.judged.items():
            facts = [one.score.to_json() for one in judged]
            columns[name] = [one.score.value if one.score.scored else float("nan") for one in judged]
            columns |= {f"{name}/{key}": [one[key] for one in facts] for key in ("answer", "status", "why", "seconds")}
        return pd.DataFrame(columns)

    @property
    def summary(self) -> pd.DataFrame:
        """One row per reward: `mean` over scored rows; counts of scored rows (`judged`), of each status, and of rows
        with an answer (`extracted`); median and longest seconds of scoring a row."""
        import pandas as pd

        lines = {}
        for name, judged in self.judged.items():
            scores = [one.score for one in judged]
            values = [score.value for score in scores if score.scored]
            lines[name] = {
                "mean": sum(values) / len(values) if values else float("nan"),
                "judged": len(values),
                **{status: n for status, n in Counter(score.status.value for score in scores).items()},
                "extracted": sum(score.answer is not None for score in scores),
                "median s": median([score.seconds for score in scores]) if scores else 0.0,
                "longest s": max((score.seconds for score in scores), default=0.0),
            }
        return pd.DataFrame.from_dict(lines, orient="index").fillna(dict.fromkeys(map(str, Status), 0))

    @property
    def disagreements(self) -> pd.DataFrame:
        """The rows of `table` where rewards differ: in their values, or in whether they scored the row."""
        frame = self.table
        values = frame[list(self.judged)]
        return frame[values.nunique(axis=1, dropna=False) > 1]

    @property
    def as_batch(self) -> DataProto:
        """The completions as a batch, for `views.samples`.

        `score` and `reward` are the first reward's, `reward/<name>` those of each (NaN: not scored), and
        `reward/differs` is 1 where rewards differ (`where={"reward/differs": 1}`).
        """
        frame = self.table
        first = [one.score for one in next(iter(self.judged.values()), [])]
        values = {f"reward/{name}": torch.tensor(frame[name].to_numpy(float)).float() for name in self.judged}
        differs = frame.index.isin(self.disagreements.index)
        return DataProto.from_single_dict(
            {
                "raw_prompt": [row["prompt"] for row in self.rows],
                "response_text": [row["response"] for row in self.rows],
                "reward_model": [{"ground_truth": row["ground_truth"]} for row in self.rows],
                "reward": torch.tensor([score.value for score in first]),
                "scored": torch.tensor([score.scored for score in first]),
                "score": first,
                **values,
                "reward/differs": torch.tensor(differs).float(),
            }
        )

    @property
    def failures(self) -> pd.DataFrame:
        """Counts of the reasons why rows are not *scored*: one row per reason, most frequent first, one column per
        reward."""
        import pandas as pd

        counts = {
            name: Counter(f"{one.score.status.value}: {one.score.why}" for one in found if one.score.status != "scored")
            for name, found in self.judged.items()
        }
        frame = pd.DataFrame(counts).fillna(0).astype(int)
        return frame.loc[frame.sum(axis=1).sort_values(ascending=False, kind="stable").index] if len(frame) else frame


def dry_run(functions: Any, completions: Any, *, limit: int | None = None) -> DryRun:
    """Score saved completions by one or more rewards.

    `functions` is a reward, a list of rewards, or a mapping name → reward (whatever `as_reward` takes). `completions`
    is a DataFrame, a jsonl, json or parquet file, a batch, a trace, or a list of dicts; columns are known by the names
    that workbench, verl and TRL write (`RESPONSE`, `TRUTH`, `PROMPT`). `limit` keeps the first rows. Failures of a
    reward are part of the result, not exceptions. Raises `DataError` where no column holds responses.

    Example:
        >>> run = wb.rewards.dry_run([wb.rewards.gsm8k, my_function], "completions.jsonl")  # doctest: +SKIP
        >>> run.disagreements  # doctest: +SKIP
    """
    rows = _rows(completions)[:limit]
    rewards = _rewards_by_name(functions)
    judged = {name: _judge(reward, rows) for name, reward in rewards.items()}
    return DryRun(rows, judged, {name: reward.binding for name, reward in rewards.items()})


def _rewards_by_name(functions: Any) -> dict[str, BaseReward]:
    if isinstance(functions, Mapping):
        return {str(name): as_reward(function) for name, function in functions.items()}
    several = functions if isinstance(functions, list | tuple) else [functions]
    named: dict[str, BaseReward] = {}
    for reward in map(as_reward, several):
        same = sum(name.rstrip("'") == reward.name for name in named)
        named[reward.name + "'" * same] = reward
    return named


def _judge(reward: BaseReward, rows: Sequence[Mapping[str, Any]]) -> list[Judged]:
    try:
        if rows:
            reward.check_signature(list(dict.fromkeys(name for row in rows for name in row["columns"])))
        scores = reward.judged(rows)
    except (RewardError, DataError) as error:
        scores = [failed(first_line(error, 500)) for _ in rows]
    return [Judged(score, span_of(score.answer, row["response"])) for score, row in zip(scores, rows, strict=True)]


def span_of(answer: str | None, text: str) -> tuple[int, int] | None:
    """Find (start, end) of an answer's last occurrence in a text; None where it does not occur literally (its commas
    were dropped, for example)."""
    start = text.rfind(answer) if answer else -1
    return (start, start + len(answer or "")) if start >= 0 else None


def _rows(completions: Any) -> list[dict[str, Any]]:
    batch = completions if isinstance(completions, DataProto) else getattr(completions, "batch", None)
    if isinstance(batch, DataProto):
        return row_views(batch)
    if isinstance(completions, str | Path):
        saved: Iterable[Any] = [record for path in files.find(completions) for record in files.read(path)]
    else:
        saved = records.table_records(completions)
    return [_row(record, number) for number, record in enumerate(saved)]


def _row(record: Any, number: int) -> dict[str, Any]:
    """Make the dict that rewards read (`row_view`) of a saved record: its prompt as a text or chat, its response as a
    text."""
    columns = records.cells_of(record, f"completion {number}")
    column = next((name for name in PROMPT if columns.get(name) is not None), None)
    if column is not None:
        chat = records.chat(columns[column], f"{column} of completion {number}")
        columns[column] = columns[column] if records.is_text(columns[column], chat) else chat
    name = next((name for name in RESPONSE if isinstance(columns.get(name), str | list)), None)
    if name is None:
        if there := next((name for name in RESPONSE if name in columns), None):
            raise DataError(f"{there} of completion {number}", expected="a text", found=describe(columns[there]))
        expected = f"a column with responses, named one of {', '.join(RESPONSE)}"
        raise DataError(f"saved completion {number}", expected=expected, found=f"columns {', '.join(columns)}")
    columns[name] = records.spoken(columns[name], f"{name} of completion {number}")
    judged = columns.get("reward_model")
    if isinstance(judged, str):
        with boundary(f"reading reward_model of completion {number}", DataError):
            judged = json.loads(judged)
    if not isinstance(judged, Mapping):
        truth = next((columns[name] for name in TRUTH if columns.get(name) is not None), None)
        judged = {"ground_truth": truth}
    prompt = columns[column] if column else None
    plain = {**columns, "reward_model": dict(judged), "raw_prompt": prompt}
    if not isinstance(prompt, list | None):
        plain |= {"raw_prompt": [{"role": "user", "content": str(prompt)}], "prompt_is_text": True}
    ids = columns.get("response_ids", columns.get("completion_ids"))
    return row_view(plain, columns[name], () if ids is None else ids, columns.get("prompt_ids"))


@dataclass(frozen=True, kw_only=True)
class PinResult:
    """The result of checking one pin with one reward: what the reward gave, and whether that is the expected score."""

    number: int
    pin: Pin
    got: float | None
    """The reward's value; None where it did not score the row."""
    status: str
    why: str
    holds: bool


@dataclass(frozen=True, kw_only=True, repr=False)
class PinCheck(Shown):
    """The result of `Pins.check`, with one `PinResult` for each pin. It is true when every pin holds."""

    reward: str
    """Name of the reward."""
    path: Path
    results: tuple[PinResult, ...]
    """One for each pin, in their order."""
    tolerance: float
    run: DryRun = field(repr=False)
    """The dry run on the pins, with its own tables."""

    @property
    def failed(self) -> tuple[PinResult, ...]:
        """The results of the pins that do not hold."""
        return tuple(one for one in self.results if not one.holds)

    @property
    def table(self) -> pd.DataFrame:
        """The dry run's table, one row per pin, with the additional columns `expected`, `holds` and `note`."""
        return self.run.table.assign(
            expected=[one.pin.expected for one in self.results],
            holds=[one.holds for one in self.results],
            note=[one.pin.note for one in self.results],
        )

    def __bool__(self) -> bool:
        return not self.failed

    def __len__(self) -> int:
        return len(self.results)


class Pins(Shown):
    """`pins(path)`: a project's pins, which are samples with the score that they must get, kept in a JSON-lines file.

    `add` pins where you look at samples, `check` a reward against them. A file that does not exist has no pins; the first
    `add` makes it. Raises `DataError` for a damaged line.

    The file has one line per pin, in the order of data source, prompt and response, so that two git branches that pin
    different rows merge. Another process may write at the same time; `reload` reads what it wrote.
    """

    def __init__(self, path: str | Path = "pins.jsonl") -> None:
        self.path = Path(path)
        self._pins = read_pins(self.path)

    def add(self, rows: Any, *, row: int | None = None, expected: float | str, note: str = "") -> Pin:
        """Pin a row: `expected` is the score that it must get, or `"unscored"` for a row that must not be scored.

        `rows` is a batch, a trace, a dry run, one row of them, or a record as `dry_run` takes it; `row` is the row's number
        where there are several. A pin with the same prompt, response and truth is replaced.
        Raises `DataError` for any other `expected`, a row that does not exist, and values that JSON cannot hold.
        """
        pin = pin_of(rows, row, expected, str(note))
        with locked(self.path):
            kept = [one for one in read_pins(self.path) if one.id != pin.id]
            self._write([*kept, pin])
        return pin

    def remove(self, which: int | str | Pin) -> Pin:
        """Remove a pin from the file and return it; `which` is its number in this object, its `id`, or the pin.

        Raises `DataError` where there is no such pin, or where another process has removed it.
        """
        if isinstance(which, int):
            pin: Pin | None = self[which]
        else:
            wanted = which.id if isinstance(which, Pin) else which
            pin = next((held for held in self._pins if held.id == wanted), None)
        if pin is None:
            do = "`list(pins)` shows the pinned rows and their ids"
            raise DataError(f"{self.path} has no pin with the id {describe(which)}", found=f"{len(self)} pins", do=do)
        with locked(self.path):
            there = read_pins(self.path)
            kept = [held for held in there if held.id != pin.id]
            self._write(kept)
        if len(kept) == len(there):
            raise DataError(f"pin {pin.id} is no longer in {self.path}: another process has removed it")
        return pin

    def reload(self) -> Pins:
        """Read the file again; returns this object."""
        self._pins = read_pins(self.path)
        return self

    def check(self, reward: Any, tolerance: float = 1e-6) -> PinCheck:
        """Score every pin by one reward (whatever `as_reward` takes), and compare with the expected scores within
        `tolerance`.

        Raises `DataError` where the file does not exist: a wrong path must not look like pins that hold.
        """
        if not self.path.is_file():
            raise DataError(f"there is no pins file {str(self.path)!r}", do="check the path, or pin a row first")
        if isinstance(reward, Mapping | list | tuple):
            raise DataError("reward of check", expected="one", found=describe(reward), do="call check once per reward")
        run = dry_run([reward], self)
        (name, judged), *_ = run.judged.items()
        results = []
        for number, (pin, score) in enumerate(zip(self, (one.score for one in judged), strict=True)):
            got = score.value if score.scored else None
            holds, status = pin.holds(got, tolerance), score.status.value
            results.append(PinResult(number=number, pin=pin, got=got, status=status, why=score.why, holds=holds))
        return PinCheck(reward=name, path=self.path, results=tuple(results), tolerance=tolerance, run=run)

    @property
    def batch(self) -> DataProto:
        """The pins as a batch that `dry_run` can score: a rollout's columns, and `expected` and `note`."""
        names = dict.fromkeys(name for pin in self for name in pin.columns)
        objects: dict[str, list[Any]] = {name: [pin.columns.get(name) for pin in self] for name in names}
        called = {"raw_prompt": "prompt", "response_text": "response"}
        for name in (*called, "data_source", "reward_model", "extra_info", "expected", "note"):
            objects[name] = [getattr(pin, called.get(name, name)) for pin in self]
        objects["uid"] = [digest(pin.prompt) for pin in self]
        ids = [pin.response_ids or () for pin in self]
        return DataProto(padded(ids) if any(ids) else {}, objects, {"source": str(self.path)})

    def _write(self, pins: list[Pin]) -> None:
        """Replace the file's contents by these pins, atomically; a symbolic link is followed and stays."""
        target = Path(os.path.realpath(self.path))
        ordered = sorted(pins, key=order_of)
        with boundary(f"writing {str(self.path)!r}", DataError):
            write_text(target, "".join(f"{pin_line(pin)}\n" for pin in ordered))
        self._pins = ordered

    def __len__(self) -> int:
        return len(self._pins)

    def __iter__(self) -> Iterator[Pin]:
        return iter(self._pins)

    def __getitem__(self, number: int) -> Pin:
        if not -len(self) <= number < len(self):
            raise DataError(f"{self.path} has no pin number {number}", expected=f"a number below {len(self)}")
        return self._pins[number]


pins = Pins

UNSCORED = "unscored"
"""Value of `expected` for a row that a reward must not score (*not_applicable* or *infra_error*)."""
_LARGEST = 1e300
_UNSEEN = re.compile("[\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]")
_ABOUT = ("run", "source", "step")
# columns that a pin holds in its own fields, and those that a run added to the row
_OF_A_PIN = (
    *("prompt", "raw_prompt", "response", "response_text", "response_ids", "completion_ids", "ground_truth"),
    *("reward_model", "data_source", "extra_info", "expected", "note", "uid", "score", "finish_reason"),
)


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Pin(Shown, Mapping[str, Any]):
    """One pinned row: a sample and the score that it must get. Also a mapping with the names that `dry_run`
    understands."""

    # in the order in which a line has them
    expected: float | str
    """The score, or `"unscored"`."""
    note: str = ""
    """Why it is pinned."""
    data_source: Any = None
    prompt: Any = None
    """The chat, or whatever the row had."""
    response: str
    reward_model: Mapping[str, Any] = field(default_factory=dict)
    """How the row is scored: {style, ground_truth}."""
    extra_info: Any = field(default_factory=dict)
    columns: Mapping[str, Any] = field(default_factory=dict)
    """The row's other objects, which rewards may ask for by name."""
    origin: Mapping[str, Any] = field(default_factory=dict)
    """Where it came from: run, step, row, uid, as far as the batch has them."""
    response_ids: tuple[int, ...] | None = None
    """Token ids of the response, where the batch had them."""

    @property
    def ground_truth(self) -> Any:
        """The right answer of the row."""
        return self.reward_model.get("ground_truth")

    @cached_property
    def id(self) -> str:
        """Hash of prompt, response and ground truth (twelve hex digits): pins with the same id are the same pin."""
        return digest([self.prompt, self.response, self.ground_truth])

    @cached_property
    def record(self) -> dict[str, Any]:
        """The pin as a dict with the names that `dry_run` understands."""
        hidden = ("columns", "origin", "response_ids")
        values = {one.name: getattr(self, one.name) for one in fields(self) if one.name not in hidden}
        ids = {} if self.response_ids is None else {"response_ids": list(self.response_ids)}
        return {**self.columns, **values, "ground_truth": self.ground_truth, **ids}

    def __getitem__(self, name: str) -> Any:
        return self.record[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.record)

    def __len__(self) -> int:
        return len(self.record)

    def holds(self, got: float | None, tolerance: float = 1e-6) -> bool:
        """Return whether a reward's value `got` (None: not scored) is the expected one, within `tolerance`."""
        if isinstance(self.expected, str):
            return got is None
        return got is not None and abs(got - self.expected) <= tolerance


# --- a row as a pin -----------------------------------------------------------------------------


def pin_of(rows: Any, row: int | None, expected: Any, note: str) -> Pin:
    """Make a pin from the arguments of `Pins.add`. Raises `DataError` for what cannot be pinned."""
    view, origin = _view(rows, row)
    columns = view["columns"]
    pin = Pin(
        expected=_expectation(expected),
        note=note,
        prompt=view.get("prompt"),
        response=view["response"],
        response_ids=tuple(map(int, view["response_ids"])) or None,
        reward_model=dict(columns.get("reward_model") or {"ground_truth": view.get("ground_truth")}),
        data_source=view.get("data_source"),
        extra_info=view.get("extra_info") or {},
        columns={name: value for name, value in columns.items() if _further(name, value, view["response"])},
        origin=origin if view.get("uid") is None else {**origin, "uid": view["uid"]},
    )
    pin_line(pin)  # what cannot be kept is refused here, before a file is touched
    return pin


def _view(rows: Any, row: int | None) -> tuple[Mapping[str, Any], dict[str, Any]]:
    """Return (the row to pin as rewards read it, where it came from), from any `rows` that `Pins.add` takes."""
    batch = rows if isinstance(rows, DataProto) else getattr(rows, "batch", None)
    if isinstance(batch, DataProto):
        return _of_batch(batch, row)
    if isinstance(rows, DryRun):
        rows = rows.rows[_number(row, len(rows.rows))]
    if hasattr(rows, "non_tensor_batch"):  # a row of a batch: its tensors without their first dim
        tensors = {name: tensor[None] for name, tensor in rows.batch.items()}
        objects = {name: [value] for name, value in rows.non_tensor_batch.items()}
        view, origin = _of_batch(DataProto(tensors, objects, rows.meta_info), 0)
        return view, {name: value for name, value in origin.items() if name != "row"}
    if not isinstance(rows, Mapping):
        found = type(rows).__name__
        raise DataError("the row to pin", expected="a batch, trace or dry run with row=, or a dict", found=found)
    if isinstance(rows.get("columns"), Mapping) and "prompt_text" in rows:
        view = rows  # a row of a dry run: a view already
    else:
        (view,) = dry_run({}, [rows]).rows
    return view, {} if row is None else {"row": int(row)}


def _of_batch(batch: DataProto, row: int | None) -> tuple[Mapping[str, Any], dict[str, Any]]:
    number = _number(row, len(batch))
    if "response_text" not in batch:
        found = f"columns {', '.join(batch.columns)}"
        raise DataError("the row to pin", expected="column response_text", found=found, do="run the rollout first")
    # of a batch on disk the row alone is read
    wanted = [name for name in ("responses", "response_mask", "step", "policy_version") if name in batch.batch]
    tensors = {name: batch.batch.part(name, number, number + 1) for name in wanted}
    objects = {name: batch.non_tensor_batch.part(name, number, number + 1) for name in batch.non_tensor_batch}
    single = DataProto(tensors, objects)
    (view,) = row_views(single)
    origin = {name: batch.meta_info[name] for name in _ABOUT if batch.meta_info.get(name) is not None}
    for name in ("step", "policy_version"):
        if name in batch.batch:
            origin[name] = single[name].item()
    return view, {**origin, "row": number}


def _number(row: Any, rows: int) -> int:
    """Return the row's number from 0, also for one counted from the end; None stands for the only row. Raises
    `DataError` for others."""
    number = 0 if row is None and rows == 1 else row
    if not isinstance(number, numbers.Integral) or isinstance(number, bool) or not -rows <= number < rows:  # type: ignore[operator]
        raise DataError("row=, the number of the row to pin", expected=f"a number below {rows}", found=describe(row))
    return int(number) % rows


def _further(name: str, value: Any, response: str) -> bool:
    """Return whether a pin keeps this column beside its own fields, as a reward may ask for it."""
    again = isinstance(value, str) and value == response
    return value is not None and not again and name not in _OF_A_PIN and not name.startswith("reward_extra/")


def _expectation(expected: Any) -> float | str:
    if isinstance(expected, str) and expected == UNSCORED:
        return UNSCORED
    number: Any = expected.item() if hasattr(expected, "item") else expected
    if isinstance(number, numbers.Real) and -_LARGEST < number < _LARGEST:  # type: ignore[operator]
        return float(number)
    wanted = f"a finite number, or {UNSCORED!r} for a row that must not be scored"
    raise DataError("expected=, the score that a pinned row must get", expected=wanted, found=describe(expected))


# --- a pin as a line ----------------------------------------------------------------------------


def digest(value: Any) -> str:
    """Hash a plain value: twelve hex digits of BLAKE2b over its JSON."""
    text = json.dumps(encode(value), sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()


def order_of(pin: Pin) -> tuple[str, str, str, str]:
    """Return the sort key of a pin in its file: data source, prompt, response, id."""
    return str(pin.data_source or ""), json.dumps(encode(pin.prompt), sort_keys=True), pin.response, pin.id


def pin_line(pin: Pin) -> str:
    """Write a pin as one line of JSON without its empty fields. Raises `DataError` for values that JSON cannot hold."""
    kept: dict[str, Any] = {"format": FORMAT}
    for name in (one.name for one in fields(pin)):
        value = getattr(pin, name)
        try:
            kept[name] = encode(list(value) if name == "response_ids" and value else value)
        except TypeError as cause:
            expected = "plain Python or NumPy values"
            raise DataError(f"{name} of the row cannot be pinned", expected=expected, found=cause) from cause
    needed = ("format", "expected", "note", "response")
    kept = {name: value for name, value in kept.items() if name in needed or value not in (None, {})}
    text = json.dumps(kept, ensure_ascii=False, allow_nan=False)
    # what would not show, or would turn the line around, is escaped
    return _UNSEEN.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def read_pins(path: Path) -> list[Pin]:
    """Read the pins of a file, sorted as in the file; [] where there is no file.

    Raises `DataError` for a damaged line, and for two lines that expect different scores of one row.
    """
    seen: dict[str, tuple[str, Pin]] = {}
    with boundary(f"reading {str(path)!r}", DataError):
        for place, raw in raw_lines(path) if path.exists() else ():
            pin = _parse_pin(place, raw)
            there, other = seen.get(pin.id, (place, pin))
            if other.expected != pin.expected:
                both = f"{other.expected} in {there} and {pin.expected} in {place}"
                raise DataError("one row is pinned twice", found=both, do="delete one of the lines")
            seen[pin.id] = (place, pin)
    return sorted((pin for _, pin in seen.values()), key=order_of)


def _parse_pin(place: str, raw: bytes) -> Pin:
    try:
        document = strict_json(raw.decode())
    except (ValueError, RecursionError) as cause:
        merge = raw[:7] in (b"<<<<<<<", b"=======", b">>>>>>>")
        do = "resolve the git merge conflict: keep the lines of both sides" if merge else "repair or delete the line"
        raise DataError(f"{place} is not a pin", found=first_line(cause), do=do) from cause
    if not isinstance(document, dict):
        raise DataError(f"{place} is not a pin", expected="a JSON object", found=describe(document))
    with boundary(f"{place}: reading a pin", DataError):
        return _restored(place, decode(document))


def _restored(place: str, document: dict[str, Any]) -> Pin:
    check_format(document.pop("format", None), f"{place}: a pin", DataError)
    known = [one.name for one in fields(Pin)]
    for strange in document.keys() - known:
        close = nearest(strange, known)
        raise DataError(f"{place}: a pin has no field {strange!r}", do=f"did you mean {close!r}?" if close else None)
    for name, kind in _KINDS.items():
        if not isinstance(document.get(name, kind()), kind) or (name == "response" and name not in document):
            what, expected = f"{place}: field {name!r} of a pin", f"a {kind.__name__}"
            raise DataError(what, expected=expected, found=describe(document.get(name)))
    try:
        score = _expectation(document.pop("expected", None))
    except DataError as cause:
        raise DataError(f"{place}: {cause}") from cause
    ids = document.pop("response_ids", None)
    return Pin(**document, expected=score, response_ids=None if ids is None else tuple(map(int, ids)))


_KINDS = {"note": str, "response": str, "reward_model": dict, "columns": dict, "origin": dict}


WAIT_SECONDS = 10.0
"""Seconds that a writer of a pins file waits for another writer, which needs milliseconds."""


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Context manager: locks a pins file for writing, against threads and processes. A lock ends with its process.

    Raises `DataError` where the folder cannot be written, or another writer keeps the lock for `WAIT_SECONDS`.
    """
    target = Path(os.path.realpath(path))
    lock = target.with_name(f".{target.name}.lock")
    with boundary(f"writing {str(path)!r}", DataError):
        target.parent.mkdir(parents=True, exist_ok=True)
        deadline = time.monotonic() + WAIT_SECONDS
        while (file := _try_lock(lock)) is None:
            if time.monotonic() > deadline:
                what = f"another process has been writing for {WAIT_SECONDS:g} s"
                raise DataError(f"lock file {lock} cannot be taken", found=what, do="end that process, or try again")
            time.sleep(0.01)
    try:
        yield
    finally:
        lock.unlink(missing_ok=True)
        os.close(file)


def _try_lock(lock: Path) -> int | None:
    """Lock a lock file and return its descriptor; None while another writer holds it, or has removed it before the lock
    was ours."""
    file, held = os.open(lock, os.O_RDWR | os.O_CREAT, 0o666), False
    try:
        with contextlib.suppress(BlockingIOError, PermissionError, FileNotFoundError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            held = os.path.samestat(os.fstat(file), os.stat(lock))
    finally:
        if not held:
            os.close(file)
    return file if held else None
