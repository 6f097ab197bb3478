"""Ray's token: where it is looked for, and a file for it that is its owner's alone from the moment it is there."""

from __future__ import annotations

import os
import secrets
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

HOW = "put the cluster's token into RAY_AUTH_TOKEN or ~/.ray/auth_token"


def known() -> str | None:
    """The token that Ray would find, in its order."""
    if os.environ.get("RAY_AUTH_TOKEN"):
        return os.environ["RAY_AUTH_TOKEN"]
    path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or _default())
    with suppress(OSError):
        return path.read_text(encoding="utf-8").strip()
    return None


def asked() -> bool:
    """Whether clusters that are started here will ask for a token: Ray's own way, unless the environment says no."""
    return os.environ.get("RAY_AUTH_MODE", "token").lower() == "token"


def ensure() -> None:
    """A token where there is none yet. Ray would write it itself, readable for all; one that lies so is closed.

    It appears under its name whole or not at all: another kernel may be starting beside this one.
    """
    path = _default()
    if not asked() or os.environ.get("RAY_AUTH_TOKEN_PATH"):
        return
    if known() is None:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor, part = tempfile.mkstemp(dir=path.parent, prefix=".auth_token-")  # for its owner alone
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(secrets.token_hex(32))
                file.flush()
                os.fsync(file.fileno())
            with suppress(FileExistsError):
                os.link(part, path)
        finally:
            os.unlink(part)
    with suppress(OSError):
        if path.stat().st_uid == os.getuid():
            path.chmod(stat.S_IRUSR | stat.S_IWUSR)


def forget() -> None:
    """Ray reads its token once a process; the next cluster may have another."""
    from ray._raylet import AuthenticationTokenLoader  # type: ignore[attr-defined] # compiled

    AuthenticationTokenLoader.instance().reset_cache()


def send() -> None:
    """Ray sends its token by itself only to a cluster that it starts."""
    from ray._private.authentication.authentication_token_setup import _enable_token_auth

    _enable_token_auth()


def _default() -> Path:
    return Path.home() / ".ray" / "auth_token"
