"""`rows`: the one door for data of any kind; at the front it is `wb.rows`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from workbench.base.errors import DataError, describe
from workbench.datasets.files import find, read
from workbench.datasets.records import Reading, table_records
from workbench.datasets.report import scorable
from workbench.datasets.rows import Rows, made_of

_ANYTHING = "a path, a list of paths or dicts, a DataFrame, a Dataset, or another iterable of dicts"
_SHARD = re.compile(r"-\d{5}-of-\d{5}$")


def rows(
    x: Any,
    *,
    prompt: str | None = None,
    answer: str | None = None,
    system: str | None = None,
    raw: bool = False,
    reward: Any = None,
    max_prompt_length: int | None = None,
    limit: int | None = None,
    without: Sequence[str] = (),
) -> Rows:
    """Rows of anything: a file, a folder or list of files, a list of dicts, a DataFrame, a Hugging Face `Dataset`, `Rows`.

    Files are `.jsonl`, `.json`, `.csv`, `.tsv`, `.parquet`, `.arrow` or `.feather`, also as a pattern (`train-*.parquet`).
    `print(rows)` says what was understood: which column became the prompt, which the truth, in whose schema;
    `rows.report(tokenizer)` shows the first prompt as the model reads it.

    Recognised without a word: verl's schema; TRL's `prompt`, also with `completion`; OpenAI's `messages` (an assistant's
    last message is the truth); GSM8K (the truth behind `####`); columns of common names (`question` and `answer`,
    `problem` and `solution`, …: `records.PROMPTS`, `ANSWERS`). Other columns stay, and a reward gets them by their names.

    Args:
        x: the data.
        prompt: the column of the prompts. A text is a user's message; a list of messages, also as JSON text, is that chat.
        answer: the column that becomes `reward_model.ground_truth`. Rows may have none, if the reward needs none.
        system: a system message to put before every prompt.
        raw: prompts are bare texts that the model continues, without its chat template: for base models.
        reward: what will score the rows: truths that it can never score are refused here, rather than before the run.
        max_prompt_length: tokens that a prompt may have: checked by `fitting`, by `train` before it starts, by the rollout.
        limit: takes the first rows.
        without: columns to leave out, for data with a column that a stage writes (`score`, `uid`, …).

    Metrics are split by `data_source`: by default the file's name without its ending, of rows from memory the reward's.
    Raises `DataError` for what is missing, unreadable or empty, for pictures, films and sounds, for a column whose name is
    reserved, and where no column is known as a prompt: with the columns that there are and the line that names them.

    Example:
        >>> rows = wb.rows("mine.csv", prompt="q", answer="a", max_prompt_length=256)  # doctest: +SKIP
        >>> rows = wb.rows([{"question": "2+2?", "answer": 4}], system="Answer with a number.")  # doctest: +SKIP
    """
    for name, number in (("limit", limit), ("max_prompt_length", max_prompt_length)):
        if number is not None and number < 1:
            raise DataError(name, expected="≥ 1, or None", found=number)
    if isinstance(x, Rows):
        raw, max_prompt_length = raw or x.raw, max_prompt_length or x.max_prompt_length
    how = Reading(prompt=prompt, answer=answer, system=system, raw=raw, without=frozenset(without))
    made, source, read_as = _read(x, replace(how, data_source=_called(reward)), limit)
    result = made_of(made, max_prompt_length, source, read_as)
    if reward is not None:
        scorable([*result.views()], reward)
    return result


def _read(x: Any, how: Reading, limit: int | None) -> tuple[list[dict[str, Any]], str, str]:
    """(rows, where they are from, what their columns were read as). Raises `DataError` where there are none."""
    made: list[dict[str, Any]] = []
    sources, told = [], []
    for source, changes, records in parts(x):
        left = None if limit is None else limit - len(made)
        found, read_as = replace(how, **changes).read(islice(records, left), source)
        made += found
        sources.append(source)
        told.append(read_as)
        if len(made) == limit:
            break
    where = ", ".join(filter(None, sources))
    if not made:
        raise DataError(f"no rows in {where or 'an empty list'}")
    return made, where, "; ".join(dict.fromkeys(filter(None, told)))


def parts(x: Any) -> Iterator[tuple[str, dict[str, Any], Iterable[Any]]]:
    """Yields (name of the source, changes of the `Reading`, records) of what `x` is made of."""
    files = [x] if isinstance(x, str | Path) else x if isinstance(x, list | tuple) else []
    if files and all(isinstance(one, str | Path) for one in files):
        for path in find(files):
            named = {"code": repr(str(path)), "data_source": _SHARD.sub("", path.stem)}
            yield str(path), named, read(path)
    elif isinstance(x, Mapping):
        split, records = _only(x)
        yield f"split {split!r}", {"code": f"x[{split!r}]"}, records
    else:
        records = table_records(x)
        if isinstance(x, bytes) or not isinstance(records, Iterable):
            raise DataError("rows", expected=_ANYTHING, found=describe(x))
        yield x.source if isinstance(x, Rows) else "", {}, records


def _only(x: Mapping[str, Any]) -> tuple[str, Iterable[Any]]:
    """(name, records) of the one split that a `DatasetDict` has."""
    if not x or not all(hasattr(one, "column_names") for one in x.values()):
        raise DataError("rows", expected=_ANYTHING, found=describe(x))
    if len(x) > 1:
        do = f"take one: wb.rows(x[{next(iter(x))!r}])"
        raise DataError("a DatasetDict has several splits", expected="one", found=", ".join(map(str, x)), do=do)
    return next(iter(x.items()))


def _called(reward: Any) -> str:
    """The name of whatever scores; "rows" for None."""
    named = getattr(reward, "func", reward)  # a partial's function
    name = getattr(named, "name", None) or getattr(named, "__name__", None) or type(named).__name__
    return "rows" if reward is None else str(name).rpartition(".")[2]
