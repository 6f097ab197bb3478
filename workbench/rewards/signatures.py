"""Whose calling convention a function speaks, by its own signature; and what its results mean."""

from __future__ import annotations

import inspect
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from workbench.errors import RewardError, describe, message, unknown
from workbench.rewards.score import Score, Status

ALIASES: Mapping[str, tuple[str, ...]] = {
    "response": ("response", "solution_str", "completion", "response_text"),
    "ground_truth": ("ground_truth", "answer", "label"),
    "prompt": ("prompt",),
    "prompt_text": ("prompt_text", "question"),
    "query": ("query",),
    "response_ids": ("response_ids", "completion_ids"),
    "data_source": ("data_source",),
    "extra_info": ("extra_info",),
}
"""Our name for a value → the argument names that mean it. Any other argument name is a column of the batch."""

EPISODE = ("num_turns", "num_tool_calls", "turn_scores", "tool_rewards", "turns")
"""Columns of an agent's episode, which verl puts into `extra_info`."""

_MEANING = {alias: name for name, aliases in ALIASES.items() for alias in aliases}
_PLURALS = {"solution_strs": "solution_str", "data_sources": "data_source", "extra_infos": "extra_info"}
_PLURALS |= {"queries": "query", "labels": "label", "answers": "answer"}
_PLURALS |= {"ground_truths": "ground_truth", "prompts": "prompt", "completions": "completion", "responses": "response"}


@dataclass(frozen=True)
class Signature:
    """How to call a function."""

    names: tuple[str, ...]
    """Its arguments that we fill."""
    batched: bool
    """One call with lists for all rows, rather than one call a row."""
    everything: bool
    """It takes `**kwargs`: TRL's style, every column is passed by name."""

    def called(self, *, batched: bool) -> Signature:
        """The same, called with lists or not."""
        return Signature(self.names, batched, self.everything)

    def columns(self) -> tuple[str, ...]:
        """Columns of the batch that it asks for by name."""
        singular = [_PLURALS.get(name, name) if self.batched else name for name in self.names]
        return tuple(name for name in singular if name not in _MEANING and name != "completion_ids")


def read_signature(function: Callable[..., Any], given: Sequence[str] = ()) -> Signature:
    """What a function wants. `given` are arguments that are bound already (`reward_kwargs`).

    A function whose arguments are plural (`completions`, `solution_strs`) is called once for the whole batch.
    Raises `RewardError` for positional-only arguments.
    """
    names, everything, batched = [], False, False
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as cause:
        raise RewardError(message(f"reward function {describe(function)} has no readable signature")) from cause
    for parameter in parameters:
        if parameter.kind is parameter.VAR_KEYWORD:
            everything = True
        elif parameter.kind in (parameter.POSITIONAL_ONLY, parameter.VAR_POSITIONAL):
            raise RewardError(
                message(
                    f"reward function {_name(function)}: argument {parameter.name!r}",
                    expected="arguments that can be given by name",
                    found=str(inspect.signature(function)),
                )
            )
        elif parameter.name not in given:
            names.append(parameter.name)
            batched = batched or parameter.name in _PLURALS
    return Signature(tuple(names), batched, everything)


def check_arguments(function: Callable[..., Any], signature: Signature, columns: Sequence[str]) -> None:
    """Refuse, before any work, a function that asks for what no row has."""
    parameters = inspect.signature(function).parameters
    known = {*_MEANING, *columns, *_PLURALS, "completion_ids"}
    for name in signature.names:
        if name not in known and parameters[name].default is inspect.Parameter.empty:
            told = unknown("value that a row has", name, sorted(known))
            hint = "; a rollout with agent=… writes it" if name in (*EPISODE, "agent_extra") else ""
            raise RewardError(f"reward function {_name(function)}: {told}{hint}")


def call_arguments(signature: Signature, row: Mapping[str, Any]) -> dict[str, Any]:
    """The keyword arguments for one row."""
    arguments = {name: _value(name, row) for name in signature.names if _has(name, row)}
    if signature.everything:
        wanted = {"data_source", "extra_info", "solution_str", "ground_truth"}
        arguments |= {name: _value(name, row) for name in wanted if name not in arguments and _has(name, row)}
    return arguments


def batch_arguments(signature: Signature, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The keyword arguments for all rows at once: a list for each.

    TRL's functions (`completions`) get completions as message lists where the prompts are chats, and every
    column by its own name where they take `**kwargs`.
    """
    arguments: dict[str, Any] = {}
    for name in signature.names:
        single = _PLURALS.get(name, name)
        if name == "completions":
            arguments[name] = [_completion(row) for row in rows]
        elif all(_has(single, row) for row in rows):
            arguments[name] = [_value(single, row) for row in rows]
    if signature.everything and "completions" in signature.names:
        for name in dict.fromkeys(key for row in rows for key in row["columns"]):
            arguments.setdefault(name, [row["columns"].get(name) for row in rows])
        arguments.setdefault("prompts", [row["prompt"] for row in rows])
        arguments.setdefault("ground_truth", [row["ground_truth"] for row in rows])
    return arguments


def _completion(row: Mapping[str, Any]) -> Any:
    chat = isinstance(row["prompt"], list)
    return [{"role": "assistant", "content": row["response"]}] if chat else row["response"]


def _has(name: str, row: Mapping[str, Any]) -> bool:
    return name in row["columns"] or _MEANING.get(name) in row or name == "completion_ids"


def _value(name: str, row: Mapping[str, Any]) -> Any:
    # a column of the data set that happens to be called `answer` or `label` is what its author means
    if name in row["columns"] and name not in ("response", "prompt", "extra_info"):
        return row["columns"][name]
    return row["response_ids"] if name == "completion_ids" else row[_MEANING[name]]


def results_of_batch(result: Any) -> Any:
    """A list of results from what a call for many rows gave: a tensor's or array's values; OpenRLHF's dict."""
    if isinstance(result, Mapping) and "rewards" in result:
        rewards = results_of_batch(result["rewards"])
        logs = {name: results_of_batch(values) for name, values in (result.get("extra_logs") or {}).items()}
        parts = {name: values for name, values in logs.items() if hasattr(values, "__len__")}
        return [
            {"score": value, **{name: values[row] for name, values in parts.items() if row < len(values)}}
            for row, value in enumerate(rewards)
        ]
    return result.tolist() if hasattr(result, "tolist") else result


def as_score(result: Any, function: str, row: int) -> Score:
    """What a function returned, as a record.

    float, int, bool, NumPy or torch scalar: the value. dict: `score` (or `reward_score`) is the value, other
    numbers are parts, the rest extra. tuple or list: its first element (verl's rule). None: not applicable.
    Raises `RewardError` for NaN, infinity or anything else.
    """
    if isinstance(result, Score):
        return result
    if result is None:
        return Score(status=Status.NOT_APPLICABLE, why="the reward function returned None")
    if isinstance(result, Mapping):
        return _from_dict(result, function, row)
    if isinstance(result, tuple | list) and result:
        return as_score(result[0], function, row)
    value = _number(result)
    if value is None:
        raise RewardError(
            message(
                f"reward function {function}, row {row}",
                expected="a number, a dict with 'score', a Score, or None",
                found=describe(result),
            )
        )
    if not math.isfinite(value):
        raise RewardError(
            message(
                f"reward function {function}, row {row}",
                expected="a finite number",
                found=value,
                do="return None for 'not applicable'",
            )
        )
    return Score(value=value)


def _from_dict(result: Mapping[str, Any], function: str, row: int) -> Score:
    key = next((key for key in ("score", "reward_score", "reward") if key in result), None)
    if key is None:
        raise RewardError(
            message(
                f"reward function {function}, row {row}",
                expected="a dict with 'score'",
                found=f"keys {sorted(map(str, result))}",
            )
        )
    main = as_score(result[key], function, row)
    parts, extra = dict(main.parts), dict(main.extra)
    for name, value in result.items():
        number = _number(value)
        if name in (key, "answer", "why", "status"):
            continue
        if number is not None and math.isfinite(number):
            parts[str(name)] = number
        else:
            extra[str(name)] = value
    answer = result.get("answer", result.get("pred", main.answer))
    return Score(
        value=main.value,
        parts=parts,
        extra=extra,
        answer=None if answer is None else str(answer),
        why=str(result.get("why", main.why)),
        status=_status(result.get("status"), main.status),
    )


def _status(said: Any, otherwise: Status) -> Status:
    """A dict may say in words what its score is worth; any other `status` is just one of its values."""
    return next((status for status in Status if said == status.value), otherwise)


def _number(value: Any) -> float | None:
    if isinstance(value, numbers.Number) and not isinstance(value, complex):
        return float(value)  # type: ignore[arg-type]
    item = getattr(value, "item", None)
    if (callable(item) and getattr(value, "size", None) == 1) or (
        callable(item) and getattr(value, "numel", lambda: 0)() == 1
    ):
        return float(item())
    return None


def _name(function: Any) -> str:
    return getattr(function, "__name__", describe(function))
