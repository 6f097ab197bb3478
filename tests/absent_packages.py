"""A program of `test_distribution.py`: the same work without each optional package in turn, and without all of them.

Each turn is a fork of this process, which has imported none of them, with a finder that refuses the package.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib.figure  # noqa: F401
import pandas  # noqa: F401
import pyarrow.parquet  # noqa: F401
import torch
import transformers

import workbench as wb
from workbench.base.errors import first_line

MODULES = {"math-verify": "math_verify", "prometheus_client": "prometheus_client", "markdown-it-py": "markdown_it"}
"""Package → its module, where the names differ."""


class Without:
    """Stands before all finders of modules, which find nothing of some packages."""

    def __init__(self, modules: set[str]) -> None:
        self.modules, self.finders = modules, list(sys.meta_path)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] in self.modules:
            return None
        specs = (finder.find_spec(name, path, target) for finder in self.finders if hasattr(finder, "find_spec"))
        return next((spec for spec in specs if spec is not None), None)

    def find_distributions(self, context: Any = None) -> Any:
        """What `importlib.metadata` asks finders for."""
        return [
            one
            for finder in self.finders
            if hasattr(finder, "find_distributions")
            for one in finder.find_distributions(context)
        ]


def step(folder: Path) -> None:
    """One step, looked at, compared, trained and replayed."""
    rows = wb.rows("data/arith/train.parquet", max_prompt_length=256, limit=8)
    pipe = wb.recipes.grpo(wb.engines.local("data/tiny-arith", lr=2e-4), group_size=2, max_tokens=8)
    stepper = wb.Stepper(pipe, rows.batch(2)).run(until="advantage")
    for view in (wb.views.samples(stepper), wb.views.tokens(stepper, 0), stepper, stepper.compare(stepper.fork())):
        assert view._repr_html_() and repr(view)
        with contextlib.suppress(NotImplementedError):  # IPython goes on with the HTML
            view._ipython_display_()
    run = wb.train_blocking(pipe, rows, steps=1, batch_size=2, run=folder, trace_freq=1)
    assert run.stepper(1).run().batch is not None and run.curves() is not None


def notebook(folder: Path) -> None:
    result = wb.run_notebook("notebooks/101_one_step.ipynb", {}, output=folder / "n.ipynb")
    assert result.code == 0, result.error


def report(folder: Path) -> None:
    from workbench.jobs.report import write_report

    write_report(folder)


def health(folder: Path) -> None:
    from workbench.jobs.health import exposition

    exposition(None)  # type: ignore[arg-type] # the package is looked for first


def judge(folder: Path) -> None:
    wb.rewards.Judge


def remote(folder: Path) -> None:
    try:
        wb.engines.remote("http://127.0.0.1:9", "data/tiny-arith")
    except wb.WorkbenchError as error:
        if "pip install" in str(error):
            raise


def tools(folder: Path) -> None:
    from workbench.agents.tools.mcp_servers import mcp_tools

    try:
        mcp_tools({"x": {"command": "no-such-program"}})
    except wb.WorkbenchError as error:
        if "pip install" in str(error):
            raise


def lora(folder: Path) -> None:
    wb.engines.local("data/tiny-arith", lora_rank=2)


def gguf(folder: Path) -> None:
    from workbench.engines.exporting import write_form

    write_form(Path("data/tiny-arith"), folder, "gguf", "f16", "m", "float32")


def cluster(folder: Path) -> None:
    from workbench.cluster.session import require_ray

    require_ray()


def tensordict(folder: Path) -> None:
    data = wb.DataProto.from_dict({"responses": torch.zeros(2, 3, dtype=torch.long)})
    wb.DataProto.from_tensordict(data.to_tensordict())


def events(folder: Path) -> None:
    from workbench.runs.trackers import check_trackers

    check_trackers(["tensorboard"])


NEEDS: dict[str, Callable[[Path], Any]] = {
    "papermill": notebook, "nbclient": notebook, "nbformat": notebook, "nbconvert": report, "bleach": report, "pydantic": judge, "httpx": remote,
    "mcp": tools, "peft": lora, "gguf": gguf, "ray": cluster, "psutil": cluster, "tensordict": tensordict, "tensorboard": events, "prometheus_client": health,
    "math-verify": lambda folder: wb.rewards.math_verify(),
}  # fmt: skip
"""Package → work that cannot be done without it."""


ON_THE_ROAD = {"anywidget", "ipywidgets", "traitlets", "tensorboard", "httpx", "psutil"}
"""Packages that a step would use if they were there; without any of the others it takes the very same way."""


def turn(absent: list[str], folder: Path, results: Any) -> None:
    """In a fork: the step and what needs the absent packages; then which modules have been imported."""
    sys.meta_path[:] = [Without({MODULES.get(name, name) for name in absent})]
    seen = {}
    steps = [("step", step)] if len(absent) > 1 or set(absent) & ON_THE_ROAD else []
    for part, doing in [*steps, *((f"needs {name}", NEEDS[name]) for name in absent if name in NEEDS)]:
        try:
            doing(folder)
            seen[part] = "ok"
        except Exception as error:  # noqa: BLE001 - the test looks at it
            seen[part] = f"{type(error).__name__}: {first_line(error, 400)}"
    results.put(seen)


def main() -> None:
    folder, packages = Path(sys.argv[1]), json.loads(sys.argv[2])
    torch.set_num_threads(1)
    finders, every = list(sys.meta_path), {MODULES.get(name, name) for name in packages}
    sys.meta_path[:] = [Without(every)]  # what each fork needs is imported once, without any of them
    transformers.AutoModelForCausalLM.from_pretrained("data/tiny-arith")
    transformers.AutoTokenizer.from_pretrained("data/tiny-arith")
    assert not every & set(sys.modules), every & set(sys.modules)
    sys.meta_path[:] = finders
    fork, seen = multiprocessing.get_context("fork"), {}
    for number, absent in enumerate([*([name] for name in packages), list(packages)]):
        results = fork.Queue()
        process = fork.Process(target=turn, args=(absent, folder / str(number), results))
        process.start()
        seen[",".join(absent)] = results.get(timeout=600)
        process.join()
    print(json.dumps(seen))


if __name__ == "__main__":
    main()
