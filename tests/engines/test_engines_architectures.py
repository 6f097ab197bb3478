"""Models of many architectures, opened from a folder: every number is the one of the model's own forward."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests_architectures import ARCHITECTURES, TELLING, make

from workbench.dataproto import DataProto
from workbench.engines import Request, SamplingSettings, local
from workbench.stages.rollout import columns_of
from workbench.testing.engines import EngineContract, LikelihoodLoss

PROMPTS = ((5, 9, 7, 30, 31, 32, 33, 34, 8), (6, 8, 41))
"""One longer than any window, one shorter."""


def plain(folder: Path) -> Any:
    """The model as transformers opens it."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def logits_of(model: Any, ids: Any) -> torch.Tensor:
    """[s, V] logits of one row, without padding and cache."""
    found: torch.Tensor = model(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0].float()
    return found


def scored(model: Any, batch: DataProto) -> torch.Tensor:
    """[B, T] log-probs of the response tokens, row by row."""
    mask, rows = batch["response_mask"], []
    for ids, seen, own in zip(batch["input_ids"], batch["attention_mask"].bool(), mask, strict=True):
        kept, count = ids[seen], int(own.sum())
        log_probs = torch.log_softmax(logits_of(model, kept.tolist())[-count - 1 : -1], -1)
        row = log_probs.gather(-1, kept[-count:, None])[:, 0]
        rows.append(torch.nn.functional.pad(row, (0, mask.shape[1] - count)))
    return torch.stack(rows)


def sampled(engine: Any, temperature: float = 1.0) -> DataProto:
    """Rows of different lengths that the engine samples, two for each prompt."""
    requests = [
        Request(
            prompt, SamplingSettings(max_tokens=3 + 2 * number + place, temperature=temperature, ignore_eos=True), seed
        )
        for place, prompt in enumerate(PROMPTS)
        for number, seed in enumerate((1, 2))
    ]
    return DataProto.from_single_dict(columns_of([one.ids for one in requests], engine.sample_many(requests), 0))


def close(found: torch.Tensor, expected: torch.Tensor, share: float = 1e-4) -> bool:
    """Whether tensors differ by at most a share of the larger one's spread."""
    return float((found - expected).abs().max()) <= share * max(float(expected.std()), 1e-3)


def by_speed() -> list[Any]:
    """Names of architectures; all but the most telling are left out of the quick loop."""
    return [pytest.param(name, marks=[] if name in TELLING else pytest.mark.slow) for name in ARCHITECTURES]


@pytest.fixture(params=by_speed())
def name(request: pytest.FixtureRequest) -> str:
    """Name of an architecture."""
    return str(request.param)


def test_every_number_is_the_models_own(name: str, tmp_path: Path) -> None:
    model = plain(make(name, tmp_path / "model"))
    engine = local(tmp_path / "model", device="cpu", lr=1e-2)
    greedy = sampled(engine, temperature=0.0)
    with torch.no_grad():
        for ids, seen, own in zip(
            greedy["input_ids"], greedy["attention_mask"].bool(), greedy["response_mask"], strict=True
        ):
            row = ids[seen].tolist()
            start = len(row) - int(own.sum())
            for end in range(start, len(row)):
                assert row[end] == int(logits_of(model, row[:end])[-1].argmax())
        batch = sampled(engine)
        expected = scored(model, batch)
    assert close(batch["rollout_log_probs"], expected), "sampled log-probs"
    assert close(engine.compute_log_probs(batch)["log_probs"], expected), "scored log-probs"

    counts = EngineContract.counts(batch)
    loss = -scored(model, batch).sum() / counts.tokens
    loss.backward()
    own = {key: one.grad for key, one in model.named_parameters() if one.grad is not None}
    found = engine.gradient(batch, LikelihoodLoss(), counts)
    assert {key for key, one in own.items() if one.any()} <= found.keys()
    scale = max(float(one.norm()) for one in own.values())
    for key, one in found.items():
        assert float((one - own.get(key, 0 * one)).norm()) <= 2e-4 * scale, key


def test_it_learns_is_saved_and_goes_on(name: str, tmp_path: Path) -> None:
    engine = local(make(name, tmp_path / "model"), device="cpu", lr=1e-2)
    batch = sampled(engine)
    counts = EngineContract.counts(batch)
    before = engine.compute_log_probs(batch)["log_probs"]
    assert engine.learn(batch, LikelihoodLoss(), counts).metrics["grad_norm"].result() > 0
    after = engine.compute_log_probs(batch)["log_probs"]
    assert after.isfinite().all() and after.sum() > before.sum()
    engine.save(tmp_path / "actor")
    engine.save_state(tmp_path / "state")
    with torch.no_grad():
        assert close(scored(plain(tmp_path / "actor"), batch), after), "opened by transformers"
    again = local(tmp_path / "model", device="cpu", lr=1e-2)
    again.load_state(tmp_path / "actor", tmp_path / "state")
    assert torch.equal(again.compute_log_probs(batch)["log_probs"], after), "resumed"
    for one in (engine, again):
        one.learn(batch, LikelihoodLoss(), counts)
    assert EngineContract().same_weights(engine, again)
