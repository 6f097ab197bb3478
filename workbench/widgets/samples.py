"""The live table of samples: sort, filter, search, pick a row, pin it. A layer over `views.samples`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import traitlets

from workbench.errors import message
from workbench.views.html import plain
from workbench.views.samples import group_line
from workbench.widgets.layer import Layer

if TYPE_CHECKING:
    from workbench.views.samples import Samples

_CELL = 160
_MOST = 200
_FIRST = ("row", "group", "reward", "advantage", "answer", "truth", "response", "tokens", "finish", "status", "prompt")


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
        where = samples.where if isinstance(samples.where, dict) else {}
        self._samples = samples
        self._fixed = samples.where if callable(samples.where) else None
        super().__init__(
            columns=[*names[:place], *parts, *names[place:]],
            statuses=sorted(set(frame["status"])) if "status" in frame else [],
            query={
                "order": samples.order,
                "where": {name: list(value) if isinstance(value, tuple) else value for name, value in where.items()},
                "search": samples.search,
                "by_group": samples.by_group,
            },
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
            return {"kind": "card", "card": self._samples.row(row).to_json()}
        return {"kind": "pinned", "text": self._pin(row, str(asked.get("expected", "")), str(asked.get("note", "")))}

    def _page(self, asked: dict[str, Any]) -> dict[str, Any]:
        start = int(asked["start"])
        if start == 0:
            where = {
                name: tuple(value) if name == "reward" else value
                for name, value in dict(asked.get("where") or {}).items()
            }
            order, search = str(asked["order"]), str(asked.get("search") or "")
            self._samples.show(order, self._fixed or where, search, bool(asked.get("by_group")))
        rows = self._samples.selected
        frame = self._samples.index.frame.iloc[rows[start : start + min(int(asked["count"]), _MOST)]]
        records = frame.to_dict("records")
        shown = [
            {"row": int(row), "cells": {name: _cell(row if name == "row" else record[name]) for name in self.columns}}
            for row, record in zip(frame.index, records, strict=True)
        ]
        groups = {group: self._group(int(group)) for group in frame["group"].unique()} if self._samples.by_group else {}
        return {
            "kind": "rows",
            "rows": shown,
            "total": len(rows),
            "of": len(self._samples.index.frame),
            "groups": {str(group): text for group, text in groups.items()},
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
        return f"pinned, {len(kept)} in {kept.path.name}"


def _expected(text: str) -> Any:
    if not text.strip():
        raise ValueError(
            message("a pin", expected="the score that the row should have, or 'unscored'", found="nothing")
        )
    return "unscored" if text.strip() == "unscored" else float(text)


def _cell(value: Any) -> Any:
    """A number, or text on one line."""
    if value is None or value != value:
        return None
    if isinstance(value, bool | int | float) or hasattr(value, "item"):
        return value.item() if hasattr(value, "item") else value
    return plain(str(value)[:_CELL]).replace("\n", " ⏎ ")
