"""Token ids of a growing conversation: the model's tokens are kept, only each new turn's delta goes through the template."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from itertools import takewhile
from typing import Any

from workbench.agents.parsers import opens_reasoning, tools_text, without_tags
from workbench.agents.protocol import Seen
from workbench.base.errors import DataError, SettingError
from workbench.datasets.pictures import Picture, as_parts, is_parts
from workbench.datasets.rendering import check_tools, encode, encode_pictures, render

Message = Mapping[str, Any]

_ANSWER = "\u2e22answer\u2e23"
_QUESTION = {"role": "user", "content": "question"}
_NEW = "new\u2e22turn"
_ID_LENGTH = 9
"""Length of a call's id in templates that require one (Mistral's): nine letters and digits."""
_EARLIER = (_QUESTION, {"role": "assistant", "content": "earlier"}, {"role": "user", "content": "again"})
_MODES = ((False, False), (True, False), (False, True), (True, True))
"""The ways in which a template is tried with a tool's answer: (with an id of a certain form, after a tool call)."""
STAND_IN = 0
_KEPT = 4096
"""Prompts whose ids are kept: the samples of a group share one."""


class TurnTokens:
    """Makes token ids of prompts and of later turns, by a tokenizer's own chat template.

    A delta is the text that the template puts after an assistant's answer when new messages follow: the text that
    closes the answer (without the end token, where the model wrote it), the messages, and the generation prompt. It is
    taken from a short made-up conversation, so that it cannot depend on how the template would rewrite earlier turns
    (stripped, without thinking), and is encoded without special tokens. Without a template a message is its content and
    a line end. Where a template writes a tool's answer only behind its call, the made-up conversation has a call, and
    the delta is the text after the end token of the call's turn.

    Args:
        tokenizer: with or without a chat template.
        tools: tool schemas that the model is told of.
        tools_in: where it is told: by the `template`, or in the `system` message (`parsers.tools_text`).
        parser: reads the calls; the system message tells the model its form of a call.
        roles: roles of later turns (`tool`, `user`), for which the template is checked now.
        processor: encodes messages with pictures (`processor_of`); None: there are none.
        switches: further arguments of the template (`enable_thinking=False`).

    Raises `SettingError`, naming the template, where it leaves a tool out of a prompt, and where no delta can be formed
    for one of `roles`.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        tools_in: str = "template",
        parser: object = None,
        roles: Sequence[str] = (),
        processor: Any = None,
        **switches: Any,
    ) -> None:
        self._tokenizer = tokenizer
        self._processor = processor
        self._tools, self._tools_text = list(tools), tools_text(tools_in, tools, parser)
        self._switches = {**switches, **({"tools": self._tools} if tools and not self._tools_text else {})}
        self._plain = not getattr(tokenizer, "chat_template", None)
        self._name = str(getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__)
        self._prompts: dict[str, tuple[int, ...]] = {}
        self._closing: dict[str, str] = {}
        self._wants_ids = self._wants_call = False
        self._seen: set[str] = set()
        self._require_told("")
        for role in roles:
            self._check(role)

    @cached_property
    def reasoning(self) -> str:
        """The tag (`<think>`) with which the template's generation prompt opens reasoning that the model closes; ""
        where it opens none."""
        if self._plain:
            return ""
        return opens_reasoning(self._render([_QUESTION], generation=True).rpartition(_QUESTION["content"])[2])

    def prompt(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Encode a chat with the generation prompt as token ids, and with the tools if the template shows them."""
        key = json.dumps(list(messages), default=str, sort_keys=True)
        if key not in self._prompts:
            if len(self._prompts) >= _KEPT:
                self._prompts.clear()
            self._prompts[key] = tuple(encode(self._tokenizer, self._chat(messages), **self._switches))
        return self._prompts[key]

    def _chat(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """Return a chat as the template gets it; with `tools_in="system"` the tools are written before its system
        message."""
        chat = [dict(message) for message in messages]
        system = chat[0]["role"] if chat and chat[0]["role"] in ("system", "developer") else ""
        self._require_told(system)
        if not self._tools_text:
            return chat
        if not system:
            return [{"role": "system", "content": self._tools_text}, *chat]
        return [{**chat[0], "content": f"{self._tools_text}\n\n{chat[0]['content']}"}, *chat[1:]]

    def _require_told(self, system: str) -> None:
        """Raise `SettingError` for a template that leaves out a tool.

        `system` is the role of the chat's first message (`system`, `developer` or ""), which some templates write in
        place of the tools.
        """
        if not self._tools or system in self._seen:
            return
        self._seen.add(system)
        chat = [*([{"role": system, "content": "rules"}] if system else []), _QUESTION]
        text = self._tools_text if self._plain else self._render(self._chat(chat), generation=True)
        check_tools(self._tokenizer, self._tools, chat, text, self._switches)

    def pictured_prompt(
        self, messages: Sequence[Message], pictures: Sequence[Picture]
    ) -> tuple[tuple[int, ...], Seen | None]:
        """Encode a chat whose parts `{"type": "image"}` stand for `pictures`; returns (token ids, the model's inputs of
        the pictures, None without any).
        """
        if not pictures:
            return self.prompt(messages), None
        ids, pixels = encode_pictures(self._processor, self._chat(messages), pictures, "a prompt", **self._switches)
        return tuple(ids), Seen(-1, len(pictures), pixels)

    def pictured_delta(
        self, messages: Sequence[Message], wrote: Sequence[int], pictures: Sequence[Picture]
    ) -> tuple[tuple[int, ...], Seen | None]:
        """Encode later messages, like `delta`, whose parts `{"type": "image"}` stand for `pictures`; returns (token
        ids, the model's inputs of the pictures, None without any).
        """
        if not pictures:
            return self.delta(messages, wrote), None
        images = [one.image(f"image {number} of a tool's answer") for number, one in enumerate(pictures)]
        processed: dict[str, Any] = {}

        def encoded(text: str) -> tuple[int, ...]:
            ids, processed["pixels"] = self._processor.encode(text, images)
            return tuple(ids)

        ids = self._ids_after_end(*self._unwritten(messages, wrote), wrote, encoded)
        return ids, Seen(0, len(pictures), processed["pixels"])

    def readable(self, ids: Sequence[int], mask: Sequence[int]) -> tuple[int, ...]:
        """Return a response's token ids as a model with pictures reads them: a picture's token that the model wrote
        itself (mask 1) becomes `STAND_IN`."""
        place = self._processor.token_id
        return tuple(STAND_IN if drawn and one == place else one for one, drawn in zip(ids, mask, strict=True))

    def delta(self, messages: Sequence[Message], wrote: Sequence[int] = ()) -> tuple[int, ...]:
        """Encode the token ids to append after an assistant turn with the ids `wrote`, so that the model reads
        `messages`."""
        return self._ids_after_end(*self._unwritten(messages, wrote), wrote, self._encoded)

    def _ids_after_end(
        self, ending: str, text: str, wrote: Sequence[int], encoded: Callable[[str], tuple[int, ...]]
    ) -> tuple[int, ...]:
        """Encode a text that follows the end token `ending`, which the model wrote; the ids of `ending` are left out.

        Both are encoded together, because some tokenizers encode the beginning of a text differently.
        """
        ids = encoded(ending + text)
        return ids if not ending else ids[1:] if ids and ids[0] == int(wrote[-1]) else encoded(text)

    def _unwritten(self, messages: Sequence[Message], wrote: Sequence[int]) -> tuple[str, str]:
        """Return (the end token that the model wrote, or "", the template's text after it), so that the end token is
        not written twice."""
        last = int(wrote[-1]) if len(wrote) else None
        ended = last in {*self._tokenizer.all_special_ids, self._tokenizer.eos_token_id}
        ending = str(self._tokenizer.convert_ids_to_tokens(last) or "") if ended else ""
        text = self.delta_text(messages, ending=ending)
        closing = self._closing_text(messages, ending) if ending else ""
        if ending and text.startswith(ending):  # GLM's `<|observation|>`: the model begins the next turn itself
            closing = closing or ending
        if not ending or ending not in closing:
            return "", text
        return ending, text[closing.index(ending) + len(ending) :]

    def delta_text(self, messages: Sequence[Message], *, generation: bool = True, ending: str = "") -> str:
        """Return the text that the template writes after an assistant's answer, for `messages` and the generation
        prompt.

        `ending` is the end token of the answer, where the model wrote one. Raises `DataError` if the template leaves out
        the answer.
        """
        if self._plain:
            return "".join(f"\n{one['content']}" for one in messages) + "\n"
        messages = [self._with_id(one, number) for number, one in enumerate(messages)]
        if self._calls_before(messages):
            return self._behind_call([_QUESTION], messages, ending, generation=generation)[1]
        text = self._render([_QUESTION, {"role": "assistant", "content": _ANSWER}, *messages], generation=generation)
        _, mark, after = text.partition(_ANSWER)
        if not mark:
            raise DataError(f"the chat template of {self._name} left out an assistant's answer")
        return after

    def _with_id(self, message: Message, number: int) -> Message:
        """Return a tool's answer with an id in the form that the template wants, made of the call's id or of the
        answer's number."""
        if message["role"] != "tool" or not (self._wants_ids or self._wants_call):
            return message
        if not self._wants_ids:
            return {"tool_call_id": f"{number:0{_ID_LENGTH}}", **message}
        letters = re.sub(r"[^A-Za-z0-9]", "", message.get("tool_call_id") or str(number))
        return {**message, "tool_call_id": letters[-_ID_LENGTH:].rjust(_ID_LENGTH, "0")}

    def _calls_before(self, messages: Sequence[Message]) -> bool:
        return self._wants_call and bool(messages) and messages[0]["role"] == "tool"

    def _behind_call(
        self, earlier: Sequence[Message], messages: Sequence[Message], ending: str, *, generation: bool = True
    ) -> tuple[str, str]:
        """Return the text that the template writes after the calls that `messages` answer: (the part that does not
        depend on the answers, all of it).

        Both begin with the end token of the calls' turn, if there is one: the model's (`ending`), the tokenizer's, or a
        special token that is all that follows the calls. Raises `DataError` where the end of the calls depends on what
        follows.
        """
        alone = self._render([*earlier, _calling(messages)], generation=False)
        whole = self._render([*earlier, _calling(messages), *messages], generation=generation)
        common, place = _common(alone, whole), -1
        start = len(_common(alone, self._render(earlier, generation=False)))
        for end in filter(None, (ending, self._tokenizer.eos_token)):
            place = common.rfind(end, start) if place < 0 else place
        if place < 0:  # the last special token, where nothing but space is behind it
            last = max(self._tokenizer.all_special_tokens, key=lambda token: common.rfind(token, start), default="")
            place = common.rfind(last, start) if last and common.rstrip().endswith(last) else len(common)
        if place == len(common) < len(alone):
            raise DataError(f"the chat template of {self._name} ends a turn of calls differently where answers follow")
        return common[place:], whole[place:]

    def _closing_text(self, messages: Sequence[Message], ending: str = "") -> str:
        """Return the text that the template writes after an answer whether or not a message follows; kept per role."""
        if self._plain:
            return ""
        if self._calls_before(messages):
            messages = [self._with_id(message, number) for number, message in enumerate(messages)]
            return self._behind_call([_QUESTION], messages, ending, generation=False)[0]
        role = str(messages[0]["role"]) if messages else ""
        if role not in self._closing:
            alone = self._render([_QUESTION, {"role": "assistant", "content": _ANSWER}], generation=False)
            after = alone.partition(_ANSWER)[2]
            one = self.delta_text([{"role": role, "content": _NEW}], generation=False)
            self._closing[role] = _common(after, one)  # what is written whether or not anything follows
        return self._closing[role]

    def _render(self, messages: Sequence[Message], *, generation: bool) -> str:
        chat = [dict(one) for one in messages]
        if any(is_parts(one.get("content")) for one in chat):  # then templates take all contents as parts
            chat = [{**one, "content": as_parts(one.get("content"))} for one in chat]
        return render(self._tokenizer, [chat], add_generation_prompt=generation, **self._switches)[0]

    def _encoded(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer(text, add_special_tokens=False)["input_ids"]) if text else ()

    def _check(self, role: str) -> None:
        """Raise `SettingError` for a template that loses or rewrites a turn of this role, or writes it depending on
        earlier turns."""
        if self._plain:
            return
        good: dict[tuple[bool, bool], str] = {}
        whys: list[str] = []
        for ids, call in _MODES if role == "tool" else _MODES[:1]:
            if role == "tool":
                self._wants_ids, self._wants_call = ids, call
            try:
                good[ids, call] = self._check_role(role)
            except DataError as error:
                whys.append(str(error))
        if not good:
            what = f"the chat template of {self._name} cannot append a turn of role {role!r} to a conversation"
            expected = "a template that writes a new turn after the answer, the same text whatever comes before"
            do = "give another role for tool answers (tool_role='user'), or the tokenizer another chat_template"
            raise SettingError(what, expected=expected, found=whys[0], do=do)
        if role == "tool":  # behind a call only where it is written in another way there
            chosen = next(
                (mode for mode in good if mode[1] and good[mode] not in list(good.values())[:1]), next(iter(good))
            )
            self._wants_ids, self._wants_call = chosen

    def _check_role(self, role: str) -> str:
        """Return the text for a made-up turn of this role, from the end token on. Raises `DataError` for a template
        that cannot append it."""
        new = self._with_id({"role": role, "content": _NEW, **({"name": "tool"} if role == "tool" else {})}, 0)
        (delta, begins), (longer, _) = (self._delta_after(earlier, new) for earlier in ([_QUESTION], _EARLIER))
        if _NEW not in delta:
            raise DataError("the chat template leaves the new turn out, or writes it before the answer")
        if longer != delta:
            raise DataError("the chat template writes the turn differently in a longer conversation")
        if not begins:
            raise DataError("the chat template begins an answer differently from its generation prompt")
        return delta[max(delta.find(self._tokenizer.eos_token or _NEW), 0) :]

    def _delta_after(self, earlier: Sequence[Message], new: Message) -> tuple[str, bool]:
        """Render a made-up turn after a made-up answer: (its text, whether the answer begins as the generation prompt
        does).

        A generation prompt may open more than the answer's header (`<think>`), and a header may close it; no other text
        may differ.
        """
        opened = self._render(earlier, generation=True)
        if self._calls_before([new]):
            head = self._render([*earlier, _calling([new])], generation=False)
            return self._behind_call(earlier, [new], "")[1], _bare_text(head).startswith(_bare_text(opened))
        text = self._render([*earlier, {"role": "assistant", "content": _ANSWER}, new], generation=True)
        if text.count(_ANSWER) != 1:
            raise DataError(f"the chat template writes an answer {text.count(_ANSWER)} times")
        head, _, delta = text.partition(_ANSWER)
        return delta, opened.startswith(head) or _bare_text(opened) == _bare_text(head)


def _calling(answers: Sequence[Message]) -> Message:
    """Make the assistant's message with the calls that these tools' answers are for."""
    calls = []
    for one in answers:
        function: dict[str, Any] = {"name": one.get("name") or "tool", "arguments": {}}
        calls.append({"id": one.get("tool_call_id"), "type": "function", "function": function})
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _common(left: str, right: str) -> str:
    """Return the beginning that two texts share."""
    return left[: sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False)))]


def _bare_text(text: str) -> str:
    """Return a text without tags of reasoning and without white space."""
    return "".join(without_tags(text).split())
