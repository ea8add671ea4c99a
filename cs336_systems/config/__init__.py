"""The settings of a run, and the checks that name a wrong one."""
