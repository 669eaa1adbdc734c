"""The page about SLURM holds: parts of an array job join to one store, and jobs of dask-jobqueue fill one."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from small_extraction import SMALL, files

from xret.pipeline.extraction.extraction import extract
from xret.pipeline.store import FeatureCache
from xret.pipeline.store.inspect import verify

PAGE = (Path(__file__).parents[3] / "docs/how-to/slurm.md").read_text(encoding="utf-8")
ENCODER = "--visual resnet18 --visual-weights random:0 --image-size 64 --text words --batch-size 4"


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


@pytest.mark.slow
def test_an_array_job_gives_the_features_of_a_single_extraction(manifest, tiny_dataset, tmp_path):
    task, join = (
        f'xret() {{ "{sys.executable}" -m xret.cli "$@"; }}\nset -e\n{block}'.replace(
            "coco --data-root DIR", str(tmp_path / "tiny/tiny.yaml")
        ).replace("--encoder hf:openai/clip-vit-base-patch32", ENCODER)
        for block in blocks("bash")
    )
    for number in range(3):
        of = {"SLURM_ARRAY_TASK_ID": str(number), "PATH": "/usr/bin:/bin"}
        subprocess.run(["bash", "-c", task], env=of, cwd=tmp_path, check=True, capture_output=True)
    subprocess.run(["bash", "-c", join], cwd=tmp_path, check=True, capture_output=True)  # it verifies the store
    extract(manifest, tmp_path / "here.zarr", SMALL)
    ours, theirs = (FeatureCache.open(tmp_path / name) for name in ("coco.zarr", "here.zarr"))
    rows = np.arange(theirs.images)
    np.testing.assert_allclose(ours.image_set().local(rows), theirs.image_set().local(rows), atol=2e-3)
    rows = np.arange(theirs.captions)
    assert np.array_equal(ours.caption_set().token(rows), theirs.caption_set().token(rows))
    assert files(tmp_path / "coco.zarr").keys() == files(tmp_path / "here.zarr").keys()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning", "ignore:.*:FutureWarning")
def test_jobs_of_dask_jobqueue_fill_a_store(manifest, tmp_path, monkeypatch):
    jobqueue = pytest.importorskip("dask_jobqueue", reason="dask-jobqueue is not here: pip install dask-jobqueue")
    monkeypatch.setattr(jobqueue, "SLURMCluster", pytest.importorskip("dask_jobqueue.local").LocalCluster)
    monkeypatch.chdir(tmp_path)
    (program,) = (block for block in blocks("python") if "SLURMCluster" in block)
    given = (
        f'"{manifest.images.parent / "tiny.yaml"}", "coco.zarr", visual_weights="random:0", image_size=64, text="words"'
    )
    program = program.replace('"coco", "coco.zarr", data_root="DIR"', f"{given}, batch_size=4").replace("50", "18")
    exec(compile(program, "slurm.md", "exec"), {"__name__": "__main__"})
    assert verify("coco.zarr").ok
    extract(manifest, tmp_path / "here.zarr", SMALL)
    assert files(tmp_path / "coco.zarr") == files(tmp_path / "here.zarr")
