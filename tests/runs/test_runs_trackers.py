"""Traces of a step's samples, through one seam: to Trackio and MLflow where they are installed, and to a recorded Weave."""

from __future__ import annotations

import importlib
import importlib.util
import sqlite3
import sys
from pathlib import Path
from typing import Any

import pytest

import workbench as wb
from workbench.agents import FunctionCall, ToolAgent, function_tool
from workbench.runs.trackers import TRACKERS, Span, check_trackers, traces_of

pytestmark = pytest.mark.slow
SAMPLES: dict[str, list[Any]] = {"prompt": ["2 + 2?"], "response": ["4"], "score": [None]}


class Always:
    def extract_tool_calls(self, text: str, tools: Any) -> tuple[str, list[FunctionCall]]:
        return text, [FunctionCall("twice", '{"number": 4}')]


def twice(number: int) -> str:
    """Twice a number."""
    return str(2 * number)


@pytest.fixture(scope="module")
def spans() -> list[Span]:
    """Two samples of an agent that calls, reads and calls once more."""
    agent = ToolAgent([function_tool(twice)], parser=Always(), max_assistant_turns=2, max_tokens_per_turn=6)
    rows = wb.rows("data/arith/train.parquet", max_prompt_length=256)
    pipe = wb.recipes.grpo(wb.engines.local("data/tiny-arith", device="cpu"), agent=agent, group_size=2, max_tokens=60)
    return traces_of(wb.Stepper(pipe, rows.batch(1)).run(until="reward").batch, 3)


def test_a_sample_is_a_tree_of_turns_and_calls(spans: list[Span]) -> None:
    first, second = spans
    assert [one.kind for one in first.parts] == ["generation", "tool", "generation", "tool"]
    call = first.parts[1]
    assert (call.name, call.input, call.output, call.attributes["status"]) == ("twice", '{"number": 4}', "8", "ok")
    assert first.parts[0].input == first.input and first.parts[2].input == "8"
    assert second.attributes["step"] == 3 and second.attributes["row"] == 1 and second.attributes["reward"] == 0.0
    assert first.attributes["tokens"] == 12 and first.input[-1]["role"] == "user" and "8" in first.output
    trace = wb.Trace.load("data/arith-batch")
    plain = traces_of(trace.batch, 1)
    assert len(plain) == 64 and [one.kind for one in plain[0].parts] == ["generation"]
    assert plain[0].parts[0].output == plain[0].output


WEAVE = """
calls = []
class Client:
    def create_call(self, op, inputs, parent=None, attributes=None, *, use_stack=True):
        assert not use_stack
        calls.append([op, inputs, parent, attributes, None])
        return len(calls) - 1
    def finish_call(self, call, output=None):
        calls[call][4] = output
def init(project):
    return Client()
def finish():
    calls.append("finish")
"""


def test_weave_gets_a_call_for_each_span(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spans: list[Span]) -> None:
    """Weave 0.54 needs its service: a stand-in with the calls that ours makes."""
    (tmp_path / "weave.py").write_text(WEAVE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "weave", raising=False)
    check_trackers(["weave"])
    tracker = TRACKERS["weave"](tmp_path, "math", "first")
    tracker.log({"reward": 1.0}, 3)
    assert tracker.traces is not None
    tracker.traces(spans[:1], 3)
    tracker.close()
    calls = importlib.import_module("weave").calls
    monkeypatch.delitem(sys.modules, "weave")
    assert [call[0] for call in calls[:-1]] == ["sample", "generation", "twice", "generation", "twice"]
    assert [call[2] for call in calls[:-1]] == [None, 0, 0, 0, 0] and calls[-1] == "finish"
    assert calls[2][1] == {"input": '{"number": 4}'} and calls[2][4] == "8"
    assert calls[0][3]["experiment"] == "first" and calls[0][3]["reward"] == 0.0


@pytest.mark.skipif(importlib.util.find_spec("trackio") is None, reason="trackio is not installed")
def test_trackio_itself_reads_metrics_tables_and_traces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spans: list[Span]
) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "store"))
    tracker = TRACKERS["trackio"](tmp_path / "my-run", "math", "first")
    assert tracker.traces is not None
    tracker.log({"val-core/a,b/reward/mean@1": 0.5}, 3)
    tracker.table(SAMPLES, 3)
    tracker.traces(spans, 3)
    tracker.close()
    (store,) = (tmp_path / "store").glob("math*.db")
    with sqlite3.connect(store) as read:
        metrics = str(read.execute("select * from metrics").fetchall())
        traces = read.execute("select * from traces").fetchall()
    assert "mean@1" in metrics and "val/samples" in metrics and len(traces) == 2
    assert all(word in str(traces[0]) for word in ('"generation"', '"tool"', '"twice"', '"reward":0.0'))


@pytest.mark.skipif(importlib.util.find_spec("mlflow") is None, reason="mlflow is not installed")
def test_a_training_is_one_run_of_mlflow_with_its_metrics_and_traces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow = importlib.import_module("mlflow")
    monkeypatch.setattr("mlflow.tracking._tracking_service.utils._tracking_uri", (tmp_path / "store").as_uri())
    rows = wb.rows("data/arith/train.parquet", max_prompt_length=256)
    pipe = wb.recipes.grpo(wb.engines.local("data/tiny-arith", device="cpu"), group_size=2, max_tokens=8)
    wb.train_blocking(
        pipe, rows, steps=1, batch_size=1, trace_freq=1, run=tmp_path / "run", trackers=["mlflow"], project="math"
    )
    experiment = mlflow.get_experiment_by_name("math").experiment_id
    (run,) = mlflow.MlflowClient().search_runs([experiment])
    assert run.info.status == "FINISHED" and "critic/score/mean" in run.data.metrics
    mlflow.flush_trace_async_logging()
    traces = mlflow.search_traces(locations=[experiment], return_type="list")
    assert len(traces) == 2 and {one.info.trace_metadata["mlflow.sourceRun"] for one in traces} == {run.info.run_id}
    root, turn = traces[0].data.spans
    assert (root.span_type, turn.span_type, turn.parent_id) == ("AGENT", "LLM", root.span_id)
    assert root.attributes["step"] == "1" and root.outputs == turn.outputs
