"""docs/verl.md: made of its table, complete for what verl's trainer writes, and true: each metric and each default beside verl."""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import inspect
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from verl_table import METRICS, OURS, PAGE, matching, page, rows

import workbench as wb
from workbench import functional as F
from workbench.base.metrics import reduce
from workbench.compat.verl_account import entries, keys
from workbench.dataproto import DataProto
from workbench.engines.protocol import LossCounts
from workbench.functional import balancing
from workbench.rewards import Score
from workbench.runs.batch_metrics import sample_metrics, timing_metrics
from workbench.stages import Advantage, PolicyLoss, RolloutCorrection, ValueLoss
from workbench.stages.log_prob import sampler_logprob_diff
from workbench.stages.measures import data_metrics

VERL = importlib.util.find_spec("verl")
beside = pytest.mark.skipif(VERL is None, reason="verl is not installed here")
SAME = [row for row in rows(METRICS) if row.ours in ("=", "≈")]
S, T = 3, 6
LEVELS = ("token", "sequence")
CORRECTION = {
    "rollout_is_threshold": 1.2, "rollout_is_batch_normalize": True, "rollout_rs": "token_k1,seq_mean_k3,seq_max_k2",
    "rollout_rs_threshold": "0.95_1.05,0.01,0.02",
}  # fmt: skip


class Config(dict):  # verl reads its configuration by attribute and by get
    __getattr__ = dict.__getitem__


def test_the_page_is_made_of_the_table() -> None:
    assert PAGE.read_text() == page(), "run: python tests/compat/verl_table.py"


def test_patterns_stand_for_their_keys() -> None:
    assert keys("a/{b,c}/{d,e}") == ["a/b/d", "a/b/e", "a/c/d", "a/c/e"] and keys("a{,_b}") == ["a", "a_b"]
    assert matching("val/s x/best@4/std", "{val,val-core}/<source>/best@<n>/{mean,std}")
    assert matching("b", "a, b") and not matching("ab", "a, b") and not matching("a.c", "abc")


@pytest.mark.slow
def test_every_metric_that_a_run_has_is_in_one_of_the_tables() -> None:
    """Those of the recorded runs, and of every stage that computes any here."""
    root = Path(__file__).parents[1] / "recorded" / "0.12.0"
    runs = [wb.load_run(path.parent) for path in root.glob("*/metrics.jsonl")]
    written = {name for run in runs for row in run.rows for name in row}
    written |= set(of_a_step(0)[0]) | set(of_held_out(0)[0])
    places = [one.theirs for one in rows(OURS)] + [
        one.theirs if one.ours in ("=", "≈") else one.ours for one in rows(METRICS)
    ]
    stages = {
        f"timing_s/{name}" for name in ("rollout", "advantage", "ref_log_prob", "turn_scores", "rollout_correction")
    }
    assert sorted(name for name in written - stages if not any(matching(name, one) for one in places)) == []


# --- beside verl -------------------------------------------------------------------------------------


def lifted(file: str, name: str, **names: Any) -> Any:
    """A function of verl's whose module does not import here, made of its source."""
    assert VERL is not None and VERL.submodule_search_locations
    path = Path(VERL.submodule_search_locations[0]) / file
    every = [
        one for one in ast.walk(ast.parse(path.read_text())) if isinstance(one, ast.FunctionDef) and one.name == name
    ]
    every[0].decorator_list = []
    every[0].returns = None
    for argument in (*every[0].args.args, *every[0].args.kwonlyargs):
        argument.annotation = None
    exec(compile(ast.Module([every[0]], []), str(path), "exec"), names)  # noqa: S102 - verl's own source
    return names[name]


@beside
def test_every_metric_key_in_verls_trainer_is_in_the_table() -> None:
    assert VERL is not None and VERL.submodule_search_locations
    root = Path(VERL.submodule_search_locations[0])
    files = [
        *(root / "trainer/ppo").glob("*.py"), *(root / "trainer/ppo/v1").glob("*.py"), root / "utils/debug/metrics.py",
        root / "utils/seqlen_balancing.py", root / "workers/utils/losses.py", root / "workers/engine_workers.py",
    ]  # fmt: skip
    start = (
        "actor critic perf training validation timing_s timing_per_token_ms val-core val-aux response response_length "
    )
    start += (
        "response_length_non_aborted prompt_length num_turns tool_call_counts variance_proxy rollout global_seqlen gdpo"
    )
    literal = re.compile(rf'f?"((?:{"|".join(start.split())})/[^"\s]+)"')
    found = {key for path in files for key in literal.findall(path.read_text())}
    found = {re.sub(r"\{[^}]*\}", "x", key) for key in found if not key.startswith("timing_") and not key.endswith("/")}
    assert len(found) > 80
    missing = sorted(key for key in found if not any(matching(key, row.theirs) for row in rows(METRICS)))
    assert not missing, missing


def of_a_step(seed: int) -> tuple[dict[str, float], dict[str, float]]:
    """The metrics of a step with a critic and a KL in the reward: ours through the stages, and verl's ({} without verl)."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=generator)

    number = 12
    lengths = torch.randint(0, T + 1, (number,), generator=generator)
    lengths[0], lengths[1] = T, 0
    prompt_lengths = torch.randint(1, S + 1, (number, 1), generator=generator)
    there = (torch.arange(T) < lengths[:, None]).long()
    mask = there * (random(number, T) > 0.25).long()
    mask[torch.arange(number), (lengths - 1).clamp(min=0)] = (
        lengths > 0
    ).long()  # verl's score stands on the last token
    prompt_mask = (torch.arange(S).flip(0) < prompt_lengths).long()
    scores = torch.zeros(number, T)
    scores[torch.arange(number), (lengths - 1).clamp(min=0)] = (random(number) * 4).round() * (lengths > 0)
    old = -random(number, T) * 2
    tensors = {
        "prompts": torch.ones(number, S, dtype=torch.long), "responses": torch.ones(number, T, dtype=torch.long),
        "attention_mask": torch.cat([prompt_mask, there], 1), "response_mask": mask, "token_level_scores": scores,
        "old_log_probs": old, "ref_log_prob": old + random(number, T) - 0.5, "values": random(number, T),
        "rollout_log_probs": old + (random(number, T) - 0.5) / 5,
    }  # fmt: skip
    turns, calls = np.arange(number) % 5 + 2, np.arange(number) % 3
    batch = DataProto.from_single_dict(
        {
            **tensors, "prompt_mask": prompt_mask, "reward": scores.sum(-1), "scored": torch.ones(number, dtype=torch.bool),
            "uid": [f"u{row // 4}" for row in range(number)], "num_turns": turns.tolist(), "num_tool_calls": calls.tolist(),
        },
        {"max_prompt_length": S, "max_response_length": T},
    )  # fmt: skip
    new, vpreds = old + (random(number, T) - 0.5), random(number, T) * 2
    seconds = {
        "rollout": 2.0,
        "ref_log_prob": 0.5,
        "values": 0.25,
        "advantage": 0.125,
        "update_critic": 3.0,
        "update_actor": 4.0,
    }
    advantage = Advantage(F.gae, gamma=0.99, lam=0.95, kl_controller=F.AdaptiveKL(0.1, 0.05, 100), kl_type="k1")
    outcome = advantage(batch)
    done = outcome.batch
    tokens = float(mask.sum())
    counts = LossCounts(tokens=tokens, sequences=float((mask.sum(-1) > 0).sum()), width=float(T))
    policy = PolicyLoss(clip_ratio_high=0.28, entropy_coeff=0.01, kl_coef=0.1)
    outputs = {"log_probs": new, "entropy": vpreds}
    ours = {
        **reduce([outcome.metrics]), **reduce([data_metrics(done)]),
        **reduce([policy(outputs, done, counts).metrics]), **reduce([ValueLoss()({"values": vpreds}, done, counts).metrics]),
        **reduce([sampler_logprob_diff(old, tensors["rollout_log_probs"], mask)]),
        **reduce([RolloutCorrection(**CORRECTION, rollout_is=LEVELS[seed % 2])(batch).metrics]),
        **timing_metrics({**{f"timing_s/{name}": value for name, value in seconds.items()}, "timing_s/step": 12.0}, done, 3),
    }  # fmt: skip
    ours |= {name: ours[f"timing_s/{name.split('/')[1]}"] if name in ours else seconds[name.split("/")[1]]
             for name in ("timing_s/values", "timing_s/update_critic", "timing_s/update_actor")}  # fmt: skip
    if VERL is None:
        return ours, {}
    import verl
    from verl.trainer.ppo import core_algos, metric_utils
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch
    from verl.utils.debug.metrics import calculate_debug_metrics
    from verl.workers.config import ActorConfig

    theirs_batch = verl.DataProto.from_dict(
        {name: one.clone() for name, one in tensors.items()}, {"__num_turns__": turns, "tool_call_counts": calls}
    )
    kl = lifted("trainer/ppo/ray_trainer.py", "apply_kl_penalty", core_algos=core_algos, torch=torch, masked_mean=core_algos.verl_F.masked_mean)  # fmt: skip
    theirs_batch, theirs = kl(theirs_batch, core_algos.AdaptiveKLController(0.1, 0.05, 100), "kl")
    data = theirs_batch.batch
    data["advantages"], data["returns"] = core_algos.compute_gae_advantage_return(
        data["token_level_rewards"], data["values"], mask, 0.99, 0.95
    )
    theirs_batch.meta_info["global_token_num"] = data["attention_mask"].sum(-1).tolist()
    timing = {
        {"rollout": "gen", "ref_log_prob": "ref", "advantage": "adv"}.get(name, name): value
        for name, value in seconds.items()
    }
    config = ActorConfig(strategy="fsdp", ppo_micro_batch_size_per_gpu=1, rollout_n=1, clip_ratio_high=0.28)
    loss, of_loss = core_algos.get_policy_loss_fn("vanilla")(
        old_log_prob=old,
        log_prob=new,
        advantages=data["advantages"],
        response_mask=mask,
        loss_agg_mode="token-mean",
        config=config,
    )
    value, clipped = core_algos.compute_value_loss(vpreds, data["returns"], data["values"], mask, 0.5)
    _, corrected = compute_rollout_correction_and_add_to_batch(
        verl.DataProto.from_dict({name: one.clone() for name, one in tensors.items()}),
        Config(CORRECTION, rollout_is=LEVELS[seed % 2]),
    )
    theirs = {
        **theirs, **corrected, **metric_utils.compute_data_metrics(theirs_batch), **calculate_debug_metrics(theirs_batch),
        **metric_utils.compute_timing_metrics(theirs_batch, timing), **of_loss, "actor/pg_loss": loss,
        **metric_utils.compute_throughout_metrics(theirs_batch, {"step": 12.0}, 3),
        "actor/entropy_loss": core_algos.agg_loss(vpreds, mask, "token-mean"), "actor/kl_coef": 0.1,
        "actor/kl_loss": core_algos.agg_loss(core_algos.kl_penalty(new, data["ref_log_prob"], "low_var_kl"), mask, "token-mean"),
        "critic/vf_loss": value, "critic/vf_clipfrac": clipped,
        "critic/vpred_mean": core_algos.verl_F.masked_mean(vpreds, mask),
    }  # fmt: skip
    return ours, {name: float(one) for name, one in theirs.items()}


def of_held_out(seed: int) -> tuple[dict[str, float], dict[str, float]]:
    """The metrics of a validation: two data sources, the first with the part `acc`; prompts of 4, 3 and 1 samples."""
    generator = np.random.default_rng(seed)
    sizes = {("s", "a"): 4, ("s", "b"): 4, ("s", "c"): 3, ("t", "d"): 4, ("t", "e"): 1, ("t", "f"): 4}
    table = []
    for (source, uid), number in sizes.items():
        for _ in range(number):
            value, acc = float(generator.integers(0, 5)) / 4, float(generator.integers(0, 2))
            answer = None if uid == "f" and table[-1][1] != "f" else str(generator.integers(0, 3))
            table.append((source, uid, value, acc if source == "s" else None, answer))
    turns = np.arange(len(table)) % 4 + 2
    sources, uids, values, accs, answers = (list(column) for column in zip(*table, strict=True))
    batch = DataProto(
        {
            "reward": torch.tensor(values, dtype=torch.float64),
            "reward/acc": torch.tensor([math.nan if one is None else one for one in accs], dtype=torch.float64),
            "scored": torch.ones(len(table), dtype=torch.bool),
        },
        {
            "uid": uids, "data_source": sources, "num_turns": turns.tolist(),
            "score": [Score(value=value, answer=answer) for value, answer in zip(values, answers, strict=True)],
        },
    )  # fmt: skip
    ours = sample_metrics(batch)
    if VERL is None:
        return ours, {}
    from verl.trainer.ppo.metric_utils import process_validation_metrics

    named = lifted("trainer/ppo/v1/trainer_base.py", "_val_metrics_update", process_validation_metrics=process_validation_metrics, np=np)  # fmt: skip
    infos = {"reward": values, "acc": accs, "pred": answers}
    theirs = named(None, sources, uids, infos, turns.tolist(), expected_acc_counts=sizes)
    return ours, {name: float(one) for name, one in theirs.items()}


@beside
@pytest.mark.parametrize("seed", range(6))
def test_what_is_the_same_in_the_table_is_the_same_number(seed: int) -> None:
    compared = set()
    for ours, theirs in (of_a_step(seed), of_held_out(seed)):
        for name, number in theirs.items():
            row = next((row for row in rows(METRICS) if matching(name, row.theirs)), None)
            assert row is not None, f"{name} is not in the table"
            if row in SAME:
                assert name in ours, f"{name} is not ours"
                # 1000 draws of numbers in [0, 1], half of whose deviation is known
                near = {"rel": 1e-4, "abs": 1e-6} if row.ours == "=" else {"abs": 0.08}
                assert ours[name] == pytest.approx(number, **near), name
                compared.add(row)
        extra = [name for name in ours if any(matching(name, row.theirs) for row in SAME) and name not in theirs]
        assert extra == [], "a name of verl's where verl has none"
    assert {row.theirs for row in SAME} - {row.theirs for row in compared} == set()


@beside
@pytest.mark.parametrize("seed", range(4))
def test_sessions_of_several_rows_are_verls(seed: int) -> None:
    """compute_advantage_for_multi_trajectories: only a session's last output is compared, all outputs get its advantage."""
    import verl
    from verl.trainer.ppo import core_algos

    def compute_advantage(data: Any, **_: Any) -> Any:
        plain = {"token_level_rewards": data.batch["token_level_rewards"], "response_mask": data.batch["response_mask"]}
        found = core_algos.compute_grpo_outcome_advantage(**plain, index=data.non_tensor_batch["uid"])
        data.batch["advantages"], data.batch["returns"] = found
        return data

    generator = torch.Generator().manual_seed(seed)
    named = [
        (f"u{prompt}", str(session), index)
        for prompt in range(3)
        for session in range(3)
        for index in range(1 + (prompt + session + seed) % 3)
    ]
    mask = (torch.rand(len(named), T, generator=generator) > 0.3).long()
    mask[:, 0] = 1
    last = (mask * torch.arange(T)).amax(-1, keepdim=True)
    scores = torch.zeros(len(named), T).scatter_(1, last, (torch.rand(len(named), 1, generator=generator) * 4).round())
    uids, sessions = ([one[place] for one in named] for place in (0, 1))
    multi = lifted(
        "trainer/ppo/v1/utils.py", "compute_advantage_for_multi_trajectories",
        core_algos=core_algos, compute_advantage=compute_advantage, torch=torch,
    )  # fmt: skip
    data = verl.DataProto.from_dict(
        {"token_level_rewards": scores, "response_mask": mask}, {"uid": np.array(uids, dtype=object)}
    )
    theirs = multi(data, [f"{uid}_{session}_{index}" for uid, session, index in named], "grpo").batch["advantages"]
    columns = {
        "response_mask": mask,
        "token_level_scores": scores,
        "reward": scores.sum(-1),
        "uid": uids,
        "session": sessions,
    }
    batch = DataProto.from_single_dict({**columns, "scored": torch.ones(len(named), dtype=torch.bool)})
    ours = Advantage(F.grpo, sessions="session")(batch).batch["advantages"]
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


@beside
@pytest.mark.parametrize("seed", range(6))
def test_groups_are_shared_out_no_worse_than_by_verl(seed: int) -> None:
    from verl.utils.seqlen_balancing import get_group_balanced_partitions

    lengths = np.random.default_rng(seed).integers(1, 4000, 48).tolist()
    uids = [f"u{row // 4}" for row in range(48)]
    loads = [balancing.workload(length) for length in lengths]
    ours = balancing.balanced_groups(loads, uids, 4, equal_size=True)
    theirs = get_group_balanced_partitions(lengths, uids, 4)
    assert [len(one) for one in ours] == [len(one) for one in theirs]
    heaviest = [max(sum(loads[row] for row in rows) for rows in parts) for parts in (ours, theirs)]
    assert heaviest[0] <= heaviest[1] * (1 + 1e-9)


# --- settings ----------------------------------------------------------------------------------------


def default_here(place: str) -> Any:
    """The default of `Class.field`, or of the argument `callable(argument)`."""
    holders = [
        wb,
        wb.recipes,
        wb.stages,
        wb.engines,
        wb.agents,
        wb.datasets,
        F,
        wb.engines.settings,
        wb.engines.protocol,
    ]
    name, argument = re.fullmatch(r"(\w+)[.(](\w+)\)?", place.removeprefix("Rows.")).groups()  # type: ignore[union-attr]
    if place.startswith("Rows."):
        return inspect.signature(getattr(wb.datasets.Rows, name)).parameters[argument].default
    made = next(found for one in holders if (found := getattr(one, name, None)) is not None)
    if dataclasses.is_dataclass(made):
        return next(field.default for field in dataclasses.fields(made) if field.name == argument)
    return inspect.signature(made).parameters[argument].default


@beside
def test_defaults_that_are_the_same_are_the_same() -> None:
    yaml = pytest.importorskip("yaml")
    assert VERL is not None and VERL.submodule_search_locations
    path = Path(VERL.submodule_search_locations[0]) / "trainer/config/_generated_ppo_trainer.yaml"
    config = yaml.safe_load(path.read_text())
    same = [(key, entry.place) for entry in entries() if entry.default == "=" for key in keys(entry.key)]
    assert len(same) > 50
    for key, place in same:
        theirs = config
        for part in key.split("."):
            assert part in theirs, f"{key} is no setting of verl's"
            theirs = theirs[part]
        if isinstance(theirs, str) and (value := re.fullmatch(r"\$\{oc.select:[^,]+,(.*)\}", theirs)):
            theirs = yaml.safe_load(value[1])
        ours = default_here(place)
        ours = list(ours) if isinstance(ours, tuple) else ours
        assert ours == (float(theirs) if isinstance(ours, float) else theirs), key


def test_places_of_settings_are_there() -> None:
    for entry in entries():
        if entry.default == "=":
            default_here(entry.place)
