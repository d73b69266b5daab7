"""Ray itself: started on this machine and stopped again, or one that runs already."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any

from placewright.distributed import guard, watch
from placewright.distributed.config import TeamConfig, check_installed
from placewright.errors import SearchError, WorkerError
from placewright.machine import usable_cores

logger = logging.getLogger(__name__)

_OBJECT_STORE_BYTES = 512 * 2**20
"""For problems and weights on their way between processes; Ray would take a third of the memory."""

_TOKEN = secrets.token_hex(32)
"""What processes of a Ray that is started here show each other."""

_LARGE = str(1 << 28)

_OUTLIVING = {
    "RAY_gcs_rpc_server_reconnect_timeout_s": "3600",
    "RAY_max_direct_call_object_size": _LARGE,
    "RAY_task_rpc_inlined_bytes_limit": _LARGE,
}
"""Without its head Ray would end this process after a minute, while results are being saved. That
the head is gone is for us to notice (`watch`), and to say. And Ray ends a process at once, without
a word, where that asks the store of large objects, which is a part of the raylet, for something
when the raylet is gone; and where this process has put something there itself, it asks for it even
unbidden. So nothing is put there, and arguments and answers travel in the calls themselves, up to
this size; what processes of a cluster answer that was joined, and not started here, as that was
told to."""

_ANSWER_SECONDS = 4.0
"""How long an address has to accept a connection, and then twice that to prove to be Ray."""


@contextlib.contextmanager
def ray_session(config: TeamConfig) -> Iterator[None]:
    """Ray, for as long as it lasts, with room for the workers."""
    check_installed("`controllers`" if config.controllers else "`workers`")
    # Before Ray is imported, which reads this once: it must not phone home.
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    terminate = signal.getsignal(signal.SIGTERM) or signal.SIG_DFL
    with _local() if config.address is None else _joined(config.address) as options:
        import ray

        # What is worth a user's while is said here.
        logging.getLogger("ray").setLevel(logging.ERROR)
        try:
            if config.address is None:
                options["num_cpus"] = _cpus(config)
            try:
                ray.init(
                    include_dashboard=None if config.address else False,
                    configure_logging=False,
                    log_to_driver=False,
                    **options,
                )
            except (ConnectionError, RuntimeError, ValueError, OSError) as fault:
                where = config.address or "this machine"
                raise WorkerError(f"Ray on {where}: {_last_line(fault)}") from None
            _quiet()
            node: Any = ray._private.worker._global_node
            watch.begin(node.raylet_socket_name, node.gcs_address)
            # Ray puts its own handler, which ends the process at once.
            signal.signal(signal.SIGTERM, terminate)
            _check_room(config)
            yield
        finally:
            watch.end()
            # A second Ctrl-C must not leave half of the processes behind.
            before = signal.signal(signal.SIGINT, signal.SIG_IGN)
            try:
                ray.shutdown()
            finally:
                signal.signal(signal.SIGINT, before)
                signal.signal(signal.SIGTERM, terminate)


@contextlib.contextmanager
def _local() -> Iterator[dict[str, Any]]:
    folder = tempfile.mkdtemp(prefix="placewright-ray-")
    settings = {
        # Ray replaces 127.0.0.1 by the machine's outward address, and then listens on all of them,
        # unless it believes to be on a system where it does not form clusters.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        # Whoever reaches Ray's ports can run code in its processes. It asks for a token only when
        # told to; without one of our own it would write its own into the user's home.
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": os.environ.get("RAY_AUTH_TOKEN", _TOKEN),
        guard.MARK: folder,
        **_OUTLIVING,
    }
    guarding = subprocess.Popen(
        # Isolated, as it needs nothing but Python; out of the reach of the terminal's Ctrl-C.
        [sys.executable, "-I", guard.__file__, folder],
        stdin=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        with _settings(settings):
            yield from _alone(folder)
    finally:
        guarding.communicate("" if watch.lost() else guard.DONE)


def _alone(folder: str) -> Iterator[dict[str, Any]]:
    """What Ray is told so that it stays on the loopback interface, for as long as that holds."""
    from ray._private import ray_constants

    clusters = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False  # where Ray had been imported already
    try:
        yield {
            "address": "local",
            "_node_ip_address": "127.0.0.1",
            # Ray lets everybody write to its folder; nobody else gets into the one around it.
            "_temp_dir": os.path.join(folder, "ray"),
            "object_store_memory": _OBJECT_STORE_BYTES,
        }
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = clusters


@contextlib.contextmanager
def _settings(settings: Mapping[str, str]) -> Iterator[None]:
    """What Ray and its processes read from the environment."""
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        _reread_settings()
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value
        _reread_settings()


def _reread_settings() -> None:
    """Ray reads the environment when it is imported, how it authenticates included, and keeps that;
    it may have been imported before, by whoever called us."""
    import ray._raylet

    inside: Any = ray._raylet
    # In this order: a thread of Ray that still ends must not look for a token that is gone.
    inside.Config.initialize("")
    inside.AuthenticationTokenLoader.instance().reset_cache()


@contextlib.contextmanager
def _joined(address: str) -> Iterator[dict[str, Any]]:
    if address == "auto":
        from ray._private.services import canonicalize_bootstrap_address

        try:
            found = canonicalize_bootstrap_address("auto")
        except (ConnectionError, RuntimeError, ValueError):
            found = None
        if found is None:
            raise WorkerError(
                "no Ray cluster runs on this machine; start one with 'ray start --head', or leave "
                "out `address`"
            )
    else:
        found = address
    _check_answers(address, found)
    with _settings(_OUTLIVING):
        yield {"address": found}


def _check_answers(given: str, address: str) -> None:
    """Ray itself would try for more than a minute, and then end the process."""
    host, colon, port = address.rpartition(":")
    if "://" in address or not (colon and host and port.isdecimal()):
        raise WorkerError(
            f"address={given!r}: expected 'auto' or HOST:PORT, as 'ray start' prints it"
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_SECONDS).close()
    except (OSError, OverflowError) as fault:
        raise WorkerError(
            f"nobody answers at address={address!r} ({fault}); is the cluster running there?"
        ) from None
    command = [sys.executable, "-m", "ray.scripts.scripts", "health-check", "--address", address]
    try:
        subprocess.run(
            command, check=True, timeout=2 * _ANSWER_SECONDS, capture_output=True, text=True
        )
    except subprocess.CalledProcessError as fault:
        detail = _last_line(fault.stderr)
        raise WorkerError(f"address={address!r} is no healthy Ray cluster: {detail}") from None
    except subprocess.TimeoutExpired:
        raise WorkerError(f"what answers at address={address!r} is not Ray") from None


def _check_room(config: TeamConfig) -> None:
    """Raises when the cluster can never hold the workers; Ray would wait for more machines."""
    machines = _machines()
    each = {name: amount for name, amount in (config.resources or {}).items() if amount}
    wanted = config.all_workers
    room = machines_for(each, wanted)
    if room >= wanted:
        return
    for name, amount in each.items():
        there = sum(machine.get(name, 0.0) for machine in machines)
        if there < amount * wanted:
            raise SearchError(
                f"{wanted} workers need {amount * wanted:g} {name} ({amount:g} each), the cluster "
                f"has {there:g} in all"
            )
    needs = ", ".join(f"{amount:g} {name}" for name, amount in each.items())
    raise SearchError(
        f"{wanted} workers need {needs} each on one machine, the cluster's {len(machines)} "
        f"machines have room for {room}"
    )


def _machines() -> list[Mapping[str, float]]:
    """What each machine of the cluster has that is there by now."""
    import ray

    nodes: Any = ray.nodes
    return [node["Resources"] for node in nodes() if node["Alive"]]


def machines_for(each: Mapping[str, float], wanted: int) -> int:
    """How many of the wanted workers the cluster's machines have room for."""
    needs = {name: amount for name, amount in each.items() if amount}
    return sum(_fitting(machine, needs, wanted) for machine in _machines())


def _fitting(machine: Mapping[str, float], each: Mapping[str, float], most: int) -> int:
    """How many workers one machine has room for."""
    return min(
        (int(machine.get(name, 0.0) / amount) for name, amount in each.items()), default=most
    )


def _cpus(config: TeamConfig) -> int:
    """How many a Ray on this machine claims to have."""
    there = usable_cores()
    each = (config.resources or {}).get("CPU", 0.0)
    # Who asks for several means them. Otherwise so many workers on one machine are the user's
    # choice: they may wait more than they compute.
    return there if each > 1 else max(there, math.ceil(each * config.all_workers))


def _quiet() -> None:
    """Ray prints a paragraph for each process that dies; who replaces it says so in a line."""
    from ray._private import worker

    def log(data: Any, *_: Any, **__: Any) -> None:
        logger.debug("ray: %s", data.get("lines") if isinstance(data, dict) else data)

    if hasattr(worker, "print_to_stdstream"):
        worker.print_to_stdstream = log


def _last_line(fault: object) -> str:
    lines = [line.strip() for line in str(fault).splitlines() if line.strip()]
    return lines[-1] if lines else repr(fault)
