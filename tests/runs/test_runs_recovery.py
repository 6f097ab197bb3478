"""B1, B2: a training whose workers die, stop or hang goes on by itself and ends as the undisturbed one; or says why it cannot."""

from __future__ import annotations

import itertools
import json
import logging
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from support.patience import patience

import workbench as wb
from workbench.base.errors import EngineError, WorkerLost
from workbench.engines import Request, Sample
from workbench.engines.fsdp_engine.engine import FsdpEngine, fsdp
from workbench.engines.fsdp_engine.group import Group, local_group
from workbench.engines.local_engine.engine import LocalEngine
from workbench.engines.paired import paired
from workbench.engines.workers import processes as processes_module
from workbench.engines.workers.processes import Deadlines
from workbench.rewards import Reward
from workbench.runs import checkpoint, loop

PLAN: dict[str, Any] = {"steps": 4, "batch_size": 2, "trace_freq": 1, "keep_traces": 9, "trackers": ["jsonl"]}


def varied(response: str) -> float:
    return (sum(map(ord, response)) % 5) / 4


class Luck:
    """A reward that also draws: the random generators must be where they were, too."""

    def __call__(self, response: str) -> float:
        return varied(response) + float(torch.rand(()))


class Fragile(LocalEngine):
    """A learner whose worker dies at chosen calls of `learn`; what it held is gone."""

    at: tuple[int, ...] = ()
    learned = 0
    lost = False

    def learn(self, *given: Any, **named: Any) -> Any:
        self.learned += 1
        if self.learned in self.at:
            self.lost = True
            with torch.no_grad():
                for parameter in self._model.parameters():
                    parameter.zero_()
            raise WorkerLost("rank 1 (pid 4711 on there) died", rank=1, exit="SIGKILL")
        assert not self.lost, "nobody asks a dead worker"
        return super().learn(*given, **named)

    def restore(self, snapshot: Any) -> None:
        super().restore(snapshot)
        self.lost = False

    def load_state(self, *given: Any) -> None:
        super().load_state(*given)
        self.lost = False


def rows() -> Any:
    return wb.rows("data/arith/train.parquet", max_prompt_length=256)[:16]


def grpo(tiny: str, *at: int, sampler: Any = None, function: Any = None) -> wb.Pipeline:
    learner: Any = wb.engines.local(tiny, lr=1e-3, device="cpu")
    learner.__class__, learner.at = Fragile, at
    reward = Reward(function or Luck(), in_process=True)
    engine = learner if sampler is None else paired(learner, sampler)
    return wb.recipes.grpo(engine, reward, group_size=2, max_tokens=6, kl_coef=0.01)


def train(pipe: wb.Pipeline, run: Path, **settings: Any) -> wb.Run:
    torch.manual_seed(7)
    return wb.train_blocking(pipe, rows(), run=run, **{**PLAN, **settings})


Trained = tuple[wb.Run, dict[str, torch.Tensor]]


def trained(pipe: wb.Pipeline, run: Path, **settings: Any) -> Trained:
    """A training and the weights that it ended with."""
    done, roles = train(pipe, run, **settings), pipe.learners().items()
    return done, {
        f"{role}.{name}": one for role, learner in roles for name, one in learner.snapshot()["weights"].items()
    }


def same(one: Trained, two: Trained) -> None:
    """Rows, tokens and final weights are those of the undisturbed run, and nothing is there twice."""
    timed = ("timing_", "perf/")
    mine, theirs = (
        [{k: v for k, v in row.items() if not k.startswith(timed)} for row in run.rows] for run, _ in (one, two)
    )
    differ = [{k: (v, b.get(k)) for k, v in a.items() if v != b.get(k)} for a, b in zip(mine, theirs, strict=True)]
    assert differ == [{}] * len(mine)
    lines = [(run.path / "metrics.jsonl").read_text().count("\n") for run, _ in (one, two)]
    assert lines[0] == lines[1] == len(mine)
    assert list(one[0].traces) == list(two[0].traces)
    for step in one[0].traces:
        a, b = one[0].traces[step].batch, two[0].traces[step].batch
        assert torch.equal(a["responses"], b["responses"]) and torch.equal(a["advantages"], b["advantages"])
    assert one[1].keys() == two[1].keys() and all(torch.equal(values, two[1][name]) for name, values in one[1].items())


def events(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "recoveries.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def quiet(tiny: str, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    found = trained(grpo(tiny), tmp_path_factory.mktemp("quiet") / "r")
    assert not (found[0].path / "recoveries.jsonl").exists()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"save_freq": 2}, {"break_if": lambda metrics: False}])
def test_a_lost_learner_is_brought_back_exactly(
    tiny: str, tmp_path: Path, quiet: Trained, caplog: Any, settings: dict[str, Any]
) -> None:
    # updates done again count: the first of step 1; of step 4, after those of steps 1 to 3 (or 3) again
    with caplog.at_level(logging.WARNING, "workbench"):
        same(trained(grpo(tiny, 1, 5), tmp_path / "r", **settings), quiet)
    first, second = events(tmp_path / "r")
    assert first["step"] == 1 and first["stage"] == "update_actor" and first["rank"] == 1 and first["exit"] == "SIGKILL"
    assert "pid 4711 on there" in first["error"] and first["state"] == "the weights that the training began with"
    from_checkpoint = "checkpoint 2 and 1 updates" if "save_freq" in settings else f"{first['state']} and 3 updates"
    assert second["step"] == 4 and second["state"] == from_checkpoint
    told = " ".join(caplog.messages)
    assert "step 4: WorkerLost: rank 1 (pid 4711 on there) died; recovering (2 of at most 3)" in told


class Dying:
    """A sampler in a process of its own that dies at chosen samples, however often it is started again."""

    def __init__(self, path: str, *at: int) -> None:
        self.engine = wb.engines.local(path, device="cpu")
        self.tokenizer = self.engine.tokenizer
        self.at, self.asked, self.starts = at, itertools.count(1), 1

    async def sample(self, request: Request) -> Sample:
        if next(self.asked) in self.at:
            raise WorkerLost("the worker of the engine 'rollout' is gone", exit="SIGKILL")
        return await self.engine.sample(request)

    def load_weights(self, weights: dict[str, torch.Tensor], version: int) -> None:
        self.engine.load_weights(weights, version)

    def restart(self) -> None:
        self.starts += 1

    def describe(self) -> dict[str, Any]:
        return {"kind": "dying"}


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [0, 1])
def test_a_lost_sampler_is_brought_back_exactly(tiny: str, tmp_path: Path, ahead: int) -> None:
    """A pair starts it twice again by itself; rows ahead were begun with weights that are nowhere any more."""
    asked = len(rows().batch(2)) * 2
    found = []
    for name, at in (("quiet", ()), ("rough", range(2 * asked + 1, 5 * asked + 1))):  # three times each row of step 3
        pipe = grpo(tiny, sampler=Dying(tiny, *at), function=varied)
        found.append(trained(pipe, tmp_path / name, ahead=ahead))
    same(*found)
    assert {one["step"] for one in events(tmp_path / "rough")} <= {3, 4} and not (
        tmp_path / "quiet/recoveries.jsonl"
    ).exists()


@pytest.mark.slow
def test_a_crash_loop_ends_with_its_error_and_the_run_can_be_resumed(
    tiny: str, tmp_path: Path, quiet: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(loop.Recovery, "_wait", lambda self, seconds: pauses.append(seconds))
    with pytest.raises(WorkerLost, match="rank 1") as caught:
        train(grpo(tiny, *range(3, 99)), tmp_path / "r", save_freq=1)
    assert caught.value.__notes__[0] == (
        "not recovered after 3 of at most 3 recoveries: train(max_recoveries=3) allows no further recovery"
    )
    assert pauses == [0.0, 1.0, 2.0] and [one["step"] for one in events(tmp_path / "r")] == [3, 3, 3]
    same(trained(grpo(tiny), tmp_path / "r", resume="auto"), quiet)


@pytest.mark.slow
def test_workers_that_do_not_start_again_are_tried_so_often_and_no_oftener(
    tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "PAUSE", 0.01)

    def restore(self: Any, snapshot: Any) -> None:
        raise EngineError("rank 0 of 2 did not start in time")

    monkeypatch.setattr(Fragile, "restore", restore)
    with pytest.raises(WorkerLost, match="rank 1") as caught:
        train(grpo(tiny, 1), tmp_path / "r", max_recoveries=2)
    assert caught.value.__notes__[0].endswith("of at most 2 recoveries: EngineError: rank 0 of 2 did not start in time")
    assert [one["state"][:12] for one in events(tmp_path / "r")] == ["not restored"] * 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"max_recoveries": 0}, "after 0 of at most 0 recoveries"),
        (
            {"keep_updates": 0},
            "the state after step 1 cannot be computed again; found checkpoint None, recorded updates none",
        ),
    ],
)
def test_what_cannot_be_brought_back_says_why(tiny: str, tmp_path: Path, settings: dict[str, Any], why: str) -> None:
    with pytest.raises(WorkerLost) as caught:
        train(grpo(tiny, 2), tmp_path / "r", **settings)
    assert why in caught.value.__notes__[0]


# --- real ranks -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two() -> Any:
    group = local_group(2, device="cpu", threads=1)
    yield group
    group.close()


def on_ranks(where: Group, tiny: str, scratch: Path, critic: bool) -> wb.Pipeline:
    learner = fsdp(tiny, on=where, device="cpu", lr=1e-3, scratch=scratch)
    engine = paired(learner, wb.engines.local(tiny, device="cpu"))
    reward = Reward(Luck(), in_process=True)
    if not critic:
        return wb.recipes.grpo(engine, reward, group_size=2, max_tokens=6, kl_coef=0.01)
    return wb.recipes.ppo(
        engine, reward, group_size=2, max_tokens=6, kl_coef=0.01, kl_target=0.02, kl_horizon=100, critic_lr=1e-4
    )


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(
    ("critic", "wanted"),
    [
        (False, ["update", "stop"]),
        pytest.param(True, ["update", "save", "validation", "stop"], marks=pytest.mark.long),
    ],
)
def test_B1_B2_killed_and_stopped_ranks_change_no_number(
    two: Group, tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, critic: bool, wanted: list[str]
) -> None:
    """Killed in an update, stopped between two calls, killed while a checkpoint is written, and while held-out rows are sampled."""
    plan: dict[str, Any] = {"save_freq": 2, "eval_rows": rows()[:2], "test_freq": 3, "steps": 4}
    quiet = trained(on_ranks(two, tiny, tmp_path, critic), tmp_path / "quiet", **plan)
    monkeypatch.setattr(processes_module, "LEAST_DEADLINE", patience(2.0))
    monkeypatch.setattr(processes_module, "FIRST_DEADLINE", patience(60.0))
    blows: list[str] = []

    def strike(what: str, number: int) -> None:
        if what in wanted and what not in blows:
            blows.append(what)
            os.kill(two.workers[len(blows) % 2]["pid"], number)

    backward, write, validated = FsdpEngine._backward, checkpoint.write, wb.runs.loop.TrainingLoop._validated

    def learn(self: Any, *given: Any) -> Any:
        if self.version == 1 and "update" not in blows:
            threading.Timer(0.02, strike, ("update", signal.SIGKILL)).start()
        return backward(self, *given)

    def save(*given: Any, **named: Any) -> Any:
        strike("save", signal.SIGKILL)
        return write(*given, **named)

    def validate(self: Any, held_out: Any) -> Any:
        if self._state["step"] == 2:
            strike("validation", signal.SIGKILL)
        return validated(self, held_out)

    class Stops:
        def on_start(self, start: int, steps: int) -> None: ...

        def on_step(self, report: Any) -> None:
            if report.step == 3:
                strike("stop", signal.SIGSTOP)

        def on_end(self, error: BaseException | None) -> None: ...

    monkeypatch.setattr(FsdpEngine, "_backward", learn)
    monkeypatch.setattr(checkpoint, "write", save)
    monkeypatch.setattr(wb.runs.loop.TrainingLoop, "_validated", validate)
    rough = trained(
        on_ranks(two, tiny, tmp_path, critic), tmp_path / "rough", **plan, max_recoveries=8, observers=[Stops()]
    )
    same(rough, quiet)
    told = events(rough[0].path)
    assert blows == wanted and {2, 4} <= {one["step"] for one in told}
    assert any("SIGSTOP" in one["error"] for one in told) and any(one["exit"] == "SIGKILL" for one in told)
    # a slow machine may lose a recovery to the deadline, too: then one event more than what came back
    assert rough[0].checkpoints == [2, 4] and len(wanted) <= len(rough[0].notes) <= len(told)


def test_deadlines_follow_the_median_and_start_over_after_one_that_was_late() -> None:
    deadlines = Deadlines()
    assert deadlines.of("learn") == processes_module.FIRST_DEADLINE == 1800
    for seconds in (1.0, 8.0, 9.0):
        deadlines.took("learn", seconds, size=100)
    assert deadlines.of("learn", 100) == 80 and deadlines.of("learn", 50) == 80, "ten times the median"
    assert deadlines.of("learn", 200) == 320, "attention grows with the square"
    assert deadlines.of("score") == 1800
    deadlines.took("score", 0.01)
    assert deadlines.of("score") == processes_module.LEAST_DEADLINE == 30
    with pytest.raises(TimeoutError), deadlines.watched("learn", 100) as seconds:
        assert seconds == 80
        raise TimeoutError
    assert deadlines.of("learn", 100) == 1800
