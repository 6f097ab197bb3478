"""The card of design: a notebook steps one phase a cell on two Ray nodes on loopback, run by plain papermill while both cores burn.

The nodes are two of `ray start`. Where a raylet ends by its own check, which waits 15 seconds for the ports of its agents (`node_manager.cc:
Timed out waiting for file … metrics_agent_port`; met at a load of 25 on two cores), they are those of Ray's `cluster_utils`.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cluster_things as things
import pytest
from support.patience import patience

pytestmark = [pytest.mark.slow, pytest.mark.long]  # it keeps every core busy for minutes: `make card`, `make test-all`
TOKEN = "fedcba9876543210" * 4
STARTED = "Ray runtime started"
PHASES = ("rollout", "reward", "old_log_prob", "ref_log_prob", "advantage", "update_actor")
BEGINNING = [
    "address = ''",
    "from pathlib import Path\nimport workbench as wb\nc = wb.cluster(address)\nc",
    "c.status()",
    "c.hold({'actor': [1, 1]})",
    "policy = c.place('data/tiny-arith', sampler='local', ranks=2, pool='actor', rollout='rollout', lr=2e-4, scratch=Path('runs').resolve())\npolicy",
    "rows = wb.rows('data/arith/train.parquet', max_prompt_length=256)\n"
    "pipe = wb.recipes.grpo(policy, group_size=2, kl_coef=0.001, max_tokens=12)\n"
    "s = wb.Stepper(pipe, rows.batch(2, seed=0))\ns",
]
END = [
    "wb.views.samples(s.batch)",
    "wb.views.tokens(s.trace, 0)",
    "training = await wb.train(pipe, rows, steps=1, batch_size=2, run='runs/card')\ntraining",
    "training.curves('reward')",
    "c.timeline",
    "nodes = {fact['node'] for group in c.groups for fact in group.facts}\nprint(len(nodes), 'nodes')",
    "c.close()",
]


@contextlib.contextmanager
def nodes(scratch: Path) -> Iterator[tuple[str, str]]:
    """(The address of two nodes on loopback, how they came up)."""
    with contextlib.ExitStack() as ends:
        environment = {
            **os.environ,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": TOKEN,
            "RAY_memory_monitor_refresh_ms": "0",
        }

        def started(*words: str, until: str) -> str:
            command = [sys.executable, *words]
            pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
            process = ends.enter_context(subprocess.Popen(command, text=True, env=environment, **pipes))
            ends.callback(process.terminate if until == STARTED else process.stdin.close)
            return next((line for line in process.stdout if until in line), "")

        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            head = f"127.0.0.1:{free.getsockname()[1]}"
        small = ("--block", "--num-cpus=2", "--object-store-memory=157286400", "--node-ip-address=127.0.0.1")
        ray = ("-m", "ray.scripts.scripts", "start", *small, "--disable-usage-stats")
        port, folder = f"--port={head.rpartition(':')[2]}", f"--temp-dir={scratch}"
        began = started(*ray, "--head", port, folder, "--include-dashboard=false", until=STARTED)
        if began and started(*ray, f"--address={head}", until=STARTED):
            yield head, "ray start"
            return
        there = started(str(Path(__file__).parent / "two_nodes.py"), until="{")
        yield json.loads(there)["address"], "cluster_utils"


@contextlib.contextmanager
def burning() -> Iterator[None]:
    """Each core is busy with something else."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(os.cpu_count() or 1)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def card() -> Any:
    import nbformat

    cells = [*BEGINNING, *(f"s.next()  # {phase}" for phase in PHASES), *END]
    made = [nbformat.v4.new_code_cell(source) for source in cells]
    made[0]["metadata"]["tags"] = ["parameters"]
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    return nbformat.v4.new_notebook(cells=made, metadata=kernel)


def test_one_phase_a_cell_on_two_nodes_by_plain_papermill_with_both_cores_burning(tmp_path: Path) -> None:
    import nbformat

    things.close()
    source, out = tmp_path / "card.ipynb", tmp_path / "out.ipynb"
    nbformat.write(card(), source)
    (tmp_path / "data").symlink_to(Path("data").resolve())
    with tempfile.TemporaryDirectory(prefix="ray") as scratch, nodes(Path(scratch)) as (address, _), burning():
        command = [sys.executable, "-m", "papermill", str(source), str(out), "-p", "address", address]
        environment = {**os.environ, "RAY_AUTH_TOKEN": TOKEN}
        ended = subprocess.run(
            [*command, "--no-progress-bar", "--cwd", str(tmp_path)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=patience(900),
            check=False,
        )
    assert ended.returncode == 0, ended.stderr[-3000:]
    cells = json.loads(out.read_text())["cells"]
    shown = {"".join(cell["source"]): cell["outputs"] for cell in cells}
    steps = [outputs for source, outputs in shown.items() if source.startswith("s.next()")]
    assert len(steps) == len(PHASES)
    views = [*steps, *(shown[source] for source in END[:2])]
    for outputs in views:  # readable without a kernel: HTML or text beside every widget
        assert any({"text/html", "text/plain"} & set(one.get("data", {})) for one in outputs), outputs
    for phase, outputs in zip(PHASES, steps, strict=True):
        assert phase in json.dumps(outputs)
    assert any("image/png" in one.get("data", {}) for one in shown[END[3]])
    assert "2 nodes" in json.dumps(shown[END[5]])
