"""Make a release ready: `python tools/release.py` writes what it promises and its notes (CONTRIBUTING.md, "A release")."""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RELEASED = ROOT / "tests" / "released"
"""A JSON file a release: its public names with their parameters, and which of them were deprecated."""
KEPT = 2
"""Minor releases that a deprecated name goes on to work for."""


def surface() -> dict[str, list[str]]:
    """Public name, such as `workbench.Stepper.run` → its parameters; none for what cannot be called."""
    import workbench

    names: dict[str, list[str]] = {}
    packages = {"workbench": workbench}
    packages |= {f"workbench.{name}": thing for name, thing in vars(workbench).items() if inspect.ismodule(thing)}
    for package, module in packages.items():
        for name in getattr(module, "__all__", ()) if package.count(".") < 2 else ():
            thing = getattr(module, name)
            names[f"{package}.{name}"] = parameters(thing)
            if inspect.isclass(thing):
                methods = {key: getattr(thing, key) for key in dir(thing) if not key.startswith("_")}
                names |= {f"{package}.{name}.{key}": parameters(method) for key, method in methods.items()}
    return names


def parameters(thing: Any) -> list[str]:
    """Names of the parameters of a function or class that can be given by name."""
    try:
        kinds = inspect.signature(thing).parameters.values()
    except (TypeError, ValueError):
        return []
    return [each.name for each in kinds if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]


def broken(releases: Mapping[str, Mapping[str, Any]], now: Mapping[str, list[str]], version: str) -> list[str]:
    """Public names and parameters (`name(parameter)`) of the releases that are gone too early from `now`.

    One may go `KEPT` minor releases after the first release that deprecates it. `releases` maps a version to what its file
    in `tests/released` has: `names` and `deprecated`.
    """
    here = spelled(now)
    old_enough = {
        name
        for release, content in releases.items()
        if minor(version) - minor(release) >= KEPT
        for name in content["deprecated"]
    }
    promised = {name for content in releases.values() for name in spelled(content["names"])}
    gone = promised - here - old_enough
    return sorted(name for name in gone if name.partition("(")[0] not in old_enough)


def spelled(names: Mapping[str, list[str]]) -> set[str]:
    """Names, and each parameter as `name(parameter)`."""
    return {*names} | {f"{name}({parameter})" for name, listed in names.items() for parameter in listed}


def minor(version: str) -> int:
    """The number of a minor release, counted over major ones: 0.16.1 → 16."""
    major, number = map(int, version.split(".")[:2])
    return 1000 * major + number


def notes(changelog: str, version: str) -> str:
    """The changelog's section of a version. Raises SystemExit where it is not the first, or is not dated."""
    title, body = re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", changelog, re.M | re.S)[0]
    if not re.fullmatch(rf"{re.escape(version)} \(\d{{4}}-\d\d-\d\d\)", title):
        raise SystemExit(f"CHANGELOG.md begins with {title!r}; expected '{version} (YYYY-MM-DD)'; write the date in")
    return str(body.strip())


def main() -> None:
    """Write the promises of this version, print its notes and the commands that tag and publish it."""
    sys.path.insert(0, str(ROOT))
    import workbench
    from workbench.base.distribution import DEPRECATED

    version = workbench.__version__
    text = notes((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), version)
    promises = {"names": surface(), "deprecated": sorted(DEPRECATED)}
    RELEASED.mkdir(exist_ok=True)
    (RELEASED / f"{version}.json").write_text(json.dumps(promises, indent=1) + "\n", encoding="utf-8")
    print(text)
    print(f"\nnow: git add tests/released; git commit; git tag -a v{version} -m 'workbench {version}'; git push --tags")


if __name__ == "__main__":
    main()
