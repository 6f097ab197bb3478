"""A server started elsewhere as a sampler: what it cannot do exactly is refused, and no row carries a version that did not
write it. A small server does what no real one does on demand; `test_engines_remote_vllm` has real vLLM."""

from __future__ import annotations

import asyncio
import math
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import make_random_model
from support.patience import LONG
from support.remote import FIRST, LOGITS, Server, serving
from test_engines_vllm import moved

from workbench.base import runtime
from workbench.base.errors import EngineError, Interrupted, SettingError
from workbench.engines import Request, Sample, Sampler, SamplingSettings, local, paired, remote, server_command
from workbench.engines.http.server import ServerReply, examine
from workbench.engines.weights import weights_of

TINY = "data/tiny-arith"
QUICK: dict[str, Any] = {"attempts": 2, "timeout": LONG, "ask_seconds": LONG, "push_seconds": LONG}


@pytest.fixture
def server() -> Iterator[Server]:
    with serving(Server()) as made:
        yield made


def request(seed: int = 0, **settings: Any) -> Request:
    return Request((5, 9, 7), SamplingSettings(**{"max_tokens": 6, "ignore_eos": True, **settings}), seed)


def expected(ids: tuple[int, ...], temperature: float = 1.0) -> list[float]:
    values = torch.log_softmax(torch.tensor(LOGITS) / temperature, -1)
    return [float(values[token - FIRST]) for token in ids]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sglang", "vllm"])
def test_tokens_and_log_probs_of_both_kinds(kind: str) -> None:
    with serving(Server(kind)) as server:
        engine = remote(f"{server.url}/v1", TINY, version=4, **QUICK)
        sample = engine.sample_many([request(temperature=0.5)])[0]
        assert len(sample.ids) == 6 and sample.finish_reason == "length" and sample.version == 4
        assert sample.log_probs == pytest.approx(expected(sample.ids, 0.5), abs=1e-6)
        assert engine.sample_many([request(temperature=0.5)])[0] == sample != engine.sample_many([request(7)])[0]
        assert isinstance(engine, Sampler) and engine.max_length == 256
        found = engine.describe()
        assert found["kind"] == kind and found["before_filters"] and found["follows_temperature"] and found["seeded"]
        assert "its weights never change" in repr(engine) and kind in repr(engine)


@pytest.mark.slow
def test_what_is_sent_is_what_was_asked(server: Server) -> None:
    engine = remote(server.url, TINY, **QUICK)
    more: dict[str, Any] = {"min_p": 0.1, "stop_token_ids": (77,), "stop": ("</a>",)}
    settings = SamplingSettings(temperature=0.7, top_p=0.9, top_k=5, max_tokens=300, **more)
    engine.sample_many([Request((5, 9), settings, 2**62 + 3)])
    body = server.asked("/generate")[-1]
    sent = body["sampling_params"]
    assert body["input_ids"] == [5, 9] and body["return_logprob"] and body["top_logprobs_num"] == 0
    assert sent["max_new_tokens"] == 254 and sent["stop"] == ["</a>"] and sent["no_stop_trim"]
    assert (sent["temperature"], sent["top_p"], sent["top_k"], sent["sampling_seed"]) == (0.7, 0.9, 5, 3)
    assert sent["min_p"] == 0.1 and not sent["ignore_eos"]
    assert {engine.tokenizer.eos_token_id, 77} <= set(sent["stop_token_ids"])
    engine.sample_many([Request((5, 9), settings.replace(ignore_eos=True), 0)])
    assert server.asked("/generate")[-1]["sampling_params"]["stop_token_ids"] == [77]


@pytest.mark.slow
def test_log_probs_that_are_not_a_trainers_are_refused(server: Server) -> None:
    server.mode = "raw"
    engine = remote(server.url, TINY, **QUICK)
    sample = engine.sample_many([request(top_k=3)])[0]  # raw ones are right at temperature 1, filters or none
    assert sample.log_probs == pytest.approx(expected(sample.ids), abs=1e-6)
    with pytest.raises(EngineError, match="those of temperature 1; sample at temperature 1, or start the server with"):
        engine.sample_many([request(temperature=0.7)])
    assert engine.sample_many([request(top_k=1)])
    with pytest.raises(EngineError, match="temperature"):
        engine.sample_many([request(top_k=1, temperature=0.5)])
    server.mode = "filtered"
    engine = remote(server.url, TINY, **QUICK)
    assert engine.sample_many([request(temperature=0.7)])
    for settings in ({"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.1}):
        with pytest.raises(EngineError, match="log-probs after them"):
            engine.sample_many([request(**settings)])
    for settings in ({"repetition_penalty": 1.2}, {"min_tokens": 2}):
        with pytest.raises(
            EngineError, match="those before.*start vLLM by engines.server_command and pass weights='vllm'"
        ):
            engine.sample_many([request(**settings)])
    server.mode = "nonsense"
    with pytest.raises(EngineError, match=r"of no known kind; expected .* 1 \(raw logits\) or 0\.50"):
        remote(server.url, TINY, **QUICK)


@pytest.mark.slow
def test_a_server_without_seeds_is_said_to_be_so(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    server.seeded = False
    assert not remote(server.url, TINY, **QUICK).describe()["seeded"]
    assert "no step can be repeated" in caplog.text


@pytest.mark.slow
def test_another_kind_model_or_tokenizer_is_refused(server: Server, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="one that is called 'tiny-reward-model'; found data/tiny-arith; say which"):
        remote(server.url, "data/tiny-reward-model", **QUICK)
    with pytest.raises(EngineError, match="served_name='policy'; expected one of the server's models: data/tiny-arith"):
        remote(server.url, TINY, served_name="policy", **QUICK)
    other = make_random_model(tmp_path / "tiny-arith")
    with pytest.raises(EngineError, match=r"at most 128 tokens.*found 256"):
        remote(server.url, other, **QUICK)
    server.models[0]["max_model_len"] = 128
    server.kind = server.owner = "vllm"
    with pytest.raises(EngineError, match="tokenizer is not that of"):
        remote(server.url, other, **QUICK)
    with pytest.raises(EngineError, match="weights='sglang'; expected 'vllm', the kind of the server, or None"):
        remote(server.url, TINY, weights="sglang", **QUICK)
    server.owner = "somebody"
    with pytest.raises(EngineError, match="vllm or sglang as owned_by.*found 'somebody'.*engines.openai"):
        remote(server.url, TINY, **QUICK)
    server.models = []
    with pytest.raises(EngineError, match="a list of models"):
        remote(server.url, TINY, **QUICK)


@pytest.mark.slow
def test_a_server_that_is_away_or_not_meant_for_it() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        with pytest.raises(EngineError, match=f"(?s)no usable reply in 2 attempts.*{url}"):
            remote(url, TINY, **QUICK)
    for wrong in ("localhost:8000", "http://", "http://me:key@host", "http://host?key=1"):
        with pytest.raises(SettingError, match="url"):
            remote(wrong, TINY)
    with pytest.raises(SettingError, match="did you mean 'weights'"):
        remote("http://host", TINY, weigths="vllm")
    with pytest.raises(SettingError, match="max_staleness"):
        remote("http://host", TINY, weights="vllm", max_staleness=1)
    with pytest.raises(EngineError, match="no model at"):
        remote("http://host", "data/nowhere")


BROKEN: dict[str, tuple[Any, str]] = {
    "one log-prob too few": (lambda r, b: r["meta_info"]["output_token_logprobs"].pop() and r, "output_ids are not"),
    "too many tokens": (lambda r, b: _longer(r), "7 tokens; expected at most 6"),
    "an id that is none": (lambda r, b: _changed(r, token=9999), "token id 9999"),
    "a log-prob that is none": (lambda r, b: _changed(r, value=math.nan), "nan as a log-prob"),
    "a positive log-prob": (lambda r, b: _changed(r, value=0.5), "0.5 as a log-prob"),
    "no log-probs": (lambda r, b: {"text": "", "meta_info": {"finish_reason": {"type": "length"}}}, "KeyError"),
    "truncated JSON": (lambda r, b: b'{"text": "4", "meta_info": {"output_tok', "JSONDecodeError"),
    "a 503": (lambda r, b: (503, b"loading"), "status 503: loading"),
    "another reason": (lambda r, b: _reason(r), "finish_reason 'error'"),
}


def _changed(reply: Any, token: int | None = None, value: float | None = None) -> Any:
    first = reply["meta_info"]["output_token_logprobs"][0]
    first[:2] = [first[0] if value is None else value, first[1] if token is None else token]
    reply.pop("output_ids")
    return reply


def _longer(reply: Any) -> Any:
    reply["meta_info"]["output_token_logprobs"].append([-1.0, FIRST, None])
    reply.pop("output_ids")
    return reply


def _reason(reply: Any) -> Any:
    reply["meta_info"]["finish_reason"] = {"type": "error"}
    return reply


@pytest.mark.slow
@pytest.mark.parametrize("fault", BROKEN)
def test_a_reply_that_cannot_be_is_asked_for_again_and_then_named(server: Server, fault: str) -> None:
    engine = remote(server.url, TINY, **QUICK)
    good = engine.sample_many([request()])
    broken, words = BROKEN[fault]
    server.faults = [broken]
    assert engine.sample_many([request()]) == good
    server.faults = [broken, broken]
    with pytest.raises(EngineError, match=f"(?s)no response.*2 attempts.*{words}"):
        engine.sample_many([request()])
    assert engine.sample_many([request()]) == good


@pytest.mark.slow
def test_a_refusal_is_in_the_servers_words_and_not_tried_again(server: Server) -> None:
    engine = remote(server.url, TINY, **QUICK)
    before = len(server.asked("/generate"))
    server.faults = [lambda r, b: (400, b'{"error": "the context length is exceeded"}')]
    with pytest.raises(EngineError, match="answered 400: .*the context length is exceeded"):
        engine.sample_many([request()])
    assert len(server.asked("/generate")) == before + 1
    with pytest.raises(EngineError, match="token id 512.*0 to 511"):
        engine.sample_many([Request((5, 512), SamplingSettings(), 0)])
    with pytest.raises(EngineError, match="1 to 255 tokens"):
        engine.sample_many([Request((5,) * 256, SamplingSettings(), 0)])


@pytest.mark.slow
def test_a_server_that_hangs_is_given_up_and_an_interrupt_is_heard_meanwhile(server: Server) -> None:
    engine = remote(server.url, TINY, **{**QUICK, "timeout": 0.3})
    server.gate.clear()
    with pytest.raises(EngineError, match="no reply in 0.3 s"):
        engine.sample_many([request()])
    flag = threading.Timer(0.2, runtime.interrupt)
    engine._settings = engine._settings.replace(timeout=3600.0)
    flag.start()
    try:
        with pytest.raises(Interrupted):
            engine.sample_many([request()])
    finally:
        flag.join()
        runtime.clear()
    assert not server.gate.is_set()
    server.gate.set()
    assert engine.sample_many([request()])


@pytest.mark.slow
def test_the_key_is_sent_and_shown_nowhere(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THE_KEY", "s3cret-value")
    engine = remote(server.url, TINY, api_key_env="THE_KEY", **QUICK)
    assert all(headers["Authorization"] == "Bearer s3cret-value" for _, headers, _ in server.seen)
    server.faults = [lambda r, b: (401, b"no access for Bearer s3cret-value, for s3cret-value")]
    with pytest.raises(EngineError, match="answered 401") as caught:
        engine.sample_many([request()])
    shown = [repr(engine), str(engine.describe()), str(caught.value), repr(caught.value.__cause__)]
    assert not any("s3cret" in text for text in shown) and engine.describe()["api_key_env"] == "THE_KEY"
    for bad in ("", "line\nbreak", "schlüssel"):
        monkeypatch.setenv("THE_KEY", bad)
        with pytest.raises(EngineError, match="the API key in THE_KEY") as caught:
            remote(server.url, TINY, api_key_env="THE_KEY")
        assert "break" not in str(caught.value)


# --- weights, by SGLang's endpoint ----------------------------------------------------------


@pytest.mark.slow
def test_a_pair_pushes_a_whole_folder_to_sglang(server: Server, tmp_path: Path) -> None:
    learner = local(TINY, lr=1e-3)
    sampler = remote(
        server.url, TINY, weights="sglang", weights_folder=str(tmp_path / "way"), weights_dtype="bfloat16", **QUICK
    )
    both = paired(learner, sampler)
    assert {one.version for one in both.sample_many([request(n) for n in range(3)])} == {0}
    moved(learner)
    assert {one.version for one in both.sample_many([request(n) for n in range(3)])} == {1}
    first, second = server.folders
    assert first == second and {"config.json", "tokenizer.json", "model.safetensors"} <= set(first)
    parameters = sum(tensor.numel() for tensor in weights_of(learner).values())
    head = learner._model.lm_head.weight.numel() if learner._model.config.tie_word_embeddings else 0
    assert 2 * (parameters - head) < first["model.safetensors"] < 2 * (parameters - head) + 10_000
    assert list((tmp_path / "way").iterdir()) == []  # nothing is left of what was on its way
    body = server.asked("/update_weights_from_disk")[-1]
    assert body["weight_version"].endswith(":1") and body["flush_cache"]


@pytest.mark.slow
def test_after_a_push_that_failed_nothing_is_sampled_until_one_succeeds(server: Server) -> None:
    learner = local(TINY)
    sampler = remote(server.url, TINY, weights="sglang", **QUICK)
    server.refuse_weights = "size mismatch for model.norm.weight"
    with pytest.raises(EngineError, match="(?s)the push of weights failed.*size mismatch for model.norm.weight"):
        sampler.sync(learner)
    with pytest.raises(EngineError, match="the last push of weights failed; push weights again"):
        sampler.sample_many([request()])
    server.refuse_weights = ""
    sampler.load_weights(weights_of(learner), 9)
    assert sampler.sample_many([request()])[0].version == 9


@pytest.mark.slow
def test_a_server_that_lost_its_weights_is_found_out_and_a_pair_pushes_again(server: Server) -> None:
    """By a restart, or by another who pushed: the row whose writer is not known is not given out."""
    both = paired(local(TINY), remote(server.url, TINY, weights="sglang", **QUICK))
    both.sample_many([request()])
    for other in ("default", "somebody's"):
        server.tag = other
        with pytest.raises(EngineError, match="no longer has the weights that were pushed"):
            both.sample_many([request()])
        pushes = len(server.folders)
        assert both.sample_many([request()])[0].version == 0 and len(server.folders) == pushes + 1
    server.tag = "default"
    both.restart()
    assert both.sample_many([request()]) and len(server.folders) == pushes + 2
    server.tag = "somebody's"
    fresh = remote(server.url, TINY, weights="sglang", **QUICK)
    with pytest.raises(EngineError, match='somebody pushed "somebody\'s"'):
        fresh.sample_many([request()])


@pytest.mark.slow
def test_a_push_waits_for_what_is_under_way_and_holds_back_what_comes(server: Server) -> None:
    sampler = remote(server.url, TINY, weights="sglang", **QUICK)
    weights = weights_of(local(TINY))
    server.gate.clear()

    async def beside() -> list[Sample]:
        first = asyncio.ensure_future(sampler.sample(request()))
        await asyncio.sleep(0.2)
        push = asyncio.ensure_future(asyncio.to_thread(sampler.load_weights, weights, 1))
        await asyncio.sleep(0.3)
        second = asyncio.ensure_future(sampler.sample(request()))
        await asyncio.sleep(0.2)
        assert not push.done() and not server.folders
        server.gate.set()
        await push
        return [await first, await second]

    assert [one.version for one in runtime.run(beside())] == [0, 1]


@pytest.mark.slow
def test_weights_that_never_change_are_paired_only_with_a_stated_staleness(server: Server) -> None:
    learner = local(TINY, lr=1e-3)
    with pytest.raises(EngineError, match=r"weights never change.*max_staleness"):
        paired(learner, remote(server.url, TINY, **QUICK))
    both = paired(learner, remote(server.url, TINY, max_staleness=1, **QUICK))
    assert both.sample_many([request()])[0].version == 0
    moved(learner, 1)
    assert both.version == 1 and both.sample_many([request()])[0].version == 0  # honest: the learner is one ahead
    learner.commit()
    with pytest.raises(
        EngineError, match="too far from a server whose weights never change; expected at most 1 updates .*; found 2"
    ):
        both.sample_many([request()])
    assert not server.folders


def test_another_machine_needs_a_folder_that_both_see() -> None:
    with pytest.raises(EngineError, match="another machine.*weights_folder"):
        remote("http://gpu-7:8000", TINY, weights="sglang", **QUICK)


def test_the_command_says_everything_that_a_server_needs(tmp_path: Path) -> None:
    command = server_command(TINY, tmp_path / "ext", port=8123, served_name="tiny", max_model_len=256, cpu=True)
    line = str(command)
    assert "VLLM_SERVER_DEV_MODE=1" in line and f"PYTHONPATH={tmp_path / 'ext'}" in line
    for part in (
        "python -m vllm.entrypoints.openai.api_server", "--logprobs-mode processed_logprobs", "--host 127.0.0.1",
        "--worker-extension-cls workbench_vllm.WorkerExtension", "--port 8123", "--served-model-name tiny", "--enforce-eager",
    ):  # fmt: skip
        assert part in line
    assert (tmp_path / "ext" / "workbench_vllm.py").is_file()
    plain = server_command(TINY, cpu=False)
    assert "VLLM_SERVER_DEV_MODE" not in plain.env and "--enforce-eager" not in plain.argv
    with pytest.raises(SettingError, match="max_model_len"):
        server_command(TINY, max_modellen=3)


@pytest.mark.parametrize(("second", "expected"), [(-1.0, True), (-9.0, None)])
def test_log_probs_before_filters_are_told_or_unknown(second: float, expected: bool | None) -> None:
    """A model that is too sure of every prompt leaves it open; that is not the same as a server that filters."""

    async def ask(request: Request, tops: int) -> ServerReply:
        scaled = torch.log_softmax(torch.tensor([0.0, second]) / request.settings.temperature, -1).tolist()
        ids = tuple((request.seed + place) % 2 for place in range(request.settings.max_tokens))
        return ServerReply(ids, tuple(scaled[one] for one in ids), "length", "", ({0: scaled[0], 1: scaled[1]},))

    found = asyncio.run(examine(ask, [(1, 2)]))
    assert found.before_filters is expected and found.follows_temperature and found.seeded
