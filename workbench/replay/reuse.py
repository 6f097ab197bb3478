"""A recorded run as data of the next one: its samples as a batch, its best answers as targets, its pairs as preferences."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from workbench.base.config import require
from workbench.base.errors import RunError
from workbench.dataproto.core import SESSION, DataProto
from workbench.datasets.rows import Rows
from workbench.datasets.rows import rows as rows_of
from workbench.runs.folder import step_files
from workbench.stages.filtering import joined

FROM = "from_run"
"""The column, and the key in a row's `extra_info`, that says where a sample comes from."""


def rollouts(run: Any, steps: Iterable[int] | int | None = None, *, held_out: bool = False) -> DataProto:
    """Join the scored samples of a run's recorded steps: see `Run.rollouts`."""
    there = sorted(run.traces)
    wanted = there if steps is None else [steps] if isinstance(steps, int) else list(steps)
    if not wanted:
        do = "train(…, trace_freq=1, keep_traces=…) keeps the samples of every step"
        raise RunError(f"{run.address} has no recorded samples", expected="recorded steps", found=there, do=do)
    parts = [_scored(run, step) for step in wanted]
    samples = joined(parts)
    if not held_out:
        _refuse_held_out(run, samples)
    return samples


def _scored(run: Any, step: int) -> DataProto:
    """Return a recorded step's batch as its reward left it, with the column that says where each row comes from."""
    trace = run.traces[step]
    if "reward" not in trace.names:
        raise RunError(f"step {step} of {run.address} has no rewards", expected="a phase 'reward'", found=trace.names)
    batch = trace["reward"].batch
    versions = batch["policy_version"].tolist() if "policy_version" in batch else [None] * len(batch)
    rows = zip(batch["uid"], versions, strict=True)
    sources = [
        {"run": run.address, "step": step, "row": at, "uid": str(uid), "version": v} for at, (uid, v) in enumerate(rows)
    ]
    plain = DataProto({name: batch[name] for name in batch.batch}, dict(batch.non_tensor_batch), batch.meta_info)
    return plain.with_columns({FROM: sources})


def _refuse_held_out(run: Any, batch: DataProto) -> None:
    """Raise `RunError` where a sample answers a prompt that the run was also measured on."""
    if not step_files(run.path / "val"):
        return
    measured = {_prompt(chat) for chat in run.val()["raw_prompt"]}
    rows = [row for row, chat in enumerate(batch["raw_prompt"]) if _prompt(chat) in measured]
    if rows:
        what, do = (
            f"{len(rows)} samples of {run.address} answer held-out prompts",
            "held_out=True includes them",
        )
        raise RunError(what, expected="no held-out prompts in training data", found=f"rows {rows[:8]}", do=do)


def _prompt(chat: Any) -> str:
    return chat if isinstance(chat, str) else json.dumps([dict(turn) for turn in chat], sort_keys=True, default=str)


def best(batch: DataProto, k: int, above: float | None) -> Rows:
    """Return the k best different answers of each prompt, as rows with a target: see `Run.best`."""
    require(k >= 1, "argument k", expected="≥ 1", found=k)
    records = []
    for rows in _ranked(batch):
        kept = [row for row in rows if above is None or float(batch["reward"][row]) >= above]
        records += [{**_record(batch, [row]), "completion": batch["response_text"][row]} for row in kept[:k]]
    return _rows(records, batch, f"answers with a reward of at least {above}")


def pairs(batch: DataProto, margin: float) -> Rows:
    """Return the best and the worst answer of each prompt, as rows with `chosen` and `rejected`: see `Run.pairs`."""
    require(margin >= 0, "argument margin", expected="≥ 0", found=margin)
    records = []
    for rows in _ranked(batch):
        first, last = rows[0], rows[-1]
        if float(batch["reward"][first] - batch["reward"][last]) > margin:
            texts = {"chosen": batch["response_text"][first], "rejected": batch["response_text"][last]}
            records.append({**_record(batch, [first, last]), **texts})
    return _rows(records, batch, f"pairs whose rewards differ by more than {margin}")


def _ranked(batch: DataProto) -> list[list[int]]:
    """List, for each prompt, the rows of its different answers that were scored and are not empty, the best first; of equal
    rewards the earlier one."""
    if SESSION in batch or "turns" in batch:
        do = "learn from run.rollouts(), which has their tokens and masks"
        raise RunError("an agent's episodes are not single answers", expected="single responses", do=do)
    groups: dict[str, dict[str, int]] = {}
    order = torch.argsort(batch["reward"], descending=True, stable=True).tolist()
    for row in order:
        if batch["scored"][row] and str(batch["response_text"][row]).strip():
            groups.setdefault(_prompt(batch["raw_prompt"][row]), {}).setdefault(batch["response_text"][row], row)
    first = dict.fromkeys(map(_prompt, batch["raw_prompt"]))
    return [[*groups[key].values()] for key in first if key in groups]


_KEPT = ("data_source", "ability", "agent_name", "images")


def _record(batch: DataProto, rows: Sequence[int]) -> dict[str, Any]:
    """Return the prompt and the data's own columns of a row as a record, with where the answers in `rows` come from."""
    row = rows[0]
    columns = {name: batch[name][row] for name in _KEPT if name in batch}
    extra = dict(batch["extra_info"][row] or {}) if "extra_info" in batch else {}
    truth = batch["reward_model"][row] if "reward_model" in batch else None
    if isinstance(truth, Mapping):
        extra.setdefault("ground_truth", truth.get("ground_truth"))
    sources = [{**batch[FROM][each], "reward": float(batch["reward"][each])} for each in rows]
    chat = batch["raw_prompt"][row]
    return {"prompt": chat, **columns, "extra_info": {**extra, FROM: sources}}


def _rows(records: list[dict[str, Any]], batch: DataProto, what: str) -> Rows:
    if not records:
        rewards = batch["reward"][batch["scored"]].tolist()
        found = f"{len(rewards)} scored samples" + (
            f", rewards {min(rewards):g} to {max(rewards):g}" if rewards else ""
        )
        raise RunError(f"no {what}", found=found, do="lower the limit, or take more steps: trace_freq=1 of train")
    return rows_of(records, raw=all(isinstance(one["prompt"], str) for one in records))
