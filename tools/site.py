"""Build the documentation site: `.venv/bin/python tools/site.py`, offline, into build/site.

The pages are those of docs/, and what is generated here: the API reference from the public names and their docstrings, the glossary from
the declared columns, the changelog, and the notebooks, with outputs where `--execute` has run them into build/notebooks. All is gathered
in build/docs, so that the program that makes HTML of it (MkDocs with Material) needs no code of ours and can be exchanged.
"""

from __future__ import annotations

import argparse
import importlib
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
EXECUTED = "notebooks"
"""Folder in the build folder where the notebooks with outputs lie."""
PACKAGES = (
    "agents", "cluster", "compat", "datasets", "engines", "functional", "recipes", "rewards", "sandbox", "stages", "views",
)  # fmt: skip
FACTS = {
    "verl's names": "verl.md", "Architectures": "architectures.md", "Determinism": "determinism.md", "Files of a run": "files.md",
    "GSM8K on one GPU": "gsm8k.md", "Scorecard of faults": "scorecard.md", "Design of the screens": "design.md",
    "How the code is built": "architecture.md",
}  # fmt: skip
WORDS = """
| word | meaning |
|---|---|
| `DataProto` | the batch: tensors, one object per row, facts; an immutable value that records which stage wrote each column |
| column | one named field of a batch |
| `uid` | the prompt that a row belongs to; the G rows of one `uid` are a **group** |
| stage | `DataProto → DataProto` plus metrics; says what it reads and writes |
| `Pipeline` | an ordered list of stages, checked when it is built |
| step | one pass of one batch through the pipeline; ends in a new policy version |
| `Stepper` | runs a pipeline one phase at a time: `next, run(until=), back(to=), replace, fork, compare` |
| `Trace` | the record of a step: each phase's batch, seconds, metrics, settings |
| `Run` | a training job's folder: settings, metrics, traces, checkpoints, the executed notebook |
| engine | samples tokens, computes log-probs, trains; stages use three small protocols: `Sampler`, `LogProbModel`, `Learner` |
| reference | the frozen policy that KL is measured against |
| advantage | how much better than expected a token, or a whole response, was |
| episode | a rollout of several turns, with tools or a simulated user |
"""


def reference(name: str, skipped: Sequence[str] = ()) -> str:
    """A page with the public names of a package, in the order of its `__all__`."""
    package = importlib.import_module(name)
    names = [one for one in package.__all__ if one not in skipped and documented(package, getattr(package, one))]
    return (
        f"# `{name}`\n\n{(package.__doc__ or '').strip()}\n\n"
        + "\n\n".join(f"::: {name}.{one}" for one in names)
        + "\n"
    )


def documented(package: ModuleType, thing: Any) -> bool:
    """Whether a public thing has its place on the package's page: no module, and defined in the package."""
    home = getattr(thing, "__module__", None) or package.__name__
    return not isinstance(thing, ModuleType) and str(home).startswith(package.__name__)


def glossary() -> str:
    """The words, and every declared column with its dims, its meaning and the stage that writes it."""
    columns = importlib.import_module("workbench").COLUMNS.values()
    letters = (
        "`P` prompts, `G` samples per prompt, `B = P·G` rows, `S` prompt tokens, `T` response tokens, `V` vocabulary."
    )
    head = [
        "# Glossary",
        WORDS,
        "## Columns",
        "",
        letters,
        "",
        "| column | dtype, dims | what it is | stage |",
        "|---|---|---|---|",
    ]
    rows = [f"| `{one.name}` | {one.dtype} [{', '.join(one.dims)}] | {one.doc} | {one.writer} |" for one in columns]
    return "\n".join([*head, *rows]) + "\n"


def gathered(build: Path) -> Path:
    """Write all pages into `build`/docs; returns the settings' file beside it, whose navigation lists them."""
    docs = build / "docs"
    shutil.rmtree(docs, ignore_errors=True)
    shutil.copytree(ROOT / "docs", docs)
    (docs / "notebooks").mkdir()
    pages = {f"reference/{name}.md": reference(f"workbench.{name}") for name in PACKAGES}
    pages["reference/workbench.md"] = reference("workbench", PACKAGES)
    pages["reference/glossary.md"] = glossary()
    pages["changelog.md"] = (ROOT / "CHANGELOG.md").read_text()
    for path, text in pages.items():
        (docs / path).parent.mkdir(exist_ok=True)
        (docs / path).write_text(text)
    notebooks = sorted((ROOT / "notebooks").glob("*.ipynb"))
    for source in notebooks:
        made = build / EXECUTED / source.name
        shutil.copy(made if made.exists() else source, docs / "notebooks" / source.name)
    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    settings["docs_dir"], settings["site_dir"] = str(docs), str(build / "site")
    shelf = ["reference/workbench.md", *(f"reference/{name}.md" for name in PACKAGES), "reference/glossary.md"]
    settings["nav"] += [
        {"Notebooks": [f"notebooks/{path.name}" for path in notebooks]},
        {"Reference": [*shelf, *({title: page} for title, page in FACTS.items())]},
        {
            "Project": [
                "changelog.md",
                {"Decisions": sorted(f"decisions/{one.name}" for one in (docs / "decisions").iterdir())},
            ]
        },
    ]
    made = build / "mkdocs.yml"
    made.write_text(yaml.safe_dump(settings, sort_keys=False))
    return made


def execute(build: Path, names: Sequence[str]) -> None:
    """Run notebooks with their own parameters into `build`/notebooks: those whose names begin with one of `names`, or all.

    What they train is trained anew, in `build`/runs: a folder of before would only be read.
    """
    run_notebook = importlib.import_module("workbench").run_notebook
    real_model = importlib.import_module("real_model")
    declared_parameters = importlib.import_module("workbench.jobs.parameters").declared_parameters
    for source in sorted((ROOT / "notebooks").glob("*.ipynb")):
        if names and not source.name.startswith(tuple(names)):
            continue
        print(f"running {source.name}", flush=True)
        fresh = build / "runs" / source.stem
        shutil.rmtree(fresh, ignore_errors=True)
        kept = os.path.relpath(fresh / "run", ROOT)
        values = {one.name: kept for one in declared_parameters(source) if one.name in ("run", "folder")}
        if source.stem == "111_real_model":
            values["model"] = os.environ.get("WORKBENCH_REAL_MODEL", real_model.HUB)
            if why := real_model.check(values["model"]):
                print(f"left as it is: {why}; WORKBENCH_REAL_MODEL names a folder", flush=True)
                continue
        result = run_notebook(source, values, output=build / EXECUTED / source.name)
        if result.code:
            sys.exit(f"{source.name}: {result.error}")


def main() -> None:
    """Gather the pages and build the site; a broken link is an error."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--build", type=Path, default=ROOT / "build", help="folder to write into")
    parser.add_argument(
        "--execute", nargs="*", metavar="NAME", help="run the notebooks first, or those that begin so (201)"
    )
    asked = parser.parse_args()
    build = asked.build.absolute()
    if asked.execute is not None:
        execute(build, asked.execute)
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--config-file", str(gathered(build))]
    sys.exit(subprocess.run(command, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, check=False).returncode)


if __name__ == "__main__":
    main()
