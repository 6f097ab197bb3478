"""A notebook's parameters: read from its tagged cell, checked against given values, converted, shown as a table."""

from __future__ import annotations

import ast
import inspect
import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench import recipes, rewards
from workbench.base.config import coerce, read_yaml
from workbench.base.errors import SettingError, describe, first_line, unknown
from workbench.base.shown import is_secret
from workbench.compat.verl_reward import reward_from
from workbench.datasets.rows import Rows
from workbench.functional.losses import POLICY_LOSSES
from workbench.rewards.base import BaseReward
from workbench.stages.pipeline import Pipeline

TAG = "parameters"
_TYPES: Mapping[str, Any] = {"int": int, "float": float, "bool": bool, "str": str, "list": list, "dict": dict}


@dataclass(frozen=True)
class Parameter:
    """One parameter that a notebook's parameters cell declares: `name: annotation = default  # help`, or `name = default`."""

    name: str
    annotation: str
    default: Any
    help: str
    inferred: bool = False
    """The annotation is that of the default: the notebook has none."""

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
    """Read the parameters that a notebook's `parameters` cell declares, in order.

    The cell may import from `typing`, for `Optional`. Raises `SettingError` where the notebook is missing, has no such
    cell or more than one, or where a line of it is neither `name = literal` nor `name: type = literal`.
    """
    path = Path(notebook)
    cells = read_notebook(path)["cells"]
    tagged = [cell for cell in cells if TAG in cell.get("metadata", {}).get("tags", [])]
    if len(tagged) != 1:
        expected, do = "one code cell tagged 'parameters'", "tag only the cell that assigns the parameters"
        if not tagged:
            do = "tag the cell that assigns the parameters (`steps = 4`), or see what `workbench new mine.ipynb` writes"
        raise SettingError(f"parameters of {path.name}", expected=expected, found=f"{len(tagged)} such cells", do=do)
    source = tagged[0]["source"]
    text = source if isinstance(source, str) else "".join(source)
    lines = text.splitlines()
    try:
        tree = ast.parse(text)
    except SyntaxError as cause:
        found = f"{cause.msg} in line {cause.lineno}"
        expected = "lines `name = value  # help`, no %magic and no !command"
        raise SettingError(f"the parameters cell of {path.name}", expected=expected, found=found) from cause
    body = [node for node in tree.body if not (isinstance(node, ast.ImportFrom) and node.module == "typing")]
    return [_parameter(node, lines, path.name) for node in body]


def _parameter(node: ast.stmt, lines: list[str], notebook: str) -> Parameter:
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    target, value = targets[0], getattr(node, "value", None)
    assigns = isinstance(node, ast.Assign | ast.AnnAssign) and len(targets) == 1
    if not assigns or not isinstance(target, ast.Name) or value is None:
        expected = "lines `name = value  # help` or `name: type = value  # help`"
        found = ast.unparse(node)[:60]
        raise SettingError(f"a line in the parameters cell of {notebook}", expected=expected, found=found)
    try:
        default = ast.literal_eval(value)
    except ValueError as cause:
        found = ast.unparse(value)[:60]
        what, expected = f"the default of parameter {target.id!r}", "a literal, not an expression"
        raise SettingError(what, expected=expected, found=found) from cause
    comment = re.search(r"#\s*(.*)$", lines[(node.end_lineno or node.lineno) - 1][value.end_col_offset or 0 :])
    text, given = comment[1].strip() if comment else "", getattr(node, "annotation", None)
    annotation = ast.unparse(given) if given is not None else _type_of(default, target.id)
    return Parameter(target.id, annotation, default, text, inferred=given is None)


def _type_of(default: Any, name: str) -> str:
    """Return the annotation that a default implies: 4 → `int`, [1, 2] → `list[int]`. Raises `SettingError` for None and
    mixed lists.
    """
    if isinstance(default, list | dict) and default:
        parts = [list(default)] if isinstance(default, list) else [list(default), list(default.values())]
        inner = [{_type_of(one, name) for one in part} for part in parts]
        if all(len(kinds) == 1 for kinds in inner):
            return f"{type(default).__name__}[{', '.join(kinds.pop() for kinds in inner)}]"
    if type(default).__name__ not in _TYPES:
        do = f"write its type: `{name}: Optional[int] = {default!r}`, below `from typing import Optional`"
        expected = "a number, a text, True or False, a list or a dict of these, or an annotation"
        raise SettingError(f"the type of parameter {name!r}", expected=expected, found=repr(default), do=do)
    return type(default).__name__


def read_notebook(path: Path) -> dict[str, Any]:
    """Read a notebook file as its JSON document. Raises `SettingError` where there is no file, or it is not a notebook."""
    if not path.is_file():
        raise SettingError(f"no notebook at {str(path)!r}", do="check the path")
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as cause:
        raise SettingError(f"{path} is not a notebook", expected="JSON", found=first_line(cause)) from cause
    if not isinstance(document, dict) or not isinstance(document.get("cells"), list):
        raise SettingError(f"{path} is not a notebook", expected="a JSON object with cells", found=describe(document))
    return document


OF_THE_RUNNER = (
    Parameter("run", "str", "", "run folder of a training that names none; empty: a new one in runs"),
    Parameter(
        "resume", "str", "auto", "for a training that does not say: go on (auto), or start in a new folder (never)"
    ),
)
"""Parameters that every notebook has as a job: where it does not declare one, `wb.train` takes it from the runner."""


def resolve(notebook: str | Path, given: Mapping[str, Any]) -> dict[str, Any]:
    """Check parameter values and convert them to the notebook's types: `"false"` → False, `"1e-6"` → 1e-6.

    A text for a `list[str]` that is not a list becomes a list of one, and `~/` becomes the home folder. `run` and
    `resume` are allowed for every notebook (`OF_THE_RUNNER`). No kernel is started.

    Raises `SettingError` for a name that is not declared (the message has the nearest one) or not an identifier, and
    for a value that the annotation does not allow.
    """
    declared = {parameter.name: parameter for parameter in (*OF_THE_RUNNER, *declared_parameters(notebook))}
    values = {}
    for name, value in given.items():
        if not name.isidentifier() or name not in declared:
            raise SettingError(unknown(f"parameter of {Path(notebook).name}", name, declared))
        parameter = declared[name]
        if value and isinstance(value, str) and is_secret(name):  # the job's record and its notebook would keep it
            do = f"set the variable {name.upper()}, and read os.environ[{name.upper()!r}] in the cell that needs it"
            raise SettingError(f"parameter {name!r}", expected="no secret: a run folder keeps its parameters", do=do)
        value = _home(value)
        if parameter.annotation == "list[str]" and isinstance(value, str) and not value.lstrip().startswith("["):
            value = [value]
        elif isinstance(value, str) and parameter.annotation.removeprefix("Optional[").startswith(("list", "dict")):
            try:
                value = ast.literal_eval(value)
            except (ValueError, SyntaxError) as cause:
                raise SettingError(f"value of parameter {name!r}", expected="a list or dict", found=value) from cause
        values[name] = _home(_coerced(parameter, value))
    return values


def _coerced(parameter: Parameter, value: Any) -> Any:
    try:
        return coerce(parameter.name, value, parameter.kind)
    except SettingError as error:
        if not parameter.inferred:
            raise
        line = f"{parameter.name} = {parameter.default!r}"
        do = f"its type is that of `{line}`; for another one write `{parameter.name}: float = …` in the notebook"
        raise SettingError(f"{error}; {do}") from error


def _home(value: Any) -> Any:
    """Replace `~/` at the start of a text, or of the texts of a list, by the home folder; no shell expands it after a
    `=`.
    """
    if isinstance(value, list):
        return [_home(one) for one in value]
    return os.path.expanduser(value) if isinstance(value, str) and value.startswith("~/") else value


def open_reward(name: str, tokenizer: Any) -> BaseReward:
    """Open the reward that a job's parameter names; `tokenizer` is the policy's.

    `name` is `file.py` or `file.py:function`, a yaml or JSON file with verl's `reward.*` settings, or a scorer by its
    name or a `data_source`; "" means the scorer of each row's `data_source`. Raises `SettingError` for any other name.
    """
    file = name.partition(":")[0]
    if file.endswith((".yaml", ".yml", ".json")):
        return reward_from(read_yaml(file), tokenizer=tokenizer)
    if not name or file.endswith(".py"):
        return rewards.as_reward(name or None)
    scorers = {**{one.__name__: one for one in (*rewards.SCORERS.values(), rewards.math_verify)}, **rewards.SCORERS}
    if name not in scorers:
        do = "or name a file: file.py:function, or a yaml of reward.* settings"
        raise SettingError(unknown("scorer", name, scorers), do=do)
    return rewards.as_reward(scorers[name])


def open_recipe(name: str, rows: Rows) -> Callable[..., Pipeline]:
    """Return the recipe that a job's parameter names; a recipe that draws further prompts draws them from the job's
    `rows`.

    The returned function raises `SettingError` for a setting that its recipe cannot use, such as a clip range for a
    loss that does not clip. A recipe with a critic is refused, because its settings are parameters of notebook 202.
    """
    recipe = recipes.by_name(name)
    known = inspect.signature(recipe).parameters
    if "critic" in known:
        do = "workbench train 202_train_ppo.ipynb has them; there is no parameter `recipe` there"
        raise SettingError(f"recipe {name!r} trains a critic, for which this notebook has no parameters", do=do)
    loss = known["loss_mode"].default
    own = {"rows": rows} if "rows" in known else {}

    def made(engine: Any, reward: Any = None, **settings: Any) -> Pipeline:
        for key, value in settings.items():
            bounds = key in ("clip_ratio_low", "clip_ratio_high")
            if bounds and value is not None and key not in inspect.signature(POLICY_LOSSES[loss]).parameters:
                what = f"recipe {name!r} has no place for {key}: its loss {loss!r} does not clip"
                raise SettingError(what, found=f"{key}={value}", do="leave it out")
        return recipe(engine, reward, **own, **settings)

    return made


def table(notebook: str | Path, values: Mapping[str, Any]) -> str:
    """Format a notebook's parameters as text, one per line: name, value (from `values`, marked `*`, or the default),
    help.
    """
    own = declared_parameters(notebook)
    names = {parameter.name for parameter in own}
    parameters = [*own, *(one for one in OF_THE_RUNNER if one.name in values and one.name not in names)]
    width = max((len(parameter.name) for parameter in parameters), default=0)
    lines = []
    for parameter in parameters:
        mark = "*" if parameter.name in values else " "
        value = values.get(parameter.name, parameter.default)
        lines.append(f" {mark} {parameter.name:<{width}}  {value!r:<28}  {parameter.help}")
    return "\n".join(lines)
