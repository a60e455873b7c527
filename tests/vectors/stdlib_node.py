"""A node of the activation plane written from proto/WIRE.md with the standard library alone.

It passes hidden states through, is the last hop of every route, keeps no sessions, reads
raw bodies only, and shares no code with meshnet: it shows that the document suffices.

    python tests/vectors/stdlib_node.py 7080
"""

from __future__ import annotations

import json
import math
import re
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

ABILITIES = frozenset({"any-shape", "default-limits", "embedding", "http", "stateless"})
LIMIT = 256 * 1024 * 1024
ITEM_SIZE = {"bfloat16": 2, "int32": 4}
HOP = r"[a-z][a-z0-9-]{0,62}@([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):\d+/\d+-\d+"
GRAMMAR = {
    "X-Meshnet-Wire": r"2",
    "X-Meshnet-Shape": r"[1-9]\d{0,19}(,[1-9]\d{0,19}){0,7}",
    "X-Meshnet-Dtype": "|".join(ITEM_SIZE),
    "X-Meshnet-Session": r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}",
    "X-Meshnet-Chunk-Index": r"\d{1,20}",
    "X-Meshnet-Chunk-Total": r"(?!0*$)\d{1,20}",
    "X-Meshnet-Encoding": r"(?!)",  # no encoding is read here
    "X-Meshnet-Position": r"\d{1,20}",
    "X-Meshnet-Layers": r"\d{1,6}-\d{1,6}",
    "X-Meshnet-Phase": r"prefill|decode",
    "X-Meshnet-Want": r"hidden|logits|none|top-[1-9]\d{0,4}",
    "X-Meshnet-Accept-Encoding": r"[a-z][a-z0-9-]*([ \t]*,[ \t]*[a-z][a-z0-9-]*){0,15}",
    "X-Meshnet-Route": rf"{HOP}([ \t]*,[ \t]*{HOP}){{0,63}}",
    "X-Meshnet-Max-Tokens": r"(?!0*$)\d{1,20}",
    "X-Meshnet-Epoch": r"\d{1,20}",
    "X-Meshnet-Journal": r"1",
    "X-Meshnet-Grant": r"[A-Za-z0-9_.-]{1,8192}",
    "traceparent": r"(?!ff)(?!00-.{52}-)[\da-f]{2}-(?!0{32})[\da-f]{32}-(?!0{16})[\da-f]{16}"
    r"-[\da-f]{2}(-[!-~]*)?",
}
REQUIRED = [f"X-Meshnet-{n}" for n in ("Shape", "Dtype", "Session", "Chunk-Index", "Chunk-Total")]


class FaultError(Exception):
    def __init__(self, status: int, field: str, detail: str) -> None:
        super().__init__(detail)
        self.status, self.field = status, field


class Node(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_POST(self) -> None:
        try:
            fields, num_bytes = self.read_header()
            body = self.read_body(num_bytes)
            if len(body) != num_bytes:
                raise FaultError(
                    400, "Content-Length", f"expected {num_bytes} bytes, got {len(body)}"
                )
        except FaultError as fault:
            return self.refuse(fault)
        if fields["X-Meshnet-Want"] == "none":
            return self.answer(204, [(n, fields[n]) for n in REQUIRED[2:]], b"")
        return self.answer(200, [(n, fields[n]) for n in REQUIRED], body)

    def do_GET(self) -> None:
        self.refuse(FaultError(405, "", f"{self.command}; expected POST"), [("Allow", "POST")])

    do_HEAD = do_PUT = do_GET  # noqa: N815 -- http.server's names

    def read_header(self) -> tuple[dict[str, str], int]:
        fields = {"X-Meshnet-Wire": "2", "X-Meshnet-Want": "hidden"}
        for name, pattern in GRAMMAR.items():
            values = self.headers.get_all(name, [])
            if len(values) > 1 or (not values and name in REQUIRED):
                raise FaultError(400, name, f"{name}: expected once, got {len(values)} times")
            for value in values:
                fields[name] = value.strip(" \t")
                if not re.fullmatch(pattern, fields[name], re.ASCII):
                    raise FaultError(400, name, f"{name}: {value!r}; expected {pattern}; wire 2")
        media = self.headers.get("Content-Type", "application/octet-stream")
        if not media.lower().startswith("application/octet-stream"):
            retired = "json" in media
            detail = f"{media}: {'retired; ' * retired}expected application/octet-stream"
            raise FaultError(400 if retired else 415, "Content-Type", detail)
        self.check_numbers(fields)
        shape = fields["X-Meshnet-Shape"]
        num_bytes = math.prod(map(int, shape.split(","))) * ITEM_SIZE[fields["X-Meshnet-Dtype"]]
        if num_bytes > LIMIT:
            status = 400 if num_bytes >= 1 << 40 else 413
            raise FaultError(
                status, "X-Meshnet-Shape", f"{shape}: {num_bytes} bytes, limit {LIMIT}"
            )
        return fields, num_bytes

    def check_numbers(self, fields: dict[str, str]) -> None:
        if int(fields["X-Meshnet-Chunk-Index"]) >= int(fields["X-Meshnet-Chunk-Total"]):
            raise FaultError(400, "X-Meshnet-Chunk-Index", "expected less than the total")
        if fields["X-Meshnet-Dtype"] == "int32" and fields["X-Meshnet-Shape"].count(",") > 1:
            raise FaultError(400, "X-Meshnet-Shape", "expected BATCH,SEQ for token ids")
        if fields["X-Meshnet-Want"] not in ("hidden", "none"):
            raise FaultError(400, "X-Meshnet-Want", "this shard holds no head")
        for name in ("X-Meshnet-Layers", "X-Meshnet-Route"):
            for start, end in re.findall(r"(\d+)-(\d+)(?=,|\s|$)", fields.get(name, "")):
                if int(start) >= int(end):
                    raise FaultError(400, name, f"{start}-{end}: expected START < END")
        for port in re.findall(r":(\d+)/", fields.get("X-Meshnet-Route", "")):
            if not 0 < int(port) < 65536:
                raise FaultError(400, "X-Meshnet-Route", f"port {port}: expected 1 to 65535")

    def read_body(self, num_bytes: int) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() == "chunked":
            body = b""
            while size := int(self.rfile.readline(20), 16):
                body += self.rfile.read(min(size, num_bytes + 1 - len(body)))
                if len(body) > num_bytes:
                    break
                self.rfile.readline(2)
            else:
                self.rfile.readline(2)
            return body
        length = self.headers.get("Content-Length", "")
        if not re.fullmatch(r"\d{1,20}", length):
            raise FaultError(411, "Content-Length", "expected Content-Length")
        if int(length) != num_bytes:
            raise FaultError(400, "Content-Length", f"expected {num_bytes} bytes, got {length}")
        return self.rfile.read(num_bytes)

    def refuse(self, fault: FaultError, extra: list[tuple[str, str]] | None = None) -> None:
        # Closing with a body unread would reset the connection before the answer arrives.
        length = self.headers.get("Content-Length", "0")
        self.close_connection = not length.isdigit() or int(length) > 1 << 20
        self.close_connection |= "Transfer-Encoding" in self.headers
        self.rfile.read(0 if self.close_connection else int(length))
        problem = {"status": fault.status, "code": "INVALID_ARGUMENT", "detail": str(fault)}
        headers = [("Content-Type", "application/problem+json"), ("X-Meshnet-Wire-Version", "2")]
        body = json.dumps({**problem, "field": fault.field}).encode()
        self.answer(fault.status, headers + (extra or []), body)

    def answer(self, status: int, headers: list[tuple[str, str]], body: bytes) -> None:
        self.send_response(status)
        for name, value in headers:
            self.send_header(name, value)
        if status == 200:
            self.send_header("Content-Type", "application/octet-stream")
        if status != 204:
            self.send_header("Content-Length", str(len(body)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(b"" if self.command == "HEAD" else body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 -- http.server's name
        """Stay silent."""


if __name__ == "__main__":
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Node).serve_forever()
