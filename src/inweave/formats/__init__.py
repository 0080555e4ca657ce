"""File dialects: containers, the grammar of keys, one reader for all of them, one writer each."""
