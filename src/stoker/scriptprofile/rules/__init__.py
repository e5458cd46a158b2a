"""What a profile of a script finds: one file a kind of cost, each finding with its line."""
