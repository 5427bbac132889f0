"""
Instruction tuning: our sft.py beside trl's SFTTrainer on the same model, records and threads, in fp32 with
AdamW, one epoch. Counted are the tokens of answers, which both train (trl also the line break behind each),
and the time from the first step to the last. Unless --data names others, the records are the docstrings of
the standard library, asked for by the signature.
"""
import ast
import json
import os
import sys
import sysconfig
from pathlib import Path

from benchmarks.race import Contestant, run_race
from config import HERE

PARAMETERS, ROW, RECORDS = 20_000_000, 1024, 500
MICRO, PADDED = 2, 8                   # rows in a step, and records where each is a row; trl's default is 8
TRL = ("trl", "transformers", "datasets", "accelerate")


def races(cfg, folder: str) -> list[dict]:
    import checkpoint
    import instructions
    from data import Rows
    from model import Model, ModelConfig, shape_for
    data = os.path.abspath(cfg.data) if cfg.data else docstrings(os.path.join(folder, "docstrings.jsonl"))
    os.chdir(folder)
    samples = instructions.Samples(instructions.ensure(data, "auto", say=lambda text: None))
    tokenizer = samples.tokenizer()
    shape, _ = shape_for(PARAMETERS, tokenizer.vocab_size)
    cfg_of_model = ModelConfig(vocab_size=-(-tokenizer.vocab_size // 64) * 64, max_position_embeddings=ROW,
                               **shape)
    model = Model(cfg_of_model)
    checkpoint.save_model_dir(model.init_weights(0), tokenizer, "model")
    rows = Rows(samples, ROW, True, True, "truncate", 0.0, 0, lambda text: None)
    used = rows.train.used / (len(rows.train) * ROW)
    work = dict(model=os.path.abspath("model"), data=data)
    rivals = [Contestant("sft.py", ours), Contestant("sft.py without packing", ours_unpacked),
              Contestant("trl's SFTTrainer", trl_padded, TRL),
              Contestant("trl's SFTTrainer, packing", trl_packed, TRL)]
    found = run_race(f"{len(samples):,} records, {rows.train.trained:,} tokens of answers, "
                     f"{PARAMETERS / 1e6:.0f}M parameters, fp32", rivals, cfg, folder, rows.train.trained,
                     "tokens/s", work=work)
    found["notes"] = [f"our rows of {ROW} are {used:.0%} full; in trl, without flash attention, records that "
                      f"share a row see each other"]
    return [found]


def docstrings(path: str) -> str:
    """Questions and answers out of the functions of the standard library."""
    library, records = Path(sysconfig.get_paths()["stdlib"]), []
    for file in sorted(library.rglob("*.py")):
        if {"test", "tests", "site-packages", "lib2to3", "idlelib"} & set(file.parts):
            continue
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and (text := ast.get_docstring(node)):
                call = f"{node.name}({ast.unparse(node.args)})"
                records.append({"question": f"What does {call} of {file.stem} do?", "answer": text})
    with open(path, "w", encoding="utf-8", newline="\n") as out:
        out.writelines(json.dumps(record) + "\n" for record in records[::max(1, len(records) // RECORDS)])
    return path


def ours(clock, out: str, work: dict, packing: bool = True) -> None:
    from sft import finetune
    os.chdir(out)
    finetune(init_from=work["model"], data=work["data"], out_dir="run", sequence_length=ROW,
             micro_batch_size=MICRO if packing else PADDED, packing=packing, optimizer="adamw",
             val_fraction=0.0, epochs=1, device="cpu", eval_interval=None, sample_interval=None,
             save_interval=None)
    lines = [json.loads(line) for line in Path("run/metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    clock.seconds = sum(line["step-time"] for line in lines if "step-time" in line)


def ours_unpacked(clock, out: str, work: dict) -> None:
    return ours(clock, out, work, packing=False)


def trl_padded(clock, out: str, work: dict, packing: bool = False) -> None:
    sys.path[:] = [path for path in sys.path if path != HERE]          # our kernels/ is no package of theirs
    import datasets
    import transformers
    import trl
    with open(work["data"], encoding="utf-8") as file:
        records = [json.loads(line) for line in file]
    pairs = [{"prompt": [{"role": "user", "content": record["question"]}],
              "completion": [{"role": "assistant", "content": record["answer"]}]} for record in records]
    model = transformers.AutoModelForCausalLM.from_pretrained(work["model"], dtype="float32")
    tokenizer = transformers.AutoTokenizer.from_pretrained(work["model"])
    args = trl.SFTConfig(out, num_train_epochs=1, per_device_train_batch_size=MICRO if packing else PADDED,
                         max_length=ROW, packing=packing, gradient_checkpointing=False, bf16=False,
                         use_cpu=True, report_to=[], logging_strategy="no", save_strategy="no",
                         disable_tqdm=True, optim="adamw_torch_fused")
    trainer = trl.SFTTrainer(model, args, train_dataset=datasets.Dataset.from_list(pairs),
                             processing_class=tokenizer)
    with clock:
        trainer.train()


def trl_packed(clock, out: str, work: dict) -> None:
    return trl_padded(clock, out, work, packing=True)
