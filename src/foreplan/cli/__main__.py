"""``python -m foreplan.cli``: the command line without its entry point."""

from foreplan.cli import main

main()
