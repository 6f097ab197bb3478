"""A transcript: the template folded, a call and its result in one frame, verdict and rewards where they belong."""

from __future__ import annotations

import torch
from support.lint import lint

import workbench as wb
from workbench.rewards.score import Score

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "note": "x\\ny"}}\n</tool_call>'
PIECES = (
    "<think>Hm.",
    "</think>",
    "I add.",
    CALL,
    "<|im_end|>",
    "<|im_start|>tool\n",
    "no <b>sum</b>",
    "Done.",
    "<|im_end|>",
)


class Words:
    """A tokenizer whose tokens are the pieces."""

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        return "".join(PIECES[one] for one in ids)


def test_a_call_is_framed_with_its_result_and_the_template_is_folded() -> None:
    ids = torch.arange(len(PIECES))[None]
    own = torch.tensor([[1, 1, 1, 1, 1, 0, 0, 1, 1]])
    call = {
        "name": "add",
        "arguments": '{"a": 1, "note": "x\\ny"}',
        "status": "error",
        "result": "no <b>sum</b>" + "!" * 700,
    }
    turns = [
        {"role": "assistant", "text": "".join(PIECES[:4]), "first": 0, "last": 4, "calls": [call], "score": 0.5},
        {"role": "tool", "text": "no <b>sum</b>", "first": 5, "last": 6},
        {"role": "assistant", "text": "Done.", "first": 7, "last": 8},
    ]
    chat = [{"role": "system", "content": "Be brief.\n" * 9}, {"role": "user", "content": "One and one?"}]
    batch = wb.DataProto(
        {"responses": ids, "response_mask": own, "advantages": own * 0.5},
        {"turns": [turns], "raw_prompt": [chat], "score": [Score(value=1.0, answer="2")]},
    )
    view = wb.views.transcript(batch, 0, tokenizer=Words())
    html = view.html()
    assert lint(html) == [] and html.index("reward 1") < html.index("One and one?") < html.index("reward 0.5")
    folds = (
        "system · 90 characters, 10 lines: Be brief",
        "reasoning: 2 tokens",
        "tool calls as sampled, template tokens: 2 tokens",
    )
    folds += ("1 · tool · tokens 5 to 6 · mask 0: 2 tokens", "(713 characters)")
    for fold in folds:
        before = html[: html.index(fold)]
        assert before.rindex("<summary") > max(before.rfind("</summary"), 0), f"{fold} is what unfolds it"
    outside = html[html.index("</details>", html.index("reasoning: 2")) : html.index("tool calls as sampled")]
    assert (
        "I add." in outside
        and ">error</span>" in outside
        and "tool_call" not in outside
        and "no &lt;b&gt;sum" in outside
    )
    assert ">template tokens: " not in html, "the token that ends a turn stands in it"
    assert list(view.frame["role"]) == ["assistant", "tool", "assistant"]
    drawn = wb.views.transcript(batch, 0, tokenizer=Words(), rendered=True).html()
    assert "I add." in drawn and "tool_call" not in drawn.partition("tool calls as sampled")[0]
