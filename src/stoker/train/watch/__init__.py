"""What users watch during training: progress line, TensorBoard, and profiles on request."""
