"""A trace: what a step left behind, phase by phase, as values; saved and loaded without pickle.

Batches share their columns, so keeping every intermediate one costs the new columns only. On disk
each column stands once: a phase holds what it wrote, and where it changed the rows, for each row the
row that it came from (`source_row`).
"""

from __future__ import annotations

import inspect
import json
import math
import re
import time
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from workbench.config import settings_hash
from workbench.dataproto import DataProto, claims
from workbench.dataproto.columns_map import Lazy
from workbench.errors import ColumnMissing, PipelineError, RunError, boundary, describe, message, unknown
from workbench.memory import forget_last_error
from workbench.metrics import reduce
from workbench.sources import source_of
from workbench.stages import Stage
from workbench.stages.stage import foreign_class

FORMAT = 1
_SOURCE_ROW = "source_row"
PHASES_LIMIT = 256
"""Phases of a trace from disk."""
STAGE: ContextVar[str] = ContextVar("workbench stage", default="")
"""The stage that runs here: calls to workers say what they are for."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Phase:
    """One stage's part of a trace."""

    stage: str
    """Name of the stage."""
    batch: DataProto = field(repr=False)
    """The batch after it."""
    wrote: tuple[str, ...]
    """Columns that it added or changed."""
    metrics: dict[str, float]
    """Its metrics, reduced."""
    settings: dict[str, Any]
    """Every setting, plain (functions by name)."""
    source: dict[str, str] = field(default_factory=dict, repr=False)
    """Source text of the functions among the settings, where it can be had."""
    seconds: float = 0.0
    """Wall time."""
    rows: torch.Tensor | None = field(default=None, repr=False)
    """For each row of `batch` the row before; None: the same rows."""
    reused: bool = False
    """Taken from an earlier pass: nothing that the stage reads had changed."""

    def delta(self) -> DataProto:
        """Only the columns that it wrote."""
        return self.batch.without(*(name for name in self.batch.columns if name not in self.wrote))

    def __repr__(self) -> str:
        from workbench.views.traces import phase_text

        return phase_text(self)

    def _repr_html_(self) -> str:
        from workbench.views.traces import phase_html

        return phase_html(self)


@dataclass(frozen=True)
class Trace:
    """A step, as far as it went: `trace["reward"]` is a phase, `trace.batch` the last batch."""

    start: DataProto
    """The batch before the first phase."""
    phases: tuple[Phase, ...] = ()

    @property
    def batch(self) -> DataProto:
        """The batch after the last phase."""
        return self.phases[-1].batch if self.phases else self.start

    @property
    def step(self) -> int | None:
        """The training step, where the batch says."""
        return self.start.meta_info.get("step")

    @property
    def names(self) -> tuple[str, ...]:
        """Stages that have run, in order."""
        return tuple(phase.stage for phase in self.phases)

    @property
    def metrics(self) -> dict[str, float]:
        """All phases' metrics, and `timing_s/<stage>`, `timing_s/step`: of phases that were done beside the step before
        (`timing_s/overlapped`) it counts only what was waited for."""
        merged: dict[str, float] = {}
        for phase in self.phases:
            merged.update(phase.metrics)
            merged[f"timing_s/{phase.stage}"] = phase.seconds
        merged["timing_s/step"] = sum(phase.seconds for phase in self.phases)
        done = (phase.metrics for phase in self.phases if not phase.reused)
        merged["timing_s/step"] -= sum(metrics.get("timing_s/overlapped", 0.0) for metrics in done)
        return merged

    def __getitem__(self, name: str) -> Phase:
        if name not in self.names:
            raise PipelineError(unknown("phase of this trace", name, self.names))
        return self.phases[self.names.index(name)]

    def __len__(self) -> int:
        return len(self.phases)

    def __iter__(self) -> Iterator[Phase]:
        return iter(self.phases)

    def before(self, name: str) -> DataProto:
        """The batch that a stage was given."""
        position = self.names.index(self[name].stage)
        return self.phases[position - 1].batch if position else self.start

    def add(self, phase: Phase) -> Trace:
        """A trace with one more phase."""
        return Trace(self.start, (*self.phases, phase))

    def first(self, count: int) -> Trace:
        """The first `count` phases."""
        return Trace(self.start, self.phases[:count])

    # --- disk -----------------------------------------------------------------------------

    def save(self, path: str | Path) -> Path:
        """Write a new folder: `start/`, one folder per phase with what it wrote, and `trace.json` last."""
        folder = Path(path)
        if folder.exists():
            raise RunError(message("a trace is never overwritten", found=folder))
        folder.mkdir(parents=True)
        self.start.save(folder / "start")
        records = []
        for number, phase in enumerate(self.phases):
            name = f"{number:02d}_{re.sub(r'[^A-Za-z0-9_.-]', '_', phase.stage)[:60]}"
            delta = phase.delta()
            if phase.rows is not None:
                delta = delta.with_columns({_SOURCE_ROW: phase.rows})
            delta.save(folder / name)
            records.append({"folder": name, "rows": phase.rows is not None, **_record(phase)})
        text = json.dumps({"format": FORMAT, "phases": records}, indent=1, allow_nan=True)
        (folder / "trace.json").write_text(text)
        return folder

    @classmethod
    def load(cls, path: str | Path) -> Trace:
        """Open what `save` wrote; columns are read when they are looked at."""
        folder = Path(path)
        if not (folder / "trace.json").is_file():
            raise RunError(message(f"no trace at {folder}", expected="a folder with trace.json", do="check the step"))
        file = claims.inside(folder, "trace.json")
        with claims.reading(file, RunError):
            document = claims.document(file, strict=False)
            if document["format"] != FORMAT:
                raise RunError(message(f"trace {folder}", expected=f"format {FORMAT}", found=document["format"]))
            if len(document["phases"]) > PHASES_LIMIT:
                raise RunError(message(f"trace {folder}", expected=f"at most {PHASES_LIMIT} phases"))
            records = [_checked(record, folder) for record in document["phases"]]
        trace = cls(DataProto.load(claims.inside(folder, "start")))
        for record in records:
            delta = DataProto.load(claims.inside(folder, record["folder"]))
            with claims.reading(folder / record["folder"], RunError):
                trace = trace.add(_restored(trace.batch, delta, record))
        return trace

    # --- looking --------------------------------------------------------------------------

    def __repr__(self) -> str:
        from workbench.views.traces import trace_text

        return trace_text(self)

    def _repr_html_(self) -> str:
        from workbench.views.traces import trace_html

        return trace_html(self)


def _record(phase: Phase) -> dict[str, Any]:
    return {
        "stage": phase.stage,
        "wrote": list(phase.wrote),
        "metrics": phase.metrics,
        "settings": phase.settings,
        "source": phase.source,
        "seconds": phase.seconds,
        "meta_info": dict(phase.batch.meta_info),
    }


def _checked(record: dict[str, Any], folder: Path) -> dict[str, Any]:
    """A phase's record with every part of the kind that whoever looks at it expects: the file may come from anybody."""
    name = record["folder"]
    if not isinstance(name, str) or Path(name).name != name or name == "..":
        raise RunError(message(f"trace {folder}", expected="folders inside it", found=describe(name)))
    return {
        "folder": name,
        "rows": bool(record["rows"]),
        "stage": str(record["stage"]),
        "wrote": tuple(str(column) for column in record["wrote"]),
        "metrics": {str(key): float(value) for key, value in record["metrics"].items()},
        "settings": dict(record["settings"]),
        "source": {str(key): str(text) for key, text in record["source"].items()},
        "seconds": float(record["seconds"]),
        "meta_info": dict(record["meta_info"]),
    }


def _restored(before: DataProto, delta: DataProto, record: dict[str, Any]) -> Phase:
    rows = delta[_SOURCE_ROW] if record["rows"] else None
    if rows is not None:
        known = rows.dim() == 1 and rows.dtype == torch.int64 and (not len(rows) or int(rows.min()) >= 0)
        if not known or (len(rows) and int(rows.max()) >= len(before)):
            raise RunError(message(f"{_SOURCE_ROW} of {record['stage']!r}", expected=f"rows below {len(before)}"))
        shapes = [(column.shape[1:], column.dtype) for column in before.batch.raw().values()]
        each = sum(math.prod(shape) * dtype.itemsize for shape, dtype in shapes)
        claims.check_room(each * len(rows), f"the batch of phase {record['stage']!r}")
    base = before if rows is None else before.select_idxs(rows)
    written = delta if rows is None else delta.without(_SOURCE_ROW)
    kept = base.without(*(name for name in written.columns if name in base))
    batch = kept.union(written.with_meta(**kept.meta_info))
    return Phase(
        stage=record["stage"],
        batch=batch.with_meta(**record["meta_info"]),
        wrote=record["wrote"],
        metrics=record["metrics"],
        settings=record["settings"],
        source=record["source"],
        seconds=record["seconds"],
        rows=rows,
    )


def perform(stage: Stage, batch: DataProto) -> Phase:
    """Run one stage on one batch and keep what it did.

    Raises `ColumnMissing` before the stage runs where the batch lacks what it reads, and
    `PipelineError` after where it did not write what it promised.
    """
    missing = [name for name in stage.reads if name not in batch]
    if missing:
        raise ColumnMissing(message(f"stage {stage.name!r} reads {missing}", found=", ".join(batch.columns)))
    settings, source = describe_settings(stage)
    forget_last_error()
    began = time.perf_counter()
    running = STAGE.set(stage.name)
    try:
        with boundary(f"stage {stage.name!r}"):
            outcome = stage(batch)
    finally:
        STAGE.reset(running)
    seconds = time.perf_counter() - began
    unwritten = [name for name in stage.writes if name not in outcome.batch]
    if unwritten:
        raise PipelineError(
            message(f"stage {stage.name!r} promised {unwritten}", found=", ".join(outcome.batch.columns))
        )
    return Phase(
        stage=stage.name,
        batch=outcome.batch,
        wrote=_wrote(stage, batch, outcome.batch, outcome.rows is not None),
        metrics=reduce([outcome.metrics]),
        settings=settings,
        source=source,
        seconds=seconds,
        rows=outcome.rows,
    )


def _wrote(stage: Stage, before: DataProto, after: DataProto, moved: bool) -> tuple[str, ...]:
    """New and changed columns. Where rows moved every column is a new object, so the stage's word counts."""
    if moved:
        return tuple(name for name in after.columns if name in stage.writes or name not in before)
    return tuple(name for name in after.columns if not unchanged(name, before, after))


def unchanged(name: str, before: DataProto, after: DataProto) -> bool:
    """Whether two batches hold the very same column; one that both still have on disk is not read for it."""
    if name not in before or name not in after:
        return False
    a, b = ((batch.batch if name in batch.batch else batch.non_tensor_batch).raw()[name] for batch in (before, after))
    return a is b or _same_place(a, b) or before[name] is after[name]


def _same_place(a: Any, b: Any) -> bool:
    """Whether two columns that nobody has read yet are one on disk: what is saved is never overwritten."""
    if not isinstance(a, Lazy) or not isinstance(b, Lazy):
        return False
    x, y = (inspect.unwrap(column.read) for column in (a, b))
    return isinstance(x, partial) and isinstance(y, partial) and (x.func, x.args) == (y.func, y.args)


def describe_settings(stage: Stage) -> tuple[dict[str, Any], dict[str, str]]:
    """A stage's settings as plain JSON values, and the source text of the functions among them."""
    plain: dict[str, Any] = {}
    source: dict[str, str] = {}
    for name, value in {**stage.settings(), **foreign_class(stage)}.items():
        if name != "class":
            plain[name] = value if isinstance(value, int | float | str | bool | type(None)) else _named(value)
        text = source_of(value)
        if text is not None:
            source[name] = text
    return plain, source


def _named(value: Any) -> str:
    name = getattr(value, "name", None) or getattr(value, "__name__", None)
    return name if isinstance(name, str) else repr(value)


def pipeline_hash(stages: Any) -> str:
    """Eight hex digits over every setting and function source of a pipeline."""
    return settings_hash({stage.name: describe_settings(stage) for stage in stages})
