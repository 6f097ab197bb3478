"""A trace: the batch after every phase of a step, with metrics and settings; saved and loaded without pickle.

Batches share their columns, so keeping every intermediate one costs the new columns only. On disk each column is stored
once: a phase holds what it wrote, and where it changed the rows, for each row the row that it came from (`source_row`).
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from workbench.base.activity import HERE
from workbench.base.config import source_of
from workbench.base.errors import ColumnMissing, OutOfMemory, PipelineError, RunError, boundary, check_name, describe
from workbench.base.files import FORMAT, check_format, sealed
from workbench.base.memory import forget_last_error
from workbench.base.metrics import reduce
from workbench.base.shown import Shown, shown, without_secrets
from workbench.dataproto.columns import writer_of
from workbench.dataproto.core import DataProto
from workbench.dataproto.io import check_room, inside, read_document, reading
from workbench.dataproto.value import unchanged
from workbench.engines.local_engine.memory import memory_errors
from workbench.stages.stage import Stage, foreign_class

_SOURCE_ROW, _DROPPED = "source_row", "_dropped"
PHASES_LIMIT = 256
"""The most phases that a trace on disk may have."""
_RECORDED = ("stage", "wrote", "metrics", "settings", "source", "seconds")
"""Fields of a phase that `trace.json` holds under their own names."""
STAGE: ContextVar[str] = ContextVar("workbench stage", default="")
"""The stage that is running, for the records of calls to workers."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Phase(Shown):
    """The record of one stage in a trace: the batch after it, its metrics, its settings, its time."""

    stage: str
    """Name of the stage."""
    batch: DataProto = field(repr=False)
    """The batch after the stage."""
    wrote: tuple[str, ...]
    """Columns that the stage added or changed."""
    metrics: dict[str, float]
    """Metrics of the stage, reduced to numbers."""
    settings: dict[str, Any]
    """Every setting of the stage as a plain value (functions by name)."""
    source: dict[str, str] = field(default_factory=dict, repr=False)
    """Source text of the functions among the settings, where it can be had."""
    seconds: float = 0.0
    """Wall time of the stage."""
    rows: torch.Tensor | None = field(default=None, repr=False)
    """[B] int64: for each row of `batch` its row number before the stage; None where the stage kept the rows."""
    dropped: DataProto | None = field(default=None, repr=False)
    """Rows that the stage left out, where `rows` cannot tell them: see `Outcome.dropped`."""
    reused: bool = False
    """Whether the stage was not run again, because nothing that it reads had changed."""

    def delta(self) -> DataProto:
        """Return the batch with only the columns that this phase wrote."""
        return self.batch.without(*(name for name in self.batch.columns if name not in self.wrote))

    def written_into(self, batch: DataProto) -> DataProto:
        """Return `batch`, which has the same rows, with this phase's columns in place of its own."""
        return batch.without(*(name for name in self.wrote if name in batch)).union(self.delta())


@dataclass(frozen=True, repr=False)
class Trace(Shown):
    """The phases of a step that have run: `trace["reward"]` is one of them, `trace.batch` the last batch."""

    start: DataProto
    """The batch before the first phase."""
    phases: tuple[Phase, ...] = ()

    @property
    def batch(self) -> DataProto:
        """The batch after the last phase."""
        return self.phases[-1].batch if self.phases else self.start

    @property
    def step(self) -> int | None:
        """The training step; None where the batch's `meta_info` has none."""
        return self.start.meta_info.get("step")

    @property
    def names(self) -> tuple[str, ...]:
        """Stages that have run, in order."""
        return tuple(phase.stage for phase in self.phases)

    @property
    def metrics(self) -> dict[str, float]:
        """All phases' metrics, and their seconds as `timing_s/<stage>` and `timing_s/step`.

        `timing_s/step` leaves out work that ran during the previous step (`timing_s/overlapped`).
        """
        merged: dict[str, float] = {}
        for phase in self.phases:
            merged |= {**phase.metrics, f"timing_s/{phase.stage}": phase.seconds}
        overlapped = (phase.metrics.get("timing_s/overlapped", 0.0) for phase in self.phases if not phase.reused)
        merged["timing_s/step"] = sum(phase.seconds for phase in self.phases) - sum(overlapped)
        return merged

    def __getitem__(self, name: str) -> Phase:
        check_name("phase of this trace", name, self.names, PipelineError)
        return self.phases[self.names.index(name)]

    def __len__(self) -> int:
        return len(self.phases)

    def __iter__(self) -> Iterator[Phase]:
        return iter(self.phases)

    def before(self, name: str) -> DataProto:
        """Return the batch before the phase `name`, which its stage read."""
        position = self.names.index(self[name].stage)
        return self.phases[position - 1].batch if position else self.start

    def add(self, phase: Phase) -> Trace:
        """Return a trace with one more phase."""
        return Trace(self.start, (*self.phases, phase))

    def first(self, count: int) -> Trace:
        """Return a trace of the first `count` phases only."""
        return Trace(self.start, self.phases[:count])

    # --- disk -----------------------------------------------------------------------------

    def save(self, path: str | Path) -> Path:
        """Save the trace to a new folder: `start/`, one folder per phase with the columns it wrote, and `trace.json`
        last."""
        folder = Path(path)
        if folder.exists():
            raise RunError("a trace is never overwritten", found=f"{folder}, which exists", do="save to a new folder")
        folder.mkdir(parents=True)
        self.start.save(folder / "start")
        records = []
        for number, phase in enumerate(self.phases):
            name = f"{number:02d}_{re.sub(r'[^A-Za-z0-9_.-]', '_', phase.stage)[:60]}"
            delta = phase.delta()
            if phase.rows is not None:
                delta = delta.with_columns({_SOURCE_ROW: phase.rows})
            delta.save(folder / name)
            record = {field: getattr(phase, field) for field in _RECORDED}
            meta = dict(phase.batch.meta_info)
            records.append({"folder": name, "rows": phase.rows is not None, **record, "meta_info": meta})
            if phase.dropped is not None:
                phase.dropped.save(folder / f"{name}{_DROPPED}")
                records[-1]["dropped"] = True
        text = json.dumps({"format": FORMAT, "phases": records}, indent=1, allow_nan=True)
        (folder / "trace.json").write_text(sealed(text))
        return folder

    @classmethod
    def load(cls, path: str | Path) -> Trace:
        """Open a folder that `save` wrote; columns are read at their first use. Raises `RunError` for a damaged folder."""
        folder = Path(path)
        if not (folder / "trace.json").is_file():
            raise RunError(f"no trace at {folder}", expected="a folder with trace.json", do="check the path")
        file = inside(folder, "trace.json")
        with reading(file, RunError):
            document = read_document(file, strict=False)
            check_format(document.get("format"), f"trace {folder}", RunError)
            if len(document["phases"]) > PHASES_LIMIT:
                raise RunError(f"phases of trace {folder}", expected=f"≤ {PHASES_LIMIT}", found=len(document["phases"]))
            records = [_checked_record(one, folder) for one in document["phases"]]
        trace = cls(DataProto.load(inside(folder, "start")))
        for record in records:
            delta = DataProto.load(inside(folder, record["folder"]))
            with reading(folder / record["folder"], RunError):
                phase = _restored(trace.batch, delta, record)
            if record["dropped"]:
                phase = replace(phase, dropped=DataProto.load(inside(folder, record["folder"] + _DROPPED)))
            trace = trace.add(phase)
        return trace


def _checked_record(record: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Convert every part of a phase's record to its type, or raise `RunError`: the file may come from anybody."""
    name = record["folder"]
    if not isinstance(name, str) or Path(name).name != name or name == "..":
        raise RunError(f"a phase of trace {folder}", expected="the name of a folder in it", found=describe(name))
    return {
        "folder": name,
        "rows": bool(record["rows"]),
        "dropped": bool(record.get("dropped", False)),
        "stage": str(record["stage"]),
        "wrote": tuple(str(column) for column in record["wrote"]),
        "metrics": {str(key): float(value) for key, value in record["metrics"].items()},
        "settings": dict(record["settings"]),
        "source": {str(key): str(text) for key, text in record["source"].items()},
        "seconds": float(record["seconds"]),
        "meta_info": dict(record["meta_info"]),
    }


def _restored(before: DataProto, delta: DataProto, record: dict[str, Any]) -> Phase:
    rows = _source_rows(before, delta, record["stage"]) if record["rows"] else None
    base = before if rows is None else before.select_idxs(rows)
    written = delta if rows is None else delta.without(_SOURCE_ROW)
    kept = base.without(*(name for name in written.columns if name in base))
    batch = kept.union(written.with_meta(**kept.meta_info))
    return Phase(batch=batch.with_meta(**record["meta_info"]), rows=rows, **{name: record[name] for name in _RECORDED})


def _source_rows(before: DataProto, delta: DataProto, stage: str) -> torch.Tensor:
    """Return for each row of a phase the row that it came from, [B] int64, after checking that it exists."""
    rows: torch.Tensor = delta[_SOURCE_ROW]
    known = rows.dim() == 1 and rows.dtype == torch.int64
    if not known or (len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < len(before)):
        raise RunError(f"{_SOURCE_ROW} of phase {stage!r}", expected=f"row numbers [B] int64 below {len(before)}")
    shapes = [(column.shape[1:], column.dtype) for column in before.batch.raw().values()]
    each = sum(math.prod(shape) * dtype.itemsize for shape, dtype in shapes)
    check_room(each * len(rows), f"the batch of phase {stage!r}")
    return rows


COMPUTED_BY = "computed_by"
"""The setting of a recorded log-prob stage whose columns are of the update's own pass: the update's name."""


def completed(trace: Trace) -> Trace:
    """Return a trace as if its log-prob stage had computed the old log-probs, where in fact the update's own pass did:
    columns and metrics move to that stage, still signed by the update.

    Other traces are returned unchanged, and so are those in which rows were dropped between the stage and the update.
    """
    places = _left_to_update(trace)
    if places is None:
        return trace
    phases, (first, last) = list(trace), places
    update = phases[last]
    signed = {name: value for name, value in update.batch.origins.items() if value.stage == update.stage}
    names = tuple(name for name in signed if writer_of(name) == "old_log_prob")
    for place in range(first, last):
        batch = phases[place].batch
        for name in names:
            batch = batch.with_columns({name: update.batch[name]}, origin=signed[name])
        phases[place] = replace(phases[place], batch=batch)
    stage, log_prob_metrics = phases[first], {key: value for key, value in update.metrics.items() if of_log_probs(key)}
    settings = {**stage.settings, COMPUTED_BY: update.stage}
    wrote = tuple(dict.fromkeys((*stage.wrote, *names)))
    phases[first] = replace(stage, wrote=wrote, metrics={**stage.metrics, **log_prob_metrics}, settings=settings)
    left = tuple(name for name in update.wrote if name not in names)
    others = {key: value for key, value in update.metrics.items() if key not in log_prob_metrics}
    phases[last] = replace(update, wrote=left, metrics=others)
    return Trace(trace.start, tuple(phases))


def of_log_probs(metric: str) -> bool:
    """Whether a metric is one of those that a log-prob stage reports."""
    return metric == "actor/entropy" or metric.startswith("training/")


def _left_to_update(trace: Trace) -> tuple[int, int] | None:
    """Return the positions of a log-prob stage and of the update that computed its columns; None where the trace has no
    such pair."""
    for last, update in enumerate(trace):
        made = update.batch.origins.get("old_log_probs")
        if "loss" in update.settings and made is not None and made.stage == update.stage:
            earlier = [one.settings for one in trace.phases[:last]]
            first = next((n for n, one in enumerate(earlier) if one.get("column") == "old_log_probs"), last)
            moved = any(one.rows is not None for one in trace.phases[first : last + 1])
            return None if first == last or moved or COMPUTED_BY in earlier[first] else (first, last)
    return None


def perform(stage: Stage, batch: DataProto, metrics: dict[str, Any] | None = None) -> Phase:
    """Run one stage on one batch and return the `Phase` that records what it did.

    `metrics` gets those of the stage as they can be joined with those of other batches.

    Raises `ColumnMissing` before the stage runs where the batch lacks a column of its `reads`, and
    `PipelineError` after it where a column of its `writes` is missing.
    """
    if missing := [name for name in stage.reads if name not in batch]:
        found = f"only {', '.join(batch.columns)}"
        raise ColumnMissing(f"stage {stage.name!r} reads columns {missing} that the batch lacks", found=found)
    settings, source = describe_settings(stage)
    forget_last_error()
    began = time.perf_counter()
    running = STAGE.set(stage.name)
    try:
        with (
            HERE.doing(stage.name),
            boundary(f"stage {stage.name!r}"),
            memory_errors("its own code", batch, "the number of rows"),
        ):
            outcome = stage(batch)
    except OutOfMemory as error:  # of an engine, which does not know for which phase it works
        error.args = (f"phase {stage.name!r}: {error}",)
        raise
    finally:
        STAGE.reset(running)
    seconds = time.perf_counter() - began
    if unwritten := [name for name in stage.writes if name not in outcome.batch]:
        found, do = f"only {', '.join(outcome.batch.columns)}", "write them, or take them out of the stage's `writes`"
        raise PipelineError(f"stage {stage.name!r} did not write the columns {unwritten}", found=found, do=do)
    if metrics is not None:
        metrics.update(outcome.metrics)
    after = outcome.batch
    if outcome.rows is not None:  # every column is a new object, so what the stage declares counts
        wrote = [name for name in after.columns if name in stage.writes or name not in batch]
    else:
        wrote = [name for name in after.columns if not unchanged(name, batch, after)]
    what: dict[str, Any] = {"settings": settings, "source": source, "seconds": seconds, "rows": outcome.rows}
    what["dropped"] = outcome.dropped
    return Phase(stage=stage.name, batch=after, wrote=tuple(wrote), metrics=reduce([outcome.metrics]), **what)


def describe_settings(stage: Stage) -> tuple[dict[str, Any], dict[str, str]]:
    """Return a stage's settings as plain JSON values, and the source text of the functions among them."""
    plain: dict[str, Any] = {}
    source: dict[str, str] = {}
    for name, secret in {**stage.settings(), **foreign_class(stage)}.items():
        value = without_secrets(secret, name)
        if name != "class":
            plain[name] = value if isinstance(value, int | float | str | bool | type(None)) else _setting_name(value)
        if (text := source_of(value)) is not None:
            source[name] = shown(text)
    return plain, source


def _setting_name(value: Any) -> str:
    name = getattr(value, "name", None) or getattr(value, "__name__", None)
    return name if isinstance(name, str) else repr(value)
