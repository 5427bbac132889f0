"""
Programs that we did not write (transformers, tokenizers, ...) as judges of ours, in one process of their
own: importing them takes seconds, and this repo's folders (`kernels`, `data`) would shadow packages of
theirs, so the repo is not on that process's path.

    oracle = Oracle()
    oracle.run("import transformers; print(transformers.__version__)", directory)     # -> what it printed
"""
import json
import os
import subprocess
import sys

SERVER = """
import contextlib, io, json, os, sys, traceback, warnings
warnings.filterwarnings("ignore")
answers = os.fdopen(os.dup(1), "w")
for line in sys.stdin:
    request, said = json.loads(line), io.StringIO()
    os.chdir(request["directory"])
    try:
        with contextlib.redirect_stdout(said):
            exec(compile(request["code"], "<oracle>", "exec"), {"__name__": "__oracle__"})
        answer = {"output": said.getvalue()}
    except BaseException:
        answer = {"error": traceback.format_exc()}
    print(json.dumps(answer), file=answers, flush=True)
"""


class Oracle:
    """A Python process without this repo on its path: runs code in a directory, returns what it printed."""
    def __init__(self):
        self.process = None

    def start(self) -> None:
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        environment.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false",
                           TRANSFORMERS_VERBOSITY="error", OMP_NUM_THREADS="1")
        self.process = subprocess.Popen([sys.executable, "-P", "-c", SERVER], stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment,
                                        encoding="utf-8")

    def run(self, code: str, directory) -> str:
        if self.process is None:
            self.start()
        self.process.stdin.write(json.dumps({"code": code, "directory": str(directory)}) + "\n")
        self.process.stdin.flush()
        answer = json.loads(self.process.stdout.readline() or '{"error": "the oracle process died"}')
        if "error" in answer:
            raise AssertionError(answer["error"])
        return answer["output"]

    def stop(self) -> None:
        if self.process is not None:
            self.process.stdin.close()
            self.process.wait(timeout=30)
