"""The samples of a batch: one row each, worst first, with what the reward saw; and the groups they belong to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.errors import unknown
from workbench.rewards.score import Status
from workbench.views.html import bar, escape, fold, table, terminal, text_block

if TYPE_CHECKING:
    import pandas as pd

    from workbench.dataproto import DataProto

ORDERS = ("worst", "best", "index")
_CUT = 110
_EXTRA = 4000


def samples_table(batch: DataProto) -> pd.DataFrame:
    """One line a row: group, prompt (its last user text), response, truth, reward and its parts, answer, status, why,
    advantage (mean over the response's tokens), tokens, finish.

    A row that was not scored has no reward (NaN). Columns that the batch does not have yet are left out.
    """
    import pandas as pd

    columns: dict[str, Any] = {
        "group": _groups(batch),
        "prompt": [_question(chat) for chat in _column(batch, "raw_prompt")],
        "response": list(_column(batch, "response_text")),
        "truth": [(judged or {}).get("ground_truth") for judged in _column(batch, "reward_model")],
    }
    if "reward" in batch:
        reward = batch["reward"].float()
        columns["reward"] = (
            reward.masked_fill(~batch["scored"], float("nan")) if "scored" in batch else reward
        ).tolist()
        columns |= {name: batch[name].tolist() for name in batch.batch if name.startswith("reward/")}
    if "score" in batch:
        columns["answer"] = [score.answer for score in batch["score"]]
        columns["status"] = [score.status.value for score in batch["score"]]
        columns["why"] = [score.why for score in batch["score"]]
    if "advantages" in batch:
        mask = batch["response_mask"]
        columns["advantage"] = ((batch["advantages"] * mask).sum(-1) / mask.sum(-1).clamp(min=1)).tolist()
    columns["tokens"] = batch["response_mask"].sum(-1).tolist()
    columns["finish"] = list(_column(batch, "finish_reason"))
    return pd.DataFrame(columns)


def groups_table(batch: DataProto) -> pd.DataFrame:
    """One line a prompt: its samples, how many were scored; mean, deviation (n−1) and range of their rewards;
    the range of their advantages (`spread`). A group without a spread teaches GRPO nothing.
    """
    frame = samples_table(batch)
    rows = frame.groupby("group", sort=True)
    found = rows.agg(prompt=("prompt", "first"), samples=("prompt", "size"))
    if "reward" in frame:
        reward = rows["reward"]
        found = found.assign(
            scored=reward.count(), mean=reward.mean(), std=reward.std(), worst=reward.min(), best=reward.max()
        )
    if "advantage" in frame:
        found["spread"] = rows["advantage"].max() - rows["advantage"].min()
    return found.round(4)


def _groups(batch: DataProto) -> list[int]:
    numbers: dict[Any, int] = {}
    return [numbers.setdefault(uid, len(numbers)) for uid in _column(batch, "uid")]


def _column(batch: DataProto, name: str) -> Any:
    return batch[name] if name in batch else [None] * len(batch)


def _question(chat: Any) -> str:
    """The last user text of a chat; a plain prompt as it is."""
    if not isinstance(chat, list) or not chat:
        return "" if chat is None else str(chat)
    users = [turn for turn in chat if turn.get("role") == "user"]
    said = (users or chat)[-1].get("content", "")
    if isinstance(said, list):  # parts: text, and a name in brackets for an image or the like
        said = " ".join(str(part.get("text", f"[{part.get('type')}]")) for part in said)
    return str(said)


def _ordered(frame: pd.DataFrame, order: str, by_group: bool = False) -> pd.DataFrame:
    """What our side failed to judge comes first of the worst, what nobody judges last; groups by their mean."""
    if order not in ORDERS:
        raise ValueError(unknown("order of samples", order, ORDERS))
    if order != "index" and "reward" in frame:
        sign = 1 if order == "worst" else -1
        rank = (sign * frame["reward"]).fillna(float("inf"))
        if order == "worst" and "status" in frame:
            rank = rank.mask(frame["status"] == Status.MACHINERY_FAILED.value, float("-inf"))
        frame = frame.iloc[rank.to_numpy().argsort(kind="stable")]
        if by_group:
            mean = sign * frame.groupby("group")["reward"].transform("mean")
            return frame.iloc[np.lexsort((frame["group"], mean))]
    return frame.sort_values("group", kind="stable") if by_group else frame


def samples_text(batch: DataProto, rows: int = 8, order: str = "worst", by_group: bool = False) -> str:
    """`rows` samples, three lines each; `by_group` keeps the samples of a prompt together."""
    lines = []
    for number, row in _ordered(samples_table(batch), order, by_group).head(rows).iterrows():
        said = [f"row {number} (group {row['group']})"]
        if "reward" in row:
            said.append(f"reward {row['reward']:g}" if row["reward"] == row["reward"] else "not scored")
        if row.get("why"):
            said.append(_line(row["why"]))
        said.append(f"{row['tokens']} tokens" + (f", {_line(row['finish'])}" if row["finish"] else ""))
        lines += ["  ".join(said), f"  {_line(row['prompt'])}", f"  → {_line(row['response'])}"]
    return terminal(lines)


def _line(text: object) -> str:
    """Foreign text on one line of a terminal: cut, line ends and control characters made visible."""
    cut = str(text)[:_CUT]
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in cut)


def samples_html(batch: DataProto, rows: int = 8, order: str = "worst", by_group: bool = False) -> str:
    """`rows` samples as a table; the full text, the parts and a failure's traceback are folded in each row.

    `by_group` keeps the samples of a prompt together, under a line with the group's numbers.
    """
    frame = _ordered(samples_table(batch), order, by_group).head(rows)
    top = max(float(frame["reward"].abs().fillna(0).max()), 1e-9) if "reward" in frame and len(frame) else 1.0
    header = ["row", "prompt → response", "reward", "judged", "advantage", "tokens"]
    body = {number: _cells(batch, number, row, top, by_group) for number, row in frame.iterrows()}
    if by_group:
        header[1] = "response"
        shown = "".join(line + table(header, [body[row] for row in rows_]) for line, rows_ in _grouped(batch, frame))
    else:
        shown = table(header, list(body.values()))
    first = f", {escape(order)} first" if order != "index" else ""
    return shown + f"<small>{len(frame)} of {len(batch)} samples{first}{escape(_unjudged(batch))}</small>"


def _cells(batch: DataProto, number: Any, row: Any, top: float, by_group: bool) -> list[str]:
    score = batch["score"][number] if "score" in batch else None
    reward = row.get("reward")
    return [
        f"{number}" if by_group else f"{number}<br><small>group&nbsp;{row['group']}</small>",
        _text_cell(row, with_prompt=not by_group),
        "" if reward is None else bar(abs(reward) / top, f"{reward:g}", good=reward >= 0) if reward == reward else "–",
        _judgement(row, score),
        f"{row['advantage']:+.3f}" if "advantage" in row else "",
        f"{row['tokens']}<br><small>{escape(row['finish'] or '')}</small>",
    ]


def _grouped(batch: DataProto, frame: pd.DataFrame) -> Iterator[tuple[str, list[Any]]]:
    """For each group of `frame`, in its order: a line about the whole group, and its rows shown."""
    whole = groups_table(batch)
    for group in dict.fromkeys(frame["group"]):
        numbers = whole.loc[group]
        said = [f"{numbers['samples']} samples"]
        if "mean" in numbers:
            said += [f"mean reward {numbers['mean']:g}"] if numbers["scored"] else ["none scored"]
            said += [f"deviation {numbers['std']:g}"] if numbers["scored"] > 1 else []
        if "spread" in numbers:
            said.append(f"advantages over {numbers['spread']:g}")
        line = f"<b>group {group}</b> · {', '.join(said)}<br>{escape(numbers['prompt'], 4 * _CUT)}"
        yield f'<div style="margin-top:8px">{line}</div>', list(frame.index[frame["group"] == group])


def _unjudged(batch: DataProto) -> str:
    """How many rows have no judgement, and why."""
    if "score" not in batch:
        return ""
    counts = Counter(score.status.value for score in batch["score"] if not score.scored)
    return "".join(f"; {number} {status}" for status, number in counts.items())


def _text_cell(row: Any, with_prompt: bool = True) -> str:
    """The response's start, unfolding to all of it, under the prompt's."""
    response = "" if row["response"] is None else row["response"]
    start = str(response).replace("\n", " ⏎ ")[:_CUT]
    if not with_prompt:
        return fold(start, text_block(response))
    full = text_block(row["prompt"]) + "<hr>" + text_block(response)
    return escape(row["prompt"], _CUT) + fold(start, full)


def _judgement(row: Any, score: Any) -> str:
    if score is None:
        return ""
    lines = [escape(score.why, 2 * _CUT)] if score.why else []
    if score.answer is not None:
        lines.append(f"answer <b>{escape(score.answer, 40)}</b>, truth {escape(row['truth'], 40)}")
    if score.parts:
        lines.append(escape(", ".join(f"{name} {value:g}" for name, value in score.parts.items())))
    if not score.scored:
        lines.append(f'<b style="color:rgb(190,70,50)">{escape(score.status.value)}</b>')
    text = "<br>".join(lines)
    more = "".join(f"<b>{escape(name, 60)}</b>{text_block(_shown(value))}" for name, value in score.extra.items())
    return (
        text
        + (fold(", ".join(score.extra), more) if more else "")
        + (fold("traceback", text_block(score.error)) if score.error else "")
    )


def _shown(value: Any) -> str:
    """An extra for people: text as it stands, records a line each, cut."""
    if isinstance(value, dict):
        value = "\n".join(f"{key}: {one}" for key, one in value.items())
    elif isinstance(value, list):
        value = "\n".join(str(one) for one in value)
    return str(value)[:_EXTRA]


class Samples:
    """What `samples(batch)` shows: a cell can end in it."""

    def __init__(self, batch: DataProto, rows: int, order: str, by_group: bool = False) -> None:
        self._batch, self._asked = batch, (rows, order, by_group)
        self.frame = _ordered(samples_table(batch), order, by_group)

    def __repr__(self) -> str:
        return samples_text(self._batch, *self._asked)

    def _repr_html_(self) -> str:
        return samples_html(self._batch, *self._asked)


def samples(batch: DataProto, rows: int = 8, order: str = "worst", by_group: bool = False) -> Samples:
    """Look at samples: `order` is `worst`, `best` or `index`; `by_group` keeps the samples of a prompt together;
    `.frame` has them all as a DataFrame.

    Raises `ValueError` for another order.
    """
    return Samples(batch, rows, order, by_group)


def groups(batch: DataProto) -> pd.DataFrame:
    """The groups of a batch: see `groups_table`. Prompts are cut and made plain: a frame shows them as they are."""
    frame = groups_table(batch)
    return frame.assign(prompt=[_line(prompt) for prompt in frame["prompt"]])
