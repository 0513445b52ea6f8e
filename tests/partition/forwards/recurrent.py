"""Recurrent layers and cells, loops over time, packed sequences."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pack_sequence, pad_packed_sequence

from tests.partition.forwards.case import forward, ragged_sequences, sequences, words


@forward(sequences)
class CellsOverTime(nn.Module):
    """Steps cells through time in Python, from zeros of the batch's size."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.LSTMCell(6, 8)
        self.second = nn.GRUCell(8, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = c = torch.zeros(x.size(0), 8, device=x.device, dtype=x.dtype)
        g = x.new_zeros(x.shape[0], 8)
        outputs = []
        for step in x.unbind(dim=1):
            h, c = self.first(step, (h, c))
            g = self.second(h, g)
            outputs.append(self.head(g))
        return torch.stack(outputs, dim=1)


@forward(sequences)
class IteratedTensor(nn.Module):
    """Loops over a tensor itself, filling a result step by step."""

    def __init__(self) -> None:
        super().__init__()
        self.i2h = nn.Linear(6 + 8, 8)
        self.h2o = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.zeros(len(x), 8)
        result = torch.empty(len(x), x.size(1), 3)
        for t, step in enumerate(x.transpose(0, 1)):
            hidden = torch.tanh(self.i2h(torch.cat((step, hidden), 1)))
            result[:, t] = self.h2o(hidden)
        return result


PACKED = "takes a shape or value from numbers that depend on weights .* move these lines into a submodule's forward"


@forward(ragged_sequences, refused={1: PACKED, 4: PACKED})
class PackedSequences(nn.Module):
    """Packs rows of uneven length in the outermost forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(6, 8)
        self.gru = nn.GRU(8, 8, batch_first=True, bidirectional=True)
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(torch.tanh(self.inp(x)), lengths.cpu(), batch_first=True, enforce_sorted=False)
        padded, _ = pad_packed_sequence(self.gru(packed)[0], batch_first=True, total_length=x.size(1))
        return self.head(padded.sum(1))


@forward(ragged_sequences, promoted=("reader",), warns=r"reader \(Reader\) runs as one piece on each microbatch by itself")
class PackedInOwnModule(nn.Module):
    """Packs inside a module of its own, which can run as one piece."""

    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(8, 8, batch_first=True)

        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            _, (h, _) = self.lstm(packed)
            return h[-1]

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(6, 8)
        self.reader = self.Reader()
        self.mid = nn.Linear(8, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        return self.head(torch.relu(self.mid(self.reader(torch.tanh(self.inp(x)), lengths))))


@forward(ragged_sequences)
class LastStepByIndex(nn.Module):
    """Takes each row's last valid step by two index tensors, and by gather."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 8, num_layers=2, batch_first=True)
        self.fc = nn.Linear(8, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        out, (h, c) = self.lstm(x)
        last = out[torch.arange(x.size(0)), lengths - 1]
        gathered = out.gather(1, (lengths - 1).view(-1, 1, 1).expand(-1, 1, out.size(2))).squeeze(1)
        return self.head(torch.relu(self.fc(last)) + gathered + h[-1] * c[0])


@forward(ragged_sequences)
class LoopToTheLongest(nn.Module):
    """Loops to the longest row, and stops each row's state at its own length."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.RNNCell(6, 8)
        self.fc = nn.Linear(8, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        h = x.new_zeros(x.size(0), 8)
        for t in range(int(lengths.max())):
            new = self.cell(x[:, t], h)
            h = torch.where((t < lengths)[:, None], new, h)
        return self.head(torch.tanh(self.fc(h)))


@forward(ragged_sequences, microbatches=1, warns=r"LoopOverRows is run in 1 microbatch for a batch of \d rows")
class LoopOverRows(nn.Module):
    """Loops over the rows of the batch, each at its own length."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 8)
        self.mid = nn.Linear(8, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        h = torch.relu(self.fc(x))
        rows = [h[i, :n].mean(0) for i, n in enumerate(lengths.tolist())]
        return self.head(torch.relu(self.mid(torch.stack(rows))))


@forward(sequences)
class GivenState(nn.Module):
    """Starts from trained states, expanded by the batch, over two layers and both directions."""

    def __init__(self) -> None:
        super().__init__()
        self.h0 = nn.Parameter(torch.randn(4, 1, 4))
        self.c0 = nn.Parameter(torch.randn(4, 1, 4))
        self.lstm = nn.LSTM(6, 4, num_layers=2, bidirectional=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Any]:
        state = tuple(s.expand(-1, x.size(0), -1).contiguous() for s in (self.h0, self.c0))
        out, state = self.lstm(x.transpose(0, 1), state)
        return self.head(out).transpose(0, 1), state


def questions_and_answers(rows: int) -> tuple[Tensor, Tensor]:
    return torch.randint(1, 20, (rows, 6)), torch.randint(1, 20, (rows, 4))


@forward(questions_and_answers)
class AttentiveDecoder(nn.Module):
    """Decodes step by step with attention over what was read, fed by the truth or by its own choice."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 8)
        self.reader = nn.GRU(8, 8, batch_first=True)
        self.cell = nn.GRUCell(16, 8)
        self.head = nn.Linear(8, 20)

    def forward(self, source: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        memory, state = self.reader(self.words(source))
        state = state.squeeze(0)
        word = target[:, 0]
        scores, chosen = [], []
        for t in range(target.size(1) - 1):
            weights = torch.softmax(torch.bmm(memory, state.unsqueeze(2)).squeeze(2), dim=1)
            context = torch.bmm(weights.unsqueeze(1), memory).squeeze(1)
            state = self.cell(torch.cat([self.words(word), context], -1), state)
            scores.append(self.head(state))
            word = target[:, t + 1] if self.training else scores[-1].argmax(-1)
            chosen.append(word)
        return torch.stack(scores, 1), torch.stack(chosen, 1)


@forward(words)
class StateSpace(nn.Module):
    """Scans with cumulative sums and products, and by a loop with states of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 4)
        self.rate = nn.Parameter(torch.linspace(-1, 1, 4))
        self.gate = nn.Linear(4, 4)
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.words(x)
        decay = torch.sigmoid(self.rate) * torch.sigmoid(self.gate(h))
        product = torch.cumprod(decay, dim=1)
        scanned = product * torch.cumsum(h / product.clamp_min(1e-3), dim=1)
        state, states = torch.zeros_like(h[:, 0]), []
        for t in range(h.size(1)):
            state = torch.lerp(h[:, t], state, decay[:, t])
            states += [state]
        return self.head(torch.stack(states, dim=1) + scanned.tanh() + torch.logcumsumexp(h, 1))


@forward(sequences)
class ForwardAlgorithm(nn.Module):
    """A conditional random field in small: the partition function by a loop of logsumexp, masked by where."""

    def __init__(self) -> None:
        super().__init__()
        self.emit = nn.Linear(6, 4)
        self.emit2 = nn.Linear(4, 4)
        self.transitions = nn.Parameter(torch.randn(4, 4) / 4)

    def forward(self, x: Tensor) -> Tensor:
        emissions = self.emit2(torch.tanh(self.emit(x)))
        mask = x[..., 0] > -1.0
        alpha = emissions[:, 0]
        for t in range(1, x.size(1)):
            following = torch.logsumexp(alpha.unsqueeze(2) + self.transitions, dim=1) + emissions[:, t]
            alpha = torch.where(mask[:, t].unsqueeze(1), following, alpha)
        return torch.logsumexp(alpha, dim=-1)


def packed(rows: int) -> tuple[PackedSequence]:
    return (pack_sequence([torch.randn(n, 6) for n in range(rows, 0, -1)]),)


@forward(packed, microbatches=1, warns=r"PackedArgument is run in 1 microbatch")
class PackedArgument(nn.Module):
    """Takes sequences that the loader packed."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(6, 8)
        self.fc = nn.Linear(8, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: PackedSequence) -> Tensor:
        _, h = self.gru(x)
        return self.head(torch.relu(self.fc(h[-1])))
