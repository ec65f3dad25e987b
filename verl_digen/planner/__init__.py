"""What the decisions of ``verl_digen.schedule`` would give: simulator, lower bound, planner, pictures.

Plain Python; only the pictures need matplotlib, when one is drawn.

- ``simulate``, ``eventloop``, ``helperloop``, ``trainerloop``, ``disturbance`` the simulator
- ``bound`` what no schedule can beat · ``catalog`` workload and testbed files
- ``candidates``, ``plan`` which placement and schedule is fastest
- ``shared`` placements beside a split · ``overrides`` a choice as options of a run
- ``timeline`` the picture of a trace
"""
