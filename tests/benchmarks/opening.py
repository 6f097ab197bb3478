"""What the first look at a large recorded step costs: seconds, and memory beyond what the process had.

A trace of 10,000 rows × 1,024 tokens is written once (`looking.synthetic`); each view is then opened in a process of its own.
`tests/benchmarks/README.md` has the last figures.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

LOOKS = {
    "the trace": "wb.Trace.load(path)._repr_html_()",
    "its last batch": "wb.Trace.load(path).batch._repr_html_()",
    "what a phase wrote": "wb.Trace.load(path)['advantage']._repr_html_()",
    "the samples": "wb.views.samples(wb.Trace.load(path))._repr_html_()",
    "the tokens of a row": "wb.views.tokens(wb.Trace.load(path), 4321)._repr_html_()",
}
ASKS = {
    "sort by advantage": "index.select('-advantage')",
    "sort by tokens": "index.select('tokens')",
    "by prompt, worst first": "index.select('worst', by_group=True)",
    "most surprising": "index.select('surprising')",
    "filter by status and reward": "index.select('worst', where={'status': 'scored', 'reward': (0.5, None)})",
    "search": "index.select('worst', search='which gives 12 then')",
    "a page of the live table": "table.answer({'kind': 'rows', 'order': '-tokens', 'start': 0, 'count': 50})",
    "a card": "table.answer({'kind': 'pick', 'row': 4321})",
}
CHILD = """
import json, sys, time, psutil
import torch
torch.set_num_threads(1)
import workbench as wb
from workbench.views import samples, tokens
from workbench.views.samples import SampleIndex
import pandas, pyarrow.parquet, safetensors.torch
path, what = sys.argv[1:]
process = psutil.Process()
def used():
    return process.memory_full_info().uss / 2**20
"""
OPEN = """
before = used(); began = time.perf_counter()
shown = eval(what)
print(json.dumps([time.perf_counter() - began, used() - before]))
"""
ASK = """
from workbench.widgets.layer import SamplesTable
view = wb.views.samples(wb.Trace.load(path)); index = view.index; table = SamplesTable(view)
eval(what)
times = []
for _ in range(7):
    began = time.perf_counter(); eval(what); times.append(time.perf_counter() - began)
print(json.dumps([sorted(times)[3], used()]))
"""


def child(code: str, path: Path, what: str) -> tuple[float, float]:
    """(seconds, MiB) that a fresh process measured."""
    out = subprocess.run(
        [sys.executable, "-c", CHILD + code, str(path), what], capture_output=True, text=True, check=True
    )
    seconds, size = json.loads(out.stdout.splitlines()[-1])
    return seconds, size


def main() -> None:
    """All looks, all asks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--tokens", type=int, default=1_024)
    parser.add_argument("--times", type=int, default=3)
    options = parser.parse_args()
    from looking import synthetic

    with tempfile.TemporaryDirectory() as folder:
        path = synthetic(options.rows, options.tokens).save(Path(folder) / "trace")
        for name, what in LOOKS.items():
            found = [child(OPEN, path, what) for _ in range(options.times)]
            seconds, size = (median(one[place] for one in found) for place in (0, 1))
            print(f"{name:<30} {seconds * 1e3:8.0f} ms {size:8.0f} MiB")
        for name, what in ASKS.items():
            print(f"{name:<30} {child(ASK, path, what)[0] * 1e3:8.1f} ms")


if __name__ == "__main__":
    main()
