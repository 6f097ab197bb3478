"""Rollout: P prompts become B = P·G rows, each with a response sampled from its own seed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from workbench import background
from workbench.config import require
from workbench.dataproto import DataProto
from workbench.datasets.templates import encode
from workbench.engines.protocol import Request, Sample, Sampler, SamplingSettings
from workbench.errors import DataError, message
from workbench.metrics import Mean
from workbench.seeds import derive
from workbench.stages.stage import BaseStage, Outcome, spread

Arrived = Callable[[int, Mapping[str, Any], Sample], None]


class Rollout(BaseStage):
    """Sample `group_size` responses to every prompt.

    With `greedy_baseline=True` each prompt gets one more row, sampled at temperature 0 and marked in the column `greedy`:
    ReMax's baseline, which shares rollout and reward with the others until the stage `baseline` folds it away.

    Prompts are encoded here, with the chat template of the sampler's own tokenizer, because what a
    prompt is in tokens belongs to the model. Rows come out interleaved: a a b b. The seed of a row is
    derived from (run seed, `purpose`, step, uid, sample), so that any row can be generated again alone.

    Raises `DataError` where a prompt is longer than the batch's `max_prompt_length`.
    """

    name = "rollout"
    reads = ("raw_prompt", "uid")
    writes: tuple[str, ...] = (
        "prompts",
        "prompt_mask",
        "responses",
        "response_mask",
        "input_ids",
        "attention_mask",
        "position_ids",
        "rollout_log_probs",
        "finish_reason",
        "policy_version",
        "response_text",
    )

    def __init__(
        self,
        sampler: Sampler,
        *,
        group_size: int = 8,
        sampling: SamplingSettings | None = None,
        purpose: str = "rollout",
        greedy_baseline: bool = False,
    ) -> None:
        require(group_size >= 1, "group_size", expected="≥ 1", found=group_size)
        self.greedy_baseline = greedy_baseline
        if greedy_baseline:
            self.writes = (*type(self).writes, "greedy")
        self._sampler = sampler
        self.group_size = group_size
        self.sampling = sampling or SamplingSettings()
        self.purpose = purpose
        self._arrived: Arrived | None = None

    @contextmanager
    def telling(self, arrived: Arrived) -> Iterator[None]:
        """Inside the block `arrived` is told of every row as it is finished: (row, its object columns, sample)."""
        self._arrived = arrived
        try:
            yield
        finally:
            self._arrived = None

    @property
    def sampler(self) -> Sampler:
        """What writes the responses."""
        return self._sampler

    def settings(self) -> dict[str, Any]:
        """Its own, and the sampling's, flat."""
        plain = {"group_size": self.group_size, "purpose": self.purpose, **self.sampling.to_dict()}
        return {**plain, "greedy_baseline": True} if self.greedy_baseline else plain

    @property
    def blank(self) -> dict[str, Any]:
        """What a reward function may ask for of a row beside its data and its response, for a row that says nothing."""
        return {"finish_reason": "stop"}

    def learners(self) -> tuple[Any, ...]:
        """The policy: its version is written to every row."""
        return (self._sampler,)

    def __call__(self, batch: DataProto) -> Outcome:
        """P rows in, P·G rows out (P·(G + 1) with a greedy baseline)."""
        prompts = self._encode(batch)
        each = self.group_size + self.greedy_baseline
        rows = torch.arange(len(batch)).repeat_interleave(each)
        requests = [self._request(batch, prompts, int(row), index % each) for index, row in enumerate(rows)]
        tell = self._teller(batch, rows)
        samples = background.run(_gather(self._sampler, requests, tell))
        columns = columns_of([prompts[int(row)] for row in rows], samples, self._pad_id)
        texts = self._sampler.tokenizer.batch_decode([list(sample.ids) for sample in samples], skip_special_tokens=True)
        columns["response_text"] = list(texts)
        if self.greedy_baseline:
            columns["greedy"] = (torch.arange(len(rows)) % each) == self.group_size
        path = getattr(self._sampler, "path", None)  # whose tokenizer a viewer may open
        named = {} if path is None else {"model": str(path)}
        repeated = batch.repeat(each, interleave=True).with_meta(group_size=each, **named)
        return Outcome(self.written(repeated, columns), self._metrics(columns), rows)

    def _teller(self, batch: DataProto, rows: torch.Tensor) -> Callable[[int, Sample], None]:
        arrived = self._arrived
        if arrived is None:
            return lambda row, sample: None
        objects = {name: list(batch.non_tensor_batch[name]) for name in batch.non_tensor_batch}

        def tell(row: int, sample: Sample) -> None:
            text = self._sampler.tokenizer.decode(list(sample.ids), skip_special_tokens=True)
            columns = {name: values[int(rows[row])] for name, values in objects.items()}
            arrived(row, {**columns, "response_text": text, "finish_reason": sample.finish_reason}, sample)

        return tell

    def _encode(self, batch: DataProto) -> list[tuple[int, ...]]:
        limit = batch.meta_info.get("max_prompt_length")
        switches = getattr(self._sampler, "template_switches", {})
        prompts = [tuple(encode(self._sampler.tokenizer, chat, **switches)) for chat in batch["raw_prompt"]]
        for row, ids in enumerate(prompts):
            if not ids or (limit is not None and len(ids) > limit):
                raise DataError(
                    message(
                        f"prompt of row {row} (uid {batch['uid'][row]})",
                        expected=f"1 to {limit or 'any number of'} tokens",
                        found=len(ids),
                        do="raise max_prompt_length, or take rows.fitting(tokenizer, overlong='drop')",
                    )
                )
        return prompts

    def _request(self, batch: DataProto, prompts: list[tuple[int, ...]], row: int, sample: int) -> Request:
        meta = batch.meta_info
        seed = derive(meta.get("seed", 0), self.purpose, meta.get("step", 0), batch["uid"][row], sample, 0, 0)
        greedy = self.greedy_baseline and sample == self.group_size
        return Request(prompts[row], self.sampling.replace(temperature=0.0) if greedy else self.sampling, seed)

    @property
    def _pad_id(self) -> int:
        tokenizer = self._sampler.tokenizer
        return tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id

    def _metrics(self, columns: dict[str, Any]) -> dict[str, Any]:
        lengths = columns["response_mask"].sum(-1)
        cut = [reason == "length" for reason in columns["finish_reason"]]
        return {
            **spread("response_length", lengths),
            "response_length/clip_ratio": Mean.of(sum(cut) / len(cut), len(cut)),
            "response/aborted_ratio": Mean.of((lengths == 0).double().mean().item(), len(cut)),
            **spread("prompt_length", columns["prompt_mask"].sum(-1)),
        }


async def _gather(sampler: Sampler, requests: Sequence[Request], tell: Callable[[int, Sample], None]) -> list[Sample]:
    async def one(row: int, request: Request) -> Sample:
        sample = await sampler.sample(request)
        tell(row, sample)
        return sample

    return list(await asyncio.gather(*(one(row, request) for row, request in enumerate(requests))))


def columns_of(
    prompts: Sequence[Sequence[int]],
    samples: Sequence[Sample],
    pad_id: int,
    masks: Sequence[Sequence[int]] | None = None,
) -> dict[str, Any]:
    """The rollout's columns from ragged ids: prompts left-padded to S, responses right-padded to T.

    `masks` say which tokens of each response are the model's own; without them all are. T is at least 1, so that a batch
    of empty responses still has its columns.
    """
    width_s = max(len(ids) for ids in prompts)
    width_t = max(1, *(len(sample.ids) for sample in samples))
    rows = len(samples)
    ids_s = torch.full((rows, width_s), pad_id, dtype=torch.long)
    mask_s = torch.zeros(rows, width_s, dtype=torch.long)
    ids_t = torch.full((rows, width_t), pad_id, dtype=torch.long)
    mask_t = torch.zeros(rows, width_t, dtype=torch.long)
    log_probs = torch.zeros(rows, width_t)
    for row, (prompt, sample) in enumerate(zip(prompts, samples, strict=True)):
        ids_s[row, width_s - len(prompt) :] = torch.tensor(prompt)
        mask_s[row, width_s - len(prompt) :] = 1
        length = len(sample.ids)
        ids_t[row, :length] = torch.tensor(sample.ids, dtype=torch.long)
        mask_t[row, :length] = 1
        log_probs[row, :length] = torch.tensor(sample.log_probs)
    attention = torch.cat([mask_s, mask_t], dim=1)
    if masks is not None:
        mask_t = torch.zeros_like(mask_t)
        for row, mask in enumerate(masks):
            mask_t[row, : len(mask)] = torch.tensor(mask, dtype=torch.long)
    return {
        "prompts": ids_s,
        "prompt_mask": mask_s,
        "responses": ids_t,
        "response_mask": mask_t,
        "input_ids": torch.cat([ids_s, ids_t], dim=1),
        "attention_mask": attention,
        "position_ids": (attention.cumsum(-1) - 1).clamp(min=0),
        "rollout_log_probs": log_probs,
        "finish_reason": [sample.finish_reason for sample in samples],
        "policy_version": torch.tensor([sample.version for sample in samples]),
    }
