"""Access control for HTTP: the token, hosts, origins, request sizes, and security headers."""

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
    """Return the token, and whether it was generated rather than taken from the environment."""
    token = os.environ.get(TOKEN_VARIABLE, "")
    if not token:
        return secrets.token_urlsafe(24), True
    if not re.fullmatch(f"[!-~]{{{SHORTEST_TOKEN},}}", token):
        needed = f"at least {SHORTEST_TOKEN} printable ASCII characters without spaces"
        raise ConfigError(f"{TOKEN_VARIABLE}: {needed} are needed")
    return token, False


def has_token(authorization: str | None, token: str) -> bool:
    """Return whether an Authorization header holds the token, compared in constant time."""
    kind, _, given = (authorization or "").partition(" ")
    return kind.lower() == "bearer" and hmac.compare_digest(given.strip().encode(), token.encode())


# --------------------------------------------------------------------------------------------------------------- hosts


def is_loopback(host: str) -> bool:
    """Return whether a listening address can be reached only from this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def names_of(host: str) -> frozenset[str]:
    """Return the host names, beside IP addresses, of a server that listens on `host`."""
    own = set() if is_loopback(host) else {host, socket.gethostname(), socket.getfqdn()}
    return frozenset(name.lower() for name in {"localhost", *own})


def host_of(header: str) -> str:
    """Return the host of a Host header, without its port."""
    name = header.strip().lower()
    return name[1:].partition("]")[0] if name.startswith("[") else name.partition(":")[0]


def is_allowed(header: str, listening: str, names: frozenset[str]) -> bool:
    """Return whether a Host header names this server.

    A foreign page can make a browser reach this server under the page's own name (DNS rebinding), but not under an address.
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
    """Middleware that refuses requests to foreign host names, from foreign pages, too large ones, and too many at once.

    It sets `scope["trusted"]` to whether the request has the token, and adds the security headers to every response.
    """

    def __init__(self, app: ASGIApp, *, server: Server) -> None:
        self.app, self.server, limits = app, server, server.limits
        self.names = names_of(server.host) | {name.lower() for name in server.allow_hosts}
        requests, uploads = Share(limits.requests, BUSY), Share(limits.uploads, BUSY)
        streams = Share(limits.streams, "too many pages are open at once; close one of them")
        # By the last part of the path: the largest body in bytes, and the share.
        self.kinds: dict[str, tuple[float, Share]] = {
            "predict": (limits.predict_body, requests),
            "learn": (limits.learn_body, uploads),
            "add": (limits.learn_body, uploads),
            "events": (math.inf, streams),
        }
        self.others: tuple[float, Share] = (limits.other_body, requests)

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
            reason = "this server does not answer under that name (--allow-host NAME permits one)"
            raise Refused(403, reason)
        # http or https: a proxy in front of this server may use either.
        own = origin is None or origin.lower() in (f"http://{host}", f"https://{host}")
        foreign = headers.get("sec-fetch-site") in ("cross-site", "same-site")
        if not own or (foreign and scope["path"].startswith("/api/")):
            raise Refused(403, "a page of another site may not use this server")
        if "transfer-encoding" in headers and not scope["trusted"]:
            raise Refused(411, "a request without Content-Length needs the token")


def refusal(error: Refused) -> JSONResponse:
    """Return the response to a refused request."""
    headers = {401: {"www-authenticate": "Bearer"}, 429: {"retry-after": "1"}}
    headers[408] = headers[411] = {"connection": "close"}
    return JSONResponse({"error": str(error)}, error.status, headers.get(error.status))


def _limited(receive: Receive, most: float, seconds: float) -> Receive:
    """Limit a request by what arrives: its length may be missing or wrong, and it may stop halfway.

    most: bytes; infinity: the body is never read.
    """
    seen, more = 0, most < math.inf

    async def limited() -> Message:
        nonlocal seen, more
        if not more:  # the next message is that the client disconnects
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
