"""One token at a time: states, steps, and the compiled block."""
