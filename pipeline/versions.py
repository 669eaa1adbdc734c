"""What xret asks of other packages: settings of Zarr, and packages that extras install."""

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from .errors import RunError, XretError

_PIPELINE = "zarr.core.codec_pipeline.BatchedCodecPipeline"


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
