"""The papermill engine behind `--engine workbench` and `workbench train`. What it adds to papermill's own:

- The output notebook is current on disk: saved a few seconds after each output, also while a cell goes on silently, with
  the widgets' state and one output per stream; written to a temporary file and renamed, so that a kill leaves a whole file.
- SIGINT, SIGTERM and SIGHUP (a closed terminal) interrupt the kernel, whose loop ends its step and saves a checkpoint; a
  second one ends the kernel. Cells that never ran are marked `skipped`, not `completed`.
- A kernel that dies leaves an error in its cell.
- Cells tagged `look` can be left out (`skip_look=True`).
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from pathlib import Path
from typing import Any

from workbench.base import runtime
from workbench.base.distribution import optional
from workbench.base.files import write_text
from workbench.runs.folder import goes_on, is_run, read_json
from workbench.runs.trackers import append_line
from workbench.runs.updates import kept_until

with optional("jobs", "running a notebook as a job"):
    import nbformat
    from nbclient.exceptions import CellExecutionError, DeadKernelError
    from nbclient.util import run_sync
    from papermill.clientwrap import PapermillNotebookClient
    from papermill.engines import NotebookExecutionManager
    from papermill.iorw import LocalHandler, papermill_io

SAVE_EVERY = 3.0
"""Seconds between saves of a notebook that has changed."""
LAST_RESORT = 120.0
"""Seconds that an interrupted kernel has to end before it is killed: it may be saving a checkpoint of a large model."""
LOOK = "look"
SKIPPED = "skipped"
DEAD = "DeadKernel"
_UNUSED = ("input_path", "start_timeout", "execution_timeout", "autosave_cell_every")
"""papermill's options that this engine does not use, or takes as arguments of their own."""


class JobStopped(Exception):
    """A signal ended the job although no cell raised. It is raised because papermill alone would record such a job as
    completed.
    """


class AtomicFile(LocalHandler):
    """papermill's handler for one local file. It replaces the file atomically, so that a reader never sees half of it."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    def write(self, text: str, _: str) -> None:
        """Write `text` to a temporary file in the same folder, then rename that to the handler's path."""
        write_text(self._path, text)


class Manager(NotebookExecutionManager):
    """papermill's record of an execution; it also saves the widgets' state, and marks cells that were not reached
    `skipped`.
    """

    client: KernelClient | None = None
    changed = False

    def save(self, **kwargs: Any) -> None:
        """Write the notebook as it is now, with the widgets' state."""
        if self.client is not None:
            self.client.set_widgets_metadata()
        self.changed = False
        super().save(**kwargs)

    def autosave_cell(self) -> None:
        """Note that a cell has new output, so that the client's timer saves it; papermill calls this after each output."""
        self.changed = True

    def notebook_complete(self, **kwargs: Any) -> None:
        """Finish the record: mark the cells that were not reached `skipped`, where papermill would mark them completed."""
        for cell in self.nb.cells:
            ran = cell.cell_type != "code" or cell.execution_count is not None or not cell.source.strip()
            pending = cell.metadata.papermill["status"] == self.PENDING
            if pending and not (ran and cell.metadata.papermill["start_time"] is not None):
                cell.metadata.papermill["status"] = SKIPPED
        super().notebook_complete(**kwargs)


class KernelClient(PapermillNotebookClient):
    """papermill's notebook client, with saves on a timer, one output per stream, and signals passed on to the kernel."""

    def __init__(self, nb_man: Manager, *, skip_look: bool = False, **options: Any) -> None:
        super().__init__(nb_man, **options)
        self._skip_look = skip_look
        self.received: list[int] = []
        """Numbers of the signals so far, in order."""
        self._last_resort = threading.Timer(LAST_RESORT, self._send, [signal.SIGKILL])
        self._last_resort.daemon = True
        nb_man.client = self

    def papermill_execute_cells(self) -> None:
        """Run the notebook's cells in order until one raises, the kernel dies, or a signal comes."""
        for index, cell in enumerate(self.nb.cells):
            if self._skip_look and LOOK in cell.metadata.get("tags", []):
                cell.metadata.papermill["status"] = SKIPPED
                continue
            if self._run(index, cell) or self.received:
                return

    def _run(self, index: int, cell: Any) -> bool:
        """Run one cell and return whether the job ends with it, because it raised or the kernel died."""
        self.nb_man.cell_start(cell, index)
        try:
            self.execute_cell(cell, index)
        except CellExecutionError as error:
            self.nb_man.cell_exception(self.nb.cells[index], cell_index=index, exception=error)
            return True
        except DeadKernelError:
            self.nb.cells[index].outputs.append(self._obituary(index))
            self.nb_man.cell_exception(self.nb.cells[index], cell_index=index)
            return True
        finally:
            self.nb_man.cell_complete(self.nb.cells[index], cell_index=index)
        return False

    def _obituary(self, index: int) -> Any:
        """Make the error output of a cell whose kernel died; it says how, as far as the exit status tells, and how the
        job's run goes on.
        """
        process = self._process()
        code = process.poll() if process is not None else None
        if self.received:
            why = f"it did not end in time after {signal.Signals(self.received[0]).name} and was killed"
        elif code is not None and code < 0:
            why = f"killed by {signal.Signals(-code).name}"
            why += ": often for lack of memory (see the system's log)" if code == -signal.SIGKILL else ""
        else:
            why = (
                f"it exited with status {code}" if code is not None else "how it ended is not known: it left no status"
            )
        text = f"the kernel died in cell {index + 1} of {len(self.nb.cells)}: {why}. What was shown before is above."
        record = os.environ.get("WORKBENCH_JOB_RECORD")
        run = Path((read_json(Path(record)).get("all") or {}).get("run") or "") if record else Path()
        if is_run(run):
            text += f"\nThe run goes on by: {goes_on(run)}, {kept_until(run)}"
        return nbformat.v4.new_output("error", ename=DEAD, evalue=text, traceback=[text])

    def execute(self, **kwargs: Any) -> Any:
        """Run the notebook and return it. Where the kernel dies its cell gets an error output; no exception is raised."""
        self.reset_execution_trackers()
        with self.setup_kernel(**kwargs), runtime.on_signals(self._on_signal):
            try:
                self.papermill_execute_cells()
                self.set_widgets_metadata()
            finally:
                self._last_resort.cancel()
        return self.nb

    async def async_execute_cell(self, cell: Any, cell_index: int, *args: Any, **options: Any) -> Any:
        """Run one cell as nbclient does; while it runs, save the notebook every few seconds if it has new output. One that
        takes longer is a line of the job's progress.
        """
        clock = asyncio.create_task(self._keep_current(f"cell {cell_index + 1} of {len(self.nb.cells)} is running"))
        try:
            return await super().async_execute_cell(cell, cell_index, *args, **options)
        finally:
            clock.cancel()

    execute_cell = run_sync(async_execute_cell)  # the base class's is bound to its own coroutine

    async def _keep_current(self, line: str) -> None:
        await asyncio.sleep(SAVE_EVERY)
        append_line(line)
        while True:
            if self.nb_man.changed:
                self.nb_man.save()
            await asyncio.sleep(SAVE_EVERY)

    def output(self, outs: list[Any], msg: Any, display_id: Any, cell_index: int) -> Any:
        """Add an output to a cell; consecutive ones of one stream are joined, so that a printing loop leaves one output."""
        out = super().output(outs, msg, display_id, cell_index)
        if out is not None and out.output_type == "stream" and len(outs) > 1 and outs[-2].get("name") == out.name:
            outs[-2].text = _returned(outs[-2].text + out.text)
            outs.pop()
        return out

    # --- signals --------------------------------------------------------------------------------

    def _on_signal(self, number: int, _: Any) -> None:
        self.received.append(number)
        self._send(signal.SIGINT if len(self.received) == 1 else signal.SIGKILL)
        if len(self.received) == 1:
            self._last_resort.start()

    def _process(self) -> Any:
        return getattr(getattr(self.km, "provisioner", None), "process", None)

    def _send(self, number: int) -> None:
        """Send a signal to the kernel's process group, as Jupyter's interrupt does."""
        process = self._process()
        if process is not None and process.poll() is None:
            os.killpg(os.getpgid(process.pid), number)


def _returned(text: str) -> str:
    """Return text as a terminal shows it: in each line, what stands before a lone carriage return is overwritten."""
    if "\r" not in text:
        return text
    return "\n".join(line.rstrip("\r").rsplit("\r", 1)[-1] for line in text.split("\n"))


def execute_notebook(
    nb: Any,
    kernel_name: str,
    *,
    output_path: str | None = None,
    progress_bar: bool = True,
    log_output: bool = False,
    **options: Any,
) -> Any:
    """Run a notebook for papermill, and return it. Raises `JobStopped` where a signal ended the job and no cell raised."""
    if output_path is not None and "://" not in str(output_path):
        base = getattr(papermill_io.get_handler("local"), "_cwd", None) or os.getcwd()
        papermill_io.register(str(output_path), AtomicFile(Path(base) / output_path))
    manager = Manager(nb, output_path=output_path, progress_bar=progress_bar, log_output=log_output)
    # nbclient gives a finished cell's outputs 4 s to arrive, and a job would end where a busy machine takes longer
    passed = {"iopub_timeout": 60, **{key: value for key, value in options.items() if key not in _UNUSED}}
    startup = options.get("start_timeout", 60)
    client = KernelClient(manager, kernel_name=kernel_name, startup_timeout=startup, log_output=log_output, **passed)
    manager.notebook_start()
    try:
        client.execute()
    finally:
        manager.cleanup_pbar()
        received = [signal.Signals(number).name for number in client.received]
        manager.nb.metadata.papermill["signals"] = received
        manager.notebook_complete()
    if received and not manager.nb.metadata.papermill["exception"]:
        raise JobStopped(f"{', '.join(received)} stopped the job; cells that had not run are marked skipped")
    return manager.nb
