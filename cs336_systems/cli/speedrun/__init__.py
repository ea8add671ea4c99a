"""The best model for a time and a machine: which one (choice.py), how fast it is (measure.py), its run (run.py)."""
