"""One local cluster for all tests of this folder: opened where one is asked for, closed where another must be."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import cluster_things as things
import pytest
from support.patience import patience

from workbench.cluster import Cluster, RayRanks, connect, ranks

HERE = Path(__file__).parent


ORDER = ("engines", "interactions", "looking", "faults", "parts", "simulating", "nodes", "placing", "card")
"""Of the files `test_cluster_….py`: those that share a cluster come before those that close it."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A cluster takes ten seconds to start."""
    places = [place for place, one in enumerate(items) if one.path.parent == HERE]
    mine = [items[place] for place in places]
    alone = "test_a_closed_cluster_ends_its_live_tables"  # closes what is open
    mine.sort(
        key=lambda one: ORDER.index(one.path.stem.removeprefix("test_cluster_") if one.name != alone else "parts")
    )
    for place, one in zip(places, mine, strict=True):
        items[place] = one
    for one in items:
        if one.path.parent == HERE and {"local", "session"} & set(getattr(one, "fixturenames", ())):
            one.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupt waits four seconds for ranks to stop; ranks of a busy machine take longer."""
    monkeypatch.setattr(ranks, "PATIENCE", patience(ranks.PATIENCE))


@pytest.fixture(scope="session")
def _closing() -> Iterator[None]:
    yield
    things.close()


@pytest.fixture
def local(_closing: None) -> Cluster:
    """Four CPUs of this machine; the same call gives the same cluster while it is open."""
    return connect(**things.SETTINGS, start_seconds=patience(120))


@pytest.fixture(scope="session")
def _shared() -> list[RayRanks]:
    return []


@pytest.fixture
def pair(local: Cluster, _shared: list[RayRanks]) -> RayRanks:
    """Two ranks; made anew after a test that lost them."""
    if not _shared or _shared[0].closed is not None:
        _shared[:] = [local.ranks(things.thing, 2, name="pair", word="w")]
    return _shared[0]
