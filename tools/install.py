"""Install into this Python's environment with uv, under pip's own settings: one resolve, parallel downloads.

    .venv/bin/python tools/install.py --constraint requirements.lock --editable .

The arguments are those of `pip install`. uv does not read pip's settings, so they are taken from `pip config list` and handed
over: indexes, find-links, constraints, certificates. Where pip has a setting that uv has no option for, where uv cannot
be installed, or where uv fails, pip installs; that takes a few times as long and gives the same packages.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

LOCK = Path(__file__).parents[1] / "requirements.lock"
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")
LISTS = {
    "constraint": "--constraint",
    "extra-index-url": "--extra-index-url",
    "find-links": "--find-links",
    "trusted-host": "--allow-insecure-host",
    "no-binary": "--no-binary",
    "only-binary": "--only-binary",
}
"""pip's settings of several values, and uv's option for each value."""
FLAGS = {
    "no-index": "--no-index",
    "pre": "--prerelease=allow",
    "require-hashes": "--require-hashes",
    "no-cache-dir": "--no-cache",
}
VARIABLES = {
    "cert": "SSL_CERT_FILE",
    "timeout": "UV_HTTP_TIMEOUT",
    "default-timeout": "UV_HTTP_TIMEOUT",
    "proxy": "ALL_PROXY",
}
"""pip's settings that uv reads from the process's environment."""
HARMLESS = {
    "break-system-packages", "cache-dir", "compile", "disable-pip-version-check", "no-color", "no-compile", "no-input",
    "no-python-version-warning", "no-warn-conflicts", "no-warn-script-location", "prefer-binary", "progress-bar", "quiet",
    "require-virtualenv", "retries", "root-user-action", "use-feature", "verbose",
}  # fmt: skip
"""pip's settings that do not change what is installed."""


def settings_in(listing: str) -> dict[str, str]:
    """What `pip config list` prints, as `pip install` reads it: [install] over [global], variables over both."""
    found: dict[str, dict[str, str]] = {"global": {}, "install": {}, ":env:": {}}
    for line in listing.splitlines():
        key, equals, value = line.partition("=")
        section, _, name = key.partition(".")
        if equals and section in found:
            found[section][name] = str(ast.literal_eval(value))
    return {**found["global"], **found["install"], **found[":env:"]}


def for_uv(settings: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """(uv's options, uv's environment variables) that say the same; a ValueError names a setting that uv cannot have."""
    options: list[str] = []
    variables: dict[str, str] = {}
    for name, value in settings.items():
        if name in LISTS:
            options += [word for one in value.split() for word in (LISTS[name], one)]
        elif name == "index-url":
            options += ["--default-index", value]
        elif name in FLAGS:
            options += [FLAGS[name]] if value.lower() in ("1", "true", "yes", "on") else []
        elif name in VARIABLES:
            variables[VARIABLES[name]] = value
        elif name not in HARMLESS:
            raise ValueError(name)
    if "--extra-index-url" in options:  # as pip: the best version of all indexes, not the first index that has the name
        options += ["--index-strategy", "unsafe-best-match"]
    return options, variables


def main(arguments: Sequence[str]) -> int:
    """Install; the exit code is the installer's."""
    listing = subprocess.run([*PIP, "config", "list"], capture_output=True, text=True, check=True).stdout
    try:
        options, variables = for_uv(settings_in(listing))
    except ValueError as setting:
        print(f"install: uv has no option for pip's setting {setting}; pip installs")
        return _pip(arguments)
    if _pip(["--quiet", "--constraint", str(LOCK), "uv"]) == 0:
        command = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--python", sys.executable]
        if subprocess.run([*command, *options, *arguments], env={**os.environ, **variables}).returncode == 0:
            return 0
    print("install: uv did not install; pip installs")
    return _pip(arguments)


def _pip(arguments: Sequence[str]) -> int:
    return subprocess.run([*PIP, "install", "--quiet", *arguments]).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
