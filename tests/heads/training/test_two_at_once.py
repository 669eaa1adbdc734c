"""Two trainings in one process do not touch each other, nor the process."""

import threading

import pytest
import torch
from small_store import make_store
from small_trainings import assert_equal, numbers, recipe_of

from xret.heads.training.train import train

pytestmark = pytest.mark.usefixtures("one_thread")
DRAWING = ["augment.image=0.3", "adapter.words.dropout=0.3"]  # random numbers in every step


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return make_store(tmp_path_factory.mktemp("store") / "small.zarr", train=24)


def test_two_trainings_at_once_are_as_each_alone(store, tmp_path):
    def run(name, seed):
        train(store, recipe_of("vsepp", 6, *DRAWING), tmp_path / name, device="cpu", seed=seed)

    for seed in (1, 2):
        run(f"alone-{seed}", seed)
    threads = [threading.Thread(target=run, args=(f"both-{seed}", seed)) for seed in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed in (1, 2):
        assert_equal(numbers(tmp_path / f"both-{seed}"), numbers(tmp_path / f"alone-{seed}"))


def test_a_training_leaves_the_process_as_it_was(store, tmp_path):
    torch.manual_seed(5)
    before = torch.get_rng_state(), torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()
    train(store, recipe_of("pcme", 1), tmp_path / "run", device="cpu")
    after = torch.get_rng_state(), torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()
    assert torch.equal(before[0], after[0]) and before[1:] == after[1:]
