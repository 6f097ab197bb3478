"""Sequences cut over ranks and experts spread over them: the numbers of one process, alone and with the other dimensions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.architectures import make
from support.shards import counts, difference, relative, steady

from workbench.base.errors import EngineError, SettingError
from workbench.dataproto import DataProto
from workbench.engines import local
from workbench.engines.fsdp_engine.engine import fsdp
from workbench.engines.fsdp_engine.group import Group
from workbench.engines.fsdp_engine.meshes import Sizes
from workbench.engines.fsdp_engine.parallel import refuse
from workbench.engines.local_engine.loading import load_model
from workbench.engines.local_engine.selfcheck import batch_of
from workbench.engines.rehearsal import Shape, sharded
from workbench.engines.settings import FsdpSettings
from workbench.engines.weights import sync_of
from workbench.testing.engines import LikelihoodLoss

pytestmark = pytest.mark.slow
PROMPT = tuple(range(5, 25))
Folders = Callable[[str], Path]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    made: dict[str, Path] = {}

    def of(name: str) -> Path:
        if name not in made:
            made[name] = make(name, tmp_path_factory.mktemp("models") / name)
        return made[name]

    return of


@pytest.fixture(scope="module")
def rows() -> DataProto:
    """Three rows with a long prompt in common, and two short ones: with four ranks some have no response token."""
    group = [(PROMPT, (5, 6, 9, 11, 8, 7)), (PROMPT, (11,)), (PROMPT, (5, 6, 9, 12))]
    return batch_of([*group, ((4,), (5, 7, 3)), ((3, 4, 5), (9, 9, 9, 8))])


def agrees(model: Path, where: Group, rows: DataProto, mesh: dict[str, int], state: Path, **settings: Any) -> None:
    """Scores to 3e-6 nats and each parameter's gradient to 3e-6 of its norm; after three steps that move weights by 0.05 scores again,
    and weights to 5e-7."""
    want, loss = ("log_probs", "entropy"), LikelihoodLoss()
    there = fsdp(model, on=where, device="cpu", mesh=mesh, lr=1.0, **settings)
    here = local(model, device="cpu", lr=1.0)
    assert there.selfcheck.paths.pack and there.selfcheck.found
    assert difference(there.compute_log_probs(rows, want, 0.8), here.compute_log_probs(rows, want, 0.8)) < 3e-6
    assert relative(*(engine.gradient(rows, loss, counts(rows)) for engine in (there, here))) < 3e-6
    before = {name: one.clone() for name, one in here.full_weights().items()}
    for number, engine in enumerate((there, here)):
        steady(engine, model, state / str(number))
    for _ in range(3):
        mine, theirs = (engine.learn(rows, loss, counts(rows)) for engine in (there, here))
        norms = [float(one.metrics["grad_norm"].result()) for one in (mine, theirs)]
        assert norms[0] == pytest.approx(norms[1], rel=3e-6)
        assert difference(mine.columns, theirs.columns) < 3e-6
    assert difference(there.full_weights(), here.full_weights()) < 5e-7 < 0.05 < difference(here.full_weights(), before)
    assert difference(there.compute_log_probs(rows), here.compute_log_probs(rows)) < 3e-6


@pytest.mark.parametrize(
    ("name", "mesh", "settings"),
    [
        ("qwen3", {"cp": 2}, {"micro_batch_tokens": 20}),
        ("mixtral", {"dp": 2, "ep": 2}, {}),
        ("qwen3_moe", {"cp": 2, "ep": 2}, {"gradient_checkpointing": True}),
    ],
)
def test_two_ranks_equal_one_process(
    name: str,
    mesh: dict[str, int],
    settings: dict[str, Any],
    folder: Folders,
    two: Group,
    rows: DataProto,
    tmp_path: Path,
) -> None:
    agrees(folder(name), two, rows, mesh, tmp_path, **settings)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("llama", {"cp": 4}),  # two heads of keys for four ranks
        ("qwen3", {"dp": 2, "cp": 2}),
        ("qwen3", {"cp": 2, "tp": 2}),
        ("gemma2", {"replicate": 2, "cp": 2}),  # windows and soft-caps
        ("mixtral", {"dp": 4, "ep": 2}),
        ("mixtral", {"dp": 4, "ep": 4}),
        ("mixtral", {"dp": 2, "tp": 2, "ep": 2}),
        ("mixtral", {"replicate": 2, "dp": 2, "ep": 2}),
        ("qwen3_moe", {"dp": 2, "cp": 2, "ep": 4}),
        ("deepseek_v3", {"dp": 2, "cp": 2, "ep": 2}),
        ("gpt_oss", {"dp": 2, "cp": 2, "ep": 2}),  # sinks, biases, interleaved gates
    ],
)
def test_four_ranks_equal_one_process(
    name: str, mesh: dict[str, int], folder: Folders, four: Group, rows: DataProto, tmp_path: Path
) -> None:
    agrees(folder(name), four, rows, mesh, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("settings", [{"lora_rank": 4}, {"offload": "all"}, {"dtype": "bfloat16"}])
def test_adapters_offload_and_mixed_precision(
    settings: dict[str, Any], folder: Folders, two: Group, rows: DataProto
) -> None:
    here = local(folder("qwen3_moe"), device="cpu", **settings | {"offload": "none"})
    gap = 2e-2 if "dtype" in settings else 1e-6
    for mesh in ({"cp": 2}, {"dp": 2, "ep": 2}, {"cp": 2, "ep": 2}):
        there = fsdp(folder("qwen3_moe"), on=two, device="cpu", mesh=mesh, **settings)
        found = [engine.gradient(rows, LikelihoodLoss(), counts(rows)) for engine in (there, here)]
        assert found[0].keys() == found[1].keys()
        if "lora_rank" in settings:  # B is 0: only it has a gradient
            found = [{name: one for name, one in each.items() if "lora_B" in name} for each in found]
        median = torch.cat([(found[0][name] - found[1][name]).abs().flatten() for name in found[1]]).median()
        assert float(median) < gap and any(bool(one.any()) for one in found[0].values())


def test_a_row_of_fewer_tokens_than_ranks(folder: Folders, two: Group) -> None:
    short = batch_of([((4,), (5,))])  # one token goes through the model
    there, here = fsdp(folder("qwen3"), on=two, device="cpu", mesh={"cp": 2}), local(folder("qwen3"), device="cpu")
    assert difference(there.compute_log_probs(short), here.compute_log_probs(short)) < 3e-6
    assert difference(*(one.gradient(short, LikelihoodLoss(), counts(short)) for one in (there, here))) < 1e-6


def test_the_exact_kl_and_values_of_cut_sequences(folder: Folders, two: Group, rows: DataProto) -> None:
    engines = [
        fsdp(folder("qwen3"), on=two, device="cpu", mesh={"cp": 2}, lr=1e-3),
        local(folder("qwen3"), device="cpu", lr=1e-3),
    ]
    found = []
    for engine in engines:
        reference, critic = engine.reference(), engine.critic()
        engine.learn(rows, LikelihoodLoss(), counts(rows))
        critic.learn(rows, LikelihoodLoss(("values",)), counts(rows))
        kl = engine.full_kl(rows, reference)
        assert float(kl.max()) > 1e-4
        found.append({"kl": kl, "values": critic.compute_log_probs(rows, ("values",))["values"]})
    assert difference(*found) < 1e-5


def test_spread_experts_are_saved_and_pushed_whole_and_loaded_in_another_mesh(
    folder: Folders, two: Group, rows: DataProto, tmp_path: Path
) -> None:
    spread = fsdp(folder("mixtral"), on=two, device="cpu", mesh={"cp": 2, "ep": 2}, lr=1e-3)
    spread.learn(rows, LikelihoodLoss(), counts(rows))
    spread.save(tmp_path / "model")
    spread.save_sharded(tmp_path / "state")
    weights = spread.full_weights()
    assert difference(local(tmp_path / "model", device="cpu").full_weights(), weights) == 0
    sampler = local(folder("mixtral"), device="cpu")
    sync_of(spread, sampler, "shared memory", 4096).push(spread.version)
    assert difference(sampler.full_weights(), weights) == 0
    other = fsdp(folder("mixtral"), on=two, device="cpu", lr=1e-3)
    other.load_sharded(tmp_path / "state")
    assert difference(other.full_weights(), weights) == 0
    for engine in (spread, other):  # the moments are there, too
        engine.learn(rows, LikelihoodLoss(), counts(rows))
    assert difference(spread.full_weights(), other.full_weights()) < 1e-5


@pytest.mark.parametrize(
    ("name", "sizes", "said"),
    [
        ("qwen3_next", Sizes(cp=2), "layers of linear_attention"),
        ("bloom", Sizes(cp=2), "do not ask transformers' attention interface"),
        ("llama", Sizes(cp=8), "cp·tp that divides its heads; found 4 heads"),
        ("llama", Sizes(dp=2, ep=2), "layers of experts in transformers' common form"),
        ("mixtral", Sizes(dp=8, ep=8), "an ep that divides its experts; found 4 in"),
    ],
)
def test_what_does_not_fit_is_refused_before_it_is_loaded(name: str, sizes: Sizes, said: str, folder: Folders) -> None:
    shape = load_model(folder(name), FsdpSettings(device="cpu"), empty=True)
    with pytest.raises((EngineError, SettingError), match=said):
        refuse(shape, sizes)


def test_padded_rows_are_not_cut(folder: Folders, two: Group) -> None:
    with pytest.raises(EngineError, match=r"mesh cp\) with Qwen3ForCausalLM.*rows that may be packed; found pack='no'"):
        fsdp(folder("qwen3"), on=two, device="cpu", mesh={"cp": 2}, pack="no")


@pytest.mark.parametrize("mesh", [{"cp": 2}, {"dp": 2, "ep": 2}])
def test_experts_are_replayed_by_ranks_as_by_one_process(
    mesh: dict[str, int], folder: Folders, two: Group, rows: DataProto
) -> None:
    drawn = torch.rand(*rows["input_ids"].shape, 2, 4, generator=torch.Generator().manual_seed(0))
    chosen = drawn.topk(2).indices.short()
    chosen[0, :20] = chosen[1, :20]  # two rows share a prompt, a third one's went elsewhere
    replayed = rows.with_columns({"routed_experts": chosen})
    there = fsdp(folder("qwen3_moe"), on=two, device="cpu", mesh=mesh, routing_replay=True)
    here = local(folder("qwen3_moe"), device="cpu", routing_replay=True)
    mine, theirs = (engine.compute_log_probs(replayed) for engine in (there, here))
    assert difference(mine, theirs) < 3e-6 < 0.1 < difference(theirs, here.compute_log_probs(rows))
    assert difference(*(one.gradient(replayed, LikelihoodLoss(), counts(rows)) for one in (there, here))) < 1e-6
    for learn in (there.learn, there.probe, there.gradient):
        with pytest.raises(
            EngineError, match="learning with routing_replay; expected rows with the column 'routed_exp"
        ):
            learn(rows, LikelihoodLoss(), counts(rows))


@pytest.mark.long
def test_memory_of_spread_experts_and_cut_sequences_is_measured_without_weights(folder: Folders) -> None:
    found = {}
    for name, mesh in (("all", None), ("spread", {"dp": 2, "ep": 2}), ("cut", {"cp": 2, "ep": 2})):
        settings = FsdpSettings(device="cpu", dtype="bfloat16", mesh=mesh)
        found[name] = sharded(str(folder("mixtral")), settings, 2, Shape.of(64, 64, 64), gpu=False, head=False).parts
    assert found["spread"]["gradients"] == found["cut"]["gradients"] == found["all"]["gradients"]
    assert found["spread"]["activations"] < found["all"]["activations"]  # no layer's experts are gathered
    assert found["cut"]["activations"] < 0.7 * found["spread"]["activations"]  # a rank has half of the tokens
