"""OpenAI's form of chat completions: requests read, replies, streams and errors written; for every server of this package."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from workbench.base.errors import WorkbenchError, first_line
from workbench.engines.protocol import Sample

MAX_N = 128
"""Most answers to one request."""
_LEGACY = ("functions", "function_call", "logit_bias", "frequency_penalty", "presence_penalty", "modalities", "audio")
_IGNORED: tuple[Any, ...] = ("", 0, False, None, {}, [], ["text"], "auto", "none")
_SAMPLING = ("temperature", "top_p", "top_k")
_ROLES = ("system", "developer", "user", "assistant", "tool")


class Refusal(Exception):
    """Exception for a request that is not answered: an HTTP status, and as `body` an error in OpenAI's form that gives
    the reason."""

    def __init__(self, status: int, why: str, code: str | None = None, param: str | None = None) -> None:
        super().__init__(why)
        self.status = status
        self.body = error(why, code, param, "server_error" if status >= 500 else "invalid_request_error")


def error(
    why: str, code: str | None = None, param: str | None = None, kind: str = "invalid_request_error"
) -> dict[str, Any]:
    """Build an error in OpenAI's form, as the JSON object that a server returns."""
    return {"error": {"message": why, "type": kind, "param": param, "code": code}}


def refused(status: int, why: str) -> dict[str, Any]:
    """Build the error body for a request that is refused before it is read (used by `base.loopback.serving`)."""
    return Refusal(status, why).body


def refusal_of(cause: Exception) -> Refusal:
    """Turn an exception into the `Refusal` to answer: status 400 where the request is wrong, 500 for anything else."""
    if isinstance(cause, Refusal):
        return cause
    wrong = isinstance(cause, WorkbenchError | ValueError | TypeError | KeyError | RecursionError)
    return Refusal(400 if wrong else 500, first_line(cause, 400))


@dataclass(frozen=True)
class ChatRequest:
    """A request for chat completions, checked."""

    messages: tuple[dict[str, Any], ...]
    """Contents are texts; calls have their arguments as JSON text."""
    tools: tuple[dict[str, Any], ...] = ()
    calls: bool = True
    """Whether tool calls are looked for in the answer (`tool_choice` is not `none`)."""
    parallel: bool = True
    """Whether an answer may have more than one call."""
    n: int = 1
    max_tokens: int | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """`temperature`, `top_p`, `top_k` as far as they are given, and `stop`."""
    seed: int | None = None
    model: str = ""
    stream: bool = False
    usage: bool = False
    """Whether a stream ends with its usage."""
    logprobs: bool = False
    top_logprobs: int = 0


def chat_request(body: bytes | Mapping[str, Any]) -> ChatRequest:
    """Parse a request for chat completions from the body of a POST or its fields. Raises `Refusal` (400) for wrong
    fields and for features that this server does not have."""
    fields = _fields(body)
    messages = fields["messages"]
    stop = fields.get("stop") or ()
    options = fields.get("stream_options") or {}
    return ChatRequest(
        messages=tuple(_message(message, place) for place, message in enumerate(messages)),
        tools=_tools(fields.get("tools")),
        calls=_choice(fields.get("tool_choice")),
        parallel=fields.get("parallel_tool_calls") is not False,
        n=_number(fields, "n", 1, MAX_N) or 1,
        max_tokens=_number(fields, "max_completion_tokens", 1) or _number(fields, "max_tokens", 1),
        sampling={
            **{name: fields[name] for name in _SAMPLING if fields.get(name) is not None},
            "stop": (stop,) if isinstance(stop, str) else tuple(str(one) for one in stop),
        },
        seed=_number(fields, "seed"),
        model=str(fields.get("model") or ""),
        stream=bool(fields.get("stream")),
        usage=bool(isinstance(options, Mapping) and options.get("include_usage")),
        logprobs=bool(fields.get("logprobs")),
        top_logprobs=_number(fields, "top_logprobs", 0, 20) or 0,
    )


def _fields(body: bytes | Mapping[str, Any]) -> dict[str, Any]:
    """Parse the fields of a request and refuse features that this server does not have."""
    try:
        fields = json.loads(body) if isinstance(body, bytes) else dict(body)
    except (ValueError, RecursionError) as cause:
        raise Refusal(400, f"the body is not JSON: {first_line(cause)}") from cause
    if not isinstance(fields, dict):
        raise Refusal(400, f"the request is of type {type(fields).__name__}; expected a JSON object")
    for name in _LEGACY:
        if fields.get(name) not in _IGNORED:
            raise Refusal(400, f"the request asks for {name}, which this server does not do", "unsupported", name)
    wanted = fields.get("response_format") or {"type": "text"}
    if not isinstance(wanted, Mapping) or wanted.get("type") != "text":
        why = "the request asks for response_format, which this server does not do; expected none, or text"
        raise Refusal(400, why, "unsupported", "response_format")
    if not isinstance(fields.get("messages"), list) or not fields["messages"]:
        raise Refusal(400, "messages: expected a list of at least one message", None, "messages")
    return fields


def _number(fields: Mapping[str, Any], name: str, least: int | None = None, most: int | None = None) -> int | None:
    value = fields.get(name)
    if value is None:
        return None
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole or (least is not None and value < least) or (most is not None and value > most):
        bounds = " ".join([f"≥ {least}"] * (least is not None) + [f"and ≤ {most}"] * (most is not None))
        raise Refusal(400, f"{name}: expected a whole number {bounds}".strip() + f"; found {value!r}"[:80], None, name)
    return int(value)


def _choice(choice: Any) -> bool:
    if choice not in (None, "auto", "none"):
        why = f"tool_choice: expected auto or none (this server forces no call); found {choice!r}"[:200]
        raise Refusal(400, why, "unsupported", "tool_choice")
    return choice != "none"


def _tools(tools: Any) -> tuple[dict[str, Any], ...]:
    for place, tool in enumerate(tools or ()):
        named = isinstance(tool, Mapping) and isinstance(tool.get("function"), Mapping) and tool["function"].get("name")
        if not named:
            raise Refusal(400, f"tools[{place}]: expected {{type: function, function: {{name, …}}}}", None, "tools")
    return tuple(dict(tool) for tool in tools or ())


def _message(message: Any, place: int) -> dict[str, Any]:
    where = f"messages[{place}]"
    if not isinstance(message, Mapping) or message.get("role") not in _ROLES:
        found = message.get("role") if isinstance(message, Mapping) else type(message).__name__
        raise Refusal(400, f"{where}: expected a role out of {', '.join(_ROLES)}; found {found!r}"[:200], None, where)
    checked = {"role": message["role"], "content": _text(message.get("content"), where)}
    for name in ("name", "tool_call_id", "reasoning_content"):
        if isinstance(message.get(name), str):
            checked[name] = message[name]
    if "reasoning_content" not in checked and isinstance(message.get("reasoning"), str):  # newer vLLM's name of it
        checked["reasoning_content"] = message["reasoning"]
    if message["role"] == "assistant" and message.get("tool_calls"):
        checked["tool_calls"] = [_call(one, where) for one in message["tool_calls"]]
    return checked


def _text(content: Any, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    parts = content if isinstance(content, list) else [content]
    for part in parts:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind not in ("text", "refusal") or not isinstance(part.get(kind), str):
            raise Refusal(400, f"{where}: expected text, or parts of type text; found {kind!r}"[:200], None, where)
    return "".join(part[part["type"]] for part in parts)


def _call(tool_call: Any, where: str) -> dict[str, Any]:
    function = tool_call.get("function") if isinstance(tool_call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise Refusal(400, f"{where}.tool_calls: expected {{id, type: function, function: {{name, arguments}}}}")
    arguments = function.get("arguments")
    text = arguments if isinstance(arguments, str) else json.dumps(arguments if arguments is not None else {})
    call = {"name": function["name"], "arguments": text}
    return {"id": str(tool_call.get("id") or ""), "type": "function", "function": call}


# --- replies ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Answer:
    """One of the answers (choices) to a chat request."""

    message: Mapping[str, Any]
    """`role`, `content`, and where there are some `tool_calls` and `reasoning_content`."""
    finish_reason: str
    """OpenAI's: `stop`, `length`, `tool_calls`."""
    tokens: int
    sample: Sample | None = None
    """The tokens with their log-probs; None where they are not known."""


@dataclass(frozen=True)
class Reply:
    """All answers to a chat request, to be sent as one JSON object or as a stream."""

    id: str
    model: str
    prompt_tokens: int
    answers: Sequence[Answer]
    tokenizer: Any = None
    """For the texts of single tokens (`logprobs`)."""

    def sent(self, request: ChatRequest) -> dict[str, Any] | Iterator[dict[str, Any]]:
        """Return the reply as the request wants it: one JSON object, or an iterator of a stream's objects."""
        return self._stream(request) if request.stream else self._whole(request)

    def _whole(self, request: ChatRequest) -> dict[str, Any]:
        choices = [
            {"index": number, "message": {"role": "assistant", **one.message}, **self._ends(request, one)}
            for number, one in enumerate(self.answers)
        ]
        return {**self._head("chat.completion"), "choices": choices, "usage": self._usage()}

    def _stream(self, request: ChatRequest) -> Iterator[dict[str, Any]]:
        head, more = self._head("chat.completion.chunk"), {"usage": None} if request.usage else {}
        for number, answer in enumerate(self.answers):
            for delta in _deltas(answer.message):
                choice = {"index": number, "delta": delta, "finish_reason": None, "logprobs": None}
                yield {**head, "choices": [choice], **more}
            yield {**head, "choices": [{"index": number, "delta": {}, **self._ends(request, answer)}], **more}
        if request.usage:
            yield {**head, "choices": [], "usage": self._usage()}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": int(time.time()), "model": self.model}

    def _usage(self) -> dict[str, int]:
        written = sum(one.tokens for one in self.answers)
        asked = self.prompt_tokens
        return {"prompt_tokens": asked, "completion_tokens": written, "total_tokens": asked + written}

    def _ends(self, request: ChatRequest, answer: Answer) -> dict[str, Any]:
        known = request.logprobs and answer.sample is not None
        return {"finish_reason": answer.finish_reason, "logprobs": self._log_probs(request, answer) if known else None}

    def _log_probs(self, request: ChatRequest, answer: Answer) -> dict[str, Any]:
        """Build the `logprobs` object of an answer; only the log-probs of its own tokens are known."""
        content = []
        assert answer.sample is not None
        for token, value in zip(answer.sample.ids, answer.sample.log_probs, strict=True):
            text = str(self.tokenizer.decode([token]))
            own = {"token": text, "logprob": value, "bytes": list(text.encode())}
            content.append({**own, "top_logprobs": [own] if request.top_logprobs else []})
        return {"content": content, "refusal": None}


def _deltas(message: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Split an answer's message into the pieces of a stream: its text word by word, each tool call whole."""
    yield {"role": "assistant", "content": ""}
    for name in ("reasoning_content", "content"):
        yield from ({name: piece} for piece in _pieces(message.get(name) or ""))
    for number, call in enumerate(message.get("tool_calls") or ()):
        yield {"tool_calls": [{"index": number, **call}]}


def _pieces(text: str) -> Iterator[str]:
    return iter(re.findall(r"\s*\S+\s*\Z|\s*\S+|\s+", text))
