"""Parts of a cluster that need no Ray: plans, scatter, packing, environments, memory, timelines, what is shown."""

from __future__ import annotations

import ast
import json
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.lint import lint
from support.patience import LONG, within

from workbench import DataProto
from workbench.base.errors import BatchError, EngineError, SettingError
from workbench.cluster import discovery, plan, ray_internals, scatter, session, status
from workbench.cluster.fitting import fits
from workbench.cluster.pools import Node
from workbench.cluster.ranks import Environment, tail
from workbench.cluster.status import ClusterStatus, WorkerLine
from workbench.cluster.timeline import Event, ordered
from workbench.cluster.transport import pack
from workbench.engines.settings import FsdpSettings
from workbench.jobs import cards

ROOT = Path(__file__).parents[2]
GIB = 1 << 30


def node(name: str, cpus: float = 8, gpus: float = 0, free: float | None = None, alive: bool = True) -> Node:
    left = cpus if free is None else free
    return Node(name, name, "127.0.0.1", alive, cpus, gpus, left, gpus, 16 * GIB, GIB, GIB // 4)


# --- Ray stays outside ------------------------------------------------------------------------------


@pytest.mark.slow
def test_ray_is_imported_when_a_cluster_is_asked_for_and_not_before() -> None:
    code = "import sys, workbench.cluster.session, workbench.cluster.fitting; print('ray' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "False"


def test_without_ray_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(EngineError, match=r"Ray is not installed; pip install 'rl-workbench\[cluster\]'"):
        session.require_ray()


def test_every_wait_goes_through_the_one_wrapper() -> None:
    for path in sorted((ROOT / "workbench" / "cluster").glob("*.py")):
        for one in ast.walk(ast.parse(path.read_text())):
            if isinstance(one, ast.Call) and ast.unparse(one.func) in ("ray.get", "ray.wait"):
                assert path.name == "transport.py", f"{path.name}:{one.lineno}"


# --- plans ----------------------------------------------------------------------------------------


def test_a_plan_seats_every_process_and_the_picture_says_where() -> None:
    made = plan({"global": [8, 8], "rollout": [4]}, [node("a", 16, 8), node("b", 16, 12)], roles={"global": ["actor"]})
    # the shares of 8 go to different nodes; the one with 12 GPUs has 4 left for the rollout
    assert [(seat.rank, seat.node) for seat in made.of("rollout")] == [(rank, "b") for rank in range(4)]
    assert [seat.node for seat in made.of("global")] == ["b"] * 8 + ["a"] * 8
    assert [seat.rank for seat in made.of("global")] == [*range(16)]
    assert made.gpus == 1.0 and len(made.seats) == 20
    text = repr(made)
    assert "20 processes with 1 CPUs and 1 GPUs each on 2 nodes; nothing has started" in text
    assert "global: rank 8, 9, 10, 11, 12, 13, 14, 15 (actor)" in text and "rollout: rank 0, 1, 2, 3" in text
    assert not lint(made._repr_html_()) and made._repr_html_().count("rollout ") == 4


@pytest.mark.parametrize(
    ("spec", "cpus", "told"),
    [
        ({"global": [3]}, 1.0, "pool 'global' needs 3 CPUs on one node for 3 processes; found 2 nodes: a has 2 CPUs"),
        ({"global": [2, 2, 1]}, 1.0, "apart from the pool's 2 other nodes"),
        ({"one": [2], "two": [2], "three": [1]}, 1.0, "pool 'three' needs 1 CPUs"),
        ({"global": [1]}, 2.5, "needs 2.5 CPUs"),
        ({"global": 4}, 1.0, "expected a list of processes per node, as [8, 8]; found 4"),
        ({"global": [2, 0]}, 1.0, "found [2, 0]"),
        ({"global": []}, 1.0, "found []"),
    ],
)
def test_what_has_no_room_is_refused_by_name(spec: Any, cpus: float, told: str) -> None:
    there = [node("a", 2), node("b", 4, free=2), node("dead", 64, alive=False)]
    with pytest.raises(SettingError) as error:
        plan(spec, there, cpus=cpus)
    assert told in str(error.value)


def test_roles_of_a_pool_that_is_not_there() -> None:
    with pytest.raises(SettingError, match="roles for unknown pool golbal; expected one of global"):
        plan({"global": [1]}, [node("a")], roles={"golbal": ["actor"]})


# --- scatter ------------------------------------------------------------------------------------------


def batch(rows: int, lengths: list[int] | None = None) -> DataProto:
    ids = torch.arange(rows * 4).reshape(rows, 4)
    mask = torch.ones_like(ids)
    for row, length in enumerate(lengths or []):
        mask[row, length:] = 0
    return DataProto(
        {"input_ids": ids, "attention_mask": mask}, {"uid": [f"u{row}" for row in range(rows)]}, {"step": 3}
    )


def test_rows_in_order_the_first_ranks_one_more() -> None:
    scattered = scatter(batch(5), 3, balance=False)
    assert scattered.rows == ((0, 1), (2, 3), (4,)) and scattered.own == (2, 2, 1)
    padded = scatter(batch(5), 3, balance=False, pad=True)
    assert padded.rows == ((0, 1), (2, 3), (4, 4)) and padded.own == (2, 2, 1)
    few = scatter(batch(2), 3)
    assert few.rows == ((0,), (1,), ()) and [len(part) for part in few.parts(batch(2))] == [1, 1, 0]
    assert scatter(batch(2), 3, pad=True).rows == ((0,), (1,), (0,))
    with pytest.raises(BatchError, match="at least one row"):
        scatter(batch(0), 2)


def test_balanced_by_length() -> None:
    # 4 + 1 = 5 tokens beside 3 + 2
    scattered = scatter(batch(4, [4, 3, 2, 1]), 2)
    assert sorted(scattered.rows) == [(0, 3), (1, 2)]


@given(st.integers(1, 23), st.integers(1, 6), st.booleans(), st.booleans(), st.data())
def test_whatever_the_size_every_row_comes_back_in_its_place(
    rows: int, size: int, balance: bool, pad: bool, data: st.DataObject
) -> None:
    lengths = data.draw(st.lists(st.integers(1, 4), min_size=rows, max_size=rows))
    given_ = batch(rows, lengths)
    scattered = scatter(given_, size, balance=balance, pad=pad)
    parts = scattered.parts(given_)
    assert not pad or len({len(part) for part in parts}) == 1
    assert sorted(row for rows_, own in zip(scattered.rows, scattered.own, strict=True) for row in rows_[:own]) == [
        *range(rows)
    ]
    back = scattered.joined(parts)
    assert torch.equal(back["input_ids"], given_["input_ids"]) and list(back["uid"]) == list(given_["uid"])
    assert back.meta_info["step"] == 3
    twice = scattered.joined([{"twice": 2 * part["input_ids"]} for part in parts])
    assert torch.equal(twice["twice"], 2 * given_["input_ids"])


def test_what_cannot_be_put_together_stays_by_rank_and_wrong_lengths_are_named() -> None:
    scattered = scatter(batch(4), 2, balance=False)
    assert scattered.joined([{"loss": 1.0}, {"loss": 2.0}]) == [{"loss": 1.0}, {"loss": 2.0}]
    with pytest.raises(EngineError, match="the result of rank 1; expected 2 rows; found 3"):
        scattered.joined([torch.zeros(2), torch.zeros(3)])


# --- packing ---------------------------------------------------------------------------------------


def arrived(value: Any) -> Any:
    """As Ray does it: buffers out of band, read-only on the other side."""
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(pack(value), protocol=5, buffer_callback=buffers.append)
    return pickle.loads(data, buffers=[memoryview(bytes(buffer.raw())).toreadonly() for buffer in buffers])


def test_a_batch_arrives_unread_and_what_is_looked_at_is_a_copy() -> None:
    sent = batch(3).with_columns(
        {
            "half": torch.tensor([[1.5], [2.5], [float("nan")]], dtype=torch.bfloat16),
            "flag": torch.tensor([True, False, True]),
            "none": torch.empty(3, 0),
        }
    )
    got = arrived(sent)
    assert all(value is not None and not isinstance(value, torch.Tensor) for value in got.batch.raw().values())
    assert got.columns == sent.columns and got.meta_info == sent.meta_info and len(got) == 3
    assert torch.equal(got.batch.part("input_ids", 1, 2), sent["input_ids"][1:2])
    got["input_ids"].fill_(7)
    assert int(sent["input_ids"][0, 1]) == 1 and got["input_ids"][0, 0] == 7
    for name in ("half", "flag", "none"):
        assert got[name].dtype == sent[name].dtype and got[name].shape == sent[name].shape
    assert got["half"].tolist()[:2] == [[1.5], [2.5]] and torch.isnan(got["half"][2, 0])
    assert torch.equal(got.select(["attention_mask"])["attention_mask"], sent["attention_mask"])


def test_an_unread_column_goes_on_without_a_copy_and_containers_are_walked() -> None:
    got = arrived(batch(3))
    assert isinstance(pack(got).__reduce__()[1][0]["input_ids"][0], np.ndarray)
    assert not pack(got).__reduce__()[1][0]["input_ids"][0].flags.writeable
    assert torch.equal(arrived(got)["input_ids"], batch(3)["input_ids"])
    pair = arrived(({"a": torch.tensor([1.0])}, [batch(2), "text", None]))
    assert pair[0]["a"].tolist() == [1.0] and pair[1][0]["uid"][1] == "u1" and pair[1][1:] == ["text", None]
    strided = torch.arange(12).reshape(3, 4).t()
    assert torch.equal(arrived(strided), strided)


# --- environments -----------------------------------------------------------------------------------

CANARY = "canary-0123456789"


def test_secrets_are_never_shown_and_travel_outside_rays_own_files(tmp_path: Path) -> None:
    file = tmp_path / "runtime_env.yaml"
    file.write_text(f'excludes: ["/.git/"]\nenv_vars:\n  WANDB_API_KEY: "{CANARY}"\n  HYDRA_FULL_ERROR: "1"\n')
    read = Environment.of(file)
    assert read.variables == {"WANDB_API_KEY": CANARY, "HYDRA_FULL_ERROR": "1"} and read.ray == {"excludes": ["/.git/"]}
    assert repr(read) == "Environment(excludes, HYDRA_FULL_ERROR=•••, WANDB_API_KEY=•••)"
    assert read.redact(f"url?key={CANARY}&n=1") == "url?key=•••&n=1"
    joined = read.joined({"LD_LIBRARY_PATH": "/x", "PYTHON_TOKEN": CANARY})
    assert joined.at_start() == {"LD_LIBRARY_PATH": "/x"}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (f"env_vars: {{A_KEY: {CANARY}", "expected valid yaml; found an error in line"),
        (f"- {CANARY}", "expected a mapping; found list"),
        (f"env_vars: {CANARY}", "expected {name: string, …}; found str"),
        ("env_vars: {A: 1}", "env_vars A; expected strings; quote them"),
    ],
)
def test_a_broken_file_is_named_without_its_values(tmp_path: Path, text: str, told: str) -> None:
    file = tmp_path / "runtime_env.yaml"
    file.write_text(text)
    with pytest.raises(SettingError) as error:
        Environment.of(file)
    assert told in str(error.value) and CANARY not in str(error.value)


# --- memory -----------------------------------------------------------------------------------------

CONFIG = {
    "model_type": "llama",
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 16,
    "vocab_size": 10,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
}
# a layer: q and o 2·8·8 = 128, k and v 2·8·4 = 64, MLP 3·8·16 = 384, norms 16 → 592; twice, + 8 + 10·8
PARAMETERS = 2 * 592 + 8 + 80
BUFFERS = 128
"""Bytes of rotary frequencies and counters of steps at most."""


def sizes(fit: Any, phase: str) -> dict[tuple[str, str], int]:
    (found,) = [one for one in fit.phases if one.name == phase]
    return {(part.role, part.what): part.size for part in found.parts}


@pytest.mark.slow
def test_memory_by_hand() -> None:
    asked: dict[str, Any] = {"tokens": 100, "ranks": 2, "memory": 1 << 30, "micro_batch_tokens": 200}
    fit = fits(CONFIG, **asked, sampler_settings={"kv_cache_memory_mb": 1})
    learn, sample = sizes(fit, "learn"), sizes(fit, "sample")
    assert fit.parameters == PARAMETERS == 1272
    for role, what, size in (("policy", "weights", 4), ("policy", "optimizer", 8), ("reference", "weights", 4)):
        assert 0 <= learn[role, what] - 1272 * size // 2 <= BUFFERS, (role, what)
    assert learn["policy", "gradients"] == 1272 * 4 // 2
    # hidden states of a layer's input and output, and its queries, at the least: 2 rows of 100 tokens
    assert learn["policy", "activations"] > 2 * (3 * 8) * 4 * 200
    assert sample["sampler", "weights"] == 1272 * 4 and sample["sampler", "KV cache"] == 1 << 20
    assert fit.cached == (1 << 20) // (2 * 2 * 1 * 4 * 4)  # k and v, layers, heads, width, bytes
    assert fit.needed == sum(sample.values()) > sum(learn.values()) and bool(fit)  # the fullest phase, not their sum
    assert not lint(fit._repr_html_()) and "KV cache" in repr(fit)
    frozen = sizes(fits(CONFIG, **asked, lora_rank=1), "learn")
    assert ("reference", "weights") not in frozen and frozen["policy", "gradients"] < learn["policy", "gradients"]
    both = sizes(fits(CONFIG, **asked, critic=True), "learn")
    assert both["critic", "optimizer"] >= 2 * 4 * (1272 - 80) // 2


@pytest.mark.slow
def test_the_cache_is_what_is_left_and_phases_take_turns() -> None:
    """A colocated vLLM sleeps while the learner works: a GPU needs the most of the phases, not their sum."""
    fit = fits(CONFIG, tokens=100, gpus=2, memory=8 << 30)
    sample, learn = sizes(fit, "sample"), sizes(fit, "learn")
    assert fit.placement.ranks == 2 and fit.placement.shared
    assert sample["sampler", "KV cache"] == (4 << 30) - 1272 * 2 - (2 << 30)  # half of the GPU, bfloat16, graphs
    assert not any(role == "sampler" for role, _ in learn)
    apart = fits(CONFIG, tokens=100, gpus=2, memory=8 << 30, ranks=1, rollout="rollout")
    assert apart.placement.sampling["gpu_memory_utilization"] == 0.9 and not apart.placement.sampling["sleep_mode"]
    assert {role for role, _ in sizes(apart, "sample")} == {"sampler"}
    assert not fits(CONFIG, tokens=100, gpus=2, memory=3 << 30)  # a cache of nothing


@pytest.mark.slow
def test_what_fits_measures_is_what_place_would_start() -> None:
    """One object for both: nothing is on in one and off in the other."""
    fit = fits(CONFIG, tokens=100, gpus=2, memory=8 << 30, lr=1e-4)
    assert fit.placement.learner == FsdpSettings(lr=1e-4)
    with pytest.raises(SettingError, match="gradient_checkpoint"):
        fits(CONFIG, tokens=100, gpus=2, memory=8 << 30, gradient_checkpoint=True)
    with pytest.raises(SettingError, match="sampler"):
        fits(CONFIG, tokens=100, gpus=2, memory=8 << 30, sampler="vlm")


@pytest.mark.long
@pytest.mark.slow
def test_what_does_not_fit_says_what_each_choice_buys_and_proposes_one() -> None:
    wide = CONFIG | {"hidden_size": 64, "intermediate_size": 4096, "num_hidden_layers": 4}
    asked: dict[str, Any] = {"tokens": 256, "memory": 1 << 30, "ranks": 1, "sampler": None, "micro_batch_tokens": 4096}
    whole = fits(wide, **asked)
    fit = fits(wide, **asked | {"memory": int((whole.needed - (32 << 20)) / 0.9)})
    bought = {one.name: one.saved for one in fit.choices}
    assert not fit and bought["gradient checkpointing"] > 64 << 20 and bought["adapter (LoRA r=32)"] > 0
    assert fit.proposal == {"micro_batch_tokens": 256} and fits(wide, **fit.asked | fit.proposal), "the cheapest first"
    assert "this fits: c.place('llama', " in repr(fit) and "micro_batch_tokens=256" in fit.advice
    assert fits(wide, **asked | {"memory": 1 << 20}).proposal is None
    assert fits(wide, **asked | {"memory": 8 << 30}).proposal == {}


@pytest.mark.slow
def test_a_local_engine_is_estimated_and_the_line_that_fits_opens_it() -> None:
    """On 16 GB a 7B has one cheap way: adapters on a base in half precision, or packed where this release has that."""
    asked: dict[str, Any] = {"tokens": 1024, "gpus": 1, "memory": 16 * GIB, "learner": "local", "sampler": None}
    # 8-bit moments are asked for before adapters are, which leave them out again
    small = fits(cards.SIZES["0.5B"], **asked | {"memory": 10 * GIB})
    large = fits(cards.SIZES["7B"], **asked)
    assert not small and small.proposal and "lora_rank" not in small.proposal
    assert small.advice.startswith("wb.engines.local('qwen2', optimizer='adamw8bit', micro_batch_tokens=1024")
    assert "base_dtype='int8'" in large.advice and "adamw8bit" not in large.advice
    assert [one.name for one in small.choices][:2] == ["micro-batches of one sequence", "gradient checkpointing"]
    bought = {one.name: one.saved for one in large.choices}
    assert bought["adapter on a base in nf4"] > bought["adapter (LoRA r=32)"] > 100 * GIB
    halved = fits(cards.SIZES["7B"], **asked | {"lora_rank": 16, "memory": 24 * GIB})
    assert not halved and halved.proposal and halved.proposal["base_dtype"] == "bfloat16"
    share = fits(cards.SIZES["0.5B"], **asked | {"memory": 40 * GIB, "sampler": "vllm"})
    assert share and share.placement.shared and share.advice.startswith("wb.engines.paired(wb.engines.local('qwen2'")
    with pytest.raises(SettingError, match="'fsdp' or 'local'"):
        fits(cards.SIZES["0.5B"], **asked | {"learner": "megatron"})


@pytest.mark.long
def test_a_7b_and_a_70b_are_measured_without_weights() -> None:
    """Qwen2.5-7B at 16,384 tokens on eight GPUs of 80 GiB, Llama-3-70B on 64: layers recomputed both fit, else neither."""
    seven = {
        **{"model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18_944, "num_hidden_layers": 28},
        **{"num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152_064, "tie_word_embeddings": False},
    }
    fit = fits(seven, gpus=8, memory=80 * GIB, tokens=16_384, gradient_checkpointing=True)
    assert fit and fit.parameters == 7_615_616_512
    learn = sizes(fit, "learn")
    assert learn["reference", "weights"] == pytest.approx(
        7_615_616_512 * 4 / 8, rel=1e-3
    )  # float32, as `place` keeps it
    assert 20 * GIB < sum(learn.values()) < 40 * GIB
    assert fit.cached is not None and fit.cached > 16 * 16_384
    fit = fits(seven, gpus=8, memory=80 * GIB, tokens=16_384)
    assert not fit and fit.proposal == {"gradient_checkpointing": True}
    seventy = {
        **{"model_type": "llama", "hidden_size": 8192, "intermediate_size": 28_672, "num_hidden_layers": 80},
        **{"num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 128_256, "tie_word_embeddings": False},
    }
    asked: dict[str, Any] = {"gpus": 64, "memory": 80 * GIB, "tokens": 8192, "tensor_parallel_size": 8}
    fit = fits(seventy, **asked, micro_batch_tokens=8192, gradient_checkpointing=True)
    assert fit and fit.parameters == pytest.approx(70.55e9, rel=1e-3)


@pytest.mark.slow
def test_memory_of_the_tiny_model_and_of_nodes(tiny: str) -> None:
    fit = fits(tiny, tokens=256, nodes=[node("a", 4), node("b", 8)])
    assert fit.parameters == sum(p.numel() for p in _parameters(tiny)) and fit.placement.ranks == 2
    assert fit.available == 2 * GIB and "16.00 GiB of b for 8 processes" in fit.source
    with pytest.raises(SettingError, match="bytes of one GPU"):
        fits(tiny, tokens=256, nodes=[node("a", 4, gpus=1)])
    with pytest.raises(EngineError, match="model_type"):
        fits({"hidden_size": 8}, tokens=8, memory=GIB)


def _parameters(folder: str) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder).parameters()


# --- starting ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_busy_machine_gets_as_long_as_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray gives up on its own node where asking for it fails; here asking goes on until `start_seconds` are over."""
    from ray._private import services

    asked: list[int] = []

    def get_node(*given: Any) -> str:
        asked.append(len(asked))
        if len(asked) < 3:
            raise RuntimeError("not yet")
        return "a node"

    def init(what: str, environment: Environment, notes: list[str], **options: Any) -> Any:
        try:
            return services.get_node("address", "id"), os.environ[ray_internals.GCS_WAIT]
        except RuntimeError:
            raise EngineError("The current node timed out during startup.") from None

    monkeypatch.delenv(ray_internals.GCS_WAIT, raising=False)
    monkeypatch.setattr(services, "get_node", get_node)
    monkeypatch.setattr(session, "_init", init)
    assert session._begin(Environment(), [], 60.0) == ("a node", "60")
    assert len(asked) == 3 and services.get_node is get_node and ray_internals.GCS_WAIT not in os.environ
    asked.clear()
    with pytest.raises(EngineError, match=r"did not start in 0 s.*start_seconds="):
        session._begin(Environment(), [], 0.0)


DIES = """#!/bin/sh
for word in "$@"; do case "$word" in --log_dir=*) logs="${word#*=}";; esac; done
echo "[2026-11-27 22:00:00,000 C 7 7] node_manager.cc:1: Timed out waiting for file agent_port" >> "$logs/raylet.out"
echo "a stack" >> "$logs/raylet.out"
exit 1
"""


def test_a_process_of_rays_that_has_ended_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A raylet that ends by its own check: it is seen, its last line of weight is shown, and Ray is started once more."""
    from ray._private import services

    logs = tmp_path / "session_1" / "logs"
    logs.mkdir(parents=True)
    program = tmp_path / "raylet"
    program.write_text(DIES)
    program.chmod(0o700)
    started: list[subprocess.Popen[bytes]] = []

    def no_node(*given: Any) -> str:
        raise RuntimeError("not yet")

    def init(what: str, environment: Environment, notes: list[str], **options: Any) -> Any:
        started.append(subprocess.Popen([str(program), f"--log_dir={logs}"]))
        try:
            return services.get_node("address", "id")
        except ProcessLookupError as error:
            raise EngineError(f"{what} failed", found=str(error)) from None

    notes: list[str] = []
    monkeypatch.setattr(services, "get_node", no_node)
    monkeypatch.setattr(session, "_init", init)
    why = r"raylet \(pid \d+\) ended: "
    with pytest.raises(EngineError, match=rf"in two attempts: .* expected running processes; found {why}") as caught:
        session._begin(Environment(), notes, 3600.0)
    assert "start_seconds" not in str(caught.value) and len(started) == 2
    assert len(notes) == 1 and re.match(rf"{why}.*; Ray was started once more", notes[0])
    for one in started:
        one.wait()

    watch = discovery.StartWatch()
    (logs / "raylet.out").unlink()
    program.write_text(DIES.replace("exit 1", "while :; do sleep 1; done"))
    child = subprocess.Popen([str(program), f"--log_dir={logs}"])
    try:
        log = logs / "raylet.out"
        assert within(lambda: log.is_file() and "a stack" in log.read_text()) and watch.look() == ""
    finally:
        child.kill()
    child.wait()  # reaped: there is no such process any more
    assert "Timed out waiting for file agent_port" in watch.look() and str(child.pid) in watch.ended


# --- timelines, tables, logs, records ---------------------------------------------------------------


def test_a_timeline_is_a_chrome_trace(tmp_path: Path) -> None:
    made = ordered(
        [Event("actor", 1, "h", "learn", 12.0, 12.5), Event("actor", 0, "h<b>", "score", 10.0, 11.0, "raised")]
    )
    trace = json.loads(made.save(tmp_path / "trace.json").read_text())
    spans = [one for one in trace["traceEvents"] if one["ph"] == "X"]
    assert [(one["name"], one["tid"], one["ts"], one["dur"], one["cat"]) for one in spans] == [
        ("score", 0, 0.0, 1e6, "raised"),
        ("learn", 1, 2e6, 5e5, "done"),
    ]
    assert {one["args"]["name"] for one in trace["traceEvents"] if one["ph"] == "M"} == {
        "actor",
        "rank 0 on h<b>",
        "rank 1 on h",
    }
    assert "2 calls in 2.50 s" in repr(made) and "score (raised) 1.00 s" in repr(made)
    assert not lint(made._repr_html_()) and "nothing has run" in repr(ordered([]))


def test_a_status_shows_foreign_names_as_text() -> None:
    hostile = "<img src=x onerror=alert(1)>\x1b[31m"
    line = WorkerLine(hostile, 0, 7, "h", "", "", 3 << 20, "does not answer", 2)
    shown = ClusterStatus("here", (node("a", 4), node(hostile, 2, 1)), (("pool", 2, "a"),), (line,), (hostile,))
    page = shown._repr_html_()
    assert "<img" not in page and not lint(page) and "\x1b" not in repr(shown)
    assert "does not answer" in repr(shown) and "0.25 GiB of 1.00 GiB" in repr(shown)


def test_a_status_of_a_cluster_with_gpus_says_what_no_gpu_has_run(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster: Any = SimpleNamespace(title="here", pools={}, groups=[], notes=[])
    for gpus, expected in ((0, ()), (1, (status.unproven(),))):
        monkeypatch.setattr(status, "nodes", lambda gpus=gpus: [node("a", 4, gpus)])
        shown = status.look(cluster, {}, list)
        assert shown.notes == expected and all(one in repr(shown) for one in expected)
    guide = Path("docs/guide/first-gpu.md").read_text(encoding="utf-8")
    assert all(f"| {one} |" in guide for one in status.UNPROVEN)


def test_the_tail_of_logs(tmp_path: Path) -> None:
    out, err = tmp_path / "w.out", tmp_path / "w.err"
    out.write_text(":job_id:01\n" + "".join(f"line {number}\n" for number in range(5_000)))
    err.write_bytes(b":actor_name:Worker\nbad \xff byte\n")
    assert tail([str(out), str(err), str(tmp_path / "gone.out")], 2) == "line 4998\nline 4999\nbad � byte"


def test_what_a_killed_kernel_left_is_ended_and_what_lives_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    with (
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"]) as left,
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"]) as kept,
    ):
        alive = discovery.remember("session_alive", [discovery.process(kept.pid)]).path
        gone = discovery.remember("session_gone", [discovery.process(left.pid)]).path
        facts = json.loads(gone.read_text())
        facts["driver"]["born"] -= 1000.0  # another process has that id now
        gone.write_text(json.dumps(facts))
        (gone.parent / "odd.json").write_text("{")
        notes = discovery.clear_left()
        assert len(notes) == 1 and notes[0].startswith("ended 1 processes (python") and str(os.getpid()) in notes[0]
        assert left.wait(LONG) == -9 and kept.poll() is None
        assert alive.exists() and not gone.exists()
        kept.kill()
