"""TRL beside this environment, where its folder is ready (`tests/benchmarks/trl_env.py` makes it); else its tests skip."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(os.environ.get("WORKBENCH_TRL", Path(__file__).parents[2] / "build" / "trl"))


def trl_module(name: str) -> Any:
    """A module of TRL 1.16."""
    if not (FOLDER / ".ready").is_file():
        pytest.skip("TRL is not installed here: tests/benchmarks/trl_env.py")
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
    # a warning of TRL's own class ends pytest-xdist, whose controller lacks TRL
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    try:
        return importlib.import_module(name)
    except ImportError as why:
        pytest.skip(f"TRL cannot be imported: {why}")
