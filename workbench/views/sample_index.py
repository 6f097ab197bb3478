"""The samples of a batch as a table that can be sorted, filtered and searched; what every view of samples stands on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from workbench.dataproto import DataProto
from workbench.errors import message, unknown
from workbench.rewards.score import Status

if TYPE_CHECKING:
    import pandas as pd

ORDERS = ("worst", "best", "surprising", "index")
Where: TypeAlias = "Mapping[str, Any] | Callable[[pd.DataFrame], Any] | None"


def batch_of(thing: Any) -> DataProto:
    """The batch of a batch, a trace, a phase, a stepper, or a run (its last trace).

    Raises `TypeError` for anything else.
    """
    if isinstance(thing, DataProto):
        return thing
    traces = getattr(thing, "traces", None)
    if isinstance(traces, Mapping) and len(traces):
        thing = traces[max(traces)]
    found = getattr(thing, "batch", None)
    if isinstance(found, DataProto):
        return found
    expected = "a DataProto, or what has one: a trace, a phase, a stepper, a run with traces"
    raise TypeError(message("samples", expected=expected, found=type(thing).__name__))


def samples_table(batch: DataProto) -> pd.DataFrame:
    """One line a row: group, prompt (its last user text), response, truth, reward and its parts, answer, status, why,
    advantage (mean over the response's tokens), sampler_gap, tokens, finish.

    A row that was not scored has no reward (NaN). What the batch does not have (yet) is left out. Columns that lie on disk
    are read, and not kept.
    """
    import pandas as pd

    columns: dict[str, Any] = {"group": _groups(batch)}
    if "step" in batch.batch:  # a dump of several
        columns["step"] = batch.batch.passing("step").numpy()
    if "raw_prompt" in batch:
        columns["prompt"] = [question(chat) for chat in _objects(batch, "raw_prompt")]
    if "response_text" in batch:
        columns["response"] = list(_objects(batch, "response_text"))
    if "reward_model" in batch:
        columns["truth"] = [(judged or {}).get("ground_truth") for judged in _objects(batch, "reward_model")]
    if "reward" in batch:
        reward = batch.batch.passing("reward").double()
        if "scored" in batch:
            reward = reward.masked_fill(~batch.batch.passing("scored"), float("nan"))
        columns["reward"] = reward.numpy()
        parts = [name for name in batch.batch if name.startswith("reward/")]
        columns |= {name: batch.batch.passing(name).numpy() for name in parts}
    if "score" in batch:
        scores = _objects(batch, "score")
        columns["answer"] = [score.answer for score in scores]
        columns["status"] = [score.status.value for score in scores]
        columns["why"] = [score.why for score in scores]
    columns |= _of_tokens(batch)
    if "finish_reason" in batch:
        columns["finish"] = list(_objects(batch, "finish_reason"))
    # as objects: pandas' own text type would make NaN of a text that is not there
    made = {name: pd.Series(one, dtype=object) if isinstance(one, list) else one for name, one in columns.items()}
    return pd.DataFrame({**made, "group": columns["group"]})


def _of_tokens(batch: DataProto) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if "response_mask" not in batch:  # a dump of another library: at most one number a row
        return {"advantage": batch.batch.passing("advantage").numpy()} if "advantage" in batch.batch else {}
    mask = batch.batch.passing("response_mask")
    tokens = mask.sum(-1)
    if "advantages" in batch:
        own = batch.batch.passing("advantages").float().masked_fill(mask == 0, 0.0)  # NaN in padding is nobody's
        total = own.sum(-1)
        found["advantage"] = (total / tokens.clamp(min=1)).double().numpy()
    if "sampler_gap" in batch:
        found["sampler_gap"] = batch.batch.passing("sampler_gap").numpy()
    return {**found, "tokens": tokens.numpy()}


def groups_table(batch: DataProto, frame: pd.DataFrame | None = None) -> pd.DataFrame:
    """One line a prompt: its samples, how many were scored; mean, deviation (n−1) and range of their rewards;
    the range of their advantages (`spread`). A group without a spread teaches GRPO nothing.
    """
    frame = samples_table(batch) if frame is None else frame
    rows = frame.groupby("group", sort=True)
    found = rows.agg(samples=("group", "size"))
    if "prompt" in frame:
        found.insert(0, "prompt", rows["prompt"].first())
    if "reward" in frame:
        reward = rows["reward"]
        found = found.assign(
            scored=reward.count(), mean=reward.mean(), std=reward.std(), worst=reward.min(), best=reward.max()
        )
    if "advantage" in frame:
        found["spread"] = rows["advantage"].max() - rows["advantage"].min()
    return found.round(4)


def _groups(batch: DataProto) -> list[int]:
    """Numbers of prompts in the order of their first row; without `uid` each row is on its own."""
    if "uid" not in batch:
        return list(range(len(batch)))
    numbers: dict[Any, int] = {}
    return [numbers.setdefault(uid, len(numbers)) for uid in _objects(batch, "uid")]


def _objects(batch: DataProto, name: str) -> Any:
    return batch.non_tensor_batch.passing(name)


def question(chat: Any) -> str:
    """The last user text of a chat; a plain prompt as it is."""
    if not isinstance(chat, list) or not chat:
        return "" if chat is None else str(chat)
    users = [turn for turn in chat if turn.get("role") == "user"]
    said = (users or chat)[-1].get("content", "")
    if isinstance(said, list):  # parts: text, and a name in brackets for an image or the like
        said = " ".join(str(part.get("text", f"[{part.get('type')}]")) for part in said)
    return str(said)


class SampleIndex:
    """The table of a batch's samples with its orders, filters and search; made once, asked often.

    10,000 rows are sorted or filtered in milliseconds; a first search of their texts takes some tens of them.
    """

    def __init__(self, batch: DataProto) -> None:
        self.batch = batch
        self.frame = samples_table(batch)

    @cached_property
    def groups(self) -> pd.DataFrame:
        """See `groups_table`."""
        return groups_table(self.batch, self.frame)

    @cached_property
    def _texts(self) -> list[str]:
        parts = [self.frame[name] for name in ("prompt", "response", "why", "answer") if name in self.frame]
        rows = zip(*parts, strict=True) if parts else [()] * len(self.frame)
        return ["\n".join("" if text is None else str(text) for text in row).casefold() for row in rows]

    @cached_property
    def surprise(self) -> np.ndarray:
        """How far each reward is from the mean of the other samples of its prompt; NaN where there is none."""
        if "reward" not in self.frame:
            return np.full(len(self.frame), np.nan)
        reward = self.frame["reward"]
        rows = self.frame.assign(reward=reward.fillna(0.0), counted=reward.notna().astype(float)).groupby("group")
        others = rows["counted"].transform("sum") - 1
        mean = (rows["reward"].transform("sum") - reward) / others.where(others > 0)
        return (reward - mean).abs().to_numpy()

    def select(
        self, order: str = "worst", *, where: Where = None, search: str = "", by_group: bool = False
    ) -> np.ndarray:
        """Row numbers, filtered and in order.

        `order` is one of `ORDERS`, or a column (`-tokens` is the largest first). `where` maps columns to a value, to
        a list of values or to (low, high) with None for no bound; or it is a function of the frame. `search` must stand in a
        row's prompt, response, answer or explanation; case does not matter. Raises `ValueError` for an unknown order or column.
        """
        rows = np.arange(len(self.frame))
        rows = rows[self._kept(where, search)]
        rank = self._rank(order)[rows]
        if by_group:
            group = self.frame["group"].to_numpy()[rows]
            first = self._rank_of_groups(order)[group]
            return rows[np.lexsort((rank, group, first))]
        return rows[rank.argsort(kind="stable")]

    def _kept(self, where: Where, search: str) -> np.ndarray:
        kept = np.ones(len(self.frame), dtype=bool)
        if callable(where):
            kept &= np.asarray(where(self.frame), dtype=bool)
        else:
            for name, wanted in (where or {}).items():
                if name not in self.frame:
                    raise ValueError(unknown("column of samples", name, self.frame.columns))
                kept &= _matching(self.frame[name], wanted)
        if search:
            needle = search.casefold()
            kept &= np.fromiter((needle in text for text in self._texts), dtype=bool, count=len(self.frame))
        return kept

    def _rank(self, order: str) -> np.ndarray:
        """Ascending is first. What our side failed to judge comes first of the worst, what nobody judges last."""
        if order in ("worst", "best") and "reward" in self.frame:
            sign = 1 if order == "worst" else -1
            rank = (sign * self.frame["reward"]).fillna(float("inf"))
            if order == "worst" and "status" in self.frame:
                rank = rank.mask(self.frame["status"] == Status.MACHINERY_FAILED.value, float("-inf"))
            return rank.to_numpy()
        if order == "surprising":
            return np.nan_to_num(-self.surprise, nan=np.inf)
        name, descending = order.removeprefix("-"), order.startswith("-")
        if order in ORDERS or name == "row":
            return np.arange(len(self.frame)) * (-1 if descending else 1)
        if name not in self.frame:
            raise ValueError(unknown("sample order", order, (*ORDERS, *self.frame.columns)))
        ranks = self.frame[name].map(str) if self.frame[name].dtype == object else self.frame[name]
        return ranks.rank(method="dense", ascending=not descending, na_option="bottom").to_numpy()

    def _rank_of_groups(self, order: str) -> np.ndarray:
        if order in ("worst", "best") and "mean" in self.groups:
            mean = self.groups["mean"].to_numpy() * (1 if order == "worst" else -1)
            return np.nan_to_num(mean, nan=np.inf)
        if order == "surprising" and "std" in self.groups:
            return np.nan_to_num(-self.groups["std"].to_numpy(), nan=np.inf)
        return np.arange(len(self.groups))


def _matching(column: pd.Series, wanted: Any) -> np.ndarray:
    if isinstance(wanted, tuple):
        low, high = wanted
        kept = np.ones(len(column), dtype=bool)
        if low is not None:
            kept &= (column >= low).to_numpy()
        if high is not None:
            kept &= (column <= high).to_numpy()
        return kept
    if isinstance(wanted, list | set | frozenset):
        return column.isin(list(wanted)).to_numpy()
    return (column == wanted).to_numpy()


def line(text: object, limit: int = 110) -> str:
    """Foreign text on one line: cut, line ends and control characters made visible."""
    cut = str(text)[:limit]
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in cut)
