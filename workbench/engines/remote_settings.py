"""Settings of a sampler behind HTTP, and the key that a server may want."""

from __future__ import annotations

import os
from dataclasses import dataclass
from urllib.parse import urlsplit

from workbench.config import Settings, require
from workbench.errors import EngineError, message

_HERE = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True, kw_only=True)
class RemoteSettings(Settings):
    """Settings of a sampler behind HTTP."""

    served_name: str | None = None
    """The name under which the server has the model; None: its only one, which must be called as the folder is."""
    weights: str | None = None
    """How weights are pushed: `vllm`, `sglang`, which the server must be, or None: they never change."""
    weights_folder: str | None = None
    """A folder that this process and the server see under one path, for weights on their way. None: this machine's memory
    or temporary folder, which a server on this machine, of the same user, can read."""
    weights_dtype: str | None = None
    """`float32` or `bfloat16` on the way; None: as the learner has them."""
    max_staleness: int | None = None
    """With `weights=None` and a learner beside it: how many updates behind its rows may be written. None: it is not paired."""
    version: int = 0
    """Policy version of the weights that the server was started with."""
    api_key_env: str | None = None
    """Name of the environment variable that holds the key; the key itself stands nowhere."""
    timeout: float = 600.0
    """Seconds for one attempt at one response."""
    deadline: float = 1800.0
    """Seconds for one response, all attempts together."""
    attempts: int = 5
    """Tries of a request that failed in a way that may pass."""
    max_concurrent: int = 256
    """Requests under way at a time."""
    ask_seconds: float = 30.0
    """For a question that the server answers at once."""
    push_seconds: float = 900.0
    """For a push of weights, and for the responses before it."""
    trust_remote_code: bool = False
    """Run code that comes with the tokenizer."""

    def __post_init__(self) -> None:
        require(self.weights in (None, "vllm", "sglang"), "weights", expected="'vllm', 'sglang' or None", found=self.weights)  # fmt: skip
        require(self.weights_dtype in (None, "float32", "bfloat16"), "weights_dtype", expected="float32, bfloat16 or None", found=self.weights_dtype)  # fmt: skip
        require(self.max_staleness is None or self.max_staleness >= 0, "max_staleness", expected="≥ 0", found=self.max_staleness)  # fmt: skip
        require(self.max_staleness is None or self.weights is None, "max_staleness", expected="weights=None beside it", found=self.weights)  # fmt: skip
        for name in ("timeout", "deadline", "ask_seconds", "push_seconds"):
            require(getattr(self, name) > 0, name, expected="seconds > 0", found=getattr(self, name))


def base_of(url: str) -> str:
    """`http://host:port` without `/v1`. Raises `SettingError` for anything else, and for keys in the URL."""
    parts = urlsplit(url)
    good = parts.scheme in ("http", "https") and bool(parts.hostname) and not parts.query and not parts.fragment
    require(good, "url", expected="http(s)://host[:port][/path]", found=url)
    bare = "@" not in parts.netloc
    require(bare, "url", expected="no user or key in it", found="one", do="name a variable in api_key_env")
    return url.rstrip("/").removesuffix("/v1")


def is_here(url: str) -> bool:
    """Whether a server's URL names this machine."""
    return urlsplit(url).hostname in _HERE


def authorization(name: str | None) -> dict[str, str]:
    """The header with the key in the environment variable `name`. Raises `EngineError` where it holds none, or no key."""
    if name is None:
        return {}
    key = os.environ.get(name, "")
    if not key or not key.isascii() or not key.isprintable():  # HTTP's own error would show it
        found = "nothing" if not key else "characters that no header can hold"
        raise EngineError(message(f"the API key in {name}", expected="a value", found=found, do="set it"))
    return {"Authorization": f"Bearer {key}"}
