"""Exceptions of workbench, and the form of their messages.

The tree (each error is also the builtin exception in brackets, and can be pickled)::

    WorkbenchError
    ├── BatchError (ValueError)            a DataProto cannot be what it was asked to be
    │   ├── ColumnMissing (KeyError, AttributeError)
    │   ├── ColumnInvalid                  dtype, dims or length do not fit the declaration
    │   └── UnionConflict                  two batches disagree about a column
    ├── PipelineError (ValueError)         a chain of stages cannot work
    ├── SettingError (ValueError, TypeError)  a setting is unknown, missing or impossible
    ├── DataError (ValueError)             a data file or a row of it
    ├── EngineError (RuntimeError)         sampling, scoring, learning
    │   ├── OutOfMemory (MemoryError)
    │   ├── VersionMismatch                weights are not those that a stepper needs
    │   ├── WorkerLost                     a process of a group died: which, how, and the end of its log
    │   └── NonFinite                      NaN or infinity where a number must be
    ├── RewardError (RuntimeError)         scoring could not be done, or broke its contract
    ├── SandboxError (RuntimeError)        model code cannot be run safely here
    ├── RunError (RuntimeError)            a run folder
    │   └── CheckpointError                incomplete, corrupt or of another format
    ├── ForeignError (RuntimeError)        the user's or a library's code raised; says where
    ├── PackageMissing (ImportError)       an optional package is not installed
    └── Interrupted (RuntimeError)         the work was asked to stop
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any


class WorkbenchError(Exception):
    """Base of every error that workbench raises on purpose. The message says what is wrong, what was expected and
    found, and what to do.

    Example:
        >>> raise SettingError("'step' is not a setting of grpo", do="did you mean 'steps'?")  # doctest: +SKIP
    """

    def __init__(self, what: str = "", *, expected: object = None, found: object = None, do: str | None = None) -> None:
        super().__init__(message(what, expected=expected, found=found, do=do))

    def __str__(self) -> str:  # KeyError would print the repr of its argument
        return str(self.args[0]) if self.args and self.args[0] else type(self).__name__


class BatchError(WorkbenchError, ValueError):
    """A `DataProto` cannot be made or changed as requested."""


class ColumnMissing(BatchError, KeyError, AttributeError):
    """A batch does not have the column that was requested.

    It is an `AttributeError` too, so that `hasattr`, `copy` and completion work on a batch.
    """


class ColumnInvalid(BatchError):
    """A column's dtype, dims or length do not fit its declaration or the batch's other columns."""


class UnionConflict(BatchError):
    """Batches to be joined hold different values in a column or `meta_info` key of the same name."""


class PipelineError(WorkbenchError, ValueError):
    """A chain of stages cannot work, for example because a stage reads a column that none writes."""


class SettingError(WorkbenchError, ValueError, TypeError):
    """A setting is unknown, missing, of the wrong type or impossible."""


class DataError(WorkbenchError, ValueError):
    """A data file, or a row of it, cannot be used."""


class EngineError(WorkbenchError, RuntimeError):
    """An engine could not sample, score or learn."""


class OutOfMemory(EngineError, MemoryError):
    """Memory ran out, or an estimate says that it would."""


class VersionMismatch(EngineError):
    """The engine does not hold the weights that were requested, and no snapshot has them."""


class WorkerLost(EngineError):
    """A worker process died: `rank` says which, `exit` how, `log` has its last lines. The other processes of its group
    were ended, too.
    """

    def __init__(self, what: str = "", *, rank: int | None = None, exit: str = "", log: str = "", **told: Any) -> None:
        super().__init__(what, **told)
        self.rank = rank
        self.exit = exit
        """How the process ended: `SIGKILL`, `exit code 3`."""
        self.log = log
        """The last lines that the process wrote."""


class NonFinite(EngineError):
    """A NaN or infinity where only a number makes sense; the weights were not changed."""


class RewardError(WorkbenchError, RuntimeError):
    """A reward could not be computed, or a reward function has a signature or a result that cannot be used."""


class SandboxError(WorkbenchError, RuntimeError):
    """Model code cannot be run with the isolation that was requested."""


class RunError(WorkbenchError, RuntimeError):
    """A run folder is missing, locked, or not what its settings say."""


class CheckpointError(RunError):
    """A checkpoint is incomplete, corrupt, or of another format."""


class ForeignError(WorkbenchError, RuntimeError):
    """The user's or a library's code raised an exception, which is the `__cause__` of this one."""


class PackageMissing(WorkbenchError, ImportError):
    """An optional package is not installed; the message names the extra that brings it."""


class Interrupted(WorkbenchError, RuntimeError):
    """The work was asked to stop, and stopped at a safe place."""


def message(what: str, *, expected: object = None, found: object = None, do: str | None = None) -> str:
    """Join an error text in workbench's order: what is wrong, what was expected, what was found, what to do.

    >>> message("'step' is not a setting of grpo", found="step", do="did you mean 'steps'?")
    "'step' is not a setting of grpo; found step; did you mean 'steps'?"
    """
    parts = [what]
    if expected is not None:
        parts.append(f"expected {expected}")
    if found is not None:
        parts.append(f"found {found}")
    if do is not None:
        parts.append(do)
    return "; ".join(parts)


def nearest(name: str, known: Iterable[str], alike: float = 0.6) -> str | None:
    """Return the known name that looks most like `name`, or None where none is `alike` (1: equal)."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=alike)
    return close[0] if close else None


def unknown(kind: str, name: str, known: Iterable[str]) -> str:
    """Make the error text for an unknown name of some kind: it lists the known names and suggests the nearest."""
    names = list(known)
    close = nearest(name, names)
    hint = f"did you mean {close!r}?" if close else None
    article = "an" if re.match("(?!uni|use|one|eu)[aeiou]", kind, re.IGNORECASE) else "a"
    return message(f"{name!r} is not {article} {kind}", expected=f"one of {', '.join(names) or '(none)'}", do=hint)


def check_name(kind: str, name: str, known: Collection[str], error: type[WorkbenchError] = SettingError) -> None:
    """Raise `error` for a name of some kind that is not among the known ones; the message is that of `unknown`."""
    if name not in known:
        raise error(unknown(kind, name, known))


@contextmanager
def boundary(place: str, error: type[WorkbenchError] = ForeignError) -> Iterator[None]:
    """Context manager around the user's or a library's code: raises its exceptions as `error`, with `place` in the text.

    `WorkbenchError`, `KeyboardInterrupt` and `SystemExit` pass unchanged. The original exception is the `__cause__`.
    There is no time limit here, because a thread cannot be killed: see `rewards.runner`.
    """
    try:
        yield
    except WorkbenchError:
        raise
    except Exception as cause:
        raise error(f"{place} raised {type(cause).__name__}: {cause}") from cause


def first_line(error: BaseException, limit: int = 200) -> str:
    """Return `TypeName: first line of the message`, cut to `limit` characters, for tables and records.

    A traceback that begins there is left out.
    """
    text = str(error).strip().splitlines()
    line = f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
    line = line.removesuffix("; Traceback (most recent call last):")
    return line if len(line) <= limit else line[: limit - 1] + "…"


def describe(value: Any, limit: int = 80) -> str:
    """Return the repr of a value for an error message, cut to `limit` characters."""
    try:
        text = repr(value)
    except Exception as cause:  # noqa: BLE001 - of a user's class, or nested too deep: the message is about something else
        text = f"<{type(value).__name__} whose repr raises {type(cause).__name__}>"
    return text if len(text) <= limit else text[: limit - 1] + "…"
