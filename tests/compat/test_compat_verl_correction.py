"""verl's documented rollout-correction examples give verl's numbers, from its own blocks as written.

`verl_correction.json` has what verl 0.9.1 makes of each block: weights, mask, loss, gradient and metrics. Where verl is
installed the same is asked of it anew. `python tests/compat/test_compat_verl_correction.py` writes the file, with verl.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import workbench as wb
from workbench.base.errors import SettingError
from workbench.base.metrics import reduce
from workbench.compat import verl_correction
from workbench.compat.verl_correction import PRESETS, read_correction
from workbench.engines.protocol import LossCounts
from workbench.stages.update import PolicyLoss

GOLDEN = Path(__file__).with_name("verl_correction.json")
BLOCKS = {
    "token is": "algorithm:\n  rollout_correction:\n    rollout_is: token\n    rollout_is_threshold: 2.0\n    rollout_rs: null\n",
    "token rs": """
algorithm:
  rollout_correction:
    rollout_is: null # No IS weights
    rollout_rs: token_k1
    rollout_rs_threshold: "0.5_2.0"
actor_rollout_ref:
  rollout:
    calculate_log_probs: true
""",
    "both": """
algorithm:
  rollout_correction:
    rollout_is: token
    rollout_is_threshold: 2.0
    rollout_rs: token_k1
    rollout_rs_threshold: "0.5_2.0"
""",
    "seq is rs, threshold not quoted": """
algorithm:
  rollout_correction:
    rollout_is: sequence
    rollout_is_threshold: 2.0
    rollout_rs: seq_sum_k1
    rollout_rs_threshold: 0.5_2.0
    bypass_mode: false # Decoupled mode
""",
    "icepop, normalised": """
rollout_correction: {rollout_is: token, rollout_is_threshold: "0.5_5.0", rollout_is_batch_normalize: true}
""",
    "asymmetric": "{rollout_is: sequence, rollout_rs: token_k1, rollout_rs_threshold: 0.6_1.4}",
    "one threshold alone": "{rollout_rs: token_k1, rollout_rs_threshold: 2.0}",
    "bypass, ppo_clip": """
algorithm:
  rollout_correction:
    rollout_is: token
    rollout_is_threshold: 2.0
    rollout_rs: token_k1
    rollout_rs_threshold: "0.5_2.0"
    bypass_mode: true # Skip old_log_prob computation
    loss_type: ppo_clip # PPO clipped objective (default)
""",
    "bypass, reinforce": """
rollout_correction:
  rollout_is: sequence
  rollout_is_threshold: 2.0
  rollout_rs: null
  bypass_mode: true
  loss_type: reinforce
""",
    "bypass, row maximum": """
rollout_correction:
  rollout_is: sequence
  rollout_is_threshold: 2.0
  rollout_rs: seq_max_k2
  rollout_rs_threshold: 0.2
  bypass_mode: true
  loss_type: ppo_clip
""",
    "a script's overrides": """
python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo \\
    algorithm.rollout_correction.rollout_is=token \\
    algorithm.rollout_correction.rollout_is_threshold=2.0 \\
    algorithm.rollout_correction.rollout_is_batch_normalize=false \\
    algorithm.rollout_correction.rollout_rs=\\'token_k1,seq_max_k2\\' \\
    algorithm.rollout_correction.rollout_rs_threshold=\\'0.6_1.6,2.5\\' \\
    algorithm.rollout_correction.bypass_mode=true \\
    algorithm.rollout_correction.loss_type=ppo_clip trainer.total_epochs=5
""",
    **{name: name for name in PRESETS},
}
"""Name → a block of verl's documentation or example scripts, or the name of a preset."""
NAN = float("nan")
MASK = torch.tensor([[1, 1, 1, 1, 1, 0], [1, 1, 0, 0, 1, 1], [1, 0, 0, 0, 0, 0], [1, 1, 1, 0, 0, 0], [0] * 6])
"""Row 1 has a tool's answer inside, the last row is empty."""
ROLLOUT = torch.tensor(
    [
        [-0.5, -1.25, -0.0625, -2.0, -0.75, NAN],
        [-1.0, -0.375, NAN, NAN, -3.0, -0.125],
        [-1.5, NAN, NAN, NAN, NAN, NAN],
        [-0.25, -0.5, -2.5, NAN, NAN, NAN],
        [NAN] * 6,
    ]
)
GAP = torch.tensor(
    [
        [0.03, -0.02, 0.01, 0.05, -0.04, 0],
        [0.45, -0.4, 0, 0, 0.9, -0.01],
        [-0.8, 0, 0, 0, 0, 0],
        [0.0005, -0.0004, 0.0008, 0, 0, 0],
        [0] * 6,
    ]
)
ADVANTAGES = torch.tensor([[1.0], [-0.5], [0.75], [-1.25], [0.25]]).expand(5, 6)


def batch() -> wb.DataProto:
    columns = {"rollout_log_probs": ROLLOUT, "old_log_probs": ROLLOUT + GAP, "response_mask": MASK}
    return wb.DataProto({**columns, "advantages": ADVANTAGES, "scored": torch.ones(5, dtype=torch.bool)})


def learned(loss: PolicyLoss) -> dict[str, Any]:
    """The loss in bypass mode, where the present policy is the one of `old_log_probs`."""
    new = (ROLLOUT + GAP).requires_grad_()
    rows = batch().without("old_log_probs").with_columns({"old_log_probs": ROLLOUT})
    counts = LossCounts(tokens=float(MASK.sum()), sequences=4.0, width=6.0)
    found = loss({"log_probs": new}, rows, counts)
    found.loss.backward()
    assert new.grad is not None
    return {"loss": found.loss.item(), "grad": new.grad, "metrics": reduce([found.metrics]), **found.columns}


def verls(text: str) -> dict[str, Any]:
    """What verl makes of a block: with the defaults of its YAML, as its trainer calls it."""
    from omegaconf import OmegaConf
    from verl.trainer.config.algorithm import RolloutCorrectionConfig
    from verl.trainer.ppo import core_algos, rollout_corr_helper
    from verl.workers import config as workers

    block: Any = dict(getattr(RolloutCorrectionConfig, text)()) if text in PRESETS else None
    if block is None and "main_ppo" in text:
        block = dict(verl_correction.read_correction(text).to_dict())
    elif block is None:
        block = OmegaConf.create(text)
        for key in ("algorithm", "rollout_correction"):
            block = block.get(key, block)
        block = OmegaConf.to_container(block)
    block = {key: value for key, value in {"rollout_is": None, **block}.items() if key != "_target_"}
    config = RolloutCorrectionConfig(**block)
    if not config.bypass_mode:
        given = {key: value for key, value in block.items() if key not in ("bypass_mode", "loss_type")}
        made, mask, metrics = rollout_corr_helper.compute_rollout_correction_and_rejection_mask(
            ROLLOUT + GAP, ROLLOUT, MASK, **given
        )
        weights = {} if made is None else {"rollout_is_weights": made.batch["rollout_is_weights"].nan_to_num()}
        return {**weights, **({"loss_mask": mask} if config.rollout_rs else {}), "metrics": metrics}
    policy = workers.PolicyLossConfig(loss_mode="bypass_mode", rollout_correction=config)
    actor = workers.ActorConfig(strategy="fsdp", ppo_micro_batch_size_per_gpu=1, rollout_n=1, policy_loss=policy)
    actor.global_batch_info.update(dp_size=1, batch_num_tokens=int(MASK.sum()), global_batch_size=5)
    new = (ROLLOUT + GAP).nan_to_num(-1.0).requires_grad_()
    loss, metrics = core_algos.get_policy_loss_fn("bypass_mode")(
        old_log_prob=ROLLOUT.nan_to_num(-1.0), log_prob=new, advantages=ADVANTAGES, response_mask=MASK,
        loss_agg_mode="token-mean", config=actor,
    )  # fmt: skip
    loss.backward()
    return {"loss": loss.item(), "grad": new.grad * MASK, "metrics": metrics}


def close(found: dict[str, Any], said: dict[str, Any]) -> None:
    for name, value in said.items():
        if name != "metrics":
            torch.testing.assert_close(
                torch.as_tensor(found[name]), torch.as_tensor(value), rtol=1e-5, atol=1e-6, check_dtype=False
            )
    if "metrics" not in said:
        return
    for name, value in said["metrics"].items():
        # verl's deviations are differences of squares in float32
        rounding = 4e-4 if name.endswith("_std") else 2e-6
        assert found["metrics"][name] == pytest.approx(value, rel=2e-5, abs=rounding), name
    corrections = {name for name in found["metrics"] if name.startswith("rollout_corr/")}
    assert corrections == {name for name in said["metrics"] if name.startswith("rollout_corr/")}


@pytest.fixture(scope="module")
def pipe(tiny: str) -> wb.Pipeline:
    return wb.recipes.grpo(wb.engines.local(tiny, device="cpu"), wb.rewards.gsm8k, group_size=2, kl_coef=0)


def ours(pipe: wb.Pipeline, text: str) -> dict[str, Any]:
    """What our pipeline makes of the block, its stage and its loss."""
    made = wb.recipes.with_rollout_correction(pipe, text)
    stage, update = made["rollout_correction"], made["update_actor"]
    loss: PolicyLoss = update.made_with["loss"]
    if read_correction(text).bypass_mode:
        assert "old_log_prob" not in made.names and stage.writes == ("old_log_probs",)
        return learned(loss)
    outcome = stage(batch())
    assert torch.equal(outcome.batch["response_mask"], MASK)
    assert loss.rollout_is == ("rollout_is_weights" in stage.writes)
    return {**{name: outcome.batch[name] for name in stage.writes}, "metrics": reduce([outcome.metrics])}


@pytest.mark.parametrize("name", list(BLOCKS))
def test_blocks_as_written_give_verls_numbers(name: str, pipe: wb.Pipeline) -> None:
    close(ours(pipe, BLOCKS[name]), json.loads(GOLDEN.read_text())[name])


@pytest.mark.parametrize("name", list(BLOCKS))
def test_and_verl_says_so_still(name: str, pipe: wb.Pipeline) -> None:
    pytest.importorskip(
        "verl.trainer.ppo.rollout_corr_helper", reason="verl is not installed: its numbers are in the file"
    )
    close(ours(pipe, BLOCKS[name]), verls(BLOCKS[name]))


# --- ways to write it, and what is refused ----------------------------------------------------------


def test_a_block_may_be_nested_dotted_bare_or_an_object() -> None:
    bare = {"rollout_is": "token", "rollout_is_threshold": "0.5_5.0", "rollout_rs": None}
    said = read_correction(bare)
    whole = {"algorithm": {"gamma": 1.0, "rollout_correction": bare}, "trainer": {"total_epochs": 5}}
    dotted = {f"algorithm.rollout_correction.{name}": value for name, value in bare.items()}
    for one in (whole, {"rollout_correction": bare}, dotted, json.dumps(whole), "decoupled_token_icepop"):
        assert read_correction(one) == said
    assert read_correction("RolloutCorrectionConfig.decoupled_token_icepop()") == said
    assert read_correction("decoupled_token_icepop", rollout_is_threshold=3) != said
    assert read_correction() == read_correction("disabled") == read_correction({"rollout_correction": None})
    assert "rollout_is_threshold" not in read_correction({"rollout_is_threshold": None}).correction()


def test_verls_and_omegaconfs_objects_are_read() -> None:
    config = pytest.importorskip("verl.trainer.config.algorithm", reason="verl is not installed here")
    conf = pytest.importorskip("omegaconf").OmegaConf
    for name in PRESETS:
        theirs = getattr(config.RolloutCorrectionConfig, name)()
        assert read_correction(theirs) == read_correction(name), name
        assert read_correction(conf.create({"algorithm": {"rollout_correction": dict(theirs)}})) == read_correction(
            name
        )
    own = {one for one in dir(config.RolloutCorrectionConfig) if one.startswith(("decoupled_", "bypass_", "disabled"))}
    assert own - {"bypass_mode"} == set(PRESETS)


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"rollout_iss": "token"}, "did you mean 'rollout_is'"),
        ({"algorithm": {"gamma": 1.0}}, "a block rollout_correction"),
        ("decoupled_k1_rs", "did you mean 'decoupled_k3_rs'"),
        ("rollout_rs: [token_k1", "expected YAML"),
        ("- a\n- b", "YAML, overrides or a preset"),
        ({"rollout_correction": "token"}, "a block of settings"),
        (["rollout_is", "token"], "a block of settings or its text"),
        ({"bypass_mode": "perhaps"}, "bypass_mode"),
        ({"loss_type": "ppo"}, "ppo_clip or reinforce"),
        # as verl's own guide still has it; verl 0.9.1 refuses it, too
        ({"rollout_rs": "geometric", "rollout_rs_threshold": 2.0}, "kind of rejection"),
        ({"rollout_rs": "token_k1"}, "rollout_rs_threshold"),
        (
            {"rollout_rs": "token_k1,token_k2", "rollout_rs_threshold": "1.5,1.5,1.5"},
            "one for each of token_k1, token_k2",
        ),
        ({"rollout_rs": "token_k2", "rollout_rs_threshold": "0.5_1.0"}, "one upper bound"),
        ({"rollout_rs": "token_k1", "rollout_rs_threshold": 0.5}, "1/upper"),
        ({"rollout_is": "token", "rollout_is_threshold": None}, "rollout_is_threshold"),
        ({"rollout_is": "token", "rollout_is_threshold": "5.0_0.5"}, "lower ≤ upper"),
        ({"rollout_is": "token", "rollout_is_threshold": "0.5_2_3"}, "lower ≤ upper"),  # verl: 0.5 to 23
    ],
)
def test_what_cannot_be_is_refused_by_name(given: Any, match: str, pipe: wb.Pipeline) -> None:
    with pytest.raises(SettingError, match=match):
        wb.recipes.with_rollout_correction(pipe, given)


def test_bypass_mode_replaces_no_loss_silently(tiny: str, pipe: wb.Pipeline) -> None:
    gspo = wb.recipes.gspo(wb.engines.local(tiny, device="cpu"), wb.rewards.gsm8k, group_size=2, kl_coef=0)
    with pytest.raises(SettingError, match="bypass mode sets it"):
        wb.recipes.with_rollout_correction(gspo, "bypass_ppo_clip")
    assert wb.recipes.with_rollout_correction(gspo, "decoupled_seq_is")["update_actor"].settings()["rollout_is"]
    once = wb.recipes.with_rollout_correction(pipe, "decoupled_seq_is_rs")
    again = wb.recipes.with_rollout_correction(once, "disabled")
    assert again.names == once.names and not again["update_actor"].settings()["rollout_is"]


def plain(said: dict[str, Any]) -> dict[str, Any]:
    """Numbers as JSON has them, seven digits each."""

    def short(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return short(value.tolist())
        return [short(one) for one in value] if isinstance(value, list) else float(f"{value:.7g}")

    return {key: plain(value) if isinstance(value, dict) else short(value) for key, value in said.items()}


if __name__ == "__main__":
    made = {name: plain(verls(text)) for name, text in BLOCKS.items()}
    for preset in PRESETS:  # of the presets the numbers that train
        del made[preset]["metrics"]
    lines = [f"{json.dumps(name)}: {json.dumps(said)}" for name, said in made.items()]
    GOLDEN.write_text("{\n" + ",\n".join(lines) + "\n}\n")
