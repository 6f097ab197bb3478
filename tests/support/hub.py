"""A Hugging Face hub on loopback: the HTTP API that `huggingface_hub` speaks, over repositories in memory, with faults to order."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

from support.web import served

TOKEN = "hf_aSecretThatNobodyWritesAnywhere"
LARGE = (".safetensors", ".gguf", ".png", ".parquet")
Files = Mapping[str, bytes]


def sha(*parts: object) -> str:
    return hashlib.sha1(repr(parts).encode()).hexdigest()


@dataclass
class Repo:
    """A repository: its commits, each with all files, and its branches."""

    private: bool = False
    commits: dict[str, Files] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)

    def commit(self, files: Files, branch: str = "main") -> str:
        name = sha(len(self.commits), sorted(files.items()))
        self.commits[name], self.refs[branch] = dict(files), name
        return name

    @property
    def files(self) -> Files:
        return self.commits[self.refs["main"]]


@dataclass
class FakeHub:
    """The hub. `broken` maps a pattern of `METHOD path` to what happens at its next requests: a status, or "cut" (no answer)."""

    url: str = ""
    repos: dict[tuple[str, str], Repo] = field(default_factory=dict)
    users: dict[str, dict[str, Any]] = field(default_factory=lambda: {TOKEN: {"name": "me", "orgs": []}})
    objects: dict[str, bytes] = field(default_factory=dict)
    broken: dict[str, list[int | str]] = field(default_factory=dict)
    seen: list[str] = field(default_factory=list)
    """`METHOD path` of each request."""

    def add(self, kind: str, name: str, files: Files, branch: str = "main", private: bool = False) -> str:
        return self.repos.setdefault((kind, name), Repo(private)).commit(files, branch)

    def asked(self, pattern: str) -> list[str]:
        return [one for one in self.seen if re.search(pattern, one)]


class Handler(BaseHTTPRequestHandler):
    hub: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None: ...

    def do_GET(self) -> None:
        self._do()

    do_HEAD = do_POST = do_PUT = do_GET

    def _do(self) -> None:
        split = urlsplit(self.path)
        self.words, self.query = unquote(split.path).strip("/"), parse_qs(split.query)
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        line = f"{self.command} {self.words}"
        self.hub.seen.append(line)
        for pattern, faults in self.hub.broken.items():
            if faults and re.search(pattern, line):
                fault = faults.pop(0)
                if fault == "cut":
                    self.close_connection = True
                    self.connection.shutdown(socket.SHUT_RDWR)
                    return
                return self._answer(int(fault), {"error": f"the hub was told to answer {fault}"})
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        self.user = self.hub.users.get(token)
        if token and self.user is None:
            wrong = "Invalid credentials in Authorization header"
            return self._answer(401, {"error": wrong}, {"X-Error-Message": wrong})
        for pattern, method in ROUTES:
            if found := re.fullmatch(pattern, line):
                return getattr(self, method)(**found.groupdict())
        self._answer(404, {"error": f"no route {line}"})

    def _answer(self, status: int, body: Any = None, headers: Mapping[str, str] | None = None) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    # --- reading ---------------------------------------------------------------------------------

    def _repo(self, kind: str | None, name: str) -> Repo | None:
        repo = self.hub.repos.get(((kind or "models").strip("/").removesuffix("s"), name))
        if repo is None or (repo.private and not self._may_write(name)):
            self._answer(401, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})
            return None
        return repo

    def _commit(self, repo: Repo, revision: str) -> str | None:
        name = repo.refs.get(revision, revision)
        if name not in repo.commits:
            self._answer(404, {"error": "Invalid rev id"}, {"X-Error-Code": "RevisionNotFound"})
            return None
        return name

    def info(self, kind: str, name: str, revision: str | None = None) -> None:
        if (repo := self._repo(kind, name)) and (commit := self._commit(repo, revision or "main")):
            files = repo.commits[commit].items()
            siblings = [{"rfilename": path, "size": len(data), "blobId": sha(data)} for path, data in files]
            about = {"id": name, "sha": commit, "private": repo.private, "siblings": siblings}
            self._answer(200, about)

    def resolve(self, name: str, revision: str, file: str, kind: str | None = None) -> None:
        if (repo := self._repo(kind, name)) and (commit := self._commit(repo, revision)):
            data = repo.commits[commit].get(file)
            if data is None:
                return self._answer(404, {"error": "Entry not found"}, {"X-Error-Code": "EntryNotFound"})
            self._answer(200, data, {"X-Repo-Commit": commit, "ETag": f'"{sha(data)}"'})

    def search(self, kind: str) -> None:
        word, owner = self.query.get("search", [""])[0], self.query.get("author", [""])[0]
        public = [name for (one, name), repo in self.hub.repos.items() if f"{one}s" == kind and not repo.private]
        self._answer(200, [{"id": one} for one in public if word in one and one.startswith(owner)])

    # --- writing ---------------------------------------------------------------------------------

    def _may_write(self, name: str) -> bool:
        return self.user is not None and name.partition("/")[0] in (self.user["name"], *self.user["orgs"])

    def _allowed(self, name: str) -> bool:
        if not self._may_write(name):
            self._answer(403, {"error": "Forbidden: you don't have the rights to write in this namespace"})
        return self._may_write(name)

    def whoami(self) -> None:
        if self.user is None:
            return self._answer(401, {"error": "Invalid username or password."})
        self._answer(200, {**self.user, "orgs": [{"name": one} for one in self.user["orgs"]]})

    def create(self) -> None:
        asked = json.loads(self.body)
        name = f"{asked['organization']}/{asked['name']}"
        if self._allowed(name):
            if (kind := asked.get("type", "model"), name) in self.hub.repos:
                return self._answer(
                    409, {"error": "You already created this model repo", "url": f"{self.hub.url}/{name}"}
                )
            repo = self.hub.repos[kind, name] = Repo(asked.get("visibility") == "private" or bool(asked.get("private")))
            repo.commit({".gitattributes": b"*.safetensors filter=lfs"})
            self._answer(200, {"url": f"{self.hub.url}/{name}", "name": name})

    def settings(self, kind: str, name: str) -> None:
        if self._allowed(name) and (repo := self._repo(kind, name)):
            asked = json.loads(self.body)
            repo.private = asked.get("visibility") == "private" or bool(asked.get("private"))
            self._answer(200, {"private": repo.private})

    def yaml(self) -> None:
        self._answer(200, {"warnings": [], "errors": []})

    def preupload(self, kind: str, name: str, revision: str) -> None:
        if self._allowed(name) and (repo := self._repo(kind, name)):
            files = [
                {
                    "path": one["path"],
                    "uploadMode": "lfs" if one["path"].endswith(LARGE) else "regular",
                    "shouldIgnore": False,
                    "oid": None if (data := repo.files.get(one["path"])) is None else _oid(one["path"], data),
                }
                for one in json.loads(self.body)["files"]
            ]
            self._answer(200, {"files": files})

    def batch(self, name: str) -> None:
        if self._allowed(name):
            objects = [
                one
                if one["oid"] in self.hub.objects
                else {**one, "actions": {"upload": {"href": f"{self.hub.url}/store/{one['oid']}"}}}
                for one in json.loads(self.body)["objects"]
            ]
            self._answer(200, {"transfer": "basic", "objects": objects})

    def store(self, oid: str) -> None:
        assert hashlib.sha256(self.body).hexdigest() == oid, "a large file arrived changed"
        self.hub.objects[oid] = self.body
        self._answer(200, {})

    def commit(self, kind: str, name: str, revision: str) -> None:
        if not self._allowed(name) or (repo := self._repo(kind, name)) is None:
            return
        lines = [json.loads(line) for line in self.body.splitlines()]
        parent = lines[0]["value"].get("parentCommit")
        if parent is not None and parent != repo.refs["main"]:
            return self._answer(412, {"error": "A commit has happened since. Please refresh and try again."})
        files = dict(repo.files)
        for line in lines[1:]:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.hub.objects[value["oid"]]
            else:
                assert line["key"] == "deletedFile", line
                del files[value["path"]]
        made = repo.commit(files)
        self._answer(200, {"commitUrl": f"{self.hub.url}/{name}/commit/{made}", "commitOid": made})


def _oid(path: str, data: bytes) -> str:
    """A large file's sha256, a small one's name in git."""
    if path.endswith(LARGE):
        return hashlib.sha256(data).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


_NAME = r"(?P<name>[^/]+/[^/]+)"
ROUTES = (
    (r"GET api/whoami-v2", "whoami"),
    (r"GET api/(?P<kind>models|datasets)", "search"),
    (rf"GET api/(?P<kind>models|datasets)/{_NAME}", "info"),
    (rf"GET api/(?P<kind>models|datasets)/{_NAME}/revision/(?P<revision>.+)", "info"),
    (
        rf"(GET|HEAD) (?P<kind>datasets/)?{_NAME}/resolve/(?P<revision>refs/convert/parquet|[^/]+)/(?P<file>.+)",
        "resolve",
    ),
    (r"POST api/repos/create", "create"),
    (r"POST api/validate-yaml", "yaml"),
    (rf"PUT api/(?P<kind>models|datasets)/{_NAME}/settings", "settings"),
    (rf"POST api/(?P<kind>models|datasets)/{_NAME}/preupload/(?P<revision>[^/]+)", "preupload"),
    (rf"POST {_NAME}\.git/info/lfs/objects/batch", "batch"),
    (r"PUT store/(?P<oid>[0-9a-f]+)", "store"),
    (rf"POST api/(?P<kind>models|datasets)/{_NAME}/commit/(?P<revision>[^/]+)", "commit"),
)


@contextmanager
def fake_hub(monkeypatch: pytest.MonkeyPatch, home: Path, token: str | None = TOKEN) -> Iterator[FakeHub]:
    """Serve a hub, and let `huggingface_hub` use it, with its cache and its login in `home`."""
    from huggingface_hub import constants

    hub = FakeHub()
    with served(type("OfHub", (Handler,), {"hub": hub})) as hub.url:
        for name, value in {
            "ENDPOINT": hub.url,
            "HUGGINGFACE_CO_URL_TEMPLATE": hub.url + "/{repo_id}/resolve/{revision}/{filename}",
            "HF_HUB_CACHE": str(home / "hub"),
            "HF_TOKEN_PATH": str(home / "token"),
            "HF_HUB_DISABLE_XET": True,
            "HF_HUB_OFFLINE": False,
        }.items():
            monkeypatch.setattr(constants, name, value)
        for variable in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
            monkeypatch.delenv(variable, raising=False)
        if token is not None:
            home.mkdir(parents=True, exist_ok=True)
            (home / "token").write_text(token)
        yield hub
