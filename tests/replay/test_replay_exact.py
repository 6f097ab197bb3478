"""Any step's exact weights from the checkpoint before it and the recorded updates; a run with rows left out of one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import workbench as wb
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
    return run, watch.after


def same(engine: Any, wanted: dict[str, Any]) -> bool:
    found = engine.snapshot()
    parts = [(found["weights"], wanted["weights"]), (found["optimizer"] or {}, wanted["optimizer"] or {})]
    return all(a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a) for a, b in parts)


def test_every_steps_weights_are_exact(recorded: Any) -> None:
    run, after = recorded
    assert run.checkpoints == [3, 6] and updates.steps(run.path / "updates") == [4, 5, 6]
    for step in (3, 4, 5, 6):
        for role in ("actor", "critic"):
            engine = run.engine(step, role)
            assert same(engine, after[step][role]), (step, role)
            assert engine.version == after[step][role]["version"]
    assert same(run.engine(0), after[0]["actor"])


def test_a_step_that_cannot_be_reached_says_which_can(recorded: Any) -> None:
    run, _ = recorded
    with pytest.raises(
        RunError, match=r"after step 2 .*update of step 1 is not recorded any more.*steps that can: 0, 3–6"
    ):
        run.engine(2)
    with pytest.raises(RunError, match="update of step 7 is not recorded"):
        run.engine(7)


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


def test_another_reward_on_a_recorded_step(recorded: Any) -> None:
    run, _ = recorded
    s = run.stepper(4).run(until="advantage")
    t = run.stepper(4).replace("reward", wb.rewards.Reward(lambda response: len(response) / 10, in_process=True))
    t.run(until="advantage")
    assert "reward" in repr(s.compare(t)) and not torch.equal(s.batch.reward, t.batch.reward)
    assert torch.equal(s.batch.responses, t.batch.responses)


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


def test_an_update_of_somebody_elses_is_never_left_out_in_silence(tiny: str, tmp_path: Path) -> None:
    class Mine(wb.stages.Update):
        """A stage of a cell."""

    rows = wb.rows("data/arith/train.parquet", max_prompt_length=256, limit=8)
    engine = wb.engines.local(tiny, lr=1e-3, device="cpu")
    pipe = wb.recipes.grpo(engine, group_size=2, max_tokens=8)
    pipe = pipe.replace("update_actor", Mine(engine, wb.stages.PolicyLoss(kl_coef=0.1)))
    run = wb.train_blocking(pipe, rows, steps=3, batch_size=4, run=tmp_path / "r", save_freq=2)
    assert torch.equal(*(one.snapshot()["weights"]["model.norm.weight"] for one in (run.engine(3), engine)))
    shutil.rmtree(run.path / "checkpoints" / "step_000003")
    assert torch.equal(*(one.snapshot()["weights"]["model.norm.weight"] for one in (run.engine(3), engine)))
    Mine.__name__ = "Theirs"  # as in a process in which its cell has not been run
    with pytest.raises(PipelineError, match="'update_actor' of the run cannot be run again here"):
        run.engine(3)
    s = run.stepper(3).run(until="advantage")
    assert torch.equal(s.batch.advantages, run.traces[3].batch.advantages)


def test_a_damaged_update_is_refused_by_file(recorded: Any, tmp_path: Path) -> None:
    run = wb.load_run(shutil.copytree(recorded[0].path, tmp_path / "r"))
    path = run.path / "updates" / "step_000005" / "inputs" / "tensors.safetensors"
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(bytes(content))
    assert run.engine(4).version
    with pytest.raises(CheckpointError, match=r"update of step 5: file inputs/tensors.safetensors"):
        run.engine(5)


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


def test_the_updates_before_the_step_are_repeated_once(recorded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both sides begin with the same weights, optimizers and controllers: the second side's are copies."""
    run, after = recorded
    repeated = []

    def counting(pipe: wb.Pipeline, update: updates.Update, *inputs: Any) -> Any:
        repeated.append(update.step)
        return apply(pipe, update, *inputs)

    monkeypatch.setattr(rebuild, "apply", counting)
    made = run.counterfactual(6, rows=[0])
    assert repeated == [4, 5, 6, 6]  # checkpoint 3 and two updates, then the last with and without the row
    assert same(made.actual["actor"], after[6]["actor"]) and same(made.actual["critic"], after[6]["critic"])
    assert made.without["actor"].version == after[6]["actor"]["version"]
    assert made.distance["actor"] > 0


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
