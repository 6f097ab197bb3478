"""The live token view: switch what colours, read a token's numbers under the pointer. A layer over `views.tokens`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import traitlets

from workbench.views.token_values import TokenRow, colour_of
from workbench.views.tokens import visible
from workbench.widgets.layer import Layer

if TYPE_CHECKING:
    from workbench.views.tokens import Tokens

_PROMPT = 2000
_DIGITS = 4


class TokenView(Layer, script="tokens"):
    """Asks are `tokens` (texts and all numbers of a row, once) and `colours` (of one quantity)."""

    quantities: Any = traitlets.List().tag(sync=True)
    labels: Any = traitlets.List().tag(sync=True)
    colour = traitlets.Unicode().tag(sync=True)

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens
        super().__init__(quantities=tokens.quantities, labels=tokens.labels, colour=tokens.colour)
        self.observe(self._on_colour, "colour")

    def _on_colour(self, change: Any) -> None:
        self._tokens.colour = change["new"]

    def answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        """The rows, or the colours of one quantity with its range."""
        if asked["kind"] == "tokens":
            return {"kind": "tokens", "rows": [_row(row) for row in self._tokens.rows]}
        name = str(asked["colour"])
        if name not in self._tokens.quantities:
            self._tokens.rows[0].quantity(name)  # says which there are
        self._tokens.colour = name
        quantity, (low, high) = self._tokens.quantity()
        colours = [_colours(row, name, quantity, (low, high)) for row in self._tokens.rows]
        middle = (low + high) / 2 if quantity.centre is None else quantity.centre
        stops = [colour_of(value, quantity, (low, high)) for value in (low, middle, high)]
        return {"kind": "colours", "what": quantity.what, "low": low, "high": high, "stops": stops, "colours": colours}


def _colours(row: TokenRow, name: str, quantity: Any, span: tuple[float, float]) -> list[str]:
    if name not in row.values:
        return []
    return [
        colour_of(value, quantity, span) if own else "" for value, own in zip(row.values[name], row.own, strict=True)
    ]


def _row(row: TokenRow) -> dict[str, Any]:
    values = {name: [_short(value) for value in column] for name, column in row.values.items()}
    clipped = row.values.get("clipped")
    return {
        "prompt": visible("".join(row.prompt)[-_PROMPT:]) if row.prompt else "",
        "texts": [visible(text) for text in row.texts],
        "ids": row.ids,
        "own": row.own,
        "clipped": [bool(value) for value in clipped] if clipped else [],
        "values": values,
    }


def _short(value: float) -> float | None:
    """JSON has no NaN, and nobody reads sixteen digits."""
    return float(f"{value:.{_DIGITS}g}") if math.isfinite(value) else None
