"""What a training cell shows beside the steps: pauses, long steps, runs that go on elsewhere."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import workbench as wb
from workbench.control import Control
from workbench.runs import display
from workbench.runs.lock import Lock


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[list[Any]]:
    import IPython.display

    found: list[list[Any]] = []

    def show(first: Any, display_id: bool) -> Any:
        found.append([first])
        return SimpleNamespace(update=found[-1].append)

    monkeypatch.setattr(IPython.display, "display", show)
    return found


def row(step: int) -> dict[str, Any]:
    return {"training/global_step": step, "critic/score/mean": 0.5, "timing_s/step": 1.0}


def test_a_pause_and_a_long_step_are_said(shown: list[list[Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(display, "HEARTBEAT", 0.6)
    control = Control()
    live = display.Live(9, [], control)

    async def watched() -> None:
        watching = asyncio.create_task(live.watch())
        live.on_row(row(1), 8.0)
        control.pause()
        await asyncio.sleep(0.7)
        assert repr(shown[0][-1]).endswith("pausing after the step in hand")
        gate = asyncio.create_task(control.gate())
        await asyncio.sleep(0.7)
        assert repr(shown[0][-1]).endswith("paused")
        control.resume()
        await asyncio.sleep(1.3)
        assert await gate
        watching.cancel()

    asyncio.run(watched())
    assert "the next step is" in repr(shown[0][-1]) and "s in hand" in shown[0][-1]._repr_html_()
    live.close("stopped by hand after step 1")
    assert repr(shown[0][-1]).endswith("stopped by hand after step 1")


def test_a_control_holds_stops_and_lets_go() -> None:
    control = Control()

    async def go() -> list[Any]:
        assert await control.gate()
        control.pause()
        waiting = asyncio.create_task(control.gate())
        await asyncio.sleep(0.15)
        held = waiting.done()
        control.resume()
        passed = await waiting
        control.pause()
        control.stop()
        stopped = await control.gate()
        control.stopping = False
        waiting = asyncio.create_task(control.gate())
        await asyncio.sleep(0.06)
        waiting.cancel()
        return [held, passed, stopped, await waiting, control.interrupted]

    assert asyncio.run(go()) == [False, True, False, False, True]


def test_a_job_shows_static_blocks_and_a_person_the_panel(
    shown: list[list[Any]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from workbench.widgets import panel

    assert display.open_display(3, [], Control(), tmp_path) is None
    monkeypatch.setattr(display, "in_notebook", lambda: True)
    monkeypatch.setattr(panel, "display", lambda *_, **__: SimpleNamespace(update=print))
    assert type(display.open_display(3, [], Control(), tmp_path)) is panel.TrainingPanel
    monkeypatch.setenv("WORKBENCH_JOB", "1")
    assert type(display.open_display(3, [], Control(), tmp_path)) is display.Live


def test_a_run_that_goes_on_elsewhere_is_followed_to_its_end(shown: list[list[Any]], tmp_path: Path) -> None:
    run = tmp_path / "r"
    run.mkdir()
    (run / "settings.json").write_text(json.dumps({"train": {"steps": 3}}))
    (run / "metrics.jsonl").write_text(json.dumps(row(1)) + "\n")
    lock = Lock(run / "lock.json")

    async def elsewhere() -> None:
        for step in (2, 3):
            await asyncio.sleep(0.1)
            with (run / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(row(step)) + "\n")
        (run / "summary.json").write_text(json.dumps({"steps": 3, "stopped": None}))
        lock.release()

    async def both() -> wb.Run:
        other = asyncio.create_task(elsewhere())
        followed = await wb.load_run(run).follow(every=0.05)
        await other
        return followed

    assert asyncio.run(both()).state == "finished"
    assert "step 3/3" in repr(shown[0][-1]) and shown[1][-1].data[:4] == b"\x89PNG"
