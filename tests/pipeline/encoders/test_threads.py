"""Loading is alone with torch; encoders of several threads run at the same time, and nothing of the process changes."""

import os
import random
import sys
import threading

import torch
from encoder_contract import image_encoder
from small_checkpoints import save_image_model

from xret.pipeline.encoders.threads import alone, encoding


def test_loading_waits_for_those_that_encode():
    found = []

    def load():
        with alone():
            found.append("loaded")

    with encoding("cpu"), encoding("cpu"):
        thread = threading.Thread(target=load, daemon=True)
        thread.start()
        thread.join(0.2)
        assert found == []
    thread.join(120)
    assert found == ["loaded"]


def test_other_threads_use_torch_while_an_encoder_loads():
    """Reading threads call torchvision's transforms, which are modules, and a user may train a head."""
    calls, errors, ended = [], [], threading.Event()

    def call():
        part = torch.nn.Linear(2, 2)
        try:
            while not (calls and ended.is_set()):
                calls.append(part(torch.ones(1, 2)))
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    try:
        image_encoder("mobilenet_v3_small", "random:0", 64)
    finally:
        ended.set()
        thread.join()
    assert not errors


def test_the_host_process_stays_as_it_was(tmp_path):
    def state():
        modes = torch.is_grad_enabled(), torch.get_default_dtype(), torch.backends.cudnn.benchmark
        drawn = torch.get_rng_state().tolist(), random.getstate()
        return torch.get_num_threads(), *modes, *drawn, sys.stdout, dict(os.environ)

    folder = save_image_model(tmp_path / "vit", "vit-classifier")  # whose pooler is drawn
    before = state()
    image_encoder(f"hf:{folder}")
    encoder = image_encoder("mobilenet_v3_small", "random:0", 64)
    with encoding("cpu"):
        assert torch.get_num_threads() == before[0]
        encoder.encode(torch.zeros(1, 3, 64, 64, dtype=torch.uint8))
    assert state() == before
