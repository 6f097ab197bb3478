"""One optimizer step on one mini-batch, and the optimizer's state as plain tensors."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from workbench import background
from workbench.config import Settings
from workbench.dataproto import DataProto
from workbench.engines.memory import memory_errors
from workbench.engines.protocol import Learned, Loss, Normalisers
from workbench.engines.scoring import micro_batches, outputs, trimmed
from workbench.errors import CheckpointError, NonFinite, message
from workbench.metrics import Mean, Metric, Sum, join


def learning_rate(base: float, step: int, schedule: str, warmup: int, total: int | None) -> float:
    """The rate of optimizer step `step` (from 0): linear warm-up, then constant or cosine down to 0."""
    if step < warmup:
        return base * (step + 1) / warmup
    if schedule == "constant" or not total:
        return base
    progress = min((step - warmup) / max(total - warmup, 1), 1.0)
    return base * 0.5 * (1 + math.cos(math.pi * progress))


class Optimizer:
    """AdamW and its schedule over named parameters; state goes in and out as plain tensors."""

    def __init__(self, named: Mapping[str, torch.nn.Parameter], settings: Any) -> None:
        self.named = dict(named)
        self._settings = settings
        self.steps = 0
        self._adam = torch.optim.AdamW(
            self.named.values(), lr=settings.lr, betas=settings.betas, weight_decay=settings.weight_decay
        )

    @property
    def lr(self) -> float:
        """The rate of the next step."""
        s = self._settings
        return learning_rate(s.lr, self.steps, s.schedule, s.warmup_steps, s.total_steps)

    def zero(self) -> None:
        """Forget the gradients."""
        self._adam.zero_grad(set_to_none=True)

    def clip(self) -> float:
        """Clip the gradients to `grad_clip`; the norm before that (NaN and infinity come back as they are)."""
        limit = self._settings.grad_clip or math.inf
        return float(torch.nn.utils.clip_grad_norm_(self.named.values(), limit))

    def step(self) -> None:
        """One step at the scheduled rate."""
        for group in self._adam.param_groups:
            group["lr"] = self.lr
        self._adam.step()
        self.steps += 1

    def tensors(self) -> dict[str, torch.Tensor]:
        """`<parameter>|exp_avg`, `|exp_avg_sq`, `|step`: copies on the CPU."""
        return {
            f"{name}|{key}": value.detach().cpu().clone()
            for name, parameter in self.named.items()
            for key, value in self._adam.state.get(parameter, {}).items()
        }

    def load(self, tensors: Mapping[str, torch.Tensor], steps: int) -> None:
        """Back to what `tensors` gave after `steps` steps."""
        self.steps = steps
        self._adam.state.clear()
        for name, parameter in self.named.items():
            mine = {key.split("|")[1]: value for key, value in tensors.items() if key.split("|")[0] == name}
            if mine:
                # torch keeps `step` on the CPU, the moments beside the parameter
                self._adam.state[parameter] = {
                    key: value.clone() if key == "step" else value.to(parameter.device, copy=True)
                    for key, value in mine.items()
                }


def backward(
    model: Any,
    head: torch.nn.Module | None,
    batch: DataProto,
    loss: Loss,
    normalisers: Normalisers,
    *,
    temperature: float,
    budget: int,
    packed: bool,
) -> Learned:
    """Gradients of the whole mini-batch, micro-batch by micro-batch; metrics joined, columns in row order.

    Raises `NonFinite` at the first micro-batch whose loss is NaN or infinite, naming its rows.
    """
    parts: list[Mapping[str, Metric | float]] = []
    columns: dict[str, torch.Tensor] = {}
    width = batch["response_mask"].shape[1]
    for indices in micro_batches(batch, budget, packed):
        background.check()
        rows, t = trimmed(batch.select_idxs(indices))
        with memory_errors("learn", f"{len(rows)} rows × {rows['input_ids'].shape[1]} tokens"):
            rows = rows.to(model.device)
            result = loss(outputs(model, head, rows, loss.want, temperature, packed), rows, normalisers)
            value = result.loss.item()
            if not math.isfinite(value):
                raise NonFinite(
                    message(
                        "the loss is not finite; no step was taken",
                        found=value,
                        do=f"look at rows {indices.tolist()[:8]}",
                    )
                )
            result.loss.backward()
        parts.append({"loss": Sum(value), **result.metrics})
        for name, part in result.columns.items():
            if name not in columns:
                columns[name] = torch.zeros(len(batch), width, dtype=part.dtype)
            columns[name][indices, :t] = part.cpu()
    return Learned(join(parts), columns)


def row_gradient_norms(backward_row: Any, optimizer: Optimizer, batch: DataProto) -> torch.Tensor:
    """[B] gradient norm of each row's share of the loss, one backward pass a row."""
    norms = []
    for row in range(len(batch)):
        optimizer.zero()
        backward_row(batch.slice(row, row + 1))
        gradients = [p.grad.norm() for p in optimizer.named.values() if p.grad is not None]
        norms.append(torch.stack(gradients).norm().item() if gradients else 0.0)
    optimizer.zero()
    return torch.tensor(norms)


def finish(optimizer: Optimizer, learned: Learned) -> Learned:
    """Clip and step. Raises `NonFinite`, with nothing changed, where the gradient norm is not finite."""
    norm = optimizer.clip()
    if not math.isfinite(norm):
        optimizer.zero()
        raise NonFinite(message("the gradient norm is not finite; no step was taken", found=norm))
    lr = optimizer.lr
    optimizer.step()
    optimizer.zero()
    return Learned({**learned.metrics, "grad_norm": Mean(norm), "lr": Mean(lr)}, learned.columns)


def save_optimizer(optimizer: Optimizer | None, settings: Settings, version: int, path: Path) -> None:
    """`optimizer.safetensors` and `engine.json` in a folder."""
    from safetensors.torch import save_file

    path.mkdir(parents=True, exist_ok=True)
    tensors = optimizer.tensors() if optimizer is not None else {}
    save_file(tensors, str(path / "optimizer.safetensors"))
    record = {"version": version, "steps": optimizer.steps if optimizer is not None else 0}
    (path / "engine.json").write_text(json.dumps({**record, "settings": settings.to_dict()}, default=str))


def load_optimizer(optimizer: Optimizer, path: Path) -> int:
    """What `save_optimizer` wrote, or a sharded engine, back into an optimizer; the version."""
    from safetensors.torch import load_file

    record = json.loads((path / "engine.json").read_text()) if (path / "engine.json").is_file() else None
    if record is not None and "adam_steps" in record:
        from workbench.engines.sharded_files import read_optimizer  # torch's sharding, half a second of imports

        tensors, record = read_optimizer(path)
        optimizer.load(tensors, record["steps"])
        return int(record["version"])
    if record is None or not (path / "optimizer.safetensors").is_file():
        raise CheckpointError(
            message(f"no optimizer state at {path}", expected="engine.json and optimizer.safetensors")
        )
    optimizer.load(load_file(str(path / "optimizer.safetensors")), record["steps"])
    return int(record["version"])
