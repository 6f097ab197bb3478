"""Learners on Ray ranks: the same numbers however many there are, groups that start at once, kills that leave no trace."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import cluster_things as things
import numpy as np
import psutil
import pytest
import torch
from support.patience import LONG, within
from training import Killer, footprint, group, grpo, numbers, rows, train

import workbench as wb
from workbench.cluster import Cluster, connect
from workbench.engines.fsdp_engine.worker import Shards
from workbench.runs.loop import run_step

pytestmark = pytest.mark.slow
HERE = Path(__file__).parent


# --- B12: where ranks meet --------------------------------------------------------------------------


def test_B12_the_port_is_never_free_between_its_choice_and_its_use(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[int] = []
    real = socket.create_server

    def listen(*given: Any, **options: Any) -> socket.socket:
        made = real(*given, **options)
        chosen.append(os.fstat(made.fileno()).st_ino)
        return made

    monkeypatch.setattr("socket.create_server", listen)
    one = Shards(0, 1, host="127.0.0.1")
    place = one.reserve()
    assert place is not None
    held = {
        os.fstat(int(name)).st_ino for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}")
    }
    assert chosen[0] in held, "the store listens on the very socket that chose the port"
    with pytest.raises(OSError, match="in use"), socket.socket() as late:
        late.bind(place)


@pytest.mark.long
@pytest.mark.parametrize("groups", [6, pytest.param(20, marks=pytest.mark.long)])
def test_B12_twenty_groups_of_two_start_at_once(groups: int) -> None:
    done = subprocess.run(
        [sys.executable, str(HERE / "twenty_groups.py"), str(groups)],
        capture_output=True,
        text=True,
        timeout=LONG,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    ports = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("met")]
    assert len(ports) == groups and len(set(ports)) == groups


# --- B16: how many there are changes no number ---------------------------------------------------------


@pytest.mark.long
def test_B16_B12_one_rank_and_two_and_one_reward_worker_and_two_are_the_same_numbers(
    local: Cluster, tmp_path: Path
) -> None:
    """One row is a micro-batch, a prompt's two rows an optimizer step: 1 rank × 2 micro-batches against 2 ranks × 1."""
    groups = [group(local, ranks) for ranks in (1, 2)]
    with ThreadPoolExecutor(2) as both:
        list(both.map(lambda one: one.start(), groups))  # two groups at once
    found = []
    for number, where in enumerate(groups, 1):
        learner, _ = grpo(where, tmp_path, micro_batch_tokens=1, grad_clip=0.1)
        engine = wb.engines.paired(learner, wb.engines.local("data/tiny-arith", device="cpu"))
        reward = wb.rewards.Reward(things.last_digit, workers=number)
        pipe = wb.recipes.grpo(
            engine, reward, group_size=2, max_tokens=6, kl_coef=0.001, ppo_mini_batch_size=1, entropy_coeff=0.01
        )
        traces = [run_step(pipe, rows()[:8].batch(4, step=step, seed=3)) for step in (1, 2)]
        found.append((traces, learner.full_weights()))
        reward.close()
    for one, two in zip(found[0][0], found[1][0], strict=True):
        mine, theirs = numbers([dict(one.metrics), dict(two.metrics)])
        assert mine["actor/grad_norm"] > 0.1, "it was clipped, by a norm that is the same however it is sharded"
        assert {name: (value, theirs[name]) for name, value in mine.items() if value != theirs[name]} == {}
        assert set(one.batch.columns) == set(two.batch.columns)
        for name in one.batch.batch:
            assert torch.equal(one.batch[name], two.batch[name]), name
        assert float(one.batch["advantages"].abs().max()) > 0, "something was learnt"
    assert all(torch.equal(one, found[1][1][name]) for name, one in found[0][1].items())
    # four micro-batches against two and two are added up in another order: docs/determinism.md has these tolerances
    batch = found[0][0][1].batch
    clipped = [grpo(where, tmp_path, micro_batch_tokens=1, grad_clip=0.1)[0] for where in groups]
    gradients = [one.gradient(batch, wb.stages.PolicyLoss(), things.counts(batch)) for one in clipped]
    largest = max(float(one.abs().max()) for one in gradients[0].values())
    assert apart(*gradients) <= 1e-6 * largest
    learned = [one.learn(batch, wb.stages.PolicyLoss(), things.counts(batch)) for one in clipped]
    assert learned[0].metrics["grad_norm"].result() > 0.1
    assert apart(*(one.full_weights() for one in clipped)) < 1e-5
    for where in groups:
        where.close()


def apart(one: Mapping[str, torch.Tensor], two: Mapping[str, torch.Tensor]) -> float:
    return max(float((value - two[name]).abs().max()) for name, value in one.items())


@pytest.mark.long
def test_B16_one_rollout_worker_and_two_write_the_same_rows(local: Cluster) -> None:
    prompts = rows()[:6].batch(6, step=1, seed=5)
    with local.ranks(things.writer, 2, name="writers", cpus=0.5, path=str(Path("data/tiny-arith").resolve())) as two:
        spread = two.map("rolled", prompts)
        here = things.writer(0, 1, path="data/tiny-arith").rolled(prompts)
    assert set(spread.columns) == set(here.columns)
    width = max(one["responses"].shape[1] for one in (spread, here))
    for row in range(6):
        mine, theirs = (one["responses"][row][one["response_mask"][row].bool()] for one in (spread, here))
        assert torch.equal(mine, theirs) and width >= len(mine)
        # the same tokens; who shares a wave with whom is in the last digits of what the sampler says of them
        logs = [one["rollout_log_probs"][row][one["response_mask"][row].bool()] for one in (spread, here)]
        torch.testing.assert_close(*logs, atol=1e-5, rtol=0)
    assert np.array_equal(spread["response_text"], here["response_text"])


# --- B17: kills at random --------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize(("steps", "most"), [(8, 1), pytest.param(30, 2, marks=pytest.mark.long)])
def test_B17_some_steps_with_kills_at_random_end_as_the_quiet_ones(
    local: Cluster, tmp_path: Path, steps: int, most: int
) -> None:
    soak(local, tmp_path, steps=steps, every=7, most=most)


@pytest.mark.timeout(3600)
@pytest.mark.skipif(not os.environ.get("WORKBENCH_SOAK"), reason="half an hour of kills: WORKBENCH_SOAK=1")
def test_B17_five_hundred_steps_with_a_kill_every_twenty_steps(tmp_path: Path) -> None:
    things.close()
    before = footprint()
    with connect(**things.SETTINGS) as own:
        blows = soak(own, tmp_path, steps=500, every=20, most=1000)
    assert blows >= 5
    assert within(lambda: not any(now - before[name] for name, now in footprint().items())), footprint()


def soak(local: Cluster, scratch: Path, steps: int, every: int, most: int) -> int:
    """A quiet run, and one with kills from the same start: equal in all numbers; nothing is left of either."""
    where = group(local, 2)
    learner, pipe = grpo(where, scratch)
    where.start()
    before = footprint()
    quiet = train(pipe, scratch / "quiet", steps)
    weights = learner.full_weights()
    assert not (quiet.path / "recoveries.jsonl").exists()
    killer = Killer(where, every, most)
    learner, pipe = grpo(where, scratch)
    rough = train(pipe, scratch / "rough", steps, killer)
    told = [json.loads(line) for line in (rough.path / "recoveries.jsonl").read_text().splitlines()]
    assert killer.killed and len(killer.killed) <= len(told)
    assert all(f"(pid {pid} on " in text["error"] for pid, text in zip(killer.killed[:1], told, strict=False))
    assert numbers(rough.rows) == numbers(quiet.rows)
    again = learner.full_weights()
    assert all(torch.equal(one, again[name]) for name, one in weights.items())
    left = footprint()
    assert not left["ports"] - before["ports"] and not left["shared memory"] - before["shared memory"]
    assert not left["scratch"] - before["scratch"]
    mine = [worker["pid"] for worker in where.workers]
    where.close()
    left = [one for one in psutil.process_iter() if one.pid in (*killer.killed, *mine)]
    assert not psutil.wait_procs(left, timeout=LONG)[1]  # some may be on their way out
    assert within(lambda: local.status().nodes[0].store_used < 20 << 20)
    del learner, pipe
    footprint()  # collects
    assert not list(scratch.glob("workbench-snapshot-*"))
    return len(killer.killed)
