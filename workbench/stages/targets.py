"""The stage that writes responses that the data has: rows with a target text become token columns, for supervised training."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from workbench.base.config import require
from workbench.base.errors import DataError, describe
from workbench.dataproto.core import DataProto
from workbench.datasets.rendering import render
from workbench.engines.protocol import Sample, SamplingSettings, switches_of
from workbench.stages.rollout import Rollout, columns_of
from workbench.stages.stage import Outcome

TRUTH = "reward_model.ground_truth"
"""Where `wb.rows` puts a row's answer: TRL's `completion`, the last answer of `messages`."""
_SAMPLED = ("rollout_log_probs", "finish_reason", "policy_version")
"""Columns of a rollout that only sampled responses have."""


class Targets(Rollout):
    """Write each row's own target text as its response: the columns of a rollout, and nothing is sampled.

    Prompts are encoded as for sampling; a response is the target's tokens and EOS, as the model is to write them, and
    `response_mask` is 1 on all of them.

    Args:
        engine: whose tokenizer and template encode: a learner, or anything with a `tokenizer`.
        target: the column of the target texts; `a.b` is the key b of the dicts in column a. By default the row's answer.
        max_tokens: longest response (EOS counts).
        every_turn: the answers within a prompt are targets, too: the prompt ends before the first of them, and the tokens of
            other turns in the response have `response_mask` 0.

    Raises `DataError` for a row without a target, for one that is too long, and with `every_turn` where the chat template
    does not write a chat as its beginning and what follows it.
    """

    name = "targets"
    reads: tuple[str, ...] = ("raw_prompt", "uid")
    writes: tuple[str, ...] = (*(name for name in Rollout.writes if name not in _SAMPLED),)

    def __init__(self, engine: Any, *, target: str = TRUTH, max_tokens: int = 1024, every_turn: bool = False) -> None:
        super().__init__(engine, group_size=1, sampling=SamplingSettings(max_tokens=max_tokens))
        require(bool(target), "target", expected="the name of a column", found=target)
        self.target = target
        self.every_turn = every_turn
        self.reads = (*type(self).reads, target.partition(".")[0])
        self._learners = ()  # no weights are used

    def settings(self) -> dict[str, Any]:
        """The settings of the stage by name."""
        return {"target": self.target, "max_tokens": self.sampling.max_tokens, "every_turn": self.every_turn}

    def check_rows(self, rows: Iterable[Mapping[str, Any]]) -> str:
        """Raise `DataError` for the first row of a data set without a target, or with one that is too long; else what was
        found, in words. Of targets only those that may be too long by their characters are encoded."""
        limit, number = self.sampling.max_tokens, 0
        for number, row in enumerate(rows, 1):
            text = self._text(row, f"row {number - 1}")
            if len(text.encode(errors="replace")) + 1 > limit:
                self._target_ids([text], [f"row {number - 1}"])
        return f"{self.target} of {number:,} rows, each at most {limit} tokens with EOS"

    def __call__(self, batch: DataProto) -> Outcome:
        """P rows in, the same P rows out with the columns of their responses."""
        self._refuse_media(batch)
        column = self.target.partition(".")[0]
        places = [f"row {row} (uid {uid})" for row, uid in enumerate(batch["uid"])]
        texts = [self._text({column: cell}, place) for cell, place in zip(batch[column], places, strict=True)]
        chats = list(batch["raw_prompt"])
        starts = [_first_answer(chat) if self.every_turn else None for chat in chats]
        begun = [chat if start is None else chat[:start] for chat, start in zip(chats, starts, strict=True)]
        prompts, _ = self._encode(batch.with_columns({"raw_prompt": begun}), None)
        responses = [(ids, [1] * len(ids)) for ids in self._target_ids(texts, places)]
        for row, start in enumerate(starts):
            if start is not None:
                responses[row] = self._turns(chats[row], start, texts[row], places[row])
        samples = [Sample(tuple(ids), (0.0,) * len(ids), "stop", 0) for ids, _ in responses]
        columns = columns_of(prompts, samples, self._pad_id, [mask for _, mask in responses])
        written = {name: one for name, one in columns.items() if name not in _SAMPLED}
        tokenizer = self.sampler.tokenizer
        written["response_text"] = tokenizer.batch_decode([list(one.ids) for one in samples], skip_special_tokens=True)
        return replace(self._finished(batch, written, torch.arange(len(batch))), rows=None)

    def _text(self, row: Mapping[str, Any], place: str) -> str:
        """A row's target. Raises `DataError` where it has none, or it is no text."""
        column, *keys = self.target.split(".")
        found = row.get(column)
        for key in keys:
            found = found.get(key) if isinstance(found, Mapping) else None
        if isinstance(found, str) and found.strip():
            return found
        what, do = f"the target ({self.target}) of {place}", "name the column of the targets: target='…'"
        raise DataError(what, expected="a text that is not empty", found=describe(found), do=do)

    def _target_ids(self, texts: Sequence[str], places: Sequence[str]) -> list[list[int]]:
        """Token ids of each text and EOS. Raises `DataError` for one that is too long."""
        tokenizer = self.sampler.tokenizer
        ended = [text.removesuffix(tokenizer.eos_token) + tokenizer.eos_token for text in texts]
        made = [list(ids) for ids in tokenizer(ended, add_special_tokens=False)["input_ids"]]
        for ids, place in zip(made, places, strict=True):
            self._refuse_long(ids, place)
        return made

    def _refuse_long(self, ids: Sequence[int], place: str) -> None:
        if len(ids) > self.sampling.max_tokens:
            do, expected = "raise max_tokens, or leave such rows out", f"at most {self.sampling.max_tokens} tokens"
            raise DataError(f"the target of {place} is too long", expected=expected, found=len(ids), do=do)

    def _turns(
        self, chat: Sequence[Mapping[str, Any]], start: int, target: str, place: str
    ) -> tuple[list[int], list[int]]:
        """(ids, mask) of a chat from its answer number `start` to the target: each turn encoded apart, as when sampled."""
        tokenizer = self.sampler.tokenizer
        whole = [*chat, {"role": "assistant", "content": target}]
        answers = [at for at in range(start, len(whole)) if whole[at]["role"] == "assistant"]
        switches = {"add_generation_prompt": True, **switches_of(self.sampler)}
        begun = render(tokenizer, [whole[:at] for at in answers], **switches)
        ids, mask = [], []
        for number, at in enumerate(answers):
            own = str(whole[at]["content"]).removesuffix(tokenizer.eos_token) + tokenizer.eos_token
            pieces = [(own, 1)]
            if number + 1 < len(begun):
                before, after = begun[number] + own, begun[number + 1]
                if not after.startswith(before):
                    what, do = (
                        f"every_turn for {place}",
                        "leave every_turn out: the last answer alone is then the target",
                    )
                    expected = "a chat template that writes a chat as its beginning and what follows it"
                    raise DataError(what, expected=expected, found=f"turn {at} is written otherwise later", do=do)
                pieces.append((after[len(before) :], 0))
            for text, mine in pieces:
                part = tokenizer(text, add_special_tokens=False)["input_ids"]
                ids += part
                mask += [mine] * len(part)
        self._refuse_long(ids, place)
        return ids, mask


def _first_answer(chat: Any) -> int | None:
    """The place of a chat's first assistant message; None where it has none, or is a text."""
    turns = [] if isinstance(chat, str) else chat
    return next((at for at, turn in enumerate(turns) if turn["role"] == "assistant"), None)
