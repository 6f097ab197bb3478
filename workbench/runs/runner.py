"""A notebook as a job: papermill runs it, progress reaches the terminal, what came of it is said at the end."""

from __future__ import annotations

import json
import os
import re
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench.runs.parameters import declared_parameters, resolve, table

OK, FAILED, STOPPED = 0, 1, 3
"""Exit codes: done; a cell raised; `break_if` stopped the run."""


@dataclass(frozen=True)
class Result:
    """How a job went."""

    code: int
    output: Path
    """The executed notebook."""
    run: Path | None
    """The run folder, where the notebook has a `run` parameter."""
    error: str = ""
    """Cell and traceback, where a cell raised."""


def run_notebook(
    notebook: str | Path,
    parameters: Mapping[str, Any],
    *,
    output: str | Path | None = None,
    kernel: str | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Result:
    """Run a notebook with parameters; the executed copy goes into its run folder, or to `output`.

    The kernel starts in the present folder and sees WORKBENCH_JOB=1. Raises `SettingError` before anything
    starts where a parameter is unknown or of the wrong type.
    """
    import papermill
    from papermill.exceptions import PapermillExecutionError

    source = Path(notebook)
    values = resolve(source, parameters)
    names = {parameter.name: parameter.default for parameter in declared_parameters(source)}
    run = Path(str(values.get("run", names["run"]))) if "run" in names else None
    target = Path(output) if output is not None else (run or Path("runs") / source.stem) / "notebook.ipynb"
    target.parent.mkdir(parents=True, exist_ok=True)
    say(f"{source.name} → {target}")
    say(table(source, values))
    with _job(say), warnings.catch_warnings():
        # papermill and its kernel client warn about their own internals; ours are errors by name
        warnings.simplefilter("ignore")
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
            )
        except PapermillExecutionError as error:
            code = STOPPED if error.ename == "RunStopped" else FAILED
            return Result(code, target, run, _told(error))
    return Result(OK, target, run)


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
                low, high = summary[f"interval_{when}"]
                lines.append(
                    f"mean held-out reward {when:<6} {summary[f'reward_{when}']:.4f}   95 % in [{low:.4f}, {high:.4f}]"
                    f"   greedy {summary[f'greedy_{when}']:.4f}   ({summary['heldout_rows']} prompts)"
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
