"""Two engines as one: the whole contract of an engine, and that no row is written by other weights than its version says."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.models import make_random_model

import workbench as wb
from workbench.base import runtime
from workbench.base.errors import EngineError
from workbench.engines import Learner, LocalEngine, LogProbModel, Request, Sample, Sampler, local, protocol
from workbench.engines.local_engine.loading import in_memory, write_to
from workbench.engines.paired import Paired, paired
from workbench.engines.settings import VllmSettings, arguments_of
from workbench.engines.vllm_server.process import mapped
from workbench.engines.weights import weights_of
from workbench.replay.run import late_learner
from workbench.testing.engines import EngineContract, LikelihoodLoss


@pytest.mark.slow
class TestPaired(EngineContract):
    @pytest.fixture(autouse=True)
    def _folder(self, folder: Path) -> None:
        self.folder = folder

    def make_engine(self, **settings: Any) -> Any:
        return paired(local(self.folder, device="cpu", **settings), local(self.folder, device="cpu"))


REQUESTS = EngineContract.requests()


def learn(engine: Any) -> int:
    """One update, as a stage makes it."""
    batch = EngineContract().batch(engine)
    engine.learn(batch, LikelihoodLoss(), EngineContract.counts(batch))
    return engine.commit()


def tokens(samples: list[Sample]) -> list[tuple[tuple[int, ...], int]]:
    """Ids and version of each; log-probs may differ in their last digit."""
    return [(sample.ids, sample.version) for sample in samples]


class Told:
    """A local engine that writes down what it is told to do."""

    def __init__(self, engine: Any) -> None:
        self.engine, self.tokenizer, self.told = engine, engine.tokenizer, []
        self.fail = self.busy = False

    @property
    def version(self) -> int:
        return self.engine.version

    async def sample(self, request: Request) -> Any:
        return await self.engine.sample(request)

    def load_weights(self, weights: dict[str, torch.Tensor], version: int) -> None:
        assert not self.busy, "two pushes at once"
        self.busy = True
        self.told.append(f"load {version}")
        threading.Event().wait(0.05)  # long enough to be cancelled
        self.busy = False
        if self.fail:
            raise EngineError("half-way")
        self.engine.load_weights(weights, version)

    def sleep(self, level: int = 1) -> None:
        self.told.append(f"sleep {level}")

    def wake(self, tags: Sequence[str] | None = None) -> None:
        self.told.append(f"wake {' '.join(tags or ())}")


@pytest.mark.slow
def test_it_is_all_three(folder: Path) -> None:
    engine = paired(local(folder), local(folder))
    assert isinstance(engine, Sampler) and isinstance(engine, LogProbModel) and isinstance(engine, Learner)
    assert engine.max_length == 128 and engine.path == str(folder) and callable(engine.full_kl)
    assert engine.describe()["sampler"]["path"] == str(folder) and engine.describe()["lora_rank"] == 0
    assert "learner=LocalEngine" in repr(engine)
    with pytest.raises(AttributeError, match="nothing_such"):
        _ = engine.nothing_such


LEARNERS = (protocol.Differentiable, protocol.WholeDistributions, protocol.Estimates)


def test_what_only_some_can_stands_on_the_object_itself(folder: Path) -> None:
    """Since Python 3.12 `isinstance` looks there, and not at `__getattr__`."""
    learner = local(folder)
    engine = paired(learner, local(folder))
    for can in (*LEARNERS, protocol.WeightSource, protocol.Bounded, protocol.Located, protocol.Templated):
        assert isinstance(engine, can) and isinstance(learner, can)
        for name in (name for name in vars(can) if not name.startswith("_")):
            inspect.getattr_static(engine, name)
    assert isinstance(engine, protocol.PinnedWeights) and not isinstance(learner, protocol.PinnedWeights)
    assert engine.lost is None  # as of a learner in this process
    plain: Any = SimpleNamespace(tokenizer=learner.tokenizer)
    assert not any(isinstance(paired(plain, learner), can) for can in LEARNERS)
    late = late_learner((LocalEngine,))  # asked before a step's learner is opened
    for can in (*LEARNERS, protocol.Stateful, protocol.Losable, protocol.Late):
        for name in (name for name in vars(can) if not name.startswith("_")):
            inspect.getattr_static(late, name)


@pytest.mark.slow
def test_rows_carry_the_version_whose_weights_wrote_them(folder: Path) -> None:
    learner, sampler = local(folder, lr=1e-2), Told(local(folder))
    engine = paired(learner, sampler)
    before = engine.sample_many(REQUESTS)
    assert sampler.told == ["load 0"] and {sample.version for sample in before} == {0}
    engine.sample_many(REQUESTS)
    assert sampler.told == ["load 0"]  # nothing moved
    kept = engine.snapshot()
    assert learn(engine) == 1
    after = engine.sample_many(REQUESTS)
    assert sampler.told == ["load 0", "load 1"] and {sample.version for sample in after} == {1}
    assert tokens(after) == tokens(learner.sample_many(REQUESTS)) != tokens(before)
    engine.restore(kept)  # a step back is a move, too
    assert tokens(engine.sample_many(REQUESTS)) == tokens(before) and sampler.told[2:] == ["load 0"]


@pytest.mark.slow
def test_many_ask_and_one_pushes_also_when_all_are_cancelled(folder: Path) -> None:
    sampler = Told(local(folder))
    engine = paired(local(folder), sampler)

    async def cancelled() -> None:
        asked = [asyncio.ensure_future(engine.sample(request)) for request in REQUESTS]
        await asyncio.sleep(0.02)
        for one in asked:
            one.cancel()
        await asyncio.gather(*asked, return_exceptions=True)

    runtime.run(cancelled())
    assert len(engine.sample_many(REQUESTS)) == 6 and sampler.told == ["load 0"]


@pytest.mark.slow
def test_a_push_that_failed_is_made_again(folder: Path) -> None:
    sampler = Told(local(folder))
    engine = paired(local(folder), sampler)
    sampler.fail = True
    with pytest.raises(EngineError, match="half-way"):
        engine.sample_many(REQUESTS[:1])
    sampler.fail = False
    assert engine.sample_many(REQUESTS[:1]) and sampler.told == ["load 0", "load 0"]


@pytest.mark.slow
def test_on_a_shared_device_memory_is_freed_before_it_is_taken(folder: Path) -> None:
    """Weights are dropped with the sleep, the learner's cache is given back before the sampler wakes, the cache comes last."""
    sampler, learner = Told(local(folder)), local(folder)
    learner.empty_cache = lambda: sampler.told.append("empty_cache")  # type: ignore[method-assign]
    engine = paired(learner, sampler, share_device=True)
    batch = EngineContract().batch(engine)
    engine.compute_log_probs(batch)
    engine.compute_log_probs(batch)
    engine.sample_many(REQUESTS)
    after = ["empty_cache", "wake weights", "load 0", "empty_cache", "wake kv_cache"]
    assert sampler.told == ["load 0", "sleep 2", *after]
    learn(engine)
    engine.sample_many(REQUESTS)
    assert sampler.told[7:] == ["sleep 2", *after[:2], "load 1", *after[3:]]
    engine._sync = SimpleNamespace(way="adapter")  # type: ignore[assignment]
    engine.compute_log_probs(batch)
    engine.sample_many(REQUESTS)  # the base stays in host memory: nothing is pushed
    assert sampler.told[13:] == ["sleep 1", "empty_cache", "wake weights kv_cache"]
    with pytest.raises(EngineError, match=r"a sampler with sleep\(\)"):
        paired(local(folder), local(folder), share_device=True)


@pytest.mark.parametrize(
    ("sleeps", "devices", "share"),
    [(True, ["GPU-a"], True), (True, ["GPU-b"], False), (False, ["GPU-a"], False), (True, [], False)],
)
def test_two_engines_on_one_card_share_it_by_default(
    folder: Path, monkeypatch: pytest.MonkeyPatch, sleeps: bool, devices: list[str], share: bool
) -> None:
    """Nobody says so: the sampler can sleep, and works on the learner's GPU."""
    learner, sampler = local(folder), local(folder)
    there, here = sampler.receives(), learner.sends()
    monkeypatch.setattr(sampler, "receives", lambda: {**there, "sleeps": sleeps, "devices": devices})
    monkeypatch.setattr(learner, "sends", lambda: {**here, "devices": ["GPU-a"]})
    assert paired(learner, sampler).share_device is share
    assert not paired(learner, sampler, share_device=False).share_device


@pytest.mark.parametrize(
    ("gpus", "asked", "sleeps"), [(1, None, True), (2, None, False), (0, None, False), (2, True, True)]
)
def test_vllm_can_sleep_where_one_gpu_is_seen(
    monkeypatch: pytest.MonkeyPatch, gpus: int, asked: bool | None, sleeps: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    settings = VllmSettings(sleep_mode=asked)
    assert settings.sleeps is sleeps and arguments_of("model", settings)["enable_sleep_mode"] is sleeps


def test_a_learner_on_a_gpu_gives_its_cache_back(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("empty_cache"))
    learner = local(folder)
    learner.empty_cache()
    assert calls == []  # nothing of torch.cuda on a CPU
    learner._model = SimpleNamespace(device=torch.device("cuda", 0))
    learner.empty_cache()
    assert calls == ["empty_cache"]


@pytest.mark.slow
def test_engines_that_do_not_fit_are_refused(folder: Path, tmp_path: Path) -> None:
    other = local(make_random_model(tmp_path / "other", vocabulary=32))
    with pytest.raises(EngineError, match="64 and 32 tokens, 32 entries"):
        paired(local(folder), other)
    one = local(folder)
    with pytest.raises(EngineError, match="two engines"):
        paired(one, one)


@pytest.mark.slow
def test_weights_are_whole_tied_heads_and_merged_adapters_included(folder: Path) -> None:
    learner = local(folder, lr=1e-2)
    found = weights_of(learner)
    assert set(found) == set(learner._model.state_dict())
    assert torch.equal(found["lm_head.weight"], found["model.embed_tokens.weight"])
    adapted = local(folder, lora_rank=4, lr=1e-1)
    engine: Paired = paired(adapted, local(folder))
    learn(engine)
    merged = weights_of(adapted)
    assert set(merged) == set(found)
    assert not torch.equal(merged["model.layers.0.self_attn.q_proj.weight"], found["model.layers.0.self_attn.q_proj.weight"])  # fmt: skip
    batch = EngineContract().batch(engine)  # sampled by the plain model, scored by the adapted one
    torch.testing.assert_close(
        engine.compute_log_probs(batch)["log_probs"], batch["rollout_log_probs"], atol=2e-5, rtol=0
    )
    plain: Any = SimpleNamespace(save=learner.save)  # one that can only save: its folder is read back
    saved = weights_of(plain)
    assert set(saved) == set(found) and all(torch.equal(saved[name], tensor) for name, tensor in found.items())


def test_a_file_in_memory_leaves_nothing() -> None:
    given = torch.arange(6, dtype=torch.uint8)
    with in_memory(given) as path:
        assert torch.equal(mapped(path, 6), given)
    assert not Path(path).exists()


def test_weights_in_a_file_are_a_safetensors_file(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    given = {
        "a": torch.arange(6.0).view(2, 3).t(),  # not contiguous
        "b": torch.tensor([1, 2]),
        "none": torch.zeros(0, 4),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
    }
    for dtype in (None, torch.bfloat16):
        with (tmp_path / "file").open("wb") as file:
            write_to(file, given, dtype)
        found = load_file(tmp_path / "file")
        assert all(torch.equal(found[name].double(), tensor.double()) for name, tensor in given.items())
    assert found["a"].dtype == torch.bfloat16 and found["b"].dtype == torch.int64


@pytest.mark.slow
def test_two_steps_are_those_of_one_engine(tiny: str) -> None:
    rows = wb.rows("data/arith/train.parquet", max_prompt_length=256)
    found = []
    for engine in (local(tiny, lr=1e-3), paired(local(tiny, lr=1e-3), local(tiny))):
        pipe = wb.recipes.grpo(engine, group_size=4, max_tokens=32)
        stepper = wb.Stepper(pipe, rows.batch(4)).run()
        assert stepper.batch["policy_version"].unique().tolist() == [0]
        stepper = wb.Stepper(pipe, rows.batch(4, step=2)).run()
        assert stepper.batch["policy_version"].unique().tolist() == [1] and engine.version == 2
        found.append((stepper.batch["responses"], engine.snapshot()["weights"]))
    assert torch.equal(found[0][0], found[1][0])
    for name, tensor in found[0][1].items():
        torch.testing.assert_close(tensor, found[1][1][name], atol=1e-6, rtol=0)
