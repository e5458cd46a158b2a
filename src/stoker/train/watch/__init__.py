"""Shows a training to users: progress line, TensorBoard, device time, and profiles on request."""
