"""What is refused before a process starts."""
