"""Process of one part of the self-test: ``python -m duoka.tools.selftest REQUEST``."""

from __future__ import annotations

from duoka.tools.selftest.part import main

if __name__ == "__main__":
    main()
