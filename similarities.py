"""Similarities of image and caption embeddings: `torch.nn.Module`s that give ``[images, captions]``, larger is closer.

    >>> images, captions = torch.randn(3, 4, 256), torch.randn(5, 4, 256)  # sets of 4
    >>> SmoothChamfer(alpha=16)(images, captions).shape
    torch.Size([3, 5])

`in_blocks` compares whole galleries in bounded memory.
"""

from .heads.modules.similarity import SIMILARITIES as _PARTS
from .heads.modules.similarity import in_blocks as in_blocks
from .heads.modules.similarity.attention import CrossAttention as CrossAttention
from .heads.modules.similarity.gaussian import KL as KL
from .heads.modules.similarity.gaussian import MinKL as MinKL
from .heads.modules.similarity.gaussian import SampledDistance as SampledDistance
from .heads.modules.similarity.gaussian import Wasserstein as Wasserstein
from .heads.modules.similarity.matching import Assignment as Assignment
from .heads.modules.similarity.sets import MIL as MIL
from .heads.modules.similarity.sets import Chamfer as Chamfer
from .heads.modules.similarity.sets import Cosine as Cosine
from .heads.modules.similarity.sets import MatchProbability as MatchProbability
from .heads.modules.similarity.sets import MonteCarloMatch as MonteCarloMatch
from .heads.modules.similarity.sets import SmoothChamfer as SmoothChamfer
from .heads.modules.similarity.shared import Similarity as Similarity

# Bundled parts that do not stand above; out of sight of type checkers, which would take any name for one.
globals()["__getattr__"] = lambda name: _PARTS.class_of(name, __name__)
