"""lora.py: against peft, both ways; against autograd on the written formula; what it freezes and refuses."""
import copy
import importlib.util
import json
import os
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn

import checkpoint
import lora
import optim
import tokenizer as tokenizers
from config import UserError
from files import read_tensors
from model import Model, ModelConfig, generate
from test_optim import settings

# 257 tokens of "byte" and 7 rows that no token has yet; odd sizes, so that a swapped dimension cannot pass
TINY = dict(vocab_size=264, hidden_size=28, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            head_dim=6, intermediate_size=44)
FAMILIES = {"qwen3-tied": dict(), "qwen3-untied": dict(tie_word_embeddings=False, attention_bias=True),
            "llama-tied": dict(model_type="llama"),
            "llama-untied": dict(model_type="llama", tie_word_embeddings=False, mlp_bias=True)}
OURS = {"all": dict(targets=None), "rows": dict(targets=["q_proj", "down_proj"], new_ids=[261, 257]),
        "one": dict(targets=["layers.1.mlp.up_proj"])}
THEIRS = {
    "all-linear": dict(target_modules="all-linear"),
    "rslora": dict(target_modules=["q_proj", "down_proj"], use_rslora=True, rank_pattern={"q_proj": 5},
                   alpha_pattern={"layers.1.self_attn.q_proj": 7}, layers_to_transform=[1]),
    "regex": dict(target_modules=r".*layers\.0.*(gate|up)_proj", trainable_token_indices=[257, 3]),
    "grown": dict(target_modules=["v_proj"], grown=270),
    "grown-rows": dict(target_modules=["v_proj"], grown=270, trainable_token_indices={"embed_tokens": [266]}),
    "head": dict(target_modules=["v_proj"], trainable_token_indices={"embed_tokens": [258]},
                 modules_to_save=["lm_head"])}                 # what trl writes of new tokens
IDS = torch.tensor([[*range(3, 250, 9), 258, 260, 7, 260, 257]])
JUDGE = """
import json, torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
torch.set_num_threads(1)
families, ours, theirs = json.load(open("cases.json"))
ids = load_file("ids.safetensors")["ids"]

def keep(model, name):
    save_file({"logits": model.eval()(ids).logits.detach()}, name + ".logits")

for family in families:
    for name in ours:
        base = AutoModelForCausalLM.from_pretrained(family)
        keep(PeftModel.from_pretrained(base, f"{family}-{name}"), f"{family}-{name}")
    for name, kind in theirs.items():
        if name == "head" and not family.endswith("untied"):
            continue
        torch.manual_seed(1)
        base, kind = AutoModelForCausalLM.from_pretrained(family), dict(kind)
        if rows := kind.pop("grown", None):
            base.resize_token_embeddings(rows)
        model = get_peft_model(base, LoraConfig(r=3, lora_alpha=4, lora_dropout=0.5, **kind))
        for p in model.parameters():
            if p.requires_grad:
                p.data += 0.3 * torch.randn_like(p)
        model.save_pretrained(f"{family}-{name}")
        keep(model, f"{family}-{name}")
"""


def tiny(seed: int = 0, **changes) -> Model:
    return Model(ModelConfig(**{**TINY, **changes})).init_weights(seed)


def shaken(model: Model, by: float = 0.3) -> Model:
    """Adapters that change something: fresh ones don't."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for p in lora.trained(model).values():
            p.add_(torch.randn(p.shape, generator=generator) * by)
    return model


def near(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    return bool((ours - theirs).norm() <= 1e-5 * theirs.norm())


def written(model: Model, **changes) -> dict:
    """An adapter of this model in ./adapter, its adapter_config.json with `changes`."""
    lora.save_adapter(model, "adapter", base="base")
    content = json.loads(Path("adapter/adapter_config.json").read_text(encoding="utf-8")) | changes
    Path("adapter/adapter_config.json").write_text(json.dumps(content), encoding="utf-8")
    return content


# ---- peft -------------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def judged(oracle, tmp_path_factory):
    """Logits of every adapter, ours and peft's own, as peft computes them on bases that we saved."""
    if importlib.util.find_spec("peft") is None:
        missing = "peft is not installed: pip install -r requirements-dev.txt"
        pytest.fail(missing) if os.environ.get("LIGNITE_REQUIRE_PACKAGES") == "1" else pytest.skip(missing)
    directory = tmp_path_factory.mktemp("adapters")
    save_file({"ids": IDS}, directory / "ids.safetensors")
    (directory / "cases.json").write_text(json.dumps([list(FAMILIES), list(OURS), THEIRS]), encoding="utf-8")
    for family, changes in FAMILIES.items():
        checkpoint.save_model_dir(tiny(**changes), tokenizers.load_tokenizer("byte"), directory / family)
        for name, how in OURS.items():
            model = shaken(lora.adapt(tiny(**changes), rank=3, alpha=5, **how))
            lora.save_adapter(model, directory / f"{family}-{name}", base=family)
    oracle.run(JUDGE, directory)
    return directory


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("family", FAMILIES)
def test_peft_opens_our_adapter_with_equal_logits(judged, family, name):
    model = shaken(lora.adapt(tiny(**FAMILIES[family]), rank=3, alpha=5, **OURS[name]))
    theirs = load_file(judged / f"{family}-{name}.logits")["logits"]
    assert near(model(IDS), theirs)
    assert not near(tiny(**FAMILIES[family])(IDS), theirs)
    again = lora.load_adapter(tiny(**FAMILIES[family]), judged / f"{family}-{name}")
    assert torch.equal(model(IDS), again(IDS))


@pytest.mark.parametrize("family,name", [
    (family, name) for family in FAMILIES for name in THEIRS
    if name != "head" or family.endswith("untied")])           # peft itself refuses it for tied ones
def test_our_model_takes_an_adapter_of_peft_with_equal_logits(judged, family, name):
    theirs = load_file(judged / f"{family}-{name}.logits")["logits"]
    model = lora.load_adapter(tiny(**FAMILIES[family]), judged / f"{family}-{name}").eval()
    assert near(model(IDS), theirs)
    lora.save_adapter(model, "again", base="base")
    assert near(lora.load_adapter(tiny(**FAMILIES[family]), "again").eval()(IDS), theirs)
    assert near(lora.merge(model)(IDS), theirs)


def test_an_adapter_of_peft_that_we_save_again_is_the_same_to_peft(judged, oracle):
    model = lora.load_adapter(tiny(**FAMILIES["llama-untied"]), judged / "llama-untied-rslora")
    assert model.model.layers[1].mlp.down_proj.dropout == 0.5
    lora.save_adapter(model, judged / "again", base="llama-untied")
    content = json.loads((judged / "again" / "adapter_config.json").read_text())
    assert content["rank_pattern"] and content["alpha_pattern"]
    oracle.run("""
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("llama-untied"), "again").eval()
save_file({"logits": model(load_file("ids.safetensors")["ids"]).logits.detach()}, "again.logits")
""", judged)
    again, first = (load_file(judged / f"{name}.logits") for name in ("again", "llama-untied-rslora"))
    assert near(again["logits"], first["logits"])


def test_the_files_hold_what_peft_writes(judged):
    ours, theirs = judged / "qwen3-untied-all", judged / "qwen3-untied-all-linear"
    assert {name: t.shape for name, t in read_tensors(ours / "adapter_model.safetensors").items()} == \
        {name: t.shape for name, t in read_tensors(theirs / "adapter_model.safetensors").items()}
    ours, theirs = (json.loads((path / "adapter_config.json").read_text()) for path in (ours, theirs))
    assert ours["target_modules"] == sorted({name.split(".")[-1] for name in theirs["target_modules"]})
    assert not ours.keys() - theirs.keys()
    one = json.loads((judged / "llama-tied-one" / "adapter_config.json").read_text())
    assert one["target_modules"] == ["model.layers.1.mlp.up_proj"]


# ---- what is computed, and what is trained ----------------------------------------------------------------

def test_gradients_equal_autograds_on_the_written_formula():
    rows = [1, 3]
    torch.manual_seed(0)
    linear, embedding = nn.Linear(6, 5), nn.Embedding(7, 6)
    W, b, E, ids = linear.weight, linear.bias, embedding.weight.detach().clone(), torch.tensor([[1, 2, 3, 1]])
    A, B, r = torch.randn(2, 6), torch.randn(5, 2), torch.randn(len(rows), 6)
    lora.to_lora(linear, A, B, alpha=3, dropout=0.0)
    lora.to_rows(embedding, torch.tensor(rows), r)
    ours = [linear.lora_A.weight, linear.lora_B.weight, embedding.rows]
    F.linear(linear(embedding(ids)).tanh(), embedding.weight[:, :5]).sin().sum().backward()    # a tied head
    theirs = [t.clone().requires_grad_() for t in (A, B, r)]
    A, B, r = theirs
    table = torch.stack([r[rows.index(i)] if i in rows else E[i] for i in range(7)])
    y = (F.linear(table[ids], W, b) + 3 / 2 * table[ids] @ A.T @ B.T).tanh()
    F.linear(y, table[:, :5]).sin().sum().backward()
    for mine, wanted in zip(ours, theirs):
        torch.testing.assert_close(mine.grad, wanted.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("tied", [True, False])
def test_rows_get_the_gradient_that_the_whole_matrix_would_get(tied):
    whole = tiny(tie_word_embeddings=tied)
    model = lora.adapt(copy.deepcopy(whole), 2, 4, new_ids=[260, 12])
    for m in (whole, model):
        m(IDS[:, :-1], labels=IDS[:, 1:])[0].backward()
    pairs = [(model.model.embed_tokens.rows, whole.model.embed_tokens.weight)]
    if not tied:
        pairs.append((model.lm_head.rows, whole.lm_head.weight))
    for rows, weight in pairs:
        assert near(rows.grad, weight.grad[[12, 260]])                 # in ascending order


def test_only_adapters_and_rows_are_trained_and_the_rest_gets_no_gradient_and_no_state():
    model = lora.adapt(tiny(), 2, 4, new_ids=[260])
    before = {name: p.clone() for name, p in model.named_parameters()}
    optimizer = optim.Optimizer(model, settings())                     # asks for Muon
    assert optimizer.named.keys() == lora.trained(model).keys()
    assert not optimizer.muon.params                                   # AdamW moves thin matrices and rows
    for _ in range(2):
        model(IDS[:, :-1], labels=IDS[:, 1:])[0].backward()
        assert {name for name, p in model.named_parameters() if p.grad is not None} == optimizer.named.keys()
        optimizer.step(torch.tensor(1.0), 1e-2)
    held = {name.rpartition(".")[0] for name in optimizer.moments()}
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert held == optimizer.named.keys() and len(held) == 2 * 14 + 1
    assert moved - {"model.embed_tokens.weight"} == held
    table = before["model.embed_tokens.weight"]
    assert torch.equal(model.head[:260], table[:260]) and torch.equal(model.head[261:], table[261:])
    assert torch.equal(model.head[260], model.model.embed_tokens.rows[0])


def test_a_fresh_adapter_changes_nothing_and_its_A_depends_on_seed_and_name_alone():
    model = tiny()
    wanted = model(IDS)
    torch.manual_seed(3)
    state = torch.get_rng_state()
    adapted = lora.adapt(copy.deepcopy(model), 4, 8, new_ids=[260], seed=7)
    assert torch.equal(adapted(IDS), wanted) and torch.equal(torch.get_rng_state(), state)
    other = lora.adapt(copy.deepcopy(model), 4, 16, targets=["o_proj", "v_proj"], seed=7)
    for name, p in lora.trained(other).items():
        assert torch.equal(p, lora.trained(adapted)[name])
    A = adapted.model.layers[1].self_attn.v_proj.lora_A.weight
    assert 0.9 / 28 ** 0.5 < A.abs().max() <= 1 / 28 ** 0.5            # Kaiming uniform, a = sqrt(5)
    assert not torch.equal(A, adapted.model.layers[0].self_attn.v_proj.lora_A.weight)
    assert not torch.equal(A, lora.adapt(model, 4, 8, seed=8).model.layers[1].self_attn.v_proj.lora_A.weight)


def test_dropout_is_for_steps_of_training_alone():
    model = shaken(lora.adapt(tiny(), 4, 8, dropout=0.5))
    with torch.no_grad():
        wanted = model(IDS)
        assert torch.equal(model(IDS), wanted)
    assert not torch.equal(model(IDS), wanted) and not torch.equal(model(IDS), model(IDS))
    assert near(model.eval()(IDS), wanted)
    linear, x = model.train().model.layers[0].mlp.up_proj, torch.randn(2, 28)
    torch.manual_seed(4)
    y = linear(x)
    torch.manual_seed(4)
    kept = F.dropout(x, 0.5)                           # of what goes into A, not of x W^T
    plain = F.linear(x, linear.weight) + 2 * kept @ linear.lora_A.weight.T @ linear.lora_B.weight.T
    torch.testing.assert_close(y, plain)


@pytest.mark.parametrize("recompute", ["none", "layer"])
def test_a_frozen_bf16_model_trains_fp32_adapters_under_autocast(recompute):
    model, full = (shaken(lora.adapt(tiny(), 4, 8, new_ids=[260], dtype=dtype), 0.03).recomputing(recompute)
                   for dtype in (torch.bfloat16, None))
    assert {p.dtype for p in lora.trained(model).values()} == {torch.float32}
    assert {p.dtype for name, p in model.named_parameters() if not p.requires_grad} == {torch.bfloat16}
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(IDS[:, :-1], labels=IDS[:, 1:])[0]
    loss.backward()
    full(IDS[:, :-1], labels=IDS[:, 1:])[0].backward()
    for name, p in lora.trained(full).items():
        grad = lora.trained(model)[name].grad
        assert grad.dtype == torch.float32 and (grad - p.grad).norm() < 0.05 * p.grad.norm(), name
    for new, in generate(model, [[5, 6]], 3, temperature=0):           # without autocast, too
        assert 0 <= new < 264


def test_a_layer_compiles_in_one_graph():
    model = shaken(lora.adapt(tiny(), 2, 4, dropout=0.1)).eval()
    wanted = model(IDS)
    for layer in model.model.layers:
        layer.compile(backend="eager", fullgraph=True)
    assert near(model(IDS), wanted)


def test_state_dict_copies_and_casts_see_a_model_with_the_same_names():
    model = shaken(lora.adapt(tiny(tie_word_embeddings=False), 2, 4, new_ids=[260]))
    wanted, state = model(IDS), model.state_dict()
    assert {name for name in state if "lora_" not in name and not name.endswith("rows")} == \
        tiny(tie_word_embeddings=False).state_dict().keys()
    assert state.keys() == dict(model.named_parameters()).keys()
    for assign in (False, True):
        other = lora.adapt(tiny(seed=1, tie_word_embeddings=False), 2, 4, new_ids=[260])
        other.load_state_dict(state, assign=assign)
        assert torch.equal(other(IDS), wanted)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.lm_head.rows.zero_()
    assert torch.equal(model(IDS), wanted) and not other(IDS)[..., 260].any()
    assert model.double()(IDS).dtype == torch.float64
    assert near(model(IDS).float(), wanted)


@pytest.mark.parametrize("family", FAMILIES)
def test_merging_changes_no_logits_and_leaves_a_plain_model_that_can_be_trained(family):
    model = shaken(lora.adapt(tiny(**FAMILIES[family]), 3, 5, dropout=0.5, new_ids=[258, 260])).eval()
    wanted = model(IDS)
    assert near(lora.merge(model)(IDS), wanted)
    plain = tiny(**FAMILIES[family])
    assert [type(m) for m in model.modules()] == [type(m) for m in plain.modules()]
    assert model.state_dict().keys() == lora.trained(model).keys() == plain.state_dict().keys()
    lora.adapt(model, 2, 4)                            # and adapted again


# ---- directories ------------------------------------------------------------------------------------------

@pytest.mark.parametrize("tied", [True, False])
def test_an_adapter_directory_opens_as_a_model_with_its_new_tokens(tied):
    byte, base = tokenizers.load_tokenizer("byte"), tiny(vocab_size=257, tie_word_embeddings=tied)
    checkpoint.save_model_dir(base, byte, "base")
    tokenizer = byte.with_special(["<|im_start|>", "<|im_end|>"])
    model = base.extend_vocabulary(tokenizer.vocab_size, [257, 258], byte.vocab_size)
    shaken(lora.adapt(model, 2, 4, new_ids=[257, 258]))
    lora.save_adapter(model, "adapter", base="base", step=3)
    tokenizer.save("adapter")
    ids = torch.tensor([[257, 5, 258, 9]])
    for where in (".", ".."):                          # the base beside us, or found from the adapter
        named = os.path.join(where, "base") if where == ".." else "base"
        lora.save_adapter(model, "adapter", base=named, step=3)
        again, own = checkpoint.load_model_dir("adapter")
        assert near(again(ids), model(ids)) and again(ids).shape[-1] == 259
        assert own.special["<|im_end|>"] == 258 and type(again.head) is nn.Parameter
    os.remove("adapter/tokenizer.json")
    assert checkpoint.load_model_dir("adapter")[1].vocab_size == 257   # the base's
    assert checkpoint.published_step("adapter") == 3


@pytest.mark.parametrize("named", ["org/model", "", ".", "adapter"])
def test_a_base_that_is_not_there_is_named_with_the_places(named):
    lora.save_adapter(lora.adapt(tiny(), 2, 4), "adapter", base=named)
    os.chdir("adapter")
    with pytest.raises(UserError, match="neither .* nor .* directory"):
        checkpoint.load_model_dir(".")


def test_a_grown_vocabulary_begins_with_the_mean_of_the_rows_in_use():
    model = tiny(tie_word_embeddings=False)
    before, logits = copy.deepcopy(model), model(IDS)
    assert model.extend_vocabulary(270, [258, 264], used=257) is model
    for new, old in ((model.head, before.head), (model.model.embed_tokens.weight,
                                                 before.model.embed_tokens.weight)):
        assert new.shape == (270, 28) and new.requires_grad
        kept = [*range(258), *range(259, 264)]
        assert torch.equal(new[kept], old[kept])
        for row in (258, 264, 269):
            torch.testing.assert_close(new[row], old[:257].mean(0))
    assert model.cfg.vocab_size == 270 and before.cfg.vocab_size == 264
    assert near(model(IDS[:, :28])[..., :257], logits[:, :28, :257])      # without tokens that are new
    weight = model.head
    assert model.extend_vocabulary(100, [], used=257).head is weight and len(weight) == 270   # never less
    checkpoint.save_model_dir(model, None, "m")
    assert torch.equal(checkpoint.load_model_dir("m")[0](IDS), model(IDS))


def test_a_refused_write_leaves_the_adapter_that_was_there(monkeypatch):
    model = lora.adapt(tiny(), 2, 4)
    lora.save_adapter(model, "adapter", base="base")
    before = Path("adapter/adapter_model.safetensors").read_bytes()

    def full(source, target):
        raise OSError(28, "No space left on device")
    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(UserError, match="No space left on device; what was there before is intact"):
        lora.save_adapter(shaken(model), "adapter", base="base")
    assert Path("adapter/adapter_model.safetensors").read_bytes() == before


# ---- refused ----------------------------------------------------------------------------------------------

@pytest.mark.parametrize("how,says", [
    (dict(rank=0), "rank=0"), (dict(rank=10_000), "rank=10,000 is more than any"),
    (dict(dropout=1.0), "dropout=1.0"), (dict(targets=[]), "targets is empty"),
    (dict(targets=["q_proj", "query"]), "'query'.*use some of q_proj, k_proj, .*down_proj"),
    (dict(targets=["lm_head"]), "'lm_head'"), (dict(targets=["proj"]), "'proj'"),
    (dict(new_ids=[3, 264]), "from 3 to 264, but the model has 264 rows")])
def test_what_cannot_be_adapted_is_refused_and_the_model_stays_as_it_was(how, says):
    model = tiny()
    with pytest.raises(UserError, match=says):
        lora.adapt(model, **{"rank": 2, "alpha": 4, **how})
    assert len(lora.trained(model)) == len(model.state_dict())


def test_an_adapter_on_an_adapter_is_refused():
    model = lora.adapt(tiny(), 2, 4)
    lora.save_adapter(model, "adapter", base="base")
    for again in (lambda: lora.adapt(model, 2, 4), lambda: lora.load_adapter(model, "adapter")):
        with pytest.raises(UserError, match="merge it first"):
            again()


@pytest.mark.parametrize("changes", [
    dict(peft_type="IA3"), dict(use_dora=True), dict(bias="all"), dict(init_lora_weights="pissa_niter_4"),
    dict(alora_invocation_tokens=[1]), dict(layer_replication=[[0, 2]])])
def test_kinds_that_we_do_not_compute_are_refused_by_name(changes):
    written(lora.adapt(tiny(), 2, 4), **changes)
    (key, value), = changes.items()
    with pytest.raises(UserError, match=f"{key}=.*merge it with peft"):
        lora.load_adapter(tiny(), "adapter")


@pytest.mark.parametrize("fault,says", [
    ("wide", r"q_proj is \[24, 60\], but lora_A \[2, 28\] and lora_B \[24, 2\]. Its base is base"),
    ("deep", "14 tensors that this model has no place for: .*model.layers.1"),
    ("half", r"lora_A \[2, 28\] and lora_B \[0\]"), ("more", "1 tensors .*lora_magnitude_vector"),
    ("indices", r"\[\[1, 28\]\] for 2 ids of trainable_token_indices"),
    ("untied", "a head that is not its embedding"), ("half tied", "a head that is not its embedding"),
    ("none", "no adapter_model.safetensors"), ("torn", "not a readable safetensors file")])
def test_adapters_that_do_not_fit_are_refused_and_the_model_stays_as_it_was(fault, says):
    written(lora.adapt(tiny(), 2, 4, new_ids=[260]),
            **(dict(trainable_token_indices=[3, 4]) if fault == "indices" else {}))
    file, changed = Path("adapter/adapter_model.safetensors"), {}
    tensors, whole = load_file(file), tiny().head.detach()
    layer = "base_model.model.model.layers.0.self_attn.q_proj."
    if fault == "half":
        del tensors[layer + "lora_B.weight"]
    changed = {"more": {layer + "lora_magnitude_vector": torch.ones(24)},
               "untied": {"base_model.model.lm_head.weight": whole},
               "half tied": {"base_model.model.model.embed_tokens.weight": whole}}.get(fault, {})
    save_file({**tensors, **changed}, file)
    if fault == "none":
        file.unlink()
    elif fault == "torn":
        os.truncate(file, 1000)
    model = tiny(**{"wide": dict(hidden_size=60), "deep": dict(num_hidden_layers=1)}.get(fault, {}))
    kinds = [type(m) for m in model.modules()]
    with pytest.raises(UserError, match=says):
        lora.load_adapter(model, "adapter")
    assert [type(m) for m in model.modules()] == kinds and len(lora.trained(model)) == len(model.state_dict())
