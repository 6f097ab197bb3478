"""Layer 0: errors, columns, settings, metrics, seeds, the background loop."""

from __future__ import annotations

import asyncio
import inspect
import os
import pickle
import signal
import threading
import time
import typing
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.base import errors, metrics, runtime
from workbench.base.config import Settings, coerce, settings_hash
from workbench.base.errors import (
    ColumnMissing,
    ForeignError,
    Interrupted,
    SettingError,
    WorkbenchError,
    boundary,
    message,
    unknown,
)
from workbench.base.metrics import Count, Max, Mean, Min, Sum
from workbench.base.seeds import derive
from workbench.base.shown import Hinting
from workbench.dataproto.columns import COLUMNS, declared


def test_every_error_survives_pickling_and_is_in_the_tree() -> None:
    kinds = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, WorkbenchError)]
    assert len(kinds) > 12
    for kind in kinds:
        again = pickle.loads(pickle.dumps(kind("what went wrong")))
        assert type(again) is kind and str(again) == "what went wrong"
        assert kind.__name__ in (errors.__doc__ or "")


def test_message_says_what_expected_found_do() -> None:
    assert message("x", expected=1, found=2, do="y") == "x; expected 1; found 2; y"


def test_a_missing_column_is_key_and_attribute_error() -> None:
    assert issubclass(ColumnMissing, KeyError) and issubclass(ColumnMissing, AttributeError)


def test_boundary_names_the_place_and_keeps_the_cause() -> None:
    with pytest.raises(ForeignError, match="the judge raised ZeroDivisionError") as caught, boundary("the judge"):
        _ = 1 / 0
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    with pytest.raises(SettingError), boundary("the judge"):
        raise SettingError("ours passes")


def test_columns_are_declared_once_and_fully() -> None:
    for name, column in COLUMNS.items():
        assert column.name == name and column.doc.endswith(".") and column.dims[0] == "B"
        assert column.dtype in ("float", "int", "bool", "object")
    part = declared("reward/format")
    assert part is not None and part.dtype == "float" and declared("nobody") is None


@dataclass(frozen=True, kw_only=True)
class Example(Settings):
    lr: float = 1e-3
    steps: int = 10
    on: bool = True
    name: str | None = None
    stop: tuple[str, ...] = ()


def test_settings_coerce_and_refuse() -> None:
    found = Example.from_parameters({"lr": "1e-6", "steps": "3", "on": "false", "name": "None", "stop": ["a"]})
    assert found == Example(lr=1e-6, steps=3, on=False, name=None, stop=("a",))
    with pytest.raises(SettingError, match="did you mean 'steps'"):
        Example.from_parameters({"step": 3})
    for name, wrong in (("steps", 1.5), ("steps", "many"), ("on", "maybe"), ("lr", True), ("steps", True)):
        with pytest.raises(SettingError, match=name):
            Example.from_parameters({name: wrong})
    assert found.replace(steps=4).steps == 4


def test_a_class_of_settings_has_its_types_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sampler changes a setting for every row."""
    read = []
    plain = typing.get_type_hints
    monkeypatch.setattr(typing, "get_type_hints", lambda kind: read.append(kind) or plain(kind))

    @dataclass(frozen=True, kw_only=True)
    class Own(Settings):
        size: int = 1

    assert [Own().replace(size="2").size, Own.from_parameters({"size": 3}).size] == [2, 3]
    assert read == [Own]


def test_coerce_lists_and_dicts() -> None:
    assert coerce("x", [1, "2"], list[int]) == [1, 2]
    assert coerce("x", {"a": 1}, dict[str, int]) == {"a": 1}


def test_settings_hash_changes_with_any_value() -> None:
    assert settings_hash({"a": 1}) != settings_hash({"a": 2}) and len(settings_hash({})) == 8


def test_a_guessed_name_is_answered_and_a_propertys_own_error_is_seen() -> None:
    class Thing(Hinting):
        elsewhere: typing.ClassVar = {"flipped": "read thing.flips"}

        @property
        def broken(self) -> int:
            raise AttributeError("inside the property")

    with pytest.raises(AttributeError, match="^Thing has no 'flipped'; read thing.flips$"):
        Thing().flipped  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match="inside the property"):
        Thing().broken
    with pytest.raises(AttributeError, match="'Thing' object has no attribute 'nothing'"):
        Thing().nothing  # type: ignore[attr-defined]
    assert not hasattr(Thing(), "flipped") and getattr(Thing(), "nothing", 3) == 3


def test_settings_hash_does_not_depend_on_how_an_object_is_shown() -> None:
    class Scorer:
        def __init__(self, text: str, workers: int) -> None:
            self.text, self.workers = text, workers

        def settings(self) -> dict[str, int]:
            return {"workers": self.workers}

        def __repr__(self) -> str:
            return self.text

    assert settings_hash({"f": Scorer("two workers", 2)}) == settings_hash({"f": Scorer("workers: 2", 2)})
    assert settings_hash({"f": Scorer("workers", 2)}) != settings_hash({"f": Scorer("workers", 3)})


@given(st.lists(st.tuples(st.floats(-1e3, 1e3), st.integers(1, 50)), min_size=1), st.integers(0, 10))
def test_joining_metrics_does_not_depend_on_the_cut(values: list[tuple[float, int]], where: int) -> None:
    rows = [{"m": Mean.of(v, w), "x": Max(v), "n": Min(v), "s": Sum(v), "c": Count(w)} for v, w in values]
    whole = metrics.reduce(rows)
    halves = [metrics.join(rows[:where]), metrics.join(rows[where:])]
    assert metrics.reduce(halves) == pytest.approx(whole, rel=1e-9, abs=1e-6)
    assert whole["c"] == sum(w for _, w in values) and whole["x"] == max(v for v, _ in values)


def test_metrics_of_two_kinds_do_not_join() -> None:
    with pytest.raises(SettingError, match="two kinds"):
        metrics.reduce([{"a": Sum(1)}, {"a": Mean(1)}])


@given(st.lists(st.one_of(st.integers(), st.text()), min_size=1), st.lists(st.one_of(st.integers(), st.text())))
def test_seeds_differ_where_their_parts_do(a: list[object], b: list[object]) -> None:
    assert (derive(*a) == derive(*b)) == (a == b)
    assert 0 <= derive(*a) < 2**63


def test_a_waiting_call_in_the_loop_itself_says_what_to_do() -> None:
    """An async tool that calls a door that waits: in the loop's own thread that would never end. Its advice works."""

    async def double(number: int) -> int:
        return 2 * number

    async def tool(*, threaded: bool) -> int:
        return await asyncio.to_thread(runtime.run, double(3)) if threaded else runtime.run(double(3))

    with pytest.raises(RuntimeError, match=r"call it in a thread: await asyncio\.to_thread\(…\)"):
        runtime.run(tool(threaded=False))
    assert runtime.run(tool(threaded=True)) == 6


def test_background_runs_beside_a_running_loop() -> None:
    async def double(x: int) -> int:
        await asyncio.sleep(0)
        return 2 * x

    async def inside() -> int:
        return await asyncio.to_thread(runtime.run, double(4))

    assert runtime.run(double(3)) == 6
    assert asyncio.run(inside()) == 8


def test_threads_are_used_again_when_their_work_has_ended_and_not_in_a_fork() -> None:
    first = runtime.in_idle_thread(threading.get_ident).result()
    assert runtime.in_idle_thread(threading.get_ident).result() == first
    both = threading.Barrier(2)
    pair = [runtime.in_idle_thread(lambda: (both.wait(30), threading.get_ident())[1]) for _ in range(2)]
    assert first in {one.result() for one in pair} and pair[0].result() != pair[1].result()
    with pytest.raises(ZeroDivisionError):
        runtime.in_idle_thread(lambda: 1 / 0).result()
    assert runtime.in_idle_thread(threading.get_ident).result() in {one.result() for one in pair}
    if (child := os.fork()) == 0:
        os._exit(runtime.in_idle_thread(lambda: 7).result(30))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_cancelling_work_beside_asks_it_to_stop_and_waits() -> None:
    left = []

    def work() -> None:
        try:
            while True:
                runtime.check()
                time.sleep(0.01)
        except Interrupted:
            left.append("stopped")
            raise

    async def cancelled() -> None:
        task = asyncio.create_task(runtime.beside(work))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
    assert left == ["stopped"]
    runtime.check()  # the flag is down again


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("engine", "an engine"),
        ("argument", "an argument"),
        ("unit", "a unit"),
        ("user", "a user"),
        ("recipe", "a recipe"),
        ("option of x", "an option"),
    ],
)
def test_an_unknown_name_has_its_article(kind: str, said: str) -> None:
    assert f"'x' is not {said}" in unknown(kind, "x", ["y"])


def test_what_is_awaited_to_its_end_is_done_when_a_cancellation_is_raised() -> None:
    done = []

    async def work() -> None:
        await asyncio.sleep(0.05)
        done.append("work")

    async def cancelled() -> None:
        task = asyncio.ensure_future(runtime.to_its_end(work()))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert done == ["work"]

    runtime.run(cancelled())


@pytest.mark.parametrize("ignored", [False, True])
def test_a_closed_terminal_is_heard_unless_it_is_ignored_from_the_start(ignored: bool) -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
    try:
        with runtime.on_signals(lambda number, _: heard.append(number)):
            for number in (signal.SIGHUP, signal.SIGTERM):
                signal.raise_signal(number)
        assert heard == [signal.SIGTERM] if ignored else heard == [signal.SIGHUP, signal.SIGTERM]
        assert signal.getsignal(signal.SIGHUP) is (signal.SIG_IGN if ignored else signal.SIG_DFL)
    finally:
        signal.signal(signal.SIGHUP, before)
