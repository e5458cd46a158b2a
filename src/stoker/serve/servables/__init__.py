"""Which versions of which models are served, and their life."""
