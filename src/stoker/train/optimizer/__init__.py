"""Updates weights from gradients: loss scale, finite checks, fused kernels, moving averages."""
