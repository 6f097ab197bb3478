"""A call that is out on all ranks of a group, and what becomes of it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, NoReturn

from workbench.background import PATIENCE, check
from workbench.cluster.transport import read
from workbench.cluster.waiting import Arrival, Done, Gone, Raised, arrivals
from workbench.errors import EngineError, Interrupted, WorkbenchError, WorkerLost, message
from workbench.trace import STAGE

if TYPE_CHECKING:
    from workbench.cluster.ranks import RayRanks

LOG_LINES = 20
"""Of a dead worker's log in its error."""


class _Stopped(Exception):
    """This process was asked to stop while it waited; the cause says how."""


class Pending:
    """A future of one result a rank."""

    def __init__(self, group: RayRanks, method: str, number: int, refs: dict[int, Any], timeout: float) -> None:
        self.method = method
        self.timeout = timeout
        self.stage = STAGE.get()
        """The stage that asked; empty outside of one."""
        self._group = group
        self._number = number
        self._refs = refs
        self._sent = time.time()
        self._until = time.monotonic() + timeout
        self._got: dict[int, Arrival] = {}
        self._result: list[Any] | None = None
        self._error: BaseException | None = None

    @property
    def done(self) -> bool:
        """Whether somebody waited for it to its end."""
        return self._result is not None or self._error is not None

    @property
    def seconds(self) -> float:
        """Since it was sent."""
        return time.time() - self._sent

    def result(self, *, copy: bool = True) -> list[Any]:
        """One result a rank, in order; see `RayRanks.call` for what is raised. May be asked again.

        Batches are this process's own memory; `copy=False` leaves their columns in the object store until each is looked at:
        at once there, and the store's room for as long.
        """
        if self._result is not None:
            return self._result
        if self._error is not None:
            raise self._error
        try:
            if self._group.closed is not None:
                self._group._check()
            self._result = [read(one) if copy else one for one in self._collect()]
        except BaseException as error:
            self._error = error
            raise
        finally:
            self._refs = {}  # the object store may have them back
        return self._result

    def _collect(self) -> list[Any]:
        try:
            for one in arrivals(self._refs, self._until, self._look):
                self._keep(one)
                if not isinstance(one.outcome, Done):
                    self._failed()
        except TimeoutError:
            self._late()
        except (KeyboardInterrupt, _Stopped) as error:
            self._interrupted()
            raise error.__cause__ or error from None
        return [one.outcome.value for _, one in sorted(self._got.items()) if isinstance(one.outcome, Done)]

    def _look(self) -> None:
        try:
            check()
        except Interrupted as error:
            raise _Stopped from error

    def _keep(self, one: Arrival) -> None:
        self._got[one.rank] = one
        outcome = {Done: "done", Raised: "raised", Gone: "lost"}[type(one.outcome)]
        began = one.began or self._sent
        self._group.record(self.method, one.rank, began, one.ended or time.time(), outcome, self.stage)

    def _rest(self) -> list[int]:
        return [rank for rank in self._refs if rank not in self._got]

    def _settle(self) -> list[int]:
        """Ask the others to stop, take what they answer, kill the group where some do not answer; who did not."""
        rest = {rank: self._refs[rank] for rank in self._rest()}
        if any(isinstance(one.outcome, Gone) for one in self._got.values()):
            return list(rest)
        self._group.stop(self._number)
        try:
            for one in arrivals(rest, time.monotonic() + PATIENCE):
                self._keep(one)
        except TimeoutError:
            return self._rest()
        return []

    # --- ways to fail -------------------------------------------------------------------------

    def _failed(self) -> NoReturn:
        """One rank raised or died: the call is lost, and so are ranks that wait for it for ever."""
        hung = self._settle()
        lost = [one for one in self._got.values() if isinstance(one.outcome, Gone)]
        if lost:
            self._lost(lost[0].rank)
        if hung:
            self._group.end(f"{self.method} raised on a rank, and rank {_names(hung)} did not let go")
        raised = [one for one in self._got.values() if isinstance(one.outcome, Raised)]
        real = [one for one in raised if not isinstance(one.outcome.error, Interrupted)] or raised  # type: ignore[union-attr]
        self._raise(real[0], hung)

    def _raise(self, one: Arrival, hung: list[int]) -> NoReturn:
        what = one.outcome
        assert isinstance(what, Raised)
        redact = self._group._redact
        text = (
            f"{self.method} on {self._group.where(one.rank)} of {self._group.name!r}: {what.kind}: {redact(what.text)}"
        )
        after = f"\nrank {_names(hung)} waited for it and was ended; the group is gone" if hung else ""
        where = f"\n{redact(what.trace)}"
        if isinstance(what.error, WorkbenchError):
            kind: type[WorkbenchError] = type(what.error)
            raise kind(f"{text}{after}{where}") from None
        raise EngineError(f"{text}{after}{where}")

    def _lost(self, rank: int) -> NoReturn:
        outcome = self._got[rank].outcome
        assert isinstance(outcome, Gone)
        group = self._group
        group.end(f"rank {rank} was lost in {self.method}")
        tail, why = group.logs(rank, LOG_LINES), group._redact(outcome.why)
        raise WorkerLost(
            message(
                f"{group.where(rank)} of {group.name!r} died in {self.method}",
                found=why,
                do="make the group anew: cluster.ranks(…)",
            )
            + (f"\nits log ends:\n{tail}" if tail else "\nits log is empty"),
            rank=rank,
            exit=why,
            log=tail,
        )

    def _late(self) -> NoReturn:
        rest = self._rest()
        doing = self._group.stacks(rest)
        for rank in rest:
            self._group.record(self.method, rank, self._sent, time.time(), "late", self.stage)
        self._group.end(f"{self.method} passed its deadline of {self.timeout:g} s")
        stacks = "".join(f"\nrank {rank}:\n{text}" for rank, text in doing.items())
        raise TimeoutError(
            message(
                f"{self.method} of {self._group.name!r}",
                expected=f"an answer in {self.timeout:g} s",
                found=f"none from {', '.join(self._group.where(rank) for rank in rest)}",
                do="the group was ended: make it anew, or give it a longer timeout",
            )
            + stacks
        )

    def _interrupted(self) -> None:
        """The prompt is wanted back: ranks that all stop, or all end, stay; any other mix cannot be gone on with."""
        hung = self._settle()
        kinds = {_kind(one) for one in self._got.values()}
        if hung or len(kinds) > 1 or "lost" in kinds:
            self._group.end(f"{self.method} was interrupted, and the ranks did not all stop")


def _kind(one: Arrival) -> str:
    if isinstance(one.outcome, Gone):
        return "lost"
    stopped = isinstance(one.outcome, Raised) and isinstance(one.outcome.error, Interrupted)
    return "stopped" if stopped else "ended"


def _names(ranks: list[int]) -> str:
    return ", ".join(str(rank) for rank in ranks)
