"""The live table of samples: sort, filter, search, pick a row, pin it. A layer over `views.samples`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import traitlets

from workbench.views.html import plain
from workbench.views.samples import group_line
from workbench.widgets.layer import Layer

if TYPE_CHECKING:
    from workbench.views.samples import Samples

_CELL = 160
_MOST = 200
_FIRST = (
    "row",
    "step",
    "group",
    "reward",
    "advantage",
    "answer",
    "truth",
    "response",
    "tokens",
    "finish",
    "status",
    "prompt",
)


class SamplesTable(Layer, script="samples"):
    """Asks are `rows` (a page of the selection), `pick` (a row in full) and `pin` (a regression case)."""

    columns: Any = traitlets.List().tag(sync=True)
    statuses: Any = traitlets.List().tag(sync=True)
    query: Any = traitlets.Dict().tag(sync=True)
    picked = traitlets.Int(None, allow_none=True).tag(sync=True)

    def __init__(self, samples: Samples) -> None:
        frame = samples.index.frame
        parts = [name for name in frame if str(name).startswith("reward/")]
        names = [name for name in _FIRST if name == "row" or name in frame]
        place = names.index("reward") + 1 if "reward" in names else len(names)
        self._samples = samples
        self._base = samples.where  # what Python asked for stays; the page's filters come on top
        self._rows = samples.selected
        super().__init__(
            columns=[*names[:place], *parts, *names[place:]],
            statuses=sorted(set(frame["status"])) if "status" in frame else [],
            query={"order": samples.order, "search": samples.search, "by_group": samples.by_group},
        )
        self.observe(self._on_picked, "picked")

    def _on_picked(self, change: Any) -> None:
        self._samples.picked = change["new"]

    def answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        """A page, a card, or that a row was pinned."""
        if asked["kind"] == "rows":
            return self._page(asked)
        row = int(asked["row"])
        if asked["kind"] == "pick":
            return {"kind": "card", "html": self._samples.row(row)._repr_html_()}
        return {"kind": "pinned", "text": self._pin(row, str(asked.get("expected", "")), str(asked.get("note", "")))}

    def _select(self, asked: dict[str, Any]) -> np.ndarray:
        """Rows that Python's and the page's filters leave, in the page's order."""
        filters: dict[str, Any] = {"status": asked["status"]} if asked.get("status") else {}
        if asked.get("low") is not None or asked.get("high") is not None:
            filters["reward"] = (asked.get("low"), asked.get("high"))
        order, search, by_group = str(asked["order"]), str(asked.get("search") or ""), bool(asked.get("by_group"))
        rows = self._samples.index.select(order, where=self._base, search=search, by_group=by_group)
        return rows[np.isin(rows, self._samples.index.select("index", where=filters))]

    def _page(self, asked: dict[str, Any]) -> dict[str, Any]:
        start = int(asked["start"])
        if start == 0:  # later pages go on in the same selection, whatever else has been asked of the view
            self._rows = self._select(asked)
            self._samples.selected = self._rows
        frame = self._samples.index.frame.iloc[self._rows[start : start + min(int(asked["count"]), _MOST)]]
        records = frame.to_dict("records")
        shown = [
            {"row": int(row), "cells": {name: _cell(row if name == "row" else record[name]) for name in self.columns}}
            for row, record in zip(frame.index, records, strict=True)
        ]
        grouped = frame["group"].unique() if asked.get("by_group") else ()
        return {
            "kind": "rows",
            "rows": shown,
            "total": len(self._rows),
            "of": len(self._samples.index.frame),
            "groups": {str(group): self._group(int(group)) for group in grouped},
        }

    def _group(self, group: int) -> str:
        """A line over a prompt's samples: the group's numbers and the prompt."""
        index = self._samples.index
        prompt = index.groups.loc[group].get("prompt") or ""
        return f"group {group} · {group_line(index, group)} · {_cell(str(prompt))}"

    def _pin(self, row: int, expected: str, note: str) -> str:
        from workbench.rewards.pins import pins

        kept = pins()
        kept.add(self._samples.index.batch, row=row, expected=_expected(expected), note=note)
        return f"pinned, {len(kept)} in {kept.path}"


def _expected(text: str) -> Any:
    """A number; anything else as it stands, which `pins.add` refuses unless it is `unscored`."""
    try:
        return float(text)
    except ValueError:
        return text.strip()


def _cell(value: Any) -> Any:
    """A number, or text on one line."""
    if hasattr(value, "item") and getattr(value, "ndim", 1) == 0:
        value = value.item()
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return None
    if isinstance(value, bool | int | float):
        return value
    return plain(str(value)[:_CELL]).replace("\n", " ⏎ ")
