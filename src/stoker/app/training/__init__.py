"""The stage `train`: resolves each `auto`, sets up data and model, runs the loop, reports progress and errors."""
