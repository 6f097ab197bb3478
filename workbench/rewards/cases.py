"""Test cases of a coding task: how they are read, and how their expected outputs stay out of the model's process.

Three kinds, as data sets write them: a program that reads stdin and prints (`inputs`, `outputs`); a function
to call (`fn_name` too); assertions (`assert_case`). For the first two the parent compares. An assertion is
split in two: the calls of the model's functions, evaluated where the model's code is, and the rest,
evaluated in a second sandbox that holds the values but not the code.
"""

from __future__ import annotations

import ast
import builtins
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from workbench.errors import DataError, describe, message


@dataclass(frozen=True, kw_only=True)
class Case:
    """One test. Exactly one of `expected` and `verdict` says what is right."""

    kind: str
    """`stdin`, `call` or `assert`."""
    given: Any
    """stdin text; a list of arguments; or the calls of an assertion."""
    expected: Any = None
    """Text, or a plain value."""
    imports: str = ""
    """Import statements that an assertion brings."""
    verdict: str = ""
    """What is left of an assertion: it names its calls' values `_value_0`, …"""
    function: str = ""
    text: str = ""
    """As it stands in the data set, for people."""


@dataclass(frozen=True)
class Outcome:
    """What became of one case; `passed` None means that we could not tell."""

    passed: bool | None
    why: str
    seconds: float = 0.0
    limit: str | None = None
    got: Any = None
    """What the program printed or returned, cut."""
    record: Mapping[str, Any] = field(default_factory=dict)


def read_cases(tests: Any) -> list[Case]:
    """verl's and the OJ data sets' ways: a dict or its JSON. Raises `DataError` where they cannot be run."""
    if isinstance(tests, str):
        try:
            tests = json.loads(tests)
        except ValueError as cause:
            raise DataError(message("test cases", expected="JSON", found=describe(tests))) from cause
    if not isinstance(tests, Mapping):
        raise DataError(message("test cases", expected="a dict with inputs and outputs", found=describe(tests)))
    if tests.get("assert_case"):
        return [_assertion(str(text)) for text in tests["assert_case"]]
    inputs, outputs = list(tests.get("inputs") or ()), list(tests.get("outputs") or ())
    if not inputs or len(inputs) != len(outputs):
        found = f"{len(inputs)} inputs, {len(outputs)} outputs"
        raise DataError(message("test cases", expected="as many outputs as inputs, at least one", found=found))
    name = tests.get("fn_name")
    if name:
        return [_call(str(name), given, wanted) for given, wanted in zip(inputs, outputs, strict=True)]
    return [
        Case(kind="stdin", given=_text(given), expected=_text(wanted), text=f"stdin {_text(given)[:80]!r}")
        for given, wanted in zip(inputs, outputs, strict=True)
    ]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _call(name: str, given: Any, wanted: Any) -> Case:
    """Arguments are a list, or text with one JSON value a line; the output a value or its JSON."""
    try:
        arguments = [json.loads(line) for line in given.splitlines()] if isinstance(given, str) else list(given)
        expected = json.loads(wanted) if isinstance(wanted, str) else wanted
    except ValueError:
        arguments = [given] if isinstance(given, str) else list(given)
        expected = wanted
    shown = f"{name}({', '.join(describe(value, 40) for value in arguments)})"
    return Case(kind="call", given=arguments, expected=expected, function=name, text=shown)


def _assertion(text: str) -> Case:
    """Raises `DataError` where the model's part cannot be taken out of it."""
    try:
        body = ast.parse(text).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as cause:
        raise DataError(message(f"test {describe(text)}", expected="Python", found=cause)) from cause
    imports = [node for node in body if isinstance(node, ast.Import | ast.ImportFrom)]
    asserts = [node for node in body if isinstance(node, ast.Assert)]
    if not asserts or len(imports) + len(asserts) != len(body):
        raise DataError(
            message(f"test {describe(text)}", expected="imports and assertions alone", do="write it as stdin or call")
        )
    imported = {(alias.asname or alias.name).split(".")[0] for node in imports for alias in node.names}
    split = _Split({*imported, *vars(builtins)})
    rest = [ast.unparse(split.visit(node)) for node in asserts]
    if not split.calls:
        raise DataError(message(f"test {describe(text)}", expected="a call of the program's function", found="none"))
    brought = "\n".join(ast.unparse(node) for node in imports)
    return Case(
        kind="assert",
        given=split.calls,
        imports=brought,
        verdict="\n".join([brought, *rest]).strip(),
        text=text[:200],
    )


class _Split(ast.NodeTransformer):
    """Takes out the outermost calls of names that the test does not bring itself."""

    def __init__(self, known: set[str]) -> None:
        self.known = known
        self.calls: list[str] = []

    def visit_Call(self, node: ast.Call) -> ast.AST:
        root: ast.AST = node.func
        while isinstance(root, ast.Attribute | ast.Call | ast.Subscript):
            root = root.func if isinstance(root, ast.Call) else root.value
        if not isinstance(root, ast.Name) or root.id in self.known:
            return self.generic_visit(node)
        self.calls.append(ast.unparse(node))
        return ast.copy_location(ast.Name(f"_value_{len(self.calls) - 1}", ast.Load()), node)


def same_output(got: str, wanted: str, compare: str) -> bool:
    """`exact`: equal but for newlines at the end (verl's sandbox). `lines`: without space at the ends of lines and
    of the text. `tokens`: word by word, numbers to 1e-6."""
    if compare == "exact":
        return got.rstrip("\n") == wanted.rstrip("\n")
    if compare == "lines":
        return _lines(got) == _lines(wanted)
    ours, theirs = got.split(), wanted.split()
    return len(ours) == len(theirs) and all(map(_close, ours, theirs))


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.strip().splitlines()]


def _close(one: str, other: str) -> bool:
    if one == other:
        return True
    try:
        a, b = float(one), float(other)
    except ValueError:
        return False
    return abs(a - b) <= 1e-6 * max(1.0, abs(a), abs(b))


def same_value(got: Any, wanted: Any) -> bool:
    """Plain data, a tuple counting as a list, for expected values are JSON. Some sets wrap the value in a list."""
    plain = _plain(got)
    return bool(plain == wanted) or (isinstance(wanted, list) and len(wanted) == 1 and bool(plain == wanted[0]))


def _plain(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    return value


def calls_of(cases: Sequence[Case]) -> list[dict[str, Any]]:
    """The `case.json` of each case's *values* run."""
    return [
        {"role": "values", "function": case.function, "arguments": case.given}
        if case.kind == "call"
        else {"role": "values", "imports": case.imports, "calls": case.given}
        for case in cases
    ]
