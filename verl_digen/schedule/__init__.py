"""Scheduling: GAP, TSP, TAG/BTS and TCSS as pure decisions, and the simulator that drives them.

Plain Python and the standard library. The simulator calls all of it; docs/scheduling.md says what a live run calls:

- ``work`` the words as types · ``profile`` what things cost, learned while running
- ``gap`` fragments and pull order · ``assemble`` groups from scored samples · ``tsp`` tiles
- ``tcss`` which group may start under which version
- ``pipeline``, ``bts``, ``tag`` what the Trainer does in a bubble
- ``trace``, ``timeline`` what happened, as data and as a picture
- ``eventloop``, ``helperloop``, ``trainerloop``, ``simulate``, ``disturbance`` the simulator; ``bound`` the bound
- ``catalog``, ``plan`` workload files and the planner
"""
