"""Sends metrics to TensorBoard, Weights & Biases, MLflow, Trackio or the console, beside the run folder's own files; and the
progress line.

Weights & Biases, MLflow and Trackio also get held-out samples; MLflow, Trackio and Weave the samples of recorded steps as traces. By default the project there is `workbench`, and the experiment is
called as the run folder. A resumed run's earlier metrics are sent again: to an experiment of its own.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from workbench.base.config import require
from workbench.base.distribution import check_packages, install
from workbench.base.errors import SettingError, check_name
from workbench.dataproto.core import DataProto
from workbench.runs.folder import STEP

Table = Mapping[str, Sequence[Any]]
TABLE_ROWS = 64
"""Most held-out samples that a tracker gets from a validation; the run's folder `val/` has all."""
_ABOUT = ("uid", "data_source", "finish_reason")
_TRACED = (*_ABOUT, "raw_prompt", "response_text", "turns", "score")
_SHOWN = ("prompt", "response", "score", "score/status", "score/why", "data_source", "sample", "greedy")


@dataclass(frozen=True)
class Span:
    """A sample of a step as a trace, or a part of one: a turn of the model, a tool call, a user's turn."""

    name: str
    kind: str
    """`agent` (a whole sample), `generation` (the model's turn), `tool`, or `user`."""
    input: Any = None
    output: Any = None
    attributes: Mapping[str, Any] = field(default_factory=dict)
    parts: tuple[Span, ...] = ()


@dataclass(frozen=True)
class Tracker:
    """A metrics logger, such as TensorBoard, as functions: log metrics, close, log a table of samples, log traces."""

    log: Callable[[Mapping[str, float], int], None]
    """Function (metrics, step) that writes the metrics of a step."""
    close: Callable[[], None] = lambda: None
    """Function that writes buffered data and closes the logger."""
    table: Callable[[Table, int], None] = lambda samples, step: None
    """Function (table, step) that writes held-out samples, where the logger has tables."""
    traces: Callable[[Sequence[Span], int], None] | None = None
    """Function (traces, step) that writes samples of a recorded step; None: the logger has no traces."""


def _console(run: Path, project: str, experiment: str) -> Tracker:
    """Open the tracker that prints one line of all metrics per step on standard output."""

    def log(metrics: Mapping[str, float], step: int) -> None:
        shown = (f"{name}:{value:.5g}" for name, value in metrics.items() if name != STEP)
        sys.stdout.write(f"{experiment} step:{step} - {' - '.join(shown)}\n")
        sys.stdout.flush()

    return Tracker(log)


def _jsonl(run: Path, project: str, experiment: str) -> Tracker:
    """Open a tracker that does nothing: every run writes metrics.jsonl anyway."""
    return Tracker(lambda metrics, step: None)


def _tensorboard(run: Path, project: str, experiment: str) -> Tracker:
    """Open a TensorBoard event file in the run folder. A resumed run gets a new one, with its earlier rows written
    again. NaN is left out.
    """
    from torch.utils.tensorboard import SummaryWriter

    writer: Any = SummaryWriter(str(run / "tensorboard"))

    def log(metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            if math.isfinite(value):
                writer.add_scalar(name, value, step)
        writer.flush()

    return Tracker(log, writer.close)


def _wandb(run: Path, project: str, experiment: str) -> Tracker:
    """Open a Weights & Biases run, in the mode that its environment variables set; samples become its tables."""
    import wandb

    opened: Any = wandb.init(project=project, name=experiment, dir=str(run), reinit="finish_previous")

    def table(samples: Table, step: int) -> None:
        rows = [list(row) for row in zip(*samples.values(), strict=True)]
        opened.log({"val/samples": wandb.Table(columns=list(samples), data=rows)}, step=step)

    return Tracker(lambda metrics, step: opened.log(dict(metrics), step=step), opened.finish, table)


def _mlflow(run: Path, project: str, experiment: str) -> Tracker:
    """Open an MLflow run, at the tracking address that its environment variables set.

    Signs that MLflow does not allow in names of metrics become `_`. Samples are artifacts that it shows as tables.
    """
    import mlflow

    # no run of a thread's: a training logs from another thread than the one that opened it
    client = mlflow.MlflowClient()
    opened = client.create_run(mlflow.set_experiment(project).experiment_id, run_name=experiment).info
    source = {"mlflow.sourceRun": opened.run_id}

    def log(metrics: Mapping[str, float], step: int) -> None:
        named = {re.sub(r"[^\w\-. :/]", "_", key.replace("@", "_at_")): value for key, value in metrics.items()}
        mlflow.log_metrics(named, step=step, run_id=opened.run_id)

    def table(samples: Table, step: int) -> None:
        cells = {name: list(column) for name, column in samples.items()}
        mlflow.log_table(cells, f"val/step_{step:06d}.json", run_id=opened.run_id)

    def begin(span: Span, above: Any) -> Any:
        words = {key: str(value) for key, value in span.attributes.items()}
        kind = {"generation": "LLM", "user": "UNKNOWN"}.get(span.kind, span.kind.upper())
        about = {"metadata": source, "experiment_id": opened.experiment_id} if above is None else {}
        return mlflow.start_span_no_context(span.name, kind, above, span.input, words, **about)

    return Tracker(
        log,
        lambda: client.set_terminated(opened.run_id),
        table,
        _traces(begin, lambda call, output: call.end(outputs=output)),
    )


def _traces(
    begin: Callable[[Span, Any], Any], end: Callable[[Any, Any], object]
) -> Callable[[Sequence[Span], int], None]:
    """Return what sends samples span by span: `begin(span, what began the one around it)`, its parts, and `end(it, output)`."""

    def send(spans: Sequence[Span], step: int, above: Any = None) -> None:
        for span in spans:
            begun = begin(span, above)
            send(span.parts, step, begun)
            end(begun, span.output)

    return send


def _trackio(run: Path, project: str, experiment: str) -> Tracker:
    """Open a Trackio run in its local store, or in the Space that its environment variables name; samples become its tables."""
    import trackio

    opened: Any = trackio.init(project=project, name=experiment, embed=False)

    def spans(span: Span, number: str, above: str | None = None) -> list[dict[str, Any]]:
        kind = span.kind if span.kind in ("generation", "tool") else "span"
        mine = {"id": number, "parent_id": above, "name": span.name, "kind": kind, "metadata": dict(span.attributes)}
        inner = (one for place, part in enumerate(span.parts) for one in spans(part, f"{number}.{place}", number))
        return [{**mine, "input": span.input, "output": span.output}, *inner]

    def traces(samples: Sequence[Span], step: int) -> None:
        found = []
        for one in samples:
            chat = [*one.input, {"role": "assistant", "content": one.output}]
            found.append(trackio.Trace(chat, dict(one.attributes), spans(one, "0")))
        opened.log({"samples": found}, step=step)

    def table(samples: Table, step: int) -> None:
        import pandas as pd

        opened.log({"val/samples": trackio.Table(dataframe=pd.DataFrame(dict(samples)))}, step=step)

    return Tracker(lambda metrics, step: opened.log(dict(metrics), step=step), opened.finish, table, traces)


def _weave(run: Path, project: str, experiment: str) -> Tracker:
    """Open a Weave project, which gets traces and no metrics: `trackers=["wandb", "weave"]` sends both."""
    import weave

    client: Any = weave.init(project)

    def begin(span: Span, above: Any) -> Any:
        about = {**span.attributes, "kind": span.kind, "experiment": experiment}
        return client.create_call(span.name, {"input": span.input}, above, about, use_stack=False)

    return Tracker(lambda metrics, step: None, weave.finish, traces=_traces(begin, client.finish_call))


TRACKERS: Mapping[str, Callable[[Path, str, str], Tracker]] = {
    "console": _console,
    "jsonl": _jsonl,
    "tensorboard": _tensorboard,
    "wandb": _wandb,
    "mlflow": _mlflow,
    "trackio": _trackio,
    "weave": _weave,
}
"""Name → what opens it for (a run folder, the name of the project, the name of the experiment)."""
_WITHOUT_PACKAGE = ("console", "jsonl")


def default_trackers() -> list[str]:
    """The trackers of a run that names none: TensorBoard where it is installed and can be imported."""
    try:
        importlib.import_module("torch.utils.tensorboard")
    except (ImportError, AttributeError):
        return []
    return ["tensorboard"]


def check_trackers(names: Sequence[str]) -> None:
    """Check names of trackers without opening them. Raises `SettingError` for an unknown name or a missing package."""
    require(not isinstance(names, str), "trackers", expected="a list of names", found=names, do=f"trackers=[{names!r}]")
    for name in names:
        check_name("tracker", name, TRACKERS)
        if name == "tensorboard":
            there, do = bool(default_trackers()), install("trackers")
        else:
            there, do = name in _WITHOUT_PACKAGE or bool(importlib.util.find_spec(name)), f"pip install {name}"
        if not there:
            raise SettingError(f"tracker {name!r} is not installed", do=do)
        check_packages("trackers", f"tracker {name!r}", (name,))


def shown_samples(samples: Table) -> dict[str, list[Any]]:
    """Select what trackers show of a table of samples: its first 64 rows and main columns, each prompt as its last
    message's text.
    """
    kept = {name: list(samples[name][:TABLE_ROWS]) for name in _SHOWN if name in samples}
    return {**kept, "prompt": [str(chat[-1].get("content")) if chat else "" for chat in kept["prompt"]]}


def traces_of(batch: DataProto, step: int) -> list[Span]:
    """Return the first 64 samples of a recorded step as traces: each with its prompt, answer and score, and its turns and calls."""
    objects = {name: list(batch[name][:TABLE_ROWS]) for name in _TRACED if name in batch}
    rewards = batch["reward"].tolist() if "reward" in batch else [None] * len(batch)
    tokens = batch["response_mask"].sum(-1).tolist()
    spans = []
    for row in range(min(len(batch), TABLE_ROWS)):
        about = {"step": step, "row": row, "reward": rewards[row], "tokens": tokens[row]}
        about |= {name: str(cells[row]) for name, cells in objects.items() if name in _ABOUT}
        if "score" in objects:
            score = objects["score"][row]
            about |= {"status": score.status.value, "why": score.why}
        chat, text = objects["raw_prompt"][row], str(objects["response_text"][row])
        asked = [{"role": "user", "content": chat}] if isinstance(chat, str) else [dict(message) for message in chat]
        turns: Any = objects["turns"][row] if "turns" in objects else [{"role": "assistant", "text": text, "calls": ()}]
        parts: list[Span] = []
        before: Any = asked
        for turn in turns:
            if turn["role"] != "tool":  # whose text is the output of its call
                kind = "generation" if turn["role"] == "assistant" else "user"
                parts.append(Span(kind, kind, before, turn["text"]))
            for call in turn["calls"]:
                outcome = {"status": call["status"], "reward": call["reward"]}
                parts.append(Span(call["name"], "tool", call["arguments"], call["result"], outcome))
            before = turn["text"]
        spans.append(Span("sample", "agent", asked, text, about, tuple(parts)))
    return spans


KL = ("actor/kl_loss", "actor/reward_kl_penalty", "actor/ppo_kl")
"""Metrics of KL: a progress line shows the first one that the run has."""


def progress_line(row: Mapping[str, Any], steps: int, eta: float) -> str:
    """Format a metrics row as `step 12/60  reward 0.531  kl 0.00210  1.3 s  eta 01:02`; `eta` is in seconds, and left out
    after the last step.
    """
    parts = [f"step {row[STEP]}/{steps}"]
    if row.get("critic/score/mean") is not None:
        parts.append(f"reward {row['critic/score/mean']:.3f}")
    parts += [f"kl {row[key]:.5f}" for key in KL if row.get(key) is not None][:1]
    parts += [f"{row['timing_s/step']:.1f} s"] if "timing_s/step" in row else []
    if row.get("val/reward") is not None and row.get("val/greedy") is not None:
        parts.append(f"held-out {row['val/reward']:.3f} (greedy {row['val/greedy']:.3f})")
    parts += [f"eta {int(eta) // 60:02d}:{int(eta) % 60:02d}"] if "timing_s/step" in row and row[STEP] < steps else []
    return "  ".join(parts)


def append_line(line: str) -> None:
    """Append a line to the progress file that `run_notebook` reads. Does nothing where `WORKBENCH_PROGRESS` is not set."""
    if path := os.environ.get("WORKBENCH_PROGRESS"):
        with contextlib.suppress(OSError), open(path, "a") as file:  # a full /tmp ends no run
            file.write(line + "\n")
