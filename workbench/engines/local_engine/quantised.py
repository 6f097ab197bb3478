"""Frozen linear layers whose weight is kept in 4 or 8 bits: the base of LoRA adapters (QLoRA).

`nf4` has for each 64 weights their largest absolute value, and for each weight 4 bits: the nearest of 16 quantiles of a normal
distribution, times that value. `int8` has for each row its largest absolute value, and each weight as a 127th of it. Codes and values
are bitsandbytes' bit for bit (`Linear4bit` without double quantisation, the weights of `Linear8bitLt`); products are of the
weight in the precision of the pass, so that they do not depend on which rows share a batch, as those of LLM.int8() do.
Dettmers et al. 2023, QLoRA, https://arxiv.org/abs/2305.14314.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

log = logging.getLogger("workbench")
KINDS = ("nf4", "int8")
BLOCK = 64
"""Weights of `nf4` that share a largest value."""
_NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


class Coded(nn.Linear):
    """A frozen linear layer that keeps `codes` and `scales` in place of its weight; made by `quantise`."""

    kind: str
    codes: Tensor
    """`nf4`: [N·K / 2 rounded up] uint8, two weights each, the first in the upper half; `int8`: [N, K] int8."""
    scales: Tensor
    """Largest absolute values, float32: of each block of `nf4`, of each row of `int8`."""

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The weight [N, K] in float32, computed anew at each access."""
        return self.decoded(torch.float32)

    def decoded(self, dtype: torch.dtype) -> Tensor:
        """Compute the weight [N, K]."""
        if self.kind == "int8":
            return (self.codes * self.scales[:, None] * 7.874015718698502e-3).to(dtype)
        shape = (self.out_features, self.in_features)
        if self.codes.is_cuda and _kernels():
            decode = torch.ops.bitsandbytes.dequantize_4bit.default
            return cast(Tensor, decode(self.codes, self.scales, BLOCK, "nf4", shape, dtype))
        # a table of bytes: its CPU kernel is wrong where rows are not whole blocks (0.50.2)
        table = torch.tensor(_NF4, device=self.codes.device)
        pairs = torch.stack([table.repeat_interleave(16), table.repeat(16)], -1)
        flat = functional.pad(
            functional.embedding(self.codes.int(), pairs).flatten(), (0, -self.codes.numel() * 2 % BLOCK)
        )
        blocks = flat.view(-1, BLOCK) * self.scales[:, None]
        return blocks.flatten()[: shape[0] * shape[1]].view(shape).to(dtype)

    def forward(self, input: Tensor) -> Tensor:
        """The layer's output [..., N] of states [..., K], in autocast's precision where that is on."""
        kind = input.device.type
        if torch.is_autocast_enabled(kind):
            input = input.to(torch.get_autocast_dtype(kind))
        return cast(Tensor, _Product.apply(input, self))


class _Product(torch.autograd.Function):
    """A product with a decoded weight, which is decoded again in the backward pass in place of being kept."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, layer: Coded) -> Tensor:
        ctx.layer = layer
        bias = None if layer.bias is None else layer.bias.to(states.dtype)
        return functional.linear(states, layer.decoded(states.dtype), bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None]:
        return slope @ ctx.layer.decoded(slope.dtype), None


@lru_cache(1)
def _kernels() -> bool:
    """Whether bitsandbytes is there, whose kernel decodes on a GPU."""
    try:
        import bitsandbytes  # noqa: F401
    except ImportError:
        return False
    return True


@torch.no_grad()
def quantise(model: Any, kind: str, device: torch.device | str) -> None:
    """Quantise the weights of a model's linear layers to `kind` on `device`, except those of the output head, which
    computes the logits.
    """
    head = model.get_output_embeddings()
    for layer in list(model.modules()):
        if isinstance(layer, nn.Linear) and not isinstance(layer, Coded) and layer is not head:
            _keep(layer, layer.weight, kind, device)
    if left := [name for name, one in model.named_parameters() if one.dim() == 3]:  # experts; convolutions have more
        log.warning("base_dtype=%r codes linear layers; %s and the like stay in 16 bits", kind, left[0])


def _keep(layer: Any, weight: Tensor, kind: str, device: torch.device | str) -> None:
    """Make a linear layer one that keeps codes of `weight`."""
    codes, scales = (_nf4 if kind == "nf4" else _int8)(weight.to(device).float())
    del layer._parameters["weight"]
    layer.__class__, layer.kind = Coded, kind
    layer.register_buffer("codes", codes)
    layer.register_buffer("scales", scales)


@torch.no_grad()
def fill(model: Any, files: Sequence[Path], kind: str, half: torch.dtype, device: torch.device | str) -> bool:
    """Fill a model, whose parameters are on the meta device, from safetensors files, one tensor at a time. Linear layers are
    kept in a `kind` of `KINDS` as `quantise` does, other matrices in `half`, embeddings and vectors in float32. Returns
    False, with the model of no use, where names or shapes are not the model's."""
    from safetensors import safe_open

    head, wanted = model.get_output_embeddings(), dict(model.named_parameters())
    ties = {name for name, _ in model.named_parameters(remove_duplicate=False)} - wanted.keys()
    for path in files:
        with safe_open(str(path), "pt") as file:
            for name in file.keys():  # noqa: SIM118 - a file of tensors, no dict
                owner, _, leaf = name.rpartition(".")
                if name in ties:
                    continue
                tensor, parameter = file.get_tensor(name), wanted.pop(name, None)
                if parameter is None or parameter.shape != tensor.shape:
                    return False
                layer = model.get_submodule(owner)
                if kind in KINDS and leaf == "weight" and isinstance(layer, nn.Linear) and layer is not head:
                    _keep(layer, tensor, kind, device)
                else:
                    plain = tensor.dim() < 2 or isinstance(layer, nn.Embedding)
                    layer._parameters[leaf] = nn.Parameter(tensor.to(device, torch.float32 if plain else half))
    model.tie_weights()
    return not wanted


def _nf4(weight: Tensor) -> tuple[Tensor, Tensor]:
    flat = functional.pad(weight.flatten(), (0, -weight.numel() % BLOCK)).view(-1, BLOCK)
    scales = flat.abs().amax(-1)
    table = torch.tensor(_NF4, device=weight.device)
    near = (flat * (1.0 / scales.clamp(min=1e-38))[:, None]).clamp(-1, 1).flatten()
    codes = torch.bucketize(near, (table[1:] + table[:-1]) / 2, out_int32=True).to(torch.uint8)
    return (codes[::2] << 4 | codes[1::2])[: -(-weight.numel() // 2)].clone(), scales


def _int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    weight = weight.half()  # as bitsandbytes does
    scales = weight.abs().amax(-1).float().clamp(min=1e-30)
    return torch.round(weight * (127.0 / scales[:, None])).to(torch.int8), scales


class Weights(Mapping[str, Tensor]):
    """The `state_dict` of a model with the weights that layers keep in codes, each decoded anew at each access; with `shapes`
    alone they are on the meta device. A LoRA base is there also by the names that it has without adapters."""

    def __init__(self, model: Any, shapes: bool = False) -> None:
        self._coded = {f"{name}.weight": one for name, one in model.named_modules() if isinstance(one, Coded)}
        codes = {f"{name.removesuffix('weight')}{kind}" for name in self._coded for kind in ("codes", "scales")}
        self._held = {name: one for name, one in model.state_dict().items() if name not in codes}
        self._shapes = shapes
        self._names = {name.replace(".base_layer.", "."): name for name in self}

    def __getitem__(self, name: str) -> Tensor:
        name = self._names.get(name, name)
        if name in self._held:
            return self._held[name]
        layer = self._coded[name]
        return torch.empty(layer.out_features, layer.in_features, device="meta") if self._shapes else layer.weight

    def __iter__(self) -> Iterator[str]:
        return iter([*self._held, *self._coded])

    def __len__(self) -> int:
        return len(self._held) + len(self._coded)

    @property
    def coded(self) -> bool:
        """Whether some of the weights are quantised."""
        return bool(self._coded)


def parameters(model: Any) -> int:
    """Count the parameters of a model, those that are kept in codes included."""
    layers = [one for one in model.modules() if isinstance(one, Coded)]
    return sum(one.in_features * one.out_features for one in layers) + sum(one.numel() for one in model.parameters())
