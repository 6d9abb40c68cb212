"""Compose the configuration tree, and say where each value is from. Never imports torch."""
