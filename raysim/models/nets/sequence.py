"""The shipped nets for sequences of tokens: an LSTM and a transformer.

Both turn tokens [B, T] into logits [B, T, vocabulary] (`task: next_token`). A position sees itself
and the positions before it, so padding at a sequence's end has no effect on the others. Neither net
has parameters for positions, so its initial values do not depend on T either.

They consist of linear operations, so single examples have gradients by `torch.func` too: PyTorch's
`nn.LSTM` and `nn.TransformerEncoderLayer` have no batching rule under `torch.func.vmap` on a CPU.
"""

from __future__ import annotations

import math
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from raysim.errors import ConfigError

Width = Annotated[int, Field(ge=1)]
Rate = Annotated[float, Field(ge=0, lt=1)]


class LSTMLayer(nn.Module):
    """A layer of an LSTM with forget gates (Gers 2000), unrolled over the positions."""

    def __init__(self, inputs: int, hidden: int):
        """Build the layer, initialised like PyTorch's.

        Args:
            inputs: width of the input.
            hidden: width of the output and of the cell.
        """
        super().__init__()
        self.hidden = hidden
        self.from_input = nn.Linear(inputs, 4 * hidden)
        self.from_hidden = nn.Linear(hidden, 4 * hidden, bias=False)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -(hidden**-0.5), hidden**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Return the hidden states [B, T, hidden] of inputs [B, T, inputs].

        Args:
            x: [B, T, inputs]; hidden state and cell are 0 before the first position.
        """
        projected = self.from_input(x)
        h = c = x.new_zeros(len(x), self.hidden)
        states = []
        for at_position in projected.unbind(1):
            i, f, g, o = (at_position + self.from_hidden(h)).chunk(4, -1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
            states.append(h)
        return torch.stack(states, 1)


def lstm(
    shape: tuple[int, ...],
    classes: int,
    embedding: Width = 8,
    hidden: Width = 256,
    layers: Width = 2,
    dropout: Rate = 0.0,
) -> nn.Module:
    """Build McMahan 2017's LSTM for the next character: 8, 256, 256; P = 817 872 for 80 tokens.

    Args:
        shape: shape (T,) of a sequence.
        classes: size of the vocabulary.
        embedding: width of the tokens' embedding.
        hidden: width of each layer.
        layers: number of layers.
        dropout: rate of dropout after each layer.

    Raises:
        ConfigError: the examples are no sequences of tokens.
    """
    _refuse_other_shapes("lstm", shape)
    stages: list[nn.Module] = [nn.Embedding(classes, embedding)]
    for i in range(layers):
        layer = LSTMLayer(hidden if i else embedding, hidden)
        stages.append(nn.Sequential(layer, nn.Dropout(dropout)) if dropout else layer)
    return nn.Sequential(*stages, nn.Linear(hidden, classes))


class CausalAttention(nn.Module):
    """Self-attention of several heads over a position and those before it."""

    def __init__(self, width: int, heads: int):
        """Build the layer.

        Args:
            width: width of input and output.
            heads: number of heads, which divides `width`.
        """
        super().__init__()
        self.heads = heads
        self.project = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the attention's output, [B, T, width], for x [B, T, width].

        Args:
            x: [B, T, width]; a position attends to itself and to earlier ones.
        """
        parts = self.project(x).unflatten(-1, (3, self.heads, -1))  # [B, T, 3, heads, w]
        q, k, v = (part.transpose(1, 2) for part in parts.unbind(2))  # [B, heads, T, w]
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        weights = torch.softmax(scores.masked_fill(later, -torch.inf), -1)
        return self.out((weights @ v).transpose(1, 2).flatten(2))


class TransformerBlock(nn.Module):
    """Attention and two dense layers, each after a LayerNorm and with a residual connection."""

    def __init__(self, width: int, heads: int, dropout: float):
        """Build the block.

        Args:
            width: width of input and output; the dense layers have 4 times as much between them.
            heads: number of heads.
            dropout: rate of dropout before each residual connection.
        """
        super().__init__()
        self.norm_attention = nn.LayerNorm(width)
        self.attention = CausalAttention(width, heads)
        self.norm_dense = nn.LayerNorm(width)
        self.widen = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)
        self.drop_attention = nn.Dropout(dropout) if dropout else nn.Identity()
        self.drop_dense = nn.Dropout(dropout) if dropout else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output, [B, T, width], for x [B, T, width].

        Args:
            x: the input, [B, T, width].
        """
        x = x + self.drop_attention(self.attention(self.norm_attention(x)))
        return x + self.drop_dense(self.narrow(F.gelu(self.widen(self.norm_dense(x)))))


class PositionedEmbedding(nn.Module):
    """Embedding of tokens, plus sines and cosines of their positions (Vaswani 2017)."""

    def __init__(self, vocabulary: int, width: int):
        """Build the embedding.

        Args:
            vocabulary: number of tokens.
            width: width of the output, an even number.
        """
        super().__init__()
        self.width = width
        self.tokens = nn.Embedding(vocabulary, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the embedding, [B, T, width], of tokens x [B, T].

        Args:
            x: [B, T], integers below the size of the vocabulary.
        """
        embedded = self.tokens(x)
        places = torch.arange(x.shape[1], device=x.device, dtype=embedded.dtype)
        rates = torch.arange(0, self.width, 2, device=x.device, dtype=embedded.dtype)
        angles = places[:, None] * torch.exp(-math.log(10_000) * rates / self.width)
        return embedded + torch.cat([angles.sin(), angles.cos()], 1)


def transformer(
    shape: tuple[int, ...],
    classes: int,
    width: Width = 64,
    heads: Width = 4,
    layers: Width = 2,
    dropout: Rate = 0.0,
) -> nn.Module:
    """Build a small causal transformer with LayerNorm before each part; P = 110 416 for 80 tokens.

    Args:
        shape: shape (T,) of a sequence.
        classes: size of the vocabulary.
        width: width of the embedding and of each block, an even multiple of `heads`.
        heads: number of heads of the attention.
        layers: number of blocks.
        dropout: rate of dropout before each residual connection.

    Raises:
        ConfigError: the examples are no sequences of tokens, or width and heads do not fit.
    """
    _refuse_other_shapes("transformer", shape)
    if width % heads or width % 2:
        raise ConfigError(
            f"model.width: {width} is not an even multiple of model.heads ({heads}); "
            f"set it to {2 * heads * max(1, width // (2 * heads))}"
        )
    blocks = [TransformerBlock(width, heads, dropout) for _ in range(layers)]
    end = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, classes))
    return nn.Sequential(PositionedEmbedding(classes, width), *blocks, end)


def _refuse_other_shapes(name: str, shape: tuple[int, ...]) -> None:
    """Raise ConfigError if examples are not sequences of tokens."""
    if len(shape) != 1:
        raise ConfigError(
            f"model.name: '{name}' is for sequences of tokens [T], not for examples of shape "
            f"{list(shape)}; use task=next_token with tokens as data"
        )
