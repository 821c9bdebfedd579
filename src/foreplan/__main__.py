"""``python -m foreplan``: the command, where no folder of scripts is on the path."""

from foreplan.cli import main

if __name__ == "__main__":
    main()
