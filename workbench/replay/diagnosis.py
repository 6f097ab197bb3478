"""Names what is probably wrong with a run: causes, each with its numbers, what to look at and what to turn.

`runs.symptoms` says what a run's curves look like; `causes` are told apart by samples, audit and settings, too. A symptom
that no cause explains is a hint.
"""

from __future__ import annotations

from dataclasses import dataclass

from workbench.base.shown import Shown
from workbench.replay.causes import CAUSES, LEVELS, Finding
from workbench.replay.evidence import AUDITED, Evidence


@dataclass(frozen=True, repr=False)
class Diagnosis(Shown):
    """Result of `Run.diagnose`: what is probably wrong, and what was looked at."""

    findings: tuple[Finding, ...]
    """The surest first, of those as sure the most harmful."""
    looked: tuple[tuple[str, str], ...]
    """(evidence, how much of it there was), also where nothing was found."""


def diagnosed(seen: Evidence) -> Diagnosis:
    """Ask each cause, and add the symptoms that none of the found ones explains."""
    found = [one for cause in CAUSES for one in cause(seen)]
    explained = {name for one in found for name in one.explains}
    for one in seen.symptoms:
        if one.name not in explained:
            look = f"run.stepper({one.steps[0]})" if one.steps else seen.look()
            found.append(Finding(one.name, "hint", f"{one.found}, since step {one.since}", look, one.do))
    return Diagnosis(tuple(sorted(found, key=lambda one: LEVELS.index(one.sure))), tuple(_looked(seen)))


def _looked(seen: Evidence) -> list[tuple[str, str]]:
    steps = sorted({row.step for row in seen.samples})
    audit = "no recorded step" if not steps else f"not done: more than {AUDITED:,} rows; run.audit({seen.step})"
    if seen.audit is not None:
        audit = f"step {seen.step}: {seen.audit.summary()}"
    return [
        ("metrics", f"{len(seen.rows)} steps" if len(seen.rows) > 2 else f"{len(seen.rows)} steps: symptoms need 3"),
        (
            "samples",
            f"{len(seen.samples)} of the recorded steps {steps}" if steps else "none recorded: train(trace_freq=…)",
        ),
        ("validations", str(len(seen.held)) if seen.held else "none: train(eval_rows=…, test_freq=…)"),
        ("audit", audit),
    ]
