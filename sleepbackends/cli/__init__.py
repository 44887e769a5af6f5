"""The command line, ``sleepbackends``: one module a command."""

from __future__ import annotations

import click

import sleepbackends
from sleepbackends.cli.backends import list_backends
from sleepbackends.cli.bench import run_benchmark
from sleepbackends.cli.command import CommandGroup
from sleepbackends.cli.demo import run_demo
from sleepbackends.cli.doctor import examine_machine
from sleepbackends.cli.host_copies import show_host_copies
from sleepbackends.cli.new import new_package
from sleepbackends.cli.process import restore_process, resume_process
from sleepbackends.cli.serve import serve
from sleepbackends.cli.verify import verify_backend


@click.group(cls=CommandGroup, context_settings={"show_default": True})
@click.version_option(
    sleepbackends.__version__, message="sleepbackends %(version)s", help="Show the version."
)
def app() -> None:
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
