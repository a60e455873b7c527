"""One contract for documents in memory, SQLite and etcd, each opened twice."""

from __future__ import annotations

import asyncio
import sqlite3
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from meshnet.control.documents import MAX_DOCUMENT_BYTES, Document, Documents
from meshnet.control.etcd.documents import EtcdDocuments
from meshnet.control.sqlite_documents import SqliteDocuments
from meshnet.control.store_url import make_documents, make_store
from meshnet.errors import Code, ConfigError, MeshError
from meshnet.internal.etcd.v3 import etcd_pb2 as etcd
from tests.control.document_stores import opened
from tests.control.etcd_cluster import Cluster, Proxy, etcd_cluster
from tests.plane.certificates import Authority, make_authority

KIND = "join-tokens"


async def test_what_one_writes_the_other_reads(pair):
    one, other = pair
    first = await one.put(KIND, "a", b"\0one")
    second = await other.put(KIND, "b", b"")
    assert 0 < first < second
    assert await other.get(KIND, "a") == Document("a", b"\0one", first)
    assert await one.list(KIND) == [Document("a", b"\0one", first), Document("b", b"", second)]
    third = await other.put(KIND, "a", b"again")
    assert third > second
    assert await one.get(KIND, "a") == Document("a", b"again", third)


async def test_nothing_is_there_at_first(pair):
    one, _ = pair
    assert await one.get(KIND, "a") is None
    assert await one.list(KIND) == []
    assert await one.delete(KIND, "a") is False


async def test_kinds_are_apart(pair):
    one, other = pair
    for kind in ("key", "keys", "key-s"):
        await one.put(kind, "x", kind.encode())
        await one.put(kind, "x/y", kind.encode())
    assert {item.value for item in await other.list("key")} == {b"key"}
    assert [item.key for item in await other.list("keys")] == ["x", "x/y"]
    assert await other.delete("keys", "x") is True
    assert await one.get("keys", "x") is None
    assert await one.get("key-s", "x") is not None


async def test_lists_are_in_order_of_key(pair):
    one, other = pair
    names = ["b", "~", "B", "a", "a/b", "a-b", "0", "ab"]
    for name in names:
        await one.put(KIND, name, b"v")
    assert [item.key for item in await other.list(KIND)] == sorted(names)


async def test_a_write_that_expects_none_is_refused_where_there_is_one(pair):
    one, other = pair
    revision = await one.put(KIND, "a", b"1", expected=0)
    with pytest.raises(MeshError) as caught:
        await other.put(KIND, "a", b"1", expected=0)
    assert (caught.value.code, caught.value.reason) == (Code.ABORTED, "CONFLICT")
    assert await one.get(KIND, "a") == Document("a", b"1", revision)


async def test_a_write_that_expects_another_revision_is_refused(pair):
    one, other = pair
    revision = await one.put(KIND, "a", b"1")
    newer = await other.put(KIND, "a", b"2", expected=revision)
    for stale in (revision, newer + 100):
        with pytest.raises(MeshError) as caught:
            await one.put(KIND, "a", b"3", expected=stale)
        assert caught.value.code is Code.ABORTED
    assert await one.get(KIND, "a") == Document("a", b"2", newer)


async def test_a_record_made_anew_is_not_the_one_expected(pair):
    one, other = pair
    revision = await one.put(KIND, "a", b"1")
    await other.delete(KIND, "a")
    with pytest.raises(MeshError):
        await one.put(KIND, "a", b"2", expected=revision)
    newer = await other.put(KIND, "a", b"1", expected=0)
    assert newer > revision
    with pytest.raises(MeshError):
        await one.put(KIND, "a", b"2", expected=revision)


async def test_of_many_who_expect_the_same_one_wins(pair):
    revision = await pair[0].put(KIND, "uses", b"1")
    tries = [pair[index % 2].put(KIND, "uses", b"0", expected=revision) for index in range(8)]
    results = await asyncio.gather(*tries, return_exceptions=True)
    assert sum(isinstance(result, int) for result in results) == 1
    assert all(isinstance(result, int | MeshError) for result in results)


async def test_counting_up_together_loses_nothing(pair):
    async def count_up(documents: Documents) -> None:
        while True:
            had = await documents.get(KIND, "count") or Document("count", b"0", 0)
            value = b"%d" % (int(had.value) + 1)
            try:
                await documents.put(KIND, "count", value, expected=had.revision)
            except MeshError as error:
                if error.code is not Code.ABORTED:
                    raise
            else:
                return

    await asyncio.gather(*(count_up(pair[index % 2]) for index in range(10)))
    found = await pair[0].get(KIND, "count")
    assert found is not None
    assert found.value == b"10"


@pytest.mark.parametrize(
    ("kind", "key", "value", "field"),
    [
        ("", "a", b"", "kind"),
        ("a/b", "a", b"", "kind"),
        ("Kind", "a", b"", "kind"),
        ("k" * 64, "a", b"", "kind"),
        (KIND, "", b"", "key"),
        (KIND, "a b", b"", "key"),
        (KIND, "a\0", b"", "key"),
        (KIND, "é", b"", "key"),
        (KIND, "a" * 257, b"", "key"),
        (KIND, "a", bytes(MAX_DOCUMENT_BYTES + 1), "value"),
    ],
)
async def test_out_of_bounds_is_refused(pair, kind, key, value, field):
    with pytest.raises(MeshError) as caught:
        await pair[0].put(kind, key, value)
    assert (caught.value.code, caught.value.field) == (Code.INVALID_ARGUMENT, field)
    assert await pair[0].list(KIND) == []


async def test_the_largest_fits(pair):
    one, other = pair
    await one.put("k" * 63, "a" * 256, bytes(MAX_DOCUMENT_BYTES))
    found = await other.get("k" * 63, "a" * 256)
    assert found is not None
    assert found.value == bytes(MAX_DOCUMENT_BYTES)


# -- SQLite ------------------------------------------------------------------------------------


async def test_sqlite_documents_outlive_their_opener_and_the_registry_is_another_file(tmp_path):
    url = f"sqlite:{tmp_path}/mesh.db"
    registry = make_store(url, lambda: 0.0, 600.0)
    await registry.open()  # holds its file alone
    try:
        async with opened(url) as documents:
            revision = await documents.put(KIND, "a", b"1")
        async with opened(url) as documents:
            assert await documents.get(KIND, "a") == Document("a", b"1", revision)
            assert await documents.put(KIND, "a", b"2") > revision
    finally:
        await registry.close()


async def test_another_process_writes_the_same_file(tmp_path):
    url = f"sqlite:{tmp_path}/mesh.db"
    program = (
        "import asyncio, sys\n"
        "from meshnet.control.store_url import make_documents\n"
        "async def main():\n"
        "    documents = make_documents(sys.argv[1])\n"
        "    await documents.open()\n"
        "    for number in range(20):\n"
        "        await documents.put(sys.argv[2], str(number), b'x')\n"
        "    await documents.close()\n"
        "asyncio.run(main())\n"
    )
    async with opened(url) as documents:
        children = [
            await asyncio.create_subprocess_exec(sys.executable, "-c", program, url, kind)
            for kind in ("one", "two")
        ]
        for number in range(20):
            await documents.put("three", str(number), b"x")
        assert [await child.wait() for child in children] == [0, 0]
        items = [item for kind in ("one", "two", "three") for item in await documents.list(kind)]
        assert sorted(item.revision for item in items) == list(range(1, 61))


async def test_a_slow_writer_elsewhere_is_waited_for_off_the_event_loop(tmp_path):
    async with opened(f"sqlite:{tmp_path}/mesh.db") as documents:
        other = sqlite3.connect(tmp_path / "mesh.db-documents", isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        write = asyncio.ensure_future(documents.put(KIND, "a", b"1"))
        for _ in range(100):
            await asyncio.sleep(0)
        assert not write.done()
        other.execute("COMMIT")
        other.close()
        assert await write > 0


async def test_only_the_owner_may_read_the_file(tmp_path):
    async with opened(f"sqlite:{tmp_path}/mesh.db") as documents:
        await documents.put(KIND, "a", b"1")
        files = list(tmp_path.glob("mesh.db-documents*"))
        assert len(files) >= 2  # the write-ahead log is one
        assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}


def write_garbage(path: Path) -> None:
    path.write_bytes(b"no database" * 100)


def write_another(path: Path) -> None:
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE t (x)")
    database.close()


def write_newer(path: Path) -> None:
    with sqlite3.connect(path) as database:
        database.execute("PRAGMA application_id = 0x6D657364")
        database.execute("PRAGMA user_version = 2")
    database.close()


@pytest.mark.parametrize("write", [write_garbage, write_another, write_newer, Path.mkdir])
async def test_a_file_of_another_kind_is_refused_and_left_as_it_is(
    tmp_path, write: Callable[[Path], None]
):
    path = tmp_path / "mesh.db-documents"
    write(path)
    before = path.read_bytes() if path.is_file() else None
    documents = make_documents(f"sqlite:{tmp_path}/mesh.db")
    with pytest.raises(ConfigError, match="cannot keep documents in"):
        await documents.open()
    await documents.close()
    assert before == (path.read_bytes() if path.is_file() else None)


async def test_a_folder_that_is_missing_is_said(tmp_path):
    documents = SqliteDocuments(tmp_path / "missing" / "file")
    with pytest.raises(ConfigError, match="No such file"):
        await documents.open()
    await documents.close()


async def test_a_closed_file_answers_unavailable(tmp_path):
    documents = SqliteDocuments(tmp_path / "file")
    with pytest.raises(MeshError) as caught:
        await documents.get(KIND, "a")
    assert caught.value.code is Code.UNAVAILABLE
    await documents.close()


# -- etcd --------------------------------------------------------------------------------------


@pytest.mark.etcd
async def test_etcd_that_is_away_is_said(lone_etcd):
    await lone_etcd.emptied()
    async with Proxy.to(lone_etcd) as proxy:
        documents = EtcdDocuments([proxy.address])
        await documents.open()
        proxy.cut()
        with pytest.raises(MeshError) as caught:
            await documents.put(KIND, "a", b"1")
        assert caught.value.code is Code.UNAVAILABLE
        proxy.heal()
        assert await documents.put(KIND, "a", b"2") > 0
        await documents.close()


@pytest.mark.etcd
async def test_a_write_whose_answer_was_lost_is_no_conflict(lone_etcd, monkeypatch):
    """The client makes a call again that got no answer; the first one may have been done."""
    await lone_etcd.emptied()
    documents = EtcdDocuments(list(lone_etcd.addresses.values()))
    once = documents._client.txn

    async def twice(request: etcd.TxnRequest) -> etcd.TxnResponse:
        await once(request)
        return await once(request)

    monkeypatch.setattr(documents._client, "txn", twice)
    revision = await documents.put(KIND, "a", b"1", expected=0)
    assert await documents.get(KIND, "a") == Document("a", b"1", revision)
    with pytest.raises(MeshError):
        await documents.put(KIND, "a", b"1", expected=0)
    await documents.close()


@pytest.fixture(scope="module")
def guarded(tmp_path_factory) -> Iterator[tuple[Cluster, Authority]]:
    """An etcd that wants certificates of its clients."""
    authority = make_authority(tmp_path_factory.mktemp("etcd-tls"))
    with etcd_cluster(tmp_path_factory.mktemp("etcds"), 1, tls=authority) as cluster:
        yield cluster, authority


@pytest.mark.etcd
async def test_etcd_with_tls(guarded, tmp_path):
    cluster, authority = guarded
    (address,) = cluster.addresses.values()
    trusting = f"etcds://{address}?ca={authority.ca}"
    url = f"{trusting}&cert={authority.certificate}&key={authority.key}"
    async with asyncio.timeout(60):
        while True:  # until the member has started
            documents = make_documents(url)
            try:
                await documents.open()
                break
            except MeshError:
                await documents.close()
    revision = await documents.put(KIND, "a", b"1")
    store = make_store(url, lambda: 0.0, 600.0)
    await store.open()
    assert store.health().is_connected
    await store.close()
    stranger = make_authority(tmp_path / "stranger")
    for refused in (
        f"etcd://{address}",
        trusting,
        f"etcds://{address}?ca={stranger.ca}&cert={authority.certificate}&key={authority.key}",
        f"{trusting}&cert={stranger.certificate}&key={stranger.key}",
    ):
        other = make_documents(refused)
        with pytest.raises(MeshError) as caught:
            await other.open()
        assert caught.value.code is Code.UNAVAILABLE
        await other.close()
    assert await documents.get(KIND, "a") == Document("a", b"1", revision)
    await documents.close()


# -- URLs --------------------------------------------------------------------------------------


NO_STORES = [
    *("", "sqlite:", "sqlite:/", "file:x"),
    *("etcd://", "etcd://h", "etcd://h:1?ca=x", "etcds://", "etcds://h", "etcds://h:1?x=y"),
    *("etcds://h:1?ca", "etcds://h:1?ca=", "etcds://h:1?ca=a&ca=b"),
]


@pytest.mark.parametrize("text", NO_STORES)
def test_what_is_no_store_is_refused(text):
    with pytest.raises(ConfigError, match="expected memory, sqlite:PATH or etcd://"):
        make_documents(text)


def test_files_of_etcd_that_cannot_be_used(tmp_path):
    authority = make_authority(tmp_path)
    for query, said in (
        (f"ca={tmp_path}/none", "etcds-ca: .*No such file"),
        (f"cert={authority.certificate}", "etcds-key is missing"),
        (f"key={authority.key}", "etcds-cert is missing"),
        (f"cert={authority.ca}&key={authority.key}", "is not the key of etcds-cert"),
    ):
        with pytest.raises(ConfigError, match=said):
            make_documents(f"etcds://127.0.0.1:1?{query}")
