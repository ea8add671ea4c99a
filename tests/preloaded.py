"""What the server of forked ranks has loaded: modules that most ranks need. Each takes a second or more to import."""

import gc

import cs336_systems.parallel
import cs336_systems.training  # noqa: F401

gc.collect()
gc.freeze()  # a rank's collections do not scan them
