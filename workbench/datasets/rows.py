"""`Rows`: prompts with their ground truths as a frozen value."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
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
from workbench.dataproto.core import DataProto, Origin
from workbench.datasets.pictures import IMAGES, text_of
from workbench.datasets.records import CHAT, Reading
from workbench.datasets.rendering import as_read, bounds, encode_rows, tokenizer_of
from workbench.datasets.report import Report, report, scorable


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
    parts: Mapping[str, Any] = field(default_factory=dict)
    """Of rows made of others (`mix`, `stages`, `growing`, …): the position of each."""

    def to_json(self) -> dict[str, Any]:
        """The cursor as a dict of plain values."""
        return {name: value for name, value in asdict(self).items() if name != "parts" or value}


Drawn = tuple[int, int | str]
"""A row's number, and which draw of it this is: an epoch, or a name."""
Fits = Callable[[list[dict[str, Any]]], None]


class Rows(Shown):
    """A list of rows in verl's schema: `prompt` (a chat), `data_source`, `reward_model`, `extra_info`, and more.

    `wb.rows(…)` makes it of anything; `Rows(…)` of an iterable of dicts or a DataFrame, whose columns are recognised in the same
    way. A missing cell (NaN) is None; a row whose prompt was a plain text has `prompt_is_text`: reward functions in TRL's
    style get a text for it. With `wb.rows(…, raw=True)` a prompt is a text itself.
    It is immutable: slicing, `select`, `filter` and `split` return new `Rows`, and every row is returned as a copy.
    `Rows` with equal content and `max_prompt_length` are equal.
    Raises `DataError` for a record that is no row, by row and column, and for a column whose name is reserved
    (`workbench.dataproto.columns`).

    Example:
        >>> rows = wb.rows("data/arith/train.parquet", max_prompt_length=128)  # doctest: +SKIP
        >>> train, held_out = rows.split(0.1)  # doctest: +SKIP
    """

    def __init__(self, rows: Any, *, max_prompt_length: int | None = None, source: str = "") -> None:
        found, read_as = Reading().read(rows, source)
        self._fill(found, max_prompt_length, source, read_as)

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
        return made_of(rows, self.max_prompt_length, self.source, self.read_as)

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
            do = (
                f"hold out fewer: a number from 1 to {len(groups) - 1}, or a share below 1"
                if len(groups) > 1
                else "add prompts"
            )
            raise DataError("split into training and held-out rows", expected="rows on both sides", found=found, do=do)
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

    @property
    def raw(self) -> bool:
        """Whether prompts are bare texts, which a model reads without its chat template."""
        return any(isinstance(row[CHAT], str) for row in self._rows)

    def report(self, tokenizer: Any = None, *, reward: Any = None, **switches: Any) -> Report:
        """Check rows before a run: columns and what they were read as, missing answers, repeated prompts.

        With a `tokenizer` also prompt lengths, and the first prompt exactly as the model reads it; `switches` are variables
        of its chat template. With a `reward` how many truths can ever be right under it; raises `DataError` where none can.
        """
        lengths = self.prompt_lengths(tokenizer, **switches) if tokenizer is not None else []
        made = report(self._rows, self.columns, lengths, self.max_prompt_length)
        first = (
            ""
            if tokenizer is None or not self._rows
            else as_read(tokenizer, self._rows[0][CHAT], self._rows[0].get(IMAGES), **switches)
        )
        judged = "" if reward is None else scorable(self._rows, reward)
        return replace(made, read_as=self.read_as, first=first, template=self._template(tokenizer), scorable=judged)

    def _template(self, tokenizer: Any) -> str:
        if tokenizer is None:
            return ""
        if self.raw:
            return "not used: the prompts are bare texts (raw=True)"
        there = getattr(tokenizer_of(tokenizer), "chat_template", None)
        return "the tokenizer's own" if there else "none: the model reads the messages' texts, one a line"

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
        """Numbers of the rows whose prompts may have more tokens than `limit`; found from their characters, unrendered."""
        most = bounds(tokenizer, [row[CHAT] for row in self._rows], **switches)
        return [index for index, tokens in enumerate(most) if tokens > limit]

    # --- batches ------------------------------------------------------------------------------

    def batch(self, size: int, step: int = 1, seed: int = 0) -> DataProto:
        """The `size` prompts that training sees at `step` (from 1); the same arguments always give the same prompts."""
        epoch, start = place(len(self), size, step)
        indices = permutation(len(self), seed, epoch)[start : start + size]
        return self._batch([(index, epoch) for index in indices], step=step, epoch=epoch, seed=seed)

    def further(self, size: int, step: int, seed: int = 0, attempt: int = 1) -> DataProto:
        """`size` more prompts for a step (dynamic sampling), chosen by the arguments alone; may repeat the epoch's."""
        size = min(size, self._span)
        indices = self._further(size, step, derive(seed, "further", step, attempt))
        epoch, _ = place(self._span, size, step)
        draws = [(index, f"{step}.{attempt}") for index in indices]
        return self._batch(draws, step=step, epoch=epoch, seed=seed)

    def in_order(self, size: int, seed: int = 0) -> Iterator[DataProto]:
        """Yields all rows in order in batches of `size` for evaluation; the last may be shorter. The batches' step is 0."""
        for start in range(0, len(self), size):
            indices = range(len(self))[start : start + size]
            yield self._batch([(index, 0) for index in indices], step=0, epoch=0, seed=seed)

    def cursor(self, step: int, batch_size: int, seed: int) -> Cursor:
        """The data position after `step` training steps."""
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
        """Rows of an epoch."""
        return len(self)

    def __add__(self, other: Rows) -> Rows:
        """The rows of both, one data set: `a + b`. For shares that do not follow the sizes take `wb.datasets.mix`."""
        if not isinstance(other, Rows):
            return NotImplemented
        source = " + ".join(one.source or "memory" for one in (self, other))
        return made_of((*self._rows, *other._rows), common_limit((self, other)), source)

    def _drawn(self, asks: np.ndarray, seed: int) -> list[Drawn]:
        """The rows of the last of some steps, in an endless order of epochs. `asks` [K, 2]: step, rows that it takes."""
        start, count = int(asks[:-1, 1].sum()), int(asks[-1, 1])
        places = [divmod(place, len(self)) for place in range(start, start + count)]
        orders = {epoch: permutation(len(self), seed, epoch) for epoch, _ in places}
        return [(orders[epoch][offset], epoch) for epoch, offset in places]

    def _position(self, asks: np.ndarray, seed: int) -> dict[str, Any]:
        """The position after these steps, as plain values for the cursor."""
        epoch, offset = divmod(int(asks[:, 1].sum()), len(self))
        return {"epoch": epoch, "offset": offset}

    def _further(self, size: int, step: int, seed: int) -> list[int]:
        """At most `size` row numbers for `further`."""
        return permutation(len(self), seed, 0)[:size]

    # --- during a run: rows that change with what a run does have their own (`workbench.datasets.feedback`) -------

    def check_steps(self, size: int, steps: int, seed: int) -> None:
        """Raise `DataError` where there are no prompts for all these steps: plain rows begin again."""

    def restore(self, folder: Path, step: int, *, ahead: int = 0, fits: Fits | None = None) -> list[Path]:
        """Be as after a step of the run in `folder`; returns the files that the rows keep there: of plain rows none.

        `ahead`: steps that rows are sampled ahead; `fits` raises `DataError` for a prompt that the model cannot take.
        """
        return []

    def learn(self, step: int, batches: Sequence[DataProto]) -> dict[str, float]:
        """Take in what a step left behind: its scored batch, and its last one. Returns metrics."""
        return {}

    def record(self) -> None:
        """Write what was learned to disk."""

    # --- looking ------------------------------------------------------------------------------

    def __repr__(self) -> str:
        named = dict(self.lines())
        said = f"\n  {named['read as']}" if "read as" in named else ""
        kind = type(self).__name__
        return f"{kind}({named['rows']}; columns {named['columns']}){said}\n  first: {named['first prompt'][:100]!r}"

    def lines(self) -> list[tuple[str, str]]:
        """(label, value) pairs for display: how many rows, what their columns were read as, the first prompt."""
        first = self._rows[0][CHAT] if self._rows else ""
        text = first[-1].get("content") if isinstance(first, list) and first else first
        return [
            ("rows", f"{len(self)} from {self.source or 'memory'}"),
            *([("read as", self.read_as)] if self.read_as else []),
            ("columns", ", ".join(self.columns)),
            ("first prompt", str(text_of(text))[:300]),
        ]


def common_limit(parts: Sequence[Rows]) -> int | None:
    """The one `max_prompt_length` of all that have one. Raises `DataError` where they differ."""
    limits = sorted({part.max_prompt_length for part in parts if part.max_prompt_length is not None})
    if len(limits) > 1:
        do = "make them with one: wb.rows(…, max_prompt_length=…)"
        raise DataError("max_prompt_length of rows to join", expected="the same in all", found=limits, do=do)
    return limits[0] if limits else None


def made_of(rows: Sequence[dict[str, Any]], max_prompt_length: int | None, source: str, read_as: str = "") -> Rows:
    """Of records that are rows already."""
    made = Rows.__new__(Rows)
    made._fill(rows, max_prompt_length, source, read_as)
    return made
