"""What a GPU is to show, in parts: `python -m tests.gpu` runs them. Their bodies run in the suite on the CPU and on a simulated GPU."""
