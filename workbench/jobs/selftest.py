"""The doctor's second half: a model of three megabytes steps, is pushed, saved, restored and sharded on this machine's devices.

The numbers that it must give are those of a batch that was recorded on another machine, those of the CPU, or those of one process.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from workbench.base.distribution import install
from workbench.base.memory import gib
from workbench.base.metrics import reduce
from workbench.dataproto.core import DataProto
from workbench.datasets.rows import rows
from workbench.engines import Request, SamplingSettings, local, paired
from workbench.engines.fsdp_engine.engine import fsdp
from workbench.engines.paired import check_push
from workbench.engines.vllm_server.engine import VllmSettings, importable, interpreter, vllm
from workbench.engines.weights import weights_of
from workbench.jobs import starter
from workbench.jobs.machine import OK, SKIPPED, WARNING, WRONG, Finding, judged
from workbench.recipes import grpo
from workbench.stages.rollout import columns_of
from workbench.stages.update import PolicyLoss, Update
from workbench.steps.stepper import Stepper

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
    """The tiny model's folder in this installation."""
    return starter.files()["data/tiny-arith/config.json"].parent


def recorded() -> DataProto:
    """64 rows that the tiny model wrote on another machine, with their log-probs in float32 and advantages."""
    folder = starter.files()["data/arith-batch/trace.json"].parent
    columns: dict[str, torch.Tensor] = {}
    # its tensors alone: a bare machine reads no parquet
    for phase in ("00_rollout", "01_reward", "02_old_log_prob", "04_advantage"):
        columns |= load_file(folder / phase / "tensors.safetensors")
    return DataProto.from_single_dict(columns)


def opened(**settings: Any) -> Any:
    """The tiny model as a local engine, in float32 unless the settings say otherwise."""
    return local(model(), **{"lr": 1e-4, "dtype": "float32", **settings})


def updated(engine: Any, batch: DataProto) -> dict[str, float]:
    """Metrics of one GRPO update of the engine by a batch that has advantages."""
    outcome = Update(engine, PolicyLoss(), allow_stale=True)(batch)
    return reduce([outcome.metrics])


def gap_of(found: torch.Tensor, expected: torch.Tensor, batch: DataProto) -> float:
    """Largest difference of two tensors [B, T] on the response tokens; NaN where one has NaN."""
    return float((found.cpu() - expected.cpu())[batch["response_mask"].bool()].abs().max())


def step() -> Finding:
    """One GRPO step as a run does it, rollout to update, in the dtype that the device gets by default."""
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
    said = f"{len(batch)} rows in {seconds:.1f} s on {device}, reward {float(batch['reward'].mean()):.2f}, gradient norm {norm:.3f}"
    if engine.version != 1 or not 0 < norm < float("inf"):
        return Finding(WRONG, f"{said}, policy version {engine.version}", "the update did nothing: see `numbers`")
    if not bool(batch["scored"].all()):
        return Finding(WRONG, f"{said}; {int((~batch['scored']).sum())} rows were not scored", "see batch['score']")
    if not gap < 0.5:
        return Finding(WRONG, f"{said}; sampled and scored log-probs are {gap:.2g} nats apart", "see `numbers`")
    return Finding(OK, f"{said}; sampled and scored log-probs {gap:.0e} nats apart")


def numbers() -> Finding:
    """Log-probs and an update of a recorded batch: as recorded, and on a GPU as on the CPU."""
    batch, engine = recorded(), opened()
    gap = gap_of(engine.compute_log_probs(batch)["log_probs"], batch["old_log_probs"], batch)
    said = f"log-probs of a recorded batch {gap:.0e} nats from those recorded"
    do = "float32 is not computed as such: unset TF32 overrides (NVIDIA_TF32_OVERRIDE), try another torch or driver"
    if not gap < EXACT or not torch.cuda.is_available():
        return judged(said, (not gap < EXACT, WRONG, do))
    here, there = updated(engine, batch), updated(opened(device="cpu"), batch)
    apart = abs(here["actor/grad_norm"] / there["actor/grad_norm"] - 1)
    return judged(f"{said}; gradient norm {apart:.0e} from the CPU's", (not apart < NEAR, WRONG, do))


def push() -> Finding:
    """Learn, push the weights to a second engine, and let that one score: the same numbers and version."""
    learner, sampler, batch = opened(), opened(), recorded()
    pair = paired(learner, sampler)
    updated(learner, batch)
    how = push_once(pair)
    gap = gap_of(sampler.compute_log_probs(batch)["log_probs"], learner.compute_log_probs(batch)["log_probs"], batch)
    wrong = sampler.version != learner.version or not gap < EXACT
    said = f"{how}, log-probs {gap:.0e} nats apart, version {sampler.version}" + f" of {learner.version}" * wrong
    do = "the sampler does not have the learner's weights: attach this report to an issue"
    return judged(said, (wrong, WRONG, do))


def push_once(pair: Any) -> str:
    """Push a pair's weights once, compare what is sampled with them, and say how."""
    return str(check_push(pair, [tuple(pair.tokenizer.encode(text)) for text, _ in QUESTIONS]))


def vllm_engine() -> Finding:
    """Start vLLM in its own interpreter, push weights, compare its log-probs with the learner's; on a GPU sleep and wake."""
    python, gpu = interpreter(VllmSettings()), torch.cuda.is_available()
    if not importable(python):
        do = f"{install('vllm')}, or WORKBENCH_VLLM_PYTHON=… for one beside; the local engine needs none"
        return Finding(SKIPPED, "vLLM is not installed", do)
    began = time.perf_counter()
    learner = opened(lr=1e-2)  # a step so large that old weights would be seen
    settings: dict[str, Any] = {"max_model_len": 256, "max_num_seqs": 16, "kv_cache_memory_mb": 256}
    dtype = "bfloat16" if gpu else "float32"
    with vllm(model(), **settings, dtype=dtype, enforce_eager=True, sleep_mode=gpu) as sampler:
        said = [f"{sampler.about().partition(', process')[0]}, started in {time.perf_counter() - began:.0f} s"]
        pair = paired(learner, sampler, share_device=gpu)
        updated(learner, recorded())  # beside a GPU's vLLM, which sleeps meanwhile
        said.append(f"pushed {push_once(pair)}")
        gaps = [sampled_gap(pair)]
        if gpu:
            free = torch.cuda.mem_get_info()[0]
            sampler.sleep()
            freed = torch.cuda.mem_get_info()[0] - free
            sampler.wake()
            gaps.append(sampled_gap(pair))
            said.append(f"sleep freed {gib(max(freed, 0))}")
            if freed <= 0:
                return Finding(WARNING, "; ".join(said), "sleep frees nothing: use share_device=False, or two GPUs")
        said.append(f"log-probs {max(gaps):.0e} nats from the learner's on average")
    said += [] if gpu else ["no sleep on a CPU"]
    do = "vLLM computes other numbers than the learner, or kept old weights: try another version, attention or dtype"
    return judged("; ".join(said), (not max(gaps) < SAMPLERS, WRONG, do))


def sampled_gap(pair: Any) -> float:
    """Mean difference in nats between the log-probs that a pair's sampler wrote and those that its learner scores."""
    ids = [tuple(pair.tokenizer.encode(text)) for text, _ in QUESTIONS]
    settings = SamplingSettings(max_tokens=24, ignore_eos=True)
    samples = pair.sample_many([Request(one, settings, seed) for seed, one in enumerate(ids)])
    batch = DataProto.from_single_dict(columns_of(ids, samples, 0))
    scored = pair.learner.compute_log_probs(batch)["log_probs"].cpu()
    return float((scored - batch["rollout_log_probs"])[batch["response_mask"].bool()].abs().mean())


def saves() -> Finding:
    """A snapshot and a checkpoint: restored and read back, the weights are the same bit for bit, and the next step is, too."""
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
        return Finding(WRONG, f"not as before: {', '.join(wrong)}", "trust no checkpoint: check memory and disk")
    return Finding(OK, "snapshot and checkpoint give the weights back bit for bit, and the next step's gradient")


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Whether weights are equal bit for bit."""
    return one.keys() == other.keys() and all(torch.equal(one[name].cpu(), other[name].cpu()) for name in one)


def shards() -> Finding:
    """FSDP over all GPUs, or over two processes of the CPU: the log-probs and the gradient of one process."""
    cards = torch.cuda.device_count()
    ranks, where = (cards, "GPUs") if cards else (2, "processes of the CPU")
    batch, here = recorded(), opened()
    there = fsdp(model(), ranks=ranks, lr=1e-4, dtype="float32", threads=None if cards else 1)
    try:
        gap = gap_of(there.compute_log_probs(batch)["log_probs"], here.compute_log_probs(batch)["log_probs"], batch)
        one, many = (updated(engine, batch)["actor/grad_norm"] for engine in (here, there))
    finally:
        there.close()
    said = f"{ranks} {where}: log-probs {gap:.0e} nats from one process, gradient norm {abs(many / one - 1):.0e}"
    do = "ranks do not add up: see `collectives`; NCCL_P2P_DISABLE=1 tells whether it is the links"
    return judged(said, (not gap < EXACT or not abs(many / one - 1) < NEAR, WRONG, do))
