"""What runs on the login node or the laptop: compose, check, submit. Never imports torch."""
