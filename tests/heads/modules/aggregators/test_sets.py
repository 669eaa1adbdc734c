"""Element slots and PIE-Net against recorded values, and what padding, order and precision may do to the former."""

import math

import pytest
import torch
from recorded import DTYPES, assert_gradients, assert_near, bits, leaf, near

from xret.heads.modules.positions import circle_positions, grid_positions
from xret.nn import ElementSlots, PIENet

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
# Which recorded variants hold for a case: padded rows count, or not. A padded caption normalises its positions by its
# own length, which the recorded values call "ownlen".
CASES = ("image_1head", "image_4heads", "image_4x512", "text_4heads")
VARIANTS = [(case, variant) for case in CASES for variant in ("nomask", f"exclpad{'_ownlen' * (case[0] == 't')}")]


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
        positions="circle" if case.startswith("text") else "none",
    )
    weights = {}
    for name in module.state_dict():
        owner, _, kind = name.rpartition(".")
        key = NAMES[name] if name in NAMES else f"{NAMES[owner]}.{kind}"
        weights[name] = torch.tensor(data[f"{case}/w_{key}"])
    module.load_state_dict(weights)
    assert sum(key.startswith(f"{case}/w_") for key in data) == len(weights)
    return module


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("case", "variant"), VARIANTS)
def test_recorded_values(golden, case, variant, dtype):
    data = golden("set_prediction")
    module = recorded_module(data, case).to(dtype)
    leaves = {name: leaf(data, f"{case}/in_{name}", dtype) for name in ("local", "global")}
    length = torch.tensor(data[f"{case}/in_lengths"])
    if variant == "nomask":
        length = torch.full_like(length, leaves["local"].shape[1])
    rounds = []
    module.block.register_forward_hook(lambda module, inputs, output: rounds.append(output[0]))
    aggregated = module(leaves["local"], length, leaves["global"])
    for name, actual in {
        "set": aggregated.embedding,
        "slots": aggregated.slots,
        "attn": aggregated.attention,
        "slots_per_iter": torch.stack(rounds),
    }.items():
        expected = data[f"{case}/out{bits(dtype)}_{variant}_{name}"]
        assert actual.shape == expected.shape
        assert_near(actual, expected, near(dtype))
    weights = data[f"{case}/in_cotangent"]
    assert_gradients(data, variant, aggregated.embedding, leaves, dtype, f"{case}/", weights=weights)


def test_recorded_positions(golden):
    expected = torch.tensor(golden("set_prediction")["text_4heads/out64_positions"])
    positions = circle_positions(torch.zeros(2, *expected.shape, dtype=torch.float64), torch.tensor([8, 8]))
    torch.testing.assert_close(positions, expected.expand_as(positions), rtol=0, atol=1e-12)


def make(dtype=torch.float64, **parameters):
    torch.manual_seed(0)
    return ElementSlots(6, 8, **parameters).to(dtype)


def test_heads_that_do_not_divide_the_width_are_refused():
    with pytest.raises(ValueError, match="3 heads do not divide dim 8"):
        make(heads=3)


# ---- ablations ----


def sample(count=3):
    generator = torch.Generator().manual_seed(5)
    local, global_ = (torch.randn(count, *shape, generator=generator).double() for shape in [(5, 6), (8,)])
    return local, torch.tensor([5, 3, 1])[:count], global_


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
    plain.block.dropout.register_forward_hook(lambda layer, inputs, output: gathered.append(output))
    local, length, global_ = sample()
    plain(local, length, global_)
    slots = torch.stack([module.block.gru(one, module.initial_slots) for one in gathered[0]])
    slots = slots + module.block.mlp(slots)
    torch.testing.assert_close(module(local, length, global_).slots, module.norm_slots(slots))


def test_without_global_feature_the_set_is_its_slots():
    aggregated = make(global_feature=False)(*sample())
    assert torch.equal(aggregated.embedding, aggregated.slots)


def test_attention_over_inputs_is_that_of_a_transformer():
    module = make(iterations=1, heads=2, normalized_over="inputs")
    gathered = []
    module.block.dropout.register_forward_hook(lambda layer, inputs, output: gathered.append(output))
    local, length, global_ = sample()
    attention = module(local, length, global_).attention
    for b, rows in enumerate(length.tolist()):
        torch.testing.assert_close(attention[0, b].sum(2), torch.ones(2, 4, dtype=torch.float64))
        assert (attention[0, b, :, :, rows:] == 0).all()
        keep = module.norm_local(local[b, :rows])
        query = module.block.query(module.block.norm(module.initial_slots))
        heads = [x.unflatten(1, (2, 4)).transpose(0, 1) for x in (query, module.key(keep), module.value(keep))]
        expected = torch.nn.functional.scaled_dot_product_attention(*heads)
        torch.testing.assert_close(gathered[0][b], module.block.out(expected.transpose(0, 1).flatten(1)))


# ---- positions in rows and columns, and dropout


def by_hand(number, grid, width):
    """The positions of cell `number` of a map: half of the channels for its row, half for its column."""
    values = []
    for place, side in zip(divmod(number, grid[1]), grid, strict=True):
        angle = 2 * math.pi * (place + 1) / (side + 1e-6)
        for column in range(0, width // 2, 2):
            scaled = angle / 10000 ** (column / (width // 2))
            values += [math.sin(scaled), math.cos(scaled)]
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize(("cells", "sides", "grid"), [(9, (3, 3), None), (6, (2, 3), (2, 3))])
def test_positions_of_a_grid_are_those_of_its_rows_and_columns(cells, sides, grid):
    rows, some = torch.zeros(1, cells, 8, dtype=torch.float64), torch.tensor([[5, 0, 3]])
    expected = torch.stack([by_hand(number, sides, 8) for number in range(cells)])
    torch.testing.assert_close(grid_positions(rows, grid=grid), expected[None], rtol=0, atol=1e-12)
    torch.testing.assert_close(grid_positions(rows[:, :3], some, sides), expected[some], rtol=0, atol=1e-12)
    assert grid_positions(torch.zeros(1, 4, 7)).shape == (1, 4, 7)


def test_a_map_of_other_or_unknown_sides_has_no_places():
    with pytest.raises(ValueError, match="as many rows as columns, not of 6 cells"):
        make(positions="grid")(torch.zeros(1, 6, 6).double(), torch.tensor([6]), torch.zeros(1, 8).double())
    rows = torch.zeros(1, 6, 8)
    with pytest.raises(ValueError, match="not of 6 cells"):
        grid_positions(rows, grid=(2, 2))
    with pytest.raises(ValueError, match="not of 4 cells"):  # those are left of a map whose sides are unknown
        grid_positions(rows[:, :4], torch.tensor([[5, 0, 3, 1]]))


def test_positions_of_a_grid_join_the_keys_alone():
    module, plain, gathered = make(positions="grid", iterations=1), make(iterations=1), []
    local, global_, length = torch.randn(2, 4, 6).double(), torch.randn(2, 8).double(), torch.tensor([4, 4])
    module.block.dropout.register_forward_hook(lambda layer, inputs, output: gathered.append(output))
    rows, attention = module.norm_local(local), module(local, length, global_).attention[0, :, 0]
    keys, queries = (
        module.key(rows + grid_positions(local)),
        module.block.query(module.block.norm(module.initial_slots)),
    )
    torch.testing.assert_close(attention, (queries @ keys.transpose(1, 2) / 8**0.5).softmax(1))
    shares = attention / attention.sum(2, keepdim=True)
    torch.testing.assert_close(gathered[0], module.block.out(shares @ module.value(rows)), rtol=1e-5, atol=0)
    assert not torch.allclose(attention, plain(local, length, global_).attention[0, :, 0])


def test_cells_that_are_left_keep_their_places():
    module = make(positions="grid")
    local, global_, length = torch.randn(1, 9, 6).double(), torch.randn(1, 8).double(), torch.tensor([9])
    kept, grid = [0, 4, 5, 8], (3, 3)
    with torch.no_grad():
        whole = module(local, length, global_)
        scores = module(local[:, kept], torch.tensor([4]), global_, torch.tensor([kept]), grid).attention
        seen = torch.cat([local[:, kept], torch.randn(1, 2, 6).double()], 1)  # padding may stand anywhere
        padded = module(seen, torch.tensor([4]), global_, torch.tensor([[*kept, 0, 1]]), grid).attention
    # In the first round a cell's competition depends on no other cell.
    torch.testing.assert_close(scores[0], whole.attention[0][..., kept])
    torch.testing.assert_close(padded[..., :4], scores)


def test_dropout_acts_on_what_the_attention_gives_and_on_the_perceptron():
    module, plain = make(iterations=1, dropout=0.5), make(iterations=1)
    assert module.state_dict().keys() == plain.state_dict().keys()
    local, length, global_ = sample()
    assert torch.equal(module.eval()(local, length, global_).embedding, plain(local, length, global_).embedding)
    module.train()
    kept = []
    for layer in (module.block.dropout, module.block.mlp[2][1]):
        layer.register_forward_hook(lambda layer, inputs, output: kept.append((inputs[0], output)))
    slots = module(local, length, global_).slots
    for before, after in kept:
        assert 0.2 < (after == 0).double().mean() < 0.8
        torch.testing.assert_close(after[after != 0], 2 * before[after != 0])
    gathered, hidden = (after for _, after in kept)
    updated = module.initial_slots + gathered
    torch.testing.assert_close(slots, module.norm_slots(updated + module.block.mlp[3](hidden)))


def test_every_round_drops_anew():
    module, masks = make(iterations=2, dropout=0.5), []
    module.block.dropout.register_forward_hook(lambda layer, inputs, output: masks.append(output == 0))
    module(*sample())
    assert not torch.equal(*masks)


OF_PIE_NET = {"hidden": "attn1", "score": "attn2", "residual": "fc", "norm": "ln"}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("variant", ["nomask", "masked"])
@pytest.mark.parametrize("case", ["image", "text", "one_slot"])
def test_recorded_pie_net(golden, case, variant, dtype):
    data = golden("pie_head")
    leaves = {name: leaf(data, f"{case}/in_{name}", dtype) for name in ("local", "global")}
    local, global_ = leaves.values()
    length = torch.tensor(data[f"{case}/in_lengths"])
    if variant == "nomask":
        length = torch.full_like(length, local.shape[1])
    slots = len(data[f"{case}/w_attn2.weight"])
    module = PIENet(local.shape[2], global_.shape[1], slots=slots)
    owners = {name: OF_PIE_NET[name.rpartition(".")[0]] for name in module.state_dict()}
    module.load_state_dict(
        {name: torch.tensor(data[f"{case}/w_{owner}.{name.rpartition('.')[2]}"]) for name, owner in owners.items()}
    )
    aggregated = module.to(dtype)(local, length, global_)

    assert aggregated.embedding.shape == (len(local), slots, global_.shape[1])
    weights = torch.tensor(data[f"{case}/in_cotangent"]).view_as(aggregated.embedding)
    for name, actual in {
        "set": aggregated.embedding,
        "residual": aggregated.slots,
        "attn": aggregated.attention[0, :, 0].transpose(1, 2),
    }.items():
        expected = torch.tensor(data[f"{case}/out{bits(dtype)}_{variant}_{name}"])  # one slot has no axis of its own
        assert_near(actual, expected.view_as(actual), near(dtype))
    assert_gradients(data, variant, aggregated.embedding, leaves, dtype, f"{case}/", weights=weights)
