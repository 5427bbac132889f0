"""
Teach a model to answer: instruction tuning and fine-tuning, with a loss on what it is to write and no other.

    python sft.py configs/sft.py --init_from=out/20m --data=instructions.jsonl
    python sft.py --init_from=SmolLM2-135M-Instruct --data=chats.jsonl --show=3      look first
    python sft.py --init_from=out/20m --data=chats.jsonl --lora_rank=16              an adapter alone
    python sft.py --merge --out_dir=out/sft                                          adapter + base = a model
    python sft.py --init_from=out/20m --data=notes.jsonl --objective=causal_lm       texts, every token
    python sft.py --params=20M --data=chats.jsonl                                    from scratch
    torchrun --nproc-per-node=8 sft.py configs/sft.py --init_from=out/124m --data=chats.jsonl
    python sample.py --out_dir=out/sft --interactive                                 talk to it

Records say themselves what they are: {"messages": [{"role", "content"}, ...]}, ShareGPT's conversations,
Alpaca's instruction/input/output, prompt/completion, prompt/response, question/answer, or a text. They are
spelled by the model's own chat template; a model without one gets ChatML. Of each answer its content and the
token that ends the turn are trained (mask_input=False trains everything), in every turn. What is dropped or
cut is counted and printed.

Start the same command again and it goes on where it stopped. out_dir holds the latest model as a Hugging
Face directory (with lora_rank the adapter, in peft's format). From Python: finetune(init_from="out/20m",
data="chats.jsonl", ...).
"""
import copy
import shlex
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch.nn.parallel import DistributedDataParallel as DDP

import chat
import checkpoint
import config
import data
import files
import launch
import log
import lora
import memory
import optim
from config import UserError
from instructions import FORMATS
from model import Model, ModelConfig, count_parameters, flops_per_token, generate
from tokenizer import Tokenizer, load_tokenizer


@dataclass
class Config(ModelConfig):
    # what
    params: int | None = 20_000_000        # size of a fresh model: fills the shape fields that nobody set
    sequence_length: int = 1024            # tokens per row; what is longer: see overlong
    data: str = ""                         # records: files, folders, patterns (a,b), or a data set id
    tokenizer: str | object = "auto"       # of a fresh model: "auto" = trained on the records; "gpt2", a path
    out_dir: str | None = None             # None = out/<config name>
    init_from: str | object | None = None  # model directory to train on from; None = from scratch
    resume: bool | str = "auto"            # "auto" = go on where out_dir holds this run; "never"; a path
    seed: int = 1337                       # weights and the order of the data
    # objective
    objective: Literal["sft", "causal_lm"] = "sft"  # causal_lm: all tokens, longer texts go on in other rows
    mask_input: bool = True                # train the answers only, not what is said to the model
    template: str = "auto"                 # "auto" = the model's own, else ChatML; "chatml"; a Jinja file
    format: str | None = None              # what every record is, see instructions.py; None = each says it
    packing: bool = True                   # several records in a row; they do not see each other
    overlong: Literal["truncate", "drop", "error"] = "truncate"  # what to do with records longer than a row
    val_fraction: float = 0.02             # of the records, held out to measure the loss; 0 = none
    show: int = 0                          # print so many records, trained tokens in colour, before training
    # LoRA: train a low-rank adapter of the matrices instead of the weights
    lora_rank: int | None = None           # None = train all weights; 16 is common
    lora_alpha: float | None = None        # the adapter counts alpha / rank; None = 2 x rank
    lora_dropout: float = 0.0              # on what goes into the adapter
    lora_targets: list[str] | None = None  # names of the matrices; None = all of the layers
    merge: bool = False                    # write base and adapter as one model to <out_dir>/merged
    # -- copy: budget --
    # how much: one of tokens, max_steps, epochs; else 20 tokens per parameter (sft.py: one epoch)
    tokens: int | None = None              # positions with a loss, over all replicas
    max_steps: int | None = None           # optimizer steps
    epochs: int | None = None              # passes over the training tokens
    max_epochs: int | None = None          # refuse to repeat the data more often than this; None = any
    max_minutes: float | None = None       # save and stop after this long
    # batch: micro_batch_size x gradient_accumulation x replicas = global_batch_size
    micro_batch_size: int | Literal["auto"] = "auto"  # sequences per device per forward; "auto" = what fits
    global_batch_size: int | None = None   # sequences per optimizer step, all replicas; None = see memory.py
    gradient_accumulation: int | None = None  # forwards per optimizer step; None = what follows
    # -- end --
    # optimizer
    optimizer: Literal["muon", "adamw"] = "adamw"  # muon: costs most where steps are small
    # -- copy: knobs --
    lr: float | None = None                # peak learning rate; None = by the width, see optim.default_lr
    schedule: Literal["linear", "cosine", "wsd", "constant"] = "linear"  # what follows the warm-up
    start_lr: float = 0.0                  # where the warm-up starts
    final_lr: float | None = None          # where the decay ends; None = lr / 10
    warmup_ratio: float = 0.02             # share of the run that warms up
    decay_ratio: float = 0.2               # share of the run that decays, for wsd
    decay_shape: Literal["cosine", "linear"] = "linear"  # of the decay, for wsd
    weight_decay: float = 0.1              # on matrices only
    beta1: float = 0.9                     # AdamW: memory of the gradient
    beta2: float = 0.99                    # AdamW: memory of its square
    adam_eps: float = 1e-8                 # AdamW: added to the root
    grad_clip: float | None = 1.0          # largest norm of the gradient; None = no clip
    # machine
    device: str = "auto"                   # auto = CUDA, MPS, CPU; or cpu, mps, cuda, cuda:1
    dtype: Literal["auto", "fp32", "bf16", "fp16"] = "auto"  # of products; auto = bf16 on a GPU, else fp32
    compile: bool | None = None            # torch.compile each layer; None = on CUDA
    recompute: Literal["none", "attention", "layer"] = "none"  # trade time for memory
    timeout: int = 900                     # seconds until a rank that does not answer ends the job
    # evaluation
    eval_interval: int | None = 250        # steps; also at the end; None = only there
    eval_tokens: int | None = None         # None = all validation tokens; else an evenly spaced subset
    # intervals, in steps
    log_interval: int = 1                  # a line and a record in metrics.jsonl
    sample_interval: int | None = 250      # print what the model writes, also at the end; None = never
    save_interval: int | None = 250        # state to resume; also at the end
    model_interval: int | None = None      # Hugging Face copy in out_dir; None = at every save
    keep_last: int = 3                     # states that are kept
    # watching
    wandb_project: str | None = None       # log to Weights & Biases, if installed
    wandb_entity: str | None = None        # its team
    wandb_name: str | None = None          # its run name
    tensorboard: bool = False              # log to <out_dir>/tensorboard, if installed
    # -- end --


def finetune(**kwargs) -> dict:
    """
    Train as the command line does, with the same names. Returns {"steps", "tokens" (that were trained),
    "losses" (one per log line), "validation_loss", "out_dir"}; raises UserError for what the caller got
    wrong.
    """
    with launch.visiting():                                # leaves the caller's signals as they were
        return main(config.make(Config, kwargs))


def main(cfg: Config) -> dict:
    # ---- what is asked, checked before any device starts --------------------------------------------------
    cfg, place = copy.copy(cfg), launch.environment()
    say = partial(print, flush=True) if place.rank == 0 else (lambda *_: None)
    cfg.out_dir = cfg.out_dir or config.default_out_dir(cfg)
    if cfg.merge and not cfg.data:
        return merge_only(cfg)
    check(cfg)
    if cfg.lora_targets:
        cfg.lora_targets = ",".join(cfg.lora_targets).split(",")           # q_proj,v_proj is two names
    live = checkpoint.name_objects(cfg)                    # objects given from Python; cfg gets their paths
    given = {key: getattr(cfg, key) for key in cfg.given}
    resumed = checkpoint.resume(cfg, say)                  # a checkpoint or None; brings cfg in line with it
    stored = checkpoint.read_json(resumed / "state.json") if resumed else None
    step, samples = (stored["step"], stored["samples"]) if stored else (0, 0)
    # the model to train on, or None; an adapter's state does not hold it
    base = checkpoint.open_base(cfg, None if cfg.lora_rank else resumed, live.get("init_from"))
    if base and not resumed and "sequence_length" not in cfg.given:
        cfg.sequence_length = min(cfg.sequence_length, base.cfg.max_position_embeddings)
    tokenizer = choose_tokenizer(cfg, base, live.get("tokenizer"), say)
    corpus = data.pack_sft(
        cfg.data, tokenizer, cfg.sequence_length, mask_input=cfg.mask_input and cfg.objective == "sft",
        packing=cfg.packing, overlong="split" if cfg.objective == "causal_lm" else cfg.overlong,
        format=cfg.format, val_fraction=cfg.val_fraction, seed=cfg.seed, rank=place.rank, world=place.world,
        say=say)
    if tokenizer == "auto":
        tokenizer = chat.with_chatml(corpus.samples.tokenizer())
    new_ids = settle_shape(cfg, base, tokenizer, say)
    if cfg.lr is None:
        cfg.lr, why = optim.default_lr(cfg.hidden_size, cfg.optimizer, base is None or bool(cfg.lora_rank))
        say(why)
    parameters, before = count_parameters(cfg), stored and stored["batch"]
    # planned again below, when the devices are known; here for what it has to complain about
    length = corpus.samples_for(cfg.tokens) if cfg.tokens else (cfg.epochs or 1) * len(corpus.train)
    plan = partial(memory.plan, cfg, parameters=parameters, stored=before, run_length=length,
                   document_mask=cfg.packing, lora_rank=cfg.lora_rank)
    batch = plan(launch.replicas(cfg), torch.float32, "cpu", 2**62)
    max_steps = cfg.max_steps or step + max(0, -(-(length - samples) // batch.global_batch_size))
    corpus.check(samples + (max_steps - step) * batch.global_batch_size,
                 None if cfg.epochs else cfg.max_epochs)
    if cfg.show and place.rank == 0:
        for number in range(min(cfg.show, len(corpus.samples))):
            say(shown(corpus, number, tokenizer))
    if place.world == 1:
        checkpoint.save_objects(cfg, live)                 # before a child process looks for them
    result = launch.relaunch(__file__, cfg)                # several GPUs, no launcher: torchrun does it
    if result is not None:
        return result

    # ---- devices ------------------------------------------------------------------------------------------
    run = launch.start(cfg)
    run.check_shared(cfg.out_dir)
    lock = run.main and files.hold(cfg.out_dir)            # until this process ends: one run in an out_dir
    if run.main and place.world > 1:
        checkpoint.save_objects(cfg, live)
    smallest = run.all_reduce(memory.device_memory(run.device), op="min")
    batch = plan(run.world, run.dtype, run.device.type, smallest)
    cfg.micro_batch_size, cfg.gradient_accumulation = batch.micro_batch_size, batch.accumulation
    cfg.global_batch_size = batch.global_batch_size
    cfg.compile = run.device.type == "cuda" if cfg.compile is None else cfg.compile

    # ---- model, optimizer, what is resumed ----------------------------------------------------------------
    if base is None:
        base = Model(checkpoint.model_config(cfg)).init_weights(cfg.seed)
    if cfg.lora_rank:
        cfg.lora_alpha = cfg.lora_alpha or 2.0 * cfg.lora_rank
        for linear in lora.projections(base).values() if run.dtype == torch.bfloat16 else ():
            linear.to(run.dtype)                           # what is frozen needs no more digits
        lora.adapt(base, cfg.lora_rank, cfg.lora_alpha, cfg.lora_dropout, cfg.lora_targets, new_ids, cfg.seed)
    model = base.to(run.device).recomputing(cfg.recompute)
    model.tokenizer = tokenizer
    optimizer = optim.Optimizer(model, cfg, run.rank, run.world)
    labels = batch.micro_batch_size * cfg.sequence_length
    scale = optim.LossScale(run.dtype == torch.float16, run.device, labels)
    published = checkpoint.published_step(cfg.out_dir)     # step of the model in out_dir
    evaluation = log.evaluation_at(cfg.out_dir, step) if resumed else {}
    if resumed:
        checkpoint.restore(resumed, model, optimizer, scale, run)
        checkpoint.check_resumed(cfg, stored, stored["corpus"] == corpus.fingerprint, max_steps, run)
    if step >= max_steps:
        run.say(f"the run in {cfg.out_dir} is finished: it has {step} steps, {max_steps} were asked for. "
                f"Give more epochs or tokens to go on, or another out_dir to start a new one")
        if published == step and (evaluation or not corpus.val_tokens):
            return launch.report(run, result_of(cfg, step, samples, corpus, evaluation))
    if run.main:
        checkpoint.open_out_dir(cfg, given)
        tokenizer.save(cfg.out_dir)                        # a state without it could not be resumed
    introduce(cfg, run, corpus, batch, model, max_steps)
    launch.compare_with_cpu(model, torch.arange(64)[None] % tokenizer.vocab_size, run)
    if cfg.compile:
        launch.compile_layers(model.model.layers, run)
    forward = DDP(model, device_ids=run.device_ids, gradient_as_bucket_view=True) \
        if run.world > 1 else model                        # `model` stays plain: its names reach the disk

    # ---- loop ---------------------------------------------------------------------------------------------
    def loss_of(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[micro, 4, T] -> sum of the losses, labels that counted"""
        ids, labels, documents, positions = rows.unbind(1)
        # alone in its row, a record is not seen by what follows it: padding, without labels
        return forward(ids, labels=labels, documents=documents if cfg.packing else None, positions=positions)

    def measure() -> dict:
        return evaluate(loss_of, corpus, batch.micro_batch_size, cfg, run)

    def speak() -> str:
        return sample(model, run, corpus)

    def save() -> int:
        state = {"step": step, "samples": samples, "tokens": corpus.labels_before(samples), "seed": cfg.seed,
                 "updates": step - int(optimizer.skipped),
                 "skipped_in_a_row": int(optimizer.skipped_in_a_row),
                 "fp16_scale": float(scale.value) if scale.enabled else None,
                 "fp16_finite_steps": int(scale.finite_steps), "paths": checkpoint.paths_of(cfg),
                 "world": run.world, "mesh": {"dp": run.world}, "max_steps": max_steps,
                 "batch": {**asdict(batch), "global_batch_size": batch.global_batch_size},
                 "model": asdict(model.cfg), "config": {f.name: getattr(cfg, f.name) for f in fields(cfg)},
                 "given": given, "defaults": {key: getattr(Config(), key) for key in given},
                 "corpus": corpus.fingerprint, "wandb_id": lines.wandb_id, "new_ids": new_ids}
        checkpoint.save_state(cfg.out_dir, model, optimizer, state, run, cfg.keep_last)
        return step

    def publish() -> int:
        if run.main and cfg.lora_rank:
            lora.save_adapter(model, cfg.out_dir, cfg.init_from, step)
            checkpoint.save_tokenizer(tokenizer, cfg.out_dir)
        elif run.main:
            checkpoint.save_model_dir(model, tokenizer, cfg.out_dir, step=step)
        run.barrier()
        return step

    # -- copy: loop --
    def micro_batches(samples: int):
        """This replica's rows from `samples` on, step by step, on their way to the device."""
        for _ in range(step, max_steps):
            for rows in corpus.step(samples, batch.micro_batch_size, batch.accumulation, run.rank, run.world):
                yield run.to_device(rows)
            samples += batch.global_batch_size

    lines = log.Log(cfg, run, max_steps, start_step=step, wandb_id=stored and stored["wandb_id"])
    peak = launch.peak_flops(run)
    if not step and cfg.init_from and cfg.eval_interval:
        lines.evaluation(0, measure())                     # what the weights can do before
    started = began = time.perf_counter()
    logged, saved = step, step if resumed else None
    counted = torch.zeros((), device=run.device)           # labels since the last line of the log
    coming = micro_batches(samples)
    ahead = next(coming, None)
    while step < max_steps and not run.stopping():         # every rank calls this
        lr = optim.lr_at(step, max_steps, cfg)
        totals = torch.zeros(2, device=run.device)         # sum of the losses, labels that counted
        for k in range(batch.accumulation):
            unsynced = forward.no_sync() if run.world > 1 and k < batch.accumulation - 1 else nullcontext()
            with unsynced:                                 # one all-reduce of the gradients per step
                with run.autocast():
                    loss, valid = loss_of(ahead)
                (loss * scale.value).backward()
            totals += torch.stack((loss.detach(), valid.float()))
            ahead = next(coming, None)                     # read while the device works
        samples += batch.global_batch_size
        totals = run.all_reduce(totals)                    # every rank calls this
        counted += totals[1]
        # DDP took the mean over ranks: back to the sum, then per label of the whole step
        norm = optim.finish_gradients(model, run.world / totals[1] / scale.value, cfg.grad_clip)
        optimizer.step(norm, lr)                           # nothing moves when the norm is not finite
        scale.update(norm)
        step += 1
        if log.due(step, cfg.log_interval) or step == max_steps:
            numbers = (totals[0] / totals[1], norm, counted, optimizer.skipped, optimizer.skipped_in_a_row)
            loss, norm, labels, skipped, in_a_row = torch.stack(numbers).tolist()      # host sync here
            seconds, steps = time.perf_counter() - began, step - logged
            flops = flops_per_token(cfg, parameters) * cfg.sequence_length * batch.global_batch_size * steps
            lines.step(step, {"step-time": seconds / steps, "cross-entropy-loss": loss, "learning-rate": lr,
                              "gradient-norm": norm, "tokens-per-second": labels / seconds,
                              **run.peak_memory(), "mfu": peak and flops / seconds / (peak * run.world),
                              "skipped-steps": int(skipped) or None})
            lines.complain(cfg, step, loss, int(in_a_row))
            began, logged = time.perf_counter(), step
            counted.zero_()
        pause = time.perf_counter()
        if step < max_steps:                               # what follows the last step stands below
            if log.due(step, cfg.save_interval) and not optimizer.skipped_in_a_row:
                saved = save()                             # not while the run may be diverging
            if log.due(step, cfg.model_interval or cfg.save_interval) and not optimizer.skipped_in_a_row:
                published = publish()
            if log.due(step, cfg.eval_interval):
                lines.evaluation(step, measure())
            if log.due(step, cfg.sample_interval):
                lines.note(speak())
        began += time.perf_counter() - pause               # saving and evaluating are no training time
        run.stop |= cfg.max_minutes is not None and time.perf_counter() - started > 60 * cfg.max_minutes
    # -- end --

    # ---- finish -------------------------------------------------------------------------------------------
    # -- copy: finish --
    if saved != step:
        save()
    if published != step:
        publish()
    if step >= max_steps:
        evaluation = measure()
        lines.evaluation(step, evaluation)
        if cfg.sample_interval:
            lines.note(speak())
        if not evaluation and corpus.val_tokens:
            run.say("the last evaluation was stopped: the same command makes up for it")
    else:
        run.say(f"stopped at step {step} of {max_steps} and saved: the same command goes on from there")
    if optimizer.skipped:
        run.say(f"warning: {int(optimizer.skipped)} of {step} steps had a gradient that is not finite and "
                f"changed nothing: lower lr={cfg.lr} or warm up longer")
    lines.finish()
    # -- end --
    del forward    # before the group: DDP's destructor would wait for gloo's threads, they for Python's lock
    if cfg.merge and run.main:
        write_merged(model, cfg)
    run.say(f"the {'adapter' if cfg.lora_rank else 'model'} is in {cfg.out_dir}: python sample.py "
            f"--out_dir={shlex.quote(cfg.out_dir)} --interactive")
    return launch.report(run, result_of(cfg, step, samples, corpus, evaluation,
                                        [loss for _, loss in lines.losses]))


def result_of(cfg: Config, step: int, samples: int, corpus: data.Rows, evaluation: dict | None = None,
              losses=()) -> dict:
    return {"steps": step, "tokens": corpus.labels_before(samples), "losses": list(losses),
            "validation_loss": (evaluation or {}).get("validation-loss"), "out_dir": cfg.out_dir}


# ---- before the loop --------------------------------------------------------------------------------------

def check(cfg: Config) -> None:
    """UserError where settings contradict each other."""
    config.check_length(cfg)
    if not cfg.data:
        raise UserError("--data is missing: the records to learn from, as in --data=instructions.jsonl")
    if cfg.format not in (None, *FORMATS):
        raise UserError(f"format={cfg.format} is none of {', '.join(FORMATS)}")
    if cfg.lora_rank and cfg.init_from is None:
        raise UserError("lora_rank adapts the weights of a model: name it by --init_from")
    if cfg.merge and not cfg.lora_rank:
        raise UserError("--merge puts a base and its adapter together: it needs lora_rank, or alone (without "
                        "data) the out_dir of an adapter")
    if not cfg.lora_rank and (extra := [key for key in cfg.given if key.startswith("lora_")
                                        and getattr(cfg, key) is not None]):
        raise UserError(f"{' and '.join(extra)} without lora_rank would change nothing: give --lora_rank=16")
    path = cfg.init_from if isinstance(cfg.init_from, str) else ""
    if cfg.lora_rank and Path(path, "adapter_config.json").exists():
        raise UserError(f"init_from={cfg.init_from} holds an adapter, and an adapter of an adapter would be "
                        f"read by nobody: merge it first (python sft.py --merge --out_dir={cfg.init_from}), "
                        f"then --init_from={cfg.init_from}/merged")


def choose_tokenizer(cfg: Config, base: Model | None, live: Tokenizer | None, say) -> Tokenizer | str:
    """The base's, else the one asked for, with the template asked for; "auto": yet to be trained."""
    tokenizer = base.tokenizer if base else None
    if tokenizer is None:
        tokenizer = live or ("auto" if cfg.tokenizer == "auto" else load_tokenizer(cfg.tokenizer))
        if base and tokenizer == "auto":
            raise UserError(f"init_from={cfg.init_from} has no tokenizer: name its own by --tokenizer")
    if tokenizer == "auto":
        if cfg.template not in ("auto", "chatml"):
            raise UserError(f"template={cfg.template} needs a tokenizer that has its special tokens: give "
                            f"--tokenizer, or --template=chatml")
        return tokenizer
    if not tokenizer.portable:
        raise UserError(f"{tokenizer!r} is an object that cannot be saved with the model: give a "
                        f"tokenizer.json")
    before, tokenizer = tokenizer, copy.copy(tokenizer)
    lacking = tokenizer.chat_template is None and cfg.objective == "sft"
    if cfg.template == "chatml" or (cfg.template == "auto" and lacking):
        tokenizer = chat.with_chatml(tokenizer)
        why = "as asked for" if cfg.template == "chatml" else "as the model has none"
        if before.chat_template != tokenizer.chat_template:
            say(f"chat template: ChatML, {why}")
    elif cfg.template != "auto":
        try:
            template = Path(cfg.template).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"template={cfg.template} is neither auto, chatml nor a readable file: "
                            f"{error}") from None
        tokenizer.chat_template = template
    if cfg.objective == "sft":
        tokenizer.ends |= {chat.end_of_turn(tokenizer)}    # UserError: a template that cannot be followed
    return tokenizer


def settle_shape(cfg: Config, base: Model | None, tokenizer: Tokenizer, say) -> list[int]:
    """Fill the ModelConfig fields of cfg. Returns the ids that the tokenizer has and the base had not."""
    if base is None:
        checkpoint.fresh_shape(cfg, tokenizer.vocab_size, say)
        return []
    had = base.tokenizer.special if base.tokenizer else {}
    new_ids = [id for spelling, id in tokenizer.special.items() if base.tokenizer and spelling not in had]
    if new_ids:
        say(f"new tokens: {', '.join(tokenizer.decode([id]) for id in new_ids)}")
        base.extend_vocabulary(tokenizer.vocab_size, new_ids, used=base.tokenizer.vocab_size)
        if "vocab_size" in cfg.given:                      # what was meant is the base's
            cfg.vocab_size = base.cfg.vocab_size
    checkpoint.inherit_shape(cfg, base, say)
    if tokenizer.vocab_size > cfg.vocab_size:
        raise UserError(f"{tokenizer!r} has more ids than the model's vocab_size={cfg.vocab_size:,}: it is "
                        f"another model's")
    return new_ids


def introduce(cfg: Config, run, corpus: data.Rows, batch, model: Model, max_steps: int) -> None:
    """What is about to happen, in numbers."""
    run.say(config.show(cfg))
    if batch.source:
        run.say(batch.source)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    total = sum(p.numel() for p in model.parameters())
    run.say(f"{total:,} parameters" + (f", {trained:,} of them trained" if trained < total else "")
            + f", {cfg.num_hidden_layers} layers x {cfg.hidden_size} wide | {run.device}, "
            f"{str(run.dtype).removeprefix('torch.')}, {run.world} process{'es' if run.world > 1 else ''}")
    packed, places = corpus.train, len(corpus.train) * cfg.sequence_length
    run.say(f"{len(packed.pieces):,} records in {len(packed):,} rows of {cfg.sequence_length}: "
            f"{packed.trained / places:.1%} of the places are trained, "
            f"{(packed.used - packed.trained) / places:.1%} prompt, {1 - packed.used / places:.1%} padding; "
            f"{len(corpus.val.pieces):,} records ({corpus.val.trained:,} trained tokens) are held out")
    rows = max_steps * batch.global_batch_size
    run.say(f"{max_steps:,} steps x {batch.global_batch_size} rows ({batch.micro_batch_size} x "
            f"{batch.accumulation} x {run.world}) = {corpus.labels_before(rows):,} trained tokens, "
            f"{rows / len(packed):.2f} epochs of {packed.trained:,}")


def shown(corpus: data.Rows, number: int, tokenizer: Tokenizer) -> str:
    """A record as the model meets it: what is trained is green and underlined."""
    ids, trained = corpus.samples.tokens(number)
    if not corpus.mask_input:
        trained[1:] = True
    edges = [0, *(1 + (trained[1:] != trained[:-1]).nonzero()[0]).tolist(), len(ids)]
    text = ""
    for begin, end in zip(edges, edges[1:]):
        part = tokenizer.decode(ids[begin:end].tolist())
        text += f"\033[4;32m{part}\033[0m" if trained[begin] else part
    return f"--- record {number + 1}: {int(trained.sum()):,} of {len(ids):,} tokens are trained ---\n{text}"


# ---- in the loop ------------------------------------------------------------------------------------------

@torch.no_grad()
def evaluate(loss_of, corpus: data.Rows, micro_batch_size: int, cfg: Config, run) -> dict:
    """
    Loss (nats per trained token) over the records that were held out, each once, over all ranks. {} when
    there are none, or when the run is asked to stop meanwhile.
    """
    found = []                                             # (loss, labels) by batch, on the device
    for rows in corpus.evaluation(micro_batch_size, run.rank, run.world, cfg.eval_tokens):
        if run.stopping():                                 # every rank calls this
            return {}
        with run.autocast():
            loss, valid = loss_of(run.to_device(rows))
        found.append(torch.stack((loss, valid.float())))
    if not found:
        return {}
    loss, labels = run.all_reduce(torch.stack(found).cpu().double().sum(0)).tolist()
    part = {"validation-tokens": int(labels)} if labels < corpus.val.trained else {}
    return {"validation-loss": loss / labels, **part}


def sample(model: Model, run, corpus: data.Rows, length: int = 100) -> str:
    """
    The model's own answer to the first record that was held out (else the first of all), always the likeliest
    token. Rank 0 works, the others wait; every rank calls this.
    """
    text = ""
    if run.main:
        packed = corpus.val if len(corpus.val) else corpus.train
        ids, trained = corpus.samples.tokens(int(packed.pieces[0, 0]))
        prompt, answer = ids[:max(1, trained.argmax())].tolist(), []
        known = model.tokenizer.vocab_size
        for (new,) in generate(model, [prompt], length, vocab_size=known, temperature=0):
            if new in model.tokenizer.ends or run.stop_signal:
                break
            answer.append(new)
        asked, said = model.tokenizer.decode(prompt), model.tokenizer.decode(answer)
        text = f"--- sample ---\n{asked[-500:]}[{said}]\n--------------"
    run.barrier()
    return text


# ---- base and adapter as one ------------------------------------------------------------------------------

def merge_only(cfg: Config) -> dict:
    """The adapter in out_dir and its base, as one model in <out_dir>/merged. Trains nothing."""
    if not Path(cfg.out_dir, "adapter_config.json").exists():
        raise UserError(f"{cfg.out_dir} holds no adapter (adapter_config.json): give the out_dir of a run "
                        f"with lora_rank")
    model, tokenizer = checkpoint.load_model_dir(cfg.out_dir)
    path = str(Path(cfg.out_dir, "merged"))
    checkpoint.save_model_dir(model, tokenizer, path)
    print(f"the merged model is in {path}: python sample.py --out_dir={shlex.quote(path)} --interactive")
    return {"out_dir": path}


def write_merged(model: Model, cfg: Config) -> None:
    path = Path(cfg.out_dir, "merged")
    checkpoint.save_model_dir(lora.merge(model), model.tokenizer, path)
    print(f"the merged model is in {path}", flush=True)


if __name__ == "__main__":
    config.run(main, Config)
