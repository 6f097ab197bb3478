"""The buttons of an episode: what they do, and the line of code that they say."""

from __future__ import annotations

from typing import Any

import pytest

import workbench as wb
from workbench.agents import FunctionCall, ToolAgent, function_tool
from workbench.widgets.layer import EpisodeFace

pytestmark = pytest.mark.slow


class Always:
    def extract_tool_calls(self, text: str, tools: Any) -> tuple[str, list[FunctionCall]]:
        return text, [FunctionCall("twice", '{"number": 4}')] * 2


def twice(number: int) -> str:
    """Twice a number."""
    return str(2 * number)


def test_buttons_do_what_their_line_says(tiny: str) -> None:
    agent = ToolAgent([function_tool(twice)], parser=Always(), max_assistant_turns=2, max_tokens_per_turn=8,
                      max_parallel_calls=2)  # fmt: skip
    rows = wb.rows("data/arith/train.parquet", max_prompt_length=256)
    engine = wb.engines.local(tiny, device="cpu", lr=1e-3)
    s = wb.Stepper(wb.recipes.grpo(engine, agent=agent, group_size=2, max_tokens=60), rows.batch(1))
    e = s.episode(1)
    face = EpisodeFace(e)

    def press(kind: str, **more: Any) -> dict[str, Any]:
        return face.answer({"kind": kind, "stands": face._stands(), **more})

    look = press("look")
    assert look["next_stage"] == "assistant" and look["turns"] == [] and look["code"] == ""
    assert press("next")["code"] == "e.next()" and e.next_role == "tool"
    said = press("say", turn=None, text="eight\nnine")
    assert said["code"] == "e.say(['eight', 'nine'])" and [one.result for one in e.turns[0].calls] == ["eight", "nine"]
    assert said["turns"][1] == {"role": "tool", "text": "eight\nnine"} and "written by hand" in said["html"]
    assert press("run")["code"] == "e.run()" and e.next_role is None and len(e.turns) == 3
    said = press("say", turn=0, text="I call.")
    assert said["code"] == "e.replace(0, 'I call.')" and len(e.turns) == 1 and e.turns[0].text == "I call."
    assert press("back", turn=0)["code"] == "e.back(to=0)" and e.turns == ()
    stale = face.answer({"kind": "next", "stands": "another place"})
    assert e.turns == () and "had changed" in stale["note"]
