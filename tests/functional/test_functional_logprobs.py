"""Log-probs, entropy and Σ π² from hidden states: what the plain formulas give, in chunks, and their gradients."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from workbench.functional import logprobs
from workbench.functional.logprobs import linear_log_probs


@pytest.fixture(params=[1 << 26, 3 * 11 * 4], ids=["one chunk", "chunks of 3"])
def chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """V is 11 in these tests."""
    monkeypatch.setattr(logprobs, "CHUNK_BYTES", request.param)
    yield


def given(kind: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    hidden, weight, bias = (torch.randn(shape, dtype=kind, requires_grad=True) for shape in ((7, 5), (11, 5), (11,)))
    return hidden, weight, bias, torch.randint(0, 11, (7,))


def plain(hidden: Any, weight: Any, bias: Any, labels: Any, factor: float, softcap: Any, temperature: float) -> Any:
    z = torch.nn.functional.linear(hidden, weight, bias) * factor
    z = (z if softcap is None else softcap * torch.tanh(z / softcap)) / temperature
    log_p = torch.log_softmax(z, -1)
    picked = log_p.gather(-1, labels[:, None])[:, 0]
    return picked, -(log_p.exp() * log_p).sum(-1), log_p.exp().square().sum(-1)


SHAPES = [(1.0, None, 1.0), (0.3, None, 0.7), (2.0, 1.5, 0.7)]


def test_by_hand() -> None:
    hidden, weight = torch.tensor([[1.0], [0.0]]), torch.tensor([[math.log(3.0)], [0.0]])
    found = linear_log_probs(hidden, weight, None, torch.tensor([0, 1]), distribution=True)
    assert found[0].tolist() == pytest.approx([math.log(0.75), math.log(0.5)])
    assert found[1].tolist() == pytest.approx([-0.75 * math.log(0.75) - 0.25 * math.log(0.25), math.log(2)])
    assert found[2].tolist() == pytest.approx([0.75**2 + 0.25**2, 0.5])
    halved = linear_log_probs(hidden, weight, None, torch.tensor([0, 1]), temperature=0.5)[0]
    assert halved[0].item() == pytest.approx(math.log(0.9))


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize(("factor", "softcap", "temperature"), SHAPES)
def test_values_and_gradients_are_the_formulas(factor: float, softcap: float | None, temperature: float) -> None:
    *inputs, labels = given()
    shape: dict[str, Any] = {"factor": factor, "softcap": softcap, "temperature": temperature}
    found = linear_log_probs(*inputs, labels, **shape, distribution=True)
    expected = plain(*inputs, labels, factor, softcap, temperature)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)

    def every(*parts: torch.Tensor) -> Any:
        return linear_log_probs(*parts, labels, **shape, distribution=True)

    assert torch.autograd.gradcheck(every, inputs)

    def first(*parts: torch.Tensor) -> torch.Tensor:
        return linear_log_probs(*parts, labels, **shape)[0]

    assert torch.autograd.gradcheck(first, inputs)


@pytest.mark.usefixtures("chunks")
def test_frozen_parts_get_no_gradient_and_a_second_backward_pass_repeats_the_first() -> None:
    hidden, weight, bias, labels = given(torch.float32)
    picked, entropy, _ = linear_log_probs(hidden, weight.detach(), None, labels, distribution=True)
    loss = (picked - 0.5 * entropy).sum()
    first, second = (torch.autograd.grad(loss, hidden, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)
    expected = plain(hidden, weight, None, labels, 1.0, None, 1.0)
    torch.testing.assert_close(first, torch.autograd.grad((expected[0] - 0.5 * expected[1]).sum(), hidden)[0])
    frozen = linear_log_probs(hidden.detach(), weight, bias, labels)[0].sum()
    whole = plain(hidden, weight, bias, labels, 1.0, None, 1.0)[0].sum()
    for one, other in zip(*(torch.autograd.grad(each, (weight, bias)) for each in (frozen, whole)), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(("rows", "sizes"), [(3, [3]), (7, [1, 3, 3, 3, 1])])
def test_the_last_chunk_is_whole_and_its_logits_are_not_computed_again(
    rows: int, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logprobs, "CHUNK_BYTES", 3 * 11 * 4)
    hidden, weight, _, labels = given(torch.float32)
    found: list[int] = []

    def product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        found.extend([len(left)] if right.shape == weight.shape else [])
        return left @ right.T

    picked = linear_log_probs(hidden[:rows], weight, None, labels[:rows], product=product)[0]
    first = torch.autograd.grad(picked.sum(), (hidden, weight), retain_graph=True)
    assert found == sizes
    expected = plain(hidden[:rows], weight, None, labels[:rows], 1.0, None, 1.0)[0].sum()
    torch.testing.assert_close(first, torch.autograd.grad(expected, (hidden, weight)))
    second = torch.autograd.grad(picked.sum(), (hidden, weight))
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


@pytest.mark.usefixtures("chunks")
def test_half_precision_is_that_of_autocast() -> None:
    hidden, weight, bias, labels = given(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = linear_log_probs(hidden, weight, bias, labels, distribution=True)
        logits = torch.nn.functional.linear(hidden, weight, bias)
    expected = torch.log_softmax(logits.float(), -1).gather(-1, labels[:, None])[:, 0]
    torch.testing.assert_close(found[0], expected)
    found[0].sum().backward()
    expected_slope = torch.autograd.grad(plain(hidden, weight, bias, labels, 1.0, None, 1.0)[0].sum(), weight)[0]
    assert weight.grad is not None and weight.grad.dtype == torch.float32
    torch.testing.assert_close(weight.grad, expected_slope, atol=0.05, rtol=0.05)


@pytest.mark.usefixtures("chunks")
def test_no_rows_and_ruled_out_tokens() -> None:
    hidden, weight, bias, labels = given(torch.float32)
    nothing = linear_log_probs(hidden[:0], weight, bias, labels[:0])[0]
    (nothing.sum() * 2).backward()
    assert weight.grad is not None and not weight.grad.any()
    ruled = bias.detach().clone()
    ruled[3] = -math.inf
    ruled.requires_grad_()
    found = linear_log_probs(hidden, weight, ruled, torch.zeros(7, dtype=torch.long), distribution=True)
    sum(one.sum() for one in found).backward()  # type: ignore[union-attr]
    assert all(one.isfinite().all() for one in (*found, hidden.grad, ruled.grad))  # type: ignore[union-attr]
    assert ruled.grad is not None and ruled.grad[3] == 0
