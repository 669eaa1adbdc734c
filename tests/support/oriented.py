"""Pictures with an EXIF orientation, and how a viewer shows them: turned and mirrored by hand."""

import numpy as np
from PIL import Image

ORIENTATION = 0x0112


def shown(pixels, orientation):
    """Return pixels [H, W, …] as a viewer shows those of a file with this orientation (EXIF 2.3, table 6)."""
    first_row_is = {  # the side of the picture that the first row and the first column of the file are
        1: lambda p: p,  # top, left
        2: lambda p: p[:, ::-1],  # top, right
        3: lambda p: p[::-1, ::-1],  # bottom, right
        4: lambda p: p[::-1],  # bottom, left
        5: lambda p: p.swapaxes(0, 1),  # left, top
        6: lambda p: p.swapaxes(0, 1)[:, ::-1],  # right, top
        7: lambda p: p.swapaxes(0, 1)[::-1, ::-1],  # right, bottom
        8: lambda p: p.swapaxes(0, 1)[::-1],  # left, bottom
    }
    return first_row_is[orientation](pixels)


def exif(orientation):
    """Return EXIF data that say nothing else."""
    data = Image.Exif()
    data[ORIENTATION] = orientation
    return data


def save(path, pixels, orientation, **options):
    """Write pixels as they are, with an orientation."""
    Image.fromarray(np.ascontiguousarray(pixels)).save(path, exif=exif(orientation), **options)
    return path
