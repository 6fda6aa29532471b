"""Messages of ``ballast_policies`` name settings; a command line shows the options that set them."""

from collections.abc import Mapping


def with_option(message: str, options: Mapping[str, str]) -> str:
    """``message`` with the setting that it begins with replaced by its option.

    Args:
        message: ``"round_seconds: 0 s must be positive"``; returned as it is if it begins with no setting.
        options: setting -> option, where the option is not ``--round-seconds`` for ``round_seconds``.
    """
    field, colon, rest = message.partition(":")
    if not colon or not field.isidentifier():
        return message
    return f"{options.get(field, '--' + field.replace('_', '-'))}:{rest}"
