"""`python -m inweave`."""

from inweave.cli.app import main

main()
