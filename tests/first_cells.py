"""A program of `test_wheel.py`: cells of notebooks, each in an empty folder of its own and with the extras alone that it names.

Each notebook is a fork of this process, with a finder that refuses the packages of all other extras. Its cells run twice.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path

import torch  # noqa: F401
from absent_packages import MODULES, Without


def times() -> dict[Path, int]:
    """When each file and folder here was last changed."""
    return {path: path.stat().st_ctime_ns for path in Path().rglob("*")}


def main() -> None:
    source, packages = Path(sys.argv[1]), json.loads(sys.argv[2])
    for name, (code, extras) in json.loads(source.read_text()).items():
        folder = source.parent / name
        folder.mkdir()
        if not (child := os.fork()):
            os.chdir(folder)
            refused = {MODULES.get(one, one) for one, extra in packages.items() if extra not in extras}
            sys.meta_path[:] = [Without(refused)]
            try:
                exec(code, {"__name__": "__main__"})  # noqa: S102 - the repository's own cells
                before = times()
                exec(code, {"__name__": "__main__"})  # noqa: S102 - the repository's own cells
                print(f"\n{name} {'ok' if times() == before else 'changed the second time'}", flush=True)
            except BaseException:  # noqa: BLE001 - the test reads it
                print(f"\n{name} {traceback.format_exc()[-1500:]!r}", flush=True)
            os._exit(0)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
