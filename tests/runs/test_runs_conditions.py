"""A user's conditions: what they see, names that are never there, the best checkpoint, and an end for lack of progress."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import workbench as wb
from workbench.base.errors import RunError, SettingError
from workbench.runs.conditions import Goal, Guard, check_condition


def train(tiny: str, run: Path, *, held_out: bool = True, rewards: Any = None, **settings: Any) -> wb.Run:
    engine = wb.engines.local(tiny, lr=1e-3, device="cpu")
    rows = wb.rows("data/arith/train.parquet", max_prompt_length=256, limit=8)
    reward = wb.rewards.Reward(rewards or (lambda response: float(len(response) % 3)), in_process=True)
    pipe = wb.recipes.grpo(engine, reward, group_size=2, max_tokens=4, kl_coef=0.0)
    chosen: dict[str, Any] = {"steps": 3, "batch_size": 2, "trackers": (), **settings}
    return wb.train_blocking(pipe, rows, run=run, **({"eval_rows": rows[:1]} if held_out else {}), **chosen)


def test_a_condition_sees_all_that_is_recorded_for_a_step(tiny: str, tmp_path: Path) -> None:
    seen: list[dict[str, float]] = []

    def look(metrics: Any) -> bool:
        seen.append(dict(metrics))
        return "val/reward" in metrics and metrics["training/global_step"] == 2

    run = train(tiny, tmp_path / "r", test_freq=2, break_if=look)
    assert run.stopped is not None and run.stopped.next_stage == "update_actor" and len(run.rows) == 2
    assert seen[0] == {key: one for key, one in run.rows[1].items() if one is not None}
    assert "val/reward" not in seen[0] and {"val/reward", "val/greedy", "timing_s/testing"} <= seen[1].keys()
    assert run.checkpoints == [1] and run.settings["train"]["break_if"].endswith("look")
    whole = train(tiny, tmp_path / "whole", test_freq=2)
    resumed = train(tiny, tmp_path / "r", test_freq=2, resume="auto")
    plain = lambda rows: [{k: v for k, v in row.items() if k.startswith(("actor", "critic", "val"))} for row in rows]  # noqa: E731
    assert plain(resumed.rows) == plain(whole.rows), "a step whose validation was undone is done again, exactly"


@pytest.mark.parametrize(
    "condition",
    [
        lambda m: m["val/rewrd"] > 0.9,
        lambda m: m.get("val/rewrd", 0) > 0.9,
        lambda m: "val/rewrd" in m,
        lambda m: any(m["val/rewrd"] > one for one in (1, 2)),
    ],
)
def test_a_name_that_is_never_there_is_refused_at_the_second_look(condition: Any) -> None:
    guard = Guard(condition, [], validates=True)
    assert guard({"critic/score/mean": 1.0, "val/reward": 0.5}) is False
    with pytest.raises(SettingError, match=r"break_if .*<lambda>.*'val/rewrd', which no step has.*'val/reward'\?"):
        guard({"critic/score/mean": 1.0})


def test_a_misspelt_guard_ends_a_run_with_the_state_after_the_step_before(tiny: str, tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="did you mean 'actor/grad_norm'"):
        train(tiny, tmp_path / "r", held_out=False, break_if=lambda m: m["actor/gradnorm"] > 1e9)
    run = wb.load_run(tmp_path / "r")
    assert len(run.rows) == 1 and run.checkpoints == [1] and "actor/gradnorm" in run.summary["stopped"]
    again = train(tiny, tmp_path / "r", held_out=False, resume="auto", break_if=lambda m: m["actor/grad_norm"] > 1e9)
    assert len(again.rows) == 3


def test_a_metric_that_this_step_alone_lacks_is_no_error() -> None:
    guard = Guard(lambda m: m["val/reward"] > 0.9, [{"val/reward": 0.1, "critic/score/mean": 0.0}], validates=True)
    assert [guard({"critic/score/mean": 1.0}) for _ in range(4)] == [False] * 4
    assert guard({"critic/score/mean": 1.0, "val/reward": np.float64(0.95)}) is True
    later = Guard(lambda m: m["val/reward"] > 0.9, [], validates=True)  # resumed with rows to validate on
    assert [later({"critic/score/mean": 1.0}) for _ in range(4)] == [False] * 4
    tensors = Guard(lambda m: torch.tensor(m["critic/score/mean"]) > 0.5, [], validates=False)
    assert tensors({"critic/score/mean": 1.0}) is True


@pytest.mark.parametrize(
    ("condition", "named"),
    [
        (lambda m: 1 / 0 > 1, "ZeroDivisionError"),
        (lambda m: {}["mine"], "KeyError: 'mine'"),
        (lambda m: None, "None"),
        (lambda m: "no", "'no'"),
        (lambda m: np.array([1, 2]) > 1, "ValueError"),
        (lambda m: m["val/reward"].nope, "AttributeError"),
    ],
)
def test_a_condition_that_cannot_be_evaluated_is_an_error_by_name(condition: Any, named: str) -> None:
    with pytest.raises(SettingError, match=f"break_if .*<lambda>; expected true or false; found {named}"):
        Guard(condition, [], validates=True)({"val/reward": 0.5})


async def awaited(metrics: Any) -> bool:
    return True


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"break_if": "actor/ppo_kl > 1"}, "break_if.*a function of a step's metrics"),
        ({"break_if": lambda: True}, "break_if.*too many positional"),
        ({"break_if": awaited}, "break_if awaited.*a coroutine function"),
        ({"break_if": lambda m: m["val/reward"] > 0.9, "held_out": False}, "'val/reward', without eval_rows.*eval_rows=…"),
        ({"save_best": "critic/score/mean"}, "argument save_best.*a metric of validations"),
        ({"save_best": "best val/reward"}, "argument save_best"),
        ({"save_best": "val/reward", "held_out": False}, "save_best='val/reward'; expected eval_rows.*split"),
        ({"stop_when": "val/reward"}, "stop_when; expected validations between steps.*test_freq"),
        ({"stop_when": "val/reward", "test_freq": 1, "patience": 0}, "argument patience"),
        ({"stop_when": "val/reward", "test_freq": 1, "min_delta": -1}, "argument min_delta"),
    ],
)  # fmt: skip
def test_what_can_be_known_is_refused_before_work(tiny: str, tmp_path: Path, settings: Any, match: str) -> None:
    with pytest.raises(SettingError, match=match):
        train(tiny, tmp_path / "r", **settings)
    assert not (tmp_path / "r").exists()


def test_callables_of_every_kind_are_conditions() -> None:
    for one in (None, bool, wb.stages.OffPolicy(), lambda m, limit=3: True, print):
        check_condition(one, validates=False)


def test_the_first_validation_refuses_an_unknown_metric_before_any_step(tiny: str, tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="'val/rewrd' is not a metric of a validation.*did you mean 'val/reward'"):
        train(tiny, tmp_path / "r", test_freq=1, save_best="val/rewrd")
    assert wb.load_run(tmp_path / "r").rows == []


def test_progress_is_counted_by_hand() -> None:
    rows = [
        {"training/global_step": step, "val/reward": value}
        for step, value in ((0, 0.1), (2, 0.4), (4, None), (6, 0.4), (8, 0.45))
    ]
    rows.insert(1, {"training/global_step": 1})
    assert Goal.of("val/reward", "x").progress(rows) == (8, 0.45, 0)
    assert Goal.of("max val/reward", "x").progress(rows, 0.1) == (2, 0.4, 3)
    assert Goal.of("min val/reward", "x").progress(rows) == (0, 0.1, 4)
    assert [Goal.of(name, "x").lower for name in ("val/nll", "val/reward", "max val/nll", "val/loss")] == [True, False, False, True]  # fmt: skip


def scheduled(values: list[float]) -> Any:
    """A reward whose validations, of one row each, sampled and greedy, have these values in turn."""
    calls: list[int] = []

    def score(response: str, data_source: str) -> float:
        if data_source != "held":
            return float(len(response) % 3)
        calls.append(1)
        return values[(len(calls) - 1) // 2]

    return wb.rewards.Reward(score, in_process=True)


def held(tiny: str, run: Path, values: list[float], **settings: Any) -> wb.Run:
    engine = wb.engines.local(tiny, lr=1e-3, device="cpu")
    rows = wb.rows("data/arith/train.parquet", max_prompt_length=256, limit=8)
    pipe = wb.recipes.grpo(engine, scheduled(values), group_size=2, max_tokens=4, kl_coef=0.0)
    chosen: dict[str, Any] = {"steps": 6, "batch_size": 2, "trackers": (), "test_freq": 1, **settings}
    asked = wb.rows([{"prompt": "1 + 1 =", "data_source": "held", "reward_model": {"ground_truth": "2"}}])
    return wb.train_blocking(pipe, rows, run=run, eval_rows=asked, **chosen)


VALUES = [0.125, 0.25, 0.5, 0.3125, 0.375, 0.4375, 0.25]


def test_the_best_checkpoint_stays_and_the_run_ends_for_lack_of_progress(tiny: str, tmp_path: Path) -> None:
    run = held(tiny, tmp_path / "r", VALUES, save_freq=1, save_best="val/reward", stop_when="val/reward", patience=3)
    assert [row["val/reward"] for row in run.rows] == VALUES[:6], "three validations after the best of step 2"
    assert run.checkpoints == [2, 4, 5] and run.checkpoint("best") == run.checkpoint(2)
    assert run.summary["best"] == 2 and run.summary["best_value"] == 0.5
    assert run.summary["stopped"].startswith("3 validations without val/reward above 0.5, that of step 2")
    assert run.settings["train"]["save_best"] == "val/reward" and run.settings["train"]["patience"] == 3
    assert wb.engines.local(run.checkpoint("best"), device="cpu").version == 0
    again = held(tiny, tmp_path / "r", [], save_freq=1, save_best="val/reward", stop_when="val/reward", patience=3, resume="auto")  # fmt: skip
    assert len(again.rows) == 6 and again.summary["stopped"].startswith("3 validations without")
    with pytest.raises(SettingError, match="'best'"):
        run.checkpoint("newest")


def test_a_resumed_run_keeps_the_best_so_far_bit_for_bit(tiny: str, tmp_path: Path) -> None:
    plan: dict[str, Any] = {"save_best": "val/reward", "trackers": ()}
    held(tiny, tmp_path / "whole", VALUES, **plan)

    class Ends:
        def on_start(self, start: int, steps: int) -> None: ...

        def on_step(self, report: Any) -> None:
            if report.step == 4:
                raise RuntimeError("killed")

        def on_end(self, error: BaseException | None) -> None: ...

    with pytest.raises(RuntimeError, match="killed"):
        held(tiny, tmp_path / "r", VALUES, observers=[Ends()], **plan)
    run = held(tiny, tmp_path / "r", VALUES[5:], resume="auto", **plan)
    assert run.checkpoints == [2, 4, 6] and run.checkpoint("best").name == "step_000002"
    weights = [(tmp_path / name / "checkpoints/step_000002/actor/model.safetensors").read_bytes() for name in ("r", "whole")]  # fmt: skip
    assert weights[0] == weights[1]


def test_a_run_without_a_best_checkpoint_says_how_to_keep_one(tiny: str, tmp_path: Path) -> None:
    run = train(tiny, tmp_path / "r", held_out=False, steps=1)
    with pytest.raises(RunError, match="no best checkpoint.*save_best='val/reward'"):
        run.checkpoint("best")
