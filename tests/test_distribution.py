"""The distribution: what works with the core alone, what each absent package costs, and what else is called `workbench`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from absent_packages import NEEDS
from packaging.requirements import Requirement
from support.patience import LONG

import workbench as wb
from workbench.base import distribution
from workbench.base.distribution import DISTRIBUTION, required
from workbench.base.errors import PackageMissing, SettingError, WorkbenchError
from workbench.jobs.machine import LOST, NEEDED

ROOT = Path(__file__).parents[1]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
OF_USERS = {name: lines for name, lines in EXTRAS.items() if name not in ("all", "vllm", "vllm-cpu", "dev")}
"""Extra → its requirements."""
PACKAGES = {
    line.name: extra
    for extra, lines in OF_USERS.items()
    for line in map(Requirement, lines)
    if line.name != DISTRIBUTION
}
"""Optional package → the extra that brings it."""


def test_an_import_that_meets_the_other_products_files_says_so(tmp_path: Path) -> None:
    """`workbench` of the package index is another product; where both are installed, one folder has files of both."""
    package = tmp_path / "workbench"
    package.mkdir()
    for part in (ROOT / "workbench").iterdir():
        (package / part.name).symlink_to(part)
    (package / "repl").mkdir()
    command = [sys.executable, "-c", "import workbench"]
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True
    )
    assert done.returncode == 1 and "another product" in done.stderr and "pip install rl-workbench" in done.stderr


def outcomes(tmp_path: Path) -> dict[str, dict[str, str]]:
    """Absent packages, joined by commas → part of the work → `ok`, or the error, as `tests/absent_packages.py` saw it."""
    command = [sys.executable, str(ROOT / "tests" / "absent_packages.py"), str(tmp_path), json.dumps(PACKAGES)]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=3 * LONG)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_each_optional_package_can_be_absent_and_costs_what_is_said(tmp_path: Path) -> None:
    seen = outcomes(tmp_path)
    assert set(seen) == {*PACKAGES, ",".join(PACKAGES)}
    for absent, parts in seen.items():
        failed = {part: error for part, error in parts.items() if error != "ok"}
        names = absent.split(",")
        assert not [part for part in failed if part.startswith("step")], (absent, failed)
        assert {part.removeprefix("needs ") for part in failed} == {
            name for name in names if f"needs {name}" in parts
        }, (absent, failed)
        for part, error in failed.items():
            extra = PACKAGES[part.removeprefix("needs ")]
            assert error.startswith("PackageMissing") or "rl-workbench[" in error, (absent, part, error)
            assert f"rl-workbench[{extra}]" in error, (absent, part, error)


FLOORS = {one.name: one for lines in OF_USERS.values() for one in map(Requirement, lines)}
IMPORTED = {
    "nbconvert": "workbench.jobs.report",
    "bleach": "workbench.jobs.report",
    "pydantic": "workbench.rewards.judge",
}
"""Package → the module that imports it, once in a process."""


def outdated(patch: pytest.MonkeyPatch, package: str) -> None:
    """Pretend that an old version of a package is installed."""
    before = distribution.version_of
    patch.setattr(distribution, "version_of", lambda name: "0.0.1" if name == package else before(name))


@pytest.mark.parametrize("package", NEEDS)
def test_an_old_package_is_named_by_what_needs_it(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outdated(monkeypatch, package)
    if package in IMPORTED:
        monkeypatch.delitem(sys.modules, IMPORTED[package], raising=False)
        monkeypatch.delitem(vars(wb.rewards), "Judge", raising=False)
    with pytest.raises(WorkbenchError) as error:
        NEEDS[package](tmp_path)
    needed = f"{package}{FLOORS[package].specifier}"
    said = f"expected {needed}; found {package} 0.0.1; pip install '{needed}', then start this process again"
    assert said in str(error.value)


def test_an_old_package_of_the_core_is_named_where_a_model_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoConfig

    outdated(monkeypatch, "transformers")
    wb.engines.local("data/tiny-arith")  # what works is not refused
    monkeypatch.setattr(AutoConfig, "from_pretrained", lambda *given, **options: {}["rope_parameters"])
    with pytest.raises(PackageMissing, match=r"loading a model.*transformers>=.*found transformers 0.0.1; pip install"):
        wb.engines.local("data/tiny-arith")


@pytest.mark.parametrize(("package", "extras"), [("numpy", ()), ("pydantic", ("judges",)), ("ray", ("cluster",))])
def test_an_old_or_absent_package_is_named_by_a_notebooks_first_cell(
    package: str, extras: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        outdated(patch, package)
        with pytest.raises(PackageMissing, match=f"this notebook; expected {package}>=.*found {package} 0.0.1; pip"):
            wb.prepare_notebook(*extras)
    monkeypatch.setattr(distribution, "version_of", lambda name: None if name == package else "99999")
    line = f"pip install 'rl-workbench[{extras[0]}]'" if extras else "pip install rl-workbench"
    with pytest.raises(PackageMissing) as error:
        wb.prepare_notebook(*extras)
    assert str(error.value) == f"this notebook; expected the package {package}; {line}"


def test_an_old_version_is_named_where_its_import_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    import httpx

    with pytest.raises(AttributeError), distribution.optional("judges", "a judge"):
        httpx.no_such_name
    outdated(monkeypatch, "httpx")
    with pytest.raises(PackageMissing, match=r"httpx>=.*found httpx 0.0.1"), distribution.optional("judges", "a judge"):
        httpx.no_such_name


def test_each_package_of_users_has_a_line_of_what_is_lost_without_it() -> None:
    names = {*PACKAGES, *(one.name for one in required())} - set(NEEDED)
    assert {name.replace("_", "-") for name in names} == {name.replace("_", "-") for name in LOST}


def test_the_installed_distribution_and_the_checkout_list_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [*required(), *(one for extra in OF_USERS for one in required(extra))]
    metadata = [str(one) for one in required()]
    metadata += [f'{one}; extra == "{extra}"' for extra in OF_USERS for one in required(extra)]
    monkeypatch.setattr(distribution.metadata, "requires", lambda name: metadata)
    monkeypatch.setattr(Path, "is_file", lambda path: False)
    installed = [*required.__wrapped__(), *(one for extra in OF_USERS for one in required.__wrapped__(extra))]
    assert [(one.name, one.specifier) for one in installed] == [(one.name, one.specifier) for one in lines]


def test_without_ipykernel_a_job_names_the_extra_that_brings_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    from jupyter_client.kernelspec import KernelSpecManager, NoSuchKernel

    from workbench.jobs import runner

    def none(manager: KernelSpecManager, name: str) -> None:
        raise NoSuchKernel(name)

    monkeypatch.setattr(KernelSpecManager, "get_kernel_spec", none)
    monkeypatch.setattr(runner, "version_of", lambda name: None if name == "ipykernel" else "1")
    with pytest.raises(SettingError, match=r"kernel 'python3'.*; pip install 'rl-workbench\[jobs\]'"):
        runner.kernel_of(ROOT / "notebooks" / "101_one_step.ipynb", None)
