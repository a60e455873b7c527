"""API keys on real sockets: who gets in, how much, and until when."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from meshnet.control.api_keys import create_api_key, revoke_api_key
from meshnet.control.documents import Document, Documents, MemoryDocuments
from meshnet.control.store_url import make_documents
from meshnet.errors import Code, MeshError
from meshnet_gateway import key_ring
from meshnet_gateway.key_ring import KeyRing
from meshnet_gateway.limits import GatewayLimits
from meshnet_gateway.model_text import ModelText
from tests.gateway.conftest import MODEL, Gateway, Serve
from tests.gateway.fakes import FakeFactory, scripted

CHAT = "/v1/chat/completions"
HI: list[Any] = [{"role": "user", "content": "hi"}]
BODY = {"model": MODEL, "messages": HI, "max_tokens": 2}
WAIT_S = 20.0


class Store(MemoryDocuments):
    """Documents that can be away."""

    away = False

    async def list(self, kind: str) -> list[Document]:
        if self.away:
            raise MeshError(Code.UNAVAILABLE, "the store is away")
        return await super().list(kind)


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def factory(text: ModelText) -> FakeFactory:
    return FakeFactory(scripted(text.encode("h"), text.vocab_size))


Start = Callable[..., Awaitable[Gateway]]


@pytest.fixture
async def start(serve: Serve, store: Store, factory: FakeFactory) -> AsyncIterator[Start]:
    """Start a gateway that wants keys."""
    async with AsyncExitStack() as stack:

        async def run(documents: Documents = store, **options: Any) -> Gateway:
            keys = KeyRing(documents)
            await keys.open()
            stack.push_async_callback(keys.close)
            return await serve(factory, keys=keys, **options)

        yield run


async def new_key(documents: Documents, name: str = "app", **limits: int) -> str:
    _, text = await create_api_key(documents, name, now_s=time.time(), **limits)
    return text


def client_of(gateway: Gateway, key: str) -> AsyncOpenAI:
    return gateway.client.with_options(api_key=key)


async def ask(gateway: Gateway, key: str, **changes: Any) -> Any:
    return await client_of(gateway, key).chat.completions.create(
        **{"model": MODEL, "messages": HI, "max_tokens": 2, **changes}
    )


async def test_openais_client_gets_in_with_a_key(start: Start, store: Store) -> None:
    gateway = await start()
    key = await new_key(store)  # made while the gateway runs
    assert (await ask(gateway, key)).choices[0].message.content == "hh"
    pieces = [piece async for piece in await ask(gateway, key, stream=True)]
    assert pieces[-1].choices[0].finish_reason == "length"
    assert [model.id async for model in client_of(gateway, key).models.list()] == [MODEL]


ID, SECRET = "a" * 12, "s" * 43
WRONG: list[str | None] = [
    None,
    "",
    "Bearer",
    "Bearer ",
    "Bearer none",
    "Bearer sk-abc",
    f"Bearer mk-{ID}-{SECRET}",
    f"Bearer mk-{ID}-{SECRET}x",
    f"Basic mk-{ID}-{SECRET}",
    f"mk-{ID}-{SECRET}",
    "Bearer " + "x" * 5000,
    "Bearer mk-é",
]


@pytest.mark.parametrize("field", WRONG)
async def test_without_a_key_nothing_is_served(
    start: Start, store: Store, factory: FakeFactory, field: str | None
) -> None:
    gateway = await start()
    await new_key(store)
    headers = {} if field is None else {"Authorization": field}
    for method, path in (
        ("POST", CHAT),
        ("POST", "/v1/completions"),
        ("GET", "/v1/models"),
        ("GET", f"/v1/models/{MODEL}"),
        ("GET", "/v1/nothing"),
        ("DELETE", CHAT),
    ):
        async with gateway.http.request(
            method, gateway.url + path, json=BODY, headers=headers
        ) as response:
            error = (await response.json())["error"]
            assert response.status == 401
            assert response.headers["WWW-Authenticate"] == "Bearer"
        assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")
        assert error["param"] is None
    assert factory.sessions == []


async def test_openais_client_knows_a_wrong_key(start: Start, store: Store) -> None:
    gateway = await start()
    right = await new_key(store)
    other = await new_key(store, "other")
    wrong = right[:-1] + ("a" if right[-1] != "a" else "b")
    mixed = right[:16] + other[16:]
    for key in (wrong, mixed, right.upper(), right + " x"):
        with pytest.raises(openai.AuthenticationError) as caught:
            await ask(gateway, key)
        assert caught.value.code == "invalid_api_key"
        assert key not in str(caught.value)
    assert (await ask(gateway, right)).choices
    assert (await ask(gateway, other)).choices


async def test_a_revoked_key_opens_nothing_and_its_streams_end(
    start: Start, store: Store, factory: FakeFactory
) -> None:
    gateway = await start()
    key, other = await new_key(store), await new_key(store, "other")
    factory.hold_at = 5
    stream = await ask(gateway, key, stream=True, max_tokens=50)
    await anext(stream.__aiter__())
    await asyncio.wait_for(factory.holding.wait(), WAIT_S)
    (session,) = factory.sessions
    await revoke_api_key(store, "app")
    with pytest.raises(openai.APIConnectionError):
        async for _ in stream:
            pass
    await asyncio.wait_for(factory.all_closed.wait(), WAIT_S)
    assert session.closed
    with pytest.raises(openai.AuthenticationError):
        await ask(gateway, key)
    factory.hold_at = None
    assert (await ask(gateway, other)).choices


async def test_a_key_made_anew_under_the_name_is_another(start: Start, store: Store) -> None:
    gateway = await start()
    old = await new_key(store)
    await revoke_api_key(store, "app")
    new = await new_key(store)
    assert (await ask(gateway, new)).choices
    with pytest.raises(openai.AuthenticationError):
        await ask(gateway, old)


async def test_two_gateways_share_a_file(start: Start, tmp_path: Any) -> None:
    url = f"sqlite:{tmp_path}/keys.db"
    one, other = await start(make_documents(url)), await start(make_documents(url))
    operator = make_documents(url)
    await operator.open()
    key = await new_key(operator)
    for gateway in (one, other):
        assert (await ask(gateway, key)).choices
    assert all(
        key.encode() not in file.read_bytes() and key[16:].encode() not in file.read_bytes()
        for file in tmp_path.iterdir()
    )
    await revoke_api_key(operator, "app")
    await operator.close()
    async with asyncio.timeout(WAIT_S):
        for gateway in (one, other):
            while (await gateway.post(CHAT, BODY, Authorization=f"Bearer {key}"))[0] != 401:
                await asyncio.sleep(0.05)


async def test_requests_a_minute(start: Start, store: Store, factory: FakeFactory) -> None:
    gateway = await start()
    key = await new_key(store, requests_per_minute=2)
    raw = client_of(gateway, key).chat.completions.with_raw_response
    for left in ("1", "0"):
        answer = await raw.create(model=MODEL, messages=HI, max_tokens=2, stream=left == "0")
        assert answer.headers["x-ratelimit-limit-requests"] == "2"
        assert answer.headers["x-ratelimit-remaining-requests"] == left
        assert answer.headers["x-ratelimit-reset-requests"].endswith("s")
        if left == "0":
            async for _ in answer.parse():
                pass
    with pytest.raises(openai.RateLimitError) as caught:
        await ask(gateway, key)
    headers = caught.value.response.headers
    assert caught.value.code == "rate_limit_exceeded"
    assert 1 <= int(headers["Retry-After"]) <= 30
    assert headers["x-ratelimit-remaining-requests"] == "0"
    assert len(factory.sessions) == 2
    # What is no completion is not counted, and the limit is this key's alone.
    assert [model.id async for model in client_of(gateway, key).models.list()] == [MODEL]
    assert (await ask(gateway, await new_key(store, "other"))).choices


async def test_bad_requests_count_as_well(start: Start, store: Store) -> None:
    gateway = await start()
    key = await new_key(store, requests_per_minute=1)
    bearer = {"Authorization": f"Bearer {key}"}
    assert (await gateway.post(CHAT, {"model": 5}, **bearer))[0] == 400
    assert (await gateway.post(CHAT, BODY, **bearer))[0] == 429


async def test_concurrent_streams(start: Start, store: Store, factory: FakeFactory) -> None:
    gateway = await start()
    key = await new_key(store, streams=2, requests_per_minute=3)
    factory.hold_at = 1
    running = [asyncio.create_task(ask(gateway, key)) for _ in range(2)]
    async with asyncio.timeout(WAIT_S):
        while len(factory.sessions) < 2:
            await asyncio.sleep(0.01)
    with pytest.raises(openai.RateLimitError) as caught:
        await ask(gateway, key)
    assert "2 at a time" in str(caught.value)
    assert caught.value.response.headers["Retry-After"] == "1"
    # It took none of the requests a minute.
    assert caught.value.response.headers["x-ratelimit-remaining-requests"] == "1"
    factory.hold_at = None
    factory.release.set()
    await asyncio.gather(*running)
    assert (await ask(gateway, key)).choices


async def test_a_client_that_went_away_holds_no_stream(
    start: Start, store: Store, factory: FakeFactory
) -> None:
    gateway = await start()
    key = await new_key(store, streams=1)
    factory.hold_at = 1
    running = asyncio.create_task(ask(gateway, key))
    await asyncio.wait_for(factory.holding.wait(), WAIT_S)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await asyncio.wait_for(factory.all_closed.wait(), WAIT_S)
    factory.hold_at = None
    async with asyncio.timeout(WAIT_S):
        while (await gateway.post(CHAT, BODY, Authorization=f"Bearer {key}"))[0] != 200:
            await asyncio.sleep(0.05)


async def test_completions_of_all_clients_are_bounded(
    start: Start, serve: Serve, store: Store, factory: FakeFactory
) -> None:
    limits = GatewayLimits(max_requests=1)
    for gateway in (await start(limits=limits), await serve(factory, limits=limits)):
        key = await new_key(store, f"key-{id(gateway)}")
        factory.hold_at = 1
        factory.holding.clear()
        factory.release.clear()
        running = asyncio.create_task(ask(gateway, key))
        await asyncio.wait_for(factory.holding.wait(), WAIT_S)
        with pytest.raises(openai.InternalServerError) as caught:
            await ask(gateway, key)
        assert (caught.value.status_code, caught.value.code) == (503, "overloaded")
        assert caught.value.response.headers["Retry-After"] == "1"
        assert [model.id async for model in client_of(gateway, key).models.list()] == [MODEL]
        factory.hold_at = None
        factory.release.set()
        assert (await running).choices


async def test_a_store_that_is_away(
    start: Start, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway = await start()
    key = await new_key(store)
    assert (await ask(gateway, key)).choices
    store.away = True
    assert (await ask(gateway, key)).choices
    assert (await gateway.post(CHAT, BODY, Authorization=f"Bearer mk-{ID}-{SECRET}"))[0] == 401
    monkeypatch.setattr(key_ring, "MAX_AGE_S", 0.01)
    await asyncio.sleep(0.05)
    status, answer = await gateway.post(CHAT, BODY, Authorization=f"Bearer {key}")
    assert (status, answer["error"]["code"]) == (503, "keys_unavailable")
    monkeypatch.undo()
    store.away = False
    assert (await ask(gateway, key)).choices


async def test_a_record_that_cannot_be_read_is_no_key(start: Start, store: Store) -> None:
    key = await new_key(store)
    for number, value in enumerate((b"", b"[]", b'{"id": "x"}', b"\xff", b"null")):
        await store.put("api-keys", f"bad-{number}", value)
    gateway = await start()
    assert (await ask(gateway, key)).choices


async def test_no_key_is_logged(
    start: Start, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        gateway = await start()
        key = await new_key(store, requests_per_minute=1)
        answers = [await gateway.post(CHAT, BODY, Authorization=f"Bearer {key}") for _ in "12"]
        wrong = key[:-4] + "0000"
        answers.append(await gateway.post(CHAT, BODY, Authorization=f"Bearer {wrong}"))
        bearer = {"Authorization": f"Bearer {key}"}
        async with gateway.http.get(f"{gateway.url}/v1/nothing", headers=bearer) as response:
            answers.append((response.status, await response.json()))
        await revoke_api_key(store, "app")
        async with asyncio.timeout(WAIT_S):
            while (await gateway.post(CHAT, BODY, Authorization=f"Bearer {key}"))[0] != 401:
                await asyncio.sleep(0.05)
    assert [status for status, _ in answers] == [200, 429, 401, 404]
    written = caplog.text + json.dumps(answers)
    assert key[16:40] not in written
