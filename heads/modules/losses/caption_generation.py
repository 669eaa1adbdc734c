"""Caption generation: the image's rows must say its captions.

Source: Li et al., *Visual Semantic Reasoning for Image-Text Matching* (VSRN, ICCV 2019), section 3.4, with the sizes
of its public code: a GRU reads the rows, another with additive attention over what it read writes the words.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from ....pipeline.device import on_host, send
from ..aggregators.aggregated import Aggregated
from ..dropout import Dropout
from ..embedding import Sequence
from ..padding import last_row, softmax, valid_rows, zero_padding
from ..recurrence import run_gru
from .common import LOSSES, Loss

HIDDEN, WORD_DIM = 512, 300  # widths of both GRUs and of the word embeddings
DROPOUT = 0.2  # share of the inputs of both GRUs
NOTHING = -1  # where a caption is over, no word is written


@LOSSES.register("caption-generation", "beside triplet, for words: images tell their captions")
class CaptionGeneration(Loss):
    """The cross-entropy of a caption's words, given the words before and the rows of its image.

    The sum over a caption's words and its end, the mean over all (image, own caption) pairs.

    Args:
        dim: width of the rows.
        vocabulary_size: number of words, ids 0 to `vocabulary_size - 1`; one id more marks beginning and end.
    """

    asks_lengths = True

    def __init__(self, dim: int, vocabulary_size: int) -> None:
        super().__init__()
        self.boundary = vocabulary_size
        self.project = nn.Linear(dim, HIDDEN)
        self.read = nn.GRU(HIDDEN, HIDDEN, batch_first=True)
        self.word = nn.Embedding(vocabulary_size + 1, WORD_DIM)
        self.attend_rows = nn.Linear(HIDDEN, HIDDEN)
        self.attend_state = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.energy = nn.Linear(HIDDEN, 1, bias=False)
        self.write = nn.GRUCell(WORD_DIM + HIDDEN, HIDDEN)
        self.out = nn.Linear(HIDDEN, vocabulary_size + 1)
        self.dropout = Dropout(DROPOUT)

    def forward(self, similarity: Tensor, positives: Tensor, images: Aggregated, captions: Aggregated) -> Tensor:
        """Return the loss of writing `captions.token` from `images.rows`, for every True of `positives [I, C]`."""
        rows = self.needed(images.rows, "local rows", "image", "region-graph")
        token = self.needed(captions.token, "word ids", "text", "a feature set of words")
        image, caption = on_host(positives).nonzero(as_tuple=True)
        if not len(image):
            return 0 * zero_padding(*rows).sum()
        # The longest captions first, so that at every word the pairs that still write come first.
        length, order = on_host(token.length)[caption].sort(descending=True, stable=True)
        writing = torch.arange(token.rows.shape[1] + 1)[:, None] <= length  # its words, and the end
        written = send(writing.flatten().nonzero()[:, 0], positives.device)
        image, caption = send(torch.stack([image, caption])[:, order], positives.device)
        sources, states = self._read(rows)
        inputs, targets = self._teach(token)
        inputs, targets = inputs[caption].T, targets[caption].T.flatten()[written]
        logits = self._write(
            sources[image],
            self.attend_rows(sources)[image],
            valid_rows(*rows)[image],
            states[image],
            inputs,
            writing.sum(1).tolist(),
        )
        exact = torch.promote_types(logits.dtype, torch.float32)  # the sum of many words is none in mixed precision
        loss = functional.cross_entropy(logits.to(exact), targets, reduction="sum")
        return loss / len(image)

    def _read(self, images: Sequence) -> tuple[Tensor, Tensor]:
        """Return what the first GRU makes of every row `[I, N, H]`, and its last state `[I, H]`."""
        rows = zero_padding(*images).to(self.project.weight.dtype)
        # The rows come before their padding, so that a GRU which reads forwards needs no packed batch: on a CPU the
        # gradient of one costs as many copies of the batch as there are rows.
        states, _ = run_gru(self.read, self.dropout(self.project(rows)))
        return states, last_row(states, images.length)

    def _teach(self, captions: Sequence) -> tuple[Tensor, Tensor]:
        """Return the words that are read and those to be written, `[C, T + 1]`, or that there is nothing to write."""
        token, length = captions
        inputs = functional.pad(token, (1, 0), value=self.boundary)
        targets = functional.pad(token, (0, 1), value=self.boundary)
        place = torch.arange(targets.shape[1], device=token.device)
        end = length.to(token.device)[:, None]
        targets = targets.masked_fill(place == end, self.boundary).masked_fill(place > end, NOTHING)
        return inputs.masked_fill(place > end, self.boundary), targets

    def _write(
        self, sources: Tensor, keys: Tensor, valid: Tensor, state: Tensor, inputs: Tensor, writing: list[int]
    ) -> Tensor:
        """Return the logits `[words written, vocabulary]`, one word of all pairs after the other.

        `sources [P, N, H]` are attended to, by `keys` of that shape, where they are `valid [P, N]`. `state [P, H]` is
        the GRU's at the beginning, `inputs [T + 1, P]` are the words before each, and `writing` is how many pairs, the
        first ones, have a word to write at each step.
        """
        states = []
        for words, pairs in zip(self.word(inputs), writing, strict=True):
            state = state[:pairs]
            energy = self.energy(torch.tanh(keys[:pairs] + self.attend_state(state)[:, None]))[..., 0]
            weights = softmax(energy, valid[:pairs], 1)
            context = (weights[:, None] @ sources[:pairs])[:, 0]
            state = self.write(self.dropout(torch.cat([words[:pairs], context], 1)), state)
            states.append(state)
        return self.out(torch.cat(states))
