"""The command line: parse, call duoka's public functions, print.

One file per command. The answer goes to the standard output, everything else to the standard
error. What needs torch is imported inside the commands, so that ``--help`` starts at once.
"""

try:
    from .main import main
except KeyboardInterrupt:
    # The program was stopped while it started, before anything else could be told of it.
    raise SystemExit(130) from None

__all__ = ["main"]
