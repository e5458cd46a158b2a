"""Statistics of counts: evidence against a version, shift of its predictions, differences of an A/B test."""
