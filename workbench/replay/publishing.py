"""A run's model in a folder of its own, and on the Hugging Face hub with a card of what the run knows."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from workbench.base.errors import RunError
from workbench.engines.exporting import check_form, write_form
from workbench.engines.local_engine.loading import resolve
from workbench.runs.conditions import BEST
from workbench.runs.folder import written


def save(run: Any, folder: str | Path, form: str, dtype: str | None, step: int | str | None) -> Path:
    """Write the model of a run to a new folder: see `Run.save`."""
    check_form(form, dtype)
    target = Path(folder).absolute()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        do = "name a new folder, or remove that one"
        raise RunError(f"{folder} exists", expected="a new or an empty folder", found="files", do=do)
    target.parent.mkdir(parents=True, exist_ok=True)
    record = (run.settings.get("engines") or {}).get("actor", {})
    with _trained(run, step) as source:
        base_dtype = str(record.get("base_dtype", "float32"))
        written(target, lambda staging: write_form(source, staging, form, dtype, target.name, base_dtype))
    return next(target.glob("*.gguf")) if form == "gguf" else Path(folder)


@contextmanager
def _trained(run: Any, step: int | str | None) -> Iterator[Path]:
    """Context manager: yields the folder of the trained model after a step, of its checkpoint or restored for this."""
    if step is None or step == BEST or step in run.checkpoints:
        yield Path(resolve(run.checkpoint(step)))
        return
    with tempfile.TemporaryDirectory(prefix="workbench-save-") as folder:
        run.engine(step).save(Path(folder))
        yield Path(folder)
