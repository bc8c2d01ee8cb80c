"""Text from anywhere, made fit for one line of a terminal and for JSON."""

import os


def printable(name: str | bytes) -> str:
    r"""A file name for people and for JSON: one line, valid Unicode, and no two names look the same.

    Bytes that are not UTF-8 become `\xNN`, characters that do not print `\xNN` or `\uNNNN`, a backslash is doubled.
    """
    text = name if isinstance(name, str) else os.fsdecode(name)
    if text.isascii() and text.isprintable() and "\\" not in text:
        return text
    return "".join(map(_shown, os.fsencode(text).replace(b"\\", b"\\\\").decode("utf-8", "backslashreplace")))


def _shown(character: str) -> str:
    if character.isprintable():
        return character
    code = ord(character)
    if code < 0x80:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
