"""Token ids of a growing conversation: the model's tokens are kept, only each new turn's delta goes through the template."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from workbench.agents.parsers import opens_reasoning
from workbench.base.errors import DataError, SettingError
from workbench.datasets.rendering import encode, render

Message = Mapping[str, Any]

_ANSWER = "\u2e22answer\u2e23"
_ASKED = {"role": "user", "content": "question"}
_NEW = "new\u2e22turn"
_ID_LENGTH = 9
"""Letters and digits of a call's id in the templates that want one (Mistral's)."""
_KEPT = 4096
"""Prompts whose ids are kept: the samples of a group share one."""


class TurnTokens:
    """Makes token ids of prompts and of later turns, by a tokenizer's own chat template.

    A delta is the text that the template puts after an assistant's answer when new messages follow: what closes the
    answer (without the end token, where the model wrote it), the messages, and the generation prompt. It is taken from a
    short made-up conversation, so that it cannot depend on how the template would rewrite earlier turns (stripped, without
    thinking), and is encoded without special tokens. Without a template a message is its content and a line end.

    Args:
        tokenizer: with or without a chat template.
        tools: tool schemas that the template shows.
        roles: roles of later turns (`tool`, `user`), for which the template is checked now.
        switches: further arguments of the template (`enable_thinking=False`).

    Raises `SettingError`, naming the template, where no delta can be formed for one of `roles`.
    """

    def __init__(
        self, tokenizer: Any, *, tools: Sequence[Mapping[str, Any]] = (), roles: Sequence[str] = (), **switches: Any
    ) -> None:
        self._tokenizer = tokenizer
        self._switches = {**switches, **({"tools": list(tools)} if tools else {})}
        self._plain = not getattr(tokenizer, "chat_template", None)
        self._name = str(getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__)
        self._prompts: dict[str, tuple[int, ...]] = {}
        self._closing: dict[str, str] = {}
        self._wants_ids = False
        for role in roles:
            self._check(role)

    @cached_property
    def reasoning(self) -> bool:
        """Whether the template's generation prompt opens the model's reasoning (`<think>`), which the model then closes."""
        return not self._plain and opens_reasoning(
            self._render([_ASKED], generation=True).rpartition(_ASKED["content"])[2]
        )

    def prompt(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """The token ids of a chat with the generation prompt, and with the tools if the template shows them."""
        key = json.dumps(list(messages), default=str, sort_keys=True)
        if key not in self._prompts:
            if len(self._prompts) >= _KEPT:
                self._prompts.clear()
            self._prompts[key] = tuple(encode(self._tokenizer, [dict(one) for one in messages], **self._switches))
        return self._prompts[key]

    def delta(
        self, messages: Sequence[Message], wrote: Sequence[int] = (), *, generation: bool = True
    ) -> tuple[int, ...]:
        """The token ids to append after an assistant turn with the ids `wrote`, so that the model reads `messages`."""
        text = self.delta_text(messages, generation=generation)
        last = int(wrote[-1]) if len(wrote) else None
        if last is None or last not in {*self._tokenizer.all_special_ids, self._tokenizer.eos_token_id}:
            return self._encoded(text)
        said = str(self._tokenizer.convert_ids_to_tokens(last))
        if not said or said not in (closing := self._closing_text(messages)):
            return self._encoded(text)
        # the end token that the model wrote is not written twice; the rest is encoded behind it, because some tokenizers
        # encode the beginning of a text differently
        rest = text[closing.index(said) + len(said) :]
        ids = self._encoded(said + rest)
        return ids[1:] if ids and ids[0] == last else self._encoded(rest)

    def delta_text(self, messages: Sequence[Message], *, generation: bool = True) -> str:
        """The text that the template writes after an assistant's answer, for `messages` and the generation prompt.

        Raises `DataError` if the template leaves out the answer.
        """
        if self._plain:
            return "".join(f"\n{one['content']}" for one in messages) + "\n"
        messages = [self._with_id(one, number) for number, one in enumerate(messages)]
        text = self._render([_ASKED, {"role": "assistant", "content": _ANSWER}, *messages], generation=generation)
        _, found, after = text.partition(_ANSWER)
        if not found:
            raise DataError(f"the chat template of {self._name} left out an assistant's answer")
        return after

    def _with_id(self, message: Message, number: int) -> Message:
        """A tool's answer with an id as the template wants it, made of the one that the call had, or of its number."""
        if not self._wants_ids or message["role"] != "tool":
            return message
        said = re.sub(r"[^A-Za-z0-9]", "", message.get("tool_call_id") or str(number))
        return {**message, "tool_call_id": said[-_ID_LENGTH:].rjust(_ID_LENGTH, "0")}

    def _closing_text(self, messages: Sequence[Message]) -> str:
        """What the template writes after an answer, before the message that follows; kept per role."""
        if self._plain:
            return ""
        role = str(messages[0]["role"]) if messages else ""
        if role not in self._closing:
            alone = self._render([_ASKED, {"role": "assistant", "content": _ANSWER}], generation=False)
            after = alone.partition(_ANSWER)[2]
            one = self.delta_text([{"role": role, "content": _NEW}], generation=False)
            # the common beginning: what is written whether or not anything follows
            length = next((n for n in range(len(after)) if one[n : n + 1] != after[n]), len(after))
            self._closing[role] = after[:length]
        return self._closing[role]

    def _render(self, messages: Sequence[Message], *, generation: bool) -> str:
        chat = [dict(one) for one in messages]
        return render(self._tokenizer, [chat], add_generation_prompt=generation, **self._switches)[0]

    def _encoded(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer(text, add_special_tokens=False)["input_ids"]) if text else ()

    def _check(self, role: str) -> None:
        """Refuse a template whose later text depends on more than the last answer, or that loses or rewrites messages."""
        if self._plain:
            return
        why = self._told(role)
        if why and role == "tool" and not self._wants_ids:
            self._wants_ids = True
            self._wants_ids = not self._told(role)
        if why and not (role == "tool" and self._wants_ids):
            what = f"the chat template of {self._name} cannot append a turn of role {role!r} to a conversation"
            expected = "a new turn that is written after the answer, in the same way whatever comes before"
            do = "give another role for tool answers (tool_role='user'), or the tokenizer another chat_template"
            raise SettingError(what, expected=expected, found=why, do=do)

    def _told(self, role: str) -> str:
        try:
            return self._wrong(self._with_id({"role": role, "content": _NEW}, 0))
        except DataError as error:
            return str(error)

    def _wrong(self, new: Message) -> str:
        answer = {"role": "assistant", "content": _ANSWER}
        text = self._render([_ASKED, answer, new], generation=True)
        if text.count(_ANSWER) != 1:
            return f"an answer that is written {text.count(_ANSWER)} times"
        delta = text.partition(_ANSWER)[2]
        if _NEW not in delta:
            return "a new turn that is left out, or stands before the answer"
        earlier = [_ASKED, {"role": "assistant", "content": "earlier"}, {"role": "user", "content": "again"}]
        if self._render([*earlier, answer, new], generation=True).partition(_ANSWER)[2] != delta:
            return "another text for the turn in a longer conversation"
        head = text.partition(_ANSWER)[0]
        # a generation prompt may open more than the answer's header (`<think>`), never something else
        if not self._render([_ASKED], generation=True).startswith(head):
            return "another beginning of the answer than the generation prompt gives"
        return ""
