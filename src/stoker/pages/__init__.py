"""The parts of every report: page, style, tables, numbers, bars and plots."""
