"""`runtime_env` as Ray users write it (a dict or a yaml file), its secrets kept out of everything that is shown or logged.

Ray writes a runtime environment, values and all, into its own log files. So variables do not travel in it: each worker sets
them before it imports anything. Only what a process must have when it starts goes through Ray.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from workbench.base.errors import SettingError
from workbench.base.secret import HIDDEN, SECRET

_AT_START = re.compile(r"^(LD_|PYTHON|MALLOC_|GLIBC_|PATH$|RAY_)")


@dataclass(frozen=True)
class Environment:
    """A runtime environment in two halves: what Ray is given, and the variables that workers set themselves."""

    ray: Mapping[str, Any] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)

    @staticmethod
    def of(source: str | Path | Mapping[str, Any] | None) -> Environment:
        """Make an `Environment` of a mapping, a yaml file or None. Raises `SettingError` that never quotes a value."""
        spec = _read(source)
        variables = spec.pop("env_vars", None) or {}
        if not isinstance(variables, Mapping):
            raise SettingError("runtime_env env_vars", expected="{name: string, …}", found=type(variables).__name__)
        odd = [name for name, value in variables.items() if not isinstance(value, str)]
        if odd:
            raise SettingError(f"runtime_env env_vars {', '.join(map(str, odd))}", expected="strings", do="quote them")
        return Environment(spec, dict(variables))

    def at_start(self) -> dict[str, str]:
        """Variables that a process must have when it starts (`LD_…`, `PATH` …), without secrets, because Ray logs these."""
        names = [name for name in self.variables if _AT_START.match(name) and not SECRET.search(name)]
        return {name: self.variables[name] for name in names}

    def joined(self, more: Mapping[str, str] | None) -> Environment:
        """A copy with the variables of `more` added; they replace those of the same name."""
        return Environment(self.ray, {**self.variables, **(more or {})})

    def redact(self, text: str) -> str:
        """Replace variables' values in a text by •••: from 8 characters on, from 4 if the name has KEY, TOKEN or such."""
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
        found = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except OSError as error:
        raise SettingError(f"runtime_env {str(path)!r}", expected="a yaml file", found=error.strerror) from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)  # the error's own text quotes the line, which may hold a secret
        where = f"line {mark.line + 1}" if mark is not None else "the file"
        raise SettingError(f"runtime_env {str(path)!r}", expected="valid yaml", found=f"an error in {where}") from None
    if not isinstance(found, dict):
        raise SettingError(f"runtime_env {str(path)!r}", expected="a mapping", found=type(found).__name__)
    return found


def nsight_options(asked: str | Mapping[str, str]) -> dict[str, Any]:
    """The `runtime_env` that runs workers under NVIDIA Nsight Systems: `"default"`, or `nsys profile` options as a mapping.

    Raises `SettingError` where `nsys` is not installed on this node: Ray would start no worker, and not say why.
    """
    if shutil.which("nsys") is None:
        do = "install NVIDIA Nsight Systems, or use cluster.profile(…), which does not need it"
        raise SettingError("nsight", expected="nsys on the PATH of every node", found="none on this one", do=do)
    if isinstance(asked, str) and asked != "default":
        raise SettingError("nsight", expected="'default' or options of nsys profile", found=asked)
    return {"nsight": asked if isinstance(asked, str) else {str(name): str(value) for name, value in asked.items()}}
