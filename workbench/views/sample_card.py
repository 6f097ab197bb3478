"""One sample in full: prompt, response with what the scorer extracted marked in it, the verdict, the prompt's other samples."""

from __future__ import annotations

from typing import Any

from workbench.rewards.dry_run import span_of
from workbench.views.html import escape, fold, pairs_table, table, terminal, text_block
from workbench.views.sample_index import SampleIndex, line
from workbench.views.samples import group_line, shown

MARK = "rgba(191,135,0,0.35)"
_SIBLINGS = 16


class SampleCard:
    """What `samples(batch).row(7)` shows. Raises `IndexError` for a row that there is not."""

    def __init__(self, index: SampleIndex, row: int) -> None:
        if not 0 <= row < len(index.frame):
            raise IndexError(f"row {row}: this batch has rows 0 to {len(index.frame) - 1}")
        self.index = index
        self.row = row
        self.values = index.frame.iloc[row]
        batch = index.batch
        self.score: Any = batch.non_tensor_batch.part("score", row, row + 1)[0] if "score" in batch else None

    @property
    def siblings(self) -> list[int]:
        """The other rows of its prompt, best reward first."""
        frame = self.index.frame
        others = frame[(frame["group"] == self.values["group"]) & (frame.index != self.row)]
        if "reward" in others:
            others = others.sort_values("reward", ascending=False, kind="stable")
        return [int(row) for row in others.index]

    def facts(self) -> list[tuple[str, str]]:
        """(what, value) of the verdict and the numbers, as text."""
        found: list[tuple[str, str]] = []
        row = self.values
        if "reward" in row:
            found.append(("reward", f"{row['reward']:g}" if row["reward"] == row["reward"] else "not scored"))
        if self.score is not None:
            found.append(("status", self.score.status.value))
            found += [("why", self.score.why)] if self.score.why else []
            found += [("answer", self.score.answer)] if self.score.answer is not None else []
        if row.get("truth") is not None:
            found.append(("truth", str(row["truth"])))
        if self.score is not None:
            found += [(f"part {name}", f"{value:g}") for name, value in self.score.parts.items()]
        if "advantage" in row:
            found.append(("advantage", f"{row['advantage']:+.4g} (mean over its tokens)"))
        if "tokens" in row:
            found.append(("tokens", f"{int(row['tokens'])}" + (f", {row['finish']}" if row.get("finish") else "")))
        if self.score is not None and self.score.seconds:
            found.append(("judged in", f"{self.score.seconds:.3g} s"))
        return found

    def pieces(self) -> tuple[str, str, str]:
        """The response before, in and after what was extracted; one piece where nothing of it stands there."""
        text = str(self.values.get("response") or "")
        span = span_of(self.score.answer if self.score is not None else None, text)
        if span is None:
            return text, "", ""
        return text[: span[0]], text[span[0] : span[1]], text[span[1] :]

    def more(self) -> list[tuple[str, str]]:
        """(name, text) of what else the scorer left: a traceback first."""
        if self.score is None:
            return []
        traceback = [("traceback", self.score.error)] if self.score.error else []
        return traceback + [(name, shown(value)) for name, value in self.score.extra.items()]

    def __repr__(self) -> str:
        lines = [
            f"row {self.row} (group {int(self.values['group'])}: {group_line(self.index, int(self.values['group']))})"
        ]
        if "prompt" in self.values:
            lines.append(f"  {line(self.values['prompt'], 400)}")
        before, marked, after = self.pieces()
        lines.append(f"  → {before}{f'⟦{marked}⟧' if marked else ''}{after}")
        lines += [f"  {what}: {value}" for what, value in self.facts()]
        lines += [f"  {name}: {line(text, 400)}" for name, text in self.more()]
        return terminal(lines)

    def _repr_html_(self) -> str:
        before, marked, after = self.pieces()
        highlighted = f'<span style="background:{MARK};padding:1px 2px">{escape(marked)}</span>' if marked else ""
        style = "white-space:pre-wrap;word-break:break-word;font-family:monospace;font-size:95%"
        said = f'<div style="{style}">{escape(before)}{highlighted}{escape(after)}</div>'
        prompt = ""
        if "prompt" in self.values:
            prompt = f'<div style="opacity:0.6">{text_block(self.values["prompt"])}</div>'
        more = "".join(fold(name, text_block(text)) for name, text in self.more())
        title = f"<div><b>row {self.row}</b> · group {int(self.values['group'])}</div>"
        return title + prompt + said + pairs_table(self.facts()) + more + self._others()

    def _others(self) -> str:
        frame, rows = self.index.frame, self.siblings
        if not rows:
            return ""
        cells = []
        for row in rows[:_SIBLINGS]:
            values = frame.iloc[row]
            text = str(values.get("response") or "")
            cells.append(
                [
                    str(row),
                    _shown_number(values.get("reward")),
                    _shown_number(values.get("advantage"), "+.3f"),
                    fold(text.replace("\n", " ⏎ ")[:110], text_block(text)),
                ]
            )
        left = f"<small>and {len(rows) - _SIBLINGS} more</small>" if len(rows) > _SIBLINGS else ""
        title = f"the prompt's other samples ({group_line(self.index, int(self.values['group']))})"
        return fold(title, table(["row", "reward", "advantage", "response"], cells) + left, opened=True)


def _number(value: Any) -> float | None:
    return None if value is None or value != value else float(value)


def _shown_number(value: Any, form: str = "g") -> str:
    number = _number(value)
    return "–" if number is None else f"{number:{form}}"
