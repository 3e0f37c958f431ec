"""The one exception type that users see: a mistake they can fix, said in one sentence."""


class DiffRateError(ValueError):
    """A mistake the user can fix; the message is one clear sentence."""


class UnsupportedModelError(DiffRateError):
    """A model that cannot be compressed correctly, refused when it is wrapped."""
