"""``sleepbackends serve``: the routes of one engine, in a server of their own."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import click

from sleepbackends.cli.command import Argument
from sleepbackends.cli.terminal import say
from sleepbackends.errors import ConfigurationError, UnsupportedOperationError
from sleepbackends.orchestrator import Orchestrator


@click.argument(
    "application",
    metavar="APP",
    cls=Argument,
    meaning="MODULE:ATTRIBUTE, an Orchestrator or a callable that returns one.",
)
@click.option(
    "--host",
    default="127.0.0.1",
    help="Where to listen; anything but loopback needs a token.",
)
@click.option("--port", type=click.IntRange(0, 65535), default=8420, help="0 chooses a free one.")
@click.option(
    "--uds",
    type=click.Path(path_type=Path),
    metavar="PATH",
    help="A unix socket for this user, in place of host and port.",
)
@click.option(
    "--token-file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Holds the bearer token; by default it is SLEEPBACKENDS_SERVER_TOKEN, if set.",
)
@click.option("--docs", is_flag=True, help="Serve /docs, with scripts from elsewhere.")
def serve(
    application: str, host: str, port: int, uds: Path | None, token_file: Path | None, docs: bool
) -> None:
    """Serve the routes of one engine until interrupted, and close it then."""
    try:
        from sleepbackends.server import app
        from sleepbackends.server.listening import bound_address, bound_path, run
        from sleepbackends.server.security import read_token
    except ImportError as error:
        raise UnsupportedOperationError(
            f"the server needs a package that cannot be imported: {error}",
            hint="pip install 'sleepbackends[server]'",
            operation="serve",
        ) from error

    token = read_token(token_file)
    binding = (
        bound_address(host, port, has_token=token is not None) if uds is None else bound_path(uds)
    )
    # Bound before the engine is loaded, so that a taken port is found out at once.
    with binding as bound, load_orchestrator(application) as orchestrator:
        at = f"unix:{uds}" if uds else "http://{}:{}".format(*_shown(bound.getsockname()))
        bound.listen()  # from here on nobody is turned away
        say(f"serving {orchestrator.backend.name} on {at}", err=True)
        run(app(orchestrator, token=token, docs=docs), bound)


def load_orchestrator(path: str) -> Orchestrator:
    """Import the orchestrator that ``MODULE:ATTRIBUTE`` names.

    Raises
    ------
    ConfigurationError
        There is none there.
    """
    module_name, _, names = path.partition(":")
    if not module_name or not names:
        raise ConfigurationError(
            f"{path!r} does not name an orchestrator", hint="write MODULE:ATTRIBUTE"
        )
    if "" not in sys.path:
        sys.path.insert(0, "")  # as with python -m
    try:
        found: Any = importlib.import_module(module_name)
        for name in names.split("."):
            found = getattr(found, name)
    except (ImportError, AttributeError) as error:
        raise ConfigurationError(
            f"{path!r} cannot be imported: {error}",
            hint="start it in the folder of the module, or install the module",
        ) from error
    if callable(found):
        found = found()
    if not isinstance(found, Orchestrator):
        raise ConfigurationError(
            f"{path!r} is a {type(found).__name__}, not an Orchestrator",
            hint="name an Orchestrator, or a callable without arguments that returns one",
        )
    return found


def _shown(address: tuple[Any, ...]) -> tuple[str, int]:
    host, port = address[:2]
    return (f"[{host}]" if ":" in host else host), port
