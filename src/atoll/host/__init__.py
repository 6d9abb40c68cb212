"""What runs outside the container: compose, check, submit. Never imports torch."""
