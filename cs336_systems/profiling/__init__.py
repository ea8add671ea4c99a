"""Where the time and the memory of a workload go."""
