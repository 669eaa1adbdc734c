"""GRUs over rows of different lengths, against each sample run alone."""

import pytest
import torch
from torch import nn

from xret.heads.modules.aggregators.relations import Seq2Seq
from xret.heads.modules.recurrence import run_gru, run_packed, run_padded

LENGTHS = [3, 5, 1, 5, 2]


@pytest.fixture(params=[False, True], ids=["one direction", "both directions"])
def gru(request):
    torch.manual_seed(0)
    return nn.GRU(4, 3, batch_first=True, bidirectional=request.param)


@pytest.fixture(params=[run_packed, run_padded])
def run(request):
    return request.param


@pytest.mark.parametrize("padding", [0.0, 9.0])
def test_each_sample_is_run_as_if_it_were_alone(gru, run, padding):
    rows = torch.randn(5, 6, 4)
    for sample, length in zip(rows, LENGTHS, strict=True):
        sample[length:] = padding
    unpack, last = run(gru, rows, torch.tensor(LENGTHS))
    states = unpack()
    assert states.shape[1] == 6
    for number, length in enumerate(LENGTHS):
        alone, alone_last = gru(rows[number : number + 1, :length])
        torch.testing.assert_close(states[number, :length], alone[0])
        assert (states[number, length:] == 0).all()
        torch.testing.assert_close(last[:, number], alone_last[:, 0])


def test_a_sample_without_rows_is_one_of_its_padding(gru, run):
    rows = torch.randn(2, 3, 4)
    rows[1] = 0
    states, last = run(gru, rows, torch.tensor([3, 0]))
    torch.testing.assert_close(last[:, 1], gru(torch.zeros(1, 1, 4))[1][:, 0])
    assert states().isfinite().all()


def test_gradients_come_back_to_the_sample_they_belong_to(gru, run):
    rows = torch.randn(5, 6, 4, requires_grad=True)
    states, _ = run(gru, rows, torch.tensor(LENGTHS))
    states()[1].sum().backward()
    assert rows.grad[1].abs().sum(1).gt(0).tolist() == [True] * 5 + [False]
    assert rows.grad[[0, 2, 3, 4]].abs().max() == 0


@pytest.mark.parametrize("lengths", [[3, 0, 5, 1, 6], [2, 1, 1, 0, 4], [0, 0, 1, 0, 1]])
def test_with_padding_computed_values_and_gradients_are_the_same(gru, lengths):
    gru, rows = gru.double(), torch.randn(5, 6, 4, dtype=torch.float64)

    def values_and_gradients(run):
        gru.zero_grad()
        own = rows.clone().requires_grad_()
        states, last = run(gru, own, torch.tensor(lengths))
        made = states(), last
        sum((one * torch.linspace(-1, 2, one.numel()).view_as(one)).sum() for one in made).backward()
        return *made, own.grad, *(weight.grad.clone() for weight in gru.parameters())

    pairs = zip(values_and_gradients(run_packed), values_and_gradients(run_padded), strict=True)
    for packed, padded in pairs:
        torch.testing.assert_close(padded, packed, rtol=1e-12, atol=1e-12)


class Exported(nn.Module):
    def __init__(self, gru):
        super().__init__()
        self.gru, self.reader = gru, Seq2Seq(4, 3)

    def forward(self, rows, length):
        states, last = run_packed(self.gru, rows, length)
        return states(), last, self.reader(rows, length, None).embedding


@pytest.mark.filterwarnings("ignore")
def test_onnxruntime_gives_what_torch_does(gru, tmp_path):
    for package in ("onnxscript", "onnxruntime"):
        pytest.importorskip(package, reason=f"{package} is not here: pip install 'xret[onnx]'")
    import onnxruntime

    given = torch.randn(5, 6, 4), torch.tensor(LENGTHS)
    axes = ({0: torch.export.Dim("samples"), 1: torch.export.Dim("rows")}, {0: torch.export.Dim("samples")})
    exported = Exported(gru)
    torch.onnx.export(exported, given, tmp_path / "gru.onnx", dynamic_shapes=axes, dynamo=True, verbose=False)
    session = onnxruntime.InferenceSession(tmp_path / "gru.onnx")
    found = session.run(None, {at.name: t.numpy() for at, t in zip(session.get_inputs(), given, strict=True)})
    for ours, expected in zip(found, exported(*given), strict=True):
        torch.testing.assert_close(torch.from_numpy(ours), expected.detach())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
@pytest.mark.parametrize(("mixed", "expected"), [("bfloat16", "float32"), ("float16", "float16")])
def test_a_gpu_computes_no_gru_in_float16_unless_asked_to(gru, mixed, expected):
    gru = gru.to("cuda")
    rows = torch.randn(5, 6, 4, device="cuda")
    with torch.autocast("cuda", getattr(torch, mixed)):
        states, last = run_packed(gru, rows, torch.tensor(LENGTHS))
        assert run_gru(gru, rows)[0].dtype == states().dtype == last.dtype == getattr(torch, expected)
    if expected == "float32":
        plain, _ = run_packed(gru, rows, torch.tensor(LENGTHS))
        torch.testing.assert_close(states(), plain())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
@pytest.mark.filterwarnings("error:RNN module weights")
def test_a_gpu_gives_what_a_cpu_does_and_copies_no_weights_one_by_one(gru):
    rows, length = torch.randn(5, 6, 4), torch.tensor(LENGTHS)
    states, last = run_packed(gru, rows, length)
    expected = states(), last
    states, last = run_packed(gru.to("cuda"), rows.to("cuda"), length.to("cuda"))
    for there, here in zip((states(), last), expected, strict=True):
        torch.testing.assert_close(there.cpu(), here, rtol=0, atol=5e-3)  # products are rounded to TF32
