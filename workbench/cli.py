"""The command line: `workbench train NOTEBOOK -p name=value …`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from workbench.errors import SettingError, WorkbenchError, message


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point.

    Its exit code: 0 done, 1 a cell raised, 2 refused before any work, 3 stopped by `break_if`, 4 the kernel died,
    130 interrupted.
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
    train.add_argument("notebook")
    train.add_argument("-p", "--parameter", action="append", default=[], metavar="NAME=VALUE")
    train.add_argument("-o", "--output", help="where the executed notebook goes (default: into the run folder)")
    train.add_argument("-k", "--kernel", help="kernel name (default: the notebook's)")
    train.set_defaults(command=_train)
    show = commands.add_parser("parameters", help="what a notebook can be given")
    show.add_argument("notebook")
    show.set_defaults(command=_parameters)
    return parser


def _train(options: argparse.Namespace) -> int:
    from workbench.runs.runner import OK, closing_lines, run_notebook

    given = dict(_pair(text) for text in options.parameter)
    result = run_notebook(options.notebook, given, output=options.output, kernel=options.kernel, say=_say)
    if result.code != OK:
        _say(result.error)
    for line in closing_lines(result):
        _say(line)
    return result.code


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
