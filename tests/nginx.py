"""Real nginx before a server, as operators put one there."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from tests.plane.certificates import Authority
from tests.programs import program

START_S = 30.0
TEMPORARY = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")


def config(port: int, target: str, directory: Path, tls: Authority | None) -> str:
    """Write what passes everything on over kept connections, and what a test must not touch."""
    paths = "".join(f"  {name}_temp_path {directory / name};\n" for name in TEMPORARY)
    # As root it would work as somebody else, who may not write to the test's directory.
    user = "user root;" if os.getuid() == 0 else ""
    certificate = ""
    if tls is not None:
        certificate = f"ssl_certificate {tls.certificate}; ssl_certificate_key {tls.key};"
    return f"""
daemon off;
worker_processes 1;
{user}
pid {directory / "nginx.pid"};
error_log stderr error;
events {{ worker_connections 64; }}
http {{
{paths}
  access_log off;
  client_max_body_size 256m;
  upstream behind {{ server {target}; keepalive 8; }}
  server {{
    listen 127.0.0.1:{port}{" ssl" if tls else ""};
    {certificate}
    location / {{
      proxy_pass http://behind;
      proxy_http_version 1.1;
      proxy_set_header Connection "";
      proxy_request_buffering off;
      proxy_buffering off;
    }}
  }}
}}
"""


@asynccontextmanager
async def nginx_before(
    target: str, directory: Path, *, tls: Authority | None = None
) -> AsyncIterator[str]:
    """Run nginx on a free port before ``host:port``; gives its own ``host:port``.

    Args:
        target: where it passes requests on to, unencrypted.
        directory: for its files.
        tls: a certificate that it ends TLS with.
    """
    with socket.create_server(("127.0.0.1", 0)) as listener:
        # nginx takes over a socket that it is told of so; that leaves the port to nobody else.
        port, inherited = listener.getsockname()[1], listener.fileno()
        path = directory / "nginx.conf"
        path.write_text(config(port, target, directory, tls))
        process = await asyncio.create_subprocess_exec(
            *(program("nginx"), "-e", "stderr", "-p", str(directory), "-c", str(path)),
            stdin=asyncio.subprocess.DEVNULL,
            pass_fds=[inherited],
            env={**os.environ, "NGINX": f"{inherited};"},
        )
    try:
        async with asyncio.timeout(START_S):
            while True:
                assert process.returncode is None, "nginx ended"
                if (directory / "nginx.pid").is_file():
                    break
                await asyncio.sleep(0.02)
        yield f"127.0.0.1:{port}"
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()
