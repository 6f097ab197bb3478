"""`rows`: the one door for data of any kind; at the front it is `wb.rows`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from workbench.base.errors import DataError, describe
from workbench.datasets.files import find, read
from workbench.datasets.records import Reading, table_records
from workbench.datasets.rows import Rows, made_of, scorable

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

    Files are `.jsonl`, `.json`, `.csv`, `.tsv`, `.parquet`, `.arrow` or `.feather`; a pattern (`train-*.parquet`) and `~` are
    fine. Any other iterable of dicts is read to its end, or to `limit`. `print(rows)` says what was understood: which column
    became the prompt, which the truth, in whose schema, and the first prompt; `rows.report(tokenizer)` shows that prompt
    as the model reads it.

    Recognised without a word: verl's schema; TRL's `prompt`, also with `completion`; OpenAI's `messages` (an assistant's
    last message is the truth); GSM8K (`question`, and the truth behind `####` of `answer`); tables whose columns have common
    names (`question` and `answer`, `problem` and `solution`, …; all are in `datasets.records.PROMPTS` and `ANSWERS`). All
    other columns stay, and a reward function gets them by their names.

    Args:
        x: the data.
        prompt: the column of the prompts. A text is a user's message, wherever it comes from; a list of messages, also as
            JSON text, is that chat.
        answer: the column that becomes `reward_model.ground_truth`. Without one, rows have no truths: a reward function
            that asks for none trains all the same, and rules refuse such rows before a run.
        system: a system message to put before every prompt.
        raw: prompts are bare texts that the model continues, without its chat template: for base models.
        reward: what will score the rows: rows that it can never score are refused here rather than before the run, and rows
            from memory get its name as their `data_source`.
        max_prompt_length: tokens that a prompt may have. It is checked where a model's tokenizer is there: by `fitting`,
            by `train` before it starts, and by the rollout.
        limit: takes the first rows.
        without: columns to leave out, for data with a column that a stage writes (`score`, `uid`, …).

    A row's `data_source`, by which metrics are split, is by default the name of the file without its ending. Engines read
    text only: rows with pictures, films or sounds are refused, and so is content that is not text.
    Raises `DataError` for what is missing, unreadable or empty; for a column whose name is reserved; and for columns that are
    not known, with the columns that there are and the line that would name them.

    Example:
        >>> rows = wb.rows("mine.csv", prompt="q", answer="a", max_prompt_length=256)  # doctest: +SKIP
        >>> rows = wb.rows([{"question": "2+2?", "answer": 4}], system="Answer with a number.")  # doctest: +SKIP
    """
    for name, number in (("limit", limit), ("max_prompt_length", max_prompt_length)):
        if number is not None and number < 1:
            raise DataError(name, expected="≥ 1, or None", found=number)
    asked: dict[str, Any] = {"prompt": prompt, "answer": answer, "system": system, "without": frozenset(without)}
    made: list[dict[str, Any]] = []
    told: dict[str, None] = {}
    names: list[str] = []
    for source, code, default, records in _parts(x, _called(reward)):
        bare = raw or (isinstance(x, Rows) and x.raw)
        left = None if limit is None else limit - len(made)
        found, as_what = Reading(**asked, raw=bare, data_source=default, code=code).read(islice(records, left), source)
        made += found
        names += [source] if source else []
        told |= {as_what: None} if as_what else {}
    if not made:
        raise DataError(f"no rows in {', '.join(names) or 'an empty list'}")
    if isinstance(x, Rows):
        max_prompt_length = max_prompt_length or x.max_prompt_length
    result = made_of(made, max_prompt_length, ", ".join(names), "; ".join(told))
    if reward is not None:
        scorable(result, reward)
    return result


def _parts(x: Any, memory: str) -> Iterator[tuple[str, str, str, Any]]:
    """Yields (name of the source, the source as code, `data_source` of its rows, records) of what `x` is made of.

    `memory` is the `data_source` of rows from memory.
    """
    files = [x] if isinstance(x, str | Path) else x if isinstance(x, list | tuple) else []
    if files and all(isinstance(one, str | Path) for one in files):
        for path in find(files):
            yield str(path), repr(str(path)), _SHARD.sub("", path.stem), read(path)
    elif isinstance(x, Mapping):
        split, records = _only(x)
        yield f"split {split!r}", f"x[{split!r}]", memory, records
    else:
        records = table_records(x)
        if isinstance(x, str | bytes) or not isinstance(records, Iterable):
            raise DataError("rows", expected=_ANYTHING, found=describe(x))
        yield x.source if isinstance(x, Rows) else "", "x", memory, records


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
