"""Starts a local Ray cluster, attaches to a running one, and leaves either: quietly, on loopback, nothing joined by accident."""

from __future__ import annotations

import importlib.util
import logging
import os
import secrets
import stat
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench.base.distribution import install, require_package
from workbench.base.errors import EngineError, SettingError, first_line, message
from workbench.cluster import discovery
from workbench.cluster.environment import Environment

HEALTH = {"health_check_period_ms": 1000, "health_check_timeout_ms": 2000, "health_check_failure_threshold": 3}
"""A lost node is seen within ten seconds; Ray's own settings take over a minute."""
NOTES = 100
"""The newest so many are kept."""
NAMESPACE = "workbench"
HEAD = "RAY_AUTH_MODE=token ray start --head"
"""Without a token this refuses to start; `ray get-auth-token --generate` makes one."""
TOKEN_HOW = "put the cluster's token into RAY_AUTH_TOKEN or ~/.ray/auth_token"


@dataclass
class Link:
    """A connection to a Ray cluster: its address, Ray's session name, notes for the user, and what to stop at the end."""

    address: str
    session: str
    notes: list[str]
    record: discovery.Record | None = None
    """The local cluster that this process started, and stops; None where it attached to a running one."""


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
) -> Link:
    """Start a local Ray cluster that listens on loopback only and ends with this process; `store`: object store bytes; `seconds`:
    that each of Ray's own processes may take to come up."""
    if dashboard:
        _require_dashboard()
    tokens = os.environ.get("RAY_AUTH_MODE", "token").lower() == "token"  # Ray's own default
    if tokens and not os.environ.get("RAY_AUTH_TOKEN_PATH"):
        _ensure_token()
    _forget_token()
    notes = [f"{how}; it was not joined: wb.cluster({one!r}) would" for one, how in discovery.known().items()]
    # Ray warns without; a rank without GPUs needs none
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_DISABLE_IMPORT_WARNING", "1")
    size = {"num_cpus": cpus, "num_gpus": gpus, "object_store_memory": store}
    options: dict[str, Any] = {**size, "include_dashboard": dashboard, "_system_config": HEALTH}
    context = _begin(environment, notes, seconds, address="local", **options)
    session = Path(context.address_info["session_dir"]).name
    if not tokens:
        notes.append("RAY_AUTH_MODE is not token: whoever has an account on this machine can run code in this cluster")
    if dashboard:
        notes.append(f"the dashboard is at http://{context.dashboard_url}")
    record = discovery.remember(session, discovery.of_session(session))
    return Link(context.address_info["gcs_address"], session, notes, record)


def _begin(environment: Environment, notes: list[str], seconds: float, **options: Any) -> Any:
    """A cluster that is begun once more where one of Ray's own processes ended while it came up, which it does on a busy machine."""
    again = False
    while True:
        watch = discovery.Watch()
        try:
            return _begun(environment, notes, seconds, watch, **options)
        except EngineError as error:
            discovery.end(discovery.half_started(), 0.0)
            if watch.ended and not again:
                again = True
                notes.append(f"{watch.ended}; Ray was started once more")
            elif watch.ended:
                what, expected = "Ray did not start: a process of its own ended, twice", "processes that stay"
                do = "end what keeps this machine busy, then call wb.cluster(…) again; or train without Ray: wb.engines.local(…)"
                raise EngineError(what, expected=expected, found=watch.ended, do=do) from None
            elif "timed out during startup" in str(error):
                do = "end what keeps this machine busy, or give it longer: wb.cluster(…, start_seconds=600)"
                raise EngineError(f"Ray did not start in {seconds:g} s", found=first_line(error, 300), do=do) from None
            else:
                raise


def _begun(environment: Environment, notes: list[str], seconds: float, watch: discovery.Watch, **options: Any) -> Any:
    """A cluster that listens where this machine alone reaches it, as Ray's do by themselves on macOS and Windows; on Linux there
    is no setting. Nor is there one for the half minute that Ray gives its own node: we ask for that node as long as `seconds`,
    and while Ray's processes live."""
    from ray._private import ray_constants, services

    asked: Any = services.get_node
    until = time.monotonic() + seconds

    def get_node(*given: Any) -> Any:
        while True:
            try:
                return asked(*given)
            except RuntimeError:
                if ended := watch.look():
                    raise ProcessLookupError(ended) from None  # Ray asks again after a RuntimeError
                if time.monotonic() > until:
                    raise
            time.sleep(0.1)

    kept, ray_constants.ENABLE_RAY_CLUSTER = ray_constants.ENABLE_RAY_CLUSTER, False
    waits = os.environ.get(_GCS_WAIT)
    os.environ[_GCS_WAIT] = waits or str(max(int(seconds), 1))
    services.get_node = get_node
    try:
        return _init("starting a local cluster", environment, notes, dashboard_host="127.0.0.1", **options)
    finally:
        services.get_node = asked
        ray_constants.ENABLE_RAY_CLUSTER = kept
        if not waits:
            del os.environ[_GCS_WAIT]


_GCS_WAIT = "RAY_gcs_server_port_wait_time_s"


def attach(address: str, environment: Environment, seconds: float) -> Link:
    """Connect to a running cluster. Raises `EngineError` in about `seconds` where nothing answers or the token is wrong."""
    target = _resolved(address)
    why = discovery.answers(target.removeprefix("ray://"))
    if why is not None:
        raise EngineError(_nothing(f"nothing answers at {target}", why))
    _forget_token()
    _probe(target, seconds / 2)
    notes: list[str] = []
    context = _init(f"attaching to {target}", environment, notes, address=target)
    info: Mapping[str, Any] = getattr(context, "address_info", None) or {}
    if not info:
        notes.append("over ray:// batches travel at a tenth of a gigabyte a second: run the notebook on the cluster")
    return Link(target, Path(str(info.get("session_dir", ""))).name, notes)


def leave(link: Link) -> list[str]:
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
    """Ask a head, or the server of `ray://`, whether it is one: `ray.init` would wait for ever for a port that listens and
    never answers, and over `ray://` for a token that is wrong or not sent."""
    import grpc
    from ray._private.authentication.authentication_token_setup import _enable_token_auth
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
    said = ask([])
    if said is grpc.StatusCode.UNAUTHENTICATED:
        token = known_token()
        sendable = bool(token) and token.isascii() and token.isprintable()  # type: ignore[union-attr]
        said = ask([("authorization", f"Bearer {token}")]) if sendable else said
        if said is grpc.StatusCode.UNAUTHENTICATED:
            what = "a token that it does not know" if token else "no token here"
            raise EngineError(f"the cluster at {target} requires its authentication token", found=what, do=TOKEN_HOW)
        _enable_token_auth()  # Ray sends its token by itself only to a cluster that it starts
    if said is not grpc.StatusCode.OK:
        kind = "the server of ray://" if target.startswith("ray://") else "a Ray head"
        raise EngineError(_nothing(f"what listens at {target} does not answer as {kind}", said.name))


# --- how ------------------------------------------------------------------------------------------


def _init(what: str, environment: Environment, notes: list[str], **options: Any) -> Any:
    """`ray.init` in silence; whatever it raises becomes one error of ours, without the values of variables."""
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
    """Keep Ray's log messages out of cells, and make notes of what it would print there (that a node was lost); None: no more."""
    from ray._private import worker

    log, kept = logging.getLogger("ray"), vars(worker)
    printed, level = kept.pop("_workbench_found", (worker.print_to_stdstream, log.level))
    if notes is None:
        kept["print_to_stdstream"] = printed
        log.setLevel(level)
        return

    def note(data: Mapping[str, Any], **_: Any) -> None:
        for said in data.get("lines", ()):
            first = str(said).strip().split("\n")[0][:300]
            if first and first not in notes:
                notes.append(first)
                del notes[:-NOTES]

    kept |= {"_workbench_found": (printed, level), "print_to_stdstream": note}
    log.setLevel(logging.ERROR)


def _require_dashboard() -> None:
    """Without its packages Ray starts a dashboard that has no page, and says nothing."""
    lacking = [name for name in ("aiohttp", "aiohttp_cors", "colorful", "opencensus", "prometheus_client")
               if name not in sys.modules and importlib.util.find_spec(name) is None]  # fmt: skip
    if lacking:
        expected, found = "the packages of Ray's dashboard", f"no {', '.join(lacking)}"
        do = "pip install 'ray[default]', or leave dashboard=True out: cluster.status() shows the same"
        raise SettingError("dashboard=True", expected=expected, found=found, do=do)


def _resolved(address: str) -> str:
    """`host:port` or `ray://…`. Raises `EngineError` saying what was found where `auto` is not exactly one cluster."""
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
    if running := discovery.running():
        seen.append(f"Ray clusters running here: {', '.join(running)}")
    do = f"give the head node's host:port, start a cluster with `{HEAD}`, or call wb.cluster() for a local one"
    return message(what, found="; ".join(seen) or None, do=do)


# --- tokens ---------------------------------------------------------------------------------------


def known_token() -> str | None:
    """The token that Ray would use, from `RAY_AUTH_TOKEN` or else its token file; None where there is none."""
    if os.environ.get("RAY_AUTH_TOKEN"):
        return os.environ["RAY_AUTH_TOKEN"]
    path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or _token_path())
    with suppress(OSError):
        return path.read_text(encoding="utf-8").strip()
    return None


def _ensure_token() -> None:
    """Write a token where there is none yet. Ray would write it readable for all; one that is so is closed to others.

    It appears under its name whole or not at all: another kernel may be starting beside this one.
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


def _forget_token() -> None:
    """Ray reads its token once a process; the next cluster may have another."""
    from ray._raylet import AuthenticationTokenLoader  # type: ignore[attr-defined] # compiled

    AuthenticationTokenLoader.instance().reset_cache()


def _token_path() -> Path:
    return Path.home() / ".ray" / "auth_token"
