"""A notebook's parameters: read from its tagged cell, checked against given values, converted, shown as a table."""

from __future__ import annotations

import ast
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from workbench import rewards
from workbench.base.config import coerce
from workbench.base.errors import SettingError, describe, first_line, unknown
from workbench.compat.verl_reward import reward_from
from workbench.rewards.base import BaseReward

TAG = "parameters"
_TYPES: Mapping[str, Any] = {"int": int, "float": float, "bool": bool, "str": str, "list": list, "dict": dict}


@dataclass(frozen=True)
class Parameter:
    """One parameter that a notebook's parameters cell declares: `name: annotation = default  # help`."""

    name: str
    annotation: str
    default: Any
    help: str

    @property
    def kind(self) -> Any:
        """The annotation as a Python type. Raises `SettingError` for an annotation that papermill does not understand."""
        return _kind(ast.parse(self.annotation, mode="eval").body, self.name)


def _kind(node: ast.expr, name: str) -> Any:
    if isinstance(node, ast.Name) and node.id in _TYPES:
        return _TYPES[node.id]
    if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
        inner = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        kinds = [_kind(one, name) for one in inner]
        if node.value.id == "Optional":
            return kinds[0] | None
        if node.value.id == "list":
            return list[kinds[0]]  # type: ignore[valid-type]
        if node.value.id == "dict" and len(kinds) == 2:
            return dict[kinds[0], kinds[1]]  # type: ignore[valid-type]
    expected = "int, float, bool, str, Optional[…], list[…] or dict[…, …]"
    what = f"parameter {name!r} has the annotation {ast.unparse(node)}"
    raise SettingError(what, expected=expected, do="papermill reads no other: change it in the notebook")


def declared_parameters(notebook: str | Path) -> list[Parameter]:
    """The parameters that a notebook's `parameters` cell declares, in order.

    The cell may import from `typing`, for `Optional`. Raises `SettingError` where the notebook is missing, has no such
    cell or more than one, or where a line of it is not `name: type = literal`.
    """
    path = Path(notebook)
    if not path.is_file():
        raise SettingError(f"no notebook at {str(notebook)!r}", do="check the path")
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    tagged = [cell for cell in cells if TAG in cell.get("metadata", {}).get("tags", [])]
    if len(tagged) != 1:
        expected, do = "one code cell tagged 'parameters'", "tag only the cell that assigns the parameters"
        raise SettingError(f"parameters of {path.name}", expected=expected, found=f"{len(tagged)} such cells", do=do)
    source = tagged[0]["source"]
    text = source if isinstance(source, str) else "".join(source)
    lines = text.splitlines()
    try:
        tree = ast.parse(text)
    except SyntaxError as cause:
        found = f"{cause.msg} in line {cause.lineno}"
        expected = "lines `name: type = value  # help`, no %magic and no !command"
        raise SettingError(f"the parameters cell of {path.name}", expected=expected, found=found) from cause
    body = [node for node in tree.body if not (isinstance(node, ast.ImportFrom) and node.module == "typing")]
    return [_parameter(node, lines, path.name) for node in body]


def _parameter(node: ast.stmt, lines: list[str], name: str) -> Parameter:
    if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name) or node.value is None:
        expected = "lines `name: type = value  # help`"
        raise SettingError(f"a line in the parameters cell of {name}", expected=expected, found=ast.unparse(node)[:60])
    try:
        default = ast.literal_eval(node.value)
    except ValueError as cause:
        found = ast.unparse(node.value)[:60]
        what, expected = f"the default of parameter {node.target.id!r}", "a literal, not an expression"
        raise SettingError(what, expected=expected, found=found) from cause
    comment = re.search(r"#\s*(.*)$", lines[(node.end_lineno or node.lineno) - 1][node.value.end_col_offset or 0 :])
    return Parameter(node.target.id, ast.unparse(node.annotation), default, comment[1].strip() if comment else "")


FILE_LIMIT = 1 << 20
"""Bytes that a parameter file may have."""


def read_file(path: str | Path) -> dict[str, Any]:
    """Read parameters from a YAML or JSON file: a mapping of names to plain values.

    Raises `SettingError` for a file that is missing, too large or broken, for aliases, and for keys that YAML takes for
    something else (`on:` is the key True). `lr: 1e-6`, a string in YAML, becomes a number where the notebook says float.
    """
    file = Path(path)
    if not file.is_file():
        raise SettingError(f"no parameter file at {str(path)!r}", do="check the path")
    if file.stat().st_size > FILE_LIMIT:
        found = f"{file.stat().st_size} bytes"
        raise SettingError(f"parameter file {file} is too large", expected=f"at most {FILE_LIMIT} bytes", found=found)
    try:
        text = file.read_text(encoding="utf-8")
        aliases = any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, yaml.SafeLoader))
        document = None if aliases else yaml.safe_load(text)
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as cause:
        raise SettingError(f"parameter file {file} cannot be read as YAML", found=first_line(cause)) from cause
    if aliases:  # 300 bytes of nested ones can expand to gigabytes
        raise SettingError(f"{file}: a parameter file may not use aliases (*name)", do="write each value out")
    if not isinstance(document, dict):
        raise SettingError(f"parameter file {file}", expected="lines `name: value`", found=describe(document))
    for key in document:
        if not isinstance(key, str):
            do = "quote it: YAML reads unquoted on, off, yes, no as booleans"
            raise SettingError(f"parameter file {file}: key {key!r}", expected="the name of a parameter", do=do)
    return document


def resolve(notebook: str | Path, given: Mapping[str, Any]) -> dict[str, Any]:
    """Check the given parameters and convert them to the notebook's annotated types: `"false"` → False, `"1e-6"` → 1e-6.

    A text for a `list[str]` that is no list is a list of one, and `~/` is the home folder.

    Raises `SettingError` for a name that is not declared (the message has the nearest one) or not an identifier, and for a
    value that the annotation does not allow; no kernel is started.
    """
    declared = {parameter.name: parameter for parameter in declared_parameters(notebook)}
    values = {}
    for name, value in given.items():
        if not name.isidentifier() or name not in declared:
            raise SettingError(unknown(f"parameter of {Path(notebook).name}", name, declared))
        parameter = declared[name]
        value = _home(value)
        if parameter.annotation == "list[str]" and isinstance(value, str) and not value.lstrip().startswith("["):
            value = [value]
        elif isinstance(value, str) and parameter.annotation.removeprefix("Optional[").startswith(("list", "dict")):
            try:
                value = ast.literal_eval(value)
            except (ValueError, SyntaxError) as cause:
                raise SettingError(f"value of parameter {name!r}", expected="a list or dict", found=value) from cause
        values[name] = _home(coerce(name, value, parameter.kind))
    return values


def _home(value: Any) -> Any:
    """With `~/` at the start of a text, or of the texts of a list, as the home folder: no shell expands it after a `=`."""
    if isinstance(value, list):
        return [_home(one) for one in value]
    return os.path.expanduser(value) if isinstance(value, str) and value.startswith("~/") else value


def open_reward(given: str, tokenizer: Any) -> BaseReward:
    """The reward that a job's parameter names; `tokenizer` is the policy's.

    `file.py` or `file.py:function`, a yaml or JSON file with verl's `reward.*` settings, or a scorer, by its own name or a
    `data_source`'s; "" is the scorer of each row's `data_source`. Raises `SettingError` for another name.
    """
    file = given.partition(":")[0]
    if file.endswith((".yaml", ".yml", ".json")):
        return reward_from(read_file(file), tokenizer=tokenizer)
    if not given or file.endswith(".py"):
        return rewards.as_reward(given or None)
    scorers = {**{one.__name__: one for one in (*rewards.SCORERS.values(), rewards.math_verify)}, **rewards.SCORERS}
    if given not in scorers:
        do = "or name a file: file.py:function, or a yaml of reward.* settings"
        raise SettingError(unknown("scorer", given, scorers), do=do)
    return rewards.as_reward(scorers[given])


def table(notebook: str | Path, values: Mapping[str, Any]) -> str:
    """A notebook's parameters as text, one per line: name, value (from `values`, marked `*`, or its default), help."""
    parameters = declared_parameters(notebook)
    width = max((len(parameter.name) for parameter in parameters), default=0)
    lines = []
    for parameter in parameters:
        mark = "*" if parameter.name in values else " "
        value = values.get(parameter.name, parameter.default)
        lines.append(f" {mark} {parameter.name:<{width}}  {value!r:<28}  {parameter.help}")
    return "\n".join(lines)
