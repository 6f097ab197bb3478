"""OpenAI's form of chat completions: requests read, replies, streams and errors written; for every server of this package."""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

from workbench.base.errors import WorkbenchError, first_line, nearest
from workbench.engines.protocol import Sample

MAX_N = 128
"""Most answers to one request."""
_EFFECTLESS = frozenset(
    ["user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"]
)
"""Fields that ask for nothing about the answer: they are accepted and have no effect."""
_IGNORED: tuple[Any, ...] = ("", 0, False, None, {}, [], ["text"], "auto", "none")
_SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "min_tokens",
    "stop_token_ids",
    "ignore_eos",
)
_COMMON = frozenset([*_SAMPLING, *["model", "n", "max_tokens", "stop", "seed", "stream", "stream_options", "logprobs"]])
_CHAT = _COMMON | frozenset(
    [
        "messages",
        "tools",
        "tool_choice",
        "parallel_tool_calls",
        "max_completion_tokens",
        "top_logprobs",
        "response_format",
        "chat_template_kwargs",
    ]
)
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
    """A request for chat completions whose fields have been checked."""

    messages: tuple[dict[str, Any], ...]
    """Contents are texts; calls have their arguments as JSON text."""
    tools: tuple[dict[str, Any], ...] = ()
    calls: bool = True
    """Whether tool calls are looked for in the answer (`tool_choice` is not `none`)."""
    force: str = ""
    """Name of the tool that the answer must call (`tool_choice`); `*`: any."""
    response_format: str | None = None
    """JSON schema, as JSON text, that the answer must follow; None: any text."""
    parallel: bool = True
    """Whether an answer may have more than one call."""
    switches: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the chat template (`chat_template_kwargs`)."""
    raw: str | tuple[int, ...] | None = None
    """The prompt of a plain completion, as text or token ids; None for a chat."""
    n: int = 1
    max_tokens: int | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """`temperature`, `top_p` and other `SamplingSettings` as far as they are given, and `stop`."""
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
    fields = fields_of(body, _CHAT)
    if not isinstance(fields.get("messages"), list) or not fields["messages"]:
        raise Refusal(400, "messages: expected a list of at least one message", None, "messages")
    switches = fields.get("chat_template_kwargs") or {}
    if not isinstance(switches, Mapping):
        raise Refusal(400, "chat_template_kwargs: expected an object", None, "chat_template_kwargs")
    tools = _tools(fields.get("tools"))
    return ChatRequest(
        messages=tuple(_message(message, place) for place, message in enumerate(fields["messages"])),
        tools=tools,
        calls=fields.get("tool_choice") != "none",
        force=_forced(fields.get("tool_choice"), tools),
        response_format=_schema(fields.get("response_format")),
        parallel=fields.get("parallel_tool_calls") is not False,
        switches=dict(switches),
        max_tokens=_number(fields, "max_completion_tokens", 1) or _number(fields, "max_tokens", 1),
        logprobs=bool(fields.get("logprobs")),
        top_logprobs=_number(fields, "top_logprobs", 0, 20) or 0,
        **_shared(fields),
    )


def completion_request(body: bytes | Mapping[str, Any]) -> ChatRequest:
    """Parse a request for a plain completion (`/v1/completions`). Raises `Refusal` (400), as `chat_request` does."""
    fields = fields_of(body, _COMMON | {"prompt"})
    prompt = fields.get("prompt")
    prompt = (
        prompt[0] if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list) else prompt
    )
    ids = isinstance(prompt, list) and all(isinstance(one, int) and not isinstance(one, bool) for one in prompt)
    if not prompt or not (isinstance(prompt, str) or ids):
        raise Refusal(400, "prompt: expected one text, or the token ids of one", None, "prompt")
    tops = _number(fields, "logprobs", 0, 20)
    return ChatRequest(
        messages=({"role": "user", "content": json.dumps(prompt)},),
        raw=prompt if isinstance(prompt, str) else tuple(prompt),
        calls=False,
        max_tokens=_number(fields, "max_tokens", 1) or 16,  # OpenAI's default
        logprobs=tops is not None,
        top_logprobs=tops or 0,
        **_shared(fields),
    )


def _shared(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Read the fields that mean the same in every kind of request."""
    stop, options = fields.get("stop") or (), fields.get("stream_options") or {}
    given = {name: fields[name] for name in _SAMPLING if fields.get(name) is not None}
    if "stop_token_ids" in given:
        given["stop_token_ids"] = tuple(given["stop_token_ids"])
    return {
        "n": _number(fields, "n", 1, MAX_N) or 1,
        "sampling": {**given, "stop": (stop,) if isinstance(stop, str) else tuple(str(one) for one in stop)},
        "seed": _number(fields, "seed"),
        "model": str(fields.get("model") or ""),
        "stream": bool(fields.get("stream")),
        "usage": bool(isinstance(options, Mapping) and options.get("include_usage")),
    }


def fields_of(body: bytes | Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """Parse the fields of a request. Raises `Refusal` (400) for a field that has a value and is neither `known` nor in
    `_EFFECTLESS`, because it would have no effect.
    """
    try:
        fields = json.loads(body) if isinstance(body, bytes) else dict(body)
    except (ValueError, RecursionError) as cause:
        raise Refusal(400, f"the body is not JSON: {first_line(cause)}") from cause
    if not isinstance(fields, dict):
        raise Refusal(400, f"the request is of type {type(fields).__name__}; expected a JSON object")
    for name in fields.keys() - _EFFECTLESS - set(known):
        if fields[name] not in _IGNORED:
            near = f"; near: {one}" if (one := nearest(name, known)) else ""
            why = f"the request asks for {name[:60]}, which this server does not do{near}"
            raise Refusal(400, why, "unsupported", name[:60])
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


def _schema(wanted: Any) -> str | None:
    """Read the JSON schema, as JSON text, that a `response_format` holds an answer to; None for text."""
    kind = wanted.get("type") if isinstance(wanted, Mapping) else "text" if wanted is None else None
    form = wanted.get("json_schema") if kind == "json_schema" else {"schema": {"type": "object"}}
    schema = form.get("schema") if isinstance(form, Mapping) else None
    if kind not in ("text", "json_object", "json_schema") or not isinstance(schema, Mapping):
        expected = "type text, json_object, or json_schema with {name, schema}"
        raise Refusal(400, f"response_format: expected {expected}; found {wanted!r}"[:300], None, "response_format")
    return None if kind == "text" else json.dumps(schema)


def _forced(choice: Any, tools: Sequence[Mapping[str, Any]]) -> str:
    """Read which tool a `tool_choice` forces: its name, `*` for any, or ""."""
    if choice in (None, "auto", "none"):
        return ""
    function = (
        choice.get("function", choice) if isinstance(choice, Mapping) and choice.get("type") == "function" else {}
    )
    name = "*" if choice == "required" else function.get("name") if isinstance(function, Mapping) else None
    names = [str(tool["function"]["name"]) for tool in tools]
    if not names or name not in ("*", *names):
        tooled = f"auto, none, required or one of the tools {', '.join(names)}"
        expected = tooled if names else "auto or none, because the request has no tools"
        raise Refusal(400, f"tool_choice: expected {expected}; found {choice!r}"[:300], "unsupported", "tool_choice")
    return str(name)


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
class ChatAnswer:
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
    """All answers to a chat request."""

    id: str
    model: str
    prompt_tokens: int
    answers: Sequence[ChatAnswer]
    tokenizer: Any = None
    """For the texts of single tokens (`logprobs`)."""

    def whole(self, request: ChatRequest) -> dict[str, Any]:
        """Return the reply as one JSON object."""
        choices = [
            {"index": number, "message": {"role": "assistant", **one.message}, **self.ends(request, one)}
            for number, one in enumerate(self.answers)
        ]
        return {**_head("chat.completion", self.id, self.model), "choices": choices, "usage": self.usage()}

    def usage(self) -> dict[str, int]:
        """Return OpenAI's `usage`: tokens of the prompt, of all answers, and both."""
        written = sum(one.tokens for one in self.answers)
        asked = self.prompt_tokens
        return {"prompt_tokens": asked, "completion_tokens": written, "total_tokens": asked + written}

    def ends(self, request: ChatRequest, answer: ChatAnswer) -> dict[str, Any]:
        """Return the fields of a choice that ends: `finish_reason` and `logprobs`."""
        known = request.logprobs and answer.sample is not None
        return {"finish_reason": answer.finish_reason, "logprobs": self.log_probs(request, answer) if known else None}

    def log_probs(self, request: ChatRequest, answer: ChatAnswer) -> dict[str, Any]:
        """Build the `logprobs` object of an answer: of its own tokens, and of the likeliest beside them where they are wanted."""
        content: list[dict[str, Any]] = []
        assert answer.sample is not None
        for token, value in zip(answer.sample.ids, answer.sample.log_probs, strict=True):
            tops = answer.sample.tops[len(content)] if request.top_logprobs else {}
            best = sorted(tops.items(), key=lambda one: -one[1])[: request.top_logprobs]
            content.append({**self._of_token(token, value), "top_logprobs": [self._of_token(*one) for one in best]})
        return {"content": content, "refusal": None}

    def _of_token(self, token: int, value: float) -> dict[str, Any]:
        text = str(self.tokenizer.decode([token]))
        return {"token": text, "logprob": value, "bytes": list(text.encode())}

    def completion(self, request: ChatRequest) -> dict[str, Any]:
        """Return the reply to a plain completion as one JSON object."""
        choices = []
        for number, answer in enumerate(self.answers):
            ends = self.ends(request, answer)
            if ends["logprobs"]:
                each = ends["logprobs"]["content"]
                tops = [{top["token"]: top["logprob"] for top in one["top_logprobs"]} for one in each]
                starts = accumulate((len(one["token"]) for one in each), initial=0)
                ends["logprobs"] = {
                    "tokens": [one["token"] for one in each],
                    "token_logprobs": [one["logprob"] for one in each],
                    "top_logprobs": tops if request.top_logprobs else None,
                    "text_offset": list(starts)[:-1],
                }
            choices.append({"index": number, "text": answer.message["content"], **ends})
        return {**_head("text_completion", self.id, self.model), "choices": choices, "usage": self.usage()}


class TextPiece(NamedTuple):
    """A piece of an answer's text in a stream."""

    id: str
    """The reply's."""
    number: int
    """Which answer."""
    name: str
    """`content` or `reasoning_content`."""
    text: str


def chat_stream(request: ChatRequest, model: str, pieces: Iterator[TextPiece | Reply]) -> Iterator[dict[str, Any]]:
    """Write a stream's chunks: the texts as they come, each tool call whole, log-probs in an answer's last chunk.

    `pieces` ends with the reply.
    """
    begun: set[int] = set()

    def chunk(id: str, number: int, delta: Mapping[str, Any], **ends: Any) -> dict[str, Any]:
        choice = {"index": number, "delta": delta, **(ends or {"finish_reason": None, "logprobs": None})}
        return {**_head("chat.completion.chunk", id, model), "choices": [choice], **more}

    more = {"usage": None} if request.usage else {}
    for piece in pieces:
        numbers = [piece.number] if isinstance(piece, TextPiece) else range(len(piece.answers))
        for number in [one for one in numbers if one not in begun]:
            begun.add(number)
            yield chunk(piece.id, number, {"role": "assistant", "content": ""})
        if isinstance(piece, TextPiece):
            yield chunk(piece.id, piece.number, {piece.name: piece.text})
            continue
        for number, answer in enumerate(piece.answers):
            for place, call in enumerate(answer.message.get("tool_calls") or ()):
                yield chunk(piece.id, number, {"tool_calls": [{"index": place, **call}]})
            yield chunk(piece.id, number, {}, **piece.ends(request, answer))
        if request.usage:
            yield {**_head("chat.completion.chunk", piece.id, model), "choices": [], "usage": piece.usage()}


def completion_stream(
    request: ChatRequest, model: str, pieces: Iterator[TextPiece | Reply]
) -> Iterator[dict[str, Any]]:
    """Write the chunks of a plain completion's stream, as `chat_stream` does."""
    for piece in pieces:
        head = _head("text_completion", piece.id, model)
        if isinstance(piece, TextPiece):
            choice = {"index": piece.number, "text": piece.text, "finish_reason": None, "logprobs": None}
            yield {**head, "choices": [choice]}
            continue
        for choice in piece.completion(request)["choices"]:
            yield {**head, "choices": [{**choice, "text": ""}]}
        if request.usage:
            yield {**head, "choices": [], "usage": piece.usage()}


def _head(kind: str, id: str, model: str) -> dict[str, Any]:
    return {"id": id, "object": kind, "created": int(time.time()), "model": model}
