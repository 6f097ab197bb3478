"""Real vLLM over HTTP, on the CPU, started as `server_command` says: the whole contract of an engine, and pushes of weights."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import socket
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.patience import LONG, patience
from test_engines_vllm import TOLERANCE, asked, gap, moved, teaches

import workbench as wb
from workbench.base.errors import EngineError
from workbench.engines import Request, local, paired, remote, server_command
from workbench.engines.vllm_server.engine import VllmSettings, _shared_memory, interpreter
from workbench.engines.weights import weights_of
from workbench.testing.engines import EngineContract

TINY = "data/tiny-arith"


def can_serve() -> bool:
    """Whether the interpreter has vLLM and what its server needs beside."""
    look = "import importlib.util as u, sys; sys.exit(not all(u.find_spec(m) for m in ('vllm', 'uvicorn')))"
    return subprocess.run([interpreter(VllmSettings()), "-P", "-c", look], check=False).returncode == 0


real = pytest.mark.skipif(
    not can_serve(),
    reason="no vLLM server: pip install 'rl-workbench[vllm]' and uvicorn, or name an interpreter in WORKBENCH_VLLM_PYTHON",
)
slow = pytest.mark.slow


def free_port() -> int:
    """One that nobody is given by the system meanwhile: below the range that it gives from. vLLM binds it half a minute later."""
    while True:
        port = random.randrange(20_000, 30_000)
        with socket.socket() as free, contextlib.suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port


@contextlib.contextmanager
def started(folder: Path, *changes: tuple[str, str], extension: bool = True) -> Iterator[tuple[str, int]]:
    """A server by `server_command`, some of its words changed; ended with all that it started."""
    port = free_port()
    python = interpreter(VllmSettings())
    command = server_command(
        TINY, folder / "ext" if extension else None, port=port, cpu=True, max_model_len=256, kv_cache_memory_mb=64, python=python
    )  # fmt: skip
    argv = [dict(changes).get(word, word) for word in command.argv]
    url = f"http://127.0.0.1:{port}"
    env = {**os.environ, **command.env}
    with (folder / "log").open("wb") as log, subprocess.Popen(argv, env=env, stdout=log, stderr=log, start_new_session=True) as process:  # fmt: skip
        shared: set[Path] = set()
        try:
            end = time.monotonic() + patience(300)
            while True:
                with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=LONG):
                    break
                said = (folder / "log").read_text(errors="replace")[-3000:]
                assert process.poll() is None and time.monotonic() < end, said
                time.sleep(0.5)
            shared |= _shared_memory(process.pid)  # left behind where vLLM ends processes that are too slow for it
            yield url, process.pid
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=patience(30))
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            for path in shared:
                path.unlink(missing_ok=True)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with started(tmp_path_factory.mktemp("server")) as (made, _):
        yield made


@pytest.fixture(scope="module")
def engine(url: str) -> Any:
    return remote(url, TINY, weights="vllm")


@real
@slow
@pytest.mark.long
class TestPairedWithRemote(EngineContract):
    """The whole contract of an engine; a learner made afresh for each test is pushed to the one server."""

    @pytest.fixture(autouse=True)
    def _sampler(self, engine: Any) -> None:
        self.sampler = engine

    def make_engine(self, **settings: Any) -> Any:
        return paired(local(TINY, device="cpu", **settings), self.sampler)


@real
@slow
class TestRemoteVllm:
    @pytest.mark.long
    @pytest.mark.parametrize(
        "settings",
        [
            {"temperature": 1.5, "top_k": 5},
            *(pytest.param(one, marks=pytest.mark.long) for one in ({}, {"temperature": 0.5}, {"top_p": 0.7}, {"temperature": 0.0})),
        ],
        ids=str,
    )  # fmt: skip
    def test_log_probs_are_the_trainers(self, engine: Any, settings: dict[str, Any]) -> None:
        learner = local(TINY)
        engine.sync(learner)
        requests = asked(engine, **settings)
        assert gap(learner, requests, engine.sample_many(requests)) < TOLERANCE
        assert engine.describe()["before_filters"] and engine.describe()["server"]

    @pytest.mark.long
    def test_two_pushes_and_their_versions(self, engine: Any) -> None:
        """Prompts that are long enough to be cached, and a tied head; the learner's rows are its own after each push."""
        learner = local(TINY, lr=1e-3)
        both = paired(learner, engine)
        requests = [Request(one.ids * 10, one.settings, one.seed) for one in asked(engine)]
        for version in (0, 1, 2):
            samples = both.sample_many(requests)
            difference = gap(learner, requests, samples)
            print(f"version {version}: {difference:.1e} nats, pushed in {both.push():.2f} s")
            assert difference < TOLERANCE and {one.version for one in samples} == {version}
            moved(learner)
            assert gap(learner, requests, samples) > 0.05

    def test_greedy_tokens_and_stop_texts_are_the_local_engines(self, engine: Any) -> None:
        learner = local(TINY)
        engine.sync(learner)
        requests = asked(engine, 8, temperature=0.0)
        free = engine.sample_many(requests)
        assert [(one.ids, one.finish_reason) for one in free] == [(one.ids, one.finish_reason) for one in learner.sample_many(requests)]  # fmt: skip
        word = engine.tokenizer.decode([free[0].ids[2]])
        requests = asked(engine, 4, ignore_eos=True, temperature=0.0, stop=(word,))
        assert [one.ids for one in engine.sample_many(requests)] == [one.ids for one in learner.sample_many(requests)]

    def test_a_failed_push_is_named_and_the_next_repairs_it(self, engine: Any, url: str) -> None:
        learner = local(TINY)
        weights = weights_of(learner)
        with pytest.raises(EngineError, match="(?s)the push of weights failed.*nonsense"):
            engine.load_weights({**weights, "model.nonsense.weight": torch.zeros(2)}, 3)
        with pytest.raises(EngineError, match="push weights again"):
            engine.sample_many(asked(engine, 1))
        with pytest.raises(EngineError, match="the server is paused; found a push that failed"):
            remote(url, TINY, weights="vllm")
        engine.load_weights(weights, 4)
        requests = asked(engine)
        assert gap(learner, requests, engine.sample_many(requests)) < TOLERANCE and engine.version == 4

    def test_who_else_pushes_is_found_out(self, engine: Any, url: str, tmp_path: Path) -> None:
        both, other = paired(local(TINY), engine), remote(url, TINY, weights="vllm", weights_folder=str(tmp_path))
        requests = asked(engine, 4)
        both.sample_many(requests)
        other.load_weights(weights_of(learner := moved(local(TINY, lr=1e-3))), 7)
        assert gap(learner, requests, other.sample_many(requests)) < TOLERANCE and not list(tmp_path.iterdir())
        with pytest.raises(EngineError, match="no longer has the weights"):
            both.sample_many(requests)
        assert gap(both.learner, requests, both.sample_many(requests)) < TOLERANCE

    @pytest.mark.long
    def test_its_model_teaches_as_one_in_this_process(self, engine: Any) -> None:
        teaches(engine)

    def test_two_steps_of_grpo(self, engine: Any) -> None:
        both = paired(local(TINY, lr=1e-3), engine)
        rows = wb.rows("data/arith/train.parquet", max_prompt_length=200)
        pipe = wb.recipes.grpo(both, group_size=4, max_tokens=48)
        for step in (1, 2):
            stepper = wb.Stepper(pipe, rows.batch(8, step=step)).run()
            assert stepper.batch["policy_version"].unique().tolist() == [step - 1]
            assert stepper.trace.metrics["training/rollout_probs_diff_max"] < TOLERANCE

    def test_it_is_a_judge(self, engine: Any) -> None:
        messages = [{"role": "user", "content": "What is 2 + 3?"}]
        answer = asyncio.run(wb.engines.chat(engine).complete(messages, max_tokens=8, temperature=0.0, seed=0))
        assert answer.tokens <= 8 and answer.text and "127.0.0.1" in wb.engines.chat(engine).describe()


@real
@slow
@pytest.mark.long
def test_a_plain_server_gives_what_it_can_exactly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Raw log-probs and no way to push: temperature 1 is exact, the rest is refused, and it says how to start another."""
    monkeypatch.setenv("VLLM_API_KEY", "of-this-test")
    with started(tmp_path, ("processed_logprobs", "raw_logprobs"), extension=False) as (url, process):
        with pytest.raises(EngineError, match="weights cannot be pushed.*404.*server_command"):
            remote(url, TINY, weights="vllm", api_key_env="VLLM_API_KEY")
        with pytest.raises(EngineError, match="answered 401: .*Unauthorized"):
            remote(url, TINY)
        engine, learner = remote(url, TINY, attempts=2, api_key_env="VLLM_API_KEY"), local(TINY)
        for settings in ({}, {"top_k": 4}):
            requests = asked(engine, 8, **settings)
            assert gap(learner, requests, engine.sample_many(requests)) < TOLERANCE
        with pytest.raises(EngineError, match="--logprobs-mode processed_logprobs"):
            engine.sample_many(asked(engine, 1, temperature=0.7))
        kill = threading.Timer(0.3, os.kill, (process, signal.SIGTERM))
        kill.start()
        with pytest.raises(EngineError, match="(?s)no response.*no usable reply in 2 attempts"):
            while True:  # rows under way when it ends, or asked after
                engine.sample_many(asked(engine, 64, ignore_eos=True, max_tokens=150))
