"""Sharded saves that go on beside an engine's other work: one at a time, waited for by the next, by `close` and at exit."""

from __future__ import annotations

import json
import logging
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench.engines.fsdp_group import Group
from workbench.engines.fsdp_settings import FsdpSettings
from workbench.engines.sharded_files import RECORD
from workbench.errors import CheckpointError, first_line, message

log = logging.getLogger("workbench")

GRACE = 10.0
"""Seconds past a save's deadline that the ranks have to say so; who has not is hung, and the group is ended."""


@dataclass(frozen=True)
class _Open:
    path: Path
    key: str
    end: float
    generation: int


class Saves:
    """What is being saved of one engine."""

    def __init__(self, group: Group, name: str, settings: FsdpSettings) -> None:
        self._group = group
        self._name = name
        self._settings = settings
        self._open: _Open | None = None

    def begin(
        self, call: Callable[..., Any], path: Path, record: Mapping[str, Any], *, weights: bool, wait: bool
    ) -> None:
        """Save to a new folder: on disk when this returns, or copied to host memory and on its way there (`wait=False`).

        Raises `CheckpointError` where that, or the save before, did not come to be.
        """
        self.finish()
        key, seconds = uuid.uuid4().hex[:12], self._settings.save_deadline
        end = time.monotonic() + seconds
        given = (self._name, str(path.absolute()), {**record, "id": key}, weights, key, seconds, wait)
        told = call("save_shards", *given, seconds=seconds + GRACE)
        if wait:
            _raise(path, told)
            return
        self._open = _Open(path, key, end, self._group.generation)
        self._group.waits(self.finish)

    def look(self) -> None:
        """Without waiting: a save that failed is raised, or warned of, by the engine's `failed_save`."""
        self._ask(0.0)

    def finish(self) -> None:
        """Wait for what is being saved; as `look` where it failed."""
        if self._open is not None:
            self._ask(max(self._open.end - time.monotonic(), 0.0) + 0.1)

    def lost(self, error: BaseException) -> None:
        """The ranks have ended with this error: it tells of a save that was not finished."""
        one, self._open = self._open, None
        if one is not None and not _is_there(one):
            error.add_note(f"the state that was being saved to {one.path} was not finished and is not there")

    def _ask(self, seconds: float) -> None:
        one = self._open
        if one is None:
            return
        if not self._group.alive or self._group.generation != one.generation:
            self._open = None
            if not _is_there(one):
                self._fail(one, "the ranks ended before all of it was written")
            return
        timeout = max(one.end - time.monotonic(), 0.0) + GRACE
        try:
            told = self._group.call("save_answer", one.key, seconds, timeout=timeout)
        except Exception as error:
            self.lost(error)
            raise
        # rank 0 publishes, and speaks for all; it waits for the others
        if told[0] is not None:
            self._open = None
            self._group.waits_no_more(self.finish)
            if told[0]:
                self._fail(one, told[0])

    def _fail(self, one: _Open, why: str) -> None:
        if self._settings.failed_save == "raise":
            _raise(one.path, [why])
        log.warning("the state could not be saved to %s: %s; the run goes on", one.path, why)


def _raise(path: Path, told: list[str | None]) -> None:
    if told[0]:
        raise CheckpointError(
            message(
                f"the state could not be saved to {path}",
                found=told[0],
                do="nothing of it is there; the engine holds what it held: save again, elsewhere or later",
            )
        )


def _is_there(one: _Open) -> bool:
    """Whether this very save was published."""
    try:
        return bool(json.loads((one.path / RECORD).read_text())["id"] == one.key)
    except (OSError, ValueError, KeyError) as error:
        log.debug("%s: %s", one.path, first_line(error))
        return False
