"""
From the environment to a running process: rank, device, dtype, process group, failures, and when to stop.

    run = launch.start(cfg)          every rank calls it, alone or under torchrun or srun
    run.all_reduce(loss_sum)         works at world size 1 too
    if run.stopping(): ...           SIGTERM, SIGUSR1 or Ctrl-C reached some rank
    return launch.report(run, {})    the end of main(): leaves the group, gives the signals back

A rank that fails prints its traceback and leaves at once (os._exit), so that its peers notice in seconds: no
collective ever stands in a `finally`. The launchers' variables (RANK, SLURM_*, ...) are read only here.
"""
import contextlib
import copy
import ctypes
import functools
import glob
import importlib.util
import itertools
import json
import numbers
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist

import config
from config import UserError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
BATCH_STEP, INTERACTIVE_STEP = 4294967291, 4294967290     # SLURM's step ids of sbatch's and salloc's shells
STOP_SIGNALS = [signal.Signals[name] for name in ("SIGTERM", "SIGUSR1", "SIGINT")
                if name in signal.Signals.__members__]    # Windows has no SIGUSR1
RESULT = "LIGNITE_RESULT"       # where a child process writes what it returns; see relaunch()


# ---- the environment --------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Environment:
    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1            # ranks on this node
    launcher: str = "none"          # "none", "torchrun" (or whatever else sets RANK and WORLD_SIZE), "srun"
    node: int = 0
    nodes: int = 1                  # known under srun only
    address: str = "127.0.0.1"      # where rank 0 listens
    port: int = 29500


def environment() -> Environment:
    """Who this process is. Reads variables only: touches no accelerator, remembers nothing."""
    get = os.environ.get
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        rank, world = int(get("RANK")), int(get("WORLD_SIZE"))
        local_rank, local_world = int(get("LOCAL_RANK", rank)), int(get("LOCAL_WORLD_SIZE", world))
        address, port = get("MASTER_ADDR", "127.0.0.1"), int(get("MASTER_PORT", 29500))
        return Environment(rank, world, local_rank, local_world, "torchrun", address=address, port=port)
    # sbatch's and salloc's shells have a SLURM_PROCID too, but are one process: only an srun step has tasks
    step = int(get("SLURM_STEP_ID", BATCH_STEP))
    if "SLURM_STEP_NUM_TASKS" not in os.environ or step >= INTERACTIVE_STEP:
        return Environment()
    node, job = int(get("SLURM_NODEID", 0)), int(get("SLURM_JOB_ID", 0))
    hosts = get("SLURM_STEP_NODELIST") or get("SLURM_JOB_NODELIST") or "127.0.0.1"
    world = int(get("SLURM_STEP_NUM_TASKS"))
    return Environment(int(get("SLURM_PROCID")), world, int(get("SLURM_LOCALID")),
                       tasks_per_node(get("SLURM_STEP_TASKS_PER_NODE") or str(world))[node], "srun",
                       node, int(get("SLURM_STEP_NUM_NODES", 1)), get("MASTER_ADDR") or first_host(hosts),
                       int(get("MASTER_PORT") or 15000 + (16 * job + step) % 16000))


def first_host(nodelist: str) -> str:
    """"gpu[03-06,11]" -> "gpu03", "n1,n2" -> "n1", "rack-a[1-2]b" -> "rack-a1b"."""
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", nodelist).split(",")[0]


def tasks_per_node(text: str) -> list[int]:
    """SLURM's "4(x2),1" -> [4, 4, 1]."""
    return [int(n) for n, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text) for _ in range(int(times or 1))]


# ---- device and dtype -------------------------------------------------------------------------------------
def choose_device(name: str, env: Environment) -> torch.device:
    """cfg.device as a device of this rank: "auto" is CUDA, then MPS, then the CPU. Raises UserError."""
    cuda = torch.cuda.device_count() if torch.cuda.is_available() else 0
    mps = torch.backends.mps.is_available()
    if name == "auto" and not cuda and tpu_visible():
        raise UserError("this machine has a TPU, which only train_xla.py drives: use that, or device=cpu")
    if name == "auto":
        name = "cuda" if cuda else "mps" if mps and env.world == 1 else "cpu"
    if not re.fullmatch(r"cuda(:\d+)?|mps|cpu", name):
        raise UserError(f"device={name} is none of auto, cuda, cuda:N, mps, cpu (a TPU: train_xla.py)")
    device = torch.device(name)
    if device.type == "cuda":
        if (device.index or 0) >= cuda:
            raise UserError(f"device={name} is not there: torch {torch.__version__} sees {cuda} GPUs")
        # srun may show each task its own GPU as number 0, hence the modulo
        return torch.device("cuda", env.local_rank % cuda if device.index is None else device.index)
    if device.type == "mps" and not mps:
        raise UserError("device=mps needs a Mac with Apple silicon: use device=auto")
    if device.type == "mps" and env.world > 1:
        raise UserError(f"device=mps runs one process and this is one of {env.world}: use device=cpu")
    return device


def tpu_visible() -> bool:
    """A TPU that torch_xla would use."""
    wanted = os.environ.get("PJRT_DEVICE", "").upper()
    chips = glob.glob("/dev/accel*") + glob.glob("/dev/vfio/[0-9]*")
    return wanted == "TPU" or bool(not wanted and chips and importlib.util.find_spec("torch_xla"))


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype of the products; the weights stay fp32. Of the three only fp16 needs a loss scale."""
    bf16 = device.type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False)
    if name == "auto":
        name = ("bf16" if bf16 else "fp16") if device.type == "cuda" else "fp32"
    if name not in DTYPES:
        raise UserError(f"dtype={name} is not one of auto, {', '.join(DTYPES)} (int8: sample.py, on a CPU)")
    if name == "bf16" and not bf16:
        raise UserError(f"dtype=bf16: {torch.cuda.get_device_name(device)} has no bf16, use fp16 or fp32")
    return DTYPES[name]


# ---- start ------------------------------------------------------------------------------------------------
def start(cfg) -> "Run":
    """Every rank calls it; of cfg it reads device, dtype, timeout (seconds) and seed. Raises UserError."""
    env = environment()
    if dist.is_initialized():                          # by the program that calls train()
        rank, world = dist.get_rank(), dist.get_world_size()
        local_rank = rank if env.launcher == "none" else env.local_rank
        env = replace(env, rank=rank, world=world, local_rank=local_rank)
    device = choose_device(cfg.device, env)
    dtype = choose_dtype(cfg.dtype, device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        if dtype != torch.float32:                     # then TF32 is enough for products that stay in fp32
            torch.set_float32_matmul_precision("high")
    if device.type == "cpu":
        keep_freed_memory(True)
    if env.local_world > 1 and device.type == "cpu":
        share_cores(env)
    joined = env.world > 1 and not dist.is_initialized()
    if joined:
        join(env, device, cfg.timeout)
    torch.manual_seed(cfg.seed)
    run = Run(env, device, dtype, joined)
    run.catch_signals()
    run.catch_failures(cfg)
    run.check_devices()
    return run


def share_cores(env: Environment) -> None:
    """The ranks of a machine share its cores, unless the user has set OMP_NUM_THREADS."""
    asked = os.environ.get("OMP_NUM_THREADS")          # torchrun sets it to 1 where it is not set
    if asked is None or (asked == "1" and "TORCHELASTIC_RUN_ID" in os.environ):
        cores = available_cores()
        if env.launcher == "srun":                     # which may have bound each task to its share already
            cores = min(cores * env.local_world, os.cpu_count())
        torch.set_num_threads(max(1, cores // env.local_world))


def keep_freed_memory(keep: bool) -> None:
    """
    Whether freed tensors stay with the process. By default glibc gives the pages of every large one back to
    the kernel and gets them anew, zeroed, in the next step: a GPT-2-like loop of 30M parameters took 1.22
    times as long that way (one thread). Other C libraries are left alone.
    """
    M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4              # malloc.h
    try:
        libc = ctypes.CDLL(None)
        mallopt, malloc_trim = libc.mallopt, libc.malloc_trim
    except (OSError, TypeError, AttributeError):       # macOS, Windows, musl
        return
    mallopt(M_MMAP_MAX, 0 if keep else 65536)          # 0: the heap, never a mapping of a tensor's own
    mallopt(M_TRIM_THRESHOLD, -1 if keep else 128 * 1024)
    if not keep:
        malloc_trim(0)


def available_cores() -> int:
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()


starts = itertools.count()


@functools.cache
def meeting_point(address, port, rank, world, timeout) -> dist.TCPStore:
    """The store where ranks meet. One for the life of the process: its port could not be bound again."""
    serve = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"       # else torchrun does
    patience = timedelta(seconds=max(timeout, 120))    # ranks import at their own pace
    return dist.TCPStore(address, port, world, serve, patience, multi_tenant=True)


def join(env: Environment, device: torch.device, timeout: float) -> None:
    # NCCL's watchdog ends a rank that hangs in a collective; on gloo the rank itself gets an error
    os.environ.setdefault("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", str(int(timeout)))
    # The store outlives a group, and an attempt of torchrun's (--max-restarts): dead addresses stay in it.
    # Nodes count attempts differently: several need TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, a store for each.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if env.local_world == env.world else ""
    store = meeting_point(env.address, env.port, env.rank, env.world, timeout)
    store = dist.PrefixStore(f"{attempt}.{next(starts)}", store)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    # DDP imports it too, and its functions keep the group that there is by then as a default: gloo's threads
    # would outlive the group, and abort the process when they meet a Python that is shutting down
    importlib.import_module("torch.distributed.nn.functional")
    dist.init_process_group(backend, store=store, rank=env.rank, world_size=env.world,
                            timeout=timedelta(seconds=timeout))


class Run:
    """This process among its peers."""

    def __init__(self, env: Environment, device: torch.device, dtype: torch.dtype, joined: bool):
        self.rank, self.world, self.local_rank = env.rank, env.world, env.local_rank
        self.main, self.device, self.dtype = env.rank == 0, device, dtype
        self.device_ids = [device.index] if device.type == "cuda" else None      # what DDP wants
        self.stop = False                              # set on any rank, it ends the run after this step
        self.stop_signal, self.stop_time = 0, 0.0      # the signal that asks for the same, and when it came
        self.joined, self.said = joined, False         # whether the group is ours to leave
        self.handlers, self.hooks = {}, ()             # what stood there before us
        # plain numbers travel over the CPU, which a group of the caller's may not serve
        alien = dist.is_initialized() and not joined and "gloo" not in str(dist.get_backend_config())
        self.cpu_group = dist.new_group(backend="gloo") if alien else None

    # -- talking to the other ranks --
    def all_reduce(self, x, op: str = "sum"):
        """Every rank calls it; op is sum, max or min. A tensor gives a new tensor, a number a number."""
        number = not isinstance(x, torch.Tensor)
        dtype = torch.int64 if isinstance(x, numbers.Integral) else torch.float64
        total = torch.tensor(x, dtype=dtype) if number else x.detach().clone()
        if self.world > 1:
            group = self.cpu_group if total.device.type == "cpu" else None
            dist.all_reduce(total, getattr(dist.ReduceOp, op.upper()), group=group)
        return total.item() if number else total

    def barrier(self) -> None:
        self.all_reduce(0)

    def stopping(self) -> bool:
        """Every rank calls it: is any of them to stop? Goes over the CPU, so nobody waits for the GPU."""
        number = self.all_reduce(max(self.stop_signal, int(self.stop)), "max")     # 1 is no signal of ours
        if number > 1 and not self.said:
            self.say(f"{signal.Signals(number).name}: stopping after this step")
            self.said = True
        return number > 0

    def say(self, text: str) -> None:
        if self.main:
            print(text, flush=True)

    # -- the device --
    def autocast(self):
        """The context of every forward: products in `dtype`, weights in fp32."""
        off = self.dtype == torch.float32
        return contextlib.nullcontext() if off else torch.autocast(self.device.type, self.dtype)

    def to_device(self, x: torch.Tensor) -> torch.Tensor:
        """x on its way to the device; to CUDA from pinned memory, so that the caller does not wait."""
        if self.device.type == "cuda":
            return x.pin_memory().to(self.device, non_blocking=True)
        return x.to(self.device)

    def peak_memory(self) -> dict:
        """The log line's {"peak-gpu-memory": GB}, on CUDA only."""
        cuda = self.device.type == "cuda"
        return {"peak-gpu-memory": torch.cuda.max_memory_allocated() / 2**30} if cuda else {}

    # -- checks --
    def check_shared(self, out_dir: str) -> None:
        """Every rank calls it: rank 0 makes out_dir, all must see what it writes there, or UserError."""
        token = 0
        if self.main:
            try:
                os.makedirs(out_dir, exist_ok=True)
                token = secrets.randbits(60) + 1
                with open(os.path.join(out_dir, f".seen-{token}"), "w", encoding="utf-8", newline="\n"):
                    pass
            except OSError as error:
                token, reason = 0, error.strerror
        token = self.all_reduce(token)
        if not token:
            raise UserError(f"out_dir={out_dir} cannot be written" + (f": {reason}" if self.main else ""))
        proof, deadline = os.path.join(out_dir, f".seen-{token}"), time.monotonic() + 10
        while not (seen := os.path.exists(proof)) and time.monotonic() < deadline:     # network disks lag
            time.sleep(0.2)
        blind = self.all_reduce(int(not seen))
        if self.main:
            os.remove(proof)
        if blind:
            raise UserError(f"{blind} of {self.world} ranks do not see what rank 0 writes into {out_dir}: "
                            "put out_dir on a disk that all nodes share")

    def check_devices(self) -> None:
        """Two ranks on one GPU would fail deep inside NCCL."""
        if self.world == 1 or self.device.type != "cuda":
            return
        chips = [None] * self.world
        mine = str(torch.cuda.get_device_properties(self.device).uuid)
        dist.all_gather_object(chips, mine, group=self.cpu_group)
        if len(set(chips)) < self.world:
            raise UserError(f"{self.world} ranks share {len(set(chips))} GPUs: start one rank per GPU")

    # -- signals and failures --
    def catch_signals(self) -> None:
        """SIGTERM, SIGUSR1 and Ctrl-C ask for a stop at the next step boundary; Ctrl-C once more quits."""
        def ask(number, frame):
            # under torchrun one Ctrl-C arrives twice, from the terminal and from torchrun: hence the second
            if number == signal.SIGINT and self.stop_signal and time.monotonic() - self.stop_time > 1:
                raise KeyboardInterrupt
            if not self.stop_signal:
                self.stop_signal, self.stop_time = number, time.monotonic()
        if threading.current_thread() is threading.main_thread():      # no other thread may set handlers
            self.handlers = {number: signal.signal(number, ask) for number in STOP_SIGNALS}

    def catch_failures(self, cfg) -> None:
        """A rank that raises, in whatever thread, says why and is gone: its peers then fail in seconds."""
        self.hooks = sys.excepthook, threading.excepthook
        sys.excepthook = lambda kind, error, trace: self.fail(error, cfg)
        threading.excepthook = lambda args: args.exc_type is SystemExit or self.fail(args.exc_value, cfg)

    def fail(self, error, cfg) -> None:
        """The last words of a rank."""
        if isinstance(error, UserError) and self.world > 1:
            refuse(error)
        if out_of_memory(error):
            words = f"{out_of_memory_sentence(cfg)} (rank {self.rank}, {self.device})\n"
        elif isinstance(error, RuntimeError) and re.search("Connection (closed|reset) by peer", str(error)):
            words = f"rank {self.rank}: another rank is gone, its own message says why\n"
        else:
            words = "".join(traceback.format_exception(error))
        sys.stderr.write(words)
        if self.world > 1:
            leave(130 if isinstance(error, KeyboardInterrupt) else 1)

    def finish(self) -> None:
        """Every rank calls it at the end. In a `finally` a rank that failed does not wait for its peers."""
        if self.world > 1 and sys.exc_info()[0] is not None:
            return
        if self.joined:
            dist.destroy_process_group()
        for number, handler in self.handlers.items():
            signal.signal(number, handler)
        if self.hooks and sys.exc_info()[0] is None:
            sys.excepthook, threading.excepthook = self.hooks
        self.joined, self.handlers, self.hooks = False, {}, ()


@contextlib.contextmanager
def visiting():
    """
    Around a call from a program of the user's: its signal handlers and exception hooks come back, also when
    the call fails (in a notebook Ctrl-C must interrupt again). Only where peers wait for this rank, a failure
    keeps the hooks that end it.
    """
    hooks = sys.excepthook, threading.excepthook
    mine = threading.current_thread() is threading.main_thread()
    handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    precision = torch.get_float32_matmul_precision()
    try:
        yield
    except BaseException:
        if environment().world == 1:
            sys.excepthook, threading.excepthook = hooks
        raise
    finally:
        for number, handler in handlers.items() if mine else ():
            signal.signal(number, handler)
        keep_freed_memory(False)                       # and the program gets it back
        torch.set_float32_matmul_precision(precision)


def out_of_memory(error) -> bool:
    if isinstance(error, torch.OutOfMemoryError):
        return True                                    # CUDA; MPS and the CPU have no class for it
    words = "out of memory|can't allocate memory"
    return isinstance(error, RuntimeError) and re.search(words, str(error)) is not None


def out_of_memory_sentence(cfg) -> str:
    """What to lower, with this run's values."""
    names = ("micro_batch_size", "gradient_accumulation", "sequence_length", "params", "hidden_size",
             "num_hidden_layers")
    now = ", ".join(f"{name}={vars(cfg)[name]}" for name in names if name in vars(cfg))
    return ("Out of memory: lower micro_batch_size (a larger gradient_accumulation keeps the batch), "
            f"sequence_length or the model size; now {now}")


def leave(code: int) -> None:
    """Out, without atexit: a destructor that waits for a peer would hold the job up."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def refuse(error: UserError) -> None:
    """End the program, exit code 2: rank 0 says the sentence, the others give it 10 s to end the job."""
    env = environment()
    if env.rank == 0:
        print(f"{os.path.basename(sys.argv[0])}: {error}", file=sys.stderr, flush=True)
    answer({"user_error": str(error)})
    if env.world == 1:
        raise SystemExit(2)
    if env.rank > 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # torchrun's way to end us
        time.sleep(10)
        if dist.is_initialized() and env.local_world == env.world:     # rank 0 lives on: ours alone
            print(f"rank {env.rank}: {error}", file=sys.stderr)
    leave(2)


# ---- one process per GPU ----------------------------------------------------------------------------------
def processes_to_start(cfg) -> int:
    """How many processes relaunch() starts on this node; 0 where this one trains."""
    env = environment()
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if (cfg.device not in ("auto", "cuda") or gpus < 2 or sys.platform == "win32" or dist.is_initialized()
            or env.launcher == "torchrun" or env.local_world >= gpus):
        return 0
    return gpus


def replicas(cfg) -> int:
    """The number of processes that will train, known before any is started."""
    return processes_to_start(cfg) * environment().nodes or environment().world


def relaunch(script: str, cfg) -> dict | None:
    """One process per GPU when several are visible; None where this process is already the one to train.

    From the command line torchrun takes this process's place. From Python (a notebook, the user's program)
    torchrun runs `script` in a child process on what `cfg` was given, and its result is returned: the caller
    is never run twice. Call it once everything is validated. Raises the UserError that ended the child.
    """
    env, gpus = environment(), processes_to_start(cfg)
    if not gpus:
        return None
    if env.launcher == "srun" and env.world != env.nodes:
        raise UserError(f"srun started {env.local_world} tasks on a node with {gpus} visible GPUs: use "
                        f"--ntasks-per-node={gpus}, or --ntasks-per-node=1 (torchrun does the rest)")
    torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={gpus}"]
    if env.nodes == 1:
        torchrun += ["--standalone"]
    else:
        torchrun += [f"--nnodes={env.nodes}", f"--node-rank={env.node}",
                     f"--master-addr={env.address}", f"--master-port={env.port}"]
    threads = {"OMP_NUM_THREADS": str(max(1, available_cores() // gpus)), **os.environ}
    if env.rank == 0:
        print(f"{gpus} GPUs visible: one process each (device=cuda:0 would use one alone)", flush=True)
    program = getattr(sys.modules["__main__"], "__file__", None)
    if program and os.path.abspath(program) == os.path.abspath(script):
        sys.stderr.flush()
        os.execve(sys.executable, [*torchrun, script, *sys.argv[1:]], threads)
    return run_child([*torchrun, script], threads, cfg)


def run_child(command: list[str], environ: dict, cfg) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        settings, answer = os.path.join(folder, "settings.py"), os.path.join(folder, "result.json")
        config.write(cfg, settings)
        child = subprocess.Popen([*command, settings], env={**environ, RESULT: answer})
        while child.poll() is None:
            try:
                child.wait()
            except KeyboardInterrupt:                  # a notebook's stop button reaches this process only
                child.send_signal(signal.SIGINT)
        if not os.path.exists(answer):
            raise RuntimeError(f"the processes of {os.path.basename(command[-1])} failed (exit code "
                               f"{child.returncode}): the message of the one that did is above")
        with open(answer, encoding="utf-8") as file:
            result = json.load(file)
    if "user_error" in result:
        raise UserError(result["user_error"])
    return result


def report(run: Run, result: dict) -> dict:
    """The end of main(): leaves the group; `result` also reaches the process that called relaunch()."""
    answer(result)
    run.finish()
    return result


def answer(result: dict) -> None:
    if RESULT in os.environ and environment().local_rank == 0:            # one on each node
        with open(os.environ[RESULT], "w", encoding="utf-8", newline="\n") as file:
            json.dump(result, file)


# ---- what the device can do -------------------------------------------------------------------------------
# Dense bf16 (before Ampere fp16) FLOP/s with fp32 sums, from NVIDIA's data sheets. The first name that fits.
PEAKS = {
    "B200": 2250e12, "H200": 989e12, "GH200": 989e12, "H100 PCIe": 756e12, "H100 NVL": 835e12,
    "H100": 989e12, "A100": 312e12, "L40S": 362e12, "L4": 121e12, "A10G": 70e12, "A10": 125e12,
    "V100": 125e12, "T4": 65e12, "RTX 5090": 209.5e12, "RTX 4090": 165.2e12, "RTX 3090": 71e12,
}


def peak_flops(run: Run) -> float | None:
    """FLOP/s of this rank's device at run.dtype: from the table, on a CPU measured, else None."""
    if run.device.type == "cuda" and run.dtype != torch.float32:
        name = torch.cuda.get_device_name(run.device)
        return next((peak for chip, peak in PEAKS.items() if re.search(rf"\b{chip}\b", name)), None)
    if run.device.type != "cpu":
        return None
    n, best = 1024, float("inf")
    a = torch.ones(n, n, dtype=run.dtype)              # not random: the seed's stream stays untouched
    for _ in range(5):
        began = time.perf_counter()
        a @ a
        best = min(best, time.perf_counter() - began)
    return 2 * n**3 / best


def compile_layers(layers, run: Run) -> None:
    """torch.compile each layer in place, so that its weights keep their names; or say why not."""
    try:
        torch.compile(lambda x: x * 2 + 1)(torch.ones(8, device=run.device))
    except Exception as error:                         # no Triton, no C++ compiler: each has its own class
        run.say(f"compile: not on this machine ({type(error).__name__}), going on without it")
        return
    for layer in layers:
        layer.compile()


def compare_with_cpu(model, ids: torch.Tensor, run: Run) -> None:
    """
    MPS has computed wrong products in some releases of macOS and torch: there the losses of one small batch
    are compared with the CPU's. UserError where they differ by more than rounding.
    """
    if run.device.type != "mps":
        return
    with torch.no_grad():
        here = float(model(ids.to(run.device), labels=ids.to(run.device))[0])
        there = float(copy.deepcopy(model).cpu()(ids, labels=ids)[0])
    if not abs(here - there) <= 1e-3 * abs(there):
        raise UserError(f"the GPU of this Mac computes a loss of {here:.4f} where the CPU computes "
                        f"{there:.4f}: update macOS and torch {torch.__version__}, or use device=cpu")
