"""The command line: `workbench train NOTEBOOK -p name=value …`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from workbench.errors import SettingError, WorkbenchError, message


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point.

    Its exit code: 0 done, 1 a cell raised, 2 refused before any work, 3 stopped by `break_if`, 4 the kernel died,
    130 interrupted (SIGINT), 143 ended by SIGTERM.
    """
    options = _parser().parse_args(_joined(sys.argv[1:] if arguments is None else arguments))
    try:
        return options.command(options)
    except WorkbenchError as error:
        print(f"workbench: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("workbench: interrupted", file=sys.stderr)
        return 130


def _joined(arguments: Sequence[str]) -> list[str]:
    """Papermill's `-p name value` as ours, `-p name=value`."""
    joined: list[str] = []
    waiting = list(arguments)
    while waiting:
        word = waiting.pop(0)
        joined.append(word)
        if word in ("-p", "--parameter") and waiting:
            name = waiting.pop(0)
            joined.append(f"{name}={waiting.pop(0)}" if name.isidentifier() and waiting else name)
    return joined


def _parser() -> argparse.ArgumentParser:
    from workbench import __version__

    parser = argparse.ArgumentParser(prog="workbench", description="A Jupyter-first bench for RL post-training.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="command")
    train = commands.add_parser("train", help="run a notebook as a job")
    train.add_argument("notebook", nargs="?", help="left out with --resume: the run knows its notebook")
    train.add_argument("--resume", metavar="RUN", help="go on with a job: its notebook and parameters, -p changes some")
    train.add_argument("-o", "--output", help="where the executed notebook goes (default: into the run folder)")
    train.add_argument("--skip-look", action="store_true", help="leave out cells that are tagged `look`")
    train.set_defaults(command=_train)
    check = commands.add_parser("check", help="everything that can be refused before work starts; nothing is written")
    check.add_argument("notebook")
    check.set_defaults(command=_check)
    for command in (train, check):
        command.add_argument("-p", "--parameter", action="append", default=[], metavar="NAME=VALUE")
        command.add_argument("-f", "--file", help="parameters from a YAML or JSON file; -p comes after")
        command.add_argument("-k", "--kernel", help="kernel name (default: the notebook's)")
    runs = commands.add_parser("runs", help="a table of runs with settings and results")
    runs.add_argument("folder", nargs="?", default="runs")
    runs.set_defaults(command=_runs)
    report = commands.add_parser("report", help="a run as one HTML file that needs no network")
    report.add_argument("run")
    report.add_argument("-o", "--output", help="default: report.html in the run folder")
    report.set_defaults(command=_report)
    show = commands.add_parser("parameters", help="what a notebook can be given")
    show.add_argument("notebook")
    show.set_defaults(command=_parameters)
    return parser


def _given(options: argparse.Namespace) -> dict[str, Any]:
    """Parameters of the file, then those of the command line."""
    from workbench.runs.parameters import read_file

    read = read_file(options.file) if options.file else {}
    return {**read, **dict(_pair(text) for text in options.parameter)}


def _train(options: argparse.Namespace) -> int:
    from workbench.runs.runner import OK, closing_lines, job_of, run_notebook

    given, notebook = _given(options), options.notebook
    if options.resume:
        found, values, note = job_of(options.resume)
        given, notebook = {**values, **given}, notebook or found
        if note:
            _say(note)
    if notebook is None:
        raise SettingError(message("train", expected="a notebook, or --resume RUN"))
    result = run_notebook(
        notebook,
        given,
        output=options.output,
        kernel=options.kernel,
        skip_look=options.skip_look,
        say=_say,
    )
    if result.code != OK:
        _say(result.error)
    for line in closing_lines(result):
        _say(line)
    return result.code


def _check(options: argparse.Namespace) -> int:
    from workbench.runs.parameters import resolve, table
    from workbench.runs.runner import OK, check_notebook

    given = _given(options)
    _say(table(options.notebook, resolve(options.notebook, given)))
    code, told = check_notebook(options.notebook, given, kernel=options.kernel)
    _say(told if code == OK else f"refused: {told}")
    return code


def _runs(options: argparse.Namespace) -> int:
    from workbench.runs.overview import list_runs

    frame = list_runs(options.folder)
    _say(frame.to_string(na_rep="–", float_format=lambda value: f"{value:.4g}") if len(frame) else "no runs")
    return 0


def _report(options: argparse.Namespace) -> int:
    from workbench.runs.report import write_report

    _say(str(write_report(options.run, options.output)))
    return 0


def _parameters(options: argparse.Namespace) -> int:
    from workbench.runs.parameters import table

    _say(table(options.notebook, {}))
    return 0


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise SettingError(message("-p", expected="name=value", found=repr(text)))
    return name, value


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
