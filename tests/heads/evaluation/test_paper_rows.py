"""The papers' rows against the manifests of their data sets."""

from importlib.resources import files

import yaml

from xret.heads.evaluation.paper_rows import ROWS


def test_a_row_is_of_the_test_split_and_a_protocol_of_its_data_set():
    for row in ROWS.values():
        manifest = yaml.safe_load((files("xret.data_manifests") / f"{row.dataset}.yaml").read_text("utf-8"))
        assert row.images in (None, manifest["counts"]["test"])
        assert row.protocol in manifest.get("protocols", ["full"])
