"""Who may do what over HTTP: hosts, origins, tokens, sizes, and what a browser is told about the pages."""

import asyncio
import hmac
import ipaddress
import math
import os
import re
import secrets
import socket

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from geodl.app.serve.limits import BUSY, Refused, Share
from geodl.app.serve.server import Server
from geodl.core.errors import ConfigError
from geodl.core.text import readable

TOKEN_VARIABLE = "GEODL_TOKEN"
SHORTEST_TOKEN = 16


# -------------------------------------------------------------------------------------------------------------- tokens


def choose_token() -> tuple[str, bool]:
    """Return the token of this start, and whether it was made just now rather than taken from the environment."""
    given = os.environ.get(TOKEN_VARIABLE, "")
    if not given:
        return secrets.token_urlsafe(24), True
    if not re.fullmatch(f"[!-~]{{{SHORTEST_TOKEN},}}", given):
        needed = f"at least {SHORTEST_TOKEN} printable ASCII characters without spaces"
        raise ConfigError(f"{TOKEN_VARIABLE}: {needed} are needed")
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
    """Refuses requests under foreign names, from foreign pages, with too much in them, or too many at once.

    It notes in `scope["trusted"]` whether a request knows the token, and adds the security headers to every answer.
    """

    def __init__(self, app: ASGIApp, *, server: Server) -> None:
        self.app, self.server, limits = app, server, server.limits
        self.names = names_of(server.host) | {name.lower() for name in server.allow_hosts}
        requests, uploads = Share(limits.requests, BUSY), Share(limits.uploads, BUSY)
        streams = Share(limits.streams, "too many pages are open at once; close one of them")
        self.others: tuple[float, Share] = (limits.other_body, requests)
        self.kinds: dict[str, tuple[float, Share]] = {"predict": (limits.predict_body, requests)}
        teaching = (limits.learn_body, uploads)
        self.kinds |= {"learn": teaching, "add": teaching, "events": (math.inf, streams)}

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
        scope["trusted"] = has_token(headers.get("authorization"), self.server.token)
        most, share = self.kinds.get(scope["path"].rpartition("/")[2], self.others)
        try:
            self._check(scope, headers)
            with share.one(scope["trusted"]):
                seconds = self.server.limits.idle_seconds
                await self.app(scope, _limited(receive, most, seconds), guarded)
        except Refused as error:
            await refusal(error)(scope, receive, guarded)

    def _check(self, scope: Scope, headers: Headers) -> None:
        host, origin = headers.get("host", "").lower(), headers.get("origin")
        if not is_allowed(host, self.server.host, self.names):
            name = "this server does not answer under that name (--allow-host NAME permits one)"
            raise Refused(403, name)
        # Whether http or https does not matter: a proxy before this server may speak either.
        own = origin is None or origin.lower() in (f"http://{host}", f"https://{host}")
        elsewhere = headers.get("sec-fetch-site") in ("cross-site", "same-site")
        if not own or (elsewhere and scope["path"].startswith("/api/")):
            raise Refused(403, "a page from elsewhere may not use this server")
        if "transfer-encoding" in headers and not scope["trusted"]:
            raise Refused(411, "a request without Content-Length needs the token")


def refusal(error: Refused) -> JSONResponse:
    """Return an error as every error looks."""
    more = {401: {"www-authenticate": "Bearer"}, 429: {"retry-after": "1"}}
    more[408] = more[411] = {"connection": "close"}
    return JSONResponse({"error": str(error)}, error.status, more.get(error.status))


def _limited(receive: Receive, most: float, seconds: float) -> Receive:
    """Watch what arrives: a request may say nothing of its length, or something untrue, or stop halfway.

    most: bytes; infinity: nothing of it is read.
    """
    seen, more = 0, most < math.inf

    async def limited() -> Message:
        nonlocal seen, more
        if not more:  # what is waited for now is that the client goes
            return await receive()
        try:
            async with asyncio.timeout(seconds):
                message = await receive()
        except TimeoutError:
            raise Refused(408, f"nothing arrived for {seconds:.0f} s") from None
        seen, more = seen + len(message.get("body", b"")), message.get("more_body", False)
        if seen > most:
            raise Refused(413, f"the request is larger than the limit of {readable(int(most))}")
        return message

    return limited
