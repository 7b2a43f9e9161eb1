"""What a training step holds, and the search under a limit on it."""
