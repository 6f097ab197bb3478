"""TRL's configuration as settings here: every argument by name, with TRL's defaults, and a pipeline that learns."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from trl_table import PAGE, page

import workbench as wb
from workbench.base.errors import SettingError
from workbench.compat.trl import DEFAULTS, arguments, trl_settings
from workbench.dataproto.core import DataProto
from workbench.engines.local_engine.learning import learning_rate
from workbench.stages import MaskTruncated, TrlLoss

RECORDED = json.loads((Path(__file__).parents[1] / "beside_trl" / "trl_answers.json").read_text())["arguments"]
SHORT: dict[str, Any] = {"max_steps": 2, "num_generations": 4, "per_device_train_batch_size": 8, "max_completion_length": 8, "bf16": False}  # fmt: skip


def test_every_argument_of_trl_is_in_the_table_with_a_reason() -> None:
    assert set(arguments()) == set(RECORDED) and len(RECORDED) == 189
    for name, entry in arguments().items():
        assert entry.kind in ("done", "refused", "irrelevant"), name
        assert entry.kind != "irrelevant" or entry.note, name
        assert entry.kind != "refused" or entry.unless, name
    assert set(DEFAULTS) == {name for name, entry in arguments().items() if entry.kind == "done"}


def test_the_defaults_are_trls() -> None:
    assert {name: RECORDED[name] for name in DEFAULTS} == DEFAULTS
    trl_settings({name: value for name, value in RECORDED.items() if value is not None} | {"max_steps": 1})


def test_the_page_is_made_of_the_table() -> None:
    assert PAGE.read_text() == page(), "run: python tests/compat/trl_table.py"
    assert len(PAGE.read_text().splitlines()) < 120


@pytest.mark.parametrize("name", [name for name, entry in arguments().items() if entry.kind == "refused"])
def test_what_is_not_here_stops_with_its_name(name: str) -> None:
    with pytest.raises(SettingError, match=name):
        trl_settings({name: "another", "max_steps": 1})


def test_an_unknown_argument_and_impossible_values_are_named() -> None:
    for wrong, told in (
        ({"num_generation": 4}, "num_generations"),
        ({"lr_scheduler_type": "polynomial"}, "lr_scheduler_type"),
        ({"report_to": "comet_ml"}, "report_to"),
        ({"eval_strategy": "epoch"}, "eval_strategy"),
        ({"max_completion_length": None}, "max_completion_length"),
        ({"num_generations": 3}, "num_generations"),
        ({"max_steps": -1}, "prompts=len"),
        ({"use_vllm": True, "vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_min": 0.5}, "clip_min"),
        ({"use_vllm": True, "loss_type": "vespo"}, "vllm_importance_sampling_mode"),
    ):  # fmt: skip
        with pytest.raises(SettingError, match=told):
            trl_settings({"max_steps": 1, **wrong})


def test_rows_of_trl_become_prompts() -> None:
    sizes = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "num_generations": 4, "max_steps": 12}
    one = trl_settings(sizes)
    assert one.train["batch_size"] == 4 and one.update["ppo_mini_batch_size"] is None and one.train["steps"] == 12
    two = trl_settings({**sizes, "steps_per_generation": 4, "num_iterations": 3})
    assert (two.train["batch_size"], two.update["ppo_mini_batch_size"]) == (8, 4)
    assert two.train["steps"] == 2 and two.engine["total_steps"] == 12  # six optimizer steps for each sampling
    assert (
        one.train["val_samples"] == 4 and trl_settings({**sizes, "num_generations_eval": 2}).train["val_samples"] == 2
    )
    often = trl_settings({**sizes, "steps_per_generation": 1})
    assert often.train["batch_size"] == 4  # sampled twice by the same weights, learnt from once
    epochs = trl_settings({**sizes, "max_steps": -1, "num_train_epochs": 2}, prompts=41)
    assert epochs.train["epochs"] == 2 and epochs.engine["total_steps"] == 20


def test_what_adapts_is_a_setting_of_loss_and_recipe() -> None:
    kit = {"use_adaptive_entropy": True, "entropy_target": 0.7, "entropy_coef_delta": 0.01, "max_steps": 8}
    loss = trl_settings(kit).loss
    assert (loss["entropy_target"], loss["entropy_delta"], loss["entropy_coeff_max"]) == (0.7, 0.01, 1.0)
    assert trl_settings({**kit, "use_adaptive_entropy": False}).loss["entropy_target"] is None
    synced = {"max_steps": 8, "sync_ref_model": True, "ref_model_sync_steps": 6, "num_iterations": 3, "beta": 0.1}
    assert trl_settings(synced).ref_sync == {"ref_sync_steps": 2, "ref_mixup_alpha": 0.6}
    with pytest.raises(SettingError, match="ref_model_sync_steps"):
        trl_settings({**synced, "ref_model_sync_steps": 4})


def test_a_linear_schedule_is_transformers_own() -> None:
    assert [learning_rate(1.0, step, "linear", 2, 6) for step in range(2, 7)] == [1.0, 0.75, 0.5, 0.25, 0.0]


def test_truncated_rows_leave_the_loss_and_stay_in_their_group() -> None:
    mask = torch.tensor([[1, 1, 1], [1, 0, 0], [1, 1, 0], [1, 1, 1]])
    batch = DataProto.from_single_dict(
        {
            "response_mask": mask, "finish_reason": ["length", "stop", "stop", "length"], "uid": ["a", "a", "b", "b"],
            "token_level_scores": torch.tensor([[1.0, 0, 0], [0, 0, 0], [0, 1.0, 0], [0, 0, 0]]),
            "reward": torch.tensor([1.0, 0, 1, 0]), "scored": torch.ones(4, dtype=torch.bool),
        }
    )  # fmt: skip
    out = MaskTruncated()(batch)
    assert out.batch["loss_mask"].tolist() == [[0, 0, 0], [1, 0, 0], [1, 1, 0], [0, 0, 0]]
    assert out.metrics["mask_truncated/share"].result() == 0.5
    learnt = wb.stages.Advantage(wb.functional.grpo, norm_by_std=False)(out.batch).batch
    assert learnt["advantages"].tolist() == [[0, 0, 0], [-0.5, 0, 0], [0.5, 0.5, 0], [0, 0, 0]]
    again = MaskTruncated()(out.batch.with_columns({"finish_reason": ["stop"] * 4})).batch
    assert torch.equal(again["loss_mask"], out.batch["loss_mask"])  # what was left out before stays out


def reward_len(completions: list[Any], **kwargs: Any) -> list[float]:
    return [float(len(text if isinstance(text, str) else text[0]["content"])) for text in completions]


@pytest.mark.slow
def test_a_configuration_trains(tiny: str, tmp_path: Path) -> None:
    config = {
        **SHORT,
        "beta": 0.04,
        "mask_truncated_completions": True,
        "top_entropy_quantile": 0.5,
        "entropy_coef": 0.01,
    }
    config |= {"off_policy_mask_threshold": 0.5, "num_iterations": 2, "learning_rate": 1e-3, "loss_type": "grpo"}
    config |= {"max_completion_length": 32, "max_steps": 4}
    rows = wb.rows("data/arith/train.parquet", max_prompt_length=256, limit=8)
    how = trl_settings(config)
    engine = wb.engines.local(tiny, **how.engine, device="cpu")
    pipe = wb.recipes.like_trl(config, engine, [reward_len, reward_len], reference=engine.reference())
    run = wb.train_blocking(pipe, rows, **how.train, run=tmp_path / "run", display=None)
    assert {"actor/off_policy_masked", "actor/top_entropy_share", "mask_truncated/share", "actor/kl_loss"} <= set(
        run.rows[-1]
    )
    assert pipe.settings()["update_actor"]["loss"] == "TrlLoss"
    assert wb.load_run(tmp_path / "run").audit().agrees


@pytest.mark.slow
def test_a_what_if_tries_each_measure_on_one_batch(tiny: str) -> None:
    config = {**SHORT, "learning_rate": 1e-3, "max_completion_length": 24, "beta": 0.04}
    pipe = wb.recipes.like_trl(config, tiny, reward_len)
    rows = wb.rows("data/arith/train.parquet", max_prompt_length=256, limit=4)
    batch = wb.Stepper(pipe, rows.batch(2)).run(until="advantage").batch
    before = pipe.learners()["actor"].snapshot()["weights"]
    for changes, metric in (
        ({"delta": 1.0}, "actor/pg_clipfrac_lower"),
        ({"top_entropy_quantile": 0.2}, "actor/top_entropy_share"),
        ({"off_policy_mask_threshold": -1.0}, "actor/off_policy_masked"),
        ({"use_bias_correction_kl": False}, ""),
        ({"loss_type": "luspo", "importance_sampling_level": "sequence"}, ""),
    ):
        found = wb.what_if(pipe, batch, updates=2, **changes)
        assert not metric or found.other.metrics[-1][metric] > 0, metric
        assert found.difference.abs().max() > 0 or "use_bias_correction_kl" in changes, changes
    after = pipe.learners()["actor"].snapshot()["weights"]
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.slow
def test_the_engine_has_the_configurations_settings(tiny: str) -> None:
    made = wb.recipes.like_trl(SHORT, tiny, reward_len)
    actor: Any = made.learners()["actor"]
    assert actor.describe()["schedule"] == "linear" and actor.describe()["weight_decay"] == 0
    with pytest.raises(SettingError, match="lr=0.001"):
        wb.recipes.like_trl(SHORT, wb.engines.local(tiny, lr=1e-3, device="cpu"), reward_len)
    with pytest.raises(SettingError, match="reward_weights"):
        wb.recipes.like_trl({**SHORT, "reward_weights": [1.0]}, actor, [reward_len, reward_len])


def test_a_configuration_object_is_read_by_its_fields() -> None:
    with pytest.raises(SettingError, match="GRPOConfig"):
        trl_settings(SimpleNamespace(num_generations=4))


def test_a_loss_refuses_what_it_does_not_know() -> None:
    for wrong in (
        {"loss_type": "ppo"},
        {"importance_sampling_level": "row"},
        {"top_entropy_quantile": 2.0},
        {"delta": 0.0},
    ):
        with pytest.raises(SettingError, match=next(iter(wrong))):
            TrlLoss(**wrong)
