"""Training on one mini-batch: gradients summed over micro-batches, AdamW and its schedule."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar
from weakref import WeakSet

import torch

from workbench.base import runtime
from workbench.base.distribution import optional
from workbench.base.errors import CheckpointError, NonFinite
from workbench.base.memory import is_large, release
from workbench.base.metrics import Count, Mean, Metric, Sum, join
from workbench.dataproto.core import DataProto
from workbench.engines.local_engine.forward import switched
from workbench.engines.local_engine.memory import LiveTensors, memory_errors
from workbench.engines.local_engine.scoring import Assembled
from workbench.engines.local_engine.states import SCALE, Part, StateFiles, hold
from workbench.engines.protocol import LossOutput, StepResult

T = TypeVar("T")
_MAPS = {"qmap1": "dynamic", "qmap2": "udynamic"}
"""Tables of codes in the state of 8-bit Adam, the same for all parameters, and their names there."""
_BLOCK = 256
"""Numbers of a moment in 8 bits that share a largest value."""
INFINITE_LOSS = "the loss is NaN or infinite; no step was taken"
INFINITE_NORM = "the gradient norm is NaN or infinite; no step was taken"


def infinite_norm(norm: float, broken: Sequence[Sequence[str]], most: int = 3) -> NonFinite:
    """Make the `NonFinite` error of a gradient norm that is NaN or infinite. It names at most `most` of the `broken`
    parameters, which are listed per rank, the nearest to the loss first."""
    ranks: dict[str, list[int]] = {}
    for rank, names in enumerate(broken):
        for name in names:
            ranks.setdefault(name, []).append(rank)
    nearest = [
        name + (f" (rank {', '.join(map(str, ranks[name]))})" if len(broken) > 1 else "")
        for name in [*ranks][: -most - 1 : -1]
    ]
    reason = f"{norm}: the gradients of {len(ranks)} parameters are not finite, next to the loss {', '.join(nearest)}"
    if not ranks:
        reason = f"{norm}: each gradient is finite, and their squares are too large together"
    do = "look at the batch, or let some steps in a row pass: skip_nonfinite of the update"
    return NonFinite(INFINITE_NORM, found=reason, do=do)


def learning_rate(base: float, step: int, schedule: str, warmup: int, total: int | None) -> float:
    """The learning rate of optimizer step `step` (from 0): linear warm-up, then constant, or down to 0 by a cosine or
    in a line (whose last step is the last above 0)."""
    if step < warmup:
        return base * (step + 1) / warmup
    if schedule == "constant" or not total:
        return base
    progress = min((step - warmup) / max(total - warmup, 1), 1.0)
    return base * (1 - progress if schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress)))


@contextmanager
def learning_mode(model: Any, packed: bool) -> Iterator[None]:
    """Context manager around forward and backward passes: gradient checkpointing is active where it is switched on, and
    dropout is off.

    The old log-probs that a loss compares with are computed without dropout, too. Only the dropout of LoRA adapters,
    which the settings ask for by name, is active.
    """
    again = [part for part in model.modules() if getattr(part, "gradient_checkpointing", False)]
    # layers that are recomputed only where they are training, and then drop out by numbers of their own
    held = [
        (part, name, rate)
        for part in again
        for name, rate in vars(part).items()
        if "drop" in name and type(rate) is float
    ]
    dropped = [part for name, part in model.named_modules() if ".lora_dropout." in name]
    model.eval()
    try:
        for part in (*again, *dropped):
            part.training = True
        for part, name, _ in held:
            setattr(part, name, 0.0)
        with switched(model) if packed and again else nullcontext():
            yield
    finally:
        model.eval()
        for part, name, rate in held:
            setattr(part, name, rate)


class LossScale:
    """The factor by which a loss is multiplied, so that float16 can represent its small gradients. The factor doubles
    after 2,000 finite gradients in a row and halves after a gradient that overflows, as in `torch.amp.GradScaler`.

    Micikevicius et al. 2018, https://arxiv.org/abs/1710.03740.
    """

    FIRST, INTERVAL = 2.0**16, 2000

    def __init__(self, value: float = FIRST, finite: float = 0) -> None:
        self.value = value
        self.finite = int(finite)
        """Finite gradients since it last changed."""

    def update(self, finite: bool) -> None:
        """Adjust the factor after a step, whose gradient was `finite` or not."""
        self.finite = self.finite + 1 if finite else 0
        if not finite:
            self.value /= 2
        elif self.finite == self.INTERVAL:
            self.value, self.finite = self.value * 2, 0


class Optimizer:
    """AdamW and its learning-rate schedule over named parameters; its state is saved and loaded as plain tensors.

    With `offload="optimizer"` the moments are kept in host memory, and each parameter's are moved to its device while
    it takes its step. Where forward passes are in float16 it has a loss scale.
    """

    def __init__(self, named: Mapping[str, torch.nn.Parameter], settings: Any) -> None:
        self.named = dict(named)
        self._settings = s = settings
        self.steps = 0
        chosen = {"lr": s.lr, "betas": s.betas, "weight_decay": s.weight_decay}
        if s.optimizer == "adamw":
            self._adam: Any = torch.optim.AdamW(self.named.values(), **chosen, fused=True)
        else:
            with optional("bits", f"optimizer={s.optimizer!r}"):
                from bitsandbytes.optim import AdamW8bit
            self._adam = AdamW8bit(list(self.named.values()), **chosen)
        self._scaling = LossScale()
        self._parked: Part | None = None
        """The moments, in a temporary file, while nothing uses them."""
        _OPTIMIZERS.add(self)

    def park(self) -> bool:
        """Keep large moments in a temporary file until they are used next; return whether they are large."""
        moments = self.in_memory()
        plain = all(type(tensor) is torch.Tensor for tensor in moments.values())  # those of a rehearsal have no data
        if large := plain and is_large(sum(tensor.nbytes for tensor in moments.values())):
            self._parked = Part(hold(moments, {}, StateFiles(()), None, disk=True))
            self._adam.state.clear()
        return large

    def _unpark(self) -> None:
        """Read the moments back from the temporary file, where they are parked."""
        if self._parked is not None:
            parked, self._parked = self._parked, None
            self._fill(parked)

    def apply(self, settings: Any) -> None:
        """Use other settings from here on; the moments move to host memory or to the device as the new settings say."""
        self._settings = settings
        self._unpark()
        for parameter in self.named.values():
            for kind, value in self._adam.state.get(parameter, {}).items():
                if kind != "step":
                    there = "cpu" if self._offloads else parameter.device.type
                    self._adam.state[parameter][kind] = value.to(there)

    @property
    def lr(self) -> float:
        """The learning rate of the next step."""
        s = self._settings
        return learning_rate(s.lr, self.steps, s.schedule, s.warmup_steps, s.total_steps)

    @property
    def scale(self) -> float:
        """The factor by which a loss is multiplied before its backward pass: 1 unless forward passes are in float16."""
        return self._scaling.value if self._scales else 1.0

    @property
    def _scales(self) -> bool:
        """Whether forward passes are in float16."""
        return bool(self._settings.precision(self._kind) == "float16")

    @property
    def _kind(self) -> str:
        """Kind of device that forward passes run on."""
        return next((one.device.type for one in self.named.values()), "cpu")

    def unscale(self) -> None:
        """Divide the gradients by the loss scale, a power of two, which changes no digit."""
        for parameter in self.named.values() if self.scale != 1.0 else ():
            if parameter.grad is not None:
                parameter.grad.div_(self.scale)

    def finite(self, compute: Callable[[], T]) -> T:
        """Call `compute()`, which computes gradients, and return its result. While the gradients are not finite, the
        loss scale is halved, down to 1, and `compute()` is called again; afterwards the loss scale has its old
        value."""
        scaling = self._scaling
        self._scaling = LossScale(scaling.value)
        try:
            while True:
                made = compute()
                if self.scale <= 1.0 or not self._anywhere(bool(self.broken())):
                    return made
                self._scaling.value /= 2
        finally:
            self._scaling = scaling

    def _anywhere(self, mine: bool) -> bool:
        """Whether something is true on any rank; here there is one."""
        return mine

    def zero(self) -> None:
        """Drop the gradients."""
        self._adam.zero_grad(set_to_none=True)

    def clip(self) -> float:
        """Clip the gradients to the norm `grad_clip` and return the norm before clipping. A norm that is NaN or
        infinite leaves them unchanged.

        The norm is rounded from a float64 sum, so that it is the same number however the gradients are spread over
        ranks.
        """
        parts = self._gradients().values()
        # a CPU copies in float64 what it squares: 2¹⁶ numbers at a time stay in its cache
        pieces = (piece for part in parts for piece in (part.flatten().split(1 << 16) if part.is_cpu else [part]))
        squares = [torch.linalg.vector_norm(piece, dtype=torch.float64).square() for piece in pieces]
        norm = self._total(torch.stack(squares).sum()).sqrt().float().cpu() if squares else torch.zeros(())
        scale = float((self._settings.grad_clip or math.inf) / (norm + 1e-6))
        if scale < 1:  # NaN is not
            for parameter in self.named.values():
                if parameter.grad is not None:
                    parameter.grad.mul_(scale)
        return float(norm)

    def broken(self) -> list[str]:
        """Names of the parameters whose gradient on this rank has a NaN or an infinity, in the model's order."""
        return [name for name, part in self._gradients().items() if not bool(part.isfinite().all())]

    def _gradients(self) -> dict[str, torch.Tensor]:
        """The gradients by parameter name; of sharded parameters (in the FSDP subclass) this rank's part."""
        return {name: one.grad for name, one in self.named.items() if one.grad is not None}

    def _total(self, square: torch.Tensor) -> torch.Tensor:
        """Sum `square`, the squared gradient norm of one rank, over all ranks; here there is one."""
        return square

    def step_scaled(self, norm: float) -> dict[str, Metric]:
        """Take one step, unless the gradient's `norm` is infinite in float16: that lowers the loss scale and counts as
        overflow. Returns the metrics `grad_norm`, `lr` and, in float16, `loss_scale` and `overflows`."""
        finite, scale = math.isfinite(norm), self.scale
        metrics: dict[str, Metric] = {"lr": Mean(self.lr)}
        if self._scales:
            metrics |= {"loss_scale": Mean(scale), "overflows": Count(int(not finite))}
            self._scaling.update(finite)
        if finite:
            metrics["grad_norm"] = Mean(norm)
            self.step()
        return metrics

    def step(self) -> None:
        """Take one AdamW step at the scheduled learning rate."""
        self._unpark()
        (group,) = self._adam.param_groups
        group["lr"], every = self.lr, group["params"]
        try:
            for some in [[one] for one in every] if self._offloads else self._together(every):
                group["params"] = some
                self._move(some, None)
                self._adam.step()
                self._move(some, "cpu")
        finally:
            group["params"] = every
        self.steps += 1

    def _together(self, parameters: list[torch.nn.Parameter]) -> list[list[torch.nn.Parameter]]:
        """Split parameters into lists, each of which takes torch's optimizer step in one call."""
        return [parameters]

    @property
    def _offloads(self) -> bool:
        return bool(self._settings.offload == "optimizer")

    def _move(self, parameters: Iterable[torch.nn.Parameter], device: str | None) -> None:
        """Move the moments of these parameters to a device, or with None to their parameter's; does nothing unless the
        optimizer is offloaded."""
        for parameter in parameters if self._offloads else ():
            state = self._adam.state.get(parameter, {})
            for kind in state.keys() - {"step"}:
                state[kind] = state[kind].to(device or parameter.device)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return AdamW's state without copies, as `<parameter>|exp_avg`, `<parameter>|exp_avg_sq` and
        `<parameter>|step`, and in float16 the loss scale (`SCALE`)."""
        self._unpark()
        return {**self.in_memory(), **self.scaling()}

    def scaling(self) -> dict[str, torch.Tensor]:
        """Return the loss scale and the number of finite gradients since it last changed, [2] float64, by the name `SCALE`;
        {} unless forward passes are in float16."""
        numbers = [self._scaling.value, self._scaling.finite]
        return {SCALE: torch.tensor(numbers, dtype=torch.float64)} if self._scales else {}

    def in_memory(self) -> dict[str, torch.Tensor]:
        """Return the moments and steps of `tensors` that are in memory: none while they are parked."""
        return {
            f"{name}|{key}": torch.as_tensor(value).detach()
            for name, parameter in self.named.items()
            for key, value in self._adam.state.get(parameter, {}).items()
            if key not in _MAPS
        }

    def load(self, tensors: Mapping[str, torch.Tensor], steps: int) -> None:
        """Load the state that `tensors` returned after `steps` steps. Raises `CheckpointError` (see `check`) before
        anything is changed."""
        self.check(tensors)
        self.steps, self._parked = steps, None
        self._scaling = LossScale(*tensors[SCALE].tolist()) if SCALE in tensors else LossScale()
        self._adam.state.clear()
        self._fill(tensors)

    def _fill(self, tensors: Mapping[str, torch.Tensor]) -> None:
        for key, value in tensors.items():
            name, kind = key.split("|")
            if name in self.named:
                self._adam.state[self.named[name]][kind] = self._placed(self.named[name], kind, value)
        if self._settings.optimizer == "adamw8bit":
            self._adam.fill_qmap()
            for parameter, state in self._adam.state.items():
                state["step"] = int(state["step"])
                for kind, known in _MAPS.items() if "absmax1" in state else ():
                    state[kind] = self._adam.name2qmap[known].to(parameter.device)
        self._move(self.named.values(), "cpu")

    def check(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Raise `CheckpointError` unless each parameter in `tensors` has both moments, of the parameter's shape and of this
        optimizer's kind, and its number of steps."""
        moments = ("exp_avg", "exp_avg_sq") if self._settings.optimizer == "adamw" else ("state1", "state2")
        names = dict.fromkeys(key.partition("|")[0] for key in tensors)
        for name in [name for name in names if name in self.named]:
            size = tuple(self.named[name].shape)
            wanted: dict[str, tuple[int, ...]] = {**dict.fromkeys(moments, size), "step": ()}
            first = tensors.get(f"{name}|{moments[0]}")
            if first is not None and first.dtype == torch.uint8:
                wanted |= dict.fromkeys(("absmax1", "absmax2"), (-(-first.numel() // _BLOCK),))
            for kind, shape in wanted.items():
                found = tensors.get(f"{name}|{kind}")
                if found is None or tuple(found.shape) != shape:
                    there = "no such tensor" if found is None else f"shape {tuple(found.shape)}"
                    what, do = f"the optimizer state of {name}", "load another checkpoint"
                    raise CheckpointError(what, expected=f"{name}|{kind} of shape {shape}", found=there, do=do)

    def _placed(self, parameter: Any, kind: str, value: torch.Tensor) -> torch.Tensor:
        return value.to(parameter.device, copy=True)


_OPTIMIZERS: WeakSet[Optimizer] = WeakSet()


@runtime.in_turn
def park_moments() -> None:
    """Keep the large moments of all engines of this process in temporary files until they are used next."""
    if any([optimizer.park() for optimizer in list(_OPTIMIZERS)]):  # a list: each is parked
        release()


class Account:
    """Collects the results of micro-batches, metrics and columns [rows, width]. They stay on their device until `read`,
    so that the host does not wait for it."""

    def __init__(self, rows: int, width: int) -> None:
        self._parts: list[Mapping[str, Metric | float]] = []
        self._losses: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._columns = Assembled(rows, width)

    def add(self, result: LossOutput, indices: torch.Tensor, t: int) -> None:
        """Add the result of a micro-batch that consists of the rows `indices`, trimmed to T = `t`."""
        loss: Any = result.loss.detach()
        self._parts.append({"loss": Sum(loss), **result.metrics})
        self._losses.append((loss, indices))
        self._columns.put(result.columns, indices, t)

    def infinite(self) -> tuple[float, list[int]] | None:
        """Return the first loss that is NaN or infinite and the row numbers of its micro-batch; None where all losses
        are finite."""
        values = _read([loss for loss, _ in self._losses])
        pairs = zip(values, self._losses, strict=True)
        return next(((value, rows.tolist()) for value, (_, rows) in pairs if not math.isfinite(value)), None)

    def read(self) -> StepResult:
        """Return the joined metrics of all micro-batches, and the columns on the CPU in the batch's row order."""
        return StepResult(join(_on_host(self._parts)), self._columns.read())


def _on_host(parts: Sequence[Mapping[str, Metric | float]]) -> list[dict[str, Metric | float]]:
    """Replace the tensors in metrics by plain numbers, all read in one copy from the device."""
    waiting = [one for part in parts for metric in part.values() for one in _numbers(metric) if torch.is_tensor(one)]
    read = iter(_read(waiting))

    def plain(metric: Any) -> Metric | float:
        numbers = [next(read) if torch.is_tensor(one) else one for one in _numbers(metric)]
        return type(metric)(*numbers) if isinstance(metric, Metric) else numbers[0]

    return [{key: plain(metric) for key, metric in part.items()} for part in parts]


def _read(tensors: Sequence[torch.Tensor]) -> list[float]:
    """Return the numbers of scalar tensors, all read in one copy from the device."""
    flat = [one.detach().to(tensors[0].device, torch.float64).reshape(()) for one in tensors]
    return torch.stack(flat).tolist() if flat else []


def _numbers(metric: Any) -> list[Any]:
    return list(vars(metric).values()) if isinstance(metric, Metric) else [metric]


def backward(
    cut: Iterable[tuple[torch.Tensor, DataProto, int]],
    loss_of: Callable[[DataProto], LossOutput],
    batch: DataProto,
    holds: Callable[[], LiveTensors] | None = None,
    scale: float = 1.0,
) -> StepResult:
    """Compute the gradients of a mini-batch, one micro-batch at a time; returns its metrics, and its columns in row
    order.

    `loss_of(rows)` computes a micro-batch's loss; the gradients are those of `scale` times it. Raises `NonFinite` for the first loss that is NaN or infinite, naming
    its rows. It is raised after all micro-batches, so that none waits for the device to report the loss before it.
    """
    account = Account(len(batch), batch["response_mask"].shape[1])
    for indices, rows, t in cut:
        with memory_errors("learn", rows, holds=holds):
            result = loss_of(rows)
            (result.loss * scale).backward()
        account.add(result, indices, t)
    if wrong := account.infinite():
        raise NonFinite(INFINITE_LOSS, found=wrong[0], do=f"look at rows {wrong[1][:8]} of the mini-batch")
    return account.read()
