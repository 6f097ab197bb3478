"""`Rows`: prompts and what they are judged by, as a frozen value."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from workbench.columns import COLUMNS
from workbench.dataproto import DataProto, Origin
from workbench.datasets.order import Cursor, permutation, place
from workbench.datasets.report import Report, report
from workbench.datasets.templates import encode
from workbench.errors import DataError, describe, message
from workbench.seeds import derive

CHAT = "prompt"
_RESERVED = frozenset({"raw_prompt", "uid"} | {name for name, one in COLUMNS.items() if one.writer != "dataset"})
"""Names that a data set may not bring: stages write them, or the batch does (`prompt` becomes `raw_prompt`)."""


class Rows:
    """A list of rows in verl's schema: `prompt` (a chat), `data_source`, `reward_model`, `extra_info`, and more.

    Nothing changes it: slicing, `select`, `filter` and `split` give new ones, and a row is handed out as a copy.
    Equal rows with the same limit are equal.
    Raises `DataError` for a column whose name is reserved (`workbench.columns`).
    """

    def __init__(
        self, rows: Sequence[dict[str, Any]], *, max_prompt_length: int | None = None, source: str = ""
    ) -> None:
        self._rows = tuple(rows)
        self.max_prompt_length = max_prompt_length
        self.source = source
        taken = [name for name in self.columns if name in _RESERVED]
        if taken:
            raise DataError(
                message(
                    f"columns of {source or 'the rows'}",
                    expected="names of their own, since a batch writes these itself",
                    found=", ".join(taken),
                    do=f"rename them, or leave them out: load(…, without={taken})",
                )
            )

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
        return Rows(rows, max_prompt_length=self.max_prompt_length, source=self.source)

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
            raise DataError(message("rows to select", expected=expected, found=describe(indices)))
        return self._like([self._rows[int(index)] for index in chosen])

    def filter(self, keep: Callable[[dict[str, Any]], bool]) -> Rows:
        """The rows for which `keep` is true."""
        return self.select([index for index, row in enumerate(self) if keep(row)])

    def split(self, held_out: int | float, seed: int = 0) -> tuple[Rows, Rows]:
        """(the rest, `held_out` rows): a number, or a share below 1; drawn by the seed, each in the old order.

        A prompt that stands in several rows goes to one side as a whole, so the held-out side, filled
        prompt by prompt, may be a few rows larger; the two share no prompt.
        Raises `DataError` where a side would be empty.
        """
        number = round(held_out * len(self)) if isinstance(held_out, float) and held_out < 1 else int(held_out)
        same: dict[str, list[int]] = {}
        for index, row in enumerate(self._rows):
            same.setdefault(json.dumps(row[CHAT], sort_keys=True, default=str), []).append(index)
        groups = list(same.values())
        taken: set[int] = set()
        for group in permutation(len(groups), seed, 0):
            if len(taken) < number:
                taken.update(groups[group])
        if not 0 < len(taken) < len(self):
            found = f"{held_out} of {len(self)} rows with {len(groups)} different prompts"
            raise DataError(message("split", expected="rows on both sides", found=found))
        rest = [index for index in range(len(self)) if index not in taken]
        return self.select(rest), self.select(sorted(taken))

    @cached_property
    def columns(self) -> tuple[str, ...]:
        """Names that any row has."""
        return tuple(dict.fromkeys(name for row in self._rows for name in row))

    @cached_property
    def data_hash(self) -> str:
        """Sixteen hex digits over the content."""
        digest = hashlib.blake2b(digest_size=8)
        for row in self._rows:
            digest.update(json.dumps(row, sort_keys=True, default=str).encode())
        return digest.hexdigest()

    # --- prompts ------------------------------------------------------------------------------

    def report(self, tokenizer: Any = None) -> Report:
        """Counts, columns, missing answers, duplicates, prompt lengths: the check before a run."""
        return report(self, tokenizer)

    def prompt_lengths(self, tokenizer: Any, **switches: Any) -> list[int]:
        """Tokens of each prompt under a model's template."""
        return [len(encode(tokenizer, row[CHAT], **switches)) for row in self._rows]

    def fitting(self, tokenizer: Any, *, overlong: str = "error", **switches: Any) -> Rows:
        """These rows with every prompt within `max_prompt_length`: refused by row number, or dropped.

        Raises `DataError` where `overlong="error"` and a prompt is longer, or where nothing is left.
        """
        if overlong not in ("error", "drop"):
            raise DataError(message("overlong", expected="'error' or 'drop'", found=repr(overlong)))
        limit = self.max_prompt_length
        if limit is None:
            return self
        lengths = self.prompt_lengths(tokenizer, **switches)
        long = [index for index, length in enumerate(lengths) if length > limit]
        if len(long) == len(self):
            raise DataError(
                message(
                    "every prompt is too long",
                    expected=f"at most {limit} tokens",
                    found=f"the shortest has {min(lengths)}",
                )
            )
        if long and overlong == "error":
            raise DataError(
                message(
                    f"{len(long)} of {len(self)} prompts are too long",
                    expected=f"at most {limit} tokens",
                    found=f"rows {long[:8]} with {[lengths[index] for index in long[:8]]}",
                    do="raise max_prompt_length, or take rows.fitting(tokenizer, overlong='drop')",
                )
            )
        kept = set(long)
        return self if not long else self.select([index for index in range(len(self)) if index not in kept])

    # --- batches ------------------------------------------------------------------------------

    def batch(self, size: int, step: int = 1, seed: int = 0) -> DataProto:
        """The `size` prompts that training sees at `step` (from 1) with this seed: a pure function of the three."""
        epoch, start = place(len(self), size, step)
        indices = permutation(len(self), seed, epoch)[start : start + size]
        return self._batch(indices, draw=epoch, step=step, epoch=epoch, seed=seed)

    def further(self, size: int, step: int, seed: int = 0, attempt: int = 1) -> DataProto:
        """`size` more prompts for a step (dynamic sampling): a pure function of the four; may repeat the epoch's own."""
        size = min(size, len(self))
        indices = permutation(len(self), derive(seed, "further", step, attempt), 0)[:size]
        epoch, _ = place(len(self), size, step)
        return self._batch(indices, draw=f"{step}.{attempt}", step=step, epoch=epoch, seed=seed)

    def in_order(self, size: int, seed: int = 0) -> Iterator[DataProto]:
        """All rows in order, `size` at a time, the last batch short: for evaluation. Their step is 0."""
        for start in range(0, len(self), size):
            indices = list(range(start, min(start + size, len(self))))
            yield self._batch(indices, draw=0, step=0, epoch=0, seed=seed)

    def cursor(self, step: int, batch_size: int, seed: int) -> Cursor:
        """Where training stands after `step` steps."""
        return Cursor.after(step, rows=len(self), data_hash=self.data_hash, seed=seed, batch_size=batch_size)

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
        (_, count), (_, columns), (_, first) = self._lines()
        return f"Rows({count}; columns {columns})\n  first: {first[:100]!r}"

    def _repr_html_(self) -> str:
        from workbench.views.html import pairs_table

        return pairs_table(self._lines())

    def _lines(self) -> list[tuple[str, str]]:
        first = self._rows[0][CHAT] if self._rows else ""
        text = first[-1].get("content") if isinstance(first, list) and first else first
        return [
            ("rows", f"{len(self)} from {self.source or 'memory'}"),
            ("columns", ", ".join(self.columns)),
            ("first prompt", str(text)[:300]),
        ]
