"""Losses against recorded values, loops over explicit triplets and pairs, and batches with nothing to compare."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from recorded import DTYPES, assert_near, bits, leaf, near, own

from xret.heads.modules.aggregators import Aggregated
from xret.heads.modules.embedding import Gaussian
from xret.heads.modules.losses import LOSSES
from xret.heads.modules.losses.diversity import Diversity
from xret.heads.modules.losses.mmd import Mmd
from xret.heads.modules.losses.triplet import Triplet
from xret.heads.modules.similarity.sets import Chamfer, Mil, SmoothChamfer, cosine

SIMILARITIES = {"smooth_chamfer_a16": SmoothChamfer(), "mil": Mil(), "chamfer": Chamfer()}
NEGATIVES = {"hard": "hardest", "all": "all", "semi": "semi-hard"}


def triplet(similarity, positives, **parameters):
    return Triplet(**parameters)(similarity, positives)


def mmd(images, captions, kernel="exponential"):
    return Mmd(kernel=kernel)(None, None, Aggregated(images), Aggregated(captions))


def diversity(slots, form="exponential"):
    return Diversity(form=form).of("image", Aggregated(None, slots))


# ---- triplet


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", NEGATIVES)
def test_recorded_triplet_of_a_matrix(golden, kind, dtype):
    data = golden("triplet_and_regularisers")
    similarity = leaf(data, "matrix/in_sim", dtype)
    loss = triplet(similarity, own(6, 5), negatives=NEGATIVES[kind])
    loss.backward()
    assert_near(loss, data[f"matrix/out{bits(dtype)}_{kind}"], near(dtype))
    assert_near(similarity.grad, data[f"matrix/grad{bits(dtype)}_{kind}_sim"], near(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("kind", "name"),
    [(kind, name) for kind in ("hard", "all") for name in SIMILARITIES] + [("semi", "smooth_chamfer_a16")],
)
def test_recorded_triplet_of_sets(golden, kind, name, dtype):
    data = golden("triplet_and_regularisers")
    key = f"triplet_{kind}_{name}"
    images, captions = leaf(data, "in_img", dtype), leaf(data, "in_txt", dtype)
    loss = triplet(SIMILARITIES[name](images, captions), own(6, 5), negatives=NEGATIVES[kind])
    loss.backward()
    assert_near(loss, data[f"out{bits(dtype)}_{key}"], near(dtype))
    assert_near(images.grad, data[f"grad{bits(dtype)}_{key}_img"], near(dtype))
    assert_near(captions.grad, data[f"grad{bits(dtype)}_{key}_txt"], near(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("key", "compare", "inputs", "negatives", "reduction", "factor"),
    [
        ("hard_sum", cosine, "", "hardest", "sum", 1),
        ("all_sum", cosine, "", "all", "sum", 1),
        ("hard_mil_mean", Mil(), "_set", "hardest", "mean", 1),
        # That code divides by all 64 cells of the matrix; 56 of them are triplets.
        ("all_mil_mean", Mil(), "_set", "all", "mean", 56 / 64),
    ],
)
def test_recorded_triplet_with_one_caption(golden, key, compare, inputs, negatives, reduction, factor, dtype):
    data = golden("triplet_and_regularisers")
    images, captions = leaf(data, f"single/in_img{inputs}", dtype), leaf(data, f"single/in_txt{inputs}", dtype)
    loss = factor * triplet(compare(images, captions), own(8, 1), negatives=negatives, reduction=reduction)
    loss.backward()
    assert_near(loss, data[f"single/out{bits(dtype)}_{key}"], near(dtype))
    assert_near(images.grad, data[f"single/grad{bits(dtype)}_{key}_img"], near(dtype))
    assert_near(captions.grad, data[f"single/grad{bits(dtype)}_{key}_txt"], near(dtype))


def triplet_by_loop(similarity, positives, margin, negatives, reduction):
    """Go through every (positive, negative) triplet of both directions, in plain Python floats."""
    total = 0.0
    for s, p in ((similarity, positives), (similarity.T, positives.T)):
        terms = []
        for anchor, row in enumerate(p.tolist()):
            for positive in (j for j, is_own in enumerate(row) if is_own):
                costs = [
                    margin + s[anchor, j].item() - s[anchor, positive].item()
                    for j, is_own in enumerate(row)
                    if not is_own
                ]
                if negatives == "hardest":
                    costs = [max([0.0, *costs])]
                if negatives == "semi-hard":
                    costs = [min(cost, margin) for cost in costs]
                terms += [max(0.0, cost) for cost in costs]
        count = len([t for t in terms if t > 0]) if negatives == "semi-hard" else len(terms)
        total += sum(terms) / (max(count, 1) if reduction == "mean" else 1)
    return total


@given(
    seed=st.integers(0, 10_000),
    images=st.integers(1, 5),
    captions=st.integers(1, 8),
    negatives=st.sampled_from(["hardest", "all", "semi-hard"]),
    reduction=st.sampled_from(["mean", "sum"]),
    shift=st.sampled_from([0.0, -10.0]),
)
def test_triplet_is_the_loop(seed, images, captions, negatives, reduction, shift):
    generator = torch.Generator().manual_seed(seed)
    similarity = torch.rand(images, captions, generator=generator, dtype=torch.float64) + shift
    positives = torch.rand(images, captions, generator=generator) < 0.4  # any number a row and a column
    similarity.requires_grad_()
    loss = triplet(similarity, positives, margin=0.3, negatives=negatives, reduction=reduction)
    loss.backward()
    expected = triplet_by_loop(similarity.detach(), positives, 0.3, negatives, reduction)
    assert loss.item() == pytest.approx(expected, rel=1e-12, abs=1e-12)
    assert similarity.grad.isfinite().all()


def test_all_negative_similarities_by_hand():
    # Own -5, other -5.1: the hinge is 0.2 - 0.1, in both directions and for both images.
    similarity = torch.tensor([[-5.0, -5.1], [-5.1, -5.0]], dtype=torch.float64)
    for negatives in ("hardest", "all", "semi-hard"):
        loss = triplet(similarity, own(2, 1), negatives=negatives)
        assert loss.item() == pytest.approx(0.2)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("negatives", ["hardest", "all", "semi-hard"])
@pytest.mark.parametrize("positives", [True, False])
def test_nothing_to_compare_is_an_attached_zero(negatives, reduction, positives):
    similarity = torch.randn(2, 3, requires_grad=True)
    loss = triplet(similarity, torch.full((2, 3), positives), negatives=negatives, reduction=reduction)
    loss.backward()
    assert loss.item() == 0
    assert (similarity.grad == 0).all()


def test_warmup_uses_all_negatives_for_the_first_epochs():
    similarity, positives = torch.randn(4, 8), own(4, 2)
    nothing = Aggregated(torch.zeros(4, 2))
    loss = Triplet(warmup_epochs=2)
    assert loss.epoch == 0
    for epoch, negatives in ((0, "all"), (1, "all"), (1.99, "all"), (2, "hardest"), (7, "hardest")):
        loss.epoch = epoch
        expected = triplet(similarity, positives, negatives=negatives)
        assert loss(similarity, positives, nothing, nothing) == expected
    assert triplet(similarity, positives, negatives="all") != triplet(similarity, positives)


def test_linear_warmup_moves_from_all_negatives_to_the_hardest():
    similarity, positives = torch.randn(4, 8, dtype=torch.float64), own(4, 2)
    nothing = Aggregated(torch.zeros(4, 2))
    everything, hardest = (triplet(similarity, positives, negatives=n).item() for n in ("all", "hardest"))
    loss = Triplet(warmup_epochs=2, warmup="linear")
    for epoch, share in ((0, 0), (0.5, 0.25), (1, 0.5), (1.75, 0.875), (2, 1), (9, 1)):
        loss.epoch = epoch
        expected = (1 - share) * everything + share * hardest
        assert loss(similarity, positives, nothing, nothing).item() == pytest.approx(expected, rel=1e-12)


@given(
    seed=st.integers(0, 10_000),
    negatives=st.sampled_from(["hardest", "all", "semi-hard"]),
    reduction=st.sampled_from(["mean", "sum"]),
    batch=st.integers(2, 5),
)
def test_pair_of_similarity_minus_infinity_takes_no_part(seed, negatives, reduction, batch):
    # One image, its caption, and others: what the image may not be compared with could as well be absent.
    generator = torch.Generator().manual_seed(seed)
    similarity = torch.rand(batch, batch, generator=generator, dtype=torch.float64)
    ignored = (torch.rand(batch, batch, generator=generator) < 0.5) & ~own(batch, 1)
    similarity.requires_grad_()
    loss = triplet(similarity.masked_fill(ignored, -torch.inf), own(batch, 1), negatives=negatives, reduction=reduction)
    loss.backward()
    expected = 0.0
    for s, drop in ((similarity.detach(), ignored), (similarity.detach().T, ignored.T)):
        costs = [
            [0.2 + s[i, j].item() - s[i, i].item() for j in range(batch) if j != i and not drop[i, j]]
            for i in range(batch)
        ]
        if negatives == "hardest":
            costs = [[max([0.0, *row])] for row in costs]
        terms = [max(0.0, min(c, 0.2) if negatives == "semi-hard" else c) for row in costs for c in row]
        count = len([t for t in terms if t > 0]) if negatives == "semi-hard" else len(terms)
        expected += sum(terms) / (max(count, 1) if reduction == "mean" else 1)
    assert loss.item() == pytest.approx(expected, rel=1e-12, abs=1e-12)
    assert similarity.grad.isfinite().all()
    assert (similarity.grad[ignored] == 0).all()


# ---- MMD


@pytest.mark.parametrize("dtype", DTYPES)
def test_recorded_mmd(golden, dtype):
    data = golden("triplet_and_regularisers")
    for kernel, key in (("exponential", "mmd_root_exact"), ("gaussian", "mmd_gaussian")):
        images, captions = leaf(data, "in_img", dtype), leaf(data, "in_txt", dtype)
        loss = mmd(images, captions, kernel)
        loss.backward()
        value, gradient = (1e-9, 1e-7) if dtype is torch.float64 else (0, 1e-3)
        assert_near(loss, data[f"out{bits(dtype)}_{key}"], value, 0 if dtype is torch.float64 else 1e-5)
        assert_near(images.grad, data[f"grad{bits(dtype)}_{key}_img"], gradient)
        assert_near(captions.grad, data[f"grad{bits(dtype)}_{key}_txt"], gradient)


@pytest.mark.parametrize("dtype", DTYPES)
def test_recorded_mmd_with_one_caption(golden, dtype):
    data = golden("triplet_and_regularisers")
    loss = mmd(leaf(data, "single/in_img_set", dtype), leaf(data, "single/in_txt_set", dtype))
    # The recorded distances of this case come from a matrix product: a point is 1e-8 away from itself.
    assert_near(loss, data[f"single/out{bits(dtype)}_mmd_root"], 1e-7, 0 if dtype is torch.float64 else 1e-5)


def mmd_by_loop(x, y, power):
    x, y = (torch.nn.functional.normalize(e, dim=-1).flatten(0, -2).tolist() for e in (x, y))

    def mean(a, b):
        return sum(math.exp(-0.5 * math.dist(p, q) ** power) for p in a for q in b) / (len(a) * len(b))

    return mean(x, x) - 2 * mean(x, y) + mean(y, y)


@pytest.mark.parametrize(("kernel", "power"), [("exponential", 1), ("gaussian", 2)])
@pytest.mark.parametrize("shape", [(3, 5), (3, 1, 5), (2, 3, 5)])
def test_mmd_is_the_loop(kernel, power, shape):
    images, captions = torch.randn(shape, dtype=torch.float64), torch.randn(7, *shape[1:], dtype=torch.float64)
    assert mmd(images, captions, kernel).item() == pytest.approx(mmd_by_loop(images, captions, power), rel=1e-9)


@pytest.mark.parametrize("kernel", ["exponential", "gaussian"])
def test_mmd_gradcheck(kernel):
    images = torch.randn(3, 2, 4, dtype=torch.float64, requires_grad=True)
    captions = torch.randn(4, 2, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, y: mmd(x, y, kernel), (images, captions))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernel", ["exponential", "gaussian"])
def test_mmd_of_coinciding_elements_has_no_gradient(kernel, dtype):
    # Collapsed sets and repeated captions: every distance is zero up to rounding.
    images = torch.randn(1, 1, 512, dtype=dtype).expand(4, 4, 512).clone().requires_grad_()
    captions = (3 * images.detach()[:2]).requires_grad_()
    loss = mmd(images, captions, kernel)
    loss.backward()
    assert abs(loss.item()) < 1e-5
    assert images.grad.norm() < 1e-5
    assert captions.grad.norm() < 1e-5


def test_mmd_grows_as_the_modalities_part():
    torch.manual_seed(0)
    images, captions = torch.randn(50, 4, 8), torch.randn(50, 4, 8)
    apart = torch.zeros(8)
    apart[0] = 2.0
    values = [mmd(images, captions + shift * apart).item() for shift in (0, 1, 2)]
    assert values == sorted(values)
    assert values[0] < 0.01 < values[2]


# ---- diversity


@pytest.mark.parametrize("dtype", DTYPES)
def test_recorded_diversity(golden, dtype):
    data = golden("triplet_and_regularisers")
    images, captions = leaf(data, "in_img_slots", dtype), leaf(data, "in_txt_slots", dtype)
    loss = Diversity()(None, None, Aggregated(None, images), Aggregated(None, captions))
    loss.backward()
    assert_near(loss, data[f"out{bits(dtype)}_div_slots_mean"], near(dtype))
    assert_near(images.grad, data[f"grad{bits(dtype)}_div_slots_mean_img_slots"], near(dtype))
    assert_near(captions.grad, data[f"grad{bits(dtype)}_div_slots_mean_txt_slots"], near(dtype))
    pairs = math.comb(images.shape[1], 2)
    assert_near(diversity(images) * pairs, data[f"out{bits(dtype)}_div_img_slots_pairsum"], near(dtype))


def test_recorded_diversity_of_sets(golden):
    data = golden("triplet_and_regularisers")
    images, captions = leaf(data, "in_img", torch.float64), leaf(data, "in_txt", torch.float64)
    loss = diversity(images) + diversity(captions)
    loss.backward()
    assert_near(loss, data["out64_div_sets_mean"], 1e-9)
    assert_near(images.grad, data["grad64_div_sets_mean_img"], 1e-9)
    assert_near(captions.grad, data["grad64_div_sets_mean_txt"], 1e-9)


def test_diversity_by_hand_and_gradcheck():
    # Two opposite, two orthogonal, two equal slots: squared distances 4, 2 and 0.
    slots = torch.tensor([[[2.0, 0], [-3, 0]], [[1, 0], [0, 5]], [[1, 1], [2, 2]]], dtype=torch.float64)
    expected = (math.exp(-8) + math.exp(-4) + 1) / 3
    assert diversity(slots).item() == pytest.approx(expected, rel=1e-12)
    assert torch.autograd.gradcheck(diversity, torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True))


def test_diversity_of_a_single_slot_is_an_attached_zero():
    slots = torch.randn(2, 1, 4, requires_grad=True)
    loss = diversity(slots)
    loss.backward()
    assert loss.item() == 0
    assert (slots.grad == 0).all()


def test_diversity_without_slots_names_the_side():
    with_slots, without = Aggregated(torch.ones(2, 3, 4), torch.ones(2, 3, 4)), Aggregated(torch.ones(2, 4))
    with pytest.raises(ValueError, match="slots, which the image side does not give"):
        Diversity()(None, None, without, with_slots)
    with pytest.raises(ValueError, match="slots, which the text side does not give"):
        Diversity()(None, None, with_slots, without)


@pytest.mark.parametrize("dtype", DTYPES)
def test_recorded_gram_diversity(golden, dtype):
    data = golden("triplet_and_regularisers")
    images, captions = leaf(data, "single/in_img_set", dtype), leaf(data, "single/in_txt_set", dtype)
    sides = Aggregated(None, images), Aggregated(None, captions)
    loss = Diversity(form="gram")(None, None, *sides)
    loss.backward()
    assert_near(loss, data[f"single/out{bits(dtype)}_gram_diversity"], near(dtype))
    assert_near(images.grad, data[f"single/grad{bits(dtype)}_gram_diversity_img"], near(dtype))
    assert_near(captions.grad, data[f"single/grad{bits(dtype)}_gram_diversity_txt"], near(dtype))
    squared = Diversity(form="gram-squared")(None, None, *sides)
    assert_near(squared, data[f"single/out{bits(dtype)}_gram_diversity_squared"], near(dtype))


def test_gram_diversity_by_hand_and_gradcheck():
    # Equal slots: the Gram matrix without its diagonal has two ones; orthogonal slots: none.
    slots = torch.tensor([[[1, 1], [2, 2]], [[1, 0], [0, 5]]], dtype=torch.float64)
    assert diversity(slots, "gram").item() == pytest.approx((math.sqrt(2) + 0) / 2 / 4, rel=1e-12)
    assert diversity(slots, "gram-squared").item() == pytest.approx((2 + 0) / 2 / 4, rel=1e-12)
    slots = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: diversity(x, "gram"), slots)


@pytest.mark.parametrize("form", ["gram", "gram-squared"])
def test_gram_diversity_where_nothing_is_alike_has_no_gradient(form):
    for slots in (torch.randn(2, 1, 4), torch.eye(4)[None, :3].clone()):
        slots.requires_grad_()
        loss = diversity(slots, form)
        loss.backward()
        assert loss.item() == 0
        assert (slots.grad == 0).all()
        slots.requires_grad_(False)


# ---- all of them


def test_recorded_total_of_setdiv(golden):
    data = golden("triplet_and_regularisers")
    leaves = {name: leaf(data, f"in_{name}", torch.float64) for name in ("img", "txt", "img_slots", "txt_slots")}
    images = Aggregated(leaves["img"], leaves["img_slots"])
    captions = Aggregated(leaves["txt"], leaves["txt_slots"])
    similarity = SmoothChamfer()(images.embedding, captions.embedding)
    weights = {"triplet": 1, "mmd": 0.01, "diversity": 0.01}
    total = sum(weight * LOSSES[name]()(similarity, own(6, 5), images, captions) for name, weight in weights.items())
    total.backward()
    assert_near(total, data["out64_total_hard_mmd0.01_div0.01"], 1e-7)
    for name, tensor in leaves.items():
        assert_near(tensor.grad, data[f"grad64_total_hard_mmd0.01_div0.01_{name}"], 1e-7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_embeddings_are_regularised_in_float32(dtype):
    images, captions = torch.randn(4, 3, 16).to(dtype), torch.randn(6, 3, 16).to(dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        losses = mmd(images, captions), diversity(images), diversity(images, "gram")
    whole = images.double()
    expected = mmd(whole, captions.double()), diversity(whole), diversity(whole, "gram")
    for loss, reference in zip(losses, expected, strict=True):
        assert loss.dtype == torch.float32
        assert loss.item() == pytest.approx(reference.item(), rel=1e-5, abs=1e-6)


def test_unknown_choices_are_refused():
    with pytest.raises(ValueError, match="negatives is 'hard', but must be one of hardest, all, semi-hard"):
        Triplet(negatives="hard")
    with pytest.raises(ValueError, match="reduction is 'max'"):
        Triplet(reduction="max")
    with pytest.raises(ValueError, match="kernel is 'rbf'"):
        Mmd(kernel="rbf")
    with pytest.raises(ValueError, match="form is 'determinant', but must be one of exponential, gram, gram-squared"):
        Diversity(form="determinant")
    with pytest.raises(ValueError, match="warmup is 'cosine', but must be one of step, linear"):
        Triplet(warmup="cosine")
    with pytest.raises(ValueError, match="warmup_epochs is -1, but must be at least 0"):
        Triplet(warmup_epochs=-1)


def test_mmd_of_a_gaussian_is_refused():
    vector, gaussian = Aggregated(torch.ones(2, 4)), Aggregated(Gaussian(torch.ones(2, 4), torch.ones(2, 4)))
    with pytest.raises(ValueError, match="needs vectors or sets, which the text side does not give"):
        Mmd()(None, None, vector, gaussian)


def test_registry_can_be_made_without_memory():
    for name, loss in LOSSES.items():
        with torch.device("meta"):
            made = loss(4, 7) if name == "caption-generation" else loss()
        made.to_empty(device="cpu")
