"""Targets as responses, and the supervised update, against transformers' own templates, labels and loss."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import workbench as wb
from workbench.base.errors import DataError, PipelineError, SettingError
from workbench.stages import CrossEntropy, Pipeline, Targets, Update

SETTINGS: dict[str, Any] = {"target": "extra_info.answer", "max_tokens": 64}
TALK = [
    {"role": "system", "content": "Add."},
    {"role": "user", "content": "1 + 1"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "and 3 more"},
    {"role": "assistant", "content": "5 in all"},
]


class Tokens:
    """No engine: a tokenizer is all that encoding takes."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer


@pytest.fixture(scope="module")
def tokenizer(tiny: str) -> Any:
    return AutoTokenizer.from_pretrained(tiny)


def arith(number: int = 64) -> wb.datasets.Rows:
    return wb.rows("data/arith/train.parquet", max_prompt_length=256, limit=number)


def test_a_row_is_the_chat_as_transformers_writes_it(tokenizer: Any) -> None:
    batch = Targets(Tokens(tokenizer), **SETTINGS)(arith().batch(8)).batch
    for row in range(8):
        said = [{"role": "assistant", "content": batch["extra_info"][row]["answer"]}]
        chat = [*batch["raw_prompt"][row], *said]
        whole = tokenizer.apply_chat_template(chat, tokenize=False)
        asked = tokenizer.apply_chat_template(chat[:1], tokenize=False, add_generation_prompt=True)
        real = batch["input_ids"][row][batch["attention_mask"][row].bool()]
        assert tokenizer.decode(real) + "\n" == whole  # what the template writes after EOS is nobody's to say
        own = batch["responses"][row][batch["response_mask"][row].bool()]
        assert asked + tokenizer.decode(own) + "\n" == whole and int(own[-1]) == tokenizer.eos_token_id
        assert batch["response_text"][row] == said[0]["content"]
    mask = batch["attention_mask"].bool()
    assert torch.equal(batch["position_ids"][mask], torch.cat([torch.arange(n) for n in mask.sum(-1).tolist()]))
    assert "rollout_log_probs" not in batch and batch.meta_info["group_size"] == 1


def test_every_answer_of_a_chat_is_a_target(tokenizer: Any) -> None:
    """As transformers' own mask of assistant tokens, which its templates mark."""
    rows = wb.rows([{"messages": TALK}, {"messages": TALK[:3]}])
    batch = Targets(Tokens(tokenizer), every_turn=True)(next(rows.in_order(2))).batch
    marked = copy.deepcopy(tokenizer)
    marked.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' %}"
        "{% generation %}{{ m['content'] }}<|im_end|>{% endgeneration %}{% else %}{{ m['content'] }}<|im_end|>{% endif %}{{ '\\n' }}"
        "{% endfor %}"
    )
    how = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
    for row, chat in enumerate((TALK, TALK[:3])):
        theirs = marked.apply_chat_template(chat, **how)
        real = batch["attention_mask"][row].bool()
        whole = torch.cat([torch.zeros_like(batch["prompts"]), batch["response_mask"]], dim=1)
        ids, mask = batch["input_ids"][row][real].tolist(), whole[row][real].tolist()
        size = len(ids)  # theirs has a newline behind the last EOS
        assert ids == theirs["input_ids"][:size] and mask == theirs["assistant_masks"][:size]
        assert sum(mask) == sum(theirs["assistant_masks"])
    last = Targets(Tokens(tokenizer))(next(rows.in_order(2))).batch
    assert last["response_text"].tolist() == ["5 in all", "2"] and last["response_mask"].sum() < whole.sum()


def test_what_cannot_be_a_target_is_refused_with_its_row(tokenizer: Any) -> None:
    rows = wb.rows([{"prompt": "1", "out": "one"}, {"prompt": "2", "out": None}, {"prompt": "3", "out": "3" * 40}])
    stage = Targets(Tokens(tokenizer), target="out", max_tokens=8)
    with pytest.raises(DataError, match="column 'out' of row 1; expected a non-empty text"):
        stage.check_rows(rows.views())
    with pytest.raises(DataError, match="out of row 1 is too long; expected at most 8 tokens; found 41"):
        stage.check_rows(rows[[0, 2]].views())
    assert "of 1 rows" in stage.check_rows(rows[:1].views())
    with pytest.raises(DataError, match=r"uid.*too long"):
        stage(next(rows[2:].in_order(1)))
    odd = copy.deepcopy(tokenizer)
    odd.chat_template = (
        "{% for m in messages %}{% if loop.last or m.role != 'assistant' %}{{ m.content }}|{% endif %}{% endfor %}"
    )
    with pytest.raises(DataError, match="every_turn for row 0"):
        Targets(Tokens(odd), every_turn=True)(next(wb.rows([{"messages": TALK}]).in_order(1)))
    with pytest.raises(SettingError, match="loss_agg_mode"):
        CrossEntropy(loss_agg_mode="token-meen")


def test_the_pipeline_asks_for_nothing_of_rewards(tiny: str) -> None:
    engine = wb.engines.local(tiny, device="cpu", self_check=False)
    pipe = wb.recipes.sft(engine)
    assert pipe.names == ("targets", "update_actor") and pipe.first is pipe["targets"]
    with pytest.raises(PipelineError, match="no stage writes it|but no earlier stage writes it"):
        Pipeline([Update(engine, CrossEntropy()), Targets(engine)])
    with pytest.raises(SettingError, match="loss_agg_mode"):
        wb.recipes.sft(engine, loss_agg="token-mean")


@pytest.mark.parametrize("budget", [None, 128])
def test_the_losses_and_weights_are_those_of_a_plain_loop(tiny: str, tokenizer: Any, budget: int | None) -> None:
    """transformers' own loss of labels, torch's AdamW: four steps. Micro-batches change nothing."""
    rows, settings = arith(), {"lr": 1e-3, "weight_decay": 0.01, "grad_clip": 1.0}
    engine = wb.engines.local(tiny, device="cpu", micro_batch_tokens=budget, **settings)
    pipe = wb.recipes.sft(engine, **SETTINGS)
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.999), weight_decay=0.01)
    for step in range(1, 5):
        batch = rows.batch(8, step=step)
        found = wb.Stepper(pipe, batch).run().trace.metrics
        pairs = [(chat, extra["answer"]) for chat, extra in zip(batch["raw_prompt"], batch["extra_info"], strict=True)]
        ids, labels = [], []
        for chat, answer in pairs:
            asked = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
            start = tokenizer(asked, add_special_tokens=False)["input_ids"]
            end = tokenizer(answer + tokenizer.eos_token, add_special_tokens=False)["input_ids"]
            ids.append(torch.tensor(start + end))
            labels.append(torch.tensor([-100] * len(start) + end))
        pad = torch.nn.utils.rnn.pad_sequence
        given = pad(ids, batch_first=True, padding_value=0)
        mask = pad([torch.ones_like(one) for one in ids], batch_first=True)
        loss = model(given, attention_mask=mask, labels=pad(labels, batch_first=True, padding_value=-100)).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        assert found["actor/loss"] == pytest.approx(loss.item(), rel=1e-4)
        assert found["actor/nll"] == pytest.approx(loss.item(), rel=1e-4)
        assert found["actor/grad_norm"] == pytest.approx(norm.item(), rel=1e-3)
    mine, theirs = engine.snapshot()["weights"], model.state_dict()
    # Adam divides by the root of tiny squares at first: rounding may move such a weight by a part of its four steps
    assert all((mine[name] - theirs[name]).abs().max() < 4e-4 for name in theirs)
    far = sum(float((mine[name] - theirs[name]).square().sum()) for name in theirs) ** 0.5
    start = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32).state_dict()
    moved = sum(float((start[name] - theirs[name]).square().sum()) for name in theirs) ** 0.5
    assert far < 1e-2 * moved


def test_it_trains_and_any_step_can_be_had_again(tiny: str, tmp_path: Path) -> None:
    engine = wb.engines.local(tiny, device="cpu", lr=1e-3)
    pipe, held = wb.recipes.sft(engine, **SETTINGS), wb.rows("data/arith/test.parquet", limit=16)
    how = {"batch_size": 8, "trackers": (), "trace_freq": 1, "eval_rows": held}
    run = wb.train_blocking(pipe, arith(), steps=2, run=tmp_path / "r", **how)
    wanted = engine.snapshot()["weights"]
    found = run.engine(2).snapshot()["weights"]
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)
    audit = run.audit()
    assert audit.agrees and not audit.unaudited, audit
    again = run.stepper(step=2).run()
    assert again.trace.metrics["actor/nll"] == run.metrics["actor/nll"][2]
    held_out = run.metrics["val/nll"].dropna()
    assert held_out.iloc[-1] < held_out.iloc[0]  # and it is the loss of those rows at these weights
    batch = Targets(engine, **SETTINGS)(next(held.in_order(16))).batch
    scores, mask = engine.compute_log_probs(batch)["log_probs"], batch["response_mask"]
    assert held_out.iloc[-1] == pytest.approx(-(scores * mask).sum().item() / mask.sum().item(), rel=1e-5)
    assert AutoModelForCausalLM.from_pretrained(run.checkpoint() / "actor").num_parameters() > 0
    with pytest.raises(DataError, match="too long"):
        wb.train_blocking(wb.recipes.sft(engine, target="extra_info.answer", max_tokens=8), arith(), steps=1, run=tmp_path / "s", **how)  # fmt: skip
    assert not (tmp_path / "s").exists()
