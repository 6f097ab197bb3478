"""Rows that change during a run: `growing` adds new rows, `adaptive` draws rows less often that are too easy or too
hard.

What they learn from a step is in a jsonl file of the run's folder, each line with its step (`data_step`) and checksum, synced before the
step's checkpoint. The rows of a step are a function of (seed, step, lines of the steps before), so a run that was killed and
resumed draws what it would have drawn: the file is cut to the checkpoint's step, and refused where a hash of its lines is
not the one in the checkpoint's cursor.
"""

from __future__ import annotations

import bisect
import hashlib
import json
import logging
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from workbench.base.errors import DataError, boundary, describe, first_line
from workbench.base.files import fsync, sealed
from workbench.base.seeds import derive
from workbench.dataproto.core import DataProto, is_last
from workbench.datasets.files import parse
from workbench.datasets.mixing import Composite, check_part, shuffled, spread_offsets, with_sizes
from workbench.datasets.records import CHAT, Reading, has_answer
from workbench.datasets.rows import Drawn, Fits, Rows, permutation

log = logging.getLogger("workbench")

STEP = "data_step"
"""Key of the step in a line of the rows' jsonl file."""


class RecordedRows(Composite):
    """Rows that change with what a run's steps showed, and keep it in a jsonl file of the run's folder.

    Subclasses define which lines a step gives (`_lines`) and what a line changes (`_take`).
    """

    learns = True

    def __init__(self, base: Rows, file: str) -> None:
        path = Path(file)
        if path.suffix != ".jsonl" or path.name in ("metrics.jsonl", *getattr(base, "_files", ())):
            expected = "a name that ends in .jsonl and that the run has no other file of"
            raise DataError("file= of adaptive or growing rows", expected=expected, found=repr(file))
        self._base, self._file = base, path
        super().__init__([base], base._rows, base.source)
        self._files = (path.name, *getattr(base, "_files", ()))
        self._path: Path | None = None
        self._fits: Fits | None = None
        self._lag = 0
        self._marks: list[tuple[int, str]] = []
        """For each line of the file: its step, and a hash of all lines up to this one."""
        self._unwritten: list[str] = []

    def _take(self, step: int, line: dict[str, Any]) -> None:
        raise NotImplementedError(f"{type(self).__name__} does not define this hook of RecordedRows")

    def _lines(self, step: int, batches: Sequence[DataProto], counts: Counter[str]) -> Iterator[dict[str, Any]]:
        raise NotImplementedError(f"{type(self).__name__} does not define this hook of RecordedRows")

    def _forget(self) -> None:
        raise NotImplementedError(f"{type(self).__name__} does not define this hook of RecordedRows")

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns, which the steps of a run do not change."""
        return self._base.columns

    @property
    def _span(self) -> int:
        return self._base._span

    def check_steps(self, size: int, steps: int, seed: int) -> None:
        """Raise `DataError` where the rows from before the run have no prompts for all these steps."""
        self._base.check_steps(size, steps, seed)

    def restore(self, folder: Path, step: int, *, ahead: int = 0, fits: Fits | None = None) -> list[Path]:
        """Restore the state after a step of the run in `folder`, from the lines of its file up to that step; return the
        file's path.

        Nothing is changed on disk. Raises `DataError` for a file outside the folder, and for lines that cannot be read.
        """
        files = self._base.restore(folder, step, ahead=ahead, fits=fits)
        path = folder / self._file if self._file.parent == Path() else self._file
        if path.resolve().parent != folder.resolve():
            do = f"give the name alone: {self._file.name!r}"
            what, expected = "file= of adaptive or growing rows", f"in the run's folder {folder}"
            raise DataError(what, expected=expected, found=str(self._file), do=do)
        self._path, self._lag, self._fits = path, ahead, fits
        self._marks, self._unwritten = [], []
        self._forget()
        *lines, _torn = path.read_text(encoding="utf-8", errors="replace").split("\n") if path.is_file() else [""]
        for number, text in enumerate(lines, 1):
            line = parse(text.encode(), f"{path}:{number}")
            if not isinstance(line, dict) or not isinstance(line.get(STEP), int):
                raise DataError(f"{path}:{number}", expected=f"an object with a {STEP}", found=describe(line))
            if line[STEP] <= step:
                with boundary(f"{path}:{number}", DataError):
                    self._add(line)
        self._rows = self._present()
        return [*files, path]

    def learn(self, step: int, batches: Sequence[DataProto]) -> dict[str, float]:
        """Update the rows from a step's scored batches; `record` writes the update to disk. Returns metrics."""
        metrics, counts = self._base.learn(step, batches), Counter[str]()
        for line in self._lines(step, batches, counts):
            self._unwritten.append(self._add({STEP: step, **line}))
        self._rows = self._present()
        return {**metrics, **{f"data/{name}": float(number) for name, number in counts.items()}}

    def record(self) -> None:
        """Append the updates since the last call to the file, and wait until they are on the disk; without a run there
        is no file."""
        self._base.record()
        if self._path is not None and self._unwritten:
            new = not self._path.exists()
            with self._path.open("a", encoding="utf-8") as file:
                file.write("".join(f"{sealed(line)}\n" for line in self._unwritten))
                file.flush()
                os.fsync(file.fileno())
            if new:
                fsync(self._path.parent)
        self._unwritten = []

    def _add(self, line: dict[str, Any]) -> str:
        text = json.dumps(line, allow_nan=False)
        before = self._marks[-1][1] if self._marks else ""
        self._marks.append((line[STEP], hashlib.blake2b((before + text).encode(), digest_size=8).hexdigest()))
        self._take(line[STEP], line)
        return text

    def _present(self) -> tuple[dict[str, Any], ...]:
        return self._base._rows

    def _known(self, asks: np.ndarray) -> dict[str, Any]:
        """Return, for the cursor, how many lines the file has up to the last of these steps, and their hash."""
        step = int(asks[-1, 0]) if len(asks) else 0
        lines = bisect.bisect_right(self._marks, step, key=lambda mark: mark[0])
        return {self._file.name: {"lines": lines, "hash": self._marks[lines - 1][1] if lines else ""}}


# --- rows that grow -------------------------------------------------------------------------------


class Growing(RecordedRows):
    """Rows to which a run adds new ones: see `growing`."""

    def __init__(self, base: Rows, file: str, max_rows: int, on_bad_row: str) -> None:
        super().__init__(base, file)
        self._settings: dict[str, Any] = {"file": file, "max_rows": max_rows, "on_bad_row": on_bad_row}
        self._max_rows, self._raises = max_rows, on_bad_row == "raise"
        self._answered = all(map(has_answer, base._rows))
        self._forget()

    def _with(self, parts: Sequence[Rows]) -> Rows:
        return growing(parts[0], **self._settings)

    def _identity(self) -> tuple[Any, ...]:
        return (self._max_rows,)

    def _forget(self) -> None:
        self._grown: list[dict[str, Any]] = []
        self._made: list[int] = []
        """For each added row: the step that made it."""
        self._prompts = {_chat_key(row) for row in self._base._rows}

    def _take(self, step: int, line: dict[str, Any]) -> None:
        row = {name: value for name, value in line.items() if name != STEP}
        self._grown.append(row)
        self._made.append(step)
        self._prompts.add(_chat_key(row))

    def _present(self) -> tuple[dict[str, Any], ...]:
        return (*self._base._rows, *self._grown)

    # --- what a step adds -----------------------------------------------------------------------

    def _lines(self, step: int, batches: Sequence[DataProto], counts: Counter[str]) -> Iterator[dict[str, Any]]:
        counts.update(dict.fromkeys(("new_rows", "new_rows_refused", "new_rows_repeated"), 0))
        for record, parent in _offered(batches):
            try:
                row = self._check_new_row(record, parent, f"a new_row of step {step}")
                repeated = _chat_key(row) in self._prompts
                if not repeated and self._fits is not None:
                    self._fits(row[CHAT])
            except DataError as error:
                if self._raises:
                    raise
                counts["new_rows_refused"] += 1
                log.warning("left out: %s", error)
                continue
            if repeated:
                counts["new_rows_repeated"] += 1
            elif len(self._grown) >= self._max_rows:
                counts["new_rows_above_max"] += 1
            else:
                counts["new_rows"] += 1
                yield row
        counts["grown"] = len(self._grown)

    def _check_new_row(self, record: Any, parent: Mapping[str, Any], place: str) -> dict[str, Any]:
        """Return a new row as it will be read from the file; a missing `data_source` or `data_part` is copied from its
        parent row."""
        ((row,), read_as) = Reading(data_source=parent.get("data_source") or "rows").read([record], place)
        try:
            row = json.loads(json.dumps(row, allow_nan=False))
        except (TypeError, ValueError) as cause:
            raise DataError(f"{place} cannot be written as JSON", found=first_line(cause)) from cause
        read = {part.partition(" → ")[0] for part in read_as.split("; ")}
        became = {"prompt_is_text", *read} - {CHAT, "reward_model"}
        row = {name: value for name, value in row.items() if name in self.columns or name not in became}
        for name in ("data_source", "data_part"):
            if name in parent and row.get(name) is None:
                row[name] = parent[name]
        if strange := sorted(row.keys() - set(self.columns) - {"data_source", "reward_model", "extra_info"}):
            expected = f"columns that the other rows have: {', '.join(self.columns)}"
            raise DataError(f"columns of {place}", expected=expected, found=", ".join(strange))
        if self._answered and not has_answer(row):
            expected = "reward_model.ground_truth, as all other rows have"
            raise DataError(f"{place} has no ground truth", expected=expected)
        return row

    # --- what a step draws ----------------------------------------------------------------------

    def _shares(self, asks: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
        """Return for each step how many grown rows it may draw from, [K], and how many of them it draws, [K]: in
        proportion to all rows."""
        there = np.searchsorted(np.array(self._made, dtype=np.int64), asks[:, 0] - self._lag, side="left")
        exact = asks[:, 1] * there / (len(self._base) + there) + spread_offsets(len(asks), derive(seed, "grown"))
        return there, np.minimum(np.floor(exact).astype(np.int64), there)

    def _drawn(self, asks: np.ndarray, seed: int) -> list[Drawn]:
        there, new = self._shares(asks, seed)
        drawn = self._base._drawn(with_sizes(asks, asks[:, 1] - new), seed)
        if not new[-1]:
            return drawn
        chosen = permutation(int(there[-1]), derive(seed, "grown", len(asks)), 0)[: int(new[-1])]
        drawn += [(len(self._base) + index, f"grown {len(asks)}") for index in chosen]
        return shuffled(drawn, derive(seed, "mixed"), len(asks))

    def _position(self, asks: np.ndarray, seed: int) -> dict[str, Any]:
        _, new = self._shares(asks, seed)
        return {"base": self._base._position(with_sizes(asks, asks[:, 1] - new), seed), **self._known(asks)}

    def _further(self, size: int, step: int, seed: int) -> list[int]:
        there, new = (int(one[0]) for one in self._shares(np.array([[step, size]]), seed))
        chosen = permutation(there, derive(seed, "grown"), 0)[:new]
        return [*self._base._further(size - new, step, seed), *(len(self._base) + index for index in chosen)]


def _chat_key(row: Mapping[str, Any]) -> str:
    return json.dumps(row[CHAT], sort_keys=True, default=str)


def _offered(batches: Sequence[DataProto]) -> Iterator[tuple[Any, Mapping[str, Any]]]:
    """Yield (new row, columns of the row that it came from), of a reward's `new_row` and of a stage's column; each
    once."""
    for column in ("reward_extra/new_row", "new_row"):
        before: set[str] = set()
        for objects in (batch.non_tensor_batch for batch in batches if column in batch):
            names = [name for name in ("data_source", "data_part") if name in objects]
            for number, cell in enumerate(objects[column]):
                parent = {name: objects[name][number] for name in names}
                records = cell if isinstance(cell, list | tuple) else [cell]
                yield from ((record, parent) for record in records if record and objects["uid"][number] not in before)
            before |= set(objects["uid"])


def growing(rows: Rows, file: str = "grown.jsonl", *, max_rows: int = 10_000, on_bad_row: str = "leave_out") -> Rows:
    """Make rows that grow while a run trains: by what a reward returns as `new_row`, or a stage writes into a column
    `new_row`.

    A new row is a dict as a data file has it (or a list of them): a prompt, and a ground truth where all other rows
    have one; its `data_source` is by default that of the row whose response made it. It is drawn from the next step on
    (with `ahead=1` from the one after), in proportion: with 900 rows and 100 new ones a tenth of each batch is new. A
    prompt that is there already is not taken again. Metrics: `data/new_rows`, `data/grown`, `data/new_rows_refused`, ….

    Args:
        rows: plain rows, a `mix` or `stages`; they are drawn in their own order.
        file: name of a file in the run's folder; `wb.rows` can read it, too.
        max_rows: most new rows; further ones are left out, and counted.
        on_bad_row: `"leave_out"` names a row that cannot be read or is too long in the log; `"raise"` ends the run.

    Example:
        >>> def reward(response, ground_truth):
        ...     right = response.strip() == ground_truth
        ...     harder = {"prompt": f"{ground_truth} + {ground_truth} =", "reward_model": {"ground_truth": str(2 *
        int(ground_truth))}}
        ...     return {"score": float(right), "new_row": harder if right else None}
        >>> rows = wb.datasets.growing(rows)  # doctest: +SKIP
    """
    check_part(rows, "rows to grow")
    if not isinstance(max_rows, int) or isinstance(max_rows, bool) or max_rows < 1:
        raise DataError("max_rows of growing rows", expected="a whole number ≥ 1", found=max_rows)
    if on_bad_row not in ("leave_out", "raise"):
        raise DataError("on_bad_row of growing rows", expected="'leave_out' or 'raise'", found=repr(on_bad_row))
    return Growing(rows, file, max_rows, on_bad_row)


# --- rows that are drawn by what they teach -------------------------------------------------------


class Adaptive(RecordedRows):
    """Rows that are drawn less often while their recent mean reward is outside a band: see `adaptive`."""

    def __init__(self, base: Rows, **settings: Any) -> None:
        super().__init__(base, settings["file"])
        self._settings = settings
        self._low, self._high = settings["low"], settings["high"]
        self._forget()

    def _with(self, parts: Sequence[Rows]) -> Rows:
        return adaptive(parts[0], **self._settings)

    def _identity(self) -> tuple[Any, ...]:
        return tuple(sorted((name, value) for name, value in self._settings.items() if name != "file"))

    def _forget(self) -> None:
        self._seen: dict[int, list[tuple[int, float]]] = {}
        """Row → list of (step, the row's mean reward in this step)."""
        self._sure: dict[int, list[tuple[int, list[int]]]] = {}
        """Seed → of each step its size, and what it asks of the base in turn; of steps whose past is known."""

    def _take(self, step: int, line: dict[str, Any]) -> None:
        for row, mean in line["rewards"].items():
            self._seen.setdefault(int(row), []).append((step, float(mean)))

    def _lines(self, step: int, batches: Sequence[DataProto], counts: Counter[str]) -> Iterator[dict[str, Any]]:
        for known in self._sure.values():
            del known[step + self._lag :]  # drawn before this was known
        means = _means(batches)
        if means:
            yield {"rewards": {str(row): mean for row, mean in sorted(means.items())}}
        counts["rows_seen"] = len(self._seen)
        counts["rows_outside"] = sum(not self._inside(row, step + 1 + self._lag) for row in self._seen)

    def mean_rewards(self) -> list[float | None]:
        """Return for each row the mean of its last rewards; None for a row that has not been drawn."""
        return [self._mean(row, None) for row in range(len(self))]

    def _mean(self, row: int, step: int | None) -> float | None:
        """Return a row's mean reward over the last `window` times that it was drawn before `step` (None: until now).

        For a row that was not drawn before it is the value in the settings' `column`, or None.
        """
        seen = self._seen.get(row, [])
        past = seen if step is None else seen[: bisect.bisect_left(seen, (step - self._lag,))]
        if past:
            last = [mean for _, mean in past[-self._settings["window"] :]]
            return sum(last) / len(last)
        known = self._rows[row].get(self._settings["column"]) if self._settings["column"] else None
        return None if known is None else float(known)

    def _inside(self, row: int, step: int) -> bool:
        mean = self._mean(row, step)
        return mean is None or self._low <= mean <= self._high

    def _accepted(self, row: int, step: int, seed: int, draw: int | str) -> bool:
        chance: float = self._settings["outside"]
        return self._inside(row, step) or derive(seed, "outside", row, draw) < chance * 2**63

    def _with_retries(self, asks: np.ndarray, seed: int) -> tuple[np.ndarray, list[Drawn]]:
        """Replay the steps `asks`, [K, 2], with their draws of further rows.

        Returns (all draws from the base rows, [M, 2] of step and number of rows, and the rows of the last step).
        """
        known = self._sure.setdefault(seed, [])
        same = [size == tried for (_, size), (tried, _) in zip(asks.tolist(), known, strict=False)]
        del known[same.index(False) if False in same else len(asks) :]
        done = known[: max(len(asks) - 1, 0)]
        past = [(step, size) for (step, _), (_, sizes) in zip(asks.tolist(), done, strict=False) for size in sizes]
        every, last = np.array(past, dtype=np.int64).reshape(-1, 2), list[Drawn]()
        for step, size in asks[len(done) :].tolist():
            before = len(every)
            every, last = self._step(every, step, size, seed)
            if len(known) < len(asks):
                known.append((size, every[before:, 1].tolist()))
        return every, last

    def _step(self, every: np.ndarray, step: int, size: int, seed: int) -> tuple[np.ndarray, list[Drawn]]:
        """Choose the rows of one step: draw from the base rows, pass over rows outside the band, and draw again for as
        many as are missing.

        Returns (`every`, the draws so far, with this step's draws appended, and the rows). After `_TURNS` draws the
        passed-over rows fill the batch.
        """
        chosen, passed, again, there = list[Drawn](), list[Drawn](), list[Drawn](), set[int]()
        for _ in range(_TURNS):
            if len(chosen) == size:
                break
            every = np.append(every, [[step, size - len(chosen)]], axis=0)
            for row, draw in self._base._drawn(every, seed):
                kind = again if row in there else chosen if self._accepted(row, step, seed, draw) else passed
                kind.append((row, draw))
                there.add(row)
        return every, [*chosen, *passed, *again][:size]

    def _drawn(self, asks: np.ndarray, seed: int) -> list[Drawn]:
        return self._with_retries(asks, seed)[1]

    def _position(self, asks: np.ndarray, seed: int) -> dict[str, Any]:
        return {"base": self._base._position(self._with_retries(asks, seed)[0], seed), **self._known(asks)}

    def _further(self, size: int, step: int, seed: int) -> list[int]:
        drawn = self._base._further(4 * size, step, seed)
        return sorted(drawn, key=lambda row: not self._accepted(row, step, seed, "further"))[:size]

    def _batch(self, drawn: Sequence[Drawn], *, step: int, epoch: int, seed: int) -> DataProto:
        batch = super()._batch(drawn, step=step, epoch=epoch, seed=seed)
        return batch.with_columns({"data_row": [row for row, _ in drawn]}, origin=batch.origins["uid"])


_TURNS = 16
"""How often a step asks for further rows in place of those that it passed over; then it takes these."""


def _means(batches: Sequence[DataProto]) -> dict[int, float]:
    """Average the rewards of each row's scored responses: row → mean; a prompt that is in two batches counts in the
    first."""
    rewards: dict[int, list[float]] = {}
    before: set[str] = set()
    for batch in batches:
        scored_once = (batch["scored"] & is_last(batch)).tolist()
        here = zip(batch["uid"], batch["data_row"], batch["reward"].tolist(), scored_once, strict=True)
        for uid, row, reward, scored in here:
            if scored and uid not in before:
                rewards.setdefault(int(row), []).append(reward)
        before |= set(batch["uid"])
    return {row: sum(values) / len(values) for row, values in rewards.items()}


def adaptive(
    rows: Rows,
    *,
    low: float = 0.1,
    high: float = 0.9,
    outside: float = 0.1,
    window: int = 1,
    column: str | None = None,
    file: str = "difficulty.jsonl",
) -> Rows:
    """Make an adaptive curriculum: rows whose recent mean reward is outside [low, high] are drawn less often.

    Rows are taken in their order; a row whose mean is outside is passed over, except by a seeded chance, and the next
    one is taken in its place. Where nearly all are outside, a step takes rows that it passed over. Metrics:
    `data/rows_seen`, `data/rows_outside`; `rows.mean_rewards()` has the means.

    Args:
        rows: plain rows, a `mix`, `stages`, or `growing` rows.
        low, high: the band of mean rewards, both included.
        outside: the chance with which a row outside the band is taken all the same.
        window: how many of the row's latest draws the mean is over.
        column: a column with a mean reward that is known beforehand, for rows that have not been drawn yet.
        file: name of a file in the run's folder, which has each step's mean rewards by row number.

    Example:
        >>> rows = wb.datasets.adaptive(rows, low=.1, high=.9)  # doctest: +SKIP
    """
    if not isinstance(rows, Growing):
        check_part(rows, "rows to adapt")
    if not -np.inf < low < high < np.inf:
        raise DataError("band of adaptive rows' mean rewards", expected="low < high", found=f"{low} to {high}")
    if not 0 <= outside <= 1:
        raise DataError("argument outside (the chance of a row outside the band)", expected="0 to 1", found=outside)
    if not isinstance(window, int) or isinstance(window, bool) or window < 1:
        raise DataError("window of adaptive rows", expected="a whole number ≥ 1", found=window)
    if column is not None:
        strange = next((value for value in rows.values(column) if not isinstance(value, int | float | None)), None)
        if column not in rows.columns or strange is not None:
            found = "no such column" if column not in rows.columns else describe(strange)
            raise DataError(f"column {column!r} of mean rewards", expected="numbers", found=found)
    return Adaptive(rows, low=low, high=high, outside=outside, window=window, column=column, file=file)
