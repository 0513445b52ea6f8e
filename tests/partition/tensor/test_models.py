"""Whole models over two and four ranks: results, every gradient by name, and buffers are those of one device."""

import itertools

import pytest
import torch
from torch import nn

from lightning_mgpu.examples.cnn import CNN
from lightning_mgpu.examples.linear import Linear, TwoLayerLinear
from tests.partition.tensor.lowered import Lowered, roles
from tests.partition.tensor.models import (
    Bottleneck,
    FusedWays,
    GroupedQueries,
    SeparateHeads,
    SharedLayers,
    TiedGpt,
    TransposedHead,
)
from tests.zoo import hf

TOLERANCE = 1e-9
SINGLE = 1e-6  # for models that compute in single precision themselves


def mlp(*widths):
    layers = [layer for a, b in itertools.pairwise(widths) for layer in (nn.Linear(a, b), nn.GELU())]
    return nn.Sequential(*layers[:-1])


def tokens(size=24):
    return torch.randint(size, (3, 6))


def _encoder(**options):
    layer = nn.TransformerEncoderLayer(8, 4, 16, dropout=0.0, batch_first=True, **options)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def _decoder():
    return nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 4, 16, dropout=0.0), 2, norm=nn.LayerNorm(8))


MODELS = {
    "linear": (Linear, lambda: (torch.randn(8, 10),), {}, (0.0, 0.0)),
    "two layers": (TwoLayerLinear, lambda: (torch.randn(8, 10),), {}, (0.96, 0.0)),
    "cnn": (CNN, lambda: (torch.randn(2, 1, 28, 28),), {}, (1.0, 0.96)),
    "mlp": (lambda: mlp(10, 64, 64, 32, 5), lambda: (torch.randn(3, 4, 10),), {}, (0.99, 0.99)),
    "mlp of odd width": (lambda: mlp(10, 63, 64, 6), lambda: (torch.randn(8, 10),), {}, (0.87, 0.87)),
    "tied": (TiedGpt, lambda: (tokens(),), {}, (0.9, 0.9)),
    "tied, split vocabulary": (TiedGpt, lambda: (tokens(),), {"gather_min": 256}, (0.95, 0.95)),
    "tied, three heads": (lambda: TiedGpt(12, 3, 25), lambda: (tokens(25),), {"gather_min": 256}, (0.8, 0.8)),
    "tied by a transpose": (TransposedHead, lambda: (tokens(),), {"gather_min": 256}, (1.0, 1.0)),
    "shared layers": (SharedLayers, lambda: (torch.randn(2, 5, 6),), {}, (0.9, 0.9)),
    "odd heads": (lambda: SeparateHeads(3), lambda: (torch.randn(2, 5, 12),), {}, (0.48, 0.48)),
    "fused": (FusedWays, lambda: (torch.randn(2, 5, 8),), {}, (0.97, 0.97)),
    "grouped": (GroupedQueries, lambda: (torch.randn(2, 5, 16),), {}, (0.98, 0.98)),
    "grouped in twos": (lambda: GroupedQueries(8, 2), lambda: (torch.randn(2, 5, 16),), {}, (0.98, 0.0)),
    "residual convolutions": (Bottleneck, lambda: (torch.randn(2, 3, 8, 8),), {}, (0.9, 0.9)),
    "encoder": (_encoder, lambda: (torch.randn(2, 5, 8),), {}, (0.92, 0.92)),
    "norm first": (lambda: _encoder(norm_first=True, activation="gelu"), lambda: (torch.randn(2, 5, 8),), {}, (0.92, 0.92)),
    "decoder": (_decoder, lambda: (torch.randn(4, 2, 8), torch.randn(5, 2, 8)), {}, (0.91, 0.91)),
    "transformer": (
        lambda: nn.Transformer(8, 4, 1, 1, 16, dropout=0.0, batch_first=True),
        lambda: (torch.randn(2, 4, 8), torch.randn(2, 5, 8)),
        {},
        (0.9, 0.9),
    ),
    "gpt2": (lambda: hf.Gpt2().model, lambda: (hf.padded_batch(2),), {"gather_min": 512}, (0.98, 0.99)),
    "bert": (lambda: hf.Bert().model, lambda: (hf.padded_batch(2),), {}, (0.87, 0.64)),
    "llama": (lambda: hf.Llama().model, lambda: (hf.padded_batch(2),), {}, (0.85, 0.74)),
    "vit": (lambda: hf.Vit().model, lambda: ({"pixel_values": torch.randn(2, 3, 8, 8)},), {}, (0.86, 0.61)),
    "t5": (
        lambda: hf.T5().model,
        lambda: ({**hf.padded_batch(2), "labels": torch.randint(1, 40, (8, 5))},),
        {},
        (0.95, 0.95),
    ),
}  # fmt: skip


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_in_parts_is_the_model(name, num_ranks, double):
    module, arguments, options, shares = MODELS[name]
    lowered = Lowered(module(), num_ranks, *arguments(), **options)
    tolerance = SINGLE if name in ("llama", "t5") else TOLERANCE

    assert round(lowered.plan.share, 2) == shares[num_ranks // 4], roles(lowered.plan)
    lowered.compare(*arguments(), tolerance=tolerance)


@pytest.mark.parametrize("name", ["tied", "residual convolutions", "encoder", "llama"])
def test_in_evaluation_without_gradient(name, double):
    module, arguments, options, _ = MODELS[name]
    lowered = Lowered(module().eval(), 2, *arguments(), **options)
    with torch.no_grad():
        lowered.compare(*arguments(), tolerance=SINGLE if name == "llama" else TOLERANCE)
