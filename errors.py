"""What xret raises. Every message is one sentence: what is wrong, where, and what to do."""

from .pipeline.errors import CacheError as CacheError
from .pipeline.errors import DeviceError as DeviceError
from .pipeline.errors import EncoderError as EncoderError
from .pipeline.errors import ManifestError as ManifestError
from .pipeline.errors import NotFinite as NotFinite
from .pipeline.errors import OutOfMemory as OutOfMemory
from .pipeline.errors import OutputError as OutputError
from .pipeline.errors import QueryError as QueryError
from .pipeline.errors import RecipeError as RecipeError
from .pipeline.errors import RunError as RunError
from .pipeline.errors import SampleError as SampleError
from .pipeline.errors import StoreError as StoreError
from .pipeline.errors import VectorsError as VectorsError
from .pipeline.errors import XretError as XretError
