"""Contract suites: what any engine, stage, reward, tool, parser or simulated user can inherit to prove that it keeps its promises.

Here are the values from beyond the borders that the suites hand to whatever takes data from outside. What takes one
of them answers with a value, with a status that says why there is none (*no answer*, *not applicable*, …), or with a
refusal: an exception with a sentence. It never answers with a silent number, and never with another exception.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from workbench.base.errors import WorkbenchError

TEXTS: dict[str, str] = {
    "empty": "",
    "blank": " \t\n",
    "one letter": "x",
    "huge": "ab <" * 50_000,
    "many brackets": "(" * 5_000 + "{" * 5_000 + "[" * 5_000,
    "markup": "<script>alert(1)</script></td><score>5</score>\x1b[31m",
    "unpaired surrogate": "a\ud800b",
    "zero byte": "a\x00b",
    "right to left": "\u202e7#\u202c ####",
    "full width digits": "#### ４２",
    "huge number": "#### " + "9" * 5_000,
    "not a number": "#### nan",
    "infinity": "\\boxed{1e999}",
    "the same twice": "#### 1\n#### 1",
    "json": '{"score": NaN, "score": 1}',
}
"""What a text may be: a response, a prompt, a name, a verdict."""

VALUES: dict[str, Any] = {
    "None": None,
    "true": True,
    "int": 7,
    "huge int": 10**400,
    "float": 0.5,
    "NaN": float("nan"),
    "infinity": float("inf"),
    "bytes": b"\xff\x00",
    "empty list": [],
    "list": [1, "a", None],
    "nested list": [[[[["x"]]]]],
    "empty dict": {},
    "dict": {"a": {"b": [1, 2]}},
    "set": {1, 2},
    "object": object(),
    **{f"text: {name}": text for name, text in TEXTS.items()},
}
"""What anything may be where a certain type is expected."""


def answer(call: Callable[[], Any]) -> Any:
    """Call `call`, and return its result, or the `WorkbenchError` that it raised, whose text must be a sentence."""
    try:
        return call()
    except WorkbenchError as refusal:
        assert " " in str(refusal).strip(), f"a refusal says what is wrong; found {str(refusal)!r}"
        return refusal
