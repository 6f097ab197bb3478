"""papermill's entry point to our engine. It imports nothing at the top: papermill loads it while it is itself being imported."""

from __future__ import annotations

from typing import Any


class JobEngine:
    """The engine that `papermill --engine workbench …` loads; `workbench.jobs.engine` does the work."""

    @classmethod
    def execute_notebook(cls, nb: Any, kernel_name: str, **options: Any) -> Any:
        """Run the notebook's cells and return the executed notebook."""
        from workbench.jobs.engine import execute_notebook

        return execute_notebook(nb, kernel_name, **options)

    @classmethod
    def nb_kernel_name(cls, nb: Any, name: str | None = None) -> str:
        """Return the name of the kernel that a notebook asks for, or `name` if given."""
        from papermill.utils import nb_kernel_name

        return nb_kernel_name(nb, name)

    @classmethod
    def nb_language(cls, nb: Any, language: str | None = None) -> str:
        """Return the language of a notebook's kernel, or `language` if given."""
        from papermill.utils import nb_language

        return nb_language(nb, language)
