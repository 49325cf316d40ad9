"""Pictures that a prompt holds, as a person names them: a size, or a file that has one."""

from __future__ import annotations

import re
from pathlib import Path

from duoka.base.files import why
from duoka.errors import UsageError

_SIZE = re.compile(r"([1-9][0-9]{0,5})[xX×]([1-9][0-9]{0,5})", re.ASCII)
_LONGEST = 16384
_MOST_PIXELS = 2**26
_HINT = "write its width and height in pixels, as 1120x1120, or name a file"


def size(text: str) -> tuple[int, int]:
    """Width and height of a picture, in pixels.

    Examples
    --------
    >>> size("1120x560")
    (1120, 560)
    """
    match = _SIZE.fullmatch(text)
    width, height = (int(match[1]), int(match[2])) if match else _size_of(Path(text))
    if max(width, height) > _LONGEST or width * height > _MOST_PIXELS:
        raise UsageError(
            f"a picture of {width}x{height} is too large: at most {_LONGEST} pixels a side, and "
            f"{_MOST_PIXELS} in all",
            hint="give it the size that it has when it is sent to the model",
        )
    return width, height


def _size_of(file: Path) -> tuple[int, int]:
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(file) as picture:
            return picture.size
    except UnidentifiedImageError:
        problem = "it is no picture that is known here"
    except (OSError, ValueError) as error:
        problem = why(error)
    except (SyntaxError, Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        problem = str(error)  # of a damaged file, and of a huge picture
    raise UsageError(f"the picture {str(file)!r} can't be read: {problem}", hint=_HINT)
