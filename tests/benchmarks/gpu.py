"""A model of a real one's shape, with random weights, on one machine: sampling, log-probs, updates, memory, tokens a second.

`python tests/benchmarks/gpu.py` takes the 0.5B shape on the GPU; `--shape tiny --device cpu` says in seconds whether it works.
vLLM and FSDP (NCCL on GPUs, gloo on a CPU) are measured where they are there. The table goes into `tests/benchmarks/README.md`.
"""

from __future__ import annotations

import argparse
import gc
import platform
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

sys.path += [str(Path(__file__).parents[1])]
from support.models import SHAPES, make_shaped_model

import workbench as wb
from workbench.base.metrics import reduce
from workbench.engines import LossCounts, Request, Sample, SamplingSettings, local
from workbench.engines.fsdp_engine.engine import fsdp
from workbench.engines.local_engine.memory import gib
from workbench.engines.settings import LocalSettings
from workbench.engines.vllm_server.engine import VllmSettings, importable, interpreter, vllm
from workbench.stages.rollout import columns_of
from workbench.testing.engines import LikelihoodLoss

LARGEST_GAP = 1e-3
"""Nats between log-probs of float32 on the device and on the CPU."""


@dataclass(frozen=True)
class Work:
    """How much is asked."""

    shape: str = "0.5b"
    device: str = "cuda"
    rows: int = 256
    prompt: int = 256
    """Tokens of a prompt."""
    response: int = 256
    """Tokens of a response."""
    micro_batch_tokens: int = 16_384
    repeats: int = 2
    """Of each measurement, after one that warms up."""

    @property
    def tokens(self) -> int:
        """Of all rows, prompts and responses."""
        return self.rows * (self.prompt + self.response)


@dataclass(frozen=True)
class Line:
    """One measurement."""

    what: str
    seconds: float | None = None
    """The quickest of the repeats."""
    rate: float | None = None
    """Tokens a second."""
    memory: int | None = None
    """Largest bytes: allocated on the GPU, on a CPU the process's so far."""
    note: str = ""

    def cells(self) -> list[str]:
        """As text."""
        seconds = f"{self.seconds:.3f}" if self.seconds is not None else ""
        rate = f"{self.rate:,.0f}" if self.rate is not None else ""
        return [self.what, seconds, rate, gib(self.memory) if self.memory else "", self.note]


def timed(work: Work, what: str, tokens: int, job: Callable[[], Any], note: str = "") -> Line:
    """Run it once to warm up, then the quickest of the repeats."""
    on_gpu = work.device == "cuda"
    job()
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    spent = []
    for _ in range(work.repeats):
        began = time.perf_counter()
        job()
        if on_gpu:
            torch.cuda.synchronize()
        spent.append(time.perf_counter() - began)
    peak = torch.cuda.max_memory_allocated() if on_gpu else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    return Line(what, min(spent), tokens / min(spent) if tokens else None, peak, note)


def requests_of(work: Work) -> list[Request]:
    """Random prompts; responses of full length whatever is sampled."""
    draw = torch.Generator().manual_seed(0)
    words = SHAPES[work.shape]["vocab_size"]
    ids = torch.randint(4, words, (work.rows, work.prompt), generator=draw).tolist()
    settings = SamplingSettings(max_tokens=work.response, ignore_eos=True)
    return [Request(tuple(one), settings, number) for number, one in enumerate(ids)]


def batch_of(requests: list[Request], samples: list[Any]) -> wb.DataProto:
    """Sampled rows as a batch."""
    return wb.DataProto.from_single_dict(columns_of([one.ids for one in requests], samples, 0))


def counts_of(batch: wb.DataProto) -> LossCounts:
    """Of the whole batch."""
    return LossCounts(float(batch["response_mask"].sum()), float(len(batch)))


def settings_of(work: Work, **more: Any) -> dict[str, Any]:
    """Of a learner."""
    return {"device": work.device, "lr": 1e-6, "micro_batch_tokens": work.micro_batch_tokens, **more}


def local_lines(work: Work, folder: Path, kept: dict[str, Any]) -> Iterator[Line]:
    """The engine in this process; leaves its batch and log-probs in `kept`."""
    engine = local(folder, **settings_of(work))
    asked = requests_of(work)
    yield timed(work, "local: sampling", work.rows * work.response, lambda: engine.sample_many(asked))
    samples = engine.sample_many(asked)
    kept["batch"] = batch = batch_of(asked, samples)
    yield timed(work, "local: log-probs", work.tokens, lambda: engine.compute_log_probs(batch))
    scored = engine.compute_log_probs(batch)["log_probs"]
    kept["log_probs"] = scored
    sampled = torch.tensor([sample.log_probs for sample in samples])
    gap = float((scored.cpu() - sampled)[batch["response_mask"].bool()].abs().max())
    yield Line("local: log-probs, sampler to trainer", note=f"at most {gap:.1e} nats apart")
    counts = counts_of(batch)
    yield timed(work, "local: update", work.tokens, lambda: engine.learn(batch, LikelihoodLoss(), counts))
    if work.device == "cuda":
        from workbench.engines.weights import weights_of

        yield timed(work, "local: whole state dict", 0, lambda: weights_of(engine))


def random_batch(work: Work) -> wb.DataProto:
    """Rows of full length that nobody sampled."""
    asked = requests_of(work)
    draw = torch.Generator().manual_seed(1)
    words = torch.randint(4, SHAPES[work.shape]["vocab_size"], (work.rows, work.response), generator=draw).tolist()
    return batch_of(asked, [Sample(tuple(one), (0.0,) * len(one), "length", 0) for one in words])


class Plain:
    """The loop that anybody would write: transformers' model in float32 under autocast, cross-entropy of the responses, AdamW."""

    def __init__(self, work: Work, folder: Path, lora_rank: int, checkpointing: bool) -> None:
        from transformers import AutoModelForCausalLM

        self.work = work
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
        self.model: Any = model.train().to(torch.device(work.device))
        if checkpointing:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
            self.model.enable_input_require_grads()
        if lora_rank:
            from peft import LoraConfig, get_peft_model

            targets = list(LocalSettings().lora_targets)
            config = LoraConfig(r=lora_rank, lora_alpha=int(LocalSettings().lora_alpha), target_modules=targets)
            self.model = get_peft_model(self.model, config)
        self.weights = [one for one in self.model.parameters() if one.requires_grad]
        self.optimizer = torch.optim.AdamW(self.weights, lr=1e-6, fused=work.device == "cuda")

    def __call__(self, batch: wb.DataProto) -> float:
        """One step on a batch of rows of equal length; returns the gradient's norm."""
        work = self.work
        size = max(work.micro_batch_tokens // (work.prompt + work.response), 1)
        for part in batch["input_ids"].split(size):
            ids = part.to(work.device)
            with torch.autocast(work.device, torch.bfloat16, enabled=work.device == "cuda"):
                logits = self.model(input_ids=ids, logits_to_keep=work.response + 1, use_cache=False).logits[:, :-1]
            lost = torch.nn.functional.cross_entropy(
                logits.float().flatten(0, 1), ids[:, -work.response :].flatten(), reduction="sum"
            )
            (lost / (work.rows * work.response)).backward()
        norm = torch.nn.utils.clip_grad_norm_(self.weights, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(norm)


def plain_lines(work: Work, folder: Path, lora_rank: int = 0, checkpointing: bool = False) -> Iterator[Line]:
    """Updates of the local engine beside those of a plain PyTorch loop, of the same rows cut in the same way. Raises
    `AssertionError` where their gradients differ: they would not do the same work."""
    name = f"{work.shape} {f'LoRA {lora_rank}' if lora_rank else 'full'}: update"
    batch = random_batch(work)

    def measured(what: str, step: Callable[[], Any]) -> tuple[Line, float]:
        norms: list[float] = []
        line = timed(work, f"{name}, {what}", work.tokens, lambda: norms.append(float(step())))
        return line, norms[0]

    def plain() -> tuple[Line, float]:
        loop = Plain(work, folder, lora_rank, checkpointing)
        return measured("a plain loop", lambda: loop(batch))

    def ours() -> tuple[Line, float]:
        more = {"lora_rank": lora_rank, "gradient_checkpointing": checkpointing}
        engine, counts, loss = local(folder, **settings_of(work, **more)), counts_of(batch), LikelihoodLoss()
        return measured("the local engine", lambda: reduce([engine.learn(batch, loss, counts).metrics])["grad_norm"])

    found = []
    for side in (plain, ours):
        found.append(side())
        _forget(work.device)  # one model at a time
    (theirs, norm), (mine, other) = found
    assert lora_rank or abs(other / norm - 1) < 0.02, (norm, other)  # adapters start at random
    yield theirs
    assert theirs.seconds is not None and mine.seconds is not None
    yield replace(mine, note=f"{theirs.seconds / mine.seconds:.2f} times as fast as the plain loop")


def large_lines(work: Work, home: Path) -> Iterator[Line]:
    """On a GPU of 40 GB or more: LoRA on the 7B shape, its gradients checkpointed."""
    if work.device != "cuda" or torch.cuda.get_device_properties(0).total_memory < 40 << 30:
        return
    if find_spec("peft") is None:
        yield Line("7b LoRA", note="not measured: peft is not installed")
        return
    large = replace(work, shape="7b", rows=min(work.rows, 32), micro_batch_tokens=min(work.micro_batch_tokens, 8_192))
    folder = make_shaped_model(home / "7b", "7b", dtype="bfloat16", device="cuda")
    _forget(work.device)
    yield from plain_lines(large, folder, lora_rank=32, checkpointing=True)


def fsdp_lines(work: Work, folder: Path, kept: dict[str, Any], ranks: int) -> Iterator[Line]:
    """Shards over all GPUs, or over processes of this machine."""
    batch, counts = kept["batch"], counts_of(kept["batch"])
    engine = fsdp(folder, ranks=ranks, **settings_of(work))
    try:
        note = f"{ranks} ranks"
        line = timed(work, "fsdp: log-probs", work.tokens, lambda: engine.compute_log_probs(batch), note)
        yield Line(line.what, line.seconds, line.rate, None, note)
        line = timed(work, "fsdp: update", work.tokens, lambda: engine.learn(batch, LikelihoodLoss(), counts), note)
        memory = engine.memory()
        state = max(one["weights"] + one["optimizer"] for one in memory)
        peak = max(one["peak"] for one in memory)
        yield Line(line.what, line.seconds, line.rate, peak, f"{note}; weights and optimizer {gib(state)} a rank")
    finally:
        engine.close()


def vllm_lines(work: Work, folder: Path, kept: dict[str, Any]) -> Iterator[Line]:
    """vLLM in its own process, and a push of the learner's weights to it."""
    settings: dict[str, Any] = {"max_model_len": work.prompt + work.response, "max_num_seqs": work.rows}
    if work.device == "cpu":
        settings["kv_cache_memory_mb"] = 256
    learner = local(folder, **settings_of(work))
    began = time.perf_counter()
    with vllm(folder, **settings) as engine:
        yield Line("vllm: start", time.perf_counter() - began)
        asked = requests_of(work)
        line = timed(work, "vllm: sampling", work.rows * work.response, lambda: engine.sample_many(asked))
        yield Line(line.what, line.seconds, line.rate)
        line = timed(work, "vllm: weights pushed", 0, lambda: engine.sync(learner))
        yield Line(line.what, line.seconds)
        samples = engine.sample_many(asked)
        batch = batch_of(asked, samples)
        there = torch.tensor([sample.log_probs for sample in samples])
        apart = (learner.compute_log_probs(batch)["log_probs"].cpu() - there)[batch["response_mask"].bool()].abs()
        yield Line(
            "vllm: log-probs after the push",
            note=f"{float(apart.mean()):.1e} nats apart, at most {float(apart.max()):.1e}",
        )


def equality(device: str) -> Iterator[Line]:
    """Log-probs of a small shape on the device beside float32 on the CPU. Raises `AssertionError` where float32 is apart."""
    small = Work(shape="tiny", device=device, rows=8, prompt=16, response=24)
    with tempfile.TemporaryDirectory() as home:
        folder = make_shaped_model(Path(home) / "model", "tiny")
        here = local(folder, device="cpu", dtype="float32")
        asked = requests_of(small)
        batch = batch_of(asked, here.sample_many(asked))
        expected = here.compute_log_probs(batch)["log_probs"]
        mask = batch["response_mask"].bool()
        for dtype in ("float32", "bfloat16"):
            there = local(folder, device=device, dtype=dtype).compute_log_probs(batch)["log_probs"].cpu()
            gap = float((there - expected)[mask].abs().max())
            assert dtype != "float32" or gap < LARGEST_GAP, gap
            yield Line(f"tiny shape, {dtype} on {device} to float32 on the CPU", note=f"at most {gap:.1e} nats apart")


def lines_of(work: Work, ranks: int, without: set[str]) -> Iterator[Line]:
    """All of them, as they come."""
    yield from equality(work.device)
    kept: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as home:
        folder = make_shaped_model(Path(home) / "model", work.shape)
        yield from local_lines(work, folder, kept)
        _forget(work.device)
        if "plain" not in without:
            yield from plain_lines(work, folder)
            yield from large_lines(work, Path(home))
        if "fsdp" not in without:
            yield from fsdp_lines(work, folder, kept, ranks)
        if "vllm" in without:
            return
        if not importable(interpreter(VllmSettings())):
            yield Line("vllm", note="not installed")
            return
        yield from vllm_lines(work, folder, kept)


def _forget(device: str) -> None:
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def machine(device: str) -> str:
    """Where it was measured."""
    name = f"{torch.cuda.get_device_name()} ×{torch.cuda.device_count()}" if device == "cuda" else platform.machine()
    return f"{name}, {torch.get_num_threads()} threads, torch {torch.__version__}"


def main() -> None:
    """The table."""
    there = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=tuple(SHAPES), default="0.5b")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if there else "cpu")
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--prompt", type=int, default=256, help="tokens")
    parser.add_argument("--response", type=int, default=256, help="tokens")
    parser.add_argument("--micro-batch-tokens", type=int, default=16_384)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count() if there else 2)
    parser.add_argument("--without", nargs="*", choices=("plain", "fsdp", "vllm"), default=())
    given = vars(parser.parse_args())
    ranks, without = given.pop("ranks"), set(given.pop("without"))
    if given["device"] == "cuda" and not there:
        parser.exit(2, "no CUDA device is here; --shape tiny --device cpu runs the same on the CPU\n")
    work = Work(**given)
    print(f"{datetime.now(UTC):%Y-%m-%d}, {machine(work.device)}; {work.shape} shape, {work.rows} rows of {work.prompt} + "
          f"{work.response} tokens, micro-batches of {work.micro_batch_tokens} tokens\n")  # fmt: skip
    print("| | s | tokens/s | memory | |\n|---|---|---|---|---|")
    for line in lines_of(work, ranks, without):
        print(f"| {' | '.join(line.cells())} |", flush=True)


if __name__ == "__main__":
    main()
