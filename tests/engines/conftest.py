"""What many tests of engines have once a file: a small random model, eleven rows, groups of two and four ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.models import make_random_model
from support.shards import eleven_rows

from workbench.dataproto import DataProto
from workbench.engines.fsdp_engine.group import Group, local_group


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random_model(tmp_path_factory.mktemp("model") / "random")


@pytest.fixture(scope="module")
def batch() -> DataProto:
    return eleven_rows()


@pytest.fixture(scope="module")
def two() -> Iterator[Group]:
    group = local_group(2, device="cpu", threads=1)
    yield group
    group.close()


@pytest.fixture(scope="module")
def four() -> Iterator[Group]:
    group = local_group(4, device="cpu", threads=1)
    yield group
    group.close()
