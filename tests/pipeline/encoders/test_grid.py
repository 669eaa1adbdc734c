"""Grid features against the plain torchvision network, and what bad input gets."""

import urllib.error

import numpy as np
import pytest
import torch
from encoder_contract import image_encoder, picture, refused
from PIL import Image
from safetensors.torch import load_file, save_file
from torchvision.models import get_model, get_model_weights
from torchvision.models.feature_extraction import create_feature_extractor

from xret.pipeline.errors import SampleError

FAMILIES = {
    "alexnet": (96, "features", 2),
    "convnext_tiny": (64, "features", 2),
    "densenet121": (64, "relu", 2),
    "efficientnet_b0": (64, "features", 2),
    "efficientnet_v2_s": (64, "features", 2),
    "googlenet": (64, "inception5b", 2),
    "inception_v3": (112, "Mixed_7c", 2),
    "maxvit_t": (224, "blocks", 7),
    "mnasnet0_5": (64, "layers", 2),
    "mobilenet_v3_small": (64, "features", 2),
    "regnet_x_400mf": (64, "trunk_output", 2),
    "regnet_y_400mf": (64, "trunk_output", 2),
    "resnet50": (64, "layer4", 2),
    "resnext50_32x4d": (64, "layer4", 2),
    "shufflenet_v2_x0_5": (64, "conv5", 2),
    "squeezenet1_0": (64, "features", 3),
    "swin_t": (64, "permute", 2),
    "swin_v2_t": (64, "permute", 2),
    "vgg11": (64, "features", 2),
    "vgg11_bn": (64, "features", 2),
    "vit_b_32": (64, "encoder.ln", 2),
    "wide_resnet50_2": (64, "layer4", 2),
}


@pytest.fixture(scope="module")
def resnet18():
    """A ResNet-18 whose batch norms do something."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        network = get_model("resnet18")
        for module in network.modules():
            if isinstance(module, torch.nn.BatchNorm2d):
                module.running_mean.uniform_(-0.1, 0.1)
                module.running_var.uniform_(0.5, 2)
    return network.eval()


@pytest.fixture
def file(tmp_path, resnet18):
    torch.save(resnet18.state_dict(), tmp_path / "w.pth")
    return tmp_path / "w.pth"


def plain_features(network, pixels):
    """Run a ResNet's parts one by one, on normalised pixels."""
    with torch.inference_mode():
        features = network.maxpool(network.relu(network.bn1(network.conv1(pixels))))
        for layer in (network.layer1, network.layer2, network.layer3, network.layer4):
            features = layer(features)
    return features.numpy()


def test_features_are_those_of_the_plain_network(tmp_path, file, resnet18):
    encoder = image_encoder("resnet18", file, 224)
    path = picture(tmp_path / "p.jpg", (300, 240))
    pixels, size = encoder.decode(path)
    assert size == (300, 240)
    assert pixels.dtype == torch.uint8 and pixels.shape == (3, 224, 224)
    local, global_ = encoder.encode(pixels[None])
    with Image.open(path) as image:
        prescribed = get_model_weights("resnet18").IMAGENET1K_V1.transforms()(image.convert("RGB"))
    expected = plain_features(resnet18, prescribed[None])
    assert (encoder.rows, encoder.channels, encoder.identity["layer"]) == (49, 512, "layer4")
    for y in range(7):
        for x in range(7):
            np.testing.assert_allclose(local[0, y * 7 + x], expected[0, :, y, x], atol=1e-4)
    np.testing.assert_allclose(global_[0], expected[0].mean((1, 2)), atol=1e-4)


@pytest.mark.parametrize(
    ("network", "image_size", "resize", "interpolation"),
    [("resnet18", 64, 73, "bilinear"), ("resnet18", 96, 110, "bilinear"), ("efficientnet_b0", 64, 73, "bicubic")],
)
def test_preprocessing_keeps_the_proportions_of_the_preset(network, image_size, resize, interpolation):
    made = image_encoder(network, "random:0", image_size).identity["preprocessing"]
    assert (made["resize"], made["crop"], made["interpolation"]) == (resize, image_size, interpolation)
    assert (made["mean"], made["decoder"]) == ([0.485, 0.456, 0.406], "pillow")


@pytest.mark.parametrize("size", [(64, 64), (30, 200), (500, 90), (1, 1)])
def test_any_image_becomes_a_square(tmp_path, size):
    Image.new("RGB", size, (200, 30, 90)).save(tmp_path / "p.png")
    pixels, original = image_encoder("resnet18", "random:0", 64).decode(tmp_path / "p.png")
    assert original == size
    assert torch.equal(pixels, torch.tensor([200, 30, 90], dtype=torch.uint8)[:, None, None].expand(3, 64, 64))


@pytest.mark.parametrize(("size", "side"), [((300, 240), 224), ((40, 900), 64), ((64, 64), 64)])
def test_a_whole_picture_becomes_the_square(tmp_path, file, resnet18, size, side):
    encoder, cut = (image_encoder("resnet18", file, side, whole=whole) for whole in (True, False))
    path = picture(tmp_path / "p.jpg", size)
    pixels, original = encoder.decode(path)
    assert original == size
    square = np.asarray(Image.open(path).convert("RGB").resize((side, side), Image.Resampling.BILINEAR))
    assert np.array_equal(pixels.permute(1, 2, 0).numpy(), square)
    mean, std = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
    normalised = torch.from_numpy(((square / 255 - mean) / std).astype(np.float32)).permute(2, 0, 1)
    expected = plain_features(resnet18, normalised[None])[0].mean((1, 2))
    np.testing.assert_allclose(encoder.encode(pixels[None])[1][0], expected, atol=1e-4)
    assert cut.identity != encoder.identity and cut.identity["weights"] == encoder.identity["weights"]


def test_an_image_that_cannot_be_used_is_named(tmp_path):
    encoder, torn, thin = image_encoder("resnet18", "random:0", 64), picture(tmp_path / "t.jpg"), tmp_path / "thin.png"
    torn.write_bytes(torn.read_bytes()[:900])
    Image.new("RGB", (1, 101)).save(thin)
    for path in (torn, thin, tmp_path / "absent.jpg"):
        with pytest.raises(SampleError) as caught:
            encoder.decode(path)
        assert caught.value.sample == str(path)


def test_every_form_of_the_weights_gives_one_identity(tmp_path, file, resnet18, monkeypatch):
    state = resnet18.state_dict()
    save_file(state, tmp_path / "w.safetensors")
    torch.save({"state_dict": {f"module.{k}": v for k, v in state.items()}}, tmp_path / "n.pt")
    entry = get_model_weights("resnet18").IMAGENET1K_V1
    monkeypatch.setattr(type(entry), "get_state_dict", lambda self, **_: state)
    names = [file, tmp_path / "w.safetensors", tmp_path / "n.pt", "imagenet"]
    encoders = [image_encoder("resnet18", path, 64) for path in names]
    assert all(encoder.identity == encoders[0].identity for encoder in encoders)
    pixels = torch.full((1, 3, 64, 64), 77, dtype=torch.uint8)
    assert len({encoder.encode(pixels)[0].tobytes() for encoder in encoders}) == 1


def test_without_a_network_imagenet_says_where_to_put_a_file(tmp_path, monkeypatch, capsys):
    def offline(*_, **__):
        raise urllib.error.URLError("no route to host")

    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr(torch.hub, "download_url_to_file", offline)
    sentence = r"resnet152.*no route.*`visual_weights=FILE`.*checkpoints/resnet152-"
    refused(sentence, image_encoder, "resnet152", "imagenet")
    assert capsys.readouterr().out == ""  # torch's "Downloading" would spoil what --json prints
    refused("no ImageNet weights of vit_h_14", image_encoder, "vit_h_14", "imagenet")


@pytest.mark.parametrize(
    ("network", "weights", "image_size", "sentence"),
    [
        ("resnet51", "random:0", 64, r"'resnet51' \(did you mean 'resnet\d+'\?\)"),
        ("fcn_resnet50", "random:0", 64, "there is no encoder 'fcn_resnet50'"),
        ("resnet18", "imagenett", 64, r"'imagenett'.*did you mean 'imagenet'"),
        ("resnet18", "random", 64, r"'random'.*did you mean 'random:0'"),
        ("resnet18", "random:-1", 64, "SEED"),
        ("resnet18", "", 64, "no file"),
        ("resnet18", "absent.pth", 64, "'absent.pth' are no file"),
        ("resnet18", "random:0", 32, "a single cell.*larger `image_size`"),
        ("alexnet", "random:0", 16, "cannot be loaded for images of 16 pixels"),
        ("maxvit_t", "random:0", 100, "cannot be loaded for images of 100 pixels"),
        ("vit_b_32", "random:0", 100, "cannot be loaded for images of 100 pixels"),
    ],
)
def test_names_weights_and_sizes_that_do_not_fit_are_refused(network, weights, image_size, sentence):
    refused(sentence, image_encoder, network, weights, image_size)


def test_weights_of_another_network_are_refused(file):
    refused(r"w\.pth.*do not fit 'resnet34': \d+ missing \(layer1\.2\.", image_encoder, "resnet34", file)


def test_random_weights_follow_from_the_seed_alone():
    pixels = torch.arange(64 * 64 * 3).reshape(1, 3, 64, 64).to(torch.uint8)
    before = torch.random.get_rng_state()
    first = image_encoder("resnet18", "random:0", 64)
    assert torch.equal(before, torch.random.get_rng_state())
    torch.rand(5)
    again, other = (image_encoder("resnet18", weights, 64) for weights in ("random:00", "random:9"))
    assert first.encode(pixels)[0].tobytes() == again.encode(pixels)[0].tobytes() != other.encode(pixels)[0].tobytes()
    assert first.identity == again.identity != other.identity
    assert first.identity["weights"] == "random:0"


@pytest.mark.parametrize("network", ["resnet18", "mobilenet_v2", "efficientnet_b0"])
def test_activations_of_random_weights_are_of_order_one(network, tmp_path):
    encoder = image_encoder(network, "random:0", 64)
    pixels = [encoder.decode(picture(tmp_path / f"{seed}.jpg", seed=seed))[0] for seed in range(4)]
    local, _ = encoder.encode(torch.stack(pixels))
    assert 0.1 < local.std() < 10 and np.abs(local).max() < 100


def traced_maps(name, state, layer, pixels):
    """Return a layer's output [B,C,H,W] by torchvision's own feature extraction."""
    options = {"transform_input": True} if name in ("googlenet", "inception_v3") else {}
    with torch.random.fork_rng():
        network = get_model(name, **({"aux_logits": False, "init_weights": False} if options else {}), **options).eval()
    own = network.state_dict()  # with the version of its layout, which a file does not hold
    own.update(state)
    network.load_state_dict(own)
    mean, std = (torch.tensor(v)[:, None, None] for v in ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]))
    with torch.inference_mode():
        return create_feature_extractor(network, {layer: "map"})((pixels / 255 - mean) / std)["map"]


@pytest.mark.slow
@pytest.mark.parametrize("network", FAMILIES)
def test_a_network_of_every_family(network, tmp_path):
    image_size, layer, side = FAMILIES[network]
    encoder = image_encoder(network, "random:0", image_size)
    assert (encoder.identity["layer"], encoder.rows) == (layer, side**2)
    pixels = torch.stack([encoder.decode(picture(tmp_path / f"{i}.jpg", seed=i))[0] for i in range(2)])
    local, global_ = encoder.encode(pixels)
    if not network.startswith("vit"):  # whose patches have a test of their own
        encoder.save(tmp_path / "w.safetensors")
        maps = traced_maps(network, load_file(tmp_path / "w.safetensors"), layer, pixels)
        np.testing.assert_allclose(local, maps.flatten(2).transpose(1, 2), rtol=1e-3, atol=1e-3)
    assert local.shape == (2, side**2, encoder.channels) and np.isfinite(local).all()
    np.testing.assert_allclose(local.mean(1), global_, atol=1e-4)
    assert np.abs(local[0] - local[1]).max() > 0


@pytest.mark.slow
def test_a_vision_transformer_gives_its_patches_in_order(tmp_path):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = get_model("vit_b_32", image_size=64).eval()
    torch.save(network.state_dict(), tmp_path / "w.pth")
    encoder = image_encoder("vit_b_32", tmp_path / "w.pth", 64)
    pixels = encoder.decode(picture(tmp_path / "p.jpg"))[0]
    mean, std = (torch.tensor(v)[:, None, None] for v in ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]))
    seen = []
    network.encoder.register_forward_hook(lambda module, inputs, output: seen.append(output))
    with torch.inference_mode():
        network(((pixels / 255 - mean) / std)[None])
    local, global_ = encoder.encode(pixels[None])
    np.testing.assert_allclose(local, seen[0][:, 1:].numpy(), atol=1e-4)
    np.testing.assert_allclose(global_, seen[0][:, 1:].mean(1).numpy(), atol=1e-4)


def test_real_weights_tell_real_photographs_apart(shared_data):
    photographs = sorted(shared_data("flickr8k-sample").rglob("*.jpg"))[:3]
    encoder = image_encoder("mobilenet_v2", shared_data("weights/mobilenet_v2.safetensors"), 224)
    assert (encoder.rows, encoder.channels) == (49, 1280)
    pixels = torch.stack([encoder.decode(path)[0] for path in photographs])
    local, global_ = encoder.encode(pixels)
    assert 0.1 < local.std() < 10
    mirrored = encoder.encode(pixels.flip(-1))[1]
    unit, mirror = (v / np.linalg.norm(v, axis=1, keepdims=True) for v in (global_, mirrored))
    assert (unit @ mirror.T).argmax(1).tolist() == [0, 1, 2]
