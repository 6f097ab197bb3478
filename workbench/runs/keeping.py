"""Which steps' traces stay on disk, and why each does.

    traces/step_000012/{start/, 00_rollout/, …, trace.json, kept.json}

A trace is written aside and renamed when it is whole, with its `kept.json`: whether it was due (every k-th step, the
last one), which symptoms began in that step, and the controllers' state before and after it. Of those that were due
the last `keep_traces` stay, of those with a symptom the last `KEEP_FLAGGED`: both are bounded.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

from workbench.errors import RunError
from workbench.runs.folder import discard, read_json, step_folders, write_json
from workbench.trace import Trace

log = logging.getLogger("workbench")

KEEP_FLAGGED = 8
"""Traces that stay for a symptom, beyond those that were due."""


@dataclass(frozen=True, kw_only=True)
class Kept:
    """Why a trace is on disk."""

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
    """Write a trace with the reason for it: complete, or not there at all."""
    staging = target.with_name(f".{target.name}.part")
    shutil.rmtree(staging, ignore_errors=True)
    trace.save(staging)
    write_json(staging / "kept.json", asdict(kept))
    staging.rename(target)
    return target


def read_kept(folder: Path) -> Kept:
    """Why the trace in this folder is there. Traces of older runs do not say; they were due."""
    path = folder / "kept.json"
    if not path.is_file():
        return Kept(due="recorded")
    try:
        found = read_json(path)
        known = {field.name: found[field.name] for field in fields(Kept) if field.name in found}
        return Kept(**{**known, "flagged": tuple(known.get("flagged", ()))})
    except (
        RunError,
        AttributeError,
        TypeError,
    ) as error:  # damaged, or of another version: the trace is there all the same
        log.warning("%s cannot be read: %s", path, error)
        return Kept(due="recorded")


def prune(traces: Path, keep_traces: int, keep_flagged: int = KEEP_FLAGGED) -> None:
    """Delete what is neither among the last `keep_traces` that were due nor the last `keep_flagged` with a symptom."""
    reasons = {step: read_kept(path) for step, path in step_folders(traces).items()}
    due = [step for step, kept in reasons.items() if kept.due or not kept.flagged]
    flagged = [step for step, kept in reasons.items() if kept.flagged]
    staying = {*due[-keep_traces:], *(flagged[-keep_flagged:] if keep_flagged else ())}
    for step, path in step_folders(traces).items():
        if step not in staying:
            discard(path, ".pruned-")
