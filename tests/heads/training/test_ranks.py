"""Two processes train what one does."""

import os
import socket
import sys
import traceback

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from small_store import make_store

from xret.heads.ablation.ablation import ablate
from xret.heads.ablation.plan import plan_variation
from xret.heads.recipes.recipe import load_recipe
from xret.heads.runs.run import Run
from xret.heads.training.finetuning.finetuning import finetune
from xret.heads.training.ranks import ALONE, Ranks, joined_ranks
from xret.heads.training.training import train
from xret.pipeline.errors import RecipeError, RunError

pytestmark = pytest.mark.usefixtures("one_thread")

SMALL = ["model.dim=16", "data.batch_size=10", "adapter.words.word_dim=8", "optimizer.lr=1", "schedule.epochs=1"]
HEADS = [f"aggregator.{side}.head_dim=16" for side in ("image", "text")]


def on_ranks(count, work):
    """Run `work()` in so many processes that find each other as torchrun's do; return their exit codes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = []
    for rank in range(count):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                os.environ.update(
                    TORCHELASTIC_RUN_ID="test",
                    MASTER_ADDR="127.0.0.1",
                    MASTER_PORT=str(port),
                    RANK=str(rank),
                    LOCAL_RANK=str(rank),
                    WORLD_SIZE=str(count),
                )
                work()
                code = 0
            except BaseException:
                traceback.print_exc(file=sys.__stderr__)
            finally:
                os._exit(code)
        children.append(child)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


CASES = {
    "setdiv": ["loss.triplet.warmup_epochs=1", "augment.image=0.2", "augment.text=0.2", *HEADS],
    "setdiv-in-parts": ["data.chunk=2", "loss.triplet.warmup_epochs=1", *HEADS],
    "setdiv-on-several-sets": [
        "data.image=[grid, roi]",
        "data.text=[words, states]",
        "adapter.roi.layers=linear",
        "augment.text=0.2",
        *HEADS,
    ],
    "scan": ["optimizer.lr=0.01"],  # its loss is a sum
    "pcmepp": [],  # weights in the loss
}


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_train_what_one_does(tmp_path, case, monkeypatch):
    # Adam takes a step of full length where a gradient is nothing but rounding.
    monkeypatch.setattr("torch.optim.AdamW", lambda groups, lr, **_: torch.optim.SGD(groups, lr=lr))
    # Three batches, of which the last has fewer samples; 23 images in batches of 10 leave 3.
    kinds = {"image": ("grid", "roi"), "text": ("words", "tokens")} if "several" in case else {}
    url = make_store(tmp_path / "small.zarr", train=23, val=4, **kinds)
    name = case.partition("-")[0]
    sampled = ["data.unit=image"] if name == "pcmepp" else []
    recipe = load_recipe(name, [*SMALL, *CASES[case], *sampled])
    train(url, recipe, tmp_path / "one", device="cpu")
    assert on_ranks(2, lambda: train(url, recipe, tmp_path / "two", device="cpu")) == [0, 0]
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    for key, weights in one.items():
        torch.testing.assert_close(two[key], weights, rtol=0, atol=1e-6, msg=key)
    (line,), (other,) = (Run(tmp_path / name).metrics() for name in ("one", "two"))
    assert other["parts"] == pytest.approx(line["parts"], rel=1e-4)
    assert other["step"] == line["step"] >= 2


def test_every_sample_has_one_rank():
    for count in (1, 2, 3, 5):
        for items in range(1, 12):
            shares = [Ranks(number, count).share(items) for number in range(count)]
            assert [row for first, last in shares for row in range(first, last)] == list(range(items))
            assert max(last - first for first, last in shares) <= -(-items // count)


def test_rows_of_all_ranks_and_their_gradients():
    """Two samples on three ranks: one has none, and its stand-in gets no gradient."""

    def work():
        with joined_ranks("cpu") as (ranks, device):
            assert (ranks.count, device.type) == (3, "cpu")
            first, last = ranks.share(2)
            mine = torch.full((max(last - first, 1), 2), float(ranks.number), requires_grad=True)
            rows = ranks.gather(mine, 2)
            owners = [number for number in range(3) for _ in range(*Ranks(number, 3).share(2))]
            assert rows.tolist() == [[float(owner)] * 2 for owner in owners]
            weights = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
            (rows * weights).sum().backward()
            expected = weights[first:last].tolist() if last > first else [[0.0, 0.0]]
            assert mine.grad.tolist() == expected
            shared, whole = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(()))
            shared.grad, whole.grad = torch.tensor([1.0, ranks.number]), torch.tensor(3.0)
            ranks.sum_gradients([shared], [whole])
            assert shared.grad.tolist() == [3, 3]
            assert whole.grad.item() == pytest.approx(3)
            assert ranks.agree(float(ranks.number + 7), device) == 7
            torch.manual_seed(4)
            before = torch.rand(1)
            with ranks.own_draws(device):
                own = torch.rand(1)
            assert own.item() != before.item()  # what a step has drawn is not drawn again
            common = torch.rand(1)
            drawn = [torch.zeros(2) for _ in range(3)]
            dist.all_gather(drawn, torch.cat([own, common]))
            assert len({row[0].item() for row in drawn}) == 3
            assert len({row[1].item() for row in drawn}) == 1

    assert on_ranks(3, work) == [0, 0, 0]


def test_one_process_is_alone():
    with joined_ranks("cpu") as (ranks, _):
        assert ranks is ALONE
    assert ranks.first
    assert not dist.is_initialized()


def test_batch_normalisation_is_refused(tmp_path):
    url = make_store(tmp_path / "roi.zarr", train=8, val=4, image="roi")
    recipe = load_recipe("setdiv", [*SMALL, *HEADS])

    def work():
        with pytest.raises(RecipeError, match=r"^torchrun embeds a batch in parts, .* needs it whole"):
            train(url, recipe, tmp_path / "run", device="cpu")

    assert on_ranks(2, work) == [0, 0]
    assert not (tmp_path / "run").exists()


def test_a_folder_that_is_there_is_refused_by_every_rank(tmp_path):
    def work():
        with pytest.raises(RunError, match="exists; take another --out"):
            train("nowhere.zarr", load_recipe("vsepp"), tmp_path, device="cpu")

    assert on_ranks(2, work) == [0, 0]


def test_what_knows_nothing_of_ranks_refuses_torchrun(monkeypatch, tmp_path):
    monkeypatch.setattr("torch.distributed.is_torchelastic_launched", lambda: True)
    with pytest.raises(RunError, match=r"^fine-tuning runs in one process; start it without torchrun$"):
        finetune(tmp_path, tmp_path / "out")
    with pytest.raises(RunError, match=r"^an ablation runs in one process"):
        ablate(str(tmp_path), plan_variation("vsepp", ["model.dim=8,16"]), tmp_path / "out")
    assert not (tmp_path / "out").exists()
