"""Text of others: strict JSON, safe display, names of files."""
