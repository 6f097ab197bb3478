"""A group of workers as Ray actors: the protocol `engines.workers.processes.Ranks`, with futures and supervision in the driver.

Ray restarts nothing and repeats nothing. A worker that dies, hangs past its deadline, or is left waiting for one that
died takes its group with it, and the caller, who knows what the ranks held, makes the group anew.

Ray writes a runtime environment, values and all, into its own log files. So variables do not travel in it: each
worker sets them before it imports anything. Only what a process must have when it starts goes through Ray, and no
secret is shown or logged.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

from workbench.base.errors import EngineError, Interrupted, SettingError, WorkbenchError, WorkerLost, message
from workbench.base.runtime import PATIENCE, check
from workbench.base.shown import HIDDEN, SECRET, Shown
from workbench.cluster import discovery
from workbench.cluster.pools import Pool, free_text
from workbench.cluster.timeline import Event, Timeline, ordered
from workbench.cluster.transport import Arrival, arrivals, fetch, out, pack, quietly, read, reason, scatter
from workbench.dataproto.core import DataProto
from workbench.engines.protocol import Closing
from workbench.engines.workers.processes import FIRST_DEADLINE, Deadlines
from workbench.steps.trace import STAGE

# --- their environment ------------------------------------------------------------------------------

_AT_START = re.compile(r"^(LD_|PYTHON|MALLOC_|GLIBC_|PATH$|RAY_)")


@dataclass(frozen=True)
class Environment:
    """A runtime environment in two halves: what Ray gets, and the variables that workers set themselves."""

    ray: Mapping[str, Any] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)

    @staticmethod
    def of(source: str | Path | Mapping[str, Any] | None) -> Environment:
        """Make an `Environment` from a mapping, a yaml file or None. Raises `SettingError`, which never quotes a value."""
        spec = _read(source)
        variables = spec.pop("env_vars", None) or {}
        if not isinstance(variables, Mapping):
            raise SettingError("runtime_env env_vars", expected="{name: string, …}", found=type(variables).__name__)
        odd = [name for name, value in variables.items() if not isinstance(value, str)]
        if odd:
            raise SettingError(f"runtime_env env_vars {', '.join(map(str, odd))}", expected="strings", do="quote them")
        return Environment(spec, dict(variables))

    def at_start(self) -> dict[str, str]:
        """Return the variables that a process needs when it starts (`LD_…`, `PATH` …), without secrets, because Ray
        logs them.
        """
        names = [name for name in self.variables if _AT_START.match(name) and not SECRET.search(name)]
        return {name: self.variables[name] for name in names}

    def joined(self, more: Mapping[str, str] | None) -> Environment:
        """Return a copy with the variables of `more` added; they replace those of the same name."""
        return Environment(self.ray, {**self.variables, **(more or {})})

    def redact(self, text: str) -> str:
        """Replace the values of variables in a text by •••: values of 8 characters or more, of 4 if the name has KEY,
        TOKEN or such.
        """
        for name, value in sorted(self.variables.items(), key=lambda one: -len(one[1])):
            if len(value) >= (4 if SECRET.search(name) else 8):
                text = text.replace(value, HIDDEN)
        return text

    def __repr__(self) -> str:
        parts = [*sorted(self.ray), *(f"{name}={HIDDEN}" for name in sorted(self.variables))]
        return f"Environment({', '.join(parts)})"


def _read(source: str | Path | Mapping[str, Any] | None) -> dict[str, Any]:
    if source is None:
        return {}
    if isinstance(source, Mapping):
        return dict(source)
    import yaml

    path = Path(source)
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except OSError as error:
        raise SettingError(f"runtime_env {str(path)!r}", expected="a yaml file", found=error.strerror) from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)  # the error's own text quotes the line, which may hold a secret
        where = f"line {mark.line + 1}" if mark is not None else "the file"
        raise SettingError(f"runtime_env {str(path)!r}", expected="valid yaml", found=f"an error in {where}") from None
    if not isinstance(content, dict):
        raise SettingError(f"runtime_env {str(path)!r}", expected="a mapping", found=type(content).__name__)
    return content


def nsight_options(nsight: str | Mapping[str, str]) -> dict[str, Any]:
    """Return the `runtime_env` that runs workers under NVIDIA Nsight Systems: `"default"`, or `nsys profile` options as
    a mapping.

    Raises `SettingError` where `nsys` is not installed on this node, or the PATH has another `python`, because Ray would start no
    worker and not say why.
    """
    if shutil.which("nsys") is None:
        do = "install NVIDIA Nsight Systems, or use cluster.profile(…), which does not need it"
        raise SettingError("nsight=", expected="nsys on the PATH of every node", found="none on this one", do=do)
    here, python = Path(sys.executable).parent, shutil.which("python")
    if python is None or Path(python).parent.resolve() != here.resolve():
        do = f"activate the environment, or put {here} first on the PATH, before the cluster is started"
        what, found = "nsight=, which starts workers by the `python` of the PATH", python or "none"
        raise SettingError(what, expected=here, found=found, do=do)
    if isinstance(nsight, str) and nsight != "default":
        raise SettingError("nsight=", expected="'default' or options of nsys profile", found=nsight)
    return {"nsight": nsight if isinstance(nsight, str) else {str(name): str(value) for name, value in nsight.items()}}


# --- groups -----------------------------------------------------------------------------------------

KEPT_EVENTS = 20_000
JOINED_SECONDS = 0.1
LOG_LINES = 20
"""Last lines of a dead worker's log that its error message quotes."""
GONE_SECONDS = 6.0
HEAR_SECONDS = 1.0


class RayRanks(Shown, Closing):
    """A group of Ray actors, one per rank, each holding `factory(rank, size, **settings)`. Made by `Cluster.ranks`."""

    def __init__(
        self,
        name: str,
        actors: Sequence[Any],
        environment: Environment,
        ended: Callable[[RayRanks], None],
        pool: Pool | None,
        seats: Sequence[int],
    ) -> None:
        self.size = len(actors)
        self.name = name
        self.actors = actors
        self.pool = pool
        self.seats = seats
        """Numbers of the pool's processes on which the group's ranks run."""
        self.closed: str | None = None
        """Why the group was ended; None while it runs."""
        self.facts: list[dict[str, Any]] = []
        """Facts of each rank's worker, by rank: pid, host, node, gpus, logs (file names), process."""
        self.redact = environment.redact
        self._environment = environment
        self._ended = ended
        self._events: list[Event] = []
        self._number = 0
        self._open: list[Pending] = []
        self.deadlines = Deadlines()
        """Time limits of calls without `timeout=`."""

    def begin(self, factory: Callable[..., Any], settings: Mapping[str, Any], seconds: float) -> None:
        """Make `factory(rank, size, **settings)` in all workers; if one fails, end the group. Raises as `Cluster.ranks`
        does.
        """
        until = time.monotonic() + seconds
        try:
            self.facts = _introduced(self.actors, self._environment, until)
            work = [(factory, rank, self.size, dict(settings)) for rank in range(self.size)]
            refs = {rank: actor.make.remote(0, pack(work[rank])) for rank, actor in enumerate(self.actors)}
            Pending(self, getattr(factory, "__name__", "factory"), 0, refs, until - time.monotonic()).result()
        except BaseException as error:
            self.end(f"it could not start: {type(error).__name__}")
            raise

    # --- calls ------------------------------------------------------------------------------

    def call(
        self, method: str, *shared: Any, each: Sequence[tuple[Any, ...]] | None = None, timeout: float | None = None
    ) -> list[Any]:
        """Call `method(*each[rank], *shared)` of every rank's object, all at once; returns one result per rank, in order.

        `timeout` in seconds; None: ten times the method's median so far, at least 30 s; half an hour the first time.
        Raises `WorkerLost` where a worker dies, a rank's own error where it is a `WorkbenchError`, else `EngineError` with
        its traceback, `TimeoutError` (with what the ranks were doing) past the deadline; after `WorkerLost` and
        `TimeoutError` the group is ended. An interrupt lets the ranks stop at their next safe point.
        """
        try:
            return self.submit(method, *shared, each=each, timeout=timeout).result()
        except KeyboardInterrupt:  # before result() waited, where it is dealt with
            for one in self.calls[-1:]:
                one.interrupted()
            raise

    def submit(
        self, method: str, *shared: Any, each: Sequence[tuple[Any, ...]] | None = None, timeout: float | None = None
    ) -> Pending:
        """Start a `call` without waiting; `.result()` waits. A group runs its calls one by one; different groups run in
        parallel.
        """
        import ray

        self.check()
        if each is not None and len(each) != self.size:
            raise SettingError(f"values in each= of {method}", expected=f"{self.size}, one a rank", found=len(each))
        self._number += 1
        sent: Any = pack(tuple(shared))
        if self.size > 1 and shared:
            sent = ray.put(sent)  # once, however many read it
        inputs: list[Any] = [()] * self.size if each is None else [pack(tuple(arguments)) for arguments in each]
        refs: dict[int, Any] = {}
        pending = self._sent(method, refs, self.deadlines.of(method) if timeout is None else timeout)
        for rank, actor in enumerate(self.actors):  # a call that is interrupted here is known, and stopped
            refs[rank] = actor.call.remote(self._number, method, inputs[rank], sent)
        return pending

    def profile(self, start: bool) -> Pending:
        """Start torch's profiler on all ranks, or end it (the results are gzipped Chrome traces); queued like a call."""
        self.check()
        self._number += 1
        refs = {rank: actor.profile.remote(self._number, start) for rank, actor in enumerate(self.actors)}
        return self._sent("profile", refs, FIRST_DEADLINE)

    def _sent(self, method: str, refs: dict[int, Any], timeout: float) -> Pending:
        self._open = [*self.calls, Pending(self, method, self._number, refs, timeout)]
        return self._open[-1]

    def map(
        self,
        method: str,
        batch: DataProto,
        *shared: Any,
        balance: bool = True,
        pad: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """Call `method(rows, *shared)` on each rank with its share of a batch's rows; returns the joined results.

        See `scatter` for which rank gets which rows, `Scatter.joined` for which results can be joined.
        """
        scattered = scatter(batch, self.size, balance=balance, pad=pad)
        each = [(part,) for part in scattered.parts(batch)]
        return scattered.joined(self.call(method, *shared, each=each, timeout=timeout))

    def check(self) -> None:
        """Raise `EngineError` where the group was ended."""
        if self.closed is not None:
            raise EngineError(f"group {self.name!r} ended", found=self.closed, do="start it again: cluster.ranks(…)")

    # --- supervision -------------------------------------------------------------------------

    def record(self, method: str, rank: int, began: float, ended: float, outcome: str, stage: str = "") -> None:
        """Add one rank's call to the timeline; a sampler's `exchange` calls that follow within 0.1 s count as one."""
        event = Event(self.name, rank, self.facts[rank]["host"], method, began, ended, outcome, stage)
        for place in range(1, min(self.size, len(self._events)) + 1):
            last = self._events[-place]
            same = (last.rank, last.name, last.outcome, last.stage) == (rank, method, outcome, stage)
            if same and method == "exchange" and began - last.ended < JOINED_SECONDS:
                self._events[-place] = replace(last, ended=ended)
                return
        self._events.append(event)
        del self._events[:-KEPT_EVENTS]

    def stop(self, number: int) -> None:
        """Ask all ranks to stop the calls numbered up to `number` at their next safe point; does not wait."""
        for actor in self.actors:
            actor.stop.remote(number)

    def end(self, why: str) -> None:
        """Kill every worker, for the reason `why`, and wait some seconds until the processes are gone."""
        import ray

        self.closed = self.closed or why
        if ray.is_initialized():
            for actor in self.actors:
                ray.kill(actor, no_restart=True)
            here = [fact["process"] for fact in self.facts if fact["process"] is not None]
            if discovery.end(here, HEAR_SECONDS):  # Ray gives a stopped process five seconds
                discovery.end(here, GONE_SECONDS)
            until = time.monotonic() + GONE_SECONDS
            for actor in self.actors if len(here) < self.size else ():
                quietly(actor.now.remote(), max(until - time.monotonic(), 0.1), None)
        self._ended(self)

    def close(self) -> None:
        """End the workers; unanswered calls are abandoned. Closing twice is fine."""
        if self.closed is None:
            self.end("it was closed")

    # --- looking ----------------------------------------------------------------------------

    @property
    def out(self) -> list[str]:
        """Method names of the calls that are not answered yet, in order."""
        return [one.method for one in self.calls]

    @property
    def calls(self) -> list[Pending]:
        """The calls that are not answered yet, in order."""
        return [one for one in self._open if not one.done]

    @property
    def timeline(self) -> Timeline:
        """All calls that a rank of this group has run, with their times."""
        return ordered(self._events)

    def where(self, rank: int) -> str:
        """Return a rank's name for messages: `rank 1 (pid 4711 on host)`."""
        return f"rank {rank} (pid {self.facts[rank]['pid']} on {self.facts[rank]['host']})"

    def stacks(self, ranks: Sequence[int] | None = None, seconds: float = 2.0) -> dict[int, str]:
        """Return rank → its present Python stacks as text; for a rank that is silent for `seconds` a sentence that says
        so.
        """
        chosen = range(self.size) if ranks is None else ranks
        refs = {rank: self.actors[rank].stacks.remote() for rank in chosen}
        until = time.monotonic() + seconds
        mute = "does not answer: stopped, or in C code"
        return {rank: quietly(ref, max(until - time.monotonic(), 0.1), mute) for rank, ref in refs.items()}

    def logs(self, rank: int, lines: int = 100) -> str:
        """Return the last `lines` that a rank, dead or alive, wrote to stdout and to stderr; values of variables are
        hidden.
        """
        return self.redact(_read_log(self.facts[rank], lines))


class Pending:
    """A call on all ranks of a group, as a future: `result()` waits for one result per rank. Made by `RayRanks.submit`."""

    def __init__(self, group: RayRanks, method: str, number: int, refs: dict[int, Any], timeout: float) -> None:
        self.method = method
        self.timeout = timeout
        self.stage = STAGE.get()
        """The stage that made the call; empty outside of a stage."""
        self._group = group
        self._number = number
        self._refs = refs
        self._sent = time.time()
        self._until = time.monotonic() + timeout
        self._got: dict[int, Arrival] = {}
        self._outcome: Future[list[Any]] = Future()

    @property
    def done(self) -> bool:
        """Whether `result()` has collected the call's results or its error."""
        return self._outcome.done()

    @property
    def seconds(self) -> float:
        """Seconds since the call was sent."""
        return time.time() - self._sent

    def result(self, *, copy: bool = True) -> list[Any]:
        """Wait for one result per rank, in order; raises as `RayRanks.call` does. Calling it again returns the same
        results.

        Batches are copied into this process's memory. With `copy=False` a column stays in Ray's object store, and uses
        its room, until the column is first read.
        """
        if not self.done:
            try:
                self._group.check()
                self._outcome.set_result([read(one) if copy else one for one in self._collect()])
            except (KeyboardInterrupt, Interrupted) as error:
                self.interrupted(error)
            except BaseException as error:  # noqa: BLE001 - raised below, each time that it is asked
                self._outcome.set_exception(error)
            self._refs = {}  # the object store may have them back
        return self._outcome.result()

    def interrupted(self, error: BaseException | None = None) -> None:
        """Stop the call after an interrupt. Where all ranks stop, or all end normally, the group stays; otherwise it is
        ended.
        """
        self._outcome.set_exception(error or Interrupted(f"{self.method} was interrupted"))
        whole = False
        try:
            hung = self._settle()
            kinds = {"stopped" if _was_stopped(one) else one.outcome for one in self._got.values()}
            whole = not hung and "lost" not in kinds and not {"stopped"} < kinds
        finally:  # a second interrupt does not leave them working either
            if not whole:
                self._group.end(f"{self.method} was interrupted, and the ranks did not all stop")

    def _collect(self) -> list[Any]:
        failure: WorkbenchError | None = None
        try:
            for arrival in arrivals(self._refs, self._until, check):
                self._keep(arrival)
                if arrival.outcome != "done":
                    failure = self._failed()
                    break
        except TimeoutError:
            self._late()
        if failure is not None:
            raise failure
        self._group.deadlines.took(self.method, max(arrival.ended - arrival.began for arrival in self._got.values()))
        return [arrival.value for _, arrival in sorted(self._got.items())]

    def _keep(self, arrival: Arrival) -> None:
        self._got[arrival.rank] = arrival
        began, ended = arrival.began or self._sent, arrival.ended or time.time()
        self._group.record(self.method, arrival.rank, began, ended, arrival.outcome, self.stage)

    def _rest(self) -> list[int]:
        return [rank for rank in self._refs if rank not in self._got]

    def _settle(self) -> list[int]:
        """Ask the remaining ranks to stop and collect their answers; returns the ranks that do not answer."""
        if any(arrival.outcome == "lost" for arrival in self._got.values()):
            return self._rest()
        self._group.stop(self._number)
        with suppress(TimeoutError):
            for arrival in arrivals({rank: self._refs[rank] for rank in self._rest()}, time.monotonic() + PATIENCE):
                self._keep(arrival)
        return self._rest()

    # --- ways to fail -------------------------------------------------------------------------

    def _failed(self) -> WorkbenchError:
        """Return the error to raise after a rank raised or died. Ranks that wait for that rank for ever are killed with
        their group.
        """
        hung = self._settle()
        for arrival in self._got.values():
            if arrival.outcome == "lost":
                return self._lost(arrival)
        after = ""
        if hung:
            names = ", ".join(map(str, hung))
            self._group.end(f"{self.method} raised on a rank, and rank {names} did not stop")
            after = f"\nrank {names} waited for that rank and was killed; the whole group was ended"
        raised = [arrival for arrival in self._got.values() if arrival.outcome == "raised"]
        arrival = next((arrival for arrival in raised if not _was_stopped(arrival)), raised[0])
        kind, text, trace, error = arrival.value
        redact = self._group.redact
        what = f"{self.method} on {self._group.where(arrival.rank)} of group {self._group.name!r} raised {kind}: {redact(text)}"
        ours = type(error) if isinstance(error, WorkbenchError) else EngineError
        return ours(f"{what}{after}\n{redact(trace)}")

    def _lost(self, arrival: Arrival) -> WorkerLost:
        group, rank = self._group, arrival.rank
        group.end(f"rank {rank} was lost in {self.method}")
        tail, why = group.logs(rank, LOG_LINES), group.redact(arrival.value)
        what = f"{group.where(rank)} of group {group.name!r} died in {self.method}()"
        text = message(what, found=why, do="start the group again: cluster.ranks(…)")
        log = f"its log ends:\n{tail}" if tail else "its log is empty"
        return WorkerLost(f"{text}\n{log}", rank=rank, exit=why, log=tail)

    def _late(self) -> NoReturn:
        rest, group = self._rest(), self._group
        doing = group.stacks(rest)
        for rank in rest:
            group.record(self.method, rank, self._sent, time.time(), "late", self.stage)
        group.deadlines.late(self.method)
        group.end(f"{self.method} passed its deadline of {self.timeout:g} s")
        what, expected = f"{self.method} of group {group.name!r}", f"an answer in {self.timeout:g} s"
        do = "the group was ended: start it again, and give the call a longer timeout="
        text = message(what, expected=expected, found=f"none from {', '.join(map(group.where, rest))}", do=do)
        raise TimeoutError(text + "".join(f"\nrank {rank}:\n{stack}" for rank, stack in doing.items()))


def _was_stopped(one: Arrival) -> bool:
    return one.outcome == "raised" and isinstance(one.value[3], Interrupted)


# --- workers ----------------------------------------------------------------------------------------


def started(
    options: Sequence[Mapping[str, Any]], environment: Environment, nsight: str | Mapping[str, str] | None
) -> list[Any]:
    """Ask Ray for one `Worker` actor for each of `options`, without restarts or retries; returns the actor handles."""
    import ray

    from workbench.cluster import actor as actor_module

    # for good: another thread may start a group beside this one
    ray.cloudpickle.register_pickle_by_value(actor_module)
    doors: dict[str, Any] = {"concurrency_groups": {"control": 2}}
    remote = ray.remote(**doors)(actor_module.Worker)
    variables = environment.at_start()
    runtime: dict[str, Any] = {"env_vars": variables} if variables else {}
    if nsight is not None:
        runtime |= nsight_options(nsight)
    common = {"max_restarts": 0, "max_task_retries": 0, **({"runtime_env": runtime} if runtime else {})}
    return [remote.options(**common, **one).remote() for one in options]


def _introduced(actors: Sequence[Any], environment: Environment, until: float) -> list[dict[str, Any]]:
    """Set every worker's variables, and return what each says of itself (pid, host, …). Raises `EngineError` for ranks
    that do not start.
    """
    from ray.exceptions import RayError

    paths = [os.path.abspath(path) for path in sys.path]
    refs = [actor.setup.remote(dict(environment.variables), paths) for actor in actors]
    ranks = out(refs, until - time.monotonic())
    if ranks:
        what = f"rank {', '.join(map(str, ranks))} of {len(refs)} did not start in time"
        do = "end what uses the cluster (cluster.status() lists it), or give start_timeout more seconds"
        raise EngineError(what, found=free_text(), do=do)
    try:
        facts: list[dict[str, Any]] = [fetch(ref, 10.0) for ref in refs]
    except RayError as error:
        raise EngineError(environment.redact(message("a worker did not start", found=reason(error)))) from None
    for fact in facts:
        fact["process"] = discovery.process(fact["pid"]) if fact["host"] == socket.gethostname() else None
    return facts


# --- their logs -------------------------------------------------------------------------------------

TAIL_BYTES = 64 << 10
LOG_SECONDS = 5.0


def tail(paths: Sequence[str], lines: int) -> str:
    """Return the last `lines` of each existing file of `paths`, joined as one text."""
    parts = []
    for path in paths:
        text = ""
        with suppress(OSError), open(path, "rb") as file:
            file.seek(0, 2)
            file.seek(max(file.tell() - TAIL_BYTES, 0))
            text = file.read().decode("utf-8", errors="replace")
        marks = (":job_id:", ":actor_name:", ":task_name:")  # Ray's own lines, for its log monitor
        kept = [line for line in text.splitlines() if line.strip() and not line.startswith(marks)]
        parts += kept[-lines:]
    return "\n".join(parts)


def _read_log(facts: Mapping[str, Any], lines: int) -> str:
    """Return the tail of a worker's output and error files, read on its node; a sentence where that node does not
    answer.
    """
    paths = [path for path in facts["logs"] if path.startswith("/") and Path(path).suffix in (".out", ".err")]
    if facts["host"] == socket.gethostname() or not paths:
        return tail(paths, lines)
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    there = NodeAffinitySchedulingStrategy(facts["node"], soft=False)
    ref = ray.remote(num_cpus=0, max_retries=0)(tail).options(scheduling_strategy=there).remote(paths, lines)
    return str(quietly(ref, LOG_SECONDS, f"(the log is on {facts['host']}, which does not answer)"))
