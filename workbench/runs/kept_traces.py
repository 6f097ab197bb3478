"""Keeps some steps' traces on disk, each with the reason for it.

    traces/step_000012/{start/, 00_rollout/, …, trace.json, kept.json}

A trace is written to a temporary folder and renamed when it is complete. Its `kept.json` says whether it was due (every
k-th step, the last one), which symptoms began in that step, and the controllers' state before and after it. Of those that
were due the last `keep_traces` are kept, of those with a symptom the last `KEEP_FLAGGED`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

from workbench.base.errors import RunError
from workbench.base.formats import FORMAT, check_format
from workbench.runs.folder import discard, read_json, step_folders, write_json, written
from workbench.steps.trace import Trace

log = logging.getLogger("workbench")

KEEP_FLAGGED = 8
"""Traces that are kept for a symptom, beyond those that were due."""


@dataclass(frozen=True, kw_only=True)
class Kept:
    """Why the trace of a step is kept on disk, and the controllers' state around that step."""

    due: str = ""
    """`every 10 steps`, `the last step`, … ; empty where only a symptom asked for it."""
    flagged: tuple[str, ...] = ()
    """Names of the symptoms that began in this step."""
    before: Mapping[str, Mapping[str, float]] | None = field(default=None, repr=False)
    """Stage name → its controllers' state before the step; None where that was not written down."""
    after: Mapping[str, Mapping[str, float]] | None = field(default=None, repr=False)
    """The same after it."""

    def __str__(self) -> str:
        """`every 10 steps; the gradient jumps`."""
        return "; ".join(part for part in (self.due, *self.flagged) if part)


def keep(trace: Trace, target: Path, kept: Kept) -> Path:
    """Write a trace, with the reason for keeping it, to the folder `target`: completely or not at all."""

    def fill(staging: Path) -> None:
        trace.save(staging)
        write_json(staging / "kept.json", {"format": FORMAT, **asdict(kept)})

    return written(target, fill)


def read_kept(folder: Path) -> Kept:
    """Read why the trace in a folder was kept. A trace without a readable `kept.json` counts as due."""
    path = folder / "kept.json"
    if not path.is_file():
        return Kept(due="recorded")
    try:
        found = read_json(path)
        check_format(found.get("format"), str(path), RunError)
        known = {field.name: found[field.name] for field in fields(Kept) if field.name in found}
        return Kept(**known | {"flagged": tuple(known.get("flagged", ()))})
    except (RunError, AttributeError, TypeError) as error:
        # damaged, or of another format: the trace is there all the same
        log.warning("%s cannot be read: %s", path, error)
        return Kept(due="recorded")


def prune(traces: Path, keep_traces: int, keep_flagged: int = KEEP_FLAGGED) -> None:
    """Delete traces, except the last `keep_traces` that were due and the last `keep_flagged` with a symptom."""
    reasons = {step: read_kept(path) for step, path in step_folders(traces).items()}
    due = [step for step, kept in reasons.items() if kept.due or not kept.flagged]
    flagged = [step for step, kept in reasons.items() if kept.flagged]
    staying = {*due[-keep_traces:], *(flagged[-keep_flagged:] if keep_flagged else ())}
    for step, path in step_folders(traces).items():
        if step not in staying:
            discard(path)
