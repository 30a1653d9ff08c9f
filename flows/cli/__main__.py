"""``python -m flows.cli``: the command line without an installed script."""

from flows.cli.main import main

if __name__ == "__main__":
    main()
