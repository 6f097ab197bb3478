"""torch's profiler in the workers of a group, for a block of code or for chosen steps of a job."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from workbench.base.errors import EngineError, SettingError, WorkbenchError
from workbench.base.shown import Shown
from workbench.cluster.ranks import RayRanks

log = logging.getLogger("workbench")


class Profile(Shown):
    """Records what the workers of a group do: a context manager, and with `steps` an observer of a job. Made by `Cluster.profile`.

    Each rank gives a gzipped json trace that Perfetto and chrome://tracing open; workers on other nodes send theirs here.
    """

    def __init__(self, group: Callable[[], RayRanks], path: str | Path, steps: Sequence[int] = ()) -> None:
        odd = [step for step in steps if step < 1]
        if odd:
            raise SettingError("steps", expected="numbers from 1 on", found=odd)
        self.path = Path(path)
        self.steps = frozenset(steps)
        self.files: list[Path] = []
        """What has been written, in the order of ranks."""
        self._find = group
        self._group: RayRanks | None = None
        self._suffix = ""

    def __enter__(self) -> Profile:
        self._start("")
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._end(quiet=kind is not None)

    def on_start(self, start: int, steps: int) -> None:
        """Before step `start` of a job. Raises `SettingError` where no steps were chosen."""
        if not self.steps:
            raise SettingError("a profile that watches a job", expected="steps=(…)", found="none")
        self._before(start)

    def on_step(self, report: Any) -> None:
        """After a step (`report` is a `runs.loop.StepReport`): write its traces, and start the next one's where it was chosen."""
        self._end(quiet=True)
        self._before(report.step + 1)

    def on_end(self, error: BaseException | None) -> None:
        """After the job, however it ended: write what is being recorded."""
        self._end(quiet=True)

    def _before(self, step: int) -> None:
        if step not in self.steps:
            return
        try:
            self._start(f"-step{step}")
        except (WorkbenchError, TimeoutError) as error:  # a job is worth more than its profile
            log.warning("step %d is not profiled: %s", step, error)

    def _start(self, suffix: str) -> None:
        if self._group is not None:
            raise EngineError("this profile runs already", do="leave its block first")
        group = self._find()
        group.profile(True).result()
        self._group, self._suffix = group, suffix

    def _end(self, quiet: bool) -> None:
        group, self._group = self._group, None
        if group is None:
            return
        try:
            traces = group.profile(False).result()
        except (WorkbenchError, TimeoutError) as error:
            if not quiet:
                raise
            log.warning("the profile is lost: %s", error)
            return
        self.path.mkdir(parents=True, exist_ok=True)
        name = re.sub(r"[^\w.-]", "_", group.name)
        for rank, data in enumerate(traces):
            stem, numbers = self.path / f"{name}-rank{rank}{self._suffix}", count(2)
            file = Path(f"{stem}.json.gz")
            while file.exists():  # an earlier trace stays
                file = Path(f"{stem}-{next(numbers)}.json.gz")
            file.write_bytes(data)
            self.files.append(file)
