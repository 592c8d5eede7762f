"""One line of JSON each way over TCP: how supervisor, agents and driver talk within an attempt."""

from __future__ import annotations

import hmac
import json
import socket
import socketserver
import threading
from collections.abc import Callable, Mapping
from typing import Any

from slime_hpc.errors import ClusterError

MAX_LINE = 64 * 1024
REQUEST_TIMEOUT_S = 10.0


class ControlServer:
    """Answers messages that carry the attempt's token, each in a thread; others are closed on unread.

    ``handle(message)`` returns the answer, or None for ``{"ok": true}``.
    """

    def __init__(self, host: str, token: str, handle: Callable[[dict[str, Any]], dict[str, Any] | None]) -> None:
        class Handler(socketserver.StreamRequestHandler):
            timeout = REQUEST_TIMEOUT_S

            def handle(self) -> None:
                message = _parse(self.rfile.readline(MAX_LINE), token)
                if message is not None:
                    self.wfile.write(_line(handle(message) or {"ok": True}))

        self._server = socketserver.ThreadingTCPServer((host, 0), Handler)
        self._server.daemon_threads = True
        self.address: tuple[str, int] = (host, self._server.server_address[1])
        threading.Thread(target=self._server.serve_forever, name="control", daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def send(address: tuple[str, int], token: str, message: Mapping[str, Any], *, timeout_s: float = 5.0) -> dict[str, Any]:
    """Send one message and return the answer. ClusterError if there is none."""
    try:
        with socket.create_connection(address, timeout=timeout_s) as connection:
            connection.sendall(_line({**message, "token": token}))
            with connection.makefile("rb") as answers:
                answer = answers.readline(MAX_LINE)
    except OSError as error:
        raise ClusterError(f"{address[0]}:{address[1]} did not answer: {error}") from error
    if not answer:
        raise ClusterError(f"{address[0]}:{address[1]} hung up without an answer")
    parsed: dict[str, Any] = json.loads(answer)
    return parsed


def _line(message: Mapping[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


def _parse(line: bytes, token: str) -> dict[str, Any] | None:
    """The message, or None from a stranger."""
    try:
        message = json.loads(line)
        known = hmac.compare_digest(str(message.pop("token")).encode(), token.encode())
    except (ValueError, KeyError, AttributeError, TypeError):
        return None  # whoever found this port by chance
    return message if known else None
