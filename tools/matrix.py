"""Run the same checks with several sets of versions, each in a fresh environment; docs/versions.md has the table that comes of it.

    python tools/matrix.py                  # every cell; writes the table of docs/versions.md
    python tools/matrix.py lock colab       # these cells alone; the table is only printed, and in it the others are "not run"

A cell that cannot be set up here (no such Python, no CPU build of torch for it, no network) is "not run", with the reason. The checks
are in tools/matrix_checks.py; each cell's logs stay in build/matrix. uv sets the environments up, under pip's own settings.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import install

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "versions.md"
BUILD = ROOT / "build" / "matrix"
COLAB = ROOT / "tools" / "colab.txt"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
UV = (sys.executable, "-m", "uv", "--quiet")
NOT_RUN = "not run"
LIMIT = 1800
"""Seconds that one check may take."""
CHECKS = {
    "readme": "README's example",
    "views": "every view to HTML",
    "job": "notebook 101 as a job",
    "resume": "save and resume",
    "tests": "fast tests of engines",
    "pip": "pip leaves what is there",
}
BESIDE = ("", "[jobs]")
"""Extras with which the last check asks pip for the wheel."""
TESTS = ("-m", "pytest", "tests/engines", "-m", "not slow and not long", "-n", "0", "-p", "no:cacheprovider")
TESTING = ("pytest", "pytest-timeout", "pytest-xdist", "hypothesis")
"""Packages of `dev` that the tests of engines need."""
OURS = ("torch", "setuptools", *TESTING)
"""Packages whose versions a cell's list does not choose: torch, what its own metadata asks for, and the tests' own."""


@dataclass
class Cell:
    """One set of versions: where it comes from, and how the checks ended with it."""

    title: str
    python: str = "3.11"
    options: tuple[str, ...] = ()
    constraints: Path | None = None
    beside: bool = False
    """Whether its versions are those of an environment that `pip install` must leave as it is."""
    brought: str = ""
    """What pip would install there."""
    ended: dict[str, str] = field(default_factory=dict)
    """Check → `passed` or `FAILED`; empty where the cell was not run. A check that is not for the cell is absent."""
    versions: dict[str, str] = field(default_factory=dict)
    date: str = ""
    reason: str = "it was not asked for"
    """Why the cell was not run."""


CELLS = {
    "lowest": Cell("oldest", options=("--resolution", "lowest-direct")),
    "lock": Cell("locked", constraints=ROOT / "requirements.lock"),
    "newest": Cell("newest"),
    "colab": Cell("Colab's", constraints=COLAB, beside=True),
    "py312": Cell("newest", python="3.12"),
    "py313": Cell("newest", python="3.13"),
}


def normal(name: str) -> str:
    """A distribution's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def package_of(line: str) -> str:
    """The package that a requirement's line names."""
    return normal(re.split(r"[\[<>=! ]", line)[0])


def pins(text: str) -> dict[str, str]:
    """Package → version, of lines `name==version`."""
    pairs = (line.split(";")[0].split("==") for line in text.splitlines() if "==" in line and line[0] not in "# ")
    return {normal(name.strip()): version.strip() for name, version in pairs}


def direct() -> list[str]:
    """Names of the packages that the core and the users' extras ask for, in pyproject's order."""
    extras = PROJECT["optional-dependencies"]
    users = [line for name, lines in extras.items() if name not in ("all", "vllm", "vllm-cpu", "dev") for line in lines]
    names = [package_of(line) for line in [*PROJECT["dependencies"], *users]]
    return [name for name in names if name != PROJECT["name"]]


class CellNotSetUp(Exception):
    """A cell cannot be run here; the text says why."""


def called(command: Sequence[str], log: Path, **options: object) -> int:
    """The exit code of a command, whose output goes to a file; 124 where it took too long."""
    with log.open("w") as out:
        try:
            return subprocess.run(command, stdout=out, stderr=out, timeout=LIMIT, **options).returncode  # type: ignore[call-overload]
        except subprocess.TimeoutExpired:
            out.write(f"\nended after {LIMIT} s\n")
            return 124


def last_lines(log: Path) -> str:
    """The end of a log as one line."""
    return " ".join(log.read_text(errors="replace").replace("|", "/").split())[-300:]


def pip_settings() -> tuple[list[str], dict[str, str]]:
    """uv's options and environment variables for pip's settings on this machine."""
    listing = subprocess.run([*install.PIP, "config", "list"], capture_output=True, text=True, check=True).stdout
    options, variables = install.for_uv(install.settings_in(listing))
    return options, {**os.environ, **variables}


def interpreter(cell: Cell, folder: Path) -> str:
    """The path of this machine's Python of a cell's version."""
    _, env = pip_settings()
    log = folder / "setup.log"
    find = [sys.executable, "-m", "uv", "python", "find", "--no-python-downloads", "--system", cell.python]
    if called(
        find, log, env={**env, "PYENV_VERSION": cell.python}
    ):  # without it pyenv's commands for other versions fail
        raise CellNotSetUp(f"this machine has no Python {cell.python}")
    return log.read_text().strip().splitlines()[-1]


def set_up(cell: Cell, folder: Path, python: str, wheel: Path, torch: str) -> Path:
    """Resolve a cell's versions and install them and the wheel; returns the environment's Python."""
    options, env = pip_settings()
    (folder / "torch.txt").write_text(f"torch=={torch}\n")
    constraints = [folder / "torch.txt"]
    if cell.constraints is not None:
        if not cell.constraints.is_file():
            raise CellNotSetUp(f"{cell.constraints.relative_to(ROOT)} is absent")
        chosen = pins(cell.constraints.read_text())
        lines = [f"{name}=={version}" for name, version in chosen.items() if name not in OURS]
        (folder / "constraints.txt").write_text("\n".join(lines) + "\n")
        constraints.append(folder / "constraints.txt")
    dev = {package_of(line): line for line in PROJECT["optional-dependencies"]["dev"]}
    (folder / "testing.in").write_text("\n".join(dev[name] for name in TESTING) + "\n")

    log = folder / "setup.log"
    lock, limits = folder / "versions.txt", [word for path in constraints for word in ("--constraint", str(path))]
    inputs = [
        str(ROOT / "pyproject.toml"),
        str(folder / "testing.in"),
        "--extra",
        "all",
        "--no-annotate",
        "--no-header",
    ]
    if called(
        [*UV, "pip", "compile", "--python", python, *inputs, "-o", str(lock), *options, *cell.options, *limits],
        log,
        env=env,
    ):
        raise CellNotSetUp(last_lines(log))
    cell.versions = pins(lock.read_text())

    inside = folder / "venv" / "bin" / "python"
    at = ("--python", str(inside))
    for command in (
        [*UV, "venv", "--clear", "--python", python, str(folder / "venv")],
        [*UV, "pip", "install", *at, *options, "--no-deps", "-r", str(lock)],
        [*UV, "pip", "install", *at, "--no-deps", str(wheel)],
    ):
        if called(command, log, env=env):
            raise CellNotSetUp(last_lines(log))
    cell.versions["python"] = subprocess.run(
        [str(inside), "-c", "import platform; print(platform.python_version())"], capture_output=True, text=True
    ).stdout.strip()
    return inside


def brought(report: Mapping[str, Any], there: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """(what pip would change of the packages that are there, what it would bring besides our own), of its `--report`."""
    wanted = {normal(one["metadata"]["name"]): one["metadata"]["version"] for one in report["install"]}
    changes = [f"{name} {there[name]} to {version}" for name, version in sorted(wanted.items()) if name in there]
    return changes, sorted(wanted.keys() - there.keys() - {PROJECT["name"]})


def beside(cell: Cell, folder: Path, python: str, wheel: Path, torch: str) -> bool:
    """Whether pip, asked for the wheel, would leave an environment that has the cell's listed versions and not the wheel as it is.

    Torch is the build at hand, which has no CUDA and asks for its own setuptools. The environment is no resolver's: a range that the list breaks is a change.
    """
    listed = pins(cell.constraints.read_text()) if cell.constraints else {}
    there = {name: version for name, version in listed.items() if name not in OURS and not name.startswith("cuda-")}
    there["torch"] = torch
    (folder / "there.txt").write_text(
        "\n".join([*(f"{name}=={version}" for name, version in there.items()), "setuptools\n"])
    )
    inside, log = folder / "there" / "bin" / "python", folder / "pip.log"
    options, env = pip_settings()
    for command in (
        [*UV, "venv", "--clear", "--python", python, str(folder / "there")],
        [*UV, "pip", "install", "--python", str(inside), *options, "--no-deps", "-r", str(folder / "there.txt")],
    ):
        if called(command, log, env=env):
            raise CellNotSetUp(last_lines(log))
    lines, same = [], True
    for extra in BESIDE:
        report = folder / f"report{extra}.json"
        ask = [*install.PIP, "--python", str(inside), "install", "--quiet", "--dry-run", "--report", str(report)]
        if called([*ask, f"{wheel}{extra}"], log):
            raise CellNotSetUp(last_lines(log))
        changes, new = brought(json.loads(report.read_text()), there)
        same &= not changes
        lines.append(
            f"`{PROJECT['name']}{extra}` changes {len(changes)} of {len(there)} packages{': ' * bool(changes)}{', '.join(changes)}"
        )
        lines[-1] += f" and brings {', '.join(new) or 'no other'}"
    cell.brought = "; ".join(lines)
    print(f"  {cell.brought}", flush=True)
    return same


def check(cell: Cell, folder: Path, python: Path) -> None:
    """Run all checks in a set-up environment, outside the repository but for the tests."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    env |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}"}
    work = folder / "work"
    work.mkdir()
    if called([str(python), "-m", "workbench.cli", "notebooks", "."], folder / "notebooks.log", cwd=work, env=env):
        raise CellNotSetUp(last_lines(folder / "notebooks.log"))
    for name in (name for name in CHECKS if name != "pip"):
        command = TESTS if name == "tests" else (str(ROOT / "tools" / "matrix_checks.py"), name)
        code = called(
            [str(python), *command], log := folder / f"{name}.log", cwd=ROOT if name == "tests" else work, env=env
        )
        cell.ended[name] = "passed" if code == 0 else "FAILED"
        print(f"  {CHECKS[name]}: {cell.ended[name]}" + (f" (exit {code}), see {log}" if code else ""), flush=True)


def run(name: str, cell: Cell, wheel: Path, torch: str, keep: bool) -> None:
    """One cell, from nothing to its row; its environment is deleted afterwards."""
    folder = BUILD / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    print(f"{name}:", flush=True)
    try:
        cell.date, python = datetime.date.today().isoformat(), interpreter(cell, folder)
        if cell.beside:
            cell.ended["pip"] = "passed" if beside(cell, folder, python, wheel, torch) else "FAILED"
        if "FAILED" not in cell.ended.values():  # its versions could not be resolved with the wheel
            check(cell, folder, set_up(cell, folder, python, wheel, torch))
    except CellNotSetUp as why:
        cell.ended, cell.versions, cell.reason = {}, {}, str(why)
        print(f"  {NOT_RUN}: {why}; see {folder}", flush=True)
    if not keep:
        for made in ("venv", "there"):
            shutil.rmtree(folder / made, ignore_errors=True)


def table(cells: Mapping[str, Cell], packages: Sequence[str]) -> str:
    """The cells as columns; the checks and the packages' versions as rows. A cell without results is "not run" in each."""

    def row(title: str, values: Sequence[str]) -> str:
        return f"| {' | '.join([title, *values])} |"

    columns = list(cells.values())
    lines = [
        row("", [f"{cell.title}, {cell.python}" for cell in columns]),
        "|---" * (len(columns) + 1) + "|",
        row("run on", [cell.date if cell.ended else NOT_RUN for cell in columns]),
        *(
            row(title, [cell.ended.get(name, "–" if name == "pip" and cell.ended else NOT_RUN) for cell in columns])
            for name, title in CHECKS.items()
        ),
        *(row(name, [cell.versions.get(name, "–") if cell.ended else "–" for cell in columns]) for name in packages),
    ]
    notes = [
        f"- {cell.title}, {cell.python}: not run, for {cell.reason}" if not cell.ended else f"- {cell.title}, {cell.python}: failed: {', '.join(failed)}"
        for cell in columns
        if (failed := [CHECKS[name] for name, end in cell.ended.items() if end != "passed"]) or not cell.ended
    ]  # fmt: skip
    notes += [f"- {cell.title}, {cell.python}: {cell.brought}" for cell in columns if cell.ended and cell.brought]
    return "\n".join([*lines, *([""] if notes else []), *notes])


def between(text: str, marker: str, new: str) -> str:
    """A page with what stands between `<!-- marker -->` and `<!-- /marker -->` replaced."""
    begin, end = f"<!-- {marker} -->", f"<!-- /{marker} -->"
    before, _, rest = text.partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        raise SystemExit(f"the page has no {begin} with {end} after it; write both where the table belongs")
    return f"{before}{begin}\n\n{new}\n\n{end}{after}"


def built_wheel() -> Path:
    """A wheel of what git knows of this checkout, built away from its own build folder, which may hold files that are gone."""
    shutil.rmtree(BUILD / "source", ignore_errors=True)
    listing = [
        "git",
        "ls-files",
        "-z",
        "workbench",
        "notebooks",
        "data",
        "pyproject.toml",
        "setup.py",
        "README.md",
        "LICENSE",
    ]
    names = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    for name in filter(None, names):
        place = BUILD / "source" / name
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, place)
    for old in BUILD.glob("*.whl"):
        old.unlink()
    if called([*install.PIP, "wheel", "--no-deps", "-w", str(BUILD), str(BUILD / "source")], BUILD / "wheel.log"):
        raise SystemExit(f"the wheel cannot be built: {last_lines(BUILD / 'wheel.log')}")
    return next(BUILD.glob("*.whl"))


def main() -> int:
    """Run cells and write the table; 1 where a check failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "cells", nargs="*", metavar="CELL", help=f"of {', '.join(CELLS)}; none: all, and the guide is written"
    )
    locked = pins((ROOT / "requirements.lock").read_text())["torch"]
    parser.add_argument(
        "--torch", default=f"{locked}+cpu", help="version of torch in every cell (default: %(default)s)"
    )
    parser.add_argument("--all-run", action="store_true", help="fail, too, where a cell that was asked for was not run")
    parser.add_argument("--keep", action="store_true", help="keep the environments in build/matrix")
    options = parser.parse_args()
    if unknown := set(options.cells) - set(CELLS):
        parser.error(f"no cell {', '.join(sorted(unknown))}; there are {', '.join(CELLS)}")
    wheel = built_wheel()
    for name, cell in CELLS.items():
        if not options.cells or name in options.cells:
            run(name, cell, wheel, options.torch, options.keep)
    made = table(CELLS, ["python", *direct()])
    print(made)
    if not options.cells:
        PAGE.write_text(between(PAGE.read_text(encoding="utf-8"), "matrix", made), encoding="utf-8")
    asked = [CELLS[name] for name in options.cells or CELLS]
    failed = any(end != "passed" for cell in asked for end in cell.ended.values())
    return int(failed or (options.all_run and not all(cell.ended for cell in asked)))


if __name__ == "__main__":
    sys.exit(main())
