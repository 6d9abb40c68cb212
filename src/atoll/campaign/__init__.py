"""Rounds of training across facilities. Never imports torch."""
