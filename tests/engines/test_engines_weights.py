"""Every way of weights from a learner to a sampler: what arrives is what was sent, or the sampler refuses to sample."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from workbench.base.errors import EngineError, WorkerLost
from workbench.engines import fsdp, local, local_group, weights
from workbench.engines.paired import CHECK_TOLERANCE, check_push, paired
from workbench.engines.vllm_server import process
from workbench.engines.vllm_server.engine import VllmEngine, VllmSettings
from workbench.engines.vllm_server.process import Piece
from workbench.engines.weights import (
    Entry,
    FallbackSync,
    Push,
    Tensors,
    buckets_of,
    layout_of,
    possible,
    sync_of,
    weights_of,
)
from workbench.engines.workers.hosted import Hosted, Replicas, host
from workbench.engines.workers.processes import processes
from workbench.runs.batch_metrics import push_metrics
from workbench.testing.engines import EngineContract, LikelihoodLoss

PROMPTS = [[5, 6, 7], [9, 10, 11, 12]]
SMALL = 4096
"""Bytes of a bucket: the random model's embeddings need several."""


@pytest.fixture(scope="module")
def replicas(folder: Path) -> Iterator[Replicas]:
    def made(name: str) -> Hosted:
        return Hosted(lambda: processes(host, 1, kind="local", path=str(folder), settings={}), name=name)

    with Replicas([made("first"), made("second")]) as both:
        yield both


def shaken(engine: Any) -> Any:
    """The engine with other weights and another version."""
    with torch.no_grad():
        for name, tensor in engine._model.state_dict().items():
            if "lora_B" in name or ("lora_" not in name and not engine._adapted):
                tensor.add_(torch.randn_like(tensor) * 0.1)
    engine.commit()
    return engine


# --- buckets ------------------------------------------------------------------------------------


def test_a_plan_holds_every_row_once_in_buckets_of_bounded_size() -> None:
    layout = {
        "embed": Entry((10, 4), "float32"),  # 80 bytes in bfloat16
        "head": Entry((10, 4), "float32", tied="embed"),
        "norm": Entry((4,), "float32"),
        "count": Entry((), "int64"),
        "none": Entry((0, 4), "float32"),
    }
    plan = list(buckets_of(layout, "bfloat16", 70, split=True))
    found = [[(one.name, one.first, one.rows, one.offset, one.tied) for one in pieces] for pieces, _ in plan]
    assert found == [
        [("embed", 0, 8, 0, False), ("head", 0, 8, 0, True)],  # 8 rows of 8 bytes
        [("embed", 8, 2, 0, False), ("head", 8, 2, 0, True)],
        [("norm", 0, 4, 0, False)],
        [("count", 0, 1, 0, False), ("none", 0, 0, 64, False)],  # at a multiple of 64
    ]
    whole, size = next(buckets_of(layout, None, 70, split=False))
    assert [one.name for one in whole] == ["embed", "head"] and size == 192
    assert {one.dtype for pieces, _ in plan for one in pieces} == {"bfloat16", "int64"}


@pytest.mark.parametrize("limit", [64, 1000, SMALL, 1 << 20])
@pytest.mark.parametrize("split", [True, False])
def test_what_is_written_is_what_is_read(folder: Path, limit: int, split: bool, tmp_path: Path) -> None:
    learner = local(folder)
    layout, held = layout_of(learner._model), learner._model.state_dict()
    got = {name: torch.full(one.shape, math.nan) for name, one in layout.items()}
    for pieces, nbytes in buckets_of(layout, None, limit, split=split):
        file = tmp_path / "bucket"
        file.write_bytes(bytes(nbytes))
        learner.send_weights(pieces, {"file": str(file), "nbytes": nbytes})
        memory = process.received({"file": str(file), "nbytes": nbytes}, "cpu", None)
        for one in pieces:
            weights.rows_of(got[one.name], one).copy_(one.within(memory))
        biggest = max(one.nbytes if not split else one.nbytes // max(one.rows, 1) for one in pieces)
        assert nbytes <= max(limit + 63, biggest + 63)
    assert all(torch.equal(got[name], held[name]) for name in held) and layout["lm_head.weight"].tied


# --- ways ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_in_one_process_nothing_is_copied_on_the_way(folder: Path) -> None:
    learner, sampler = shaken(local(folder)), local(folder)
    pair = paired(learner, sampler)
    push = check_push(pair, PROMPTS)
    assert push.way == "in place" and push.gap is not None and push.gap < 1e-4 and "in place" in repr(pair)
    assert all(torch.equal(one, learner.full_weights()[name]) for name, one in sampler.full_weights().items())
    assert "weight_sync" not in pair.describe()
    with pytest.raises(EngineError, match="cannot go.*by 'shared memory'; expected one of in place, whole"):
        paired(learner, sampler, weight_sync="shared memory").push()
    with pytest.raises(EngineError, match="way of weights"):
        paired(learner, sampler, weight_sync="carrier pigeon").push()


@pytest.mark.slow
def test_engines_whose_passes_are_in_half_precision_may_be_further_apart(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On an H200 a right push was refused: both engines hold float32 weights and compute in bfloat16."""
    monkeypatch.setitem(CHECK_TOLERANCE, torch.float32, 1e-5)
    pair = paired(local(folder, dtype="bfloat16"), local(folder, dtype="bfloat16"))
    push = check_push(pair, PROMPTS)
    assert push.dtype == "float32" and push.gap is not None and 1e-5 < push.gap < 0.3


@pytest.mark.slow
def test_every_way_brings_the_same_weights_to_every_replica(folder: Path, replicas: Replicas) -> None:
    learner = local(folder)
    assert possible(learner, replicas) == ["shared memory", "object store", "broadcast"]
    for way in ("shared memory", "object store", "broadcast", "whole"):
        pair = paired(shaken(learner), replicas, weight_sync=way, bucket_bytes=SMALL)
        push = check_push(pair, PROMPTS)
        assert push.way == way and push.gap is not None and push.gap < 1e-4 and not push.note
        samples = pair.sample_many(EngineContract.requests())
        assert [one.ids for one in samples] == [one.ids for one in learner.sample_many(EngineContract.requests())]
        assert {one.version for one in samples} == {learner.version} == {one.version for one in replicas.members}
    size = sum(one.nbytes for name, one in learner._model.state_dict().items() if name != "lm_head.weight")
    assert push.bytes > size  # as a whole the tied head goes twice
    adapted = shaken(local(folder, lora_rank=4))
    assert check_push(paired(adapted, replicas, bucket_bytes=SMALL), PROMPTS).way == "shared memory"


@pytest.mark.slow
def test_sharded_ranks_write_their_own_rows(folder: Path, replicas: Replicas) -> None:
    batch = EngineContract().batch(local(folder))
    ranks = local_group(2, threads=1)
    try:
        for settings in ({}, {"lora_rank": 4}):
            learner = fsdp(folder, on=ranks, lr=1e-2, **settings)
            learner.learn(batch, LikelihoodLoss(), EngineContract.counts(batch))
            learner.commit()
            for way in ("auto", "object store", "broadcast"):
                push = check_push(paired(learner, replicas, weight_sync=way, bucket_bytes=SMALL), PROMPTS)
                assert push.gap is not None and push.gap < 1e-4
            learner.empty_cache()
    finally:
        ranks.close()


# --- pushes that break --------------------------------------------------------------------------


@pytest.mark.slow
def test_half_a_push_is_never_served(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    learner, sampler = shaken(local(folder)), local(folder)
    pair = paired(learner, sampler, bucket_bytes=SMALL)
    send, sent = learner.send_weights, []

    def breaks(pieces: Any, place: Any) -> Any:
        sent.append(pieces)
        if len(sent) == 2:
            raise EngineError("the learner's process died")
        return send(pieces, place)

    monkeypatch.setattr(learner, "send_weights", breaks)
    with pytest.raises(EngineError, match="died"):
        pair.push()
    with pytest.raises(EngineError, match="some old and some new.*push again"):
        sampler.sample_many(EngineContract.requests())
    assert pair.sample_many(EngineContract.requests())[0].version == 1  # the pair pushes again by itself


def test_a_push_that_lacks_rows_is_refused_at_its_end(folder: Path) -> None:
    learner, sampler = local(folder), local(folder)
    with pytest.raises(EngineError, match="bucket of weights"):
        sampler.take_weights([], {"here": []})
    layout = learner.weight_layout()
    sampler.begin_weights({name: one.shape for name, one in layout.items()})
    *buckets, _ = buckets_of(layout, None, SMALL, split=True)
    for pieces, nbytes in buckets:
        place = {"here": None, "nbytes": nbytes}
        sampler.take_weights(pieces, {"here": learner.send_weights(pieces, place), "nbytes": nbytes})
    with pytest.raises(EngineError, match="is incomplete; expected all rows of model.layers.1"):
        sampler.end_weights(3)
    with pytest.raises(EngineError, match="some old"):
        sampler.sample_many(EngineContract.requests())
    assert sampler.load_weights(weights_of(learner), 4) >= 0 and sampler.version == 4


@pytest.mark.slow
def test_another_version_than_the_pushed_one_is_no_success(folder: Path) -> None:
    sampler = local(folder)
    sampler.end_weights = lambda version: 7  # type: ignore[method-assign]
    with pytest.raises(EngineError, match="does not serve.*expected policy version 1; found version 7"):
        sampler.load_weights(weights_of(local(folder)), 1)
    members = Replicas([local(folder), sampler], name="both")
    with pytest.raises(EngineError, match="a member of both does not serve.*version 7"):
        members.load_weights(weights_of(local(folder)), 1)


# --- on GPUs, without one -----------------------------------------------------------------------


class Placed:
    """A sender or receiver that says where it is."""

    def __init__(self, **facts: Any) -> None:
        self.facts = {
            "machines": [weights.machine()],
            "devices": [],
            "folder": "/m",
            "adapter_rank": 0,
            "processes": 1,
        } | facts

    def sends(self) -> dict[str, Any]:
        return {"pid": None, "adapter": None} | self.facts

    def receives(self) -> dict[str, Any]:
        return {"pids": [1]} | self.facts

    def __getattr__(self, name: str) -> Any:
        if name in weights.WeightSender.__dict__ or name in weights.WeightReceiver.__dict__:
            return lambda *given: None
        raise AttributeError(name)

    weight_layout = send_weights = open_group = empty_cache = lambda *given: None
    begin_weights = take_weights = end_weights = cancel_weights = lambda *given: None


@pytest.mark.parametrize(
    ("here", "there", "ways"),
    [
        (["a", "b"], ["a", "b"], ["CUDA IPC", "shared memory", "object store"]),
        (["a", "b"], ["b"], ["CUDA IPC", "shared memory", "object store"]),
        (["a"], ["b", "c"], ["broadcast", "shared memory", "object store"]),
        (["a", "b"], ["b", "c"], ["shared memory", "object store"]),
        (["a"], [], ["shared memory", "object store"]),
    ],
)
def test_the_way_follows_from_the_gpus(here: list[str], there: list[str], ways: list[str]) -> None:
    assert possible(Placed(devices=here), Placed(devices=there)) == ways
    apart = [one for one in ways if one != "shared memory"]
    assert possible(Placed(devices=here), Placed(devices=there, machines=["another"])) == apart


def test_an_adapter_goes_alone_over_its_own_base(tmp_path: Path) -> None:
    adapter = {"rank": 8, "base": "/m"}
    assert possible(Placed(adapter=adapter), Placed(adapter_rank=8))[0] == "adapter"
    for other in (
        {"adapter_rank": 4},
        {"adapter_rank": 8, "folder": "/other"},
        {"adapter_rank": 8, "machines": ["another"]},
    ):
        assert "adapter" not in possible(Placed(adapter=adapter), Placed(**other))


def test_a_way_that_no_gpu_has_confirmed_falls_back(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    chosen = sync_of(Placed(devices=["a"]), Placed(devices=["a"]))
    assert isinstance(chosen, FallbackSync) and chosen.way == "CUDA IPC"
    asked = sync_of(Placed(devices=["a"]), Placed(devices=["a"]), "CUDA IPC")
    assert not isinstance(asked, FallbackSync)  # who asked for it gets its error
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    weights.prove("CUDA IPC")
    weights.prove("broadcast")
    assert weights.proven() == {"CUDA IPC", "broadcast"}
    assert not isinstance(sync_of(Placed(devices=["a"]), Placed(devices=["a"])), FallbackSync)

    def ways(error: Exception) -> FallbackSync:
        def fails(version: int) -> Push:
            raise error

        push = Push("shared memory", 1, 2, 0.0, 3)
        first, other = (
            SimpleNamespace(way="CUDA IPC", push=fails),
            SimpleNamespace(way="shared memory", push=lambda version: push),
        )
        return FallbackSync(first, other)  # type: ignore[arg-type]

    careful = ways(EngineError("invalid device context"))
    with pytest.warns(
        UserWarning, match="through shared memory, since CUDA IPC failed: EngineError: invalid device context"
    ):
        assert careful.push(1).way == "shared memory"
    assert careful.push(1) and careful.way == "shared memory"  # and stays there, without a warning
    with pytest.raises(WorkerLost):
        ways(WorkerLost("gone")).push(1)


def test_a_handle_of_gpu_memory_goes_as_json_and_is_opened_on_the_same_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of calls and the device; torch's own CUDA calls are replaced."""
    calls: list[Any] = []
    parts = (3, b"\x01\xff", 256, 64, b"ref", 0, b"event", True)
    shared = SimpleNamespace(untyped_storage=lambda: SimpleNamespace(_share_cuda_=lambda: parts))
    handle = process.ipc_handle(shared)
    assert handle == ["01ff", 256, 64, "726566", 0, "6576656e74", True]
    monkeypatch.setattr(
        torch, "UntypedStorage", SimpleNamespace(_new_shared_cuda=lambda *given: calls.append(given) or "storage")
    )
    memory = torch.zeros(8, dtype=torch.uint8)
    monkeypatch.setattr(
        torch,
        "empty",
        lambda *size, **how: calls.append(how) or SimpleNamespace(set_=lambda one: calls.append(one) or memory),
    )
    names = {"cuda:1": "GPU-b"}
    monkeypatch.setattr(process, "device_name", lambda device: names[str(device)])
    found = process.received({"ipc": {"GPU-a": None, "GPU-b": handle}, "nbytes": 5}, torch.device("cuda", 1), None)
    assert calls[0] == (1, *parts[1:]) and calls[2] == "storage" and len(found) == 5
    assert calls[1] == {"dtype": torch.uint8, "device": torch.device("cuda", 1)}


def test_a_bucket_for_another_process_is_finished_before_its_handle_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: calls.append(f"synchronize {device}"))
    monkeypatch.setattr(weights, "ipc_handle", lambda memory: calls.append("handle") or ["h"])
    monkeypatch.setattr(weights, "device_name", lambda device: "GPU-a")
    outbox, piece = weights.Outbox(), Piece("w", (2,), "float32", 0, 2, 0)
    sent = outbox.send([piece], {"ipc": None, "nbytes": 8}, lambda one: torch.tensor([1.0, 2.0]), "cpu")
    assert sent == {"GPU-a": ["h"]} and calls == ["synchronize cpu", "handle"]
    assert piece.within(outbox._kept).tolist() == [1.0, 2.0]  # kept until the next one
    outbox.drop()
    assert outbox._kept is None


def test_gpu_ways_say_that_they_are_unverified(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = local(folder)
    facts = sampler.receives()
    sampler.receives = lambda: {**facts, "devices": ["GPU-a"]}  # type: ignore[method-assign]
    push = sync_of(Tensors(weights_of(local(folder))), sampler).push(1)
    assert push.note == weights.UNVERIFIED and push.note in str(push)


@pytest.mark.slow
def test_the_figures_of_pushes_are_metrics_of_the_step(folder: Path) -> None:
    pair = paired(local(folder), local(folder))
    assert push_metrics([pair, local(folder)]) == {}
    pair.last_push = Push("shared memory", 1, 2 << 30, 1.5, 1 << 29)
    found = {"timing_s/update_weights": 1.5, "perf/update_weights_gb": 2.0, "perf/update_weights_host_gb": 0.5}
    assert push_metrics([pair, local(folder)]) == found


def test_vllm_draws_by_row_unless_told_otherwise() -> None:
    request = EngineContract.requests()[0]
    for seeds, wanted in (("rows", request.seed), ("engine", None)):
        engine: Any = SimpleNamespace(_settings=VllmSettings(seeds=seeds), _eos=frozenset({2}))
        assert VllmEngine._parameters(engine, request)["seed"] == wanted
