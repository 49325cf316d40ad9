"""Start a worker process of a run: ``python -m duoka.tuner DIRECTORY``, once for each rank."""

from duoka.base.quiet import quiet_libraries

if __name__ == "__main__":
    with quiet_libraries():
        from duoka.tuner.worker import main
    main()
