"""Comparison of two traces, with numbers worked out by hand: NaN, infinities, integers, judgements, blocks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import workbench as wb
from workbench.dataproto import DataProto
from workbench.dataproto.value import unchanged
from workbench.engines import Sample
from workbench.rewards import Score
from workbench.stages.rollout import columns_of
from workbench.steps.compare import ColumnChange
from workbench.steps.trace import Trace

NAN, INF = float("nan"), float("inf")


def trace(tensors: dict[str, torch.Tensor], objects: dict[str, Any] | None = None) -> Trace:
    return Trace(wb.DataProto(tensors, objects or {}))


def change(a: torch.Tensor, b: torch.Tensor) -> ColumnChange | None:
    found = wb.compare(trace({"x": a}), trace({"x": b})).columns
    return found[0] if found else None


@pytest.mark.parametrize(
    ("a", "b", "rows", "largest"),
    [
        ([[1.0, 2.0], [3.0, NAN]], [[1.0, 2.5], [3.0, NAN]], 1, 0.5),
        ([[1.0, NAN], [3.0, 4.0]], [[1.0, 2.0], [3.0, 4.25]], 2, INF),
        ([[INF, 1.0], [0.0, 0.0]], [[INF, 1.5], [0.0, 0.0]], 1, 0.5),
        ([[INF, 1.0], [0.0, 0.0]], [[-INF, 1.0], [0.0, 0.0]], 1, INF),
    ],
)
def test_floats(a: Any, b: Any, rows: int, largest: float) -> None:
    found = change(torch.tensor(a), torch.tensor(b))
    assert found is not None and (found.rows, found.largest) == (rows, pytest.approx(largest))
    assert change(torch.tensor(a), torch.tensor(a)) is None


def test_integers_bools_shapes_and_many_blocks() -> None:
    assert change(torch.tensor([1, 5, 9]), torch.tensor([1, 2, 9])) == ColumnChange(name="x", rows=1, largest=3.0)
    flags = change(torch.tensor([True, False]), torch.tensor([True, True]))
    assert flags is not None and flags.largest == 1.0
    shapes = change(torch.zeros(2, 3), torch.zeros(2, 4))
    assert shapes is not None and shapes.rows == 2 and shapes.largest != shapes.largest
    a = torch.zeros(1000, 700)
    b = a.clone()
    b[0, 0], b[500, 3], b[500, 4], b[999, 699] = 0.5, -2.0, 1.0, 0.25
    assert change(a, b) == ColumnChange(name="x", rows=3, largest=2.0)


def test_objects_and_judgements() -> None:
    first = [Score(value=1.0, seconds=0.1), Score(value=1.0, parts={"a": NAN}), Score(value=0.0)]
    second = [Score(value=1.0, seconds=9.9), Score(value=1.0, parts={"a": NAN}), Score(value=0.5)]
    others = {"info": [{"n": np.array([1, 2])}, {"n": NAN}, [1, {"b": "c"}]]}
    same = {"info": [{"n": np.array([1, 2])}, {"n": NAN}, [1, {"b": "d"}]]}
    found = wb.compare(trace({}, {"score": first, **others}), trace({}, {"score": second, **same})).columns
    assert [(one.name, one.rows) for one in found] == [("score", 1), ("info", 1)]


def test_rows_that_changed_most_first() -> None:
    mask = torch.tensor([[1, 1], [1, 0], [1, 1]])
    a = trace(
        {
            "reward": torch.tensor([0.0, 1.0, 1.0]),
            "advantages": torch.tensor([[1.0, 3.0], [1.0, 9.0], [1.0, 1.0]]),
            "response_mask": mask,
        }
    )
    b = trace(
        {
            "reward": torch.tensor([0.0, 0.5, 1.0]),
            "advantages": torch.tensor([[-1.0, -3.0], [1.0, 7.0], [1.0, 1.0]]),
            "response_mask": mask,
        }
    )
    found = wb.compare(a, b)
    assert [(row.row, row.reward, row.advantage) for row in found.rows] == [
        (0, (0.0, 0.0), (2.0, -2.0)),
        (1, (1.0, 0.5), (1.0, 1.0)),
    ]
    assert found.sign_flips == 1 and found.rows[0].flipped


def test_a_column_that_both_have_on_disk_is_not_read(tmp_path: Path) -> None:
    batch = wb.DataProto({"x": torch.arange(3), "y": torch.arange(3)})
    path = Trace(batch).save(tmp_path / "t")
    one, two = Trace.load(path), Trace.load(path)
    (path / "start" / "tensors.safetensors").unlink()
    assert wb.compare(one, two).identical and unchanged("x", one.batch, two.batch)


def test_padding_is_no_difference() -> None:
    """The longest response of one side is shorter, the longest prompt longer: only what was said is compared."""

    def batch(prompts: list[list[int]], responses: list[list[int]], values: list[list[float]]) -> DataProto:
        samples = [Sample(tuple(ids), tuple(found), "stop", 0) for ids, found in zip(responses, values, strict=True)]
        return DataProto.from_single_dict(columns_of(prompts, samples, pad_id=9))

    a = batch([[1], [2]], [[5, 6, 7], [8]], [[-1, -2, -3], [-4]])
    b = batch([[3, 1], [2]], [[5, 6], [8]], [[-1, -2.5], [-4]])
    found = {one.name: (one.rows, one.largest) for one in wb.compare(a, b).columns}
    assert found == {
        "prompts": (1, 3.0),
        "prompt_mask": (1, 1.0),
        "responses": (1, 7.0),
        "response_mask": (1, 1.0),
        "input_ids": (1, 7.0),
        "attention_mask": (1, 1.0),
        "position_ids": (1, 3.0),
        "rollout_log_probs": (1, 3.0),
    }
    strange = wb.compare(a.with_columns({"mine": torch.zeros(2, 5)}), b.with_columns({"mine": torch.zeros(2, 6)}))
    assert {one.name: one.rows for one in strange.columns}["mine"] == 2, "nobody knows what its places are"
