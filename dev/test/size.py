#!/usr/bin/env python3
"""size.py: how large the core is to a reader, and whether lines stay within 100 columns.

    python3 dev/test/size.py           a table of the core's files, and all lines that are too long
    python3 dev/test/size.py --check   only what is over the budget, in a few lines

The core is C and CUDA at the root and under llmc/, without tests. KB of code leave out comments,
blank lines and indentation, so that neither packing lines nor dropping comments makes it smaller.
The comment share is comments (lines, or ends of lines) over lines of code.
"""
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
CODE_KB, COMMENT_SHARE, COLUMNS = 545, 0.25, 100       # the budget

CORE = re.compile(r"(?!test_)[^/]+\.(c|cu)|llmc/.+\.(c|h|cu|cuh)")
SUFFIXES = {".c", ".h", ".cu", ".cuh", ".cpp", ".md", ".py", ".sh", ".mk", ""}
# Data, results and generated pages are nobody's prose; a mutant quotes code whatever its width.
DATA = re.compile(r"LICENSE|\.git.*|dev/mutants.*|dev/ablations/.*|dev/fuzz/seeds/.*"
                  r"|dev/oracle/goldens/.*|.*/RESULTS\.md|dev/repro/results/.*|.*/?\.gitignore")


def tracked():
    """Paths of all files that belong to the project, relative to ROOT."""
    command = ["git", "ls-files", "-co", "--exclude-standard", "-z"]
    if (ROOT / ".git").exists():
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        names = [name for name in listed.stdout.split("\0") if name]
    else:
        files = (path for path in ROOT.rglob("*") if path.is_file())
        names = [path.relative_to(ROOT).as_posix() for path in files]
        names = [name for name in names if not re.match(r"(build|runs)/", name)]
    return sorted(name for name in names if (ROOT / name).is_file())


def code_lines(text):
    """The lines of C that are left without comments. Strings stay, and what looks like a comment
    in them."""
    comment_or_string = (r"//[^\n]*|/\*.*?\*/"
                         r"|(\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*')")
    kept = re.sub(comment_or_string, lambda match: match[1] or "", text, flags=re.S)
    return [line.strip() for line in kept.splitlines() if line.strip()]


def measure(text):
    """(KB of code, comments, lines of code, longest line) of a C or CUDA file."""
    lines, code = text.splitlines(), code_lines(text)
    alone = sum(bool(line.strip()) for line in lines) - len(code)
    behind = sum("//" in line and not line.strip().startswith("//") for line in lines)
    kilobytes = sum(len(line) + 1 for line in code) / 1024
    return kilobytes, alone + behind, len(code), max(map(len, lines), default=0)


def long_lines(name, text):
    """Numbers of lines that are too long. Tables of Markdown, and lines that a URL or the path of
    a link makes long, cannot be wrapped."""
    markdown = name.endswith(".md")
    numbers = []
    for number, line in enumerate(text.splitlines(), 1):
        if len(line) <= COLUMNS or markdown and line.lstrip().startswith("|"):
            continue
        if len(re.sub(r"https?://\S+|\]\([^)\s]+\)", "", line)) > COLUMNS:
            numbers.append(number)
    return numbers


def print_tables(core, wide):
    """core: name -> what measure() returns; wide: name -> what long_lines() returns."""
    print(f"{'core':32} {'code KB':>8} {'comment':>8} {'longest':>8}")
    for name, (kilobytes, comments, lines, longest) in core.items():
        print(f"{name:32} {kilobytes:8.1f} {comments / max(1, lines):8.2f} {longest:8}")
    print(f"\n{'lines too long':32} {'count':>8} numbers")
    for name, numbers in wide.items():
        shown = " ".join(map(str, numbers[:8])) + (" ..." if len(numbers) > 8 else "")
        print(f"{name:32} {len(numbers):8} {shown}")
    print()


def main():
    check = "--check" in sys.argv[1:]
    if set(sys.argv[1:]) - {"--check"}:
        sys.exit(f"error: expected nothing or --check, found {' '.join(sys.argv[1:])}")
    core, wide = {}, {}
    for name in tracked():
        suffix = pathlib.PurePath(name).suffix
        if suffix not in SUFFIXES or DATA.fullmatch(name):
            continue
        text = (ROOT / name).read_text(encoding="utf-8")
        if CORE.fullmatch(name):
            core[name] = measure(text)
        if numbers := long_lines(name, text):
            wide[name] = numbers

    kilobytes, comments, lines, _ = (sum(column) for column in zip(*core.values()))
    share, count = comments / lines, sum(map(len, wide.values()))
    if not check:
        print_tables(core, wide)
    print(f"core, {len(core)} files: {kilobytes:.1f} KB of code, comment share {share:.3f}")
    print(f"lines over {COLUMNS} columns: {count}, in {len(wide)} files")

    verdicts = (
        (kilobytes <= CODE_KB, f"at most {CODE_KB} KB of code, found {kilobytes:.1f}"),
        (share >= COMMENT_SHARE, f"a comment share of {COMMENT_SHARE}, found {share:.3f}"),
        (count == 0, f"no line over {COLUMNS} columns, found {count}"))
    for kept, budget in verdicts:
        print(f"{'ok' if kept else 'OVER'}: expected {budget}")
    failed = sum(not kept for kept, _ in verdicts)
    print(f"{len(verdicts) - failed} passed, {failed} failed")
    sys.exit(1 if check and failed else 0)


if __name__ == "__main__":
    main()
