"""Stores of documents for tests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from meshnet.control.documents import Documents
from meshnet.control.store_url import make_documents


@asynccontextmanager
async def opened(url: str) -> AsyncIterator[Documents]:
    documents = make_documents(url)
    await documents.open()
    try:
        yield documents
    finally:
        await documents.close()
