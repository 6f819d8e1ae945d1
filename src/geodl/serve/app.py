"""The application: the page, the HTTP interface, and every error as one plain sentence."""

import logging
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from jinja2 import Environment, PackageLoader, StrictUndefined
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import FileResponse, HTMLResponse, JSONResponse, Response
from starlette.staticfiles import StaticFiles

from geodl import __version__
from geodl.errors import ConfigError, DataError, GeodlError, MissingExtraError, StoreError
from geodl.serve.api import changing, reading
from geodl.serve.security import Guard, Limits, Refused, names_of, refuse
from geodl.serve.server import Server
from geodl.text import printable

_log = logging.getLogger("geodl")
_STATIC = Path(__file__).parent / "static"


def create_app(
    model: Path,
    *,
    token: str,
    host: str = "127.0.0.1",
    allow_hosts: frozenset[str] = frozenset(),
    read_only: bool = False,
    allow_folder: Path | None = None,
    limits: Limits | None = None,
    options: Mapping[str, Any] | None = None,
) -> FastAPI:
    """Return the application that serves a model directory.

    Args:
        model: the directory; the first job makes it.
        token: what a request that changes the model must know.
        host: the address that is listened on.
        allow_hosts: further names under which the server may be asked for.
        read_only: refuse everything that changes the model.
        allow_folder: teach from folders below this one.
        limits: what a client may ask for.
        options: options of every learn step, as for `IncrementalClassifier.learn`.
    """
    limits = limits or Limits()
    server = Server(model, token, read_only, limits, allow_folder, dict(options or {}))

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        server.close()

    app = FastAPI(
        title="geodl",
        version=__version__,
        summary="Teach an image classifier new classes, and ask it what is in images.",
        docs_url=None,
        redoc_url=None,
        lifespan=lifespan,
    )
    app.state.server = server
    names = names_of(host) | {name.lower() for name in allow_hosts}
    app.add_middleware(Guard, host=host, names=names, limits=limits)
    for kind, handler in _HANDLERS.items():
        app.add_exception_handler(kind, handler)
    app.include_router(reading)
    app.include_router(changing)
    app.add_api_route("/", _page, include_in_schema=False)
    app.add_api_route("/docs", _docs, include_in_schema=False)
    app.mount("/static", StaticFiles(directory=_STATIC), name="static")
    return app


class _Listening(uvicorn.Server):
    """Ends the event streams first when it shall end: a page that is open would hold it up."""

    def __init__(self, app: FastAPI, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._shared: Server = app.state.server

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._shared.closing = True
        await super().shutdown(sockets)


def bind(host: str, port: int = 0) -> socket.socket:
    """Return a socket that listens; port 0: any that is free."""
    if not 0 <= port <= 65535:
        raise ConfigError(f"port = {port}: 0 to 65535 are allowed")
    try:
        listening = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        # asyncio sets it on its own sockets alone: without it every answer waits 40 ms for an acknowledgment.
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listening
    except OSError as error:
        raise ConfigError(f"cannot listen on {host} port {port}: {error.strerror or error}") from error


def server_of(app: FastAPI) -> uvicorn.Server:
    """Return a server of the application, to `run(sockets=[...])`."""
    how: dict[str, Any] = {"log_level": "warning", "access_log": False, "server_header": False}
    return _Listening(app, uvicorn.Config(app, timeout_graceful_shutdown=3, **how))


async def _page() -> FileResponse:
    return FileResponse(_STATIC / "index.html", headers={"cache-control": "no-cache"})


async def _docs(request: Request) -> HTMLResponse:
    """Show the OpenAPI description as a page that needs nothing from elsewhere."""
    templates = Environment(loader=PackageLoader("geodl.serve"), autoescape=True, undefined=StrictUndefined)
    return HTMLResponse(templates.get_template("docs.html").render(api=request.app.openapi()))


# --------------------------------------------------------------------------------------------------------------- errors

_STATUS: tuple[tuple[type[GeodlError], int], ...] = (
    (ConfigError, 422),
    (DataError, 422),
    (StoreError, 409),
    (MissingExtraError, 409),
    (GeodlError, 500),
)


def _refused(_: Request, error: Any) -> Response:
    response = refuse(error.status, str(error))
    if error.status == 401:
        response.headers["www-authenticate"] = "Bearer"
    if error.status == 429:
        response.headers["retry-after"] = "1"
    return response


def _expected(_: Request, error: Any) -> Response:
    return refuse(next(status for kind, status in _STATUS if isinstance(error, kind)), printable(str(error)))


def _invalid(_: Request, error: Any) -> Response:
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"][1:]) or str(first["loc"][0])
    return refuse(422, printable(f"{where}: {first['msg']}"))


def _http(request: Request, error: Any) -> Response:
    if isinstance(error.__cause__, Refused):  # FastAPI takes whatever happens while it reads a body for bad JSON
        return _refused(request, error.__cause__)
    return JSONResponse({"error": str(error.detail)}, error.status_code, headers=error.headers)


def _gone(_: Request, error: Any) -> Response:
    return refuse(400, "the request was broken off")


def _unexpected(_: Request, error: Any) -> Response:
    _log.error("unexpected error", exc_info=error)
    return refuse(500, f"unexpected error: {type(error).__name__}")


_HANDLERS: dict[Any, Callable[[Request, Any], Response]] = {
    Refused: _refused,
    GeodlError: _expected,
    RequestValidationError: _invalid,
    HTTPException: _http,
    ClientDisconnect: _gone,
    Exception: _unexpected,
}
