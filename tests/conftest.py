"""Shared by all tests: tiny notebooks, one torch thread, no hub, the repository's root as the folder that paths start from."""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from support import warm_starts
from support.patience import examples, patience
from support.required import REQUIRED, must_run
from xdist.scheduler import LoadScopeScheduling

if (
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN
):  # as in whatever a shell starts in the background: no test could interrupt
    signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(
    signal.SIGHUP, signal.SIG_DFL
)  # under nohup it is ignored, and so would be by every job that a test starts
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("RAY_prestart_worker_first_driver", "0")  # a worker is three seconds of CPU, used or not
os.environ.setdefault("PYTEST_TIMEOUT", str(patience(600)))  # a hanging test says where it hangs

# the machine is noisy, so no property has a deadline; CI draws the same examples every time
settings.register_profile("house", deadline=None, max_examples=examples(100), derandomize=bool(os.environ.get("CI")))
settings.load_profile("house")

ROOT = Path(__file__).parents[1]
COLD = bool(os.environ.get("WORKBENCH_TESTS_COLD"))
"""Whether every process that a test starts is an ordinary one (make test-all)."""
LEAN = ROOT / "tests" / "lean"
"""Modules that stand before others on the path of every process of the tests."""
if not COLD:
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(LEAN), os.environ.get("PYTHONPATH")]))
    sys.path.insert(0, str(LEAN))
    warm_starts.install()
if worker := os.environ.get("PYTEST_XDIST_WORKER"):  # what one worker leaves in the temporary folder is not another's
    os.environ["TMPDIR"] = str(Path(tempfile.gettempdir()) / worker)
    Path(os.environ["TMPDIR"]).mkdir(exist_ok=True)
    tempfile.tempdir = None


TOGETHER = {
    "ray": ("tests/cluster/", "tests/test_front_door.py::test_the_front_door_on_a_cluster", "301_on_a_cluster]",
            "test_where_the_work_is_done_is_two_parameters", "[Ray attach"),
    "vllm": ("tests/engines/test_engines_vllm.py", "tests/engines/test_engines_remote_vllm.py", "tests/agents/test_agents_vllm.py"),
    "lab": ("tests/browser/", "tests/widgets/test_widgets_cluster.py"),
}  # fmt: skip
"""Tests that share what is dear to start: one worker has all of a group. Every other file is a group of its own."""
FIRST = ("ray", "test_notebooks.py", "vllm", "lab", "test_resume.py", "test_faults_runs.py", "test_engines_fsdp.py",
         "test_faults_notebooks.py", "test_learning.py")  # fmt: skip
"""Groups of minutes: a long one at the end leaves the other workers idle."""


def group_of(test: str) -> str:
    """Which tests the same worker has, by their node ids."""
    for name, parts in TOGETHER.items():
        if any(part in test for part in parts):
            return name
    return test.partition("::")[0].rpartition("/")[2]


class Groups(LoadScopeScheduling):
    """A worker takes a whole group. (xdist's own `loadgroup` groups nothing under pytest 9.2: pytest-xdist issue 1386.)"""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Groups:
    """For xdist."""
    return Groups(config, log)


def pytest_configure(config: pytest.Config) -> None:
    """Who starts the tests holds the servers of warm processes; xdist's workers find them in their environment."""
    if not COLD and not os.environ.get("PYTEST_XDIST_WORKER") and not config.option.collectonly:
        servers = warm_starts.Servers()
        config.add_cleanup(servers.close)


def pytest_collectstart(collector: pytest.Collector) -> None:
    """Each worker imports the test files from another place on: pytest rewrites a file's assertions once, not in every worker."""
    whole = [Path(word).absolute() for word in collector.config.args] == [ROOT / "tests"]
    if worker and whole and collector.path == ROOT / "tests":
        files = sorted((ROOT / "tests").rglob("test_*.py"))
        start = int(worker.removeprefix("gw")) * len(files) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
        for file in (*files[start:], *files[:start]):
            if str(file.parent) not in sys.path:
                sys.path.insert(0, str(file.parent))
            with contextlib.suppress(Exception, pytest.skip.Exception):  # the collection says it
                importlib.import_module(file.stem)


_REQUIRED = [REQUIRED[name] for name in os.environ.get("WORKBENCH_TESTS_REQUIRE", "").split()]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """In CI a test is not skipped for what CI sets up.

    A failure's picture parses its source. CPython 3.11 counts the depth of that for all threads together (python/cpython#106905):
    a collection of garbage in the middle lets another thread parse, and pytest itself ends in a SystemError.
    """
    gc.disable()
    try:
        return must_run((yield), _REQUIRED)
    finally:
        gc.enable()


SCORECARD = bool(os.environ.get("WORKBENCH_SCORECARD"))
"""Whether the tests of tests/faults/scorecard.py alone are run, and its page is written (make scorecard)."""
_ENDED: dict[str, dict[str, str]] = {}


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """How each test of the scorecard ended."""
    if SCORECARD and (report.when == "call" or report.outcome != "passed"):
        reason = report.longrepr[2].removeprefix("Skipped: ") if isinstance(report.longrepr, tuple) else ""
        ended = {"passed": "passed", "failed": "FAILED"}.get(report.outcome, f"skipped: {reason}")
        _ENDED.setdefault(scorecard().key_of(report.nodeid), {})[report.nodeid] = ended


def scorecard() -> Any:
    sys.path.insert(0, str(ROOT / "tests" / "faults"))
    import scorecard

    return scorecard


def pytest_sessionfinish() -> None:
    """Write the scorecard's page, where that is asked for."""
    if SCORECARD and not os.environ.get("PYTEST_XDIST_WORKER"):
        scorecard().PAGE.write_text(scorecard().page(_ENDED), encoding="utf-8")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long groups first; otherwise in the folders' order."""
    if SCORECARD:
        items[:] = [item for item in items if scorecard().key_of(item.nodeid) in scorecard().listed()]
    place = {name: number for number, name in enumerate(FIRST)}
    items.sort(key=lambda item: place.get(group_of(item.nodeid), len(place)))


def pytest_collection_finish() -> None:
    """What the tests have imported stays: a collection of garbage, several a test, does not walk through it (0.6 s each)."""
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """A cluster that no other test of this worker asks for does not compute beside them."""
    if group_of(item.nodeid) == "ray" and nextitem is not None and group_of(nextitem.nodeid) != "ray":
        session = sys.modules.get("workbench.cluster.session")
        if session is not None and session._open is not None:
            session._open.close()


@pytest.fixture(autouse=True)
def at_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.fixture(autouse=True)
def gradients_stay_on() -> Iterator[None]:
    """What leaves them off would fail tests of other files, far from its cause."""
    import torch

    yield
    on = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    torch.set_grad_enabled(True)
    assert on, "gradients were left off"


@pytest.fixture(scope="session", autouse=True)
def checked_once() -> Iterator[None]:
    """A model of `data/` is opened some thousand times: its self-check is made once a process, except by the engines' tests."""
    from workbench.engines.local_engine.engine import LocalEngine

    plain, found = LocalEngine.examine, {}

    def examine(engine: LocalEngine, every: bool = False) -> Any:
        folder = Path(engine.path).absolute()
        if (
            COLD
            or every
            or ROOT / "data" not in folder.parents
            or "tests/engines/" in os.environ.get("PYTEST_CURRENT_TEST", "")
        ):
            return plain(engine, every)
        key = (folder, repr(engine._settings))
        if key not in found:
            found[key] = plain(engine)
        return found[key]

    LocalEngine.examine = examine  # type: ignore[method-assign]
    yield
    LocalEngine.examine = plain  # type: ignore[method-assign]


@pytest.fixture(scope="session", autouse=True)
def drawn_once() -> Iterator[None]:
    """The picture of a run's curves is two fifths of a small training: a process draws it once for each set of its metrics."""
    from workbench.jobs import train
    from workbench.runs.folder import read_metrics
    from workbench.views.curves import PANEL

    plain, pictures = train._draw, {}
    drawn = {"val/reward", *(name for names in PANEL.values() for name in names)}

    def draw(folder: Path) -> None:
        rows = read_metrics(folder / "metrics.jsonl")
        names = {name for row in rows for name in row if name in drawn or name.startswith("timing_s/")}
        key = (frozenset(names), len(rows) > 1)
        if key in pictures and not COLD:
            return train.write_bytes(folder / "curves.png", pictures[key])
        plain(folder)
        pictures[key] = (folder / "curves.png").read_bytes()

    train._draw = draw
    yield
    train._draw = plain


@pytest.fixture
def cold() -> Iterator[None]:
    """What the test starts is no fork of a warm server."""
    with warm_starts.cold():
        yield


@pytest.fixture(scope="module")
def box() -> Any:
    """A local sandbox; the test is skipped, saying why, where there is none."""
    from workbench.base.errors import SandboxError
    from workbench.sandbox import LocalSandbox

    try:
        return LocalSandbox(memory_limit_mb=512)
    except SandboxError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """One JupyterLab for all tests of a browser."""
    from support.lab import laboratory

    with laboratory(tmp_path_factory.mktemp("lab")) as address:
        yield address


@pytest.fixture(scope="session")
def tiny() -> str:
    return str(ROOT / "data" / "tiny-arith")


PARAMETERS = """from typing import Optional
run: str = "unset"  # run folder
lr: float = 1e-3  # learning rate
steps: int = 3
on: bool = True
name: Optional[str] = None
sizes: list[int] = [1, 2]"""

MakeNotebook = Callable[..., Path]


@pytest.fixture
def make_notebook(tmp_path: Path) -> MakeNotebook:
    """Writes a notebook of code cells; the first is the parameters cell, unless `parameters=None`."""

    def make(*cells: str, parameters: str | None = PARAMETERS, name: str = "n.ipynb") -> Path:
        sources = [(source, []) for source in cells]
        if parameters is not None:
            sources.insert(0, (parameters, ["parameters"]))
        made: list[dict[str, Any]] = [
            {"cell_type": "code", "id": f"c{n}", "metadata": {"tags": tags}, "execution_count": None, "outputs": [], "source": source}
            for n, (source, tags) in enumerate(sources)
        ]  # fmt: skip
        spec = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
        path = tmp_path / name
        path.write_text(json.dumps({"cells": made, "metadata": spec, "nbformat": 4, "nbformat_minor": 5}))
        return path

    return make
