"""The trainer: one loop, its optimizer, checkpoints, metrics and evaluation."""
