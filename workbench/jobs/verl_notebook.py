"""Writes the notebook that a verl command stands for: parameters, data, algorithm, training, results, as a person would."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from workbench.base.distribution import optional
from workbench.base.files import write_text
from workbench.compat.verl_account import SettingRow
from workbench.compat.verl_command import TEXTS
from workbench.jobs.verl_plan import Call, Name, VerlPlan, arguments, data, program

with optional("jobs", "writing a notebook"):
    import nbformat
    from nbformat import v4

_HELP = {
    "model": "policy to start from: a Hugging Face folder or name, or a checkpoint",
    "train_file": "training rows; one file or several",
    "eval_file": "held-out rows; []: none",
    "run": "run folder",
    "resume": "auto: go on from the newest good checkpoint; never: start",
    "steps": "training steps; None: as many as `epochs` have",
    "epochs": "passes over the rows, where no steps are given",
    "batch_size": "prompts in a step",
    "ppo_mini_batch_size": "prompts in an optimizer step; None: the whole batch",
    "group_size": "samples for each prompt",
    "lr": "AdamW learning rate",
    "kl_coef": "weight of the KL to the reference; 0 leaves that out",
    "max_prompt_length": "longest prompt, in tokens",
    "max_tokens": "longest response, in tokens",
    "test_freq": "validate every n steps; 0: before and after",
    "save_freq": "checkpoint every n steps; 0: after the last",
    "seed": "seeds data order and every sampled token",
}
_RECIPE = ("group_size", "ppo_mini_batch_size", "kl_coef", "max_tokens")
"""Settings of recipes that are parameters of the notebook."""
_TITLES = {
    "grpo": "GRPO", "ppo": "PPO", "dapo": "DAPO", "rloo": "RLOO", "remax": "ReMax", "opo": "OPO", "gpg": "GPG", "gspo": "GSPO",
    "cispo": "CISPO", "reinforce_plus_plus": "REINFORCE++", "sft": "Supervised fine-tuning",
}  # fmt: skip


def write(path: str | Path, source: str, planned: VerlPlan, near: Sequence[SettingRow]) -> Path:
    """Write the notebook of a plan to `path`, and return the path. `near` are the settings that are not followed to the
    letter; the notebook's first cell lists them.
    """
    values, name = _parameters(planned), Path(path).name
    statements = program(replace(planned, settings=_recipe_settings(planned)), reward=bool(planned.reward))
    written = [(target, _statement(f"{target} = ", call)) for target, call in statements]
    origin = "a verl command" if source in TEXTS else Path(source).name
    until = "targets" if planned.recipe == "sft" else "advantage"
    lines = [
        f"- `{row.key}{f'={row.value}' if row.value else ''}`: {row.why}{' (left out)' * (row.kind == 'refused')}"
        for row in near
    ]
    title = [
        f"# {_TITLES.get(planned.recipe, planned.recipe)}, as in {origin}", "",
        "Made by `workbench translate` from a verl command. Where it is not verl to the letter:", "", *(lines or ["- nowhere"]), "",
        "```", f"workbench check {name}      # everything that can be refused before work starts", f"workbench train {name}", "```",
    ]  # fmt: skip
    cells = [
        v4.new_markdown_cell("\n".join(title)),
        v4.new_markdown_cell("## Parameters\n\nEvery one can be set from the command line: `-p steps=100`."),
        v4.new_code_cell(_parameter_lines(values), metadata={"tags": ["parameters"]}),
        v4.new_code_cell("import workbench as wb"),
        v4.new_markdown_cell("## The data, checked"),
        v4.new_code_cell(_data(planned)),
        *([v4.new_code_cell(_reward(planned))] if planned.reward else []),
        *[v4.new_code_cell(f"{text}\n{target}") for target, text in written if target != "pipe"],
        v4.new_markdown_cell("## The algorithm\n\nA list of stages: replace one, change a setting, print it."),
        v4.new_code_cell("\n".join([*(text for target, text in written if target == "pipe"), "pipe"])),
        v4.new_markdown_cell(f"One batch first, phase by phase; stepping up to the {until} changes no weights."),
        v4.new_code_cell(f'wb.Stepper(pipe, rows.batch(batch_size, seed=seed)).run(until="{until}")', metadata={"tags": ["look"]}),
        v4.new_markdown_cell("## Training"),
        v4.new_code_cell(_training(planned, values)),
        v4.new_markdown_cell("## What happened"),
        v4.new_code_cell("result.curves()"),
        v4.new_code_cell("result.summary"),
        v4.new_code_cell("result.symptoms"),
        v4.new_code_cell('last = result.traces[max(result.traces)].batch\nwb.views.samples(last, order="worst", rows=5)', metadata={"tags": ["look"]}),
    ]  # fmt: skip
    for number, cell in enumerate(cells):
        cell["id"] = f"verl-{number:02d}"
    kernel = {"kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}}
    write_text(Path(path), nbformat.writes(v4.new_notebook(cells=cells, metadata=kernel)) + "\n")
    return Path(path)


def _parameters(planned: VerlPlan) -> dict[str, Any]:
    """Return the notebook's parameters: name → value. `steps` is None where the command counts epochs."""
    known = arguments(planned.recipe)
    settings = {name: planned.settings.get(name, known[name].default) for name in _RECIPE if name in known}
    if "sampling" in planned.settings:
        settings["max_tokens"] = planned.settings["sampling"].settings.get("max_tokens")
    values = {
        "model": planned.model, "train_file": planned.train_files, "eval_file": planned.eval_files, "run": planned.train["run"],
        "resume": planned.train.get("resume", "never"), "steps": planned.train.get("steps"), "epochs": planned.epochs,
        "batch_size": planned.train["batch_size"], **settings, "lr": planned.engine.get("lr", 1e-6),
        "max_prompt_length": planned.rows.get("max_prompt_length"), "test_freq": planned.train.get("test_freq", 0),
        "save_freq": planned.train.get("save_freq", 0), "seed": planned.train.get("seed", 0),
    }  # fmt: skip
    values["max_tokens"] = values["max_tokens"] or 128
    if values["steps"] is not None:
        del values["epochs"]
    return values


def _parameter_lines(values: Mapping[str, Any]) -> str:
    lines = []
    for name, value in values.items():
        kind = {"train_file": "list[str]", "eval_file": "list[str]", "lr": "float", "kl_coef": "float"}.get(
            name, type(value).__name__
        )
        if name in ("steps", "ppo_mini_batch_size", "max_prompt_length"):
            kind = "int" if name == "steps" and value is not None else "Optional[int]"
        default = float(value) if kind == "float" else value
        lines.append(f"{name}: {kind} = {_source_of(default)}  # {_HELP[name]}")
    optional = "from typing import Optional\n\n" if any("Optional" in line for line in lines) else ""
    return optional + "\n".join(lines)


def _data(made: VerlPlan) -> str:
    rows: dict[str, Any] = {**made.rows, "max_prompt_length": Name("max_prompt_length")}
    named = replace(made, engine={**made.engine, "lr": Name("lr")}, rows=rows)
    parts = Name(f"[{_source_of(Call('rows', (Name('file'),), rows))} for file in train_file]")
    calls = data(named, Name("model"), Name("train_file"), Name("eval_file"), parts)
    lines = "\n".join(_statement(f"{name} = ", call) for name, call in calls)
    return lines + " if eval_file else None\nrows.report(policy.tokenizer)"


def _reward(made: VerlPlan) -> str:
    inner = "".join(f"    {_source_of(key)}: {_source_of(value)},\n" for key, value in made.reward.items())
    return f"reward = wb.reward_from({{\n{inner}}}, tokenizer=policy.tokenizer)\nreward"


def _recipe_settings(planned: VerlPlan) -> dict[str, Any]:
    """Return the recipe's settings, with those that are parameters of the notebook replaced by their variable names."""
    known = arguments(planned.recipe)
    names = {name: Name(name) for name in _RECIPE if name in known}
    settings = {**planned.settings, **names}
    if "sampling" in planned.settings:
        call = planned.settings["sampling"]
        settings["sampling"] = call._replace(settings={**call.settings, "max_tokens": settings.pop("max_tokens")})
    return settings


def _training(planned: VerlPlan, values: Mapping[str, Any]) -> str:
    names = ("steps", "batch_size", "seed", "run", "resume", "eval_rows", "test_freq", "save_freq")
    settings = {name: Name(name) for name in names} | {
        name: one for name, one in planned.train.items() if name not in names
    }
    if "epochs" in values:
        settings["steps"] = Name("steps or epochs * (len(rows) // batch_size)")
    return _statement("result = await ", Call("train", (Name("pipe"), Name("rows")), settings)) + "\nresult"


def _statement(start: str, call: Call) -> str:
    """Write a call as Python that begins with `start`: one line, or a line for each argument where that would be too
    long.

    A method of a call's result is written behind that call.
    """
    if call.name.startswith(".") and isinstance(call.args[0], Call):
        _, arguments = _parts(call._replace(name="", args=call.args[1:]))
        return f"{_statement(start, call.args[0])}{call.name}({', '.join(arguments)})"
    function, arguments = _parts(call)
    line = f"{start}{function}({', '.join(arguments)})"
    return line if len(line) <= 100 else "\n".join([f"{start}{function}(", *(f"    {one}," for one in arguments), ")"])


def _parts(call: Call) -> tuple[str, list[str]]:
    """Return the function of a call, and its arguments, as Python source."""
    args = [*map(_source_of, call.args)]
    function = args.pop(0) + call.name if call.name.startswith(".") else f"wb.{call.name}"
    return function, [*args, *(f"{key}={_source_of(value)}" for key, value in call.settings.items())]


def _source_of(value: Any) -> str:
    """Return a value as Python source."""
    if isinstance(value, Name):
        return str(value)
    if isinstance(value, Call):
        function, given = _parts(value)
        return function if value.bare else f"{function}({', '.join(given)})"
    if isinstance(value, str):
        return '"' + repr(value + "'")[1:-2] + '"' if '"' not in value else repr(value)
    if isinstance(value, list | tuple):
        inner = ", ".join(map(_source_of, value))
        return f"[{inner}]" if isinstance(value, list) else f"({inner}{',' if len(value) == 1 else ''})"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_source_of(key)}: {_source_of(one)}" for key, one in value.items()) + "}"
    return repr(value)
