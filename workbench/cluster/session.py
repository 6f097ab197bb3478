"""`wb.cluster(…)`: a Ray cluster that is started here, or attached to by address and left as it was found.

Ray is imported when a cluster is asked for. A local cluster is always one of its own: another that runs on the
machine, or is named in the environment, is mentioned in the notes and not joined. It listens on loopback, and Ray's
own messages stay out of cells.
"""

from __future__ import annotations

import atexit
import importlib.util
import logging
import os
import secrets
import stat
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench.base.config import require
from workbench.base.distribution import install, require_package
from workbench.base.errors import EngineError, SettingError, check_name, first_line, message
from workbench.cluster import discovery, fitting, placing, ray_internals
from workbench.cluster.fitting import Fit
from workbench.cluster.holding import Session
from workbench.cluster.pools import nodes
from workbench.cluster.ranks import Environment, RayRanks, nsight_options
from workbench.cluster.simulating import simulate
from workbench.cluster.status import ANSWER_SECONDS, ClusterStatus, Logs, Profile, look
from workbench.engines.local_engine.engine import local
from workbench.engines.paired import paired
from workbench.engines.protocol import Closing
from workbench.engines.vllm_server.engine import vllm

# --- starting, attaching, leaving -------------------------------------------------------------------

HEALTH = {"health_check_period_ms": 1000, "health_check_timeout_ms": 2000, "health_check_failure_threshold": 3}
"""Ray's settings for health checks: a lost node is noticed within ten seconds; with Ray's defaults, after over a
minute."""
NOTES = 100
"""Number of notes that are kept, the newest ones."""
NAMESPACE = "workbench"
HEAD = "RAY_AUTH_MODE=token ray start --head"
"""The command that starts a head node; it needs a token, which `ray get-auth-token --generate` makes."""
TOKEN_HOW = "put the cluster's token into RAY_AUTH_TOKEN or ~/.ray/auth_token"


@dataclass
class Connection:
    """A connection to a Ray cluster: its address, Ray's session name, notes for the user, and the local cluster to stop
    at the end.
    """

    address: str
    session: str
    notes: list[str]
    record: discovery.ClusterRecord | None = None
    """The local cluster that this process started and will stop; None where it attached to a running cluster."""


def require_ray() -> None:
    """Raise `EngineError` where Ray is not installed, or was initialised in this process by other code."""
    if importlib.util.find_spec("ray") is None:
        raise EngineError("Ray is not installed", do=f"{install('cluster')}, or use wb.engines.local(…)")
    for package in ("ray", "psutil"):
        require_package(package, "cluster", "a cluster")
    import ray

    if ray.is_initialized():
        what = "Ray is in use in this process, started by other code"
        raise EngineError(what, do="call ray.shutdown(), then wb.cluster(…)")


def start(
    environment: Environment, gpus: int | None, cpus: int | None, store: int | None, dashboard: bool, seconds: float
) -> Connection:
    """Start a local Ray cluster that listens only on loopback and ends with this process.

    `store` is the size of the object store in bytes, `seconds` how long each of Ray's processes may take to start.
    """
    if dashboard:
        _require_dashboard()
    tokens = os.environ.get("RAY_AUTH_MODE", "token").lower() == "token"  # Ray's own default
    if tokens and not os.environ.get("RAY_AUTH_TOKEN_PATH"):
        _ensure_token()
    ray_internals.forget_token()
    notes = [f"{how}; it was not joined: wb.cluster({one!r}) would" for one, how in discovery.known().items()]
    # Ray warns without; a rank without GPUs needs none
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_DISABLE_IMPORT_WARNING", "1")
    size = {"num_cpus": cpus, "num_gpus": gpus, "object_store_memory": store}
    options: dict[str, Any] = {**size, "include_dashboard": dashboard, "_system_config": HEALTH}
    context = _begin(environment, notes, seconds, address="local", **options)
    session = Path(context.address_info["session_dir"]).name
    if not tokens:
        notes.append("RAY_AUTH_MODE is not token: anyone with an account on this machine can run code in this cluster")
    if dashboard:
        notes.append(f"the dashboard is at http://{context.dashboard_url}")
    record = discovery.remember(session, discovery.of_session(session))
    return Connection(context.address_info["gcs_address"], session, notes, record)


def _begin(environment: Environment, notes: list[str], seconds: float, **options: Any) -> Any:
    """Start a cluster, once more where one of Ray's processes ended during the start, which happens on a busy machine."""
    again = False
    while True:
        watch = discovery.StartWatch()
        try:
            return _begun(environment, notes, seconds, watch.look, **options)
        except EngineError as error:
            discovery.end(discovery.half_started(), 0.0)
            if watch.ended and not again:
                again = True
                notes.append(f"{watch.ended}; Ray was started once more")
            elif watch.ended:
                what, expected = "Ray did not start in two attempts: one of its processes ended", "running processes"
                do = "end other work on this machine, then call wb.cluster(…) again; or train without Ray: wb.engines.local(…)"
                raise EngineError(what, expected=expected, found=watch.ended, do=do) from None
            elif "timed out during startup" in str(error):
                do = "end other work on this machine, or allow more time: wb.cluster(…, start_seconds=600)"
                raise EngineError(f"Ray did not start in {seconds:g} s", found=first_line(error, 300), do=do) from None
            else:
                raise


def _begun(environment: Environment, notes: list[str], seconds: float, look: Callable[[], str], **options: Any) -> Any:
    """Start a cluster that listens only on loopback, within `seconds`."""
    with ray_internals.starting_on_loopback(seconds, look):
        return _init("starting a local cluster", environment, notes, dashboard_host="127.0.0.1", **options)


def attach(address: str, environment: Environment, seconds: float) -> Connection:
    """Connect to a running cluster. Raises `EngineError` in about `seconds` where nothing answers or the token is
    wrong.
    """
    target = _resolved(address)
    why = discovery.answers(target.removeprefix("ray://"))
    if why is not None:
        raise EngineError(_nothing(f"nothing answers at {target}", why))
    ray_internals.forget_token()
    _probe(target, seconds / 2)
    notes: list[str] = []
    context = _init(f"attaching to {target}", environment, notes, address=target)
    info: Mapping[str, Any] = getattr(context, "address_info", None) or {}
    if not info:
        notes.append("batches are sent at about 0.1 GB/s over ray://: run the notebook on the cluster for full speed")
    return Connection(target, Path(str(info.get("session_dir", ""))).name, notes)


def leave(link: Connection) -> list[str]:
    """Disconnect, and stop a cluster that was started here; returns a note of processes that had to be killed, or []."""
    import ray

    members = link.record.members() if link.record else []
    ray.shutdown()
    _silence(None)
    late = discovery.end(members)
    if link.record:
        link.record.path.unlink(missing_ok=True)
    return [f"had to kill {', '.join(f'{one.name} {one.pid}' for one in late)}"] if late else []


def _probe(target: str, seconds: float) -> None:
    """Check that a Ray head, or the server of `ray://`, answers at an address and accepts the token.

    `ray.init` would wait for ever for a port that never answers, and over `ray://` for a token that is wrong or not
    sent.
    """
    import grpc
    from ray.core.generated import gcs_service_pb2_grpc, ray_client_pb2, ray_client_pb2_grpc
    from ray.core.generated.gcs_service_pb2 import CheckAliveRequest  # type: ignore[attr-defined]

    def ask(metadata: list[tuple[str, str]]) -> Any:
        with grpc.insecure_channel(target.removeprefix("ray://")) as channel:
            if target.startswith("ray://"):
                ping = ray_client_pb2.ClusterInfoRequest(type=ray_client_pb2.ClusterInfoType.PING)  # type: ignore[attr-defined]
                call = ray_client_pb2_grpc.RayletDriverStub(channel).ClusterInfo.future
                who = [("client_id", "workbench-probe")]
                return call(ping, timeout=seconds, metadata=[*who, *metadata]).code()
            stub = gcs_service_pb2_grpc.NodeInfoGcsServiceStub(channel)
            return stub.CheckAlive.future(CheckAliveRequest(), timeout=seconds, metadata=metadata).code()

    if os.environ.get("RAY_USE_TLS", "0") not in ("", "0"):
        return  # the head answers only who shows a certificate; ray.init does
    code = ask([])
    if code is grpc.StatusCode.UNAUTHENTICATED:
        token = known_token()
        sendable = bool(token) and token.isascii() and token.isprintable()  # type: ignore[union-attr]
        code = ask([("authorization", f"Bearer {token}")]) if sendable else code
        if code is grpc.StatusCode.UNAUTHENTICATED:
            what = "a token that it does not know" if token else "no token here"
            raise EngineError(f"the cluster at {target} requires its authentication token", found=what, do=TOKEN_HOW)
        ray_internals.send_token()
    if code is not grpc.StatusCode.OK:
        kind = "the server of ray://" if target.startswith("ray://") else "a Ray head"
        raise EngineError(_nothing(f"what listens at {target} does not answer as {kind}", code.name))


# --- Ray's own start, in silence ----------------------------------------------------------------


def _init(what: str, environment: Environment, notes: list[str], **options: Any) -> Any:
    """Call `ray.init` without output; whatever it raises becomes one `EngineError` without the values of variables."""
    import ray

    options |= {"namespace": NAMESPACE, "log_to_driver": False, "logging_level": logging.ERROR}
    _silence(notes)
    try:
        return ray.init(runtime_env=dict(environment.ray) or None, **options)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is named and freed of secrets
        text = environment.redact(first_line(error, 600))
        token = "auth" in str(error).lower() or "token" in str(error).lower()
        with suppress(Exception):
            ray.shutdown()  # half a connection would be in the way of the next try
        _silence(None)
        raise EngineError(f"{what} failed", found=text, do=TOKEN_HOW if token else None) from None


def _silence(notes: list[str] | None) -> None:
    """Keep Ray's log messages out of cells, and add to `notes` what Ray would print there (such as a lost node); None
    ends this.
    """
    if notes is None:
        ray_internals.print_to(None)
        return

    def note(data: Mapping[str, Any]) -> None:
        for line in data.get("lines", ()):
            first = str(line).strip().split("\n")[0][:300]
            if first and first not in notes:
                notes.append(first)
                del notes[:-NOTES]

    ray_internals.print_to(note)


def _require_dashboard() -> None:
    """Raise `SettingError` where packages of Ray's dashboard are missing; Ray would start one without a page and say
    nothing.
    """
    lacking = [name for name in ("aiohttp", "aiohttp_cors", "colorful", "opencensus", "prometheus_client")
               if name not in sys.modules and importlib.util.find_spec(name) is None]  # fmt: skip
    if lacking:
        expected, found = "the packages of Ray's dashboard", f"no {', '.join(lacking)}"
        do = "pip install 'ray[default]', or leave dashboard=True out: cluster.status() shows the same"
        raise SettingError("dashboard=True", expected=expected, found=found, do=do)


def _resolved(address: str) -> str:
    """Return `host:port` or `ray://…` for an address; `auto` is resolved. Raises `EngineError` where `auto` is not
    exactly one cluster.
    """
    if address != "auto":
        return address
    if os.environ.get("RAY_ADDRESS") not in (None, "", "auto", "local"):
        return os.environ["RAY_ADDRESS"]
    live = sorted(one for one in discovery.known() if discovery.answers(one, 1.0) is None)
    if not live:
        raise EngineError(_nothing("no running Ray cluster was found on this machine", None))
    if len(live) > 1:
        raise EngineError(_nothing(f"'auto' cannot choose among {len(live)} clusters on this machine", ", ".join(live)))
    return live[0]


def _nothing(what: str, why: str | None) -> str:
    seen = [why] if why else []
    for where, one in discovery.pointed_at().items():
        if discovery.answers(one, 1.0):
            seen.append(f"{where} names {one}, where nothing answers")
    if running := ray_internals.heads_here():
        seen.append(f"Ray clusters running here: {', '.join(running)}")
    do = f"give the head node's host:port, start a cluster with `{HEAD}`, or call wb.cluster() for a local one"
    return message(what, found="; ".join(seen) or None, do=do)


# --- tokens ---------------------------------------------------------------------------------------


def known_token() -> str | None:
    """Return the token that Ray would use, from `RAY_AUTH_TOKEN` or its token file; None where there is none."""
    if os.environ.get("RAY_AUTH_TOKEN"):
        return os.environ["RAY_AUTH_TOKEN"]
    path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or _token_path())
    with suppress(OSError):
        return path.read_text(encoding="utf-8").strip()
    return None


def _ensure_token() -> None:
    """Write a token file where there is none, readable only by its owner; an existing one that others can read is
    closed to them.

    The file appears completely or not at all, because another kernel may start a cluster at the same time.
    """
    path = _token_path()
    if known_token() is None:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=".auth_token-") as file:  # for its owner alone
            file.write(secrets.token_hex(32))
            file.flush()
            os.fsync(file.fileno())
            with suppress(FileExistsError):
                os.link(file.name, path)
    with suppress(OSError):
        if path.stat().st_uid == os.getuid():
            path.chmod(stat.S_IRUSR | stat.S_IWUSR)


def _token_path() -> Path:
    return Path.home() / ".ray" / "auth_token"


# --- the one that is open ----------------------------------------------------------------------

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
    request = (address, gpus, cpus, str(runtime_env), object_store_memory, dashboard)
    if _open is not None and not _open.closed:
        if _open.request == request:
            return _open
        raise EngineError("a cluster is open in this process already", found=_open.title, do="close() it first")
    environment = Environment.of(runtime_env)
    require_ray()
    notes = discovery.clear_left()
    if address is None:
        if "nsight" in environment.ray:
            nsight_options(environment.ray["nsight"])
        link = start(environment, gpus, cpus, object_store_memory, dashboard, start_seconds)
    else:
        if dashboard or (gpus, cpus, object_store_memory) != (None, None, None):
            what, expected = "gpus, cpus, object_store_memory or dashboard", "a cluster that is started here"
            raise SettingError(what, expected=expected, found=f"address {address!r}", do="leave them or address= out")
        link = attach(address, environment, connect_timeout)
    link.notes[:0] = notes
    _open = Cluster(link, environment, request)
    return _open


def opened() -> Cluster | None:
    """Return the cluster that is open in this process; None where there is none."""
    return _open if _open is not None and not _open.closed else None


class Cluster(Session, Closing):
    """A connection to a Ray cluster, with the pools, worker groups and engines made through it. Made by `wb.cluster(…)`."""

    def __init__(self, link: Connection, environment: Environment, request: tuple[Any, ...]) -> None:
        where = f"the local cluster at {link.address}" if link.record else f"the cluster at {link.address}, attached"
        super().__init__(where, environment, link.notes)
        self.link = link
        self.request = request
        self._looking = threading.Lock()
        """Lock that is held while a status is read: one reader at a time, and Ray is not shut down meanwhile."""
        self._unanswered: dict[Any, Any] = {}
        atexit.register(self.close)

    place = placing.place
    serve = placing.serve
    judge = placing.judge
    simulate = staticmethod(simulate)

    def fits(self, model: str | Path | Mapping[str, Any], *, tokens: int, **settings: Any) -> Fit:
        """Measure, without weights, whether a model that `place` would start with these settings fits the memory of
        each process.

        See `fitting.fits` for the arguments; the result is displayed as a table.
        """
        self.check()
        return fitting.fits(model, tokens=tokens, nodes=nodes(), **settings)

    # --- looking --------------------------------------------------------------------------------

    def status(self) -> ClusterStatus:
        """Return nodes, pools, workers and unanswered calls; displayed as a table, which in a cell updates itself."""
        with self._looking:
            self.check()
            return look(self, self._unanswered, self.status)

    def logs(self, group: RayRanks | str, rank: int | None = None, lines: int = 100) -> Logs:
        """Return the last `lines` of the output of a group's worker `rank`, dead or alive, or (`rank=None`) of all its
        workers.
        """
        group = self._group(group)
        there = range(len(group.facts))
        require(rank is None or rank in there, "argument rank", expected=f"0 to {len(there) - 1}, or None", found=rank)
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
            self._unanswered.clear()
            self._looking.release()
        atexit.unregister(self.close)
        try:
            for group in list(self.groups):
                group.close()
            self.release()
        finally:
            self.notes += leave(self.link)
            if _open is self:
                _open = None


def open_engine(
    model: str | Path, engine: str = "local", sampler: str = "local", *, address: str | None = None, **settings: Any
) -> Any:
    """Open an engine by the names of its trainer and its sampler, for notebooks that have these as parameters.

    `engine` is where the policy is trained: `local` (this process) or `ray` (FSDP ranks on the cluster at `address`;
    None: the open cluster, or one that is started here). `sampler` is what samples: `local` (transformers) or `vllm`.
    `settings` are `LocalSettings`. Raises `SettingError` for another name, and what the engines raise.
    """
    for what, word, known in (("engine", engine, ("local", "ray")), ("sampler", sampler, ("local", "vllm"))):
        check_name(what, word, known)
    if engine == "ray":
        there = _open if address is None and _open is not None and not _open.closed else connect(address)
        return there.place(model, sampler=sampler, **settings)
    here = local(model, **settings)
    return paired(here, vllm(model)) if sampler == "vllm" else here
