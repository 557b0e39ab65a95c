"""The examiner of gradient penalties: is somebody's penalty the one it is meant to be?"""

from hoglib.penalties._check._examine import check

__all__ = ["check"]
