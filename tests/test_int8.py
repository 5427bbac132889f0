"""kernels/int8.py: 8-bit weights give the same products, and hardly another loss on text that was learned."""
import argparse
import copy

import pytest
import torch
import torch.nn.functional as F

from config import UserError
from kernels.int8 import Int8Linear, check_products, int8_linear, quantize, reference
from model import Model, ModelConfig


@pytest.mark.parametrize("shape", [(1, 1, 67), (5, 67), (2, 33, 67)], ids=str)
@pytest.mark.parametrize("biased", [False, True])
def test_product_equals_the_one_in_floating_point(shape, biased):
    torch.manual_seed(0)
    x, (weight, scale) = torch.randn(shape) * 10, quantize(torch.randn(35, 67))
    bias = torch.randn(35) if biased else None
    got, wanted = int8_linear(x, weight, scale, bias), reference(x, weight, scale, bias)
    assert got.shape == wanted.shape
    assert (got - wanted).norm() < 1e-4 * wanted.norm()


def test_weights_are_off_by_at_most_half_a_step():
    torch.manual_seed(0)
    weight = torch.randn(50, 20) * torch.logspace(-6, 6, 50)[:, None]
    weight[7] = 0
    eight, scale = quantize(weight)
    assert eight.dtype == torch.int8 and (eight.abs().amax(1) == 127).sum() == 49
    assert ((eight * scale[:, None] - weight).abs() <= scale[:, None] * 0.5001).all()
    assert (int8_linear(torch.randn(3, 20), eight, scale)[:, 7] == 0).all()
    assert (int8_linear(torch.zeros(3, 20), eight, scale) == 0).all()


def test_a_row_does_not_depend_on_the_others_in_its_batch():
    torch.manual_seed(0)
    x, (weight, scale) = torch.randn(9, 64) * torch.logspace(-3, 3, 9)[:, None], quantize(torch.randn(48, 64))
    together = int8_linear(x, weight, scale)
    assert all(torch.equal(int8_linear(row[None], weight, scale)[0], y) for row, y in zip(x, together))


def fresh(**changes) -> Model:
    shape = dict(vocab_size=256, hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
                 num_key_value_heads=2, head_dim=16, intermediate_size=128, max_position_embeddings=64)
    return Model(ModelConfig(**shape, **changes)).init_weights(0)


@pytest.mark.parametrize("changes", [{}, dict(model_type="llama", attention_bias=True, mlp_bias=True,
                                              tie_word_embeddings=False)], ids=["tied", "untied-biases"])
def test_a_model_in_int8_has_nearly_the_same_logits(changes):
    model, ids = fresh(initializer_range=0.1, **changes), torch.arange(40).view(2, 20)
    with torch.inference_mode():
        for name, p in model.named_parameters():
            if name.endswith("bias"):
                p.copy_(torch.linspace(-1, 1, len(p)))     # another for q, k, v, gate, up
        wanted, got = model(ids), copy.deepcopy(model).in_int8()(ids)
    assert 0 < (got - wanted).norm() < 0.05 * wanted.norm()


def learned(text: torch.Tensor) -> Model:
    """A model of bytes, trained for some seconds: what rounding costs shows on weights that know much."""
    model = fresh()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        start = torch.randint(len(text) - 65, (16,), generator=generator)
        ids = torch.stack([text[i:i + 65] for i in start])
        loss, valid = model(ids[:, :-1], labels=ids[:, 1:])
        (loss / valid).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def test_loss_on_real_text_changes_by_less_than_a_hundredth():
    with open(argparse.__file__, "rb") as file:
        text = torch.tensor(list(file.read(50_000)))
    model = learned(text)
    ids = text[:64 * 100 + 1]
    with torch.inference_mode():
        exact, coarse = (F.cross_entropy(m(ids[:-1].view(100, 64)).flatten(0, 1), ids[1:]).item()
                         for m in (model, copy.deepcopy(model).in_int8()))
    assert exact < 2.7                                     # of 5.5 at the start
    assert 0 < abs(coarse - exact) < 0.01


def test_processors_whose_products_overflow_are_refused(monkeypatch):
    def saturating(a, b):                                  # what x86 does without 8-bit dot products
        pairs = ((a.int()[:, :, None] + 128) * b.int()[None]).unflatten(1, (-1, 2)).sum(2)
        return pairs.clamp(-2**15, 2**15 - 1).sum(1) - 128 * b.sum(0)
    check_products(torch.device("cpu"))
    check_products.cache_clear()
    monkeypatch.setattr(torch, "_int_mm", saturating)
    with pytest.raises(UserError, match="they overflow: use fp32"):
        Int8Linear(torch.randn(4, 4))
    with pytest.raises(UserError, match="for the CPU, not for device=cuda"):
        check_products(torch.device("cuda"))
