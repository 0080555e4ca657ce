"""The command line: one file per command; a command parses its options, calls the library and prints the result.

options.py    options that several commands share, and their help texts
inputs.py     what the commands that work on files have in common: checkpoints and FILE[:STRENGTH]
progress.py   the progress display on a terminal
output.py     JSON, tables, errors and exit codes
extras.py     which packages a command needs and how to install them
"""
