"""`xret eval`: what it prints, and that what it offers is what there is."""

import json

import pytest
import torch
from captioned_store import make_captioned_store
from click.testing import CliRunner
from small_store import make_store

from xret.cli.eval import eval_, format_table
from xret.heads.evaluation import PROTOCOLS, evaluate
from xret.heads.recipe import load_recipe
from xret.heads.training import train

SETTINGS = ["model.dim=16", "data.batch_size=16", "adapter.words.word_dim=8", "schedule.epochs=1"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tensors this small are slower on several threads
    folder = tmp_path_factory.mktemp("eval")
    train(make_store(folder / "small.zarr"), load_recipe("vsepp", SETTINGS), folder / "run", device="cpu")
    yield str(folder / "run")
    torch.set_num_threads(threads)


def printed(*arguments):
    return CliRunner().invoke(eval_, [*arguments, "--device", "cpu"], catch_exceptions=False).stdout


def test_the_command_prints_the_table(run):
    result = evaluate([run], device="cpu")
    lines = printed(run).splitlines()
    assert lines[0] == f"{run} on {result['store']}"
    assert lines[1:] == format_table(result["results"][0]).splitlines()
    assert lines[1] == (
        "split test, protocol full: 12 images, 30 captions (2.50 an image), 0 skipped, ties pessimistic"
    )
    expected = result["results"][0]
    for line, way in zip(lines[3:5], ("image_to_text", "text_to_image"), strict=True):
        numbers = [float(number) for number in line.split()[3:]]
        assert numbers == pytest.approx([expected[way][name] for name in ("R@1", "R@5", "R@10", "medr")], abs=0.05)
    assert lines[5] == f"RSUM {expected['rsum']:.2f}, mean recall {expected['rsum'] / 6:.2f}"
    assert json.loads(printed(run, "--json")) == result


def test_plausible_matches_on_a_small_file_in_the_published_form(run, tmp_path):
    store = make_captioned_store(tmp_path / "coco.zarr", captions=2)
    images = [{"id": 500 + 7 * number} for number in range(12)]
    shown = [{"image_id": image["id"], "category_id": 1 + image["id"] % 3, "segmentation": []} for image in images]
    content = {"images": images, "categories": [{"id": 1}, {"id": 2}, {"id": 3}], "annotations": shown}
    (tmp_path / "instances_val2014.json").write_text(json.dumps(content))
    options = ["--store", store, "--protocol", "pmrp", "--annotations", str(tmp_path / "instances_val2014.json")]
    lines = printed(run, *options).splitlines()
    assert lines[2].split() == ["PMRP", *["zeta", "0", "zeta", "1", "zeta", "2"]]
    # Two classes of one image each differ in two places: with zeta 2 everything matches everything.
    for line in lines[3:5]:
        pmrp, *zetas = (float(number) for number in line.split()[3:])
        assert zetas[2] == 100
        assert zetas[0] == zetas[1] < 100
        assert pmrp == pytest.approx(sum(zetas) / 3, abs=0.01)
    assert len(lines) == 5


def test_the_protocols_are_those_there_are():
    (option,) = (parameter for parameter in eval_.params if parameter.name == "protocol")
    assert option.type.choices == ("auto", *PROTOCOLS)
