"""The stage that samples: P prompts become B = P·G rows, each with a response sampled from its own seed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from workbench.agents.parsers import REASONING
from workbench.base import runtime
from workbench.base.config import require
from workbench.base.errors import DataError, NonFinite
from workbench.base.metrics import Count, Mean, Metric
from workbench.base.seeds import derive
from workbench.dataproto.columns import EXPERTS, PIXELS
from workbench.dataproto.core import SESSION, DataProto, is_last
from workbench.datasets.pictures import IMAGES, refuse_pictures
from workbench.datasets.records import MEDIA, refuse_media
from workbench.datasets.rendering import encode_rows, prepare
from workbench.engines.protocol import (
    Late,
    Located,
    Request,
    Sample,
    Sampler,
    SamplingSettings,
    processor_of,
    switches_of,
)
from workbench.stages.measures import length_metrics
from workbench.stages.stage import BaseStage, Outcome

Arrived = Callable[[int, Mapping[str, Any], Sample], None]


class Rollout(BaseStage):
    """Sample `group_size` responses to every prompt.

    Prompts are encoded here, with the chat template of the sampler's own tokenizer. The rows of a prompt are neighbours:
    a a b b. The seed of a row is derived from (run seed, `purpose`, step, uid, sample), so that any row can be sampled again
    by itself.

    Args:
        sampler: an engine, or any other `Sampler`.
        group_size: responses per prompt (G).
        sampling: temperature, `max_tokens` and the like.
        purpose: part of the seed: `validation` samples from other seeds than `rollout`.
        greedy_baseline: give each prompt one more row, sampled at temperature 0 and marked in the column `greedy`: ReMax's
            baseline, which shares rollout and reward with the others until the stage `baseline` removes it.

    Raises `DataError` where a prompt is longer than the batch's `max_prompt_length`.
    """

    name = "rollout"
    reads: tuple[str, ...] = ("raw_prompt", "uid")
    writes: tuple[str, ...] = (
        "prompts", "prompt_mask", "responses", "response_mask", "input_ids", "attention_mask", "position_ids",
        "rollout_log_probs", "finish_reason", "policy_version", "response_text",
    )  # fmt: skip
    records_routing = True
    """Whether rows have `routed_experts` where the sampler records them."""

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
        self.sampler = sampler
        self._learners = (sampler,)
        self.group_size = group_size
        self.sampling = sampling or SamplingSettings()
        self.purpose = purpose
        self._arrived: Arrived | None = None
        if not isinstance(sampler, Late):  # renders chats before the first step; no engine is opened for that
            prepare(getattr(sampler, "tokenizer", None))

    @contextmanager
    def telling(self, arrived: Arrived) -> Iterator[None]:
        """Context manager: inside it `arrived(row, object_columns, sample)` is called for each row as soon as its
        response is finished."""
        self._arrived = arrived
        try:
            yield
        finally:
            self._arrived = None

    def settings(self) -> dict[str, Any]:
        """Return the settings of the stage and of its sampling by name, in one flat dict."""
        plain = {"group_size": self.group_size, "purpose": self.purpose, **self.sampling.to_dict()}
        return {**plain, "greedy_baseline": True} if self.greedy_baseline else plain

    @property
    def blank(self) -> dict[str, Any]:
        """Columns that a reward can read beside a row's data and response, with their values for an empty response."""
        return {"finish_reason": "stop"}

    def __call__(self, batch: DataProto) -> Outcome:
        """Sample responses to P prompts; returns P·G rows (P·(G + 1) with a greedy baseline)."""
        processor = processor_of(self.sampler)
        self._refuse_media(batch, pictures=processor is not None)
        prompts, pixels = self._encode(batch, processor)
        each = self.group_size + self.greedy_baseline
        rows = torch.arange(len(batch)).repeat_interleave(each)
        requests = [
            self._request(batch, prompts[int(row)], int(row), index % each, pixels.get(int(row)))
            for index, row in enumerate(rows)
        ]
        tell = self._teller(batch, rows)

        async def ask(row: int) -> Sample:
            sample = await self.sampler.sample(requests[row])
            tell(row, sample, prompts[int(rows[row])])
            return sample

        samples = runtime.run_all(ask, range(len(requests)))
        columns = columns_of([prompts[int(row)] for row in rows], samples, self._pad_id)
        pairs = [(prompts[int(row)], sample.ids) for row, sample in zip(rows, samples, strict=True)]
        columns |= text_columns(self.sampler.tokenizer, pairs, skip=self.sampling.skip_special_tokens)
        if pixels:
            columns[PIXELS] = [pixels.get(int(row), {}) for row in rows]
        return self._finished(batch, columns, rows)

    def _finished(
        self,
        batch: DataProto,
        columns: dict[str, Any],
        rows: Tensor,
        metrics: Mapping[str, Metric] = MappingProxyType({}),
    ) -> Outcome:
        """Build the stage's outcome: the batch's `rows` (each prompt repeated) with the columns of their responses."""
        each = self.group_size + self.greedy_baseline
        if self.greedy_baseline:
            episode = torch.tensor(columns[SESSION]) if SESSION in columns else torch.arange(len(rows))
            columns["greedy"] = episode % each == self.group_size
        written = self.written(batch.select_idxs(rows).with_meta(group_size=each, **self._facts()), columns)
        return Outcome(written, {**length_metrics(written), **metrics}, rows)

    def _facts(self) -> dict[str, Any]:
        """Return what to note in the batch's `meta_info`: the longest response allowed, and the model's folder where
        the sampler has one, so that a viewer can open its tokenizer."""
        model = {"model": str(self.sampler.path)} if isinstance(self.sampler, Located) else {}
        return {"max_response_length": self.sampling.max_tokens, **model}

    def _teller(self, batch: DataProto, rows: Tensor) -> Callable[..., None]:
        """Return a function of (row, sample, its prompt's ids, further columns) that passes a finished row's columns on
        to whoever waits in `telling`; it does nothing where nobody does."""
        arrived = self._arrived
        if arrived is None:
            return lambda *finished: None
        objects = {name: list(batch.non_tensor_batch[name]) for name in batch.non_tensor_batch}

        skip = self.sampling.skip_special_tokens

        def tell(
            row: int, sample: Sample, prompt: Sequence[int], more: Mapping[str, Any] = MappingProxyType({})
        ) -> None:
            columns = {name: values[int(rows[row])] for name, values in objects.items()}
            texts = text_columns(self.sampler.tokenizer, [(prompt, sample.ids)], skip=skip, turns=[more.get("turns")])
            columns |= {name: one for name, (one,) in texts.items()}
            arrived(row, {**columns, "finish_reason": sample.finish_reason, **more}, sample)

        return tell

    def _refuse_media(self, batch: DataProto, *, pictures: bool = False) -> None:
        """Raise `DataError` where the batch has pictures that this model cannot read (unless `pictures`), or other
        media. Data sets are checked when they are opened; a batch may be made by hand."""
        if not pictures and IMAGES in batch:
            reader = f"a rollout with this model of {type(self.sampler).__name__}"
            refuse_pictures([{IMAGES: seen} for seen in batch[IMAGES]], reader, of="the batch")
        columns = {name: cells for name, cells in batch.non_tensor_batch.items() if name in MEDIA}
        for row in range(len(batch) if columns else 0):
            refuse_media({name: values[row] for name, values in columns.items()}, f"row {row} of the batch")

    def _encode(
        self, batch: DataProto, processor: Any
    ) -> tuple[list[tuple[int, ...]], dict[int, Mapping[str, Tensor]]]:
        """Encode the prompts; returns (each prompt's token ids, by row number the model's inputs for pictures)."""
        limit = batch.meta_info.get("max_prompt_length")
        seen = dict(enumerate(batch[IMAGES])) if IMAGES in batch else {}
        reader = processor or self.sampler.tokenizer
        made, pixels = encode_rows(reader, batch["raw_prompt"], seen, **switches_of(self.sampler))
        prompts = [tuple(ids) for ids in made]
        for row, ids in enumerate(prompts):
            if not ids or (limit is not None and len(ids) > limit):
                what = f"length of the prompt of row {row} (uid {batch['uid'][row]})"
                expected = f"1 to {limit or 'any number of'} tokens"
                do = "raise max_prompt_length, or drop such rows: rows.fitting(tokenizer, overlong='drop')"
                raise DataError(what, expected=expected, found=f"{len(ids)} tokens", do=do)
        return prompts, pixels

    def _request(
        self, batch: DataProto, prompt: tuple[int, ...], row: int, sample: int, pixels: Mapping[str, Tensor] | None
    ) -> Request:
        meta = batch.meta_info
        seed = derive(meta.get("seed", 0), self.purpose, meta.get("step", 0), batch["uid"][row], sample, 0, 0)
        return Request(prompt, self._sampling(sample), seed, pixels)

    def _sampling(self, sample: int) -> SamplingSettings:
        """Return the sampling settings for a prompt's sample of this number; the last may be the greedy baseline, at
        temperature 0."""
        greedy = self.greedy_baseline and sample == self.group_size
        return self.sampling.replace(temperature=0.0) if greedy else self.sampling

    @property
    def _pad_id(self) -> int:
        tokenizer = self.sampler.tokenizer
        return tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id


def columns_of(
    prompts: Sequence[Sequence[int]],
    samples: Sequence[Sample],
    pad_id: int,
    masks: Sequence[Sequence[int]] | None = None,
) -> dict[str, Any]:
    """Build the rollout's columns from token ids: prompts left-padded to [B, S], responses right-padded to [B, T].

    `masks` mark which tokens of each response the model wrote; without them all are. T is at least 1, so that a batch
    of empty responses has its columns, too.
    """
    responses = [sample.ids for sample in samples]
    ids_s = _padded(prompts, pad_id, "left")
    ids_t = _padded(responses, pad_id)
    mask_s = _padded([[1] * len(ids) for ids in prompts], 0, "left")
    whole = _padded([[1] * len(ids) for ids in responses], 0)
    attention = torch.cat([mask_s, whole], dim=1)
    log_probs = _padded([sample.log_probs for sample in samples], 0.0, dtype=torch.float32)
    if not log_probs.isfinite().all():  # of NaN weights every sampler makes some text
        rows = (~log_probs.isfinite()).any(-1).nonzero()[:, 0].tolist()
        found = f"in {len(rows)} of {len(samples)} rows, the first {rows[0]}"
        do = "check the model's weights and its dtype"
        raise NonFinite("the sampler's log-probs are NaN or infinite", found=found, do=do)
    several = [sample.versions or (sample.version,) * len(sample.ids) for sample in samples]
    each = {"token_versions": _padded(several, 0)} if any(sample.versions for sample in samples) else {}
    return {
        "prompts": ids_s,
        "prompt_mask": mask_s,
        "responses": ids_t,
        "response_mask": whole if masks is None else _padded(masks, 0),
        "input_ids": torch.cat([ids_s, ids_t], dim=1),
        "attention_mask": attention,
        "position_ids": (attention.cumsum(-1) - 1).clamp(min=0),
        "rollout_log_probs": log_probs,
        "finish_reason": [sample.finish_reason for sample in samples],
        "policy_version": torch.tensor([sample.version for sample in samples]),
        **_experts(samples, attention),
        **each,
    }


_END = 32
"""Tokens at a prompt's end in which a tag may open reasoning."""


def text_columns(
    tokenizer: Any,
    pairs: Iterable[tuple[Sequence[int], Sequence[int]]],
    *,
    skip: bool = True,
    turns: Iterable[Sequence[Mapping[str, Any]] | None] = (),
) -> dict[str, list[Any]]:
    """Build columns of texts from the ids of prompts and responses: `response_text`, and `in_reasoning` where a prompt
    ends in a tag that opens reasoning.

    Args:
        skip: leave special tokens out of `response_text`.
        turns: the transcript of each row, of whose last answer `in_reasoning` tells.
    """
    ids = [(list(prompt), list(response)) for prompt, response in pairs]
    texts = tokenizer.batch_decode([response for _, response in ids], skip_special_tokens=skip)
    for row, each in enumerate(turns):
        start = max((turn["first"] for turn in each or () if turn["role"] == "assistant"), default=0)
        prompt, response = ids[row]
        ids[row] = (prompt + response[:start], response[start:])
    ends = [text.rstrip() for text in tokenizer.batch_decode([prompt[-_END:] for prompt, _ in ids])]
    # a tag that a user mentions opens nothing: only the end of a prompt counts
    closing = [next((tag for opening, tag in REASONING.items() if end.endswith(opening)), "") for end in ends]
    if not any(closing):
        return {"response_text": list(texts)}
    whole = tokenizer.batch_decode([response for _, response in ids])
    inside = [bool(tag) and tag not in text for tag, text in zip(closing, whole, strict=True)]
    return {"response_text": list(texts), "in_reasoning": inside}


def _experts(samples: Sequence[Sample], attention: Tensor) -> dict[str, Tensor]:
    """Build the column `routed_experts` [B, S+T, L, k], where the samples have experts; −1 at padding."""
    example = next((sample.experts for sample in samples if sample.experts is not None), None)
    if example is None:
        return {}
    whole = example.new_full((*attention.shape, *example.shape[1:]), -1)
    for row, sample in enumerate(samples):
        if sample.experts is not None:
            whole[row, attention[row].bool()] = sample.experts
    return {EXPERTS: whole}


def _padded(
    rows: Sequence[Sequence[Any]], value: float, side: str = "right", dtype: torch.dtype = torch.long
) -> Tensor:
    tensors = [torch.tensor(row, dtype=dtype) for row in rows]
    found = pad_sequence(tensors, batch_first=True, padding_value=value, padding_side=side)
    return found if found.shape[1] else found.new_full((len(rows), 1), value)


class Baseline(BaseStage):
    """Replace each prompt's greedy row (of `Rollout(…, greedy_baseline=True)`) by the column `reward_baselines` [B].

    A prompt whose greedy response was not scored has no baseline: its rows become unscored, too (`scored` False), and are
    counted. Li et al. 2024, https://arxiv.org/abs/2310.10505.
    """

    name = "baseline"
    reads = ("uid", "greedy", "reward", "scored")
    writes = ("reward_baselines", "scored")

    def __call__(self, batch: DataProto) -> Outcome:
        """Return the rows of P·G responses without the P greedy ones, which become their baselines."""
        greedy, scored = batch["greedy"], batch["scored"]
        found = {batch["uid"][row]: row for row in greedy.nonzero()[:, 0].tolist()}
        rows = (~greedy).nonzero()[:, 0]
        of = torch.tensor([found[batch["uid"][row]] for row in rows.tolist()], dtype=torch.long)
        kept = batch.select_idxs(rows).with_meta(group_size=max(batch.meta_info.get("group_size", 2) - 1, 1))
        columns = {"reward_baselines": batch["reward"][of], "scored": scored[rows] & scored[of]}
        once = greedy & is_last(batch)
        mean = batch["reward"][once & scored].double().mean().item()
        metrics: dict[str, Metric] = {
            "reward/greedy_baseline": Mean.of(mean, int(once.sum())),
            "reward/without_baseline": Count(int((~scored[once]).sum())),
        }
        return Outcome(self.written(kept, columns), metrics, rows)
