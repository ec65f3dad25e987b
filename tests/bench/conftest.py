"""veRL on its CPU platform, whatever the machine has; set before anything imports veRL."""

import os

os.environ.setdefault("VERL_PLATFORM", "cpu")
