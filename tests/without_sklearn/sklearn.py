"""Hides scikit-learn from the subprocesses of tests: Keras imports it where it is installed."""

raise ModuleNotFoundError("No module named 'sklearn'", name="sklearn")
