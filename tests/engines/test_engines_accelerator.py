"""The local engine on a pretended accelerator: every tensor where it must be, and what the host waits for.

`accelerator_driver.py` runs once in a process of its own, because torch has a backend to the end of its process; what a GPU alone
has (several devices, threads) is mocked.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.patience import patience

from workbench.engines import local
from workbench.engines.fsdp_engine import worker
from workbench.engines.local_engine import scoring
from workbench.runs import checkpoint
from workbench.testing.engines import EngineContract

CONTRACT = EngineContract()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    driver, folder = Path(__file__).parent / "accelerator_driver.py", tmp_path_factory.mktemp("accelerator")
    path = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, sys.path), os.getcwd()])
    command, given = [sys.executable, str(driver), str(folder)], {**os.environ, "PYTHONPATH": path}
    ended = subprocess.run(command, env=given, capture_output=True, text=True, timeout=patience(500), check=False)
    assert ended.returncode == 0, ended.stderr[-4000:]
    return json.loads(ended.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("model", ["qwen2", "llama"])
def test_a_model_samples_scores_and_learns_as_on_the_cpu(found: Any, model: str) -> None:
    one = found[f"same as the CPU: {model}"]
    assert one["paths"] == ["Paths(own_head=False, pack=True, decode='lean')"] * 2
    assert one["scores"] < 2e-5 and one["metrics"] < 1e-5 and one["columns"] < 1e-5
    assert one["gradients"] < 1e-5
    assert one["full_kl"] == [0.0, 0.0], "to itself"
    assert one["restored"] == one["loaded"] == 0.0
    assert one["moments"] == ["pretended:0"]


@pytest.mark.slow
def test_a_critic_and_adapters_are_those_of_the_cpu(found: Any) -> None:
    critic, adapters = found["critic"], found["adapters"]
    assert critic["values"] < 1e-5 and critic["moved"]
    assert adapters["policy"] < 2e-5 and adapters["reference"] < 2e-5 and adapters["moved"]
    assert adapters["merged"] < 1e-5
    assert adapters["moments"] == ["cpu", "pretended:0"], "offloaded, but for the numbers of steps"


@pytest.mark.slow
def test_under_autocast_what_is_kept_is_float32(found: Any) -> None:
    one = found["bfloat16"]
    assert one["casts"] > 0, "autocast is on"
    for name in ("weights", "moments", "gradients", "scores", "values", "logits"):
        assert one[name] == ["torch.float32"], name
    assert 0 < one["to the CPU"] < 0.1


@pytest.mark.slow
def test_what_the_host_waits_for(found: Any) -> None:
    """Budget: 3 of a micro-batch and of a decode step; a plain policy loss of packed rows has none."""
    waits = found["waits"]
    assert max(waits.values()) <= 3, waits
    for name in (
        "learn: vanilla",
        "learn: on policy",
        "learn: gspo, entropy, kl",
        "learn: value",
        "learn: lora",
        "score",
    ):
        assert waits[name] == 0, name
    assert all(waits[f"sample: {way}"] == 1 for way in ("lean", "shared prompts", "greedy", "top_k")), "the tokens"
    assert waits["sample: top_p"] == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("slip", "said"),
    [
        ("a layout stays on the CPU", "same device, but found pretended:0 and cpu in aten.embedding"),
        ("rows stay on the CPU", "same device"),
        ("a head stays on the CPU", "same device"),
        ("moments stay on the CPU", "same device, but found pretended:0 and cpu in aten._fused_adamw_"),
        ("uniforms stay on the CPU", "same device"),
        ("a score by numpy", "can't convert pretended device type tensor to numpy"),
        ("a loss asks for its number", "1.0"),
        ("logits are drawn from on the host", "2.0"),
    ],
)
def test_planted_slips_are_found(found: Any, slip: str, said: str) -> None:
    assert said in found["slips"][slip]


# --- precision under autocast, on the CPU's own ----------------------------------------------------


def in_half(one: torch.Tensor) -> bool:
    """Whether bfloat16 holds all the numbers as they are."""
    return torch.equal(one, one.bfloat16().float())


@pytest.mark.slow
def test_the_exact_kl_is_of_the_distributions_that_log_probs_are_of(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, seen = local(tiny, device="cpu", dtype="bfloat16", self_check=False), list[torch.Tensor]()
    monkeypatch.setattr(scoring, "full_kl", lambda *logits: seen.extend(logits) or logits[0].sum(-1))
    engine.full_kl(CONTRACT.batch(engine, 1), engine.reference())
    assert len(seen) == 2 and all(in_half(one) for one in seen), "logits of policy and reference"


@pytest.mark.slow
def test_a_critics_head_computes_in_float32(tiny: str) -> None:
    critic = local(tiny, device="cpu", dtype="bfloat16", self_check=False).critic()
    torch.nn.init.normal_(critic._head.weight, generator=torch.Generator().manual_seed(0))
    values = critic.compute_log_probs(CONTRACT.batch(critic, 1), ("values",))["values"]
    assert values.any() and not in_half(values)


# --- several GPUs, mocked --------------------------------------------------------------------------


class Gpus:
    """torch.cuda of a machine with GPUs, as far as it is asked here: each thread has a device of its own, 0 at first."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
        self._local, self.states = threading.local(), dict[int, torch.Tensor]()
        for name, value in {
            "is_available": lambda: True,
            "device_count": lambda: count,
            "set_device": lambda device: setattr(self._local, "device", device),
            "set_rng_state": lambda state, device: self.states.update({device: state}),
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)

    @property
    def current(self) -> int:
        """The device of the thread that asks."""
        return getattr(self._local, "device", 0)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 3])
def test_a_thread_that_saves_has_its_ranks_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, rank: int) -> None:
    """Torch's loader waits for copies of the thread's current device: with another it writes what is not there yet."""
    gpus, wrote = Gpus(monkeypatch, 4), list[tuple[str, int]]()
    shards = worker.Shards(rank, 4, device="cuda")
    assert gpus.current == rank

    def write(*_: Any) -> Any:
        wrote.append((threading.current_thread().name, gpus.current))
        return SimpleNamespace(wait=lambda: None)

    monkeypatch.setattr(worker, "_plan_save", lambda *_: (SimpleNamespace(write_data=write), None, None))
    monkeypatch.setattr(worker, "everyone", lambda *_: None)
    monkeypatch.setattr(worker.distributed, "get_rank", lambda: rank)
    monkeypatch.setattr(worker.distributed, "get_world_size", lambda: 4)
    shards._store = SimpleNamespace(set=lambda *_: None, check=lambda _: False)
    model = SimpleNamespace(state=lambda _: ({"one": torch.zeros(1)}, {}), steps=lambda: 0, scaling=dict)
    shards._models["actor"] = model  # type: ignore[assignment]
    shards.save_shards("actor", str(tmp_path / "state"), {"id": "x"}, weights=True, seconds=0.2, wait=True)
    assert wrote == [("workbench-saving", rank)]


@pytest.mark.parametrize(("then", "now"), [(1, 1), (3, 1), (1, 3)])
def test_random_states_go_to_the_gpus_that_are_there(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, then: int, now: int
) -> None:
    state = {**checkpoint.rng_state(), "cuda": [[gpu] * 16 for gpu in range(then)]}
    gpus = Gpus(monkeypatch, now)
    with caplog.at_level(logging.WARNING, "workbench"):
        checkpoint.restore_rng(state)
    assert {gpu: int(one[0]) for gpu, one in gpus.states.items()} == {gpu: gpu for gpu in range(min(then, now))}
    assert bool(caplog.records) == (then != now)
    assert then == now or f"of {then} GPUs, this machine has {now}" in caplog.text
