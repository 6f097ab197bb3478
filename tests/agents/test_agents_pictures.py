"""Images in tools' answers and in prompts: seen by models of text and pictures, sampled as they are scored; told to the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from agents_parts import Script, Tags, call
from support.models import VISION, make_vision_model
from support.pictures import asked, png

import workbench as wb
from workbench.agents import BaseTool, FunctionCall, ToolAgent, ToolResponse
from workbench.base.errors import DataError
from workbench.dataproto import DataProto
from workbench.dataproto.columns import PIXELS
from workbench.datasets.rows import Rows
from workbench.engines.protocol import SamplingSettings
from workbench.stages import EpisodeRollout, LogProb, PolicyLoss, Update

ROOT = Path(__file__).parents[2]
SAMPLING = SamplingSettings(max_tokens=120, ignore_eos=True)


class Camera(BaseTool):
    """Answers with a picture, with none, or with what is no picture."""

    SCHEMA = {"name": "camera", "parameters": {}}  # noqa: RUF012 - read only

    def __init__(self, *images: Any, text: str = "w7") -> None:
        super().__init__()
        self.images, self.text = images, text

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        return ToolResponse(text=self.text, image=list(self.images)), 0.5, {}


class Always:
    """Every turn is a call, whatever it says."""

    call_form = "call"

    def extract_tool_calls(self, text: str, tools: Any) -> tuple[str, list[FunctionCall]]:
        return text, [FunctionCall("camera", "{}")]


@pytest.fixture(scope="module", params=VISION)
def engine(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Any:
    folder = make_vision_model(tmp_path_factory.mktemp(request.param), request.param)
    return wb.engines.local(folder, device="cpu", lr=1e-4)


def agent(*images: Any, calls: int = 2, **more: Any) -> ToolAgent:
    given = {"max_tool_calls": calls, "max_tokens_per_turn": 5, "max_assistant_turns": calls + 1, **more}
    return ToolAgent([Camera(*images)], parser=Always(), tools_in="system", **given)  # their templates show no tools


def texts(*words: str, seed: int = 3) -> DataProto:
    columns = {"uid": list(words), "raw_prompt": [[{"role": "user", "content": word}] for word in words]}
    return DataProto.from_dict({}, columns, {"seed": seed, "step": 1})


def sampled(engine: Any, stage: EpisodeRollout, *words: str) -> tuple[DataProto, DataProto]:
    """(prompts, batch) of the first seed with which this model of noise writes no picture's token itself."""
    for seed in range(50):
        prompts = texts(*words, seed=seed)
        batch = stage(prompts).batch
        if not ((batch["responses"] == engine.processor().token_id) & batch["response_mask"].bool()).any():
            return prompts, batch
    raise AssertionError("no such seed")


def rollout(engine: Any, *images: Any, group: int = 2, **more: Any) -> EpisodeRollout:
    return EpisodeRollout(engine, agent=agent(*images, **more), group_size=group, sampling=SAMPLING)


def test_a_tools_image_is_read_and_scored_as_it_was_sampled(engine: Any) -> None:
    prompts, batch = sampled(engine, rollout(engine, png(1)), "w1", "w2 w3")
    done = rollout(engine, png(1))(prompts)
    assert (
        len(batch) == 4
        and done.metrics["agent_loop/images"].value == 8
        and torch.equal(done.batch["responses"], batch["responses"])
    )
    assert all(turn["text"] == "w7<image>" for row in batch["turns"] for turn in row if turn["role"] == "tool")
    assert [len(cell["pixel_values"]) > 0 for cell in batch[PIXELS]] == [True] * 4
    scored = LogProb(engine)(batch).batch["old_log_probs"]
    mask = batch["response_mask"].bool()
    assert torch.allclose(scored[mask], batch["rollout_log_probs"][mask], atol=1e-5)
    other = rollout(engine, png(2))(prompts).batch
    first = batch["turns"][0][0]["last"] + 1
    assert torch.equal(other["responses"][0, :first], batch["responses"][0, :first])
    assert not torch.allclose(other["rollout_log_probs"], batch["rollout_log_probs"]), (
        "another image says another thing"
    )


def test_a_prompts_pictures_come_before_the_tools(engine: Any) -> None:
    rows = Rows([asked(seed) for seed in (0, 1)])
    batch = rollout(engine, png(1), png(3), calls=1)(next(rows.in_order(2))).batch
    scored = LogProb(engine)(batch).batch["old_log_probs"]
    mask = batch["response_mask"].bool()
    assert torch.allclose(scored[mask], batch["rollout_log_probs"][mask], atol=1e-5)
    assert [[part["count"] for part in extra["pictures"]] for extra in batch["agent_extra"]] == [[1, 2]] * 4
    with pytest.raises(DataError, match="column 'images' of row 0"):
        rollout(engine, png(1), history="template")(next(rows.in_order(2)))


def test_it_learns_from_such_episodes(engine: Any) -> None:
    batch = LogProb(engine)(rollout(engine, png(1))(texts("w1", "w2")).batch).batch
    ones = torch.ones_like(batch["rollout_log_probs"])
    given = batch.with_columns(
        {"advantages": ones, "returns": ones, "scored": torch.ones(len(batch), dtype=torch.bool)}
    )
    saved = engine.snapshot()
    Update(engine, PolicyLoss())(given)
    after = LogProb(engine)(batch).batch["old_log_probs"]
    engine.restore(saved)
    mask = batch["response_mask"].bool()
    assert (after - batch["old_log_probs"])[mask].mean() > 0


def test_stepping_back_over_an_image_and_by_hand(engine: Any) -> None:
    stage = rollout(engine, png(1), group=1)
    prompts, batch = sampled(engine, stage, "w1")
    e = stage.episode(prompts, 0, recorded=batch)
    assert e.batch[PIXELS][0]["pixel_values"].equal(batch[PIXELS][0]["pixel_values"])
    e.back(2).run()
    assert torch.equal(e.batch["responses"], batch["responses"])
    assert torch.allclose(e.batch["rollout_log_probs"], batch["rollout_log_probs"], atol=1e-5)
    e.back(2).say("w5 w6", end=False)
    mine = e.run().batch
    scored = LogProb(engine)(mine).batch["old_log_probs"]
    mask = mine["response_mask"].bool()
    assert torch.allclose(scored[mask], mine["rollout_log_probs"][mask], atol=1e-5)
    e.back(1).say("w9").run()
    assert len(e.output.seen) == 1, "an answer by hand has no image"
    e.close()


def test_a_model_of_text_is_told_that_there_is_an_image() -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(ROOT / "data" / "tiny-arith")
    script = Script(tokenizer, [call("camera"), "Done."])
    blind = ToolAgent([Camera(png(1), png(2))], parser=Tags())
    done = EpisodeRollout(script, agent=blind, group_size=1, sampling=SAMPLING)(texts("Look."))
    [turns] = done.batch["turns"]
    assert turns[1]["text"] == "w7\n[2 images that this model cannot see]"
    assert turns[0]["calls"][0]["cut"] == "2 images that this model cannot see"
    assert done.metrics["agent_loop/images_unseen"].value == 1 and PIXELS not in done.batch


def test_what_is_no_image_is_told_to_the_model(engine: Any) -> None:
    batch = rollout(engine, b"no picture", png(1), group=1, calls=1)(texts("w1")).batch
    [turns] = batch["turns"]
    assert turns[1]["text"].startswith("w7\n[an image that cannot be shown: ") and turns[1]["text"].endswith("<image>")
