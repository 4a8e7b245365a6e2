"""Texts of others do not control the terminal."""

import io
import os
import subprocess
import sys
from contextlib import suppress
from unittest.mock import Mock

import pytest
from rich.table import Table
from rich.text import Text

from vlmrl.cli.recipe import errors_in_one_line
from vlmrl.config.fields import positive
from vlmrl.report.progress import RunProgress
from vlmrl.utils.terminal import RunTerminal, Terminal, printable, printable_log

CONTROLS = "hi \x1b]52;c;cm0=\x07\x1b[2J\x9b1m\u202eyou"
HOSTILE = CONTROLS + "\ud800"


def test_control_characters_become_escapes():
    assert printable(HOSTILE) == r"hi \x1b]52;c;cm0=\x07\x1b[2J\x9b1m\u202eyou\ud800"
    assert printable("Größe:\t中文 🎉 שלום\n") == "Größe:\t中文 🎉 שלום\n"


def test_a_terminal_obeys_its_own_styles_only():
    table = Table(box=None, width=100)
    table.add_column(Text(HOSTILE), no_wrap=True)
    console = Terminal(file=io.StringIO(), force_terminal=True, color_system="standard", width=200)
    for shown in (HOSTILE, Text(HOSTILE), table):
        console.print(shown, style="bold", markup=False, highlight=False)
    printed = console.file.getvalue()
    assert printed.count(r"\x1b[2J") == 3 and "\x1b[1m" in printed
    assert not any(each in printed for each in ("\x1b]", "\x1b[2J", "\x9b", "\u202e"))


def test_an_error_in_one_line_is_printable(capsys):
    with pytest.raises(SystemExit), errors_in_one_line():
        raise ValueError(f"row 0: {HOSTILE}")
    assert capsys.readouterr().err.startswith(r"vlmrl: row 0: hi \x1b]52")


def test_a_traceback_is_printable(capsys, monkeypatch):
    """That of a chat template which raises wrote to the clipboard."""
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    with pytest.raises(AttributeError) as raised, errors_in_one_line():
        positive("train", None, CONTROLS)
    sys.excepthook(raised.type, raised.value, raised.tb)
    printed = capsys.readouterr().err
    assert printed.startswith("Traceback") and printed.endswith(f"has no attribute '{printable(CONTROLS)}'\n")


def test_a_hook_that_the_program_sets_stays(monkeypatch):
    """torch's, which adds the rank to each line, was replaced."""
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    hook = Mock()
    with suppress(AttributeError), errors_in_one_line():
        sys.excepthook = hook
        positive("train", None, "steps")
    assert sys.excepthook is hook


def test_a_log_shows_texts_of_others_with_escapes(capsys):
    """A run's log, without a handler of its own, is what Python prints on standard error."""
    log = printable_log("vlmrl.test")
    log.propagate = False  # pytest's handler
    try:
        raise ValueError(HOSTILE)
    except ValueError:
        log.exception("%s of 100%% failed", HOSTILE)
    printed = capsys.readouterr().err
    assert printed.startswith(f"{printable(HOSTILE)} of 100% failed\nTraceback")
    assert printed.endswith(f"ValueError: {printable(HOSTILE)}\n")


BOTH = """
import sys
from contextlib import suppress
from unittest.mock import Mock
from vlmrl.report.progress import RunProgress

RunProgress().say("begins")
print("a reward's own remark", file=sys.stderr, flush=True)
open(sys.argv[1], "w").write("goes on")
"""


@pytest.mark.slow
def test_standard_error_ends_with_the_output_that_it_is_joined_to(tmp_path):
    """``2>&1 | tee log``: what an env or a reward prints as an error failed its episodes."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-c", BOTH, str(tmp_path / "done")]
    done = subprocess.run(command, stdout=writer, stderr=writer, timeout=600)
    os.close(writer)
    assert done.returncode == 0 and (tmp_path / "done").read_text() == "goes on"


@pytest.mark.parametrize("is_terminal", [False, True])
@pytest.mark.parametrize("output", ["a pipe whose reader has ended", "a full disk"])
def test_a_run_goes_on_where_nothing_can_be_printed(output, is_terminal):
    """`vlmrl train | tee log`, with `tee` killed, or a connection lost: the run ended, without a checkpoint."""
    reader, writer = os.pipe()
    os.close(reader)
    with open("/dev/full" if output == "a full disk" else writer, "w") as file:
        progress = RunProgress(RunTerminal(file=file, force_terminal=is_terminal))
        progress.say("begins")
        with progress.phase("train", 2) as phase:
            phase.advance(reward=0.5)
            progress.say("half")
            phase.advance(reward=0.6)
        progress.say("ends")
