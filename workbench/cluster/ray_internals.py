"""Ray's private names, all of them here: each function says what public way is missing (seen in Ray 2.52 to 2.60)."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

GCS_WAIT = "RAY_gcs_server_port_wait_time_s"
"""Environment variable: the seconds that Ray's raylet waits for its head."""


def heads_here() -> list[str]:
    """Return the addresses of the Ray heads whose nodes run on this machine. Ray's public look-up remembers what it saw
    first.
    """
    from ray._private.services import _find_address_from_flag

    return sorted(_find_address_from_flag("--gcs-address"))


def free_resources() -> Mapping[str, Mapping[str, float]]:
    """Return node id → its free resources. The public `ray.available_resources` gives only the sum over nodes."""
    from ray._private.state import available_resources_per_node

    resources: Mapping[str, Mapping[str, float]] = available_resources_per_node()
    return resources


def store_bytes(address: str, port: int) -> tuple[int, int]:
    """Return the used and the available bytes of a node's object store. Ray offers them publicly only in its dashboard,
    which does not run.

    Raises gRPC's `RpcError` where the node does not answer.
    """
    from ray._private.internal_api import node_stats

    stats = node_stats(address, port, include_memory_info=False).store_stats
    return int(stats.object_store_bytes_used), int(stats.object_store_bytes_avail)


@contextmanager
def starting_on_loopback(seconds: float, ended: Callable[[], str]) -> Iterator[None]:
    """Context manager around `ray.init`: the new cluster listens only on loopback, and its node may take `seconds` to
    start.

    Ray has a setting for neither on Linux: it waits half a minute for its node. Here the wait also ends when `ended()`
    returns the name of one of Ray's processes that has ended ("" while all live).
    """
    from ray._private import ray_constants, services

    original: Any = services.get_node
    until = time.monotonic() + seconds

    def get_node(*arguments: Any) -> Any:
        while True:
            try:
                return original(*arguments)
            except RuntimeError:
                if process := ended():
                    raise ProcessLookupError(process) from None  # Ray asks again after a RuntimeError
                if time.monotonic() > until:
                    raise
            time.sleep(0.1)

    on_many_hosts, ray_constants.ENABLE_RAY_CLUSTER = ray_constants.ENABLE_RAY_CLUSTER, False
    waits = os.environ.get(GCS_WAIT)
    os.environ[GCS_WAIT] = waits or str(max(int(seconds), 1))
    services.get_node = get_node
    try:
        yield
    finally:
        services.get_node = original
        ray_constants.ENABLE_RAY_CLUSTER = on_many_hosts
        if not waits:
            del os.environ[GCS_WAIT]


def send_token() -> None:
    """Let Ray send its authentication token, which it otherwise does only for a cluster that it starts."""
    from ray._private.authentication.authentication_token_setup import _enable_token_auth

    _enable_token_auth()


def forget_token() -> None:
    """Let Ray read its token again, which it does once per process; the next cluster may have another token."""
    from ray._raylet import AuthenticationTokenLoader  # type: ignore[attr-defined] # compiled

    AuthenticationTokenLoader.instance().reset_cache()


def print_to(note: Callable[[Mapping[str, Any]], None] | None) -> None:
    """Pass to `note` what Ray would print into cells (`lines`), and reduce Ray's log to errors; None restores both. Ray
    has no setting for it.
    """
    from ray._private import worker

    log, names = logging.getLogger("ray"), vars(worker)
    original, level = names.pop("_workbench_original", (worker.print_to_stdstream, log.level))
    names["print_to_stdstream"] = original if note is None else lambda data, **_: note(data)
    if note is not None:
        names["_workbench_original"] = (original, level)
    log.setLevel(level if note is None else logging.ERROR)
