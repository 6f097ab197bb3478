"""A batch as a table of samples, the rows of a step that were left out, and two samples beside each other."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import SequenceMatcher
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from workbench.base.errors import BatchError, message
from workbench.dataproto.columns import REWARD_PREFIX
from workbench.dataproto.core import POLICY, SESSION, DataProto, episodes
from workbench.dataproto.value import apart
from workbench.datasets.preferences import Sample, Samples
from workbench.datasets.rows import Rows
from workbench.functional.masking import masked_mean
from workbench.replay.reuse import FROM
from workbench.rewards.score import Status
from workbench.stages.filtering import NO_SIGNAL
from workbench.stages.stage import LEFT_OUT
from workbench.steps.trace import Phase, Trace
from workbench.views import document as doc
from workbench.views.rewards import question

if TYPE_CHECKING:
    import pandas as pd

    from workbench.dataproto.core import DataProto
    from workbench.steps.compare import Comparison


def batch_of(thing: Any) -> DataProto:
    """Return the batch of a trace, phase, stepper, dry run or run (its last trace), a batch itself, or the answers that rows
    or judged samples hold, each as a row. Raises `TypeError` for others.
    """
    if isinstance(thing, DataProto):
        return thing
    if isinstance(thing, Rows | Samples):
        return _of_answers(thing)
    traces = getattr(thing, "traces", None)
    if isinstance(traces, Mapping) and len(traces):
        thing = traces[max(traces)]
    found = getattr(thing, "batch", getattr(thing, "as_batch", None))
    if isinstance(found, DataProto):
        return found
    expected = "a DataProto, or what has one: a trace, a phase, a stepper, a dry run, a run with traces; rows, samples"
    raise TypeError(message("no batch to show", expected=expected, found=f"a {type(thing).__name__}"))


def _of_answers(data: Rows | Samples) -> DataProto:
    """Make a batch of the answers in rows (targets, both of a pair) or judged samples, those of one prompt as a group.

    Answers that `Run.best` or `Run.pairs` kept have their rewards, and say where they come from.
    """
    rows: list[dict[str, Any]] = []
    for row in data:
        fields: Mapping[str, Any] = row.metadata if isinstance(row, Sample) else row
        extra = fields.get("extra_info") or {}
        chat = [*row.prompt] if isinstance(row, Sample) else row["prompt"]
        answers = _answers(row)
        sources = extra.get(FROM) or [None] * len(answers)
        truth = {"ground_truth": extra["ground_truth"]} if "ground_truth" in extra else None
        for (kept, text), source in zip(answers, sources, strict=True):
            cells = {"uid": repr(chat), "raw_prompt": chat, "response_text": text, "kept": kept, FROM: source}
            rows.append({**cells, "reward_model": truth, "reward": (source or {}).get("reward", np.nan)})
    columns: dict[str, Any] = {name: [row[name] for row in rows] for name in rows[0]} if rows else {}
    rewards = torch.tensor(columns.pop("reward", []))
    scored = {"reward": rewards.nan_to_num(), "scored": ~rewards.isnan()} if not rewards.isnan().all() else {}
    return DataProto(scored, {name: cells for name, cells in columns.items() if any(cells)})


def _answers(row: Mapping[str, Any] | Sample) -> list[tuple[Any, Any]]:
    """List the answers of a row or judged sample: (what each is kept as, its text)."""
    if isinstance(row, Sample):
        kinds = ("rejected", "chosen") if row.best is not None else (None, None)
        return [(kinds[at in (row.best or ())], answer.text) for at, answer in enumerate(row.answers)]
    pair = [(name, row[name]) for name in ("chosen", "rejected") if row.get(name) is not None]
    return pair or [("target", (row.get("reward_model") or {}).get("ground_truth"))]


def object_at(batch: DataProto, name: str, row: int) -> Any:
    """Return the value of an object column in one row, without reading other rows from disk; None where there is no
    such column.
    """
    return batch.non_tensor_batch.part(name, row, row + 1)[0] if name in batch.non_tensor_batch else None


def some_rows(batch: DataProto, rows: Sequence[int]) -> DataProto:
    """Select some rows, with only the columns that a samples table is made of. Few rows of a batch on disk are read
    without the others.
    """
    names = [name for name in batch.columns if name in _SOURCES or name.startswith(REWARD_PREFIX)]
    spans = [[*span] for _, span in groupby(enumerate(rows), key=lambda pair: pair[1] - pair[0])]
    ends = [(span[0][1], span[-1][1] + 1) for span in spans]
    if len(ends) > _SPANS:
        return batch.without(*(name for name in batch.columns if name not in names)).select_idxs(list(rows))
    tensors = {name: torch.cat([batch.batch.part(name, *end) for end in ends]) for name in names if name in batch.batch}
    objects = {
        name: [cell for end in ends for cell in batch.non_tensor_batch.part(name, *end)]
        for name in names
        if name not in tensors
    }
    return DataProto(tensors, objects)


def samples_table(batch: DataProto) -> pd.DataFrame:
    """Make a DataFrame of a batch's samples, one line per row.

    Columns: group, prompt (its last user text), response, truth, reward and its parts, answer, status, why, advantage
    (mean over the response's tokens), sampler_logprob_diff, tokens (their number), finish (why sampling ended). Where
    episodes are several rows, also episode, sequence (from 1) and sequences (how many the episode has); with several
    policies the row's policy. An answer of rows or judged samples has `kept` (`target`, `chosen`, `rejected`), and one of a
    recorded run `from_run`.

    A row that was not scored has no reward (NaN). What the batch does not have (yet) is left out. Columns on disk are
    read, and not kept in memory.
    """
    import pandas as pd

    held, objects = batch.batch, batch.non_tensor_batch
    columns: dict[str, Any] = {"group": np.arange(len(batch))}
    if "uid" in batch:  # numbered by first appearance
        columns["group"] = pd.factorize(pd.Series(list(objects.passing("uid")), dtype=object), use_na_sentinel=False)[0]
    if SESSION in batch:
        columns |= _of_episodes(batch)
    if POLICY in batch:
        columns["policy"] = pd.Series(list(objects.passing(POLICY)), dtype=object)
    if "step" in held:  # a dump of several
        columns["step"] = held.passing("step").numpy()
    if "reward" in batch:
        reward = held.passing("reward").double()
        columns["reward"] = (
            reward.masked_fill(~held.passing("scored"), np.nan) if "scored" in batch else reward
        ).numpy()
        columns |= {name: held.passing(name).numpy() for name in held if name.startswith("reward/")}
    cells = {column: objects.passing(column) for column, _ in _READ.values() if column in objects}  # each is read once
    for name, (column, read) in _READ.items():
        if column in cells:  # as objects: pandas' own text type would make NaN of a text that is not there
            columns[name] = pd.Series([read(one) for one in cells[column]], dtype=object)
    columns |= _of_tokens(batch)
    in_order = sorted(columns, key=lambda name: _COLUMNS.index(name.partition("/")[0]))
    return pd.DataFrame({name: columns[name] for name in in_order})


def _of_episodes(batch: DataProto) -> dict[str, Any]:
    """Number the sequences of episodes: for each row the episode's number, the sequence's from 1, and how many the
    episode has.
    """
    columns = {name: np.zeros(len(batch), dtype=int) for name in ("episode", "sequence", "sequences")}
    for number, rows in enumerate(episodes(batch)):
        for place, row in enumerate(rows, 1):
            columns["episode"][row], columns["sequence"][row], columns["sequences"][row] = number, place, len(rows)
    return columns


def _of_tokens(batch: DataProto) -> dict[str, Any]:
    columns: dict[str, Any] = {}
    if "response_mask" not in batch:  # a dump of another library: at most one number a row
        return {name: batch.batch.passing(name).numpy() for name in ("advantage", "tokens") if name in batch.batch}
    mask = batch.batch.passing("response_mask")
    tokens = mask.sum(-1)
    if "advantages" in batch:
        columns["advantage"] = masked_mean(batch.batch.passing("advantages").float(), mask, -1).double().numpy()
    if "sampler_logprob_diff" in batch:
        columns["sampler_logprob_diff"] = batch.batch.passing("sampler_logprob_diff").numpy()
    return {**columns, "tokens": tokens.numpy()}


_COLUMNS = (
    "group", "episode", "sequence", "sequences", "policy", "step", "left_out", "of_row", "prompt", "response", "truth", "reward", "answer",
    "status", "why", "advantage", "sampler_logprob_diff", "tokens", "finish", "kept", "from_run",
)  # fmt: skip
_READ: Mapping[str, tuple[str, Callable[[Any], Any]]] = {
    "prompt": ("raw_prompt", question),
    "response": ("response_text", lambda text: text),
    "truth": ("reward_model", lambda judged: (judged or {}).get("ground_truth")),
    "answer": ("score", lambda score: score and score.answer),
    "status": ("score", lambda score: score and score.status.value),
    "why": ("score", lambda score: score and score.why),
    "finish": ("finish_reason", lambda reason: reason),
    LEFT_OUT: (LEFT_OUT, lambda why: why),
    "of_row": ("of_row", lambda row: row),
    "kept": ("kept", lambda kind: kind),
    FROM: (FROM, lambda source: source and f"{source['run']}, step {source['step']}, row {source['row']}"),
}
"""Column of a table of samples → the batch's column, and what is read of each of its objects."""


_SPANS = 32
_SOURCES = (
    *(column for column, _ in _READ.values()), SESSION, POLICY, "uid", "step", "reward", "scored", "response_mask", "advantages",
    "advantage", "sampler_logprob_diff",
)  # fmt: skip
"""The batch's columns that a table of samples is made of, besides `reward/<part>`."""


# --- rows that were left out ------------------------------------------------------------------------

OF_ROW, _TOKENS = "of_row", ("response_mask", "advantages", LEFT_OUT)
"""Column with a left-out row's number among the step's rows; None for a row that the step no longer has."""
_WHY = {"filter_groups": NO_SIGNAL, "resample": "not chosen when rows were resampled"}


class LeftOut(NamedTuple):
    """Rows of one batch that were left out."""

    batch: DataProto
    rows: Sequence[int]
    why: Sequence[str]
    """The reason for each row, such as `infra error: HTTP 500`; the text before the colon is the kind of reason."""
    there: bool
    """Whether the step's batch still has the rows (masked, not removed)."""


def left_out(thing: Any, batch: DataProto, frame: pd.DataFrame | None = None) -> list[LeftOut]:
    """Return the rows that were left out of a step: dropped ones, found in the trace of `thing`, and untrained ones of
    its last `batch`.

    `frame` is the batch's samples table, if it was made already.
    """
    gone = dropped(thing)
    if frame is None:
        frame = samples_table(
            batch.without(*(name for name in batch.columns if name not in ("reward", "scored", "score")))
        )
    untrained = _untrained(batch, frame)
    return [*gone, LeftOut(batch, list(untrained), list(untrained.values()), True)] if untrained else gone


def dropped(thing: Any) -> list[LeftOut]:
    """Return the rows that a phase removed from the step, found in the trace of `thing`; [] where it has no trace."""
    trace = _trace(thing)
    return [one for phase in trace for one in _dropped(phase, trace.before(phase.stage))] if trace is not None else []


def counted_reasons(whys: Iterable[str]) -> str:
    """Summarise reasons: `12 rows left out: 8 × all samples of its prompt have one reward, 4 × infra error`; "" for
    none.
    """
    kinds = Counter(why.partition(": ")[0] for why in whys)
    summary = ", ".join(f"{number} × {kind}" for kind, number in kinds.most_common())
    return f"{kinds.total()} row{'s' * (kinds.total() != 1)} left out: {summary}" if kinds else ""


def _trace(thing: Any) -> Trace | None:
    traces = getattr(thing, "traces", None)
    found = traces[max(traces)] if isinstance(traces, Mapping) and traces else getattr(thing, "trace", thing)
    return found if isinstance(found, Trace) else None


def _dropped(phase: Phase, before: DataProto) -> list[LeftOut]:
    """Return the rows that a phase removed: as it recorded them, else those of the batch before it that the batch after
    it lacks.
    """
    if phase.dropped is not None:
        rows = list(range(len(phase.dropped)))
        return [LeftOut(phase.dropped, rows, [str(why) for why in phase.dropped[LEFT_OUT]], False)]
    if "response_text" not in before:
        return []
    if phase.rows is not None:
        staying = set(phase.rows.tolist())
        gone = [row for row in range(len(before)) if row not in staying]
    else:  # of a trace that an older version wrote
        uids = [list(one.non_tensor_batch.passing("uid")) if "uid" in one else [] for one in (before, phase.batch)]
        prompts = set(uids[1])
        gone = [row for row, uid in enumerate(uids[0]) if uid not in prompts] if uids[0] != uids[1] else []
    if gone and "greedy" in before.batch:  # the greedy rows of ReMax stay as a column
        greedy = before.batch.passing("greedy")
        gone = [row for row in gone if not greedy[row]]
    why = _WHY.get(phase.stage, f"dropped by the stage {phase.stage}")
    return [LeftOut(before, gone, [why] * len(gone), False)] if gone else []


def _untrained(batch: DataProto, frame: pd.DataFrame) -> dict[int, str]:
    """Map each row that is not trained on, or was not scored as it should have been, to the reason."""
    reasons: dict[int, str] = {}
    if "agent_extra" in batch:
        for row, extra in enumerate(batch.non_tensor_batch.passing("agent_extra")):
            if isinstance(extra, Mapping) and (errors := extra.get("errors")):
                reasons[row] = f"failed episode: {errors if isinstance(errors, str) else '; '.join(map(str, errors))}"
    if "loss_mask" in batch.batch:
        origin = batch.origins.get("loss_mask")
        none = (batch.batch.passing("loss_mask") == 0).all(-1).nonzero()[:, 0].tolist()
        stage = origin.stage if origin is not None else "loss_mask"
        reasons |= dict.fromkeys(none, f"rejected: {stage} masks all tokens of the row")
    if "reward" in frame:
        odd = frame["reward"].isna()
        odd |= frame["status"] == Status.COUNTED.value if "status" in frame else False
        for row, sample in frame[odd].iterrows():
            status = sample.get("status")
            kind = "not scored" if status in (None, Status.SCORED.value) else status.replace("_", " ")
            reasons[int(row)] = ": ".join(filter(None, (kind, sample.get("why"))))
    return dict(sorted(reasons.items()))


def gathered(groups: Sequence[LeftOut], most: int | None = None) -> DataProto:
    """Join the left-out rows (or the first `most`) into one batch: texts, scores, numbers of tokens, and the reason
    (`left_out`).

    `of_row` is a row's number where it is still among the step's rows. A column that only some rows have is None or NaN
    in others.
    """
    parts, left = list[DataProto](), most
    for group in groups:
        rows = group.rows[:left]
        left = None if left is None else left - len(rows)
        parts += [_with_reasons(group, rows)] if rows else []
    columns: dict[str, Any] = {}
    for name in dict.fromkeys(name for part in parts for name in part.columns):
        tensor = any(name in part.batch for part in parts)
        cells = [part[name] if name in part else _nothing(name, len(part), tensor) for part in parts]
        columns[name] = torch.cat(cells) if tensor else [cell for column in cells for cell in column]
    return DataProto(*apart(columns))


def _with_reasons(left: LeftOut, rows: Sequence[int]) -> DataProto:
    batch = some_rows(left.batch, rows)
    table = samples_table(batch)
    counts = {"tokens": torch.tensor(table["tokens"].to_numpy(float))} if "tokens" in table else {}
    reasons = {LEFT_OUT: left.why[: len(rows)], OF_ROW: [row if left.there else None for row in rows]}
    return batch.without(*(name for name in _TOKENS if name in batch)).with_columns({**counts, **reasons})


def _nothing(name: str, rows: int, tensor: bool) -> Any:
    if not tensor:
        return [None] * rows
    return torch.zeros(rows, dtype=torch.bool) if name == "scored" else torch.full((rows,), float("nan"))


# --- two samples ------------------------------------------------------------------------------------

MARK_OLD, MARK_NEW = f"background:rgba({doc.DOWN},.2)", f"background:rgba({doc.UP},.25);font-weight:inherit"
_PIECES = 80
"""Pieces of a difference by words; one of more is told by lines."""
_AGAIN = 30
"""How often a piece of one text may be in the other on average, where these are compared by words: 20 times in English of
`_TEXT` characters; comparing texts that repeat one word takes seconds."""
_TEXT = 8000
"""Most characters of a response that are compared."""
_FACTS = ("reward", "status", "why", "answer", "truth", "advantage", "tokens", "finish")


def words(first: str, second: str) -> doc.Part:
    """Show how one text becomes another: removed words are struck through, new ones are marked."""
    for pattern in (r"\s+|[^\s\w]|\w+", r"[^\n]*\n?"):
        old, two = (re.findall(pattern, text) for text in (first, second))
        times = Counter(two)
        if "\n" not in pattern and sum(times[piece] for piece in old if not piece.isspace()) > _AGAIN * len(old):
            continue
        steps = SequenceMatcher(None, old, two, autojunk=False).get_opcodes()
        if len(steps) <= _PIECES:
            break
    parts: list[doc.Part] = []
    for kind, a, b, c, d in steps:
        if kind == "equal":
            parts.append("".join(old[a:b]))
            continue
        left, came = "".join(old[a:b]), "".join(two[c:d])
        parts += [doc.Either(f"[-{left}-]", doc.Span(left, MARK_OLD, "s"))] if left else []
        parts += [doc.Either(f"{{+{came}+}}", doc.Span(came, MARK_NEW, "b"))] if came else []
    return doc.wrapped(*parts)


class SideBySide(doc.View):
    """Two samples compared: a line for each number or word of their scores, differing ones in bold, and the difference
    of the texts.

    Each side is a name and a line of a samples table (`samples(x).frame.loc[7]`). `brief` shows only lines that differ,
    and shorter texts.
    """

    def __init__(self, first: tuple[str, Any], second: tuple[str, Any], *, brief: bool = False) -> None:
        self.brief = brief
        self.names, self.rows = (first[0], second[0]), (first[1], second[1])

    def document(self) -> doc.Part:
        """Build the display."""
        one, two = (_facts(row) for row in self.rows)
        names = sorted({*one, *two}, key=lambda name: (_FACTS.index(name.partition("/")[0]), name))
        facts = [(name, one.get(name, "–"), two.get(name, "–")) for name in names]
        facts = [(name, a, b) for name, a, b in facts if a != b or not self.brief]
        limit = doc.CELL if self.brief else _TEXT
        text = [f"  {name}: {a}" + f" → {b}" * (a != b) for name, a, b in facts]
        page = [[doc.faint(name), *((doc.bold(a), doc.bold(b)) if a != b else (a, b))] for name, a, b in facts]
        first, second = ("" if row.get("response") is None else doc.cut(row["response"], limit) for row in self.rows)
        spoken = words(first, second) if first != second else (doc.faint("one response"), doc.block(first))
        title = doc.line(doc.bold(" → ".join(self.names)))
        return title, doc.Either(text, doc.Table(["", *self.names], page, most=len(page))), spoken


def _facts(row: Any) -> dict[str, str]:
    """Return what is known of a sample as text, by columns of a samples table, reward parts included."""
    known = {name: row[name] for name in row.index if name.partition("/")[0] in _FACTS}
    return {
        name: _cell_text(value) for name, value in known.items() if value is not None and value == value and value != ""
    }


def _cell_text(value: Any) -> str:
    return doc.number(value) if isinstance(value, float | np.floating) else doc.cut(value, doc.CELL)


def difference(frame: pd.DataFrame, row: int, other: int) -> SideBySide:
    """Compare two samples of one batch, from its samples table."""
    return SideBySide(*((f"row {one}", frame.iloc[one]) for one in (row, other)))


def same_row(batch: DataProto, row: int, other: Any) -> SideBySide:
    """Compare a sample with the same row of another trace, stepper or batch. Raises `BatchError` where that row has
    another prompt.
    """
    there = batch_of(other)
    one, two = (object_at(each, "uid", row) if row < len(each) else None for each in (batch, there))
    if row >= len(there) or one != two:
        expected, found = f"a sample of prompt {one}", f"{len(there)} rows" if row >= len(there) else f"prompt {two}"
        raise BatchError(f"row {row} of the batch to compare with", expected=expected, found=found)
    first, second = (samples_table(some_rows(each, [row])).iloc[0] for each in (batch, there))
    return SideBySide((f"row {row}", first), ("the other side", second))


def compared_row(comparison: Comparison, row: int, *, brief: bool = False) -> SideBySide:
    """Compare one row on both sides of a `Comparison`. Raises `IndexError` for a row that does not exist."""
    batches = [trace.batch for trace in comparison.traces]
    if not 0 <= row < len(batches[0]):
        raise IndexError(f"row {row} does not exist: this comparison has rows 0 to {len(batches[0]) - 1}")
    one, two = (samples_table(some_rows(batch, [row])).iloc[0] for batch in batches)
    return SideBySide((f"row {row}, first", one), ("second", two), brief=brief)
