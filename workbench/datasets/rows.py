"""`Rows`: prompts with their ground truths as a frozen value; and their `Report`, the check of a data set before a run.

`rows` is the one door for data of any kind; at the front it is `wb.rows`.
"""

from __future__ import annotations

import copy
import hashlib
import json
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import islice
from numbers import Integral
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
import torch

from workbench.base.errors import DataError, describe
from workbench.base.seeds import derive
from workbench.base.shown import Shown
from workbench.dataproto.core import DataProto, Origin
from workbench.datasets import hub
from workbench.datasets.files import find, read
from workbench.datasets.pictures import IMAGES, text_of
from workbench.datasets.records import CHAT, Reading, has_answer, table_records, truth_kinds, truth_of
from workbench.datasets.rendering import as_read, bounds, encode_rows, prompt_remarks, tokenizer_of


def shuffled(number: int, *parts: object) -> list[int]:
    """Return 0 to `number` − 1 in a random order whose seed is derived from the parts of a name."""
    return torch.randperm(number, generator=torch.Generator().manual_seed(derive(*parts))).tolist()


def permutation(rows: int, seed: int, epoch: int) -> list[int]:
    """Return the row numbers in the order of one epoch (from 0); the same arguments always give the same order."""
    return shuffled(rows, seed, "order", epoch)


def place(rows: int, batch_size: int, step: int) -> tuple[int, int]:
    """Return (epoch from 0, position in its order) at which a step (from 1) starts. An epoch's incomplete last batch is
    dropped.

    Raises `DataError` where a batch is larger than the data or the step is below 1.
    """
    if not isinstance(batch_size, Integral) or not 1 <= batch_size <= rows:
        raise DataError("batch size", expected=f"1 to {rows}, the number of rows", found=batch_size)
    if not isinstance(step, Integral) or step < 1:
        raise DataError("step of a batch of rows", expected="a whole number ≥ 1", found=step)
    per_epoch = rows // batch_size
    epoch, index = divmod(step - 1, per_epoch)
    return epoch, index * batch_size


@dataclass(frozen=True, kw_only=True)
class Cursor:
    """A run's position in its data: saved in checkpoints, verified on resume."""

    step: int
    """Steps done."""
    epoch: int
    """Epoch of the next step, from 0."""
    offset: int
    """Position in that epoch's order at which the next step starts."""
    data_hash: str
    """`Rows.data_hash` of the data."""
    seed: int
    """Seed of the order."""
    batch_size: int
    """Prompts a step."""
    parts: Mapping[str, Any] = field(default_factory=dict)
    """Of rows made of others (`mix`, `stages`, `growing`, …): the position of each."""

    def to_json(self) -> dict[str, Any]:
        """Return the cursor as a dict of plain values."""
        return {name: value for name, value in asdict(self).items() if name != "parts" or value}


Drawn = tuple[int, int | str]
"""A row's number, and which draw of it this is: an epoch, or a name."""
Fits = Callable[[list[dict[str, Any]]], None]


class Rows(Shown):
    """A list of rows in verl's schema: `prompt` (a chat), `data_source`, `reward_model`, `extra_info`, and more.

    `wb.rows(…)` makes it of anything; `Rows(…)` of an iterable of dicts or a DataFrame, whose columns are recognised in
    the same way. A missing cell (NaN) is None. A row whose prompt was a plain text has `prompt_is_text`, so that reward
    functions in TRL's style get a text for it. With `wb.rows(…, raw=True)` a prompt stays a text. It is immutable:
    slicing, `select`, `filter` and `split` return new `Rows`, and every row is returned as a copy. `Rows` with equal
    content and `max_prompt_length` are equal. Raises `DataError` for a record that is not a row, by row and column, and
    for a column whose name is reserved (`workbench.dataproto.columns`).

    Example:
        >>> rows = wb.rows("data/arith/train.parquet", max_prompt_length=128)  # doctest: +SKIP
        >>> train, held_out = rows.split(0.1)  # doctest: +SKIP
    """

    elsewhere: ClassVar = {
        "shuffle": "take batches in an order by seed: rows.batch(8, step=1, seed=0)",
        "map": "make rows of the changed ones: wb.rows([change(row) for row in rows])",
        "sample": "take a batch: rows.batch(8, seed=0)",
        "samples": "show rows: rows.head(8); show a step's samples: wb.views.samples(stepper)",
        "take": "slice them: rows[:8]",
        "train_test_split": "split them: train, held_out = rows.split(0.1)",
    }

    def __init__(self, rows: Any, *, max_prompt_length: int | None = None, source: str = "") -> None:
        listed, read_as = Reading().read(rows, source)
        self._fill(listed, max_prompt_length, source, read_as)

    def _fill(self, rows: Sequence[dict[str, Any]], max_prompt_length: int | None, source: str, read_as: str) -> None:
        self._rows = tuple(rows)
        self.read_as = read_as
        """Which columns became prompt and truth, and in whose schema they were recognised."""
        self.max_prompt_length = max_prompt_length
        self.source = source

    # --- a sequence ---------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (copy.deepcopy(row) for row in self._rows)

    def __getitem__(self, key: Any) -> Any:
        """Return a row by its number; `Rows` by a slice, or by a list or array of numbers or of booleans (a mask)."""
        if isinstance(key, slice):
            return self._like(self._rows[key])
        if isinstance(key, int | np.integer):
            return copy.deepcopy(self._rows[key])
        return self.select(key)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Rows):
            return NotImplemented
        return (self.data_hash, self.max_prompt_length) == (other.data_hash, other.max_prompt_length)

    def __hash__(self) -> int:
        return hash((self.data_hash, self.max_prompt_length))

    def _like(self, rows: Sequence[dict[str, Any]]) -> Rows:
        return made_of(rows, self.max_prompt_length, self.source, self.read_as)

    def views(self) -> Iterator[Mapping[str, Any]]:
        """Yield every row uncopied, as a read-only mapping."""
        return map(MappingProxyType, self._rows)

    def values(self, name: str) -> list[Any]:
        """Return the values of a column, None where a row has none."""
        return [copy.deepcopy(row.get(name)) for row in self._rows]

    def select(self, indices: Sequence[int] | Sequence[bool] | np.ndarray) -> Rows:
        """Return some rows, by number or by a mask with one boolean per row.

        Raises `DataError` for numbers that no row has and for a mask of another length.
        """
        chosen = np.asarray(indices)
        if chosen.dtype == bool and chosen.shape == (len(self),):
            chosen = np.flatnonzero(chosen)
        good = chosen.ndim == 1 and (chosen.size == 0 or np.issubdtype(chosen.dtype, np.integer))
        if not good or (chosen.size and not -len(self) <= chosen.min() <= chosen.max() < len(self)):
            expected = f"row numbers below {len(self)}, or a mask of {len(self)} booleans"
            raise DataError("rows to select", expected=expected, found=describe(indices))
        return self._like([self._rows[int(index)] for index in chosen])

    def filter(self, keep: Callable[[dict[str, Any]], bool]) -> Rows:
        """Return the rows for which `keep` is true."""
        return self.select([index for index, row in enumerate(self) if keep(row)])

    def to_pandas(self) -> Any:
        """Return the rows as a `DataFrame`, one line per row, with the names and values that the data has."""
        import pandas as pd

        return pd.DataFrame([dict(row) for row in self.views()])

    def head(self, n: int = 5) -> Any:
        """Return the first `n` rows as a `DataFrame`."""
        return self[:n].to_pandas()

    def split(self, held_out: int | float, seed: int = 0) -> tuple[Rows, Rows]:
        """Split into (other rows, held-out rows), each in their order; `held_out` is a number of rows, or a share below 1.

        The held-out prompts are sampled with the seed. All rows of one prompt go to the same side, so the held-out side may
        be a few rows larger, and the two sides share no prompt. Raises `DataError` where a side would be empty.
        """
        number = round(held_out * len(self)) if isinstance(held_out, float) and held_out < 1 else int(held_out)
        same: dict[str, list[int]] = {}
        for index, row in enumerate(self._rows):
            same.setdefault(json.dumps([row[CHAT], row.get(IMAGES)], sort_keys=True, default=str), []).append(index)
        groups = list(same.values())
        taken: set[int] = set()
        for group in permutation(len(groups), seed, 0):
            taken.update(groups[group] if len(taken) < number else ())
        if not 0 < len(taken) < len(self):
            there = f"{held_out} of {len(self)} rows with {len(groups)} different prompts"
            fewer = f"hold out fewer: a number from 1 to {len(groups) - 1}, or a share below 1"
            do = fewer if len(groups) > 1 else "add prompts"
            raise DataError("split into training and held-out rows", expected="rows in both parts", found=there, do=do)
        rest = [index for index in range(len(self)) if index not in taken]
        return self.select(rest), self.select(sorted(taken))

    @cached_property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns that at least one row has."""
        return tuple(dict.fromkeys(name for row in self._rows for name in row))

    @cached_property
    def data_hash(self) -> str:
        """Sixteen hex digits that change when any row changes."""
        digest = hashlib.blake2b(digest_size=8)
        for row in self._rows:
            digest.update(json.dumps(row, sort_keys=True, default=str).encode())
        return digest.hexdigest()

    # --- prompts ------------------------------------------------------------------------------

    @property
    def raw(self) -> bool:
        """Whether prompts are bare texts, which a model reads without its chat template."""
        return any(isinstance(row[CHAT], str) for row in self._rows)

    def report(self, tokenizer: Any = None, *, reward: Any = None, **switches: Any) -> Report:
        """Check rows before a run: columns and what they were read as, missing answers, repeated prompts.

        With a `tokenizer` also prompt lengths, and the first prompt exactly as the model reads it; `switches` are
        variables of its chat template. With a `reward` also how many truths can ever be right under it; raises
        `DataError` where none can.
        """
        lengths = self.prompt_lengths(tokenizer, **switches) if tokenizer is not None else []
        summary = report(self._rows, self.columns, lengths, self.max_prompt_length)
        first = ""
        if tokenizer is not None and self._rows:
            first = as_read(tokenizer, self._rows[0][CHAT], self._rows[0].get(IMAGES), **switches)
        judged = "" if reward is None else scorable(self._rows, reward)
        template = self._template(tokenizer, **switches)
        return replace(summary, read_as=self.read_as, first=first, template=template, scorable=judged)

    def _template(self, tokenizer: Any, **switches: Any) -> str:
        if tokenizer is None:
            return ""
        there = getattr(tokenizer_of(tokenizer), "chat_template", None)
        used = "the tokenizer's own" if there else "none: the model reads the messages' texts, one a line"
        used = "not used: the prompts are bare texts (raw=True)" if self.raw else used
        note = prompt_remarks(tokenizer_of(tokenizer), [row[CHAT] for row in self._rows], **switches)
        return f"{used}: {note}" if note else used

    def prompt_lengths(self, tokenizer: Any, **switches: Any) -> list[int]:
        """Count the tokens of each prompt under the tokenizer's chat template, with the variables `switches`.

        For rows with pictures `tokenizer` is the model's processor.
        """
        seen = {index: row[IMAGES] for index, row in enumerate(self._rows) if row.get(IMAGES)}
        return [len(ids) for ids in encode_rows(tokenizer, [row[CHAT] for row in self._rows], seen, **switches)[0]]

    def fitting(self, tokenizer: Any, *, overlong: str = "error", **switches: Any) -> Rows:
        """Return the rows whose prompts have at most `max_prompt_length` tokens; `overlong="drop"` leaves longer ones
        out.

        Raises `DataError` where `overlong="error"` and a prompt is longer (with the row numbers), or where nothing is
        left.
        """
        if overlong not in ("error", "drop"):
            raise DataError("overlong= of Rows.fitting", expected="'error' or 'drop'", found=repr(overlong))
        limit = self.max_prompt_length
        if limit is None:
            return self
        near = self.may_exceed(limit, tokenizer, **switches)
        lengths = dict(zip(near, self.select(near).prompt_lengths(tokenizer, **switches), strict=True))
        long = {index: length for index, length in lengths.items() if length > limit}
        bound = f"at most {limit} tokens"
        if len(long) == len(self):
            raise DataError("every prompt is too long", expected=bound, found=f"the shortest has {min(long.values())}")
        if long and overlong == "error":
            found = f"rows {[*long][:8]} with {[*long.values()][:8]}"
            do = "raise max_prompt_length, or take rows.fitting(tokenizer, overlong='drop')"
            raise DataError(f"{len(long)} of {len(self)} prompts are too long", expected=bound, found=found, do=do)
        return self.select([index for index in range(len(self)) if index not in long]) if long else self

    def may_exceed(self, limit: int, tokenizer: Any, **switches: Any) -> list[int]:
        """Return the numbers of the rows whose prompts may have more tokens than `limit`, estimated from their
        characters without rendering."""
        most = bounds(tokenizer, [row[CHAT] for row in self._rows], **switches)
        return [index for index, tokens in enumerate(most) if tokens > limit]

    # --- batches ------------------------------------------------------------------------------

    def batch(self, size: int, step: int = 1, seed: int = 0) -> DataProto:
        """Return the `size` prompts that training sees at `step` (from 1); the same arguments always give the same
        prompts."""
        epoch, start = place(len(self), size, step)
        indices = permutation(len(self), seed, epoch)[start : start + size]
        return self._batch([(index, epoch) for index in indices], step=step, epoch=epoch, seed=seed)

    def further(self, size: int, step: int, seed: int = 0, attempt: int = 1) -> DataProto:
        """Draw `size` more prompts for a step (dynamic sampling), determined by the arguments alone; they may repeat
        the epoch's."""
        size = min(size, self._span)
        indices = self._further(size, step, derive(seed, "further", step, attempt))
        epoch, _ = place(self._span, size, step)
        draws = [(index, f"{step}.{attempt}") for index in indices]
        return self._batch(draws, step=step, epoch=epoch, seed=seed)

    def in_order(self, size: int, seed: int = 0) -> Iterator[DataProto]:
        """Yield all rows in order in batches of `size` for evaluation; the last may be shorter. The batches' step is 0."""
        for start in range(0, len(self), size):
            indices = range(len(self))[start : start + size]
            yield self._batch([(index, 0) for index in indices], step=0, epoch=0, seed=seed)

    def cursor(self, step: int, batch_size: int, seed: int) -> Cursor:
        """Return the data position after `step` training steps."""
        epoch, offset = place(len(self), batch_size, step + 1)
        return Cursor(step=step, epoch=epoch, offset=offset, data_hash=self.data_hash, seed=seed, batch_size=batch_size)

    def _batch(self, drawn: Sequence[Drawn], *, step: int, epoch: int, seed: int) -> DataProto:
        # copies: a reward function that writes into extra_info changes its batch, never the data
        rows = [copy.deepcopy(self._rows[index]) for index, _ in drawn]
        names = [name for name in self.columns if name != CHAT]
        columns: dict[str, Any] = {
            "raw_prompt": [row[CHAT] for row in rows],
            "uid": [f"{derive(self.data_hash, index, draw):016x}" for index, draw in drawn],
            **{name: [row.get(name) for row in rows] for name in names},
        }
        meta = {"step": step, "epoch": epoch, "seed": seed, "max_prompt_length": self.max_prompt_length}
        return DataProto(None, columns, meta, origins=dict.fromkeys(columns, Origin(stage="dataset", step=step)))

    # --- as a part of other rows ----------------------------------------------------------------

    @property
    def _span(self) -> int:
        """Number of rows of an epoch."""
        return len(self)

    def __add__(self, other: Rows) -> Rows:
        """Join the rows of both as one data set: `a + b`. For shares that do not follow the sizes take
        `wb.datasets.mix`."""
        if not isinstance(other, Rows):
            return NotImplemented
        source = " + ".join(one.source or "memory" for one in (self, other))
        return made_of((*self._rows, *other._rows), common_limit((self, other)), source)

    def _drawn(self, asks: np.ndarray, seed: int) -> list[Drawn]:
        """Draw the rows of the last of some steps, from an endless sequence of epochs. `asks` is [K, 2]: step, number
        of rows that it takes."""
        start, count = int(asks[:-1, 1].sum()), int(asks[-1, 1])
        places = [divmod(place, len(self)) for place in range(start, start + count)]
        orders = {epoch: permutation(len(self), seed, epoch) for epoch, _ in places}
        return [(orders[epoch][offset], epoch) for epoch, offset in places]

    def _position(self, asks: np.ndarray, seed: int) -> dict[str, Any]:
        """Return the data position after these steps, as plain values for the cursor."""
        epoch, offset = divmod(int(asks[:, 1].sum()), len(self))
        return {"epoch": epoch, "offset": offset}

    def _further(self, size: int, step: int, seed: int) -> list[int]:
        """Return at most `size` row numbers for `further`."""
        return permutation(len(self), seed, 0)[:size]

    # --- during a run: rows that change with what a run does have their own (`workbench.datasets.feedback`) -------

    def check_steps(self, size: int, steps: int, seed: int) -> None:
        """Raise `DataError` where there are no prompts for all these steps; plain rows begin again, so they never
        raise."""

    def restore(self, folder: Path, step: int, *, ahead: int = 0, fits: Fits | None = None) -> list[Path]:
        """Restore the state after a step of the run in `folder`; return the files that the rows keep there, none for
        plain rows.

        `ahead` is the number of steps that rows are sampled ahead; `fits` raises `DataError` for a prompt that the
        model cannot take.
        """
        return []

    def learn(self, step: int, batches: Sequence[DataProto]) -> dict[str, float]:
        """Update the rows from a step's scored batches, and return metrics; plain rows do not change."""
        return {}

    def record(self) -> None:
        """Write the updates that `learn` made to disk; plain rows do not change, and write nothing."""

    # --- looking ------------------------------------------------------------------------------

    def __repr__(self) -> str:
        named = dict(self.lines())
        reading = f"\n  {named['read as']}" if "read as" in named else ""
        kind = type(self).__name__
        return f"{kind}({named['rows']}; columns {named['columns']}){reading}\n  first: {named['first prompt'][:100]!r}"

    def lines(self) -> list[tuple[str, str]]:
        """Return (label, value) pairs for display: how many rows, what their columns were read as, the first prompt."""
        first = self._rows[0][CHAT] if self._rows else ""
        text = first[-1].get("content") if isinstance(first, list) and first else first
        return [
            ("rows", f"{len(self)} from {self.source or 'memory'}"),
            *([("read as", self.read_as)] if self.read_as else []),
            ("columns", ", ".join(self.columns)),
            ("first prompt", str(text_of(text))[:300]),
        ]


def common_limit(parts: Sequence[Rows]) -> int | None:
    """Return the one `max_prompt_length` of the parts that have a limit. Raises `DataError` where they differ."""
    limits = sorted({part.max_prompt_length for part in parts if part.max_prompt_length is not None})
    if len(limits) > 1:
        do = "make them with one: wb.rows(…, max_prompt_length=…)"
        raise DataError("max_prompt_length of rows to join", expected="the same in all", found=limits, do=do)
    return limits[0] if limits else None


def made_of(rows: Sequence[dict[str, Any]], max_prompt_length: int | None, source: str, read_as: str = "") -> Rows:
    """Make `Rows` of records that are rows in verl's schema already."""
    result = Rows.__new__(Rows)
    result._fill(rows, max_prompt_length, source, read_as)
    return result


@dataclass(frozen=True, kw_only=True, repr=False)
class Report(Shown):
    """The check of a data set before a run: rows, missing answers, repeated prompts, prompt lengths."""

    rows: int
    columns: tuple[str, ...]
    data_sources: dict[str, int]
    missing_answers: tuple[int, ...]
    """Rows without a ground truth, where rewards are rules."""
    truths: dict[str, int]
    """Number of ground truths of each kind: `text`, `whole number`, `number`, `list`, `object`, `none`, `empty`, …"""
    duplicates: tuple[int, ...]
    """Rows whose prompt is in an earlier row too."""
    characters: dict[str, float]
    """Prompt length in characters: min, mean, median, p95, max."""
    pictures: int
    """Pictures in all rows (columns `images` and `image`)."""
    examples: tuple[tuple[str, str], ...]
    """(which, its prompt and ground truth) of the first rows, and of those with the shortest and the longest prompt."""
    lengths: dict[str, float]
    """Prompt length in tokens: min, mean, median, p95, max; {} without a tokenizer."""
    over_limit: int
    """Prompts above `max_prompt_length`."""
    limit: int | None
    """`max_prompt_length`, in tokens."""
    read_as: str = ""
    """Which columns became prompt and truth, and in whose schema they were recognised."""
    first: str = ""
    """The first prompt exactly as the model reads it; "" without a tokenizer."""
    template: str = ""
    """The chat template that renders prompts; "" without a tokenizer."""
    scorable: str = ""
    """How many truths can ever be right under the reward that was named."""
    parts: Mapping[str, int] = field(default_factory=dict)
    """Of a `mix`: the number of rows of each part."""

    def lines(self) -> list[tuple[str, str]]:
        """Return (label, value) pairs, for the display as text and HTML."""
        pairs = [
            ("rows", str(self.rows)),
            ("read as", self.read_as),
            ("columns", ", ".join(self.columns)),
            ("data sources", ", ".join(f"{name}: {count}" for name, count in self.data_sources.items())),
            ("missing answers", _count_and_places(self.missing_answers)),
            ("ground truths", ", ".join(f"{kind}: {count}" for kind, count in self.truths.items())),
            ("right under the reward", self.scorable),
            ("repeated prompts", _count_and_places(self.duplicates)),
            ("prompt characters", " · ".join(f"{name} {value:g}" for name, value in self.characters.items())),
            *([("pictures", str(self.pictures))] if self.pictures else []),
            *self.examples,
        ]
        if self.parts:
            pairs.insert(1, ("parts", ", ".join(f"{name}: {count}" for name, count in self.parts.items())))
        if self.lengths:
            pairs.append(("prompt tokens", " · ".join(f"{name} {value:g}" for name, value in self.lengths.items())))
            pairs.append(("over the limit", f"{self.over_limit} (limit {self.limit})" if self.limit else "no limit"))
        first_read = repr(self.first) if self.first else ""
        pairs += [("chat template", self.template), ("first prompt as the model reads it", first_read)]
        return [(label, value) for label, value in pairs if value]


def report(
    rows: Sequence[Mapping[str, Any]], columns: tuple[str, ...], lengths: Sequence[int] = (), limit: int | None = None
) -> Report:
    """Make the `Report` of rows; `lengths` are the prompts' lengths in tokens, where known, `limit` the largest allowed."""
    return Report(
        rows=len(rows),
        columns=columns,
        data_sources=dict(Counter(str(row.get("data_source")) for row in rows)),
        missing_answers=tuple(index for index, row in enumerate(rows) if not has_answer(row)),
        truths=truth_kinds(rows),
        characters=_statistics([len(_prompt(row)) for row in rows]),
        pictures=sum(len(row.get(IMAGES) or ()) for row in rows),
        examples=_examples(rows),
        duplicates=_repeated(rows),
        lengths=_statistics(lengths),
        parts=dict(Counter(str(row["data_part"]) for row in rows if row.get("data_part"))),
        over_limit=sum(length > limit for length in lengths) if limit is not None else 0,
        limit=limit,
    )


def _repeated(rows: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
    first: dict[str, int] = {}
    prompts = [str((row["prompt"], row.get(IMAGES))) for row in rows]
    return tuple(index for index, prompt in enumerate(prompts) if first.setdefault(prompt, index) != index)


def _count_and_places(rows: Sequence[int]) -> str:
    return f"{len(rows)} (rows {[*rows[:5]]})" if rows else "none"


def _prompt(row: Mapping[str, Any]) -> str:
    """Return the texts of a row's prompt, one message per line."""
    chat = row[CHAT]
    return chat if isinstance(chat, str) else "\n".join(str(text_of(turn.get("content")) or "") for turn in chat)


def _examples(rows: Sequence[Mapping[str, Any]]) -> tuple[tuple[str, str], ...]:
    by_length = sorted(range(len(rows)), key=lambda index: len(_prompt(rows[index])))
    chosen = {0: "first row", 1: "second row"} if len(rows) > 1 else {0: "first row"} if rows else {}
    for name, index in (("shortest prompt", by_length[:1]), ("longest prompt", by_length[-1:])):
        chosen |= {one: f"{name} (row {one})" for one in index if one not in chosen}
    return tuple((name, f"{_cut(_prompt(rows[one]))}  → {_cut(truth_of(rows[one]))}") for one, name in chosen.items())


def _cut(value: Any, most: int = 200) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= most else f"{text[: most // 2]} … {text[-most // 2 :]}"


def _statistics(lengths: Sequence[int]) -> dict[str, float]:
    if not lengths:
        return {}
    ordered = sorted(lengths)
    median, p95 = statistics.median(ordered), ordered[int(0.95 * len(ordered))]
    mean = round(sum(ordered) / len(ordered), 1)
    return {"min": ordered[0], "mean": mean, "median": median, "p95": p95, "max": ordered[-1]}


def scorable(rows: Sequence[Mapping[str, Any]], reward: Any) -> str:
    """Describe how many truths can ever be right under a reward.

    `reward` is a reward (`check_rows`), or a rule or its module (`rewards.gsm8k`); of other functions this is unknown.
    Raises `DataError` where none can be right.
    """
    rule = getattr(reward, str(getattr(reward, "__name__", "")).rpartition(".")[2], reward)
    if hasattr(reward, "check_rows"):
        return reward.check_rows(rows) or f"{reward.name} refuses none of {len(rows)} rows"
    if not hasattr(rule, "unscorable"):
        return "unknown: only workbench's own rules can be asked beforehand"
    truths = [truth_of(row) for row in rows]
    bad = {index: why for index, truth in enumerate(truths) if (why := rule.unscorable(ground_truth=truth))}
    words = f"{len(truths) - len(bad)} of {len(truths)} truths can score 1 by {rule.__name__}"
    first = "".join(f"; row {index}: {why}" for index, why in list(bad.items())[:1])
    if bad and len(bad) == len(truths):
        do = "name the truths' column: wb.rows(…, answer='column')"
        raise DataError(words, found=first.removeprefix("; "), do=do)
    return words + first


_ANYTHING = "a path, a list of paths or dicts, a name on the hub, a DataFrame, a Dataset, or another iterable of dicts"


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
    """Read rows from anything: a file, a folder or list of files, a data set's name on the Hugging Face hub, a list of
    dicts, a DataFrame, a `Dataset`, `Rows`.

    Files are `.jsonl`, `.json`, `.csv`, `.tsv`, `.parquet`, `.arrow` or `.feather`, also as a pattern
    (`train-*.parquet`). `print(rows)` shows how the columns were read: which became the prompt, which the truth, in
    whose schema; `rows.report(tokenizer)` shows the first prompt as the model reads it.

    A name is `owner/name:config/split`, or a shorter form where that is one split (`"openai/gsm8k:main/train"`), also with
    `@revision`. It is read from the hub's parquet export, else from the repository's data files, through the hub's own cache,
    login and offline mode; no script of a repository is run. `rows.source`, which a run's settings record, has the commit.

    Recognised without further arguments: verl's schema; TRL's `prompt`, also with `completion`; OpenAI's `messages` (an
    assistant's last message is the truth); GSM8K (the truth after `####`); columns of common names (`question` and
    `answer`, `problem` and `solution`, …: `records.PROMPTS`, `ANSWERS`). Other columns stay, and a reward gets them by
    their names.

    Args:
        x: the data.
        prompt: the column of the prompts. A text is a user's message; a list of messages, also as JSON text, is that
            chat.
        answer: the column that becomes `reward_model.ground_truth`. Rows may have none, if the reward needs none.
        system: a system message to put before every prompt.
        raw: prompts are bare texts that the model continues, without its chat template: for base models.
        reward: the reward that will score the rows: truths that it can never score are refused here, rather than before
            the run.
        max_prompt_length: tokens that a prompt may have: checked by `fitting`, by `train` before it starts, by the
            rollout.
        limit: takes the first rows.
        without: columns to leave out, for data with a column that a stage writes (`score`, `uid`, …).

    Metrics are split by `data_source`: by default the file's name without its ending, the name on the hub, or of rows from memory the
    reward's name. Raises `DataError` for data that is missing, unreadable or empty, for films and sounds, for a column whose
    name is reserved, and where no column is known as a prompt: with the columns that there are and the line that names
    them.

    Example:
        >>> rows = wb.rows("mine.csv", prompt="q", answer="a", max_prompt_length=256)  # doctest: +SKIP
        >>> rows = wb.rows([{"question": "2+2?", "answer": 4}], system="Answer with a number.")  # doctest: +SKIP
    """
    for name, number in (("limit", limit), ("max_prompt_length", max_prompt_length)):
        if number is not None and number < 1:
            raise DataError(f"{name} of wb.rows", expected="≥ 1, or None", found=number)
    if isinstance(x, Rows):
        raw, max_prompt_length = raw or x.raw, max_prompt_length or x.max_prompt_length
    how = Reading(prompt=prompt, answer=answer, system=system, raw=raw, without=frozenset(without))
    records, source, read_as = _read(x, replace(how, data_source=_called(reward)), limit)
    result = made_of(records, max_prompt_length, source, read_as)
    if reward is not None:
        scorable([*result.views()], reward)
    return result


def _read(x: Any, how: Reading, limit: int | None) -> tuple[list[dict[str, Any]], str, str]:
    """Read all sources of `x`: (rows, where they are from, what their columns were read as). Raises `DataError` where
    there are none."""
    all_rows: list[dict[str, Any]] = []
    sources, readings = [], []
    for source, changes, records in parts(x):
        left = None if limit is None else limit - len(all_rows)
        found, read_as = replace(how, **changes).read(islice(records, left), source)
        all_rows += found
        sources.append(source)
        readings.append(read_as)
        if len(all_rows) == limit:
            break
    where = ", ".join(dict.fromkeys(filter(None, sources)))
    if not all_rows:
        raise DataError(f"no rows in {where or 'an empty list'}")
    return all_rows, where, "; ".join(dict.fromkeys(filter(None, readings)))


def check_rows(what: str, value: Any) -> None:
    """Raise `DataError` for what is no `Rows`; `what` names it in the message."""
    if not isinstance(value, Rows):
        raise DataError(what, expected="Rows", found=describe(value), do="make them: wb.rows(…)")


def parts(x: Any) -> Iterator[tuple[str, dict[str, Any], Iterable[Any]]]:
    """Yield (name of the source, changes of the `Reading`, records) for each file or table that `x` consists of."""
    files = [x] if isinstance(x, str | Path) else x if isinstance(x, list | tuple) else []
    if files and all(isinstance(one, str | Path) for one in files):
        for one in files:
            name = hub.named(one)
            for source, path in name.files() if name else ((str(path), path) for path in find(one)):
                data_source = name.name if name else hub.SHARD.sub("", path.stem)
                yield source, {"code": repr(source), "data_source": data_source}, read(path)
    elif isinstance(x, Mapping):
        split, records = _only_split(x)
        yield f"split {split!r}", {"code": f"x[{split!r}]"}, records
    else:
        records = table_records(x)
        if isinstance(x, bytes) or not isinstance(records, Iterable):
            raise DataError("data for wb.rows", expected=_ANYTHING, found=describe(x))
        yield x.source if isinstance(x, Rows) else "", {}, records


def _only_split(x: Mapping[str, Any]) -> tuple[str, Iterable[Any]]:
    """Return (name, records) of the one split that a `DatasetDict` has. Raises `DataError` for several."""
    if not x or not all(hasattr(one, "column_names") for one in x.values()):
        raise DataError("data for wb.rows", expected=_ANYTHING, found=describe(x))
    if len(x) > 1:
        do = f"take one: wb.rows(x[{next(iter(x))!r}])"
        raise DataError("a DatasetDict has several splits", expected="one split", found=", ".join(map(str, x)), do=do)
    return next(iter(x.items()))


def _called(reward: Any) -> str:
    """Return the name of a reward or reward function; "rows" for None."""
    named = getattr(reward, "func", reward)  # a partial's function
    name = getattr(named, "name", None) or getattr(named, "__name__", None) or type(named).__name__
    return "rows" if reward is None else str(name).rpartition(".")[2]
