"""Who am I, on what device, with whom; and how a job ends when one rank does."""
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import config
import launch
from config import UserError
from forked import run_ranks
from launch import Environment, environment

REPO = Path(launch.__file__).parent
LAUNCHERS = ("RANK", "LOCAL_", "WORLD_SIZE", "MASTER_", "SLURM_", "TORCHELASTIC", "PJRT_", "OMP_")


@dataclass
class Config:
    device: str = "cpu"
    dtype: str = "auto"
    timeout: float = 60
    seed: int = 3
    micro_batch_size: int = 8
    sequence_length: int = 512


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")       # for the processes that a test starts
    for name in [name for name in os.environ if name.startswith(LAUNCHERS)]:
        monkeypatch.delenv(name)


def gpus(monkeypatch, count):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


# ---- the environment: as recorded under each launcher -----------------------------------------------------
STEP = {"SLURM_JOB_ID": "1234", "SLURM_STEP_ID": "0", "SLURM_JOB_NODELIST": "gpu[03-06,11]",
        "SLURM_STEP_NODELIST": "gpu[03-04]", "SLURM_STEP_NUM_NODES": "2"}
TASK_PER_GPU = {**STEP, "SLURM_PROCID": "6", "SLURM_LOCALID": "2", "SLURM_NODEID": "1", "SLURM_NTASKS": "8",
                "SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_TASKS_PER_NODE": "4(x2)"}
TASK_PER_NODE = {**STEP, "SLURM_PROCID": "1", "SLURM_LOCALID": "0", "SLURM_NODEID": "1", "SLURM_NTASKS": "2",
                 "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}
SHELL = {"SLURM_JOB_ID": "1234", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0",
         "SLURM_NTASKS": "8", "SLURM_JOB_NODELIST": "gpu[03-04]", "SLURM_TASKS_PER_NODE": "4(x2)"}
TORCHRUN = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "1",
            "MASTER_ADDR": "node1", "MASTER_PORT": "29400", "TORCHELASTIC_RUN_ID": "none"}
PORT = 15000 + 16 * 1234 % 16000
RECORDED = {
    "nothing": ({}, Environment()),
    "torchrun on one node": (
        {**TORCHRUN, "LOCAL_WORLD_SIZE": "8", "LOCAL_RANK": "5", "MASTER_ADDR": "localhost"},
        Environment(5, 8, 5, 8, "torchrun", address="localhost", port=29400)),
    "torchrun on two nodes": (TORCHRUN, Environment(5, 8, 1, 4, "torchrun", address="node1", port=29400)),
    "torchrun inside an srun step": (
        {**TASK_PER_NODE, **TORCHRUN}, Environment(5, 8, 1, 4, "torchrun", address="node1", port=29400)),
    "srun, a task per GPU": (TASK_PER_GPU, Environment(6, 8, 2, 4, "srun", 1, 2, "gpu03", PORT)),
    "srun, a task per GPU that sees one GPU": (
        {**TASK_PER_GPU, "CUDA_VISIBLE_DEVICES": "2"}, Environment(6, 8, 2, 4, "srun", 1, 2, "gpu03", PORT)),
    "srun, a task per node": (TASK_PER_NODE, Environment(1, 2, 0, 1, "srun", 1, 2, "gpu03", PORT)),
    "a script of sbatch": (
        {**SHELL, "SLURM_STEP_ID": "4294967291", "SLURM_STEP_NUM_TASKS": "1"}, Environment()),
    "a script of sbatch on older SLURM": (SHELL, Environment()),
    "a shell of salloc": (
        {**SHELL, "SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1"}, Environment()),
}


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_environments(name, monkeypatch):
    variables, expected = RECORDED[name]
    for key, value in variables.items():
        monkeypatch.setenv(key, value)
    assert environment() == expected


@pytest.mark.parametrize("nodelist, first", [
    ("gpu[03-06,11]", "gpu03"), ("n1,n2", "n1"), ("rack-a[1-2]b", "rack-a1b"), ("solo", "solo"),
    ("a[7],b[1-2]", "a7"), ("r[1-2]n[05-09]", "r1n05"), ("gpu-1-[11,13],x", "gpu-1-11")])
def test_the_first_host_of_a_list_is_the_master(nodelist, first):
    assert launch.first_host(nodelist) == first


# ---- device and dtype -------------------------------------------------------------------------------------
def test_the_device_is_the_local_rank_modulo_the_visible_ones(monkeypatch):
    gpus(monkeypatch, 4)
    assert str(launch.choose_device("auto", Environment(6, 8, 2, 4))) == "cuda:2"
    assert str(launch.choose_device("cuda:1", Environment())) == "cuda:1"
    gpus(monkeypatch, 1)                     # srun --gpus-per-task=1
    assert str(launch.choose_device("cuda", Environment(6, 8, 2, 4))) == "cuda:0"


def test_auto_is_cuda_then_mps_then_the_cpu(monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    gpus(monkeypatch, 1)
    assert launch.choose_device("auto", Environment()).type == "cuda"
    gpus(monkeypatch, 0)
    assert launch.choose_device("auto", Environment()).type == "mps"
    assert launch.choose_device("auto", Environment(0, 2, 0, 2)).type == "cpu"
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert launch.choose_device("auto", Environment()).type == "cpu"


def test_a_tpu_is_sent_to_its_own_script(monkeypatch):
    gpus(monkeypatch, 0)
    monkeypatch.setenv("PJRT_DEVICE", "TPU")
    with pytest.raises(UserError, match="train_xla.py"):
        launch.choose_device("auto", Environment())
    assert launch.choose_device("cpu", Environment()).type == "cpu"


@pytest.mark.parametrize("device", ["cuda", "cuda:3", "mps", "tpu", "gpu", "cpu:x"])
def test_a_device_that_is_not_there_is_refused_before_anything_starts(device, monkeypatch):
    gpus(monkeypatch, 0)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(UserError, match=f"device={device}"):
        launch.start(Config(device=device))
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_the_dtype_is_what_the_device_has(monkeypatch):
    cpu, cuda = torch.device("cpu"), torch.device("cuda:0")
    assert launch.choose_dtype("auto", cpu) == torch.float32
    assert launch.choose_dtype("auto", torch.device("mps")) == torch.float32
    for has, best in ((True, torch.bfloat16), (False, torch.float16)):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: has)
        assert launch.choose_dtype("auto", cuda) == best
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    with pytest.raises(UserError, match="dtype=bf16: Tesla T4"):
        launch.choose_dtype("bf16", cuda)
    with pytest.raises(UserError, match="dtype=fp8"):
        launch.choose_dtype("fp8", cpu)


def test_ranks_share_the_cores_unless_the_user_gave_them_threads(monkeypatch):
    given = []
    monkeypatch.setattr(torch, "set_num_threads", given.append)
    monkeypatch.setattr(launch, "available_cores", lambda: 8)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    two = Environment(0, 2, 0, 2, "torchrun")
    launch.share_cores(two)                                        # nothing set
    launch.share_cores(Environment(0, 16, 0, 16, "torchrun"))      # more ranks than cores
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    launch.share_cores(two)                                        # the user's own 1
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    launch.share_cores(two)                                        # torchrun's 1
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    launch.share_cores(two)
    assert given == [4, 1, 4]


# ---- one process ------------------------------------------------------------------------------------------
def test_one_process_needs_no_group_and_gives_everything_back():
    def outside():
        return signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT), sys.excepthook

    before = outside()
    for _ in range(2):
        run = launch.start(Config())
        assert (run.rank, run.world, run.main, run.device_ids) == (0, 1, True, None) and outside() != before
        x = torch.ones(2)
        assert run.all_reduce(3) == 3 and run.all_reduce(0.1) == 0.1 and run.all_reduce(x) is not x
        assert not run.stopping() and not dist.is_initialized()
        assert torch.rand(1) == torch.rand(1, generator=torch.Generator().manual_seed(3))
        assert launch.report(run, {"a": 1}) == {"a": 1}
        assert outside() == before


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1", "SIGINT"])
def test_a_signal_asks_for_a_stop_and_a_second_ctrl_c_quits(name, capsys):
    run = launch.start(Config())
    try:
        os.kill(os.getpid(), signal.Signals[name])
        assert run.stopping() and run.stopping()
        assert capsys.readouterr().out == f"{name}: stopping after this step\n"
        os.kill(os.getpid(), signal.SIGINT)              # torchrun's copy of the same Ctrl-C
        run.stop_time -= 2
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)
    finally:
        run.finish()


def test_another_thread_can_train_too():
    seen = []
    thread = threading.Thread(target=lambda: seen.append(launch.report(launch.start(Config()), {"ok": 1})))
    thread.start()
    thread.join()
    assert seen == [{"ok": 1}]


def test_out_of_memory_is_one_sentence_with_what_to_lower(capsys):
    run = launch.start(Config())
    sys.excepthook(torch.OutOfMemoryError, torch.OutOfMemoryError("CUDA out of memory. Tried ..."), None)
    run.finish()
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "Traceback" not in said
    for word in ("micro_batch_size=8", "gradient_accumulation", "sequence_length=512", "model size"):
        assert word in said


# ---- several processes ------------------------------------------------------------------------------------
def talk(out_dir):
    results = []
    for _ in range(2):                                   # train() twice in one process
        run = launch.start(Config())
        run.check_shared(out_dir)
        first = (run.all_reduce(run.rank + 1), run.all_reduce(0.1), run.all_reduce(run.rank, "max"))
        total = run.all_reduce(torch.full((2,), float(run.rank)))
        before = run.stopping()
        run.stop = run.rank == 2
        results.append((*first, total.tolist(), before, run.stopping(), torch.rand(1).item()))
        run.finish()
        assert not dist.is_initialized()
    return results


def test_ranks_agree_on_sums_and_on_stopping_and_can_start_again():
    ranks = run_ranks(talk, 3, os.path.join(os.getcwd(), "new", "out"))
    assert ranks[0] == ranks[1] == ranks[2] and ranks[0][0] == ranks[0][1]
    assert ranks[0][0][:6] == (6, pytest.approx(0.3), 2, [3.0, 3.0], False, True)
    assert os.listdir("new/out") == []


def use_the_callers_group():
    run = launch.start(Config())
    total = run.all_reduce(1)
    run.finish()
    return run.rank, total, dist.is_initialized()


def test_a_group_of_the_callers_is_used_and_left_alone():
    assert run_ranks(use_the_callers_group, 2, group=True) == [(0, 2, True), (1, 2, True)]


def check_private_disks(folder):
    run = launch.start(Config())
    os.chdir(os.path.join(folder, str(run.rank)))
    time.sleep = lambda seconds: setattr(time, "monotonic", lambda: 1e12)      # its patience, in no time
    try:
        run.check_shared("out")
    except UserError as error:
        return str(error)


def test_an_out_dir_on_node_local_disks_is_refused_by_every_rank():
    for rank in range(2):
        os.mkdir(str(rank))
    said = run_ranks(check_private_disks, 2, os.getcwd())
    assert said[0] == said[1] and said[0].startswith("1 of 2 ranks do not see what rank 0 writes into out")


def hang():
    run = launch.start(Config(timeout=1))
    run.barrier()
    if run.rank == 1:
        time.sleep(60)
    run.barrier()


def test_a_rank_that_hangs_ends_the_job_at_the_timeout():
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="(?s)rank 0 of 2 failed.*Timed out"):
        run_ranks(hang, 2)
    assert time.monotonic() - began < 40


def fail_alone():
    run = launch.start(Config())
    try:
        if run.rank == 1:
            raise ValueError("mine")
        run.barrier()
    finally:
        run.finish()                                     # must not wait for the other rank
    return "unreachable"


def test_the_rank_that_failed_first_is_the_one_reported():
    with pytest.raises(RuntimeError, match="(?s)rank 1 of 2 failed.*ValueError: mine"):
        run_ranks(fail_alone, 2)


# ---- under torchrun ---------------------------------------------------------------------------------------
SCRIPT = f'''
import os, signal, sys
sys.path.insert(0, {str(REPO)!r})
from dataclasses import dataclass
import torch
import config, launch

@dataclass
class Config:
    end: str = "well"
    out_dir: str | None = None
    device: str = "auto"
    dtype: str = "auto"
    timeout: float = 60
    seed: int = 0

def train(**values):
    return main(config.make(Config, values))

def main(cfg):
    result = launch.relaunch(__file__, cfg)
    if result is not None:
        return result
    run = launch.start(cfg)
    for step in range(4):
        if run.rank == 1 and step == 2 and cfg.end == "raise":
            raise RuntimeError("the dog ate it")
        if run.rank == 1 and step == 2 and cfg.end == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if step == 2 and cfg.end == "refuse":
            raise config.UserError("no good after all")
        run.all_reduce(torch.ones(1))
    if cfg.end == "after DDP":
        forward = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
        forward(torch.ones(1, 2)).sum().backward()
        del forward
    result = launch.report(run, {{"world": run.all_reduce(1), "out_dir": cfg.out_dir}})
    if cfg.end == "after DDP":
        threads = [open(f"/proc/self/task/{{one}}/comm").read() for one in os.listdir("/proc/self/task")]
        assert not [name for name in threads if "gloo" in name], threads
    return result

if __name__ == "__main__":
    config.run(main, Config)
'''


def torchrun(*argv):
    Path("script.py").write_text(SCRIPT, encoding="utf-8")
    began = time.monotonic()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run([*command, "script.py", *argv], capture_output=True, text=True, encoding="utf-8")
    assert time.monotonic() - began < 60
    return done.returncode, done.stderr


def test_a_rank_that_raises_ends_the_job_with_its_own_traceback():
    code, said = torchrun("--end=raise")
    assert code == 1 and said.count("RuntimeError: the dog ate it") == 1
    assert "Connection" not in said                      # what the survivor saw is no news


def test_a_rank_that_is_killed_ends_the_job():
    code, said = torchrun("--end=kill")
    assert code == 1 and "another rank is gone" in said and "exitcode  : -9" in said


@pytest.mark.skipif(sys.platform != "linux", reason="the threads are listed in /proc")
def test_no_thread_of_a_group_outlives_it():
    """It would abort the process, where it meets a Python that is shutting down."""
    code, said = torchrun("--end=after DDP")
    assert code == 0, said


def test_what_the_user_got_wrong_is_said_once():
    code, said = torchrun("--endd=x")
    assert code == 1 and "exitcode  : 2" in said
    assert said.count("script.py: --endd is not a key of this script: did you mean end?") == 1


# ---- one process per GPU ----------------------------------------------------------------------------------
def test_with_one_device_or_under_a_launcher_nothing_is_relaunched(monkeypatch):
    assert launch.relaunch("train.py", Config(device="auto")) is None
    gpus(monkeypatch, 4)
    assert launch.relaunch("train.py", Config(device="cuda:1")) is None
    assert launch.relaunch("train.py", Config(device="cpu")) is None
    for variables in (TASK_PER_GPU, TORCHRUN):
        for key, value in variables.items():
            monkeypatch.setenv(key, value)
        assert launch.relaunch("train.py", Config(device="auto")) is None


def command_line(monkeypatch, count, **variables):
    """The command that takes the place of `python train.py a.py --lr=1` with `count` GPUs."""
    gpus(monkeypatch, count)
    for key, value in variables.items():
        monkeypatch.setenv(key, value)
    commands = []
    monkeypatch.setattr(sys.modules["__main__"], "__file__", "train.py")
    monkeypatch.setattr(sys, "argv", ["train.py", "a.py", "--lr=1"])
    monkeypatch.setattr(os, "execve", lambda path, command, env: commands.append(command))
    monkeypatch.setattr(launch, "run_child", lambda *_: None)          # execve does not return
    launch.relaunch("train.py", Config(device="auto"))
    assert commands[0][:3] == [sys.executable, "-m", "torch.distributed.run"] and len(commands) == 1
    return commands[0][3:]


def test_the_command_line_becomes_torchrun_on_every_gpu(monkeypatch):
    assert command_line(monkeypatch, 4) == [
        "--nproc-per-node=4", "--standalone", "train.py", "a.py", "--lr=1"]


def test_a_task_per_node_becomes_torchrun_on_each_node(monkeypatch):
    assert command_line(monkeypatch, 4, **TASK_PER_NODE) == [
        "--nproc-per-node=4", "--nnodes=2", "--node-rank=1", "--master-addr=gpu03", f"--master-port={PORT}",
        "train.py", "a.py", "--lr=1"]


def test_fewer_tasks_than_gpus_are_refused(monkeypatch):
    with pytest.raises(UserError, match="4 tasks on a node with 8 visible GPUs: use --ntasks-per-node=8"):
        command_line(monkeypatch, 8, **TASK_PER_GPU)


def test_from_python_the_script_runs_in_children_and_its_result_comes_back(monkeypatch, capfd):
    Path("script_of_test.py").write_text(SCRIPT, encoding="utf-8")
    monkeypatch.syspath_prepend(os.getcwd())
    import script_of_test
    gpus(monkeypatch, 2)                                 # here only: the children find none and use the CPU
    assert script_of_test.train(out_dir="it's") == {"world": 2, "out_dir": "it's"}
    with pytest.raises(UserError, match="^no good after all$"):
        script_of_test.train(end="refuse")
    assert capfd.readouterr().err.count("script_of_test.py: no good after all") == 1       # of two ranks


def test_a_device_that_computes_other_losses_than_the_cpu_is_refused():
    class Ids:
        def to(self, device):
            return self

    class Network:
        def __init__(self, loss, on_cpu):
            self.loss, self.on_cpu = loss, on_cpu

        def __call__(self, ids, labels):
            return torch.tensor(self.loss), 1

        def cpu(self):
            return Network(self.on_cpu, self.on_cpu)

    mps = SimpleNamespace(device=SimpleNamespace(type="mps"))
    launch.compare_with_cpu(Network(4.0001, 4.0), Ids(), mps)
    for wrong in (4.2, float("nan")):
        with pytest.raises(UserError, match="update macOS"):
            launch.compare_with_cpu(Network(wrong, 4.0), Ids(), mps)


# ---- memory -----------------------------------------------------------------------------------------------

@pytest.mark.skipif(sys.platform != "linux", reason="getrusage counts page faults in its own way elsewhere")
def test_freed_tensors_are_used_again_without_page_faults():
    code = """if True:
        import ctypes, resource, torch, launch
        if not hasattr(ctypes.CDLL(None), "mallopt"):
            raise SystemExit("no glibc")
        def faults():
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            for _ in range(4):
                torch.ones(2**24)                          # 64 MiB: 16,384 pages of 4 KiB
            return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
        launch.keep_freed_memory(True)
        faults()                                           # the heap grows
        kept = faults()
        launch.keep_freed_memory(False)
        print(kept, faults())
    """
    done = subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True)
    if "no glibc" in done.stderr:
        pytest.skip("not glibc")
    kept, given_back = map(int, done.stdout.split())
    assert kept < 1000 < given_back
