"""Writes python_repr.json: characters as Python's repr prints them.

Needs the three versions of Python; the paths are arguments: make_python_repr.py PYTHON3.11 PYTHON3.12 PYTHON3.13
"""
import json
import pathlib
import subprocess
import sys

PRINTABLE = "[chr(code).isprintable() for code in range(0x110000)]"
CODES = [0, 7, 9, 10, 13, 27, 32, 34, 39, 92, 126, 127, 128, 159, 160, 161, 173, 255, 256, 0x300, 0x301, 0x378, 0x3FF, 0x61C,
         0x1680, 0x180E, 0x200B, 0x200D, 0x2028, 0x2029, 0x202F, 0x2060, 0x20AC, 0x3000, 0x4E2D, 0xAC00, 0xD7A4, 0xE000, 0xF8FF,
         0xFE0F, 0xFEFF, 0xFFFD, 0xFFFE, 0xFFFF, 0x10000, 0x1D173, 0x1F600, 0x1F468, 0xE0001, 0xE0100, 0xF0000, 0x10FFFD,
         0x10FFFF]
TEXTS = ["it's", '"q"', "it's \"q\"", "a\\b\n\t\r", "e\u0301", "\U0001f468\u200d\U0001f469", "\u0627\u0644", "\ufeffx"]


def output_of(python, expression):
    return json.loads(subprocess.check_output([python, "-c", f"import json; print(json.dumps({expression}))"]))


def ranges(flags):
    found, start = [], None
    for code, flag in enumerate([*flags, False]):
        if flag and start is None:
            start = code
        elif not flag and start is not None:
            found.append((start, code - 1))
            start = None
    return found


oldest, *later = sys.argv[1:]
base = output_of(oldest, PRINTABLE)
printable = {"3.11": ranges(base)}
for name, python in zip(["3.12", "3.13"], later):
    changed = [before != after for before, after in zip(base, output_of(python, PRINTABLE))]
    printable[name] = ranges(changed)
recorded = {
    "printable": printable,
    "characters": output_of(oldest, f"[[code, repr(chr(code))] for code in {CODES!r}]"),
    "texts": output_of(oldest, f"[[text, repr(text)] for text in {TEXTS!r}]"),
}
path = pathlib.Path(__file__).with_name("python_repr.json")
path.write_text(json.dumps(recorded, separators=(",", ":")) + "\n")
