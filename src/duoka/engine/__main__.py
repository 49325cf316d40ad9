"""A process of an engine: ``python -m duoka.engine SOCKET``, started for each device."""

from __future__ import annotations

from duoka.engine.stage_worker import main

if __name__ == "__main__":
    main()
