"""Update: epochs × mini-batches (an optimizer step each) × micro-batches (memory only).

One class, used twice: for the critic and for the actor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from workbench.config import require
from workbench.dataproto import DataProto
from workbench.engines.protocol import Learned, Learner, Normalisers
from workbench.errors import NonFinite, VersionMismatch, message
from workbench.metrics import Mean, Metric, reduce
from workbench.seeds import derive
from workbench.stages.log_prob import SCORED_COLUMNS
from workbench.stages.losses import PolicyLoss, ValueLoss, loss_mask
from workbench.stages.stage import BaseStage, Outcome


class Update(BaseStage):
    """Change a learner's weights with a loss.

    `ppo_mini_batch_size` counts *prompts*, as verl's does: one optimizer step sees that many groups
    (None: the whole batch); an uneven last mini-batch is fine. `from_step` skips the update before that
    step (critic warm-up holds the actor still); the columns are written all the same. How a
    mini-batch is cut into micro-batches is the learner's business and changes no number beyond rounding.

    A batch is used once: where its `old_log_probs` (or `values`) are of another version than the learner's weights the
    update is refused, unless `allow_stale` says that learning off-policy is meant. A mini-batch with a NaN or infinite loss
    or gradient changes no weight; up to `skip_nonfinite` of them in a row are left out and counted, the next one raises
    `NonFinite` (0: the first does).
    """

    updates = True

    def __init__(
        self,
        learner: Learner,
        loss: PolicyLoss | ValueLoss,
        *,
        name: str = "update_actor",
        ppo_epochs: int = 1,
        ppo_mini_batch_size: int | None = None,
        shuffle: bool = False,
        from_step: int = 0,
        temperature: float = 1.0,
        allow_stale: bool = False,
        skip_nonfinite: int = 0,
    ) -> None:
        require(skip_nonfinite >= 0, "skip_nonfinite", expected="≥ 0", found=skip_nonfinite)
        require(ppo_epochs >= 1, "ppo_epochs", expected="≥ 1", found=ppo_epochs)
        require(
            ppo_mini_batch_size is None or ppo_mini_batch_size >= 1,
            "ppo_mini_batch_size",
            expected="≥ 1 prompts, or None for all",
            found=ppo_mini_batch_size,
        )
        self.name = name
        self._learner = learner
        self._loss = loss
        self.ppo_epochs = ppo_epochs
        self.ppo_mini_batch_size = ppo_mini_batch_size
        self.shuffle = shuffle
        self.from_step = from_step
        self.temperature = temperature
        self.allow_stale = allow_stale
        self.skip_nonfinite = skip_nonfinite
        self._in_a_row = 0
        self.reads = (*SCORED_COLUMNS, "scored", *loss.reads)
        self.writes = loss.writes

    def settings(self) -> dict[str, Any]:
        """Its own, and the loss's."""
        return {**super().settings(), "loss": type(self._loss).__name__, **self._loss.to_dict()}

    def learners(self) -> tuple[Any, ...]:
        """Whose weights it changes."""
        return (self._learner,)

    @property
    def role(self) -> str:
        """`actor` or `critic`: the prefix of its metrics."""
        return self.name.removeprefix("update_")

    def __call__(self, batch: DataProto) -> Outcome:
        """B rows in, new weights, B rows with what the last pass over each saw."""
        self._refuse_stale(batch)
        step = batch.meta_info.get("step", 0)
        if step < self.from_step:
            return Outcome(self.written(batch, self._unchanged(batch)), {f"{self.role}/skipped": Mean(1.0)})
        rows = batch.select(list(self.reads), ["uid"] if "uid" in batch else [])
        columns = self._unchanged(batch) if self.skip_nonfinite else {}
        steps: list[dict[str, float]] = []
        skipped = 0
        for epoch in range(self.ppo_epochs):
            for number, indices in enumerate(self._mini_batches(batch, epoch)):
                with seeded(derive(batch.meta_info.get("seed", 0), self.name, step, epoch, number)):
                    learned = self._learn_or_skip(rows.select_idxs(indices))
                if learned is None:
                    skipped += 1
                    continue
                steps.append(reduce([learned.metrics]))
                _scatter(columns, learned.columns, indices, len(batch))
        if steps:
            self._learner.commit()
        metrics: dict[str, Metric] = {
            (key if "/" in key else f"{self.role}/{key}"): Mean(sum(one[key] for one in steps), len(steps))
            for key in (steps[0] if steps else ())
        }
        if self.skip_nonfinite:
            metrics[f"{self.role}/nonfinite"] = Mean(float(skipped))
        return Outcome(self.written(batch, columns), metrics)

    def _refuse_stale(self, batch: DataProto) -> None:
        for name in ("old_log_probs", "values"):
            origin = batch.origins.get(name) if name in self.reads else None
            if origin is None or origin.policy_version is None or self.allow_stale:
                continue
            if origin.policy_version != self._learner.version:
                raise VersionMismatch(
                    message(
                        f"stage {self.name!r}: {name!r} of this batch is of another policy version",
                        expected=f"version {self._learner.version}, the learner's",
                        found=f"version {origin.policy_version}: the batch has been learnt from already, or is stale",
                        do="take the next batch, go back, or construct the update with allow_stale=True",
                    )
                )

    def _learn_or_skip(self, rows: DataProto) -> Learned | None:
        """None where a mini-batch was left out because its loss or gradient is not finite; no weight has changed then."""
        try:
            _refuse_nonfinite(rows, self.reads)
            learned = self._learn(rows)
        except NonFinite:
            self._in_a_row += 1
            if self._in_a_row > self.skip_nonfinite:
                raise
            return None
        self._in_a_row = 0
        return learned

    def state(self) -> dict[str, float]:
        """How many mini-batches in a row have been left out."""
        return {"nonfinite_in_a_row": float(self._in_a_row)} if self.skip_nonfinite else {}

    def load_state(self, state: Mapping[str, float]) -> None:
        """Back to what `state` gave."""
        self._in_a_row = int(state.get("nonfinite_in_a_row", 0))

    def _learn(self, rows: DataProto) -> Learned:
        mask = loss_mask(rows)
        normalisers = Normalisers(
            tokens=mask.sum().item(), sequences=float((mask.sum(-1) > 0).sum()), width=float(mask.shape[1])
        )
        return self._learner.learn(rows, self._loss, normalisers, self.temperature)

    def _mini_batches(self, batch: DataProto, epoch: int) -> list[torch.Tensor]:
        """Row indices of each optimizer step of one epoch."""
        order = torch.arange(len(batch))
        if self.shuffle:
            meta = batch.meta_info
            seed = derive(meta.get("seed", 0), f"shuffle/{self.name}", meta.get("step", 0), epoch)
            order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(seed))
        if self.ppo_mini_batch_size is None:
            return [order]
        return list(order.split(self.ppo_mini_batch_size * batch.meta_info.get("group_size", 1)))

    def _unchanged(self, batch: DataProto) -> dict[str, torch.Tensor]:
        still = {
            "new_log_probs": lambda: batch["old_log_probs"].clone(),
            "clipped": lambda: torch.zeros_like(batch["response_mask"], dtype=torch.bool),
        }
        return {name: still[name]() for name in self.writes}


def _refuse_nonfinite(rows: DataProto, names: Sequence[str]) -> None:
    """Raises `NonFinite` naming the first column, row, uid and token where a number is none; the mask decides what counts."""
    mask = loss_mask(rows).bool()
    for name in names:
        values = rows[name]
        if not values.is_floating_point():
            continue
        bad = ~values.isfinite() & (mask if values.dim() > 1 else mask.any(-1))
        if bad.any():
            row, *token = bad.nonzero()[0].tolist()
            uid = f" (uid {rows['uid'][row]})" if "uid" in rows else ""
            raise NonFinite(
                message(
                    f"column {name!r} of row {row}{uid} is no number; no step was taken",
                    found=f"{float(values[row, token[0]] if token else values[row])}"
                    + (f" at token {token[0]}" if token else ""),
                    do=f"look at what wrote {name!r}; {int(bad.sum())} places are bad in {int(bad.flatten(1).any(-1).sum() if token else bad.sum())} rows",
                )
            )


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """torch's global generators from a seed inside, as they were after: dropout is a function of the step, so that an
    update can be done again alone, bit for bit."""
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        yield


def _scatter(columns: dict[str, torch.Tensor], part: Any, indices: torch.Tensor, rows: int) -> None:
    """Write a mini-batch's [b, T] columns into the batch's [B, T] ones; later passes overwrite earlier."""
    for name, values in part.items():
        if name not in columns:
            columns[name] = torch.zeros((rows, *values.shape[1:]), dtype=values.dtype)
        columns[name][indices] = values
