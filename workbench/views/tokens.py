"""The tokens of a response with every number that a batch has for them, coloured by one; a row turn by turn; trees of rows."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from workbench.agents.loop import AgentLoopBase
from workbench.agents.protocol import Turn
from workbench.agents.stepping import call_text
from workbench.base.errors import BatchError, message, unknown
from workbench.base.shown import plain
from workbench.dataproto.columns import declared
from workbench.dataproto.core import DataProto, row_name, sequence_of
from workbench.datasets.pictures import text_of
from workbench.engines.local_engine.loading import open_tokenizer
from workbench.engines.protocol import Late
from workbench.views import document as doc
from workbench.views import prose
from workbench.views.curves import GREY, bare, cell_figure
from workbench.views.sample_table import batch_of, object_at

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from workbench.agents.stepping import EpisodeStepper, EpisodeTree, TreeNode, TurnValue


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
    Quantity("kl", "log-prob under the policy less under the reference (k1), nats", ("old_log_probs", "ref_log_prob"),
             torch.sub, centre=0.0),
    Quantity("teacher_log_prob", "log-prob under the teacher, nats", ("teacher_log_probs",), inverted=True),
    Quantity("teacher_difference", "log-prob under the teacher less under the sampler, nats",
             ("teacher_log_probs", "rollout_log_probs"), torch.sub, centre=0.0),
    Quantity("divergence", "divergence from the teacher, nats", ("divergence",)),
    Quantity("ratio", "probability after the update over before", ("new_log_probs", "old_log_probs"),
             lambda after, before: (after - before).exp(), centre=1.0),
    Quantity("clipped", "whether the surrogate was clipped", ("clipped",)),
    Quantity("advantage", "how much better than expected", ("advantages",), centre=0.0),
    Quantity("return", "return from the token on", ("returns",), centre=0.0),
    Quantity("value", "the critic's value", ("values",), centre=0.0),
    Quantity("entropy", "entropy of the next-token distribution, nats", ("entropys",)),
    Quantity("reward", "reward on the token, KL penalty included", ("token_level_rewards", "token_level_scores"),
             centre=0.0),
    Quantity("mask", "1: the model's own token", ("response_mask",)),
    Quantity("loss_mask", "1: trained on; 0: rejected, or not the model's own", ("loss_mask",)),
    Quantity("weight", "importance weight, trainer over sampler", ("rollout_is_weights",), centre=1.0),
    Quantity("sampler_difference", "log-prob by the sampler less by the trainer, nats",
             ("rollout_log_probs", "old_log_probs"), torch.sub, centre=0.0),
    Quantity("influence", "influence on the probe", ("influence",), centre=0.0),
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
    return f"rgba({shade},{min(abs(share), 1) * 0.65:.2f})"


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
        lines: list[doc.Part] = [f"{self.colour}: {quantity.what}, {span[0]:.4g} to {span[1]:.4g}"]
        page: list[doc.Part] = [legend(quantity, span)]
        for label, row in zip(self.labels, self.rows, strict=True):
            lines += [f"{label}, {row.length} tokens", _row_text(row, self.colour)]
            facts = [f"{row.length} tokens", *judged(row)]
            page += [doc.line(doc.bold(label), *(f" · {fact}" for fact in facts)), _row_page(row, quantity, span)]
        return doc.Either(lines, page)


def judged(row: TokenRow) -> list[str]:
    """Return what a row was scored as, in words: its reward, the answer that was read and the ground truth; [] before it is
    scored.
    """
    score, model = (object_at(row.batch, name, row.row) for name in ("score", "reward_model"))
    if score is None:
        return []
    facts = [f"reward {score.value:.4g}" if score.scored else score.status.value.replace("_", " ")]
    texts = {"answer": score.answer, "truth": (model or {}).get("ground_truth")}
    return facts + [f"{name} {doc.one_line(text, 40)}" for name, text in texts.items() if text is not None]


def legend(quantity: Quantity, span: tuple[float, float]) -> doc.Part:
    """Build a legend: the quantity's name, what it is, and its colours with the numbers at both ends."""
    colours = f"linear-gradient(90deg, {', '.join(stops(quantity, span))})"
    swatch = doc.Span("", f"display:inline-block;width:140px;height:11px;border-radius:3px;background:{colours}")
    scale = f" \u00a0 {span[0]:.4g} ", swatch, f" {span[1]:.4g} \u00a0 "
    marks = doc.faint(doc.small("struck: rejected · underlined: clipped · dotted: not the model's own · grey: prompt"))
    return doc.line(doc.bold(quantity.name), " ", doc.small(quantity.what), scale, marks)


def _row_text(row: TokenRow, colour: str) -> str:
    there, values = colour in row.values, row.values.get(colour, [0.0] * row.length)
    each = zip(row.texts[:60], values, row.own, row.rejected, strict=False)
    pieces = [f"{text!r}" + f" {value:+.3g}" * (there and own) + " rejected" * gone for text, value, own, gone in each]
    return "  " + " · ".join(pieces) + (" …" if row.length > 60 else "")


def _row_page(row: TokenRow, quantity: Quantity, span: tuple[float, float]) -> doc.Part:
    prompt = "".join(row.prompt)
    before = doc.Span(f"… {prompt[-_PROMPT:]}" if len(prompt) > _PROMPT else prompt, "opacity:0.7")
    left = row.length - CAP
    tail = doc.line(f"{left:,} more tokens: a live notebook shows them", style="opacity:0.7") if left > 0 else ()
    return doc.line(before, coloured(row, range(min(row.length, CAP)), quantity, span), style=BOX), tail


def coloured(row: TokenRow, places: Iterable[int], quantity: Quantity, span: tuple[float, float]) -> doc.Part:
    """Show the tokens at some indices of a row, coloured by a quantity, each with all its numbers on hover."""
    return [_token(row, place, quantity, span) for place in places]


def _token(row: TokenRow, place: int, quantity: Quantity, span: tuple[float, float]) -> doc.Span:
    shaded = row.own[place] and quantity.name in row.values
    style = f"background:{colour_of(row.values[quantity.name][place], quantity, span)}" if shaded else ""
    if not row.own[place]:
        style += ";border-bottom:2px dotted rgba(128,128,128,0.9)"
    elif row.rejected[place]:
        style += ";text-decoration:line-through"
    elif row.values.get("clipped") and row.values["clipped"][place]:
        style += ";border-bottom:2px solid rgba(190,70,50,0.95)"
    numbers = "  ".join(f"{name} {values[place]:.4g}" for name, values in row.values.items())
    return doc.Span(visible(row.texts[place]), style, title=f"{place}  id {row.ids[place]}  {numbers}")


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
    right.set(xlabel="trainer less sampler, nats", ylabel="tokens", yscale="symlog")
    right.legend(fontsize=8, frameon=False)
    mean = float(gaps.abs().mean()) if len(gaps) else 0.0
    title = f"{len(gaps):,} tokens: largest difference {edge:.2g} nats, mean {mean:.2g}"
    figure.suptitle(title, fontsize=10, color=GREY)
    for axes in (left, right):
        bare(axes, grid=None)
    return figure


# --- turn by turn ----------------------------------------------------------------------------------

TURN_CAP = 1000
"""Most tokens of one turn in a static form."""
_EDGES = {"assistant": "rgba(130,80,223,0.7)", "tool": "rgba(46,160,67,0.7)", "user": "rgba(212,140,30,0.8)"}
_OTHER = "rgba(128,128,128,0.5)"


class TranscriptView(doc.View):
    """An episode turn by turn: prompt, turns with coloured tokens, and the episode's other sequences.
    `transcript(batch, row)` makes it.
    """

    def __init__(self, tokens: Tokens, row: TokenRow, turns: Sequence[Turn], prompt: Sequence[Any]) -> None:
        self.tokens = tokens
        self.sequences: tuple[TranscriptView, ...] = (self,)
        """The views of all sequences of the episode, in order, this one among them."""
        self.turns = tuple(turns)
        self.prompt = [one if isinstance(one, dict) else {"role": "user", "content": one} for one in prompt]
        self.rendered = self.formulas = False
        """Whether texts are drawn as Markdown and code, and formulas as MathML; else turns are coloured tokens."""
        self.label = row_name(row.batch, row.row)
        """The row's number, and for an episode of several rows the number of the sequence."""
        self._row = row

    @property
    def frame(self) -> pd.DataFrame:
        """A DataFrame with a line for each turn: role, text, indices of its first and last token, mask, calls, score,
        cut, edited.

        For an episode of several sequences it has the turns of all, with the column `sequence`, from 1.
        """
        import pandas as pd

        if len(self.sequences) > 1:
            each = [one._frame().assign(sequence=number) for number, one in enumerate(self.sequences, 1)]
            return pd.concat(each, ignore_index=True)
        return self._frame()

    def _frame(self) -> pd.DataFrame:
        import pandas as pd

        columns = ["role", "text", "first", "last", "mask", "calls", "score", "cut", "edited"]
        rows = [vars(turn) for turn in self.turns]
        calls = ["; ".join(map(call_text, turn.calls)) for turn in self.turns]
        mask = [int(turn.role == "assistant") for turn in self.turns]
        return pd.DataFrame(rows).assign(mask=mask, calls=calls).reindex(columns=columns)

    def head(self) -> str:
        """Summarise the transcript in one line: how many turns, calls and tokens, and how many tokens are the model's
        own.
        """
        calls = sum(len(turn.calls) for turn in self.turns)
        edited = [str(place) for place, turn in enumerate(self.turns) if turn.edited]
        parts = [doc.counted(len(self.turns), "turn"), *([doc.counted(calls, "call")] if calls else [])]
        parts += [*judged(self._row), f"{sum(self._row.own)} of {self._row.length} tokens are in the loss"]
        parts += [f"turn{'s' * (len(edited) > 1)} {', '.join(edited)} written by hand"] if edited else []
        return " · ".join(parts)

    def document(self) -> doc.Part:
        """Build the display: the prompt and the turns of each sequence, in HTML with coloured tokens."""
        return [
            one._alone(() if place else legend(*self.tokens.quantity())) for place, one in enumerate(self.sequences)
        ]

    def _alone(self, scale: doc.Part) -> doc.Part:
        row, places = self._row, range(len(self.turns))
        lines = [f"  {one['role']:9} (prompt) {doc.one_line(text_of(one['content']), 300)}" for one in self.prompt]
        page = [_block(_OTHER, f"{one['role']} · prompt", self._text(text_of(one["content"]))) for one in self.prompt]
        read = doc.Fold(f"the prompt as the model reads it: {len(row.prompt)} tokens", doc.block("".join(row.prompt)))
        head = doc.line(doc.bold(self.label), f" · {self.head()}"), scale
        text = [f"{self.label}: {self.head()}", lines, *map(self._turn_lines, places)]
        return doc.Either(text, [head, page, read, lambda: [self._turn(place) for place in places]])

    def _text(self, text: str) -> doc.Part:
        return prose.rendered(text, self.formulas) if self.rendered else doc.block(text)

    def _turn_lines(self, place: int) -> list[str]:
        turn = self.turns[place]
        lines = [f"{place:3} {turn.role:9} {_facts(turn, self._row)}  {doc.one_line(turn.text, 300)}"]
        lines += [f"      {call_text(call)}" for call in turn.calls]
        return lines + [f"      {doc.one_line(note, 300)}" for note in (turn.cut, turn.error) if note]

    def _turn(self, place: int) -> doc.Part:
        turn, (quantity, span) = self.turns[place], self.tokens.quantity()
        shown = range(turn.first, min(turn.last + 1, turn.first + TURN_CAP, self._row.length))
        left = turn.last + 1 - turn.first - len(shown)
        drawn = shown and not self.rendered
        body: list[doc.Part] = [
            doc.line(coloured(self._row, shown, quantity, span), style=BOX) if drawn else self._text(turn.text),
            doc.line(doc.faint(f"{left:,} more tokens")) if drawn and left > 0 else (),
            _calls(turn),
            [doc.line(doc.faint(note)) for note in (turn.cut, turn.error) if note],
        ]
        title = f"{place} · ", doc.bold(turn.role), f" · {_facts(turn, self._row)}"
        return _block(_EDGES.get(turn.role, _OTHER), title, body)


def transcript(
    thing: Any,
    row: int = 0,
    colour: str | None = None,
    *,
    tokenizer: Any = None,
    rendered: bool = False,
    formulas: bool = False,
) -> TranscriptView:
    """Show one row's episode turn by turn, with all its sequences, from a batch, trace, stepper, run or stepped
    episode.

    The tokens are coloured by `colour`, and have the same indices, as in `tokens`; a dotted underline means mask 0, not
    sampled by the model. A row without `turns` is one turn of the model. `.frame` has a line per turn. `rendered` draws
    the texts as Markdown and code in place of tokens, and with `formulas` LaTeX as MathML. Raises as `tokens` does.

    Example:
        >>> wb.views.transcript(s, 3, "advantage").frame  # doctest: +SKIP
    """
    first = TokenRow(thing, row, tokenizer)
    _, numbers = sequence_of(first.batch, row) or (row, [row])
    rows = [first if number == row else TokenRow(thing, number, tokenizer) for number in numbers]
    shown = Tokens(rows, [f"row {number}" for number in numbers], colour)
    main = [one for one in rows if "sub_agent" not in (object_at(one.batch, "agent_extra", one.row) or {})]
    # the prompts of later sequences and of sub-agents are not the row's
    views = tuple(_sequence(shown, one, prompted=one in main[:1]) for one in rows)
    for view in views:
        view.sequences, view.rendered, view.formulas = views, rendered, formulas
    return views[numbers.index(row)]


def _sequence(shown: Tokens, row: TokenRow, *, prompted: bool) -> TranscriptView:
    records, text, prompt = (object_at(row.batch, name, row.row) for name in ("turns", "response_text", "raw_prompt"))
    # without turns it is one response, or of a loop that keeps no transcript
    alone = Turn("assistant", str(text or "".join(row.texts)), 0, row.length - 1)
    turns = [Turn.from_dict(turn) for turn in records or ()] or [alone]
    chat = [] if prompt is None or not prompted else [prompt] if isinstance(prompt, str) else list(prompt)
    return TranscriptView(shown, row, turns, chat)


def episode(stepper: EpisodeStepper, rendered: bool = False, formulas: bool = False) -> doc.Part:
    """Build the display of an `EpisodeStepper`: the transcript so far, and whose turn is next."""
    view = transcript(stepper.batch, 0, tokenizer=stepper.tokenizer, rendered=rendered, formulas=formulas)
    for number, one in enumerate(view.sequences, 1):
        several = f"episode {stepper.number}, sequence {number} of {len(view.sequences)}"
        one.label = several if len(view.sequences) > 1 else f"row {stepper.row}"
    return view.document(), doc.line(doc.bold(_upcoming(stepper)))


def _upcoming(stepper: EpisodeStepper) -> str:
    if (who := stepper.next_role) is None:
        return f"over: {stepper.output.finish_reason}"
    if who == "tool":
        return (
            f"next: the tool, {'; '.join(f'{one.name}({doc.one_line(one.arguments, 200)})' for one in stepper.asked)}"
        )
    return "next: the model" if who == "assistant" else "next: the user"


def _facts(turn: Turn, row: TokenRow) -> str:
    count = turn.last + 1 - turn.first
    places = f"tokens {turn.first} to {turn.last}" if count > 0 else "no tokens"
    own = row.own[turn.first : turn.last + 1]
    facts = [places, *([f"mask {int(all(own))}" if len(set(own)) == 1 else "mask mixed"] if own else [])]
    facts += [f"score {turn.score:g}"] if turn.score is not None else []
    facts += ["written by hand"] if turn.edited else []
    return " · ".join(facts)


def _calls(turn: Turn) -> doc.Part:
    rows: list[list[doc.Part]] = []
    for call in turn.calls:
        notes = "; ".join(filter(None, (call.why, call.cut)))
        reward = "" if call.reward is None else doc.number(call.reward, "g")
        rows.append([call.name, doc.block(call.arguments), call.status, doc.block(call.result), reward, notes])
    return doc.Table(["call", "arguments", "status", "answer", "reward", "note"], rows)


def _block(edge: str, title: doc.Part, body: doc.Part) -> doc.Part:
    head = doc.line(title, style="opacity:0.8;font-size:90%")
    return doc.line(head, body, style=f"border-left:3px solid {edge};padding:1px 0 3px 8px;margin:5px 0")


def agent_loop(loop: AgentLoopBase) -> doc.Part:
    """Build the display of an agent loop: its tools with their arguments, simulated users, parser and limits."""
    settings = dict(loop.describe())
    tools = [one.get("function", {}) for one in settings.pop("tools", [])]
    rows = [[one.get("name", ""), _arguments(one), doc.block(one.get("description", ""))] for one in tools]
    users = settings.pop("interactions", [])
    return (
        doc.line(doc.bold(type(loop).__name__), " ", str(settings.pop("name", ""))),
        doc.Table(["tool", "arguments", "description"], rows),
        doc.line(f"users: {', '.join(users)}") if users else (),
        doc.Fold("settings", doc.pairs([(name, str(value)) for name, value in settings.items()])),
    )


def _arguments(function: Mapping[str, Any]) -> str:
    parameters = function.get("parameters") or {}
    needed = set(parameters.get("required") or ())
    kinds = {name: str(one.get("type", "any")) for name, one in (parameters.get("properties") or {}).items()}
    return ", ".join(f"{name}: {kind}" + ("" if name in needed else " (optional)") for name, kind in kinds.items())


# --- a tree of continuations ------------------------------------------------------------------------

_TURN_TEXT = 90
"""Most characters of a turn that are shown."""


def tree(tree: EpisodeTree) -> doc.Part:
    """Build the display of an `EpisodeTree`: what each stretch of the recorded episode was worth, then all nodes."""
    nodes = tree.nodes
    stretches = [
        [node.places, _turns_text(node), _number(before), _number(node.value), _signed(gained)]
        for node, before, gained in _gains(tree)
    ]
    rewards = [float(one) for one, scored in zip(tree.batch["reward"], tree.batch["scored"], strict=True) if scored]
    low, high = min((*rewards, 0.0)), max((*rewards, 1.0))
    left = len(tree.leaves) - len(rewards)
    points = ", ".join(map(str, tree.points))
    facts = [
        f"row {tree.leaves[0].row}: {doc.counted(len(tree.leaves) - 1, 'continuation')}",
        f"from turn{'s' * (len(tree.points) > 1)} {points}",
        *([f"{left} of {len(tree.leaves)} leaves have no score and count in no mean"] if left else []),
    ]
    return (
        doc.line(doc.bold(" · ".join(facts))),
        doc.Table(["turns", "recorded", "value before", "value after", "advantage"], stretches),
        doc.Fold(
            f"the tree: {doc.counted(len(nodes), 'node')}, equal ones joined",
            lambda: doc.Table(["turns", "leaves", "value", "credit", ""], _lines(nodes, low, high)),
            opened=True,
        ),
        doc.line(
            doc.faint("value ± standard error · credit: value − mean of the other continuations from its first turn")
        ),
    )


def credit(tree: EpisodeTree) -> pd.DataFrame:
    """Make the DataFrame that `Tree.credit` returns: what each stretch of the recorded episode gained."""
    import pandas as pd

    lines = []
    for node, before, gained in _gains(tree):
        words = {"turns": node.places, "role": node.turns[0].role, "text": node.turns[0].text}
        values = {"before": before.mean, "before_error": before.error}
        values |= {"after": node.value.mean, "after_error": node.value.error}
        lines.append(words | values | {"advantage": gained.mean, "error": gained.error, "n": before.count})
    return pd.DataFrame(lines)


def frame(tree: EpisodeTree) -> pd.DataFrame:
    """Make the DataFrame that `Tree.to_pandas` returns: one line for each node."""
    import pandas as pd

    rows = [
        {
            "node": node.number,
            "parent": node.parent,
            "turns": node.places,
            "recorded": node.recorded,
            "text": " ⏎ ".join(turn.text for turn in node.turns),
            "leaves": len(node.leaves),
            "value": node.value.mean,
            "error": node.value.error,
            "credit": node.credit.mean,
            "credit_error": node.credit.error,
        }
        for node in tree.nodes
    ]
    return pd.DataFrame(rows).astype({"parent": "Int64"})


def _gains(tree: EpisodeTree) -> Iterator[tuple[TreeNode, TurnValue, TurnValue]]:
    """Yield (a stretch of the recorded episode, the value before it, what the stretch gained)."""
    for node in tree.nodes:
        if node.recorded and node.parent is not None:
            before = tree.value(node.first)
            yield node, before, node.value.minus(before)


def _lines(nodes: Sequence[TreeNode], low: float, high: float) -> list[list[doc.Part]]:
    depth: dict[int | None, int] = {None: -1}
    rows: list[list[doc.Part]] = []
    for node, count in _alike(nodes):
        level = depth[node.number] = depth[node.parent] + 1
        places = node.places or "the prompt"
        places = (
            f"turn {places}" if node.places and len(node.turns) == 1 else f"turns {places}" if node.places else places
        )
        name = doc.bold(places) if node.recorded else places
        shown = doc.Either(["  " * level, name], doc.Span(name, f"padding-left:{1.4 * level:g}em;white-space:nowrap"))
        share = (node.value.mean - low) / ((high - low) or 1.0)
        value = doc.Span(
            doc.bar(0.0 if math.isnan(share) else share, _number(node.value), share >= 0.5), "white-space:nowrap", "div"
        )
        rows.append([shown, f"{count}", value, _signed(node.credit), _turns_text(node)])
    return rows


def _alike(nodes: Sequence[TreeNode]) -> list[tuple[TreeNode, int]]:
    """Return the nodes with their numbers of leaves; continuations with equal texts and equal rewards are joined into
    one.
    """
    groups: dict[object, tuple[TreeNode, int]] = {}
    for node in nodes:
        texts = tuple(turn.text for turn in node.turns)
        alike = node.number if node.recorded else (node.parent, texts, str(node.value.mean))
        first, count = groups.get(alike, (node, 0))
        groups[alike] = first, count + len(node.leaves)
    return list(groups.values())


def _turns_text(node: TreeNode) -> doc.Part:
    """Show the text of a node's turns, those of tools paler."""
    parts: list[doc.Part] = []
    for turn in node.turns:
        text = doc.one_line(" ".join(turn.text.split()), _TURN_TEXT)
        parts += [*([" ⏎ "] if parts else []), text if turn.role == "assistant" else doc.faint(text)]
    return doc.Either(parts, doc.wrapped(parts))


def _number(estimate: TurnValue) -> str:
    known = not math.isnan(estimate.error) and estimate.error > 0
    return doc.number(estimate.mean, ".3g") + (f" ± {estimate.error:.2g}" if known else "")


def _signed(estimate: TurnValue) -> doc.Part:
    """Format a difference with its sign, coloured where it is beyond two standard errors."""
    if math.isnan(estimate.mean):
        return "–"
    error = f" ± {estimate.error:.2g}" if estimate.error > 0 else ""
    clear = not math.isnan(estimate.error) and abs(estimate.mean) > 2 * estimate.error
    shade = f"background:rgba({doc.UP if estimate.mean > 0 else doc.DOWN},0.18);padding:0 4px;" if clear else ""
    return doc.Span(f"{estimate.mean:+.3g}{error}", f"{shade}white-space:nowrap")
