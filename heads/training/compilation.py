"""`torch.compile` for the parts of a head that are many small operations."""

import sys

import torch

from ..model import Model


def compile_parts(model: Model, device: torch.device) -> bool:
    """Compile both aggregators and the similarity in place; say so in a sentence where there is no compiler.

    The adapters are one matrix product or one GRU, which gain nothing. Shapes differ from batch to batch, so that the
    parts are compiled for any.

    Returns:
        Whether they are compiled.
    """
    try:
        torch.compile(lambda x: x + 1)(torch.zeros(2, device=device))
    except Exception as error:  # whatever a compiler that is missing or broken raises
        reason = str(error).strip().partition("\n")[0]
        print(f"runtime.compile is left out: there is no compiler for {device} that works ({reason}).", file=sys.stderr)
        return False
    for part in (model.image.aggregator, model.text.aggregator, model.compare):
        part.compile(dynamic=True)
    return True
