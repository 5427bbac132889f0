"""model.py against transformers (logits, gradients), and its promises: cache, masks, chunked loss, sizes."""
import copy
import itertools

import pytest
import torch
from safetensors.torch import load_file, save_file

import checkpoint
import kernels.loss as loss_kernel
from config import UserError
from model import (Cache, Model, ModelConfig, Replay, context, count_parameters, draw, generate, pick,
                   shape_for)

# odd sizes, so that a swapped dimension cannot pass
ODD = dict(vocab_size=131, hidden_size=54, num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=2,
           head_dim=10, intermediate_size=72, max_position_embeddings=64)
CASES = {
    "qwen3": dict(model_type="qwen3", rms_norm_eps=1e-5),
    "qwen3-untied-bias": dict(model_type="qwen3", tie_word_embeddings=False, attention_bias=True,
                               rope_theta=5e5),
    "qwen3-sliding": dict(model_type="qwen3", sliding_window=7,
                          layer_types=["full_attention", "sliding_attention", "sliding_attention"]),
    "qwen3-yarn": dict(model_type="qwen3", rope_scaling={"rope_type": "yarn", "factor": 4.0,
                                                         "original_max_position_embeddings": 16}),
    "llama": dict(model_type="llama"),
    "llama-bias": dict(model_type="llama", mlp_bias=True, attention_bias=True, tie_word_embeddings=False),
    "llama3": dict(model_type="llama", rope_scaling={
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32}),
    "llama-linear": dict(model_type="llama", rope_scaling={"rope_type": "linear", "factor": 2.0}),
}
JUDGE = """
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
torch.set_num_threads(1)
for case in {cases}:
    model, loading = AutoModelForCausalLM.from_pretrained(
        case, dtype=torch.float32, attn_implementation="eager", output_loading_info=True)
    assert not loading["missing_keys"] and not loading["unexpected_keys"], loading
    ids = load_file("ids.safetensors")["ids"]
    logits = model(ids).logits
    torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(),
                                      reduction="sum").backward()
    save_file({{"logits": logits.detach(), **{{n: p.grad for n, p in model.named_parameters()}}}},
              case + ".safetensors")
"""


def tiny(seed: int = 0, **changes) -> Model:
    """A small model with weights that matter (norms and biases too)."""
    model = Model(ModelConfig(**{**ODD, **changes})).init_weights(seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=generator) * (0.2 if p.ndim > 1 else 0.3))
    return model


def some_ids(*shape, vocab: int = ODD["vocab_size"], seed: int = 1) -> torch.Tensor:
    return torch.randint(0, vocab, shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def judged(oracle, tmp_path_factory):
    """Every case's logits and gradients as transformers computes them from the directory that we saved."""
    directory = tmp_path_factory.mktemp("families")
    save_file({"ids": some_ids(2, 45)}, directory / "ids.safetensors")
    for name, changes in CASES.items():
        checkpoint.save_model_dir(tiny(**changes), None, directory / name)
    oracle.run(JUDGE.format(cases=list(CASES)), directory)
    return directory


@pytest.mark.parametrize("name", CASES)
def test_logits_and_all_gradients_equal_transformers(judged, name):
    model, ids = tiny(**CASES[name]), some_ids(2, 45)
    theirs = load_file(judged / f"{name}.safetensors")
    logits = model(ids)
    wanted = theirs.pop("logits")
    assert (logits - wanted).norm() <= 1e-5 * wanted.norm()
    model(ids[:, :-1], labels=ids[:, 1:])[0].backward()
    ours = {n: p.grad for n, p in model.named_parameters()}
    assert ours.keys() == theirs.keys()
    for n, grad in ours.items():
        assert (grad - theirs[n]).norm() <= 1e-5 * theirs[n].norm(), n


@pytest.mark.parametrize("name", CASES)
def test_a_saved_model_comes_back_with_the_same_config_and_weights(judged, name):
    model, again = tiny(**CASES[name]), checkpoint.load_model_dir(judged / name)[0]
    assert again.cfg == model.cfg
    assert all(torch.equal(p, q) for p, q in zip(model.state_dict().values(), again.state_dict().values()))
    assert torch.equal(model(some_ids(1, 20)), again(some_ids(1, 20)))


# ---- loss -------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("rows,chunk", [(37, 8), (8, 8), (5, 100)])
def test_chunked_loss_and_its_gradients_equal_cross_entropy(rows, chunk):
    torch.manual_seed(0)
    hidden, weight = torch.randn(rows, 12, requires_grad=True), torch.randn(50, 12, requires_grad=True)
    labels = torch.randint(0, 50, (rows,))
    labels[::3] = -100
    expected = loss_kernel.reference(hidden, weight, labels)
    wanted = torch.autograd.grad(expected * 0.7, (hidden, weight))
    loss = loss_kernel.linear_cross_entropy(hidden, weight, labels, chunk)
    got = torch.autograd.grad(loss * 0.7, (hidden, weight))
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)
    for g, w in zip(got, wanted):
        torch.testing.assert_close(g, w, rtol=1e-5, atol=1e-6)


def test_loss_never_holds_more_logits_than_a_chunk():
    seen = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            seen.extend(t.numel() for t in torch.utils._pytree.tree_leaves(out)
                        if isinstance(t, torch.Tensor))
            return out

    hidden, weight = torch.randn(512, 4, requires_grad=True), torch.randn(1000, 4, requires_grad=True)
    with Watch():
        loss_kernel.linear_cross_entropy(hidden, weight, torch.randint(0, 1000, (512,)), chunk=64).backward()
    assert max(seen) == 64 * 1000


def test_a_second_backward_through_the_loss_is_refused():
    hidden, weight = torch.randn(6, 4, requires_grad=True), torch.randn(50, 4, requires_grad=True)
    loss = loss_kernel.linear_cross_entropy(hidden, weight, torch.randint(0, 50, (6,)))
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="inplace"):
        loss.backward()


def test_without_gradients_none_are_made():
    made = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            made.extend(t.shape for t in torch.utils._pytree.tree_leaves(out)
                        if isinstance(t, torch.Tensor) and t.data_ptr() != weight.data_ptr())
            return out

    hidden, weight = torch.randn(6, 4), torch.nn.Parameter(torch.randn(50, 4))
    with torch.no_grad(), Watch():
        loss_kernel.linear_cross_entropy(hidden, weight, torch.randint(0, 50, (6,)))
    assert (50, 4) not in made and (6, 50) in made


def test_a_label_outside_the_vocabulary_is_an_error_and_not_ignored():
    for label in (-1, 50):
        with pytest.raises((RuntimeError, IndexError)):
            loss_kernel.linear_cross_entropy(torch.randn(1, 4), torch.randn(50, 4), torch.tensor([label]))


def test_rows_without_labels_give_zero_and_no_nan():
    model, ids = tiny(), some_ids(2, 9)
    loss, valid = model(ids, labels=torch.full_like(ids, -100))
    loss.backward()
    assert loss.item() == 0 and valid.item() == 0
    assert all(p.grad.abs().max() == 0 for p in model.parameters())


# ---- attention --------------------------------------------------------------------------------------------

@pytest.mark.parametrize("changes", [{}, {"sliding_window": 5}], ids=["full", "sliding"])
def test_packed_documents_equal_documents_alone(changes):
    model, a, b = tiny(**changes), some_ids(1, 11), some_ids(1, 14, seed=2)
    packed = torch.cat((a, b), 1)
    documents = torch.tensor([[0] * 11 + [1] * 14])
    together = model(packed, documents=documents)
    torch.testing.assert_close(together[:, :11], model(a), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(together[:, 11:], model(b), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("recompute", ["attention", "layer"])
def test_recomputation_changes_no_gradient(recompute):
    ids, gradients = some_ids(2, 12), []
    for what in ("none", recompute):
        model = tiny().recomputing(what)
        model(ids[:, :-1], labels=ids[:, 1:])[0].backward()
        gradients.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients))


# ---- cache and generation ---------------------------------------------------------------------------------

@pytest.mark.parametrize("changes", [{}, {"sliding_window": 5}], ids=["full", "sliding"])
def test_cached_states_equal_the_full_pass(changes):
    model, ids = tiny(**changes), some_ids(2, 17)
    full, cache = model(ids), Cache(model, 2, 17)
    parts = [model(ids[:, a:b], cache=cache) for a, b in ((0, 6), (6, 7), (7, 12), (12, 17))]
    torch.testing.assert_close(torch.cat(parts, 1), full, rtol=1e-4, atol=1e-4)


def collect(model, prompts, n, **options):
    return [list(row) for row in zip(*generate(model, prompts, n, **options))]


def test_cache_never_changes_the_text_even_past_the_context_limit():
    model = tiny(max_position_embeddings=16)
    prompts = [some_ids(5).tolist(), some_ids(11, seed=3).tolist(), some_ids(40, seed=4).tolist()]
    for model in (model, copy.deepcopy(model).in_int8()):
        cached = collect(model, prompts, 30, temperature=0)
        assert cached == collect(model, prompts, 30, temperature=0, cached=False)
        assert cached == [collect(model, [p], 30, temperature=0)[0] for p in prompts]


@pytest.mark.parametrize("changes", [{}, {"sliding_window": 5}], ids=["full", "sliding"])
def test_steps_on_fixed_memory_write_the_same_text(changes):
    """What CUDA replays as a graph; the addresses must not change."""
    model, prompts = tiny(max_position_embeddings=16, **changes), [[1, 2, 3], some_ids(9).tolist()]
    for some in (prompts, prompts[:1], [prompts[1], prompts[1][::-1]]):
        for how in (dict(temperature=0), dict(temperature=1.0, top_k=20)):
            plain, fixed = (collect(model, some, 40, replayed=replayed, **how,
                                    generator=torch.Generator().manual_seed(1)) for replayed in (False, True))
            assert plain == fixed
    with torch.inference_mode():
        cache = Cache(model, 1, 16)
        model(torch.tensor([[1, 2, 3]]), cache=cache)
        replay, addresses = Replay(model, cache), [t.data_ptr() for t in (*cache.keys, *cache.values)]
        for id in range(4, 10):
            replay.step(torch.tensor([[id]]))
    assert cache.length == 9 and addresses == [t.data_ptr() for t in (*cache.keys, *cache.values)]


def test_window_slides_by_half_of_the_context():
    assert context(list(range(8)), 8) == list(range(8))
    assert context(list(range(9)), 8) == [4, 5, 6, 7, 8]
    assert context(list(range(12)), 8) == list(range(4, 12))
    assert context(list(range(13)), 8) == list(range(8, 13))


def test_padding_of_the_vocabulary_is_never_drawn():
    model = tiny()
    with torch.no_grad():
        model.model.norm.weight.zero_()                    # all logits equal: any id would be drawn
    drawn = itertools.chain(*collect(model, [[1], [2]], 200, vocab_size=100,
                                     generator=torch.Generator().manual_seed(0)))
    assert max(drawn) < 100


def test_sampling_filters_keep_what_they_promise():
    logits = torch.log(torch.tensor([[0.5, 0.25, 0.15, 0.1]])).repeat(2000, 1)
    generator = torch.Generator().manual_seed(0)

    def drawn(**options):
        defaults = dict(seen=None, temperature=1.0, top_k=None, top_p=None, min_p=None,
                        repetition_penalty=1.0)
        return sorted(set(pick(logits, generator=generator, **{**defaults, **options}).tolist()))

    assert drawn() == [0, 1, 2, 3]
    assert drawn(temperature=0) == [0]
    assert drawn(top_k=2) == [0, 1]
    assert drawn(top_p=0.7) == [0, 1] and drawn(top_p=0.5) == [0]
    assert drawn(min_p=0.25) == [0, 1, 2]
    assert drawn(top_k=3, top_p=0.8) == [0, 1]             # of the three kept: .56 + .28 >= .8
    seen = [torch.tensor([0])] * len(logits)
    assert drawn(temperature=0, seen=seen, repetition_penalty=3.0) == [1]


def test_top_p_is_exact_where_the_likeliest_thousand_are_not_enough():
    flat = torch.linspace(1, 0, 5000)[None]
    descending = flat[0].softmax(-1)
    wanted = int((descending.cumsum(0) - descending < 0.5).sum())          # 1,888 of them
    drawn = pick(flat.expand(4_000, -1), [], torch.Generator().manual_seed(0), 1.0, top_p=0.5)
    assert wanted - 100 < drawn.max() < wanted


def test_tokens_are_drawn_as_often_as_their_probability_says():
    probabilities = torch.tensor([[0.0, 0.2, 0.0, 0.5, 0.1, 0.0]]).repeat(100_000, 1)      # of 0.8
    drawn = draw(probabilities, torch.Generator().manual_seed(0))
    counts = drawn[:, 0].bincount(minlength=6)
    assert counts[[0, 2, 5]].sum() == 0
    torch.testing.assert_close(counts / 1e5, probabilities[0] / 0.8, rtol=0, atol=0.006)   # 4 sigma
    with pytest.raises(UserError, match="logits are NaN"):
        draw(torch.full((2, 6), torch.nan), None)


# ---- shapes -----------------------------------------------------------------------------------------------

@pytest.mark.parametrize("vocab", [320, 4096, 32768, 50304])
def test_shape_is_within_two_percent_where_the_embedding_takes_at_most_half(vocab):
    for params in (5e6, 1e7, 2e7, 5e7, 1.24e8, 3.5e8, 1e9, 7e9):
        shape, warnings = shape_for(int(params), vocab)
        real = count_parameters(ModelConfig(vocab_size=vocab, **shape))
        H, G, L = shape["num_attention_heads"], shape["num_key_value_heads"], shape["num_hidden_layers"]
        assert L >= 4 and shape["head_dim"] == 64 and H % G == 0 and (H < 4 or G >= 2)
        if vocab * shape["hidden_size"] <= real / 2:
            assert abs(real - params) <= 0.02 * params and not warnings
            assert 1.5 <= shape["intermediate_size"] / shape["hidden_size"] <= 4
        else:
            assert "embedding takes" in warnings[0]


def test_an_untied_head_counts_in_the_shape():
    shape, warnings = shape_for(60_000_000, 32768, {"tie_word_embeddings": False})
    assert "embedding takes" in warnings[0]
    real = count_parameters(ModelConfig(vocab_size=32768, tie_word_embeddings=False, **shape))
    assert abs(real - 60e6) < 1.2e6
    with pytest.raises(UserError) as error:
        shape_for(2_000_000, 32768, {"tie_word_embeddings": False})
    fits = int(str(error.value).rsplit("at most ", 1)[1].split()[0].replace(",", ""))
    assert shape_for(2_000_000, fits, {"tie_word_embeddings": False})


def test_given_fields_stay_and_the_rest_fills_the_budget():
    shape, _ = shape_for(30_000_000, 8192, {"num_hidden_layers": 12, "num_key_value_heads": 1})
    assert shape["num_hidden_layers"] == 12 and shape["num_key_value_heads"] == 1
    assert abs(count_parameters(ModelConfig(vocab_size=8192, **shape)) - 30e6) < 0.6e6


def test_vocabulary_larger_than_the_budget_is_refused_with_the_largest_that_fits():
    with pytest.raises(UserError, match=r"at most ([\d,]+) entries") as error:
        shape_for(1_000_000, 50304)
    fits = int(str(error.value).rsplit("at most ", 1)[1].split()[0].replace(",", ""))
    assert shape_for(1_000_000, fits)


@pytest.mark.parametrize("changes,says", [
    ({"num_key_value_heads": 4}, "not divisible"), ({"head_dim": 9}, "odd"),
    ({"vocab_size": None}, "vocab_size"),
    ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
    ({"rope_scaling": {"rope_type": "yarn"}}, "needs factor"),
    ({"layer_types": ["full_attention"]}, "layer_types"),
    ({"model_type": "llama", "sliding_window": 8}, "llama")])
def test_shapes_that_cannot_be_built_are_refused(changes, says):
    with pytest.raises(UserError, match=says):
        Model(ModelConfig(**{**ODD, **changes}))


def test_init_depends_on_seed_and_name_only():
    small, deep = (Model(ModelConfig(**{**ODD, "num_hidden_layers": n})).init_weights(7) for n in (2, 3))
    name = "model.layers.1.mlp.up_proj.weight"
    assert torch.equal(small.state_dict()[name], deep.state_dict()[name])
    assert not torch.equal(small.state_dict()[name], Model(small.cfg).init_weights(8).state_dict()[name])


@pytest.mark.parametrize("shape", [
    {}, {"model_type": "llama", "num_key_value_heads": 4}, {"sliding_window": 3},
    {"sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"]}])
def test_documents_apart_are_those_behind_a_mask(shape, monkeypatch):
    """Their loss and gradients, with documents that end with a row, and one that is as long as it."""
    small = dict(vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, head_dim=8,
                 num_key_value_heads=2, intermediate_size=48)
    model = Model(ModelConfig(**{**small, **shape})).init_weights(0)
    ids, labels = torch.randint(0, 50, (2, 3, 12), generator=torch.Generator().manual_seed(0))
    documents = torch.tensor([[0] * 5 + [1] + [2] * 6, [7] * 12, [3, 3, 1, 1, 1, 1, 4, 4, 4, 4, 4, 4]])
    assert model.lengths(documents) == [5, 1, 6, 12, 2, 4, 6]
    assert model.lengths(torch.tensor([[0, 1, 0, 0]])) is None        # in pieces: a mask says what it sees
    found = []
    for _ in range(2):
        model.zero_grad()
        loss, _ = model(ids, labels=labels, documents=documents)
        loss.backward()
        found.append((loss.detach(), [p.grad.clone() for p in model.parameters()]))
        monkeypatch.setattr(Model, "lengths", lambda self, documents: None)
    (loss, gradients), (wanted, others) = found
    torch.testing.assert_close(loss, wanted, rtol=1e-6, atol=0)
    for gradient, other in zip(gradients, others):
        assert (gradient - other).norm() <= 1e-5 * other.norm()
