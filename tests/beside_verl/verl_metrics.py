"""Cases of what a step and a validation report, of rewards by length, and of the batch's own methods."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from verl_cases import Answer, Verl, case
from verl_kinds import Batch
from verl_stages import FEW, STAGE_KINDS, attended, metrics_of, ours, verls

from workbench import functional as F
from workbench.base.metrics import Metric
from workbench.dataproto import DataProto
from workbench.engines import Sample, SamplingSettings
from workbench.runs.batch_metrics import sample_metrics, timing_metrics
from workbench.stages import (
    Advantage,
    Overlong,
    Reward,
    Rollout,
    Values,
)
from workbench.stages.measures import data_metrics

# --- rewards and metrics --------------------------------------------------------------------------


def _overlong(b: Batch) -> Answer:
    width = attended(b)
    asked = ours(b, attention_mask=torch.cat([torch.ones(len(width), 2).long(), width], 1), responses=b.mask.long())
    batch = Overlong(max_tokens=7, buffer=5, penalty=0.7)(asked).batch
    return {"reward": batch["reward"], "rewards": batch["token_level_scores"]}


def _verls_overlong(verl: Verl, b: Batch) -> Answer:
    """verl's manager of DAPO's rewards, row by row, and the sum where it puts it: on the last attended token."""
    buffer = SimpleNamespace(enable=True, len=5, penalty_factor=0.7, log=False)
    config = SimpleNamespace(reward={"reward_kwargs": {"overlong_buffer_cfg": buffer, "max_resp_len": 7}})
    scores = [float(score) for score in b.scores]

    async def every() -> list[float]:
        manager = verl.dapo.DAPORewardManager.__new__(verl.dapo.DAPORewardManager)
        manager.loop = asyncio.get_running_loop()
        manager.tokenizer = SimpleNamespace(decode=lambda ids, **_: "")
        verl.dapo.DAPORewardManager.__init__(
            manager, config, manager.tokenizer, lambda ground_truth, **_: scores[ground_truth]
        )
        rows = [{"ground_truth": row} for row in range(len(scores))]
        objects = {"data_source": np.array(["x"] * len(rows), object), "reward_model": np.array(rows, object)}
        data = verls(verl, b, **objects)
        return [(await manager.run_single(data[row : row + 1]))["reward_score"] for row in range(len(rows))]

    rewards = torch.tensor([float(one) for one in asyncio.run(every())])
    placed = torch.zeros_like(b.rewards)
    for row, length in enumerate(attended(b).sum(-1).tolist()):
        placed[row, length - 1] = rewards[row] if length else 0.0
    return {"reward": rewards, "rewards": placed}


case("stage Overlong", _overlong, _verls_overlong, kinds=("reference", "ragged", "full", "tool holes", "empty rows", "one token"))  # fmt: skip


class Fake:
    """An engine that answers with a batch: row after row its responses, and its values."""

    version, state_id = 0, "s0"

    def __init__(self, b: Batch) -> None:
        self.batch, self.row, self.tokenizer = b, count(), self

    chat_template, pad_token_id, eos_token_id = None, 0, 0

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [1] * len(text.split())}

    def batch_decode(self, ids: Sequence[Sequence[int]], **_: Any) -> list[str]:
        return [str(row[0]) if row else "" for row in ids]

    async def sample(self, request: Any) -> Sample:
        row = next(self.row)
        length = int(self.batch.mask[row].sum())
        reason = "length" if length == self.batch.mask.shape[1] else "stop"
        return Sample((row,) * length, (-0.5,) * length, reason, 0)

    def compute_log_probs(self, batch: DataProto, want: Sequence[str] = ("values",), temperature: float = 1.0) -> Any:
        return {name: self.batch.values[:, : batch["response_mask"].shape[1]] for name in want}

    compute_values = compute_log_probs


def whole_step(b: Batch) -> tuple[DataProto, dict[str, float]]:
    """Rollout, reward, values, advantages of a batch's lengths and scores, as a run's step; all metrics of it."""
    fake, scores = Fake(b), b.scores.tolist()
    words = ["word", "word word", "word word word", "word word"]
    batch = DataProto(
        None,
        {"raw_prompt": [[{"role": "user", "content": one}] for one in words], "uid": [f"u{row}" for row in range(4)]},
        {"step": 1, "seed": 0, "epoch": 0, "max_prompt_length": 3},
    )
    groups: list[Mapping[str, Metric | float]] = []
    for stage in (
        Rollout(fake, group_size=3, sampling=SamplingSettings(max_tokens=b.mask.shape[1])),  # type: ignore[arg-type]
        Reward(lambda response: scores[int(response)] if response else 0.0, in_process=True),
        Values(fake),  # type: ignore[arg-type]
        Advantage(F.gae, gamma=0.9, lam=0.7, kl_controller=None),
    ):
        outcome = stage(batch)
        batch = outcome.batch
        groups.append(outcome.metrics)
    return batch, {**metrics_of(*groups), **metrics_of(data_metrics(batch))}


def _metrics(b: Batch) -> Answer:
    batch, metrics = whole_step(b)
    timings = {"timing_s/step": 2.0, "timing_s/rollout": 1.0, "timing_s/update_actor": 0.5}
    return {**metrics, **timings, **timing_metrics(timings, batch, devices=3)}


def _verls_metrics(verl: Verl, b: Batch) -> Answer:
    width = int(b.mask.sum(-1).max())
    lengths = torch.tensor([1, 2, 3, 2]).repeat_interleave(3)
    prompts = (torch.arange(3) >= 3 - lengths[:, None]).long()
    mask = b.mask[:, :width]
    advantages, returns = verl.core_algos.compute_gae_advantage_return(
        b.rewards[:, :width], b.values[:, :width], mask, 0.9, 0.7
    )
    columns = {"advantages": advantages, "returns": returns, "values": b.values[:, :width], "response_mask": mask}
    rewards = dict.fromkeys(("token_level_scores", "token_level_rewards"), b.rewards[:, :width])
    shape = {"prompts": prompts, "responses": mask, "attention_mask": torch.cat([prompts, mask], 1)}
    tokens = shape["attention_mask"].sum(-1).tolist()
    batch = verl.protocol.DataProto.from_dict({**columns, **rewards, **shape}, meta_info={"global_token_num": tokens})
    utils = verl.metric_utils
    timings = {"step": 2.0, "gen": 1.0, "update_actor": 0.5}
    found = utils.compute_data_metrics(batch) | utils.compute_timing_metrics(batch, timings)
    return found | utils.compute_throughout_metrics(batch, timings, 3)


def _data_metrics(b: Batch) -> Answer:
    prompts = torch.ones(len(b.mask), 2).long()
    batch = ours(
        b,
        prompt_mask=prompts,
        attention_mask=torch.cat([prompts, attended(b)], 1),
        token_level_rewards=b.rewards - 0.1,
        num_turns=_turns(b),
        num_tool_calls=[turns - 1 for turns in _turns(b)],
    )
    longest = {"max_prompt_length": 2, "max_response_length": b.mask.shape[1]}
    return metrics_of(data_metrics(batch.with_meta(**longest)))


def _verls_data_metrics(verl: Verl, b: Batch) -> Answer:
    turns = np.array(_turns(b))
    data = verls(verl, b, __num_turns__=turns, tool_call_counts=turns - 1)
    data.batch["token_level_rewards"] = b.rewards - 0.1
    return verl.metric_utils.compute_data_metrics(data)


def _turns(b: Batch) -> list[int]:
    return [1 + row % 3 for row in range(len(b.mask))]


case("data metrics", _data_metrics, _verls_data_metrics, kinds=STAGE_KINDS, rtol=1e-3, recorded=(*FEW, "groups of one"))
case("metrics of a step", _metrics, _verls_metrics, kinds=("ragged", "full", "empty rows", "equal rewards", "one of many"))  # fmt: skip


# --- validation -----------------------------------------------------------------------------------


def _validation(b: Batch) -> tuple[list[str], list[str], list[float], list[str]]:
    """Sources, uids, rewards and answers of four prompts, two sources, three samples each."""
    sources = [f"source {int(group) % 2}" for group in b.groups]
    answers = [str(int(one * 3)) for one in b.more]
    return sources, list(b.uid), [round(float(one), 4) for one in b.scores], answers


def _validated(b: Batch, wanted: str) -> Answer:
    from workbench.rewards import Score

    sources, uids, rewards, answers = _validation(b)
    scores = [Score(value=value, answer=answer) for value, answer in zip(rewards, answers, strict=True)]
    batch = DataProto.from_single_dict(
        {
            "reward": torch.tensor(rewards),
            "scored": torch.ones(len(rewards), dtype=torch.bool),
            "data_source": sources,
            "uid": uids,
            "score": scores,
        }
    )
    found = {name.partition("/")[2]: value for name, value in sample_metrics(batch).items()}
    return {name: value for name, value in found.items() if any(word in name for word in wanted.split())}


def _verls_validated(verl: Verl, b: Batch, wanted: str) -> Answer:
    sources, uids, rewards, answers = _validation(b)
    found = verl.metric_utils.process_validation_metrics(sources, uids, {"reward": rewards, "pred": answers})
    return {
        f"{source}/{variable}/{name}": value
        for source, variables in found.items()
        for variable, metrics in variables.items()
        for name, value in metrics.items()
        if any(word in f"{variable}/{name}" for word in wanted.split())
    }


for _wanted, _atol in (("mean@ std@", 1e-5), ("best@ worst@ maj@", 0.05)):
    case(
        f"validation {_wanted}",
        lambda b, wanted=_wanted: _validated(b, wanted),
        lambda verl, b, wanted=_wanted: _verls_validated(verl, b, wanted),
        kinds=("ragged", "full", "one of many"),
        seeds=(0,),
        atol=_atol,
    )


# --- the batch itself -----------------------------------------------------------------------------


def _columns(batch: Any) -> Answer:
    """All columns as tensors: names of groups as numbers."""
    uid = torch.tensor([int(name.split()[1]) for name in batch.non_tensor_batch["uid"]])
    return {"uid": uid, "scores": batch.batch["token_level_scores"], "mask": batch.batch["response_mask"]}


def _parts(parts: Sequence[Any]) -> Answer:
    return {f"{name} of {number}": value for number, part in enumerate(parts) for name, value in _columns(part).items()}


def _rows(b: Batch) -> Tensor:
    return torch.tensor([(5 * row + b.seed) % len(b.mask) for row in range(len(b.mask))])


def _in_place(data: Any, method: str, *given: Any) -> Any:
    """verl changes some things in place and answers nothing."""
    getattr(data, method)(*given)
    return data


OPERATIONS: Mapping[str, tuple[Callable[[Any, Batch], Any], Callable[[Verl, Any, Batch], Any] | None]] = {
    "repeat": (lambda data, b: data.repeat(2), None),
    "repeat, not interleaved": (lambda data, b: data.repeat(3, interleave=False), None),
    "sample_level_repeat": (lambda data, b: data.sample_level_repeat([row % 3 for row in range(len(b.mask))]), None),
    "select_idxs": (lambda data, b: data.select_idxs(_rows(b)[: len(b.mask) // 2 + 1]), None),
    "select_idxs, mask": (lambda data, b: data.select_idxs(_rows(b) % 2 == 0), None),
    "slice": (lambda data, b: data[1::2], None),
    "slice, negative": (lambda data, b: data[-3:-1], None),
    "select": (
        lambda data, b: data.select(["response_mask", "token_level_scores"], ["uid"]),
        None,
    ),
    "reorder": (lambda data, b: data.reorder(_rows(b)), lambda verl, data, b: _in_place(data, "reorder", _rows(b))),
    "rename": (
        lambda data, b: data.rename("values", "guesses").rename(["guesses"], ["values"]),
        None,
    ),
    "chunk": (lambda data, b: data.chunk(3), None),
    "split": (lambda data, b: data.split(5), None),
    "concat": (
        lambda data, b: DataProto.concat([data, data[:2]]),
        lambda verl, data, b: verl.protocol.DataProto.concat([data, data[:2]]),
    ),
    "pad": (
        lambda data, b: data.pad_to_divisor(7)[0],
        lambda verl, data, b: verl.protocol.pad_dataproto_to_divisor(data, 7)[0],
    ),
    "unpad": (lambda data, b: data.unpad(2), lambda verl, data, b: verl.protocol.unpad_dataproto(data, 2)),
    "make_iterator": (lambda data, b: list(data.make_iterator(3, 2)), lambda verl, data, b: list(data.make_iterator(3, 2))),
    "union": (
        lambda data, b: data.select(["response_mask"], ["uid"]).union(data.select(["token_level_scores"], ["uid"])),
        None,
    ),
    "pop": (
        lambda data, b: data.pop(["response_mask", "token_level_scores"], ["uid"])[0],
        lambda verl, data, b: data.pop(["response_mask", "token_level_scores"], ["uid"]),
    ),
}  # fmt: skip
"""A method → what both sides do; verl's own where it is spelt otherwise."""


def _operated(made: Any) -> Answer:
    return _parts(made) if isinstance(made, list) else _columns(made)


for _name, (_ours, _theirs) in OPERATIONS.items():
    case(
        f"DataProto.{_name}",
        lambda b, ours_=_ours: _operated(ours_(ours(b), b)),
        lambda verl, b, ours_=_ours, theirs=_theirs: _operated(
            theirs(verl, verls(verl, b), b) if theirs else ours_(verls(verl, b), b)
        ),
        kinds=("ragged", "one row", "one token"),
        seeds=(0,),
        recorded=(),
    )
