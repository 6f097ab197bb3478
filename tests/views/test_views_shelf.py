"""Algorithms beside each other: the frame, the pictures."""

from __future__ import annotations

import re

import pytest

import workbench as wb
from workbench.base.errors import PipelineError


@pytest.fixture(scope="module")
def batch() -> wb.DataProto:
    return wb.Trace.load("data/arith-batch").batch


def test_every_estimator_that_the_batch_has_inputs_for(batch: wb.DataProto) -> None:
    frame = wb.views.advantage_table(batch)
    assert len(frame) == len(batch) == 64 and list(frame.columns[:3]) == ["group", "reward", "tokens"]
    assert "optimal_token_baseline" in frame and "remax" not in frame and "gae" not in frame
    ours = (batch["advantages"] * batch["response_mask"]).sum(-1) / batch["response_mask"].sum(-1)
    assert frame["grpo"].tolist() == pytest.approx(ours.tolist(), abs=1e-6)
    # groups without signal teach grpo nothing, reinforce++ something
    dull = frame.groupby("group")["reward"].transform("std") == 0
    assert dull.any() and (frame["grpo"][dull] == 0).all() and (frame["reinforce_plus_plus"][dull] != 0).all()
    assert (frame["grpo_passk"] != 0).groupby(frame["group"]).sum().max() <= 1
    with pytest.raises(PipelineError, match="remax reads reward_baselines"):
        wb.views.advantage_table(batch, ["remax"])
    with pytest.raises(PipelineError, match="'rlo' is not a known advantage estimator.*did you mean 'rloo'"):
        wb.views.advantage_table(batch, ["rlo"])


@pytest.mark.slow
def test_pictures(batch: wb.DataProto) -> None:
    figure = wb.views.advantage_figure(wb.views.advantage_table(batch))
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()][:2] == ["reward", "grpo"]
    assert figure._repr_png_()[:4] == b"\x89PNG"
    pipe = wb.recipes.grpo(wb.engines.local("data/tiny-arith", lr=3e-4, device="cpu"), group_size=8, kl_coef=0.001)
    asked = {name: wb.what_if(pipe, batch, loss_mode=name, updates=2) for name in ("cispo", "gpg")}
    assert re.search(r"token \d+ '.+' \([+-]\d\.\d{4}\)", repr(asked["gpg"])), "which token moved most, in words"
    table = wb.views.what_if_table(asked)
    assert list(table.index) == ["cispo", "gpg"] and (table["cosine"] <= 1.0001).all() and (table["way"] > 0).all()
    drawn = wb.views.what_if_figure(asked)
    assert len(drawn.axes) == 3 and [text.get_text() for text in drawn.legends[0].get_texts()] == ["cispo", "gpg"]
    shown = [list(line.get_ydata()) for line in drawn.axes[0].lines[1::2]]
    assert shown == [[one["actor/ppo_kl"] for one in made.other.metrics] for made in asked.values()]
