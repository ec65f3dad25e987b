"""verl_digen: reinforcement-learning post-training of diffusion models with veRL in charge.

Importing this package imports neither torch, ray nor verl; ``verl_digen.plugin`` is the page that
registers everything with veRL.
"""

from verl_digen.version import __version__

__all__ = ["__version__"]
