"""A recorded step opened at any phase: as recorded before it, exact weights where they are needed, none where not."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.lint import lint

import workbench as wb
from workbench.base.errors import PipelineError, RunError
from workbench.engines import FsdpEngine, LocalEngine, Paired
from workbench.replay.run import LateLearner, Replayed
from workbench.runs import updates
from workbench.steps.compare import compare
from workbench.steps.trace import Trace

ROOT = Path(__file__).parents[2]
STEPS = 6
PHASES = ("rollout", "reward", "old_log_prob", "ref_log_prob", "advantage", "update_actor")


def digits(response: str) -> float:
    """A reward of a cell: the folder has its name alone."""
    return sum(letter.isdigit() for letter in response) / 10


def train(folder: Path, make: Any, reward: Any = None, **settings: Any) -> wb.Run:
    """Six steps of 4 prompts, on a copy of the tiny model that a test may delete."""
    model = folder / "model"
    if not model.is_dir():
        shutil.copytree(ROOT / "data" / "tiny-arith", model)
    engine = wb.engines.local(model, lr=1e-3, device="cpu")
    rows = wb.rows(str(ROOT / "data" / "arith" / "train.parquet"), max_prompt_length=256)[:12]
    pipe = make(engine, reward, max_tokens=12, **settings)
    plan: dict[str, Any] = {"steps": STEPS, "batch_size": 4, "save_freq": 3, "trace_freq": 1, "keep_traces": 10}
    return wb.train_blocking(pipe, rows, run=folder / "run", trackers=(), **plan)


@pytest.fixture(scope="module")
def grpo(tmp_path_factory: pytest.TempPathFactory) -> wb.Run:
    return train(tmp_path_factory.mktemp("grpo"), wb.recipes.grpo, group_size=4, kl_coef=0.05)


@pytest.fixture(scope="module")
def ppo(tmp_path_factory: pytest.TempPathFactory) -> wb.Run:
    chosen = {"kl_coef": 0.05, "kl_target": 0.01, "kl_horizon": 20, "critic_lr": 1e-3, "group_size": 2}
    return train(tmp_path_factory.mktemp("ppo"), wb.recipes.ppo, digits, **chosen)


@pytest.fixture
def bare(grpo: wb.Run, tmp_path: Path) -> Iterator[wb.Run]:
    """The run with traces alone: its model moved away, no checkpoint, no recorded update."""
    run = wb.load_run(shutil.copytree(grpo.path, tmp_path / "run"))
    for name in ("checkpoints", "updates"):
        shutil.rmtree(run.path / name)
    model = Path(grpo.settings["engines"]["actor"]["path"])
    model.rename(model.with_name("away"))
    yield run
    model.with_name("away").rename(model)


def opened(stepper: Replayed) -> list[bool]:
    return [one.opened for one in stepper.pipeline.learners().values() if isinstance(one, LateLearner)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "phase",
    [
        pytest.param(one, marks=[] if one in ("rollout", "advantage", "update_actor") else pytest.mark.long)
        for one in PHASES
    ],
)
def test_a_step_opens_at_each_phase_and_gives_the_recorded_numbers(grpo: wb.Run, phase: str) -> None:
    place, recorded = PHASES.index(phase), grpo.traces[5]
    s = grpo.stepper(5, at=phase)
    assert s.next_stage == phase and s.position == place and s.trace.names == PHASES[:place]
    assert opened(s) == [False]
    assert compare(s.trace, recorded.first(place)).identical
    s.run()
    made = compare(s.trace, recorded)
    assert not made.columns and not made.metrics and not any(made.only), (made, phase)
    assert opened(s) == [True]
    found, wanted = (grpo.engine(5).snapshot(), s.pipeline.learners()["actor"].snapshot())
    assert all(torch.equal(found["weights"][name], wanted["weights"][name]) for name in found["weights"])


@pytest.mark.slow
def test_a_stage_with_a_model_runs_on_the_exact_weights_where_the_stepper_stands(grpo: wb.Run) -> None:
    s = grpo.stepper(5, at="old_log_prob").next()
    assert opened(s) == [True] and not s.trace["old_log_prob"].reused
    assert torch.equal(s.batch.old_log_probs, grpo.traces[5].batch.old_log_probs)
    assert s.next().trace["ref_log_prob"].reused  # behind it: the tokens are the same
    assert "as recorded, not run again: rollout, reward, ref_log_prob" in repr(s)


def test_another_reward_and_estimator_need_no_model(bare: wb.Run) -> None:
    s = bare.stepper(step=4, at="reward")
    s.replace("reward", wb.rewards.Reward(digits, in_process=True)).run(until="advantage")
    assert opened(s) == [False] and [phase.reused for phase in s.trace] == [False, False, True, True, False]
    texts = list(bare.traces[4].batch["response_text"])
    assert s.batch.reward.tolist() == pytest.approx([digits(text) for text in texts])
    assert s.trace["reward"].wrote == ("token_level_scores", "reward", "scored", "score")
    made = s.compare(bare.traces[4])
    assert {change.name for change in made.columns} >= {"reward", "advantages", "score"}
    assert "responses" not in {change.name for change in made.columns}
    t = bare.stepper(4, at="advantage").replace("advantage", wb.stages.Advantage(wb.functional.rloo)).next()
    grouped = t.batch.reward.reshape(4, 4)
    wanted = (grouped - (grouped.sum(1, keepdim=True) - grouped) / 3).reshape(-1)
    assert torch.allclose(t.batch.advantages[:, 0], wanted, atol=1e-6) and opened(t) == [False]
    assert "no engine is open" in repr(t) and "no engine is open" in t._repr_html_()
    assert lint(t._repr_html_()) == []


def test_what_cannot_be_made_is_refused_when_it_is_needed_and_says_what_is_there(bare: wb.Run) -> None:
    with pytest.raises(
        RunError, match=r"weights of 'actor' are needed.*after step 3.*update of step 1 is not .* steps that can: none"
    ):
        bare.stepper(4, at="advantage").run()
    with pytest.raises(RunError, match="weights of 'actor' are needed"):
        bare.stepper(4, at="old_log_prob").next()
    with pytest.raises(RunError, match="frozen model of the run is needed.*no folder"):
        bare.stepper(4, at="ref_log_prob").next()
    with pytest.raises(
        RunError, match="weights after step 3 .*the trace of step 4 is recorded: stepper.4, at='update_actor'"
    ):
        bare.stepper(4)
    s = bare.stepper(4, at="advantage").next()
    assert s.back(to="rollout").run(until="old_log_prob").trace["rollout"].reused


def advice(error: pytest.ExceptionInfo[RunError], **names: Any) -> Any:
    """What the call that an error advises returns."""
    (call,) = re.findall(r"run\.stepper\(.*\}\)", str(error.value))
    return eval(call, {"wb": wb, **names})  # noqa: S307 - the advice is ours


def test_where_a_copied_run_has_no_model_its_error_says_how_to_pass_one(grpo: wb.Run, tmp_path: Path) -> None:
    run = wb.load_run(shutil.copytree(grpo.path, tmp_path / "run"))
    model, away = Path(grpo.settings["engines"]["actor"]["path"]), tmp_path / "elsewhere"
    model.rename(away)
    try:
        with pytest.raises(RunError, match=f"no folder at {re.escape(str(model))}") as error:
            run.stepper(1)
        made = advice(error, run=run, folder=away).run(until="advantage")
        with pytest.raises(RunError, match=f"frozen model.*no folder at {re.escape(str(model))}") as frozen:
            run.stepper(4).run(until="advantage")
        late = advice(frozen, run=run, step=4, folder=away).run(until="ref_log_prob")
        assert not late.trace["ref_log_prob"].reused
        shutil.copytree(away, tmp_path / "changed")
        (tmp_path / "changed" / "config.json").write_text((away / "config.json").read_text() + "\n")
        other = advice(frozen, run=run, step=4, folder=tmp_path / "changed")
        with pytest.raises(RunError, match="frozen model of the run is needed"):  # these are not the run's files
            other.run(until="ref_log_prob")
    finally:
        away.rename(model)
    recorded = run.traces[1]["advantage"].batch
    for name in ("responses", "old_log_probs", "ref_log_prob", "advantages"):
        assert torch.equal(made.batch[name], recorded[name]), name


def test_the_weights_of_a_step_may_be_out_of_reach_of_its_trace(grpo: wb.Run, tmp_path: Path) -> None:
    run = wb.load_run(shutil.copytree(grpo.path, tmp_path / "run"))
    assert run.restorable_steps == "0–6"
    updates.prune(run.path / "updates", 3, 1 << 30)  # as with traces of the last steps alone
    assert run.restorable_steps == "0, 3–6"
    s = run.stepper(3, at="advantage").next()
    with pytest.raises(RunError, match=r"update of step 1 is not recorded any more.*steps that can: 0, 3–6"):
        s.next()
    shutil.rmtree(run.path / "traces" / "step_000005")
    with pytest.raises(RunError, match=r"step 5 cannot be opened at 'reward'.*traces of steps \[1, 2, 3, 4, 6\]"):
        run.stepper(5, at="reward")
    assert run.stepper(5, at="rollout").next_stage == "rollout"  # the start alone is in the update
    with pytest.raises(PipelineError, match="did you mean 'advantage'"):
        run.stepper(4, at="advantages")


@pytest.mark.slow
def test_what_if_on_a_recorded_step(grpo: wb.Run) -> None:
    s = grpo.stepper(5, at="update_actor")
    made = s.what_if(clip_ratio_high=0.5, updates=2)
    assert opened(s) == [True] and s.position == 5 and made.changes == {"clip_ratio_high": "0.5"}
    assert made.actual.metrics[0]["actor/grad_norm"] == grpo.traces[5].metrics["actor/grad_norm"]
    s.run()
    assert not compare(s.trace, grpo.traces[5]).columns


def test_engines_may_be_given(bare: wb.Run, tiny: str) -> None:
    engine = wb.engines.local(tiny, lr=1e-3, device="cpu")
    s = bare.stepper(1, at="old_log_prob", engines={"actor": engine}).next()
    assert torch.equal(s.batch.old_log_probs, bare.traces[1].batch.old_log_probs)  # step 1 began with these weights
    assert "those of the engines that were given for actor" in repr(s)
    with pytest.raises(RunError, match="'acter' is not a role of this run"):
        bare.stepper(1, at="reward", engines={"acter": engine})


# --- with a critic, an adaptive KL and a reward that only a cell had ------------------------------


@pytest.mark.long
@pytest.mark.slow
def test_two_updates_and_a_controller_each_where_they_stood(ppo: wb.Run) -> None:
    recorded = ppo.traces[5]
    s = ppo.stepper(5, at="update_actor")
    assert not any("memory" in note for note in s.notes)
    s.run()
    assert any(note.startswith("memory: up to ") and "until nothing refers to it" in note for note in s.notes)
    assert not compare(s.trace, recorded).columns
    after = {role: ppo.engine(5, role).snapshot()["weights"] for role in ("actor", "critic")}
    for role, learner in s.pipeline.learners().items():
        found = learner.snapshot()["weights"]
        assert all(torch.equal(found[name], after[role][name]) for name in found), role
    assert s.pipeline.state() == json.loads((ppo.path / "updates/step_000005/update.json").read_text())["controllers"]
    s.back(to="update_critic")
    before = ppo.engine(4, "critic").snapshot()["weights"]
    found = s.pipeline.learners()["critic"].snapshot()["weights"]
    assert all(torch.equal(found[name], before[name]) for name in found)
    assert not compare(s.run().trace, recorded).columns and "update_critic" not in s.notes[2]


@pytest.mark.slow
def test_going_back_before_anything_is_opened(ppo: wb.Run) -> None:
    s = ppo.stepper(5, at="update_actor").back(to="advantage")
    kept = json.loads((ppo.path / "traces/step_000005/kept.json").read_text())
    assert opened(s) == [False, False] and s.pipeline.state() == kept["before"] != kept["after"]
    t = s.fork()
    assert isinstance(t, Replayed)
    s.run()
    assert not compare(s.trace, ppo.traces[5]).columns and s.pipeline.state() == kept["after"]
    t.run(until="advantage")
    assert t.trace.metrics["actor/reward_kl_penalty_coeff"] == ppo.traces[5].metrics["actor/reward_kl_penalty_coeff"]


@pytest.mark.slow
def test_a_cells_reward_gives_its_recorded_outputs_and_says_so(ppo: wb.Run) -> None:
    for s in (ppo.stepper(4).run(until="reward"), ppo.stepper(4, at="reward").next()):
        made = s.compare(Trace(ppo.traces[4].start, ppo.traces[4].phases[: s.position]))
        assert not made.columns and s.trace.metrics["recorded/reward"] == 1.0
        assert s.trace["reward"].settings["outputs"] == "recorded, not run again"
        assert "reward: its recorded outputs, not run again (made with digits)" in repr(s)
    s = ppo.stepper(4, at="reward")
    others = list(reversed(list(s.batch["response_text"])))
    changed = s.batch.with_columns({"response_text": others})
    with pytest.raises(PipelineError, match=r"expected the recorded response_text.*digits.*replace\('reward'"):
        s.pipeline["reward"](changed)
    with pytest.raises(PipelineError, match="expected the recorded rows"):
        s.pipeline["reward"](changed.slice(0, 4))
    t = ppo.stepper(4)
    cooler = wb.SamplingSettings(temperature=0.5, max_tokens=12)
    t.replace("rollout", wb.stages.Rollout(t.pipeline.learners()["actor"], group_size=2, sampling=cooler))
    with pytest.raises(PipelineError, match="cannot be run again here; expected the recorded responses"):
        t.run()
    s.replace("reward", digits).run(until="reward")
    assert "recorded/reward" not in s.trace.metrics and torch.equal(s.batch.reward, ppo.traces[4].batch.reward)


def test_recorded_outputs_are_no_divergence_but_a_note(ppo: wb.Run) -> None:
    again = ppo.stepper(4).run(until="reward")
    recorded = Trace(ppo.traces[4].start, ppo.traces[4].phases[: again.position])
    for found in (wb.diverge(again, recorded), wb.diverge(recorded, again)):
        assert found.identical and sum("reward: not run again" in note for note in found.notes) == 1
        assert not any("reward.made_with" in note for note in found.notes)
    again.back(to="reward").replace("reward", digits).run(until="reward")
    assert not any("not run again" in note for note in wb.diverge(again, recorded).notes)


def test_a_controller_whose_state_nobody_kept_is_not_guessed(ppo: wb.Run, tmp_path: Path) -> None:
    run = wb.load_run(shutil.copytree(ppo.path, tmp_path / "run"))
    for name in ("checkpoints", "updates"):
        shutil.rmtree(run.path / name)
    (run.path / "traces" / "step_000004" / "kept.json").unlink()
    s = run.stepper(4, at="advantage").next()
    assert s.trace.metrics["recorded/advantage"] == 1.0 and "a controller whose state" in repr(s)
    assert torch.equal(s.batch.advantages, run.traces[4].batch.advantages)


# --- looking ---------------------------------------------------------------------------------------


def test_the_list_of_recorded_steps_and_the_card(grpo: wb.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Trace, "load", None)  # neither opens a trace
    lines = repr(grpo.traces).splitlines()
    assert lines[1].split() == [
        "step",
        "reward",
        "KL",
        "entropy",
        "tokens",
        "clipped",
        "grad",
        "norm",
        "seconds",
        "kept",
        "because",
    ]
    row = grpo.rows[2]
    assert lines[4].split()[0] == "3" and f"{row['actor/grad_norm']:.4g}" in lines[4] and "every step" in lines[4]
    card = repr(grpo)
    assert "finished, step 6 of 6" in card and "checkpoints: after steps 3, 6" in card and "0–6" in card
    assert 'run.stepper(step=6, at="reward")' in card and "run.curves()" in card
    for shown in (grpo.traces._repr_html_(), grpo._repr_html_()):
        assert "<table" in shown and lint(shown) == []


@pytest.mark.long
@pytest.mark.slow
def test_a_run_on_ranks_is_replayed_on_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where as many can be had; else by one process, whose numbers are the same up to rounding."""
    path = str(ROOT / "data" / "tiny-arith")
    rows = wb.rows(str(ROOT / "data" / "arith" / "train.parquet"), max_prompt_length=256)[:8]
    learner = wb.engines.fsdp(path, ranks=2, device="cpu", threads=1, lr=1e-3)
    with wb.engines.paired(learner, wb.engines.local(path, device="cpu")) as both:
        pipe = wb.recipes.grpo(both, digits, group_size=2, max_tokens=8)
        plan: dict[str, Any] = {"batch_size": 4, "trace_freq": 1, "keep_traces": 9, "save_freq": 1, "trackers": ()}
        run = wb.train_blocking(pipe, rows, steps=2, run=tmp_path / "r", **plan)
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    s = run.stepper(2, at="old_log_prob")
    assert opened(s) == [False] and s.run().pipeline.learners()["actor"].learner._group.size == 2
    assert compare(s.trace, run.traces[2]).identical or not compare(s.trace, run.traces[2]).columns
    ranked = run.engine(2)
    assert isinstance(ranked, Paired) and isinstance(ranked.learner, FsdpEngine)
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    alone = run.engine(2)
    assert isinstance(alone, LocalEngine)
    found, wanted = alone.snapshot()["weights"], ranked.snapshot()["weights"]
    assert all(torch.allclose(found[name], wanted[name], atol=1e-6) for name in wanted)
    ranked.close()


# --- a stage of one's own -----------------------------------------------------------------------

OWN = """import torch, workbench as wb

@wb.stage(reads=("reward", "token_level_scores"), writes=("token_level_scores",))
def shrunk(batch, factor=0.5):
    return {"token_level_scores": batch["token_level_scores"] * factor}
"""


def cell(text: str, number: int, **names: Any) -> Any:
    """The `shrunk` that a notebook's cell defines."""
    import linecache

    name = f"<cell {number}>"
    linecache.cache[name] = (len(text), None, text.splitlines(True), name)
    names["__name__"] = "__main__"
    exec(compile(text, name, "exec"), names)  # noqa: S102 - a cell
    return names["shrunk"]


@pytest.mark.slow
def test_a_stage_of_a_cell_runs_again_by_name_where_its_cell_has_been_run(tmp_path: Path) -> None:
    """D8: it was refused even in the process that made it."""
    import gc

    engine = wb.engines.local(str(ROOT / "data" / "tiny-arith"), lr=1e-3, device="cpu")
    rows = wb.rows(str(ROOT / "data" / "arith" / "train.parquet"), max_prompt_length=256)[:8]
    made = wb.recipes.grpo(engine, digits, group_size=2, max_tokens=8, kl_coef=0)
    mine = cell(OWN, 1)
    plan: dict[str, Any] = {"steps": 2, "batch_size": 2, "trace_freq": 1, "trackers": ()}
    run = wb.train_blocking(made.insert_after("reward", mine(factor=0.25)), rows, run=tmp_path / "run", **plan)
    s = run.stepper(2, at="shrunk").run(until="advantage")
    assert not any("shrunk" in note and "made with" in note for note in s.notes)
    assert torch.equal(s.batch["advantages"], run.traces[2].batch["advantages"])
    t = run.stepper(2, at="shrunk").replace("shrunk", factor=1.0).run(until="shrunk")
    torch.testing.assert_close(t.batch["token_level_scores"], 4 * run.traces[2]["shrunk"].batch["token_level_scores"])
    run.stepper(2).run()
    assert run.audit().agrees and not run.audit().unaudited

    # the same name with another text, then, as in a new process, none at all
    other = cell(OWN.replace("* factor", "+ factor"), 2)
    made = mine = s = t = None  # type: ignore[assignment]
    gc.collect()
    there = run.stepper(2, at="shrunk")
    with pytest.raises(PipelineError, match="shrunk of another source text.*run the cell that defines shrunk"):
        there.replace("shrunk", factor=1.0)
    del other
    gc.collect()
    there = run.stepper(2, at="shrunk")
    assert any(note.startswith("shrunk: its recorded outputs, not run again") for note in there.notes)
    assert torch.equal(there.fork().run(until="advantage").batch["advantages"], run.traces[2].batch["advantages"])
    again = cell(OWN, 3)
    there.replace("shrunk", factor=1.0).run(until="advantage")
    assert there.pipeline["shrunk"].settings() == {"factor": 1.0} and isinstance(there.pipeline["shrunk"], again)


def test_one_replay_has_its_engines_open_and_the_others_find_their_states_again(grpo: wb.Run) -> None:
    def weights(stepper: Replayed) -> dict[str, torch.Tensor]:
        return stepper.pipeline.learners()["actor"].full_weights()

    first, second = grpo.stepper(5), grpo.stepper(6, at="update_actor")
    first.run()
    after, states = weights(first), first.trace.names
    second.run()
    assert opened(first) == [False] and opened(second) == [True]
    assert all(torch.equal(tensor, after[name]) for name, tensor in weights(second).items()) is False
    # an update that is in no record, and both states of its step
    first.back(to="update_actor").replace("update_actor", kl_coef=5.0).run()
    changed = weights(first)
    assert opened(first) == [True] and opened(second) == [False]
    second.back(to="update_actor").run()
    assert opened(first) == [False] and first.trace.names == states
    assert all(torch.equal(tensor, changed[name]) for name, tensor in weights(first).items())
    first.back(to="update_actor").replace("update_actor", kl_coef=0.05).run()
    assert all(torch.equal(tensor, after[name]) for name, tensor in weights(first).items())
