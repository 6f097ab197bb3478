"""The notebooks, and the data and tiny models that they use: `workbench notebooks DIR`, `wb.prepare_notebook`; `workbench new`.

A wheel has them in `workbench/starter` (setup.py puts them there); a checkout has them in its own folders. `[tool.workbench]`
in pyproject.toml lists them.
"""

from __future__ import annotations

import ast
import filecmp
import json
import os
import shutil
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

from workbench.base.distribution import check_packages
from workbench.base.errors import SettingError, first_line
from workbench.base.files import write_text

PACKAGE = Path(__file__).parents[1]
NOTEBOOKS = "notebooks"


def files() -> dict[str, Path]:
    """List the starter files (notebooks, data, tiny models): path in the folder to be written → path in the
    installation.
    """
    packed, project = PACKAGE / "starter", PACKAGE.parent / "pyproject.toml"
    if packed.is_dir():
        paths = [path for path in packed.rglob("*") if path.is_file()]
        return {path.relative_to(packed).as_posix(): path for path in sorted(paths)}
    if not project.is_file():
        what = f"no notebooks found in the workbench installation {str(PACKAGE)!r}"
        raise SettingError(what, expected=f"the folder {packed} or the file {project}", do="install workbench again")
    patterns = tomllib.loads(project.read_text(encoding="utf-8"))["tool"]["workbench"]["starter"]
    paths = [path for pattern in patterns for path in project.parent.glob(pattern) if path.is_file()]
    return {path.relative_to(project.parent).as_posix(): path for path in sorted(paths)}


def write(folder: str | Path, say: Callable[[str], None] = lambda line: None) -> Path:
    """Write `notebooks/` and `data/` into a folder, and return its path. Files that are there already and equal are
    left alone.

    Raises `SettingError`, before anything is written, where a file exists with other content.
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
    written = _write_missing(target)
    say(f"{target}: {written} files written, {len(places) - written} were there already")
    say(f"in {target.resolve()}: jupyter lab {NOTEBOOKS}/101_one_step.ipynb, or workbench train 201_train_grpo.ipynb")
    return target


def _write_missing(folder: Path) -> int:
    """Write the starter files that a folder lacks, and return how many."""
    missing = {folder / name: source for name, source in files().items() if not os.path.lexists(folder / name)}
    for place, source in missing.items():
        place.parent.mkdir(parents=True, exist_ok=True)
        part = place.with_name(f".{place.name}.{os.getpid()}.part")
        shutil.copyfile(source, part)
        os.replace(part, place)  # a copy that is cut short would be taken for the whole file later
    return len(missing)


def prepare_notebook(*extras: str) -> None:
    """Prepare what the cells of a notebook in `notebooks/` read; the first cell of each notebook calls this.

    Checks the packages of the core and of `extras`. In a folder called `notebooks` beside `data/` the working directory
    becomes the folder above, to which the notebooks' paths are relative. Missing starter files are written, but none in
    the repository or in a job, and no existing file is replaced.

    Args:
        extras: extras of the distribution whose packages the notebook imports, such as `"judges"`.

    Raises:
        PackageMissing: a package is absent or too old; names the command that installs it.
        SettingError: the files cannot be written here.
    """
    for extra in ("", *extras):
        check_packages(extra, "this notebook")
    if Path.cwd().name == NOTEBOOKS and Path("..", "data").is_dir():
        os.chdir("..")
    if os.environ.get("WORKBENCH_JOB"):
        return
    try:
        written = _write_missing(Path())
    except OSError as cause:
        what, do = f"starter files cannot be written to {os.getcwd()!r}", "os.chdir(…) to another before this cell"
        raise SettingError(what, found=first_line(cause), do=do) from cause
    if written:
        sys.stdout.write(
            f"{written} files of the notebooks were missing: written to data/ and notebooks/ of {os.getcwd()}\n"
        )


TEMPLATE = Path(__file__).with_name("new.ipynb")


def new(
    target: str | Path,
    *,
    model: str | None = None,
    train_file: str | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Path:
    """Write a notebook to start from: the user's data, reward, GRPO and training. It runs unchanged, on a tiny model.

    `model` and `train_file` are the defaults of its parameters. Raises `SettingError` for a name that does not end in
    `.ipynb`, and where the file exists.
    """
    path = Path(target)
    if path.suffix != ".ipynb":
        raise SettingError(f"name of the notebook {str(target)!r}", expected="a name that ends in .ipynb")
    if path.exists():
        raise SettingError(f"there is a file {str(target)!r} already", do="choose another name, or move it away")
    defaults = {"model": model, "train_file": train_file}
    document = json.loads(TEMPLATE.read_text(encoding="utf-8"))
    for cell in document["cells"]:
        lines = cell["source"]
        for number, line in enumerate(lines):
            name, equals, rest = line.partition(" = ")
            if cell["metadata"].get("tags") == ["parameters"] and equals and name in defaults:
                value, _, help = rest.partition("  # ")
                chosen = defaults[name] or _starter_path(ast.literal_eval(value), path.parent)
                lines[number] = f"{name} = {json.dumps(chosen, ensure_ascii=False)}  # {help}"
            lines[number] = lines[number].replace("mine.ipynb", path.name).replace("runs/mine", f"runs/{path.stem}")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(document, indent=1, ensure_ascii=False) + "\n")
    say(f"{path}: jupyter lab {path}, or workbench train {path}")
    return path


def _starter_path(name: str, folder: Path) -> str:
    """Return a path that leads to a starter file or folder from the notebook: its short name where that works from the
    notebook's folder and from here, else its place in the installation.
    """
    if Path(name).exists() and folder.resolve() == Path.cwd():
        return name
    source = files()
    packed = next(path for one, path in source.items() if one == name or one.startswith(f"{name}/"))
    return str(packed if name in source else packed.parent)


def find_notebook(name: str) -> str:
    """Return the path of a notebook: `name`, or `notebooks/name` where a bare file name exists only there."""
    beside = Path(NOTEBOOKS) / name
    return str(beside) if not Path(name).exists() and Path(name).name == name and beside.is_file() else name
