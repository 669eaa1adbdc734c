"""What xret asks of other packages: settings of Zarr, and packages that extras install."""

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import zarr

from .errors import CacheError, RunError, XretError

_PIPELINE = "zarr.core.codec_pipeline.BatchedCodecPipeline"


def require_settings() -> None:
    """Refuse settings of Zarr under which it reads or writes something else than features.

    Its fused codec pipeline has read wrong rows of sharded arrays, and nobody knows of other pipelines. Arrays on a GPU
    are none of NumPy's. All other settings are harmless.

    Raises:
        CacheError: one is set.
    """
    ours = {"codec_pipeline.path": _PIPELINE, **{key: zarr.config.defaults[0][key] for key in ("buffer", "ndbuffer")}}
    for key, expected in ours.items():
        if (found := zarr.config.get(key)) != expected:
            raise CacheError(
                f"Zarr's setting {key} is {found}, with which features may be read or written wrong; do without it, or"
                f" call zarr.config.set({{'{key}': '{expected}'}})"
            )


def require_packages(needs: str, packages: Mapping[str, str], extra: str) -> None:
    """Raise RunError where one of `packages`, modules by the names that pip knows them by, is not installed.

    Args:
        needs: what does, as ``a plot needs``.
        packages: what it needs.
        extra: of xret, which installs them.
    """
    missing = [name for name, module in packages.items() if find_spec(module) is None]
    if missing:
        raise RunError(f"{needs} {' and '.join(missing)}; install with `pip install 'xret[{extra}]'`")


def require_pyarrow(error: type[XretError], needs: str, instead: str = "") -> Any:
    """Return pyarrow, with what reads and writes Parquet and Arrow's streams.

    Args:
        error: what is raised where it is not installed.
        needs: what does, as ``Parquet needs``.
        instead: what else can be done.
    """
    try:
        import pyarrow
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError as missing:
        raise error(f"{needs} pyarrow, which is not installed: pip install 'xret[parquet]'{instead}") from missing
    return pyarrow
