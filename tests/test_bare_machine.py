"""A machine with torch, transformers and what these need, and nothing else: a checkout steps there, and runs its GPU tests.

Such is a rented GPU before anything is installed: no ray, vllm, papermill, jupyter, pandas, pyarrow, pytest.
"""

from __future__ import annotations

import os
import subprocess
import venv
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
ABSENT = (
    "ray", "vllm", "papermill", "nbclient", "ipywidgets", "anywidget", "jupyterlab", "ipykernel", "IPython", "matplotlib", "tensorboard",
    "pandas", "pyarrow", "tensordict", "cloudpickle", "psutil", "httpx", "peft", "pytest", "hypothesis",
)  # fmt: skip
STEPS = """
import sys
from importlib.util import find_spec
import workbench as wb
from workbench.jobs import machine
print([name for name in sys.argv[1:] if find_spec(name)])
print(machine.packages().state, [machine.step().state, machine.push().state, machine.saves().state])
"""


def linked(site: Path, *packages: str) -> None:
    """Link distributions of this interpreter, and those that they require, into another's site-packages."""
    seen: set[str] = set()
    waiting = list(packages)
    while waiting:
        name = waiting.pop().lower().replace("_", "-")
        try:
            found = distribution(name)
        except PackageNotFoundError:  # required on another platform alone
            continue
        if name in seen:
            continue
        seen.add(name)
        for top in {one.parts[0] for one in found.files or () if one.parts[0] not in ("..", "__pycache__")}:
            if not (site / top).exists():
                (site / top).symlink_to(Path(str(found.locate_file(top))))
        needs = [Requirement(one) for one in found.requires or ()]
        waiting += [one.name for one in needs if one.marker is None or one.marker.evaluate({"extra": ""})]


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Python of an environment without packages but torch's and transformers' own."""
    home = tmp_path_factory.mktemp("bare")
    venv.create(home, with_pip=False, symlinks=True)
    linked(next(home.glob("lib/python*/site-packages")), "torch", "transformers")
    return home / "bin" / "python"


def said(python: Path, *arguments: str) -> str:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([str(python), *arguments], cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_checkout_imports_and_steps_with_torch_and_transformers_alone(bare: Path) -> None:
    assert said(bare, "-c", STEPS, *ABSENT).splitlines() == ["[]", "warning ['ok', 'ok', 'ok']"]


@pytest.mark.slow
def test_its_gpu_tests_run_without_pytest(bare: Path) -> None:
    lines = said(bare, "tests/gpu/run.py", "same_work").splitlines()
    assert [line.split(" (")[0].rpartition("::")[2] for line in lines] == [
        "test_the_local_engine_and_the_plain_loop_do_the_same_work[0] passed",
        "test_the_local_engine_and_the_plain_loop_do_the_same_work[4] skipped: No module named 'peft'",
    ]
