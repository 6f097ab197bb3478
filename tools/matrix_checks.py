"""The checks of tools/matrix.py, by name: `python tools/matrix_checks.py readme`, in a folder that `workbench notebooks .` has filled."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import workbench as wb

ROOT = Path(__file__).parents[1]


def readme() -> None:
    """README's example as a script, with two steps of training."""
    text = "\n".join(re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL))
    text = text.replace("await wb.train(", "wb.train_blocking(").replace("steps=40", "steps=2")
    Path("readme.py").write_text(text, encoding="utf-8")
    runpy.run_path("readme.py", run_name="__main__")


def recipe(**options: object) -> wb.Pipeline:
    """A small GRPO of the tiny world."""
    return wb.recipes.grpo(wb.engines.local("data/tiny-arith", lr=2e-4), group_size=2, max_tokens=8, **options)  # type: ignore[arg-type]


def rows() -> wb.Rows:
    """Its data."""
    return wb.rows("data/arith/train.parquet", max_prompt_length=256)


def views() -> None:
    """Every public view, and every object that shows itself, as HTML or as a picture."""
    trace = wb.Trace.load("data/arith-batch")
    pipe = recipe(kl_coef=0.001)
    stepper = wb.Stepper(pipe, rows().batch(2)).run()
    other = (
        stepper.fork().back(to="reward").replace("reward", lambda response: float(len(response))).run(until="advantage")
    )
    runs = {
        seed: wb.train_blocking(
            pipe, rows(), steps=2, batch_size=2, run=f"runs/views-{seed}", trace_freq=1, seed=seed, display=None
        )
        for seed in (0, 1)
    }
    run = runs[0]
    what_if = wb.Stepper(pipe, rows().batch(2)).run(until="advantage").what_if(clip_ratio_high=0.5, updates=1)
    v = wb.views
    made = {
        "samples": v.samples(trace), "groups": v.groups(trace), "tokens": v.tokens(trace, 0), "transcript": v.transcript(trace, 0, rendered=True),
        "seeds": v.seeds({"grpo": list(runs.values())}), "sampler_logprob_diff": v.sampler_logprob_diff(stepper.batch),
        "advantage_table": v.advantage_table(trace.batch), "advantage_figure": v.advantage_figure(v.advantage_table(trace.batch)),
        "what_if_table": v.what_if_table({"clip": what_if}), "what_if_figure": v.what_if_figure({"clip": what_if}),
        "values_figure": v.values_figure(trace.batch.with_columns({"values": trace.batch["advantages"]})),
        "figure": v.figure(run.metrics), "panel": v.panel(run.metrics),
        "save_figure": v.save_figure(v.figure(run.metrics), "curves.png"),
    }  # fmt: skip
    assert set(made) == set(v.__all__), set(made) ^ set(v.__all__)
    shown = [
        trace,
        trace.batch,
        stepper,
        other,
        stepper.compare(other),
        pipe,
        rows(),
        run,
        run.summary,
        run.traces,
        what_if,
        run.audit(),
    ]
    shown += [
        run.stepper(1),
        run.diagnose(),
        run.history(v.samples(run.traces[1]).row(0)),
        *(one for one in made.values() if hasattr(one, "_repr_html_")),
    ]
    for one in shown:
        html = one._repr_html_()
        assert html or one._repr_png_(), type(one)
        assert repr(one), type(one)
    assert Path("curves.png").stat().st_size > 1000


def job() -> None:
    """Notebook 101 through the runner of jobs."""
    result = wb.run_notebook("notebooks/101_one_step.ipynb", {"prompts": 2, "group_size": 2}, output="101.ipynb")
    assert result.code == 0, result.error


def resume() -> None:
    """Two steps, a third from their checkpoint: the same numbers as three in one go, and the third steps again exactly."""
    settings = {"batch_size": 2, "save_freq": 1, "trace_freq": 1, "trackers": (), "display": None}
    whole = wb.train_blocking(recipe(), rows(), steps=3, run="runs/whole", **settings)  # type: ignore[arg-type]
    wb.train_blocking(recipe(), rows(), steps=2, run="runs/parts", **settings)  # type: ignore[arg-type]
    parts = wb.train_blocking(recipe(), rows(), steps=3, run="runs/parts", resume="auto", **settings)  # type: ignore[arg-type]
    same = [name for name in whole.metrics if name.startswith(("reward", "actor/", "response"))]
    assert len(whole.metrics) == len(parts.metrics) == 3 and same
    assert whole.metrics[same].equals(parts.metrics[same])
    assert "identical" in repr(wb.diverge(parts.stepper(3).run(), parts.traces[3]))


if __name__ == "__main__":
    {check.__name__: check for check in (readme, views, job, resume)}[sys.argv[1]]()
