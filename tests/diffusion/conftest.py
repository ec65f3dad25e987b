"""Hypothesis without a deadline: on shared, busy cores a time limit for one example says nothing."""

from hypothesis import settings

settings.register_profile("diffusion", deadline=None, max_examples=60)
settings.load_profile("diffusion")
