"""Which traces stay: every k-th, the last ones, and those of steps in which a symptom begins; bounded in all."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

import workbench as wb
from workbench.base.metrics import Mean
from workbench.runs.folder import (
    KEEP_FLAGGED,
    STEP,
    Kept,
    RunFolder,
    keep_trace,
    prune_traces,
    read_kept,
    step_folder,
    step_folders,
)
from workbench.runs.symptoms import SEEN, WINDOW, Watch
from workbench.stages import Outcome
from workbench.steps.trace import Phase, Trace

WELL = {"critic/score/mean": 0.5, "critic/score/max": 1.0, "actor/grad_norm": 0.3, "actor/entropy": 1.0}


def row(step: int, **changed: Any) -> dict[str, Any]:
    return {STEP: step, **WELL, **changed}


def small(step: int) -> Trace:
    start = wb.DataProto({"x": torch.zeros(2)}, {"uid": ["a", "b"]}, {"step": step})
    phase = Phase(
        stage="reward", batch=start.with_columns({"reward": torch.ones(2)}), wrote=("reward",), metrics={}, settings={}
    )
    return Trace(start, (phase,))


def begun(watch: Watch, rows: list[dict[str, Any]]) -> dict[int, list[str]]:
    return {one[STEP]: names for one in rows if (names := [found.name for found in watch.look(one)])}


def test_a_step_is_flagged_where_a_symptom_begins_and_not_while_it_lasts() -> None:
    rows = [row(step) for step in range(1, 41)]
    rows[9]["actor/grad_norm"] = rows[10]["actor/grad_norm"] = 90.0  # steps 10 and 11: one beginning
    rows[19]["actor/grad_norm"] = 90.0
    rows[29]["critic/score/mean"] = None  # NaN
    for number in range(33, 40):
        rows[number]["actor/entropy"] = 0.05  # the mean of five is below a tenth of the first at step 38
    assert begun(Watch(), rows) == {
        10: ["the gradient jumps"], 20: ["the gradient jumps"], 30: ["a metric is NaN or infinite"], 38: ["entropy has collapsed"],
    }  # fmt: skip


@pytest.mark.parametrize("cut", [2, 5, 10, 11, 39, 150])
def test_a_resumed_run_flags_what_the_whole_one_flags(cut: int) -> None:
    rows = [row(step, **{"actor/grad_norm": 50.0} if step % 40 in (10, 11) else {}) for step in range(1, 201)]
    whole = begun(Watch(), rows)
    assert list(whole) == [10, 50, 90, 130, 170]
    assert begun(Watch(rows[:cut]), rows[cut:]) == {step: names for step, names in whole.items() if step > cut}


@pytest.mark.slow
def test_a_look_costs_little_however_long_the_run_is() -> None:
    watch = Watch(row(step, **{f"more/{number}": 1.0 for number in range(80)}) for step in range(1, 10_001))
    spent = []
    for step in range(10_001, 10_101):
        began = time.process_time()
        watch.look(row(step, **{"response_length/mean": 40.0, "actor/kl_loss": 0.01, "actor/pg_clipfrac": 0.01}))
        spent.append(time.process_time() - began)
    assert sorted(spent)[50] < 3e-3, sorted(spent)[50]
    assert len(watch._first) == WINDOW and len(watch._last) == SEEN


def test_what_was_due_and_what_was_flagged_are_bounded_each_by_itself(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for step in range(1, 41):
        due, flagged = ("every 10 steps" if step % 10 == 0 else ""), (("jumps",) if step % 4 == 0 else ())
        if due or flagged:
            keep_trace(small(step), step_folder(folder.traces, step), Kept(due=due, flagged=flagged))
            prune_traces(folder.traces, 2, 3)
    # due: 30, 40; flagged: 32, 36 and 40, which is both
    assert list(step_folders(folder.traces)) == [30, 32, 36, 40]
    assert str(read_kept(step_folder(folder.traces, 40))) == "every 10 steps; jumps"
    prune_traces(folder.traces, 1, 0)
    assert list(step_folders(folder.traces)) == [40]
    folder.lock.release()


def test_a_trace_is_there_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RunFolder(tmp_path)
    kept = Kept(due="every step", before={"advantage": {"value": 0.1}}, after={})
    monkeypatch.setattr("workbench.runs.folder.write_json", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):  # ended between the trace and its reason
        keep_trace(small(3), step_folder(folder.traces, 3), kept)
    assert list(folder.traces.iterdir()) == []
    monkeypatch.setattr("shutil.rmtree", lambda *_, **__: None)  # and killed, which leaves it
    with pytest.raises(KeyboardInterrupt):
        keep_trace(small(3), step_folder(folder.traces, 3), kept)
    assert list(step_folders(folder.traces)) == [] and list(folder.traces.glob(".*.part"))
    monkeypatch.undo()
    folder.supersede(2)
    assert list(folder.traces.iterdir()) == []
    keep_trace(small(3), step_folder(folder.traces, 3), kept)
    assert read_kept(step_folder(folder.traces, 3)) == kept and Trace.load(step_folder(folder.traces, 3)).step == 3
    assert folder.supersede(2) == ["traces/step_000003"]
    folder.lock.release()


@pytest.mark.slow
def test_a_real_run_keeps_the_step_in_which_a_symptom_begins(
    tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gradient's norm cannot be chosen, so the check is shown a metric that a stage of the test writes."""
    from workbench.runs import symptoms

    plain = symptoms._jumping_gradient

    def jumping(rows: Any, batch: Any) -> Any:
        return plain([{STEP: one[STEP], "actor/grad_norm": one["shown/norm"]} for one in rows], batch)

    class Shown(wb.stages.Advantage):
        def __call__(self, batch: wb.DataProto) -> Outcome:
            made = super().__call__(batch)
            return Outcome(
                made.batch, {**made.metrics, "shown/norm": Mean.of(9.0 if batch.meta_info["step"] == 4 else 0.3)}
            )

    monkeypatch.setattr(symptoms, "CHECKS", (jumping,))
    engine = wb.engines.local(tiny, lr=1e-3, device="cpu")
    rows = wb.rows("data/arith/train.parquet", max_prompt_length=256, limit=8)
    pipe = wb.recipes.grpo(engine, group_size=2, max_tokens=6).with_stage("advantage", Shown(wb.functional.grpo))
    run = wb.train_blocking(
        pipe, rows, steps=9, batch_size=2, run=tmp_path / "r", trace_freq=2, keep_traces=2, trackers=()
    )
    assert list(run.traces) == [4, 8, 9]
    assert [str(run.traces.why(step)) for step in run.traces] == [
        "every 2 steps; the gradient jumps", "every 2 steps", "the last step",
    ]  # fmt: skip
    assert "every 2 steps; the gradient jumps" in repr(run.traces) and KEEP_FLAGGED == 8
    s = run.stepper(4, at="reward").run(until="reward")
    assert torch.equal(s.batch.reward, run.traces[4].batch.reward)
