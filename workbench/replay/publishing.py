"""Saves a run's model to a folder, and publishes it on the Hugging Face hub with a model card: base, data, held-out
rewards, recipe as a table and as code, curves, reward, findings.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import sys
import tempfile
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from workbench.base.distribution import version
from workbench.base.errors import RunError, SettingError, WorkbenchError, first_line
from workbench.base.files import MANIFEST
from workbench.base.hub import HUB_SECONDS, is_hub_name
from workbench.base.shown import Shown, shown
from workbench.datasets.hub import named
from workbench.engines.exporting import check_form, write_form
from workbench.engines.local_engine.loading import folder_of, resolve
from workbench.engines.local_engine.quantised import KINDS
from workbench.runs.conditions import BEST
from workbench.runs.folder import written

_GIT = ".gitattributes"
"""The file that the hub writes when it makes a repository."""
_WEIGHTS = (".safetensors", ".safetensors.index.json")
_TEXTS = (".json", ".md", ".jinja", ".txt")
_NAME = re.compile(r"[\w.\-]+/[\w.\-]+")


def save(run: Any, folder: str | Path, form: str, dtype: str | None, step: int | str | None) -> Path:
    """Write the model of a run to a new folder: see `Run.save`."""
    check_form(form, dtype)
    target = Path(folder).absolute()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        do = "name a new folder, or remove that one"
        raise RunError(f"{folder} exists", expected="a new or an empty folder", found="files", do=do)
    target.parent.mkdir(parents=True, exist_ok=True)
    record = (run.settings.get("engines") or {}).get("actor", {})
    base_dtype = str(record.get("base_dtype", "float32"))
    with _trained(run, step) as source:
        written(target, lambda staging: write_form(source, staging, form, dtype, target.name, base_dtype))
    return next(target.glob("*.gguf")) if form == "gguf" else Path(folder)


@contextmanager
def _trained(run: Any, step: int | str | None) -> Iterator[Path]:
    """Context manager: yields the folder of the trained model after a step, of its checkpoint or restored for this."""
    if step is None or step == BEST or step in run.checkpoints:
        yield Path(resolve(run.checkpoint(step)))
        return
    with tempfile.TemporaryDirectory(prefix="workbench-save-") as folder:
        run.engine(step).save(Path(folder))
        yield Path(folder)


# --- the hub ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, repr=False)
class Publication(Shown):
    """What `Run.publish` uploads and where, or has uploaded."""

    repository: str
    """Its name on the hub."""
    url: str
    private: bool
    files: Mapping[str, int]
    """Name of each file → its bytes."""
    card: str
    """The text of README.md."""
    commit: str = ""
    """The address of the one commit; "" where nothing was sent."""

    def lines(self) -> list[tuple[str, str]]:
        """Return the publication as (label, value) pairs for display: repository, files, size, commit."""
        files = [f"{name} ({size:,} bytes)" for name, size in self.files.items()]
        return [
            ("repository", f"{self.url} ({'private' if self.private else 'public'})"),
            ("files", ", ".join(files)),
            ("in all", f"{len(files)} files, {sum(self.files.values()) / 2**20:,.1f} MiB"),
            ("published", self.commit or "not yet: dry_run=False sends it"),
        ]


def publish(run: Any, name: str, how: Mapping[str, Any], asked: Mapping[str, Any]) -> Publication:
    """Upload a run's model with a card, as one commit: see `Run.publish`. `how` are the arguments of `save`, `asked`
    the other arguments of `Run.publish`.
    """
    from huggingface_hub.constants import ENDPOINT

    if not _NAME.fullmatch(name):
        raise SettingError("name of a repository", expected="owner/name", found=repr(name))
    dry = in_job() if asked["dry_run"] is None else asked["dry_run"]
    token = "" if dry else _logged_in(name.partition("/")[0])
    with tempfile.TemporaryDirectory(prefix="workbench-publish-") as place:
        folder = Path(place) / name.partition("/")[2]
        save(run, folder, **how)
        (folder / MANIFEST).unlink(missing_ok=True)
        if how["form"] == "adapter":
            _name_base(folder / "adapter_config.json", asked["base"])
        card = write_card(run, folder, name, asked["base"], how["form"])
        files = {one.name: one for one in sorted(folder.iterdir())}
        sizes = {one: path.stat().st_size for one, path in files.items()}
        url = f"{ENDPOINT}/{name}"
        plan = Publication(repository=name, url=url, private=asked["private"], files=sizes, card=card)
        sys.stdout.write(f"{plan!r}\n")
        if dry:
            return plan
        for one, path in files.items():
            if path.suffix in _TEXTS and token.encode() in path.read_bytes():
                do = "take it out of the run's settings and texts"
                raise RunError(f"file {one} has the hub's token in it", do=do)
        return replace(plan, commit=_upload(plan, files, asked["update"]))


def in_job() -> bool:
    """Whether this process is the kernel of a job: of `workbench train`, or started by papermill."""
    parent = Path(f"/proc/{os.getppid()}/cmdline")
    return bool(os.environ.get("WORKBENCH_JOB")) or (parent.is_file() and b"papermill" in parent.read_bytes())


def _logged_in(owner: str) -> str:
    """Return the token of the hub's own login. Raises `RunError` where there is none, or it may not write for `owner`."""
    from huggingface_hub import HfApi, get_token

    do, token = "log in with a token that may write: `hf auth login`", get_token()
    if not token:
        raise RunError("publishing needs a login at the hub", found="none", do=do)
    try:
        me = HfApi().whoami()
    except Exception as cause:
        raise RunError("the hub refuses the login", found=shown(first_line(cause)), do=do) from cause
    owners = [me["name"], *(one["name"] for one in me.get("orgs", ()))]
    if owner not in owners:
        raise RunError("no permission to publish", expected=f"a name of {', '.join(owners)}", found=owner, do=do)
    return token


def _name_base(path: Path, base: str) -> None:
    """Write the base model's hub name into an adapter's configuration. Raises `SettingError` where it is not known."""
    config = json.loads(path.read_text(encoding="utf-8"))
    config["base_model_name_or_path"] = base = base or config["base_model_name_or_path"]
    if not is_hub_name(base):
        do = "name it: publish(…, base='owner/model')"
        raise SettingError("base of a published adapter", expected="a name on the hub", found=repr(base), do=do)
    path.write_text(json.dumps(config, indent=1), encoding="utf-8")


def _upload(plan: Publication, files: Mapping[str, Path], update: bool) -> str:
    """Upload files as one commit and return its address; a repository made for them is private until then.

    Raises `RunError` where something fails: what has arrived is not sent again at the next call.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

    api, name = HfApi(), plan.repository
    try:
        if not api.repo_exists(name):
            api.create_repo(name, private=True)
        there = api.model_info(name)
        held = {one.rfilename for one in there.siblings or ()} - {_GIT}
        if held and bool(there.private) != plan.private:
            what, do = f"{plan.url} is {'private' if there.private else 'public'}", "change it there, or the argument"
            raise RunError(what, expected=f"private={plan.private}", do=do)
        if held and not update:
            do = "update=True adds one commit (earlier ones stay there), or take another name"
            raise RunError(f"{plan.url} exists", expected="a new repository", found=f"{len(held)} files", do=do)
        new = any(one.endswith(_WEIGHTS) for one in files)
        old = [one for one in held - files.keys() if new and "/" not in one and one.endswith(_WEIGHTS)]
        parts: list[Any] = [*map(CommitOperationAdd, files, files.values()), *map(CommitOperationDelete, old)]
        made = api.create_commit(name, parts, commit_message="Publish with workbench", parent_commit=there.sha)
        if bool(there.private) != plan.private:
            api.update_repo_settings(name, private=plan.private)
    except WorkbenchError:
        raise
    except Exception as cause:  # the library, and what it is built on, have their own errors
        do = "publish again: what has arrived is not sent again, and nothing is visible before the last commit"
        raise RunError(f"publishing {name} failed", found=shown(first_line(cause)), do=do) from cause
    return str(made.commit_url)


# --- the card -----------------------------------------------------------------------------------------

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
