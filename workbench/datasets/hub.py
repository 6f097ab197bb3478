"""Data sets of the Hugging Face hub by name, as `wb.rows` takes them: the hub's own parquet export, or a repository's data files.

A repository's loading script is never run: what has no export and no data files is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from workbench.base.errors import DataError, unknown
from workbench.base.hub import Repository, is_hub_name
from workbench.datasets.files import ABOUT, SIZE_LIMIT, SPLIT, SUFFIXES

EXPORT = "refs/convert/parquet"
"""The branch where the hub keeps a data set as parquet: `config/split/0000.parquet`."""
SHARD = re.compile(r"-\d{5}-of-\d{5}$")
"""Ends the name of one of several files that are a split."""
_NAME = re.compile(r"(hf://)?(?:datasets/)?([^/:@\s]+/[^/:@\s]+)(?::([^@\s]+))?(?:@(\S+))?")


@dataclass(frozen=True)
class Named:
    """A data set by name: `owner/name`, `owner/name:config`, `owner/name:config/split`, each also with `@revision`."""

    name: str
    part: str = ""
    """A config, a split, both, or one of the repository's data files."""
    revision: str | None = None

    def splits(self, repository: Repository) -> dict[str, list[str]]:
        """Return `config/split` → its files, of those that the part may mean. Raises `DataError` where that is not one."""
        splits = splits_of(repository.sizes)
        if self.part in repository.sizes and self.part.endswith(SUFFIXES):
            return {self.part: [self.part]}
        if not splits:
            expected = f"the hub's parquet export, or files of {', '.join(SUFFIXES)}"
            do = "a loading script is never run: name a data set that has files"
            raise DataError(f"data set {self.name!r}", expected=expected, found="none", do=do)
        meant = {key: files for key, files in splits.items() if self.part in ("", key, *key.rsplit("/", 1))}
        if not meant:
            raise DataError(unknown(f"config or split of {self.name}", self.part, splits))
        if len(meant) > 1:
            do = f"take one: wb.rows({f'{self.name}:{next(iter(meant))}'!r})"
            raise DataError(f"{self.name} has several splits", expected="one split", found=", ".join(meant), do=do)
        return meant

    def files(self) -> Iterator[tuple[str, Path]]:
        """Yield (`owner/name:config/split@commit`, the file on this machine) for each file, downloaded when it is its turn.

        Raises `DataError` where there is no such data set, config or split, and for more than 8 GiB.
        """
        revisions = (self.revision,) if self.revision else (EXPORT, None)
        repository = Repository("dataset", self.name, revisions, DataError, "data set")
        ((part, names),) = self.splits(repository).items()
        size = 0
        for name in names:
            size += repository.sizes[name]
            if size > SIZE_LIMIT:
                expected, do = f"at most {SIZE_LIMIT >> 30} GiB", "name some of its files, or take limit=…"
                raise DataError(f"{self.name}:{part}", expected=expected, found=f"{size / 2**30:.1f} GiB", do=do)
            path = repository.get(name)
            yield f"{self.name}:{part}@{repository.commit}", path


def named(text: str | Path) -> Named | None:
    """Read a text as a data set's name; None where it is a path: a file's ending, or a first part that is a folder here."""
    match = _NAME.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        return None
    prefix, name, part, revision = match.groups()
    path = not (prefix or part) and (name.endswith(SUFFIXES) or Path(text).exists())
    return None if path or not is_hub_name(name) else Named(name, part or "", revision)


def splits_of(names: Mapping[str, int]) -> dict[str, list[str]]:
    """Group a repository's data files as `config/split` → files, by their folders and names as the hub does.

    Of files of several kinds for one split those of one kind are taken, parquet first.
    """
    found: dict[str, dict[str, list[str]]] = {}
    for path in map(PurePosixPath, sorted(names)):
        if path.suffix not in SUFFIXES or path.name in ABOUT:
            continue
        folders = [one for one in path.parent.parts if one != "data"]
        stem = SHARD.sub("", path.stem)
        words = [stem] if stem != path.stem else SPLIT.findall(path.stem.lower())
        split = words[-1] if words else folders.pop() if folders else "train"
        key = f"{'/'.join(folders) or 'default'}/{split}"
        found.setdefault(key, {}).setdefault(path.suffix, []).append(str(path))
    return {key: kinds[min(kinds, key=SUFFIXES.index)] for key, kinds in found.items()}
