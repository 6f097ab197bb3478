"""The distribution: its name, its version, and its extras, which the errors of absent optional packages name."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

from workbench.base.errors import PackageMissing

DISTRIBUTION = "rl-workbench"
"""Name on the package index; `workbench` is another product there."""

DEPRECATED: dict[str, tuple[str, str]] = {}
"""Public name, or parameter as `name(parameter)` → the release that deprecated it, and what to use instead."""


def version() -> str:
    """The version of this package, `workbench.__version__`."""
    return str(sys.modules["workbench"].__version__)


def install(extra: str) -> str:
    """The command that installs an extra, such as `jobs`."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"


def require_package(package: str, extra: str, purpose: str) -> None:
    """Raise `PackageMissing` where a package is not installed, without importing it; the arguments are those of `optional`."""
    if package not in sys.modules and find_spec(package) is None:
        raise PackageMissing(purpose, expected=f"the package {package}", do=install(extra))


@contextmanager
def optional(extra: str, purpose: str) -> Iterator[None]:
    """Around imports of optional packages. Raises `PackageMissing` where one is absent.

    Args:
        extra: the extra that brings the packages.
        purpose: what needs them, the beginning of the message.
    """
    try:
        yield
    except ModuleNotFoundError as cause:
        raise PackageMissing(purpose, expected=f"the package {cause.name}", do=install(extra)) from cause


def deprecated(name: str) -> None:
    """Warn the caller of a public function that `name`, a key of `DEPRECATED`, will go."""
    since, instead = DEPRECATED[name]
    warnings.warn(f"{name} is deprecated since {since}; use {instead}", FutureWarning, stacklevel=3)
