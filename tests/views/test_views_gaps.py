"""Sampler against trainer as a picture: what is drawn is what the batch has."""

from __future__ import annotations

import pytest
import torch

import workbench as wb
from workbench.base.errors import BatchError


def batch(**more: torch.Tensor) -> wb.DataProto:
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    sampled = torch.tensor([[-1.0, -2.0, 9.0], [-0.5, 9.0, 9.0]])
    scored = torch.tensor([[-1.0, -2.5, 7.0], [-0.25, 7.0, 7.0]])
    return wb.DataProto({"response_mask": mask, "rollout_log_probs": sampled, "old_log_probs": scored, **more})


def test_padding_counts_for_nothing_and_each_version_has_a_line() -> None:
    figure = wb.views.sampler_logprob_diff(batch(policy_version=torch.tensor([3, 4])))
    assert figure._suptitle.get_text() == "3 tokens: largest difference 0.5 nats, mean 0.25"
    left, right = figure.axes
    assert sorted(map(tuple, left.collections[0].get_offsets().tolist())) == [(-2.0, -2.5), (-1.0, -1.0), (-0.5, -0.25)]
    assert [line.get_text() for line in right.get_legend().get_texts()] == ["version 3", "version 4"]
    assert figure._repr_png_()[:4] == b"\x89PNG"


def test_a_batch_that_was_not_scored_is_refused() -> None:
    with pytest.raises(BatchError, match=r"no old_log_probs; run the step until 'old_log_prob'"):
        wb.views.sampler_logprob_diff(batch().without("old_log_probs"))
