"""This machine: files, processes, memory, network."""
