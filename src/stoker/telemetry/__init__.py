"""All metrics, and the files and pages to which they are written; it does not import TensorFlow."""
