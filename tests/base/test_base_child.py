"""The one machine for child processes: whole messages, deadlines that end a child with all that it started, and no orphans."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.patience import LONG, patience, within

from workbench.base import child as module
from workbench.base.child import Child, Parent, Questions, Stuck, importing

ROOT = Path(__file__).parents[2]
MAIN = """
import os, re, subprocess, sys, time

def main(parent):
    while True:
        asked = bytes(parent.frames.get())
        if asked == b"modules":
            parent.send(" ".join(sys.modules).encode())
        elif asked in (b"leave", b"hang"):
            sleeper = [sys.executable, "-c", "import time; time.sleep(600)"]
            pids = [subprocess.Popen(sleeper, start_new_session=apart).pid for apart in (False, True)]
            parent.send(" ".join(map(str, pids)).encode())
            if asked == b"leave":
                print("last words", flush=True)
                os._exit(3)
            re.match("(a+)+$", "a" * 60 + "b")  # no other thread runs
        else:
            parent.send(asked)
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "echo.py"
    path.write_text(MAIN)
    return path


@pytest.fixture
def child(file: Path, tmp_path: Path) -> Iterator[Child]:
    made = Child(file, env=importing(os.environ), folder=tmp_path)
    yield made
    made.close()


def gone(pid: int) -> bool:
    """Whether a process has ended; one that nobody has waited for has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_messages_of_any_size_come_whole_and_in_order(child: Child) -> None:
    for body in (b"", b"x", os.urandom(3 << 20)):
        assert child.exchange(body, LONG) == body
    bodies = [bytes([number]) * number * 1000 for number in range(1, 40)]
    threading.Thread(target=child.line.send, args=bodies).start()
    assert [child.line.receive(LONG) for _ in bodies] == bodies


def test_a_child_starts_with_the_standard_library_alone(child: Child) -> None:
    names = child.exchange(b"modules", LONG).decode().split()
    assert not {name.split(".")[0] for name in names} & {"workbench", "torch", "numpy", "cloudpickle"}


@pytest.mark.slow
def test_past_its_deadline_a_child_is_ended_with_all_that_it_started(child: Child) -> None:
    grandchildren = [int(pid) for pid in child.exchange(b"hang", LONG).split()]
    with pytest.raises(TimeoutError):
        child.exchange(b"x", 0.5)
    assert not child.alive
    assert gone(child.pid) and all(map(gone, grandchildren))
    with pytest.raises(OSError, match="gone|closed"):
        child.exchange(b"x", 1)


@pytest.mark.slow
def test_a_stopped_child_does_not_hold_who_sends_to_it(child: Child) -> None:
    os.kill(child.pid, signal.SIGSTOP)
    with pytest.raises(TimeoutError):
        child.exchange(bytes(10 << 20), 0.5)
    assert gone(child.pid)


@pytest.mark.slow
def test_how_it_ended_is_said_in_words_with_the_end_of_its_log(child: Child, file: Path) -> None:
    grandchildren = [int(pid) for pid in child.exchange(b"leave", LONG).split()]
    with pytest.raises(ConnectionError):
        child.exchange(None, LONG)
    assert child.how() == "exit code 3" and child.tail() == "last words"
    assert all(map(gone, grandchildren)), "what it left behind"
    child.close()
    other = Child(file, env=importing(os.environ))
    assert other.alive and other.how(0) == "" and other.tail() == ""
    os.kill(other.pid, signal.SIGKILL)
    assert other.how(LONG) == "SIGKILL" and not other.alive
    other.close()


def test_a_child_ends_with_the_object_that_holds_it(file: Path) -> None:
    made = Child(file, env=importing(os.environ))
    assert made.exchange(b"x", LONG) == b"x"
    pid = made.pid
    del made
    assert gone(pid)


def test_a_child_outlives_the_thread_that_started_it_and_not_its_keeper(file: Path) -> None:
    """A parent-death signal of the kernel's comes when a thread ends; only the keeper, which has one, is asked for it."""
    made: list[Child] = []
    thread = threading.Thread(target=lambda: made.append(Child(file, env=importing(os.environ))))
    thread.start()
    thread.join()
    (child,) = made
    assert child.exchange(b"x", LONG) == b"x" and child.alive and child.pid != child.process.pid
    os.kill(child.process.pid, signal.SIGKILL)
    assert within(lambda: gone(child.pid))
    child.close()


def test_what_a_child_prints_is_heard_while_its_parent_waits(file: Path) -> None:
    heard = bytearray()
    child = Child(file, env=importing(os.environ), output=heard.extend)
    child.exchange(b"leave", LONG)
    with pytest.raises(ConnectionError):
        child.exchange(None, LONG)
    assert heard == b"last words\n"


PARENT = """
import os, sys, time
from pathlib import Path
from workbench.base.child import Child, importing
folder = Path(sys.argv[2])
folder.mkdir()
child = Child(sys.argv[1], env=importing(os.environ), folder=folder)
print(child.pid, bytes(child.exchange(b"hang", 600)).decode(), flush=True)
time.sleep(3600)
"""


@pytest.mark.slow
def test_nothing_is_left_of_a_child_whose_parent_was_killed(file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", PARENT, str(file), str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as parent:
        assert parent.stdout
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 3 and folder.is_dir()
        parent.kill()
    assert within(lambda: all(map(gone, pids)) and not folder.exists())


ENDS = """
import os, shutil, sys, weakref
from pathlib import Path
from workbench.base.child import Child, importing

class Group: ...

def end(children, folder):
    for child in children:
        child.close()
    shutil.rmtree(folder)

group, children = Group(), []
os.mkdir(sys.argv[2])
weakref.finalize(group, end, children, sys.argv[2])
children.append(Child(sys.argv[1], env=importing(os.environ), folder=Path(sys.argv[2])))
"""


def test_what_has_a_child_can_close_it_at_the_interpreters_end(file: Path, tmp_path: Path) -> None:
    """The child's own finalizer runs before: it is the younger one."""
    folder = tmp_path / "folder"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", ENDS, str(file), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=LONG, check=True)
    assert done.stderr == "" and not folder.exists()


def test_questions_are_answered_failed_or_given_up_once() -> None:
    questions = Questions()
    (first, one), (second, two), (third, three) = (questions.open() for _ in range(3))
    assert questions.numbers() == {first, second, third}
    questions.answer(first, "yes")
    questions.answer(first, "again")
    assert one.result(0) == "yes"
    two.cancel()
    assert questions.given_up() == [second] and questions.given_up() == []
    error = ValueError("no")
    questions.fail(error, questions.numbers() | {first, second})
    assert three.exception(0) is not error and str(three.exception(0)) == "no" and not questions.numbers()


STARTS = {
    "works": "while time.process_time() < 1.5: pass",
    "has others work": "subprocess.run([sys.executable, '-c', 'while __import__(\"time\").process_time() < 1.5: pass'])",
    "sleeps": "time.sleep(600)",
    "turns for ever": "while True: pass",
    "dies": "sys.exit('no room for a child')",
}


def start(tmp_path: Path, way: str) -> Child:
    file = tmp_path / "starts.py"
    file.write_text(f"import subprocess, sys, time\ndef main(parent):\n    {STARTS[way]}\n    parent.send(b'ready')\n")
    return Child(file, env=importing(os.environ), output=lambda block: None)


@pytest.mark.parametrize("way", ["works", "has others work"])
def test_a_child_that_works_is_waited_for_however_long_it_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str, cold: None
) -> None:
    monkeypatch.setattr(module, "IDLE_SECONDS", patience(0.6))  # a busy machine gives it a moment in so long
    child = start(tmp_path, way)
    assert child.started() == b"ready"
    child.close()


def test_a_child_that_does_nothing_or_never_ends_its_start_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cold: None
) -> None:
    monkeypatch.setattr(module, "IDLE_SECONDS", 1.5)
    for way, seconds, why in (
        ("sleeps", LONG, "used no CPU time for 1.5 s"),
        ("turns for ever", 1.0, "not ready after 1 s"),
    ):
        child = start(tmp_path, way)
        with pytest.raises(Stuck, match=why):
            child.started(seconds)
        assert not child.alive


def test_a_child_that_dies_at_its_start_says_how_and_its_last_line(tmp_path: Path, cold: None) -> None:
    with pytest.raises(ConnectionError, match="ended with exit code 1; it said: no room for a child"):
        start(tmp_path, "dies").started()


@pytest.mark.parametrize("allowed", [resource.RLIM_INFINITY, 10**12])
def test_a_limit_is_set_as_far_as_it_is_allowed(allowed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (allowed, allowed))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, pair: limits.append(pair))
    Parent.limit(resource.RLIMIT_AS, 10**15)
    size = 10**15 if allowed == resource.RLIM_INFINITY else allowed
    assert limits == [(size, size)]

    def refused(kind: int, pair: tuple[int, int]) -> None:
        raise ValueError("current limit exceeds maximum limit")

    monkeypatch.setattr(resource, "setrlimit", refused)
    Parent.limit(resource.RLIMIT_AS, 10**15)
