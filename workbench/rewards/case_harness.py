"""Runs inside sandboxes, beside model code or beside a data set's assertions; it imports nothing of workbench.

Three roles, named in `case.json`: *values* runs the model's program and writes down what some calls return;
*verdicts* runs the data set's assertions on such values, *script* tests that are programs, in processes that have never seen
the model's program.
Values cross as tagged plain data, so that nothing with code of its own (an `__eq__`, say) ever comes out. They go from a
program's process to that of the tests as files (`returned….json`, `calls.json`), which the trainer's process does not read.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import json
import math
import random
import re
from collections.abc import Iterator
from typing import Any

MAX_DEPTH = 60
_SHOWN = 300
_SCALARS = (type(None), bool, str, int, float)
_WHOLE = 1 << 63
"""Integers below this cross as JSON's; larger ones in hexadecimal, whose time is linear in the digits."""
_READERS: dict[str, Any] = {
    **{"int": lambda text: int(text, 16), "complex": complex},
    **{"bytes": bytes.fromhex, "bytearray": bytearray.fromhex},
}
_SEQUENCES: dict[str, Any] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
_CONTAINERS = {**_SEQUENCES, "dict": dict, "iterator": iter, "match": lambda groups: object()}
"""A match of a regular expression is true, and equal to nothing."""


LIMITS = "import sys; sys.setrecursionlimit(50_000); sys.set_int_max_str_digits(50_000)"
"""LiveCodeBench's limits, for every program."""
_OPEN = "string re datetime collections heapq bisect copy math random statistics itertools functools operator io sys json builtins typing"
PREAMBLE = "; ".join(
    [f"from {name} import *" for name in _OPEN.split()]
    + [f"import {name}" for name in f"{_OPEN} fractions time".split()]
)
"""What the graders of LiveCodeBench, APPS and TACO import, for programs of inputs and outputs that lack a name: it takes time."""


def encode(value: Any, depth: int = 0) -> Any:
    """Encode a plain value as JSON data, tagged with its type where JSON has none (`(1, 2)` → `{"k": "tuple", "v": [1,
    2]}`).

    Raises `TypeError` for instances of any other class, and for more than `MAX_DEPTH` levels.
    """
    if depth > MAX_DEPTH:
        raise TypeError(f"the value is nested too deeply: more than {MAX_DEPTH} levels")
    kind = type(value)
    form: Any
    if kind in _SCALARS and (kind is not int or -_WHOLE < value < _WHOLE):
        return value
    if kind in (int, complex):
        form = hex(value) if kind is int else repr(value)
    elif kind in (bytes, bytearray):
        form = bytes(value).hex()
    elif kind in _SEQUENCES.values():
        form = [encode(item, depth + 1) for item in value]
    elif isinstance(value, Iterator):  # the tests go through it once, as they would through the program's own
        return {"k": "iterator", "v": [encode(item, depth + 1) for item in value]}
    elif isinstance(value, re.Match):
        return {"k": "match", "v": []}
    elif isinstance(value, dict):  # Counter, defaultdict and OrderedDict compare as dicts do
        kind = dict
        form = [[encode(key, depth + 1), encode(item, depth + 1)] for key, item in dict.items(value)]
    else:
        raise TypeError(f"a value of type {kind.__name__} is not plain data: text, numbers, lists, dicts or sets")
    return {"k": kind.__name__, "v": form}


def decode(record: Any, depth: int = 0, kinds: dict[str, Any] = _CONTAINERS) -> Any:
    """Decode JSON data that `encode` returned; `kinds` maps the name of each container type to what builds it from a
    list.

    Raises `ValueError` for data that `encode` does not write: an unknown type tag, or more than `MAX_DEPTH` levels.
    """
    if type(record) in _SCALARS:
        return record
    if depth > MAX_DEPTH:
        raise ValueError(f"the value is nested too deeply: more than {MAX_DEPTH} levels")
    kind, form = record["k"], record["v"]
    if kind in _READERS:
        return _READERS[kind](form)
    if kind == "dict":
        return kinds[kind]([(decode(key, depth + 1, kinds), decode(item, depth + 1, kinds)) for key, item in form])
    if kind in kinds:
        return kinds[kind]([decode(item, depth + 1, kinds) for item in form])
    raise ValueError(f"unknown type tag {kind!r} of an encoded value")


def _read_json(name: str) -> Any:
    with open(name) as file:
        return json.load(file)


def _write(record: Any, name: str = "result.json") -> None:
    with open(name, "w") as file:
        json.dump(record, file)


def _compiled(text: str, name: str = "solution.py") -> Any:
    """Compile code as if it were a file by itself: what this file imports from `__future__` does not hold in it."""
    return compile(text, name, "exec", dont_inherit=True)


def _function(space: dict[str, Any], name: str) -> Any:
    """Return the function `name` that the program defines, or the method of that name of its class `Solution`."""
    function = space.get(name)
    if function is None and "Solution" in space:
        function = getattr(space["Solution"](), name, None)
    if function is None:
        raise NameError(f"the program defines no function {name!r}")
    return function


def _returned(space: dict[str, Any], call: dict[str, Any]) -> dict[str, Any]:
    """Call a function of the program; return its result, or the exception that it raises, encoded as JSON data."""
    function = _function(space, call["name"])
    try:
        arguments, named = decode(call["args"]), decode(call["kwargs"])
        return {"value": encode(function(*arguments, **named))}
    except Exception as error:  # noqa: BLE001 - tests may expect it
        return {"raised": type(error).__name__, "why": str(error)[:200]}


def _values(case: dict[str, Any]) -> None:
    before = case.get("setup") or case.get("imports") or ""  # the code of a prompt, or a row's imports
    try:
        values = _run_beside(before, case)
    except NameError:
        if "function" not in case:
            raise
        values = _run_beside(PREAMBLE, case)
    _write({"values": values})


def _run_beside(before: str, case: dict[str, Any]) -> list[Any]:
    """Run the program behind the code `before`, then its calls; return their results, encoded."""
    space: dict[str, Any] = {"__name__": "solution", "__builtins__": __builtins__}
    with contextlib.suppress(Exception):  # a prompt may end in the middle of a function
        exec(_compiled(before), space)  # noqa: S102 - the sandbox is what this file runs in
    given = dict(space)
    with open("solution.py", encoding="utf-8") as file:
        exec(_compiled(file.read()), space)  # noqa: S102
    if "calls" in case:
        exec(_compiled(case["imports"]), space)  # noqa: S102
        for name in (call.partition("(")[0] for call in case["calls"]):
            if hasattr(builtins, name) and name not in space:  # tests that call nothing of the response pass for any
                raise NameError(f"the response does not define {name!r}")
        calls = [compile(call, "call", "eval", dont_inherit=True) for call in case["calls"]]
        return [encode(eval(call, space)) for call in calls]  # noqa: S307
    own = {name: value for name, value in space.items() if given.get(name, space) is not value}
    if "function" not in case:
        return [_returned(own, call) for call in _read_json("calls.json")]
    arguments = case["arguments"] if "arguments" in case else decode(case["encoded"])
    return [encode(_function(own, case["function"])(*arguments))]


def _verdicts(case: dict[str, Any]) -> None:
    verdicts = []
    for number, text in enumerate(case["assertions"]):
        space: dict[str, Any] = {"__name__": "verdict", "math": math}
        why, shown = "", ""
        try:
            values = [decode(value) for value in _read_json(f"returned{number}.json")["values"]]
            shown = _shown(values[0] if len(values) == 1 else values)
            space.update({f"_value_{place}": value for place, value in enumerate(values)})
            exec(_compiled(text), space)  # noqa: S102 - the data set's own text, in a sandbox all the same
        except AssertionError as error:
            why = f"the assertion fails {str(error)[:200]}"
        except Exception as error:  # noqa: BLE001 - said to the parent
            why = f"{type(error).__name__}: {str(error)[:200]}"
        verdicts.append([not why, why, shown])
    _write({"verdicts": verdicts})


def _shown(value: Any) -> str:
    try:
        return repr(value)[:_SHOWN]
    except ValueError:  # an integer with more digits than Python prints
        return "a very large number"


class _Unanswered(BaseException):
    """Raised by a stub whose call has no recorded answer: the tests stop at this call, and a later round answers it."""


class _Anything:
    """Placeholder that stubs return while calls are collected: comparisons are true and methods return it, so that the
    tests go on."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or not any(hasattr(kind, name) for kind in (*_SEQUENCES.values(), str, dict, float)):
            raise AttributeError(name)
        return lambda *arguments, **named: self

    def __eq__(self, other: object) -> bool:
        return True  # as a right program's: `all(f(x) == y for …)` comes to all its calls

    __hash__ = object.__hash__

    def __iter__(self) -> Any:
        return iter(())

    def __len__(self) -> int:
        return 0

    def __getitem__(self, key: Any) -> Any:
        return self


class _NotesAssertions(ast.NodeTransformer):
    """Rewrites test code so that each assertion records whether it passed, and the statements after a failed one still
    run."""

    count = 0
    """How many it has met."""

    def visit_Assert(self, node: ast.Assert) -> Any:
        """Wrap an assertion in `try`, which notes its outcome; leave an assertion of a constant (`assert True`) as it
        is."""
        if isinstance(node.test, ast.Constant):
            return node
        self.count += 1
        (tried,) = ast.parse("try: pass\nexcept Exception as _error: _note(_error)\nelse: _note(None)").body
        tried.body = [node]  # type: ignore[attr-defined]
        return tried


class _IgnoresErrors(_NotesAssertions):
    """Rewrites test code for the round that collects calls: assertions as in the base class, and any simple statement
    that fails is skipped."""

    def generic_visit(self, node: ast.AST) -> Any:
        """Wrap a simple statement (an assignment or an expression) in `try`, so that its exception is ignored."""
        if not isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign | ast.Expr):
            return super().generic_visit(node)
        (tried,) = ast.parse("try: pass\nexcept Exception: pass").body
        tried.body = [node]  # type: ignore[attr-defined]
        return tried


class _Script:
    """Runs tests that are a program, with stubs for the model's functions: the stubs collect the calls, or return
    recorded answers."""

    def __init__(self, case: dict[str, Any]) -> None:
        """Read the recorded answers. Raises `ValueError` if their number differs from the number of calls, as the
        program wrote them itself."""
        self.case = case
        self.collecting = not case["answered"]
        self.calls: list[dict[str, Any]] = []
        self.notes: list[tuple[bool, str]] = []
        self.more = self.ended = False
        """Whether the tests stopped at a call without an answer."""
        self.answers: dict[str, list[Any]] = {}
        if case["answered"]:
            for call, answer in zip(_read_json("calls.json"), _read_json("returned.json")["values"], strict=True):
                self.answers.setdefault(json.dumps(call), []).append(answer)

    def note(self, error: Any) -> None:
        self.notes.append((error is None, f"{type(error).__name__}: {str(error)[:200]}" if error else "passed"))

    def stub(self, name: str) -> Any:
        def called(*args: Any, **kwargs: Any) -> Any:
            if self.collecting:
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
            if issubclass(
                kind, StopIteration | StopAsyncIteration
            ):  # it would end a loop or an `all(map(…))` as if all were done
                kind = RuntimeError
            raise kind(answer.get("why"))

        called.__name__ = name
        return called

    def run(self) -> list[Any]:
        """Run the tests and write their calls to `calls.json`.

        Returns [number of calls, [passed, why] of each assertion, whether a call had no answer, whether a test ended
        early, the error of the tests themselves or ""].
        """
        space: dict[str, Any] = {"__name__": "tests", "_note": self.note}
        error = ""
        with contextlib.suppress(Exception):
            exec(_compiled(self.case["setup"]), space)  # noqa: S102 - a prompt may define helpers; the data set's own text
        space.update({name: self.stub(name) for name in self.case["names"]})
        tree = ast.parse(self.case["text"])
        tree.body = [node for node in tree.body if not (isinstance(node, ast.ImportFrom) and node.module == "solution")]
        going = _IgnoresErrors() if self.collecting else _NotesAssertions()
        tree = going.visit(tree)
        with contextlib.suppress(_Unanswered):
            error = self.run_test(
                compile(ast.fix_missing_locations(tree), "tests.py", "exec", dont_inherit=True), space
            )
            for test in self.case["run"]:
                self.run_test(_compiled(test), space)
            if not going.count and not self.notes:  # their one way to fail is `assert False`, which was not reached
                self.note(None)
        _write(self.calls, "calls.json")
        return [len(self.calls), self.notes, self.more, self.ended, error if self.collecting else ""]

    def run_test(self, test: Any, space: dict[str, Any]) -> str:
        """Run one test; return the exception that ended it as text, or "". With recorded answers the exception counts
        against the program."""
        random.seed(0)
        try:
            exec(test, space)  # noqa: S102
        except Exception as error:  # noqa: BLE001 - said to the parent
            if not self.collecting:
                self.ended = True
                self.note(error)
            return f"{type(error).__name__}: {error}"
        return ""


if __name__ == "__main__":
    exec(LIMITS)  # noqa: S102
    task = _read_json("case.json")
    if task["role"] == "script":
        _write({"script": _Script(task).run()})
    else:
        (_verdicts if task["role"] == "verdicts" else _values)(task)
