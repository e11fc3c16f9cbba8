"""The command line: arguments only. Parse them, make a configuration of them, call what does the work.

Everything heavy is imported when a command runs, so that ``--help`` answers at once.
"""

from __future__ import annotations

import signal
import sys

from breakgraph.cli import explain as explain  # these register their commands with the application
from breakgraph.cli import lint as lint
from breakgraph.cli import serving as serving
from breakgraph.cli import tune as tune
from breakgraph.cli import verify as verify
from breakgraph.cli.application import app
from breakgraph.cli.output import EXIT_FAILED, end_at_once, say, stdout_errors

__all__ = ["app", "main"]


def main() -> None:
    """Entry point of the ``breakgraph`` command."""
    if sys.stdout is None:  # Python's way to say that it was closed
        say("breakgraph: stdout is closed.\nThe answer would be lost.\nLeave it open, or redirect it to a file.")
        sys.exit(EXIT_FAILED)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, end_at_once)
    with stdout_errors():
        app()
