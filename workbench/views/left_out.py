"""The rows of a step that were left out, each with the reason: filtered, not drawn again, rejected, not scored, a failed episode."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from workbench.dataproto import DataProto
from workbench.dataproto.value import apart
from workbench.rewards.score import Status
from workbench.stages.filtering import NO_SIGNAL
from workbench.stages.stage import LEFT_OUT
from workbench.steps.trace import Phase, Trace
from workbench.views.sample_table import samples_table, some_rows

if TYPE_CHECKING:
    import pandas as pd

OF_ROW, _TOKENS = "of_row", ("response_mask", "advantages", LEFT_OUT)
"""A left-out row's number among the step's rows; None where it is not among them any more."""
_WHY = {"filter_groups": NO_SIGNAL, "resample": "not drawn when rows were resampled"}


class Left(NamedTuple):
    """Rows of one batch that were left out."""

    batch: DataProto
    rows: Sequence[int]
    why: Sequence[str]
    """The reason for each, such as `infra error: HTTP 500`; what stands before the colon is its kind."""
    there: bool
    """Whether they are among the step's rows all the same."""


def left_out(thing: Any, batch: DataProto, frame: pd.DataFrame | None = None) -> list[Left]:
    """The rows that were left out of a step: dropped ones by its trace, if `thing` has one, others by its last `batch`, whose
    samples table may be given."""
    gone = dropped(thing)
    if frame is None:
        frame = samples_table(
            batch.without(*(name for name in batch.columns if name not in ("reward", "scored", "score")))
        )
    untrained = _untrained(batch, frame)
    return [*gone, Left(batch, list(untrained), list(untrained.values()), True)] if untrained else gone


def dropped(thing: Any) -> list[Left]:
    """The rows that were in the step and are so no more, by its trace; none of a thing without one."""
    trace = _trace(thing)
    return [one for phase in trace for one in _dropped(phase, trace.before(phase.stage))] if trace is not None else []


def counted_reasons(whys: Iterable[str]) -> str:
    """`12 rows left out: 8 × all samples of its prompt have one reward, 4 × infra error`; empty where there are none."""
    kinds = Counter(why.partition(": ")[0] for why in whys)
    told = ", ".join(f"{number} × {kind}" for kind, number in kinds.most_common())
    return f"{kinds.total()} row{'s' * (kinds.total() != 1)} left out: {told}" if kinds else ""


def _trace(thing: Any) -> Trace | None:
    traces = getattr(thing, "traces", None)
    found = traces[max(traces)] if isinstance(traces, Mapping) and traces else getattr(thing, "trace", thing)
    return found if isinstance(found, Trace) else None


def _dropped(phase: Phase, before: DataProto) -> list[Left]:
    """The rows that a phase left out: as it recorded them, else those of the batch before it that are in the one after it no more."""
    if phase.dropped is not None:
        rows = list(range(len(phase.dropped)))
        return [Left(phase.dropped, rows, [str(why) for why in phase.dropped[LEFT_OUT]], False)]
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
    return [Left(before, gone, [why] * len(gone), False)] if gone else []


def _untrained(batch: DataProto, frame: pd.DataFrame) -> dict[int, str]:
    """Row → why it is not trained on, or was not judged as it should have been."""
    found: dict[int, str] = {}
    if "agent_extra" in batch:
        for row, extra in enumerate(batch.non_tensor_batch.passing("agent_extra")):
            if isinstance(extra, Mapping) and (errors := extra.get("errors")):
                found[row] = f"failed episode: {errors if isinstance(errors, str) else '; '.join(map(str, errors))}"
    if "loss_mask" in batch.batch:
        origin = batch.origins.get("loss_mask")
        none = (batch.batch.passing("loss_mask") == 0).all(-1).nonzero()[:, 0].tolist()
        stage = origin.stage if origin is not None else "loss_mask"
        found |= dict.fromkeys(none, f"rejected: {stage} leaves no token to train on")
    if "reward" in frame:
        odd = frame["reward"].isna()
        odd |= frame["status"] == Status.COUNTED.value if "status" in frame else False
        for row, one in frame[odd].iterrows():
            status = one.get("status")
            kind = "not scored" if status in (None, Status.SCORED.value) else status.replace("_", " ")
            found[int(row)] = ": ".join(filter(None, (kind, one.get("why"))))
    return dict(sorted(found.items()))


def gathered(found: Sequence[Left], most: int | None = None) -> DataProto:
    """The rows left out (or the first `most`) as one batch: texts, scores, numbers of tokens, and the reason (`left_out`).

    `of_row` is a row's number where it is among the step's rows all the same. What only some have is None or NaN in others.
    """
    parts, left = list[DataProto](), most
    for one in found:
        rows = one.rows[:left]
        left = None if left is None else left - len(rows)
        parts += [_told(one, rows)] if rows else []
    made: dict[str, Any] = {}
    for name in dict.fromkeys(name for part in parts for name in part.columns):
        tensor = any(name in part.batch for part in parts)
        cells = [part[name] if name in part else _nothing(name, len(part), tensor) for part in parts]
        made[name] = torch.cat(cells) if tensor else [cell for one in cells for cell in one]
    return DataProto(*apart(made))


def _told(one: Left, rows: Sequence[int]) -> DataProto:
    batch = some_rows(one.batch, rows)
    table = samples_table(batch)
    counts = {"tokens": torch.tensor(table["tokens"].to_numpy(float))} if "tokens" in table else {}
    reasons = {LEFT_OUT: one.why[: len(rows)], OF_ROW: [row if one.there else None for row in rows]}
    return batch.without(*(name for name in _TOKENS if name in batch)).with_columns({**counts, **reasons})


def _nothing(name: str, rows: int, tensor: bool) -> Any:
    if not tensor:
        return [None] * rows
    return torch.zeros(rows, dtype=torch.bool) if name == "scored" else torch.full((rows,), float("nan"))
