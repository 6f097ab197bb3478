"""The tokens of a response, coloured by a number, with all their numbers on hover; two of them one above the other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from workbench.errors import message
from workbench.views.html import escape, plain, terminal
from workbench.views.token_values import QUANTITIES, Quantity, TokenRow, colour_of, span_of_values

if TYPE_CHECKING:
    import pandas as pd

CAP = 2000
"""Response tokens in a static form: 130 bytes each stay in the notebook. A live view has them all."""
_PROMPT = 400
_PREFERRED = ("advantage", "kl", "log_prob")
_BOX = "white-space:pre-wrap;word-break:break-word;font-family:monospace;line-height:1.7;font-size:95%"


class Tokens:
    """What `tokens(batch, row)` shows: a cell can end in it. In a live notebook the colouring can be switched."""

    def __init__(self, rows: list[TokenRow], labels: list[str], colour: str | None) -> None:
        self.rows = rows
        self.labels = labels
        self.quantities = [name for name in (*QUANTITIES, *rows[0].values) if any(name in row.values for row in rows)]
        self.quantities = list(dict.fromkeys(self.quantities))
        if not self.quantities:
            found = ", ".join(rows[0].batch.columns)
            raise ValueError(
                message("tokens", expected="at least one number for each token (a [B, T] column)", found=found)
            )
        if colour is None:
            colour = next((name for name in _PREFERRED if name in self.quantities), self.quantities[0])
        if not any(colour in row.values for row in rows):
            rows[0].quantity(colour)  # says which there are
        self.colour = colour

    @property
    def frame(self) -> pd.DataFrame:
        """One line a response token of the first row: token, id, text, whether it is the model's own, every quantity."""
        import pandas as pd

        row = self.rows[0]
        return pd.DataFrame({"id": row.ids, "text": row.texts, "own": row.own, **row.values})

    def quantity(self) -> tuple[Quantity, tuple[float, float]]:
        """What colours, and the range over all rows' own tokens."""
        having = [row for row in self.rows if self.colour in row.values]
        quantity = having[0].quantity(self.colour)
        return quantity, span_of_values(quantity, [_own(row, self.colour) for row in having])

    def __repr__(self) -> str:
        quantity, (low, high) = self.quantity()
        lines = [f"{self.colour}: {quantity.what}, {low:.4g} to {high:.4g}"]
        for label, row in zip(self.labels, self.rows, strict=True):
            values = row.values.get(self.colour)
            lines.append(f"{label}, {row.length} tokens")
            pieces = [
                f"{text!r}" + (f" {values[place]:+.3g}" if values is not None and row.own[place] else "")
                for place, text in enumerate(row.texts[:60])
            ]
            lines.append("  " + " · ".join(pieces) + (" …" if row.length > 60 else ""))
        return terminal(lines)

    def _repr_html_(self) -> str:
        quantity, span = self.quantity()
        parts = [legend(quantity, span)]
        for label, row in zip(self.labels, self.rows, strict=True):
            parts.append(f"<div><b>{escape(label)}</b> · {row.length} tokens</div>{_row_html(row, quantity, span)}")
        return "".join(parts)

    def _ipython_display_(self) -> None:
        from workbench.widgets.layer import show
        from workbench.widgets.tokens import TokenView

        show(self, lambda: TokenView(self))


def _own(row: TokenRow, name: str) -> list[float]:
    return [value for value, own in zip(row.values[name], row.own, strict=True) if own]


def legend(quantity: Quantity, span: tuple[float, float]) -> str:
    """Name, what it is, and the colours with their numbers."""
    low, high = span
    middle = (low + high) / 2 if quantity.centre is None else quantity.centre
    stops = ", ".join(colour_of(value, quantity, span) for value in (low, middle, high))
    swatch = f'<span style="display:inline-block;width:140px;height:11px;border-radius:3px;background:linear-gradient(90deg, {stops})"></span>'
    marks = "underlined: clipped · dotted: not the model's own · grey: prompt"
    return (
        f"<div><b>{escape(quantity.name)}</b> <small>{escape(quantity.what)}</small> &nbsp; {low:.4g} {swatch} {high:.4g} "
        f'&nbsp; <small style="opacity:0.7">{marks}</small></div>'
    )


def _row_html(row: TokenRow, quantity: Quantity, span: tuple[float, float]) -> str:
    prompt = "".join(row.prompt)
    cut = f"… {prompt[-_PROMPT:]}" if len(prompt) > _PROMPT else prompt
    left = row.length - CAP
    tail = f'<div style="opacity:0.7">{left:,} more tokens: a live notebook shows them</div>' if left > 0 else ""
    spans = "".join(token_html(row, place, quantity, span) for place in range(min(row.length, CAP)))
    return f'<div style="{_BOX}"><span style="opacity:0.5">{escape(cut)}</span>{spans}</div>{tail}'


def token_html(row: TokenRow, place: int, quantity: Quantity, span: tuple[float, float]) -> str:
    """One token, coloured, with its numbers on hover."""
    style = ""
    if row.own[place] and quantity.name in row.values:
        style = f"background:{colour_of(row.values[quantity.name][place], quantity, span)}"
    if not row.own[place]:
        style += ";border-bottom:2px dotted rgba(128,128,128,0.9)"
    elif row.values.get("clipped") and row.values["clipped"][place]:
        style += ";border-bottom:2px solid rgba(190,70,50,0.95)"
    return f'<span style="{style}" title="{escape(hover(row, place))}">{escape(visible(row.texts[place]))}</span>'


def visible(text: str) -> str:
    """A token's text as it can be seen: an empty one as a dot, a line end with its sign."""
    return "·" if text == "" else plain(text).replace("\n", "⏎\n")


def hover(row: TokenRow, place: int) -> str:
    """`17 id 264  advantage +0.71  log_prob -0.02 …`."""
    numbers = "  ".join(f"{name} {values[place]:.4g}" for name, values in row.values.items())
    return f"{place}  id {row.ids[place]}  {numbers}"


def tokens(
    thing: Any,
    row: int,
    colour: str | None = None,
    *,
    against: Any = None,
    against_row: int | None = None,
    tokenizer: Any = None,
) -> Tokens:
    """The tokens of one response of a batch, trace, stepper or run, coloured by `colour`.

    `colour` is one of `log_prob, ref_log_prob, kl, ratio, clipped, advantage, return, value, entropy, reward, mask,
    sampler_difference, influence`, or any [B, T] column of your own; those that the batch has. `against` (another batch or
    trace, the same row) or `against_row` (another row) is shown beneath on the same scale. `.frame` has all numbers.
    Token texts come from `tokenizer`, a stepper's own, or that of the model which the batch names; else ids are shown.

    Raises `ValueError` for a quantity that there is not, or a batch without token ids; `IndexError` for such a row.
    """
    rows, labels = [TokenRow(thing, row, tokenizer)], [f"row {row}"]
    if against is not None or against_row is not None:
        other = row if against_row is None else against_row
        rows.append(TokenRow(thing if against is None else against, other, tokenizer))
        if against is None:
            labels = [f"row {row}", f"row {other}"]
        else:
            same = rows[0].prompt == rows[1].prompt
            labels = [f"row {row}, first", f"row {other}, second" + ("" if same else " (another prompt)")]
    return Tokens(rows, labels, colour)
