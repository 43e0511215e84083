"""Processes that work on what a model has written: no way back to the run but messages of a bounded size. See README.md here."""
