"""Small tools, users, parsers and samplers for the tests of agents; three chat templates as models have them."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Sequence
from typing import Any

from workbench.agents import FunctionCall, ReActParser, ToolResponse
from workbench.engines.protocol import Request, Sample

QWEN = """{%- if tools %}{{- '<|im_start|>system\\n' }}
{%- if messages[0]['role'] == 'system' %}{{- messages[0]['content'] }}{%- else %}{{- 'You are a helpful assistant.' }}{%- endif %}
{{- "\\n\\n# Tools\\n\\nYou are provided with function signatures within <tools></tools> XML tags:\\n<tools>" }}
{%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}{{- "\\n</tools><|im_end|>\\n" }}
{%- else %}{%- if messages[0]['role'] == 'system' %}{{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
{%- else %}{{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}{%- endif %}{%- endif %}
{%- for message in messages %}
{%- if (message.role == "user") or (message.role == "system" and not loop.first) or (message.role == "assistant" and not message.tool_calls) %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- elif message.role == "tool" %}
{%- if (loop.index0 == 0) or (messages[loop.index0 - 1].role != "tool") %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\\n<tool_response>\\n' }}{{- message.content }}{{- '\\n</tool_response>' }}
{%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
"""Qwen2.5's, its long texts shortened."""

LLAMA = """{{- '<|begin_of_text|>' }}
{%- if tools %}{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' }}{{ tools | map(attribute='function') | map(attribute='name') | join(', ') }}{{ '<|eot_id|>' }}{% endif %}
{%- for message in messages %}{% set role = 'ipython' if message.role == 'tool' else message.role %}
{{- '<|start_header_id|>' + role + '<|end_header_id|>\\n\\n' + (message['content'] | trim) + '<|eot_id|>' }}{% endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""
"""Llama 3's: contents are trimmed, nothing stands between the end of a turn and the next header."""

NO_SYSTEM = """{% if tools %}{{- '<start_of_turn>user\\n' }}{{ tools | map(attribute='function') | map(attribute='name') | join(', ') }}
{{- '<end_of_turn>\\n' }}{% endif %}
{%- for message in messages %}{% if message.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}
{{- '<start_of_turn>' + ('model' if message.role == 'assistant' else 'user') + '\\n' + message.content | trim + '<end_of_turn>\\n' }}
{%- endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"""
"""Gemma's."""


def tokenizers(tiny: str) -> dict[str, Any]:
    """Name → the tiny model's tokenizer with that template and its special tokens."""
    from transformers import AutoTokenizer

    made = {}
    for name, template, special, end in (
        ("own", None, [], None),
        ("qwen", QWEN, [], None),
        ("llama", LLAMA, ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"], "<|eot_id|>"),
        ("no system", NO_SYSTEM, ["<start_of_turn>", "<end_of_turn>"], "<end_of_turn>"),
    ):
        tokenizer = AutoTokenizer.from_pretrained(tiny)
        if special:
            tokenizer.add_special_tokens({"additional_special_tokens": special, "eos_token": end})
        if template:
            tokenizer.chat_template = template
        made[name] = tokenizer
    return made


def schema(name: str, **arguments: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {key: {"type": kind} for key, kind in arguments.items()}}
    return {"type": "function", "function": {"name": name, "description": f"{name}s.", "parameters": parameters}}


class Adder:
    """Adds; hangs, waits or breaks where it is told to."""

    name = "add"

    def __init__(self, answer: Callable[[dict[str, Any]], Any] | None = None, seconds: float = 0.0) -> None:
        self.answer = answer or (lambda given: ToolResponse(text=str(sum(given["numbers"]))))
        self.seconds = seconds
        self.created: list[dict[str, Any]] = []
        self.open: set[str] = set()
        self.most = 0
        self.running = 0

    def get_openai_tool_schema(self) -> dict[str, Any]:
        return schema(self.name, numbers="array")

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        assert instance_id is not None and instance_id not in self.open
        self.created.append(kwargs)
        self.open.add(instance_id)
        return instance_id, ToolResponse()

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await asyncio.sleep(parameters.get("seconds", self.seconds))
            found = self.answer(parameters)
        finally:
            self.running -= 1
        return found if isinstance(found, tuple) else (found, 0.25, {"numbers": len(parameters.get("numbers", []))})

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        return 2.0

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        self.open.remove(instance_id)


class Tags:
    """`<call>{"name": …, "arguments": …}</call>`"""

    def extract_tool_calls(self, text: str, tools: Any) -> tuple[str, list[FunctionCall]]:
        parts = text.split("<call>")
        calls = []
        for part in parts[1:]:
            body = part.split("</call>")[0]
            try:
                asked = json.loads(body)
                calls.append(FunctionCall(asked["name"], json.dumps(asked["arguments"])))
            except ValueError:
                calls.append(FunctionCall("add", body))
        return parts[0], calls


class Always(ReActParser):
    """Whatever the model says is a call, whole once it has begun."""

    def extract_tool_calls(self, text: str, tools: Any = ()) -> tuple[str, list[FunctionCall]]:
        return text, [FunctionCall("add", json.dumps({"numbers": [ord(text[0]) if text else 0]}))]


def call(name: str = "add", **arguments: Any) -> str:
    return "<call>" + json.dumps({"name": name, "arguments": arguments}) + "</call>"


class Running:
    """Counts who is inside; `most` is how many were at once."""

    def __init__(self) -> None:
        self._lock, self._now, self.most = threading.Lock(), 0, 0

    def __enter__(self) -> None:
        with self._lock:
            self._now += 1
            self.most = max(self.most, self._now)

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._now -= 1


class Script:
    """A sampler that writes given texts, turn by turn, each ended by the tokenizer's end token.

    `write(request, turn, text so far)` says what; the log-prob of the n-th token is −n/8.
    """

    version = 3

    def __init__(
        self, tokenizer: Any, write: Callable[[str], str | None] | Sequence[str], seconds: float = 0.0
    ) -> None:
        self.tokenizer = tokenizer
        self.write = write
        self.seconds = seconds
        self.requests: list[Request] = []

    async def sample(self, request: Request) -> Sample:
        self.requests.append(request)
        if callable(self.write):
            text = self.write(self.tokenizer.decode(list(request.ids)))
        else:
            text = self.write[min(len(self.requests), len(self.write)) - 1]
        await asyncio.sleep(self.seconds)
        if text is None:
            return Sample((), (), "abort", self.version)
        ids = [*self.tokenizer(text, add_special_tokens=False)["input_ids"], self.tokenizer.eos_token_id]
        reason = "stop" if len(ids) <= request.settings.max_tokens else "length"
        ids = ids[: request.settings.max_tokens]
        return Sample(tuple(ids), tuple(-n / 8 for n in range(1, len(ids) + 1)), reason, self.version)


class User:
    """A simulated user who wants to hear a word."""

    name = "wants"

    def __init__(self) -> None:
        self.open: dict[str, str] = {}
        self.ended: list[str] = []
        self.heard: list[list[dict[str, Any]]] = []

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
        assert instance_id is not None
        self.open[instance_id] = kwargs["word"]
        return instance_id

    async def generate_response(self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any) -> Any:
        self.heard.append(messages)
        word = self.open[instance_id]
        if word == "!":
            raise ValueError("the user hung up")
        if word == "?":
            return "yes", "", 1.0, {}
        said = word in messages[-1]["content"]
        return said, "good" if said else f"say {word}", 1.0 if said else 0.5, {"word": word}

    async def calculate_score(self, instance_id: str | None = None, **kwargs: Any) -> float:
        return 0.0

    async def finalize_interaction(self, instance_id: str | None = None, **kwargs: Any) -> None:
        assert instance_id is not None
        self.ended.append(instance_id)
        self.open.pop(instance_id, None)
