"""What pyproject.toml cannot say: a wheel takes the notebooks and the tiny worlds along, in `workbench/starter`."""

from __future__ import annotations

import tomllib
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithStarter(build_py):
    """`build_py`, then a copy of what `[tool.workbench]` lists; an editable install reads the repository's own files."""

    def run(self) -> None:
        """Build."""
        super().run()
        for source, target in self._starter():
            self.mkpath(str(Path(target).parent))
            self.copy_file(source, target, preserve_mode=False)

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        """The wheel's files."""
        return [*super().get_outputs(include_bytecode), *(target for _, target in self._starter())]

    def get_source_files(self) -> list[str]:
        """The source distribution's files."""
        return [*super().get_source_files(), *_starter_files()]

    def _starter(self) -> list[tuple[str, str]]:
        if self.editable_mode:
            return []
        return [(name, str(Path(self.build_lib, "workbench", "starter", name))) for name in _starter_files()]


def _starter_files() -> list[str]:
    patterns = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["tool"]["workbench"]["starter"]
    return sorted(str(path) for pattern in patterns for path in Path().glob(pattern) if path.is_file())


setup(cmdclass={"build_py": BuildWithStarter})
