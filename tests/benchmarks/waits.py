"""What the host waits for: of each further micro-batch that learns or scores, and of each further token that is sampled.

`python tests/benchmarks/waits.py` counts on the tests' pretended accelerator; with `--device cuda` on a GPU, by what torch's
debug mode of synchronisations says. The budget is 3 (`tests/engines/test_engines_accelerator.py`).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

sys.path += [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "engines")]
import accelerator_driver as driver


@contextmanager
def synchronisations() -> Iterator[driver.accelerator.Traffic]:
    """Context manager: as `traffic`, of a GPU."""
    found = driver.accelerator.Traffic()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            yield found
    finally:
        torch.cuda.set_sync_debug_mode("default")
    found.waits.update(f"{one.filename}:{one.lineno}" for one in told if "synchronizing" in str(one.message))


def main() -> None:
    """The table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=(driver.accelerator.NAME, "cuda"), default=driver.accelerator.NAME)
    given = parser.parse_args()
    if given.device == "cuda":
        driver.NAME, driver.accelerator.traffic = "cuda", synchronisations
    else:
        driver.accelerator.install()
    with tempfile.TemporaryDirectory() as folder:
        found = driver.waits(driver.llama(Path(folder)))
    print(f"torch {torch.__version__}, {given.device}\n\n| | waits |\n|---|---|")
    for name, number in found.items():
        print(f"| {name} | {number:g} |")


if __name__ == "__main__":
    main()
