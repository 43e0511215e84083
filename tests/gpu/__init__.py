"""What a GPU is to show, in five parts: `python -m tests.gpu` runs them. Their bodies run in the suite on the CPU."""
