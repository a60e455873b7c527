"""One mesh of tiny nodes for all schedules of a test run."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest
import pytest_asyncio

from tests.chaos.mesh import Mesh, MeshOptions, running_mesh
from tests.chaos.model import (
    CHUNK_TOKENS,
    NUM_REQUESTS,
    STAGES,
    Request,
    prepare_requests,
    save_model,
)


@dataclass
class Place:
    """A mesh, and requests with their texts."""

    mesh: Mesh
    requests: list[Request]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def place(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Place]:
    folder = tmp_path_factory.mktemp("chaos")
    model = save_model(folder / "tiny")
    requests = prepare_requests(model, NUM_REQUESTS)
    options = MeshOptions(model, STAGES, chunk_tokens=CHUNK_TOKENS)
    async with running_mesh(options, folder / "logs") as mesh:
        yield Place(mesh, requests)
