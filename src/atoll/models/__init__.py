"""Hugging Face models: in from a folder, the hub or a seed; out as safetensors."""
