"""A sampler behind an OpenAI-compatible address of this machine: what judges in the style of verl's generative reward model ask."""

from __future__ import annotations

import http.client
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from workbench import engines
from workbench.base import runtime
from workbench.rewards import Reward, load_function
from workbench.testing.rewards import answered

ASKED = [{"role": "user", "content": "2 + 2 ="}]


@pytest.fixture(scope="module")
def engine(tiny: str) -> Any:
    return engines.local(tiny)


@pytest.fixture
def address(engine: Any) -> Iterator[str]:
    with engines.serve(engine) as served:
        yield served


def asked(address: str, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
    connection = http.client.HTTPConnection(address, timeout=60)
    connection.request(method, path, None if body is None else json.dumps(body), headers)
    reply = connection.getresponse()
    return reply.status, json.loads(reply.read())


def test_its_answers_are_those_of_the_chat_model(engine: Any, address: str) -> None:
    body = {"messages": ASKED, "max_tokens": 12, "temperature": 0.7, "top_p": 0.8, "seed": 5, "n": 2}
    status, reply = asked(address, "POST", "/v1/chat/completions", body)
    chat = engines.chat(engine)
    own = runtime.run(chat.complete(ASKED, max_tokens=12, temperature=0.7, seed=5, top_p=0.8))
    first, second = reply["choices"]
    assert status == 200 and first["message"] == {"role": "assistant", "content": own.text}
    assert first["message"] != second["message"] and first["finish_reason"] == own.finish_reason
    assert reply["usage"]["prompt_tokens"] == own.prompt_tokens and reply["usage"]["completion_tokens"] >= own.tokens
    for place in (address.replace("127.0.0.1", "localhost"), address):
        assert asked(place, "GET", "/v1/models")[1]["data"][0]["id"] == chat.describe()


def test_without_a_seed_the_same_question_has_the_same_answer(address: str) -> None:
    body = {"messages": ASKED, "max_tokens": 12}
    once, again, other = (
        asked(address, "POST", "/v1/chat/completions", {**body, "temperature": warm})[1]["choices"]
        for warm in (1, 1, 0.9)
    )
    assert once == again != other


def test_a_longest_answer_beyond_the_model_is_what_is_left(engine: Any, address: str) -> None:
    _, reply = asked(
        address, "POST", "/v1/chat/completions", {"messages": ASKED, "max_tokens": 10**6, "temperature": 0}
    )
    assert reply["usage"]["total_tokens"] <= engine.max_length


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ({"messages": ASKED, "stream": True}, "asks for stream"),
        ({"messages": ASKED, "tools": [{"type": "function", "function": {"name": "f"}}]}, "asks for tools"),
        ({"messages": ASKED, "temperature": -1}, "temperature"),
        ({"messages": ASKED, "guided_json": {"type": "object"}}, "asks for guided_json"),
        ({"messages": ASKED, "chat_template_kwargs": {"enable_thinking": True}}, "asks for switches"),
        ({}, "messages"),
        ([1], "expected a JSON object"),
    ],
)
def test_what_it_cannot_do_is_refused(address: str, body: Any, why: str) -> None:
    status, reply = asked(address, "POST", "/v1/chat/completions", body)
    assert status == 400 and reply["error"]["message"]
    assert re.search(why, reply["error"]["message"])


def test_only_this_machines_programs_are_answered(address: str) -> None:
    assert asked(address, "POST", "/v1/completions", {})[0] == 404
    assert asked(address, "GET", "/v1/models", Origin="http://a.example")[0] == 403


def test_openais_own_client_reads_it(address: str) -> None:
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"http://{address}/v1", api_key="none", max_retries=0)
    made = client.chat.completions.create(model="any", messages=ASKED, max_tokens=8)
    assert isinstance(made.choices[0].message.content, str) and made.usage.completion_tokens <= 8
    with pytest.raises(openai.BadRequestError, match="asks for stream"):
        client.chat.completions.create(model="any", messages=ASKED, stream=True)


def test_a_function_that_asks_a_model_scores_by_it(engine: Any, tmp_path: Path) -> None:
    """verl's arguments for one; closed at the end, the address answers nobody."""
    file = tmp_path / "grm.py"
    file.write_text(
        "import json, urllib.request\n\n"
        "async def compute_score(data_source, solution_str, ground_truth, extra_info, reward_router_address,\n"
        "                        reward_model_tokenizer):\n"
        "    body = {'messages': [{'role': 'user', 'content': solution_str}], 'max_tokens': 8, 'temperature': 0.7}\n"
        "    to = f'http://{reward_router_address}/v1/chat/completions'\n"
        "    with urllib.request.urlopen(urllib.request.Request(to, json.dumps(body).encode())) as reply:\n"
        "        said = json.load(reply)['choices'][0]['message']['content']\n"
        "    return {'score': float(len(said)), 'said': said, 'tokens': len(reward_model_tokenizer(said)['input_ids'])}\n"
    )
    batch = answered(["4 + 4 =", "2 + 2 ="], ["8", "4"])
    with engines.serve(engine) as address:
        asks = {"reward_router_address": address, "reward_model_tokenizer": engine.tokenizer}
        reward = Reward(load_function(file, roots=[tmp_path], **asks), workers=2)
        first, again = reward.score(batch), reward.score(batch)
        assert [score.value for score in first] == [len(score.extra["said"]) for score in first]
        assert [score.extra["said"] for score in first] == [score.extra["said"] for score in again]
    reward.close()
    with pytest.raises(ConnectionRefusedError):
        asked(address, "GET", "/v1/models")


def test_verls_own_function_asks_it(engine: Any) -> None:
    file = Path(os.environ.get("WORKBENCH_SOURCES", ""), "verl/tests/experimental/reward_loop/reward_fn.py")
    if not file.is_file():
        pytest.skip("no source of verl: set WORKBENCH_SOURCES to a folder with check-outs")
    batch = answered(["so 4", "so 5"], ["4", "4"], extra_info=[{"question": "2 + 2?"}] * 2)
    with engines.serve(engine) as address:
        asks = {"reward_router_address": address, "reward_model_tokenizer": engine.tokenizer}
        function = load_function(file, "compute_score_gsm8k", roots=[file.parent], **asks)
        reward = Reward(function, workers=1)
        scores = reward.score(batch)
        reward.close()
    said = [score.extra["genrm_response"] for score in scores]
    marks = [text.split("\n\n")[-1].strip() for text in said]
    assert all(said) and [score.value for score in scores] == [
        float(mark) if mark.isdecimal() else 0.0 for mark in marks
    ]
