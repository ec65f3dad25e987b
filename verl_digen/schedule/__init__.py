"""Scheduling: GAP, TSP, TAG/BTS and TCSS as pure decisions.

Plain Python and the standard library. What a live run and the simulator of ``verl_digen.planner`` both call;
docs/scheduling.md says which of it a live run has:

- ``work`` the words as types · ``profile`` what things cost · ``measure`` learned while running
- ``gap`` fragments and pull order · ``assemble`` groups from scored samples · ``tsp`` tiles
- ``merge`` how many ready groups are trained at once · ``forecast`` when the next ones will be ready
- ``tcss`` which group may start under which version
- ``pipeline``, ``bts``, ``tag`` what the Trainer does in a bubble
- ``trace`` what happened, as data
"""
