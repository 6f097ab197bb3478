"""Training on one mini-batch: gradients summed over micro-batches, AdamW and its schedule."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from workbench.base.errors import NonFinite
from workbench.base.metrics import Metric, Sum, join
from workbench.dataproto.core import DataProto
from workbench.engines.local_engine.memory import memory_errors
from workbench.engines.protocol import LossOutput, StepResult

INFINITE_LOSS = "the loss is NaN or infinite; no step was taken"
INFINITE_NORM = "the gradient norm is NaN or infinite; no step was taken"


def learning_rate(base: float, step: int, schedule: str, warmup: int, total: int | None) -> float:
    """The learning rate of optimizer step `step` (from 0): linear warm-up, then constant or cosine down to 0."""
    if step < warmup:
        return base * (step + 1) / warmup
    if schedule == "constant" or not total:
        return base
    progress = min((step - warmup) / max(total - warmup, 1), 1.0)
    return base * 0.5 * (1 + math.cos(math.pi * progress))


class Optimizer:
    """AdamW and its schedule over named parameters; its state is saved and loaded as plain tensors."""

    def __init__(self, named: Mapping[str, torch.nn.Parameter], settings: Any) -> None:
        self.named = dict(named)
        self._settings = s = settings
        self.steps = 0
        self._adam = torch.optim.AdamW(self.named.values(), lr=s.lr, betas=s.betas, weight_decay=s.weight_decay)

    @property
    def lr(self) -> float:
        """The learning rate of the next step."""
        s = self._settings
        return learning_rate(s.lr, self.steps, s.schedule, s.warmup_steps, s.total_steps)

    def zero(self) -> None:
        """Drop the gradients."""
        self._adam.zero_grad(set_to_none=True)

    def clip(self) -> float:
        """Clip the gradients to `grad_clip`; returns the norm before clipping, which may be NaN or infinite."""
        norm: Any = torch.nn.utils.clip_grad_norm_(self.named.values(), self._settings.grad_clip or math.inf)
        # the shards' norm is spread over ranks
        return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)

    def step(self) -> None:
        """Take one step at the scheduled rate."""
        for group in self._adam.param_groups:
            group["lr"] = self.lr
        self._adam.step()
        self.steps += 1

    def tensors(self) -> dict[str, torch.Tensor]:
        """AdamW's state as `<parameter>|exp_avg`, `|exp_avg_sq`, `|step`: the tensors themselves, no copies."""
        return {
            f"{name}|{key}": value.detach()
            for name, parameter in self.named.items()
            for key, value in self._adam.state.get(parameter, {}).items()
        }

    def load(self, tensors: Mapping[str, torch.Tensor], steps: int) -> None:
        """Load what `tensors` returned after `steps` steps."""
        self.steps = steps
        self._adam.state.clear()
        for key, value in tensors.items():
            name, kind = key.split("|")
            if name in self.named:
                self._adam.state[self.named[name]][kind] = self._placed(self.named[name], kind, value)

    def _placed(self, parameter: Any, kind: str, value: torch.Tensor) -> torch.Tensor:
        # torch keeps `step` on the CPU, the moments beside the parameter
        return value.clone() if kind == "step" else value.to(parameter.device, copy=True)


class Account:
    """Collects the results of micro-batches: metrics, and columns [rows, width] on the CPU in the order of the rows."""

    def __init__(self, rows: int, width: int) -> None:
        self.parts: list[Mapping[str, Metric | float]] = []
        self.columns: dict[str, torch.Tensor] = {}
        self._shape = (rows, width)

    def add(self, result: LossOutput, value: float, indices: torch.Tensor, t: int) -> None:
        """Add a micro-batch of rows `indices`, trimmed to T = `t`, whose loss is `value`."""
        self.parts.append({"loss": Sum(value), **result.metrics})
        for name, part in result.columns.items():
            if name not in self.columns:
                self.columns[name] = torch.zeros(self._shape, dtype=part.dtype)
            self.columns[name][indices, :t] = part.cpu()


def backward(
    cut: Iterable[tuple[torch.Tensor, DataProto, int]], found: Callable[[DataProto], LossOutput], batch: DataProto
) -> StepResult:
    """Compute the gradients of a mini-batch, one micro-batch at a time; returns its metrics, and columns in row order.

    `found(rows)` is a micro-batch's loss. Raises `NonFinite` at the first loss that is NaN or infinite, naming its rows.
    """
    account = Account(len(batch), batch["response_mask"].shape[1])
    for indices, rows, t in cut:
        with memory_errors("learn", rows):
            result = found(rows)
            value = result.loss.item()
            if not math.isfinite(value):
                raise NonFinite(INFINITE_LOSS, found=value, do=f"look at rows {indices.tolist()[:8]} of the mini-batch")
            result.loss.backward()
        account.add(result, value, indices, t)
    return StepResult(join(account.parts), account.columns)
