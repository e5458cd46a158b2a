"""The stage `train`: the resolution of each `auto`, its parts, reports and errors."""
