"""The program of vLLM's own process. It imports vLLM, which sets seeds and threads of its process, and nothing of ours.

The driver (`link`) starts a copy of this file (`base.child`) under the name `workbench_vllm` in a folder of its own, since none
of our folders should be on the import path of vLLM; vLLM's workers import `WeightSync` from there by name. The two exchange
messages of JSON. Weights come as a safetensors file in memory.

The main thread steps the engine and takes messages between two steps: a push of weights waits until the requests before it are
answered and holds back those after it, so that every row is written by one version alone.
"""

from __future__ import annotations

import json
import queue
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable
from typing import Any

MODULE = "workbench_vllm"
"""This file's name where it runs."""
BEAT_SECONDS = 1.0
"""How often the process reports that it works."""


class WeightSync:
    """Methods that are added to each of vLLM's workers (`worker_extension_cls`); with tensor parallelism each takes its shard."""

    model_runner: Any

    def workbench_prepare(self) -> bool:
        """Make the sampler return log-probs before top-k and top-p; False where this vLLM cannot.

        vLLM gives them after temperature (`processed_logprobs`), but renormalised over what top-k and top-p leave, which
        no trainer computes. Here they are taken one statement earlier.
        """
        inner = getattr(getattr(self.model_runner, "sampler", None), "topk_topp_sampler", None)
        if inner is None:
            return False
        if getattr(inner, "workbench_exact", False):  # every client of a server asks for it
            return True
        sample = inner.forward

        def forward(logits: Any, generators: Any, k: Any, p: Any) -> tuple[Any, Any]:
            # sampling may write into the logits
            whole = None if k is None and p is None else logits.log_softmax(-1, dtype=logits.dtype)
            tokens, log_probs = sample(logits, generators, k, p)
            return tokens, log_probs if whole is None else whole

        inner.forward = forward
        inner.workbench_exact = True
        return True

    def workbench_load(self, path: str) -> None:
        """Load new weights in place, through vLLM's own reload: it repacks and shards them as the platform needs."""
        from safetensors import safe_open

        # opened before the reload begins: a missing file breaks nothing
        with safe_open(path, framework="pt") as file:
            names = list(file.keys())
            self.model_runner.reload_weights(weights_iterator=((name, file.get_tensor(name)) for name in names))


class Service:
    """vLLM's engine in its own process: answers the driver's messages and steps the engine."""

    def __init__(self, parent: Any) -> None:
        self._parent = parent
        self._waiting: deque[dict[str, Any]] = deque()
        self._open: set[int] = set()
        self._version = 0
        self._broken = ""
        self._beat = 0.0
        self._pooling = False
        self._engine: Any = None

    def start(self, arguments: dict[str, Any], on_cpu: dict[str, Any]) -> None:
        """Make vLLM's engine and send the driver a `ready` message about it. Raises whatever vLLM raises."""
        import vllm
        from vllm.engine.arg_utils import EngineArgs
        from vllm.platforms import current_platform
        from vllm.v1.engine.llm_engine import LLMEngine

        cpu = current_platform.is_cpu()
        arguments = {**arguments, **(on_cpu if cpu else {})}
        self._pooling = arguments.get("runner") == "pooling"
        extension = f"{MODULE}.{WeightSync.__name__}"
        made = EngineArgs(**arguments, worker_extension_cls=extension, disable_log_stats=True)
        self._engine = LLMEngine.from_engine_args(made)
        exact = not self._pooling and all(self._engine.collective_rpc("workbench_prepare"))
        config = self._engine.vllm_config.model_config
        about = {"vllm": vllm.__version__, "platform": "cpu" if cpu else current_platform.device_name, "exact": exact}
        dtype = str(config.dtype).removeprefix("torch.")
        self.say(op="ready", dtype=dtype, max_model_len=config.max_model_len, **about)

    def serve(self) -> None:
        """Handle the driver's messages and step the engine, until a `stop` message."""
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

    def _collect(self, block: bool) -> None:
        """Take all messages that are there; `block` waits for the first. Aborted requests are forgotten at once."""
        while True:
            try:
                message = json.loads(self._parent.frames.get(block=block))
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
        except Exception as error:  # noqa: BLE001 - the driver knows who asked
            self.say(op="refused", id=message["id"], error=f"{type(error).__name__}: {error}")

    def _on_sample(self, message: dict[str, Any]) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        if self._broken:
            raise RuntimeError(self._broken)
        whole = {"skip_special_tokens": False, "include_stop_str_in_output": True, "logprobs": 0, "flat_logprobs": True}
        self._ask(message, SamplingParams(**message["params"], **whole, output_kind=RequestOutputKind.FINAL_ONLY))

    def _on_classify(self, message: dict[str, Any]) -> None:
        from vllm import PoolingParams

        self._ask(message, PoolingParams(task="classify", use_activation=False))  # the default squashes the scalar

    def _ask(self, message: dict[str, Any], params: Any) -> None:
        self._engine.add_request(str(message["id"]), {"prompt_token_ids": message["ids"]}, params)
        self._open.add(message["id"])

    def _on_load(self, message: dict[str, Any]) -> None:
        """Load weights, and drop what was computed with the old ones."""
        began = time.perf_counter()
        self._broken = "the last push of weights failed half-way; push again"
        self._engine.collective_rpc("workbench_load", args=(message["path"],))
        if not self._engine.reset_prefix_cache():
            raise RuntimeError("vLLM did not reset its prefix cache after the weights were loaded")
        self._broken, self._version = "", message["version"]
        self.say(op="answer", id=message["id"], seconds=time.perf_counter() - began)

    def _on_sleep(self, message: dict[str, Any]) -> None:
        self._engine.reset_prefix_cache()
        self._engine.sleep(message["level"])
        if message["level"] == 2:
            self._broken = "vLLM's weights were dropped by sleep(level=2); push weights after wake()"
        self.say(op="answer", id=message["id"])

    def _on_wake(self, message: dict[str, Any]) -> None:
        self._engine.wake_up()
        self.say(op="answer", id=message["id"])

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
                self.say(op="answer", id=number, value=values[0], count=len(values))
                continue
            best = output.outputs[0]
            flat, reason = best.logprobs, best.finish_reason
            picked = [flat.logprobs[place] for place in flat.start_indices]  # the sampled token comes first
            answer = {"ids": list(best.token_ids), "log_probs": picked, "finish_reason": reason}
            self.say(op="answer", id=number, version=self._version, **answer)
        if time.monotonic() - self._beat > BEAT_SECONDS:
            self._beat = time.monotonic()
            self.say(op="beat")

    def say(self, **message: Any) -> None:
        """Send one message to the driver."""
        self._parent.send(json.dumps(message).encode())


_ORDERS = ("load", "sleep", "wake", "stop")


def main(parent: Any) -> None:
    """Entry point of vLLM's process: serve until a `stop` message. The process ends with the driver."""
    service = Service(parent)
    try:
        first = json.loads(parent.frames.get())
        service.start(first["arguments"], first["on_cpu"])
        service.serve()
    except BaseException as error:  # noqa: BLE001 - the driver raises it; the traceback goes to the log
        traceback.print_exc()
        kind = type(error).__name__
        service.say(op="failed", error=f"{kind}: {error}", kind=kind)
        time.sleep(BEAT_SECONDS * 10)  # the driver ends it, after it has noted which memory its processes share
        sys.exit(1)
