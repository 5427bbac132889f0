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
    """
    fn(*args) in `world` processes, in the environment that torchrun would give them; the results by rank.

    group: put them into a gloo group first; otherwise fn does so, through MASTER_ADDR and MASTER_PORT.
    env: more variables for every rank.
    RuntimeError has the traceback of the rank that failed first, TimeoutError names who was stuck.
    """
    fork, port, deadline = multiprocessing.get_context("fork"), free_port(), time.monotonic() + timeout
    with tempfile.TemporaryDirectory() as folder:
        variables = [{
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world),
            "LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1", **(env or {})} for rank in range(world)]
        ranks = [fork.Process(target=_rank, args=(fn, args, variables[rank], folder, group, timeout))
                 for rank in range(world)]
        for process in ranks:
            process.start()
        died = {}                                      # rank -> when it was seen dead
        while running := [process for process in ranks if process.is_alive()]:
            wait([process.sentinel for process in running], timeout=1)
            for rank, process in enumerate(ranks):
                if process.exitcode:
                    died.setdefault(rank, time.monotonic())
            if time.monotonic() > (min(died.values()) + 3 if died else deadline):    # the others may follow
                break
        stuck = [rank for rank, process in enumerate(ranks) if process.is_alive()]
        for process in ranks:
            process.kill()
            process.join()
        reports = [_read(os.path.join(folder, str(rank))) for rank in range(world)]
    if died:
        first = min(died, key=lambda rank: reports[rank][0] if reports[rank] else died[rank])
        silent = (None, f"it died without a word, exit code {ranks[first].exitcode}")  # -6: gloo's abort
        raise RuntimeError(f"rank {first} of {world} failed:\n{(reports[first] or silent)[1]}")
    if stuck:
        raise TimeoutError(f"ranks {stuck} of {world} were still running after {timeout} s")
    return [report[1] for report in reports]


def _rank(fn, args, variables, folder, group, timeout):
    for name in [name for name in os.environ if name.startswith(("TORCHELASTIC", "SLURM_"))]:
        del os.environ[name]
    os.environ.update(variables)
    torch.set_num_threads(1)                           # OpenMP's threads did not survive the fork
    rank, world, code = int(variables["RANK"]), int(variables["WORLD_SIZE"]), 1
    try:
        if group:
            store = dist.FileStore(os.path.join(folder, "store"), world)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world,
                                    timeout=timedelta(seconds=timeout))
        result = fn(*args)
        code = 0
    except BaseException:
        result = traceback.format_exc()
    with open(os.path.join(folder, str(rank)), "wb") as file:
        pickle.dump((time.monotonic(), result), file)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)                                     # without the parent's atexit work


def _read(path):
    if not os.path.exists(path):
        return None
    with open(path, "rb") as file:
        return pickle.load(file)
