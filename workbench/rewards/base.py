"""`BaseReward`, which every reward inherits: rows in, one `Score` per row out, and a policy for rows that fail.

Functions take rows by their own signature (verl's, TRL's, OpenRLHF's, AReaL's, any): `call_arguments` fills it, and
`row_score` reads what they return.
"""

from __future__ import annotations

import inspect
import math
import numbers
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from workbench.base.config import parameters_of
from workbench.base.errors import RewardError, describe, first_line, nearest, unknown
from workbench.dataproto.columns import writer_of
from workbench.dataproto.core import DataProto, episodes
from workbench.datasets.pictures import text_of
from workbench.rewards.runner import called
from workbench.rewards.score import LARGEST, Score, Status, failed, finite

Judging = Callable[[Sequence[Mapping[str, Any]]], list[Score]]
_POLICIES = re.compile(r"mask|raise|retry\((\d+)\)|value=([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)")


class BaseReward:
    """Base class of all rewards: subclasses implement `judge(rows)`; the reward stage calls `score(batch)`.

    `on_failure` is the policy for rows that could not be scored (status *infra_error*): `mask`, `raise`, `retry(n)` or
    `value=x`; see `Reward`. `tried` repeats the scoring of failed rows under `retry(n)`, and `settle` applies the other
    policies. Raises `RewardError` for any other policy.
    """

    name: str = "reward"
    reads: tuple[str, ...] = ()
    in_process: bool = False
    """Whether the reward runs in this process. The check before a run does not call such a reward."""
    streams: bool = True
    """Whether a row can be scored before the other rows of its batch have been sampled."""
    block: Mapping[str, Any] | None = None
    """The settings with which `reward_from` makes an equal reward, as plain values; None where plain values do not
    suffice."""

    def __init__(self, name: str, on_failure: str = "mask") -> None:
        policy = _POLICIES.fullmatch(on_failure)
        if policy is None:
            raise RewardError(unknown("policy for on_failure", on_failure, ("mask", "raise", "retry(n)", "value=x")))
        self.name = name
        self.on_failure = on_failure
        self.retries = int(policy[1] or 0)
        self.failed_value = float(policy[2]) if policy[2] else None

    @property
    def source(self) -> str | None:
        """The source code of the reward function, or a judge's prompt; None where there is neither."""
        return None

    @property
    def binding(self) -> Mapping[str, str]:
        """Argument of the reward function → a description of the value that fills it (`the response`); {} without a
        function.
        """
        return {}

    def settings(self) -> dict[str, Any]:
        """The reward's settings as plain values, for the run's record."""
        return {"on_failure": self.on_failure}

    def check_signature(self, columns: Sequence[str]) -> None:
        """Raise `RewardError`, before any row is scored, if the reward needs a column that is not among the names in
        `columns`."""

    def check_rows(self, rows: Iterable[Mapping[str, Any]]) -> str:
        """Check a data set's rows before any response exists: return "", or a sentence with the number of rows that no
        response can make scorable.

        Raises `DataError` if the reward can score none of them, because their ground truths are missing or unreadable.
        """
        return ""

    def check_sampler(self, tokenizer: Any, switches: Mapping[str, Any]) -> None:
        """Raise, before any row is scored, if a model with this tokenizer and these chat template switches cannot write
        the responses that the reward expects."""

    def close(self) -> None:
        """End the worker processes and connections that the reward holds."""

    def judge(self, rows: Sequence[Mapping[str, Any]]) -> list[Score]:
        """Score rows (dicts from `row_views`): one `Score` each, in order. A row that fails gets a `Score` with status
        *infra_error*."""
        raise NotImplementedError(f"{type(self).__name__} does not define judge(rows)")

    def judged(self, rows: Sequence[Mapping[str, Any]], judge: Judging | None = None) -> list[Score]:
        """Score rows with `tried`, but give *infra_error* to rows whose agent episode was aborted (see
        `broken_episode`), without scoring them."""
        whys = [broken_episode(row["columns"]) for row in rows]
        scores = iter(self.tried([row for row, why in zip(rows, whys, strict=True) if not why], judge))
        return [failed(f"the episode broke: {why}") if why else next(scores) for why in whys]

    def tried(self, rows: Sequence[Mapping[str, Any]], judge: Judging | None = None) -> list[Score]:
        """Score rows with `judge` (the method, or the function that is passed), and score failed rows again up to
        `retries` times.

        Where rows are scored together, as a group or a batch, all rows of the group or batch are scored again. Raises
        `RewardError` for a wrong number of scores.
        """
        judged, waiting = dict[int, Score](), list(range(len(rows)))
        for _ in range(1 + self.retries):
            if not waiting:
                break
            scores = (judge or self.judge)([rows[number] for number in waiting])
            if len(scores) != len(waiting):
                what, expected = f"the result of reward {self.name!r}", f"{len(waiting)} scores"
                raise RewardError(what, expected=expected, found=len(scores))
            new = zip(waiting, scores, strict=True)
            judged.update((number, score) for number, score in new if number not in judged or _broken(judged[number]))
            waiting = self._rows_to_retry(rows, [number for number in judged if _broken(judged[number])])
        return [judged[number] for number in range(len(rows))]

    def _rows_to_retry(self, rows: Sequence[Mapping[str, Any]], lost: list[int]) -> list[int]:
        """Return the numbers of the rows to score once more: the `lost` ones, and all rows of the same group or batch
        where those are scored together."""
        per = getattr(self, "per", "row" if self.streams else "group" if "uid" in self.reads else "batch")
        if not lost or per == "row":
            return lost
        uids = {rows[number].get("uid") for number in lost}
        return [number for number, row in enumerate(rows) if per == "batch" or row.get("uid") in uids]

    def settle(self, scores: Sequence[Score]) -> list[Score]:
        """Apply the policy `on_failure` to the scores of rows that failed.

        Raises `RewardError` under `raise`, and without `value=x` also if every row failed or if one waits for a setting
        of the user's (`Score.undecided`).
        """
        broken = sorted((score for score in scores if _broken(score)), key=lambda score: not score.undecided)
        value = self.failed_value
        first = bool(broken) and (self.on_failure == "raise" or (broken[0].undecided and value is None))
        if first or (broken and len(broken) == len(scores) and value is None):
            what = "a row" if first else f"all {len(scores)} rows"
            do = broken[0].error or "fix the failure that was found"
            raise RewardError(f"reward {self.name!r} failed on {what}", found=broken[0].why, do=do)
        if value is None:
            return list(scores)
        return [
            replace(score, value=value, status=Status.COUNTED, why=f"counted as {value:g} by policy: {score.why}")
            if _broken(score)
            else score
            for score in scores
        ]

    def score(self, batch: DataProto) -> list[Score]:
        """Score a batch that has the column `response_text`: one `Score` per row. Raises `RewardError` where
        `on_failure` asks for it."""
        self.check_signature(batch.columns)
        return self.settle(self.judged(row_views(batch)))


class Around(BaseReward):
    """Base class of rewards that have their scores from another one, `inner`: what is asked of a reward before a run, that
    one answers."""

    inner: BaseReward

    @property
    def source(self) -> str | None:
        """The source code of the function inside, or its judge's prompt; None where there is neither."""
        return self.inner.source

    @property
    def binding(self) -> Mapping[str, str]:
        """Argument of the function inside → a description of the value that fills it."""
        return self.inner.binding

    def check_signature(self, columns: Sequence[str]) -> None:
        """Raise `RewardError`, before any work, where `columns` lack one that the reward inside reads."""
        self.inner.check_signature(columns)

    def check_rows(self, rows: Iterable[Mapping[str, Any]]) -> str:
        """Check rows as the reward inside does: raises `DataError`, before any work, where it can score none of them."""
        return self.inner.check_rows(rows)

    def check_sampler(self, tokenizer: Any, switches: Mapping[str, Any]) -> None:
        """Check a model as the reward inside does: raises, before any work, where the model cannot write what that
        expects."""
        self.inner.check_sampler(tokenizer, switches)


def _broken(score: Score) -> bool:
    return score.status is Status.INFRA_ERROR


def broken_episode(columns: Mapping[str, Any]) -> str:
    """Return the reason why a row's agent episode was aborted (for example, its simulated user failed), or "" if it was
    not."""
    extra = columns.get("agent_extra")
    errors = extra.get("errors") if isinstance(extra, Mapping) else None
    if not errors or columns.get("finish_reason") != "abort":
        return ""
    return errors if isinstance(errors, str) else "; ".join(map(str, errors))


def whole_episode(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Join the rows of one agent episode into the columns that its reward reads: the last row's, with the turns and
    counts of all rows."""
    whole = dict(rows[-1])
    for name in EPISODE:
        if name in whole and len(rows) > 1:
            each = [row[name] for row in rows]
            if all(isinstance(value, int) for value in each):
                whole[name] = sum(each) - (len(rows) - 1) * (name == "num_turns")  # each counts its beginning
            elif all(isinstance(value, list) for value in each):
                whole[name] = [value for many in each for value in many]
    return whole


def whole_episodes(batch: DataProto) -> DataProto:
    """Return a batch with one row for each agent episode (see `whole_episode`); the batch itself where every episode
    has one row."""
    every = episodes(batch)
    if len(every) == len(batch):
        return batch
    columns = {name: list(batch[name]) for name in EPISODE if name in batch}
    joined = [whole_episode([{name: cells[row] for name, cells in columns.items()} for row in rows]) for rows in every]
    last = batch.select_idxs([rows[-1] for rows in every])
    return last.with_columns({name: [episode[name] for episode in joined] for name in columns})


def row_views(batch: DataProto) -> list[dict[str, Any]]:
    """Convert the rows of a batch to dicts of plain values (see `row_view`), from which reward functions get their
    arguments."""
    objects = {name: list(batch.non_tensor_batch[name]) for name in batch.non_tensor_batch if name != "score"}
    ids: list[list[int]] = [[]] * len(batch)
    prompts: list[list[int] | None] = [None] * len(batch)
    if "prompt_mask" in batch:
        pairs = zip(batch["prompts"].numpy(), batch["prompt_mask"].bool().numpy(), strict=True)
        prompts = [row[mask].tolist() for row, mask in pairs]
    if "response_mask" in batch:
        pairs = zip(batch["responses"].numpy(), response_lengths(batch).tolist(), strict=True)
        ids = [row[:length].tolist() for row, length in pairs]
    rows = [{name: values[number] for name, values in objects.items()} for number in range(len(batch))]
    each = zip(rows, ids, prompts, strict=True)
    return [row_view(columns, columns["response_text"], one, prompt) for columns, one, prompt in each]


def response_lengths(batch: DataProto) -> torch.Tensor:
    """Count the tokens of each response, up to its last attended token: [B] int64.

    `response_mask` is 0 at tool and user tokens; with `attention_mask` the tokens after the last 1 count, too.
    """
    mask = batch["response_mask"]
    if "attention_mask" in batch:
        mask = mask | batch["attention_mask"][:, -mask.shape[1] :].to(mask.dtype)
    places = torch.arange(1, mask.shape[1] + 1, device=mask.device)
    return (mask.bool() * places).amax(-1)


def padded(rows: Sequence[Sequence[int]], pad: int = 0) -> dict[str, torch.Tensor]:
    """Right-pad the token ids of responses with `pad`: tensors `responses` and `response_mask`, [B, T] each."""
    width = max(1, *map(len, rows))
    return {
        "responses": torch.tensor([[*row, *[pad] * (width - len(row))] for row in rows]),
        "response_mask": torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows]),
    }


def row_view(
    columns: Mapping[str, Any], response: str, ids: Sequence[int], prompt_ids: Sequence[int] | None = None
) -> dict[str, Any]:
    """Make the dict that a reward function's arguments are filled from: a row's response, prompt, ground truth and so
    on, and its object columns under `columns`.

    `prompt_ids` are among them where the prompt's tokens are known.
    """
    chat = columns.get("raw_prompt")
    prompt = text_of(chat[-1]["content"]) if isinstance(chat, list) and chat else chat
    judged = columns.get("reward_model") or {}
    beside = {name: one for name, one in judged.items() if name not in ("ground_truth", "style")}
    episode = {name: columns[name] for name in EPISODE if name in columns}
    return {
        "response": response,
        "response_ids": list(ids),
        "prompt": chat,
        "prompt_text": prompt,
        "query": f"{prompt or ''}{response}",
        "ground_truth": judged.get("ground_truth"),
        "data_source": columns.get("data_source"),
        "extra_info": {**beside, **(columns.get("extra_info") or {}), **episode},
        "uid": columns.get("uid"),
        "columns": dict(columns),
        **({} if prompt_ids is None else {"prompt_ids": list(prompt_ids)}),
    }


_VALUES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "response": (
        "the response",
        (
            *("response", "solution_str", "completion", "response_text"),
            *("model_output", "predict_str", "llm_solution", "response_str"),
        ),
    ),
    "ground_truth": ("reward_model.ground_truth", ("ground_truth", "answer", "label")),
    "prompt": ("the prompt as the data set has it, a text or a chat", ("prompt",)),
    "prompt_text": ("the text of the prompt's last message", ("prompt_text", "question")),
    "query": ("prompt and response as one text", ("query",)),
    "response_ids": ("the response's token ids", ("response_ids",)),
    "prompt_ids": ("the prompt's token ids", ("prompt_ids",)),
    "data_source": ("data_source", ("data_source",)),
    "extra_info": ("extra_info", ("extra_info",)),
    "completion_messages": ("the response as a list of messages", ("completion_messages",)),
    "row": ("the row as a dict", ("row", "reward_input", "task_info")),
    "sample": (
        "the row as an object: prompt, response, label, metadata, response_length, tokens, index, group_index",
        ("sample",),
    ),
    "given_completion": ("the response, a text or a list of messages as the prompt is", ()),
    "rollout_state": ("the row as a dict: prompt, completion, answer, info, task, and its columns", ()),
    "rollout_info": ("column 'info', else extra_info", ()),
    "rows_log": ("a function (name, one value a row): the rows' parts and extras", ()),
    "batch_log": ("a function (name, number): a part of all rows", ()),
}
"""A value of a row → what `binding` says of an argument that gets it, and the argument names that always mean it."""
WORDS: Mapping[str, str] = {name: words for name, (words, _) in _VALUES.items()}
"""A value of a row → what `binding` says of an argument that gets it."""
ALIASES: Mapping[str, tuple[str, ...]] = {name: names for name, (_, names) in _VALUES.items() if names}
"""Our name for a value → the argument names that mean it. Any other argument name is a column of the batch."""

EPISODE = ("num_turns", "num_tool_calls", "turn_scores", "tool_rewards", "turns")
"""Columns of an agent's episode that `extra_info` has too, as in verl."""

_OF_AGENTS = (*EPISODE, "agent_extra")
_MEANING = {alias: name for name, aliases in ALIASES.items() for alias in aliases}
_PLURALS = {"responses": "response", "solution_strs": "solution_str", "predicts": "predict_str", "queries": "query"}
_PLURALS |= {"ground_truths": "ground_truth", "labels": "label", "answers": "answer", "questions": "question"}
_PLURALS |= {"data_sources": "data_source", "extra_infos": "extra_info", "reward_inputs": "row", "samples": "sample"}
_PLURALS |= {"prompts": "prompt", "completions": "given_completion", "completion_ids": "response_ids"}
_OF_THE_RUN = ("prompt", "given_completion", "response_ids", "prompt_ids", "completion_messages", "extra_info")
_NEVER_A_COLUMN = ("response", *_OF_THE_RUN)
_ON_REQUEST = ("row", "sample")  # names too plain to fill an argument that has a default
_VERLS = ("data_source", "solution_str", "ground_truth", "extra_info")
_NOT_TRLS = ("prompt", "completion", "completion_ids", "prompt_is_text")  # columns that TRL does not pass on

_FOREIGN = {
    **dict.fromkeys(
        ("prediction", "pred", "predicted", "output", "generation", "generated", "generated_text"), "response"
    ),
    **dict.fromkeys(("text", "candidate", "hypothesis", "action", "to_be_evaluated", "model_response"), "response"),
    **dict.fromkeys(
        ("target", "gold", "reference", "gt", "expected", "solution", "truth", "test_cases"), "ground_truth"
    ),
    **dict.fromkeys(("reference_answer", "correct_answer", "gold_answer", "expected_answer"), "ground_truth"),
    **dict.fromkeys(("problem", "prompt_str", "instruction", "input", "user_message"), "prompt_text"),
    **dict.fromkeys(("messages", "conversation", "chat"), "prompt"),
    **dict.fromkeys(("info", "metadata"), "extra_info"),
    **dict.fromkeys(("task", "source"), "data_source"),
}
"""Argument names of other libraries → the value that they probably mean. They are proposed, never filled."""
_VERIFIERS = {"completion": "given_completion", "state": "rollout_state", "info": "rollout_info", "task": "data_source"}
"""What names mean to a function of verifiers, which has one of `state`, `info`, `parser` beside `completion`."""
_AREALS = {
    "completions": "response",
    "completion_ids": "response_ids",
    "prompt": "prompt_text",
    "prompts": "prompt_text",
}
_TRLS_LOGS = {"log_extra": "rows_log", "log_metric": "batch_log"}


@dataclass(frozen=True)
class Signature:
    """How to call a reward function: its arguments, what each is filled from, and whether one call is for one row or
    for all rows."""

    function: str
    """The function's name, for messages."""
    defaults: Mapping[str, str | None]
    """Argument → its default, as text; None for an argument that has none."""
    rename: Mapping[str, str]
    """Argument → the value or column that it is to be filled from."""
    batched: bool
    """One call with lists for all rows, rather than one call a row."""
    meant: Mapping[str, str]
    """Argument names with another meaning in this function's calling style (such as verifiers') than elsewhere."""
    keywords: str
    """What a function with `**kwargs` gets besides its named arguments: `columns` (every column by its name, as TRL and
    AReaL do it), `verl` (verl's four arguments), or "" (nothing)."""
    bound: frozenset[str]
    """Arguments that the user set to a constant (by `functools.partial` or `load_function`): no value of a row replaces
    it."""
    file: str = ""
    """Path of the file that the function is loaded from."""

    def wanted(self, name: str) -> str:
        """Return the name of the value or column that fills an argument: the argument's name, or the one that `rename`
        gives it."""
        return self.rename.get(name, name)

    def asks(self, name: str) -> bool:
        """Return whether an argument must be filled, as it has no default value or is renamed."""
        return self.defaults.get(name) is None or name in self.rename

    def source(self, name: str, columns: Collection[str]) -> tuple[str, str] | None:
        """Return what fills an argument: ("value", a key of `WORDS`) or ("column", a column's name); None where nothing
        does.

        `columns` are the names that rows have. An argument with a default is filled only by a well-known value, or by a
        column that workbench's agents write.
        """
        wanted = self.wanted(name)
        if name in self.bound and wanted == name:
            return None
        singular, meaning = self._meaning(name)
        fills = self.asks(name) or wanted in _OF_AGENTS or self._fills_a_default(name, meaning)
        if self._may_be_column(name, meaning, fills):
            names = (wanted,) if meaning == "response" else (wanted, singular)
            if column := next((one for one in names if one in columns), None):
                return "column", column
        return ("value", meaning) if meaning and fills else None

    def _meaning(self, name: str) -> tuple[str, str | None]:
        """Return (the singular form of what an argument asks for, the key in `WORDS` of the row's value that this
        means, or None)."""
        wanted = self.wanted(name)
        singular = self.meant.get(wanted, _PLURALS.get(wanted, wanted) if self.batched else wanted)
        return singular, _MEANING.get(singular, singular if singular in WORDS else None)

    def _fills_a_default(self, name: str, meaning: str | None) -> bool:
        """Return whether a row's value may replace an argument's default: it is well known, and no argument without a
        default already means it.

        In `f(ground_truth, label=1.0)` both mean the ground truth, so `label` keeps its default.
        """
        needed = (other for other in self.defaults if other != name and self.asks(other))
        return meaning not in (None, *_ON_REQUEST) and all(self._meaning(other)[1] != meaning for other in needed)

    def _may_be_column(self, name: str, meaning: str | None, fills: bool) -> bool:
        wanted = self.wanted(name)
        # made of the run's prompt: a data set's `query` is a question, `prompt` a chat
        if wanted in ("queries", "prompt"):
            return False
        if self.keywords == "columns":  # their contract: the data set's columns come as keywords, over a default too
            return meaning not in _OF_THE_RUN and (self.asks(name) or writer_of(wanted) in (None, "dataset"))
        return fills and meaning not in _NEVER_A_COLUMN

    def columns(self) -> tuple[str, ...]:
        """Return the columns of the batch that the function needs: the names of the arguments that no value of a row
        fills."""
        return tuple(self.wanted(name) for name in self._missing(()))

    def _missing(self, columns: Collection[str]) -> list[str]:
        return [name for name in self.defaults if self.asks(name) and self.source(name, columns) is None]

    def further(self, columns: Collection[str]) -> list[str]:
        """Return the columns that the function's `**kwargs` receive, each by its name."""
        known = {*_NOT_TRLS, *self.defaults, *self.bound}
        return [name for name in columns if name not in known] if self.keywords == "columns" else []

    def binding(self, columns: Collection[str] | None = None) -> dict[str, str]:
        """Map each argument to a description of what fills it. `columns` are the names that rows have, or None while
        these are unknown."""
        filled = {}
        for name, default in self.defaults.items():
            source = self.source(name, columns or ())
            if source is not None:
                filled[name] = f"column {source[1]!r}" if source[0] == "column" else WORDS[source[1]]
            elif self.asks(name):
                filled[name] = f"column {self.wanted(name)!r}" if columns is None else "nothing that a row has"
            else:
                filled[name] = f"{'always' if name in self.bound else 'default'} {default}"
        if self.keywords:
            filled["**kwargs"] = "every column by its name" if self.keywords == "columns" else ", ".join(_VERLS)
        return filled

    def check(self, columns: Collection[str]) -> None:
        """Raise `RewardError`, with the line that would work, for arguments that neither a value nor `columns` can fill."""
        missing = self._missing(columns)
        if not missing:
            return
        wanted = self.wanted(missing[0])
        known = sorted({*_MEANING, *columns, *(_PLURALS if self.batched else ())})
        close = nearest(wanted, known, 0.8)
        do = f"did you mean {close!r}? " if close else ""
        do += "a rollout with agent=… writes it" if wanted in _OF_AGENTS else self._remedy(missing, known)
        what = f"reward function {self.function}: {wanted!r} is not a value that a row has"
        expected, found = ", ".join(dict.fromkeys((*ALIASES, *columns))), f"{self.function}({', '.join(self.defaults)})"
        raise RewardError(what, expected=f"one of {expected}", found=found, do=do)

    def _remedy(self, missing: Sequence[str], known: Collection[str]) -> str:
        """Write the call that would make the function work, guessed from the names of its `missing` arguments."""
        guesses = {name: _guess(self.wanted(name), known) for name in missing}
        constants = [f"{name}=…" for name, guess in guesses.items() if guess is None]
        rename = {**self.rename, **{name: guess for name, guess in guesses.items() if guess}}
        wrapper, function = "Reward", self.function
        if self.file and constants:
            function = f"load_function({', '.join([repr(self.file), repr(function), *constants])})"
        elif self.file:
            wrapper, function = "as_reward", repr(f"{self.file}:{function}")
        elif constants:
            function = f"functools.partial({', '.join([function, *constants])})"
        if rename:
            return f"write {wrapper}({function}, rename={rename})"
        return f"write {wrapper}({function}), or rename={{{missing[0]!r}: 'a column'}}"


def told(binding: Mapping[str, str]) -> str:
    """Format a `binding` in one line: `solution_str ← the response, label ← column 'label'`."""
    return ", ".join(f"{name} ← {source}" for name, source in binding.items())


def _guess(wanted: str, known: Collection[str]) -> str | None:
    """Guess the value or column that an unknown argument name means (`gold` means `ground_truth`); None where nothing
    is close."""
    if meaning := _FOREIGN.get(wanted):
        return meaning
    if meaning := _FOREIGN.get(wanted.removesuffix("s")):
        return next(many for many, one in _PLURALS.items() if _MEANING.get(one, one) == meaning)
    return nearest(wanted, known, 0.8)


def read_signature(function: Callable[..., Any], rename: Mapping[str, str] | None = None) -> Signature:
    """Read the `Signature` of a function; `rename` maps arguments to the value or column that fills them.

    A function with a plural argument (`completions`, `solution_strs`, `completion_ids`) is called once for the whole
    batch, except in AReaL's style (`prompt` or `prompt_ids` beside the plural), where it is called once per row. Raises
    `RewardError` for positional-only arguments, for a function without a readable signature, and for a name in `rename`
    that is not an argument.
    """
    name, rename = called(function).replace("<lambda>", "f"), dict(rename or {})
    parameters = parameters_of(function, f"reward function {describe(function)}", RewardError).values()
    if unnamed := [arg for arg in parameters if arg.kind in (arg.POSITIONAL_ONLY, arg.VAR_POSITIONAL)]:
        what, do = f"reward function {name}: argument {unnamed[0].name!r}", "wrap it: def reward(response, …): …"
        found = f"signature {inspect.signature(function)}"
        raise RewardError(what, expected="arguments that can be given by name", found=found, do=do)
    named = [arg for arg in parameters if arg.kind is not arg.VAR_KEYWORD]
    defaults = {arg.name: None if arg.default is arg.empty else describe(arg.default, 40) for arg in named}
    kwargs = len(named) < len(parameters)
    if strange := [] if kwargs else [arg for arg in rename if arg not in defaults]:
        raise RewardError(f"rename={{…}}: {unknown(f'parameter of reward function {name}', strange[0], defaults)}")
    defaults = {**dict.fromkeys(rename), **defaults}
    batched, meant, keywords = _style({*defaults, *rename.values()})
    if {"ORM", "AsyncORM"} & {kind.__name__ for kind in type(function).__mro__}:
        meant = {**meant, "completions": "response"}  # ms-swift's classes are called as TRL's functions, but with texts
    file, bound = _constants(function)
    return Signature(name, defaults, rename, batched, meant, keywords if kwargs else "", bound, file)


def _constants(function: Any) -> tuple[str, frozenset[str]]:
    """Return (path of the file that a function was loaded from, or "", and the names of its arguments that are bound to
    constants)."""
    inner: Any
    inner, bound = (function.func, function.keywords) if isinstance(function, partial) else (function, {})
    path = getattr(inner, "path", None)
    if not isinstance(path, Path):
        return "", frozenset(bound)
    return os.path.relpath(path), frozenset({*bound, *inner.kwargs})


def _style(names: Set[str]) -> tuple[bool, Mapping[str, str], str]:
    """Recognise a library's calling style from argument names: (one call per batch?, names with a special meaning, what
    `**kwargs` get)."""
    completions, ids = "completions" in names, "completion_ids" in names
    # once a row in spite of its plurals: TRL passes neither a `prompt` nor `prompt_ids`
    if completions and ("prompt_ids" in names or ("prompt" in names and "prompts" not in names)):
        return False, _AREALS, "columns"
    if "completion" in names and names & {"state", "info", "parser"}:
        return False, _VERIFIERS, "columns"
    if ids and not completions and names & {"prompt", "prompt_ids", *ALIASES["response"]}:
        return False, {"completion_ids": "response_ids"}, "verl"
    trls = completions or ids or ("prompts" in names and "queries" not in names)
    batched = bool(names & {*_PLURALS}) and (completions or not names & {*ALIASES["response"]})
    return batched, _TRLS_LOGS if trls and batched else {}, "columns" if trls else "verl"


# --- calls ----------------------------------------------------------------------------------------


def call_arguments(signature: Signature, row: Mapping[str, Any]) -> dict[str, Any]:
    """Build the keyword arguments for one call of a reward function on one row."""
    columns = row["columns"]
    verls = _VERLS if signature.keywords == "verl" else ()
    arguments = {name: columns[name] for name in signature.further(columns)}
    for name in (*signature.defaults, *verls):
        source = signature.source(name, columns)
        unknown_ids = source is not None and source[1] == "prompt_ids" and "prompt_ids" not in row
        if source is not None and (not unknown_ids or signature.asks(name)) and source[1] not in _TRLS_LOGS.values():
            arguments[name] = columns[source[1]] if source[0] == "column" else _value(source[1], row)
    return arguments


def batch_arguments(signature: Signature, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Build the keyword arguments for one call of a reward function on all rows: each is a list with one value per row.

    TRL's functions get prompts and completions as texts where the prompt is a text, and as message lists where it is a
    chat. A TRL function with `**kwargs` gets every column by its name (also in place of a default), and `log_extra` and
    `log_metric`, which `worker.with_logs` replaces by functions. A row that lacks a column has None.
    """
    columns = dict.fromkeys(name for row in rows for name in row["columns"])
    arguments: dict[str, Any] = {}
    names = list(signature.defaults)
    if signature.keywords == "columns":
        for name in signature.further(columns):
            arguments[name] = [row["columns"].get(name) for row in rows]
        names += ["prompts", "completions", "completion_ids", "ground_truth", *_TRLS_LOGS]
    elif signature.keywords == "verl":
        names += [f"{name}s" for name in _VERLS]
    for name in names:
        source = signature.source(name, columns)
        if source is not None:
            kind, what = source
            if what in _TRLS_LOGS.values():
                arguments[name] = name
                continue
            arguments[name] = [row["columns"].get(what) if kind == "column" else _value(what, row) for row in rows]
    return arguments


def _value(name: str, row: Mapping[str, Any]) -> Any:
    """Return a row's value by its key in `WORDS`, such as `response`, `prompt` or `sample`."""
    text, is_text = row["response"], row["columns"].get("prompt_is_text") or not isinstance(row["prompt"], list)
    messages = [{"role": "assistant", "content": text}]
    if name == "completion_messages":
        return messages
    if name == "given_completion":
        return text if is_text else messages
    prompt = row["prompt_text"] if is_text else row["prompt"]
    if name == "prompt":
        return prompt
    length = len(row["response_ids"])
    if name == "row":
        plain = {key: value for key, value in row.items() if key != "columns"}
        return {**row["columns"], **plain, "response_length": length}
    if name == "sample":
        return _sample(row, prompt)
    if name in ("rollout_info", "rollout_state"):
        info, columns = row["columns"].get("info", row["extra_info"]), row["columns"]
        episode = {"prompt": prompt, "completion": text if is_text else messages, "answer": row["ground_truth"]}
        return info if name == "rollout_info" else {"task": row["data_source"], **columns, **episode, "info": info}
    return row.get(name)


def _sample(row: Mapping[str, Any], prompt: Any) -> SimpleNamespace:
    """Make slime's `Sample` of a row: the fields that the row has; those that slime sets after the reward are None."""
    known = {"prompt": prompt, "response": row["response"], "label": row["ground_truth"], "metadata": row["extra_info"]}
    known |= {"group_index": row.get("uid"), "index": row["extra_info"].get("index")}
    if "prompt_ids" in row:
        known["tokens"] = [*row["prompt_ids"], *row["response_ids"]]
    unset = dict.fromkeys(("reward", "custom_rm_path", "generate_function_path", "session_id", "train_metadata"))
    return SimpleNamespace(**known, **unset, response_length=len(row["response_ids"]))


# --- results --------------------------------------------------------------------------------------


def scores_of(result: Any, function: str, rows: Sequence[int], batched: bool) -> list[Score]:
    """Convert a function's result for several rows into one `Score` per row, without ever raising.

    A result that is not a score makes its row *infra_error*, and a wrong number of results makes all rows of the call
    *infra_error*. `rows` are the row numbers.
    """
    try:
        results = results_of_batch(result) if batched else [result]
        if not isinstance(results, Sequence) or isinstance(results, str) or len(results) != len(rows):
            got = len(results) if hasattr(results, "__len__") else type(results).__name__
            got = describe(results) if isinstance(results, str) else got
            what, expected = f"result of reward function {function}", f"a list of {len(rows)} rewards"
            raise RewardError(what, expected=expected, found=got)
    except Exception as error:  # noqa: BLE001 - a result may be anything; its rows say what it is
        return [failed(first_line(error, 400))] * len(rows)
    return [row_score(one, function, row) for one, row in zip(results, rows, strict=True)]


def row_score(result: Any, function: str, row: int) -> Score:
    """Convert a result like `as_score`, but return an *infra_error* score for this row in place of raising an
    exception."""
    try:
        return as_score(result, function, row)
    except Exception as error:  # noqa: BLE001 - a result may be anything; its row says what it is
        return failed(first_line(error, 400))


def results_of_batch(result: Any) -> Any:
    """Convert the result of a call for many rows to a list: a tensor or an array to its values, OpenRLHF's dict to one
    dict per row."""
    if isinstance(result, Mapping) and "rewards" in result:
        records = [{"score": value} for value in results_of_batch(result["rewards"])]
        for name, values in (result.get("extra_logs") or {}).items():
            values = results_of_batch(values)
            if hasattr(values, "__len__") and len(values) == len(records):
                for row, value in zip(records, values, strict=True):
                    row[name] = value
        return records
    return result.tolist() if hasattr(result, "tolist") else result


def as_score(result: Any, function: str, row: int) -> Score:
    """Convert what the reward function named `function` returned for row number `row` to a `Score`.

    float, int, bool, NumPy or torch scalar: the value. dict or dataclass: `score` (or `reward_score`, `reward`, `overall`) is
    the value, other numbers are parts, the rest extra. tuple or list: its first element (verl's rule). None: not applicable.
    Raises `RewardError` for NaN, infinity, what is infinite as float32, or anything else.
    """
    if isinstance(result, Score):
        return result
    if result is None:
        return Score(status=Status.NOT_APPLICABLE, why="the reward function returned None")
    if is_dataclass(result) and not isinstance(result, type):
        result = {field.name: getattr(result, field.name) for field in fields(result)}
    if isinstance(result, Mapping):
        return _from_dict(result, function, row)
    if isinstance(result, tuple | list) and result:
        return as_score(result[0], function, row)
    value, place = _number(result), f"result of reward function {function}, row {row}"
    if value is None:
        raise RewardError(place, expected="a number, a dict with 'score', a Score, or None", found=describe(result))
    return Score(value=finite(value, place, "return None for 'not applicable'"))


def _from_dict(result: Mapping[str, Any], function: str, row: int) -> Score:
    key = next((key for key in ("score", "reward_score", "reward", "overall") if key in result), None)
    if key is None:
        found = f"keys {sorted(map(str, result))}"
        raise RewardError(f"result of {function}, row {row}", expected="a dict with 'score'", found=found)
    main = as_score(result[key], function, row)
    parts, extra = dict(main.parts), dict(main.extra)
    for name, value in result.items():
        if name in (key, "answer", "why", "status"):
            continue
        number = _number(value)
        if number is not None and abs(number) <= LARGEST:
            parts[str(name)] = number
        else:
            extra[str(name)] = value
    answer = result.get("answer", result.get("pred", main.answer))
    # a dict may name its status; any other value of `status` means nothing here
    wanted = result.get("status")
    return Score(
        value=main.value,
        parts=parts,
        extra=extra,
        answer=None if answer is None else str(answer),
        why=str(result.get("why", main.why)),
        status=next((status for status in Status if wanted == status.value), main.status),
    )


def _number(value: Any) -> float | None:
    if isinstance(value, numbers.Number) and not isinstance(value, complex):
        try:
            return float(value)  # type: ignore[arg-type]
        except OverflowError:  # an integer beyond every float
            return math.inf
    if not callable(getattr(value, "item", None)):
        return None
    sizes = getattr(value, "size", None), getattr(value, "numel", int)()
    return float(value.item()) if 1 in sizes else None
