"""How commands look and end: help that leaves nothing out, errors, exit codes."""

from __future__ import annotations

import inspect
from typing import Any

import click

from sleepbackends.cli.output import report_error
from sleepbackends.errors import SleepBackendsError

INTERRUPTED = 130
"""Exit code after Ctrl+C: that of shells, 128 and the number of SIGINT."""


class Argument(click.Argument):
    """An argument that the help of its command explains.

    Parameters
    ----------
    *args, **kwargs : object
        As of ``click.Argument``.
    meaning : str
        What the help says.
    """

    def __init__(self, *args: Any, meaning: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.meaning = meaning


class Command(click.Command):
    """A command whose help lists its arguments, and whose summary is never cut short."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write what arguments and options mean."""
        arguments = [each for each in self.params if isinstance(each, Argument)]
        if arguments:
            with formatter.section("Arguments"):
                formatter.write_dl([(a.human_readable_name, a.meaning) for a in arguments])
        super().format_options(ctx, formatter)

    def get_short_help_str(self, limit: int = 45) -> str:
        """Return the first paragraph, all of it."""
        return " ".join(inspect.cleandoc(self.help or "").split("\n\n")[0].split())


class CommandGroup(click.Group):
    """Turns errors of this package into a message and exit code 2, for every command."""

    command_class = Command

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the commands as they were added, which is as one needs them."""
        return list(self.commands)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command that was asked for."""
        try:
            return super().invoke(ctx)
        except SleepBackendsError as error:
            report_error(error, ctx.meta)
            raise click.exceptions.Exit(2) from error
        except KeyboardInterrupt as error:
            raise click.exceptions.Exit(INTERRUPTED) from error
