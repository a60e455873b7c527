"""``meshnet key``: API keys of gateway clients."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Annotated, Any, TypeVar

import typer
from rich.table import Table

from meshnet import config
from meshnet.cli.output import Json, console, errors, print_json
from meshnet.control.api_keys import (
    MAX_LIMIT,
    ApiKey,
    create_api_key,
    list_api_keys,
    revoke_api_key,
)
from meshnet.control.documents import Documents
from meshnet.control.store_url import make_documents
from meshnet.errors import ConfigError

__all__ = ["app"]

app = typer.Typer(
    help="Make, list and revoke the API keys of gateway clients.", no_args_is_help=True
)

Store = Annotated[
    str | None,
    typer.Option(
        "--store",
        help="Where keys are kept: sqlite:PATH (gateways of this machine) or"
        " etcd://HOST:PORT[,HOST:PORT...] (all gateways; etcds:// with TLS);"
        " else MESHNET_API_KEYS.",
        show_default="a file in the user's state directory",
    ),
]
Name = Annotated[str, typer.Argument(help="Whose key it is.", metavar="NAME")]

_T = TypeVar("_T")


@app.command("create")
def create(
    name: Name,
    requests_per_minute: Annotated[
        int | None,
        typer.Option(
            min=1, max=MAX_LIMIT, help="Completions a minute at each gateway; else any number."
        ),
    ] = None,
    streams: Annotated[
        int | None,
        typer.Option(
            min=1, max=MAX_LIMIT, help="Completions in progress at each gateway; else any number."
        ),
    ] = None,
    store: Store = None,
    as_json: Json = False,
) -> None:
    """Make a key and print it, this once: only its hash is kept.

    Example: meshnet key create my-app --requests-per-minute 60 --streams 4
    """
    url = _store_url(store)
    key, text = _with_documents(
        url,
        lambda documents: create_api_key(
            documents,
            name,
            now_s=time.time(),
            requests_per_minute=requests_per_minute,
            streams=streams,
        ),
    )
    if as_json:
        print_json({**_to_json(key), "key": text, "store": url})
        return
    console.print(text, markup=False, highlight=False, soft_wrap=True)
    errors.print(
        f"The key of {name}. It is shown this once. A gateway takes it that is started with"
        f" --api-keys {url}",
        markup=False,
        highlight=False,
    )


@app.command("list")
def list_keys(store: Store = None, as_json: Json = False) -> None:
    """List the keys that are valid."""
    found = _with_documents(_store_url(store), list_api_keys)
    if as_json:
        print_json({"keys": [_to_json(key) for key in found]})
        return
    if not found:
        console.print("There is no key. Make one: meshnet key create NAME")
        return
    table = Table("name", "id", "requests a minute", "streams", "created", box=None)
    for key in found:
        table.add_row(
            key.name,
            key.id,
            str(key.requests_per_minute or "any"),
            str(key.streams or "any"),
            _time_text(key),
        )
    console.print(table)


@app.command("revoke")
def revoke(name: Name, store: Store = None, as_json: Json = False) -> None:
    """End a key: every gateway refuses it a second later and cuts off what it has in progress."""
    _with_documents(_store_url(store), lambda documents: revoke_api_key(documents, name))
    if as_json:
        print_json({"name": name, "revoked": True})
    else:
        console.print(f"key {name} is revoked", highlight=False)


def _store_url(store: str | None) -> str:
    """Give the store to use; the user's own file is in a directory that is made for it.

    Raises:
        ConfigError: it is one that ends with this process.
    """
    settings = config.load()
    url = store or settings.api_keys
    if url == "memory":
        raise ConfigError(
            "--store memory: keys would end with this command; expected sqlite:PATH or etcd://",
            field="--store",
        )
    if url is None:
        settings.state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        url = f"sqlite:{settings.state_dir}/keys.db"
    return url


def _with_documents(url: str, use: Callable[[Documents], Awaitable[_T]]) -> _T:
    async def run() -> _T:
        documents = make_documents(url)
        try:
            await documents.open()
            return await use(documents)
        finally:
            await documents.close()

    return asyncio.run(run())


def _to_json(key: ApiKey) -> dict[str, Any]:
    return {
        "name": key.name,
        "id": key.id,
        "requests_per_minute": key.requests_per_minute,
        "streams": key.streams,
        "create_time": _time_text(key),
    }


def _time_text(key: ApiKey) -> str:
    return datetime.fromtimestamp(key.created_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
