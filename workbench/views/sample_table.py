"""A batch as a table of samples: which columns it has, and what each is read from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from workbench.base.errors import message
from workbench.dataproto import DataProto
from workbench.dataproto.columns import REWARD_PREFIX
from workbench.dataproto.sessions import POLICY, SESSION, episodes
from workbench.functional import masked_mean
from workbench.stages.stage import LEFT_OUT
from workbench.views.rewards import question

if TYPE_CHECKING:
    import pandas as pd


def batch_of(thing: Any) -> DataProto:
    """The batch of a trace, phase, stepper, dry run or run (its last trace), or a batch itself; `TypeError` for anything else."""
    if isinstance(thing, DataProto):
        return thing
    traces = getattr(thing, "traces", None)
    if isinstance(traces, Mapping) and len(traces):
        thing = traces[max(traces)]
    found = getattr(thing, "batch", getattr(thing, "as_batch", None))
    if isinstance(found, DataProto):
        return found
    expected = "a DataProto, or what has one: a trace, a phase, a stepper, a dry run, a run with traces"
    raise TypeError(message("no batch to show", expected=expected, found=f"a {type(thing).__name__}"))


def object_at(batch: DataProto, name: str, row: int) -> Any:
    """The value of an object column in one row; None where there is no such column. Other rows are not read from disk."""
    return batch.non_tensor_batch.part(name, row, row + 1)[0] if name in batch.non_tensor_batch else None


def some_rows(batch: DataProto, rows: Sequence[int]) -> DataProto:
    """Some rows, with the columns that a samples table is made of. Of columns on disk only few rows are read, where they are few."""
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
    """The samples of a batch as a DataFrame, one line per row.

    Columns: group, prompt (its last user text), response, truth, reward and its parts, answer, status, why, advantage
    (mean over the response's tokens), sampler_logprob_diff, tokens (their number), finish (why sampling ended); where
    episodes are several rows also episode, sequence (from 1) and sequences (how many the episode has); of several policies
    the row's policy.

    A row that was not scored has no reward (NaN). What the batch does not have (yet) is left out. Columns on disk are
    read, and not kept in memory.
    """
    import pandas as pd

    held, objects = batch.batch, batch.non_tensor_batch
    found: dict[str, Any] = {"group": np.arange(len(batch))}
    if "uid" in batch:  # numbered by first appearance
        found["group"] = pd.factorize(pd.Series(list(objects.passing("uid")), dtype=object), use_na_sentinel=False)[0]
    if SESSION in batch:
        found |= _of_episodes(batch)
    if POLICY in batch:
        found["policy"] = pd.Series(list(objects.passing(POLICY)), dtype=object)
    if "step" in held:  # a dump of several
        found["step"] = held.passing("step").numpy()
    if "reward" in batch:
        reward = held.passing("reward").double()
        found["reward"] = (reward.masked_fill(~held.passing("scored"), np.nan) if "scored" in batch else reward).numpy()
        found |= {name: held.passing(name).numpy() for name in held if name.startswith("reward/")}
    cells = {column: objects.passing(column) for column, _ in _READ.values() if column in objects}  # each is read once
    for name, (column, read) in _READ.items():
        if column in cells:  # as objects: pandas' own text type would make NaN of a text that is not there
            found[name] = pd.Series([read(one) for one in cells[column]], dtype=object)
    found |= _of_tokens(batch)
    in_order = sorted(found, key=lambda name: _COLUMNS.index(name.partition("/")[0]))
    return pd.DataFrame({name: found[name] for name in in_order})


def _of_episodes(batch: DataProto) -> dict[str, Any]:
    """Of rows that are sequences of episodes: the episode's number, the sequence's from 1, and how many there are."""
    found = {name: np.zeros(len(batch), dtype=int) for name in ("episode", "sequence", "sequences")}
    for number, rows in enumerate(episodes(batch)):
        for place, row in enumerate(rows, 1):
            found["episode"][row], found["sequence"][row], found["sequences"][row] = number, place, len(rows)
    return found


def _of_tokens(batch: DataProto) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if "response_mask" not in batch:  # a dump of another library: at most one number a row
        return {name: batch.batch.passing(name).numpy() for name in ("advantage", "tokens") if name in batch.batch}
    mask = batch.batch.passing("response_mask")
    tokens = mask.sum(-1)
    if "advantages" in batch:
        found["advantage"] = masked_mean(batch.batch.passing("advantages").float(), mask, -1).double().numpy()
    if "sampler_logprob_diff" in batch:
        found["sampler_logprob_diff"] = batch.batch.passing("sampler_logprob_diff").numpy()
    return {**found, "tokens": tokens.numpy()}


_COLUMNS = (
    "group", "episode", "sequence", "sequences", "policy", "step", "left_out", "of_row", "prompt", "response", "truth", "reward", "answer",
    "status", "why", "advantage", "sampler_logprob_diff", "tokens", "finish",
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
}
"""Column of a table of samples → the batch's column, and what is read of each of its objects."""


_SPANS = 32
_SOURCES = (
    *(column for column, _ in _READ.values()), SESSION, POLICY, "uid", "step", "reward", "scored", "response_mask", "advantages",
    "advantage", "sampler_logprob_diff",
)  # fmt: skip
"""The batch's columns that a table of samples is made of, besides `reward/<part>`."""
