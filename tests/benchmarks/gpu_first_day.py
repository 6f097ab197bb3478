"""What a first day on a GPU must show, in ten minutes: `PYTHONPATH=. python tests/benchmarks/gpu_first_day.py`.

torch and transformers are enough; what needs more (peft, flash-attn, vLLM, papermill and GSM8K) says that it was left out. Checks run
in a child process, each with a deadline of its own: one that fails, hangs or ends the process does not stop the others, which go on in a
new one. Lines come as they are made, and go to `--log` (default `$OUT/first_day.txt` where OUT is set), so that none is lost.

`--device cpu --shape tiny` is the rehearsal, in a minute: the same code on the CPU, so that the card alone is unproven.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

sys.path += [str(Path(__file__).parents[1])]
from support.models import SHAPES, make_shaped_model

import workbench as wb
from workbench.base.errors import OutOfMemory, SettingError
from workbench.base.memory import gib
from workbench.base.metrics import reduce
from workbench.engines import Request, Sample, SamplingSettings, local, paired
from workbench.engines.local_engine.caches import PATHS
from workbench.engines.paired import check_push
from workbench.engines.settings import LocalSettings, VllmSettings
from workbench.engines.vllm_server.engine import importable, interpreter, vllm
from workbench.engines.weights import WeightReceiver
from workbench.engines.workers.hosted import Hosted, host
from workbench.engines.workers.processes import processes
from workbench.steps.stepper import Stepper
from workbench.testing.engines import LikelihoodLoss


def beside() -> ModuleType:
    """`gpu.py` of this folder."""
    name = "workbench_gpu_benchmark"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name("gpu.py"))
        assert spec is not None and spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


gpu = beside()
GROUP = 8
CLOSE = 0.05
"""Nats on average between log-probs of a half precision as they were sampled and as they are scored."""


@dataclass(frozen=True)
class Day:
    """What is asked of which machine."""

    folder: Path
    """Of a model of `shape`."""
    shape: str = "0.5b"
    device: str = "cuda"
    prompt: int = 512
    """Tokens of a prompt, which a group of 8 has in common."""
    longest: tuple[int, ...] = (2_048, 8_192)
    """Tokens of the longest response of each trial; the shortest has a quarter."""
    rows: int = 64
    """Rows that are sampled together."""
    budget: int = 16_384
    """Tokens of a pass."""
    gsm8k: tuple[str, ...] = ()
    """Model and folder of the data of `make gsm8k`."""

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"

    @property
    def work(self) -> Any:
        """As `gpu.py` has it."""
        size = min(self.prompt, 64)
        return gpu.Work(self.shape, self.device, self.rows, size, size, self.budget, repeats=1)

    def opened(self, **settings: Any) -> Any:
        """A local engine."""
        return local(self.folder, **{"device": self.device, "lr": 1e-6, "micro_batch_tokens": self.budget, **settings})

    def held(self) -> int:
        """Bytes of tensors on the GPU."""
        return torch.cuda.memory_allocated() if self.on_gpu else 0


def halves() -> list[str]:
    """The half precisions that this release has."""
    found = []
    for dtype in ("bfloat16", "float16"):
        try:
            LocalSettings.from_parameters({"dtype": dtype})
        except SettingError:
            continue
        found.append(dtype)
    return found


def sampled(day: Day, engine: Any) -> tuple[Any, float, float, float]:
    """(batch, largest and mean gap between sampled and scored log-probs, tokens a second) of rows in groups with a prompt each."""
    work = day.work
    every = gpu.requests_of(work)
    asked = [Request(every[number - number % GROUP].ids, one.settings, number) for number, one in enumerate(every)]
    engine.sample_many(asked[:GROUP])  # it warms up
    line = gpu.timed(work, "", work.rows * work.response, lambda: engine.sample_many(asked))
    samples = engine.sample_many(asked)
    batch = gpu.batch_of(asked, samples)
    scored = engine.compute_log_probs(batch)["log_probs"].cpu()
    gap = (scored - batch["rollout_log_probs"])[batch["response_mask"].bool()].abs()
    return batch, float(gap.max()), float(gap.mean()), line.rate


# --- learning ---------------------------------------------------------------------------------------


def ragged(day: Day, longest: int) -> wb.DataProto:
    """A group: one prompt, responses of a quarter of `longest` to all of it."""
    draw = torch.Generator().manual_seed(longest)
    words = SHAPES[day.shape]["vocab_size"]
    prompt = torch.randint(4, words, (day.prompt,), generator=draw).tolist()
    lengths = [longest * (number + 3) // (GROUP + 2) for number in range(GROUP)]
    responses = [torch.randint(4, words, (length,), generator=draw).tolist() for length in lengths]
    asked = [Request(tuple(prompt), SamplingSettings(max_tokens=longest), number) for number in range(GROUP)]
    return gpu.batch_of(asked, [Sample(tuple(one), (0.0,) * len(one), "length", 0) for one in responses])


class PlainRagged(gpu.Plain):  # type: ignore[misc,name-defined]
    """The plain loop on padded rows, each micro-batch cut to its longest."""

    def __call__(self, batch: wb.DataProto) -> float:
        device, tokens = self.work.device, float(batch["response_mask"].sum())
        width = batch["input_ids"].shape[1]
        start = width - batch["response_mask"].shape[1]
        for part in torch.arange(len(batch)).split(max(self.work.micro_batch_tokens // width, 1)):
            mask = batch["response_mask"][part].bool()
            end = start + int(mask.sum(1).max())
            ids, seen = (batch[name][part, :end].to(device) for name in ("input_ids", "attention_mask"))
            kept = {"attention_mask": seen, "logits_to_keep": end - start + 1, "use_cache": False}
            with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
                logits = self.model(input_ids=ids, **kept).logits[:, :-1]
            chosen = mask[:, : end - start].to(device)
            lost = torch.nn.functional.cross_entropy(logits[chosen].float(), ids[:, start:][chosen], reduction="sum")
            (lost / tokens).backward()
        norm = torch.nn.utils.clip_grad_norm_(self.weights, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(norm)


def groups(day: Day) -> Iterator[str]:
    """Updates on groups of 8 with ragged responses, beside a plain loop: the same gradient, time, peak."""
    for longest in day.longest:
        batch, norms = ragged(day, longest), dict[str, float]()
        tokens = int(batch["attention_mask"].sum())

        def measured(
            name: str, make: Callable[[], Callable[[], float]], tokens: int = tokens, norms: Any = norms
        ) -> Any:
            try:
                step = make()
                norms[name] = step()  # of the weights as loaded
                return gpu.timed(day.work, name, tokens, step)
            except (OutOfMemory, torch.cuda.OutOfMemoryError) as error:
                return gpu.Line(name, note=f"out of memory: {str(error)[:90]}")
            finally:
                gpu._forget(day.device)

        def plain(batch: Any = batch) -> Callable[[], float]:
            loop = PlainRagged(day.work, day.folder, 0, False)
            return lambda: loop(batch)

        def ours(batch: Any = batch) -> Callable[[], float]:
            engine, loss = day.opened(), LikelihoodLoss()
            return lambda: float(reduce([engine.learn(batch, loss, gpu.counts_of(batch)).metrics])["grad_norm"])

        theirs, mine = measured("a plain loop", plain), measured("ours", ours)
        for line in (theirs, mine):
            yield f"8 rows to {longest:,} tokens, {line.what}: {', '.join(filter(None, line.cells()[1:]))}"
        assert mine.seconds is not None, mine.note
        if theirs.seconds is not None:
            yield f"8 rows to {longest:,} tokens: {theirs.seconds / mine.seconds:.2f} times as fast, {mine.memory / theirs.memory:.2f} of its peak"
            assert abs(norms["ours"] / norms["a plain loop"] - 1) < 0.03, norms
            assert not day.on_gpu or mine.seconds < 1.1 * theirs.seconds, "slower than a plain loop"


def learns(day: Day) -> Iterator[str]:
    """Twenty GRPO steps of the tiny model by a reward that anybody can raise: the share of ones among its characters."""
    engine = local("data/tiny-arith", device=day.device, lr=1e-3)
    table = [
        {"prompt": [{"role": "user", "content": f"Dan has {one} stones."}], "data_source": "ones"} for one in range(4)
    ]
    pipe = wb.recipes.grpo(engine, wb.rewards.Reward(ones, in_process=True), group_size=GROUP, max_tokens=24)
    rewards = []
    for step in range(1, 21):
        batch = Stepper(pipe, wb.rows(table).batch(4, step=step)).run().trace.batch
        rewards.append(float(batch["reward"].mean()))
    first, last = sum(rewards[:5]) / 5, sum(rewards[-5:]) / 5
    yield f"mean reward of the first five steps {first:.2f}, of the last five {last:.2f}"
    assert last > first + 0.1, rewards


def ones(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any) -> float:
    """The share of ones among a response's characters."""
    return solution_str.count("1") / max(len(solution_str), 1)


def out_of_memory(day: Day) -> Iterator[str]:
    """A forced out-of-memory names its phase and setting; afterwards the engine goes on as a fresh one does."""
    batch, engine = ragged(day, day.longest[0]), day.opened(check_memory=False)
    counts = gpu.counts_of(batch)
    try:
        if day.on_gpu:
            total = torch.cuda.get_device_properties(0).total_memory
            torch.cuda.empty_cache()
            torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (64 << 20)) / total)
        engine.learn(batch, LikelihoodLoss() if day.on_gpu else Starved(), counts)
        raise AssertionError("it did not run out of memory")
    except OutOfMemory as error:
        yield str(error)[:300]
        assert "out of memory in learn" in str(error) and "micro_batch_tokens" in str(error), error
    finally:
        if day.on_gpu:
            torch.cuda.set_per_process_memory_fraction(1.0)
    again, fresh = (
        float(reduce([one.learn(batch, LikelihoodLoss(), counts).metrics])["grad_norm"])
        for one in (engine, day.opened())
    )
    yield f"the next update's gradient norm {again:.6g}, a fresh engine's {fresh:.6g}"
    assert abs(again / fresh - 1) < 1e-3 and engine.version == 0


class Starved(LikelihoodLoss):
    """A loss where a CPU pretends that a GPU's memory has run out."""

    def __call__(self, *given: Any) -> Any:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")


# --- sampling ---------------------------------------------------------------------------------------


def decodes(day: Day) -> Iterator[str]:
    """Every way of decoding in half precision against scoring."""
    for dtype in halves():
        for way in PATHS:
            few = replace(day, rows=GROUP) if way == "no cache" else day  # its time grows with the square of the tokens
            _, most, mean, rate = sampled(few, day.opened(dtype=dtype, decode=way))
            gpu._forget(day.device)
            yield f"{dtype}, {way}: {mean:.1e} nats on average, at most {most:.1e}; {rate:,.0f} tokens/s"
            assert mean < CLOSE, (dtype, way, mean)


def flash(day: Day) -> Iterator[str]:
    """flash_attention_2 opens, passes its self-check, and scores as torch's own attention does."""
    if not day.on_gpu or find_spec("flash_attn") is None:
        yield "left out: flash-attn is not installed, or no GPU is here"
        return
    batch = ragged(day, day.longest[0])
    plain, quick = (
        day.opened(dtype="bfloat16", attn_implementation=one).compute_log_probs(batch)["log_probs"]
        for one in ("sdpa", "flash_attention_2")
    )
    gap = (plain - quick).cpu()[batch["response_mask"].bool()].abs()
    yield f"{float(gap.mean()):.1e} nats from sdpa on average, at most {float(gap.max()):.1e}"
    assert float(gap.mean()) < CLOSE


def adapters(day: Day) -> Iterator[str]:
    """LoRA on a base in half precision, sampled the lean way, and in 8 and 4 bits: sampled as it is scored after an update."""
    if find_spec("peft") is None:
        yield "left out: peft is not installed"
        return
    *_, whole = sampled(day, day.opened(dtype="bfloat16"))
    gpu._forget(day.device)
    batch = ragged(day, day.longest[0])
    for base in ("bfloat16", "int8", "nf4"):
        engine = day.opened(dtype="bfloat16", base_dtype=base, lora_rank=16, lr=1e-3)
        engine.learn(batch, LikelihoodLoss(), gpu.counts_of(batch))
        _, most, mean, rate = sampled(day, engine)
        way = engine.selfcheck.paths.decode
        yield f"{base}, {way}: {rate:,.0f} tokens/s ({whole:,.0f} without adapters); {mean:.1e} nats on average, at most {most:.1e}"
        assert mean < CLOSE and (way == "lean" or base != "bfloat16")
        del engine
        gpu._forget(day.device)


def copies(day: Day, size: int) -> float:
    """Bytes a second that a copy of `size` bytes reads and writes."""
    many = torch.empty(size // 4, device=day.device)
    return 2 * size / gpu.timed(day.work, "", 0, many.clone).seconds


def bandwidth(day: Day) -> Iterator[str]:
    """Tokens a second beside the limit that reading all weights for each token sets; of vLLM also what a generator a row costs."""
    rate = copies(day, 4 << 30 if day.on_gpu else 1 << 28)
    gpu._forget(day.device)
    engine = day.opened(**({"dtype": "bfloat16"} if day.on_gpu else {"dtype": "float32"}))
    width = 2 if day.on_gpu else 4
    read = width * sum(one.numel() for one in engine._model.parameters())
    *_, tokens = sampled(day, engine)
    limit = day.rows * rate / read
    yield f"a copy moves {rate / 1e9:,.0f} GB/s; {tokens:,.0f} tokens/s of {day.rows} rows, {tokens / limit:.1%} of the {limit:,.0f} that reading {gib(read)} of weights a token allows"
    del engine
    gpu._forget(day.device)
    if not day.on_gpu or not importable(interpreter(VllmSettings())):
        yield "left out: vLLM is not installed, or no GPU is here"
        return
    for seeds in ("rows", "engine"):
        work = day.work
        with vllm(day.folder, max_model_len=1024, max_num_seqs=day.rows, seeds=seeds) as sampler:
            asked = gpu.requests_of(work)
            line = gpu.timed(
                work, "", work.rows * work.response, lambda asked=asked, one=sampler: one.sample_many(asked)
            )
            yield f"vLLM, seeds={seeds!r}: {line.rate:,.0f} tokens/s"


# --- two engines ------------------------------------------------------------------------------------


class Sleeping:
    """A local sampler whose weights leave the GPU while it sleeps, as vLLM's do."""

    def __init__(self, engine: Any) -> None:
        self.engine, self.tokenizer = engine, engine.tokenizer
        self._home = engine._model.device

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    async def sample(self, request: Request) -> Any:
        return await self.engine.sample(request)

    def load_weights(self, weights: Any, version: int) -> float:
        return self.engine.load_weights(weights, version)

    def begin_weights(self, shapes: Any) -> Any:
        return self.engine.begin_weights(shapes)

    def take_weights(self, pieces: Any, place: Any) -> Any:
        return self.engine.take_weights(pieces, place)

    def end_weights(self, version: int) -> Any:
        return self.engine.end_weights(version)

    def cancel_weights(self) -> None:
        self.engine.cancel_weights()

    def join_group(self, *given: Any) -> Any:
        return self.engine.join_group(*given)

    def load_adapter(self, folder: str, version: int) -> Any:
        return self.engine.load_adapter(folder, version)

    def receives(self) -> dict[str, Any]:
        return {**self.engine.receives(), "sleeps": True}

    def sleep(self, level: int = 1) -> None:
        self.engine._model.to("cpu")
        gpu._forget(self._home.type)

    def wake(self, tags: Sequence[str] | None = None) -> None:
        if tags is None or "weights" in tags:
            self.engine._model.to(self._home)


def cycled(day: Day, pair: Any, held: Callable[[], int]) -> Iterator[str]:
    """Ten cycles of an update and a rollout; what is held after the second and after the last."""
    batch, asked = ragged(day, day.longest[0]), gpu.requests_of(day.work)[:GROUP]
    marks = []
    for _ in range(10):
        pair.learn(batch, LikelihoodLoss(), gpu.counts_of(batch))
        pair.commit()
        versions = {sample.version for sample in pair.sample_many(asked)}
        assert versions == {pair.version}, versions
        marks.append(held())
    yield f"share_device={pair.share_device}, version {pair.version}, {pair.pushed()}; held after the second cycle {gib(marks[1])}, after the tenth {gib(marks[-1])}"
    assert abs(marks[-1] - marks[1]) <= max(marks[1] // 50, 1 << 20), marks


def shared(day: Day) -> Iterator[str]:
    """A pair on one card shares it by default; ten cycles hold no more than two. With vLLM where it is."""
    pair = paired(day.opened(), Sleeping(day.opened()), share_device=None if day.on_gpu else True)  # type: ignore[arg-type]
    assert isinstance(pair.sampler, WeightReceiver) and pair.share_device, "not shared by default"
    yield from cycled(day, pair, day.held)
    del pair
    gpu._forget(day.device)
    if not day.on_gpu or not importable(interpreter(VllmSettings())):
        yield "left out: vLLM is not installed, or no GPU is here"
        return
    with vllm(day.folder, max_model_len=1024, max_num_seqs=day.rows, gpu_memory_utilization=0.3) as sampler:
        pair = paired(day.opened(), sampler)
        assert pair.share_device, "not shared by default"
        yield from cycled(day, pair, lambda: torch.cuda.mem_get_info()[1] - torch.cuda.mem_get_info()[0])


def push(day: Day) -> Iterator[str]:
    """Weights go to a sampler in another process, by CUDA IPC on a GPU, and are sampled with."""
    settings = {"device": day.device}
    with Hosted(
        lambda: processes(host, 1, kind="local", path=str(day.folder), settings=settings), name="sampler"
    ) as there:
        learner = day.opened(lr=1e-4)
        batch = ragged(day, day.longest[0])
        learner.learn(batch, LikelihoodLoss(), gpu.counts_of(batch))
        learner.commit()
        found = check_push(paired(learner, there), [[5, 6, 7], [9, 10, 11, 12]])
        yield f"{found}; gap {found.gap:.1e} nats"
        assert found.way == ("CUDA IPC" if day.on_gpu else "shared memory"), found.way


def gsm8k(day: Day) -> Iterator[str]:
    """`make gsm8k` for twenty steps, where a model, the data and papermill are there."""
    lacks = [name for name in ("papermill", "pyarrow") if find_spec(name) is None]
    here = Path(sys.executable).parent
    lacks += [] if (here / "workbench").is_file() else ["workbench itself (pip install --no-deps -e .)"]
    if not day.gsm8k or lacks:
        yield f"left out: give --gsm8k MODEL DATA{f', and install {chr(44).join(lacks)}' if lacks else ''}"
        return
    model, data = day.gsm8k
    few = "-p steps=20 -p num_eval_rows=64 -p test_freq=20"
    # with this interpreter: the environment that make would build has another torch
    asked = [f"MODEL={model}", f"DATA={data}", f"ARGS={few}", "READY=", f"BIN={here}"]
    ended = subprocess.run(["make", "gsm8k", *asked], check=False)
    assert ended.returncode == 0, f"make gsm8k ended with {ended.returncode}"


CHECKS: dict[str, Callable[[Day], Iterator[str]]] = {
    one.__name__: one
    for one in (learns, decodes, groups, out_of_memory, adapters, bandwidth, shared, push, flash, gsm8k)
}
"""Name → check, in the order in which they matter."""
DEADLINES = {"decodes": 180.0, "groups": 150.0, "bandwidth": 180.0, "shared": 180.0, "gsm8k": 400.0}
"""Seconds after which a check counts as hanging; of the others `DEADLINE`."""
DEADLINE, START = 90.0, 120.0
"""START is for imports, and for what a process does between two checks."""


def rehearsal(folder: Path) -> Day:
    """The same on this CPU, with a tiny model in a folder."""
    return Day(folder, "tiny", "cpu", prompt=24, longest=(64, 256), rows=16, budget=512)


def carried_out(day: Day, names: Sequence[str]) -> dict[str, str]:
    """Run checks in this process; name → `holds`, `FAILED` or `left out`. On a GPU none follows one that failed: an error of
    CUDA stays in its process."""
    ended = dict[str, str]()
    for name in names:
        print(f"begin {name}", flush=True)
        try:
            lines = []
            for line in CHECKS[name](day):
                lines.append(line)
                print(f"  {name}: {line}", flush=True)
            ended[name] = "left out" if lines[0].startswith("left out") else "holds"
        except Exception:  # noqa: BLE001 - the other checks go on
            traceback.print_exc()
            ended[name] = "FAILED"
        print(f"end {name} {ended[name]}", flush=True)
        if day.on_gpu and ended[name] == "FAILED":
            break
        gpu._forget(day.device)
    return ended


def watched(
    command: Sequence[str], names: Sequence[str], seconds: float, say: Callable[[str], object]
) -> dict[str, str]:
    """Run `command --only NAME …` until each check has ended, in new processes after one that ended or hung. No check begins after
    `seconds`, and none is waited for a minute longer."""
    ended, close = dict[str, str](), time.monotonic() + seconds
    while left := [name for name in names if name not in ended]:
        if time.monotonic() > close:
            return ended | dict.fromkeys(left, "left out: no time")
        child = subprocess.Popen(
            [*command, "--only", *left],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=lambda child=child, lines=lines: passed_on(child.stdout, lines), daemon=True).start()
        running, how, began = "", "", time.monotonic()
        until = began + START
        while not how:
            try:
                line = lines.get(timeout=max(min(until, close + 60) - time.monotonic(), 0.01))
            except queue.Empty:
                how = f"FAILED: no end after {time.monotonic() - began:.0f} s"
                continue
            if not line:
                how = f"FAILED: its process ended ({child.wait()})"
            elif line.startswith("begin "):
                running, began = line.split()[1], time.monotonic()
                until = began + DEADLINES.get(running, DEADLINE)
                how = "left out: no time" if began > close else ""
            elif line.startswith("end ") and line.split()[1] == running:
                ended[running] = " ".join(line.split()[2:])
                say(f"{running} {ended[running]} ({time.monotonic() - began:.0f} s)")
                running, until = "", time.monotonic() + START
                how = "" if left[-1] not in ended else "done"
            else:
                say(line.rstrip())
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        stuck = running or next((name for name in left[:1] if name not in ended), "")
        if stuck:
            ended[stuck] = how
            say(f"{stuck} {how}")
    return ended


def passed_on(source: Any, lines: queue.SimpleQueue[str]) -> None:
    """Put the lines of a process into a queue, and "" after the last."""
    for line in source:
        lines.put(line)
    lines.put("")


def main() -> int:
    """1 where a check failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    there = torch.cuda.is_available()
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if there else "cpu")
    parser.add_argument("--shape", choices=tuple(SHAPES), default="0.5b")
    parser.add_argument("--only", nargs="*", choices=tuple(CHECKS), default=tuple(CHECKS))
    parser.add_argument("--seconds", type=float, default=540, help="after which no further check begins")
    parser.add_argument("--gsm8k", nargs=2, default=(), metavar=("MODEL", "DATA"))
    parser.add_argument("--log", type=Path, default=None, help="a file for all lines")
    parser.add_argument("--folder", type=Path, default=None, help=argparse.SUPPRESS)  # of a child: the model
    given = parser.parse_args()
    if given.device == "cuda" and not there:
        parser.exit(2, "no CUDA device is here; --device cpu --shape tiny rehearses on the CPU\n")
    os.chdir(Path(__file__).parents[2])
    tiny = given.device == "cpu" or given.shape == "tiny"
    if given.folder is not None:
        folder = given.folder
        day = rehearsal(folder) if tiny else Day(folder, given.shape, given.device, gsm8k=tuple(given.gsm8k))
        return int("FAILED" in carried_out(day, given.only).values())
    log = given.log or (Path(os.environ["OUT"]) / "first_day.txt" if os.environ.get("OUT") else None)

    def say(line: str) -> None:
        print(line, flush=True)
        if log is not None:
            with log.open("a", encoding="utf-8") as file:
                file.write(f"{line}\n")

    version = wb.base.distribution.version_of("transformers")
    say(f"{gpu.machine(given.device)}, transformers {version}; {given.shape} shape")
    with tempfile.TemporaryDirectory() as home:
        folder = make_shaped_model(Path(home) / "model", "tiny" if tiny else given.shape)
        command = [sys.executable, __file__, "--device", given.device, "--shape", given.shape, "--folder", str(folder)]
        command += ["--gsm8k", *given.gsm8k] if given.gsm8k else []
        ended = watched(command, given.only, given.seconds, say)
    say(", ".join(f"{name} {how}" for name, how in ended.items()))
    return int(any(how.startswith("FAILED") for how in ended.values()))


if __name__ == "__main__":
    sys.exit(main())
