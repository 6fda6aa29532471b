"""Counts in messages: ``1 pod runs``, ``2 pods run``."""


def counted(count: int, noun: str, verb: str = "") -> str:
    """The count with its noun, and with what these do, in the singular or the plural."""
    one = count == 1
    return f"{count} {noun}{'' if one else 's'}" + (f" {verb}{'s' if one else ''}" if verb else "")
