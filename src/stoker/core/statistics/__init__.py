"""Statistics of columns: dataclasses, computation from arrays, and the difference between two columns."""
