"""Text of pods and users on a terminal."""

import unicodedata


def printable(text: str) -> str:
    """The text without what a terminal would obey: escape sequences, other control and format characters.

    A trainer's message reaches the terminal of the cluster's administrator; each such character but a
    line's end becomes U+FFFD.
    """
    return "".join(
        "\N{REPLACEMENT CHARACTER}" if unicodedata.category(c)[0] == "C" and c != "\n" else c for c in text
    )
