"""Shared by all tests: tiny notebooks, one torch thread, no hub, the repository's root as the folder that paths start from."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# the machine is noisy, so no property has a deadline; CI draws the same examples every time
settings.register_profile("house", deadline=None, derandomize=bool(os.environ.get("CI")))
settings.load_profile("house")

ROOT = Path(__file__).parents[1]
if worker := os.environ.get("PYTEST_XDIST_WORKER"):  # what one worker leaves in the temporary folder is not another's
    os.environ["TMPDIR"] = str(Path(tempfile.gettempdir()) / worker)
    Path(os.environ["TMPDIR"]).mkdir(exist_ok=True)
    tempfile.tempdir = None


LONG = ("test_front_door.py", "test_notebooks.py", "test_learning.py", "test_faults_runs.py")
"""Files of minutes: with two workers whole files are dealt out, and a long one at the end leaves the other worker idle."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first; otherwise in the folders' order."""
    items.sort(key=lambda item: item.path.name not in LONG)


@pytest.fixture(autouse=True)
def at_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.fixture(autouse=True)
def gradients_stay_on() -> Iterator[None]:
    """What leaves them off would fail tests of other files, far from its cause."""
    import torch

    yield
    on = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    torch.set_grad_enabled(True)
    assert on, "gradients were left off"


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny() -> str:
    return str(ROOT / "data" / "tiny-arith")


PARAMETERS = """from typing import Optional
run: str = "unset"  # run folder
lr: float = 1e-3  # learning rate
steps: int = 3
on: bool = True
name: Optional[str] = None
sizes: list[int] = [1, 2]"""

MakeNotebook = Callable[..., Path]


@pytest.fixture
def make_notebook(tmp_path: Path) -> MakeNotebook:
    """Writes a notebook of code cells; the first is the parameters cell, unless `parameters=None`."""

    def make(*cells: str, parameters: str | None = PARAMETERS, name: str = "n.ipynb") -> Path:
        sources = [(source, []) for source in cells]
        if parameters is not None:
            sources.insert(0, (parameters, ["parameters"]))
        made: list[dict[str, Any]] = [
            {"cell_type": "code", "id": f"c{n}", "metadata": {"tags": tags}, "execution_count": None, "outputs": [], "source": source}
            for n, (source, tags) in enumerate(sources)
        ]  # fmt: skip
        spec = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
        path = tmp_path / name
        path.write_text(json.dumps({"cells": made, "metadata": spec, "nbformat": 4, "nbformat_minor": 5}))
        return path

    return make
