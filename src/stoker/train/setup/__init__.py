"""Everything before the first step: model, strategy, devices, feeds, and their checks."""
