"""A run's or a dump's samples as text, for a look in a terminal: what `workbench show` prints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from workbench.base.errors import SettingError
from workbench.compat.dumps import read_dump
from workbench.replay.remote import is_address
from workbench.replay.run import load_run
from workbench.runs.folder import is_run
from workbench.views.samples import samples
from workbench.views.tokens import tokens


def shown(
    source: str | Path,
    *,
    step: int | None = None,
    order: str = "worst",
    rows: int = 8,
    search: str = "",
    row: int | None = None,
    colour: str | None = None,
) -> str:
    """The text forms of `views.samples` and `views.tokens` of a recorded step, or of a dump of rollouts.

    Args:
        source: a run folder, or what `compat.read_dump` reads.
        step: a recorded step; None: the run itself (state, recorded steps, symptoms), or all steps of a dump.
        order, rows, search: which samples, as in `views.samples`.
        row: one sample in full; with `colour` (`advantage`, `kl`, …) its tokens, too.

    Raises `RunError` for a step without a trace, `SettingError` for an order, row or colour that there is not.
    """
    found: Any
    if not is_address(source) and not is_run(Path(source)):
        found = read_dump(source, step=step)
    else:
        run = load_run(source)
        if step is None and row is None:
            return "\n\n".join(str(one) for one in (run, run.traces, run.symptoms) if one)
        found = run.traces[max(run.traces, default=0) if step is None else step]
    try:
        if row is None:
            return str(samples(found, rows, order, search=search))
        parts = [str(samples(found).row(row)), *([str(tokens(found, row, colour))] if colour else [])]
    except (ValueError, IndexError) as error:
        raise SettingError(str(error)) from error
    return "\n\n".join(parts)
