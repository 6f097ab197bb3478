"""Tests that every parser of tool calls, every tool and every simulated user must pass: inherit the contract, override `make_*`::

    class TestMyParser(ParserContract):
        def make_parser(self):
            return MyParser()

        def write(self, name, arguments):
            return f"<call>{json.dumps({'name': name, 'arguments': arguments})}</call>"

A failing assertion says what is wrong.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import pytest

from workbench.agents.calls import OpenTools, Toolbox
from workbench.agents.interactions import UserReply, interacting
from workbench.agents.parsers import REASONING, calls_of
from workbench.agents.protocol import FunctionCall, ToolCall, Turn
from workbench.agents.tools.base import tool_schema
from workbench.base import runtime
from workbench.base.errors import WorkbenchError
from workbench.testing import TEXTS, VALUES

ECHO = tool_schema({"name": "echo", "parameters": {"text": {"type": "string"}}})
"""A tool of one text argument, whose calls parsers are asked to find."""
FORBIDDEN = tool_schema({"name": "forbidden", "parameters": {"text": {"type": "string"}}})
"""A tool that no text of these tests calls outside reasoning, or outside another call's arguments."""
_TAGS = (*REASONING, *REASONING.values())
SLIPS = (
    '{"name": "echo", "arguments": {"text": ',
    '{"name": "echo"}}}}',
    "```json\n```json\n{}\n```\n```",
    "'\"'\"'",
    "[[[[{{{{",
    '{"a": NaN, "a": -Infinity}',
    "\\u12 \\x \\",
    "Observation: Action: Final Answer:",
    *_TAGS,
)
"""What models write by mistake in the middle of a call."""


def plain_json(value: Any) -> str:
    """Write a value of `VALUES` as a model may write it: JSON with `NaN` and unpaired surrogates, and text for other
    objects."""
    return json.dumps(value, default=lambda item: sorted(item) if isinstance(item, set) else str(type(item).__name__))


class ParserContract:
    """Pytest tests of a parser of tool calls: inherit this class and override `make_parser` and `write`."""

    cannot_hold: tuple[str, ...] = ()
    """Names of `TEXTS` that a well-formed argument of this format cannot hold."""

    def make_parser(self) -> Any:
        """Return a new parser."""
        raise NotImplementedError("override make_parser: return a new parser")

    def write(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Write a well-formed call in this parser's format, as a model writes it."""
        raise NotImplementedError("override write: return the text of a well-formed call")

    # --- helpers ----------------------------------------------------------------------------

    def found(self, text: str, **how: Any) -> list[tuple[str, str]]:
        """Parse a turn as an agent does, and list its calls: (tool, the argument `text`, or `?` where the arguments
        cannot be read)."""
        calls = calls_of(self.make_parser(), text, [ECHO, FORBIDDEN], **how)
        read = []
        for call in calls:
            try:
                arguments = json.loads(call.arguments or "{}")
            except (ValueError, RecursionError):
                arguments = None
            read.append(
                (call.name, arguments["text"] if isinstance(arguments, dict) and arguments.keys() == {"text"} else "?")
            )
        return read

    def echo(self, text: str) -> str:
        """Write a call of the tool `echo` with this text."""
        return self.write("echo", {"text": text})

    def forbidden(self) -> str:
        """Write a call that must never be found: of the tool `forbidden`."""
        return self.write("forbidden", {"text": "x"})

    # --- what is a call, and what is none -----------------------------------------------------

    def test_an_argument_comes_back_as_it_was_written(self) -> None:
        """A call's argument comes back exactly as the model wrote it, also with tags of reasoning, other calls or
        hostile texts in it."""
        tags = {f"within {tag}": f"a {tag} b {closing} c" for tag, closing in REASONING.items()}
        for name, text in {**TEXTS, **tags, "another call": f"See: {self.forbidden()}."}.items():
            if name not in self.cannot_hold:
                assert self.found(self.echo(text)) == [("echo", text)], f"the argument {name!r} comes back"

    def test_a_call_is_found_wherever_it_stands(self) -> None:
        """A call is found in the middle of a text, in a code block or beside unicode; the rest of the text stays,
        without the call."""
        call = self.echo("7")
        for text in (
            f"Let me see.\n{call}\nDone.",
            f"```\n{call}\n```",
            f"さて→ 🧮\n{call}",
            f"\n\n{call}\n\n",
            call * 1,
        ):
            assert self.found(text) == [("echo", "7")], f"one call in {text!r}"
        content, _ = self.make_parser().extract_tool_calls(f"Let me see.\n{call}", [ECHO])
        assert content.strip() == "Let me see.", "the content is the text without its call"

    def test_a_text_without_calls_has_none(self) -> None:
        """Hostile texts make no parser raise, contain no calls, and are returned unchanged."""
        for name, text in TEXTS.items():
            content, calls = self.make_parser().extract_tool_calls(text, [ECHO, FORBIDDEN])
            assert (content, list(calls)) == (text, []), f"no call in the text {name!r}"

    def test_reasoning_has_no_calls(self) -> None:
        """No call is read from reasoning: closed or not, in several blocks, opened by the prompt, before or after
        calls."""
        no, yes = self.forbidden(), self.echo("7")
        for tag, end in REASONING.items():
            once = [("echo", "7")]
            assert self.found(f"{tag}\n{no}\n{end}\n{yes}") == once, f"a call in {tag} is none"
            assert self.found(f"{tag}\n{no}") == [], f"nor is one where {tag} is not closed"
            assert self.found(f"{tag}\n{no[: len(no) // 2]}\n{end}\n{yes}") == once, "nor a part of one"
            assert self.found(f"{tag}a{end}\n{yes}\n{tag}\n{no}\n{end}\n{yes}") == once * 2, "nor one in a second block"
            assert self.found(f"{yes}\n{tag}\n{no}\n{end}\n") == once, "nor one after a call"
            assert self.found(f"{no}\n{end}\n{yes}") == once, f"{end} alone ends reasoning that the prompt opened"
            for part in range(1, 8):
                begun = self.echo("begun")[: len(self.echo("begun")) * part // 8]
                calls = self.found(f"{begun}\n{tag}\n{no}\n{end}\n{yes}")
                assert calls[-1:] == once and ("forbidden", "x") not in calls, f"{begun!r} before {tag} hides nothing"
        assert self.found(f"hm\n{no}\n</think>\n{yes}", reasoning=True) == [("echo", "7")]
        assert self.found(f"hm\n{no}\n", reasoning=True) == [], "reasoning that the prompt opened is never closed"

    def test_a_turn_that_was_cut_has_whole_calls_only(self) -> None:
        """Wherever a turn is cut short, the complete calls before the cut are found, and no incomplete one."""
        whole = f"So:\n{self.echo('first, 12')}\n{self.echo(f'second {self.forbidden()}')}\n"
        every = self.found(whole)
        assert [name for name, _ in every] == ["echo", "echo"], "two calls, one of which has another in its argument"
        for length in range(len(whole)):
            calls = [one for one in self.found(whole[:length], cut=True) if one[1] != "?"]
            assert calls == every[: len(calls)], f"cut after {length} characters: {whole[:length][-40:]!r}"

    def test_a_broken_call_leaves_its_siblings_alone(self) -> None:
        """Two well-formed calls with a broken one between them are both found, in order, and nothing else is called."""
        broken = self.echo("broken")
        cuts = [broken[: len(broken) * part // 8] for part in range(2, 8)]
        slips = [broken[: len(broken) // 2] + slip + broken[len(broken) // 2 :] for slip in SLIPS if slip not in _TAGS]
        for text in (*cuts, *slips):
            calls = self.found(f"{self.echo('one')}\n{text}\n{self.echo('two')}")
            sound = [text_of_call for name, text_of_call in calls if name == "echo" and text_of_call in ("one", "two")]
            assert sound == ["one", "two"], f"both sound calls are found around {text!r}"
            assert {name for name, _ in calls} & {"forbidden"} == set(), "nothing else is called"

    def test_no_slip_makes_it_raise(self) -> None:
        """Slips, cuts and doubled pieces anywhere in a call never make the parser raise."""
        call = self.echo("7, 'b'")
        for place in range(0, len(call), max(1, len(call) // 16)):
            for slip in (*SLIPS, "", call[place:], call[:place]):
                for cut in (False, True):
                    self.found(call[:place] + slip + call[place + 1 :], cut=cut)

    def test_unknown_tools_are_named_as_they_were(self) -> None:
        """The name of a tool that does not exist is kept, and not replaced by that of a known tool."""
        assert [name for name, _ in self.found(self.write("ech", {"text": "7"}))] == ["ech"]


class ToolContract:
    """Pytest tests of a tool: inherit this class and override `make_tool` and `arguments`."""

    create_kwargs: Mapping[str, Any] = {}
    """What a row gives to the tool's `create`."""

    def make_tool(self) -> Any:
        """Return a new tool."""
        raise NotImplementedError("override make_tool: return a new tool")

    def arguments(self) -> dict[str, Any]:
        """Return arguments of a call that works."""
        raise NotImplementedError("override arguments: return arguments of a call that works")

    # --- helpers ----------------------------------------------------------------------------

    def opened(self, tool: Any) -> OpenTools:
        """Open the tool for one episode, as an agent does."""
        box = Toolbox([tool], seconds_per_call=30.0, max_tool_response_length=512, truncate_side="middle")
        return box.opened("episode", {"tools_kwargs": {tool.name: {"create_kwargs": dict(self.create_kwargs)}}})

    def asked(self, *arguments: str) -> list[ToolCall]:
        """Call the tool with each of these arguments (JSON texts), all at once in one episode, and return the records
        of the calls."""
        tool = self.make_tool()
        tools = self.opened(tool)

        async def ask() -> list[ToolCall]:
            calls = [tools.call(FunctionCall(tool.name, one)) for one in arguments]
            found = list(await asyncio.gather(*calls))
            await tools.close()
            return found

        records = runtime.run(ask())
        assert tools.errors == [], f"the tool is released without errors; found {tools.errors}"
        for record in records:
            kept = json.loads(json.dumps(Turn("assistant", "", 0, -1, calls=(record,)).to_dict(), allow_nan=False))
            assert kept["calls"][0]["result"].encode(), "the record can be kept in a file"
        return records

    # --- promises -----------------------------------------------------------------------------

    def test_its_schema_is_openais(self) -> None:
        """The tool's schema has OpenAI's form, the tool's name and its arguments."""
        tool = self.make_tool()
        schema = tool.get_openai_tool_schema()
        assert tool_schema(schema) == schema and schema["function"]["name"] == tool.name
        assert set(self.arguments()) <= set(schema["function"]["parameters"]["properties"]), "it has these arguments"

    def test_a_call_is_answered(self) -> None:
        """A call with good arguments is answered with a text, and its record has status `ok`."""
        [record] = self.asked(json.dumps(self.arguments()))
        assert record.status == "ok" and record.result, f"the call works; found {record}"

    def test_hostile_arguments_are_an_answer(self) -> None:
        """Whatever the arguments are, the call gets an answer and a status, and the calls beside it are unharmed."""
        good = json.dumps(self.arguments())
        hostile = [
            plain_json({**self.arguments(), key: value}) for key in self.arguments() for value in VALUES.values()
        ]
        hostile += [
            *map(plain_json, VALUES.values()),
            *TEXTS.values(),
            f"{good}{good}",
            good[:-1],
            f"{good[:-1]}, {good[1:]}",
        ]
        hostile += [plain_json({**self.arguments(), "no such argument": 1}), plain_json({})]
        [alone] = self.asked(good)
        first, *others, last = self.asked(good, *hostile, good)
        assert first.result == alone.result and last.status == alone.status, "calls beside hostile ones are unharmed"
        for arguments, record in zip(hostile, others, strict=True):
            known = ("ok", "invalid", "refused", "error")
            assert record.status in known and record.result, f"an answer to {arguments[:80]!r}; found {record}"

    def test_what_is_not_its_arguments_is_refused(self) -> None:
        """A call whose arguments are no JSON object, or have an unknown name, is refused and not run."""
        extra = json.dumps({**self.arguments(), "no such argument": 1})
        good = json.dumps(self.arguments())
        twice = f"{good[:-1]}, {good[1:]}" if self.arguments() else "[]"
        for record in self.asked("[]", "7", "{", extra, twice):
            assert record.status in ("invalid", "refused") and "Error" in record.result, f"refused; found {record}"

    def test_parallel_calls_share_one_instance(self) -> None:
        """Parallel calls of an episode create the tool's instance once, and it is released once."""
        tool, created, left = self.make_tool(), [], []
        create, release = tool.create, tool.release

        async def counted(instance_id: str | None = None, **kwargs: Any) -> Any:
            created.append(instance_id)
            await asyncio.sleep(0)
            return await create(instance_id, **kwargs)

        async def counted_out(instance_id: str, **kwargs: Any) -> None:
            left.append(instance_id)
            await release(instance_id, **kwargs)

        tool.create, tool.release = counted, counted_out
        tools = self.opened(tool)

        async def ask() -> None:
            calls = [tools.call(FunctionCall(tool.name, json.dumps(self.arguments()))) for _ in range(3)]
            await asyncio.gather(*calls)
            await asyncio.gather(tools.close(), tools.close())

        runtime.run(ask())
        assert len(created) == len(left) == 1, f"created and released once; found {created}, {left}"

    def test_release_may_be_called_twice(self) -> None:
        """A second release of an instance, and the release of one that was never made, do nothing."""
        tool = self.make_tool()

        async def ask() -> None:
            instance_id, _ = await tool.create("one", create_kwargs=dict(self.create_kwargs), **self.create_kwargs)
            for name in (instance_id, instance_id, "never made"):
                await tool.release(name)

        runtime.run(ask())


class InteractionContract:
    """Pytest tests of a simulated user: inherit this class and override `make_interaction` and `kwargs`."""

    def make_interaction(self) -> Any:
        """Return a new simulated user."""
        raise NotImplementedError("override make_interaction: return a new simulated user")

    def kwargs(self) -> dict[str, Any]:
        """Return `interaction_kwargs` of a row that the simulated user can work with."""
        raise NotImplementedError("override kwargs: return a row's interaction_kwargs")

    def said(self) -> str:
        """Return a message of a model that the simulated user can answer."""
        return "I think it is #### 4"

    # --- helpers ----------------------------------------------------------------------------

    async def talked(self, user: Any, text: str, **changes: Any) -> UserReply | WorkbenchError:
        """Send one message in a new conversation, and return the reply, or the error with which it was refused."""
        row = {"extra_info": {"interaction_kwargs": {**self.kwargs(), **changes}}}
        try:
            async with interacting(user, row, seconds=30.0) as session:
                reply = await session.respond(
                    [{"role": "user", "content": "?"}, {"role": "assistant", "content": text}]
                )
            assert session.trouble == "", f"it ends without trouble; found {session.trouble}"
            reply.text.encode()
            json.dumps(reply.extra, allow_nan=True).encode()
            return reply
        except WorkbenchError as refusal:
            assert " " in str(refusal).strip(), "a refusal says what is wrong"
            return refusal

    # --- promises -----------------------------------------------------------------------------

    def test_it_answers(self) -> None:
        """A conversation gets a reply: whether to stop, a text, and a finite score or none."""
        reply = runtime.run(self.talked(self.make_interaction(), self.said()))
        assert isinstance(reply, UserReply), f"it answers; found {reply}"

    @pytest.mark.parametrize("what", ["messages", "kwargs"])
    def test_hostile_values_harm_no_other_conversation(self, what: str) -> None:
        """Hostile messages and kwargs are answered, or refused with a sentence; conversations beside them are unharmed."""
        user, message = self.make_interaction(), self.said()

        async def talk() -> tuple[Any, list[Any], Any]:
            alone = await self.talked(user, message)
            if what == "messages":
                hostile = [self.talked(user, text) for text in TEXTS.values()]
            else:
                hostile = [self.talked(user, message, **{key: one}) for key in self.kwargs() for one in VALUES.values()]
            beside = self.talked(user, message)
            *found, last = await asyncio.gather(*hostile, beside)
            return alone, found, last

        alone, found, last = runtime.run(talk())
        assert alone == last, "the same conversation beside hostile ones has the same reply"
        assert all(isinstance(one, UserReply | WorkbenchError) for one in found), "a reply or a refusal for each"

    def test_it_may_be_finalised_twice(self) -> None:
        """A second end of a conversation, and the end of one that never began, do nothing."""
        user = self.make_interaction()

        async def talk() -> None:
            instance_id = await user.start_interaction("one", **self.kwargs())
            for name in (instance_id, instance_id, "never began"):
                await user.finalize_interaction(name)

        runtime.run(talk())
