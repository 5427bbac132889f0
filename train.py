"""
Pretrain a language model from scratch, or train on from given weights, on one device or many.

    python train.py configs/tiny.py                                  a model in three minutes on a laptop
    torchrun --nproc-per-node=8 train.py configs/20m.py              one process per GPU
    python train.py configs/20m.py --data=my.jsonl --tokens=200M     your text, your budget
    python train.py --init_from=out/20m --data=book.txt --out_dir=out/book
    python train.py --eval_only --init_from=out/20m --data=book.txt

Start the same command again and it goes on where it stopped. out_dir holds the latest model as a Hugging
Face directory, checkpoints/ to resume, metrics.jsonl, and the sources and settings of the run. From Python:
train(data="my.jsonl", ...).
"""
import copy
import math
import shlex
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass, fields
from functools import partial
from typing import Literal

import torch
from torch.nn.parallel import DistributedDataParallel as DDP

import checkpoint
import config
import data
import files
import launch
import log
import memory
import optim
from config import UserError
from model import Model, ModelConfig, count_parameters, flops_per_token, generate
from prepare import ensure
from tokenizer import StreamDecoder, Tokenizer, load_tokenizer


@dataclass
class Config(ModelConfig):
    # what
    params: int | None = 20_000_000        # size of a fresh model: fills the shape fields that nobody set
    sequence_length: int = 512             # tokens per row
    data: str = "stdlib"                   # corpus directory, raw text, or a mix: "fineweb:0.7,code:0.3"
    tokenizer: str | object = "auto"       # for raw text: "auto" = trained on it; "byte", "gpt2", a path
    out_dir: str | None = None             # None = out/<config name>
    init_from: str | object | None = None  # model directory to train on from; None = from scratch
    resume: bool | str = "auto"            # "auto" = go on where out_dir holds this run; "never"; a path
    seed: int = 1337                       # weights and the order of the data
    # objective
    document_mask: bool = False            # tokens see their own document only
    eval_only: bool = False                # evaluate init_from (or out_dir) on data, train nothing
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
    optimizer: Literal["muon", "adamw"] = "muon"  # muon: for the matrices of the layers, adamw for the rest
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


def train(**kwargs) -> dict:
    """
    Train as the command line does, with the same names. Returns {"steps", "tokens", "losses" (one per log
    line), "validation_loss", "bits_per_byte", "out_dir"}; raises UserError for what the caller got wrong.
    """
    with launch.visiting():                                # leaves the caller's signals as they were
        return main(config.make(Config, kwargs))


def main(cfg: Config) -> dict:
    # ---- what is asked, checked before any device starts --------------------------------------------------
    cfg, place = copy.copy(cfg), launch.environment()
    say = partial(print, flush=True) if place.rank == 0 else (lambda *_: None)
    cfg.out_dir = cfg.out_dir or config.default_out_dir(cfg)
    if cfg.eval_only:
        return evaluate_only(cfg, place, say)
    config.check_length(cfg)
    live = checkpoint.name_objects(cfg)                    # objects given from Python; cfg gets their paths
    given = {key: getattr(cfg, key) for key in cfg.given}
    resumed = checkpoint.resume(cfg, say)                  # a checkpoint or None; brings cfg in line with it
    stored = checkpoint.read_json(resumed / "state.json") if resumed else None
    step, samples = (stored["step"], stored["samples"]) if stored else (0, 0)
    base = checkpoint.open_base(cfg, resumed, live.get("init_from"))  # the model to train on, or None
    if base and not resumed and "sequence_length" not in cfg.given:
        cfg.sequence_length = min(cfg.sequence_length, base.cfg.max_position_embeddings)
    opened = partial(open_corpus, cfg, base, live.get("tokenizer"), place, say)
    corpus = opened(None if cfg.epochs else 0)             # of a data set that is streamed only what it needs
    settle_shape(cfg, corpus, base, say)
    if cfg.lr is None:
        cfg.lr, why = optim.default_lr(cfg.hidden_size, cfg.optimizer, fresh=base is None)
        say(why)
    parameters, before = count_parameters(cfg), stored and stored["batch"]
    # planned again below, when the devices are known; here for what it has to complain about
    plan = partial(memory.plan, cfg, parameters=parameters, stored=before, document_mask=cfg.document_mask)
    batch = plan(launch.replicas(cfg), torch.float32, "cpu", 2**62)
    max_steps = steps_of(cfg, step, samples, batch.global_batch_size, corpus, parameters)
    needed = samples + (max_steps - step) * batch.global_batch_size
    if not corpus.complete:
        corpus = opened(needed * cfg.sequence_length)
    # whole steps: a run of n epochs may end a little behind the n-th
    corpus.check(needed, batch.global_batch_size, None if cfg.epochs else cfg.max_epochs, max_steps)
    if place.world == 1:
        if "tokenizer" in live and not live["tokenizer"].portable and launch.processes_to_start(cfg):
            raise UserError("the tokenizer is an object that cannot be saved, and the processes of several "
                            "GPUs cannot share it: give device=\"cuda:0\", or a tokenizer.json")
        checkpoint.save_objects(cfg, live)                 # before a child process looks for them
    result = launch.relaunch(__file__, cfg)                # several GPUs, no launcher: torchrun does it
    if result is not None:
        return result

    # ---- devices ------------------------------------------------------------------------------------------
    run = launch.start(cfg)
    run.check_shared(cfg.out_dir)
    lock = run.main and files.hold(cfg.out_dir)           # until this process ends: one run in an out_dir
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
    model = base.to(run.device).recomputing(cfg.recompute)
    model.tokenizer = model.tokenizer or corpus.tokenizer or \
        named_tokenizer(cfg, corpus, live.get("tokenizer"))
    optimizer = optim.Optimizer(model, cfg, run.rank, run.world)
    labels = batch.micro_batch_size * cfg.sequence_length
    scale = optim.LossScale(run.dtype == torch.float16, run.device, labels)
    published = checkpoint.published_step(cfg.out_dir)     # step of the model in out_dir
    evaluation = log.evaluation_at(cfg.out_dir, step) if resumed else {}
    if resumed:
        checkpoint.restore(resumed, model, optimizer, scale, run)
        checkpoint.check_resumed(cfg, stored, corpus.continues(stored["corpus"]), max_steps, run)
    if step >= max_steps:
        length = next((key for key in config.LENGTHS if getattr(cfg, key) is not None), "tokens")
        run.say(f"the run in {cfg.out_dir} is finished: it has {step} steps, {max_steps} were asked for. "
                f"Give more {length} to go on, or another out_dir to start a new one")
        if published == step and (evaluation or not corpus.val_tokens):
            return launch.report(run, result_of(cfg, step, samples, evaluation))
    if run.main:
        checkpoint.open_out_dir(cfg, given)
    introduce(cfg, run, corpus, batch, parameters, max_steps)
    launch.compare_with_cpu(model, torch.arange(64)[None] % corpus.vocab_size, run)
    if cfg.compile:
        launch.compile_layers(model.model.layers, run)
    forward = DDP(model, device_ids=run.device_ids, gradient_as_bucket_view=True) \
        if run.world > 1 else model                        # `model` stays plain: its names reach the disk

    # ---- loop ---------------------------------------------------------------------------------------------
    def loss_of(ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[micro, T+1] -> sum of the losses, labels that counted"""
        inputs, labels = ids[:, :-1], ids[:, 1:]
        return forward(inputs, labels=labels, documents=documents_of(inputs, cfg, corpus))

    def measure() -> dict:
        return evaluate(forward, corpus, batch.micro_batch_size, cfg, run)

    def speak() -> str:
        return sample(model, run) if model.tokenizer else ""

    def save() -> int:
        state = {"step": step, "samples": samples, "tokens": samples * cfg.sequence_length, "seed": cfg.seed,
                 "updates": step - int(optimizer.skipped),
                 "skipped_in_a_row": int(optimizer.skipped_in_a_row),
                 "fp16_scale": float(scale.value) if scale.enabled else None,
                 "fp16_finite_steps": int(scale.finite_steps), "paths": checkpoint.paths_of(cfg),
                 "world": run.world, "mesh": {"dp": run.world}, "max_steps": max_steps,
                 "batch": {**asdict(batch), "global_batch_size": batch.global_batch_size},
                 "model": asdict(model.cfg), "config": {f.name: getattr(cfg, f.name) for f in fields(cfg)},
                 "given": given, "defaults": {key: getattr(Config(), key) for key in given},
                 "corpus": corpus.fingerprint, "wandb_id": lines.wandb_id}
        checkpoint.save_state(cfg.out_dir, model, optimizer, state, run, cfg.keep_last)
        return step

    def publish() -> int:
        if run.main:
            checkpoint.save_model_dir(model, model.tokenizer, cfg.out_dir, step=step)
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
    hint = "it has no tokenizer, as its data carry none (--tokenizer names one)" if not model.tokenizer else \
        f"python sample.py --out_dir={shlex.quote(cfg.out_dir)}" if model.tokenizer.portable else \
        "its tokenizer is an object that cannot be saved: sampling needs tokenizer=, from Python"
    run.say(f"the model is in {cfg.out_dir}: {hint}")
    return launch.report(run, result_of(cfg, step, samples, evaluation, [loss for _, loss in lines.losses]))


def result_of(cfg: Config, step: int, samples: int, evaluation: dict | None = None, losses=()) -> dict:
    found = evaluation or {}
    return {"steps": step, "tokens": samples * cfg.sequence_length, "losses": list(losses),
            "validation_loss": found.get("validation-loss"), "bits_per_byte": found.get("bits-per-byte"),
            "out_dir": cfg.out_dir}


# ---- before the loop --------------------------------------------------------------------------------------

def open_corpus(cfg: Config, base: Model | None, live, place, say, tokens: int | None) -> data.Corpus:
    """
    The corpus of cfg.data, which is prepared first where it is raw text: with the tokenizer of the weights
    that the run starts from, else with the one asked for. Of a data set that is streamed, so much that the
    run can train on `tokens` tokens (None: all of it).
    """
    tokenizer = live or cfg.tokenizer
    if cfg.init_from:
        tokenizer = base.tokenizer or (None if cfg.tokenizer == "auto" else cfg.tokenizer)
    if tokens and len(data.mix_of(cfg.data)) > 1:          # the last block of samples is drawn unevenly
        tokens += data.BLOCK * cfg.sequence_length
    tokens = tokens and tokens + 1                         # a window has one more than it trains
    source = ensure(cfg.data, tokenizer, rank=place.rank, world=place.world, say=say, tokens=tokens)
    return data.open_corpus(source, cfg.sequence_length, cfg.seed)


def named_tokenizer(cfg: Config, corpus, live) -> Tokenizer | None:
    """
    The tokenizer that the user gives for data that do not carry theirs: bare train.bin and val.bin, and what
    was made with a Python object.
    """
    if cfg.tokenizer == "auto":
        return None
    tokenizer = live or load_tokenizer(cfg.tokenizer)
    made = {source.tokenizer_fingerprint for source in corpus.sources} - {None, tokenizer.fingerprint}
    if made:
        raise UserError(f"data={cfg.data} was made with another tokenizer than the one given: prepare it "
                        f"again with that one")
    if corpus.vocab_size > tokenizer.vocab_size:
        raise UserError(f"data={cfg.data} holds ids up to {corpus.vocab_size - 1:,}, "
                        f"tokenizer={cfg.tokenizer} has only {tokenizer.vocab_size:,}: it was made with "
                        f"another one")
    return tokenizer


def settle_shape(cfg: Config, corpus, base: Model | None, say) -> None:
    """
    Fill the ModelConfig fields of cfg: from the base, or from `params` and the vocabulary. UserError where
    data do not fit.
    """
    if base is None:
        checkpoint.fresh_shape(cfg, corpus.vocab_size, say)
    else:
        checkpoint.inherit_shape(cfg, base, say)
        if base.tokenizer and corpus.tokenizer and not base.tokenizer.contains(corpus.tokenizer):
            raise UserError(f"data={cfg.data} was prepared with another tokenizer than the model's: prepare "
                            f"it again with --tokenizer={cfg.init_from or cfg.out_dir}")
    if corpus.vocab_size > cfg.vocab_size:
        raise UserError(f"data={cfg.data} holds ids up to {corpus.vocab_size - 1}, the model has "
                        f"vocab_size={cfg.vocab_size}")
    if cfg.document_mask and corpus.eos_id is None:
        raise UserError(f"document_mask needs the id that ends a document, which data={cfg.data} does not "
                        f"state: prepare it with prepare.py")


def steps_of(cfg: Config, step: int, samples: int, batch_size: int, corpus, parameters: int) -> int:
    """The last step of a run that has done `step` steps on `samples` sequences, from the length given."""
    if cfg.max_steps is not None:
        return cfg.max_steps
    if cfg.epochs is not None:
        return step + max(0, -(-(cfg.epochs * corpus.windows - samples) // batch_size))
    wanted = -(-(cfg.tokens or 20 * parameters) // cfg.sequence_length)        # sequences
    return step + max(0, -(-(wanted - samples) // batch_size))


def introduce(cfg: Config, run, corpus, batch, parameters: int, max_steps: int) -> None:
    """What is about to happen, in numbers."""
    run.say(config.show(cfg))
    if batch.source:
        run.say(batch.source)
    tokens = max_steps * batch.global_batch_size * cfg.sequence_length
    epochs = max_steps * batch.global_batch_size / corpus.windows
    run.say(f"{parameters:,} parameters, {cfg.num_hidden_layers} layers x {cfg.hidden_size} wide | "
            f"{run.device}, {str(run.dtype).removeprefix('torch.')}, {run.world} "
            f"process{'es' if run.world > 1 else ''}")
    run.say(f"{max_steps:,} steps x {batch.global_batch_size} sequences ({batch.micro_batch_size} x "
            f"{batch.accumulation} x {run.world}) x {cfg.sequence_length} tokens = {tokens:,} tokens, "
            f"{epochs:.2f} epochs of {corpus.train_tokens:,}; {corpus.val_tokens:,} for validation")
    if batch.global_batch_size > corpus.windows:
        run.say(f"warning: global_batch_size={batch.global_batch_size} counts sequences of "
                f"{cfg.sequence_length} tokens, and the data have {corpus.windows:,}: every step repeats "
                f"them")
    elif epochs > 10:
        run.say(f"warning: the run goes over the same text {epochs:.0f} times; after about 10 it learns "
                f"it by heart: more data, or a shorter run (--epochs=5)")
    run.say(f"a model that knows nothing has loss ln(V) = {math.log(cfg.vocab_size):.4f}, one that knows "
            f"how often each token occurs {corpus.unigram_entropy():.4f}")


# ---- in the loop ------------------------------------------------------------------------------------------

def documents_of(ids: torch.Tensor, cfg: Config, corpus) -> torch.Tensor | None:
    return data.documents(ids, corpus.eos_id) if cfg.document_mask else None


def evaluate(forward, corpus, micro_batch_size: int, cfg: Config, run) -> dict:
    """
    Loss (nats per token) and bits per byte of text over the validation tokens, each once, over all ranks. {}
    when there are none, or when the run is asked to stop meanwhile. Bits per byte = summed loss / ln 2 /
    UTF-8 bytes of the labels.
    """
    lengths = corpus.tokenizer and torch.as_tensor(corpus.tokenizer.token_lengths).to(run.device)
    found = []                                             # (loss, labels, bytes) by batch, on the device
    for ids, labels in corpus.evaluation(micro_batch_size, run.rank, run.world, cfg.eval_tokens):
        if run.stopping():                                 # every rank calls this
            return {}
        ids, labels = run.to_device(ids), run.to_device(labels)
        with run.autocast():
            loss, valid = forward(ids, labels=labels, documents=documents_of(ids, cfg, corpus))
        size = valid * 0 if lengths is None else (lengths[labels.clamp(min=0)] * (labels != -100)).sum()
        found.append(torch.stack((loss, valid.float(), size.float())))
    if not found:
        return {}
    loss, labels, size = run.all_reduce(torch.stack(found).cpu().double().sum(0)).tolist()
    part = {"validation-tokens": int(labels)} if labels < corpus.val_tokens - len(corpus.sources) else {}
    bits = {"bits-per-byte": loss / math.log(2) / size} if size else {}
    return {"validation-loss": loss / labels, **bits, **part}


def sample(model: Model, run, length: int = 100) -> str:
    """
    What the model writes from the start of a document. Rank 0 works, the others wait; every rank calls this.
    """
    text = ""
    if run.main:
        end, decoder = model.tokenizer.eos_id, StreamDecoder(model.tokenizer)
        generator = torch.Generator(run.device).manual_seed(0)
        known = model.tokenizer.vocab_size
        for (new,) in generate(model, [[end]], length, vocab_size=known, generator=generator):
            if new == end or run.stop_signal:
                break
            text += decoder.push(new)
        text = f"--- sample ---\n{text}{decoder.finish()}\n--------------"
    run.barrier()
    return text


# ---- evaluation alone -------------------------------------------------------------------------------------

def evaluate_only(cfg: Config, place, say) -> dict:
    """Loss and bits per byte of a model on the validation split of `data`. Writes nothing."""
    live = cfg.init_from if isinstance(cfg.init_from, Model) else None
    cfg.init_from = cfg.out_dir if cfg.init_from is None else "a live model" if live else cfg.init_from
    model = checkpoint.open_base(cfg, None, live)
    if "sequence_length" not in cfg.given:
        cfg.sequence_length = min(cfg.sequence_length, model.cfg.max_position_embeddings)
    corpus = open_corpus(cfg, model, None, place, say, 100 * (cfg.eval_tokens or 1_000_000))
    settle_shape(cfg, corpus, model, say)
    if not corpus.val_tokens:
        raise UserError(f"data={cfg.data} has no validation tokens: prepare it with a val_fraction above 0")
    corpus.check(0, 1)
    run = launch.start(cfg)
    auto = max(1, memory.CPU_TOKENS // cfg.sequence_length)
    micro = auto if cfg.micro_batch_size == "auto" else cfg.micro_batch_size
    found = evaluate(model.to(run.device), corpus, micro, cfg, run)
    numbers = " | ".join(f"{key} {value:,.4f}" for key, value in found.items()) or "stopped before the end"
    run.say(f"{cfg.init_from} on {cfg.data}: {numbers}")
    return launch.report(run, result_of(cfg, 0, 0, found))


if __name__ == "__main__":
    config.run(main, Config)
