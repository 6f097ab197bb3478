"""OpenAI's form of responses (`/v1/responses`): requests become chat requests, replies and streams are written back."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from workbench.engines.http.openai_form import (
    ChatAnswer,
    ChatRequest,
    Refusal,
    Reply,
    TextPiece,
    chat_request,
    fields_of,
)

_SAME = ("model", "temperature", "top_p", "stream", "parallel_tool_calls", "top_logprobs", "seed")
_FIELDS = frozenset(
    [*_SAME, *["input", "instructions", "tools", "tool_choice", "max_output_tokens", "text", "include", "truncation"]]
)
_INCLUDED = ("reasoning.encrypted_content", "message.output_text.logprobs")
_TEXTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")


@dataclass(frozen=True)
class ResponseRequest(ChatRequest):
    """A request for a response: a chat request, and the fields that the reply repeats."""

    echoed: Mapping[str, Any] | None = None


def response_request(body: bytes | Mapping[str, Any]) -> ResponseRequest:
    """Parse a request for a response.

    `input` is a text, or a list of messages, function calls, their outputs and reasoning. The whole conversation comes with
    each request: `previous_response_id` and other fields that need a store are refused. Raises `Refusal` (400).
    """
    fields = fields_of(body, _FIELDS)
    wanted = fields.get("text") or {}
    form = dict(wanted.get("format") or {"type": "text"}) if isinstance(wanted, Mapping) else {}
    kind = form.get("type")
    more = [name for name in fields.get("include") or () if name not in _INCLUDED]
    if more:
        raise Refusal(400, f"include: {more[0]} is not supported"[:300], "unsupported", "include")
    told = fields.get("instructions")
    messages = ([{"role": "system", "content": told}] if told else []) + _messages(fields.get("input"))
    tools, choice = [_tool(tool) for tool in fields.get("tools") or ()], fields.get("tool_choice")
    chat = {name: fields[name] for name in _SAME if fields.get(name) is not None}
    chat |= {"messages": messages, "max_tokens": fields.get("max_output_tokens"), "tools": tools, "tool_choice": choice}
    chat["response_format"] = {"type": kind, "json_schema": form} if kind == "json_schema" else form
    chat["logprobs"] = bool(fields.get("top_logprobs")) or _INCLUDED[1] in (fields.get("include") or ())
    echoed = {
        name: fields.get(name) for name in ("instructions", "metadata", "temperature", "top_p", "max_output_tokens")
    }
    echoed |= {"tools": fields.get("tools") or [], "tool_choice": choice or "auto"}
    return ResponseRequest(**vars(chat_request(chat)), echoed=echoed)


def _tool(tool: Any) -> dict[str, Any]:
    if not isinstance(tool, Mapping) or tool.get("type") != "function":
        kind = tool.get("type") if isinstance(tool, Mapping) else type(tool).__name__
        raise Refusal(400, f"tools: expected tools of type function; found {kind!r}"[:200], "unsupported", "tools")
    return {"type": "function", "function": {name: tool[name] for name in tool if name not in ("type", "strict")}}


def _messages(items: Any) -> list[dict[str, Any]]:
    """The messages of a chat in an input's items; what the model wrote in one turn is one message."""
    messages: list[dict[str, Any]] = []
    for place, item in enumerate([{"role": "user", "content": items}] if isinstance(items, str) else items or ()):
        kind = item.get("type") or "message" if isinstance(item, Mapping) else type(item).__name__
        if kind == "function_call_output":
            content = _text(item.get("output"), place)
            messages.append({"role": "tool", "tool_call_id": str(item.get("call_id") or ""), "content": content})
        elif kind == "message" and item.get("role") != "assistant":
            messages.append({"role": item.get("role"), "content": _text(item.get("content"), place)})
        elif kind in ("message", "function_call", "reasoning"):
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": None})
            _write(messages[-1], kind, item, place)
        else:
            why = f"input[{place}]: expected message, function_call, function_call_output or reasoning; found {kind!r}"
            raise Refusal(400, why[:200], "unsupported", "input")
    return messages


def _write(message: dict[str, Any], kind: str, item: Mapping[str, Any], place: int) -> None:
    """Add an item of the model's to its message."""
    if kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments") or "{}"}
        call = {"id": str(item.get("call_id") or ""), "type": "function", "function": function}
        message.setdefault("tool_calls", []).append(call)
    elif kind == "reasoning":
        message["reasoning_content"] = _text(item.get("content") or item.get("summary") or "", place)
    else:
        message["content"] = (message["content"] or "") + _text(item.get("content"), place)


def _text(content: Any, place: int) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    for part in content:
        if not isinstance(part, Mapping) or part.get("type") not in _TEXTS or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise Refusal(400, f"input[{place}]: expected text; found {kind!r}"[:200], "unsupported", "input")
    return "".join(part["text"] for part in content)


# --- replies ------------------------------------------------------------------------------------


def response_whole(reply: Reply, request: ResponseRequest) -> dict[str, Any]:
    """Return the reply to a request for a response as one JSON object."""
    (answer,) = reply.answers
    cut = answer.finish_reason == "length"
    used = {"input_tokens": reply.prompt_tokens, "input_tokens_details": {"cached_tokens": 0}}
    used |= {"output_tokens": answer.tokens, "output_tokens_details": {"reasoning_tokens": 0}}
    name = reply.id.removeprefix("chatcmpl-")
    logs = reply.log_probs(request, answer) if request.logprobs and answer.sample is not None else None
    return {
        "id": f"resp_{name}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "error": None,
        "model": reply.model,
        "output": _items(answer, name, logs, "incomplete" if cut else "completed"),
        "parallel_tool_calls": request.parallel,
        **(request.echoed or {}),
        "usage": {**used, "total_tokens": reply.prompt_tokens + answer.tokens},
    }


def _items(answer: ChatAnswer, name: str, logs: Any, status: str) -> list[dict[str, Any]]:
    """What the model wrote, as items of an output: reasoning, a message, function calls."""
    items: list[dict[str, Any]] = []
    if thought := answer.message.get("reasoning_content"):
        content = [{"type": "reasoning_text", "text": thought}]
        items.append({"id": f"rs_{name}", "type": "reasoning", "summary": [], "content": content})
    calls: Sequence[Mapping[str, Any]] = answer.message.get("tool_calls") or ()
    if answer.message.get("content") or not (calls or (answer.tokens == 0 and items)):
        part: dict[str, Any] = {"type": "output_text", "text": answer.message.get("content") or "", "annotations": []}
        part["logprobs"] = logs["content"] if logs else []
        head = {"id": f"msg_{name}", "type": "message", "role": "assistant"}
        items.append({**head, "status": status, "content": [part]})
    for number, call in enumerate(calls):
        head = {"id": f"fc_{name}_{number}", "type": "function_call", "call_id": call["id"]}
        items.append({**head, **call["function"], "status": "completed"})
    return items


class _Events:
    """Writes a response's events: each item begins and ends with those that clients wait for."""

    def __init__(self) -> None:
        self._number = itertools.count()
        self.place = 0
        """Of the item that is open, or comes next."""
        self.sent: dict[str, str] = {}
        """Name and text of the item that is open."""

    def event(self, kind: str, /, **fields: Any) -> dict[str, Any]:
        return {"type": f"response.{kind}", "sequence_number": next(self._number), **fields}

    def begin(self, item: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        empty = {**item, **({"content": []} if "content" in item else {"arguments": ""})}
        yield self.event("output_item.added", output_index=self.place, item=empty)
        if item["type"] == "message":
            part = {**item["content"][0], "text": "", "logprobs": []}
            yield self.event("content_part.added", **self._at(item), content_index=0, part=part)

    def text(self, item: Mapping[str, Any], text: str, act: str = "delta") -> dict[str, Any]:
        if item["type"] == "function_call":
            named = {"name": item["name"], "arguments": text} if act == "done" else {"delta": text}
            return self.event(f"function_call_arguments.{act}", **self._at(item), **named)
        part = item["content"][0]
        logs = {"logprobs": part["logprobs"]} if item["type"] == "message" else {}
        return self.event(f"{part['type']}.{act}", **self._at(item), content_index=0, **{_TOLD[act]: text}, **logs)

    def end(self, item: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        yield self.text(item, item["arguments"] if "arguments" in item else item["content"][0]["text"], "done")
        if item["type"] == "message":
            yield self.event("content_part.done", **self._at(item), content_index=0, part=item["content"][0])
        yield self.event("output_item.done", output_index=self.place, item=item)
        self.place, self.sent = self.place + 1, {}

    def _at(self, item: Mapping[str, Any]) -> dict[str, Any]:
        return {"output_index": self.place, "item_id": item["id"]}


_TOLD = {"delta": "delta", "done": "text"}


def response_stream(
    request: ResponseRequest, model: str, pieces: Iterator[TextPiece | Reply]
) -> Iterator[dict[str, Any]]:
    """Write a response's events: the texts as they come, each function call whole. `pieces` ends with the reply."""
    events, begun = _Events(), False
    for piece in pieces:
        name = piece.id.removeprefix("chatcmpl-")
        if not begun:
            begun, empty = True, response_whole(Reply(piece.id, model, 0, [ChatAnswer({}, "stop", 0)]), request)
            empty |= {"status": "in_progress", "output": [], "usage": None}
            yield from (events.event(one, response=empty) for one in ("created", "in_progress"))
        if isinstance(piece, TextPiece):
            if events.sent and piece.name not in events.sent:
                yield from events.end(_items(ChatAnswer(events.sent, "stop", 0), name, None, "completed")[0])
            (item,) = _items(ChatAnswer({piece.name: piece.text}, "stop", 0), name, None, "in_progress")
            if not events.sent:
                yield from events.begin(item)
            events.sent[piece.name] = events.sent.get(piece.name, "") + piece.text
            yield events.text(item, piece.text)
            continue
        whole = response_whole(piece, request)
        for item in whole["output"][events.place :]:
            if not events.sent:
                yield from events.begin(item)
                yield events.text(item, item["arguments"] if "arguments" in item else item["content"][0]["text"])
            yield from events.end(item)
        yield events.event("incomplete" if whole["status"] == "incomplete" else "completed", response=whole)
