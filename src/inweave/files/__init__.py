"""Files of strangers: the only place that opens, reads and writes files by name.

paths.py      a path from what a caller passed, what lies there, and text that is safe to print
reading.py    a regular file, open for reading, bounded in size; text
documents.py  JSON, bounded in size, nesting and digits
writing.py    a file or a folder that appears whole or not at all; logs that grow
images.py     images of a few formats, bounded before they are decoded
"""
