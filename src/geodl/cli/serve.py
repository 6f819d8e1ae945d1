"""``geodl serve``: a model behind a page and an HTTP interface."""

import ipaddress
import socket
import webbrowser
from contextlib import suppress
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from geodl.cli.display import say
from geodl.cli.own import LearnFlags, Model, given
from geodl.core.errors import ConfigError, MissingExtraError
from geodl.core.text import count


def serve(
    model: Model,
    /,
    *,
    port: Annotated[int, Parameter(help="The port to listen on; 0: any that is free.")] = 8000,
    host: Annotated[
        str, Parameter(help="The address to listen on; 0.0.0.0: all of this machine's.")
    ] = "127.0.0.1",
    read_only: Annotated[
        bool, Parameter(help="Recognize only: nothing can change the model.", negative=())
    ] = False,
    allow_folder: Annotated[
        Path | None,
        Parameter(help="Programs may also teach from folders below this one, on this machine."),
    ] = None,
    allow_host: Annotated[
        tuple[str, ...],
        Parameter(
            help="Another host name that browsers may use for this server, such as the one of a proxy.",
            negative=(),
            show_default=False,
        ),
    ] = (),
    open_page: Annotated[
        bool, Parameter(name="--open", help="Open the page in a browser.", negative=())
    ] = False,
    flags: Annotated[LearnFlags, Parameter(name="*")] = LearnFlags(),  # type: ignore[valid-type]  # noqa: B008
) -> None:
    """Serve a model on a page and to programs."""
    try:
        from geodl.app.serve.app import create_app
        from geodl.app.serve.connections import bind, server_of
        from geodl.app.serve.security import TOKEN_VARIABLE, choose_token, is_loopback
        from geodl.app.serve.server import Server
    except ImportError as error:
        raise MissingExtraError("serve", "geodl serve") from error
    if allow_folder is not None and not allow_folder.is_dir():
        raise ConfigError(f"--allow-folder {allow_folder}: not a folder")
    token, fresh = choose_token()
    with bind(host, port) as listening:
        server = Server(
            model,
            token,
            host=host,
            allow_hosts=allow_host,
            read_only=read_only,
            allow_folder=allow_folder,
            options=given(flags),
        )
        everywhere = ipaddress.ip_address(listening.getsockname()[0]).is_unspecified
        shown = socket.gethostname() if everywhere else f"[{host}]" if ":" in host else host
        address = f"http://{shown}:{listening.getsockname()[1]}/"
        full = f"{address}#token={token}" if fresh and not read_only else address
        say(f"{model} is served at {full}", "bold")
        if not fresh and not read_only:
            say(f"the token is the value of {TOKEN_VARIABLE}; the page asks for it")
        if not is_loopback(host):
            say(
                "everybody who reaches this machine can recognize images; whoever knows the token can teach",
                "yellow",
            )
        if server.dropped:
            say(
                f"dropped {count(server.dropped, 'uploaded image')} of a server that was killed",
                "yellow",
            )
        say("Ctrl-C stops it")
        if open_page:
            webbrowser.open(full)
        with suppress(KeyboardInterrupt):  # uvicorn passes it on once all has ended
            server_of(create_app(server)).run(sockets=[listening])
