"""Preference pairs and Bradley–Terry: numbers by hand, a plain loop over transformers' own classifier, texts as rewards read them."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import workbench as wb
from workbench.base.errors import DataError, EngineError, PipelineError, SettingError
from workbench.engines.protocol import LossCounts, Sampler
from workbench.functional import bradley_terry
from workbench.rewards.base import row_views
from workbench.stages import BradleyTerry, Pairs

SETTINGS: dict[str, Any] = {"max_tokens": 64}


def pairs_of(number: int, seed: int) -> list[dict[str, Any]]:
    """Right solutions, and beside them careless ones or one wrong number: form alone does not decide."""
    sys.path.insert(0, "data")
    from arith_world import careless, make_problem

    random, found = Random(seed), []
    for _ in range(number):
        problem = make_problem(random)
        end, wrong = f"#### {problem.answer}", careless(problem, random)
        if wrong.endswith(end) or random.random() < 0.5:
            wrong = problem.solution.replace(end, f"#### {problem.answer + random.choice((-2, -1, 1, 2))}")
        chat = [{"role": "user", "content": problem.question}]
        found.append({"prompt": chat, "chosen": problem.solution, "rejected": wrong, "gap": random.choice((0, 0.5, 2))})
    return found


@pytest.fixture(scope="module")
def rows() -> wb.datasets.Rows:
    return wb.rows(pairs_of(64, 1))


@pytest.fixture
def engine(tiny: str) -> Any:
    return wb.engines.reward_model(tiny, device="cpu", lr=1e-3)


def test_the_loss_by_hand() -> None:
    """r⁺ − r⁻ = 0 gives ln 2; 1 gives ln(1 + e⁻¹) = 0.3133; a margin of 1 takes it back; (1 + 0)² · 0.1 is the centre."""
    zero, one = torch.zeros(1), torch.ones(1)
    assert bradley_terry(zero, zero).item() == pytest.approx(math.log(2))
    assert bradley_terry(one, zero).item() == pytest.approx(0.31326, abs=1e-5)
    assert bradley_terry(zero, one).item() == pytest.approx(1.31326, abs=1e-5)
    assert bradley_terry(one, zero, one).item() == pytest.approx(math.log(2))
    assert bradley_terry(one, zero, 0.0, 0.1).item() == pytest.approx(0.41326, abs=1e-5)
    assert bradley_terry(torch.tensor([200.0]), -torch.tensor([200.0])).isfinite().all()


def test_the_metrics_by_hand() -> None:
    values = torch.tensor([[0.0, 2.0], [0.0, 1.0], [0.5, 0.0], [0.0, 0.5]])  # the own token may stand anywhere
    mask = torch.tensor([[0, 1], [0, 1], [1, 0], [0, 1]])
    batch = wb.DataProto({"response_mask": mask, "pair_margin": torch.tensor([1.0, 1.0, 0.0, 0.0])})
    loss = BradleyTerry(center_rewards_coefficient=0.01)
    found = loss({"values": values}, batch, LossCounts(tokens=4, sequences=4))
    expected = (math.log(2) + 0.01 * 9 + math.log(2) + 0.01 * 1) / 2
    assert found.loss.item() == pytest.approx(expected)
    plain = {name: one.result() for name, one in found.metrics.items()}
    assert plain == pytest.approx(
        {
            "reward_model/bt_loss": expected,
            "reward_model/accuracy": 0.75,  # one right, one tie
            "reward_model/margin": 0.5,
            "reward_model/chosen": 1.25,
            "reward_model/rejected": 0.75,
        }
    )
    # halves of a mini-batch add up to it: its own counts are the whole's
    halves = [loss({"values": values[at]}, batch[at], LossCounts(tokens=4, sequences=4)).loss for at in (slice(0, 2), slice(2, 4))]  # fmt: skip
    assert sum(halves).item() == pytest.approx(expected)
    with pytest.raises(PipelineError, match="expected an even number"):
        loss({"values": values[:1]}, batch[:1], LossCounts(tokens=1, sequences=1))


@pytest.mark.parametrize("template", ["chat", "question_answer"])
def test_a_row_is_the_text_that_a_reward_model_reads(engine: Any, rows: Any, template: str) -> None:
    batch = Pairs(engine, template=template, **SETTINGS)(rows.batch(6)).batch
    assert len(batch) == 12 and batch.meta_info["group_size"] == 2
    reward, start = wb.rewards.RewardModel(engine.classifier(), template=template), rows.batch(6)
    for row in range(12):
        chosen = row % 2 == 0
        assert batch["uid"][row] == start["uid"][row // 2]
        answer = start["chosen" if chosen else "rejected"][row // 2]
        assert batch["response_text"][row] == answer
        text, cut = reward.text_for(row_views(batch)[row])
        there = batch["input_ids"][row][batch["attention_mask"][row].bool()].tolist()
        assert not cut and there[:-1] == engine.tokenizer.encode(text)
        own = batch["response_mask"][row].nonzero().flatten().tolist()
        assert own == [len(there) - int(batch["prompt_mask"][row].sum()) - 1]
    assert batch["pair_margin"].tolist() == [0.0] * 12


def test_what_is_no_pair_is_refused_with_its_row(engine: Any, tiny: str) -> None:
    rows = wb.rows([{"prompt": "1", "chosen": "one", "rejected": "two", "m": 1}, {"prompt": "1", "chosen": "one", "rejected": "", "m": None}])  # fmt: skip
    with pytest.raises(DataError, match="column 'rejected' of row 1; expected a non-empty text"):
        Pairs(engine).check_rows(rows.views())
    with pytest.raises(DataError, match="margin 'm' of row 1; expected a finite number"):
        Pairs(engine, margin="m").check_rows(rows.views())
    with pytest.raises(DataError, match="chosen of row 0 is too long; expected at most 2 tokens"):
        Pairs(engine, max_tokens=2).check_rows(rows[:1].views())
    batch = Pairs(engine, margin="m")(next(rows[:1].in_order(1))).batch
    assert batch["pair_margin"].tolist() == [1.0, 1.0]
    talk = [{"prompt": "1", "chosen": [{"role": "assistant", "content": "one"}], "rejected": [{"role": "assistant", "content": "two"}]}]  # fmt: skip
    assert Pairs(engine)(next(wb.rows(talk).in_order(1))).batch["response_text"].tolist() == ["one", "two"]
    with pytest.raises(SettingError, match="center_rewards_coefficient"):
        BradleyTerry(center_rewards_coefficient=-1.0)
    with pytest.raises(SettingError, match="lora_rank of a reward model"):
        wb.engines.reward_model(tiny, lora_rank=4)
    with pytest.raises(EngineError, match="writes no text"):
        assert isinstance(engine, Sampler)
        wb.evaluate(engine, wb.rows([{"prompt": "1", "answer": "1"}]), reward=lambda response: 1.0)


@pytest.mark.parametrize(("budget", "pack"), [(None, "auto"), (70, "auto"), (None, "no"), (300, "no")])
def test_the_losses_and_weights_are_those_of_a_plain_loop(tiny: str, rows: Any, budget: int | None, pack: Any) -> None:
    """transformers' own forward of its classifier and TRL's formula, four steps; budgets that cut pairs from pairs alone."""
    settings = {"lr": 1e-3, "micro_batch_tokens": budget, "pack": pack}
    engine = wb.engines.reward_model(tiny, device="cpu", **settings)
    pipe = wb.recipes.reward_model(engine, margin="gap", center_rewards_coefficient=0.01, **SETTINGS)
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    model = AutoModelForSequenceClassification.from_pretrained(tiny, num_labels=1, dtype=torch.float32)
    torch.nn.init.zeros_(model.score.weight)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.999), weight_decay=0.01)
    start = {name: one.clone() for name, one in model.state_dict().items()}
    for step in range(1, 5):
        batch = rows.batch(8, step=step)
        found = wb.Stepper(pipe, batch).run()
        rewards = []
        for column in ("chosen", "rejected"):
            chats = [
                [*chat, {"role": "assistant", "content": answer}]
                for chat, answer in zip(batch["raw_prompt"], batch[column], strict=True)
            ]
            texts = tokenizer.apply_chat_template(chats, tokenize=False)
            given = tokenizer(texts, padding=True, padding_side="right", return_tensors="pt", add_special_tokens=False)
            rewards.append(model(input_ids=given.input_ids, attention_mask=given.attention_mask).logits[:, 0])
        good, bad = rewards
        gaps = torch.tensor(batch["gap"].astype(float), dtype=torch.float32)
        loss = -torch.nn.functional.logsigmoid(good - bad - gaps).mean() + 0.01 * torch.mean((good + bad) ** 2)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        metrics, scores = found.trace.metrics, found.batch["values"].sum(-1)
        assert metrics["reward_model/loss"] == pytest.approx(loss.item(), rel=1e-4)
        assert metrics["reward_model/grad_norm"] == pytest.approx(norm.item(), rel=2e-3)
        assert torch.allclose(scores[::2], good.detach(), atol=2e-4)
        assert torch.allclose(scores[1::2], bad.detach(), atol=2e-4)
    mine, theirs = engine.snapshot()["weights"], model.state_dict()
    assert mine.keys() == theirs.keys()
    far, moved = (
        sum(float((one[name] - theirs[name]).square().sum()) for name in theirs) ** 0.5 for one in (mine, start)
    )
    assert far < 2e-2 * moved


def test_it_trains_and_its_checkpoint_is_a_reward_model(tiny: str, rows: Any, engine: Any, tmp_path: Path) -> None:
    pipe, held = wb.recipes.reward_model(engine, **SETTINGS), wb.rows(pairs_of(16, 2))
    how = {"batch_size": 8, "trackers": (), "trace_freq": 1, "eval_rows": held, "run": tmp_path / "r"}
    run = wb.train_blocking(pipe, rows, steps=3, save_freq=2, **how)
    assert run.metrics["val/accuracy"][0] == 0.5 and run.metrics["val/bt_loss"][0] == pytest.approx(math.log(2))
    audit = run.audit()
    assert audit.agrees and not audit.unaudited and {"response_mask", "input_ids"} <= audit.columns, audit
    wanted = engine.snapshot()["weights"]
    for step in (2, 3):
        found = run.engine(step, role="reward_model").snapshot()["weights"]
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)
    # by another door, and by transformers': the rewards of the same rows
    batch = Pairs(engine, **SETTINGS)(next(held.in_order(16))).batch
    scores = engine.compute_log_probs(batch, ("values",))["values"].sum(-1).tolist()
    for place in (run.checkpoint(), run.path, tmp_path / "r"):
        reward = wb.rewards.RewardModel(wb.engines.classifier(place, device="cpu"))
        assert [one.value for one in reward.score(batch)] == pytest.approx(scores, abs=1e-4)
    live = wb.rewards.RewardModel(engine.classifier()).score(batch)
    assert [one.value for one in live] == pytest.approx(scores, abs=1e-4)
    theirs = AutoModelForSequenceClassification.from_pretrained(run.checkpoint() / "reward_model")
    assert theirs.config.num_labels == 1 and torch.equal(theirs.score.weight, wanted["score.weight"])
    # and it learns on from there
    on = wb.engines.reward_model(run.checkpoint(), device="cpu", lr=1e-3)
    assert torch.equal(on.snapshot()["weights"]["score.weight"], wanted["score.weight"])
    again = wb.train_blocking(pipe, rows, steps=4, save_freq=2, resume="auto", **how)
    assert again.metrics.index.max() == 4


@pytest.mark.long
@pytest.mark.slow
def test_it_learns_which_answers_are_right(tmp_path: Path) -> None:
    """From half of the held-out pairs right (all rewards are 0) to most of them; seeds 0, 1, 2 end at 0.93, 0.88, 0.98."""
    schedule: dict[str, Any] = {"schedule": "cosine", "warmup_steps": 10, "total_steps": 200}
    engine = wb.engines.reward_model("data/tiny-arith", lr=1e-3, **schedule)
    pipe = wb.recipes.reward_model(engine, center_rewards_coefficient=0.01, **SETTINGS)
    how = {"run": tmp_path / "run", "eval_rows": wb.rows(pairs_of(256, 2)), "trackers": ()}
    run = wb.train_blocking(pipe, wb.rows(pairs_of(6400, 1)), steps=200, batch_size=32, **how)
    accuracy = run.metrics["val/accuracy"].dropna()
    assert accuracy.iloc[0] == 0.5 and accuracy.iloc[-1] > 0.8, accuracy
