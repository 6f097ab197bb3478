"""Tokens: texts that join to the whole, numbers by hand, colours by scale, two rows on one scale."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.lint import lint
from support.patience import examples

import workbench as wb
from workbench.engines.local_engine.loading import open_tokenizer
from workbench.views.tokens import CAP, QUANTITIES, TokenRow, aligned, colour_of, span_of_values, token_texts


def batch(**columns: Any) -> wb.DataProto:
    """Two rows: one of three own tokens; one with a tool's token in the middle and padding at the end."""
    return wb.DataProto(
        {
            "prompts": torch.tensor([[0, 9], [8, 9]]),
            "prompt_mask": torch.tensor([[0, 1], [1, 1]]),
            "responses": torch.tensor([[5, 6, 7, 4], [5, 6, 7, 0]]),
            "response_mask": torch.tensor([[1, 1, 1, 1], [1, 0, 1, 0]]),
            "attention_mask": torch.tensor([[0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0]]),
            "old_log_probs": torch.tensor([[-1.0, -2.0, -3.0, -0.5], [-1.0, 0.0, -2.0, 0.0]]),
            "ref_log_prob": torch.tensor([[-1.5, -2.0, -2.0, -0.5], [-1.0, 0.0, -2.0, 0.0]]),
            "new_log_probs": torch.tensor([[-1.0, -2.0, -3.0 + math.log(2), -0.5], [-1.0, 0.0, -2.0, 0.0]]),
            "clipped": torch.tensor([[False, False, True, False], [False] * 4]),
            "advantages": torch.tensor([[0.5, 0.5, 0.5, 0.5], [-1.0, 0.0, -1.0, 0.0]]),
            **columns,
        }
    )


def test_quantities_by_hand() -> None:
    row = TokenRow(batch(), 0)
    assert row.values["kl"] == pytest.approx([0.5, 0.0, -1.0, 0.0])
    assert row.values["ratio"] == pytest.approx([1.0, 1.0, 2.0, 1.0])
    assert row.values["clipped"] == [0.0, 0.0, 1.0, 0.0] and row.values["mask"] == [1.0] * 4
    assert set(row.values) < set(QUANTITIES) and "value" not in row.values and "entropy" not in row.values


def test_tool_text_is_real_and_not_the_models_own_and_padding_is_nothing() -> None:
    row = TokenRow(batch(), 1)
    assert row.length == 3 and row.own == [True, False, True] and row.ids == [5, 6, 7]
    html = wb.views.tokens(batch(), 1)._repr_html_()
    assert html.count("border-bottom:2px dotted") == 1 and lint(html) == []


def test_a_column_of_ones_own_is_a_quantity() -> None:
    made = batch(surprise=torch.tensor([[0.0, 1, 2, 3]] * 2))
    assert wb.views.tokens(made, 0, "surprise").frame["surprise"].tolist() == [0, 1, 2, 3]
    with pytest.raises(ValueError, match=r"'advantag'.*quantity.*mean 'advantage'"):
        wb.views.tokens(made, 0, "advantag")
    with pytest.raises(IndexError, match="rows 0 to 1"):
        wb.views.tokens(made, 2)
    with pytest.raises(ValueError, match="no token ids"):
        wb.views.tokens(wb.DataProto(None, {"response_text": ["a"]}), 0)


def test_colours_go_with_the_scale() -> None:
    signed, one_way, low = QUANTITIES["advantage"], QUANTITIES["entropy"], QUANTITIES["log_prob"]
    assert span_of_values(signed, [[-0.5, 0.2], [1.0]]) == (-1.0, 1.0)
    assert span_of_values(one_way, [[0.0, 2.0]]) == (0.0, 2.0) and span_of_values(one_way, [[1.0]]) == (0.5, 1.5)
    assert colour_of(1.0, signed, (-1, 1)) == "rgba(0,158,115,.65)"
    assert colour_of(-0.5, signed, (-1, 1)) == "rgba(213,94,0,.33)" and colour_of(0.0, signed, (-1, 1)).endswith(
        ",.00)"
    )
    assert colour_of(-3.0, low, (-3, 0)).endswith(",.65)") and colour_of(0.0, low, (-3, 0)).endswith(",.00)")
    assert colour_of(float("nan"), signed, (-1, 1)) == "rgba(255,0,255,0.6)", "seen at once"


def test_two_rows_are_on_one_scale() -> None:
    view = wb.views.tokens(batch(), 0, "advantage", against_row=1)
    assert view.quantity()[1] == (-1.0, 1.0) and view.labels == ["row 0", "row 1"]
    html = view._repr_html_()
    assert lint(html) == [] and "rgba(0,158,115,.33)" in html and "rgba(213,94,0,.65)" in html
    other = batch(advantages=torch.ones(2, 4) * 2)
    both = wb.views.tokens(batch(), 0, "advantage", against=other)
    assert both.labels == ["row 0, first", "row 0, second"] and both.quantity()[1] == (-2.0, 2.0)


def test_two_rows_are_aligned_token_by_token() -> None:
    assert aligned([1, 2, 3, 4], [1, 9, 3, 4]) == [
        (True, range(1), range(1)), (False, range(1, 2), range(1, 2)), (True, range(2, 4), range(2, 4)),
    ]  # fmt: skip
    chance = aligned([1, 2, 3, 4, 7, 5, 6, 8, 8], [9, 9, 9, 7, 9, 9, 9])
    assert chance == [(False, range(9), range(7))], "a chance token does not break up what differs"
    both = wb.views.tokens(batch(), 0, against=batch(advantages=torch.ones(2, 4) * 2))
    html = both._repr_html_()
    assert html.count("⟨6⟩") == 2 and "advantage 0.5" in html and "advantage 2" in html and lint(html) == []
    little = wb.views.tokens(batch(), 0, "advantage", against_row=1)  # two tokens of three have another mark
    assert little.pairs() == [] and "stands above the second" in html and "stands above" not in little.html()


def test_every_number_is_on_hover_and_clipping_has_a_shape() -> None:
    html = wb.views.tokens(batch(), 0)._repr_html_()
    assert "2  id 7  log_prob -3  ref_log_prob -2  kl -1  ratio 2  clipped 1" in html
    assert html.count("border-bottom:2px solid") == 1


def test_rejected_tokens_are_struck_and_said() -> None:
    kept = torch.tensor([[1, 0, 1, 1], [1, 0, 0, 0]])  # of row 1 the tool's token is not the model's own
    view = wb.views.tokens(batch(loss_mask=kept, rollout_is_weights=torch.full((2, 4), 0.5)), 0, against_row=1)
    assert [row.rejected for row in view.rows] == [[False, True, False, False], [False, False, True]]
    html = view._repr_html_()
    assert html.count("line-through") == 2 and lint(html) == [] and "weight 0.5" in html and "loss_mask 0" in html
    assert repr(view).count(" rejected") == 2 and " rejected" not in repr(wb.views.tokens(batch(), 0))


def test_long_responses_are_cut_and_the_cut_is_said() -> None:
    ids = torch.randint(1, 9, (1, 8000))
    mask = torch.ones_like(ids)
    long = wb.DataProto({"responses": ids, "response_mask": mask, "advantages": torch.rand(1, 8000)})
    html = wb.views.tokens(long, 0)._repr_html_()
    assert html.count("<span style=") <= CAP + 8 and "6,000 more tokens" in html and len(html) < 400_000


def test_a_batch_on_disk_gives_one_row_and_keeps_nothing(tmp_path: Path) -> None:
    saved = wb.DataProto.load(batch().save(tmp_path / "b"))
    assert wb.views.tokens(saved, 1, "kl").frame["kl"].tolist() == [0.0, 0.0, 0.0]
    assert not any(isinstance(value, torch.Tensor) for value in saved.batch.raw().values())


# --- texts ------------------------------------------------------------------------------------------

TOKENIZER = open_tokenizer("data/tiny-arith")


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.integers(0, 473), max_size=60))
def test_pieces_join_to_the_whole(ids: list[int]) -> None:
    texts = token_texts(TOKENIZER, ids)
    assert len(texts) == len(ids)
    assert "".join(texts) == TOKENIZER.decode(ids, skip_special_tokens=False)


def test_characters_of_several_tokens_come_whole() -> None:
    ids = TOKENIZER.encode("größer 𝔘 日本", add_special_tokens=False)
    texts = token_texts(TOKENIZER, ids)
    assert "".join(texts) == TOKENIZER.decode(ids) and "" in texts and "�" not in "".join(texts)


def test_a_tokenizer_that_is_not_there_leaves_ids() -> None:
    assert open_tokenizer("no/such/folder") is None
    assert TokenRow(batch(), 0).texts == ["⟨5⟩", "⟨6⟩", "⟨7⟩", "⟨4⟩"]
