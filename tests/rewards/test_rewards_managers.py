"""Managers with verl's constructor and call; classes written for verl; extras as a union; empty responses."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

import workbench as wb
from workbench.base.errors import DataError, RewardError
from workbench.rewards import (
    MISSING,
    FileManagerReward,
    ManagerReward,
    Reward,
    Score,
    Status,
    load_function,
    manager_class,
    register,
)
from workbench.rewards.managers import extra_info
from workbench.rewards.score import extra_columns
from workbench.stages import Reward as RewardStage


class Letters:
    """A tokenizer of one letter a token."""

    def decode(self, ids: Any, skip_special_tokens: bool = True) -> str:
        return "".join(chr(int(number)) for number in ids)


def verl_shaped(texts: list[str], truths: list[str]) -> Any:
    width = max(map(len, texts)) + 2
    responses, mask = torch.zeros(len(texts), width, dtype=torch.long), torch.zeros(len(texts), width, dtype=torch.long)
    for row, text in enumerate(texts):
        responses[row, : len(text)] = torch.tensor([ord(letter) for letter in text], dtype=torch.long)
        mask[row, : len(text)] = 1
    prompts = torch.full((len(texts), 3), ord("p"))
    return wb.DataProto.from_single_dict(
        {
            "prompts": prompts,
            "prompt_mask": torch.ones_like(prompts),
            "responses": responses,
            "response_mask": mask,
            "attention_mask": torch.cat([torch.ones_like(prompts), mask], dim=1),
            "input_ids": torch.cat([prompts, responses], dim=1),
            "raw_prompt": [[{"role": "user", "content": "q"}]] * len(texts),
            "response_text": texts,
            "data_source": ["openai/gsm8k"] * len(texts),
            "reward_model": [{"style": "rule", "ground_truth": truth} for truth in truths],
            "extra_info": [{"index": row} for row in range(len(texts))],
            "uid": [f"u{row}" for row in range(len(texts))],
        }
    )


BATCH = verl_shaped(["#### 4", "#### 5", ""], ["4", "4", "6"])


def make(name: str, compute_score: Any = None, **options: Any) -> Any:
    return manager_class(name)(Letters(), 0, compute_score, **options)


def keyed(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]) -> dict[str, Any]:
    assert extra_info["num_turns"] is None and "index" in extra_info
    right = solution_str.endswith(ground_truth)
    return {"score": float(right), "format": 1.0, **({"note": "right"} if right else {"hint": "wrong"})}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["naive", "prime", "dapo", "rate_limited"])
def test_a_row_manager_scores_on_the_last_token_and_keeps_every_key(name: str) -> None:
    manager = make(name, keyed, **({"num_workers": 2} if name == "prime" else {}))
    result = manager(BATCH.mutable(), return_dict=True)
    manager.close()
    tensor, info = result["reward_tensor"], result["reward_extra_info"]
    assert tensor.shape == BATCH["responses"].shape and tensor[0].tolist() == [0, 0, 0, 0, 0, 1, 0, 0]
    assert tensor[1].sum() == 0 and tensor[2].sum() == 0, "nothing is written for an empty response"
    assert info["note"] == ["right", MISSING, MISSING] and info["hint"] == [MISSING, "wrong", "wrong"]
    assert info["format"] == [1, 1, 1] and info["status"] == ["scored"] * 3
    assert BATCH["extra_info"][0] == {"index": 0}, "verl's naive writes into the batch"


def test_prime_calls_by_position_side_by_side(tmp_path: Path) -> None:
    def by_position(source: str, text: str, truth: str, info: Any) -> dict[str, Any]:
        import os

        open(os.path.join(folder, str(os.getpid())), "w").close()
        while len(os.listdir(folder)) < 2:  # until the other worker has a row, too
            time.sleep(0.01)
        return {"score": float(truth in text)}

    folder = str(tmp_path)
    manager = make("prime", by_position, num_workers=2)
    assert manager(BATCH.mutable()).sum() == 1  # a dict result costs verl's prime the whole batch
    manager.close()


@pytest.mark.slow
def test_batch_is_one_call_with_plural_names() -> None:
    def together(
        data_sources: list[str], solution_strs: list[str], ground_truths: list[str], extra_infos: list[Any]
    ) -> Any:
        assert len(data_sources) == len(solution_strs) == len(extra_infos) == 3
        return [float(truth in text) for text, truth in zip(solution_strs, ground_truths, strict=True)]

    assert make("batch", together)(BATCH.mutable()).sum() == 1


def test_defaults_route_by_source_and_given_rewards_are_given_back() -> None:
    assert make("naive")(BATCH.mutable()).sum() == 1
    ready = BATCH.mutable()
    ready.batch["rm_scores"] = torch.full((3, 8), 0.5)
    assert torch.equal(make("naive")(ready), ready.batch["rm_scores"])


def test_dapo_adds_its_penalty_unclamped_as_verl_does() -> None:
    cfg = {"enable": True, "len": 4, "penalty_factor": 2.0, "log": True}
    manager = make("dapo", max_resp_len=6, overlong_buffer_cfg=cfg)
    result = manager(BATCH.mutable(), return_dict=True)
    # six tokens: min(-(6 - 2)/4 · 2, 0) = -2, below the right answer's 1 and the wrong one's 0
    assert result["reward_tensor"][0].sum() == 1 - 2 and result["reward_tensor"][1].sum() == -2
    assert result["reward_extra_info"]["overlong_reward"] == [-2, -2, 0]
    with pytest.raises(Exception, match="0 < len ≤ max_resp_len"):
        make("dapo", max_resp_len=2, overlong_buffer_cfg=cfg)


@pytest.mark.slow
def test_a_failure_is_said_and_no_zero() -> None:
    def fragile(solution_str: str) -> float:
        if not solution_str:
            raise ValueError("empty")
        return 1.0

    info = make("naive", fragile)(BATCH.mutable(), return_dict=True)["reward_extra_info"]
    assert info["status"][2] == "infra_error" and info["scored"] == [True, True, False] and info["score"][2] is MISSING
    with pytest.raises(RewardError, match="empty"):
        make("naive", fragile, on_failure="raise")(BATCH.mutable())


def test_reserved_names_are_ours() -> None:
    scores = [
        Score(value=1.0, extra={"status": "great", "gts": "x", "mine": 1}),
        Score(value=0.0, status=Status.NO_ANSWER),
    ]
    info = extra_info(scores)
    assert info["status"] == ["scored", "no_answer"] and "gts" not in info and info["mine"] == [1, MISSING]
    assert extra_columns(scores)["reward_extra/mine"] == [1, MISSING] and not MISSING and repr(MISSING) == "MISSING"


def test_a_missing_marker_is_saved_and_is_one() -> None:
    import pickle
    import tempfile

    batch = BATCH.with_columns({"reward_extra/note": ["a", MISSING, {"b": 1}]})
    assert pickle.loads(pickle.dumps(MISSING)) is MISSING
    with tempfile.TemporaryDirectory() as folder:
        batch.save(Path(folder) / "batch")
        assert wb.DataProto.load(Path(folder) / "batch")["reward_extra/note"][1] is MISSING


# --- managers written for verl -------------------------------------------------------------------------

VERLS = """
import torch
from verl import DataProto
from verl.workers.reward_manager import register
from verl.workers.reward_manager.abstract import AbstractRewardManager
from collections import defaultdict

@register("lengths")
class Lengths(AbstractRewardManager):
    def __init__(self, tokenizer, num_examine, compute_score, reward_fn_key="data_source", scale=1.0):
        self.tokenizer, self.num_examine, self.compute_score = tokenizer, num_examine, compute_score
        self.reward_fn_key, self.scale = reward_fn_key, scale

    def __call__(self, data, return_dict=False):
        if "rm_scores" in data.batch.keys():
            return data.batch["rm_scores"]
        reward_tensor = torch.zeros_like(data.batch["responses"], dtype=torch.float32)
        extra = defaultdict(list)
        for i in range(len(data)):
            item = data[i]
            prompt_length = item.batch["prompts"].shape[-1]
            valid = int(item.batch["attention_mask"][prompt_length:].sum())
            text = self.tokenizer.decode(item.batch["responses"][:valid])
            truth = item.non_tensor_batch["reward_model"]["ground_truth"]
            item.non_tensor_batch["extra_info"]["seen"] = True
            if valid:
                reward_tensor[i, valid - 1] = self.scale * (len(text) + (truth in text))
            extra["source"].append(item.non_tensor_batch[self.reward_fn_key])
        return {"reward_tensor": reward_tensor, "reward_extra_info": extra} if return_dict else reward_tensor
"""


@pytest.mark.slow
def test_a_manager_class_written_for_verl_works_from_its_file(tmp_path: Path) -> None:
    file = tmp_path / "manager.py"
    file.write_text(VERLS)
    with pytest.raises(DataError, match="outside the folders"):
        FileManagerReward(file, "Lengths", tokenizer=Letters())
    reward = FileManagerReward(file, "Lengths", tokenizer=Letters(), roots=[tmp_path], scale=2.0)
    scores = reward.score(BATCH)
    assert [score.value for score in scores] == [14, 12, 0] and scores[0].extra["source"] == "openai/gsm8k"
    assert reward.settings()["file"]["function"] == "Lengths" and reward.source == VERLS
    outcome = RewardStage(reward)(BATCH)
    assert outcome.batch["token_level_scores"][0].tolist() == [0, 0, 0, 0, 0, 14, 0, 0]
    reward.close()
    broken = tmp_path / "broken.py"
    broken.write_text(VERLS.replace("valid = int(", "valid = int(missing + "))
    with pytest.raises(RewardError, match="NameError"):
        FileManagerReward(broken, "Lengths", tokenizer=Letters(), roots=[tmp_path]).score(BATCH)


def test_managers_register_and_any_callable_of_the_shape_is_a_reward() -> None:
    @register("constant")
    class Constant:
        def __init__(self, tokenizer: Any, num_examine: int = 0, compute_score: Any = None, **options: Any) -> None: ...

        def __call__(self, data: Any, return_dict: bool = False) -> Any:
            tensor = torch.zeros_like(data.batch["responses"], dtype=torch.float32)
            tensor[:, 0] = 0.5
            return tensor

    reward = ManagerReward(make("constant"))
    assert [score.value for score in reward.score(BATCH)] == [0.5] * 3
    with pytest.raises(RewardError, match="did you mean 'constant'"):
        manager_class("constnt")

    def wrong_shape(data: Any, return_dict: bool) -> Any:
        return torch.zeros(2, 2)

    with pytest.raises(RewardError, match=r"a tensor of shape \(3, 8\); found shape \(2, 2\)"):
        ManagerReward(wrong_shape).score(BATCH)


def test_openrlhfs_function() -> None:
    def reward_func(queries: list[str], prompts: list[Any], labels: list[str]) -> dict[str, Any]:
        assert (
            queries[0] == "q#### 4" and prompts[0] == [{"role": "user", "content": "q"}] and labels == ["4", "4", "6"]
        )
        return {
            "rewards": torch.tensor([1.0, 0.0, 0.5]),
            "scores": torch.zeros(3),
            "extra_logs": {"size": torch.tensor([6, 6, 0])},
        }

    scores = Reward(reward_func, in_process=True).score(BATCH)
    assert [score.value for score in scores] == [1, 0, 0.5] and scores[0].parts["size"] == 6


# --- one bad row, and other people's mistakes ---------------------------------------------------------


@pytest.mark.parametrize("name", ["naive", "batch", "prime", "dapo", "rate_limited", "reward"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), "1.0"], ids=["NaN", "infinite", "text"])
def test_one_bad_row_is_one_bad_row_for_every_manager(name: str, bad: Any) -> None:
    def row(solution_str: str) -> Any:
        return bad if solution_str == "#### 5" else 1.0

    def rows(solution_strs: list[str]) -> Any:
        return [row(text) for text in solution_strs]

    def verls(data_source: str, solution_str: str, ground_truth: str, extra_info: Any) -> Any:
        return bad if solution_str == "#### 5" else 1.0

    function: Any = {"batch": rows, "prime": verls}.get(name, row)
    more = {} if name == "prime" else {"in_process": True}
    reward: Any = Reward(function, in_process=True) if name == "reward" else None
    reward = reward or ManagerReward(make(name, function, num_workers=1, **more))
    scores = reward.score(BATCH)
    reward.close()
    assert [score.scored for score in scores] == [True, False, True] and scores[1].status is Status.INFRA_ERROR
    assert scores[0].value == 1.0 and scores[1].why


def poisoned(data: Any, return_dict: bool) -> Any:
    tensor = torch.ones(3, 8)
    tensor[1, 2] = float("nan")
    return {"reward_tensor": tensor, "reward_extra_info": {"note": ["a", "b", "c"], "mean": 0.5}}


def test_a_managers_nan_costs_its_row_and_its_exception_all() -> None:
    scores = ManagerReward(poisoned).score(BATCH)
    assert [score.scored for score in scores] == [True, False, True] and scores[2].extra["note"] == "c"
    assert "a finite number" in scores[1].why
    with pytest.raises(RewardError, match="failed on a row.*a finite number"):
        ManagerReward(poisoned, on_failure="raise").score(BATCH)
    assert [score.value for score in ManagerReward(poisoned, on_failure="value=-1").score(BATCH)] == [8, -1, 8]

    def broken(data: Any, return_dict: bool) -> Any:
        raise KeyError("no such column")

    with pytest.raises(RewardError, match="all 3 rows.*no such column"):
        ManagerReward(broken).score(BATCH)
    assert [score.value for score in ManagerReward(broken, on_failure="value=0.5").score(BATCH)] == [0.5] * 3
    tries = list[int]()

    def second_time(data: Any, return_dict: bool) -> Any:
        tries.append(1)
        return poisoned(data, return_dict) if len(tries) == 1 else torch.full((3, 8), 0.25)

    scores = ManagerReward(second_time, on_failure="retry(3)").score(BATCH)
    assert [score.value for score in scores] == [8, 2, 8] and len(tries) == 2


def test_a_broken_episode_is_under_the_managers_policy() -> None:
    batch = BATCH.with_columns(
        {"agent_extra": [{}, {"errors": ["no user"]}, {}], "finish_reason": ["stop", "abort", "stop"]}
    )
    manager = make("naive")
    masked = ManagerReward(manager).score(batch)
    assert masked[1].status is Status.INFRA_ERROR and "the episode broke: no user" in masked[1].why
    assert [score.value for score in ManagerReward(manager, on_failure="value=-2").score(batch)] == [1, -2, 0]
    with pytest.raises(RewardError, match="the episode broke: no user"):
        ManagerReward(manager, on_failure="raise").score(batch)


def test_a_reason_passes_through_a_manager() -> None:
    scores = ManagerReward(make("naive", lambda solution_str: 1 / len(solution_str), in_process=True)).score(BATCH)
    assert [score.scored for score in scores] == [True, True, False] and "ZeroDivisionError" in scores[2].why


@pytest.mark.slow
def test_a_managers_file_gets_a_function_of_another_file(tmp_path: Path) -> None:
    (tmp_path / "manager.py").write_text(
        VERLS.replace("(len(text) + (truth in text))", "self.compute_score(text, truth)")
    )
    (tmp_path / "mine.py").write_text(
        "def compute_score(text, truth, bonus=0.0):\n    return (truth in text) + bonus\n"
    )
    function = load_function(tmp_path / "mine.py", roots=[tmp_path], bonus=0.5)
    reward = FileManagerReward(
        tmp_path / "manager.py", "Lengths", tokenizer=Letters(), compute_score=function, roots=[tmp_path]
    )
    scores = reward.score(BATCH)
    reward.close()
    assert [score.value for score in scores] == [1.5, 0.5, 0.0]


def test_a_built_in_name_is_not_taken_by_accident() -> None:
    before = manager_class("naive")

    class Mine:
        pass

    with pytest.raises(RewardError, match=r"'naive' is workbench's own.*@register\('naive', replace=True\)"):
        register("naive")(Mine)
    assert manager_class("naive") is before
    try:
        assert register("naive", replace=True)(Mine) is manager_class("naive") is Mine
    finally:
        register("naive", replace=True)(before)
    register("mine again")(Mine)
    register("mine again")(before)  # a cell that is run again
    assert manager_class("mine again") is before


def test_a_manager_is_no_reward_of_single_rows() -> None:
    run = wb.rewards.dry_run(ManagerReward(make("naive")), [{"response": "#### 4", "ground_truth": "4"}])
    assert "scores the batch of a rollout" in run.failures.index[0]
