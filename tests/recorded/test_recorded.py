"""Folders that 0.6.0 wrote are opened, done again and gone on with, and say what 0.6.0 said of them (README.md here)."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tests_recorded import (
    OUT,
    PIPELINES,
    STEPS,
    kept,
    of_batch,
    of_pins,
    of_trace,
    opened,
    replayed,
    resumed,
)

import workbench as wb

ROOT = Path(__file__).parents[2]
RENAMED: dict[str, dict[str, str | None]] = {
    "metric": {
        "reward/status/model_failed": "reward/status/no_answer",
        "perf/cpu_memory_used_gb": "perf/max_rss_gb",
    },
    "column": {"sampler_gap": "sampler_logprob_diff"},
    "stage": {},
    "role": {},
    "fact": {"heldout_rows": "num_eval_rows"},
    "text": {},
}
"""What a thing was called in 0.6.0 → what it is called now; None: it is no more, and not compared.

`fact`: keys of a batch's meta_info and of summary.json; `text`: words that a run says of itself (its state, symptoms)."""


SINCE = (
    "response_length_non_aborted/", "prompt_length/clip_ratio", "response/cut_ratio", "reward/mean", "num_turns/",
    "tool_call_counts/", "model_tokens/", "val-core/workbench/arith/reward/maj@2/std",
    "val-core/workbench/arith/reward/best@2/std", "val-aux/workbench/arith/reward/worst@2/std",
    "rollout_corr/rollout_is_seq_fraction_",
)  # fmt: skip
"""Metrics, or how they begin, which 0.6.0 did not write everywhere: where it did not, they are not compared."""
OTHERWISE: dict[str, dict[str, str]] = {
    "": {"response_length/clip_ratio": "the share of rows that fill max_tokens; it was that of finish_reason 'length'"},
    "ahead": {
        "rollout_corr/rollout_is_oob_ratio": "verl has it of a band alone; it was written for any threshold",
        "rollout_corr/rollout_is_seq_std": "the unbiased deviation, of all rows; it was not unbiased",
    },
    "agents": {
        "response_length/": "all tokens of an episode; it was the model's own alone, now model_tokens/…",
        "response_length_non_aborted/": "the same",
        "critic/score/": "what is on the tokens, TurnScores included; it was what the reward had placed there",
    },
}
"""Run ("": each) → metrics, or how they begin, that got verl's meaning after 0.6.0 → which: they are not compared there."""


def measured(run: str, found: Mapping[str, Any], said: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The metrics of both that mean the same."""
    other = (*OTHERWISE[""], *OTHERWISE.get(run, ()))
    kept = {name: one for name, one in found.items() if name in said or not name.startswith(SINCE)}
    both = ({name: one for name, one in side.items() if not name.startswith(other)} for side in (kept, said))
    return next(both), next(both)


# --- what 0.6.0 said, in the names of now ------------------------------------------------------------


def name_now(kind: str, name: str) -> str | None:
    return RENAMED[kind].get(name, name)


def keys_now(kind: str, said: Mapping[str, Any]) -> dict[str, Any]:
    named = {name_now(kind, name): value for name, value in said.items()}
    return {name: value for name, value in named.items() if name is not None}


def names_now(kind: str, said: list[str]) -> list[str]:
    return [name for name in (name_now(kind, one) for one in said) if name is not None]


def columns_now(said: Mapping[str, Any]) -> dict[str, Any]:
    named = keys_now("column", said)
    return {
        name: {**one, "stage": name_now("stage", one["stage"])} if "stage" in one else one
        for name, one in named.items()
    }


def trace_now(said: Mapping[str, Any]) -> dict[str, Any]:
    phases = [
        {
            **phase,
            "stage": name_now("stage", phase["stage"]),
            "columns": names_now("column", phase["columns"]),
            "wrote": columns_now(phase["wrote"]),
            "metrics": keys_now("metric", phase["metrics"]),
        }
        for phase in said["phases"]
    ]
    return {"start": columns_now(said["start"]), "phases": phases, "facts": keys_now("fact", said["facts"])}


def opened_now(said: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **said,
        "state": name_now("text", said["state"]),
        "last": keys_now("metric", said["last"]),
        "names": sorted(names_now("metric", said["names"])),
        "summary": keys_now("fact", said["summary"]),
        "symptoms": names_now("text", said["symptoms"]),
        "traces": {step: trace_now(trace) for step, trace in said["traces"].items()},
    }


def replayed_now(said: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **said,
        "stages": names_now("stage", said["stages"]),
        "metrics": keys_now("metric", said["metrics"]),
        "columns": columns_now(said["columns"]),
        "judged": columns_now(said["judged"]),
        "weights": keys_now("role", said["weights"]),
    }


@functools.cache
def elsewhere() -> bool:
    """Whether this machine's kernels sum in another order than those that recorded: a recorded step's log-probs tell by their
    last digits. Such a machine may sample another token where a draw lies at an edge, so its numbers are compared nearly."""
    run, step = wb.load_run(OUT / "grpo"), STEPS["grpo"]
    again = run.stepper(step, at="old_log_prob").run(until="old_log_prob").batch
    return not torch.equal(again["old_log_probs"], run.traces[step].batch["old_log_probs"])


def differing(found: Any, said: Any, place: str = "", near: float = 1e-6) -> list[str]:
    """Where two say different things; numbers may differ by `near`, relative or absolute."""
    if isinstance(found, Mapping) and isinstance(said, Mapping):
        gone = [f"{place}/{name}: gone" for name in said if name not in found]
        new = [f"{place}/{name}: new" for name in found if name not in said]
        both = (differing(found[name], value, f"{place}/{name}", near) for name, value in said.items() if name in found)
        return [*gone, *new, *(one for each in both for one in each)]
    if isinstance(found, list | tuple) and isinstance(said, list) and len(found) == len(said):
        pairs = enumerate(zip(found, said, strict=True))
        return [one for number, (a, b) in pairs for one in differing(a, b, f"{place}[{number}]", near)]
    if isinstance(said, int | float) and isinstance(found, int | float) and not isinstance(said, bool):
        return [] if found == pytest.approx(said, rel=near, abs=near) else [f"{place}: {said} → {found}"]
    return [] if found == said else [f"{place}: {said} → {found}"]


OWN = {"old_log_probs", "entropys", "sampler_logprob_diff"}


def said_of(name: str) -> Any:
    return json.loads((ROOT / OUT / "expected" / f"{name}.json").read_text())


@pytest.fixture
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A recorded run, where it may be written to."""
    return Path(shutil.copytree(ROOT / OUT / request.param, tmp_path / request.param))


runs = pytest.mark.parametrize("folder", list(PIPELINES), indirect=True)


# --- the folders ------------------------------------------------------------------------------------


@runs
def test_a_run_is_opened(folder: Path) -> None:
    assert differing(opened(folder), opened_now(said_of(folder.name)["opened"])) == []
    run = wb.load_run(folder)
    assert folder.name in repr(run) and repr(run.traces) and run.curves() is not None
    for step in run.checkpoints:
        assert run.checkpoint(step).is_dir()


@runs
def test_a_recorded_step_is_done_again(folder: Path) -> None:
    """Elsewhere from the recorded responses on, and nearly."""
    found = replayed(folder, STEPS[folder.name], at="reward" if elsewhere() else None)
    said = replayed_now(said_of(folder.name)["replayed"])
    found["metrics"], said["metrics"] = measured(folder.name, found["metrics"], said["metrics"])
    for name in OWN & said["columns"].keys():  # a single optimizer step signs its own old log-probs since 0.9.0
        assert found["columns"][name]["stage"] in ("old_log_prob", "update_actor")
        found["columns"][name]["stage"] = said["columns"][name]["stage"]
    if elsewhere():  # where a gradient is all but 0 Adam's step takes its sign from the last digits
        assert set(found.pop("weights")) == set(said.pop("weights"))
    parted = differing(found, said, near=1e-2 if elsewhere() else 1e-6)
    if elsewhere():  # and so the gradient of the next mini-batch, which starts from that step
        assert {one.partition(":")[0] for one in parted} <= {"/metrics/actor/grad_norm"}
        parted = differing(found, said, near=0.1)
    assert parted == []


@runs
def test_its_weights_are_opened(folder: Path) -> None:
    said = said_of(folder.name)["kept"]
    assert differing(kept(folder), {**said, "weights": keys_now("role", said["weights"])}) == []


@runs
def test_a_run_goes_on(folder: Path) -> None:
    said = said_of(folder.name)["resumed"]
    named = {"last": keys_now("metric", said["last"]), "weights": keys_now("role", said["weights"])}
    found = resumed(folder)
    found["last"], named["last"] = measured(folder.name, found["last"], named["last"])
    if elsewhere():  # the step's responses were sampled here: its numbers may be others
        assert found["steps"] == said["steps"] and set(found["weights"]) == set(named["weights"])
        assert set(found["last"]) == set(named["last"])
    else:
        assert differing(found, {**said, **named}) == []


def test_a_batch_is_opened() -> None:
    assert differing(of_batch(wb.DataProto.load(OUT / "batch")), columns_now(said_of("batch"))) == []


def test_a_trace_is_opened() -> None:
    assert differing(of_trace(wb.Trace.load(OUT / "trace")), trace_now(said_of("trace"))) == []


def test_pinned_rows_are_opened() -> None:
    assert differing(of_pins(OUT / "pins.jsonl"), said_of("pins")) == []
