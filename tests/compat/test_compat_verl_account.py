"""Every setting of a verl command is accounted for: exact, near, hardware or refused, with why."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.compat.verl_account import SettingRow, account, canonical, entries, find, has_turns, keys, known
from workbench.compat.verl_command import Command, parsed, read_command
from workbench.jobs.verl_job import verl

COMMANDS = Path(__file__).parent / "verl_commands.txt"
NUMBERS = frozenset(
    [
        "lr",
        "betas",
        "decay",
        "clip",
        "coef",
        "coeff",
        "temperature",
        "top",
        "gamma",
        "lam",
        "loss",
        "epochs",
        "mini",
        "seed",
        "kl",
        "warmup",
        "estimator",
        "norm",
        "penalty",
        "threshold",
        "shuffle",
        "dropout",
        "dtype",
        "response_length",
        "prompt_length",
        "std",
        "agg",
        "quantization",
        "weights",
        "alpha",
        "rank",
        "batch",
    ]
)
"""Words in the last part of the name of a setting that changes numbers."""
NEUTRAL = re.compile(
    r"in_pipeline_split$|micro_batch|max_num_batched|val_batch|batch_wait|ulysses|save_|megabytes|persist_layer_norm|validation_shuffle|fusion$|per_dp_cp_rank|qat|mtp|distillation|profil"
)
"""Names with such words that change none: memory, files, servers."""


def table() -> dict[str, list[str]]:
    lines = [line for line in COMMANDS.read_text().splitlines() if not line.startswith("#")]
    return {key: values.split(" | ") for key, _, values in (line.partition(" = ") for line in lines)}


def rows_of(**settings: Any) -> dict[str, SettingRow]:
    return {
        row.key: row for row in account(Command({key.replace("__", "."): one for key, one in settings.items()}, {}, ""))
    }


def test_no_key_of_verls_own_commands_is_unknown() -> None:
    found = table()
    assert len(found) > 200
    assert [key for key in found if find(key) is None] == []
    for key, values in found.items():
        for value in values:
            row = next(row for row in account(Command({key: parsed(value)}, {}, "")) if row.key == key)
            assert "unknown" not in row.why and row.kind in ("exact", "near", "hardware", "refused"), row
            assert row.kind != "refused" or row.why, row


def test_what_changes_numbers_is_not_filed_under_hardware() -> None:
    """By name: a word of the losses, the optimizer, sampling or data in a key that is filed there needs a reason above."""
    named = [key for entry in entries() if entry.kind == "hardware" and not entry.only_if for key in keys(entry.key)]
    named += [key for key in table() if (entry := find(key)) is not None and entry.kind == "hardware"]
    wrong = {key for key in named if NUMBERS & {*key.rpartition(".")[2].split("_")} and not NEUTRAL.search(key)}
    assert sorted(wrong) == []


def test_the_table_is_sound() -> None:
    for entry in entries():
        assert entry.kind in ("exact", "near", "hardware", "refused", "alias"), entry
        assert entry.kind != "refused" or entry.note, entry
        assert entry.kind != "near" or entry.note, entry
        if entry.kind == "alias" and not entry.place.endswith("*"):
            assert find(entry.place) is not None or find(f"{entry.place}.{entry.key.split('{')[-1].split(',')[0]}"), (
                entry
            )
    assert len(known()) > 800


@pytest.mark.slow
@given(
    st.dictionaries(
        st.sampled_from(sorted(known())) | st.from_regex(r"[a-z]{2,5}\.[a-z]{2,5}", fullmatch=True),
        st.sampled_from([True, False, None, 0, 1, 2.5, "x", [1], {}]),
        max_size=8,
    )
)
def test_every_key_has_its_row(settings: dict[str, Any]) -> None:
    rows = account(Command(settings, {"stray": "no setting"}, ""))
    assert [row.key for row in rows][: len(settings) + 1] == [*settings, "stray"]
    assert all(row.kind in ("exact", "near", "hardware", "refused") for row in rows)
    assert all(row.why for row in rows if row.kind in ("near", "refused"))


def test_an_unknown_key_names_the_nearest() -> None:
    rows = rows_of(
        data__train_batchsize=8,
        algorithm__adv_estimator="gropo",
        actor_rollout_ref__actor__policy_loss__loss_mode="gspoo",
    )
    assert rows["data.train_batchsize"].why == "unknown: did you mean data.train_batch_size?"
    assert "did you mean grpo?" in rows["algorithm.adv_estimator"].why
    assert "did you mean gspo?" in rows["actor_rollout_ref.actor.policy_loss.loss_mode"].why
    assert {row.kind for row in rows.values()} >= {"refused"}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"algorithm__adv_estimator": "gae", "critic__enable": False}, "gae needs a critic"),
        ({"algorithm__adv_estimator": "grpo", "critic__enable": True}, "reads no values"),
        ({"actor_rollout_ref__actor__ppo_mini_batch_size": 64, "data__train_batch_size": 32}, "a part of the batch"),
        ({"data__max_response_length": 4096, "actor_rollout_ref__rollout__max_model_len": 1024}, "cuts responses there"),
        ({"actor_rollout_ref__actor__ppo_micro_batch_size": 1, "actor_rollout_ref__actor__ppo_micro_batch_size_per_gpu": 1}, "one of the two"),
        ({"algorithm__use_kl_in_reward": True, "algorithm__kl_penalty": "full"}, "no such estimator"),
        ({"reward_model__reward_manager": "primo"}, "primo"),
        ({"trainer__resume_mode": "resume_path"}, ""),
        ({"actor_rollout_ref__model__path": "$NEVER_SET"}, "does not set"),
    ],
)  # fmt: skip
def test_contradictions_are_refused(settings: dict[str, Any], said: str) -> None:
    refused = [row for row in rows_of(**settings).values() if row.kind == "refused"]
    assert any(said in row.why for row in refused), refused


def test_what_is_allowed_but_odd_is_near() -> None:
    both = rows_of(actor_rollout_ref__actor__use_kl_loss=True, algorithm__use_kl_in_reward=True)
    assert both["actor_rollout_ref.actor.use_kl_loss + algorithm.use_kl_in_reward"].kind == "near"
    alone = rows_of(algorithm__adv_estimator="grpo")
    assert alone["algorithm.adv_estimator + actor_rollout_ref.rollout.n"].kind == "near"


def test_routing_replay_is_r3() -> None:
    mode, on = (
        "actor_rollout_ref__actor__router_replay__mode",
        "actor_rollout_ref__rollout__enable_rollout_routing_replay",
    )
    found = rows_of(**{mode: "R3", on: True})
    assert [row.kind for row in found.values()] == ["exact", "exact"]
    assert found[on.replace("__", ".")].becomes == "LocalSettings.routing_replay"
    assert [row.kind for row in rows_of(**{mode: "R2"}).values()] == ["refused"]


def test_a_setting_without_effect_says_so() -> None:
    rows = rows_of(
        algorithm__adv_estimator="grpo", algorithm__lam=0.95, critic__optim__lr=1e-5, algorithm__kl_ctrl__kl_coef=0.1
    )
    assert all(
        "without effect" in rows[key].why for key in ("algorithm.lam", "critic.optim.lr", "algorithm.kl_ctrl.kl_coef")
    )


def test_the_spellings_of_the_guide_are_verls() -> None:
    guide = {"algorithm.group_size": 4, "algorithm.kl_penalty": 0.001, "algorithm.adv_estimator": "grpo", "actor_rollout_ref.actor.lora.r": 8,
             "tool_config_path": "t.yaml", "actor_rollout_ref.rollout.agent_loop": "tool_agent_loop", "trainer.run_name": "a"}  # fmt: skip
    assert canonical(guide) == {
        "actor_rollout_ref.rollout.n": 4, "algorithm.adv_estimator": "grpo", "actor_rollout_ref.actor.use_kl_loss": True,
        "actor_rollout_ref.actor.kl_loss_coef": 0.001, "actor_rollout_ref.model.lora_rank": 8, "trainer.experiment_name": "a",
        "actor_rollout_ref.rollout.multi_turn.tool_config_path": "t.yaml",
        "actor_rollout_ref.rollout.agent.default_agent_loop": "tool_agent_loop",
    }  # fmt: skip
    assert canonical({"algorithm.kl_penalty": 0.01}) == {
        "algorithm.use_kl_in_reward": True,
        "algorithm.kl_ctrl.kl_coef": 0.01,
    }


ROLLOUT = "actor_rollout_ref.rollout"


def test_lengths_are_the_samplers_own_where_it_has_any() -> None:
    given = {f"{ROLLOUT}.prompt_length": 200, f"{ROLLOUT}.response_length": 100}
    assert not [
        row for row in account(Command({**given, f"{ROLLOUT}.max_model_len": 300}, {}, "")) if "cuts" in row.why
    ]
    assert [row for row in account(Command({**given, f"{ROLLOUT}.max_model_len": 299}, {}, "")) if "cuts" in row.why]


def test_the_loops_name_counts_where_turns_are_switched_off() -> None:
    given = {f"{ROLLOUT}.multi_turn.enable": False, f"{ROLLOUT}.agent.default_agent_loop": "tool_agent"}
    assert has_turns(given) and "the tools run" in account(Command(given, {}, ""))[-1].why
    assert not has_turns({f"{ROLLOUT}.multi_turn.enable": False, f"{ROLLOUT}.multi_turn.tool_config_path": "t.yaml"})


def test_a_long_command_on_one_line_is_no_path() -> None:
    words = "python3 -m verl.trainer.main_ppo " + " ".join(f"data.train_files=/a/{number}.yaml" for number in range(20))
    assert read_command(words).settings == {"data.train_files": "/a/19.yaml"}


@pytest.mark.parametrize(
    ("key", "value", "kind"),
    [
        ("actor_rollout_ref.actor.optim.wieght_decay", 0, "refused"),
        ("critic.optim.wieght_decay", False, "refused"),
        ("actor_rollout_ref.actor.optim.lr_wsd_decay_style", "exponential", "exact"),
        ("critic.optim.override_optimizer_config.offload_fraction", 0.5, "hardware"),
        ("critic.optim.override_optimizer_config.beta3", 0.5, "refused"),
        ("actor_rollout_ref.model.lora.adapter_path", "/a", "refused"),
        ("actor_rollout_ref.model.lora.rnak", 8, "refused"),
        ("critic.model.lora.use_dora", True, "refused"),
        (f"{ROLLOUT}.engine_kwargs.vllm.quantization", "fp8", "refused"),
        (f"{ROLLOUT}.engine_kwargs.sglang.context_length", 4096, "refused"),
        (f"{ROLLOUT}.engine_kwargs.vllm.max_model_len", 4096, "near"),
        ("actor@actor_rollout_ref.actor", "mlite_actor", "near"),
        (
            "actor_rollout_ref.actor.megatron.override_transformer_config.moe_router_load_balancing_type",
            "none",
            "exact",
        ),
        ("actor_rollout_ref.actor.optim.min_lr", 1e-6, "exact"),
        ("reward.custom_reward_function.path", "$(pwd -P)/f.py", "refused"),
        (f"{ROLLOUT}.engine_kwargs.vllm.swap_space", 4, "near"),
        (f"{ROLLOUT}.do_sample", False, "refused"),
        ("actor_rollout_ref.actor.megatron.override_mcore_model_config.a", 1, "refused"),
        ("critic.megatron.override_mcore_model_config", {}, "exact"),
        ("actor_rollout_ref.ref.veomni.fsdp_sise", 8, "refused"),
        ("critic.torchtitan.extra", {"a": 1}, "refused"),
        ("actor_rollout_ref.actor.megatron.override_ddp_config.grad_reduce_in_fp32", True, "near"),
        ("data.image_key", "picture", "refused"),
        ("data.image_key", "images", "exact"),
        ("reward_model.reward_loop_source", "register", "exact"),
        ("reward_model.megatron.param_offload", True, "hardware"),
    ],
)
def test_a_kind_is_of_name_and_value(key: str, value: Any, kind: str) -> None:
    row = account(Command({"algorithm.adv_estimator": "gae", key: value}, {}, ""))[1]
    assert (row.key, row.kind) == (key, kind), row


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        ({"actor_rollout_ref.actor.grad_clip": 0.5, "actor_rollout_ref.actor.optim.clip_grad": 1.0}, "refused"),
        ({"algorithm.adv_estimator": "remax", "algorithm.filter_groups.enable": True}, "refused"),
        ({"algorithm.adv_estimator": "grpo_vectorized", "algorithm.norm_adv_by_std_in_grpo": False}, "near"),
    ],
)
def test_two_settings_have_a_row_together(settings: dict[str, Any], kind: str) -> None:
    assert [
        row.kind
        for row in account(Command(settings, {}, ""))
        if row.key in map(" + ".join, (settings, [*settings][::-1]))
    ] == [kind]


@pytest.mark.parametrize(
    ("settings", "kinds"),
    [
        ({"actor_rollout_ref.actor.optim.lr_decay_steps": 10}, {"exact"}),
        (
            {"actor_rollout_ref.actor.optim.lr_decay_steps": 10, "actor_rollout_ref.actor.optim.lr_scheduler_type": "cosine"},
            {"refused", "near"},
        ),
        ({"data.train_batch_size": 0, "actor_rollout_ref.actor.ppo_mini_batch_size": 32}, {"refused", "exact"}),
        ({"reward.reward_model.enable_resource_pool": False}, {"hardware"}),
        ({"actor_rollout_ref.rollout.calculate_log_probs": False}, {"near"}),
        (
            {
                "algorithm.adv_estimator": "grpo",
                "distillation.enabled": True,
                "distillation.distillation_loss.use_task_rewards": False,
            },
            {"exact"},
        ),
    ],
)  # fmt: skip
def test_what_graders_of_verls_scripts_corrected(settings: dict[str, Any], kinds: set[str]) -> None:
    assert {row.kind for row in account(Command(settings, {}, ""))} == kinds


def test_a_setting_that_is_refused_with_others_is_counted_once_and_as_refused() -> None:
    key = "reward.reward_model.rollout.gpu_memory_utilization"
    given = {
        "reward.reward_model.enable": True,
        "reward.reward_model.model_path": "m",
        "reward.reward_model.rollout.name": "hf",
        key: 0.5,
    }
    rows = [row for row in account(Command(given, {}, "")) if row.kind == "refused"]
    assert [row.key for row in rows] == [key] and "vllm on a GPU" in rows[0].why


def test_a_loop_that_is_not_registered_is_not_exact() -> None:
    words = f"python3 -m verl.trainer.main_ppo data.train_files=a.parquet {ROLLOUT}.agent_loop="
    (custom,) = (row for row in verl(f"{words}my_loop").rows if row.key == f"{ROLLOUT}.agent_loop")
    assert custom.kind == "near" and "register its class" in custom.why
    (known,) = (row for row in verl(f"{words}tool_agent_loop").rows if row.key == f"{ROLLOUT}.agent_loop")
    assert known.kind == "exact"


@pytest.mark.parametrize(
    ("name", "place", "why"),
    [
        ("tensor_model_parallel_size", "FsdpSettings.mesh", "`tp`"),
        ("context_parallel_size", "FsdpSettings.mesh", "`cp`"),
        ("expert_model_parallel_size", "FsdpSettings.mesh", "`ep`"),
        ("pipeline_model_parallel_size", "—", "not spread over ranks here"),
    ],
)
def test_megatrons_layout_says_what_stands_for_it(name: str, place: str, why: str) -> None:
    (row,) = account(Command({f"actor_rollout_ref.actor.megatron.{name}": 2}, {}, ""))[:1]
    assert (row.kind, row.becomes) == ("hardware", place) and why in row.why


def test_a_timeline_file_of_ray_names_the_line_that_writes_one() -> None:
    (row,) = account(Command({"ray_init.timeline_json_file": "t.json"}, {}, ""))[:1]
    assert ".save(path)" in row.why
