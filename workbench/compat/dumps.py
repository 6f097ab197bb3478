"""Saved rollouts of other libraries as batches of ours: verl's jsonl, TRL's parquet, any table of completions.

What the dump says stays what it says: text is not touched, a reward that is missing or NaN is a row without a judgement,
and a total that the dump does not have (TRL writes a column per reward function) says in `score.why` how it was made.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from workbench.columns import REWARD_PREFIX, declared
from workbench.compat.dump_files import Records, absent, plain, read_records
from workbench.dataproto import DataProto, Origin
from workbench.errors import DataError, boundary, describe, message, unknown
from workbench.rewards.dry_run import PROMPT, RESPONSE, TRUTH
from workbench.rewards.score import MISSING, Score, Status

_VALUE = ("reward", "score")  # verl's validation dump has the total in `reward`; a part may then be called `score`
_ADVANTAGE = ("advantage", "advantages")
_OBJECTS = ("data_source", "extra_info", "ability", "finish_reason")
_LARGEST = torch.finfo(torch.float32).max


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How one kind of dump is laid out."""

    prompt: tuple[str, ...]
    response: tuple[str, ...]
    truth: tuple[str, ...]
    tells: tuple[str, ...]
    """Columns that together say that it is this kind."""
    says: str
    """Its columns, for an error message."""


KINDS: Mapping[str, Layout] = {
    "verl": Layout(
        prompt=("input",),
        response=("output",),
        truth=("gts",),
        tells=("input", "output", "score"),
        says="input, output, score, …",
    ),
    "trl": Layout(
        prompt=("prompt",),
        response=("completion",),
        truth=TRUTH,
        tells=("step", "prompt", "completion"),
        says="step, prompt, completion, …",
    ),
    "table": Layout(prompt=PROMPT, response=RESPONSE, truth=TRUTH, tells=(), says=f"one of {', '.join(RESPONSE)}"),
}
"""Kinds of dump that are understood, the most particular first."""


def read_dump(
    source: Any,
    *,
    kind: str | None = None,
    tokenizer: Any = None,
    step: int | None = None,
    rewards: str | Sequence[str] | Mapping[str, float] | None = None,
) -> DataProto:
    """A saved rollout as a batch of B rows, to look at (`views.samples`) and to judge again (`rewards.dry_run`).

    `source` is a file, a folder or a pattern (`completions/*.parquet`), a DataFrame, or a list of dicts. Understood are verl's
    dump (`trainer.rollout_data_dir`: `<step>.jsonl`), TRL's (`completions_00001.parquet`) and any table whose columns go by
    the names of `rewards.dry_run`; which one it is shows in its columns, or is said by `kind` (`KINDS`). A folder may hold
    many steps: None reads all, `step=3` that one.

    Columns: `response_text`, `uid` (same step and prompt: same group), and as far as the dump has them `raw_prompt`, `step`,
    `reward`, `scored`, `reward/<part>`, `score`, `reward_model`, `data_source`, `extra_info`, `reward_extra/<name>`, `advantage` [B]
    (a number a row, as dumps have it), and whatever else, as objects under its own name (`dump/<name>` where ours means
    something else). With a `tokenizer`: `responses`, `response_mask` [B, T], which need not be the ids that were sampled.

    `rewards` names the columns whose sum is the reward, or gives each its weight. Without it verl's is `score`, a table's
    `reward` or `score`, and TRL's the sum of its numeric columns before `advantage` (its default weights).
    A last line without an end, of a file that is still being written, is left out and named in `meta_info["torn"]`.
    Raises `DataError` for a damaged line, by file and line, and for columns that are none of these kinds.
    """
    rows = read_records(source, step)
    if step is not None and len(rows):
        rows = rows.of_step(step)
    if not len(rows):
        torn = f"a line that was cut off: {rows.torn[0]}" if rows.torn else None
        raise DataError(message(f"{_named(source)} has no rows", found=torn))
    kind = _kind(rows, kind)
    steps = rows.steps()
    table = rows.table()
    table.pop("step", None)
    columns = _texts(table, kind, rows.places, steps)
    if steps:
        columns["step"] = torch.tensor(steps)
    columns |= _judged(table, kind, columns["uid"], rewards)
    columns |= {_own(name): values for name, values in table.items()}
    if tokenizer is not None:
        columns |= _tokens(columns["response_text"], tokenizer)
    one_step = steps[0] if steps and len(set(steps)) == 1 else None
    facts = {"source": _named(source), "dump": kind, "step": one_step, "torn": rows.torn or None}
    meta = {name: fact for name, fact in facts.items() if fact is not None}
    origin = Origin(stage=f"{kind} dump", step=one_step)
    return DataProto(None, None, meta).with_columns(columns, origin=origin)


def _named(source: Any) -> str:
    """Where it came from, without the machine's own folders: it may end in a file that is shared."""
    return "/".join(Path(source).parts[-2:]) if isinstance(source, str | Path) else type(source).__name__


def _own(name: str) -> str:
    """A column's own name, where ours does not mean something else."""
    return f"dump/{name}" if declared(name) and name not in _OBJECTS else name


def _kind(rows: Records, kind: str | None) -> str:
    """Raises `DataError` for a kind that is none, records that are of none, and files of several."""
    if kind is not None:
        if kind not in KINDS:
            raise DataError(unknown("kind of dump", str(kind), KINDS))
        return kind
    first = rows.starts[0]
    found = {start: _detected(rows.records[start], rows.places[start]) for start in rows.starts}
    for start, other in found.items():
        if other != found[first]:
            both = f"{found[first]} ({rows.places[first]}) and {other} ({rows.places[start]})"
            raise DataError(message("files of one dump are of one kind", found=both, do="read them one by one"))
    return found[first]


def _detected(record: Mapping[str, Any], place: str) -> str:
    for name, layout in KINDS.items():
        text = any(isinstance(plain(record.get(column)), str | list) for column in layout.response)
        if text and all(column in record for column in layout.tells):
            return name
    raise DataError(
        message(
            f"{place}: no dump that is understood",
            expected="; ".join(f"{name}: {layout.says}" for name, layout in KINDS.items()),
            found=", ".join(map(str, record))[:400] or "no columns",
            do="rename its columns, or say what it is with kind=",
        )
    )


# --- texts --------------------------------------------------------------------------------------


def _texts(
    table: dict[str, list[Any]], kind: str, places: Sequence[str], steps: Sequence[int] | None
) -> dict[str, Any]:
    """Prompt, response, group and truth; takes what it uses out of the table, but a truth that rewards may ask for by name."""
    layout = KINDS[kind]
    said = _take(table, layout.response)
    asked = _take(table, layout.prompt)
    _require_text(said, places, f"a response: text in {' or '.join(layout.response)}")
    if layout.tells:
        _require_text(asked, places, f"a prompt: text in {layout.prompt[0]}")
    responses = [value if isinstance(value, str) else _said(value) for value in said]
    columns: dict[str, Any] = {"raw_prompt": [_chat(prompt) for prompt in asked]} if asked else {}
    columns["response_text"] = responses
    own = table.pop("uid", [])
    if own and all(isinstance(value, str | int) for value in own):
        columns["uid"] = [str(value) for value in own]
    else:
        of_step: Sequence[Any] = steps or [None] * len(places)
        columns["uid"] = [_uid(*pair) for pair in zip(of_step, asked or responses, strict=True)]
    truth = next((table[name] for name in layout.truth if _present(table, name)), None)
    judged = [_record(value, place) for value, place in zip(table.pop("reward_model", ()), places, strict=False)]
    if any(judged):
        columns["reward_model"] = [one or {"ground_truth": None} for one in judged]
    elif truth is not None:
        columns["reward_model"] = [{"ground_truth": None if absent(one) else one} for one in truth]
    if kind == "verl":
        table.pop("gts", None)
    return columns


def _present(table: Mapping[str, list[Any]], name: str) -> bool:
    return not all(map(absent, table.get(name, ())))


def _take(table: dict[str, list[Any]], names: Sequence[str]) -> list[Any]:
    """The likeliest of these columns that says anything; [] where none does."""
    return next((table.pop(name) for name in names if _present(table, name)), [])


def _require_text(values: Sequence[Any], places: Sequence[str], expected: str) -> None:
    for place, value in zip(places, values or [None], strict=False):
        if not isinstance(value, str | list):
            raise DataError(message(place, expected=expected, found=describe(value)))


def _record(value: Any, place: str) -> dict[str, Any] | None:
    """`reward_model` as a dict; some files have it as JSON text."""
    if isinstance(value, str):
        with boundary(f"{place}: reading reward_model as JSON", DataError):
            value = json.loads(value)
    return dict(value) if isinstance(value, Mapping) else None


def _chat(prompt: Any) -> list[dict[str, Any]] | None:
    """A chat as it is; one user message with any other prompt."""
    if isinstance(prompt, list) and prompt and all(isinstance(turn, Mapping) and "content" in turn for turn in prompt):
        return [dict(turn) for turn in prompt]
    return None if absent(prompt) else [{"role": "user", "content": str(prompt)}]


def _said(completion: list[Any]) -> str:
    """The text of a completion that is a list of messages."""
    return "\n".join(str(turn.get("content", "")) if isinstance(turn, Mapping) else str(turn) for turn in completion)


def _uid(step: int | None, prompt: Any) -> str:
    text = prompt if isinstance(prompt, str) else json.dumps(prompt, sort_keys=True, default=str)
    return hashlib.blake2b(f"{step}\0{text}".encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def _tokens(texts: Sequence[str], tokenizer: Any) -> dict[str, torch.Tensor]:
    with boundary("the tokenizer"):
        ids = [list(one) for one in tokenizer(list(texts), add_special_tokens=False)["input_ids"]]
    pad = next((one for one in (tokenizer.pad_token_id, tokenizer.eos_token_id) if one is not None), 0)
    width = max(1, *map(len, ids))
    return {
        "responses": torch.tensor([one + [pad] * (width - len(one)) for one in ids]),
        "response_mask": torch.tensor([[1] * len(one) + [0] * (width - len(one)) for one in ids]),
    }


# --- rewards ------------------------------------------------------------------------------------

_Column = list[float | None]


def _judged(table: dict[str, list[Any]], kind: str, uids: Sequence[str], rewards: Any) -> dict[str, Any]:
    """Total, parts, extras, advantage; takes what it uses out of the table."""
    advantage = next((found for name in _ADVANTAGE if (found := _numbers(table.get(name, ())))), None)
    answers = next((table[name] for name in ("answer", "pred") if kind == "verl" and name in table), None)
    weights, parts = _weights(table, kind, rewards)
    for name in (*parts, *(name for name in _ADVANTAGE if _numbers(table.get(name, ())))):
        table.pop(name, None)
    extra = {name: table.pop(name) for name in list(table) if kind == "verl" and name not in _OBJECTS}
    shown = {
        name.removeprefix(REWARD_PREFIX): found
        for name, found in parts.items()
        if name not in _VALUE or list(weights) != [name]
    }
    columns: dict[str, Any] = {}
    if weights:
        usable = table.pop("scored", None) or [True] * len(uids)
        total = [
            None if usable[row] == 0 else _weighted([(parts[name][row], weights[name]) for name in weights])
            for row in range(len(uids))
        ]
        columns["reward"] = torch.tensor([value if _usable(value) else 0.0 for value in total])
        columns["scored"] = torch.tensor([_usable(value) for value in total])
        columns["score"] = _scores(total, shown, extra, answers, _how(weights, total, advantage, uids))
    columns |= {f"{REWARD_PREFIX}{name}": _tensor(found) for name, found in shown.items()}
    columns |= {
        f"reward_extra/{name}": [MISSING if absent(one) else one for one in values] for name, values in extra.items()
    }
    if advantage is not None:
        columns["advantage"] = _tensor(advantage)
    return columns


def _weights(table: Mapping[str, list[Any]], kind: str, rewards: Any) -> tuple[dict[str, float], dict[str, _Column]]:
    """(column → weight in the total, column → its numbers for the total and every part)."""
    numeric = {name: found for name, values in table.items() if (found := _numbers(values)) is not None}
    if rewards is not None:
        asked = [rewards] if isinstance(rewards, str) else list(rewards)
        for name in asked:
            if name not in numeric:
                raise DataError(unknown("column of numbers in this dump", str(name), numeric))
        weights = {name: float(rewards[name]) if isinstance(rewards, Mapping) else 1.0 for name in asked}
        return weights, {name: numeric[name] for name in asked}
    names = [name for name in table if name in numeric and name not in _ADVANTAGE]
    if kind == "trl":
        order = list(table)
        end = order.index("advantage") if "advantage" in order else len(order)
        names = [name for name in names if order.index(name) < end and name not in TRUTH]
        return dict.fromkeys(names, 1.0), {name: numeric[name] for name in names}
    value = [name for name in _VALUE if name in names][:1]
    parts = [name for name in names if name in value or kind == "verl" or name.startswith(REWARD_PREFIX)]
    return dict.fromkeys(value, 1.0), {name: numeric[name] for name in parts}


def _numbers(values: Sequence[Any]) -> _Column | None:
    """The numbers of a column, None where a row has none or NaN; None for a column of something else."""
    found: _Column = []
    for value in values:
        if absent(value):
            found.append(None)
        elif isinstance(value, numbers.Real):
            found.append(_float(value))
        else:
            return None
    return found if any(value is not None for value in found) else None


def _float(value: Any) -> float:
    """A number as float; integers beyond float64 are infinite."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _usable(value: float | None) -> bool:
    """Whether it is a number that a reward can be: finite, as float32 too."""
    return value is not None and abs(value) <= _LARGEST


def _tensor(values: _Column) -> torch.Tensor:
    return torch.tensor([value if _usable(value) else math.nan for value in values])


def _weighted(pairs: Sequence[tuple[float | None, float]]) -> float | None:
    """Over the functions that judged the row, as TRL sums them."""
    judged = [value * weight for value, weight in pairs if value is not None]
    return sum(judged) if judged else None


def _scores(
    total: Sequence[float | None],
    parts: Mapping[str, _Column],
    extra: Mapping[str, list[Any]],
    answers: Sequence[Any] | None,
    how: str,
) -> list[Score]:
    found = []
    for row, value in enumerate(total):
        scored = _usable(value)
        why = how if scored else "the dump has no reward" if value is None else f"the dump has {value} as its reward"
        found.append(
            Score(
                value=float(value or 0.0) if scored else 0.0,
                parts={
                    name: one for name, column in parts.items() if (one := column[row]) is not None and _usable(one)
                },
                answer=None if answers is None or absent(answers[row]) else str(answers[row]),
                why=why,
                status=Status.SCORED if scored else Status.NOT_APPLICABLE,
                extra={name: values[row] for name, values in extra.items() if not absent(values[row])},
            )
        )
    return found


def _how(weights: Mapping[str, float], total: Sequence[float | None], advantage: Any, uids: Sequence[str]) -> str:
    """How a total of several columns was made, and whether the dump's advantages speak against it."""
    if len(weights) < 2:
        return ""
    names = ", ".join(name if weight == 1 else f"{weight:g} × {name}" for name, weight in weights.items())
    if advantage is None or not _contradicted(total, advantage, uids):
        return f"sum of {names}"
    return f"sum of {names}, which the dump's advantages contradict: say read_dump(…, rewards={{name: weight}})"


def _contradicted(total: Sequence[float | None], advantage: Sequence[float | None], uids: Sequence[str]) -> bool:
    """Whether a row of a group has the larger reward and the smaller advantage: no baseline or scale does that."""
    groups: dict[str, list[tuple[float, float]]] = {}
    for uid, reward, gain in zip(uids, total, advantage, strict=True):
        if reward is not None and gain is not None:
            groups.setdefault(uid, []).append((reward, gain))
    for pairs in groups.values():
        ordered = sorted(pairs)
        for (reward, gain), (other, further) in itertools.pairwise(ordered):
            if other - reward > 1e-6 and gain - further > 1e-6:
                return True
    return False
