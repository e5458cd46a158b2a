"""The served versions of models, from loading to unloading."""
