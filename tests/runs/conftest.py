"""Tiny notebooks for the tests of jobs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

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
