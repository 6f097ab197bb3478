"""Models of text and pictures in the local engine: the picture is read, alike in sampling, scoring and learning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import VISION, make_vision_model
from support.pictures import asked

import workbench as wb
from workbench.base.errors import DataError
from workbench.dataproto.columns import PIXELS
from workbench.dataproto.core import DataProto
from workbench.datasets.rows import Rows
from workbench.engines.protocol import SamplingSettings, processor_of
from workbench.stages import LogProb, PolicyLoss, Rollout, Update

SAMPLING = SamplingSettings(max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {kind: make_vision_model(tmp_path_factory.mktemp(kind), kind) for kind in VISION}


@pytest.fixture(scope="module", params=VISION)
def engine(models: dict[str, Path], request: pytest.FixtureRequest) -> Any:
    return wb.engines.local(models[request.param], device="cpu", lr=1e-2)


def sampled(engine: Any, *seeds: int, group: int = 2) -> wb.DataProto:
    rows = Rows([asked(seed) for seed in seeds])
    return Rollout(engine, group_size=group, sampling=SAMPLING)(next(rows.in_order(len(seeds)))).batch


def log_probs(engine: Any, batch: wb.DataProto) -> torch.Tensor:
    return LogProb(engine)(batch).batch["old_log_probs"]


@pytest.mark.slow
def test_the_self_check_covers_a_row_with_pictures(engine: Any) -> None:
    found = engine.selfcheck.found
    assert processor_of(engine) is not None
    assert max(found["rows with pictures"], found["rows with pictures, sampled"]) < 5e-5


def test_pictures_are_read_in_half_precision_too(models: dict[str, Path]) -> None:
    engine = wb.engines.local(models["qwen2_5_vl"], device="cpu", dtype="bfloat16")
    assert processor_of(engine) is not None
    assert (
        max(engine.selfcheck.found["rows with pictures"], engine.selfcheck.found["rows with pictures, sampled"]) < 5e-5
    )


def test_rows_are_scored_as_they_were_sampled(engine: Any) -> None:
    batch = sampled(engine, 0, 1, 2)
    assert set(batch[PIXELS][0]) >= {"pixel_values"} and batch[PIXELS][0] is batch[PIXELS][1]
    assert torch.allclose(log_probs(engine, batch), batch["rollout_log_probs"], atol=1e-5)


def test_another_picture_changes_the_log_probs_and_nothing_else_does(engine: Any) -> None:
    batch = sampled(engine, 0, 1, 2)
    mine = log_probs(engine, batch)
    assert torch.equal(mine, log_probs(engine, batch))
    alone = log_probs(engine, batch.select_idxs([2]))
    assert torch.allclose(alone, mine[2:3], atol=1e-5), "rows beside it change a row"
    cells = list(batch[PIXELS])
    other = log_probs(engine, batch.with_columns({PIXELS: [*cells[4:], *cells[2:4], *cells[:2]]}))
    assert (other - mine).abs()[:2].max() > 1e-3 and torch.equal(other[2:4], mine[2:4])


@pytest.mark.slow
def test_the_update_follows_the_picture(models: dict[str, Path]) -> None:
    moved = []
    for seed in (0, 0, 4):
        engine = wb.engines.local(models["qwen2_5_vl"], device="cpu", lr=1e-2, self_check=False)
        batch, shown = sampled(engine, 0, 2, group=1), sampled(engine, seed, 2, group=1)
        learnt = batch.with_columns(
            {PIXELS: shown[PIXELS], "advantages": batch["response_mask"].float(), "scored": torch.tensor([True, True])}
        )
        Update(engine, PolicyLoss())(learnt)
        moved.append(engine.snapshot()["weights"])
    assert all(torch.equal(moved[0][name], moved[1][name]) for name in moved[0])
    assert any(not torch.equal(moved[0][name], moved[2][name]) for name in moved[0])


def test_a_pictures_token_in_a_response_is_read_as_text(engine: Any) -> None:
    batch = sampled(engine, 0, 1)
    token = engine._model.config.image_token_id
    ids = batch["input_ids"].clone()
    ids[:, -4] = token
    assert log_probs(engine, batch.with_columns({"input_ids": ids})).isfinite().all()


@pytest.mark.slow
def test_rows_of_text_and_of_pictures_share_a_batch(engine: Any) -> None:
    text = {**asked(0), "prompt": "w7", "images": None}
    batch = Rollout(engine, group_size=1, sampling=SAMPLING)(next(Rows([text, asked(1)]).in_order(2))).batch
    assert batch[PIXELS][0] == {} and batch[PIXELS][1]
    assert torch.allclose(log_probs(engine, batch), batch["rollout_log_probs"], atol=1e-5)
    only = Rollout(engine, group_size=1, sampling=SAMPLING)(next(Rows([text]).in_order(1))).batch
    assert PIXELS not in only, "rows of text go the ways that they always went"


def test_a_pictures_token_in_a_row_of_text_is_scored_as_it_was_sampled(engine: Any) -> None:
    """Beside rows with pictures as alone: by the token's own embedding."""
    text = {**asked(0), "prompt": "w7", "images": None}
    batch = Rollout(engine, group_size=1, sampling=SAMPLING)(next(Rows([text, asked(1)]).in_order(2))).batch
    ids = batch["input_ids"].clone()
    ids[0, -4] = engine._model.config.image_token_id
    batch = batch.with_columns({"input_ids": ids})
    alone = DataProto(batch.select_idxs([0]).batch, meta_info=batch.meta_info)
    assert torch.allclose(log_probs(engine, batch)[:1], log_probs(engine, alone), atol=1e-5)


@pytest.mark.slow
def test_what_is_saved_is_a_model_of_pictures_again(engine: Any, tmp_path: Path) -> None:
    batch = sampled(engine, 0)
    engine.save(tmp_path / "saved")
    again = wb.engines.local(tmp_path / "saved", device="cpu")
    assert torch.equal(sampled(again, 0)["responses"], batch["responses"])
    assert torch.equal(log_probs(again, batch), log_probs(engine, batch))
    reference = engine.reference()
    assert torch.equal(log_probs(reference, batch), log_probs(engine, batch))


def test_an_engine_of_text_refuses_rows_with_pictures(tiny: str) -> None:
    engine = wb.engines.local(tiny, device="cpu")
    with pytest.raises(DataError, match="column 'images' of row 0 of the batch; expected text"):
        sampled(engine, 0)


@pytest.mark.parametrize("kind", VISION)
def test_rows_of_text_and_of_pictures_are_learnt_from_together(kind: str, models: dict[str, Path]) -> None:
    engine = wb.engines.local(models[kind], device="cpu", lr=1e-2, self_check=False)
    text = {**asked(0), "prompt": "w7", "images": None}
    batch = Rollout(engine, group_size=1, sampling=SAMPLING)(next(Rows([text, asked(1)]).in_order(2))).batch
    mask = batch["response_mask"].float()
    batch = batch.with_columns({"old_log_probs": log_probs(engine, batch), "scored": torch.tensor([True, True])})
    before = engine.snapshot()["weights"]
    for row in (0, 1):  # each alone is in the gradient
        advantages = mask * (torch.arange(2) == row)[:, None]
        Update(engine, PolicyLoss())(batch.with_columns({"advantages": advantages}))
        after = engine.snapshot()["weights"]
        assert any(not torch.equal(before[name], after[name]) for name in before)
        before = after
