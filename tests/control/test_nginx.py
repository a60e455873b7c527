"""Real nginx before the JSON face: calls, errors, streams and kept connections pass it."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from tests.nginx import nginx_before
from tests.plane.test_curl import curl


@pytest.fixture
async def url(mesh, tmp_path: Path) -> AsyncIterator[str]:
    async with nginx_before(mesh.addresses.http, tmp_path) as address:
        yield f"http://{address}"


async def test_calls_and_errors_pass_nginx(mesh, url):
    await mesh.join("a", (0, 8))
    connector = aiohttp.TCPConnector(limit=1)
    async with aiohttp.ClientSession(url, connector=connector) as http:
        for method, path, body, status in (
            ("GET", "/v1/status", None, 200),
            ("POST", "/v1/routes:select", {"model": "models/acme/tiny"}, 200),
            ("POST", "/v1/routes:select", {"model": "models/none"}, 404),
            ("POST", "/v1/routes:select", {"modle": "x"}, 400),
            ("GET", "/nowhere", None, 404),
            ("PUT", "/v1/status", {}, 405),
            ("GET", "/healthz", None, 200),
        ):
            direct = await mesh.json(method, path, json=body)
            async with http.request(method, path, json=body) as answer:
                found = await answer.json()
                assert (answer.status, set(found)) == (direct[0], set(direct[1]))
            assert answer.status == status
            if status >= 400:
                assert (found["code"], found["message"]) == (
                    direct[1]["code"],
                    direct[1]["message"],
                )


async def test_a_body_that_is_too_large_is_refused_by_the_face_itself(url):
    async with (
        aiohttp.ClientSession() as http,
        http.post(
            f"{url}/v1/routes:select",
            data=io.BytesIO(b" " * 2_000_000),
            headers={"Content-Type": "application/json"},
        ) as answer,
    ):
        assert answer.status == 413
        assert set(await answer.json()) == {"code", "message", "details"}


@pytest.mark.parametrize(
    "extra", [(), ("-H", "Transfer-Encoding: chunked"), ("-H", "Expect: 100-continue")],
    ids=["as-is", "chunked", "expect"],
)  # fmt: skip
async def test_curl_through_nginx(mesh, url, extra):
    await mesh.join("a", (0, 8))
    body = ["-H", "Content-Type: application/json", "-d", '{"model": "models/acme/tiny"}']
    answer = json.loads(await curl(*body, *extra, f"{url}/v1/routes:select"))
    assert answer["routes"][0]["hops"][0]["node"] == "nodes/a"


async def test_a_stream_passes_nginx_line_by_line(mesh, url):
    async with (
        aiohttp.ClientSession() as http,
        http.get(f"{url}/v1/nodes:watch") as answer,
        asyncio.timeout(30),
    ):
        assert answer.status == 200
        await mesh.join("late", (0, 8))
        async for line in answer.content:
            if "nodes/late" in line.decode():
                break
