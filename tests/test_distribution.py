"""The distribution: what works with the core alone, what each absent package costs, and what else is called `workbench`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from tests_patience import LONG

from workbench.base.distribution import DISTRIBUTION

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
