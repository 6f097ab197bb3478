"""`wb.cluster(…)`: a Ray cluster that is started here, or attached to by address and left as it was found.

Ray is imported when a cluster is asked for. A local cluster is always one of its own: another that runs on the machine, or is
named in the environment, is mentioned in the notes and not joined.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from workbench.base.config import require
from workbench.base.errors import EngineError, SettingError, unknown
from workbench.cluster import connecting, discovery, fitting, placing
from workbench.cluster.environment import Environment, nsight_options
from workbench.cluster.fitting import Fit
from workbench.cluster.holding import Session
from workbench.cluster.pools import nodes
from workbench.cluster.profiling import Profile
from workbench.cluster.ranks import RayRanks
from workbench.cluster.simulating import simulate
from workbench.cluster.status import ANSWER_SECONDS, Logs, Status, look
from workbench.engines.local_engine.engine import local
from workbench.engines.paired import paired
from workbench.engines.protocol import Closing
from workbench.engines.vllm_server.engine import vllm

_open: Cluster | None = None


def connect(
    address: str | None = None,
    *,
    gpus: int | None = None,
    cpus: int | None = None,
    runtime_env: str | Path | Mapping[str, Any] | None = None,
    object_store_memory: int | None = None,
    dashboard: bool = False,
    connect_timeout: float = 20.0,
    start_seconds: float = 120.0,
) -> Cluster:
    """Start a Ray cluster on this machine (`address=None`), or attach to one: `"auto"`, `"host:port"` or `"ray://…"`.

    `gpus`, `cpus`, `object_store_memory` (bytes) and `dashboard` (on loopback) are for a cluster that is started; None: what
    the machine has. `runtime_env` is a dict or a yaml file; its `env_vars` reach the workers, never a log, a repr or an error.
    `connect_timeout` is in seconds, and so is `start_seconds`, which Ray's own processes may take to come up. The same call
    again, in a cell that is run twice, returns the same cluster. Processes that
    a killed kernel left are ended first.

    Raises `EngineError` where nothing answers (saying what was found instead), where Ray is not installed, or where another
    cluster is open in this process; `SettingError` for settings that cannot work.

    Example:
        >>> with wb.cluster(gpus=8) as c:  # doctest: +SKIP
        ...     engine = c.place("my-7b", sampler="vllm", lr=1e-6)
    """
    global _open
    asked = (address, gpus, cpus, str(runtime_env), object_store_memory, dashboard)
    if _open is not None and not _open.closed:
        if _open.asked == asked:
            return _open
        raise EngineError("a cluster is open in this process already", found=_open.title, do="close() it first")
    environment = Environment.of(runtime_env)
    connecting.require_ray()
    notes = discovery.clear_left()
    if address is None:
        if "nsight" in environment.ray:
            nsight_options(environment.ray["nsight"])
        link = connecting.start(environment, gpus, cpus, object_store_memory, dashboard, start_seconds)
    else:
        if dashboard or (gpus, cpus, object_store_memory) != (None, None, None):
            what, expected = "gpus, cpus, object_store_memory or dashboard", "a cluster that is started here"
            raise SettingError(what, expected=expected, found=f"address {address!r}", do="leave them or address= out")
        link = connecting.attach(address, environment, connect_timeout)
    link.notes[:0] = notes
    _open = Cluster(link, environment, asked)
    return _open


def opened() -> Cluster | None:
    """The cluster that is open in this process."""
    return _open if _open is not None and not _open.closed else None


class Cluster(Session, Closing):
    """A connection to a Ray cluster, with the pools, worker groups and engines made through it. Made by `wb.cluster(…)`."""

    def __init__(self, link: connecting.Link, environment: Environment, asked: tuple[Any, ...]) -> None:
        where = f"the local cluster at {link.address}" if link.record else f"the cluster at {link.address}, attached"
        super().__init__(where, environment, link.notes)
        self.link = link
        self.asked = asked
        self._looking = threading.Lock()
        """Held while a status is made: one at a time, and Ray does not shut down meanwhile."""
        self._asked: dict[Any, Any] = {}
        atexit.register(self.close)

    place = placing.place
    serve = placing.serve
    judge = placing.judge
    simulate = staticmethod(simulate)

    def fits(self, model: str | Path | Mapping[str, Any], *, tokens: int, **settings: Any) -> Fit:
        """Measure, without its weights, whether a model that `place` would start with these settings fits the memory of each
        process, as a table; see `fitting.fits`."""
        self.check()
        return fitting.fits(model, tokens=tokens, nodes=nodes(), **settings)

    # --- looking --------------------------------------------------------------------------------

    def status(self) -> Status:
        """Nodes, pools, workers and unanswered calls, as a table; in a cell it updates itself while the cluster works."""
        with self._looking:
            self.check()
            return look(self, self._asked, self.status)

    def logs(self, group: RayRanks | str, rank: int | None = None, lines: int = 100) -> Logs:
        """The last `lines` of the output of a group's worker `rank`, dead or alive, or (`rank=None`) of all its workers."""
        group = self._group(group)
        there = range(len(group.facts))
        require(rank is None or rank in there, "rank", expected=f"0 to {len(there) - 1}, or None", found=rank)
        ranks = there if rank is None else [rank]
        return Logs.of([(group.where(one), group.logs(one, lines)) for one in ranks])

    def profile(self, group: RayRanks | str, path: str | Path, *, steps: Sequence[int] = ()) -> Profile:
        """Record a group with torch's profiler, one Chrome trace per rank in `path`: `with c.profile("actor", "traces"): …`,
        or for chosen steps of a job `wb.train(…, observers=[c.profile("actor", "traces", steps=(3, 4))])`."""
        self.check()
        name = self._group(group).name
        return Profile(lambda: self._group(name), path, steps)  # by name: a group that was lost is made anew under it

    def _group(self, group: RayRanks | str) -> RayRanks:
        if not isinstance(group, str):
            return group
        known = {one.name: one for one in self.groups}
        if group not in known:
            raise SettingError(f"no group {group!r}", expected=f"one of {', '.join(known) or '(none)'}")
        return known[group]

    # --- the end --------------------------------------------------------------------------------

    def close(self) -> None:
        """End the groups and pools of this session, and the cluster where it was started here. Closing twice is fine."""
        global _open
        if self.closed:
            return
        self.closed = True
        if self._looking.acquire(timeout=10 * ANSWER_SECONDS):
            self._asked.clear()
            self._looking.release()
        atexit.unregister(self.close)
        try:
            for group in list(self.groups):
                group.close()
            self.release()
        finally:
            self.notes += connecting.leave(self.link)
            if _open is self:
                _open = None


def open_engine(
    model: str | Path, engine: str = "local", sampler: str = "local", *, address: str | None = None, **settings: Any
) -> Any:
    """Open an engine by the names of its trainer and its sampler, for notebooks that have these as parameters.

    `engine` is where the policy is trained: `local` (this process) or `ray` (FSDP ranks on the cluster at `address`; None: the
    one that is open, or one that is started here). `sampler` is what samples: `local` (transformers) or `vllm`. `settings` are
    `LocalSettings`. Raises `SettingError` for another name, and what the engines raise.
    """
    for what, word, known in (("engine", engine, ("local", "ray")), ("sampler", sampler, ("local", "vllm"))):
        if word not in known:
            raise SettingError(unknown(what, word, known))
    if engine == "ray":
        there = _open if address is None and _open is not None and not _open.closed else connect(address)
        return there.place(model, sampler=sampler, **settings)
    here = local(model, **settings)
    return paired(here, vllm(model)) if sampler == "vllm" else here
