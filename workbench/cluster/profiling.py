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
    """Profiles a worker group with torch's profiler: a context manager, or with `steps` an observer of a job.

    Made by `Cluster.profile`. Each rank's trace goes to folder `path` on this machine, as gzipped json for Perfetto or
    chrome://tracing.
    """

    def __init__(self, group: Callable[[], RayRanks], path: str | Path, steps: Sequence[int] = ()) -> None:
        odd = [step for step in steps if step < 1]
        if odd:
            raise SettingError("steps to profile", expected="numbers from 1 on", found=odd)
        self.path = Path(path)
        self.steps = frozenset(steps)
        self.files: list[Path] = []
        """The trace files written so far, in order of rank."""
        self._find = group
        self._group: RayRanks | None = None
        self._suffix = ""

    def __enter__(self) -> Profile:
        self._start("")
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._end(quiet=kind is not None)

    def on_start(self, start: int, steps: int) -> None:
        """Observer hook before a job: record its first step, `start`, if chosen. Raises `SettingError` without `steps`."""
        if not self.steps:
            raise SettingError("a profile as an observer of a job", expected="steps=(…), those to record", found="none")
        self._before(start)

    def on_step(self, report: Any) -> None:
        """Observer hook after a step (`runs.loop.StepReport`): write its traces, and record the next step if chosen."""
        self._end(quiet=True)
        self._before(report.step + 1)

    def on_end(self, error: BaseException | None) -> None:
        """Observer hook after the job, also after an error: write the traces of a step that is being recorded."""
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
            raise EngineError("this profile is already recording", do="leave its `with` block first")
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
