"""
How a race is run, for the files beside this one. Every contestant runs in a process of its own, in turns
(A B C A B C ...). Only what stands in `with clock:` is timed. A ratio is taken within a round, since whatever
else the machine does slows a whole round down; the median over the rounds is printed, and the smallest and
the largest.
"""
import importlib.metadata
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass

import config
from config import HERE, UserError


@dataclass(frozen=True)
class Contestant:
    name: str                                  # as the table calls it
    run: Callable                              # (clock, out, **arguments) -> what must be equal to ours
    needs: tuple[str, ...] = ()                # packages


def run_race(title: str, contestants: list[Contestant], cfg, folder: str, amount: float, unit: str,
         **arguments) -> dict:
    """The contestants against the first. `amount`: of the work, so that amount / seconds is in `unit`."""
    runs, left_out = take_turns(contestants, cfg, folder, lambda number: arguments)
    ours = runs[contestants[0].name]
    return {"title": title, "unit": unit, "left_out": left_out,
            "rows": [compare(name, mine, ours, amount) for name, mine in runs.items()]}


def take_turns(contestants: list[Contestant], cfg, folder: str, arguments_of: Callable[[int], dict]
               ) -> tuple[dict[str, list[dict]], dict[str, str]]:
    """
    By name: the measured runs, and why a contestant was left out. The first is ours and must not fail.
    `arguments_of(number)`: what the contestants get in that round, counted from 1.
    """
    left_out, runs, by_name = {}, {}, {one.name: one for one in contestants}
    for one in contestants[:None if cfg.peers else 1]:
        absent = [package for package in one.needs if importlib.util.find_spec(package) is None]
        if absent:
            left_out[one.name] = f"pip install {' '.join(absent)}"
        else:
            runs[one.name] = []
    for number in range(1, cfg.rounds + 1):
        for name in list(runs):
            try:
                runs[name].append(alone(by_name[name], folder, arguments_of(number)))
                print(f"round {number} of {cfg.rounds}: {name} {runs[name][-1]['seconds']:.2f} s",
                      file=sys.stderr, flush=True)
            except UserError as error:
                if name == contestants[0].name:
                    raise
                left_out[name] = str(error)
                del runs[name]
    return runs, left_out


def compare(name: str, runs: list[dict], ours: list[dict], amount: float) -> dict:
    """A row of the table. `ratio`: how many times as fast ours is."""
    ratios = [run["seconds"] / our["seconds"] for run, our in zip(runs, ours)]
    return {"name": name, "rate": statistics.median(amount / run["seconds"] for run in runs),
            "ratio": statistics.median(ratios), "ratios": ratios, "seconds": [run["seconds"] for run in runs],
            "cpu_seconds": statistics.median(run["cpu_seconds"] for run in runs),
            "peak_memory": max(run["peak_memory"] for run in runs),
            "peak_memory_of_a_worker": max(run["peak_memory_of_a_worker"] for run in runs),
            "equal": all(run["result"] == ours[0]["result"] for run in runs)}


def alone(one: Contestant, folder: str, arguments: dict) -> dict:
    """One run in a fresh process; what it writes goes with it."""
    with tempfile.TemporaryDirectory(dir=folder) as place:
        home = one.run.__module__
        program = (f"import sys; sys.path[:] = {[HERE, *sys.path]!r}; import benchmarks.race, {home}; "
                   f"benchmarks.race.perform({home}.{one.run.__name__}, {place!r}, **{arguments!r})")
        child = subprocess.run([sys.executable, "-c", program], cwd=place, capture_output=True,
                               encoding="utf-8", errors="replace")
        if child.returncode:
            last = (child.stderr.strip() or f"exit code {child.returncode}").splitlines()[-1]
            raise UserError(f"{one.name} failed: {last}")
        with open(os.path.join(place, "measured.json"), encoding="utf-8") as file:
            return json.load(file)


def perform(run: Callable, place: str, **arguments) -> None:
    """In the fresh process: runs it, and writes what it took to measured.json."""
    out, clock = os.path.join(place, "out"), Clock()
    os.mkdir(out)
    result = run(clock, out, **arguments)
    assert clock.seconds, f"{run.__name__} did not start the clock"
    peak, of_a_worker = peak_memory()
    peak = clock.peak_memory or peak
    with open(os.path.join(place, "measured.json"), "w", encoding="utf-8", newline="\n") as file:
        json.dump({"seconds": clock.seconds, "cpu_seconds": clock.cpu_seconds, "peak_memory": peak,
                   "peak_memory_of_a_worker": of_a_worker, "result": result}, file)


class Clock:
    """
    `with clock:` stands around the work that is timed, or the contestant sets `seconds` itself.
    `cpu_seconds`: of its workers, too. `peak_memory`: bytes, set by a contestant that works on a GPU.
    """
    seconds = cpu_seconds = 0.0
    peak_memory = 0

    def __enter__(self):
        self.began, self.had = time.perf_counter(), sum(os.times()[:4])

    def __exit__(self, *error):
        self.seconds += time.perf_counter() - self.began
        if sys.platform != "win32":            # which does not tell those of the workers
            self.cpu_seconds += sum(os.times()[:4]) - self.had


def peak_memory() -> tuple[int, int]:
    """Bytes: of this process, and of the largest that it started and that has ended; 0 where not known."""
    try:
        import resource                        # not on Windows
    except ImportError:
        return 0, 0
    unit = 1 if sys.platform == "darwin" else 1024
    mine, workers = (resource.getrusage(who).ru_maxrss * unit
                     for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    if os.path.exists("/proc/self/status"):    # Linux counts in what the parent held when it started us
        with open("/proc/self/status", encoding="ascii", errors="replace") as file:
            mine = next((int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM")), mine)
    return mine, workers


# ---- what to say ------------------------------------------------------------------------------------------
def machine() -> dict:
    import launch                              # imports torch, which would count in every contestant's memory
    versions = {}
    for package in ("torch", "numpy", "tiktoken", "tokenizers", "datasets", "transformers", "trl"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            pass
    return {"cpu": cpu_model(), "cores": launch.available_cores(), "system": platform.platform(),
            "python": platform.python_version(), "lignite": config.__version__, "versions": versions,
            "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None}


def cpu_model() -> str:
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    if sys.platform == "darwin":
        command = ["sysctl", "-n", "machdep.cpu.brand_string"]
        return subprocess.run(command, capture_output=True, encoding="utf-8").stdout.strip()
    return platform.processor() or platform.machine()


def show(found: dict) -> str:
    facts = found["machine"]
    load = "" if facts["load"] is None else f", load at the start {facts['load']:.1f}"
    versions = "".join(f", {name} {version}" for name, version in facts["versions"].items())
    lines = [f"{facts['cpu']}, {facts['cores']} cores{load}", f"Python {facts['python']}{versions}"]
    for race in found["races"]:
        if "lines" in race:                    # a table of its own
            lines += ["", race["title"], *race["lines"]]
            continue
        width = max(len(name) for name in [*(row["name"] for row in race["rows"]), *race["left_out"]])
        lines += ["", race["title"],
                  f"{'':{width}}  {race['unit']:>8}  ours / its (smallest to largest)  CPU sec  peak memory"]
        for row in race["rows"]:
            low, high, ours = min(row["ratios"]), max(row["ratios"]), row is race["rows"][0]
            ratio = "" if ours else f"{row['ratio']:10.2f}  ({low:.2f} to {high:.2f})"
            memory = f"{row['peak_memory'] / 1e6:,.0f} MB" if row["peak_memory"] else "not known"
            if row["peak_memory_of_a_worker"]:
                memory += f", a worker {row['peak_memory_of_a_worker'] / 1e6:,.0f} MB"
            cpu = f"{row['cpu_seconds']:.1f}" if row["cpu_seconds"] else ""
            rate = f"{row['rate']:8,.0f}" if row["rate"] >= 100 else f"{row['rate']:8.2f}"
            lines.append(f"{row['name']:{width}}  {rate}  {ratio:32}  {cpu:>7}  {memory}"
                         f"{'' if row['equal'] else ', ITS RESULT IS NOT OURS'}")
        lines += [f"{name:{width}}  left out: {reason}" for name, reason in race["left_out"].items()]
        lines += race.get("notes", [])
    return "\n".join(lines)
