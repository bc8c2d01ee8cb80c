"""Text from anywhere, made fit for one line of a terminal and for JSON."""

import os


def printable(name: str | bytes) -> str:
    r"""A file name for people and for JSON: one line, valid Unicode, and no two names look the same.

    Bytes that are not UTF-8 become `\xNN`, characters that do not print `\xNN` or `\uNNNN`, a backslash is doubled.
    """
    text = name if isinstance(name, str) else os.fsdecode(name)
    if text.isascii() and text.isprintable() and "\\" not in text:
        return text
    # Bytes that fsdecode could not read stand as surrogates; any others are no file name's, and shown by their number.
    raw = text.encode("utf-8", "surrogateescape") if _is_file_name(text) else text.encode("utf-8", "backslashreplace")
    return "".join(map(_shown, raw.replace(b"\\", b"\\\\").decode("utf-8", "backslashreplace")))


def _is_file_name(text: str) -> bool:
    return not any("\ud800" <= character < "\udc80" or "\udcff" < character <= "\udfff" for character in text)


def _shown(character: str) -> str:
    if character.isprintable():
        return character
    code = ord(character)
    if code < 0x80:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
