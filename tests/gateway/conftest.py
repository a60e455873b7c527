"""A gateway's OpenAI surface on a real socket, over fake pipelines."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from openai import AsyncOpenAI

from meshnet.listen import listen
from meshnet_gateway.admission import add_admission
from meshnet_gateway.key_ring import KeyRing
from meshnet_gateway.limits import DEFAULT_LIMITS, GatewayLimits
from meshnet_gateway.listener import LimitedSite, watch_requests
from meshnet_gateway.model_text import ModelText
from meshnet_gateway.openai_routes import add_routes
from meshnet_gateway.openai_service import OpenAIService
from tests.gateway.fakes import FakeFactory, write_model

MODEL = "lab/tiny"
NOW = 1_700_000_000


@dataclass
class Gateway:
    """A running surface: its address, OpenAI's own client for it, and a plain one."""

    url: str
    client: AsyncOpenAI
    http: aiohttp.ClientSession
    service: OpenAIService

    async def post(self, path: str, body: object, **headers: str) -> tuple[int, dict[str, Any]]:
        """Post JSON and give (status, JSON)."""
        async with self.http.post(self.url + path, json=body, headers=headers) as response:
            assert response.content_type == "application/json"
            return response.status, await response.json()


Serve = Callable[..., Awaitable[Gateway]]


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def text(model_dir: Path) -> ModelText:
    return ModelText.load(model_dir)


@pytest.fixture
async def serve(text: ModelText) -> AsyncIterator[Serve]:
    """Start gateways that end with the test."""
    async with AsyncExitStack() as stack:

        async def start(
            factory: FakeFactory,
            *,
            models: dict[str, ModelText] | None = None,
            limits: GatewayLimits = DEFAULT_LIMITS,
            keys: KeyRing | None = None,
        ) -> Gateway:
            service = OpenAIService(
                {MODEL: text} if models is None else models,
                factory,
                limits=limits,
                now=lambda: NOW,
            )
            app = web.Application()
            add_routes(app, service)
            add_admission(app, keys, limits)
            watch_requests(app)
            runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1)
            await runner.setup()
            stack.push_async_callback(runner.cleanup)
            listener = await listen("127.0.0.1", 0, "port")
            await LimitedSite(runner, listener, limits).start()
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
            stack.push_async_callback(client.close)
            http = await stack.enter_async_context(aiohttp.ClientSession())
            return Gateway(url, client, http, service)

        yield start
