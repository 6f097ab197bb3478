"""The stage that turns rewards (with values and KL, where an estimator asks for them) into advantages [B, T]."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from workbench.base.config import parameters_of
from workbench.base.errors import NonFinite, PipelineError, boundary, describe, unknown
from workbench.base.metrics import Count, Mean, Metric
from workbench.dataproto.columns import REWARD_PREFIX
from workbench.dataproto.core import SESSION, DataProto, last_rows
from workbench.functional.losses import kl_penalty
from workbench.functional.masking import masked_mean
from workbench.functional.returns import length_adaptive_gae, length_adaptive_lam
from workbench.stages.measures import advantage_metrics, mean, row_scores, score_metrics
from workbench.stages.stage import BaseStage, Outcome

INPUTS: Mapping[str, str] = {
    "scores": "token_level_scores",
    "groups": "uid",
    "mask": "response_mask",
    "token_level_rewards": "token_level_scores",
    "rewards": "token_level_scores",
    **{
        name: name
        for name in (
            "scored",
            "nodes",
            "values",
            "old_log_probs",
            "ref_log_prob",
            "sum_pi_squared",
            "rollout_is_weights",
        )
    },
    "baselines": "reward_baselines",
    "components": "",
}
"""What an estimator may ask for, by the name of its argument (a shape suffix such as `_BT` is dropped), and the column that
it comes from. `scores` [B] is the sum of a row's token rewards, `groups` [B] int64 numbers the uids, `rewards` is
`token_level_rewards` [B, T], `nodes` [B, T] the trees of `TreeRollout`, `baselines` [B] is a greedy response's reward, `components` [B, K] are the reward's named parts
that `parts` lists. `mask` is `loss_mask` where the batch has it: without the tokens that a rollout correction rejected.
Settings follow as other arguments."""


_OF_TOKENS = {"token_level_rewards", "rewards", "values", "old_log_probs", "ref_log_prob", "sum_pi_squared", "rollout_is_weights"}  # fmt: skip


class Advantage(BaseStage):
    """Compute advantages: `Advantage(grpo)`, `Advantage(gae, gamma=1.0, lam=0.95)`, or any function of such arguments.

    The estimator is a pure function. It gets the inputs that its argument names ask for (`INPUTS`) and `settings`, and
    returns advantages [B, T], or (advantages, returns).

    Args:
        estimator: of `workbench.functional`, or your own.
        kl_controller: a `FixedKL` or `AdaptiveKL`: β·KL(policy‖reference) is subtracted from each token's reward before the
            estimator is called (verl's KL in reward), then β is updated with the batch's KL. None: no KL in the reward.
        kl_type: estimator of that KL, see `functional.kl_penalty`.
        parts: names of the K parts of the reward that an estimator gets as `components` [B, K].
        sessions: the column of objects that says which of a prompt's rows are the sequences of one episode of an agent
            (verl's multi-trajectory): only the last row of a session is compared with the group's others, and all rows of
            the session get its advantage. `session`, which a rollout writes where it is needed, is used where it is there;
            None: every row is its own session. Of estimators of whole rows; those of tokens (`gae`, `reinforce_plus_plus`,
            `remax`, the token baselines) take each row by itself, with the episode's reward at its end.
        settings: further arguments of the estimator.

    Raises `PipelineError` for a setting that the estimator does not take, or an argument that no column gives.
    """

    name = "advantage"
    writes = ("token_level_rewards", "advantages", "returns")

    def __init__(
        self,
        estimator: Callable[..., Any],
        *,
        kl_controller: Any = None,
        kl_type: str = "k1",
        parts: Sequence[str] = (),
        sessions: str | None = SESSION,
        **settings: Any,
    ) -> None:
        if isinstance(estimator, str):
            what, found, function = (
                "the estimator of Advantage",
                f"the text {estimator!r}",
                f"wb.functional.{estimator}",
            )
            do = f"pass the function itself, not its name: Advantage({function})"
            raise PipelineError(what, expected="a function", found=found, do=do)
        self.estimator = estimator
        self.sessions = sessions
        self.kl_type = kl_type
        self.estimator_settings = settings
        self.parts = tuple(parts)
        self._controller = kl_controller
        self._estimator_name = getattr(estimator, "__name__", repr(estimator))
        self._inputs = _inputs(estimator, settings)
        parameters = inspect.signature(estimator).parameters
        open_ended = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
        strange = [name for name in settings if name not in parameters and not open_ended]
        if strange:
            known = [name for name in parameters if name not in self._inputs]
            raise PipelineError(unknown(f"setting of {self._estimator_name!r}", strange[0], known))
        needed = [name for arg, name in self._inputs.items() if parameters[arg].default is inspect.Parameter.empty]
        if "components" in self._inputs.values() and not self.parts:
            do = "name them: parts=('correct', 'format')"
            raise PipelineError("the estimator reads components, but no parts of the reward are given", do=do)
        self._whole = self._compares_rows()
        self.reads = self._needed(needed)
        may = [*(INPUTS[name] for name in self._inputs.values()), self.sessions]
        self.optional = ("loss_mask", "reward", *dict.fromkeys(name for name in may if name and name not in self.reads))

    @property
    def compares_groups(self) -> bool:
        """Whether a row alone in its group gets 0."""
        parameters = inspect.signature(self.estimator).parameters
        default = parameters["singleton"].default if "singleton" in parameters else None
        return bool(self.estimator_settings.get("singleton", default) == "zero")

    def _compares_rows(self) -> bool:
        """Whether the estimator computes one advantage for each whole row. Raises `PipelineError` if it does not and
        `sessions` requires it."""
        inputs = set(self._inputs.values())
        whole = bool(inputs & {"scores", "components"}) and not inputs & _OF_TOKENS
        if self.sessions not in (None, SESSION) and not whole:
            what, do = f"sessions={self.sessions!r} with estimator {self._estimator_name}", "use grpo, rloo or such"
            raise PipelineError(what, expected="one that reads scores and nothing per token", do=do)
        return whole

    def _needed(self, inputs: Sequence[str]) -> tuple[str, ...]:
        """Return the columns that the stage must have: those for the estimator's `inputs`, the KL penalty, reward parts
        and sessions."""
        columns = ["token_level_scores", "response_mask", *(INPUTS[name] for name in inputs if INPUTS[name])]
        columns += ["old_log_probs", "ref_log_prob"] if self._controller is not None else []
        columns += [f"{REWARD_PREFIX}{part}" for part in self.parts]
        columns += [self.sessions] if self.sessions not in (None, SESSION) else []
        return tuple(dict.fromkeys(columns))

    def settings(self) -> dict[str, Any]:
        """Return the estimator, its settings and those of the KL penalty (if there is one) by name, in one flat dict."""
        kl = {"kl_type": self.kl_type, "kl_controller": repr(self._controller)} if self._controller is not None else {}
        parts = {"parts": ", ".join(self.parts)} if self.parts else {}
        sessions = {"sessions": self.sessions} if self.sessions != SESSION else {}  # as in the records of before
        return {"estimator": self.estimator, **self.estimator_settings, **kl, **parts, **sessions}

    def state(self) -> dict[str, float]:
        """Return the state for a checkpoint: the KL controller's; {} without one."""
        return self._controller.state() if self._controller is not None else {}

    def load_state(self, state: Mapping[str, float]) -> None:
        """Restore the KL controller from a dict that `state` returned."""
        if self._controller is not None:
            self._controller.load_state(dict(state))

    def with_function(self, function: Callable[..., Any]) -> Advantage:
        """Return a copy of the stage with another estimator; settings that both estimators have are kept."""
        known = parameters_of(function, f"estimator {describe(function)}", PipelineError)
        settings = {name: value for name, value in self.estimator_settings.items() if name in known}
        mine = {
            "kl_controller": self._controller,
            "kl_type": self.kl_type,
            "parts": self.parts,
            "sessions": self.sessions,
        }
        return Advantage(function, **mine, **settings)

    def __call__(self, batch: DataProto) -> Outcome:
        """Return the same B rows with advantages and returns."""
        mask = batch["loss_mask" if "loss_mask" in batch else "response_mask"]
        rewards, metrics = self._penalised(batch)
        groups = group_numbers(batch["uid"])
        inputs = {name: batch[column] for name, column in INPUTS.items() if column in batch}
        inputs |= {"scores": row_scores(batch, rewards), "groups": groups, "mask": mask}
        inputs |= {"token_level_rewards": rewards, "rewards": rewards}
        last = last_rows(batch, self.sessions) if self._whole and self.sessions in batch.columns else None
        if self.parts:
            inputs["components"] = torch.stack([batch[f"{REWARD_PREFIX}{part}"] for part in self.parts], dim=1)
        if last is not None:
            rows, place = last.unique(return_inverse=True)
            inputs = {name: column[rows] for name, column in inputs.items()}
            whole = inputs["mask"] = inputs["mask"].clone()
            whole[~whole.bool().any(-1), 0] = 1  # an empty or rejected last row still has the session's advantage
        arguments = {argument: inputs[name] for argument, name in self._inputs.items() if name in inputs}
        with boundary(f"estimator {self._estimator_name}", PipelineError):
            result = self.estimator(**arguments, **self.estimator_settings)
        advantages, returns = result if isinstance(result, tuple) else (result, result)
        self._check(advantages, inputs["mask"])
        if last is not None:  # a row's advantage is one number: that of its first token
            advantages = advantages.gather(1, whole.argmax(-1)[:, None])[place] * mask
            returns = advantages
        columns = {"token_level_rewards": rewards, "advantages": advantages, "returns": returns}
        written = self.written(batch, columns)
        return Outcome(written, metrics | self._metrics(written, mask, groups))

    def _penalised(self, batch: DataProto) -> tuple[torch.Tensor, dict[str, Metric]]:
        scores, mask = batch["token_level_scores"], batch["response_mask"]
        if self._controller is None or not len(batch):
            return scores, {}
        kl = kl_penalty(batch["old_log_probs"], batch["ref_log_prob"], self.kl_type)
        kl = torch.where(mask.bool(), kl, 0.0)
        beta = self._controller.value
        current = masked_mean(kl, mask, dim=-1).mean().item()
        if not math.isfinite(current):  # before the controller's update: it would never recover
            rows = (~kl.isfinite()).any(-1).nonzero()[:, 0].tolist()
            named = [f"{row} (uid {batch['uid'][row]})" if "uid" in batch else str(row) for row in rows[:4]]
            raise NonFinite("the KL to the reference is NaN or infinite", found=f"rows {', '.join(named)}")
        self._controller.update(current, len(batch))
        penalty = Mean.of(current, len(batch))
        return scores - beta * kl, {"actor/reward_kl_penalty": penalty, "actor/reward_kl_penalty_coeff": Mean.of(beta)}

    def _check(self, advantages: Any, mask: torch.Tensor) -> None:
        name = self._estimator_name
        if not isinstance(advantages, torch.Tensor) or advantages.shape != mask.shape:
            found = tuple(advantages.shape) if isinstance(advantages, torch.Tensor) else type(advantages).__name__
            raise PipelineError(f"advantages of {name}", expected=f"a tensor [B, T] = {tuple(mask.shape)}", found=found)
        if not advantages.isfinite().all():
            rows = sorted(set((~advantages.isfinite()).nonzero()[:, 0].tolist()))
            found = f"NaN or inf in rows {rows[:8]}"
            raise PipelineError(f"advantages of {name}", expected="finite numbers", found=found)

    def _metrics(self, batch: DataProto, mask: torch.Tensor, groups: torch.Tensor) -> dict[str, Metric]:
        sizes = torch.bincount(groups[last_rows(batch, self.sessions).unique()])
        zero = ~((batch["advantages"] != 0) & mask.bool()).any(-1)
        adaptive = {}
        if self.estimator is length_adaptive_gae:
            alpha = self.estimator_settings.get("alpha", 0.05)
            adaptive = mean("advantage/lam", length_adaptive_lam(mask.sum(-1).float(), alpha))
        return {
            **score_metrics(batch),
            **advantage_metrics(batch),
            **adaptive,
            "advantage/singleton_groups": Count(int((sizes == 1).sum())),
            "advantage/zero_rows": Count(int(zero.sum())),
            **mean("advantage/zero_share", zero),
        }


def _inputs(estimator: Callable[..., Any], settings: Mapping[str, Any]) -> dict[str, str]:
    """Map each argument of an estimator that names an input to that input's name. Raises `PipelineError` for an unknown
    argument."""
    arguments = {}
    for argument, parameter in parameters_of(estimator, f"estimator {describe(estimator)}", PipelineError).items():
        base = argument.removesuffix("_BT").removesuffix("_B")
        if argument in settings or parameter.kind is parameter.VAR_KEYWORD:
            continue
        if base in INPUTS:
            arguments[argument] = base
        elif parameter.default is parameter.empty:
            name = getattr(estimator, "__name__", repr(estimator))
            raise PipelineError(f"argument of estimator {name}: " + unknown("known input", argument, INPUTS))
    return arguments


def group_numbers(uids: Any) -> torch.Tensor:
    """Number the uids [B] in the order of their first appearance: [B] int64, from 0."""
    numbers: dict[str, int] = {}
    return torch.tensor([numbers.setdefault(uid, len(numbers)) for uid in uids], dtype=torch.long)
