"""Real vLLM behind the Sampler protocol: prompt ids in, token ids and log-probs out, weights pushed in place.

vLLM lives in a process of its own (`vllm_process`), since in the notebook's it would reset seeds and threads. The log-probs are
those that the trainer computes: after temperature, before top-k and top-p. Nothing of vLLM is imported here, so that the
interpreter that runs it may be another one (`python=`, or WORKBENCH_VLLM_PYTHON).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from workbench import background
from workbench.engines import lora
from workbench.engines.loading import resolve
from workbench.engines.protocol import Request, Sample
from workbench.engines.vllm_served import Served, VllmSettings, wait
from workbench.engines.weights import in_memory, weights_of
from workbench.errors import EngineError, message


class VllmEngine(Served):
    """A Sampler whose weights are pushed to it; see `engines.protocol` and `engines.paired`."""

    def __init__(self, folder: str | Path, settings: VllmSettings, *, path: str, **switches: Any) -> None:
        self.template_switches = switches
        self.version = 0
        super().__init__(folder, settings, path=path)

    def _start(self) -> None:
        super()._start()
        self.version = 0  # of the weights in the folder

    # --- Sampler ----------------------------------------------------------------------------

    async def sample(self, request: Request) -> Sample:
        """One response; requests of one time are batched by vLLM.

        Raises `EngineError` for a request that vLLM refuses, `WorkerLost` where its process dies, `Interrupted` where
        the work is asked to stop; what was asked is then aborted.
        """
        background.check()
        self._check(request)
        told = await asyncio.wrap_future(
            self._ask("sample", stoppable=True, ids=list(request.ids), params=self._parameters(request))
        )
        if told["finish_reason"] not in ("stop", "length", "abort"):
            raise EngineError(message("vLLM did not finish a response", found=told["finish_reason"]))
        return Sample(tuple(told["ids"]), tuple(told["log_probs"]), told["finish_reason"], told["version"])

    def sample_many(self, requests: Sequence[Request]) -> list[Sample]:
        """All responses, in order: the synchronous door."""
        return background.run_all(self.sample, requests)

    def _check(self, request: Request) -> None:
        s, longest = request.settings, self.max_length
        wrong = [token for token in request.ids if not 0 <= token < self._rows]
        if wrong:  # vLLM's engine would die of it
            raise EngineError(message(f"token id {wrong[0]} in a prompt", expected=f"0 to {self._rows - 1}"))
        if not request.ids or (longest is not None and len(request.ids) >= longest):
            expected = f"1 to {(longest or 0) - 1} tokens, max_model_len less one"
            raise EngineError(message("a prompt for vLLM", expected=expected, found=len(request.ids)))
        if 0 < s.temperature < 0.01:
            raise EngineError(message("temperature", expected="0 or ≥ 0.01, vLLM's smallest", found=s.temperature))
        if (s.top_p < 1 or s.top_k > 0) and not self._about["exact"]:
            raise EngineError(
                message(
                    "top_p and top_k: this vLLM does not give the log-probs before them, which a trainer needs",
                    do="sample without, or set env={'VLLM_USE_V2_MODEL_RUNNER': '0'}",
                )
            )

    def _parameters(self, request: Request) -> dict[str, Any]:
        s = request.settings
        return {
            "temperature": s.temperature,
            "top_p": s.top_p,
            "top_k": max(s.top_k, 0),
            "max_tokens": s.max_tokens,
            "seed": request.seed,
            "stop": list(s.stop),
            "stop_token_ids": [] if s.ignore_eos else sorted(self._eos),
            "ignore_eos": s.ignore_eos,
            "detokenize": bool(s.stop),
        }

    # --- weights ----------------------------------------------------------------------------

    def load_weights(self, weights: Mapping[str, torch.Tensor], version: int) -> float:
        """Put all weights of a model, by their Hugging Face names, in the place of vLLM's; the seconds that it took.

        Requests asked before it are answered by the old weights, those after it by the new ones, which are `version`.
        Weights that are tied stand in `weights` under both names. Where it fails the engine refuses to sample until
        another push succeeds.
        """
        began = time.perf_counter()
        dtype = getattr(torch, self._about["dtype"])
        with in_memory(weights, dtype) as file:
            wait(self._ask("load", path=file, version=version), self._settings.start_seconds, "the push has not ended")
        self.version = version
        return time.perf_counter() - began

    def sync(self, learner: Any) -> float:
        """The learner's weights and version, adapters merged; the seconds that it took."""
        return self.load_weights(weights_of(learner), learner.version)

    def sleep(self, level: int = 1) -> None:
        """Give the GPU's memory back: 1 keeps the weights in host memory, 2 drops them (push after waking).

        Raises `EngineError` on a CPU, which has no sleep mode, and where it was not asked for (`sleep_mode=True`).
        """
        if self._about["platform"] == "cpu":
            raise EngineError(message("sleep", expected="a GPU", found="vLLM on a CPU, which has no sleep mode"))
        if not self._settings.sleep_mode:
            raise EngineError(message("sleep", expected="sleep_mode=True when the engine is made", found=False))
        wait(self._ask("sleep", level=level), self._settings.stall_seconds, "vLLM does not fall asleep")

    def wake(self) -> None:
        """Take the memory again; a no-op where it does not sleep."""
        if self._about["platform"] != "cpu" and self._settings.sleep_mode:
            wait(self._ask("wake", tags=None), self._settings.stall_seconds, "vLLM does not wake")

    def describe(self) -> dict[str, Any]:
        """Path and settings, and what runs them, for a run's record; no environment, which may hold secrets."""
        chosen = {name: value for name, value in self._settings.to_dict().items() if name not in ("env", "python")}
        about = {name: self._about.get(name) for name in ("vllm", "platform", "dtype")}
        return {"path": self.path, **chosen, **about}

    def __repr__(self) -> str:
        return f"VllmEngine({self.path!r}: {self.about()}, version {self.version})"


def vllm(path: str | Path, *, template_switches: Any = None, **settings: Any) -> VllmEngine:
    """A model served by vLLM in a process of its own: `vllm("data/tiny-arith", max_model_len=256)`.

    `path` as for `engines.local`. `template_switches` go to the chat template. Other settings: `VllmSettings`; unknown names
    are refused. Pair it with a learner: `engines.paired(learner, sampler)`. Raises `EngineError` where there is no such
    model, vLLM is not installed, or does not start, with what vLLM said.
    """
    chosen = VllmSettings.from_parameters(settings)
    folder = resolve(path)
    if lora.base_of(Path(folder)) is not None:
        raise EngineError(
            message(
                f"{str(path)!r} is an adapter",
                expected="a whole model",
                do="open its base, and pair it with a learner on the adapter: merged weights are pushed",
            )
        )
    return VllmEngine(folder, chosen, path=str(path), **(template_switches or {}))
