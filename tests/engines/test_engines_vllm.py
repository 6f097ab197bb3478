"""Real vLLM, on the CPU: what it samples is what the trainer computes, before and after weights are pushed, and every way in
which its process can fail is an error that says so."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import PIPE
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from support.models import make_random_model
from support.patience import LONG, patience, within

import workbench as wb
from workbench.base import runtime
from workbench.base.errors import EngineError, Interrupted, SettingError, WorkerLost
from workbench.dataproto import DataProto
from workbench.engines import Classifier, Request, Sample, Sampler, SamplingSettings, classifier, local
from workbench.engines.paired import check_push, paired
from workbench.engines.vllm_server.engine import (
    VllmEngine,
    VllmSettings,
    _experts,
    cause_in,
    environment_of,
    importable,
    interpreter,
    vllm,
    vllm_classifier,
)
from workbench.engines.weights import weights_of
from workbench.stages.rollout import columns_of
from workbench.testing.engines import EngineContract

needs_vllm = pytest.mark.skipif(
    not importable(interpreter(VllmSettings())),
    reason="vLLM is not installed: pip install 'rl-workbench[vllm]', or name an interpreter in WORKBENCH_VLLM_PYTHON",
)
slow = pytest.mark.slow
TOLERANCE = 1e-4
"""Largest difference of a log-prob, in nats, between vLLM and transformers, both in float32."""
SETTINGS: dict[str, Any] = {"max_model_len": 256, "kv_cache_memory_mb": 64, "stall_seconds": LONG}


@pytest.fixture(scope="module")
def engine() -> Iterator[VllmEngine]:
    with vllm("data/tiny-arith", **SETTINGS) as made:
        yield made


def when_asked(engine: VllmEngine, then: Callable[[], None]) -> threading.Thread:
    """From a thread, as soon as a request is out."""

    def wait() -> None:
        if within(lambda: engine._link._under_way(), every=0.01):
            then()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread


def seconds_of(engine: VllmEngine) -> float:
    """Of the processor, that its process has used."""
    used = psutil.Process(engine.pid).cpu_times()
    return float(used.user + used.system)


def asked(engine: Any, count: int = 24, **settings: Any) -> list[Request]:
    """Sums in the model's own words, each with a seed."""
    chosen = SamplingSettings(**{"max_tokens": 40, **settings})
    texts = [f"What is {7 * n} + {n + 30}?" for n in range(count)]
    chats = [
        engine.tokenizer.apply_chat_template([{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True)
        for text in texts
    ]  # fmt: skip
    return [Request(tuple(engine.tokenizer.encode(text)), chosen, 1000 + n) for n, text in enumerate(chats)]


def gap(learner: Any, requests: list[Request], samples: list[Sample]) -> float:
    """Largest difference of the sampled tokens' log-probs from the trainer's, in nats."""
    batch = DataProto.from_single_dict(columns_of([one.ids for one in requests], samples, 0))
    scored = learner.compute_log_probs(batch, temperature=requests[0].settings.temperature or 1.0)["log_probs"]
    return float((scored - batch["rollout_log_probs"]).abs().max())


def moved(learner: Any, steps: int = 3) -> Any:
    """The learner after updates that change what it says."""
    from workbench.testing.engines import LikelihoodLoss

    requests = asked(learner, 8)
    batch = DataProto.from_single_dict(columns_of([one.ids for one in requests], learner.sample_many(requests), 0))
    for _ in range(steps):
        learner.learn(batch, LikelihoodLoss(), EngineContract.counts(batch))
    learner.commit()
    return learner


def teaches(engine: Any) -> None:
    """Assert that the engine's `teacher()` gives what the reference of a learner with the same weights gives."""
    learner = local("data/tiny-arith", device="cpu", self_check=False)
    engine.sync(learner)
    requests = asked(engine, 3)
    batch = DataProto.from_single_dict(columns_of([one.ids for one in requests], engine.sample_many(requests), 0))
    mask = batch["response_mask"] * (torch.arange(batch["response_mask"].shape[1]) % 3 != 1)
    batch = batch.with_columns({"response_mask": mask})
    mine, theirs = (one.top_log_probs(batch, 5) for one in (learner.reference(), engine.teacher()))
    assert mask.any() and mine.keys() == theirs.keys()
    for name in ("log_probs", "top_log_probs"):
        assert (mine[name] - theirs[name]).abs().max() < TOLERANCE, name
    assert torch.equal(engine.teacher().compute_log_probs(batch)["log_probs"], theirs["log_probs"])
    with pytest.raises(EngineError, match="temperature of a teacher in vLLM"):
        engine.teacher().compute_log_probs(batch, temperature=0.5)
    with pytest.raises(EngineError, match="(?s)max.logprobs|greater than max"):
        engine.teacher().top_log_probs(batch, 50)


@needs_vllm
@slow
@pytest.mark.long
class TestPairedWithVllm(EngineContract):
    """The whole contract of an engine; a learner made afresh for each test is pushed to the one vLLM."""

    @pytest.fixture(autouse=True)
    def _sampler(self, engine: VllmEngine) -> None:
        self.sampler = engine

    def make_engine(self, **settings: Any) -> Any:
        return paired(local("data/tiny-arith", device="cpu", **settings), self.sampler)


@needs_vllm
@slow
class TestVllm:
    @pytest.mark.parametrize(
        "settings", [{}, {"temperature": 0.5}, {"temperature": 1.5, "top_k": 5}, {"top_p": 0.7, "min_p": 0.1}, {"temperature": 0.0}], ids=str
    )  # fmt: skip
    def test_log_probs_are_the_trainers(self, engine: VllmEngine, settings: dict[str, Any]) -> None:
        """At any temperature, and before top-k and top-p, also where requests of several kinds share a batch."""
        learner = local("data/tiny-arith")
        engine.sync(learner)
        requests, others = asked(engine, **settings), asked(engine, temperature=0.9, top_p=0.95)
        samples = engine.sample_many([*requests, *others])
        assert gap(learner, requests, samples[: len(requests)]) < TOLERANCE
        assert gap(learner, others, samples[len(requests) :]) < TOLERANCE

    def test_greedy_tokens_are_the_local_engines(self, engine: VllmEngine) -> None:
        learner = local("data/tiny-arith")
        engine.sync(learner)
        requests = asked(engine, temperature=0.0)
        mine, theirs = learner.sample_many(requests), engine.sample_many(requests)
        assert [one.ids for one in mine] == [one.ids for one in theirs]
        assert [one.finish_reason for one in mine] == [one.finish_reason for one in theirs]

    @pytest.mark.parametrize("temperature", [0.0, 0.7])
    def test_penalties_and_limits_leave_the_policys_log_probs(self, engine: VllmEngine, temperature: float) -> None:
        learner = local("data/tiny-arith")
        engine.sync(learner)
        limits: dict[str, Any] = {"repetition_penalty": 1.3, "min_tokens": 20, "min_p": 0.05}
        requests = asked(engine, 8, temperature=temperature, stop_token_ids=(23,), **limits)
        mine, theirs = learner.sample_many(requests), engine.sample_many([*requests, *asked(engine, 4)])[:8]
        assert gap(learner, requests, theirs) < TOLERANCE
        for one in theirs:
            assert 23 not in one.ids[:20] and (one.ids[-1] == 23 or one.finish_reason != "stop" or len(one.ids) > 20)
        if not temperature:
            assert [one.ids for one in mine] == [one.ids for one in theirs]

    def test_the_likeliest_tokens_are_the_local_engines(self, engine: VllmEngine) -> None:
        learner = local("data/tiny-arith")
        engine.sync(learner)
        wanted = [dataclasses.replace(one, tops=3) for one in asked(engine, 4, temperature=0.0)]
        for mine, theirs in zip(learner.sample_many(wanted), engine.sample_many(wanted), strict=True):
            for left, right in zip(mine.tops, theirs.tops, strict=True):
                assert max(left.values()) == pytest.approx(max(right.values()), abs=TOLERANCE)
                assert set(left) <= set(right) or min(left.values()) == pytest.approx(
                    min(right.values()), abs=TOLERANCE
                )

    def test_its_model_teaches_as_one_in_this_process(self, engine: VllmEngine) -> None:
        teaches(engine)
        pipe = wb.recipes.distill(local("data/tiny-arith", lr=1e-3), engine, top_k=5, max_tokens=8, group_size=2)
        done = wb.Stepper(pipe, wb.rows("data/arith/train.parquet").batch(2)).run()
        assert done.trace.metrics["actor/divergence"] == pytest.approx(0, abs=TOLERANCE)  # of the same weights

    def test_samples_follow_the_distribution(self, engine: VllmEngine) -> None:
        learner = local("data/tiny-arith")
        engine.sync(learner)
        prompt = asked(engine, 1)[0].ids
        settings = SamplingSettings(max_tokens=1, temperature=2.0, ignore_eos=True)
        drawn = engine.sample_many([Request(prompt, settings, seed) for seed in range(3000)])
        with torch.no_grad():
            expected = torch.softmax(learner._model(input_ids=torch.tensor([prompt])).logits[0, -1] / 2, -1)
        found = torch.bincount(torch.tensor([one.ids[0] for one in drawn]), minlength=len(expected)) / len(drawn)
        assert (found - expected).abs().max() < 0.03

    def test_a_push_makes_its_log_probs_the_trainers(self, engine: VllmEngine) -> None:
        """Also for a prompt whose cache the old weights wrote, and for a tied head."""
        learner = local("data/tiny-arith", lr=1e-3)
        engine.sync(learner)
        requests = [dataclasses.replace(one, ids=one.ids * 10) for one in asked(engine)]  # long enough to be cached
        before = engine.sample_many(requests)
        moved(learner)
        assert gap(learner, requests, before) > 0.05  # the old weights' samples
        assert engine.sync(learner) < 30 and engine.version == 1
        after = engine.sample_many(requests)
        assert gap(learner, requests, after) < TOLERANCE and {one.version for one in after} == {1}

    def test_a_push_waits_for_the_rows_before_it(self, engine: VllmEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        """A row is written by one version, whatever was under way."""
        take, pushing = engine.take_weights, threading.Event()

        def begun(*bucket: Any) -> None:
            pushing.set()
            take(*bucket)

        old, new = local("data/tiny-arith"), moved(local("data/tiny-arith", lr=1e-3))
        engine.sync(old)
        requests = asked(engine, ignore_eos=True, max_tokens=100)

        async def beside() -> list[Sample]:
            first = [asyncio.ensure_future(engine.sample(one)) for one in requests]
            await asyncio.sleep(0.1)
            pushed = asyncio.ensure_future(asyncio.to_thread(engine.load_weights, weights_of(new), 7))
            assert await asyncio.to_thread(pushing.wait, 60)
            second = await asyncio.gather(*(engine.sample(one) for one in requests))
            await pushed
            return [*await asyncio.gather(*first), *second]

        monkeypatch.setattr(engine, "take_weights", begun)
        found = runtime.run(beside())
        assert [one.version for one in found] == [0] * len(requests) + [7] * len(requests)
        assert gap(old, requests, found[: len(requests)]) < TOLERANCE
        assert gap(new, requests, found[len(requests) :]) < TOLERANCE

    def test_merged_adapters_are_pushed(self, engine: VllmEngine) -> None:
        learner = local("data/tiny-arith", lora_rank=4, lr=3e-2)
        both = paired(learner, engine)
        moved(learner)
        requests = asked(engine)
        assert gap(learner, requests, both.sample_many(requests)) < TOLERANCE

    def test_a_failed_push_is_named_and_the_next_repairs_it(self, engine: VllmEngine) -> None:
        learner = local("data/tiny-arith")
        weights = weights_of(learner)
        with pytest.raises(EngineError, match="nonsense"):
            engine.load_weights({**weights, "model.nonsense.weight": torch.zeros(2)}, 3)
        with pytest.raises(EngineError, match="push (weights )?again"):
            engine.sample_many(asked(engine, 1))
        engine.load_weights(weights, 4)
        requests = asked(engine)
        assert gap(learner, requests, engine.sample_many(requests)) < TOLERANCE and engine.version == 4

    def test_what_vllm_has_not_loaded_is_named(self, engine: VllmEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        """Inside its process, too, where the check before a push has let it pass."""
        weights = weights_of(local("data/tiny-arith"))
        monkeypatch.setattr(engine, "check_whole", lambda shapes: None)
        for name in ("model.norm.weight", "model.layers.0.mlp.down_proj.weight"):
            with pytest.raises(EngineError, match=f"old values in.*{name}"):
                engine.load_weights({one: tensor for one, tensor in weights.items() if one != name}, 3)
        with pytest.raises(EngineError, match="push (weights )?again"):
            engine.sample_many(asked(engine, 1))
        begin = engine.begin_weights
        monkeypatch.setattr(engine, "begin_weights", lambda shapes: begin({**shapes, "model.lost.weight": (1,)}))
        with pytest.raises(EngineError, match="old values in model.lost.weight"):
            engine.load_weights(weights, 3)  # announced, and never sent
        monkeypatch.undo()
        engine.load_weights(weights, 4)

    @pytest.mark.parametrize("way", ["shared memory", "object store", "broadcast"])
    def test_every_way_in_small_buckets(self, engine: VllmEngine, way: str) -> None:
        learner = moved(local("data/tiny-arith", lr=1e-3))
        push = check_push(paired(learner, engine, weight_sync=way, bucket_bytes=1 << 16), [[5, 6, 7], [9, 10, 11, 12]])
        assert push.way == way and push.gap is not None and push.gap < TOLERANCE and engine.version == 1

    def test_it_sleeps_and_wakes_by_parts_around_a_push(
        self, engine: VllmEngine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """vLLM's own order and states; that memory is freed cannot be seen on a CPU."""
        weights = weights_of(local("data/tiny-arith"))
        monkeypatch.setattr(engine, "_about", {**engine._about, "platform": "as if it were a GPU"})
        monkeypatch.setattr(engine, "_settings", engine._settings.replace(sleep_mode=True))
        engine.sleep(level=2)
        with pytest.raises(EngineError, match="dropped by sleep"):
            engine.sample_many(asked(engine, 1))
        engine.wake(["weights"])
        engine.load_weights(weights, 5)
        engine.wake(["kv_cache"])
        assert engine.sample_many(asked(engine, 1))[0].version == 5

    def test_stop_texts_end_a_response_and_are_kept(self, engine: VllmEngine) -> None:
        learner = local("data/tiny-arith")
        engine.sync(learner)
        free = engine.sample_many(asked(engine, 4, ignore_eos=True, temperature=0.0))
        word = engine.tokenizer.decode([free[0].ids[5]])
        requests = asked(engine, 4, ignore_eos=True, temperature=0.0, stop=(word,))
        cut = engine.sample_many(requests)
        assert cut[0].finish_reason == "stop" and cut[0].ids == free[0].ids[: len(cut[0].ids)]
        assert engine.tokenizer.decode([cut[0].ids[-1]]) == word
        assert [one.ids for one in cut] == [one.ids for one in learner.sample_many(requests)]

    def test_what_it_cannot_do_is_refused_and_the_rest_goes_on(self, engine: VllmEngine) -> None:
        good = asked(engine, 1)[0]
        with pytest.raises(EngineError, match="token id 512.*0 to 511"):
            engine.sample_many([Request((5, 512), good.settings, 0)])
        with pytest.raises(EngineError, match="1 to 255 tokens.*found 256"):
            engine.sample_many([Request((5,) * 256, good.settings, 0)])
        with pytest.raises(EngineError, match=r"0 or ≥ 0\.01"):
            engine.sample_many([Request((5,), SamplingSettings(temperature=1e-3), 0)])
        with pytest.raises(EngineError, match="sleep.*CPU"):
            engine.sleep()
        assert engine.sample_many([good]) and isinstance(engine, Sampler)
        assert engine.max_length == 256 and "version" in repr(engine) and "env" not in engine.describe()

    def test_an_interrupt_aborts_the_requests(self, engine: VllmEngine) -> None:
        long = asked(engine, 64, ignore_eos=True, max_tokens=200)
        flag = when_asked(engine, runtime.interrupt)
        try:
            with pytest.raises(Interrupted):
                engine.sample_many(long)
        finally:
            flag.join()
            runtime.clear()

        async def cancelled() -> None:
            work = asyncio.gather(*(engine.sample(one) for one in long))
            while not engine._link._under_way():
                await asyncio.sleep(0.01)
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)

        learner = local("data/tiny-arith")
        given_up = []
        for _ in range(5):  # on a busy machine the requests may be answered before this thread cancels them
            begun = seconds_of(engine)
            runtime.run(cancelled())
            engine.sync(learner)  # waits for what is under way, and nothing is
            given_up.append(seconds_of(engine) - begun)
        begun = seconds_of(engine)
        assert len(engine.sample_many(long)) == 64
        assert min(given_up) < 0.6 * (seconds_of(engine) - begun), "seconds of its processor"

    def test_it_is_a_judge(self, engine: VllmEngine) -> None:
        answer = asyncio.run(
            wb.engines.chat(engine).complete(
                [{"role": "user", "content": "What is 2 + 3?"}], max_tokens=8, temperature=0.0, seed=0
            )
        )
        assert answer.tokens <= 8 and answer.text


@needs_vllm
@slow
def test_two_steps_of_grpo(engine: VllmEngine) -> None:
    """Sampled by vLLM, learnt here; the difference of the two is a metric of each step."""
    both = paired(local("data/tiny-arith", lr=1e-3), engine)
    rows = wb.rows("data/arith/train.parquet", max_prompt_length=200)
    pipe = wb.recipes.grpo(both, group_size=4, max_tokens=48)
    for step in (1, 2):
        stepper = wb.Stepper(pipe, rows.batch(8, step=step)).run()
        assert stepper.batch["policy_version"].unique().tolist() == [step - 1]
        difference = (stepper.batch["old_log_probs"] - stepper.batch["rollout_log_probs"]).abs().max()
        assert difference < TOLERANCE
        assert stepper.trace.metrics["training/rollout_probs_diff_max"] < TOLERANCE
    assert both.version == 2


@needs_vllm
@slow
class TestItsProcess:
    @pytest.mark.long
    @pytest.mark.parametrize("multiprocess", [False, pytest.param(True, marks=pytest.mark.long)])
    def test_same_seed_same_tokens_on_a_fresh_engine(self, engine: VllmEngine, multiprocess: bool) -> None:
        """And with the scheduler in a process of its own."""
        engine.sync(local("data/tiny-arith"))
        with vllm("data/tiny-arith", **SETTINGS, multiprocess=multiprocess) as other:
            requests = asked(engine)
            assert [one.ids for one in engine.sample_many(requests)] == [one.ids for one in other.sample_many(requests)]
            learner = moved(local("data/tiny-arith", lr=1e-3))
            other.sync(learner)
            assert gap(learner, requests, other.sample_many(requests)) < TOLERANCE
            group = other.pid
        assert within(lambda: _members(group) == [])

    @pytest.mark.long
    def test_two_ranks_share_a_model(self) -> None:
        there = _shared_memory()
        with vllm("data/tiny-arith", **SETTINGS, tensor_parallel_size=2) as engine:
            requests, learner = asked(engine), moved(local("data/tiny-arith", lr=1e-3))
            assert gap(local("data/tiny-arith"), requests, engine.sample_many(requests)) < TOLERANCE
            engine.sync(learner)
            assert gap(learner, requests, engine.sample_many(requests)) < TOLERANCE
            made = _shared_memory() - there
        # vLLM's ranks share memory where its kernels have AVX-512
        assert made or torch.backends.cpu.get_cpu_capability() != "AVX512"
        assert not made & _shared_memory()

    @pytest.mark.long
    def test_a_killed_process_is_a_named_error_and_can_be_started_again(self) -> None:
        with vllm("data/tiny-arith", **SETTINGS) as engine:
            requests = asked(engine, 64, ignore_eos=True, max_tokens=200)
            first, group = engine.sample_many(requests[:2]), engine.pid
            when_asked(engine, lambda: os.kill(group or 0, signal.SIGKILL))
            with pytest.raises(WorkerLost, match="(?s)was ended by SIGKILL.*restart") as lost:
                engine.sample_many(requests)
            assert lost.value.exit == "SIGKILL", "seen to be gone, not taken for dead"
            with pytest.raises(WorkerLost, match="SIGKILL"):  # and for whoever asks later
                engine.sample_many(requests[:1])
            assert group is not None and _members(group) == []
            # a pair starts it, pushes the weights, and asks again
            pair = paired(local("data/tiny-arith"), engine)
            assert [one.ids for one in pair.sample_many(requests[:2])] == [one.ids for one in first]
            folder = engine._link.folder
        assert not folder.exists()
        with pytest.raises(EngineError, match="closed"):
            engine.sample_many(requests[:1])

    @pytest.mark.long
    def test_it_ends_with_the_kernel_that_made_it(self, tmp_path: Path) -> None:
        before = set(Path(tempfile.gettempdir()).glob("workbench-vllm-*"))
        made = f"from workbench.engines import vllm; e = vllm('data/tiny-arith', **{SETTINGS}); print(e.pid, flush=True); input()"
        script = tmp_path / "kernel.py"
        script.write_text(made)
        with subprocess.Popen([sys.executable, str(script)], stdin=PIPE, stdout=PIPE, text=True) as kernel:
            assert kernel.stdout
            group = int(kernel.stdout.readline())
            assert _members(group)
            kernel.kill()
        assert within(lambda: not _members(group))
        assert within(lambda: not set(Path(tempfile.gettempdir()).glob("workbench-vllm-*")) - before)

    @pytest.mark.long
    def test_a_process_that_hangs_is_taken_for_dead(self) -> None:
        stall = patience(2)
        with vllm("data/tiny-arith", **{**SETTINGS, "stall_seconds": stall}) as engine:
            os.kill(engine.pid or 0, signal.SIGSTOP)
            with pytest.raises(WorkerLost, match=f"has not answered for {stall:g} s"):
                engine.sample_many(asked(engine, 1))
            assert _members(engine.pid) == []

    @pytest.mark.long
    def test_vllms_own_words_when_it_does_not_start(self) -> None:
        with pytest.raises(EngineError, match="(?s)vLLM did not start.*greater than the derived max_model_len"):
            vllm("data/tiny-arith", max_model_len=100_000)

    @pytest.mark.long
    def test_vllms_own_words_when_its_scheduler_does_not_start(self) -> None:
        with pytest.raises(EngineError, match="vLLM did not start; found ValueError.*cache"):  # only its log has it
            vllm("data/tiny-arith", max_model_len=512, kv_cache_memory_mb=1, multiprocess=True)

    @pytest.mark.long
    def test_vllms_own_words_when_its_engine_dies(self, tmp_path: Path) -> None:
        """A head of 16 has no CPU kernel, which vLLM finds out late."""
        with vllm(make_random_model(tmp_path / "small")) as engine:
            with pytest.raises(EngineError, match="(?s)head_dim=16.*restart"):
                engine.sample_many([Request((1, 5), SamplingSettings(), 0)])
            assert _members(engine.pid) == []


@pytest.mark.long
@needs_vllm
@slow
def test_a_reward_model_gives_the_raw_scalar() -> None:
    path = "data/tiny-reward-model"
    texts = ["3 + 4 = 7", "What is 2 + 2? 5", "a" * 30]

    async def all_of(model: Any) -> list[tuple[float, int]]:
        found = await asyncio.gather(*(model.classify(text) for text in texts))
        return [(one.value, one.tokens) for one in found]

    with vllm_classifier(path, **SETTINGS) as served:
        assert isinstance(served, Classifier) and served.describe() == f"vLLM {path}" and "process" in repr(served)
        for (mine, length), (theirs, same) in zip(
            runtime.run(all_of(served)), runtime.run(all_of(classifier(path))), strict=True
        ):
            assert mine == pytest.approx(theirs, abs=1e-4) and length == same
        with pytest.raises(EngineError, match="1 to 256 tokens.*prompt_length"):
            runtime.run(served.classify("word " * 300))


def _shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").glob("vllm_*")}


def _members(group: int | None) -> list[int]:
    """Processes of a process group that are not over."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[2]) == group and fields[0] != "Z":
            found.append(int(status.parent.name))
    return found


@pytest.mark.slow
def test_models_and_settings_that_cannot_work_are_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="no model at 'data/nowhere'"):
        vllm("data/nowhere")
    with pytest.raises(SettingError, match="did you mean 'max_model_len'"):
        vllm("data/tiny-arith", max_modellen=3)
    with pytest.raises(SettingError, match="seed: set by workbench"):
        vllm("data/tiny-arith", engine_args={"seed": 3})
    with pytest.raises(SettingError, match="max_model_len: the setting max_model_len"):
        vllm("data/tiny-arith", engine_args={"max_model_len": 3})
    with pytest.raises(SettingError, match="gpu_memory_utilization"):
        vllm("data/tiny-arith", gpu_memory_utilization=1.5)
    adapter = local(make_random_model(tmp_path / "model"), lora_rank=2)
    adapter.save(tmp_path / "adapter")
    with pytest.raises(EngineError, match="is an adapter.*merged weights are pushed"):
        vllm(tmp_path / "adapter")


def test_where_vllm_is_missing_the_message_says_what_to_install(tmp_path: Path) -> None:
    bare = tmp_path / "python"  # an interpreter without any package, under another name
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    bare.chmod(0o755)
    with pytest.raises(EngineError, match=r"vLLM is not installed.*pip install 'rl-workbench\[vllm\]'"):
        vllm("data/tiny-arith", python=str(bare))
    with pytest.raises(EngineError, match="cannot start"):
        vllm("data/tiny-arith", python=str(tmp_path / "none"))


def test_the_root_cause_is_found_in_a_log() -> None:
    log = """(EngineCore pid=1) ERROR 01-01 [core.py:9] Traceback (most recent call last):
(EngineCore pid=1) ERROR 01-01 [core.py:9] ValueError: No room for the cache: 1 MiB
(APIServer pid=2) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}"""
    assert cause_in(log) == "ValueError: No room for the cache: 1 MiB"
    assert cause_in("all is well\nRuntimeError: Engine core initialization failed.") == ""


@needs_vllm
@slow
def test_an_adapter_goes_alone_and_vllms_own_arguments_go_through(cold: None) -> None:
    """Of the processes that run vLLM, this one begins cold in `make test`, too."""
    given = {"engine_args": {"max_num_batched_tokens": 512}, "lora_rank": 4}
    with vllm("data/tiny-arith", **SETTINGS, **given) as engine:
        assert engine.describe()["engine_args"] == {"max_num_batched_tokens": 512}
        learner = local("data/tiny-arith", lora_rank=4, lr=3e-2)
        pair = paired(learner, engine)
        for version in (1, 2):
            moved(learner, 1)
            push = check_push(pair, [[5, 6, 7], [9, 10, 11, 12]])
            assert push.way == "adapter" and push.gap is not None and push.gap < TOLERANCE
            assert push.bytes < 200_000 and engine.version == version
        engine.load_weights(weights_of(learner), 3)  # merged weights take the base's place: no adapter goes over them
        with pytest.raises(EngineError, match="other weights, which were pushed"):
            pair.push()
        other = paired(learner, engine)
        assert check_push(other, [[5, 6, 7]]).way == "shared memory"
    with pytest.raises(EngineError, match="has no argument max_num_batched_token; it has max_num_batched_tokens,"):
        vllm("data/tiny-arith", **SETTINGS, engine_args={"max_num_batched_token": 512})


def test_experts_that_vllm_returns_are_the_samples() -> None:
    told = np.arange(4 * 3 * 2).reshape(4, 3, 2)  # of four tokens: none came after the fifth, the last
    reply = {"experts": base64.b64encode(told.astype("<i2").tobytes()).decode(), "experts_shape": [4, 3, 2]}
    found = _experts(reply, 5)
    assert found.dtype == torch.int16 and found[:4].tolist() == told.tolist() and bool((found[4] == -1).all())
    runner = "VLLM_USE_V2_MODEL_RUNNER"
    asked = VllmSettings(engine_args={"enable_return_routed_experts": True})
    assert environment_of("model", VllmSettings())[runner] == "0" and environment_of("model", asked)[runner] == "1"


@needs_vllm
@pytest.mark.long
def test_float16_samples_what_a_float16_learner_scores() -> None:
    learner = local("data/tiny-arith", device="cpu", dtype="float16", lr=1e-3)
    with vllm("data/tiny-arith", **SETTINGS, dtype="float16") as sampler:
        pair, requests = paired(learner, sampler), asked(learner)
        for _ in range(2):
            samples = pair.sample_many(requests)
            batch = DataProto.from_single_dict(columns_of([one.ids for one in requests], samples, 0))
            gaps = (learner.compute_log_probs(batch)["log_probs"] - batch["rollout_log_probs"]).abs()
            assert float(gaps.sum() / batch["response_mask"].sum()) < 0.005 and float(gaps.max()) < 0.3
            assert {one.version for one in samples} == {learner.version}
            moved(learner)
