"""Advantage: rewards (and values, and KL) become one number per response token."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from workbench.columns import REWARD_PREFIX
from workbench.dataproto import DataProto
from workbench.errors import NonFinite, PipelineError, message, unknown
from workbench.functional import explained_variance, kl_penalty, masked_mean
from workbench.metrics import Count, Mean, Metric
from workbench.stages.stage import BaseStage, Outcome, spread

INPUTS: Mapping[str, tuple[str, ...]] = {
    "scores": ("token_level_scores",),
    "groups": ("uid",),
    "mask": ("response_mask",),
    "scored": ("scored",),
    "token_level_rewards": ("token_level_scores",),
    "rewards": ("token_level_scores",),
    "values": ("values",),
    "old_log_probs": ("old_log_probs",),
    "ref_log_prob": ("ref_log_prob",),
    "sum_pi_squared": ("sum_pi_squared",),
    "baselines": ("reward_baselines",),
    "components": (),
}
"""What an estimator may ask for, by the name of its argument (a shape suffix such as `_BT` is dropped),
and the columns it comes from. `scores` [B] is the sum of a row's token rewards, `groups` [B] int64
numbers the uids, `rewards` is `token_level_rewards` [B, T], `baselines` [B] is a greedy response's reward, `components`
[B, K] are the reward's named parts that `parts` lists. Settings follow as other arguments."""


class Advantage(BaseStage):
    """`Advantage(grpo)`, `Advantage(gae, gamma=1.0, lam=0.95)`, or any function of the same arguments.

    The estimator is a pure function; it gets the inputs that its argument names ask for (`INPUTS`) and
    the settings given here, and returns advantages [B, T], or (advantages, returns). With
    `kl_controller` a penalty β·KL(policy‖reference) is taken off every token's reward first and the
    controller is told the batch's KL (verl's KL in reward); its β is state of this stage.
    """

    name = "advantage"
    writes = ("token_level_rewards", "advantages", "returns")

    def __init__(
        self,
        estimator: Callable[..., Any],
        *,
        kl_controller: Any = None,
        kl_kind: str = "k1",
        parts: Sequence[str] = (),
        **settings: Any,
    ) -> None:
        self.estimator = estimator
        self.kl_kind = kl_kind
        self.estimator_settings = settings
        self.parts = tuple(parts)
        self._controller = kl_controller
        self._asked = _asked(estimator, settings)
        parameters = inspect.signature(estimator).parameters
        open_ended = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values())
        strange = [name for name in settings if name not in parameters and not open_ended]
        if strange:
            known = [name for name in parameters if name not in self._asked]
            raise PipelineError(unknown(f"setting of {getattr(estimator, '__name__', estimator)!r}", strange[0], known))
        needed = [name for arg, name in self._asked.items() if parameters[arg].default is inspect.Parameter.empty]
        columns = [column for name in needed for column in INPUTS[name]]
        if kl_controller is not None:
            columns += ["old_log_probs", "ref_log_prob"]
        columns += [f"{REWARD_PREFIX}{part}" for part in self.parts]
        if "components" in self._asked and not self.parts:
            raise PipelineError(
                message("the estimator compares parts of the reward", do="name them: parts=('correct', 'format')")
            )
        self.reads = tuple(dict.fromkeys(["token_level_scores", "response_mask", "reward", *columns]))

    def settings(self) -> dict[str, Any]:
        """The estimator and its settings flat, and the KL's where there is one."""
        plain: dict[str, Any] = {"estimator": self.estimator, **self.estimator_settings}
        if self._controller is not None:
            plain |= {"kl_kind": self.kl_kind, "kl_controller": repr(self._controller)}
        if self.parts:
            plain["parts"] = ", ".join(self.parts)
        return plain

    def state(self) -> dict[str, float]:
        """The KL controller's."""
        return self._controller.state() if self._controller is not None else {}

    def load_state(self, state: Mapping[str, float]) -> None:
        """Back to what `state` gave."""
        if self._controller is not None:
            self._controller.load_state(dict(state))

    def with_function(self, function: Callable[..., Any]) -> Advantage:
        """The same stage around another estimator, with those of the settings that it takes."""
        known = inspect.signature(function).parameters
        settings = {name: value for name, value in self.estimator_settings.items() if name in known}
        return Advantage(function, kl_controller=self._controller, kl_kind=self.kl_kind, parts=self.parts, **settings)

    def __call__(self, batch: DataProto) -> Outcome:
        """B rows in, B rows with advantages and returns out."""
        mask = batch["response_mask"]
        rewards, metrics = self._penalised(batch)
        groups = group_numbers(batch["uid"])
        inputs = {
            "scores": rewards.sum(-1) + self._unplaced(batch),
            "groups": groups,
            "mask": mask,
            "token_level_rewards": rewards,
            "rewards": rewards,
        }
        for name in ("scored", "values", "old_log_probs", "ref_log_prob", "sum_pi_squared"):
            if name in batch:
                inputs[name] = batch[name]
        if "reward_baselines" in batch:
            inputs["baselines"] = batch["reward_baselines"]
        if self.parts:
            inputs["components"] = torch.stack([batch[f"{REWARD_PREFIX}{part}"] for part in self.parts], dim=1)
        given = {argument: inputs[name] for argument, name in self._asked.items() if name in inputs}
        result = self.estimator(**given, **self.estimator_settings)
        advantages, returns = result if isinstance(result, tuple) else (result, result)
        self._check(advantages, mask)
        columns = {"token_level_rewards": rewards, "advantages": advantages, "returns": returns}
        metrics |= self._metrics(batch, columns, groups)
        return Outcome(self.written(batch, columns), metrics)

    def _penalised(self, batch: DataProto) -> tuple[torch.Tensor, dict[str, Metric]]:
        scores, mask = batch["token_level_scores"], batch["response_mask"]
        if self._controller is None:
            return scores, {}
        kl = kl_penalty(batch["old_log_probs"], batch["ref_log_prob"], self.kl_kind)
        kl = torch.where(mask.bool(), kl, 0.0)
        beta = self._controller.value
        current = masked_mean(kl, mask, dim=-1).mean().item()
        if not math.isfinite(current):  # before the controller is told: it would never recover
            rows = (~kl.isfinite()).any(-1).nonzero()[:, 0].tolist()
            named = [f"{row} (uid {batch['uid'][row]})" if "uid" in batch else str(row) for row in rows[:4]]
            raise NonFinite(message("the KL to the reference is no number", found=f"rows {', '.join(named)}"))
        self._controller.update(current, len(batch))
        metrics: dict[str, Metric] = {
            "actor/reward_kl_penalty": Mean.of(current, len(batch)),
            "actor/reward_kl_penalty_coeff": Mean.of(beta),
        }
        return scores - beta * kl, metrics

    @staticmethod
    def _unplaced(batch: DataProto) -> torch.Tensor:
        """The reward of rows that had no token to carry it (empty responses): it still counts in its group."""
        return batch["reward"] * (batch["response_mask"].sum(-1) == 0)

    def _check(self, advantages: Any, mask: torch.Tensor) -> None:
        name = getattr(self.estimator, "__name__", repr(self.estimator))
        if not isinstance(advantages, torch.Tensor) or advantages.shape != mask.shape:
            found = tuple(advantages.shape) if isinstance(advantages, torch.Tensor) else type(advantages).__name__
            raise PipelineError(message(f"advantages of {name}", expected=f"[B, T] = {tuple(mask.shape)}", found=found))
        if not advantages.isfinite().all():
            rows = sorted(set((~advantages.isfinite()).nonzero()[:, 0].tolist()))
            raise PipelineError(
                message(f"advantages of {name}", expected="finite numbers", found=f"NaN or inf in rows {rows[:8]}")
            )

    def _metrics(self, batch: DataProto, columns: dict[str, torch.Tensor], groups: torch.Tensor) -> dict[str, Metric]:
        mask = batch["response_mask"].bool()
        sizes = torch.bincount(groups)
        zero = ~((columns["advantages"] != 0) & mask).any(-1)
        own = mask.reshape(-1).nonzero().squeeze(-1)
        advantages = spread("critic/advantages", columns["advantages"].reshape(-1)[own])
        if columns["returns"] is columns["advantages"]:
            returns = {name.replace("advantages", "returns"): value for name, value in advantages.items()}
        else:
            returns = spread("critic/returns", columns["returns"].reshape(-1)[own])
        metrics: dict[str, Metric] = {
            **spread("critic/rewards", columns["token_level_rewards"].sum(-1)),
            **advantages,
            **returns,
            "advantage/singleton_groups": Count(int((sizes == 1).sum())),
            "advantage/zero_rows": Count(int(zero.sum())),
            "advantage/zero_share": Mean.of(zero.double().mean().item(), len(zero)),
        }
        if "values" in batch and int(mask.sum()) > 1:
            explained = explained_variance(batch["values"], columns["returns"], mask)
            metrics["critic/vf_explained_var"] = Mean.of(float(explained))
        return metrics


def _asked(estimator: Callable[..., Any], settings: Mapping[str, Any]) -> dict[str, str]:
    """Argument → input name for every argument that names an input; refuses what nobody can give."""
    asked = {}
    for argument, parameter in inspect.signature(estimator).parameters.items():
        base = argument
        for suffix in ("_BT", "_B"):
            base = base.removesuffix(suffix)
        if argument in settings or parameter.kind is parameter.VAR_KEYWORD:
            continue
        if base in INPUTS:
            asked[argument] = base
        elif parameter.default is parameter.empty:
            name = getattr(estimator, "__name__", repr(estimator))
            raise PipelineError(f"estimator {name}: " + unknown("input of an estimator", argument, INPUTS))
    return asked


def group_numbers(uids: Any) -> torch.Tensor:
    """[B] int64: 0 for the rows of the first uid seen, 1 for the next, …"""
    numbers: dict[str, int] = {}
    return torch.tensor([numbers.setdefault(uid, len(numbers)) for uid in uids], dtype=torch.long)
