"""Regular expressions of files and users, matched in bounded time whatever they say.

    regex(text, field)              one expression: `.fullmatch(name)`, `.match(name)`, `.search(name)` give yes or no
    PatternTable(patterns, field)   PEFT's pattern tables: the first of many that matches the end of a module's name

The grammar is Python's own (`re` parses it) and the answer is the one `re` gives; backreferences, conditional groups,
atomic groups and possessive repeats are refused by name, because no bounded matcher knows them.
"""

from inweave.patterns.regex import MAX_LENGTH, Regex, Work, regex
from inweave.patterns.table import PatternTable

__all__ = ["MAX_LENGTH", "PatternTable", "Regex", "Work", "regex"]
