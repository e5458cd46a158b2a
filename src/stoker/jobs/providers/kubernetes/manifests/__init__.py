"""The objects of a job as plain values: one file for each kind, and `render`, which combines them."""
