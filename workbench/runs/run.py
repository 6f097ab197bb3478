"""A run, read from its folder: also while another process is writing it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.errors import CheckpointError, RunError, message
from workbench.runs import checkpoint
from workbench.runs.folder import STEP, read_json, read_metrics, step_folders
from workbench.runs.keeping import Kept, read_kept
from workbench.runs.lock import held
from workbench.stepper import Stepper
from workbench.trace import Trace

if TYPE_CHECKING:
    import pandas as pd

    from workbench.runs.replay import Counterfactual
    from workbench.runs.replayed import Replayed
    from workbench.runs.symptoms import Symptoms


class Traces(Mapping[int, Trace]):
    """Step → recorded trace, opened when it is looked at; printed, a line a step with its headline numbers."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The run's metrics rows."""
        return read_metrics(self._folder.parent / "metrics.jsonl")

    def why(self, step: int) -> Kept:
        """Why the trace of a step is there: it was due, or a symptom began in it."""
        return read_kept(self._path(step))

    def _steps(self) -> list[int]:
        return [step for step, path in step_folders(self._folder).items() if (path / "trace.json").is_file()]

    def reasons(self) -> dict[int, Kept]:
        """Step → why its trace is there, in one look; what is pruned meanwhile is left out."""
        found = {step: read_kept(self._at(step)) for step in self._steps()}
        return {step: kept for step, kept in found.items() if self._at(step).is_dir()}

    def _at(self, step: int) -> Path:
        return self._folder / f"step_{step:06d}"

    def _path(self, step: int) -> Path:
        if not (self._at(step) / "trace.json").is_file():
            raise RunError(message(f"no trace of step {step}", expected=f"one of {self._steps()}"))
        return self._at(step)

    def __getitem__(self, step: int) -> Trace:
        return Trace.load(self._path(step))

    def __iter__(self) -> Iterator[int]:
        return iter(self._steps())

    def __len__(self) -> int:
        return len(self._steps())

    def __repr__(self) -> str:
        from workbench.views.run_lists import traces_text

        return traces_text(self)

    def _repr_html_(self) -> str:
        from workbench.views.run_lists import traces_html

        return traces_html(self)


class Run:
    """`load_run(path)`: metrics, curves, traces, checkpoints, settings, summary. Everything is read afresh."""

    def __init__(self, path: str | Path, *, stopped: Stepper | None = None, notes: tuple[str, ...] = ()) -> None:
        self.path = Path(path)
        self.stopped = stopped
        self.notes = notes
        if not (self.path / "settings.json").is_file():
            raise RunError(
                message(f"no run at {str(path)!r}", expected="a folder with settings.json", do="check the path")
            )

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Metrics rows as they are on disk."""
        return read_metrics(self.path / "metrics.jsonl")

    @property
    def metrics(self) -> pd.DataFrame:
        """One line a step, by `training/global_step`; step 0 is the validation before training."""
        import pandas as pd

        frame = pd.DataFrame(self.rows)
        return frame.set_index(STEP, drop=False) if len(frame) else frame

    @property
    def settings(self) -> dict[str, Any]:
        """What the run was started with."""
        return read_json(self.path / "settings.json")

    @property
    def summary(self) -> Summary:
        """What came of it; empty while it runs."""
        path = self.path / "summary.json"
        return Summary(read_json(path) if path.is_file() else {})

    @property
    def traces(self) -> Traces:
        """Step → recorded trace."""
        return Traces(self.path / "traces")

    @property
    def checkpoints(self) -> list[int]:
        """Steps with a checkpoint."""
        return checkpoint.steps(self.path / "checkpoints")

    def checkpoint(self, step: int | None = None) -> Path:
        """The folder of a checkpoint (the newest by default), verified; `engines.local` opens it.

        Raises `CheckpointError` where it is damaged: another one is never taken in its place.
        """
        steps = self.checkpoints
        wanted = steps[-1] if step is None and steps else step
        if wanted is None or wanted not in steps:
            what = "no checkpoint" if wanted is None else f"no checkpoint of step {wanted}"
            raise RunError(message(f"{what} in {self.path}", expected=f"one of {steps}" if steps else None))
        path = checkpoint.folder_of(self.path / "checkpoints", wanted)
        try:
            checkpoint.verify(path)
        except CheckpointError as error:
            good = checkpoint.latest(self.path / "checkpoints")
            hint = f"the newest good one is that of step {good.step}" if good.path else "there is no good one"
            raise CheckpointError(message(str(error), do=hint)) from error
        return path

    @property
    def symptoms(self) -> Symptoms:
        """What the numbers say is wrong, and what people do about it; empty when nothing looks wrong."""
        from workbench.runs.symptoms import Symptoms, shown_by

        traces = self.traces
        return Symptoms(shown_by(self.rows, traces[max(traces)].batch if len(traces) else None))

    @property
    def reachable(self) -> str:
        """Steps whose exact weights can be made: checkpoints, and what the recorded updates add to them (`0, 3–6`)."""
        from workbench.runs.replay import reachable

        return reachable(self.path)

    # --- any step again -------------------------------------------------------------------------

    def stepper(self, step: int, at: str | None = None, engines: Mapping[str, Any] | None = None) -> Replayed:
        """A Stepper on a recorded step: before its first phase, or standing before the phase `at`.

        Without `at` the weights are opened at once: those of the newest checkpoint before, and the recorded updates
        since. Running it gives the run's own numbers, bit for bit on the CPU with the run's thread count.

        With `at` the step's trace must be on disk. The phases before are there as they were recorded; no engine is
        opened until a stage needs one, and the later log-probs and values are taken as recorded while the tokens are the
        same: `run.stepper(137, at="reward").replace("reward", other).run(until="advantage")` needs no model at all.

        A stage made with something that the folder has by name alone (a reward from a cell) gives its recorded outputs
        and says so; where its input has changed it must be replaced. `engines` (role → engine) stand in place of the
        run's, with the weights that they have. Raises `RunError` where the step cannot be reached, saying which can.
        """
        from workbench.runs.replayed import stepper_at

        return stepper_at(self.path, step, at, engines)

    def engine(self, step: int, role: str = "actor") -> Any:
        """An engine of its own with exactly the weights and optimizer after a step (0: before training)."""
        from workbench.runs.replay import standing_after

        return standing_after(self.path, step).engines[role]

    def counterfactual(
        self, step: int, *, uids: Sequence[str] = (), rows: Sequence[int] = (), until: int | None = None
    ) -> Counterfactual:
        """Leave groups or rows out of one recorded update, do the later ones as recorded, and compare.

        `until` is the last update to do (the last recorded one by default). See `replay.counterfactual`.
        """
        from workbench.runs.replay import counterfactual

        return counterfactual(self.path, step, uids=uids, rows=rows, until=until)

    # --- while it goes on -----------------------------------------------------------------------

    @property
    def state(self) -> str:
        """`running`, `finished`, `stopped` (it says why in its summary), or `died`: nobody writes it and it has no end."""
        if held(self.path / "lock.json"):
            return "running"
        summary = self.summary
        if not summary:
            return "died"
        return "stopped" if summary.get("stopped") else "finished"

    async def follow(self, every: float = 2.0) -> Run:
        """Show progress and curves of a run that is going on elsewhere until it ends: `await run.follow()`."""
        from workbench.runs.display import Live

        steps = int(self.settings["train"]["steps"])
        live, seen = Live(steps, self.rows), 0
        while True:
            over, rows = self.state != "running", self.rows
            for row in rows[seen:]:
                live.on_row(row, row.get("timing_s/step", 0.0) * (steps - row[STEP]))
            seen = len(rows)
            if over:
                live.close(self.summary.get("stopped") if self.summary else self.state)
                return self
            await asyncio.sleep(every)

    def curves(self, *, marks: bool = True, **others: Run | str | Path) -> Any:
        """The curves as a matplotlib figure; other runs (or their folders) by name are overlaid.

        `marks`: symptoms that this run showed on its way stand on the time axis, numbered, and are said beneath.
        """
        from workbench.runs.symptoms import Watch
        from workbench.views.curves import panel

        rows, named = self.rows, {name: _opened(run).rows for name, run in others.items()}
        seen = Watch(rows).marks if marks else None
        return panel(rows, others=named, title=self.path.name, marks=seen, empty=False)

    def figure(self, *keys: str, others: Mapping[str, Run] | None = None, marks: bool = False, **options: Any) -> Any:
        """Curves for a paper in one call: `run.figure("reward", "KL", path="curves.pdf", others={"DAPO": other})`.

        `options`: `path` (pdf, svg or png), `width` ("column", "page" or inches), `height`, `name`, `smooth`: see
        `views.paper.figure`. `marks`: symptoms stand on the time axis, by number; the caption says what they are.
        """
        from workbench.runs.symptoms import Watch
        from workbench.views.paper import figure

        rows, named = self.rows, {name: run.rows for name, run in (others or {}).items()}
        seen = Watch(rows).marks if marks else None
        return figure(rows, keys or ("reward",), others=named, marks=seen, **{"name": self.path.name, **options})

    def tensorboard(self) -> str:
        """TensorBoard on this run, in the cell; elsewhere the command line. Needs a browser that reaches its local port."""
        from workbench.runs.display import tensorboard

        return tensorboard(self.path)

    def __repr__(self) -> str:
        from workbench.views.run_lists import run_text

        return run_text(self)

    def _repr_html_(self) -> str:
        from workbench.views.run_lists import run_html

        return run_html(self)


class Summary(dict[str, Any]):
    """summary.json, with a face."""

    def pairs(self) -> list[tuple[str, str]]:
        """(what, value) of the main numbers."""
        found = []
        for when in ("before", "after"):
            if f"reward_{when}" in self:
                low, high = (number(bound) for bound in self[f"interval_{when}"])
                text = f"{number(self[f'reward_{when}'])}  (95 % in [{low}, {high}], greedy {number(self[f'greedy_{when}'])})"
                found.append((f"held-out reward {when}", text))
        return found + [
            (key, str(self[key]))
            for key in ("heldout_rows", "steps", "seconds", "stopped")
            if self.get(key) is not None and (key, self[key]) != ("heldout_rows", 0)
        ]

    def __repr__(self) -> str:
        from workbench.views.html import plain

        return plain("; ".join(f"{what} {value}" for what, value in self.pairs())) or "no summary yet"

    def _repr_html_(self) -> str:
        from workbench.views.html import pairs_table

        return pairs_table(self.pairs())


def number(value: float | None) -> str:
    """Four decimals; a dash where there is no number (the interval of one prompt)."""
    return "–" if value is None else f"{value:.4f}"


def _opened(run: Run | str | Path) -> Run:
    return run if isinstance(run, Run) else Run(run)


def load_run(path: str | Path) -> Run:
    """Open a run folder, finished or going on elsewhere. Raises `RunError` where there is none."""
    return Run(path)
