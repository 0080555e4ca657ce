"""The command line: one file a verb; a verb parses, calls and prints."""
