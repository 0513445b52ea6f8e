"""Models of the transformers library at toy size, each trained on the loss that it computes itself."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)
from typing_extensions import override

from tests.zoo.data import padding_in_last_rows, prepared

ENCODER: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "num_labels": 5,
}
DECODER: dict[str, Any] = {"decoder_start_token_id": 0}


class Transformer(LightningModule):
    """Hands the batch to a model as keyword arguments and trains on ``out.loss``."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    @override
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        self.log("train_loss", loss)
        return loss

    @override
    def configure_optimizers(self) -> Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class Gpt2(Transformer):
    """GPT-2: learned positions, fused query, key and value, a head tied to the embedding, a cache in its output."""

    def __init__(self) -> None:
        super().__init__(
            GPT2LMHeadModel(
                GPT2Config(
                    vocab_size=40,
                    n_positions=16,
                    n_embd=32,
                    n_layer=2,
                    n_head=2,
                    resid_pdrop=0.0,
                    embd_pdrop=0.0,
                    attn_pdrop=0.0,
                    bos_token_id=1,
                    eos_token_id=1,
                    initializer_range=0.2,
                )
            )
        )


class Bert(Transformer):
    """BERT: an attention mask over padding that only the last rows have, or nobody."""

    def __init__(self) -> None:
        super().__init__(
            BertForSequenceClassification(
                BertConfig(**ENCODER, vocab_size=40, max_position_embeddings=16, initializer_range=0.2)
            )
        )


class Llama(Transformer):
    """Llama: rotary positions, grouped key and value heads, a causal mask joined with the padding's."""

    def __init__(self) -> None:
        super().__init__(
            LlamaForCausalLM(
                LlamaConfig(
                    vocab_size=40,
                    hidden_size=32,
                    intermediate_size=48,
                    num_hidden_layers=2,
                    num_attention_heads=4,
                    num_key_value_heads=2,
                    max_position_embeddings=16,
                    initializer_range=0.2,
                    use_cache=False,
                )
            )
        )


class T5(Transformer):
    """T5: an encoder and a decoder that share their embedding and their position bias."""

    def __init__(self) -> None:
        super().__init__(
            T5ForConditionalGeneration(
                T5Config(
                    vocab_size=40,
                    d_model=32,
                    d_kv=8,
                    d_ff=48,
                    num_layers=2,
                    num_heads=4,
                    dropout_rate=0.0,
                    **DECODER,
                )
            )
        )


class Vit(Transformer):
    """ViT: patches by a convolution and a class token that is expanded to the batch."""

    def __init__(self) -> None:
        super().__init__(ViTForImageClassification(ViTConfig(**ENCODER, image_size=8, patch_size=4, initializer_range=0.1)))


def padded_batch(num_padded: int) -> dict[str, Tensor]:
    """Draws 8 rows of 6 words whose last rows end in padding.

    Args:
        num_padded: Rows that end in padding.

    Returns:
        The words and the mask, by the names transformers give them.
    """
    mask = padding_in_last_rows(num_padded=num_padded)
    words = torch.randint(1, 40, (8, 6)).masked_fill(~mask, 0)
    return {"input_ids": words, "attention_mask": mask.long()}


def texts_to_continue() -> DataLoader[Any]:
    """Serves words that are their own labels; padding counts for nothing, so rows weigh unequally."""
    batches = [padded_batch(num_padded) for num_padded in (0, 2, 0)]
    for batch in batches:
        batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    return prepared(batches)


def texts_to_classify() -> DataLoader[Any]:
    """Serves words with one of five labels a row, padded in the second batch alone."""
    return prepared([padded_batch(num_padded) | {"labels": torch.randint(5, (8,))} for num_padded in (0, 2, 0)])


def texts_to_translate() -> DataLoader[Any]:
    """Serves source words, padded in the first two batches, and target words of uneven number."""
    batches = [padded_batch(num_padded) for num_padded in (2, 2, 0)]
    for batch in batches:
        counts = torch.arange(5) > torch.randint(5, (8, 1))
        batch["labels"] = torch.randint(1, 40, (8, 5)).masked_fill(counts, -100)
    return prepared(batches)


def images_to_classify() -> DataLoader[Any]:
    """Serves colour images of 8 by 8 pixels with one of five labels."""
    return prepared([{"pixel_values": torch.randn(8, 3, 8, 8), "labels": torch.randint(5, (8,))} for _ in range(3)])
