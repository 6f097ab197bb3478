"""How a process is isolated, by bubblewrap or by kernel namespaces with util-linux's tools, and which files it sees.

A tier of isolation is used only after a program that tries to escape (`ESCAPES`) has failed to.

Both tiers show the same small world: system folders read-only, a fresh /proc with the sandbox's own
processes, a sized /tmp, one writable folder `/box`, no network, no further user namespaces, another user,
an empty environment, and of a home folder nothing but the interpreter's files. Started as root, the launcher first becomes `UID`, because a process limit does
not bind root, and root's files must not be the program's own.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from workbench.base.errors import SandboxError
from workbench.sandbox import memory
from workbench.sandbox.process import FILE_MB, MAX_ENTRIES, ProcessLimits
from workbench.sandbox.protocol import Program, Result

SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64")
"""System folders that programs see read-only."""
_TOOLS = "/etc/alternatives"
"""Links by which some systems choose among programs of one name (awk, vi, c++)."""
_STANDARD = "/usr/bin/python3"
_ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": "/box",
    "LANG": "C.UTF-8",
    "PYTHONUTF8": "1",
    "OMP_NUM_THREADS": "1",  # a BLAS that reserves memory for many threads meets the memory limit
    "OPENBLAS_NUM_THREADS": "1",
}
_PARTS = r"""
import ctypes, json, os, site, sys, sysconfig
standard, objects = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib")], []
class Object(ctypes.Structure): _fields_ = [("address", ctypes.c_void_p), ("name", ctypes.c_char_p)]
@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(Object), ctypes.c_size_t, ctypes.c_void_p)
def note(item, size, data):
    objects.append(os.fsdecode(item.contents.name or b""))
    return 0
for folder, _, names in os.walk(os.path.join(standard[1], "lib-dynload")):
    for name in names:
        try: ctypes.CDLL(os.path.join(folder, name))
        except OSError: pass
ctypes.CDLL(None).dl_iterate_phdr(note, None)
base = os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)
parts = {"base": base, "prefix": sys.base_prefix, "standard": standard, "objects": objects, "sites": site.getsitepackages()}
print(json.dumps({**parts, "version": "%d.%d" % sys.version_info[:2]}))
"""
"""Python: prints where an interpreter's parts lie; `objects` are the shared libraries that it and its standard library load."""


@dataclass(frozen=True, kw_only=True)
class World:
    """The files that sandboxed programs see beside the system's folders, their interpreter and environment."""

    python: str
    environment: Mapping[str, str]
    shown: tuple[str, ...]
    """Files and folders that programs see read-only; none of them is inside another."""
    hidden: tuple[str, ...]
    """Folders inside `shown` that programs see as empty."""

    @property
    def closed(self) -> dict[str, str]:
        """The paths in `shown` that other users cannot reach → the outermost folder that closes them."""
        stops = {one: [str(above) for above in Path(one).parents if not _passable(above)] for one in self.shown}
        return {one: above[-1] for one, above in stops.items() if above}


def _passable(folder: Path) -> bool:
    return bool(folder.stat().st_mode & stat.S_IXOTH)


def homes() -> list[str]:
    """Return the folders in which home folders lie, and this user's own home, wherever that is."""
    home = os.path.realpath(os.path.expanduser("~"))
    return ["/home", "/root", *([] if home == "/" or _is_below(home, SYSTEM) else [home])]


def _is_below(path: str, folders: Iterable[str]) -> bool:
    return any(Path(path).is_relative_to(folder) for folder in folders)


def installed(package: str) -> bool:
    """Return whether a package of this name is installed beside this process, not a module of the standard library or
    of a project."""
    return PathFinder.find_spec(package, _sites()) is not None


def _sites() -> list[str]:
    return [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]


def worlds(python: str | None, packages: bool) -> Iterator[World]:
    """Yield the worlds to try, best first: with the interpreter `python` alone, or with this process's and then the
    system's.

    Raises `SandboxError` for an interpreter that cannot be run, and for `packages` of another version than that
    interpreter's.
    """
    if packages and not _sites():
        what, do = "packages=True, but Python has no site-packages folder", "set packages=False"
        raise SandboxError(what, expected="one on sys.path", found=sys.path, do=do)
    if python is not None:
        yield _world_of(python, packages)
        return
    ours = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
    programs = [ours] if not os.access(_STANDARD, os.X_OK) else [ours, _STANDARD]
    if os.geteuid() == 0 and not all(map(_passable, Path(ours).parents)):
        programs.reverse()  # the system's is at hand where ours lies in a folder of root's
    for program in programs:
        if program == ours or not packages or _parts(program)["version"] == _version():
            yield _world(program, _sites() if packages else [])


def _world_of(python: str, packages: bool) -> World:
    program = shutil.which(python) or python
    if not os.path.isabs(program) or not os.access(program, os.X_OK) or os.path.isdir(program):
        raise _no_python(program)
    if packages and _parts(program)["version"] != _version():
        do = "leave python= out, give it an interpreter of that version, or set packages=False"
        what, found = f"packages=True with python={python!r}, which is of another version", _parts(program)["version"]
        raise SandboxError(what, expected=f"Python {_version()}", found=f"Python {found}", do=do)
    return _world(program, _sites() if packages else [], named=True)


def _version() -> str:
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def _world(program: str, sites: list[str], *, named: bool = False) -> World:
    shown, hidden, environment = [_TOOLS], list[str](), dict(_ENVIRONMENT)
    if not _is_below(program, SYSTEM):
        sites = [*sites, *(_parts(program)["sites"] if named else ())]  # of a virtual environment: its base has others
        program = _parts(program)["base"]
        parts = _parts(program)
        shown += [program, *parts["standard"], *filter(os.path.isabs, parts["objects"])]
        if _is_below(parts["prefix"], homes()):
            hidden = [site for site in parts["sites"] if site not in sites and os.path.isdir(site)]
        else:
            shown.append(parts["prefix"])
        used = {os.path.dirname(os.path.normpath(library)) for library in parts["objects"]}
        environment["LD_LIBRARY_PATH"] = ":".join(used.intersection(os.environ.get("LD_LIBRARY_PATH", "").split(":")))
    environment["PYTHONPATH"] = ":".join(sites)
    with_conda = [(site, Path(site).parents) for site in sites]  # its packages lean on shared libraries two folders up
    shown += [str(above[1]) if (above[2] / "conda-meta").is_dir() else site for site, above in with_conda]
    settings = {name: value for name, value in environment.items() if value}
    return World(python=program, environment=settings, shown=_outermost(shown), hidden=tuple(hidden))


def _outermost(paths: Iterable[str]) -> tuple[str, ...]:
    """Return the paths that exist and lie in none of the others, nor in the system's folders."""
    kept: list[str] = []
    for path in sorted({os.path.normpath(one) for one in paths if os.path.exists(one)}):
        if not _is_below(path, (*SYSTEM, *kept)):
            kept.append(path)
    return tuple(kept)


LOOK_SECONDS = 60.0
"""Time limit, in seconds, for an interpreter to print where its parts are."""


@cache
def _parts(program: str) -> dict[str, Any]:
    """Run an interpreter to find where its parts lie (`_PARTS`). Raises `SandboxError` for a program that is no Python."""
    kept = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ}
    given: dict[str, Any] = {"env": kept, "stdin": subprocess.DEVNULL, "timeout": LOOK_SECONDS}
    try:
        ran = subprocess.run([program, "-I", "-c", _PARTS], capture_output=True, text=True, check=False, **given)
        parts: dict[str, Any] = json.loads(ran.stdout)
    except subprocess.TimeoutExpired as cause:
        raise _no_python(f"{program}, which has not answered in {LOOK_SECONDS:g} s") from cause
    except ValueError as cause:
        raise _no_python(f"{program}: {ran.stderr.strip().rpartition(chr(10))[2][:200]}") from cause
    return parts


def _no_python(found: str) -> SandboxError:
    do = "give python= the path of an interpreter, or leave it out"
    return SandboxError("python= of the sandbox", expected="a program that can be run", found=found, do=do)


UID = 61_999
"""User id of sandboxed programs when this process is root: an id that no account of the machine uses."""
TIERS = ("bubblewrap", "namespaces")
"""Tiers with isolation, in order of preference; `unsafe` has no isolation."""
MOUNTS = Path(__file__).with_name("mounts.sh")
REACH = Path(__file__).with_name("reach.sh")
_DEVICES = ("null", "zero", "full", "random", "urandom")
_LINKS = {"shm": "/tmp", "fd": "/proc/self/fd"}
_LINKS |= {name: f"/proc/self/fd/{n}" for n, name in enumerate(("stdin", "stdout", "stderr"))}
_PROCESSES = 64
_OPEN_FILES = 128


def limited(limits: ProcessLimits, processes: bool = True) -> list[str]:
    """Return the `prlimit …` command line that sets a program's limits; with `processes` also the limit of their
    number."""
    # core: a limit of 0 would still start a helper of the machine that takes cores, 1 starts none
    kept = {"as": limits.memory_mb << 20, "fsize": FILE_MB << 20, "nofile": _OPEN_FILES, "core": 1, "rtprio": 0}
    kept |= {"msgqueue": 0, "cpu": int(limits.seconds) + 2, **({"nproc": _PROCESSES} if processes else {})}
    return [_tool("prlimit"), *(f"--{name}={limit}" for name, limit in kept.items()), "--"]


def _tool(name: str) -> str:
    # by full path: the launcher's environment is empty
    return shutil.which(name, path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin:/usr/bin:/bin") or name


def missing(tier: str) -> list[str]:
    """List the system programs that a tier of isolation needs and this machine lacks."""
    tools = {"bubblewrap": ("bwrap",), "namespaces": ("unshare", "setpriv", "mount", "pivot_root", "umount")}
    needed = (*tools.get(tier, ()), "prlimit", *(["setpriv"] if os.geteuid() == 0 else []))
    return [name for name in needed if shutil.which(_tool(name)) is None]


def command(
    tier: str, group: memory.ControlGroup | None, *, box: Path, root: Path, limits: ProcessLimits, world: World
) -> list[str]:
    """Return the command line to put before a program's own to isolate it in a control group; `root` is an empty folder
    for mounts."""
    refused = memory.filter_of_calls() if tier != "unsafe" else None
    enter = memory.entering(group, refused)
    drop = [_tool("setpriv"), f"--reuid={UID}", f"--regid={UID}", "--clear-groups", "--"] if os.geteuid() == 0 else []
    ends = [_tool("setpriv"), "--pdeathsig=KILL", "--"] if tier == "namespaces" else []  # bwrap sees to it itself
    reach = _reaching(root, world.closed) if os.geteuid() == 0 else []
    if tier == "bubblewrap":
        return [*enter, *reach, *drop, *_bubblewrap(box, limits, world), *limited(limits)]
    if tier == "namespaces":
        return [
            *enter,
            *([sys.executable, "-I", "-S", "-c", memory.LOAD] if refused else []),
            *reach,
            *drop,
            *ends,
            *_namespaces(box, root, limits, world),
            *limited(limits),
            *_environment(world.environment),
        ]
    # no process limit: outside a namespace it counts all processes of the user
    return [*enter, *limited(limits, processes=False), *_environment(world.environment)]


def _environment(environment: Mapping[str, str]) -> list[str]:
    return [_tool("env"), "-i", *(f"{name}={value}" for name, value in environment.items())]


def _reaching(root: Path, closed: Mapping[str, str]) -> list[str]:
    """Return the command line that makes paths reachable for other users; `closed` maps them to the folders that close
    them."""
    paths, closing = ("\n".join(dict.fromkeys(some)) for some in (closed, closed.values()))
    front = [_tool("unshare"), "--mount", "--", "/bin/sh", "-c", REACH.read_text(), "sh", str(root), paths, closing]
    return front if closed else []


def _bubblewrap(box: Path, limits: ProcessLimits, world: World) -> list[str]:
    view: list[str] = []
    for folder in SYSTEM:
        if os.path.islink(folder):
            view += ["--symlink", os.readlink(folder), folder]
        elif os.path.isdir(folder):
            view += ["--ro-bind", folder, folder]
    # before what is shown: that may lie in /tmp
    view += ["--size", str(limits.disk_mb << 20), "--tmpfs", "/tmp"]
    for folder in world.shown:
        view += ["--ro-bind", folder, folder]
    for folder in world.hidden:
        view += ["--tmpfs", folder, "--remount-ro", folder]
    # a small /dev of its own: what bubblewrap's `--dev` makes has no size, and terminals
    view += ["--proc", "/proc", "--ro-bind", "/proc/sys", "/proc/sys"]
    view += [part for name in _DEVICES for part in ("--dev-bind", f"/dev/{name}", f"/dev/{name}")]
    view += [part for name, target in _LINKS.items() for part in ("--symlink", target, f"/dev/{name}")]
    view += ["--bind", str(box), "/box", "--remount-ro", "/"]
    refused = ["--seccomp", str(memory.FILTER_FD)] if memory.filter_of_calls() else []
    variables = [part for name, value in world.environment.items() for part in ("--setenv", name, value)]
    return [
        *(_tool("bwrap"), "--unshare-user", "--disable-userns", "--unshare-all", "--uid", "65534", "--gid", "65534"),
        *("--die-with-parent", "--new-session", "--hostname", "sandbox"),
        *view,
        *refused,
        *("--chdir", "/box", "--clearenv", *variables, "--"),
    ]


def _namespaces(box: Path, root: Path, limits: ProcessLimits, world: World) -> list[str]:
    folders = [*filter(os.path.isdir, SYSTEM), *world.shown]
    return [
        *(_tool("unshare"), "--user", "--map-root-user", "--mount", "--pid", "--net", "--ipc", "--uts", "--cgroup"),
        *("--fork", "--kill-child", "--", "/bin/sh", "-c", MOUNTS.read_text(), "sh"),
        *(str(root), str(box), f"size={limits.disk_mb << 20},nr_inodes={MAX_ENTRIES}"),
        *("\n".join(folders), "\n".join(world.hidden)),
        *(_tool("setpriv"), "--bounding-set=-all", "--inh-caps=-all", "--no-new-privs", "--"),
    ]


# --- the probe ------------------------------------------------------------------------------------

_SECONDS = 120.0
"""Time limit, in seconds, of a probe, which takes half a second: on a busy machine it may take much longer."""

ESCAPES = r"""
import json, os, resource, socket, sys
found = {}
def attempt(name, action):
    try:
        found[name] = bool(action())
    except BaseException as error:
        found[name] = False
def connect(kind):
    s = socket.socket(socket.AF_INET, kind); s.settimeout(2)
    s.connect(("127.0.0.1", PORT)); s.send(b"out"); return kind == socket.SOCK_STREAM or not udp_is_alone()
def udp_is_alone():
    return [name for _, name in socket.if_nameindex()] == ["lo"]
def daemon():
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            import time; time.sleep(3)
        os._exit(0)
    return False
def abstract():
    s = socket.socket(socket.AF_UNIX); s.settimeout(2)
    s.connect("\0" + CANARY); return True
def inherited():
    found = []
    for number in map(int, os.listdir("/proc/self/fd")):
        try:
            os.fstat(number); found.append(number)
        except OSError: pass  # what listed them
    return max(found) > 2
def others():
    return [p for p in os.listdir("/proc") if p.isdigit() and int(p) not in (1, os.getpid())]
def environments():
    return any(CANARY.encode() in open("/proc/%s/environ" % pid, "rb").read() for pid in ("1", "self"))
def strays(folder):
    for path in [os.path.join(folder, name) for name in os.listdir(folder)]:
        if path not in SHOWN and (not any(one.startswith(path + "/") for one in SHOWN) or strays(path)):
            return True
def namespaces():
    import ctypes
    return ctypes.CDLL(None, use_errno=True).unshare(0x10000000) == 0
attempt("it reads a file of the host", lambda: open(SECRET).read())
attempt("it sees the host's home folders", lambda: any(os.path.isdir(home) and strays(home) for home in HOMES))
attempt("it sees packages", lambda: any(map(os.listdir, HIDDEN)))
attempt("it writes to the system", lambda: open("/usr/workbench-probe", "w"))
attempt("it reaches the host's network by TCP", lambda: connect(socket.SOCK_STREAM))
attempt("it reaches the host's network by UDP", lambda: connect(socket.SOCK_DGRAM))
attempt("it reaches the host's abstract sockets", abstract)
attempt("it holds files that we have open", inherited)
attempt("it sees /sys", lambda: os.path.exists("/sys"))
attempt("it writes to /proc/sys", lambda: open("/proc/sys/kernel/shmmni", "r+"))
attempt("it sees other processes", others)
attempt("it reads our environment", environments)
attempt("it makes namespaces of its own", namespaces)
attempt("it gains rights", lambda: int(open("/proc/self/status").read().split("CapEff:")[1].split()[0], 16))
attempt("programs give it rights", lambda: "NoNewPrivs:\t0" in open("/proc/self/status").read())
attempt("it has no process limit", lambda: not 0 <= resource.getrlimit(resource.RLIMIT_NPROC)[1] <= 4096)
attempt("a daemon", daemon)
print(json.dumps(found), flush=True)
"""

HOLDING_MB, LIMIT_MB = 128, 64
"""MiB that each of `WAYS_TO_HOLD` takes, and the memory limit in MiB under which it runs."""

_HOLD = r"""
import ctypes, fcntl, os, socket, sys, time
print("began", flush=True)
SIZE, BLOCK, kept, libc = HOLDING, bytes(1 << 20), [], ctypes.CDLL(None, use_errno=True)
def must(code):
    if code < 0: raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return code
def write(file):
    kept.append(file)
    for _ in range(8): os.write(file, BLOCK)
def share(take):
    reader, writer = os.pipe()
    for _ in range(4):
        if os.fork() == 0:
            os.close(reader); take(SIZE // 4 << 20); os.write(writer, b"1"); os.close(writer); time.sleep(9); os._exit(0)
    os.close(writer)
    if len(b"".join(os.read(reader, 1) for _ in range(4))) < 4: sys.exit("not all of it")
def fill(pair):
    held = 0
    for end in pair:
        kept.append(end); end.setblocking(False); end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        try:
            while True: held += end.send(BLOCK[:1 << 16])
        except BlockingIOError: pass
    return held
WAY
print("took", flush=True); time.sleep(1); print("kept", flush=True)
"""

WAYS_TO_HOLD = {
    "in processes": "share(lambda size: kept.append(b'x' * size))",
    "in memfd": "for n in range(SIZE // 8): write(os.memfd_create('x'))",
    "in files of /tmp, /dev/shm, /dev or /": """
wanted = SIZE // 8
for folder in ("/tmp", "/dev/shm", "/dev", "/"):
    try:
        while wanted: write(os.open(f"{folder}/{wanted}", os.O_CREAT | os.O_RDWR)); os.close(kept.pop()); wanted -= 1
    except OSError as why: print(why)
if wanted: sys.exit(f"{wanted * 8} MiB less")
""",
    "in System V shared memory": """
libc.shmat.restype, libc.shmdt.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
for n in range(SIZE // 8):
    at = libc.shmat(must(libc.shmget(0, 8 << 20, 0o1600)), None, 0); ctypes.memset(at, 1, 8 << 20); libc.shmdt(at)
""",
    "in System V messages": """
message = ctypes.create_string_buffer(b"\1" + bytes(8191 + 8))
for n in range(SIZE * 64):
    queue = must(libc.msgget(0, 0o600))
    for _ in range(2): must(libc.msgsnd(queue, message, 8192, 0o4000))
""",
    "in System V semaphores": "for n in range(SIZE // 2): must(libc.semget(0, 32000, 0o600))",
    "in pipes": """
def take(size):
    for n in range(size >> 20):
        reader, writer = os.pipe(); fcntl.fcntl(writer, 1031, 1 << 20); os.write(writer, BLOCK)
share(take)
""",
    "in Unix sockets": """
def take(size):
    while size > 0: size -= fill(socket.socketpair())
share(take)
""",
    "in TCP connections": """
def take(size):
    server = socket.create_server(("127.0.0.1", 0))
    while size > 0: size -= fill((socket.create_connection(server.getsockname()), server.accept()[0]))
share(take)
""",
}
"""Way of taking memory beyond the limit → the code that does so, for `holding`."""


def holding(way: str) -> Program:
    """Make a program that takes `HOLDING_MB` under a limit of `LIMIT_MB` in one of `WAYS_TO_HOLD`, and prints "kept" if
    it can."""
    code = _HOLD.replace("HOLDING", str(HOLDING_MB)).replace("WAY", WAYS_TO_HOLD[way])
    return Program(code=code, run_timeout=_SECONDS, memory_limit_mb=LIMIT_MB)


def failures(sandbox: Any, tier: str) -> list[str]:
    """List why a tier of isolation cannot be used here: the programs that it lacks, or the escapes of its probe; [] if
    it can be used."""
    if lacking := missing(tier):
        return [f"needs {', '.join(lacking)}"]
    key = (tier, repr(sandbox.world), memory.place(), os.getpid())
    if key not in _known:
        _known[key] = _attempt(sandbox, tier)
    return _known[key]


_known: dict[tuple[str, str, Path | None, int], list[str]] = {}


def _attempt(sandbox: Any, tier: str) -> list[str]:
    canary = f"workbench-{os.urandom(8).hex()}"
    folders, abstract = tempfile.TemporaryDirectory(), socket.socket(socket.AF_UNIX)
    with socket.create_server(("127.0.0.1", 0)) as listener, folders as folder, abstract:
        abstract.bind("\0" + canary)
        abstract.listen()
        os.chmod(folder, 0o755)  # what hides the file must be the tier, not the file's rights
        secret = Path(folder) / "secret"
        secret.write_text(canary)
        world: World = sandbox.world
        settings = f"PORT={listener.getsockname()[1]}; SECRET={str(secret)!r}; CANARY={canary!r}\n"
        settings += f"HOMES={homes()!r}; SHOWN={world.shown!r}; HIDDEN={world.hidden!r}\n"
        os.environ["WORKBENCH_PROBE"] = canary
        try:
            result: Result = sandbox.execute_in(tier, Program(code=settings + ESCAPES, run_timeout=_SECONDS))
        finally:
            del os.environ["WORKBENCH_PROBE"]
    if result.status != "Success":
        return [f"its probe did not run ({result.why})"]
    try:
        escapes = json.loads(result.stdout)
    except ValueError:
        return ["its probe printed no readable result"]
    leaks = [name for name, escaped in escapes.items() if escaped]
    if result.run and result.run.left_behind:
        leaks.append("a daemon outlives its program")
    return leaks + _memory_leaks(sandbox, tier)


def _memory_leaks(sandbox: Any, tier: str) -> list[str]:
    with ThreadPoolExecutor(len(WAYS_TO_HOLD)) as threads:  # they mostly wait
        results = threads.map(lambda way: sandbox.execute_in(tier, holding(way)), WAYS_TO_HOLD)
    leaks = []
    for way, result in zip(WAYS_TO_HOLD, results, strict=True):
        if "kept" in result.stdout:
            leaks.append(f"it keeps {HOLDING_MB} MiB {way} under a limit of {LIMIT_MB}")
        elif "began" not in result.stdout:
            leaks.append(f"its probe of memory {way} did not run ({result.why})")
    return leaks
