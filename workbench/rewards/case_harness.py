"""Runs inside sandboxes, beside model code or beside a data set's assertions; it imports nothing of workbench.

Three roles, named in `case.json`: *values* runs the model's program and writes down what some calls return;
*verdicts* runs the data set's assertions on such values, *script* tests that are programs, in processes that have never seen
the model's program.
Values cross as tagged plain data, so that nothing with code of its own (an `__eq__`, say) ever comes out.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import json
import math
import random
from typing import Any

MAX_DEPTH = 60
_READERS: dict[str, Any] = {
    **{"int": lambda text: int(text, 16), "float": float, "complex": complex},
    **{"bytes": bytes.fromhex, "bytearray": bytearray.fromhex},
}
_SEQUENCES: dict[str, Any] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}


def encode(value: Any, depth: int = 0) -> dict[str, Any]:
    """Encode a plain value as JSON data tagged with its type. Raises `TypeError` for instances of any other class."""
    if depth > MAX_DEPTH:
        raise TypeError(f"the value is nested too deeply: more than {MAX_DEPTH} levels")
    kind = type(value)
    form: Any
    if value is None or kind in (bool, str):
        form = value
    elif kind in (int, float, complex):
        form = hex(value) if kind is int else repr(value)
    elif kind in (bytes, bytearray):
        form = bytes(value).hex()
    elif kind in _SEQUENCES.values():
        form = [encode(item, depth + 1) for item in value]
    elif isinstance(value, dict):  # Counter, defaultdict and OrderedDict compare as dicts do
        kind = dict
        form = [[encode(key, depth + 1), encode(item, depth + 1)] for key, item in dict.items(value)]
    else:
        raise TypeError(f"a value of type {kind.__name__} is not plain data")
    return {"k": kind.__name__, "v": form}


def decode(record: dict[str, Any]) -> Any:
    """Decode what `encode` returned. Raises `ValueError` for a type tag that `encode` does not write."""
    kind, form = record["k"], record["v"]
    if kind in ("NoneType", "bool", "str") and type(form).__name__ == kind:
        return form
    if kind in _READERS:
        return _READERS[kind](form)
    if kind in _SEQUENCES:
        return _SEQUENCES[kind](map(decode, form))
    if kind == "dict":
        return {decode(key): decode(item) for key, item in form}
    raise ValueError(f"unknown type tag {kind!r}")


def _write(record: dict[str, Any]) -> None:
    with open("result.json", "w") as file:
        json.dump(record, file)


def _function(space: dict[str, Any], name: str) -> Any:
    """A function of the program, or a method of its class `Solution`."""
    function = space.get(name)
    if function is None and "Solution" in space:
        function = getattr(space["Solution"](), name, None)
    if function is None:
        raise NameError(f"the program defines no function {name!r}")
    return function


def _returned(space: dict[str, Any], call: dict[str, Any]) -> dict[str, Any]:
    """What a call returns, or the exception that it raises, encoded."""
    function = _function(space, call["name"])
    try:
        arguments, named = decode(call["args"]), decode(call["kwargs"])
        return {"value": encode(function(*arguments, **named))}
    except Exception as error:  # noqa: BLE001 - tests may expect it
        return {"raised": type(error).__name__, "why": str(error)[:200]}


def _values(case: dict[str, Any]) -> None:
    space: dict[str, Any] = {"__name__": "solution", "__builtins__": __builtins__}
    with open("solution.py", encoding="utf-8") as file:
        code = compile(file.read(), "solution.py", "exec")
    exec(code, space)  # noqa: S102 - the sandbox is what this file runs in
    found = []
    if "function" in case:
        found.append(encode(_function(space, case["function"])(*case["arguments"])))
    elif "requests" in case:
        found += [_returned(space, call) for call in case["requests"]]
    else:
        exec(case["imports"], space)  # noqa: S102
        for call in case["calls"]:
            found.append(encode(eval(call, space)))  # noqa: S307
    _write({"values": found})


def _verdicts(case: dict[str, Any]) -> None:
    found = []
    for one in case["assertions"]:
        space: dict[str, Any] = {"__name__": "verdict", "math": math}
        try:
            space.update({name: decode(value) for name, value in one["values"].items()})
            exec(one["text"], space)  # noqa: S102 - the data set's own text, in a sandbox all the same
            found.append([True, ""])
        except AssertionError as error:
            found.append([False, f"the assertion fails {str(error)[:200]}"])
        except Exception as error:  # noqa: BLE001 - said to the parent
            found.append([False, f"{type(error).__name__}: {str(error)[:200]}"])
    _write({"verdicts": found})


class _Unanswered(BaseException):
    """A call that no answer is there for: the tests stop here."""


class _Anything:
    """What a call returns while calls are collected: whatever is done with it goes on."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or not any(hasattr(kind, name) for kind in (*_SEQUENCES.values(), str, dict, float)):
            raise AttributeError(name)
        return lambda *arguments, **named: self

    def __iter__(self) -> Any:
        return iter(())

    def __len__(self) -> int:
        return 0

    def __getitem__(self, key: Any) -> Any:
        return self


class _Going(ast.NodeTransformer):
    """Makes every assertion say how it went, and the statement after it go on."""

    def visit_Assert(self, node: ast.Assert) -> Any:
        """The assertion inside `try`; one of a constant says nothing."""
        if isinstance(node.test, ast.Constant):
            return node
        (tried,) = ast.parse("try: pass\nexcept Exception as _error: _note(_error)\nelse: _note(None)").body
        tried.body = [node]  # type: ignore[attr-defined]
        return tried


class _Collecting(_Going):
    """The same while calls are collected, for every simple statement: one that fails is passed over."""

    def generic_visit(self, node: ast.AST) -> Any:
        """Simple statements inside `try`."""
        if not isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign | ast.Expr):
            return super().generic_visit(node)
        (tried,) = ast.parse("try: pass\nexcept Exception: pass").body
        tried.body = [node]  # type: ignore[attr-defined]
        return tried


class _Script:
    """Runs tests that are a program: their calls of the model's functions are collected, or answered."""

    def __init__(self, case: dict[str, Any]) -> None:
        self.case = case
        self.calls: list[dict[str, Any]] = []
        self.notes: list[tuple[bool, str]] = []
        self.more = self.ended = False
        """Whether the tests stopped at a call without an answer."""
        self.answers: dict[str, list[Any]] = {}
        for call, answer in zip(case["calls"], case["returned"] or (), strict=False):
            self.answers.setdefault(json.dumps(call), []).append(answer)

    def note(self, error: Any) -> None:
        self.notes.append((error is None, f"{type(error).__name__}: {str(error)[:200]}" if error else "passed"))

    def stub(self, name: str) -> Any:
        def called(*args: Any, **kwargs: Any) -> Any:
            if self.case["returned"] is None:
                try:
                    self.calls.append({"name": name, "args": encode(args), "kwargs": encode(kwargs)})
                except TypeError:
                    return _Anything()  # an argument is another call's result: a further round has it
                return _Anything()
            call = {"name": name, "args": encode(args), "kwargs": encode(kwargs)}
            self.calls.append(call)
            waiting = self.answers.get(json.dumps(call))
            if not waiting:
                self.more = True
                raise _Unanswered
            answer = waiting.pop(0)
            if "value" in answer:
                return decode(answer["value"])
            kind = getattr(builtins, str(answer["raised"]), None)
            kind = kind if isinstance(kind, type) and issubclass(kind, Exception) else Exception
            raise kind(answer.get("why"))

        called.__name__ = name
        return called

    def run(self) -> list[Any]:
        """[calls, [passed, why] of each assertion, whether a call had no answer, whether a test ended early, an error of the
        tests' own]."""
        space: dict[str, Any] = {"__name__": "tests", "_note": self.note}
        collecting, error = self.case["returned"] is None, ""
        with contextlib.suppress(Exception):
            exec(self.case["setup"], space)  # noqa: S102 - a prompt may define helpers; the data set's own text
        space.update({name: self.stub(name) for name in self.case["names"]})
        tree = ast.parse(self.case["text"])
        tree.body = [one for one in tree.body if not (isinstance(one, ast.ImportFrom) and one.module == "solution")]
        tree = (_Collecting if collecting else _Going)().visit(tree)
        with contextlib.suppress(_Unanswered):
            error = self.one(compile(ast.fix_missing_locations(tree), "tests.py", "exec"), space)
            for test in self.case["run"]:
                self.one(test, space)
        return [self.calls, self.notes, self.more, self.ended, error if collecting else ""]

    def one(self, test: Any, space: dict[str, Any]) -> str:
        """Run one test; returns the exception that ended it, in words. With the program's values it is the program's."""
        random.seed(0)
        try:
            exec(test, space)  # noqa: S102
        except Exception as error:  # noqa: BLE001 - said to the parent
            if self.case["returned"] is not None:
                self.ended = True
                self.note(error)
            return f"{type(error).__name__}: {error}"
        return ""


if __name__ == "__main__":
    with open("case.json") as file:
        asked = json.load(file)
    if asked["role"] == "script":
        _write({"script": _Script(asked).run()})
    else:
        (_verdicts if asked["role"] == "verdicts" else _values)(asked)
