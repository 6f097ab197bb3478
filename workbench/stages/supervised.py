"""Losses of what the data says, without rewards: cross-entropy on target tokens, Bradley–Terry on preference pairs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from workbench.base.config import Settings, require
from workbench.base.errors import PipelineError, SettingError, unknown
from workbench.base.metrics import Mean
from workbench.dataproto.columns import MARGIN
from workbench.dataproto.core import DataProto
from workbench.engines.protocol import LossCounts, LossOutput
from workbench.functional.losses import AGGREGATIONS, aggregate, bradley_terry
from workbench.functional.masking import masked_sum
from workbench.stages.update import loss_mask


def _mean(total: Tensor, count: Any) -> Mean:
    number: Any = total.detach().double()  # the learner reads those of all micro-batches at once
    return Mean(number, count)


@dataclass(frozen=True, kw_only=True)
class CrossEntropy(Settings):
    """The supervised loss −log π of each target token, aggregated over the whole mini-batch (global counts)."""

    loss_agg_mode: str = "token-mean"
    """How token losses become one number: see `functional.aggregate`."""

    supervised: ClassVar[bool] = True
    reads: ClassVar[tuple[str, ...]] = ()
    """No column beside the inputs of a forward pass."""
    writes: ClassVar[tuple[str, ...]] = ("new_log_probs",)
    """Columns [B, T] that an update with this loss writes."""
    want: ClassVar[tuple[str, ...]] = ("log_probs",)
    """Model outputs that the loss needs."""

    def __post_init__(self) -> None:
        if self.loss_agg_mode not in AGGREGATIONS:
            raise SettingError(unknown("loss_agg_mode", self.loss_agg_mode, AGGREGATIONS))

    def __call__(self, outputs: Mapping[str, Tensor], rows: DataProto, loss_counts: LossCounts) -> LossOutput:
        """The loss of one micro-batch, the mean −log π of its target tokens (`nll`, nats), and the column of `writes`."""
        mask, found = loss_mask(rows), outputs["log_probs"]
        tokens, sequences, width = loss_counts.tokens, loss_counts.sequences, loss_counts.width
        loss = aggregate(-found, mask, self.loss_agg_mode, tokens=tokens, sequences=sequences, scale=width)
        kept = (found * rows["response_mask"]).detach()
        return LossOutput(
            loss, {"actor/nll": _mean(masked_sum(-found, mask), mask.sum().double())}, {"new_log_probs": kept}
        )


@dataclass(frozen=True, kw_only=True)
class BradleyTerry(Settings):
    """−log σ(r⁺ − r⁻ − margin) + c·(r⁺ + r⁻)², the mean over pairs, with r⁺ the reward of a pair's chosen answer.

    Rows are pairs: 2i the chosen answer, 2i + 1 the rejected one, as `stages.Pairs` writes them. The reward is what the model
    gives at the row's own token. Bradley and Terry 1952; the margin: Touvron et al. 2023, https://arxiv.org/abs/2307.09288;
    the centre: Eisenstein et al. 2023, https://arxiv.org/abs/2312.09244.
    """

    center_rewards_coefficient: float = 0.0
    """c, which keeps rewards around 0: from pairs alone a reward is known up to a constant. TRL suggests 0.01."""

    supervised: ClassVar[bool] = True
    reads: ClassVar[tuple[str, ...]] = (MARGIN,)
    """Columns that the loss needs, beside the inputs of a forward pass."""
    writes: ClassVar[tuple[str, ...]] = ("values",)
    """Columns [B, T] that an update with this loss writes: each row's reward."""
    want: ClassVar[tuple[str, ...]] = ("values",)
    """Model outputs that the loss needs."""

    def __post_init__(self) -> None:
        c = self.center_rewards_coefficient
        require(c >= 0, "center_rewards_coefficient", expected="≥ 0", found=c)

    def __call__(self, outputs: Mapping[str, Tensor], rows: DataProto, loss_counts: LossCounts) -> LossOutput:
        """The loss of whole pairs, their metrics (means over pairs; equal rewards are half right), and the rewards."""
        if len(rows) % 2:
            do = "take rows as stages.Pairs writes them, and an engine that does not split pairs: engines.reward_model(…)"
            raise PipelineError("rows of preference pairs", expected="two a pair", found=len(rows), do=do)
        scores = outputs["values"] * loss_mask(rows)
        chosen, rejected = scores.sum(-1).view(-1, 2).unbind(-1)
        losses = bradley_terry(chosen, rejected, rows[MARGIN][::2], self.center_rewards_coefficient)
        right = (chosen > rejected).double() + 0.5 * (chosen == rejected).double()
        each = {
            "bt_loss": losses,
            "accuracy": right,
            "margin": chosen - rejected,
            "chosen": chosen,
            "rejected": rejected,
        }
        metrics = {f"reward_model/{name}": _mean(one.sum(), float(len(one))) for name, one in each.items()}
        return LossOutput(losses.sum() / (loss_counts.sequences / 2), metrics, {"values": scores.detach()})
