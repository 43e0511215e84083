"""megarl: reinforcement learning of large mixture-of-experts language models on Megatron-core, vLLM, Ray and Slurm."""

__version__ = "0.1.0"
