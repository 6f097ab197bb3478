"""A notebook's parameters: read, coerced by annotation, refused before anything starts, shown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from workbench.base.errors import SettingError
from workbench.jobs.parameters import declared_parameters, resolve, table


def test_the_cell_is_read_with_types_defaults_and_help(make_notebook: Any) -> None:
    found = {parameter.name: parameter for parameter in declared_parameters(make_notebook())}
    assert list(found) == ["run", "lr", "steps", "on", "name", "sizes"]
    assert found["lr"].default == 1e-3 and found["lr"].help == "learning rate" and found["steps"].help == ""
    assert found["lr"].kind is float and found["name"].kind == (str | None) and found["sizes"].kind == list[int]


def test_a_value_over_several_lines_and_one_with_a_hash_keep_their_help(make_notebook: Any) -> None:
    cell = 'weights: dict[str, float] = {\n    "a": 0.5,\n}  # of the sources\nmark: str = "####"  # of the answer'
    found = declared_parameters(make_notebook(parameters=cell))
    assert [parameter.default for parameter in found] == [{"a": 0.5}, "####"]
    assert [parameter.help for parameter in found] == ["of the sources", "of the answer"]


def test_words_from_a_command_line_become_values(make_notebook: Any) -> None:
    given = {"lr": "1e-6", "on": "false", "name": "None", "sizes": "[3]", "steps": "5"}
    expected = {"lr": 1e-6, "on": False, "name": None, "sizes": [3], "steps": 5}
    found = resolve(make_notebook(), given)
    assert found == expected and [type(value) for value in found.values()] == [type(v) for v in expected.values()]
    optional = make_notebook(parameters="from typing import Optional\nstop: Optional[list[str]] = None")
    assert resolve(optional, {"stop": "['a']"}) == {"stop": ["a"]} and resolve(optional, {"stop": "None"}) == {
        "stop": None
    }


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"lrr": 1}, "did you mean 'lr'"),
        ({"x; import os": 1}, "is not a parameter"),
        ({"steps": "many"}, "whole number"),
        ({"steps": "1.5"}, "'steps'; expected a whole number"),
        ({"sizes": "3 4"}, "list or dict"),
        ({"on": "maybe"}, "on"),
    ],
)
def test_what_was_not_declared_or_does_not_fit_is_refused(
    make_notebook: Any, wrong: dict[str, Any], match: str
) -> None:
    with pytest.raises(SettingError, match=match):
        resolve(make_notebook(), wrong)


@pytest.mark.parametrize(
    ("cell", "match"),
    [
        (None, "tagged 'parameters'"),
        ("x = 3", "name: type"),
        ("x: int", "name: type"),
        ("import os", "name: type"),
        ("x: int = f()", "a literal"),
        ("x: int | None = 3", "papermill reads no other"),
        ("x: pathlib.Path = 'a'", "papermill reads no other"),
        ("x: int = 3\n%matplotlib inline", "no %magic"),
    ],
)
def test_bad_parameter_cells_are_refused(make_notebook: Any, cell: str | None, match: str) -> None:
    with pytest.raises(SettingError, match=match):
        resolve(make_notebook("1", parameters=cell), {"x": 1})


def test_two_parameter_cells_and_no_notebook_are_refused(make_notebook: Any, tmp_path: Path) -> None:
    path = make_notebook("lr: float = 2.0")
    document = json.loads(path.read_text())
    document["cells"][1]["metadata"]["tags"] = ["parameters"]
    path.write_text(json.dumps(document))
    with pytest.raises(SettingError, match="found 2"):
        declared_parameters(path)
    with pytest.raises(SettingError, match="no notebook at"):
        declared_parameters(tmp_path / "nowhere.ipynb")


def test_the_table_marks_what_was_given(make_notebook: Any) -> None:
    lines = table(make_notebook(), {"lr": 2.0}).splitlines()
    assert len(lines) == 6 and lines[1].split() == ["*", "lr", "2.0", "learning", "rate"]
    assert all(line.startswith("   ") for number, line in enumerate(lines) if number != 1)
