"""A fork of the warm server is, to whoever started it, the process that was asked for; and where no server answers it is one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from execnet.gateway_io import popen_bootstrapline
from support import warm_starts
from support.patience import within

from workbench.base.child import Child

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(os.environ.get("WORKBENCH_TESTS_COLD")), reason="every process is an ordinary one"),
]
CHILD = "# runpy.run_path(sys.argv[1])['_serve']\n"
"""What makes the words of a command those of a child of ours."""


CHILD_FILE = """
import os, sys

def main(parent):
    parent.send(f"{'torch' in sys.modules} {os.getppid()} {os.getpgid(0) == os.getpid()}".encode())
"""
"""A program of `workbench.base.child`; where it stands under a name of `CHILDREN` it begins warm."""


def words(code: str) -> list[str]:
    return [sys.executable, "-c", CHILD + code, "child.py", "3", "4", "processes.py"]


def run(code: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words(code), capture_output=True, text=True, check=False, **options)


def test_it_is_a_process_of_its_own_with_what_it_was_given(tmp_path: Path) -> None:
    done = run(
        "import os, sys; print(os.getpid(), os.getppid(), 'torch' in sys.modules, sys.argv[1:], os.getcwd(), os.environ['A'], sys.stdin.read())",
        cwd=tmp_path, env={**os.environ, "A": "b"}, input="said",
    )  # fmt: skip
    pid, parent, warm, *rest = done.stdout.split()
    assert (int(parent), warm) == (os.getpid(), "True") and int(pid) not in (0, os.getpid()), done
    assert rest == ["['child.py',", "'3',", "'4',", "'processes.py']", str(tmp_path), "b", "said"]


@pytest.mark.parametrize(
    ("code", "status", "said"),
    [
        ("import sys; sys.exit(143)", 143, ""),
        ("import sys; sys.exit('no')", 1, "no\n"),
        ("1/0", 1, "ZeroDivisionError"),
        ("raise KeyboardInterrupt", -signal.SIGINT, "KeyboardInterrupt"),
        ("import os; os.kill(os.getpid(), 9)", -signal.SIGKILL, ""),
    ],
)
def test_its_end_is_told(code: str, status: int, said: str) -> None:
    done = run(code)
    assert done.returncode == status and said in done.stderr and "warm_starts" not in done.stderr


def test_what_is_to_be_done_at_the_end_is_done() -> None:
    code = "import atexit, threading; atexit.register(print, 'bye'); threading.Timer(0.1, print, ['thread']).start()"
    assert run(code).stdout == "thread\nbye\n"


def test_it_can_be_signalled_waited_for_and_given_up() -> None:
    sleeps = "import time; time.sleep(3600)"
    one = subprocess.Popen(words(sleeps), start_new_session=True)
    assert one.poll() is None and os.getpgid(one.pid) == one.pid
    os.killpg(one.pid, signal.SIGKILL)
    assert one.wait() == -signal.SIGKILL
    with pytest.raises(subprocess.TimeoutExpired):
        run(sleeps, timeout=0.2)


def test_a_tests_own_program_begins_warm_where_its_first_line_says_so() -> None:
    code = "import sys; print('torch' in sys.modules); sys.exit(3)"
    for first, warm in ((warm_starts.WARM, "True\n"), ("", "False\n")):
        with subprocess.Popen([sys.executable, "-c", first + code], stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None and process.stdout.read() == warm
            assert within(lambda process=process: process.poll() is not None) and process.returncode == 3


def test_a_worker_that_runs_tests_begins_warm() -> None:
    command = [sys.executable, "-u", "-c", popen_bootstrapline]
    assert warm_starts.server_for(command, dict(os.environ)) == "main"


def test_without_a_server_and_for_other_programs_it_is_an_ordinary_process(cold: None) -> None:
    assert "torch" not in run("import sys; print(*sys.modules)").stdout.split()


@pytest.mark.parametrize(
    ("name", "limit", "warm"),
    [("worker.py", "", True), ("worker.py", "6000", True), ("worker.py", "512", False), ("other.py", "", False)],
)
def test_our_children_begin_warm_below_a_keeper_unless_their_memory_is_small(
    name: str, limit: str, warm: bool, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(CHILD_FILE)
    env = {**os.environ, **({"WORKBENCH_WORKER_MEMORY_MB": limit} if limit else {})}
    child = Child(tmp_path / name, env=env, folder=tmp_path)
    try:
        answer = child.started().decode().split()
        assert answer == [str(warm), str(child.process.pid), "True"]
        assert child.pid not in (0, child.process.pid)
    finally:
        child.close()


def test_it_ends_with_its_server() -> None:
    before = os.environ.get(warm_starts.WHERE)
    servers = warm_starts.Servers((("main", ("torch",), {}),))
    try:
        one = subprocess.Popen(words("import time; time.sleep(3600)"))
        assert one.poll() is None
    finally:
        servers.close()
        if before is not None:
            os.environ[warm_starts.WHERE] = before
    assert one.wait() == -signal.SIGKILL
