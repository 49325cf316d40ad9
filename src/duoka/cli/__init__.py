"""The command line: parse, call duoka's public functions, print.

One file per command. The answer goes to the standard output, everything else to the standard
error. What needs torch is imported inside the commands, so that ``--help`` starts at once.
"""

from .main import main

__all__ = ["main"]
