"""`Rows`: prompts and what they are judged by, as a frozen value."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from workbench.dataproto import DataProto, Origin
from workbench.datasets.order import Cursor, permutation, place
from workbench.datasets.report import Report, report
from workbench.datasets.templates import encode
from workbench.errors import DataError, message
from workbench.seeds import derive

CHAT = "prompt"
_RESERVED = {"prompt": "raw_prompt"}


class Rows:
    """A list of rows in verl's schema: `prompt` (a chat), `data_source`, `reward_model`, `extra_info`, and more.

    Nothing changes it: slicing, `filter` and `select` give new ones.
    """

    def __init__(
        self, rows: Sequence[dict[str, Any]], *, max_prompt_length: int | None = None, source: str = ""
    ) -> None:
        self._rows = tuple(rows)
        self.max_prompt_length = max_prompt_length
        self.source = source
        self._hash: str | None = None

    # --- a sequence ---------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self._rows)

    def __getitem__(self, key: Any) -> Any:
        return self._like(self._rows[key]) if isinstance(key, slice) else self._rows[key]

    def _like(self, rows: Sequence[dict[str, Any]]) -> Rows:
        return Rows(rows, max_prompt_length=self.max_prompt_length, source=self.source)

    def select(self, indices: Sequence[int]) -> Rows:
        """Some rows by number."""
        return self._like([self._rows[index] for index in indices])

    def filter(self, keep: Callable[[dict[str, Any]], bool]) -> Rows:
        """The rows for which `keep` is true."""
        return self._like([row for row in self._rows if keep(row)])

    @property
    def columns(self) -> tuple[str, ...]:
        """Names that any row has."""
        return tuple(dict.fromkeys(name for row in self._rows for name in row))

    @property
    def data_hash(self) -> str:
        """Sixteen hex digits over the content."""
        if self._hash is None:
            digest = hashlib.blake2b(digest_size=8)
            for row in self._rows:
                digest.update(json.dumps(row, sort_keys=True, default=str).encode())
            self._hash = digest.hexdigest()
        return self._hash

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

    def in_order(self, size: int, seed: int = 0) -> Iterator[DataProto]:
        """All rows in order, `size` at a time, the last batch short: for evaluation. Their step is 0."""
        for start in range(0, len(self), size):
            indices = list(range(start, min(start + size, len(self))))
            yield self._batch(indices, draw=0, step=0, epoch=0, seed=seed)

    def cursor(self, step: int, batch_size: int, seed: int) -> Cursor:
        """Where training stands after `step` steps."""
        return Cursor.after(step, rows=len(self), data_hash=self.data_hash, seed=seed, batch_size=batch_size)

    def _batch(self, indices: Sequence[int], *, draw: int, step: int, epoch: int, seed: int) -> DataProto:
        rows = [self._rows[index] for index in indices]
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
        first = self._rows[0][CHAT] if self._rows else ""
        text = first[-1]["content"] if isinstance(first, list) and first else str(first)
        return f"Rows({len(self)} from {self.source or 'memory'}; columns {', '.join(self.columns)})\n  first: {text[:100]!r}"
