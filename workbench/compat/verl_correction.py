"""`read_correction`: verl's `algorithm.rollout_correction` as it stands in its scripts: a block, text of one, a preset."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from workbench.base.config import Settings, nested, require
from workbench.base.errors import SettingError, check_name

LOSS_TYPES = ("ppo_clip", "reinforce")
_WEIGHTS: Mapping[str, Mapping[str, Any]] = {
    "seq_tis": {"rollout_is": "sequence"},
    "token_tis": {"rollout_is": "token"},
    "token_icepop": {"rollout_is": "token", "rollout_is_threshold": "0.5_5.0"},
}
_GEO: Mapping[str, Any] = {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.999_1.001"}
_K3: Mapping[str, Any] = {"rollout_rs": "seq_mean_k3", "rollout_rs_threshold": 0.01}
_PPO: Mapping[str, Any] = {"bypass_mode": True}
_PG: Mapping[str, Any] = {"bypass_mode": True, "loss_type": "reinforce"}
PRESETS: Mapping[str, Mapping[str, Any]] = {
    "decoupled_token_is": _WEIGHTS["token_tis"],
    "decoupled_seq_is": _WEIGHTS["seq_tis"],
    "decoupled_token_icepop": _WEIGHTS["token_icepop"],
    "decoupled_seq_is_rs": {**_WEIGHTS["seq_tis"], "rollout_rs": "seq_sum_k1", "rollout_rs_threshold": "0.5_2.0"},
    "decoupled_geo_rs": _GEO,
    "decoupled_geo_rs_seq_tis": {**_WEIGHTS["seq_tis"], **_GEO},
    "decoupled_geo_rs_token_tis": {**_WEIGHTS["token_tis"], **_GEO},
    "decoupled_k3_rs": _K3,
    "decoupled_k3_rs_seq_tis": {**_WEIGHTS["seq_tis"], **_K3},
    "decoupled_k3_rs_token_tis": {**_WEIGHTS["token_tis"], **_K3},
    "bypass_ppo_clip": _PPO,
    "bypass_ppo_clip_geo_rs": {**_PPO, **_GEO},
    "bypass_ppo_clip_k3_rs": {**_PPO, **_K3},
    "bypass_pg_is": {**_PG, **_WEIGHTS["seq_tis"]},
    "bypass_pg_token_icepop": {**_PG, **_WEIGHTS["token_icepop"]},
    "bypass_pg_geo_rs": {**_PG, **_GEO},
    "bypass_pg_geo_rs_seq_tis": {**_PG, **_WEIGHTS["seq_tis"], **_GEO},
    "bypass_pg_geo_rs_token_tis": {**_PG, **_WEIGHTS["token_tis"], **_GEO},
    "disabled": {},
}
"""verl 0.9.1's presets, the factory methods of its `RolloutCorrectionConfig` → settings that differ from the defaults."""


@dataclass(frozen=True, kw_only=True)
class VerlCorrection(Settings):
    """verl's block `algorithm.rollout_correction`, with the defaults of its YAML; thresholds as they are written."""

    rollout_is: str | None = None
    rollout_is_threshold: str | float | tuple[float, float] | None = 2.0
    rollout_is_batch_normalize: bool = False
    rollout_rs: str | Mapping[str, Any] | None = None
    rollout_rs_threshold: str | float | tuple[float, float] | None = None
    bypass_mode: bool = False
    """The sampler's log-probs are the old ones; weights and rejection are computed in the loss."""
    loss_type: str = "ppo_clip"
    """Loss of bypass mode: `ppo_clip`, or `reinforce`, −w·A·log π."""

    def __post_init__(self) -> None:
        require(self.loss_type in LOSS_TYPES, "loss_type", expected=" or ".join(LOSS_TYPES), found=self.loss_type)

    def correction(self) -> dict[str, Any]:
        """Return the settings of weights and rejection, as arguments of `stages.CorrectionSettings`, which checks them."""
        settings = {name: value for name, value in self.to_dict().items() if name not in ("bypass_mode", "loss_type")}
        if self.rollout_is is None and self.rollout_is_threshold is None:  # null beside no weights is verl's as well
            del settings["rollout_is_threshold"]
        return settings


def read_correction(given: str | Mapping[str, Any] | None = None, **settings: Any) -> VerlCorrection:
    """Read verl's rollout correction from its block as written; `settings` replace those of the block.

    `given` is a mapping (verl's or OmegaConf's own objects, nested under `algorithm.rollout_correction`,
    `rollout_correction` or bare; dotted names, too), YAML text of one, the overrides of a command line
    (`algorithm.rollout_correction.rollout_is=token …`), or the name of a preset (`PRESETS`). Other parts of a whole
    configuration are not read. Raises `SettingError` for an unknown name, and for a value of another type.
    """
    given = {} if given is None else _preset_or_text(given) if isinstance(given, str) else given
    require(isinstance(given, Mapping), "rollout correction", expected="a block of settings or its text", found=given)
    block = _block(given)
    return VerlCorrection.from_parameters({**block, **settings})


def _preset_or_text(text: str) -> Mapping[str, Any]:
    import yaml

    name = text.strip().removeprefix("RolloutCorrectionConfig.").removesuffix("()")
    if name.isidentifier():
        check_name("preset of rollout correction", name, PRESETS)
        return PRESETS[name]
    try:
        block = yaml.safe_load(text)
        if not isinstance(block, Mapping):
            parts = [part.lstrip("+").partition("=") for part in shlex.split(text) if "rollout_correction." in part]
            block = {key: yaml.safe_load(value) for key, _, value in parts}
    except (yaml.YAMLError, ValueError) as cause:
        raise SettingError("text of a rollout_correction block", expected="YAML", found=str(cause)) from cause
    require(bool(block), "text of a rollout_correction block", expected="YAML, overrides or a preset", found=text)
    return block


def _block(settings: Mapping[str, Any]) -> dict[str, Any]:
    whole = nested(settings)
    place: Any = whole.get("algorithm", whole)
    if "algorithm" in whole or "rollout_correction" in whole:
        inside = isinstance(place, Mapping) and "rollout_correction" in place
        do = "give the block itself, or name a preset"
        require(inside, "settings of algorithm", expected="a block rollout_correction", found=place, do=do)
        place = place["rollout_correction"] or {}
    require(isinstance(place, Mapping), "rollout_correction", expected="a block of settings", found=place)
    block = dict(place)
    if str(block.get("_target_", "")).rpartition(".")[2] in ("", "RolloutCorrectionConfig"):
        block.pop("_target_", None)
    return block
