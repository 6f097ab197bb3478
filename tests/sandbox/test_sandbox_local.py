"""The local sandbox: the contract in each tier that this machine has, limits that are named, and nothing left behind."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.patience import patience, within

from workbench.base import runtime
from workbench.base.errors import SandboxError, SettingError
from workbench.sandbox import LocalSandbox, Program, answer, memory, tiers
from workbench.sandbox.process import ProcessLimits, contained
from workbench.sandbox.protocol import ProcessOutcome, status_of

EXCHANGES = Path(__file__).parents[3] / "shared" / "data" / "sandbox_fusion" / "exchanges.jsonl"


def possible(tier: str) -> bool:
    try:
        LocalSandbox(tier=tier)
    except SandboxError:
        return False
    return True


@pytest.fixture(scope="module", params=tiers.TIERS)
def box(request: pytest.FixtureRequest) -> LocalSandbox:
    if not possible(request.param):
        pytest.skip(f"{request.param} does not pass its probe on this machine")
    return LocalSandbox(tier=request.param, memory_limit_mb=512)


@pytest.fixture(params=tiers.TIERS)
def tier(request: pytest.FixtureRequest) -> str:
    if not possible(request.param):
        pytest.skip(f"{request.param} does not pass its probe on this machine")
    return str(request.param)


SEES_HOME = """
import os, sys
for home in ("/root", "/home"):
    for at, _, names in os.walk(home):
        for name in names:
            path = os.path.join(at, name)
            if "/lib/python3." not in path and "/libpython3." not in path: print(path)
"""
"""A program that prints files of homes that are no part of a Python."""


@pytest.fixture
def clean() -> Any:
    """No process, no folder and no control group may be left by what a test ran."""
    before = set(Path(tempfile.gettempdir()).glob("workbench-*"))
    yield
    assert within(lambda: not leftovers()), leftovers()
    # those of other sandboxes of the machine come and go
    assert within(lambda: set(Path(tempfile.gettempdir()).glob("workbench-box-*")) <= before)
    assert within(lambda: memory.place() is None or not list(memory.place().glob(f"workbench-{os.getpid()}-*")))


def leftovers() -> list[str]:
    """Processes of the sandbox's user, or that run a program's file, of this test worker or orphaned; another worker's are its own."""
    found, me = [], os.getpid()
    for process in psutil.process_iter(["uids", "cmdline"]):
        uids, command = process.info["uids"], process.info["cmdline"] or []
        if not command:  # a zombie: it has ended
            continue
        if (uids and uids.real == tiers.UID) or "main.py" in command[-1:]:
            with contextlib.suppress(psutil.NoSuchProcess):
                above = [one.pid for one in process.parents()]
                if me in above or not any(pid != me and "readline" in " ".join(_command(pid)) for pid in above):
                    found.append(" ".join(command))
    return found


def _command(pid: int) -> list[str]:
    try:
        return psutil.Process(pid).cmdline()
    except psutil.Error:
        return []


# --- the contract ------------------------------------------------------------------------------


@pytest.mark.slow
def test_input_output_files_and_errors(box: LocalSandbox, clean: None) -> None:
    assert box.run("print(int(input()) * 2)", stdin="21\n").stdout == "42\n"
    failed = box.run("import sys; print('x', file=sys.stderr); sys.exit(3)")
    assert failed.status == "Failed" and failed.run and failed.run.return_code == 3 and failed.run.stderr == "x\n"
    raised = box.run("raise ValueError('why')")
    assert raised.why == "error while running: ValueError: why" and raised.limit is None
    copied = box.run(
        "import helper; open('deep/out.txt', 'w').write(open('deep/in.txt').read().upper() + helper.WORD)",
        files={"deep/in.txt": b"abc", "helper.py": b"WORD = '!'"},
        fetch_files=("deep/out.txt", "missing.txt"),
    )
    assert copied.status == "Success" and dict(copied.files) == {"deep/out.txt": b"ABC!"}
    assert box.run("print(input())").why.startswith("error while running: EOFError")
    assert box.run("").status == "Success"


@pytest.mark.slow
def test_every_run_is_fresh_and_many_run_side_by_side_in_order(box: LocalSandbox, clean: None) -> None:
    box.run("open('left.txt', 'w').write('x'); import json; json.dumps = None; open('/tmp/left', 'w')")
    seen = box.run("import os, json; print(os.listdir('.'), os.listdir('/tmp'), json.dumps(1))")
    assert seen.stdout == "['main.py'] [] 1\n"
    results = box.run_many([Program(code=f"import time; time.sleep({0.1 - n / 100}); print({n})") for n in range(8)])
    assert [result.stdout for result in results] == [f"{n}\n" for n in range(8)]


@pytest.mark.slow
def test_languages(box: LocalSandbox) -> None:
    assert box.run("echo $((6*7))", language="bash").stdout == "42\n"
    if "cpp" not in box.languages:
        pytest.skip("no C++ compiler")
    program = "#include <iostream>\nint main(){int x;std::cin>>x;std::cout<<x+1;}"
    assert box.run(program, language="cpp", stdin="41").stdout == "42"
    wrong = box.run("int main(){return x;}", language="cpp")
    assert wrong.status == "Failed" and wrong.run is None and "x" in wrong.why and "compiling" in wrong.why
    assert box.run("1", language="rust").status == "SandboxError"
    with pytest.raises(SettingError, match="language"):
        Program(code="1", language="brainfuck")
    with pytest.raises(SettingError, match="max_concurrent; expected ≥ 1; found 0"):
        LocalSandbox(max_concurrent=0)


@pytest.mark.parametrize("python", [None, sys.executable])
def test_packages_are_shown_on_request_and_those_of_a_named_interpreter(tier: str, python: str | None) -> None:
    box = LocalSandbox(tier=tier, packages=None if python else True, python=python)
    assert box.run("import numpy; print(int(numpy.arange(5).sum()))").stdout == "10\n"
    assert box.run(SEES_HOME).stdout.strip() in ("", box.python)


def test_of_this_process_packages_a_program_sees_none_and_what_it_misses_is_known(tier: str) -> None:
    box = LocalSandbox(tier=tier)
    assert box.run("import torch").status == "Failed"
    words = "ModuleNotFoundError: No module named {!r}".format
    assert [box.hides(words(name)) for name in ("torch", "_tkinter", "foo_bar_baz", "__main__", "first_cells")] == [
        "torch",
        "",
        "",
        "",
        "",
    ]
    assert LocalSandbox(tier=tier, packages=False).hides(words("torch")) == ""


def test_the_systems_interpreter_stands_in_for_one_that_cannot_be_shown(
    monkeypatch: pytest.MonkeyPatch, tier: str
) -> None:
    failures = tiers.failures
    mine = tiers._parts(sys.executable)["base"]
    monkeypatch.setattr(tiers, "failures", lambda box, tier: ["no"] if box.python == mine else failures(box, tier))
    if mine == "/usr/bin/python3" or not Path("/usr/bin/python3").exists():
        pytest.skip("there is no other interpreter")
    assert LocalSandbox(tier=tier).run("import sys; print(sys.executable)").stdout == "/usr/bin/python3\n"


# --- limits ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "limit"),
    [
        ("while True: pass", "time"),
        ("import time; time.sleep(60)", "time"),
        ("x = bytearray(2 ** 30)", "memory"),
        ("import os\nfor _ in range(8):\n    if not os.fork():\n        x = b'x' * (300 << 20)\n        break\nimport time; time.sleep(3600)", "memory"),
        ("print('a' * 3_000_000)", "output"),
        ("import sys\nwhile True: sys.stderr.write('a' * 100_000)", "output"),
        ("open('big', 'wb').write(bytes(20 << 20))", "disk"),
        ("import time\nfor n in range(30): open(f'f{n}', 'wb').write(bytes(9 << 20))\ntime.sleep(3600)", "disk"),
        ("import os, time\nfiles = []\nfor n in range(12): files.append(open('f', 'wb', 0)); files[-1].write(bytes(9 << 20)); os.unlink('f')\ntime.sleep(3600)", "disk"),
        ("import mmap, os, time\nmaps = []\nfor n in range(12):\n    with open('f', 'wb+') as f: f.write(bytes(9 << 20)); f.flush(); maps.append(mmap.mmap(f.fileno(), 4096)); os.unlink('f')\ntime.sleep(3600)", "disk"),
        ("import os, time\nfor n in range(20_000): open(f'f{n}', 'w')\ntime.sleep(3600)", "disk"),
        ("import time\nfor n in range(6_000): open(f'{n}', 'w').close(); open(f'/tmp/{n}', 'w').close()\ntime.sleep(3600)", "disk"),
        ("import os\nwhile True:\n    try: os.fork()\n    except OSError: pass", "time"),
        ("x = 9 ** 9 ** 9", "time"),
    ],
)  # fmt: skip
@pytest.mark.slow
def test_what_goes_over_a_limit_is_ended_and_the_limit_named(
    box: LocalSandbox, clean: None, code: str, limit: str
) -> None:
    result = box.run(code, run_timeout=0.5 if limit == "time" else patience(10.0))
    assert result.limit == limit and limit in result.why
    assert result.status == ("Success" if limit == "output" and "3_000" in code else "Failed")
    assert len(result.stdout) <= 1 << 20


@pytest.mark.parametrize("code", [3, 152])
@pytest.mark.parametrize(
    "words", ["MemoryError", "terminate: std::bad_alloc", "File too large", "Cannot allocate memory"]
)
def test_a_limit_that_was_not_met_is_not_named_by_words_or_codes(box: LocalSandbox, words: str, code: int) -> None:
    result = box.run(f"import os; os.write(2, b'{words}\\n'); os._exit({code})")
    assert (result.limit, result.status, result.run and result.run.return_code) == (None, "Failed", code)
    assert result.run and result.run.status == "Finished"


def test_a_signals_code_comes_through_and_no_words_are_added(box: LocalSandbox) -> None:
    run = box.run("import os, signal; os.kill(os.getpid(), signal.SIGSEGV); os._exit(7)").run
    code = 7 if box.tier == "unsafe" else run and run.return_code
    assert run and code in (7, 139, -11) and run.stderr == ""


def test_a_program_beyond_a_limit_is_no_success_whatever_its_code() -> None:
    assert status_of(ProcessOutcome(status="Finished", return_code=0, limit="disk")) == "Failed"
    assert status_of(ProcessOutcome(status="Finished", return_code=0, limit="output")) == "Success"


@pytest.mark.slow
def test_output_is_cut_and_said_to_be_also_within_a_character(box: LocalSandbox) -> None:
    result = box.run("print('é' * 600_000)")
    assert result.truncated and set(result.stdout) == {"é"}
    assert box.run("import sys; sys.stdout.buffer.write(b'\\xff ok')").stdout.startswith("[DecodeError]")


@pytest.mark.slow
def test_a_program_that_closes_or_ignores_its_pipes(box: LocalSandbox, clean: None) -> None:
    closed = box.run(
        "import os; os.close(0); os.close(1); os.close(2); import time; time.sleep(0.2)", stdin="x" * 300_000
    )
    assert closed.status == "Success"
    echoed = box.run("import sys; d = sys.stdin.read(); print(len(d))", stdin="y" * 3_000_000)
    assert echoed.stdout == "3000000\n"


@pytest.mark.slow
def test_folders_that_resist_are_removed(box: LocalSandbox, clean: None) -> None:
    assert box.run("import os\nfor _ in range(900): os.mkdir('d'); os.chdir('d')").status == "Success"
    assert box.run("import os; os.mkdir('shut'); open('shut/f', 'w'); os.chmod('shut', 0)").status == "Success"


# --- getting out -------------------------------------------------------------------------------

ESCAPES = {
    "reads a file of the host": "print(open({secret!r}).read())",
    "reads home and ssh": "import os, pathlib\nprint([str(p) for h in ('/root', '/home') for p in pathlib.Path(h).rglob('*')])",
    "reads its starter's environment": "print(open('/proc/1/environ').read()); import os; print(os.environ); os.kill(1, 0)\nprint(open(f'/proc/{{os.getppid()}}/environ').read())",
    "reaches the network": "import socket; s = socket.create_connection(('127.0.0.1', {port}), 2); print('CANARY', s)",
    "reaches a name": "import socket; socket.setdefaulttimeout(2); print('CANARY', socket.gethostbyname('localhost.localdomain'), socket.create_connection(('10.0.0.1', 80)))",
    "writes to the system": "open('/usr/lib/escaped', 'w'); print('CANARY')",
    "fetches through a link": "import os; os.symlink({secret!r}, 'out.txt')",
    "fetches through a folder link": "import os; os.symlink(os.path.dirname({secret!r}), 'd')",
    "becomes root": "import os; os.setuid(0); print('CANARY', os.getuid(), open('/etc/shadow').read())",
    "mounts": "import ctypes; l = ctypes.CDLL(None); print('CANARY') if l.mount(b'x', b'/box', b'tmpfs', 0, None) == 0 else exit(1)",
    "makes a namespace": "import ctypes; l = ctypes.CDLL(None); print('CANARY') if l.unshare(0x10000000) == 0 else exit(1)",
    "kills its parent": "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\nos.killpg(0, signal.SIGKILL)",
    "kills everything": "import os, signal\nos.kill(-1, signal.SIGKILL)",
    "raises its limits": "import resource; resource.setrlimit(resource.RLIMIT_NPROC, (10**6, 10**6)); print('CANARY')",
    "changes the kernel's settings": "import os\nfor folder, _, names in os.walk('/proc/sys'):\n    for name in names:\n        if os.access(f'{{folder}}/{{name}}', os.W_OK): print('CANARY', folder, name)",
    "writes beside its folders": "import os\nfor folder in ('/', '/dev', '/usr', '/proc', '/sys', '/run', '/var/tmp'):\n    if os.access(folder, os.W_OK): print('CANARY', folder)",
    "opens a terminal": "import os, fcntl; fcntl.ioctl(os.openpty()[1], 0x5412, b'x'); print('CANARY')",
    "takes more priority": "import os; os.setpriority(os.PRIO_PROCESS, 0, -1); print('CANARY')",
    "plans in real time": "import os; os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1)); print('CANARY')",
    "sets the clock": "import time; time.clock_settime(time.CLOCK_REALTIME, time.time()); print('CANARY')",
    "sees other processes": "import os\nmine = [p for p in os.listdir('/proc') if p.isdigit()]\nprint('CANARY') if len(mine) > 3 else None",
}


@pytest.mark.parametrize("name", ESCAPES)
def test_no_way_out(box: LocalSandbox, clean: None, tmp_path: Path, name: str) -> None:
    import socket

    tmp_path.chmod(0o755)
    secret = tmp_path / "secret.txt"
    secret.write_text("CANARY")
    os.environ["WORKBENCH_TEST_SECRET"] = "CANARY"
    with socket.create_server(("127.0.0.1", 0)) as server:
        code = ESCAPES[name].format(secret=str(secret), port=server.getsockname()[1])
        result = box.run(code, run_timeout=5.0, fetch_files=("out.txt", "d/secret.txt"))
    del os.environ["WORKBENCH_TEST_SECRET"]
    assert "CANARY" not in result.stdout and not result.files, result
    assert not Path("/usr/lib/escaped").exists()


DAEMON = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for n in range(36_000):
            open('beat', 'w').write(str(n)); time.sleep(0.1)
    os._exit(0)
print('gone')
"""


def test_a_daemon_with_a_session_of_its_own_ends_with_its_program(box: LocalSandbox, clean: None) -> None:
    result = box.run(DAEMON)
    assert result.stdout == "gone\n" and result.run and result.limit is None


@pytest.mark.slow
def test_cancelling_ends_the_program(box: LocalSandbox, clean: None) -> None:
    import asyncio

    async def cancelled() -> None:
        task = asyncio.ensure_future(box.execute(Program(code="import time; time.sleep(3600)", run_timeout=3600)))
        await asyncio.sleep(0.5)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    runtime.run(cancelled())


KILLED = """# warm
import sys, threading, time
from workbench.sandbox import LocalSandbox
box = LocalSandbox(tier=sys.argv[1])
threading.Thread(target=box.run, args=("import time; time.sleep(600)",), kwargs={"run_timeout": 600}, daemon=True).start()
print("up", flush=True)
time.sleep(600)
"""


@pytest.mark.slow
def test_programs_end_with_a_parent_that_was_killed(box: LocalSandbox) -> None:
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    parent = subprocess.Popen([sys.executable, "-c", KILLED, box.tier], stdout=subprocess.PIPE, env=env)
    assert parent.stdout and parent.stdout.readline() == b"up\n"
    assert within(leftovers)
    parent.kill()
    parent.wait()
    assert within(lambda: not leftovers()), leftovers()

    def swept() -> bool:
        memory.place.cache_clear()  # what another start does: it removes the groups of the dead
        return memory.place() is None or not list(memory.place().glob(f"workbench-{parent.pid}-*"))

    assert within(swept)
    for folder in Path(tempfile.gettempdir()).glob("workbench-box-*"):
        subprocess.run(["rm", "-rf", str(folder)], check=True)  # what a killed parent cannot sweep


# --- tiers -------------------------------------------------------------------------------------


def test_where_nothing_isolates_model_code_does_not_run_unless_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiers, "failures", lambda sandbox, tier: ["it reads a file of the host"])
    with pytest.raises(
        SandboxError, match=r"/.* in bubblewrap: it reads a file.*, pass python= .*sandbox\.remote"
    ) as error:
        LocalSandbox()
    assert "allow_unsafe" not in str(error.value)
    unsafe = LocalSandbox(allow_unsafe=True)
    assert unsafe.tier == "unsafe" and "NO ISOLATION" in unsafe.describe()
    result = unsafe.run("import os; print(os.environ.get('HOME'))")
    assert result.stdout == "/box\n" and result.where == "unsafe"


@pytest.mark.slow
def test_a_tier_that_leaks_fails_its_probe() -> None:
    """The probe itself: run without any isolation it finds every leak that it looks for."""
    found = tiers._attempt(LocalSandbox(allow_unsafe=True), "unsafe")
    wanted = {
        "it reads a file of the host",
        "it reaches the host's network by TCP",
        "it sees other processes",
        "a daemon outlives its program",
    }
    assert wanted <= set(found)


def test_a_launcher_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiers, "_tool", lambda name: f"/nowhere/{name}")
    with pytest.raises(SandboxError, match="needs bwrap"):
        LocalSandbox(tier="bubblewrap")
    phase = contained(
        ["/nowhere/bwrap"],
        b"",
        Path("/"),
        ProcessLimits(seconds=1, output_bytes=1, memory_mb=1, disk_mb=1),
        threading.Event(),
    )
    assert phase.status == "Error" and "cannot start" in phase.stderr
    with pytest.raises(SandboxError, match="did you mean 'bubblewrap'"):
        LocalSandbox(tier="bubblewarp")


# --- the same answers as a live SandboxFusion ---------------------------------------------------


def exchanges() -> list[dict[str, Any]]:
    if not EXCHANGES.exists():
        return []
    return [one for one in map(json.loads, EXCHANGES.read_text().splitlines()) if one["path"] == "/run_code"]


@pytest.mark.skipif(not EXCHANGES.exists(), reason="no recorded exchanges: ../shared/data is absent")
@pytest.mark.parametrize("one", exchanges(), ids=lambda one: one["name"])
def test_the_local_sandbox_answers_as_the_service_did(box: LocalSandbox, one: dict[str, Any]) -> None:
    body = one["request"] if isinstance(one["request"], str) else json.dumps(one["request"])
    if one["request"] and "cpp" in str(body) and "cpp" not in box.languages:
        pytest.skip("no C++ compiler")
    status, reply = answer(box, body.encode())
    assert status == one["status_code"]
    if status != 200:
        return
    theirs = one["response"]
    assert reply["status"] == theirs["status"]
    for phase in ("compile_result", "run_result"):
        if theirs[phase] is None:
            assert reply[phase] is None
        else:
            assert reply[phase]["status"] == theirs[phase]["status"], reply
            assert reply[phase]["return_code"] == theirs[phase]["return_code"]
            if isinstance(theirs[phase]["stdout"], str):
                assert reply[phase]["stdout"] == theirs[phase]["stdout"]
    assert reply["files"] == theirs["files"]


def test_requests_and_programs_are_each_others_reverse() -> None:
    program = Program(
        code="x", stdin="1", files={"a/b": b"\x00"}, fetch_files=("c",), run_timeout=2.0, memory_limit_mb=9
    )
    assert Program.from_request(program.to_request()) == program
    assert program.to_request()["files"] == {"a/b": base64.b64encode(b"\x00").decode()}
    for wrong in ({"../x": b""}, {"/etc/x": b""}, {"": b""}):
        with pytest.raises(SettingError, match="inside its folder"):
            Program(code="", files=wrong)


@pytest.mark.parametrize("python", ["/no/such/python", "no-such-python", "/usr", "/etc/passwd"])
def test_an_interpreter_that_is_not_there_is_refused(python: str) -> None:
    with pytest.raises(SandboxError, match="python= of the sandbox; expected a program that can be run"):
        LocalSandbox(python=python)


def test_an_interpreter_that_never_answers_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiers, "LOOK_SECONDS", 0.1)
    silent = tmp_path / "python"
    silent.write_text("#!/bin/sh\nexec sleep 1000\n")
    silent.chmod(0o755)
    with pytest.raises(SandboxError, match=r"a program that can be run.*has not answered in 0\.1 s"):
        LocalSandbox(python=str(silent))
