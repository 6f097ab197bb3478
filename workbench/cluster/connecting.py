"""Starting a local cluster, attaching to a running one, and leaving either: quiet, on loopback, with nothing joined by accident."""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from workbench.cluster import found, tokens
from workbench.cluster.environment import Environment
from workbench.errors import EngineError, SettingError, first_line, message

HEALTH = {"health_check_period_ms": 1000, "health_check_timeout_ms": 2000, "health_check_failure_threshold": 3}
"""A lost node is seen within ten seconds; Ray's own settings take over a minute."""
NOTES = 100
"""That are kept."""
NAMESPACE = "workbench"
HEAD = "RAY_AUTH_MODE=token ray start --head"
"""Without a token this refuses to start; `ray get-auth-token --generate` makes one."""


@dataclass
class Link:
    """A connection, and what it takes to end it."""

    started: bool
    """Whether the cluster is ours to stop."""
    address: str
    session: str
    processes: tuple[found.Process, ...] = ()
    record: Path | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def title(self) -> str:
        """In a line."""
        return f"the local cluster at {self.address}" if self.started else f"the cluster at {self.address}, attached"


def require_ray() -> None:
    """Raises `EngineError` naming what to install where Ray is not, or is in use already."""
    if importlib.util.find_spec("ray") is None:
        raise EngineError(
            message("Ray is not installed", do="pip install 'ray>=2.60,<2.61', or keep to wb.engines.local(…)")
        )
    import ray

    if ray.is_initialized():
        raise EngineError(
            message(
                "Ray is in use in this process, started by somebody else", do="ray.shutdown() first, then wb.cluster(…)"
            )
        )


def start(environment: Environment, gpus: int | None, cpus: int | None, store: int | None, dashboard: bool) -> Link:
    """A cluster of this process's own on this machine: it listens on loopback alone, and ends with the process."""
    if dashboard:
        _require_dashboard()
    tokens.ensure()
    tokens.forget()
    notes = [f"a cluster runs at {one}; it was not joined: wb.cluster({one!r}) would" for one in found.running()]
    for where, one in found.pointed_at().items():
        if not any(one in note for note in notes):
            notes.append(f"{where} names {one}; it was not joined: wb.cluster({one!r}) would")
    os.environ.setdefault(
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0"
    )  # Ray warns without; a rank without GPUs needs none
    os.environ.setdefault("RAY_DISABLE_IMPORT_WARNING", "1")
    options: dict[str, Any] = {
        "num_cpus": cpus,
        "num_gpus": gpus,
        "object_store_memory": store,
        "_system_config": HEALTH,
    }
    context = _begin(environment, include_dashboard=dashboard, **options)
    session = Path(context.address_info["session_dir"]).name
    _listen(notes)
    members = tuple(found.of_session(session))
    if not tokens.asked():
        notes.append("RAY_AUTH_MODE is not token: whoever has an account on this machine can run code in this cluster")
    if dashboard:
        notes.append(f"the dashboard is at http://{context.dashboard_url}")
    return Link(True, context.address_info["gcs_address"], session, members, found.remember(session, members), notes)


def _begin(environment: Environment, **options: Any) -> Any:
    """`ray.init`, and once more where the machine was too busy: Ray gives its own processes thirty seconds."""
    import ray

    for last in (False, True):
        try:
            with _quiet(), _named("starting a local cluster", environment), _loopback():
                return ray.init(address="local", dashboard_host="127.0.0.1", **_common(environment), **options)
        except EngineError as error:
            for one in found.half_started():
                one.kill()
            if last or "timed out during startup" not in str(error):
                raise
    return None


def attach(address: str, environment: Environment, seconds: float) -> Link:
    """Join a running cluster. Raises `EngineError` in about `seconds` where nothing answers or the token is wrong."""
    import ray

    target = _resolved(address)
    why = found.answers(target.removeprefix("ray://"))
    if why is not None:
        raise EngineError(_nothing(f"nothing answers at {target}", why))
    tokens.forget()
    if not target.startswith("ray://"):
        _probe(target, seconds / 2)
    with _quiet(), _named(f"attaching to {target}", environment):
        context = ray.init(address=target, **_common(environment))
    info: Mapping[str, Any] = getattr(context, "address_info", None) or {}
    notes = (
        []
        if info
        else ["over ray:// batches travel at a tenth of a gigabyte a second: run the notebook on the cluster"]
    )
    _listen(notes)
    return Link(False, target, Path(str(info.get("session_dir", ""))).name, notes=notes)


def leave(link: Link) -> list[str]:
    """Disconnect; where the cluster is ours see that every process of it ends. What had to be killed, in sentences."""
    import ray

    members: tuple[found.Process, ...] = ()
    if link.started:
        members = tuple({*link.processes, *found.of_session(link.session)})
    with _quiet():
        ray.shutdown()
    _listen(None)
    if not link.started:
        return []
    late = found.end(members)
    if link.record is not None:
        link.record.unlink(missing_ok=True)
    return [f"had to end {found.shown(late)}"] if late else []


def _probe(target: str, seconds: float) -> None:
    """Ask a head whether it is one: `ray.init` waits for ever for a port that listens and says nothing."""
    import grpc
    from ray.core.generated import gcs_service_pb2_grpc
    from ray.core.generated.gcs_service_pb2 import CheckAliveRequest  # type: ignore[attr-defined]

    def ask(metadata: list[tuple[str, str]]) -> Any:
        with grpc.insecure_channel(target) as channel:
            stub = gcs_service_pb2_grpc.NodeInfoGcsServiceStub(channel)
            try:
                stub.CheckAlive(CheckAliveRequest(), timeout=seconds, metadata=metadata)
            except grpc.RpcError as error:
                return error.code()
            return None

    if os.environ.get("RAY_USE_TLS", "0") not in ("", "0"):
        return  # the head answers those only that show a certificate; ray.init does
    said = ask([])
    if said is grpc.StatusCode.UNAUTHENTICATED:
        token = tokens.known()
        said = ask([("authorization", f"Bearer {token}")]) if token else said
        if said is grpc.StatusCode.UNAUTHENTICATED:
            what = "a token that it does not know" if token else "no token here"
            raise EngineError(message(f"the cluster at {target} wants its token", found=what, do=tokens.HOW))
        tokens.send()
    if said is not None:
        raise EngineError(_nothing(f"what listens at {target} does not answer as a Ray head", said.name))


# --- how ------------------------------------------------------------------------------------------


def _common(environment: Environment) -> dict[str, Any]:
    return {
        "namespace": NAMESPACE,
        "log_to_driver": False,
        "logging_level": logging.ERROR,
        "runtime_env": dict(environment.ray) or None,
    }


@contextmanager
def _loopback() -> Iterator[None]:
    """Ray listens where this machine alone reaches it, as it does by itself on macOS and Windows; on Linux it has no setting."""
    from ray._private import ray_constants

    kept = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = kept


@contextmanager
def _quiet() -> Iterator[None]:
    """Ray's own talk stays out of the cell."""
    log = logging.getLogger("ray")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)


def _require_dashboard() -> None:
    """Without its packages Ray starts a dashboard that has no page, and says nothing."""
    lacking = [name for name in ("aiohttp", "aiohttp_cors", "colorful", "opencensus", "prometheus_client")
               if name not in sys.modules and importlib.util.find_spec(name) is None]  # fmt: skip
    if lacking:
        raise SettingError(
            message(
                "dashboard=True",
                expected="the packages of Ray's dashboard",
                found=f"no {', '.join(lacking)}",
                do="pip install 'ray[default]>=2.60,<2.61', or leave it out: cluster.status() shows the same",
            )
        )


def _listen(notes: list[str] | None) -> None:
    """What Ray would print into whichever cell runs, a lost node say, becomes a note; None: printed again."""
    from ray._private import worker

    def note(data: Mapping[str, Any], **_: Any) -> None:
        into = notes if notes is not None else []
        for said in data.get("lines", ()):
            first = str(said).strip().split("\n")[0][:300]
            if first and first not in into:
                into.append(first)
                del into[:-NOTES]

    kept = getattr(worker, "_workbench_printed", worker.print_to_stdstream)
    vars(worker)["_workbench_printed"] = kept
    vars(worker)["print_to_stdstream"] = note if notes is not None else kept


@contextmanager
def _named(what: str, environment: Environment) -> Iterator[None]:
    """Whatever Ray raises becomes one error of ours, without the values of variables."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - whatever it is, it is named and freed of secrets
        import ray

        text = environment.redact(first_line(error, 600))
        token = "auth" in str(error).lower() or "token" in str(error).lower()
        with suppress(Exception):
            ray.shutdown()  # half a connection would be in the way of the next try
        raise EngineError(message(f"{what} failed", found=text, do=tokens.HOW if token else None)) from None


def _resolved(address: str) -> str:
    """`host:port` or `ray://…`. Raises `EngineError` saying what was found where `auto` is not one cluster."""
    if address != "auto":
        return address
    if os.environ.get("RAY_ADDRESS") not in (None, "", "auto", "local"):
        return os.environ["RAY_ADDRESS"]
    live = {one for one in (*found.pointed_at().values(), *found.running()) if found.answers(one, 1.0) is None}
    if len(live) != 1:
        what = (
            f"{len(live)} clusters run here, auto cannot choose"
            if live
            else "no running cluster was found on this machine"
        )
        raise EngineError(_nothing(what, ", ".join(sorted(live)) or None))
    return live.pop()


def _nothing(what: str, why: str | None) -> str:
    dead = [
        f"{where} names {one}, where nothing answers"
        for where, one in found.pointed_at().items()
        if found.answers(one, 1.0)
    ]
    running = found.running()
    seen = [*([why] if why else []), *dead, *([f"running here: {', '.join(running)}"] if running else [])]
    return message(
        what,
        found="; ".join(seen) or None,
        do=f"give the head's host:port, start one with `{HEAD}`, or wb.cluster() for one of your own",
    )
