"""Batches as tables of columns (`f32[256,1024]`, which stage wrote it, first values); phases, traces, steppers, pipelines, runs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from workbench.base.memory import gib
from workbench.base.metrics import reduce
from workbench.dataproto.columns import declared
from workbench.dataproto.core import SESSION, DataProto
from workbench.dataproto.value import held, one_place
from workbench.replay.remote import is_address
from workbench.replay.run import Run
from workbench.rewards.score import Score
from workbench.runs.folder import STEP, goes_on
from workbench.runs.symptoms import Symptoms, Watch, shown_by
from workbench.runs.trackers import KL
from workbench.runs.updates import kept_until, ranges
from workbench.steps.stepper import outdated
from workbench.views import document as doc
from workbench.views.curves import TITLES, WORDS, figure, panel, pick, series
from workbench.views.plots import Plots
from workbench.views.sample_table import counted_reasons, gathered, left_out, samples_table, some_rows
from workbench.views.samples import SampleIndex, samples

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from workbench.datasets.preferences import Samples
    from workbench.datasets.rows import Report, Rows
    from workbench.replay.rebuild import Counterfactual
    from workbench.replay.run import Summary, Traces
    from workbench.runs.preflight import Preflight
    from workbench.stages.pipeline import Pipeline
    from workbench.stages.stage import Outcome
    from workbench.steps.stepper import Stepper
    from workbench.steps.trace import Phase, Trace
    from workbench.steps.tune import Tuning


PREVIEW_ITEMS = 4
PREVIEW_TEXT = 48
_LEFT = 8
"""Most left-out rows that are shown under a trace."""


def kind_of(batch: DataProto, name: str) -> str:
    """Return a column's dtype and shape as `f32[256,1024]` or `obj[256]`, without reading values from disk."""
    if name not in batch.batch:
        return f"obj[{len(batch)}]"
    raw: Any = batch.batch.raw()[name]
    dtype = str(raw.dtype).removeprefix("torch.").replace("float", "f").replace("uint", "u").replace("int", "i")
    return f"{dtype}[{','.join(map(str, raw.shape))}]"


def preview(batch: DataProto, name: str) -> str:
    """Return a column's first values as text: of its first row, or of the first rows where it has one value per row."""
    if not len(batch):
        return ""
    if name in batch.batch:
        tensor = batch.batch.part(name, 0, PREVIEW_ITEMS)
        flat = (tensor if tensor.dim() == 1 else tensor[0].reshape(-1))[:PREVIEW_ITEMS]
        text = " ".join(doc.number(value) if isinstance(value, float) else str(value) for value in flat.tolist())
        total = len(batch) if tensor.dim() == 1 else tensor[0].numel()
        return text + (" …" if total > PREVIEW_ITEMS else "")
    return doc.one_line(doc.cut(batch.non_tensor_batch.part(name, 0, 1)[0], PREVIEW_TEXT).replace("\n", "⏎"))


def _title(batch: DataProto) -> str:
    """Summarise a batch: `DataProto of 64 rows (P=8 G=8 B=64 S=41 T=40)`, with those shape letters that it shows."""
    sizes = {"B": len(batch)}
    if "uid" in batch and len(batch):
        prompts = len(set(batch["uid"]))
        sizes = {"P": prompts, "G": len(batch) // prompts, **sizes}
    for name, raw in batch.batch.raw().items():
        column = declared(name)
        if column is not None and len(column.dims) == 2 and column.dims[1] in ("S", "T"):
            sizes.setdefault(column.dims[1], int(raw.shape[1]))
    letters = " ".join(f"{letter}={size}" for letter, size in sizes.items())
    return f"DataProto of {len(batch)} rows ({letters})"


def batch(batch: DataProto) -> doc.Part:
    """Build the display of a `DataProto`: each column's name, dtype, shape, writing stage and first values; its
    `meta_info`.
    """
    rows = []
    for name in batch.columns:
        origin, by = batch.origins.get(name), doc.Span("–")
        if origin is not None:
            when = f"step {origin.step}, policy version {origin.policy_version}, settings {origin.settings}"
            by = doc.Span(origin.stage, title=when)
        rows.append([_named(name), doc.Span(kind_of(batch, name), tag="code"), by, doc.faint(preview(batch, name))])
    meta = [(key, doc.cut(repr(value), 1000)) for key, value in batch.meta_info.items()]
    header, most = ["column", "kind", "written by", "first values"], len(rows)
    columns = doc.Either(doc.Table([""] * 4, rows, most=most), doc.Table(header, rows, most=most))
    return doc.Fold(_title(batch), columns, opened=True), doc.Fold("meta_info", doc.pairs(meta))


def _named(name: str) -> doc.Part:
    column = declared(name)
    return doc.bold(doc.cut(name, doc.CELL), title=column.doc if column else "not one of the declared columns")


def outcome(outcome: Outcome) -> doc.Part:
    """Build the display of a stage's `Outcome`: the batch, and the stage's metrics."""
    metrics = [(name, doc.number(value)) for name, value in reduce([outcome.metrics]).items()]
    moved = doc.small(f"{len(outcome.rows)} rows, taken from the batch before") if outcome.rows is not None else ()
    title = f"{len(metrics)} metrics"
    lines = [title, *(f"  {name} {value}" for name, value in metrics)]
    return batch(outcome.batch), doc.Either(lines, (moved, doc.Fold(title, doc.pairs(metrics))))


def data(data: Rows | Report | Samples) -> doc.Part:
    """Build the display of data `Rows`, of a `Report` on them, or of preference `Samples`: one fact per line, such as
    the number of rows.
    """
    return doc.pairs(data.lines())


# --- phases in a word ----

_HEADLINES: Mapping[str, tuple[tuple[str, str], ...]] = {
    "rollout": (("response_length/mean", "{} tokens a response"), ("response/cut_ratio", "{1:.1%} cut off")),
    "filter_groups": (
        ("filter_groups/kept", "{} groups kept"), ("filter_groups/dropped", "{} groups dropped for equal rewards"), ("train/num_gen_batches", "{} batches"),
    ),
    "old_log_prob": (("actor/entropy", "{} nats entropy"),),
    "values": (("critic/values/mean", "{} mean value"),),
    "advantage": (
        ("critic/advantages/max", "{} largest advantage"), ("advantage/zero_share", "{1:.0%} of the rows have advantage 0"),
    ),
    "update_critic": (("critic/vf_loss", "{} value loss"), ("critic/grad_norm", "{} gradient norm")),
    "update_actor": (
        ("actor/grad_norm", "{} gradient norm"), ("actor/pg_clipfrac", "{1:.1%} clipped"), ("actor/ppo_kl", "{} KL"),
    ),
}  # fmt: skip
"""Stage → its main metrics, and the words for each."""
_JUDGED = ("uid", SESSION, "reward", "scored", "score")


def headline(phase: Phase) -> str:
    """Describe a phase in words: `64 samples · 24 right · 3 of 8 groups have equal rewards` or `0.3 gradient norm ·
    2.1% clipped`.

    It warns where nothing can be learned. A phase without words of its own shows its first metric, or "" where it has
    none.
    """
    forms, metrics = _HEADLINES.get(phase.stage, ()), phase.metrics
    parts = [form.format(doc.number(metrics[key]), metrics[key]) for key, form in forms if key in metrics]
    if "reward" in phase.wrote and "reward" in phase.batch.batch and (judged := _judged(phase.batch).headline):
        parts = [judged]
    elif not parts and metrics:
        key = "critic/score/mean" if "critic/score/mean" in metrics else next(iter(metrics))
        parts = [f"{doc.number(metrics[key])} {WORDS.get(key, key)}"]
    parts += ["no row was scored"] if metrics.get("reward/scored_ratio") == 0 else []
    parts += ["every advantage is 0: nothing to learn"] if metrics.get("advantage/zero_share") == 1 else []
    return " · ".join(parts)


_indices: WeakKeyDictionary[DataProto, SampleIndex] = WeakKeyDictionary()
"""Batch, which does not change → the table of its rewards, which its later phases share."""


def _judged(batch: DataProto) -> SampleIndex:
    """Index the rewards of a batch, as the samples table does; only the columns needed are read, and only once."""
    for other, index in [*_indices.items()]:  # later phases have the columns of the phase that judged
        if len(other) == len(batch) and all(one_place(held(batch, name), held(other, name)) for name in _JUDGED):
            return index
    single = "reward" not in batch or len(batch.batch.raw()["reward"].shape) == 1
    kept = batch.without(*(name for name in batch.columns if name not in (_JUDGED if single else _JUDGED[:2])))
    if "score" in kept:
        scores, kept = list(kept.non_tensor_batch.passing("score")), kept.without("score")
        kept = kept.with_columns({"score": scores}) if all(isinstance(one, Score) for one in scores) else kept
    return _indices.setdefault(batch, SampleIndex(kept))


def _seconds(phase: Phase) -> str:
    return "reused" if phase.reused else f"{phase.seconds:{'.2f' if phase.seconds >= 0.1 else '.1g'}} s"


# --- traces -------------------------------------------------------------------------------


def trace(trace: Trace) -> doc.Part:
    """Build the display of a `Trace`: for each phase seconds, main metric and columns written, and which rows were left
    out; in HTML also metrics and settings.
    """
    step = f" of step {trace.step}" if trace.step is not None else ""
    title = f"Trace{step}: {len(trace)} phases, {len(trace.batch)} rows, {trace.metrics['timing_s/step']:.2f} s"
    if not (other := left_out(trace, trace.batch)):
        return doc.line(doc.bold(title)), phases(trace)
    summary = counted_reasons(why for one in other for why in one.why)
    table = doc.Fold(summary, lambda: samples(gathered(other, _LEFT), _LEFT, "index").document())
    return doc.line(doc.bold(title)), phases(trace), doc.Either(f"{summary}: wb.views.samples(trace).left_out", table)


def phases(trace: Iterable[Phase]) -> doc.Part:
    """Show the phases of a trace as a table: seconds, main metric, columns written."""
    text, page = list[list[doc.Part]](), list[list[doc.Part]]()
    for phase in trace:
        shown, _, note = _apart(phase.wrote)
        wrote = ", ".join([*(f"{name} {kind_of(phase.batch, name)}" for name in shown), *note])
        seconds, words, more = _seconds(phase), headline(phase), doc.line(_beneath(phase), style="white-space:nowrap")
        text += [[phase.stage, seconds, words], ["", "", f"→ {wrote}"]]
        page.append([doc.bold(phase.stage), seconds.replace(" ", "\u00a0"), words, wrote, more])
    return doc.Either(doc.Table([""] * 3, text), doc.Table(["phase", "time", "headline", "wrote", ""], page))


def _ordered(phase: Phase) -> list[tuple[str, str]]:
    """Return a phase's metrics as (name, number), those of its headline first, then the other main ones, in words."""
    first = dict(_HEADLINES.get(phase.stage, ()))
    ordered = sorted(phase.metrics.items(), key=lambda pair: (pair[0] not in first, pair[0] not in TITLES))
    return [(TITLES.get(name, name), doc.number(value)) for name, value in ordered]


def _beneath(phase: Phase, seen: int = 0) -> doc.Part:
    """Show a phase's metrics after the first `seen`, and its settings, folded."""
    more = _ordered(phase)[seen:]
    title = f"{len(more)} {'further ' if seen else ''}metrics"
    settings = doc.Table(["setting", "value"], [[name, str(value)] for name, value in phase.settings.items()])
    sources = [doc.Fold(f"source of {name}", doc.Span(text, tag="pre")) for name, text in phase.source.items()]
    table = doc.Fold(title, doc.Table(["metric", "value"], more, most=len(more))) if more else ()
    return table, doc.Fold("settings", (settings, sources))


# --- steppers -----------------------------------------------------------------------------

_STEP = "flex:1 1 118px;padding:5px 8px 8px;border-right:1px solid rgba(128,128,128,.28);border-top:3px solid rgba("
_PICKED = "56,139,253,.9)"
_LINE = "display:flex;flex-wrap:wrap;border:1px solid rgba(128,128,128,.28);border-radius:4px;margin-bottom:8px;font-size:13px"


class Chip(NamedTuple):
    """One phase in the row of phases of a stepper's view."""

    name: str
    mark: str
    """● done, ▶ next, ○ to come."""
    time: str
    """The phase's seconds, or `reused`; empty (like the headline) where the phase has not run."""
    headline: str
    share: str = "0%"
    """The phase's seconds as a share of those of all phases that have run."""


def chips(stepper: Stepper) -> list[Chip]:
    """Return the phases of a stepper as chips: done, next, to come."""
    whole = sum(one.seconds for one in stepper.trace if not one.reused) or 1.0
    done = [
        Chip(name, "●", _seconds(one), headline(one), f"{0 if one.reused else 100 * one.seconds / whole:.3g}%")
        for name, one in zip(stepper.pipeline.names, stepper.trace, strict=False)
    ]
    ahead = stepper.pipeline.names[len(done) :]
    return done + [Chip(name, "○" if place else "▶", "", "") for place, name in enumerate(ahead)]


def stepper(stepper: Stepper) -> doc.Part:
    """Build the display of a `Stepper`: its phases in a row (done, next, to come) under a line with time as length, what
    the last one wrote, and the step's groups of samples.

    For a replayed step also notes on what is recorded and which weights it has.
    """
    strip, boxes, times = list[str](), list[doc.Part](), list[doc.Part]()
    for place, chip in enumerate(chips(stepper)):
        strip.append(f"{chip.mark} {chip.name}")
        below = doc.small(" · ".join(filter(None, chip[2:4])))
        edge = _PICKED if place == stepper.position - 1 else "0,0,0,0)"
        boxes.append(doc.line(doc.bold(strip[-1]), doc.line(below) if chip.time else (), style=_STEP + edge))
        shade = _PICKED if place == stepper.position - 1 else f"{doc.MUCH},{0.45 if place % 2 else 0.8})"
        times.append(doc.Span("", f"height:8px;width:{chip.share};background:rgba({shade}", title=chip.name))
    line = doc.line(times, style="display:flex;margin-bottom:2px") if len(stepper.trace) else ()
    shown = step_groups(stepper.trace.phases[-1].batch) if len(stepper.trace) else ()
    page = line, doc.line(boxes, style=_LINE)
    return doc.Either("  ".join(strip), page), standing(stepper), doc.Either(page=lambda: _groups(shown))


def standing(stepper: Stepper, shown: str | None = None) -> doc.Part:
    """Show what is under a stepper's phases: the columns that the last phase wrote, or the phase `shown`. The stepper
    does not move.
    """
    past, style = stepper.trace, "font-size:90%;opacity:0.75"
    head = [doc.line(doc.bold(note)) for note in outdated(stepper.pipeline)]
    prices = stepper.prices().items()
    head += [doc.line(f"weights of {role!r} kept for back(): {price}") for role, price in prices if price]
    notes = [doc.Either(f"  · {note}", doc.line(f"· {note}", style=style)) for note in getattr(stepper, "notes", ())]
    if not len(past):
        return head, f"nothing has run yet; {doc.counted(len(stepper.batch), 'prompt')} are waiting", notes
    one = past[shown] if shown is not None else past.phases[-1]
    others = [other for other in past if other is not one]
    title = f"the other {doc.counted(len(others), 'phase')}: metrics and settings"
    earlier = doc.Fold(title, lambda: phases(others)) if others else ()
    return head, phase(one, past.before(one.stage)), earlier, notes


GROUPS = 6
"""Most groups of a step that its page shows: those whose rewards differ most."""
_TRACK, _DOT = 160, 5
"""Width of the line that a group's dots lie on, and radius of a dot, in pixels."""


class StepGroup(NamedTuple):
    """The samples of one prompt in a step, as its page shows them."""

    words: str
    """Number of samples, mean and deviation of their rewards."""
    prompt: str
    dots: Sequence[tuple[int, float]]
    """(row, reward) of the scored samples."""
    answers: Sequence[tuple[int, str, str]]
    """(row, reward in words, response) of the best and the worst sample, or of the first one before the rewards."""


def step_groups(batch: DataProto) -> list[StepGroup]:
    """Describe a step's groups of samples, those whose rewards differ most first; [] before the rollout. Only texts of
    the shown rows are read.
    """
    if "response_text" not in batch or not len(batch):
        return []
    index = _judged(batch)
    judged = "reward_std" in index.groups
    order = index.groups.sort_values("reward_std", ascending=False, kind="stable") if judged else index.groups
    members = {group: index.frame[index.frame["group"] == group] for group in order.index[:GROUPS]}
    known = {
        group: rows["reward"].dropna().sort_values(kind="stable") for group, rows in members.items() if "reward" in rows
    }
    scored = {group: [(int(row), float(one)) for row, one in known.get(group, {}).items()] for group in members}
    ends = {group: [one[-1][0], one[0][0]] if one else [int(members[group].index[0])] for group, one in scored.items()}
    shown = {group: ends[group][: len({reward for _, reward in scored[group]}) or 1] for group in members}
    wanted = sorted(row for rows in shown.values() for row in rows)
    texts = dict(zip(wanted, samples_table(some_rows(batch, wanted)).to_dict("records"), strict=True))
    made = []
    for group, rows in shown.items():
        answers = [(row, doc.number(texts[row].get("reward")), str(texts[row]["response"])) for row in rows]
        of = index.groups.loc[group]
        mean, deviation = (doc.number(of.get(f"reward_{name}")) for name in ("mean", "std"))
        rewards = f" · {mean} ± {deviation}" if len(rows) > 1 else f" · all {answers[0][1]}"
        words = doc.counted(int(of["samples"]), "sample") + rewards * (len(scored[group]) > 1)
        made.append(StepGroup(words, str(texts[rows[0]].get("prompt") or ""), scored[group], answers))
    return made


def _groups(groups: Sequence[StepGroup]) -> doc.Part:
    """Show groups as a table: the prompt, a dot for each sample at its reward, the best and the worst answer to unfold."""
    every = [reward for group in groups for _, reward in group.dots]
    ends, rows = (min(every, default=0.0), max(every, default=1.0)), list[list[doc.Part]]()
    for group in groups:
        folds = [
            doc.Fold(doc.cut(f"{reward} · {text}".replace("\n", " ⏎ "), 90), doc.block(doc.cut(text, doc.CELL)))
            for _, reward, text in group.answers
        ]
        dots = _dots([reward for _, reward in group.dots], *ends)
        rows.append([doc.cut(group.prompt, 90), (dots, doc.small(doc.faint(group.words))), folds])
    scale = f"rewards, {doc.number(ends[0])} to {doc.number(ends[1])}: mean ± deviation"
    return doc.Table(["prompt", scale, "best and worst answer"], rows)


def _dots(rewards: Sequence[float], low: float, high: float) -> doc.Part:
    """Draw ascending rewards as dots on a line from `low` to `high`, those of one reward beside each other; green above
    the mean, orange below, grey where all are equal.
    """
    dots, again = list[str](), Counter[float]()
    for reward in rewards:
        share = (reward - low) / (high - low) if high > low else 0.5
        apart = (-1 if share > 0.5 else 1) * min(again[reward] * _DOT, 12 * _DOT)
        again[reward] += 1
        even, below = rewards[0] == rewards[-1], reward * len(rewards) < sum(rewards)
        rgb = "128,128,128" if even else doc.DOWN if below else doc.UP
        dots.append(f"{_DOT + share * (_TRACK - 2 * _DOT) + apart:.0f}px 0 rgba({rgb},.8)")
    # the dots are shadows of one that is left of the line
    dot = f"display:block;width:8px;height:8px;margin:-5px 0 0 -4px;border-radius:50%;box-shadow:{','.join(dots)}"
    line = f"width:{_TRACK}px;height:9px;margin-top:8px;border-top:1px solid rgba(128,128,128,.4)"
    return doc.line(doc.Span("", dot), style=line) if dots else ()


# --- phases -------------------------------------------------------------------------------


def phase(phase: Phase, before: DataProto | None = None) -> doc.Part:
    """Build the display of a `Phase`: its main metric, and each column that it wrote; in HTML also its metrics and
    settings.
    """
    words = headline(phase)
    text = f"{phase.stage} ({_seconds(phase)}): {', '.join(filter(None, (words, 'wrote')))}"
    title = doc.Either(
        text, doc.line(doc.bold(phase.stage), *(f" · {part}" for part in (_seconds(phase), words) if part))
    )
    columns = fields(phase, before)
    boxes = [pair for pair in _ordered(phase)[:BOXES] if "/" not in pair[0]]  # those that have a title
    return title, doc.Either(columns, (_boxes(boxes, _MIDDLE), columns, _beneath(phase, len(boxes))))


_BOX = "display:inline-block;vertical-align:middle;padding:4px 10px;margin:3px;border-radius:4px;text-align:center;border:1px solid rgba("
_ARROW = "display:inline-block;vertical-align:middle;font-size:11px;opacity:0.75;max-width:150px;margin:3px"


def pipeline(pipeline: Pipeline) -> doc.Part:
    """Build the display of a `Pipeline`: its stages as boxes, between them the columns that one writes and a later one
    reads.
    """
    stages = list(pipeline)
    boxes: list[doc.Part] = []
    for place, stage in enumerate(stages):
        edge = _PICKED if stage.updates else "128,128,128,.28)"
        moves = f"reads {', '.join(stage.reads)}; writes {', '.join(stage.writes)}"
        name = doc.bold(stage.name), doc.BREAK, doc.small(type(stage).__name__)
        boxes.append(doc.line(name, style=f"{_BOX}{edge}", title=moves))
        if place + 1 < len(stages):
            later = {name for stage in stages[place + 1 :] for name in stage.reads}
            used = [doc.cut(name, 40) for name in stage.writes if name in later]
            boxes.append(doc.line(doc.stacked(used), " →" if used else "", style=_ARROW))
    rows = list[list[doc.Part]]()
    for stage in stages:
        rows.append([doc.bold(stage.name), ", ".join(stage.reads), ", ".join(stage.writes), repr(stage)])
    beside = ", rewards computed during the rollout" if pipeline.overlap else ""
    beside += f"; in training the update's own forward pass computes {pipeline.left_out}" if pipeline.left_out else ""
    return (
        f"Pipeline of {len(pipeline)} stages{beside}",
        doc.Either(page=doc.line(boxes)),
        doc.Fold("reads, writes, settings", doc.Table(["stage", "reads", "writes", "settings"], rows)),
    )


# --- columns that a phase wrote -----------------------------------------------------------------

ENOUGH = 1 << 18
"""Most elements of a column that are read; of a larger column evenly spaced rows are read, and the view says so."""
_PIECES = 16
_IDS = ("prompts", "responses", "input_ids", "position_ids")


def field_of(batch: DataProto, name: str) -> tuple[int, str, str]:
    """Summarise a column; returns (rows that were read, `0.41 ± 0.49 [0, 1]`, a histogram of twelve characters).

    Of per-token columns only response tokens count. Columns of ids have a range and no mean, columns of objects their
    most common values. Nothing that is read stays in memory.
    """
    if name not in batch.batch:
        shown = min(len(batch), 4096)
        return shown, _common(list(batch.non_tensor_batch.part(name, 0, shown))), ""
    shape = batch.batch.raw()[name].shape
    pieces = _pieces(shape[0], max(math.prod(shape[1:]), 1))
    values = torch.cat([torch.empty(0), *(_values(batch, name, start, stop) for start, stop in pieces)])
    finite, notes, histogram = values[values.isfinite()], [], ""
    if len(finite):
        low, high = finite.min().item(), finite.max().item()
        histogram = spark(finite, low, high)
        mean, deviation = doc.number(finite.mean().item()), doc.number(finite.std(correction=0).item())
        notes = [*([] if name in _IDS else [f"{mean} ± {deviation}"]), f"[{doc.number(low)}, {doc.number(high)}]"]
    notes += [f"{len(values) - len(finite)} not finite"] if len(finite) < len(values) else []
    return sum(stop - start for start, stop in pieces), "  ".join(notes), histogram


def _pieces(rows: int, width: int) -> list[tuple[int, int]]:
    """Return evenly spaced ranges of rows that together have at most `ENOUGH` elements."""
    if rows * width <= ENOUGH:
        return [(0, rows)] if rows else []
    pieces = min(_PIECES, rows)
    each = max(ENOUGH // width // pieces, 1)
    return [(start, start + each) for start in (place * rows // pieces for place in range(pieces))]


def _values(batch: DataProto, name: str, start: int, stop: int) -> torch.Tensor:
    """Return the values of some rows, flat float64; padding of response-shaped columns is left out."""
    tensor = batch.batch.part(name, start, stop)
    column = declared(name)
    per_token = column is not None and column.dims == ("B", "T") and not name.endswith("mask")
    if per_token and "response_mask" in batch:
        tensor = tensor[batch.batch.part("response_mask", start, stop).bool()]
    return tensor.reshape(-1).double()


def spark(values: torch.Tensor, low: float, high: float) -> str:
    """Draw a histogram of values from `low` to `high` in twelve characters; a single full bar where all values are
    equal.
    """
    if low == high:
        return doc.heights([1], 1)
    if not math.isfinite(high - low):
        return ""
    counts = torch.histc(values, 12, low, high)
    return doc.heights(counts.tolist(), float(counts.max()))


def _common(values: list[Any]) -> str:
    if not values:
        return ""
    if all(isinstance(value, str) for value in values):
        counts = Counter(values)
        if len(counts) > 8 or max(map(len, counts)) > 40:
            lengths = torch.tensor([float(len(value)) for value in values])
            return f"{len(counts)} texts of {lengths.min():.0f} to {lengths.max():.0f} characters"
        return ", ".join(f"{doc.cut(doc.one_line(value), 24)} ×{count}" for value, count in counts.most_common(4))
    statuses = Counter(str(value.status.value) for value in values if hasattr(value, "status"))
    if statuses:
        return ", ".join(f"{count} {status}" for status, count in statuses.most_common(4))
    kinds = Counter(type(value).__name__ for value in values)
    return ", ".join(f"{count} {kind}" for kind, count in kinds.most_common(3))


_BOOKKEEPING = frozenset((
    "prompts", "prompt_mask", "responses", "response_mask", "input_ids", "attention_mask", "position_ids",
    "loss_mask", "source_row",
))  # fmt: skip
"""Columns of ids, masks and positions: what is in them is read as text or as tokens, and their spread says nothing."""


def _apart(names: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
    """Split names of columns into those to show and those of ids, masks and positions to fold, of which a single one is
    not folded; and say how many are folded, in one text or none.
    """
    folded = [name for name in names if name in _BOOKKEEPING]
    folded = folded if len(folded) > 1 else []
    note = [f"{len(folded)} bookkeeping columns"] if folded else []
    return [name for name in names if name not in folded], folded, note


def fields(phase: Phase, before: DataProto | None = None) -> doc.Part:
    """Show a table of the columns that a phase wrote, with kind and range, and the same of the batch `before` it.

    Columns of ids, masks and positions are folded.
    """
    shown, folded, note = _apart(phase.wrote)
    names = f"  {', '.join(note)}: {', '.join(folded)}"
    more = [doc.Either(names, doc.Fold(title, lambda: _fields(phase, before, folded))) for title in note]
    return _fields(phase, before, shown), more


def _fields(phase: Phase, before: DataProto | None, names: Sequence[str]) -> doc.Part:
    rows, page, partial = list[list[doc.Part]](), list[list[doc.Part]](), False
    for name in names:
        kind, (read, numbers, histogram) = kind_of(phase.batch, name), field_of(phase.batch, name)
        partial = partial or read < len(phase.batch)
        figures = doc.Span(numbers, "white-space:nowrap" * bool(histogram))
        cells: list[doc.Part] = [_named(name), doc.Span(kind, tag="code"), _bars(histogram), figures]
        rows.append(cells)
        if before is not None and name in before:
            kind, (_, numbers, histogram) = kind_of(before, name), field_of(before, name)
            rows.append(["", f"was {kind}", histogram, numbers])
            beneath = [doc.small("was"), doc.faint(kind), _bars(histogram), doc.faint(numbers)]
            cells = [(above, doc.BREAK, below) for above, below in zip(cells, beneath, strict=True)]
        page.append(cells)
    header = ["wrote", "kind", "spread", "mean ± deviation, [range]"]
    note = doc.small(f"computed from some of the {len(phase.batch):,} rows") if partial else ()
    return doc.Either(doc.Table([""] * 4, rows) if rows else (), (doc.Table(header, page, most=len(page)), note))


def _bars(histogram: str) -> doc.Part:
    return doc.Span(histogram, "font:14px/1.4 monospace;letter-spacing:2px;white-space:pre;opacity:0.65")


# --- a run -----------------------------------------------------------------------------------------

_REWARD = "critic/score/mean"
_BOXES = "display:flex;flex-wrap:wrap;gap:8px 32px;margin:8px 0"
BOXES = 6
"""Metrics of a phase that stand above its columns."""
_MIDDLE = "font-size:15px;font-weight:600;font-variant-numeric:tabular-nums"
_LARGE = _MIDDLE.replace("15px", "22px")


def _boxes(facts: Sequence[tuple[str, str]], style: str) -> doc.Part:
    """Show numbers in a row, each under what it is."""
    boxes = [doc.line(doc.small(doc.faint(what)), doc.line(text, style=style)) for what, text in facts if text]
    return doc.line(boxes, style=_BOXES) if boxes else ()


_SETUP: Mapping[str, tuple[str, ...]] = {
    "model": ("engines", "actor", "path"), "data": ("data",), "reward": ("stages", "reward", "function"),
    "advantage": ("stages", "advantage", "estimator"), "lr": ("engines", "actor", "lr"),
    "group_size": ("stages", "rollout", "group_size"), "batch_size": ("train", "batch_size"),
    "max_tokens": ("stages", "rollout", "max_tokens"), "kl_coef": ("stages", "update_actor", "kl_coef"),
}  # fmt: skip
"""Word → where a run's settings have what was trained, and how."""


def _setup(settings: Mapping[str, Any]) -> list[tuple[str, str]]:
    facts = []
    for word, places in _SETUP.items():
        value: Any = settings
        for place in places:
            value = value.get(place) if isinstance(value, Mapping) else None
        if value not in (None, ""):
            facts.append(f"{word} {doc.number(value) if isinstance(value, int | float) else doc.one_line(value, 60)}")
    return [("setup", " · ".join(facts))] if facts else []


def run(run: Run) -> doc.Part:
    """Build the display of a `Run`: main numbers, checkpoints, symptoms and useful next calls; in HTML also the
    recorded steps.
    """
    rows, total = run.rows, run.settings.get("train", {}).get("steps")
    step = rows[-1][STEP] if rows else 0
    ended = "died after its last step" if (state := run.state) == "died" and step == total else state
    title = f"Run {run.address}: {ended}, step {step} of {total}"
    steps = doc.Fold("recorded steps", lambda: traces(run.traces)) if len(run.traces) else ()
    rewards = [row[_REWARD] for row in rows if row.get(_REWARD) is not None]
    why: dict[str, list[int]] = {}
    for number, reason in run.traces.reasons().items():
        why.setdefault(str(reason), []).append(number)
    kept = ", ".join(f"{_steps(numbers)} ({reason})" for reason, numbers in why.items())
    saved = run.checkpoints
    moved = " → ".join(doc.number(reward) for reward in [*rewards[:1], *rewards[1:][-1:]])
    held = [doc.number(run.summary[key]) for key in ("reward_before", "reward_after") if key in run.summary]
    large = [("step", f"{step} of {total}"), ("training reward", moved), ("held-out reward", " → ".join(held))]
    first = doc.Either(doc.pairs([("training reward", moved)] if moved else []), _boxes(large, _LARGE))
    summary = dict(run.summary.pairs())
    summary.pop("steps", None)  # the title has them
    pairs = [*_setup(run.settings), *summary.items(), ("checkpoints", f"after {_steps(saved)}" if saved else "none")]
    pairs += [("exact weights", f"can be restored before steps {run.restorable_steps}"), ("traces", kept or "none")]
    if run.stopped is not None:
        pairs.append(("stopped", f"before the update of step {run.stopped.trace.step}: run.stopped has that step"))
    found, more = shown_by(rows), [("note", note) for note in run.notes]
    calls = ["run.curves()", "run.diagnose()", "run.traces"]
    calls += [f'run.stepper(step={last}, at="reward")' for last in [*run.traces][-1:]]
    if state in ("stopped", "died"):  # the first that is read in the morning
        pairs.insert(0, ("resume", f"{goes_on(run.path)}, {kept_until(run.path)}"))
    if state == "died":
        why_died = "the run's process ended without closing the run: it was killed, out of memory, or restarted"
        pairs.insert(0, ("what happened", why_died))
    more.append(("next", ", ".join([*calls, *(["run.checkpoint()"] if saved else [])])))
    text, page = [*pairs, *(("symptom", str(one)) for one in found), *more], [*pairs, *more]
    facts = doc.Either(doc.pairs(text), [doc.pairs(page), doc.line(symptoms(Symptoms(found)), style="margin-top:8px")])
    return doc.line(doc.bold(title)), first, facts, steps


def _steps(numbers: list[int]) -> str:
    return f"step{'s' * (len(numbers) > 1)} {ranges(numbers)}"


_COLUMNS: Mapping[str, tuple[str, ...]] = {
    "reward": (_REWARD,), "KL": KL, "entropy": ("actor/entropy",), "tokens": ("response_length/mean",),
    "clipped": ("actor/pg_clipfrac",), "grad norm": ("actor/grad_norm",), "seconds": ("timing_s/step",),
}  # fmt: skip
"""Title → metrics; the first that a step has is shown."""


def traces(traces: Traces) -> doc.Part:
    """Build the display of a run's `Traces`: for each recorded step its main metrics, and why its trace was kept."""
    metrics = {row[STEP]: row for row in traces.rows}
    lines = []
    for step, kept in traces.reasons().items():
        row = metrics.get(step, {})
        found = (next((row[key] for key in keys if row.get(key) is not None), None) for keys in _COLUMNS.values())
        lines.append([str(step), *map(doc.number, found), str(kept)])
    if not lines:
        return "no recorded steps"
    title = f"{len(lines)} recorded steps; run.traces[step] opens one, run.stepper(step, at=…) steps it"
    return title, doc.Table(["step", *_COLUMNS, "kept because"], lines, right=True, most=len(lines))


def summary(summary: Summary) -> doc.Part:
    """Build the display of a run's `Summary`: its main numbers in a line, in HTML as a table."""
    text = "; ".join(f"{what} {value}" for what, value in summary.pairs())
    return doc.Either(text or "no summary yet", doc.pairs(summary.pairs()))


def symptoms(symptoms: Symptoms) -> doc.Part:
    """Build the display of `Symptoms` of failing training: the name, the step where it began, the numbers that show it,
    and what to try.
    """
    if not symptoms:
        return "no symptoms"
    rows = list[list[doc.Part]]()
    for one in symptoms:
        course = _bars(one.course), doc.BREAK, doc.small(doc.faint(one.metric))
        rows.append([doc.bold(one.name), str(one.since), course, one.found, one.do])
    table = doc.Table(["symptom", "since step", "its metric", "finding", "what to try"], rows)
    return doc.Either([f"· {one}{f'  {one.course} {one.metric}' if one.course else ''}" for one in symptoms], table)


def preflight(preflight: Preflight) -> doc.Part:
    """Build the display of a `Preflight`: what was checked before training, and what was found."""
    return doc.pairs(list(preflight.findings))


def tuning(tuning: Tuning) -> doc.Part:
    """Build the display of a `Tuning`: seconds and memory of each phase, the settings that were tried, and the lines to
    paste.
    """

    def cells(seconds: float, host: int, device: int) -> list[str]:
        return [f"{seconds:.2f}", gib(host) if host else "–", gib(device) if device else "–"][: len(header)]

    gpu = any(phase.device for phase in tuning.phases) or any(trial.device for trial in tuning.trials)
    header = ["seconds", "peak memory", "GPU tensors"][: 2 + gpu]
    phases = [[one.phase, *cells(one.seconds, one.host, one.device)] for one in tuning.phases]
    tried = [[one.role, str(one), *cells(one.seconds, one.host, one.device), one.error] for one in tuning.trials]
    return (
        doc.line(doc.bold("One step with the present settings")),
        doc.Table(["phase", *header], phases, right=True),
        doc.line(doc.bold("The learning phases with other settings")),
        doc.Table(["learner", "setting", *header, ""], tried),
        doc.line(doc.bold("Settings to paste into the engine's call")),
        doc.block("\n".join(tuning.lines)),
    )


def counterfactual(trial: Counterfactual) -> doc.Part:
    """Build the display of a `Counterfactual`: how far the weights differ, each step's metrics as they were → would
    have been.
    """
    moved = ", ".join(f"{role} by {share:.1%}" for role, share in trial.distance.items())
    title = (
        f"Step {trial.step} without {len(trial.left_out)} rows, then the recorded updates up to step {trial.until}: the final "
        f"weights differ ({moved} of the distance that training moved them since)"
    )
    names = [name for name in WORDS if any(name in pairs for pairs in trial.metrics.values())]
    rows = [[str(step), *(_was_would(pairs.get(name)) for name in names)] for step, pairs in trial.metrics.items()]
    return (
        doc.line(doc.bold(title)),
        doc.Fold(f"{len(trial.left_out)} rows left out", ", ".join(map(str, trial.left_out))),
        doc.Table(["step", *(name.split("/")[-1] for name in names)], rows, right=True, most=len(rows)),
    )


def _was_would(pair: tuple[float, float] | None) -> str:
    was, would = map(doc.number, pair or (None, None))
    return was if was == would else f"{was} → {would}"


# --- its curves -----------------------------------------------------------------------------------


BESIDE = 24
"""Most runs of the same folder that can be picked beside a run's curves."""


def run_curves(run: Run, *keys: str, marks: bool = True, others: Mapping[str, Run] | None = None) -> Figure:
    """Draw a run's curves, with `others` over them: the panel, or plots of `keys`; `marks` shows symptoms on the step
    axis.
    """
    beside = _beside(run, others, marks)
    if not keys:
        drawn: Any = panel(run.rows, title=run.path.name, empty=False, **beside)
    else:
        several = series(run.path.name, run.rows, {name: other.rows for name, other in (others or {}).items()})
        width = "page" if len(pick(keys, several)) > 2 else "column"
        drawn = run_figure(run, *keys, others=others, marks=marks, width=width)
    first = {run.path.name: run, **(others or {})}
    near = [] if is_address(run.address) else sorted(run.path.parent.glob("*/settings.json"))[-BESIDE:]
    paths = {one.path.resolve() for one in first.values()}
    more = {one.parent.name: Run(one.parent) for one in near if one.parent.resolve() not in paths}
    known = first | {name: one for name, one in more.items() if name not in first}
    drawn.plots = Plots(known, keys, beside["marks"] or (), [*first])
    return drawn


def run_figure(
    run: Run, *keys: str, others: Mapping[str, Run] | None = None, marks: bool = False, **options: Any
) -> Figure:
    """Draw a run's metrics as a figure for a paper; the arguments are those of `Run.figure`."""
    return figure(run.rows, keys or ("reward",), **{"name": run.path.name, **_beside(run, others, marks), **options})


def _beside(run: Run, others: Mapping[str, Run] | None, marks: bool) -> dict[str, Any]:
    named = {name: other.rows for name, other in (others or {}).items()}
    return {"others": named, "marks": Watch(run.rows).marks if marks else None}
