"""Engines that are opened when somebody needs them: a recorded step is looked at, judged and estimated without any.

All learners of a moment are made together, from a checkpoint and the recorded updates since. Until then each is known
by its role and by the names of the states that a step met it in, which is all that a stepper asks for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from workbench.engines import LocalSettings, local
from workbench.engines.local_engine import LocalEngine
from workbench.errors import RunError, message
from workbench.runs.rebuild import fields_of
from workbench.runs.resume import files_crc32
from workbench.snapshots import Snapshots


@dataclass
class Opened:
    """A learner that was made, and which of its states are those of the record."""

    engine: Any
    names: dict[str, str] = field(default_factory=dict)
    """The engine's `state_id` → the record's name of that state."""
    kept: dict[str, Any] = field(default_factory=dict)
    """Name → snapshot, for a learner that the recorded phases took from one state to another."""


class Opening:
    """Role → learner, made once, at the first question for one of them."""

    def __init__(self, make: Callable[[], Mapping[str, Opened]]) -> None:
        self._make = make
        self._made: Mapping[str, Opened] | None = None
        self._lock = threading.RLock()
        self.wanted: dict[str, str] = {}
        """Role → the recorded state that it is to stand in."""

    @property
    def done(self) -> bool:
        """Whether they are there."""
        return self._made is not None

    def __getitem__(self, role: str) -> Opened:
        with self._lock:
            if self._made is None:
                try:
                    made = self._make()
                except RunError as error:
                    raise RunError(f"the weights of {role!r} are needed from here on: {error}") from error
                for name, one in made.items():
                    wanted = self.wanted.get(name)
                    if wanted in one.kept and one.names[one.engine.state_id] != wanted:
                        one.engine.restore(one.kept[wanted])
                self._made = made
            return self._made[role]


class LateLearner:
    """Stands where a learner stands; the first use beyond its name opens it.

    `names` are the states that the record knows it in, in order: before the step's updates, and after its own where
    the stepper stands behind that. `recall` goes from one to the other, also before there are any weights.
    """

    def __init__(self, role: str, opening: Opening, names: tuple[str, ...]) -> None:
        self.role = role
        self._opening = opening
        self._names = names
        opening.wanted[role] = names[-1]

    @property
    def opened(self) -> bool:
        """Whether there are weights behind it."""
        return self._opening.done

    @property
    def recallable(self) -> tuple[str, ...]:
        """States that `recall` takes."""
        return self._names if len(self._names) > 1 else ()

    lost = None
    """It has no workers of its own that could be; asking opens nothing."""

    @property
    def state_id(self) -> str:
        """The record's name of the state, or the engine's own since it moved on."""
        if not self.opened:
            return self._opening.wanted[self.role]
        made = self._opening[self.role]
        return made.names.get(made.engine.state_id, made.engine.state_id)

    def recall(self, name: str) -> None:
        """Stand in another recorded state; nothing is opened for it."""
        self._opening.wanted[self.role] = name
        if self.opened:
            made = self._opening[self.role]
            made.engine.restore(made.kept[name])

    def _do(self, name: str, *args: Any, **options: Any) -> Any:
        return getattr(self._opening[self.role].engine, name)(*args, **options)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if callable(getattr(LocalEngine, name, None)):  # stages ask whether a method is there before they need it
            return partial(self._do, name)
        return getattr(self._opening[self.role].engine, name)

    def __repr__(self) -> str:
        return repr(self._opening[self.role].engine) if self.opened else f"LateLearner({self.state_id}, not opened)"


class LateFrozen:
    """A frozen model, such as a reference, that is opened at its first score.

    Raises `RunError` then, where the folder is not there or its files are not those of the run.
    """

    def __init__(self, record: Mapping[str, Any], check: Callable[[Mapping[str, Any]], str | None]) -> None:
        self._record = dict(record)
        self._check = check
        self._made: Any = None

    def describe(self) -> dict[str, Any]:
        """Path and settings; the weights are those of the path."""
        return {**self._record, "as_loaded": True}

    def _opened(self) -> Any:
        if self._made is None:
            wrong = self._check(self._record)
            if wrong is not None:
                raise RunError(message("the frozen model of the run is needed from here on", found=wrong))
            self._made = local(self._record["path"], **fields_of(self._record, LocalSettings)).reference()
        return self._made

    def score(self, *args: Any, **options: Any) -> Any:
        """As the frozen model's."""
        return self._opened().score(*args, **options)

    @contextmanager
    def model(self) -> Iterator[Any]:
        """As the frozen model's."""
        with self._opened().model() as model:
            yield model

    def __repr__(self) -> str:
        return repr(self._made) if self._made is not None else f"LateFrozen({self._record['path']!r}, not opened)"


def wrong_files(record: Mapping[str, Any]) -> str | None:
    """What is wrong with the model folder of an engine's record; None where it holds what it held, as far as is known."""
    path = Path(str(record["path"]))
    if not path.is_dir():
        return f"no folder at {path}"
    if record.get("files_crc32") not in (None, files_crc32(path)):
        return f"other files than the run's at {path}"
    return None


class Recalling(Snapshots):
    """Snapshots that know recorded states as well."""

    def align(self, role: str, learner: Any, state_id: str) -> None:
        """As `Snapshots.align`; a recorded state is recalled, and never gone."""
        if not isinstance(learner, LateLearner) or state_id not in learner.recallable:
            super().align(role, learner, state_id)
        elif learner.state_id != state_id:
            if learner.opened:
                self.take(learner)
            learner.recall(state_id)
