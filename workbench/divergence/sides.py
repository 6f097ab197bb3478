"""What can be compared, as two lists of phases: traces, steppers, batches, folders of saved ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from workbench.columns import COLUMNS, nearest_column, writer_of
from workbench.dataproto import DataProto
from workbench.errors import BatchError, ColumnMissing, describe, message
from workbench.trace import Phase, Trace

START = "start"
"""The name of the place before the first phase."""

Side = tuple[Phase, ...]


def opened(side: Any) -> Trace | DataProto:
    """A trace or a batch; `BatchError` for anything else."""
    if isinstance(side, Trace | DataProto):
        return side
    if isinstance(side, str | Path):
        folder = Path(side)
        if (folder / "trace.json").is_file():
            return Trace.load(folder)
        if (folder / "meta.json").is_file():
            return DataProto.load(folder)
        raise BatchError(message(f"nothing to compare at {folder}", expected="a folder with trace.json or meta.json"))
    trace = getattr(side, "trace", None)
    if isinstance(trace, Trace):
        return trace
    raise BatchError(
        message("diverge", expected="a trace, a stepper, a batch, or the folder of a saved one", found=describe(side))
    )


def sides_of(first: Trace | DataProto, second: Trace | DataProto) -> tuple[Side, Side]:
    """Both as phases, the start as one of them; one nameless phase where either is a batch alone.

    A batch alone may be a dump of a few columns, so those that one side alone has come last.
    """
    if isinstance(first, Trace) and isinstance(second, Trace):
        return _phases(first), _phases(second)
    a, b = (side.batch if isinstance(side, Trace) else side for side in (first, second))
    names = sorted(
        {*a.columns, *b.columns}, key=lambda name: (name not in a or name not in b, _declared_order(name, a, b))
    )
    return (_single("", a, names),), (_single("", b, names),)


def _phases(trace: Trace) -> Side:
    return (_single(START, trace.start, trace.start.columns), *trace.phases)


def _single(stage: str, batch: DataProto, wrote: Sequence[str]) -> Phase:
    return Phase(stage=stage, batch=batch, wrote=tuple(wrote), metrics={}, settings={})


def writer(name: str, a: DataProto, b: DataProto) -> str | None:
    """The stage that wrote a column, by its origin, else by its declaration."""
    made = a.origins.get(name) or b.origins.get(name)
    return made.stage if made is not None else writer_of(name)


def _declared_order(name: str, a: DataProto, b: DataProto) -> tuple[int, int, str]:
    """As `COLUMNS` has them; a column that is not there comes after those of its writer, else after all."""
    places = list(COLUMNS)
    if name in COLUMNS:
        return places.index(name), 0, name
    beside = [n for n, other in enumerate(places) if COLUMNS[other].writer == writer(name, a, b)]
    return (beside[-1] if beside else len(places)), 1, name


def check_names(sides: tuple[Side, Side], columns: Sequence[str] | None) -> None:
    """Refuses a name that neither side has."""
    known = tuple(dict.fromkeys(name for side in sides for phase in side for name in phase.batch.columns))
    for name in columns or ():
        if name not in known:
            close = nearest_column(name, known)
            raise ColumnMissing(
                message(
                    f"neither side has {name!r}",
                    found=", ".join(known),
                    do=f"did you mean {close!r}?" if close else None,
                )
            )


def pairs(a: Side, b: Side) -> Iterator[tuple[Phase | None, Phase | None, bool]]:
    """Phases by name, in the first's order; None where a side has no such phase; and whether the second has it later."""
    names, waiting = {phase.stage for phase in a}, list(b)
    for one in a:
        while waiting and waiting[0].stage not in names:
            yield None, waiting.pop(0), False
        place = next((n for n, other in enumerate(waiting) if other.stage == one.stage), None)
        if place is None:
            yield one, None, False
        else:
            yield one, waiting.pop(place), place > 0
    yield from ((None, other, False) for other in waiting)
