"""``geodl serve``: a model behind a page and an HTTP interface."""

import ipaddress
import socket
import webbrowser
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from geodl.cli.display import say
from geodl.cli.own import LearnFlags, Model, given
from geodl.core.errors import ConfigError, MissingExtraError
from geodl.core.text import count

if TYPE_CHECKING:
    from geodl.app.serve.server import Server

Port = Annotated[int, Parameter(help="The port to listen on; 0: any that is free.")]
Host = Annotated[str, Parameter(help="The address to listen on; 0.0.0.0: all of this machine's.")]
ReadOnly = Annotated[
    bool, Parameter(help="Recognize only: nothing can change the model.", negative=())
]
Below = Annotated[
    Path | None,
    Parameter(help="Programs may also teach from folders below this one, on this machine."),
]
Hosts = Annotated[
    tuple[str, ...],
    Parameter(
        help="Another host name that browsers may use for this server, such as the one of a proxy.",
        negative=(),
        show_default=False,
    ),
]
Open = Annotated[bool, Parameter(name="--open", help="Open the page in a browser.", negative=())]


def serve(
    model: Model,
    /,
    *,
    port: Port = 8000,
    host: Host = "127.0.0.1",
    read_only: ReadOnly = False,
    allow_folder: Below = None,
    allow_host: Hosts = (),
    open_page: Open = False,
    flags: Annotated[LearnFlags, Parameter(name="*")] = LearnFlags(),  # type: ignore[valid-type]  # noqa: B008
) -> None:
    """Serve a model on a page and to programs."""
    try:
        from geodl.app.serve.app import create_app
        from geodl.app.serve.connections import bind, server_of
        from geodl.app.serve.security import choose_token
        from geodl.app.serve.server import Server
    except ImportError as error:
        raise MissingExtraError("serve", "geodl serve") from error
    if allow_folder is not None and not allow_folder.is_dir():
        raise ConfigError(f"--allow-folder {allow_folder}: not a folder")
    token, fresh = choose_token()
    with bind(host, port) as listening:
        server = Server(
            model, token, host, allow_host, read_only, allow_folder, options=given(flags)
        )
        address = _address(host, listening) + (f"#token={token}" if fresh and not read_only else "")
        say(f"{model} is served at {address}", "bold")
        _say_more(server, fresh)
        if open_page:
            webbrowser.open(address)
        with suppress(KeyboardInterrupt):  # uvicorn passes it on once all has ended
            server_of(create_app(server)).run(sockets=[listening])


def _address(host: str, listening: socket.socket) -> str:
    bound, port = listening.getsockname()[:2]
    if ipaddress.ip_address(bound).is_unspecified:
        host = socket.gethostname()
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/"


def _say_more(server: "Server", fresh: bool) -> None:
    """Print what to know of a server. fresh: whether its token was made just now."""
    from geodl.app.serve.security import TOKEN_VARIABLE, is_loopback

    if not fresh and not server.read_only:
        say(f"the token is the value of {TOKEN_VARIABLE}; the page asks for it")
    if not is_loopback(server.host):
        teaching = "" if server.read_only else "; whoever knows the token can teach"
        say(f"everybody who reaches this machine can recognize images{teaching}", "yellow")
    if server.dropped:
        images = count(server.dropped, "uploaded image")
        say(f"dropped {images} of a server that was killed", "yellow")
    say("Ctrl-C stops it")
