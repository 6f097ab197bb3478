"""verl's reward managers `naive`, `batch`, `prime`, `dapo` and `rate_limited`, with verl's constructor and call.

A manager takes a batch and returns a [B, T] tensor with each row's reward on its last token. They differ from verl's where
those lose data: a failure is never a silent 0 (the policy `on_failure` holds), extra info is the union of the rows' keys
with `MISSING`, and the reward of an empty response is not written to the last column.
"""

from __future__ import annotations

import sys
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from workbench.base.config import require
from workbench.base.errors import RewardError, first_line, unknown
from workbench.rewards.base import BaseReward, row_score, row_view
from workbench.rewards.reward import as_reward
from workbench.rewards.runner import FileFunction, RateLimit, WorkerPool, load_function
from workbench.rewards.score import MISSING, Score, extra_columns, failed
from workbench.rewards.scorers.shaping import overlong_penalty

RESERVED = ("score", "reward_score", "status", "scored", "step", "input", "output", "gts")
"""Keys of `reward_extra_info` that a function's dict cannot overwrite."""
MANAGERS: dict[str, type[NaiveRewardManager]] = {}
"""Name → manager class."""


def register(name: str, *, replace: bool = False) -> Callable[[type[Any]], type[Any]]:
    """Decorator that registers a reward manager class under a name, as in `@register("mine")`; a later class of that
    name replaces it.

    Raises `RewardError` for the name of one of workbench's own managers, unless `replace=True`.
    """
    if getattr(MANAGERS.get(name), "__module__", None) == __name__ and not replace:
        do = f"choose another name, or write @register({name!r}, replace=True)"
        raise RewardError(f"reward manager {name!r} is workbench's own", expected="another name", do=do)

    def known(kind: type[Any]) -> type[Any]:
        MANAGERS[name] = kind
        return kind

    return known


def manager_class(name: str) -> type[Any]:
    """Return the reward manager class registered as `name`. Raises `RewardError` for an unknown name."""
    if name not in MANAGERS:
        do = "register yours with @register(name), or load it with FileManagerReward"
        raise RewardError(unknown("reward manager", name, sorted(MANAGERS)), do=do)
    return MANAGERS[name]


@register("naive")
class NaiveRewardManager:
    """verl's `naive` manager: one call of `compute_score` per row. With None each row's `data_source` chooses the scorer.

    `__call__(data, return_dict)` takes anything verl-shaped: `batch` with `prompts`, `responses`, `attention_mask`,
    and `non_tensor_batch` with `reward_model`, `data_source`, `extra_info`. A column `rm_scores` is returned unchanged.
    """

    per: str | None = None
    workers = 1
    timeout = 30.0

    def __init__(
        self,
        tokenizer: Any,
        num_examine: int = 0,
        compute_score: Any = None,
        reward_fn_key: str = "data_source",
        *,
        num_workers: int | None = None,
        **reward_kwargs: Any,
    ) -> None:
        self.tokenizer = tokenizer
        self.num_examine = num_examine
        self.reward_fn_key = reward_fn_key
        self.num_workers = num_workers or self.workers
        self.reward = self._reward(compute_score, reward_kwargs)

    def _reward(self, compute_score: Any, options: dict[str, Any]) -> BaseReward:
        if compute_score is not None and not isinstance(compute_score, BaseReward):
            options = {"per": self.per, "workers": self.num_workers, "timeout": self.timeout, **options}
        return as_reward(compute_score, **options)

    def __call__(self, data: Any, return_dict: bool = False) -> Any:
        """Compute the rewards, [B, T] float32; with `return_dict` the dict `{"reward_tensor": …, "reward_extra_info":
        …}`."""
        if "rm_scores" in data.batch:
            rewards = data.batch["rm_scores"]
            return {"reward_tensor": rewards, "reward_extra_info": {}} if return_dict else rewards
        rows = self._rows(data)
        scores = self.scores(rows)
        tensor = torch.zeros(tuple(data.batch["responses"].shape), dtype=torch.float32)
        for number, (row, score) in enumerate(zip(rows, scores, strict=True)):
            length = len(row["response_ids"])
            if score.scored and length:  # nothing is written for an empty response
                tensor[number, length - 1] = score.value
        self._show(rows, scores)
        return {"reward_tensor": tensor, "reward_extra_info": extra_info(scores)} if return_dict else tensor

    def scores(self, rows: Sequence[Mapping[str, Any]]) -> list[Score]:
        """Score the rows: one `Score` each, in order, after the policy `on_failure`."""
        self.reward.check_signature(list(rows[0]["columns"]) if rows else [])
        return self.reward.settle(self.reward.tried(rows))

    def _rows(self, data: Any) -> list[dict[str, Any]]:
        responses = data.batch["responses"]
        width = responses.shape[-1]
        mask = data.batch["attention_mask"][:, -width:] if "attention_mask" in data.batch else None
        mask = data.batch["response_mask"] if mask is None else mask
        rows = []
        for number in range(len(responses)):
            ids = responses[number][: int(mask[number].sum())].tolist()
            columns = {name: values[number] for name, values in data.non_tensor_batch.items()}
            # a copy: verl's adds to the batch itself
            extra = {**(columns.get("extra_info") or {}), "num_turns": columns.get("__num_turns__")}
            extra["rollout_reward_scores"] = columns.get("reward_scores") or {}
            columns |= {"data_source": columns.get(self.reward_fn_key), "extra_info": extra}
            rows.append(row_view(columns, self.tokenizer.decode(ids, skip_special_tokens=True), ids))
        return rows

    def _show(self, rows: Sequence[Mapping[str, Any]], scores: Sequence[Score]) -> None:
        """Print the first `num_examine` rows of each data source, in verl's form."""
        shown: Counter[Any] = Counter()
        for row, score in zip(rows, scores, strict=True):
            shown[row["data_source"]] += 1
            if shown[row["data_source"]] <= self.num_examine:
                shown_text = f"[prompt] {row['prompt_text']}\n[response] {row['response']}\n"
                sys.stdout.write(f"{shown_text}[ground_truth] {row['ground_truth']}\n[score] {score}\n")

    def close(self) -> None:
        """End the reward's worker processes."""
        self.reward.close()


def extra_info(scores: Sequence[Score]) -> dict[str, list[Any]]:
    """Make verl's `reward_extra_info` of scores: key → one value per row. A function's keys in `RESERVED` are left out."""

    def column(of: Callable[[Score], Any]) -> list[Any]:
        return [of(score) for score in scores]

    extras = {name.removeprefix("reward_extra/"): values for name, values in extra_columns(scores).items()}
    for name in dict.fromkeys(name for score in scores for name in score.parts):
        extras[name] = [score.parts.get(name, MISSING) for score in scores]
    if any(score.answer is not None for score in scores):
        extras["pred"] = column(lambda score: MISSING if score.answer is None else score.answer)
    return {
        **{name: values for name, values in extras.items() if name not in RESERVED},
        "why": column(lambda score: score.why),
        "score": column(lambda score: score.value if score.scored else MISSING),
        "status": column(lambda score: score.status.value),
        "scored": column(lambda score: score.scored),
    }


@register("batch")
class BatchRewardManager(NaiveRewardManager):
    """verl's `batch` manager: one call per batch, with `data_sources, solution_strs, ground_truths, extra_infos`."""

    per = "batch"


@register("prime")
class PrimeRewardManager(NaiveRewardManager):
    """verl's `prime` manager: `num_workers` processes call `compute_score` by position, in verl's order of arguments."""

    workers = 8
    timeout = 300.0

    def _reward(self, compute_score: Any, options: dict[str, Any]) -> BaseReward:
        theirs = callable(compute_score) and not isinstance(compute_score, BaseReward | FileFunction)
        return super()._reward(positional(compute_score) if theirs else compute_score, options)


def positional(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function so that it is called by position, as verl's `prime` does, whatever its arguments are named."""

    def called(data_source: Any, solution_str: str, ground_truth: Any, extra_info: Any) -> Any:
        return function(data_source, solution_str, ground_truth, extra_info)

    called.__name__ = getattr(function, "__name__", "compute_score")
    called.__module__ = function.__module__  # so that the user's own module travels by value
    return called


@register("dapo")
class DAPORewardManager(NaiveRewardManager):
    """verl's `dapo` manager: `naive` plus DAPO's overlong penalty (`overlong_buffer_cfg{enable, len, penalty_factor}`)."""

    def __init__(
        self,
        *verls: Any,
        max_resp_len: int | None = None,
        overlong_buffer_cfg: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(*verls, **options)
        self.buffer = dict(overlong_buffer_cfg or {"enable": False})
        self.max_resp_len = max_resp_len
        if self.buffer.get("enable"):
            found = f"max_resp_len {max_resp_len}, len {self.buffer.get('len')}"
            fits = bool(max_resp_len and 0 < self.buffer.get("len", 0) <= max_resp_len)
            require(fits, "overlong_buffer_cfg", expected="0 < len ≤ max_resp_len", found=found)

    def scores(self, rows: Sequence[Mapping[str, Any]]) -> list[Score]:
        """Score the rows as `naive` does, add the overlong penalty to each value and keep it as the part
        `overlong_reward`."""
        pairs = zip(super().scores(rows), rows, strict=True)
        return [self._shortened(score, len(row["response_ids"])) for score, row in pairs]

    def _shortened(self, score: Score, length: int) -> Score:
        if not score.scored or not self.buffer.get("enable"):
            return score
        factor = float(self.buffer.get("penalty_factor", 1.0))
        penalty = overlong_penalty(length, self.max_resp_len or 0, int(self.buffer["len"]), factor)
        return score.with_value(score.value + penalty, overlong_reward=penalty, overlong=float(penalty < 0))


@register("rate_limited")
class RateLimitedRewardManager(NaiveRewardManager):
    """verl's `rate_limited` manager: `naive` under a `RateLimit` that holds for the whole run."""

    def __init__(
        self,
        *verls: Any,
        max_concurrent: int = 1,
        max_rpm: float | None = None,
        max_tpm: float | None = None,
        estimated_tokens_per_request: int = 2000,
        timeout: float = 300.0,
        **options: Any,
    ) -> None:
        limits = {"max_concurrent": max_concurrent, "max_rpm": max_rpm, "max_tpm": max_tpm}
        limit = RateLimit(**limits, estimated_tokens_per_request=estimated_tokens_per_request)  # type: ignore[arg-type]
        options["num_workers"] = options.get("num_workers") or max_concurrent
        super().__init__(*verls, **{"rate_limit": limit, "timeout": timeout, **options})


class ManagerReward(BaseReward):
    """`ManagerReward(manager)`: any reward manager, of workbench or written for verl, as a reward.

    The manager is called with a mutable, verl-shaped copy of the batch. Its result is read as one `Score` per row: the sum
    of a row of its tensor, and its extra info where that has one value per row. A row whose sum is not a finite number
    is *infra_error*, and so are all rows where the manager raises or gives a tensor that is not [B, T].
    """

    per = "batch"

    streams = False
    in_process = True  # a trial would need a rollout's tensors
    reads = ("prompts", "attention_mask", "reward_model", "data_source")

    def __init__(self, manager: Any, *, name: str | None = None, on_failure: str = "mask") -> None:
        super().__init__(name or type(manager).__name__, on_failure)
        self.manager = manager

    def close(self) -> None:
        """End the manager's worker processes, where it has a method `close`."""
        if callable(close := getattr(self.manager, "close", None)):
            close()

    def judge(self, rows: Sequence[Mapping[str, Any]]) -> list[Score]:
        """Raise `RewardError`, because a manager needs a rollout's whole batch, which only `score` receives."""
        raise RewardError(f"reward manager {self.name} scores the batch of a rollout", found="rows without a batch")

    def score(self, batch: Any) -> list[Score]:
        """Score a batch with the manager: one `Score` per row, after the policy `on_failure`."""
        names = [name for name in ("agent_extra", "finish_reason") if name in batch]
        rows = [{"number": row, "columns": {name: batch[name][row] for name in names}} for row in range(len(batch))]

        def asked(some: Sequence[Mapping[str, Any]]) -> list[Score]:
            try:
                scores = read_result(self.manager(batch.mutable(), return_dict=True), batch, self.name)
            except Exception as error:  # noqa: BLE001 - what a manager raises is every row's record
                return [failed(first_line(error, 400), "".join(traceback.format_exception(error)))] * len(some)
            return [scores[row["number"]] for row in some]

        return self.settle(self.judged(rows, asked))


def read_result(result: Any, batch: Any, name: str) -> list[Score]:
    """Convert a reward manager's result to one `Score` per row. Raises `RewardError` unless its tensor has the
    responses' shape [B, T]."""
    tensor = result["reward_tensor"] if isinstance(result, Mapping) else result
    info = dict(result.get("reward_extra_info") or {}) if isinstance(result, Mapping) else {}
    shape = tuple(batch["responses"].shape)
    if not torch.is_tensor(tensor) or tuple(tensor.shape) != shape:
        found = f"shape {tuple(tensor.shape)}" if torch.is_tensor(tensor) else type(tensor).__name__
        raise RewardError(f"the result of reward manager {name}", expected=f"a tensor of shape {shape}", found=found)
    values = tensor.double().sum(-1).tolist()
    ours = {*RESERVED} - {"status"}
    sized = {key: column for key, column in info.items() if hasattr(column, "__len__") and key not in ours}
    kept = [key for key, column in sized.items() if len(column) == len(values)]
    scores = []
    for row, value in enumerate(values):
        extras = {key: info[key][row] for key in kept if info[key][row] is not MISSING}
        scores.append(row_score({**extras, "score": value}, name, row))
    return scores


class FileManagerReward(ManagerReward):
    """A reward by the manager class `name` of the file `path` (verl's `reward_manager.source=importlib`).

    A worker process makes the manager as verl does and calls it, with `timeout` seconds per batch. `settings()` has the
    file's hash. Raises `DataError` for a file outside the allowed folders (`allowed_roots`).
    """

    def __init__(
        self,
        path: str | Path,
        name: str,
        *,
        tokenizer: Any,
        num_examine: int = 0,
        compute_score: Any = None,
        reward_fn_key: str = "data_source",
        timeout: float = 300.0,
        on_failure: str = "mask",
        roots: Sequence[str | Path] = (),
        **reward_kwargs: Any,
    ) -> None:
        arguments = {"tokenizer": tokenizer, "num_examine": num_examine, "compute_score": compute_score}
        arguments |= {"reward_fn_key": reward_fn_key, **reward_kwargs}
        self._file = load_function(path, name, roots=roots, **arguments)
        self._file.construct = True
        super().__init__(self._ask, name=name, on_failure=on_failure)
        self._pool = WorkerPool(self._file, workers=1, timeout=timeout)

    @property
    def source(self) -> str:
        """The source text of the manager's file."""
        return self._file.text

    def settings(self) -> dict[str, Any]:
        """Return the settings as plain values: the policy `on_failure`, and the file's name, class and hash."""
        return {**super().settings(), "file": self._file.describe()}

    def close(self) -> None:
        """End the worker process."""
        self._pool.close()

    def _ask(self, data: Any, *, return_dict: bool) -> Any:
        (answer,) = self._pool.map([{"data": data, "return_dict": return_dict}])
        if not answer.ok:
            do = answer.traceback or "fix its file"
            raise RewardError(f"reward manager {self.name} failed", found=answer.why, do=do)
        result = answer.result  # plain data: tensors have come as lists
        if isinstance(result, Mapping):
            return {**result, "reward_tensor": torch.tensor(result["reward_tensor"])}
        return torch.tensor(result)
