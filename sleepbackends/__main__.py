"""``python -m sleepbackends``: the command line, where its script is not on the path."""

from sleepbackends.cli import main

if __name__ == "__main__":
    main()
