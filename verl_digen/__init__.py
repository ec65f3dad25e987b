"""verl_digen: reinforcement-learning post-training of diffusion models with veRL in charge.

Importing this package imports neither torch, ray nor verl; ``verl_digen.plugin`` is the page that
registers everything with veRL.
"""

# The hooks must exist before any module of this package imports what they watch.
from verl_digen import plugin  # noqa: F401
from verl_digen.version import __version__

__all__ = ["__version__"]
