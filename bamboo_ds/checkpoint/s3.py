"""An S3 bucket as a place for checkpoints.

An object is there whole or not at all by itself. Large ones are sent in parts, which become an object when the last
has come; those of a process that died in the middle never do (let the bucket's lifecycle rule delete them).

Endpoint, region and credentials come from where the AWS tools look for them (`AWS_ENDPOINT_URL`, `AWS_PROFILE`, the
role of the instance, ...).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from bamboo_ds.checkpoint.storage import Sink
from bamboo_ds.errors import ConfigError

PART_BYTES = 16 << 20
"""Of an upload in parts. S3 takes 5 MB or more, and at most 10,000 parts of an object."""

_ATTEMPTS = 8
_MOST_DELETED = 1000  # in one request
_NOT_THERE = ("NoSuchKey", "404")


class S3Storage:
    """Objects under a prefix of a bucket.

    Args:
        path: `s3://bucket/prefix`.

    Raises:
        ConfigError: boto3 is not installed.
    """

    def __init__(self, path: str) -> None:
        self.path = path.rstrip("/")
        self._bucket, _, prefix = self.path.removeprefix("s3://").partition("/")
        self._prefix = f"{prefix}/" if prefix else ""
        self._client = _client()

    @contextlib.contextmanager
    def create(self, name: str) -> Iterator[Sink]:
        """Write an object; see `Storage`."""
        upload = _Upload(self._client, self._bucket, self._prefix + name)
        with _as_os_errors():
            try:
                yield upload
                upload.complete()
            except BaseException:
                upload.abort()
                raise

    def read(self, name: str) -> bytes:
        """Return the bytes of an object."""
        with _as_os_errors():
            data: bytes = self._client.get_object(Bucket=self._bucket, Key=self._prefix + name)["Body"].read()
            return data

    def folders(self) -> list[str]:
        """Return what stands before the first slash of all names."""
        pages = self._pages(self._prefix, Delimiter="/")
        found = [common["Prefix"] for page in pages for common in page.get("CommonPrefixes", [])]
        return sorted(prefix.removeprefix(self._prefix).rstrip("/") for prefix in found)

    def sizes(self, folder: str) -> dict[str, int]:
        """Return the sizes of the objects of a folder."""
        prefix = f"{self._prefix}{folder}/"
        objects = [one for page in self._pages(prefix, Delimiter="/") for one in page.get("Contents", [])]
        return {one["Key"].removeprefix(prefix): int(one["Size"]) for one in objects}

    def delete(self, name: str) -> None:
        """Delete an object."""
        with _as_os_errors():
            self._client.delete_object(Bucket=self._bucket, Key=self._prefix + name)

    def delete_folder(self, folder: str) -> None:
        """Delete all objects of a folder."""
        keys = [f"{self._prefix}{folder}/{name}" for name in self.sizes(folder)]
        with _as_os_errors():
            for start in range(0, len(keys), _MOST_DELETED):
                objects = [{"Key": key} for key in keys[start : start + _MOST_DELETED]]
                self._client.delete_objects(Bucket=self._bucket, Delete={"Objects": objects, "Quiet": True})

    def _pages(self, prefix: str, **how: Any) -> list[dict[str, Any]]:
        with _as_os_errors():
            pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=self._bucket, Prefix=prefix, **how)
            return list(pages)


class _Upload:
    """An object under way: small ones are sent at the end, larger ones in parts as they come."""

    def __init__(self, client: Any, bucket: str, key: str) -> None:
        self._client, self._where = client, {"Bucket": bucket, "Key": key}
        self._buffer = bytearray()
        self._id: str | None = None
        self._parts: list[dict[str, Any]] = []

    def write(self, data: Any, /) -> int:
        with memoryview(data).cast("B") as view:
            self._buffer += view
            while len(self._buffer) >= PART_BYTES:
                self._send(PART_BYTES)
            return view.nbytes

    def flush(self) -> None:
        pass

    def _send(self, size: int) -> None:
        if self._id is None:
            self._id = str(self._client.create_multipart_upload(**self._where)["UploadId"])
        number, body = len(self._parts) + 1, bytes(self._buffer[:size])
        del self._buffer[:size]
        sent = self._client.upload_part(**self._where, UploadId=self._id, PartNumber=number, Body=body)
        self._parts.append({"PartNumber": number, "ETag": sent["ETag"]})

    def complete(self) -> None:
        """Make the object exist."""
        if self._id is None:
            self._client.put_object(**self._where, Body=bytes(self._buffer))
            return
        if self._buffer:
            self._send(len(self._buffer))
        self._client.complete_multipart_upload(**self._where, UploadId=self._id, MultipartUpload={"Parts": self._parts})

    def abort(self) -> None:
        """Let go of the parts that were sent, as far as the bucket answers."""
        if self._id is not None:
            with contextlib.suppress(Exception):
                self._client.abort_multipart_upload(**self._where, UploadId=self._id)


def _client() -> Any:
    try:
        import boto3
        from botocore.config import Config
    except ImportError:
        raise ConfigError("checkpoints in s3:// need boto3: pip install boto3, or use a folder") from None
    retries = {"max_attempts": _ATTEMPTS, "mode": "standard"}
    # A session of its own: the default one is shared with the script, and not made for threads.
    return boto3.session.Session().client("s3", config=Config(retries=retries, connect_timeout=10, read_timeout=60))


@contextlib.contextmanager
def _as_os_errors() -> Iterator[None]:
    """Let failures look like those of a file system."""
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        yield
    except ClientError as error:
        kind = FileNotFoundError if error.response["Error"]["Code"] in _NOT_THERE else OSError
        raise kind(str(error)) from error
    except BotoCoreError as error:
        raise OSError(str(error)) from error
