"""D7: a sampler whose policy is not the one that learns: other weights, or older ones. Measured in every step; a limit stops."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import workbench as wb
from workbench.engines import Request, Sample
from workbench.engines.paired import paired
from workbench.stages import OffPolicy

KL, GAP, LAG = "training/rollout_kl", "training/rollout_probs_diff_mean", "training/policy_lag/max"
FAR = "training/rollout_log_probs_diff_max"


class Other:
    """A sampler of its own that takes every push, or every so many, and takes it with noise."""

    def __init__(self, path: str, *, noise: float = 0.0, every: int = 1) -> None:
        self.engine = wb.engines.local(path, device="cpu")
        self.tokenizer = self.engine.tokenizer
        self.noise, self.every = noise, every
        self.stale = (
            every > 1
        )  # a pair refuses rows of weights that were not the last pushed, unless that was agreed to

    async def sample(self, request: Request) -> Sample:
        return await self.engine.sample(request)

    def load_weights(self, weights: dict[str, torch.Tensor], version: int) -> None:
        if version % self.every:
            return
        random = torch.Generator().manual_seed(version)
        moved = {
            name: one + self.noise * one.std() * torch.randn(one.shape, generator=random) if one.ndim > 1 else one
            for name, one in weights.items()
        }
        self.engine.load_weights(moved, version)

    def describe(self) -> dict[str, Any]:
        return {"noise": self.noise, "every": self.every}


def run(
    tiny: str, path: Path, limit: OffPolicy | None, steps: int = 4, max_rollout_kl: float | None = 0.2, **sampler: Any
) -> tuple[wb.Run, Any]:
    learner = wb.engines.local(tiny, lr=3e-3, device="cpu")
    pipe = wb.recipes.grpo(paired(learner, Other(tiny, **sampler)), group_size=2, max_tokens=6)
    rows = wb.rows("data/arith/train.parquet", max_prompt_length=256, limit=16)
    settings: dict[str, Any] = {"steps": steps, "batch_size": 4, "run": path, "trace_freq": 0, "trackers": ()}
    settings["max_rollout_kl"] = max_rollout_kl
    return wb.train_blocking(pipe, rows, break_if=limit, **settings), learner


@pytest.mark.slow
def test_D7_one_policy_is_measured_as_one(tiny: str, tmp_path: Path) -> None:
    found, _ = run(tiny, tmp_path / "r", OffPolicy(kl=1e-8, gap=1e-5, lag=0))
    rows = [row for row in found.rows if row["training/global_step"] > 0]
    assert found.stopped is None and len(rows) == 4
    for row in rows:
        assert 0 <= row[KL] < 1e-9 and row[GAP] < 1e-6 and row[FAR] < 1e-4 and row[LAG] == 0


@pytest.mark.slow
def test_D7_perturbed_weights_are_measured_and_stop_before_the_update(
    tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched, _ = run(tiny, tmp_path / "watched", None, steps=3, noise=0.1)
    for row in watched.rows[-3:]:
        assert row[KL] > 1e-3 and row[GAP] > 1e-3 and row[FAR] > 0.02 and row[LAG] == 0
    found, learner = run(tiny, tmp_path / "r", OffPolicy(kl=1e-3), noise=0.1)
    assert found.stopped is not None and "▶ update_actor" in repr(found.stopped) and learner.version == 0
    fresh = wb.engines.local(tiny, device="cpu").snapshot()["weights"]
    assert all(torch.equal(one, fresh[name]) for name, one in learner.snapshot()["weights"].items()), (
        "nothing was learnt"
    )
    told = json.loads((tmp_path / "r" / "summary.json").read_text())["stopped"]
    assert told.startswith("break_if at step 1: training/rollout_kl 0.") and told.endswith(", limit 0.001")
    monkeypatch.setenv("WORKBENCH_JOB", "1")
    with pytest.raises(wb.RunStopped, match=r"at step 1.*before its update; training/rollout_kl 0\.\d+, limit"):
        run(tiny, tmp_path / "job", OffPolicy(kl=1e-3), noise=0.1)


@pytest.mark.slow
def test_D7_other_weights_stop_a_run_that_asked_for_nothing(tiny: str, tmp_path: Path) -> None:
    with pytest.raises(wb.WorkbenchError) as caught:
        run(tiny, tmp_path / "r", None, noise=2.0)
    assert str(caught.value).startswith(
        f"the sampler does not have the policy that learns: {KL} of step 1; expected ≤ 0.2 nats per token; found "
    )
    assert "max_rollout_kl" in str(caught.value)
    stopped = wb.load_run(tmp_path / "r")
    assert stopped.rows[-1][KL] > 0.2 and stopped.checkpoints == [1], "the step is on disk, with what it measured"
    assert "the sampler does not have the policy" in stopped.summary["stopped"]
    assert len(run(tiny, tmp_path / "off", None, noise=2.0, steps=2, max_rollout_kl=None)[0].rows) == 2


@pytest.mark.slow
def test_D7_a_healthy_bfloat16_learner_is_far_below_the_limit(tiny: str, tmp_path: Path) -> None:
    learner = wb.engines.local(tiny, lr=1e-4, device="cpu", dtype="bfloat16")
    pipe = wb.recipes.grpo(paired(learner, Other(tiny)), group_size=2, max_tokens=6)
    rows = wb.rows("data/arith/train.parquet", max_prompt_length=256)[:8]
    found = wb.train_blocking(pipe, rows, steps=1, batch_size=4, run=tmp_path / "r", trace_freq=0, trackers=())
    assert 1e-9 < found.rows[-1][KL] < 0.01


@pytest.mark.slow
def test_D7_rows_of_older_weights_are_counted_in_versions_and_stop(tiny: str, tmp_path: Path) -> None:
    watched, _ = run(tiny, tmp_path / "watched", None, steps=4, every=3)
    rows = [row for row in watched.rows if row["training/global_step"] > 0]
    assert [row[LAG] for row in rows] == [0, 1, 2, 0], "pushes of versions 1 and 2 were missed"
    assert rows[0][KL] < 1e-9 and rows[2][KL] > rows[3][KL] and rows[2][KL] > 1e-6 and rows[3][KL] < 1e-9
    found, learner = run(tiny, tmp_path / "r", OffPolicy(kl=None, gap=None, lag=1), every=3)
    assert found.stopped is not None and learner.version == 2
    assert "break_if at step 3: training/policy_lag/max 2, limit 1" in (tmp_path / "r" / "summary.json").read_text()


def test_D7_what_is_no_number_is_over_its_limit_and_what_is_not_measured_is_not() -> None:
    limit = OffPolicy(kl=0.01, gap=None, lag=0)
    assert limit({KL: float("nan")}) and limit({KL: 0.0, LAG: 1}) and not limit({}) and not limit({KL: 0.01, GAP: 9.0})
    assert repr(limit) == "OffPolicy(training/rollout_kl ≤ 0.01, training/policy_lag/max ≤ 0)"
    with pytest.raises(wb.WorkbenchError, match="training/rollout_kl; expected ≥ 0"):
        OffPolicy(kl=-1.0)
