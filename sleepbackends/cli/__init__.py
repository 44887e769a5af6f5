"""The command line, ``sleepbackends``: one module a command."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import sleepbackends
from sleepbackends.cli.backends import list_backends
from sleepbackends.cli.bench import run_benchmark
from sleepbackends.cli.demo import run_demo
from sleepbackends.cli.doctor import examine_machine
from sleepbackends.cli.host_copies import show_host_copies
from sleepbackends.cli.new import new_package
from sleepbackends.cli.output import report_error
from sleepbackends.cli.process import restore_process, resume_process
from sleepbackends.cli.serve import serve
from sleepbackends.cli.verify import verify_backend
from sleepbackends.errors import SleepBackendsError


class _Group(TyperGroup):
    """Turns errors of this package into a message and exit code 2, for every command."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except SleepBackendsError as error:
            report_error(error, ctx.meta)
            raise typer.Exit(2) from error


app = typer.Typer(
    cls=_Group,
    help="Give engine memory back by tag and take it again.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"sleepbackends {sleepbackends.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", help="Show the version.", callback=_show_version, is_eager=True),
    ] = False,
) -> None:
    """Give engine memory back by tag and take it again."""


app.command("backends")(list_backends)
app.command("doctor")(examine_machine)
app.command("demo")(run_demo)
app.command("bench")(run_benchmark)
app.command("host-copies")(show_host_copies)
app.command("serve")(serve)
app.command("verify")(verify_backend)
app.command("new")(new_package)
app.command("resume")(resume_process)
app.command("restore")(restore_process)


def main() -> None:
    """Run the command line."""
    app(prog_name="sleepbackends")
