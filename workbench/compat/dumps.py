"""`read_dump`: saved rollouts as batches: verl's jsonl and its generations, TRL's parquet, ours, any table of completions.

Values are kept as they are: text is unchanged, a row whose reward is missing or NaN is not scored, and where the dump
has no total (TRL writes a column per reward function) `score.why` says how it was computed.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import numbers
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from workbench.base.errors import DataError, boundary, check_name, describe, first_line
from workbench.dataproto.columns import REWARD_PREFIX, declared
from workbench.dataproto.core import DataProto
from workbench.dataproto.value import Origin
from workbench.datasets import files
from workbench.datasets.records import absent, cells_of, chat, object_of, spoken, table_records
from workbench.rewards.base import padded
from workbench.rewards.score import MISSING, Score, Status
from workbench.rewards.trials import PROMPT, RESPONSE, TRUTH

_VALUE = ("reward", "score")  # verl's validation dump has the total in `reward`; a part may then be called `score`
_ADVANTAGE = ("advantage", "advantages")
_OBJECTS = ("data_source", "extra_info", "ability", "finish_reason")
_LARGEST = torch.finfo(torch.float32).max


class DumpLayout(NamedTuple):
    """The column names of one kind of dump: for each meaning the names that it may have, likeliest first."""

    prompt: tuple[str, ...]
    response: tuple[str, ...]
    truth: tuple[str, ...]
    marks: tuple[str, ...]
    """Columns that together identify the kind."""


KINDS: Mapping[str, DumpLayout] = {
    "verl": DumpLayout(("input",), ("output",), ("gts",), ("input", "output", "score")),
    "trl": DumpLayout(("prompt",), ("completion",), TRUTH, ("step", "prompt", "completion")),
    "generations": DumpLayout(PROMPT, ("responses",), TRUTH, ("responses",)),
    "workbench": DumpLayout(("prompt",), ("response",), (), ("prompt", "response", "score", "score/status", "uid")),
    "table": DumpLayout(PROMPT, RESPONSE, TRUTH, ()),
}
"""Kinds of dump that can be read, the most particular first."""


class DumpRecord(NamedTuple):
    """One record of a dump: its plain values, and where it stands."""

    values: Mapping[str, Any]
    place: str
    """File and line, or row."""
    file: int
    """Number of its file in this dump."""
    step: int | None
    """From its column, or else its file's name."""


def read_dump(
    source: Any,
    *,
    kind: str | None = None,
    tokenizer: Any = None,
    step: int | None = None,
    rewards: str | Sequence[str] | Mapping[str, float] | None = None,
) -> DataProto:
    """Read a saved rollout as a batch of B rows, to look at (`views.samples`) and to score again (`rewards.dry_run`).

    `source` is a file, a folder or a pattern (`completions/*.parquet`), a DataFrame, or a list of dicts: verl's dump
    (`trainer.rollout_data_dir`: `<step>.jsonl`), verl's generations (a list `responses` per prompt: a row for each, and
    the prompt is the group), TRL's (`completions_00001.parquet`), workbench's (`Evaluation.save`, a run's `val/`: each
    column as it was), or any table whose columns have the names of `rewards.dry_run`. The kind is recognised by the
    columns, or passed as `kind` (`KINDS`). A folder may hold many steps: None reads all, `step=3` that one.

    Columns: `response_text`, `uid` (same step and prompt: same group), and as far as the dump has them `raw_prompt`,
    `step`, `reward`, `scored`, `reward/<part>`, `score`, `reward_model`, `data_source`, `extra_info`,
    `reward_extra/<name>`, `advantage` [B] (one number per row), and every other column, as objects under its own name
    (`dump/<name>` where workbench declares `<name>` otherwise). With a `tokenizer` also `responses`, `response_mask`
    [B, T], which may differ from the ids that were sampled.

    `rewards` names the columns whose sum is the reward, or maps each to its weight. Without it the reward is `reward`,
    else `score`, and for TRL the sum of its numeric columns before `advantage` (TRL's default weights). A last line
    that is cut off, as in a file still being written, is left out and named in `meta_info["torn"]`. Raises `DataError`
    for a damaged line, by file and line, and for columns of no known kind.

    Example:
        >>> batch = wb.compat.read_dump("rollouts/", step=3)  # doctest: +SKIP
    """
    every, torn = read_records(source, step)
    if not every:
        raise DataError(f"{_origin(source)} has no rows", found=f"a line that was cut off: {torn[0]}" if torn else None)
    records, steps = _with_steps(every, step)
    kind = _kind(records, kind)
    if kind == "generations":
        records = _one_per_response(records)
        steps = steps and [record.step for record in records if record.step is not None]
    table = _table(records)
    table.pop("step", None)
    columns = _texts(table, kind, [record.place for record in records], steps)
    if steps:
        columns["step"] = torch.tensor(steps)
    if kind == "workbench":
        columns |= {**_as_written(table, len(records), _origin(source)), **table}
    else:
        columns |= _reward_columns(table, kind, columns["uid"], rewards)
        columns |= {_own_name(name): values for name, values in table.items()}
    if tokenizer is not None:
        columns |= _tokens(columns["response_text"], tokenizer)
    one_step = steps[0] if len(set(steps)) == 1 else None
    facts = {"source": _origin(source), "dump": kind, "step": one_step, "torn": torn or None}
    meta = {name: fact for name, fact in facts.items() if fact is not None}
    origin = Origin(stage=f"{kind} dump", step=one_step)
    return DataProto(None, None, meta).with_columns(columns, origin=origin)


def _with_steps(records: Sequence[DumpRecord], step: int | None) -> tuple[Sequence[DumpRecord], list[int]]:
    """Return the records, or those of one `step`, and their steps; the steps are [] where no record has one.

    Raises `DataError` where only some records have a step, and where none is of `step`, with the steps that there are.
    """
    steps = [record.step for record in records if record.step is not None]
    if steps and len(steps) < len(records):
        without = next(record.place for record in records if record.step is None)
        raise DataError(f"{without} has no step number", expected="one in every row of the dump, or in none")
    if step is None:
        return records, steps
    if step not in steps:
        found = ", ".join(map(str, sorted(set(steps))[:20])) or "no steps"
        raise DataError(f"no row of step {step} among the steps of the dump", found=found)
    return [record for record in records if record.step == step], [step] * steps.count(step)


def _origin(source: Any) -> str:
    """Name the source of a dump without this machine's folders, as the name may end in a file that is shared."""
    return "/".join(Path(source).parts[-2:]) if isinstance(source, str | Path) else type(source).__name__


def _own_name(name: str) -> str:
    """Return a column's own name, or `dump/<name>` where workbench's column of that name means something else."""
    return f"dump/{name}" if declared(name) and name not in _OBJECTS else name


def _kind(records: Sequence[DumpRecord], kind: str | None) -> str:
    """Return the kind of a dump. Raises `DataError` for an unknown kind, for records of no kind, and for files of
    several kinds."""
    if kind is not None:
        check_name("kind of dump", str(kind), KINDS, DataError)
        return kind
    firsts = [next(group) for _, group in itertools.groupby(records, key=lambda one: one.file)]
    kinds = [_detected(record) for record in firsts]
    for record, other in zip(firsts, kinds, strict=True):
        if other != kinds[0]:
            both = f"{kinds[0]} ({firsts[0].place}) and {other} ({record.place})"
            raise DataError("files of one dump must be of one kind", found=both, do="read them one by one")
    return kinds[0]


def _detected(record: DumpRecord) -> str:
    for name, layout in KINDS.items():
        text = any(isinstance(record.values.get(column), str | list) for column in layout.response)
        if text and all(column in record.values for column in layout.marks):
            return name
    known = [f"{name}: {', '.join(layout.marks)}, …" for name, layout in KINDS.items() if layout.marks]
    expected = "; ".join([*known, f"table: one of {', '.join(RESPONSE)}"])
    found = ", ".join(map(str, record.values))[:400] or "no columns"
    do = "rename its columns, or pass its kind as kind="
    raise DataError(f"{record.place}: no kind of dump has these columns", expected=expected, found=found, do=do)


def _one_per_response(records: Sequence[DumpRecord]) -> list[DumpRecord]:
    """Split records into one for each of a prompt's responses. Raises `DataError` where prompts have different numbers
    of responses."""
    split: list[DumpRecord] = []
    number = 0
    for prompt, record in enumerate(records):
        texts = record.values["responses"]
        number = number or (len(texts) if isinstance(texts, list) else 0)
        if not isinstance(texts, list) or not texts or len(texts) != number:
            expected = f"a list of {number} texts, as in {records[0].place}" if number else "a list of texts"
            raise DataError(f"responses of {record.place}", expected=expected, found=describe(texts))
        one = {"uid": f"prompt {prompt}", **record.values}
        split += [record._replace(values={**one, "responses": text, "sample": n}) for n, text in enumerate(texts)]
    return split


# --- texts --------------------------------------------------------------------------------------


def _texts(table: dict[str, list[Any]], kind: str, places: Sequence[str], steps: Sequence[int]) -> dict[str, Any]:
    """Make the columns of prompt, response, group and ground truth, and remove what they use from the table.

    A ground truth stays in the table, as rewards may ask for it by its name.
    """
    layout = KINDS[kind]
    responses = _take_first(table, layout.response)
    prompts = _take_first(table, layout.prompt)
    _require_text(responses, places, f"a response: text in {' or '.join(layout.response)}")
    if layout.marks:
        _require_text(prompts, places, f"a prompt: text in {layout.prompt[0]}")
    columns: dict[str, Any] = {}
    if prompts:
        pairs = zip(prompts, places, strict=True)
        columns["raw_prompt"] = [None if absent(one) else chat(one, f"prompt of {place}") for one, place in pairs]
    pairs = zip(responses, places, strict=True)
    columns["response_text"] = [spoken(one, f"response of {place}") for one, place in pairs]
    columns["uid"] = _group_uids(table.pop("uid", []), prompts or columns["response_text"], steps)
    if "extra_info" in table:
        table["extra_info"] = _objects(table["extra_info"], "extra_info", places)
    truths = _truths(table, layout, places)
    if truths:
        columns["reward_model"] = truths
    if kind == "verl":
        table.pop("gts", None)
    return columns


def _group_uids(names: Sequence[Any], prompts: Sequence[Any], steps: Sequence[int]) -> list[str]:
    """Return each row's group, its `uid`: the group's name in the dump, or else a hash of the row's prompt and step."""
    if names and all(isinstance(value, str | int) for value in names):
        return [str(value) for value in names]
    texts = [one if isinstance(one, str) else json.dumps(one, sort_keys=True, default=str) for one in prompts]
    pairs = zip(steps or itertools.repeat(None), texts, strict=False)
    keys = [f"{step}\0{text}" for step, text in pairs]
    return [hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest() for key in keys]


def _truths(table: dict[str, list[Any]], layout: DumpLayout, places: Sequence[str]) -> list[dict[str, Any]]:
    """Return `reward_model` as the dump has it, or else made of its ground truths; [] where it has neither."""
    recorded = _objects(table.pop("reward_model", ()), "reward_model", places)
    if any(recorded):
        return [one or {"ground_truth": None} for one in recorded]
    truth = next((table[name] for name in layout.truth if _present(table, name)), [])
    return [{"ground_truth": None if absent(one) else one} for one in truth]


def _objects(values: Sequence[Any], name: str, places: Sequence[str]) -> list[dict[str, Any] | None]:
    pairs = zip(values, places, strict=False)
    return [None if absent(value) else object_of(value, f"{name} of {place}") for value, place in pairs]


def _present(table: Mapping[str, list[Any]], name: str) -> bool:
    return not all(map(absent, table.get(name, ())))


def _take_first(table: dict[str, list[Any]], names: Sequence[str]) -> list[Any]:
    """Remove and return the first of these columns that has a value in any row; [] where none has."""
    return next((table.pop(name) for name in names if _present(table, name)), [])


def _require_text(values: Sequence[Any], places: Sequence[str], expected: str) -> None:
    for place, value in zip(places, values or [None], strict=False):
        if not isinstance(value, str | list):
            raise DataError(place, expected=expected, found=describe(value))


def _tokens(texts: Sequence[str], tokenizer: Any) -> dict[str, torch.Tensor]:
    with boundary("the tokenizer"):
        ids = [list(one) for one in tokenizer(list(texts), add_special_tokens=False)["input_ids"]]
    pad = next((one for one in (tokenizer.pad_token_id, tokenizer.eos_token_id) if one is not None), 0)
    return padded(ids, pad)


def _as_written(table: dict[str, list[Any]], rows: int, named: str) -> dict[str, Any]:
    """Restore the scores, token ids and marks of a file that workbench wrote, and remove them from the table."""
    parts = {name: table.pop(name) for name in list(table) if name.startswith(REWARD_PREFIX)}
    value, status, why, answer = (
        table.pop(name, [None] * rows) for name in ("score", "score/status", "score/why", "score/answer")
    )
    with boundary(f"reading the scores of {named}", DataError):
        scores = [
            Score(
                value=0.0 if absent(value[row]) else value[row],
                parts={
                    name.removeprefix(REWARD_PREFIX): part
                    for name, cells in parts.items()
                    if not absent(part := cells[row])
                },
                answer=answer[row],
                why=why[row] or "",
                status=Status(status[row]),
            )
            for row in range(rows)
        ]
        columns = _score_columns(scores)
        columns |= {name: torch.tensor([math.nan if absent(n) else n for n in parts[name]]) for name in parts}
        if _present(table, "greedy"):
            columns["greedy"] = torch.tensor(table.pop("greedy"), dtype=torch.bool)
        if _present(table, "response_ids"):
            columns |= padded([ids or [] for ids in table.pop("response_ids")])
    return columns


# --- rewards ------------------------------------------------------------------------------------

_Column = list[float]
"""A number a row, NaN where a row has none."""


def _reward_columns(table: dict[str, list[Any]], kind: str, uids: Sequence[str], rewards: Any) -> dict[str, Any]:
    """Make the columns of reward, parts, extras and advantage, and remove what they use from the table."""
    gains = {name: column for name in _ADVANTAGE if (column := _numbers(table.get(name, ())))}
    advantage = next(iter(gains.values()), None)
    answers = table.get("answer", table.get("pred")) if kind == "verl" else None
    weights, parts = _weights(table, kind, rewards)
    for name in (*parts, *gains):
        table.pop(name, None)
    extra = {name: table.pop(name) for name in list(table) if name not in _OBJECTS} if kind == "verl" else {}
    alone = next((name for name in _VALUE if list(weights) == [name]), None)  # it is the total, and no part
    shown = {name.removeprefix(REWARD_PREFIX): column for name, column in parts.items() if name != alone}
    columns: dict[str, Any] = {}
    if weights:
        total = _total(table.pop("scored", [True] * len(uids)), parts, weights)
        columns |= _scores(total, shown, extra, answers, _reward_basis(weights, total, advantage, uids))
    columns |= {f"{REWARD_PREFIX}{name}": _tensor(column) for name, column in shown.items()}
    for name, values in extra.items():
        columns[f"reward_extra/{name}"] = [MISSING if absent(one) else one for one in values]
    if advantage is not None:
        columns["advantage"] = _tensor(advantage)
    return columns


def _weights(table: Mapping[str, list[Any]], kind: str, rewards: Any) -> tuple[dict[str, float], dict[str, _Column]]:
    """Return (column → its weight in the reward, column → its numbers, for the reward's columns and every part)."""
    numeric = {name: found for name, values in table.items() if (found := _numbers(values)) is not None}
    if isinstance(rewards, Mapping):
        weights = {name: float(weight) for name, weight in rewards.items()}
    elif rewards is not None:
        weights = dict.fromkeys([rewards] if isinstance(rewards, str) else rewards, 1.0)
    else:
        weights, parts = _usual_weights(table, kind, [name for name in numeric if name not in _ADVANTAGE])
        return weights, {name: numeric[name] for name in parts}
    for name in weights:
        check_name("column of numbers in this dump", str(name), numeric, DataError)
    return weights, {name: numeric[name] for name in weights}


def _usual_weights(table: Mapping[str, list[Any]], kind: str, names: list[str]) -> tuple[dict[str, float], list[str]]:
    """Return the usual weights of a kind of dump, and its columns that are the reward or a part, where `rewards` is not
    passed."""
    if kind == "trl":  # its reward functions stand before `advantage`
        before = list(itertools.takewhile(lambda name: name != "advantage", table))
        judges = [name for name in names if name in before and name not in TRUTH]
        return dict.fromkeys(judges, 1.0), judges
    value = [name for name in _VALUE if name in names][:1]
    parts = [name for name in names if name in value or kind == "verl" or name.startswith(REWARD_PREFIX)]
    return dict.fromkeys(value, 1.0), parts


def _numbers(values: Sequence[Any]) -> _Column | None:
    """Return the numbers of a column; None for a column of other values, and for one without any number."""
    column: _Column = []
    for value in values:
        if not absent(value) and not isinstance(value, numbers.Real):
            return None
        column.append(math.nan if absent(value) else _float(value))
    return None if all(map(math.isnan, column)) else column


def _float(value: Any) -> float:
    """Convert a number to float; integers beyond float64 become infinite."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _usable(value: float) -> bool:
    """Return whether a number can be a reward: it is finite, also as float32."""
    return abs(value) <= _LARGEST


def _tensor(values: _Column) -> torch.Tensor:
    return torch.tensor([value if _usable(value) else math.nan for value in values])


def _total(usable: Sequence[Any], parts: Mapping[str, _Column], weights: Mapping[str, float]) -> _Column:
    """Return each row's weighted sum over the columns that have a number, as TRL sums them; NaN where none has, or the
    row is not usable."""
    totals: _Column = []
    for row, one in enumerate(usable):
        judged = [parts[name][row] * weight for name, weight in weights.items() if not math.isnan(parts[name][row])]
        totals.append(sum(judged) if judged and one != 0 else math.nan)
    return totals


def _scores(
    total: _Column,
    parts: Mapping[str, _Column],
    extra: Mapping[str, list[Any]],
    answers: Sequence[Any] | None,
    how: str,
) -> dict[str, Any]:
    """Make the columns `reward`, `scored` and `score` of rows with these totals."""
    scores = []
    for row, value in enumerate(total):
        scored = _usable(value)
        instead = "no reward" if math.isnan(value) else f"{value} as its reward"
        score = Score(
            value=value if scored else 0.0,
            parts={name: one for name, column in parts.items() if _usable(one := column[row])},
            answer=None if answers is None or absent(answers[row]) else str(answers[row]),
            why=how if scored else f"the dump has {instead}",
            status=Status.SCORED if scored else Status.NOT_APPLICABLE,
            extra={name: values[row] for name, values in extra.items() if not absent(values[row])},
        )
        scores.append(score)
    return _score_columns(scores)


def _score_columns(scores: list[Score]) -> dict[str, Any]:
    values = [one.value if one.scored else 0.0 for one in scores]
    return {"reward": torch.tensor(values), "scored": torch.tensor([one.scored for one in scores]), "score": scores}


def _reward_basis(weights: Mapping[str, float], total: _Column, advantage: _Column | None, uids: Sequence[str]) -> str:
    """Describe how a reward of several columns was computed, and whether the dump's advantages contradict it."""
    if len(weights) < 2:
        return ""
    names = ", ".join(name if weight == 1 else f"{weight:g} × {name}" for name, weight in weights.items())
    if advantage is None or not _contradicted(total, advantage, uids):
        return f"sum of {names}"
    return f"sum of {names}, which the dump's advantages contradict: say read_dump(…, rewards={{name: weight}})"


def _contradicted(total: _Column, advantage: _Column, uids: Sequence[str]) -> bool:
    """Return whether a row of a group has the larger reward and the smaller advantage, which no baseline or scale
    explains."""
    rows = zip(uids, total, advantage, strict=True)
    known = sorted(row for row in rows if not math.isnan(row[1]) and not math.isnan(row[2]))
    return any(
        uid == beside and other - reward > 1e-6 and gain - further > 1e-6
        for (uid, reward, gain), (beside, other, further) in itertools.pairwise(known)
    )


_NAMES_LIMIT = 1000
_STEP_IN_NAME = re.compile(r"(?:completions_|step_)?(\d{1,15})", re.ASCII)
_HALF = re.compile("[\ud800-\udfff]")
_HALF_ESCAPED = re.compile(rb"\\u[dD][89a-fA-F]")


def _table(records: Sequence[DumpRecord]) -> dict[str, list[Any]]:
    """Turn records into columns: name → one plain value per record, None where a record has none."""
    names = dict.fromkeys(name for record in records for name in record.values)
    if len(names) > _NAMES_LIMIT:
        raise DataError("number of columns in a dump", expected=f"at most {_NAMES_LIMIT} columns", found=len(names))
    return {name: [record.values.get(name) for record in records] for name in names}


def read_records(source: Any, step: int | None = None) -> tuple[list[DumpRecord], list[str]]:
    """Read a path, a pattern, a folder, a DataFrame or a list; returns (its records, the places of last lines that were
    cut off).

    With `step`, files whose names have another step are left out. Raises `DataError` for what is not a record.
    """
    torn: list[str] = []
    source = table_records(source)
    if isinstance(source, list | tuple) and not (source and isinstance(source[0], str | Path)):
        return [_read(f"row {number}", record, 0, None) for number, record in enumerate(source)], torn
    if not isinstance(source, str | Path | list | tuple):
        raise DataError("the dump", expected="a path, a DataFrame or a list of dicts", found=type(source).__name__)
    records: list[DumpRecord] = []
    for number, path in enumerate(_files(source, step)):
        if path.suffix == ".jsonl" and path.is_file():
            pairs = _read_lines(path, torn)
        else:
            pairs = [(f"{path}, row {row}", record) for row, record in enumerate(files.read(path))]
        records += [_read(*pair, number, _step_in(path)) for pair in pairs]
    return records, torn


def _read(place: str, record: Any, file: int, named: int | None) -> DumpRecord:
    """Make the `DumpRecord` of one saved record. Raises `DataError` for what is not a record, and for a step that is
    not a whole number."""
    values = cells_of(record, place)
    value = values.get("step")
    if isinstance(value, str) and value.strip().isdecimal():  # TRL's tables for trackers
        value = int(value)
    value = named if value is None else value
    real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if value is not None and not (real and abs(value) < 2**53 and value % 1 == 0):
        raise DataError(f"step of {place}", expected="a whole number", found=describe(value))
    return DumpRecord(values, place, file, None if value is None else int(value))


def _step_in(path: Path) -> int | None:
    """Return the step in a file's name: 3 for `3.jsonl` (verl), `completions_00003.parquet` (TRL) and
    `step_000003.parquet` (workbench)."""
    named = _STEP_IN_NAME.fullmatch(path.stem)
    return int(named[1]) if named else None


def _files(source: Any, step: int | None) -> list[Path]:
    """List the files of a source, sorted by the step in their names."""
    paths: list[Path] = []
    with boundary(f"looking for {describe(source)}", DataError):
        for entry in [source] if isinstance(source, str | Path) else source:
            path = Path(entry).expanduser()
            paths += _tables_in(path) if path.is_dir() else files.find(entry)
    steps = {path: _step_in(path) for path in paths}
    if step is not None:
        paths = [path for path in paths if steps[path] == step] or paths
    return sorted(paths, key=lambda path: (math.inf if (named := steps[path]) is None else named, str(path)))


def _tables_in(folder: Path) -> list[Path]:
    entries = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    tables = [path for path in entries if path.suffix in (".jsonl", ".parquet") and path.is_file()]
    if not tables:
        deeper = [path.name for path in entries if path.is_dir()]
        expected = "files such as 1.jsonl (verl) or completions_00001.parquet (TRL)"
        there = f"folders {', '.join(deeper[:8])}" if deeper else f"{len(entries)} other files"
        do = "name the folder that holds them" if deeper else None
        raise DataError(f"no dump in {str(folder)!r}", expected=expected, found=there, do=do)
    return tables


def _read_lines(path: Path, torn: list[str]) -> list[tuple[str, Any]]:
    """Read (place, record) of each line of a jsonl file. NaN and Infinity, which Python's JSON writers put there, are
    read."""
    records = []
    for place, raw in files.raw_lines(path):
        try:
            record = json.loads(raw.decode())
            if _HALF_ESCAPED.search(raw):  # JSON can escape half a character; no file, frame or page can hold it
                record = json.loads(_HALF.sub("\ufffd", json.dumps(record, ensure_ascii=False)))
            records.append((place, record))
        except (ValueError, RecursionError) as cause:  # ValueError: bad JSON, bad UTF-8, endless integers
            if raw.endswith(b"\n"):
                raise DataError(f"{place} is not JSON", found=first_line(cause)) from cause
            torn.append(place)
    return records
