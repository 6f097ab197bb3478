"""What a phase wrote, summed up: numbers by hand, padding left out, large columns by a stated part of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import workbench as wb
from workbench.trace import Phase
from workbench.views import fields
from workbench.views.fields import field_of, fields_html, fields_text, spark
from workbench.views.html import lint


def batch() -> wb.DataProto:
    return wb.DataProto(
        {
            "responses": torch.tensor([[5, 6, 0], [7, 0, 0]]),
            "response_mask": torch.tensor([[1, 1, 0], [1, 0, 0]]),
            "advantages": torch.tensor([[1.0, 3.0, 9.0], [2.0, 9.0, 9.0]]),
            "reward": torch.tensor([0.0, float("nan")]),
        },
        {"finish_reason": ["stop", "stop"], "raw_prompt": [[], []]},
    )


def test_numbers_are_over_the_responses_own_tokens() -> None:
    found = field_of(batch(), "advantages")
    assert (found.mean, found.low, found.high) == (2.0, 1.0, 3.0)
    assert found.std == pytest.approx((2 / 3) ** 0.5)
    assert found.kind == "f32[2,3]" and found.numbers == "2 ± 0.816  [1, 3]"


def test_ids_have_a_range_and_no_mean_and_nan_is_counted() -> None:
    assert field_of(batch(), "responses").numbers == "[5, 7]"
    found = field_of(batch(), "reward")
    assert found.odd == 1 and found.mean == 0.0 and "1 not finite" in found.numbers


def test_objects_say_what_is_common() -> None:
    assert field_of(batch(), "finish_reason").numbers == "stop ×2"
    assert field_of(batch(), "raw_prompt").numbers == "2 list"


def test_a_histogram_by_hand() -> None:
    assert spark(torch.tensor([0.0, 0, 0, 0, 1]).double(), 0.0, 1.0) == "█" + " " * 10 + "▂"
    assert spark(torch.ones(3).double(), 1.0, 1.0) == "█"


def test_a_large_column_is_summed_up_from_even_pieces(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(fields, "ENOUGH", 64)
    values = torch.arange(1000.0)[:, None].expand(1000, 4).contiguous()
    whole = wb.DataProto({"mine": values})
    saved = wb.DataProto.load(whole.save(tmp_path / "b"))
    for one in (whole, saved):
        found = field_of(one, "mine")
        assert found.rows == 16 and found.of == 1000
        assert found.mean == pytest.approx(470, abs=40), "from all over the column"
    phase = Phase(stage="x", batch=saved, wrote=("mine",), metrics={}, settings={})
    assert "summed up from a part of 1,000 rows" in fields_html(phase)
    assert not isinstance(saved.batch.raw()["mine"], torch.Tensor), "the column was not kept"


def test_a_changed_column_stands_beside_what_it_was() -> None:
    before = batch()
    after = before.with_columns({"reward": torch.tensor([1.0, 1.0])})
    phase = Phase(stage="reward", batch=after, wrote=("reward",), metrics={}, settings={})
    text, html = fields_text(phase, before), fields_html(phase, before)
    assert "1 ± 0  [1, 1]" in text and "was f32[2]" in text and lint(html) == []
    assert "was" not in fields_text(phase)
    assert "reward" in repr(phase) and phase._repr_html_()
