"""
What reaches the disk. Two things, never confused:

the model   a Hugging Face directory: config.json, generation_config.json, model.safetensors (or shards),
            tokenizer files. out_dir always holds the latest one.         save_model_dir, load_model_dir
the state   everything needed to go on, in <out_dir>/checkpoints/<8-digit step>/, for any number of processes:
            state.json, shards.json (global name -> shape, dtype, pieces), model-*.safetensors,
            optim-*.safetensors, rng-*.safetensors and, written last, `complete` (the size of every file).
            save_state, resume, restore

Files are written beside their name, flushed and renamed, so that a kill at any byte leaves what was there
before.
"""
import copy
import dataclasses
import glob
import hashlib
import os
import shutil
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

import config
import lora
import tokenizer as tokenizers
from config import UserError
from files import flush, open_tensors, read_json, read_tensors, write_json, write_tensors
from model import Model, ModelConfig, shape_for

VERSION = 1                    # of the state's format
ARCHITECTURES = {"qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"}
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
SHAPE = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
         "intermediate_size")
PLAIN = ("float32", "float16", "bfloat16")             # dtypes of weights


# ---- the model's config, ours <-> Hugging Face's ----------------------------------------------------------

def config_to_hf(cfg: ModelConfig, tokenizer=None, dtype: torch.dtype = torch.float32) -> dict:
    """config.json as transformers 4 and 5, vLLM and llama.cpp read it (both spellings where they differ)."""
    shape = dataclasses.asdict(cfg) if type(cfg) is ModelConfig else dataclasses.asdict(model_config(cfg))
    kind = "full_attention" if cfg.sliding_window is None else "sliding_attention"
    layer_types = shape["layer_types"] or [kind] * cfg.num_hidden_layers
    scaling = cfg.rope_scaling or {}
    kind_of_rope = scaling.get("rope_type", scaling.get("type", "default"))
    rope = {**scaling, "rope_type": kind_of_rope, "rope_theta": cfg.rope_theta}
    name = str(dtype).removeprefix("torch.")
    out = {"architectures": [ARCHITECTURES[cfg.model_type]], **shape, "hidden_act": "silu",
           "rope_parameters": rope, "attention_dropout": 0.0, "use_cache": True, "dtype": name,
           "torch_dtype": name}
    if cfg.model_type == "qwen3":
        out.update(layer_types=layer_types, use_sliding_window=cfg.sliding_window is not None)
        out.update(max_window_layers=0 if out["use_sliding_window"] else cfg.num_hidden_layers)
        del out["mlp_bias"]
    else:
        del out["layer_types"], out["sliding_window"]
    for key in TOKENS:
        out[key] = getattr(tokenizer, key.replace("_token", ""), None)
    return out


DEFAULTS = {"qwen3": {"num_key_value_heads": 32, "head_dim": 128, "max_position_embeddings": 32768},
            "llama": {"max_position_embeddings": 2048}}        # transformers', where a config.json is silent
ONLY = {"hidden_act": "silu", "quantization_config": None, "partial_rotary_factor": 1.0}


def config_from_hf(hf: dict, where: str) -> ModelConfig:
    """ModelConfig of a config.json; UserError for what model.py does not compute."""
    family = hf.get("model_type")
    if family not in ARCHITECTURES:
        raise UserError(f"{where}: model_type={family!r} is not a family of model.py: use one of "
                        f"{list(ARCHITECTURES)}")
    for key, value in ONLY.items():
        if hf.get(key) not in (None, value):
            raise UserError(f"{where}: {key}={hf[key]!r}; model.py computes {key}={value} only")
    needed = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    missing = [key for key in needed if not isinstance(hf.get(key), int)]
    if missing:
        raise UserError(f"{where} lacks a number for {', '.join(missing)}")
    heads = hf["num_attention_heads"]
    values = {"num_key_value_heads": heads, "head_dim": hf["hidden_size"] // heads,
              "tie_word_embeddings": False, **DEFAULTS[family]}
    ours = [f.name for f in dataclasses.fields(ModelConfig)]
    values.update({key: hf[key] for key in ours if hf.get(key) is not None})
    values["rope_theta"], values["rope_scaling"] = rope_from_hf(hf, where)
    values.update(sliding_from_hf(hf, family))
    try:
        return config.make(ModelConfig, values)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None


def rope_from_hf(hf: dict, where: str) -> tuple[float, dict | None]:
    """(rope_theta, rope_scaling): transformers 5 writes rope_parameters, 4 wrote the two keys apart."""
    new, old = hf.get("rope_parameters") or {}, hf.get("rope_scaling") or {}
    one = isinstance(new, dict) and isinstance(old, dict)
    if not one or any(isinstance(value, dict) for value in new.values()):
        raise UserError(f"{where}: rope_parameters={new or old!r}; model.py knows one dict for all layers")
    theta = new.get("rope_theta", old.get("rope_theta", hf.get("rope_theta", 10000.0)))
    scaling = {key: value for key, value in (new or old).items() if key != "rope_theta"}
    if scaling.get("rope_type", scaling.get("type", "default")) == "default":
        return float(theta), None
    if hf.get("original_max_position_embeddings"):
        scaling["original_max_position_embeddings"] = hf["original_max_position_embeddings"]
    return float(theta), scaling


def sliding_from_hf(hf: dict, family: str) -> dict:
    """sliding_window and layer_types, both None where every layer sees everything."""
    layers = hf["num_hidden_layers"]
    window = hf.get("sliding_window", 4096) if family == "qwen3" and hf.get("use_sliding_window") else None
    first = hf.get("max_window_layers", 28)
    by_depth = [("sliding" if i >= first else "full") + "_attention" for i in range(layers)]
    kinds = hf.get("layer_types") or by_depth
    if window is None or set(kinds) == {"full_attention"}:
        return {"sliding_window": None, "layer_types": None}
    return {"sliding_window": window, "layer_types": kinds}


def model_config(cfg) -> ModelConfig:
    """Only the ModelConfig part of a script's Config."""
    return ModelConfig(**{f.name: getattr(cfg, f.name) for f in dataclasses.fields(ModelConfig)})


# ---- the model: a Hugging Face directory ------------------------------------------------------------------

def save_model_dir(model: Model, tokenizer, path: str | Path, dtype: torch.dtype | None = None,
                   shard_size: int | None = None, step: int | None = None) -> None:
    """
    Write `model` as a directory that transformers opens: one weight file, or files of at most `shard_size`
    bytes and an index. dtype None keeps the parameters' own. Every weight file carries `step`. Files are
    replaced one by one, the tokenizer and the config first. UserError where the disk refuses.
    """
    path = Path(path)
    try:
        write_model(model, tokenizer, path, dtype, shard_size, step)
    except OSError as error:
        raise UserError(f"the model could not be saved to {path}: {error}; what was there before is "
                        f"intact: make room, then save it again") from None


def write_model(model: Model, tokenizer, path: Path, dtype: torch.dtype | None, shard_size: int | None,
                step: int | None) -> None:
    path.mkdir(parents=True, exist_ok=True)
    tensors = {name: p.detach().to(dtype or p.dtype) for name, p in model.state_dict().items()}
    if tokenizer is not None:
        save_tokenizer(tokenizer, path)
    content = config_to_hf(model.cfg, tokenizer, next(iter(tensors.values())).dtype)
    if not (path / "config.json").exists() or read_json(path / "config.json") != content:
        write_json(path / "config.json", content)
    metadata = {"format": "pt", **({} if step is None else {"step": str(step)})}
    shards = split_by_size(tensors, shard_size)
    names = ["model.safetensors"] if len(shards) == 1 else \
        [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    for name, shard in zip(names, shards):
        write_tensors(path / name, shard, metadata)
    index = path / "model.safetensors.index.json"
    if len(shards) > 1:
        total = sum(t.nbytes for t in tensors.values())
        write_json(index, {"metadata": {"total_size": total, **metadata},
                           "weight_map": {k: name for name, shard in zip(names, shards) for k in shard}})
    elif index.exists():
        index.unlink()
    for stale in set(path.glob("model*.safetensors")) - {path / name for name in names}:
        stale.unlink()
    flush(path)


def save_tokenizer(tokenizer, path: str | Path) -> None:
    """The tokenizer's files, and generation_config.json, which names all ids that end a text."""
    path = Path(path)
    tokenizer.save(path)
    generation = {"do_sample": True, "temperature": 0.8}
    for key in TOKENS:
        if (id := getattr(tokenizer, key.replace("_token", ""))) is not None:
            generation[key] = id
    if len(tokenizer.ends) > 1:
        generation["eos_token_id"] = sorted(tokenizer.ends, key=lambda id: (id != tokenizer.eos_id, id))
    write_json(path / "generation_config.json", generation)


def published_step(out_dir: str | Path) -> int | None:
    """The step of the model, or the adapter, in out_dir; None when there is none, or a half-written one."""
    path = Path(out_dir)
    files, fault = weight_files(path)
    if (path / "adapter_config.json").exists() and (path / "adapter_model.safetensors").exists():
        files = ["adapter_model.safetensors"]
    elif fault or not files or not (path / "config.json").exists():
        return None
    try:
        with open_tensors(path / files[0]) as f:
            return int((f.metadata() or {}).get("step", -1))
    except UserError:
        return None


def split_by_size(tensors: dict[str, Tensor], limit: int | None) -> list[dict[str, Tensor]]:
    shards, size = [{}], 0
    for name, t in tensors.items():
        if limit is not None and shards[-1] and size + t.nbytes > limit:
            shards.append({})
            size = 0
        shards[-1][name] = t
        size += t.nbytes
    return shards


def load_model_dir(path: str | Path, device: str | torch.device = "cpu",
                   dtype: torch.dtype | None = None) -> tuple[Model, "tokenizers.Tokenizer | None"]:
    """
    (model, tokenizer) of a Hugging Face directory, an out_dir, one of its checkpoints, or a LoRA adapter:
    its base with the adapter in the weights. dtype None = as stored; the tokenizer is None when the directory
    has none. UserError, with the names, for missing or unexpected weights. While another process replaces the
    files one by one, this waits, then takes the newest complete state beside them.
    """
    path = Path(path)
    if not path.is_dir():
        raise UserError(f"{path} is not a directory: give a model directory (config.json and "
                        f"model.safetensors), an out_dir or a checkpoint of it")
    if (path / "state.json").exists():
        return load_from_state(path, device, dtype)
    if (path / "adapter_config.json").exists() and not weight_files(path)[0]:
        return with_adapter(*load_model_dir(base_of(path), device, dtype), path)
    for attempt in range(20):
        files, torn = weight_files(path)
        if not torn:
            break
        newest = newest_state(path)[0]
        if newest and (attempt == 19 or not files):
            return load_from_state(newest, device, dtype)
        if not newest and not files:
            raise UserError(f"{path} holds no model: {torn}")
        time.sleep(0.5)
    else:
        raise UserError(f"{path} is half written: {torn}; save it again, or load one of its checkpoints")
    if not (path / "config.json").exists():
        raise UserError(f"{path} has weights but no config.json: copy it from where the weights come from")
    cfg = config_from_hf(read_json(path / "config.json"), str(path / "config.json"))
    tensors = {}
    for file in files:
        tensors.update(read_tensors(path / file, device))
    return build(cfg, tensors, dtype, str(path), device), tokenizer_of(path)


def base_of(path: Path) -> Path:
    """The directory of the model that an adapter was trained on; UserError where it is not found."""
    name = read_json(path / "adapter_config.json").get("base_model_name_or_path") or ""
    places = [Path(name), path / name]
    found = [place for place in places if name and place.is_dir() and not place.samefile(path)]
    if not found:
        raise UserError(f"{path} is an adapter of {name!r}, and neither {places[0]} nor {places[1]} is a "
                        f"directory with that model: put it there, or correct base_model_name_or_path in "
                        f"adapter_config.json")
    return found[0]


def with_adapter(model: Model, tokenizer, path: str | Path) -> tuple[Model, "tokenizers.Tokenizer | None"]:
    """(model, tokenizer) with a LoRA adapter in the weights, and its tokenizer where it brings one."""
    own = tokenizer_of(Path(path))
    if own is not None:
        model.extend_vocabulary(own.vocab_size, (), used=(tokenizer or own).vocab_size)
    return lora.merge(lora.load_adapter(model, path)), own or tokenizer


def weight_files(path: Path) -> tuple[list[str], str]:
    """The weight files of a model directory, and what is wrong with them ("" if nothing)."""
    index = path / "model.safetensors.index.json"
    if (path / "model.safetensors").exists() and not index.exists():
        return ["model.safetensors"], ""
    if not index.exists():
        other = glob.glob(str(path / "*.bin")) + glob.glob(str(path / "*.pt"))
        hint = f" (only {os.path.basename(other[0])}: convert it to safetensors first)" if other else ""
        return [], "there is no model.safetensors" + hint
    content = read_json(index)
    files = sorted(set(content.get("weight_map", {}).values()))
    missing = [f for f in files if not (path / f).exists()]
    if missing:
        return files, f"{', '.join(missing)} named in the index is missing"
    steps = {content.get("metadata", {}).get("step")}
    for file in files:
        with open_tensors(path / file) as f:
            steps.add((f.metadata() or {}).get("step"))
    return files, "" if len(steps) == 1 else f"its files are of different steps: {sorted(map(str, steps))}"


def build(cfg: ModelConfig, tensors: dict[str, Tensor], dtype: torch.dtype | None, where: str,
          device: str | torch.device = "cpu") -> Model:
    """A Model that holds `tensors`; every name and shape must agree."""
    tensors = {name: t for name, t in tensors.items() if not name.endswith("rotary_emb.inv_freq")}
    with torch.device("meta"):
        model = Model(cfg)
    wanted = model.state_dict()
    if cfg.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    listed = {"missing": sorted(set(wanted) - set(tensors)),
              "unexpected": sorted(set(tensors) - set(wanted)),
              "of another shape": [f"{n} {list(tensors[n].shape)} (config.json says {list(wanted[n].shape)})"
                                   for n in wanted if n in tensors and wanted[n].shape != tensors[n].shape]}
    strange = sorted({str(t.dtype).removeprefix("torch.") for t in tensors.values()} - set(PLAIN))
    if strange:
        raise UserError(f"the weights of {where} are {', '.join(strange)}; model.py reads {', '.join(PLAIN)} "
                        f"(quantized weights have to be turned back first)")
    faults = [f"{len(names)} {what}: {', '.join(names[:4])}{', ...' if len(names) > 4 else ''}"
              for what, names in listed.items() if names]
    if faults:
        raise UserError(f"the weights of {where} do not fit its config.json: {'; '.join(faults)}")
    model.load_state_dict({n: t.to(dtype or t.dtype) for n, t in tensors.items()}, assign=True)
    return model


def tokenizer_of(path: Path):
    return tokenizers.load_tokenizer(path) if (path / "tokenizer.json").exists() else None


# ---- the state: writing -----------------------------------------------------------------------------------

def save_state(out_dir: str | Path, model: Model, optimizer, state: dict, run, keep_last: int) -> Path:
    """
    Write <out_dir>/checkpoints/<step>: every rank calls this, rank 0 writes. `state` is state.json's content
    ("step" and the counters in it). Older complete states beyond the newest `keep_last` are removed
    afterwards.
    """
    generators = gather_generators(run)
    final = Path(out_dir) / "checkpoints" / f"{state['step']:08d}"
    if run.main:
        partial = final.with_name(f".tmp-{final.name}")
        for stale in final.parent.glob(".tmp-*"):      # of a save that was killed
            shutil.rmtree(stale)
        try:
            write_state(partial, final, model, optimizer, state, generators)
            complete = sorted(p for p in final.parent.glob("[0-9]" * 8) if (p / "complete").exists())
            for old in complete[:-keep_last]:
                shutil.rmtree(old)
        except OSError as error:
            shutil.rmtree(partial, ignore_errors=True)
            raise UserError(f"the state of step {state['step']} could not be saved to {final.parent}: "
                            f"{error}; what was saved before is intact: make room, then start again to "
                            f"resume") from None
    run.barrier()
    return final


def write_state(partial: Path, final: Path, model: Model, optimizer, state: dict, generators: list) -> None:
    """Write everything into `partial`, then make it `final` in one rename."""
    partial.mkdir(parents=True)
    metadata = {"format": "pt", "step": str(state["step"])}
    shards = {}
    for kind, tensors in (("model", lora.trained(model)), ("optim", optimizer.moments())):
        file = f"{kind}-00000-of-00001.safetensors"
        tensors = {f"{kind}.{name}": t for name, t in tensors.items()}
        write_tensors(partial / file, tensors, metadata)
        for name, t in tensors.items():
            shards[name] = {"shape": list(t.shape), "dtype": str(t.dtype).removeprefix("torch."),
                            "pieces": [{"file": file, "key": name, "offset": [0] * t.ndim,
                                        "length": list(t.shape)}]}
    for rank, tensors in enumerate(generators):
        write_tensors(partial / f"rng-{rank:05d}.safetensors", tensors, metadata)
    write_json(partial / "shards.json", shards)
    write_json(partial / "state.json", {"version": VERSION, **state})
    write_json(partial / "complete", {p.name: p.stat().st_size for p in sorted(partial.iterdir())})
    flush(partial)
    if final.exists():                             # the same step again
        shutil.rmtree(final)
    os.replace(partial, final)
    flush(final.parent)


def gather_generators(run) -> list[dict[str, Tensor]]:
    """The random generators' states of every rank, by rank; every rank calls this."""
    mine = {"cpu": torch.get_rng_state()}
    if run.device.type == "cuda":
        mine["cuda"] = torch.cuda.get_rng_state(run.device)
    if run.world == 1:
        return [mine]
    everyone = {key: [torch.empty_like(t) for _ in range(run.world)] for key, t in mine.items()}
    for key, t in mine.items():
        dist.all_gather(everyone[key], t)          # CPU tensors: over gloo on every machine
    return [{key: everyone[key][rank] for key in mine} for rank in range(run.world)]


# ---- the state: reading -----------------------------------------------------------------------------------

def fault_of(path: Path) -> str:
    """Why a directory is not a complete state; "" when it is one."""
    if not (path / "complete").exists():
        return "it was not finished (no file `complete`)"
    try:
        sizes = read_json(path / "complete")
        if not {"state.json", "shards.json"} <= set(sizes):
            return "its file `complete` does not list a state"
        for name, size in sizes.items():
            if not (path / name).exists():
                return f"{name} is missing"
            if (path / name).stat().st_size != size:
                return f"{name} has {(path / name).stat().st_size:,} bytes instead of {size:,}"
        version = read_json(path / "state.json").get("version")
        read_json(path / "shards.json")
    except UserError as error:
        return str(error)
    return "" if version == VERSION else f"its format is version {version}; this is version {VERSION}"


def newest_state(out_dir: Path) -> tuple[Path | None, list[str]]:
    """The newest complete state of out_dir, and a sentence for each newer one that is not complete."""
    skipped = []
    for path in sorted(out_dir.glob("checkpoints/" + "[0-9]" * 8), reverse=True):
        fault = fault_of(path)
        if not fault:
            return path, skipped
        skipped.append(f"skipping {path}: {fault}")
    return None, skipped


def read_pieces(path: Path, names: list[str] | None = None,
                device: str | torch.device = "cpu") -> dict[str, Tensor]:
    """Whole tensors of a state by global name, put together from their pieces. `names` None = all."""
    shards = read_json(path / "shards.json")
    files, out = {}, {}
    for name in names if names is not None else shards:
        whole = None
        for piece in shards[name]["pieces"]:
            if piece["file"] not in files:
                files[piece["file"]] = open_tensors(path / piece["file"], device)
            t = files[piece["file"]].get_tensor(piece["key"])
            if list(t.shape) == shards[name]["shape"]:
                whole = t
                continue
            if whole is None:
                dtype = getattr(torch, shards[name]["dtype"])
                whole = torch.empty(shards[name]["shape"], dtype=dtype, device=device)
            whole[tuple(slice(o, o + n) for o, n in zip(piece["offset"], piece["length"]))] = t
        out[name] = whole
    return out


def load_from_state(path: Path, device: str | torch.device, dtype: torch.dtype | None) -> tuple:
    """The model of a checkpoint directory; its tokenizer is the out_dir's."""
    fault = fault_of(path)
    if fault:
        raise UserError(f"{path} is not a complete state: {fault}")
    names = [name for name in read_json(path / "shards.json") if name.startswith("model.")]
    tensors = {name.removeprefix("model."): t for name, t in read_pieces(path, names, device).items()}
    state, tokenizer = read_json(path / "state.json"), tokenizer_of(path.resolve().parent.parent)
    if not state["config"].get("lora_rank"):
        return build(ModelConfig(**state["model"]), tensors, dtype, str(path), device), tokenizer
    run = state["config"]                                  # sft.py's, whose base is frozen and not in here
    base, before = load_model_dir(state["paths"].get("init_from", run["init_from"]), device, dtype)
    base.extend_vocabulary(state["model"]["vocab_size"], state["new_ids"], used=before.vocab_size)
    lora.adapt(base, run["lora_rank"], run["lora_alpha"], 0.0, run["lora_targets"], state["new_ids"])
    fill(base, tensors, path)
    return lora.merge(base), tokenizer


@torch.no_grad()
def fill(model: Model, weights: dict[str, Tensor], path: Path) -> None:
    """The weights of a state into the parameters that are trained; UserError where they are others."""
    mine = lora.trained(model)
    if differ := sorted(set(mine) ^ set(weights)):
        raise UserError(f"{path} does not hold the weights of this run: {len(differ)} names differ, as "
                        f"{', '.join(differ[:3])}")
    for name, p in mine.items():
        p.copy_(weights[name])


def restore(path: Path, model: Model, optimizer, scale, run) -> None:
    """
    Fill model, optimizer, fp16 loss scale and this rank's generators from a complete state. Every rank calls
    this.
    """
    state = read_json(path / "state.json")
    tensors = read_pieces(path)
    weights = {n.removeprefix("model."): t for n, t in tensors.items() if n.startswith("model.")}
    fill(model, weights, path)
    moments = {n.removeprefix("optim."): t for n, t in tensors.items() if n.startswith("optim.")}
    fresh = optimizer.load_moments(moments, state["updates"])
    if fresh:
        run.say(f"{path} has no moments for {len(fresh)} of {len(optimizer.named)} parameters (weights "
                f"alone, or another optimizer): theirs start fresh")
    optimizer.skipped.fill_(state["step"] - state["updates"])
    optimizer.skipped_in_a_row.fill_(state["skipped_in_a_row"])
    file = path / f"rng-{run.rank:05d}.safetensors"
    if file.exists() and state["world"] == run.world:
        generators = read_tensors(file)
        torch.set_rng_state(generators["cpu"])
        if run.device.type == "cuda" and "cuda" in generators:
            torch.cuda.set_rng_state(generators["cuda"], run.device)
    if scale.enabled and state["fp16_scale"]:
        scale.value.fill_(state["fp16_scale"])
        scale.finite_steps.fill_(state["fp16_finite_steps"])


# ---- the state: is it this run's? -------------------------------------------------------------------------

# What a resumed run may change: length, intervals, evaluation, watching, machine, mesh, split of a batch.
FREE = {*config.LENGTHS, "max_epochs", "max_minutes", "eval_interval", "eval_tokens", "eval_only",
        "log_interval", "sample_interval", "save_interval", "model_interval", "keep_last", "wandb_project",
        "wandb_entity", "wandb_name", "tensorboard", "nsys_start", "nsys_stop", "memory_profile_start",
        "memory_profile_stop", "profile_start", "profile_stop", "device", "dtype", "compile", "kernels",
        "recompute", "fp8", "timeout", "pp", "cp", "ep", "hsdp_replica", "pipeline_schedule",
        "cp_mode", "micro_batch_size", "gradient_accumulation", "out_dir", "resume", "show", "merge"}
RESOLVED = {"vocab_size", "global_batch_size"}         # None = worked out at the start and stored


def resume(cfg, say=print) -> Path | None:
    """
    The state that a run with this config goes on from, or None to start afresh; reads JSON only. Brings `cfg`
    in line with the state: a key given in neither run takes the state's value, None and "auto" take what they
    were resolved to, and with no length given the stored one stays. UserError when out_dir holds another run,
    naming the keys that differ, or anything else that would be overwritten.
    """
    out = Path(cfg.out_dir)
    if out.exists() and not out.is_dir():
        raise UserError(f"out_dir={out} is a file: choose another out_dir")
    if cfg.init_from is not None and os.path.realpath(cfg.init_from) == os.path.realpath(out):
        raise UserError(f"out_dir={out} is init_from itself, which would be overwritten: choose another "
                        f"out_dir")
    if cfg.resume in (False, "never"):
        if out.is_dir() and any(out.iterdir()):
            raise UserError(f"resume=never, but {out} is not empty: choose another out_dir, or delete it "
                            f"yourself")
        return None
    forced = cfg.resume not in (True, "auto")
    there, skipped = newest_state(out)
    if forced:
        path = state_at(Path(cfg.resume))
        earlier = there and there.parent.resolve() == path.parent.resolve() and there.name <= path.name
        if there and not earlier:
            raise UserError(f"resume={cfg.resume} would leave {there}, a later or another run's state, in "
                            f"the way: give another out_dir, or move it away")
    else:
        path = there
        for sentence in skipped:
            say(sentence)
    if there is None:
        refuse_foreign(out)
    if path is not None:
        reconcile(cfg, read_json(path / "state.json"), path, forced, say)
    return path


def state_at(path: Path) -> Path:
    """The state that a path names: itself, or the newest of an out_dir."""
    if not (path / "state.json").exists():
        newest = newest_state(path)[0]
        if newest is None:
            raise UserError(f"resume={path}: there is no complete checkpoint")
        return newest
    if fault := fault_of(path):
        raise UserError(f"resume={path}: {fault}")
    return path


WRITTEN = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
           "metrics.jsonl", "run_config.json", "adapter_config.json", "loss.png", "source", "checkpoints"}


def refuse_foreign(out: Path) -> None:
    """
    out_dir without a complete state: fine when it holds nothing that a run writes, or a run of ours that
    stopped before its first save.
    """
    held = sorted(p.name for p in out.glob("*") if p.name in WRITTEN or p.name.endswith(".safetensors"))
    model = any(name.endswith(".safetensors") for name in held)
    try:
        ours = "lignite" in read_json(out / "run_config.json")
    except UserError:
        ours = False
    if held and (model or not ours):
        hint = f", or train on from it with --init_from={out}" if model else ""
        raise UserError(f"{out} holds no complete checkpoint to resume but {', '.join(held[:4])}, which "
                        f"would be overwritten: choose another out_dir{hint}")


def reconcile(cfg, state: dict, path: Path, forced: bool, say=print) -> None:
    """Bring cfg in line with a state; UserError for what differs, or, when forced, a line that says so."""
    stored, stored_given = state["config"], state["given"]
    known = {f.name for f in dataclasses.fields(type(cfg))}
    differ = []
    for key in sorted(set(stored) & known - FREE):
        now, before = getattr(cfg, key), stored[key]
        if key not in cfg.given and key not in stored_given:
            setattr(cfg, key, before)
        elif (now is None and key in RESOLVED) or (key in stored_given and now == stored_given[key]):
            setattr(cfg, key, before)
        elif now != before and not (key in state["paths"] and os.path.realpath(now) == state["paths"][key]):
            differ.append((key, before, now))
    for key in sorted(set(stored_given) & set(stored) - known - FREE):
        if stored[key] != state["defaults"].get(key):
            differ.append((key, stored[key], "no key of this script"))
    if not any(key in cfg.given for key in config.LENGTHS):
        for key in config.LENGTHS:
            if key in stored and key in known:
                setattr(cfg, key, stored[key])
    if not differ:
        return
    listed = "; ".join(f"{key} was {before!r}, is {now!r}" for key, before, now in differ)
    fixed = {key for key, _, _ in differ} & {f.name for f in dataclasses.fields(ModelConfig)}
    if forced and fixed:
        raise UserError(f"a resumed run cannot change the model's shape ({listed}): start a new one in "
                        f"another out_dir")
    if not forced:
        force = "" if fixed else f", or go on from it with these settings by --resume={path}"
        raise UserError(f"{path.parent.parent} holds a run with other settings ({listed}): choose another "
                        f"out_dir{force}")
    say(f"resuming with changed settings: {listed}")


def check_resumed(cfg, stored: dict, same_data: bool, max_steps: int, run) -> None:
    """Say what differs from the run that is resumed, or refuse."""
    if not same_data and cfg.resume in ("auto", True):
        raise UserError(f"data={cfg.data} is not what the run in {cfg.out_dir} was trained on (its content "
                        f"changed): choose another out_dir, or go on with it all the same by "
                        f"--resume={cfg.out_dir}")
    run.say(f"resuming at step {stored['step']}" + (f" with {run.world} ranks instead of {stored['world']}"
                                                     if run.world != stored["world"] else ""))
    if stored["max_steps"] != max_steps and stored["step"] < max_steps:
        run.say(f"the run has {max_steps} steps now instead of {stored['max_steps']}: the learning rate "
                f"follows the curve of {max_steps} steps from here on")


def paths_of(cfg) -> dict[str, str]:
    """Where the paths among cfg's values really are: the same file may be spelled differently next time."""
    values = {key: getattr(cfg, key) for key in ("data", "tokenizer", "init_from")}
    return {key: os.path.realpath(value) for key, value in values.items() if value and os.path.exists(value)}


# ---- the model that a run starts from ---------------------------------------------------------------------

def open_base(cfg, resumed, live: Model | None) -> Model | None:
    """
    The model that the run goes on from, in fp32 on the CPU: what is resumed, else a copy of a live
    init_from, else the one of init_from's directory. None from scratch.
    """
    path = resumed or cfg.init_from
    if path is None:
        return None
    if live is not None and not resumed:
        base = copy.deepcopy(live).float().cpu()
    else:
        base, base_tokenizer = load_model_dir(path, dtype=torch.float32)
        base.tokenizer = base_tokenizer
    for key in (f.name for f in dataclasses.fields(ModelConfig) if f.name in cfg.given):
        wanted, there = getattr(cfg, key), getattr(base.cfg, key)
        if wanted not in (there, None) and key not in ("rope_scaling", "max_position_embeddings"):
            raise UserError(f"{key}={wanted} does not fit init_from={path}, which has {key}={there}: leave "
                            f"it out")
    return base


def inherit_shape(cfg, base: Model, say) -> None:
    """
    Fill the ModelConfig fields of cfg from the model that the run starts from, whose positions reach as far
    as its rows do.
    """
    free = ("rope_scaling", "max_position_embeddings")
    asked = {key: getattr(cfg, key) for key in free if key in cfg.given}
    if asked.get("rope_scaling"):                      # stretches what the base was trained on
        old = {"original_max_position_embeddings": base.cfg.max_position_embeddings}
        asked["rope_scaling"] = {**old, **asked["rope_scaling"]}
    asked["max_position_embeddings"] = max(base.cfg.max_position_embeddings,
                                           asked.get("max_position_embeddings", 0), cfg.sequence_length)
    if cfg.sequence_length > base.cfg.max_position_embeddings and "rope_scaling" not in cfg.given:
        say(f"warning: sequence_length={cfg.sequence_length} is beyond the "
            f"{base.cfg.max_position_embeddings} positions that the base was trained on: give "
            f"rope_scaling, or expect it to learn them anew")
    for f in dataclasses.fields(ModelConfig):
        setattr(cfg, f.name, asked.get(f.name, getattr(base.cfg, f.name)))
    base.cfg = model_config(cfg)
    base.set_positions()


def fresh_shape(cfg, vocab_size: int, say) -> None:
    """Fill the ModelConfig fields of cfg that nobody set, from `params` and the vocabulary."""
    if cfg.vocab_size is None:
        cfg.vocab_size = -(-vocab_size // 64) * 64
    if "max_position_embeddings" not in cfg.given:
        cfg.max_position_embeddings = cfg.sequence_length
    if cfg.max_position_embeddings < cfg.sequence_length:
        raise UserError(f"max_position_embeddings={cfg.max_position_embeddings} is less than "
                        f"sequence_length={cfg.sequence_length}: leave it out, or raise it")
    if cfg.params is not None:
        mine = {key: getattr(cfg, key) for key in (*SHAPE, "tie_word_embeddings") if key in cfg.given}
        shape, warnings = shape_for(cfg.params, cfg.vocab_size, mine)
        for key, value in shape.items():
            setattr(cfg, key, value)
        for warning in warnings:
            say(f"warning: {warning}")


# ---- what Python gave as objects --------------------------------------------------------------------------

def name_objects(cfg) -> dict:
    """
    Replace a live tokenizer or model in cfg by the directory in out_dir that save_objects() will put it in:
    named by its content, so that another one is another setting. Returns {key: object}.
    """
    live = {}
    for key in ("tokenizer", "init_from"):
        value = getattr(cfg, key)
        if value is None or isinstance(value, (str, os.PathLike)):
            continue
        if key == "init_from" and not isinstance(value, Model):
            raise UserError(f"init_from takes a path or a loaded model, not {type(value).__name__}")
        live[key] = value if key == "init_from" else tokenizers.load_tokenizer(value)
        content = weights_hash(value) if key == "init_from" else live[key].fingerprint
        setattr(cfg, key, str(Path(cfg.out_dir) / "given" / f"{key}-{content[:8]}"))
    return live


def weights_hash(model: Model) -> str:
    digest = hashlib.sha256()
    for name, t in model.state_dict().items():
        digest.update(name.encode())
        digest.update(t.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def save_objects(cfg, live: dict) -> None:
    """Write what name_objects() found, for a child process or a later run. Rank 0 only."""
    for key, value in live.items():
        if isinstance(value, Model):
            save_model_dir(value, value.tokenizer, getattr(cfg, key))
        else:
            value.save(getattr(cfg, key))


def open_out_dir(cfg, given: dict) -> None:
    """
    Create out_dir with run_config.json (all values, and what the user gave) and a copy of the sources. Rank
    0 only.
    """
    out = Path(cfg.out_dir)
    sources = out / "source"
    try:
        sources.mkdir(parents=True, exist_ok=True)
        write_json(out / "run_config.json", {"lignite": config.__version__, "given": given,
                                             "config": dataclasses.asdict(cfg)})
        here = Path(__file__).parent
        for file in [*here.glob("*.py"), *here.glob("kernels/*.py"), *here.glob("parallel/*.py")]:
            target = sources / file.relative_to(here)
            target.parent.mkdir(exist_ok=True)
            shutil.copyfile(file, target)
    except OSError as error:
        raise UserError(f"out_dir={out} cannot be written: {error}") from None
