"""Models to split that the zoo does not have."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class TiedGpt(nn.Module):
    """A GPT with a fused query, key and value, a causal mask in a buffer, dropout, and a head that is its embedding."""

    def __init__(self, width: int = 16, num_heads: int = 4, vocabulary: int = 24, dropout: float = 0.0) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, width, padding_idx=0)
        self.positions = nn.Parameter(torch.randn(8, width) / 4)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(GptBlock(width, num_heads, dropout) for _ in range(2))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.words.weight

    def forward(self, words: Tensor) -> Tensor:
        h = self.drop(self.words(words) + self.positions[: words.shape[1]])
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h))


class GptBlock(nn.Module):
    def __init__(self, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc, self.out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.attention_drop, self.drop = nn.Dropout(dropout), nn.Dropout(dropout)
        self.register_buffer("past", torch.ones(8, 8).tril().view(1, 1, 8, 8))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).split(width, dim=2)
        q, k, v = (t.view(batch, length, self.num_heads, width // self.num_heads).transpose(1, 2) for t in (q, k, v))
        scores = (q @ k.transpose(-2, -1)) * k.size(-1) ** -0.5
        scores = scores.masked_fill(self.past[:, :, :length, :length] == 0, float("-inf"))
        mixed = self.attention_drop(scores.softmax(-1)) @ v
        x = x + self.drop(self.proj(mixed.transpose(1, 2).contiguous().view(batch, length, width)))
        return x + self.out(self.drop(F.gelu(self.fc(self.norm2(x)))))


class GroupedQueries(nn.Module):
    """Attention whose query, key and value lie in one weight in unequal parts, keys and values in groups."""

    def __init__(self, num_heads: int = 8, num_groups: int = 4, size: int = 2) -> None:
        super().__init__()
        width = num_heads * size
        self.sizes = (num_heads, num_groups, num_groups)
        self.size = size
        self.qkv = nn.Linear(width, sum(self.sizes) * size, bias=False)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).split([count * self.size for count in self.sizes], dim=-1)
        q, k, v = (p.view(*x.shape[:2], -1, self.size).transpose(1, 2) for p in parts)
        times = self.sizes[0] // self.sizes[1]
        k, v = (t.repeat_interleave(times, dim=1) for t in (k, v))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Bottleneck(nn.Module):
    """Two residual blocks of convolutions, norms of both kinds and pooling, and a linear head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2))
        self.blocks = nn.ModuleList(ResidualBlock(norm) for norm in (nn.BatchNorm2d, lambda width: nn.GroupNorm(4, width)))
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        for block in self.blocks:
            h = block(h)
        return self.head(self.pool(h).flatten(1))


class ResidualBlock(nn.Module):
    def __init__(self, norm: type[nn.Module]) -> None:
        super().__init__()
        self.reduce, self.conv, self.widen = nn.Conv2d(8, 4, 1), nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.Conv2d(4, 8, 1)
        self.norm1, self.norm2, self.norm3 = norm(4), norm(4), norm(8)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.norm1(self.reduce(x)))
        h = F.relu(self.norm2(self.conv(h)), inplace=True)
        return F.relu(self.norm3(self.widen(h)) + x)


class FusedWays(nn.Module):
    """A fused weight taken apart in every way that models do it."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("view", "reshape", "chunk", "slices", "per_head", "gates"):
            self.add_module(name, nn.Linear(8, 24))
            self.add_module(f"{name}_out", nn.Linear(12 if name == "gates" else 8, 8))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        ways = [
            self.view(x).view(batch, length, 3, 4, 2).permute(2, 0, 3, 1, 4).unbind(0),
            self.reshape(x).reshape(batch, length, 3, 4, -1).permute(2, 0, 3, 1, 4),
            [t.unflatten(-1, (4, 2)).transpose(1, 2) for t in self.chunk(x).chunk(3, dim=-1)],
            [self.slices(x)[:, :, i * 8 : i * 8 + 8].view(batch, length, 4, 2).transpose(1, 2) for i in range(3)],
            [t.transpose(1, 2) for t in self.per_head(x).view(batch, length, 4, 6).chunk(3, dim=-1)],
        ]
        names = ("view", "reshape", "chunk", "slices", "per_head")
        result = x
        for name, (q, k, v) in zip(names, ways, strict=True):
            mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, length, 8)
            result = result + getattr(self, f"{name}_out")(mixed)
        gate, value = self.gates(x).view(batch, length, 2, 12).unbind(-2)
        return result + self.gates_out(F.silu(gate) * value)


class TransposedHead(nn.Module):
    """Multiplies by its embedding, transposed, and by a weight of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(24, 16)
        self.mix = nn.Parameter(torch.randn(32, 16) / 4)
        self.back = nn.Parameter(torch.randn(32, 16) / 4)

    def forward(self, words: Tensor) -> Tensor:
        h = self.words(words)
        return torch.tanh(h @ self.mix.T) @ self.back @ self.words.weight.transpose(0, 1)


class SharedLayers(nn.Module):
    """Runs the same block three times, behind a layer of another width."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(6, 12)
        self.attention, self.norm = SeparateHeads(4), nn.LayerNorm(12)
        self.fc, self.out = nn.Linear(12, 24), nn.Linear(24, 12)

    def forward(self, x: Tensor) -> Tensor:
        h = self.inside(x)
        for _ in range(3):
            h = self.norm(h + self.attention(h))
            h = h + self.out(F.gelu(self.fc(h)))
        return h


class SeparateHeads(nn.Module):
    """Attention with a layer for each of query, key and value."""

    def __init__(self, num_heads: int, width: int = 12) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.q, self.k, self.v, self.proj = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
