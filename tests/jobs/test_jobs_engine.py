"""Our papermill engine: current on disk, whole after a kill, honest marks, signals, dead kernels, nothing left running."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support import warm_starts
from support.patience import LONG, within

from workbench.base.files import FORMAT
from workbench.jobs.engine import AtomicFile, KernelClient, _returned
from workbench.jobs.runner import DIED, FAILED, HUNG_UP, INTERRUPTED, OK, TERMINATED, check_notebook, run_notebook
from workbench.runs.folder import write_json

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]


def cells(path: Path) -> list[dict[str, Any]]:
    return [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]


def status(path: Path) -> list[str]:
    return [cell["metadata"]["papermill"]["status"] for cell in cells(path)]


def text(cell: dict[str, Any]) -> str:
    return "".join("".join(output.get("text", "")) for output in cell["outputs"])


def start(notebook: Path, folder: Path, *more: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "workbench.cli", "train", str(notebook), "-p", "run", str(folder), *more]
    env = {**os.environ, "OMP_NUM_THREADS": "1", warm_starts.WHERE: ""}  # its kernel is its own child
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env, cwd=ROOT)


def until(ready: Any) -> None:
    assert within(ready, every=0.1), "waited in vain"


def descendants(pid: int) -> set[int]:
    found, stack = set(), [pid]
    while stack:
        one = stack.pop()
        for task in Path(f"/proc/{one}/task").glob("*/children"):
            children = {int(child) for child in task.read_text().split()}
            stack += children - found
            found |= children
    return found


def running(pids: set[int]) -> set[int]:
    alive = set()
    for pid in pids:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except OSError:
            continue
        if state not in "ZX":
            alive.add(pid)
    return alive


SILENT = """import time, ipywidgets
display(ipywidgets.IntSlider(7))
for n in range(3):
    print('line', n, flush=True)
time.sleep(3600)"""


def test_a_silent_cell_is_on_disk_with_streams_joined_and_widget_state(make_notebook: Any, tmp_path: Path) -> None:
    job = start(make_notebook(SILENT, "print('later')"), tmp_path / "r")
    output = tmp_path / "r" / "notebook.ipynb"
    try:
        until(lambda: output.exists() and "line 2" in output.read_text())
        document = json.loads(output.read_text())
        shown = cells(output)[2]["outputs"]
        assert [one["output_type"] for one in shown] == ["display_data", "stream"]
        assert text(cells(output)[2]) == "line 0\nline 1\nline 2\n"
        assert document["metadata"]["widgets"]["application/vnd.jupyter.widget-state+json"]["state"]
        assert status(output)[2:] == ["running", "pending"]
        everybody = descendants(job.pid)
    finally:
        job.kill()
    job.wait()
    assert json.loads(output.read_text())  # a whole file, whenever the kill came
    until(lambda: not running(everybody))


STUBBORN = """import time
try:
    for n in range(36000):
        print(n, flush=True)
        time.sleep(0.1)
finally:
    print('cleaned up', flush=True)"""


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, TERMINATED), (signal.SIGINT, INTERRUPTED), (signal.SIGHUP, HUNG_UP)]
)
def test_a_signal_runs_the_cells_cleanup_and_marks_the_rest(
    make_notebook: Any, tmp_path: Path, number: int, code: int
) -> None:
    job = start(make_notebook(STUBBORN, "print('never')"), tmp_path / "r")
    output = tmp_path / "r" / "notebook.ipynb"
    until(lambda: output.exists() and "0\\n" in output.read_text())
    everybody = descendants(job.pid)
    job.send_signal(number)
    said, _ = job.communicate(timeout=LONG)
    assert job.returncode == code, said
    assert status(output)[2:] == ["failed", "skipped"] and "cleaned up" in text(cells(output)[2])
    assert signal.Signals(number).name in said
    until(lambda: not running(everybody))


SWALLOWS = """import time
try:
    print('in', flush=True)
    time.sleep(3600)
except KeyboardInterrupt:
    print('swallowed')"""


def test_a_cell_that_swallows_the_interrupt_does_not_keep_the_job_alive(make_notebook: Any, tmp_path: Path) -> None:
    job = start(make_notebook(SWALLOWS, "print('never')"), tmp_path / "r")
    output = tmp_path / "r" / "notebook.ipynb"
    until(lambda: output.exists() and "in\\n" in output.read_text())
    job.send_signal(signal.SIGTERM)
    said, _ = job.communicate(timeout=LONG)
    assert job.returncode == TERMINATED, said
    assert status(output)[2:] == ["completed", "skipped"] and "swallowed" in text(cells(output)[2])


DEAF = """import signal, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
print('deaf', flush=True)
time.sleep(3600)"""


def test_a_second_signal_ends_a_kernel_that_does_not_listen(make_notebook: Any, tmp_path: Path) -> None:
    job = start(make_notebook(DEAF, "print('never')"), tmp_path / "r")
    output = tmp_path / "r" / "notebook.ipynb"
    until(lambda: output.exists() and "deaf\\n" in output.read_text())
    job.send_signal(signal.SIGTERM)
    time.sleep(1)
    assert job.poll() is None
    job.send_signal(signal.SIGTERM)
    said, _ = job.communicate(timeout=LONG)
    assert job.returncode == TERMINATED and status(output)[2:] == ["failed", "skipped"], said
    assert "did not end in time after SIGTERM" in output.read_text()


def test_a_dead_kernel_leaves_an_error_in_its_cell(make_notebook: Any, tmp_path: Path) -> None:
    path = make_notebook("print('before', flush=True)\nimport os; os.kill(os.getpid(), 9)", "print('never')")
    (tmp_path / "r").mkdir()
    write_json(tmp_path / "r" / "settings.json", {"format": FORMAT, "train": {"steps": 12, "save_freq": 10}})
    result = run_notebook(path, {"run": str(tmp_path / "r")})
    assert result.code == DIED and "died in cell 3 of 4: killed by SIGKILL" in result.error
    assert result.error.endswith(f"--resume {tmp_path / 'r'}, at step 0 again: no checkpoint (save_freq=10)")
    assert status(result.output)[2:] == ["failed", "skipped"]
    shown = cells(result.output)[2]["outputs"]
    assert shown[-1]["output_type"] == "error" and "lack of memory" in shown[-1]["evalue"]


@pytest.mark.parametrize(
    ("code", "said"), [(None, "how it ended is not known"), (3, "it exited with status 3"), (-9, "SIGKILL")]
)
def test_a_death_is_told_as_far_as_it_is_known(code: int | None, said: str) -> None:
    client = KernelClient.__new__(KernelClient)
    client.received, client.nb = [], SimpleNamespace(cells=[None])
    process = SimpleNamespace(poll=lambda: code)
    client.km = SimpleNamespace(provisioner=SimpleNamespace(process=process))
    text = client._obituary(0)["evalue"]
    assert said in text and "None" not in text and "cell 1 of 1" in text


def test_cells_for_looking_can_be_left_out(make_notebook: Any, tmp_path: Path) -> None:
    path = make_notebook("a = 1", "1 / 0", "print(a)")
    document = json.loads(path.read_text())
    document["cells"][2]["metadata"]["tags"] = ["look"]
    path.write_text(json.dumps(document))
    result = run_notebook(path, {"run": str(tmp_path / "r")}, skip_look=True)
    assert result.code == OK and status(result.output)[2:] == ["completed", "skipped", "completed"]
    again = run_notebook(path, {"run": str(tmp_path / "r")})
    assert again.code == FAILED and status(again.output)[2:] == ["completed", "failed", "skipped"]
    # the notebook of the first attempt is still there
    assert status(tmp_path / "r" / "notebook.001.ipynb")[-1] == "completed"


def test_plain_papermill_can_use_the_engine_and_many_lines_stay_one_output(make_notebook: Any, tmp_path: Path) -> None:
    path = make_notebook("for n in range(2000): print(n, flush=True)", "import sys; print('a\\rb', file=sys.stderr)")
    command = [sys.executable, "-m", "papermill", "--engine", "workbench", str(path), "out.ipynb", "--no-progress-bar"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = cells(tmp_path / "out.ipynb")
    assert len(found[1]["outputs"]) == 1 and text(found[1]).count("\n") == 2000


def test_a_check_stops_before_training_and_writes_nothing(make_notebook: Any, tmp_path: Path) -> None:
    code, told = check_notebook(make_notebook("x = 1"), {})
    assert code == OK and "none of them trains" in told
    code, told = check_notebook(make_notebook("1/0"), {})
    assert code == 2 and "ZeroDivisionError" in told
    assert [one.name for one in tmp_path.iterdir()] == ["n.ipynb"]


def test_a_write_that_breaks_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "n.ipynb"
    AtomicFile(path).write("old", "")
    with pytest.raises(UnicodeEncodeError):
        AtomicFile(path).write("new \ud800", "")
    assert path.read_text() == "old" and [one.name for one in tmp_path.iterdir()] == ["n.ipynb"]
    assert _returned("10 %\r20 %\r30 %\nend") == "30 %\nend" and _returned("plain\n") == "plain\n"
