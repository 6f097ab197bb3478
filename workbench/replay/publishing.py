"""A run's model in a folder of its own, and on the Hugging Face hub with a card of what the run knows."""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from workbench.base.errors import RunError, SettingError, WorkbenchError, first_line
from workbench.base.files import MANIFEST
from workbench.base.hub import is_hub_name
from workbench.base.shown import Shown, shown
from workbench.engines.exporting import check_form, write_form
from workbench.engines.local_engine.loading import resolve
from workbench.replay.card import write_card
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
        """Return (label, value) pairs, for display."""
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
