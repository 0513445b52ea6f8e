"""A small GPT and its data: the same weights and batches in every process that asks for them."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

SEED = 0
LEARNING_RATE = 0.1
MOMENTUM = 0.9


@dataclass(frozen=True)
class Case:
    """What every variant trains.

    Attributes:
        num_layers: How many transformer blocks the model has.
        width: Features of a token.
        num_heads: Attention heads of a block.
        sequence_length: Tokens in a row.
        vocabulary_size: Different tokens.
        batch_size: Rows in a batch, over all processes together.
        num_microbatches: Equal parts a batch is cut into, where a variant cuts it.
    """

    num_layers: int = 8
    width: int = 256
    num_heads: int = 4
    sequence_length: int = 128
    vocabulary_size: int = 1000
    batch_size: int = 64
    num_microbatches: int = 8

    @property
    def microbatch_size(self) -> int:
        """Rows in a microbatch."""
        return self.batch_size // self.num_microbatches


class Block(nn.Module):
    """Attention, then a two-layer perceptron, each normalised before and added to its input."""

    def __init__(self, case: Case) -> None:
        """Builds the block's layers."""
        super().__init__()
        self.num_heads = case.num_heads
        self.attention_norm = nn.LayerNorm(case.width)
        self.qkv = nn.Linear(case.width, 3 * case.width)
        self.projection = nn.Linear(case.width, case.width)
        self.mlp_norm = nn.LayerNorm(case.width)
        self.up = nn.Linear(case.width, 4 * case.width)
        self.down = nn.Linear(4 * case.width, case.width)

    def forward(self, hidden: Tensor) -> Tensor:
        """Maps ``(batch, sequence, width)`` to the same shape."""
        batch, sequence, width = hidden.shape
        heads = self.qkv(self.attention_norm(hidden)).view(batch, sequence, 3, self.num_heads, -1)
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.projection(mixed.transpose(1, 2).reshape(batch, sequence, width))
        widened: Tensor = self.down(functional.gelu(self.up(self.mlp_norm(hidden))))
        return hidden + widened


class GPT(nn.Module):
    """Predicts each next token from those before it."""

    def __init__(self, case: Case) -> None:
        """Builds the model with weights that depend on the case alone."""
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(SEED)
            self.tokens = nn.Embedding(case.vocabulary_size, case.width)
            self.positions = nn.Embedding(case.sequence_length, case.width)
            self.blocks = nn.ModuleList(Block(case) for _ in range(case.num_layers))
            self.norm = nn.LayerNorm(case.width)
            self.head = nn.Linear(case.width, case.vocabulary_size, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Maps tokens ``(batch, sequence)`` to logits ``(batch, sequence, vocabulary)``."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        hidden = self.tokens(tokens) + self.positions(places)
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.head(self.norm(hidden))
        return logits


def language_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Returns the mean cross-entropy of ``(batch, sequence, vocabulary)`` logits."""
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def make_optimizer(module: nn.Module) -> torch.optim.Optimizer:
    """Returns the optimizer that every variant uses: unlike Adam's, its steps show a gradient of the wrong scale."""
    return torch.optim.SGD(module.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)


def make_batch(case: Case, index: int) -> tuple[Tensor, Tensor]:
    """Returns the tokens and targets of one step, each ``(batch, sequence)``.

    Args:
        case: The sizes.
        index: The step, counted from 0; it alone decides the rows.
    """
    generator = torch.Generator().manual_seed(index)
    shape = (case.batch_size, case.sequence_length + 1)
    rows = torch.randint(case.vocabulary_size, shape, generator=generator)
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
