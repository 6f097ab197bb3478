"""TRL beside this repository's own environment: the few packages that are missing, in a git-ignored folder.

    .venv/bin/python tests/benchmarks/trl_env.py     # prints the folder

pip resolves TRL with every installed version held fixed, so torch and transformers are the ones already here; what it would
add goes into `build/trl`, which a benchmark's process puts behind its own packages on `sys.path`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "build" / "trl"
WANTED = "trl==1.16.*"
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")


class Unavailable(Exception):
    """TRL's environment cannot be made here; the message says why."""


def folder() -> Path:
    """The folder with TRL, made if it is not there yet. Raises `Unavailable` where pip cannot find or place it."""
    ready = FOLDER / ".ready"
    if ready.is_file() and ready.read_text() == WANTED:
        return FOLDER
    with tempfile.TemporaryDirectory() as scratch:
        held, report = Path(scratch, "held.txt"), Path(scratch, "report.json")
        held.write_text(_pip("list", "--format=freeze", "--exclude-editable"))
        _pip("install", "--dry-run", "--report", str(report), "--constraint", str(held), WANTED)
        missing = [one["metadata"] for one in json.loads(report.read_text())["install"]]
    pinned = [f"{one['name']}=={one['version']}" for one in missing]
    _pip("install", "--no-deps", "--upgrade", "--target", str(FOLDER), *pinned)
    ready.write_text(WANTED)
    return FOLDER


def _pip(*arguments: str) -> str:
    done = subprocess.run([*PIP, *arguments], capture_output=True, text=True)
    if done.returncode:
        reason = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()
        raise Unavailable(f"pip {arguments[0]}: {reason[0] if reason else f'exit code {done.returncode}'}")
    return done.stdout


if __name__ == "__main__":
    try:
        print(folder())
    except Unavailable as why:
        sys.exit(f"TRL is not available: {why}")
