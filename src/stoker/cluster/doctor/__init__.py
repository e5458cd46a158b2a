"""The machine as a training run meets it: what it has, and what is wrong with it."""
