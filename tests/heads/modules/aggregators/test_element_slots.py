"""Element slots against recorded values, and what padding, order and precision may do to them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from xret.heads.modules.aggregators import ElementSlots
from xret.heads.modules.aggregators.element_slots import sinusoidal_positions

NAMES = {
    "initial_slots": "slots_init",
    "norm_local": "ln_input",
    "key": "k",
    "value": "v",
    "block.query": "q",
    "block.norm": "ln_slot_attn",
    "block.out": "attn_out",
    "block.mlp.0": "ln_mlp",
    "block.mlp.1": "mlp1",
    "block.mlp.3": "mlp2",
    "norm_slots": "ln_slots_final",
    "norm_global": "ln_global",
}
# Which recorded variant holds for a case, and whether its padded rows count. A padded caption normalises its
# positions by its own length, which the recorded values call "ownlen".
VARIANTS = [
    ("image_1head", "nomask", True),
    ("image_1head", "exclpad", False),
    ("image_4heads", "nomask", True),
    ("image_4heads", "exclpad", False),
    ("image_4x512", "nomask", True),
    ("image_4x512", "exclpad", False),
    ("text_4heads", "nomask", True),
    ("text_4heads", "exclpad_ownlen", False),
]
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5}


def assert_near(actual, expected, tolerance):
    expected = torch.as_tensor(expected)
    scale = max(expected.abs().max().item(), 1e-30)
    difference = (actual.detach().to(expected) - expected).abs().max().item()
    assert difference <= tolerance * scale, f"differs by {difference / scale:.2e} of the largest value"


def recorded_module(data, case):
    heads, head_dim, iterations = data[f"{case}/cfg_heads_dimhead_iters"].tolist()
    slots, dim = data[f"{case}/w_slots_init"].shape
    module = ElementSlots(
        data[f"{case}/in_local"].shape[2],
        dim,
        slots=slots,
        iterations=iterations,
        heads=heads,
        head_dim=head_dim,
        positions=case.startswith("text"),
    )
    weights = {}
    for name in module.state_dict():
        owner, _, kind = name.rpartition(".")
        key = NAMES[name] if name in NAMES else f"{NAMES[owner]}.{kind}"
        weights[name] = torch.tensor(data[f"{case}/w_{key}"])
    module.load_state_dict(weights)
    assert sum(key.startswith(f"{case}/w_") for key in data) == len(weights)
    return module


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(("case", "variant", "padding_counts"), VARIANTS)
def test_recorded_values(golden, case, variant, padding_counts, dtype):
    data = golden("set_prediction")
    module = recorded_module(data, case).to(dtype)
    local = torch.tensor(data[f"{case}/in_local"]).to(dtype).requires_grad_()
    global_ = torch.tensor(data[f"{case}/in_global"]).to(dtype).requires_grad_()
    length = torch.tensor(data[f"{case}/in_lengths"])
    if padding_counts:
        length = torch.full_like(length, local.shape[1])
    rounds = []
    module.block.register_forward_hook(lambda module, inputs, output: rounds.append(output[0]))

    aggregated = module(local, length, global_)
    (aggregated.embedding * torch.tensor(data[f"{case}/in_cotangent"])).sum().backward()

    bits = "64" if dtype is torch.float64 else "32"
    for name, actual in {
        "set": aggregated.embedding,
        "slots": aggregated.slots,
        "attn": aggregated.attention,
        "slots_per_iter": torch.stack(rounds),
    }.items():
        assert actual.shape == data[f"{case}/out{bits}_{variant}_{name}"].shape
        assert_near(actual, data[f"{case}/out{bits}_{variant}_{name}"], TOLERANCE[dtype])
    assert_near(local.grad, data[f"{case}/grad{bits}_{variant}_local"], TOLERANCE[dtype])
    assert_near(global_.grad, data[f"{case}/grad{bits}_{variant}_global"], TOLERANCE[dtype])


def test_recorded_positions(golden):
    expected = torch.tensor(golden("set_prediction")["text_4heads/out64_positions"])
    positions = sinusoidal_positions(torch.zeros(2, *expected.shape, dtype=torch.float64), torch.tensor([8, 8]))
    torch.testing.assert_close(positions, expected.expand_as(positions), rtol=0, atol=1e-12)


def make(dtype=torch.float64, **parameters):
    torch.manual_seed(0)
    return ElementSlots(6, 8, **parameters).to(dtype)


@settings(deadline=None, max_examples=30)
@given(
    seed=st.integers(0, 1000),
    length=st.integers(1, 6),
    padding=st.integers(0, 5),
    positions=st.booleans(),
    heads=st.sampled_from([1, 2]),
)
def test_padding_changes_nothing(seed, length, padding, positions, heads):
    module = make(positions=positions, heads=heads)
    generator = torch.Generator().manual_seed(seed)
    local = torch.randn(2, 6 + padding, 6, generator=generator, dtype=torch.float64)
    global_ = torch.randn(2, 8, generator=generator, dtype=torch.float64)
    batch = module(local, torch.tensor([length, 6]), global_)
    alone = module(local[:1, :length], torch.tensor([length]), global_[:1])
    torch.testing.assert_close(batch.embedding[:1], alone.embedding, rtol=0, atol=1e-12)
    torch.testing.assert_close(batch.attention[:, :1, ..., :length], alone.attention, rtol=0, atol=1e-12)
    assert (batch.attention[:, 0, ..., length:] == 0).all()


def test_no_gradient_reaches_padding():
    module, local = make(positions=True), torch.randn(2, 5, 6, dtype=torch.float64, requires_grad=True)
    module(local, torch.tensor([2, 5]), torch.randn(2, 8, dtype=torch.float64)).embedding.square().sum().backward()
    assert (local.grad[0, 2:] == 0).all()
    assert (local.grad[0, :2] != 0).any()
    assert (local.grad[1] != 0).all()


def test_order_of_rows_matters_only_with_positions():
    local, global_ = torch.randn(2, 5, 6, dtype=torch.float64), torch.randn(2, 8, dtype=torch.float64)
    length, reverse = torch.tensor([5, 5]), local.flip(1)
    plain, placed = make(), make(positions=True)
    torch.testing.assert_close(plain(reverse, length, global_).embedding, plain(local, length, global_).embedding)
    assert not torch.allclose(placed(reverse, length, global_).embedding, placed(local, length, global_).embedding)


def test_permuted_slots_permute_the_set():
    module = make()
    local, global_, length = torch.randn(2, 5, 6).double(), torch.randn(2, 8).double(), torch.tensor([5, 3])
    before = module(local, length, global_).embedding
    with torch.no_grad():
        module.initial_slots.copy_(module.initial_slots[[2, 0, 3, 1]])
    torch.testing.assert_close(module(local, length, global_).embedding, before[:, [2, 0, 3, 1]])


def test_attention_adds_up_to_one_over_the_slots():
    aggregated = make(slots=3, iterations=2, heads=4)(
        torch.randn(2, 5, 6).double(), torch.tensor([5, 2]), torch.randn(2, 8).double()
    )
    assert aggregated.attention.shape == (2, 2, 4, 3, 5)
    total = aggregated.attention.sum(3)
    torch.testing.assert_close(total[:, 0], torch.ones_like(total[:, 0]))
    torch.testing.assert_close(total[:, 1, :, :2], torch.ones_like(total[:, 1, :, :2]))


def test_sample_without_rows_is_finite():
    module = make(torch.float32, positions=True)
    local = torch.randn(1, 3, 6, requires_grad=True)
    embedding = module(local, torch.tensor([0]), torch.randn(1, 8)).embedding
    embedding.sum().backward()
    assert embedding.isfinite().all()
    assert (local.grad == 0).all()


def test_rounds_share_one_block():
    few, many = make(iterations=1), make(iterations=9)
    assert few.state_dict().keys() == many.state_dict().keys()
    assert not torch.equal(
        few(torch.ones(1, 2, 6).double(), torch.tensor([2]), torch.ones(1, 8).double()).slots,
        many(torch.ones(1, 2, 6).double(), torch.tensor([2]), torch.ones(1, 8).double()).slots,
    )


@pytest.mark.parametrize("autocast", [True, False])
def test_bfloat16_stays_near(autocast):
    exact, rough = make(torch.float64, positions=True), make(torch.float32, positions=True)
    local, global_, length = torch.randn(4, 7, 6), torch.randn(4, 8), torch.tensor([7, 5, 1, 7])
    expected = exact(local.double(), length, global_.double()).embedding
    if not autocast:
        rough, local, global_ = rough.bfloat16(), local.bfloat16(), global_.bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        embedding = rough(local, length, global_).embedding
    # Eight bits of mantissa, through four rounds: a few percent of the largest value.
    assert_near(embedding, expected, 0.06)


def test_head_width():
    assert make(heads=2).key.weight.shape == (8, 6)
    assert make(heads=2, head_dim=5).key.weight.shape == (10, 6)
    with pytest.raises(ValueError, match="3 heads do not divide dim 8"):
        make(heads=3)
    with pytest.raises(ValueError, match="iterations is 0"):
        make(iterations=0)


# ---- ablations ----

ABLATIONS = [{"initial": "gaussian"}, {"update": "gru"}, {"global_feature": False}, {"normalized_over": "inputs"}]


def sample(count=3):
    generator = torch.Generator().manual_seed(5)
    local, global_ = (torch.randn(count, *shape, generator=generator).double() for shape in [(5, 6), (8,)])
    return local, torch.tensor([5, 3, 1])[:count], global_


def test_ablations_are_four_different_modules():
    found = [make().eval()(*sample()).embedding, *(make(**one).eval()(*sample()).embedding for one in ABLATIONS)]
    assert all(not torch.allclose(a, b) for i, a in enumerate(found) for b in found[:i])


def test_random_slots_are_new_in_training_and_fixed_in_evaluation():
    module = make(initial="gaussian")
    local, length, global_ = (x[:1].expand(3, *x.shape[1:]) for x in sample())
    draws = module(local, length, global_).embedding
    assert not torch.allclose(draws[0], draws[1])
    assert not torch.allclose(draws, module(local, length, global_).embedding)
    assert not torch.allclose(draws[:, 0], draws[:, 1])

    module.eval()
    fixed = module(local, length, global_).embedding
    torch.testing.assert_close(fixed[0], fixed[1])
    assert torch.equal(fixed, module(local, length, global_).embedding)
    torch.manual_seed(99)
    other = ElementSlots(6, 8, initial="gaussian").double()
    other.load_state_dict(module.state_dict())
    assert torch.equal(fixed, other.eval()(local, length, global_).embedding)


def test_random_slots_have_the_learned_mean_and_deviation():
    slots = ElementSlots(6, 8, slots=500, initial="gaussian").gaussian_slots
    with torch.no_grad():
        slots.mean.fill_(3)
        slots.log_std.fill_(-1)
    for drawn in (slots(40), slots.eval()(1)):
        assert drawn.mean().item() == pytest.approx(3, abs=0.05)
        assert drawn.std().item() == pytest.approx(0.3679, abs=0.03)
    drawn.sum().backward()
    assert slots.mean.grad.abs().sum() > 0
    assert slots.log_std.grad.abs().sum() > 0


def test_gru_update_is_a_gru_over_what_each_slot_gathers():
    plain, module = make(iterations=1), make(iterations=1, update="gru")
    module.load_state_dict(plain.state_dict(), strict=False)
    gathered = []
    plain.block.out.register_forward_hook(lambda layer, inputs, output: gathered.append(output))
    local, length, global_ = sample()
    plain(local, length, global_)
    slots = torch.stack([module.block.gru(one, module.initial_slots) for one in gathered[0]])
    slots = slots + module.block.mlp(slots)
    torch.testing.assert_close(module(local, length, global_).slots, module.norm_slots(slots))


def test_without_global_feature_the_set_is_its_slots():
    module = make(global_feature=False)
    local, length, global_ = sample()
    aggregated = module(local, length, global_)
    assert torch.equal(aggregated.embedding, aggregated.slots)
    assert torch.equal(aggregated.embedding, module(local, length, 7 * global_).embedding)
    assert not any(name.startswith("norm_global") for name in module.state_dict())


def test_attention_over_inputs_is_that_of_a_transformer():
    module = make(iterations=1, heads=2, normalized_over="inputs")
    gathered = []
    module.block.out.register_forward_hook(lambda layer, inputs, output: gathered.append(inputs[0]))
    local, length, global_ = sample()
    attention = module(local, length, global_).attention
    for b, rows in enumerate(length.tolist()):
        torch.testing.assert_close(attention[0, b].sum(2), torch.ones(2, 4, dtype=torch.float64))
        assert (attention[0, b, :, :, rows:] == 0).all()
        keep = module.norm_local(local[b, :rows])
        query = module.block.query(module.block.norm(module.initial_slots))
        heads = [x.unflatten(1, (2, 4)).transpose(0, 1) for x in (query, module.key(keep), module.value(keep))]
        expected = torch.nn.functional.scaled_dot_product_attention(*heads)
        torch.testing.assert_close(gathered[0][b], expected.transpose(0, 1).flatten(1))


@pytest.mark.parametrize("parameter", ["initial", "update", "normalized_over"])
def test_refuses_unknown_ablations(parameter):
    with pytest.raises(ValueError, match=f"ElementSlots: {parameter} is 'nothing', but must be one of"):
        make(**{parameter: "nothing"})
