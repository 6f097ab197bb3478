"""Stages that write responses that the data has, as token columns: target texts, and the two answers of preference pairs.

Losses of what the data says, without rewards: cross-entropy on target tokens, Bradley–Terry on preference pairs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from workbench.base.config import Settings, require
from workbench.base.errors import DataError, PipelineError, check_name, describe
from workbench.base.metrics import Mean
from workbench.dataproto.columns import MARGIN
from workbench.dataproto.core import DataProto
from workbench.datasets.pictures import text_of
from workbench.datasets.rendering import render
from workbench.engines.protocol import LossCounts, LossOutput, Sample, SamplingSettings, switches_of
from workbench.functional.losses import AGGREGATIONS, aggregate, bradley_terry
from workbench.functional.masking import masked_sum
from workbench.stages.rollout import Rollout, columns_of
from workbench.stages.stage import Outcome
from workbench.stages.update import loss_mask


def _mean(total: Tensor, count: Any) -> Mean:
    number: Any = total.detach().double()  # the learner reads those of all micro-batches at once
    return Mean(number, count)


@dataclass(frozen=True, kw_only=True)
class CrossEntropy(Settings):
    """The supervised loss −log π of each target token, aggregated over the whole mini-batch (global counts)."""

    loss_agg_mode: str = "token-mean"
    """How token losses become one number: see `functional.aggregate`."""

    supervised: ClassVar[bool] = True
    reads: ClassVar[tuple[str, ...]] = ()
    """No column beside the inputs of a forward pass."""
    writes: ClassVar[tuple[str, ...]] = ("new_log_probs",)
    """Columns [B, T] that an update with this loss writes."""
    want: ClassVar[tuple[str, ...]] = ("log_probs",)
    """Model outputs that the loss needs."""

    def __post_init__(self) -> None:
        check_name("loss_agg_mode", self.loss_agg_mode, AGGREGATIONS)

    def __call__(self, outputs: Mapping[str, Tensor], rows: DataProto, loss_counts: LossCounts) -> LossOutput:
        """Compute the loss of one micro-batch, the metric `actor/nll` (mean −log π of the target tokens, in nats), and
        the column `new_log_probs`."""
        mask, log_probs = loss_mask(rows), outputs["log_probs"]
        tokens, sequences, width = loss_counts.tokens, loss_counts.sequences, loss_counts.width
        loss = aggregate(-log_probs, mask, self.loss_agg_mode, tokens=tokens, sequences=sequences, scale=width)
        kept = (log_probs * rows["response_mask"]).detach()
        return LossOutput(
            loss, {"actor/nll": _mean(masked_sum(-log_probs, mask), mask.sum().double())}, {"new_log_probs": kept}
        )


@dataclass(frozen=True, kw_only=True)
class BradleyTerry(Settings):
    """Preference loss −log σ(r⁺ − r⁻ − margin) + c·(r⁺ + r⁻)², averaged over pairs; r⁺ is the reward of a pair's chosen
    answer, r⁻ of its rejected one.

    Rows are pairs: row 2i is the chosen answer, row 2i + 1 the rejected one, as `stages.Pairs` writes them. A reward is
    the model's output at the row's extra last token. Bradley and Terry 1952; the margin: Touvron et al. 2023,
    https://arxiv.org/abs/2307.09288; the centre: Eisenstein et al. 2023, https://arxiv.org/abs/2312.09244.
    """

    center_rewards_coefficient: float = 0.0
    """c, which keeps rewards around 0: from pairs alone a reward is known up to a constant. TRL suggests 0.01."""

    supervised: ClassVar[bool] = True
    reads: ClassVar[tuple[str, ...]] = (MARGIN,)
    """Columns that the loss needs, beside the inputs of a forward pass."""
    writes: ClassVar[tuple[str, ...]] = ("values",)
    """Columns [B, T] that an update with this loss writes: each row's reward."""
    want: ClassVar[tuple[str, ...]] = ("values",)
    """Model outputs that the loss needs."""

    def __post_init__(self) -> None:
        c = self.center_rewards_coefficient
        require(c >= 0, "center_rewards_coefficient", expected="≥ 0", found=c)

    def __call__(self, outputs: Mapping[str, Tensor], rows: DataProto, loss_counts: LossCounts) -> LossOutput:
        """Compute the loss of whole pairs, their metrics (means over pairs; equal rewards count as half right), and
        each row's reward."""
        if len(rows) % 2:
            do = "take rows as stages.Pairs writes them, and an engine that does not split pairs: engines.reward_model(…)"
            raise PipelineError("number of rows of preference pairs", expected="an even number", found=len(rows), do=do)
        scores = outputs["values"] * loss_mask(rows)
        chosen, rejected = scores.sum(-1).view(-1, 2).unbind(-1)
        losses = bradley_terry(chosen, rejected, rows[MARGIN][::2], self.center_rewards_coefficient)
        right = (chosen > rejected).double() + 0.5 * (chosen == rejected).double()
        each = {
            "bt_loss": losses,
            "accuracy": right,
            "margin": chosen - rejected,
            "chosen": chosen,
            "rejected": rejected,
        }
        metrics = {f"reward_model/{name}": _mean(one.sum(), float(len(one))) for name, one in each.items()}
        return LossOutput(losses.sum() / (loss_counts.sequences / 2), metrics, {"values": scores.detach()})


TRUTH = "reward_model.ground_truth"
"""Where `wb.rows` puts a row's answer: TRL's `completion`, the last answer of `messages`."""
_SAMPLED = ("rollout_log_probs", "finish_reason", "policy_version")
"""Columns of a rollout that only sampled responses have."""


class DataResponses(Rollout):
    """Base class of stages whose responses are texts of the data set; nothing is sampled."""

    def __init__(self, engine: Any, columns: Sequence[str], max_tokens: int, answers: int = 1) -> None:
        super().__init__(engine, group_size=answers, sampling=SamplingSettings(max_tokens=max_tokens))
        for one in columns:
            require(bool(one), "the name of a column", expected="a text that is not empty", found=one)
        self.reads = tuple(dict.fromkeys((*type(self).reads, *(one.partition(".")[0] for one in columns))))
        self._learners = ()  # no weights are used
        self._columns = tuple(columns)

    def check_rows(self, rows: Iterable[Mapping[str, Any]]) -> str:
        """Check every row of a data set before training, and return a sentence about what was found. Raises `DataError`
        for the first row that lacks a text or has one that is too long.

        Only texts with so many bytes that they may be too long are tokenized.
        """
        limit, number = self.sampling.max_tokens, 0
        for number, row in enumerate(rows, 1):
            place = f"row {number - 1}"
            for column in self._columns:
                text = self._text(row, column, place)
                if len(text.encode(errors="replace")) + 1 > limit:
                    self._ids([text], [f"{column} of {place}"])
        return f"{' and '.join(self._columns)} of {number:,} rows, each at most {limit} tokens with EOS"

    def _texts(self, batch: DataProto, column: str, places: Sequence[str]) -> list[str]:
        name = column.partition(".")[0]
        return [self._text({name: cell}, column, place) for cell, place in zip(batch[name], places, strict=True)]

    def _text(self, row: Mapping[str, Any], column: str, place: str) -> str:
        """Return the text in a row's column, or of a list of messages the last one's content. Raises `DataError` where
        it is missing, empty or not a text."""
        value = cell(row, column)
        text = value[-1].get("content") if isinstance(value, list) and value and isinstance(value[-1], dict) else value
        if isinstance(text, str) and text.strip():  # of messages the last one's content
            return text
        do = "name its column" if value is None else "leave such rows out"
        raise DataError(f"column {column!r} of {place}", expected="a non-empty text", found=describe(value), do=do)

    def _ids(self, texts: Sequence[str], places: Sequence[str]) -> list[list[int]]:
        """Tokenize each text, with EOS at its end. Raises `DataError` for a text with more than `max_tokens` tokens."""
        tokenizer = self.sampler.tokenizer
        ended = [text.removesuffix(tokenizer.eos_token) + tokenizer.eos_token for text in texts]
        token_ids = [list(ids) for ids in tokenizer(ended, add_special_tokens=False)["input_ids"]]
        for ids, place in zip(token_ids, places, strict=True):
            self._refuse_long(ids, place)
        return token_ids

    def _refuse_long(self, ids: Sequence[int], place: str) -> None:
        if len(ids) > self.sampling.max_tokens:
            do, expected = "raise max_tokens, or leave such rows out", f"at most {self.sampling.max_tokens} tokens"
            raise DataError(f"{place} is too long", expected=expected, found=f"{len(ids)} tokens", do=do)


def cell(row: Mapping[str, Any], column: str) -> Any:
    """Return a row's value in a column; `a.b` is the key b of the dict in column a. None where it is missing."""
    name, *keys = column.split(".")
    value = row.get(name)
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def places_of(batch: DataProto) -> list[str]:
    """Return how error messages name each row."""
    return [f"row {row} (uid {uid})" for row, uid in enumerate(batch["uid"])]


def placed_answers(
    prompts: Sequence[Sequence[int]], responses: Sequence[tuple[Sequence[int], Sequence[int]]], pad: int
) -> dict[str, Any]:
    """Build the columns of a rollout, without those that only sampling gives, from (token ids, mask) of each response."""
    samples = [Sample(tuple(ids), (0.0,) * len(ids), "stop", 0) for ids, _ in responses]
    columns = columns_of(prompts, samples, pad, [mask for _, mask in responses])
    return {name: one for name, one in columns.items() if name not in _SAMPLED}


def behind_prompts(prompts: Tensor, prompt_mask: Tensor, responses: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Build the inputs [B, S + T] of a forward pass over responses [B, T] behind other prompts [B, S]; both masks are 1 on
    tokens, 0 on padding."""
    there = torch.cat([prompt_mask, mask], 1)
    ids = torch.cat([prompts, responses], 1)
    return {"input_ids": ids, "attention_mask": there, "position_ids": (there.cumsum(-1) - 1).clamp(min=0)}


class Targets(DataResponses):
    """Write each row's target text as its response, as if the model had written it: the columns of a rollout, without
    sampling.

    Prompts are encoded as for sampling. A response is the target's tokens and EOS, and `response_mask` is 1 on all of
    them.

    Args:
        engine: whose tokenizer and template encode: a learner, or anything with a `tokenizer`.
        target: the column of the target texts; `a.b` is the key b of the dicts in column a. By default the row's answer.
        max_tokens: longest response (EOS counts).
        every_turn: the answers within a prompt are targets, too: the prompt ends before the first of them, and the tokens of
            other turns in the response have `response_mask` 0.

    Raises `DataError` for a row without a target, for one that is too long, and with `every_turn` where the chat
    template changes the text of earlier turns as the chat grows.
    """

    name = "targets"
    writes: tuple[str, ...] = tuple(name for name in Rollout.writes if name not in _SAMPLED)

    def __init__(self, engine: Any, *, target: str = TRUTH, max_tokens: int = 1024, every_turn: bool = False) -> None:
        super().__init__(engine, [target], max_tokens)
        self.target = target
        self.every_turn = every_turn

    def settings(self) -> dict[str, Any]:
        """The settings of the stage by name."""
        return {"target": self.target, "max_tokens": self.sampling.max_tokens, "every_turn": self.every_turn}

    def __call__(self, batch: DataProto) -> Outcome:
        """Return the same P rows with the columns of their responses."""
        self._refuse_media(batch)
        places = places_of(batch)
        texts = self._texts(batch, self.target, places)
        chats = list(batch["raw_prompt"])
        starts = [_first_answer(chat) if self.every_turn else None for chat in chats]
        begun = [chat if start is None else chat[:start] for chat, start in zip(chats, starts, strict=True)]
        prompts, _ = self._encode(batch.with_columns({"raw_prompt": begun}), None)
        ended = self._ids(texts, [f"{self.target} of {place}" for place in places])
        responses = [(ids, [1] * len(ids)) for ids in ended]
        for row, start in enumerate(starts):
            if start is not None:
                responses[row] = self._turns(chats[row], start, texts[row], places[row])
        columns = placed_answers(prompts, responses, self._pad_id)
        decode = self.sampler.tokenizer.batch_decode
        columns["response_text"] = decode([list(ids) for ids, _ in responses], skip_special_tokens=True)
        return self._finished(batch, columns, torch.arange(len(batch)))

    def _turns(
        self, chat: Sequence[Mapping[str, Any]], start: int, target: str, place: str
    ) -> tuple[list[int], list[int]]:
        """Encode a chat from message number `start` to the target; returns (ids, mask). Each turn is encoded
        separately, as it is when sampled."""
        tokenizer = self.sampler.tokenizer
        whole = [*chat, {"role": "assistant", "content": target}]
        answers = [at for at in range(start, len(whole)) if whole[at]["role"] == "assistant"]
        switches = {"add_generation_prompt": True, **switches_of(self.sampler)}
        begun = render(tokenizer, [whole[:at] for at in answers], **switches)
        ids, mask = [], []
        for number, at in enumerate(answers):
            answer = str(whole[at]["content"]).removesuffix(tokenizer.eos_token) + tokenizer.eos_token
            pieces = [(answer, 1)]
            if number + 1 < len(begun):
                before, after = begun[number] + answer, begun[number + 1]
                if not after.startswith(before):
                    what = f"every_turn for {place}"
                    do = "leave every_turn out: the last answer alone is then the target"
                    expected = "a chat template that only appends text as a chat grows"
                    raise DataError(what, expected=expected, found=f"other text for turn {at} later", do=do)
                pieces.append((after[len(before) :], 0))
            for text, mine in pieces:
                part = tokenizer(text, add_special_tokens=False)["input_ids"]
                ids += part
                mask += [mine] * len(part)
        self._refuse_long(ids, f"the response of {place}")
        return ids, mask


def _first_answer(chat: Any) -> int | None:
    """Index of a chat's first assistant message; None where it has none, or where the chat is a plain text."""
    turns = [] if isinstance(chat, str) else chat
    return next((at for at, turn in enumerate(turns) if turn["role"] == "assistant"), None)


class Pairs(DataResponses):
    """Write both answers of each preference pair as rows: P pairs in, 2P rows out, the chosen answer before the
    rejected one.

    The rows of a pair have one uid. Each row is exactly the text that `rewards.RewardModel` reads for that prompt and
    answer. `response_mask` is 1 only at an extra last token behind the text, where the model's output is the text's
    reward.

    Args:
        engine: whose tokenizer encodes: a learner of `engines.reward_model`.
        chosen: the column of the preferred answers: texts, or messages whose last one is the answer; `a.b` is the key b of the
            dicts in column a.
        rejected: the column of the others.
        margin: the column of each pair's margin, a number; None: 0.
        max_tokens: longest answer, in tokens.
        template: `chat` or `question_answer`, as in `rewards.RewardModel`.

    Raises `DataError` for a row without one of the answers or its margin, and for an answer that is too long.
    """

    name = "pairs"
    writes: tuple[str, ...] = (*Targets.writes, MARGIN)

    def __init__(
        self,
        engine: Any,
        *,
        chosen: str = "chosen",
        rejected: str = "rejected",
        margin: str | None = None,
        max_tokens: int = 1024,
        template: str = "chat",
    ) -> None:
        from workbench.rewards.judge import RewardModel

        super().__init__(engine, [chosen, rejected], max_tokens, answers=2)
        if margin is not None:
            self.reads = tuple(dict.fromkeys((*self.reads, margin.partition(".")[0])))
        self.chosen, self.rejected, self.margin, self.template = chosen, rejected, margin, template
        self._reader = RewardModel(engine, template=template, prompt_length=_WHOLE, response_length=_WHOLE)

    def settings(self) -> dict[str, Any]:
        """The settings of the stage by name."""
        names = ("chosen", "rejected", "margin", "template")
        return {**{name: getattr(self, name) for name in names}, "max_tokens": self.sampling.max_tokens}

    def check_rows(self, rows: Iterable[Mapping[str, Any]]) -> str:
        """Check both answers and the margin of every row of a data set (see `DataResponses.check_rows`). Raises `DataError` for
        the first wrong row."""
        held = list(rows)
        for number, row in enumerate(held):
            self._margin(row, f"row {number}")
        return super().check_rows(held)

    def __call__(self, batch: DataProto) -> Outcome:
        """Turn P preference pairs into 2P rows."""
        self._refuse_media(batch)
        places, tokenizer = places_of(batch), self.sampler.tokenizer
        answers = [self._texts(batch, column, places) for column in (self.chosen, self.rejected)]
        for column, texts in zip((self.chosen, self.rejected), answers, strict=True):
            self._ids(texts, [f"{column} of {place}" for place in places])
        begun, _ = self._encode(batch, None)
        both = [text for pair in zip(*answers, strict=True) for text in pair]
        rows = torch.arange(len(batch)).repeat_interleave(2)
        prompts, responses, end = [], [], self._pad_id
        for row, text in zip(rows.tolist(), both, strict=True):
            chat = batch["raw_prompt"][row]
            question = text_of(chat[-1]["content"]) if isinstance(chat, list) else chat
            whole, _ = self._reader.text_for({"prompt": chat, "prompt_text": question, "response": text})
            ids = tokenizer.encode(whole)
            at = next(
                (at for at, (x, y) in enumerate(zip(ids, begun[row], strict=False)) if x != y),
                min(len(ids), len(begun[row])),
            )
            prompts.append(ids[:at])
            responses.append(([*ids[at:], end], [*[0] * (len(ids) - at), 1]))
        columns = {**placed_answers(prompts, responses, end), "response_text": both}
        cells = ({name: batch[name][row] for name in self.reads} for row in range(len(batch)))
        margins = [self._margin(one, place) for one, place in zip(cells, places, strict=True)]
        columns[MARGIN] = torch.tensor(margins, dtype=torch.float32).repeat_interleave(2)
        return self._finished(batch, columns, rows)

    def _margin(self, row: Mapping[str, Any], place: str) -> float:
        margin = 0.0 if self.margin is None else cell(row, self.margin)
        if isinstance(margin, int | float) and not isinstance(margin, bool) and math.isfinite(margin):
            return float(margin)
        raise DataError(f"margin {self.margin!r} of {place}", expected="a finite number", found=describe(margin))


_WHOLE = 1 << 30
"""More tokens than any text has: nothing is cut, what is too long is refused."""
