"""A program's whole memory is limited, in whatever way it takes it, in each tier that is there, with a control group and without."""

from __future__ import annotations

import errno
import os
import platform
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from support.patience import patience, within

from workbench.base.errors import SandboxError
from workbench.sandbox import LocalSandbox, memory, tiers

REFUSED = "Function not implemented"
KINDS = [("bubblewrap", "counted"), ("bubblewrap", "measured"), ("namespaces", "counted"), ("namespaces", "measured")]


@pytest.fixture(scope="module", params=KINDS, ids=" ".join)
def box(request: pytest.FixtureRequest) -> Iterator[LocalSandbox]:
    tier, how = request.param
    if how == "counted" and memory.place() is None:
        pytest.skip("no control group can be made here")
    with pytest.MonkeyPatch.context() as patch:
        if how == "measured":
            patch.setattr(memory, "place", lambda: None)
        try:
            made = LocalSandbox(tier=tier, memory_limit_mb=256)
        except SandboxError as error:
            pytest.skip(str(error))
        assert ("counted by the kernel" in made.describe()) == (how == "counted")
        yield made


@pytest.mark.parametrize("way", tiers.WAYS_TO_HOLD)
def test_no_way_of_taking_memory_goes_beyond_the_limit(box: LocalSandbox, way: str) -> None:
    result = box.run(tiers.holding(way))
    assert "began" in result.stdout and "kept" not in result.stdout and result.status == "Failed", result
    if way.startswith(("in memfd", "in System V")) and memory.filter_of_calls():
        assert REFUSED in result.why
    elif memory.place() and way not in ("in TCP connections", "in Unix sockets"):  # those get no larger buffers
        assert result.limit == "memory" and result.why == "memory limit while running"
    else:
        assert result.limit in ("memory", None) and result.why != "ran"


@pytest.mark.slow
def test_what_is_shared_by_processes_counts_once(box: LocalSandbox) -> None:
    code = "import os, time\nx = b'x' * (100 << 20)\nfor _ in range(4):\n    if not os.fork(): time.sleep(0.5); os._exit(0)\n"
    result = box.run(code + "for _ in range(4): os.wait()\nprint('ran')", run_timeout=patience(10.0))
    assert result.stdout == "ran\n" and result.limit is None, result


def test_shared_memory_and_pools_of_python_work(box: LocalSandbox) -> None:
    code = """
from multiprocessing import Pool, shared_memory
block = shared_memory.SharedMemory(create=True, size=1 << 20)
block.buf[:2] = b"ab"
again = shared_memory.SharedMemory(block.name)
with Pool(2) as pool: print(bytes(again.buf[:2]), pool.map(abs, [-1, 2]), open("/dev/stdin").read())
block.unlink()
"""
    assert box.run(code, stdin="in", run_timeout=patience(10.0)).stdout == "b'ab' [1, 2] in\n"


def test_a_full_tmp_is_the_disks_limit(box: LocalSandbox) -> None:
    code = "for n in range(9): open(f'/tmp/{n}', 'wb').write(bytes(9 << 20))"
    result = box.run(code, memory_limit_mb=1024)
    assert result.status == "Failed" and result.limit == "disk" and "disk" in result.why


def test_the_filter_refuses_the_kernels_other_doors(box: LocalSandbox) -> None:
    if memory.filter_of_calls() is None:
        pytest.skip("no filter for this processor")
    column = memory._ARCHITECTURES[platform.machine()][1]
    numbers = {name: numbers[column] for name, numbers in memory._REFUSED.items()}
    code = f"""
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
def allowed(number): return libc.syscall(number, 0, 0, 0, 0, 0) >= 0 or ctypes.get_errno() not in {(errno.ENOSYS, errno.EOPNOTSUPP)}
print([name for name, number in {numbers}.items() if allowed(number)], libc.prctl({memory._SET_SECCOMP}, 2, 0))
"""
    assert box.run(code).stdout == "[] -1\n"


def test_only_sockets_of_its_own_network_can_be_made(box: LocalSandbox) -> None:
    code = """
import errno, socket
for family in (1, 2, 10, 16, 17, 21, 29, 38, 40):
    try: socket.socket(family, socket.SOCK_DGRAM if family != 38 else socket.SOCK_SEQPACKET); print(family)
    except OSError as error: assert error.errno == errno.EAFNOSUPPORT, (family, error)
netlink = socket.socket(16, socket.SOCK_RAW, 0)
before = netlink.getsockopt(1, socket.SO_RCVBUF)
netlink.setsockopt(1, socket.SO_RCVBUF, 32 << 20)
assert netlink.getsockopt(1, socket.SO_RCVBUF) == before
"""
    result = box.run(code)
    assert result.stdout.split() == ["1", "2", "10", "16"] and result.status == "Success", result


def test_a_program_is_never_ended_later_than_its_trainer_by_a_short_machine(box: LocalSandbox) -> None:
    code = """
import os
file = os.open("/proc/self/oom_score_adj", os.O_RDWR)
for score in range(-1000, OURS, 100):
    try: os.write(file, b"%d" % score); print("lowered to", score)
    except PermissionError: pass
print(os.pread(file, 9, 0).decode())
"""
    ours = int(Path("/proc/self/oom_score_adj").read_text())
    assert box.run(code.replace("OURS", str(ours))).stdout.split() == ["1000"]


FORGETS = """
import ctypes, os, time
libc = ctypes.CDLL(None)
libc.prctl(1, 0, 0, 0, 0)
libc.prctl(15, b"forgets-MARK", 0, 0, 0)
if os.fork() == 0: time.sleep(0.2); os.kill(0, 9)
os.setsid()
for n in (0, 1, 2): os.close(n)
time.sleep(3600)
"""


@pytest.mark.slow
def test_a_program_that_forgets_its_parents_death_and_leaves_its_session_ends(box: LocalSandbox) -> None:
    mark = os.urandom(2).hex()
    box.run(FORGETS.replace("MARK", mark), run_timeout=1.0)

    def living() -> list[psutil.Process]:
        found = psutil.process_iter(["name", "status"])
        return [one for one in found if mark in one.info["name"] and one.info["status"] != psutil.STATUS_ZOMBIE]

    assert within(lambda: not living()), living()


@pytest.mark.slow
def test_without_a_group_and_a_filter_namespaces_are_not_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    if tiers.missing("namespaces"):
        pytest.skip(f"needs {tiers.missing('namespaces')}")
    monkeypatch.setattr(memory, "place", lambda: None)
    monkeypatch.setattr(memory, "filter_of_calls", lambda: None)
    monkeypatch.setattr(tiers, "WAYS_TO_HOLD", {way: tiers.WAYS_TO_HOLD[way] for way in ("in memfd", "in pipes")})
    monkeypatch.setattr(tiers, "_known", {})
    with pytest.raises(SandboxError, match="namespaces: it keeps 128 MiB in memfd under a limit of 64"):
        LocalSandbox(tier="namespaces")


# --- control groups -----------------------------------------------------------------------------

MOUNTS = """\
30 25 0:26 / {root}/memory rw,relatime - cgroup cgroup rw,memory
31 25 0:27 / {root}/pids rw,relatime - cgroup cgroup rw,pids
32 25 0:28 /docker/a {root}/second rw,nosuid,nodev,noexec,relatime shared:4 - cgroup2 cgroup2 rw,nsdelegate
"""


def test_groups_of_both_versions_are_found(tmp_path: Path) -> None:
    deep = tmp_path / "second" / "user" / "app" / "mine"
    deep.mkdir(parents=True)
    for folder, shared in (
        (deep, ""),
        (deep.parent, "cpu memory pids"),
        (deep.parents[1], "cpu"),
        (deep.parents[2], "memory"),
    ):
        (folder / "cgroup.subtree_control").write_text(shared)
    mounts = MOUNTS.format(root=tmp_path)
    found = list(memory._folders("4:cpu,memory:/a/b\n0::/docker/a/user/app/mine\n", mounts))
    assert found == [tmp_path / "memory/a/b", deep.parent, deep.parents[2]]
    assert list(memory._folders("0::/elsewhere\n", mounts)) == []


def test_a_group_of_version_2_is_limited_and_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Path.mkdir

    def mkdir(path: Path) -> None:  # as the kernel does
        made(path)
        for name in ("memory.max", "memory.swap.max", "memory.oom.group", "cgroup.procs"):
            (path / name).touch()
        (path / "memory.events").write_text("low 0\nhigh 0\nmax 3\noom 0\noom_kill 0\noom_group_kill 0\n")

    monkeypatch.setattr(Path, "mkdir", mkdir)
    group = memory.ControlGroup(tmp_path, 64)
    written = {name: (group.path / name).read_text() for name in ("memory.max", "memory.swap.max", "memory.oom.group")}
    assert written == {"memory.max": str(64 << 20), "memory.swap.max": "0", "memory.oom.group": "1"}
    assert not group.met()
    (group.path / "memory.events").write_text("low 0\nhigh 0\nmax 3\noom 1\noom_kill 1\noom_group_kill 1\n")
    assert group.met()


def test_groups_whose_maker_is_dead_are_removed_at_the_next_start() -> None:
    where = memory.place()
    if where is None:
        pytest.skip("no control group can be made here")
    dead = where / "workbench-99999999-00"
    dead.mkdir()
    memory.place.cache_clear()
    assert memory.place() == where and not dead.exists()


def test_a_group_that_cannot_be_made_is_the_sandboxs_error_not_the_programs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    box = LocalSandbox(allow_unsafe=True)
    monkeypatch.setattr(memory, "place", lambda: tmp_path / "gone")
    result = box.run("print(1)")
    assert result.status == "SandboxError" and "cannot make a control group" in result.why
