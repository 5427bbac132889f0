"""Several ranks for a test: processes forked from this one, so that importing torch is paid for once."""
import multiprocessing
import os
import pickle
import socket
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from multiprocessing.connection import wait

import torch
import torch.distributed as dist


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run_ranks(fn, world, *args, timeout=120, group=False, env=None) -> list:
    """fn(*args) in `world` processes on this machine, in the environment that torchrun gives them; the results by rank.

    group: join them first, in a gloo group over a file. Otherwise fn does so, through MASTER_ADDR and MASTER_PORT.
    env: variables added to each rank's environment.
    Raises RuntimeError with the traceback of the rank that failed first, and TimeoutError with the ranks still running.
    """
    context, port, deadline = multiprocessing.get_context("fork"), free_port(), time.monotonic() + timeout
    with tempfile.TemporaryDirectory() as folder:
        ranks = [context.Process(target=_rank, args=(fn, args, rank, world, port, folder, group, timeout, env or {}))
                 for rank in range(world)]
        for process in ranks:
            process.start()
        died = {}                                        # rank -> when this process saw it fail without a word
        while running := [process for process in ranks if process.is_alive()]:
            wait([process.sentinel for process in running], timeout=1)
            for rank, process in enumerate(ranks):
                if process.exitcode:
                    died.setdefault(rank, time.monotonic())
            if time.monotonic() > (min(died.values()) + 5 if died else deadline):     # the others get 5 s to follow
                break
        stuck = [rank for rank, process in enumerate(ranks) if process.is_alive()]
        for process in ranks:
            process.kill()
            process.join()
        reports = {rank: _read(os.path.join(folder, f"{rank}.pickle")) for rank in range(world)}
        if died:
            when = {rank: reports[rank][1] if reports[rank] else died[rank] for rank in died}
            first = min(died, key=when.get)
            told = reports[first][2] if reports[first] else f"died without a traceback, exit code {ranks[first].exitcode}"
            raise RuntimeError(f"rank {first} of {world} failed:\n{told}")
        if stuck:
            raise TimeoutError(f"ranks {stuck} of {world} were still running after {timeout} s")
        return [reports[rank][2] for rank in range(world)]


def _rank(fn, args, rank, world, port, folder, group, timeout, env):
    for name in [name for name in os.environ if name.startswith(("TORCHELASTIC", "SLURM_"))]:
        del os.environ[name]
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world),
                      MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")
    os.environ.update(env)
    torch.set_num_threads(1)                             # OpenMP's threads did not survive the fork
    code = 1
    try:
        if group:
            store = dist.FileStore(os.path.join(folder, "store"), world)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=timeout))
        report = ("returned", time.monotonic(), fn(*args))
        code = 0
    except BaseException:
        report = ("raised", time.monotonic(), traceback.format_exc())
    with open(os.path.join(folder, f"{rank}.pickle"), "wb") as file:
        pickle.dump(report, file)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)                                       # without the parent's atexit work


def _read(path):
    if not os.path.exists(path):
        return None
    with open(path, "rb") as file:
        return pickle.load(file)
