"""Memory that runs out, by injection: each error names the phase, what was live, and the setting that helps."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import workbench as wb
from workbench.base.errors import OutOfMemory
from workbench.base.memory import peak
from workbench.engines.local_engine import memory
from workbench.engines.local_engine.learning import Optimizer

GIB = 1 << 30
CUDA = torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB\nmore lines")
CPU = RuntimeError("[enforce fail at alloc_cpu.cpp:117] . DefaultCPUAllocator: can't allocate memory: 9 bytes")


def pipeline(tiny: str, **settings: Any) -> tuple[Any, Any]:
    engine = wb.engines.local(tiny, lr=1e-3, device="cpu", **settings)
    pipe = wb.recipes.grpo(engine, group_size=2, max_tokens=4, reward=lambda response: float(len(response)))
    return engine, wb.Stepper(pipe, wb.rows("data/arith/train.parquet", max_prompt_length=256).batch(2))


def raising(error: BaseException) -> Callable[..., Any]:
    def run(*args: Any, **named: Any) -> Any:
        raise error

    return run


@pytest.mark.slow
@pytest.mark.parametrize("error", [CUDA, CPU, MemoryError("no room")], ids=["cuda", "cpu", "python"])
@pytest.mark.parametrize(
    ("phase", "where", "said"),
    [
        ("rollout", "workbench.engines.local_engine.engine.decode", "sampling with 4 rows of"),
        ("old_log_prob", "workbench.engines.local_engine.scoring.collect", "scoring with micro-batches of 4096 tokens"),
        ("update_actor", "workbench.engines.local_engine.scoring.outputs", "learn with 4 rows × .* tokens"),
        ("update_actor", "torch.optim.AdamW.step", "the optimizer step with 4 rows ×"),
    ],
)
def test_stepping_names_the_phase_and_what_was_live(
    tiny: str, monkeypatch: pytest.MonkeyPatch, error: BaseException, phase: str, where: str, said: str
) -> None:
    engine, s = pipeline(tiny)
    stages = s.pipeline.names
    if (before := stages.index(phase)) > 0:
        s.run(until=stages[before - 1])
    kept = {name: one.clone() for name, one in engine._state().items()}
    monkeypatch.setattr(where, raising(error))
    first = str(error).splitlines()[0][:20].replace("[", r"\[").replace(".", r"\.")
    wanted = (
        rf"phase '{phase}': out of memory in {said}.*live on cpu: weights 3\.3 MiB.*rest of the process .*found {first}"
    )
    with pytest.raises(OutOfMemory, match=wanted) as caught:
        s.next()
    assert "lower m" in str(caught.value) and caught.value.__cause__ is error
    monkeypatch.undo()
    assert all(torch.equal(one, kept[name]) for name, one in engine._state().items()), "and nothing has changed"
    s.run()


@pytest.mark.slow
def test_code_that_is_no_engines_is_named_by_its_phase(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, s = pipeline(tiny)
    s.run(until="ref_log_prob" if "ref_log_prob" in s.pipeline.names else "old_log_prob")
    monkeypatch.setattr(type(s.pipeline["advantage"]), "__call__", raising(MemoryError()))
    with pytest.raises(OutOfMemory, match=r"phase 'advantage': out of memory in its own code with 4 rows.*fewer|lower"):
        s.next()


def on_a_gpu(monkeypatch: pytest.MonkeyPatch, *, allocated: int, reserved: int, free: int, others: int = 0) -> None:
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device=None: allocated)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device=None: reserved)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (free, free + reserved + others))


def test_what_others_hold_of_a_gpu_is_named_with_share_device(monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_gpu(monkeypatch, allocated=10 * GIB, reserved=12 * GIB, free=GIB, others=40 * GIB)
    held = memory.LiveTensors(torch.device("cuda", 0), {"weights": 8 * GIB}, wb.engines.LocalSettings())
    said = r"CUDA itself 40\.00 GiB.*lower micro_batch_tokens, or free.*share_device=True"
    with pytest.raises(OutOfMemory, match=said), memory.memory_errors("learn", "4 rows", holds=lambda: held):
        raise CUDA


@pytest.mark.parametrize(
    ("phase", "parts", "reserved", "settings", "do"),
    [
        ("learn", (10, 2, 4), 40, {}, r"lower micro_batch_tokens \(now 16,384\) or set gradient_checkpointing=True$"),
        ("learn", (10, 2, 4), 40, {"gradient_checkpointing": True}, r"lower micro_batch_tokens \(now 16,384\)$"),
        ("the optimizer step", (4, 4, 20), 31, {}, r"offload='optimizer' or lora_rank=32 .* or more ranks"),
        ("the optimizer step", (4, 4, 20), 31, {"offload": "optimizer", "lora_rank": 8}, r"more ranks: engines.fsdp\(…\)$"),
        ("scoring", (29, 0, 0), 31, {}, r"lower micro_batch_tokens, or lora_rank=32.*a smaller model$"),
        ("scoring", (29, 0, 0), 31, {"lora_rank": 8}, r"lower micro_batch_tokens, or base_dtype='nf4'.*a smaller model$"),
        ("sampling", (10, 0, 0), 40, {}, r"lower max_wave$"),
        ("learn", (4, 4, 4), 79, {}, r"PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"),
    ],
)  # fmt: skip
def test_on_a_gpu_the_largest_part_decides_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
    phase: str,
    parts: tuple[int, int, int],
    reserved: int,
    settings: dict[str, Any],
    do: str,
) -> None:
    """30 GiB allocated; what is neither weights, gradients nor moments is the pass's own."""
    on_a_gpu(monkeypatch, allocated=30 * GIB, reserved=reserved * GIB, free=GIB)
    sizes = {name: size * GIB for name, size in zip(("weights", "gradients", "moments"), parts, strict=True)}
    held = memory.LiveTensors(torch.device("cuda", 0), sizes, wb.engines.LocalSettings(**settings))
    setting = "max_wave" if phase == "sampling" else "micro_batch_tokens"
    with pytest.raises(OutOfMemory, match=do) as caught, memory.memory_errors(phase, "4 rows", setting, lambda: held):
        raise CUDA
    passing = "KV cache and activations" if phase == "sampling" else "activations"
    own = 30 - sum(parts)
    assert (f"{passing} {own}.00 GiB" in str(caught.value)) == (own > 0)
    assert f"cached blocks {reserved - 30}.00 GiB, free 1.00 GiB" in str(caught.value)


def test_live_parts_are_counted_on_the_models_device() -> None:
    """Float32: 12 weights; Adam's moments are two of them and one step number each."""
    model = torch.nn.Linear(3, 3)
    settings: Any = wb.engines.LocalSettings(lr=1e-3)
    optimizer = Optimizer(dict(model.named_parameters()), settings)
    assert memory.live(model, None, settings).parts == {"weights": 48, "gradients": 0, "moments": 0}
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert memory.live(model, optimizer, settings).parts == {"weights": 48, "gradients": 48, "moments": 96 + 8}


def test_the_peak_of_a_process_begins_anew() -> None:
    before = peak(begin=True)
    held = torch.ones(32 << 20, dtype=torch.uint8)
    high = peak(begin=True)
    del held
    assert before > 0 and high >= before * 0 + (32 << 20)
    assert peak() <= high + (1 << 20)  # what the test itself has taken since


def test_the_peaks_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 5)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1, 9))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: asked.append("reset"))
    assert memory.peaks("cuda", True) | {"host": 0} == {"host": 0, "device": 5, "total": 9} and asked == ["reset"]
    assert SimpleNamespace(**memory.peaks("cpu")).device == 0
