"""Run a notebook as a job: papermill executes it with our engine, progress goes to the terminal, results at the end."""

from __future__ import annotations

import os
import re
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench.base.distribution import install, optional, version_of
from workbench.base.errors import RunError, SettingError
from workbench.base.files import crc32_of
from workbench.jobs.health import check_port
from workbench.jobs.parameters import declared_parameters, read_notebook, resolve, table
from workbench.replay.run import Run, Summary
from workbench.runs.folder import check_place, read_json, step_folders, write_json

OK, FAILED, REFUSED, STOPPED, DIED, HUNG_UP, INTERRUPTED, TERMINATED = 0, 1, 2, 3, 4, 129, 130, 143
"""Exit codes: done; a cell raised; refused before any work; `break_if` stopped the run; the kernel died; SIGHUP; SIGINT; SIGTERM."""
JOB = "job.json"
Say = Callable[[str], None]
"""Shows a line to whoever waits for a job."""


@dataclass(frozen=True)
class NotebookResult:
    """How a job ended: its exit code, and where its files are."""

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
    skip_look: bool = False,
    health: int | None = None,
    say: Say = lambda line: None,
) -> NotebookResult:
    """Run a notebook as a job, with parameters; the executed copy goes into the run folder, or to `output`.

    The run folder is the parameter `run`; where that is empty or missing, it is a new folder in `runs` with the
    notebook's name and the time. A notebook need not declare `run` or `resume`: `wb.train` then takes them from the
    job. The kernel starts in the current directory and sees WORKBENCH_JOB=1; each line that it appends to the file
    named by WORKBENCH_PROGRESS is passed to `say` while it runs. `skip_look` leaves out cells tagged `look`. `health`
    is the port of the health page of its trainings (`jobs.health`), 0 any free one. SIGINT, SIGTERM and SIGHUP finish
    the current step, save a checkpoint and end the job. Raises `SettingError` before anything is written where a
    parameter is unknown or of the wrong type, or there is no such kernel.

    Example:
        >>> wb.run_notebook("notebooks/201_train_grpo.ipynb", {"steps": 5, "run": "runs/a"}).code  # doctest: +SKIP
        0
    """
    check_port(health)
    source = Path(notebook)
    values = resolve(source, parameters)
    kernel, language = kernel_of(source, kernel)
    declared = {parameter.name: parameter.default for parameter in declared_parameters(source)}
    named = values.get("run", declared.get("run"))
    run = Path(named or _fresh(source))
    if not named:
        values["run"] = str(run)
    target = Path(output) if output is not None else run / "notebook.ipynb"
    for place in (run, target.parent):
        check_place(place)
    target.parent.mkdir(parents=True, exist_ok=True)
    _set_aside(target)
    say(f"{source.name} → {target}")
    say(table(source, values))
    say("starting the kernel (Ctrl-C ends the job; a training ends its step and keeps a checkpoint)")
    given = {name: value for name, value in values.items() if name in declared}
    job = {"notebook": str(source), "crc32": crc32_of(source), "parameters": values, "all": {**declared, **values}}
    if (named or output is None) and not (run / JOB).is_file():
        run.mkdir(parents=True, exist_ok=True)
        write_json(run / JOB, job)
    environment = {} if health is None else {"WORKBENCH_HEALTH": str(health)}
    with _job(say, job, declared, **environment):
        code, error = _execute(source, target, given, kernel, language, skip_look)
    return NotebookResult(code, target, run if run.is_dir() else None, error)


def kernel_of(source: Path, kernel: str | None) -> tuple[str, str]:
    """Return (name, language) of the kernel for a notebook: `kernel` if given, else the notebook's, else `python3`.

    Raises `SettingError` where this machine has no such kernel.
    """
    with optional("jobs", "running a notebook as a job"):
        from jupyter_client.kernelspec import KernelSpecManager, NoSuchKernel

    manager = KernelSpecManager()
    name = kernel or read_notebook(source).get("metadata", {}).get("kernelspec", {}).get("name") or "python3"
    try:
        return name, manager.get_kernel_spec(name).language
    except NoSuchKernel:
        there = ", ".join(sorted(manager.find_kernel_specs()))
        what = f"{source.name} asks for the kernel {name!r}" if kernel is None else f"option -k {name}"
        do = None if kernel is not None else "run it with another one: -k python3"
        do = install("jobs") if version_of("ipykernel") is None else do  # no kernel of Python at all
        raise SettingError(what, expected=f"a kernel of this machine: {there}", do=do) from None


def _execute(
    source: Path, target: Path, values: Mapping[str, Any], kernel: str, language: str, skip_look: bool
) -> tuple[int, str]:
    """Execute a notebook by papermill, and return (exit code, error text); the text is empty where every cell ran."""
    with optional("jobs", "running a notebook as a job"):
        import papermill
        from papermill.engines import papermill_engines
        from papermill.exceptions import PapermillExecutionError

    from workbench.jobs.engine import DEAD, JobStopped
    from workbench.jobs.entry import JobEngine

    papermill_engines.register("workbench", JobEngine)  # as the entry point does, also where we are not installed
    try:
        papermill.execute_notebook(
            str(source),
            str(target.absolute()),
            parameters=dict(values),
            engine_name="workbench",
            kernel_name=kernel,
            language=language,
            progress_bar=False,
            cwd=str(Path.cwd()),
            skip_look=skip_look,
            start_timeout=300,  # papermill gives a kernel a minute, which is short on a busy machine
            # the kernel warns at every start that its loopback sockets, signed by a key, are not encrypted too
            extra_arguments=["--log-level=ERROR"],
        )
    except JobStopped as stopped:
        return _signal_code([str(stopped)]), str(stopped)
    except PapermillExecutionError as error:
        if signals := read_json(target)["metadata"]["papermill"].get("signals"):
            return _signal_code(signals), f"stopped by {signals[0]} in cell {error.cell_index + 1}: {error.evalue}"
        if error.ename == DEAD:
            return DIED, error.evalue
        return (STOPPED if error.ename == "RunStopped" else FAILED), _cell_error(error)
    return OK, ""


def _signal_code(names: list[str]) -> int:
    return 128 + signal.Signals[re.split(r"\W", names[0])[0]]


def _set_aside(target: Path) -> None:
    """Rename the executed notebook of an earlier attempt, so that it is kept beside the new one."""
    if target.exists():
        names = re.findall(r"\.(\d{3})\.ipynb$", "\n".join(os.listdir(target.parent)), re.MULTILINE)
        target.rename(target.with_suffix(f".{max(map(int, names), default=0) + 1:03d}.ipynb"))


def job_of(run: str | Path) -> tuple[Path, dict[str, Any], str]:
    """Read the job that wrote a run folder, to resume it; returns (notebook, parameters, a note if the notebook has
    changed, else "").

    The parameters include `resume="auto"` and `run`. Raises `RunError` where no job wrote the folder, or its notebook
    is gone.
    """
    folder = Path(run)
    if not (folder / JOB).is_file():
        do = "start one by `workbench train NOTEBOOK -p run=…`; resume a script's run by wb.train(…, resume='auto')"
        raise RunError(f"no job at {str(run)!r}", expected=f"a run folder with {JOB}", do=do)
    job = read_json(folder / JOB)
    notebook = Path(job["notebook"])
    if not notebook.is_file():
        do = "change to the directory in which the job was started"
        raise RunError("the job's notebook does not exist any more", found=f"no file {notebook}", do=do)
    names = {parameter.name for parameter in declared_parameters(notebook)}
    values = {name: value for name, value in job["parameters"].items() if name in names}
    values |= {"run": str(run), "resume": "auto"}
    changed = crc32_of(notebook) != job["crc32"]
    return notebook, values, f"note: {notebook} has changed since the job began" if changed else ""


def check_notebook(
    notebook: str | Path, parameters: Mapping[str, Any], *, kernel: str | None = None, say: Say = lambda line: None
) -> tuple[int, str]:
    """Check a notebook by running it up to the start of its training: returns (0, findings) or (exit code, error text).
    `say` gets lines about what takes long.

    Exit code 2 means that a cell raised. Cells tagged `look` are left out, files go to a temporary folder, and no model
    samples.
    """
    source = Path(notebook)
    values = resolve(source, parameters)
    kernel, language = kernel_of(source, kernel)
    declared = {parameter.name for parameter in declared_parameters(source)}
    given, job = {name: output for name, output in values.items() if name in declared}, {"parameters": values}
    with (
        tempfile.TemporaryDirectory(prefix="workbench-") as folder,
        _job(say, job, declared, WORKBENCH_CHECK="1"),
    ):
        target = Path(folder) / source.name
        code, error = _execute(source, target, given, kernel, language, skip_look=True)
        outputs = [output for cell in read_json(target)["cells"] for output in cell.get("outputs", [])]
    errors = [output for output in outputs if output["output_type"] == "error"]
    if code == OK:
        return OK, "every cell ran; none of them trains"
    if errors and errors[0]["ename"] == "Checked":
        return OK, errors[0]["evalue"]
    return (REFUSED if code == FAILED else code), f"{errors[0]['ename']}: {errors[0]['evalue']}" if errors else error


def _fresh(source: Path) -> Path:
    return Path("runs") / f"{source.stem}-{time.strftime('%Y%m%d-%H%M%S')}"


def _cell_error(error: Any) -> str:
    """Format the error of a failed cell: which cell, what it raised, and the last 12 lines of the traceback without
    colours.
    """
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in "\n".join(error.traceback).splitlines()]
    return f"cell {error.cell_index + 1} raised {error.ename}: {error.evalue}\n" + "\n".join(lines[-12:])


@contextmanager
def _job(say: Say, job: Mapping[str, Any], declared: Collection[str], **environment: str) -> Iterator[None]:
    """Context manager that sets the kernel's environment, and passes the loop's progress lines to `say` from a thread.

    The environment tells `wb.train` the `run` and `resume` that the notebook does not declare, and the job's record,
    which `train` writes into its run folder once its settings are accepted: a refused job leaves the record of the
    earlier one. Progress bars of other libraries are off, because in a saved notebook they are blank or one line for
    every refresh.
    """
    with tempfile.TemporaryDirectory(prefix="workbench-") as folder:
        path, record = Path(folder) / "progress", Path(folder) / JOB
        path.touch()
        write_json(record, job)
        known = {"run": "", "resume": "auto", **job["parameters"]}
        known |= {name: plain for name, plain in (("run", ""), ("resume", "never")) if name in declared}
        ours = {f"WORKBENCH_{name.upper()}": known[name] for name in ("run", "resume")}
        ours |= {"WORKBENCH_JOB": "1", "WORKBENCH_JOB_RECORD": str(record), "WORKBENCH_PROGRESS": str(path)}
        ours |= {"TQDM_DISABLE": "1", **environment}
        before = {name: os.environ[name] for name in ours if name in os.environ}
        os.environ.update(ours)
        done = threading.Event()
        tail = threading.Thread(target=_follow, args=(path, say, done), daemon=True)
        tail.start()
        try:
            yield
        finally:
            done.set()
            tail.join()
            for name in ours:
                del os.environ[name]
            os.environ.update(before)


def _follow(path: Path, say: Say, done: threading.Event) -> None:
    with path.open() as file:
        waiting = ""
        while True:
            last = done.wait(0.1)
            waiting += file.read()
            *lines, waiting = waiting.split("\n")
            for line in lines:
                say(line)
            if last:
                return


def closing_lines(result: NotebookResult) -> list[str]:
    """Return the lines to print when a job has ended: held-out rewards before and after, symptoms, and where the files
    are, the model's among them.
    """
    lines, run = list[str](), result.run
    if run is not None and (run / "summary.json").is_file():
        lines += [f"{what}: {text}" for what, text in Summary(read_json(run / "summary.json")).pairs()]
        if (run / "settings.json").is_file():
            lines += [f"symptom: {one}" for one in Run(run).symptoms]
    lines.append(f"executed notebook  {result.output}")
    kept = {"metrics": "metrics.jsonl", "TensorBoard": "tensorboard", "curves": "curves.png", "summary": "summary.json"}
    if run is not None and (saved := [*step_folders(run / "checkpoints").values()]):
        kept["model"] = f"checkpoints/{saved[-1].name}/actor"
    there = {what: run / name for what, name in kept.items() if (run / name).exists()} if run is not None else {}
    return lines + [f"{what:<18} {path}" for what, path in there.items()]
