"""What is measured, and the files and pages to which it is written; without TensorFlow."""
