"""``nn.MultiheadAttention`` as it is recorded for tensor parallelism: the layer's own numbers, with any arguments, in parts."""

import pytest
import torch
from torch import nn

from lightning_mgpu.partition.names import Names
from lightning_mgpu.partition.record import Recorder
from lightning_mgpu.partition.tensor.attention import opened_attention
from tests.partition.tensor.lowered import Lowered, roles

B, T, S, E = 2, 3, 5, 8


class Caller(nn.Module):
    def __init__(self, attention, own=False, **options):
        super().__init__()
        self.attention = attention
        self.options = options
        self.own = own

    def forward(self, query, key=None, value=None, **masks):
        key = query if key is None else key
        return self.attention(query, key, key if value is None else value, **masks, **self.options)


def _masks(**shapes):
    return {name: torch.rand(shape) < 0.3 for name, shape in shapes.items()}


CASES = {
    "itself": ({}, lambda: (torch.randn(B, T, E),), {}),
    "time first": ({"batch_first": False}, lambda: (torch.randn(T, B, E),), {}),
    "without a batch": ({}, lambda: (torch.randn(T, E),), {}),
    "another": ({}, lambda: (torch.randn(B, T, E), torch.randn(B, S, E)), {}),
    "keys and values": ({}, lambda: (torch.randn(B, T, E), torch.randn(B, S, E), torch.randn(B, S, E)), {}),
    "other widths": ({"kdim": 6, "vdim": 4}, lambda: (torch.randn(B, T, E), torch.randn(B, S, 6), torch.randn(B, S, 4)), {}),
    "no bias": ({"bias": False}, lambda: (torch.randn(B, T, E), torch.randn(B, S, E)), {}),
    "masked": ({}, lambda: (torch.randn(B, T, E), {"attn_mask": torch.ones(T, T, dtype=torch.bool).triu(1)}), {}),
    "masked by numbers": ({}, lambda: (torch.randn(B, T, E), {"attn_mask": torch.randn(T, T)}), {}),
    "masked by head": ({}, lambda: (torch.randn(B, T, E), {"attn_mask": torch.randn(B * 4, T, T)}), {}),
    "padded": ({}, lambda: (torch.randn(B, T, E), {"key_padding_mask": torch.tensor([[0, 0, 1], [0, 0, 0]]).bool()}), {}),
    "causal": ({}, lambda: (torch.randn(B, T, E), {"attn_mask": torch.ones(T, T).triu(1).bool(), "is_causal": True}), {}),
    "both masks": (
        {},
        lambda: (
            torch.randn(B, T, E),
            {"attn_mask": torch.ones(T, T).triu(1).bool(), "key_padding_mask": torch.tensor([[0, 0, 1], [0, 0, 0]]).bool()},
        ),
        {},
    ),
    "weights by head": ({}, lambda: (torch.randn(B, T, E), torch.randn(B, S, E)), {"average_attn_weights": False}),
}  # fmt: skip


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_attention_in_parts_is_the_layer(name, need_weights, double):
    settings, arguments, options = CASES[name]
    attention = nn.MultiheadAttention(E, 4, **{"batch_first": True} | settings)
    args = arguments()
    lowered = Lowered(Caller(attention, need_weights=need_weights, **options), 2, *args)

    assert roles(lowered.plan) == {"attention": "column", "attention.out_proj": "row"}
    lowered.compare(*args, tolerance=1e-9)


def test_dropout_repeats_the_draws_of_the_layer(double):
    """In one piece, the written-out forward draws what the layer draws."""
    attention = nn.MultiheadAttention(E, 4, dropout=0.5, batch_first=True)
    x = torch.randn(B, T, E)
    torch.manual_seed(1)
    expected = attention(x, x, x)
    torch.manual_seed(1)
    found = opened_attention(attention)(x, x, x)

    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("options", [{"add_bias_kv": True}, {"add_zero_attn": True}])
def test_attention_with_rows_of_its_own_stays_whole(options, double):
    attention = nn.MultiheadAttention(E, 4, batch_first=True, **options)
    x = torch.randn(B, T, E)
    lowered = Lowered(Caller(attention), 2, x)

    assert set(roles(lowered.plan).values()) == {"whole"}
    lowered.compare(x, tolerance=1e-9)


def test_hooks_keep_attention_whole(double):
    seen = []
    attention = nn.MultiheadAttention(E, 4, batch_first=True)
    attention.register_forward_hook(lambda module, args, output: (output[0] * 2, output[1]))
    x = torch.randn(B, T, E)
    lowered = Lowered(Caller(attention), 2, x)

    assert set(roles(lowered.plan).values()) == {"whole"}
    lowered.compare(x, tolerance=1e-9)
    assert seen == []


def test_attention_may_be_the_recorded_module():
    attention = nn.MultiheadAttention(E, 4, batch_first=True)
    x = torch.randn(B, T, E)
    names = Names(attention)
    opened, closed = (
        [node.name for node in Recorder(names, *way).record(attention, (x, x, x), {}).graph.nodes]
        for way in ((opened_attention,), ())
    )

    assert "chunk" in opened
    assert "multi_head_attention_forward" in closed
