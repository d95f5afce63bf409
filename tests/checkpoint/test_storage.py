"""Every place for checkpoints keeps the same promise: a name stands for a whole file or for none."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bamboo_ds.checkpoint import DamagedError, Storage, open_storage
from bamboo_ds.checkpoint.local import LocalStorage
from bamboo_ds.checkpoint.storage import FileRecord, Sink, read_checked, write_bytes, write_file


def of(*pieces: Any) -> Callable[[Sink], None]:
    """Return what writes some pieces."""

    def write(sink: Sink) -> None:
        for piece in pieces:
            sink.write(piece)

    return write


def test_what_was_written_is_read(storage: Storage) -> None:
    record = write_file(storage, "a/one", of(b"some ", memoryview(b"bytes")))
    assert record == FileRecord(10, hashlib.sha256(b"some bytes").hexdigest())
    assert storage.read("a/one") == b"some bytes"
    assert read_checked(storage, "a/one", record) == b"some bytes"


def test_an_empty_place_is_empty(storage: Storage) -> None:
    assert storage.folders() == []
    assert storage.sizes("a") == {}
    with pytest.raises(FileNotFoundError):
        storage.read("a/one")
    storage.delete("a/one")
    storage.delete_folder("a")


def test_folders_and_files_are_listed(storage: Storage) -> None:
    for name in ("b/two", "a/one", "latest", "a/three"):
        write_bytes(storage, name, name.encode())
    assert storage.folders() == ["a", "b"]
    assert storage.sizes("a") == {"one": 5, "three": 7}


def test_a_write_that_fails_leaves_what_was_there(storage: Storage) -> None:
    write_bytes(storage, "a/one", b"old")

    def fail(sink: Sink) -> None:
        sink.write(b"new")
        raise RuntimeError("in the middle")

    for name in ("a/one", "a/other"):
        with pytest.raises(RuntimeError, match="in the middle"):
            write_file(storage, name, fail)
    assert storage.sizes("a") == {"one": 3}
    assert storage.read("a/one") == b"old"


def test_a_file_replaces_the_one_before(storage: Storage) -> None:
    for data in (b"long and old", b"new", b""):
        write_bytes(storage, "latest", data)
        assert storage.read("latest") == data


def test_what_is_deleted_is_gone(storage: Storage) -> None:
    for name in ("a/one", "a/two", "ab/one", "b/one"):
        write_bytes(storage, name, b"x")
    storage.delete("a/one")
    assert storage.sizes("a") == {"two": 1}
    storage.delete_folder("a")
    assert storage.folders() == ["ab", "b"]
    assert storage.sizes("a") == {}


def test_large_files_come_whole(storage: Storage) -> None:
    """Larger than a part of an upload, and no multiple of one."""
    data = os.urandom(1 << 20) * 33 + b"rest"
    record = write_file(storage, "a/large", of(data[:100], data[100:]))
    assert record.bytes == len(data)
    assert storage.sizes("a") == {"large": len(data)}
    assert storage.read("a/large") == data


def test_a_large_write_that_fails_leaves_nothing(bucket: str) -> None:
    import boto3

    storage = open_storage(f"s3://{bucket}")

    def fail(sink: Sink) -> None:
        sink.write(bytes(20 << 20))
        raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        write_file(storage, "a/large", fail)
    assert storage.sizes("a") == {}
    client = boto3.session.Session().client("s3")
    assert client.list_multipart_uploads(Bucket=bucket).get("Uploads", []) == []


def test_a_bucket_that_does_not_answer_is_an_error_of_the_system(bucket: str) -> None:
    storage = open_storage("s3://there-is-no-such-bucket/prefix")
    for call in (storage.folders, lambda: write_bytes(storage, "a/one", b"x")):
        with pytest.raises(OSError, match="NoSuchBucket"):
            call()


def test_more_objects_than_one_request_deletes(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bamboo_ds.checkpoint.s3._MOST_DELETED", 3)
    storage = open_storage(f"s3://{bucket}")
    for number in range(8):
        write_bytes(storage, f"a/{number}", b"x")
    storage.delete_folder("a")
    assert storage.folders() == []


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda path: path.unlink(), "a/one is missing"),
        (lambda path: path.write_bytes(b"some byte"), "a/one has 9 bytes, it was written with 10"),
        (lambda path: path.write_bytes(b"some bites"), "a/one has other bytes than were written"),
    ],
)
def test_damage_is_found(damage: object, told: str, tmp_path: Path) -> None:
    storage = LocalStorage(str(tmp_path))
    record = write_file(storage, "a/one", of(b"some bytes"))
    damage(tmp_path / "a" / "one")  # type: ignore[operator]
    with pytest.raises(DamagedError, match=told):
        read_checked(storage, "a/one", record)


def test_what_the_dead_left_beside_latest_is_swept_up_later(tmp_path: Path) -> None:
    storage = LocalStorage(str(tmp_path))
    old, new = tmp_path / ".latest.1-1.partial", tmp_path / ".latest.2-1.partial"
    for path in (old, new):
        path.write_bytes(b"x")
    os.utime(old, (1.0, 1.0))
    write_bytes(storage, "latest", b"x")
    assert {path.name for path in tmp_path.iterdir()} == {"latest", new.name}


def test_half_written_files_are_not_listed_and_go_with_their_folder(tmp_path: Path) -> None:
    storage = LocalStorage(str(tmp_path))
    with storage.create("a/one") as sink:
        sink.write(b"x")
        assert len(list((tmp_path / "a").iterdir())) == 1
        assert storage.sizes("a") == {}
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["one"]
    storage.delete_folder("a")
    assert list(tmp_path.iterdir()) == []
