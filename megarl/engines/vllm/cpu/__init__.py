"""What lets vLLM's GPU features run on CPUs."""
