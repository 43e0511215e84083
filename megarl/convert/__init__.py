"""Conversion between Hugging Face directories and Megatron checkpoints: streaming, audited by tensor, resumable; no ranks, no Megatron."""
