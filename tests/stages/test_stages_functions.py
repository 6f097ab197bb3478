"""A stage from a function: its settings, what it may read and write, its place in a pipeline, a run with it."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch

import workbench as wb
from workbench.base.errors import ColumnMissing, PipelineError, RunError, SettingError
from workbench.stages.stage import FunctionStage
from workbench.testing.stages import StageContract


@wb.stage(reads=("response_text", "token_level_scores"), writes=("length_bonus", "token_level_scores"))
def length_norm(batch: wb.DataProto, power: float = 1.0) -> Any:
    """A long response is worth less."""
    bonus = [max(len(text), 1) ** -power for text in batch["response_text"]]
    scores = batch["token_level_scores"] * torch.tensor(bonus)[:, None]
    return {"length_bonus": bonus, "token_level_scores": scores}, {"length_norm/mean": sum(bonus) / len(bonus)}


def batch() -> wb.DataProto:
    columns = {"token_level_scores": torch.ones(3, 4), "response_mask": torch.ones(3, 4).long()}
    return wb.DataProto(columns, {"response_text": ["a", "ab", "abcd"]}, {"step": 1})


class TestAFunctionIsAStage(StageContract):
    make_stage = staticmethod(length_norm)
    make_batch = staticmethod(batch)


def test_its_keyword_arguments_are_the_settings() -> None:
    stage = length_norm(power=2.0)
    assert (
        stage.name == "length_norm" and stage.settings() == {"power": 2.0} and repr(stage) == "length_norm(power=2.0)"
    )
    assert inspect.getdoc(length_norm) == "A long response is worth less."
    assert [*inspect.signature(length_norm).parameters] == ["power"]
    assert length_norm().settings() == {"power": 1.0} and stage.with_settings(power=3.0).settings() == {"power": 3.0}
    written = stage(batch()).batch
    assert written["length_bonus"].dtype == torch.float32
    torch.testing.assert_close(written["length_bonus"], torch.tensor([1.0, 0.25, 1 / 16]))
    other = length_norm()(batch()).batch
    assert written.origins["length_bonus"].settings != other.origins["length_bonus"].settings
    with pytest.raises(SettingError, match="'powr' is not a setting of stage 'length_norm'.*did you mean 'power'"):
        length_norm(powr=1.0)
    with pytest.raises(PipelineError, match="did you mean 'power'"):
        stage.with_settings(powr=1.0)


def test_a_setting_without_a_default_must_be_given() -> None:
    @wb.stage(reads=("response_mask",))
    def counted(batch: wb.DataProto, least: int) -> Any:
        return {}, {"counted": least}

    assert counted(least=2)(batch()).metrics == {"counted": 2}
    with pytest.raises(SettingError, match="lacks least.*counted\\(least=…\\)"):
        counted()


def test_what_it_does_not_declare_is_refused_by_name() -> None:
    @wb.stage(reads=("response_mask",), writes=("length",))
    def reads_more(batch: wb.DataProto) -> Any:
        return {"length": batch["token_level_scores"].sum(-1)}

    @wb.stage(reads=("response_mask",), writes=("length",))
    def writes_more(batch: wb.DataProto) -> Any:
        return {"length": batch["response_mask"].sum(-1), "lenght": [1, 2, 3]}

    @wb.stage(reads=("response_mask",))
    def reads_nowhere(batch: wb.DataProto) -> Any:
        return {"x": batch["respnse_mask"]}

    @wb.stage(reads=("response_mask",), optional=("token_level_scores",), writes=("length",))
    def may_read(batch: wb.DataProto) -> Any:
        return {"length": batch["token_level_scores" if "token_level_scores" in batch else "response_mask"].sum(-1)}

    with pytest.raises(PipelineError, match=r"reads column 'token_level_scores'.*reads=\('response_mask', 'token_le"):
        reads_more()(batch())
    with pytest.raises(PipelineError, match="returned column 'lenght'.*expected columns length"):
        writes_more()(batch())
    with pytest.raises(ColumnMissing, match="did you mean 'response_mask'"):
        reads_nowhere()(batch())
    assert may_read()(batch()).batch["length"].dtype == torch.float32
    assert may_read()(batch().without("token_level_scores")).batch["length"].dtype == torch.int64


@pytest.mark.parametrize("returned", [None, 3, [1, 2, 3], ({}, {}, {}), ({}, 3)])
def test_a_result_of_another_form_is_refused(returned: Any) -> None:
    @wb.stage(reads=("response_mask",))
    def odd(batch: wb.DataProto) -> Any:
        return returned

    with pytest.raises(PipelineError, match="the result of stage 'odd'; expected a dict of columns, or"):
        odd()(batch())


def test_bad_declarations_are_refused_where_they_are_written() -> None:
    async def waits(batch: Any) -> Any: ...

    def nothing() -> Any: ...

    def spreads(batch: Any, **more: Any) -> Any: ...

    def called(batch: Any, name: str = "x") -> Any: ...

    for function, match in (
        (waits, "expected a plain function"),
        (nothing, "the batch, then settings"),
        (spreads, "the batch, then settings"),
        (called, "a setting called 'name'"),
        (3, "expected a plain function"),
    ):
        with pytest.raises(SettingError, match=match):
            wb.stage(reads=("response_mask",))(function)  # type: ignore[arg-type]
    for declared in ({"reads": "response_mask"}, {"reads": ()}, {"reads": ("a",), "writes": "b"}):
        with pytest.raises(SettingError, match="of stage; expected"):
            wb.stage(**declared)


# --- in a pipeline ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pipe(tiny: str) -> wb.Pipeline:
    engine = wb.engines.local(tiny, lr=1e-3, device="cpu")
    return wb.recipes.grpo(engine, lambda response: float(len(response)), group_size=2, max_tokens=8, kl_coef=0)


def test_a_pipeline_takes_the_class_too_and_says_what_a_bare_function_lacks(pipe: wb.Pipeline) -> None:
    place = pipe.index("reward") + 1
    for longer in (pipe.insert_after("reward", length_norm), pipe.insert_after("reward", length_norm(power=1.0))):
        assert longer.names[place] == "length_norm" and isinstance(longer["length_norm"], FunctionStage)
        assert longer["length_norm"].settings() == {"power": 1.0}
        assert longer.replace("length_norm", power=2.0)["length_norm"].settings() == {"power": 2.0}
        assert longer.replace("length_norm", length_norm)["length_norm"].settings() == {"power": 1.0}
    assert wb.Pipeline([*[*pipe][:place], length_norm]).names[-1] == "length_norm"

    def bare(batch: Any) -> Any: ...

    for put in (lambda: pipe.insert_after("reward", bare), lambda: wb.Pipeline([*pipe, bare])):
        with pytest.raises(PipelineError, match=r"put this line above `def bare`: @wb.stage\(reads="):
            put()
    with pytest.raises(PipelineError, match=r"construct it: TurnScores\(…\)"):
        pipe.insert_after("reward", wb.stages.TurnScores)
    with pytest.raises(PipelineError, match=r"construct it: Reward\(…\)"):
        pipe.with_stage("reward", wb.stages.Reward)
    with pytest.raises(PipelineError, match="'length_norm' reads 'response_text', but no earlier stage"):
        wb.Pipeline([length_norm, *pipe])


@pytest.mark.slow
def test_it_steps_trains_and_resumes_and_another_text_is_refused(pipe: wb.Pipeline, tmp_path: Path) -> None:
    rows = wb.rows("data/arith/train.parquet", max_prompt_length=256, limit=8)
    longer = pipe.insert_after("reward", length_norm)
    s = wb.Stepper(longer, rows.batch(2)).run(until="advantage")
    t = s.fork().back(to="length_norm").replace("length_norm", power=0.0).run(until="advantage")
    assert float(t.batch["length_bonus"].min()) == 1.0 and s.compare(t)
    plan: dict[str, Any] = {"batch_size": 2, "run": tmp_path / "r", "trace_freq": 1, "trackers": ()}
    run = wb.train_blocking(longer, rows, steps=1, **plan)
    assert run.rows[-1]["length_norm/mean"] > 0 and run.traces[1].batch.origins["length_bonus"].stage == "length_norm"
    assert "A long response is worth less" in run.settings["sources"]["length_norm"]["class"]
    wb.train_blocking(longer, rows, steps=2, resume="auto", **plan)

    @wb.stage(reads=length_norm.reads, writes=length_norm.writes)
    def other(batch: wb.DataProto, power: float = 1.0) -> Any:
        return {name: batch["token_level_scores"] * 0 for name in ()}

    other.name = "length_norm"
    for changed, match in (
        (length_norm(power=2.0), "length_norm.power: 1.0 → 2.0"),
        (other(), "sources.length_norm.class"),
    ):
        with pytest.raises(RunError, match=match):
            again = longer.replace("length_norm", changed)
            wb.train_blocking(again, rows, steps=3, resume="auto", **plan)
