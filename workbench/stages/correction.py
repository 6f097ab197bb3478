"""The stage that corrects for a sampler whose probabilities are not the trainer's: it measures, weighs and rejects."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from workbench.base.config import Settings, require
from workbench.base.errors import check_name
from workbench.base.metrics import Max, Mean, Metric, Min
from workbench.dataproto.core import DataProto, sent
from workbench.functional.correction import LEVELS, REJECTIONS, Band, corrected
from workbench.stages.stage import BaseStage, Outcome


def read_band(what: str, value: Any) -> Band:
    """Read a threshold as (lower, upper): from a number, a pair, or verl's text for either: `"2.0"`, `"0.5_5.0"`. A
    single number is the upper bound.

    Raises `SettingError`, naming `what`, unless all numbers are finite and > 0 and lower ≤ upper.
    """
    pair = isinstance(value, tuple | list) and len(value) == 2
    parts = value.split("_") if isinstance(value, str) else list(value) if pair else [value]
    numbers = [_number(part) for part in parts]
    fits = len(numbers) <= 2 and all(0 < one < math.inf for one in numbers) and numbers[0] <= numbers[-1]
    expected = "a finite number > 0, or lower and upper, '0.5_5.0' or (0.5, 5.0), with lower ≤ upper"
    require(fits, what, expected=expected, found=value)
    return (numbers[0] if len(numbers) == 2 else None), numbers[-1]


def _number(part: Any) -> float:
    """Convert a number or its text to a float; NaN for anything else (a bool, too)."""
    if isinstance(part, bool) or not isinstance(part, Real | str):
        return math.nan
    with contextlib.suppress(ValueError, OverflowError):
        return float(part)
    return math.nan


def _rejection_band(kind: str, value: Any) -> Band:
    """Read the threshold of one kind of rejection as (lower, upper).

    For k1 both bounds are set, because verl takes the reciprocal of a single upper bound as the lower one.
    """
    check_name("kind of rejection (rollout_rs)", str(kind), REJECTIONS)
    what = f"rollout_rs_threshold of {kind}"
    lower, upper = read_band(what, value)
    if kind.endswith("k1"):
        lone = "≥ 1 where it stands alone (the lower bound is then 1/upper), or lower and upper: '0.5_2.0'"
        require(lower is not None or upper >= 1, what, expected=lone, found=value)
        return (1 / upper if lower is None else lower), upper
    require(lower is None, what, expected="one upper bound: k2 and k3 are never negative", found=value)
    return None, upper


def _plain(band: Band) -> str | float:
    """Convert a band to the form in which records hold it: a number, or two as text (`0.5_5.0`)."""
    lower, upper = band
    return upper if lower is None else f"{lower}_{upper}"


def _read_rejections(kinds: Any, threshold: Any) -> dict[str, Band]:
    """Read kinds of rejection and their thresholds, from a mapping or from verl's two texts; returns kind → (lower,
    upper)."""
    if isinstance(kinds, Mapping):
        do = "the mapping has the thresholds: set rollout_rs_threshold=None with it"
        what = "rollout_rs_threshold beside a mapping of kinds"
        require(threshold is None, what, expected="None", found=threshold, do=do)
        return {kind: _rejection_band(kind, text) for kind, text in kinds.items()}
    if kinds is None:
        do = "name the kinds in rollout_rs, or leave the threshold out"
        require(threshold is None, "rollout_rs_threshold without rollout_rs", expected="None", found=threshold, do=do)
        return {}
    named = [text.strip() for text in kinds.split(",") if text.strip()] if isinstance(kinds, str) else []
    require(bool(named), "rollout_rs", expected="kinds separated by commas, a mapping or None", found=kinds)
    named = list(dict.fromkeys(named))
    parts: list[Any] = [threshold]
    if isinstance(threshold, str):
        parts = [text.strip() for text in threshold.split(",") if text.strip()]
    count = f"one threshold, or one for each of {', '.join(named)}"
    fits = threshold is not None and len(parts) in (1, len(named))
    require(fits, "rollout_rs_threshold", expected=count, found=threshold)
    return {kind: _rejection_band(kind, part) for kind, part in zip(named, parts * len(named), strict=False)}


@dataclass(frozen=True, kw_only=True)
class CorrectionSettings(Settings):
    """Settings of rollout correction, under verl's names; thresholds may be numbers, pairs, or verl's texts.

    Raises `SettingError` for an unknown level or kind, and for a threshold that is not finite, positive and ordered.
    """

    rollout_is: str | None = None
    """Level of importance weights: `token` or `sequence`; None: no weights."""
    rollout_is_threshold: str | float | tuple[float, float] = 2.0
    """Where weights are truncated; lower and upper, `"0.5_5.0"`: weights outside are 0 (IcePop)."""
    rollout_is_batch_normalize: bool = False
    """Divide the weights by their mean: over the tokens, or for `sequence` over the rows."""
    rollout_rs: str | Mapping[str, Any] | None = None
    """Kinds of rejection, separated by commas (`REJECTIONS`), or kind → threshold; None: nothing is rejected."""
    rollout_rs_threshold: str | float | tuple[float, float] | None = None
    """One threshold for all kinds, or one for each, separated by commas: `"0.5_2.0,0.01"`."""

    def __post_init__(self) -> None:
        level, normal = self.rollout_is, self.rollout_is_batch_normalize
        known = level is None or (isinstance(level, str) and level in LEVELS)
        require(known, "rollout_is", expected=f"{', '.join(LEVELS)} or None", found=level)
        require(isinstance(normal, bool), "rollout_is_batch_normalize", expected="True or False", found=normal)
        band, bands = self.weights, self.rejections  # refused here, not in a run
        plain: dict[str, Any] = {}  # records hold numbers and texts
        if not isinstance(self.rollout_is_threshold, str | int | float):
            plain["rollout_is_threshold"] = _plain(band)
        if isinstance(self.rollout_rs, Mapping):
            thresholds = ",".join(str(_plain(one)) for one in bands.values())
            plain |= {"rollout_rs": ",".join(bands) or None, "rollout_rs_threshold": thresholds or None}
        elif not isinstance(self.rollout_rs_threshold, str | int | float | None):
            plain["rollout_rs_threshold"] = _plain(read_band("rollout_rs_threshold", self.rollout_rs_threshold))
        for name, value in plain.items():
            object.__setattr__(self, name, value)

    def arguments(self) -> dict[str, Any]:
        """Return the settings as arguments of `functional.correction.corrected`."""
        lower, upper = self.weights
        given = {"level": self.rollout_is, "batch_normalize": self.rollout_is_batch_normalize}
        return {**given, "lower": lower, "upper": upper, "rejections": self.rejections}

    @property
    def weights(self) -> Band:
        """Bounds (lower, upper) of the importance weights; lower None: they are truncated at upper."""
        return read_band("rollout_is_threshold", self.rollout_is_threshold)

    @property
    def rejections(self) -> dict[str, Band]:
        """Bounds of each kind of rejection: kind → (lower, upper), as `functional.correction` takes them."""
        return _read_rejections(self.rollout_rs, self.rollout_rs_threshold)

    def apply(self, trainer: Tensor, batch: DataProto) -> tuple[dict[str, Tensor], dict[str, Metric]]:
        """Compute the columns that the settings ask for (`rollout_is_weights`, `loss_mask`) and the metrics
        `rollout_corr/*`.

        The inputs are the `trainer`'s log-probs [B, T] and the batch's `rollout_log_probs`, over its `response_mask`.
        """
        device, rollout, mask = trainer.device, batch["rollout_log_probs"], batch["response_mask"]
        if not trainer.is_cpu:  # the metrics ask for dozens of numbers: the columns come to the host in one copy
            trainer, rollout, inside = torch.stack([trainer, rollout, mask.to(trainer.dtype)]).cpu()
            mask = inside.to(mask.dtype)
        correction = corrected(trainer, rollout, mask, **self.arguments())
        columns = {"rollout_is_weights": correction.weights, "loss_mask": correction.mask if self.rollout_rs else None}
        metrics: dict[str, Metric] = {}
        for name, value in correction.metrics.items():
            kinds: dict[str, Metric] = {"max": Max(value.value), "min": Min(value.value)}
            metrics[f"rollout_corr/{name}"] = kinds.get(value.kind, Mean.of(value.value, value.weight))
        return {name: sent(value, device) for name, value in columns.items() if value is not None}, metrics

    @property
    def writes(self) -> tuple[str, ...]:
        """Names of the columns that the settings ask for."""
        return ("rollout_is_weights",) * (self.rollout_is is not None) + ("loss_mask",) * (self.rollout_rs is not None)


class RolloutCorrection(BaseStage):
    """Measure the gap between sampler and trainer every step; weight or reject tokens and rows if the settings say so.

    verl's `algorithm.rollout_correction`, decoupled: from `old_log_probs` and `rollout_log_probs` over `response_mask`.
    Without arguments it only measures. Formulas and names of metrics: `functional.correction`. The settings are those of
    `CorrectionSettings`; `recipes.with_rollout_correction` puts the stage where it belongs and sets the loss.

    Args:
        rollout_is: `token` or `sequence`: write importance weights as `rollout_is_weights` [B, T], which a
            `PolicyLoss(rollout_is=True)` multiplies with. They are those of the whole mask, whatever is rejected.
        rollout_is_threshold: where weights are truncated; lower and upper, `"0.5_5.0"`: outside they are 0.
        rollout_is_batch_normalize: divide the weights by their mean over the batch's tokens, or rows for `sequence`.
        rollout_rs: kinds of rejection, `"token_k1,seq_max_k2"`, or kind → threshold: write `loss_mask` [B, T], which is
            `response_mask` (or the `loss_mask` there is) without the rejected tokens. `response_mask` stays as it is.
        rollout_rs_threshold: one threshold for all kinds, or one for each: `"0.5_2.0,0.01"`.
        bypass_mode: write the sampler's log-probs as the old ones, so that no old-log-prob stage is needed, and nothing
            else: weights, rejection and metrics then come from `PolicyLoss(bypass=CorrectionSettings(…))`, which knows
            the trainer's. Other settings beside it are refused.
    """

    name = "rollout_correction"

    def __init__(
        self,
        *,
        rollout_is: str | None = None,
        rollout_is_threshold: str | float | tuple[float, float] = 2.0,
        rollout_is_batch_normalize: bool = False,
        rollout_rs: str | Mapping[str, Any] | None = None,
        rollout_rs_threshold: str | float | tuple[float, float] | None = None,
        bypass_mode: bool = False,
    ) -> None:
        self.correction = CorrectionSettings(
            rollout_is=rollout_is,
            rollout_is_threshold=rollout_is_threshold,
            rollout_is_batch_normalize=rollout_is_batch_normalize,
            rollout_rs=rollout_rs,
            rollout_rs_threshold=rollout_rs_threshold,
        )
        self.bypass_mode = bypass_mode
        if bypass_mode:
            what, columns = "bypass_mode of the stage", " and ".join(self.correction.writes)
            do = "take recipes.with_rollout_correction(pipeline, …), or give them to PolicyLoss(bypass=…)"
            expected = "neither weights nor rejection: both need the trainer's log-probs, which the loss has"
            require(not columns, what, expected=expected, found=columns, do=do)
        self.reads = ("rollout_log_probs", "response_mask") + (("old_log_probs",) if not bypass_mode else ())
        self.writes = ("old_log_probs",) if bypass_mode else self.correction.writes
        self.optional = ("loss_mask",) if "loss_mask" in self.writes else ()

    def settings(self) -> dict[str, Any]:
        """Return the settings of the correction, and `bypass_mode`, by name, as numbers and texts."""
        return {**self.correction.to_dict(), "bypass_mode": self.bypass_mode}

    def __call__(self, batch: DataProto) -> Outcome:
        """Return the same B rows with importance weights and the loss mask, where the settings ask for them."""
        if self.bypass_mode:
            return Outcome(self.written(batch, {"old_log_probs": batch["rollout_log_probs"].clone()}))
        columns, metrics = self.correction.apply(batch["old_log_probs"], batch)
        if "loss_mask" in columns and "loss_mask" in batch:  # what a tree's rows share is left to one of them
            columns["loss_mask"] = columns["loss_mask"] * batch["loss_mask"]
        return Outcome(self.written(batch, columns), metrics)
