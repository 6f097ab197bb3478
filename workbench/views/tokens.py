"""The tokens of a response with every number that a batch has for them, coloured by one; two rows aligned."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from workbench.base.errors import BatchError, message, unknown
from workbench.base.shown import plain
from workbench.dataproto.columns import declared
from workbench.dataproto.core import DataProto, row_name
from workbench.engines.local_engine.loading import open_tokenizer
from workbench.engines.protocol import Late
from workbench.views import document as doc
from workbench.views.curves import GREY, bare, cell_figure
from workbench.views.sample_table import batch_of, object_at

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Quantity:
    """A kind of number that each token has (log-prob, advantage, …): the columns it is computed from, and how it is
    coloured.
    """

    name: str
    what: str
    columns: tuple[str, ...]
    """The first of these that the batch has is read; with `make`, all of them are."""
    make: Callable[..., torch.Tensor] | None = None
    """Computes the number, [T], from the columns, each [T] float64."""
    centre: float | None = None
    """The value that is shown without colour, green above and orange below; None: a single colour from the lowest to
    the highest value."""
    inverted: bool = False
    """Whether the lowest values have the strongest colour."""

    def read(self, part: Callable[[str], torch.Tensor | None]) -> torch.Tensor | None:
        """Return one row's values of the quantity, [T], or None where its columns are missing; `part(name)` returns a
        column's [T] or None.
        """
        columns = (column for column in map(part, self.columns) if column is not None)
        if self.make is None:
            return next(columns, None)
        both = [column.double() for column in columns]
        return self.make(*both) if len(both) == len(self.columns) else None


QUANTITIES: Mapping[str, Quantity] = {one.name: one for one in (
    Quantity("log_prob", "log-prob under the policy, nats", ("old_log_probs", "rollout_log_probs"), inverted=True),
    Quantity("ref_log_prob", "log-prob under the reference, nats", ("ref_log_prob",), inverted=True),
    Quantity("kl", "log-prob under the policy minus under the reference (k1), nats", ("old_log_probs", "ref_log_prob"),
             torch.sub, centre=0.0),
    Quantity("teacher_log_prob", "log-prob under the teacher, nats", ("teacher_log_probs",), inverted=True),
    Quantity("teacher_difference", "log-prob under the teacher minus under the sampler, nats",
             ("teacher_log_probs", "rollout_log_probs"), torch.sub, centre=0.0),
    Quantity("divergence", "divergence from the teacher, nats", ("divergence",)),
    Quantity("ratio", "probability after the update divided by that before", ("new_log_probs", "old_log_probs"),
             lambda after, before: (after - before).exp(), centre=1.0),
    Quantity("clipped", "whether the loss clipped the token's ratio", ("clipped",)),
    Quantity("advantage", "advantage: how much better than expected", ("advantages",), centre=0.0),
    Quantity("return", "return: sum of the rewards from this token on", ("returns",), centre=0.0),
    Quantity("value", "value that the critic predicts", ("values",), centre=0.0),
    Quantity("entropy", "entropy of the next-token distribution, nats", ("entropys",)),
    Quantity("reward", "reward on the token, KL penalty included", ("token_level_rewards", "token_level_scores"),
             centre=0.0),
    Quantity("mask", "1: sampled by the model; 0: padding, tool or user text", ("response_mask",)),
    Quantity("loss_mask", "1: trained on; 0: rejected, or not sampled by the model", ("loss_mask",)),
    Quantity("weight", "importance weight: probability by the trainer divided by that of the sampler", ("rollout_is_weights",), centre=1.0),
    Quantity("sampler_difference", "log-prob by the sampler minus log-prob by the trainer, nats",
             ("rollout_log_probs", "old_log_probs"), torch.sub, centre=0.0),
    Quantity("influence", "influence of the token on the probe rows", ("influence",), centre=0.0),
)}  # fmt: skip
_SHOWN_ALREADY = {"responses", *(column for one in QUANTITIES.values() for column in one.columns)}


class TokenRow:
    """One row's response tokens: texts, ids, which of them the model sampled, and every number that the batch has for
    them.

    Of a batch on disk only this row is read. Raises `IndexError` for a row that does not exist, and `ValueError` where
    the batch has no token ids.
    """

    def __init__(self, thing: Any, row: int, tokenizer: Any = None) -> None:
        self.batch = batch_of(thing)
        self.row = row
        if not 0 <= row < len(self.batch):
            raise IndexError(f"row {row} does not exist: this batch has rows 0 to {len(self.batch) - 1}")
        if "responses" not in self.batch:
            raise ValueError(f"no token ids (column `responses`) in this batch; found {', '.join(self.batch.columns)}")
        tokenizer = tokenizer or _tokenizer_of(thing, self.batch)
        ids: Any = self._part("responses")
        inside, attention = self._part("response_mask"), self._part("attention_mask")
        # text of tools or users is not the model's own, and no padding either
        inside = inside if inside is not None else torch.ones_like(ids)
        real = attention[-len(ids) :] if attention is not None else inside
        self.length = int(real.nonzero().max()) + 1 if real.any() else 0
        self.ids = ids[: self.length].tolist()
        self.own = (inside[: self.length] > 0).tolist()
        self.texts = token_texts(tokenizer, self.ids)
        prompt, mask = self._part("prompts"), self._part("prompt_mask")
        kept = [] if prompt is None else prompt[mask.bool()].tolist() if mask is not None else prompt.tolist()
        self.prompt = token_texts(tokenizer, kept)
        self.values = self._values()
        trained = self.values.get("loss_mask", self.own)
        self.rejected = [inside and not kept for inside, kept in zip(self.own, trained, strict=True)]

    def _part(self, name: str) -> Any:
        return _part(self.batch, name, self.row)

    def _values(self) -> dict[str, list[float]]:
        values = {name: quantity.read(self._part) for name, quantity in QUANTITIES.items()}
        width = self.batch.batch.raw()["responses"].shape[1]
        for name, raw in self.batch.batch.raw().items():
            if name not in _SHOWN_ALREADY and declared(name) is None and tuple(raw.shape[1:]) == (width,):
                values[name] = self._part(name)
        return {name: value[: self.length].double().tolist() for name, value in values.items() if value is not None}

    def quantity(self, name: str) -> Quantity:
        """Return the description of a per-token quantity by its name. Raises `ValueError` for one that this row does
        not have.
        """
        if name not in self.values:
            raise ValueError(unknown(f"per-token quantity of row {self.row}", name, self.values))
        return QUANTITIES.get(name) or Quantity(name, name, (name,), centre=0.0)


def _tokenizer_of(thing: Any, batch: DataProto) -> Any:
    """Find the tokenizer of the model in the batch's `meta_info`, if its folder exists; else a stepper's, without
    opening an engine.
    """
    path = batch.meta_info.get("model")
    tokenizer = open_tokenizer(path) if isinstance(path, str) else None
    for stage in getattr(thing, "pipeline", None) or ():
        sampler = getattr(stage, "sampler", None)
        if tokenizer is None and not (isinstance(sampler, Late) and not sampler.opened):
            tokenizer = getattr(sampler, "tokenizer", None)
    return tokenizer


def span_of_values(quantity: Quantity, rows: list[list[float]]) -> tuple[float, float]:
    """Return the range (low, high) of a quantity's colours: that of its values, symmetric about the centre if it has
    one; low < high.
    """
    values = [value for row in rows for value in row if math.isfinite(value)] or [0.0]
    low, high = min(values), max(values)
    if quantity.centre is not None:
        reach = max(abs(low - quantity.centre), abs(high - quantity.centre)) or 1.0
        return quantity.centre - reach, quantity.centre + reach
    return (low, high) if low < high else (low - 0.5, high + 0.5)


def stops(quantity: Quantity, span: tuple[float, float]) -> list[str]:
    """Return the CSS colours of a quantity's lowest, middle and highest value, for a legend."""
    low, high = span
    middle = (low + high) / 2 if quantity.centre is None else quantity.centre
    return [colour_of(value, quantity, span) for value in (low, middle, high)]


def colour_of(value: float, quantity: Quantity, span: tuple[float, float]) -> str:
    """Return a value's translucent CSS colour: green above the quantity's centre, orange below; violet where it has no
    centre.
    """
    if not math.isfinite(value):
        return "rgba(255,0,255,0.6)"
    low, high = span
    if quantity.centre is not None:
        share = (value - quantity.centre) / (high - quantity.centre)
        shade = doc.UP if share > 0 else doc.DOWN
    else:
        share = (value - low) / (high - low)
        share = 1 - share if quantity.inverted else share
        shade = doc.MUCH
    return f"rgba({shade},{min(abs(share), 1) * 0.65:.2f})".replace(",0.", ",.")


_PIECES = 48
"""Most pieces of a strip of tokens."""


def drawable(batch: DataProto) -> list[str]:
    """Return the per-token quantities that a batch has numbers for; [] where it does not say which tokens are real."""
    real = "response_mask" in batch.batch and len(batch)
    return [name for name, one in QUANTITIES.items() if real and _read(batch, one, 0) is not None]


def strips(batch: DataProto, rows: Iterable[int], name: str, spans: dict[str, tuple[float, float]]) -> list[Any]:
    """Return the colours of some rows' responses in a few pieces each, by the mean of a quantity over a piece's tokens.

    `levels` are from −65 to 65 hundredths of a scale's full colour, and never below 0 if it is `one_way`. `spans` keeps
    the range of each quantity's colours: that of the rows which came first.
    """
    quantity, pooled = QUANTITIES[name], torch.nn.functional.adaptive_avg_pool1d
    values = [_read(batch, quantity, row)[_part(batch, "response_mask", row) > 0].double() for row in rows]
    if name not in spans:
        spans[name] = span_of_values(quantity, [one.tolist() for one in values])
    low, high = spans[name][:: -1 if quantity.inverted else 1]
    middle = low if quantity.centre is None else quantity.centre
    means = [pooled(one[None], min(len(one), _PIECES))[0] if len(one) else one for one in values]
    shares = (torch.cat([torch.zeros(0), *means]) - middle) / (high - middle)
    levels = (65 * shares.nan_to_num(0.0).clamp(-1, 1)).round().int().split([len(one) for one in means])
    return [{"one_way": quantity.centre is None, "levels": one.tolist()} for one in levels]


def _read(batch: DataProto, quantity: Quantity, row: int) -> Any:
    return quantity.read(lambda column: _part(batch, column, row))


def _part(batch: DataProto, name: str, row: int) -> Any:
    return batch.batch.part(name, row, row + 1)[0] if name in batch.batch else None


# --- texts ----------------------------------------------------------------------------------------

_BROKEN = "\ufffd"
_LONGEST = 12
"""Tokens after which bytes that are not a character yet are taken to be invalid."""


def token_texts(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """Return the text of each token, special tokens included; `⟨id⟩` without a tokenizer.

    A token that is a part of a character (byte-level vocabularies) has the empty text, and the token that ends the
    character has all of it; bytes that never become a character have the replacement character.
    """
    if tokenizer is None:
        return [f"⟨{number}⟩" for number in ids]
    ids = list(ids)
    whole = _decoded(tokenizer, ids)
    single = {token: _decoded(tokenizer, [token]) for token in set(ids)}
    texts: list[str] = []
    for broken, run in itertools.groupby(ids, lambda token: _BROKEN in single[token]):
        # most tokens read alone as they do in the text; runs of parts of characters are read together
        tokens = list(run)
        texts += _step_by_step(tokenizer, tokens) if broken else [single[token] for token in tokens]
    return texts if "".join(texts) == whole else _step_by_step(tokenizer, ids)


def _decoded(tokenizer: Any, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=False))


def _step_by_step(tokenizer: Any, ids: list[int]) -> list[str]:
    """Return what each token adds to the text before it, for vocabularies in which a token's text depends on the tokens
    before.
    """
    texts: list[str] = []
    begin = done = 0  # decoding from `begin`, everything before `done` has been given out
    known = ""
    for place in range(len(ids)):
        fresh = _decoded(tokenizer, ids[begin : place + 1])[len(known) :]
        if fresh.endswith(_BROKEN) and place - done < _LONGEST:
            texts.append("")
            continue
        texts.append(fresh)
        # a few tokens of context stay, since what a token reads as can depend on the one before it
        begin, done = done, place + 1
        known = _decoded(tokenizer, ids[begin:done])
    if done < len(ids) and texts:
        texts[-1] = _decoded(tokenizer, ids[begin:])[len(known) :]
    return texts


# --- the view ----------------------------------------------------------------------------------------

CAP = 2000
"""Most response tokens in a static form, which adds 130 bytes a token to the notebook; a live view has all tokens."""
_PROMPT = 400
_PREFERRED = ("advantage", "kl", "log_prob")
BOX = "white-space:pre-wrap;word-break:break-word;font-family:monospace;line-height:1.7;font-size:95%"


class Tokens(doc.View):
    """A row's tokens, coloured by a number that each has; in a live notebook another quantity can be chosen.
    `tokens(batch, row)` makes it.
    """

    def __init__(self, rows: list[TokenRow], labels: list[str], colour: str | None) -> None:
        self.rows, self.labels = rows, labels
        names = dict.fromkeys([*QUANTITIES, *rows[0].values])
        self.quantities = [name for name in names if any(name in row.values for row in rows)]
        if not self.quantities:
            expected, found = "at least one number for each token (a [B, T] column)", ", ".join(rows[0].batch.columns)
            raise ValueError(message("no per-token number to show", expected=expected, found=f"the columns {found}"))
        if colour is None:
            colour = next((name for name in _PREFERRED if name in self.quantities), self.quantities[0])
        self.colour = self.quantity(colour)[0].name

    @property
    def frame(self) -> pd.DataFrame:
        """A DataFrame with a line for each response token of the first row: `id`, `text`, `own` (sampled by the model),
        quantities.
        """
        import pandas as pd

        row = self.rows[0]
        return pd.DataFrame({"id": row.ids, "text": row.texts, "own": row.own, **row.values})

    def quantity(self, name: str | None = None) -> tuple[Quantity, tuple[float, float]]:
        """Return the quantity `name` (default: the one that colours the tokens) and its range (low, high) over the
        shown rows.
        """
        name = name or self.colour
        having = [row for row in self.rows if name in row.values]
        quantity = (having or self.rows)[0].quantity(name)  # raises where no row has it
        values = [list(itertools.compress(row.values[name], row.own)) for row in having]
        return quantity, span_of_values(quantity, values)

    def document(self) -> doc.Part:
        """Build the display: each row's tokens, in HTML coloured, in a terminal each with its number."""
        quantity, span = self.quantity()
        lines: list[doc.Part] = [f"{self.colour}: {quantity.what}, {doc.number(span[0])} to {doc.number(span[1])}"]
        heads, pages = list[doc.Part](), list[doc.Part]()
        for label, row in zip(self.labels, self.rows, strict=True):
            lines += [f"{label}, {row.length} tokens", _row_text(row, self.colour)]
            heads.append(headline(label, row, f"{row.length} tokens"))
            pages.append(_row_page(row, quantity, span))
        if pairs := self.pairs():
            lines.append(f"{sum(len(a) for same, a, _ in pairs if same)} tokens are in both responses")
            shown = [doc.small(doc.faint(ALIGNED)), _pair_page(self.rows, pairs, quantity, span)]
        else:
            shown = list(itertools.chain(*zip(heads, pages, strict=True)))
            heads = []
        return doc.Either(lines, [legend(quantity, span, self.rows), *heads, *shown])

    def pairs(self) -> list[Stretch]:
        """Return the two rows' responses aligned, as `aligned` does, what they share by words; [] for a single row, and where
        they share less than a third of their tokens.
        """
        keys = [[(token, _mark(row, place)) for place, token in enumerate(row.ids)] for row in self.rows]
        found = aligned(*keys) if len(keys) > 1 else []
        common = sum(len(places) for same, places, _ in found if same)
        return list(self._words(found)) if 3 * common >= max(row.length for row in self.rows) else []

    def _words(self, found: Iterable[Stretch]) -> Iterator[Stretch]:
        """Split stretches that the rows share where a line may break: before spaces, after line ends, in long words."""
        texts = self.rows[0].texts
        for same, one, other in found:
            ends = (at for at in one[1:] if texts[at].startswith(" ") or texts[at - 1].endswith("\n") or not at % _WORD)
            cuts = list(ends) if same else []
            for first, last in itertools.pairwise([one.start, *cuts, one.stop]):
                place = slice(first - one.start, last - one.start)
                yield same, one[place], other[place] if same else other


Stretch: TypeAlias = tuple[bool, range, range]
"""Tokens of two responses: whether they are the same, and their indices in the first and in the second."""
ALIGNED = "The first row stands above the second. Grey: they differ; hatched: no token."


_WORD = 8
"""Tokens after which a line may break where no space is."""


def aligned(first: Sequence[Hashable], second: Sequence[Hashable]) -> list[Stretch]:
    """Align the tokens of two responses. Common tokens between longer stretches that differ count as different, so that
    a chance comma does not break them up.
    """
    steps = SequenceMatcher(None, first, second).get_opcodes()
    sizes = [0 if kind == "equal" else max(b - a, d - c) for kind, a, b, c, d in steps] + [0]
    found = list[Stretch]()
    for at, (kind, a, b, c, d) in enumerate(steps):
        same = kind == "equal" and 2 * (b - a) >= min(sizes[at - 1], sizes[at + 1])
        if found and not same and not found[-1][0]:
            _, left, right = found.pop()
            a, c = left.start, right.start
        found.append((same, range(a, b), range(c, d)))
    return found


def _pair_page(
    rows: Sequence[TokenRow], pairs: Sequence[Stretch], quantity: Quantity, span: tuple[float, float]
) -> doc.Part:
    """Show two aligned responses as lines above each other, after the prompts."""
    prompts = dict.fromkeys(_prompt(row) for row in rows)
    parts: list[doc.Part] = [[(prompt, doc.BREAK) if len(prompts) > 1 else prompt for prompt in prompts]]
    for same, *sides in pairs:
        sides = [range(min(one.start, CAP), min(one.stop, CAP)) for one in sides]
        if not (all(sides) if same else any(sides)):
            break
        shown = [coloured(row, one, quantity, span) for row, one in zip(rows, sides, strict=True)]
        lines = [doc.line(one) if one else doc.line("\u00a0", style=_HATCHED) for one in shown]
        parts.append(doc.Span(lines, _PAIR if same else f"{_PAIR};{_APART}", "div"))
        parts += [doc.BREAK] if same and rows[0].texts[sides[0][-1]].endswith("\n") else []
    left = max(row.length for row in rows) - CAP
    return doc.line(parts, style=BOX), rest(left, ": a live notebook shows them")


_PAIR = "display:inline-block;vertical-align:top;max-width:100%;line-height:1.5;margin-bottom:8px"
_APART = "background:rgba(128,128,128,.18)"
_HATCHED = "background:repeating-linear-gradient(-45deg,rgba(128,128,128,.6) 0 1px,transparent 1px 4px)"


def headline(label: str, row: TokenRow, *facts: str, more: Sequence[doc.Part] = ()) -> doc.Part:
    """Show a row's name and verdict in a line as chips, its reward on its colour, and `more` of them; then facts in a paler one."""
    score = object_at(row.batch, "score", row.row)
    sign = 0.0 if score is None else score.value if score.scored else -1.0
    chips = [doc.chip(one, 0.0 if place else sign) for place, one in enumerate(judged(row))]
    each = [part for one in (*chips, *more) for part in (one, " ")]
    return doc.line(doc.bold(label), " ", *each, doc.faint(doc.small(" · ".join(facts))))


def judged(row: TokenRow) -> list[str]:
    """Return what a row was scored as, in words: its reward, the answer that was read and the ground truth; before it is
    scored the truth alone.
    """
    score, model = (object_at(row.batch, name, row.row) for name in ("score", "reward_model"))
    facts = (
        []
        if score is None
        else [f"reward {doc.number(score.value)}" if score.scored else score.status.value.replace("_", " ")]
    )
    texts = {"answer": getattr(score, "answer", None), "truth": (model or {}).get("ground_truth")}
    return facts + [f"{name} {doc.one_line(text, 40)}" for name, text in texts.items() if text is not None]


def legend(quantity: Quantity, span: tuple[float, float], rows: Sequence[TokenRow]) -> doc.Part:
    """Build a legend: the quantity's name, what it is, its colours with the numbers at both ends, and the marks that
    tokens of the rows have.
    """
    colours = f"linear-gradient(90deg, {', '.join(stops(quantity, span))})"
    swatch = doc.Span("", f"display:inline-block;width:140px;height:10px;border-radius:3px;background:{colours}")
    ends = f"{doc.number(span[0])} ", swatch, f" {doc.number(span[1])}"
    scale = " \u00a0 ", doc.Span(ends, "white-space:nowrap"), " \u00a0 "
    there = {_mark(row, place) for row in rows for place in range(row.length)}
    marks = doc.small(" · ".join(words for style, words in _MARKS.items() if style in there))
    return doc.line(doc.bold(quantity.name), " ", doc.small(quantity.what), scale, marks)


def _row_text(row: TokenRow, colour: str) -> str:
    there, values = colour in row.values, row.values.get(colour, [0.0] * row.length)
    each = zip(row.texts[:60], values, row.own, row.rejected, strict=False)
    shown = [(repr(text), f" {doc.number(value, '+')}" * (there and own), gone) for text, value, own, gone in each]
    pieces = [text + value + " rejected" * gone for text, value, gone in shown]
    return "  " + " · ".join(pieces) + (" …" if row.length > 60 else "")


def _row_page(row: TokenRow, quantity: Quantity, span: tuple[float, float]) -> doc.Part:
    shown = coloured(row, range(min(row.length, CAP)), quantity, span)
    return doc.line(_prompt(row), shown, style=BOX), rest(row.length - CAP, ": a live notebook shows them")


def _prompt(row: TokenRow) -> doc.Span:
    prompt = "".join(row.prompt)
    return doc.Span(f"… {prompt[-_PROMPT:]}" if len(prompt) > _PROMPT else prompt, "opacity:.7", title="the prompt")


def rest(left: int, where: str = "") -> doc.Part:
    """Say how many tokens are not shown, and `where` they are."""
    return doc.line(doc.faint(f"{left:,} more tokens{where}")) if left > 0 else ()


def coloured(row: TokenRow, places: Iterable[int], quantity: Quantity, span: tuple[float, float]) -> doc.Part:
    """Show the tokens at some indices of a row, coloured by a quantity, each with all its numbers on hover."""
    return [_token(row, place, quantity, span) for place in places]


def _token(row: TokenRow, place: int, quantity: Quantity, span: tuple[float, float]) -> doc.Span:
    paint = shade(row, place, quantity, span)
    special = ";opacity:.8" if _SPECIAL.fullmatch(row.texts[place]) else ""
    style = (f"background:{paint}" if paint else "") + _mark(row, place) + special
    said = "  ".join(f"{name} {doc.number(values[place])}" for name, values in row.values.items())
    return doc.Span(visible(row.texts[place]), style, title=f"{place}  id {row.ids[place]}  {said}")


def _mark(row: TokenRow, place: int) -> str:
    """Return the style that says whether a token is the model's own, rejected, or clipped."""
    foreign, rejected, cut = _MARKS
    if not row.own[place]:
        return foreign
    clipped = row.values.get("clipped") or row.rejected
    return rejected if row.rejected[place] else cut if clipped[place] else ""


_MARKS = {
    ";border-bottom:2px dotted rgba(128,128,128,.9)": "dotted: not sampled by the model",
    ";text-decoration:line-through": "struck: rejected",
    ";border-bottom:2px solid rgba(190,70,50,.95)": "underlined: clipped",
}
"""Style of a token → what it says."""
_SPECIAL = re.compile(r"<\|.*\|>|</?s>|<eos>|<pad>")


def shade(row: TokenRow, place: int, quantity: Quantity, span: tuple[float, float]) -> str:
    """Return a token's CSS colour; "" for one that the model did not sample, and where the row lacks the quantity."""
    values = row.values.get(quantity.name)
    return colour_of(values[place], quantity, span) if values and row.own[place] else ""


def visible(text: str) -> str:
    """Make invisible characters of a token's text visible: `·` for an empty text, `⏎` at a line end."""
    return "·" if text == "" else plain(text).replace("\n", "⏎\n")


def tokens(
    thing: Any,
    row: int,
    colour: str | None = None,
    *,
    against: Any = None,
    against_row: int | None = None,
    tokenizer: Any = None,
) -> Tokens:
    """Show the tokens of one response of a batch, trace, stepper or run, coloured by a quantity; `.frame` has all
    numbers.

    Args:
        colour: one of `log_prob, ref_log_prob, kl, ratio, clipped, advantage, return, value, entropy, reward, mask,
            loss_mask, weight, sampler_difference, influence`, as far as the batch has them, or any [B, T] column of your own.
        against: another batch or trace, whose same row is shown beneath on the same scale.
        against_row: another row (of `against`, if given) to show beneath.
        tokenizer: gives the texts; by default that of the model in the batch's `meta_info`, or a stepper's. Without one,
            ids are shown.

    Raises `ValueError` for a quantity that the row does not have or a batch without token ids, `IndexError` for a row
    that does not exist.

    Example:
        >>> wb.views.tokens(s, 3, "advantage", against_row=5)  # doctest: +SKIP
    """
    rows = [TokenRow(thing, row, tokenizer)]
    labels = [row_name(rows[0].batch, row)]
    if against is not None or against_row is not None:
        other = row if against_row is None else against_row
        rows.append(TokenRow(thing if against is None else against, other, tokenizer))
        if against is None:
            labels.append(row_name(rows[1].batch, other))
        else:
            same = rows[0].prompt == rows[1].prompt
            labels = [f"row {row}, first", f"row {other}, second" + ("" if same else " (another prompt)")]
    return Tokens(rows, labels, colour)


DRAWN = 20_000
"""Most tokens that are drawn as points; of more tokens, evenly spaced ones are drawn."""


def sampler_logprob_diff(batch: DataProto) -> Figure:
    """Draw how much the sampler's and the trainer's log-probs of the same tokens differ.

    Left, a point for each response token: log-prob by the sampler (x) and by the trainer (y), in nats; points on the
    line agree. Right, a histogram of the differences, a line for each policy version that sampled rows. Raises
    `BatchError` where the batch lacks one of `rollout_log_probs`, `old_log_probs` and `response_mask`.
    """
    lacking = [name for name in ("rollout_log_probs", "old_log_probs", "response_mask") if name not in batch]
    if lacking:
        expected, found = "a batch with log-probs by sampler and trainer", f"no {', '.join(lacking)}"
        raise BatchError("a batch to draw", expected=expected, found=found, do="run the step until 'old_log_prob'")
    inside = batch["response_mask"].bool()
    sampled, scored = (batch[name].float()[inside] for name in ("rollout_log_probs", "old_log_probs"))
    gaps = scored - sampled
    written = batch["policy_version"] if "policy_version" in batch else torch.zeros(len(batch), dtype=torch.long)
    versions = written[:, None].expand(inside.shape)[inside]
    figure = cell_figure(9, 3.2, layout="constrained")
    left, right = figure.subplots(1, 2)
    every = max(len(gaps) // DRAWN, 1)
    left.scatter(sampled[::every], scored[::every], s=4, color="#4269d0", alpha=0.4, linewidths=0)
    low = float(min(sampled.min(), scored.min(), -1e-6)) if len(gaps) else -1.0
    left.plot([low, 0], [low, 0], color=GREY, linewidth=0.8)
    left.set(xlabel="log-prob by the sampler, nats", ylabel="by the trainer")
    edge = max(float(gaps.abs().max()) if len(gaps) else 0.0, 1e-7)
    for version in versions.unique().tolist():
        counts, edges = torch.histogram(gaps[versions == version].double(), bins=61, range=(-edge, edge))
        right.stairs(counts.numpy(), edges.numpy(), label=f"version {version}")
    right.set(xlabel="trainer minus sampler, nats", ylabel="tokens", yscale="symlog")
    right.legend(fontsize=8, frameon=False)
    mean = float(gaps.abs().mean()) if len(gaps) else 0.0
    title = f"{len(gaps):,} tokens: largest difference {doc.number(edge)} nats, mean {doc.number(mean)}"
    figure.suptitle(title, fontsize=10, color=GREY)
    for axes in (left, right):
        bare(axes, grid=None)
    return figure
