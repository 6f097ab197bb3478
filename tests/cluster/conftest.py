"""One local cluster for all tests of this folder: opened where one is asked for, closed where another must be."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import cluster_things as things
import pytest

from workbench.cluster import Cluster, RayRanks, cluster, session

CANARY = "canary-9876543210"
SETTINGS: dict[str, Any] = {
    "cpus": 4,
    "gpus": 0,
    "runtime_env": {"env_vars": {"TEST_API_KEY": CANARY, "OMP_NUM_THREADS": "1"}},
    "object_store_memory": 300 << 20,
}


def close() -> None:
    """Whatever cluster is open in this process."""
    if session._open is not None:
        session._open.close()


@pytest.fixture(scope="session")
def _closing() -> Iterator[None]:
    yield
    close()


@pytest.fixture
def local(_closing: None) -> Cluster:
    """Four CPUs of this machine; the same call gives the same cluster while it is open."""
    return cluster(**SETTINGS)


@pytest.fixture(scope="session")
def _shared() -> list[RayRanks]:
    return []


@pytest.fixture
def pair(local: Cluster, _shared: list[RayRanks]) -> RayRanks:
    """Two ranks; made anew after a test that lost them."""
    if not _shared or _shared[0].closed is not None:
        _shared[:] = [local.ranks(things.thing, 2, name="pair", word="w")]
    return _shared[0]
