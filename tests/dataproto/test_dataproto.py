"""The batch as a value: verl's names and results, our differences."""

from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.patience import examples

from workbench.base.errors import BatchError, ColumnInvalid, ColumnMissing, UnionConflict
from workbench.dataproto import DataProto, Origin

ORIGIN = Origin(stage="reward", step=3, policy_version=2, settings="abcd")


def make(rows: int = 4, **extra: Any) -> DataProto:
    return DataProto(
        {"reward": torch.arange(float(rows)), "responses": torch.arange(rows * 3).reshape(rows, 3)},
        {"uid": [f"u{row // 2}" for row in range(rows)], "extra_info": [{"row": row} for row in range(rows)]},
        {"step": 1, "nested": {"a": [1]}},
        origins={"reward": ORIGIN},
        **extra,
    )


def same(a: DataProto, b: DataProto) -> bool:
    return a.columns == b.columns and all(
        torch.equal(a[n], b[n]) if isinstance(a[n], torch.Tensor) else list(a[n]) == list(b[n]) for n in a.columns
    )


# --- construction and checks --------------------------------------------------------------------


def test_lengths_are_checked_for_tensors_and_objects_alike() -> None:
    with pytest.raises(BatchError, match="one length"):
        DataProto({"reward": torch.zeros(3)}, {"uid": ["a", "b"]})
    with pytest.raises(BatchError, match="one length"):
        DataProto(None, {"uid": ["a"], "extra": [1, 2]})


@pytest.mark.parametrize(
    ("name", "tensor", "match"),
    [
        ("reward", torch.zeros(4, dtype=torch.long), "dtype float"),
        ("responses", torch.zeros(4, 3), "dtype int"),
        ("advantages", torch.zeros(4), r"dims \[B, T\]"),
        ("uid", torch.zeros(4), "one object per row"),
        ("mine", torch.tensor(1.0), r"a tensor \[B"),
    ],
)
def test_known_columns_are_checked(name: str, tensor: torch.Tensor, match: str) -> None:
    with pytest.raises(ColumnInvalid, match=match):
        DataProto({name: tensor})


def test_a_letter_has_one_size() -> None:
    with pytest.raises(ColumnInvalid, match="'advantages' has T=4 but 'responses' has T=3"):
        make().with_columns({"advantages": torch.zeros(4, 4)})
    with pytest.raises(ColumnInvalid, match=r"S\+T"):
        DataProto(
            {n: torch.zeros(2, w, dtype=torch.long) for n, w in (("prompts", 2), ("responses", 3), ("input_ids", 6))}
        )


def test_unknown_columns_are_welcome_and_known_objects_are_not_tensors() -> None:
    assert "mine" in make().with_columns({"mine": torch.zeros(4, 7, 2)})
    with pytest.raises(ColumnInvalid, match="tensor"):
        DataProto(None, {"reward": [1.0, 2.0]})


def test_a_missing_column_names_what_is_there_who_writes_it_and_the_nearest() -> None:
    with pytest.raises(ColumnMissing, match="stage 'advantage' writes it"):
        make()["advantages"]
    with pytest.raises(ColumnMissing, match="did you mean 'reward'"):
        make().batch["rewad"]
    assert not hasattr(make(), "advantages") and hasattr(make(), "reward")
    assert "reward" in dir(make())


# --- values -----------------------------------------------------------------------------------


def test_nothing_changes_in_place() -> None:
    batch = make()
    before = pickle.dumps(batch)
    batch.repeat(2), batch.with_columns({"x": torch.zeros(4)}), batch.rename("reward", "gain")
    batch.pop(["reward"]), batch.reorder(torch.tensor([3, 2, 1, 0])), batch.with_meta(step=9), batch.without("uid")
    batch.mutable().batch["reward"][0] = 99
    batch.mutable().meta_info["nested"]["a"].append(2)
    assert pickle.dumps(batch) == before


def test_meta_info_is_never_shared() -> None:
    outer = {"nested": [1]}
    batch = DataProto({"reward": torch.zeros(1)}, None, outer)
    outer["nested"].append(2)
    assert batch.meta_info["nested"] == [1]
    batch.slice(0, 1).meta_info["nested"].append(3)
    assert batch.meta_info["nested"] == [1]
    with pytest.raises(TypeError):
        batch.meta_info["x"] = 1  # type: ignore[index]


def test_indexing() -> None:
    batch = make()
    assert batch[1].batch["reward"] == 1 and batch[-1].non_tensor_batch["uid"] == "u1"
    assert len(batch[1:3]) == 2 and list(batch[[3, 0]]["reward"]) == [3, 0]
    assert list(batch[torch.tensor([True, False, False, True])]["reward"]) == [0, 3]
    assert list(batch[::-1]["reward"]) == [3, 2, 1, 0]
    assert len(batch[[]]) == 0 and [item.batch["reward"].item() for item in batch] == [0, 1, 2, 3]
    for wrong in ([4], [True], 1.5):
        with pytest.raises((IndexError, BatchError)):
            batch[wrong]
    with pytest.raises(IndexError):
        batch[4]


def test_provenance_survives_everything() -> None:
    batch = make()
    for other in (
        batch.repeat(2),
        batch[1:],
        batch.select(["reward"]),
        DataProto.concat([batch, batch]),
        batch.union(DataProto({"mine": torch.zeros(4)})),
        batch.to("cpu"),
        copy.copy(batch),
        copy.deepcopy(batch),
        pickle.loads(pickle.dumps(batch)),
    ):
        assert other.origins["reward"] == ORIGIN
    assert batch.rename("reward", "gain").origins["gain"] == ORIGIN
    assert "reward" not in batch.with_columns({"reward": torch.ones(4)}).origins


# --- verl's operations ------------------------------------------------------------------------


def test_repeat_both_ways() -> None:
    assert list(make(2).repeat(2)["reward"]) == [0, 0, 1, 1]
    assert list(make(2).repeat(2, interleave=False)["reward"]) == [0, 1, 0, 1]
    assert list(make(3).sample_level_repeat([2, 0, 1])["uid"]) == ["u0", "u0", "u1"]


def test_select_pop_rename() -> None:
    batch = make()
    assert batch.select(["reward"]).columns == ("reward",)
    assert batch.select(None, ["uid"]).columns == ("reward", "responses", "uid")
    taken, rest = batch.pop(["reward"], ["uid"], ["step"])
    assert taken.columns == ("reward", "uid") and dict(taken.meta_info) == {"step": 1}
    assert rest.columns == ("responses", "extra_info") and "step" not in rest.meta_info
    assert batch.rename(["reward", "uid"], ["gain", "who"]).columns == ("responses", "gain", "extra_info", "who")
    for wrong in (lambda: batch.select(["x"]), lambda: batch.pop(["x"]), lambda: batch.select(None, ["x"])):
        with pytest.raises(ColumnMissing):
            wrong()


def test_union_agrees_or_refuses_and_nan_equals_nan() -> None:
    a = DataProto({"x": torch.tensor([1.0, float("nan")])}, {"o": [float("nan"), {"k": np.array([1, 2])}]}, {"m": 1})
    b = DataProto({"x": a["x"].clone(), "y": torch.zeros(2)}, {"o": copy.deepcopy(a["o"])}, {"m": 1, "n": 2})
    both = a.union(b)
    assert both.columns == ("x", "y", "o") and dict(both.meta_info) == {"m": 1, "n": 2}
    with pytest.raises(UnionConflict, match="'x'"):
        a.union(DataProto({"x": torch.zeros(2)}))
    with pytest.raises(UnionConflict, match="meta_info 'm'"):
        a.union(DataProto({"y": torch.zeros(2)}, None, {"m": 2}))
    with pytest.raises(BatchError, match="2 rows"):
        a.union(DataProto({"y": torch.zeros(3)}))


def test_chunk_split_concat_iterate_pad() -> None:
    batch = make(5)
    with pytest.raises(BatchError, match="pad_to_divisor"):
        batch.chunk(2)
    assert [len(part) for part in batch.split(2)] == [2, 2, 1]
    padded, added = batch.pad_to_divisor(4)
    assert added == 3 and list(padded["reward"]) == [0, 1, 2, 3, 4, 0, 1, 2]
    assert same(padded.unpad(added), batch)
    with pytest.raises(BatchError, match="other columns"):
        DataProto.concat([batch, batch.without("uid")])
    with pytest.raises(BatchError, match="at least one"):
        DataProto.concat([])
    seen = [row for part in make(4).make_iterator(2, epochs=2, seed=5) for row in part["reward"].tolist()]
    assert sorted(seen[:4]) == [0, 1, 2, 3] and sorted(seen[4:]) == [0, 1, 2, 3]


rows_strategy = st.integers(1, 12)


@settings(max_examples=examples(40), deadline=None)
@given(rows_strategy, st.integers(1, 5))
def test_chunks_and_repeats_come_back(rows: int, n: int) -> None:
    batch = make(rows)
    padded, added = batch.pad_to_divisor(n)
    assert same(DataProto.concat(padded.chunk(n)).unpad(added), batch)
    assert same(batch.repeat(n)[::n], batch)
    assert same(DataProto.concat(batch.split(n)), batch)


@settings(max_examples=examples(40), deadline=None)
@given(st.lists(st.integers(0, 5), max_size=8), st.randoms())
def test_rows_keep_together(idxs: list[int], random: Any) -> None:
    taken = make(6)[idxs]
    assert [info["row"] for info in taken["extra_info"]] == idxs == taken["reward"].long().tolist()


@pytest.mark.slow
def test_single_dict_and_tensordict_round_trip() -> None:
    batch = DataProto.from_single_dict({"reward": torch.zeros(2), "uid": ["a", "b"]}, {"step": 1})
    assert same(DataProto.from_tensordict(batch.to_tensordict()), batch)
    assert DataProto.from_tensordict(batch.to_tensordict()).meta_info["step"] == 1
    assert same(DataProto.from_dict({"reward": torch.zeros(2)}, {"uid": ["a", "b"]}), batch)


def test_to_pandas_trims_padding() -> None:
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    frame = DataProto({"response_mask": mask, "advantages": torch.ones(2, 3)}, {"uid": ["a", "b"]}).to_pandas()
    assert frame["advantages"].tolist() == [[1, 1], [1]] and frame["uid"].tolist() == ["a", "b"]


# --- travel -----------------------------------------------------------------------------------


def test_pickling_a_slice_carries_its_rows_alone() -> None:
    big = DataProto({"x": torch.zeros(10_000, 16)})
    buffers: list[pickle.PickleBuffer] = []
    small = pickle.dumps(big[:2], protocol=5, buffer_callback=buffers.append)
    assert len(small) < 4_000 and sum(len(b.raw()) for b in buffers) == 2 * 16 * 4
    assert same(pickle.loads(small, buffers=buffers), big[:2])


def test_what_comes_from_read_only_memory_is_a_private_copy() -> None:
    buffers: list[pickle.PickleBuffer] = []
    head = pickle.dumps(make(), protocol=5, buffer_callback=buffers.append)
    frozen = [bytes(buffer.raw()) for buffer in buffers]
    again = pickle.loads(head, buffers=frozen)
    again["reward"][0] = 7
    assert pickle.loads(head, buffers=frozen)["reward"][0] == 0


def test_bfloat16_travels() -> None:
    batch = DataProto({"x": torch.ones(2, dtype=torch.bfloat16)})
    assert pickle.loads(pickle.dumps(batch))["x"].dtype == torch.bfloat16


def test_columns_of_pairs_become_rows() -> None:
    """verl's unfold_column_chunks: a chosen and a rejected answer side by side become two rows."""
    batch = DataProto(
        {"pair": torch.arange(8).reshape(2, 4), "x": torch.tensor([5, 6])},
        {"texts": [["a", "b"], ["c", "d"]], "name": ["p", "q"]},
    )
    found = batch.unfold_column_chunks(2, ["pair", "texts"])
    assert found["pair"].tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]] and found["x"].tolist() == [5, 5, 6, 6]
    assert list(found["texts"]) == [["a"], ["b"], ["c"], ["d"]] and list(found["name"]) == ["p", "p", "q", "q"]
    assert batch.unfold_column_chunks(2)["pair"].tolist() == batch.repeat(2)["pair"].tolist()
    with pytest.raises(BatchError, match="second dim of column 'pair'; expected a multiple of 3; found 4"):
        batch.unfold_column_chunks(3, ["pair"])
    with pytest.raises(BatchError, match="found no second dim"):
        batch.unfold_column_chunks(2, ["x"])
    with pytest.raises(ColumnMissing, match="nothing"):
        batch.unfold_column_chunks(2, ["nothing"])


# --- what has no end -----------------------------------------------------------------------------


def held_by_itself(kind: str) -> Any:
    @dataclass
    class Node:
        inside: Any = None

    node, objects = Node(), np.empty(1, dtype=object)
    node.inside, objects[0] = {"node": node}, objects
    listed: list[Any] = []
    named: dict[str, Any] = {"a": listed}
    listed.append((named, 1))
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    twice: Any = 1
    for _ in range(60):
        twice = {"a": twice, "b": [twice]}
    return {"list": listed, "dict": named, "dataclass": node, "array": objects, "deep": deep, "twice": twice}[kind]


@pytest.mark.parametrize("kind", ["list", "dict", "dataclass", "array", "deep", "twice"])
def test_what_contains_itself_or_has_no_end_is_refused_by_name(kind: str) -> None:
    batch, held = make(), held_by_itself(kind)
    cells = np.array([None] * 4, dtype=object)
    cells[2] = held
    with pytest.raises(ColumnInvalid, match="column 'thing', row 2; expected .* nested at most 100 deep"):
        batch.with_columns({"thing": cells})
    with pytest.raises(BatchError, match="meta_info; expected .* nested at most 100 deep"):
        batch.with_meta(thing=held)
    with pytest.raises(BatchError, match="meta_info; expected"):
        DataProto({"reward": torch.zeros(1)}, meta_info={"thing": held})


def test_what_is_there_twice_or_deep_is_a_value_like_any_other(tmp_path: Path) -> None:
    shared, deep = {"a": 1}, "leaf"
    for _ in range(90):
        deep = [deep]  # type: ignore[assignment]
    batch = make().with_columns({"thing": [[shared, shared], [deep, deep], (), None]})
    assert same(DataProto.load(batch.save(tmp_path / "b")), batch)
