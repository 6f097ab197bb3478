"""A model card from what a run knows: base, data, held-out rewards, recipe as a table and as code, curves, reward, findings."""

from __future__ import annotations

import inspect
import json
import re
import textwrap
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from workbench.base.distribution import version
from workbench.base.errors import WorkbenchError
from workbench.base.hub import HUB_SECONDS, is_hub_name
from workbench.datasets.hub import named
from workbench.engines.local_engine.loading import folder_of
from workbench.engines.local_engine.quantised import KINDS

CURVES = "curves.png"
_ROOMS = ("engines", "stages", "agents", "functional")
"""Packages whose public names a recipe is made of."""
_LICENCE = re.compile(r"^license:\s*[\"']?([\w.\-]+)", re.MULTILINE)


def write_card(run: Any, folder: Path, name: str, base: str, form: str) -> str:
    """Write README.md and the curves to the folder of a saved model; returns the card. `base` is the base model's hub name or "".

    Where there is a picture of the run's curves it is taken, else one is drawn.
    """
    settings, summary = run.settings, run.summary
    with suppress(WorkbenchError):
        if (drawn := run.path / CURVES).is_file():
            (folder / CURVES).write_bytes(drawn.read_bytes())
        else:
            run.figure(path=folder / CURVES)
    actor = settings["engines"].get("actor") or {}
    path = str(actor.get("path", ""))
    data = [("training", settings["data"], settings["data_hash"])]
    if held_out := settings.get("eval_rows"):
        data.append(("held out", held_out["source"], held_out["data_hash"]))
    reward = "\n\n".join(settings.get("sources", {}).get("reward", {}).values())
    parts_of = {**settings["stages"], "train": settings["train"]}
    versions = {"workbench": version(), "commit": settings.get("code"), **settings.get("versions", {})}
    used = [(use, f"{_place(one)}, hash {of_it}") for use, one, of_it in data]
    settings_of = _table([(one, _shortly(what)) for one, what in parts_of.items()])
    sections = {
        "Held-out reward": _table(summary.pairs() if summary else []),
        "Data": _table(used),
        "Recipe": f"{settings_of}\n\n{_fenced(recipe(settings))}",
        "Curves": f"![curves]({CURVES})" if (folder / CURVES).is_file() else "",
        "Reward": _fenced(reward) if reward else "",
        "Findings": "\n".join(f"- {_cell(one)}" for one in run.diagnose().findings) or "None.",
        "Versions": _table([(one, str(found)) for one, found in versions.items() if found]),
    }
    start = (
        f"A model trained by reinforcement learning with workbench, from {_place(base or path or 'a model in memory')}."
    )
    front = _front(base or path, [source for _, source, _ in data], form)
    head = [front, f"# {name.partition('/')[2]}", f"{start} {_numbers(actor, form)}".strip()]
    text = "\n\n".join([*head, *(f"## {title}\n\n{one}" for title, one in sections.items() if one)]) + "\n"
    (folder / "README.md").write_text(text, encoding="utf-8")
    return text


def _numbers(actor: Mapping[str, Any], form: str) -> str:
    """Say which numbers were trained and kept in which precision, as sentences; "" for all weights in the default one."""
    rank, kept, dtype = (actor.get(name) for name in ("lora_rank", "base_dtype", "dtype"))
    parts = [f"Passes were in {dtype}."] if dtype not in (None, "auto", "float32") else []
    if rank:
        merged = "" if form == "adapter" else ", merged into it"
        parts.append(f"Trained is a LoRA adapter of rank {rank} over a base kept in {kept or 'float32'}{merged}.")
    if kept in KINDS and form == "adapter":
        parts.append("Open it over a base in the same numbers: over another one it answers differently.")
    return " ".join(parts)


def _front(base: str, data: list[str], form: str) -> str:
    """Build the card's front matter, as YAML whose values are JSON."""
    known = [one for one in data if "@" in one and named(one)]
    facts = {
        "library_name": {"adapter": "peft", "gguf": "gguf"}.get(form, "transformers"),
        "pipeline_tag": "text-generation",
        "tags": ["workbench", "reinforcement-learning"],
        "license": licence(base),
        "base_model": base if is_hub_name(base) else None,
        "datasets": sorted({one.partition(":")[0] for one in known}) or None,
    }
    return "\n".join(["---", *(f"{key}: {json.dumps(value)}" for key, value in facts.items() if value), "---"])


def licence(base: str) -> str | None:
    """Return the licence that the base model's own card names, from its folder or the hub; None where it is not known."""
    card = folder_of(base) / "README.md"
    if base and card.is_file() and (found := _LICENCE.search(card.read_text("utf-8", "replace"))):
        return found[1]
    with suppress(Exception):  # the card can be written without it
        from huggingface_hub import HfApi

        return str(HfApi().model_info(base, timeout=HUB_SECONDS).card_data.license or "")  # type: ignore[union-attr]
    return None


def recipe(settings: Mapping[str, Any]) -> str:
    """Write a run's settings as the Python that makes the same pipeline and trains it; a reward that was recorded by its name
    alone stands there by that name.
    """
    lines = ["import workbench as wb", ""]
    for role, record in settings["engines"].items():
        kind = "fsdp" if record.get("ranks") else "local"
        chosen = {key: one for key, one in record.items() if key not in ("path", "files_crc32")}
        first = [repr(_place(record.get("path", "")))]
        opened = _call(f"wb.engines.{kind}", resolve_name(f"workbench.engines:{kind}"), chosen, first)
        lines.append(f"{role} = {opened}")
    lines += [f"rows = wb.rows({_place(settings['data'])!r})", "pipe = wb.Pipeline(", "    ["]
    for one in settings.get("pipeline", ()):
        made = _made(one["class"] or one["name"], one["arguments"])
        for role, record in settings["engines"].items():  # of its adapters switched off, in its precision
            made = made.replace(_frozen(record), f"{role}.reference()")
        lines.append(f"        {made},")
    plan = {key: value for key, value in settings["train"].items() if key not in ("trackers", "project", "experiment")}
    trained = _call("wb.train", resolve_name("workbench.runs.settings:TrainSettings"), plan, ["pipe", "rows"])
    return "\n".join([*lines, "    ]", ")", f"await {trained}"])


def _call(path: str, kind: Any, arguments: Mapping[str, Any], first: list[str]) -> str:
    """Write a call, without the arguments that are the defaults of the parameters of `kind`."""
    known = inspect.signature(kind).parameters if kind is not None else {}
    texts = {key: _code(value) for key, value in arguments.items()}
    defaults = {key: _code(one.default) for key, one in known.items() if one.default is not one.empty}
    return f"{path}({', '.join([*first, *(f'{key}={one}' for key, one in texts.items() if defaults.get(key) != one)])})"


def _made(name: str, arguments: Mapping[str, Any]) -> str:
    """Write the call that makes an object of this package."""
    room = next((room for room in _ROOMS if hasattr(resolve_name(f"workbench.{room}"), name)), None)
    kind = resolve_name(f"workbench.{room}:{name}") if room else None
    return _call(f"wb.{room}.{name}" if room else name, kind, arguments, [])


def _code(plain: Any) -> str:
    """Write a recorded plain value as Python."""
    if isinstance(plain, list | tuple):
        return f"[{', '.join(map(_code, plain))}]"
    if not isinstance(plain, dict):
        return repr(plain)
    if word := {"settings", "controller", "part"} & plain.keys():
        return _made(plain[word.pop()], plain["values"] if "values" in plain else plain["arguments"])
    if "stage" in plain:
        return _made(plain["stage"]["class"], plain["stage"]["arguments"])
    if "mapping" in plain:
        return f"{{{', '.join(f'{key!r}: {_code(one)}' for key, one in plain['mapping'].items())}}}"
    if "frozen" in plain:
        return _frozen(plain["frozen"])
    if "function" in plain:
        return f"wb.functional.{plain['function'].rpartition(':')[2]}"
    return str(plain.get("engine") or plain.get("missing") or "…")


def _frozen(record: Mapping[str, Any]) -> str:
    return f"wb.engines.local({_place(record.get('path', ''))!r}).reference()"


def _place(text: Any) -> str:
    """Return a path without the folders of this machine; other texts unchanged."""
    return Path(text).name if isinstance(text, str) and Path(text).is_absolute() else str(text)


def _table(rows: list[tuple[str, str]]) -> str:
    lines = [("", ""), ("---", "---"), *((_cell(one), _cell(other)) for one, other in rows)]
    return "\n".join(f"| {one} | {other} |" for one, other in lines) if rows else ""


def _cell(text: object) -> str:
    return " ".join(str(text).split()).replace("<", "&lt;").replace("|", "\\|")


def _shortly(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={_place(one)}" for key, one in values.items() if one not in (None, "()", []))


def _fenced(text: str) -> str:
    """Put Python in a fence that no line of it can close."""
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall(r"`+", text)), default=0))
    return f"{fence}python\n{textwrap.dedent(text).strip()}\n{fence}"
