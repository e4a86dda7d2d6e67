"""debian.py: two corpora of English for get.py from packages of Debian and Ubuntu: prose (manuals
and a book of essays) and a dictionary.

apt-get downloads the packages into a folder of ours, with its caches there too; nothing is
installed, and root is not needed. No file of a package is unpacked: dpkg-deb writes a package's
files to a pipe as one tar stream, in which the wanted names are read. A package's links, paths and
modes therefore reach nothing. Markup, code and tables go, paragraphs stay, and each page or entry
is a document: a line of JSON. Documents are ordered by a hash of their text, so that any part of
the corpus is a sample of all of it, the last tenth too.
"""
import gzip
import hashlib
import html.parser
import json
import os
import re
import subprocess
import tarfile
import zlib

import hub
from vocabulary import Refusal

SMALLEST = 200                                             # characters of a page of prose
LARGEST = 1 << 28                                          # bytes of a file of a package
# Names of packages without a version, the same in Debian and Ubuntu. {package: (files in it, the
# dependency that has them if not itself, the licence of the text)}
PROSE = {
    "anarchism": (r"doc/anarchism/html/[^/]*\.html", None, "GPL-2+"),
    "debian-handbook": (r"html/en-US/[^/]*\.html", None, "GPL-2+ or CC-BY-SA-3.0"),
    "debian-policy": (r"policy\.html/[^/]*\.html|doc/debian-policy/[^/]*\.html", None, "GPL-2+"),
    "debian-reference-en": (r"debian-reference/[^/]*\.en\.html", None, "GPL-2+"),
    "developers-reference": (r"developers-reference/[^/]*\.html", None, "GPL-2"),
    "git-doc": (r"doc/git-doc/.*\.html", None, "GPL-2"),
    "perl-doc": (r"/pod/[^/]*\.pod", None, "GPL-1+ or Artistic"),
    "postgresql-doc": (r"/html/[^/]*\.html", r"postgresql-doc-\d+", "PostgreSQL"),
    "python3-doc": (r"/html/.*\.html", r"python3\.\d+-doc", "PSF-2"),
}
DICTIONARY = {"dict-gcide": (r"dictd/gcide\.(?:dict\.dz|index)", None, "GPL-2+")}
CORPORA = {"prose": PROSE, "dictionary": DICTIONARY}
# sha256 of each text as it is in Debian 12
KNOWN = {
    "prose": "568b099183d22216f89fe1f79ccea8e4796ed15405b24e1e874c1cb6f5b804d7",
    "dictionary": "c0ce86c99d048bb291c9a1e53156bdf1cf4e6076d3fcce85714407b22a7350f6",
}
# pages that are lists
LISTS = re.compile(r"/(?:genindex|py-modindex|search|changelog|contents|bookindex|release-|"
                   r"index\.|perl5\d+delta|perltoc|perlmodlib)[^/]*$")


# ---- packages

def command(words, folder):
    """The output of apt-get or dpkg-deb, and what it said; None where it failed."""
    try:
        done = subprocess.run(words, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True,
                              env=dict(os.environ, LC_ALL="C"))
    except FileNotFoundError:
        raise Refusal(f"expected {words[0]}, of Debian, Ubuntu and their like, found none\n"
                      "  -> elsewhere other datasets: python3 data/get.py --help") from None
    said = done.stderr.decode(errors="replace").strip()
    return (None if done.returncode else done.stdout), said


def refuse_package(package, said):
    """Says why apt-get brought no package."""
    lines = [line for line in said.splitlines() if line.startswith("E:")] or said.splitlines()[-1:]
    found = "; ".join(lines[:3]) or "no package and no word"
    way = "the same command continues with a network (proxy: Acquire in /etc/apt/apt.conf.d)"
    if re.search(r"Unable to locate|no installation candidate|Can't select", said):
        way = ("as root: apt-get update, with the component main (Ubuntu: universe) in "
               "/etc/apt/sources.list")
    elif re.search(r"enough free space|No space left", said):
        way = "with disk space the same command continues; or another --out"
    raise Refusal(f"{package}: expected the package from apt-get, found: {found}\n  -> {way}")


def download(package, folder):
    """The path of a package's file, after apt-get has brought it."""
    kept = [name for name in os.listdir(folder)
            if name.startswith(package + "_") and name.endswith(".deb")]
    if not kept:
        cache = os.path.abspath(folder)
        out, said = command(["apt-get", "download", "-q", "-o", f"Dir::Cache={cache}", "-o",
                             "Dir::Cache::pkgcache=", "-o", "Dir::Cache::srcpkgcache=", package],
                            folder)
        kept = [name for name in os.listdir(folder)
                if name.startswith(package + "_") and name.endswith(".deb")]
        if out is None or not kept:
            refuse_package(package, said)
    return os.path.join(folder, sorted(kept)[-1])


def field(path, name):
    out, said = command(["dpkg-deb", "-f", os.path.abspath(path), name], None)
    if out is None:
        damaged(path, said)
    return out.decode(errors="replace").strip()


def damaged(path, said):
    os.remove(path)
    raise Refusal(f"{os.path.basename(path)}: expected a whole package, found: "
                  f"{said.splitlines()[-1] if said else 'less'}\n"
                  "  -> it is removed: the same command brings it again")


def resolve(package, dependency, folder):
    """The file of a package, or of the one among its dependencies that has the text."""
    path = download(package, folder)
    found = dependency and re.search(rf"(?<![\w.-]){dependency}(?![\w.-])", field(path, "Depends"))
    if dependency and not found:
        raise Refusal(f"{package}: expected a dependency {dependency}, found "
                      f"{field(path, 'Depends') or 'none'}\n"
                      "  -> another release of Debian or Ubuntu; report it")
    return download(found[0], folder) if found else path


def members(path, wanted):
    """Yields (name, bytes) of a package's plain files whose name ends in the pattern."""
    wanted = re.compile(f"(?:{wanted})$")
    process = subprocess.Popen(["dpkg-deb", "--fsys-tarfile", os.path.abspath(path)],
                               stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                               stderr=subprocess.DEVNULL)
    problem = None
    with process:
        try:
            with tarfile.open(fileobj=process.stdout, mode="r|") as archive:
                for member in archive:
                    if member.isreg() and member.size <= LARGEST and wanted.search(member.name):
                        yield member.name, archive.extractfile(member).read()
            process.stdout.read()
        except (tarfile.TarError, EOFError, OSError) as error:
            problem = str(error)
        finally:
            process.stdout.close()
    if problem or process.returncode:
        damaged(path, problem or f"dpkg-deb ended with {process.returncode}")


# ---- text of pages

class Page(html.parser.HTMLParser):
    """The paragraphs of an HTML page. A page that marks its main part (Sphinx, DocBook) gives that
    alone; `skip` and `main` count open tags of the name that began them."""

    BREAKS = frozenset("p div section h1 h2 h3 h4 h5 h6 li dt dd tr blockquote br hr td th".split())
    SKIPPED = frozenset("script style pre head nav table svg math form".split())
    MARKS = re.compile(r"\b(?:headerlink|docnav|sphinxsidebar|related|footer|navheader|navfooter|"
                       r"toc|toctree-wrapper|indexterm|screen|programlisting|highlight|banner|"
                       r"listingblock|sig)\b")
    VOID = frozenset("br hr img meta link input area base col embed source track wbr".split())

    def __init__(self, has_main):
        super().__init__(convert_charrefs=True)
        self.parts, self.skip, self.main = [], None, None if has_main else ("", 1)

    def handle_starttag(self, tag, attributes):
        named = {name: value or "" for name, value in attributes}
        if tag in self.BREAKS:
            self.parts.append("\n\n")
        if tag in self.VOID:
            return
        if self.skip:
            self.skip = (self.skip[0], self.skip[1] + (tag == self.skip[0]))
        elif tag in self.SKIPPED or self.MARKS.search(
                f"{named.get('class', '')} {named.get('id', '')}"):
            self.skip = (tag, 1)
        if self.main:
            self.main = (self.main[0], self.main[1] + (tag == self.main[0]))
        elif named.get("role") == "main":
            self.main = (tag, 1)

    def handle_startendtag(self, tag, attributes):
        if tag in self.BREAKS:
            self.parts.append("\n\n")

    def handle_endtag(self, tag):
        if tag in self.BREAKS:
            self.parts.append("\n\n")
        for name in ("skip", "main"):
            open_tag = getattr(self, name)
            if open_tag and tag == open_tag[0]:
                setattr(self, name, (tag, open_tag[1] - 1) if open_tag[1] > 1 else None)

    def handle_data(self, data):
        if self.main and not self.skip:
            self.parts.append(data.replace("\n", " "))


def decode(data):
    """UTF-8, or else Latin-1, which any bytes are; without control characters."""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = data.decode("latin-1")
    text = text.replace("\r\n", "\n")
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", "", text)


def paragraphs(text):
    """Text with single spaces, its paragraphs an empty line apart."""
    found = (re.sub(r"\s+", " ", part).strip() for part in re.split(r"\n\s*\n", text))
    return "\n\n".join(part for part in found if part)


def html_text(data):
    text = decode(data)
    page = Page('role="main"' in text)
    page.feed(text)
    page.close()
    return paragraphs("".join(page.parts))


def pod_text(data):
    """Perl's manual: paragraphs that begin with white space are code, =begin to =end another
    format; B<...>, C<< ... >> and their like keep what is inside."""
    kept, other = [], False
    for part in re.split(r"\n[ \t]*\n", decode(data)):
        word, _, rest = part.lstrip("\n").partition(" ")
        if word in ("=begin", "=for"):
            other = word == "=begin"
        elif word.startswith("=end"):
            other = False
        elif not other and word.startswith("=") and word.rstrip("1234") in ("=head", "=item"):
            kept.append(rest)
        elif not other and not part.lstrip("\n").startswith(("=", " ", "\t")):
            kept.append(part)
    text, before = "\n\n".join(kept), None
    while text != before:
        before = text
        text = re.sub(r"[XZ]<[^<>]*>", "", text)
        text = re.sub(r"L<(?:([^<>|]*)\|)?([^<>]*)>", lambda m: m[1] or m[2], text)
        text = re.sub(r"E<(\w+)>", lambda m: {
            "lt": "\1", "gt": "\2", "verbar": "|", "sol": "/"}.get(m[1], ""), text)
        text = re.sub(r"[BCFIS](?:<<+ ([^<>]*?(?:[<>][^<>]+?)*?) >+>|<([^<>]*)>)",
                      lambda m: m[1] if m[1] is not None else m[2], text)
    return paragraphs(text.replace("\1", "<").replace("\2", ">"))


def pages(path, wanted):
    """The texts of a package's pages."""
    for name, data in members(path, wanted):
        if not LISTS.search(name):
            text = pod_text(data) if name.endswith(".pod") else html_text(data)
            if len(text) >= SMALLEST:
                yield text


# ---- entries of a dictionary

def number(text):
    """dictd's numbers, in base 64."""
    digits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
    value = 0
    for digit in text:
        value = value * 64 + digits.index(digit)
    return value


def entries(path, wanted):
    """The texts of a dictionary in dictd's format: an index of places in a compressed text."""
    files = {name.rsplit(".", 1)[-1]: data for name, data in members(path, wanted)}
    if set(files) != {"dz", "index"}:
        raise Refusal(f"{os.path.basename(path)}: expected a text and its index, found "
                      f"{', '.join(files) or 'neither'}\n  -> another release; report it")
    try:
        text, places = gzip.decompress(files["dz"]), set()
        for line in files["index"].splitlines():
            headword, place, length = line.decode(errors="replace").split("\t")[:3]
            if not headword.startswith("00"):
                places.add((number(place), number(length)))
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise Refusal(f"{os.path.basename(path)}: expected a dictionary of dictd's, found: {error}"
                      "\n  -> another release; report it") from None
    for place, length in sorted(places):
        entry = decode(text[place:place + length]).strip()
        entry = re.sub(r"[{}]|\n +\[(?:1913 Webster|WordNet|PJC|Webster)[^\]]*\]", "", entry)
        if entry:
            yield entry


# ---- corpora

def write_corpus(corpus, folder, parts):
    """CORPUS.jsonl from its packages, and CORPUS.txt with their versions and licences."""
    texts, sources = {}, []
    for package, (wanted, dependency, licence) in CORPORA[corpus].items():
        path = resolve(package, dependency, parts)
        name, version, size = (os.path.basename(path).split("_")[0], field(path, "Version"), 0)
        for text in (entries if corpus == "dictionary" else pages)(path, wanted):
            data = text.encode()
            texts[hashlib.sha256(data).digest()] = data
            size += len(data)
        if not size:
            raise Refusal(f"{name} {version}: expected text in files {wanted}, found none\n"
                          "  -> another release of Debian or Ubuntu; report it")
        sources.append(f"{name} {version}: {size} bytes, {licence}")
        print(f"{corpus}: {sources[-1]}", flush=True)
    lines = (json.dumps({"text": texts[key].decode()}, ensure_ascii=False).encode() + b"\n"
             for key in sorted(texts))
    data = b"".join(lines)
    digest = hashlib.sha256(data).hexdigest()
    if digest != KNOWN[corpus]:
        print(f"warning: {corpus}: expected the text of Debian 12, sha256 {KNOWN[corpus][:16]}, "
              f"found {digest[:16]}: packages of another release\n"
              "  -> losses on it compare with each other, less so with published ones")
    hub.write_whole(os.path.join(folder, corpus + ".txt"), ("\n".join(sources) + "\n").encode())
    hub.write_whole(os.path.join(folder, corpus + ".jsonl"), data)


def bring(folder):
    """Brings the texts that are missing; packages stay until all are there. Yields (corpus,
    path)."""
    parts = os.path.join(folder, hub.PARTS)
    for corpus in CORPORA:
        path = os.path.join(folder, corpus + ".jsonl")
        if not os.path.exists(path):
            os.makedirs(parts, exist_ok=True)
            write_corpus(corpus, folder, parts)
        yield corpus, path
    hub.remove_parts(folder)
