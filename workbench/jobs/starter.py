"""`workbench notebooks DIR`: write the notebooks, and the data and tiny models that they use, into a folder; `workbench new`.

A wheel has them in `workbench/starter` (setup.py puts them there); a checkout has them in its own folders. `[tool.workbench]`
in pyproject.toml lists them.
"""

from __future__ import annotations

import ast
import filecmp
import json
import shutil
import tomllib
from collections.abc import Callable
from pathlib import Path

from workbench.base.errors import SettingError
from workbench.base.files import write_text

PACKAGE = Path(__file__).parents[1]
NOTEBOOKS = "notebooks"


def files() -> dict[str, Path]:
    """Starter files (notebooks, data, tiny models): path in the folder to be written → path in the installation."""
    packed, project = PACKAGE / "starter", PACKAGE.parent / "pyproject.toml"
    if packed.is_dir():
        found = [path for path in packed.rglob("*") if path.is_file()]
        return {path.relative_to(packed).as_posix(): path for path in sorted(found)}
    if not project.is_file():
        what = f"no notebooks found in the workbench installation {str(PACKAGE)!r}"
        raise SettingError(what, expected=f"the folder {packed} or the file {project}", do="install workbench again")
    patterns = tomllib.loads(project.read_text(encoding="utf-8"))["tool"]["workbench"]["starter"]
    found = [path for pattern in patterns for path in project.parent.glob(pattern) if path.is_file()]
    return {path.relative_to(project.parent).as_posix(): path for path in sorted(found)}


def write(folder: str | Path, say: Callable[[str], None] = lambda line: None) -> Path:
    """Write `notebooks/` and `data/` into a folder, and return its path; files that are there unchanged are left alone.

    Raises `SettingError`, before anything is written, where a file exists with another content.
    """
    target = Path(folder)
    if target.resolve().name == NOTEBOOKS:  # the notebooks' first cell goes one folder up from a folder of this name
        expected = "the folder in which notebooks/ and data/ are to be written"
        do = f"name another folder: workbench notebooks {target.parent / 'bench'}"
        raise SettingError(f"folder {str(folder)!r} is itself called '{NOTEBOOKS}'", expected=expected, do=do)
    places = {target / name: source for name, source in files().items()}
    blocked = {path for place in places for path in place.parents if path.exists() and not path.is_dir()}
    there = {place: source for place, source in places.items() if place.exists()}
    changed = {one for one, source in there.items() if not (one.is_file() and filecmp.cmp(source, one, shallow=False))}
    if names := sorted(map(str, blocked | changed)):
        what, do = f"nothing was written to {str(folder)!r}", "name another folder, or move these away"
        expected = "a folder without the starter files, or with unchanged ones"
        found = f"{len(names)} changed: {', '.join(names[:5])}{', …' if len(names) > 5 else ''}"
        raise SettingError(what, expected=expected, found=found, do=do)
    missing = places.keys() - there
    for place in missing:
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(places[place], place)
    say(f"{target}: {len(missing)} files written, {len(places) - len(missing)} were there already")
    say(f"in {target.resolve()}: jupyter lab {NOTEBOOKS}/101_one_step.ipynb, or workbench train 201_train_grpo.ipynb")
    return target


TEMPLATE = Path(__file__).with_name("new.ipynb")


def new(
    target: str | Path,
    *,
    model: str | None = None,
    train_file: str | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Path:
    """Write a notebook to start from: own data, own reward, GRPO, training. It runs as it stands, on a tiny model.

    `model` and `train_file` are the defaults of its parameters. Raises `SettingError` for a name that does not end in `.ipynb`,
    and where the file exists.
    """
    path = Path(target)
    if path.suffix != ".ipynb":
        raise SettingError(f"name of the notebook {str(target)!r}", expected="a name that ends in .ipynb")
    if path.exists():
        raise SettingError(f"there is a file {str(target)!r} already", do="choose another name, or move it away")
    given = {"model": model, "train_file": train_file}
    document = json.loads(TEMPLATE.read_text(encoding="utf-8"))
    for cell in document["cells"]:
        lines = cell["source"]
        for number, line in enumerate(lines):
            name, equals, rest = line.partition(" = ")
            if cell["metadata"].get("tags") == ["parameters"] and equals and name in given:
                value, _, help = rest.partition("  # ")
                chosen = given[name] or _found(ast.literal_eval(value), path.parent)
                lines[number] = f"{name} = {json.dumps(chosen, ensure_ascii=False)}  # {help}"
            lines[number] = lines[number].replace("mine.ipynb", path.name).replace("runs/mine", f"runs/{path.stem}")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(document, indent=1, ensure_ascii=False) + "\n")
    say(f"{path}: jupyter lab {path}, or workbench train {path}")
    return path


def _found(name: str, folder: Path) -> str:
    """A starter file or folder by its short name where that leads to it from the notebook's folder and from here; else its
    place in the installation."""
    if Path(name).exists() and folder.resolve() == Path.cwd():
        return name
    source = files()
    packed = next(path for one, path in source.items() if one == name or one.startswith(f"{name}/"))
    return str(packed if name in source else packed.parent)


def find_notebook(name: str) -> str:
    """The path of a notebook: `name` itself, or `notebooks/name` where a bare file name exists only there."""
    beside = Path(NOTEBOOKS) / name
    return str(beside) if not Path(name).exists() and Path(name).name == name and beside.is_file() else name
