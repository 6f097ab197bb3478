"""Meshes: replicas, shards and parts of tensors on four ranks give the numbers of one process, and each other's checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.architectures import make
from support.shards import counts, difference, relative, steady

from workbench.base.errors import EngineError, SettingError
from workbench.dataproto import DataProto
from workbench.engines import LossCounts, LossOutput, local
from workbench.engines.fsdp_engine.engine import fsdp
from workbench.engines.fsdp_engine.group import Group, local_group
from workbench.engines.fsdp_engine.meshes import Sizes, coordinates, parsed, sizes_of
from workbench.engines.local_engine.selfcheck import batch_of
from workbench.engines.local_engine.states import read_optimizer
from workbench.engines.weights import sync_of
from workbench.testing.engines import LikelihoodLoss

pytestmark = pytest.mark.slow
MESHES = [
    {"dp": 4},
    {"dp": 2, "tp": 2},
    {"replicate": 2, "dp": 2},
    {"replicate": 2, "tp": 2},
]
WANT = ("log_probs", "entropy", "sum_pi_squared")


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("qwen3", tmp_path_factory.mktemp("models") / "qwen3")


@pytest.fixture(scope="module")
def rows() -> DataProto:
    return batch_of([((9, 8, 7), (5, 6)), ((9, 8, 7), (11,)), ((4,), (5, 7, 3)), ((5, 6, 7, 8), (9, 10)), ((3,), (4,))])


class Values:
    """A loss of a critic: its values squared, and pushed up."""

    want = ("values",)

    def __call__(self, outputs: Mapping[str, torch.Tensor], rows: DataProto, loss_counts: LossCounts) -> LossOutput:
        return LossOutput((outputs["values"] - 1).square().mul(rows["response_mask"]).sum(), {}, {})


# --- sizes ----------------------------------------------------------------------------------------


def test_ranks_of_a_tensor_are_neighbours() -> None:
    sizes = sizes_of({"replicate": 2, "dp": 3, "tp": 2}, 12)
    assert (sizes.ranks, sizes.shards, sizes.blocks, sizes.block) == (12, 3, 6, 2)
    assert coordinates(sizes, 7) == {"replicate": 1, "dp": 0, "cp": 0, "tp": 1}
    assert sizes_of(None, 5) == Sizes(dp=5)


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(1, 3))
def test_every_rank_has_its_own_place(replicate: int, dp: int, cp: int, tp: int) -> None:
    sizes = Sizes(replicate, dp, cp, tp)
    places = [tuple(coordinates(sizes, rank).values()) for rank in range(sizes.ranks)]
    assert len(set(places)) == sizes.ranks
    # a block is the ranks of one (replicate, dp)
    assert all(
        (coordinates(sizes, rank)["replicate"] * dp + coordinates(sizes, rank)["dp"]) == rank // sizes.block
        for rank in range(sizes.ranks)
    )


@pytest.mark.parametrize(
    ("mesh", "told"),
    [
        ({"dp": 2, "tpp": 2}, "did you mean 'tp'"),
        ({"dp": 0}, "a whole number ≥ 1"),
        ({"dp": 2, "tp": 3}, "found 4 ranks"),
        ({"dp": 4, "ep": 3}, "ep that divides dp·cp"),
    ],
)
def test_what_is_no_mesh_is_refused(mesh: dict[str, int], told: str) -> None:
    with pytest.raises(SettingError, match=told):
        sizes_of(mesh, 4)
    assert parsed({"tp": 2}) == Sizes(tp=2)


# --- the same numbers -----------------------------------------------------------------------------


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_a_mesh_learns_as_one_process(mesh: dict[str, int], four: Group, qwen: Path, rows: DataProto) -> None:
    settings = {"device": "cpu", "lr": 1e-3, "grad_clip": 0.5}
    freed = mesh != MESHES[0]  # layers that stay gathered must be freed before weights change
    there = fsdp(qwen, on=four, mesh=mesh, reshard_after_forward=freed, **settings)
    here = local(qwen, **settings)
    references = there.reference(), here.reference()
    assert difference(there.compute_log_probs(rows, WANT, 0.7), here.compute_log_probs(rows, WANT, 0.7)) < 1e-5
    given = (rows, LikelihoodLoss(), counts(rows))
    assert difference(there.gradient(*given), here.gradient(*given)) < 2e-6
    norms = [engine.probe(*given, per_row=True).columns["row_grad_norm"] for engine in (there, here)]
    assert float((norms[0] - norms[1]).abs().max()) < 2e-6
    for _ in range(3):
        learned = [engine.learn(*given).metrics for engine in (there, here)]
        assert learned[0]["grad_norm"].total == pytest.approx(learned[1]["grad_norm"].total, abs=3e-6)
        assert learned[0]["loss"].value == pytest.approx(learned[1]["loss"].value, abs=1e-6)
    assert difference(there.full_weights(), here.full_weights()) < 1e-5
    assert there.full_kl(rows, references[0]) == pytest.approx(here.full_kl(rows, references[1]), abs=1e-6)


@pytest.mark.parametrize("mesh", MESHES[1:], ids=str)
def test_critics_and_adapters_learn_as_in_one_process(
    mesh: dict[str, int], four: Group, qwen: Path, rows: DataProto
) -> None:
    settings: dict[str, Any] = {"device": "cpu", "lr": 1e-3}
    critics = [engine.critic() for engine in (fsdp(qwen, on=four, mesh=mesh, **settings), local(qwen, **settings))]
    for critic in critics:
        for _ in range(2):
            critic.learn(rows, Values(), counts(rows))
    values = [critic.compute_log_probs(rows, ("values",)) for critic in critics]
    assert float(values[0]["values"].abs().max()) > 1e-4 and difference(*values) < 1e-5
    settings |= {"lora_rank": 4, "lora_targets": ("q_proj", "o_proj", "up_proj", "down_proj")}
    adapted = [fsdp(qwen, on=four, mesh=mesh, **settings), local(qwen, **settings)]
    for engine in adapted:
        for _ in range(3):
            engine.learn(rows, LikelihoodLoss(), counts(rows))
    assert difference(*[engine.full_weights() for engine in adapted]) < 1e-5
    base = [engine.reference().compute_log_probs(rows) for engine in adapted]
    assert difference(*base) < 1e-5


@pytest.mark.parametrize(
    "name",
    [
        "gemma3_text",
        "qwen3_moe",
        *[
            pytest.param(name, marks=pytest.mark.long)
            for name in ("llama", "mistral", "qwen2", "gemma", "gemma2", "gemma3", "phi3", "mixtral", "qwen2_moe")
        ],
        *[
            pytest.param(name, marks=pytest.mark.long)
            for name in ("granite", "olmo2", "cohere2", "smollm3", "starcoder2", "glm4", "qwen3_next", "phi")
        ],
    ],
)
def test_architectures_are_cut_by_their_own_plans(name: str, four: Group, tmp_path: Path, rows: DataProto) -> None:
    folder = make(name, tmp_path / name)
    settings: dict[str, Any] = {"device": "cpu", "lr": 1.0}
    there, here = fsdp(folder, on=four, mesh={"dp": 2, "tp": 2}, **settings), local(folder, **settings)
    assert difference(there.compute_log_probs(rows, WANT), here.compute_log_probs(rows, WANT)) < 2e-5
    given = (rows, LikelihoodLoss(), counts(rows))
    assert relative(there.gradient(*given), here.gradient(*given)) < 3e-6
    for number, engine in enumerate((there, here)):
        steady(engine, folder, tmp_path / str(number))
        for _ in range(3):
            engine.learn(*given)
    assert difference(there.full_weights(), here.full_weights()) < 5e-7


@pytest.mark.parametrize(
    ("name", "told"),
    [("bloom", "tp_plan for its attention"), ("cohere", "found model.layers.0.self_attn.q_norm.weight")],
)
def test_what_cannot_be_cut_is_refused_before_it_is_loaded(name: str, told: str, four: Group, tmp_path: Path) -> None:
    folder = make(name, tmp_path / name)
    (folder / "model.safetensors").unlink()
    with pytest.raises(EngineError, match=told):
        fsdp(folder, on=four, device="cpu", mesh={"dp": 2, "tp": 2})


def test_heads_that_do_not_divide_are_refused(four: Group, qwen: Path) -> None:
    with pytest.raises(SettingError, match="a tp that divides num_key_value_heads; found 2"):
        fsdp(qwen, on=four, device="cpu", mesh={"tp": 4})


# --- loading, saving, pushing ---------------------------------------------------------------------


def test_states_move_between_any_two_meshes_bit_for_bit(
    four: Group, qwen: Path, rows: DataProto, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"device": "cpu", "lr": 1e-3}
    first, moved = fsdp(qwen, on=four, mesh=MESHES[-1], **settings), tmp_path / "0"
    first.learn(rows, LikelihoodLoss(), counts(rows))
    first.save_sharded(moved)
    weights, moments = first.full_weights(), read_optimizer(moved)[0]
    for number, mesh in enumerate((*MESHES, MESHES[1], None), 1):
        engine = fsdp(qwen, on=four, mesh=mesh, **settings)
        engine.load_sharded(moved)
        moved = tmp_path / str(number)
        engine.save_sharded(moved)
        assert difference(weights, engine.full_weights()) == 0
        assert difference(moments, read_optimizer(moved)[0]) == 0


@pytest.mark.long
def test_states_move_between_numbers_of_ranks(four: Group, qwen: Path, rows: DataProto, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"device": "cpu", "lr": 1e-3}
    first = fsdp(qwen, on=four, mesh={"dp": 2, "tp": 2}, **settings)
    first.learn(rows, LikelihoodLoss(), counts(rows))
    first.save_sharded(tmp_path / "four")
    weights, moments = first.full_weights(), read_optimizer(tmp_path / "four")[0]
    last = tmp_path / "four"
    for ranks, mesh in ((2, {"tp": 2}), (1, None), (2, {"replicate": 2}), (2, {"dp": 2})):
        group = local_group(ranks, device="cpu", threads=1)
        try:
            engine = fsdp(qwen, on=group, mesh=mesh, **settings)
            engine.load_sharded(last)
            last = tmp_path / "-".join([str(ranks), *(mesh or {})])
            engine.save_sharded(last)
            assert difference(weights, engine.full_weights()) == 0
            assert difference(moments, read_optimizer(last)[0]) == 0
        finally:
            group.close()
    first.load_sharded(last)
    assert difference(weights, first.full_weights()) == 0


@pytest.mark.parametrize("way", ["shared memory", "object store"])
def test_weights_are_pushed_and_saved_bit_for_bit(
    way: str, four: Group, qwen: Path, rows: DataProto, tmp_path: Path
) -> None:
    lora = {"lora_rank": 4, "lora_targets": ("q_proj", "o_proj")} if way == "shared memory" else {}
    for mesh in MESHES[1:3]:
        learner = fsdp(qwen, on=four, device="cpu", mesh=mesh, lr=1e-3, **lora)
        learner.learn(rows, LikelihoodLoss(), counts(rows))
        weights, sampler = learner.full_weights(), local(qwen, device="cpu")
        sync_of(learner, sampler, way, 4096).push(learner.version)
        assert difference(weights, sampler.full_weights()) == 0
        if not lora:
            learner.save(tmp_path / str(mesh))
            assert difference(weights, local(tmp_path / str(mesh), device="cpu").full_weights()) == 0
