"""Step directories, which are complete or absent and are verified file by file; nothing here needs torch."""
