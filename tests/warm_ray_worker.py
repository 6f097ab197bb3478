"""What a raylet runs where it would run Ray's setup_worker.py: it asks the warm server for the worker, and ends as that ends.

Ray knows the worker by the process id that the worker itself says; this process only holds the raylet's place for it. Ray itself
is imported in the worker: what it reads of the environment (a cluster's token) it reads then. The worker has a process group of its
own, since a raylet kills the group of a worker that ends.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from support.warm_starts import WHERE, ask, exit_code

CONTEXT, LANGUAGE = "--serialized-runtime-env-context=", "--language="


def main() -> None:
    """Be the worker's parent; where anything is out of the ordinary, be Ray's own program."""
    given = {mark: "" for mark in (CONTEXT, LANGUAGE)}
    rest = []
    for word in sys.argv[1:]:
        mark = next((one for one in given if word.startswith(one)), None)
        if mark is None:
            rest.append(word)
        else:
            given[mark] = word.removeprefix(mark)
    context = json.loads(given[CONTEXT] or "{}")
    variables = context.get("env_vars") or {}
    plain = context.get("py_executable") in (None, sys.executable) and not context.get("command_prefix")
    folder = os.environ.get(WHERE)
    if folder and plain and given[LANGUAGE] == "PYTHON" and not any("$" in value for value in variables.values()):
        asked = {
            "arguments": rest, "env": {**os.environ, **variables}, "cwd": os.getcwd(), "session": True, "places": [0, 1, 2],
            "parent": os.getppid(),
        }  # fmt: skip
        found = ask(Path(folder) / "main", asked, [0, 1, 2])
        if found is not None:
            sys.exit(exit_code(found[1]) & 0xFF)
    real = next(Path(word).with_name("setup_worker.py") for word in rest if word.endswith("default_worker.py"))
    os.execv(sys.executable, [sys.executable, str(real), *sys.argv[1:]])


if __name__ == "__main__":
    main()
