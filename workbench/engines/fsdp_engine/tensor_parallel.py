"""Tensor parallel: each linear layer's weight is cut over the ranks of `mesh["tp"]`, by transformers' own plan for the model.

Shoeybi et al. 2019, https://arxiv.org/abs/1909.08053. Queries, keys, values and the first layers of an MLP are cut by columns,
what reads them by rows; embeddings and the language head by tokens of the vocabulary, where `tp` divides it. Norms, routers and
experts are whole on every rank of `tp`. All ranks of `tp` have the same rows, and the same activations between layers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import distributed
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from workbench.base.errors import EngineError, SettingError

_STYLES: dict[str, tuple[Any, dict[str, Any]]] = {
    "colwise": (ColwiseParallel, {}),
    "colwise_gather_output": (ColwiseParallel, {"output_layouts": Replicate()}),
    "rowwise": (RowwiseParallel, {}),
    "rowwise_split_input": (RowwiseParallel, {"input_layouts": Replicate()}),
}
"""Names in transformers' plans → torch's styles of a linear layer."""
_SUMMED = "replicated_with_grad_allreduce"
"""In transformers' plans: a weight that every rank has, and uses on its own heads alone."""


def apply(model: Any, mesh: Any) -> None:
    """Cut a causal model on the meta device over the ranks of a mesh of one dimension, adapters with their layers.

    Raises as `check` does.
    """
    size = mesh.size()
    check(model, size)
    ties = tied(model)
    parallelize_module(
        model, mesh, {name: _STYLES[style][0](**_STYLES[style][1]) for name, style in _plan(model, size)}
    )
    tie(model, ties)


def check(model: Any, size: int) -> None:
    """Raise `EngineError` for a model without a plan, `SettingError` where its heads or layers cannot be cut into `size` parts."""
    what = f"mesh tp={size} for {type(model).__name__}"
    plan, config = dict(_plan(model, size)), model.config.get_text_config()
    if not any(re.search(r"\.(self_)?attn\.", name) for name in plan):
        do = "leave tp out of the mesh: dp shards any model"
        raise EngineError(what, expected="a plan for its attention in transformers", found="none", do=do)
    for name, heads in vars(config).items():
        if name.endswith("_heads") and isinstance(heads, int) and heads % size:
            raise SettingError(what, expected=f"a tp that divides {name}", found=heads)
    if loose := _loose(model, plan):
        do = "leave tp out of the mesh: dp shards any model"
        raise EngineError(what, expected="a rule for every weight between layers that are cut", found=loose[0], do=do)
    for name, style in plan.items():
        layer = model.get_submodule(name)
        width = layer.weight.shape[0 if _STYLES[style][0] is ColwiseParallel or _embeds(layer) else 1]
        if width % size:
            raise SettingError(what, expected="a tp that divides its layers", found=f"{width} in {name}")


def summed(model: Any) -> list[str]:
    """Names of the parameters that every rank of `tp` has and uses on its own heads alone (norms of queries and keys)."""
    rules = _rules(model)
    found = [name for name, _ in model.named_modules() if _style(rules, name) == _SUMMED]
    return [f"{name}.{leaf}" for name in found for leaf, _ in model.get_submodule(name).named_parameters()]


def sum_gradients(parameters: Any, mesh: Any) -> None:
    """Sum the gradients of sharded parameters, those of `summed`, over the ranks of a mesh of one dimension."""
    for parameter in parameters:
        if parameter.grad is not None:
            distributed.all_reduce(parameter.grad.to_local(), group=mesh.get_group())


def tied(model: torch.nn.Module) -> dict[str, str]:
    """Names of parameters that are another name's, with that name (a language head that is the embeddings)."""
    first: dict[int, str] = {}
    named = model.named_parameters(remove_duplicate=False)
    found = {name: first.setdefault(id(one), name) for name, one in named}
    return {name: other for name, other in found.items() if name != other}


def tie(model: torch.nn.Module, ties: Mapping[str, str]) -> None:
    """Make parameters one again that `tied` found."""
    for name, first in ties.items():
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, model.get_parameter(first))


# --- the plan -------------------------------------------------------------------------------------


def _rules(model: Any) -> dict[re.Pattern[str], str]:
    """transformers' plan: patterns of names → styles."""
    plan = getattr(model, "tp_plan", None) or {}
    return {re.compile(re.escape(name).replace(r"\*", r"[^.]+")): style for name, style in plan.items()}


def _style(rules: Mapping[re.Pattern[str], str], name: str) -> str | None:
    plain = name.replace(".base_layer", "")
    return next((style for pattern, style in rules.items() if pattern.fullmatch(plain)), None)


def _plan(model: Any, size: int) -> list[tuple[str, str]]:
    """(name, style) of each layer that is cut."""
    rules, found = _rules(model), []
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    for name, module in model.named_modules():
        style = _style(rules, name)
        if module in ends:
            if ends[0].num_embeddings % size == 0:
                found.append((name, "rowwise_split_input" if _embeds(module) else "colwise_gather_output"))
        elif style in _STYLES and hasattr(module, "lora_A"):
            found += _adapters(name, module, str(style))
        elif style in _STYLES and isinstance(module, torch.nn.Linear) and "lora_" not in name:
            found.append((name, str(style)))
    return found


def _adapters(name: str, layer: Any, style: str) -> list[tuple[str, str]]:
    """Of a layer with adapters: by columns B is cut and A whole, by rows A is cut and B whole."""
    letter = "B" if _STYLES[style][0] is ColwiseParallel else "A"
    return [(f"{name}.lora_{letter}.{one}", style) for one in layer.lora_A]


def _loose(model: Any, plan: Mapping[str, str]) -> list[str]:
    """Names of weights beside layers that leave parts of their heads here, which are neither cut nor summed."""
    owners = {name.rpartition(".")[0] for name, style in plan.items() if style == "colwise" and "lora_" not in name}
    known = {*summed(model), *(f"{name}.{leaf}" for name in plan for leaf in ("weight", "bias"))}
    named = ((name, name.rpartition(".")[0].rpartition(".")[0], name.rpartition(".")[0]) for name in _parameters(model))
    return [name for name, outer, inner in named if name not in known and {outer, inner} & owners]


def _parameters(model: Any) -> list[str]:
    return [name for name, _ in model.named_parameters(remove_duplicate=False) if "lora_" not in name]


def _embeds(module: Any) -> bool:
    return isinstance(module, torch.nn.Embedding)
