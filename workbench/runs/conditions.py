"""Conditions of a training: observers, `break_if`, the best checkpoint, and stopping for lack of progress.

A condition sees all that is recorded for a step. What cannot be evaluated is never taken for "go on": a name that no step has
had by the second time it is looked up, an exception, and an answer that is neither true nor false end the run, by name.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from workbench.base.config import require
from workbench.base.errors import (
    Interrupted,
    RunError,
    SettingError,
    check_name,
    describe,
    first_line,
    nearest,
)
from workbench.runs.folder import STEP, read_metrics, read_settings
from workbench.steps.trace import Trace

Condition = Callable[[Mapping[str, float]], bool]
"""Function of a step's metrics (with held-out ones where the step validated) that returns whether the loop stops before
the update."""
BEST = "best"
"""Name of the checkpoint that `save_best` keeps, used in place of a step number."""
_HELD_OUT = "val"
"""First part of the names of validation metrics."""


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """What an observer gets after each training step: step number, epoch, all metrics, and the trace with every phase's
    batch.
    """

    step: int
    epoch: int
    metrics: dict[str, float]
    trace: Trace


class Observer(Protocol):
    """Watches a training loop through the methods below. An exception that one of them raises ends the loop."""

    def on_start(self, start: int, steps: int) -> None:
        """Called before the loop; `start` is the first step to run, `steps` the last."""

    def on_step(self, report: StepReport) -> None:
        """Called after every step."""

    def on_end(self, error: BaseException | None) -> None:
        """Called once at the end; `error` is the exception that ended the loop early, else None."""


class Metrics(dict[str, float]):
    """A step's metrics as `break_if` gets them: a dict that notes in `missing` each name that was looked up and is not
    there.
    """

    def __init__(self, metrics: Mapping[str, float]) -> None:
        super().__init__(metrics)
        self.missing: set[str] = set()

    def __missing__(self, name: str) -> float:
        self.missing.add(name)
        raise KeyError(name)

    def __contains__(self, name: object) -> bool:
        self.missing |= {str(name)} - self.keys()
        return super().__contains__(name)

    def get(self, name: str, default: Any = None) -> Any:
        """The value of a metric, or `default`."""
        self.missing |= {name} - self.keys()
        return super().get(name, default)


def check_condition(condition: Any, *, validates: bool) -> None:
    """Raise `SettingError` for a `break_if` that is certain to fail: one that is not a plain function of one argument,
    or one that names a validation metric (`val/…`) where the run does not validate (`validates` is false).
    """
    if condition is None:
        return
    what, expected = f"break_if {named(condition)}", "a function of a step's metrics that returns true or false"
    require(callable(condition), what, expected=expected, found=condition)
    awaited = any(map(inspect.iscoroutinefunction, (condition, getattr(condition, "__call__", None))))  # noqa: B004
    require(not awaited, what, expected=expected, found="a coroutine function")
    constants = getattr(getattr(condition, "__code__", None), "co_consts", ())
    held_out = [one for one in constants if isinstance(one, str) and one.startswith((f"{_HELD_OUT}/", f"{_HELD_OUT}-"))]
    if held_out and not validates:
        do = "give train eval_rows=…, and test_freq=… for how often they are scored"
        raise SettingError(what, expected="metrics of the run", found=f"{held_out[0]!r}, without eval_rows", do=do)
    try:
        inspect.signature(condition).bind({})
    except TypeError as cause:
        raise SettingError(what, expected=expected, found=first_line(cause)) from cause
    except ValueError:  # a builtin without a signature: it is tried
        return


def named(condition: Any) -> str:
    """Return a condition's name for errors and records: a function's qualified name, else the shortened repr."""
    return str(getattr(condition, "__qualname__", None) or describe(condition, 60))


class Guard:
    """Evaluates `break_if` after each step, and refuses names of metrics that no step has.

    `past` are the metrics rows of the run's earlier steps, whose names count as known.
    """

    def __init__(self, condition: Condition, past: Iterable[Mapping[str, Any]], *, validates: bool) -> None:
        self._condition, self._validates = condition, validates
        self._known = {name for row in past for name in row}
        self._waiting: set[str] = set()
        """Names of metrics that the condition looked up and no step has had."""

    def __call__(self, metrics: Mapping[str, float]) -> bool:
        """Return whether the condition is met by a step's metrics. False where it needs a metric that only this step
        lacks.

        Raises `SettingError` where the condition raises, returns something other than true or false, or needs an
        unknown metric.
        """
        self._known |= metrics.keys()
        seen, what = Metrics(metrics), f"break_if {named(self._condition)}"
        stops, cause = False, None
        try:
            answer: Any = self._condition(seen)
            wrong = describe(answer) if answer is None or isinstance(answer, str) or inspect.isawaitable(answer) else ""
            stops = bool(answer)
        except Interrupted:
            raise
        except Exception as error:  # noqa: BLE001 - a user's function; raised below, by its name
            absent = isinstance(error, KeyError) and error.args and error.args[0] in seen.missing
            wrong, cause = "" if absent else first_line(error), error
        if wrong:
            do = "return a comparison of metrics; then go on with resume='auto'"
            raise SettingError(what, expected="true or false", found=wrong, do=do) from cause
        self._refuse_names(seen.missing, what)
        return stops

    def _refuse_names(self, missing: set[str], what: str) -> None:
        """Raise `SettingError` for a missing metric that the condition also looked up in an earlier step and that no
        step has had.
        """
        late = self._validates and not any(name.startswith(_HELD_OUT) for name in self._known)
        never = {name for name in missing - self._known if not (late and name.startswith(_HELD_OUT))}
        for name in sorted(never & self._waiting):
            close = nearest(name, self._known)
            do = f"did you mean {close!r}?" if close else f"take one of {', '.join(sorted(self._known))}"
            found = f"{name!r}, which no step has had"
            raise SettingError(f"a metric of {what}", expected="one that is recorded", found=found, do=do)
        self._waiting |= never


@dataclass(frozen=True)
class Goal:
    """A validation metric that `save_best` or `stop_when` watches, and whether a lower value of it is better."""

    metric: str
    lower: bool

    @classmethod
    def of(cls, text: Any, setting: str) -> Goal:
        """Parse a goal: `"val/reward"`, or with a direction `"max val/reward"` or `"min val/nll"`.

        Without a direction, lower is better for names that end in `loss` or `nll`. `setting` is named in the error.
        """
        words = text.split() if isinstance(text, str) else []
        name = words[-1] if words else ""
        held_out = name.startswith((f"{_HELD_OUT}/", f"{_HELD_OUT}-")) and words[:-1] in ([], ["min"], ["max"])
        expected = "a metric of validations, such as 'val/reward' or 'min val/nll'"
        require(held_out, f"argument {setting}", expected=expected, found=text)
        return cls(name, words[0] == "min" if words[1:] else name.endswith(("loss", "nll")))

    def check(self, metrics: Mapping[str, Any]) -> None:
        """Raise `SettingError` where the metrics of a validation do not have the goal's metric."""
        check_name("metric of a validation", self.metric, metrics)

    def progress(self, rows: Iterable[Mapping[str, Any]], least: float = 0.0) -> tuple[int | None, float, int]:
        """Return (step of the best validation, its value, number of validations since), read from metrics rows.

        A validation becomes the best one where its value is better than the best so far by more than `least`. None and
        NaN where no row has a value.
        """
        best, value, since = None, math.nan, 0
        for row in rows:
            if self.metric not in row:
                continue
            since, now = since + 1, row[self.metric]
            if now is not None and (best is None or (value - now if self.lower else now - value) > least):
                best, value, since = int(row[STEP]), float(now), 0
        return best, value, since


def best_step(run: Path) -> int:
    """Return the step whose checkpoint `save_best` keeps, by the metrics so far. Raises `RunError` for a run without
    `save_best`, or before its first validation.
    """
    goal = read_settings(run)["train"].get("save_best")
    best = Goal.of(goal, "save_best").progress(read_metrics(run / "metrics.jsonl"))[0] if goal else None
    if best is None:
        do = None if goal else "keep one in a new run: train(…, save_best='val/reward', eval_rows=held_out)"
        raise RunError(f"no best checkpoint in {run}", found=f"save_best={goal!r}, and no validation yet", do=do)
    return best
