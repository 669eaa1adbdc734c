"""Caption generation: a loop over pairs and words, padding."""

import pytest
import torch
from torch.nn.functional import log_softmax

from xret.heads.modules.aggregators import Aggregated
from xret.heads.modules.embedding import Sequence
from xret.heads.modules.losses import caption_generation
from xret.heads.modules.losses.caption_generation import CaptionGeneration

NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
WORDS = 7
IMAGES, CAPTIONS = torch.tensor([3, 1, 2]), torch.tensor([4, 1, 2, 3])
POSITIVES = torch.tensor(
    [[True, False, False, True], [False, True, False, False], [False, False, True, False]], dtype=torch.bool
)


@pytest.fixture
def batch():
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(3, 3, 5, generator=generator, dtype=torch.float64)
    token = torch.randint(0, WORDS, (4, 4), generator=generator)
    return Aggregated(torch.zeros(3, 2), rows=Sequence(rows, IMAGES)), Aggregated(
        torch.zeros(4, 2), token=Sequence(token, CAPTIONS)
    )


@pytest.fixture(autouse=True)
def small(monkeypatch):
    for name, value in (("HIDDEN", 6), ("WORD_DIM", 4)):
        monkeypatch.setattr(caption_generation, name, value)


def made():
    torch.manual_seed(0)
    return CaptionGeneration(5, WORDS).double()


def loss_by_loop(loss, images, captions):
    """One pair, one word, one row at a time."""
    total, pairs = 0.0, 0
    for i in range(3):
        sources, state = loss.read(loss.project(images.rows.rows[i, : IMAGES[i]]))
        for c in range(4):
            if not POSITIVES[i, c]:
                continue
            pairs += 1
            hidden, previous = state[0], WORDS
            for target in [*captions.token.rows[c, : CAPTIONS[c]].tolist(), WORDS]:
                energies = [
                    loss.energy(torch.tanh(loss.attend_rows(source) + loss.attend_state(hidden))) for source in sources
                ]
                weights = torch.cat(energies).softmax(0)
                context = sum(w * source for w, source in zip(weights, sources, strict=True))
                hidden = loss.write(torch.cat([loss.word.weight[previous], context])[None], hidden[None])[0]
                total -= log_softmax(loss.out(hidden), 0)[target].item()
                previous = target
    return total / pairs


def test_is_the_loop(batch):
    loss = made().eval()
    assert loss(None, POSITIVES, *batch).item() == pytest.approx(loss_by_loop(loss, *batch), rel=1e-9)


@pytest.mark.parametrize("garbage", [1e30, float("inf"), float("nan")])
def test_padding_changes_nothing(batch, garbage):
    images, captions = batch
    loss = made().eval()
    expected = loss(None, POSITIVES, images, captions)
    rows = torch.cat([images.rows.rows, torch.zeros(3, 2, 5, dtype=torch.float64)], 1)
    rows[torch.arange(5) >= IMAGES[:, None]] = garbage
    token = torch.cat([captions.token.rows, torch.zeros(4, 3, dtype=torch.long)], 1)
    token[torch.arange(7) >= CAPTIONS[:, None]] = 10**9  # no word at all
    rows.requires_grad_()
    actual = loss(
        None,
        POSITIVES,
        Aggregated(None, rows=Sequence(rows, IMAGES)),
        Aggregated(None, token=Sequence(token, CAPTIONS)),
    )
    torch.testing.assert_close(actual, expected)
    actual.backward()
    assert rows.grad.isfinite().all()
    assert (rows.grad[torch.arange(5) >= IMAGES[:, None]] == 0).all()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=(pytest.mark.gpu, NO_GPU))])
def test_mixed_precision_is_near_and_sums_exactly(batch, device):
    def gradients(mixed):
        images, captions = batch
        rows = images.rows.rows.float().to(device).requires_grad_()
        loss = made().float().to(device)
        loss.dropout.p = 0.0  # not `eval`: cuDNN goes back through a GRU in training alone
        images = Aggregated(None, rows=Sequence(rows, IMAGES))
        captions = Aggregated(None, token=Sequence(captions.token.rows.to(device), CAPTIONS))
        with torch.autocast(device, dtype=torch.bfloat16, enabled=mixed):
            value = loss(None, POSITIVES.to(device), images, captions)
        value.backward()
        return value.detach(), torch.cat([rows.grad.flatten(), *(one.grad.flatten() for one in loss.parameters())])

    (exact, wanted), (value, found) = gradients(False), gradients(True)
    assert value.dtype == torch.float32
    assert value.item() == pytest.approx(exact.item(), rel=5e-3)
    assert (found - wanted).norm() < 0.03 * wanted.norm()
    assert not torch.equal(found, wanted)  # its products are in mixed precision


def test_gradient_reaches_every_weight_and_the_rows(batch):
    images, captions = batch
    images.rows.rows.requires_grad_()
    loss = made()
    loss(None, POSITIVES, images, captions).backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in loss.parameters())
    assert images.rows.rows.grad[0].abs().sum() > 0


def test_dropout_acts_in_training_alone(batch):
    loss = made()
    assert loss(None, POSITIVES, *batch) != loss(None, POSITIVES, *batch)
    loss.eval()
    assert loss(None, POSITIVES, *batch) == loss(None, POSITIVES, *batch)


def test_no_pair_is_an_attached_zero(batch):
    images, captions = batch
    images.rows.rows.requires_grad_()
    value = made()(None, torch.zeros_like(POSITIVES), images, captions)
    value.backward()
    assert value.item() == 0
    assert (images.rows.rows.grad == 0).all()


def test_image_without_rows(batch):
    images, captions = batch
    rows = Sequence(images.rows.rows.requires_grad_(), torch.tensor([3, 0, 2]))
    value = made()(None, POSITIVES, images._replace(rows=rows), captions)
    value.backward()
    assert value.isfinite()
    assert images.rows.rows.grad.isfinite().all()
