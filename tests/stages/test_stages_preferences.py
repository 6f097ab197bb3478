"""Preference losses: by hand, beside TRL 1.16 live, and their recipes stepped, trained, replayed and audited."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import workbench as wb
from tests.support.trl import trl_module
from workbench.base.errors import DataError, PipelineError, SettingError
from workbench.engines.protocol import LossCounts
from workbench.functional.preferences import PREFERENCE_LOSSES
from workbench.rewards import Reward
from workbench.stages import AnswerPairs, BestAndWorst, Preference
from workbench.testing.stages import StageContract, a_batch

TRLS = ["sigmoid", "hinge", "ipo", "robust", "exo_pair", "nca_pair", "sppo_hard", "apo_zero", "apo_down"]


def varied(response: str) -> float:
    return (sum(map(ord, response)) % 5) / 4


def pairs(number: int = 16) -> Any:
    rows = wb.rows("data/arith/train.parquet", max_prompt_length=256, limit=number)
    batch = next(rows.in_order(number))
    texts, chats = [one["answer"] for one in batch["extra_info"]], list(batch["raw_prompt"])
    return wb.rows(
        [
            {"prompt": chat, "chosen": text, "rejected": text[: 9 + at % 5] + " 7"}
            for at, (chat, text) in enumerate(zip(chats, texts, strict=True))
        ]
    )


@pytest.fixture
def engine(tiny: str) -> Any:
    return wb.engines.local(tiny, device="cpu", lr=1e-3, self_check=False)


class TestBestAndWorst(StageContract):
    make_stage = staticmethod(BestAndWorst)
    make_batch = staticmethod(a_batch)


class TestAnswerPairs(StageContract):
    @pytest.fixture(autouse=True)
    def model(self, engine: Any) -> None:
        self.engine = engine

    def make_stage(self) -> Any:
        return AnswerPairs(self.engine, max_tokens=64)

    def make_batch(self) -> wb.DataProto:
        return pairs(4).batch(4)


def test_numbers_by_hand() -> None:
    """Equal to the reference all margins are 0: DPO ln 2, IPO (1/2β)², hinge 1, APO 1, KTO ½. β·(c − r) = 1: ln(1 + e⁻¹)."""
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    held = wb.DataProto(
        {
            "response_mask": mask,
            "ref_log_prob": torch.zeros(2, 3),
            "pair_margin": torch.zeros(2),
            "kto_kl": torch.zeros(2),
        }
    )
    wanted = {"sigmoid": math.log(2), "hinge": 1.0, "ipo": 1.0, "apo_zero": 1.0, "apo_down": 1.0, "kto": 0.5}
    for name, value in wanted.items():
        found = Preference(loss_type=name, beta=0.5)({"log_probs": torch.zeros(2, 3)}, held, LossCounts(3, 2))
        assert found.loss.item() == pytest.approx(value), name
    moved = torch.tensor([[-0.5, -0.5, 9.0], [-3.0, 9.0, 9.0]])
    found = Preference(beta=0.5)({"log_probs": moved}, held, LossCounts(3, 2))
    assert found.loss.item() == pytest.approx(math.log(1 + math.exp(-1)))
    plain = {name: one.result() for name, one in found.metrics.items()}
    assert plain == pytest.approx(
        {
            "rewards/chosen": -0.5,
            "rewards/rejected": -1.5,
            "rewards/margins": 1.0,
            "rewards/accuracies": 1.0,
            "logps/chosen": -1.0,
            "logps/rejected": -3.0,
        }
    )
    empty = held.with_columns({"response_mask": mask * torch.tensor([[1], [0]])})
    assert Preference()({"log_probs": moved}, empty, LossCounts(2, 1)).loss == 0


def ragged(number: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probs, the reference's, and masks with holes: rows 2i and 2i + 1 are a pair."""
    generator = torch.Generator().manual_seed(number)
    b, t = 2 * (1 + number % 4), 3 + number % 6
    mask = (torch.rand(b, t, generator=generator) < 0.7).long()
    mask[:, 0] = 1
    logs = [-3 * torch.rand(b, t, generator=generator) * mask for _ in range(2)]
    return logs[0], logs[1], mask


def ours(logs: torch.Tensor, ref: torch.Tensor, mask: torch.Tensor, **settings: Any) -> tuple[float, torch.Tensor, Any]:
    logs = logs.clone().requires_grad_()
    held = wb.DataProto(
        {
            "response_mask": mask,
            "ref_log_prob": ref,
            "pair_margin": torch.zeros(len(mask)),
            "kto_kl": torch.full((len(mask),), 0.3),
        }
    )
    found = Preference(**settings)({"log_probs": logs}, held, LossCounts(float(mask.sum()), float(len(mask))))
    found.loss.backward()
    return found.loss.item(), logs.grad, found.metrics


@pytest.mark.parametrize("name", TRLS)
def test_loss_and_gradient_are_trls(name: str) -> None:
    """Twenty random ragged batches with holes through TRL's own `_compute_loss`, to 1e-5 in float32."""
    trainer = trl_module("trl.trainer.dpo_trainer").DPOTrainer
    for number in range(20):
        logs, ref, mask = ragged(number)
        order = torch.cat([torch.arange(0, len(mask), 2), torch.arange(1, len(mask), 2)])
        leaf = logs.clone().requires_grad_()
        wide = lambda one: torch.nn.functional.pad(one[order], (1, 0))  # noqa: B023, E731 - the first token has no label
        nothing = torch.zeros_like(wide(logs))[:, 1:]

        def model(**_: Any) -> Any:
            return SimpleNamespace(log_probs=leaf[order], entropy=nothing, mean_logits=nothing, is_top1=nothing.bool())  # noqa: B023

        epsilon = {"robust": 0.1, "exo_pair": 0.2}.get(name, 0.0)
        own = SimpleNamespace(
            accelerator=SimpleNamespace(device="cpu", gather_for_metrics=lambda x: x, gather=lambda x: x),
            model=SimpleNamespace(training=True), aux_loss_enabled=False, ld_alpha=None, precompute_ref_logps=True, f_divergence_type="reverse_kl", beta=0.2,
            loss_types=[name], loss_weights=[1.0], label_smoothing=epsilon, use_weighting=False,
            _metrics={"train": __import__("collections").defaultdict(list)}, _total_train_tokens=0, _tp_size=1,
        )  # fmt: skip
        sums = (ref * mask)[order].sum(1).chunk(2)
        inputs = {"input_ids": wide(mask), "attention_mask": torch.ones_like(wide(mask)), "completion_mask": wide(mask)}
        wanted = trainer._compute_loss(
            own, model, {**inputs, "ref_chosen_logps": sums[0], "ref_rejected_logps": sums[1]}, False
        )
        wanted.backward()
        value, gradient, metrics = ours(logs, ref, mask, loss_type=name, beta=0.2, label_smoothing=epsilon)
        assert value == pytest.approx(wanted.item(), rel=1e-5, abs=1e-6)
        assert torch.allclose(gradient, leaf.grad * mask, atol=1e-5)
        for metric in (
            "rewards/chosen",
            "rewards/rejected",
            "rewards/margins",
            "rewards/accuracies",
            "logps/chosen",
            "logps/rejected",
        ):
            assert metrics[metric].result() == pytest.approx(own._metrics["train"][metric][-1], rel=1e-4, abs=1e-5)


def test_simpo_is_trls() -> None:
    theirs = trl_module("trl.experimental.cpo.cpo_trainer").CPOTrainer
    own = SimpleNamespace(
        loss_type="simpo",
        alpha=0.0,
        beta=0.2,
        simpo_gamma=0.5,
        label_smoothing=0.0,
        accelerator=SimpleNamespace(device="cpu"),
    )
    for number in range(20):
        logs, _, mask = ragged(number)
        leaf = logs.clone().requires_grad_()
        mean = (leaf * mask).sum(-1) / mask.sum(-1)
        wanted = theirs.cpo_loss(own, mean[::2], mean[1::2])[0].mean()
        wanted.backward()
        value, gradient, _ = ours(logs, torch.zeros_like(logs), mask, loss_type="simpo", beta=0.2)
        assert value == pytest.approx(wanted.item(), rel=1e-5)
        assert torch.allclose(gradient, leaf.grad, atol=1e-5)


def test_kto_by_its_formula() -> None:
    """Eq. 7 with z₀ = 0.3, the mean over both answers of each pair."""
    logs, ref, mask = ragged(3)
    deltas = ((logs - ref) * mask).sum(-1)
    wanted = torch.cat(
        [1 - torch.sigmoid(0.2 * (deltas[::2] - 0.3)), 1 - torch.sigmoid(0.2 * (0.3 - deltas[1::2]))]
    ).mean()
    assert ours(logs, ref, mask, loss_type="kto", beta=0.2)[0] == pytest.approx(wanted.item(), rel=1e-5)


@pytest.mark.parametrize("loss", ["sigmoid", "simpo", "kto", "online"])
def test_it_steps_looks_ahead_trains_replays_and_is_audited(engine: Any, loss: str, tmp_path: Path) -> None:
    rows = pairs()
    pipe = (
        wb.recipes.dpo(engine, loss=loss, max_tokens=64)
        if loss != "online"
        else wb.recipes.online_dpo(engine, Reward(varied, in_process=True), group_size=3, max_tokens=12)
    )
    s = wb.Stepper(pipe, rows.batch(4)).run(until=pipe.names[-2])
    ahead = s.what_if(beta=0.5, updates=2)
    assert len(s.batch) == 8 and ahead.other.moved_norm > 0 and "mean ratio afterwards" in repr(ahead)
    other = s.fork().replace("update_actor", beta=0.5).run().trace.metrics
    first = s.run().trace.metrics
    if loss in ("sigmoid", "online"):  # at the reference's weights the gradient is proportional to β
        assert other["actor/grad_norm"] == pytest.approx(5 * first["actor/grad_norm"], rel=1e-3)
    assert other["actor/grad_norm"] != first["actor/grad_norm"]
    assert first["actor/grad_norm"] > 0 and first["rewards/margins"] == pytest.approx(
        0.0, abs=1e-3 if loss != "simpo" else 99
    )
    again = s.back(to=pipe.names[0]).run().trace.metrics
    assert all(again[name] == one for name, one in first.items() if not name.startswith("timing"))
    run = wb.train_blocking(pipe, rows, steps=2, batch_size=4, run=tmp_path / "r", trackers=(), trace_freq=1)
    wanted = engine.snapshot()["weights"]
    found = run.engine(2).snapshot()["weights"]
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)
    audit = run.audit()
    assert audit.agrees and not audit.unaudited, audit
    assert run.stepper(step=2).run().trace.metrics["rewards/margins"] == run.metrics["rewards/margins"][2]


def test_micro_batches_keep_pairs_and_margins_grow(tiny: str) -> None:
    found = []
    for budget in (None, 128):
        engine = wb.engines.local(tiny, device="cpu", lr=1e-3, self_check=False, micro_batch_tokens=budget)
        pipe = wb.recipes.dpo(engine, max_tokens=64)
        found.append([wb.Stepper(pipe, pairs().batch(8)).run().trace.metrics for _ in range(4)])
    for one, two in zip(*found, strict=True):
        assert one["actor/loss"] == pytest.approx(two["actor/loss"], rel=1e-3)
    assert found[0][-1]["rewards/margins"] > found[0][0]["rewards/margins"] + 0.1
    assert found[0][-1]["rewards/accuracies"] == 1.0


def test_held_out_pairs_are_measured(engine: Any, tmp_path: Path) -> None:
    run = wb.train_blocking(
        wb.recipes.dpo(engine, max_tokens=64),
        pairs(),
        steps=2,
        batch_size=4,
        run=tmp_path / "r",
        trackers=(),
        eval_rows=pairs(8),
    )
    assert run.metrics["val/margins"].dropna().iloc[-1] > run.metrics["val/margins"].dropna().iloc[0]


def test_what_is_no_pair_is_refused_by_name(engine: Any) -> None:
    rows = wb.rows(
        [{"prompt": "1", "chosen": "one", "rejected": "one"}, {"prompt": "1", "chosen": "one", "rejected": ""}]
    )
    with pytest.raises(DataError, match="chosen and rejected of row 0; expected two answers; found equal"):
        AnswerPairs(engine).check_rows(rows.views())
    with pytest.raises(DataError, match="column 'rejected' of row 0; expected a non-empty text"):
        AnswerPairs(engine).check_rows(rows[1:].views())
    with pytest.raises(DataError, match="found equal"):
        AnswerPairs(engine)(next(rows[:1].in_order(1)))
    with pytest.raises(SettingError, match="did you mean 'sigmoid'"):
        wb.recipes.dpo(engine, loss="sigmoidal")
    with pytest.raises(SettingError, match="beta"):
        wb.recipes.dpo(engine, beta=0.0)
    with pytest.raises(SettingError, match="group_size"):
        wb.recipes.online_dpo(engine, varied, group_size=1)
    one = wb.Stepper(wb.recipes.dpo(engine, loss="kto", max_tokens=64), pairs().batch(1))
    with pytest.raises(PipelineError, match="pairs for KTO's KL; expected two or more"):
        one.run()
    assert set(TRLS) < set(PREFERENCE_LOSSES)
