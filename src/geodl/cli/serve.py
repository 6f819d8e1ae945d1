"""``geodl serve``: a model as a web page and an HTTP API."""

import ipaddress
import socket
import webbrowser
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from geodl.cli.display import echo
from geodl.cli.own import LearnFlags, Model
from geodl.core.errors import ConfigError, MissingExtraError
from geodl.core.text import count

if TYPE_CHECKING:
    from geodl.app.serve.server import Server


def serve(
    model: Model,
    /,
    *,
    port: int = 8000,
    host: str = "127.0.0.1",
    read_only: bool = False,
    allow_folder: Path | None = None,
    allow_host: Annotated[tuple[str, ...], Parameter(show_default=False)] = (),
    open_page: Annotated[bool, Parameter(name="--open")] = False,
    flags: LearnFlags = LearnFlags(),  # noqa: B008  # frozen
) -> None:
    """Serve a model as a web page and to programs.

    Args:
        port: The port to listen on; 0: any free port.
        host: The address to listen on; 0.0.0.0: all addresses of this machine.
        read_only: Only recognize images: nothing can change the model.
        allow_folder: Let programs teach from folders below this one, on this machine.
        allow_host: Another host name under which browsers reach this server, such as that of a proxy; can be repeated.
        open_page: Open the page in a browser.
    """
    try:
        from geodl.app.serve.app import create_app
        from geodl.app.serve.connections import bind, server_of
        from geodl.app.serve.security import choose_token
        from geodl.app.serve.server import Server
    except ImportError as error:
        raise MissingExtraError("serve", "geodl serve") from error
    if allow_folder is not None and not allow_folder.is_dir():
        raise ConfigError(f"--allow-folder {allow_folder}: not a folder")
    token, new = choose_token()
    with bind(host, port) as listening:
        server = Server(
            model, token, host, allow_host, read_only, allow_folder, options=flags.given()
        )
        address = _address(host, listening) + (f"#token={token}" if new and not read_only else "")
        echo(f"{model} is served at {address}", "bold")
        _print_more(server, new)
        if open_page:
            webbrowser.open(address)
        with suppress(KeyboardInterrupt):  # uvicorn raises it again after the shutdown
            server_of(create_app(server)).run(sockets=[listening])


def _address(host: str, listening: socket.socket) -> str:
    bound, port = listening.getsockname()[:2]
    if ipaddress.ip_address(bound).is_unspecified:
        host = socket.gethostname()
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/"


def _print_more(server: "Server", new: bool) -> None:
    """Print what to know about a server; new: its token was generated at this start."""
    from geodl.app.serve.security import TOKEN_VARIABLE, is_loopback

    if not new and not server.read_only:
        echo(f"the token is the value of {TOKEN_VARIABLE}; the page asks for it")
    if not is_loopback(server.host):
        teaching = "" if server.read_only else "; whoever knows the token can teach"
        echo(f"everybody who reaches this machine can recognize images{teaching}", "yellow")
    if server.dropped:
        images = count(server.dropped, "uploaded image")
        echo(f"deleted {images} of a server that was killed", "yellow")
    echo("Press Ctrl-C to stop")
