"""How weights get into a server that runs elsewhere: as a file that both see, read at a moment when nothing is sampled."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from workbench.engines.remote_settings import RemoteSettings, is_here
from workbench.engines.weights import in_memory, write_to
from workbench.errors import EngineError, message
from workbench.http_client import Client

_HEAD, _EMBEDDINGS = "lm_head.weight", "model.embed_tokens.weight"
UNTOUCHED = "default"
"""What servers call weights that nobody pushed."""


class Pusher:
    """The endpoints of one server; `kind` is `vllm` or `sglang`.

    vLLM wants its development endpoints and our worker extension (`engines.server_command` says how it is started); of
    SGLang `/update_weights_from_disk` is used, which any of its servers has.
    """

    def __init__(self, base: str, kind: str, model: Path, settings: RemoteSettings, headers: Mapping[str, str]) -> None:
        self._base, self._kind, self._model, self._settings = base, kind, model, settings
        # whatever fails half-way is the caller's to push again, whole
        self._client = Client(attempts=1, deadline=settings.push_seconds, max_concurrent=4, headers=headers)
        if settings.weights_folder is None and not is_here(base):
            raise EngineError(
                message(
                    f"weights for {base}, which is another machine",
                    expected="weights_folder, a folder that both machines see under one path",
                    do="name one",
                )
            )

    async def prepare(self) -> None:
        """What must be so before anything is sampled. Raises `Refused` or `Unreachable` where the server cannot be pushed to."""
        if self._kind == "vllm":
            if (await self._client.get(f"{self._base}/is_paused", timeout=self._settings.ask_seconds))["is_paused"]:
                raise EngineError(
                    message(
                        "the server is paused",
                        found="a push that failed half-way, or another that goes on",
                        do="push again from where it came, or start the server again",
                    )
                )
            await self._post("/collective_rpc", {"method": "workbench_prepare"})

    async def tag(self) -> str | None:
        """What the server calls its weights now; None for SGLang, whose every reply says it."""
        if self._kind != "vllm":
            return None
        told = await self._client.get(f"{self._base}/weight_info", timeout=self._settings.ask_seconds)
        return str(told["weight_version"])

    @contextmanager
    def written(self, weights: Mapping[str, torch.Tensor]) -> Iterator[str]:
        """Inside, the weights lie where the server can read them: a file for vLLM, a model's folder for SGLang."""
        dtype = getattr(torch, self._settings.weights_dtype) if self._settings.weights_dtype else None
        root = self._settings.weights_folder
        if self._kind == "vllm" and root is None:
            with in_memory(weights, dtype) as path:
                yield path
            return
        if root is not None:
            Path(root).mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix="workbench-weights-", dir=root))
        try:
            folder.chmod(0o755)  # a server of another user reads it, too
            if self._kind == "sglang":
                weights = self._as_folder(folder, weights)
            with (folder / "model.safetensors").open("wb") as file:
                write_to(file, weights, dtype)
                file.flush()
                os.fsync(file.fileno())  # on a network's folder others see it only then
            yield str(folder if self._kind == "sglang" else folder / "model.safetensors")
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _as_folder(self, folder: Path, weights: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """The model's small files beside the weights; of a tied head there is one copy, as in every such folder."""
        for file in self._model.glob("*.json") if self._model.is_dir() else ():
            if not file.name.endswith(".index.json"):
                shutil.copy(file, folder)
        head, embeddings = weights.get(_HEAD), weights.get(_EMBEDDINGS)
        tied = head is not None and embeddings is not None and head.shape == embeddings.shape
        if tied and torch.equal(head, embeddings):  # type: ignore[arg-type]
            return {name: tensor for name, tensor in weights.items() if name != _HEAD}
        return weights

    async def push(self, path: str, tag: str) -> None:
        """New weights in place, nothing kept that the old ones computed, and `tag` as their name.

        Raises `Refused` or `Unreachable`; a vLLM that was paused then stays so, since a request to half of a model would
        end it for good, until a push succeeds.
        """
        if self._kind == "sglang":  # it waits for what it is answering, and drops its cache
            body = {"model_path": path, "weight_version": tag, "flush_cache": True}
            return await self._post("/update_weights_from_disk", body, _successful)
        await self._post("/pause?mode=wait")
        seconds = self._settings.push_seconds
        await self._post("/collective_rpc", {"method": "workbench_load", "args": [path], "timeout": seconds})
        await self._post("/reset_prefix_cache", None, _successful)
        await self._post("/update_weight_version", {"new_version": tag})
        await self._post("/resume")

    async def _post(self, path: str, body: Any = None, read: Any = lambda reply: None) -> None:
        await self._client.post(f"{self._base}{path}", body, timeout=self._settings.push_seconds, read=read)


def _successful(reply: Any) -> None:
    if not reply["success"]:
        raise ValueError(f"no success, but {str(reply)[:200]}")
