"""``geodl serve``: a model behind a page and an HTTP interface."""

import ipaddress
import socket
import webbrowser
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from geodl.cli.display import say
from geodl.cli.own import LearnFlags, Model
from geodl.errors import ConfigError, MissingExtraError
from geodl.text import count

if TYPE_CHECKING:
    from geodl.serve.jobs import Teacher


def serve(
    model: Model,
    /,
    *,
    port: Annotated[int, Parameter(help="The port to listen on; 0: any that is free.")] = 8000,
    host: Annotated[str, Parameter(help="The address to listen on; 0.0.0.0: all of this machine's.")] = "127.0.0.1",
    read_only: Annotated[bool, Parameter(help="Recognize only: nothing can change the model.", negative=())] = False,
    allow_folder: Annotated[
        Path | None, Parameter(help="Programs may also teach from folders below this one, on this machine.")
    ] = None,
    allow_host: Annotated[
        tuple[str, ...],
        Parameter(
            help="Another host name that browsers may use for this server, such as the one of a proxy.",
            negative=(),
            show_default=False,
        ),
    ] = (),
    open_page: Annotated[bool, Parameter(name="--open", help="Open the page in a browser.", negative=())] = False,
    flags: Annotated[LearnFlags, Parameter(name="*")] = LearnFlags(),  # noqa: B008
) -> None:
    """Serve a model on a page and to programs."""
    try:
        from geodl.serve.app import bind, create_app, server_of
        from geodl.serve.security import TOKEN_VARIABLE, choose_token, is_loopback
    except ImportError as error:
        raise MissingExtraError("serve", "geodl serve") from error
    if allow_folder is not None and not allow_folder.is_dir():
        raise ConfigError(f"--allow-folder {allow_folder}: not a folder")
    token, fresh = choose_token()
    with bind(host, port) as listening:
        app = create_app(
            model,
            token=token,
            host=host,
            allow_hosts=frozenset(allow_host),
            read_only=read_only,
            allow_folder=allow_folder,
            options=flags.given(),
        )
        everywhere = ipaddress.ip_address(listening.getsockname()[0]).is_unspecified
        shown = socket.gethostname() if everywhere else f"[{host}]" if ":" in host else host
        address = f"http://{shown}:{listening.getsockname()[1]}/"
        full = f"{address}#token={token}" if fresh and not read_only else address
        say(f"{model} is served at {full}", "bold")
        if not fresh and not read_only:
            say(f"the token is the value of {TOKEN_VARIABLE}; the page asks for it")
        if not is_loopback(host):
            say("everybody who reaches this machine can recognize images; whoever knows the token can teach", "yellow")
        _say_interrupted(app.state.server.teacher)
        say("Ctrl-C stops it")
        if open_page:
            webbrowser.open(full)
        with suppress(KeyboardInterrupt):  # uvicorn passes it on once all has ended
            server_of(app).run(sockets=[listening])


def _say_interrupted(teacher: "Teacher | None") -> None:
    for job in teacher.jobs.values() if teacher is not None else ():
        what = f"{count(job.images, 'image')} of {', '.join(list(job.classes)[:5])}" if job.classes else str(job.source)
        say(
            f"interrupted {job.made}: teaching {what}; the model is as before, the page can go on with it or drop it",
            "yellow",
        )
