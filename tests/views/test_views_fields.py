"""What a phase wrote, summed up: numbers by hand, padding left out, large columns by a stated part of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.lint import lint

import workbench as wb
from workbench.steps.trace import Phase
from workbench.views import traces
from workbench.views.document import html, text
from workbench.views.traces import field_of, fields, kind_of, spark


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
    assert kind_of(batch(), "advantages") == "f32[2,3]"
    assert field_of(batch(), "advantages")[1] == "2 ± 0.8165  [1, 3]"  # 0.8165 = √(2/3)


def test_ids_have_a_range_and_no_mean_and_nan_is_counted() -> None:
    assert field_of(batch(), "responses")[1] == "[5, 7]"
    assert field_of(batch(), "reward")[1] == "0 ± 0  [0, 0]  1 not finite"


def test_objects_say_what_is_common() -> None:
    assert field_of(batch(), "finish_reason")[1] == "stop ×2"
    assert field_of(batch(), "raw_prompt")[1] == "2 list"


def test_a_histogram_by_hand() -> None:
    assert spark(torch.tensor([0.0, 0, 0, 0, 1]).double(), 0.0, 1.0) == "█" + " " * 10 + "▂"
    assert spark(torch.ones(3).double(), 1.0, 1.0) == "█"


def test_a_large_column_is_summed_up_from_even_pieces(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(traces, "ENOUGH", 64)
    values = torch.arange(1000.0)[:, None].expand(1000, 4).contiguous()
    whole = wb.DataProto({"mine": values})
    saved = wb.DataProto.load(whole.save(tmp_path / "b"))
    for one in (whole, saved):
        read, numbers, _ = field_of(one, "mine")
        assert read == 16
        assert float(numbers.split()[0]) == pytest.approx(470, abs=40), "from all over the column"
    phase = Phase(stage="x", batch=saved, wrote=("mine",), metrics={}, settings={})
    assert "computed from some of the 1,000 rows" in html(fields(phase))
    assert not isinstance(saved.batch.raw()["mine"], torch.Tensor), "the column was not kept"


def test_a_changed_column_stands_beside_what_it_was() -> None:
    before = batch()
    after = before.with_columns({"reward": torch.tensor([1.0, 1.0])})
    phase = Phase(stage="reward", batch=after, wrote=("reward",), metrics={}, settings={})
    said, page = text(fields(phase, before)), html(fields(phase, before))
    assert "1 ± 0  [1, 1]" in said and "was f32[2]" in said and lint(page) == []
    assert "was" not in text(fields(phase))
    assert "reward" in repr(phase) and phase._repr_html_()
