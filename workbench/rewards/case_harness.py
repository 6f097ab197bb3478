"""Runs inside sandboxes, beside model code or beside a data set's assertions; it imports nothing of workbench.

Two roles, named in `case.json`: *values* runs the model's program and writes down what some calls return;
*verdicts* runs the data set's assertions on such values, in a process that has never seen the program.
Values cross as tagged plain data, so that nothing with code of its own (an `__eq__`, say) ever comes out.
"""

from __future__ import annotations

import json
import math
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


def _values(case: dict[str, Any]) -> None:
    space: dict[str, Any] = {"__name__": "solution", "__builtins__": __builtins__}
    with open("solution.py", encoding="utf-8") as file:
        code = compile(file.read(), "solution.py", "exec")
    exec(code, space)  # noqa: S102 - the sandbox is what this file runs in
    found = []
    if "function" in case:
        function = space.get(case["function"])
        if function is None and "Solution" in space:
            function = getattr(space["Solution"](), case["function"])
        if function is None:
            raise NameError(f"the program defines no function {case['function']!r}")
        found.append(encode(function(*case["arguments"])))
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


if __name__ == "__main__":
    with open("case.json") as file:
        asked = json.load(file)
    (_verdicts if asked["role"] == "verdicts" else _values)(asked)
