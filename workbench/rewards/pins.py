"""Pinned rows: samples with the score that they must get, kept beside the project as cases for its rewards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from workbench.dataproto import DataProto
from workbench.errors import DataError, describe, message
from workbench.rewards.dry_run import DryRun, Judged, dry_run
from workbench.rewards.pin import Pin, digest, order_of, pin_line, pin_of, read_pins
from workbench.rewards.pin_files import locked, write_lines

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, kw_only=True)
class Checked:
    """What a reward said of one pin."""

    number: int
    pin: Pin
    got: float | None
    """None: no judgement."""
    status: str
    why: str
    holds: bool


@dataclass(frozen=True, kw_only=True)
class PinCheck:
    """What `Pins.check` found; true when every pin holds."""

    reward: str
    """Name of the reward."""
    path: Path
    results: tuple[Checked, ...]
    """One a pin, in their order."""
    tolerance: float
    run: DryRun = field(repr=False)
    """The dry run on the pins, with its own tables."""

    @property
    def failed(self) -> tuple[Checked, ...]:
        """The pins that do not hold."""
        return tuple(one for one in self.results if not one.holds)

    @property
    def table(self) -> pd.DataFrame:
        """The dry run's table with `expected`, `holds`, `note`."""
        return self.run.table.assign(
            expected=[one.pin.expected for one in self.results],
            holds=[one.holds for one in self.results],
            note=[one.pin.note for one in self.results],
        )

    def __bool__(self) -> bool:
        return not self.failed

    def __len__(self) -> int:
        return len(self.results)

    def __repr__(self) -> str:
        from workbench.views.pins import check_text

        return check_text(self)

    def _repr_html_(self) -> str:
        from workbench.views.pins import check_html

        return check_html(self)


class Pins:
    """The pins of a file, as they were when it was last read or written here. Make it with `pins(path)`.

    They stand in the file by data source, prompt and response, a JSON line each, whoever pinned them first: two branches
    that pin other rows merge. A second process may write at the same time; `reload` shows what it wrote.
    """

    def __init__(self, path: str | Path = "pins.jsonl") -> None:
        self.path = Path(path)
        self._pins = read_pins(self.path)

    def add(self, rows: Any, *, row: int | None = None, expected: float | str, note: str = "") -> Pin:
        """Pin a row: `expected` is its score, or `"unscored"` for a row that must have no judgement.

        `rows` is a batch, a trace, a dry run, one row of them, or a record as `dry_run` takes it; `row` says which, where
        there are several. A pin with the same prompt, response and truth is replaced.
        Raises `DataError` for another expectation, a row that is not there, and values that JSON cannot keep.
        """
        pin = pin_of(rows, row, expected, str(note))
        with locked(self.path):
            kept = [one for one in read_pins(self.path) if one.id != pin.id]
            self._write([*kept, pin])
        return pin

    def remove(self, which: int | str | Pin) -> Pin:
        """Take out the pin with this number (as shown by this object), this `id`, or this pin; returns it.

        Raises `DataError` where there is no such pin, or somebody else has removed it.
        """
        pin = self[which] if isinstance(which, int) else next((one for one in self._pins if _means(which, one)), None)
        if pin is None:
            raise DataError(message(f"{self.path} has no pin {describe(which)}", found=f"{len(self)} pins"))
        with locked(self.path):
            there = read_pins(self.path)
            kept = [one for one in there if one.id != pin.id]
            self._write(kept)
        if len(kept) == len(there):
            raise DataError(message(f"pin {pin.id} is no longer in {self.path}", do="it has been removed already"))
        return pin

    def reload(self) -> Pins:
        """Read the file again; returns this object."""
        self._pins = read_pins(self.path)
        return self

    def check(self, reward: Any, tolerance: float = 1e-6) -> PinCheck:
        """Judge every pin by one reward (whatever `as_reward` takes) and say which hold.

        Raises `DataError` where the file is not there: a wrong path must not look like pins that hold.
        """
        if not self.path.is_file():
            raise DataError(message(f"no pins at {str(self.path)!r}", do="check the path, or pin a row first"))
        if isinstance(reward, Mapping | list | tuple):
            raise DataError(
                message("pins are checked by one reward", found=describe(reward), do="check each by itself")
            )
        run = dry_run([reward], self)
        (name, judged), *_ = run.judged.items()
        results = tuple(
            _checked(number, pin, one, tolerance) for number, (pin, one) in enumerate(zip(self, judged, strict=True))
        )
        return PinCheck(reward=name, path=self.path, results=results, tolerance=tolerance, run=run)

    @property
    def batch(self) -> DataProto:
        """The pins as a batch, which is how a dry run judges them: columns as after a rollout, `expected` and `note`."""
        names = dict.fromkeys(name for pin in self for name in pin.columns)
        objects: dict[str, list[Any]] = {name: [pin.columns.get(name) for pin in self] for name in names}
        objects |= {
            "raw_prompt": [pin.prompt for pin in self],
            "response_text": [pin.response for pin in self],
            "uid": [digest(pin.prompt) for pin in self],
            "data_source": [pin.data_source for pin in self],
            "reward_model": [dict(pin.reward_model) for pin in self],
            "extra_info": [pin.extra_info for pin in self],
            "expected": [pin.expected for pin in self],
            "note": [pin.note for pin in self],
        }
        return DataProto(_ids(self._pins), objects, {"source": str(self.path)})

    def _write(self, pins: list[Pin]) -> None:
        ordered = sorted(pins, key=order_of)
        write_lines(self.path, [pin_line(pin) for pin in ordered])
        self._pins = ordered

    def __len__(self) -> int:
        return len(self._pins)

    def __iter__(self) -> Iterator[Pin]:
        return iter(self._pins)

    def __getitem__(self, number: int) -> Pin:
        if not -len(self) <= number < len(self):
            raise DataError(message(f"{self.path} has no pin {number}", expected=f"a number below {len(self)}"))
        return self._pins[number]

    def __repr__(self) -> str:
        from workbench.views.pins import pins_text

        return pins_text(self)

    def _repr_html_(self) -> str:
        from workbench.views.pins import pins_html

        return pins_html(self)


def pins(path: str | Path = "pins.jsonl") -> Pins:
    """The pinned rows of a project: `add` them where you look at samples, `check` a reward against them.

    A file that is not there yet has no pins; the first `add` makes it. Raises `DataError` for a damaged line.
    """
    return Pins(path)


def _checked(number: int, pin: Pin, one: Judged, tolerance: float) -> Checked:
    got = one.score.value if one.score.scored else None
    holds = pin.holds(got, tolerance)
    return Checked(number=number, pin=pin, got=got, status=one.score.status.value, why=one.score.why, holds=holds)


def _means(which: Any, pin: Pin) -> bool:
    return pin.id == (which.id if isinstance(which, Pin) else which)


def _ids(found: list[Pin]) -> dict[str, torch.Tensor]:
    if not any(pin.response_ids for pin in found):
        return {}
    rows = [list(pin.response_ids or ()) for pin in found]
    width = max(map(len, rows))
    return {
        "responses": torch.tensor([row + [0] * (width - len(row)) for row in rows]),
        "response_mask": torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows]),
    }
