"""Processes that begin warm: a server that has imported what takes seconds forks itself for each, and the fork is the process.

With `install()` a `subprocess.Popen` of this Python that names a program of `PROGRAMS` is such a fork: same arguments, handles,
session, signals and exit code, in a fiftieth of the time. Where no server answers it is an ordinary process. What a test says
of how an interpreter begins (imports, flags, memory, command line, parent) needs an ordinary one: every other program, and all
of them under `cold()` or with WORKBENCH_TESTS_COLD=1. A fork ends with its server, and the server with the tests.

python warm_starts.py LISTENER MODULE...      the server; ends when its stdin ends
"""

from __future__ import annotations

import array
import atexit
import contextlib
import ctypes
import fcntl
import functools
import importlib
import importlib.abc
import importlib.util
import io
import json
import os
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

WHERE = "WORKBENCH_TESTS_WARM"
"""Variable with the folder of the servers' sockets; empty or absent: every process is an ordinary one."""
MODULES = (
    "torch", "workbench", "transformers.models.auto.auto_factory", "transformers.models.qwen2.modeling_qwen2", "transformers.models.qwen2.tokenization_qwen2",
    "workbench.engines.local_engine", "workbench.engines.fsdp_engine.worker", "workbench.runs", "workbench.jobs", "workbench.views", "pandas", "pyarrow.parquet",
    "matplotlib.figure", "matplotlib.backends.backend_agg", "torch.utils.tensorboard", "ipykernel.kernelapp", "ipykernel.zmqshell",
    "tqdm.auto", "jsonschema", "pytest",
)  # fmt: skip
"""What nearly every process of the tests imports; none of it may start a thread or open a file by being imported, nor look for its
kernel then, as ipywidgets does: a kernel in which it was imported before could not bring a widget back after a reload."""
VLLM_MODULES = (
    "torch", "vllm.engine.arg_utils", "vllm.v1.engine.llm_engine", "vllm.platforms.cpu", "vllm.v1.worker.cpu_worker", "vllm.v1.worker.cpu_model_runner",
    "vllm.model_executor.models.qwen2", "vllm.v1.executor.uniproc_executor", "vllm.v1.engine.core", "vllm.v1.core.sched.scheduler",
    "vllm.v1.attention.backends.cpu_attn",
)  # fmt: skip
RENDER_MODULES = ("transformers.utils.chat_template_utils",)
"""Few: a renderer's memory is limited by its address space."""
VLLM_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "TORCHDYNAMO_DISABLE": "1",
}
"""vLLM reads these when it is imported: whoever asks for other ones gets an ordinary process."""
SERVERS: tuple[tuple[str, tuple[str, ...], dict[str, str]], ...] = (
    ("main", MODULES, {}),
    ("render", RENDER_MODULES, {}),
    ("vllm", VLLM_MODULES, VLLM_ENVIRONMENT),
)
PROGRAMS = (
    "ipykernel_launcher",
    "workbench.cli",
    "jupyterlab",
    "resume_driver.py",
    "growing_driver.py",
    "soak_driver.py",
    "stream_driver.py",
    "listens.py",
    "pinning.py",
    "readme.py",
    "pages.py",
    "hanging.py",
    "kernel.py",
    "ending.py",
    "two_nodes.py",
    "accelerator_driver.py",
    "real_model.py",
)
"""Modules and scripts that begin warm."""
VLLM_PROGRAM = "vllm.entrypoints.openai.api_server"
"""vLLM's HTTP server begins warm as well, and forks the two processes that it would spawn."""
WARM = "# warm\n"
"""First line of a test's program for `python -c` that begins warm."""
XDIST = "import sys;exec(eval(sys.stdin.readline()))"
"""Program of a worker that runs tests (execnet's `popen_bootstrapline`): it needs these imports as well."""
CHILDREN = {
    "processes.py": "main",
    "worker.py": "main",
    "doctor.py": "main",
    "render_worker.py": "render",
    "workbench_vllm.py": "vllm",
}
"""And files that `workbench.base.child` runs → the server that has their imports."""
ROOMY = 4096
"""MiB: a process whose memory is limited to fewer is an ordinary one."""
_CHILD = "runpy.run_path(sys.argv[1])['_serve']"
_LENGTH = struct.Struct(">I")
_ANSWER_SECONDS = 300.0
_Plain = getattr(subprocess.Popen, "plain", subprocess.Popen)


# --- who asks ---------------------------------------------------------------------------------------


def server_for(words: list[str], env: dict[str, str]) -> str:
    """Which server has the program's imports; empty: none, it is an ordinary process."""
    options = [word for word in words[1:] if word.startswith(("-X", "-P", "-u"))]
    rest = words[1 + len(options) :]
    if words[0] != sys.executable or words[1 : 1 + len(options)] != options or not rest:
        return ""
    if rest[0] == "-c":
        if rest[1] == XDIST or rest[1].startswith(WARM):
            return "main"
        files = [Path(word).name for word in rest[3:]] if _CHILD in rest[1] else []
        server = next((CHILDREN[name] for name in files if name in CHILDREN), "")
        mine = {name: value for name, value in env.items() if name.startswith(("VLLM_", "TORCHDYNAMO_"))}
        if int(env.get("WORKBENCH_WORKER_MEMORY_MB", ROOMY)) < ROOMY:  # the server's own data would fill its limit
            return ""
        return "" if server == "vllm" and mine != VLLM_ENVIRONMENT else server
    if rest[0] == "-m":
        return "vllm" if rest[1] == VLLM_PROGRAM else "main" if rest[1] in PROGRAMS else ""
    return "main" if Path(rest[0]).name in PROGRAMS else ""


class Chosen(_Plain):  # type: ignore[misc, valid-type]
    """`subprocess.Popen`; a fork of a warm server where the program is one of ours."""

    plain = _Plain
    """In a fork, whose server has replaced it too."""
    _end = -1
    """Handle from which a fork's exit code is read."""
    _code: int | None = None
    _child = False
    """Of `workbench.base.child`, which looks without waiting: the code is known before the process counts as waited for."""

    def _execute_child(self, args: Any, executable: Any, preexec_fn: Any, close_fds: Any, pass_fds: Any, cwd: Any, env: Any, startupinfo: Any, creationflags: Any, shell: Any, p2cread: int, p2cwrite: int, c2pread: int, c2pwrite: int, errread: int, errwrite: int, restore_signals: Any, gid: Any, gids: Any, uid: Any, umask: Any, start_new_session: bool, *more: Any) -> None:  # fmt: skip
        environment = {os.fsdecode(name): os.fsdecode(value) for name, value in (env or os.environ).items()}
        folder, words = os.environ.get(WHERE), [] if isinstance(args, (str, bytes)) else [os.fsdecode(x) for x in args]
        odd = shell or executable or preexec_fn or gid is not None or uid is not None or not words
        server = "" if odd or not folder else server_for(words, environment)
        if server:
            given = [
                p2cread if p2cread != -1 else 0,
                c2pwrite if c2pwrite != -1 else 1,
                errwrite if errwrite != -1 else 2,
            ]
            asked = {
                "arguments": words[1:], "env": environment, "cwd": os.fspath(cwd or os.getcwd()), "session": start_new_session,
                "places": [0, 1, 2, *pass_fds], "parent": os.getpid(),
            }  # fmt: skip
            found = ask(Path(str(folder)) / server, asked, [*given, *pass_fds])
            if found is not None:
                self.pid, self._end = found
                self._child_created = True
                self._child = any(_CHILD in word for word in words)
                self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)  # type: ignore[attr-defined]
                return
        super()._execute_child(  # type: ignore[misc]
            args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell, p2cread, p2cwrite, c2pread,
            c2pwrite, errread, errwrite, restore_signals, gid, gids, uid, umask, start_new_session, *more,
        )  # fmt: skip

    def _internal_poll(self, *given: Any, **named: Any) -> int | None:
        if self._end < 0:
            return super()._internal_poll(*given, **named)  # type: ignore[misc, no-any-return]
        with self._waitpid_lock:  # type: ignore[attr-defined]
            if self._code is None and select.select([self._end], [], [], 0)[0]:
                self._read()
        if not self._child:
            self.returncode = self._code
        return self._code

    def _wait(self, timeout: float | None) -> int:
        if self._end < 0:
            return super()._wait(timeout)  # type: ignore[misc, no-any-return]
        if self.returncode is None:
            if self._code is None and not select.select([self._end], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            with self._waitpid_lock:  # type: ignore[attr-defined]
                if self._code is None:
                    self._read()
            self.returncode = self._code
        return int(self.returncode or 0)

    def _read(self) -> None:
        self._code = exit_code(self._end)  # stays open until this object is gone: another thread may wait for it

    def __del__(self, *given: Any, **named: Any) -> None:
        if getattr(self, "_end", -1) < 0:
            super().__del__(*given, **named)  # type: ignore[misc]
        else:
            os.close(self._end)


def exit_code(end: int) -> int:
    """How a fork ended, read from the handle that `ask` gave."""
    data = os.read(end, 4)
    return int(struct.unpack(">i", data)[0]) if len(data) == 4 else -signal.SIGKILL


def ask(path: Path, asked: dict[str, Any], handles: list[int]) -> tuple[int, int] | None:
    """(pid, handle from which its exit code is read); None where no server answers."""
    end, said = os.pipe()
    try:
        with socket.socket(socket.AF_UNIX) as link:
            link.settimeout(_ANSWER_SECONDS)
            link.connect(str(path))
            body = json.dumps(asked).encode()
            rights = array.array("i", [said, *handles])
            link.sendmsg([_LENGTH.pack(len(body))], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
            link.sendall(body)
            answer = link.recv(_LENGTH.size)
            if len(answer) == _LENGTH.size:
                return _LENGTH.unpack(answer)[0], end
    except OSError:
        pass
    finally:
        os.close(said)
    os.close(end)
    return None


def install() -> None:
    """From here on `subprocess.Popen` is `Chosen`; before anything imports it by its name. A raylet's workers are forks as well.

    And nothing waits for the disk: no test cuts the power.
    """
    os.fsync = os.fdatasync = lambda handle: None  # type: ignore[assignment]
    subprocess.Popen = Chosen  # type: ignore[misc]
    sys.meta_path.insert(0, WarmRay())


class WarmRay(importlib.abc.MetaPathFinder):
    """Ray, imported from here on, has its raylets run warm_ray_worker.py instead of setup_worker.py."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != "ray._private.ray_constants":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.loader is not None
        run = spec.loader.exec_module

        def exec_module(module: types.ModuleType) -> None:
            run(module)
            module.SETUP_WORKER_FILENAME = str(Path(__file__).parents[1] / "warm_ray_worker.py")  # type: ignore[attr-defined]

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


@contextlib.contextmanager
def cold() -> Iterator[None]:
    """Every process that this one starts is an ordinary one."""
    held = os.environ.pop(WHERE, None)
    try:
        yield
    finally:
        if held is not None:
            os.environ[WHERE] = held


# --- who holds the servers: a child of the process that the tests were started in ----------------------------------


class Servers:
    """A listening socket for each server, and a process that starts a server as soon as somebody asks for it.

    A thread of the tests could not: Ray's driver waits for its first worker without letting other threads run.
    """

    def __init__(self, servers: tuple[tuple[str, tuple[str, ...], dict[str, str]], ...] = SERVERS) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="warm-"))
        ended, self._end = os.pipe()
        listeners = []
        for name, _, _ in servers:
            listeners.append(socket.socket(socket.AF_UNIX))
            listeners[-1].bind(str(self.folder / name))
            listeners[-1].listen(128)
        self._holder = os.fork()
        if self._holder == 0:
            os.close(self._end)
            _hold(dict(zip(listeners, servers, strict=True)), ended)
        for one in listeners:
            one.close()
        os.close(ended)
        os.environ[WHERE] = str(self.folder)

    def close(self) -> None:
        """No fork is left when this returns."""
        os.environ.pop(WHERE, None)
        os.close(self._end)
        os.waitpid(self._holder, 0)
        for path in list(self.folder.iterdir()):
            path.unlink()
        self.folder.rmdir()


def _hold(waiting: dict[socket.socket, tuple[str, tuple[str, ...], dict[str, str]]], ended: int) -> None:
    """Start servers until the pipe of who holds this process is closed; it does not return."""
    processes = []
    while ended not in (ready := select.select([ended, *waiting], [], [])[0]):
        for listener in ready:
            _, modules, more = waiting.pop(listener)
            command = [sys.executable, __file__, str(listener.fileno()), *modules]
            environment = {**os.environ, **more, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
            handles = (listener.fileno(),)
            processes.append(_Plain(command, pass_fds=handles, stdin=subprocess.PIPE, env=environment))
            listener.close()
    for process in processes:
        process.kill()
        process.wait()
    os._exit(0)


# --- the server -------------------------------------------------------------------------------------


def serve(listener: socket.socket) -> Callable[[], Any] | None:
    """Fork for each who asks; in the server None when the tests have ended, in a fork what it is to run."""
    ends: dict[int, tuple[int, int]] = {}  # pidfd → (pid, where its exit is said)
    while True:
        ready, _, _ = select.select([0, listener, *ends], [], [])
        for one in [fd for fd in ready if fd in ends]:
            pid, said = ends.pop(one)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            with contextlib.suppress(OSError):
                os.write(said, struct.pack(">i", code))
            os.close(one)
            os.close(said)
        if 0 in ready:
            return None
        if listener not in ready:
            continue
        link, _ = listener.accept()
        with link:
            asked, handles = _receive(link)
            if asked is None:
                continue
            said, *rest = handles
            server = os.getpid()
            pid = os.fork()
            if pid == 0:
                ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: it ends with its server
                if os.getppid() != server:
                    os._exit(1)
                if asked["session"]:
                    os.setsid()
                link.sendall(_LENGTH.pack(os.getpid()))  # from here on it has its group: whoever asked may signal that
                for fd in (listener.detach(), said, *ends, *(other for _, other in ends.values())):
                    os.close(fd)
                return lambda: _become(asked, rest)
        ends[os.pidfd_open(pid)] = (pid, said)
        for handle in rest:
            os.close(handle)


def _receive(link: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    handles = array.array("i")
    head, ancillary, _, _ = link.recvmsg(_LENGTH.size, socket.CMSG_SPACE(64 * handles.itemsize))
    if len(head) < _LENGTH.size:
        return None, []
    for _, _, data in ancillary:
        handles.frombytes(data[: len(data) - len(data) % handles.itemsize])
    body = bytearray()
    while len(body) < _LENGTH.unpack(head)[0]:
        block = link.recv(1 << 20)
        if not block:
            return None, []
        body += block
    return json.loads(body), list(handles)


def _become(asked: dict[str, Any], handles: list[int]) -> None:
    """Be the process that was asked for: handles, environment, folder, signals; then its program."""
    high = max(asked["places"]) + 1
    moved = [fcntl.fcntl(handle, fcntl.F_DUPFD_CLOEXEC, high) for handle in handles]
    for handle in handles:
        os.close(handle)
    for handle, place in zip(moved, asked["places"], strict=True):
        os.dup2(handle, place, inheritable=True)
        os.close(handle)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        mode, errors = "r" if number == 0 else "w", "backslashreplace" if number == 2 else "strict"
        stream = open(number, mode, buffering=-1 if number == 0 else 1, closefd=False, encoding="utf-8", errors=errors)  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    os.environ.clear()
    os.environ.update(asked["env"])
    os.chdir(asked["cwd"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _stand_for(asked["parent"])
    tempfile.tempdir = None
    import faulthandler
    import random

    import numpy

    random.seed()
    numpy.random.seed()
    if os.environ.get("PYTHONFAULTHANDLER"):
        faulthandler.enable()
    if os.environ.get("TQDM_DISABLE"):  # read when it is imported
        from tqdm.std import tqdm

        tqdm.__init__ = functools.partialmethod(tqdm.__init__, disable=True)
    if (
        "ipykernel_launcher" in asked["arguments"] and "MPLBACKEND" not in os.environ
    ):  # as a kernel has it, before matplotlib comes
        import matplotlib

        matplotlib.rcParams["backend"] = "module://matplotlib_inline.backend_inline"
    if VLLM_PROGRAM in asked["arguments"]:
        import multiprocessing

        forking = multiprocessing.get_context("fork")
        multiprocessing.get_context = lambda method=None: forking  # type: ignore[assignment]
    _run(asked["arguments"])


def _stand_for(parent: int) -> None:
    """`os.getppid` gives who asked, and 1 as soon as that has ended: a process that watches its parent sees it go."""
    try:
        watched = os.pidfd_open(parent)
    except ProcessLookupError:
        watched = -1

    here, plain = os.getpid(), os.getppid

    def getppid() -> int:
        if os.getpid() != here:  # a fork of this one has an ordinary parent
            return plain()
        gone = watched < 0 or select.select([watched], [], [], 0)[0]
        return 1 if gone else parent

    os.getppid = getppid


def _run(arguments: list[str]) -> None:
    """As the interpreter runs `[options] -c code | -m module | script`."""
    words, safe = list(arguments), bool(os.environ.get("PYTHONSAFEPATH"))
    while words[0].startswith(("-X", "-P", "-u")):
        safe = words.pop(0) == "-P" or safe
    paths = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    sys.path[:] = [*paths, *(entry for entry in _PATH if entry not in paths)]
    for entry in paths:  # what an interpreter runs as it begins
        if (Path(entry) / "sitecustomize.py").is_file():
            runpy.run_path(str(Path(entry) / "sitecustomize.py"))
            break
    first = {"-c": "", "-m": os.getcwd()}.get(words[0], str(Path(words[0]).resolve().parent))
    if not safe:
        sys.path.insert(0, first)
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        return
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    if words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        exec(compile(words[1], "<string>", "exec"), main.__dict__)  # noqa: S102 - the tests' own code
    else:
        sys.argv = words
        main.__file__ = words[0]
        exec(compile(Path(words[0]).read_bytes(), words[0], "exec"), main.__dict__)  # noqa: S102 - the tests' own code


_PATH: list[str] = []
"""The server's own `sys.path`, without the folder of this file."""


def main() -> None:
    """The server, and each fork of it."""
    listener = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    install()
    for name in sys.argv[2:]:
        with contextlib.suppress(ImportError):  # a fork says what is missing
            importlib.import_module(name)
    import gc

    import torch

    torch.set_num_threads(1)
    _PATH[:] = sys.path[1:]
    gc.freeze()
    work = serve(listener)
    if work is not None:
        _end(work)


def _end(work: Callable[[], Any]) -> None:
    """Run it, and end as an interpreter does; all but the taking apart of modules, which costs most of a second."""
    code = 0
    try:
        work()
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
    except BaseException as error:  # noqa: BLE001 - as the interpreter says it
        entry = error.__traceback__
        while entry is not None and entry.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>"):
            entry = entry.tb_next
        sys.excepthook(type(error), error.with_traceback(entry), entry)
        code = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, io.UnsupportedOperation):
            stream.flush()
    if code < 0:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code & 0xFF)


if __name__ == "__main__":
    main()
