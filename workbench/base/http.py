"""JSON over HTTP with retries and deadlines: one client for remote sandboxes, judges and reward models."""

from __future__ import annotations

import asyncio
import random
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar

from workbench.base.config import require
from workbench.base.distribution import optional
from workbench.base.errors import ForeignError

T = TypeVar("T")

AGAIN = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
"""HTTP statuses after which a request is sent again."""
MAX_REPLY = 64 << 20
"""Most bytes of a reply; a longer reply is refused."""


class Unreachable(ForeignError):
    """The service gave no usable reply within the allowed attempts and the deadline."""


class Refused(ForeignError):
    """The service refused the request with a status that a retry would not change (such as 400); the request is not
    sent again.
    """


class Client:
    """HTTP client that posts and gets JSON, and retries after errors that may be temporary.

    At most `max_concurrent` posts run at a time, each with up to `attempts` tries within `deadline` seconds. The pauses
    between tries double from `wait` seconds with full jitter, or are as long as `Retry-After`. Errors name the host and
    the last cause.
    """

    def __init__(
        self,
        *,
        attempts: int = 5,
        deadline: float = 300.0,
        wait: float = 0.5,
        max_concurrent: int = 64,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        require(max_concurrent >= 1, "max_concurrent of a client", expected="≥ 1 at a time", found=max_concurrent)
        require(attempts >= 1, "attempts of a client", expected="at least 1 try of a request", found=attempts)
        require(deadline > 0, "deadline of a client", expected="a number of seconds > 0", found=deadline)
        self.attempts, self.deadline, self.wait = attempts, deadline, wait
        self._headers = dict(headers or {})
        self.max_concurrent = max_concurrent
        # connections and places belong to the loop that made them
        self._clients: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        self._places: weakref.WeakKeyDictionary[Any, asyncio.Semaphore] = weakref.WeakKeyDictionary()

    async def post(self, url: str, body: Any, *, timeout: float, read: Callable[[Any], T]) -> T:
        """Post `body` as JSON and return `read(reply)` of the first usable reply; `read` raises `ValueError` for a
        reply it cannot use.

        Each try has `timeout` seconds. Raises `Refused` for a status that is not retried, `Unreachable` after the last
        try.
        """
        async with self._places.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self.max_concurrent)):
            return await self._until_read("POST", url, body, timeout, read)

    async def get(self, url: str, *, timeout: float) -> Any:
        """Get the JSON at a URL; retries, `timeout` (seconds a try) and exceptions are those of `post`."""
        return await self._until_read("GET", url, None, timeout, lambda reply: reply)

    async def _until_read(self, method: str, url: str, body: Any, timeout: float, read: Callable[[Any], T]) -> T:
        with optional("judges", "engines, judges and sandboxes over HTTP"):
            import httpx

        end = time.monotonic() + self.deadline
        cause: Exception = TimeoutError("the deadline passed before the first try")
        for attempt in range(self.attempts):
            left = end - time.monotonic()
            if left <= 0:
                break
            pause = random.uniform(0, self.wait * 2**attempt)
            try:
                reply = await asyncio.wait_for(self._send(method, url, body), min(timeout, left))
                if reply.status_code < 300:
                    return read(reply.json())
                if reply.status_code not in AGAIN:
                    raise Refused(f"{httpx.URL(url).host} answered {reply.status_code}: {reply.text[:300]}")
                cause = RuntimeError(f"status {reply.status_code}: {reply.text[:200]}")
                pause = max(pause, _retry_after(reply.headers.get("Retry-After")))
            except TimeoutError:
                cause = TimeoutError(f"no reply in {min(timeout, left):.3g} s")
            except (httpx.HTTPError, ValueError, LookupError, TypeError, RecursionError) as error:  # cut, or not JSON
                cause = error
            if attempt + 1 < self.attempts:
                await asyncio.sleep(min(pause, max(end - time.monotonic(), 0.0)))
        what = f"{httpx.URL(url).host} gave no usable reply in {self.attempts} attempts or {self.deadline:g} s"
        raise Unreachable(f"{what}: {type(cause).__name__}: {cause}")

    async def _send(self, method: str, url: str, body: Any) -> Any:
        import httpx

        loop = asyncio.get_running_loop()
        client = self._clients.get(loop)
        if client is None:
            # our own time limit covers the whole exchange; httpx's are per read, and a drip outlives them
            client = httpx.AsyncClient(timeout=None, headers=self._headers, limits=httpx.Limits(max_connections=None))
            self._clients[loop] = client
        async with client.stream(method, url, **({} if body is None else {"json": body})) as reply:
            size, parts = 0, []
            async for part in reply.aiter_bytes():
                size += len(part)
                if size > MAX_REPLY:
                    raise ValueError(f"the reply has more than {MAX_REPLY >> 20} MiB")
                parts.append(part)
        headers = reply.headers.copy()
        for name in ("content-encoding", "content-length"):  # the body is decoded already
            headers.pop(name, None)
        return httpx.Response(reply.status_code, headers=headers, content=b"".join(parts))


def _retry_after(text: str | None) -> float:
    """Parse a header `Retry-After` into seconds; 0 where there is none."""
    text = (text or "").strip()
    if text.isdigit():
        return float(text)
    with suppress(TypeError, ValueError):
        return max(parsedate_to_datetime(text).timestamp() - time.time(), 0.0)
    return 0.0
