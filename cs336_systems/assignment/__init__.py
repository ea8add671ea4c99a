"""The write-up of the assignment: one template a problem, filled with measured rows."""
