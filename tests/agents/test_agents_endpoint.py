"""The policy behind an endpoint: OpenAI's form, whose request it is, and how requests become sequences."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from agents_parts import Script, schema, tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from support.patience import examples

from workbench import engines
from workbench.agents import Endpoint, Episode, Limits, PolicySession, endpoint
from workbench.agents.policy_server import chain, split_reasoning
from workbench.base import runtime
from workbench.base.loopback import HttpRequest
from workbench.dataproto import DataProto
from workbench.engines.http.openai_form import Refusal
from workbench.engines.local_engine import grammar
from workbench.engines.local_engine.loading import auto_tokenizer
from workbench.engines.protocol import Sample, SamplingSettings
from workbench.stages.rollout import columns_of

ASKED = [{"role": "user", "content": "Ben has 2 cups and buys 3. How many?"}]
TOOLS = [schema("add", numbers="array")]
CALCULATOR = [schema("calculator", expression="string")]
"""The tool that the tiny model knows."""
ADD = '<tool_call>\n{"name": "add", "arguments": {"numbers": [2, 3]}}\n</tool_call>'


@pytest.fixture(scope="module")
def engine() -> Any:
    return engines.local("data/tiny-arith-tools")


def asked(e: Endpoint, session: PolicySession, **body: Any) -> tuple[int, Any]:
    connection = http.client.HTTPConnection(e.address, timeout=60)
    path = session.base_url.partition(e.address)[2] + "/chat/completions"
    connection.request("POST", path, json.dumps({"model": "any", **body}))
    reply = connection.getresponse()
    return reply.status, json.loads(reply.read())


def asked_of(script: Script) -> None:
    """Wait until the model has been asked."""
    for _ in range(3000):
        if script.requests:
            return
        time.sleep(0.01)
    pytest.fail("the model was not asked")


def chat(session: PolicySession, messages: Sequence[dict[str, Any]], **body: Any) -> dict[str, Any]:
    """One answer without HTTP, as a message."""
    return runtime.run(session.chat(messages=list(messages), **body))["choices"][0]["message"]


def heard(message: dict[str, Any], text: str) -> list[dict[str, Any]]:
    """An answer with calls, and one result for each."""
    return [message, *({"role": "tool", "tool_call_id": one["id"], "content": text} for one in message["tool_calls"])]


def said(outputs: Sequence[Any]) -> list[int]:
    """How many answers each sequence has."""
    return [sum(turn.role == "assistant" for turn in one.turns) for one in outputs]


def own(output: Any) -> list[int]:
    return [one for one, mask in zip(output.response_ids, output.response_mask, strict=True) if mask]


# --- OpenAI's own client ----------------------------------------------------------------------------


@pytest.fixture
def client(engine: Any) -> Iterator[Any]:
    openai = pytest.importorskip("openai")
    with endpoint(engine, parser="hermes") as e, e.session() as session:
        made = openai.OpenAI(base_url=session.base_url, api_key=session.api_key, max_retries=0)
        made.session, made.endpoint = session, e
        yield made


def test_its_answers_calls_and_streams_are_read_by_openais_client(client: Any) -> None:
    assert [one.id for one in client.models.list()] == ["policy"]
    drawn = client.chat.completions.create(
        model="policy", messages=ASKED, tools=CALCULATOR, n=16, max_tokens=40, logprobs=True, top_logprobs=1
    )
    assert len(drawn.choices) == 16 and {one.finish_reason for one in drawn.choices} <= {"stop", "tool_calls", "length"}
    callers = [one.message for one in drawn.choices if one.message.tool_calls]
    caller = next(one for one in callers if one.tool_calls[0].function.name == "calculator")
    told = [one.logprobs.content for one in drawn.choices]
    for token in (token for one in told for token in one):
        (best,) = token.top_logprobs  # the likeliest, which need not be the sampled one
        assert token.logprob <= best.logprob + 1e-5 <= 2e-5 and (best.token == token.token) >= (token.logprob > -0.6)
    assert sum(map(len, told)) == drawn.usage.completion_tokens
    messages = [*ASKED, *heard(caller.model_dump(exclude_none=True), "5")]
    form = {"model": "policy", "messages": messages, "tools": CALCULATOR, "max_tokens": 40, "stream": True}
    pieces = list(client.chat.completions.create(**form, stream_options={"include_usage": True}))
    text = "".join(one.choices[0].delta.content or "" for one in pieces if one.choices)
    assert pieces[-1].usage.completion_tokens > 0 and pieces[-2].choices[0].finish_reason == "stop"
    (output,) = client.session.sequences()  # of sixteen candidates the one that was continued
    assert said([output]) == [2] and output.turns[-1].text == text and output.turns[0].calls[0].result == "5"
    assert output.turns[0].calls[0].status == "ok" and output.extra["num_tool_calls"] == 1


def test_a_streams_calls_come_whole(client: Any) -> None:
    for seed in range(20):
        form = {"model": "policy", "messages": ASKED, "tools": CALCULATOR, "seed": seed, "stream": True}
        deltas = [one.choices[0].delta for one in client.chat.completions.create(**form)]
        calls = [one for delta in deltas for one in delta.tool_calls or ()]
        if calls:
            break
    assert calls[0].index == 0 and calls[0].id and calls[0].function.arguments


def test_refusals_are_openais_own_errors(client: Any) -> None:
    import openai

    create = client.chat.completions.create
    with pytest.raises(openai.BadRequestError, match="at least one message"):
        create(model="policy", messages=[])
    with pytest.raises(openai.BadRequestError, match="one of the tools add; found"):
        other = {"type": "function", "function": {"name": "subtract"}}
        create(model="policy", messages=ASKED, tools=TOOLS, tool_choice=other)
    for form, tools, why in (
        ({"type": "xml"}, None, "expected type text, json_object, or json_schema"),
        ({"type": "json_object"}, TOOLS, "cannot call a tool; set tool_choice to none"),
        ({"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "no"}}}, None, "type .no"),
    ):
        with pytest.raises(openai.BadRequestError, match=f"response_format.*{why}"):
            create(model="policy", messages=ASKED, response_format=form, **({"tools": tools} if tools else {}))
    for name, value in {"guided_json": {"type": "object"}, "min_pp": 0.1, "logit_bias": {"5": 1}, "n_best": 2}.items():
        with pytest.raises(openai.BadRequestError, match=f"asks for {name}, which this server does not do"):
            create(model="policy", messages=ASKED, extra_body={name: value})
    with pytest.raises(openai.BadRequestError, match="near: min_p"):
        create(model="policy", messages=ASKED, extra_body={"min_pp": 0.1})
    with pytest.raises(openai.BadRequestError) as found:
        create(model="policy", messages=[{"role": "user", "content": "many words " * 400}])
    assert found.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError, match="/v1/embeddings"):
        client.embeddings.create(model="policy", input="x")
    with pytest.raises(openai.AuthenticationError, match="unknown key"):
        openai.OpenAI(base_url=client.endpoint.base_url, api_key="none", max_retries=0).models.list()
    by_key = openai.OpenAI(base_url=client.endpoint.base_url, api_key=client.session.api_key, max_retries=0)
    assert by_key.chat.completions.create(model="policy", messages=ASKED, max_tokens=4).usage.completion_tokens <= 4
    assert len(client.session.sequences()) == 1


def test_fields_have_their_effect_or_ask_for_nothing() -> None:
    script = Script(auto_tokenizer("data/tiny-arith"), ["5"])
    with endpoint(script, parser="hermes") as e, e.session() as session:
        asks = {
            "min_p": 0.2,
            "repetition_penalty": 1.3,
            "min_tokens": 2,
            "stop_token_ids": [7],
            "top_k": 4,
            "temperature": 0.5,
        }
        assert (
            asked(e, session, messages=ASKED, user="me", metadata={"a": "b"}, store=False, n_best=None, **asks)[0]
            == 200
        )
        settings = script.requests[-1].settings
        assert {name: getattr(settings, name) for name in asks} == {**asks, "stop_token_ids": (7,)}
        plain = script.requests[-1].ids
        thinking = {"chat_template_kwargs": {"enable_thinking": True}}
        assert asked(e, session, messages=ASKED, **thinking)[0] == 200
        assert script.tokenizer.decode(script.requests[-1].ids).endswith("<think>\n")
        assert script.requests[-1].ids[: len(plain)] == plain
        for name in ("tools", "enable_thought"):
            status, reply = asked(e, session, messages=ASKED, chat_template_kwargs={name: [1]})
            assert status == 400 and f"reads no variable '{name}'" in reply["error"]["message"]
        status, reply = asked(e, session, messages=ASKED, logprobs=True, top_logprobs=2)
        assert status == 400 and "Script does not give the likeliest tokens" in reply["error"]["message"]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}])
def test_a_forced_call_is_begun_for_the_model_and_not_learnt(scripted: Any, choice: Any) -> None:
    call = ADD.replace("\n", "")
    begun = '<tool_call>{"name":' + (' "add", "arguments":' if choice != "required" else "")
    whole = call.partition(begun)[2]
    assert whole
    script = scripted([whole, "5"])
    with endpoint(script, parser="hermes") as e, e.session() as session:
        status, reply = asked(e, session, messages=ASKED, tools=TOOLS, tool_choice=choice)
        assert status == 200 and reply["choices"][0]["finish_reason"] == "tool_calls"
        message = reply["choices"][0]["message"]
        assert message["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"numbers": [2, 3]}'}
        assert script.tokenizer.decode(script.requests[-1].ids).endswith(f"assistant\n{begun}")
        assert asked(e, session, messages=[*ASKED, *heard(message, "5")], tools=TOOLS)[0] == 200
        (output,) = session.sequences()
    assert said([output]) == [2] and output.turns[0].text == call and output.turns[0].calls[0].result == "5"
    decoded = script.tokenizer.decode(output.response_ids)
    assert decoded.startswith(whole) and begun not in script.tokenizer.decode(own(output))


SCHEMA = {
    "type": "object",
    "properties": {"answer": {"type": "integer"}, "unit": {"enum": ["cups", "g"]}},
    "required": ["answer", "unit"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}


def test_an_answer_is_held_to_json_and_its_log_probs_are_the_policys(engine: Any, client: Any) -> None:
    pytest.importorskip("xgrammar")
    held = client.chat.completions.create(
        model="policy", messages=ASKED, n=8, max_tokens=250, response_format=FORMAT, temperature=0.9
    )
    free = client.chat.completions.create(model="policy", messages=ASKED, n=2, max_tokens=20)
    texts = [one.message.content for one in held.choices if one.finish_reason == "stop"]
    assert len(texts) >= 4
    for text in texts:
        found = json.loads(text)
        assert sorted(found) == ["answer", "unit"] and found["unit"] in ("cups", "g")
    form = {"type": "json_schema", "name": "answer", "schema": SCHEMA}
    said_so = client.responses.create(model="policy", input="2 + 2?", text={"format": form}, max_output_tokens=250)
    assert said_so.output_text.startswith("{") and "{" not in free.choices[0].message.content
    outputs = [one for one in client.session.sequences() if one.prompt_ids == client.session.sequences()[0].prompt_ids]
    samples = [Sample(one.response_ids, one.response_logprobs, one.finish_reason, 0) for one in outputs]
    rows = columns_of([one.prompt_ids for one in outputs], samples, 0, [one.response_mask for one in outputs])
    batch = DataProto.from_single_dict(rows)
    for temperature, where in ((0.9, slice(0, 8)), (1.0, slice(8, None))):
        found = engine.compute_log_probs(batch[where], temperature=temperature)["log_probs"]
        assert (found - batch[where]["rollout_log_probs"]).abs().max() < 1e-4


def test_a_sampler_that_cannot_hold_json_is_named(scripted: Any, monkeypatch: pytest.MonkeyPatch, engine: Any) -> None:
    with endpoint(scripted(["5"])) as e, e.session() as session:
        status, reply = asked(e, session, messages=ASKED, response_format={"type": "json_object"})
    assert status == 400 and "Script cannot constrain an answer to JSON" in reply["error"]["message"]
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    grammar._compiler.cache_clear()
    with endpoint(engine) as e, e.session() as session:
        status, reply = asked(e, session, messages=ASKED, response_format=FORMAT)
    assert status == 400 and "needs xgrammar" in reply["error"]["message"] and session.failure is None


def test_plain_completions_by_openais_client(client: Any) -> None:
    text = "2 + 3 ="
    one = client.completions.create(model="policy", prompt=text, max_tokens=6, n=2, logprobs=2, seed=4)
    assert one.object == "text_completion" and len(one.choices) == 2 and one.usage.completion_tokens <= 12
    ids = client.endpoint._policy.tokenizer(text)["input_ids"]
    logs = one.choices[0].logprobs
    assert len(logs.tokens) == len(logs.token_logprobs) == len(logs.text_offset) and set(
        map(len, logs.top_logprobs)
    ) == {2}
    assert all(
        max(tops.values()) + 1e-5 >= value for tops, value in zip(logs.top_logprobs, logs.token_logprobs, strict=True)
    )
    pieces = list(client.completions.create(model="policy", prompt=ids, max_tokens=6, seed=4, stream=True))
    assert pieces[-1].choices[0].finish_reason in ("stop", "length") and pieces[0].choices[0].text
    outputs = client.session.sequences()
    assert [list(one.prompt_ids) for one in outputs] == [ids] * 3


def test_responses_by_openais_client(client: Any) -> None:
    import openai

    tools = [{"type": "function", "strict": True, **CALCULATOR[0]["function"]}]
    question = [{"role": "user", "content": [{"type": "input_text", "text": ASKED[0]["content"]}]}]
    named = {"type": "function", "name": "calculator"}
    first = client.responses.create(
        model="policy", input=question, tools=tools, tool_choice=named, max_output_tokens=60
    )
    (call,) = first.output
    assert call.type == "function_call" and call.name == "calculator" and first.usage.total_tokens > 0
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "5"}
    given = [*question, *(one.model_dump(exclude_none=True) for one in first.output), result]
    with client.responses.stream(model="policy", input=given, tools=tools, max_output_tokens=20) as stream:
        kinds = [event.type for event in stream]
        second = stream.get_final_response()
    assert kinds[0] == "response.created" and kinds[-1] in ("response.completed", "response.incomplete")
    (output,) = client.session.sequences()
    assert said([output]) == [2] and output.turns[0].calls[0].result == "5"
    assert output.turns[-1].text == second.output_text or second.output[0].type == "function_call"
    cut = client.responses.create(model="policy", input="2 + 2?", instructions="Be short.", max_output_tokens=1)
    assert cut.status == "incomplete" and cut.incomplete_details.reason == "max_output_tokens"
    assert client.session.sequences()[-1].turns[-1].text == cut.output_text
    for more, why in (
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"tools": [{"type": "web_search"}]}, "found 'web_search'"),
        ({"text": {"format": {"type": "xml"}}}, "response_format"),
        ({"background": True}, "background"),
        ({"input": [{"type": "computer_call"}]}, "computer_call"),
    ):
        with pytest.raises(openai.BadRequestError, match=why):
            client.responses.create(**{"model": "policy", "input": "a", **more})


def test_branches_at_once_are_sequences_and_the_same_whatever_comes_first(engine: Any) -> None:
    openai = pytest.importorskip("openai")
    questions = [f"Ben has {number} cups and buys 3. How many?" for number in range(2, 8)]

    async def play(session: PolicySession, order: Sequence[int]) -> None:
        async with openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as client:

            async def one(place: int) -> None:
                messages: list[Any] = [{"role": "user", "content": questions[place]}]
                for _ in range(2):
                    form = {"model": "policy", "messages": messages, "max_tokens": 24}
                    answer = (await client.chat.completions.create(**form)).choices[0].message
                    messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": "Sure?"}]

            await asyncio.gather(*map(one, order))

    found = []
    for order in ((0, 1, 2, 3, 4, 5), (5, 3, 1, 4, 2, 0)):
        with endpoint(engine) as e, e.session() as session:
            asyncio.run(play(session, order))
            found.append(sorted((one.prompt_ids, one.response_ids) for one in session.sequences()))
    assert found[0] == found[1] and len(found[0]) == 6


# --- recording ----------------------------------------------------------------------------------


@pytest.fixture
def scripted(tiny: str) -> Callable[..., Any]:
    """A function that makes a `Script` with Qwen's template, and the texts that it writes."""

    def make(write: Any) -> Script:
        return Script(tokenizers(tiny)["qwen"], write)

    return make


def test_a_sequence_is_what_was_sampled_and_the_templates_deltas(scripted: Any) -> None:
    script = scripted(["so  " + ADD, "It is 5. "])
    with endpoint(script, parser="hermes") as e, e.session() as session:
        first = chat(session, ASKED, tools=TOOLS)
        assert first["content"] == "so" and first["tool_calls"][0]["function"]["name"] == "add"
        (one,) = first["tool_calls"]
        again = {**one, "id": "other", "function": {"name": "add", "arguments": '{ "numbers":[2,3] }'}}  # written anew
        back = {"role": "assistant", "content": " so\n", "tool_calls": [again]}
        second = chat(session, [*ASKED, *heard(back, "5")], tools=TOOLS)
        (output,) = session.sequences()
    text = script.tokenizer.decode(output.response_ids)
    assert text == (
        f"so  {ADD}<|im_end|>\n<|im_start|>user\n<tool_response>\n5\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\nIt is 5. <|im_end|>"
    )
    assert second["content"] == "It is 5. " and output.prompt_ids + output.response_ids[:-1] != ()
    assert list(script.requests[1].ids) == list(output.prompt_ids + output.response_ids)[: len(script.requests[1].ids)]
    assert script.tokenizer.decode(own(output)) == f"so  {ADD}<|im_end|>It is 5. <|im_end|>"
    assert [bool(one) for one in output.response_logprobs] == [bool(one) for one in output.response_mask]
    assert output.version == 3 and output.num_turns == 4


def test_edited_history_is_a_new_sequence(scripted: Any) -> None:
    script = scripted(["one", "two", "three"])
    with endpoint(script) as e, e.session() as session:
        messages = [*ASKED, {"role": "assistant", **chat(session, ASKED)}, {"role": "user", "content": "and?"}]
        chat(session, messages)
        messages[1] = {"role": "assistant", "content": "ONE"}
        chat(session, messages)
        outputs = session.sequences()
    assert said(outputs) == [2, 1] and "ONE" in script.tokenizer.decode(outputs[1].prompt_ids)
    assert sum(sum(one.response_mask) for one in outputs) == sum(len(own(one)) for one in outputs)


def test_a_shared_beginning_is_trained_once(scripted: Any) -> None:
    script = scripted(["start", "left", "right"])
    with endpoint(script) as e, e.session() as session:
        start = [*ASKED, {"role": "assistant", **chat(session, ASKED)}]
        for word in ("left", "right"):
            chat(session, [*start, {"role": "user", "content": word}])
        first, second = session.sequences()
    assert said((first, second)) == [2, 2] and first.response_ids[:3] == second.response_ids[:3]
    decode = script.tokenizer.decode
    assert decode(own(first)) == "start<|im_end|>left<|im_end|>" and decode(own(second)) == "right<|im_end|>"
    assert not any(
        value for value, mask in zip(second.response_logprobs, second.response_mask, strict=True) if not mask
    )


def test_of_n_answers_those_that_were_continued_count(scripted: Any) -> None:
    script = scripted(["a", "b", "c", "d", "e"])
    with endpoint(script) as e, e.session() as session:
        found = runtime.run(session.chat(messages=ASKED, n=3))["choices"]
        assert len({one["message"]["content"] for one in found}) == 3 == len(session.sequences())
        chat(session, ASKED)
        assert len(session.sequences()) == 4  # asked again: an answer of its own
        pick = {"role": "assistant", **found[1]["message"]}
        chat(session, [*ASKED, pick, {"role": "user", "content": "and?"}])
        first, second = session.sequences()  # of the three candidates the one that was continued
        assert second.turns[0].text == pick["content"] and said((first, second)) == [1, 2]


def test_a_retry_gets_the_answer_that_nobody_waited_for(scripted: Any) -> None:
    script = scripted(["first", "second"])
    script.seconds = 0.5
    with endpoint(script) as e, e.session() as session:
        host, _, port = e.address.partition(":")
        body = json.dumps({"messages": ASKED}).encode()
        path = session.base_url.partition(e.address)[2]
        head = f"POST {path}/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n\r\n"
        with socket.create_connection((host, int(port))) as impatient:
            impatient.sendall(head.encode() + body)
            asked_of(script)
        status, reply = asked(e, session, messages=ASKED)
        assert status == 200 and reply["choices"][0]["message"]["content"] == "first" and len(script.requests) == 1
        assert asked(e, session, messages=ASKED)[1]["choices"][0]["message"]["content"] == "second"
        assert len(session.sequences()) == 2


def test_openais_client_says_that_it_asks_again(scripted: Any) -> None:
    script = scripted(["first", "second"])
    with endpoint(script) as e, e.session() as session:
        body, found = json.dumps({"messages": ASKED}), []
        for tries in ("0", "1", "0"):
            connection = http.client.HTTPConnection(e.address, timeout=60)
            path = session.base_url.partition(e.address)[2] + "/chat/completions"
            connection.request("POST", path, body, {"x-stainless-retry-count": tries})
            found.append(json.loads(connection.getresponse().read())["choices"][0]["message"]["content"])
        assert found == ["first", "first", "second"] and len(session.sequences()) == 2


def test_an_answer_that_nobody_read_is_not_trained_on(scripted: Any) -> None:
    script = scripted(["unread", "read"])
    script.seconds = 0.3
    with endpoint(script) as e, e.session() as session:
        host, _, port = e.address.partition(":")
        body = json.dumps({"messages": [{"role": "user", "content": "other"}]}).encode()
        path = session.base_url.partition(e.address)[2]
        head = f"POST {path}/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n\r\n"
        with socket.create_connection((host, int(port))) as impatient:
            impatient.sendall(head.encode() + body)
            asked_of(script)
        asked(e, session, messages=ASKED)
        (output,) = session.sequences()
        assert output.turns[0].text == "read"


def test_reasoning_is_told_apart_and_goes_on_though_the_client_drops_it(scripted: Any) -> None:
    for keep, turns in ((True, [2]), (False, [1, 1])):
        with (
            endpoint(scripted(["<think>\n2 + 3\n</think>\n\nfive", "sure"])) as e,
            e.session(keep_reasoning=keep) as session,
        ):
            first = chat(session, ASKED)
            assert first["reasoning_content"] == "2 + 3" and first["content"] == "five"
            back = {"role": "assistant", "content": first["content"]}
            chat(session, [*ASKED, back, {"role": "user", "content": "sure?"}])
            assert said(session.sequences()) == turns
    with endpoint(scripted(["<think>\nx\n</think>five", "sure"])) as e, e.session(keep_reasoning=False) as session:
        back = {"role": "assistant", **chat(session, ASKED)}
        chat(session, [*ASKED, back, {"role": "user", "content": "sure?"}])
        assert said(session.sequences()) == [2]


@pytest.mark.parametrize(
    ("text", "opened", "found"),
    [
        ("<think>a</think>\n\nb", "", ("a", "b")),
        ("a</think>b", "<think>", ("a", "b")),
        ("never closed", "<think>", ("never closed", "")),
        ("b <think>a</think>", "", ("", "b <think>a</think>")),
        ("<think>a", "", ("a", "")),
    ],
)
def test_reasoning_is_what_a_text_begins_with(text: str, opened: str, found: tuple[str, str]) -> None:
    assert split_reasoning(text, opened) == found


def test_limits_refuse_and_the_finish_reason_says_so(scripted: Any) -> None:
    with endpoint(scripted(["one", "two"])) as e, e.session(limits=Limits(max_assistant_turns=1)) as session:
        more = [*ASKED, {"role": "assistant", **chat(session, ASKED)}, {"role": "user", "content": "and?"}]
        status, reply = asked(e, session, messages=more)
        assert status == 400 and reply["error"]["code"] == "turn_limit_exceeded"
        assert [one.finish_reason for one in session.sequences()] == ["turns"]
    with endpoint(scripted(["one", "two"])) as e, e.session(limits=Limits(max_tokens=5)) as session:
        more = [*ASKED, {"role": "assistant", **chat(session, ASKED)}, {"role": "user", "content": "and?"}]
        status, reply = asked(e, session, messages=more)
        assert status == 400 and reply["error"]["code"] == "context_length_exceeded"
        assert [one.finish_reason for one in session.sequences()] == ["length"]
        chat(session, ASKED)  # what fits is answered
        assert [one.finish_reason for one in session.sequences()] == ["stop", "stop"]


def test_a_rollouts_sampling_holds_whatever_a_request_asks_for(scripted: Any) -> None:
    script = scripted(["one, two"])
    with endpoint(script) as e, e.session(sampling=SamplingSettings(temperature=0.7, stop=("!",))) as session:
        chat(session, ASKED, temperature=0.0, top_p=0.1, stop=["two"], max_tokens=9)
    expected = SamplingSettings(temperature=0.7, stop=("!", "two"), max_tokens=9)
    assert script.requests[0].settings == expected


def test_a_stop_text_is_no_content(scripted: Any) -> None:
    with endpoint(scripted(["one END"])) as e, e.session() as session:
        assert chat(session, ASKED, stop="END")["content"] == "one "


def test_seeds_follow_from_the_episode_and_what_is_read(scripted: Any) -> None:
    seeds = []
    for episode in (Episode(None, uid="a"), Episode(None, uid="a"), Episode(None, uid="b")):  # type: ignore[arg-type]
        script = scripted(["x"])
        episode.sampler = script
        with endpoint(script) as e, e.session(episode) as session:
            for body in ({}, {}, {"seed": 1}, {"n": 2, "seed": 2}):
                runtime.run(session.chat(messages=ASKED, **body))
            seeds.append([one.seed for one in script.requests])
    assert seeds[0] == seeds[1] and not set(seeds[0]) & set(seeds[2]) and len(set(seeds[0])) == 5


def test_what_the_engine_raises_is_the_runs(scripted: Any) -> None:
    def broken(_: str) -> str:
        raise RuntimeError("the engine fell over")

    with endpoint(scripted(broken)) as e, e.session() as session:
        status, reply = asked(e, session, messages=ASKED)
        assert status == 500 and reply["error"]["type"] == "server_error" and "fell over" in reply["error"]["message"]
        assert isinstance(session.failure, RuntimeError) and session.sequences() == []


def test_an_episode_that_is_over_answers_nobody(scripted: Any) -> None:
    script = scripted(["late"])
    script.seconds = 5.0
    with endpoint(script) as e:
        with e.session() as session:
            answers: list[Any] = []
            waiting = threading.Thread(target=lambda: answers.append(asked(e, session, messages=ASKED)))
            waiting.start()
            asked_of(script)
        waiting.join(timeout=4.0)
        assert answers and answers[0][0] == 401
        assert asked(e, session, messages=ASKED)[0] == 401


def test_calls_where_the_template_writes_none_are_given_as_they_were_written(tiny: str) -> None:
    script = Script(tokenizers(tiny)["own"], [ADD, "5", "6"])
    with endpoint(script, parser="hermes") as e, e.session() as session:
        first = {"role": "assistant", **chat(session, ASKED, tools=TOOLS)}
        chat(session, [{"role": "user", "content": "edited"}, *heard(first, "5")], tools=TOOLS)
        assert ADD in script.tokenizer.decode(script.requests[1].ids)
        strange = {
            **first,
            "tool_calls": [{"id": "x", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
        }
        with pytest.raises(Refusal, match="did not make"):
            chat(session, [{"role": "user", "content": "edited"}, *heard(strange, "5")], tools=TOOLS)


def test_a_body_that_is_too_long_is_refused_in_openais_form(scripted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workbench.base.loopback.MAX_REQUEST", 200)
    with endpoint(scripted(["x"])) as e, e.session() as session:
        status, reply = asked(e, session, messages=[{"role": "user", "content": "x" * 200}])
        assert status == 413 and "at most 200" in reply["error"]["message"]


def test_tools_without_a_known_parser_are_refused_before_anything_is_sampled(tiny: str) -> None:
    script = Script(tokenizers(tiny)["own"], ["x"])
    with endpoint(script) as e, e.session() as session:
        status, reply = asked(e, session, messages=ASKED, tools=TOOLS)
        assert status == 400 and "parser" in reply["error"]["message"] and not script.requests
        assert asked(e, session, messages=ASKED)[0] == 200


@pytest.mark.parametrize("name", ["own", "qwen", "llama", "no system"])
def test_any_template_has_whole_sequences(tiny: str, name: str) -> None:
    """Where a template cannot append a tool's answer, what comes after is a sequence of its own."""
    script = Script(tokenizers(tiny)[name], [ADD, "It is 5."])
    with endpoint(script, parser="hermes") as e, e.session() as session:
        first = {"role": "assistant", **chat(session, ASKED, tools=TOOLS)}
        chat(session, [*ASKED, *heard(first, "5")], tools=TOOLS)
        outputs = session.sequences()
    assert sum(said(outputs)) == 2 and all(own(one) for one in outputs)
    for request in script.requests:
        whole = [tuple(one.prompt_ids + one.response_ids) for one in outputs]
        assert any(one[: len(request.ids)] == tuple(request.ids) for one in whole)


def test_contents_may_be_parts(scripted: Any) -> None:
    script = scripted(["x", "y"])
    with endpoint(script) as e, e.session() as session:
        first = {"role": "assistant", **chat(session, ASKED)}
        parts = [{**ASKED[0], "content": [{"type": "text", "text": ASKED[0]["content"]}]}, first]
        chat(session, [*parts, {"role": "user", "content": [{"type": "text", "text": "and?"}]}])
        assert said(session.sequences()) == [2]
        with pytest.raises(Refusal, match="parts of type text"):
            chat(session, [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}])


FIELDS = (
    "messages", "tools", "tool_choice", "n", "stream", "stream_options", "logprobs", "top_logprobs", "stop", "max_tokens",
    "max_completion_tokens", "temperature", "top_p", "seed", "response_format", "role", "content", "type", "function", "name",
    "arguments", "tool_calls", "id", "tool_call_id", "text", "parallel_tool_calls", "reasoning_content", "logit_bias",
)  # fmt: skip
_FUZZED: list[Script] = []


def fuzzed(tiny: str) -> Script:
    """One script for all examples: making a tokenizer takes a while."""
    if not _FUZZED:
        _FUZZED.append(Script(tokenizers(tiny)["qwen"], ["<think>x</think>so", ADD, "yes"]))
    return _FUZZED[0]


MESSAGES = st.lists(
    st.tuples(st.sampled_from(["user", "assistant", "tool"]), st.sampled_from(["a", "b", " a ", ""])),
    min_size=1,
    max_size=6,
)


@given(MESSAGES, MESSAGES)
def test_names_of_chats_are_equal_where_the_chats_are(first: Any, second: Any) -> None:
    def plain(messages: Any) -> list[Any]:
        return [(role, text.strip()) for role, text in messages]

    names = [chain([{"role": role, "content": text} for role, text in one]) for one in (first, second)]
    for place, (one, other) in enumerate(zip(*names, strict=False)):
        assert (one == other) == (plain(first)[: place + 1] == plain(second)[: place + 1])


@settings(max_examples=examples(30))
@given(st.lists(st.tuples(st.integers(0, 20), st.sampled_from(["u", "v"])), min_size=1, max_size=12))
def test_every_answer_that_counts_is_trained_exactly_once(tiny: str, moves: list[tuple[int, str]]) -> None:
    """A harness that goes on after any answer, or begins anew: prefixes are the sampled ids, masks are disjoint."""
    script = Script(tokenizers(tiny)["qwen"], lambda _: f"answer {len(script.requests)}")
    with endpoint(script) as e, e.session() as session:
        chats: list[list[dict[str, Any]]] = [[]]
        for place, word in moves:
            messages = [*chats[place % len(chats)], {"role": "user", "content": word}]
            chats.append([*messages, {"role": "assistant", **chat(session, messages)}])
        outputs, nodes = session.sequences(), session.recording.nodes
    owned = [text for one in outputs for text in script.tokenizer.decode(own(one)).split("<|im_end|>") if text]
    kept = {node.text for leaf in session.recording.leaves() for node in leaf.path}
    assert sorted(owned) == sorted(kept) and len(set(owned)) == len(owned)
    whole = [tuple(request.ids) for request in script.requests]
    for node, request in zip(nodes, whole, strict=True):
        assert tuple(node.ids[: -len(node.sample.ids)]) == request
    assert len({one.prompt_ids + one.response_ids for one in outputs}) == len(outputs)


ANY = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["\ud800", "user", "text"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(FIELDS) | st.text(max_size=3), inner, max_size=4)
    ),
    max_leaves=8,
)


@settings(max_examples=examples(150))
@given(st.dictionaries(st.sampled_from(FIELDS), ANY, max_size=6), st.booleans(), st.binary(max_size=20))
def test_no_body_is_answered_by_a_failure(tiny: str, body: dict[str, Any], whole: bool, raw: bytes) -> None:
    script = fuzzed(tiny)
    with endpoint(script, parser="hermes") as e, e.session() as session:
        sent = json.dumps({"messages": ASKED, "tools": TOOLS, **body} if whole else body).encode()
        for one in (sent, raw):
            request = HttpRequest("POST", f"/e/{session.api_key}/v1/chat/completions", {}, one, lambda: False)
            status, reply = e.answer(request)
            reply = list(reply) if isinstance(reply, Iterator) else reply
            assert status in (200, 400), reply
            json.dumps(reply)
        assert all(any(one.response_mask) for one in session.sequences())


def test_log_probs_are_those_of_the_model(engine: Any) -> None:
    """Recomputed from the sequences' ids, within 1e-4: what the sampler saw is what is trained on."""
    with endpoint(engine, parser="hermes") as e, e.session(sampling=SamplingSettings(temperature=1.0)) as session:
        for word in ("cups", "plums"):
            messages: list[Any] = [{"role": "user", "content": f"Ben has 2 {word} and buys 3. How many?"}]
            for reply in ("Sure?", "Really?", ""):
                answer = {"role": "assistant", **chat(session, messages, max_tokens=32)}
                messages += [answer, {"role": "user", "content": reply}]
        outputs = session.sequences()

    columns = columns_of(
        [one.prompt_ids for one in outputs],
        [Sample(one.response_ids, one.response_logprobs, one.finish_reason, 0) for one in outputs],
        0,
        [one.response_mask for one in outputs],
    )
    batch = DataProto.from_single_dict(columns)
    found = engine.compute_log_probs(batch)["log_probs"]
    assert said(outputs) == [3, 3]
    assert (found - batch["rollout_log_probs"]).abs().max() < 1e-4 and batch["response_mask"].sum() > 20


# --- streams ----------------------------------------------------------------------------------------


class Slow(Script):
    """Gives each token when the test says so."""

    streams = True

    def __init__(self, tokenizer: Any, texts: list[str]) -> None:
        super().__init__(tokenizer, texts)
        self.more = threading.Semaphore(0)
        self.cancelled = False

    async def sample(self, request: Any) -> Sample:
        found = await super().sample(request)
        try:
            for token in found.ids:
                while not self.more.acquire(blocking=False):
                    await asyncio.sleep(0.002)
                if request.listen is not None:
                    request.listen(token)
        except asyncio.CancelledError:
            self.cancelled = True
            raise
        return found


def streamed(e: Endpoint, session: PolicySession, path: str = "chat/completions", **body: Any) -> Iterator[Any]:
    """The objects of a stream as they come; closing it leaves the connection."""
    connection = http.client.HTTPConnection(e.address, timeout=60)
    address = session.base_url.partition(e.address)[2]
    connection.request("POST", f"{address}/{path}", json.dumps({"model": "any", "stream": True, **body}))
    reply = connection.getresponse()
    try:
        assert reply.status == 200, reply.read()
        for line in reply:
            if line.startswith(b"data: {"):
                yield json.loads(line[6:])
    finally:
        reply.close()
        connection.close()


def test_a_stream_is_sent_while_the_answer_is_sampled(tiny: str) -> None:
    script = Slow(tokenizers(tiny)["qwen"], ["It is 5 – né 猫."])
    count = len(script.tokenizer("It is 5 – né 猫.")["input_ids"])
    with endpoint(script, parser="hermes") as e, e.session() as session:
        script.more.release(3)
        stream = streamed(e, session, messages=ASKED)
        first = next(stream)["choices"][0]["delta"] | next(stream)["choices"][0]["delta"]
        assert first["content"] and not session.recording.nodes
        script.more.release(count + 2)
        rest = [one["choices"][0]["delta"].get("content", "") for one in stream]
    assert first["content"] + "".join(rest) == "It is 5 – né 猫." and "\ufffd" not in "".join(rest)


def test_a_client_that_leaves_a_stream_ends_its_sampling(tiny: str) -> None:
    script = Slow(tokenizers(tiny)["qwen"], ["a b c d e f g h"] * 2)
    with endpoint(script, parser="hermes") as e, e.session() as session:
        script.more.release(2)
        stream = streamed(e, session, messages=ASKED)
        assert next(stream) and next(stream)
        stream.close()
        for _ in range(3000):
            script.more.release()
            if script.cancelled:
                break
            time.sleep(0.005)
        assert script.cancelled and not session.recording.nodes and session.failure is None
        script.more.release(100)
        text = "".join(one["choices"][0]["delta"].get("content", "") for one in streamed(e, session, messages=ASKED))
        assert text == "a b c d e f g h" and len({one.seed for one in script.requests}) == 1


def test_what_fails_in_a_stream_is_its_last_object(tiny: str) -> None:
    script = Slow(tokenizers(tiny)["qwen"], ["a b c"])
    with endpoint(script, parser="hermes") as e, e.session() as session:
        script.more.release(2)
        stream = streamed(e, session, messages=ASKED)
        assert next(stream) and next(stream)
        session.close()
        *_, last = stream
    assert last["error"]["code"] == "invalid_api_key"


PARTS = ["<think>", "</think>", "<tool_call>", "</tool_call>", '{"name": "add", "arguments": {"numbers": [2]}}', "STOP"]
PARTS += ["\n", " ", "né", "猫", "5", "<", "[", "`", "<|im_end|>", "The answer"]


@settings(max_examples=examples(80))
@given(st.lists(st.sampled_from(PARTS), min_size=1, max_size=9).map("".join), st.booleans(), st.booleans())
def test_the_sum_of_a_streams_chunks_is_the_answer(tiny: str, text: str, tools: bool, stops: bool) -> None:
    script = Slow(tokenizers(tiny)["qwen"], [text] * 2)
    script.more.release(1000)
    body: dict[str, Any] = {
        "messages": ASKED,
        **({"tools": TOOLS} if tools else {}),
        **({"stop": "STOP"} if stops else {}),
    }
    with endpoint(script, parser="hermes") as e, e.session() as session:
        chunks = [one["choices"][0]["delta"] for one in streamed(e, session, **body)]
        events = list(streamed(e, session, "responses", input=ASKED[0]["content"], tools=[])) if not stops else []
        messages = [node.message for node in session.recording.nodes]
    for name in ("content", "reasoning_content"):
        assert "".join(one.get(name) or "" for one in chunks) == (messages[0].get(name) or "")
    assert [call for one in chunks for call in one.get("tool_calls", ())] == [
        {"index": number, **call} for number, call in enumerate(messages[0].get("tool_calls", ()))
    ]
    if events:
        written = "".join(one["delta"] for one in events if one["type"] == "response.output_text.delta")
        assert written == (messages[1]["content"] or "")
        assert [one["sequence_number"] for one in events] == list(range(len(events)))
        done = [one["item"] for one in events if one["type"] == "response.output_item.done"]
        assert [{**one, "status": ""} for one in done] == [
            {**one, "status": ""} for one in events[-1]["response"]["output"]
        ]
