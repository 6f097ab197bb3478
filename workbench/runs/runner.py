"""A notebook as a job: papermill runs it, progress reaches the terminal, what came of it is said at the end."""

from __future__ import annotations

import json
import os
import re
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench.runs.parameters import declared_parameters, resolve, table
from workbench.runs.run import number

OK, FAILED, STOPPED, DIED = 0, 1, 3, 4
"""Exit codes: done; a cell raised; `break_if` stopped the run; the kernel died (2 is: refused before any work)."""


@dataclass(frozen=True)
class Result:
    """How a job went."""

    code: int
    output: Path
    """The executed notebook."""
    run: Path | None
    """The run folder, where the notebook has a `run` parameter."""
    error: str = ""
    """Cell and traceback where a cell raised, one sentence where the kernel died."""


def run_notebook(
    notebook: str | Path,
    parameters: Mapping[str, Any],
    *,
    output: str | Path | None = None,
    kernel: str | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Result:
    """Run a notebook with parameters; the executed copy goes into its run folder, or to `output`.

    The run folder is the notebook's `run` parameter; where it has none, or an empty one, a new folder in `runs`
    with the notebook's name and the time. The kernel starts in the present folder and sees WORKBENCH_JOB=1; what it
    appends to the file that WORKBENCH_PROGRESS names is passed to `say`, line by line, while it runs. Raises
    `SettingError` before anything starts where a parameter is unknown or of the wrong type.
    """
    import papermill
    from nbclient.exceptions import DeadKernelError
    from papermill.exceptions import PapermillExecutionError

    source = Path(notebook)
    values = resolve(source, parameters)
    run = _run_folder(source, values)
    target = Path(output) if output is not None else (run or _fresh(source)) / "notebook.ipynb"
    target.parent.mkdir(parents=True, exist_ok=True)
    say(f"{source.name} → {target}")
    say(table(source, values))
    with _job(say):
        try:
            papermill.execute_notebook(
                str(source),
                str(target),
                parameters=values,
                kernel_name=kernel,
                progress_bar=False,
                log_output=False,
                autosave_cell_every=5,
                cwd=str(Path.cwd()),
                request_save_on_cell_execute=True,
                # the kernel warns at every start that its loopback sockets, signed by a key, are not encrypted too
                extra_arguments=["--log-level=ERROR"],
            )
        except PapermillExecutionError as error:
            code = STOPPED if error.ename == "RunStopped" else FAILED
            return Result(code, target, run, _told(error))
        except DeadKernelError:
            why = "the kernel died: out of memory, or killed from outside; the notebook has what was saved before"
            return Result(DIED, target, run, why)
    return Result(OK, target, run)


def _fresh(source: Path) -> Path:
    return Path("runs") / f"{source.stem}-{time.strftime('%Y%m%d-%H%M%S')}"


def _run_folder(source: Path, values: dict[str, Any]) -> Path | None:
    """What the notebook's `run` parameter names; one that is left empty is filled in, in `values`."""
    declared = {parameter.name: parameter.default for parameter in declared_parameters(source)}
    if "run" not in declared:
        return None
    named = values.get("run", declared["run"])
    if not named:
        named = values["run"] = str(_fresh(source))
    return Path(named)


def _told(error: Any) -> str:
    """Which cell, what it raised, and the end of the traceback without colours."""
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in "\n".join(error.traceback).splitlines()]
    return f"cell {error.cell_index} raised {error.ename}: {error.evalue}\n" + "\n".join(lines[-12:])


@contextmanager
def _job(say: Callable[[str], None]) -> Iterator[None]:
    """Environment of the kernel, and a thread that passes on the lines that the loop writes."""
    with tempfile.TemporaryDirectory(prefix="workbench-") as folder:
        path = Path(folder) / "progress"
        path.touch()
        ours = {"WORKBENCH_JOB": "1", "WORKBENCH_PROGRESS": str(path)}
        before = {name: os.environ.get(name) for name in ours}
        os.environ.update(ours)
        done = threading.Event()
        tail = threading.Thread(target=_follow, args=(path, say, done), daemon=True)
        tail.start()
        try:
            yield
        finally:
            done.set()
            tail.join()
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value


def _follow(path: Path, say: Callable[[str], None], done: threading.Event) -> None:
    with path.open() as file:
        waiting = ""
        while True:
            last = done.is_set()
            waiting += file.read()
            *lines, waiting = waiting.split("\n")
            for line in lines:
                say(line)
            if last:
                return
            time.sleep(0.1)


def closing_lines(result: Result) -> list[str]:
    """What a person wants to know at the end: rewards before and after, and where everything is."""
    lines = []
    if result.run is not None and (result.run / "summary.json").is_file():
        summary = json.loads((result.run / "summary.json").read_text())
        for when in ("before", "after"):
            if f"reward_{when}" in summary:
                low, high = (number(bound) for bound in summary[f"interval_{when}"])
                lines.append(
                    f"mean held-out reward {when:<6} {number(summary[f'reward_{when}'])}   95 % in [{low}, {high}]"
                    f"   greedy {number(summary[f'greedy_{when}'])}   ({summary['heldout_rows']} prompts)"
                )
        if summary.get("stopped"):
            lines.append(f"stopped: {summary['stopped']}")
    lines.append(f"executed notebook  {result.output}")
    if result.run is not None:
        for what, name in (
            ("metrics", "metrics.jsonl"),
            ("TensorBoard", "tensorboard"),
            ("curves", "curves.png"),
            ("summary", "summary.json"),
        ):
            if (result.run / name).exists():
                lines.append(f"{what:<18} {result.run / name}")
    return lines
