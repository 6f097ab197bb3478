"""One prompt through the steps of a run: what was answered at each, what it scored, and what changed from step to step."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from workbench.base.errors import RunError, describe, nearest
from workbench.base.shown import blocks
from workbench.dataproto.core import DataProto
from workbench.runs.folder import STEP, step_files
from workbench.views import document as doc
from workbench.views import sample_table
from workbench.views.rewards import CUT, question
from workbench.views.sample_table import LEFT_OUT, OF_ROW, object_at, samples_table, some_rows
from workbench.views.samples import SampleCard

if TYPE_CHECKING:
    import pandas as pd

    from workbench.replay.run import Run

TRAINING, HELD_OUT, GREEDY = "training", "held-out", "held-out, greedy"
_LINES, _CHANGES, _TEXT = 24, 12, 1500
"""Most steps shown, most steps shown with what changed, and most characters of one text; `to_pandas()` has all."""


class History(doc.View):
    """The samples of one prompt at each step of a run that kept them; made by `run.history(uid)`.

    A uid names one draw of a data row, and the next epoch draws the row under another uid. All draws of a row are
    therefore joined by the row's content: its messages and its truth.
    """

    def __init__(self, prompt: str, truth: Any, frame: pd.DataFrame, note: str) -> None:
        self.prompt, self.truth = prompt, truth
        self._frame, self._said = frame, note

    def to_pandas(self) -> pd.DataFrame:
        """Return a DataFrame with one line per sample: step, kind (`training`, `held-out`, `held-out, greedy`), uid,
        row, and the columns of a samples table. `left_out` is why a sample was dropped from its step; its row is then
        None.
        """
        return self._frame

    @property
    def steps(self) -> list[int]:
        """The steps at which the prompt was drawn and its samples kept."""
        return sorted(set(self._frame["step"]))

    def diff(self, step: int, other: int, which: str = "best") -> sample_table.SideBySide:
        """Compare the `best` (or `worst`) response of one step with that of another. Raises `RunError` for a step
        without samples.
        """
        if which not in ("best", "worst"):
            raise RunError("argument which of History.diff", expected="'best' or 'worst'", found=repr(which))
        lines = [line for line in self._drawn() if line.step in (step, other)]
        for wanted in (step, other):
            if all(line.step != wanted for line in lines):
                raise RunError(f"no samples of this prompt at step {wanted}", expected=f"one of the steps {self.steps}")
        sides = [next(line for line in lines if line.step == wanted) for wanted in (step, other)]
        return sample_table.SideBySide(*((f"{which} of step {one.step}", getattr(one, which)) for one in sides))

    def _drawn(self) -> list[_Drawn]:
        frame = self._frame
        return [_Drawn.of(step, kind, rows) for (step, kind), rows in frame.groupby(["step", "kind"], sort=True)]

    def document(self) -> doc.Part:
        """Build the display: a line for each step with its mean reward, best and worst response; in HTML also what
        changed.
        """
        drawn = self._drawn()
        shown, trend = drawn[-_LINES:], _trend([line.mean for line in drawn if line.kind != GREEDY])
        truth = [] if self.truth is None else [f"  truth: {doc.one_line(self.truth, 200)}"]
        beneath = [*truth, *([trend] if trend else [])]
        text = [doc.one_line(self.prompt, 400), *beneath]
        page: list[doc.Part] = [doc.wrapped(doc.cut(self.prompt, _TEXT), style="opacity:0.6"), *beneath]
        left = f"the last {len(shown)} of {len(drawn)} draws; .to_pandas() has all" if len(drawn) > len(shown) else ""
        note = "; ".join(filter(None, (self._said, left)))
        return doc.Either(
            [*text, *(text for line in shown for text in line.lines()), note],
            (page, lambda: self._page(shown), doc.line(doc.small(note))),
        )

    def _page(self, shown: Sequence[_Drawn]) -> doc.Table:
        top = max((abs(one.mean) for one in shown if one.mean == one.mean), default=0.0) or 1.0
        rows, before = list[list[doc.Part]](), dict[str, _Drawn]()
        for place, one in enumerate(shown):
            mean = doc.bar(abs(one.mean) / top, doc.number(one.mean), one.mean >= 0) if one.mean == one.mean else "–"
            changed: doc.Part = ""
            if (last := before.get(one.kind)) is not None and place >= len(shown) - _CHANGES:
                changed = _changed(last, one)
            before[one.kind] = one
            below = doc.small(f"{one.kind}, {doc.counted(len(one.rows), 'sample')}")
            name = doc.bold(str(one.step)), doc.BREAK, below
            rows.append([name, mean, doc.stacked([_answer(reward, row) for reward, row in one.ends()]), changed])
        header = ["step", "mean reward", "best and worst response", "change of the best response"]
        return doc.Table(header, rows, most=len(rows))


class _Drawn(NamedTuple):
    """The samples of one prompt at one step, with their mean reward and the best and worst of them."""

    step: int
    kind: str
    rows: pd.DataFrame
    mean: float
    best: Any
    worst: Any

    @classmethod
    def of(cls, step: int, kind: str, rows: pd.DataFrame) -> _Drawn:
        reward = rows.get("reward")
        if reward is None or reward.isna().all():
            return cls(step, kind, rows, math.nan, rows.iloc[0], rows.iloc[-1])
        return cls(step, kind, rows, float(reward.mean()), rows.loc[reward.idxmax()], rows.loc[reward.idxmin()])

    def ends(self) -> list[tuple[str, Any]]:
        """Return the best and the worst sample, each with its reward as text; only one where their responses are equal."""
        ends = [self.best] if self.best["response"] == self.worst["response"] else [self.best, self.worst]
        return [(doc.number(row.get("reward")), row) for row in ends]

    def lines(self) -> list[str]:
        """Return the step as lines of text."""
        head = f"  step {self.step:<5} {doc.number(self.mean):>6}  {self.kind}, {doc.counted(len(self.rows), 'sample')}"
        return [head, *(f"    {name:>5}{_why(row)} → {doc.one_line(row['response'])}" for name, row in self.ends())]


def _answer(reward: str, row: Any) -> doc.Part:
    start = doc.cut(row["response"], CUT).replace("\n", " ⏎ ")
    return doc.Fold(f"{reward}{_why(row)} → {start}", doc.block(doc.cut(row["response"], _TEXT)))


def _why(row: Any) -> str:
    why = row.get(LEFT_OUT)
    return f" (left out: {doc.one_line(why)})" if isinstance(why, str) else ""


def _changed(before: _Drawn, now: _Drawn) -> doc.Part:
    one, two = (doc.cut(each.best["response"], _TEXT) for each in (before, now))
    since = f"since step {before.step}"
    return f"the same as {since[6:]}" if one == two else doc.Fold(since, lambda: sample_table.words(one, two))


def _trend(means: Sequence[float]) -> str:
    """Draw the mean rewards over the steps, `mean reward 0.25 → 0.75  ▁▃▆█`; "" where fewer than two steps have one."""
    known = [mean for mean in means if mean == mean]
    if len(known) < 2:
        return ""
    return f"mean reward {doc.number(known[0])} → {doc.number(known[-1])}  {blocks(known, 60)}"


# --- found in a run --------------------------------------------------------------------------------


class _Row(NamedTuple):
    """A data row, identified by its content: its messages and its truth."""

    messages: str
    truth: str
    text: str

    @classmethod
    def of(cls, chat: Any, judged: Any, uid: Any) -> _Row:
        messages = json.dumps(chat, sort_keys=True, default=str) if chat is not None else f"uid {uid}"
        return cls(messages, str((judged or {}).get("ground_truth")), question(chat))


class _Kept(NamedTuple):
    """The samples of one step that are on disk, and which data row each uid is a draw of."""

    step: int
    kind: str
    batch: DataProto
    uids: Sequence[Any]
    draws: dict[Any, _Row]
    """uid → the data row that it was drawn from."""


def run_history(run: Run, prompt: Any) -> History:
    """Collect one prompt's samples over the steps of a run; the argument and errors are those of `Run.history`."""
    import pandas as pd

    kept = list(_kept(run))
    wanted = _wanted(run, prompt, kept)
    frames, truth = list[pd.DataFrame](), None
    for step in kept:
        rows = [number for number, uid in enumerate(step.uids) if step.draws[uid] == wanted]
        if rows:
            truth = (object_at(step.batch, "reward_model", rows[0]) or {}).get("ground_truth")
            frames.append(_frame(step, rows))
    frame = pd.concat(frames, ignore_index=True)
    return History(wanted.text, truth, frame, _words(run, frame, kept))


def _kept(run: Run) -> Iterator[_Kept]:
    """Yield the samples of every recorded step, also the dropped ones, and of every validation, in the order of the
    steps.
    """
    traces, held_out = run.traces, step_files(run.path / "val")
    recorded = list(traces)
    for step in sorted({*recorded, *held_out}):
        if step in held_out:
            batch = run.val(step)
            greedy = batch["greedy"].bool() if "greedy" in batch else torch.zeros(len(batch), dtype=torch.bool)
            for kind, rows in ((HELD_OUT, ~greedy), (GREEDY, greedy)):
                if rows.any():
                    yield _of_batch(step, kind, batch.select_idxs(rows))
        if step in recorded:
            trace = traces[step]
            yield _of_batch(step, TRAINING, trace.batch)
            if gone := sample_table.dropped(trace):
                yield _of_batch(step, TRAINING, sample_table.gathered(gone))


def _of_batch(step: int, kind: str, batch: DataProto) -> _Kept:
    objects, none = batch.non_tensor_batch, [None] * len(batch)
    uids, chats, judged = (
        objects.passing(name) if name in batch else none for name in ("uid", "raw_prompt", "reward_model")
    )
    draws: dict[Any, _Row] = {}
    for number, uid in enumerate(uids):
        if uid not in draws:
            draws[uid] = _Row.of(chats[number], judged[number], uid)
    return _Kept(step, kind, batch, uids, draws)


def _frame(step: _Kept, rows: Sequence[int]) -> pd.DataFrame:
    """Make the samples table of some rows of a step, with step, kind, uid and row in front."""
    table = samples_table(some_rows(step.batch, rows)).drop(columns=["group", "step", OF_ROW], errors="ignore")
    numbers = [None] * len(rows) if LEFT_OUT in step.batch else list(rows)
    facts = {"step": step.step, "kind": step.kind, "uid": [step.uids[row] for row in rows], "row": numbers}
    for place, (name, value) in enumerate(facts.items()):
        table.insert(place, name, value)
    return table


def _wanted(run: Run, prompt: Any, kept: Sequence[_Kept]) -> _Row:
    """Find the data row that `prompt` means: a uid, a prompt's text, or a sample."""
    every = list(dict.fromkeys(row for step in kept for row in step.draws.values()))
    if not every:
        do = "train with trace_freq=…, or with eval_rows=… and test_freq=…"
        raise RunError(f"{run.path} has kept no samples", do=do)
    wanted, tests = _tests_of(prompt, kept)
    fitting = next((rows for test in tests if (rows := [row for row in every if test(row)])), [])
    if len(fitting) == 1:
        return fitting[0]
    raise _unfound(run, wanted, fitting, {uid: row for step in kept for uid, row in step.draws.items()}, len(every))


def _tests_of(prompt: Any, kept: Sequence[_Kept]) -> tuple[str, list[Callable[[_Row], bool]]]:
    """Return the prompt in words, and tests that recognise its data row, the strictest first."""
    if isinstance(prompt, SampleCard):
        batch = prompt.index.batch
        row = _Row.of(*(object_at(batch, name, prompt.row) for name in ("raw_prompt", "reward_model", "uid")))
        return row.text, [row.__eq__]
    if isinstance(prompt, str):
        drawn = {step.draws[prompt] for step in kept if prompt in step.draws}
        return prompt, [drawn.__contains__, lambda row: row.text == prompt, lambda row: prompt in row.text]
    if not isinstance(prompt, Mapping) and not hasattr(prompt, "keys"):  # of a line of a samples table
        expected = "a uid, a prompt's text, a sample of a view, or a line of its table"
        do = 'run.history(run.traces[step].batch["uid"][0]), or samples(x).row(0) for a row number'
        raise RunError("prompt of run.history", expected=expected, found=describe(prompt), do=do)
    values = dict(prompt)
    text, truth = str(values.get("prompt")), str(values.get("truth"))
    return text, [lambda row: (row.text, row.truth) == (text, truth)]


def _unfound(run: Run, wanted: str, rows: Sequence[_Row], draws: Mapping[Any, _Row], prompts: int) -> RunError:
    """Make the error for a prompt that is not there, which names the nearest one, or that fits several data rows."""
    those = f"{prompts} prompts that {run.path} has kept samples of"
    if rows:
        uids = [next(uid for uid, row in draws.items() if row == one) for one in rows[:4]]
        return RunError(
            f"{doc.cut(repr(wanted), 80)} is in {len(rows)} of the {those}", do=f"pass a uid, such as {uids}"
        )
    texts = [doc.cut(row.text, 200) for row in draws.values()]
    close = nearest(wanted, map(str, draws)) or nearest(doc.cut(wanted, 200), texts)
    do = f"did you mean {doc.cut(repr(close), 120)}?" if close is not None else None
    return RunError(f"{doc.cut(repr(wanted), 80)} is none of the {those}", expected="a uid or a prompt's text", do=do)


def _words(run: Run, frame: pd.DataFrame, kept: Sequence[_Kept]) -> str:
    """Describe at which steps the prompt was drawn, and for how many steps no samples are kept."""
    recorded = {one.step for one in kept if one.kind == TRAINING}
    drawn = sorted(set(frame["step"][frame["kind"] == TRAINING]))
    held = sorted(set(frame["step"][frame["kind"] != TRAINING]))
    parts = [f"drawn in {len(drawn)} of {doc.counted(len(recorded), 'recorded step')}"] if drawn or not held else []
    parts += [f"a held-out prompt, sampled at {doc.counted(len(held), 'validation')}"] if held else []
    unknown = {row[STEP] for row in run.rows if row[STEP] > 0} - recorded
    parts += [f"no samples are kept of {doc.counted(len(unknown), 'other step')}"] if unknown and drawn else []
    return "; ".join(
        [*parts, "draws of the same messages and ground truth count as one prompt, because each draw gets a new uid"]
    )
