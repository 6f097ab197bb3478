"""The doctor's checks: what this machine has, and whether a small model works on it. Each returns a `CheckResult`; `jobs.doctor` runs them.

A model of three megabytes steps, is pushed, saved, restored and sharded on this machine's devices. The numbers that it must give
are those of a batch that was recorded on another machine, those of the CPU, or those of one process.
"""

from __future__ import annotations

import ctypes
import getpass
import importlib
import os
import re
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import util
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from workbench.base import memory
from workbench.base.distribution import install, required, version, version_of
from workbench.base.errors import EngineError, SandboxError
from workbench.base.memory import gib
from workbench.base.metrics import reduce
from workbench.base.shown import HIDDEN, SECRET
from workbench.cluster.session import connect
from workbench.dataproto.core import DataProto
from workbench.datasets.rows import rows
from workbench.engines import paired
from workbench.engines.fsdp_engine.engine import fsdp
from workbench.engines.local_engine.engine import local
from workbench.engines.paired import check_push
from workbench.engines.protocol import Request, SamplingSettings
from workbench.engines.vllm_server.engine import VllmSettings, importable, interpreter, vllm
from workbench.engines.weights import weights_of
from workbench.jobs import starter
from workbench.recipes import grpo
from workbench.sandbox.local import LocalSandbox
from workbench.stages.rollout import columns_of
from workbench.stages.update import PolicyLoss, Update
from workbench.steps.stepper import Stepper
from workbench.steps.tune import FAST, half_gain

OK, SKIPPED, WARNING, WRONG = "ok", "skipped", "warning", "wrong"
"""States of findings; the later in the alphabet, the worse."""
NEEDED = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "huggingface_hub")
"""Packages without which nothing works. Without any other something is missing, which `LOST` says."""
LOST = {
    "pandas": "tables, recorded runs",
    "pyarrow": "parquet files, recorded runs",
    "matplotlib": "figures",
    "fsspec": "runs at an address",
    "cloudpickle": "reward functions of a notebook in processes of their own",
    "anywidget": "live views in a notebook",
    "ipywidgets": "live views in a notebook",
    "traitlets": "live views in a notebook",
    "papermill": "workbench train, sweep",
    "nbclient": "workbench train, sweep",
    "nbformat": "workbench train, sweep, report",
    "nbconvert": "workbench report",
    "bleach": "workbench report",
    "ipykernel": "workbench train, sweep, report",
    "jupyterlab": "make lab",
    "ray": "wb.cluster",
    "psutil": "wb.cluster",
    "pydantic": "judges",
    "httpx": "engines, judges and sandboxes over HTTP",
    "tensorboard": "TensorBoard events",
    "prometheus-client": "the health page in Prometheus' format",
    "markdown-it-py": "Markdown and formulas in transcripts",
    "latex2mathml": "formulas in transcripts",
    "pygments": "coloured code in transcripts",
    "math-verify": "the scorer math_verify",
    "tensordict": "to_tensordict, from_tensordict",
    "peft": "LoRA",
    "gguf": "models saved as GGUF",
    "bitsandbytes": "optimizer='adamw8bit'",
    "mcp": "tools of MCP servers",
}
"""What does not work without a package; everything else does."""
LEAST_HOST, LEAST_SHM, LEAST_DISK = 4 << 30, 2 << 30, 20 << 30
"""Bytes below which host memory, /dev/shm and a disk get a warning."""
SLOW_DISK, SLOW_SYNC = 50 << 20, 0.05
"""Bytes a second, and seconds of one fsync: a disk that is slower gets a warning."""
CLOSE = 2e-2
"""Largest difference of two ways to compute attention in bfloat16, of values around 1."""


@dataclass(frozen=True)
class CheckResult:
    """The result of one check: its state, what was found, and what to do where that is not as it should be."""

    state: str
    """`ok`, `warning`, `wrong`, or `skipped`: there is nothing to check here."""
    found: str
    do: str = ""
    name: str = ""
    seconds: float = 0.0


def judged(found: str, *flaws: tuple[bool, str, str]) -> CheckResult:
    """Return the finding of the first flaw that is present, else an `OK` one. A flaw is (whether it is present, its
    state, what to do).
    """
    return next((CheckResult(state, found, do) for there, state, do in flaws if there), CheckResult(OK, found))


def packages() -> CheckResult:
    """Check installed packages against the version ranges that this workbench is tested with."""
    lacking, others = [], []
    for requirement in required():
        there = version_of(requirement.name)
        if there is None:
            lacking.append(requirement.name)
        elif not requirement.specifier.contains(there, prereleases=True):
            others.append(f"{requirement.name} {there} (tested: {requirement.specifier})")
    facts = [f"workbench {version()}, torch {torch.__version__}"]
    facts += [f"not the tested version: {', '.join(others)}"] if others else []
    facts += [f"not installed: {', '.join(lacking)}"] if lacking else []
    absent = [name for name in LOST if name not in lacking and version_of(name) is None]
    for extra in ("all", "bits"):  # for GPUs alone, and hundreds of megabytes: not in `all`
        names = [name for name in absent if (name == "bitsandbytes") == (extra == "bits")]
        facts += (
            [f"optional and not installed: {', '.join(names)} (for {_lost(names)}; {install(extra)})"] if names else []
        )
    fatal = [name for name in lacking if name in NEEDED]
    return judged(
        "; ".join(facts),
        (bool(fatal), WRONG, f"pip install {' '.join(fatal)}: nothing works without"),
        (bool(lacking), WARNING, f"does not work without: {_lost(lacking)}"),
        (bool(others), WARNING, "the checks below say whether they work; else install the tested ones"),
    )


def _lost(names: list[str]) -> str:
    return ", ".join(dict.fromkeys(LOST[name] for name in names if name in LOST))


def devices() -> CheckResult:
    """Check the GPUs that torch can compute on, their memory, and whether the driver fits torch's build."""
    driver, built, threads = cuda_of_driver(), torch.version.cuda or torch.version.hip, torch.get_num_threads()
    if not torch.cuda.is_available():
        if driver is None:
            facts, gain = f"no GPU: everything runs on the CPU, {os.cpu_count()} cores, {threads} threads", half_gain()
            if not 1 / FAST < gain < FAST:
                told = "wb.tune says what dtype='bfloat16' gains and costs" if gain > 1 else "leave dtype at float32"
                facts += f"; products of bfloat16 are {gain:.1f} times as fast as float32's: {told}"
            return CheckResult(OK, facts)
        if built is None:
            facts = f"an NVIDIA driver for CUDA {driver}, but torch {torch.__version__} is built for the CPU"
            return CheckResult(WRONG, facts, "install the CUDA build of torch")
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
        facts = f"a driver for CUDA {driver}, torch for CUDA {built}, but torch finds no GPU"
        facts += f"; CUDA_VISIBLE_DEVICES={hidden!r}" if hidden is not None else ""
        return CheckResult(
            WRONG, facts, f"a driver for CUDA {built} or newer; in a container pass the GPUs (--gpus all)"
        )
    lines, state, do = [], OK, []
    for number in range(torch.cuda.device_count()):
        card, (free, total) = torch.cuda.get_device_properties(number), torch.cuda.mem_get_info(number)
        lines.append(f"{number}: {card.name}, {gib(free)} of {gib(total)} free, sm_{card.major}{card.minor}")
        if not runs_on((card.major, card.minor), torch.cuda.get_arch_list()):
            state, do = WRONG, [f"torch has no code for {card.name}: install a build for sm_{card.major}{card.minor}"]
        elif float(torch.ones(1024, device=f"cuda:{number}").sum()) != 1024.0:
            state, do = WRONG, [f"GPU {number} computes wrong sums: it is broken, or its driver is"]
        elif free < 0.9 * total:
            state, do = max(state, WARNING), [*do, f"other processes hold memory of GPU {number}: see nvidia-smi"]
    if driver is not None and built is not None and int(driver.split(".")[0]) < int(built.split(".")[0]):
        state, do = max(state, WARNING), [*do, f"the driver is older than torch's CUDA {built}: update it"]
    return CheckResult(
        state, f"CUDA {built}, driver for {driver or 'another platform'}; {'; '.join(lines)}", "; ".join(do)
    )


def half_of(capability: tuple[int, int]) -> str:
    """Return the half precision in which a GPU of this compute capability multiplies: bfloat16 from sm_80 on."""
    return "bfloat16" if capability >= (8, 0) else "float16"


def cuda_of_driver() -> str | None:
    """Return the newest CUDA version that the NVIDIA driver here supports (`13.0`); None without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    version = ctypes.c_int()
    driver.cuDriverGetVersion(ctypes.byref(version))
    return f"{version.value // 1000}.{version.value % 1000 // 10}"


def runs_on(capability: tuple[int, int], built: list[str]) -> bool:
    """Return whether code built for the architectures in `built` (`sm_90`, `compute_90`) runs on a GPU of this compute
    capability.

    It runs on the same major version with at least the built minor version; PTX (`compute_…`) runs on every newer GPU.
    """
    for one in built:
        known = re.fullmatch(r"(sm|compute)_(\d+)(\d)[af]?", one)
        if known is None:  # another platform's names
            return True
        newest = (int(known[2]), int(known[3]))
        if newest <= capability and (known[1] == "compute" or newest[0] == capability[0]):
            return True
    return not built


def host_memory() -> CheckResult:
    """Check the memory of this machine, or of this process's control group."""
    total, free = memory.total(), min(memory.available(), memory.total())
    with suppress(OSError, ValueError):
        free = min(free, total - int(Path("/sys/fs/cgroup/memory.current").read_text()))
    cards = sum(torch.cuda.mem_get_info(one)[1] for one in range(torch.cuda.device_count()))
    do = f"free memory, or raise the container's limit: a 0.5B model with its optimizer needs {gib(8 << 30)}"
    return judged(
        f"{gib(free)} of {gib(total)} free",
        (free < 1 << 30, WRONG, do),
        (free < LEAST_HOST, WARNING, do),
        (total < cards, WARNING, "less than the GPUs have: offloading and snapshots of large models will not fit"),
    )


def shared_memory() -> CheckResult:
    """Check /dev/shm, through which NCCL, Ray and vLLM exchange data; containers have 64 MiB by default."""
    try:
        total, _, free = shutil.disk_usage("/dev/shm")
    except OSError as error:
        return CheckResult(WRONG, f"/dev/shm is not there: {error}", "mount it: NCCL, Ray and vLLM need it")
    closed = "" if os.access("/dev/shm", os.W_OK) else ", and closed to this user"
    do = "start the container with --shm-size=16g (or --ipc=host), or remove what fills it"
    return judged(
        f"/dev/shm: {gib(free)} of {gib(total)} free{closed}",
        (bool(closed), WRONG, "as root: chmod 1777 /dev/shm, or mount it for writing"),
        (free < 1 << 28, WRONG, do),
        (free < LEAST_SHM, WARNING, do),
    )


def disk() -> CheckResult:
    """Check free space and speed, by real fsyncs, of this folder and the temporary one, where runs and snapshots are
    written.
    """
    places: list[str] = []
    do: list[str] = []
    state = OK
    for place, folder in (("this folder", os.getcwd()), ("temporary folder", tempfile.gettempdir())):
        try:
            free, speed, sync = shutil.disk_usage(folder).free, *speeds(folder)
        except OSError as error:
            return CheckResult(WRONG, f"{place}: {error}", "make it writable, or work in another folder (TMPDIR=…)")
        places.append(f"{place}: {gib(free)} free, {speed / 2**20:.0f} MiB/s, {sync * 1000:.1f} ms an fsync")
        if free < LEAST_DISK:
            state, do = WARNING, [*do, f"{place}: a checkpoint of a 7B model takes {gib(84 << 30)} with its optimizer"]
        elif speed < SLOW_DISK or sync > SLOW_SYNC:
            state, do = WARNING, [*do, f"{place} is slow: write runs to a local disk"]
    return CheckResult(state, "; ".join(places), "; ".join(do))


def speeds(folder: str, size: int = 32 << 20) -> tuple[float, float]:
    """Measure a folder's disk; returns (bytes per second of writing and syncing a file of `size` bytes, seconds to sync
    a small change).
    """
    with tempfile.NamedTemporaryFile(dir=folder, prefix="workbench-doctor-") as file:

        def synced(data: bytes) -> float:
            began = time.perf_counter()
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            return time.perf_counter() - began

        return size / synced(os.urandom(size)), fmean(synced(b"x") for _ in range(5))


def ports() -> CheckResult:
    """Check that a connection over loopback works and that this machine resolves its own name, as gloo, NCCL and Ray
    need.
    """
    try:
        with (
            socket.create_server(("127.0.0.1", 0)) as server,
            socket.create_connection(server.getsockname(), 5) as here,
            server.accept()[0] as there,
        ):
            here.sendall(b"x")
            there.recv(1)
    except OSError as error:
        return CheckResult(WRONG, f"loopback: {error}", "allow connections on 127.0.0.1: every service binds there")
    try:
        socket.getaddrinfo(socket.gethostname(), None)
    except OSError as error:
        do = "add this machine's name to /etc/hosts, or set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"
        return CheckResult(WARNING, f"loopback works; this machine's own name does not resolve: {error}", do)
    return CheckResult(OK, "loopback works, and this machine's name resolves")


def collectives() -> CheckResult:
    """Check an all-reduce of two ranks: NCCL where there are two GPUs; else gloo, and NCCL on the one GPU."""
    cards = torch.cuda.device_count()
    backends = []
    for backend, ranks in (("nccl", min(cards, 2)), ("gloo", 0 if cards > 1 else 2)):
        if not ranks or not (dist.is_nccl_available() if backend == "nccl" else dist.is_gloo_available()):
            continue
        with tempfile.TemporaryDirectory(prefix="workbench-doctor-") as folder:
            torch.multiprocessing.spawn(all_reduce, (ranks, backend, f"file://{folder}/store"), ranks)
        version = ".".join(map(str, torch.cuda.nccl.version())) if backend == "nccl" else ""
        backends.append(f"{backend} {version}".strip() + f": {ranks} rank{'s' * (ranks > 1)}")
    if not backends:
        return CheckResult(WRONG, "torch has neither NCCL nor gloo", "install a build of torch with torch.distributed")
    return CheckResult(OK, f"all-reduce over {', '.join(backends)}")


def all_reduce(rank: int, ranks: int, backend: str, store: str) -> None:
    """Run one rank of the check `collectives`. Raises `ArithmeticError` where the sum is wrong."""
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if backend == "nccl":
        torch.cuda.set_device(device)
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=ranks)
    one = torch.full((1 << 20,), rank + 1.0, device=device)
    dist.all_reduce(one)
    total, expected = float(one.mean()), ranks * (ranks + 1) / 2
    dist.destroy_process_group()
    if total != expected:
        raise ArithmeticError(f"{backend} summed {ranks} ranks to {total} instead of {expected}")


def attention() -> CheckResult:
    """Check flash attention on a GPU, torch's kernel and the flash-attn package if installed, against plain attention."""
    package = version_of("flash-attn")
    if not torch.cuda.is_available():
        if package is not None or util.find_spec("flash_attn"):
            found = f"flash-attn {package} is installed, but no GPU is here"
            return CheckResult(WARNING, found, "leave attn_implementation")
        return CheckResult(SKIPPED, "no GPU: attention is torch's own")
    from torch.nn.attention import SDPBackend, sdpa_kernel

    torch.manual_seed(0)
    capability = torch.cuda.get_device_capability()
    half, flash = half_of(capability), capability >= (8, 0)
    query, key, value = torch.randn(3, 2, 4, 128, 64, device="cuda", dtype=getattr(torch, half))
    attend = torch.nn.functional.scaled_dot_product_attention
    with sdpa_kernel(SDPBackend.MATH):
        plain = attend(query.float(), key.float(), value.float(), is_causal=True)
    backend = SDPBackend.FLASH_ATTENTION if flash else SDPBackend.EFFICIENT_ATTENTION
    kernel = "torch's flash kernel" if flash else "torch's memory-efficient kernel"
    ways: dict[str, Callable[[], Any]] = {kernel: lambda: attend(query, key, value, is_causal=True)}
    if package is not None and flash:
        turned = [one.transpose(1, 2) for one in (query, key, value)]  # [B, S, heads, head]
        function = importlib.import_module("flash_attn").flash_attn_func
        ways[f"flash-attn {package}"] = lambda: function(*turned, causal=True).transpose(1, 2)
    notes, wrong = [], []
    for name, compute in ways.items():
        with sdpa_kernel(backend):
            gap = float((compute().float() - plain).abs().max())
        notes.append(f"{name}: {gap:.1e} from plain attention")
        wrong += [name] if not gap < CLOSE else []
    notes += [] if package or wrong else ["flash-attn is not installed, and not needed"]
    notes += [] if flash else ["flash kernels need sm_80: leave attn_implementation"]
    do = f"do not use {' or '.join(wrong)}: attn_implementation='eager'"
    return judged("; ".join(notes), (bool(wrong), WRONG, do))


def ray() -> CheckResult:
    """Check that Ray starts here, with one CPU, and ends."""
    if version_of("ray") is None:
        return CheckResult(SKIPPED, "Ray is not installed: no clusters; one machine needs none")
    began = time.monotonic()
    try:
        with connect(cpus=1, gpus=0) as made:
            notes = made.notes
    except EngineError as error:
        do = "only wb.cluster needs Ray; a busy machine may need longer; `ray stop` ends processes of earlier sessions"
        return CheckResult(WARNING, str(error), do)
    started = f"Ray {version_of('ray')} started and ended in {time.monotonic() - began:.0f} s"
    return CheckResult(OK, "; ".join([started, *notes]))


def sandbox() -> CheckResult:
    """Check which isolation model code can be run with here, and run a program in it."""
    try:
        box = LocalSandbox()
    except SandboxError as error:
        do = "only rewards and tools that run code need it; where bubblewrap is missing, as root: apt-get install bubblewrap"
        return CheckResult(WARNING, str(error), do)
    result = box.run("print(6 * 7)")
    if result.stdout.strip() != "42":
        return CheckResult(WRONG, f"{box.describe()}: a program did not run, {result.status}", "use a remote sandbox")
    return CheckResult(OK, box.describe())


# --- what may be shown to others ------------------------------------------------------------------

_TOKENS = re.compile(r"\b(?:hf|sk|ghp|gho|github_pat|glpat|xox[bp]|wandb|AKIA)[-_]?[A-Za-z0-9_-]{12,}|(?<=Bearer )\S+")
_ADDRESS = re.compile(r"(?<![\d.])(?!127\.|0\.0\.0\.0)\d{1,3}(?:\.\d{1,3}){3}(?![\d.])")
_PATH = re.compile(r"(?<![\w.:/~-])(?!/(?:dev|proc|sys|etc)/)(?:~|(?=/))(?:/[\w.+@~=,-]+)+")


def clean(text: str, environ: Mapping[str, str] = os.environ) -> str:
    """Remove from a text what identifies this machine or user: absolute paths (their last part stays), tokens, secrets
    of the environment, addresses, host and user name.
    """
    for value in sorted((v for n, v in environ.items() if SECRET.search(n) and len(v) > 5), key=len, reverse=True):
        text = text.replace(value, HIDDEN)
    text = _ADDRESS.sub("<address>", _TOKENS.sub(HIDDEN, text))
    text = _PATH.sub(lambda path: f"…/{path[0].rsplit('/', 1)[-1]}", text)
    for name_of, shown in ((socket.gethostname, "<host>"), (getpass.getuser, "<user>")):
        with suppress(OSError, KeyError):  # a user without a name
            name = name_of()
            if len(name) > 2 and name not in ("root", "localhost"):
                text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", shown, text)
    return text


EXACT, NEAR, SAMPLERS = 1e-3, 1e-2, 0.1
"""Largest differences: nats between log-probs in float32, share of a gradient's norm, nats on average between two samplers."""
QUESTIONS = (
    ("Gus has 6 shells and finds 10 more. How many shells does Gus have?", "16"),
    ("Dan has 14 stones and loses 3. How many stones are left?", "11"),
    ("Hana has 9 shells, buys 7 and gives away 10. How many shells are left?", "6"),
    ("Ben has 10 tickets, buys 4 and gives away 5. How many tickets are left?", "9"),
)
"""Of the tiny model's world."""


def model() -> Path:
    """Return the folder of the tiny model in this installation."""
    return starter.files()["data/tiny-arith/config.json"].parent


def recorded() -> DataProto:
    """Load 64 rows that the tiny model wrote on another machine, with their float32 log-probs and advantages."""
    folder = starter.files()["data/arith-batch/trace.json"].parent
    columns: dict[str, torch.Tensor] = {}
    # its tensors alone: a bare machine reads no parquet
    for phase in ("00_rollout", "01_reward", "02_old_log_prob", "04_advantage"):
        columns |= load_file(folder / phase / "tensors.safetensors")
    return DataProto.from_single_dict(columns)


def opened(**settings: Any) -> Any:
    """Open the tiny model as a local engine, in float32 unless the settings say otherwise."""
    return local(model(), **{"lr": 1e-4, "dtype": "float32", **settings})


def updated(engine: Any, batch: DataProto) -> dict[str, float]:
    """Do one GRPO update of an engine by a batch that has advantages, and return its metrics."""
    outcome = Update(engine, PolicyLoss(), allow_stale=True)(batch)
    return reduce([outcome.metrics])


def gap_of(found: torch.Tensor, expected: torch.Tensor, batch: DataProto) -> float:
    """Return the largest difference of two tensors [B, T] on the response tokens; NaN where one has NaN."""
    return float((found.cpu() - expected.cpu())[batch["response_mask"].bool()].abs().max())


def step() -> CheckResult:
    """Check one GRPO step as a run does it, from rollout to update, in the dtype that the device gets by default."""
    engine = opened(dtype="auto")
    table = [
        {"prompt": [{"role": "user", "content": text}], "data_source": "workbench/arith", "reward_model": {"ground_truth": truth}}
        for text, truth in QUESTIONS
    ]  # fmt: skip
    pipe = grpo(engine, group_size=8, max_tokens=48)
    began = time.perf_counter()
    trace = Stepper(pipe, rows(table).batch(len(table))).run().trace
    seconds = time.perf_counter() - began
    batch, norm = trace.batch, float(trace.metrics["actor/grad_norm"])
    gap = gap_of(batch["old_log_probs"], batch["rollout_log_probs"], batch)
    device = "the GPU" if torch.cuda.is_available() else "the CPU"
    summary = f"{len(batch)} rows in {seconds:.1f} s on {device}, reward {float(batch['reward'].mean()):.2f}, gradient norm {norm:.3f}"
    if engine.version != 1 or not 0 < norm < float("inf"):
        return CheckResult(
            WRONG, f"{summary}, policy version {engine.version}", "the update did nothing: see `numbers`"
        )
    if not bool(batch["scored"].all()):
        return CheckResult(
            WRONG, f"{summary}; {int((~batch['scored']).sum())} rows were not scored", "see batch['score']"
        )
    if not gap < 0.5:
        return CheckResult(WRONG, f"{summary}; sampled and scored log-probs are {gap:.2g} nats apart", "see `numbers`")
    return CheckResult(OK, f"{summary}; sampled and scored log-probs {gap:.0e} nats apart")


def numbers() -> CheckResult:
    """Check log-probs and an update of a recorded batch against the recorded numbers, and on a GPU also against the
    CPU.
    """
    batch, engine = recorded(), opened()
    gap = gap_of(engine.compute_log_probs(batch)["log_probs"], batch["old_log_probs"], batch)
    summary = f"log-probs of a recorded batch {gap:.0e} nats from those recorded"
    do = "float32 is computed less exactly: unset TF32 overrides (NVIDIA_TF32_OVERRIDE), try another torch or driver"
    if not gap < EXACT or not torch.cuda.is_available():
        return judged(summary, (not gap < EXACT, WRONG, do))
    here, there = updated(engine, batch), updated(opened(device="cpu"), batch)
    apart = abs(here["actor/grad_norm"] / there["actor/grad_norm"] - 1)
    return judged(f"{summary}; gradient norm {apart:.0e} from the CPU's", (not apart < NEAR, WRONG, do))


def push() -> CheckResult:
    """Check a push of weights: after an update a second engine with the pushed weights must score the same log-probs."""
    learner, sampler, batch = opened(), opened(), recorded()
    pair = paired(learner, sampler)
    updated(learner, batch)
    how = push_once(pair)
    gap = gap_of(sampler.compute_log_probs(batch)["log_probs"], learner.compute_log_probs(batch)["log_probs"], batch)
    wrong = sampler.version != learner.version or not gap < EXACT
    summary = f"{how}, log-probs {gap:.0e} nats apart, version {sampler.version}" + f" of {learner.version}" * wrong
    do = "the sampler does not have the learner's weights: attach this report to an issue"
    return judged(summary, (wrong, WRONG, do))


def push_once(pair: Any) -> str:
    """Push a pair's weights once, compare what is sampled with them, and describe how they were pushed."""
    return str(check_push(pair, [tuple(pair.tokenizer.encode(text)) for text, _ in QUESTIONS]))


def vllm_engine() -> CheckResult:
    """Check vLLM: start it in its interpreter, push weights, compare its log-probs with the learner's; on a GPU also
    sleep and wake.
    """
    python, gpu = interpreter(VllmSettings()), torch.cuda.is_available()
    if not importable(python):
        do = f"{install('vllm')}, or set WORKBENCH_VLLM_PYTHON to a Python that has vLLM; the local engine needs none"
        return CheckResult(SKIPPED, "vLLM is not installed", do)
    began = time.perf_counter()
    learner = opened(lr=1e-2)  # a step so large that old weights would be seen
    settings: dict[str, Any] = {"max_model_len": 256, "max_num_seqs": 16, "kv_cache_memory_mb": 256}
    # its dtype is its own: in half precision on a GPU, in the one that the card has
    with vllm(model(), **settings, enforce_eager=True, sleep_mode=gpu) as sampler:
        facts = [f"{sampler.about().partition(', process')[0]}, started in {time.perf_counter() - began:.0f} s"]
        pair = paired(learner, sampler, share_device=gpu)
        updated(learner, recorded())  # beside a GPU's vLLM, which sleeps meanwhile
        facts.append(f"pushed {push_once(pair)}")
        gaps = [sampled_gap(pair)]
        if gpu:
            free = torch.cuda.mem_get_info()[0]
            sampler.sleep()
            freed = torch.cuda.mem_get_info()[0] - free
            sampler.wake()
            gaps.append(sampled_gap(pair))
            facts.append(f"sleep freed {gib(max(freed, 0))}")
            if freed <= 0:
                return CheckResult(
                    WARNING, "; ".join(facts), "sleep frees nothing: use share_device=False, or two GPUs"
                )
        facts.append(f"log-probs {max(gaps):.0e} nats from the learner's on average")
    facts += [] if gpu else ["no sleep on a CPU"]
    do = "vLLM computes other numbers than the learner, or kept old weights: try another version, attention or dtype"
    return judged("; ".join(facts), (not max(gaps) < SAMPLERS, WRONG, do))


def sampled_gap(pair: Any) -> float:
    """Return the mean difference, in nats, between the log-probs that a pair's sampler wrote and those that its learner
    scores.
    """
    ids = [tuple(pair.tokenizer.encode(text)) for text, _ in QUESTIONS]
    settings = SamplingSettings(max_tokens=24, ignore_eos=True)
    samples = pair.sample_many([Request(one, settings, seed) for seed, one in enumerate(ids)])
    batch = DataProto.from_single_dict(columns_of(ids, samples, 0))
    scored = pair.learner.compute_log_probs(batch)["log_probs"].cpu()
    return float((scored - batch["rollout_log_probs"])[batch["response_mask"].bool()].abs().mean())


def saves() -> CheckResult:
    """Check that a snapshot and a checkpoint restore the weights bit for bit, and that the next step is then the same."""
    engine, batch = opened(), recorded()
    updated(engine, batch)
    kept, before = engine.snapshot(), weights_of(engine)
    first = updated(engine, batch)["actor/grad_norm"]
    moved = not same(before, weights_of(engine))
    engine.restore(kept)
    restored = same(before, weights_of(engine))
    with tempfile.TemporaryDirectory(prefix="workbench-doctor-") as folder:
        home = Path(folder)
        engine.save(home / "actor")
        engine.save_state(home / "state")
        other = opened()
        other.load_state(home / "actor", home / "state")
        loaded = same(before, weights_of(other))
    again = updated(other, batch)["actor/grad_norm"]
    parts = {
        "an update": moved,
        "a snapshot": restored,
        "a checkpoint": loaded,
        "the step after it": abs(again / first - 1) < EXACT,
    }
    if wrong := [name for name, right in parts.items() if not right]:
        return CheckResult(WRONG, f"not as before: {', '.join(wrong)}", "trust no checkpoint: check memory and disk")
    return CheckResult(OK, "snapshot and checkpoint give the weights back bit for bit, and the next step's gradient")


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    """Return whether two sets of weights are equal bit for bit."""
    return left.keys() == right.keys() and all(torch.equal(left[name].cpu(), right[name].cpu()) for name in left)


def shards() -> CheckResult:
    """Check FSDP over all GPUs, or over two CPU processes: its log-probs and gradient must be those of one process."""
    cards = torch.cuda.device_count()
    ranks, where = (cards, "GPUs") if cards else (2, "processes of the CPU")
    batch, here = recorded(), opened()
    there = fsdp(model(), ranks=ranks, lr=1e-4, dtype="float32", threads=None if cards else 1)
    try:
        gap = gap_of(there.compute_log_probs(batch)["log_probs"], here.compute_log_probs(batch)["log_probs"], batch)
        single, many = (updated(engine, batch)["actor/grad_norm"] for engine in (here, there))
    finally:
        there.close()
    summary = f"{ranks} {where}: log-probs {gap:.0e} nats from one process, gradient norm {abs(many / single - 1):.0e}"
    do = "sums over ranks are wrong: see the check `collectives`; NCCL_P2P_DISABLE=1 shows whether a link is"
    return judged(summary, (not gap < EXACT or not abs(many / single - 1) < NEAR, WRONG, do))
