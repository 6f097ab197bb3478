"""An update whose own log-probs are the old ones: when it takes them, and which stage training then leaves out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from workbench import functional as F
from workbench.base.errors import NonFinite, VersionMismatch
from workbench.base.metrics import reduce
from workbench.dataproto import DataProto
from workbench.engines import LossCounts, LossOutput, StepResult
from workbench.stages import (
    Advantage,
    ExactKL,
    FilterGroups,
    LogProb,
    Pipeline,
    PolicyLoss,
    Resample,
    Reward,
    RolloutCorrection,
    Update,
    ValueLoss,
    Values,
)
from workbench.stages.correction import CorrectionSettings
from workbench.stages.pipeline import LeftToUpdate
from workbench.stages.stage import BaseStage, Outcome
from workbench.stages.update import OnPolicyLoss
from workbench.steps.execute import phases
from workbench.steps.what_if import what_if

SCORED, LEARNED = -0.5, -0.25
"""Log-prob of a token in the scoring pass and in the learning pass of an `Engine`, so that a loss shows whose it took."""


class Engine:
    """Counts its passes; all of its log-probs are constants."""

    def __init__(self, name: str = "a") -> None:
        self.name, self.version, self.steps, self.passes, self.broken = name, 0, 0, 0, False

    @property
    def state_id(self) -> str:
        return f"{self.name}{self.steps}"

    def compute_log_probs(self, batch: DataProto, want: Any = ("log_probs",), temperature: float = 1.0) -> Any:
        self.passes += 1
        told = {"log_probs": SCORED, "entropy": 2.0, "sum_pi_squared": 0.5, "values": 0.1}
        return {name: told[name] * batch["response_mask"].float() for name in want}

    def learn(self, batch: DataProto, loss: Any, loss_counts: LossCounts, temperature: float = 1.0) -> StepResult:
        if self.broken:
            raise NonFinite("the loss is NaN")
        mask = batch["response_mask"].float()
        told = {"log_probs": LEARNED, "entropy": 2.0, "values": 0.1}
        result: LossOutput = loss({key: told[key] * mask for key in loss.want}, batch, loss_counts)
        self.steps += 1
        return StepResult({**result.metrics, "loss": 1.0}, result.columns)

    def commit(self) -> int:
        self.version += 1
        return self.version

    def snapshot(self) -> Any:
        return {"weights": {"w": torch.tensor(float(self.steps))}, "at": (self.version, self.steps)}

    def restore(self, snapshot: Any) -> None:
        self.version, self.steps = snapshot["at"]

    def full_kl(self, batch: DataProto, reference: Any, temperature: float = 1.0) -> torch.Tensor:
        return torch.zeros(batch["response_mask"].shape)

    def model(self) -> Any: ...


def batch(rows: int = 4, **more: Any) -> DataProto:
    """Rows of two a group, with all that an update reads but old log-probs."""
    mask = torch.ones(rows, 3, dtype=torch.long)
    columns = {
        **{name: torch.ones(rows, 5, dtype=torch.long) for name in ("input_ids", "attention_mask", "position_ids")},
        **{"response_mask": mask, "scored": torch.ones(rows, dtype=torch.bool), "advantages": mask.float()},
        **{"rollout_log_probs": -0.3 * mask, "policy_version": torch.zeros(rows, dtype=torch.long)},
        "uid": [f"u{row // 2}" for row in range(rows)],
        **more,
    }
    return DataProto.from_single_dict(columns, {"step": 1, "seed": 0, "group_size": 2})


def took(update: Update, rows: DataProto) -> float:
    """The old log-prob that an update's loss took: new + (old − new)."""
    return LEARNED + reduce([update(rows).metrics])["actor/ppo_kl"]


# --- the loss -----------------------------------------------------------------------------------


@pytest.mark.parametrize("entropy_coeff", [0.0, 0.1])
def test_the_loss_is_the_policy_loss_with_its_own_log_probs_as_the_old_ones(entropy_coeff: float) -> None:
    loss = PolicyLoss(entropy_coeff=entropy_coeff, kl_coef=0.1)
    rows = batch(2, ref_log_prob=torch.full((2, 3), -0.4))
    counts = LossCounts(tokens=6, sequences=2, width=3)
    outputs = {
        "log_probs": torch.tensor([[-0.1, -0.2, -0.3], [-1.0, -2.0, -3.0]], requires_grad=True),
        "entropy": torch.full((2, 3), 1.5, requires_grad=True),
    }
    made = OnPolicyLoss(loss)(outputs, rows, counts)
    made.loss.backward()
    old = rows.with_columns({"old_log_probs": outputs["log_probs"].detach()})
    again = {name: values.detach().requires_grad_() for name, values in outputs.items()}
    plain = loss(again, old, counts)
    plain.loss.backward()
    assert made.loss == plain.loss and torch.equal(outputs["log_probs"].grad, again["log_probs"].grad)  # type: ignore[arg-type]
    assert (outputs["entropy"].grad is None) == (entropy_coeff == 0), "entropy for the eye costs no gradient"
    assert reduce([made.metrics])["actor/ppo_kl"] == 0.0 and OnPolicyLoss(loss).want == ("log_probs", "entropy")
    for name in ("old_log_probs", "new_log_probs"):
        assert torch.equal(made.columns[name], outputs["log_probs"]) and not made.columns[name].requires_grad
    assert torch.equal(made.columns["entropys"], outputs["entropy"]) and not made.columns["entropys"].requires_grad
    assert "old_log_probs" not in OnPolicyLoss(loss).reads and "ref_log_prob" in OnPolicyLoss(loss).reads


# --- whose log-probs an update takes ------------------------------------------------------------


class Halved(LogProb):
    """A log-prob stage of one's own."""

    def __call__(self, batch: DataProto) -> Outcome:
        return super().__call__(batch)


def moved(engine: Engine, rows: DataProto) -> DataProto:
    """Scored by weights that have moved since, at the same version: another branch of a stepper."""
    found = LogProb(engine)(rows).batch
    engine.steps += 1
    return found


def noted(engine: Engine, rows: DataProto) -> DataProto:
    found = LogProb(engine)(rows).batch
    return found.with_columns({"old_log_probs": found["old_log_probs"].clone()})


Scored = Callable[[Engine, DataProto], DataProto]
OWN: dict[str, Scored] = {
    "missing": lambda engine, rows: rows,
    "of a log-prob stage": lambda engine, rows: LogProb(engine)(rows).batch,
    "with entropies": lambda engine, rows: LogProb(engine, entropy=True)(rows).batch,
    "with squared probabilities": lambda engine, rows: LogProb(engine, sum_pi_squared=True)(rows).batch,
}
TAKEN: dict[str, Scored] = {
    "of another temperature": lambda engine, rows: LogProb(engine, temperature=0.7)(rows).batch,
    "of another engine": lambda engine, rows: LogProb(Engine("b"))(rows).batch,
    "of other weights": moved,
    "of a stage of one's own": lambda engine, rows: Halved(engine)(rows).batch,
    "changed by hand": noted,
    "the sampler's": lambda engine, rows: RolloutCorrection(bypass_mode=True)(rows).batch,
}


@pytest.mark.parametrize("column", OWN)
def test_one_step_on_the_whole_batch_takes_its_own_log_probs(column: str) -> None:
    engine = Engine()
    rows = OWN[column](engine, batch())
    passes, done = engine.passes, Update(engine, PolicyLoss())(rows)
    assert reduce([done.metrics])["actor/ppo_kl"] == 0.0 and engine.passes == passes
    assert torch.equal(done.batch["old_log_probs"], done.batch["new_log_probs"])
    for name in ("old_log_probs", "entropys", "sampler_logprob_diff"):
        made = done.batch.origins[name]
        assert (made.stage, made.policy_version, made.step) == ("update_actor", 0, 1), (
            "by the weights of before the update"
        )
    assert done.batch.origins["new_log_probs"].policy_version == 1
    torch.testing.assert_close(done.batch["sampler_logprob_diff"], torch.full((4,), 0.05))


def test_it_writes_and_measures_what_the_log_prob_stage_does() -> None:
    engine, rows = Engine(), batch()
    engine.compute_log_probs = lambda batch, want, temperature=1.0: {  # type: ignore[method-assign,misc]
        name: {"log_probs": LEARNED, "entropy": 2.0}[name] * batch["response_mask"].float() for name in want
    }
    stage, done = LogProb(engine, entropy=True)(rows), Update(Engine(), PolicyLoss())(rows)
    for name in ("old_log_probs", "entropys", "sampler_logprob_diff"):
        assert torch.equal(stage.batch[name], done.batch[name])
    mine, theirs = reduce([stage.metrics]), reduce([done.metrics])
    assert mine and all(theirs[key] == value for key, value in mine.items())
    assert set(theirs) - set(mine) and all(key.startswith("actor/") for key in set(theirs) - set(mine))


@pytest.mark.parametrize("column", TAKEN)
def test_other_old_log_probs_are_taken_as_they_are(column: str) -> None:
    engine = Engine()
    rows = TAKEN[column](engine, batch())
    before = float(rows["old_log_probs"][0, 0])
    update = Update(engine, PolicyLoss(), allow_stale=True)
    assert took(update, rows) == pytest.approx(before, abs=1e-6)
    assert torch.equal(update(rows).batch["old_log_probs"], rows["old_log_probs"])


@pytest.mark.parametrize(
    "settings",
    [
        {"ppo_epochs": 2},
        {"ppo_mini_batch_size": 1},
        {"recompute_old_log_probs": True},
        {"loss": PolicyLoss(bypass=CorrectionSettings())},
    ],
    ids=str,
)
def test_several_steps_the_switch_and_bypass_mode_take_the_column(settings: dict[str, Any]) -> None:
    engine = Engine()
    rows = LogProb(engine)(batch()).batch
    given = {"loss": PolicyLoss(), **settings}
    taken = -0.3 if "loss" in settings else SCORED
    update = Update(engine, **given)
    assert not update.is_on_policy(rows) and took(update, rows) == pytest.approx(taken, abs=1e-6)


def test_a_subclass_keeps_the_column() -> None:
    class Mine(Update):
        """May do anything with the old log-probs."""

    rows = LogProb(engine := Engine())(batch()).batch
    assert "old_log_probs" in Mine(engine, PolicyLoss()).reads and not Mine(engine, PolicyLoss()).is_on_policy(rows)


def test_mini_batches_as_large_as_the_batch_are_one_step() -> None:
    update = Update(Engine(), PolicyLoss(), ppo_mini_batch_size=2)
    assert update.is_on_policy(batch(4)) and update.is_on_policy(batch(2)) and not update.is_on_policy(batch(6))


def test_a_missing_column_is_computed_where_no_pass_of_the_update_gives_it() -> None:
    engine = Engine()
    several = Update(engine, PolicyLoss(), ppo_mini_batch_size=1)
    assert took(several, batch()) == pytest.approx(SCORED) and engine.passes == 1
    warming = Update(engine, PolicyLoss(), from_step=5)(batch())
    assert engine.passes == 2 and engine.version == 1
    nothing = batch(response_mask=torch.tensor([[0, 0, 0], [0, 0, 0], [1, 1, 1], [1, 1, 1]]))
    nothing = nothing.with_columns({"scored": torch.tensor([True, True, False, False])})
    empty = Update(engine, PolicyLoss())(nothing)
    assert engine.passes == 3 and reduce([empty.metrics])["actor/empty_mini_batches"] == 1
    engine.broken = True
    skipped = Update(engine, PolicyLoss(), skip_nonfinite=1)(batch())
    assert engine.passes == 4 and engine.version == 1
    for done in (warming, empty, skipped):
        assert torch.equal(done.batch["old_log_probs"], done.batch["new_log_probs"])
        assert done.batch["old_log_probs"].min() == SCORED and "actor/entropy" in done.metrics
        assert not done.batch["clipped"].any()


def test_a_batch_is_used_once() -> None:
    rows = LogProb(engine := Engine())(batch()).batch
    update = Update(engine, PolicyLoss())
    done = update(rows)
    for again in (rows, done.batch):
        with pytest.raises(VersionMismatch, match="old_log_probs"):
            update(again)


def test_what_if_makes_its_updates_from_one_set_of_old_log_probs() -> None:
    engine = Engine()
    pipe = Pipeline([Whole(), Update(engine, PolicyLoss())])
    found = what_if(pipe, batch(), updates=2, clip_ratio_high=0.1)
    kl = [one["actor/ppo_kl"] for one in (*found.actual.metrics, *found.other.metrics)]
    assert kl == pytest.approx([SCORED - LEARNED] * 4) and "old_log_probs" in found.batch


# --- which stage training leaves out ------------------------------------------------------------


class Peek(BaseStage):
    """Reads, may read or changes columns of the log-prob stage."""

    name = "peek"

    def __init__(
        self, reads: tuple[str, ...] = (), optional: tuple[str, ...] = (), writes: tuple[str, ...] = ()
    ) -> None:
        self.reads, self.optional, self.writes = reads, optional, writes

    def __call__(self, batch: DataProto) -> Outcome:
        return Outcome(batch)


class Whole(BaseStage):
    """Gives all that the stages of a test read before the log-probs."""

    name = "rollout"
    writes = (
        *(
            "input_ids",
            "attention_mask",
            "position_ids",
            "response_mask",
            "responses",
            "rollout_log_probs",
            "response_text",
        ),
        *("token_level_scores", "reward", "scored", "score", "ref_log_prob", "values", "returns", "advantages"),
    )

    def __call__(self, batch: DataProto) -> Outcome:
        return Outcome(batch)


class Given(Whole):
    """Gives the columns of `batch`."""

    writes = tuple(batch().batch)


def mine(response: str) -> float:
    return 1.0


def asking(token_level_rewards: Any, mask: Any, old_log_probs: Any = None) -> Any:
    """An estimator that may ask for old log-probs."""
    return token_level_rewards


def left(*between: Any, engine: Engine | None = None, stage: Any = None, **settings: Any) -> bool:
    """Whether training leaves the log-prob stage out of a pipeline with these stages between it and the update."""
    engine = engine or Engine()
    update = Update(engine, **{"loss": PolicyLoss(), **settings})
    scored = LogProb(engine, entropy=True) if stage is None else stage(engine)
    middle = [one(engine) if callable(one) and not isinstance(one, BaseStage) else one for one in between]
    has = any(one.name == "advantage" for one in middle)
    pipe = Pipeline([Whole(), scored, *([] if has else [Advantage(F.grpo)]), *middle, update])
    assert (pipe.left_out == "old_log_prob") == any(isinstance(one, LeftToUpdate) for one in pipe.in_training())
    assert (
        ("own forward pass computes" in repr(pipe))
        == ("own forward pass computes" in pipe._repr_html_())
        == bool(pipe.left_out)
    )
    return pipe.left_out is not None


LEFT_OUT: dict[str, Callable[[], bool]] = {
    "grpo": lambda: left(),
    "without entropies": lambda: left(stage=LogProb),
    "mini-batches that may be the whole batch": lambda: left(ppo_mini_batch_size=64),
    "a warm-up": lambda: left(from_step=3),
    "a reference": lambda: left(lambda engine: LogProb(Engine("r"), name="ref_log_prob", column="ref_log_prob")),
    "a critic": lambda: left(Values(critic := Engine("c")), Update(critic, ValueLoss(), name="update_critic")),
    "a stage of one's own that reads other columns": lambda: left(
        Peek(("advantages",), ("loss_mask",), ("influence",))
    ),
}
KEPT: dict[str, Callable[[], bool]] = {
    "the switch": lambda: left(recompute_old_log_probs=True),
    "epochs": lambda: left(ppo_epochs=2),
    "bypass": lambda: left(loss=PolicyLoss(bypass=CorrectionSettings())),
    "another temperature": lambda: left(temperature=0.5),
    "another engine": lambda: left(stage=lambda engine: LogProb(Engine("b"), entropy=True)),
    "a log-prob stage of one's own": lambda: left(stage=lambda engine: Halved(engine, entropy=True)),
    "squared probabilities": lambda: left(stage=lambda engine: LogProb(engine, entropy=True, sum_pi_squared=True)),
    "the token baseline": lambda: left(
        Advantage(F.optimal_token_baseline), stage=lambda engine: LogProb(engine, sum_pi_squared=True)
    ),
    "KL in the reward": lambda: left(Advantage(F.gae, kl_controller=F.FixedKL(0.1))),
    "an estimator that may ask for it": lambda: left(Advantage(asking)),
    "rollout correction": lambda: left(RolloutCorrection()),
    "exact KL": lambda: left(lambda engine: ExactKL(engine, Engine("r"))),
    "a reward": lambda: left(Reward(mine, in_process=True)),
    "filtering": lambda: left(FilterGroups([Whole()])),
    "resampling": lambda: left(Resample()),
    "a stage that reads it": lambda: left(Peek(("old_log_probs",))),
    "a stage that reads entropies": lambda: left(Peek(("entropys",))),
    "a stage that uses the gap where it is there": lambda: left(Peek((), ("sampler_logprob_diff",))),
    "a stage that changes it": lambda: left(Peek((), (), ("old_log_probs",))),
    "another update of the same weights": lambda: left(
        lambda engine: Update(engine, ValueLoss(), name="update_critic")
    ),
}


@pytest.mark.parametrize("case", LEFT_OUT)
def test_training_leaves_a_pass_out_that_nobody_reads(case: str) -> None:
    assert LEFT_OUT[case]()


@pytest.mark.parametrize("case", KEPT)
def test_training_keeps_a_pass_that_something_needs(case: str) -> None:
    assert not KEPT[case]()


@pytest.mark.parametrize(("rows", "passes"), [(4, 0), (6, 1)])
def test_whether_mini_batches_are_the_whole_batch_is_seen_when_it_is_there(rows: int, passes: int) -> None:
    engine = Engine()
    stages = [Given(), LogProb(engine, entropy=True), Update(engine, PolicyLoss(), ppo_mini_batch_size=2)]
    *_, trace = phases(Pipeline(stages), batch(rows))
    assert engine.passes == passes and trace.names == ("rollout", "old_log_prob", "update_actor")
    assert trace["old_log_prob"].wrote == ("old_log_probs", "entropys", "sampler_logprob_diff")
    assert trace["update_actor"].wrote == ("new_log_probs", "clipped")
    assert ("computed_by" in trace["old_log_prob"].settings) == (passes == 0)
    assert "actor/entropy" in trace["old_log_prob"].metrics and "actor/entropy" not in trace["update_actor"].metrics


def test_rows_that_are_dropped_between_leave_the_columns_where_they_were_computed() -> None:
    class Fewer(Peek):
        def __call__(self, batch: DataProto) -> Outcome:
            kept = torch.tensor([0, 1])
            return Outcome(batch.select_idxs(kept), {}, kept)

    engine = Engine()
    *_, trace = phases(Pipeline([Given(), LogProb(engine), Fewer(), Update(engine, PolicyLoss())]), batch())
    assert engine.passes == 0 and trace["old_log_prob"].wrote == ()
    assert "old_log_probs" in trace["update_actor"].wrote and len(trace.batch) == 2


def test_old_log_probs_of_the_data_are_computed_again() -> None:
    engine = Engine()
    given = batch(old_log_probs=torch.full((4, 3), -9.0))
    *_, trace = phases(Pipeline([Given(), LogProb(engine), Update(engine, PolicyLoss())]), given)
    assert engine.passes == 1 and trace.metrics["actor/ppo_kl"] == 0.0
