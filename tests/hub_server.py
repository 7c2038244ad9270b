"""A server on this machine that answers as the Hugging Face hub does, for what its client asks when it fetches a model.

GET /api/models/REPO/revision/REV    the commit
GET /api/models/REPO/tree/COMMIT     the files
HEAD and GET /REPO/resolve/COMMIT/FILE, small files at once, large ones after a redirect to /cdn/
"""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


@dataclass
class Repository:
    """`refuse` is what every file is answered with; `claims` are sizes that the server states falsely."""

    revisions: dict[str, Path]
    refuse: tuple[int, str] | None = None
    claims: dict[str, int] = field(default_factory=dict)

    def commit(self, revision: str) -> str | None:
        if revision in map(commit_of, self.revisions):
            return revision
        return commit_of(revision) if revision in self.revisions else None

    def folder(self, commit: str) -> Path:
        return next(folder for name, folder in self.revisions.items() if commit_of(name) == commit)


def commit_of(revision: str) -> str:
    return hashlib.sha1(revision.encode()).hexdigest()


@dataclass
class Hub:
    url: str
    repositories: dict[str, Repository] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    """Paths of all requests, files as "FILE"."""
    answer: tuple[int, dict[str, str], bytes] | None = None
    """What everything is answered with, if set."""


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


class _Handler(BaseHTTPRequestHandler):
    def do_HEAD(self) -> None:
        self._route()

    def do_GET(self) -> None:
        self._route()

    def _route(self) -> None:
        hub: Hub = self.server.hub  # type: ignore[attr-defined]
        path = self.path.partition("?")[0]
        parts = path.strip("/").split("/")
        hub.asked.append(parts[-1] if "resolve" in parts or parts[0] == "cdn" else path)
        if hub.answer is not None:
            self._send(*hub.answer)
            return
        name = "/".join(parts[2:4] if parts[0] == "api" else parts[1:3] if parts[0] == "cdn" else parts[:2])
        repository = hub.repositories.get(name)
        if repository is None:
            # To strangers the hub does not tell private repositories from missing ones.
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
            self._json([_entry(path) for path in sorted(repository.folder(commit).iterdir())])
        else:
            self._file(name, repository, commit, parts[-1], kind == "cdn")

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
        if path.suffix == ".json" or from_cdn:
            self._send(200, {} if from_cdn else headers, content)
            return
        headers["X-Linked-Etag"] = headers["ETag"]
        headers["X-Linked-Size"] = str(repository.claims.get(file, len(content)))
        # Another host, as the hub's content network is.
        cdn = f"http://localhost:{self.server.server_address[1]}/cdn"
        self._send(302, headers | {"Location": f"{cdn}/{name}/{commit}/{file}"})

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


def _entry(path: Path) -> dict[str, Any]:
    oid = hashlib.sha1(path.read_bytes()).hexdigest()
    return {"type": "file", "path": path.name, "size": path.stat().st_size, "oid": oid}
