"""Connections: how many may be open, how slow they may be, and how much is logged about them.

If too many are open, the oldest one without the token is closed, so that the owner can always connect.
"""

import asyncio
import logging
import math
import socket
import time
from typing import Any, cast

import h11
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from geodl.app.serve.limits import BACKLOG
from geodl.app.serve.security import has_token
from geodl.app.serve.server import Server
from geodl.core.errors import ConfigError

log = logging.getLogger("geodl.serve")


class _Reader(h11.Connection):
    """An HTTP parser that reads chunked bodies only with the token: parsing chunks of one byte would delay all clients.

    trusted: whether the last request had the token; refused: whether its body is not read.
    """

    token, trusted, refused = "", False, False

    def next_event(self) -> Any:
        """Return the next event."""
        if self.refused:
            return h11.NEED_DATA
        event = super().next_event()
        if isinstance(event, h11.Request):
            headers = dict(event.headers)
            authorization = headers.get(b"authorization", b"").decode("latin-1")
            self.trusted = has_token(authorization, self.token)
            self.refused = b"transfer-encoding" in headers and not self.trusted
        return event


class Connection(H11Protocol):
    """A connection. `since`: when it began to wait for a request; `blocked`: when its client stopped reading."""

    since, blocked = 0.0, math.inf

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.shared: Server = self.config.app.state.server  # type: ignore[union-attr]
        self.conn = self.reader = _Reader(h11.SERVER)
        self.reader.token = self.shared.token

    @property
    def waiting(self) -> bool:
        """Whether no request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    @property
    def priority(self) -> tuple[bool, bool, float]:
        """The key of the order in which connections are closed: idle ones first, those with the token last."""
        return self.reader.trusted, not self.waiting, self.since

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accept a connection; if there are too many, close one."""
        super().connection_made(transport)
        self.since = self.loop.time()
        if len(self.connections) > self.shared.limits.open_connections:
            others = cast(set[Connection], self.connections - {self})
            worst = min(others, key=lambda connection: connection.priority)
            (self if worst.reader.trusted else worst).drop()
            log.warning("too many connections are open: some were closed")

    def data_received(self, data: bytes) -> None:
        """Read data; if the body is refused, stop reading."""
        super().data_received(data)
        if self.reader.refused:
            self.flow.pause_reading()

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        self.since = self.loop.time()
        super().on_response_complete()

    def pause_writing(self) -> None:
        """Record that the client does not read."""
        self.blocked = self.loop.time()
        super().pause_writing()

    def resume_writing(self) -> None:
        """Record that the client reads again."""
        self.blocked = math.inf
        super().resume_writing()

    def drop_if_slow(self) -> None:
        """Close a connection that took too long to send its request or to read the response."""
        limits, now = self.shared.limits, self.loop.time()
        asking = self.waiting and now - self.since > limits.header_seconds
        if asking or now - self.blocked > limits.idle_seconds:
            self.drop()

    def drop(self) -> None:
        """Close the connection at once."""
        self.connections.discard(self)
        self.transport.abort()


class _Listening(uvicorn.Server):
    """Closes slow connections, and ends event streams before it shuts down, which open pages would delay."""

    def __init__(self, app: FastAPI, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._shared: Server = app.state.server

    async def on_tick(self, counter: int) -> bool:
        if counter % 10 == 0:  # once a second
            for connection in list(self.server_state.connections):
                connection.drop_if_slow()  # type: ignore[union-attr]
            self._shared.tray.expire()
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._shared.closing = True
        await super().shutdown(sockets)


_logged: dict[str, tuple[float, int]] = {}


def _once_a_minute(record: logging.LogRecord) -> bool:
    """Log each kind of message once a minute, with the number of suppressed ones."""
    kind, now = str(record.msg)[:80], time.monotonic()
    last, suppressed = _logged.get(kind, (-math.inf, 0))
    if now - last < 60:
        _logged[kind] = (last, suppressed + 1)
        return False
    if len(_logged) > 100:
        _logged.clear()
    _logged[kind] = (now, 0)
    record.msg = f"{record.msg} (and {suppressed} times more)" if suppressed else record.msg
    return True


def bind(host: str, port: int = 0) -> socket.socket:
    """Return a listening socket; port 0: any free port."""
    if not 0 <= port <= 65535:
        raise ConfigError(f"port = {port}: allowed values are 0 to 65535")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listening = socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(f"cannot listen on {host} port {port}: {reason}") from error
    # asyncio sets this only on sockets of its own; without it every response waits 40 ms for an acknowledgment.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listening


def server_of(app: FastAPI) -> uvicorn.Server:
    """Return the uvicorn server of an application, to `run(sockets=[...])`."""
    config = uvicorn.Config(
        app,
        http=Connection,
        ws="none",
        backlog=BACKLOG,
        timeout_graceful_shutdown=3,
        proxy_headers=False,
        server_header=False,
        access_log=False,
        log_level="warning",
    )
    server = _Listening(app, config)
    for name in ("uvicorn.error", "asyncio", "python_multipart.multipart", log.name):
        logging.getLogger(name).addFilter(_once_a_minute)
    return server
