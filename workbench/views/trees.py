"""A tree of continuations: its turns with values and credit, as text and as HTML."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from workbench.views import document as doc
from workbench.views.rewards import BAD

if TYPE_CHECKING:
    import pandas as pd

    from workbench.agents.stepping import Estimate, Tree, TreeNode

_GOOD = "color:rgb(46,160,67)"
_SAID = 90
"""Characters of a turn that are shown."""


def tree(made: Tree) -> doc.Part:
    """The view of a `Tree`: what each stretch of the recorded episode was worth, then all nodes."""
    nodes = made.nodes
    stretches = [
        [node.places, _said(node), _number(before), _number(node.value), _signed(gained)]
        for node, before, gained in _gains(made)
    ]
    rewards = [float(one) for one, told in zip(made.batch["reward"], made.batch["scored"], strict=True) if told]
    low, high = min((*rewards, 0.0)), max((*rewards, 1.0))
    left = len(made.leaves) - len(rewards)
    points = ", ".join(map(str, made.points))
    said = [
        f"row {made.leaves[0].row}: {doc.counted(len(made.leaves) - 1, 'continuation')}",
        f"from turn{'s' * (len(made.points) > 1)} {points}",
        *([f"{left} of {len(made.leaves)} leaves not scored, in no mean"] if left else []),
    ]
    return (
        doc.line(doc.bold(" · ".join(said))),
        doc.Table(["turns", "recorded", "value before", "value after", "advantage"], stretches),
        doc.Fold(
            f"the tree: {doc.counted(len(nodes), 'node')}, those alike as one",
            lambda: doc.Table(["turns", "leaves", "value", "credit", ""], _lines(nodes, low, high)),
            opened=True,
        ),
        doc.line(
            doc.faint("value ± standard error · credit: value − mean of the other continuations from its first turn")
        ),
    )


def credit(made: Tree) -> pd.DataFrame:
    """What `Tree.credit` returns."""
    import pandas as pd

    lines = []
    for node, before, gained in _gains(made):
        said = {"turns": node.places, "role": node.turns[0].role, "text": node.turns[0].text}
        values = {"before": before.mean, "before_error": before.error}
        values |= {"after": node.value.mean, "after_error": node.value.error}
        lines.append(said | values | {"advantage": gained.mean, "error": gained.error, "n": before.count})
    return pd.DataFrame(lines)


def frame(made: Tree) -> pd.DataFrame:
    """What `Tree.to_pandas` returns."""
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
        for node in made.nodes
    ]
    return pd.DataFrame(rows).astype({"parent": "Int64"})


def _gains(made: Tree) -> Iterator[tuple[TreeNode, Estimate, Estimate]]:
    """(a stretch of the recorded episode, the value before it, what it gained)."""
    for node in made.nodes:
        if node.recorded and node.parent is not None:
            before = made.value(node.first)
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
        rows.append([shown, f"{count}", value, _signed(node.credit), _said(node)])
    return rows


def _alike(nodes: Sequence[TreeNode]) -> list[tuple[TreeNode, int]]:
    """The nodes with their leaves; continuations that say the same, and got the same reward, are one."""
    found: dict[object, tuple[TreeNode, int]] = {}
    for node in nodes:
        texts = tuple(turn.text for turn in node.turns)
        alike = node.number if node.recorded else (node.parent, texts, str(node.value.mean))
        first, count = found.get(alike, (node, 0))
        found[alike] = first, count + len(node.leaves)
    return list(found.values())


def _said(node: TreeNode) -> doc.Part:
    """What the node's turns say, the tools' paler."""
    parts: list[doc.Part] = []
    for turn in node.turns:
        text = doc.one_line(" ".join(turn.text.split()), _SAID)
        parts += [*([" ⏎ "] if parts else []), text if turn.role == "assistant" else doc.faint(text)]
    return doc.Either(parts, doc.wrapped(parts))


def _number(one: Estimate) -> str:
    known = not math.isnan(one.error) and one.error > 0
    return doc.number(one.mean, ".3g") + (f" ± {one.error:.2g}" if known else "")


def _signed(one: Estimate) -> doc.Part:
    """A difference with its sign; coloured where it is beyond two standard errors."""
    if math.isnan(one.mean):
        return "–"
    error = f" ± {one.error:.2g}" if one.error > 0 else ""
    clear = not math.isnan(one.error) and abs(one.mean) > 2 * one.error
    style = (_GOOD if one.mean > 0 else BAD) if clear else ""
    return doc.Span(f"{one.mean:+.3g}{error}", f"{style};white-space:nowrap" if style else "white-space:nowrap")
