"""Memory of the process: one arena of malloc for all threads, and what is freed goes back."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import ctypes, sys, threading
from workbench.base import memory
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.fopen.restype, libc.fopen.argtypes = ctypes.c_void_p, [ctypes.c_char_p, ctypes.c_char_p]
libc.malloc_info.argtypes, libc.fclose.argtypes = [ctypes.c_int, ctypes.c_void_p], [ctypes.c_void_p]
if sys.argv[1] == "share":
    memory.share_arena()
wait = threading.Barrier(5)
def take():
    wait.wait()
    libc.malloc(1000)
    wait.wait()
for _ in range(4):
    threading.Thread(target=take, daemon=True).start()
wait.wait()
wait.wait()
file = libc.fopen(sys.argv[2].encode(), b"w")
libc.malloc_info(0, file)
libc.fclose(file)
print(open(sys.argv[2]).read().count("<heap nr="))
"""

BLOCKS = """
import ctypes, sys
from workbench.base import memory
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
if sys.argv[1] == "separate":
    memory.separate_blocks()
libc.free(libc.malloc(8 << 20))  # glibc moves its own border up to the largest block that was freed
held = []
for _ in range(64):
    held.append((libc.malloc(2 << 20), libc.malloc(256)))
    ctypes.memset(held[-1][0], 1, 2 << 20)
before = memory.resident()
for large, _ in held[:-1]:
    libc.free(large)
print(before - memory.resident())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc")
def test_large_blocks_go_back_though_small_ones_lie_between_them() -> None:
    """126 MiB go back at once; glibc alone keeps them, as it does where the environment sets its malloc."""

    def returned(way: str, **env: str) -> int:
        mine = {name: one for name, one in os.environ.items() if name != "GLIBC_TUNABLES" and "MALLOC_" not in name}
        mine |= {"PYTHONPATH": os.pathsep.join(sys.path), **env}
        command = [sys.executable, "-c", BLOCKS, way]
        return int(subprocess.run(command, env=mine, capture_output=True, text=True, check=True, timeout=120).stdout)

    assert returned("separate") > 120 << 20
    assert returned("plain") < 10 << 20
    assert returned("separate", GLIBC_TUNABLES="") < 10 << 20


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc")
def test_threads_share_an_arena_unless_the_environment_says_how_many(tmp_path: Path) -> None:
    """One arena is shared; each thread has its own without, or where `MALLOC_ARENA_MAX` is the user's."""

    def arenas(way: str, **env: str) -> int:
        mine = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **env}
        command = [sys.executable, "-c", SCRIPT, way, str(tmp_path / "info.xml")]
        return int(subprocess.run(command, env=mine, capture_output=True, text=True, check=True, timeout=120).stdout)

    assert arenas("share") == 1 < arenas("plain")
    assert arenas("share", MALLOC_ARENA_MAX="3") == 3
