"""What runs beside model code in a sandbox, and beside test code in another one. It imports nothing of ours.

Two roles, told by `case.json`: *values* runs the model's program and writes down what some calls return;
*verdicts* runs the data set's assertions on such values, in a process that has never seen the program.
Values cross as tagged plain data, so nothing with code of its own, an `__eq__` say, ever comes out.
"""

from __future__ import annotations

import json
import math
from typing import Any

MAX_DEPTH = 60


def encode(value: Any, depth: int = 0) -> dict[str, Any]:
    """A plain value as JSON; raises TypeError for anything that has behaviour."""
    if depth > MAX_DEPTH:
        raise TypeError("it is nested too deeply")
    kind = type(value)
    if value is None or kind in (bool, str):
        return {"k": kind.__name__, "v": value}
    if kind is int:
        return {"k": "int", "v": hex(value)}
    if kind is float:
        return {"k": "float", "v": repr(value)}
    if kind is complex:
        return {"k": "complex", "v": [repr(value.real), repr(value.imag)]}
    if kind in (bytes, bytearray):
        return {"k": kind.__name__, "v": bytes(value).hex()}
    if kind in (list, tuple, set, frozenset):
        return {"k": kind.__name__, "v": [encode(item, depth + 1) for item in value]}
    if isinstance(value, dict):  # Counter, defaultdict and OrderedDict compare as dicts do
        items = [[encode(key, depth + 1), encode(item, depth + 1)] for key, item in dict.items(value)]
        return {"k": "dict", "v": items}
    raise TypeError(f"it is a {kind.__name__}, which is not plain data")


def decode(record: dict[str, Any]) -> Any:
    """The reverse of encode. Raises ValueError for what encode does not write."""
    kind, value = record["k"], record["v"]
    if kind == "NoneType":
        return None
    if kind in ("bool", "str"):
        if type(value) is not {"bool": bool, "str": str}[kind]:
            raise ValueError(kind)
        return value
    if kind == "int":
        return int(value, 16)
    if kind == "float":
        return float(value)
    if kind == "complex":
        return complex(float(value[0]), float(value[1]))
    if kind in ("bytes", "bytearray"):
        return {"bytes": bytes, "bytearray": bytearray}[kind](bytes.fromhex(value))
    if kind == "dict":
        return {decode(key): decode(item) for key, item in value}
    builders: dict[str, Any] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
    if kind not in builders:
        raise ValueError(kind)
    return builders[kind](decode(item) for item in value)


def _write(record: dict[str, Any]) -> None:
    with open("result.json", "w") as file:
        json.dump(record, file)


def _values(case: dict[str, Any]) -> None:
    with open("solution.py", encoding="utf-8") as file:
        text = file.read()
    space: dict[str, Any] = {"__name__": "solution", "__builtins__": __builtins__}
    exec(compile(text, "solution.py", "exec"), space)  # noqa: S102 - the sandbox is what this file runs in
    found = []
    if "function" in case:
        function = space.get(case["function"])
        if function is None and "Solution" in space:
            function = getattr(space["Solution"](), case["function"])
        if function is None:
            raise NameError(f"the program defines no {case['function']}")
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
