"""The process of an engine: ``python -m duoka.serve SOCKET``."""

from .engine_process import main

main()
