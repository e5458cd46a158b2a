"""What users watch while a model is trained: a line, TensorBoard, a profile when they ask for one."""
