"""`train`: the training loop with its run folder, and its display in a notebook."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import logging
import os
import signal
import warnings
from collections.abc import Callable, Coroutine, Generator, Iterator
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from workbench.base.config import shows_settings
from workbench.base.errors import RunError, SettingError, first_line, message, refuse_unknown
from workbench.base.files import write_bytes, write_text
from workbench.base.progress import hidden, seldom, shown_by, working
from workbench.base.runtime import Control, on_signals
from workbench.datasets.rows import Rows, check_rows
from workbench.jobs.health import HealthPage, Watcher, health_page
from workbench.replay.run import Run
from workbench.runs.folder import RunFolder, check_place, read_metrics, room, write_json
from workbench.runs.loop import Ending, TrainingLoop, write_summary
from workbench.runs.preflight import Checked, preflight
from workbench.runs.resume import Start, begin, check_resumable
from workbench.runs.settings import TrainPlan, TrainSettings, resolved, with_history
from workbench.runs.trackers import append_line
from workbench.stages.pipeline import Pipeline
from workbench.views.curves import panel, png
from workbench.widgets.display import in_notebook, open_display

log = logging.getLogger("workbench")

P = ParamSpec("P")
T = TypeVar("T")


class RunStopped(RunError):
    """Raised in a job when `break_if` stopped the training before a step's update; the run folder has the trace and a
    checkpoint.
    """


class Training(Coroutine[Any, Any, Run]):
    """The awaitable that `train` returns. The settings are checked already; nothing else is checked, written or trained
    until it is awaited.

    It can be awaited, made a task, or passed to `asyncio.run`, as any coroutine. Using it as if it were the finished
    run raises an `AttributeError` that says to await it.
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
        """Return "" before the training is awaited, then `under way`, then `over`."""
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


def _takes_settings(
    settings_class: Callable[P, TrainSettings],
) -> Callable[[Callable[[Pipeline, Rows, TrainSettings], T]], Callable[Concatenate[Pipeline, Rows, P], T]]:
    """Decorator that turns a function of `TrainSettings` into one of keyword arguments, with types and defaults in its
    signature.

    `settings_class` tells a type checker the arguments. A name that is not a setting is refused: the message has the
    nearest one, or for another library's name the one used here.
    """

    def decorated(
        function: Callable[[Pipeline, Rows, TrainSettings], T],
    ) -> Callable[Concatenate[Pipeline, Rows, P], T]:
        @functools.wraps(function)
        def takes(pipeline: Pipeline, rows: Rows, *_: P.args, **settings: P.kwargs) -> T:
            refuse_unknown(function.__name__, settings, TrainSettings.field_names())
            check_rows("argument rows", rows)
            return function(pipeline, rows, TrainSettings.from_parameters(settings))

        return shows_settings(TrainSettings)(takes)

    return decorated


@_takes_settings(TrainSettings)
def train(pipeline: Pipeline, rows: Rows, settings: TrainSettings) -> Training:
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
        resume: `"auto"` goes on exactly from the newest good checkpoint, without one after the recorded updates; other
            settings are refused that `allow_changes` does not
            name (`["engines.actor.lr"]`). `"never"` refuses a folder with a run. None: "auto" in a job without `resume`, else "never".
        trackers, project, experiment: `console`, `tensorboard` (None: where installed), `wandb`, `mlflow`, `trackio`, `weave`; the names there.

    Returns an awaitable of the `Run` (a script calls `train_blocking`). An interrupt (SIGTERM, SIGHUP too) or an error leaves a
    checkpoint of the last whole step.

    Example:
        >>> run = await wb.train(wb.recipes.grpo(engine), rows, steps=50, run="runs/a")  # doctest: +SKIP
    """
    return Training(functools.partial(_watched, pipeline, rows, settings))


async def _watched(pipeline: Pipeline, rows: Rows, settings: TrainSettings) -> Run:
    """Train, with the health page served from before any work begins where one is set."""
    with health_page(settings.health) as page, _ending_signals():
        return await _trained(pipeline, rows, settings.planned(rows), page)


@contextlib.contextmanager
def _ending_signals() -> Iterator[None]:
    """Context manager: SIGTERM and SIGHUP (a closed terminal) end a script's training as Ctrl-C does, then the script
    with 128 + number.

    A signal that the script handles or ignores (nohup) is left alone, and so are all signals of a notebook's kernel.
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


async def _trained(pipeline: Pipeline, rows: Rows, plan: TrainPlan, page: HealthPage | None) -> Run:
    check_place(plan.run)
    with working("checking the settings", passing=True):
        checks = preflight(pipeline, rows, plan)
        settings = resolved(pipeline, rows, plan, checks.prompts)
    if os.environ.get("WORKBENCH_CHECK"):
        check_resumable(plan.run, settings, plan.resume, plan.allow_changes)
        raise Checked(repr(checks))
    with room(plan.run), contextlib.ExitStack() as stack:
        folder = RunFolder(plan.run)
        stack.callback(folder.lock.release)
        with working("opening the run folder", passing=True):
            start = begin(folder, pipeline, rows, settings, resume=plan.resume, allow_changes=plan.allow_changes)
        if start.step > plan.steps:
            return _nothing_to_do(plan, start)
        for note in start.notes:
            append_line(note)
        if record := os.environ.get("WORKBENCH_JOB_RECORD"):
            write_text(plan.run / "job.json", Path(record).read_text(encoding="utf-8"))
        settings = with_history(settings, start.old, start.step, start.changes)
        write_json(plan.run / "settings.json", settings)
        control = Control()
        if page is not None:
            watcher = page.watching(Watcher(plan.run, pipeline, control))
            plan = plan.replace(observers=(*plan.observers, watcher))
        rows_so_far = read_metrics(folder.metrics)
        shown = plan.display == "auto" and (in_notebook() or "console" not in plan.trackers)
        live = open_display(plan.steps, rows_so_far, control, plan.run) if shown else None
        session = TrainingLoop(
            folder, pipeline, rows, plan, settings, start, begun=checks.begun, control=control, display=live, draw=_draw
        )
        # the display has it; a job's terminal gets what takes long
        with shown_by(seldom(append_line) if os.environ.get("WORKBENCH_JOB") else hidden):
            ending = await session.run()
    return _result(plan, ending, (*start.notes, *session.notes))


@_takes_settings(TrainSettings)
def train_blocking(pipeline: Pipeline, rows: Rows, settings: TrainSettings) -> Run:
    """Train to the end, for scripts without an event loop: takes the arguments of `train`, returns the finished `Run`.

    Raises `SettingError` where an event loop runs, as in a notebook; use `await train(…)` there.
    """
    loop, runs = None, list[Run]()

    async def work() -> None:  # asyncio asks what a coroutine returns for its repr, and a run's reads all its traces
        runs.append(await _watched(pipeline, rows, settings))

    with contextlib.suppress(RuntimeError):
        loop = asyncio.get_running_loop()
    if loop is None:  # outside of the except clause, which would be the context of every error
        asyncio.run(work())
        return runs[0]
    what = "train_blocking cannot wait where an event loop already runs"
    do = "write run = await wb.train(…), with the same arguments"
    raise SettingError(
        what, expected="a script without an event loop", found="a running event loop, as in a notebook", do=do
    )


def _draw(path: Path) -> None:
    write_bytes(path / "curves.png", png(panel(read_metrics(path / "metrics.jsonl"), title=path.name)))


def _result(plan: TrainPlan, ending: Ending, notes: tuple[str, ...]) -> Run:
    if ending.stopped is not None and os.environ.get("WORKBENCH_JOB"):
        reason = getattr(plan.break_if, "why", None)
        why = f"{reason(ending.metrics)}; " if reason is not None else ""
        what = f"break_if was met at step {ending.stopped.trace.step}; the run stopped before its update"
        raise RunStopped(what, do=f"{why}the step's trace and a checkpoint of step {ending.step} are in {plan.run}")
    return Run(plan.run, stopped=ending.stopped, notes=notes, trust=True)  # whoever trained it named its code


def _nothing_to_do(plan: TrainPlan, start: Start) -> Run:
    """Return the run of a training whose steps are all done, with a note. A run that was killed after its last
    checkpoint gets the curves and the summary that it lacks.
    """
    note = f"nothing left to do: {start.step - 1} of {plan.steps} steps are done"
    path, eval_rows = plan.run, plan.eval_rows
    append_line(note)
    if not (path / "summary.json").is_file():
        try:
            _draw(path)
        except Exception as error:  # noqa: BLE001 - a picture ends nothing
            note += f"; the curves could not be drawn: {first_line(error)}"
        write_summary(path, eval_rows, None)
    return Run(path, notes=(*start.notes, note))
