"""Engines placed on a real Ray cluster: FSDP ranks and vLLM in its workers are one engine to a recipe, and the numbers are those of
one process."""

from __future__ import annotations

import functools
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import cluster_things as things
import pytest
import torch

import workbench as wb
from workbench.base.errors import EngineError, SettingError, WorkerLost
from workbench.base.metrics import reduce
from workbench.cluster import Cluster, connect, placing
from workbench.cluster.pools import Node, Pool, plan
from workbench.engines.vllm_server.engine import VllmSettings, importable, interpreter
from workbench.rewards import Status
from workbench.rewards.base import row_view

pytestmark = pytest.mark.slow
needs_vllm = pytest.mark.skipif(
    not importable(interpreter(VllmSettings())), reason="vLLM is not installed: make .venv/.vllm"
)
MODEL = "data/tiny-arith"
VLLM = {"max_model_len": 320, "kv_cache_memory_mb": 64}
PUSHED = 1e-4
"""Largest difference of a log-prob between vLLM and the trainer, in nats."""


@pytest.fixture(scope="module")
def session() -> Iterator[Cluster]:
    things.close()
    with connect(cpus=8, gpus=0) as one:
        yield one


@functools.cache
def rows() -> Any:
    return wb.rows("data/arith/train.parquet", max_prompt_length=256)


def recipe(engine: Any, **settings: Any) -> Any:
    return wb.recipes.grpo(engine, group_size=4, max_tokens=40, kl_coef=0.001, **settings)


def drawn(pipe: Any, step: int) -> wb.Stepper:
    return wb.Stepper(pipe, rows().batch(6, step=step, seed=0)).run(until="advantage")


@pytest.fixture(scope="module")
def engine(session: Cluster) -> Iterator[Any]:
    made = session.place(MODEL, ranks=2, sampler="vllm", lr=2e-4, sampler_settings=VLLM)
    yield made
    made.close()


@needs_vllm
class TestFsdpAndVllm:
    def test_two_steps_of_grpo_are_those_of_one_process(self, engine: Any, session: Cluster) -> None:
        """On the same recorded rollouts: losses and gradient norms to 1e-5, weights to 1e-5; vLLM follows every push."""
        pipe, alone = recipe(engine), wb.engines.local(MODEL, lr=2e-4)
        here = recipe(alone)
        for step in (1, 2):
            there = drawn(pipe, step)
            metrics = there.trace.metrics
            assert metrics["training/rollout_probs_diff_max"] < PUSHED  # at step 2 after a push of changed weights
            assert set(there.batch["policy_version"].tolist()) == {step - 1}
            gap = (there.batch["old_log_probs"] - there.batch["rollout_log_probs"]).abs().max()
            assert float(gap) < PUSHED
            # the same rows, scored and learnt from in this process
            batch = there.trace["rollout"].batch
            for stage in list(here)[1:]:
                outcome = stage(batch)
                batch = outcome.batch
                if stage.updates:
                    mine = reduce([outcome.metrics])
            torch.testing.assert_close(batch["old_log_probs"], there.batch["old_log_probs"], atol=1e-5, rtol=0)
            torch.testing.assert_close(batch["advantages"], there.batch["advantages"], atol=1e-6, rtol=0)
            there.run()
            for name in ("actor/grad_norm", "actor/pg_loss", "actor/kl_loss"):
                value = mine[name]
                assert there.trace.metrics[name] == pytest.approx(value, rel=1e-5, abs=1e-7), name
        assert engine.version == alone.version == 2
        mine = alone.snapshot()["weights"]
        theirs = engine.full_weights()
        for name, weight in mine.items():
            torch.testing.assert_close(theirs[name], weight, atol=1e-5, rtol=0)
        assert any("version 2: shared memory: " in note for note in session.status().notes) and "MiB" in repr(engine)

    @pytest.mark.long
    def test_B3_a_sampler_that_is_killed_is_replaced_and_no_row_is_lost_or_doubled(
        self, session: Cluster, engine: Any
    ) -> None:
        """Its unfinished requests are asked again with the same seeds, once the new one has the present weights."""
        pipe = recipe(engine)
        quiet = drawn(pipe, 3)
        group = next(one for one in session.groups if one.name.startswith("rollout"))
        pid = group.facts[0]["pid"]
        stepper = wb.Stepper(pipe, rows().batch(6, step=3, seed=0))
        killed = threading.Timer(0.05, os.kill, (pid, signal.SIGKILL))
        engine._pushed = None  # so that a push is part of what is killed
        killed.start()
        with pytest.warns(UserWarning, match="member 0 of rollout was lost"):
            stepper.run(until="advantage")
        assert not os.path.exists(f"/proc/{pid}")
        for name in ("responses", "policy_version", "uid"):
            mine, theirs = stepper.batch[name], quiet.batch[name]
            assert bool((mine == theirs).all()), name
        assert stepper.trace.metrics["training/rollout_probs_diff_max"] < PUSHED

    @pytest.mark.long
    def test_a_learner_that_is_killed_is_a_named_error_and_the_step_runs_again(
        self, session: Cluster, engine: Any
    ) -> None:
        """From the snapshot at the step's start; the notebook goes on in the same process."""
        pipe = recipe(engine)
        quiet = drawn(pipe, 4)
        kept = engine.snapshot()
        quiet.run()
        expected = quiet.trace.metrics["actor/grad_norm"]
        engine.restore(kept)
        stepper = drawn(pipe, 4)
        group = next(one for one in session.groups if one.name == "actor")
        os.kill(group.facts[1]["pid"], signal.SIGKILL)
        with pytest.raises(WorkerLost, match=r"(?s)rank 1 \(pid \d+ on .*'actor' died") as lost:
            stepper.run()
        assert lost.value.rank == 1
        stepper.run()  # the stepper has a snapshot of before: new workers, the same step
        assert stepper.trace.metrics["actor/grad_norm"] == pytest.approx(expected, rel=1e-6)


@pytest.fixture(scope="module")
def plain(session: Cluster) -> Iterator[Any]:
    made = session.place(MODEL, ranks=1, sampler="local", pool="plain", lr=1e-3, replicas=1)
    yield made
    made.close()


class TestPlacing:
    """Without vLLM: transformers sample in the workers."""

    def test_a_cell_that_is_run_again_places_anew_and_others_are_refused(self, session: Cluster) -> None:
        first = session.place(MODEL, ranks=1, sampler=None, pool="again")
        second = session.place(MODEL, ranks=1, sampler=None, pool="again", lr=1e-5)
        assert second is not first and [one.name for one in session.groups if one.pool is session.pools["again"]] == [
            "again"
        ]
        with pytest.raises(SettingError, match="pool 'again' is held for another engine"):
            session.place(MODEL, ranks=1, sampler="local", pool="again")
        session.release("again")

    def test_a_tensor_parallel_learner_is_one_engine_as_any_other(self, session: Cluster) -> None:
        """Two ranks by the mesh alone; log-probs before and after a step are those of one process, and the sampler follows."""
        made = session.place(MODEL, mesh={"tp": 2}, sampler="local", replicas=1, pool="tensors", lr=1e-3)
        reward = wb.rewards.Reward(lambda response: float(len(response) % 3), in_process=True)
        alone = wb.engines.local(MODEL, lr=1e-3)
        pipe, here = (wb.recipes.grpo(one, reward=reward, group_size=4, max_tokens=8) for one in (made, alone))
        first = wb.Stepper(pipe, rows().batch(3)).run(until="advantage")
        old = alone.compute_log_probs(first.batch)["log_probs"]
        torch.testing.assert_close(first.batch["old_log_probs"], old, atol=3e-5, rtol=0)  # float32's rounding of logits
        mine = reduce([here["update_actor"](first.batch).metrics])
        assert first.run().trace.metrics["actor/grad_norm"] == pytest.approx(mine["actor/grad_norm"], rel=5e-5)
        assert mine["actor/grad_norm"] > 0.01
        after = wb.Stepper(pipe, rows().batch(3, step=2)).run(until="advantage")
        assert after.trace.metrics["training/rollout_probs_diff_max"] < PUSHED and made.version == alone.version == 1
        assert made.describe()["mesh"] == {"tp": 2} and made.cards() == ["", ""]
        made.close()

    @pytest.mark.long
    def test_reference_and_critic_apart_give_the_numbers_of_one_place(self, session: Cluster, plain: Any) -> None:
        """PPO with the reference on ranks of its own and a critic on the learner's, beside one process."""
        apart = session.place(MODEL, ranks=1, sampler=None, pool="reference")
        pipe = wb.recipes.ppo(plain, critic=plain.critic(), reference=apart, kl_coef=0.01, max_tokens=24)
        alone = wb.engines.local(MODEL, lr=1e-3)
        here = wb.recipes.ppo(alone, critic=alone.critic(), kl_coef=0.01, max_tokens=24)
        there = wb.Stepper(pipe, rows().batch(6)).run()
        mine = wb.Stepper(here, rows().batch(6)).run()
        for name in ("old_log_probs", "ref_log_prob", "values", "advantages"):
            torch.testing.assert_close(there.batch[name], mine.batch[name], atol=2e-5, rtol=0)
        session.release("reference")

    def test_B16_rewards_judged_by_workers_are_those_of_one_process(self, session: Cluster, plain: Any) -> None:
        """One and two workers, bit for bit, in the rows' order."""

        def length(solution_str: str, **_: Any) -> float:
            return len(solution_str) / 7

        judged = []
        for reward in (length, session.judge(length, workers=1), session.judge(length, workers=2)):
            stepper = wb.Stepper(recipe(plain, reward=reward), rows().batch(6)).run(until="advantage")
            judged.append((stepper.batch["reward"], stepper.batch["advantages"]))
            if hasattr(reward, "close"):
                reward.close()
        assert all(torch.equal(one, judged[0][0]) and torch.equal(two, judged[0][1]) for one, two in judged[1:])

    def test_rows_that_kill_their_worker_are_failures_of_the_machinery(self, session: Cluster) -> None:
        def deadly(solution_str: str, **_: Any) -> float:
            if "2" in solution_str:
                os.kill(os.getpid(), signal.SIGKILL)
            return 1.0

        reward = session.judge(wb.rewards.Reward(deadly, in_process=True), workers=1)
        truth = {"data_source": "x", "reward_model": {"ground_truth": "1"}}
        views = [row_view(truth, text, []) for text in "123"]
        scores = reward.judge(views)
        assert {score.status for score in scores} == {Status.INFRA_ERROR} and "in two tries" in scores[0].why
        reward.close()

    def test_what_a_reward_refuses_before_any_work_its_workers_are_not_asked_for(self, session: Cluster) -> None:
        reward = session.judge(lambda solution_str, **_: 1.0, workers=1)
        for name, arguments in (("check_signature", [[]]), ("check_rows", [[]]), ("check_sampler", [None, {}])):
            setattr(reward.inner, name, Mock(side_effect=SettingError(name)))
            with pytest.raises(SettingError, match=name):
                getattr(reward, name)(*arguments)
        reward.close()

    def test_a_reward_model_and_a_judge_are_served(self, session: Cluster) -> None:
        with session.serve("data/tiny-reward-model", "classifier", replicas=2) as served:
            here = wb.rewards.RewardModel(wb.engines.classifier("data/tiny-reward-model"))
            views = [{"response": f"{n}", "prompt": [{"role": "user", "content": "1 + 1?"}], "prompt_text": "1 + 1?"} for n in range(6)]  # fmt: skip
            there = wb.rewards.RewardModel(served)
            assert [one.value for one in there.judge(views)] == pytest.approx(
                [one.value for one in here.judge(views)], abs=1e-5
            )

    def test_what_cannot_be_is_refused_before_anything_starts(self, session: Cluster) -> None:
        groups = list(session.groups)
        for settings, told in (
            ({"learner": "ddp"}, "'ddp' is not a learner"),
            ({"sampler": "sglang"}, "'sglang' is not a sampler"),
            ({"ranks": 99}, "needs 99 CPUs"),
            ({"sampler": "local", "tensor_parallel_size": 2}, "expected sampler='vllm'"),
            ({"lora_rankk": 1, "sampler": None}, "lora_rankk"),
        ):
            with pytest.raises(SettingError, match=told):
                session.place(MODEL, pool="refused", **settings)
        with pytest.raises(EngineError, match="no-such-model"):
            session.place("no-such-model", pool="refused", sampler=None)
        assert session.groups == groups and "refused" not in session.pools

    def test_rollouts_are_streamed_by_the_samplers_of_a_place(self, plain: Any, tmp_path: Path) -> None:
        """Last: it changes the weights. A sampler in a worker finishes what is out before it takes new ones."""
        told: dict[str, Any] = {"steps": 3, "batch_size": 3, "max_lag": 2, "trace_freq": 1, "keep_traces": 9}
        pipe = wb.recipes.with_rollout_correction(recipe(plain), "decoupled_token_is")
        run = wb.train_blocking(pipe, rows(), run=tmp_path / "r", trackers=(), **told)
        found = [uid for step in (1, 2, 3) for uid in dict.fromkeys(run.traces[step].batch["uid"])]
        assert sorted(found) == sorted(uid for step in (1, 2, 3) for uid in rows().batch(3, step=step)["uid"])
        assert max(row["training/policy_lag/max"] for row in run.rows[1:]) <= 2 and run.audit().agrees


def test_samplers_of_several_gpus_sit_on_blocks_of_the_learners() -> None:
    """Eight GPUs on two nodes, tensor parallel over two: four samplers, none across nodes; three of three is refused."""
    two = [Node(name, name, "127.0.0.1", True, 16, 4, 16, 4, 1 << 34) for name in "ab"]
    made = plan({"actor": [4, 4]}, two)
    pool = Pool("actor", made, None, 2)

    def seats(replicas: int | None, tp: int) -> Any:
        return placing._sampling_seats(None, pool, None, replicas, tp, [])  # type: ignore[arg-type]

    assert seats(None, 2) == (pool, [[0, 1], [2, 3], [4, 5], [6, 7]]) and seats(1, 3)[1] == [[0, 1, 2]]
    with pytest.raises(SettingError, match="3 samplers of 3 GPUs each on one node; found room for 2"):
        seats(3, 3)
