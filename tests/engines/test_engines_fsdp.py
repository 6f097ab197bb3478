"""Weights cut over one and two ranks: the same numbers as in one process, checkpoints for any number of ranks, dead workers."""

from __future__ import annotations

import dataclasses
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from support.architectures import make
from support.patience import LONG, patience, within
from support.shards import counts, difference

import workbench as wb
from workbench.base import runtime
from workbench.base.errors import (
    CheckpointError,
    EngineError,
    Interrupted,
    NonFinite,
    OutOfMemory,
    SettingError,
    WorkerLost,
)
from workbench.base.metrics import Max, Sum
from workbench.dataproto import DataProto
from workbench.engines import LossCounts, LossOutput, local
from workbench.engines.fsdp_engine.engine import FsdpEngine, fsdp
from workbench.engines.fsdp_engine.folders import export
from workbench.engines.fsdp_engine.group import Group, local_group, shared_out
from workbench.engines.local_engine.selfcheck import batch_of
from workbench.engines.paired import Paired
from workbench.engines.workers import processes as processes_module
from workbench.engines.workers.processes import processes
from workbench.rewards import Reward
from workbench.stages.update import PolicyLoss
from workbench.testing.engines import EngineContract, LikelihoodLoss

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def one() -> Iterator[Group]:
    group = local_group(1, device="cpu", threads=1)
    yield group
    group.close()


def engines(where: Group, **settings: Any) -> tuple[FsdpEngine, Any]:
    return (
        fsdp("data/tiny-arith", on=where, device="cpu", **settings),
        local("data/tiny-arith", device="cpu", **settings),
    )


def varied(response: str) -> float:
    return (sum(map(ord, response)) % 5) / 4


class TestFsdpEngine(EngineContract):
    """The contract of engines, on two ranks; the samples are the local engine's."""

    # sampling is another engine's: these ask for nothing that shards have
    test_same_seed_same_tokens_whoever_shares_the_wave = None
    test_small_waves_change_nothing = None
    test_limits_and_reasons = None
    test_any_event_loop_may_ask = None
    test_records_travel = None
    test_an_interrupt_stops_sampling = None

    @pytest.fixture(autouse=True)
    def _where(self, two: Group, folder: Path) -> None:
        self.group, self.folder = two, folder

    def make_engine(self, **settings: Any) -> Any:
        engine = fsdp(self.folder, on=self.group, device="cpu", **settings)
        engine.sample_many = local(self.folder, device="cpu").sample_many  # type: ignore[attr-defined]
        return engine

    @staticmethod
    def weights(engine: Any) -> dict[str, torch.Tensor]:
        return engine.full_weights()


# --- the same numbers ---------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["one", "two"])
def test_scores_equal_the_local_engines(where: str, batch: DataProto, request: pytest.FixtureRequest) -> None:
    there, here = engines(request.getfixturevalue(where))
    for temperature in (1.0, 0.7):
        want = ("log_probs", "entropy", "sum_pi_squared")
        a, b = there.compute_log_probs(batch, want, temperature), here.compute_log_probs(batch, want, temperature)
        assert difference(a, b) < 2e-6
        assert all(bool((a[name][batch["response_mask"] == 0] == 0).all()) for name in want)


@pytest.mark.parametrize("name", ["granite", "gemma3", "bloom", "mamba"])
def test_ranks_check_what_they_open_and_score_as_the_local_engine(name: str, two: Group, tmp_path: Path) -> None:
    folder, rows = make(name, tmp_path / name), batch_of([((9, 8, 7), (5, 6)), ((9, 8, 7), (11,)), ((4,), (5, 7, 3))])
    there, here = fsdp(folder, on=two, device="cpu"), local(folder, device="cpu")
    assert there.selfcheck.found and there.selfcheck.paths.pack == here.selfcheck.paths.pack
    assert difference(there.compute_log_probs(rows), here.compute_log_probs(rows)) < 1e-5
    gradients = [engine.gradient(rows, LikelihoodLoss(), counts(rows)) for engine in (there, here)]
    assert difference(*gradients) < 1e-5


@pytest.mark.parametrize("name", ["llama", "llama4", "falcon_h1"])
def test_ranks_that_compute_in_half_precision_are_checked_in_float32_too(name: str, one: Group, tmp_path: Path) -> None:
    """bfloat16 rounds by about as much as packing is wrong in the last two."""
    folder = make(name, tmp_path / "model")
    engine = fsdp(folder, on=one, device="cpu", dtype="bfloat16")
    assert engine.selfcheck.paths.pack == (name == "llama") and engine.selfcheck.difference < 1e-5
    rows = batch_of([((9, 8, 7), (5, 6)), ((4,), (5, 7, 3))])
    found, exact = (each.compute_log_probs(rows)["log_probs"] for each in (engine, local(folder, device="cpu")))
    assert 1e-4 < float((found - exact).abs().max()) < 0.3, "it computes in half precision"


@pytest.mark.parametrize("where", ["one", "two"])
@pytest.mark.parametrize(
    "extra",
    [{}, {"micro_batch_tokens": 60, "offload": "optimizer"}, {"gradient_checkpointing": True, "offload": "all"}],
)
def test_two_updates_equal_the_local_engines(
    where: str, extra: dict[str, Any], batch: DataProto, request: pytest.FixtureRequest
) -> None:
    settings = {
        "lr": 1e-4,
        "schedule": "cosine",
        "total_steps": 4,
        "warmup_steps": 1,
        "grad_clip": 0.5,
        "weight_decay": 0.1,
    }
    there = fsdp("data/tiny-arith", on=request.getfixturevalue(where), device="cpu", **settings, **extra)
    here = local("data/tiny-arith", device="cpu", **settings)
    loss = PolicyLoss(entropy_coeff=0.01)
    for _ in range(2):
        a, b = (engine.learn(batch, loss, counts(batch)) for engine in (there, here))
        x, y = ({name: metric.result() for name, metric in one.metrics.items()} for one in (a, b))
        assert x.keys() == y.keys() and x["lr"] == y["lr"]
        assert x["loss"] == pytest.approx(y["loss"], rel=1e-5) and x["grad_norm"] == pytest.approx(
            y["grad_norm"], rel=1e-5
        )
        assert x["grad_norm"] > 0.5  # clipping was at work
        assert x == pytest.approx(y, rel=1e-4, abs=1e-6)
        torch.testing.assert_close(a.columns["new_log_probs"], b.columns["new_log_probs"], atol=1e-5, rtol=0)
        assert torch.equal(a.columns["clipped"], b.columns["clipped"])
    assert difference(there.full_weights(), here.snapshot()["weights"]) < 1e-5


def test_one_rank_is_the_local_engine_bit_for_bit(one: Group, batch: DataProto) -> None:
    there, here = engines(one, lr=1e-3, micro_batch_tokens=100)
    for _ in range(2):
        a, b = (engine.learn(batch, LikelihoodLoss(), counts(batch)) for engine in (there, here))
        assert a.metrics["loss"] == b.metrics["loss"] and a.metrics["grad_norm"] == b.metrics["grad_norm"]
    assert difference(there.full_weights(), here.snapshot()["weights"]) == 0


def test_two_ranks_of_one_micro_batch_are_one_rank_of_two(one: Group, two: Group, batch: DataProto) -> None:
    rows = batch.slice(0, 8)
    places = shared_out(rows["attention_mask"].sum(-1).tolist(), 2)
    there = fsdp("data/tiny-arith", on=two, device="cpu", lr=1e-3)
    alone = fsdp("data/tiny-arith", on=one, device="cpu", lr=1e-3)
    a = there.gradient(rows, LikelihoodLoss(), counts(rows))
    parts = [alone.gradient(rows.select_idxs(place), LikelihoodLoss(), counts(rows)) for place in places]
    assert all(torch.equal(a[name], parts[0][name] + parts[1][name]) for name in a)


def test_rows_are_shared_out_evenly_by_tokens_and_come_back_in_order(two: Group, batch: DataProto) -> None:
    assert [part.tolist() for part in shared_out([5], 3)] == [[0], [], []]
    assert [part.tolist() for part in shared_out([], 2)] == [[], []]
    lengths = [100, 10, 60, 50]
    assert sorted(sum(lengths[row] for row in part.tolist()) for part in shared_out(lengths, 2)) == [110, 110]
    there, here = engines(two, lr=1e-3)
    for number in (1, 2, 3, 7):
        rows = batch.slice(11 - number, 11)
        # oneDNN sums another number of rows in another order
        assert difference(there.compute_log_probs(rows), here.compute_log_probs(rows)) < 4e-6
        a, b = (engine.probe(rows, LikelihoodLoss(), counts(rows)) for engine in (there, here))
        assert a.metrics["grad_norm"].result() == pytest.approx(b.metrics["grad_norm"].result(), rel=1e-5)
        torch.testing.assert_close(a.columns["seen"], b.columns["seen"], atol=4e-6, rtol=0)


def test_the_same_batch_twice_gives_the_same_numbers(two: Group, batch: DataProto) -> None:
    twins = [fsdp("data/tiny-arith", on=two, device="cpu", lr=1e-3) for _ in range(2)]
    found = [
        [twin.learn(batch, PolicyLoss(), counts(batch)).metrics["grad_norm"].result() for _ in range(2)]
        for twin in twins
    ]
    assert found[0] == found[1] and difference(twins[0].full_weights(), twins[1].full_weights()) == 0


def test_probes_and_nudges(two: Group, batch: DataProto) -> None:
    there, here = engines(two)
    rows = batch.slice(0, 5)
    a, b = (engine.probe(rows, LikelihoodLoss(), counts(rows), per_row=True) for engine in (there, here))
    torch.testing.assert_close(a.columns["row_grad_norm"], b.columns["row_grad_norm"], rtol=1e-5, atol=0)
    x, y = (engine.gradient(rows, LikelihoodLoss(), counts(rows)) for engine in (there, here))
    assert x.keys() == y.keys() and difference(x, y) < 1e-5
    before, same = there.full_weights(), there.compute_log_probs(rows)["log_probs"]
    with there.perturbed(x, 0.01), here.perturbed(x, 0.01):
        moved = there.compute_log_probs(rows)["log_probs"]
        torch.testing.assert_close(moved, here.compute_log_probs(rows)["log_probs"], atol=1e-5, rtol=0)
    assert not torch.equal(moved, same) and difference(before, there.full_weights()) == 0


def test_a_critic_and_half_precision(two: Group, batch: DataProto) -> None:
    there, here = engines(two)
    critics = there.critic(lr=1e-2), here.critic(lr=1e-2)
    for _ in range(2):
        a, b = (critic.learn(batch, LikelihoodLoss(want=("values",)), counts(batch)) for critic in critics)
        assert a.metrics["grad_norm"].result() == pytest.approx(b.metrics["grad_norm"].result(), rel=1e-5)
    values = [critic.compute_log_probs(batch, ("values",))["values"] for critic in critics]
    torch.testing.assert_close(*values, atol=1e-4, rtol=0)
    with pytest.raises(EngineError, match="critic"):
        there.compute_log_probs(batch, ("values",))
    half = fsdp("data/tiny-arith", on=two, device="cpu", dtype="bfloat16", lr=1e-3)
    gap = (half.compute_log_probs(batch)["log_probs"] - here.compute_log_probs(batch)["log_probs"]).abs().max()
    assert 1e-5 < gap < 0.2
    again = fsdp("data/tiny-arith", on=two, device="cpu", dtype="bfloat16", gradient_checkpointing=True, pack="yes")
    once, twice = (engine.probe(batch, LikelihoodLoss(), counts(batch)).metrics for engine in (half, again))
    assert once["grad_norm"].result() == pytest.approx(twice["grad_norm"].result(), rel=1e-3)  # layers attend twice
    half.learn(batch, LikelihoodLoss(), counts(batch))
    assert all(tensor.dtype == torch.float32 for tensor in half.full_weights().values())


def test_two_grpo_steps_and_a_step_back_equal_the_local_engines(two: Group) -> None:
    rows = wb.rows("data/arith/train.parquet", max_prompt_length=256)
    there, here = engines(two, lr=2e-4)
    found = []
    for engine in (Paired(there, local("data/tiny-arith", device="cpu")), here):
        pipe = wb.recipes.grpo(engine, group_size=4, kl_coef=0.001, max_tokens=32)
        wb.Stepper(pipe, rows.batch(4)).run().back(to="update_actor").run()
        found.append(wb.Stepper(pipe, rows[4:].batch(4)).run().batch)
    assert torch.equal(found[0]["responses"], found[1]["responses"])
    for name in ("old_log_probs", "ref_log_prob", "new_log_probs", "advantages"):
        # Adam's first steps are as long for a gradient that is all rounding
        torch.testing.assert_close(found[0][name], found[1][name], atol=2e-4, rtol=0)
    assert difference(there.full_weights(), here.snapshot()["weights"]) < 1e-4


def test_a_reference_that_follows_the_policy_is_the_local_engines_and_is_resumed(two: Group, tmp_path: Path) -> None:
    rows = wb.rows("data/arith/train.parquet", max_prompt_length=256, limit=8)
    how: dict[str, Any] = {"batch_size": 2, "display": None, "save_freq": 1, "max_rollout_kl": None}

    def pipe(sharded: bool) -> Any:
        engine: Any = local("data/tiny-arith", device="cpu", lr=2e-4)
        engine = Paired(fsdp("data/tiny-arith", on=two, device="cpu", lr=2e-4), engine) if sharded else engine
        kit: dict[str, Any] = {"kl_coef": 0.1, "ref_sync_steps": 1, "ref_mixup_alpha": 0.5}
        return wb.recipes.grpo(engine, Reward(varied, in_process=True), group_size=4, max_tokens=8, **kit)

    here, there, again = pipe(False), pipe(True), pipe(True)
    alone = wb.train_blocking(here, rows, steps=2, run=tmp_path / "here", **how)
    run = wb.train_blocking(there, rows, steps=2, run=tmp_path / "there", **how)
    assert run.rows[1]["actor/kl_loss"] == pytest.approx(alone.rows[1]["actor/kl_loss"], rel=1e-2)
    reference, policy = there.learners()["reference"], there.learners()["actor"]
    moved = here.learners()["reference"].snapshot()["weights"]
    assert difference(reference.full_weights(), policy.full_weights()) > 0
    assert difference(reference.full_weights(), moved) < 1e-4
    wb.train_blocking(again, rows, steps=1, run=tmp_path / "again", **how)
    resumed = pipe(True)
    more = {"resume": "auto", "allow_changes": ["train.steps"]}
    run = wb.train_blocking(resumed, rows, steps=2, run=tmp_path / "again", **how, **more)
    assert difference(resumed.learners()["reference"].full_weights(), reference.full_weights()) == 0
    adapted = fsdp("data/tiny-arith", on=two, device="cpu", lora_rank=2)
    with pytest.raises(EngineError, match="LoRA"):
        adapted.twin()


# --- what goes wrong on one rank ----------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Odd(LikelihoodLoss):
    """Raises at one row; notes each call in a file, and waits at it."""

    raises: int | None = None
    waits: float = 0.0
    notes: str = ""

    def __call__(self, outputs: Mapping[str, torch.Tensor], rows: DataProto, loss_counts: LossCounts) -> LossOutput:
        if self.raises is not None and bool((rows["row"] == self.raises).any()):
            raise KeyError("no such thing")
        if self.notes:
            with open(self.notes, "ab") as file:
                file.write(b".")
        time.sleep(self.waits)
        found = super().__call__(outputs, rows, loss_counts)
        return LossOutput(found.loss, {"rows": Sum(float(len(rows))), "most": Max(float(rows["row"].max()))})


class Steep(LikelihoodLoss):
    """A finite loss whose gradient is not: sqrt at 0."""

    def __call__(self, outputs: Mapping[str, torch.Tensor], rows: DataProto, loss_counts: LossCounts) -> LossOutput:
        made = super().__call__(outputs, rows, loss_counts)
        return LossOutput(made.loss + (outputs["log_probs"] * 0).abs().sum().sqrt(), made.metrics, made.columns)


def when_noted(path: Path, then: Callable[[], None]) -> threading.Thread:
    """From a thread, as soon as a loss is computed."""

    def wait() -> None:
        if within(path.exists):
            then()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread


def test_trouble_on_one_rank_reaches_the_driver_and_stops_nobody(two: Group, batch: DataProto) -> None:
    engine = fsdp("data/tiny-arith", on=two, device="cpu", lr=1e-3, micro_batch_tokens=1)
    before, state = engine.full_weights(), engine.state_id
    with pytest.raises(EngineError, match=r"loss raised on rank \d, rows \[4\]: KeyError"):
        engine.learn(batch, Odd(raises=4), counts(batch))
    with pytest.raises(NonFinite, match=r"rows \[7\]"):
        engine.learn(batch, LikelihoodLoss(poison=7), counts(batch))
    named = [name for name, _ in local("data/tiny-arith", device="cpu")._model.named_parameters()]
    with pytest.raises(NonFinite, match=rf"nan: the gradients of {len(named)} parameters.* {named[-1]} \(rank 0, 1\)"):
        engine.learn(batch, Steep(), counts(batch))
    assert engine.state_id == state and difference(before, engine.full_weights()) == 0
    learned = engine.learn(batch, Odd(), counts(batch))  # empty passes leave no metric behind
    assert learned.metrics["rows"].result() == 11 and learned.metrics["most"].result() == 10
    assert engine.state_id != state and difference(before, engine.full_weights()) > 0


def test_an_interrupt_stops_all_ranks_at_the_same_place(two: Group, batch: DataProto, tmp_path: Path) -> None:
    engine = fsdp("data/tiny-arith", on=two, device="cpu", lr=1e-3, micro_batch_tokens=1)
    before, state, pids = engine.full_weights(), engine.state_id, [worker["pid"] for worker in two.workers]
    notes = tmp_path / "notes"
    stop = when_noted(notes, runtime.interrupt)
    try:
        with pytest.raises(Interrupted):
            engine.learn(batch, Odd(waits=patience(0.4), notes=str(notes)), counts(batch))
    finally:
        stop.join()
        runtime.clear()
    assert notes.stat().st_size < 11, "before all micro-batches were done"
    assert difference(before, engine.full_weights()) == 0 and [worker["pid"] for worker in two.workers] == pids
    assert engine.lost is False and state != ""
    engine.learn(batch, LikelihoodLoss(), counts(batch))


# --- files --------------------------------------------------------------------------------------


def test_a_saved_model_is_the_local_engines_file(two: Group, batch: DataProto, tmp_path: Path) -> None:
    there = fsdp("data/tiny-arith", on=two, device="cpu", lr=1e-3)
    there.learn(batch, LikelihoodLoss(), counts(batch))
    there.save(tmp_path / "model")
    there.save_sharded(tmp_path / "state")
    export(tmp_path / "state", tmp_path / "exported")
    opened = local(tmp_path / "model", device="cpu")
    assert difference(there.compute_log_probs(batch), opened.compute_log_probs(batch)) < 2e-6
    local("data/tiny-arith", device="cpu").save(tmp_path / "plain")
    names = sorted(path.name for path in (tmp_path / "plain").iterdir())
    for made in ("model", "exported"):
        assert sorted(path.name for path in (tmp_path / made).iterdir()) == names
        assert (tmp_path / made / "config.json").read_text() == (tmp_path / "plain" / "config.json").read_text()
        assert difference(there.full_weights(), local(tmp_path / made, device="cpu").snapshot()["weights"]) == 0
    critic = there.critic(lr=1e-2)
    critic.learn(batch, LikelihoodLoss(want=("values",)), counts(batch))
    critic.save(tmp_path / "critic")
    critic.save_state(tmp_path / "critic_state")
    again = fsdp("data/tiny-arith", on=two, device="cpu").critic()
    again.load_state(tmp_path / "critic", tmp_path / "critic_state")
    assert difference(critic.compute_log_probs(batch, ("values",)), again.compute_log_probs(batch, ("values",))) == 0


def test_a9_a_state_of_two_ranks_loads_on_one_and_back(
    one: Group, two: Group, batch: DataProto, tmp_path: Path
) -> None:
    first = fsdp("data/tiny-arith", on=two, device="cpu", lr=1e-3)
    first.learn(batch, LikelihoodLoss(), counts(batch))
    first.commit()
    first.save_sharded(tmp_path / "two")
    assert not [path for path in tmp_path.rglob("*") if path.suffix not in (".safetensors", ".json", "")]
    second = fsdp("data/tiny-arith", on=one, device="cpu", lr=1e-3)
    second.load_sharded(tmp_path / "two")
    assert second.version == 1 and difference(first.full_weights(), second.full_weights()) == 0
    second.save_sharded(tmp_path / "one")
    back = fsdp("data/tiny-arith", on=two, device="cpu", lr=1e-3)
    back.load_sharded(tmp_path / "one")
    found = [
        engine.learn(batch, LikelihoodLoss(), counts(batch)).metrics["loss"].result()
        for engine in (first, second, back)
    ]
    assert found[0] == found[2] and found[1] == pytest.approx(found[0], rel=1e-6)
    assert difference(first.full_weights(), back.full_weights()) == 0
    assert difference(first.full_weights(), second.full_weights()) < 1e-5


def test_a9_one_process_goes_on_from_shards_and_shards_from_one_process(
    two: Group, batch: DataProto, tmp_path: Path
) -> None:
    """A checkpoint does not remember how many it was: weights, moments, steps and version go over either way."""
    whole, cut = local("data/tiny-arith", device="cpu", lr=1e-3), fsdp("data/tiny-arith", on=two, device="cpu", lr=1e-3)
    for name, engine in (("whole", whole), ("cut", cut)):
        engine.learn(batch, LikelihoodLoss(), counts(batch))
        engine.commit()
        engine.save(tmp_path / name)
        engine.save_state(tmp_path / f"{name}-state")
    from_cut = local("data/tiny-arith", device="cpu", lr=1e-3)
    from_cut.load_state(tmp_path / "cut", tmp_path / "cut-state")
    from_whole = fsdp("data/tiny-arith", on=two, device="cpu", lr=1e-3)
    from_whole.load_state(tmp_path / "whole", tmp_path / "whole-state")
    assert from_cut.version == from_whole.version == 1
    for engine in (whole, cut, from_cut, from_whole):
        engine.learn(batch, LikelihoodLoss(), counts(batch))
    expected = whole.full_weights()
    for engine in (cut, from_cut, from_whole):  # with fresh moments the second step would differ by 1e-3
        assert difference(engine.full_weights(), expected) < 2e-5


def test_a_state_with_a_missing_or_short_shard_is_refused(two: Group, batch: DataProto, tmp_path: Path) -> None:
    engine = fsdp("data/tiny-arith", on=two, device="cpu", lr=1e-3)
    engine.learn(batch, LikelihoodLoss(), counts(batch))
    with pytest.raises(CheckpointError, match="no optimizer state"):
        engine.load_sharded(tmp_path)
    engine.save_sharded(tmp_path / "state")
    shard = sorted((tmp_path / "state").glob("*.safetensors"))[1]
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-8])
    with pytest.raises(CheckpointError, match=f"{shard.name}; expected {len(whole)} bytes"):
        engine.load_sharded(tmp_path / "state")
    shard.unlink()
    with pytest.raises(CheckpointError, match="missing"):
        engine.load_sharded(tmp_path / "state")
    assert engine.compute_log_probs(batch)["log_probs"].isfinite().all()


def test_a_snapshot_goes_with_its_object(two: Group) -> None:
    engine = fsdp("data/tiny-arith", on=two, device="cpu")
    snapshot = engine.snapshot()
    place = Path(snapshot.folder)
    assert place.is_dir() and snapshot["version"] == 0 and snapshot["steps"] == 0
    assert difference(snapshot["weights"], engine.full_weights()) == 0
    del snapshot
    assert not place.exists()


def test_what_cannot_be_is_refused(two: Group, tmp_path: Path, batch: DataProto) -> None:
    with pytest.raises(SettingError, match="offload"):
        fsdp("data/tiny-arith", on=two, offload="disk")
    with pytest.raises(EngineError, match="no model at"):
        fsdp(tmp_path / "nowhere", on=two)
    engine = fsdp("data/tiny-arith", on=two, device="cpu")
    with pytest.raises(EngineError, match="token id 9999 in row 2"):
        ids = batch["input_ids"].clone()
        ids[2, -1], attention = 9999, torch.ones_like(batch["attention_mask"])
        engine.compute_log_probs(
            batch.without("input_ids", "attention_mask").with_columns({"input_ids": ids, "attention_mask": attention})
        )


@pytest.mark.long
def test_a9_a_run_of_two_ranks_goes_on_with_one_and_back(one: Group, two: Group, tmp_path: Path) -> None:
    """Every step on its own prompts, each drawn once in the order of a run that was never moved, and the same numbers."""
    rows = wb.rows("data/arith/train.parquet", max_prompt_length=256, limit=16)

    def go(where: Group | None, steps: int, run: Path) -> wb.Run:
        engine: Any = local("data/tiny-arith", device="cpu", lr=1e-3)
        if where is not None:
            engine = Paired(fsdp("data/tiny-arith", on=where, device="cpu", lr=1e-3), engine)
        pipe = wb.recipes.grpo(engine, Reward(varied, in_process=True), group_size=2, max_tokens=8, kl_coef=0.001)
        plan: dict[str, Any] = {"batch_size": 4, "trackers": (), "trace_freq": 1, "keep_traces": 9}
        return wb.train_blocking(pipe, rows, steps=steps, run=run, resume="auto", allow_changes=["engines"], **plan)

    quiet = go(None, 4, tmp_path / "quiet")
    for steps, where in enumerate((two, one, two), 2):
        moved = go(where, steps, tmp_path / "moved")
    prompts = [[list(run.traces[step]["rollout"].batch["uid"]) for step in range(1, 5)] for run in (quiet, moved)]
    assert prompts[0] == prompts[1] and len({uid for step in prompts[1] for uid in step}) == 16
    for a, b in zip(quiet.rows, moved.rows, strict=True):
        for name in ("critic/score/mean", "response_length/mean"):
            assert a[name] == b[name]
        for name in ("actor/pg_loss", "actor/kl_loss", "actor/grad_norm"):
            assert b[name] == pytest.approx(a[name], rel=1e-3, abs=1e-6), name


# --- dead workers -------------------------------------------------------------------------------


def test_a_killed_worker_is_named_and_the_step_is_run_again(batch: DataProto, tmp_path: Path) -> None:
    group = local_group(2, device="cpu", threads=1)
    engine, twin = (fsdp("data/tiny-arith", on=group, device="cpu", lr=1e-3, micro_batch_tokens=1) for _ in range(2))
    reference = engine.reference()
    before = reference.compute_log_probs(batch)["log_probs"]
    for one in (engine, twin):
        one.learn(batch, LikelihoodLoss(), counts(batch))
    kept = engine.snapshot()
    twin.learn(batch, LikelihoodLoss(), counts(batch))
    undisturbed = twin.full_weights()
    pids = [worker["pid"] for worker in group.workers]
    notes = tmp_path / "notes"
    when_noted(notes, lambda: os.kill(pids[1], signal.SIGKILL))
    with pytest.raises(WorkerLost, match=rf"rank 1 \(pid {pids[1]} on .*, of 2\) died; found SIGKILL") as caught:
        engine.learn(batch, Odd(waits=LONG, notes=str(notes)), counts(batch))
    assert caught.value.rank == 1 and caught.value.exit == "SIGKILL"
    assert not [pid for pid in pids if psutil.pid_exists(pid)]
    with pytest.raises(EngineError, match="restore a snapshot"):
        engine.compute_log_probs(batch)
    assert "ended" in repr(engine)
    engine.restore(kept)  # new workers
    engine.learn(batch, LikelihoodLoss(), counts(batch))
    assert difference(engine.full_weights(), undisturbed) == 0
    assert torch.equal(reference.compute_log_probs(batch)["log_probs"], before)
    pids = [worker["pid"] for worker in group.workers]
    group.close()
    assert not [pid for pid in pids if psutil.pid_exists(pid)]


class Held:
    """What a plain worker of these tests holds."""

    def __init__(self, rank: int, size: int, *, fail: int = -1) -> None:
        if rank == fail:
            raise ValueError("not on this rank")
        self.rank = rank

    def place(self, mine: int, shared: str) -> tuple[int, int, str]:
        return self.rank, mine, shared

    def starve(self, seconds: float) -> None:
        if self.rank == 1:
            raise OutOfMemory("no room on rank one")
        time.sleep(seconds)

    def stumble(self) -> None:
        if self.rank == 1:
            raise NonFinite("at rank one")

    def speak_and_wait(self, seconds: float) -> None:
        print(f"rank {self.rank} is about to wait")
        time.sleep(seconds)


def test_processes_keep_the_contract_of_ranks(cold: None) -> None:
    with pytest.raises(EngineError, match="rank 1 raised ValueError(.|\n)*not on this rank"):
        processes(Held, 2, fail=1)
    ranks = processes(Held, 2)
    assert ranks.call("place", "all", each=[(7,), (8,)]) == [(0, 7, "all"), (1, 8, "all")]
    with pytest.raises(NonFinite, match="at rank one") as caught:
        ranks.call("stumble")
    assert "stumble" in str(caught.value.__cause__)
    ranks.call("speak_and_wait", 0.0)
    assert ranks.log(1).endswith("rank 1 is about to wait")
    listening = [c for pid in ranks.pids for c in psutil.Process(pid).net_connections("inet")]
    assert not listening  # socket pairs alone
    os.kill(ranks.pids[0], signal.SIGSTOP)
    limit = patience(1.0)
    with pytest.raises(
        TimeoutError,
        match=rf"ranks \[0, 1\] of 2 did not answer in {limit:.0f} seconds(.|\n)*\[0\] are stopped(.|\n)*speak_and_wait",
    ):
        ranks.call("speak_and_wait", 3600.0, timeout=limit)
    assert not [pid for pid in ranks.pids if psutil.pid_exists(pid)]
    with pytest.raises(WorkerLost, match="has ended"):
        ranks.call("place", "x")
    ranks.close()
    assert not list(Path(tempfile.gettempdir()).glob(f"{ranks._folder.name}*"))


def test_who_waits_for_a_failed_rank_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes_module, "GRACE", 0.5)
    ranks = processes(Held, 2)
    with pytest.raises(OutOfMemory, match="rank one") as caught:
        ranks.call("starve", 3600.0)
    assert "the group was ended" in caught.value.__notes__[0]
    assert not [pid for pid in ranks.pids if psutil.pid_exists(pid)]


def test_a_group_listens_on_loopback_alone(two: Group) -> None:
    two.start()
    for worker in two.workers:
        for one in psutil.Process(worker["pid"]).net_connections("inet"):
            assert one.laddr.ip in ("127.0.0.1", "::1", "::ffff:127.0.0.1"), one


def test_ranks_that_do_not_meet_name_their_links_in_minutes() -> None:
    """NCCL would wait for half an hour in the first forward pass."""
    asked: list[tuple[str, float | None]] = []

    class Dead:
        def call(self, method: str, *shared: Any, timeout: float | None = None) -> list[Any]:
            asked.append((method, timeout))
            if method == "meet":
                raise TimeoutError("rank 1 is late")
            return [("127.0.0.1", 1)]

        def close(self) -> None:
            asked.append(("close", None))

    with pytest.raises(EngineError, match=r"cannot communicate.*rank 1 is late; NCCL_DEBUG=INFO"):
        Group(Dead).start()  # type: ignore[arg-type]
    assert asked == [("reserve", None), ("join", None), ("meet", 180.0), ("close", None)]
