"""
Ours against the programs that people use: the same work, on this machine, in one run.

    python bench.py prepare                                  text to token ids; learning a vocabulary
    python bench.py prepare --data=stories.jsonl --workers=8 --rounds=5
    python bench.py prepare --megabytes=1000 --rounds=1 --no-peers      how much memory 1 GB takes
    python bench.py train --nanogpt=../nanoGPT               steps of training, beside a checkout of nanoGPT
    python bench.py train --device=cuda                      124M and 1B parameters in bf16, compiled
    python bench.py learn --data=input.txt                   what a loss costs, in tokens and in seconds
    python bench.py sample                                   tokens that are written, one text and eight
    python bench.py sft                                      instruction tuning, beside trl
    python bench.py prepare --json > numbers.json

A verb is a file in benchmarks/ with its contestants; benchmarks/race.py says how they are timed. The results
must be equal (ids, merges, numbers of tokens); where they are not, the table says so and the exit code is 1.
A peer that is not installed, or that fails, is named and left out.
"""
import importlib
import json
import tempfile
from dataclasses import dataclass
from typing import Literal

import config
from benchmarks.race import machine, show


@dataclass
class Config:
    command: Literal["prepare", "train", "learn", "sample", "sft"] = "prepare"    # what to measure
    rounds: int = 3                            # each contestant runs once in each
    peers: bool = True                         # --no-peers: ours alone
    json: bool = False                         # print the numbers as JSON instead of tables
    # prepare, learn, sft
    data: str | None = None                    # text as prepare.py reads it, sft: records; None = one is made
    # prepare
    text_key: str = "text"                     # of the records in data
    megabytes: float = 40                      # size of the text that is made
    tokenizer: str = "auto"                    # auto = GPT-2's, or a BPE trained on the text without network
    workers: int = 2                           # processes that encode
    # train, sample, learn
    nanogpt: str | None = None                 # a checkout of it; None = a plain loop of the same shape
    device: Literal["cpu", "cuda"] = "cpu"     # where to train and sample
    # train
    steps: int = 10                            # that are timed, after 4 that warm up
    # learn
    plot: str | None = None                    # an image of the losses to write (needs matplotlib)
    # sample
    tokens: int = 500                          # new ones for each text


def main(cfg: Config) -> dict:
    found = {"command": cfg.command, "machine": machine()}
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        found["races"] = importlib.import_module(f"benchmarks.{cfg.command}").races(cfg, folder)
    print(json.dumps(found, indent=1) if cfg.json else show(found))
    if not all(row["equal"] for race in found["races"] for row in race["rows"]):
        raise SystemExit(1)
    return found


if __name__ == "__main__":
    config.run(main, Config)
