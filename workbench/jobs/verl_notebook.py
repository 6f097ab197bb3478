"""Writes the notebook that a verl command stands for: parameters, data, algorithm, training, results, as a person would."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from workbench import recipes
from workbench.base.distribution import optional
from workbench.base.files import write_text
from workbench.compat.verl_account import Row
from workbench.compat.verl_command import TEXTS
from workbench.jobs.verl_plan import Call, Plan

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
_TITLES = {
    "grpo": "GRPO", "ppo": "PPO", "dapo": "DAPO", "rloo": "RLOO", "remax": "ReMax", "opo": "OPO", "gpg": "GPG", "gspo": "GSPO",
    "cispo": "CISPO", "reinforce_plus_plus": "REINFORCE++",
}  # fmt: skip


class _Name(str):
    """A parameter's name where its value would stand."""


def write(path: str | Path, source: str, made: Plan, near: Sequence[Row]) -> Path:
    """Write the notebook of a plan to `path`, and return that; `near` is where it is not verl to the letter."""
    values, name = _parameters(made), Path(path).name
    origin = "a verl command" if source in TEXTS else Path(source).name
    lines = [
        f"- `{row.key}{f'={row.value}' if row.value else ''}`: {row.why}{' (left out)' * (row.kind == 'refused')}"
        for row in near
    ]
    title = [
        f"# {_TITLES.get(made.recipe, made.recipe)}, as in {origin}", "",
        "Made by `workbench translate` from a verl command. Where it is not verl to the letter:", "", *(lines or ["- nowhere"]), "",
        "```", f"workbench check {name}      # everything that can be refused before work starts", f"workbench train {name}", "```",
    ]  # fmt: skip
    cells = [
        v4.new_markdown_cell("\n".join(title)),
        v4.new_markdown_cell("## Parameters\n\nEvery one can be set from the command line: `-p steps=100`."),
        v4.new_code_cell(_parameter_lines(values), metadata={"tags": ["parameters"]}),
        v4.new_code_cell("import workbench as wb"),
        v4.new_markdown_cell("## The data, checked"),
        v4.new_code_cell(_data(made)),
        *[v4.new_code_cell(text) for text in _objects(made)],
        v4.new_markdown_cell("## The algorithm\n\nA list of stages: replace one, change a setting, print it."),
        v4.new_code_cell(_algorithm(made)),
        v4.new_markdown_cell("One batch first, phase by phase; stepping up to the advantage changes no weights."),
        v4.new_code_cell('wb.Stepper(pipe, rows.batch(batch_size, seed=seed)).run(until="advantage")', metadata={"tags": ["look"]}),
        v4.new_markdown_cell("## Training"),
        v4.new_code_cell(_training(made, values)),
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


def _parameters(made: Plan) -> dict[str, Any]:
    """The notebook's parameters: name → value. `None` for steps where the command counts epochs."""
    known = inspect.signature(recipes.by_name(made.recipe)).parameters
    settings = {
        name: made.settings.get(name, known[name].default)
        for name in ("group_size", "ppo_mini_batch_size", "kl_coef", "max_tokens")
    }
    if "sampling" in made.settings:
        settings["max_tokens"] = made.settings["sampling"].settings.get("max_tokens")
    found = {
        "model": made.model, "train_file": made.train_files, "eval_file": made.eval_files, "run": made.train["run"],
        "resume": made.train.get("resume", "never"), "steps": made.train.get("steps"), "epochs": made.epochs,
        "batch_size": made.train["batch_size"], **settings, "lr": made.engine.get("lr", 1e-6),
        "max_prompt_length": made.rows.get("max_prompt_length"), "test_freq": made.train.get("test_freq", 0),
        "save_freq": made.train.get("save_freq", 0), "seed": made.train.get("seed", 0),
    }  # fmt: skip
    found["max_tokens"] = found["max_tokens"] or 128
    if found["steps"] is not None:
        del found["epochs"]
    return found


def _parameter_lines(values: Mapping[str, Any]) -> str:
    lines = []
    for name, value in values.items():
        kind = {"train_file": "list[str]", "eval_file": "list[str]", "lr": "float", "kl_coef": "float"}.get(
            name, type(value).__name__
        )
        if name in ("steps", "ppo_mini_batch_size", "max_prompt_length"):
            kind = "int" if name == "steps" and value is not None else "Optional[int]"
        told = float(value) if kind == "float" else value
        lines.append(f"{name}: {kind} = {_text(told)}  # {_HELP[name]}")
    optional = "from typing import Optional\n\n" if any("Optional" in line for line in lines) else ""
    return optional + "\n".join(lines)


def _data(made: Plan) -> str:
    engine = {**made.engine, "lr": _Name("lr"), **({"template_switches": made.switches} if made.switches else {})}
    rows: dict[str, Any] = {**made.rows, "max_prompt_length": _Name("max_prompt_length")}
    held = {name: one for name, one in rows.items() if name != "limit"} | (
        {"limit": made.eval_limit} if made.eval_limit else {}
    )
    read = _call("rows", "wb.rows", ["train_file"], rows)
    if made.weights is not None:
        parts = _call("", "wb.rows", ["file"], rows)
        read = _call("rows", "wb.datasets.mix", [f"[{parts} for file in train_file]"], {"weights": made.weights})
    fit = '.fitting(policy.tokenizer, overlong="drop")' if made.overlong == "drop" else ""
    return "\n".join(
        [
            _call("policy", "wb.engines.local", ["model"], engine),
            read + fit,
            _call("eval_rows", "wb.rows", ["eval_file"], held) + f"{fit} if eval_file else None",
            "rows.report(policy.tokenizer)",
        ]
    )


def _objects(made: Plan) -> Iterable[str]:
    """Cells that make what the recipe gets: reward, tools and users, critic."""
    if made.reward:
        inner = "".join(f"    {_text(key)}: {_text(value)},\n" for key, value in made.reward.items())
        yield f"reward = wb.reward_from({{\n{inner}}}, tokenizer=policy.tokenizer)\nreward"
    if isinstance(made.agent, dict):
        own = dict(made.agent)
        for name in ("tools", "interactions"):
            if name in own:
                own[name] = _Name(f"wb.agents.load_{name}({_text(own[name])})")
        yield _call("agent", "wb.agents.ToolAgent", [], own) + "\nagent"
    if made.critic is not None:
        own = dict(made.critic)
        base = f"wb.engines.local({_text(own.pop('path'))})" if "path" in own else "policy"
        yield _call("critic", f"{base}.critic", [], own)


def _algorithm(made: Plan) -> str:
    args = ["policy", *(["reward"] if made.reward else [])]
    lines = [_call("pipe", f"wb.recipes.{made.recipe}", args, _recipe_settings(made))]
    changes = dict(made.changes)
    if made.advantage is not None:
        own = {**made.advantage.settings, **changes.pop("advantage", {})}
        if "old_log_prob" in changes:
            lines.append(_call("pipe", "pipe.replace", ['"old_log_prob"'], changes.pop("old_log_prob")))
        lines.append(_call("pipe", "pipe.replace", ['"advantage"', _text(made.advantage._replace(settings=own))], {}))
    lines += [_call("pipe", "pipe.replace", [_text(stage)], own) for stage, own in changes.items()]
    if made.correction:
        lines.append(_call("pipe", "wb.recipes.with_rollout_correction", ["pipe"], made.correction))
    if made.resample is not None:
        lines.append(f'pipe = pipe.insert_after("advantage", {_text(made.resample)})')
    return "\n".join([*lines, "pipe"])


def _recipe_settings(made: Plan) -> dict[str, Any]:
    """The recipe's settings; those that are parameters by their names."""
    settings = {
        **made.settings,
        **{name: _Name(name) for name in ("group_size", "ppo_mini_batch_size", "kl_coef", "max_tokens")},
    }
    if "sampling" in made.settings:
        del settings["max_tokens"]
        call = made.settings["sampling"]
        settings["sampling"] = call._replace(settings={**call.settings, "max_tokens": _Name("max_tokens")})
    objects = {"agent": isinstance(made.agent, dict), "critic": made.critic is not None, "rows": made.recipe == "dapo"}
    settings |= {name: _Name(name) for name, there in objects.items() if there}
    settings |= {"agent": made.agent} if isinstance(made.agent, str) else {}
    return settings | ({"reference": _Name(f"wb.engines.local({_text(made.reference)})")} if made.reference else {})


def _training(made: Plan, values: Mapping[str, Any]) -> str:
    names = ("steps", "batch_size", "seed", "run", "resume", "eval_rows", "test_freq", "save_freq")
    own = {
        **{name: _Name(name) for name in names},
        **{name: one for name, one in made.train.items() if name not in names},
    }
    if "epochs" in values:
        own["steps"] = _Name("steps or epochs * (len(rows) // batch_size)")
    return _call("result", "await wb.train", ["pipe", "rows"], own) + "\nresult"


def _call(name: str, function: str, args: Sequence[str], settings: Mapping[str, Any]) -> str:
    """`name = function(args, settings)`, on one line where it fits; without a name the call alone."""
    given = [*args, *(f"{key}={_text(value)}" for key, value in settings.items())]
    function = f"{name} = {function}" if name else function
    line = f"{function}({', '.join(given)})"
    return line if len(line) <= 100 else "\n".join([f"{function}(", *(f"    {one}," for one in given), ")"])


def _text(value: Any) -> str:
    """A value as Python writes it."""
    if isinstance(value, _Name):
        return str(value)
    if isinstance(value, Call):
        if not value.args and not value.settings:
            return f"wb.{value.name}" if value.name.startswith("functional.") else f"wb.{value.name}()"
        given = [*map(_text, value.args), *(f"{key}={_text(one)}" for key, one in value.settings.items())]
        return f"wb.{value.name}({', '.join(given)})"
    if isinstance(value, str):
        return '"' + repr(value + "'")[1:-2] + '"' if '"' not in value else repr(value)
    if isinstance(value, list | tuple):
        inner = ", ".join(map(_text, value))
        return f"[{inner}]" if isinstance(value, list) else f"({inner}{',' if len(value) == 1 else ''})"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_text(key)}: {_text(one)}" for key, one in value.items()) + "}"
    return repr(value)
