"""Workspaces: files that stay, snapshots, what is written over; the command lines of containers, and real ones where there are."""

from __future__ import annotations

import asyncio
import gc
import io
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.patience import patience, within

from workbench.base.errors import SandboxError, SettingError
from workbench.sandbox import Containers, LocalSandbox, Workspace, Workspaces, boxes, containers, tiers


@pytest.fixture(scope="module", autouse=True)
def apart() -> Iterator[None]:
    """Folders of boxes of this file alone: those of other processes of the machine come and go."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        Path(folder).chmod(0o711)  # a box may be another user
        patch.setattr(tempfile, "tempdir", folder)
        yield


@pytest.fixture(scope="module", params=tiers.TIERS)
def box(request: pytest.FixtureRequest) -> LocalSandbox:
    try:
        return LocalSandbox(tier=request.param, memory_limit_mb=512)
    except SandboxError:
        pytest.skip(f"{request.param} does not pass its probe on this machine")


@pytest.fixture
def clean() -> Any:
    before = folders()
    yield
    gc.collect()
    assert within(lambda: folders() <= before), folders()


def folders() -> set[Path]:
    return {one for kind in ("box", "root") for one in Path(tempfile.gettempdir()).glob(f"workbench-{kind}-*")}


async def listed(workspace: Workspace) -> str:
    return (await workspace.run("find . -printf '%P %y %m\n' | sort")).stdout


def test_a_snapshot_is_the_files_as_they_were_links_and_rights_and_all(box: LocalSandbox, clean: None) -> None:
    async def work() -> None:
        workspace = await box.workspace({"a/b.txt": "hi", "run.sh": "#!/bin/sh\necho ran\n"})
        assert isinstance(box, Workspaces) and isinstance(workspace, Workspace)
        made = "ln -s /etc link; ln a/b.txt hard; mkfifo pipe; mkdir shut; touch shut/x; chmod 0 shut; head -c 9M /dev/zero > z"
        assert (await workspace.run(f"./run.sh; {made}")).stdout == "ran\n"
        saved, before = await workspace.snapshot(), await listed(workspace)
        assert "link l 777" in before and "pipe p" in before and "shut d" in before
        await workspace.run("rm -rf a link pipe z; mkdir link; echo x > hard; ls")
        assert await listed(workspace) != before
        await workspace.restore(saved)
        other = await workspace.copy()
        for one in (workspace, other):
            assert await listed(one) == before and await one.read("a/b.txt") == b"hi"
        await other.run("echo y > a/b.txt")
        assert await workspace.read("a/b.txt") == b"hi" and await other.read("a/b.txt") == b"y\n"
        assert await workspace.read("link/passwd") is None and await workspace.read("pipe") is None
        await workspace.restore(saved)
        for one in (workspace, other, other):
            await one.close()
        with pytest.raises(SandboxError, match="workspace of the sandbox is closed"):
            await workspace.run("ls")

    asyncio.run(work())


def test_what_is_written_replaces_whatever_was_there_and_follows_no_link(
    box: LocalSandbox, clean: None, tmp_path: Path
) -> None:
    async def work() -> None:
        for before in (
            f"ln -s {tmp_path} a",
            "touch a",
            "mkdir -p a/b/c",
            "mkfifo a",
            "mkdir a; ln -s ../x a/b",
            "mkdir -p a/b; chmod 0 a/b a",
        ):
            workspace = await box.workspace()
            await workspace.run(before)
            await workspace.write({"a/b": "new", "a/c/d": b"\0"})
            assert (
                await workspace.read("a/b") == b"new"
                and (await workspace.run("cat a/b; touch a/x a/c/e")).status == "Success"
            )
            with pytest.raises(SettingError, match="a relative path inside its folder"):
                await workspace.write({"a/../../x": "y"})
            await workspace.close()

    asyncio.run(work())
    assert list(tmp_path.iterdir()) == []


def test_commands_take_turns_and_a_cancelled_one_is_ended(box: LocalSandbox, clean: None) -> None:
    async def work() -> None:
        workspace = await box.workspace()
        both = [workspace.run("test -e busy && echo clash; touch busy; sleep 0.2; rm busy") for _ in range(2)]
        assert [one.stdout for one in await asyncio.gather(*both)] == ["", ""]
        task = asyncio.ensure_future(workspace.run("sleep 3600", seconds=3600))
        await asyncio.sleep(0.3)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await workspace.run("echo on", seconds=patience(10.0))).stdout == "on\n"
        await workspace.close()

    asyncio.run(work())


def test_what_is_left_beyond_the_disk_limit_is_told_at_once(clean: None) -> None:
    try:
        box = LocalSandbox(disk_limit_mb=8)
    except SandboxError as error:
        pytest.skip(str(error))

    async def work() -> None:
        workspace = await box.workspace()
        assert (await workspace.run("head -c 6M /dev/zero > a")).limit is None
        over = await workspace.run("cp a b")
        assert (over.limit, over.status) == ("disk", "Failed")
        assert (await workspace.run("rm b")).status == "Success"
        await workspace.close()

    asyncio.run(work())


def test_a_workspace_that_is_forgotten_is_removed(box: LocalSandbox) -> None:
    before = folders()
    workspace = asyncio.run(box.workspace({"a": "b"}))
    assert len(folders() - before) >= 1
    del workspace
    gc.collect()
    assert folders() <= before


AS_A_USER = """
import asyncio, ctypes, os, psutil
from workbench.sandbox import LocalSandbox
os.setgid(61998); os.setuid(61998)  # the modules are there: the user may not reach this Python
ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # its /proc is its own again, as after a start
async def main():
    box = LocalSandbox(tier="bubblewrap", python="/usr/bin/python3")
    workspace = await box.workspace({"a/b": "1"})
    await workspace.run("mkdir shut; touch shut/x; chmod 0 shut a/b a; ln -s /etc link")
    saved = await workspace.snapshot()
    await workspace.write({"a/b": "2", "shut/x": "3"})
    assert await workspace.read("a/b") == b"2"
    await workspace.run("rm -rf *")
    await workspace.restore(saved)
    assert await workspace.read("a/b") == b"1"
    await workspace.close()
    print("fine")
asyncio.run(main())
"""


@pytest.mark.slow
def test_a_user_who_is_not_root_has_the_same(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    code = Path(__file__).parents[2]
    ran = subprocess.run(
        [sys.executable, "-c", AS_A_USER],
        capture_output=True,
        text=True,
        cwd="/",
        env={"PYTHONPATH": str(code), "HOME": "/tmp"},
    )
    if "cannot be run safely here" in ran.stderr:
        pytest.skip("no tier of isolation works for that user")
    assert ran.stdout == "fine\n", ran.stderr


# --- containers --------------------------------------------------------------------------------


@pytest.fixture
def unasked(monkeypatch: pytest.MonkeyPatch) -> Containers:
    """`Containers` of an engine that was not asked whether it is there: its command lines alone are looked at."""
    monkeypatch.setattr(containers, "answering", lambda engine: engine or "podman")
    return Containers("swe/x:1", memory_limit_mb=256, disk_limit_mb=64, cpus=0.5, folder="/testbed")


def test_a_container_starts_without_network_rights_or_more_than_its_share(unasked: Containers) -> None:
    line = " ".join(unasked.start("swe/x:1", "name"))
    for wanted in (
        "--network none", "--cap-drop ALL", "--security-opt no-new-privileges", "--memory 256m --memory-swap 256m",
        "--cpus 0.5", "--pids-limit 256", "--pull=never", "--workdir /testbed", "--ulimit fsize=67108864", "size=64m",
    ):  # fmt: skip
        assert wanted in line
    assert "-v" not in unasked.start("swe/x:1", "name") and "--privileged" not in line and "--init" not in line
    asked = unasked.command("name", "echo $A; ls", {"A": "b c"})
    assert asked == [
        "exec",
        "--interactive",
        "--workdir",
        "/testbed",
        "--env",
        "A=b c",
        "name",
        "/bin/sh",
        "-c",
        "echo $A; ls",
    ]
    with tarfile.open(fileobj=io.BytesIO(containers._packed({"a/b.sh": "#!/bin/sh", "c": b"\0"}))) as archive:
        assert {one.name: (one.mode, one.size) for one in archive} == {"a/b.sh": (0o755, 9), "c": (0o644, 1)}
    with pytest.raises(SettingError, match="a relative path"):
        containers._packed({"/etc/passwd": ""})


def test_settings_of_containers(unasked: Containers) -> None:
    for wrong in ({"engine": "lxc"}, {"folder": "box"}, {"cpus": 0}, {"ready": 2}):
        with pytest.raises(SettingError):
            Containers(**wrong)
    with pytest.raises(SandboxError, match="image of a workspace; expected image="):
        asyncio.run(Containers().workspace())


def test_where_no_engine_answers_each_ones_reason_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SandboxError, match=r"podman: .*podman is not installed; docker: .*sandbox.local\(\)"):
        Containers("x")


IMAGE = os.environ.get("WORKBENCH_TEST_IMAGE", "")


@pytest.mark.slow
def test_a_real_container_keeps_saves_and_restores_its_files() -> None:
    try:
        engine = containers.answering()
    except SandboxError as error:
        pytest.skip(str(error))
    if not IMAGE:
        pytest.skip("WORKBENCH_TEST_IMAGE names no local image with /bin/sh")
    many = Containers(IMAGE, engine=engine, ready=1)

    async def work() -> None:
        workspace = await many.workspace({"a/b.txt": "hi"})
        assert (await workspace.run("cat a/b.txt; echo x > /etc/mine; sleep 900 & echo $!")).stdout.startswith("hi")
        saved = await workspace.snapshot()
        assert (await workspace.run("rm -rf a /etc/mine; sleep 60", seconds=1.0)).limit == "time"
        await workspace.restore(saved)
        assert (await workspace.run("cat a/b.txt /etc/mine; ls /proc | grep -c '^[0-9]'")).stdout.startswith("hix\n")
        other = await workspace.copy()
        assert await other.read("a/b.txt") == b"hi" and await other.read("missing") is None
        assert (await other.run("ping -c1 127.0.0.2 || true; cat < /dev/tcp/1.1.1.1/80")).status == "Failed"
        await other.close()
        await workspace.close()

    asyncio.run(work())


def test_folders_are_copied_whole_or_not_at_all(tmp_path: Path) -> None:
    with pytest.raises(SandboxError, match="could not be copied"):
        boxes.copied(tmp_path / "missing", tmp_path / "new")
    assert not (tmp_path / "new").exists()
