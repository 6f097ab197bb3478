"""A model laid out over a mesh of ranks: tensors, tokens and experts cut, and what is left sharded by FSDP2.

Tensor parallel: each linear layer's weight is cut over the ranks of `mesh["tp"]`, by transformers' own plan for the
model. Queries, keys, values and the first layers of an MLP are cut by columns, what reads them by rows; embeddings
and the language head by tokens of the vocabulary, where `tp` divides it. Norms, routers and experts are whole on
every rank of `tp`. All ranks of `tp` have the same rows, and the same activations between layers. Shoeybi et al.
2019, https://arxiv.org/abs/1909.08053.

Context parallel: each rank has a slice of a micro-batch's packed tokens, but inside an attention all tokens and a
slice of the heads: two all-to-alls a layer. What a plan attends to (`local_engine.forward`), trees, windows,
soft-caps and sinks, is computed as on one rank. Jacobs et al. 2023, DeepSpeed Ulysses,
https://arxiv.org/abs/2309.14509.

Expert parallel: routers and shared experts stay on every rank. A layer sends each of its tokens by all-to-all to the
ranks of the experts that the router chose, which compute as the model does, and add up the gradients of all tokens
that came. Lepikhin et al. 2020, GShard, https://arxiv.org/abs/2006.16668.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional

from workbench.base.errors import EngineError, SettingError
from workbench.dataproto.core import DataProto
from workbench.engines.fsdp_engine.meshes import Mesh, Sizes
from workbench.engines.local_engine.forward import (
    AttentionPlan,
    Head,
    LayerCall,
    experts_of,
    head_of,
    hidden_size,
    planned,
    replay,
)
from workbench.engines.local_engine.loading import load_model, tie, tied
from workbench.engines.local_engine.products import use_faster_products
from workbench.engines.local_engine.scoring import RowTree, layout, outputs
from workbench.engines.torch_internals import is_fake
from workbench.engines.transformers_internals import asks_attention_interface, attention_of, whole_blocks

# --- tensors ------------------------------------------------------------------------------------

_STYLES: dict[str, tuple[Any, dict[str, Any]]] = {
    "colwise": (ColwiseParallel, {}),
    "colwise_gather_output": (ColwiseParallel, {"output_layouts": Replicate()}),
    "rowwise": (RowwiseParallel, {}),
    "rowwise_split_input": (RowwiseParallel, {"input_layouts": Replicate()}),
}
"""Names in transformers' plans → torch's styles of a linear layer."""
_SUMMED = "replicated_with_grad_allreduce"
"""In transformers' plans: a weight that every rank has, and uses on its own heads alone."""


def cut_tensors(model: Any, mesh: Any) -> None:
    """Apply tensor parallelism: cut a causal model on the meta device, and its LoRA adapters, over the ranks of a
    one-dimensional mesh."""
    ties, plan = tied(model), _plan(model, mesh.size())
    parallelize_module(model, mesh, {name: _STYLES[style][0](**_STYLES[style][1]) for name, style in plan})
    tie(model, ties)


def check_tensors(model: Any, size: int) -> None:
    """Check that tensor parallelism over `size` ranks works for a model: raise `EngineError` where transformers has no
    plan for it, `SettingError` where its heads or layers cannot be divided."""
    what = f"mesh tp={size} for {type(model).__name__}"
    plan, config = dict(_plan(model, size)), model.config.get_text_config()
    if not any(re.search(r"\.(self_)?attn\.", name) for name in plan):
        do = "leave tp out of the mesh: dp shards any model"
        raise EngineError(what, expected="transformers' tp_plan for its attention", found="none", do=do)
    for name, heads in vars(config).items():
        if name.endswith("_heads") and isinstance(heads, int) and heads % size:
            raise SettingError(what, expected=f"a tp that divides {name}", found=heads)
    if loose := _loose(model, plan):
        do = "leave tp out of the mesh: dp shards any model"
        raise EngineError(what, expected="a tp_plan rule for every weight between split layers", found=loose[0], do=do)
    for name, style in plan.items():
        layer = model.get_submodule(name)
        width = layer.weight.shape[0 if _STYLES[style][0] is ColwiseParallel or _embeds(layer) else 1]
        if width % size:
            raise SettingError(what, expected="a tp that divides its layers", found=f"{width} in {name}")


def summed(model: Any) -> list[str]:
    """Names of the parameters that every tensor-parallel rank holds whole but uses on its own heads only (query and key
    norms); their gradients must be summed."""
    rules = _rules(model)
    found = [name for name, _ in model.named_modules() if _style(rules, name) == _SUMMED]
    return [f"{name}.{leaf}" for name in found for leaf, _ in model.get_submodule(name).named_parameters()]


def sum_gradients(parameters: Any, mesh: Any) -> None:
    """Sum the gradients of the parameters that `summed` names over the ranks of a one-dimensional mesh."""
    for parameter in parameters:
        if parameter.grad is not None:
            distributed.all_reduce(parameter.grad.to_local(), group=mesh.get_group())


def _rules(model: Any) -> dict[re.Pattern[str], str]:
    """Read transformers' tensor-parallel plan of a model as regular expressions of module names → styles."""
    plan = getattr(model, "tp_plan", None) or {}
    return {re.compile(re.escape(name).replace(r"\*", r"[^.]+")): style for name, style in plan.items()}


def _style(rules: Mapping[re.Pattern[str], str], name: str) -> str | None:
    plain = name.replace(".base_layer", "")
    return next((style for pattern, style in rules.items() if pattern.fullmatch(plain)), None)


def _plan(model: Any, size: int) -> list[tuple[str, str]]:
    """List (name, style) of each layer that tensor parallelism cuts."""
    rules, layers = _rules(model), []
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    for name, module in model.named_modules():
        style = _style(rules, name)
        if module in ends:
            if ends[0].num_embeddings % size == 0:
                layers.append((name, "rowwise_split_input" if _embeds(module) else "colwise_gather_output"))
        elif style in _STYLES and hasattr(module, "lora_A"):
            layers += _adapters(name, module, str(style))
        elif style in _STYLES and isinstance(module, torch.nn.Linear) and "lora_" not in name:
            layers.append((name, str(style)))
    return layers


def _adapters(name: str, layer: Any, style: str) -> list[tuple[str, str]]:
    """List (name, style) of an adapted layer's LoRA matrices: where the layer is cut by columns, B is cut and A stays
    whole; by rows, A is cut and B stays whole."""
    letter = "B" if _STYLES[style][0] is ColwiseParallel else "A"
    return [(f"{name}.lora_{letter}.{one}", style) for one in layer.lora_A]


def _loose(model: Any, plan: Mapping[str, str]) -> list[str]:
    """Names of weights next to layers that are cut by heads which are neither cut nor summed themselves; they would be
    wrong."""
    owners = {name.rpartition(".")[0] for name, style in plan.items() if style == "colwise" and "lora_" not in name}
    known = {*summed(model), *(f"{name}.{leaf}" for name in plan for leaf in ("weight", "bias"))}
    loose = []
    for name, _ in model.named_parameters(remove_duplicate=False):
        layer = name.rpartition(".")[0]
        if "lora_" not in name and name not in known and {layer, layer.rpartition(".")[0]} & owners:
            loose.append(name)
    return loose


def _embeds(module: Any) -> bool:
    return isinstance(module, torch.nn.Embedding)


# --- tokens ---------------------------------------------------------------------------------------


def check_tokens(model: Any, size: int, tensors: int) -> None:
    """Check that `size` ranks can share a model's tokens (context parallelism): raise `EngineError` where its layers do
    not allow it, `SettingError` where its heads cannot be divided by cp·tp (`tensors`)."""
    config, name = model.config.get_text_config(), type(model).__name__
    do = "take cp=1 (more ranks in dp), or a model of attention alone"
    other = sorted(set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"})
    if other or not asks_attention_interface(model):
        kinds = f"layers of {', '.join(other)}" if other else "layers that do not ask transformers' attention interface"
        raise EngineError(f"mesh cp={size} with {name}", expected="full or sliding attention", found=kinds, do=do)
    if (chosen := attention_of(config)) not in (None, "sdpa", "eager"):
        do = "leave attn_implementation at None"
        raise EngineError(f"mesh cp={size}", expected="attn_implementation 'sdpa' or 'eager'", found=chosen, do=do)
    if config.num_attention_heads % (size * tensors):
        expected, heads = "cp·tp that divides its heads", f"{config.num_attention_heads} heads"
        raise SettingError(f"mesh cp={size}, tp={tensors} with {name}", expected=expected, found=heads)


def share_tokens(model: Any, mesh: Any) -> None:
    """Let the ranks of a one-dimensional mesh share the tokens of a model's packed rows; `scoring.layout` then returns
    a `Share`."""
    model.workbench_share = lambda tree: Share(tree, mesh.get_group())


class Share:
    """One rank's share of a packed token tree under context parallelism (a `scoring.Layout`): each rank computes the
    states of its tokens and gets the values of all."""

    def __init__(self, tree: RowTree, group: Any) -> None:
        self._tree, self._group = tree, group
        rank, size = group.rank(), group.size()
        self._count = -(-tree.count // size)  # the last ranks may have padding
        self._start = self._count * rank
        edges = torch.tensor([self._start, self._start + self._count])
        self._own = slice(*torch.searchsorted(tree.before, edges).tolist())
        self.labels = tree.labels[self._own]

    def spread(self, values: Tensor) -> Tensor:
        """Scatter the values [m] of this rank's `labels`, and those of the other ranks, to [b, T]; the gradient flows
        to this rank's values only."""
        return self._tree.spread(_AllValues.apply(values.float(), self._own.start, len(self._tree.labels), self._group))

    def states(self, model: Any, head: Head) -> Tensor:
        """Compute the hidden states [m, H] that predict this rank's `labels`."""
        chosen = self._tree.experts
        if chosen is not None:  # padding goes where it likes
            own = chosen[self._start : self._start + self._count]
            chosen = functional.pad(own, (0, 0, 0, 0, 0, self._count - len(own)), value=-1)
        replay(model, chosen)
        with planned(model, _Exchanged(self._tree.plan, self._tree.count, self._group)) as mask:
            given = {name: self._slice(one) for name, one in self._tree.given.items()}
            states = head.states(model, **given, attention_mask=mask)[0]
            return states[self._tree.predicting[self._own] - self._start]

    def _slice(self, tokens: Tensor) -> Tensor:
        """Return this rank's part [1, n] of tokens [1, N], padded with zeros at the end."""
        own = tokens[:, self._start : self._start + self._count]
        return functional.pad(own, (0, self._count - own.shape[1]))


class _Exchanged:
    """A plan of attention for context parallelism: each rank holds a slice of the tokens with all heads, and computes
    attention over all tokens with a slice of the heads."""

    def __init__(self, plan: AttentionPlan, count: int, group: Any) -> None:
        self._plan, self._count, self._group = plan, count, group

    def attend(self, layer: LayerCall) -> Tensor:
        """Compute the layer's attention [1, H, n, D'] for this rank's tokens."""
        size = self._group.size()
        # heads of keys and values that several ranks need go to each of them
        shared = math.lcm(layer.key.shape[1], size) // layer.key.shape[1]
        key, value = (one.repeat_interleave(shared, 1) if shared > 1 else one for one in (layer.key, layer.value))
        query, key, value = self._to_heads((layer.query, key, value))
        sinks = None if layer.sinks is None else layer.sinks.view(size, -1)[self._group.rank()]
        attended = self._plan.attend(replace(layer, query=query, key=key, value=value, sinks=sinks))[0]
        own = layer.query.shape[2]
        attended = functional.pad(attended, (0, 0, 0, own * size - self._count))
        parts = attended.view(len(attended), size, own, -1).transpose(0, 1)
        return self._exchanged(parts).flatten(0, 1)[None]

    def _exchanged(self, parts: Tensor) -> Tensor:
        """Exchange parts [size, …] between the ranks (all-to-all): part i goes to rank i."""
        each = (1,) * self._group.size()
        found: Tensor = Exchange.apply(parts, each, each, self._group)
        return found

    def _to_heads(self, layers: Sequence[Tensor]) -> list[Tensor]:
        """Exchange queries, keys and values: all heads of this rank's tokens, [1, h, n, ·], become some heads of all
        tokens, [1, h / size, N, ·]."""
        size, own = self._group.size(), layers[0].shape[2]
        shapes = [(size, layer.shape[1] // size, own, layer.shape[3]) for layer in layers]
        flat = torch.cat([layer.reshape(size, -1) for layer in layers], 1)
        pieces = self._exchanged(flat).split([math.prod(shape[1:]) for shape in shapes], 1)
        whole = (piece.reshape(shape).transpose(0, 1) for piece, shape in zip(pieces, shapes, strict=True))
        return [one.flatten(1, 2)[None, :, : self._count] for one in whole]


class _AllValues(torch.autograd.Function):
    """Autograd function that assembles values [m] of each rank to [M] on all ranks; its gradient is that of this rank's
    part, because gradients of weights are summed over ranks later."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, start: int, total: int, group: Any) -> Tensor:
        ctx.own = slice(start, start + len(values))
        whole = values.new_zeros((total, *values.shape[1:]))
        whole[ctx.own] = values
        distributed.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return gradients[0][ctx.own], None, None, None


# --- experts --------------------------------------------------------------------------------------


def check_experts(model: Any, size: int) -> None:
    """Check that expert parallelism over `size` ranks works: raise `EngineError` where the model has no experts of a
    known form, `SettingError` where `size` does not divide their number."""
    what, layers = f"mesh ep={size} with {type(model).__name__}", experts_of(model)
    if not layers:
        expected = "layers of experts in transformers' common form (Mixtral, Qwen3-MoE, DeepSeek, gpt-oss …)"
        raise EngineError(what, expected=expected, found="none", do="leave ep out of the mesh: dp shards any model")
    for name, experts in layers.items():
        if experts.num_experts % size:
            raise SettingError(
                what, expected="an ep that divides its experts", found=f"{experts.num_experts} in {name}"
            )
        for leaf, parameter in experts.named_parameters():
            if parameter.shape[0] != experts.num_experts:
                expected, shape = f"{experts.num_experts} experts in its first dimension", tuple(parameter.shape)
                raise EngineError(what, expected=expected, found=f"{name}.{leaf} of shape {shape}")


def spread_experts(model: Any, mesh: Any) -> None:
    """Spread experts over the ranks of a one-dimensional mesh: each rank keeps its slice of the experts' first
    dimension, as `DTensor`s."""
    for experts in experts_of(model).values():
        for name, weight in list(experts.named_parameters(recurse=False)):
            part = distribute_tensor(weight.detach(), mesh, [Shard(0)], src_data_rank=None)
            setattr(experts, name, torch.nn.Parameter(part, requires_grad=weight.requires_grad))
        experts.forward = partial(_forward, experts, type(experts).forward, mesh.get_group())


def shard_experts(model: Any, mesh: Any, **how: Any) -> None:
    """Shard each rank's experts further by FSDP2 over a mesh, along their second dimension; `how` are arguments of
    `fully_shard`."""
    for experts in experts_of(model).values():
        fully_shard(experts, mesh=mesh, shard_placement_fn=lambda parameter: Shard(1), **how)


class _LocalExperts:
    """A view of a layer of experts that shows only the experts of this rank, for transformers' expert code to run on."""

    def __init__(self, experts: Any, size: int) -> None:
        self._experts, self.num_experts = experts, experts.num_experts // size
        vars(self).update({name: one.to_local() for name, one in experts.named_parameters(recurse=False)})

    def __getattr__(self, name: str) -> Any:
        return getattr(self._experts, name)


def _forward(
    experts: Any, compute: Callable[..., Tensor], group: Any, hidden: Tensor, chosen: Tensor, weights: Tensor
) -> Tensor:
    """Compute a layer of experts under expert parallelism, in place of its own forward: states [n, H], chosen experts
    [n, k] and their weights [n, k] → [n, H]."""
    size, shape, most = group.size(), hidden.shape, chosen.shape[-1]
    part = _LocalExperts(experts, size)
    hidden, flat = hidden.reshape(-1, shape[-1]), chosen.flatten()
    order = torch.argsort(flat, stable=True)
    leaving = flat.new_zeros(experts.num_experts).scatter_add_(0, flat, torch.ones_like(flat))
    coming = torch.empty_like(leaving)
    distributed.all_to_all_single(coming, leaving, group=group)
    there, here = (_rows(one.view(size, -1).sum(1), len(flat)) for one in (leaving, coming))
    states = Exchange.apply(hidden[order // most], there, here, group)
    numbers = torch.arange(part.num_experts, device=flat.device).repeat(size)
    local_experts = numbers.repeat_interleave(coming, output_size=sum(here))
    # a state of zeros, so that a rank to which no token came computes, and has gradients, too
    states = torch.cat([states, states.new_zeros(1, shape[-1])])
    local_experts = torch.cat([local_experts, local_experts.new_zeros(1)])[:, None]
    computed = compute(part, states, local_experts, states.new_ones(local_experts.shape))[:-1]
    back = Exchange.apply(computed, here, there, group)[torch.argsort(order)]
    return (back.view(*chosen.shape, -1) * weights[..., None]).sum(-2).to(hidden.dtype).view(shape)


def _rows(counts: Tensor, every: int) -> list[int]:
    """Read the numbers of rows for each rank from `counts`; on fake tensors (`rehearsal`), which hold no numbers,
    assume an even split of `every`."""
    if not is_fake(counts):
        return [int(one) for one in counts.tolist()]
    return [every * (rank + 1) // len(counts) - every * rank // len(counts) for rank in range(len(counts))]


class Exchange(torch.autograd.Function):
    """Autograd function of an all-to-all: rows [Σ there, …] → [Σ here, …], where `there` and `here` count the rows sent
    to and received from each rank. The gradient goes the other way."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, there: Sequence[int], here: Sequence[int], group: Any) -> Tensor:
        """Send `there[i]` of the rows to each rank i of the group and return the `here[i]` rows received from it,
        concatenated."""
        ctx.given = there, here, group
        received = rows.new_empty(sum(here), *rows.shape[1:])
        distributed.all_to_all_single(received, rows.contiguous(), list(here), list(there), group=group)
        return received

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        """Send the gradients of the received rows back to the ranks that they came from."""
        there, here, group = ctx.given
        return Exchange.apply(gradients[0], here, there, group), None, None, None


# --- the whole model ------------------------------------------------------------------------------


class RootModule(torch.nn.Module):
    """FSDP's root module: model and value head behind one `forward`, because FSDP needs its root to be called."""

    def __init__(self, causal: Any, head: torch.nn.Module | None) -> None:
        super().__init__()
        self.causal = causal
        self.value_head = head

    def forward(
        self, rows: DataProto, want: Sequence[str], temperature: float, packed: bool
    ) -> dict[str, torch.Tensor]:
        """Compute the outputs `want` (see `scoring.outputs`); or `own`, the logits [b, s, V] of the model's own
        forward; or `hidden`, the states [N, H] that predict the N response tokens."""
        if "own" in want:
            replay(self.causal, None)
            return {"own": self.causal(input_ids=rows["input_ids"], use_cache=False).logits}
        if "hidden" in want:
            return {"hidden": layout(self.causal, rows, packed).states(self.causal, head_of(self.causal))}
        return outputs(self.causal, self.value_head, rows, want, temperature, packed)


def refuse(model: Any, sizes: Sizes) -> None:
    """Raise an error, before anything is loaded, where a model (which may be on the meta device) cannot be laid out on
    a mesh of these sizes."""
    if sizes.tp > 1:
        check_tensors(model, sizes.tp)
    if sizes.ep > 1:
        check_experts(model, sizes.ep)
    if sizes.cp > 1:
        check_tokens(model, sizes.cp, sizes.tp)


def build(path: str, settings: Any, mesh: Mesh, head: bool) -> RootModule:
    """Build a model that is cut and sharded over a mesh, with uninitialised weights; `head` adds a value head."""
    from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    model = load_model(path, settings, empty=True)
    value = None
    if head:
        with torch.device("meta"):
            value = torch.nn.Linear(hidden_size(model), 1)
    refuse(model, mesh.sizes)
    if mesh.sizes.tp > 1:
        cut_tensors(model, mesh["tp"])
    if mesh.sizes.ep > 1:
        spread_experts(model, mesh["ep"])
    if mesh.sizes.cp > 1:
        share_tokens(model, mesh["cp"])
    whole = RootModule(model, value)
    device = mesh.device_type
    if device == "cpu":
        use_faster_products(model)
    offload = CPUOffloadPolicy(pin_memory=device == "cuda") if settings.offload == "all" else OffloadPolicy()
    shared: dict[str, Any] = {"mesh": mesh.fsdp, "offload_policy": offload}
    half: dict[str, Any] = {"param_dtype": getattr(torch, settings.precision(device)), "reduce_dtype": torch.float32}
    mixed = MixedPrecisionPolicy(**(half if settings.half(device) else {}))
    if mesh.sizes.ep > 1:
        kept = {"mp_policy": replace(mixed, cast_forward_inputs=False), "offload_policy": offload}  # routers' weights
        shard_experts(model, mesh.experts, reshard_after_forward=settings.reshard_after_forward, **kept)
    blocks = whole_blocks(model)
    layers = [module for module in model.modules() if type(module).__name__ in blocks]
    for layer in reversed(layers):  # inner ones first
        fully_shard(layer, mp_policy=mixed, reshard_after_forward=settings.reshard_after_forward, **shared)
    if value is not None:
        fully_shard(value, **shared)
    fully_shard(whole, mp_policy=mixed, **shared)
    # the loss is divided by global counts already: ranks are summed, and 1.0 divides nothing
    for module in whole.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum
    _materialise(whole, "cpu" if settings.offload == "all" else device)
    if settings.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return whole.eval()


def _materialise(whole: torch.nn.Module, device: str) -> None:
    """Allocate memory for parameters on the meta device, and keep tied parameters (one tensor under two names) tied."""
    ties = tied(whole)
    whole.to_empty(device=device)
    tie(whole, ties)
