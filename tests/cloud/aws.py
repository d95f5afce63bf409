"""A cloud on loopback: moto's server, and before it a gate that can refuse, keep silent, or lose an answer."""

from __future__ import annotations

import contextlib
import http.client
import threading
import urllib.parse
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

REGION = "eu-west-1"
ERROR = """<?xml version="1.0" encoding="UTF-8"?>
<Response><Errors><Error><Code>{code}</Code><Message>{message}</Message></Error></Errors>
<RequestID>59dbff89-35bd-4eac-99ed-be587EXAMPLE</RequestID></Response>"""
QUERY_ERROR = """<ErrorResponse><Error><Type>Sender</Type><Code>{code}</Code><Message>{message}</Message></Error>
<RequestId>59dbff89-35bd-4eac-99ed-be587EXAMPLE</RequestId></ErrorResponse>"""


@dataclass(frozen=True)
class Refusal:
    """An error that EC2 answers with."""

    code: str
    message: str = "no"
    status: int = 400


@dataclass(frozen=True)
class Reply:
    """An answer that moto would not give."""

    body: str


class LoseAnswer:
    """Do as told, and break the connection before the answer."""


Fault = Refusal | Reply | LoseAnswer


@dataclass
class Gate:
    """Passes requests on to moto, but for the faults that a test has put in their way.

    Attributes:
        faults: by action, what becomes of its next calls.
        calls: how often each action was asked for.
    """

    moto: tuple[str, int]
    faults: dict[str, list[Fault]] = field(default_factory=dict)
    calls: Counter[str] = field(default_factory=Counter)
    requests: list[dict[str, str]] = field(default_factory=list)
    endpoint: str = ""

    def forward(
        self, method: str, path: str, headers: dict[str, str], body: bytes
    ) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection(*self.moto, timeout=30)
        with contextlib.closing(connection):
            connection.request(method, path, body=body, headers=headers)
            answer = connection.getresponse()
            return answer.status, dict(answer.getheaders()), answer.read()


def handler_of(gate: Gate) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            form = dict(urllib.parse.parse_qsl(body.decode()))
            action = form.get("Action", "")
            gate.calls[action] += 1
            gate.requests.append(form)
            fault = gate.faults[action].pop(0) if gate.faults.get(action) else None
            if isinstance(fault, Refusal):
                text = (QUERY_ERROR if "autoscaling" in self.headers.get("Authorization", "") else ERROR).format(
                    code=fault.code, message=fault.message
                )
                return self.answer(fault.status, {}, text.encode())
            if isinstance(fault, Reply):
                return self.answer(200, {}, fault.body.encode())
            status, headers, answer = gate.forward("POST", self.path, dict(self.headers), body)
            if isinstance(fault, LoseAnswer):
                self.close_connection = True
                return self.connection.close()
            return self.answer(status, headers, answer)

        def answer(self, status: int, headers: dict[str, str], body: bytes) -> None:
            self.send_response(status)
            for name, value in headers.items():
                if name.lower() not in ("content-length", "transfer-encoding", "connection", "server", "date"):
                    self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments: Any) -> None:
            """Say nothing."""

    return Handler


@contextlib.contextmanager
def serving(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """Serve on loopback; give the endpoint."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)
