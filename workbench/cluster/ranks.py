"""A group of workers as Ray actors: `engines.ranks.Ranks`, with futures beneath and supervision in the driver.

Ray restarts nothing and repeats nothing. A worker that dies, hangs past its deadline, or is left waiting for one that died takes
its group with it, and the caller, who knows what the ranks held, makes the group anew.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from workbench.cluster import launching
from workbench.cluster.dispatch import share
from workbench.cluster.pending import Pending
from workbench.cluster.timeline import Event, Timeline, ordered
from workbench.cluster.transport import pack
from workbench.cluster.waiting import quietly
from workbench.dataproto import DataProto
from workbench.errors import EngineError, SettingError, message

if TYPE_CHECKING:
    from workbench.cluster.pools import Pool
    from workbench.cluster.session import Cluster

FIRST_DEADLINE = 1800.0
"""Seconds that a call may take where nothing is known of its method yet."""
LEAST_DEADLINE = 30.0
KEPT_EVENTS = 20_000
JOINED_SECONDS = 0.1


class RayRanks:
    """Workers of one group, each holding `factory(rank, size, **settings)`. Made by `Cluster.ranks`."""

    def __init__(
        self,
        cluster: Cluster,
        factory: Callable[..., Any],
        size: int,
        *,
        pool: Pool | None,
        seats: Sequence[int],
        env: Mapping[str, str] | None,
        name: str,
        cpus: float,
        gpus: float,
        settings: Mapping[str, Any],
        start_timeout: float,
        nsight: str | Mapping[str, str] | None = None,
    ) -> None:
        self.size = size
        self.name = name
        self.cluster = cluster
        self.pool = pool
        self.seats = tuple(seats)
        """Which of the pool's processes its ranks share."""
        self.closed: str | None = None
        """Why the group is no more; None while it lives."""
        self.facts: list[dict[str, Any]] = []
        """Per rank: pid, host, node, actor, gpus, logs."""
        self._events: list[Event] = []
        self._number = 0
        self._open: list[Pending] = []
        until = time.monotonic() + start_timeout
        environment = cluster.environment.joined(env)
        self._redact = environment.redact
        self.actors = launching.actors(self.seats, pool, environment, cpus, gpus, nsight)
        try:
            self.facts = launching.introduced(self.actors, environment, until, cluster)
            work = [(factory, rank, size, dict(settings)) for rank in range(size)]
            refs = {rank: actor.make.remote(0, pack(work[rank])) for rank, actor in enumerate(self.actors)}
            Pending(self, getattr(factory, "__name__", "factory"), 0, refs, until - time.monotonic()).result()
        except BaseException as error:
            self.end(f"it could not start: {type(error).__name__}")
            raise

    # --- calls ------------------------------------------------------------------------------

    def call(
        self, method: str, *shared: Any, each: Sequence[tuple[Any, ...]] | None = None, timeout: float | None = None
    ) -> list[Any]:
        """`getattr(object, method)(*each[rank], *shared)` on all ranks at once; one result a rank, in order.

        `timeout` in seconds; None: ten times the method's median so far, at least 30 s; half an hour the first time.
        Raises `WorkerLost` where a worker dies, the rank's own error where that is one of ours and else `EngineError` with its
        traceback, `TimeoutError` (with what the ranks were doing) past the deadline; after `WorkerLost` and
        `TimeoutError` the group is gone. An interrupt lets the ranks end at their next safe place.
        """
        return self.submit(method, *shared, each=each, timeout=timeout).result()

    def submit(
        self, method: str, *shared: Any, each: Sequence[tuple[Any, ...]] | None = None, timeout: float | None = None
    ) -> Pending:
        """`call` without waiting: `.result()` waits. Calls on one group run one after the other, groups side by side."""
        import ray

        self._check()
        if each is not None and len(each) != self.size:
            raise SettingError(message(f"{method}: each", expected=f"{self.size} tuples, one a rank", found=len(each)))
        self._number += 1
        sent: Any = pack(tuple(shared))
        if self.size > 1 and shared:
            sent = ray.put(sent)  # once, however many read it
        refs = {
            rank: actor.call.remote(self._number, method, pack(tuple(each[rank])) if each is not None else (), sent)
            for rank, actor in enumerate(self.actors)
        }
        pending = Pending(self, method, self._number, refs, self._deadline(method) if timeout is None else timeout)
        self._open = [one for one in self._open if not one.done] + [pending]
        return pending

    def profile(self, start: bool) -> Pending:
        """Start torch's profiler on all ranks, or end it: a gzipped Chrome trace of each. In its turn among the calls."""
        self._check()
        self._number += 1
        refs = {rank: actor.profile.remote(self._number, start) for rank, actor in enumerate(self.actors)}
        pending = Pending(self, "profile", self._number, refs, FIRST_DEADLINE)
        self._open = [one for one in self._open if not one.done] + [pending]
        return pending

    def map(
        self,
        method: str,
        batch: DataProto,
        *shared: Any,
        balance: bool = True,
        pad: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """`method(rows, *shared)` with the batch's rows shared out, and the results as one, in the batch's order.

        See `dispatch.share` for who gets what, `Shares.joined` for what can be put together.
        """
        shares = share(batch, self.size, balance=balance, pad=pad)
        each = [(part,) for part in shares.parts(batch)]
        return shares.joined(self.call(method, *shared, each=each, timeout=timeout))

    def _check(self) -> None:
        if self.closed is not None:
            raise EngineError(
                message(f"group {self.name!r} is gone", found=self.closed, do="make it anew: cluster.ranks(…)")
            )

    def _deadline(self, method: str) -> float:
        spent = sorted(one.seconds for one in self._events if one.name == method and one.outcome == "done")
        return max(LEAST_DEADLINE, 10 * spent[len(spent) // 2]) if spent else FIRST_DEADLINE

    # --- supervision -------------------------------------------------------------------------

    def record(self, method: str, rank: int, began: float, ended: float, outcome: str, stage: str = "") -> None:
        """Keep an event for the timeline; calls that follow each other at once, as a sampler's exchanges, are one."""
        host = self.facts[rank]["host"] if rank < len(self.facts) else "?"
        event = Event(self.name, rank, host, method, began, ended, outcome, stage)
        for place in range(1, min(self.size, len(self._events)) + 1):
            last = self._events[-place]
            same = (last.rank, last.name, last.outcome, last.stage) == (rank, method, outcome, stage)
            if same and method == "exchange" and began - last.ended < JOINED_SECONDS:
                self._events[-place] = replace(last, ended=ended)
                return
        self._events.append(event)
        del self._events[:-KEPT_EVENTS]

    def stop(self, number: int) -> None:
        """Ask calls up to this one to end at their next safe place; does not wait."""
        for actor in self.actors:
            actor.stop.remote(number)

    def end(self, why: str) -> None:
        """Kill every worker of the group, and wait until they are gone."""
        if self.closed is None:
            self.closed = why
        launching.kill(self.actors, self.facts)
        self.cluster.forget(self)

    def close(self) -> None:
        """End the workers; calls that are out are given up. A second time does nothing."""
        if self.closed is None:
            self.end("it was closed")

    def __enter__(self) -> RayRanks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- looking ----------------------------------------------------------------------------

    @property
    def out(self) -> list[str]:
        """Methods of calls that are not answered yet, in order."""
        return [one.method for one in self.calls]

    @property
    def calls(self) -> list[Pending]:
        """Calls that are not answered yet, in order."""
        return [one for one in self._open if not one.done]

    @property
    def timeline(self) -> Timeline:
        """What each rank did when."""
        return ordered(self._events)

    def where(self, rank: int) -> str:
        """`rank 1 (pid 4711 on host)`."""
        if rank >= len(self.facts):
            return f"rank {rank}"
        return f"rank {rank} (pid {self.facts[rank]['pid']} on {self.facts[rank]['host']})"

    def stacks(self, ranks: Sequence[int] | None = None, seconds: float = 2.0) -> dict[int, str]:
        """What each rank is doing now; a rank whose C code holds the interpreter does not answer."""
        chosen = range(self.size) if ranks is None else ranks
        refs = {rank: self.actors[rank].stacks.remote() for rank in chosen}
        until = time.monotonic() + seconds
        mute = "does not answer: stopped, or in C code"
        return {rank: quietly(ref, max(until - time.monotonic(), 0.1), mute) for rank, ref in refs.items()}

    def logs(self, rank: int, lines: int = 100) -> str:
        """The last lines that a rank wrote to its outputs, dead or alive."""
        if rank >= len(self.facts):
            return ""
        return self._redact(self.cluster.read_log(self.facts[rank], lines))

    def __repr__(self) -> str:
        from workbench.views.clusters import group_text

        return group_text(self)

    def _repr_html_(self) -> str:
        from workbench.views.clusters import group_html

        return group_html(self)
