"""The process that renders chat templates: what it imports, and when it starts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import AutoTokenizer

import workbench as wb
from workbench.base.errors import DataError
from workbench.datasets import render_worker, rendering

SCRIPT = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("render_worker", sys.argv[1])
worker = importlib.util.module_from_spec(spec)
spec.loader.exec_module(worker)
if sys.argv[2] == "broken":
    sys.modules["transformers.utils.logging"] = None  # what the file imports is not where it was
render = worker.renderer()
text = render([[{"role": "user", "content": "hi"}]], chat_template="{{ messages[0].content | tojson }}")[0][0]
print(text, hasattr(sys.modules["transformers"], "__version__"))
"""


def rendered(way: str) -> str:
    command = [sys.executable, "-c", SCRIPT, render_worker.__file__, way]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout.strip()


@pytest.mark.slow
def test_rendering_imports_a_file_of_transformers_and_not_the_package() -> None:
    assert rendered("plain") == '"hi" False'


@pytest.mark.slow
def test_a_release_whose_file_needs_more_is_imported_whole() -> None:
    assert rendered("broken") == '"hi" True'


@pytest.mark.slow
def test_a_started_process_is_the_one_that_renders() -> None:
    one = rendering.Renderer()
    one.start()
    child = one._child
    one.start()
    assert one._child is child is not None and not one._ready
    assert one.render("{{ messages[0].content }}!", [[{"role": "user", "content": "hi"}]], {}) == ["hi!"]
    assert one._child is child and one._ready
    child.close()
    assert one.render("{{ messages | length }}", [[{"role": "user", "content": "hi"}]], {}) == ["1"]


def test_a_tokenizer_without_a_template_starts_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[bool] = []
    monkeypatch.setattr(rendering, "_renderer", SimpleNamespace(start=lambda: begun.append(True)))
    rendering.prepare(SimpleNamespace(chat_template=None))
    rendering.prepare(SimpleNamespace(chat_template="x"))
    assert begun == [True]


def test_a_process_that_dies_at_its_start_is_not_called_slow_and_says_its_last_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cold: None
) -> None:
    file = tmp_path / "dies.py"
    file.write_text("def main(parent):\n    raise ValueError('current limit exceeds maximum limit')\n")
    monkeypatch.setattr(rendering, "_WORKER", str(file))
    with pytest.raises(
        DataError, match="exit code 1; it said: ValueError: current limit exceeds .*template is not to blame"
    ):
        rendering.Renderer().render("{{ messages | length }}", [[{"role": "user", "content": "hi"}]], {})


CLOCKED = (
    "{%- if date_string is not defined %}{%- set date_string = strftime_now('%d %b') %}{%- endif %}{{ date_string }} hi"
)


def test_texts_in_the_form_of_the_template_are_reported_and_raw_takes_them() -> None:
    tokenizer = AutoTokenizer.from_pretrained("data/tiny-arith")
    form = "<|im_start|>user\n6 * 7?<|im_end|>\n<|im_start|>assistant\n"
    records = [{"prompt": form, "answer": "42"}, {"prompt": "1 + 1?", "answer": "2"}]
    reported = wb.rows(records).report(tokenizer).template
    assert "1 prompts of 2 hold its own <|im_end|>" in reported and "raw=True" in reported
    raw = wb.rows(records[:1], raw=True)
    assert tokenizer.decode(rendering.encode(tokenizer, raw.batch(1)["raw_prompt"][0])) == form
    assert raw.report(tokenizer).template == "not used: the prompts are bare texts (raw=True)"
    assert wb.rows(records[1:]).report(tokenizer).template == "the tokenizer's own"


def test_tokens_that_a_tokenizer_adds_to_whole_texts_are_reported() -> None:
    tokenizer = AutoTokenizer.from_pretrained("data/tiny-arith", bos_token="<|im_start|>")
    start, end = map(tokenizer.convert_tokens_to_ids, ("<|im_start|>", "<|im_end|>"))

    class Adds:
        def __getattr__(self, name: str) -> object:
            return getattr(tokenizer, name)

        def __call__(self, text: str) -> dict[str, list[int]]:
            return {"input_ids": [start, *tokenizer(text)["input_ids"], end]}

    assert rendering.prompt_remarks(tokenizer, ["a"]) == ""
    remarks = rendering.prompt_remarks(Adds(), ["<|im_start|>a"])
    assert "adds another" in remarks and "so a model writes nothing" in remarks


def test_a_template_that_reads_the_clock_is_reported() -> None:
    plain = AutoTokenizer.from_pretrained("data/tiny-arith")
    rows = wb.rows([{"prompt": "2 + 2?", "answer": "4"}])
    assert rows.report(plain).template == "the tokenizer's own"
    clocked = AutoTokenizer.from_pretrained("data/tiny-arith", chat_template=CLOCKED)
    said = rows.report(clocked).template
    assert "on another day the prompts differ" in said and "template_switches={'date_string': " in said
    assert rows.report(clocked, date_string="26 Jul 2024").template == "the tokenizer's own"
    idle = AutoTokenizer.from_pretrained(
        "data/tiny-arith", chat_template="{% if tools %}{{ strftime_now('%d') }}{% endif %}hi"
    )
    assert rows.report(idle).template == "the tokenizer's own"


def test_arguments_of_earlier_calls_are_what_the_template_reads() -> None:
    """OpenAI's form has JSON text, most templates want objects, some text: each gets its own, through the door of rows too."""
    function = {"name": "add", "arguments": '{"a": 2}'}
    called = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "1", "type": "function", "function": function}],
    }
    arguments = "messages[1].tool_calls[0].function.arguments"
    chat = [{"role": "user", "content": "2?"}, called]
    for template, expected in (
        (f"{{# tool_calls #}}{{{{ {arguments} | tojson }}}}", '{"a": 2}'),  # Qwen's, SmolLM's
        (f"{{% for k, v in {arguments} | items %}}{{{{ k }}}}={{{{ v }}}}{{% endfor %}}", "a=2"),  # GLM's, MiniMax's
        (f"{{{{ 'args: ' + {arguments} }}}}", 'args: {"a": 2}'),  # DeepSeek's
    ):
        tokenizer = AutoTokenizer.from_pretrained("data/tiny-arith", chat_template=template)
        for given in ('{"a": 2}', {"a": 2}):
            function["arguments"] = given  # type: ignore[assignment]
            assert rendering.render(tokenizer, [chat]) == [expected]
    function["arguments"] = "no JSON"
    assert rendering.render(tokenizer, [chat]) == ["args: no JSON"]
