"""Draws of tokens: those of a whole CDF in float64, and the sets that top-k and top-p keep."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from workbench.engines import SamplingSettings
from workbench.engines.local_engine.sampling import draw, keep_allowed

EDGE = 1e-5


def kept(weights: Tensor, chosen: SamplingSettings) -> Tensor:
    """The definition, by sorting: [n, V] with 0 for what is ruled out."""
    if 0 < chosen.top_k < weights.shape[-1]:
        smallest = weights.sort(-1, descending=True).values[:, chosen.top_k - 1, None]
        weights = weights.masked_fill(weights < smallest, 0)
    if chosen.top_p < 1:
        ordered, order = weights.double().sort(dim=-1, descending=True, stable=True)
        cumulative = ordered.cumsum(-1)
        beyond = cumulative - ordered >= chosen.top_p * cumulative[:, -1:]
        weights = weights.masked_fill(torch.zeros_like(beyond).scatter(-1, order, beyond), 0)
    return weights


def distances(logits: Tensor, uniforms: Tensor, chosen: SamplingSettings, tokens: Tensor) -> Tensor:
    """How far each draw lies outside its token's part of the whole CDF in float64; 0 inside."""
    weights = torch.softmax(logits.double() / chosen.temperature, -1)
    cumulative = kept(weights, chosen).cumsum(-1) / kept(weights, chosen).sum(-1, keepdim=True)
    end = cumulative.gather(-1, tokens[:, None]).squeeze(-1)
    begin = torch.where(tokens > 0, cumulative.gather(-1, (tokens[:, None] - 1).clamp(min=0)).squeeze(-1), 0)
    return torch.maximum(begin - uniforms, uniforms - end).clamp(min=0)


def test_top_p_and_top_k_by_hand() -> None:
    def left(**chosen: Any) -> list[float]:
        weights = torch.tensor([[0.5, 0.3, 0.15, 0.05]])
        keep_allowed(weights, SamplingSettings(**chosen))
        return weights[0].tolist()

    assert left(top_k=2) == left(top_p=0.7) == pytest.approx([0.5, 0.3, 0, 0])
    assert left(top_p=0.49) == pytest.approx([0.5, 0, 0, 0])
    assert left(top_k=2, top_p=0.62) == pytest.approx([0.5, 0, 0, 0])  # half is 0.625 of the two
    assert left(min_p=0.4) == left(min_p=0.59) == pytest.approx([0.5, 0.3, 0, 0])  # at least 0.2 or 0.295
    assert left(min_p=0.4, top_p=0.62) == pytest.approx([0.5, 0, 0, 0])  # half is 0.625 of the two
    assert left(top_k=9, top_p=1.0) == pytest.approx([0.5, 0.3, 0.15, 0.05])


def test_draws_by_hand() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.2, 0.0]] * 4).log()
    uniforms = torch.tensor([0.0, 0.49, 0.51, 1.0], dtype=torch.float64)
    tokens, log_probs = draw(logits, uniforms, SamplingSettings())
    assert tokens.tolist() == [0, 0, 1, 2]
    assert log_probs.exp().tolist() == pytest.approx([0.5, 0.5, 0.3, 0.2])
    altered = torch.tensor([[0.0, 0.5, 0.5, 0.0]] * 4).log()  # what tokens are chosen by; log-probs stay the policy's
    tokens, log_probs = draw(logits, uniforms, SamplingSettings(min_p=0.1), altered)
    assert tokens.tolist() == [1, 1, 2, 2]
    assert log_probs.exp().tolist() == pytest.approx([0.3, 0.3, 0.2, 0.2])
    tokens, log_probs = draw(logits, uniforms, SamplingSettings(temperature=0))
    assert tokens.tolist() == [0] * 4 and log_probs.exp().tolist() == pytest.approx([0.5] * 4)
    _, halved = draw(logits, uniforms, SamplingSettings(temperature=0.5))
    assert halved.exp().tolist()[:2] == pytest.approx([0.25 / 0.38] * 2)


def test_among_equals_the_first_are_kept() -> None:
    weights = torch.tensor([[0.25, 1.0, 0.25, 0.25, 0.25], [1.0, 1.0, 1.0, 1.0, 1.0]])
    keep_allowed(weights, SamplingSettings(top_p=0.7))
    assert weights.tolist() == [[0.25, 1.0, 0.25, 0, 0], [1.0, 1.0, 1.0, 1.0, 0]]
    weights = torch.tensor([[0.25, 1.0, 0.25, 0.5]])
    keep_allowed(weights, SamplingSettings(top_k=3))
    assert weights.tolist() == [[0.25, 1.0, 0.25, 0.5]]  # top-k keeps what is as likely as the third


# nearer to 1 than sums are exact, a cut is anywhere among the least likely tokens
shares = st.floats(0.01, 1 - 1e-9) | st.just(1.0)


@given(st.integers(1, 1200), st.integers(0, 99), st.floats(0.01, 8), shares, st.integers(1, 40), st.booleans())
@settings(max_examples=60, deadline=None)
def test_the_same_set_as_by_sorting(size: int, seed: int, scale: float, top_p: float, top_k: int, ties: bool) -> None:
    logits = torch.randn(3, size, generator=torch.Generator().manual_seed(seed)) * scale
    logits = logits.round() if ties else logits
    weights = (logits - logits.amax(-1, keepdim=True)).exp()
    for chosen in (SamplingSettings(top_p=top_p), SamplingSettings(top_p=top_p, top_k=top_k)):
        found, wanted = weights.clone(), kept(weights, chosen)
        keep_allowed(found, chosen)
        if not torch.equal(found, wanted):  # a token at the cut, by rounding
            assert ((found > 0).sum(-1) - (wanted > 0).sum(-1)).abs().max() <= 1
            reached = torch.minimum(found, wanted).double().sum(-1) / kept(
                weights, chosen.replace(top_p=1.0)
            ).double().sum(-1)
            assert (reached[(found != wanted).any(-1)] - top_p).abs().max() < 1e-12


@pytest.mark.parametrize("vocabulary", [7, 512, 20_011])
@pytest.mark.parametrize(
    "chosen", [{}, {"temperature": 0.3}, {"top_p": 0.9}, {"top_k": 5}, {"top_k": 40, "top_p": 0.5}]
)
def test_draws_are_those_of_the_whole_cdf(vocabulary: int, chosen: dict[str, Any]) -> None:
    generator, sampling = torch.Generator().manual_seed(vocabulary), SamplingSettings(**chosen)
    for scale, dtype in ((0.1, torch.float32), (3.0, torch.float32), (30.0, torch.bfloat16)):
        logits = (torch.randn(24, vocabulary, generator=generator) * scale).to(dtype)
        uniforms = torch.rand(24, generator=generator, dtype=torch.float64)
        uniforms[:2] = torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)
        tokens, log_probs = draw(logits, uniforms, sampling)
        assert distances(logits, uniforms, sampling, tokens).max() < EDGE
        wanted = torch.log_softmax(logits.double() / sampling.temperature, -1).gather(-1, tokens[:, None]).squeeze(-1)
        torch.testing.assert_close(log_probs.double(), wanted, atol=1e-5, rtol=0)
