"""The command line of a vLLM server that `engines.remote` can sample from and push weights to."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from workbench.engines import vllm_process
from workbench.engines.loading import resolve
from workbench.engines.vllm_served import VllmSettings, arguments_of, environment_of, on_cpu_of


@dataclass(frozen=True)
class ServerCommand:
    """What starts a server: `str(command)` is a line for a shell, `argv` and `env` are for `subprocess`."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    """Variables to set beside those that are there."""

    def __str__(self) -> str:
        return " ".join([*(f"{name}={shlex.quote(value)}" for name, value in self.env.items()), shlex.join(self.argv)])


def server_command(
    model: str | Path,
    extension_folder: str | Path | None = None,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    served_name: str | None = None,
    cpu: bool | None = None,
    **settings: Any,
) -> ServerCommand:
    """vLLM's OpenAI-compatible server with the log-probs of a trainer: `print(engines.server_command("data/tiny-arith", "ext"))`.

    With `extension_folder` weights can be pushed to it: the module of the worker extension is put there (for a server on
    another machine, copy the folder), and vLLM's development endpoints are on. Those ask for no key, whatever VLLM_API_KEY
    is: whoever reaches the port can change the model, so it belongs on a private network. `cpu=None` is as here; other
    settings: `VllmSettings` (`python` is the interpreter on the server's machine, by default `python`).
    """
    chosen = VllmSettings.from_parameters(settings)
    folder = resolve(model)
    cpu = not torch.cuda.is_available() if cpu is None else cpu
    arguments = arguments_of(folder, chosen) | (on_cpu_of(chosen) if cpu else {})
    env = environment_of(folder, chosen) | {"PYTHONSAFEPATH": "1"}
    env.pop("VLLM_ENABLE_V1_MULTIPROCESSING")  # of an engine without a server
    if cpu and arguments["enforce_eager"]:
        env["TORCHDYNAMO_DISABLE"] = "1"
    arguments |= {"host": host, "port": port, "served_model_name": served_name}
    if extension_folder is not None:
        inside = Path(extension_folder).absolute()
        inside.mkdir(parents=True, exist_ok=True)
        shutil.copy(vllm_process.__file__, inside / f"{vllm_process.MODULE}.py")
        arguments["worker_extension_cls"] = f"{vllm_process.MODULE}.{vllm_process.WeightSync.__name__}"
        env |= {"PYTHONPATH": str(inside), "VLLM_SERVER_DEV_MODE": "1"}
    flags = [flag for name, value in arguments.items() for flag in _flags(name, value)]
    python = chosen.python or "python"
    return ServerCommand((python, "-m", "vllm.entrypoints.openai.api_server", *flags), env)


def _flags(name: str, value: Any) -> list[str]:
    option = name.replace("_", "-")
    if value is None:
        return []
    if isinstance(value, bool):  # what is off by default needs no flag, and trust_remote_code has none for no
        if value:
            return [f"--{option}"]
        return [f"--no-{option}"] if name == "enable_chunked_prefill" else []
    return [f"--{option}", str(value)]
