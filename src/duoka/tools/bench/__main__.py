"""Process of one measured replica: ``python -m duoka.tools.bench SOCKET``."""

from duoka.tools.bench.measure import main

if __name__ == "__main__":
    main()
