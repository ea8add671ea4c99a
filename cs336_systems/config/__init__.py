"""The settings of a run and their checks."""
