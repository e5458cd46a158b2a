"""The stage `train`: what each `auto` becomes, its parts, reports and errors."""
