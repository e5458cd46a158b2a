"""What versions did in each stage, written by servers and added up."""
