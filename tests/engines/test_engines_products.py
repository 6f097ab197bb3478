"""Float32 products of linear layers on a CPU by the faster library: the numbers and gradients of torch's own."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from workbench.engines.local_engine import products


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(3, 5), (2, 600), (1200,)])
def test_a_layer_gives_what_torch_gives(bias: bool, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "FASTER", torch.backends.mkldnn.is_available())
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
    monkeypatch.setattr(products, "FASTER", torch.backends.mkldnn.is_available())
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
