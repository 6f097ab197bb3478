"""`Rows`: prompts with their ground truths as a frozen value, read from files in verl's schema or GSM8K's own; and `Report`,
the check of such a data set before a run."""

from __future__ import annotations

import copy
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from numbers import Integral
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from workbench.base.errors import DataError, describe
from workbench.base.seeds import derive
from workbench.base.shown import Shown
from workbench.dataproto.columns import COLUMNS
from workbench.dataproto.core import DataProto, Origin
from workbench.datasets.files import read
from workbench.datasets.pictures import IMAGES, text_of
from workbench.datasets.records import CHAT, has_answer, rows_of, to_row, truth_kinds
from workbench.datasets.rendering import encode_rows


def permutation(rows: int, seed: int, epoch: int) -> list[int]:
    """Row numbers in the order of one epoch (from 0); the same arguments always give the same order."""
    generator = torch.Generator().manual_seed(derive(seed, "order", epoch))
    return torch.randperm(rows, generator=generator).tolist()


def place(rows: int, batch_size: int, step: int) -> tuple[int, int]:
    """(epoch from 0, position in its order) at which a step (from 1) starts. An epoch's incomplete last batch is dropped.

    Raises `DataError` where a batch is larger than the data or the step is below 1.
    """
    if not isinstance(batch_size, Integral) or not 1 <= batch_size <= rows:
        raise DataError("batch size", expected=f"1 to {rows}, the rows there are", found=batch_size)
    if not isinstance(step, Integral) or step < 1:
        raise DataError("step", expected="a whole number ≥ 1", found=step)
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

    def to_json(self) -> dict[str, Any]:
        """The cursor as a dict of plain values."""
        return asdict(self)


# --- the check of a data set ----------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, repr=False)
class Report(Shown):
    """Check of a data set before a run: rows, missing answers, repeated prompts, prompt lengths."""

    rows: int
    columns: tuple[str, ...]
    data_sources: dict[str, int]
    missing_answers: tuple[int, ...]
    """Rows without a ground truth, where rewards are rules."""
    truths: dict[str, int]
    """Number of ground truths of each kind: `text`, `whole number`, `number`, `list`, `object`, `none`, `empty`, …"""
    duplicates: int
    """Rows whose prompt is in an earlier row too."""
    lengths: dict[str, float]
    """Prompt length in tokens: min, mean, median, p95, max; {} without a tokenizer."""
    over_limit: int
    """Prompts above `max_prompt_length`."""
    limit: int | None
    """`max_prompt_length`, in tokens."""

    def lines(self) -> list[tuple[str, str]]:
        """(label, value) pairs, as text and HTML show them."""
        first = list(self.missing_answers[:5])
        missing = f"{len(self.missing_answers)} (rows {first})" if first else "none"
        pairs = [
            ("rows", str(self.rows)),
            ("columns", ", ".join(self.columns)),
            ("data sources", ", ".join(f"{name}: {count}" for name, count in self.data_sources.items())),
            ("missing answers", missing),
            ("ground truths", ", ".join(f"{kind}: {count}" for kind, count in self.truths.items())),
            ("repeated prompts", str(self.duplicates)),
        ]
        if self.lengths:
            pairs.append(("prompt tokens", "  ".join(f"{name} {value:g}" for name, value in self.lengths.items())))
            pairs.append(("over the limit", f"{self.over_limit} (limit {self.limit})" if self.limit else "no limit"))
        return pairs


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
        duplicates=len(rows) - len({str((row["prompt"], row.get(IMAGES))) for row in rows}),
        lengths=_statistics(lengths),
        over_limit=sum(length > limit for length in lengths) if limit is not None else 0,
        limit=limit,
    )


def _statistics(lengths: Sequence[int]) -> dict[str, float]:
    if not lengths:
        return {}
    ordered = sorted(lengths)
    median, p95 = ordered[len(ordered) // 2], ordered[int(0.95 * len(ordered))]
    mean = round(sum(ordered) / len(ordered), 1)
    return {"min": ordered[0], "mean": mean, "median": median, "p95": p95, "max": ordered[-1]}


# --- rows -----------------------------------------------------------------------------------------

INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'
"""What verl's prepared GSM8K appends to every question."""
_RESERVED = frozenset({"raw_prompt", "uid"} | {name for name, one in COLUMNS.items() if one.writer != "dataset"})
"""Names that a data set's columns may not have: stages or the batch write them (`prompt` becomes `raw_prompt`)."""


class Rows(Shown):
    """A list of rows in verl's schema: `prompt` (a chat), `data_source`, `reward_model`, `extra_info`, and more.

    It is made of an iterable of dicts or a DataFrame, whose records are read as `wb.rows` reads those of a file; a missing cell
    (NaN) is None, and a row whose prompt is a plain text has `prompt_is_text`.
    It is immutable: slicing, `select`, `filter` and `split` return new `Rows`, and every row is returned as a copy.
    `Rows` with equal content and `max_prompt_length` are equal.
    Raises `DataError` for a record that is no row, by row and column, and for a column whose name is reserved
    (`workbench.dataproto.columns`).

    Example:
        >>> rows = wb.rows("data/arith/train.parquet", max_prompt_length=128)  # doctest: +SKIP
        >>> train, held_out = rows.split(0.1)  # doctest: +SKIP
    """

    def __init__(self, rows: Any, *, max_prompt_length: int | None = None, source: str = "") -> None:
        self._fill(rows_of(rows, source=source), max_prompt_length, source)

    def _fill(self, rows: Sequence[dict[str, Any]], max_prompt_length: int | None, source: str) -> None:
        self._rows = tuple(rows)
        self.max_prompt_length = max_prompt_length
        self.source = source
        taken = [name for name in self.columns if name in _RESERVED]
        if taken:
            what = f"columns of {source or 'the rows'} have names that are reserved for columns of stages and batches"
            do = f"rename them, or leave them out: wb.rows(…, without={taken})"
            raise DataError(what, found=", ".join(taken), do=do)

    # --- a sequence ---------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (copy.deepcopy(row) for row in self._rows)

    def __getitem__(self, key: Any) -> Any:
        """A row by number; rows by slice, or by a list or array of numbers or of booleans (a mask)."""
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
        return made_of(rows, self.max_prompt_length, self.source)

    def views(self) -> Iterator[Mapping[str, Any]]:
        """Yields every row as it stands, uncopied: read only."""
        return map(MappingProxyType, self._rows)

    def values(self, name: str) -> list[Any]:
        """The values of a column, None where a row has none."""
        return [copy.deepcopy(row.get(name)) for row in self._rows]

    def select(self, indices: Sequence[int] | Sequence[bool] | np.ndarray) -> Rows:
        """Some rows, by number or by a mask with one boolean a row.

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
        """The rows for which `keep` is true."""
        return self.select([index for index, row in enumerate(self) if keep(row)])

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
            found = f"{held_out} of {len(self)} rows with {len(groups)} different prompts"
            raise DataError("split into training and held-out rows", expected="rows on both sides", found=found)
        rest = [index for index in range(len(self)) if index not in taken]
        return self.select(rest), self.select(sorted(taken))

    @cached_property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns that at least one row has."""
        return tuple(dict.fromkeys(name for row in self._rows for name in row))

    @cached_property
    def data_hash(self) -> str:
        """Sixteen hex digits that change when any row does."""
        digest = hashlib.blake2b(digest_size=8)
        for row in self._rows:
            digest.update(json.dumps(row, sort_keys=True, default=str).encode())
        return digest.hexdigest()

    # --- prompts ------------------------------------------------------------------------------

    def report(self, tokenizer: Any = None) -> Report:
        """Check rows before a run: columns, missing answers, repeated prompts, and with a tokenizer prompt lengths."""
        lengths = self.prompt_lengths(tokenizer) if tokenizer is not None else []
        return report(self._rows, self.columns, lengths, self.max_prompt_length)

    def prompt_lengths(self, tokenizer: Any, **switches: Any) -> list[int]:
        """Number of tokens of each prompt under the tokenizer's chat template, whose variables `switches` are.

        For rows with pictures `tokenizer` is the model's processor.
        """
        seen = {index: row[IMAGES] for index, row in enumerate(self._rows) if row.get(IMAGES)}
        return [len(ids) for ids in encode_rows(tokenizer, [row[CHAT] for row in self._rows], seen, **switches)[0]]

    def fitting(self, tokenizer: Any, *, overlong: str = "error", **switches: Any) -> Rows:
        """The rows whose prompts have at most `max_prompt_length` tokens; `overlong="drop"` leaves longer ones out.

        Raises `DataError` where `overlong="error"` and a prompt is longer (with the row numbers), or where nothing is left.
        """
        if overlong not in ("error", "drop"):
            raise DataError("overlong", expected="'error' or 'drop'", found=repr(overlong))
        limit = self.max_prompt_length
        if limit is None:
            return self
        lengths = self.prompt_lengths(tokenizer, **switches)
        long = [index for index, length in enumerate(lengths) if length > limit]
        bound = f"at most {limit} tokens"
        if len(long) == len(self):
            raise DataError("every prompt is too long", expected=bound, found=f"the shortest has {min(lengths)}")
        if long and overlong == "error":
            found = f"rows {long[:8]} with {[lengths[index] for index in long[:8]]}"
            do = "raise max_prompt_length, or take rows.fitting(tokenizer, overlong='drop')"
            raise DataError(f"{len(long)} of {len(self)} prompts are too long", expected=bound, found=found, do=do)
        return self.select([index for index, length in enumerate(lengths) if length <= limit]) if long else self

    # --- batches ------------------------------------------------------------------------------

    def batch(self, size: int, step: int = 1, seed: int = 0) -> DataProto:
        """The `size` prompts that training sees at `step` (from 1); the same arguments always give the same prompts."""
        epoch, start = place(len(self), size, step)
        indices = permutation(len(self), seed, epoch)[start : start + size]
        return self._batch(indices, draw=epoch, step=step, epoch=epoch, seed=seed)

    def further(self, size: int, step: int, seed: int = 0, attempt: int = 1) -> DataProto:
        """`size` more prompts for a step (dynamic sampling), chosen by the arguments alone; may repeat the epoch's."""
        size = min(size, len(self))
        indices = permutation(len(self), derive(seed, "further", step, attempt), 0)[:size]
        epoch, _ = place(len(self), size, step)
        return self._batch(indices, draw=f"{step}.{attempt}", step=step, epoch=epoch, seed=seed)

    def in_order(self, size: int, seed: int = 0) -> Iterator[DataProto]:
        """Yields all rows in order in batches of `size` for evaluation; the last may be shorter. The batches' step is 0."""
        for start in range(0, len(self), size):
            yield self._batch(range(len(self))[start : start + size], draw=0, step=0, epoch=0, seed=seed)

    def cursor(self, step: int, batch_size: int, seed: int) -> Cursor:
        """The data position after `step` training steps."""
        epoch, offset = place(len(self), batch_size, step + 1)
        position = {"step": step, "epoch": epoch, "offset": offset}
        return Cursor(**position, data_hash=self.data_hash, seed=seed, batch_size=batch_size)

    def _batch(self, indices: Sequence[int], *, draw: int | str, step: int, epoch: int, seed: int) -> DataProto:
        # copies: a reward function that writes into extra_info changes its batch, never the data
        rows = [copy.deepcopy(self._rows[index]) for index in indices]
        names = [name for name in self.columns if name != CHAT]
        columns: dict[str, Any] = {
            "raw_prompt": [row[CHAT] for row in rows],
            "uid": [f"{derive(self.data_hash, index, draw):016x}" for index in indices],
            **{name: [row.get(name) for row in rows] for name in names},
        }
        meta = {"step": step, "epoch": epoch, "seed": seed, "max_prompt_length": self.max_prompt_length}
        return DataProto(None, columns, meta, origins=dict.fromkeys(columns, Origin(stage="dataset", step=step)))

    # --- looking ------------------------------------------------------------------------------

    def __repr__(self) -> str:
        (_, count), (_, columns), (_, first) = self.lines()
        return f"Rows({count}; columns {columns})\n  first: {first[:100]!r}"

    def lines(self) -> list[tuple[str, str]]:
        """(label, value) pairs for display: how many rows, which columns, the first prompt."""
        first = self._rows[0][CHAT] if self._rows else ""
        text = first[-1].get("content") if isinstance(first, list) and first else first
        return [
            ("rows", f"{len(self)} from {self.source or 'memory'}"),
            ("columns", ", ".join(self.columns)),
            ("first prompt", str(text_of(text))[:300]),
        ]


def made_of(rows: Sequence[dict[str, Any]], max_prompt_length: int | None, source: str) -> Rows:
    """Of records that are rows already."""
    made = Rows.__new__(Rows)
    made._fill(rows, max_prompt_length, source)
    return made


def convert(source: str | Path, target: str | Path, *, split: str, instruction: str = INSTRUCTION) -> int:
    """Write a jsonl file of GSM8K as parquet in verl's schema; returns the number of rows. Raises `DataError` as `to_row` does."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    records = read(Path(source))
    rows = [
        to_row(record, index=index, split=split, instruction=instruction, place=f"row {index} of {source}")
        for index, record in enumerate(records)
    ]
    if not rows:
        raise DataError(f"no rows in {source}")
    pq.write_table(pa.Table.from_pylist(rows), str(target), compression="zstd")
    return len(rows)
