"""Evidence against a version, shifts of its predictions, and differences of an A/B test, from counts."""
