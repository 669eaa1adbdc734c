"""Every recipe file: it says where its values come from, and it makes a head that trains and is evaluated."""

import math
import re

import pytest
from bundled_recipes import KINDS, SYSTEMS, small_settings, text_kind
from small_ablations import Stores

from xret.heads.evaluation.evaluation import evaluate
from xret.heads.model import FeatureFacts, build_model
from xret.heads.recipes.names import lineage, recipe_file, recipe_names
from xret.heads.recipes.recipe import load_recipe
from xret.heads.recipes.schema import get
from xret.heads.runs.run import Run
from xret.heads.training.train import train
from xret.pipeline.errors import RecipeError

VARIANTS = [name for name in recipe_names() if "/" in name]
SOURCE = re.compile(r"section|appendix|Table|eq\.|footnote|published code|not in the paper|not used", re.IGNORECASE)
SUMMED = {  # recalls of Pishdad et al., Tables 1 and 3, image to text and text to image; they print no sums
    ("vsepp/coco-resnet152-gru", "coco_1k"): (58.3, 86.1, 93.3, 43.7, 77.6, 87.8),
    ("vsepp/coco-resnet152-gru", "coco_5k"): (35.3, 63.3, 75.3, 23.2, 50.3, 63.5),
    ("vsepp/f30k-resnet152-gru", "f30k"): (43.7, 71.9, 82.1, 32.3, 60.9, 72.1),
    ("gaussian-vsepp/coco-resnet152-gru", "coco_1k"): (59.3, 86.8, 93.8, 45.6, 79.2, 89.1),
    ("gaussian-vsepp/coco-resnet152-gru", "coco_5k"): (34.7, 64.6, 76.6, 24.5, 52.4, 65.6),
    ("gaussian-vsepp/f30k-resnet152-gru", "f30k"): (48.8, 74.5, 83.1, 33.3, 62.4, 72.9),
    ("gaussian-vsepp/coco-resnet152-gru-finetuned", "coco_1k"): (66.4, 91.2, 96.5, 52.5, 84.6, 92.7),
    ("gaussian-vsepp/coco-resnet152-gru-finetuned", "coco_5k"): (41.4, 72.4, 82.9, 30.0, 60.4, 72.7),
    ("gaussian-vsepp/f30k-resnet152-gru-finetuned", "f30k"): (56.9, 82.5, 90.1, 41.1, 71.9, 80.3),
    ("vsrn/coco-butd-gru", "coco_1k"): (74.0, 94.3, 97.9, 60.8, 88.4, 94.1),
    ("vsrn/coco-butd-gru", "coco_5k"): (50.2, 79.6, 87.9, 37.9, 68.5, 79.4),
    ("vsrn/f30k-butd-gru", "f30k"): (70.4, 89.2, 93.7, 53.0, 77.9, 85.7),
    ("gaussian-vsrn/coco-butd-gru", "coco_1k"): (73.8, 94.4, 97.9, 61.3, 89.2, 95.2),
    ("gaussian-vsrn/coco-butd-gru", "coco_5k"): (51.1, 80.1, 89.4, 38.8, 69.1, 80.2),
    ("gaussian-vsrn/f30k-butd-gru", "f30k"): (69.2, 89.4, 94.1, 52.3, 79.3, 86.5),
    ("pcme/coco-resnet152-bigru", "coco_1k"): (68.8, 91.6, 96.7, 54.6, 86.3, 93.8),
    ("pcme/coco-resnet152-bigru", "coco_5k"): (44.2, 73.8, 83.6, 31.9, 62.1, 74.5),
}

_VSE = {  # VSE-infinity, appendix A.1; on both branches the same
    "optimizer.name": "adamw",
    "optimizer.lr": 5e-4,  # train_region.sh, train_grid.sh
    "optimizer.decay": "all",  # lib/vse.py: one group of all weights
    "optimizer.clip": 2.0,  # arguments.py
    "schedule.epochs": 25,
    "schedule.step": 15,
    "schedule.gamma": 0.1,
    "data.batch_size": 128,
    "loss.triplet.margin": 0.2,
    "loss.triplet.warmup_epochs": 1,
    "augment.image": 0.2,  # section 3.2
    "augment.text": 0.0,  # lib/datasets/image_caption.py, process_caption: masked, not dropped
}
_VSE_BIGRU = _VSE | {
    "adapter.words.ends": True,  # bigru: process_caption, <start> and <end>
    "augment.mask_words": 0.2,  # bigru: process_caption
}
_VSE_BERT = {key: value for key, value in _VSE.items() if key != "augment.text"}
_VSE_BERT |= {
    "optimizer.weight_decay": 1e-4,  # master: lib/vse.py, decay_factor
    "finetune.mask_words": 0.2,  # master: process_caption; instead of augment.text
    "finetune.text_lr": 0.1,  # master: lib/vse.py
}
_REGIONS = {"optimizer.weight_decay": 1e-2}  # bigru: lib/vse.py, AdamW without a decay, of which torch's is 1e-2
_GRIDS = {"optimizer.weight_decay": 1e-4, "augment.image_varies": True, "schedule.warmup_after": 1}  # decay_factor
_DIVE = {  # train_eval_coco.sh of DivE, options.py; SetDiv, section 4.2
    "adapter.roi.layers": "mlp-on-linear",  # --img_res_first_fc --gpo_1x1 --img_1x1_dropout 0.1
    "adapter.words.ends": True,
    "adapter.words.dropout": 0.1,
    "adapter.words.state_dropout": 0.1,
    "aggregator.image.heads": 4,
    "aggregator.image.head_dim": 512,
    "aggregator.image.dropout": 0.1,
    "aggregator.image.positions": "none",
    "aggregator.text.heads": 4,
    "aggregator.text.head_dim": 512,
    "aggregator.text.dropout": 0.1,
    "aggregator.text.positions": "circle",
    "augment.image": 0.2,
    "augment.text": 0.0,
    "augment.mask_words": 0.2,
    "optimizer.decay": "all",
    "optimizer.weight_decay": 1e-4,
    "optimizer.clip": 1.0,
    "optimizer.aggregator_lr": 0.1,
    "optimizer.image_adapter_lr": 0.1,  # --img_pie_lr_scale
    "schedule.by": "step",
    "schedule.epochs": 80,
}
_MAXMATCH = {"similarity.name": "assignment", "loss.infonce.weight": 1e-3}  # section 3.3; appendix B
DATA = "coco", "f30k"
_ENDS = {"adapter.words.ends": True}
_VSRN = _ENDS | {  # KunpengLi1994/VSRN: data.py; model.py, l2norm over dim 1 of [B, N, D]; train.py
    "aggregator.image.normalise": "regions",
    "loss.triplet.margin": 0.2,
    "optimizer.lr": 2e-4,
    "optimizer.weight_decay": 0.0,
    "schedule.step": 15,
}
_VSRN_F30K = {"aggregator.image.normalise": "regions-after"}  # model.py, f30k_precomp
_GAUSSIAN = {"loss.triplet.margin": 0.1, "schedule.step": 15}  # Pishdad et al., section 4.2
_PCME = _ENDS | {  # naver-ai/pcme: datasets/_transforms.py; train_coco.py, txt_finetune; pcme_coco.yaml
    "adapter.words.vectors_frozen": 30,
    "augment.text": 0.1,
    "optimizer.clip": 2.0,
}
_PCMEPP = {  # naver-ai/pcmepp: configs/pcmepp.yaml
    "augment.image": 0.2,
    "augment.image_varies": True,  # models/img_encoder.py
    "augment.text": 0.2,  # datasets.py; what is cached cannot be masked
    "optimizer.weight_decay": 1e-4,
    "optimizer.decay": "sides",  # engine.py, configure_optimizers: none of scalar values
    "schedule.step": 15,
    "schedule.warmup_after": 2,  # engine.py, embedding_warmup_after_freeze
    "schedule.warmup_epochs": 1.0,
    "finetune.image_lr": 0.01,
    "finetune.image_frozen": 2,
    "finetune.text_lr": 0.1,
}
_PVSE = _ENDS | {
    "loss.diversity.form": "gram",
    "loss.triplet.margin": 0.1,
}  # yalesong/pvse: data.py; loss.py, option.py
PUBLISHED = {
    "vsepp": _ENDS | {"loss.triplet.margin": 0.2, "schedule.step": 15},  # fartashf/vsepp: data.py; train.py
    **{f"vsepp/{data}-resnet152-gru{more}": _ENDS for data in DATA for more in ("", "-finetuned")},
    **{f"gaussian-vsepp/{data}-resnet152-gru{more}": _ENDS for data in DATA for more in ("", "-finetuned")},
    "vsrn": _VSRN,
    "vsrn/coco-butd-gru": _VSRN,
    "vsrn/f30k-butd-gru": _VSRN | _VSRN_F30K | {"schedule.step": 10},  # README.md, --lr_update 10
    "gaussian-vsrn/coco-butd-gru": _VSRN | _GAUSSIAN,
    "gaussian-vsrn/f30k-butd-gru": _VSRN | _VSRN_F30K | _GAUSSIAN,
    "pvse/coco-resnet152-bigru": _PVSE,
    "pcme": _PCME,
    "pcme/coco-resnet152-bigru": _PCME | {"finetune.image_frozen": 30},  # train_coco.py, img_finetune
    "pcmepp": _PCMEPP,
    **{f"scan/{data}-butd-bigru-{way}": _ENDS for data in DATA for way in ("t-i", "i-t")},  # kuanghuei/SCAN: data.py
    **dict.fromkeys(("vse-infty/coco-butd-bigru", "vse-infty/f30k-butd-bigru"), _VSE_BIGRU | _REGIONS),
    **dict.fromkeys(("vsepp/coco-butd-bigru", "vsepp/f30k-butd-bigru"), _VSE_BIGRU | _REGIONS),
    **{f"vse-infty/{data}-{maps}-bigru": _VSE_BIGRU | _GRIDS for data in DATA for maps in ("butd-grid", "resnet152")},
    **{f"vsepp/{data}-resnet152-bigru": _VSE_BIGRU | _GRIDS for data in DATA},
    **{f"{system}/{data}-butd-bert": _VSE_BERT for system in ("vse-infty", "vsepp") for data in DATA},
    **{f"{system}/{data}-wsl-bert": _VSE_BERT | _GRIDS for system in ("vse-infty", "vsepp") for data in DATA},
    **{f"vse-infty/{data}-butd-grid-bert": _VSE_BERT | _GRIDS for data in DATA},
    "setdiv/coco-butd-bigru": _DIVE | {"similarity.name": "smooth-chamfer", "loss.triplet.margin": 0.2},
    "maxmatch/coco-butd-bigru": _DIVE | _MAXMATCH | {"loss.triplet.margin": 0.3},  # appendix B of MaxMatch
    "maxmatch/f30k-butd-bigru": _DIVE | _MAXMATCH | {"loss.global-discriminative.weight": 0.05},
}
CROPS = {  # data.py of the published code of each, lib/datasets/image_caption.py of VSE-infinity
    "sides": ["vse-infty/coco-resnet152-bigru", "vse-infty/f30k-wsl-bert", "vsepp/coco-resnet152-bigru"],
    "area": [f"{system}/coco-resnet152-bigru" for system in ("setdiv", "maxmatch", "pvse", "pcme")]
    + [f"{system}/{data}-resnet152-gru-finetuned" for system in ("vsepp", "gaussian-vsepp") for data in DATA],
    "large-area": ["setdiv/coco-wsl-bert", "maxmatch/f30k-wsl-bert"],  # gpo_aug
}
WRITTEN = ["data.unit", "data.batch_size", "model.dim", "optimizer.lr", "optimizer.weight_decay", "optimizer.clip"]
WRITTEN += ["schedule.name", "schedule.epochs", "similarity.name", "aggregator.image.name", "aggregator.text.name"]
METHOD = {"name", "paper", "expected", "similarity", "loss"}  # what MaxMatch changes of SetDiv, and its margin


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    return Stores(tmp_path_factory, train=8)


@pytest.mark.parametrize("name", SYSTEMS)
def test_every_value_has_its_source(name):
    for line in recipe_file(name).read_text(encoding="utf-8").splitlines():
        assert len(line) <= 120
        assert re.fullmatch(r'( *#.*|((  )*(<<|"?[\w-]+"?):.*)?)', line), f"not indented by two spaces: {line}"
        value, _, comment = line.partition("#")
        key, _, value = value.partition(":")
        if value.strip()[:1] not in ("", "*", "&") and key.strip() not in ("name", "when", "paper", "base", "reaches"):
            assert SOURCE.search(comment), line
    text = recipe_file(name).read_text(encoding="utf-8")
    assert "published code" not in text or re.search(r"^# Published code: [\w-]+/[\w-]+", text, re.MULTILINE), name


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_fixes_its_features_and_says_what_is_trained(name):
    recipe = load_recipe(name, ["model.dim=8"])
    assert recipe.name == name
    for image, text in ((None, recipe.data.text_kind), (recipe.data.image_kind, None)):
        with pytest.raises(RecipeError, match="holds the values for"):
            build_model(recipe, _facts(image or "another"), _facts(text or "another"))
    trained = recipe.finetune.image_lr > 0 or recipe.finetune.text_lr > 0
    assert recipe.reaches == ("finetune" if trained else "cache")
    regions = "-butd-" in name and "-butd-grid-" not in name
    frames = any(data in name for data in ("msrvtt", "vatex"))
    assert recipe.data.image_kind == ("roi" if regions else "frames" if frames else "grid")
    assert recipe.data.text_kind == ("tokens" if "bert" in name else "words")
    others = {"coco": ["f30k"], "f30k": ["coco_1k", "coco_5k"]}.get(name.split("/")[1].split("-")[0], [])
    assert not set(others) & set(recipe.expected)


@pytest.mark.parametrize("name", PUBLISHED)
def test_values_are_those_of_the_paper_and_the_published_code(name):
    recipe = load_recipe(name, ["model.dim=8"]).to_dict()
    assert {key: get(recipe, key) for key in PUBLISHED[name]} == PUBLISHED[name]


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in CROPS.items() for name in names])
def test_crops_are_those_of_the_published_code(kind, name):
    assert load_recipe(name, ["model.dim=8"]).finetune.crop_and_flip == kind


@pytest.mark.parametrize("name", VARIANTS)
def test_what_decides_a_row_is_written_with_its_source_and_no_default(name):
    said = [layer.values for layer in lineage(name)]
    assert [key for key in WRITTEN if all(get(values, key) is None for values in said)] == []


@pytest.mark.parametrize(
    ("pair", "more"),
    [
        ("coco-butd-bigru", {}),
        ("coco-resnet152-bigru", {"schedule": {"step": 20}}),  # appendix B; SetDiv, appendix A: 10
        ("coco-wsl-bert", {}),
        # SetDiv, appendix A: 0.05; MaxMatch, appendix B: 0.1.
        ("f30k-butd-bigru", {"optimizer": {"aggregator_lr": 0.1, "image_adapter_lr": 0.1}}),
    ],
)
def test_maxmatch_is_setdiv_but_for_its_method(pair, more):
    ours, base = (load_recipe(f"{system}/{pair}").to_dict() for system in ("maxmatch", "setdiv"))
    base |= {block: base[block] | values for block, values in more.items()}
    assert {key for key in ours if ours[key] != base[key]} == METHOD
    terms = set(ours["loss"]) - set(base["loss"])
    assert terms - {"infonce"} == {"global-discriminative", "intra-set-divergence"}
    assert ours["loss"]["triplet"] | {"margin": 0} == base["loss"]["triplet"] | {"margin": 0}
    assert all(ours["loss"][term] == base["loss"][term] for term in ("mmd", "diversity"))


@pytest.mark.parametrize(("name", "row"), SUMMED)
def test_the_sum_of_the_papers_recalls(name, row):
    assert load_recipe(name, ["model.dim=8"]).expected[row] == pytest.approx(sum(SUMMED[name, row]))


@pytest.mark.parametrize("name", KINDS)
def test_a_recipe_trains_two_steps_and_is_evaluated(name, stores, tmp_path):
    recipe = load_recipe(name, small_settings(name))
    url = stores(recipe.data.image_kind or "grid", text_kind(recipe))
    summary = train(url, recipe, tmp_path / "run", device="cpu")
    (line,) = Run(summary.run).metrics()
    assert line["step"] == 2
    assert set(line["parts"]) == set(recipe.terms)
    assert all(math.isfinite(part) for part in line["parts"].values())
    (result,) = evaluate([summary.run], device="cpu").results
    assert 0 <= result.rsum <= 600
    sets = recipe.aggregator["image"]["name"] in ("element-slots", "pie-net", "pcme")
    assert (result.log_circular_variance is not None) == sets


def _facts(kind):
    return (FeatureFacts(kind, None, None, 11),) if kind == "words" else (FeatureFacts(kind, 5, 5),)
