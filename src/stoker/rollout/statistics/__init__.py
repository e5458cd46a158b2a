"""What counts prove: evidence against a version, shifts of its predictions, differences of an A/B test."""
