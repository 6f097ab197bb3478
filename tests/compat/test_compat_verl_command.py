"""Commands of verl are read as a shell and hydra would read them, and nothing is run."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.base.errors import SettingError
from workbench.compat.verl_command import flat, parsed, read_command
from workbench.jobs.verl_job import verl

MAIN = "python3 -m verl.trainer.main_ppo"


def test_a_script_is_read_with_its_variables_comments_and_continuations() -> None:
    text = f"""
set -x
export KL_COEF=0.001
MODEL=${{MODEL_PATH:-"${{HOME}}/models/a"}}   # a default
length=$((1024 * 2))
echo "nothing of this runs" > /never
{MAIN} \\
    algorithm.adv_estimator=grpo \\          # the estimator
    # a comment between
    data.train_files="['$HOME/a.parquet', '~/b.parquet']" \\
    data.max_response_length=$length data.max_prompt_length=$(((length + 48) / 2)) \\
    +actor_rollout_ref.model.path=$MODEL ++algorithm.kl_ctrl.kl_coef=${{KL_COEF}} \\
    trainer.logger='["console","wandb"]' data.seed=null critic.optim.lr=1e-5 actor_rollout_ref.x="$UNSET" "$@" 2>&1 | tee log
"""
    read = read_command(text)
    assert read.left_out == {}
    assert read.settings == {
        "algorithm.adv_estimator": "grpo",
        "data.train_files": ["~/a.parquet", "~/b.parquet"],
        "data.max_response_length": 2048,
        "data.max_prompt_length": 1048,
        "actor_rollout_ref.model.path": "~/models/a",
        "algorithm.kl_ctrl.kl_coef": 0.001,
        "trainer.logger": ["console", "wandb"],
        "data.seed": None,
        "critic.optim.lr": 1e-5,
        "actor_rollout_ref.x": "$UNSET",
    }


def test_arrays_of_newer_scripts_are_spread() -> None:
    text = f"""DATA=( data.train_batch_size=8
    data.val_files="['x.parquet']" )   # files
MORE=(trainer.nnodes=1)
MORE+=( trainer.total_epochs=2 )
{MAIN} "${{DATA[@]}}" ${{MORE[@]}} "$@"
"""
    wanted = {
        "data.train_batch_size": 8,
        "data.val_files": ["x.parquet"],
        "trainer.nnodes": 1,
        "trainer.total_epochs": 2,
    }
    assert read_command(text).settings == wanted


def test_words_mappings_and_yaml_are_the_same_settings(tmp_path: Path) -> None:
    nested = {"algorithm": {"adv_estimator": "rloo", "gamma": 1.0}, "data": {"train_files": ["a.parquet"]}}
    wanted = {"algorithm.adv_estimator": "rloo", "algorithm.gamma": 1.0, "data.train_files": ["a.parquet"]}
    assert read_command(nested).settings == wanted
    assert (
        read_command(["algorithm.adv_estimator=rloo", "algorithm.gamma=1.0", "data.train_files=[a.parquet]"]).settings
        == wanted
    )
    (tmp_path / "base.yaml").write_text("algorithm: {gamma: 1.0, adv_estimator: grpo}\nhydra: {run: {dir: x}}\n")
    text = (
        "defaults: [ppo_trainer, base, _self_]\nalgorithm:\n  adv_estimator: rloo\ndata:\n  train_files: [a.parquet]\n"
    )
    (tmp_path / "mine.yaml").write_text(text)
    assert read_command(tmp_path / "mine.yaml").settings == wanted
    script = tmp_path / "run.sh"
    script.write_text(f"{MAIN} --config-path=. --config-name='mine' algorithm.gamma=0.5\n")
    assert read_command(str(script)).settings == {**wanted, "algorithm.gamma": 0.5}


def test_interpolations_are_filled_in_and_verls_own_defaults_left_out() -> None:
    settings = read_command(
        {
            "data": {"max_prompt_length": 64},
            "a.length": "${data.max_prompt_length}",
            "a.other": "${oc.select:data.none,7}",
            "a.unset": "${oc.select:data.none}",
            "a.env": "${oc.env:NEVER_SET,3}",
            "a._target_": "verl.x",
        }
    ).settings
    assert settings == {"data.max_prompt_length": 64, "a.length": 64, "a.other": 7, "a.env": 3}


def test_what_is_no_setting_is_said() -> None:
    read = read_command(f"{MAIN} --config-path=nowhere --config-name=mine ~data.seed stray algorithm.gamma=1")
    assert set(read.left_out) == {"--config-path=nowhere --config-name=mine", "~data.seed", "stray"}
    lines = "export LEVEL=DEBUG\n# look\nls\ntrainer.logger: '[\"wandb\"]'\ntrainer.run_name: exp1\n"
    read = read_command(lines)
    assert read.settings == {"trainer.logger": ["wandb"], "trainer.run_name": "exp1"}
    assert set(read.left_out) == {"ls"}


def test_several_commands_and_none_are_refused() -> None:
    two = f"{MAIN} algorithm.gamma=1\n{MAIN} algorithm.gamma=0.5\n"
    with pytest.raises(SettingError, match="2 commands in text; .*command=0 … 1"):
        read_command(two)
    assert read_command(two, command=1).settings == {"algorithm.gamma": 0.5}
    with pytest.raises(SettingError, match="no verl command"):
        read_command("pip install verl\nls")
    with pytest.raises(SettingError, match="cannot be read"):
        read_command("nowhere/run.sh")


BRANCHES = f"""
BACKEND=${{BACKEND:-fsdp}}
SIZE=4
EXTRA=()
if [ "${{UV:-1}}" != 0 ] && {{ [ "$BACKEND" = vllm ] || [ "$SIZE" -gt 2 ]; }}; then LR=1e-5; else LR=1e-6; fi
case "${{DEVICE:-gpu}}" in
    npu | cpu) KL=0.5 ;;
    gpu) KL=0.1
        EXTRA+=(data.seed=7) ;;
    *) echo "none of this name"; exit 1 ;;
esac
[ "$SIZE" -gt 8 ] && GAMMA=0.5 || GAMMA=1.0
python - <<'EOF'
if True:
    print("an if of another language")
EOF
if [ "$BACKEND" = "fsdp" ]; then
    {MAIN} algorithm.gamma=$GAMMA actor.lr=$LR kl=$KL ${{EXTRA[@]}} ${{SET:+a.b=1}}
elif [ "$BACKEND" = "megatron" ]; then
    LR=3
    {MAIN} actor.lr=$LR trainer.experiment_name=other
else
    {MAIN} actor.lr=$LR
fi
"""


def test_a_script_is_read_as_its_own_values_lead(tmp_path: Path) -> None:
    """What no branch of them reaches is listed, and chosen by number or by the branch's name; it changes nothing else."""
    read = read_command(BRANCHES)
    assert read.settings == {"algorithm.gamma": 1.0, "actor.lr": 1e-5, "kl": 0.1, "data.seed": 7}
    assert read.others == ("command=1 where BACKEND=megatron", "command=2 where not BACKEND=megatron")
    assert read_command(BRANCHES, command="BACKEND=megatron").settings["actor.lr"] == 3
    assert read_command(BRANCHES, command=2).settings == {"actor.lr": 1e-5}
    undecided = BRANCHES.replace("BACKEND=${BACKEND:-fsdp}", "BACKEND=$1")
    with pytest.raises(SettingError, match="command=0 where BACKEND=fsdp; command=1 where BACKEND=megatron"):
        read_command(undecided)
    assert read_command(undecided, command="BACKEND=fsdp").settings["actor.lr"] == 1e-5
    with pytest.raises(SettingError, match="command='nowhere'"):
        read_command(BRANCHES, command="nowhere")
    unmatched = f"if it is so\nA=1\n{MAIN} a.b=$A"
    assert read_command(unmatched).settings == {"a.b": 1}
    script = tmp_path / "run.sh"
    script.write_text(BRANCHES)
    assert "command=1 where BACKEND=megatron" in repr(verl(script))


def test_a_probe_of_the_machine_is_read_as_a_machine_without_it_answers() -> None:
    """`$(A && echo x || echo y)` is y; a value before the text's own leads elsewhere, as in a shell."""
    text = f"""DEVICE=${{DEVICE:-$(python3 -c 'import torch_npu' 2>/dev/null && echo npu || echo gpu)}}
case "$DEVICE" in
    gpu) BATCH=1024 ;;
    npu) BATCH=16 ;;
esac
{MAIN} data.train_batch_size=$BATCH
"""
    assert read_command(text) == read_command(f"{MAIN} data.train_batch_size=1024")
    assert read_command(f"DEVICE=npu\n{text}").settings == {"data.train_batch_size": 16}
    unknown = text.replace("|| echo gpu", "")
    assert read_command(unknown).undecided == ("DEVICE=gpu", "DEVICE=npu")
    assert "not decided by its own values" in repr(verl(unknown))


def test_quoted_pieces_over_several_lines_are_one_word() -> None:
    text = f"MAP='{{a:1,'\\\n'b:2}}'\n{MAIN} \\\n  data.x=$MAP \\\n  # a comment\n  data.seed=1\n"
    assert read_command(text).settings == {"data.x.a": 1, "data.x.b": 2, "data.seed": 1}


def test_words_that_an_entry_point_does_not_run_are_no_command() -> None:
    cut = f"{MAIN} data.seed=1\ndata.train_batch_size=8 data.shuffle=False\n"
    assert read_command(cut).settings == {"data.seed": 1} and read_command(cut).others == ()


def test_the_entry_point_of_one_step_off_training_is_a_setting() -> None:
    job = verl("python3 -m verl.experimental.one_step_off_policy.main_ppo data.train_files=a model=b")
    assert [(row.becomes, row.kind) for row in job.rows if row.key == "trainer.scheduler"] == [("train(ahead)", "near")]


@pytest.mark.slow
@given(
    st.dictionaries(
        st.from_regex(r"[a-z_]{1,6}(\.[a-z_]{1,6}){1,3}", fullmatch=True),
        st.integers() | st.booleans() | st.from_regex(r"[a-z/]{1,9}", fullmatch=True),
    )
)
def test_what_is_written_is_what_is_read(settings: dict[str, object]) -> None:
    words = [f"{key}={value}" for key, value in settings.items()]
    read = read_command(words)
    assert read.left_out == {} and list(read.settings) == list(settings)
    assert [parsed(str(value)) for value in settings.values()] == list(read.settings.values())
    if words:
        assert read_command(" \\\n  ".join([MAIN, *words])).settings == read.settings


@given(st.text(max_size=200))
def test_no_text_breaks_the_reader(text: str) -> None:
    with contextlib.suppress(SettingError):
        read_command(f"{MAIN} {text}")


def test_flat_keeps_empty_mappings() -> None:
    assert flat({"a": {"b": {}, "c.d": "1e-3"}}) == {"a.b": {}, "a.c.d": 0.001}


@pytest.mark.parametrize("trainer", ["sft_trainer", "fsdp_sft_trainer"])
def test_its_sft_trainer_is_read(trainer: str) -> None:
    text = f"torchrun --nproc_per_node=2 -m verl.trainer.{trainer} data.train_files=a.parquet optim.lr=1e-5"
    expected = {"data.train_files": "a.parquet", "optim.lr": 1e-5, "sft_trainer": True}
    assert read_command(text).settings == read_command(text.split()).settings == expected
