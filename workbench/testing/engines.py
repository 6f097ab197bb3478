"""Tests that every engine must pass: inherit `EngineContract` and give `make_engine`::

    class TestMyEngine(EngineContract):
        def make_engine(self, **settings):
            return MyEngine("path/to/model", **settings)

A failing assertion says what is wrong.
"""

from __future__ import annotations

import asyncio
import dataclasses
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from workbench.base import runtime
from workbench.base.errors import Interrupted, NonFinite
from workbench.dataproto.core import DataProto
from workbench.engines.protocol import LossCounts, LossOutput, Request, SamplingSettings
from workbench.functional.masking import masked_sum
from workbench.stages.rollout import columns_of

CHAT = ((1, 5, 9, 7), (1, 8, 3), (1, 5, 9, 7, 11, 2))
"""Three prompts of different lengths, ids that any vocabulary has."""


@dataclasses.dataclass(frozen=True)
class LikelihoodLoss:
    """A loss for tests of engines: −Σ log p / tokens of the mini-batch; NaN if the row numbered `poison` is in it."""

    want: tuple[str, ...] = ("log_probs",)
    poison: int | None = None

    def __call__(self, outputs: Mapping[str, torch.Tensor], rows: DataProto, loss_counts: LossCounts) -> LossOutput:
        """Compute the loss of one micro-batch, and return its log-probs [B, T] as the column `seen`."""
        log_probs = outputs[self.want[0]]
        weights = rows["weight"][:, None] if "weight" in rows else 1.0
        loss = -masked_sum(log_probs * weights, rows["response_mask"]) / loss_counts.tokens
        if self.poison is not None and bool((rows["row"] == self.poison).any()):
            loss = loss * float("nan")
        return LossOutput(loss, {}, {"seen": log_probs.detach()})


class EngineContract:
    """Pytest tests of an engine that samples, scores and learns: inherit this class and override `make_engine`."""

    rounding = 1.0
    """Times by which log-probs may differ more than in float32: 100 for an engine that computes in float16."""

    def make_engine(self, **settings: Any) -> Any:
        """Return a new engine, with equal weights each time; `settings` are those of `LocalSettings`."""
        raise NotImplementedError("override make_engine: return a new engine, with the same weights each time")

    # --- helpers ----------------------------------------------------------------------------

    @staticmethod
    def requests(count: int = 2, **settings: Any) -> list[Request]:
        """Make requests for the three prompts of `CHAT`, `count` for each; `settings` are those of `SamplingSettings`."""
        chosen = SamplingSettings(**{"max_tokens": 12, **settings})
        return [Request(ids, chosen, 100 * p + n) for p, ids in enumerate(CHAT) for n in range(count)]

    @staticmethod
    def tokens(engine: Any, requests: list[Request]) -> list[tuple[int, ...]]:
        """Sample these requests, and return the token ids of each."""
        return [sample.ids for sample in engine.sample_many(requests)]

    def batch(self, engine: Any, count: int = 2, **settings: Any) -> DataProto:
        """Sample `requests(count)` and make a batch of them; the column `row` numbers the rows, `weight` goes from −1
        to 1."""
        requests = self.requests(count, **settings)
        samples = engine.sample_many(requests)
        columns = columns_of([request.ids for request in requests], samples, 0)
        rows = torch.arange(len(samples))
        return DataProto.from_single_dict({**columns, "row": rows, "weight": torch.linspace(-1, 1, len(rows))})

    @staticmethod
    def counts(batch: DataProto) -> LossCounts:
        """Return the `LossCounts` of a whole batch: the numbers of its response tokens and rows."""
        return LossCounts(float(batch["response_mask"].sum()), float(len(batch)))

    @staticmethod
    def weights(engine: Any) -> dict[str, torch.Tensor]:
        """Return all weights of the engine, by parameter name."""
        return engine.snapshot()["weights"]

    def has_weights(self, engine: Any, weights: Mapping[str, torch.Tensor]) -> bool:
        """Return whether the engine's weights equal `weights`, bit for bit."""
        return all(torch.equal(weights[name], found) for name, found in self.weights(engine).items())

    def same_weights(self, a: Any, b: Any) -> bool:
        """Return whether two engines have equal weights, bit for bit."""
        return self.has_weights(a, self.weights(b))

    def learn(self, engine: Any, batch: DataProto) -> Any:
        """Take one optimizer step on the whole batch with `LikelihoodLoss`; return what the engine's `learn` returns."""
        return engine.learn(batch, LikelihoodLoss(), self.counts(batch))

    # --- sampling ---------------------------------------------------------------------------

    def test_same_seed_same_tokens_whoever_shares_the_wave(self) -> None:
        """Sampled tokens depend on a request's prompt and seed alone, not on the requests that are sampled with it."""
        engine, requests = self.make_engine(), self.requests()
        together = self.tokens(engine, requests)
        alone = [self.tokens(engine, [request])[0] for request in requests]
        assert together == alone, "tokens do not depend on who shares the wave"
        backwards = self.tokens(engine, requests[::-1])[::-1]
        assert together == backwards, "tokens do not depend on the order of requests"
        other = self.tokens(engine, [dataclasses.replace(request, seed=7) for request in requests])
        assert together != other, "another seed gives other tokens"

    def test_small_waves_change_nothing(self) -> None:
        """`max_wave`, the most rows that are sampled together, changes memory use and no sampled token."""
        whole, small = (self.tokens(self.make_engine(**more), self.requests()) for more in ({}, {"max_wave": 2}))
        assert whole == small, "max_wave changes no token"

    def test_limits_and_reasons(self) -> None:
        """Sampling ends after `max_tokens` with reason `length`; temperature 0, top_k=1 and top_p near 0 are greedy."""
        engine = self.make_engine()
        cut = engine.sample_many(self.requests(max_tokens=3, ignore_eos=True))
        found = {(len(sample.ids), sample.finish_reason) for sample in cut}
        assert found == {(3, "length")}, "max_tokens=3 gives 3 tokens and the reason 'length'"
        greedy: list[dict[str, Any]] = [{"temperature": 0.0}, {"top_k": 1}, {"top_p": 1e-9}]
        first, *others = (self.tokens(engine, self.requests(**settings)) for settings in greedy)
        assert others == [first, first], "temperature 0, top_k=1 and top_p near 0 are all greedy"
        assert {sample.version for sample in cut} == {engine.version}, "a sample has the version of the weights"

    def test_any_event_loop_may_ask(self) -> None:
        """Samples that are awaited in a caller's own event loop equal those of `sample_many`."""
        engine = self.make_engine()

        async def ask() -> list[Any]:
            return list(await asyncio.gather(*(engine.sample(request) for request in self.requests())))

        here, there = self.tokens(engine, self.requests()), [sample.ids for sample in asyncio.run(ask())]
        assert there == here, "a caller's own event loop gets the same samples"

    def test_records_travel(self) -> None:
        """Requests and samples can be pickled."""
        request = self.requests()[0]
        sample = self.make_engine().sample_many([request])[0]
        pickled = pickle.loads(pickle.dumps((request, sample)))  # noqa: S301 - our own bytes
        assert pickled == (request, sample), "requests and samples pickle"

    def test_an_interrupt_stops_sampling(self) -> None:
        """An interrupt stops sampling with `Interrupted`, and the engine samples again afterwards."""
        import pytest

        engine = self.make_engine()
        with runtime.interrupting(), pytest.raises(Interrupted):
            engine.sample_many(self.requests())
        assert len(engine.sample_many(self.requests())) == 6, "sampling goes on after an interrupt"

    # --- scoring ----------------------------------------------------------------------------

    def test_scores_agree_with_the_sampler(self) -> None:
        """Scoring gives the sampler's log-probs, 0 outside the response mask, and entropies of at least 0."""
        engine = self.make_engine()
        batch = self.batch(engine)
        scores = engine.compute_log_probs(batch, ("log_probs", "entropy"))
        torch.testing.assert_close(scores["log_probs"], batch["rollout_log_probs"], atol=2e-5 * self.rounding, rtol=0)
        outside = batch["response_mask"] == 0
        assert (scores["log_probs"][outside] == 0).all(), "log-probs are 0 outside the mask"
        assert (scores["entropy"] >= 0).all(), "entropies are at least 0"

    def test_temperature_scales_the_logits(self) -> None:
        """Tokens sampled at temperature 0.5 have equal log-probs when scored at 0.5, and different ones at 1."""
        engine = self.make_engine()
        batch = self.batch(engine, temperature=0.5)
        half = engine.compute_log_probs(batch, temperature=0.5)["log_probs"]
        torch.testing.assert_close(half, batch["rollout_log_probs"], atol=2e-5 * self.rounding, rtol=0)
        whole = engine.compute_log_probs(batch)["log_probs"]
        assert not torch.allclose(whole, half, atol=1e-3), "the temperature changes log-probs"

    def test_scoring_does_not_depend_on_the_cut(self) -> None:
        """Micro-batch size and packing change memory use and no log-prob."""
        batch = self.batch(self.make_engine())
        whole = self.make_engine().compute_log_probs(batch)["log_probs"]
        for settings in ({"micro_batch_tokens": 1}, {"micro_batch_tokens": 40}, {"pack": "yes"}):
            part = self.make_engine(**settings).compute_log_probs(batch)["log_probs"]
            torch.testing.assert_close(part, whole, atol=1e-5 * self.rounding, rtol=0)

    # --- learning ---------------------------------------------------------------------------

    def test_loss_and_gradient_do_not_depend_on_the_cut(self) -> None:
        """Micro-batch size and packing change neither loss nor gradient norm, because the loss divides by the counts of
        the whole batch."""
        import pytest

        batch = self.batch(self.make_engine())
        results = []
        for settings in ({}, {"micro_batch_tokens": 1}, {"micro_batch_tokens": 40}, {"pack": "yes"}):
            engine = self.make_engine(**settings)
            found = engine.probe(batch, LikelihoodLoss(), self.counts(batch))
            results.append((found.metrics["loss"].result(), found.metrics["grad_norm"].result()))
        for loss, norm in results[1:]:
            assert loss == pytest.approx(results[0][0], abs=1e-5), "the loss does not depend on how the batch is cut"
            assert norm == pytest.approx(results[0][1], rel=1e-4), "nor does the gradient depend on it"

    def test_learning_changes_weights_and_state_but_a_probe_does_not(self) -> None:
        """A probe changes nothing; learning changes weights and `state_id`, and returns the loss's columns in row
        order."""
        engine, twin = self.make_engine(lr=1e-3), self.make_engine(lr=1e-3)
        batch = self.batch(engine)
        before = engine.state_id
        probed = engine.probe(batch, LikelihoodLoss(), self.counts(batch), per_row=True)
        assert engine.state_id == before and self.same_weights(engine, twin), "a probe changes nothing"
        assert probed.columns["row_grad_norm"].shape == (len(batch),), "per_row=True gives one gradient norm a row"
        learned = self.learn(engine, batch)
        assert not self.same_weights(engine, twin), "learning gives other weights"
        assert engine.state_id != before, "learning gives another state_id"
        torch.testing.assert_close(
            learned.columns["seen"], batch["rollout_log_probs"], atol=2e-5 * self.rounding, rtol=0
        )
        assert engine.version == 0 and engine.commit() == 1 == engine.version, "each commit is one version more"

    def test_snapshot_and_restore_are_exact(self) -> None:
        """After a snapshot of weights and optimizer is restored, learning gives the same weights as before, bit for
        bit."""
        engine = self.make_engine(lr=1e-3)
        batch = self.batch(engine)
        self.learn(engine, batch)
        kept = engine.snapshot()
        self.learn(engine, batch)
        first = self.weights(engine)
        engine.restore(kept)
        assert engine.state_id == kept["state_id"], "restore brings back the state_id"
        self.learn(engine, batch)
        assert self.has_weights(engine, first), "learning on from a restored snapshot repeats itself bit for bit"

    def test_save_and_load_are_exact(self, tmp_path: Path) -> None:
        """After a save and a load into a fresh engine, learning gives the same weights as without them, bit for bit."""
        engine = self.make_engine(lr=1e-3)
        batch = self.batch(engine)
        self.learn(engine, batch)
        engine.commit()
        engine.save(tmp_path / "model")
        engine.save_state(tmp_path / "state")
        suffixes = {path.suffix for path in tmp_path.rglob("*")}
        assert not suffixes & {".pt", ".bin", ".pkl"}, "no pickled file is saved"
        other = self.make_engine(lr=1e-3)
        other.load_state(tmp_path / "model", tmp_path / "state")
        assert other.version == 1 and self.same_weights(engine, other), "load brings back weights and version"
        for one in (engine, other):
            self.learn(one, batch)
        assert self.same_weights(engine, other), "learning on after a load repeats itself bit for bit"

    def test_a_loss_that_is_not_finite_changes_nothing(self) -> None:
        """A loss of NaN raises `NonFinite` with the numbers of its rows, and changes no weight."""
        import pytest

        engine, twin = self.make_engine(micro_batch_tokens=1), self.make_engine()
        batch = self.batch(engine)
        with pytest.raises(NonFinite, match=r"rows \[3\]"):
            engine.learn(batch, LikelihoodLoss(poison=3), self.counts(batch))
        assert self.same_weights(engine, twin), "a loss that is not finite changes no weight"
        self.learn(engine, batch)

    def test_a_reference_stays_where_it_was(self) -> None:
        """A reference keeps its weights while the policy learns, and only computes log-probs."""
        engine = self.make_engine(lr=1e-2)
        batch = self.batch(engine)
        reference = engine.reference()
        before = reference.compute_log_probs(batch)["log_probs"]
        self.learn(engine, batch)
        after, policy = (one.compute_log_probs(batch)["log_probs"] for one in (reference, engine))
        assert torch.equal(after, before), "a reference is not updated with the policy"
        assert not torch.equal(policy, before), "the policy has been updated"
        assert not hasattr(reference, "learn"), "a reference cannot learn"

    def test_a_critic_learns_values_of_its_own(self) -> None:
        """A new critic's values are 0 and change as it learns; the policy's weights do not change."""
        engine = self.make_engine()
        batch = self.batch(engine)
        critic = engine.critic(lr=1e-2)
        assert (critic.compute_log_probs(batch, ("values",))["values"] == 0).all(), "a new critic's values are 0"
        before = self.weights(engine)
        for _ in range(3):
            critic.learn(batch, LikelihoodLoss(want=("values",)), self.counts(batch))
        assert (critic.compute_log_probs(batch, ("values",))["values"].abs().sum()) > 0, "a critic learns"
        assert self.has_weights(engine, before), "a critic changes nothing of the policy"
