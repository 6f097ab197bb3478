"""The samples of a batch: one row each, worst first, with what the reward saw; and the groups they belong to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from workbench.errors import unknown
from workbench.views.html import bar, escape, fold, table, text_block

if TYPE_CHECKING:
    import pandas as pd

    from workbench.dataproto import DataProto

ORDERS = ("worst", "best", "index")
_CUT = 110


def samples_table(batch: DataProto) -> pd.DataFrame:
    """One line a row: prompt, response, reward, parts, status, answer, truth, advantage, length, finish, group."""
    import pandas as pd

    columns: dict[str, Any] = {
        "group": _groups(batch),
        "prompt": [_question(chat) for chat in _column(batch, "raw_prompt")],
        "response": list(_column(batch, "response_text")),
        "truth": [(judged or {}).get("ground_truth") for judged in _column(batch, "reward_model")],
    }
    if "reward" in batch:
        columns["reward"] = batch["reward"].tolist()
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
    """One line a prompt: samples, mean, spread and range of its rewards. A spread of 0 teaches GRPO nothing."""
    frame = samples_table(batch)
    found = frame.groupby("group", sort=True).agg(
        prompt=("prompt", "first"),
        samples=("reward", "size"),
        mean=("reward", "mean"),
        std=("reward", "std"),
        worst=("reward", "min"),
        best=("reward", "max"),
    )
    return found.round(4)


def _groups(batch: DataProto) -> list[int]:
    numbers: dict[Any, int] = {}
    return [numbers.setdefault(uid, len(numbers)) for uid in _column(batch, "uid")]


def _column(batch: DataProto, name: str) -> Any:
    return batch[name] if name in batch else [None] * len(batch)


def _question(chat: Any) -> str:
    return str(chat[-1]["content"]) if isinstance(chat, list) and chat else str(chat)


def _ordered(frame: pd.DataFrame, order: str) -> pd.DataFrame:
    if order not in ORDERS:
        raise ValueError(unknown("order of samples", order, ORDERS))
    if order == "index" or "reward" not in frame:
        return frame
    return frame.sort_values("reward", ascending=order == "worst", kind="stable")


def samples_text(batch: DataProto, rows: int = 8, order: str = "worst") -> str:
    """`rows` samples, three lines each."""
    lines = []
    for number, row in _ordered(samples_table(batch), order).head(rows).iterrows():
        reward = f"reward {row['reward']:g}  " if "reward" in row else ""
        why = f"{row['why']}" if "why" in row else ""
        lines.append(f"row {number} (group {row['group']})  {reward}{why}  {row['tokens']} tokens, {row['finish']}")
        lines.append(f"  {row['prompt'][:_CUT]}")
        lines.append(f"  → {row['response'][:_CUT]!r}")
    return "\n".join(lines)


def samples_html(batch: DataProto, rows: int = 8, order: str = "worst") -> str:
    """`rows` samples as a table; the full text, the parts and a failure's traceback are folded in each row."""
    frame = _ordered(samples_table(batch), order).head(rows)
    top = max(float(frame["reward"].max()), 1e-9) if "reward" in frame and len(frame) else 1.0
    body = []
    for number, row in frame.iterrows():
        score = batch["score"][number] if "score" in batch else None
        body.append(
            [
                f"{number}<br><small>group {row['group']}</small>",
                _text_cell(row),
                bar(row["reward"] / top, f"{row['reward']:g}") if "reward" in frame else "",
                _judgement(row, score),
                f"{row['advantage']:+.3f}" if "advantage" in frame else "",
                f"{row['tokens']}<br><small>{escape(row['finish'])}</small>",
            ]
        )
    shown = f"<small>{len(frame)} of {len(batch)} samples, {escape(order)} first</small>" if order != "index" else ""
    return table(["row", "prompt → response", "reward", "judged", "advantage", "tokens"], body) + shown


def _text_cell(row: Any) -> str:
    full = text_block(row["prompt"]) + "<hr>" + text_block(row["response"])
    return f"{escape(row['prompt'], _CUT)}{fold(str(row['response']).replace(chr(10), ' ⏎ ')[:_CUT], full)}"


def _judgement(row: Any, score: Any) -> str:
    if score is None:
        return ""
    lines = [escape(score.why)]
    if score.answer is not None:
        lines.append(f"answer <b>{escape(score.answer, 40)}</b>, truth {escape(row['truth'], 40)}")
    if score.parts:
        lines.append(escape(", ".join(f"{name} {value:g}" for name, value in score.parts.items())))
    if not score.scored:
        lines.append(f'<b style="color:rgb(190,70,50)">{escape(score.status.value)}</b>')
    text = "<br>".join(lines)
    return text + (fold("traceback", text_block(score.error)) if score.error else "")


class Samples:
    """What `samples(batch)` shows: a cell can end in it."""

    def __init__(self, batch: DataProto, rows: int, order: str) -> None:
        self._batch, self._rows, self._order = batch, rows, order
        self.frame = _ordered(samples_table(batch), order)

    def __repr__(self) -> str:
        return samples_text(self._batch, self._rows, self._order)

    def _repr_html_(self) -> str:
        return samples_html(self._batch, self._rows, self._order)


def samples(batch: DataProto, rows: int = 8, order: str = "worst") -> Samples:
    """Look at samples: `order` is `worst`, `best` or `index`; `.frame` has them all as a DataFrame."""
    return Samples(batch, rows, order)


def groups(batch: DataProto) -> pd.DataFrame:
    """The groups of a batch: see `groups_table`."""
    return groups_table(batch)
