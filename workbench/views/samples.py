"""The samples of a batch as a table with orders, filters and search, worst first; one in full; the groups of one prompt."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import numpy as np

from workbench.base.errors import unknown
from workbench.dataproto.core import DataProto
from workbench.datasets.pictures import IMAGES, Picture
from workbench.rewards.score import Status
from workbench.rewards.trials import span_of
from workbench.runs.evaluate import Evaluation
from workbench.stages.stage import LEFT_OUT
from workbench.views import document as doc
from workbench.views.prose import rendered
from workbench.views.rewards import BAD, CUT, extras, traceback, unfolding, verdict
from workbench.views.sample_table import batch_of, counted_reasons, gathered, left_out, object_at, samples_table

if TYPE_CHECKING:
    import pandas as pd

ORDERS = ("worst", "best", "surprising", "index")
Where: TypeAlias = "Mapping[str, Any] | Callable[[pd.DataFrame], Any] | None"


_BINS = 12
_FOLDED = ("step", "answer", "truth", "finish", "status", "why")


class SampleIndex:
    """The table of a batch's samples, made once, with its orders, filters and search.

    Sorting or filtering 10,000 rows takes milliseconds, the first search of their texts some tens of milliseconds.
    """

    def __init__(self, batch: DataProto) -> None:
        self.batch = batch
        self.frame = samples_table(batch)

    @cached_property
    def groups(self) -> pd.DataFrame:
        """The DataFrame that `groups(batch)` returns, one line per prompt, but with prompts in full."""
        rows = self._once.groupby("group", sort=True)
        wanted = {"prompt": ("prompt", "first"), "samples": ("group", "size"), "scored": ("reward", "count")}
        wanted |= {f"reward_{name}": ("reward", name) for name in ("mean", "std", "min", "max")}
        groups = rows.agg(**{name: source for name, source in wanted.items() if source[0] in self.frame})
        if "advantage" in self.frame:
            groups["advantage_range"] = rows["advantage"].max() - rows["advantage"].min()
        return groups.round(4)

    @cached_property
    def headline(self) -> str:
        """The batch in words: `64 samples · 24 right · 40 no answer · 3 of 8 groups have equal rewards`; "" before the
        reward stage.

        Where all rewards are 0 or 1, samples of reward 1 count as right; else the rewards' mean and range are shown. A
        group counts as equal where its scored samples all have one reward.
        """
        frame = self._once
        if "reward" not in frame or not len(frame):
            return ""
        reward = frame["reward"].dropna()
        counts = Counter(frame.get("status", [Status.SCORED] * len(reward)))
        parts = [f"{len(frame)} {'episode' if 'sequence' in frame else 'sample'}{'s' * (len(frame) != 1)}"]
        if not len(reward):
            parts.append("none scored")
        elif self.binary:
            right, scored = int(reward.sum()), counts[Status.SCORED]
            parts += [f"{right} right", *([f"{scored - right} wrong"] if scored > right else [])]
        else:
            mean, low, high = map(doc.number, (reward.mean(), reward.min(), reward.max()))
            parts.append(f"mean reward {mean} ({low} to {high})")
        parts += [f"{counts[one]} {one.replace('_', ' ')}" for one in Status if one != Status.SCORED and counts[one]]
        groups = self.groups[self.groups["scored"] > 1]
        if silent := int((groups["reward_min"] == groups["reward_max"]).sum()):
            parts.append(f"{silent} of {len(self.groups)} groups have equal rewards")
        return " · ".join(parts)

    @cached_property
    def bins(self) -> list[tuple[float, float, int]]:
        """A histogram of the rewards as (lowest, highest, count): one bin for each value where there are few values,
        else `_BINS` equal ones.
        """
        reward = self._once["reward"].dropna() if "reward" in self.frame else ()
        if not len(reward):
            return []
        values, counts = np.unique(reward, return_counts=True)
        if len(values) <= _BINS:
            return [(float(one), float(one), int(count)) for one, count in zip(values, counts, strict=True)]
        counts, edges = np.histogram(reward, bins=_BINS)
        return [(float(low), float(high), int(one)) for low, high, one in zip(edges, edges[1:], counts, strict=False)]

    @cached_property
    def binary(self) -> bool:
        """Whether all rewards are 0 or 1."""
        return all(low == high and low in (0.0, 1.0) for low, high, _ in self.bins)

    @cached_property
    def spans(self) -> dict[str, list[float]]:
        """The lowest and highest reward, advantage and number of tokens: the ends of their scales."""
        columns = {name: self.frame[name].dropna() for name in ("reward", "advantage", "tokens") if name in self.frame}
        return {name: [float(one.min()), float(one.max())] for name, one in columns.items() if len(one)}

    @cached_property
    def same(self) -> dict[str, str]:
        """Columns that the usual table leaves out because all rows have one value in them → that value, "" for none."""
        values = {name: self.frame[name].map(str).unique() for name in _FOLDED if name in self.frame}
        one = {name: found[0] for name, found in values.items() if len(found) == 1 < len(self.frame)}
        return {name: "" if value in ("None", "nan") else value for name, value in one.items()}

    @property
    def _once(self) -> pd.DataFrame:
        """One row for each episode: the last of its sequences."""
        return self.frame[self.frame["sequence"] == self.frame["sequences"]] if "sequence" in self.frame else self.frame

    @cached_property
    def _texts(self) -> list[str]:
        parts = [self.frame[name] for name in ("prompt", "response", "why", "answer") if name in self.frame]
        rows = zip(*parts, strict=True) if parts else [()] * len(self.frame)
        return ["\n".join("" if text is None else str(text) for text in row).casefold() for row in rows]

    @cached_property
    def surprise(self) -> np.ndarray:
        """How far each reward is from the mean reward of its prompt's other samples, [B] float64; NaN where there is
        none.
        """
        if "reward" not in self.frame:
            return np.full(len(self.frame), np.nan)
        reward = self.frame["reward"]
        once = self.frame.index.isin(self._once.index)
        extra = {"reward": reward.fillna(0.0) * once, "counted": (reward.notna() & once).astype(float)}
        rows = self.frame.assign(**extra).groupby("group")
        others = rows["counted"].transform("sum") - 1
        mean = (rows["reward"].transform("sum") - reward) / others.where(others > 0)
        return (reward - mean).abs().to_numpy()

    def select(self, order: str, *, where: Where = None, search: str = "", by_group: bool = False) -> np.ndarray:
        """Return the numbers of the rows that pass the filters, in order; arguments and errors are those of `samples`."""
        rows = np.flatnonzero(self._kept(where, search))
        rank = self._rank(order)[rows]
        if by_group:
            group = self.frame["group"].to_numpy()[rows]
            first = self._rank_of_groups(order)[group]
            return rows[np.lexsort((rank, group, first))]
        return rows[rank.argsort(kind="stable")]

    def _kept(self, where: Where, search: str) -> np.ndarray:
        kept = np.ones(len(self.frame), dtype=bool)
        if callable(where):
            kept &= np.asarray(where(self.frame), dtype=bool)
        else:
            for name, wanted in (where or {}).items():
                if name not in self.frame:
                    raise ValueError(unknown("column of the samples table", name, self.frame.columns))
                kept &= _matching(self.frame[name], wanted)
        if search:
            needle = search.casefold()
            kept &= np.fromiter((needle in text for text in self._texts), dtype=bool, count=len(self.frame))
        return kept

    def _rank(self, order: str) -> np.ndarray:
        """Return a sort key for each row, the smallest first. `worst` begins with rows whose scoring failed; unscored
        rows come last.
        """
        if order in ("worst", "best") and "reward" in self.frame:
            sign = 1 if order == "worst" else -1
            rank = (sign * self.frame["reward"]).fillna(float("inf"))
            if order == "worst" and "status" in self.frame:
                rank = rank.mask(self.frame["status"] == Status.INFRA_ERROR.value, float("-inf"))
            return rank.to_numpy()
        if order == "surprising":
            return np.nan_to_num(-self.surprise, nan=np.inf)
        name, descending = order.removeprefix("-"), order.startswith("-")
        if order in ORDERS or name == "row":
            return np.arange(len(self.frame)) * (-1 if descending else 1)
        if name not in self.frame:
            raise ValueError(unknown("sample order", order, (*ORDERS, *self.frame.columns)))
        ranks = self.frame[name].map(str) if self.frame[name].dtype == object else self.frame[name]
        return ranks.rank(method="dense", ascending=not descending, na_option="bottom").to_numpy()

    def _rank_of_groups(self, order: str) -> np.ndarray:
        name, sign = {"worst": ("reward_mean", 1), "best": ("reward_mean", -1), "surprising": ("reward_std", -1)}.get(
            order, ("", 1)
        )
        if name not in self.groups:
            return np.arange(len(self.groups))
        return np.nan_to_num(sign * self.groups[name].to_numpy(), nan=np.inf)


def _matching(column: pd.Series, wanted: Any) -> np.ndarray:
    if isinstance(wanted, tuple):
        low, high = wanted
        above, below = low is None or column >= low, high is None or column <= high
        return np.ones(len(column), dtype=bool) & above & below
    if isinstance(wanted, list | set | frozenset):
        return column.isin(list(wanted)).to_numpy()
    return (column == wanted).to_numpy()


# --- the views ----------------------------------------------------------------------------------------


def _tokens(row: Any) -> tuple[str, str]:
    """Return (number of tokens, finish reason) of a response as text; "" where one is not known."""
    number = row.get("tokens")
    return str(int(number)) if number is not None and number == number else "", row.get("finish") or ""


def group_line(index: SampleIndex, group: int) -> str:
    """Describe a group in one line: `8 samples · reward mean 0.25, std 0.46 · advantage range 2.7`."""
    numbers = index.groups.loc[group]
    parts = [doc.counted(int(numbers["samples"]), "sample")]
    if "reward_mean" in numbers:
        std = f", std {doc.number(numbers['reward_std'])}" if numbers["scored"] > 1 else ""
        parts += [f"reward mean {doc.number(numbers['reward_mean'])}{std}" if numbers["scored"] else "none scored"]
    parts += [f"advantage range {doc.number(numbers['advantage_range'])}"] if "advantage_range" in numbers else []
    return " · ".join(parts)


class SamplesView(doc.View):
    """The table that `samples(batch)` returns; in a live notebook it can be sorted, filtered, and rows can be picked."""

    remembered: ClassVar[Sequence[str] | None] = None
    """The columns that were last chosen in a live table; later views of the same kernel start with them."""

    def __init__(
        self,
        thing: Any,
        rows: int,
        order: str,
        by_group: bool,
        where: Where,
        search: str,
        columns: Sequence[str] | None = None,
        against: Any = None,
    ) -> None:
        self.thing = thing
        """The object whose samples are shown: a batch, trace, stepper, run, …"""
        self.index = SampleIndex(batch_of(thing))
        self.rows, self.order, self.by_group, self.where, self.search = rows, order, by_group, where, search
        self.against = thing if against is None and hasattr(thing, "history") else against
        known = ("row", *self.index.frame)
        for name in columns or ():
            if name not in known:
                raise ValueError(unknown("column of the samples table", name, known))
        kept = [name for name in self.remembered or () if name in known] if columns is None else list(columns)
        self.columns: list[str] | None = kept or None
        """Columns that are shown, by their names in `.frame`, in this order; None: the usual ones."""
        self.picked: int | None = None
        """The row that was last clicked in the live table."""
        self.rendered = False
        """Whether the live table shows texts as Markdown, LaTeX and code."""
        self.selected: np.ndarray = self.index.select(order, where=where, search=search, by_group=by_group)
        """Row numbers that pass the filters, in order; in a live notebook those that the table shows."""

    def choose(self, columns: Sequence[str]) -> None:
        """Show these columns, here and in views that this process makes later; [] shows the usual ones."""
        self.columns = type(self).remembered = list(columns) or None

    @property
    def batch(self) -> DataProto:
        """The batch whose rows are shown."""
        return self.index.batch

    @property
    def frame(self) -> pd.DataFrame:
        """The selected samples as a DataFrame, indexed by row."""
        return self.index.frame.iloc[self.selected]

    def to_pandas(self) -> pd.DataFrame:
        """Return the samples that pass the filters, in order, as a DataFrame indexed by row; for a live table as it is
        filtered now.
        """
        return self.frame

    @cached_property
    def left_out(self) -> SamplesView | None:
        """The step's rows that were filtered out, rejected, not scored or failed, each with the reason; None where
        there are none.

        The column `left_out` is the reason; `of_row` is the row's number where it is still among the samples.
        """
        left = [] if LEFT_OUT in self.index.frame else left_out(self.thing, self.index.batch, self.index.frame)
        if not left:
            return None
        made = SamplesView(gathered(left), self.rows, "index", self.by_group, None, "")
        made.columns = made.columns and [LEFT_OUT, *made.columns]
        return made

    def pictures(self, row: Any) -> list[Picture]:
        """Return the pictures of a row's prompt."""
        return object_at(self.index.batch, IMAGES, row) or []

    def row(self, number: int, rendered: bool = False, formulas: bool = False) -> SampleCard:
        """Show one sample in full, with the other samples of its prompt. Raises `IndexError` for a row that does not
        exist.

        `rendered` draws its texts as Markdown and code, and with `formulas` LaTeX as MathML, which only a trusted page
        keeps.
        """
        return SampleCard(self.index, number, rendered, formulas)

    def document(self) -> doc.Part:
        """Build the display: the first `rows` samples, three lines each; in HTML tables, one per group if `by_group`."""
        frame = self.frame.head(self.rows)
        more = [name for name in self.columns or () if name not in _TOLD]
        lines = [text for row, values in frame.iterrows() for text in _row_lines(row, values, self.pictures(row), more)]
        head = [self.index.headline] if self.index.headline else []
        other = self.left_out
        title = counted_reasons(other.index.frame[LEFT_OUT]) if other is not None else ""
        rest = len(self.frame) - len(frame)
        notes = [f"… {rest:,} more of {len(self.frame):,}: samples(…, rows={len(self.frame)})"] if rest else []
        notes += [f"{title}: see .left_out"] if title else []
        beneath = doc.Fold(title, lambda: other._page(other.frame.head(self.rows))) if other is not None else ()
        return doc.Either([*head, *lines, *notes], lambda: (doc.line(doc.bold(*head)), self._page(frame), beneath))

    def _page(self, frame: pd.DataFrame) -> doc.Part:
        shown = self._part(frame)
        if self.by_group or self.columns is None:  # a prompt is said once for neighbours
            neighbours = frame.groupby((frame["group"] != frame["group"].shift()).cumsum())
            shown = [(self._over(part["group"].iloc[0]), self._part(part)) for _, part in neighbours]
        if self.columns is None:
            shown = doc.faint(self._flexed(doc.small, doc.small("response"), doc.small("score"))), shown
        first = f", {self.order} first" if self.order != "index" else ""
        all_, selected = len(self.index.frame), len(self.frame)
        of = f"{all_} samples" if selected == all_ else f"{selected} (of {all_})"
        step = self.index.batch.meta_info.get("step")
        which = "" if step is None else f"step {step}: "
        return shown, doc.small(f"{which}{len(frame)} of {of}{first}")

    def _over(self, group: int) -> doc.Part:
        """Say which prompt the next samples have, and what its samples are together."""
        numbers = self.index.groups.loc[group]
        prompt = self._cell("prompt", group, numbers) if "prompt" in numbers else ""
        summary = doc.small(group_line(self.index, group)) if numbers["samples"] > 1 else ()
        cells = doc.bold(f"group {group}"), doc.Span(prompt, _WIDE), summary
        return doc.line(*cells, style=f"{_FLEX};margin-top:6px;background:rgba(128,128,128,.12)")

    def _part(self, part: pd.DataFrame) -> doc.Part:
        if self.columns is None:
            return [self._line(row, one) for row, one in part.iterrows()]
        rows = [[self._cell(name, row, one) for name in self.columns] for row, one in part.iterrows()]
        return doc.Table(self.columns, rows, most=len(part))

    def _line(self, number: Any, row: Any) -> doc.Part:
        """Show a sample as a line; on a narrow page its texts stand under its numbers."""
        response = thumbnails(self.pictures(number)), self._cell("response", number, {"response": _response(row)})
        place = filter(None, [row.get("finish", "") * ("finish" not in self.index.same), *_place(row)[1:]])
        judged = _judgement(row, object_at(self.index.batch, "score", number)), doc.small(", ".join(place))
        return self._flexed(lambda name: self._cell(name, number, row), response, judged)

    def _flexed(self, cell: Callable[[str], doc.Part], wide: doc.Part, narrow: doc.Part) -> doc.Part:
        widths = {"row": 2.5, "reward": 3.5 if self.index.binary else 8, "advantage": 5, "tokens": 3.5}
        known = (name for name in widths if name in ("row", *self.index.frame))
        cells = [doc.Span(cell(name), f"flex:none;width:{widths[name]}em;text-align:right") for name in known]
        return doc.line(*cells, doc.Span(wide, _WIDE), doc.Span(narrow, "flex:2 1 200px;min-width:0"), style=_FLEX)

    def _cell(self, name: str, number: Any, row: Any) -> doc.Part:
        """Make one cell: rewards as bars, advantages and rewards of 0 and 1 as chips, texts that unfold, short numbers."""
        value = number if name == "row" else row[name]
        if value is None or value != value:
            return "–"
        if name == "advantage" or (name == "reward" and self.index.binary):
            return doc.chip(_signed(value) if name == "advantage" else doc.number(value), value)
        if name == "reward":  # its bar is measured by all rows, as in the live table
            return doc.bar(abs(value) / max(*map(abs, self.index.spans[name]), 1e-9), doc.number(value), value >= 0)
        if isinstance(value, float | np.floating):
            return doc.number(value)
        text = str(value)
        if name not in ("response", "prompt") or (len(text) <= CUT and "\n" not in text):
            return doc.cut(text, 2 * CUT)
        return doc.Fold(doc.cut(text.replace("\n", " ⏎ "), CUT), doc.block(text))


_FLEX = "display:flex;flex-wrap:wrap;gap:2px 12px;padding:3px 8px;max-width:1100px;box-sizing:border-box;border-bottom:1px solid rgba(128,128,128,.15)"
_WIDE = "flex:3 1 240px;min-width:0"


def _signed(value: Any) -> str:
    return doc.number(value, "+" if value else "")


def counted_pictures(seen: Sequence[Picture]) -> str:
    """Describe pictures: `1 picture 64×48`, `2 pictures 64×48, 32×32`."""
    sizes = ", ".join(f"{one.width}×{one.height}" for one in seen)
    return f"{len(seen)} picture{'s' * (len(seen) > 1)} {sizes}"


def thumbnails(seen: Sequence[Picture]) -> doc.Part:
    """Show small copies of the first pictures of a prompt, in HTML; nothing in a terminal."""
    shown = [doc.Image(one.thumbnail, f"{one.width}×{one.height}") for one in seen[:_THUMBNAILS]]
    return [*shown, doc.BREAK] if shown else ()


_THUMBNAILS = 4


_TOLD = ("row", "group", "prompt", "response", "reward", "why", "tokens", "finish", LEFT_OUT)
"""Columns that a sample's lines have anyway."""


def _row_lines(number: Any, row: Any, seen: Sequence[Picture], more: Sequence[str]) -> list[str]:
    lines = [f"row {number} ({', '.join(_place(row))})".replace("\u00a0", " ")]
    if "reward" in row:
        lines.append(f"reward {doc.number(row['reward'])}" if row["reward"] == row["reward"] else "not scored")
    lines += [doc.one_line(row[LEFT_OUT])] if LEFT_OUT in row else []
    lines += [doc.one_line(row["why"])] if row.get("why") else []
    tokens, finish = _tokens(row)
    lines += [f"{tokens} tokens" + (f", {doc.one_line(finish)}" if finish else "")] if tokens else []
    lines += [counted_pictures(seen)] if seen else []
    lines += [
        f"{name} {doc.number(row[name])}" if isinstance(row[name], float) else f"{name} {doc.one_line(row[name])}"
        for name in more
    ]
    texts = [f"  {doc.one_line(row['prompt'])}"] if "prompt" in row else []
    return ["  ".join(lines), *texts, f"  → {doc.one_line(_response(row))}"]


def _place(row: Any) -> list[str]:
    """Describe the row's group, and where episodes are several rows its episode and sequence."""
    parts = [f"group\u00a0{int(row['group'])}", *([f"policy {row['policy']}"] if "policy" in row else [])]
    parts += [str(row[name]) for name in ("kept", "from_run") if row.get(name)]
    if "sequence" not in row:
        return parts
    return [*parts, f"episode {int(row['episode'])}", f"sequence {int(row['sequence'])} of {int(row['sequences'])}"]


def _response(row: Any) -> str:
    response = row.get("response")
    return "" if response is None else str(response)


def _judgement(row: Any, score: Any) -> doc.Part:
    if score is None:
        return doc.bold(doc.cut(row[LEFT_OUT], 2 * CUT), style=BAD) if LEFT_OUT in row else ""
    parts: list[doc.Part] = [doc.bold(doc.cut(row[LEFT_OUT], 2 * CUT), style=BAD)] if LEFT_OUT in row else []
    parts += [doc.cut(score.why, 2 * CUT)] if score.why else []
    if score.answer is not None:
        parts.append(("answer ", doc.bold(doc.cut(score.answer, 40)), f", truth {doc.cut(row.get('truth'), 40)}"))
    if score.parts:
        parts.append(", ".join(f"{name} {doc.number(value)}" for name, value in score.parts.items()))
    if not score.scored:
        parts.append(doc.bold(score.status.value, style=BAD))
    more = [(doc.bold(doc.cut(name, 60)), doc.block(text)) for name, text in extras(score)]
    return (
        doc.stacked(parts),
        doc.Fold(", ".join(score.extra), more) if more else (),
        [doc.Fold(name, doc.block(text)) for name, text in traceback(score)],
    )


def samples(
    thing: Any,
    rows: int = 8,
    order: str = "worst",
    by_group: bool = False,
    *,
    where: Where = None,
    search: str = "",
    columns: Sequence[str] | None = None,
    against: Any = None,
) -> SamplesView:
    """Show samples of a batch, trace, stepper or run, or the answers in rows (`run.best(…)`) or judged samples, as a table: `.to_pandas()` is the DataFrame, `.row(7)` one sample
    in full, `.left_out` the rows that were filtered out, rejected or failed.

    Args:
        rows: how many samples the printed or static table shows; a live table is that many rows high, up to the height of
            the window, and scrolls through all. `.frame` has all.
        order: `worst`, `best`, `surprising` (furthest from the mean reward of the prompt's other samples), `index`, or a
            column (`-tokens`: the largest first).
        by_group: keep the samples of a prompt together.
        where: column → a value, a list of values, or (low, high) with None for no bound; or a function of the frame.
        search: text that a row's prompt, response, answer or explanation must contain, in any case.
        columns: names of the frame's columns to show; by default the usual ones, or those last chosen in a live table.
        against: what a live table's `diff with…` has besides: a trace, stepper or batch of the same rows (under another reward,
            say), or a run, for the same prompt at its other steps.

    Raises `ValueError` for an order or a column that does not exist.

    Example:
        >>> wb.views.samples(s, order="best", where={"tokens": (100, None)})  # doctest: +SKIP
    """
    return SamplesView(thing, rows, order, by_group, where, search, columns, against)


def groups(thing: Any) -> pd.DataFrame:
    """Summarise each prompt of a batch, trace, stepper or run in a DataFrame, one line per prompt.

    Columns: `samples` and how many were `scored`; `reward_mean`, `reward_std` (n−1), `reward_min`, `reward_max`; the range of
    the advantages (`advantage_range`). A group whose range is 0 teaches GRPO nothing. Prompts are cut to one line.
    """
    frame = SampleIndex(batch_of(thing)).groups
    return frame.assign(prompt=list(map(doc.one_line, frame["prompt"]))) if "prompt" in frame else frame


THOUGHT = "</think>"
MARK = "background:rgba(191,135,0,0.35);padding:1px 2px"
_SIBLINGS, _CHIP = 16, 44
"""Most samples of the prompt that are shown, and characters of a fact beside the row's name."""


class SampleCard(doc.View):
    """One sample in full, as `samples(batch).row(7)` returns it. Raises `IndexError` for a row that does not exist."""

    def __init__(self, index: SampleIndex, row: int, rendered: bool = False, formulas: bool = False) -> None:
        self.rendered, self.formulas = rendered, formulas
        if not 0 <= row < len(index.frame):
            raise IndexError(f"row {row} does not exist: this batch has rows 0 to {len(index.frame) - 1}")
        self.index = index
        self.row = row
        self.values = index.frame.iloc[row]
        self.score = object_at(index.batch, "score", row)
        self.pictures: list[Picture] = object_at(index.batch, IMAGES, row) or []

    @property
    def siblings(self) -> list[int]:
        """The row numbers of the other samples of the same prompt, best reward first."""
        return [int(row) for row in self._group().index if row != self.row]

    def _group(self) -> pd.DataFrame:
        rows = self.index.frame[self.index.frame["group"] == self.values["group"]]
        return rows.sort_values("reward", ascending=False, kind="stable") if "reward" in rows else rows

    def facts(self) -> list[tuple[str, str]]:
        """Return the sample's reward, score, truth, advantage and token count, as (name, text)."""
        row, score, number = self.values, self.score, doc.number
        reward = row.get("reward")
        facts = [] if reward is None else [("reward", number(reward) if reward == reward else "not scored")]
        facts += verdict(score) if score is not None else []
        facts += [("left out", str(row[LEFT_OUT]))] if LEFT_OUT in row else []
        facts += [("truth", str(row["truth"]))] if row.get("truth") is not None else []
        facts += (
            [("advantage", f"{number(row['advantage'], '+')} (mean over its tokens)")] if "advantage" in row else []
        )
        facts += [("tokens", ", ".join(filter(None, _tokens(row))))] if "tokens" in row else []
        facts += [("pictures", counted_pictures(self.pictures))] if self.pictures else []
        return facts + ([("scored in", f"{number(1e3 * spent)} ms")] if (spent := getattr(score, "seconds", 0)) else [])

    def pieces(self) -> tuple[str, str, str]:
        """Split the response into (before, extracted answer, after); all of it is in the first part where no answer was
        found.
        """
        text = _response(self.values)
        whole = len(text), len(text)
        first, end = span_of(self.score.answer if self.score is not None else None, text) or whole
        return text[:first], text[first:end], text[end:]

    def more(self) -> list[tuple[str, str]]:
        """Return the scorer's traceback, if it failed, and its extra values, as (name, text)."""
        return [*traceback(self.score), *extras(self.score)] if self.score is not None else []

    def document(self) -> doc.Part:
        """Build the display: prompt, response with its answer marked, score; in HTML also the prompt's other samples."""
        group, name = int(self.values["group"]), f"row {self.row}"
        numbers = group_line(self.index, group)
        before, marked, after = self.pieces()
        response = before, doc.Either(f"⟦{marked}⟧", doc.Span(marked, MARK)) if marked else (), after
        text: list[doc.Part] = [f"{name} (group {group}: {numbers})"]
        verdict, further = self._verdict(doc.bold(name), f"group {group}")
        page = [verdict]
        if (prompt := self.values.get("prompt")) is not None:
            text.append(f"  {doc.one_line(prompt, 400)}")
            page += [_label("prompt"), doc.line(self._shown(prompt), style="opacity:0.75")]
        page.append(doc.Either((), thumbnails(self.pictures)))
        text += [doc.Span(("  → ", *response)), doc.pairs(self.facts())]
        thought, end, conclusion = before.rpartition(THOUGHT)
        if end:  # its conclusion alone is in sight
            page.append(doc.Fold(f"thinking, {len(thought.split())} words", self._shown(thought + end)))
            before = conclusion.lstrip("\n")
            response = (before, *response[1:])
        heading = "response, rendered" if self.rendered else "response"
        page += [_label(heading), self._shown(before + marked + after, response), further]
        for what, detail in self.more():
            text.append(f"  {what}: {doc.one_line(detail, 400)}")
            page.append(doc.Fold(what, doc.block(detail)))
        return doc.Either(text, [*page, lambda: self._others(numbers)])

    def _shown(self, text: str, plain: doc.Part = ()) -> doc.Part:
        """Show a text as Markdown, LaTeX and code if `rendered` is set; else as it was written, by the parts `plain` if
        there are some.
        """
        return rendered(text, self.formulas) if self.rendered else doc.wrapped(plain or text, style="margin:2px 0")

    def _verdict(self, *name: doc.Part) -> tuple[doc.Part, doc.Part]:
        """Show how the sample was judged: short facts as chips in the line of its name, over the reason; and long facts."""
        facts = {name: text for name, text in self.facts() if (name, text) != ("status", Status.SCORED)}
        why = doc.line(facts.pop("why", ""), style="margin-top:4px")
        signs = {"reward": self.values.get("reward"), "advantage": self.values.get("advantage"), "status": -1.0}
        short = [name for name, text in facts.items() if len(name + text) < _CHIP]
        chips = [doc.chip(f"{name} {facts.pop(name)}", signs.get(name) or 0.0) for name in short]
        return (doc.line(*name, *chips, style="display:flex;flex-wrap:wrap;gap:4px 8px"), why), doc.pairs(
            [*facts.items()]
        )

    def _others(self, numbers: str) -> doc.Part:
        cells: list[list[doc.Part]] = []
        for row, one in self._group().iterrows():
            values = [doc.number(one.get("reward")), _signed(one.get("advantage"))]
            text = doc.bold("this sample") if row == self.row else unfolding(None, _response(one))
            cells.append([str(row), *values, text])
        table = doc.Table(["row", "reward", "advantage", "response"], cells, most=_SIBLINGS)
        return doc.Fold(f"the prompt's samples ({numbers})", table, opened=True) if len(cells) > 1 else ()


def _label(name: str) -> doc.Part:
    return doc.line(doc.small(name), style="opacity:0.65;margin-top:4px")


def evaluation(evaluation: Evaluation) -> doc.Part:
    """Build the display of an `Evaluation`: its numbers, and the six worst samples."""
    return doc.line(doc.bold(repr(evaluation))), lambda: samples(evaluation.batch, rows=6).document()
