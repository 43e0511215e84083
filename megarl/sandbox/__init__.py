"""Isolated processes for code that handles model output; they reach the run only by messages of bounded size. See README.md here."""
