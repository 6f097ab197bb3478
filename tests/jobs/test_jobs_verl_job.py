"""A verl command opens as the pipeline that it means, and is written as the notebook of that pipeline."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import nbformat
import pandas as pd
import pytest

import workbench as wb
from workbench.base.errors import SettingError
from workbench.cli import main
from workbench.compat.verl_account import ESTIMATORS, account, canonical
from workbench.compat.verl_command import Command
from workbench.jobs.parameters import declared_parameters
from workbench.jobs.verl_job import _planned
from workbench.jobs.verl_plan import plan

TRAIN = "data/arith/train.parquet"
SHORT: dict[str, Any] = {"train_batch_size": 8, "max_response_length": 8, "steps": 2}
LORA = {"actor_rollout_ref.model.lora_rank": 8, "actor_rollout_ref.rollout.n": 2, "algorithm.adv_estimator": "grpo"}
COMMANDS: dict[str, dict[str, Any]] = {
    "ppo": {
        "critic.optim.lr": 2e-5, "critic.cliprange_value": 0.3, "critic.ppo_epochs": 2, "algorithm.lam": 0.9, "trainer.critic_warmup": 3,
        "algorithm.use_kl_in_reward": True, "algorithm.kl_ctrl.type": "adaptive", "algorithm.kl_ctrl.target_kl": 0.2,
        "actor_rollout_ref.actor.optim.weight_decay": 0.1,
    },
    "grpo, KL in both": {
        "algorithm.adv_estimator": "grpo", "actor_rollout_ref.rollout.n": 4, "actor_rollout_ref.actor.use_kl_loss": True,
        "actor_rollout_ref.actor.kl_loss_coef": 0.01, "algorithm.use_kl_in_reward": True, "algorithm.kl_penalty": "low_var_kl",
        "actor_rollout_ref.actor.shuffle": True, "actor_rollout_ref.rollout.top_p": 0.9, "actor_rollout_ref.actor.clip_ratio": 0.3,
    },
    "grpo, KL in the reward": {
        "algorithm.adv_estimator": "grpo", "actor_rollout_ref.rollout.n": 2, "algorithm.use_kl_in_reward": True,
        "algorithm.norm_adv_by_std_in_grpo": False, "actor_rollout_ref.actor.loss_agg_mode": "seq-mean-token-sum-norm",
    },
    "ppo, KL in the loss": {"actor_rollout_ref.actor.use_kl_loss": True, "actor_rollout_ref.actor.kl_loss_type": "mse"},
    "gspo": {
        "algorithm.adv_estimator": "grpo", "actor_rollout_ref.actor.policy_loss.loss_mode": "gspo", "actor_rollout_ref.rollout.n": 2,
        "actor_rollout_ref.actor.clip_ratio_low": 3e-4, "actor_rollout_ref.actor.clip_ratio_high": 4e-4,
    },
    "clip_cov": {
        "algorithm.adv_estimator": "rloo", "actor_rollout_ref.actor.policy_loss.loss_mode": "clip_cov", "actor_rollout_ref.rollout.n": 2,
        "actor_rollout_ref.actor.policy_loss.clip_cov_ratio": 0.01, "actor_rollout_ref.actor.clip_ratio_c": 10.0,
    },
    "dapo": {
        "algorithm.adv_estimator": "grpo", "algorithm.filter_groups.enable": True, "algorithm.filter_groups.max_num_gen_batches": 3,
        "actor_rollout_ref.actor.clip_ratio_high": 0.28, "actor_rollout_ref.rollout.n": 2, "reward_model.reward_manager": "dapo",
        "data.filter_overlong_prompts": True,
    },
    "gdpo": {"algorithm.adv_estimator": "gdpo", "algorithm.gdpo_reward_keys": ["acc"], "actor_rollout_ref.rollout.n": 2},
    "corrected": {
        "algorithm.adv_estimator": "opo", "actor_rollout_ref.rollout.n": 2, "algorithm.rollout_correction.rollout_is": "token",
        "algorithm.use_pf_ppo": True, "algorithm.pf_ppo.weight_pow": 1.5,
    },
    "turns": {
        "algorithm.adv_estimator": "grpo", "actor_rollout_ref.rollout.n": 2, "actor_rollout_ref.rollout.multi_turn.enable": True,
        "actor_rollout_ref.rollout.multi_turn.max_assistant_turns": 2,
        "actor_rollout_ref.rollout.multi_turn.interaction_config_path": "data/arith-interaction/interaction.yaml",
    },
    "sft": {"optim.lr": 1e-4, "optim.weight_decay": 0.1, "data.truncation": "error", "trainer.save_freq": 2},
}  # fmt: skip


@pytest.fixture(scope="module")
def engine() -> Any:
    return wb.engines.local("data/tiny-arith-tools")


def settings_of(pipe: Any) -> dict[str, dict[str, str]]:
    """Stage → its settings as text, without the addresses in it."""
    return {
        stage.name: {name: str(value).partition(" at 0x")[0] for name, value in stage.settings().items()}
        for stage in pipe
    }


def opened(settings: dict[str, Any], engine: Any, **more: Any) -> tuple[Any, Any, Any, dict[str, Any]]:
    return wb.compat.verl(settings).open(engine=engine, model="x", train_files=TRAIN, **{**SHORT, **more})


@pytest.mark.slow
def test_the_settings_arrive_at_their_stages(engine: Any) -> None:
    pipe, rows, held, how = opened(COMMANDS["ppo"], engine, ppo_mini_batch_size=4)
    found = settings_of(pipe)
    assert found["advantage"]["lam"] == "0.9" and "AdaptiveKL" in found["advantage"]["kl_controller"]
    assert found["update_critic"]["ppo_epochs"] == "2" and found["update_critic"]["cliprange_value"] == "0.3"
    assert found["update_actor"]["ppo_epochs"] == "1" and found["update_actor"]["ppo_mini_batch_size"] == "4"
    assert held is None and how["steps"] == 2 and len(rows) == 4096 and rows.max_prompt_length == 512
    made = plan(canonical(COMMANDS["ppo"]))
    assert made.engine == {"weight_decay": 0.1} and made.critic == {
        "lr": 2e-5,
        "weight_decay": 0.01,
    }  # not the policy's

    found = settings_of(opened(COMMANDS["grpo, KL in both"], engine)[0])
    assert found["update_actor"]["kl_coef"] == "0.01" and found["update_actor"]["shuffle"] == "True"
    assert found["update_actor"]["clip_ratio_low"] == found["update_actor"]["clip_ratio_high"] == "0.3"
    assert found["advantage"]["kl_type"] == "low_var_kl" and "FixedKL" in found["advantage"]["kl_controller"]
    assert found["rollout"]["group_size"] == "4" and found["rollout"]["top_p"] == "0.9"

    found = settings_of(opened(COMMANDS["grpo, KL in the reward"], engine)[0])
    assert found["update_actor"]["kl_coef"] == "0.0" and "ref_log_prob" in found
    assert found["update_actor"]["loss_scale_factor"] == "8.0" and found["advantage"]["norm_by_std"] == "False"

    found = settings_of(opened(COMMANDS["ppo, KL in the loss"], engine)[0])
    assert found["update_actor"]["kl_type"] == "mse" and "kl_controller" not in found["advantage"]

    found = settings_of(opened(COMMANDS["gspo"], engine)[0])
    assert (
        found["update_actor"]["clip_ratio_high"] == "0.0004" and found["update_actor"]["loss_agg_mode"] == "token-mean"
    )
    assert (
        "ref_log_prob" not in found and found["update_actor"]["kl_coef"] == "0.0"
    )  # verl's defaults, not the recipe's

    pipe = opened(COMMANDS["corrected"], engine)[0]
    assert {"rollout_correction", "resample"} <= set(pipe.names)
    assert settings_of(opened(COMMANDS["dapo"], engine)[0])["filter_groups"]["max_num_gen_batches"] == "3"


@pytest.mark.parametrize("method", ESTIMATORS)
def test_every_estimator_of_verl_opens(method: str, engine: Any) -> None:
    given = {"algorithm.adv_estimator": method, "algorithm.gdpo_reward_keys": ["acc"], "actor_rollout_ref.rollout.n": 2}
    pipe, *_ = opened(given, engine)
    assert pipe["advantage"].estimator.__name__ == method.removesuffix("_vectorized")
    assert pipe["update_actor"].settings()["kl_coef"] == 0 and pipe["rollout"].group_size == 2


@pytest.mark.slow
def test_a_group_of_one_is_verls(engine: Any) -> None:
    pipe, *_ = opened({"algorithm.adv_estimator": "grpo"}, engine)
    assert pipe["rollout"].group_size == 1 and pipe["advantage"].settings()["singleton"] == "verl"


def test_overrides_have_verls_names_or_ours() -> None:
    job = wb.compat.verl(
        {"data.train_batch_size": 1024, "actor_rollout_ref.actor.ppo_mini_batch_size": 256, "algorithm.group_size": 4}
    )
    small = job.with_settings(batch_size=8, lr=1e-4, n=2, max_tokens=16).settings
    assert small["data.train_batch_size"] == 8 and small["actor_rollout_ref.actor.ppo_mini_batch_size"] == 2
    assert small["actor_rollout_ref.actor.optim.lr"] == 1e-4 and small["actor_rollout_ref.rollout.n"] == 2
    assert "algorithm.group_size" not in small and small["data.max_response_length"] == 16
    with pytest.raises(SettingError, match="did you mean 'train_batch_size'"):
        job.with_settings(train_batchsize=1)
    with pytest.raises(SettingError, match="fits several settings"):
        job.with_settings(param_offload=True)


def test_what_is_refused_is_not_opened_without_a_word(engine: Any) -> None:
    job = wb.compat.verl({"data.dataset_weights": [1, 2], "algorithm.adv_estimator": "gae", "critic.enable": False})
    with pytest.raises(
        SettingError,
        match=r"2 settings .* refused:\n- data.dataset_weights=\[1, 2\]: 2 weights for 1 (.|\n)*gae needs a critic",
    ):
        job.open(engine=engine, model="x", train_files=TRAIN)
    pipe, *_ = job.open(
        engine=engine, model="x", train_files=TRAIN, without=["data.dataset_weights", "critic.enable"], **SHORT
    )
    assert "update_critic" in pipe.names
    with pytest.raises(SettingError, match="names no train_files"):
        wb.compat.verl({}).open(engine=engine, model="x")


WEIGHTED = {
    "data.train_files": [TRAIN, "data/arith/test.parquet", "data/arith/test.parquet"],
    "data.dataset_weights": [0.5, 0.3, 0.2],
    "algorithm.adv_estimator": "grpo",
}


def test_weights_of_the_files_are_the_mix_that_they_name(engine: Any, tmp_path: Path) -> None:
    """40 rows a step: 20, 12 and 8, in every step."""
    job = wb.compat.verl(WEIGHTED)
    kinds = {row.key: (row.becomes, row.kind) for row in job.rows}
    assert kinds["data.dataset_weights"] == ("datasets.mix(weights)", "exact") and not job.refused
    _, rows, _, how = job.open(engine=engine, model="x", train_batch_size=40)
    assert how["steps"] == 30 * (len(rows) // 40)
    for step in (1, 7):
        parts = rows.batch(40, step=step).non_tensor_batch["data_part"].tolist()
        assert [parts.count(name) for name in ("0", "1", "2")] == [20, 12, 8]
    job.notebook(tmp_path / "mixed.ipynb", model="data/tiny-arith-tools")
    cells = [cell.source for cell in nbformat.read(tmp_path / "mixed.ipynb", 4).cells if cell.cell_type == "code"]
    names: dict[str, Any] = {}
    for source in cells[:3]:
        exec(source, names)  # noqa: S102 - what the product wrote
    assert names["rows"] == rows


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"data.train_files": TRAIN}, "3 weights for 1 of data.train_files: name each file"),
        ({"data.dataset_weights": [0.5, 0.5]}, "2 weights for 3 of data.train_files"),
        ({"data.dataset_weights": [0.5, 0.5, 0]}, "expected a list of numbers above 0"),
        ({"data.dataset_weights": "a"}, "expected a list of numbers above 0"),
        ({"data.train_max_samples": 10}, "leave data.train_max_samples out, or these weights"),
    ],
)
def test_weights_that_name_no_mix_are_refused_before_any_file_is_read(changes: dict[str, Any], why: str) -> None:
    (row,) = wb.compat.verl({**WEIGHTED, **changes}).refused
    assert row.key == "data.dataset_weights" and why in row.why


def test_weights_are_not_used_for_rows_that_are_there(engine: Any) -> None:
    mixed = wb.datasets.mix([wb.rows(TRAIN, limit=8), wb.rows(TRAIN, limit=4)], weights=[3, 1])
    assert wb.compat.verl(WEIGHTED).open(engine=engine, model="x", train_files=mixed, **SHORT)[1] is mixed


SCRIPT = "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo {}\n"


@pytest.mark.parametrize(
    ("settings", "folders"),
    [
        (["trainer.project_name=a", "trainer.project_name=b", ""], ["runs/a", "runs/b", "runs/sweep"]),
        (["trainer.project_name=a trainer.experiment_name=x", "trainer.project_name=a"], ["runs/x", "runs/a"]),
        (["trainer.project_name=a"] * 3, ["runs/a-0", "runs/a-1", "runs/a-2"]),
        (["", "trainer.experiment_name=x", ""], ["runs/sweep-0", "runs/x", "runs/sweep-2"]),
        (["trainer.experiment_name=$NAME", "trainer.experiment_name=$NAME"], ["runs/sweep-0", "runs/sweep-1"]),
        (["trainer.default_local_dir=out trainer.experiment_name=x", "trainer.default_local_dir=out"], ["out-0", "out-1"]),
        ([""], ["runs/sweep"]),
    ],
)  # fmt: skip
def test_every_command_of_a_script_has_a_run_folder_of_its_own(
    settings: list[str], folders: list[str], tmp_path: Path
) -> None:
    """The same one each time: a job goes on where it was. Three experiments of one script all went to runs/verl."""
    script = tmp_path / "sweep.sh"
    script.write_text("".join(map(SCRIPT.format, settings)))
    for number, folder in enumerate(folders):
        job = wb.compat.verl(script, command=number if len(folders) > 1 else None)
        for _ in range(2):
            assert folder_of(job) == folder
        assert folder_of(job.with_settings(run="mine")) == "mine"  # what is named by hand is so to the letter


def folder_of(job: Any) -> str:
    """The run folder of a command, as its notebook has it."""
    adapted = job.adapted("data/tiny-arith", TRAIN, None, [], {})
    return str(_planned(adapted).train["run"])


def test_text_without_a_file_is_called_verl() -> None:
    assert folder_of(wb.compat.verl(SCRIPT.format("trainer.total_epochs=1"))) == "runs/verl"


def test_the_table_is_text_and_html() -> None:
    job = wb.compat.verl({"algorithm.adv_estimator": "grpo", "trainer.nnodes": 2, "data.x<y": 1})
    lines = repr(job).splitlines()
    assert lines[0] == "verl command of a mapping: 1 refused, 1 near, 1 exact, 1 hardware"
    assert lines[2].split()[:2] == ["data.x<y", "1"] and "verl's defaults that hold" in lines[-1]
    assert "data.x&lt;y" in job._repr_html_()


@pytest.mark.parametrize("name", COMMANDS)
def test_the_notebook_makes_the_same_pipeline(
    name: str, engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its cells of objects and algorithm, run with its own parameters, give the stages and settings that `open` gives."""
    job = wb.compat.verl(COMMANDS[name])
    path = job.notebook(tmp_path / "n.ipynb", model="x", train_files=TRAIN, **SHORT)
    cells = [cell.source for cell in nbformat.read(path, 4).cells if cell.cell_type == "code"]
    space: dict[str, Any] = {one.name: one.default for one in declared_parameters(path)} | {"wb": wb, "policy": engine}
    space["rows"] = rows = wb.rows(TRAIN)[:64]
    for text in cells:
        if any(text.startswith(f"{made} = ") for made in ("reward", "agent", "critic", "pipe")):
            exec(compile(ast.parse(text), name, "exec"), space)  # noqa: S102
    pipe, _, _, how = job.open(engine=engine, model="x", train_files=rows, **SHORT)
    assert settings_of(space["pipe"]) == settings_of(pipe)
    assert space["steps"] == how["steps"] and space["batch_size"] == how["batch_size"]


@pytest.mark.parametrize(
    ("changes", "drops"),
    [
        ({}, False),
        ({"data.filter_overlong_prompts": True}, True),
        ({"data.truncation": "left"}, True),
        ({"data.truncation": "error"}, False),
    ],
)
def test_the_notebook_drops_long_prompts_where_verl_would_filter_or_cut_them(
    changes: dict[str, Any], drops: bool, tmp_path: Path
) -> None:
    job = wb.compat.verl({**COMMANDS["gspo"], **changes})
    notebook = nbformat.read(job.notebook(tmp_path / "n.ipynb", model="x", train_files=TRAIN, **SHORT), 4)
    lines = [line for cell in notebook.cells for line in cell.source.splitlines() if line.startswith("rows = ")]
    assert [".fitting(policy.tokenizer, overlong='drop')" in line.replace('"', "'") for line in lines] == [drops], lines


@pytest.mark.long
def test_a_translated_script_passes_check_and_trains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script, notebook = tmp_path / "run.sh", tmp_path / "n.ipynb"
    script.write_text(
        "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=4 trainer.total_epochs=1\n"
    )
    given = [
        "-p",
        "model=data/tiny-arith",
        "-p",
        f"train_files={TRAIN}",
        "-p",
        "train_batch_size=8",
        "-p",
        "max_tokens=8",
    ]
    assert main(["translate", str(script), "-o", str(notebook), *given]) == 0
    assert "algorithm.adv_estimator" in capsys.readouterr().out
    last = ["-p", f"run={tmp_path / 'run'}", "-p", "steps=2"]
    assert main(["check", str(notebook), *last]) == 0
    assert main(["train", str(notebook), *last]) == 0
    assert wb.load_run(tmp_path / "run").summary["steps"] == 2


def test_translate_refuses_a_file_without_a_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.sh").write_text("ls\n")
    assert main(["translate", str(tmp_path / "x.sh")]) == 2
    assert "no verl command" in capsys.readouterr().err


def test_a_warm_up_of_a_share_needs_the_number_of_steps(tmp_path: Path) -> None:
    given = {
        "algorithm.adv_estimator": "gae",
        "trainer.total_epochs": 10,
        "actor_rollout_ref.model.path": "x",
        "data.train_files": TRAIN,
    }
    for place in ("actor_rollout_ref.actor", "critic"):
        job = wb.compat.verl({**given, f"{place}.optim.lr_warmup_steps_ratio": 0.1})
        with pytest.raises(SettingError, match="number of steps"):
            job.open()
        with pytest.raises(SettingError, match="number of steps"):
            job.notebook(tmp_path / "a.ipynb")
    made = plan(canonical(job.with_settings(steps=20, train_batch_size=8, ppo_mini_batch_size=8).settings))
    assert made.critic is not None and made.critic["warmup_steps"] == 2


def test_asynchronous_trainers_are_streams() -> None:
    """verl counts the version that samples and the one that learns: 8 there is a lag of 7."""

    def train(**given: Any) -> dict[str, Any]:
        settings = {f"trainer.v1.{name.replace('__', '.')}": value for name, value in given.items()}
        made = plan(canonical({**COMMANDS["grpo, KL in both"], **settings})).train
        return {name: made[name] for name in ("ahead", "max_lag", "stale") if name in made}

    assert train(trainer_mode="separate_async") == {"max_lag": 7, "stale": "cancel"}
    waiting = {"sampler__max_off_policy_threshold": 3, "sampler__max_off_policy_strategy": "wait"}
    assert train(trainer_mode="colocate_async", **waiting) == {"max_lag": 2, "stale": "keep"}
    assert train(trainer_mode="separate_async", sampler__max_off_policy_threshold=1) == {}  # on policy: in turn
    assert train(trainer_mode="sync", **waiting) == {} == train()
    v1 = "trainer.v1"
    rows = {
        f"{v1}.trainer_mode": ("separate_async", "near"),
        f"{v1}.sampler.max_off_policy_threshold": (8, "near"),
        f"{v1}.separate_async.parameter_sync_step": (4, "near"),
        f"{v1}.separate_async.num_warmup_batches": (1, "near"),
        f"{v1}.sampler.custom_sampler.path": ("x.py", "refused"),
    }
    found = account(Command({name: value for name, (value, _) in rows.items()}, {}, ""))
    assert [row.kind for row in found] == [kind for _, kind in rows.values()]
    assert account(Command({f"{v1}.trainer_mode": "async"}, {}, ""))[0].kind == "refused"


@pytest.mark.slow
def test_held_out_rows_have_their_own_limit_and_the_loss_the_samplers_width(engine: Any) -> None:
    given = {**COMMANDS["grpo, KL in the reward"], "data.train_max_samples": 10, "data.val_max_samples": -1}
    pipe, rows, held, _ = opened(
        {**given, "actor_rollout_ref.rollout.response_length": 6}, engine, val_files=TRAIN, train_batch_size=2
    )
    assert len(rows) == 10 and held is not None and len(held) == 4096
    found = settings_of(pipe)
    assert found["update_actor"]["loss_scale_factor"] == "6.0" and found["rollout"]["max_tokens"] == "6"


SFT = """
nproc_per_node=$1
save_path=$2
shift 2
MODEL_PATH=${MODEL_PATH:-data/tiny-arith}
torchrun --nnodes=1 --nproc_per_node=${nproc_per_node} \\
    -m verl.trainer.sft_trainer \\
    data.train_files=$HOME/data/multiturn/train.parquet \\
    data.messages_key=messages \\
    data.max_length=96 \\
    data.micro_batch_size_per_gpu=4 \\
    optim.lr=1e-3 \\
    optim.lr_warmup_steps_ratio=0.5 \\
    optim.clip_grad=0.5 \\
    engine=fsdp \\
    engine.ulysses_sequence_parallel_size=1 \\
    model.path="${MODEL_PATH}" \\
    model.use_remove_padding=true \\
    model.lora_rank=4 \\
    trainer.default_local_dir="${save_path}" \\
    trainer.experiment_name=multiturn-sft \\
    trainer.save_freq=1 \\
    trainer.total_training_steps=2 "$@"
"""
"""The script of verl's examples/sft/multiturn, with further settings."""


def test_a_command_of_the_sft_trainer_trains_as_the_recipe_does(tmp_path: Path) -> None:
    asked = [
        [{"role": "user", "content": f"What is {a} + 1?"}, {"role": "assistant", "content": f"{a + 1}"}]
        for a in range(8)
    ]
    chats = [{"messages": [*first, *then]} for first, then in zip(asked, asked[1:] + asked[:1], strict=True)]
    file = tmp_path / "chats.parquet"
    pd.DataFrame(chats).to_parquet(file)
    job = wb.compat.verl(SFT)
    assert not job.refused and job.defaults["trainer.total_epochs"] == 4
    made = {"train_files": str(file), "train_batch_size": 4}
    pipe, rows, _, how = job.open(**made)
    run = wb.train_blocking(pipe, rows, **(how | {"run": tmp_path / "verl"}))
    engine = wb.engines.local(
        "data/tiny-arith", lr=1e-3, grad_clip=0.5, warmup_steps=1, lora_rank=4, lora_alpha=16.0,
        lora_targets=("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    )  # fmt: skip
    by_hand = wb.recipes.sft(engine, max_tokens=96, every_turn=True)
    same = wb.rows(str(file), prompt="messages", max_prompt_length=96)
    mine = wb.train_blocking(by_hand, same, steps=2, batch_size=4, seed=1, run=tmp_path / "hand")
    losses = [each.metrics["actor/nll"].tolist() for each in (run, mine)]
    assert (
        losses[0] == losses[1] and len(losses[0]) == 2 and how["save_freq"] == 1 and how["run"] == "runs/multiturn-sft"
    )


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"data.truncation": "right"}, "data.truncation"),
        ({"algorithm.adv_estimator": "grpo"}, "algorithm.adv_estimator"),
        ({"data.response_key": "answer"}, "data.response_key"),
        ({"optim.optimizer": "Muon"}, "optim.optimizer"),
        ({"engine.of_nobody": 1}, "engine.of_nobody"),
    ],
)
def test_what_the_sft_trainer_has_not_is_refused_by_name(changes: dict[str, Any], key: str) -> None:
    settings = {"model.partial_pretrain": "data/tiny-arith", "data.train_files": TRAIN, **changes}
    job = wb.compat.verl(settings)
    assert [row.key for row in job.refused] == [key]
    with pytest.raises(SettingError, match=re.escape(key)):
        job.open()


def test_a_reward_of_a_command_of_the_sft_trainer_is_refused(engine: Any) -> None:
    with pytest.raises(SettingError, match="SFT learns from texts"):
        opened(COMMANDS["sft"], engine, reward=len)


def test_a_tool_parser_that_is_not_there_is_refused() -> None:
    turns = "actor_rollout_ref.rollout.multi_turn"
    job = wb.compat.verl({f"{turns}.enable": True, f"{turns}.format": "qwen9"})
    assert any("qwen9" in row.why for row in job.refused)
    assert not wb.compat.verl({f"{turns}.enable": True, f"{turns}.format": "hermes"}).refused


@pytest.mark.slow
def test_a_commands_distillation_opens(engine: Any) -> None:
    """verl 0.9.1's keys and defaults: k3 beside task rewards; alone as a loss, and as advantages."""
    on = {
        "algorithm.adv_estimator": "grpo", "actor_rollout_ref.rollout.n": 2, "distillation.enabled": True,
        "distillation.teacher_models.teacher_model.model_path": "data/tiny-arith-tools",
    }  # fmt: skip
    loss = "distillation.distillation_loss"
    found = settings_of(opened(on, engine)[0])["update_actor"]
    assert found["distill.estimator"] == "k3" and found["distill.weight"] == "1.0" and found["loss"] == "PolicyLoss"
    tops = {**on, f"{loss}.loss_mode": "forward_kl_topk", f"{loss}.topk": 8, f"{loss}.distillation_loss_coef": 0.5}
    found = settings_of(opened(tops, engine)[0])
    assert found["teacher_log_prob"]["top_k"] == "8" and found["update_actor"]["distill.weight"] == "0.5"
    assert found["update_actor"]["distill.beta"] == "0.0" and found["update_actor"]["distill.tail"] == "False"
    alone = {**tops, f"{loss}.use_task_rewards": False, f"{loss}.loss_max_clamp": 10.0}
    pipe = opened(alone, engine)[0]
    assert pipe.names == ("rollout", "teacher_log_prob", "update_actor") and pipe["rollout"].group_size == 2
    assert pipe["update_actor"].settings()["loss_max_clamp"] == 10.0 and pipe["update_actor"].settings()["beta"] == 0
    gradient = {**on, f"{loss}.use_task_rewards": False, f"{loss}.loss_mode": "k1", f"{loss}.use_policy_gradient": True}
    several = {f"distillation.teacher_models.{name}.{what}": value for name in ("one", "two")
               for what, value in (("key", f"set/{name}"), ("model_path", "data/tiny-arith-tools"))}  # fmt: skip
    pipe = opened({**tops, **several, f"{loss}.log_prob_min_clamp": -10.0}, engine)[0]
    assert "data_source" in pipe["teacher_log_prob"].reads
    assert settings_of(pipe)["update_actor"]["distill.log_prob_min_clamp"] == "-10.0"
    pipe = opened(gradient, engine)[0]
    assert pipe["advantage"].kl_type == "k1" and pipe["update_actor"].settings()["loss"] == "PolicyLoss"
    for wrong, said in (
        ({f"{loss}.use_policy_gradient": True}, "use_policy_gradient; expected False with use_task_rewards=True"),
        ({"distillation.teacher_models.teacher_model.model_path": None}, "expected the teacher's model"),
        ({"distillation.teacher_models.one.model_path": "data/tiny-arith"}, "one.key; expected a data source"),
        ({"distillation.teacher_key": "ability"}, "teacher_key"),
        ({f"{loss}.loss_mode": "k9"}, "k9"),
    ):
        with pytest.raises(SettingError, match=said):
            opened({**on, **wrong}, engine)
