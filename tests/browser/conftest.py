"""One JupyterLab for all browser tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests_lab import laboratory


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with laboratory(tmp_path_factory.mktemp("lab")) as address:
        yield address
