"""ReferenceService, over every store of documents, by two replicas; and over both faces."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from google.protobuf import json_format

from meshnet.control.documents import MemoryDocuments
from meshnet.control.reference_service import ReferenceService
from meshnet.control.references import KIND, References
from meshnet.errors import Code, MeshError
from meshnet.v1 import reference_service_pb2 as pb
from tests.control.conftest import FakeClock
from tests.control.numbers import DIGEST, OTHER_DIGEST, reference


class Replica:
    """The service of one replica, and what it knows."""

    def __init__(self, documents):
        self.clock = FakeClock()
        self.documents = documents
        self.known = References(documents, self.clock)
        self._service = ReferenceService(self.known)

    async def put(self, message, *, replace=False):
        request = pb.PutReferenceRequest(reference=message, replace=replace)
        return (await self._service.PutReference(request, None)).reference

    async def list(self, **fields):
        return await self._service.ListReferences(pb.ListReferencesRequest(**fields), None)

    async def delete(self, name):
        await self._service.DeleteReference(pb.DeleteReferenceRequest(name=name), None)

    async def scales(self):
        """Give the noise that is known of each digest of the model, as nodes are judged by."""
        self.clock.advance(2.0)
        await self.known.refresh()
        return {
            digest: known.reference.variants["bfloat16"]["head"].noise
            for digest, known in self.known.of_model("models/acme/tiny").items()
        }


@pytest.fixture
def replicas(pair):
    return Replica(pair[0]), Replica(pair[1])


async def refused(call) -> MeshError:
    with pytest.raises(MeshError) as caught:
        await call
    return caught.value


async def test_what_one_replica_is_given_the_other_knows(replicas):
    one, other = replicas
    kept = await one.put(reference())
    assert (kept.name, kept.model, kept.layer_count) == (
        f"references/{DIGEST}",
        "models/acme/tiny",
        8,
    )
    assert kept.create_time.seconds > 0
    assert [(each.dtype, len(each.parts)) for each in kept.variants] == [("bfloat16", 0)]
    assert list((await other.list()).references) == [kept]
    assert await other.scales() == {DIGEST: 0.01}
    assert await one.scales() == {DIGEST: 0.01}


async def test_the_same_again_changes_nothing_and_another_takes_its_place_when_told(replicas):
    one, other = replicas
    kept = await one.put(reference())
    assert await other.put(reference()) == kept
    error = await refused(other.put(reference(noise=0.5)))
    assert (error.code, error.reason) == (Code.ALREADY_EXISTS, "REFERENCE_EXISTS")
    assert error.field == "reference.model_digest"
    assert await one.scales() == {DIGEST: 0.01}
    await other.put(reference(noise=0.5), replace=True)
    assert await one.scales() == {DIGEST: 0.5}


async def test_a_model_may_have_several_digests_and_loses_one_at_a_time(replicas):
    one, other = replicas
    await one.put(reference())
    await other.put(reference(OTHER_DIGEST, noise=0.2))
    assert await one.scales() == {DIGEST: 0.01, OTHER_DIGEST: 0.2}
    await one.delete(f"references/{DIGEST}")
    assert await other.scales() == {OTHER_DIGEST: 0.2}
    error = await refused(other.delete(f"references/{DIGEST}"))
    assert (error.code, error.reason) == (Code.NOT_FOUND, "REFERENCE_UNKNOWN")


async def test_of_two_who_are_first_one_is_believed(replicas):
    answers = await asyncio.gather(
        *(each.put(reference(noise=0.1 * n)) for n, each in enumerate(replicas, 1)),
        return_exceptions=True,
    )
    errors = [answer for answer in answers if isinstance(answer, MeshError)]
    assert [error.reason for error in errors] == ["REFERENCE_EXISTS"]
    one, other = replicas
    assert len(await one.scales()) == 1
    assert await one.scales() == await other.scales()


async def test_what_is_given_at_the_start_takes_no_others_place(replicas):
    one, other = replicas
    await one.put(reference(noise=0.3))
    await other.known.introduce([reference(), reference(OTHER_DIGEST)])
    assert await one.scales() == {DIGEST: 0.3, OTHER_DIGEST: 0.01}


@pytest.fixture
def alone():
    return Replica(MemoryDocuments())


async def test_they_are_listed_in_pages_by_model(alone):
    names = ["b/two", "a/one", "c/three"]
    for index, name in enumerate(names):
        await alone.put(reference(f"{index:064x}", name=name))
    seen, token = [], ""
    while True:
        page = await alone.list(page_size=2, page_token=token)
        seen += [each.model for each in page.references]
        token = page.next_page_token
        if not token:
            break
        assert len(page.references) == 2
    assert seen == ["models/a/one", "models/b/two", "models/c/three"]


@pytest.mark.parametrize("fields", [{"page_size": -1}, {"page_token": "no such token"}])
async def test_a_page_that_cannot_be_is_refused(alone, fields):
    error = await refused(alone.list(**fields))
    assert (error.code, error.field) == (Code.INVALID_ARGUMENT, next(iter(fields)))


@pytest.mark.parametrize(
    "name", ["", "references/", DIGEST, "nodes/a", "references/../a", "references/a/b"]
)
async def test_a_name_that_is_none_is_refused(alone, name):
    await alone.put(reference())
    error = await refused(alone.delete(name))
    assert (error.code, error.field) == (Code.INVALID_ARGUMENT, "name")
    assert await alone.scales() == {DIGEST: 0.01}


def _broken(change):
    message = reference()
    change(message, message.variants[0].parts[1])
    return message


def _twice(message, part):
    message.variants[0].parts.append(part)


def _too_many(message, part):
    message.variants.extend([message.variants[0]] * 8)


BAD = {
    "model": lambda m, _: m.ClearField("model"),
    "model_digest": lambda m, _: setattr(m, "model_digest", "../../etc/passwd"),
    "layer_count": lambda m, _: setattr(m, "layer_count", 1 << 31),
    "probe_version": lambda m, _: m.ClearField("probe_version"),
    "variants": lambda m, _: m.ClearField("variants"),
    "variants ": _too_many,
    "variants[0].dtype": lambda m, _: m.variants[0].ClearField("dtype"),
    "variants[0].parts": _twice,
    "variants[0].parts ": lambda _, p: setattr(p, "name", "a\nb"),
    "variants[0].parts[1].name": lambda _, p: p.ClearField("name"),
    "variants[0].parts[1].digest": lambda _, p: setattr(p, "digest", b"short"),
    "variants[0].parts[1].sketch": lambda _, p: p.sketch.append(1.0),
    "variants[0].parts[1]": lambda _, p: setattr(p, "scale", -1.0),
    "variants[0].parts[1] ": lambda _, p: setattr(p, "noise", np.nan),
    "variants[0].parts[1]  ": lambda _, p: p.sketch.__setitem__(0, np.inf),
    "variants[0].parts[1]   ": lambda _, p: setattr(p, "scale", 0.0),
}


@pytest.mark.parametrize("path", BAD)
async def test_what_is_no_reference_is_refused_and_nothing_kept(alone, path):
    error = await refused(alone.put(_broken(BAD[path]), replace=True))
    assert (error.code, error.field) == (Code.INVALID_ARGUMENT, f"reference.{path.strip()}")
    assert await alone.documents.list(KIND) == []


async def test_a_store_that_is_away_is_said_and_what_was_known_stays(alone, caplog):
    await alone.put(reference())

    async def away(*_args, **_kwargs):
        raise MeshError(Code.UNAVAILABLE, "the store is away", reason="STORE_UNAVAILABLE")

    for name in ("get", "put", "delete", "list"):
        setattr(alone.documents, name, away)
    for call in (
        alone.put(reference(OTHER_DIGEST)),
        alone.delete(f"references/{DIGEST}"),
        alone.list(),
    ):
        assert (await refused(call)).reason == "STORE_UNAVAILABLE"
    assert await alone.scales() == {DIGEST: 0.01}
    assert "references cannot be read" in caplog.text


async def test_a_record_that_cannot_be_read_is_left_out(alone, caplog):
    await alone.documents.put(KIND, "broken", b"\xff\xff")
    await alone.put(reference())
    assert await alone.scales() == {DIGEST: 0.01}
    assert "reference broken cannot be read and is left out" in caplog.text
    assert [each.model_digest for each in (await alone.list()).references] == [DIGEST]


async def test_the_service_answers_on_both_faces(mesh):
    message = reference()
    kept = await mesh.client.put_reference(message)
    assert [each.name for each in await mesh.client.list_references()] == [kept.name]
    body = {"reference": json_format.MessageToDict(message)}
    status, answer = await mesh.json("POST", "/v1/references", json=body)
    assert (status, answer["reference"]["name"]) == (200, kept.name)
    body["reference"]["variants"][0]["parts"][0]["noise"] = 0.5
    status, answer = await mesh.json("POST", "/v1/references", json=body)
    assert (status, "--replace" in answer["message"]) == (409, True)
    status, answer = await mesh.json("POST", "/v1/references", json={"reference": {}})
    assert status == 400
    status, answer = await mesh.json("GET", "/v1/references")
    assert (status, len(answer["references"])) == (200, 1)
    assert (await mesh.json("DELETE", f"/v1/{kept.name}"))[0] == 200
    assert (await mesh.json("DELETE", f"/v1/{kept.name}"))[0] == 404
    assert await mesh.client.list_references() == []
