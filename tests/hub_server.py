"""A local server with the part of the Hugging Face hub's API that its client uses to download a model.

GET /api/models/REPO/revision/REV    the commit
GET /api/models/REPO/tree/COMMIT     the files, those below folders too
HEAD and GET /REPO/resolve/COMMIT/FILE, small files at once, large ones after a redirect to /cdn/; ranges too
"""

import hashlib
import json
import os
import re
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

_COMMIT = re.compile("[0-9a-f]{40}")
_SMALL = {".json", ".txt"}


@dataclass
class Repository:
    """Folders by branch, tag or commit.

    refuse: what every file is answered with.
    claims: sizes that the server states falsely.
    cuts: connections that break after so many bytes of a file, each time that it is asked for.
    """

    revisions: dict[str, Path]
    refuse: tuple[int, str] | None = None
    claims: dict[str, int] = field(default_factory=dict)
    cuts: dict[str, int] = field(default_factory=dict)

    def commit(self, revision: str) -> str | None:
        if revision in map(commit_of, self.revisions):
            return revision
        return commit_of(revision) if revision in self.revisions else None

    def folder(self, commit: str) -> Path:
        return next(folder for name, folder in self.revisions.items() if commit_of(name) == commit)


def commit_of(revision: str) -> str:
    """Return the commit of a branch or tag; a commit is returned unchanged."""
    return revision if _COMMIT.fullmatch(revision) else hashlib.sha1(revision.encode()).hexdigest()


@dataclass
class Hub:
    url: str
    repositories: dict[str, Repository] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    """Paths of all requests; for files, only the name within the repository."""
    sent: Counter[str] = field(default_factory=Counter)
    """Number of bytes sent, by file."""
    answer: tuple[int, dict[str, str], bytes] | None = None
    """Answer to every request, if set."""

    @property
    def files(self) -> set[str]:
        """Return the names of the requested files."""
        return {name for name in self.requests if not name.startswith("/")}


@contextmanager
def serve() -> Iterator[Hub]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    hub = server.hub = Hub(f"http://127.0.0.1:{server.server_port}")  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def client_of(hub: Hub | str, home: Path, **variables: str) -> dict[str, str]:
    """Return the environment of a process whose client uses this hub and keeps its cache in `home`."""
    theirs = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    url = hub if isinstance(hub, str) else hub.url
    return theirs | {"HF_ENDPOINT": url, "HF_HOME": str(home), "NO_PROXY": "127.0.0.1,localhost"} | variables


class _Handler(BaseHTTPRequestHandler):
    def do_HEAD(self) -> None:
        self._route()

    def do_GET(self) -> None:
        self._route()

    def _route(self) -> None:
        hub: Hub = self.server.hub  # type: ignore[attr-defined]
        path = self.path.partition("?")[0]
        parts = path.strip("/").split("/")
        file = "/".join(parts[4:]) if parts[0] == "cdn" or "resolve" in parts else ""
        hub.requests.append(file or path)
        if hub.answer is not None:
            self._send(*hub.answer)
            return
        name = "/".join(parts[2:4] if parts[0] == "api" else parts[1:3] if parts[0] == "cdn" else parts[:2])
        repository = hub.repositories.get(name)
        if repository is None:
            # Without access, private and missing repositories look the same on the hub.
            self._send(401, {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"})
            return
        rest = parts[4:] if parts[0] == "api" else parts[3:] if parts[0] == "cdn" else parts[2:]
        kind, revision = ("cdn", rest[0]) if parts[0] == "cdn" else (rest[0], "/".join(rest[1:]))
        if kind == "resolve":
            revision = rest[1]
        commit = repository.commit(revision.replace("%2F", "/"))
        if commit is None:
            self._send(404, {"X-Error-Code": "RevisionNotFound", "X-Error-Message": "Invalid rev id"})
        elif kind == "revision":
            self._json({"id": name, "sha": commit, "private": False, "tags": [], "siblings": []})
        elif kind == "tree":
            self._json(_tree(repository.folder(commit)))
        else:
            self._file(name, repository, commit, file, kind == "cdn")

    def _file(self, name: str, repository: Repository, commit: str, file: str, from_cdn: bool) -> None:
        if repository.refuse is not None:
            status, code = repository.refuse
            self._send(status, {"X-Error-Code": code, "X-Error-Message": "refused"})
            return
        path = repository.folder(commit) / file
        if not path.is_file():
            self._send(404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})
            return
        content = path.read_bytes()
        headers = {"X-Repo-Commit": commit, "ETag": f'"{hashlib.sha256(content).hexdigest()}"'}
        if path.suffix in _SMALL or from_cdn:
            self._content(file, content, {} if from_cdn else headers, repository.cuts.get(file))
            return
        headers["X-Linked-Etag"] = headers["ETag"]
        headers["X-Linked-Size"] = str(repository.claims.get(file, len(content)))
        # Another host, like the hub's CDN.
        cdn = f"http://localhost:{self.server.server_address[1]}/cdn"
        self._send(302, headers | {"Location": f"{cdn}/{name}/{commit}/{file}"})

    def _content(self, file: str, content: bytes, headers: dict[str, str], cut: int | None) -> None:
        status, start = 200, 0
        byte_range = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        if byte_range:
            status, start = 206, int(byte_range.group(1))
            headers |= {"Content-Range": f"bytes {start}-{len(content) - 1}/{len(content)}"}
        rest = content[start:]
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(rest)))
        self.end_headers()
        if self.command == "GET":
            sent = rest if cut is None else rest[:cut]
            self.wfile.write(sent)
            self.server.hub.sent[file] += len(sent)  # type: ignore[attr-defined]
            if len(sent) < len(rest):
                self.close_connection = True

    def _json(self, content: Any) -> None:
        self._send(200, {"Content-Type": "application/json"}, json.dumps(content).encode())

    def _send(self, status: int, headers: dict[str, str], content: bytes = b"") -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        pass


def _tree(folder: Path) -> list[dict[str, Any]]:
    entries = []
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        oid = hashlib.sha1(path.read_bytes() if path.is_file() else name.encode()).hexdigest()
        if path.is_file():
            entries.append({"type": "file", "path": name, "size": path.stat().st_size, "oid": oid})
        else:
            entries.append({"type": "directory", "path": name, "oid": oid})
    return entries
