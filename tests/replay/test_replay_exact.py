"""Any step's exact weights from the checkpoint before it and the recorded updates; a run with rows left out of one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import workbench as wb
from workbench.base import progress
from workbench.base.errors import CheckpointError, PipelineError, RunError
from workbench.replay import rebuild
from workbench.replay.rebuild import apply
from workbench.runs import updates

STEPS = 6


def pipeline(tiny: str, reward: Any = None, **settings: Any) -> wb.Pipeline:
    engine = wb.engines.local(tiny, lr=1e-3, schedule="cosine", total_steps=20, device="cpu")
    chosen = {"kl_coef": 0.05, "kl_target": 0.01, "kl_horizon": 20, "critic_lr": 1e-3, **settings}
    return wb.recipes.ppo(engine, reward, group_size=2, max_tokens=12, ppo_mini_batch_size=2, **chosen)


class Remembers:
    """Weights and optimizer of every role after every step."""

    def __init__(self, pipe: wb.Pipeline) -> None:
        self._pipe = pipe
        self.after: dict[int, dict[str, Any]] = {}

    def on_start(self, start: int, steps: int) -> None:
        self.after[start - 1] = self._now()

    def on_step(self, report: Any) -> None:
        self.after[report.step] = self._now()

    def on_end(self, error: BaseException | None) -> None: ...

    def _now(self) -> dict[str, Any]:
        return {role: learner.snapshot() for role, learner in self._pipe.learners().items()}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[wb.Run, dict[int, dict[str, Any]]]:
    import os

    root = Path(__file__).parents[2]
    os.chdir(root)
    pipe = pipeline("data/tiny-arith")
    rows = wb.rows("data/arith/train.parquet", max_prompt_length=256, limit=20)
    watch = Remembers(pipe)
    run = wb.train_blocking(
        pipe, rows, steps=STEPS, batch_size=4, run=tmp_path_factory.mktemp("run") / "r", save_freq=3, trace_freq=1,
        keep_traces=10, observers=[watch],
    )  # fmt: skip
    updates.prune(run.path / "updates", 3, 1 << 30)  # as with traces of the last steps alone
    return run, watch.after


def same(engine: Any, wanted: dict[str, Any]) -> bool:
    found = engine.snapshot()
    parts = [(found["weights"], wanted["weights"]), (found["optimizer"] or {}, wanted["optimizer"] or {})]
    return all(a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a) for a, b in parts)


@pytest.mark.slow
@pytest.mark.long
def test_every_steps_weights_are_exact(recorded: Any) -> None:
    run, after = recorded
    assert run.checkpoints == [3, 6] and updates.steps(run.path / "updates") == [4, 5, 6]
    for step in (3, 4, 5, 6):
        for role in ("actor", "critic"):
            engine = run.engine(step, role)
            assert same(engine, after[step][role]), (step, role)
            assert engine.version == after[step][role]["version"]
    assert same(run.engine(0), after[0]["actor"])


@pytest.mark.slow
def test_a_step_that_cannot_be_reached_says_which_can(recorded: Any) -> None:
    run, _ = recorded
    with pytest.raises(
        RunError, match=r"after step 2 .*update of step 1 is not recorded any more.*steps that can: 0, 3–6"
    ):
        run.engine(2)
    with pytest.raises(RunError, match="update of step 7 is not recorded"):
        run.engine(7)


@pytest.mark.slow
def test_a_stepper_on_a_recorded_step_gives_the_runs_numbers(recorded: Any) -> None:
    run, after = recorded
    s = run.stepper(5)
    assert s.position == 0 and s.next_stage == "rollout"
    s.run()
    recorded_trace = run.traces[5]
    assert s.batch.columns == recorded_trace.batch.columns
    for name in s.batch.batch:
        assert torch.equal(s.batch[name], recorded_trace.batch[name]), name
    for key, value in recorded_trace.metrics.items():
        assert key.startswith("timing") or s.trace.metrics[key] == value, key
    assert same(s.pipeline.learners()["actor"], after[5]["actor"])


@pytest.mark.slow
def test_another_reward_on_a_recorded_step(recorded: Any) -> None:
    run, _ = recorded
    s = run.stepper(4).run(until="advantage")
    t = run.stepper(4).replace("reward", wb.rewards.Reward(lambda response: len(response) / 10, in_process=True))
    t.run(until="advantage")
    assert "reward" in repr(s.compare(t)) and not torch.equal(s.batch.reward, t.batch.reward)
    assert torch.equal(s.batch.responses, t.batch.responses)


@pytest.mark.slow
def test_a_reward_that_only_a_cell_had_is_missing_by_name(tiny: str, tmp_path: Path) -> None:
    def short_is_good(response: str) -> float:
        return 1.0 / (1 + len(response))

    rows = wb.rows("data/arith/train.parquet", max_prompt_length=256, limit=8)
    run = wb.train_blocking(pipeline(tiny, short_is_good), rows, steps=2, batch_size=4, run=tmp_path / "r", save_freq=1)
    shutil.rmtree(run.path / "traces")  # nor are its outputs there
    s = run.stepper(2).run(until="rollout")
    with pytest.raises(
        PipelineError, match=r"'reward' of the run cannot be run again here.*short_is_good.*replace\('reward'"
    ):
        s.run()
    s.replace("reward", short_is_good).run()
    assert s.batch.reward.tolist() == pytest.approx([short_is_good(text) for text in s.batch["response_text"]])
    assert "def short_is_good" not in json.dumps(run.settings["pipeline"])


@pytest.mark.slow
def test_an_update_of_somebody_elses_is_never_left_out_in_silence(tiny: str, tmp_path: Path) -> None:
    class Mine(wb.stages.Update):
        """A stage of a cell."""

    rows = wb.rows("data/arith/train.parquet", max_prompt_length=256, limit=8)
    engine = wb.engines.local(tiny, lr=1e-3, device="cpu")
    pipe = wb.recipes.grpo(engine, group_size=2, max_tokens=8)
    pipe = pipe.with_stage("update_actor", Mine(engine, wb.stages.PolicyLoss(kl_coef=0.1)))
    run = wb.train_blocking(pipe, rows, steps=3, batch_size=4, run=tmp_path / "r", save_freq=2)
    assert torch.equal(*(one.snapshot()["weights"]["model.norm.weight"] for one in (run.engine(3), engine)))
    shutil.rmtree(run.path / "checkpoints" / "step_000003")
    assert torch.equal(*(one.snapshot()["weights"]["model.norm.weight"] for one in (run.engine(3), engine)))
    Mine.__name__ = "Theirs"  # as in a process in which its cell has not been run
    with pytest.raises(PipelineError, match="'update_actor' of the run cannot be run again here"):
        run.engine(3)
    s = run.stepper(3).run(until="advantage")
    assert torch.equal(s.batch.advantages, run.traces[3].batch.advantages)


@pytest.mark.slow
def test_a_damaged_update_is_refused_by_file(recorded: Any, tmp_path: Path) -> None:
    run = wb.load_run(shutil.copytree(recorded[0].path, tmp_path / "r"))
    path = run.path / "updates" / "step_000005" / "inputs" / "tensors.safetensors"
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(bytes(content))
    assert run.engine(4).version
    with pytest.raises(CheckpointError, match=r"update of step 5: file inputs/tensors.safetensors"):
        run.engine(5)


@pytest.mark.slow
def test_a_group_left_out_of_one_update(recorded: Any) -> None:
    run, after = recorded
    uid = updates.read(run.path / "updates", 4).inputs["uid"][0]
    made = run.counterfactual(4, uids=[uid])
    assert made.left_out == (0, 1) and made.until == STEPS and list(made.metrics) == [4, 5, 6]
    # the actual side is the run; the other differs, though not by more than training itself went
    assert same(made.actual["actor"], after[STEPS]["actor"])
    assert all(0 < share < 2 for share in made.distance.values())
    was, would = made.metrics[4]["actor/grad_norm"]
    assert was != would and "without 2 rows" in repr(made) and "<table" in made._repr_html_()
    by_rows = run.counterfactual(4, rows=[0, 1])
    assert by_rows.metrics == made.metrics
    with pytest.raises(RunError, match="rows to leave out of step 4"):
        run.counterfactual(4, uids=["nobody"])
    with pytest.raises(RunError, match="some and not all"):
        run.counterfactual(4, rows=range(8))


@pytest.mark.slow
def test_the_updates_before_the_step_are_repeated_once(recorded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both sides begin with the same weights, optimizers and controllers: the second side's are copies."""
    run, after = recorded
    repeated = []

    def counting(pipe: wb.Pipeline, update: updates.RecordedUpdate, *inputs: Any) -> Any:
        repeated.append(update.step)
        return apply(pipe, update, *inputs)

    for module in (rebuild, updates):
        monkeypatch.setattr(module, "apply", counting)
    made = run.counterfactual(6, rows=[0])
    assert repeated == [4, 5, 6, 6]  # checkpoint 3 and two updates, then the last with and without the row
    assert same(made.actual["actor"], after[6]["actor"]) and same(made.actual["critic"], after[6]["critic"])
    assert made.without["actor"].version == after[6]["actor"]["version"]
    assert made.distance["actor"] > 0


@pytest.mark.slow
def test_leaving_nothing_of_consequence_out_changes_nothing(tiny: str, tmp_path: Path) -> None:
    """Rows without a judgement are in no loss, so the update without them is the update."""

    def judge(response: str, uid: str) -> float | None:
        return None if uid in gone else float(len(response) % 3)

    rows = wb.rows("data/arith/train.parquet", max_prompt_length=256, limit=8)
    gone = {rows.batch(4, step=2)["uid"][1]}
    engine = wb.engines.local(tiny, lr=1e-3, device="cpu")
    pipe = wb.recipes.grpo(engine, wb.rewards.Reward(judge, in_process=True), group_size=2, max_tokens=8)
    run = wb.train_blocking(pipe, rows, steps=2, batch_size=4, run=tmp_path / "r")
    made = run.counterfactual(2, uids=list(gone))
    assert made.distance["actor"] < 1e-4
    for was, would in made.metrics[2].values():
        assert was == pytest.approx(would, rel=1e-4, abs=1e-7)


@pytest.mark.slow
def test_a_resumed_run_opens_every_kept_trace(tiny: str, tmp_path: Path) -> None:
    rows = wb.rows("data/arith/train.parquet", max_prompt_length=256, limit=8)
    plan: dict[str, Any] = {"batch_size": 2, "run": tmp_path / "r", "trace_freq": 1, "trackers": ()}
    wb.train_blocking(pipeline(tiny), rows, steps=3, **plan)
    run = wb.train_blocking(pipeline(tiny), rows, steps=4, resume="auto", **plan)
    assert run.checkpoints == [3, 4] and run.restorable_steps == "0–4"
    assert list(run.traces) == [2, 3, 4] and "traces: steps 2" in repr(run)
    updates.prune(run.path / "updates", 3, 1 << 30, traces=[2, 4])
    assert updates.steps(run.path / "updates") == [1, 4]
    with pytest.raises(RunError, match="the update of step 2 is not recorded"):
        run.stepper(3)
    assert "opening" not in progress.now()


@pytest.mark.slow
@pytest.mark.long
def test_updates_keep_their_bound(tiny: str, tmp_path: Path) -> None:
    rows = wb.rows("data/arith/train.parquet", max_prompt_length=256, limit=8)
    run = wb.train_blocking(pipeline(tiny), rows, steps=1, batch_size=4, run=tmp_path / "none", keep_updates=0)
    assert not (run.path / "updates").exists()
    folder = tmp_path / "held"
    run = wb.train_blocking(pipeline(tiny), rows, steps=3, batch_size=4, run=folder, keep_updates=1)
    sizes = [sum(f.stat().st_size for f in one.rglob("*") if f.is_file()) for one in (folder / "updates").iterdir()]
    assert len(sizes) == 3
    updates.prune(folder / "updates", 0, sizes[0] + 100)
    assert updates.steps(folder / "updates") == [3]


# --- runs that begin on weights that no file has -----------------------------------------------------


def small(tiny: str, **settings: Any) -> tuple[Any, wb.datasets.Rows]:
    engine = wb.engines.local(tiny, lr=1e-3, device="cpu", **settings)
    return engine, wb.rows("data/arith/train.parquet", max_prompt_length=256, limit=12)


def moved_by_a_stepper(tiny: str) -> tuple[wb.Pipeline, wb.datasets.Rows]:
    engine, rows = small(tiny)
    pipe = wb.recipes.grpo(engine, group_size=2, max_tokens=4, kl_coef=0.01)
    wb.Stepper(pipe, rows.batch(2)).run()
    return pipe, rows


def moved_before_its_recipe(tiny: str) -> tuple[wb.Pipeline, wb.datasets.Rows]:
    pipe, rows = moved_by_a_stepper(tiny)
    return wb.recipes.grpo(pipe.learners()["actor"], group_size=2, max_tokens=4, kl_coef=0.01), rows


def moved_adapters(tiny: str) -> tuple[wb.Pipeline, wb.datasets.Rows]:
    engine, rows = small(tiny, lora_rank=2)
    pipe = wb.recipes.grpo(engine, group_size=2, max_tokens=4, kl_coef=0.01)
    wb.Stepper(pipe, rows.batch(2)).run()
    return pipe, rows


def moved_controller_alone(tiny: str) -> tuple[wb.Pipeline, wb.datasets.Rows]:
    pipe = pipeline(tiny)
    rows = wb.rows("data/arith/train.parquet", max_prompt_length=256, limit=12)
    wb.Stepper(pipe, rows.batch(2)).run(until="advantage")
    return pipe, rows


def critic_of_a_moved_policy(tiny: str) -> tuple[wb.Pipeline, wb.datasets.Rows]:
    pipe, rows = moved_by_a_stepper(tiny)
    fresh, _ = small(tiny)
    critic = pipe.learners()["actor"].critic()
    return wb.recipes.ppo(fresh, critic=critic, group_size=2, max_tokens=4, kl_coef=0.01), rows


def weights_of_another_folder(tiny: str, tmp_path: Path) -> tuple[wb.Pipeline, wb.datasets.Rows]:
    """Version 0 and no optimizer step, and yet not what the engine's path has."""
    pipe, rows = moved_by_a_stepper(tiny)
    pipe.learners()["actor"].save(tmp_path / "other")
    other, fresh = wb.engines.local(tmp_path / "other", lr=1e-3, device="cpu"), small(tiny)[0]
    other.save_state(tmp_path / "state")
    fresh.load_state(tmp_path / "other", tmp_path / "state")
    assert (fresh.version, fresh.as_loaded(), other.as_loaded()) == (0, False, True)
    return wb.recipes.grpo(fresh, group_size=2, max_tokens=4, kl_coef=0.0), rows


@pytest.mark.parametrize(
    ("make", "begun"),
    [
        (moved_by_a_stepper, ["actor"]),
        (moved_before_its_recipe, ["frozen_0", "actor"]),
        (moved_adapters, ["actor"]),
        (moved_controller_alone, []),
        (critic_of_a_moved_policy, ["critic"]),
        (weights_of_another_folder, ["actor"]),
    ],
    ids=lambda one: getattr(one, "__name__", None),
)
def test_every_step_of_a_run_on_weights_that_no_file_has_opens_again(
    tiny: str, tmp_path: Path, make: Any, begun: list[str]
) -> None:
    pipe, rows = make(tiny, tmp_path) if make is weights_of_another_folder else make(tiny)
    plan = {"steps": 3, "batch_size": 2, "trackers": (), "trace_freq": 1, "keep_traces": 9}
    run = wb.train_blocking(pipe, rows, run=tmp_path / "r", save_freq=1, **plan)
    assert sorted(run.settings["began"]["in_memory"]) == sorted(begun)
    assert run.checkpoints == ([0] if begun else []) + [2, 3], "the newest two, and what nothing else has"
    assert run.restorable_steps == "0–3" if begun else run.restorable_steps.startswith("0")
    notes = [one for one in run.notes if "no file has" in one]
    assert len(notes) == bool(begun) and all("checkpoint 0, about" in one for one in notes)
    for step in (1, 2, 3) if begun else (1, 3):
        recorded = run.path / "traces" / f"step_{step:06d}"
        recorded = recorded.rename(tmp_path / f"trace {step}") if begun else recorded
        again = run.stepper(step).run()  # a reference that no file had, too, is there without the trace
        assert wb.diverge(again.trace, wb.Trace.load(recorded)).identical, (step, again.notes)


def test_such_a_run_is_resumed_in_another_process_bit_for_bit(tiny: str, tmp_path: Path) -> None:
    pipe, rows = moved_by_a_stepper(tiny)
    plan: dict[str, Any] = {"batch_size": 2, "trackers": (), "eval_rows": rows[:2], "resume": "auto", "steps": 3}
    whole = wb.train_blocking(pipe, rows, run=tmp_path / "whole", **plan)

    class Ends:
        def on_start(self, start: int, steps: int) -> None: ...

        def on_step(self, report: Any) -> None:
            raise RuntimeError("killed")

        def on_end(self, error: BaseException | None) -> None: ...

    pipe, rows = moved_by_a_stepper(tiny)
    with pytest.raises(RuntimeError, match="killed"):
        wb.train_blocking(pipe, rows, run=tmp_path / "r", observers=[Ends()], **plan)
    shutil.rmtree(tmp_path / "r/checkpoints/step_000001")  # as if it had been killed before it could keep the step
    engine, rows = small(tiny)
    fresh = wb.recipes.grpo(engine, group_size=2, max_tokens=4, kl_coef=0.01)
    resumed = wb.train_blocking(fresh, rows, run=tmp_path / "r", **plan)
    assert any("resumed after step 0" in one for one in resumed.notes) and resumed.checkpoints == [0, 3]
    timed = lambda row: {key: one for key, one in row.items() if not key.startswith(("timing", "perf", "memory"))}  # noqa: E731
    assert list(map(timed, resumed.rows)) == list(map(timed, whole.rows)), "and the validation before is there once"
    other, rows = moved_before_its_recipe(tiny)  # another reference than the run's
    with pytest.raises(RunError, match="ref_log_prob.model: [0-9]+ → weights that no file had"):
        wb.train_blocking(other, rows, run=tmp_path / "r", **{**plan, "steps": 4})


def test_what_if_and_going_back_leave_weights_that_a_file_has(tiny: str, tmp_path: Path) -> None:
    engine, rows = small(tiny)
    pipe = wb.recipes.grpo(engine, group_size=2, max_tokens=4, kl_coef=0.0)
    s = wb.Stepper(pipe, rows.batch(2)).run(until="advantage")
    s.what_if(clip_ratio_high=0.4, updates=1)
    s.run().back(to="update_actor")
    assert engine.as_loaded()
    run = wb.train_blocking(pipe, rows, steps=1, batch_size=2, run=tmp_path / "r", trackers=())
    assert run.checkpoints == [1] and run.notes == ()
    assert wb.diverge(run.stepper(1).run().trace, run.traces[1]).identical


def test_an_engine_opened_from_a_run_keeps_the_very_checkpoint(tiny: str, tmp_path: Path) -> None:
    """The run's newest checkpoint is another one later; the second run must not begin with that when it is opened again."""
    engine, rows = small(tiny)
    pipe = wb.recipes.grpo(engine, group_size=2, max_tokens=4, kl_coef=0.0)
    plan: dict[str, Any] = {"batch_size": 2, "trackers": (), "resume": "auto"}
    wb.train_blocking(pipe, rows, steps=1, run=tmp_path / "first", **plan)
    second = wb.engines.local(tmp_path / "first", lr=1e-3, device="cpu")
    run = wb.train_blocking(
        wb.recipes.grpo(second, group_size=2, max_tokens=4, kl_coef=0.0), rows, steps=1, run=tmp_path / "r", **plan
    )
    wb.train_blocking(pipe, rows, steps=2, run=tmp_path / "first", **plan)
    assert run.checkpoints == [1]
    assert wb.diverge(run.stepper(1).run().trace, run.traces[1]).identical
