"""The contract of an engine as tests: inherit `EngineContract`, give `make_engine`, and pytest does the rest."""

from __future__ import annotations

import asyncio
import dataclasses
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from workbench import background
from workbench.dataproto import DataProto
from workbench.engines import LossOutput, Normalisers, Request, SamplingSettings
from workbench.errors import Interrupted, NonFinite
from workbench.functional import masked_sum
from workbench.stages.rollout import columns_of

CHAT = ((1, 5, 9, 7), (1, 8, 3), (1, 5, 9, 7, 11, 2))
"""Three prompts of different lengths, ids that any vocabulary has."""


@dataclasses.dataclass(frozen=True)
class LikelihoodLoss:
    """−Σ log p / tokens, the simplest loss there is; `poison` makes one row's NaN."""

    want: tuple[str, ...] = ("log_probs",)
    poison: int | None = None

    def __call__(self, outputs: Mapping[str, torch.Tensor], rows: DataProto, normalisers: Normalisers) -> LossOutput:
        """One micro-batch."""
        log_probs = outputs[self.want[0]]
        weights = rows["weight"][:, None] if "weight" in rows else 1.0
        loss = -masked_sum(log_probs * weights, rows["response_mask"]) / normalisers.tokens
        if self.poison is not None and bool((rows["row"] == self.poison).any()):
            loss = loss * float("nan")
        return LossOutput(loss, {}, {"seen": log_probs.detach()})


class EngineContract:
    """What every engine that samples, scores and learns must do. Override `make_engine`."""

    def make_engine(self, **settings: Any) -> Any:
        """A fresh engine with the same weights each time; `settings` as `LocalSettings`'."""
        raise NotImplementedError

    # --- helpers ----------------------------------------------------------------------------

    @staticmethod
    def requests(count: int = 2, **settings: Any) -> list[Request]:
        """`count` requests for each prompt."""
        chosen = SamplingSettings(**{"max_tokens": 12, **settings})
        return [Request(ids, chosen, 100 * p + n) for p, ids in enumerate(CHAT) for n in range(count)]

    def batch(self, engine: Any, count: int = 2) -> DataProto:
        """Sampled rows as a batch."""
        requests = self.requests(count)
        samples = engine.sample_many(requests)
        columns = columns_of([request.ids for request in requests], samples, 0)
        rows = torch.arange(len(samples))
        return DataProto.from_single_dict({**columns, "row": rows, "weight": torch.linspace(-1, 1, len(rows))})

    @staticmethod
    def counts(batch: DataProto) -> Normalisers:
        """Normalisers of a whole batch."""
        return Normalisers(float(batch["response_mask"].sum()), float(len(batch)))

    @staticmethod
    def weights(engine: Any) -> dict[str, torch.Tensor]:
        """All weights, by name."""
        return engine.snapshot()["weights"]

    def same_weights(self, a: Any, b: Any) -> bool:
        """Bit for bit."""
        x, y = self.weights(a), self.weights(b)
        return all(torch.equal(x[name], y[name]) for name in x)

    # --- sampling ---------------------------------------------------------------------------

    def test_same_seed_same_tokens_whoever_shares_the_wave(self) -> None:
        """Tokens depend on prompt and seed alone."""
        engine = self.make_engine()
        together = engine.sample_many(self.requests())
        alone = [engine.sample_many([request])[0] for request in self.requests()]
        assert [sample.ids for sample in together] == [sample.ids for sample in alone]
        backwards = engine.sample_many(self.requests()[::-1])[::-1]
        assert [sample.ids for sample in together] == [sample.ids for sample in backwards]
        other = engine.sample_many([dataclasses.replace(request, seed=7) for request in self.requests()])
        assert [sample.ids for sample in together] != [sample.ids for sample in other]

    def test_small_waves_change_nothing(self) -> None:
        """`max_wave` is memory only."""
        a = self.make_engine().sample_many(self.requests())
        b = self.make_engine(max_wave=2).sample_many(self.requests())
        assert [sample.ids for sample in a] == [sample.ids for sample in b]

    def test_limits_and_reasons(self) -> None:
        """`length` after max_tokens; greedy twice is the same; top_k=1 is greedy."""
        engine = self.make_engine()
        cut = engine.sample_many(self.requests(max_tokens=3, ignore_eos=True))
        assert all(len(sample.ids) == 3 and sample.finish_reason == "length" for sample in cut)
        greedy = engine.sample_many(self.requests(temperature=0.0))
        one = engine.sample_many(self.requests(top_k=1))
        nucleus = engine.sample_many(self.requests(top_p=1e-9))
        assert [s.ids for s in greedy] == [s.ids for s in one] == [s.ids for s in nucleus]
        assert all(sample.version == engine.version for sample in greedy)

    def test_any_event_loop_may_ask(self) -> None:
        """A caller's own loop gets the same samples."""
        engine = self.make_engine()

        async def ask() -> list[Any]:
            return list(await asyncio.gather(*(engine.sample(request) for request in self.requests())))

        here = engine.sample_many(self.requests())
        assert [sample.ids for sample in asyncio.run(ask())] == [sample.ids for sample in here]

    def test_records_travel(self) -> None:
        """Requests and samples pickle."""
        request = self.requests()[0]
        sample = self.make_engine().sample_many([request])[0]
        assert pickle.loads(pickle.dumps((request, sample))) == (request, sample)  # noqa: S301 - our own bytes

    def test_an_interrupt_stops_sampling(self) -> None:
        """Between decode steps."""
        engine = self.make_engine()
        with background.interrupting(), pytest.raises(Interrupted):
            engine.sample_many(self.requests())
        assert len(engine.sample_many(self.requests())) == 6

    # --- scoring ----------------------------------------------------------------------------

    def test_scores_agree_with_the_sampler(self) -> None:
        """The same tokens get the same log-probs, 0 outside the mask, entropy between 0 and log V."""
        engine = self.make_engine()
        batch = self.batch(engine)
        scores = engine.score(batch, ("log_probs", "entropy"))
        torch.testing.assert_close(scores["log_probs"], batch["rollout_log_probs"], atol=2e-5, rtol=0)
        outside = batch["response_mask"] == 0
        assert (scores["log_probs"][outside] == 0).all() and (scores["entropy"] >= 0).all()

    def test_temperature_scales_the_logits(self) -> None:
        """Sampled at 0.5, scored at 0.5: equal; at 1: not."""
        engine = self.make_engine()
        requests = self.requests(temperature=0.5)
        columns = columns_of([r.ids for r in requests], engine.sample_many(requests), 0)
        batch = DataProto.from_single_dict(columns)
        half = engine.score(batch, temperature=0.5)["log_probs"]
        torch.testing.assert_close(half, batch["rollout_log_probs"], atol=2e-5, rtol=0)
        assert not torch.allclose(engine.score(batch)["log_probs"], half, atol=1e-3)

    def test_scoring_does_not_depend_on_the_cut(self) -> None:
        """Micro-batches and packing are memory only."""
        batch = self.batch(self.make_engine())
        whole = self.make_engine().score(batch)["log_probs"]
        for settings in ({"micro_batch_tokens": 1}, {"micro_batch_tokens": 40}, {"pack": "yes"}):
            part = self.make_engine(**settings).score(batch)["log_probs"]
            torch.testing.assert_close(part, whole, atol=1e-5, rtol=0)

    # --- learning ---------------------------------------------------------------------------

    def test_loss_and_gradient_do_not_depend_on_the_cut(self) -> None:
        """Global normalisers make micro-batches add up."""
        batch = self.batch(self.make_engine())
        results = []
        for settings in ({}, {"micro_batch_tokens": 1}, {"micro_batch_tokens": 40}, {"pack": "yes"}):
            engine = self.make_engine(**settings)
            found = engine.probe(batch, LikelihoodLoss(), self.counts(batch))
            results.append((found.metrics["loss"].result(), found.metrics["grad_norm"].result()))
        for loss, norm in results[1:]:
            assert loss == pytest.approx(results[0][0], abs=1e-5)
            assert norm == pytest.approx(results[0][1], rel=1e-4)

    def test_learning_changes_weights_and_state_but_a_probe_does_not(self) -> None:
        """And columns come back in row order."""
        engine, twin = self.make_engine(lr=1e-3), self.make_engine(lr=1e-3)
        batch = self.batch(engine)
        before = engine.state_id
        probed = engine.probe(batch, LikelihoodLoss(), self.counts(batch), per_row=True)
        assert engine.state_id == before and self.same_weights(engine, twin)
        assert probed.columns["row_grad_norm"].shape == (len(batch),)
        learned = engine.learn(batch, LikelihoodLoss(), self.counts(batch))
        assert engine.state_id != before and not self.same_weights(engine, twin)
        torch.testing.assert_close(learned.columns["seen"], batch["rollout_log_probs"], atol=2e-5, rtol=0)
        assert engine.version == 0 and engine.commit() == 1 == engine.version

    def test_snapshot_and_restore_are_exact(self) -> None:
        """Weights, optimizer and version: learning on from a restored snapshot repeats itself."""
        engine = self.make_engine(lr=1e-3)
        batch = self.batch(engine)
        engine.learn(batch, LikelihoodLoss(), self.counts(batch))
        kept = engine.snapshot()
        engine.learn(batch, LikelihoodLoss(), self.counts(batch))
        first = self.weights(engine)
        engine.restore(kept)
        assert engine.state_id == kept["state_id"]
        engine.learn(batch, LikelihoodLoss(), self.counts(batch))
        again = self.weights(engine)
        assert all(torch.equal(first[name], again[name]) for name in first)

    def test_save_and_load_are_exact(self, tmp_path: Path) -> None:
        """Learn twice = learn, save, load into a fresh engine, learn."""
        engine = self.make_engine(lr=1e-3)
        batch = self.batch(engine)
        engine.learn(batch, LikelihoodLoss(), self.counts(batch))
        engine.commit()
        engine.save(tmp_path / "model")
        engine.save_state(tmp_path / "state")
        assert not [path for path in tmp_path.rglob("*") if path.suffix in (".pt", ".bin", ".pkl")]
        other = self.make_engine(lr=1e-3)
        other.load_state(tmp_path / "model", tmp_path / "state")
        assert other.version == 1 and self.same_weights(engine, other)
        for one in (engine, other):
            one.learn(batch, LikelihoodLoss(), self.counts(batch))
        assert self.same_weights(engine, other)

    def test_a_loss_that_is_not_finite_changes_nothing(self) -> None:
        """And names its rows."""
        engine, twin = self.make_engine(micro_batch_tokens=1), self.make_engine()
        batch = self.batch(engine)
        with pytest.raises(NonFinite, match=r"rows \[3\]"):
            engine.learn(batch, LikelihoodLoss(poison=3), self.counts(batch))
        assert self.same_weights(engine, twin)
        engine.learn(batch, LikelihoodLoss(), self.counts(batch))

    def test_a_reference_stays_where_it_was(self) -> None:
        """Frozen weights, behind `score` alone."""
        engine = self.make_engine(lr=1e-2)
        batch = self.batch(engine)
        reference = engine.reference()
        before = reference.score(batch)["log_probs"]
        engine.learn(batch, LikelihoodLoss(), self.counts(batch))
        assert torch.equal(reference.score(batch)["log_probs"], before)
        assert not torch.equal(engine.score(batch)["log_probs"], before)
        assert not hasattr(reference, "learn")

    def test_a_critic_learns_values_of_its_own(self) -> None:
        """Values start at 0 and move; the policy does not."""
        engine = self.make_engine()
        batch = self.batch(engine)
        critic = engine.critic(lr=1e-2)
        assert (critic.score(batch, ("values",))["values"] == 0).all()
        before = self.weights(engine)
        for _ in range(3):
            critic.learn(batch, LikelihoodLoss(want=("values",)), self.counts(batch))
        assert (critic.score(batch, ("values",))["values"].abs().sum()) > 0
        assert all(torch.equal(before[name], tensor) for name, tensor in self.weights(engine).items())
