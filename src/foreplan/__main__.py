"""``python -m foreplan``: the command, where no folder of scripts is on the path."""

import sys

from foreplan.cli import main

if __name__ == "__main__":
    sys.argv[0] = "foreplan"
    main()
