"""Where models live, and how an exported model is loaded and called."""
