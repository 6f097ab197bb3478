"""Run the tests of this folder without pytest and without an installation: `PYTHONPATH=. python tests/gpu/run.py [WORD]`.

Needed are torch and transformers alone. What the tests use of pytest stands here: marks, `approx`, `importorskip`, `tmp_path`.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import math
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

HERE = Path(__file__).parent


class Skipped(Exception):
    """A test that cannot run here, and why."""


class Mark:
    """`pytest.mark.NAME(…)`, which decorates a function or stands in a module's `pytestmark`."""

    def __init__(self, name: str, *given: Any, **named: Any) -> None:
        self.name, self.given, self.named = name, given, named

    def __call__(self, *given: Any, **named: Any) -> Any:
        if len(given) == 1 and inspect.isfunction(given[0]) and not named:
            given[0].__dict__.setdefault("marks", []).append(self)
            return given[0]
        return Mark(self.name, *given, **named)


class Marks:
    """`pytest.mark`."""

    def __getattr__(self, name: str) -> Mark:
        return Mark(name)


class Approx:
    """`pytest.approx` of a number."""

    def __init__(self, value: float, rel: float = 1e-6, abs: float = 1e-12) -> None:
        self.value, self.rel, self.abs = value, rel, abs

    def __eq__(self, other: object) -> bool:
        return math.isclose(float(other), self.value, rel_tol=self.rel, abs_tol=self.abs)  # type: ignore[arg-type]

    __hash__ = None  # type: ignore[assignment]


def importorskip(name: str) -> Any:
    """A module, or the test is skipped."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise Skipped(str(error)) from error


def cases(test: Callable[..., Any]) -> Iterator[dict[str, Any]]:
    """Arguments of each case of a parametrized test."""
    tables = [mark.given for mark in getattr(test, "marks", ()) if mark.name == "parametrize"]
    for values in itertools.product(*(table[1] for table in tables)):
        yield {table[0]: value for table, value in zip(tables, values, strict=True)}


def one(test: Callable[..., Any], marks: list[Mark], given: dict[str, Any]) -> str:
    """Run a case; how it ended."""
    for mark in (*marks, *getattr(test, "marks", ())):
        if mark.name == "skipif" and mark.given[0]:
            return f"skipped: {mark.named['reason']}"
    with tempfile.TemporaryDirectory() as folder:
        wanted = {"tmp_path": Path(folder)} if "tmp_path" in inspect.signature(test).parameters else {}
        try:
            test(**given, **wanted)
        except Skipped as why:
            return f"skipped: {why}"
        except Exception:  # noqa: BLE001 - a test that failed
            traceback.print_exc()
            return "FAILED"
    return "passed"


def main() -> int:
    """1 where a test failed."""
    os.chdir(HERE.parents[1])
    sys.modules["pytest"] = SimpleNamespace(mark=Marks(), approx=Approx, importorskip=importorskip)  # type: ignore[assignment]
    sys.path[:0] = [str(HERE), str(HERE.parent)]  # and the tests' support
    word, failed = sys.argv[1] if len(sys.argv) > 1 else "", 0
    for path in sorted(HERE.glob("test_*.py")):
        module = importlib.import_module(path.stem)
        for name, test in vars(module).items():
            if not name.startswith("test_") or word not in name:
                continue
            for given in cases(test):
                began = time.monotonic()
                ended = one(test, module.pytestmark, given)
                failed += ended == "FAILED"
                shown = f"[{', '.join(map(str, given.values()))}]" if given else ""
                print(f"{path.name}::{name}{shown} {ended} ({time.monotonic() - began:.1f} s)", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
