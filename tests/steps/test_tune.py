"""Two steps measured and taken back bit for bit, settings tried, lines that can be pasted, and memory that runs out meanwhile."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import workbench as wb
from workbench.base.errors import OutOfMemory, SettingError
from workbench.engines.fsdp_engine.engine import FsdpEngine, fsdp
from workbench.engines.local_engine import scoring
from workbench.engines.paired import paired
from workbench.steps import tune as module
from workbench.steps.tune import Measured, Trial, Tuning, _best, _cache_share, _limit, _lines, half_gain, tune

GIB = 1 << 30


def rows() -> Any:
    return wb.rows("data/arith/train.parquet", max_prompt_length=256)


def opened(tiny: str, **settings: Any) -> Any:
    return wb.engines.local(tiny, lr=1e-3, device="cpu", **settings)


def pipeline(engine: Any, **settings: Any) -> wb.Pipeline:
    given = {"group_size": 2, "max_tokens": 4, "reward": lambda response: float(len(response)), **settings}
    return wb.recipes.grpo(engine, **given)


def everything(pipe: wb.Pipeline) -> dict[str, Any]:
    """Weights, moments, names, versions, controllers, settings and the generator of a pipeline."""
    found: dict[str, Any] = {"controllers": pipe.state(), "rng": torch.get_rng_state()}
    for role, one in pipe.learners().items():
        found |= {f"{role}/{name}": tensor.clone() for name, tensor in one._state().items()}
        checkpointed = [part for part in one._model.modules() if getattr(part, "gradient_checkpointing", False)]
        found[role] = (one.state_id, one.version, one._steps, one._settings, bool(checkpointed), one._optimizer is None)
    return found


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(
        torch.equal(one, b[name]) if isinstance(one, torch.Tensor) else one == b[name] for name, one in a.items()
    )


@pytest.mark.slow
@pytest.mark.parametrize("trained", [False, True], ids=["as loaded", "trained"])
def test_nothing_stays_and_all_is_measured(tiny: str, trained: bool) -> None:
    pipe = wb.recipes.ppo(opened(tiny), reward=lambda response: float(len(response)), max_tokens=4)
    if trained:
        wb.Stepper(pipe, rows().batch(2)).run()
    before = everything(pipe)
    made = tune(pipe, rows(), batch_size=2)
    assert same(everything(pipe), before)
    assert [one.phase for one in made.phases] == list(pipe.names)
    assert all(one.seconds > 0 and one.host > 50e6 and one.device == 0 for one in made.phases)
    assert {one.role for one in made.trials} == {"actor", "critic"}
    tried = {str(one) for one in made.trials}
    assert {"as it is", "gradient_checkpointing=True", "pack='no'"} <= tried and not any(
        one.error for one in made.trials
    )
    text, page = repr(made), made._repr_html_() or ""
    for said in ("old_log_prob", "update_critic", "gradient_checkpointing=True", "# actor, ", *made.lines):
        assert said in text
    assert "<table" in page and "update_actor" in page
    assert same(everything(pipe), before) and "tune" in wb.__all__


@pytest.mark.slow
def test_steps_go_on_as_if_nothing_had_been_tuned(tiny: str) -> None:
    weights = []
    for tuned in (False, True):
        pipe = pipeline(opened(tiny))
        if tuned:
            tune(pipe, rows(), batch_size=2, seconds=0)
        wb.Stepper(pipe, rows().batch(2)).run()
        weights.append(pipe.learners()["actor"].snapshot()["weights"])
    assert all(torch.equal(one, weights[1][name]) for name, one in weights[0].items())


@pytest.mark.slow
def test_what_runs_out_of_memory_is_a_trial_like_others(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes of more than 300 tokens fail: that is where the engine is now, and less is proposed."""
    pipe = pipeline(opened(tiny, pack="no"), max_tokens=16, group_size=4)
    real = scoring.outputs

    def outputs(model: Any, head: Any, batch: Any, *given: Any, **named: Any) -> Any:
        if batch["input_ids"].numel() > 300 and not getattr(model, "workbench_examined", False):
            raise MemoryError("no room")
        return real(model, head, batch, *given, **named)

    before = everything(pipe)
    monkeypatch.setattr(scoring, "outputs", outputs)
    made = tune(pipe, rows(), batch_size=4)
    monkeypatch.undo()
    base, *others = made.trials
    assert "out of memory in scoring" in base.error and "OutOfMemory: phase 'old_log_prob'" in base.error
    fits = [one for one in others if not one.error]
    assert fits and made.proposed["actor"]["micro_batch_tokens"] <= 300
    assert any(line.startswith("micro_batch_tokens=") for line in made.lines)
    assert [one.phase for one in made.phases] == ["rollout", "reward"] and same(everything(pipe), before)


@pytest.mark.slow
def test_memory_that_runs_out_where_no_learner_works_is_raised(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = pipeline(opened(tiny))
    before = everything(pipe)

    def decode(*args: Any, **named: Any) -> None:
        raise MemoryError

    monkeypatch.setattr("workbench.engines.local_engine.engine.decode", decode)
    with pytest.raises(OutOfMemory, match="phase 'rollout': out of memory in sampling.*lower max_wave"):
        tune(pipe, rows(), batch_size=2)
    assert same(everything(pipe), before)


def test_only_settings_of_memory_and_time_can_be_tried(tiny: str) -> None:
    engine = opened(tiny)
    with (
        pytest.raises(
            SettingError, match=r"'lr' is not a setting that can be tried; expected one of micro_batch_tokens"
        ),
        engine.trying(lr=1.0),
    ):
        pass
    with engine.trying(micro_batch_tokens=7, gradient_checkpointing=True):
        assert engine._budget == 7 and engine._model.is_gradient_checkpointing
    assert engine._budget == 4096 and not engine._model.is_gradient_checkpointing


@pytest.mark.long
@pytest.mark.slow
def test_ranks_are_measured_and_left_as_they_were(tiny: str) -> None:
    """Two FSDP ranks beside a sampler: their memory is in the sum, their settings are tried and set back."""
    with paired(fsdp(tiny, ranks=2, threads=1, device="cpu", lr=1e-3), opened(tiny)) as engine:
        pipe = pipeline(engine, kl_coef=0.001)
        wb.Stepper(pipe, rows().batch(2)).run()
        learner, weights = engine.learner, engine.full_weights()
        before = learner.state_id, learner.version, learner._settings
        made = tune(pipe, rows(), batch_size=2)
        assert (learner.state_id, learner.version, learner._settings) == before
        assert all(torch.equal(one, weights[name]) for name, one in engine.full_weights().items())
        assert {"as it is", "gradient_checkpointing=True"} <= {str(one) for one in made.trials}
        assert all(one.host > 500e6 and not one.error for one in made.trials), "a process alone has less"
        twin = engine.compute_log_probs(wb.Stepper(pipe, rows().batch(2)).run(until="rollout").batch)
        assert twin["log_probs"].isfinite().all()


def trial(seconds: float, gib: float, error: str = "", **changes: Any) -> Trial:
    return Trial("actor", changes, seconds, int(gib * GIB), 0, error)


@pytest.mark.parametrize(
    ("trials", "wanted"),
    [
        ([trial(10, 4), trial(8.9, 4, micro_batch_tokens=2), trial(8.5, 4, micro_batch_tokens=4)], {"micro_batch_tokens": 4}),
        ([trial(10, 4), trial(9.5, 3.9, micro_batch_tokens=2)], {}),
        ([trial(10, 4), trial(10.4, 3.5, gradient_checkpointing=True)], {"gradient_checkpointing": True}),
        ([trial(10, 4), trial(13, 2, gradient_checkpointing=True)], {}),
        ([trial(10, 4), trial(1, 1, "out of memory", micro_batch_tokens=8)], {}),
        ([trial(0, 4, "out"), trial(9, 4, "out", micro_batch_tokens=4), trial(9, 4, micro_batch_tokens=2), trial(8, 4, pack="no")],
         {"micro_batch_tokens": 2}),
        ([], {}),
    ],
)  # fmt: skip
def test_what_is_proposed(trials: list[Trial], wanted: dict[str, Any]) -> None:
    assert _best(trials) == wanted


def test_lines_can_be_pasted() -> None:
    learner = SimpleNamespace(describe=lambda: {"path": "my-7b"})
    trials = [trial(10, 4), trial(8, 4, micro_batch_tokens=512), trial(13, 2, gradient_checkpointing=True)]
    lines = _lines("actor", learner, {"micro_batch_tokens": 512}, trials)
    assert lines == [
        "# actor, my-7b: 10.00 s, peak 4.00 GiB as it is",
        "micro_batch_tokens=512,  # 10.00 → 8.00 s, peak 4.00 GiB → 4.00 GiB",
        "# gradient_checkpointing=True would take less memory: 10.00 → 13.00 s, peak 4.00 GiB → 2.00 GiB",
    ]
    text = "\n    ".join(lines)
    assert eval(f"dict(\n    {text}\n)") == {"micro_batch_tokens": 512}  # noqa: S307 - it is what a user pastes
    assert _lines("actor", learner, {}, trials[:1])[0].endswith("no setting that was tried takes less")


def test_the_share_of_a_cache_leaves_the_learner_its_part() -> None:
    """80 GiB, of which the learner holds 24 while vLLM samples: 1 − 0.1 − 0.3 = 0.6."""

    class Learner:
        def trying(self, **changes: Any) -> Any: ...

        def peaks(self, begin: bool = False) -> dict[str, int]:
            return {"host": 0, "device": 0, "total": 80 * GIB}

        def describe(self) -> dict[str, Any]:
            return {"path": "my-7b", "sampler": {"gpu_memory_utilization": 0.5}}

    phases = [Measured("rollout", 1.0, GIB, 24 * GIB), Measured("update_actor", 1.0, GIB, 60 * GIB)]
    (line,) = _cache_share(Learner(), phases)
    assert line.startswith(
        "sampler_settings={'gpu_memory_utilization': 0.6},  # of 80.00 GiB the learner holds 24.00 GiB"
    )
    assert _cache_share(None, phases) == [] and module.RESERVE == 0.1


def test_a_result_without_trials_has_a_face() -> None:
    assert "rollout" in repr(Tuning((Measured("rollout", 1.0, 0, 0),), (), ()))


@pytest.mark.parametrize(("gain", "role"), [(3.0, ["actor"]), (1.4, [])])
def test_a_cpu_that_multiplies_bfloat16_faster_is_told_what_it_costs(
    tiny: str, gain: float, role: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "half_gain", lambda: gain)
    pipe = pipeline(opened(tiny))
    before = everything(pipe)
    made = tune(pipe, rows(), batch_size=2)
    assert same(everything(pipe), before)
    halves = [one for one in made.trials if "dtype" in one.changes]
    assert [one.role for one in halves] == role and all("nats apart on average" in one.cost for one in halves)
    assert "dtype" not in made.proposed["actor"]  # numbers change: that is for a person to choose
    base = Trial("actor", {}, 10.0, GIB, 0)
    half = Trial("actor", {"dtype": "bfloat16"}, 5.0, GIB, 0, cost="log-probs 0.03 nats apart on average, 0.3 at most")
    (_, line) = _lines("actor", pipe.learners()["actor"], {}, [base, half])
    assert line.startswith("# dtype='bfloat16' would take less: 10.00 → 5.00 s") and "0.3 at most" in line


def test_bfloat16_is_told_to_be_the_slower_one(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "half_gain", lambda: 0.5)  # an Intel Xeon with AVX512-BF16 and without AMX
    made = tune(pipeline(opened(tiny, dtype="bfloat16")), rows(), batch_size=2)
    (other,) = [one for one in made.trials if "dtype" in one.changes]
    assert other.changes == {"dtype": "float32"} and "nats apart on average" in other.cost
    assert "dtype" not in made.proposed["actor"]


def test_ranks_cannot_try_another_precision(tiny: str) -> None:
    assert "dtype" in opened(tiny).tried and "dtype" not in FsdpEngine.tried
    assert half_gain(64) > 0


def test_a_step_is_told_beside_its_matrix_products(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = opened(tiny, pack="no")
    monkeypatch.setattr(module, "product_rate", lambda kind: 1e9)
    stepper = wb.Stepper(pipeline(engine), rows().batch(2)).run()
    batch, kept = stepper.batch, stepper.batch["attention_mask"].bool()
    paths = [tuple(ids[inside].tolist()) for ids, inside in zip(batch["input_ids"], kept, strict=True)]
    tokens = len({path[: end + 1] for path in paths for end in range(len(path))})
    layers = [one for one in engine._model.modules() if isinstance(one, torch.nn.Linear)]
    scored = len(module._phases_of(stepper.pipeline, engine)) - 1
    seconds = (6 + 2 * scored) * tokens * sum(one.weight.numel() for one in layers) / 1e9
    text = _limit(stepper, engine, Trial("actor", {}, 1.25, 0, 0))
    assert text.startswith(
        f"# actor: 1.25 s; the products of its {tokens:,} distinct tokens alone take about {seconds:.2f} s"
    )
    assert _limit(stepper, engine, Trial("actor", {}, 1.25, 0, 7)) == "", "on a GPU its rate is not measured"
