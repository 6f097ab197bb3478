"""One pinned row: what a reward needs to judge it again, what it must say of it, and its line in the file."""

from __future__ import annotations

import hashlib
import json
import numbers
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from workbench.dataproto import DataProto
from workbench.dataproto.io import decode, encode
from workbench.errors import DataError, boundary, describe, message, nearest
from workbench.rewards.base import row_views
from workbench.rewards.dry_run import DryRun, dry_run
from workbench.rewards.pin_files import line_of, read_lines

FORMAT = 1
UNSCORED = "unscored"
"""The expectation that a reward says nothing: not applicable, or its machinery failed."""
_LARGEST = 1e300
_ABOUT = ("run", "source", "step")
# what a pin has under names of its own
_OWN = (
    *("prompt", "raw_prompt", "response", "response_text", "response_ids", "completion_ids"),
    *("ground_truth", "reward_model", "data_source", "extra_info", "expected", "note"),
)
_SAID = ("uid", "score", "finish_reason")  # of that run, not of the row


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Pin(Mapping[str, Any]):
    """One row and what a reward must say of it. It reads as a record with the names that `dry_run` understands."""

    expected: float | str
    """The score, or `"unscored"`."""
    note: str = ""
    """Why it is pinned."""
    prompt: Any = None
    """The chat, or whatever the row had."""
    response: str
    response_ids: tuple[int, ...] | None = None
    """Token ids of the response, where the batch had them."""
    reward_model: Mapping[str, Any] = field(default_factory=dict)
    """How the row is judged: {style, ground_truth}."""
    data_source: Any = None
    extra_info: Any = field(default_factory=dict)
    columns: Mapping[str, Any] = field(default_factory=dict)
    """The row's other objects, which rewards may ask for by name."""
    origin: Mapping[str, Any] = field(default_factory=dict)
    """Where it came from: run, step, row, uid, as far as the batch said."""

    @property
    def ground_truth(self) -> Any:
        """The truth that the row is judged by."""
        return self.reward_model.get("ground_truth")

    @cached_property
    def id(self) -> str:
        """Twelve hex digits of prompt, response and truth: pins that share them are one."""
        return digest([self.prompt, self.response, self.ground_truth])

    @cached_property
    def record(self) -> dict[str, Any]:
        """As `dry_run` reads it."""
        ids = None if self.response_ids is None else list(self.response_ids)
        return {
            **self.columns,
            "prompt": self.prompt,
            "response": self.response,
            "ground_truth": self.ground_truth,
            "reward_model": dict(self.reward_model),
            "data_source": self.data_source,
            "extra_info": self.extra_info,
            **({} if ids is None else {"response_ids": ids, "completion_ids": ids}),
            "expected": self.expected,
            "note": self.note,
        }

    def __repr__(self) -> str:
        from workbench.views.pins import pin_text

        return pin_text(self)

    def _repr_html_(self) -> str:
        from workbench.views.pins import pin_html

        return pin_html(self)

    def __getitem__(self, name: str) -> Any:
        return self.record[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.record)

    def __len__(self) -> int:
        return len(self.record)

    def holds(self, got: float | None, tolerance: float = 1e-6) -> bool:
        """Whether a score (None: no judgement) is what was expected."""
        if isinstance(self.expected, str):
            return got is None
        return got is not None and abs(got - self.expected) <= tolerance


# --- a row as a pin -----------------------------------------------------------------------------


def pin_of(rows: Any, row: int | None, expected: Any, note: str) -> Pin:
    """A row of a batch, a trace, a dry run or a record as a pin; see `Pins.add`. Raises `DataError`."""
    view, origin = _view(rows, row)
    pin = _pin(view, _expectation(expected), note, origin)
    pin_line(pin)  # what cannot be kept is refused here, before a file is touched
    return pin


def _view(rows: Any, row: int | None) -> tuple[Mapping[str, Any], dict[str, Any]]:
    """(the row as rewards see it, where it came from)."""
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
        raise DataError(message("a row to pin", expected="a batch and row=, a trace, or a record", found=found))
    if isinstance(rows.get("columns"), Mapping) and "prompt_text" in rows:
        view = rows  # a row of a dry run: a view already
    else:
        (view,) = dry_run({}, [rows]).rows
        ids = rows.get("response_ids", rows.get("completion_ids"))
        view = view if ids is None else {**view, "response_ids": list(ids)}
    own = {} if row is None else {"row": int(row)}
    return view, own | ({"uid": view["uid"]} if view.get("uid") is not None else {})


def _of_batch(batch: DataProto, row: int | None) -> tuple[Mapping[str, Any], dict[str, Any]]:
    number = _number(row, len(batch))
    if "response_text" not in batch:
        found = ", ".join(batch.columns)
        raise DataError(message("a row to pin", expected="response_text: run the rollout first", found=found))
    # of a batch on disk the row alone is read
    tensors = {
        name: batch.batch.part(name, number, number + 1)
        for name in ("responses", "response_mask", "step", "policy_version")
        if name in batch.batch
    }
    objects = {name: batch.non_tensor_batch.part(name, number, number + 1) for name in batch.non_tensor_batch}
    one = DataProto(tensors, objects)
    (view,) = row_views(one)
    origin = {name: batch.meta_info[name] for name in _ABOUT if batch.meta_info.get(name) is not None}
    for name in ("step", "policy_version"):
        if name in batch.batch:
            origin[name] = one[name].item()
    return view, {**origin, "row": number, **({"uid": view["uid"]} if view["uid"] is not None else {})}


def _number(row: Any, rows: int) -> int:
    """The number of the row that is meant, from 0; the only one need not be named."""
    number = 0 if row is None and rows == 1 else row
    if not isinstance(number, numbers.Integral) or isinstance(number, bool) or not -rows <= number < rows:  # type: ignore[operator]
        raise DataError(message("row to pin", expected=f"a number below {rows}", found=describe(row)))
    return int(number) % rows


def _pin(view: Mapping[str, Any], expected: float | str, note: str, origin: Mapping[str, Any]) -> Pin:
    columns = view["columns"]
    judged = columns.get("reward_model") or {"ground_truth": view.get("ground_truth")}
    return Pin(
        expected=expected,
        note=note,
        prompt=view.get("prompt"),
        response=view["response"],
        response_ids=tuple(map(int, view["response_ids"])) or None,
        reward_model=dict(judged),
        data_source=view.get("data_source"),
        extra_info=view.get("extra_info") or {},
        columns={name: value for name, value in columns.items() if _further(name, value, view["response"])},
        origin=dict(origin),
    )


def _further(name: str, value: Any, response: str) -> bool:
    """Whether a reward may want this column beside what every pin has."""
    again = isinstance(value, str) and value == response
    return value is not None and not again and name not in (*_OWN, *_SAID) and not name.startswith("reward_extra/")


def _expectation(expected: Any) -> float | str:
    if isinstance(expected, str) and expected == UNSCORED:
        return UNSCORED
    number: Any = expected.item() if hasattr(expected, "item") else expected
    if isinstance(number, numbers.Real) and -_LARGEST < number < _LARGEST:  # type: ignore[operator]
        return float(number)
    wanted = f"a finite number, or {UNSCORED!r} for a row that must have no judgement"
    raise DataError(message("expected=", expected=wanted, found=describe(expected)))


# --- a pin as a line ----------------------------------------------------------------------------


def digest(value: Any) -> str:
    """Twelve hex digits over plain values."""
    text = json.dumps(encode(value), sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()


def order_of(pin: Pin) -> tuple[str, str, str, str]:
    """Where it stands in the file, whoever pinned it and when."""
    return str(pin.data_source or ""), json.dumps(encode(pin.prompt), sort_keys=True), pin.response, pin.id


def pin_line(pin: Pin) -> str:
    """A pin as its line; what it does not have is left out. Raises `DataError` for what JSON cannot keep."""
    document = {
        "format": FORMAT,
        "expected": pin.expected,
        "note": pin.note,
        "data_source": pin.data_source,
        "prompt": pin.prompt,
        "response": pin.response,
        "reward_model": dict(pin.reward_model),
        "extra_info": pin.extra_info,
        "columns": dict(pin.columns),
        "origin": dict(pin.origin),
        "response_ids": None if pin.response_ids is None else list(pin.response_ids),
    }
    kept = {}
    for name, value in document.items():
        try:
            kept[name] = encode(value)
        except TypeError as cause:
            expected = "plain values or NumPy"
            raise DataError(
                message(f"{name} of the row cannot be pinned", expected=expected, found=f"a {cause}")
            ) from cause
    needed = ("format", "expected", "note", "response")
    return line_of({name: value for name, value in kept.items() if name in needed or value not in (None, {})})


def read_pins(path: Path) -> list[Pin]:
    """The pins of a file in their order; [] where there is none.

    Raises `DataError` for a line that is no pin, and for two that expect different scores of one row.
    """
    found: dict[str, tuple[str, Pin]] = {}
    for place, document in read_lines(path):
        with boundary(f"{place}: reading a pin", DataError):
            pin = _restored(place, decode(document))
        there, other = found.get(pin.id, (place, pin))
        if other.expected != pin.expected:
            both = f"{other.expected} in {there} and {pin.expected} in {place}"
            raise DataError(message("one row is pinned twice", found=both, do="delete one of the lines"))
        found[pin.id] = (place, pin)
    return sorted((pin for _, pin in found.values()), key=order_of)


def _restored(place: str, document: dict[str, Any]) -> Pin:
    if document.pop("format", None) != FORMAT:
        raise DataError(message(f"{place}: a pin", expected=f"format {FORMAT}"))
    known = [name for name in Pin.__dataclass_fields__]
    strange = next((name for name in document if name not in known), None)
    if strange is not None:
        close = nearest(strange, known)
        raise DataError(message(f"{place}: a pin has no {strange!r}", do=f"did you mean {close!r}?" if close else None))
    for name, kind in _KINDS.items():
        if not isinstance(document.get(name, kind()), kind) or (name == "response" and name not in document):
            expected = f"{name} as {kind.__name__}"
            raise DataError(message(f"{place}: a pin", expected=expected, found=describe(document.get(name))))
    try:
        score = _expectation(document.pop("expected", None))
    except DataError as cause:
        raise DataError(f"{place}: {cause}") from cause
    ids = document.pop("response_ids", None)
    return Pin(**document, expected=score, response_ids=None if ids is None else tuple(map(int, ids)))


_KINDS = {"note": str, "response": str, "reward_model": dict, "columns": dict, "origin": dict}
