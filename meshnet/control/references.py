"""The references of the mesh's models: kept as documents, and known in this process."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Final, NamedTuple

from google.protobuf.message import DecodeError

from meshnet.control.documents import Documents, put_if_unchanged
from meshnet.control.probe_messages import reference_of
from meshnet.errors import Code, MeshError
from meshnet.probes import Reference
from meshnet.v1 import reference_service_pb2 as pb

__all__ = ["KIND", "Known", "References"]

KIND: Final = "references"
_FRESH_S: Final = 1.0

_log = logging.getLogger(__name__)


class Known(NamedTuple):
    """One reference; `revision` grows when another takes its place."""

    reference: Reference
    revision: int


class References:
    """References by model and digest.

    Args:
        documents: keep them, for all replicas.
        clock: monotonic seconds.

    Attributes:
        read_at: when they were last read, by the clock.
    """

    def __init__(self, documents: Documents, clock: Callable[[], float]) -> None:
        self._documents = documents
        self._clock = clock
        self._tried_at = self.read_at = -math.inf
        self._by_digest: dict[str, Known] = {}
        self._by_model: dict[str, dict[str, Known]] = {}

    async def refresh(self) -> None:
        """Read what other replicas wrote, unless that was done within a second.

        While documents are away, what was known stays.
        """
        now = self._clock()
        if now - self._tried_at < _FRESH_S:
            return
        self._tried_at = now
        try:
            await self.read()
        except MeshError as error:
            _log.warning("references cannot be read: %s", error)

    async def read(self) -> None:
        """Read all of them.

        Raises:
            MeshError: UNAVAILABLE.
        """
        began = self._clock()
        found: dict[str, Known] = {}
        for key, value, revision in await self._documents.list(KIND):
            known = self._by_digest.get(key)
            if known is None or known.revision != revision:
                known = _parse(key, value, revision)
            if known is not None:
                found[key] = known
        self._by_digest, self._by_model = found, {}
        for key, known in found.items():
            self._by_model.setdefault(f"models/{known.reference.model}", {})[key] = known
        self._tried_at = self.read_at = began

    def of_model(self, model: str) -> Mapping[str, Known]:
        """Give what is known of a model, named with ``models/``, by digest."""
        return self._by_model.get(model, {})

    async def introduce(self, messages: Iterable[pb.Reference]) -> None:
        """Keep references of digests that have none; another one that is kept stays.

        Raises:
            MeshError: UNAVAILABLE.
        """
        for message in messages:
            try:
                await self.put(message, replace=False)
            except MeshError as error:
                if error.code is not Code.ALREADY_EXISTS:
                    raise
                _log.warning("the reference of %s was not taken: %s", message.model, error)

    async def put(self, message: pb.Reference, *, replace: bool) -> pb.Reference:
        """Keep a reference; gives it as kept.

        Args:
            message: that `reference_of` can read.
            replace: take the place of another one of its digest.

        Raises:
            MeshError: ALREADY_EXISTS, another one is kept for its digest; UNAVAILABLE.
        """
        key = message.model_digest
        named = pb.Reference()
        named.CopyFrom(message)
        named.name = f"references/{key}"
        named.create_time.FromNanoseconds(time.time_ns())
        while True:
            kept = await self._documents.get(KIND, key)
            if kept is not None and _same(kept.value, named):
                return pb.Reference.FromString(kept.value)
            if kept is not None and not replace:
                raise MeshError(
                    Code.ALREADY_EXISTS,
                    f"model digest {key[:16]} has another reference: --replace takes its place",
                    field="reference.model_digest",
                    reason="REFERENCE_EXISTS",
                )
            revision = 0 if kept is None else kept.revision
            value = named.SerializeToString(deterministic=True)
            if await put_if_unchanged(self._documents, KIND, key, value, revision):
                break
        await self.read()
        return named

    async def delete(self, digest: str) -> bool:
        """Forget a reference; tells whether there was one.

        Raises:
            MeshError: UNAVAILABLE.
        """
        was_there = await self._documents.delete(KIND, digest)
        await self.read()
        return was_there

    async def messages(self) -> list[pb.Reference]:
        """Give all of them that can be read, in order of digest.

        Raises:
            MeshError: UNAVAILABLE.
        """
        found = [_read(document.value) for document in await self._documents.list(KIND)]
        return [message for message in found if message is not None]


def _parse(key: str, value: bytes, revision: int) -> Known | None:
    try:
        return Known(reference_of(pb.Reference.FromString(value)), revision)
    except (DecodeError, MeshError) as error:
        _log.error("reference %s cannot be read and is left out: %s", key, error)
        return None


def _read(value: bytes) -> pb.Reference | None:
    try:
        return pb.Reference.FromString(value)
    except DecodeError:
        return None


def _same(value: bytes, message: pb.Reference) -> bool:
    kept = _read(value)
    if kept is None:
        return False
    kept.ClearField("create_time")
    other = pb.Reference()
    other.CopyFrom(message)
    other.ClearField("create_time")
    return kept == other
