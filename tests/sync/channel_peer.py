"""One end of the weight channel in a process of its own: ``python channel_peer.py HOST PORT RANK WORLD VERSION``.

Prints one JSON line: the tensors received (name, shape, dtype, checksum), or the error.
"""

from __future__ import annotations

import asyncio
import json
import sys

from verl_digen.sync.channel import DigenCheckpointEngine
from verl_digen.sync.checksum import tensors_checksum

BUCKET = 1024


async def receive(engine: DigenCheckpointEngine, version: int) -> list:
    got = []
    async for name, tensor in engine.receive_weights(version):
        got.append([name, list(tensor.shape), str(tensor.dtype), str(tensors_checksum([(name, tensor)]))])
    return got


def main(host: str, port: str, rank: str, world: str, *versions: str) -> None:
    engine = DigenCheckpointEngine(BUCKET, timeout_s=240)
    engine.init_process_group(int(rank), int(world), {"host": host, "port": int(port)})
    out: dict = {"received": []}
    for version in versions:
        try:
            out["received"].append(asyncio.run(receive(engine, int(version))))
        except ValueError as error:
            out["error"] = str(error)
            break
    sys.stdout.write(json.dumps(out) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
