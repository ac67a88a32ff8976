"""The exception tree.

    EaglekitError
    ├── InputError        a request or an option that cannot be carried out; nothing was computed
    │   └── TreeError     a draft tree that is not a tree
    ├── TargetError       a target model that cannot be found, read or supported
    │   └── UnsupportedModelError   a family that speculative tree decoding cannot serve
    ├── HeadError         a draft head that cannot be read, or does not fit the target
    ├── CacheError        the files kept on disk: broken download, corrupted cache, full disk
    └── DataError         a training or prompt file; names the file and the line

Every message says what is wrong, what was found, what was expected, and what to do about it. The command line prints
the message on one line and exits with 2.
"""

from __future__ import annotations


class EaglekitError(Exception):
    """Base of every error that eaglekit raises on purpose."""


class InputError(EaglekitError, ValueError):
    """A request or option that cannot be carried out; nothing was computed."""


class TreeError(InputError):
    """A draft tree that is not a tree; names the node."""


class TargetError(EaglekitError):
    """A target model that cannot be found or read."""


class UnsupportedModelError(TargetError):
    """A model family that tree decoding cannot serve."""


class HeadError(EaglekitError):
    """A draft head that cannot be read, or does not fit the target."""


class CacheError(EaglekitError):
    """Files kept on disk: a broken download, a corrupted cache, a full disk."""


class DataError(EaglekitError):
    """A training or prompt file that cannot be used; names the file and the line."""
