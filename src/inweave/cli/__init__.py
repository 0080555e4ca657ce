"""The command line: one file per command; a command parses its options, calls the library and prints the result.

options.py        options that several commands share, and their help texts
adapters.py       LoRAs and checkpoints as arguments: a path, a name or a hash
output_files.py   names of the files to write; nothing is replaced without --force
console.py        JSON, facts, errors and exit codes
tables.py         tables and long texts at the width of the terminal
progress.py       the progress display on a terminal
extras.py         which packages a command needs and how to install them
"""
