"""What the server of forked ranks has loaded: modules that most ranks need. Each takes a second or more to import."""

import cs336_systems.parallel
import cs336_systems.training  # noqa: F401
from tests.garbage import freeze_for_good

freeze_for_good()  # a rank's collections do not scan them
