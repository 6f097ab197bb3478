"""A run on questions about pictures: a file as geo3k's, two steps of GRPO, resumed, replayed, looked at; text models refuse it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import make_vision_model
from support.pictures import geometry

import workbench as wb
from workbench import cli
from workbench.base.errors import DataError
from workbench.dataproto.columns import PIXELS


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("pictures")
    geometry(made / "geo.parquet")
    make_vision_model(made / "model")
    return made


def pipeline(model: Any, **settings: Any) -> wb.Pipeline:
    engine = wb.engines.local(model, device="cpu", lr=1e-2)
    sizes = {"group_size": 3, "max_tokens": 5, "kl_coef": 0.01}
    return wb.recipes.grpo(engine, lambda response: float(len(response) % 5), **{**sizes, **settings})


def trained(folder: Path, run: str, steps: int, **settings: Any) -> wb.Run:
    rows = wb.rows(folder / "geo.parquet", max_prompt_length=32)
    told = {"batch_size": 3, "run": folder / run, "trace_freq": 1, "save_freq": 1, **settings}
    return wb.train_blocking(pipeline(folder / "model"), rows, steps=steps, **told)


@pytest.fixture(scope="module")
def run(folder: Path) -> wb.Run:
    return trained(folder, "run", 2)


@pytest.mark.long
def test_a_resumed_run_has_the_steps_of_one_that_was_not_stopped(folder: Path, run: wb.Run) -> None:
    trained(folder, "stopped", 1)
    again = trained(folder, "stopped", 2, resume="auto")
    for step in (1, 2):
        one, other = run.traces[step].batch, again.traces[step].batch
        for name in ("responses", "rollout_log_probs", "new_log_probs", "ref_log_prob", "advantages"):
            assert torch.equal(one[name], other[name]), (step, name)
    assert not torch.equal(run.traces[1].batch["new_log_probs"], run.traces[2].batch["new_log_probs"])


@pytest.mark.slow
def test_a_recorded_step_is_replayed_bit_for_bit(run: wb.Run) -> None:
    recorded = run.traces[2]
    again = run.stepper(step=2).run()
    assert "nothing differs" in repr(again.compare(recorded))
    cells = recorded.batch[PIXELS]
    assert cells[0]["pixel_values"] is cells[1]["pixel_values"], "a group's picture is stored once"
    scored = run.stepper(step=2, at="ref_log_prob").run(until="ref_log_prob").batch["ref_log_prob"]
    assert torch.equal(scored, recorded.batch["ref_log_prob"])
    assert "no formula" not in repr(run.audit(2))


def test_the_samples_show_the_pictures(run: wb.Run) -> None:
    view = wb.views.samples(run, rows=2)
    assert "1 picture 24×16" in repr(view) or "1 picture 32×16" in repr(view)
    assert view.html().count("data:image/png;base64,") == 2 and len(view.html()) < 30_000
    assert "pictures: 1 picture" in repr(view.row(0)) and "<image>" in repr(view.row(0))


@pytest.mark.slow
def test_a_prompt_with_pictures_is_as_long_as_the_model_reads_it(folder: Path) -> None:
    rows = wb.rows(folder / "geo.parquet", max_prompt_length=12)
    engine = wb.engines.local(folder / "model", device="cpu", self_check=False)
    lengths = rows.prompt_lengths(engine.processor())
    assert lengths == [11, 13] * 4 and len(rows.fitting(engine.processor(), overlong="drop")) == 4
    with pytest.raises(DataError, match="column 'images' of row 0.*a tokenizer reads no other"):
        rows.prompt_lengths(engine.tokenizer)


@pytest.mark.slow
def test_a_model_of_text_refuses_the_file_before_work(
    folder: Path, tiny: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pipe, rows = pipeline(tiny), wb.rows(folder / "geo.parquet")
    with pytest.raises(DataError, match="column 'images' of row 0 of .*geo.parquet; expected text"):
        wb.train_blocking(pipe, rows, steps=1, batch_size=2, run=folder / "text")
    asked = {"train_file": folder / "geo.parquet", "num_eval_rows": 2, "batch_size": 2, "run": folder / "text"}
    flags = [word for name, value in asked.items() for word in ("-p", f"{name}={value}")]
    assert cli.main(["check", "notebooks/201_train_grpo.ipynb", *flags]) == 2
    assert "column 'images' of row" in capsys.readouterr().out
    assert not (folder / "text").exists()
