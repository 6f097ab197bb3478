"""Repositories of the Hugging Face hub at one commit: the names of their files, and the files through the hub's own cache.

The hub's library sends the requests, with its own login, cache and offline mode (HF_HUB_OFFLINE). Files are copied here and read as
data; nothing of a repository is executed.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from workbench.base.errors import WorkbenchError, boundary, first_line
from workbench.base.shown import shown

HUB_SECONDS = 5.0
"""How long the hub has to answer a question about a repository."""
FILE_LIMIT = 64 << 30
"""Bytes that one file of a repository may have."""
NAMES_LIMIT = 100_000
"""Files that a repository may have."""


def is_hub_name(text: str) -> bool:
    """Whether a text can be a hub name (`owner/model`): the hub's rules allow it, and its first part is not a local
    folder."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    owner, slash, _ = text.partition("/")
    with suppress(HFValidationError):
        validate_repo_id(text)
        return bool(slash) and not Path(owner).is_dir()
    return False


def why(error: Exception, what: str = "model") -> tuple[str, str]:
    """Explain a failed request to the hub about a `what`; returns (what was found, what to do) for the error message."""
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, OfflineModeIsEnabled, RepositoryNotFoundError

    if isinstance(error, GatedRepoError):  # a kind of RepositoryNotFoundError
        return f"a gated {what} on the hub", "ask for access there, then log in: `hf auth login`"
    if isinstance(error, RepositoryNotFoundError):
        absent = f"no such folder, and no such {what} on the hub (or a private one)"
        return absent, f"check the name; for a private {what} log in: `hf auth login`"
    if isinstance(error, OfflineModeIsEnabled):
        absent = f"no such folder, and no such {what} in the local cache (HF_HUB_OFFLINE is set)"
        return absent, f"check the path, or download the {what} first: `hf download`"
    if isinstance(error, HfHubHTTPError):
        return f"no such folder; the hub answered {shown(first_line(error))}", "check the path, or try again"
    absent = f"no such folder, and the hub cannot be reached from here ({shown(first_line(error, 120))})"
    return absent, f"check the path, or copy the {what}'s folder to this machine"


class Repository:
    """A repository at the first of some `revisions` that exists (branches, tags, commits; None: the default branch).

    `kind` is the hub's word: `dataset` or `model`. Where the hub does not answer, the revision that was last downloaded is read
    from the local cache. Raises `error` where neither has it, with the nearest names.
    """

    def __init__(
        self, kind: str, name: str, revisions: Sequence[str | None], error: type[WorkbenchError], what: str
    ) -> None:
        from huggingface_hub import HfApi
        from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

        self.kind, self.name, self._error = kind, name, error
        self.commit = ""
        """The commit's hash."""
        self.sizes: dict[str, int] = {}
        """Name of each file → its bytes; names that lead out of the repository are left out."""
        wanted = [one or "main" for one in revisions]
        for self._revision in wanted:
            try:
                ask: Any = HfApi().dataset_info if kind == "dataset" else HfApi().model_info
                about = ask(name, revision=self._revision, files_metadata=True, timeout=HUB_SECONDS)
                self.commit = str(about.sha)
                files = {one.rfilename: int(one.size or 0) for one in about.siblings or ()}
                self.sizes = {name: size for name, size in files.items() if {"", ".."}.isdisjoint(name.split("/"))}
                break
            except Exception as error_of_it:  # noqa: BLE001 - offline, or as many kinds as ways to have no network
                cause = error_of_it
                if isinstance(cause, RevisionNotFoundError):
                    continue
                if not isinstance(cause, RepositoryNotFoundError):
                    any(map(self._cached, wanted))
                break
        if not self.commit:
            self._refuse(cause, what)
        if len(self.sizes) > NAMES_LIMIT:
            raise error(f"{name} on the hub", expected=f"at most {NAMES_LIMIT:,} files", found=f"{len(self.sizes):,}")

    def _cached(self, revision: str) -> bool:
        """Take the commit and the files that the local cache has of a revision; returns whether it has any."""
        from huggingface_hub import constants

        storage = Path(constants.HF_HUB_CACHE) / f"{self.kind}s--{self.name.replace('/', '--')}"
        branch = storage / "refs" / revision
        folder = storage / "snapshots" / (branch.read_text().strip() if branch.is_file() else revision)
        files = [path for path in folder.rglob("*") if path.is_file()] if folder.is_dir() else []
        self.sizes = {path.relative_to(folder).as_posix(): path.stat().st_size for path in files}
        self.commit, self._revision = folder.name if files else "", revision
        return bool(files)

    def _refuse(self, cause: Exception, what: str) -> None:
        from huggingface_hub.errors import OfflineModeIsEnabled, RepositoryNotFoundError, RevisionNotFoundError

        found, do = why(cause, what)
        if isinstance(cause, RevisionNotFoundError):
            found, do = f"no revision {self._revision!r}", "name a branch, a tag or a commit that it has"
        elif isinstance(cause, RepositoryNotFoundError | OfflineModeIsEnabled):
            close = difflib.get_close_matches(self.name, sorted({*self._known()}), n=3, cutoff=0.5)
            do = f"did you mean {', '.join(close)}? Else {do}" if close else do
        raise self._error(f"no {what} {self.name!r}", found=found, do=do) from cause

    def _known(self) -> Iterable[str]:
        """Yield names that may be meant: those in the local cache, and what the hub finds for the name or the owner."""
        from huggingface_hub import HfApi, constants

        begin = f"{self.kind}s--"
        kept = Path(constants.HF_HUB_CACHE).glob(f"{begin}*")
        yield from (one.name.removeprefix(begin).replace("--", "/") for one in kept)
        owner, _, last = self.name.partition("/")
        search: Any = HfApi().list_datasets if self.kind == "dataset" else HfApi().list_models
        for asked in ({"search": last}, {"author": owner}):
            with suppress(Exception):  # it is a help alone
                yield from (one.id for one in search(**asked, limit=50))

    def get(self, name: str) -> Path:
        """Return a file's place in the local cache, where it is downloaded first if it is not there.

        Raises the repository's error for a file that is too large, or cannot be downloaded.
        """
        from huggingface_hub import hf_hub_download

        if (size := self.sizes.get(name, 0)) > FILE_LIMIT:
            expected, found = f"at most {FILE_LIMIT >> 30} GiB", f"{size / 2**30:.1f} GiB"
            raise self._error(f"file {name} of {self.name}", expected=expected, found=found)
        with boundary(f"downloading {name} of {self.name}", self._error):
            path = Path(hf_hub_download(self.name, name, repo_type=self.kind, revision=self._revision))
        folder = path.parents[name.count("/")]
        self.commit = self._revision = folder.name  # a branch may move: further files are of the same commit
        return path
