"""The one exception type that users see: a mistake they can fix, said in one sentence."""


class DiffRateError(ValueError):
    """A mistake the user can fix; the message is one clear sentence."""


class UnsupportedModelError(DiffRateError):
    """A model that cannot be compressed correctly, refused when it is wrapped."""


def shown(value: object) -> str:
    """A value as a sentence shows it: short, and never an integer of more digits than Python is willing to print."""
    if isinstance(value, int) and abs(value) >= 10**12:
        return "a huge number"
    return f"{value!r:.40}"
