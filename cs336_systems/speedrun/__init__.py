"""As much model as a time and a machine allow: which (choice.py), how fast it is (measure.py), its run (run.py)."""
