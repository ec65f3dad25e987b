"""What the plugin adds to ``import verl``, measured in two ways. Writes a table, or JSON with ``--json``.

- load: the entry point loaded in a process that has imported verl without plugins, which is exactly the work that
  the plugin adds. It is the figure to judge: aim < 0.1 s, must be < 0.5 s.
- total: ``import verl`` with and without plugins, in fresh processes taken in turn. Several seconds that scatter by
  more than what is looked for; it shows that nothing was missed.

    python recipes/benchmarks/import_time.py --runs 5
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys

LOAD = """
import importlib.metadata, time
import verl
start = time.perf_counter()
for entry in importlib.metadata.entry_points(group="verl.plugins"):
    if entry.name == "verl_digen":
        entry.load()
print(time.perf_counter() - start)
"""
TOTAL = "import time; start = time.perf_counter(); import verl; print(time.perf_counter() - start)"


def seconds(code: str, plugins: str) -> float:
    """Run ``code`` in a fresh interpreter; it prints a number of seconds as its last line."""
    env = os.environ | {"VERL_USE_EXTERNAL_PLUGINS": plugins}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=5, help="fresh processes per figure")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()

    seconds(TOTAL, "verl_digen")  # fills the file cache; not counted
    samples: dict[str, list[float]] = {"load": [], "total_without": [], "total_with": []}
    for _ in range(args.runs):
        samples["load"].append(seconds(LOAD, "none"))
        samples["total_without"].append(seconds(TOTAL, "none"))
        samples["total_with"].append(seconds(TOTAL, "verl_digen"))

    rows = [
        {"what": what, "median_s": statistics.median(times), "min_s": min(times), "max_s": max(times)}
        for what, times in samples.items()
    ]
    if args.json:
        print(json.dumps({"runs": args.runs, "rows": rows}))
        return
    print(f"{'what':<14} {'median':>8} {'min':>8} {'max':>8}   seconds, {args.runs} runs")
    for row in rows:
        print(f"{row['what']:<14} {row['median_s']:8.3f} {row['min_s']:8.3f} {row['max_s']:8.3f}")


if __name__ == "__main__":
    main()
