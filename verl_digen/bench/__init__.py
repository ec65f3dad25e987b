"""Measuring runs: a bare loop without any framework, real ``main_ppo`` runs beside it, and pictures of a run's log.

``runlog`` reads what a run logged and ``curves`` draws it; ``workload`` is what the digits recipe does in plain numbers
and ``floor`` the bare loop that does it; ``processes`` starts a run and watches its processes; ``digits`` measures the
modes of the digits recipe.
"""
