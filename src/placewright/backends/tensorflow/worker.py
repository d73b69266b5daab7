"""A device as a process of its own: a TensorFlow server on its own cores.

Run by `TensorFlowRunner` as `python -m placewright.backends.tensorflow.worker`.
"""

from __future__ import annotations

import os
from typing import Any

from placewright.backends.processes import serve
from placewright.backends.tensorflow.lean import import_for_server
from placewright.backends.tensorflow.memory import forget, peak_bytes

_servers: list[Any] = []


def handle(request: dict[str, Any]) -> dict[str, Any]:
    """Starts the server; it then runs in threads of its own, until the process ends. What is asked
    later is how much memory it holds, or for a sign of life."""
    if _servers:
        if "memory" in request:
            return {"peak_bytes": forget() if request["memory"] == "forget" else peak_bytes()}
        return {"alive": True}
    # Before TensorFlow is imported: it sizes its thread pools by the cores it finds.
    if request["cores"]:
        os.sched_setaffinity(0, request["cores"])
    import_for_server()
    from tensorflow.core.protobuf.config_pb2 import ConfigProto
    from tensorflow.python.training.server_lib import Server

    config = ConfigProto(
        intra_op_parallelism_threads=max(1, len(request["cores"])),
        inter_op_parallelism_threads=request["threads_between_ops"],
    )
    _servers.append(
        Server(
            {"worker": request["addresses"]},
            job_name="worker",
            task_index=request["task"],
            protocol="grpc",
            config=config,
        )
    )
    return {"ready": True}


if __name__ == "__main__":
    serve(handle)
