"""Contracts of parts and encoders for your own tests; xret's are held to them, too.

    from xret.testing import check_aggregator

    def test_between():
        check_aggregator(Between, share=0.3)

Each function raises AssertionError, whose message says what is broken. They run on the CPU in a few seconds, and leave
the random state as it was.
"""

import json
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.autograd import gradcheck
from torch.testing import assert_close
from torch.utils._pytree import tree_leaves, tree_map_only

from .heads.modules.aggregators import Aggregated, Aggregator
from .heads.modules.embedding import Embedding, Gaussian, each
from .heads.modules.embedding import Sequence as Rows
from .heads.modules.losses import Loss
from .heads.modules.losses.blocks import BlockLoss, in_blocks, pairs_of
from .heads.modules.padding import valid_rows
from .heads.modules.similarity import Similarity
from .heads.recipes.schema import sizes
from .heads.recipes.trial import try_aggregator, try_loss, try_similarity
from .pipeline.encoders.base import TextEncoder, VisualEncoder, encode_layers
from .pipeline.encoders.own import IDENTITY
from .pipeline.wording import reason

__all__ = ["check_aggregator", "check_encoder", "check_loss", "check_similarity", "random_embeddings"]

T = TypeVar("T")
PROMOTE = "compute in torch.promote_types(x.dtype, torch.float32)"
EMBEDDINGS = "vector", "set", "gaussian", "sequence"
TEXTS = "two dogs", "a red square", "a"
OTHERS = (
    "padding or another sample changes an embedding: masked_fill rows after length[b] by xret.nn.valid_rows (a product "
    "keeps NaN), and count them nowhere"
)
DIM = 8
LENGTH = (5, 2, 1)  # rows of the samples that aggregators get
ROUGH = 0.08  # of the largest value: eight bits of mantissa, through several layers


def check_aggregator(part: type[Aggregator], *, idle: Sequence[str] = (), **parameters: Any) -> None:
    """Check an aggregator with these parameters.

    It gives what its `embedding` names, of each sample's own rows: padding changes nothing and gets no gradient,
    whatever it holds. Samples without rows are finite. All weights learn, it states rightly whether it reads the global
    feature, half precision stays near, and it can be made without memory, as recipes do.

    Args:
        part: the class.
        idle: how the names of weights end that need not learn.
        parameters: of its constructor.
    """
    with _contract(part, Aggregator):
        try_aggregator(part, DIM, parameters)
        exact, rough = (_stirred(part(DIM, DIM, **parameters).eval()) for _ in range(2))
        exact.double().load_state_dict(rough.state_dict())
        local, global_ = torch.randn(3, 5, DIM).double(), torch.randn(3, DIM).double()
        _check_padding(exact, local, global_)
        _check_weights(exact, local, global_, idle)
        expected = _values(exact(local, torch.tensor(LENGTH), global_))
        other = _values(exact(local, torch.tensor(LENGTH), -global_))
        uses, changed = exact.uses_global, not torch.equal(expected, other)
        assert uses is changed, (
            f"uses_global is {uses}, but global features change {'the' if changed else 'no'} embedding"
        )
        for dtype in (torch.float32, torch.bfloat16):  # the first in a block of mixed precision
            given = _leaves(_cast(dtype, [local, global_]))
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype is torch.float32):
                values = _values(rough.to(dtype)(given[0], torch.tensor(LENGTH), given[1]))
            apart = (values.double() - expected).abs().max() / expected.abs().max()
            assert apart <= ROUGH, f"{dtype} or mixed precision is {apart:.0%} off: {PROMOTE}"
            values.float().sum().backward()
            assert all(t.grad is None or t.grad.isfinite().all() for t in given), f"gradients overflow: {PROMOTE}"
        later = _made_later(part, (DIM, DIM), parameters)
        later(local.float(), torch.tensor(LENGTH), global_.float())


def check_similarity(part: type[Similarity], **parameters: Any) -> None:
    """Check a similarity with these parameters.

    Each pair is scored by itself, with the gradients of finite differences; embeddings of zeros are finite, and half
    precision is compared in float32. What it states of itself is true: `of_cosines`, `dot_product`, `points`.
    """
    with _contract(part, Similarity):
        similarity = part(**parameters).eval()
        images, captions = (random_embeddings(similarity.embedding, count) for count in (4, 6))
        single = [_cast(torch.float32, side) for side in (images, captions)]
        try_similarity(part, parameters, each(lambda t: t[:2], single[0]), each(lambda t: t[:2], single[1]))
        exact = part(**parameters).double().eval()
        exact.load_state_dict(similarity.state_dict())
        expected = exact(images, captions)
        _require_exact(expected)
        _check_claims(exact, images, captions, expected)
        _check_gradients(lambda: exact(images, captions), _leaves(images, captions))
        for dtype in (torch.bfloat16, torch.float16):
            half = [_cast(dtype, side) for side in (images, captions)]
            scores = similarity(*half)
            assert scores.dtype == torch.float32, f"{dtype} is compared in {scores.dtype}: {PROMOTE}"
            reference = exact(*_cast(torch.float64, half))
            assert_close(scores.double(), reference, rtol=1e-5, atol=1e-5 * reference.abs().max().item())
        nothing = each(lambda t: torch.zeros_like(t) if t.is_floating_point() else t, single[0])
        leaves = _leaves(nothing)
        for side in (single[1], nothing):
            scores = similarity(nothing, side)
            assert scores.isfinite().all(), "embeddings of zeros give scores that are not finite"
            slopes = torch.autograd.grad(scores.sum(), leaves)
            assert all(t.isfinite().all() for t in slopes), "at zero gradients are not finite, as of a root or a norm"
        assert_close(_made_later(part, (), parameters, similarity)(*single), similarity(*single))


def check_loss(part: type[Loss], *, embedding: str = "set", whole: bool = True, **parameters: Any) -> None:
    """Check a loss with these parameters.

    It is a finite scalar, the same whatever the order of a batch, with the gradients of finite differences. Pairs whose
    similarity is -inf, batches without positives and batches of one pair give finite ones. Embeddings in half precision
    are read in float32, `at_rest` is what equal similarities give, and a `BlockLoss` is the same in blocks.

    Args:
        part: the class.
        embedding: what it takes on either side: ``vector``, ``set``, ``gaussian`` or ``sequence``.
        whole: whether its gradients are all that finite differences see; false: it detaches something on purpose.
        parameters: of its constructor.
    """
    with _contract(part, Loss):
        given = tuple(sizes(part, DIM, 7).values())
        loss = part(*given, **parameters).double().eval()
        loss.begin(100.0)
        owner = torch.tensor([0, 0, 1, 2, 2, 2, 3])
        positives = torch.arange(4)[:, None] == owner
        similarity = torch.randn(4, 7).double()
        sides = [_side(embedding, count) for count in (4, 7)]
        if not given:
            try_loss(part, parameters, similarity.float(), positives, *_cast(torch.float32, sides))
        leaves = _leaves(similarity, sides)
        value, images, captions = loss(similarity, positives, *sides), torch.randperm(4), torch.randperm(7)
        _require_exact(value)
        if whole:
            _check_gradients(
                lambda: loss(similarity, positives, *sides), leaves, ": what it detaches on purpose, whole=False allows"
            )
        turned = similarity[images][:, captions], positives[images][:, captions]
        moved = [_chosen(side, rows) for side, rows in zip(sides, (images, captions), strict=True)]
        assert_close(loss(*turned, *moved), value, msg="another order of the batch gives another loss")
        ignored = torch.rand(4, 7) < 0.3
        ignored &= ~positives
        lacking = loss(similarity.masked_fill(ignored, -torch.inf), positives, *sides)
        assert _is_finite(lacking, leaves), "loss or gradients are not finite where a pair has similarity -inf: mask it"
        for right in (torch.zeros(1, 1) > 0, torch.eye(1) > 0, torch.zeros(4, 4) > 0):
            some = [_chosen(side, torch.arange(len(right))) for side in sides]
            few = loss(similarity[: len(right), : len(right)], right, *some)
            kind = "of one pair" if len(right) == 1 else "without positives"
            assert _is_finite(few, leaves), f"loss or gradients of a batch {kind} are not finite: return 0, attached"
        with torch.autocast("cpu", dtype=torch.bfloat16):
            half = _cast(torch.bfloat16, sides)
            single = part(*given, **parameters).eval()
            single.load_state_dict(loss.state_dict())
            single.begin(100.0)
            value_of_half = single(similarity.float(), positives, *half)
        reference = loss(similarity, positives, *_cast(torch.float64, half))
        wrong = "embeddings in bfloat16 give another loss: read them in float32, outside autocast"
        assert_close(value_of_half.double(), reference, rtol=1e-4, atol=1e-5, msg=wrong)
        if (rest := loss.at_rest(7)) is not None:
            equal = loss(torch.full((4, 7), 0.7).double(), positives, *sides).item()
            assert_close(equal, rest, msg=f"at_rest is {rest:g}, and equal similarities give {equal:g}")
        if isinstance(loss, BlockLoss):
            vectors = torch.randn(4, DIM).double(), torch.randn(7, DIM).double()
            blocks = in_blocks(loss, *vectors, pairs_of(positives), pairs_of(ignored), 3)
            scores = (vectors[0] @ vectors[1].T).masked_fill(ignored, -torch.inf)
            assert_close(blocks, loss(scores, positives), msg="blocks give another loss")
        _made_later(part, given, parameters)


def check_encoder(encoder: VisualEncoder | TextEncoder, texts: Sequence[str] = TEXTS) -> None:
    """Check an encoder, of `texts` or of drawn pictures.

    Its identity is JSON that holds on every machine, its features have the declared shapes and are finite, and those of
    a picture or text do not depend on what is encoded beside it.
    """
    with _contract():
        right = re.fullmatch(r"[\w.-]+", encoder.name, flags=re.ASCII)
        assert right, f"name {encoder.name!r} has other characters than letters, digits and ._-"
        lacking = {*IDENTITY} - set(encoder.identity)
        assert not lacking, f"identity lacks {', '.join(sorted(lacking))}"
        said = json.dumps(encoder.identity)
        assert json.loads(said) == encoder.identity, "identity changes as JSON: write lists for tuples, texts as keys"
        assert all(isinstance(version, str) for version in encoder.versions.values()), "a version is no text"
        for word in ("/", "cpu", "cuda", "version", "batch", *encoder.versions.values()):
            assert word not in said, f"identity has {word!r}, which need not hold elsewhere"
        assert encoder.space is None or isinstance(encoder.space, str), "space is neither a text nor None"
        if hasattr(encoder, "views"):  # of an encoder that keeps the contract by itself
            return
        of_texts = hasattr(encoder, "tokenize")
        together, alone = (_texts_encoded if of_texts else _pictures_encoded)(encoder, texts)
        for x, y in zip(together, alone, strict=True):
            assert np.isfinite(x).all(), "features are not finite"
            assert {np.asarray(x).dtype, np.asarray(y).dtype} == {np.dtype("f4")}, "features are not float32"
            near = 1e-4 * max(1.0, float(np.abs(x).max(initial=0)))  # deep networks round by their largest values
            beside = "what is encoded beside a picture or text changes its features"
            assert_close(torch.tensor(x), torch.tensor(y), rtol=1e-3, atol=near, msg=beside)


def random_embeddings(kind: str, count: int, width: int = 5) -> Embedding:
    """Draw embeddings of a kind, float64: ``vector``, ``set`` (of 2), ``gaussian`` or ``sequence`` (of 1 to 3 rows)."""
    if kind not in EMBEDDINGS:
        raise ValueError(f"there is no embedding '{kind}', but {', '.join(EMBEDDINGS)}")
    if kind == "gaussian":
        return Gaussian(torch.randn(count, width).double(), torch.randn(count, width).double())
    if kind == "sequence":
        return Rows(torch.randn(count, 3, width).double(), torch.arange(count) % 3 + 1)
    return torch.randn(*((count, 2, width) if kind == "set" else (count, width))).double()


@contextmanager
def _contract(part: object = None, base: type | None = None) -> Iterator[None]:
    """Draw from a seed, and let what a part, a trial or torch refuses be a failed assertion."""
    if base is not None:
        name = str(part).partition("\n")[0]
        assert isinstance(part, type) and issubclass(part, base), (
            f"{name} is no class that derives from {base.__name__}"
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        try:
            yield
        except (ValueError, TypeError) as error:
            raise AssertionError(str(error)) from error
        except RuntimeError as error:
            dtypes = "" if base is None else f"; it gets float64 and half precision, too: {PROMOTE}"
            raise AssertionError(f"{reason(error)}{dtypes}") from error


def _require_exact(values: Tensor) -> None:
    wanted = f"float64 is rounded to {values.dtype}, so that gradients cannot be checked: {PROMOTE}"
    assert values.dtype == torch.float64, wanted


def _check_gradients(compute: Callable[[], Tensor], leaves: Sequence[Tensor], hint: str = "") -> None:
    right = gradcheck(lambda *_: compute(), leaves, fast_mode=True, raise_exception=False)
    assert right, f"gradients are not those of finite differences{hint}"


def _stirred(module: Any) -> Any:
    """Return a module without weights that are all zero, behind which others would not be seen."""
    for weight in module.parameters():
        if not weight.any():
            nn.init.uniform_(weight, 0.1, 0.3)
    return module


def _made_later(part: type[nn.Module], sizes: Sequence[int], parameters: Any, like: nn.Module | None = None) -> Any:
    """Make a part without memory for its weights, which it gets afterwards."""
    with torch.device("meta"):
        module = part(*sizes, **parameters)
    assert all(weight.is_meta for weight in module.parameters()), "a weight is made on a fixed device: name none"
    loose = [name for child in module.modules() for name, value in vars(child).items() if isinstance(value, Tensor)]
    assert not loose, f"{', '.join(loose)}: a tensor that stays behind when the part moves to a GPU: register_buffer"
    module = module.to_empty(device="cpu").eval()
    if like is not None:
        module.load_state_dict(like.state_dict())
    return module


def _check_padding(module: Any, local: Tensor, global_: Tensor) -> None:
    length = torch.tensor(LENGTH)
    alone = [module(local[b : b + 1, :n], length[b : b + 1], global_[b : b + 1]) for b, n in enumerate(LENGTH)]
    longer = nn.functional.pad(local, (0, 0, 0, 4))
    padding = ~valid_rows(longer, length)
    for garbage in (torch.nan, torch.inf, -torch.inf, 1e30):
        padded = longer.masked_fill(padding[..., None], garbage).requires_grad_()
        result = module(padded, length, global_)
        for b, (n, single) in enumerate(zip(LENGTH, alone, strict=True)):
            assert_close(_values(result, b), _values(single, 0), msg=OTHERS)
            if result.attention is not None:
                assert_close(result.attention[:, b, ..., :n], single.attention[:, 0])
                assert not result.attention[:, b, ..., n:].any(), "padding has attention"
            if result.rows is not None:
                assert_close(result.rows.rows[b, :n], single.rows.rows[0])
                assert not result.rows.rows[b, n:].any(), "padding has rows"
        if module.uses_local:
            _values(result).square().sum().backward()
            assert padded.grad is not None and not padded.grad[padding].any(), "padding has a gradient"
            assert padded.grad[~padding].any() and padded.grad.isfinite().all(), "rows have none, or it is not finite"
        assert all(weight.grad is None or weight.grad.isfinite().all() for weight in module.parameters())
    learnt = [*_leaves(_cast(torch.float64, [local, global_])), *module.parameters()]
    none = _values(module(learnt[0], torch.tensor([0, 5, 3]), learnt[1]))
    none.sum().backward()
    empty = "of a sample without rows are not finite: divide by length.clamp(min=1), let no softmax be over -inf alone"
    assert none.isfinite().all(), f"values {empty}"
    assert all(t.grad is None or t.grad.isfinite().all() for t in learnt), f"gradients {empty}"


def _check_weights(module: Any, local: Tensor, global_: Tensor, idle: Sequence[str]) -> None:
    module.train().zero_grad()
    values = _values(module(*_leaves(local), torch.tensor(LENGTH), *_leaves(global_)))
    (values * torch.randn(values.shape[-1])).square().sum().backward()
    module.eval()
    for name, weight in module.named_parameters():
        learns = weight.grad is not None and weight.grad.abs().max() > 1e-9
        assert learns or name.endswith(tuple(idle)), f"{name} does not learn: use it, leave it out or name it in `idle`"


def _check_claims(similarity: Any, images: Embedding, captions: Embedding, expected: Tensor) -> None:
    turn = torch.linalg.qr(torch.randn(5, 5).double()).Q

    def changed(change: Callable[[Tensor], Tensor]) -> bool:
        sides = []
        for side in (images, captions):
            first, *rest = [side] if isinstance(side, Tensor) else side
            sides.append(type(side)(change(first), *rest) if rest else change(first))
        return not torch.allclose(similarity(*sides), expected, atol=1e-6)

    of_lengths, of_rotation = changed(lambda t: 3 * t), changed(lambda t: t @ turn)
    if similarity.of_cosines:
        assert not of_lengths, "of_cosines is stated, but lengths of embeddings change scores"
        assert not of_rotation, "of_cosines is stated, but a rotation of all embeddings changes scores"
    else:
        assert of_lengths or of_rotation, "neither lengths nor rotations change scores: state of_cosines = True"
    unit = [similarity.normalised(side) for side in (images, captions)]
    assert_close(similarity(*unit), expected, msg="`normalised` changes scores")
    if similarity.dot_product:
        assert_close(unit[0] @ unit[1].T, expected, msg="dot_product is stated, but scores are no dot products")
    count = _values(Aggregated(images)).flatten(0, -2).shape[0]
    for query in (True, False):
        points = similarity.points(images, query=query)
        assert points.ndim == 2 and len(points) == count, "points are [T, W], one for each element or row"


def _values(aggregated: Aggregated, sample: int | None = None) -> Tensor:
    """Return an embedding as one tensor; of a sequence its valid rows."""
    embedding = aggregated.embedding if sample is None else each(lambda t: t[sample : sample + 1], aggregated.embedding)
    if isinstance(embedding, Rows):
        return embedding.rows[valid_rows(*embedding)]
    return embedding if isinstance(embedding, Tensor) else torch.cat(embedding, 1)


def _side(kind: str, count: int) -> Aggregated:
    """Draw all that an aggregator can give."""
    rows = random_embeddings("sequence", count, DIM)
    assert isinstance(rows, Rows)
    return Aggregated(
        random_embeddings(kind, count, DIM),
        slots=torch.randn(count, 2, DIM).double(),
        gaussian=Gaussian(*torch.randn(2, count, DIM).double()),
        rows=rows,
        global_=torch.randn(count, DIM).double(),
        token=Rows(torch.randint(7, (count, 4)), torch.arange(count) % 4 + 1),
        local=rows,
    )


def _cast(dtype: torch.dtype, value: T) -> T:
    """Return embeddings, or all that is known of a side, with other floats."""
    cast: T = tree_map_only(Tensor, lambda t: t.detach().to(dtype) if t.is_floating_point() else t, value)
    return cast


def _chosen(side: Aggregated, rows: Tensor) -> Aggregated:
    chosen: Aggregated = tree_map_only(Tensor, lambda t: t[rows], side)
    return chosen


def _leaves(*sides: Any) -> list[Tensor]:
    """Let gradients flow to the floats of embeddings; return these."""
    floats = [t for t in tree_leaves(sides) if isinstance(t, Tensor) and t.is_floating_point()]
    return [t.requires_grad_() for t in floats]


def _is_finite(value: Tensor, leaves: Sequence[Tensor]) -> bool:
    """Return whether a loss and its gradients are finite; what nothing reaches has none."""
    gradients = torch.autograd.grad(value, leaves, allow_unused=True)
    return bool(value.isfinite()) and all(gradient is None or bool(gradient.isfinite().all()) for gradient in gradients)


def _texts_encoded(encoder: Any, texts: Sequence[str]) -> tuple[list[Any], list[Any]]:
    ids = encoder.tokenize(texts)
    assert len(ids) == len(texts) and all(ids), "tokenize has to give at least one token of each text"
    if encoder.channels is None:  # ids alone
        return [], []
    (whole,) = encode_layers([encoder], ids)  # of the declared shapes
    alone = [encoder.encode([text]) for text in ids]
    return [np.asarray(t.cpu()) for t in whole], [np.concatenate(parts) for parts in zip(*alone, strict=True)]


def _decoded(encoder: Any) -> list[Any]:
    with tempfile.TemporaryDirectory() as folder:
        decoded = []
        for number, size in enumerate(((180, 140), (90, 200), (64, 64))):
            path = Path(folder, f"{number}.png")
            Image.effect_noise(size, 40 + 40 * number).convert("RGB").save(path)
            picture, original = encoder.decode(path)
            assert original == size, f"decode gives the size {original} of a picture of {size}"
            decoded.append(picture)
    shapes = {tuple(picture.shape) for picture in decoded if encoder.kind == "grid"}
    assert len(shapes) < 2, f"decode gives pixels of several shapes, which make no batch: {sorted(shapes)}"
    return decoded


def _pictures_encoded(encoder: Any, _: Sequence[str]) -> tuple[list[Any], list[Any]]:
    decoded, of_regions = _decoded(encoder), encoder.kind != "grid"
    cells = None if encoder.grid is None else encoder.grid[0] * encoder.grid[1]
    assert cells in (None, encoder.rows), f"grid {encoder.grid} has {cells} cells, but rows is {encoder.rows}"
    (whole,) = encode_layers([encoder], decoded if of_regions else torch.stack(decoded))  # of the declared shapes
    alone = [encoder.encode([picture] if of_regions else picture[None]) for picture in decoded]
    if of_regions:
        assert all(1 <= len(picture.local) <= encoder.rows for picture in whole), "1 to `rows` regions of each picture"
        return [picture.local for picture in whole], [picture.local for (picture,) in alone]
    return [np.asarray(t.cpu()) for t in whole], [np.concatenate(parts) for parts in zip(*alone, strict=True)]
