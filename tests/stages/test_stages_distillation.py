"""Distillation: divergences by hand and beside TRL, exact sums in chunks, the recipe stepped, trained, replayed and audited."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

import workbench as wb
from tests.support.trl import trl_module
from workbench.base.errors import DataError, EngineError, SettingError
from workbench.engines.protocol import LossCounts
from workbench.functional import divergence
from workbench.functional.distillation import LogitsDivergence, with_tail
from workbench.rewards import Reward
from workbench.stages import Divergence, LogProb, TeacherAdvantage, TeacherLogProb, Update
from workbench.steps.trace import perform
from workbench.testing.stages import StageContract, a_batch


def varied(response: str) -> float:
    return (sum(map(ord, response)) % 5) / 4


class TestTeacherAdvantage(StageContract):
    make_stage = staticmethod(lambda: TeacherAdvantage(kl_type="k3", loss_max_clamp=2.0, scored=True))
    make_batch = staticmethod(lambda: a_batch(teacher_log_probs=-torch.ones(8, 6)))


def rows() -> Any:
    return wb.rows("data/arith/train.parquet", max_prompt_length=256, limit=16)


@pytest.fixture
def student(tiny: str) -> Any:
    return wb.engines.local(tiny, device="cpu", lr=1e-3, self_check=False)


@pytest.fixture
def teacher(tiny: str) -> Any:
    """The tiny model after weights of random noise: another model with the same tokens."""
    model = wb.engines.local(tiny, device="cpu", self_check=False)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for one in model._model.parameters():
            one.add_(0.3 * one.std() * torch.randn(one.shape, generator=generator))
    return model.reference()


def sampled(engine: Any, batch: int = 4) -> wb.DataProto:
    """Ragged responses with a hole in each, as tools leave."""
    found = wb.stages.Rollout(engine, group_size=2, sampling=wb.SamplingSettings(max_tokens=12))(
        rows().batch(batch)
    ).batch
    whole = found["response_mask"]
    return found.with_columns({"response_mask": whole * (torch.arange(whole.shape[1]) % 4 != 2).long()})


class TestTeacherLogProb(StageContract):
    @pytest.fixture(autouse=True)
    def models(self, student: Any, teacher: Any) -> None:
        self.student, self.teacher = student, teacher

    def make_stage(self) -> Any:
        return TeacherLogProb(self.teacher, top_k=3, hint="extra_info.answer")

    def make_batch(self) -> wb.DataProto:
        return sampled(self.student)


def test_two_tokens_by_hand() -> None:
    """q = (1/2, 1/2), p = (1/4, 3/4): KL(q‖p) = ½·ln(4/3), KL(p‖q) = ¾·ln 3 − ln 2; of equals all are 0."""
    q, p = torch.tensor([0.5, 0.5]).log(), torch.tensor([0.25, 0.75]).log()
    assert divergence(q, p, 1.0).item() == pytest.approx(0.5 * math.log(4 / 3))
    assert divergence(q, p, 0.0).item() == pytest.approx(0.75 * math.log(3) - math.log(2))
    m = [0.375, 0.625]
    half = 0.5 * sum(
        a * math.log(a / c) + b * math.log(b / c) for a, b, c in zip((0.5, 0.5), (0.25, 0.75), m, strict=True)
    )
    assert divergence(q, p, 0.5).item() == pytest.approx(half)
    for beta in (0.0, 0.3, 1.0):
        assert divergence(p, p, beta).item() == pytest.approx(0.0, abs=1e-7)
    sure = torch.tensor([0.0, -math.inf]).requires_grad_()
    for beta in (0.0, 0.3, 1.0):
        assert divergence(sure, torch.tensor([0.0, -math.inf]), beta).item() == pytest.approx(0.0, abs=1e-7)
    with pytest.raises(ValueError, match="beta"):
        divergence(q, p, 1.5)
    assert with_tail(p[:1]).exp().tolist() == pytest.approx([0.25, 0.75])


@pytest.mark.parametrize("beta", [0.0, 0.1, 0.5, 1.0])
def test_loss_and_gradient_are_trls(beta: float) -> None:
    """Twenty random ragged batches with holes: TRL's generalised JSD and its chunked form, to 1e-5 in float32."""
    jsd = trl_module("trl.experimental.gkd.gkd_trainer").GKDTrainer.generalized_jsd_loss
    generator = torch.Generator().manual_seed(1)
    for number in range(20):
        b, t, v = 1 + number % 4, 3 + number % 5, 7 + number
        mask = (torch.rand(b, t, generator=generator) < 0.6).long()
        mask[0, 0] = 1
        logits, theirs = (3 * torch.randn(b, t, v, generator=generator) for _ in range(2))
        temperature = 0.7 + 0.1 * (number % 5)
        one, two = logits.clone().requires_grad_(), logits.clone().requires_grad_()
        labels = torch.where(mask.bool(), 0, -100)
        wanted = jsd(one, theirs, labels=labels, beta=beta, temperature=temperature)
        wanted.backward()
        values = divergence(*((x / temperature).log_softmax(-1) for x in (two, theirs)), beta)
        loss = Divergence(beta=beta, top_k=v)
        held = wb.DataProto({"response_mask": mask})
        outputs = {"compared": values, "log_probs": torch.zeros(b, t)}
        found = loss(outputs, held, LossCounts(float(mask.sum()), float(b))).loss
        found.backward()
        assert found.item() == pytest.approx(wanted.item(), rel=1e-5, abs=1e-6)
        assert torch.allclose(one.grad, two.grad, atol=1e-5)


def whole_gradient(engine: Any, batch: wb.DataProto, loss: Divergence) -> tuple[dict[str, torch.Tensor], float]:
    mask = batch["response_mask"]
    counts = LossCounts(float(mask.sum()), float(len(batch)))
    found = engine.gradient(batch, loss, counts, 0.9)
    return found, float(engine.probe(batch, loss, counts, 0.9).metrics["loss"].result())


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_chunks_give_the_exact_sums_of_plain_autograd(
    student: Any, teacher: Any, beta: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = sampled(student)
    mask = batch["response_mask"].bool()
    read = {
        "input_ids": batch["input_ids"],
        "attention_mask": batch["attention_mask"],
        "position_ids": batch["position_ids"],
    }
    t = mask.shape[1]
    mine = student._model(**read).logits[:, -t - 1 : -1] / 0.9
    with torch.no_grad():
        theirs = teacher._engine._model(**read).logits[:, -t - 1 : -1] / 0.9
    wanted = (divergence(mine.log_softmax(-1), theirs.log_softmax(-1), beta) * mask).sum() / mask.sum()
    wanted.backward()
    gradients = {name: one.grad.clone() for name, one in student._parameters().items() if one.grad is not None}
    monkeypatch.setattr("workbench.engines.local_engine.memory.CHUNK_BYTES", 1 << 14)
    for loss in (Divergence(beta=beta, teacher=teacher), Divergence(beta=beta, top_k=mine.shape[-1], tail=False)):
        held = perform(TeacherLogProb(teacher, top_k=loss.top_k, temperature=0.9), batch).batch
        found, value = whole_gradient(student, held, loss)
        assert value == pytest.approx(wanted.item(), rel=1e-4, abs=1e-7)
        for name, one in gradients.items():
            assert torch.allclose(found[name], one, atol=1e-5), name


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_the_analytic_gradient_is_autograds(beta: float) -> None:
    """To 1e-6, with tokens that neither model can give, in memory that each call uses again."""
    generator, of_logits = torch.Generator().manual_seed(2), LogitsDivergence(beta)
    for n in (5, 3, 5):
        logits, theirs = (torch.randn(n, 60, generator=generator) for _ in range(2))
        logits[0, :2] = theirs[0, :2] = -math.inf
        logits[:, 2] = -math.inf if beta > 0 else 0.0
        theirs[:, 3] = -math.inf if beta < 1 else 0.0
        theirs, weight = theirs.log_softmax(-1), torch.rand(n, generator=generator)
        one, two = logits.clone().requires_grad_(), logits.clone().requires_grad_()
        wanted, found = divergence(one.log_softmax(-1), theirs, beta), of_logits(two, theirs.clone())
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)
        wanted.backward(weight)
        found.backward(weight)
        torch.testing.assert_close(two.grad, one.grad, rtol=0, atol=1e-6)


def test_a_teacher_equal_to_the_student_gives_0(student: Any) -> None:
    same = student.reference()
    batch = perform(TeacherLogProb(same, top_k=5), sampled(student)).batch
    mine = perform(LogProb(student), batch).batch["old_log_probs"]
    assert torch.allclose(batch["teacher_log_probs"], mine, atol=1e-5)
    for loss in (
        *(Divergence(beta=beta, teacher=same) for beta in (0.0, 0.4, 1.0)),
        *(Divergence(beta=beta, top_k=5) for beta in (0.0, 1.0)),
        *(Divergence(estimator=kind) for kind in ("sampled", "k2", "k3")),
    ):
        before = student.snapshot()
        found = perform(Update(student, loss, allow_stale=True), batch)
        student.restore(before)
        assert abs(found.metrics["actor/loss"]) < 1e-5 and found.batch["divergence"].abs().max() < 1e-4
    tops = batch["teacher_top_log_probs"]
    assert batch["teacher_top_ids"].shape == (*batch["response_mask"].shape, 5) and (tops.diff(dim=-1) <= 0).all()


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"kl": "forward", "top_k": 8},
        {"estimator": "sampled"},
        {"policy_gradient": True},
        {"kl": 0.5, "reward": True},
    ],
    ids=str,
)
def test_it_steps_looks_ahead_trains_replays_and_is_audited(
    student: Any, teacher: Any, how: dict[str, Any], tmp_path: Path
) -> None:
    how = {**how, **({"reward": Reward(varied, in_process=True)} if "reward" in how else {})}
    pipe = wb.recipes.distill(student, teacher, max_tokens=12, **how)
    s = wb.Stepper(pipe, rows().batch(4)).run(until="teacher_log_prob" if "policy_gradient" not in how else "advantage")
    assert (s.batch["teacher_log_probs"] < 0).any()
    ahead = s.what_if(loss_agg_mode="seq-mean-token-sum", updates=2)
    assert ahead.cosine == pytest.approx(1.0, abs=0.5)
    assert "mean ratio afterwards" in repr(ahead)
    first = s.run().trace.metrics
    assert first["actor/grad_norm"] > 0
    again = s.back(to="rollout").run().trace.metrics
    assert all(again[name] == one for name, one in first.items() if not name.startswith("timing"))
    other = (
        s.fork()
        .back(to="teacher_log_prob")
        .replace("teacher_log_prob", TeacherLogProb(student.reference(), top_k=how.get("top_k")))
    )
    exact = not how.get("top_k") and "estimator" not in how and "policy_gradient" not in how
    assert (other.run().trace.metrics["actor/loss"] != first["actor/loss"]) is not exact  # the exact loss asks its own
    run = wb.train_blocking(pipe, rows(), steps=2, batch_size=4, run=tmp_path / "r", trackers=(), trace_freq=1)
    wanted = student.snapshot()["weights"]
    found = run.engine(2).snapshot()["weights"]
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)
    audit = run.audit()
    assert audit.agrees and not audit.unaudited, audit
    step = run.stepper(step=2)
    assert step.run().trace.metrics["actor/grad_norm"] == run.metrics["actor/grad_norm"][2]


def test_the_student_moves_to_the_teacher(student: Any, teacher: Any) -> None:
    pipe, held = wb.recipes.distill(student, teacher, max_tokens=12), rows().batch(8)
    found = [wb.Stepper(pipe, held).run().trace.metrics["actor/divergence"] for _ in range(10)]
    assert found[-1] < 0.7 * found[0], found


def test_rl_and_distillation_in_one_step(student: Any, teacher: Any, tmp_path: Path) -> None:
    reward = Reward(varied, in_process=True)
    pipe = wb.recipes.grpo(student, reward, group_size=2, max_tokens=12, kl_coef=0.0, teacher=teacher, distill_coef=0.5)
    assert pipe.names[-2:] == ("teacher_log_prob", "update_actor")
    found = wb.Stepper(pipe, rows().batch(4)).run().trace.metrics
    assert found["actor/loss"] == pytest.approx(found["actor/pg_loss"] + 0.5 * found["actor/distill"], rel=1e-4)
    assert found["actor/distill_divergence"] > 0
    run = wb.train_blocking(pipe, rows(), steps=1, batch_size=4, run=tmp_path / "r", trackers=())
    audit = run.audit()
    assert audit.agrees and not audit.unaudited, audit


def test_each_data_source_has_its_teacher(student: Any, teacher: Any) -> None:
    batch = sampled(student)
    batch = batch.with_columns({"data_source": ["a", "b"] * (len(batch) // 2)})
    found = perform(TeacherLogProb({"a": teacher, "b": student.reference()}, top_k=3), batch).batch
    one, two = (perform(TeacherLogProb(model, top_k=3), batch).batch for model in (teacher, student.reference()))
    for name in ("teacher_log_probs", "teacher_top_ids"):
        assert torch.allclose(found[name][::2].float(), one[name][::2].float(), atol=1e-5)
        assert torch.allclose(found[name][1::2].float(), two[name][1::2].float(), atol=1e-5)
    with pytest.raises(DataError, match="teacher of row 1; expected one of 'a'; found data_source 'b'"):
        perform(TeacherLogProb({"a": teacher}), batch)


def test_what_cannot_teach_is_refused_by_name(student: Any, teacher: Any, tiny: str) -> None:
    other = wb.engines.local(tiny, device="cpu", self_check=False)
    other.tokenizer.add_tokens(["<another>"])
    with pytest.raises(EngineError, match="student and teacher have different tokenizers"):
        wb.recipes.distill(student, other)
    with pytest.raises(SettingError, match="argument kl"):
        wb.recipes.distill(student, teacher, kl="backward")
    with pytest.raises(SettingError, match="beta with estimator='k3'"):
        wb.recipes.distill(student, teacher, kl="forward", estimator="k3")
    with pytest.raises(SettingError, match="estimator"):
        wb.recipes.distill(student, teacher, estimator="k4")
    with pytest.raises(SettingError, match="argument teacher"):
        wb.recipes.distill(student, "a folder")
    with pytest.raises(SettingError, match="kl and top_k with policy_gradient"):
        wb.recipes.distill(student, teacher, policy_gradient=True, top_k=4)
    with pytest.raises(SettingError, match="teacher of Divergence"):
        wb.recipes.distill(student, {"a": teacher})
    with pytest.raises(EngineError, match="top_k of the teacher"):
        perform(TeacherLogProb(teacher, top_k=1 << 20), sampled(student))


def test_only_the_teacher_reads_the_hint(student: Any) -> None:
    """By hand: the log-probs of the same tokens behind a prompt with the hint; a chat takes the prompt's place."""
    batch = sampled(student)
    hints = [f"The answer is {row}." if row % 2 else "" for row in range(len(batch))]
    batch = batch.with_columns({"hint": hints})
    found = perform(TeacherLogProb(student, top_k=4, hint="hint"), batch).batch
    plain = perform(TeacherLogProb(student, top_k=4), batch).batch
    tokenizer, mask = student.tokenizer, batch["response_mask"].bool()
    for row in range(len(batch)):
        same = torch.allclose(found["teacher_log_probs"][row], plain["teacher_log_probs"][row], atol=1e-5)
        assert same == (not hints[row])
        chat = [dict(turn) for turn in batch["raw_prompt"][row]]
        if hints[row]:
            chat[-1]["content"] += f"\n\n{hints[row]}"
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        assert found["teacher_prompt_text"][row] == text
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        answer = batch["responses"][row][batch["attention_mask"][row, -mask.shape[1] :].bool()].tolist()
        with torch.no_grad():
            logits = student._model(input_ids=torch.tensor([ids + answer])).logits[0, len(ids) - 1 : -1]
        wanted = logits.log_softmax(-1).gather(-1, torch.tensor(answer)[:, None])[:, 0]
        own = mask[row, : len(answer)]
        assert torch.allclose(found["teacher_log_probs"][row, : len(answer)][own], wanted[own], atol=1e-4)
    whole = batch.with_columns({"hint": [[{"role": "user", "content": "say it"}]] * len(batch)})
    other = perform(TeacherLogProb(student, hint="hint"), whole).batch
    assert "say it" in other["teacher_prompt_text"][0] and len(set(other["teacher_prompt_text"])) == 1
    with pytest.raises(DataError, match="hint of row 0; expected a text, a chat, or None"):
        perform(TeacherLogProb(student, hint="hint"), batch.with_columns({"hint": [3] * len(batch)}))


def test_a_student_teaches_itself_with_a_hint(student: Any, tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="hint with teacher='self'"):
        wb.recipes.distill(student, "self")
    pipe = wb.recipes.distill(student, "self", hint="extra_info.answer", kl="forward", top_k=8, max_tokens=12)
    s = wb.Stepper(pipe, rows().batch(4)).run(until="teacher_log_prob")
    assert s.what_if(beta=1.0, updates=2).cosine < 1
    first = s.run().trace.metrics
    again = s.back(to="rollout").run().trace.metrics
    assert all(again[name] == one for name, one in first.items() if not name.startswith("timing"))
    run = wb.train_blocking(pipe, rows(), steps=2, batch_size=4, run=tmp_path / "r", trackers=(), trace_freq=1)
    found, wanted = run.engine(2).snapshot()["weights"], student.snapshot()["weights"]
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)
    audit = run.audit()
    assert audit.agrees and not audit.unaudited, audit
    assert run.stepper(step=2).run().trace.metrics["actor/loss"] == run.metrics["actor/loss"][2]


@pytest.mark.slow
def test_a_teacher_of_itself_follows_and_is_resumed_and_replayed(tiny: str, tmp_path: Path) -> None:
    """At rate 0 the teacher stays; at ½ after step 2 its weights are half of each. Resumed, replayed and audited it is the same."""
    how: dict[str, Any] = {"batch_size": 2, "display": None, "trackers": (), "save_freq": 1, "trace_freq": 1}

    def pipe(rate: float, **more: Any) -> Any:
        engine = wb.engines.local(tiny, device="cpu", lr=1e-3, self_check=False)
        sync = {"teacher_sync_steps": 2, "teacher_update_rate": rate, "max_tokens": 12, **more}
        return wb.recipes.distill(engine, "self", hint="extra_info.answer", **sync)

    def weights(pipeline: Any, role: str) -> list[torch.Tensor]:
        return [one.clone() for one in pipeline.learners()[role].snapshot()["weights"].values()]

    still, moving = pipe(0.0), pipe(0.5)
    began = weights(moving, "reference")
    wb.train_blocking(still, rows(), steps=2, run=tmp_path / "still", **how)
    assert all(map(torch.equal, weights(still, "reference"), began))
    wb.train_blocking(moving, rows(), steps=2, run=tmp_path / "moved", **how)
    for old, policy, mixed in zip(began, weights(moving, "actor"), weights(moving, "reference"), strict=True):
        assert torch.allclose(mixed, 0.5 * (old + policy), atol=1e-7)
    more = {"resume": "auto", "allow_changes": ["train.steps"], **how}
    run = wb.train_blocking(pipe(0.5), rows(), steps=3, run=tmp_path / "moved", **more)
    whole = wb.train_blocking(pipe(0.5), rows(), steps=3, run=tmp_path / "whole", **how)
    assert [row["reference/synced"] for row in run.rows] == [0, 1, 0]
    assert [row["actor/loss"] for row in whole.rows] == [row["actor/loss"] for row in run.rows]
    assert whole.audit().agrees, whole.audit()
    step = wb.load_run(tmp_path / "whole").stepper(3).run()
    assert step.trace.metrics["actor/loss"] == whole.rows[-1]["actor/loss"]
    assert "training/policy_lag/max" not in step.trace["teacher_log_prob"].metrics
    alike = wb.Stepper(pipe(0.5, policy_gradient=True), rows().batch(2)).run().trace.metrics
    assert alike["actor/grad_norm"] > 0 and alike["reference/synced"] == 0


def test_names_of_a_moving_average_are_refused_with_those_here(student: Any, teacher: Any) -> None:
    with pytest.raises(SettingError, match=r"no setting 'ema_decay'.*teacher_sync_steps \(with teacher_update_rate"):
        wb.recipes.distill(student, "self", hint="extra_info.answer", ema_decay=0.99)
    with pytest.raises(SettingError, match=r"no setting 'ema_decay'.*ref_sync_steps \(with ref_mixup_alpha"):
        wb.recipes.grpo(student, varied, ema_decay=0.99)
    with pytest.raises(SettingError, match="what teacher_sync_steps needs"):
        wb.recipes.distill(student, teacher, teacher_sync_steps=1)


def test_an_average_of_adapters_is_refused_by_name(tiny: str) -> None:
    adapted = wb.engines.local(tiny, device="cpu", lora_rank=2, self_check=False)
    with pytest.raises(EngineError, match="model without LoRA; found LoRA adapters.*teacher_sync_steps"):
        wb.recipes.distill(adapted, "self", hint="extra_info.answer", teacher_sync_steps=1)
