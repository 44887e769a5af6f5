"""What is written to a terminal, with rich and without, and where it is not a terminal."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from sleepbackends.cli import app
from sleepbackends.cli.terminal import Cell, Live, live, say, say_markdown, say_table

ROOT = Path(__file__).parents[2]
HIDE = "import sys; sys.modules['rich'] = None\n"
MAIN = "from sleepbackends.cli import main; main()"
MADE_UP = """
import time
from sleepbackends.cli.bench_screen import BenchScreen
from sleepbackends.cli.terminal import has_rich, live
from sleepbackends.cli.verify_screen import VerifyScreen
from sleepbackends.bench.request import Spec
from tests.verify.made_up import BROKEN

print("rich:", has_rich(), has_rich(err=True))
spec = Spec("sleepbackends", 16, 32, 20)
with BenchScreen() as screen:
    screen.begin(spec, 2, 3)
    screen.row(spec.row("resume", 0, 2.5))
    time.sleep(0.5)
    screen.end(spec, "[bytes] differ")
with VerifyScreen() as screen:
    screen.collected([result.case for result in BROKEN.results])
    for result in BROKEN.results:
        screen.begin(result.case.name)
        time.sleep(0.2)
        screen.result(result)
shown = live(amount="{} bytes".format)
shown.start()
shown.update("suspend", 30, 100)
time.sleep(0.5)
shown.stop()
"""


def on_terminal(code: str, *arguments: str, **environ: str) -> str:
    """Run code on a terminal of 100 columns; return what it wrote."""
    ours, theirs = pty.openpty()
    kept = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    process = subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdout=theirs,
        stderr=theirs,
        stdin=theirs,
        cwd=ROOT,
        env={**kept, "TERM": "xterm-256color", "COLUMNS": "100", **environ},
    )
    os.close(theirs)
    written = b""
    while True:
        try:
            some = os.read(ours, 65536)
        except OSError:  # how Linux says that nobody has the other end any more
            break
        if not some:
            break
        written += some
    os.close(ours)
    assert process.wait() == 0, written.decode()
    return written.decode().replace("\r\n", "\n")


def without_style(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


@pytest.mark.parametrize("hide", ["", HIDE], ids=["with rich", "without rich"])
def test_a_terminal_is_told_what_a_pipe_is_told(hide: str) -> None:
    shown = on_terminal(hide + MAIN, "doctor")
    # A process of its own too: this one may have a simulated driver loaded.
    command = [sys.executable, "-c", hide + MAIN, "doctor"]
    piped = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True).stdout
    assert "\x1b[32mok" in shown, "in colour"
    assert "\x1b" not in piped
    for line in piped.splitlines():
        if "free" not in line and "can be taken" not in line:  # another figure each time
            for word in line.split():
                assert word in without_style(shown)


def test_without_rich_what_is_under_way_are_lines() -> None:
    shown = without_style(on_terminal(HIDE + MADE_UP))
    assert shown.splitlines() == [
        "rich: False False",
        "2 of 3: sleepbackends, 16 GiB, tensors of 20 MiB",
        "  sleepbackends resume: 2.500 s, median of 1",
        "  not to the end: [bytes] differ",
        "3 tests",
        "lifecycle",
        "offload",
        "  bit-exact: test_b[<save>]: [b]17 of 99 bytes[/b] differ & more",
        "staging",
    ]


def test_with_rich_what_is_under_way_moves() -> None:
    pytest.importorskip("rich")
    shown = without_style(on_terminal(MADE_UP))
    lines = shown.splitlines()
    for line in (
        "rich: True True",
        "2 of 3: sleepbackends, 16 GiB, tensors of 20 MiB",
        "  sleepbackends resume: 2.500 s, median of 1",
        "  not to the end: [bytes] differ",
        "  bit-exact: test_b[<save>]: [b]17 of 99 bytes[/b] differ & more",
    ):
        assert any(each.strip() == line.strip() for each in lines), line
    assert re.search(r"sleepbackends resume +2\.500 +2\.500 +1", shown)
    assert re.search(r"tensors of 20 MiB \S+ 1 of 3 \d:\d\d:\d\d", shown)
    assert re.search(r"offload: test_b\[<save>\] \S+ 1 of 3 ", shown)
    assert re.search(r"1 passed +0 failed +0 skipped", shown)
    assert re.search(r"suspend \S+ 30 bytes of 100 bytes ", shown)


@pytest.mark.parametrize("hide", ["", HIDE], ids=["with rich", "without rich"])
def test_no_colour_where_none_is_wanted(hide: str) -> None:
    shown = on_terminal(f"{hide}{MAIN}", "backends", NO_COLOR="1")
    assert not re.search(r"\x1b\[(3[0-7]|38)", shown)
    assert "usable" in shown


def test_columns_are_aligned_whatever_their_style(capsys: pytest.CaptureFixture[str]) -> None:
    rows: list[list[Cell]] = [[("a", "green"), "1\n22", "x"], ["long", ("", "dim"), "y z"]]
    say_table(rows, ("", "n", "what"))
    assert capsys.readouterr().out.splitlines() == [
        "      n   what",
        "a     1   x",
        "      22",
        "long      y z",
    ]
    say_table([])
    say_table([], ("head",))
    assert capsys.readouterr().out == ""


def test_lines_and_markdown_are_written_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    say("[bold]no markup[/bold] :smile: " + "w" * 200, "red")
    say("to the other", err=True)
    say_markdown("| a |\n|---|\n")
    written = capsys.readouterr()
    assert written.out == f"[bold]no markup[/bold] :smile: {'w' * 200}\n| a |\n|---|\n"
    assert written.err == "to the other\n"


def test_progress_into_a_pipe_is_silent(capsys: pytest.CaptureFixture[str]) -> None:
    shown = live()
    assert type(shown) is Live
    shown.start()
    shown.update("at", 1, 2)
    shown.say("line")
    shown.stop()
    assert capsys.readouterr().out == "line\n"


# Help


@pytest.mark.parametrize("name", [None, *app.commands])
def test_help_says_everything(name: str | None) -> None:
    command: click.Command = app if name is None else app.commands[name]
    done = CliRunner().invoke(app, ["--help"] if name is None else [name, "--help"])
    assert done.exit_code == 0
    said = " ".join(done.output.split())
    assert " ".join((command.help or "").split()) in said
    for parameter in command.params:
        is_option = isinstance(parameter, click.Option)
        assert (parameter.opts[0] if is_option else parameter.human_readable_name) in said
        meaning = getattr(parameter, "help", None) or getattr(parameter, "meaning", None)
        assert meaning, f"{parameter.name} is not explained"
        assert meaning in said
    assert "..." not in said.replace("[ARGS]...", ""), "nothing is cut short"


def test_defaults_are_in_the_help() -> None:
    said = " ".join(CliRunner().invoke(app, ["bench", "--help"]).output.split())
    for default in ("16.0", "256.0, 20.0, 1.0", "5", "sleepbackends, vllm, tms, tms_retain"):
        assert f"[default: {default}]" in said
    assert "[sleepbackends|vllm|tms|tms_retain]" in said


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion(shell: str) -> None:
    """As the page of the command line says."""
    asked = {"_SLEEPBACKENDS_COMPLETE": f"{shell}_source"}
    done = CliRunner().invoke(app, [], prog_name="sleepbackends", env=asked)
    assert done.exit_code == 0
    assert "_SLEEPBACKENDS_COMPLETE" in done.output
