"""The part of the Hugging Face hub's HTTP API that its client uses to download a model."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

__all__ = ["FakeHub", "serve_hub"]


@dataclass
class FakeHub:
    """Serves one repository; the log holds ``(method, file)`` of every file asked for."""

    repo: str
    directory: Path
    endpoint: str = ""
    log: list[tuple[str, str]] = field(default_factory=list)

    @property
    def commit(self) -> str:
        """Commit hash: changes with any file."""
        digest = hashlib.sha1(usedforsecurity=False)
        for path in sorted(self.directory.iterdir()):
            digest.update(path.name.encode() + path.read_bytes())
        return digest.hexdigest()

    def fetched(self, suffix: str = "") -> set[str]:
        """Names of the files whose content was asked for."""
        return {name for method, name in self.log if method == "GET" and name.endswith(suffix)}

    def answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        """Give status, headers and whole body for a request path."""
        parts = [unquote(part) for part in urlsplit(path).path.strip("/").split("/")]
        commit = self.commit
        match parts:
            case ["api", "models", org, name, *rest] if f"{org}/{name}" == self.repo:
                if rest and rest[-1] not in {"main", commit}:
                    return 404, {"X-Error-Code": "RevisionNotFound"}, b"{}"
                files = [
                    {
                        "type": "file",
                        "path": file.name,
                        "rfilename": file.name,
                        "oid": _etag(file),
                        "size": file.stat().st_size,
                    }
                    for file in sorted(self.directory.iterdir())
                ]
                info = {"_id": "1", "id": self.repo, "sha": commit, "siblings": files}
                value = files if rest[:1] == ["tree"] else info
                return 200, {"Content-Type": "application/json"}, json.dumps(value).encode()
            case [org, name, "resolve", revision, file] if f"{org}/{name}" == self.repo:
                target = self.directory / file
                if revision not in {"main", commit} or not target.is_file():
                    return 404, {"X-Error-Code": "EntryNotFound"}, b""
                headers = {"ETag": f'"{_etag(target)}"', "X-Repo-Commit": commit}
                return 200, headers, target.read_bytes()
            case _:
                return 404, {"X-Error-Code": "RepoNotFound"}, b"{}"


def _etag(file: Path) -> str:
    return hashlib.sha1(file.read_bytes(), usedforsecurity=False).hexdigest()


@contextmanager
def serve_hub(repo: str, directory: Path) -> Iterator[FakeHub]:
    """Serve `directory` as `repo` on a free local port until the block ends."""
    hub = FakeHub(repo, directory)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            status, headers, body = hub.answer(self.path)
            if "/resolve/" in self.path:
                hub.log.append((self.command, self.path.rsplit("/", 1)[1]))
            wanted = self.headers.get("Range")
            if status == 200 and wanted is not None:
                first, _, last = wanted.removeprefix("bytes=").partition("-")
                start, end = int(first), min(int(last or len(body) - 1), len(body) - 1)
                headers["Content-Range"] = f"bytes {start}-{end}/{len(body)}"
                status, body = 206, body[start : end + 1]
            self.send_response(status)
            for key, value in headers.items():
                self.send_header(key, value)
            self.send_header("Accept-Ranges", "bytes")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def do_HEAD(self) -> None:
            self.do_GET()

        def log_message(self, *args: object) -> None:
            """Keep the test's output clean."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    hub.endpoint = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
