"""So many groups of two ranks meet at once: torch is imported here, and every rank is a fork that costs a few megabytes.

python twenty_groups.py 20
"""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import suppress

import torch
from torch import distributed

from workbench.engines.fsdp_engine.worker import Shards


def rank(number: int, groups: int, pipe: tuple[int, int]) -> None:
    """Reserves and joins when all do; the sum of both ranks' numbers says that they met each other."""
    time.sleep(max(float(os.environ["START"]) - time.time(), 0))
    mine = Shards(number, 2)
    place = mine.reserve()
    if place is not None:
        os.write(pipe[1], json.dumps(place).encode() + b"\n")
    else:
        place = tuple(json.loads(os.read(pipe[0], 1000)))
    mine.join(*place)
    own = torch.tensor([groups * 10.0 + number])
    distributed.all_reduce(own)
    assert own.item() == groups * 20.0 + 1, own
    if number == 0:
        os.write(1, f"met {place[1]}\n".encode())  # in one piece: others write, too
    with suppress(RuntimeError):  # a neighbour has gone already
        distributed.destroy_process_group()


def main() -> None:
    groups = int(sys.argv[1])
    os.environ["START"] = str(time.time() + 1.0)
    pids = []
    for group in range(groups):
        pipe = os.pipe()
        for number in range(2):
            pid = os.fork()
            if not pid:
                code = 1
                try:
                    rank(number, group, pipe)
                    code = 0
                finally:
                    sys.stdout.flush()
                    os._exit(code)
            pids.append(pid)
    failed = [pid for pid in pids if os.waitpid(pid, 0)[1]]
    sys.exit(f"{len(failed)} of {len(pids)} ranks did not meet" if failed else 0)


if __name__ == "__main__":
    main()
