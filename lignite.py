"""
Everything from one name, each part loaded when it is first used:

    import lignite
    lignite.train(data="my.jsonl", params="20M", tokens="100M", out_dir="out/mine")
    print(lignite.generate("out/mine", "Once upon a time"))
"""
import importlib

from config import UserError, __version__

HOMES = {"train": "train", "finetune": "sft", "generate": "sample", "stream": "sample",
         "load_model": "sample", "load_tokenizer": "tokenizer"}
__all__ = [*HOMES, "UserError", "__version__"]


def __getattr__(name: str):
    if name not in HOMES:
        raise AttributeError(f"lignite has no {name!r}: it offers {', '.join(__all__)}")
    return getattr(importlib.import_module(HOMES[name]), name)
