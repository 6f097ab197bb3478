"""Training in a run folder: what is written, what stops it, what is refused before it starts."""

from __future__ import annotations

import asyncio
import errno
import inspect
import json
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.patience import LONG, within

import workbench as wb
from workbench.base.errors import CheckpointError, DataError, RewardError, RunError, SettingError
from workbench.base.runtime import Control
from workbench.jobs import train
from workbench.runs import loop
from workbench.runs.folder import RunFolder
from workbench.runs.trackers import Tracker


def make(tiny: str, **settings: Any) -> tuple[Any, wb.datasets.Rows, wb.datasets.Rows]:
    engine = wb.engines.local(tiny, lr=1e-3, device="cpu")
    rows = wb.rows("data/arith/train.parquet", max_prompt_length=256, limit=12)
    eval_rows = wb.rows("data/arith/test.parquet", limit=6)
    return wb.recipes.grpo(engine, group_size=2, max_tokens=16, **settings), rows, eval_rows


@pytest.mark.slow
def test_everything_is_in_the_folder(tiny: str, tmp_path: Path) -> None:
    pipe, rows, eval_rows = make(tiny)
    run = wb.train_blocking(
        pipe,
        rows,
        steps=3,
        batch_size=4,
        run=tmp_path / "r",
        eval_rows=eval_rows,
        test_freq=2,
        save_freq=1,
        trace_freq=1,
        keep_traces=2,
    )
    assert run.checkpoints == [2, 3] and list(run.traces) == [2, 3]
    frame = run.metrics
    assert list(frame.index) == [0, 1, 2, 3] and frame["val/reward"].notna().tolist() == [True, False, True, True]
    for key in (
        "critic/score/mean",
        "reward/mean",
        "accuracy",
        "response_length/mean",
        "actor/kl_loss",
        "actor/grad_norm",
    ):
        assert key in frame
    assert "val-core/workbench/arith/reward/mean@1" in frame and "timing_s/update_actor" in frame
    assert run.summary["num_eval_rows"] == 6 and {"reward_before", "reward_after", "greedy_after"} <= set(run.summary)
    settings = run.settings
    assert settings["train"]["seed"] == 0 and settings["stages"]["rollout"]["group_size"] == 2
    assert settings["engines"]["actor"]["lr"] == 1e-3 and settings["versions"]["torch"] and settings["data_hash"]
    assert (tmp_path / "r" / "curves.png").read_bytes()[:4] == b"\x89PNG"
    assert not (tmp_path / "r" / "lock.json").exists()
    assert "step 3 of 3" in repr(run) and "<table" in run._repr_html_()
    assert ">3 of 3<" in run._repr_html_() and "held-out reward" in run._repr_html_(), "the main numbers, in large type"
    with pytest.raises(RunError, match="there is a run in .* already"):
        wb.train_blocking(pipe, rows, steps=3, batch_size=4, run=tmp_path / "r")
    with pytest.raises(RunError, match="no checkpoint of step 1"):
        run.checkpoint(1)


def test_the_blocking_door_names_the_other_one_where_a_loop_runs(tiny: str, tmp_path: Path) -> None:
    """A notebook's cell is such a place: it said "asyncio.run() cannot be called from a running event loop"."""
    pipe, rows, _ = make(tiny)
    how: dict[str, Any] = {"steps": 1, "batch_size": 4, "run": tmp_path / "r", "display": None}

    async def cell() -> Any:
        with pytest.raises(SettingError, match=r"expected a script .* notebook; write run = await wb\.train\(…\)"):
            wb.train_blocking(pipe, rows, **how)
        assert not (tmp_path / "r").exists()
        return await wb.train(pipe, rows, **how)

    assert asyncio.run(cell()).summary["steps"] == 1


@pytest.mark.slow
def test_a_checkpoint_is_a_plain_model(tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wb.Run, "__repr__", lambda run: pytest.fail("a run's text reads all its traces"))
    from transformers import AutoModelForCausalLM

    pipe, rows, _ = make(tiny)
    run = wb.train_blocking(pipe, rows, steps=1, batch_size=4, run=tmp_path / "r")
    loaded = AutoModelForCausalLM.from_pretrained(run.checkpoint(1) / "actor").state_dict()
    ours = pipe.learners()["actor"].snapshot()["weights"]
    assert all(torch.equal(loaded[name], tensor) for name, tensor in ours.items())


@pytest.mark.slow
def test_validation_changes_nothing(tiny: str, tmp_path: Path) -> None:
    found = []
    for name, freq in (("a", 1), ("b", 0)):
        pipe, rows, eval_rows = make(tiny)
        before = torch.get_rng_state()
        run = wb.train_blocking(
            pipe, rows, steps=2, batch_size=4, run=tmp_path / name, eval_rows=eval_rows, test_freq=freq
        )
        assert torch.equal(torch.get_rng_state(), before)
        found.append(run.metrics["actor/pg_loss"].dropna().tolist())
    assert found[0] == found[1]


@pytest.mark.slow
def test_a_batch_stepped_by_hand_is_what_training_does(tiny: str, tmp_path: Path) -> None:
    pipe, rows, _ = make(tiny)
    run = wb.train_blocking(pipe, rows, steps=1, batch_size=4, run=tmp_path / "r", trace_freq=1)
    other, _, _ = make(tiny)
    s = wb.Stepper(other, rows.batch(4)).run()
    recorded = run.traces[1]
    assert sorted(recorded.batch.columns) == sorted(s.batch.columns)
    for name in s.batch.batch:
        assert torch.equal(recorded.batch[name], s.batch[name]), name
    for key, value in s.trace.metrics.items():
        if not key.startswith("timing"):
            assert run.rows[-1][key] == value


@pytest.mark.slow
def test_break_if_stops_before_the_update_and_leaves_a_stepper(
    tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe, rows, _ = make(tiny)
    run = wb.train_blocking(
        pipe, rows, steps=2, batch_size=4, run=tmp_path / "r", break_if=lambda m: m["training/global_step"] > 2
    )
    assert run.stopped is None and len(run.rows) == 2
    pipe, rows, _ = make(tiny)
    steps: list[float] = []

    def third(metrics: Any) -> bool:
        steps.append(metrics["actor/grad_norm"])
        return len(steps) == 3

    run = wb.train_blocking(pipe, rows, steps=5, batch_size=4, run=tmp_path / "s", break_if=third)
    s = run.stopped
    assert s is not None and s.next_stage == "update_actor" and s.trace.step == 3
    assert pipe.learners()["actor"].version == 2 and len(run.rows) == 2
    assert run.checkpoints == [2] and list(run.traces)[-1] == 3 and "step 3" in run.summary["stopped"]
    assert s.run().trace["update_actor"].metrics["actor/grad_norm"] == steps[2]
    monkeypatch.setenv("WORKBENCH_JOB", "1")
    pipe, rows, _ = make(tiny)
    with pytest.raises(wb.RunStopped, match="break_if was met at step 1"):
        wb.train_blocking(pipe, rows, steps=2, batch_size=4, run=tmp_path / "t", break_if=lambda m: True)


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        (lambda rows: wb.datasets.Rows(list(rows), max_prompt_length=3), DataError, "every prompt is too long"),
        (
            lambda rows: wb.datasets.Rows([{**row, "data_source": "gsm9k"} for row in rows]),
            DataError,
            "did you mean 'gsm8k'",
        ),
        (lambda rows: rows[:2], DataError, "batch size"),
    ],
)
def test_bad_data_is_refused_before_anything_is_written(
    tiny: str, tmp_path: Path, change: Any, error: Any, match: str
) -> None:
    pipe, rows, _ = make(tiny)
    with pytest.raises(error, match=match):
        wb.train_blocking(pipe, change(rows), steps=1, batch_size=4, run=tmp_path / "r")
    assert not (tmp_path / "r").exists()


def test_a_wrong_reward_signature_is_refused_before_anything_is_written(tiny: str, tmp_path: Path) -> None:
    def reward(respons: str) -> float:
        return 0.0

    pipe, rows, _ = make(tiny, reward=wb.rewards.Reward(reward, in_process=True))
    with pytest.raises((RewardError, wb.WorkbenchError), match="respons"):
        wb.train_blocking(pipe, rows, steps=1, batch_size=4, run=tmp_path / "r")
    assert not (tmp_path / "r").exists()


@pytest.mark.slow
def test_changed_settings_are_refused_on_resume(tiny: str, tmp_path: Path) -> None:
    pipe, rows, _ = make(tiny)
    wb.train_blocking(pipe, rows, steps=1, batch_size=4, run=tmp_path / "r")
    pipe, rows, _ = make(tiny, clip_ratio_high=0.3)
    with pytest.raises(RunError, match=r"clip_ratio_high: 0.2 → 0.3"):
        wb.train_blocking(pipe, rows, steps=2, batch_size=4, run=tmp_path / "r", resume="auto")


@pytest.mark.long
def test_resume_in_one_process_is_exact(tiny: str, tmp_path: Path) -> None:
    pipe, rows, _ = make(tiny)
    whole = wb.train_blocking(pipe, rows, steps=4, batch_size=4, run=tmp_path / "whole")
    pipe, rows, _ = make(tiny)
    wb.train_blocking(pipe, rows, steps=2, batch_size=4, run=tmp_path / "parts")
    pipe, rows, _ = make(tiny)
    run = wb.train_blocking(pipe, rows, steps=4, batch_size=4, run=tmp_path / "parts", resume="auto")
    assert "resumed after step 2" in run.notes
    for key in ("actor/pg_loss", "actor/grad_norm", "critic/score/mean", "actor/kl_loss"):
        assert run.metrics[key].tolist() == whole.metrics[key].tolist()
    again = wb.train_blocking(pipe, rows, steps=4, batch_size=4, run=tmp_path / "parts", resume="auto")
    assert any("nothing left to do" in note for note in again.notes)


@pytest.mark.slow
def test_train_runs_beside_the_callers_loop(tiny: str, tmp_path: Path) -> None:
    pipe, rows, _ = make(tiny)

    async def beside() -> int:
        ticks = 0
        task = asyncio.create_task(wb.train(pipe, rows, steps=2, batch_size=4, run=tmp_path / "r"))
        while not task.done():
            ticks += 1
            await asyncio.sleep(0.01)
        await task
        return ticks

    assert asyncio.run(beside()) > 5


@pytest.mark.parametrize(
    ("argument", "match"),
    [
        ({"keep_checkpoints": 1}, "keep_checkpoints; expected ≥ 2; found 1"),
        ({"steps": 0}, "steps; expected ≥ 1"),
        ({"test_freq": -1}, "test_freq; expected ≥ 0"),
        ({"resume": "yes"}, "'resume'; expected 'auto' or 'never'"),
        ({"display": "always"}, "display; expected 'auto' or None"),
        ({"trackers": ["tensorbord"]}, "did you mean 'tensorboard'"),
    ],
)
def test_bad_arguments_are_refused_before_anything_is_written(
    tiny: str, tmp_path: Path, argument: dict[str, Any], match: str
) -> None:
    pipe, rows, _ = make(tiny)
    with pytest.raises(SettingError, match=match):
        wb.train_blocking(pipe, rows, **{"steps": 1, "batch_size": 4, "run": tmp_path / "r", **argument})
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize("call", [wb.train, wb.train_blocking], ids=["train", "train_blocking"])
@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("learning_rate", r"in workbench it is lr of the engine: engines\.local\(path, lr=…\)"),
        ("output_dir", "in workbench it is run"),
        ("logger", "in workbench it is trackers"),
        ("num_train_epochs", "in workbench it is epochs"),
        ("group_size", r"in workbench it is group_size of the recipe: recipes\.grpo\(engine, group_size=…\)"),
        ("num_generations", "in workbench it is group_size of the recipe"),
        ("stpes", "did you mean 'steps'"),
    ],
)
def test_another_librarys_name_is_answered_with_the_name_here(call: Any, name: str, match: str) -> None:
    pipe: Any = None  # a name is refused before the pipeline is looked at
    rows = wb.rows([{"prompt": "2 + 2?"}])
    with pytest.raises(SettingError, match=match):
        call(pipe, rows, **{name: 1})


def test_both_doors_show_every_setting_with_its_type_and_default() -> None:
    doors = [inspect.signature(door) for door in (wb.train, wb.train_blocking)]
    assert doors[0].parameters == doors[1].parameters
    assert doors[0].parameters["batch_size"].default == 16 and doors[0].parameters["batch_size"].annotation is int
    assert {one.kind for one in list(doors[0].parameters.values())[2:]} == {inspect.Parameter.KEYWORD_ONLY}
    assert [door.return_annotation.__name__ for door in doors] == ["Training", "Run"]


def test_what_the_environment_says_of_resuming_is_checked(
    tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe, rows, _ = make(tiny)
    monkeypatch.setenv("WORKBENCH_RESUME", "perhaps")
    with pytest.raises(SettingError, match="'resume'; expected 'auto' or 'never'; found 'perhaps'"):
        wb.train_blocking(pipe, rows, steps=1, batch_size=4, run=tmp_path / "r")
    assert not (tmp_path / "r").exists()


def test_a_setting_is_read_as_its_type(tiny: str, tmp_path: Path) -> None:
    pipe, rows, _ = make(tiny)
    settings: dict[str, Any] = {"steps": "1", "batch_size": "4", "seed": "7"}  # as a command line gives them
    run = wb.train_blocking(pipe, rows, run=tmp_path / "r", **settings)
    assert (run.settings["train"]["steps"], run.settings["train"]["seed"]) == (1, 7)


@pytest.mark.slow
def test_a_run_that_breaks_says_why_and_keeps_what_it_has(tiny: str, tmp_path: Path) -> None:
    def fails_later(response: str, extra_info: dict[str, Any]) -> float:
        if len(calls) >= 8:
            raise ValueError("no more")
        calls.append(1)
        return 0.0

    calls: list[int] = []
    reward = wb.rewards.Reward(fails_later, in_process=True, on_failure="raise")
    pipe, rows, _ = make(tiny, reward=reward)
    with pytest.raises(wb.WorkbenchError, match="no more"):
        wb.train_blocking(pipe, rows, steps=3, batch_size=4, run=tmp_path / "r")
    run = wb.load_run(tmp_path / "r")
    assert "no more" in run.summary["stopped"] and run.summary["steps"] == 1 and len(run.rows) == 1
    assert "no more" in repr(run) and not (tmp_path / "r" / "lock.json").exists()


@pytest.mark.slow
def test_a_held_out_set_of_one_has_no_interval(tiny: str, tmp_path: Path) -> None:
    pipe, rows, eval_rows = make(tiny)
    run = wb.train_blocking(pipe, rows, steps=1, batch_size=4, run=tmp_path / "r", eval_rows=eval_rows[:1])
    assert run.summary["interval_after"] == [None, None] and "95 % in [–, –]" in repr(run)
    text = (tmp_path / "r" / "metrics.jsonl").read_text() + (tmp_path / "r" / "summary.json").read_text()
    assert "NaN" not in text


@pytest.mark.slow
def test_validation_with_several_samples(tiny: str, tmp_path: Path) -> None:
    pipe, rows, eval_rows = make(tiny)
    run = wb.train_blocking(pipe, rows, steps=1, batch_size=4, run=tmp_path / "r", eval_rows=eval_rows, val_samples=3)
    first = run.rows[0]
    core, aux = "val-core/workbench/arith/reward", "val-aux/workbench/arith/reward"
    assert first[f"{core}/mean@3"] == pytest.approx(first["val/reward"]) and first["val/unscored"] == 0
    assert (
        first[f"{aux}/worst@2/mean"]
        <= first[f"{core}/mean@3"]
        <= first[f"{aux}/best@2/mean"]
        <= first[f"{core}/best@3/mean"]
    )
    assert first[f"{aux}/pass@1"] == pytest.approx(first["val/reward"])
    again = wb.evaluate(tiny, eval_rows, samples=3, max_tokens=16)
    assert again.mean == first["val/reward"] and again.interval[0] == pytest.approx(first["val/reward_low"])


@pytest.mark.slow
def test_a_run_can_be_read_while_it_goes_on(tiny: str, tmp_path: Path) -> None:
    seen = []

    class Reader:
        def on_start(self, start: int, steps: int) -> None: ...

        def on_step(self, report: Any) -> None:
            run = wb.load_run(tmp_path / "r")
            seen.append((len(run.metrics), list(run.traces), run.checkpoints, dict(run.summary), "of 2" in repr(run)))

        def on_end(self, error: BaseException | None) -> None: ...

    pipe, rows, _ = make(tiny)
    wb.train_blocking(
        pipe, rows, steps=2, batch_size=4, run=tmp_path / "r", save_freq=1, trace_freq=1, observers=[Reader()]
    )
    assert seen == [(1, [1], [1], {}, True), (2, [1, 2], [1, 2], {}, True)]


@pytest.mark.slow
def test_progress_lines_go_to_the_runners_file(tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORKBENCH_PROGRESS", str(tmp_path / "progress"))
    pipe, rows, eval_rows = make(tiny)
    wb.train_blocking(pipe, rows, steps=2, batch_size=4, run=tmp_path / "r", eval_rows=eval_rows)
    lines = (tmp_path / "progress").read_text().splitlines()
    assert [line.split("  ")[0] for line in lines] == ["step 0/2", "step 1/2", "step 2/2"]
    assert "held-out" in lines[0] and "eta" in lines[1] and "held-out" in lines[2]


def test_what_a_training_cell_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    import IPython.display

    from workbench.widgets import display

    shown: list[list[Any]] = []

    def show(first: Any, display_id: bool) -> Any:
        shown.append([first])
        return SimpleNamespace(update=shown[-1].append)

    monkeypatch.setattr(IPython.display, "display", show)
    clock = iter([100.0, 100.5, 101.6, 102.0])
    monkeypatch.setattr(display.time, "monotonic", lambda: next(clock))
    live = display.LiveDisplay(4, [])
    for step in range(1, 5):
        live.on_row({"training/global_step": step, "critic/score/mean": step / 4, "timing_s/step": 1.0}, 0.0)
    block, image = shown
    # at most once a second, and always the last
    assert [repr(one).split("  ")[0] for one in block[1:]] == ["step 1/4", "step 3/4", "step 4/4"]
    assert "step 4/4" in block[-1]._repr_html_() and len(image) == 2 and image[-1].data[:4] == b"\x89PNG"
    assert not display.in_notebook()


@pytest.mark.slow
def test_evaluation(tiny: str) -> None:
    eval_rows = wb.rows("data/arith/test.parquet", limit=10)
    found = wb.evaluate(tiny, eval_rows, samples=3, max_tokens=40, batch_size=4)
    assert found.prompts == 10 and len(found.batch) == 30 and 0 <= found.mean <= 1
    assert found.interval[0] < found.mean < found.interval[1] and found.by_source["workbench/arith"] == found.mean
    again = wb.evaluate(tiny, eval_rows, samples=3, max_tokens=40, batch_size=10)
    assert again.mean == found.mean  # seeds follow the prompt, not the batch
    assert "10 prompts" in repr(found) and "10 prompts" in found._repr_html_()
    by_hand = found.batch["reward"].reshape(10, 3).mean(-1)
    assert found.mean == pytest.approx(by_hand.mean().item(), abs=1e-6)
    share, t = (
        by_hand.mean().item(),
        2.2622,
    )  # Student's, of 9 degrees of freedom; Wilson's interval for so many samples:
    number = min(share * (1 - share) / (by_hand.var().item() / 10), 30)
    middle = (share + t**2 / number / 2) / (1 + t**2 / number)
    half = t * (share * (1 - share) / number + t**2 / number**2 / 4) ** 0.5 / (1 + t**2 / number)
    assert found.interval == pytest.approx((middle - half, middle + half), abs=1e-4)
    assert json.dumps(found.mean)


@pytest.mark.slow
def test_evaluation_of_what_can_be_a_model(tiny: str, tmp_path: Path) -> None:
    pipe, rows, eval_rows = make(tiny)
    run = wb.train_blocking(pipe, rows, steps=2, batch_size=4, run=tmp_path / "r", save_freq=1)
    options: dict[str, Any] = {"limit": 3, "temperature": 0.0}
    found = wb.evaluate(run, eval_rows, **options)
    assert found.greedy and found.prompts == 3 and "3 prompts × 1 greedy" in repr(found)
    for model in (str(tmp_path / "r"), run.checkpoint(2), run.checkpoint(2) / "actor", pipe.learners()["actor"]):
        other = wb.evaluate(model, eval_rows, max_tokens=16, **options)
        assert other.batch["responses"].tolist() == found.batch["responses"].tolist()
    with pytest.raises(DataError, match="an engine, a folder or a Run; found 7"):
        wb.evaluate(7, eval_rows)
    with pytest.raises(DataError, match="nothing to evaluate"):
        wb.evaluate(tiny, eval_rows, limit=0)
    weights = run.checkpoint(2) / "actor" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(bytes(content))
    for model in (run, tmp_path / "r", tmp_path / "r" / "checkpoints" / "step_000002"):
        with pytest.raises(CheckpointError, match=r"model\.safetensors.*crc32"):
            wb.evaluate(model, eval_rows, **options)
    with pytest.raises(CheckpointError, match="the newest good one is that of step 1"):
        run.checkpoint()
    assert wb.evaluate(run.checkpoint(1), eval_rows, **options).prompts == 3


def test_by_source_and_unscored_rows(tiny: str) -> None:
    def reward(response: str, data_source: str, extra_info: dict[str, Any]) -> float | None:
        return None if extra_info["index"] == 1 else float(data_source == "b")

    eval_rows = list(wb.rows("data/arith/test.parquet", limit=4))
    rows = wb.datasets.Rows(
        [
            {**row, "data_source": source, "extra_info": {"index": i}}
            for i, (row, source) in enumerate(zip(eval_rows, "abbb", strict=True))
        ]
    )
    found = wb.evaluate(tiny, rows, reward=wb.rewards.Reward(reward, in_process=True), max_tokens=4)
    assert found.by_source == {"a": 0.0, "b": 1.0} and found.unscored == 1 and found.mean == pytest.approx(2 / 3)
    assert "1 rows not scored" in repr(found) and "b 1.0000" in repr(found)


# --- a training that nobody awaits ------------------------------------------------------------------


def test_a_training_that_was_not_awaited_says_so_at_once(tiny: str, tmp_path: Path) -> None:
    pipe, rows, _ = make(tiny)
    run: Any = wb.train(pipe, rows, steps=1, batch_size=4, run=tmp_path / "r")
    said = r"not been awaited; run = await wb\.train\(…\) in a notebook, run = wb\.train_blocking\(…\) in a script"
    for ask in ("summary", "curves", "path", "stepper"):
        with pytest.raises(AttributeError, match=f"no '{ask}'.*{said}"):
            getattr(run, ask)
    assert "not been awaited" in repr(run) and not (tmp_path / "r").exists()
    with pytest.warns(RuntimeWarning, match=f"was dropped.*{said}"):
        del run


@pytest.mark.slow
def test_a_training_that_goes_on_does_not_say_that_nobody_awaits_it(tiny: str, tmp_path: Path) -> None:
    pipe, rows, _ = make(tiny)
    texts: list[str] = []

    def look(metrics: Any) -> bool:
        with pytest.raises(AttributeError, match="no 'summary'") as raised:
            training.summary
        texts.extend([str(raised.value), repr(training)])
        return False

    plan: dict[str, Any] = {"steps": 1, "batch_size": 4, "display": None, "trackers": (), "break_if": look}
    training: Any = wb.train(pipe, rows, run=tmp_path / "r", **plan)
    asyncio.run(training)
    assert "under way; wait for the run that `await` returns" in texts[0] and texts[1] == "a training that is under way"
    with pytest.raises(AttributeError, match="is over; take the run that `await` returned"):
        training.summary
    assert repr(training) == "a training that is over"


@pytest.mark.slow
def test_a_training_is_awaited_as_any_coroutine(tiny: str, tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    pipe, rows, _ = make(tiny)
    plan: dict[str, Any] = {"steps": 1, "batch_size": 4, "display": None, "trackers": ()}
    assert asyncio.run(wb.train(pipe, rows, run=tmp_path / "a", **plan)).summary["steps"] == 1

    async def both() -> tuple[wb.Run, wb.Run]:
        task = asyncio.create_task(wb.train(pipe, rows, run=tmp_path / "b", **plan))
        return await task, await wb.train(pipe, rows, run=tmp_path / "c", **plan)

    assert [run.path.name for run in asyncio.run(both())] == ["b", "c"]
    with pytest.raises(SettingError, match="steps; expected ≥ 1"):
        asyncio.run(wb.train(pipe, rows, steps=0))
    assert not [one for one in recwarn if "awaited" in str(one.message)]


@pytest.mark.long
def test_prompts_are_rendered_once_and_not_again_by_a_resumed_run(
    tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from workbench.datasets import rendering
    from workbench.runs import preflight

    rendered: list[str] = []
    render = rendering.Renderer.render
    monkeypatch.setattr(
        rendering.Renderer,
        "render",
        lambda self, template, chats, more: rendered.extend(chats) or render(self, template, chats, more),
    )

    def trained(steps: int, limit: int = 64, **changes: Any) -> int:
        """Chats rendered, those of the batches too."""
        rendered.clear()
        preflight._measured.clear()  # as in a process of its own
        pipe, _, _ = make(tiny)
        rows = wb.rows("data/arith/train.parquet", max_prompt_length=limit, limit=200)
        plan: dict[str, Any] = {"batch_size": 4, "run": tmp_path / "r", "display": None, "trackers": ()}
        wb.train_blocking(pipe, rows, steps=steps, **{**plan, **changes})
        return len(rendered)

    few = trained(1, 256, run=tmp_path / "long")  # their characters say that no prompt is so long
    assert few < 20
    near = trained(1) - few
    assert 100 < near <= 200 + 4
    assert trained(2, resume="auto") < 20
    settings = json.loads((tmp_path / "r" / "settings.json").read_text())
    assert 64 in settings["prompts"].values()  # none is longer
    settings["prompts"] = {"0" * 16: 3}  # of other rows, or of another template
    (tmp_path / "r" / "settings.json").write_text(json.dumps(settings))
    assert trained(3, resume="auto") >= near
    assert trained(1, run=tmp_path / "other") >= near  # another run knows nothing of it
    before = len(rendered)
    pipe, _, _ = make(tiny)
    short = wb.rows("data/arith/train.parquet", max_prompt_length=3, limit=200)
    with pytest.raises(DataError, match="too long"):
        wb.train_blocking(pipe, short, steps=1, batch_size=4, run=tmp_path / "short")
    assert len(rendered) - before <= 2 * (200 + 4)  # twice: to say which


# --- ornaments, and ends from outside ---------------------------------------------------------------


def breaks(*_: Any, **__: Any) -> Any:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_what_only_shows_a_run_never_ends_it(tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[int] = []

    def log(metrics: Any, step: int) -> None:
        logged.append(step)
        if step == 1:
            raise BrokenPipeError("the terminal is closed")

    broken = Tracker(log, close=breaks)
    live = SimpleNamespace(on_row=breaks, close=breaks, watch=lambda: asyncio.sleep(0))
    monkeypatch.setattr(train, "_draw", breaks)
    monkeypatch.setattr(train, "in_notebook", lambda: True)
    monkeypatch.setattr(train, "open_display", lambda *_: live)
    monkeypatch.setattr(loop, "TRACKERS", {**loop.TRACKERS, "console": lambda *_: broken})
    pipe, rows, eval_rows = make(tiny)
    plan: Any = {"batch_size": 4, "run": tmp_path / "r", "eval_rows": eval_rows, "trackers": ["console"]}
    run = wb.train_blocking(pipe, rows, steps=2, **plan)
    assert logged == [0, 1], "left out once it has failed"
    names = ["the display", "tracker 'console'", "the picture of the curves"]
    assert [note.split(" failed")[0] for note in run.notes] == names
    assert all("is left out from then on: " in note for note in run.notes)
    again = wb.load_run(tmp_path / "r")
    assert again.summary["steps"] == 2 and again.summary["stopped"] is None and "died" not in repr(again)
    assert again.checkpoints == [2] and "curves" not in again.summary["paths"]
    (tmp_path / "r" / "summary.json").unlink()
    done = wb.train_blocking(pipe, rows, steps=2, resume="auto", **plan)
    assert done.summary["steps"] == 2 and "the curves could not be drawn: OSError" in done.notes[-1]


def test_without_tensorboard_a_run_that_names_no_tracker_has_none(
    tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    pipe, rows, _ = make(tiny)
    run = wb.train_blocking(pipe, rows, steps=1, batch_size=4, run=tmp_path / "r")
    assert run.summary["steps"] == 1 and run.settings["train"]["trackers"] == []
    with pytest.raises(
        SettingError, match=r"tracker 'tensorboard' is not installed; pip install 'rl-workbench\[trackers\]'"
    ):
        wb.train_blocking(pipe, rows, steps=1, batch_size=4, run=tmp_path / "s", trackers=["tensorboard"])
    assert not (tmp_path / "s").exists()


def test_a_display_that_cannot_be_made_is_a_simpler_one_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    from workbench.widgets import display

    monkeypatch.setattr(display, "in_notebook", lambda: True)
    monkeypatch.setattr(display.TrainingPanel, "open", breaks)
    monkeypatch.setattr(display.LiveDisplay, "open", lambda self: None)
    assert type(display.open_display(2, [], Control(), Path("r"))) is display.LiveDisplay
    monkeypatch.setattr(display.LiveDisplay, "open", breaks)
    assert display.open_display(2, [], Control(), Path("r")) is None


def test_a_widget_that_cannot_be_imported_leaves_the_still_form(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "workbench.widgets.layer", None)
    batch = wb.DataProto({"reward": torch.zeros(2)})
    with pytest.raises(NotImplementedError):  # IPython goes on with the HTML
        batch._ipython_display_()
    assert "reward" in str(batch._repr_html_())


def test_a_run_folder_that_fails_in_the_middle_says_how_to_go_on(
    tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, append, unlink = tmp_path / "r", RunFolder.append_metrics, Path.unlink

    def appended(self: RunFolder, row: dict[str, Any]) -> list[str]:
        if row["training/global_step"] == 2:
            raise PermissionError(errno.EACCES, "Permission denied", str(run / "metrics.jsonl"))
        return append(self, row)

    def unlinked(self: Path, missing_ok: bool = False) -> None:
        if self.name == "lock.json":
            raise PermissionError(errno.EACCES, "Permission denied", str(self))
        unlink(self, missing_ok)

    pipe, rows, _ = make(tiny)
    plan: Any = {"batch_size": 4, "run": run, "save_freq": 1, "trackers": ()}
    with monkeypatch.context() as patched:
        patched.setattr(RunFolder, "append_metrics", appended)
        patched.setattr(Path, "unlink", unlinked)
        with pytest.raises(RunError, match=r"metrics.jsonl failed; .*found PermissionError: .*denied.*resume='auto'"):
            wb.train_blocking(pipe, rows, steps=3, **plan)
    pipe, rows, _ = make(tiny)
    assert wb.train_blocking(pipe, rows, steps=3, resume="auto", **plan).summary["steps"] == 3
    assert [row["training/global_step"] for row in wb.load_run(run).rows] == [1, 2, 3]


SCRIPT = """
import sys, workbench as wb
engine = wb.engines.local(sys.argv[1], lr=1e-3, device="cpu")
rows = wb.rows("data/arith/train.parquet", limit=12)
pipe = wb.recipes.grpo(engine, group_size=2, max_tokens=8)
wb.train_blocking(pipe, rows, steps=100_000, batch_size=4, run=sys.argv[2], trackers=(), trace_freq=0)
"""


@pytest.mark.slow
def test_a_closed_terminal_ends_a_scripts_training_as_an_interrupt_does(tiny: str, tmp_path: Path) -> None:
    run = tmp_path / "r"

    def rows() -> int:
        return len((run / "metrics.jsonl").read_text().splitlines()) if (run / "metrics.jsonl").is_file() else 0

    def begin() -> None:  # these tests may run under nohup
        signal.signal(signal.SIGHUP, signal.SIG_DFL)

    process = subprocess.Popen([sys.executable, "-c", SCRIPT, tiny, str(run)], preexec_fn=begin)
    try:
        assert within(lambda: rows() >= 2)
        process.send_signal(signal.SIGHUP)
        assert process.wait(LONG) == 129
    finally:
        process.kill()
    ended = wb.load_run(run)
    assert ended.checkpoints == [rows()] and f"interrupted after step {rows()}" in ended.summary["stopped"]
