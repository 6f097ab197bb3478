"""What a batch costs on its way through Ray: driver → worker → driver, beside raw `ray.put` and `ray.get` of numpy arrays.

`tests/benchmarks/README.md` has the last figures.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
import torch

import workbench as wb
from workbench.cluster import connect
from workbench.cluster.transport import pack

ROWS = 1024


class Mirror:
    """Looks at as much of a batch as it is told, and sends it, or what it made, back."""

    def count(self, batch: wb.DataProto) -> int:
        """Rows; looks at nothing."""
        return len(batch)

    def look(self, batch: wb.DataProto) -> float:
        """One number a column; looks at everything."""
        return sum(float(batch.batch[name][0, 0]) for name in batch.batch)

    def back(self, batch: wb.DataProto) -> wb.DataProto:
        """The batch as it came."""
        return batch


def mirror(rank: int, size: int) -> Mirror:
    """A rank's object."""
    return Mirror()


def batch_of(mebibytes: int, columns: int = 8) -> wb.DataProto:
    """Float columns that weigh so much together."""
    width = mebibytes * 2**20 // (4 * columns * ROWS)
    draw = torch.Generator().manual_seed(0)
    return wb.DataProto({f"column_{number}": torch.rand(ROWS, width, generator=draw) for number in range(columns)})


def timed(work: Callable[[], Any], repeats: int) -> float:
    """Median seconds; what the work returns is dropped before the next."""
    spent = []
    for _ in range(repeats):
        began = time.perf_counter()
        made = work()
        spent.append(time.perf_counter() - began)
        del made
        time.sleep(0.3)  # the store frees what is no longer referred to in its own time
    return median(spent)


def measured(mebibytes: int, repeats: int) -> list[tuple[str, float]]:
    """(what, seconds), the raw ones first."""
    import ray

    data = batch_of(mebibytes)
    arrays = {name: data.batch[name].numpy() for name in data.batch}
    tensors = {name: data.batch[name] for name in data.batch}
    lines = []
    with connect(cpus=2, object_store_memory=(4 * mebibytes + 256) << 20) as c:
        ray.put(arrays)  # the store's pages are new to everybody
        time.sleep(1)
        lines.append(("raw: put of numpy arrays", timed(lambda: ray.put(arrays), repeats)))
        ref = ray.put(arrays)
        lines.append(("raw: get of numpy arrays (views)", timed(lambda ref=ref: ray.get(ref), repeats)))
        lines.append(("raw: memcpy of the same", timed(lambda: [np.copy(one) for one in arrays.values()], repeats)))
        del ref
        lines.append(("raw: put of torch tensors", timed(lambda: ray.put(tensors), 1)))
        lines.append(("DataProto: put, packed", timed(lambda: ray.put(pack(data)), repeats)))
        ref = ray.put(pack(data))
        lines.append(("DataProto: get, nothing looked at", timed(lambda ref=ref: ray.get(ref), repeats)))
        del ref
        ranks = c.ranks(mirror, 1)
        ranks.call("count", data)
        lines.append(("driver → worker, nothing looked at", timed(lambda: ranks.call("count", data), repeats)))
        lines.append(("driver → worker, every column read", timed(lambda: ranks.call("look", data), repeats)))
        there = lambda: ranks.submit("back", data).result(copy=False)  # noqa: E731
        lines.append(("driver → worker → driver, left in the store", timed(there, repeats)))
        lines.append(("driver → worker → driver, own memory", timed(lambda: ranks.call("back", data), repeats)))
    return lines


def main() -> None:
    """The table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mebibytes", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for what, seconds in measured(options.mebibytes, options.repeats):
        print(f"  {what:<44} {1000 * seconds:9.1f} ms {options.mebibytes / 1024 / seconds:9.2f} GiB/s")


if __name__ == "__main__":
    main()
