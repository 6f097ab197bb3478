"""The doctor: every finding provoked; a check that hangs, dies or raises; nothing in a report that names a machine or its user."""

from __future__ import annotations

import getpass
import json
import os
import shutil
import socket
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.attention
from support import warm_starts

import workbench as wb
from workbench import cli
from workbench.base.errors import EngineError, SandboxError, SettingError
from workbench.cluster.status import unproven
from workbench.jobs import cards, machine
from workbench.jobs import doctor as doctors
from workbench.jobs.machine import OK, SKIPPED, WARNING, WRONG, CheckResult, clean

GIB = 1 << 30


def usage(free: int) -> Any:
    return lambda path: shutil._ntuple_diskusage(100 * GIB, 100 * GIB - free, free)


def refusing(*given: Any, **named: Any) -> Any:
    raise OSError("refused")


# --- the machine ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("package", "version", "state", "said", "do"),
    [
        ("pyarrow", None, WARNING, "not installed: pyarrow", "does not work without: parquet files, recorded runs"),
        ("transformers", None, WRONG, "not installed: transformers", "pip install transformers"),
        ("torch", "2.9.1", WARNING, "torch 2.9.1 (tested: >=2.11)", "the checks below say"),
        ("ray", None, OK, "optional and not installed: ray (for wb.cluster; pip install 'rl-workbench[all]')", ""),
    ],
)
def test_packages(
    package: str, version: str | None, state: str, said: str, do: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert machine.packages().state == OK
    before = machine.version_of
    monkeypatch.setattr(machine, "version_of", lambda name: version if name == package else before(name))
    found = machine.packages()
    assert found.state == state and said in found.found and found.do.startswith(do)


class Card:
    """A pretended GPU in torch.cuda."""

    def __init__(
        self, patch: pytest.MonkeyPatch, *, free: float = 79, arch: str = "sm_90", driver: str = "13.0"
    ) -> None:
        card = SimpleNamespace(name="NVIDIA H100", major=9, minor=0)
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "device_count", lambda: 1)
        patch.setattr(torch.cuda, "get_device_properties", lambda number: card)
        patch.setattr(torch.cuda, "mem_get_info", lambda number=0: (int(free * GIB), 80 * GIB))
        patch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_80", arch])
        patch.setattr(torch.version, "cuda", "13.0")
        patch.setattr(machine, "cuda_of_driver", lambda: driver)
        self.total = 1024.0
        patch.setattr(torch, "ones", lambda *shape, device: SimpleNamespace(sum=lambda: self.total))


@pytest.mark.parametrize(
    ("capability", "memory", "shared", "lacks", "fits"),
    [
        ((7, 5), 14.6, 64, ["no bfloat16", "no flash kernel", "64 KiB of shared memory"], "3B LoRA"),
        ((8, 0), 40, 163, [], "1.5B whole, 8B LoRA"),
        ((9, 0), 80, 227, [], "3B whole, 8B LoRA"),
    ],
)
def test_what_a_card_has_not_is_a_fact_and_the_estimate_says_what_fits(
    capability: tuple[int, int],
    memory: float,
    shared: int,
    lacks: list[str],
    fits: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ones = torch.ones
    Card(monkeypatch, arch=f"sm_{capability[0]}{capability[1]}")
    monkeypatch.setattr(
        torch, "ones", lambda *shape, **kind: ones(*shape) if "cuda" in str(kind) else ones(*shape, **kind)
    )
    sizes = {"major": capability[0], "minor": capability[1], "shared_memory_per_block_optin": shared << 10}
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: SimpleNamespace(name="card", **sizes))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda number=0: (int(memory * GIB), int(memory * GIB)))
    found = cards.models()
    assert found.state == OK and found.do == unproven() and fits in found.found
    assert ("; float16" in found.found) == (lacks != []) and all(one in found.found for one in lacks)
    assert machine.devices().state == OK, "nor is the device wrong"
    assert not lacks or "8B with a 4-bit base" in found.found


@pytest.mark.parametrize(
    ("capability", "kernel", "half"), [((7, 5), "EFFICIENT", "float16"), ((9, 0), "FLASH", "bfloat16")]
)
def test_attention_is_tried_as_the_card_has_it(
    capability: tuple[int, int], kernel: str, half: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    used, kinds, drawn = list[str](), set[str](), torch.randn

    def within(backend: Any) -> Any:
        used.append(backend.name)
        return nullcontext()

    def randn(*shape: int, device: str, dtype: torch.dtype) -> torch.Tensor:
        kinds.add(str(dtype))
        return drawn(*shape, dtype=dtype)

    Card(monkeypatch)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.nn.attention, "sdpa_kernel", within)
    monkeypatch.setattr(torch, "randn", randn)
    found = machine.attention()
    assert found.state == OK and kinds == {f"torch.{half}"} and used == ["MATH", f"{kernel}_ATTENTION"]


def test_a_gpu_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    Card(monkeypatch)
    found = machine.devices()
    assert found.state == OK and "0: NVIDIA H100, 79.00 GiB of 80.00 GiB free, sm_90" in found.found and not found.do


@pytest.mark.parametrize(
    ("card", "state", "do"),
    [
        ({"free": 40}, WARNING, "other processes hold memory of GPU 0"),
        ({"arch": "sm_120"}, OK, ""),  # sm_80 is no help, and PTX is not there
        ({"driver": "12.4"}, WARNING, "older than torch's CUDA 13.0"),
    ],
)
def test_a_gpu_with_a_flaw(card: dict[str, Any], state: str, do: str, monkeypatch: pytest.MonkeyPatch) -> None:
    Card(monkeypatch, **card)
    found = machine.devices()
    if "arch" in card:
        assert found.state == WRONG and "no code for NVIDIA H100" in found.do
    else:
        assert found.state == state and do in found.do


def test_a_gpu_that_adds_up_wrongly(monkeypatch: pytest.MonkeyPatch) -> None:
    Card(monkeypatch).total = 1023.0
    assert machine.devices().state == WRONG and "computes wrong sums" in machine.devices().do


def test_which_code_runs_on_which_gpu() -> None:
    for capability, built, runs in (
        ((9, 0), ["sm_80", "sm_90"], True), ((8, 9), ["sm_80"], True), ((9, 0), ["sm_80"], False), ((12, 0), ["compute_90"], True),
        ((8, 0), ["sm_86"], False), ((9, 0), ["sm_90a"], True), ((9, 0), ["gfx942"], True),
    ):  # fmt: skip
        assert machine.runs_on(capability, built) is runs, (capability, built)


@pytest.mark.parametrize(
    ("built", "do"), [(None, "install the CUDA build of torch"), ("13.0", "a driver for CUDA 13.0")]
)
def test_a_driver_without_a_gpu_for_torch(built: str | None, do: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", built)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(machine, "cuda_of_driver", lambda: "12.8")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    found = machine.devices()
    assert found.state == WRONG and do in found.do and (built is None or "CUDA_VISIBLE_DEVICES=''" in found.found)
    monkeypatch.setattr(machine, "cuda_of_driver", lambda: None)
    monkeypatch.setattr(machine, "half_gain", lambda: 4.2)
    assert machine.devices().state == OK and "the CPU" in machine.devices().found
    assert "bfloat16 are 4.2 times as fast" in machine.devices().found
    monkeypatch.setattr(machine, "half_gain", lambda: 0.5)
    assert machine.devices().found.endswith("bfloat16 are 0.5 times as fast as float32's: leave dtype at float32")


def test_memory_and_shared_memory_and_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.memory, "total", lambda: 64 * GIB)
    for free, state in ((32 * GIB, OK), (2 * GIB, WARNING), (GIB // 2, WRONG)):
        monkeypatch.setattr(machine.memory, "available", lambda free=free: free)
        assert machine.host_memory().state == state
    monkeypatch.setattr(machine, "speeds", lambda folder: (1 << 30, 0.001))
    for free, small, large in ((64 << 20, WRONG, WARNING), (GIB, WARNING, WARNING), (50 * GIB, OK, OK)):
        monkeypatch.setattr(shutil, "disk_usage", usage(free))
        assert machine.shared_memory().state == small and machine.disk().state == large
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert machine.shared_memory().state == WRONG and "closed to this user" in machine.shared_memory().found
    monkeypatch.setattr(machine, "speeds", lambda folder: (1 << 20, 0.001))
    assert machine.disk().state == WARNING and "is slow" in machine.disk().do
    monkeypatch.setattr(shutil, "disk_usage", refusing)
    assert machine.shared_memory().state == WRONG and "mount it" in machine.shared_memory().do
    assert machine.disk().state == WRONG and "make it writable" in machine.disk().do


def test_a_disk_is_measured_by_real_writes(tmp_path: Path) -> None:
    speed, sync = machine.speeds(str(tmp_path), size=1 << 20)
    assert speed > 0 and sync > 0 and not list(tmp_path.iterdir())


def test_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine.ports().state in (OK, WARNING)
    monkeypatch.setattr(socket, "getaddrinfo", refusing)
    monkeypatch.setattr(socket, "create_connection", lambda where, seconds: socket.socket().__class__())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "create_server", refusing)
        assert machine.ports().state == WRONG and "allow connections" in machine.ports().do


def test_a_machine_that_does_not_know_its_own_name(monkeypatch: pytest.MonkeyPatch) -> None:
    known = socket.getaddrinfo
    mine = lambda host, *more, **named: refusing() if host == socket.gethostname() else known(host, *more, **named)  # noqa: E731
    monkeypatch.setattr(socket, "getaddrinfo", mine)
    assert machine.ports().state == WARNING and "GLOO_SOCKET_IFNAME" in machine.ports().do


def test_a_sum_of_ranks_that_is_wrong(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda tensor: tensor.mul_(3))
    with pytest.raises(ArithmeticError, match=r"1 ranks to 3\.0 instead of 1\.0"):
        machine.all_reduce(0, 1, "gloo", f"file://{tmp_path}/store")


@pytest.mark.slow
def test_two_ranks_add_up() -> None:
    assert machine.collectives() == CheckResult(OK, "all-reduce over gloo: 2 ranks")


def test_what_is_not_there_is_skipped_or_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*given: Any) -> Any:
        raise SandboxError("model code cannot be run safely here")

    monkeypatch.setattr(machine, "LocalSandbox", none)
    assert machine.sandbox().state == WARNING and "bubblewrap" in machine.sandbox().do
    monkeypatch.setattr(machine, "LocalSandbox", lambda: SimpleNamespace(run=lambda code: SimpleNamespace(stdout="", status="Failed"), describe=lambda: "local"))  # fmt: skip
    assert machine.sandbox().state == WRONG

    def busy(**given: Any) -> Any:
        raise EngineError("starting a local cluster failed")

    monkeypatch.setattr(machine, "connect", busy)
    assert machine.ray().state == WARNING and "ray stop" in machine.ray().do
    monkeypatch.setattr(machine, "version_of", lambda name: None)
    monkeypatch.setattr(machine.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(machine.util, "find_spec", lambda name: None)
    assert machine.ray().state == SKIPPED and machine.attention().state == SKIPPED
    monkeypatch.setattr(machine, "version_of", lambda name: "2.8.3")
    assert machine.attention().state == WARNING
    monkeypatch.setattr(machine, "importable", lambda python: False)
    assert machine.vllm_engine().state == SKIPPED


# --- the self-test --------------------------------------------------------------------------------


@pytest.mark.slow
def test_this_machine_steps_pushes_and_saves() -> None:
    for check in (machine.step, machine.numbers, machine.push, machine.saves):
        found = check()
        assert found.state == OK, (check.__name__, found)
    assert "32 rows" in machine.step().found


@pytest.mark.slow
def test_other_numbers_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def off(**settings: Any) -> Any:
        engine = opened(**settings)
        with torch.no_grad():
            next(engine._model.parameters()).mul_(1.01)
        return engine

    opened = machine.opened
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine, "opened", off)
        assert machine.numbers().state == WRONG and "TF32" in machine.numbers().do
    monkeypatch.setattr(machine, "push_once", lambda pair: "")  # the way that pushes nothing
    assert machine.push().state == WRONG and "version 0 of 1" in machine.push().found


@pytest.mark.slow
def test_a_snapshot_that_does_not_come_back_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(machine.opened()), "restore", lambda engine, kept: None)
    found = machine.saves()
    assert found.state == WRONG and found.found.startswith("not as before: a snapshot")


@pytest.mark.parametrize(("gap", "state"), [(0.9, WRONG), (float("nan"), WRONG), (0.01, OK)])
def test_a_step_whose_log_probs_are_apart(gap: float, state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "QUESTIONS", machine.QUESTIONS[:1])
    monkeypatch.setattr(machine, "gap_of", lambda *given: gap)
    assert machine.step().state == state


# --- checks that hang, end their process, raise ---------------------------------------------------


def fine() -> CheckResult:
    return CheckResult(OK, "fine")


def hangs() -> CheckResult:
    time.sleep(600)
    return fine()


def dies() -> CheckResult:
    os.write(2, b"NCCL says no\n")
    os._exit(3)


def raises() -> CheckResult:
    raise ValueError(f"no model in {tempfile.gettempdir()}/secret-folder/model with hf_abcdefghijklmnopq")


def refuses() -> CheckResult:
    raise EngineError("no model", do="name another")


def lacks() -> CheckResult:
    raise ModuleNotFoundError("No module named 'psutil'", name="psutil")


@pytest.mark.slow
def test_no_check_stops_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("fine", "raises", "refuses", "lacks", "hangs", "after", "dies", "last")
    functions = {"after": "fine", "last": "fine"}
    table = {name: (f"{__name__}:{functions.get(name, name)}", 2 if name == "hangs" else 60) for name in names}
    monkeypatch.setattr(doctors, "CHECKS", table)
    said: list[str] = []
    found = wb.doctor(say=said.append)
    assert [one.name for one in found.findings] == list(names) and len(said) == len(names)
    assert [one.state for one in found.findings] == [OK, WRONG, WRONG, WARNING, WRONG, OK, WRONG, OK]
    assert not found and "4 wrong, 1 warning, 3 ok" in found.title
    assert found["hangs"].found == "hangs: no answer in 2 s" and 2 <= found["hangs"].seconds < 20
    assert found["dies"].found == "ended its process (exit code 3); it said: NCCL says no"
    assert found["raises"].found.startswith("ValueError: no model in …/model with •••")
    assert found["raises"].do == "attach this report to an issue" and found["lacks"].do == "pip install psutil"
    assert "name another" in found["refuses"].found and not found["refuses"].do
    assert tempfile.gettempdir() not in repr(found)
    with warm_starts.cold():
        assert wb.doctor(only=["fine"], say=None)


def test_the_command_and_its_report(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any) -> None:
    def carried_out(names: Any) -> Any:
        return (CheckResult(WRONG if name == "disk" else OK, "as it <is>", "do", name, 1.0) for name in names)

    monkeypatch.setattr(doctors, "_carried_out", carried_out)
    report = tmp_path / "doctor.json"
    assert cli.main(["doctor", "--only", "ports", "memory", "-o", str(report)]) == 0
    out = capsys.readouterr().out
    assert "✓ ports: as it <is>" in out and "workbench doctor: 2 ok in 2 s" in out
    assert cli.main(["doctor", "--without", "vllm"]) == 1 and "✗ disk" in capsys.readouterr().out
    assert cli.main(["doctor", "--only", "port"]) == 2 and "did you mean 'ports'" in capsys.readouterr().err
    written = json.loads(report.read_text())
    assert [one["name"] for one in written["findings"]] == ["memory", "ports"] and written["about"]["torch"]
    assert socket.gethostname() not in report.read_text() and str(Path.home()) not in report.read_text()
    shown = wb.doctor(only=["disk"], say=None)
    assert "as it &lt;is&gt;" in shown.html() and "✗ disk: as it <is>\n    → do" in repr(shown)
    assert shown.records()[0]["state"] == WRONG
    with pytest.raises(SettingError, match="check"):
        shown["disc"]


def test_what_a_report_says_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "node-17.cluster")
    monkeypatch.setattr(getpass, "getuser", lambda: "ada")
    environ = {"MY_API_KEY": "swordfish-1", "PATH": "/usr/bin"}
    for text, expected in (
        ("cannot read /data/users/ada/models/qwen/config.json", "cannot read …/config.json"),
        ("/dev/shm has 64 MiB, see /proc/meminfo", "/dev/shm has 64 MiB, see /proc/meminfo"),
        ("~/runs/a of ada on node-17.cluster", "…/a of <user> on <host>"),
        ("'/opt/x' and ('/opt/y',)", "'…/x' and ('…/y',)"),
        ("sent swordfish-1, Bearer abc.def and hf_AbCdEfGhIjKlMn", "sent •••, Bearer ••• and •••"),
        ("10.1.2.3:6379 and 127.0.0.1:80, driver 580.159.04", "<address>:6379 and 127.0.0.1:80, driver 580.159.04"),
        ("see https://example.org/a/b, 3/4 of it", "see https://example.org/a/b, 3/4 of it"),
        ("adamant", "adamant"),
    ):
        assert clean(text, environ) == expected


@pytest.mark.slow
@pytest.mark.long
def test_the_whole_doctor_on_this_machine() -> None:
    found = wb.doctor(say=None)
    assert [one.name for one in found.findings] == list(doctors.CHECKS)
    assert not [one for one in found.having(WRONG) if one.name != "ray"], (
        found
    )  # Ray's own start has a limit of seconds
