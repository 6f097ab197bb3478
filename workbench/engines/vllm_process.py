"""What runs in vLLM's own process: it imports vLLM, which sets seeds and threads of whoever imports it, and nothing of ours.

The driver (`vllm_link`) starts a copy of this file under the name `workbench_vllm` in a folder of its own, because a folder
that holds our `vllm.py` must not be on the path of who imports vLLM; vLLM's workers import `WeightSync` from there by name.
The two talk over one socket pair: frames of eight bytes of length and JSON. Weights come as a safetensors file in memory.

The engine is stepped by the main thread, which takes messages between two steps: a push of weights waits until the requests
before it are answered and holds back those after it, so that every row is written by one version alone.
"""

from __future__ import annotations

import json
import os
import queue
import shutil
import signal
import socket
import struct
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

MODULE = "workbench_vllm"
"""This file's name where it runs."""
BEAT_SECONDS = 1.0
"""While it works, the process says so this often."""
_LENGTH = struct.Struct(">Q")


def send(link: socket.socket, message: dict[str, Any]) -> None:
    """One frame. Raises `OSError` where nobody is there."""
    body = json.dumps(message).encode()
    link.sendall(_LENGTH.pack(len(body)) + body)


def receive(link: socket.socket) -> dict[str, Any] | None:
    """The next frame; None at the end of the stream."""
    head = _exactly(link, _LENGTH.size)
    body = _exactly(link, _LENGTH.unpack(head)[0]) if head is not None else None
    return None if body is None else json.loads(body)


def _exactly(link: socket.socket, count: int) -> bytes | None:
    held = bytearray()
    while len(held) < count:
        try:
            block = link.recv(min(count - len(held), 1 << 20))
        except ConnectionError:  # the other side was killed
            return None
        if not block:
            return None
        held += block
    return bytes(held)


class WeightSync:
    """Added to every one of vLLM's workers (`worker_extension_cls`); with tensor parallelism each takes its share."""

    model_runner: Any

    def workbench_prepare(self) -> bool:
        """Log-probs before top-k and top-p; whether that could be had.

        vLLM gives them after temperature (`processed_logprobs`), but renormalised over what top-k and top-p leave, which
        no trainer computes. The sampler is asked for them one statement earlier.
        """
        inner = getattr(getattr(self.model_runner, "sampler", None), "topk_topp_sampler", None)
        if inner is None:
            return False
        if getattr(inner, "workbench_exact", False):  # a server is asked by each who comes
            return True
        draw = inner.forward

        def forward(logits: Any, generators: Any, k: Any, p: Any) -> tuple[Any, Any]:
            # the draw may write into the logits
            whole = None if k is None and p is None else logits.log_softmax(-1, dtype=logits.dtype)
            tokens, log_probs = draw(logits, generators, k, p)
            return tokens, log_probs if whole is None else whole

        inner.forward = forward
        inner.workbench_exact = True
        return True

    def workbench_load(self, path: str) -> None:
        """New weights in place, through vLLM's own reload: it repacks and shards what the platform wants so."""
        from safetensors import safe_open

        with safe_open(
            path, framework="pt"
        ) as file:  # before the reload begins: a file that is not there breaks nothing
            names = list(file.keys())
            self.model_runner.reload_weights(weights_iterator=((name, file.get_tensor(name)) for name in names))


class Service:
    """vLLM's engine and its queue of messages."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._inbox: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._waiting: deque[dict[str, Any]] = deque()
        self._open: set[int] = set()
        self._version = 0
        self._broken = ""
        self._beat = 0.0
        self._pooling = False
        self._engine: Any = None

    def start(self, arguments: dict[str, Any], on_cpu: dict[str, Any]) -> None:
        """Make the engine and say what it is. Raises whatever vLLM raises."""
        import vllm
        from vllm.engine.arg_utils import EngineArgs
        from vllm.platforms import current_platform
        from vllm.v1.engine.llm_engine import LLMEngine

        cpu = current_platform.is_cpu()
        if cpu:
            arguments = {**arguments, **on_cpu}
        self._pooling = arguments.get("runner") == "pooling"
        extension = f"{MODULE}.{WeightSync.__name__}"
        made = EngineArgs(**arguments, worker_extension_cls=extension, disable_log_stats=True)
        self._engine = LLMEngine.from_engine_args(made)
        exact = not self._pooling and all(self._engine.collective_rpc("workbench_prepare"))
        config = self._engine.vllm_config.model_config
        self._say(
            op="ready",
            platform="cpu" if cpu else current_platform.device_name,
            dtype=str(config.dtype).removeprefix("torch."),
            max_model_len=config.max_model_len,
            vllm=vllm.__version__,
            exact=exact,
        )

    def serve(self) -> None:
        """Messages and steps, until told to stop."""
        threading.Thread(target=self._read, name="workbench-link", daemon=True).start()
        while True:
            self._collect(block=not self._waiting and not self._engine.has_unfinished_requests())
            while self._waiting:
                if self._waiting[0]["op"] in _ORDERS and self._engine.has_unfinished_requests():
                    break  # orders wait for the requests before them
                message = self._waiting.popleft()
                if message["op"] == "stop":
                    self._engine.engine_core.shutdown()
                    return
                self._take(message)
            if self._engine.has_unfinished_requests():
                self._step()

    def _read(self) -> None:
        """In a thread: whatever comes; a driver that is gone takes this process and its workers with it."""
        while (message := receive(self._link)) is not None:
            self._inbox.put(message)
        if Path(__file__).stem == MODULE:  # the copy's folder, which nobody else removes now
            shutil.rmtree(Path(__file__).parent, ignore_errors=True)
        os.killpg(os.getpgid(0), signal.SIGKILL)

    def _collect(self, block: bool) -> None:
        """All messages that are there, of which `block` waits for the first; what is given up is forgotten at once."""
        while True:
            try:
                message = self._inbox.get(block=block)
            except queue.Empty:
                return
            block = False
            if message["op"] != "abort":
                self._waiting.append(message)
                continue
            gone = set(message["ids"])
            self._waiting = deque(one for one in self._waiting if one.get("id") not in gone)
            self._engine.abort_request([str(number) for number in gone & self._open])
            self._open -= gone

    def _take(self, message: dict[str, Any]) -> None:
        act: Callable[[dict[str, Any]], None] = getattr(self, f"_on_{message['op']}")
        try:
            act(message)
        except Exception as error:  # noqa: BLE001 - said to the driver, which knows who asked
            self._say(op="refused", id=message["id"], error=said(error))

    def _on_sample(self, message: dict[str, Any]) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        if self._broken:
            raise RuntimeError(self._broken)
        params = SamplingParams(
            **message["params"],
            logprobs=0,
            flat_logprobs=True,
            skip_special_tokens=False,
            include_stop_str_in_output=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        self._ask(message, {"prompt_token_ids": message["ids"]}, params)

    def _on_classify(self, message: dict[str, Any]) -> None:
        from vllm import PoolingParams

        params = PoolingParams(task="classify", use_activation=False)  # the default squashes the scalar
        self._ask(message, {"prompt_token_ids": message["ids"]}, params)

    def _ask(self, message: dict[str, Any], prompt: Any, params: Any) -> None:
        self._engine.add_request(str(message["id"]), prompt, params)
        self._open.add(message["id"])

    def _on_load(self, message: dict[str, Any]) -> None:
        """Weights, and nothing that was computed with the old ones is kept."""
        began = time.perf_counter()
        self._broken = "the last push of weights failed half-way; push again"
        self._engine.collective_rpc("workbench_load", args=(message["path"],))
        if not self._engine.reset_prefix_cache():
            raise RuntimeError("vLLM did not drop its prefix cache")
        self._broken, self._version = "", message["version"]
        self._say(op="answer", id=message["id"], seconds=time.perf_counter() - began)

    def _on_sleep(self, message: dict[str, Any]) -> None:
        self._engine.reset_prefix_cache()
        self._engine.sleep(message["level"])
        if message["level"] == 2:
            self._broken = "its weights were dropped by sleep(level=2); push weights after wake()"
        self._say(op="answer", id=message["id"])

    def _on_wake(self, message: dict[str, Any]) -> None:
        self._engine.wake_up(message["tags"])
        self._say(op="answer", id=message["id"])

    def _step(self) -> None:
        for output in self._engine.step():
            if not output.finished:
                continue
            number = int(output.request_id)
            if number not in self._open:  # given up in the meantime
                continue
            self._open.discard(number)
            if self._pooling:
                values = output.outputs.data.flatten().tolist()
                self._say(op="answer", id=number, value=values[0], count=len(values))
                continue
            best = output.outputs[0]
            drawn = list(best.token_ids)
            flat = best.logprobs
            picked = [flat.logprobs[place] for place in flat.start_indices]  # the sampled token stands first
            self._say(
                op="answer",
                id=number,
                ids=drawn,
                log_probs=picked,
                finish_reason=best.finish_reason,
                version=self._version,
            )
        if time.monotonic() - self._beat > BEAT_SECONDS:
            self._beat = time.monotonic()
            self._say(op="beat")

    def _say(self, **message: Any) -> None:
        send(self._link, message)


_ORDERS = ("load", "sleep", "wake", "stop")


def said(error: BaseException) -> str:
    """`Type: message` of an error."""
    return f"{type(error).__name__}: {error}"


def main() -> int:
    """`python workbench_vllm.py FD`."""
    link = socket.socket(fileno=int(sys.argv[1]))
    link.set_inheritable(False)
    service = Service(link)
    try:
        first = receive(link)
        if first is None:
            return 1
        service.start(first["arguments"], first["on_cpu"])
        service.serve()
    except BaseException as error:  # noqa: BLE001 - said to the driver; the traceback goes to the log
        traceback.print_exc()
        send(link, {"op": "failed", "error": said(error), "kind": type(error).__name__})
        time.sleep(BEAT_SECONDS * 10)  # the driver ends it, and first looks what memory its processes share
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
