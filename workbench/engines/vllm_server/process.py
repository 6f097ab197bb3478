"""The program of vLLM's own process. It imports vLLM, which sets seeds and threads of its process, and nothing of ours.

The driver (`engine.VllmLink`) starts a copy of this file (`base.child`) under the name `workbench_vllm` in a folder of
its own, since none of our folders should be on the import path of vLLM; vLLM's workers import `WorkerExtension` from
there by name. The two exchange messages of JSON. Weights come in buckets: in shared memory, by CUDA IPC, or by
broadcast.

The main thread steps the engine and takes messages between two steps, in the order in which they were sent.
"""

from __future__ import annotations

import base64
import contextlib
import datetime
import importlib.util
import json
import math
import queue
import sys
import time
import traceback
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MODULE = "workbench_vllm"
"""This file's name where it runs."""
BEAT_SECONDS = 1.0
"""How often the process reports that it works."""


GROUP_SECONDS = 120.0
"""Longest that a process of a broadcast waits for another."""


@dataclass(frozen=True)
class Piece:
    """Some rows of one tensor in a bucket of weights: which rows they are, and where in the bucket their bytes are."""

    name: str
    """By Hugging Face's names."""
    shape: Sequence[int]
    """Of the whole tensor."""
    dtype: str
    """Of the bytes in the bucket: `bfloat16`."""
    first: int
    """First of the rows (indices of the first dimension)."""
    rows: int
    offset: int
    """Byte of the bucket where they begin."""
    tied: bool = False
    """Whether the bytes are those of another name, which has written them."""

    @property
    def nbytes(self) -> int:
        """Size of these rows in bytes."""
        import torch

        return self.rows * math.prod(self.shape[1:]) * getattr(torch, self.dtype).itemsize

    def within(self, memory: Any) -> Any:
        """View the rows [rows, …] inside a bucket's bytes (a uint8 tensor), without a copy."""
        import torch

        flat = memory[self.offset : self.offset + self.nbytes].view(getattr(torch, self.dtype))
        return flat.view(self.rows, *self.shape[1:]) if self.shape else flat.view(())


def mapped(path: str, nbytes: int, *, write: bool = False) -> Any:
    """Map the first `nbytes` of a file as a uint8 tensor, without a copy; unless `write`, changes stay in this process."""
    import torch

    return torch.from_file(path, shared=write, size=nbytes, dtype=torch.uint8)


def device_name(device: Any) -> str:
    """Return a GPU's UUID, which is the same in all processes of its machine; empty for a CPU."""
    import torch

    return str(torch.cuda.get_device_properties(device).uuid) if torch.device(device).type == "cuda" else ""


def ipc_handle(memory: Any) -> list[Any]:
    """Export a CUDA tensor of bytes to another process: torch's CUDA IPC handle, in a form that JSON can hold."""
    _, *handle = memory.untyped_storage()._share_cuda_()
    return [one.hex() if isinstance(one, bytes) else one for one in handle]


def ipc_opened(handle: Sequence[Any], nbytes: int, device: Any) -> Any:
    """Open the bytes that another process on the same GPU has shared by `ipc_handle`, as a uint8 tensor."""
    import torch

    parts = [bytes.fromhex(one) if isinstance(one, str) else one for one in handle]
    storage = torch.UntypedStorage._new_shared_cuda(torch.device(device).index or 0, *parts)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)[:nbytes]


def joined(host: str, port: int, rank: int, size: int, backend: str, *, listen: Any = None) -> Any:
    """Join a separate process group for broadcasts of weights: rank 0 is the learner's process, the others are the
    samplers'."""
    from torch import distributed

    wait = datetime.timedelta(seconds=GROUP_SECONDS)
    given = {} if listen is None else {"is_master": True, "master_listen_fd": listen}
    store = distributed.TCPStore(host, port, timeout=wait, wait_for_workers=False, **given)
    if backend == "gloo":
        group: Any = distributed.ProcessGroupGloo(store, rank, size, wait)
    else:
        options = distributed.ProcessGroupNCCL.Options()
        options._timeout = wait
        group = distributed.ProcessGroupNCCL(store, rank, size, options)
    return group, store  # which lives as long as the group


def broadcast(group: Any, memory: Any) -> None:
    """Send rank 0's bytes to all ranks of the group, into their `memory`."""
    from torch import distributed

    options = distributed.BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 0
    group.broadcast([memory], options).wait()


def received(place: Mapping[str, Any], device: Any, group: Any) -> Any:
    """Return a bucket's bytes as a uint8 tensor, from a file, by CUDA IPC or by broadcast, as `place` says."""
    import torch

    if "file" in place:
        return mapped(place["file"], place["nbytes"])
    if "ipc" in place:
        return ipc_opened(place["ipc"][device_name(device)], place["nbytes"], device)
    memory = torch.empty(place["nbytes"], dtype=torch.uint8, device=device)
    broadcast(group[0], memory)
    return memory


class WorkerExtension:
    """Methods that are added to each of vLLM's workers (`worker_extension_cls`), to load pushed weights; under tensor
    parallelism each worker keeps its shard."""

    model_runner: Any
    vllm_config: Any
    device: Any
    rank: int
    add_lora: Any
    remove_lora: Any
    list_loras: Any

    def workbench_prepare(self) -> bool:
        """Make the sampler return the policy's log-probs, of logits / temperature; False where this vLLM cannot.

        vLLM gives them after temperature (`processed_logprobs`), but after penalties and masks, too, and renormalised over what
        min-p, top-k and top-p leave, which no trainer computes. Here they are computed from the model's own logits.
        """
        sampler: Any = getattr(self.model_runner, "sampler", None)
        if getattr(sampler, "topk_topp_sampler", None) is None or not hasattr(sampler, "apply_logits_processors"):
            return False
        if getattr(sampler, "workbench_exact", False):  # every client of a server asks for it
            return True
        from vllm.v1.worker import gpu_model_runner as runner

        raw: list[Any] = []
        free: list[Any] = []
        alter, sample, hold = sampler.apply_logits_processors, sampler.sample, runner.apply_grammar_bitmask

        def held(scheduled: Any, grammars: Any, batch: Any, logits: Any) -> None:
            free[:] = [logits.float().clone()]
            hold(scheduled, grammars, batch, logits)

        def altered(logits: Any, about: Any, *more: Any, **named: Any) -> Any:
            # what follows writes into the logits, and what holds rows to a JSON schema has
            raw[:] = [free.pop() if free else logits.clone() if _limited(about) else None]
            return alter(logits, about, *more, **named)

        def sampled(logits: Any, about: Any, *more: Any, **named: Any) -> tuple[Any, Any]:
            tokens, log_probs = sample(logits, about, *more, **named)
            whole = raw.pop() if raw else None
            if whole is not None and log_probs is not None:
                if about.temperature is not None:
                    whole = sampler.apply_temperature(whole, about.temperature, about.all_random)
                log_probs = whole.log_softmax(-1, dtype=whole.dtype)
            return tokens, log_probs

        sampler.apply_logits_processors, sampler.sample, runner.apply_grammar_bitmask = altered, sampled, held
        sampler.workbench_exact = True
        return True

    def workbench_device(self) -> str:
        """Name of this worker's GPU; empty on a CPU."""
        return device_name(self.device)

    def workbench_join(self, host: str, port: int, first: int, size: int, backend: str) -> None:
        """Join the process group of a broadcast, as rank `first` + this worker's rank."""
        self.workbench_group = joined(host, port, first + self.rank, size, backend)

    def workbench_adapter(self, number: int, path: str) -> bool:
        """Load a LoRA adapter from a peft folder over the base weights, in place of the previous one; returns whether
        vLLM lists it."""
        before = self.list_loras()
        self.add_lora(_adapter(number, path))
        for other in before:
            self.remove_lora(other)
        return number in self.list_loras()

    # Below, vLLM's layer-wise reload: it repacks and shards weights as the platform needs. It wants to know the engine's
    # configuration, as at the first load (fused experts and quantised layers ask for it).

    @contextlib.contextmanager
    def _configured(self) -> Iterator[Any]:
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(self.vllm_config):
            yield self.model_runner.get_model()

    def workbench_begin(self, names: Sequence[str]) -> None:
        """Begin to load weights; until `workbench_end` the model's outputs are meaningless."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        self.workbench_cancel()  # what is left of a push that broke off
        with self._configured() as model:
            self.workbench_lacks = set(names)
            self.workbench_own = {name.replace(".base_layer.", ".") for name, _ in model.named_parameters()}
            initialize_layerwise_reload(model)
            self.workbench_open = True

    def workbench_take(self, pieces: Sequence[Mapping[str, Any]], place: Mapping[str, Any]) -> None:
        """Load a bucket of whole tensors into the model."""
        memory = received(place, self.device, getattr(self, "workbench_group", None))
        tensors = [(one.name, one.within(memory)) for one in (Piece(**piece) for piece in pieces)]
        with self._configured() as model:
            loaded = model.load_weights(iter(tensors))
        self.workbench_lacks -= {name for name, _ in tensors}
        # None: a model that does not say what it has loaded
        self.workbench_own = self.workbench_own - loaded if loaded is not None else set()

    def workbench_end(self) -> list[str]:
        """End a push; returns the names of tensors that did not arrive, and of the model's own weights that nothing was
        loaded into."""
        self.workbench_cancel()
        quantised = self.vllm_config.model_config.quantization is not None  # has scales that no trainer knows
        return sorted(self.workbench_lacks | (set() if quantised else self.workbench_own))

    def workbench_cancel(self) -> None:
        """Finish vLLM's layer-wise reload with whatever was loaded, so that the model is in one piece again."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        if getattr(self, "workbench_open", False):
            self.workbench_open = False
            with self._configured() as model:
                finalize_layerwise_reload(model, self.vllm_config.model_config)
            for reset in ("reset_lora_state", "reset_encoder_cache", "reset_mm_cache"):
                getattr(self.model_runner, reset, lambda: None)()


_SPACE = 16
"""As `local_engine.grammar` has it: without a limit a weak model writes nothing else."""
_UNUSED = ("lmformatenforcer", "outlines_core")
"""What vLLM imports before it follows a schema with xgrammar, and does not use then; its CPU builds do without."""


class Service:
    """vLLM's engine in its own process: answers the driver's messages and steps the engine."""

    def __init__(self, parent: Any) -> None:
        self._parent = parent
        self._open: set[int] = set()
        self._said: dict[int, int] = {}
        """Number of an open request → how many of its tokens the driver knows, where it wants them one by one."""
        self._beat = 0.0
        self._pooling = False
        self._engine: Any = None

    def start(self, arguments: dict[str, Any], on_cpu: dict[str, Any]) -> None:
        """Create vLLM's engine and send the driver a `ready` message with its version, dtype and devices. Raises
        whatever vLLM raises."""
        import vllm
        from vllm.engine.arg_utils import EngineArgs
        from vllm.platforms import current_platform
        from vllm.v1.engine.llm_engine import LLMEngine

        cpu = current_platform.is_cpu()
        arguments = {**arguments, **(on_cpu if cpu else {})}
        self._pooling = arguments.get("runner") == "pooling"
        extension = f"{MODULE}.{WorkerExtension.__name__}"
        unknown = sorted(set(arguments) - set(EngineArgs.__dataclass_fields__))
        if unknown:
            raise TypeError(
                f"vLLM {vllm.__version__} has no argument {', '.join(unknown)}; {_nearest(unknown, EngineArgs)}"
            )
        made = EngineArgs(**arguments, worker_extension_cls=extension, disable_log_stats=True)
        self._engine = LLMEngine.from_engine_args(made)
        exact = not self._pooling and all(self._engine.collective_rpc("workbench_prepare"))
        config = self._engine.vllm_config.model_config
        about = {"vllm": vllm.__version__, "platform": "cpu" if cpu else current_platform.device_name, "exact": exact}
        dtype = str(config.dtype).removeprefix("torch.")
        about["devices"] = self._engine.collective_rpc("workbench_device")
        self.say(op="ready", dtype=dtype, max_model_len=config.max_model_len, **about)

    def serve(self) -> None:
        """Handle the driver's messages and step the engine, until a `stop` message."""
        while True:
            unfinished = self._engine.has_unfinished_requests()
            with contextlib.suppress(queue.Empty):
                while True:
                    message = json.loads(self._parent.frames.get(block=not unfinished))
                    if message["op"] == "stop":
                        self._engine.engine_core.shutdown()
                        return
                    self._take(message)
                    unfinished = True  # or soon: what else has been sent comes first
            if self._engine.has_unfinished_requests():
                self._step()

    def _take(self, message: dict[str, Any]) -> None:
        act: Callable[[dict[str, Any]], None] = getattr(self, f"_on_{message['op']}")
        try:
            act(message)
        except Exception as error:  # noqa: BLE001 - the driver knows who asked
            self.say(op="refused", id=message["id"], error=f"{type(error).__name__}: {error}")

    def _on_sample(self, message: dict[str, Any]) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        kind = RequestOutputKind.CUMULATIVE if message["streams"] else RequestOutputKind.FINAL_ONLY
        answer = {"logprobs": message["tops"], "flat_logprobs": True, "output_kind": kind}
        held = None if message["schema"] is None else self._held(message["schema"])
        params = SamplingParams(**message["params"], **answer, structured_outputs=held)
        self._ask(message, params, None if message["adapter"] is None else _adapter(*message["adapter"]))

    def _held(self, schema: str) -> Any:
        """Return vLLM's setting that holds a response to a JSON schema, with at most `_SPACE` white space characters between
        two parts where xgrammar follows it; vLLM itself sets no limit."""
        from vllm.sampling_params import StructuredOutputsParams

        for name in _UNUSED:
            if name not in sys.modules and importlib.util.find_spec(name) is None:
                sys.modules[name] = types.ModuleType(name)
                vars(sys.modules[name])["__getattr__"] = lambda wanted: object
        if self._engine.vllm_config.structured_outputs_config.backend in ("auto", "xgrammar"):
            with contextlib.suppress(
                Exception
            ):  # vLLM says what is wrong with the schema, or has another that reads it
                grammar = importlib.import_module("xgrammar").Grammar.from_json_schema(
                    schema, max_whitespace_cnt=_SPACE
                )
                return StructuredOutputsParams(grammar=str(grammar))
        return StructuredOutputsParams(json=schema)

    def _on_classify(self, message: dict[str, Any]) -> None:
        from vllm import PoolingParams

        self._ask(message, PoolingParams(task="classify", use_activation=False))  # the default squashes the scalar

    def _ask(self, message: dict[str, Any], params: Any, adapter: Any = None) -> None:
        prompt = {"prompt_token_ids": message["ids"]}
        self._engine.add_request(str(message["id"]), prompt, params, lora_request=adapter)
        self._open.add(message["id"])

    def _on_abort(self, message: dict[str, Any]) -> None:
        aborted = self._open & set(message["ids"])
        self._engine.abort_request([str(number) for number in aborted])
        self._open -= aborted
        self._said = {number: count for number, count in self._said.items() if number in self._open}

    def _on_call(self, message: dict[str, Any]) -> None:
        """Call a method of vLLM's engine and send its result as the answer."""
        value = getattr(self._engine, message["method"])(*message["arguments"])
        self.say(op="answer", id=message["id"], value=value)

    def _step(self) -> None:
        for output in self._engine.step():
            number = int(output.request_id)
            if number not in self._open:  # given up in the meantime
                continue
            if not output.finished:
                ids = output.outputs[0].token_ids
                self.say(op="tokens", id=number, ids=list(ids[self._said.get(number, 0) :]))
                self._said[number] = len(ids)
                continue
            self._open.discard(number)
            self._said.pop(number, None)
            if self._pooling:
                values = output.outputs.data.flatten().tolist()
                self.say(op="answer", id=number, value=values[0], count=len(values))
                continue
            best = output.outputs[0]
            flat, reason = best.logprobs, best.finish_reason
            picked = [flat.logprobs[place] for place in flat.start_indices]  # the sampled token comes first
            answer = {"ids": list(best.token_ids), "log_probs": picked, "finish_reason": reason}
            if len(flat.logprobs) > len(picked):
                answer["tops"] = _places(flat)
            if output.prompt_logprobs is not None:
                answer["prompt"] = _places(output.prompt_logprobs)
            if (experts := getattr(best, "routed_experts", None)) is not None:
                packed = base64.b64encode(experts.astype("<i2").tobytes()).decode()
                answer |= {"experts": packed, "experts_shape": list(experts.shape)}
            self.say(op="answer", id=number, **answer)
        if time.monotonic() - self._beat > BEAT_SECONDS:
            self._beat = time.monotonic()
            self.say(op="beat")

    def say(self, **message: Any) -> None:
        """Send one message to the driver."""
        self._parent.send(json.dumps(message).encode())


def _places(flat: Any) -> list[list[Any]]:
    """Return the token ids and the log-probs at each place of vLLM's flat log-probs."""
    spans = [slice(*ends) for ends in zip(flat.start_indices, flat.end_indices, strict=True)]
    return [[flat.token_ids[one], flat.logprobs[one]] for one in spans]


def _limited(about: Any) -> bool:
    """Whether a batch's `SamplingMetadata` limits or penalises the choice of a row's tokens."""
    processors = [*about.logitsprocs.argmax_invariant, *about.logitsprocs.non_argmax_invariant]
    busy = any(getattr(one, "min_p_count", 0) or getattr(one, "min_toks", None) for one in processors)
    return busy or not about.no_penalties or about.top_k is not None or about.top_p is not None


def _adapter(number: int, path: str) -> Any:
    from vllm.lora.request import LoRARequest

    return LoRARequest(f"workbench-{number}", number, path)


def _nearest(unknown: Sequence[str], known: Any) -> str:
    """Name the arguments that vLLM's engine has, those most similar to the unknown ones first."""
    import difflib

    names = sorted(known.__dataclass_fields__)
    near = [one for name in unknown for one in difflib.get_close_matches(name, names)]
    return f"it has {', '.join(dict.fromkeys([*near, *names]))}"


def main(parent: Any) -> None:
    """Run vLLM's process: serve the driver until a `stop` message. The process ends with the driver."""
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
