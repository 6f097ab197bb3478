"""The samples of a batch: one row each, worst first, with what the reward saw; and the groups they belong to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from workbench.views.html import bar, escape, fold, table, terminal, text_block
from workbench.views.sample_index import SampleIndex, Where, batch_of, groups_table, line

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd

    from workbench.views.sample_card import SampleCard

_CUT = 110
_EXTRA = 4000


def samples_text(thing: Any, rows: int = 8, order: str = "worst", by_group: bool = False) -> str:
    """`rows` samples, three lines each; `by_group` keeps the samples of a prompt together."""
    return samples(thing, rows, order, by_group).text()


def samples_html(thing: Any, rows: int = 8, order: str = "worst", by_group: bool = False) -> str:
    """`rows` samples as a table; the full text, the parts and a failure's traceback are folded in each row.

    `by_group` keeps the samples of a prompt together, under a line with the group's numbers.
    """
    return samples(thing, rows, order, by_group).html()


def _row_lines(number: Any, row: Any) -> list[str]:
    said = [f"row {number} (group {int(row['group'])})"]
    if "reward" in row:
        said.append(f"reward {row['reward']:g}" if row["reward"] == row["reward"] else "not scored")
    if row.get("why"):
        said.append(line(row["why"]))
    if "tokens" in row:
        said.append(f"{int(row['tokens'])} tokens" + (f", {line(row['finish'])}" if row.get("finish") else ""))
    texts = [f"  {line(row['prompt'])}"] if "prompt" in row else []
    return ["  ".join(said), *texts, f"  → {line(_response(row))}"]


def _response(row: Any) -> str:
    said = row.get("response")
    return "" if said is None else str(said)


def _cells(index: SampleIndex, number: Any, row: Any, top: float, by_group: bool) -> list[str]:
    batch = index.batch
    score = batch.non_tensor_batch.part("score", number, number + 1)[0] if "score" in batch else None
    reward = row.get("reward")
    return [
        f"{number}" if by_group else f"{number}<br><small>group&nbsp;{int(row['group'])}</small>",
        _text_cell(row, with_prompt=not by_group),
        "" if reward is None else bar(abs(reward) / top, f"{reward:g}", good=reward >= 0) if reward == reward else "–",
        _judgement(row, score),
        f"{row['advantage']:+.3f}" if "advantage" in row else "",
        f"{int(row['tokens']) if 'tokens' in row else ''}<br><small>{escape(row.get('finish') or '')}</small>",
    ]


def _grouped(index: SampleIndex, frame: pd.DataFrame) -> Iterator[tuple[str, list[Any]]]:
    """For each group of `frame`, in its order: a line about the whole group, and its rows shown."""
    for group in dict.fromkeys(frame["group"]):
        line_ = f"<b>group {group}</b> · {group_line(index, group)}"
        if "prompt" in frame:
            line_ += f"<br>{escape(index.groups.loc[group]['prompt'], 4 * _CUT)}"
        yield f'<div style="margin-top:8px">{line_}</div>', list(frame.index[frame["group"] == group])


def group_line(index: SampleIndex, group: int) -> str:
    """`8 samples, mean reward 0.25, deviation 0.46, advantages over 2.7`."""
    numbers = index.groups.loc[group]
    said = [f"{int(numbers['samples'])} samples"]
    if "mean" in numbers:
        said += [f"mean reward {numbers['mean']:g}"] if numbers["scored"] else ["none scored"]
        said += [f"deviation {numbers['std']:g}"] if numbers["scored"] > 1 else []
    if "spread" in numbers:
        said.append(f"advantages over {numbers['spread']:g}")
    return ", ".join(said)


def _unjudged(index: SampleIndex) -> str:
    """How many rows have no judgement, and why."""
    if "status" not in index.frame:
        return ""
    counts = Counter(status for status in index.frame["status"] if status not in ("scored", "model failed"))
    return "".join(f"; {number} {status}" for status, number in counts.items())


def _text_cell(row: Any, with_prompt: bool = True) -> str:
    """The response's start, unfolding to all of it, under the prompt's."""
    response = _response(row)
    start = response.replace("\n", " ⏎ ")[:_CUT]
    if not with_prompt or "prompt" not in row:
        return fold(start, text_block(response))
    full = text_block(row["prompt"]) + "<hr>" + text_block(response)
    return escape(row["prompt"], _CUT) + fold(start, full)


def _judgement(row: Any, score: Any) -> str:
    if score is None:
        return ""
    lines = [escape(score.why, 2 * _CUT)] if score.why else []
    if score.answer is not None:
        lines.append(f"answer <b>{escape(score.answer, 40)}</b>, truth {escape(row.get('truth'), 40)}")
    if score.parts:
        lines.append(escape(", ".join(f"{name} {value:g}" for name, value in score.parts.items())))
    if not score.scored:
        lines.append(f'<b style="color:rgb(190,70,50)">{escape(score.status.value)}</b>')
    text = "<br>".join(lines)
    more = "".join(f"<b>{escape(name, 60)}</b>{text_block(shown(value))}" for name, value in score.extra.items())
    return (
        text
        + (fold(", ".join(score.extra), more) if more else "")
        + (fold("traceback", text_block(score.error)) if score.error else "")
    )


def shown(value: Any) -> str:
    """An extra for people: text as it stands, records a line each, cut."""
    if isinstance(value, dict):
        value = "\n".join(f"{key}: {one}" for key, one in value.items())
    elif isinstance(value, list):
        value = "\n".join(str(one) for one in value)
    return str(value)[:_EXTRA]


class Samples:
    """What `samples(batch)` shows: a cell can end in it. In a live notebook it can be sorted, filtered and picked from."""

    def __init__(
        self, thing: Any, rows: int, order: str, by_group: bool = False, where: Where = None, search: str = ""
    ) -> None:
        self.index = SampleIndex(batch_of(thing))
        self.rows = rows
        self.order = order
        self.by_group = by_group
        self.picked: int | None = None
        """The row that was last clicked in the live table."""
        self.where, self.search = where, search
        self.selected: np.ndarray = self.index.select(order, where=where, search=search, by_group=by_group)
        """Row numbers that pass the filters, in order; in a live notebook those that the table shows."""

    @property
    def frame(self) -> pd.DataFrame:
        """The selected samples as a DataFrame, indexed by row."""
        return self.index.frame.iloc[self.selected]

    def row(self, number: int) -> SampleCard:
        """One sample in full, the other samples of its prompt beside it."""
        from workbench.views.sample_card import SampleCard

        return SampleCard(self.index, number)

    def text(self) -> str:
        """As `samples_text`."""
        lines = [text for number, row in self.frame.head(self.rows).iterrows() for text in _row_lines(number, row)]
        return terminal(lines)

    def html(self) -> str:
        """As `samples_html`."""
        frame = self.frame.head(self.rows)
        top = max(float(frame["reward"].abs().fillna(0).max()), 1e-9) if "reward" in frame and len(frame) else 1.0
        header = ["row", "prompt → response", "reward", "judged", "advantage", "tokens"]
        body = {number: _cells(self.index, number, row, top, self.by_group) for number, row in frame.iterrows()}
        if self.by_group:
            header[1] = "response"
            groups = _grouped(self.index, frame)
            shown = "".join(line_ + table(header, [body[row] for row in rows]) for line_, rows in groups)
        else:
            shown = table(header, list(body.values()))
        first = f", {escape(self.order)} first" if self.order != "index" else ""
        all_ = len(self.index.frame)
        of = (
            f"{len(frame)} of {all_} samples"
            if len(self.frame) == all_
            else f"{len(frame)} of {len(self.frame)} (of {all_})"
        )
        step = self.index.batch.meta_info.get("step")
        which = "" if step is None else f"step {escape(step)}: "
        return shown + f"<small>{which}{of}{first}{escape(_unjudged(self.index))}</small>"

    def __repr__(self) -> str:
        return self.text()

    def _repr_html_(self) -> str:
        return self.html()

    def _ipython_display_(self) -> None:
        from workbench.widgets.layer import show
        from workbench.widgets.samples import SamplesTable

        show(self, lambda: SamplesTable(self))


def samples(
    thing: Any,
    rows: int = 8,
    order: str = "worst",
    by_group: bool = False,
    *,
    where: Where = None,
    search: str = "",
) -> Samples:
    """Look at the samples of a batch, trace, stepper or run.

    `order` is `worst`, `best`, `surprising` (furthest from the mean of the prompt's other samples), `index`, or a column
    (`-tokens`: the largest first). `where` filters: column → value, list of values, or (low, high); or a function of the
    frame. `search` must stand in a row's texts. `by_group` keeps the samples of a prompt together. `.frame` has them
    all as a DataFrame, `.row(7)` one in full.

    Raises `ValueError` for an order or a column that there is not.
    """
    return Samples(thing, rows, order, by_group, where, search)


def groups(thing: Any) -> pd.DataFrame:
    """The groups of a batch: see `groups_table`. Prompts are cut and made plain: a frame shows them as they are."""
    frame = groups_table(batch_of(thing))
    return frame.assign(prompt=[line(prompt) for prompt in frame["prompt"]]) if "prompt" in frame else frame
