"""Calling reward functions by their own signature (verl's, TRL's, OpenRLHF's, any), and reading what they return."""

from __future__ import annotations

import inspect
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from workbench.base.errors import RewardError, describe, unknown
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
"""Columns of an agent's episode that `extra_info` has too, as in verl."""

_MEANING = {alias: name for name, aliases in ALIASES.items() for alias in aliases}
_PLURALS = {"solution_strs": "solution_str", "data_sources": "data_source", "extra_infos": "extra_info"}
_PLURALS |= {"queries": "query", "labels": "label", "answers": "answer"}
_PLURALS |= {"ground_truths": "ground_truth", "prompts": "prompt", "completions": "completion", "responses": "response"}


@dataclass(frozen=True)
class Signature:
    """How to call a reward function: its arguments, and whether a call is for one row or for all."""

    names: tuple[str, ...]
    """The function's arguments that are filled from a row."""
    optional: frozenset[str]
    """Those of them that have a default."""
    batched: bool
    """One call with lists for all rows, rather than one call a row."""
    everything: bool
    """It takes `**kwargs`: TRL's style, every column is passed by name."""

    def columns(self) -> tuple[str, ...]:
        """Columns of the batch that the function needs: arguments without a default that no value of a row fills."""
        known = {*_MEANING, *self.optional, *(_PLURALS if self.batched else ())}
        return tuple(name for name in self.names if name not in known)


def read_signature(function: Callable[..., Any], given: Sequence[str] = ()) -> Signature:
    """The `Signature` of a function. `given` names arguments that are bound already (`reward_kwargs`).

    A function with a plural argument (`completions`, `solution_strs`) is called once for the whole batch.
    Raises `RewardError` for positional-only arguments, and for a function without a readable signature.
    """
    try:
        found = inspect.signature(function)
    except (TypeError, ValueError) as cause:
        raise RewardError(f"reward function {describe(function)} has no readable signature") from cause
    parameters = [one for one in found.parameters.values() if one.name not in given]
    named = [one for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
    for one in parameters:
        if one.kind in (one.POSITIONAL_ONLY, one.VAR_POSITIONAL):
            what = f"reward function {_name(function)}: argument {one.name!r}"
            raise RewardError(what, expected="arguments that can be given by name", found=f"signature {found}")
    names = tuple(one.name for one in named)
    optional = frozenset(one.name for one in named if one.default is not one.empty)
    everything = any(one.kind is one.VAR_KEYWORD for one in parameters)
    return Signature(names, optional, any(name in _PLURALS for name in names), everything)


def check_arguments(function: Callable[..., Any], signature: Signature, columns: Sequence[str]) -> None:
    """Raise `RewardError` if the function needs an argument that is neither in `columns` nor a value of every row."""
    known = {*_MEANING, *columns, *_PLURALS}
    for name in signature.names:
        if name not in known | signature.optional:
            hint = "a rollout with agent=… writes it" if name in (*EPISODE, "agent_extra") else None
            what = f"reward function {_name(function)}: {unknown('value that a row has', name, sorted(known))}"
            raise RewardError(what, do=hint)


def call_arguments(signature: Signature, row: Mapping[str, Any]) -> dict[str, Any]:
    """The keyword arguments for a call of the function on one row."""
    verls = ("data_source", "solution_str", "ground_truth", "extra_info") if signature.everything else ()
    return {name: _value(name, row) for name in dict.fromkeys((*signature.names, *verls)) if _has(name, row)}


def batch_arguments(signature: Signature, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The keyword arguments for one call of the function on all rows: each is a list with one value per row.

    TRL's functions (`completions`) get completions as message lists where the prompts are chats, and every
    column by its own name where they take `**kwargs`.
    """
    arguments = _everything(rows) if signature.everything and "completions" in signature.names else {}
    for name in signature.names:
        single = _PLURALS.get(name, name)
        if name == "completions":
            arguments[name] = [_completion(row) for row in rows]
        elif all(_has(single, row) for row in rows):
            arguments[name] = [_value(single, row) for row in rows]
    return arguments


def _everything(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Every column by its own name, as TRL passes them."""
    columns = dict.fromkeys(key for row in rows for key in row["columns"])
    own = {"prompts": [row["prompt"] for row in rows], "ground_truth": [row["ground_truth"] for row in rows]}
    return own | {name: [row["columns"].get(name) for row in rows] for name in columns}


def _completion(row: Mapping[str, Any]) -> Any:
    chat = isinstance(row["prompt"], list)
    return [{"role": "assistant", "content": row["response"]}] if chat else row["response"]


def _has(name: str, row: Mapping[str, Any]) -> bool:
    return name in row["columns"] or _MEANING.get(name) in row


def _value(name: str, row: Mapping[str, Any]) -> Any:
    # a column of the data set that happens to be called `answer` or `label` is what its author means
    if name in row["columns"] and name not in ("response", "prompt", "extra_info"):
        return row["columns"][name]
    return row[_MEANING[name]]


def results_of_batch(result: Any) -> Any:
    """The result of a call for many rows as a list: a tensor's or array's values, or of OpenRLHF's dict a dict per row."""
    if isinstance(result, Mapping) and "rewards" in result:
        found = [{"score": value} for value in results_of_batch(result["rewards"])]
        for name, values in (result.get("extra_logs") or {}).items():
            values = results_of_batch(values)
            for row, value in zip(found, values if hasattr(values, "__len__") else (), strict=False):
                row[name] = value
        return found
    return result.tolist() if hasattr(result, "tolist") else result


def as_score(result: Any, function: str, row: int) -> Score:
    """Convert what the reward function named `function` returned for row number `row` to a `Score`.

    float, int, bool, NumPy or torch scalar: the value. dict: `score` (or `reward_score`, `reward`) is the value, other
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
    value, place = _number(result), f"result of reward function {function}, row {row}"
    if value is None:
        raise RewardError(place, expected="a number, a dict with 'score', a Score, or None", found=describe(result))
    if not math.isfinite(value):
        raise RewardError(place, expected="a finite number", found=value, do="return None for 'not applicable'")
    return Score(value=value)


def _from_dict(result: Mapping[str, Any], function: str, row: int) -> Score:
    key = next((key for key in ("score", "reward_score", "reward") if key in result), None)
    if key is None:
        found = f"keys {sorted(map(str, result))}"
        raise RewardError(f"result of {function}, row {row}", expected="a dict with 'score'", found=found)
    main = as_score(result[key], function, row)
    parts, extra = dict(main.parts), dict(main.extra)
    for name, value in result.items():
        if name in (key, "answer", "why", "status"):
            continue
        number = _number(value)
        if number is not None and math.isfinite(number):
            parts[str(name)] = number
        else:
            extra[str(name)] = value
    answer = result.get("answer", result.get("pred", main.answer))
    # a dict may name its status; any other value of `status` means nothing here
    said = result.get("status")
    return Score(
        value=main.value,
        parts=parts,
        extra=extra,
        answer=None if answer is None else str(answer),
        why=str(result.get("why", main.why)),
        status=next((status for status in Status if said == status.value), main.status),
    )


def _number(value: Any) -> float | None:
    if isinstance(value, numbers.Number) and not isinstance(value, complex):
        return float(value)  # type: ignore[arg-type]
    if not callable(getattr(value, "item", None)):
        return None
    sizes = getattr(value, "size", None), getattr(value, "numel", int)()
    return float(value.item()) if 1 in sizes else None


def _name(function: Any) -> str:
    return getattr(function, "__name__", describe(function))
