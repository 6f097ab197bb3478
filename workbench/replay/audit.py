"""Checks a recorded step: slow formulas compute its trace's columns and metrics again, and the results are compared.

Agreement means: |recorded − recomputed| ≤ 2e-6 of the value (1.5e-7 where it was computed in float64) and 1e-6 of the terms
whose rounding it carries. What needs the model, the clock or foreign code is not recomputed and is listed with the reason; a
column or metric that no formula knows is listed as unaudited.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from workbench.base.errors import WorkbenchError
from workbench.base.shown import Shown
from workbench.datasets.rows import shuffled
from workbench.engines.local_engine.loading import open_tokenizer
from workbench.replay import audit_formulas as slow
from workbench.replay import audit_losses, audit_stages
from workbench.replay.audit_formulas import AuditView, Claim, Claims, Left, Lists
from workbench.steps.trace import Phase, Trace

FORMULAS: Mapping[str, Callable[[AuditView], Claims]] = {
    "purpose": audit_stages.rollout,
    "targets": audit_stages.targets,
    "pairs": audit_stages.pairs,
    "answer_pairs": audit_stages.targets,
    "best_and_worst": audit_stages.best_and_worst,
    "keep_best": audit_stages.keep_best,
    "kto_kl": audit_stages.kto_kl,
    "function": audit_stages.reward,
    "column": audit_stages.log_prob,
    "estimator": audit_stages.advantage,
    "loss": audit_losses.update,
    "overlong": audit_stages.overlong,
    "filter_groups": audit_stages.filter_groups,
    "baseline": audit_stages.baseline,
    "resample": audit_stages.resample,
    "turn_scores": audit_stages.turn_scores,
    "learnt_once": audit_stages.learnt_once,
    "values": audit_stages.values,
    "exact_kl": audit_stages.exact_kl,
    "influence": audit_stages.influence,
    "rollout_correction": audit_losses.correction,
}
"""A stage's name, or a setting that only its kind has → its formulas."""
UNREAD = {
    "timing_s/": "the clock's",
    "timing_per_token_ms/": "the clock's",
    "perf/": "the clock's or the machine's",
    "agent_loop/generate_sequences": "the clock's",
    "agent_loop/tool_calls": "the clock's",
    "val": "held-out rows are not recorded",
    "accuracy": "held-out rows are not recorded",
    "recorded/": "a mark of a replayed stage",
    "streaming/": "counts of what went on beside the step",
    "data/": "of what the step drew and what the data learned, not of a stage",
}
"""Beginning of a metric's name → why it is not recomputed, where no formula claims it."""


@dataclass(frozen=True)
class Disagreement:
    """A recorded column or metric that differs from what its formula gives: where, both values, and the formula in
    words.
    """

    step: int
    stage: str
    name: str
    row: int | None
    token: int | None
    recorded: Any
    recomputed: Any
    formula: str
    count: int = 1
    """Number of places where the column differs; the first one is shown."""

    @property
    def place(self) -> str:
        """Return where the recorded and the recomputed column differ, such as `row 3, token 7, 12 places`: the first
        place, then how many there are. Empty for a metric.
        """
        found = [f"{what} {at}" for what, at in (("row", self.row), ("token", self.token)) if at is not None]
        return ", ".join([*found, *([f"{self.count} places"] if self.count > 1 else [])])

    @property
    def numbers(self) -> str:
        """Return both values as text: `recorded 1.5, recomputed 0.5`."""
        return f"recorded {_short(self.recorded)}, recomputed {_short(self.recomputed)}"

    def __str__(self) -> str:
        place = f" ({self.place})" if self.place else ""
        return f"step {self.step}, {self.stage}, {self.name}{place}: {self.numbers}: {self.formula}"


@dataclass(frozen=True, repr=False)
class Audit(Shown):
    """Result of `Run.audit`: which recorded numbers an independent computation confirms, contradicts, or cannot
    compute.
    """

    steps: tuple[int, ...]
    columns: frozenset[str] = frozenset()
    """Columns that were recomputed and agree."""
    metrics: frozenset[str] = frozenset()
    """Metrics that were recomputed and agree."""
    disagreements: tuple[Disagreement, ...] = ()
    left: Mapping[str, str] = field(default_factory=dict)
    """Column or metric that cannot be recomputed → the reason."""
    unaudited: frozenset[str] = frozenset()
    """Recorded columns and metrics that no formula knows."""

    @property
    def agrees(self) -> bool:
        """Whether every number that was recomputed agrees with the recorded one."""
        return not self.disagreements

    def summary(self) -> str:
        """Return one line: `recomputed from the recorded tokens: 41 columns, 78 metrics agree; not looked at: gradients, weights`.

        It then names the update's metrics that were not recomputed, and counts the other columns and metrics.
        """
        found = f"recomputed from the recorded tokens: {len(self.columns)} columns, {len(self.metrics)} metrics agree"
        wrong = len({one.name for one in self.disagreements})
        missed = [name for name, why in self.left.items() if why in (audit_losses.UNKNOWN, audit_losses.LATER)]
        others = len(self.left) - len(missed)
        parts = ["gradients, weights", *missed, *([f"{others} others (.left says why)"] if others else [])]
        parts += [f"{len(self.unaudited)} without a formula"] if self.unaudited else []
        return f"{found}{f'; {wrong} DISAGREE' if wrong else ''}; not looked at: {', '.join(parts)}"


def _short(value: Any) -> str:
    return f"{value:.9g}" if isinstance(value, float) else repr(value)[:60]


# --- one step -------------------------------------------------------------------------------------------


@dataclass
class _Findings:
    """Collects the results of auditing one step: agreements, disagreements, and names that could not be checked."""

    step: int
    agreed: tuple[set[str], set[str]] = field(default_factory=lambda: (set(), set()))
    disagreements: list[Disagreement] = field(default_factory=list)
    left: dict[str, str] = field(default_factory=dict)
    unaudited: set[str] = field(default_factory=set)

    def compare(
        self, stage: str, claims: Iterable[Claim | Left], columns: Lists, metrics: Mapping[str, Any]
    ) -> set[str]:
        """Compare a stage's claims with the recorded columns and metrics, and return all names that the claims mention."""
        spoken = set()
        for claim in self._made(stage, claims):
            spoken.add(claim.name)
            if isinstance(claim, Left):
                if claim.name in columns or claim.name in metrics:
                    self.left[claim.name] = claim.why
                continue
            is_column = isinstance(claim.value, list)
            recorded = (
                columns[claim.name] if is_column and claim.name in columns else metrics.get(claim.name, "nothing")
            )
            places = list(_differing(recorded, claim))
            if places:
                row, token, mine, theirs = places[0]
                fields = (row, token, mine, theirs, claim.formula, len(places))
                self.disagreements.append(Disagreement(self.step, stage, claim.name, *fields))
            elif claim.partial:  # a name with only partial claims is listed with its reason
                self.left |= {claim.name: why} if (why := _unread(claim.name)) else {}
            else:
                self.agreed[0 if is_column else 1].add(claim.name)
        return spoken

    def result(self) -> Audit:
        """Return the `Audit` of the step."""
        columns, metrics = map(frozenset, self.agreed)
        found = tuple(self.disagreements)
        return _together([Audit((self.step,), columns, metrics, found, self.left, frozenset(self.unaudited))])

    def _made(self, stage: str, claims: Iterable[Claim | Left]) -> Claims:
        """Yield the claims. An error of the formulas themselves, because a record does not fit them, counts as a
        disagreement.
        """
        try:
            yield from claims
        except (WorkbenchError, LookupError, ValueError, TypeError, AttributeError, ArithmeticError) as error:
            fields = (None, None, "what they cannot read", repr(error), "the formulas could not be applied")
            self.disagreements.append(Disagreement(self.step, stage, stage, *fields))

    def unread(self, names: Iterable[str], spoken: set[str]) -> None:
        """Sort the names that no claim mentions: known ones with the reason of `UNREAD`, all others as unaudited."""
        for name in names:
            if name not in spoken:
                if why := _unread(name):
                    self.left.setdefault(name, why)
                else:
                    self.unaudited.add(name)


def _unread(metric: str) -> str | None:
    """Return why a metric that no formula computes is not recomputed; None where no reason is known."""
    return next((why for begin, why in UNREAD.items() if metric.startswith(begin)), None)


def _differing(recorded: Any, claim: Claim) -> Iterator[tuple[int | None, int | None, Any, Any]]:
    """Yield (row, token, recorded, recomputed) for each place where the recorded value is not what a claim says."""
    if not isinstance(claim.value, list):
        if not _same(recorded, claim.value, claim.near, claim.noise):
            yield None, None, recorded, claim.value
        return
    if not isinstance(recorded, list) or len(recorded) != len(claim.value):
        rows = f"{len(recorded)} rows" if isinstance(recorded, list) else recorded
        yield None, None, rows, f"{len(claim.value)} rows"
        return
    for row, (mine, theirs) in enumerate(zip(recorded, claim.value, strict=True)):
        noise = claim.noise[row] if isinstance(claim.noise, list) else claim.noise
        if not isinstance(theirs, list) or not isinstance(mine, list):
            if not _same(mine, theirs, claim.near, noise):
                yield row, None, mine, theirs
        elif len(mine) != len(theirs):
            yield row, None, f"{len(mine)} tokens", f"{len(theirs)} tokens"
        else:
            for token, (x, y) in enumerate(zip(mine, theirs, strict=True)):
                if not _same(x, y, claim.near, noise):
                    yield row, token, x, y


def _same(recorded: Any, recomputed: Any, near: float, noise: float) -> bool:
    if recomputed is None or recorded is recomputed:
        return True
    if not isinstance(recorded, int | float) or not isinstance(recomputed, int | float):
        return bool(recorded == recomputed)
    if math.isnan(recorded) or math.isnan(recomputed):
        return math.isnan(recorded) and math.isnan(recomputed)
    return recorded == recomputed or abs(recorded - recomputed) <= near * abs(recomputed) + 1e-6 * noise + 1e-12


def audit_trace(
    trace: Trace,
    *,
    before: Mapping[str, Mapping[str, float]] | None = None,
    after: Mapping[str, Mapping[str, float]] | None = None,
    row: Mapping[str, Any] | None = None,
    actor: Mapping[str, Any] | None = None,
) -> Audit:
    """Recompute a trace's columns and metrics and compare them with the recorded ones.

    `before` and `after` are the states of the stages' controllers around the step, `row` is the step's row of
    metrics.jsonl, and `actor` are the settings of the learner's engine. Where one is missing, what depends on it is not
    checked.
    """
    found = _Findings(int(trace.step or 0))
    exact = _exact(actor or {})
    views = [replace(_of_policy(_view(trace, phase, before)), exact=exact) for phase in trace]
    for number, phase in enumerate(trace):
        _phase(found, views, number, phase, (after or {}).get(phase.stage, {}))
    if row is not None:  # of the rows of all policies
        last = [replace(_view(trace, phase, before), exact=exact) for phase in list(trace)[-1:]]
        _whole_step(found, trace, last[0] if last else None, row)
    return found.result()


def _phase(found: _Findings, views: Sequence[AuditView], number: int, phase: Phase, state: Mapping[str, float]) -> None:
    """Audit one phase of a step; `state` is the state of its stage's controller after the step."""
    view, formulas = views[number], _formulas(phase)
    whys = {"a stage of your own": "class" in phase.source, "no rows": not len(phase.batch)}
    why = next((why for why, holds in whys.items() if holds), "a stage that the audit does not know")
    if formulas is None or whys.get(why):
        found.left |= dict.fromkeys((*phase.wrote, *phase.metrics), why)
        return
    spoken = found.compare(phase.stage, formulas(view), view.after, view.metrics)
    if phase.stage == "filter_groups" and view.metrics.get("train/num_gen_batches", 1) > 1:
        spoken |= _drawn_rows(found, views, view)
    spoken |= found.compare(phase.stage, _carried(view, spoken), view.after, {})
    found.unread([*phase.wrote, *view.metrics], spoken)
    if "value" in state and "kl_controller" in phase.settings:
        found.compare(phase.stage, audit_stages.controller(view), view.after, {"controller": state["value"]})
    if "entropy_coeff" in state:
        found.compare(phase.stage, audit_losses.bonus(view), view.after, {"bonus": state["entropy_coeff"]})


def _formulas(phase: Phase) -> Callable[[AuditView], Claims] | None:
    keys = (phase.stage, *("loss", "purpose", "function", "column", "estimator"))
    return next(
        (FORMULAS[key] for key in keys if key in FORMULAS and (key == phase.stage or key in phase.settings)), None
    )


def _view(trace: Trace, phase: Phase, before: Mapping[str, Mapping[str, float]] | None) -> AuditView:
    origins = phase.batch.origins
    # an update signs old log-probs of its own pass by the version before
    versions = [origins[name].policy_version for name in phase.wrote if name in origins]
    version = max((one for one in versions if one is not None), default=None)
    tokenizer, ends = _reader(phase.batch.meta_info.get("model"))
    sampling = next((one.settings for one in trace if "purpose" in one.settings), {})
    scoring = next((one.settings for one in trace if "old_log_probs" in one.wrote), {})
    return AuditView(
        stage=phase.stage,
        before=Lists(trace.before(phase.stage)),
        after=Lists(phase.batch),
        settings=phase.settings,
        metrics=phase.metrics,
        rows=None if phase.rows is None else phase.rows.tolist(),
        step=int(trace.step or 0),
        version=version,
        state=(before or {}).get(phase.stage),
        sampling=sampling,
        scoring=scoring,
        tokenizer=tokenizer,
        ends=ends,
        shuffled=shuffled,
    )


def _of_policy(view: AuditView) -> AuditView:
    """Restrict a phase's view to the rows of its policy, where a step trains several policies; its metrics get the
    names that they have with a single policy.
    """
    policy = view.settings.get("policy") if "policy" in view.after else None
    if policy is None or "purpose" in view.settings:
        return view
    before, after = (
        Lists(one.batch.select_idxs([name == policy for name in one["policy"]])) for one in (view.before, view.after)
    )
    metrics, end = dict(view.metrics), f"_{policy}"
    if view.stage.endswith(end):
        names = {name: name.removeprefix(f"{policy}/") for name in metrics}
        metrics = {short if "/" in short else f"actor/{short}": metrics[name] for name, short in names.items()}
        made = view.stage.removesuffix(end)
        view = replace(view, stage="update_actor" if made == "update" else made)
    return replace(view, before=before, after=after, metrics=metrics)


@functools.cache
def _reader(model: Any) -> tuple[Any, frozenset[int]]:
    """Open the tokenizer of a model folder and collect the token ids that end its responses; (None, no ids) where it
    cannot be opened.
    """
    try:
        tokenizer = open_tokenizer(model) if isinstance(model, str) else None
    except (OSError, ValueError, ImportError, RuntimeError):  # one that needs its own code, or a damaged folder
        tokenizer = None
    ends_of_text: set[int] = {getattr(tokenizer, "eos_token_id", None) or 0} if tokenizer is not None else set()
    for name in ("generation_config.json", "config.json"):
        path = Path(str(model)) / name
        ends = json.loads(path.read_text()).get("eos_token_id") if tokenizer is not None and path.is_file() else None
        ends_of_text |= set(ends if isinstance(ends, list) else [ends]) - {None}
    return tokenizer, frozenset(ends_of_text)


def _exact(actor: Mapping[str, Any]) -> bool:
    """Return whether an engine is known to learn in float32 with a model without dropout, so that equal weights give
    equal log-probs.
    """
    config = Path(str(actor.get("path"))) / "config.json"
    if actor.get("lora_dropout") or not config.is_file():
        return False
    rates = re.findall(r'drop\w*": *([0-9.e-]+)', config.read_text())
    whole = actor.get("dtype") == "float32" or (actor.get("dtype"), actor.get("device")) == ("auto", "cpu")
    return whole and not any(map(float, rates))


def _carried(view: AuditView, spoken: set[str]) -> Claims:
    """Check that a stage that drops or repeats rows leaves all columns that it does not write as they were."""
    if view.rows is None and view.stage not in ("filter_groups", "baseline", "resample"):
        return
    rows = range(len(view.before["uid"])) if view.rows is None else view.rows
    for name in view.before:
        if name not in spoken:
            yield Claim(name, [view.before[name][row] for row in rows], "the rows' own", near=0.0, partial=True)


def _drawn_rows(findings: _Findings, views: Sequence[AuditView], view: AuditView) -> set[str]:
    """Check the rows that dynamic sampling drew in addition: apply the formulas of the earlier stages to the step's
    final batch. Returns the names that were checked.
    """
    spoken: set[str] = set()
    scored = [
        float(record.value) * (str(record.status.value) not in audit_stages.UNSCORED) for record in view.after["score"]
    ]
    for record in views[: views.index(view)]:
        past = Lists(view.after.batch)
        if record.stage == "overlong":
            past = Lists(past.batch, reward=scored, token_level_scores=slow.on_last(scored, past.mask))
        again = replace(record, before=past, after=view.after, metrics={}, rows=None)
        formulas = FORMULAS.get(record.stage)
        overlong = "reward/overlong" in view.after and record.stage == "reward"
        changed = ("reward", "token_level_scores") if overlong else ()
        claims = [] if formulas is None else [claim for claim in formulas(again) if claim.name not in changed]
        columns = [claim for claim in claims if isinstance(claim, Left) or isinstance(claim.value, list)]
        spoken |= findings.compare("filter_groups", columns, view.after, {})
    return spoken | set(view.before)


def _whole_step(findings: _Findings, trace: Trace, last: AuditView | None, row: Mapping[str, Any]) -> None:
    """Audit the step's row of metrics.jsonl: metrics that the loop adds are recomputed, all others must equal the
    trace's.
    """
    mine, spoken = trace.metrics, set()
    if last is not None:
        spoken = findings.compare("step", slow.whole_step(last, trace, row), last.after, row)
        findings.unread([name for name in row if name not in mine], spoken)
    kept = {name: value for name, value in mine.items() if name not in spoken and math.isfinite(value)}
    same = [Claim(name, value, "the trace's", near=0.0, partial=True) for name, value in kept.items()]
    findings.compare("metrics.jsonl", same, Lists(trace.start), row)


def audit_run(
    traces: Mapping[int, Trace],
    rows: Sequence[Mapping[str, Any]],
    around: Callable[[int], tuple[Any, Any]],
    step: int | None = None,
    actor: Mapping[str, Any] | None = None,
) -> Audit:
    """Audit one recorded step, or with `step=None` all of them, including how step numbers and policy versions follow
    each other.

    `around(step)` returns the controllers' states before and after a step; `actor` are the settings of the learner's
    engine.
    """
    by_step = {int(row["training/global_step"]): row for row in rows}
    audits, versions = [], {}
    for number in traces if step is None else [step]:
        trace, (before, after) = traces[number], around(number)
        audits.append(audit_trace(trace, before=before, after=after, row=by_step.get(number), actor=actor))
        origins = trace.batch.origins
        versions[number] = origins["old_log_probs"].policy_version if "old_log_probs" in origins else None
        if number not in by_step and number <= max(by_step, default=number):  # the last trace is written before its row
            disagreement = Disagreement(
                number, "metrics.jsonl", "step", None, None, "nothing", number, "a row of each step"
            )
            audits.append(Audit((), disagreements=(disagreement,)))
        if trace.step != number:
            disagreement = Disagreement(number, "trace", "step", None, None, trace.step, number, "the folder's number")
            audits.append(Audit((), disagreements=(disagreement,)))
    return _together([*audits, Audit((), disagreements=tuple(_versions(versions, by_step)))])


def _versions(versions: Mapping[int, int | None], by_step: Mapping[int, Mapping[str, Any]]) -> Iterator[Disagreement]:
    """Yield a disagreement where the policy version did not rise by one for each update between two recorded steps."""
    for (first, old), (then, new) in itertools.pairwise(versions.items()):
        between = [by_step.get(one, {}) for one in range(first, then)]
        updates = [
            sum(row.get("actor/loss") is not None for row in between),
            sum(bool(row.get("actor/skipped")) for row in between),
        ]
        known = old is not None and sum(updates) == len(between)
        if known and new != (old or 0) + updates[0]:
            expected = (old or 0) + updates[0]
            yield Disagreement(then, "trace", "policy_version", None, None, new, expected, "one more each update")


def _together(audits: Sequence[Audit]) -> Audit:
    """Join the audits of several steps. A column or metric agrees if it agrees in every step that has it."""
    disagreements = tuple(one for audit in audits for one in audit.disagreements)
    wrong = {one.name for one in disagreements}
    columns = frozenset[str]().union(*(audit.columns for audit in audits)) - wrong
    metrics = frozenset[str]().union(*(audit.metrics for audit in audits)) - wrong
    unaudited = frozenset[str]().union(*(audit.unaudited for audit in audits))
    left = {name: why for audit in audits for name, why in audit.left.items() if name not in columns | metrics}
    steps = tuple(step for audit in audits for step in audit.steps)
    return Audit(steps, columns, metrics, disagreements, left, unaudited)
