"""`cs336 speedrun`: the scaling laws and the search (choice.py), a trial (measure.py), the run (run.py)."""
