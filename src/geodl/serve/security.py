"""Who may do what over HTTP: hosts, origins, tokens, limits, and what a browser is told about the pages."""

import hmac
import ipaddress
import os
import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from geodl.errors import ConfigError
from geodl.files import readable

TOKEN_VARIABLE = "GEODL_TOKEN"
SHORTEST_TOKEN = 16


class Refused(Exception):  # noqa: N818  # an answer, not a fault
    """A request that is answered with a status other than success and one plain sentence."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status


@dataclass(frozen=True)
class Limits:
    """What a client may ask for: sizes in bytes, times in seconds.

    predict_body, learn_body:   size of one request with images.
    other_body:                 size of any other request; it is read before the token is checked.
    predict_images, learn_images: images in one request.
    upload_seconds:             for sending one request.
    answer_seconds:             for predicting one request, or for writing an ONNX file or a report.
    predictions, uploads:       requests of that kind at once.
    streams:                    open event streams.
    jobs:                       jobs that wait.
    """

    predict_body: int = 64_000_000
    learn_body: int = 1_000_000_000
    other_body: int = 64_000
    predict_images: int = 100
    learn_images: int = 10_000
    upload_seconds: float = 600.0
    answer_seconds: float = 300.0
    predictions: int = 512
    uploads: int = 4
    streams: int = 64
    jobs: int = 8


class Counter:
    """Counts what goes on at once and refuses more than `most`."""

    def __init__(self, most: int, sentence: str) -> None:
        self.most, self.sentence, self.now = most, sentence, 0

    def check(self) -> None:
        """Refuse one more than there may be."""
        if self.now >= self.most:
            raise Refused(429, self.sentence)

    @contextmanager
    def one(self) -> Iterator[None]:
        """Count one; called in the event loop alone."""
        self.check()
        self.now += 1
        try:
            yield
        finally:
            self.now -= 1


# -------------------------------------------------------------------------------------------------------------- tokens


def choose_token() -> tuple[str, bool]:
    """Return the token of this start, and whether it was made just now rather than taken from the environment."""
    given = os.environ.get(TOKEN_VARIABLE, "")
    if not given:
        return secrets.token_urlsafe(24), True
    if len(given) < SHORTEST_TOKEN or not given.isascii() or not given.isprintable() or " " in given:
        raise ConfigError(
            f"{TOKEN_VARIABLE}: at least {SHORTEST_TOKEN} printable ASCII characters without spaces are needed"
        )
    return given, False


def has_token(authorization: str | None, token: str) -> bool:
    """Return whether an Authorization header holds the token; the time taken does not tell how much of it is right."""
    kind, _, given = (authorization or "").partition(" ")
    return kind.lower() == "bearer" and hmac.compare_digest(given.strip().encode(), token.encode())


# --------------------------------------------------------------------------------------------------------------- hosts


def is_loopback(host: str) -> bool:
    """Return whether an address to listen on is reached from this machine alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def names_of(host: str) -> frozenset[str]:
    """Return the names, beside addresses, under which a server that listens on `host` may be asked for."""
    own = set() if is_loopback(host) else {host, socket.gethostname(), socket.getfqdn()}
    return frozenset(name.lower() for name in {"localhost", *own})


def host_of(header: str) -> str:
    """Return the host of a Host header, without its port."""
    name = header.strip().lower()
    return name[1:].partition("]")[0] if name.startswith("[") else name.partition(":")[0]


def is_allowed(header: str, listening: str, names: frozenset[str]) -> bool:
    """Return whether a Host header names this server.

    A page elsewhere can make a browser reach this server under a name of its own (DNS rebinding), never under an address.
    """
    host = host_of(header)
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host in names
    return address.is_loopback or not is_loopback(listening)


# ---------------------------------------------------------------------------------------------------------- middleware

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; connect-src 'self'; "
    "media-src 'self' blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(self), microphone=(), geolocation=()",
    "cache-control": "no-store",
}


class Guard:
    """Refuses requests under foreign names, from foreign pages, or with too much in them; adds the security headers."""

    def __init__(self, app: ASGIApp, *, host: str, names: frozenset[str], limits: Limits) -> None:
        self.app, self.host, self.names, self.limits = app, host, names, limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        headers = Headers(scope=scope)
        bodies = {"learn": self.limits.learn_body, "predict": self.limits.predict_body}
        most = bodies.get(scope["path"].rpartition("/")[2], self.limits.other_body)
        refusal = self._refusal(scope, headers) or _too_large(headers, most)
        if refusal is not None:
            await refusal(scope, receive, guarded)
        else:
            await self.app(scope, _counted(receive, most), guarded)

    def _refusal(self, scope: Scope, headers: Headers) -> JSONResponse | None:
        host, origin = headers.get("host", ""), headers.get("origin")
        if not is_allowed(host, self.host, self.names):
            return refuse(403, "this server does not answer under that name (--allow-host NAME permits one)")
        # Whether http or https does not matter: a proxy before this server may speak either.
        if origin is not None and origin.lower() not in (f"http://{host}".lower(), f"https://{host}".lower()):
            return refuse(403, "a page from elsewhere may not use this server")
        if scope["path"].startswith("/api/") and headers.get("sec-fetch-site") in ("cross-site", "same-site"):
            return refuse(403, "a page from elsewhere may not use this server")
        return None


def refuse(status: int, sentence: str) -> JSONResponse:
    """Return an error as every error looks."""
    return JSONResponse({"error": sentence}, status)


def _sentence(most: int) -> str:
    return f"the request is larger than the limit of {readable(most)}"


def _too_large(headers: Headers, most: int) -> JSONResponse | None:
    length = headers.get("content-length", "0")
    if not (length.isascii() and length.isdigit()):
        return refuse(400, "the Content-Length header is not a number")
    return refuse(413, _sentence(most)) if int(length) > most else None


def _counted(receive: Receive, most: int) -> Receive:
    """Count what arrives: a request may say nothing of its length, or something untrue."""
    seen = 0

    async def counting() -> Message:
        nonlocal seen
        message = await receive()
        seen += len(message.get("body", b""))
        if seen > most:
            raise Refused(413, _sentence(most))
        return message

    return counting
