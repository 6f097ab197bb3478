"""The distribution: its name, its version, and its extras, which the errors of absent optional packages name."""

from __future__ import annotations

import sys
import tomllib
import warnings
from collections.abc import Container, Iterator
from contextlib import contextmanager
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from packaging.requirements import Requirement

from workbench.base.errors import PackageMissing

DISTRIBUTION = "rl-workbench"
"""Name on the package index; `workbench` is another product there."""

DEPRECATED: dict[str, tuple[str, str]] = {
    "workbench.Pipeline.replace": ("0.16.0", "Pipeline.with_stage, which returns a copy, too"),
}
"""Public name, or parameter as `name(parameter)` → the release that deprecated it, and what to use instead."""


def version() -> str:
    """Return the version of this package, `workbench.__version__`."""
    return str(sys.modules["workbench"].__version__)


def install(extra: str) -> str:
    """Return the command that installs an extra, such as `jobs`, or with "" the core: `pip install
    'rl-workbench[jobs]'`.
    """
    return f"pip install '{DISTRIBUTION}[{extra}]'" if extra else f"pip install {DISTRIBUTION}"


@cache
def required(extra: str = "") -> list[Requirement]:
    """Return what an extra needs in addition to the core, or with "" what the core needs, from pyproject.toml or the
    installation.
    """
    project = Path(__file__).parents[2] / "pyproject.toml"
    if project.is_file():
        listed = tomllib.loads(project.read_text(encoding="utf-8"))["project"]
        lines = listed["optional-dependencies"][extra] if extra else listed["dependencies"]
        return [Requirement(line) for line in lines]
    found = [Requirement(line) for line in metadata.requires(DISTRIBUTION) or ()]
    return [one for one in found if (one.marker.evaluate({"extra": extra}) if one.marker else not extra)]


_version = cache(metadata.version)  # reads files; its errors are not kept


def version_of(package: str) -> str | None:
    """Return the version of an installed package, as this process first saw it; None where it is not installed."""
    try:
        return _version(package)
    except metadata.PackageNotFoundError:
        return None


def check_packages(extra: str, purpose: str, modules: Container[str] | None = None) -> None:
    """Raise `PackageMissing` where a package of an extra ("": of the core) is absent, or its version is not supported.

    Args:
        extra: the extra whose requirements are checked.
        purpose: what needs them, the beginning of the message.
        modules: check only the versions of installed packages whose modules are among these.
    """
    for requirement in required(extra):
        there = version_of(requirement.name)
        if modules is not None and (there is None or requirement.name.replace("-", "_") not in modules):
            continue
        if there is None:
            raise PackageMissing(purpose, expected=f"the package {requirement.name}", do=install(extra))
        if not requirement.specifier.contains(there, prereleases=True):
            needed = f"{requirement.name}{requirement.specifier}"
            do = f"pip install '{needed}', then start this process again"
            raise PackageMissing(purpose, expected=needed, found=f"{requirement.name} {there}", do=do)


def require_package(package: str, extra: str, purpose: str) -> None:
    """Raise `PackageMissing` where a package is absent or its version is not supported, without importing it. The
    arguments are those of `optional`.
    """
    if package not in sys.modules and find_spec(package) is None:
        raise PackageMissing(purpose, expected=f"the package {package}", do=install(extra))
    check_packages(extra, purpose, (package,))


@contextmanager
def optional(extra: str, purpose: str) -> Iterator[None]:
    """Context manager around imports of optional packages. Raises `PackageMissing` where one is absent or its version
    is not supported.

    Args:
        extra: the extra that brings the packages.
        purpose: what needs them, the beginning of the message.
    """
    try:
        yield
    except Exception as cause:
        check_packages(extra, purpose, sys.modules)  # an old version may be why
        if not isinstance(cause, ModuleNotFoundError):
            raise
        package = str(cause.name).partition(".")[0]
        raise PackageMissing(purpose, expected=f"the package {package}", do=install(extra)) from cause
    check_packages(extra, purpose, sys.modules)


def deprecated(name: str) -> None:
    """Warn the caller of a public function that `name`, a key of `DEPRECATED`, will be removed."""
    since, instead = DEPRECATED[name]
    hinted = sys._getframe(2).f_code.co_name == "answered"  # the caller is behind `errors.hinted`
    warnings.warn(f"{name} is deprecated since {since}; use {instead}", FutureWarning, stacklevel=3 + hinted)
