"""Step directories: complete or absent, verified file by file, without torch."""
