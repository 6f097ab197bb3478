"""float16: a scaled loss, steps that overflow, and all of it recorded, gone back to, resumed and replayed exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import workbench as wb
from workbench.base.errors import NonFinite
from workbench.engines import LocalSettings, fsdp, local
from workbench.engines.local_engine import learning
from workbench.engines.local_engine.learning import LossScale
from workbench.engines.protocol import LossOutput
from workbench.testing.engines import EngineContract, LikelihoodLoss

CONTRACT = EngineContract()


class High(LossScale):
    """A loss scale that overflows a few times before it fits."""

    def __init__(self, value: float = 2.0**20, finite: float = 0) -> None:
        super().__init__(value, finite)


@pytest.fixture
def high(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learning, "LossScale", High)


def length(response: str) -> float:
    return len(response) / 10


def numbers(learned: Any) -> dict[str, float]:
    return {name: one.result() for name, one in learned.metrics.items()}


def test_the_scale_is_that_of_torchs_scaler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LossScale, "INTERVAL", 3)
    theirs, mine = torch.amp.GradScaler("cpu", growth_interval=3), LossScale()
    parameter = torch.nn.Parameter(torch.ones(1))
    sgd = torch.optim.SGD([parameter], lr=0.0)
    for finite in (True, True, False, *[True] * 7, False, False, *[True] * 3):
        assert theirs.scale(torch.ones(1)).item() == mine.value
        parameter.grad = torch.tensor([1.0 if finite else float("inf")])
        theirs.unscale_(sgd)
        theirs.step(sgd)
        theirs.update()
        mine.update(finite)
    assert theirs.get_scale() == mine.value == 2.0**16


def test_auto_is_float16_where_a_card_has_no_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, half = LocalSettings(), LocalSettings(base_dtype="float16")
    assert [plain.precision(kind) for kind in ("cpu", "cuda")] == ["float32", "bfloat16"]
    assert half.precision("cpu") == "float16"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for capability, kind in (((7, 5), "float16"), ((8, 0), "bfloat16"), ((9, 0), "bfloat16")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_, found=capability: found)
        assert plain.precision("cuda") == kind and LocalSettings(dtype="float32").precision("cuda") == "float32"


@pytest.mark.slow
@pytest.mark.parametrize("where", ["local", "fsdp"])
def test_an_overflow_is_a_skipped_step_that_is_kept_and_gone_back_to(
    where: str, folder: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    group: Any = request.getfixturevalue("two") if where == "fsdp" else None

    def opened() -> Any:
        chosen: dict[str, Any] = {"device": "cpu", "dtype": "float16", "lr": 1e-2}
        return fsdp(folder, on=group, **chosen) if group is not None else local(folder, **chosen)

    engine, rows = opened(), CONTRACT.batch(local(folder, device="cpu"))
    batch, counts = rows.with_columns({"weight": torch.full((len(rows),), 2.0**10)}), CONTRACT.counts(rows)
    probed = numbers(engine.probe(batch, LikelihoodLoss(), counts))
    exact = numbers(local(folder, device="cpu").probe(batch, LikelihoodLoss(), counts))
    assert probed["grad_norm"] == pytest.approx(exact["grad_norm"], rel=1e-2)  # at a lower scale
    before, weights = engine.snapshot("replay"), engine.full_weights()
    skipped = numbers(engine.learn(batch, LikelihoodLoss(), counts))
    assert (skipped["overflows"], skipped["loss_scale"]) == (1, 2.0**16) and "grad_norm" not in skipped
    assert all(torch.equal(one, weights[name]) for name, one in engine.full_weights().items())
    engine.save(tmp_path / "m")
    engine.save_state(tmp_path / "s")
    way = [numbers(engine.learn(batch, LikelihoodLoss(), counts)) for _ in range(12)]
    scales = [one["loss_scale"] for one in way]
    assert scales == sorted(scales, reverse=True) and scales[0] == 2.0**15 and way[-1]["overflows"] == 0
    assert way[-1]["loss"] < way[0]["loss"]
    late, end = engine.snapshot("memory"), engine.full_weights()
    after = numbers(engine.learn(batch, LikelihoodLoss(), counts))
    other = opened()
    other.load_state(tmp_path / "m", tmp_path / "s")
    assert [numbers(other.learn(batch, LikelihoodLoss(), counts)) for _ in range(12)] == way
    for snapshot, expected in ((late, after), (before, skipped)):
        engine.restore(snapshot)
        assert numbers(engine.learn(batch, LikelihoodLoss(), counts)) == expected
    assert all(torch.equal(one, end[name]) for name, one in other.full_weights().items())


def test_a_gradient_that_is_infinite_unscaled_is_an_error(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setattr(
        learning, "LossScale", type("One", (High,), {"__init__": lambda self: High.__init__(self, 1.0)})
    )

    class Steep(LikelihoodLoss):
        def __call__(self, *given: Any) -> LossOutput:
            plain = super().__call__(*given)
            return LossOutput(plain.loss * 1e9, plain.metrics, plain.columns)

    engine = local(folder, device="cpu", dtype="float16")
    batch = CONTRACT.batch(engine)
    with pytest.raises(NonFinite, match="the gradient norm is NaN or infinite"):
        engine.learn(batch, Steep(), CONTRACT.counts(batch))


@pytest.mark.slow
def test_a_run_in_float16_is_resumed_replayed_and_audited_exactly(high: None, tiny: str, tmp_path: Path) -> None:
    rows = wb.rows("data/arith/train.parquet", max_prompt_length=256, limit=20)

    def trained(name: str, *parts: int) -> wb.Run:
        for steps in parts:
            engine = wb.engines.local(tiny, lr=1e-2, device="cpu", dtype="float16")
            pipe = wb.recipes.grpo(engine, wb.rewards.Reward(length, in_process=True), group_size=2, max_tokens=8)
            run = wb.train_blocking(
                pipe, rows, steps=steps, batch_size=4, run=tmp_path / name, save_freq=2, trace_freq=1, resume="auto"
            )
        return run

    run, resumed = trained("whole", 4), trained("cut", 2, 4)
    told = [{name: row[f"actor/{name}"] for name in ("loss_scale", "overflows")} for row in run.rows]
    assert {one["overflows"] for one in told} == {0, 1} and told[0]["loss_scale"] == 2.0**20
    for name in ("loss_scale", "overflows", "pg_loss", "grad_norm"):
        key = f"actor/{name}"
        assert [row.get(key) for row in run.rows] == [row.get(key) for row in resumed.rows]
    for step in (3, 4):
        assert run.audit(step).agrees
    one, two = (each.engine(4).full_weights() for each in (run, resumed))
    assert all(torch.equal(weight, two[name]) for name, weight in one.items())
    replayed = run.engine(3)
    scale = replayed.snapshot()["optimizer"]["|loss_scale"]
    assert scale[0] == told[3]["loss_scale"]


@pytest.mark.slow
def test_a_what_if_counts_its_skipped_steps_and_leaves_the_loss_scale(high: None, tiny: str) -> None:
    engine = wb.engines.local(tiny, lr=1e-2, device="cpu", dtype="float16")
    rows = wb.rows("data/arith/train.parquet", max_prompt_length=256, limit=4)
    pipe = wb.recipes.grpo(engine, wb.rewards.Reward(length, in_process=True), group_size=2, max_tokens=8)
    stepper = wb.Stepper(pipe, rows.batch(4)).run(until="advantage")
    engine.probe(CONTRACT.batch(engine), LikelihoodLoss(), CONTRACT.counts(CONTRACT.batch(engine)))
    before = engine.snapshot()
    made = stepper.what_if(clip_ratio_high=0.5, updates=6)
    for side in (made.actual, made.other):
        scales = [one["actor/loss_scale"] for one in side.metrics]
        skipped = [one["actor/overflows"] for one in side.metrics]
        assert skipped == sorted(skipped, reverse=True) and {*skipped} == {0, 1}, "overflows, then steps"
        assert (
            scales
            == [2.0 ** (20 - number) for number in range(int(sum(skipped)) + 1)] + scales[int(sum(skipped)) + 1 :]
        )
    after = engine.snapshot()
    assert torch.equal(before["optimizer"]["|loss_scale"], after["optimizer"]["|loss_scale"])
    assert before["steps"] == after["steps"] and all(
        torch.equal(one, after["weights"][name]) for name, one in before["weights"].items()
    )
    learned = stepper.run().trace.metrics
    assert learned["actor/loss_scale"] == 2.0**20 and learned["actor/overflows"] == 1
