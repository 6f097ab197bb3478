"""Batches on disk: round trips, laziness, refusals, no pickle."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from workbench.base.errors import BatchError
from workbench.dataproto import DataProto, Origin
from workbench.dataproto.io import decode, encode
from workbench.dataproto.value import Lazy
from workbench.rewards import Score, Status

leaves = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
cells = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner)
        | st.dictionaries(st.text(), inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.integers(), inner)
    ),
    max_leaves=10,
)


@given(cells)
def test_cells_round_trip_exactly_through_strict_json(value: Any) -> None:
    again = decode(json.loads(json.dumps(encode(value), allow_nan=False)))
    assert again == value and type(again) is type(value)


def test_numpy_and_nan_cells() -> None:
    again = decode(
        json.loads(json.dumps(encode([np.float32(1.5), np.arange(4).reshape(2, 2), float("nan"), float("inf")])))
    )
    assert again[0] == np.float32(1.5) and again[0].dtype == np.float32
    assert again[1].tolist() == [[0, 1], [2, 3]] and np.isnan(again[2]) and again[3] == float("inf")


def test_a_batch_round_trips(tmp_path: Path) -> None:
    score = Score(value=1.0, parts={"format": 0.5}, answer="18", why="right", status=Status.SCORED)
    batch = DataProto(
        {"reward": torch.rand(3), "responses": torch.ones(3, 2, dtype=torch.long), "scored": torch.tensor([True] * 3)},
        {"uid": ["a", "b", "c"], "score": [score] * 3, "extra_info": [{"n": 1}, None, {"t": (1, 2)}], "n": [1, 2, 3]},
        {"step": 4, "lr": float("inf")},
        origins={"reward": Origin(stage="reward", step=4)},
    )
    again = DataProto.load(batch.save(tmp_path / "b"))
    assert isinstance(again.batch.raw()["reward"], Lazy) and isinstance(again.non_tensor_batch.raw()["score"], Lazy)
    assert len(again) == 3 and again.columns == batch.columns
    assert torch.equal(again["reward"], batch["reward"]) and not isinstance(again.batch.raw()["reward"], Lazy)
    assert list(again["score"]) == [score] * 3 and list(again["extra_info"]) == list(batch["extra_info"])
    assert dict(again.meta_info) == dict(batch.meta_info) and again.origins == batch.origins
    assert {path.suffix for path in (tmp_path / "b").iterdir()} == {".safetensors", ".parquet", ".json"}


def test_lazy_columns_go_through_operations(tmp_path: Path) -> None:
    batch = DataProto({"x": torch.arange(4)}, {"o": [1, "a", None, 2.5]})
    again = DataProto.load(batch.save(tmp_path / "b"))
    assert again.repeat(2)["x"].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert list(again.without("x")[1:3]["o"]) == ["a", None]
    assert "x" in repr(again)


def test_it_is_never_overwritten_and_never_half_there(tmp_path: Path) -> None:
    class Odd:
        pass

    DataProto({"x": torch.zeros(1)}).save(tmp_path / "b")
    with pytest.raises(BatchError, match="never overwritten"):
        DataProto({"x": torch.zeros(1)}).save(tmp_path / "b")
    with pytest.raises(BatchError, match="column 'odd' cannot be saved.*without"):
        DataProto(None, {"odd": [Odd()]}).save(tmp_path / "c")
    with pytest.raises(BatchError, match="meta_info cannot be saved.*found .* class Odd"):
        DataProto({"x": torch.zeros(1)}, meta_info={"odd": Odd()}).save(tmp_path / "c")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b"]


def test_shared_storage_and_empty_batches(tmp_path: Path) -> None:
    row = torch.arange(3)
    batch = DataProto({"a": row.expand(2, 3), "b": row[None].repeat(2, 1)})
    assert DataProto.load(batch.save(tmp_path / "b"))["a"].tolist() == [[0, 1, 2]] * 2
    assert len(DataProto.load(DataProto({"x": torch.zeros(0, 2)}).save(tmp_path / "e"))) == 0


def test_not_a_batch(tmp_path: Path) -> None:
    with pytest.raises(BatchError, match=r"meta\.json"):
        DataProto.load(tmp_path)
    DataProto({"x": torch.zeros(1)}).save(tmp_path / "b")
    meta = tmp_path / "b" / "meta.json"
    meta.write_text(json.dumps({**json.loads(meta.read_text()), "format": 99, "text_crc32": None}))
    with pytest.raises(BatchError, match="format"):
        DataProto.load(tmp_path / "b")


def test_a_columns_bytes_are_compared_when_they_are_read_and_no_others(tmp_path: Path) -> None:
    """Three blocks of 512 rows, one value of the second changed: what is read is right, and the damage is met when it is read."""
    batch = DataProto({"x": torch.arange(1500 * 2).view(1500, 2), "y": torch.zeros(1500)}, {"word": ["a"] * 1500})
    file = batch.save(tmp_path / "b") / "tensors.safetensors"
    content = bytearray(file.read_bytes())
    content[content.index((1300).to_bytes(8, "little"))] ^= 1  # row 650
    file.write_bytes(bytes(content))
    found = DataProto.load(tmp_path / "b")
    assert found.batch.part("x", 0, 512).equal(batch["x"][:512]) and found.batch.part("x", 1024, 1500).equal(
        batch["x"][1024:]
    )
    assert found["y"].equal(batch["y"])
    damage = r"tensors\.safetensors: rows 512 to 1024 of column 'x' have changed.*expected crc32 \d+; found crc32 \d+; take it"
    for read in (lambda: found["x"], lambda: found.batch.part("x", 511, 513), lambda: found[600:601]["x"]):
        with pytest.raises(BatchError, match=damage):
            read()
    objects = tmp_path / "b" / "objects.parquet"
    objects.write_bytes(objects.read_bytes()[:-1])
    with pytest.raises(BatchError, match=r"objects\.parquet; expected \d+ bytes; found \d+ bytes"):
        DataProto.load(tmp_path / "b")["word"]


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.uint8, torch.float64])
def test_every_dtype_has_its_checksums(tmp_path: Path, dtype: torch.dtype) -> None:
    batch = DataProto({"x": torch.arange(12).view(2, 3, 2).to(dtype), "none": torch.zeros(2, 0, dtype=dtype)})
    found = DataProto.load(batch.save(tmp_path / "b"))
    assert found["x"].equal(batch["x"]) and found["none"].equal(batch["none"])


@pytest.mark.slow
def test_one_large_object_in_every_row_can_be_opened_again(tmp_path: Path) -> None:
    tool = {"name": "search", "description": "x" * 9_000}
    batch = DataProto(None, {"tools": [tool] * 5_000, "row": list(range(5_000))})
    found = DataProto.load(batch.save(tmp_path / "b"))
    assert found["tools"][4_999] == tool and found.non_tensor_batch.part("row", 4_000, 4_001).tolist() == [4_000]
