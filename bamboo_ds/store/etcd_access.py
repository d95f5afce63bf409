"""What a user says to reach etcd: endpoints, TLS files, user and password."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc  # type: ignore[import-untyped]

from bamboo_ds.errors import ConfigError

__all__ = ["Login", "Tls", "read_endpoints"]


@dataclass(frozen=True, slots=True)
class Tls:
    """Files (PEM) for an encrypted connection.

    Attributes:
        ca_file: whom to trust; the system's authorities if None.
        cert_file: our own certificate, if the server asks for one.
        key_file: its key.
    """

    ca_file: str | Path | None = None
    cert_file: str | Path | None = None
    key_file: str | Path | None = None

    def credentials(self) -> Any:
        """Return gRPC's credentials.

        Raises:
            ConfigError: a file cannot be read, or one of certificate and key is missing.
        """
        if (self.cert_file is None) != (self.key_file is None):
            raise ConfigError("store TLS: cert_file and key_file go together; give both or neither")
        return grpc.ssl_channel_credentials(_read(self.ca_file), _read(self.key_file), _read(self.cert_file))


@dataclass(frozen=True, slots=True)
class Login:
    """A user of etcd. The password does not show in logs."""

    user: str
    password: str = field(repr=False)


def read_endpoints(endpoints: Sequence[str], tls: Tls | None) -> tuple[list[str], Tls | None]:
    """Return endpoints as gRPC wants them, and whether and how they are encrypted.

    Raises:
        ConfigError: there is none, one is no address, or only some are encrypted.
    """
    if isinstance(endpoints, str) or not endpoints:
        raise ConfigError(f"store endpoints = {endpoints!r}: must be a list of host:port")
    schemes, addresses = set(), []
    for endpoint in endpoints:
        scheme, separator, address = endpoint.rpartition("://")
        address = address.rstrip("/")
        port = address.rpartition(":")[2]
        if (separator and scheme not in ("http", "https")) or not port.isdecimal() or ":" not in address[1:]:
            raise ConfigError(f'store endpoint "{endpoint}": must be host:port, http://host:port or https://host:port')
        schemes.add(scheme or ("http" if tls is None else "https"))
        addresses.append(address)
    if len(schemes) > 1 or (tls is not None and "http" in schemes):
        raise ConfigError(f"store endpoints {list(endpoints)}: either all are encrypted (https) or none is")
    return addresses, (tls or Tls()) if schemes == {"https"} else None


def _read(file: str | Path | None) -> bytes | None:
    if file is None:
        return None
    try:
        return Path(file).read_bytes()
    except OSError as error:
        raise ConfigError(f'store TLS file "{file}": {error.strerror}') from None
