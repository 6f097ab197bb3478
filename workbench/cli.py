"""The command line: `workbench train NOTEBOOK -p name=value …`."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from workbench.base.distribution import version
from workbench.base.errors import SettingError, WorkbenchError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    0 done, 1 a cell raised, 2 refused before any work, 3 stopped by `break_if`, 4 the kernel died, 129 its terminal was
    closed (SIGHUP), 130 interrupted (SIGINT), 143 ended by SIGTERM.
    """
    options = _parser().parse_args(_joined(sys.argv[1:] if arguments is None else arguments))
    try:
        if getattr(options, "notebook", None):
            from workbench.jobs.starter import find_notebook

            options.notebook = find_notebook(options.notebook)
        return options.command(options) or 0
    except WorkbenchError as error:
        print(f"workbench: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("workbench: interrupted", file=sys.stderr)
        return 130


def _joined(arguments: Sequence[str]) -> list[str]:
    """Turn papermill's `-p name value` into `-p name=value`, so that both are accepted."""
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
    parser = argparse.ArgumentParser(prog="workbench", description="A Jupyter-first bench for RL post-training.")
    parser.add_argument("--version", action="version", version=version())
    group = parser.add_subparsers(required=True, metavar="command")

    def add(name: str, command: Callable[[argparse.Namespace], int | None], help: str) -> argparse.ArgumentParser:
        added = group.add_parser(name, help=help)
        added.set_defaults(command=command)
        return added

    train = add("train", _train, "run a notebook as a job")
    train.add_argument("notebook", nargs="?", help="may be left out with --resume: the run knows its notebook")
    train.add_argument(
        "--resume", metavar="RUN", help="continue a job with its notebook and parameters; -p changes some"
    )
    train.add_argument("-o", "--output", help="where the executed notebook goes (default: into the run folder)")
    train.add_argument("--skip-look", action="store_true", help="leave out cells that are tagged `look`")
    train.add_argument(
        "--health", nargs="?", type=int, const=9464, metavar="PORT",
        help="serve http://localhost:PORT/health and /metrics (Prometheus) while it trains (default: 9464; 0: a free one)",
    )  # fmt: skip
    check = add("check", _check, "check everything that can be refused before work starts; writes nothing")
    check.add_argument("notebook")
    sweep = add("sweep", _sweep, "run a notebook as a job for every combination of parameters")
    sweep.add_argument("notebook")
    sweep.add_argument(
        "--run", default="runs/sweep", help="the sweep's folder (default: runs/sweep); the same again goes on"
    )
    sweep.add_argument("--jobs", type=int, default=1, help="jobs at a time (default: 1)")
    new = add("new", _new, "write a notebook for your own data and reward, to edit and to run as a job")
    new.add_argument("target", metavar="NOTEBOOK")
    new.add_argument("--model", help="policy to start from (default: the tiny model that comes with workbench)")
    new.add_argument("--train-file", help="training rows (default: the tiny model's)")
    for command in (train, check, sweep):
        metavar = "NAME=VALUE" if command is not sweep else "NAME=VALUES"  # lr=1e-4,3e-4  seed=0..2  sizes=[1,2]
        command.add_argument("-p", "--parameter", action="append", default=[], metavar=metavar)
        command.add_argument("-f", "--file", help="parameters from a YAML or JSON file; -p overrides them")
        command.add_argument("-k", "--kernel", help="kernel name (default: the notebook's)")
    _looking(add)
    _files(add)
    return parser


def _looking(add: Any) -> None:
    """Add the commands that show runs and dumps to the parser."""
    runs = add("runs", _runs, "print a table of runs with settings and results")
    runs.add_argument("folder", nargs="?", default="runs")
    report = add("report", _report, "write a run as one HTML file that needs no network")
    report.add_argument("run", metavar="RUN")
    report.add_argument(
        "-o", "--output", help="default: report.html in the run folder; with --all: the folder `report` there"
    )
    report.add_argument(
        "--all", action="store_true", help="a folder of pages instead, also of a folder of runs or a dump"
    )
    view = add("view", _view, "look at a run, a folder of runs, or a dump in a browser, without a notebook")
    view.add_argument(
        "source", nargs="?", default="runs", metavar="RUN", help="also a folder or a dump (default: runs)"
    )
    view.add_argument("--port", type=int, default=0, help="default: a free one")
    view.add_argument("--host", default="127.0.0.1", help="default: 127.0.0.1, which only this machine reaches")
    show = add("show", _show, "print a run, or the samples of a recorded step or of a dump, as text")
    show.add_argument("source", metavar="RUN", help="a run folder, or rollouts that verl or TRL dumped")
    show.add_argument("--step", type=int, help="a recorded step; without it the run itself, or all steps of a dump")
    show.add_argument("--order", default="worst", help="worst, best, surprising, index, or a column (default: worst)")
    show.add_argument("--rows", type=int, default=8, help="how many samples (default: 8)")
    show.add_argument("--search", default="", help="text that a sample must contain")
    show.add_argument("--row", type=int, help="one sample in full")
    show.add_argument("--tokens", metavar="NUMBER", help="with --row: its tokens and this number (advantage, kl, …)")
    chat = add("chat", _chat, "talk to a run's model, beside the one that it began with")
    chat.add_argument("model", metavar="RUN", help="also a model's folder or name")
    chat.add_argument("--step", type=int, help="the checkpoint (default: the newest)")
    chat.add_argument("--alone", action="store_true", help="without the model that the run began with")
    chat.add_argument("--system", help="a system message (default: that of the run's rows)")
    for name, kind in (("--temperature", float), ("--top-p", float), ("--max-tokens", int)):
        chat.add_argument(name, type=kind, default=argparse.SUPPRESS)
    chat.add_argument(
        "--keep", default="kept.jsonl", metavar="FILE", help="where /keep appends rows (default: kept.jsonl)"
    )
    audit = add("audit", _audit, "recompute what a run's traces hold, and print what disagrees")
    audit.add_argument("run")


def _files(add: Any) -> None:
    """Add the commands that write notebooks and data, or check this machine, to the parser."""
    notebooks = add("notebooks", _notebooks, "write the notebooks, their data and tiny models into a folder")
    notebooks.add_argument("folder", metavar="DIR")
    translate = add("translate", _translate, "say what becomes of a verl command, and write it as a notebook")
    translate.add_argument("source", metavar="FILE", help="a script or a YAML of settings")
    translate.add_argument("-o", "--output", metavar="NOTEBOOK", help="write the notebook that the command stands for")
    translate.add_argument("-p", "--parameter", action="append", default=[], metavar="NAME=VALUE", help="another value")
    translate.add_argument("--without", action="append", default=[], metavar="KEY", help="leave a refused setting out")
    which = "which of several commands of a script: its number from 0, or its branch, backend=fsdp"
    translate.add_argument("--command", dest="which", metavar="WHICH", help=which)
    translate.set_defaults(file=None)
    doctor = add("doctor", _doctor, "check this machine, and whether workbench works on it")
    doctor.add_argument("--only", nargs="+", default=[], metavar="CHECK", help="these checks alone")
    doctor.add_argument("--without", nargs="+", default=[], metavar="CHECK", help="not these (ray, vllm …)")
    doctor.add_argument("-o", "--output", metavar="FILE", help="write the findings as JSON, to attach to an issue")
    parameters = add("parameters", _parameters, "list a notebook's parameters")
    parameters.add_argument("notebook")
    converter = add("convert", _convert, "write a published data set as parquet in verl's schema")
    converter.add_argument("kind", help="gsm8k, math, geo3k, apps, taco, livecodebench, humaneval or mbpp")
    converter.add_argument("source", nargs="+", help="the data set's own files")
    converter.add_argument("target")
    converter.add_argument("--split", default="train")
    converter.add_argument("--instruction", help="stands after every question, in place of the kind's own")
    converter.add_argument("--tool", help="name of the tool with which an agent is to check its answer")


def _parameters_of(options: argparse.Namespace) -> dict[str, Any]:
    """Return the parameters of the file (`-f`), overridden by those of the command line (`-p`)."""
    from workbench.base.config import read_yaml

    values = read_yaml(options.file) if options.file else {}
    for text in options.parameter:
        name, equals, value = text.partition("=")
        if not equals:
            raise SettingError("option -p", expected="name=value", found=repr(text))
        values[name] = value
    return values


def _without_grammar() -> None:
    """Prevent the import of `rfc3987_syntax` in this process, which would compile a grammar for over a second.

    jsonschema, which papermill imports, uses it where installed, to check IRIs that no notebook has.
    """
    sys.modules.setdefault("rfc3987_syntax", None)  # type: ignore[arg-type] # None: importing it raises ImportError


def _train(options: argparse.Namespace) -> int:
    from workbench.jobs.runner import OK, closing_lines, job_of, run_notebook

    _without_grammar()
    parameters, notebook = _parameters_of(options), options.notebook
    if options.resume:
        found, values, note = job_of(options.resume)
        parameters, notebook = {**values, **parameters}, notebook or found
        if note:
            _say(note)
    if notebook is None:
        raise SettingError("nothing to train", expected="NOTEBOOK or --resume RUN")
    more: dict[str, Any] = {name: getattr(options, name) for name in ("output", "kernel", "skip_look", "health")}
    result = run_notebook(notebook, parameters, **more, say=_say)
    if result.code != OK:
        _say(result.error)
    for line in closing_lines(result):
        _say(line)
    return result.code


def _check(options: argparse.Namespace) -> int:
    from workbench.jobs.parameters import resolve, table
    from workbench.jobs.runner import OK, check_notebook

    _without_grammar()
    parameters = _parameters_of(options)
    _say(table(options.notebook, resolve(options.notebook, parameters)))
    code, findings = check_notebook(options.notebook, parameters, kernel=options.kernel, say=_say)
    _say(findings if code == OK else f"refused: {findings}")
    return code


def _sweep(options: argparse.Namespace) -> int:
    from workbench.jobs.sweep import sweep

    _without_grammar()
    ended = sweep(
        options.notebook, _parameters_of(options), run=options.run, jobs=options.jobs, kernel=options.kernel, say=_say
    )
    _say(_text(ended.table))
    return ended.code


def _new(options: argparse.Namespace) -> None:
    from workbench.jobs.starter import new

    new(options.target, model=options.model, train_file=options.train_file, say=_say)


def _text(frame: Any) -> str:
    return str(frame.to_string(na_rep="–", float_format=lambda value: f"{value:.4g}"))


def _runs(options: argparse.Namespace) -> None:
    from workbench.replay.run import list_runs

    frame = list_runs(options.folder)
    _say(_text(frame) if len(frame) else "no runs")


def _report(options: argparse.Namespace) -> None:
    from workbench.jobs.pages import write_folder
    from workbench.jobs.report import write_report

    written = write_folder(options.run, options.output)[1] if options.all else write_report(options.run, options.output)
    _say(str(written))


def _view(options: argparse.Namespace) -> None:
    from workbench.jobs.viewer import view

    view(options.source, port=options.port, host=options.host, say=_say)


def _show(options: argparse.Namespace) -> None:
    from workbench.jobs.pages import shown

    how = {"step": options.step, "order": options.order, "rows": options.rows, "search": options.search}
    _say(shown(options.source, row=options.row, colour=options.tokens, **how))


_COMMANDS = "/again  /score [RIGHT ANSWER]  /keep [SIDE]  /clear  /quit; Ctrl+C stops an answer"


def _chat(options: argparse.Namespace) -> None:
    """Talk in the terminal until its input ends; an answer is printed while it is sampled."""
    from workbench.replay.chat import chat

    how = {name: value for name, value in vars(options).items() if name in ("temperature", "top_p", "max_tokens")}
    base = False if options.alone else None
    with chat(options.model, step=options.step, base=base, system=options.system, **how) as talk:
        _say(f"{talk!r}\n{_COMMANDS}")
        while True:
            try:
                line = input("you: ").strip()
            except EOFError:
                return
            if line == "/quit":
                return
            try:
                _chatted(talk, line, options.keep)
            except WorkbenchError as error:
                _say(f"workbench: {error}")
            except KeyboardInterrupt:
                _say(" … stopped")


def _chatted(talk: Any, line: str, kept: str) -> None:
    """Do what a line says: a command, or a message to the models."""
    command, _, rest = line.partition(" ")
    written: dict[str, str] = {}

    def write(side: str, text: str) -> None:
        before = "" if side in written else f"\n{side}: "
        sys.stdout.write(before + text[len(written.get(side, "")) :])
        sys.stdout.flush()
        written[side] = text

    if command == "/clear":
        talk.clear()
    elif command == "/score":
        talk.score(rest or None)
        _say(_notes(talk))
    elif command == "/keep":
        row = talk.keep(rest or None)
        with open(kept, "a", encoding="utf-8") as file:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
        _say(f"kept in {kept}")
    elif line.startswith("/") and command != "/again":
        _say(_COMMANDS)
    elif line:
        (talk.again if command == "/again" else partial(talk.ask, line))(on_text=write)
        _say(f"\n{_notes(talk)}")


def _notes(talk: Any) -> str:
    return "\n".join(f"[{side}: {answer.note}]" for side, answer in talk.last.answers.items())


def _audit(options: argparse.Namespace) -> int:
    """Print the audit of a run; returns exit code 1 where something disagrees."""
    from workbench.replay.run import load_run

    found = load_run(options.run).audit()
    _say(repr(found))
    return 0 if found.agrees else 1


def _doctor(options: argparse.Namespace) -> int:
    """Print the doctor's findings; returns exit code 1 where something is wrong."""
    from workbench.jobs.doctor import doctor

    found = doctor(only=options.only, without=options.without, say=_say)
    _say(found.title)
    if options.output:
        _say(f"wrote {found.save(options.output)}")
    return 0 if found else 1


def _notebooks(options: argparse.Namespace) -> None:
    from workbench.jobs.starter import write

    write(options.folder, _say)


def _translate(options: argparse.Namespace) -> None:
    from workbench.compat.verl_command import parsed
    from workbench.jobs.verl_job import verl

    job = verl(options.source, command=None if options.which is None else parsed(options.which))
    _say(repr(job))
    if options.output:
        changes = {name: parsed(value) for name, value in _parameters_of(options).items()}
        _say(f"wrote {job.notebook(options.output, without=options.without, **changes)}")


def _parameters(options: argparse.Namespace) -> None:
    from workbench.jobs.parameters import table

    _say(table(options.notebook, {}))


def _convert(options: argparse.Namespace) -> None:
    from workbench.datasets.converters import convert

    how = {name: getattr(options, name) for name in ("split", "instruction", "tool")}
    _say(f"{convert(options.kind, options.source, options.target, **how)} rows in {options.target}")


def _say(line: str) -> None:
    try:
        print(line, flush=True)
    except OSError:  # a closed terminal or pipe: the work goes on, and Python's own last flush does not fail
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
