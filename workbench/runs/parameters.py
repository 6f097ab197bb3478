"""A notebook's parameters: read from its tagged cell, compared with what was given, coerced, shown."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from workbench.config import coerce
from workbench.errors import SettingError, describe, first_line, message, unknown

TAG = "parameters"
_TYPES: Mapping[str, Any] = {"int": int, "float": float, "bool": bool, "str": str, "list": list, "dict": dict}


@dataclass(frozen=True)
class Parameter:
    """One line of the parameters cell."""

    name: str
    annotation: str
    default: Any
    help: str

    @property
    def kind(self) -> Any:
        """The annotation as a type; refuses what is not on the short list."""
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
    raise SettingError(
        message(
            f"parameter {name!r}: annotation {ast.unparse(node)}",
            expected="int, float, bool, str, Optional[…], list[…] or dict[…, …]",
            do="papermill reads no other",
        )
    )


def declared_parameters(notebook: str | Path) -> list[Parameter]:
    """What the notebook's `parameters` cell declares, in order.

    The cell may import from `typing`, for `Optional`. Raises `SettingError` where the notebook is missing, has no such
    cell or more than one, or where a line of it is not `name: type = literal`.
    """
    path = Path(notebook)
    if not path.is_file():
        raise SettingError(message(f"no notebook at {str(notebook)!r}", do="check the path"))
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    tagged = [cell for cell in cells if TAG in cell.get("metadata", {}).get("tags", [])]
    if len(tagged) != 1:
        raise SettingError(
            message(
                f"notebook {path.name}",
                expected="one code cell tagged 'parameters'",
                found=len(tagged),
                do="tag the cell that assigns the parameters",
            )
        )
    source = tagged[0]["source"]
    text = source if isinstance(source, str) else "".join(source)
    lines = text.splitlines()
    try:
        tree = ast.parse(text)
    except SyntaxError as cause:
        raise SettingError(
            message(
                f"parameters cell of {path.name}", expected="plain Python", found=f"{cause.msg} in line {cause.lineno}"
            )
        ) from cause
    body = [node for node in tree.body if not (isinstance(node, ast.ImportFrom) and node.module == "typing")]
    return [_parameter(node, lines, path.name) for node in body]


def _parameter(node: ast.stmt, lines: list[str], name: str) -> Parameter:
    if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name) or node.value is None:
        raise SettingError(
            message(
                f"parameters cell of {name}",
                expected="lines `name: type = value  # help`",
                found=ast.unparse(node)[:60],
            )
        )
    try:
        default = ast.literal_eval(node.value)
    except ValueError as cause:
        found = ast.unparse(node.value)[:60]
        raise SettingError(message(f"parameter {node.target.id!r}", expected="a literal", found=found)) from cause
    comment = re.search(r"#\s*(.*)$", lines[(node.end_lineno or node.lineno) - 1][node.value.end_col_offset or 0 :])
    return Parameter(node.target.id, ast.unparse(node.annotation), default, comment[1].strip() if comment else "")


FILE_LIMIT = 1 << 20
"""Bytes of a parameter file: a settings file is small."""


class _Plain(yaml.SafeLoader):
    """YAML without aliases (300 bytes of them can stand for gigabytes), and with every key once."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise SettingError(message("a parameter file may not use aliases (*name)", do="write the value out"))
        return super().compose_node(parent, index)


def read_file(path: str | Path) -> dict[str, Any]:
    """Parameters from a YAML or JSON file: names with plain values.

    Raises `SettingError` for a file that is missing, too large or broken, for aliases, and for keys that YAML takes for
    something else (`on:` is the key True). `lr: 1e-6`, a string in YAML, becomes a number where the notebook says float.
    """
    file = Path(path)
    if not file.is_file():
        raise SettingError(message(f"no parameter file at {str(path)!r}", do="check the path"))
    if file.stat().st_size > FILE_LIMIT:
        raise SettingError(message(str(file), expected=f"at most {FILE_LIMIT} bytes", found=file.stat().st_size))
    try:
        document = _Plain(file.read_text(encoding="utf-8")).get_single_data()
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as cause:
        raise SettingError(message(f"{file} cannot be read as YAML", found=first_line(cause))) from cause
    if not isinstance(document, dict):
        raise SettingError(message(str(file), expected="lines `name: value`", found=describe(document)))
    for key in document:
        if not isinstance(key, str):
            raise SettingError(
                message(
                    f"{file}: key {key!r}", expected="a name", do="quote it: YAML reads on, off, yes, no as booleans"
                )
            )
    return document


def resolve(notebook: str | Path, given: Mapping[str, Any]) -> dict[str, Any]:
    """The given parameters, checked and coerced: `"false"` is False, `"1e-6"` a float.

    Raises `SettingError` for a name that is not declared (the nearest one is named) or not an identifier, and
    for a value that its annotation does not allow; nothing has been started then.
    """
    declared = {parameter.name: parameter for parameter in declared_parameters(notebook)}
    values = {}
    for name, value in given.items():
        if not name.isidentifier() or name not in declared:
            raise SettingError(unknown(f"parameter of {Path(notebook).name}", name, declared))
        parameter = declared[name]
        parsed = value
        if isinstance(value, str) and parameter.annotation.removeprefix("Optional[").startswith(("list", "dict")):
            parsed = _literal(name, value)
        values[name] = coerce(name, parsed, parameter.kind)
    return values


def _literal(name: str, text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError) as cause:
        raise SettingError(message(f"parameter {name!r}", expected="a Python list or dict", found=text)) from cause


def table(notebook: str | Path, values: Mapping[str, Any]) -> str:
    """All parameters with the value they will have; `*` marks those that were given."""
    parameters = declared_parameters(notebook)
    width = max((len(parameter.name) for parameter in parameters), default=0)
    lines = []
    for parameter in parameters:
        mark = "*" if parameter.name in values else " "
        value = values.get(parameter.name, parameter.default)
        lines.append(f" {mark} {parameter.name:<{width}}  {value!r:<28}  {parameter.help}")
    return "\n".join(lines)
