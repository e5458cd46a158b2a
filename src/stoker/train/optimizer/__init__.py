"""From gradients to weights: loss scale, finite checks, fused updates, moving averages."""
