"""Hugging Face directories <-> Megatron checkpoints: streamed, audited tensor by tensor, resumable. Without ranks and without Megatron."""
