"""
LoRA (arXiv 2106.09685): a frozen model and, beside its projections, pairs of thin matrices that are trained.
Names in memory and files on disk are those of Hugging Face's peft.

    adapt(model, rank=16, alpha=32)                    in place; an optimizer then moves only what is new
    save_adapter(model, "out/adapter", base="out/tiny")
    merge(load_adapter(base_model, "out/adapter"))     a plain model again, with the adapter in its weights

Thin matrices cannot teach a token that is new: its rows in the embedding and in the head are trained in full
(`new_ids`), the rows of all others stay frozen.
"""
import math
import re
import zlib
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from config import UserError
from files import flush, read_json, read_tensors, write_json, write_tensors
from model import Model

PREFIX = "base_model.model."                           # what peft puts before the names of a model
ROWS = "token_adapter.trainable_tokens_delta"          # its name for trained rows, which are no differences
WHOLE = ("weight", "token_adapter.base_layer.weight")  # its names for all rows of a table
# What we compute of its kinds of LoRA; those that bring tensors of their own are recognised by them.
ONLY = {"peft_type": "LORA", "bias": "none", "use_dora": False, "use_qalora": False, "use_bdlora": None,
        "arrow_config": None, "layer_replication": None, "alora_invocation_tokens": None}
ALTER_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")       # beginnings of init_lora_weights
MERGE_IT = "merge it with peft (merge_and_unload) and load the model that it saves"


# ---- modules ----------------------------------------------------------------------------------------------

class LoraLinear(nn.Linear):
    """
    y = x W^T + b + alpha / r * dropout(x) A^T B^T, where W and b are the parameters of the linear layer that
    it was. A [r, in] and B [out, r], in lora_A and lora_B, are fp32 for the optimizer and compute in x's
    dtype.
    """
    def forward(self, x: Tensor) -> Tensor:
        # without a gradient it is no training, whatever the module's mode: no loop has to switch it
        kept = F.dropout(x, self.dropout, self.training and torch.is_grad_enabled())
        low = F.linear(kept, self.lora_A.weight.to(x.dtype))                       # [..., r]
        return torch.add(super().forward(x), F.linear(low, self.lora_B.weight.to(x.dtype)), alpha=self.scale)

    @property
    def scale(self) -> float:
        return self.alpha / self.lora_A.out_features


def to_lora(linear: nn.Linear, A: Tensor, B: Tensor, alpha: float, dropout: float) -> None:
    """Makes a LoraLinear of a linear layer, in place: whoever holds it, and its parameters, stay the same."""
    linear.__class__, linear.alpha, linear.dropout = LoraLinear, alpha, dropout
    for name, matrix in (("lora_A", A), ("lora_B", B)):
        thin = nn.Linear(*reversed(matrix.shape), bias=False, device="meta")
        thin.weight = nn.Parameter(matrix.to(linear.weight.device, torch.float32))
        setattr(linear, name, thin)


def with_rows(table: nn.Embedding | nn.Linear) -> Tensor:
    """
    [V, D]: the frozen matrix with the trained rows in their places, from where the gradient reaches them.
    They are written into the matrix itself, whose own values there nobody needs: with a copy at each use, a
    token of a 30M model with 50,304 rows takes 5 times as long to generate on a CPU.
    """
    frozen = table._parameters["weight"]
    table.ids = table.ids.to(frozen.device)            # no buffer: DDP would send it around at each step
    return frozen.data.index_copy_(0, table.ids, table.rows.to(frozen.dtype))


class RowsEmbedding(nn.Embedding):
    """An embedding of which only `rows` [n, D], fp32, are trained: those of the tokens `ids` [n]."""
    weight = property(with_rows)                       # for all that reads it, like Model.head


class RowsLinear(nn.Linear):
    """The same for a head that is not the embedding."""
    weight = property(with_rows)


def to_rows(table: nn.Embedding | nn.Linear, ids: Tensor, rows: Tensor) -> None:
    """Makes the rows `ids` [n] of a table trainable, in place, beginning with the values `rows` [n, D]."""
    table.rows = nn.Parameter(rows.detach().to(table.weight.device, torch.float32))
    table.ids = ids
    table.__class__ = RowsEmbedding if isinstance(table, nn.Embedding) else RowsLinear


def tables(model: Model) -> dict[str, nn.Embedding | nn.Linear]:
    """What has a row for each token: the embedding, and the head where that is not the same."""
    head = {} if model.lm_head is None else {"lm_head": model.lm_head}
    return {"model.embed_tokens": model.model.embed_tokens, **head}


def projections(model: Model) -> dict[str, nn.Linear]:
    """The linear layers that can be adapted, by name; UserError where they are already."""
    found = {name: module for name, module in model.named_modules()
             if isinstance(module, nn.Linear) and name.startswith("model.layers.")}
    if any(isinstance(linear, LoraLinear) for linear in found.values()):
        raise UserError("the model has an adapter already: merge it first")
    return found


# ---- adapt, merge -----------------------------------------------------------------------------------------

def adapt(model: Model, rank: int, alpha: float, dropout: float = 0.0, targets: Iterable[str] | None = None,
          new_ids: Iterable[int] = (), seed: int = 0, dtype: torch.dtype | None = None) -> Model:
    """
    Freeze a model and put matrices of this rank beside its projections, in place; the logits stay what they
    are. `targets` are names of linear layers or ends of them, as peft's target_modules ("q_proj",
    "layers.0.mlp.up_proj"); None = all in the layers. A is Kaiming uniform, from a generator of its own by
    `seed` and name, B is 0. The rows of `new_ids` are trained in full. What is frozen becomes `dtype` (None =
    stays what it is), what is trained is fp32.

    UserError for a target that does not exist, a rank below 1 or above all matrices', an id that has no row.
    """
    linears, new_ids, V = projections(model), sorted(set(new_ids)), model.cfg.vocab_size
    if rank < 1 or not 0 <= dropout < 1:
        raise UserError(f"lora_rank={rank} and lora_dropout={dropout}: a rank is 1 or more, a dropout 0 or "
                        f"more and below 1")
    if new_ids and not 0 <= new_ids[0] <= new_ids[-1] < V:
        raise UserError(f"new_ids go from {new_ids[0]} to {new_ids[-1]}, but the model has {V} rows: call "
                        f"extend_vocabulary first")
    chosen = dict(linears) if targets is None else {}
    for target in targets or ():
        found = {name: linear for name, linear in linears.items() if f".{name}".endswith(f".{target}")}
        if not found:
            ends = dict.fromkeys(last(name) for name in linears)
            raise UserError(f"lora_targets names {target!r}, but no linear layer of this model is called "
                            f"that: use some of {', '.join(ends)}")
        chosen |= found
    if not chosen:
        raise UserError("lora_targets is empty, so nothing would be trained: leave it out for all of them")
    if rank > (full := max(min(linear.weight.shape) for linear in chosen.values())):
        raise UserError(f"lora_rank={rank:,} is more than any matrix that it adapts has ({full:,}): 8 to 64 "
                        f"is common; without lora_rank all weights are trained")
    rows = {name: table.weight[new_ids] for name, table in tables(model).items() if new_ids}
    model.to(dtype).requires_grad_(False)
    for name, linear in chosen.items():
        generator = torch.Generator().manual_seed((seed * 0x9E3779B1 + zlib.crc32(name.encode())) % 2**63)
        A = torch.empty(rank, linear.in_features)
        nn.init.kaiming_uniform_(A, a=math.sqrt(5), generator=generator)
        to_lora(linear, A, torch.zeros(linear.out_features, rank), alpha, dropout)
    for name in rows:
        to_rows(tables(model)[name], torch.tensor(new_ids), rows[name])
    return model


def last(name: str) -> str:
    return name.rpartition(".")[2]


def trained(model: Model) -> dict[str, Tensor]:
    """What an optimizer moves, by name."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


@torch.no_grad()
def merge(model: Model) -> Model:
    """Put adapter and rows into the weights, in place: a plain model again, all of it trainable."""
    for module in list(model.modules()):
        if isinstance(module, LoraLinear):
            update = module.scale * module.lora_B.weight @ module.lora_A.weight
            module.weight.copy_(module.weight.float() + update)
            del module.lora_A, module.lora_B, module.alpha, module.dropout
            module.__class__ = nn.Linear
        elif isinstance(module, (RowsEmbedding, RowsLinear)):
            with_rows(module)
            del module.rows, module.ids
            module.__class__ = nn.Embedding if isinstance(module, nn.Embedding) else nn.Linear
    return model.requires_grad_(True)


# ---- writing ----------------------------------------------------------------------------------------------

def save_adapter(model: Model, path: str | Path, base: str, step: int | None = None) -> None:
    """
    Write what adapt() added, without the model, as a directory that peft opens on `base`: a path, or a name
    on the Hub. UserError where the disk refuses.
    """
    path = Path(path)
    adapted = {name: module for name, module in model.named_modules() if isinstance(module, LoraLinear)}
    rows = {name: table for name, table in tables(model).items()
            if isinstance(table, (RowsEmbedding, RowsLinear))}
    tensors = {f"{PREFIX}{name}.{thin}.weight": getattr(module, thin).weight
               for name, module in adapted.items() for thin in ("lora_A", "lora_B")}
    tensors |= {f"{PREFIX}{name}.{ROWS}": table.rows for name, table in rows.items()}
    ranks = {name: module.lora_A.out_features for name, module in adapted.items()}
    alphas = {name: module.alpha for name, module in adapted.items()}
    first, ends = next(iter(adapted)), {last(name) for name in adapted}
    everywhere = len(adapted) == sum(last(name) in ends for name, _ in model.named_modules())
    content = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": str(base),
        "r": ranks[first], "lora_alpha": alphas[first], "lora_dropout": adapted[first].dropout,
        "target_modules": sorted(ends if everywhere else adapted),
        "rank_pattern": {name: rank for name, rank in ranks.items() if rank != ranks[first]},
        "alpha_pattern": {name: alpha for name, alpha in alphas.items() if alpha != alphas[first]},
        "trainable_token_indices": {last(name): table.ids.tolist() for name, table in rows.items()} or None,
        "bias": "none", "use_rslora": False, "use_dora": False, "modules_to_save": None,
        "fan_in_fan_out": False, "init_lora_weights": True, "inference_mode": True}
    try:
        path.mkdir(parents=True, exist_ok=True)
        write_tensors(path / "adapter_model.safetensors", tensors,
                      {"format": "pt", **({} if step is None else {"step": str(step)})})
        write_json(path / "adapter_config.json", content)
        flush(path)
    except OSError as error:
        raise UserError(f"the adapter could not be saved to {path}: {error}; what was there before is "
                        f"intact: make room, then save it again") from None


# ---- reading ----------------------------------------------------------------------------------------------

def load_adapter(model: Model, path: str | Path) -> Model:
    """
    Add an adapter of ours or of peft to its base, in place; the base is frozen as by adapt(), and grows by
    the rows that it lacks. UserError for a kind that we do not compute, and for what does not fit the model.
    """
    path = Path(path)
    content, file = read_json(path / "adapter_config.json"), path / "adapter_model.safetensors"
    check_kind(content, path / "adapter_config.json")
    if not file.exists():
        raise UserError(f"{path} has no adapter_model.safetensors: save the adapter again, as safetensors")
    tensors = {name.removeprefix(PREFIX): t for name, t in read_tensors(file).items()}
    linears, pairs = projections(model), {}
    for name in [name for name in linears if f"{name}.lora_A.weight" in tensors]:
        A, B = (tensors.pop(f"{name}.{thin}.weight", torch.empty(0)) for thin in ("lora_A", "lora_B"))
        (out, wide), rank = linears[name].weight.shape, len(A)
        if A.shape != (rank, wide) or B.shape != (out, rank):
            raise UserError(f"{file} does not fit the model: {name} is [{out}, {wide}], but lora_A "
                            f"{list(A.shape)} and lora_B {list(B.shape)}. Its base is "
                            f"{content.get('base_model_name_or_path')}")
        pairs[name] = A, B, alpha_of(name, rank, content)
    found = rows_of(tensors, content, model, file)
    if tensors:
        raise UserError(f"{file} has {len(tensors)} tensors that this model has no place for: "
                        f"{', '.join(sorted(tensors)[:4])}")
    needed = max((int(ids.max()) + 1 for ids, _ in found.values()), default=0)
    model.extend_vocabulary(needed, (), used=model.cfg.vocab_size).requires_grad_(False)
    for name, (A, B, alpha) in pairs.items():
        to_lora(linears[name], A, B, alpha, content.get("lora_dropout") or 0.0)
    for name, (ids, rows) in found.items():
        table = tables(model)[name]
        differ = (rows.to(table.weight) != table.weight[ids]).any(1).cpu()         # few, of a whole table
        if differ.any():
            to_rows(table, ids[differ], rows[differ])
    return model


def check_kind(content: dict, where: Path) -> None:
    """UserError for an adapter_config.json of a kind that we do not compute."""
    for key, value in ONLY.items():
        if content.get(key) not in (None, value):
            raise UserError(f"{where} has {key}={content[key]!r}; lora.py computes {key}={value} only: "
                            f"{MERGE_IT}")
    if str(content.get("init_lora_weights")).startswith(ALTER_BASE):
        raise UserError(f"{where} has init_lora_weights={content['init_lora_weights']!r}, for which peft "
                        f"alters the base itself: {MERGE_IT}")


def alpha_of(name: str, rank: int, content: dict) -> float:
    """The alpha of one layer; use_rslora divides it by the root of the rank only (arXiv 2312.03732)."""
    special = [value for pattern, value in (content.get("alpha_pattern") or {}).items()
               if re.match(rf"(.*\.)?({pattern})$", name)]
    alpha = special[0] if special else content.get("lora_alpha", 8)
    return alpha * math.sqrt(rank) if content.get("use_rslora") else alpha


def rows_of(tensors: dict[str, Tensor], content: dict, model: Model,
            file: Path) -> dict[str, tuple[Tensor, Tensor]]:
    """
    Takes out of `tensors` what belongs to the vocabulary: {table: (ids [n], rows [n, D])}. peft stores the
    rows of trainable_token_indices, or whole tables: those of modules_to_save, and when the vocabulary has
    grown both, even where they are one.
    """
    listed = content.get("trainable_token_indices") or {}
    listed = listed if isinstance(listed, dict) else {"embed_tokens": listed}
    stored = {name: {part: tensors.pop(f"{name}.{part}") for part in (ROWS, *WHOLE)
                     if f"{name}.{part}" in tensors} for name in ("model.embed_tokens", "lm_head")}
    if model.lm_head is None:
        embedding, head = stored["model.embed_tokens"], stored.pop("lm_head")
        one = embedding.keys() == head.keys() and all(torch.equal(embedding[k], head[k]) for k in head)
        if not one and (head or embedding.keys() != {ROWS}):
            raise UserError(f"{file} has a head that is not its embedding, but in this model they are one: "
                            f"{MERGE_IT}")
    found, D = {}, model.cfg.hidden_size
    for name, parts in stored.items():
        rows, whole = parts.pop(ROWS, None), next(iter(parts.values()), None)
        ids = next((ids for key, ids in listed.items() if f".{name}".endswith(f".{key}")), [])
        if (rows is not None and rows.shape != (len(ids), D)) or (whole is not None
                                                                  and whole.shape[1:] != (D,)):
            raise UserError(f"{file} does not fit the model, which is {D} wide: {name} has rows of "
                            f"{[list(t.shape) for t in (rows, whole) if t is not None]} for {len(ids)} ids "
                            f"of trainable_token_indices")
        if whole is not None and rows is not None:
            whole[ids] = rows
        if whole is not None:
            ids, rows = range(len(whole)), whole
        if rows is not None:
            found[name] = torch.tensor(list(ids)), rows
    return found
