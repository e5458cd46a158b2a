"""Before the first step: the model, the strategy, devices, feeds, and the checks of all of them."""
