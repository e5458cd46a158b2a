"""Statistics of columns: their types, their computation from arrays, and the distance between two columns."""
