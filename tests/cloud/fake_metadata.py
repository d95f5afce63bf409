"""A metadata server on loopback, as EC2, GCP and Azure have one: it is as strict about its headers as they are."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any

from tests.cloud.aws import serving

HEADERS = {"gcp": ("Metadata-Flavor", "Google"), "azure": ("Metadata", "true")}


@dataclass
class FakeMetadata:
    """What it says, which a test may change.

    Attributes:
        cloud: ec2, gcp or azure.
        paths: what stands where.
        token: that is valid now (EC2).
        delay_seconds: before each answer.
    """

    cloud: str = "ec2"
    paths: dict[str, str] = field(default_factory=dict)
    token: str = "token-1"
    delay_seconds: float = 0.0
    endpoint: str = ""
    asked: list[str] = field(default_factory=list)


def handler_of(fake: FakeMetadata) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_PUT(self) -> None:
            fake.asked.append(f"PUT {self.path}")
            if self.path != "/latest/api/token" or not self.headers.get("X-aws-ec2-metadata-token-ttl-seconds"):
                return self.answer(400, "")
            return self.answer(200, fake.token)

        def do_GET(self) -> None:
            fake.asked.append(self.path)
            if not self.allowed():
                return self.answer(401 if fake.cloud == "ec2" else 403, "")
            text = fake.paths.get(self.path)
            return self.answer(404, "") if text is None else self.answer(200, text)

        def allowed(self) -> bool:
            if fake.cloud == "ec2":
                return self.headers.get("X-aws-ec2-metadata-token") == fake.token
            name, value = HEADERS[fake.cloud]
            return self.headers.get(name) == value

        def answer(self, status: int, text: str) -> None:
            time.sleep(fake.delay_seconds)
            with contextlib.suppress(OSError):  # who asked has given up
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text.encode())

        def log_message(self, *arguments: Any) -> None:
            """Say nothing."""

    return Handler


@contextlib.contextmanager
def fake_metadata(cloud: str = "ec2", **paths: str) -> Iterator[FakeMetadata]:
    """Serve metadata."""
    fake = FakeMetadata(cloud, dict(paths))
    with serving(handler_of(fake)) as fake.endpoint:
        yield fake
