"""The health page of a training: `/health` for people, `/health.json` and its status code for machines, `/metrics` for Prometheus.

An observer of the loop keeps the figures and says whether it has stalled. The page is at 127.0.0.1 while the training runs: from
elsewhere through `ssh -L 9464:localhost:9464`. Status 200 says that it goes on, is paused or done; 503 that nothing has ended for
five times its median step, or that it failed. `/timeline.json` has the last requests to its samplers and the calls of a
cluster's workers, in Chrome's trace format.
"""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any, Protocol, runtime_checkable

import torch

from workbench.base.activity import HERE, Queue
from workbench.base.cards import card_of
from workbench.base.config import require
from workbench.base.distribution import optional
from workbench.base.errors import RunError, SettingError, WorkbenchError, first_line
from workbench.base.files import unsealed
from workbench.base.loopback import STILL, HttpRequest, Text, from_another_page, serving
from workbench.base.memory import gib
from workbench.base.runtime import Control
from workbench.cluster import session
from workbench.cluster.status import WorkerLine
from workbench.cluster.timeline import ordered
from workbench.engines.local_engine.loading import parameters
from workbench.engines.protocol import Described, Located
from workbench.runs.batch_metrics import push_metrics
from workbench.runs.folder import strict
from workbench.runs.symptoms import Symptom, Watch
from workbench.runs.trackers import append_line
from workbench.stages.pipeline import Pipeline
from workbench.steps.tune import product_rate
from workbench.views import document as doc

log = logging.getLogger("workbench")
PORT = 9464
"""Where `health=True` serves: the port that Prometheus exporters of this kind use."""
REFRESH = 5
"""Seconds after which a browser asks for the page again; workers of a cluster are asked no more often."""
STALLED = 5.0
"""A training in which nothing ends for so many times its median step has stalled."""
LEAST = 60.0
"""Seconds: nobody is called stalled sooner."""
FIRST = 1800.0
"""Seconds without progress before the first step has ended: models load, kernels compile."""
STEPS = 50
"""Last steps of which the median is taken."""
_SHOWN = (
    "critic/score/mean",
    "actor/kl_loss",
    "actor/entropy",
    "actor/grad_norm",
    "response_length/mean",
    "val/reward",
)
"""Metrics of the last row that the page has; `/metrics` has all."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Health(doc.View):
    """The state of a training at one moment: what runs, since when, speed, queues and metrics. Made by `Watcher.look`."""

    run: str
    state: str = "starting"
    """`starting`, `running`, `stalled`, `paused`, `stopping`, `done` or `failed`."""
    why: str = ""
    """Of a stalled or failed one."""
    step: int = 0
    """The last step that is done."""
    steps: int = 0
    seconds: float = 0.0
    """Since the training began."""
    idle: float = 0.0
    """Seconds since anything ended: a stage, a request, a reward, a step."""
    allowed: float = 0.0
    """Seconds that it may be idle."""
    step_seconds: float | None = None
    """Of the last step."""
    median_seconds: float | None = None
    phases: Sequence[tuple[str, float]] = ()
    """(stage, seconds that it has run) of those that run now."""
    stage_seconds: Mapping[str, float] = field(default_factory=dict)
    """Stage → seconds of all steps together."""
    generated: int = 0
    """Tokens that were sampled since the training began, by every sampler of this process."""
    trained: int = 0
    """Tokens of prompts and responses in the updates."""
    generated_rate: float | None = None
    """Tokens per second while the last step sampled."""
    trained_rate: float | None = None
    """Tokens per second while the last step updated the actor."""
    mfu: float | None = None
    """Share of the devices' peak that the last update used: 6 operations per parameter and token."""
    peak: float | None = None
    """Operations per second of one device."""
    peak_source: str = "not measured yet"
    queues: Mapping[str, Queue] = field(default_factory=dict)
    pushes: Mapping[str, float] = field(default_factory=dict)
    """Figures of the last push of weights (`push_metrics`)."""
    versions: Mapping[str, int] = field(default_factory=dict)
    """Learner → its policy version."""
    symptoms: Sequence[Symptom] = ()
    row: Mapping[str, float] = field(default_factory=dict)
    """The last metrics row."""
    workers: Sequence[WorkerLine] = ()

    @property
    def ok(self) -> bool:
        """Whether the training neither stalled nor failed; True for a finished one."""
        return self.state not in ("stalled", "failed")

    def to_dict(self) -> dict[str, Any]:
        """Return the state as plain values for JSON."""
        phases = [{"stage": name, "seconds": seconds} for name, seconds in self.phases]
        symptoms = [{"name": one.name, "found": one.found, "since": one.since} for one in self.symptoms]
        workers = [{"doing": one.state, **asdict(one)} for one in self.workers]
        return asdict(self) | {"ok": self.ok, "phases": phases, "symptoms": symptoms, "workers": workers}

    def document(self) -> doc.Part:
        """Build the display: the state first, then tables of stages, queues, workers and metrics."""
        rate, per_s = self.median_seconds, " tokens a second"
        left = f", {(self.steps - self.step) * rate:.0f} s to go" if rate is not None and self.step < self.steps else ""
        share = self.step / self.steps if self.steps else 0.0
        mfu = f"{self.mfu:.1%} of {self.peak:.3g} operations a second" if self.mfu is not None else "unknown"
        facts = [
            ("steps", f"{doc.number(rate)} s the median, {doc.number(self.step_seconds)} s the last"),
            ("progress", f"something ended {self.idle:.1f} s ago; stalled after {self.allowed:.0f} s"),
            (
                "sampled",
                f"{self.generated:,} tokens, {doc.number(self.generated_rate, ',.0f')}{per_s} in the last rollout",
            ),
            ("trained", f"{self.trained:,} tokens, {doc.number(self.trained_rate, ',.0f')}{per_s} in the last update"),
            ("model FLOPs utilisation", f"{mfu} ({self.peak_source})"),
        ]
        if self.pushes:
            size = gib(int(self.pushes["perf/update_weights_gb"] * 2**30))
            facts.append(("weights to the sampler", f"{size} in {self.pushes['timing_s/update_weights']:.2f} s"))
        facts += [("policy version", ", ".join(f"{role} {version}" for role, version in self.versions.items()))]
        queues = [
            [
                name,
                *(f"{count:,}" for count in (entry.waiting, entry.running, entry.done, entry.failed)),
                _mean(entry.queue_seconds, entry.begun),
                _mean(entry.seconds, entry.done),
            ]
            for name, entry in self.queues.items()
        ]
        workers = [
            [one.group, str(one.rank), one.state, f"{doc.number(one.seconds, '.0f')} s", gib(one.resident or 0)]
            for one in self.workers
        ]
        metrics = [[name, doc.number(self.row[name])] for name in _SHOWN if name in self.row]
        return (
            doc.line(doc.bold(f"{self.state}: {self.run}"), f", {self.seconds:.0f} s since the start"),
            doc.line(doc.bold(self.why)) if self.why else (),
            doc.bar(share, f"step {self.step} of {self.steps}{left}", self.ok),
            [
                doc.line(doc.bold(entry.name), f" since step {entry.since}: {entry.found}; {entry.do}")
                for entry in self.symptoms
            ],
            doc.pairs(facts),
            doc.Table(["stage", "now", "seconds of all steps"], _stages(self)),
            doc.Table(["asked", "waiting", "running", "done", "failed", "waits", "answer after"], queues),
            doc.Table(["group", "rank", "does", "for", "memory"], workers),
            doc.Table(["metric", "last row"], metrics),
        )


def _stages(look: Health) -> list[list[doc.Part]]:
    stages = {name: 0.0 for name, _ in look.phases} | dict(look.stage_seconds)
    whole, now = max(sum(look.stage_seconds.values()), 1e-9), dict(look.phases)
    running = {name: doc.bold(f"{seconds:.1f} s") for name, seconds in now.items()}
    return [[name, running.get(name, ""), doc.bar(one / whole, f"{one:.1f}")] for name, one in stages.items()]


def _mean(total: float, count: int) -> str:
    return f"{total / count:.2f} s" if count else "–"


@dataclass
class Watcher:
    """An `Observer` that reports how a training is doing, at any time and from any thread: `look()`.

    An error in it is logged and does not end the training. `workers` returns what the workers of a cluster are doing.
    """

    path: Path
    """The run folder."""
    pipeline: Pipeline
    control: Control
    stalled: float = STALLED
    least: float = LEAST
    first: float = FIRST
    workers: Callable[[], Sequence[WorkerLine]] = tuple

    def __post_init__(self) -> None:
        self._began, self._read = time.monotonic(), 0
        self._last = Health(run=self.path.name)
        """What changes with a step; `look` adds what changes in between."""
        self._seconds: deque[float] = deque(maxlen=STEPS)
        self._base = self._tokens()
        self._watch = Watch()
        self._parameters: int | None = None
        HERE.progress()

    def _set(self, **changes: Any) -> None:
        self._last = replace(self._last, **changes)

    # --- the loop's observer --------------------------------------------------------------------

    def on_start(self, start: int, steps: int) -> None:
        """Observer hook before the loop: read the rows of a resumed run, and measure the device's peak performance."""
        self._set(state="running", step=start - 1, steps=steps)
        HERE.progress()
        self._quietly(self._begin)

    def _begin(self) -> None:
        self._watch = Watch(self._new_rows(), looks=1)
        actor = self.pipeline.learners().get("actor")
        flops, source = peak(actor.cards() if isinstance(actor, Carded) else ())
        self._set(peak=flops, peak_source=source)
        self._parameters = parameters(actor.path) if isinstance(actor, Located) else None

    def on_step(self, report: Any) -> None:
        """Observer hook after a step: keep the figures of its `StepReport`."""
        self._set(step=report.step)
        HERE.progress()
        self._quietly(lambda: self._keep(report))

    def on_end(self, error: BaseException | None) -> None:
        """Observer hook after the loop: keep whether it finished or failed, and why."""
        self._set(state="done") if error is None else self._set(state="failed", why=first_line(error))

    def _quietly(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001 - who watches a training must not end it
            log.warning("the health page lacks figures of step %d: %s", self._last.step, first_line(error))

    def _keep(self, report: Any) -> None:
        metrics, batch, last = report.metrics, report.trace.batch, self._last
        self._seconds.append(metrics["timing_s/step"])
        stages = dict(last.stage_seconds)
        for name, seconds in metrics.items():
            kind, _, stage = name.partition("/")
            if kind == "timing_s" and stage not in ("step", "overlapped"):
                stages[stage] = stages.get(stage, 0.0) + seconds
        for row in self._new_rows():
            self._watch.look(row)
        generated = self._tokens() - self._base
        sampled = generated - last.generated
        update = next((stage for stage in self.pipeline if stage.name == "update_actor"), None)
        passes = int(update.settings().get("ppo_epochs", 1)) if update is not None else 0
        trained = passes * int(batch["attention_mask"].sum()) if "attention_mask" in batch else 0
        rollout, learning = metrics.get("timing_s/rollout"), metrics.get("timing_s/update_actor")
        rate = trained / learning if learning and trained else None
        self._set(
            step_seconds=self._seconds[-1], median_seconds=median(self._seconds), stage_seconds=stages,
            generated=generated, trained=last.trained + trained,
            generated_rate=sampled / rollout if rollout and sampled else None, trained_rate=rate, mfu=self._mfu(rate),
        )  # fmt: skip

    def _mfu(self, rate: float | None) -> float | None:
        """Compute the model FLOPs utilisation (0 to 1) from the tokens per second of all ranks; None where a figure is
        unknown.
        """
        actor = self.pipeline.learners().get("actor")
        record = actor.describe() if isinstance(actor, Described) else {}
        if rate is None or self._parameters is None or self._last.peak is None:
            return None
        return 6 * self._parameters * rate / (self._last.peak * int(record.get("ranks", 1)))

    def _new_rows(self) -> list[dict[str, Any]]:
        """Read the complete lines that were added to metrics.jsonl since the last call."""
        metrics = self.path / "metrics.jsonl"
        if not metrics.is_file():
            return []
        with metrics.open("rb") as file:
            file.seek(self._read)
            *lines, _ = file.read().split(b"\n")
        self._read += sum(len(line) + 1 for line in lines)
        rows = [json.loads(unsealed(line.decode(), str(metrics), RunError, "")) for line in lines if line.strip()]
        if rows:
            self._set(row={key: value for key, value in rows[-1].items() if isinstance(value, int | float)})
        return rows

    @staticmethod
    def _tokens() -> int:
        return sum(one.tokens for one in HERE.queues.values())

    # --- looking ----------------------------------------------------------------------------

    def look(self) -> Health:
        """Return the state of the training now."""
        last, idle = self._last, HERE.idle
        usual, state, why = last.median_seconds, last.state, last.why
        allowed = max(self.least, self.stalled * usual) if usual is not None else max(self.least, self.first)
        if state == "running" and self.control.holding:
            state = "paused"
        elif state in ("starting", "running") and idle > allowed:
            busy = ", ".join(f"{name} for {seconds:.0f} s" for name, seconds in HERE.phases) or "no stage runs"
            state, why = "stalled", f"nothing has ended for {idle:.0f} s, {allowed:.0f} s are allowed: {busy}"
        elif state == "running" and self.control.stopping:
            state = "stopping"
        learners = self.pipeline.learners()
        return replace(
            last, state=state, why=why, seconds=time.monotonic() - self._began, idle=idle, allowed=allowed, phases=HERE.phases,
            generated=self._tokens() - self._base, queues=HERE.queues, pushes=push_metrics(learners.values()),
            versions={role: one.version for role, one in learners.items()}, symptoms=self._watch.marks, workers=self.workers(),
        )  # fmt: skip


@runtime_checkable
class Carded(Protocol):
    """Protocol of learners that know on which GPUs they compute (local, FSDP)."""

    def cards(self) -> list[str]:
        """Return the name of the GPU of each of the learner's processes; "" for a CPU."""


def peak(cards: Sequence[str]) -> tuple[float | None, str]:
    """Return (operations per second of one of the learner's `cards`, where that figure comes from); (None, why) where
    it is unknown.

    For a GPU it is the bfloat16 figure of its data sheet. For a CPU ("") it is measured here in some milliseconds:
    float32 matrix products on torch's present number of threads.
    """
    if len(set(cards)) != 1:
        kinds = ", ".join(sorted(one or "CPU" for one in set(cards)))
        return None, f"ranks on different devices: {kinds}" if kinds else "the learner does not say what it computes on"
    if device := cards[0]:
        card = card_of(device)
        return (card.flops, f"{card.name}'s data sheet") if card else (None, f"no figures are known of {device}")
    measured = f"measured: float32 products on the CPU, {torch.get_num_threads()} threads"
    return product_rate(torch.float32), measured


# --- Prometheus -----------------------------------------------------------------------------------

STATES = ("starting", "running", "stalled", "paused", "stopping", "done", "failed")
_SUFFIXES = {"gauge": ("",), "counter": ("_total",), "info": ("_info",), "summary": ("_count", "_sum")}
"""Kind of a metric → the ends of its samples' names."""


def exposition(look: Health) -> bytes:
    """Format a `Health` as Prometheus text; nothing of this process's default registry is included."""
    with optional("trackers", "the health page in Prometheus' format"):
        from prometheus_client import Metric, generate_latest

    families = []
    for name, kind, text, samples in _metrics(look):
        families.append(Metric(f"workbench_{name}", text, kind))
        for labels, *values in samples:
            for suffix, value in zip(_SUFFIXES[kind], values, strict=True):
                families[-1].add_sample(f"workbench_{name}{suffix}", labels, float(value))
    registry: Any = SimpleNamespace(collect=lambda: families)
    return generate_latest(registry)


def _metrics(look: Health) -> Iterator[tuple[str, str, str, list[Any]]]:
    """Yield (name, kind, help, samples) for each metric. A sample is its labels and a value; of a summary the count and
    the sum.
    """
    queues = look.queues.items()
    workers = [({"group": one.group, "rank": str(one.rank)}, one) for one in look.workers]
    yield "run", "info", "The run.", [({"run": look.run, "peak": look.peak_source}, 1)]
    states = [({"state": state}, state == look.state) for state in STATES]
    yield "state", "gauge", "1 for the state that the training is in.", states
    for name, value, text in (
        ("step", look.step, "The last step that is done."),
        ("steps", look.steps, "The training's last step."),
        ("idle_seconds", look.idle, "Seconds since a stage, a request, a reward or a step ended."),
        ("idle_allowed_seconds", look.allowed, "Seconds without progress after which it has stalled."),
        ("step_seconds", look.step_seconds, "Seconds of the last step."),
        ("step_median_seconds", look.median_seconds, f"Median of the last {STEPS} steps, in seconds."),
        ("generated_tokens_per_second", look.generated_rate, "Tokens sampled per second of the last rollout."),
        ("trained_tokens_per_second", look.trained_rate, "Tokens per second of the last update of the actor."),
        ("mfu_ratio", look.mfu, "Share of the peak that the last update of the actor used."),
        ("peak_flops", look.peak, f"Operations per second of a device; {look.peak_source}."),
        ("push_seconds", look.pushes.get("timing_s/update_weights"), "Seconds of the last push of weights."),
        ("push_gib", look.pushes.get("perf/update_weights_gb"), "GiB of the last push of weights."),
    ):
        if value is not None:
            yield name, "gauge", text, [({}, value)]
    yield "generated_tokens", "counter", "Tokens sampled by this process's samplers.", [({}, look.generated)]
    yield "trained_tokens", "counter", "Tokens of prompts and responses in updates.", [({}, look.trained)]
    stages = [({"stage": stage}, seconds) for stage, seconds in look.stage_seconds.items()]
    yield "stage_seconds", "counter", "Seconds of a stage, all steps together.", stages
    phases = [({"stage": stage}, seconds) for stage, seconds in look.phases]
    yield "phase_seconds", "gauge", "Seconds that a stage has run by now.", phases
    for name, text in (("waiting", "asked and not begun"), ("running", "begun and not answered")):
        counts = [({"queue": queue}, getattr(entry, name)) for queue, entry in queues]
        yield f"requests_{name}", "gauge", f"Questions to an engine or a reward: {text}.", counts
    over = [
        ({"queue": queue, "outcome": end}, getattr(entry, end)) for queue, entry in queues for end in ("done", "failed")
    ]
    yield "requests", "counter", "Questions that are over.", over
    answers = [({"queue": queue}, entry.done, entry.seconds) for queue, entry in queues]
    yield "request_seconds", "summary", "Seconds from a question to its answer.", answers
    waits = [({"queue": queue}, entry.begun, entry.queue_seconds) for queue, entry in queues]
    yield "request_queue_seconds", "summary", "Seconds that an answered question waited.", waits
    versions = [({"role": role}, version) for role, version in look.versions.items()]
    yield "policy_version", "gauge", "Policy version of a learner.", versions
    begun = [({"symptom": entry.name}, entry.since) for entry in look.symptoms]
    yield "symptom_since_step", "gauge", "A symptom and the step in which it was first seen.", begun
    doing = [({**labels, "doing": one.state}, one.seconds or 0) for labels, one in workers]
    yield "worker_seconds", "gauge", "What a worker does, and for how long.", doing
    held = [(labels, one.resident) for labels, one in workers if one.resident is not None]
    yield "worker_resident_bytes", "gauge", "Memory of a worker.", held
    row = [({"name": name}, value) for name, value in look.row.items() if math.isfinite(value)]
    yield "metric", "gauge", "The last metrics row of the run, by name.", row


# --- the page -------------------------------------------------------------------------------------


def port_of(health: bool | int | None) -> int | None:
    """Return the port that an argument `health` means, or None for no page. With `health=None` the environment
    variable WORKBENCH_HEALTH decides.
    """
    if health is None and (text := os.environ.get("WORKBENCH_HEALTH", "")):
        require(text.isdecimal(), "variable WORKBENCH_HEALTH", expected="a port, or 0 for any free one", found=text)
        health = int(text)
    if health is None or isinstance(health, bool):
        return PORT if health else None
    is_port = isinstance(health, int) and 0 <= health < 65536
    require(is_port, "argument health", expected="a port, True or None", found=health)
    return health


def check_port(health: int | None) -> None:
    """Raise `SettingError` where a health page cannot be served at this port now."""
    with health_page(False if health is None else health):
        pass


@contextmanager
def health_page(health: bool | int | None) -> Iterator[HealthPage | None]:
    """Context manager that serves the health page of a training, or yields None where `health` asks for no page.

    Raises `SettingError` where the port is in use.
    """
    port = port_of(health)
    if port is None:
        yield None
        return
    page = HealthPage()
    with ExitStack() as stack:
        try:
            served = serving(page.answer, name="workbench-health", port=port, guard=from_another_page)
            page.url = f"http://{stack.enter_context(served)}"
        except OSError as cause:
            if cause.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise
            do = "another training may serve there: choose another port, or health=0 for any free one"
            raise SettingError(f"port {port} of 127.0.0.1 for the health page", found=cause.strerror, do=do) from cause
        append_line(f"health page: {page.url}/health, Prometheus: {page.url}/metrics")
        log.info("health page: %s/health", page.url)
        yield page


class HealthPage:
    """Answers the HTTP requests for a training's health. `health_page` makes it before the training begins."""

    def __init__(self) -> None:
        self.url = ""
        self._watcher: Watcher | None = None
        self._lock = threading.Lock()
        self._workers: tuple[float, Sequence[WorkerLine]] = (0.0, ())

    def watching(self, watcher: Watcher) -> Watcher:
        """Show this training from now on; returns `watcher`, which the loop has to get as an observer."""
        watcher.workers = self._doing
        self._watcher = watcher
        return watcher

    def _doing(self) -> Sequence[WorkerLine]:
        """Return what the workers of the open cluster are doing; they are asked at most every `REFRESH` seconds."""
        with self._lock:
            when, known = self._workers
            if session.opened() is None or (time.monotonic() - when < REFRESH and known):
                return known
            try:
                known = session.opened().status().workers  # type: ignore[union-attr]
            except WorkbenchError:  # it was closed meanwhile
                return known
            self._workers = time.monotonic(), known
            return known

    def answer(self, request: HttpRequest) -> tuple[int, Any]:
        """Answer one HTTP request: returns (status, body)."""
        pages: dict[str, Callable[[Health], Any]] = {
            "/health": _page,
            "/health.json": lambda look: strict(look.to_dict()),
            "/metrics": lambda look: Text(exposition(look).decode(), "text/plain; version=0.0.4; charset=utf-8", STILL),
        }
        path = request.path.partition("?")[0].rstrip("/") or "/health"
        if request.method != "GET" or path not in (*pages, "/timeline.json"):
            return 404, {"detail": f"expected GET {', '.join(pages)} or /timeline.json"}
        if self._watcher is None:
            return 200, {"state": "starting", "ok": True}
        try:
            if path == "/timeline.json":
                there = session.opened()
                return 200, (there.timeline if there is not None else ordered((), 0.0)).chrome()
            look = self._watcher.look()
            return 200 if look.ok or path == "/metrics" else 503, pages[path](look)
        except Exception as error:  # noqa: BLE001 - who asks is told, and the training goes on
            return 500, {"detail": first_line(error)}


def _page(look: Health) -> Text:
    """Render the HTML page of one moment. It has no script, and the browser loads it again by itself."""
    head = f'<meta charset="utf-8"><meta http-equiv="refresh" content="{REFRESH}"><meta name="viewport" content="width=device-width">'
    style = "body{font-family:system-ui,sans-serif;margin:1.5em auto;max-width:70em;padding:0 1em}table{margin:.8em 0}td,th{overflow-wrap:break-word}"
    title = doc.escape(f"{look.state}: {look.run}, step {look.step} of {look.steps}")
    head += f"<title>{title}</title><style>:root{{color-scheme:light dark}}{style}</style>"
    links = '<p><small><a href="/health.json">health.json</a> · <a href="/metrics">metrics</a> · <a href="/timeline.json">timeline.json</a></small></p>'
    body = f'<!doctype html><html lang="en"><head>{head}</head><body>{look.html()}{links}</body></html>'
    return Text(body, "text/html; charset=utf-8", STILL)
