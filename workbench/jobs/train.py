"""`train`: the training loop with its run folder, and its display in a notebook."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import logging
import os
import signal
import time
import warnings
from collections.abc import Callable, Coroutine, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

from workbench.base.config import require
from workbench.base.errors import DataError, RunError, SettingError, describe, first_line, message
from workbench.base.files import write_bytes, write_text
from workbench.base.runtime import Control, on_signals
from workbench.datasets import Rows
from workbench.jobs.health import HealthPage, Watcher, health_page
from workbench.replay.run import Run
from workbench.runs.conditions import Condition, Goal, check_condition, named
from workbench.runs.folder import RunFolder, check_place, read_metrics, room, write_json
from workbench.runs.loop import Ending, Observer, Session, write_summary
from workbench.runs.preflight import Checked, preflight
from workbench.runs.resume import Start, begin, check_resumable
from workbench.runs.settings import Plan, resolved, with_history
from workbench.runs.streaming import STALE
from workbench.runs.trackers import append_line, check_trackers, default_trackers
from workbench.stages.pipeline import Pipeline
from workbench.steps.execute import MOST
from workbench.views.curves import panel, png
from workbench.widgets.display import in_notebook, open_display

log = logging.getLogger("workbench")


class RunStopped(RunError):
    """In a job: `break_if` stopped the training before a step's update; the run folder has the trace and a checkpoint."""


class Training(Coroutine[Any, Any, Run]):
    """The awaitable that `train` returns. Until it is awaited nothing has been checked, written or trained.

    It can be awaited, made a task, or passed to `asyncio.run`, as any coroutine; using it as if it were the finished run
    raises an `AttributeError` that says to await it.
    """

    def __init__(self, begin: Callable[[], Coroutine[Any, Any, Run]]) -> None:
        self._begin = begin
        self._work: Coroutine[Any, Any, Run] | None = None

    def __await__(self) -> Generator[Any, Any, Run]:
        return (yield from self._started().__await__())

    def send(self, value: Any) -> Any:
        """Start the training, or continue it where it waits (coroutine protocol, called by `await`)."""
        return self._started().send(value)

    def throw(self, *raised: Any) -> Any:
        """Raise an exception in the training where it waits (coroutine protocol)."""
        return self._started().throw(*raised)

    def close(self) -> None:
        """End the training where it waits (coroutine protocol)."""
        self._started().close()

    def _started(self) -> Coroutine[Any, Any, Run]:
        self._work = self._work or self._begin()
        return self._work

    def _state(self) -> str:
        """ "" before it is awaited, then `under way`, then `over`."""
        work = self.__dict__.get("_work")
        return "" if work is None else "over" if inspect.getcoroutinestate(work) == inspect.CORO_CLOSED else "under way"

    def __getattr__(self, name: str) -> Any:
        what, state = f"a training has no {name!r} (the run that it returns may have)", self._state()
        if not state:
            raise AttributeError(_not_begun(what))
        do = "take the run that `await` returned, or wb.load_run(path)"
        if state == "under way":
            do = "wait for the run that `await` returns, or read its folder meanwhile: wb.load_run(path)"
        raise AttributeError(message(what, found=f"a training that is {state}", do=do))

    def __repr__(self) -> str:
        state = self._state()
        return f"a training that is {state}" if state else _not_begun("a training, not yet a run")

    def __del__(self) -> None:
        if self.__dict__.get("_begin") is not None and self._work is None:
            warnings.warn(_not_begun("a training was dropped"), RuntimeWarning, stacklevel=2)


def _not_begun(what: str) -> str:
    do = "run = await wb.train(…) in a notebook, run = wb.train_blocking(…) in a script"
    return message(what, found="a training that has not been awaited", do=do)


def train(
    pipeline: Pipeline,
    rows: Rows,
    *,
    steps: int | None = None,
    epochs: float | None = None,
    run: str | Path | None = None,
    batch_size: int = 16,
    seed: int = 0,
    ahead: int = 0,
    max_lag: int | None = None,
    stale: str = "keep",
    eval_rows: Rows | None = None,
    test_freq: int = 0,
    val_samples: int = 1,
    save_freq: int = 0,
    trace_freq: int = 10,
    keep_traces: int = 3,
    keep_checkpoints: int = 2,
    keep_updates: int = 1024,
    keep_val: int = 10,
    max_recoveries: int = 3,
    max_rollout_kl: float | None = 0.2,
    break_if: Condition | None = None,
    save_best: str | None = None,
    stop_when: str | None = None,
    patience: int = 3,
    min_delta: float = 0.0,
    resume: str | None = None,
    allow_changes: Sequence[str] = (),
    trackers: Sequence[str] | None = None,
    project: str = "workbench",
    experiment: str | None = None,
    display: str | None = "auto",
    observers: Sequence[Observer] = (),
    health: bool | int | None = None,
) -> Training:
    """Train with the stages of a pipeline; settings, metrics, traces and checkpoints are kept in a run folder.

    Args:
        rows, run: the training prompts; the run folder (None: the job's for its first training, else one in `runs` by the time).
        steps, epochs, batch_size: how many training steps, or instead how many passes over the rows; prompts per step.
        ahead, max_lag, stale: sample during the update before (`steps.execute`); without end, at most k versions old (`runs.streaming`).
        eval_rows, test_freq, val_samples: validate on these rows every so many steps, and before the first, so many samples each.
        save_freq, trace_freq: save a checkpoint, record a trace, every so many steps; 0, as for `test_freq`: after the last.
        keep_updates, keep_val: MiB of recorded update inputs, for any step's weights (`run.stepper`); validations kept in `val/`.
        max_recoveries: how often a step is done again, exactly, whose workers are gone; health: port of a health page (`jobs.health`).
        max_rollout_kl, break_if: stop where the sampler is so many nats a token off the learner (None: never); or where this function
            of all that a step records is true, before its update: `.stopped` of the run is a Stepper there, a job raises `RunStopped`.
        save_best: keep the checkpoint with the best of a validation metric, `run.checkpoint("best")`: `"val/reward"`, `"min val/nll"`.
        stop_when, patience, min_delta: end the run after so many validations without such a metric better by more than `min_delta`.
        resume: `"auto"` goes on exactly from the newest good checkpoint; other settings are refused that `allow_changes` does not
            name (`["engines.actor.lr"]`). `"never"` refuses a folder with a run. None: "auto" in a job without `resume`, else "never".
        trackers, project, experiment: `console`, `tensorboard` (None: where installed), `wandb`, `mlflow`; the names there.

    Returns an awaitable of the `Run` (a script calls `train_blocking`). An interrupt (SIGTERM, SIGHUP too) or an error leaves a
    checkpoint of the last whole step.

    Example:
        >>> run = await wb.train(wb.recipes.grpo(engine), rows, steps=50, run="runs/a")  # doctest: +SKIP
    """
    return Training(functools.partial(_watched, **locals()))


async def _watched(*, health: bool | int | None, **given: Any) -> Run:
    """The training, with its health page where one is asked for: it is there before any work begins."""
    with health_page(health) as page, _ending_signals():
        return await _trained(**given, page=page)


@contextlib.contextmanager
def _ending_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP (a closed terminal) end a script's training as Ctrl-C does, and then the script, by 128 + their number.

    What the script handles or ignores (nohup) is left alone, and so is a notebook's kernel.
    """
    task, loop, received = asyncio.current_task(), asyncio.get_running_loop(), list[int]()

    def end(number: int, _: Any) -> None:
        received.append(number)
        if task is not None:
            loop.call_soon_threadsafe(task.cancel)

    ours = [one for one in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(one) is signal.SIG_DFL]
    try:
        with on_signals(end, *ours) if ours and not in_notebook() else contextlib.nullcontext():
            yield
    except asyncio.CancelledError as cause:
        if not received:
            raise
        log.warning("%s: %s", signal.Signals(received[0]).name, cause)
        raise SystemExit(128 + received[0]) from cause


async def _trained(
    pipeline: Pipeline,
    rows: Rows,
    *,
    steps: int | None,
    epochs: float | None,
    run: str | Path | None,
    eval_rows: Rows | None,
    break_if: Condition | None,
    resume: str | None,
    allow_changes: Sequence[str],
    trackers: Sequence[str] | None,
    project: str,
    experiment: str | None,
    display: str | None,
    observers: Sequence[Observer],
    page: HealthPage | None,
    **planned: Any,
) -> Run:
    for name, one in (("rows", rows), ("eval_rows", rows if eval_rows is None else eval_rows)):
        if not isinstance(one, Rows):
            raise DataError(name, expected="Rows", found=describe(one), do="make them: wb.rows(…)")
    resume = os.environ.get("WORKBENCH_RESUME", "never") if resume is None else resume
    trackers = default_trackers() if trackers is None else trackers
    plan = Plan(steps=_steps(steps, epochs, rows, planned["batch_size"]), **planned)
    _check_arguments(plan, resume, display, trackers)
    _check_conditions(plan, eval_rows, break_if)
    path = Path(run) if run is not None else _folder()
    check_place(path)
    found = preflight(pipeline, rows, eval_rows, plan, path)
    tracking = {"trackers": list(trackers), "project": project, "experiment": experiment}
    tracking |= {} if break_if is None else {"break_if": named(break_if)}
    settings = resolved(pipeline, rows, plan, eval_rows, tracking, found.prompts)
    if os.environ.get("WORKBENCH_CHECK"):
        check_resumable(path, settings, resume, allow_changes)
        raise Checked(repr(found))
    with room(path), contextlib.ExitStack() as stack:
        folder = RunFolder(path)
        stack.callback(folder.lock.release)
        start = begin(folder, pipeline, rows, settings, resume=resume, allow_changes=allow_changes)
        if start.step > plan.steps:
            return _nothing_to_do(path, start, plan.steps, eval_rows)
        if record := os.environ.get("WORKBENCH_JOB_RECORD"):
            write_text(path / "job.json", Path(record).read_text(encoding="utf-8"))
        settings = with_history(settings, start.old, start.step, start.changes)
        write_json(path / "settings.json", settings)
        control = Control()
        if page is not None:
            observers = (*observers, page.watching(Watcher(path, pipeline, control)))
        live = open_display(plan.steps, read_metrics(folder.metrics), control, path) if display == "auto" else None
        session = Session(folder, pipeline, found, plan, settings, start, control=control, display=live, draw=_draw)
        ending = await session.run(observers, break_if)
    return _result(path, ending, (*start.notes, *session.notes), break_if)


def train_blocking(pipeline: Pipeline, rows: Rows, **settings: Any) -> Run:
    """Train to the end, for scripts without an event loop: takes the arguments of `train`, returns the finished `Run`.

    Raises `SettingError` where an event loop runs, as in a notebook: there `await train(…)` trains.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(train(pipeline, rows, **settings))
    what, found = (
        "train_blocking waits for a training in the thread of an event loop",
        "a loop that runs, as in a notebook",
    )
    raise SettingError(
        what, expected="a script without one", found=found, do="run = await wb.train(…), with the same arguments"
    )


def _draw(path: Path) -> None:
    write_bytes(path / "curves.png", png(panel(read_metrics(path / "metrics.jsonl"), title=path.name)))


def _folder() -> Path:
    """The folder of a training that names none: the job's for the first one in a job, then a new one."""
    return Path(os.environ.pop("WORKBENCH_RUN", "") or Path("runs") / time.strftime("%Y%m%d-%H%M%S"))


def _steps(steps: int | None, epochs: float | None, rows: Rows, batch_size: int) -> int:
    """The number of steps, given or as many as the epochs have; an epoch's incomplete last batch is no step."""
    if (steps is None) == (epochs is None):
        found = "neither" if steps is None else f"steps={steps} and epochs={epochs}"
        raise SettingError("how long to train", expected="steps=… or epochs=…", found=found)
    if epochs is None:
        return steps  # type: ignore[return-value] # one of them is given
    positive = isinstance(epochs, int | float) and not isinstance(epochs, bool) and epochs > 0
    require(positive, "argument epochs", expected="a number > 0", found=epochs)
    return max(1, round(epochs * (len(rows) // batch_size)))


def _result(path: Path, ending: Ending, notes: tuple[str, ...], limit: Any) -> Run:
    if ending.stopped is not None and os.environ.get("WORKBENCH_JOB"):
        why = f"{limit.why(ending.metrics)}; " if hasattr(limit, "why") else ""
        what = f"break_if was met at step {ending.stopped.trace.step}; the run stopped before its update"
        raise RunStopped(what, do=f"{why}the step's trace and a checkpoint of step {ending.step} are in {path}")
    return Run(path, stopped=ending.stopped, notes=notes, trust=True)  # whoever trained it named its code


def _nothing_to_do(path: Path, start: Start, steps: int, eval_rows: Rows | None) -> Run:
    """Note it; a run that was killed after its last checkpoint gets the curves and the summary that it lacks."""
    note = f"nothing left to do: {start.step - 1} of {steps} steps are done"
    append_line(note)
    if not (path / "summary.json").is_file():
        write_summary(path, eval_rows, None)
        try:
            _draw(path)
            write_summary(path, eval_rows, None)  # its paths have the picture, too
        except Exception as error:  # noqa: BLE001 - a picture ends nothing
            note += f"; the curves could not be drawn: {first_line(error)}"
    return Run(path, notes=(*start.notes, note))


def _check_conditions(plan: Plan, eval_rows: Rows | None, break_if: Condition | None) -> None:
    check_condition(break_if, validates=eval_rows is not None)
    for setting in ("save_best", "stop_when"):
        if (text := getattr(plan, setting)) is not None:
            Goal.of(text, setting)
            do = "hold some out: rows, held_out = rows.split(64); train(…, eval_rows=held_out)"
            require(eval_rows is not None, f"{setting}={text!r}", expected="eval_rows", found=None, do=do)
    often = plan.stop_when is None or plan.test_freq >= 1
    require(often, "stop_when", expected="validations between steps", found="test_freq=0", do="set test_freq=10, say")
    least = plan.min_delta
    require(isinstance(least, int | float) and least >= 0, "argument min_delta", expected="a number ≥ 0", found=least)


def _check_arguments(plan: Plan, resume: str, display: str | None, trackers: Sequence[str]) -> None:
    ones = ("steps", "batch_size", "val_samples", "keep_traces", "keep_val", "patience")
    least = {"keep_checkpoints": 2} | dict.fromkeys(ones, 1)
    least |= dict.fromkeys(("test_freq", "save_freq", "trace_freq", "keep_updates", "max_recoveries"), 0)
    for name, lowest in least.items():
        found = getattr(plan, name)
        require(isinstance(found, int) and found >= lowest, f"argument {name}", expected=f"≥ {lowest}", found=found)
    whole = isinstance(plan.ahead, int) and not isinstance(plan.ahead, bool)
    require(whole and 0 <= plan.ahead <= MOST, "argument ahead", expected=f"0 or {MOST} steps", found=plan.ahead)
    lag = plan.max_lag
    whole = lag is None or (isinstance(lag, int) and not isinstance(lag, bool) and lag >= 1)
    require(whole, "argument max_lag", expected="≥ 1 policy versions, or None", found=lag)
    require(
        not (lag and plan.ahead), "arguments ahead and max_lag", expected="one of them", found=f"ahead=1, max_lag={lag}"
    )
    require(plan.stale in STALE, "argument stale", expected=f"one of {', '.join(STALE)}", found=plan.stale)
    limit = plan.max_rollout_kl
    require(limit is None or limit > 0, "argument max_rollout_kl", expected="nats > 0, or None", found=limit)
    require(resume in ("never", "auto"), "argument resume", expected="'never' or 'auto'", found=resume)
    require(display in ("auto", None), "argument display", expected="'auto' or None", found=display)
    check_trackers(trackers)
