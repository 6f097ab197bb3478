"""torch's profiler in the workers of a group, for a block or for chosen steps of a job; nsight around whole workers."""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.errors import EngineError, SettingError, WorkbenchError, message

if TYPE_CHECKING:
    from workbench.cluster.ranks import RayRanks
    from workbench.observer import StepReport


log = logging.getLogger("workbench")


class Profile:
    """Made by `Cluster.profile`: a context manager, and with `steps` an observer of a job. A trace a rank, gzipped json that
    Perfetto and chrome://tracing open; workers on other nodes send theirs."""

    def __init__(self, group: Callable[[], RayRanks], path: str | Path, steps: Sequence[int] = ()) -> None:
        odd = [step for step in steps if step < 1]
        if odd:
            raise SettingError(message("steps", expected="numbers from 1 on", found=odd))
        self.path = Path(path)
        self.steps = frozenset(steps)
        self.files: list[Path] = []
        """What has been written, in the order of ranks."""
        self._find = group
        self._group: RayRanks | None = None
        self._said = ""

    def __enter__(self) -> Profile:
        self._start("")
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._end(quiet=kind is not None)

    def on_start(self, start: int, steps: int) -> None:
        """Before step `start` of a job. Raises `SettingError` where no steps were chosen."""
        if not self.steps:
            raise SettingError(message("a profile that watches a job", expected="steps=(…)", found="none"))
        self._before(start)

    def on_step(self, report: StepReport) -> None:
        """After a step: what was recorded of it is written, and the next one begun where it was chosen."""
        self._end(quiet=True)
        self._before(report.step + 1)

    def on_end(self, error: BaseException | None) -> None:
        """What is under way is kept."""
        self._end(quiet=True)

    def _before(self, step: int) -> None:
        if step not in self.steps:
            return
        try:
            self._start(f"-step{step}")
        except (WorkbenchError, TimeoutError) as error:  # a job is worth more than its profile
            log.warning("step %d is not profiled: %s", step, error)

    def _start(self, said: str) -> None:
        if self._group is not None:
            raise EngineError(message("this profile runs already", do="leave its block first"))
        group = self._find()
        group.profile(True).result()
        self._group, self._said = group, said

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
            file = _free(self.path / f"{name}-rank{rank}{self._said}")
            file.write_bytes(data)
            self.files.append(file)

    def __repr__(self) -> str:
        from workbench.views.clusters import profile_text

        return profile_text(self)

    def _repr_html_(self) -> str:
        from workbench.views.clusters import profile_html

        return profile_html(self)


def _free(stem: Path) -> Path:
    """A name that is not taken: an earlier trace stays."""
    names = (f"{stem.name}{more}.json.gz" for more in ("", *(f"-{number}" for number in range(2, 10_000))))
    return next(path for path in (stem.with_name(name) for name in names) if not path.exists())


def nsight_options(asked: str | Mapping[str, str]) -> dict[str, Any]:
    """`runtime_env` of workers that run under NVIDIA's nsight: `"default"`, or options of `nsys profile`, as Ray takes them.

    Raises `SettingError` where `nsys` is not installed on this node: Ray would start no worker and say less.
    """
    if shutil.which("nsys") is None:
        raise SettingError(
            message(
                "nsight",
                expected="nsys on the PATH of every node",
                found="none on this one",
                do="install NVIDIA Nsight Systems, or take c.profile(…), which needs nothing",
            )
        )
    if isinstance(asked, str) and asked != "default":
        raise SettingError(message("nsight", expected="'default' or options of nsys profile", found=asked))
    return {"nsight": asked if isinstance(asked, str) else {str(name): str(value) for name, value in asked.items()}}
