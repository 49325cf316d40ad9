"""The command line: parse, call duoka's public functions, print.

One file per command. The answer goes to the standard output, everything else to the standard
error. What needs torch is imported inside the commands, so that ``--help`` starts at once.
"""

import signal
import sys

try:
    from .main import main
except KeyboardInterrupt:  # the program was stopped while it started
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.stderr.write("stopped\n")
    raise SystemExit(130) from None

__all__ = ["main"]
