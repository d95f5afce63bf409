"""The metadata server of a cloud's instance, over plain HTTP with short deadlines: EC2 (IMDSv2), GCP and Azure.

It has a link-local address, which off a cloud is a black hole. So the machine's maker is read first, from the firmware
tables that the kernel shows; nobody is asked on a machine that no cloud made.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import urllib.parse
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

__all__ = ["CloudName", "Metadata", "MetadataError", "find_metadata", "maker"]

CloudName = Literal["ec2", "gcp", "azure"]

_ADDRESS = "http://169.254.169.254"
_FIRMWARE = Path("/sys/class/dmi/id")
_MAKERS: Mapping[str, CloudName] = {"Amazon EC2": "ec2", "Google": "gcp", "Microsoft Corporation": "azure"}
_AZURE_CHASSIS = "7783-7084-3265-9085-8269-3286-77"
"""Microsoft's other virtual machines have another asset tag."""
_TOKEN_SECONDS = 21_600
_HEADERS: Mapping[CloudName, Mapping[str, str]] = {
    "ec2": {},
    "gcp": {"Metadata-Flavor": "Google"},
    "azure": {"Metadata": "true"},
}
_MOST_BYTES = 1_000_000


class MetadataError(OSError):
    """Report a metadata server that does not answer, or not with what was asked for."""


class Metadata:
    """The metadata server. It belongs to one thread.

    Args:
        cloud: whose.
        endpoint: such as http://169.254.169.254.
        timeout_seconds: of one request.
    """

    def __init__(self, cloud: CloudName, *, endpoint: str = _ADDRESS, timeout_seconds: float = 0.5) -> None:
        self.cloud, self._timeout_seconds = cloud, timeout_seconds
        parts = urllib.parse.urlsplit(endpoint if "//" in endpoint else f"//{endpoint}")
        self._host, self._port = parts.hostname or "", parts.port or 80
        self._token = ""

    def get(self, path: str) -> str | None:
        """Return what stands at a path; None if nothing does.

        Raises:
            MetadataError: the server does not answer.
        """
        if self.cloud != "ec2":
            return _text(*self._request("GET", path, _HEADERS[self.cloud]))
        self._token = self._token or self._new_token()
        status, text = self._request("GET", path, {"X-aws-ec2-metadata-token": self._token})
        if status == http.client.UNAUTHORIZED:  # it has expired
            self._token = self._new_token()
            status, text = self._request("GET", path, {"X-aws-ec2-metadata-token": self._token})
        return _text(status, text)

    def _new_token(self) -> str:
        headers = {"X-aws-ec2-metadata-token-ttl-seconds": str(_TOKEN_SECONDS)}
        status, text = self._request("PUT", "/latest/api/token", headers)
        if status != http.client.OK:
            raise MetadataError(f"the metadata server gave no token, but status {status}")
        return text

    def _request(self, method: str, path: str, headers: Mapping[str, str]) -> tuple[int, str]:
        # No proxy and no redirect is ever followed: who answers to this address is not the cloud.
        connection = http.client.HTTPConnection(self._host, self._port, timeout=self._timeout_seconds)
        with contextlib.closing(connection):
            try:
                connection.request(method, path, headers=dict(headers))
                answer = connection.getresponse()
                return answer.status, answer.read(_MOST_BYTES).decode(errors="replace").strip()
            except (OSError, http.client.HTTPException) as error:
                raise MetadataError(f"the metadata server at {self._host} does not answer: {error}") from None


def _text(status: int, text: str) -> str | None:
    if status == http.client.NOT_FOUND:
        return None
    if status != http.client.OK:
        raise MetadataError(f"the metadata server answered with status {status}")
    return text


def maker(folder: Path = _FIRMWARE) -> CloudName | None:
    """Return which cloud made this machine, by its firmware; None if none did."""
    cloud = _MAKERS.get(_line(folder / "sys_vendor"))
    if cloud == "azure" and not _line(folder / "chassis_asset_tag").startswith(_AZURE_CHASSIS):
        return None
    return cloud


def find_metadata(
    environment: Mapping[str, str] | None = None, *, folder: Path = _FIRMWARE, timeout_seconds: float = 0.5
) -> Metadata | None:
    """Return the metadata server of this machine; None off a cloud. Makes no request.

    The variables of the clouds' own libraries point to another address: `AWS_EC2_METADATA_SERVICE_ENDPOINT`,
    `GCE_METADATA_HOST`. `AWS_EC2_METADATA_DISABLED=true` says that there is none on EC2.
    """
    found = os.environ if environment is None else environment
    disabled = found.get("AWS_EC2_METADATA_DISABLED", "").lower() == "true"
    if (endpoint := found.get("AWS_EC2_METADATA_SERVICE_ENDPOINT")) and not disabled:
        return Metadata("ec2", endpoint=endpoint, timeout_seconds=timeout_seconds)
    if endpoint := found.get("GCE_METADATA_HOST"):
        return Metadata("gcp", endpoint=endpoint, timeout_seconds=timeout_seconds)
    cloud = maker(folder)
    if cloud is None or (cloud == "ec2" and disabled):
        return None
    return Metadata(cloud, timeout_seconds=timeout_seconds)


def _line(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
