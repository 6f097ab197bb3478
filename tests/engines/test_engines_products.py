"""Float32 products of linear layers on a CPU by the faster library: the numbers and gradients of torch's own."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from workbench.engines import Request, SamplingSettings, local
from workbench.engines.local_engine import products
from workbench.engines.torch_internals import mkl_layout, onednn_layout

needs_avx512 = pytest.mark.skipif(not products.LAYS, reason="oneDNN lays bfloat16 out with AVX-512 alone")
needs_mkl = pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="torch without MKL")


def _on(monkeypatch: pytest.MonkeyPatch, *, faster: bool = True) -> None:
    """Let layers be as on processors where laid out weights are faster, and with `faster` plain float32 by oneDNN, too."""
    monkeypatch.setattr(products, "LAYS", torch.backends.mkldnn.is_available())
    monkeypatch.setattr(products, "FASTER", faster and torch.backends.mkldnn.is_available())


def _kept(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The list of all weights that are laid out from now on."""
    kept: list[Tensor] = []
    monkeypatch.setattr(products, "onednn_layout", lambda weight: kept.append(onednn_layout(weight)) or kept[-1])
    monkeypatch.setattr(products, "mkl_layout", lambda *given: kept.append(mkl_layout(*given)) or kept[-1])
    return kept


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(3, 5), (2, 600), (1200,)])
def test_a_layer_gives_what_torch_gives(bias: bool, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    _on(monkeypatch)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32, bias=bias), nn.SiLU(), nn.Linear(32, 48, bias=bias))
    plain = copy.deepcopy(model).double()
    products.use_faster_products(model)
    states = torch.randn(*shape, 64, requires_grad=True)
    truth = states.detach().double().requires_grad_()
    slope = torch.randn(*shape, 48)
    out, true = model(states), plain(truth)
    torch.testing.assert_close(out, true.float(), rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        assert torch.equal(out, model(states)), "with and without gradients the same"
    out.backward(slope)
    true.backward(slope.double())
    torch.testing.assert_close(states.grad, truth.grad.float(), rtol=1e-4, atol=1e-5)
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad.float(), rtol=1e-4, atol=1e-4)


def test_frozen_weights_autocast_and_copies_are_as_those_of_plain_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    _on(monkeypatch)
    torch.manual_seed(0)
    model, states = nn.Sequential(nn.Linear(128, 128)), torch.randn(128, 128, requires_grad=True)
    plain = copy.deepcopy(model)
    products.use_faster_products(model)
    other = copy.deepcopy(model).requires_grad_(False)
    other(states).sum().backward()
    assert other[0].weight.grad is None
    assert states.grad is not None
    torch.testing.assert_close(states.grad, plain[0].weight.sum(0).expand(128, 128))
    assert model.state_dict().keys() == plain.state_dict().keys()
    assert products.is_plain(model[0]) and products.is_plain(plain[0]) and not products.is_plain(nn.Identity())
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(model(states), plain(states))
        assert torch.equal(products.product(states, model[0].weight, model[0].bias), plain(states))
    products.use_faster_products(plain.double())
    assert plain(states.double()).dtype == torch.float64


@pytest.mark.parametrize(
    ("half", "faster"),
    [(False, True), pytest.param(True, True, marks=needs_avx512), pytest.param(True, False, marks=needs_avx512)],
)
def test_weights_laid_out_once_give_the_very_numbers(half: bool, faster: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    _on(monkeypatch, faster=faster)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(576, 1536), nn.SiLU(), nn.Linear(1536, 192, bias=False), nn.Linear(192, 8))
    products.use_faster_products(model)
    kept = _kept(monkeypatch)
    for rows in (1, 2, 3, 8, 17, 64, 100, 480):
        states = torch.randn(rows, 1, 576)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=half):
            plain = model(states)
            kept.clear()
            with products.weights_laid_out(model, 64, 100):
                assert torch.equal(model(states), plain) and torch.equal(model(states), plain)
            assert len(kept) == (2 if half else 0 if rows == 1 else 1 if rows < 4 else 2)
            with products.weights_laid_out(model, 1, 100), products.weights_laid_out(model, 64, 25):
                kept.clear()
                assert torch.equal(model(states), plain) and not kept


def test_without_avx512_only_large_float32_weights_are_laid_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "LAYS", False)
    monkeypatch.setattr(products, "LAYS_LARGE", torch.backends.mkldnn.is_available())
    monkeypatch.setattr(products, "FASTER", False)
    monkeypatch.setattr(products, "_LARGE", 576 * 8192)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(576, 576), nn.Linear(576, 8192))
    products.use_faster_products(model)
    assert [type(part) for part in model] == [nn.Linear, products.Linear]
    kept = _kept(monkeypatch)
    states = torch.randn(64, 1, 576)
    with torch.no_grad():
        plain, truth = model(states), copy.deepcopy(model).double()(states.double())
        with products.weights_laid_out(model, 64, 100):
            out = model(states)
            for rows in (2, 8, 17):
                part = model[1](model[0](states)[:rows])
                assert torch.equal(part, out[:rows]), "a row's numbers depend on no other row"
            assert len(kept) == 1
            with torch.autocast("cpu", torch.bfloat16):
                assert model(states).dtype == torch.bfloat16
            assert len(kept) == 1, "bfloat16 needs AVX-512"
        assert torch.equal(model(states), plain) and (out - truth).norm() <= 1e-6 * truth.norm()


@needs_mkl
def test_mkl_lays_out_for_the_rows_that_stay_and_errs_no_more_than_many_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    _on(monkeypatch, faster=False)
    torch.manual_seed(0)
    model, many = nn.Sequential(nn.Linear(576, 1536)), torch.randn(480, 576)
    truth = copy.deepcopy(model).double()(many.double())
    products.use_faster_products(model)
    kept = _kept(monkeypatch)

    def error(out: Tensor) -> float:
        return float((out - truth[: len(out)]).norm() / truth[: len(out)].norm())

    with torch.no_grad():
        most = 1.1 * error(model(many))
        with products.weights_laid_out(model, 64, 100):
            model(many[None])
            assert not kept, "a prefill lays out nothing"
            for rows, made in ((64, 1), (48, 2), (64, 3), (8, 4)):
                model(many[:rows, None])
                assert len(kept) == max(made - 1, 1), "rows that may soon be others wait"
                for _ in range(products._STEPS):
                    out = model(many[:rows])
                assert len(kept) == made and error(out) <= most


def test_laid_out_weights_are_of_the_thread_that_decodes_and_end_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    _on(monkeypatch)
    model = nn.Sequential(nn.Linear(576, 576, bias=False))
    products.use_faster_products(model)
    states = torch.randn(8, 576)
    with torch.no_grad(), products.weights_laid_out(model, 8, 100):
        before = model(states)
        model[0].weight.zero_()
        with ThreadPoolExecutor(1) as pool:
            assert not pool.submit(torch.no_grad()(model), states).result().any(), (
                "a scoring beside the wave reads its weights"
            )
        assert torch.equal(model(states), before)
        with torch.enable_grad():
            assert not model(states).any()
    assert not model(states).any()


@pytest.mark.parametrize(
    ("settings", "faster"),
    [
        ({}, True),
        pytest.param({"dtype": "bfloat16"}, True, marks=needs_avx512),
        ({"lora_rank": 4}, True),
        pytest.param({"dtype": "bfloat16"}, False, marks=needs_avx512),
        pytest.param({}, False, marks=needs_mkl),
        pytest.param({"lora_rank": 4}, False, marks=needs_mkl),
    ],
)
def test_a_wave_samples_the_same_from_laid_out_weights(
    settings: dict[str, Any], faster: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    _on(monkeypatch, faster=faster)
    monkeypatch.setattr(products, "_LEAST", 1)
    monkeypatch.setattr(products, "_SMALL", 1)
    kept = _kept(monkeypatch)
    engine = local("data/tiny-arith", device="cpu", self_check=False, **settings)
    lengths = (32, 3, 1, 30)
    asked = [
        Request((5, 6, 7 + row), SamplingSettings(max_tokens=count, ignore_eos=True), row)
        for row, count in enumerate(lengths)
    ]
    sampled = engine.sample_many(asked)
    assert kept
    kept.clear()
    monkeypatch.setattr(products, "_TOKENS", 1 << 30)
    near = (
        0 if faster or "dtype" in settings else 1e-5
    )  # of few rows torch has other kernels than MKL of laid out weights
    for sample, plain in zip(sampled, engine.sample_many(asked), strict=True):
        assert sample.ids == plain.ids and sample.log_probs == pytest.approx(plain.log_probs, rel=0, abs=near)
    assert not kept
