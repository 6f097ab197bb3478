"""A second reading of recorded steps: it agrees with every algorithm's run, and sees what was changed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import workbench as wb
from workbench import functional as F
from workbench.cli import main
from workbench.dataproto import DataProto
from workbench.replay.audit import Audit, audit_trace
from workbench.stages import Advantage, ExactKL, LogProb, Resample, TurnScores
from workbench.steps.trace import Phase, Trace, perform

ROOT = Path(__file__).parents[2]
Make = Callable[[Any], wb.Pipeline]


def mixed(response: str) -> Any:
    """Parts, not all of them in every row, and rows that are not scored."""
    length = len(response)
    if length % 7 == 0:
        return None
    return {"score": (length % 5) / 4, "length": length / 10, **({"even": length % 2 == 0} if length % 3 else {})}


def reward(function: Any = mixed) -> wb.rewards.Reward:
    return wb.rewards.Reward(function, in_process=True)


def recipe(name: str, **settings: Any) -> Make:
    return lambda engine: wb.recipes.by_name(name)(engine, reward(), **{"group_size": 4, "max_tokens": 9, **settings})


def grpo_with(estimator: Any, *, settings: dict[str, Any] | None = None, **options: Any) -> Make:
    plain = recipe("grpo", **(settings or {}))
    return lambda engine: plain(engine).replace("advantage", Advantage(estimator, **options))


def token_baseline(estimator: Any) -> Make:
    def make(engine: Any) -> wb.Pipeline:
        pipe = recipe("grpo", kl_coef=0.0)(engine)
        pipe = pipe.replace("old_log_prob", LogProb(engine, entropy=True, sum_pi_squared=True))
        return pipe.replace("advantage", Advantage(estimator))

    return make


def measured(engine: Any) -> wb.Pipeline:
    """Exact KL beside the estimators, and rows drawn again by their reward."""
    plain = recipe("grpo", max_tokens=6)(engine).insert_after("ref_log_prob", ExactKL(engine, engine.reference()))
    return plain.replace("reward", wb.stages.Reward(reward(lambda response: float(len(response) % 3)))).insert_after(
        "advantage", Resample()
    )


tight = {"clip_ratio_low": 1e-3, "clip_ratio_high": 1e-3, "ppo_mini_batch_size": 1}
PIPELINES: dict[str, Make] = {
    "grpo": recipe("grpo", entropy_coeff=0.01),
    "grpo, mini-batches": recipe("grpo", **tight),
    "grpo, epochs": recipe("grpo", ppo_epochs=2, ppo_mini_batch_size=2, clip_ratio_high=0.01),
    "grpo, KL in the reward": grpo_with(F.grpo, kl_controller=F.AdaptiveKL(0.1, 0.01, 50), kl_type="k3"),
    "grpo, pass@k, sapo": grpo_with(F.grpo_passk, settings={"loss_mode": "sapo"}),
    "grpo, groups of one": grpo_with(F.grpo, settings={"group_size": 1, "loss_mode": "geo_mean"}, singleton="verl"),
    "grpo, dppo_tv": recipe("grpo", loss_mode="dppo_tv", kl_type="abs", **tight),
    "grpo, dppo_kl": recipe("grpo", loss_mode="dppo_kl", **tight),
    "grpo, kl_cov": recipe("grpo", loss_mode="kl_cov", kl_coef=0.0),
    "grpo, dro": recipe("grpo", loss_mode="dro", loss_agg_mode="seq-mean-token-sum", ppo_mini_batch_size=2),
    "dr_grpo": recipe("dr_grpo"),
    "ppo": recipe("ppo", group_size=2, critic_lr=1e-2, kl_coef=0.05, kl_target=1e-3, kl_horizon=20, gamma=0.9, lam=0.8),
    "ppo, critic first": recipe("ppo", group_size=1, kl_coef=0.05, critic_warmup=2, ppo_mini_batch_size=2),
    "dapo": recipe("dapo", group_size=2, overlong_buffer=4),
    "rloo": recipe("rloo", kl_type="k2"),
    "opo": recipe("opo", loss_agg_mode="seq-mean-token-mean", max_tokens=30),
    "gpg": recipe("gpg"),
    "gspo": recipe("gspo", ppo_mini_batch_size=1),
    "cispo": recipe("cispo", ppo_mini_batch_size=1),
    "remax": recipe("remax", group_size=2),
    "reinforce++": recipe("reinforce_plus_plus", gamma=0.95, kl_coef=0.1),
    "reinforce++ with a baseline": grpo_with(F.reinforce_plus_plus_baseline, settings={"kl_coef": 0.0}),
    "token baseline": token_baseline(F.optimal_token_baseline),
    "token baseline of own tokens": token_baseline(F.tir_optimal_token_baseline),
    "exact KL, resampled": measured,
}


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., wb.Run]:
    """Two steps with every trace kept."""

    def run(make: Make, model: str = "data/tiny-arith", data: str = "data/arith/train.parquet", **options: Any) -> wb.Run:
        engine = wb.engines.local(ROOT / model, lr=1e-3, device="cpu")
        rows = wb.datasets.load(ROOT / data, max_prompt_length=256)[:12]
        given = {"steps": 2, "batch_size": 3, "trace_freq": 1, "keep_traces": 9, "keep_updates": 0, **options}
        return wb.train_blocking(make(engine), rows, run=tmp_path_factory.mktemp("run") / "r", **given)

    return run


@pytest.mark.parametrize("name", PIPELINES)
def test_a_second_reading_of_every_algorithm_agrees(name: str, train: Callable[..., wb.Run]) -> None:
    run = train(PIPELINES[name])
    found = run.audit()
    assert found.agrees and not found.unaudited and found.steps == (1, 2), found
    assert len(found.columns) >= 13 and len(found.metrics) >= 65
    assert f"{len(found.columns)} columns, {len(found.metrics)} metrics agree" in repr(found)
