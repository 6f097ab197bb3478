"""Two traces or updates compared, where two traces first differ; estimators and losses compared on one batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from workbench import functional as F
from workbench.base.errors import PipelineError, unknown
from workbench.dataproto.core import DataProto
from workbench.runs.folder import STEP
from workbench.stages.advantage import Advantage
from workbench.views import document as doc
from workbench.views.curves import WORDS, bare, cell_figure, figure
from workbench.views.rewards import question
from workbench.views.sample_table import compared_row, object_at
from workbench.views.tokens import TokenRow, tokens

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from workbench.replay.audit import Audit
    from workbench.replay.diagnosis import Diagnosis
    from workbench.steps.compare import Beside, Comparison, Mismatch, RowChange, RunDivergence
    from workbench.steps.what_if import WhatIf

_ROWS = 12
_FULL = "their responses and verdicts in full"
_LINE = 90
"""Characters of a response that are shown in its line."""
_TOKENS = 1000
"""Tokens, of prompts and responses, that a comparison's page has with their numbers."""


def _sides(pair: tuple[float, float] | None) -> str:
    return "–" if pair is None else f"{doc.number(pair[0])} → {doc.number(pair[1])}"


def comparison(diff: Comparison) -> doc.Part:
    """Build the display of a `Comparison` of two traces: main metrics, changed rows (sign flips first), what differs."""
    if diff.identical:
        return doc.Either("Comparison: nothing differs", "Nothing differs.")
    main = {WORDS[key]: pair for key in WORDS if (pair := diff.metrics.get(key))}
    changes = [[name, *map(doc.number, pair), _change(*pair)] for name, pair in main.items()]
    sides = zip(("first", "second"), diff.only, strict=True)
    only = [doc.line(f"only in the {side} step: {', '.join(names)}") for side, names in sides if names]
    shown, reused = diff.rows[:_ROWS], _reused(diff)
    left = len(diff.rows) - len(shown)
    return (
        doc.line(doc.bold(_title(diff))),
        doc.line(f"settings that differ: {doc.one_line(changed, 300)}")
        if (changed := "; ".join(diff.settings))
        else (),
        doc.line(doc.small(reused)) if reused else (),
        doc.Table(["", "first", "second", "change"], changes),
        _changed(diff, shown),
        doc.line(doc.small(f"and {left} more rows: .rows has them")) if left else (),
        doc.Either(page=doc.Fold(_FULL, lambda: _full(diff, [row.row for row in shown]))) if shown else (),
        only,
        _others(diff),
    )


def _full(diff: Comparison, rows: Sequence[int]) -> list[doc.Part]:
    """Show both sides' response and score for each row in full; for the first rows also the tokens with both sides'
    numbers.
    """
    first, second = diff.traces
    both, left, parts = [first.batch, second.batch], _TOKENS, list[doc.Part]()
    known = all({"responses", "input_ids", "attention_mask"} <= set(batch.columns) for batch in both)
    for row in rows:
        parts.append(compared_row(diff, row, brief=True).document())
        left -= sum(int(batch["attention_mask"][row].sum()) for batch in both) if known else 0
        if known and left >= 0:
            parts.append(doc.Fold("tokens", tokens(first, row, against=second).document()))
    return parts


def metrics_beside(first: Mapping[str, float], second: Mapping[str, float]) -> doc.Part:
    """Show the metrics that two steps with different rows both have; the main ones first, the others folded."""
    main = [name for name in WORDS if name in first and name in second]
    rest = [name for name in first if name in second and name not in WORDS]
    pairs = {name: (first[name], second[name]) for name in (*main, *rest)}
    lines = [[WORDS.get(name, name), *map(doc.number, pair), _change(*pair)] for name, pair in pairs.items()]
    header = ["metric", "first", "second", "change"]
    others = doc.Table(header, lines[len(main) :], most=len(lines))
    return doc.Table(header, lines[: len(main)]), doc.Fold(f"{len(rest)} other metrics", others)


def _others(diff: Comparison) -> doc.Part:
    """Show the columns and metrics that differ; in a terminal at most eight metrics besides the main ones."""
    columns = [[one.name, str(one.rows), doc.number(one.largest)] for one in diff.columns]
    metrics = [[key, *map(doc.number, pair)] for key, pair in diff.metrics.items()]
    text = [[f"column {name}", f"{rows} rows" + f", by up to {by}" * (by != "–")] for name, rows, by in columns]
    text += [[key, _sides(pair)] for key, pair in diff.metrics.items() if key not in WORDS][:8]
    first = doc.Fold("columns that differ", doc.Table(["column", "rows", "largest difference"], columns))
    then = doc.Fold("metrics that differ", doc.Table(["metric", "first", "second"], metrics))
    return doc.Either(doc.Table([""] * 2, text), (first if columns else (), then if metrics else ()))


def _title(diff: Comparison) -> str:
    """Say in one sentence what changed, rows first."""
    counts = {"column": len(diff.columns), "metric": len(diff.metrics)}
    rest = ", ".join(doc.counted(n, f"{what} differs", f"{what}s differ") for what, n in counts.items() if n)
    if not diff.rows:
        return f"Comparison: no sample changed its reward or its advantage; {rest or 'each side has columns that the other lacks'}"
    moved = sum(row.reward is not None and row.reward[0] != row.reward[1] for row in diff.rows)
    rows = f"{len(diff.rows)} of {doc.counted(len(diff.traces[0].batch), 'row')} changed ({moved} in reward)"
    alone = sum(row.advantage is not None and (row.advantage[0] == 0) != (row.advantage[1] == 0) for row in diff.rows)
    zero = f", {alone} {'is' if alone == 1 else 'are'} 0 on one side only" if alone else ""
    return f"Comparison: {rows}, {doc.counted(diff.sign_flips, 'advantage')} changed sign{zero}; {rest}"


def _reused(diff: Comparison) -> str:
    """Say which phases of the second trace were reused from the first; "" for none."""
    first, second = diff.traces
    names = [phase.stage for phase in second if phase.reused or any(phase is one for one in first)]
    return f"phases not run again: {', '.join(names)}" if names else ""


def _change(a: float, b: float) -> str:
    share = (b - a) / abs(a) if a * b > 0 else 0.0  # across 0 it says nothing, and less than a thousandth is noise
    return doc.number(b - a, "+") + (f" ({share:+.1%})" if abs(share) >= 0.001 else "")


def _changed(diff: Comparison, rows: Sequence[RowChange]) -> doc.Table:
    """Show one line per changed row: its response, the reward on both sides, and the advantages as bars on one scale."""
    most = max((abs(value) for row in rows for value in row.advantage or ()), default=0.0)
    lines = list[list[doc.Part]]()
    for row in rows:
        first, second = (_bar(value, most) for value in row.advantage or (math.nan, math.nan))
        scores = [object_at(trace.batch, "score", row.row) for trace in diff.traces]
        verdicts = " → ".join(doc.one_line(score, 200) for score in scores if score is not None)
        flip = [doc.chip("flipped", -1.0) if row.flipped else ""] * any(one.flipped for one in rows)
        reward = doc.Span(_sides(row.reward), title=verdicts)
        lines.append(
            [str(row.row), _responses([trace.batch for trace in diff.traces], row.row), reward, first, second, *flip]
        )
    header = ["row", "response", "reward", "advantage, first", "second", "sign"]
    return doc.Table(header[: len(lines[0]) if lines else None], lines)


def _responses(batches: Sequence[DataProto], row: int) -> doc.Part:
    """Show the start of a row's response, of both sides where they differ; on hover the prompt's last question."""
    prompt = doc.cut(question(object_at(batches[0], "raw_prompt", row)), 400)
    texts = dict.fromkeys(object_at(batch, "response_text", row) for batch in batches)
    lines = [_one_line(text, _LINE) for text in texts if isinstance(text, str)]
    return doc.Span(doc.stacked(lines), title=prompt)


def _one_line(text: object, limit: int) -> str:
    return doc.one_line(doc.cut(text, limit).replace("\n", "⏎"))


def _bar(value: float, most: float) -> doc.Part:
    """Show a number beside a bar from its middle, whose ends are −`most` and `most`."""
    if value != value or not most or not math.isfinite(value / most):
        return doc.number(value)
    return doc.bar(value / most, doc.number(value), value > 0, signed=True)


# --- where two part ---------------------------------------------------------------------------

_TEXT = 60
_MARK = "background:rgba(56,139,253,.18)"


def divergence(diff: RunDivergence) -> doc.Part:
    """Build the display of a `Divergence`: where two traces first differ, tokens around it, later differences, possible
    causes.
    """
    later: list[list[doc.Part]] = [[spread.phase or "", spread.column or "", _extent(spread)] for spread in diff.later]
    table = doc.Table(["phase", "column", "difference"], later, most=_ROWS)
    texts = doc.Table(["first", "second"], [[doc.block(diff.first), doc.block(diff.second)]])
    return (
        doc.line(doc.bold(title(diff))),
        _tokens(diff.beside) if diff.beside else (),
        doc.Fold("both texts", texts) if diff.character is not None else (),
        doc.Fold(f"later differences: {len(later)} columns and metrics", table, opened=True) if len(later) > 1 else (),
        doc.Table(["notes"], [[doc.cut(note, 400)] for note in diff.notes]),
    )


def _tokens(beside: Sequence[Beside]) -> doc.Part:
    rows = list[list[doc.Part]]()
    for pair in beside:
        mark = "→" if pair.here else "*" if pair.differs else ""
        cells = list[doc.Part]([str(pair.token), _ids(pair), *apart(pair.first, pair.second)])
        cells = [doc.Span(cell, _MARK) for cell in cells] if pair.differs else cells
        rows.append([mark, *(map(doc.bold, cells) if pair.here and pair.differs else cells)])
    return doc.Table(["", "token", "id", "first", "second"], rows, right=True)


def title(diff: RunDivergence) -> str:
    """Return a `Divergence` in one line: `first divergence: phase …, column …, row 3 (uid …), token 17: -0.42 against
    -0.41`.
    """
    kinds = zip(diff.compared, ("phase", "column", "metric"), strict=True)
    amount = ", ".join(doc.counted(count, word) for count, word in kinds if count)
    if diff.identical:
        return f"identical: {amount} compared" if amount else "nothing was compared"
    return f"first divergence: {_place(diff)}: {_what(diff)}" + (f" (equal before: {amount})" if amount else "")


def _place(diff: RunDivergence) -> str:
    parts = [f"phase {diff.phase}"] if diff.phase else []
    if diff.column is not None:
        parts.append(f"{'metric' if diff.why == 'metric' else 'column'} {diff.column}")
    if diff.row is not None:
        other = "" if diff.other_row in (None, diff.row) else f" (row {diff.other_row} of the second)"
        parts.append(f"row {diff.row}{other}" + (f" (uid {diff.uid})" if diff.uid is not None else ""))
    parts += [f"token {diff.token}"] if diff.token is not None else []
    parts += [diff.inside] if diff.inside and diff.why == "values" else []
    parts += [f"character {diff.character}"] if diff.character is not None else []
    return ", ".join(parts)


def _what(diff: RunDivergence) -> str:
    if diff.why in ("phase", "column"):
        return f"only in the {'first' if diff.second is None else 'second'}"
    if diff.why == "rows":
        counts = f" ({diff.inside})" if diff.inside else ""
        return f"different rows, {_value_text(diff.first)} against {_value_text(diff.second)}{counts}"
    if diff.character is not None:
        return " against ".join(_excerpt(text, diff.character) for text in (diff.first, diff.second))
    if diff.why == "order":
        return f"the order of the phases differs, {diff.first} against {diff.second}"
    kind = f"{diff.why} " if diff.why in ("shape", "dtype") else ""
    first, second = apart(diff.first, diff.second)
    ids = diff.token_ids
    values = f"{kind}{first} against {second}"
    if ids is None or ids[0] == ids[1] or ids == (diff.first, diff.second):
        return values
    return f"{values}, token id {doc.number(ids[0])} against {doc.number(ids[1])}"


def apart(first: Any, second: Any) -> tuple[str, str]:
    """Format two values; floats get the fewest digits (at least four) in which they differ."""
    if isinstance(first, float) and isinstance(second, float):
        pairs = [(f"{first:.{digits}g}", f"{second:.{digits}g}") for digits in range(4, 18)]
        return next((pair for pair in pairs if pair[0] != pair[1]), pairs[0])
    return _value_text(first), _value_text(second)


def _value_text(value: Any) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, float):
        return doc.number(value)
    return doc.cut(value if isinstance(value, str | int | tuple) else repr(value), _TEXT)


def _excerpt(text: str, character: int) -> str:
    start, end = max(character - _TEXT // 2, 0), character + _TEXT // 2
    return f"{'…' if start else ''}{text[start:end]!r}{'…' if end < len(text) else ''}"


def _ids(pair: Beside) -> str:
    if pair.ids == (None, None):
        return ""
    first, second = (doc.number(token) for token in pair.ids)
    return first if first == second else f"{first} | {second}"


def _extent(spread: Mismatch) -> str:
    rows = [doc.counted(spread.rows, "row")] if spread.rows else []
    if spread.largest is None:
        return "".join(rows)
    largest = f"by {'up to ' if rows else ''}{doc.number(spread.largest)}"
    return ", ".join([*rows, "one side has no value" if math.isinf(spread.largest) else largest])


# --- another update ------------------------------------------------------------------------------


def what_if(result: WhatIf) -> doc.Part:
    """Build the display of a `WhatIf`: metrics of the actual and the changed update, their cosine, the rows that differ
    most.
    """
    movers = list[list[doc.Part]]()
    sums = result.difference.sum(-1).tolist()
    means = [math.nan] * len(sums)
    if "advantages" in result.batch:
        means = F.masked_mean(result.batch["advantages"], result.batch["response_mask"], -1).tolist()
    shown = result.rows()
    most = max((abs(sums[row]) for row in shown), default=0.0)
    largest = max((abs(means[row]) for row in shown), default=0.0)
    for row in shown:
        reward = doc.number(float(result.batch["reward"][row])) if "reward" in result.batch else ""
        token = int(result.difference[row].abs().argmax())
        word = "".join(TokenRow(result.batch, row).texts[token : token + 1])
        moved = f"token {token} {word!r} ({float(result.difference[row][token]):+.4f})"
        bars = _bar(means[row], largest), _bar(sums[row], most)
        movers.append([str(row), _responses([result.batch], row), reward, *bars, moved])
    header = ["row", "response", "reward", "advantage", "Δ log-prob", "token that changed most"]
    return (
        doc.line(doc.bold(f"What if {result.other.name}: cosine of the two updates {result.cosine:.4f}")),
        doc.Table(["", "actual", "changed"], _both(result)),
        doc.line(doc.bold("rows that differ most")),
        doc.Table(header, movers),
    )


def _both(result: WhatIf) -> list[list[str]]:
    """Return table rows (what, actual, changed): the metrics of the last update on both sides, then the held-out probe."""
    sides = result.actual, result.other
    rows = [["updates", *(str(len(side.metrics)) for side in sides)]]
    names = dict.fromkeys(name for side in sides for name in side.metrics[-1])
    rows += [[name, *apart(*(side.metrics[-1].get(name) for side in sides))] for name in names]
    rows.append(
        ["mean ratio afterwards", *apart(*(_ratios(result, side.new_log_probs).mean().item() for side in sides))]
    )
    for name, value in result.before.items():
        rows.append([f"held-out {name}", *(f"{doc.number(value)} → {doc.number(side.probe[name])}" for side in sides)])
    return rows


def _ratios(result: WhatIf, after: torch.Tensor) -> torch.Tensor:
    return (after - result.batch["old_log_probs"])[result.batch["response_mask"].bool()].exp()


# --- several on one batch --------------------------------------------------------------------------

ESTIMATORS: Mapping[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "grpo": (F.grpo, {}), "dr_grpo": (F.grpo, {"norm_by_std": False}), "rloo": (F.rloo, {}), "opo": (F.opo, {}),
    "gpg": (F.gpg, {}), "maxrl": (F.maxrl, {}), "grpo_passk": (F.grpo_passk, {}),
    "reinforce_plus_plus_baseline": (F.reinforce_plus_plus_baseline, {}),
    "reinforce_plus_plus": (F.reinforce_plus_plus, {}), "optimal_token_baseline": (F.optimal_token_baseline, {}),
    "remax": (F.remax, {}), "gae": (F.gae, {"lam": 0.95}),
}  # fmt: skip
"""Name → estimator and its settings."""


def advantage_table(batch: DataProto, names: Sequence[str] | None = None) -> pd.DataFrame:
    """Compute the advantages of every estimator on one batch: a DataFrame with a line for each row.

    Columns: group, reward, tokens, and for each estimator the mean advantage of the row's tokens. Estimators whose
    inputs the batch lacks (values, a greedy baseline, Σπ²) are left out, as is maxrl for rewards below 0; if `names`
    has one of them, `PipelineError` is raised.

    Example:
        >>> wb.views.advantage_figure(wb.views.advantage_table(batch, ["grpo", "rloo"]))  # doctest: +SKIP
    """
    import pandas as pd

    mask = batch["response_mask"]
    groups, _ = pd.factorize(np.array(batch["uid"], dtype=object))
    columns: dict[str, Any] = {"group": groups, "reward": batch["reward"].tolist(), "tokens": mask.sum(-1).tolist()}
    for name in names or ESTIMATORS:
        if name not in ESTIMATORS:
            raise PipelineError(unknown("known advantage estimator", name, ESTIMATORS))
        function, settings = ESTIMATORS[name]
        stage = Advantage(function, **settings)
        missing = [column for column in stage.reads if column not in batch]
        if missing and names is not None:
            raise PipelineError(f"estimator {name} reads {', '.join(missing)}", found="a batch without these columns")
        if missing or (name == "maxrl" and names is None and bool((batch["reward"] < 0).any())):
            continue
        kept = batch.without(*(column for column in stage.writes if column in batch))
        columns[name] = F.masked_mean(stage(kept).batch["advantages"], mask, -1).tolist()
    return pd.DataFrame(columns)


def advantage_figure(frame: pd.DataFrame) -> Figure:
    """Draw an `advantage_table` as a heat map: one row per estimator, scaled by the estimator's largest advantage.

    Red is negative, blue positive, white 0. Samples are sorted by group, and in a group by reward, the best first.
    """
    ordered = frame.sort_values(["group", "reward"], ascending=[True, False])
    names = [name for name in frame.columns if name not in ("group", "reward", "tokens")]
    grid = torch.tensor(ordered[["reward", *names]].to_numpy(dtype=float).T)
    grid[1:] = grid[1:] / grid[1:].abs().amax(1, keepdim=True).clamp(min=1e-12)
    figure = cell_figure(10, 0.32 * len(names) + 1.2, layout="constrained")
    axes = figure.subplots()
    axes.imshow(grid.numpy(), cmap="RdBu", vmin=-1, vmax=1, aspect="auto", interpolation="nearest")
    axes.set_yticks(range(len(names) + 1), ["reward", *names], fontsize=9)
    edges = np.flatnonzero(np.diff(ordered["group"]))
    for edge in edges:
        axes.axvline(edge + 0.5, color="#666666", linewidth=0.8)
    axes.set_xticks([])
    axes.set_xlabel(f"{len(ordered)} samples in {len(edges) + 1} groups")
    axes.spines[:].set_visible(False)
    return figure


def what_if_table(results: Mapping[str, WhatIf]) -> pd.DataFrame:
    """Compare several results of `what_if`, given by name, in a DataFrame with one line for each.

    Columns: the cosine to the actual update, how far the weights moved (`way`, L2), the metrics of the last update.
    """
    import pandas as pd

    lines = {}
    for name, result in results.items():
        last = result.other.metrics[-1]
        lines[name] = {
            "cosine": result.cosine,
            "way": result.other.moved_norm,
            "loss": last.get("actor/pg_loss"),
            "clip fraction": last.get("actor/pg_clipfrac"),
            "KL of the update": last.get("actor/ppo_kl"),
            "gradient norm": last.get("actor/grad_norm"),
            "largest ratio": float(_ratios(result, result.other.new_log_probs).max()),
            **{f"held-out {key}": value for key, value in result.other.probe.items()},
        }
    return pd.DataFrame.from_dict(lines, orient="index")


def what_if_figure(
    results: Mapping[str, WhatIf], keys: Sequence[str] = ("actor/ppo_kl", "actor/pg_clipfrac", "actor/grad_norm")
) -> Figure:
    """Draw `keys` over the scratch updates of several results of `what_if`: a plot per metric, a curve per result."""
    rows = {name: [{STEP: n, **one} for n, one in enumerate(made.other.metrics, 1)] for name, made in results.items()}
    name, first = next(iter(rows.items()))
    drawn = figure(first, keys, name=name, others=dict(list(rows.items())[1:]), smooth=0, width=10)
    for axes in drawn.axes:
        axes.set_xlabel("scratch update", fontsize=8)
    return drawn


def values_figure(batch: DataProto, rows: int = 24) -> Figure:
    """Draw the critic's values over the tokens of the first `rows` responses: blue where the reward is above the mean."""
    figure = cell_figure(10, 2.8, layout="constrained")
    axes = figure.subplots()
    mean = float(batch["reward"].mean())
    for row in range(min(rows, len(batch))):
        inside = batch["response_mask"][row].bool()
        good = float(batch["reward"][row]) > mean
        axes.plot(batch["values"][row][inside].tolist(), color="#2f6db5" if good else "#c8553d", alpha=0.5, linewidth=1)
    axes.axhline(mean, color="#666666", linewidth=0.8, linestyle=":")
    axes.set_xlabel("response token", fontsize=8)
    axes.set_ylabel("value", fontsize=8)
    bare(axes)
    return figure


# --- a second reading -------------------------------------------------------------------------------


def audit(audit: Audit) -> doc.Part:
    """Build the display of an `Audit`: how much agrees, what disagrees and where, what was not recomputed and why."""
    rows = [[str(row.step), row.stage, row.name, row.place, row.numbers, row.formula] for row in audit.disagreements]
    header = ["step", "stage", "name", "where", "recorded and recomputed", "formula"]
    why: dict[str, list[str]] = {}
    for name, reason in audit.left.items():
        why.setdefault(reason, []).append(name)
    left = [[reason, ", ".join(sorted(names))] for reason, names in sorted(why.items())]
    unknown = f"no formula to recompute {', '.join(sorted(audit.unaudited))}" if audit.unaudited else ""
    agreed = [["columns", ", ".join(sorted(audit.columns))], ["metrics", ", ".join(sorted(audit.metrics))]]
    return (
        doc.line(doc.bold(audit.summary()), f" · {doc.counted(len(audit.steps), 'recorded step')}"),
        doc.Table(header, rows, most=50),
        [unknown] if unknown else (),
        doc.Either([f"{len(audit.left)} not recomputed: .left"] if audit.left else (), ()),
        doc.Fold(f"{len(audit.left)} not recomputed", doc.Table(["why", "columns and metrics"], left)),
        doc.Fold("recomputed and equal", doc.Table(["", ""], agreed)),
    )


def diagnosis(diagnosis: Diagnosis) -> doc.Part:
    """Build the display of a `Diagnosis`: for each cause how sure it is, the numbers, the line of code that shows it,
    and what to change.
    """
    head = "Nothing found." if not diagnosis.findings else doc.counted(len(diagnosis.findings), "finding")
    found = [
        (
            doc.line(f"{place}. ", doc.bold(finding.cause), doc.faint(f" · {finding.sure}"), style="margin-top:6px"),
            doc.pairs([("seen by", finding.numbers), ("look at", _code(finding.look)), ("change", finding.turn)]),
        )
        for place, finding in enumerate(diagnosis.findings, 1)
    ]
    looked = "; ".join(f"{what}: {found}" for what, found in diagnosis.looked)
    return doc.line(doc.bold(head)), found, doc.line(doc.faint(f"looked at: {looked}"))


def _code(look: str) -> doc.Part:
    return doc.Span(look, "overflow-wrap:anywhere;white-space:pre-wrap", "code")
