"""``python -m meshnet``: the command line without its script."""

from meshnet.cli.main import main

main()
