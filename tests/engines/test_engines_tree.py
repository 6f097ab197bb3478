"""Rows as a tree: the same log-probs, entropies and gradients as row by row, whatever the rows have in common."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.models import make_random_model
from support.patience import examples

from workbench.base.errors import EngineError
from workbench.dataproto import DataProto
from workbench.engines import local
from workbench.engines.local_engine import forward, scoring
from workbench.engines.local_engine.forward import LayerCall
from workbench.engines.local_engine.selfcheck import Paths
from workbench.engines.protocol import LossCounts
from workbench.engines.torch_internals import flash_backward, flash_forward
from workbench.testing.engines import EngineContract, LikelihoodLoss

Row = tuple[list[int], list[int], list[int]]
"""Prompt, response, and response mask."""


def batch_of(rows: Sequence[Row], more: int = 0) -> DataProto:
    """Left-padded prompts and right-padded responses, with `more` columns of padding on either side."""
    s, t = (max(len(row[part]) for row in rows) + more for part in (0, 1))
    columns: dict[str, list[list[int]]] = {
        "input_ids": [],
        "attention_mask": [],
        "position_ids": [],
        "response_mask": [],
    }
    for prompt, response, mask in rows:
        before, behind, length = s - len(prompt), t - len(response), len(prompt) + len(response)
        columns["input_ids"].append([0] * before + prompt + response + [0] * behind)
        columns["attention_mask"].append([0] * before + [1] * length + [0] * behind)
        columns["position_ids"].append([0] * before + list(range(length)) + [0] * behind)
        columns["response_mask"].append(mask + [0] * behind)
    return DataProto({name: torch.tensor(values) for name, values in columns.items()})


@st.composite
def tries(draw: Any) -> list[Row]:
    """Rows that grow from a few beginnings: shared prompts, shared turns with tool tokens between, equal rows, one row."""
    token = st.integers(3, 12)

    def tokens(most: int, least: int = 0) -> list[int]:
        return draw(st.lists(token, min_size=least, max_size=most))  # type: ignore[no-any-return]

    prompts = [tokens(30, 1) for _ in range(draw(st.integers(1, 3)))]
    turns = [(tokens(20), tokens(6)) for _ in range(draw(st.integers(1, 3)))]
    rows = []
    for _ in range(draw(st.integers(1, 7))):
        shared, tool = draw(st.sampled_from(turns))
        own = tokens(8, 1)
        mask = [1] * len(shared) + [0] * len(tool) + [1] * len(own)
        rows.append((draw(st.sampled_from(prompts)), [*shared, *tool, *own], mask))
        if draw(st.booleans()):
            rows.append(rows[-1])
    return rows


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return local(make_random_model(tmp_path_factory.mktemp("model") / "random"), device="cpu")._model.double()


def scored(model: Any, batch: DataProto, packed: bool) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Outputs, and the gradients of a loss that reads all of them."""
    model.zero_grad()
    found = scoring.outputs(model, None, batch, ("log_probs", "entropy", "sum_pi_squared"), 0.7, packed)
    weights = torch.linspace(-1, 1, batch["response_mask"].numel()).reshape(batch["response_mask"].shape)
    ((found["log_probs"] - 0.3 * found["entropy"]) * weights + found["sum_pi_squared"].square()).sum().backward()
    return found, {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}


def check(model: Any, batch: DataProto) -> None:
    (plain, slopes), (packed, found) = (scored(model, batch, one) for one in (False, True))
    for name, one in plain.items():
        torch.testing.assert_close(packed[name], one, atol=1e-5, rtol=1e-5)
        assert (packed[name][batch["response_mask"] == 0] == 0).all()
    assert slopes.keys() == found.keys()
    for name, one in slopes.items():
        torch.testing.assert_close(found[name], one, atol=1e-5 * max(1.0, float(one.abs().max())), rtol=1e-5)


@pytest.mark.slow
@given(rows=tries(), more=st.integers(0, 2), least=st.sampled_from([1, 4, 16]), short=st.sampled_from([0, 24, 128]))
@settings(max_examples=examples(60), deadline=None)
def test_a_tree_gives_what_rows_give(model: Any, rows: list[Row], more: int, least: int, short: int) -> None:
    with mock.patch.multiple(scoring, LEAST=least, SHORT=short):
        check(model, batch_of(rows, more))


def group(prompt: int, responses: Sequence[int], first: int = 3) -> list[Row]:
    """One prompt, and responses of these lengths that differ from their first token on."""
    start = [first + number % 9 for number in range(prompt)]
    return [
        (start, [3 + row, *(4 + (row * step) % 50 for step in range(n - 1))], [1] * n)
        for row, n in enumerate(responses)
    ]


def test_a_prompt_goes_through_the_model_once(model: Any) -> None:
    seen = []
    hook = model.base_model.layers[0].register_forward_hook(lambda _, args, out: seen.append(args[0].shape[1]))
    try:
        rows = group(20, (5, 9, 2)) + group(20, (4, 4), first=5)
        scored(model, batch_of(rows), packed=True)
        scored(model, batch_of([rows[0]] * 6), packed=True)
        # each row without its last token, which predicts nothing
        assert seen == [20 + 4 + 8 + 1 + 20 + 3 + 3, 20 + 4]
        few = group(20 - scoring.LEAST, (5, 5))  # too few tokens to gain anything
        scored(model, batch_of(few), packed=True)
        assert seen[-1] == 2 * (20 - scoring.LEAST + 4)
    finally:
        hook.remove()


def test_groups_stay_together(model: Any) -> None:
    rows = group(20, (5,) * 4) + group(20, (5,) * 4, first=5)
    mixed = [rows[number] for number in (0, 4, 1, 5, 2, 6, 3, 7)]
    batch = batch_of(mixed)
    assert [part.tolist() for part in scoring.cut_trees(batch, 40)] == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert len(scoring.cut_trees(batch, 80)) == 1 and len(scoring.cut_trees(batch, 1)) == 8
    # a group that has no room left begins the next micro-batch; one that has room in none is cut
    assert [len(part) for part in scoring.cut_trees(batch, 60)] == [4, 4]
    assert [len(part) for part in scoring.cut_trees(batch, 36)] == [3, 1, 3, 1]
    assert len(scoring.micro_batches(model, batch, 40, packed=False)) == 8


class TestParts:
    """Every token sees its row's earlier tokens and no other, however the tree is cut for attention."""

    @given(rows=tries(), short=st.sampled_from([0, 24, 128]))
    @settings(max_examples=examples(60), deadline=None)
    def test_keys_of_queries(self, rows: list[Row], short: int) -> None:
        with mock.patch.object(scoring, "SHORT", short):
            tree = scoring.RowTree(batch_of(rows), "cpu")
        ids, depths = tree.given["input_ids"][0].tolist(), tree.plan.depths.tolist()
        for query, keys in enumerate(seen(tree.plan).bool()):
            numbers = sorted(keys.nonzero()[:, 0].tolist(), key=lambda key: depths[key])
            assert [depths[key] for key in numbers] == list(range(depths[query] + 1))
            path = tuple(ids[key] for key in numbers)
            assert any(tuple((row[0] + row[1])[: depths[query] + 1]) == path for row in rows)

    @given(data=st.data())
    @settings(max_examples=examples(60), deadline=None)
    def test_joined_parts_are_one_softmax(self, data: Any) -> None:
        """Ragged groups, T = 1, responses longer than their prompt, nothing in common; masks, soft-caps, sinks, shared heads."""
        rows = data.draw(
            st.one_of(tries(), st.sampled_from([group(20, (9, 30, 1)), group(1, (7, 7)), group(17, (1,))]))
        )
        with mock.patch.object(scoring, "SHORT", data.draw(st.sampled_from([0, 24, 128]))):
            plan = scoring.RowTree(batch_of(rows), "cpu").plan
        torch.manual_seed(data.draw(st.integers(0, 99)))
        shared, wide, flat = (data.draw(st.sampled_from(one)) for one in ((1, 2, 3), (8, 5), (False, True)))
        sizes = [(2 * shared, 8), (2, 8), (2, wide)]
        states = [
            torch.randn(1, heads, len(plan.back), size, dtype=torch.float64, requires_grad=True)
            for heads, size in sizes
        ]
        sinks = data.draw(st.sampled_from([None, torch.randn(2 * shared, dtype=torch.float64, requires_grad=True)]))
        window, cap = data.draw(st.sampled_from([(None, None), (3, None), (1, None), (None, 1.5), (5, 1.5)]))
        layer = LayerCall(0, *states, 0.4, window, cap, sinks)
        far = plan.depths[:, None] - plan.depths
        mask = seen(plan).bool() & (far < (window or 1000))
        whole = [*states, *([] if sinks is None else [sinks])]
        slope = torch.randn(1, 2 * shared, len(plan.back), wide, dtype=torch.float64)
        truth = layer.attend(*states, mask[None, None])
        before = forward._CHUNK, forward.has_flash
        forward._CHUNK, forward.has_flash = data.draw(st.sampled_from([4, 512])), lambda *_: before[1](*_) and not flat
        try:
            joined = plan.attend(layer)
            found = torch.autograd.grad(joined, whole, slope)
        finally:
            forward._CHUNK, forward.has_flash = before
        # softmaxes are float32 in one and in the other way
        torch.testing.assert_close(joined, truth, atol=1e-5, rtol=1e-5)
        for one, other in zip(found, torch.autograd.grad(truth, whole, slope), strict=True):
            torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)

    @pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
    def test_gradients_in_half_precision_are_rounded_once(self, kind: torch.dtype) -> None:
        torch.manual_seed(0)
        states = [torch.randn(2, heads, 40, 16, dtype=kind) for heads in (4, 2, 2)]
        mask = torch.zeros(2, 1, 40, 40).masked_fill(torch.ones(40, 40).tril() == 0, -torch.inf)
        for among, causal in ((mask, False), (None, True)):
            out, total = flash_forward(*states, among, causal, 0.25)
            slope = torch.randn_like(out)
            found = flash_backward(slope, *states, out, total, among, causal, 0.25)
            wide = [one.float() for one in (slope, *states, out)]
            exact = flash_backward(*wide, total, among, causal, 0.25)
            for one, other in zip(found, exact, strict=True):
                assert other.dtype == torch.float32 and torch.equal(one, other.to(kind))

    def test_memory_grows_linearly_with_the_response(self) -> None:
        kept = []
        for length in (64, 128, 256):
            plan = scoring.RowTree(batch_of(group(20, (length, length, length // 2))), "cpu").plan
            states = [torch.randn(1, heads, len(plan.back), 8, requires_grad=True) for heads in (4, 2, 2)]
            sizes: dict[int, int] = {}

            def keep(one: torch.Tensor, sizes: dict[int, int] = sizes) -> torch.Tensor:
                sizes[one.untyped_storage().data_ptr()] = one.untyped_storage().nbytes()
                return one

            with torch.autograd.graph.saved_tensors_hooks(keep, lambda one: one):
                joined = plan.attend(LayerCall(0, *states, 0.3))
            kept.append(sum(sizes.values()) / len(plan.back))
            del joined
        assert (
            kept[2] <= kept[1] <= kept[0] == 4 * ((4 + 2 + 2) * 8 + 4 * 8 + 4)
        )  # what goes in, what comes out, and a sum


def seen(plan: Any) -> torch.Tensor:
    """[N, N]: how often a token sees another."""
    count = len(plan.back)
    times = torch.zeros(count, count, dtype=torch.long)
    for block in plan.blocks:
        for number, (row, none) in enumerate(zip(block.queries, block.padding, strict=True)):
            queries, keys = row[~none], row[~none] if block.keys is None else block.keys[number]
            seen = torch.ones(len(queries), len(queries), dtype=torch.long).tril()
            if block.keys is not None:
                seen = (block.before[number] <= block.behind[number, : len(queries), None]).long()
                assert torch.equal(seen == 1, block.mask[number, 0, : len(queries)] == 0)
            times.index_put_((queries[:, None], keys[None]), seen, accumulate=True)
    for keys, queries in plan.above:
        times[queries, keys] += 1
    assert times.max() <= 1
    return times


SMALL = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8}
SMALL |= {"num_key_value_heads": 2, "intermediate_size": 48, "max_position_embeddings": 128}


def small(kind: str) -> Any:
    """A small random model of an architecture whose attention is special."""
    import transformers

    torch.manual_seed(0)
    more: dict[str, dict[str, Any]] = {
        "Gemma2": {"sliding_window": 4, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 1.0},
        "GptOss": {"sliding_window": 4, "num_local_experts": 4, "num_experts_per_tok": 2},
        "Qwen3Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    }
    config = getattr(transformers, f"{kind}Config")(**SMALL, **more[kind], pad_token_id=0, eos_token_id=2)
    config._attn_implementation = "eager"  # transformers' sdpa leaves Gemma 2's soft-cap out
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    for name, one in model.named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.normal_(one)
        else:
            one.data.mul_(3)
    return model.eval()


@pytest.mark.parametrize("kind", ["Gemma2", "GptOss", "Qwen3Moe"])
def test_windows_soft_caps_sinks_and_experts(kind: str) -> None:
    check(small(kind), batch_of(group(20, (9, 3, 7)) + group(3, (6,), first=6)))


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield make_random_model(tmp_path / "random")


def counts(batch: DataProto) -> LossCounts:
    return EngineContract.counts(batch)


def graded(engine: Any, batch: DataProto) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = engine.gradient(batch, LikelihoodLoss(), counts(batch))
    return found


def labelled(rows: Sequence[Row]) -> DataProto:
    batch = batch_of(rows)
    return batch.union(DataProto({"weight": torch.linspace(-1, 1, len(rows)), "row": torch.arange(len(rows))}))


@pytest.mark.slow
@pytest.mark.parametrize(
    "more", [{"gradient_checkpointing": True}, {"dtype": "bfloat16"}, {"lora_rank": 4}, {"micro_batch_tokens": 60}]
)
def test_every_way_to_learn_packs_alike(folder: Path, more: dict[str, Any]) -> None:
    if "lora_rank" in more:
        pytest.importorskip("peft", reason="peft is not installed (the extra `peft`)")
    batch = labelled(group(20, (5, 9, 2)) + group(20, (4, 4), first=5))
    packed, padded = (graded(local(folder, device="cpu", pack=pack, **more), batch) for pack in ("yes", "no"))
    assert packed.keys() == padded.keys()
    tolerance = 3e-2 if "dtype" in more else 1e-5
    for name, one in padded.items():
        torch.testing.assert_close(packed[name], one, atol=tolerance * float(one.abs().max()) + 1e-9, rtol=tolerance)


@pytest.mark.slow
def test_what_is_not_proven_is_refused_or_padded(folder: Path) -> None:
    pytest.importorskip("peft", reason="peft is not installed (the extra `peft`)")
    dropped: dict[str, Any] = {"device": "cpu", "lora_rank": 4, "lora_dropout": 0.1}
    batch = labelled(group(20, (5, 9)))
    assert not local(folder, **dropped)._packs(batch)
    with pytest.raises(EngineError, match="pack='yes'.*lora_dropout=0.1"):
        local(folder, pack="yes", **dropped).compute_log_probs(batch)
    engine = local(folder, device="cpu", pack="yes")
    engine._model.workbench_paths = Paths(pack=False)
    with pytest.raises(EngineError, match="no proof"):
        engine.compute_log_probs(batch)
    assert not local(folder, device="cpu", attn_implementation="eager")._packs(batch)
