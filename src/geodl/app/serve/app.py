"""The web application: the page, the HTTP API, and every error as one plain sentence."""

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from jinja2 import Environment, PackageLoader, StrictUndefined
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import FileResponse, HTMLResponse, JSONResponse, Response
from starlette.staticfiles import StaticFiles

from geodl import __version__
from geodl.app.serve.api import changing, reading
from geodl.app.serve.limits import Refused
from geodl.app.serve.pictures import pictures
from geodl.app.serve.security import Guard, refusal
from geodl.app.serve.server import Server
from geodl.core.errors import ConfigError, DataError, GeodlError, MissingExtraError, StoreError
from geodl.core.text import printable

_log = logging.getLogger("geodl.serve")
_STATIC = Path(__file__).parent / "static"


def create_app(server: Server) -> FastAPI:
    """Return the ASGI application of a server."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        server.close()

    app = FastAPI(
        title="geodl",
        version=__version__,
        summary="Teach an image classifier new classes, and classify images with it.",
        docs_url=None,
        redoc_url=None,
        lifespan=lifespan,
    )
    app.state.server = server
    app.add_middleware(Guard, server=server)
    for kind in _KINDS:
        app.add_exception_handler(kind, _answer)
    app.include_router(reading)
    app.include_router(changing)
    app.include_router(pictures)
    app.add_api_route("/", _page, include_in_schema=False)
    app.add_api_route("/docs", _docs, include_in_schema=False)
    app.mount("/static", StaticFiles(directory=_STATIC), name="static")
    return app


async def _page() -> FileResponse:
    return FileResponse(_STATIC / "index.html", headers={"cache-control": "no-cache"})


async def _docs(request: Request) -> HTMLResponse:
    """Show the OpenAPI description as a page that loads nothing from other hosts."""
    templates = Environment(
        loader=PackageLoader("geodl.app.serve"), autoescape=True, undefined=StrictUndefined
    )
    return HTMLResponse(templates.get_template("docs.html").render(api=request.app.openapi()))


# --------------------------------------------------------------------------------------------------------------- errors

_KINDS = (Refused, GeodlError, RequestValidationError, HTTPException, ClientDisconnect, Exception)


def _answer(request: Request, error: Exception) -> Response:
    """Answer an error with one plain sentence."""
    match error:
        case Refused():
            return refusal(error)
        case GeodlError():
            return refusal(_expected(error, request.scope["trusted"]))
        case RequestValidationError():
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"][1:]) or str(first["loc"][0])
            return refusal(Refused(422, printable(f"{where}: {first['msg']}")))
        case HTTPException(__cause__=Refused() as cause):  # FastAPI reports it as bad JSON
            return refusal(cause)
        case HTTPException():
            return JSONResponse({"error": error.detail}, error.status_code, error.headers)
        case ClientDisconnect():
            return refusal(Refused(400, "the client closed the connection"))
    _log.error("unexpected error", exc_info=error)
    return refusal(Refused(500, f"unexpected error: {type(error).__name__}"))


def _expected(error: GeodlError, trusted: bool) -> Refused:
    status = 500
    if isinstance(error, ConfigError | DataError):
        status = 422
    elif isinstance(error, StoreError | MissingExtraError):
        status = 409
    # The message may name files, processes and hosts.
    hidden = "that is not possible now; the reason is shown with the token"
    return Refused(status, printable(str(error)) if trusted else hidden)
