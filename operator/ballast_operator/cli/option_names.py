"""Names of command-line options in place of the settings that messages of ``ballast_policies`` name."""

from collections.abc import Mapping


def with_option(message: str, options: Mapping[str, str]) -> str:
    """``message`` with the setting that it begins with replaced by its option.

    Args:
        message: ``"round_seconds: 0 s must be positive"``; unchanged if it begins with no setting.
        options: setting -> option, where the option is not ``--round-seconds`` for ``round_seconds``.
    """
    field, colon, rest = message.partition(":")
    if not colon or not field.isidentifier():
        return message
    return f"{options.get(field, '--' + field.replace('_', '-'))}:{rest}"
