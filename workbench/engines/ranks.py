"""What a group of workers is to an engine that is spread over them: one call on all ranks at once.

Who starts the workers is another's business: `engines.processes` on this machine, `cluster` through Ray. Each worker holds
one object, made on its rank by `factory(rank, size, **settings)`, a function that can be imported there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class Ranks(Protocol):
    """Workers of one group, each holding one object made on its rank."""

    size: int
    """How many."""

    def call(
        self, method: str, *shared: Any, each: Sequence[tuple[Any, ...]] | None = None, timeout: float | None = None
    ) -> list[Any]:
        """`getattr(object, method)(*each[rank], *shared)` on all ranks at once; one result a rank, in order.

        While it waits it looks at `background.check()`: an interrupt goes up in every worker (`background.interrupt()`
        there), which lets go at its next safe place. Raises `WorkerLost` where a worker dies, `EngineError` with the
        rank's traceback where one raises (an error of ours keeps its type), `TimeoutError` past `timeout` seconds.
        After a lost worker or a time-out the whole group has ended.
        """

    def close(self) -> None:
        """End the workers. More than once is fine."""
