"""Renders chat templates in a child process that can be killed, because a template comes with the model and may be hostile."""

from __future__ import annotations

import contextlib
import json
import os
import re
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from workbench.base.child import Child, importing
from workbench.base.errors import DataError, SettingError, boundary
from workbench.datasets.pictures import IMAGES, OPEN, Picture, as_parts, is_parts, refuse_pictures
from workbench.datasets.records import messages

SECONDS = 5.0
"""Time limit for rendering a block of chats, in seconds."""
BLOCK = 32
"""Number of chats that are sent to the child process in one message."""
_WORKER = str(Path(__file__).with_name("render_worker.py"))
_KEPT = ("PATH", "LANG", "LC_ALL", "HOME", "LD_LIBRARY_PATH")


class Renderer:
    """Renders chat templates in a child process, started by `start` or at first use; calls from several threads take
    turns."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._child: Child | None = None
        self._ready = False

    def start(self) -> None:
        """Start the child process if none runs, without waiting for its imports."""
        with self._lock:
            self._running()

    def _running(self) -> Child:
        if self._child is None or not self._child.alive:
            # a bare environment: a template has no business with our keys
            env = importing({name: os.environ[name] for name in _KEPT if name in os.environ})
            self._child, self._ready = Child(_WORKER, env=env, output=lambda block: None), False
        return self._child

    def render(
        self,
        template: str,
        chats: Sequence[Sequence[Mapping[str, Any]]],
        variables: Mapping[str, Any],
        clock: str | None = None,
    ) -> list[str]:
        """Render each chat as text; `clock` is what templates read as the time, None: the time. Raises `DataError` where the
        template fails, takes too long, or needs too much memory."""
        texts: list[str] = []
        for start in range(0, len(chats), BLOCK):
            block = [list(chat) for chat in chats[start : start + BLOCK]]
            request = {"template": template, "chats": block, "variables": dict(variables), "clock": clock}
            with self._lock:
                child = self._running()
                if not self._ready:
                    try:
                        child.started()
                    except OSError as cause:
                        what = "the process that renders chat templates could not be started"
                        do = "the template is not to blame: see what the machine lacks (`workbench doctor`)"
                        raise DataError(what, found=cause, do=do) from cause
                    self._ready = True
                try:
                    answer = json.loads(child.exchange(json.dumps(request, default=str).encode(), SECONDS))
                except OSError as cause:
                    why = f"no text after {SECONDS:g} s" if isinstance(cause, TimeoutError) else "its process died"
                    raise DataError(f"the tokenizer's chat template could not be rendered: {why}") from cause
            if "error" in answer:
                raise DataError(f"the tokenizer's chat template raised {answer['error']}")
            texts += answer["texts"]
        return texts


_renderer = Renderer()


def prepare(tokenizer: Any) -> None:
    """Start the process that renders chats, for a tokenizer with a template, without waiting for it."""
    if getattr(tokenizer, "chat_template", None):
        _renderer.start()


def render(tokenizer: Any, chats: Sequence[Sequence[Mapping[str, Any]]], **variables: Any) -> list[str]:
    """Render chats as text by the tokenizer's chat template, in a child process. Raises `DataError` where that fails."""
    template, names = tokenizer.get_chat_template(), {**tokenizer.special_tokens_map, **variables}
    try:
        return _renderer.render(template, [[_with_arguments(turn, dict) for turn in chat] for chat in chats], names)
    except DataError as cause:
        if "TypeError" not in str(cause) or not any(turn.get("tool_calls") for chat in chats for turn in chat):
            raise
        return _renderer.render(template, [[_with_arguments(turn, str) for turn in chat] for chat in chats], names)


def _with_arguments(turn: Mapping[str, Any], kind: type) -> Mapping[str, Any]:
    """A message whose calls have their arguments as objects (`dict`), as most templates read them, or as JSON text (`str`)."""
    if not turn.get("tool_calls"):
        return turn
    calls = []
    for call in turn["tool_calls"]:
        function = dict(call.get("function") or call)
        arguments = function.get("arguments")
        if kind is dict and isinstance(arguments, str):
            with contextlib.suppress(ValueError):
                arguments = json.loads(arguments or "{}")
        elif kind is str and not isinstance(arguments, str):
            arguments = json.dumps(arguments or {}, ensure_ascii=False)
        function["arguments"] = arguments if isinstance(arguments, str | dict) else function.get("arguments")
        calls.append({**call, "function": function} if "function" in call else function)
    return {**turn, "tool_calls": calls}


def of_the_clock(tokenizer: Any, chat: Any, **switches: Any) -> str:
    """Return a remark for a prompt that contains the time at which it is rendered; "" for any other prompt."""
    template = str(getattr(tokenizer, "chat_template", None) or "")
    if "strftime_now" not in template or isinstance(chat, str):
        return ""
    variables = {**tokenizer.special_tokens_map, "add_generation_prompt": True, **switches}
    now, then = (_renderer.render(template, [chat], variables, clock) for clock in (None, "another time"))
    if now == then:
        return ""
    fixed = "pass the engine template_switches={'date_string': '26 Jul 2024'}"
    do = fixed if "date_string" in template else "use a tokenizer whose template has a fixed date"
    return f"it writes today's date, so that on another day the prompts differ: {do}"


def prompt_remarks(tokenizer: Any, chats: Sequence[Any], **switches: Any) -> str:
    """Return remarks on prompts before they are encoded: the template reads the clock, texts already have the
    template's form, or the tokenizer adds tokens to a complete text; "" where there is none.
    """
    talks, texts = [one for one in chats if not isinstance(one, str)], [one for one in chats if isinstance(one, str)]
    notes = [of_the_clock(tokenizer, talks[0], **switches), _rendered(tokenizer, talks, switches)] if talks else []
    return "; ".join(filter(None, [*notes, _added_tokens(tokenizer, texts[0]) if texts else ""]))


def _rendered(tokenizer: Any, chats: Sequence[Any], switches: Mapping[str, Any]) -> str:
    """What to say where messages hold special tokens that the template writes around messages."""
    if not getattr(tokenizer, "chat_template", None):
        return ""
    frame = render(tokenizer, [[{"role": "user", "content": "zq"}]], add_generation_prompt=True, **switches)[0]
    marks = [mark for mark in tokenizer.all_special_tokens if mark in frame]
    texts = ["".join(turn["content"] for turn in chat if isinstance(turn["content"], str)) for chat in chats]
    if not (wrapped := [mark for mark in marks if any(mark in text for text in texts)]):
        return ""
    count = sum(any(mark in text for mark in wrapped) for text in texts)
    do = "wb.rows(…, raw=True) passes texts to the model unchanged"
    return (
        f"{count} prompts of {len(texts)} hold its own {', '.join(wrapped)} and are put into its form once more: {do}"
    )


def _added_tokens(tokenizer: Any, text: str) -> str:
    """What to say where the tokenizer repeats the first token of a bare text, or ends it."""
    ids, notes = list(tokenizer(text)["input_ids"]), []
    first, last = tokenizer.bos_token_id, tokenizer.eos_token_id
    if first is not None and ids[:2] == [first, first]:
        notes.append(f"a bare prompt begins with {tokenizer.bos_token}, and the tokenizer adds another: leave it out")
    if last is not None and ids[-1:] == [last] and not text.rstrip().endswith(tokenizer.eos_token):
        do = "use a tokenizer whose add_eos_token is off"
        notes.append(f"the tokenizer ends a bare prompt with {tokenizer.eos_token}, so a model writes nothing: {do}")
    return "; ".join(notes)


def encode(
    tokenizer: Any, chat: Sequence[dict[str, Any]] | str, *, add_generation_prompt: bool = True, **switches: Any
) -> list[int]:
    """Encode a chat (a list of {role, content}) or a plain text as token ids.

    `switches` are variables of the template (`enable_thinking=False`), which is rendered in a child process in bounded
    time and memory. For a tokenizer without a template (a base model) the text is the messages' contents, one per line.
    Raises `DataError` for content that is not text, for `tool_calls` that the template does not write, and where the
    template fails or needs too much time or memory.
    """
    return encode_all(tokenizer, [chat], add_generation_prompt=add_generation_prompt, **switches)[0]


def encode_all(
    tokenizer: Any,
    chats: Sequence[Sequence[dict[str, Any]] | str],
    *,
    add_generation_prompt: bool = True,
    **switches: Any,
) -> list[list[int]]:
    """Encode several chats as `encode` does; many at once take a tenth of the time."""
    ids: dict[int, list[int]] = {}
    plain = {place: chat for place, chat in enumerate(chats) if isinstance(chat, str)}
    talks = {place: _text_turns(chat, f"chat {place}") for place, chat in enumerate(chats) if not isinstance(chat, str)}
    template = getattr(tokenizer, "chat_template", None)
    if "tool_calls" not in str(template):
        called = next((place for place, talk in talks.items() if any("tool_calls" in turn for turn in talk)), None)
        if called is not None:
            what = f"chat {called} has tool_calls, which the tokenizer's chat template does not write"
            raise DataError(what, do="take a tokenizer whose template writes them, or write the calls into the content")
    if not template:
        plain |= {place: "\n".join(turn["content"] for turn in talk) + "\n" for place, talk in talks.items()}
    elif talks:
        texts = render(tokenizer, list(talks.values()), add_generation_prompt=add_generation_prompt, **switches)
        ids |= zip(talks, tokenizer(texts, add_special_tokens=False)["input_ids"], strict=True)
    ids |= {place: tokenizer(text)["input_ids"] for place, text in plain.items()}
    return [list(ids[place]) for place in range(len(chats))]


def check_tools(
    tokenizer: Any,
    tools: Sequence[Mapping[str, Any]],
    chat: Sequence[Mapping[str, Any]],
    text: str,
    switches: Mapping[str, Any],
) -> None:
    """Raise `SettingError` where `text`, the prompt of a chat, does not name all tools.

    A tool is named if its name occurs as a word more often than in the prompt without tools.
    """
    bare = ""
    if getattr(tokenizer, "chat_template", None):
        bare = render(tokenizer, [chat], add_generation_prompt=True, **{**switches, "tools": None})[0]
    names = [str(tool.get("function", tool).get("name")) for tool in tools]
    words = {name: re.compile(rf"(?<!\w){re.escape(name)}(?!\w)") for name in names}
    if left := [name for name, word in words.items() if len(word.findall(text)) <= len(word.findall(bare))]:
        what = f"the chat template of {tokenizer.name_or_path} does not show the model the tools {', '.join(left)}"
        found = f"none of that in a prompt that begins with a {chat[0]['role']} message"
        do = "describe them in the system message (tools_in='system'), or use another tokenizer, or a ToolAgent with format='react'"
        raise SettingError(what, expected="their names in the prompt", found=found, do=do)


_MOST = 18
"""Characters that Unicode's normal forms make of one."""


def bounds(tokenizer: Any, chats: Sequence[Sequence[Mapping[str, Any]] | str], **switches: Any) -> list[float]:
    """Return an upper bound on each chat's number of tokens, without rendering it; infinity where only rendering tells.

    A token is at least one byte of the rendered text, which consists of the contents and what the template writes
    around them: one probe is rendered for each sequence of roles. A template that writes more around some contents than
    around others can exceed the bound: the rollout measures every prompt that it reads.
    """
    words = getattr(tokenizer, "backend_tokenizer", None)
    if words is None:
        return [float("inf")] * len(chats)
    grown = 1 if words.normalizer is None else _MOST
    around: dict[tuple[str, ...], float] = {}
    sizes = []
    for chat in chats:
        turns = [{"role": "", "content": chat}] if isinstance(chat, str) else chat
        if any(turn.keys() != {"role", "content"} or not isinstance(turn["content"], str) for turn in turns):
            sizes.append(float("inf"))
            continue
        roles = tuple(turn["role"] for turn in turns)
        if roles not in around:
            around[roles] = _overhead_tokens(tokenizer, roles, switches)
        texts = [turn["content"] for turn in turns]
        size = sum(len(text) if text.isascii() else grown * len(text.encode(errors="replace")) for text in texts)
        sizes.append(around[roles] + size)
    return sizes


def _overhead_tokens(tokenizer: Any, roles: Sequence[str], switches: Mapping[str, Any]) -> float:
    """Return the most tokens that a template adds to the contents of messages with these roles; `("",)` stands for a
    bare text."""
    probes = [f"zq{number}qz" for number in range(len(roles))]
    special = tokenizer.num_special_tokens_to_add() + 2
    if roles == ("",):
        return special
    if not getattr(tokenizer, "chat_template", None):
        return special + len(roles)
    talk = [{"role": role, "content": probe} for role, probe in zip(roles, probes, strict=True)]
    text = render(tokenizer, [talk], add_generation_prompt=True, **switches)[0]
    if any(text.count(probe) != 1 for probe in probes):
        return float("inf")
    marks = sum(token in tokenizer.all_special_ids for token in tokenizer(text, add_special_tokens=False)["input_ids"])
    return special + marks + len(text.encode()) - sum(map(len, probes))


def encode_rows(
    reader: Any, chats: Sequence[Any], seen: Mapping[int, Sequence[Picture]], **switches: Any
) -> tuple[list[list[int]], dict[int, Mapping[str, Any]]]:
    """Encode chats, some with pictures; returns (token ids of each chat, place of a chat → the model's inputs for its
    pictures).

    `reader` is a tokenizer, or, where a chat has pictures in `seen`, the processor that it belongs to.
    """
    plain = [place for place in range(len(chats)) if not seen.get(place)]
    ids = dict(zip(plain, encode_all(tokenizer_of(reader), [chats[one] for one in plain], **switches), strict=True))
    pixels: dict[int, Mapping[str, Any]] = {}
    for place in [place for place in range(len(chats)) if place not in ids]:
        if tokenizer_of(reader) is reader:
            refuse_pictures([{IMAGES: seen[place]}], "a tokenizer", place)
        ids[place], pixels[place] = encode_pictures(reader, chats[place], seen[place], f"row {place}", **switches)
    return [ids[place] for place in range(len(chats))], pixels


def as_read(reader: Any, chat: Any, seen: Sequence[Picture] | None = None, **switches: Any) -> str:
    """Return a prompt exactly as the model reads it; `reader` is its tokenizer, or, for pictures in `seen`, its
    processor."""
    ((ids,), _), tokenizer = encode_rows(reader, [chat], {0: seen} if seen else {}, **switches), tokenizer_of(reader)
    return str(tokenizer.decode(ids)) if hasattr(tokenizer, "decode") else f"{len(ids)} tokens"


def tokenizer_of(reader: Any) -> Any:
    """Return the tokenizer of a processor, or a tokenizer itself."""
    return reader.tokenizer if hasattr(reader, "image_processor") else reader


def encode_pictures(
    processor: Any, chat: Sequence[dict[str, Any]], seen: Sequence[Picture], place: str, **switches: Any
) -> tuple[list[int], dict[str, Any]]:
    """Encode a chat with pictures by the model's processor; returns (token ids, the model's inputs for the pictures as
    tensors).

    Each part `{"type": "image"}` becomes as many tokens as its picture takes. Raises `DataError`, naming `place`, where
    the template or the processor fails.
    """
    parts = [{**turn, "content": as_parts(turn.get("content"))} for turn in chat]
    (text,) = render(processor.tokenizer, [parts], add_generation_prompt=True, **switches)
    images = [one.image(f"picture {number} of {place}") for number, one in enumerate(seen)]
    with boundary(f"{place}: the model's processor", DataError):
        ids, pixels = processor.encode(text, images)
    return ids, pixels


def _text_turns(chat: Sequence[dict[str, Any]], place: str) -> list[dict[str, Any]]:
    turns = messages(chat, place)
    if any(is_parts(turn["content"]) for turn in turns):
        raise DataError(f"{place} has pictures", expected="text: a tokenizer reads no other", do=OPEN)
    return turns
